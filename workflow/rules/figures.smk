"""Every figure by one rule: this table says which notebook draws it from what.

A notebook is told its inputs by the names given here, `preset`, and what `parameters` adds. What it writes is described
in curvature_gap/notebook_run.py. To add a figure, add a notebook and a line.
"""

PAPER = "Figures of the paper"
BEYOND = "Beyond the paper"


def figure_entry(notebook, category, title, parameters=None, **inputs):
    return {
        "notebook": f"notebooks/{notebook}.ipynb",
        "category": category,
        "title": title,
        "inputs": inputs,
        "parameters": {"preset": PRESET, **(parameters or {})},
    }


def dataset_record(dataset):
    return f"{RESULTS}/data/{dataset}.json"


def metrics(dataset):
    return [f"{RESULTS}/metrics/{run}.csv" for run in runs(dataset)]


def hessian_entries(dataset, init, trained):
    """Return the two heat maps of a dataset's first seed, under these names."""
    run = runs(dataset)[0]
    about = {"data": dataset_record(dataset), "metrics": f"{RESULTS}/metrics/{run}.csv"}
    category = PAPER if dataset == "mnist" else BEYOND
    settings = {"run": run, "batch_size": DATASETS[dataset]["hessian"]["batch_size"]}
    return {
        init: figure_entry(
            "fig03",
            category,
            f"Hessian entries at initialisation ({dataset})",
            settings,
            hessian=hessian(run, "init"),
            data=about["data"],
        ),
        trained: figure_entry(
            "fig04",
            category,
            f"Hessian entries after training ({dataset})",
            settings,
            hessian=hessian(run, "trained"),
            **about,
        ),
    }


FIGURES = {
    "fig01": figure_entry(
        "fig01", PAPER, "Overview: the loss gap and the curvature of a block"
    ),
    "fig02": figure_entry("fig02", PAPER, "The post-norm vision transformer"),
}
for name in HESSIAN_DATASETS:
    names = (
        ("fig03", "fig04")
        if name == "mnist"
        else (f"figx_hessian_{name}_init", f"figx_hessian_{name}_trained")
    )
    FIGURES |= hessian_entries(name, *names)

FIGURES["fig05"] = figure_entry(
    "fig05",
    PAPER,
    "Norms of parameters and Hessian blocks over training",
    {"batch_size": DATASETS["mnist"]["hessian"]["batch_size"]},
    dynamics=f"{RESULTS}/tables/dynamics.csv",
    data=dataset_record("mnist"),
    metrics=metrics("mnist"),
)


def steps_shown():
    """Return up to four steps of the first 1000, log-spaced, whose whole Hessian is there."""
    steps = sorted(
        step
        for step in [0, *DATASETS["mnist"]["training"].get("checkpoint_steps", [])]
        if step <= 1000
    )
    return (
        [steps[round(i * (len(steps) - 1) / 3)] for i in range(4)]
        if len(steps) > 4
        else steps
    )


def first_steps(notebook, what):
    """Return one of FIG-7 to FIG-11, of the first MNIST run."""
    run = runs("mnist")[0]
    steps = steps_shown()
    stage = {step: f"step_{step:05d}" if step else "init" for step in steps}
    return figure_entry(
        notebook,
        PAPER,
        f"{what} during the first 1000 training steps",
        {
            "run": run,
            "steps": steps,
            "batch_size": DATASETS["mnist"]["hessian"]["batch_size"],
        },
        dynamics=f"{RESULTS}/tables/dynamics.csv",
        checkpoints=[checkpoint(run, stage[step]) for step in steps],
        hessians=[hessian(run, stage[step]) for step in steps],
        data=dataset_record("mnist"),
    )


FIGURES["fig07"] = first_steps("fig07", "Queries")
FIGURES["fig08"] = first_steps("fig08", "Keys")
FIGURES["fig09"] = first_steps("fig09", "Values")
FIGURES["fig10"] = first_steps("fig10", "LayerNorm")
FIGURES["fig11"] = first_steps("fig11", "Feed-forward part")


# Figures whose inputs no rule makes.
WAITING = {"fig05", "fig07", "fig08", "fig09", "fig10", "fig11"}
FIGURES = {name: entry for name, entry in FIGURES.items() if name not in WAITING}


def figure_of(wildcards):
    return FIGURES[wildcards.figure]


def figure_code(wildcards):
    """Return the package files that a notebook imports, and those that run it."""
    notebook = ROOT / figure_of(wildcards)["notebook"]
    return sorted(
        {
            *workflow_support.package_files(notebook, ROOT / "src", start=ROOT),
            *code("figure"),
        }
    )


rule figure:
    input:
        unpack(lambda wildcards: figure_of(wildcards)["inputs"]),
        notebook=lambda wildcards: figure_of(wildcards)["notebook"],
        code=figure_code,
    output:
        pdf=f"{RESULTS}/figures/{{figure}}.pdf",
        png=report(
            f"{RESULTS}/figures/{{figure}}.png",
            caption="../report/figure.rst",
            category=lambda wildcards: figure_of(wildcards)["category"],
            labels=lambda wildcards: {
                "figure": wildcards.figure,
                "shows": figure_of(wildcards)["title"],
            },
        ),
        caption=f"{RESULTS}/figures/{{figure}}.txt",
        notebook=f"{RESULTS}/notebooks/{{figure}}.ipynb",
    log:
        log_file("figure", "{figure}"),
    wildcard_constraints:
        figure="|".join(FIGURES),
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=1500,
    params:
        title=lambda wildcards: figure_of(wildcards)["title"],
        inputs=lambda wildcards: list(figure_of(wildcards)["inputs"]),
        parameters=lambda wildcards: figure_of(wildcards)["parameters"],
    script:
        "../scripts/figure.py"


TARGETS += [
    f"{RESULTS}/figures/{name}.{suffix}"
    for name in FIGURES
    for suffix in ("pdf", "png")
]
