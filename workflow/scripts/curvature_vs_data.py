"""Train on nested subsets of growing size, one seed, and measure the curvature of each model."""

import shutil
from pathlib import Path

from curvature_gap.job import job

with job(snakemake) as log:
    import numpy as np

    from curvature_gap import curvature_vs_data, data, devices, samples
    from curvature_gap.architecture import Architecture
    from curvature_gap.tables import write_table
    from curvature_gap.training import TrainingSettings

    devices.set_precision()
    p = snakemake.params
    device = devices.resolve_device(p.device)
    architecture = Architecture(**p.architecture)
    dataset = data.read_prepared(snakemake.input.data)
    with np.load(snakemake.input.subset) as subset:
        images, labels = samples.training_samples(dataset, subset["indices"])
    held_out = samples.held_out_samples(dataset)
    settings = TrainingSettings(**p.training, threads=snakemake.threads, evaluate_every=p.training["steps"])
    unfinished = Path(p.unfinished)
    models = curvature_vs_data.train_on_prefixes(
        architecture,
        settings,
        (images, labels),
        held_out,
        p.sizes,
        unfinished,
        seed=p.seed,
        device=device,
        log=log.info,
    )
    # Inside every subset, so that all sizes are measured on images they were trained on, and on the same ones.
    n = min(p.batch_size, *p.sizes)
    batch = images[:n].to(device), labels[:n].to(device)
    held_out = tuple(tensor.to(device) for tensor in held_out)
    rows = []
    for size, parameters in models.items():
        about = {"run": f"{p.dataset}_seed{p.seed}", "seed": p.seed, "n_train": size, "steps": settings.steps}
        moved = {name: value.to(device) for name, value in parameters.items()}
        rows += curvature_vs_data.curvature_rows(moved, batch, held_out, architecture, about)
        log.info(
            "%d images: norm of the Hessian %.6g",
            size,
            next(r for r in reversed(rows) if r["block"] == "total")["spectral"],
        )
    write_table(rows, snakemake.output.table)
    shutil.rmtree(unfinished)
