"""Train one run; its checkpoints and metrics appear together when it is done."""

from pathlib import Path

from curvature_gap.job import job

with job(snakemake) as log:
    import numpy as np

    from curvature_gap import data, devices, samples, training
    from curvature_gap.architecture import Architecture
    from curvature_gap.files import atomic_path

    flags = devices.set_precision()
    log.info("precision: %s", flags)
    architecture = Architecture(**snakemake.params.architecture)
    settings = {key: value for key, value in snakemake.params.training.items() if key != "n_train"}
    settings["checkpoint_steps"] = tuple(settings.get("checkpoint_steps", ()))
    dataset = data.read_prepared(snakemake.input.data)
    checkpoints = Path(snakemake.output.trained).parent
    if dataset.available:
        with np.load(snakemake.input.subset) as subset:
            indices = subset["indices"]
        training.train(
            architecture,
            training.TrainingSettings(**settings, threads=snakemake.threads),
            samples.training_samples(dataset, indices),
            samples.held_out_samples(dataset),
            checkpoints,
            seed=snakemake.params.seed,
            unfinished=Path(snakemake.params.unfinished),
            device=devices.resolve_device(snakemake.params.device),
            log=log.info,
        )
        with atomic_path(snakemake.output.metrics) as temporary:
            temporary.write_bytes((checkpoints / "metrics.csv").read_bytes())
        (checkpoints / "metrics.csv").unlink()
    else:
        # An optional dataset out of reach: empty checkpoints, so that the rest of the workflow completes and says so.
        log.warning("not run: the dataset is out of reach")
        for path in snakemake.output:
            if path.endswith(".safetensors"):
                training.write_checkpoint(Path(path), {})
        with atomic_path(snakemake.output.metrics) as temporary:
            temporary.write_text(training.metrics_csv([]), encoding="utf-8")
