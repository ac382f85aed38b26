"""Norms of parameters and Hessian blocks at every stored step of one run; whole matrices at the chosen steps."""

from pathlib import Path

from curvature_gap.job import job

with job(snakemake) as log:
    import numpy as np

    from curvature_gap import data, devices
    from curvature_gap.architecture import Architecture
    from curvature_gap.dynamics import dynamics_rows, hessian_at
    from curvature_gap.norms import block_norms_table
    from curvature_gap.tables import write_table
    from curvature_gap.training import read_checkpoint, stage_name

    devices.set_precision()
    p = snakemake.params
    device = devices.resolve_device(p.device)
    architecture = Architecture(**p.architecture)
    dataset = data.read_prepared(snakemake.input.data)
    with np.load(snakemake.input.batch) as subset:
        images, labels, sha256 = data.hessian_batch(dataset, subset["indices"], p.batch_size)
    images, labels = images.to(device), labels.to(device)
    rows, norms = [], []
    for number, step in enumerate(p.steps, start=1):
        stage = stage_name(step, p.steps[-1])
        parameters = read_checkpoint(Path(snakemake.input[stage]), architecture)
        whole = step in p.whole_steps
        H = hessian_at(parameters, images, labels, architecture, whole=whole, batch_sha256=sha256)
        rows += dynamics_rows(H, parameters, run=p.run, seed=p.seed, step=step, steps=p.steps[-1])
        if whole:
            H.save(snakemake.output[stage])
        # The ends of the training are whole in the rule exact_hessian, which writes their rows.
        if stage not in ("init", "trained"):
            norms += block_norms_table(H, run=p.run, stage=stage, seed=p.seed, diagonal_only=not whole)
        log.info(
            "step %d (%d of %d): loss %.6f, %s", step, number, len(p.steps), H.loss, "whole" if whole else "diagonal"
        )
    write_table(rows, snakemake.output.table)
    write_table(norms, snakemake.output.norms)
