"""Our Hessian at initialisation against the block means read off the paper's published figure."""

from pathlib import Path
from typing import Any

STRIPS = ("LN1", "LN2")
"""The two-pixel strips of the published figure: rough."""


def published_comparison(block_norms: Path, published: Path) -> list[dict[str, Any]]:
    """Return the rows of `published_comparison.csv`: one for each of the 100 block pairs of the ten-block figure.

    Args:
        block_norms: `block_norms.csv`; the rows of stage `init`, LN1 and LN2 pooled.
        published: `published_blocks_init.csv`: mean log10 |entry| per block pair, read off the colours of the published
            figure (resolution about 0.05, floor −6).

    Returns:
        `published`, our `mean` and `sd` over `n_seeds` seeds, all in log10 |entry|, and `deviation` = mean − published.

    Raises:
        ValueError: If a published pair has no row of ours.
    """
    import pandas as pd

    ours = pd.read_csv(block_norms)
    ours = ours[(ours["stage"] == "init") & ours["run"].str.fullmatch(r"mnist_seed\d+")]
    by_pair = ours.groupby(["row", "column"])["mean_log10_abs"].agg(["mean", "std", "count"]).to_dict("index")
    rows = []
    for line in pd.read_csv(published).to_dict("records"):
        found = by_pair.get((line["row"], line["column"]))
        if found is None:
            raise ValueError(f"{block_norms} has no row for the block pair ({line['row']}, {line['column']}) at init.")
        rows.append(
            {
                "row": line["row"],
                "column": line["column"],
                "published": line["mean_log10_abs"],
                "mean": float(found["mean"]),
                "sd": float(found["std"]),
                "n_seeds": int(found["count"]),
                "deviation": float(found["mean"] - line["mean_log10_abs"]),
            }
        )
    return rows
