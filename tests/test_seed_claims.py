import pytest
import torch

from curvature_gap.hessian import Hessian
from curvature_gap.seed_claims import (
    GROUPS,
    MEASURES,
    block_measures,
    growth_rows,
    keys_and_values_rows,
    largest_rows,
    shares,
    wilson_interval,
)


def hessian(**blocks):
    sizes = {name: len(block) for name, block in blocks.items()}
    return Hessian(
        names=tuple(blocks),
        shapes=tuple((n, 1) for n in sizes.values()),
        loss=1.0,
        grad_norm=0.0,
        batch_sha256="",
        engine="autodiff",
        blocks={(name, name): torch.as_tensor(block, dtype=torch.float64) for name, block in blocks.items()},
    )


# W_V has one large entry, W_K many middling ones: mean and median disagree with the maximum.
SPIKY = [[9.0, 0.0], [0.0, 0.0]]
FLAT = [[3.0, 3.0], [3.0, 3.0]]
TINY = [[1.0, 0.0], [0.0, -1.0]]


def test_measures_of_one_block():
    measures = block_measures(hessian(W_V=[[3.0, -1.0], [-1.0, 0.0]]))["W_V"]
    eigenvalue = (3 + 13**0.5) / 2
    assert measures == pytest.approx(
        {"mean": 1.25, "median": 1.0, "max": 3.0, "spectral": eigenvalue, "frobenius": 11**0.5}
    )


def test_which_block_is_largest_depends_on_the_measure():
    measures = block_measures(hessian(W_Q=TINY, W_K=FLAT, W_V=SPIKY, W_1=[[100.0]]))
    rows = {(row["scope"], row["measure"]): row for row in largest_rows(measures, {"run": "r"})}
    assert len(rows) == 3 * len(MEASURES)
    assert rows["attention", "max"]["holds"]
    assert rows["attention", "max"]["ratio"] == pytest.approx(3)
    assert rows["attention", "mean"]["largest"] == "W_K"
    assert rows["attention", "mean"]["ratio"] == pytest.approx(0.75)
    assert not rows["all", "max"]["holds"]
    assert rows["all", "max"]["largest"] == "W_1"


def test_growth_is_that_of_the_slowest_block():
    before = block_measures(hessian(W_Q=TINY, W_K=FLAT, W_V=TINY))
    after = block_measures(hessian(W_Q=SPIKY, W_K=TINY, W_V=SPIKY))
    rows = {(row["scope"], row["measure"]): row for row in growth_rows(before, after, {})}
    slowest = rows["attention", "max"]
    assert (slowest["largest"], slowest["holds"]) == ("W_K", False)
    assert slowest["ratio"] == pytest.approx(1 / 3)


def test_nothing_to_compare_is_an_error():
    with pytest.raises(ValueError, match="needs two blocks"):
        largest_rows(block_measures(hessian(W_V=TINY)), {})


def test_keys_and_values_along_a_run():
    blocks = [block for group in GROUPS.values() for block in group]

    def step(number, **large):
        sizes = {block: large.get(block, 1.0) for block in blocks}
        names = ("parameter_spectral", "parameter_frobenius", "hessian_spectral", "hessian_frobenius")
        return [{"step": number, "block": b, **dict.fromkeys(names, s)} for b, s in sizes.items()]

    dynamics = step(0, W_K=4.0, W_V=2.0) + step(1, W_K=6.0, W_V=8.0) + step(2, W_V=5.0, W_1=4.0)
    row = keys_and_values_rows(dynamics, {"run": "r"})[0]
    assert row["share_of_steps"] == pytest.approx(2 / 3)
    assert row["holds"]
    assert row["largest"] == "values"
    assert row["ratio"] == pytest.approx((2 + 6 + 1 / 4) / 3)


def test_wilsons_interval_is_its_formula():
    z = 1.959963984540054
    for successes, n in [(0, 5), (3, 5), (5, 5), (7, 10)]:
        p = successes / n
        centre = (p + z**2 / (2 * n)) / (1 + z**2 / n)
        half = z / (1 + z**2 / n) * (p * (1 - p) / n + z**2 / (4 * n**2)) ** 0.5
        assert wilson_interval(successes, n) == pytest.approx((centre - half, centre + half), abs=1e-12)
    with pytest.raises(ValueError, match="6 of 5"):
        wilson_interval(6, 5)


def test_shares_count_seeds():
    rows = [
        {"claim": "a", "measure": m, "holds": m == "max" or seed == 0} for seed in range(5) for m in ("max", "mean")
    ]
    table = {row["measure"]: row for row in shares(rows, ["claim", "measure"])}
    assert table["max"]["share"] == 1
    assert (table["mean"]["n_holds"], table["mean"]["n_seeds"]) == (1, 5)
    assert table["mean"]["low"] < 0.2 < table["mean"]["high"]
