import numpy as np
import pytest

from curvature_gap.power_law import bootstrap_power_law, fit_power_law, log_spaced

X = np.geomspace(2, 3000, 23)


def test_an_exact_power_law_is_found_and_inverted():
    law = fit_power_law(X, 5 * X**-0.7)
    assert law.exponent == pytest.approx(-0.7, abs=1e-12)
    assert law.prefactor == pytest.approx(5)
    assert law.high - law.low < 1e-6
    assert law(law.inverse(0.3)) == pytest.approx(0.3)


def test_the_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(400):
        law = fit_power_law(X, X**-1.0 * np.exp(0.3 * rng.standard_normal(len(X))), confidence=0.9)
        inside += law.low <= -1 <= law.high
    assert 0.86 <= inside / 400 <= 0.94


def test_the_bootstrap_covers_curves_with_an_error_common_to_all_their_points():
    # Points of one curve move together: an interval from points alone would be too narrow.
    rng = np.random.default_rng(1)
    many = np.exp((-1 + 0.2 * rng.standard_normal(20_000))[:, None] * np.log(X / X.mean()))
    # The slope of a mean of powers is not the mean of the slopes; compare with many curves' slope.
    truth = bootstrap_power_law(X, many, rng, resamples=2).exponent
    inside, narrow = 0, 0
    for _ in range(200):
        exponents = -1 + 0.2 * rng.standard_normal(30)
        curves = np.exp(exponents[:, None] * np.log(X / X.mean()))
        law = bootstrap_power_law(X, curves, rng, confidence=0.9, resamples=400)
        inside += law.low <= truth <= law.high
        single = fit_power_law(X, curves.mean(axis=0), confidence=0.9)
        narrow += single.low <= truth <= single.high
    assert 0.8 <= inside / 200 <= 0.96
    assert narrow < inside


def test_the_bootstrap_of_equal_curves_is_the_line():
    law = bootstrap_power_law(X, np.stack([3 * X**-1.5] * 4), np.random.default_rng(0))
    assert (law.exponent, law.low, law.high) == pytest.approx((-1.5,) * 3)
    assert law.prefactor == pytest.approx(3)


def test_log_spaced_holds_both_ends_and_no_number_twice():
    ks = log_spaced(1, 60_000, 50)
    assert ks[0] == 1
    assert ks[-1] == 60_000
    assert (np.diff(ks) > 0).all()
    assert log_spaced(4, 4, 5).tolist() == [4]


@pytest.mark.parametrize("bad", [np.array([1.0, 2.0, 0.0]), np.array([1.0, np.nan, 2.0]), np.array([1.0, -1.0, 2.0])])
def test_what_has_no_logarithm_is_refused(bad):
    with pytest.raises(ValueError, match="positive"):
        fit_power_law(np.arange(1.0, 4.0), bad)


def test_too_few_points_or_curves_are_refused():
    with pytest.raises(ValueError, match="three points"):
        fit_power_law(X[:2], X[:2])
    with pytest.raises(ValueError, match="two curves"):
        bootstrap_power_law(X, X[None], np.random.default_rng(0))
    with pytest.raises(ValueError, match="Cannot take"):
        log_spaced(0, 5, 3)
