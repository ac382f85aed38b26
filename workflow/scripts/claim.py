"""Decide one claim and say so."""

import sys
from pathlib import Path

from curvature_gap.job import job

with job(snakemake):
    from curvature_gap.claims import decide, outcome, read_claims

    (claim,) = [c for c in read_claims(Path(snakemake.input.claims)) if c.id == snakemake.params.id]
    decision = decide(claim, Path(snakemake.params.results), snakemake.params.preset)
    print(f"\n{outcome(decision)}  {claim.id}: {claim.statement}")
    print(f"  expected {decision.expected or '-'}, measured {decision.measured or '-'}, verdict {decision.verdict}")
    print(f"  expected verdict {claim.expected_verdict}; evidence: {decision.evidence}\n")
    failed = outcome(decision) == "FAIL"
sys.exit(int(failed))
