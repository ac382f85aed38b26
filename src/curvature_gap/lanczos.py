"""Spectra without matrices: Lanczos on exact Hessian–vector products, with residuals as error bars.

Eigenvalues come from scipy's implicitly restarted Lanczos (`eigsh`); the density from stochastic Lanczos quadrature.
For a symmetric H and a unit vector v, an eigenvalue lies within ‖H v − λ v‖ of λ: that residual is the error bar.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from curvature_gap.autodiff_hessian import Pair, gradient_graph, graph_bytes, product_on_graph
from curvature_gap.batch_loss import BatchLoss, Criterion, batch_loss, flatten, unflatten
from curvature_gap.shapes import Float

Product = Callable[[Tensor], Tensor]
KEPT_GRAPHS = 2**31
PER_SAMPLE_BYTES = 2**30
MAX_SAMPLES = 64


def hessian_product(
    problem: BatchLoss, pair: Pair | None = None, *, samples: int = 8, keep_bytes: int = KEPT_GRAPHS
) -> Product:
    """Return v ↦ H v, or v ↦ B v for the block B of a pair (row, column), exact, a few samples at a time.

    Args:
        problem: A loss that is a mean over samples, in float64.
        pair: A block; only its columns enter and only its rows are computed.
        samples: In one chunk of the batch; bounds the memory.
        keep_bytes: The graphs of the gradient are kept between products if they need no more than this; then a product
            costs about 2 gradients, else 3 to 4.
    """
    row, column = pair if pair is not None else (None, None)
    into = {name: p for name, p in problem.parameters.items() if column in (None, name)}
    n = len(problem.images)
    starts = range(0, n, samples)
    keep = graph_bytes(problem.samples(0, 1), problem.parameters) * n <= keep_bytes

    def graph(start: int) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
        part = problem.samples(start, min(start + samples, n))
        gradient, leaves = gradient_graph(part, problem.parameters, into)
        return gradient, {name: x for name, x in leaves.items() if row in (None, name)}, len(part.images) / n

    kept = [graph(start) for start in starts] if keep else []

    def product(v: Tensor) -> Tensor:
        tangent = unflatten(v.to(problem.images), into)
        total: Tensor | None = None
        for gradient, leaves, weight in kept or map(graph, starts):
            part = weight * flatten(product_on_graph(gradient, leaves, tangent, retain=keep))
            total = part if total is None else total + part
        assert total is not None
        return total

    return product


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


@dataclass(frozen=True)
class BlockNorm:
    """A block's spectral norm, and how far it may be off."""

    norm: float
    residual: float
    n_products: int


def block_spectral_norm(
    problem: BatchLoss, pair: Pair, *, tolerance: float = 1e-6, seed: int = 0, samples: int = 8
) -> BlockNorm:
    """Return the largest singular value of one block of the Hessian, without forming the block.

    A diagonal block is symmetric: Lanczos on B. Another one goes through Bᵀ B, whose eigenvalue σ² with residual r
    gives σ within r / σ.

    Args:
        problem: A loss that is a mean over samples, in float64.
        pair: (row, column) names.
        tolerance: Relative accuracy of the eigenvalue.
        seed: Of the starting vector.
        samples: In one chunk of the batch.
    """
    row, column = pair
    B = hessian_product(problem, pair, samples=samples)
    n = problem.parameters[column].numel()
    if row == column:
        found = extreme_eigenvalues(B, n, 1, tolerance=tolerance, seed=seed)
        return BlockNorm(abs(float(found.values[0])), float(found.residuals[0]), found.n_products)
    transposed = hessian_product(problem, (column, row), samples=samples)
    found = extreme_eigenvalues(lambda v: transposed(B(v)), n, 1, tolerance=tolerance, seed=seed)
    sigma = max(float(found.values[0]), 0.0) ** 0.5
    residual = float(found.residuals[0])
    return BlockNorm(sigma, residual / sigma if sigma else residual**0.5, 2 * found.n_products)


def per_sample_hessian_norms(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    iterations: int = 30,
    generator: torch.Generator | None = None,
    *,
    loss: str | Criterion = "cross_entropy",
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-6,
    memory: int = PER_SAMPLE_BYTES,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Return ‖∇²l_i‖₂ of each sample's loss, and residuals ‖∇²l_i u_i − λ_i u_i‖ that bound the errors.

    One Lanczos run per sample, all samples of a chunk at once: a product costs about twice a batch gradient.

    Args:
        model: As for `exact_hessian`.
        images: (n, ...) floating point.
        labels: (n,), or what the loss takes.
        iterations: Lanczos steps per sample at most.
        generator: Of the starting vectors, on the CPU, one draw per sample in order; None is seed 0.
        loss: As for `exact_hessian`.
        dtype: Of the computation.
        tolerance: A chunk stops early when every residual is below this times its norm.
        memory: Bytes for the Lanczos vectors of one chunk; decides its size (n_samples · iterations · P numbers).

    Raises:
        ValueError, TypeError: For a bad batch or model, as `batch_loss`; for iterations below 1.
    """
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}.")
    problem = batch_loss(model, images, labels, loss=loss, dtype=dtype)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    one = problem.n_parameters * problem.images.element_size() * (iterations + 8)
    size = max(1, min(MAX_SAMPLES, memory // one))
    norms, residuals = [], []
    for start in range(0, len(images), size):
        part = problem.samples(start, start + size)
        draws = [torch.randn(problem.n_parameters, generator=generator, dtype=dtype) for _ in part.images]
        product = per_sample_product(part)
        found = _largest_magnitude(product, torch.stack(draws).to(part.images.device), iterations, tolerance)
        norms.append(found[0])
        residuals.append(found[1])
    return torch.cat(norms), torch.cat(residuals)


def per_sample_product(problem: BatchLoss) -> Callable[[Float[Tensor, "n P"]], Float[Tensor, "n P"]]:
    """Return V ↦ (∇²l_i V_i)_i, one Hessian per sample, on one retained graph.

    Every sample gets its own copy of the parameters (as an expanded view): then the gradient of Σ l_i holds the
    gradients of all samples side by side.
    """
    n = len(problem.images)
    own = {name: p.expand(n, *p.shape) for name, p in problem.parameters.items()}

    def sample_loss(parameters: Mapping[str, Tensor], image: Tensor, target: Tensor) -> Tensor:
        return problem.criterion(problem.forward(parameters, image[None]), target[None])

    def total(parameters: Mapping[str, Tensor]) -> Tensor:
        return torch.func.vmap(sample_loss)(dict(parameters), problem.images, problem.targets).sum()

    gradient, leaves = gradient_graph(total, own, own)

    def product(V: Tensor) -> Tensor:
        parts = V.split([p.numel() for p in problem.parameters.values()], dim=1)
        found = product_on_graph(gradient, leaves, dict(zip(own, parts, strict=True)))
        return torch.cat([part.reshape(n, -1) for part in found.values()], dim=1)

    return product


def _largest_magnitude(
    product: Callable[[Tensor], Tensor], V: Float[Tensor, "n P"], steps: int, tolerance: float
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Return each Hessian's |eigenvalue| of largest magnitude and its residual, by Lanczos on all at once."""
    n, P = V.shape
    steps = min(steps, P)
    Q = V.new_zeros(steps, n, P)
    alpha, beta = V.new_zeros(n, steps), V.new_zeros(n, steps)
    largest, weights = V.new_zeros(n), V.new_zeros(n, steps)
    running = torch.ones(n, dtype=torch.bool, device=V.device)
    q = V / V.norm(dim=1, keepdim=True)
    for k in range(steps):
        Q[k] = q
        w = product(q)
        alpha[:, k] = (w * q).sum(dim=1)
        basis = Q[: k + 1]
        w = w - torch.einsum("kn,knp->np", torch.einsum("knp,np->kn", basis, w), basis)
        beta[:, k] = w.norm(dim=1)
        # Where the space is exhausted w is rounding error; a zero vector keeps that sample's Ritz values.
        exhausted = beta[:, k] <= 1e-12 * alpha[:, : k + 1].abs().amax(dim=1)
        beta[exhausted, k] = 0
        q = torch.where(exhausted[:, None], torch.zeros_like(w), w / beta[:, k, None].clamp(min=1e-300))
        theta, s = _ritz(alpha[:, : k + 1], beta[:, :k])
        # A sample that has converged keeps its pair, so that its result does not depend on the others in its chunk.
        largest[running], weights[running, : k + 1] = theta[running], s[running]
        running &= beta[:, k] * s[:, -1].abs() > tolerance * theta.abs()
        if not running.any():
            break
    u = torch.einsum("nk,knp->np", weights, Q)
    return largest.abs(), (product(u) - largest[:, None] * u).norm(dim=1)


def _ritz(
    alpha: Float[Tensor, "n m"], beta: Float[Tensor, "n _m1"]
) -> tuple[Float[Tensor, " n"], Float[Tensor, "n m"]]:
    """Return the eigenvalue of largest magnitude of each tridiagonal matrix, and its unit vector."""
    T = torch.diag_embed(alpha) + torch.diag_embed(beta, 1) + torch.diag_embed(beta, -1)
    values, vectors = torch.linalg.eigh(T)
    largest = values.abs().argmax(dim=1)
    each = torch.arange(len(T), device=T.device)
    return values[each, largest], vectors[each, :, largest]


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
