"""T7: the printed bound on the quadratic model, its sharp constant, and the true loss."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from curvature_gap.landscape_checks import (
    LANDSCAPE_CHECKS,
    exact_curvature,
    increment_ratio,
    large_query_minimum,
    printed_curvature,
    random_quadratic_model,
    random_true_loss_ratio,
)
from curvature_gap.theory.landscape import (
    QuadraticModel,
    extreme_quadratic_model,
    flat_minimum,
    increment_bound,
    increment_bound_sharp,
    increment_bound_third_order,
    increment_bound_true_loss,
)


def test_the_printed_formula():
    assert increment_bound(4, 3.0, 2.0, 0.5) == pytest.approx((2 * 3 + 2 * 0.25) / 5)


def test_increment_equals_the_difference_of_means(randn):
    model = QuadraticModel(randn(5), randn(5, 3), randn(5, 3, 3))
    step = randn(3)
    losses = [
        v + g @ step + step @ H @ step / 2
        for v, g, H in zip(model.values, model.gradients, model.hessians, strict=True)
    ]
    expected = sum(losses) / 5 - sum(losses[:4]) / 4
    torch.testing.assert_close(model.increment(step), expected)
    torch.testing.assert_close(expected, (losses[4] - sum(losses[:4]) / 4) / 5)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_the_quadratic_model_obeys_both_bounds_under_a1(seed):
    model, step = random_quadratic_model(torch.Generator().manual_seed(seed), a1=True)
    assert increment_ratio(model, step, increment_bound_sharp) <= 1 + 1e-12
    assert increment_ratio(model, step, increment_bound) <= 1 + 1e-12


@pytest.mark.parametrize("k", [1, 2, 7])
@pytest.mark.parametrize("L_max", [0.0, 1.5])
def test_the_extreme_model_attains_the_sharp_bound_at_a_minimum(k, L_max):
    model = extreme_quadratic_model(k, L_max, 2.0, 3)
    step = torch.tensor([0.7, 0.0, 0.0], dtype=torch.float64)
    assert increment_ratio(model, step, increment_bound_sharp) == pytest.approx(1, abs=1e-12)
    for hessians in (model.hessians, model.hessians[:-1]):
        assert torch.linalg.eigvalsh(hessians.mean(dim=0)).min() >= -1e-12
    assert float(model.gradient_gap()) == 0


def test_without_a1_the_first_order_term_is_missing(generator):
    model, step = random_quadratic_model(generator, a1=False)
    small = 1e-6 * step
    ratio = increment_ratio(QuadraticModel(0 * model.values, model.gradients, model.hessians), small, increment_bound)
    assert ratio > 100
    d = torch.linalg.vector_norm(step)
    bound = increment_bound_true_loss(model.k, model.values.max(), model.curvature(), d, model.gradient_gap())
    assert model.increment(step).abs() <= bound


def test_the_flat_minimum_has_no_loss_gradient_or_curvature_but_a_loss_nearby():
    case = flat_minimum()
    assert float(case.loss(case.weights)) == 0
    assert float(exact_curvature(case)) == pytest.approx(0, abs=1e-15)
    assert float(case.increment()) > 0.05


def test_the_counterexample_has_a_finite_ratio_that_grows_as_the_offset_shrinks():
    ratios = []
    for offset in (0.2, 0.02):
        case = flat_minimum(offset=offset)
        M = exact_curvature(case)
        assert float(M) == pytest.approx(2 * offset**2 / 3)
        ratios.append(float(case.increment() / increment_bound(1, 0.0, M, case.distance())))
    assert 1 < ratios[0] < ratios[1]


def test_the_printed_M_fails_through_the_missing_key_block():
    case = large_query_minimum(1e3)
    assert float(case.loss(case.weights)) == 0
    assert float(exact_curvature(case)) > float(printed_curvature(case))
    assert float(case.increment() / increment_bound(1, 0.0, printed_curvature(case), case.distance())) > 1


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_the_corrected_bound_holds_on_the_true_loss(seed):
    assert random_true_loss_ratio(torch.Generator().manual_seed(seed)) <= 1


@settings(max_examples=50, deadline=None)
@given(st.floats(-2, 2), st.floats(-2, 2), st.floats(0, 2))
def test_the_third_order_bound_on_cubic_losses(a, b, d):
    # l_1 = a δ³/6 and l_2 = b δ³/6 + δ²/2 have Hessians a δ and b δ + 1, Lipschitz with constants |a|, |b|.
    increment = abs((b * d**3 / 6 + d**2 / 2 - a * d**3 / 6) / 2)
    assert increment <= increment_bound_third_order(1, 0.0, 1.0, d, max(abs(a), abs(b))) + 1e-12


def test_verdicts_are_reproducible():
    rows = {id: check(0) for id, check in LANDSCAPE_CHECKS.items()}
    assert rows["T7_quadratic"].as_printed == "holds"
    assert rows["T7_true_loss"].as_printed == "violated"
    assert rows["T7_true_loss"].corrected == "holds"
    assert rows["A1"].worst_ratio > 1
    assert rows == {id: check(0) for id, check in LANDSCAPE_CHECKS.items()}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: increment_bound(0, 1.0, 1.0, 1.0), "k counts"),
        (lambda: increment_bound(1, -1.0, 1.0, 1.0), "L_max"),
        (lambda: increment_bound_true_loss(1, 1.0, 1.0, 1.0, -1.0), "gradient"),
        (lambda: flat_minimum(L=3), "even number"),
        (
            lambda: QuadraticModel(
                torch.zeros(1, dtype=torch.float64),
                torch.zeros(1, 2, dtype=torch.float64),
                torch.zeros(1, 2, 2, dtype=torch.float64),
            ),
            "at least two",
        ),
    ],
)
def test_illegal_input_is_refused_in_words(call, message):
    with pytest.raises(ValueError, match=message):
        call()
