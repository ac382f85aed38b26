"""Training: one job a run, one rule a dataset, because a rule names its checkpoints."""

for name in DATASETS:

    rule:
        name:
            f"train_{name}"
        input:
            data=f"{RESULTS}/data/{name}.npz",
            subset=f"{RESULTS}/subsets/{{run}}.npz",
            code=code("train"),
        output:
            **{stage: checkpoint("{run}", stage) for stage in stages(name)},
            metrics=f"{RESULTS}/metrics/{{run}}.csv",
            timing=timing("train", "{run}"),
        log:
            log_file("train", "{run}"),
        wildcard_constraints:
            run=rf"{name}_seed\d+",
        cache: True
        conda:
            ENVIRONMENT
        threads: DATASETS[name]["training"].get("threads", 1)
        resources:
            gpu=GPUS_PER_JOB,
            mem_mb=3000,
        params:
            architecture=DATASETS[name]["architecture"],
            training={
                k: v for k, v in DATASETS[name]["training"].items() if k != "threads"
            },
            seed=lambda wildcards: int(wildcards.run.split("_seed")[1]),
            # Where a killed training finds its way back; no output, so that Snakemake leaves it alone.
            unfinished=lambda wildcards: f"{RESULTS}/unfinished/{wildcards.run}",
            device=DEVICE,
            lock=LOCK_HASH,
        script:
            "../scripts/train.py"


rule accuracies:
    """The accuracies of every run at its evaluated steps."""
    input:
        metrics=[
            f"{RESULTS}/metrics/{run}.csv" for name in DATASETS for run in runs(name)
        ],
        code=code("accuracies"),
    output:
        table=f"{RESULTS}/tables/accuracies.csv",
        latex=f"{RESULTS}/tables/accuracies.tex",
    log:
        log_file("accuracies"),
    conda:
        ENVIRONMENT
    params:
        runs=[run for name in DATASETS for run in runs(name)],
        steps={name: DATASETS[name]["training"]["steps"] for name in DATASETS},
    script:
        "../scripts/accuracies.py"


TARGETS += [f"{RESULTS}/tables/accuracies.csv"]
