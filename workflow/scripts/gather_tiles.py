"""Put the tiles of one Hessian together, certify it and tabulate its block norms."""

from pathlib import Path

from curvature_gap.job import job, set_threads

with job(snakemake) as log:
    from curvature_gap.batch_loss import batch_loss
    from curvature_gap.certificate import certify
    from curvature_gap.hessian import Hessian
    from curvature_gap.hessian_inputs import read_hessian_inputs
    from curvature_gap.norms import block_norms_table
    from curvature_gap.tables import write_table
    from curvature_gap.tiles import TileError, gather, missing_tiles, read_manifest

    set_threads(snakemake.threads)
    inputs, params, wildcards = snakemake.input, snakemake.params, snakemake.wildcards
    manifest = read_manifest(inputs.manifest)
    damaged = sorted({tile.job for tile in missing_tiles(manifest, params.entries)})
    if damaged:
        # Without its record a job counts as not done: the next run computes its bad tiles and no others.
        for number in damaged:
            Path(inputs.records[number]).unlink(missing_ok=True)
        raise TileError(
            f"Tiles of {len(damaged)} jobs are lost or damaged ({', '.join(map(str, damaged[:10]))}) in "
            f"{params.entries}. Run the same command again: these jobs, and no others, are done again."
        )
    problem = batch_loss(
        *read_hessian_inputs(
            inputs.data, inputs.batch, inputs.checkpoint, architecture=params.architecture, batch_size=params.batch_size
        )
    )

    def certified(hessian, asymmetry):
        certificate = certify(hessian.held(), problem, engine=hessian.engine, asymmetry=asymmetry)
        certificate.check()
        log.info("%s", certificate)
        return certificate

    gather(manifest, params.entries, snakemake.output.hessian, certify=certified)
    seed = int(wildcards.run.split("_seed")[1])
    whole = Hessian.load(snakemake.output.hessian, mmap=True)
    write_table(block_norms_table(whole, run=wildcards.run, stage=wildcards.stage, seed=seed), snakemake.output.norms)
