"""THESIS-1: relative error of the closed forms against autograd, and their times in one run."""

from curvature_gap.job import job

with job(snakemake):
    from curvature_gap.precision import precision_table, precision_timing
    from curvature_gap.tables import write_table

    write_table(precision_table(), snakemake.output.table)
    sizes = snakemake.params.sizes
    times = precision_timing((sizes["L"], sizes["d_V"], sizes["d_K"], sizes["d_ff"]))
    write_table(times, snakemake.output.times)
