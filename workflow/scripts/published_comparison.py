"""Our block means at initialisation against those of the published figure."""

from pathlib import Path

from curvature_gap.job import job

with job(snakemake):
    from curvature_gap.published import published_comparison
    from curvature_gap.tables import write_table

    rows = published_comparison(Path(snakemake.input.norms), Path(snakemake.input.published))
    write_table(rows, snakemake.output.table)
