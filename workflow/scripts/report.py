"""Gather what the report says, then set it in type."""

import json
from pathlib import Path

from curvature_gap.job import job

with job(snakemake):
    from curvature_gap.files import atomic_path
    from curvature_gap.reproduction import report_data, typeset

    # Figures too heavy to print as they are get a light copy here.
    Path(snakemake.output.figures).mkdir(parents=True, exist_ok=True)
    data = report_data(
        Path(snakemake.input.claims).parent,
        snakemake.params.figures,
        Path(snakemake.input.claims_source),
        Path(snakemake.params.expected),
        Path(snakemake.params.benchmarks),
    )
    with atomic_path(snakemake.output.data) as temporary:
        temporary.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    with atomic_path(snakemake.output.pdf) as temporary:
        typeset(Path(snakemake.input.sources[0]), Path(snakemake.output.data), temporary, root=Path())
