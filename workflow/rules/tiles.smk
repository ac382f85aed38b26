"""A whole Hessian in tiles: a manifest, any number of jobs that compute some tiles each, one that gathers them.

For models whose Hessian takes long or is larger than a job's memory. Asked for by `datasets.<name>.tiles`, made by the
target `hessian_tiles`, never part of `all`.
"""

from curvature_gap.architecture import Architecture
from curvature_gap.tile_plan import plan

TILED = [name for name in DATASETS if "tiles" in DATASETS[name]]
TILES = f"{RESULTS}/tiles/{{run}}/{{stage}}"
MEGABYTE = 10**6


N_TILE_JOBS = {name: n_tile_jobs(name) for name in TILED}


rule tile_manifest:
    """The plan: model, batch, every tile and its job."""
    input:
        data=dataset_file,
        batch=tile_batch,
        checkpoint=f"{RESULTS}/checkpoints/{{run}}/{{stage}}.safetensors",
        code=code("tile_manifest"),
    output:
        manifest=f"{TILES}/manifest.json",
    log:
        log_file("tile_manifest", "{run}", "{stage}"),
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=2000,
    params:
        architecture=tile_architecture,
        batch_size=lambda wildcards: tile_settings(wildcards)["batch_size"],
        limits=lambda wildcards: tile_bytes(dataset_of(wildcards.run)),
    script:
        "../scripts/tile_manifest.py"


rule tile_job:
    """Some tiles in one pass over the batch. They lie in `entries`, undeclared: a killed job keeps those it finished."""
    input:
        data=dataset_file,
        batch=tile_batch,
        checkpoint=f"{RESULTS}/checkpoints/{{run}}/{{stage}}.safetensors",
        manifest=f"{TILES}/manifest.json",
        code=code("tile_job"),
    output:
        record=f"{TILES}/jobs/{{job}}.json",
        timing=timing("tile_job", "{run}", "{stage}", "{job}"),
    log:
        log_file("tile_job", "{run}", "{stage}", "{job}"),
    wildcard_constraints:
        job=r"\d+",
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        gpu=GPUS_PER_JOB,
        mem_mb=tile_memory,
    params:
        job=lambda wildcards: int(wildcards.job),
        architecture=tile_architecture,
        batch_size=lambda wildcards: tile_settings(wildcards)["batch_size"],
        entries=lambda wildcards: f"{TILES.format(**wildcards)}/entries",
        device=DEVICE,
    script:
        "../scripts/tile_job.py"


rule gather_tiles:
    """One certified Hessian file, a stripe of rows at a time, and its block norms."""
    input:
        data=dataset_file,
        batch=tile_batch,
        checkpoint=f"{RESULTS}/checkpoints/{{run}}/{{stage}}.safetensors",
        manifest=f"{TILES}/manifest.json",
        records=tile_records,
        code=code("gather_tiles"),
    output:
        hessian=f"{TILES}/hessian.npz",
        norms=f"{TILES}/block_norms.csv",
        timing=timing("gather_tiles", "{run}", "{stage}"),
    log:
        log_file("gather_tiles", "{run}", "{stage}"),
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=3000,
    params:
        architecture=tile_architecture,
        batch_size=lambda wildcards: tile_settings(wildcards)["batch_size"],
        entries=lambda wildcards: f"{TILES.format(**wildcards)}/entries",
    script:
        "../scripts/gather_tiles.py"


rule hessian_tiles:
    """Every Hessian that the configuration asks for in tiles."""
    input:
        [
            f"{RESULTS}/tiles/{name}_seed{seed}/{stage}/hessian.npz"
            for name in TILED
            for seed in DATASETS[name]["tiles"]["seeds"]
            for stage in DATASETS[name]["tiles"]["stages"]
        ],
