"""Gather the evaluated steps of all trainings."""

from curvature_gap.job import job

with job(snakemake):
    import pandas as pd

    from curvature_gap.tables import write_table

    rows = []
    for run, path in zip(snakemake.params.runs, snakemake.input.metrics, strict=True):
        dataset, seed = run.split("_seed")
        for row in pd.read_csv(path).dropna(subset="validation_accuracy").to_dict("records"):
            last = row["step"] == snakemake.params.steps[dataset]
            stage = "trained" if last else "init" if row["step"] == 0 else f"step_{int(row['step']):05d}"
            rows.append({"run": run, "dataset": dataset, "seed": int(seed), "stage": stage} | row)
    columns = ["run", "dataset", "seed", "stage", "step", "loss", "train_accuracy", "validation_accuracy"]
    write_table(rows, snakemake.output.table, columns=columns)
