"""Draw one figure by its notebook."""

from pathlib import Path

from curvature_gap.job import job

with job(snakemake):
    from curvature_gap.notebook_run import draw

    def plain(value):
        return value if isinstance(value, str) else list(value)

    # What the notebook is told: its inputs by name, and a few words and numbers.
    inputs = {name: plain(snakemake.input[name]) for name in snakemake.params.inputs}
    draw(
        Path(snakemake.input.notebook),
        {**inputs, **snakemake.params.parameters},
        figure=Path(snakemake.output.pdf).with_suffix(""),
        executed=Path(snakemake.output.notebook),
    )
