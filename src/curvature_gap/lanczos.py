"""Spectra without matrices: Lanczos on exact Hessian–vector products, with residuals as error bars.

Eigenvalues come from scipy's implicitly restarted Lanczos (`eigsh`); the density from stochastic Lanczos quadrature.
For a symmetric H and a unit vector v, an eigenvalue lies within ‖H v − λ v‖ of λ: that residual is the error bar.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvature_gap.shapes import Float

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Extremes:
    """Eigenvalues of largest magnitude, ascending, and for each a bound on the distance to an exact one."""

    values: np.ndarray
    residuals: np.ndarray
    vectors: np.ndarray
    n_products: int


def extreme_eigenvalues(
    product: Product, n: int, k: int = 6, *, tolerance: float = 1e-10, seed: int = 0, max_products: int | None = None
) -> Extremes:
    """Return the k eigenvalues of largest magnitude of the symmetric n × n matrix behind `product`.

    Args:
        product: v ↦ H v, float64 of length n.
        n: Number of rows.
        k: How many, less than n.
        tolerance: Relative accuracy at which Lanczos stops.
        seed: Of the starting vector.
        max_products: Restarts allowed; None leaves scipy's limit.

    Raises:
        ValueError: If k is not in 1 … n.
        scipy.sparse.linalg.ArpackNoConvergence: If the limit is reached; it carries what has converged.
    """
    if not 1 <= k <= n:
        raise ValueError(f"k must lie in 1 … {n}, got {k}.")
    from scipy.sparse.linalg import LinearOperator, eigsh

    count = 0

    def multiply(v: np.ndarray) -> np.ndarray:
        nonlocal count
        count += 1
        return product(torch.from_numpy(np.ascontiguousarray(v).reshape(-1))).detach().cpu().numpy()

    if k >= n - 1:  # ARPACK needs k < n − 1; so small a matrix is written out
        H = np.stack([multiply(e) for e in np.eye(n)], axis=1)
        values, vectors = np.linalg.eigh((H + H.T) / 2)
        chosen = np.argsort(-np.abs(values))[:k]
        values, vectors = values[chosen], vectors[:, chosen]
    else:
        operator = LinearOperator((n, n), matvec=multiply, dtype=np.float64)
        start = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).numpy()
        values, vectors = eigsh(operator, k=k, which="LM", tol=tolerance, v0=start, maxiter=max_products)
    order = np.argsort(values)
    values, vectors = values[order], vectors[:, order]
    residuals = np.array([np.linalg.norm(multiply(v) - value * v) for value, v in zip(values, vectors.T, strict=True)])
    return Extremes(values, residuals, vectors, count)


def lanczos_quadrature(
    product: Product, n: int, probes: int, steps: int, generator: torch.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return nodes and weights (summing to 1) whose measure approximates the eigenvalue distribution.

    Each probe v, uniform on the sphere, gives the Gauss quadrature of its own spectral measure Σ (v·u_i)² δ(λ_i), whose
    mean over v is the distribution. Full reorthogonalisation: `steps` vectors of length n are kept.
    """
    nodes, weights = [], []
    for _ in range(probes):
        v = torch.randn(n, generator=generator, dtype=torch.float64)
        alpha, beta = lanczos(product, v, min(steps, n))
        T = torch.diag(alpha) + torch.diag(beta, 1) + torch.diag(beta, -1)
        values, vectors = torch.linalg.eigh(T)
        nodes.append(values.numpy())
        weights.append(vectors[0].square().numpy() / probes)
    return np.concatenate(nodes), np.concatenate(weights)


def lanczos(product: Product, v: Float[Tensor, " n"], steps: int) -> tuple[Float[Tensor, " m"], Float[Tensor, " _m1"]]:
    """Return the diagonal and off-diagonal of Lanczos' tridiagonal matrix; m < steps if the space is exhausted."""
    basis = [v / v.norm()]
    alpha: list[Tensor] = []
    beta: list[Tensor] = []
    for _ in range(steps):
        w = product(basis[-1]).cpu()
        alpha.append(w @ basis[-1])
        Q = torch.stack(basis)
        for _ in range(2):  # once leaves rounding errors that grow; twice is enough
            w = w - Q.T @ (Q @ w)
        size = w.norm()
        if len(alpha) == steps or size <= 1e-13 * max(float(a.abs()) for a in alpha):
            break
        beta.append(size)
        basis.append(w / size)
    return torch.stack(alpha), torch.stack(beta) if beta else v.new_zeros(0)


def smoothed_density(
    nodes: np.ndarray, weights: np.ndarray, points: int = 512, width: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return (grid, density): the weighted nodes, each a Gaussian of standard deviation `width`."""
    low, high = float(nodes.min()), float(nodes.max())
    width = (high - low) / 100 if width is None else width
    width = width if width > 0 else max(abs(high), 1.0) / 100  # one single eigenvalue
    grid = np.linspace(low - 5 * width, high + 5 * width, points)
    density = np.zeros(points)
    for chunk in range(0, len(nodes), 4096):
        z = (grid[:, None] - nodes[None, chunk : chunk + 4096]) / width
        density += np.exp(-(z**2) / 2) @ weights[chunk : chunk + 4096]
    return grid, density / (width * np.sqrt(2 * np.pi))
