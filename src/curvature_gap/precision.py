"""The closed forms against automatic differentiation: relative error in float32 and float64, and time (THESIS-1).

Both sides are evaluated in the same dtype, so the error is what a user of either sees, not a distance to the truth.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import nan
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from curvature_gap import maps
from curvature_gap.matrix_calculus import autodiff_hessian, autodiff_jacobian
from curvature_gap.theory.block import WEIGHTS, block_hessian, block_jacobian
from curvature_gap.theory.feed_forward import feed_forward_jacobian
from curvature_gap.theory.layer_norm import layer_norm_hessian, layer_norm_jacobian

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class PrecisionRow:
    """One line of `precision.csv`. `published` is the thesis's float32 value; NaN for float64."""

    component: str
    dtype: str
    max_rel_error: float
    published: float


@dataclass(frozen=True)
class TimingRow:
    """One line of `precision_timing.csv`: medians, in seconds.

    `autograd_seconds` is reverse-mode autograd, one backward pass an output (at order 2, one an output and entry of the
    first weight), `ratio` that over the closed form; `vectorised_seconds` is by batched `torch.func`, the faster way.
    """

    component: str
    dtype: str
    outputs: int
    closed_form_seconds: float
    autograd_seconds: float
    ratio: float
    vectorised_seconds: float
    vectorised_ratio: float


@dataclass(frozen=True)
class Component:
    """A derivative, in closed form and by automatic differentiation: arguments, function of them, order 1 or 2."""

    closed_form: Callable[[], Tensor]
    function: Callable[..., Tensor]
    arguments: tuple[Tensor, ...]
    order: int

    def vectorised(self) -> Tensor:
        """Return the derivative by `torch.func`."""
        oracle = autodiff_jacobian if self.order == 1 else autodiff_hessian
        return oracle(self.function, *self.arguments)

    def one_by_one(self) -> Tensor:
        """Return the derivative by reverse-mode autograd: a backward pass an output, at order 2 an entry of W_i."""
        jacobian = torch.autograd.functional.jacobian
        if self.order == 1:
            return jacobian(self.function, self.arguments[0]).reshape(-1, self.arguments[0].numel())
        W_i, W_j = self.arguments if len(self.arguments) == 2 else (self.arguments[0], None)

        def gradient(w: Tensor, output: int) -> Tensor:
            w_i = w if W_j is None else W_i.detach().requires_grad_()
            value = self.function(w_i) if W_j is None else self.function(w_i, w)
            return torch.autograd.grad(value.reshape(-1)[output], w_i, create_graph=True)[0]

        last = W_i if W_j is None else W_j
        outputs = self.function(*self.arguments).numel()
        slices = [jacobian(partial(gradient, output=o), last).reshape(-1, last.numel()) for o in range(outputs)]
        return torch.cat(slices)


Components = Mapping[str, Sequence[Component]]


@dataclass(frozen=True)
class RandomBlock:
    """A block's input and weights, normal with variance 1 / rows, drawn in float64 and rounded to the dtype."""

    X: Tensor
    weights: Mapping[str, Tensor]

    @classmethod
    def draw(cls, sizes: tuple[int, int, int, int], dtype: torch.dtype, seed: int) -> "RandomBlock":
        """Draw a block of sizes (L, d_V, d_K, d_ff)."""
        L, d_V, d_K, d_ff = sizes
        generator = torch.Generator().manual_seed(seed)

        def randn(m: int, n: int) -> Tensor:
            return torch.randn(m, n, generator=generator, dtype=torch.float64).to(dtype) / m**0.5

        X = randn(L, d_V)
        weights = {"W_Q": randn(d_V, d_K), "W_K": randn(d_V, d_K), "W_V": randn(d_V, d_V)}
        return cls(X, weights | {"W_1": randn(d_V, d_ff), "W_2": randn(d_ff, d_V)})

    def feed_forward(self, name: str) -> Component:
        """Return the feed-forward layer's Jacobian in "Y", "W_1" or "W_2"."""
        arguments = {"Y": self.X, "W_1": self.weights["W_1"], "W_2": self.weights["W_2"]}
        return Component(
            lambda: feed_forward_jacobian(self.X, self.weights["W_1"], self.weights["W_2"], name),
            lambda w: maps.feed_forward(**{**arguments, name: w}),
            (arguments[name],),
            1,
        )

    def layer_norm(self, order: int) -> Component:
        """Return LayerNorm's Jacobian or Hessian."""
        closed_form = layer_norm_jacobian if order == 1 else layer_norm_hessian
        return Component(lambda: closed_form(self.X), maps.layer_norm, (self.X,), order)

    def jacobian(self, name: str) -> Component:
        """Return the block's Jacobian in a weight."""
        return Component(
            lambda: block_jacobian(self.X, self.weights, name),
            lambda w: maps.block(self.X, {**self.weights, name: w}),
            (self.weights[name],),
            1,
        )

    def hessian(self, i: str, j: str) -> Component:
        """Return the block's second derivative in two weights."""
        w = self.weights
        if i == j:
            function: Callable[..., Tensor] = lambda v: maps.block(self.X, {**w, i: v})  # noqa: E731
        else:
            function = lambda v, u: maps.block(self.X, {**w, i: v, j: u})  # noqa: E731
        arguments = (w[i],) if i == j else (w[i], w[j])
        return Component(lambda: block_hessian(self.X, w, i, j), function, arguments, 2)


PUBLISHED = {
    "FFN Jacobian": 1e-15,
    "LN Jacobian": 8.3e-8,
    "LN Hessian": 1.5e-7,
    "block Jacobian": 1.5e-7,
    "block Hessian": 1.6e-7,
}
"""The thesis's relative errors in float32; the first is an upper bound. Source: THESIS-1."""


def all_components(block: RandomBlock) -> Components:
    """Return the five components in full: FFN in Y, W_1, W_2; the block in all five weights and all 25 pairs."""
    return {
        "FFN Jacobian": [block.feed_forward(name) for name in ("Y", "W_1", "W_2")],
        "LN Jacobian": [block.layer_norm(1)],
        "LN Hessian": [block.layer_norm(2)],
        "block Jacobian": [block.jacobian(name) for name in WEIGHTS],
        "block Hessian": [block.hessian(i, j) for i in WEIGHTS for j in WEIGHTS],
    }


def timed_components(block: RandomBlock) -> dict[str, Component]:
    """Return one derivative of each component: FFN in Y, the block in W_Q, and in (W_Q, W_K)."""
    return {
        "FFN Jacobian": block.feed_forward("Y"),
        "LN Jacobian": block.layer_norm(1),
        "LN Hessian": block.layer_norm(2),
        "block Jacobian": block.jacobian("W_Q"),
        "block Hessian": block.hessian("W_Q", "W_K"),
    }


def precision_table(sizes: tuple[int, int, int, int] = (3, 5, 2, 7), seeds: int = 3) -> list[PrecisionRow]:
    """Return each component's largest error, relative to its largest entry, over a few random blocks.

    Args:
        sizes: (L, d_V, d_K, d_ff).
        seeds: Number of blocks.

    Source: THESIS-1.
    """
    rows = []
    for dtype_name, dtype in DTYPES.items():
        drawn = [all_components(RandomBlock.draw(sizes, dtype, seed)) for seed in range(seeds)]
        for component, published in PUBLISHED.items():
            error = max(_relative_error(parts[component]) for parts in drawn)
            rows.append(PrecisionRow(component, dtype_name, error, published if dtype_name == "float32" else nan))
    return rows


def precision_timing(sizes: tuple[int, int, int, int] = (8, 16, 2, 32), repetitions: int = 5) -> list[TimingRow]:
    """Time every component three ways in one run on the CPU, at L · d_V outputs (128, as in the thesis).

    The slow one-by-one Hessians are timed once.

    Args:
        sizes: (L, d_V, d_K, d_ff).
        repetitions: Calls whose median counts.

    Source: THESIS-1.
    """
    rows = []
    outputs = sizes[0] * sizes[1]
    for dtype_name, dtype in DTYPES.items():
        for name, component in timed_components(RandomBlock.draw(sizes, dtype, seed=0)).items():
            closed_form = _seconds(component.closed_form, repetitions)
            autograd = _seconds(component.one_by_one, repetitions if component.order == 1 else 1)
            vectorised = _seconds(component.vectorised, repetitions)
            ratios = autograd / closed_form, vectorised / closed_form
            rows.append(TimingRow(name, dtype_name, outputs, closed_form, autograd, ratios[0], vectorised, ratios[1]))
    return rows


def _relative_error(parts: Sequence[Component]) -> float:
    pairs = [(part.closed_form(), part.vectorised()) for part in parts]
    largest = max(reference.abs().max().item() for _, reference in pairs)
    return max((value - reference).abs().max().item() for value, reference in pairs) / largest


def _seconds(function: Callable[[], Tensor], repetitions: int) -> float:
    if repetitions > 1:
        function()  # the first call pays for imports and caches
    times = []
    for _ in range(repetitions):
        start = perf_counter()
        function()
        times.append(perf_counter() - start)
    return median(times)
