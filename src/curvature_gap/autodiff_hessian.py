"""The Hessian of any loss of named parameters by automatic differentiation: the oracle, and the general engine.

Rows of the Hessian are gradients of the gradient's entries, taken on one retained graph (reverse over reverse). Blocks
are computed in the upper triangle of the parameters' order: then the backward pass of a late layer's row stops at that
layer instead of running down to the input, which saves about a third over computing whole rows.

`torch.func.hessian`, `jacrev(jacrev)` and `jvp(jacrev)` are not used: in torch 2.14.1 they are silently wrong through
`layer_norm` with a learned weight. Where rows are batched with vmap, a row of each block is compared with the unbatched
one first, and a difference turns batching off.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from curvature_gap.batch_loss import as_leaves
from curvature_gap.shapes import Float

Loss = Callable[[Mapping[str, Tensor]], Tensor]
Pair = tuple[str, str]
Progress = Callable[[int, int], None]

MAX_CHUNK = 64
# Rows are batched while the copies of the graph stay near the caches; on a GPU launches, not caches, decide.
CHUNK_BYTES = {"cpu": 2**24, "cuda": 2**31}
SAME = 1e-6


def upper_pairs(names: Sequence[str]) -> list[Pair]:
    """Return all pairs (row, column) of blocks with the row not after the column, in order."""
    return [(row, column) for i, row in enumerate(names) for column in names[i:]]


def autodiff_hessian(
    loss: Loss,
    parameters: Mapping[str, Tensor],
    *,
    symmetric: bool = True,
    chunk: int | None = None,
    progress: Progress | None = None,
) -> Float[Tensor, "P P"]:
    """Return the whole Hessian of a loss, rows and columns in the order of `parameters`, row-major within a block.

    Args:
        loss: Maps named parameters to a scalar.
        parameters: Where to differentiate. The dtype and device of the result are theirs.
        symmetric: Compute one half and mirror it; False computes both halves, so that symmetry can be tested.
        chunk: Rows differentiated at once; None chooses by the size of the graph.
        progress: Called with (rows done, rows in all).

    Raises:
        ValueError: If the loss is not a scalar.
    """
    names = list(parameters)
    pairs = upper_pairs(names) if symmetric else [(row, column) for row in names for column in names]
    blocks = autodiff_blocks(loss, parameters, pairs, chunk=chunk, progress=progress)
    return assemble(blocks, {name: p.numel() for name, p in parameters.items()}, mirror=symmetric)


def assemble(blocks: Mapping[Pair, Tensor], sizes: Mapping[str, int], *, mirror: bool) -> Float[Tensor, "P P"]:
    """Return the matrix made of blocks; with `mirror`, blocks below the diagonal are the transposes of those above."""
    first = next(iter(blocks.values()))
    H = first.new_zeros(sum(sizes.values()), sum(sizes.values()))
    where = block_slices(sizes)
    for (row, column), block in blocks.items():
        H[where[row], where[column]] = block
        if mirror and row != column:
            H[where[column], where[row]] = block.T
    return H


def block_slices(sizes: Mapping[str, int]) -> dict[str, slice]:
    """Return each block's rows in the whole matrix."""
    slices, start = {}, 0
    for name, size in sizes.items():
        slices[name] = slice(start, start + size)
        start += size
    return slices


def autodiff_blocks(
    loss: Loss,
    parameters: Mapping[str, Tensor],
    pairs: Iterable[Pair] | None = None,
    *,
    rows: Mapping[Pair, slice] | None = None,
    chunk: int | None = None,
    progress: Progress | None = None,
    out: Mapping[Pair, Tensor] | None = None,
) -> dict[Pair, Float[Tensor, "_rows _columns"]]:
    """Return chosen blocks ∂²loss/∂row ∂columnᵀ of the Hessian.

    Args:
        loss: Maps named parameters to a scalar.
        parameters: Where to differentiate, in network order.
        pairs: (row, column) names; None is the upper triangle. Each pair is computed as asked, never transposed.
        rows: For a pair, the range of its rows to compute; all by default. Pairs with one row block share the range.
        chunk: Rows differentiated at once; None chooses by the size of the graph.
        progress: Called with (rows done, rows in all).
        out: Tensors to write blocks into (views of a larger matrix, say); absent pairs are allocated.

    Memory: the blocks, the graph of one gradient, and `chunk` copies of its intermediate results.

    Raises:
        ValueError: If the loss is not a scalar or a pair names no parameter.
    """
    wanted = _by_row(parameters, upper_pairs(list(parameters)) if pairs is None else pairs, rows or {})
    gradient, leaves = gradient_graph(loss, parameters, {row for row, _ in wanted})
    if chunk is None:
        chunk = default_chunk(graph_bytes(loss, parameters), next(iter(parameters.values())).device.type)
    if chunk > 1 and not _batching_is_right(gradient, leaves, wanted):
        chunk = 1
    total = sum(stop - start for _, (start, stop) in wanted)
    blocks: dict[Pair, Tensor] = {}
    done = 0
    for (row, (start, stop)), columns in wanted.items():
        targets = [_target(out, (row, column), stop - start, leaves[column]) for column in columns]
        for first in range(start, stop, chunk):
            last = min(first + chunk, stop)
            parts = _rows(gradient[row], [leaves[column] for column in columns], first, last)
            for target, part in zip(targets, parts, strict=True):
                target[first - start : last - start] = part
            done += last - first
            if progress is not None:
                progress(done, total)
        blocks |= {(row, column): target for column, target in zip(columns, targets, strict=True)}
    return blocks


def _by_row(
    parameters: Mapping[str, Tensor], pairs: Iterable[Pair], rows: Mapping[Pair, slice]
) -> dict[tuple[str, tuple[int, int]], list[str]]:
    """Group pairs by (row block, range of rows): these share their backward passes."""
    wanted: dict[tuple[str, tuple[int, int]], list[str]] = {}
    for row, column in pairs:
        for name in (row, column):
            if name not in parameters:
                raise ValueError(f"No parameter is called {name!r}; there are {', '.join(parameters)}.")
        start, stop, _ = rows.get((row, column), slice(None)).indices(parameters[row].numel())
        wanted.setdefault((row, (start, stop)), []).append(column)
    return wanted


def gradient_graph(
    loss: Loss, parameters: Mapping[str, Tensor], names: Iterable[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradient in the named blocks, as vectors that can be differentiated again, and the leaves."""
    leaves = as_leaves(parameters)
    value = loss(leaves)
    if value.ndim:
        raise ValueError(f"The loss must be a scalar; it has shape {tuple(value.shape)}.")
    chosen = [name for name in leaves if name in set(names)]
    gradient = torch.autograd.grad(
        value, [leaves[name] for name in chosen], create_graph=True, allow_unused=True, materialize_grads=True
    )
    return {name: g.reshape(-1) for name, g in zip(chosen, gradient, strict=True)}, leaves


def _rows(g: Float[Tensor, " n"], inputs: list[Tensor], first: int, last: int) -> list[Float[Tensor, "_rows _columns"]]:
    """Return ∂g[first:last]/∂input for each input; one row needs no vmap."""
    count = last - first
    if not g.requires_grad:  # linear in everything
        return [x.new_zeros(count, x.numel()) for x in inputs]
    if count == 1:
        found = torch.autograd.grad(g[first], inputs, retain_graph=True, allow_unused=True)
    else:
        selectors = torch.eye(count, dtype=g.dtype, device=g.device)
        found = torch.autograd.grad(
            g[first:last], inputs, selectors, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
    return [
        x.new_zeros(count, x.numel()) if f is None else f.reshape(count, -1) for x, f in zip(inputs, found, strict=True)
    ]


def _batching_is_right(
    gradient: Mapping[str, Tensor],
    leaves: Mapping[str, Tensor],
    wanted: Mapping[tuple[str, tuple[int, int]], list[str]],
) -> bool:
    """Compare two rows of each block with and without vmap, whose rules for fused kernels are not all right."""
    for (row, (start, stop)), columns in wanted.items():
        first = (start + stop) // 2
        if stop - first < 2:
            continue
        inputs = [leaves[column] for column in columns]
        try:
            batched = _rows(gradient[row], inputs, first, first + 2)
        except RuntimeError:  # an operation without a batching rule
            return False
        single = [_rows(gradient[row], inputs, i, i + 1) for i in (first, first + 1)]
        for both, one, two in zip(batched, *single, strict=True):
            apart = torch.cat([one, two])
            if (both - apart).abs().max() > SAME * apart.abs().max():
                return False
    return True


def _target(out: Mapping[Pair, Tensor] | None, pair: Pair, n_rows: int, column: Tensor) -> Tensor:
    shape = (n_rows, column.numel())
    if out is None or pair not in out:
        return column.new_zeros(shape)
    if out[pair].shape != shape:
        raise ValueError(f"out for {pair} has shape {tuple(out[pair].shape)}; the block needs {shape}.")
    return out[pair]


def hvp_double_backward(loss: Loss, parameters: Mapping[str, Tensor], v: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return H v as the gradient of ⟨gradient, v⟩: reverse over reverse. `v` may hold some blocks only."""
    gradient, leaves = gradient_graph(loss, parameters, v)
    return product_on_graph(gradient, leaves, v, retain=False)


def product_on_graph(
    gradient: Mapping[str, Tensor], leaves: Mapping[str, Tensor], v: Mapping[str, Tensor], *, retain: bool = True
) -> dict[str, Tensor]:
    """Return H v, in the blocks of `leaves`, from a graph that `gradient_graph` built."""
    curved = [name for name, g in gradient.items() if g.requires_grad]
    if not curved:  # the loss is linear
        return {name: torch.zeros_like(p) for name, p in leaves.items()}
    found = torch.autograd.grad(
        [gradient[name] for name in curved],
        list(leaves.values()),
        [v[name].reshape(-1) for name in curved],
        retain_graph=retain,
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(leaves, found, strict=True))


def hvp_forward_over_reverse(
    loss: Loss, parameters: Mapping[str, Tensor], v: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return H v as the derivative of the gradient along v: forward over reverse. `v` may hold some blocks only."""
    tangent = {name: v.get(name, torch.zeros_like(p)).reshape(p.shape) for name, p in parameters.items()}
    return torch.func.jvp(torch.func.grad(loss), (dict(parameters),), (tangent,))[1]


def graph_bytes(loss: Loss, parameters: Mapping[str, Tensor]) -> int:
    """Return the bytes that the graph of the gradient keeps, measured by building it once."""
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        graph = gradient_graph(loss, parameters, list(parameters))
    del graph
    return sum(kept.values())


def default_chunk(bytes_of_graph: int, device: str) -> int:
    """Return how many rows to differentiate at once, given the bytes of the gradient's graph."""
    return max(1, min(MAX_CHUNK, CHUNK_BYTES.get(device, 2**24) // max(1, bytes_of_graph)))


def matrix_bytes(shapes: Iterable[tuple[int, ...]], itemsize: int) -> int:
    """Return the bytes of the whole Hessian of parameters with these shapes."""
    return sum(prod(shape) for shape in shapes) ** 2 * itemsize
