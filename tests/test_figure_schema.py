"""The drawn diagrams name every part of the model once."""

import matplotlib as mpl

mpl.use("agg")

from curvature_gap import figure_schema
from curvature_gap import figure_style as style


def words(fig) -> list[str]:
    return [text.get_text() for text in fig.findobj(mpl.text.Text) if text.get_text()]


def inside(fig) -> bool:
    """Whether all text lies on the page."""
    fig.draw_without_rendering()
    width, height = fig.canvas.get_width_height()
    boxes = [text.get_window_extent() for text in fig.findobj(mpl.text.Text) if text.get_text() and text.get_visible()]
    return all(b.x0 >= -1 and b.y0 >= -1 and b.x1 <= width + 1 and b.y1 <= height + 1 for b in boxes)


def test_the_overview_marks_the_gap_and_differentiates_the_whole_block():
    style.use()
    fig = figure_schema.overview_figure()
    assert {"$w^*$", "$w$", "$|L_{k+1}(w)-L_k(w)|$", "$L_k$", "$L_{k+1}$"} <= set(words(fig))
    assert words(fig).count("Layer-\nNorm") == 2
    assert inside(fig)


def test_the_transformer_is_post_norm_from_image_to_scores():
    style.use()
    fig = figure_schema.transformer_figure()
    height = {t.get_text(): t.get_position()[1] for t in fig.findobj(mpl.text.Text) if t.get_text()}
    order = [
        "image, cut\ninto patches",
        "linear embedding + positions",
        "$X$",
        "self-attention $W_Q, W_K, W_V, W_O$",
        "$F$",
        r"LayerNorm $\gamma_1, \beta_1$",
        "$Y$",
        "feed-forward $W_1$, ReLU, $W_2$",
        "$S$",
        r"LayerNorm $\gamma_2, \beta_2$",
        "$Z$",
        "mean over tokens",
        "linear classifier",
        "class scores",
    ]
    assert sorted(order, key=height.__getitem__) == order
    assert inside(fig)
