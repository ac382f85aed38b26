"""Loss increments, T7's right-hand side and the assumption A1 for one trained run."""

from pathlib import Path

from curvature_gap.job import job

with job(snakemake) as log:
    import numpy as np
    import torch

    from curvature_gap import data, devices, loss_increments, samples
    from curvature_gap.architecture import Architecture
    from curvature_gap.power_law import log_spaced
    from curvature_gap.sample_curvature import sample_curvature
    from curvature_gap.tables import write_table
    from curvature_gap.training import read_checkpoint

    devices.set_precision()
    p, s = snakemake.params, snakemake.params.settings
    device = devices.resolve_device(p.device)
    dtype = {"float32": torch.float32, "float64": torch.float64}[s["dtype"]]
    identity = {"run": p.run, "stage": "trained", "seed": p.seed}
    table, a1, a1_fits, fits, t7 = [], [], [], [], []
    dataset = data.read_prepared(snakemake.input.data)
    if dataset.available:
        architecture = Architecture(**p.architecture)
        with np.load(snakemake.input.subset) as subset:
            images, labels = (t.to(device) for t in samples.training_samples(dataset, subset["indices"]))
        weights = read_checkpoint(Path(snakemake.input.trained), architecture)
        away, distance = loss_increments.displaced(weights, architecture, s["displacement"], p.seed)
        losses = loss_increments.sample_losses(weights, images, labels, architecture, dtype)
        log.info("losses of %d samples: mean %.6f, largest %.4f", len(losses), losses.mean(), losses.max())
        displaced_losses = loss_increments.sample_losses(away, images, labels, architecture, dtype)
        chosen = np.random.default_rng(p.seed).permutation(len(labels))[: s["hessian_samples"]]
        curvature = sample_curvature(
            weights, images[chosen], labels[chosen], architecture, s["hessian_iterations"], dtype
        )
        log.info("sample Hessians: %s", curvature)
        measurement = loss_increments.Measurement(
            losses,
            displaced_losses,
            distance,
            M=curvature.M,
            M_residual=curvature.residual,
            M_samples=curvature.n_samples,
            M_tight=curvature.tight,
            n_orderings=s["orderings"],
            seed=p.seed,
        )
        gradients = None
        if s["gradient_batch"]:
            units = len(labels) // s["gradient_batch"]
            orders = loss_increments.orderings(units, s["orderings"], p.seed)
            ks = log_spaced(1, units - 1, s["gradient_points"])
            rows = loss_increments.sample_gradients(weights, images, labels, architecture, s["gradient_batch"], dtype)
            gradients = loss_increments.gradient_curves(rows, orders, ks)
            log.info("gradient of all samples: %.6g", gradients.full)
            a1 = loss_increments.a1_rows(gradients, identity, s["gradient_batch"])
            a1_fits = loss_increments.a1_fit_rows(gradients, identity, s["gradient_batch"], p.seed)
        for stage, displaced in (("trained", False), ("displaced", True)):
            for batch in (1, s["batch_size"]):
                k, curves = measurement.curves(batch, displaced=displaced)
                table += loss_increments.increment_rows(
                    identity | {"stage": stage},
                    curves,
                    k,
                    batch,
                    span=max(2, len(k) // 50),
                    points=120,
                    rhs_exact=measurement.constant(displaced),
                    rhs_tight=measurement.constant(displaced, tight=True),
                    # Orderings of samples are those of the gradients only where gradients are of samples.
                    gradients=gradients if not displaced and batch == s["gradient_batch"] == 1 else None,
                )
        fits = loss_increments.fit_rows(measurement, identity, s["batch_size"], s["passes"])
        t7 = loss_increments.t7_rows(measurement, identity)
    else:
        log.warning("not run: the dataset is out of reach")
        nothing, nan = np.zeros(0), float("nan")
        measurement = loss_increments.Measurement(nothing, nothing, 0.0, nan, nan, 0, nan, s["orderings"], p.seed)
    measurement.save(snakemake.output.measurement)
    for name, rows in (("table", table), ("fits", fits), ("t7", t7), ("a1", a1), ("a1_fits", a1_fits)):
        write_table(rows, snakemake.output[name], columns=loss_increments.COLUMNS[name])
