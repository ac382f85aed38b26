"""What is measured on trained models: dynamics, loss increments, A1, seeds, spectra, curvature against data."""

DYNAMICS_RUNS = [run for name in having("dynamics") for run in runs(name)]

for name in having("dynamics"):
    # The first run keeps whole matrices at a few steps; the others have the same job without them.
    for first, of_runs in ((True, runs(name)[:1]), (False, runs(name)[1:])):
        if not of_runs:
            continue
        whole_steps = DATASETS[name]["dynamics"]["whole_steps"] if first else []

        rule:
            name:
                f"dynamics_{name}" + ("_first" if first else "")
            input:
                **{stage: checkpoint("{run}", stage) for stage in stages(name)},
                data=f"{RESULTS}/data/{name}.npz",
                batch=hessian_batch,
                code=code("dynamics"),
            output:
                **{
                    step_stage(step): hessian("{run}", step_stage(step))
                    for step in whole_steps
                },
                table=f"{RESULTS}/dynamics/{{run}}.csv",
                norms=f"{RESULTS}/block_norms/{{run}}_steps.csv",
                timing=timing("dynamics", "{run}"),
            log:
                log_file("dynamics", "{run}"),
            wildcard_constraints:
                run="|".join(of_runs),
            cache: True
            conda:
                ENVIRONMENT
            threads: 1
            resources:
                gpu=GPUS_PER_JOB,
                mem_mb=3500,
            params:
                run=lambda wildcards: wildcards.run,
                seed=seed_of,
                steps=dynamics_steps(name),
                whole_steps=whole_steps,
                batch_size=DATASETS[name]["hessian"]["batch_size"],
                architecture=DATASETS[name]["architecture"],
                device=DEVICE,
                lock=LOCK_HASH,
            script:
                "../scripts/dynamics.py"


BLOCK_NORM_TABLES += [f"{RESULTS}/block_norms/{run}_steps.csv" for run in DYNAMICS_RUNS]


rule dynamics_table:
    """FIG-5, FIG-7 to FIG-11: norms of parameters and of their Hessian blocks, step by step, every seed."""
    input:
        expand(f"{RESULTS}/dynamics/{{run}}.csv", run=DYNAMICS_RUNS),
        code=code("concatenate"),
    output:
        table=f"{RESULTS}/tables/dynamics.csv",
        latex=f"{RESULTS}/tables/dynamics.tex",
    log:
        log_file("dynamics_table"),
    conda:
        ENVIRONMENT
    params:
        n_tables=len(DYNAMICS_RUNS),
    script:
        "../scripts/concatenate.py"


rule loss_increments:
    """FIG-6, FIG-12: one pass over the samples of one trained run."""
    input:
        data=dataset_file,
        subset=f"{RESULTS}/subsets/{{run}}.npz",
        trained=checkpoint("{run}", "trained"),
        code=code("loss_increments"),
    output:
        table=f"{RESULTS}/increments/{{run}}.csv",
        fits=f"{RESULTS}/increments/{{run}}_fits.csv",
        t7=f"{RESULTS}/increments/{{run}}_t7.csv",
        a1=f"{RESULTS}/increments/{{run}}_a1.csv",
        a1_fits=f"{RESULTS}/increments/{{run}}_a1_fits.csv",
        measurement=f"{RESULTS}/increments/{{run}}.npz",
        timing=timing("loss_increments", "{run}"),
    log:
        log_file("loss_increments", "{run}"),
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        gpu=GPUS_PER_JOB,
        mem_mb=4000,
    params:
        run=lambda wildcards: wildcards.run,
        seed=seed_of,
        settings=lambda wildcards: DATASETS[dataset_of(wildcards.run)]["increments"],
        architecture=lambda wildcards: DATASETS[dataset_of(wildcards.run)][
            "architecture"
        ],
        device=DEVICE,
        lock=LOCK_HASH,
    script:
        "../scripts/loss_increments.py"


INCREMENT_TABLES = {
    "table": "increments",
    "fits": "increment_fits",
    "t7": "t7",
    "a1": "assumption_a1",
    "a1_fits": "assumption_a1_fits",
    "sample_size": "sample_size",
}


rule increment_tables:
    """Every run's increments, fits, T7 and A1 in one table each, and the sample sizes that follow."""
    input:
        table=increment_parts(".csv"),
        fits=increment_parts("_fits.csv"),
        t7=increment_parts("_t7.csv"),
        a1=increment_parts("_a1.csv"),
        a1_fits=increment_parts("_a1_fits.csv"),
        measurements=increment_parts(".npz"),
        code=code("increment_tables"),
    output:
        **{
            name: f"{RESULTS}/tables/{table}.csv"
            for name, table in INCREMENT_TABLES.items()
        },
        **{
            f"{name}_latex": f"{RESULTS}/tables/{table}.tex"
            for name, table in INCREMENT_TABLES.items()
        },
    log:
        log_file("increment_tables"),
    conda:
        ENVIRONMENT
    resources:
        mem_mb=1500,
    script:
        "../scripts/increment_tables.py"


rule seed_claims:
    """Which block is largest, by every measure, seed by seed."""
    input:
        init=[hessian(run, "init") for run in HESSIAN_RUNS],
        trained=[hessian(run, "trained") for run in HESSIAN_RUNS],
        dynamics=expand(f"{RESULTS}/dynamics/{{run}}.csv", run=DYNAMICS_RUNS),
        code=code("seed_claims"),
    output:
        table=f"{RESULTS}/tables/seed_claims.csv",
        latex=f"{RESULTS}/tables/seed_claims.tex",
        shares=f"{RESULTS}/tables/seed_claim_shares.csv",
        shares_latex=f"{RESULTS}/tables/seed_claim_shares.tex",
        timing=timing("seed_claims"),
    log:
        log_file("seed_claims"),
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=1500,
    params:
        runs=HESSIAN_RUNS,
        lock=LOCK_HASH,
    script:
        "../scripts/seed_claims.py"


rule sensitivity:
    """The claim at initialisation under each reading of the model."""
    input:
        data=f"{RESULTS}/data/{{dataset}}.npz",
        code=code("sensitivity"),
    output:
        table=f"{RESULTS}/tables/sensitivity_{{dataset}}.csv",
        latex=f"{RESULTS}/tables/sensitivity_{{dataset}}.tex",
        shares=f"{RESULTS}/tables/sensitivity_{{dataset}}_shares.csv",
        shares_latex=f"{RESULTS}/tables/sensitivity_{{dataset}}_shares.tex",
        timing=timing("sensitivity", "{dataset}"),
    log:
        log_file("sensitivity", "{dataset}"),
    wildcard_constraints:
        dataset="|".join(having("sensitivity")) or "none",
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=3000,
    params:
        seeds=lambda wildcards: DATASETS[wildcards.dataset]["sensitivity"]["seeds"],
        architecture=lambda wildcards: DATASETS[wildcards.dataset]["architecture"],
        batch_size=lambda wildcards: DATASETS[wildcards.dataset]["hessian"][
            "batch_size"
        ],
        batch_seed=lambda wildcards: DATASETS[wildcards.dataset]["hessian"][
            "batch_seed"
        ],
        lock=LOCK_HASH,
    script:
        "../scripts/sensitivity.py"


rule spectra:
    """Exact eigenvalues, init and trained; outliers against the number of classes."""
    input:
        hessians=[
            hessian(run, stage)
            for run in runs_having("spectrum")
            for stage in ("init", "trained")
        ],
        code=code("spectra"),
    output:
        table=f"{RESULTS}/tables/spectrum.csv",
        latex=f"{RESULTS}/tables/spectrum.tex",
        summary=f"{RESULTS}/tables/spectrum_summary.csv",
        summary_latex=f"{RESULTS}/tables/spectrum_summary.tex",
        timing=timing("spectra"),
    log:
        log_file("spectra"),
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=1500,
    params:
        classes={name: DATASETS[name]["architecture"]["classes"] for name in DATASETS},
        lock=LOCK_HASH,
    script:
        "../scripts/spectra.py"


rule curvature_vs_data:
    """One seed: train on nested subsets of growing size, measure the curvature of each model."""
    input:
        data=f"{RESULTS}/data/{{dataset}}.npz",
        subset=f"{RESULTS}/subsets/{{dataset}}_seed{{seed}}.npz",
        code=code("curvature_vs_data"),
    output:
        table=f"{RESULTS}/curvature_vs_data/{{dataset}}_seed{{seed}}.csv",
        timing=timing("curvature_vs_data", "{dataset}_seed{seed}"),
    log:
        log_file("curvature_vs_data", "{dataset}_seed{seed}"),
    cache: True
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        gpu=GPUS_PER_JOB,
        mem_mb=3500,
    params:
        dataset=lambda wildcards: wildcards.dataset,
        seed=lambda wildcards: int(wildcards.seed),
        sizes=lambda wildcards: DATASETS[wildcards.dataset]["curvature_vs_data"][
            "sizes"
        ],
        batch_size=lambda wildcards: DATASETS[wildcards.dataset]["hessian"][
            "batch_size"
        ],
        training=lambda wildcards: nested_training(wildcards.dataset),
        architecture=lambda wildcards: DATASETS[wildcards.dataset]["architecture"],
        unfinished=lambda wildcards: f"{RESULTS}/unfinished/curvature_vs_data_{wildcards.dataset}_seed{wildcards.seed}",
        device=DEVICE,
        lock=LOCK_HASH,
    script:
        "../scripts/curvature_vs_data.py"


rule curvature_exponents:
    """What the title's scaling laws look like when measured."""
    input:
        tables=expand(
            f"{RESULTS}/curvature_vs_data/{{run}}.csv",
            run=runs_having("curvature_vs_data"),
        ),
        code=code("curvature_exponents"),
    output:
        table=f"{RESULTS}/tables/curvature_vs_data.csv",
        latex=f"{RESULTS}/tables/curvature_vs_data.tex",
        exponents=f"{RESULTS}/tables/curvature_exponents.csv",
        exponents_latex=f"{RESULTS}/tables/curvature_exponents.tex",
    log:
        log_file("curvature_exponents"),
    conda:
        ENVIRONMENT
    script:
        "../scripts/curvature_exponents.py"


EXPERIMENT_TABLES = {
    "dynamics": ["dynamics"],
    "increments": [*INCREMENT_TABLES.values()],
    "hessian": ["seed_claims", "seed_claim_shares"],
    "sensitivity": [
        f"sensitivity_{name}{part}"
        for name in having("sensitivity")
        for part in ("", "_shares")
    ],
    "spectrum": ["spectrum", "spectrum_summary"],
    "curvature_vs_data": ["curvature_vs_data", "curvature_exponents"],
}
TARGETS += [
    f"{RESULTS}/tables/{table}.csv"
    for section, tables in EXPERIMENT_TABLES.items()
    if having(section)
    for table in tables
]
