"""How the loss changes when samples are added: |L_{k+1}(w) − L_k(w)|, and the assumption A1 on its gradients.

All orderings of the data share one pass over the samples: the losses l_i(w) are computed once, an ordering is a
permutation of them, and L_{k+b} − L_k = Σ_{k<j≤k+b} (l_j − L_k) / (k + b) needs no difference of nearly equal means.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvature_gap.architecture import Architecture
from curvature_gap.files import atomic_path
from curvature_gap.power_law import Array, PowerLaw, bootstrap_power_law, log_spaced
from curvature_gap.vit import flatten_parameters, unflatten_parameters, vit_logits

BINS_PER_DECADE = 8
BATCHES_BEFORE_FIT = 10
_FIT = ["exponent", "low", "high", "prefactor", "n_orderings"]
_T7 = ["at", "distance", "L", "mean_loss", "M", "M_residual", "M_samples", "M_tight", "constant", "constant_tight"]
_RUN = ["run", "stage", "seed"]
COLUMNS = {
    "table": [*_RUN, "ordering", "k", "increment", "ema", "rhs_exact", "rhs_tight", "grad_norm", "batch"],
    "fits": [*_RUN, "batch", "passes", "part", *_FIT, "k_first", "k_last"],
    "t7": [*_RUN, *_T7, "worst_ratio", "median_ratio", "violations", "n_cases"],
    "a1": [*_RUN, "ordering", "k", "grad_norm", "grad_increment", "grad_norm_all", "batch"],
    "a1_fits": [*_RUN, "quantity", *_FIT, "first", "last", "grad_norm_all", "batch"],
}
"""Columns of the tables, which exist also where nothing could be measured."""


@torch.no_grad()
def sample_losses(
    parameters: Mapping[str, Tensor],
    images: Tensor,
    labels: Tensor,
    architecture: Architecture,
    dtype: torch.dtype = torch.float64,
    chunk: int = 500,
) -> Array:
    """Return the cross-entropy l_i(w) of every sample, computed in `dtype`, as float64 (n,)."""
    device = images.device
    p = {name: value.to(device=device, dtype=dtype) for name, value in parameters.items()}
    losses = [
        torch.nn.functional.cross_entropy(vit_logits(p, x.to(dtype), architecture), y, reduction="none")
        for x, y in zip(images.split(chunk), labels.split(chunk), strict=True)
    ]
    return torch.cat(losses).double().cpu().numpy()


def displaced(
    parameters: Mapping[str, Tensor], architecture: Architecture, relative: float, seed: int
) -> tuple[dict[str, Tensor], float]:
    """Return w = w* + relative · ‖w*‖ u with u uniform on the sphere, and the distance ‖w − w*‖. In float64."""
    w = flatten_parameters(parameters, architecture).double()
    u = torch.randn(len(w), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    step = relative * w.norm() * u / u.norm()
    return unflatten_parameters(w + step, architecture), float(step.norm())


def orderings(n: int, count: int, seed: int, passes: int = 1) -> Array:
    """Return `count` seeded orders of n samples (count, passes · n); every pass is a fresh permutation."""
    rng = np.random.default_rng(seed)
    return np.stack([np.concatenate([rng.permutation(n) for _ in range(passes)]) for _ in range(count)])


def increments(losses: Array, batch: int = 1) -> tuple[Array, Array]:
    """Return k and |L_{k+b} − L_k| for k = b, 2b, … along the last axis, whole batches only.

    Args:
        losses: l_i in the order in which samples are added (..., n).
        batch: Samples added at a time, b.

    Raises:
        ValueError: If there are not two batches.
    """
    losses = np.asarray(losses, dtype=np.float64)
    n = losses.shape[-1] // batch
    if batch < 1 or n < 2:
        raise ValueError(f"{losses.shape[-1]} samples do not make two batches of {batch}.")
    means = losses[..., : n * batch].reshape(*losses.shape[:-1], n, batch).mean(axis=-1)
    before = np.cumsum(means, axis=-1)[..., :-1] / np.arange(1, n)
    # L_{k+b} − L_k = (mean of the new batch − L_k) b / (k + b).
    return batch * np.arange(1, n), np.abs(means[..., 1:] - before) / np.arange(2, n + 1)


def moving_average(values: Array, span: int) -> Array:
    """Return the exponential moving average along the last axis, weight 2 / (span + 1), corrected for its start."""
    import pandas as pd

    frame = pd.DataFrame(np.atleast_2d(values).T).ewm(span=span, adjust=True).mean()
    return frame.to_numpy().T.reshape(np.shape(values))


def binned(k: Array, curves: Array, batch: int) -> tuple[Array, Array]:
    """Return the mean of each curve in logarithmic bins of k + b, and the bins' geometric centres.

    Without bins a fit would see nine tenths of its points in the last decade.
    """
    x = k + batch
    n_bins = max(2, round(BINS_PER_DECADE * np.log10(x[-1] / x[0])))
    edges = np.geomspace(x[0], x[-1] * (1 + 1e-12), n_bins + 1)
    where = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, n_bins - 1)
    counts = np.bincount(where, minlength=n_bins)
    filled = counts > 0
    sums = np.stack([np.bincount(where, weights=curve, minlength=n_bins) for curve in np.atleast_2d(curves)])
    centres = np.bincount(where, weights=np.log(x), minlength=n_bins)[filled] / counts[filled]
    return np.exp(centres), sums[:, filled] / counts[filled]


def slope(k: Array, curves: Array, batch: int, seed: int, confidence: float = 0.95) -> PowerLaw:
    """Return the power law of |L_{k+b} − L_k| in k + b, the bound's variable; T7's slope is −1.

    The first ten batches are left out: there L_k is itself noisy, which multiplies the increment by about
    sqrt(1 + b / k) and steepens the fit. The interval resamples orderings: it says how far the slope depends on the
    order, not on the data set.
    """
    late = k >= BATCHES_BEFORE_FIT * batch
    x, means = binned(k[late], curves[:, late], batch)
    return bootstrap_power_law(x, means, np.random.default_rng(seed), confidence)


def t7_constant(largest_loss: float, M: float = 0.0, distance: float = 0.0) -> float:
    """Return c of T7's right-hand side c / (k + 1): c = 2 L + M ‖w − w*‖², L the largest l_i(w*).

    For b samples at a time the same argument gives c b / (k + b). Source: T7.
    """
    return 2 * largest_loss + M * distance**2


def sample_gradients(
    parameters: Mapping[str, Tensor],
    images: Tensor,
    labels: Tensor,
    architecture: Architecture,
    unit: int = 1,
    dtype: torch.dtype = torch.float64,
    chunk: int = 256,
) -> Iterator[Tensor]:
    """Yield ∇l_i(w) as rows (chunk, P), or the mean of each whole batch of `unit` samples as one row."""
    device = images.device
    p = {name: value.detach().to(device=device, dtype=dtype) for name, value in parameters.items()}

    def loss(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(vit_logits(p, x, architecture), y)

    gradient = torch.func.grad(loss)
    if unit > 1:
        for start in range(0, len(labels) - unit + 1, unit):
            x, y = images[start : start + unit].to(dtype), labels[start : start + unit]
            yield flatten_parameters(gradient(p, x, y), architecture)[None]
        return
    per_sample = torch.func.vmap(lambda x, y: gradient(p, x[None], y[None]))
    for x, y in zip(images.split(chunk), labels.split(chunk), strict=True):
        g = per_sample(x.to(dtype), y)
        yield torch.cat([g[name].flatten(1) for name in p], dim=1)


@dataclass(frozen=True)
class GradientCurves:
    """A1 along several orderings: rows are orderings, columns the k of `k`."""

    k: Array
    norm: Array
    """‖∇L_k(w*)‖"""
    increment: Array
    """‖∇L_{k+1}(w*) − ∇L_k(w*)‖"""
    full: float
    """‖∇L_n(w*)‖ over all samples: A1 asks for zero."""


def gradient_curves(rows: Iterable[Tensor], orders: Array, ks: Array) -> GradientCurves:
    """Return the gradient norms of A1 in one pass over the samples' gradients.

    For each ordering the samples between two neighbouring k are summed as they come, and the gradient of the sample
    that follows each k is kept, so no gradient is computed twice and none but these is stored.

    Args:
        rows: ∇l_i(w*), in the samples' own order, in chunks (chunk, P).
        orders: Permutations (m, n) of the samples.
        ks: Increasing k, 1 ≤ k < n.

    Source: A1, FIG-12.
    """
    m, n = orders.shape
    ks = np.asarray(ks)
    if ks[0] < 1 or ks[-1] >= n or (np.diff(ks) <= 0).any():
        raise ValueError(f"k must increase within 1 … {n - 1}, got {ks}.")
    position = np.argsort(orders, axis=1)
    segment = torch.from_numpy(np.searchsorted(ks, position, side="right"))
    sums = next_gradient = None
    start = 0
    for g in rows:
        if sums is None or next_gradient is None:
            sums = g.new_zeros(m, len(ks) + 1, g.shape[1])
            next_gradient = g.new_zeros(m, len(ks), g.shape[1])
        here = slice(start, start + len(g))
        for i in range(m):
            sums[i].index_add_(0, segment[i, here].to(g.device), g)
            # Sample number k + 1 of the ordering has position k.
            at = np.searchsorted(ks, position[i, here])
            follows = (at < len(ks)) & (ks[np.minimum(at, len(ks) - 1)] == position[i, here])
            next_gradient[i, at[follows]] = g[torch.from_numpy(follows).to(g.device)]
        start += len(g)
    if sums is None or next_gradient is None or start != n:
        raise ValueError(f"The orderings are of {n} samples, {start} gradients came.")
    totals = sums.cumsum(1)
    k = torch.from_numpy(ks).to(totals)[:, None]
    mean = totals[:, :-1] / k
    return GradientCurves(
        ks,
        mean.norm(dim=-1).cpu().numpy(),
        ((next_gradient - mean) / (k + 1)).norm(dim=-1).cpu().numpy(),
        float(totals[0, -1].norm() / n),
    )


def increment_rows(
    identity: Mapping[str, Any],
    curves: Array,
    k: Array,
    batch: int,
    *,
    span: int,
    points: int,
    rhs_exact: float,
    rhs_tight: float,
    gradients: GradientCurves | None = None,
) -> list[dict[str, Any]]:
    """Return the rows of `increments.csv` for one model: every ordering at about `points` log-spaced k.

    `increment` is the single value at k, `ema` the average over all k up to there, `rhs_*` T7's right-hand side
    c b / (k + b), `grad_norm` ‖∇L_k‖ (NaN where it was not computed). The k of `gradients`, in batches, are kept too.
    """
    averages = moving_average(curves, span)
    kept = log_spaced(1, len(k), points) - 1
    grad_norm: dict[tuple[int, int], float] = {}
    if gradients is not None:
        kept = np.union1d(kept, gradients.k - 1)
        for i, norms in enumerate(gradients.norm):
            grad_norm |= {(i, int(at) * batch): float(value) for at, value in zip(gradients.k, norms, strict=True)}
    return [
        {
            **identity,
            "ordering": i,
            "k": int(k[j]),
            "increment": float(curves[i, j]),
            "ema": float(averages[i, j]),
            "rhs_exact": rhs_exact * batch / (int(k[j]) + batch),
            "rhs_tight": rhs_tight * batch / (int(k[j]) + batch),
            "grad_norm": grad_norm.get((i, int(k[j])), float("nan")),
            "batch": batch,
        }
        for i in range(len(curves))
        for j in kept
    ]


def a1_rows(curves: GradientCurves, identity: Mapping[str, Any], unit: int) -> list[dict[str, Any]]:
    """Return the rows of `assumption_a1.csv`: both gradient norms along every ordering; k counts samples."""
    return [
        {
            **identity,
            "ordering": i,
            "k": int(k) * unit,
            "grad_norm": float(curves.norm[i, j]),
            "grad_increment": float(curves.increment[i, j]),
            "grad_norm_all": curves.full,
            "batch": unit,
        }
        for i in range(len(curves.norm))
        for j, k in enumerate(curves.k)
    ]


def a1_fit_rows(curves: GradientCurves, identity: Mapping[str, Any], unit: int, seed: int) -> list[dict[str, Any]]:
    """Return the exponents in k of ‖∇L_k‖ and ‖∇L_{k+1} − ∇L_k‖, their first and last means, and ‖∇L_n‖.

    A1 asks both to vanish at every k. An exponent of −1/2 of the first is the noise of a mean over k samples.
    """
    rows = []
    for quantity, values in (("grad_norm", curves.norm), ("grad_increment", curves.increment)):
        law = bootstrap_power_law(curves.k * unit, values, np.random.default_rng(seed))
        first, last = values.mean(axis=0)[[0, -1]]
        fitted = {"exponent": law.exponent, "low": law.low, "high": law.high, "prefactor": law.prefactor}
        ends = {"first": float(first), "last": float(last), "grad_norm_all": curves.full, "batch": unit}
        rows.append({**identity, "quantity": quantity, **fitted, "n_orderings": law.n, **ends})
    return rows


@dataclass(frozen=True)
class Measurement:
    """What one pass over the samples leaves: from it every curve, fit and sample size follows exactly.

    `losses` are l_i(w*), `displaced_losses` l_i(w) at ‖w − w*‖ = `distance`. `M` is the largest ‖∇²l_i(w*)‖ among
    `M_samples` samples, a lower estimate of the maximum, with `M_residual` the largest relative residual; `M_tight` is
    a proven upper bound, NaN where there is none.
    """

    losses: Array
    displaced_losses: Array
    distance: float
    M: float
    M_residual: float
    M_samples: int
    M_tight: float
    n_orderings: int
    seed: int

    def curves(self, batch: int = 1, passes: int = 1, displaced: bool = False) -> tuple[Array, Array]:
        """Return k and the increments along every ordering (n_orderings, len(k))."""
        losses = self.displaced_losses if displaced else self.losses
        return increments(losses[orderings(len(losses), self.n_orderings, self.seed, passes)], batch)

    def constant(self, displaced: bool = False, tight: bool = False) -> float:
        """Return c of T7's right-hand side c / (k + 1), with M exact or the tight bound."""
        M = self.M_tight if tight else self.M
        return t7_constant(float(self.losses.max()), M if displaced else 0.0, self.distance if displaced else 0.0)

    def save(self, path: Path | str) -> None:
        """Write an npz file without pickles, atomically."""
        with atomic_path(path) as temporary, temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **{name: np.asarray(value) for name, value in asdict(self).items()})

    @classmethod
    def load(cls, path: Path | str) -> "Measurement":
        """Read what `save` wrote."""
        with np.load(path, allow_pickle=False) as file:
            values = {name: file[name] if file[name].ndim else file[name].item() for name in file.files}
        return cls(**values)


def fit_rows(measurement: Measurement, identity: Mapping[str, Any], batch: int, passes: int) -> list[dict[str, Any]]:
    """Return the fitted slopes: sample by sample and batch by batch, in one pass and in repeated ones.

    `later` fits only what follows the first pass. There nothing new is seen, L_k has converged to L_n, and the slope is
    −1 all the same: it is the weight 1 / (k + 1) of one sample in a mean, whatever the sample.
    """
    rows = []
    n = len(measurement.losses)
    for size, n_passes in ((1, 1), (batch, 1), (batch, passes)):
        k, curves = measurement.curves(size, n_passes)
        rows.append(_fit_row(identity, k, curves, size, n_passes, "all", measurement.seed))
        if n_passes > 1:
            late = k >= n
            rows.append(_fit_row(identity, k[late], curves[:, late], size, n_passes, "later", measurement.seed))
    return rows


def _fit_row(
    identity: Mapping[str, Any], k: Array, curves: Array, batch: int, passes: int, part: str, seed: int
) -> dict[str, Any]:
    law = slope(k, curves, batch, seed)
    return {
        **identity,
        "batch": batch,
        "passes": passes,
        "part": part,
        "exponent": law.exponent,
        "low": law.low,
        "high": law.high,
        "prefactor": law.prefactor,
        "n_orderings": law.n,
        "k_first": int(max(k[0], BATCHES_BEFORE_FIT * batch)),
        "k_last": int(k[-1]),
    }


def t7_rows(measurement: Measurement, identity: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return, at w* and at the displaced w, T7's constants and how the increments compare with its right-hand side.

    `worst_ratio` is the largest increment over right-hand side, `median_ratio` the median, `violations` the number of
    (ordering, k) where the increment exceeds it, for M exact. Source: T7.
    """
    rows = []
    for at, away in (("w*", False), ("displaced", True)):
        k, curves = measurement.curves(displaced=away)
        ratio = curves * (k + 1) / measurement.constant(away)
        rows.append(
            {
                **identity,
                "at": at,
                "distance": measurement.distance if away else 0.0,
                "L": float(measurement.losses.max()),
                "mean_loss": float((measurement.displaced_losses if away else measurement.losses).mean()),
                "M": measurement.M,
                "M_residual": measurement.M_residual,
                "M_samples": measurement.M_samples,
                "M_tight": measurement.M_tight,
                "constant": measurement.constant(away),
                "constant_tight": measurement.constant(away, tight=True),
                "worst_ratio": float(ratio.max()),
                "median_ratio": float(np.median(ratio)),
                "violations": int((ratio > 1).sum()),
                "n_cases": int(ratio.size),
            }
        )
    return rows
