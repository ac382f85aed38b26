"""Evidence stored beside a Hessian: symmetry, products by a second method, finite differences, distance to the kinks.

The second method differs from the engine's: reverse over reverse for the closed form, forward over reverse for the
automatic engine. Everything here is computed in float64, whatever the dtype of the matrix.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvature_gap.autodiff_hessian import (
    Pair,
    block_slices,
    hvp_double_backward,
    hvp_forward_over_reverse,
)
from curvature_gap.batch_loss import BatchLoss, ReLUInputs, flatten, unflatten

HVP = Callable[[BatchLoss, Mapping[str, Tensor], Mapping[str, Tensor]], dict[str, Tensor]]
HVPS: dict[str, HVP] = {"double_backward": hvp_double_backward, "forward_over_reverse": hvp_forward_over_reverse}
SECOND_METHOD = {"closed_form": "double_backward", "autodiff": "forward_over_reverse"}

N_VECTORS = 8
N_COLUMNS = 8
# Truncation is of order step², rounding of order 1e-16 / step: both stay below 1e-8 of max |H| in practice.
FD_STEP = 1e-6
NEAR_KINK = 1e-6
MAX_TRIES = 12
TOLERANCES = {
    "float64": {"asymmetry": 1e-13, "hvp_error": 1e-12, "fd_error": 1e-6},
    "float32": {"asymmetry": 1e-5, "hvp_error": 1e-4, "fd_error": 1e-5},
}


class CertificateError(ValueError):
    """A Hessian that failed a check of its certificate."""


@dataclass(frozen=True)
class Certificate:
    """What was checked about one Hessian, and the numbers found.

    `asymmetry`: max |B − Bᵀ| over the blocks whose two halves were both computed, over max |H|. `hvp_error`: largest
    entry of H v − (H v by the second method), over the largest entry of the latter, worst of `n_vectors`. `fd_error`:
    largest difference between a column and its central difference, over max |H|; columns whose step of `fd_step` would
    cross a ReLU's kink are skipped, and `n_fd_columns` says how many were compared. `relu_near_zero`: ReLU
    pre-activations within 1e-6 of the kink, where the Hessian jumps (-1: not counted).
    """

    asymmetry: float
    hvp_error: float
    hvp_method: str
    n_vectors: int
    fd_error: float
    fd_step: float
    n_fd_columns: int
    relu_near_zero: int
    dtype: str

    def check(self) -> None:
        """Raise CertificateError, naming the check and its numbers, unless every check passed."""
        if self.n_fd_columns == 0:
            raise CertificateError(
                f"Certificate check fd_error: no column could be differenced, every step of {self.fd_step:g} crosses a "
                "ReLU kink. Use a smaller batch to check this model."
            )
        for name, tolerance in TOLERANCES[self.dtype].items():
            value = getattr(self, name)
            if not value <= tolerance:  # a NaN fails
                method = f" ({self.hvp_method})" if name == "hvp_error" else ""
                raise CertificateError(
                    f"Certificate check {name}{method} failed: {value:.3g}, allowed {tolerance:g} in {self.dtype}. "
                    "This Hessian is wrong, or not accurate; do not use it."
                )

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the fields as 0-d arrays named `certificate_<field>`, for an npz file."""
        return {f"certificate_{name}": np.array(value) for name, value in asdict(self).items()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any]) -> "Certificate | None":
        """Return the certificate stored in an npz file, or None if it holds none."""
        names = cls.__dataclass_fields__
        if any(f"certificate_{name}" not in arrays for name in names):
            return None
        return cls(**{name: arrays[f"certificate_{name}"].item() for name in names})


def certify(
    blocks: Mapping[Pair, Tensor], problem: BatchLoss, *, engine: str, asymmetry: float, seed: int = 0
) -> Certificate:
    """Check a Hessian's blocks against products and finite differences of the same loss.

    Args:
        blocks: The blocks held, (row, column) with the row not after the column; a whole upper triangle or a part.
        problem: The loss in float64.
        engine: Which engine computed the blocks; decides the second method.
        asymmetry: As measured by whoever symmetrised.
        seed: Of the random vectors and columns.

    Cost: about 8 Hessian–vector products and 16 gradients; with blocks missing, one product per block column.
    """
    generator = torch.Generator().manual_seed(seed)
    method = SECOND_METHOD[engine]
    scale = max(float(block.abs().max()) for block in blocks.values())
    columns = _held_columns(blocks)
    n_vectors, hvp_error = _hvp_error(columns, problem, HVPS[method], generator)
    with torch.no_grad(), ReLUInputs() as relus:
        problem(problem.parameters)
    n_columns, fd_error = _fd_error(columns, problem, relus.signs(), generator)
    dtype = next(iter(blocks.values())).dtype
    return Certificate(
        asymmetry=asymmetry,
        hvp_error=hvp_error,
        hvp_method=method,
        n_vectors=n_vectors,
        fd_error=fd_error / scale if scale else fd_error,
        fd_step=FD_STEP,
        n_fd_columns=n_columns,
        relu_near_zero=relus.n_near_zero(NEAR_KINK),
        dtype=str(dtype).removeprefix("torch."),
    )


def _held_columns(blocks: Mapping[Pair, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return column block → {row block → block}, both halves, without copies."""
    columns: dict[str, dict[str, Tensor]] = {}
    for (row, column), block in blocks.items():
        columns.setdefault(column, {})[row] = block
        columns.setdefault(row, {})[column] = block if row == column else block.T
    return columns


def _hvp_error(
    columns: Mapping[str, Mapping[str, Tensor]],
    problem: BatchLoss,
    hvp: HVP,
    generator: torch.Generator,
) -> tuple[int, float]:
    whole = all(len(rows) == len(problem.parameters) for rows in columns.values())
    # A product needs whole rows: where blocks are missing, test one block column at a time.
    supports = [list(columns)] * N_VECTORS if whole else [[c] for c in columns] * -(-N_VECTORS // len(columns))
    errors = []
    for support in supports:
        v = {c: _normal(problem.parameters[c], generator) for c in support}
        exact = hvp(problem, problem.parameters, v)
        rows = columns[support[0]]
        error = max(
            float((sum(columns[c][r].to(v[c]) @ v[c].reshape(-1) for c in support) - exact[r].reshape(-1)).abs().max())
            for r in rows
        )
        largest = max(float(exact[r].abs().max()) for r in rows)
        errors.append(error / largest if largest else error)
    return len(supports), max(errors)


def _fd_error(
    columns: Mapping[str, Mapping[str, Tensor]],
    problem: BatchLoss,
    signs: list[Tensor],
    generator: torch.Generator,
) -> tuple[int, float]:
    """Return how many columns were compared with central differences, and the largest difference of an entry."""
    sizes = {name: p.numel() for name, p in problem.parameters.items()}
    theta, where = flatten(problem.parameters), block_slices(sizes)
    names = list(columns)
    # Columns from as many different blocks as there are; those whose step crosses a kink are drawn again.
    order = torch.randperm(len(names), generator=generator).tolist()
    count, worst = 0, 0.0
    for k in range(N_COLUMNS):
        name = names[order[k % len(names)]]
        for _ in range(MAX_TRIES):
            j = int(torch.randint(sizes[name], (1,), generator=generator))
            difference = _central_difference(problem, theta, where[name].start + j, signs)
            if difference is not None:
                for row, block in columns[name].items():
                    error = (block[:, j].to(theta) - difference[where[row]]).abs().max()
                    worst = max(worst, float(error))
                count += 1
                break
    return count, worst if count else float("nan")


def _central_difference(problem: BatchLoss, theta: Tensor, k: int, signs: list[Tensor]) -> Tensor | None:
    """Return (∇(θ + h e_k) − ∇(θ − h e_k)) / 2h, or None if a ReLU changes side on the way."""
    gradients = []
    for step in (FD_STEP, -FD_STEP):
        moved = theta.clone()
        moved[k] += step
        with ReLUInputs() as relus:
            gradients.append(flatten(problem.value_and_gradient(unflatten(moved, problem.parameters))[1]))
        if any(not torch.equal(a, b) for a, b in zip(signs, relus.signs(), strict=True)):
            return None
    return (gradients[0] - gradients[1]) / (2 * FD_STEP)


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)
