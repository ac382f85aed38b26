"""Heat maps of a Hessian's absolute entries, pooled block by block to the pixels that a page has."""

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from curvature_gap import figure_style as style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FLOOR = -6.0
"""Lower end of the colour bar, log10, as in the published figures; smaller entries, zeros too, are drawn there."""

PIXELS = 600
"""Cells along an edge of a whole Hessian: 300 dots an inch over two inches."""


@dataclass(frozen=True)
class HessianFile:
    """What a figure needs of `hessians/<run>/<stage>.npz`. `H` is float64 (P, P)."""

    H: np.ndarray
    names: tuple[str, ...]
    offsets: np.ndarray
    loss: float

    def part(self, names: Sequence[str]) -> "HessianFile":
        """Return the Hessian of some blocks only. Raises ValueError if a name is unknown."""
        unknown = [name for name in names if name not in self.names]
        if unknown:
            raise ValueError(f"The Hessian has no block {', '.join(unknown)}; it has {', '.join(self.names)}.")
        chosen = [self.names.index(name) for name in names]
        rows = np.concatenate([np.arange(self.offsets[i], self.offsets[i + 1]) for i in chosen])
        sizes = np.diff(self.offsets)[chosen]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        return HessianFile(self.H[np.ix_(rows, rows)], tuple(names), offsets, self.loss)


def read_hessian(path: str | Path) -> HessianFile:
    """Read a whole Hessian. Raises ValueError if the file is damaged or holds no whole matrix."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if "H" not in file.files:
                raise ValueError(f"{path} holds no whole matrix H, only {', '.join(file.files)}.")
            return HessianFile(file["H"], tuple(map(str, file["names"])), file["offsets"], float(file["loss"]))
    except (zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path} is damaged ({error}); remove it and run again.") from error


def attention_blocks(names: Sequence[str]) -> list[str]:
    """Return queries, keys and values of the first transformer block."""
    prefix = "" if "W_Q" in names else "block1_"
    return [f"{prefix}{name}" for name in ("W_Q", "W_K", "W_V")]


def log_magnitude(H: np.ndarray) -> np.ndarray:
    """Return log10 max(|h|, 10^FLOOR), as in `block_norms.csv`."""
    return np.log10(np.maximum(np.abs(H), 10.0**FLOOR))


def cell_edges(offsets: np.ndarray, cells: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut each parameter block into cells, in proportion to its size and one at least.

    No cell straddles two blocks, so a thin block keeps its own colour.

    Returns:
        The first row of every cell, and for each block boundary the number of cells before it.
    """
    sizes = np.diff(offsets)
    counts = np.clip(np.round(sizes * cells / offsets[-1]).astype(int), 1, sizes)
    starts = [
        np.linspace(first, last, count, endpoint=False).astype(int)
        for first, last, count in zip(offsets[:-1], offsets[1:], counts, strict=True)
    ]
    return np.concatenate(starts), np.concatenate([[0], np.cumsum(counts)])


def pooled(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the mean over each cell of a square matrix cut at `starts` in rows and columns."""
    sums = np.add.reduceat(np.add.reduceat(values, starts, axis=0), starts, axis=1)
    heights = np.diff([*starts, len(values)])
    return np.asarray(sums / np.outer(heights, heights))


def hessian_panel(ax: "Axes", hessian: HessianFile, cells: int = PIXELS) -> Any:
    """Draw log10 |entry|, dashed lines between the blocks and their names; return the image, for a colour bar."""
    starts, boundaries = cell_edges(hessian.offsets, cells)
    image = pooled(log_magnitude(hessian.H), starts)
    n = len(image)
    drawn = ax.imshow(image, extent=(0, n, n, 0), interpolation="nearest", aspect="equal", cmap="viridis")
    for boundary in boundaries[1:-1]:
        ax.axhline(boundary, color="white", linewidth=0.5, dashes=(4, 3))
        ax.axvline(boundary, color="white", linewidth=0.5, dashes=(4, 3))
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.set(xticks=[], yticks=[], xlim=(0, n), ylim=(n, 0))
    names, centres = _named_centres(hessian.names, boundaries)
    _write_names(ax, names, centres, n)
    return drawn


def _named_centres(names: Sequence[str], boundaries: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Return a label and a centre for each block; scale and shift of one LayerNorm share one."""
    spans: dict[str, list[float]] = {}
    for name, first, last in zip(names, boundaries[:-1], boundaries[1:], strict=True):
        pool = name.removesuffix("_gamma").removesuffix("_beta") if "LN" in name else name
        span = spans.setdefault(pool, [first, last])
        span[1] = last
    return [style.label(pool) for pool in spans], np.array([(a + b) / 2 for a, b in spans.values()])


def _write_names(ax: "Axes", names: Sequence[str], centres: np.ndarray, n: int) -> None:
    """Write block names left of and below the matrix, with a short line to the block where a name had to move."""
    inches = ax.get_window_extent().width / ax.get_figure(root=True).dpi  # type: ignore[union-attr]
    unit = n / (72 * inches)  # one point, in cells
    places = style.spread(centres, 8.5 * unit, -4 * unit, n + 4 * unit)
    # Names stand upright where the narrowest gap between two of them is too small for the words side by side.
    rotation = 90 if min(np.diff(places), default=n) < 30 * unit else 0
    line: Any = {"color": "black", "linewidth": 0.5, "clip_on": False}
    for name, centre, place in zip(names, centres, places, strict=True):
        ax.plot([0, -3 * unit, -7 * unit], [centre, centre, place], **line)
        ax.text(-9 * unit, place, name, ha="right", va="center_baseline", fontsize=style.FONT)
        ax.plot([centre, centre, place], [n, n + 3 * unit, n + 7 * unit], **line)
        ax.text(place, n + 9 * unit, name, ha="center", va="top", rotation=rotation, fontsize=style.FONT)


def hessian_figure(hessian: HessianFile) -> "Figure":
    """Draw FIG-3 and FIG-4: the whole Hessian and its self-attention part, one colour bar for both."""
    import matplotlib.pyplot as plt

    side, left, bottom, gap, top = 2.02, 0.61, 0.25, 0.92, 0.22
    height = bottom + side + gap + side + top
    fig = plt.figure(figsize=(style.COLUMN, height))
    box = (side / style.COLUMN, side / height)
    whole = fig.add_axes((left / style.COLUMN, (bottom + side + gap) / height, *box))
    part = fig.add_axes((left / style.COLUMN, bottom / height, *box))
    attention = hessian.part(attention_blocks(hessian.names))
    images = [hessian_panel(whole, hessian), hessian_panel(part, attention)]
    style.panel_title(whole, "a", "whole Hessian")
    style.panel_title(part, "b", "queries, keys and values")
    top_colour = max(float(image.get_array().max()) for image in images)
    for image in images:
        image.set_clim(FLOOR, top_colour)
    x = (left + side + 0.09) / style.COLUMN
    bar = fig.add_axes((x, bottom / height, 0.1 / style.COLUMN, (2 * side + gap) / height))
    fig.colorbar(images[0], cax=bar, label="mean of $\\log_{10}$ |entry|")
    bar.spines[:].set_visible(False)
    return fig


def pooling_in_words(hessian: HessianFile, cells: int = PIXELS) -> str:
    """Return the caption's sentence on what one pixel is and how large the largest entry is."""
    starts, _ = cell_edges(hessian.offsets, cells)
    per_cell = int(np.diff([*starts, len(hessian.H)]).max())
    shown = (
        "Each entry is drawn"
        if per_cell == 1
        else f"A pixel of (a) is the mean of log10 |entry| over up to {per_cell} × {per_cell} entries of one block pair"
    )
    largest = float(np.abs(hessian.H).max())
    return f"{shown}; entries below 1e{FLOOR:.0f} count as 1e{FLOOR:.0f}. The largest |entry| is {largest:.3g}."
