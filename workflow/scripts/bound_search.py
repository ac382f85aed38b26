"""Search for violations of one part of the paper's bounds, and keep the worst input of each."""

from pathlib import Path

from curvature_gap.job import job

with job(snakemake) as log:
    from curvature_gap.bound_search import BOUND_CHECKS, SearchBudget, run_bound_checks, save_witness
    from curvature_gap.tables import write_table

    s = snakemake.params.search
    budget = SearchBudget(s["search_instances"], s["search_ascents"], s["search_steps"], s["search_seed"])
    # A family (T6, T6_B, ...) stays together: its head is made of its parts.
    families = list(dict.fromkeys(id.split("_")[0] for id in BOUND_CHECKS))
    mine = set(families[snakemake.params.part :: snakemake.params.n_parts])
    checked = run_bound_checks(budget, [id for id in BOUND_CHECKS if id.split("_")[0] in mine])
    folder = Path(snakemake.output.witnesses)
    folder.mkdir(parents=True, exist_ok=True)
    for id, (row, witness) in checked.items():
        log.info("%s: %s, worst exact/bound %.6g", id, row.as_printed, row.worst_ratio)
        if witness is not None:
            save_witness(folder / f"{id}.npz", witness)
    write_table([row for row, _ in checked.values()], snakemake.output.table)
