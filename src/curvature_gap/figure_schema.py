"""FIG-1 and FIG-2, drawn by code: boxes and arrows on a page measured in inches."""

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from curvature_gap import figure_style as style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[float, float]

ATTENTION, FEED_FORWARD, NORM, LINEAR, PLAIN = "#CFE3F2", "#CDEBDD", "#F0F0F0", "#FBE5C0", "#FFFFFF"
INK = "#222222"


def page(fig: "Figure", width: float, height: float) -> "Axes":
    """Return axes over the whole figure whose unit is the inch."""
    ax = fig.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(0, height))
    ax.axis("off")
    return ax


def box(ax: "Axes", centre: Point, size: Point, text: str, fill: str = PLAIN, **text_style: Any) -> None:
    """Draw a rounded box with text in its middle."""
    from matplotlib.patches import FancyBboxPatch

    (x, y), (w, h) = centre, size
    shape = "round,pad=0,rounding_size=0.05"
    ax.add_patch(FancyBboxPatch((x - w / 2, y - h / 2), w, h, boxstyle=shape, facecolor=fill, edgecolor=INK, zorder=2))
    ax.text(x, y, text, ha="center", va="center", zorder=3, **{"linespacing": 1.15, **text_style})


def arrow(ax: "Axes", start: Point, end: Point) -> None:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>,head_length=0.3,head_width=0.15", **_line()}, zorder=1)


def path(ax: "Axes", *points: Point) -> None:
    """Draw a polyline that ends in an arrow head."""
    xs, ys = zip(*points[:-1], strict=True)
    ax.plot(xs, ys, color=INK, linewidth=0.8, solid_joinstyle="round", zorder=1)
    arrow(ax, points[-2], points[-1])


def plus(ax: "Axes", centre: Point, radius: float = 0.08) -> None:
    """Draw the sign ⊕ of a residual connection."""
    from matplotlib.patches import Circle

    x, y = centre
    ax.add_patch(Circle(centre, radius, facecolor="white", edgecolor=INK, zorder=2))
    ax.plot([x - radius, x + radius], [y, y], color=INK, linewidth=0.7, zorder=3)
    ax.plot([x, x], [y - radius, y + radius], color=INK, linewidth=0.7, zorder=3)


def _line() -> dict[str, Any]:
    return {"color": INK, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0}


def draw_loss_gap(ax: "Axes") -> None:
    """FIG-1a: two losses around w*, and the gap that one more sample makes at some w."""
    w = np.linspace(-1.15, 1.25, 400)
    smaller = 0.30 + 0.85 * w**2 + 0.16 * w**3 - 0.10 * w**4
    larger = 0.42 + 1.22 * w**2 - 0.10 * w**3 - 0.12 * w**4
    ax.plot(w, smaller, color=style.BLUE)
    ax.plot(w, larger, color=style.RED, linestyle="--")
    at = int(np.argmin(np.abs(w - 0.72)))
    ax.annotate(
        "",
        (w[at], larger[at]),
        (w[at], smaller[at]),
        arrowprops={"arrowstyle": "<|-|>,head_length=0.25,head_width=0.12", **_line()},
    )
    ax.text(w[at] - 0.06, (smaller[at] + larger[at]) / 2 + 0.16, r"$|L_{k+1}(w)-L_k(w)|$", ha="right", va="center")
    ax.plot([w[at], w[at]], [0, smaller[at]], color=style.GREY, linewidth=0.6, linestyle=":")
    ax.plot([0, 0], [0, 0.42], color=style.GREY, linewidth=0.6, linestyle=":")
    ax.plot([0, 0], [0.30, 0.42], "o", color=INK, markersize=2.5, zorder=3)
    ax.text(-1.12, 0.78, r"$L_k$", color=style.BLUE)
    ax.text(-0.92, 1.55, r"$L_{k+1}$", color=style.RED, ha="left")
    ax.set(xlim=(-1.25, 1.3), ylim=(0, 1.75), yticks=[], ylabel="loss")
    ax.set_xticks([0, w[at]], [r"$w^*$", r"$w$"])


def draw_hessian_of_block(ax: "Axes") -> None:
    """FIG-1b: the second derivative taken of a whole block, from left to right; `ax` is a page of 3.3 × 1.15 inches."""
    y, h = 0.6, 0.46
    ax.text(0.16, y, r"$\frac{\partial^2}{\partial w^2}$", fontsize=13, ha="center", va="center")
    for x, sign in ((0.37, 1), (3.22, -1)):
        t = np.linspace(-1, 1, 60)
        ax.plot(x + sign * 0.06 * t**2, y + 0.44 * t, color=INK, linewidth=1.1)
    parts = [
        (0.83, 0.54, "self-\nattention", ATTENTION),
        (1.48, 0.42, "Layer-\nNorm", NORM),
        (2.13, 0.54, "feed-\nforward", FEED_FORWARD),
        (2.78, 0.42, "Layer-\nNorm", NORM),
    ]
    for x, width, text, fill in parts:
        box(ax, (x, y), (width, h), text, fill)
    arrow(ax, (0.40, y), (0.56, y))
    for (left, a, *_), (right, b, *_) in pairwise(parts):
        arrow(ax, (left + a / 2, y), (right - b / 2, y))
    arrow(ax, (2.99, y), (3.17, y))
    # The residual connections of post-norm: around attention and around the feed-forward part.
    for start, end in ((0.48, 1.185), (1.77, 2.475)):
        path(ax, (start, y), (start, y + 0.36), (end, y + 0.36), (end, y))
    for x, text in ((0.83, "$W_Q, W_K, W_V$"), (2.13, "$W_1, W_2$")):
        ax.text(x, y - h / 2 - 0.05, text, ha="center", va="top")


def overview_figure() -> "Figure":
    """Draw FIG-1."""
    import matplotlib.pyplot as plt

    height = 3.25
    fig = plt.figure(figsize=(style.COLUMN, height))
    curves = fig.add_axes((0.09, 1.55 / height, 0.88, 1.48 / height))
    draw_loss_gap(curves)
    style.panel_title(curves, "a", "what one more sample changes")
    schema = fig.add_axes((0, 0, 1, 1.15 / height))
    schema.set(xlim=(0, style.COLUMN), ylim=(0, 1.15))
    schema.axis("off")
    draw_hessian_of_block(schema)
    fig.text(0.09, 1.18 / height, "(b) the curvature of a whole Transformer block", fontsize=8)
    return fig


def draw_patches(ax: "Axes", corner: Point, side: float, n: int = 4) -> None:
    """Draw an image cut into n × n patches: a hand-drawn digit's strokes under a grid."""
    from matplotlib.patches import Rectangle

    x, y = corner
    ax.add_patch(Rectangle(corner, side, side, facecolor="#F7F7F7", edgecolor=INK, zorder=2))
    t = np.linspace(0, 1, 50)
    stroke_x = np.concatenate([0.25 + 0.5 * t, 0.75 - 0.33 * t])
    stroke_y = np.concatenate([0.8 + 0 * t, 0.8 - 0.65 * t])
    ax.plot(x + side * stroke_x, y + side * stroke_y, color=INK, linewidth=2.6, solid_joinstyle="round", zorder=2)
    for i in range(1, n):
        for xs, ys in (([x, x + side], [y + side * i / n] * 2), ([x + side * i / n] * 2, [y, y + side])):
            ax.plot(xs, ys, color="#999999", linewidth=0.5, zorder=3)


def transformer_figure() -> "Figure":
    """Draw FIG-2, the post-norm vision transformer, from the image at the bottom to the classes at the top."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import FancyBboxPatch

    height, x, wide = 4.75, 1.5, 1.5
    fig = plt.figure(figsize=(style.COLUMN, height))
    ax = page(fig, style.COLUMN, height)
    draw_patches(ax, (x - 0.29, 0.1), 0.58)
    ax.text(x + 0.4, 0.39, "image, cut\ninto patches", va="center")
    frame = "round,pad=0,rounding_size=0.08"
    ax.add_patch(FancyBboxPatch((0.42, 1.36), 2.1, 2.3, boxstyle=frame, facecolor="#FAFAFA", edgecolor=style.GREY))
    ax.text(2.58, 2.51, "× number\nof blocks", va="center", color=style.GREY)

    def stage(y: float, text: str, fill: str, h: float = 0.26) -> None:
        box(ax, (x, y), (wide, h), text, fill)

    stage(0.98, "linear embedding + positions", LINEAR)
    stage(1.75, "self-attention $W_Q, W_K, W_V, W_O$", ATTENTION)
    plus(ax, (x, 2.06))
    stage(2.34, r"LayerNorm $\gamma_1, \beta_1$", NORM)
    stage(2.84, "feed-forward $W_1$, ReLU, $W_2$", FEED_FORWARD)
    plus(ax, (x, 3.15))
    stage(3.43, r"LayerNorm $\gamma_2, \beta_2$", NORM)
    stage(3.98, "mean over tokens", PLAIN)
    stage(4.38, "linear classifier", LINEAR)
    stops = [0.68, 0.85, 1.11, 1.62, 1.88, 1.98, 2.14, 2.21, 2.47, 2.71, 2.97, 3.07, 3.23, 3.30, 3.56, 3.85, 4.11, 4.25]
    for start, end in zip(stops[::2], stops[1::2], strict=True):
        arrow(ax, (x, start), (x, end))
    arrow(ax, (x, 4.51), (x, 4.7))
    for low, high in ((1.47, 2.06), (2.57, 3.15)):
        path(ax, (x, low), (0.57, low), (0.57, high), (x - 0.08, high))
    named = ((1.24, "$X$"), (1.97, "$F$"), (2.59, "$Y$"), (3.23, "$S$"), (3.75, "$Z$"))
    for y, letter in named:
        ax.text(x + 0.14, y, letter, va="center", color=style.BLUE)
    ax.text(x + 0.14, 4.62, "class scores", va="center")
    return fig
