"""Gather the timing records of all jobs into one table."""

import json
from pathlib import Path

from curvature_gap.job import job

with job(snakemake):
    from curvature_gap.tables import write_table

    rows = []
    for path in sorted(Path(snakemake.params.folder).rglob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        record["wildcards"] = " ".join(record["wildcards"].values())
        rows.append(record)
    write_table(rows, snakemake.output.table)
