"""TAB-2: the norm-equivalence table, each entry with its attained ratio."""

from curvature_gap.job import job

with job(snakemake):
    from curvature_gap.bound_search import SearchBudget, norm_inequality_table
    from curvature_gap.tables import write_table

    s = snakemake.params.search
    budget = SearchBudget(s["search_instances"], s["search_ascents"], s["search_steps"], s["search_seed"])
    write_table(norm_inequality_table(budget), snakemake.output.table)
