"""Which Hessian block is largest, by every measure, seed by seed; and in what share of the seeds the text is right."""

from curvature_gap.job import job

with job(snakemake) as log:
    import pandas as pd

    from curvature_gap import seed_claims
    from curvature_gap.exact_hessian import Hessian
    from curvature_gap.tables import write_table

    dynamics = pd.concat([pd.read_csv(path) for path in snakemake.input.dynamics]) if snakemake.input.dynamics else None
    rows = []
    for run, init, trained in zip(snakemake.params.runs, snakemake.input.init, snakemake.input.trained, strict=True):
        dataset, seed = run.split("_seed")
        about = {"dataset": dataset, "run": run, "seed": int(seed)}
        before, after = (seed_claims.block_measures(Hessian.load(path)) for path in (init, trained))
        rows += seed_claims.largest_rows(before, {"claim": "init_values_largest", **about})
        rows += seed_claims.largest_rows(after, {"claim": "trained_values_largest", **about})
        rows += seed_claims.growth_rows(before, after, {"claim": "every_block_grows", **about})
        if dynamics is not None and (dynamics["run"] == run).any():
            along = dynamics[dynamics["run"] == run].to_dict("records")
            rows += seed_claims.keys_and_values_rows(along, {"claim": "keys_and_values_highest", **about})
        log.info("%s done", run)
    write_table(rows, snakemake.output.table)
    by = ["claim", "dataset", "scope", "measure"]
    write_table(seed_claims.shares(rows, by), snakemake.output.shares)
