"""Plan the tiles of one Hessian."""

from curvature_gap.job import job

with job(snakemake) as log:
    from curvature_gap.hessian_inputs import read_hessian_inputs
    from curvature_gap.tiles import write_manifest

    inputs, params = snakemake.input, snakemake.params
    model, images, labels = read_hessian_inputs(
        inputs.data, inputs.batch, inputs.checkpoint, architecture=params.architecture, batch_size=params.batch_size
    )
    manifest = write_manifest(snakemake.output.manifest, model, images, labels, **params.limits)
    log.info("%d tiles in %d jobs", len(manifest["tiles"]), manifest["tiles"][-1]["job"] + 1)
