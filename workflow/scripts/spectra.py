"""Exact eigenvalues of whole Hessians and of their diagonal blocks."""

from pathlib import Path

from curvature_gap.job import job

with job(snakemake) as log:
    from curvature_gap.exact_hessian import Hessian
    from curvature_gap.spectra import spectra, spectrum_rows
    from curvature_gap.tables import write_table

    values, summary = [], []
    for path in map(Path, snakemake.input.hessians):
        run, stage = path.parent.name, path.stem
        dataset, seed = run.split("_seed")
        about = {"run": run, "stage": stage, "seed": int(seed)}
        classes = snakemake.params.classes[dataset]
        of_values, of_summary = spectrum_rows(spectra(Hessian.load(path)), classes, about)
        values += of_values
        summary += of_summary
        log.info("%s %s done", run, stage)
    write_table(values, snakemake.output.table)
    write_table(summary, snakemake.output.summary)
