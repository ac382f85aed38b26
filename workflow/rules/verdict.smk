"""What the run adds up to: times, provenance, claims, and the verdict. Comes last: it looks at all other targets."""

import json

from curvature_gap.claims import read_claims

CLAIMS = read_claims(ROOT / "paper/claims.yaml")
RUN_OUTPUTS = [target for target in TARGETS]


rule timings:
    """Seconds and memory of every job, from the jobs' own records."""
    input:
        RUN_OUTPUTS,
        code=code("timings"),
    output:
        table=f"{RESULTS}/tables/timings.csv",
        latex=f"{RESULTS}/tables/timings.tex",
    log:
        log_file("timings"),
    conda:
        ENVIRONMENT
    params:
        folder=f"{RESULTS}/timings",
    script:
        "../scripts/timings.py"


rule claims:
    """Every claim's verdict; succeeds whatever they are."""
    input:
        RUN_OUTPUTS,
        claims="paper/claims.yaml",
        code=code("claims"),
    output:
        table=f"{RESULTS}/claims.csv",
        latex=f"{RESULTS}/claims.tex",
    log:
        log_file("claims"),
    conda:
        ENVIRONMENT
    params:
        preset=PRESET,
        results=lambda wildcards: RESULTS,
    script:
        "../scripts/claims.py"


rule provenance:
    """Versions, hardware, data, configuration and the hashes of all tables; also as RO-Crate."""
    input:
        RUN_OUTPUTS,
        claims=f"{RESULTS}/claims.csv",
        timings=f"{RESULTS}/tables/timings.csv",
        code=code("provenance"),
    output:
        record=f"{RESULTS}/provenance.json",
        crate=f"{RESULTS}/ro-crate-metadata.json",
    log:
        log_file("provenance"),
    conda:
        ENVIRONMENT
    params:
        results=lambda wildcards: RESULTS,
        settings=SETTINGS,
        device=DEVICE,
        lock=LOCK_HASH,
    script:
        "../scripts/provenance.py"


rule verify:
    """PASS, FAIL or NOT RUN for each claim, and the comparison with expected/<preset>; exit status 1 on a failure."""
    input:
        claims=f"{RESULTS}/claims.csv",
        record=f"{RESULTS}/provenance.json",
        code=code("verify"),
    log:
        log_file("verify"),
    conda:
        ENVIRONMENT
    params:
        results=lambda wildcards: RESULTS,
        expected=f"expected/{PRESET}",
    script:
        "../scripts/verify.py"


for claim in CLAIMS:

    # One claim with what it needs and nothing more: snakemake --cores all claim_FIG-3
    rule:
        name:
            f"claim_{claim.id}"
        input:
            [f"{RESULTS}/{name}" for name in claim.needs()],
            claims="paper/claims.yaml",
            code=code("claim"),
        log:
            log_file("claim", claim.id),
        conda:
            ENVIRONMENT
        params:
            id=claim.id,
            preset=PRESET,
            results=lambda wildcards: RESULTS,
        script:
            "../scripts/claim.py"


TARGETS += [
    f"{RESULTS}/claims.csv",
    f"{RESULTS}/provenance.json",
    f"{RESULTS}/tables/timings.csv",
]
