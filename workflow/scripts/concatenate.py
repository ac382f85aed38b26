"""Put tables of the same columns under one another."""

from curvature_gap.job import job

with job(snakemake):
    import pandas as pd

    from curvature_gap.tables import write_table

    frames = [pd.read_csv(path) for path in snakemake.input[: snakemake.params.n_tables]]
    together = pd.concat(frames, ignore_index=True)
    write_table(together.to_dict("records"), snakemake.output.table, columns=list(together.columns))
