"""Exact Hessians on the fixed batch, at initialisation and after training, and the norms of their blocks."""

HESSIAN_DATASETS = [name for name in DATASETS if "hessian" in DATASETS[name]]
HESSIAN_RUNS = [run for name in HESSIAN_DATASETS for run in runs(name)]


rule exact_hessian:
    """Both stages of a run in one job: importing torch costs more than a small Hessian."""
    input:
        data=dataset_file,
        batch=hessian_batch,
        init=checkpoint("{run}", "init"),
        trained=checkpoint("{run}", "trained"),
        code=code("exact_hessian"),
    output:
        init=hessian("{run}", "init"),
        trained=hessian("{run}", "trained"),
        norms=f"{RESULTS}/block_norms/{{run}}.csv",
        timing=timing("exact_hessian", "{run}"),
    log:
        log_file("exact_hessian", "{run}"),
    cache: True
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        gpu=GPUS_PER_JOB,
        mem_mb=3500,
    params:
        run=lambda wildcards: wildcards.run,
        hessian=hessian_settings,
        architecture=lambda wildcards: DATASETS[dataset_of(wildcards.run)][
            "architecture"
        ],
        device=DEVICE,
        lock=LOCK_HASH,
    script:
        "../scripts/exact_hessian.py"


# Later files add the steps between.
BLOCK_NORM_TABLES = [f"{RESULTS}/block_norms/{run}.csv" for run in HESSIAN_RUNS]


rule block_norms:
    input:
        lambda wildcards: BLOCK_NORM_TABLES,
        code=code("concatenate"),
    output:
        table=f"{RESULTS}/tables/block_norms.csv",
        latex=f"{RESULTS}/tables/block_norms.tex",
    log:
        log_file("block_norms"),
    conda:
        ENVIRONMENT
    params:
        n_tables=lambda wildcards: len(BLOCK_NORM_TABLES),
    script:
        "../scripts/concatenate.py"


rule architectures:
    """TAB-1, with parameter counts computed from the models."""
    input:
        code=code("architectures"),
    output:
        table=f"{RESULTS}/tables/tab01_architectures.csv",
        latex=f"{RESULTS}/tables/tab01_architectures.tex",
    log:
        log_file("architectures"),
    conda:
        ENVIRONMENT
    params:
        architectures={name: DATASETS[name]["architecture"] for name in DATASETS},
    script:
        "../scripts/architectures.py"


TARGETS += [
    f"{RESULTS}/tables/{table}.csv" for table in ("block_norms", "tab01_architectures")
]


rule published_comparison:
    """Ours against the block means read off the published figure, at initialisation; reported, never tuned to."""
    input:
        norms=f"{RESULTS}/tables/block_norms.csv",
        published="paper/published_blocks_init.csv",
        code=code("published_comparison"),
    output:
        table=f"{RESULTS}/tables/published_comparison.csv",
        latex=f"{RESULTS}/tables/published_comparison.tex",
    log:
        log_file("published_comparison"),
    conda:
        ENVIRONMENT
    script:
        "../scripts/published_comparison.py"


TARGETS += [f"{RESULTS}/tables/published_comparison.csv"]
