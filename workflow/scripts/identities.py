"""Check every identity of the paper, as printed and as corrected."""

from curvature_gap.job import job

with job(snakemake) as log:
    from curvature_gap.identities import IDENTITY_CHECKS
    from curvature_gap.tables import write_table

    rows = []
    for id, check in IDENTITY_CHECKS.items():
        rows.append(check())
        log.info("%s: %s", id, rows[-1].as_printed)
    write_table(rows, snakemake.output.table)
