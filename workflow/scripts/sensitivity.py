"""The claim on the largest block at initialisation, under each reading of what the paper leaves open."""

from curvature_gap.job import job

with job(snakemake) as log:
    import torch

    from curvature_gap import data, seed_claims
    from curvature_gap.architecture import Architecture
    from curvature_gap.dynamics import hessian_at
    from curvature_gap.sensitivity import variants
    from curvature_gap.tables import write_table
    from curvature_gap.vit import initial_parameters

    p = snakemake.params
    dataset = data.read_prepared(snakemake.input.data)
    batches = {}
    rows = []
    for variant in variants(Architecture(**p.architecture), p.batch_size, p.batch_seed):
        key = (variant.batch_seed, variant.batch_size, variant.normalised)
        if key not in batches:
            indices = data.subset_indices(
                dataset.train_images, dataset.train_labels, variant.batch_size, variant.batch_seed
            )
            images, labels, _ = data.hessian_batch(dataset, indices, variant.batch_size)
            if not variant.normalised:
                images = torch.as_tensor(dataset.train_images[indices]).float() / 255
            batches[key] = images, labels
        for seed in p.seeds:
            parameters = initial_parameters(variant.architecture, torch.Generator().manual_seed(seed))
            H = hessian_at(parameters, *batches[key], variant.architecture)
            about = {"claim": "init_values_largest", "variant": variant.name, "seed": seed}
            rows += seed_claims.largest_rows(seed_claims.block_measures(H), about)
        log.info("%s done", variant.name)
    write_table(rows, snakemake.output.table)
    by = ["claim", "variant", "scope", "measure"]
    write_table(seed_claims.shares(rows, by), snakemake.output.shares)
