"""Write the artifact page with this run's times and values."""

from pathlib import Path

from curvature_gap.job import job

with job(snakemake):
    from curvature_gap.artifact_page import measured_run, render
    from curvature_gap.claims import read_claims
    from curvature_gap.files import atomic_path

    preset = snakemake.params.preset
    runs = {preset: measured_run(Path(snakemake.input.claims).parent, preset)}
    page = render(
        read_claims(Path(snakemake.input.claims_source)), runs, chosen=preset, template=Path(snakemake.input.template)
    )
    with atomic_path(snakemake.output.page) as temporary:
        temporary.write_text(page, encoding="utf-8")
