"""Search for an input above a tight bound, and set the tight bounds beside others and beside Lanczos."""

from curvature_gap.job import job, set_threads

with job(snakemake):
    from curvature_gap.bounds_table import baseline_rows, validate_bounds
    from curvature_gap.tables import write_table

    set_threads(snakemake.threads)
    t = snakemake.params.theory
    rows = validate_bounds(t["validation_instances"], t["validation_ascents"], t["search_seed"], t["validation_steps"])
    write_table(rows, snakemake.output.table)
    write_table(baseline_rows(t["bounds_seeds"], **t["bounds_sizes"]), snakemake.output.baselines)
