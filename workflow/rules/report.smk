"""The errata as a table, the reproduction report (PDF), and the artifact page with this run's times."""

REPORT_SOURCES = [
    "paper/reproduction.typ",
    "paper/proofs.typ",
    "paper/typst/style.typ",
    "paper/references.bib",
    "docs/faults.md",
]


rule errata:
    """Printed, corrected, reason and the witness of this run, one row an erratum."""
    input:
        statements=f"{RESULTS}/tables/statements.csv",
        code=code("errata"),
    output:
        table=f"{RESULTS}/report/errata.csv",
        latex=f"{RESULTS}/report/errata.tex",
    log:
        log_file("errata"),
    conda:
        ENVIRONMENT
    script:
        "../scripts/errata.py"


rule reproduction_report:
    """What the paper claims and what this run found, as a PDF; typst brings its own fonts."""
    input:
        claims=f"{RESULTS}/claims.csv",
        record=f"{RESULTS}/provenance.json",
        timings=f"{RESULTS}/tables/timings.csv",
        figures=[f"{RESULTS}/figures/{name}.pdf" for name in FIGURES],
        errata=f"{RESULTS}/report/errata.csv",
        claims_source="paper/claims.yaml",
        sources=REPORT_SOURCES,
        code=code("report"),
    output:
        pdf=f"{RESULTS}/report/reproduction.pdf",
        data=f"{RESULTS}/report/reproduction.json",
        figures=directory(f"{RESULTS}/report/figures"),
    log:
        log_file("reproduction_report"),
    conda:
        ENVIRONMENT
    threads: 1
    resources:
        mem_mb=1500,
    params:
        expected=f"expected/{PRESET}",
        benchmarks="expected/bench/benchmarks.csv",
        figures=figure_records(),
    script:
        "../scripts/report.py"


rule artifact_page:
    """ARTIFACT.md with the times of this run; the committed page has those of expected/."""
    input:
        claims=f"{RESULTS}/claims.csv",
        timings=f"{RESULTS}/tables/timings.csv",
        claims_source="paper/claims.yaml",
        template="paper/ARTIFACT.md.jinja",
        abstract="paper/abstract.yaml",
        code=code("artifact"),
    output:
        page=f"{RESULTS}/report/ARTIFACT.md",
    log:
        log_file("artifact_page"),
    conda:
        ENVIRONMENT
    params:
        preset=PRESET,
    script:
        "../scripts/artifact.py"


TARGETS += [
    f"{RESULTS}/report/reproduction.pdf",
    f"{RESULTS}/report/errata.csv",
    f"{RESULTS}/report/ARTIFACT.md",
]
