"""Norms of matrices and of a Hessian's blocks."""

import math
from collections.abc import Sequence
from itertools import combinations_with_replacement
from typing import Any

import torch
from torch import Tensor

from curvature_gap.shapes import Float

LOG_FLOOR = 1e-6
POOLED = {"LN1": ("LN1_gamma", "LN1_beta"), "LN2": ("LN2_gamma", "LN2_beta")}


def frobenius_norm(A: Float[Tensor, "m n"]) -> float:
    """Return sqrt(Σ a²), unitless in A's scale; does not overflow where A does not."""
    return float(torch.linalg.vector_norm(A, dtype=torch.float64))


def spectral_norm(A: Float[Tensor, "m n"]) -> float:
    """Return the largest singular value of A, exact to rounding.

    In float64, whatever A's dtype, from the eigenvalues of a symmetric A, else of the smaller Gram matrix. The square
    costs no accuracy for the *largest* singular value: the eigenvalue's error is of order ε ‖A‖², so the root's is of
    order ε ‖A‖.

    Raises:
        ValueError: If an entry is NaN or infinite.
    """
    scale = float(A.abs().max()) if A.numel() else 0.0
    if not math.isfinite(scale):
        raise ValueError("The matrix holds NaN or infinite entries; it has no norm.")
    if scale == 0.0:
        return 0.0
    A = A.double() / scale  # the square must neither overflow nor underflow
    if A.shape[0] == A.shape[1] and torch.equal(A, A.T):
        return scale * float(torch.linalg.eigvalsh(A).abs().max())
    gram = A @ A.T if A.shape[0] <= A.shape[1] else A.T @ A
    return scale * float(torch.linalg.eigvalsh(gram)[-1]) ** 0.5


def block_row(row: str, column: str, block: Float[Tensor, "m n"]) -> dict[str, Any]:
    """Return one pair's line of `block_norms.csv`, without run, stage and seed."""
    magnitude = block.double().abs()
    return {
        "row": row,
        "column": column,
        "spectral": spectral_norm(block),
        "frobenius": frobenius_norm(block),
        "max_abs": float(magnitude.max()),
        "mean_abs": float(magnitude.mean()),
        "mean_log10_abs": float(magnitude.clamp(min=LOG_FLOOR).log10().mean()),
    }


def block_norms_table(
    hessian: Any, run: str, stage: str, seed: int, diagonal_only: bool = False, pooled: bool = True
) -> list[dict[str, Any]]:
    """Return the lines of `block_norms.csv` for one Hessian.

    One line per ordered pair of the parameter blocks held, (row, column) and (column, row) alike; then, with `pooled`,
    one per ordered pair with at least one of `LN1` and `LN2`, which stack γ and β, for tables that have ten blocks.
    A table of ten blocks takes the lines whose row and column are not LN scales or shifts; one of twelve takes those
    that are not LN1 or LN2. In deeper models each transformer block has its own pooled pair (`block1_LN1`, ...).

    Args:
        hessian: A `Hessian`; diagonal blocks suffice with `diagonal_only` (pooled lines then need γβ and are left out
            where it is missing).
        run: As in the file names, `mnist_seed0`.
        stage: `init`, `step_00500`, `trained`.
        seed: Of the run.
        diagonal_only: Only pairs of a block with itself.
        pooled: Whether to add LN1 and LN2.
    """
    pools = _pooled_groups(hessian.names) if pooled else {}
    groups = {name: (name,) for name in hessian.names} | pools
    members = {name for names in pools.values() for name in names}
    pairs = _upper(hessian.names)
    pairs += [pair for pair in _upper([g for g in groups if g not in members]) if pools.keys() & pair]
    lines = []
    for row, column in pairs:
        block = None if diagonal_only and row != column else _stacked(hessian, groups[row], groups[column])
        if block is not None:
            lines.append(block_row(row, column, block))
            if row != column:
                lines.append(lines[-1] | {"row": column, "column": row})
    return [{"run": run, "stage": stage, "seed": seed, **line} for line in lines]


def _upper(names: Sequence[str]) -> list[tuple[str, str]]:
    return list(combinations_with_replacement(names, 2))


def _pooled_groups(names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    groups = {}
    for name in names:
        for pool, parts in POOLED.items():
            if name.endswith(parts[0]):
                prefix = name.removesuffix(parts[0])
                members = tuple(prefix + part for part in parts)
                if all(member in names for member in members):
                    groups[prefix + pool] = members
    return groups


def _stacked(hessian: Any, rows: tuple[str, ...], columns: tuple[str, ...]) -> Tensor | None:
    """Return the block of stacked rows and columns, or None if a part is not held."""
    if any(not hessian.holds(row, column) for row in rows for column in columns):
        return None
    return torch.cat([torch.cat([hessian[row, column] for column in columns], dim=1) for row in rows])
