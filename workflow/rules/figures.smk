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
