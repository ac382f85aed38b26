"""Curvature of models trained on more and more data: what the title's scaling laws look like when measured."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvature_gap.architecture import Architecture
from curvature_gap.dynamics import hessian_at
from curvature_gap.lanczos import extreme_eigenvalues
from curvature_gap.loss_increments import sample_losses
from curvature_gap.norms import block_norms_table
from curvature_gap.power_law import fit_power_law
from curvature_gap.sample_curvature import sample_curvature
from curvature_gap.samples import Samples
from curvature_gap.training import TrainingSettings, accuracy, train


def train_on_prefixes(
    architecture: Architecture,
    settings: TrainingSettings,
    training_set: Samples,
    validation_set: Samples,
    sizes: Sequence[int],
    unfinished: Path,
    **options: Any,
) -> dict[int, dict[str, Tensor]]:
    """Return the trained weights for each size n: the same seed and number of steps on the first n samples.

    The subsets are nested. A batch is never larger than the subset. Each finished training stays in `unfinished`, so
    a killed job goes on with the next.

    Raises:
        ValueError: If a size exceeds the training set.
    """
    images, labels = training_set
    if max(sizes) > len(labels):
        raise ValueError(f"A subset of {max(sizes)} was asked for; there are {len(labels)} training images.")
    models = {}
    for n in sizes:
        own = TrainingSettings(**(vars(settings) | {"batch_size": min(settings.batch_size, n)}))
        prefix = (images[:n], labels[:n])
        models[n] = train(
            architecture, own, prefix, validation_set, None, unfinished=unfinished / f"n{n:06d}", **options
        )
    return models


def curvature_rows(
    parameters: Mapping[str, Tensor],
    batch: Samples,
    validation_set: Samples,
    architecture: Architecture,
    identity: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Return one row for the whole Hessian (`total`), one for M and one per diagonal block, on a fixed batch.

    The blocks are exact matrices; the norm of the whole is the eigenvalue of largest magnitude by Lanczos on exact
    products, with `residual` as its error bar. `M` is the largest norm of one sample's Hessian in the batch, with its
    residual, and `bound` the tight bound on it (NaN elsewhere). The losses are cross-entropies, on the batch
    and on the validation set.
    """
    H = hessian_at(parameters, *batch, architecture)
    if H.operator is None:
        raise ValueError("The Hessian came without its product; the norm of the whole needs one.")
    whole = extreme_eigenvalues(H.operator, H.n_parameters, 1)
    about = {
        "loss": H.loss,
        "grad_norm": H.grad_norm,
        "validation_loss": float(sample_losses(parameters, *validation_set, architecture, torch.float32).mean()),
        "validation_accuracy": accuracy(parameters, *validation_set, architecture),
    }
    M = sample_curvature(parameters, *batch, architecture)
    norm, nan = float(np.abs(whole.values[0])), float("nan")
    total = {"block": "total", "spectral": norm, "residual": float(whole.residuals[0]), "bound": nan}
    largest = {"block": "M", "spectral": M.M, "residual": M.M * M.residual, "bound": M.tight}
    blocks = [
        {"block": row["row"], "spectral": row["spectral"], "residual": 0.0, "bound": nan}
        for row in block_norms_table(H, run="", stage="trained", seed=0, diagonal_only=True)
    ]
    return [{**identity, **row, **about} for row in [total, largest, *blocks]]


def exponent_rows(rows: Sequence[Mapping[str, Any]], x: str = "n_train", y: str = "spectral") -> list[dict[str, Any]]:
    """Return, per block, the exponent of y ∝ x^p over all sizes and seeds, with Student's 95 % interval.

    Models of one seed saw nested data, so their points are not quite independent and the interval is a little narrow.
    """
    table = []
    for block in dict.fromkeys(row["block"] for row in rows):
        points = np.array([(row[x], row[y]) for row in rows if row["block"] == block], dtype=np.float64)
        law = fit_power_law(points[:, 0], points[:, 1])
        fitted = {"exponent": law.exponent, "low": law.low, "high": law.high, "prefactor": law.prefactor}
        table.append({"block": block, **fitted, "n_points": law.n})
    return table
