"""Print the verdict of a finished run and set the exit status."""

import sys
from pathlib import Path

from curvature_gap.job import job

with job(snakemake):
    from curvature_gap.claims import verify_run

    report = verify_run(Path(snakemake.params.results), Path(snakemake.params.expected))
    width = max(len(line[1]) for line in report["claims"])
    print(f"\n{'':8}{'claim':{width}}  {'paper':>14}  {'measured':>36}  {'tolerance':>9}  verdict")
    for outcome, id, expected, measured, tolerance, verdict in report["claims"]:
        print(f"{outcome:8}{id:{width}}  {expected:>14}  {measured[:36]:>36}  {tolerance:>9}  {verdict}")
    counts = report["counts"]
    print(f"\n{counts['PASS']} passed, {counts['FAIL']} failed, {counts['NOT RUN']} not run")
    half, double = report["passes at half tolerance"], report["passes at double tolerance"]
    print(f"passed at half tolerance {half}, at double {double}")
    reference = report["reference"]
    print(f"reference: {reference['class']}; differs in: {', '.join(reference['differs_in']) or 'nothing'}")
    for table, word in reference["tables"].items():
        if word not in ("identical", "within tolerance"):
            print(f"  {table}: {word}")
    sys.stdout.flush()
sys.exit(0 if report["passed"] else 1)
