"""Times of exact Hessians: one line a method, what failed in words."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from curvature_gap import figure_style as style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

SHIFTS = {"float32": (style.SKY, -0.15), "float64": (style.BLUE, 0.15)}
"""Colour of a precision, and how far from its method's line its mark stands."""
LONGEST = 22
"""Letters of a failure that fit beside the longest method's name in one column of the paper."""


def times_panel(ax: "Axes", rows: "pd.DataFrame", methods: Sequence[str]) -> None:
    """Draw each method's seconds; filled: measured in full, open: extrapolated, cross: wrong; else say why not.

    Args:
        ax: Empty axes.
        rows: Rows of benchmarks.csv of one size.
        methods: The lines, top first; each method of `rows` is among them.
    """
    for _, row in rows.dropna(subset="seconds").iterrows():
        colour, shift = SHIFTS[row["dtype"]]
        wrong = "wrong" in row["status"]
        fill = "white" if row["extrapolated"] and not wrong else colour
        y = methods.index(row["method"]) + shift
        ax.plot(row["seconds"], y, "X" if wrong else "o", color=colour, markerfacecolor=fill, markersize=4.5)
    for method, failed in rows[rows["seconds"].isna()].groupby("method"):
        ax.annotate(
            failure(list(failed["status"])),
            (1, methods.index(str(method))),
            xycoords=ax.get_yaxis_transform(),
            ha="right",
            va="center",
            color=style.GREY,
            # The grid must not strike the words out.
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
    ax.set_yticks(range(len(methods)), methods)
    ax.set(xscale="log", ylim=(len(methods) - 0.5, -0.5))
    style.light_grid(ax)


def failure(statuses: Sequence[str]) -> str:
    """Return why there is no time, as short as the panel needs: what stands before the first colon."""
    words = ", ".join(dict.fromkeys(status.split(":")[0] for status in statuses))
    return textwrap.shorten(words, LONGEST, placeholder=" …")


def failures(rows: "pd.DataFrame") -> str:
    """Return, for the caption, each method without a time and why in full; empty if there is none."""
    failed = rows[rows["seconds"].isna()]
    by_status: dict[str, list[str]] = {}
    for method, group in failed.groupby("method"):
        by_status.setdefault(", ".join(group["status"].unique()), []).append(str(method))
    return "".join(f"{' and '.join(methods)}: {status}. " for status, methods in by_status.items())
