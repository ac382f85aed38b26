import numpy as np
import pytest

from curvature_gap.loss_increments import Measurement, increments, orderings, slope, t7_constant
from curvature_gap.power_law import PowerLaw
from curvature_gap.sample_size import from_bound, from_fit, observed, sample_size, sample_size_for


@pytest.mark.parametrize("epsilon", [0.5, 0.1, 1 / 3, 0.007, 1e-6])
@pytest.mark.parametrize("c", [0.01, 1.0, 2.5, 49.0])
def test_the_bounds_answer_is_the_smallest(epsilon, c):
    k = from_bound(epsilon, c)
    assert c / (k + 1) < epsilon
    assert k == 1 or c / k >= epsilon


def test_the_fits_answer_inverts_the_law():
    law = PowerLaw(-1.0, -1.1, -0.9, 3.0, 0.95, 10)
    assert from_fit(0.01, law) == pytest.approx(299)
    assert from_fit(100.0, law) == 1
    assert np.isnan(from_fit(0.01, PowerLaw(0.1, 0.0, 0.2, 3.0, 0.95, 10)))


def test_observed_first_and_sustained():
    k = np.arange(1, 21)
    curves = np.full((5, 20), 0.1)
    curves[0, [0, 2]] = 5.0
    curves[2] = 5.0
    curves[3, [0, 19]] = 5.0
    # Below from k = 20 of 21 samples on: too few to call it sustained.
    curves[4, 18] = 5.0
    first, sustained = observed(1.0, k, curves)
    np.testing.assert_array_equal(first, [2, 1, np.nan, 2, 1])
    np.testing.assert_array_equal(sustained, [4, 1, np.nan, np.nan, np.nan])


def test_on_losses_the_bound_is_never_below_what_is_observed():
    losses = np.random.default_rng(0).exponential(size=4000)
    k, curves = increments(losses[orderings(4000, 11, seed=0)])
    law = slope(k, curves, 1, seed=0)
    for epsilon in (1e-1, 1e-2, 5e-3):
        answer = sample_size(epsilon, t7_constant(losses.max()), law, k, curves)
        assert answer.first <= answer.sustained <= answer.bound
        assert answer.first <= answer.fit <= answer.bound
        assert answer.sustained_low <= answer.sustained <= answer.sustained_high
        assert (answer.n_samples, answer.n_orderings) == (4000, 11)


def test_a_tolerance_beyond_the_data_is_predicted_but_not_observed():
    losses = np.random.default_rng(0).exponential(size=50)
    k, curves = increments(losses[orderings(50, 5, seed=0)])
    answer = sample_size(1e-9, t7_constant(losses.max()), slope(k, curves, 1, seed=0), k, curves)
    assert answer.bound > 1e9
    assert np.isnan(answer.sustained)
    assert np.isnan(answer.sustained_low)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("nan"), float("inf")])
def test_a_tolerance_that_is_not_positive_is_refused(epsilon):
    with pytest.raises(ValueError, match="epsilon must be a positive number"):
        from_bound(epsilon, 1.0)


def test_the_commands_answer_comes_from_the_stored_run(tmp_path):
    losses = np.random.default_rng(0).exponential(size=900)
    measurement = Measurement(losses, losses, 0.1, 2.0, 0.0, 5, np.nan, n_orderings=10, seed=0)
    measurement.save(tmp_path / "increments" / "mnist_seed0.npz")
    answer = sample_size_for(0.02, tmp_path, "mnist_seed0")
    assert answer["run"] == "mnist_seed0"
    assert answer["bound"] == from_bound(0.02, 2 * losses.max())
    assert answer["first"] <= answer["sustained"] <= answer["bound"]
    with pytest.raises(FileNotFoundError, match="measured increments: mnist_seed0"):
        sample_size_for(0.02, tmp_path, "mnist_seed7")
    with pytest.raises(ValueError, match="epsilon"):
        sample_size_for(0.0, tmp_path, "mnist_seed0")


def test_a_dataset_out_of_reach_says_so(tmp_path):
    empty = np.zeros(0)
    Measurement(empty, empty, 0.0, np.nan, np.nan, 0, np.nan, n_orderings=10, seed=0).save(
        tmp_path / "increments" / "cifar100_seed0.npz"
    )
    with pytest.raises(ValueError, match="not run"):
        sample_size_for(0.1, tmp_path, "cifar100_seed0")
