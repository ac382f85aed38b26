import numpy as np
import pytest
import torch

from curvature_gap.architecture import Architecture
from curvature_gap.loss_increments import (
    COLUMNS,
    Measurement,
    a1_fit_rows,
    a1_rows,
    binned,
    displaced,
    fit_rows,
    gradient_curves,
    increment_rows,
    increments,
    moving_average,
    orderings,
    sample_gradients,
    sample_losses,
    slope,
    t7_constant,
    t7_rows,
)
from curvature_gap.maps import cross_entropy
from curvature_gap.power_law import log_spaced
from curvature_gap.vit import flatten_parameters, initial_parameters, vit_logits

SMALL = Architecture(image_size=6, channels=2, patch=3, classes=5, d_V=4, d_ff=7)


@pytest.fixture
def model(randn, generator):
    """Weights in float64, 13 images, 13 labels."""
    drawn = initial_parameters(SMALL, torch.Generator().manual_seed(1))
    parameters = {name: p.double() for name, p in drawn.items()}
    return parameters, randn(13, 2, 6, 6), torch.randint(5, (13,), generator=generator)


def test_sample_losses_average_to_the_loss(model):
    parameters, images, labels = model
    losses = sample_losses(parameters, images, labels, SMALL, chunk=4)
    assert losses.shape == (13,)
    loss = cross_entropy(vit_logits(parameters, images, SMALL), labels)
    assert losses.mean() == pytest.approx(float(loss), rel=1e-13)
    assert sample_losses(parameters, images, labels, SMALL, torch.float32) == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("batch", [1, 2, 3, 5])
def test_increments_are_differences_of_means(batch):
    losses = np.random.default_rng(0).exponential(size=(3, 17))
    k, values = increments(losses, batch)
    assert k.tolist() == list(range(batch, 17 - batch + 1, batch))
    for row, curve in zip(losses, values, strict=True):
        expected = [abs(row[: j + batch].mean() - row[:j].mean()) for j in k]
        np.testing.assert_allclose(curve, expected, rtol=1e-12)


def test_increments_stay_exact_where_a_difference_of_means_does_not():
    losses = np.concatenate([np.full(50_000, 1.0), [1.0 + 1e-9]])
    assert increments(losses)[1][-1] == pytest.approx(1e-9 / 50_001, rel=1e-6)


def test_too_few_samples_are_refused():
    with pytest.raises(ValueError, match="do not make two batches of 4"):
        increments(np.ones(7), 4)


def test_t7_holds_at_the_minimum_and_is_attained():
    losses = np.array([0.0, 0.0, 0.0, 2.0])
    k, values = increments(losses)
    assert (values <= t7_constant(2.0) / (k + 1)).all()
    # 0 ≤ l ≤ L gives |l_{k+1} − L_k| ≤ L: at w* the 2 in the bound is a factor two too many.
    assert values[-1] == t7_constant(2.0) / 4 / 2
    assert t7_constant(2.0, M=3.0, distance=0.5) == 4.75


def test_orderings_are_permutations_pass_by_pass():
    orders = orderings(7, 3, seed=5, passes=2)
    assert orders.shape == (3, 14)
    for order in orders:
        assert sorted(order[:7]) == sorted(order[7:]) == list(range(7))
    assert not (orders[0] == orders[1]).all()
    np.testing.assert_array_equal(orders, orderings(7, 3, seed=5, passes=2))


@pytest.mark.parametrize("batch", [1, 20])
@pytest.mark.parametrize("passes", [1, 4])
def test_the_measured_slope_is_minus_one_whatever_the_number_of_passes(batch, passes):
    losses = np.random.default_rng(0).exponential(size=5000)
    k, curves = increments(losses[orderings(5000, 40, seed=1, passes=passes)], batch)
    # 99.9 %: at 95 % one of these four cases would fail one time in five.
    law = slope(k, curves, batch, seed=0, confidence=0.999)
    assert law.low <= -1 <= law.high
    assert law.high - law.low < 0.2
    assert law.exponent == pytest.approx(-1, abs=0.06)


def test_a_slope_that_is_not_minus_one_is_seen():
    # Losses that grow along the order: |l − L_k| grows like sqrt(k), the increment falls like 1 / sqrt(k).
    rng = np.random.default_rng(0)
    losses = rng.exponential(size=(20, 5000)) * np.sqrt(np.arange(1, 5001))
    k, curves = increments(losses)
    law = slope(k, curves, 1, seed=0)
    assert law.exponent == pytest.approx(-0.5, abs=0.06)
    assert law.high < -0.4


def test_bins_hold_every_value_once():
    k, curves = increments(np.random.default_rng(0).exponential(size=(2, 900)), 2)
    x, means = binned(k, curves, 2)
    assert (np.diff(x) > 0).all()
    assert means.shape == (2, len(x))
    constant = np.broadcast_to(3.0, (1, len(k)))
    np.testing.assert_allclose(binned(k, constant, 2)[1], 3.0)


def test_moving_average_is_the_recursion():
    values = np.random.default_rng(0).random((2, 9))
    weight = 2 / (4 + 1)
    for row, average in zip(values, moving_average(values, 4), strict=True):
        for t in range(9):
            weights = (1 - weight) ** np.arange(t, -1, -1)
            assert average[t] == pytest.approx((weights @ row[: t + 1]) / weights.sum())


def test_displacement_has_the_length_it_says(model):
    parameters, _, _ = model
    w, distance = displaced(parameters, SMALL, 0.1, seed=0)
    before, after = (flatten_parameters(p, SMALL) for p in (parameters, w))
    assert float((after - before).norm()) == pytest.approx(distance)
    assert distance == pytest.approx(0.1 * float(before.norm()))


@pytest.mark.parametrize("unit", [1, 3])
def test_sample_gradients_are_autograds(unit, model):
    parameters, images, labels = model
    rows = torch.cat(list(sample_gradients(parameters, images, labels, SMALL, unit, chunk=4)))
    assert rows.shape == (13 // unit, SMALL.n_parameters)
    for i, row in enumerate(rows):
        leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
        here = slice(i * unit, (i + 1) * unit)
        loss = cross_entropy(vit_logits(leaves, images[here], SMALL), labels[here])
        expected = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        torch.testing.assert_close(row, flatten_parameters(expected, SMALL))


def test_gradient_curves_are_those_of_the_running_means(randn):
    g = randn(11, 6)
    orders = orderings(11, 3, seed=2)
    ks = np.array([1, 2, 5, 10])
    curves = gradient_curves(g.split(4), orders, ks)
    for i, order in enumerate(orders):
        for j, k in enumerate(ks):
            before, after = g[order[:k]].mean(0), g[order[: k + 1]].mean(0)
            assert curves.norm[i, j] == pytest.approx(float(before.norm()))
            assert curves.increment[i, j] == pytest.approx(float((after - before).norm()))
    assert curves.full == pytest.approx(float(g.mean(0).norm()))


def test_gradient_curves_refuse_what_does_not_fit(randn):
    with pytest.raises(ValueError, match="k must increase within 1 … 4"):
        gradient_curves([randn(5, 2)], orderings(5, 2, 0), np.array([1, 5]))
    with pytest.raises(ValueError, match="orderings are of 5 samples, 3 gradients came"):
        gradient_curves([randn(3, 2)], orderings(5, 2, 0), np.array([1, 4]))


def test_rows_carry_the_contracts_columns_and_the_gradients_at_their_k(randn):
    orders = orderings(11, 2, seed=0)
    losses = np.random.default_rng(0).random(11)
    k, curves = increments(losses[orders])
    gradients = gradient_curves([randn(11, 3)], orders, np.array([1, 4, 10]))
    rows = increment_rows(
        {"run": "r", "stage": "trained", "seed": 0},
        curves,
        k,
        1,
        span=3,
        points=4,
        rhs_exact=2.0,
        rhs_tight=3.0,
        gradients=gradients,
    )
    contract = ["run", "stage", "seed", "ordering", "k", "increment", "ema", "rhs_exact", "rhs_tight", "grad_norm"]
    assert list(rows[0])[:10] == contract
    of_first = {row["k"]: row for row in rows if row["ordering"] == 0}
    assert {1, 4, 10} <= set(of_first)
    assert of_first[4]["grad_norm"] == pytest.approx(gradients.norm[0, 1])
    assert of_first[4]["increment"] == pytest.approx(curves[0, 3])
    assert of_first[4]["rhs_exact"] == pytest.approx(2 / 5)
    assert np.isnan(of_first[2]["grad_norm"])


@pytest.fixture
def measurement():
    rng = np.random.default_rng(3)
    losses = rng.exponential(size=2000)
    return Measurement(losses, losses + 0.01 * rng.random(2000), 0.5, 3.0, 1e-6, 7, 12.0, n_orderings=11, seed=4)


def test_a_measurement_survives_its_file(measurement, tmp_path):
    measurement.save(tmp_path / "m.npz")
    again = Measurement.load(tmp_path / "m.npz")
    np.testing.assert_array_equal(again.losses, measurement.losses)
    assert (again.distance, again.M, again.M_samples, again.seed) == (0.5, 3.0, 7, 4)
    for batch in (1, 16):
        np.testing.assert_array_equal(again.curves(batch)[1], measurement.curves(batch)[1])


def test_the_constants_of_t7(measurement):
    L = measurement.losses.max()
    assert measurement.constant() == 2 * L
    assert measurement.constant(displaced=True) == pytest.approx(2 * L + 3 * 0.25)
    assert measurement.constant(displaced=True, tight=True) == pytest.approx(2 * L + 12 * 0.25)


def test_repeated_passes_leave_the_slope_at_minus_one(measurement):
    rows = fit_rows(measurement, {"run": "r"}, batch=20, passes=6)
    assert [(row["batch"], row["passes"], row["part"]) for row in rows] == [
        (1, 1, "all"),
        (20, 1, "all"),
        (20, 6, "all"),
        (20, 6, "later"),
    ]
    for row in rows:
        assert row["exponent"] == pytest.approx(-1, abs=0.1)
        assert row["low"] < row["exponent"] < row["high"]
    assert rows[3]["k_first"] == 2000
    assert rows[3]["k_last"] == 11980


def test_t7_rows_count_violations(measurement):
    at_minimum, away = t7_rows(measurement, {"run": "r"})
    assert (at_minimum["violations"], at_minimum["distance"]) == (0, 0.0)
    assert at_minimum["worst_ratio"] <= 0.5
    assert away["constant"] > at_minimum["constant"]
    assert away["n_cases"] == 11 * 1999
    # A displacement that raises the losses far beyond L, with an M of zero, breaks the bound, and that is seen.
    losses = measurement.losses
    broken = Measurement(losses, 100 * losses, 0.5, 0.0, 0.0, 7, 0.0, n_orderings=11, seed=4)
    assert t7_rows(broken, {})[1]["violations"] > 0


def test_a1_of_gradients_with_mean_zero_falls_like_one_over_the_root(randn):
    # Independent gradients with mean zero: A1 holds in the limit, and ‖∇L_k‖ is the noise of a mean.
    g = randn(4000, 50)
    curves = gradient_curves([g - g.mean(0)], orderings(4000, 12, seed=0), log_spaced(1, 400, 15))
    norm, increment = a1_fit_rows(curves, {"run": "r"}, 1, seed=0)
    assert norm["exponent"] == pytest.approx(-0.5, abs=0.05)
    assert increment["exponent"] == pytest.approx(-1, abs=0.1)
    assert norm["grad_norm_all"] < 1e-12
    rows = a1_rows(curves, {"run": "r"}, 2)
    assert len(rows) == 12 * len(curves.k)
    assert rows[1]["k"] == 2 * curves.k[1]


def test_every_table_has_the_columns_it_says(measurement, randn):
    identity = {"run": "r", "stage": "trained", "seed": 0}
    curves = gradient_curves([randn(20, 3)], orderings(20, 2, seed=0), np.array([1, 4, 10]))
    k, values = measurement.curves()
    tables = {
        "table": increment_rows(identity, values, k, 1, span=3, points=4, rhs_exact=1.0, rhs_tight=2.0),
        "fits": fit_rows(measurement, identity, 20, 2),
        "t7": t7_rows(measurement, identity),
        "a1": a1_rows(curves, identity, 1),
        "a1_fits": a1_fit_rows(curves, identity, 1, seed=0),
    }
    assert {name: list(rows[0]) for name, rows in tables.items()} == COLUMNS
