"""Search for an input above a tight bound."""

from curvature_gap.job import job, set_threads

with job(snakemake):
    from curvature_gap.bounds_table import validate_bounds
    from curvature_gap.tables import write_table

    set_threads(snakemake.threads)
    t = snakemake.params.theory
    rows = validate_bounds(t["validation_instances"], t["validation_ascents"], t["search_seed"], t["validation_steps"])
    write_table(rows, snakemake.output.table)
