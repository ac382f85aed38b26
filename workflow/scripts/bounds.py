"""Every bound against the exact norm, per block and in total."""

from pathlib import Path

from curvature_gap.job import job, set_threads

with job(snakemake) as log:
    import numpy as np
    import torch

    from curvature_gap import bounds_table, data
    from curvature_gap.architecture import Architecture
    from curvature_gap.tables import write_table
    from curvature_gap.training import read_checkpoint

    set_threads(snakemake.threads)
    theory = snakemake.params.theory
    cases = bounds_table.theory_cases(theory["bounds_seeds"], **theory["bounds_sizes"])
    rows = bounds_table.theory_rows(cases)
    write_table(bounds_table.baseline_rows(cases), snakemake.output.baselines)
    log.info("theory setting: %d rows", len(rows))

    run = snakemake.params.run
    seed = int(run.split("_seed")[1])
    architecture = Architecture(**snakemake.params.architecture)
    dataset = data.read_prepared(snakemake.input.data)
    with np.load(snakemake.input.batch) as subset:
        images, labels, _ = data.hessian_batch(dataset, subset["indices"], snakemake.params.hessian["batch_size"])
    for stage, checkpoint, hessian in zip(
        ("init", "trained"), snakemake.input.checkpoints, snakemake.input.hessians, strict=True
    ):
        parameters = {name: value.double() for name, value in read_checkpoint(Path(checkpoint), architecture).items()}
        rows += bounds_table.checkpoint_rows(run, stage, seed, parameters, images[0].double(), architecture)
        with np.load(hessian) as stored:
            H, names, offsets = stored["H"], stored["names"].tolist(), stored["offsets"].tolist()
        exact = bounds_table.exact_block_norms(torch.from_numpy(H), names, offsets)
        rows += bounds_table.model_rows(run, stage, seed, parameters, images.double(), labels, architecture, exact)
        log.info("%s %s done", run, stage)
    write_table(rows, snakemake.output.table)
