"""Write provenance.json and the RO-Crate of a finished run."""

import json
from pathlib import Path

from curvature_gap.job import job

with job(snakemake):
    from curvature_gap.devices import precision_flags, set_precision
    from curvature_gap.files import atomic_path
    from curvature_gap.provenance import provenance
    from curvature_gap.ro_crate import write_ro_crate

    set_precision()
    results = Path(snakemake.params.results)
    record = provenance(
        results,
        Path(),
        snakemake.params.settings,
        snakemake.params.lock,
        snakemake.params.device,
        precision_flags(),
    )
    with atomic_path(snakemake.output.record) as temporary:
        temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    files = [p for folder in ("tables", "figures", "checkpoints") for p in (results / folder).rglob("*") if p.is_file()]
    write_ro_crate(results, record, [*files, Path(snakemake.output.record)], Path(snakemake.output.crate))
