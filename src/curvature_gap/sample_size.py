"""How many samples until one more changes the loss by less than ε: predicted by the bound, by a fit, and observed."""

from dataclasses import asdict, dataclass
from math import floor
from pathlib import Path
from typing import Any

import numpy as np

from curvature_gap.loss_increments import Measurement, slope
from curvature_gap.power_law import Array, PowerLaw


@dataclass(frozen=True)
class SampleSize:
    """The smallest k with |L_{k+1}(w) − L_k(w)| < ε.

    `bound` and `fit` are predictions, `first` and `sustained` observations, medians over the orderings: `first` is the
    first k at which the increment is below ε, which chance makes small; from `sustained` on it stays below for the rest
    of the data. NaN where the data end before that; so do they where it stays below for less than their last tenth.
    """

    epsilon: float
    bound: float
    fit: float
    first: float
    sustained: float
    sustained_low: float
    sustained_high: float
    n_samples: int
    n_orderings: int


def from_bound(epsilon: float, c: float) -> int:
    """Return the smallest k ≥ 1 with c / (k + 1) < ε, c the constant of T7's right-hand side."""
    _check(epsilon)
    # Floating division may land on either side of a whole number; the two neighbours settle it.
    k = max(1, floor(c / epsilon) - 1)
    while c / (k + 1) >= epsilon:
        k += 1
    return k


def from_fit(epsilon: float, law: PowerLaw) -> float:
    """Return the k at which the fitted law in k + 1 falls below ε; NaN if the fitted exponent is not negative."""
    _check(epsilon)
    if law.exponent >= 0:
        return float("nan")
    return float(max(1.0, np.ceil(law.inverse(epsilon) - 1)))


def observed(epsilon: float, k: Array, curves: Array) -> tuple[Array, Array]:
    """Return, for each ordering, the first k with an increment below ε and the k from which all are; NaN if none.

    All of the last tenth of the data must be below: among the last few increments chance alone would do.
    """
    _check(epsilon)
    below = np.atleast_2d(curves) < epsilon
    ks = np.append(np.asarray(k, dtype=np.float64), np.nan)
    first = np.where(below.any(axis=1), below.argmax(axis=1), len(k))
    above_reversed = ~below[:, ::-1]
    last_above = np.where(above_reversed.any(axis=1), len(k) - 1 - above_reversed.argmax(axis=1), -1)
    sustained = ks[last_above + 1]
    return ks[first], np.where(sustained > 0.9 * (ks[-2] + 1), np.nan, sustained)


def sample_size(epsilon: float, c: float, law: PowerLaw, k: Array, curves: Array) -> SampleSize:
    """Return the three answers for one ε.

    Args:
        epsilon: Tolerance on |L_{k+1} − L_k|, in units of the loss.
        c: Constant of T7's right-hand side, `loss_increments.t7_constant`.
        law: Fit of the increments, `loss_increments.slope`.
        k: Numbers of samples, one by one.
        curves: Increments along orderings (m, len(k)).

    Raises:
        ValueError: If ε is not positive and finite.
    """
    first, sustained = observed(epsilon, k, curves)
    known = sustained[~np.isnan(sustained)]
    low, high = np.quantile(known, [0.025, 0.975]) if len(known) else (np.nan, np.nan)
    return SampleSize(
        epsilon=epsilon,
        bound=float(from_bound(epsilon, c)),
        fit=from_fit(epsilon, law),
        first=_median(first),
        sustained=_median(sustained),
        sustained_low=float(low),
        sustained_high=float(high),
        n_samples=int(k[-1]) + 1,
        n_orderings=len(np.atleast_2d(curves)),
    )


def _median(values: Array) -> float:
    """Return the median, NaN counting as larger than every number."""
    return float(np.sort(values)[(len(values) - 1) // 2]) if len(values) else float("nan")


def _check(epsilon: float) -> None:
    if not (np.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"epsilon must be a positive number, got {epsilon}.")


def sample_sizes(measurement: Measurement, epsilons: Array) -> list[SampleSize]:
    """Return the answers for several ε from one measurement, at w*."""
    k, curves = measurement.curves()
    law = slope(k, curves, 1, measurement.seed)
    return [sample_size(float(epsilon), measurement.constant(), law, k, curves) for epsilon in epsilons]


def sample_size_for(epsilon: float, results: Path, run: str) -> dict[str, Any]:
    """Return the answer for a run of the workflow, from `increments/<run>.npz` in its results.

    Raises:
        ValueError: If ε is not positive.
        FileNotFoundError: If the run's increments were not measured; the message lists the runs that were.
    """
    _check(epsilon)
    path = results / "increments" / f"{run}.npz"
    if not path.is_file():
        there = ", ".join(sorted(p.stem for p in path.parent.glob("*.npz"))) or "none"
        raise FileNotFoundError(f"{path} does not exist; runs with measured increments: {there}.")
    measurement = Measurement.load(path)
    if len(measurement.losses) == 0:
        raise ValueError(f"{run} was not run: its dataset was out of reach.")
    return {"run": run, **asdict(sample_sizes(measurement, np.array([epsilon]))[0])}
