"""How every figure looks, and how it is saved: one place, so that twenty notebooks agree."""

import json
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from curvature_gap.files import atomic_path

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN = 3.3
"""Width of one column of the paper, in inches; every figure is drawn for it."""

TEXT = 6.9
"""Width of the whole text block, in inches."""

FONT = 7.0
"""Smallest font size, in points, at the size drawn."""

# Okabe and Ito's palette: distinct under all common colour blindnesses. Black is left to reference lines.
# Their yellow is left out: it does not show as a line on white.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
GREY = "#5F5F5F"
CYCLE = (BLUE, RED, GREEN, ORANGE, PURPLE, SKY, GREY)

BLOCK_LABELS = {
    "embed": "embed",
    "W_Q": "$W_Q$",
    "W_K": "$W_K$",
    "W_V": "$W_V$",
    "W_O": "$W_O$",
    "LN1": "LN1",
    "LN1_gamma": r"LN1 $\gamma$",
    "LN1_beta": r"LN1 $\beta$",
    "W_1": "$W_1$",
    "W_2": "$W_2$",
    "LN2": "LN2",
    "LN2_gamma": r"LN2 $\gamma$",
    "LN2_beta": r"LN2 $\beta$",
    "b_1": "$b_1$",
    "b_2": "$b_2$",
    "classifier": "classifier",
    "embed_bias": "embed bias",
    "classifier_bias": "class. bias",
}
SHORT_LABELS = {
    "LN1_gamma": r"$\gamma_1$",
    "LN1_beta": r"$\beta_1$",
    "LN2_gamma": r"$\gamma_2$",
    "LN2_beta": r"$\beta_2$",
}

# The same block has the same colour in every figure; dashes tell apart what colour alone would not.
BLOCK_COLOURS = {
    "W_Q": BLUE,
    "W_K": ORANGE,
    "W_V": RED,
    "W_O": PURPLE,
    "W_1": GREEN,
    "W_2": SKY,
    "LN1": GREY,
    "LN1_gamma": GREY,
    "LN1_beta": GREY,
    "LN2": "#000000",
    "LN2_gamma": "#000000",
    "LN2_beta": "#000000",
    "embed": "#8C510A",
    "classifier": "#999933",
}
BLOCK_DASHES = {"LN1": "--", "LN2": "--", "LN1_gamma": "-", "LN1_beta": ":", "LN2_gamma": "-", "LN2_beta": ":"}

_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "mathtext.fontset": "dejavusans",
    "font.size": FONT,
    "axes.titlesize": 8,
    "axes.labelsize": FONT,
    "xtick.labelsize": FONT,
    "ytick.labelsize": FONT,
    "legend.fontsize": FONT,
    "figure.titlesize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlepad": 4,
    "axes.labelpad": 2,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.minor.size": 1.5,
    "ytick.minor.size": 1.5,
    "xtick.major.pad": 2,
    "ytick.major.pad": 2,
    "lines.linewidth": 1.1,
    "lines.markersize": 3,
    "patch.linewidth": 0.6,
    "grid.linewidth": 0.4,
    "grid.color": "#DDDDDD",
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.labelspacing": 0.3,
    "legend.columnspacing": 1.0,
    "legend.borderaxespad": 0.2,
    "image.cmap": "viridis",
    "figure.figsize": (COLUMN, 2.4),
    "figure.dpi": 120,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,
    "svg.hashsalt": "curvature-gap",
}


def use() -> None:
    """Set matplotlib's defaults to this style, whatever the reader's own matplotlibrc says."""
    import matplotlib as mpl
    from cycler import cycler

    mpl.rcdefaults()
    mpl.rcParams.update({**_STYLE, "axes.prop_cycle": cycler(color=CYCLE)})


def new_figure(height: float, width: float = COLUMN) -> "Figure":
    """Return an empty figure, in inches, whose labels and panels make room for one another."""
    import matplotlib.pyplot as plt

    return plt.figure(figsize=(width, height), layout="constrained")


def save_figure(fig: "Figure", stem: str | Path, caption: str) -> None:
    """Write `stem` + `.pdf`, `.png` and, with the caption, `.txt`; with an empty `stem` only show the caption.

    The same figure gives the same bytes: dates and versions are left out. Inside a notebook the caption is shown too.
    """
    if "IPython" in sys.modules:
        from IPython.display import Markdown, display

        display(Markdown(caption))
    if not str(stem):
        return
    # The layout is solved once, not again for each file.
    fig.draw_without_rendering()
    fig.set_layout_engine("none")
    # matplotlib reads this for a PDF's dates.
    os.environ.setdefault("SOURCE_DATE_EPOCH", "0")
    metadata = {".pdf": {"Creator": None, "Producer": None, "CreationDate": None}, ".png": {"Software": None}}
    for suffix, leave_out in metadata.items():
        with atomic_path(f"{stem}{suffix}") as temporary:
            fig.savefig(temporary, metadata=leave_out)
    with atomic_path(f"{stem}.txt") as temporary:
        temporary.write_text(caption.strip() + "\n", encoding="utf-8")


def about_data(record_path: str | Path, preset: str) -> str:
    """Return the caption's words on preset and dataset, from a dataset's JSON record.

    What stands in for the real images is called substituted data.
    """
    record = read_json(record_path)
    words = f"Preset {preset}, dataset {record['name']}"
    if not record["available"]:
        return f"{words}: not at hand."
    words += f" ({record['train']['n']:,} training images, source: {record['source']})."
    return f"{words} Substituted data: {record['note'].rstrip('.')}." if record["note"] else words


def dataset_title(run: str, record_path: str | Path) -> str:
    """Return a run's dataset as a panel is titled, and whether other data stand in for it."""
    name = {"cifar100": "CIFAR-100", "mnist": "MNIST"}.get(dataset := run.split("_seed")[0], dataset)
    record = read_json(record_path)
    return f"{name} (substituted data)" if record["available"] and record["note"] else name


def not_run(ax: "Axes", record_path: str | Path) -> str:
    """Say inside a panel that it was not run, and return the reason in one line, for the caption."""
    reason = read_json(record_path)["note"] or "the dataset is not at hand"
    first = textwrap.shorten(reason.strip().splitlines()[0], 160, placeholder=" …")
    ax.set(xticks=[], yticks=[])
    ax.text(0.5, 0.62, "not run", ha="center", fontsize=9, color=GREY, transform=ax.transAxes)
    # parse_math: a reason may hold a dollar sign.
    lines = "\n".join(textwrap.wrap(first, 44))
    ax.text(0.5, 0.5, lines, ha="center", va="top", color=GREY, transform=ax.transAxes, parse_math=False)
    for spine in ax.spines.values():
        spine.set(visible=True, color="#BBBBBB", linestyle=(0, (3, 3)))
    return first


def read_json(path: str | Path) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def final_accuracies(metrics_paths: str | Sequence[str]) -> list[float]:
    """Return the last validation accuracy of every run's metrics table; runs without rows are left out."""
    import pandas as pd

    paths = [metrics_paths] if isinstance(metrics_paths, str) else metrics_paths
    tables = [pd.read_csv(path) for path in paths]
    return [float(table["validation_accuracy"].iloc[-1]) for table in tables if len(table)]


def about_accuracy(metrics_paths: str | Sequence[str]) -> str:
    """Return `test accuracy 86.1 %`, as a range when there are several runs, or that no model was trained."""
    accuracies = final_accuracies(metrics_paths)
    if not accuracies:
        return "no model was trained"
    low, high = 100 * min(accuracies), 100 * max(accuracies)
    spread = f"{low:.1f} %" if len(accuracies) == 1 else f"{low:.1f} to {high:.1f} % over {len(accuracies)} seeds"
    return f"test accuracy {spread}"


def seeds_in_words(seeds: Sequence[int]) -> str:
    """Return `seed 0`, `seeds 0 to 4` or `seeds 0, 3, 7`."""
    seeds = sorted({int(seed) for seed in seeds})
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    if seeds == list(range(seeds[0], seeds[-1] + 1)):
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"seeds {', '.join(map(str, seeds))}"


def over_seeds(seeds: Sequence[int]) -> str:
    """Return `5 seeds (0 to 4)` or `the one seed (0)`, to follow "median over"."""
    n, words = len(set(seeds)), seeds_in_words(seeds).split(" ", 1)[1]
    return f"the one seed ({words})" if n == 1 else f"{n} seeds ({words})"


def label(block: str) -> str:
    """Return a parameter block as the figures write it: `W_Q` → $W_Q$, `block2_W_Q` → 2 $W_Q$."""
    if block.startswith("block"):
        number, name = block.removeprefix("block").split("_", 1)
        return f"{number} {BLOCK_LABELS.get(name, name)}"
    return BLOCK_LABELS.get(block, block.replace("_", " "))


def panel_title(ax: "Axes", letter: str, text: str) -> None:
    """Write `(a) text` above a panel."""
    ax.set_title(f"({letter}) {text}")


def log_axis(axis: Any) -> None:
    """Make an x or y axis logarithmic, after drawing; plain numbers where it spans under two decades, else powers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
    low, high = sorted(axis.get_view_interval())
    if high < 100 * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high > 5 * low else MaxNLocator(5))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def light_grid(ax: "Axes", axis: str = "both") -> None:
    """Draw a grid behind the data."""
    ax.grid(True, axis=axis, which="major")  # type: ignore[arg-type]
    ax.set_axisbelow(True)


def spread(centres: "np.ndarray", gap: float, low: float, high: float) -> "np.ndarray":
    """Move label positions apart until neighbours are `gap` away, as little as possible, within [low, high].

    Raises:
        ValueError: If there is no room.
    """
    import numpy as np

    n = len(centres)
    if (n - 1) * gap > high - low + 1e-9:
        raise ValueError(f"{n} labels at distance {gap:g} do not fit between {low:g} and {high:g}.")
    # With the gaps taken out, the nearest non-decreasing sequence is the isotonic regression: pool adjacent violators.
    wanted = centres - gap * np.arange(n)
    groups: list[tuple[float, int]] = []
    for value in wanted:
        mean, count = float(value), 1
        while groups and groups[-1][0] > mean:
            previous, members = groups.pop()
            mean, count = (previous * members + mean * count) / (members + count), members + count
        groups.append((mean, count))
    moved = np.concatenate([[mean] * count for mean, count in groups])
    return np.clip(moved, low, high - gap * (n - 1)) + gap * np.arange(n)


def steps_axis(ax: "Axes", label: bool = True) -> None:
    """Show training steps on a scale that is linear up to 1 and logarithmic after: step 0 is on it."""
    ax.set_xscale("symlog", linthresh=1, linscale=0.4)
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}" if x < 1e4 else f"{x / 1000:g}k")
    ax.set_xlim(left=0)
    if label:
        ax.set_xlabel("training step")
    else:
        ax.tick_params(labelbottom=False)
