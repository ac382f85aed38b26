"""The exact Hessian of a model's loss on one batch: choose an engine, check what fits, compute, certify."""

import contextlib
import hashlib
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from curvature_gap.autodiff_hessian import (
    Pair,
    Progress,
    autodiff_blocks,
    block_slices,
    default_chunk,
    graph_bytes,
    hvp_double_backward,
    matrix_bytes,
    upper_pairs,
)
from curvature_gap.batch_loss import BatchLoss, Criterion, batch_loss, flatten, unflatten
from curvature_gap.certificate import Certificate, CertificateError, certify
from curvature_gap.hessian import Hessian

__all__ = ["Certificate", "CertificateError", "Hessian", "bytes_needed", "exact_hessian"]

GIB = 2**30


def exact_hessian(
    model: nn.Module,
    images: Tensor,
    targets: Tensor,
    *,
    loss: str | Criterion = "cross_entropy",
    blocks: str | Iterable[Pair] | None = None,
    engine: str = "auto",
    dtype: torch.dtype = torch.float64,
    memory_limit: int | None = None,
    certify: bool = True,
    progress: Progress | None = None,
    threads: int | None = None,
    batch_sha256: str | None = None,
) -> Hessian:
    """Return the exact Hessian of the mean loss of `model` on a batch, with respect to its trainable parameters.

    The closed form serves the post-norm one-block ViT of this package (6 s against 73 s of the automatic engine at
    P = 3,552 and 128 samples, one core); any other module goes through automatic differentiation. The result says
    which one it was.

    Args:
        model: A `ViT` or any module, float32 or float64, without active dropout. It is not changed.
        images: (b, c, s, s) for a ViT, else what the model takes; floating point, normalised as in training.
        targets: int64 labels (b,) for "cross_entropy"; floats shaped as the logits (b, classes) for "mse".
        loss: "cross_entropy" (nats, mean over the batch), "mse" (mean over batch and classes) or a callable
            (output, targets) → scalar.
        blocks: None for the whole matrix, "diagonal" for each parameter block with itself, or (row, column) pairs.
        engine: "auto", or one engine by name.
        dtype: Of the computation and the result; parameters and images are converted.
        memory_limit: Bytes this call may use; None is what the machine has free.
        certify: Check the result (`certificate.py`) and raise if a check fails; costs a few seconds.
        progress: Called with (done, total) while computing.
        threads: Torch threads during the call, restored afterwards; None keeps the present number. More threads than
            free cores make every method much slower.
        batch_sha256: Name of the batch if it has one; None hashes images and targets.

    Returns:
        A `Hessian`: symmetric, P × P, row-major within a block, in units of loss / parameter².

    Memory:
        8 P² bytes for the matrix in float64 (101 MB at P = 3,552) and the engine's work space; `bytes_needed` says how
        much before anything is allocated.

    Raises:
        TypeError: Integer images, labels that are not int64, a model in half precision, an unsupported dtype.
        ValueError: NaN in the batch, labels out of range, lengths that differ, an empty batch, active dropout, nothing
            trainable, a loss or gradient that is not finite, an unknown engine or block, or an engine that does not
            cover the model.
        MemoryError: If the result cannot fit; the message says how much is needed and what to do instead.
        CertificateError: If a check of the result fails; the message names it.

    Example:
        >>> import torch
        >>> from curvature_gap import Architecture, ViT, exact_hessian
        >>> model = ViT(Architecture(image_size=4, channels=1, patch=2, classes=3, d_V=4, d_ff=6), seed=0)
        >>> images = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(0))
        >>> H = exact_hessian(model, images, torch.tensor([0, 1, 2, 0, 1]))
        >>> H.n_parameters, tuple(H["W_Q", "classifier"].shape)
        (156, (16, 12))
        >>> bool(torch.isclose(H.eigenvalues().sum(), torch.tensor(H.trace(), dtype=torch.float64)))
        True
    """
    with _threads(threads):
        problem = batch_loss(model, images, targets, loss=loss, dtype=dtype)
        names = list(problem.parameters)
        pairs = _pairs(blocks, names)
        chosen = choose_engine(engine, problem, model)
        _check_memory(problem, pairs, chosen, memory_limit)
        hessian, asymmetry = _compute(problem, pairs, chosen, whole=blocks is None, progress=progress)
        hessian.batch_sha256 = batch_sha256 or hash_batch(images, targets)
        if certify and pairs:
            reference = problem if dtype == torch.float64 else batch_loss(model, images, targets, loss=loss)
            hessian.certificate = _certified(hessian, reference, asymmetry)
    return hessian


def bytes_needed(
    problem: BatchLoss, pairs: Iterable[Pair] | None = None, engine: str = "autodiff", itemsize: int = 8
) -> int:
    """Return the bytes that the blocks asked for and the engine's work space take, before computing them.

    The graph of the automatic engine is measured on one sample and scaled to the batch.
    """
    sizes = {name: p.numel() for name, p in problem.parameters.items()}
    blocks = (
        matrix_bytes([p.shape for p in problem.parameters.values()], itemsize)
        if pairs is None
        else sum(sizes[row] * sizes[column] for row, column in pairs) * itemsize
    )
    if engine == "closed_form":
        return blocks + closed_form_bytes(problem, blocks, itemsize)
    return blocks + _graph_bytes(problem, itemsize)


def available_bytes(device: torch.device) -> int:
    """Return the memory free on a device: the driver's number on a GPU, else the least of machine and container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        free.append(int(fields["MemAvailable"].split()[0]) * 1024)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        free.append(int(text) - int(used.read_text()))
    if not free:  # neither Linux file exists, as on macOS: half of what is installed
        free.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    return max(0, min(free))


def hash_batch(images: Tensor, targets: Tensor) -> str:
    """Return the SHA-256 of a batch: dtype, shape and bytes of images and targets."""
    digest = hashlib.sha256()
    for t in (images, targets):
        digest.update(f"{t.dtype}{tuple(t.shape)}".encode())
        digest.update(t.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _pairs(blocks: str | Iterable[Pair] | None, names: list[str]) -> list[Pair]:
    """Return the pairs asked for, each in upper order, without repetitions."""
    if blocks is None:
        return upper_pairs(names)
    if isinstance(blocks, str):
        if blocks != "diagonal":
            raise ValueError(f'blocks must be None, "diagonal" or a list of (row, column) names, got {blocks!r}.')
        return [(name, name) for name in names]
    place = {name: i for i, name in enumerate(names)}
    pairs = []
    for pair in blocks:
        for name in pair:
            if name not in place:
                raise ValueError(f"No trainable block is called {name!r}; there are {', '.join(names)}.")
        row, column = sorted(pair, key=place.__getitem__)
        pairs.append((row, column))
    return list(dict.fromkeys(pairs))


def choose_engine(engine: str, problem: BatchLoss, model: nn.Module) -> str:
    """Return "closed_form" or "autodiff". Raises ValueError for an unknown engine or one that cannot do this model."""
    if engine not in ("auto", "closed_form", "autodiff"):
        raise ValueError(f"engine must be auto, closed_form or autodiff, got {engine!r}.")
    if engine == "autodiff":
        return engine
    covered = closed_form_covers(problem)
    if engine == "closed_form" and not covered:
        raise ValueError(
            f"The closed form does not cover {type(model).__name__} with loss {problem.loss}: it is for the one-block "
            'post-norm ReLU ViT with cross_entropy or mse, all parameters trainable. Use engine="auto".'
        )
    return "closed_form" if covered else "autodiff"


def closed_form_covers(problem: BatchLoss) -> bool:
    """Return whether the closed form computes this loss: its architecture, its loss, nothing held fixed."""
    if problem.architecture is None or problem.loss not in ("cross_entropy", "mse"):
        return False
    from curvature_gap import closed_form

    return problem.n_parameters == problem.architecture.n_parameters and closed_form.covers(
        problem.architecture, problem.loss
    )


def _graph_bytes(problem: BatchLoss, itemsize: int) -> int:
    b = len(problem.images)
    one = graph_bytes(problem.samples(0, 1), problem.parameters)
    # The parameters are in the graph once, whatever the batch.
    constant = problem.n_parameters * itemsize
    graph = max(one - constant, 0) * b + constant
    return graph * (1 + default_chunk(graph, problem.images.device.type))


def closed_form_bytes(problem: BatchLoss, blocks: int, itemsize: int) -> int:
    """Return the closed form's work space: sums as large as the blocks, the logits' Jacobian, one chunk of tokens.

    Fitted from above to measured peaks (P = 3,552 with 8 … 512 samples, P = 13,248 with 16): 10 to 30 % more.
    """
    assert problem.architecture is not None
    a = problem.architecture
    jacobian = 1.5 * len(problem.images) * a.classes * problem.n_parameters * itemsize
    tokens = 2**23 * itemsize * max(1.0, a.d_V / 16) * max(1.0, a.d_ff / 64)
    return int(blocks + jacobian + tokens)


def _check_memory(problem: BatchLoss, pairs: list[Pair], engine: str, limit: int | None) -> None:
    itemsize = problem.images.element_size()
    whole = len(pairs) == len(upper_pairs(list(problem.parameters)))
    needed = bytes_needed(problem, None if whole else pairs, engine, itemsize)
    available = available_bytes(problem.images.device) if limit is None else limit
    if needed > available:
        raise MemoryError(
            f"{'The whole Hessian' if whole else f'{len(pairs)} blocks'} of P = {problem.n_parameters:,} parameters on "
            f"{len(problem.images)} samples need {needed / GIB:.2f} GiB with the {engine} engine, and "
            f'{available / GIB:.2f} GiB are available. Compute blocks="diagonal" or chosen pairs, cut the matrix into '
            "tiles (curvature_gap.tiles), use a smaller batch, or take extreme eigenvalues by Lanczos "
            "(curvature_gap.lanczos)."
        )


def _compute(
    problem: BatchLoss, pairs: list[Pair], engine: str, *, whole: bool, progress: Progress | None
) -> tuple[Hessian, float]:
    parameters = problem.parameters
    sizes = {name: p.numel() for name, p in parameters.items()}
    theta = flatten(parameters)
    H = theta.new_zeros(len(theta), len(theta)) if whole else None
    out = None
    if H is not None:
        where = block_slices(sizes)
        out = {(row, column): H[where[row], where[column]] for row, column in pairs}
    found = engine_blocks(problem, pairs, engine, progress=progress, out=out) if pairs else {}
    asymmetry = _symmetrise(found)
    if H is not None:
        _mirror(H)
    value, gradient = problem.value_and_gradient()
    hessian = Hessian(
        names=tuple(parameters),
        shapes=tuple((p.shape[0] if p.ndim else 1, prod(p.shape[1:])) for p in parameters.values()),
        loss=float(value),
        grad_norm=float(torch.linalg.vector_norm(flatten(gradient))),
        batch_sha256="",
        engine=engine,
        loss_name=problem.loss,
        H=H,
        blocks={} if H is not None else found,
        operator=_operator(problem),
    )
    return hessian, asymmetry


def engine_blocks(
    problem: BatchLoss,
    pairs: list[Pair],
    engine: str,
    *,
    rows: dict[Pair, slice] | None = None,
    progress: Progress | None = None,
    out: dict[Pair, Tensor] | None = None,
) -> dict[Pair, Tensor]:
    """Return blocks of the upper triangle by one engine, written into `out` where it has them."""
    if engine == "autodiff":
        return autodiff_blocks(problem, problem.parameters, pairs, rows=rows, progress=progress, out=out)
    from curvature_gap.closed_form import closed_form_blocks

    assert problem.architecture is not None
    return closed_form_blocks(
        problem.parameters,
        problem.images,
        problem.targets,
        problem.architecture,
        loss=problem.loss,
        pairs=pairs,
        rows=rows,
        out=None if out is None else lambda row, column: out[row, column],
    )


def _symmetrise(blocks: dict[Pair, Tensor]) -> float:
    """Make diagonal blocks symmetric in place; return max |B − Bᵀ| before, over max |H|."""
    worst = scale = 0.0
    for (row, column), block in blocks.items():
        scale = max(scale, float(block.abs().max()))
        if row == column:
            difference = block - block.T
            worst = max(worst, float(difference.abs().max()))
            block.sub_(difference, alpha=0.5)
            # Rounding of the halves may differ; the upper one decides.
            block.copy_(block.triu() + block.triu(1).T)
    return worst / scale if scale else worst


def _mirror(H: Tensor, stripe: int = 1024) -> None:
    """Copy the upper triangle onto the lower one, in stripes: no second matrix is held."""
    for start in range(0, len(H), stripe):
        stop = min(start + stripe, len(H))
        square = H[start:stop, start:stop]
        square.copy_(square.triu() + square.triu(1).T)
        H[stop:, start:stop] = H[start:stop, stop:].T


def _operator(problem: BatchLoss) -> Callable[[Tensor], Tensor]:
    def multiply(v: Tensor) -> Tensor:
        tangent = unflatten(v.to(problem.images), problem.parameters)
        return flatten(hvp_double_backward(problem, problem.parameters, tangent))

    return multiply


def _certified(hessian: Hessian, reference: BatchLoss, asymmetry: float) -> Certificate:
    certificate = certify(hessian.held(), reference, engine=hessian.engine, asymmetry=asymmetry)
    certificate.check()
    return certificate


class _CallableModule(types.ModuleType):
    # `from curvature_gap import exact_hessian` finds this module once it is imported: let it be called as the function.
    __call__ = staticmethod(exact_hessian)


sys.modules[__name__].__class__ = _CallableModule


@contextlib.contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
