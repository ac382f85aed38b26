"""The benchmark's figure: every mark and every word where it can be read."""

from pathlib import Path

import matplotlib as mpl
import pandas as pd
import pytest

mpl.use("agg")

from curvature_gap import figure_benchmark
from curvature_gap import figure_style as style

MEMORY = "out of memory: needs more than 12 GiB"
COLUMNS = ("method", "dtype", "seconds", "extrapolated", "status")
ROWS = pd.DataFrame(
    [
        ("closed form", "float32", 3.0, False, "ok"),
        ("closed form", "float64", 7.0, False, "ok"),
        ("curvlinops, 16 columns", "float64", 800.0, True, "wrong: block (a, b) is off"),
        ("vmap(jvp(grad)), 4 columns", "float64", 900.0, True, "ok"),
        ("autograd.functional.hessian", "float32", None, False, MEMORY),
        ("autograd.functional.hessian", "float64", None, False, MEMORY),
        ("torch.func.hessian", "float64", None, False, "refused, for a reason longer than the panel is wide"),
    ],
    columns=COLUMNS,
)
METHODS = list(dict.fromkeys(ROWS["method"]))


@pytest.fixture
def ax():
    style.use()
    ax = style.new_figure(2.4).subplots()
    figure_benchmark.times_panel(ax, ROWS, METHODS)
    ax.figure.draw_without_rendering()
    return ax


def test_every_time_has_its_mark(ax):
    marks = {(line.get_xdata()[0], line.get_marker(), line.get_markerfacecolor()) for line in ax.lines}
    assert marks == {
        (3.0, "o", style.SKY),
        (7.0, "o", style.BLUE),
        (800.0, "X", style.BLUE),
        (900.0, "o", "white"),
    }


def test_words_stay_inside_the_panel_and_off_its_marks(ax):
    panel = ax.get_window_extent()
    words = [text.get_window_extent() for text in ax.texts]
    assert len(words) == 2
    for box in words:
        assert panel.x0 < box.x0 < box.x1 <= panel.x1 + 1
        assert panel.y0 < box.y0 < box.y1 < panel.y1
        assert not any(box.overlaps(line.get_window_extent()) for line in ax.lines)
        assert not any(box.overlaps(label.get_window_extent()) for label in ax.get_yticklabels())


def test_the_panel_says_it_briefly_and_the_caption_in_full():
    assert figure_benchmark.failure([MEMORY, MEMORY]) == "out of memory"
    assert figure_benchmark.failures(ROWS) == (
        f"autograd.functional.hessian: {MEMORY}. "
        "torch.func.hessian: refused, for a reason longer than the panel is wide. "
    )
    assert figure_benchmark.failures(ROWS.dropna(subset="seconds")) == ""


def test_the_committed_benchmarks_fit():
    table = pd.read_csv(Path(__file__).parents[1] / "expected/bench/benchmarks.csv")
    for status in table.loc[table["seconds"].isna(), "status"]:
        assert "…" not in figure_benchmark.failure([status])
