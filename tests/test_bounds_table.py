"""Rows of bounds.csv, the looseness asked for, and the search for violations."""

import itertools
import math

import pytest
import torch

from curvature_gap import bounds_table
from curvature_gap.architecture import Architecture
from curvature_gap.bounds_table import (
    COLUMNS,
    Regression,
    attained_ratios,
    baseline_rows,
    bound_row,
    checkpoint_rows,
    drawn_cases,
    exact_block_norms,
    initial_weights,
    model_rows,
    regression_rows,
    theory_cases,
    theory_instance,
    theory_rows,
    validate_bounds,
)
from curvature_gap.maps import cross_entropy
from curvature_gap.theory.kronecker_sum import top_norm
from curvature_gap.vit import flatten_parameters, initial_parameters, unflatten_parameters, vit_logits

SETTINGS = ["attention", "block"]


@pytest.mark.parametrize("setting", SETTINGS)
def test_rows_cover_every_pair_and_the_total(setting):
    case = theory_instance(setting, "xavier", 3, L=5, d_V=3, d_K=2, d_ff=7)
    rows = {row["block"]: row for row in regression_rows("r", "init", 3, case)}
    n = len(case.weights)
    assert len(rows) == n * (n + 1) // 2 + 1
    for row in rows.values():
        for column in ("corrected", "tight_apriori", "tight_data"):
            assert row[column] >= row["exact"] * (1 - 1e-10), (row["block"], column)
            assert row[f"ratio_{column}"] == pytest.approx(row[column] / row["exact"])
    assert rows["total"]["tight_data"] <= rows["total"]["corrected"]


@pytest.mark.parametrize("setting", SETTINGS)
def test_kronecker_hessian_equals_autodiff_on_drawn_cases(setting, generator):
    case = drawn_cases(setting, 27, generator)
    exact = case.autodiff_hessian()
    size = exact.abs().amax((-1, -2), keepdim=True).clamp_min(1e-300)
    # Saturated and near-constant rows lose digits in either method.
    assert ((case.hessian().dense() - exact).abs() / size).max() < 1e-5
    assert ((case.hessian().dense() - exact).abs() / size).amax((-1, -2)).median() < 1e-13


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_bound_is_below_on_structured_cases(setting, generator):
    ratios = attained_ratios(drawn_cases(setting, 54, generator))
    assert max(ratio.max().item() for ratio in ratios.values()) <= 1 + 1e-9
    assert ratios["block_norms"].max() > 0.999, "an equality case is among them"


def test_extreme_inputs_stay_bounded(randn):
    X = torch.stack([randn(5, 3), randn(1, 3).expand(5, 3), randn(5, 1) * randn(1, 3), randn(5, 3) * 1e4])
    weights = {name: w.expand(4, *w.shape) for name, w in initial_weights("xavier", 3, 2, 7, torch.Generator()).items()}
    for factor in (1e-8, 1.0, 1e8):
        case = Regression("attention", X, {n: weights[n] for n in ("W_Q", "W_K", "W_V")}, factor * X)
        assert all(ratio.max() <= 1 + 1e-9 for ratio in attained_ratios(case).values())


def test_a_bound_that_is_too_small_is_found(monkeypatch):
    """The search must be able to fail: an a priori bound three times too small is caught."""
    true_bound = bounds_table.attention_apriori_bounds
    monkeypatch.setattr(
        bounds_table, "attention_apriori_bounds", lambda *a: {pair: b / 3 for pair, b in true_bound(*a).items()}
    )
    rows = validate_bounds(30, 16, 0, steps=2, settings=["attention"])
    assert {row["bound"]: row["violated"] for row in rows}["tight_apriori"]


def test_validation_reports_its_effort_and_finds_nothing():
    rows = validate_bounds(54, 16, 1, steps=3, settings=["attention"])
    assert not any(row["violated"] for row in rows)
    assert all(row["n_instances"] == 54 and row["ascents"] == 16 and row["steps"] == 3 for row in rows)
    with pytest.raises(ValueError, match="ascents must be at least 1, got 0"):
        validate_bounds(1, 0, 0)


def test_checkpoint_rows_use_the_tokens_and_fold_the_projection():
    a = Architecture(image_size=4, channels=1, patch=2, classes=3, d_V=3, d_ff=5)
    parameters = initial_parameters(a, torch.Generator().manual_seed(0))
    rows = checkpoint_rows("mnist_seed0", "init", 0, parameters, torch.rand(1, 4, 4), a)
    assert {row["run"] for row in rows} == {"mnist_seed0_attention", "mnist_seed0_block"}
    assert all(row["tight_data"] >= row["exact"] * (1 - 1e-10) for row in rows)
    b = Architecture(image_size=4, channels=1, patch=2, classes=3, d_V=3, d_ff=5, bias=True)
    with pytest.raises(ValueError, match="bias-free post-norm"):
        checkpoint_rows("x", "init", 0, parameters, torch.rand(1, 4, 4), b)


def test_model_rows_bound_every_pair_of_a_stored_hessian(generator):
    a = Architecture(image_size=4, channels=1, patch=2, classes=3, d_V=3, d_ff=5)
    parameters = {k: p.double() for k, p in initial_parameters(a, generator).items()}
    images, labels = torch.randn(2, 1, 4, 4, generator=generator).double(), torch.tensor([1, 0])

    def loss(theta):
        return cross_entropy(vit_logits(unflatten_parameters(theta, a), images, a), labels)

    H = torch.func.hessian(loss)(flatten_parameters(parameters, a))
    names = list(parameters)
    offsets = [0, *itertools.accumulate(p.numel() for p in parameters.values())]
    exact = exact_block_norms(H, names, offsets)
    rows = model_rows("mnist_seed0", "init", 0, parameters, images, labels, a, exact)
    assert len(rows) == len(names) * (len(names) + 1) // 2 + 1
    assert all(row["tight_data"] >= row["exact"] * (1 - 1e-10) - 1e-14 for row in rows)
    assert exact["W_1", "W_2"] == pytest.approx(
        torch.linalg.matrix_norm(H[offsets[7] : offsets[8], offsets[8] : offsets[9]], 2)
    )


def test_unknown_initialisation_and_zero_norm():
    with pytest.raises(ValueError, match="got 'he'"):
        initial_weights("he", 3, 2, 7, torch.Generator())
    row = bound_row("r", "init", 0, "total", 0.0, {"tight_data": 1.0})
    assert math.isnan(row["ratio_tight_data"])
    assert math.isnan(row["printed_main"])
    assert list(row)[:5] == ["run", "stage", "seed", "block", "exact"]
    assert set(COLUMNS) <= set(row)


@pytest.mark.slow
def test_looseness_at_the_stated_size():
    """Bound over exact at L = 49, d_V = d_K = 16, d_ff = 64, four initialisations, two seeds."""
    for row in theory_rows(theory_cases()):
        if row["block"] != "total":
            continue
        block = "block" in row["run"]
        assert 1 - 1e-12 <= row["ratio_tight_data"] <= (2.4 if block else 1.3), row
        if "default" in row["run"]:
            assert row["ratio_tight_apriori"] <= (150 if block else 60), row


@pytest.mark.slow
def test_baselines_order():
    for row in baseline_rows(theory_cases([0])):
        assert 1 - 1e-12 <= row["floor"] <= row["block_norms"] * (1 + 1e-12)
        assert row["lanczos_10"] <= row["lanczos_60"] * (1 + 1e-12) <= 1 + 1e-11
        assert row["lanczos_60"] > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_climbs_find_no_violation(setting):
    rows = validate_bounds(500, 64, 7, steps=40, settings=[setting])
    assert not any(row["violated"] for row in rows), rows


@pytest.mark.slow
def test_exact_norm_at_full_size_agrees_with_autodiff():
    case = theory_instance("attention", "default", 0)
    exact = Regression("attention", case.X[None], {n: w[None] for n, w in case.weights.items()}, case.target[None])
    torch.testing.assert_close(top_norm(exact.autodiff_hessian())[0], top_norm(case.hessian().dense()))
