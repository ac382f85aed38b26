"""Exact eigenvalues of the whole Hessian and of its diagonal blocks, and the outliers among them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from curvature_gap.hessian import Hessian
from curvature_gap.power_law import Array

SEARCH_FACTOR = 3
NEGLIGIBLE = 1e-3
"""Relative to the largest |eigenvalue|."""


def spectra(hessian: Hessian) -> dict[str, Array]:
    """Return the eigenvalues, ascending, of the whole matrix (`total`) and of each diagonal block.

    Raises:
        ValueError: If only some blocks of the Hessian were computed.
    """
    H = hessian.to_numpy()
    eigenvalues = {"total": np.linalg.eigvalsh(H)}
    for name in hessian.names:
        eigenvalues[name] = np.linalg.eigvalsh(hessian[name, name].cpu().numpy())
    return eigenvalues


def outliers(eigenvalues: Array, classes: int) -> tuple[int, float]:
    """Return how many leading eigenvalues stand apart from the rest, and the gap that sets them apart.

    The outliers are the eigenvalues above the largest ratio λ_j / λ_{j+1} of neighbours among the 3 · classes + 1
    largest, as far as these exceed 1e-3 of the largest |λ| (a matrix of low rank has a gap of 1e9 above its rounding
    errors): a gap, not a threshold, so the scale of the loss does not matter. The gap is that ratio; near one it means
    that nothing stands apart. Returns (0, NaN) if fewer than two eigenvalues qualify.
    """
    leading = np.sort(eigenvalues)[::-1][: SEARCH_FACTOR * classes + 1]
    leading = leading[leading > NEGLIGIBLE * np.abs(eigenvalues).max()]
    if len(leading) < 2:
        return 0, float("nan")
    ratios = leading[:-1] / leading[1:]
    return int(np.argmax(ratios)) + 1, float(ratios.max())


def spectrum_rows(
    eigenvalues: Mapping[str, Array], classes: int, identity: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the tidy eigenvalues (rank 1 is the largest) and one summary row per block.

    `near_zero` is the share of |λ| below 1e-3 of the largest |λ|, `negative` the share of negative eigenvalues beyond
    rounding (n ε λ_max), `energy` the share of Σ λ² in the outliers.
    """
    values, summary = [], []
    for block, ascending in eigenvalues.items():
        descending = ascending[::-1]
        values += [
            {**identity, "block": block, "rank": i + 1, "eigenvalue": float(v)} for i, v in enumerate(descending)
        ]
        n_outliers, gap = outliers(ascending, classes)
        largest = float(np.abs(ascending).max())
        rounding = len(ascending) * np.finfo(np.float64).eps * largest
        energy = float((descending[:n_outliers] ** 2).sum() / (ascending**2).sum()) if largest > 0 else float("nan")
        summary.append(
            {
                **identity,
                "block": block,
                "size": len(ascending),
                "largest": float(ascending[-1]),
                "smallest": float(ascending[0]),
                "trace": float(ascending.sum()),
                "negative": float((ascending < -rounding).mean()),
                "near_zero": float((np.abs(ascending) <= NEGLIGIBLE * largest).mean()),
                "classes": classes,
                "outliers": n_outliers,
                "gap": gap,
                "energy": energy,
            }
        )
    return values, summary
