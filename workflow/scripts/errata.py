"""Write the errata with this run's evidence as a table."""

from pathlib import Path

from curvature_gap.job import job

with job(snakemake):
    from curvature_gap.reproduction import errata_rows, read_rows
    from curvature_gap.tables import write_table

    write_table(errata_rows(read_rows(Path(snakemake.input.statements))), snakemake.output.table)
