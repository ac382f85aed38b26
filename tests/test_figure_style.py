"""One style for all figures; equal figures are equal files."""

import json
import subprocess
import sys
from itertools import combinations

import matplotlib as mpl
import numpy as np
import pytest

mpl.use("agg")

from matplotlib.figure import Figure

from curvature_gap import figure_schema
from curvature_gap import figure_style as style


@pytest.fixture(autouse=True)
def _style():
    style.use()


def test_drawn_twice_in_two_processes_is_the_same_bytes(tmp_path):
    code = (
        "import matplotlib, sys; matplotlib.use('agg')\n"
        "from curvature_gap import figure_schema, figure_style as style\n"
        "style.use(); style.save_figure(figure_schema.overview_figure(), sys.argv[1], 'a caption')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "first")], check=True)
    style.save_figure(figure_schema.overview_figure(), tmp_path / "second", "a caption")
    for suffix in (".pdf", ".png", ".txt"):
        assert (tmp_path / f"first{suffix}").read_bytes() == (tmp_path / f"second{suffix}").read_bytes()
    assert b"CreationDate" not in (tmp_path / "first.pdf").read_bytes()
    assert b"/Subtype /Image" not in (tmp_path / "first.pdf").read_bytes(), "a schema is a vector drawing"


def test_without_a_stem_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    style.save_figure(figure_schema.transformer_figure(), "", "a caption")
    assert not list(tmp_path.iterdir())


def test_the_readers_own_settings_do_not_show(monkeypatch):
    monkeypatch.setitem(mpl.rcParams, "font.size", 30)
    monkeypatch.setitem(mpl.rcParams, "figure.facecolor", "red")
    style.use()
    assert mpl.rcParams["font.size"] == style.FONT
    assert mpl.rcParams["figure.facecolor"] == "white"


def test_no_font_is_smaller_than_seven_points():
    figures = [figure_schema.overview_figure(), figure_schema.transformer_figure()]
    sizes = [text.get_fontsize() for fig in figures for text in fig.findobj(mpl.text.Text) if text.get_text()]
    assert min(sizes) >= style.FONT == 7.0
    assert all(fig.get_figwidth() == style.COLUMN for fig in figures)


def _seen_by(matrix, colour):
    """Return linear RGB as a colour-blind reader sees it (Viénot, Brettel, Mollon 1999)."""
    srgb = np.array(mpl.colors.to_rgb(colour))
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    return np.clip(matrix @ linear, 0, 1)


def test_queries_keys_and_values_stay_distinct_for_colour_blind_readers():
    protan = np.array([[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]])
    deutan = np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]])
    colours = [style.BLOCK_COLOURS[name] for name in ("W_Q", "W_K", "W_V")]
    for matrix in (protan, deutan):
        for a, b in combinations(colours, 2):
            distance = np.linalg.norm(_seen_by(matrix, a) ** (1 / 2.2) - _seen_by(matrix, b) ** (1 / 2.2))
            assert distance > 0.15, (a, b)


def test_labels_are_spread_as_little_as_possible():
    np.testing.assert_allclose(style.spread(np.array([1.0, 5.0, 9.0]), 2.0, 0.0, 10.0), [1, 5, 9])
    np.testing.assert_allclose(style.spread(np.array([4.0, 5.0, 6.0]), 2.0, 0.0, 10.0), [3, 5, 7])
    np.testing.assert_allclose(style.spread(np.array([9.0, 9.5, 10.0]), 2.0, 0.0, 10.0), [6, 8, 10])
    with pytest.raises(ValueError, match="do not fit"):
        style.spread(np.arange(7.0), 2.0, 0.0, 10.0)


@pytest.mark.parametrize(("low", "high"), [(0.95, 1.75), (2.0, 2.02), (0.3, 4.0), (3e-5, 2e-4), (0.01, 300.0)])
def test_a_logarithmic_axis_has_two_labelled_ticks_whatever_it_spans(low, high):
    fig = Figure()
    ax = fig.add_subplot()
    ax.plot([0, 1], [low, high])
    style.log_axis(ax.yaxis)
    fig.draw_without_rendering()
    bottom, top = ax.get_ylim()
    labels = [t.get_text() for t, y in zip(ax.get_yticklabels(), ax.get_yticks(), strict=True) if bottom <= y <= top]
    assert ax.get_yscale() == "log"
    assert len([text for text in labels if text]) >= 2


def test_captions_say_what_stands_in_for_the_data(tmp_path):
    record = {
        "name": "mnist",
        "available": True,
        "source": "bundled digits",
        "note": "8 × 8 digits.",
        "train": {"n": 1437},
    }
    path = tmp_path / "mnist.json"
    path.write_text(json.dumps(record))
    assert style.about_data(path, "smoke") == (
        "Preset smoke, dataset mnist (1,437 training images, source: bundled digits). Substituted data: 8 × 8 digits."
    )
    assert style.dataset_title("mnist_seed0", path) == "MNIST (substituted data)"
    path.write_text(json.dumps(record | {"note": ""}))
    assert style.dataset_title("cifar100_seed0", path) == "CIFAR-100"
    assert style.dataset_title("pets_seed1", path) == "pets"
    assert "Substituted" not in style.about_data(path, "laptop")
    path.write_text(json.dumps(record | {"available": False, "note": "no network\nsecond line"}))
    assert "not at hand" in style.about_data(path, "laptop")
    fig = Figure()
    assert style.not_run(fig.add_subplot(), path) == "no network"


def test_accuracy_and_seeds_in_words(tmp_path):
    for i, accuracy in enumerate([0.5, 0.75]):
        (tmp_path / f"{i}.csv").write_text(f"step,validation_accuracy\n1,0.1\n2,{accuracy}\n")
    (tmp_path / "none.csv").write_text("step,validation_accuracy\n")
    paths = [str(tmp_path / f"{i}.csv") for i in range(2)]
    assert style.about_accuracy(paths) == "test accuracy 50.0 to 75.0 % over 2 seeds"
    assert style.about_accuracy(paths[0]) == "test accuracy 50.0 %"
    assert style.about_accuracy([str(tmp_path / "none.csv")]) == "no model was trained"
    assert style.seeds_in_words([2, 0, 1]) == "seeds 0 to 2"
    assert style.seeds_in_words([3, 0]) == "seeds 0, 3"
    assert style.seeds_in_words([4, 4]) == "seed 4"
    assert style.over_seeds([1, 0, 1]) == "2 seeds (0 to 1)"
    assert style.over_seeds([3, 3]) == "the one seed (3)"
    assert style.label("block2_W_Q") == "2 $W_Q$"
