"""Put the verdicts on all statements into one table, in the order of the paper's ids; a missing id is an error."""

from pathlib import Path

from curvature_gap.job import job

with job(snakemake):
    import pandas as pd

    from curvature_gap.tables import write_table

    ids = Path(snakemake.input.ids).read_text(encoding="utf-8").split()
    frame = pd.concat([pd.read_csv(path, keep_default_na=False, na_values=[""]) for path in snakemake.input.tables])
    missing = sorted(set(ids) - set(frame["id"]))
    if missing:
        raise ValueError(f"no verdict on {', '.join(missing)}; add a check to identities.py or bound_search.py.")
    order = {id: place for place, id in enumerate(ids)}
    # Parts finer than the list follow at the end, sorted by name.
    frame = frame.sort_values("id", key=lambda column: [(order.get(id, len(ids)), id) for id in column])
    text = ["witness", "note"]
    frame[text] = frame[text].fillna("")
    write_table(frame.to_dict("records"), snakemake.output.table)
