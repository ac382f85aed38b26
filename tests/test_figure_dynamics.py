"""Curves along a training show median and range over seeds; heat maps show the stored entries."""

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

mpl.use("agg")

from matplotlib.figure import Figure

from curvature_gap import figure_dynamics as dynamics
from curvature_gap import figure_style as style
from curvature_gap.figure_hessian import HessianFile

NORMS = ("parameter_spectral", "parameter_frobenius", "hessian_spectral", "hessian_frobenius")


@pytest.fixture(autouse=True)
def _style():
    style.use()


@pytest.fixture
def table():
    """Norms of every block at steps 0, 2 and 7 in seeds 0, 1 and 2: 10, 30 and 20 times step + 1."""
    rows = [
        {"step": step, "seed": seed, "block": block, **dict.fromkeys(NORMS, factor * (step + 1.0))}
        for block in dynamics.OVERVIEW_BLOCKS
        for seed, factor in enumerate((10, 30, 20))
        for step in (0, 2, 7)
    ]
    return pd.DataFrame(rows)


def test_lines_are_medians_and_bands_the_range_over_seeds(table):
    ax = Figure().add_subplot()
    dynamics.bands(ax, table, "hessian_spectral", ["W_V"])
    assert ax.lines[0].get_xdata().tolist() == [0, 2, 7]
    assert ax.lines[0].get_ydata().tolist() == [20, 60, 160]
    edge = ax.collections[0].get_paths()[0].vertices
    assert sorted(set(edge[edge[:, 0] == 7][:, 1])) == [80, 240]
    with pytest.raises(ValueError, match="No rows of block W_Z"):
        dynamics.bands(ax, table, "hessian_spectral", ["W_Z"])


def test_the_overview_names_every_block_and_shows_step_zero(table):
    fig = dynamics.overview_figure(table)
    fig.draw_without_rendering()
    names = [text.get_text() for text in fig.legends[0].get_texts()]
    assert names == [style.label(block) for block in dynamics.OVERVIEW_BLOCKS]
    assert fig.axes[0].get_xlim()[0] == 0


def test_entries_are_put_under_one_another():
    W_1, W_2 = np.arange(10.0).reshape(2, 5), np.arange(15.0).reshape(5, 3)
    image = dynamics.entries_image({"W_1": W_1, "W_2": W_2}, ["W_1", "W_2"])
    np.testing.assert_array_equal(image, np.concatenate([W_1, W_2.T]))
    vectors = {"LN1_gamma": np.ones(3), "LN1_beta": np.zeros(3)}
    np.testing.assert_array_equal(dynamics.entries_image(vectors, list(vectors)), [[1, 1, 1], [0, 0, 0]])
    tall = {"W_Q": np.arange(6.0).reshape(3, 2)}
    np.testing.assert_array_equal(dynamics.entries_image(tall, ["W_Q"]), tall["W_Q"])
    with pytest.raises(ValueError, match="do not fit under one another"):
        dynamics.entries_image({"a": np.ones((2, 7)), "b": np.ones((3, 5))}, ["a", "b"])


def test_a_damaged_checkpoint_is_named(tmp_path):
    (tmp_path / "init.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"init\.safetensors is damaged"):
        dynamics.read_parameters(tmp_path / "init.safetensors")


def test_a_block_figure_shows_entries_hessian_and_norms(table):
    parameters = {step: {"W_1": np.full((2, 5), step), "W_2": np.ones((5, 2))} for step in (0, 7)}
    sizes = np.array([0, 10, 20])
    hessians = {step: HessianFile(np.eye(20), ("W_1", "W_2"), sizes, 1.0) for step in (0, 7)}
    fig = dynamics.block_figure(table, parameters, hessians, ["W_1", "W_2"], ["W_1", "W_2"])
    fig.draw_without_rendering()
    images = [ax.images[0].get_array() for ax in fig.axes if ax.images]
    assert [image.shape for image in images] == [(4, 5), (4, 5), (20, 20), (20, 20)]
    np.testing.assert_array_equal(images[1][:2], np.full((2, 5), 7))
    np.testing.assert_array_equal(images[2], np.where(np.eye(20) == 1, 0, -6))
    assert min(t.get_fontsize() for t in fig.findobj(mpl.text.Text) if t.get_text()) >= style.FONT
