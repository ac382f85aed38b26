"""FIG-6, FIG-12 and the sample size: quantities along k, the number of samples, on logarithmic axes."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from curvature_gap import figure_style as style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

INCREMENT, AVERAGE, MINIMUM, EXACT, TIGHT = "#9BB8CC", style.BLUE, style.GREEN, style.ORANGE, style.RED
ORDERINGS = {"color": style.BLUE, "linewidth": 0.5, "alpha": 0.45}


def log_log(ax: "Axes", ylabel: str, xlabel: str = "") -> None:
    """Make both axes logarithmic, with a grid."""
    ax.set(xscale="log", yscale="log", ylabel=ylabel, xlabel=xlabel)
    style.light_grid(ax)


def power_line(ax: "Axes", x: np.ndarray, exponent: float, through: tuple[float, float], **line: Any) -> None:
    """Draw y ∝ x^exponent through a point."""
    ax.plot(x, through[1] * (x / through[0]) ** exponent, **line)


def along_orderings(ax: "Axes", rows: "pd.DataFrame", column: str, **line: Any) -> None:
    """Draw one thin line per ordering."""
    for _, one in rows.groupby("ordering"):
        ax.plot(one["k"], one[column], **{**ORDERINGS, **line})


def median_over_orderings(rows: "pd.DataFrame", column: str) -> tuple[np.ndarray, np.ndarray]:
    """Return k and the median over the orderings at each k."""
    over = rows.groupby("k")[column].median()
    return over.index.to_numpy(dtype=float), over.to_numpy()


def increments_panel(
    ax: "Axes", minimum: "pd.DataFrame", displaced: "pd.DataFrame", law: Mapping[str, Any]
) -> dict[str, Any]:
    """Draw one panel of FIG-6 and return its legend's handles by name.

    Args:
        ax: Where to draw.
        minimum: Rows of `increments.csv` at w*, all orderings.
        displaced: The same at a displaced w; may be empty.
        law: The fitted `exponent`, `low`, `high` and `prefactor` of the increments at w* in k + b, and its range
            `k_first` to `k_last`, over which it is drawn.
    """
    b = int(minimum["batch"].iloc[0])
    ax.plot(
        minimum["k"], minimum["increment"], ".", color=INCREMENT, markersize=1.4, alpha=0.5, rasterized=True, zorder=1
    )
    along_orderings(ax, minimum, "ema", color=AVERAGE, linewidth=0.5, alpha=0.5)
    k = np.unique(minimum["k"].to_numpy(dtype=float))
    x = k[(k >= law["k_first"]) & (k <= law["k_last"])]
    fit = ax.plot(x, law["prefactor"] * (x + b) ** law["exponent"], color="black", linestyle="--", linewidth=1.0)
    middle, at = np.sqrt(k[0] * k[-1]), law["prefactor"] * np.sqrt(k[0] * k[-1]) ** law["exponent"]
    power_line(ax, k, -1.0, (middle, at / 8), color=style.GREY, linestyle=":", linewidth=1.0)
    handles = {
        "increment at one k": ax.plot([], [], ".", color=INCREMENT)[0],
        "moving average, one line an ordering": ax.plot([], [], color=AVERAGE)[0],
        "fitted trend": fit[0],
        "slope −1": ax.plot([], [], color=style.GREY, linestyle=":")[0],
    }
    sides: list[Any] = [("T7 at $w^*$", minimum, "rhs_exact", MINIMUM, "-")]
    if len(displaced):
        sides.append(("T7 at a displaced $w$, M by Lanczos", displaced, "rhs_exact", EXACT, "-."))
        sides.append(("the same, M by our tight bound", displaced, "rhs_tight", TIGHT, (0, (5, 1.5))))
    for name, rows, column, colour, dashes in sides:
        x, y = median_over_orderings(rows, column)
        if np.isfinite(y).any():
            handles[name] = ax.plot(x, y, color=colour, linestyle=dashes)[0]
    log_log(ax, r"$|L_{k+b}-L_k|$")
    words = f"slope {law['exponent']:.2f} [{law['low']:.2f}, {law['high']:.2f}]".replace("-", "−")
    background = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    ax.text(0.02, 0.04, words, transform=ax.transAxes, bbox=background)
    return handles


def gradient_panels(axes: Sequence["Axes"], rows: "pd.DataFrame", full: float, colour: str, name: str) -> None:
    """Draw FIG-12 for one model: ‖∇L_k(w*)‖ and ‖∇L_{k+1}(w*) − ∇L_k(w*)‖, a line an ordering, and their medians.

    Args:
        axes: The two panels.
        rows: Columns ordering, k, grad_norm, grad_increment.
        full: ‖∇L_n(w*)‖ over all samples; A1 asks for zero.
        colour: Of this model.
        name: For the legend.
    """
    for ax, column in zip(axes, ("grad_norm", "grad_increment"), strict=True):
        along_orderings(ax, rows, column, color=colour)
        ax.plot(*median_over_orderings(rows, column), color=colour, label=f"{name}, median")
    axes[0].axhline(full, color=colour, linestyle="--", linewidth=0.8, label=f"{name}, all samples")
