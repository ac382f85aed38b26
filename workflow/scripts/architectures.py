"""TAB-1: the architectures and their parameter counts."""

from curvature_gap.job import job

with job(snakemake):
    from curvature_gap.architecture import Architecture
    from curvature_gap.tables import write_table

    rows = []
    for name, sizes in snakemake.params.architectures.items():
        a = Architecture(**sizes)
        rows.append(
            {
                "dataset": name,
                "patch": a.patch,
                "hidden": a.d_V,
                "feed_forward": a.d_ff,
                "blocks": a.depth,
                "heads": a.heads,
                "tokens": a.n_tokens,
                "parameters": a.n_parameters,
            }
        )
    write_table(rows, snakemake.output.table)
