"""Fits of y = c x^p on logarithmic axes, with confidence intervals."""

from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class PowerLaw:
    """y ≈ prefactor · x^exponent; `low` and `high` bound the exponent."""

    exponent: float
    low: float
    high: float
    prefactor: float
    confidence: float
    n: int
    """Points of the fit, or curves of the bootstrap."""

    def __call__(self, x: float) -> float:
        return float(self.prefactor * x**self.exponent)

    def inverse(self, y: float) -> float:
        """Return the x at which the fitted law takes the value y."""
        return float((y / self.prefactor) ** (1 / self.exponent))


def fit_power_law(x: Array, y: Array, confidence: float = 0.95) -> PowerLaw:
    """Return the least-squares line through (log x, log y) with Student's interval of its slope.

    The interval takes the points as independent.

    Raises:
        ValueError: If there are fewer than three points, or x or y is not positive.
    """
    from scipy import stats

    x, y = _checked(x), _checked(y)
    if x.shape != y.shape or x.ndim != 1 or len(x) < 3:
        raise ValueError(f"A power law needs at least three points (x, y), got shapes {x.shape} and {y.shape}.")
    line = stats.linregress(np.log(x), np.log(y))
    half = stats.t.ppf((1 + confidence) / 2, len(x) - 2) * line.stderr
    return PowerLaw(
        float(line.slope),
        float(line.slope - half),
        float(line.slope + half),
        float(np.exp(line.intercept)),
        confidence,
        len(x),
    )


def bootstrap_power_law(
    x: Array, curves: Array, rng: np.random.Generator, confidence: float = 0.95, resamples: int = 2000
) -> PowerLaw:
    """Return the power law of the mean of several curves, its interval from resampling whole curves.

    Points of one curve depend on each other, curves do not; so curves, not points, are drawn with replacement, and the
    interval is the percentile interval of the slopes.

    Args:
        x: Positive abscissae (m,).
        curves: One curve per row (n, m), not negative, positive in the mean.
        rng: Of the resampling.
        confidence: Of the interval.
        resamples: Number of resamples.
    """
    x, curves = _checked(x), np.asarray(curves, dtype=np.float64)
    if curves.ndim != 2 or curves.shape[1] != len(x) or len(curves) < 2 or len(x) < 2:
        raise ValueError(f"A bootstrap needs at least two curves over {len(x)} ≥ 2 points, got shape {curves.shape}.")
    log_x = np.log(x) - np.log(x).mean()

    def slopes(means: Array) -> Array:
        return np.asarray(np.log(_checked(means)) @ log_x / (log_x @ log_x))

    n = len(curves)
    # Multinomial weights are the resampled means without forming the resamples.
    weights = rng.multinomial(n, np.full(n, 1 / n), size=resamples) / n
    mean = curves.mean(axis=0)
    slope = float(slopes(mean))
    low, high = np.quantile(slopes(weights @ curves), [(1 - confidence) / 2, (1 + confidence) / 2])
    prefactor = float(np.exp(np.log(mean).mean() - slope * np.log(x).mean()))
    return PowerLaw(slope, float(low), float(high), prefactor, confidence, n)


def log_spaced(first: int, last: int, n: int) -> Array:
    """Return at most n distinct whole numbers from `first` to `last`, both included, evenly spaced in the logarithm."""
    if not 1 <= first <= last or n < 2:
        raise ValueError(f"Cannot take {n} ≥ 2 whole numbers from {first} ≥ 1 to {last}.")
    return np.unique(np.round(np.geomspace(first, last, n)).astype(np.int64))


def _checked(values: Array) -> Array:
    values = np.asarray(values, dtype=np.float64)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ValueError("A power law needs positive, finite numbers.")
    return values
