"""Decide every claim on this run."""

from pathlib import Path

from curvature_gap.job import job

with job(snakemake) as log:
    from curvature_gap.claims import decide, outcome, read_claims
    from curvature_gap.tables import write_table

    claims = read_claims(Path(snakemake.input.claims))
    decisions = [decide(claim, Path(snakemake.params.results), snakemake.params.preset) for claim in claims]
    for decision in decisions:
        log.info("%s %s: %s", outcome(decision), decision.id, decision.verdict)
    write_table(decisions, snakemake.output.table)
