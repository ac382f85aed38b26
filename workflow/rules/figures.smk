"""Every figure by one rule: this table says which notebook draws it from what.

A notebook is told its inputs by the names given here, `preset`, and what `parameters` adds. What it writes is described
in curvature_gap/notebook_run.py. To add a figure, add a notebook and a line.
"""

PAPER = "Figures of the paper"
BEYOND = "Beyond the paper"


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

if "mnist" in having("dynamics"):
    FIGURES["fig05"] = figure_entry(
        "fig05",
        PAPER,
        "Norms of parameters and Hessian blocks over training",
        {"batch_size": DATASETS["mnist"]["hessian"]["batch_size"]},
        dynamics=table("dynamics"),
        data=dataset_record("mnist"),
        metrics=metrics("mnist"),
    )
    FIGURES["fig07"] = first_steps("fig07", "Queries")
    FIGURES["fig08"] = first_steps("fig08", "Keys")
    FIGURES["fig09"] = first_steps("fig09", "Values")
    FIGURES["fig10"] = first_steps("fig10", "LayerNorm")
    FIGURES["fig11"] = first_steps("fig11", "Feed-forward part")

# CIFAR-100 first, as in the paper; one run each.
CONVERGENCE = [name for name in ("cifar100", "mnist") if name in having("increments")]
if CONVERGENCE:
    models = [runs_of("increments", name)[0] for name in CONVERGENCE]
    about_models = {
        "data": [dataset_record(name) for name in CONVERGENCE],
        "metrics": [f"{RESULTS}/metrics/{run}.csv" for run in models],
    }
    FIGURES["fig06"] = figure_entry(
        "fig06",
        PAPER,
        "The change of the loss by one more batch",
        {"runs": models},
        increments=table("increments"),
        fits=table("increment_fits"),
        **about_models,
    )
    FIGURES["fig12"] = figure_entry(
        "fig12",
        PAPER,
        "Assumption A1",
        {"runs": models},
        assumption_a1=table("assumption_a1"),
        **about_models,
    )
if "mnist" in having("increments"):
    run = runs_of("increments", "mnist")[0]
    FIGURES["figx_sample_size"] = figure_entry(
        "figx_sample_size",
        BEYOND,
        "How many samples a tolerance needs",
        {"run": run},
        sample_size=table("sample_size"),
        data=dataset_record("mnist"),
        metrics=f"{RESULTS}/metrics/{run}.csv",
    )
if "mnist" in having("spectrum"):
    FIGURES["figx_spectrum"] = figure_entry(
        "figx_spectrum",
        BEYOND,
        "Eigenvalues of the exact Hessian",
        {"dataset": "mnist", "batch_size": DATASETS["mnist"]["hessian"]["batch_size"]},
        spectrum=table("spectrum"),
        summary=table("spectrum_summary"),
        data=dataset_record("mnist"),
        metrics=[
            f"{RESULTS}/metrics/{run}.csv" for run in runs_of("spectrum", "mnist")
        ],
    )
if "mnist" in having("curvature_vs_data"):
    FIGURES["figx_curvature_vs_data"] = figure_entry(
        "figx_curvature_vs_data",
        BEYOND,
        "Curvature against the amount of data",
        {"batch_size": DATASETS["mnist"]["hessian"]["batch_size"]},
        curvature=table("curvature_vs_data"),
        exponents=table("curvature_exponents"),
        data=dataset_record("mnist"),
    )
if "mnist" in having("hessian"):
    FIGURES["figx_seed_claims"] = figure_entry(
        "figx_seed_claims",
        BEYOND,
        "In how many seeds the claims on blocks hold",
        {"dataset": "mnist"},
        shares=table("seed_claim_shares"),
        data=dataset_record("mnist"),
        metrics=metrics("mnist"),
    )
    FIGURES["figx_published"] = figure_entry(
        "figx_published",
        BEYOND,
        "Our Hessian blocks beside the published figure",
        comparison=table("published_comparison"),
        data=dataset_record("mnist"),
    )
    FIGURES["figx_bounds"] = figure_entry(
        "figx_bounds",
        BEYOND,
        "Exact norms and all bounds",
        bounds=table("bounds"),
        data=dataset_record("mnist"),
    )
if "mnist" in having("sensitivity"):
    FIGURES["figx_sensitivity"] = figure_entry(
        "figx_sensitivity",
        BEYOND,
        "What the claim at initialisation depends on",
        shares=table("sensitivity_mnist_shares"),
        data=dataset_record("mnist"),
    )
# Measured by `make bench`, outside the presets.
BENCHMARKS = "expected/bench/benchmarks.csv"
if (ROOT / BENCHMARKS).is_file():
    FIGURES["figx_benchmark"] = figure_entry(
        "figx_benchmark",
        BEYOND,
        "How long an exact Hessian takes",
        benchmarks=BENCHMARKS,
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
