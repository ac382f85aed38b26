"""One style for all figures; equal figures are equal files; heat maps show what the matrix holds."""

import json
import subprocess
import sys
from itertools import combinations

import matplotlib as mpl
import numpy as np
import pytest

mpl.use("agg")

from curvature_gap import figure_hessian, figure_schema
from curvature_gap import figure_style as style


@pytest.fixture(autouse=True)
def _style():
    style.use()


@pytest.fixture
def hessian_file(tmp_path):
    """A Hessian with blocks of 12, 3 and 35 rows and constant block pairs 10^-(i + j)."""
    path = tmp_path / "init.npz"
    offsets = np.array([0, 5, 12, 15, 50])
    level = np.repeat(np.arange(4), np.diff(offsets))
    names = np.array(["W_Q", "W_K", "LN1_gamma", "W_V"])
    np.savez(path, H=-(10.0 ** -(level[:, None] + level[None, :])), names=names, offsets=offsets, loss=np.array(2.5))
    return path


def test_drawn_twice_in_two_processes_is_the_same_bytes(tmp_path):
    code = (
        "import matplotlib, sys; matplotlib.use('agg')\n"
        "from curvature_gap import figure_schema, figure_style as style\n"
        "style.use(); style.save_figure(figure_schema.overview_figure(), sys.argv[1], 'a caption')"
    )
    for name in ("first", "second"):
        subprocess.run([sys.executable, "-c", code, str(tmp_path / name)], check=True)
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


def test_no_cell_straddles_two_blocks_and_every_block_is_seen():
    offsets = np.array([0, 256, 272, 288, 1312, 3552])
    starts, boundaries = figure_hessian.cell_edges(offsets, 100)
    assert set(offsets[:-1]) <= set(starts.tolist())
    assert boundaries[-1] == len(starts) == len(set(starts.tolist()))
    assert (np.diff(boundaries) >= 1).all()


def test_pooling_is_the_mean_over_each_cell(hessian_file):
    H = figure_hessian.read_hessian(hessian_file)
    starts, _ = figure_hessian.cell_edges(H.offsets, 7)
    values = np.random.default_rng(0).normal(size=(50, 50))
    ends = [*starts[1:], 50]
    plain = [
        [values[a:b, c:d].mean() for c, d in zip(starts, ends, strict=True)] for a, b in zip(starts, ends, strict=True)
    ]
    np.testing.assert_allclose(figure_hessian.pooled(values, starts), plain, rtol=1e-12, atol=1e-14)


def test_a_heat_map_shows_each_block_pairs_magnitude(hessian_file):
    H = figure_hessian.read_hessian(hessian_file)
    fig = mpl.figure.Figure()
    image = figure_hessian.hessian_panel(fig.add_axes((0.2, 0.2, 0.7, 0.7)), H, cells=10).get_array()
    assert image[0, 0] == 0
    assert image[-1, 0] == image[0, -1] == -3
    assert image[-1, -1] == figure_hessian.FLOOR == -6


def test_the_self_attention_part_takes_the_right_rows(hessian_file):
    H = figure_hessian.read_hessian(hessian_file)
    part = H.part(["W_Q", "W_V"])
    np.testing.assert_array_equal(part.H, H.H[np.ix_([*range(5), *range(15, 50)], [*range(5), *range(15, 50)])])
    assert part.offsets.tolist() == [0, 5, 40]
    with pytest.raises(ValueError, match="no block W_O; it has W_Q"):
        H.part(["W_O"])


def test_damaged_or_blockwise_files_are_named(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 truncated")
    np.savez(tmp_path / "b.npz", names=np.array(["W_Q"]))
    with pytest.raises(ValueError, match=r"a\.npz is damaged"):
        figure_hessian.read_hessian(tmp_path / "a.npz")
    with pytest.raises(ValueError, match=r"b\.npz holds no whole matrix"):
        figure_hessian.read_hessian(tmp_path / "b.npz")


def test_labels_are_spread_as_little_as_possible():
    np.testing.assert_allclose(style.spread(np.array([1.0, 5.0, 9.0]), 2.0, 0.0, 10.0), [1, 5, 9])
    np.testing.assert_allclose(style.spread(np.array([4.0, 5.0, 6.0]), 2.0, 0.0, 10.0), [3, 5, 7])
    np.testing.assert_allclose(style.spread(np.array([9.0, 9.5, 10.0]), 2.0, 0.0, 10.0), [6, 8, 10])
    with pytest.raises(ValueError, match="do not fit"):
        style.spread(np.arange(7.0), 2.0, 0.0, 10.0)


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
    path.write_text(json.dumps(record | {"note": ""}))
    assert "Substituted" not in style.about_data(path, "laptop")
    path.write_text(json.dumps(record | {"available": False, "note": "no network\nsecond line"}))
    assert "not at hand" in style.about_data(path, "laptop")
    fig = mpl.figure.Figure()
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
    assert style.label("block2_W_Q") == "2 $W_Q$"
