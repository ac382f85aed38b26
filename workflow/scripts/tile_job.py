"""Compute the tiles of one job; those that are there already and valid are kept."""

import json
import os

from curvature_gap.job import job, set_threads

with job(snakemake) as log:
    log.info("CUDA_VISIBLE_DEVICES=%s", os.environ.get("CUDA_VISIBLE_DEVICES"))
    from curvature_gap import devices
    from curvature_gap.files import atomic_path
    from curvature_gap.hessian_inputs import read_hessian_inputs
    from curvature_gap.tiles import compute_job, read_manifest

    set_threads(snakemake.threads)
    inputs, params = snakemake.input, snakemake.params
    model, images, labels = read_hessian_inputs(
        inputs.data,
        inputs.batch,
        inputs.checkpoint,
        architecture=params.architecture,
        batch_size=params.batch_size,
        device=devices.resolve_device(params.device),
    )
    paths = compute_job(read_manifest(inputs.manifest), params.job, model, images, labels, params.entries)
    # The tiles' own hashes: a tile computed again with other bits makes another record.
    hashes = {path.stem: json.loads(path.with_suffix(".json").read_text())["sha256"] for path in paths}
    with atomic_path(snakemake.output.record) as temporary:
        temporary.write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")
