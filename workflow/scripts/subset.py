"""Write the seeded order of a dataset's training images and its record."""

import json

from curvature_gap.job import job

with job(snakemake):
    import numpy as np

    from curvature_gap import data
    from curvature_gap.files import atomic_path

    dataset = data.read_prepared(snakemake.input.data)
    n = snakemake.params.n if dataset.available else 0
    indices = data.subset_indices(dataset.train_images, dataset.train_labels, n, snakemake.params.seed)
    record = data.subset_record(dataset.train_images, dataset.train_labels, indices)
    with atomic_path(snakemake.output.indices) as temporary:
        np.savez(temporary, indices=indices)
    with atomic_path(snakemake.output.record) as temporary:
        temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
