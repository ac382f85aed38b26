"""The exact Hessians of one run on the fixed batch, certified, and the norms of their blocks."""

from curvature_gap.job import job, set_threads

with job(snakemake) as log:
    import numpy as np

    from curvature_gap import data, devices
    from curvature_gap.architecture import Architecture
    from curvature_gap.exact_hessian import exact_hessian
    from curvature_gap.norms import block_norms_table
    from curvature_gap.tables import write_table
    from curvature_gap.training import load_model

    set_threads(snakemake.threads)
    device = devices.resolve_device(snakemake.params.device)
    architecture = Architecture(**snakemake.params.architecture)
    dataset = data.read_prepared(snakemake.input.data)
    with np.load(snakemake.input.batch) as subset:
        images, labels, _ = data.hessian_batch(dataset, subset["indices"], snakemake.params.hessian["batch_size"])
    run = snakemake.params.run
    rows = []
    for stage in ("init", "trained"):
        model = load_model(snakemake.input[stage], architecture)
        H = exact_hessian(model.to(device), images.to(device), labels.to(device))
        log.info("%s %s: loss %.6f, %s", run, stage, H.loss, H.certificate)
        H.save(snakemake.output[stage])
        rows += block_norms_table(H, run=run, stage=stage, seed=int(run.split("_seed")[1].split("_")[0]))
    write_table(rows, snakemake.output.norms)
