"""FIG-6 and FIG-12 draw what the tables hold, on logarithmic axes."""

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

mpl.use("agg")

from matplotlib.figure import Figure

from curvature_gap import figure_increments
from curvature_gap import figure_style as style

K = (3, 6, 12, 96)


@pytest.fixture
def rows():
    """Two orderings with batches of 3; right-hand sides 18 and 60 times 3 / (k + 3)."""
    table = [
        {
            "ordering": i,
            "k": k,
            "batch": 3,
            "increment": 2.0 / (k + 3),
            "ema": (i + 1) * 2.0 / (k + 3),
            "rhs_exact": 54.0 / (k + 3),
            "rhs_tight": np.nan,
            "grad_norm": (i + 1) / k**0.5,
            "grad_increment": 1 / k,
        }
        for i in range(2)
        for k in K
    ]
    return pd.DataFrame(table)


def test_a_panel_draws_values_trend_and_bound(rows):
    ax = Figure().add_subplot()
    law = {"exponent": -1.0, "low": -1.1, "high": -0.9, "prefactor": 2.0, "k_first": 6, "k_last": 96}
    handles = figure_increments.increments_panel(ax, rows, rows.iloc[:0], law)
    np.testing.assert_allclose(handles["fitted trend"].get_ydata(), [2 / (k + 3) for k in K[1:]])
    np.testing.assert_allclose(handles["T7 at $w^*$"].get_ydata(), [54 / (k + 3) for k in K])
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert "slope −1.00 [−1.10, −0.90]" in [text.get_text() for text in ax.texts]
    assert not any("displaced" in name for name in handles)


def test_a_bound_that_is_not_known_is_not_drawn(rows):
    ax = Figure().add_subplot()
    law = {"exponent": -1.0, "low": -1.1, "high": -0.9, "prefactor": 2.0, "k_first": 6, "k_last": 96}
    handles = figure_increments.increments_panel(ax, rows, rows, law)
    assert "T7 at a displaced $w$, M by Lanczos" in handles
    assert "the same, M by our tight bound" not in handles


def test_gradients_show_every_ordering_their_median_and_the_floor(rows):
    axes = Figure().subplots(2)
    figure_increments.gradient_panels(axes, rows, 0.05, style.BLUE, "mnist")
    assert len(axes[0].lines) == 2 + 1 + 1
    np.testing.assert_allclose(axes[0].lines[2].get_ydata(), [1.5 / k**0.5 for k in K])
    assert set(axes[0].lines[3].get_ydata()) == {0.05}


def test_a_power_line_goes_through_its_point_with_its_slope():
    ax = Figure().add_subplot()
    figure_increments.power_line(ax, np.array([1.0, 10.0, 100.0]), -1.0, (10.0, 3.0))
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [30, 3, 0.3])
