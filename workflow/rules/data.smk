"""Datasets, verified and in one format; seeded, nested subsets of them."""

from curvature_gap.data_sources import at_hand_or_prepared

for name in DATASETS:

    rule:
        name:
            f"dataset_{name}"
        input:
            code=code("dataset"),
        output:
            data=f"{RESULTS}/data/{name}.npz",
            record=f"{RESULTS}/data/{name}.json",
            timing=timing("dataset", name),
        log:
            log_file("dataset", name),
        cache: True
        conda:
            ENVIRONMENT
        threads: 1
        resources:
            mem_mb=2000,
        params:
            name=name,
            settings={
                key: DATASETS[name].get(key)
                for key in ("source", "path", "optional", "architecture")
            },
            # Data put in place later changes this, so the next run uses it.
            at_hand=at_hand_or_prepared(
                DATASETS[name]["source"],
                f"{RESULTS}/data/{name}.json",
                path=DATASETS[name].get("path"),
            ),
            lock=LOCK_HASH,
        script:
            "../scripts/dataset.py"


rule data:
    """After this target everything else runs without network."""
    input:
        expand(f"{RESULTS}/data/{{dataset}}.npz", dataset=DATASETS),


rule subset:
    """A seeded order of the training images; every smaller subset with this seed is a prefix of it."""
    input:
        data=f"{RESULTS}/data/{{dataset}}.npz",
        code=code("subset"),
    output:
        indices=f"{RESULTS}/subsets/{{dataset}}_seed{{seed}}.npz",
        record=f"{RESULTS}/subsets/{{dataset}}_seed{{seed}}.json",
        timing=timing("subset", "{dataset}_seed{seed}"),
    log:
        log_file("subset", "{dataset}_seed{seed}"),
    cache: True
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=2000,
    params:
        n=lambda wildcards: DATASETS[wildcards.dataset]["training"]["n_train"],
        seed=lambda wildcards: int(wildcards.seed),
        lock=LOCK_HASH,
    script:
        "../scripts/subset.py"
