"""Heat maps of a Hessian show what the matrix holds, block by block."""

import matplotlib as mpl
import numpy as np
import pytest

mpl.use("agg")

from matplotlib.figure import Figure

from curvature_gap import figure_hessian
from curvature_gap import figure_style as style


@pytest.fixture
def hessian_file(tmp_path):
    """A Hessian with blocks of 12, 3 and 35 rows and constant block pairs 10^-(i + j)."""
    path = tmp_path / "init.npz"
    offsets = np.array([0, 5, 12, 15, 50])
    level = np.repeat(np.arange(4), np.diff(offsets))
    names = np.array(["W_Q", "W_K", "LN1_gamma", "W_V"])
    np.savez(path, H=-(10.0 ** -(level[:, None] + level[None, :])), names=names, offsets=offsets, loss=np.array(2.5))
    return path


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
    fig = Figure()
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


def test_the_figure_has_two_panels_one_colour_bar_and_every_blocks_name(hessian_file):
    style.use()
    with np.load(hessian_file) as file:
        arrays = dict(file) | {"names": np.array(["W_Q", "W_K", "LN1_gamma", "W_V"])}
    np.savez(hessian_file, **arrays)
    fig = figure_hessian.hessian_figure(figure_hessian.read_hessian(hessian_file))
    whole, part, bar = fig.axes
    assert [text.get_text() for text in whole.texts[::2]] == ["$W_Q$", "$W_K$", "LN1", "$W_V$"]
    assert len(part.images) == len(whole.images) == 1
    assert whole.images[0].get_clim() == part.images[0].get_clim() == (figure_hessian.FLOOR, 0)
    assert min(text.get_fontsize() for text in fig.findobj(mpl.text.Text)) >= style.FONT
    assert bar.get_ylabel() == "mean of $\\log_{10}$ |entry|"


def test_the_caption_says_what_a_pixel_is(hessian_file):
    H = figure_hessian.read_hessian(hessian_file)
    assert "Each entry is drawn" in figure_hessian.pooling_in_words(H, cells=50)
    words = figure_hessian.pooling_in_words(H, cells=5)
    assert "up to 9 × 9 entries of one block pair" in words
    assert "The largest |entry| is 1." in words


def test_deeper_models_show_the_first_blocks_attention():
    assert figure_hessian.attention_blocks(["embed", "block1_W_Q"]) == ["block1_W_Q", "block1_W_K", "block1_W_V"]
