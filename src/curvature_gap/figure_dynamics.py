"""FIG-5 and FIG-7 to FIG-11: parameter blocks and their Hessian blocks along a training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from curvature_gap import figure_style as style
from curvature_gap.figure_hessian import FLOOR, HessianFile, cell_edges, log_magnitude, pooled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CELLS = 200
"""Cells along an edge of one small heat map."""

OVERVIEW_BLOCKS = ("W_Q", "W_K", "W_V", "W_O", "W_1", "W_2", "LN1", "LN2")


def bands(ax: "Axes", dynamics: "pd.DataFrame", column: str, blocks: Sequence[str], **line: Any) -> None:
    """Draw a norm of each block against the step: the median over seeds, in a band from the smallest to the largest."""
    for block in blocks:
        rows = dynamics[dynamics["block"] == block]
        if rows.empty:
            raise ValueError(f"No rows of block {block}; there are {', '.join(dynamics['block'].unique())}.")
        over_seeds = rows.groupby("step")[column]
        median, low, high = over_seeds.median(), over_seeds.min(), over_seeds.max()
        how = {"color": style.BLOCK_COLOURS[block], "linestyle": style.BLOCK_DASHES.get(block, "-"), **line}
        ax.plot(median.index, median, label=style.label(block), **how)
        ax.fill_between(low.index, low, high, color=how["color"], alpha=0.2, linewidth=0)


def log_norms(ax: "Axes", ylabel: str, last: bool) -> None:
    """Set the axes of a norm along a training; only the last of a stack carries the step's label."""
    style.log_axis(ax.yaxis)
    ax.set_ylabel(ylabel)
    style.steps_axis(ax, label=last)
    style.light_grid(ax)


def overview_figure(dynamics: "pd.DataFrame") -> "Figure":
    """Draw FIG-5: spectral norms of the parameter blocks, and of their diagonal Hessian blocks."""
    fig = style.new_figure(3.9)
    top, bottom = fig.subplots(2, 1, sharex=True)
    bands(top, dynamics, "parameter_spectral", OVERVIEW_BLOCKS)
    bands(bottom, dynamics, "hessian_spectral", OVERVIEW_BLOCKS)
    log_norms(top, "spectral norm", last=False)
    log_norms(bottom, "spectral norm", last=True)
    style.panel_title(top, "a", "parameter blocks")
    style.panel_title(bottom, "b", "their Hessian blocks")
    fig.legend(*top.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return fig


def read_parameters(path: str | Path) -> dict[str, np.ndarray]:
    """Read a checkpoint as arrays. Raises ValueError if the file is damaged."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return {name: np.asarray(array, dtype=np.float64) for name, array in load_file(path).items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); remove it and run again.") from error


def entries_image(parameters: Mapping[str, np.ndarray], blocks: Sequence[str]) -> np.ndarray:
    """Put blocks under one another: a vector is a row, and a tall matrix is turned so that all have one width.

    Raises:
        ValueError: If the blocks have different widths all the same.
    """
    rows = [np.atleast_2d(parameters[name]) for name in blocks]
    width = max(max(row.shape) for row in rows) if len({row.shape for row in rows}) > 1 else rows[0].shape[1]
    turned = [row.T if row.shape[1] != width else row for row in rows]
    if {row.shape[1] for row in turned} != {width}:
        raise ValueError(f"Blocks {', '.join(blocks)} do not fit under one another: {[row.shape for row in rows]}.")
    return np.concatenate(turned)


def small_maps(
    fig: Any, axes: Sequence["Axes"], images: Sequence[np.ndarray], limits: tuple[float, float], text: str
) -> None:
    """Draw heat maps side by side as squares, with one scale and one colour bar."""
    drawn, aspect = None, images[0].shape[1] / images[0].shape[0]
    for ax, image in zip(axes, images, strict=True):
        drawn = ax.imshow(image, vmin=limits[0], vmax=limits[1], aspect=aspect, interpolation="nearest")
        ax.set(xticks=[], yticks=[])
        for spine in ax.spines.values():
            spine.set_visible(False)
    if drawn is None:
        raise ValueError("There are no images to draw.")
    bar = fig.colorbar(drawn, ax=list(axes), label=text, aspect=8, pad=0.02, fraction=0.12)
    bar.outline.set_visible(False)
    bar.locator = _three_ticks()
    bar.update_ticks()


def _three_ticks() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=3)


def divide(axes: Sequence["Axes"], sizes: Sequence[int] | np.ndarray, blocks: Sequence[str], both: bool) -> None:
    """Draw dashed white lines between blocks of these sizes, in rows and, if `both`, in columns; name the rows."""
    ends = np.cumsum(sizes)
    names = [style.SHORT_LABELS.get(block, style.label(block)) for block in blocks]
    axes[0].set_yticks(ends - np.asarray(sizes) / 2 - 0.5, names)
    axes[0].tick_params(length=0)
    for boundary in ends[:-1]:
        for ax in axes:
            ax.axhline(boundary - 0.5, color="white", linewidth=0.5, dashes=(4, 3))
            if both:
                ax.axvline(boundary - 0.5, color="white", linewidth=0.5, dashes=(4, 3))


def block_figure(
    dynamics: "pd.DataFrame",
    parameters: Mapping[int, Mapping[str, np.ndarray]],
    hessians: Mapping[int, HessianFile],
    blocks: Sequence[str],
    norms_of: Sequence[str],
) -> "Figure":
    """Draw one of FIG-7 to FIG-11.

    Args:
        dynamics: Rows of `dynamics.csv` within the window that is shown.
        parameters: Checkpoints of one seed by step; the entries of `blocks` are drawn.
        hessians: Whole Hessians of the same seed and steps; their diagonal part of `blocks` is drawn.
        blocks: Parameter blocks of the heat maps.
        norms_of: Blocks whose norms are drawn; LN1 and LN2 pool scale and shift.
    """
    steps = list(parameters)
    fig = style.new_figure(5.0)
    halves: Any = fig.subfigures(2, 1, height_ratios=(1.75, 3.25))
    maps, norms = halves
    grid = maps.subplots(2, len(steps), squeeze=False)
    images = [entries_image(parameters[step], blocks) for step in steps]
    low, high = min(float(i.min()) for i in images), max(float(i.max()) for i in images)
    small_maps(maps, grid[0], images, (low, high), "entry")
    curvature, boundaries = zip(*(_hessian_image(hessians[step], blocks) for step in steps), strict=True)
    small_maps(maps, grid[1], curvature, (FLOOR, max(float(i.max()) for i in curvature)), "$\\log_{10}$ |entry|")
    heights = [parameters[steps[0]][name].size // images[0].shape[1] for name in blocks]
    divide(grid[0], heights, blocks, both=False)
    divide(grid[1], boundaries[0], blocks, both=True)
    for ax, step in zip(grid[0], steps, strict=True):
        ax.set_title(f"step {step}", loc="center", fontsize=style.FONT)
    _norm_panels(norms, dynamics, norms_of)
    maps.suptitle("(a) entries of the parameters and of their Hessian block", x=0.01, ha="left")
    return fig


def _norm_panels(norms: Any, dynamics: "pd.DataFrame", blocks: Sequence[str]) -> None:
    """Draw spectral and Frobenius norms of parameters and Hessian blocks; median over seeds and range."""
    top, bottom = norms.subplots(2, 1, sharex=True)
    for ax, what in ((top, "parameter"), (bottom, "hessian")):
        for measure, dashes, width in (("spectral", "-", 1.3), ("frobenius", (0, (3, 1.5)), 0.9)):
            bands(ax, dynamics, f"{what}_{measure}", blocks, linestyle=dashes, linewidth=width)
        log_norms(ax, "norm", last=ax is bottom)
    style.panel_title(top, "b", "norms of the parameters")
    style.panel_title(bottom, "c", "norms of their Hessian blocks")
    handles = [
        top.plot([], [], color=style.BLOCK_COLOURS[block], linestyle=dashes, linewidth=width)[0]
        for block in blocks
        for dashes, width in (("-", 1.3), ((0, (3, 1.5)), 0.9))
    ]
    names = [f"{style.label(block)} {measure}" for block in blocks for measure in ("spectral", "Frobenius")]
    norms.legend(handles, names, ncols=2, loc="outside lower center")


def _hessian_image(hessian: HessianFile, blocks: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the pooled log10 |entry| of the blocks' diagonal part and the cells of each block."""
    part = hessian.part(blocks)
    starts, boundaries = cell_edges(part.offsets, min(CELLS, len(part.H)))
    return pooled(log_magnitude(part.H), starts), np.diff(boundaries)
