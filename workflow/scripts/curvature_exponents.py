"""Put the seeds together and fit an exponent to every block."""

from curvature_gap.job import job

with job(snakemake):
    import pandas as pd

    from curvature_gap.curvature_vs_data import exponent_rows
    from curvature_gap.tables import write_table

    rows = pd.concat([pd.read_csv(path) for path in snakemake.input.tables]).to_dict("records")
    write_table(rows, snakemake.output.table)
    write_table(exponent_rows(rows), snakemake.output.exponents)
