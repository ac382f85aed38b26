"""Put tables of the same columns under one another."""

import shlex
from pathlib import Path

from curvature_gap.job import job

with job(snakemake):
    import pandas as pd

    from curvature_gap.tables import write_table

    paths = snakemake.input[: snakemake.params.n_tables]
    for path in paths:
        # Half a table is still a table to pandas; every whole one ends its last line.
        if not Path(path).read_bytes().endswith(b"\n"):
            raise ValueError(f"{path} is cut short: delete it (rm {shlex.quote(path)}) and run again")
    together = pd.concat([pd.read_csv(path) for path in paths], ignore_index=True)
    write_table(together.to_dict("records"), snakemake.output.table, columns=list(together.columns))
