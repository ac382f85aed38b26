from pathlib import Path

import pandas as pd
import pytest

from curvature_gap.published import published_comparison

PUBLISHED = Path(__file__).parents[1] / "paper/published_blocks_init.csv"


@pytest.fixture
def block_norms(tmp_path):
    pairs = pd.read_csv(PUBLISHED)
    rows = [
        {"run": f"mnist_seed{seed}", "stage": stage, "row": p.row, "column": p.column, "mean_log10_abs": value}
        for p in pairs.itertuples()
        for seed, stage, value in [(0, "init", -2.0), (1, "init", -4.0), (0, "trained", 5.0)]
    ]
    path = tmp_path / "block_norms.csv"
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


def test_mean_spread_and_deviation_over_seeds_at_init(block_norms):
    rows = published_comparison(block_norms, PUBLISHED)
    assert len(rows) == 100
    first = rows[0]
    assert (first["row"], first["column"], first["published"]) == ("embed", "embed", -3.34)
    assert first["mean"] == -3.0
    assert first["sd"] == pytest.approx(2**0.5)
    assert first["deviation"] == pytest.approx(0.34)
    assert first["n_seeds"] == 2


def test_a_missing_pair_is_named(block_norms):
    frame = pd.read_csv(block_norms)
    frame[frame["row"] != "W_Q"].to_csv(block_norms, index=False)
    with pytest.raises(ValueError, match=r"block pair \(embed, W_Q\)|block pair \(W_Q, embed\)"):
        published_comparison(block_norms, PUBLISHED)
