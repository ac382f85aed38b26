"""Instances for the adversarial search: random ones at many scales, and the structures where bounds break."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from math import log
from typing import Any, TypeVar

import torch
from torch import Tensor

from curvature_gap.theory.exact_norms import (
    AttentionDerivatives,
    BlockDerivatives,
    Inputs,
    attention_loss_hessian,
    block_loss_hessian,
    spectral_norm,
    unfolding_norm,
)
from curvature_gap.theory.printed_bounds import Norms, norms_of

T = TypeVar("T")


@dataclass(frozen=True)
class Sizes:
    """Tokens and widths of one instance. Raises ValueError if one is not positive."""

    L: int
    d_V: int
    d_K: int
    d_ff: int = 1

    def __post_init__(self) -> None:
        for name in ("L", "d_V", "d_K", "d_ff"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")

    def shapes(self) -> dict[str, tuple[int, int]]:
        return {
            "X": (self.L, self.d_V),
            "W_Q": (self.d_V, self.d_K),
            "W_K": (self.d_V, self.d_K),
            "W_V": (self.d_V, self.d_V),
            "W_1": (self.d_V, self.d_ff),
            "W_2": (self.d_ff, self.d_V),
            "residual": (self.L, self.d_V),
        }


class Instances:
    """A batch of inputs with the quantities that several bounds share, each computed when first asked for.

    `residual` is F − Target for the attention layer and Z − Target for the block, so that a zero residual is exact.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.X = inputs["X"]
        self.L, self.d_V = self.X.shape[-2:]
        self._kept: dict[Hashable, Any] = {}

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return what `compute` gives, computed by the first who asks for this key."""
        if key not in self._kept:
            self._kept[key] = compute()
        return self._kept[key]

    @cached_property
    def attention(self) -> AttentionDerivatives:
        return self.block.attention if "W_1" in self.inputs else AttentionDerivatives(self.inputs)

    @cached_property
    def block(self) -> BlockDerivatives:
        return BlockDerivatives(self.inputs)

    @cached_property
    def norms(self) -> Norms:
        """The spectral norms; the target is the attention layer's, F − residual."""
        target = self.attention.F - self.inputs["residual"] if "residual" in self.inputs else None
        return norms_of(self.inputs, target)

    @cached_property
    def attention_loss_hessian(self) -> Tensor:
        return attention_loss_hessian(self.attention, self.inputs["residual"])

    @cached_property
    def block_loss_hessian(self) -> Tensor:
        return block_loss_hessian(self.block, self.inputs["residual"])

    def jacobian_norm(self, k: str) -> Tensor:
        """‖G_k‖ = ‖∂F/∂W_k‖."""
        return self.once(("G", k), lambda: unfolding_norm(self.attention.G[k]))

    def second_norm(self, k: str, m: str) -> Tensor:
        """‖Φ_km‖ = ‖∂²F/∂W_k∂W_m‖."""
        return self.once(("Phi", k, m), lambda: unfolding_norm(self.attention.Phi(k, m)))

    def sum_jacobian_norm(self, i: str) -> Tensor:
        """‖B_i‖ = ‖∂S/∂W_i‖."""
        return self.once(("B", i), lambda: unfolding_norm(self.block.B[i]))

    def sum_second_norm(self, i: str, j: str) -> Tensor:
        """‖ξ_ij‖ = ‖∂²S/∂W_i∂W_j‖."""
        return self.once(("xi", i, j), lambda: unfolding_norm(self.block.xi(i, j)))

    def output_second_norm(self, i: str, j: str) -> Tensor:
        """‖∂²Z/∂W_i∂W_j‖."""
        return self.once(("H", i, j), lambda: unfolding_norm(self.block.output_hessian(i, j)))

    def row_norm(self, name: str) -> Tensor:
        """‖J_Y‖, ‖J_SY‖, ‖J_Z‖, ‖H_Y‖ or ‖H_Z‖: the largest norm of a row's block."""
        blocks = getattr(self.block, name)
        return self.once(name, lambda: spectral_norm(blocks.flatten(-3, -2) if name[0] == "H" else blocks).amax(dim=-1))

    @cached_property
    def residual_rank(self) -> Tensor:
        """rank(F − Target), counted at double precision; it has no gradient."""
        return torch.linalg.matrix_rank(self.inputs["residual"].detach()).to(self.X.dtype)


Draw = dict[str, Tensor]


def _log_uniform(b: int, low: float, high: float, generator: torch.Generator) -> Tensor:
    """Return b factors 10^u, u uniform in [low, high], shaped for a batch of matrices."""
    exponent = low + (high - low) * torch.rand(b, 1, 1, generator=generator, dtype=torch.float64)
    return 10**exponent


def _plain(draw: Draw, generator: torch.Generator) -> None:
    """Leave the random scales as they are."""


def _unit_scale(draw: Draw, generator: torch.Generator) -> None:
    """All tensors standard normal."""
    for name, tensor in draw.items():
        draw[name] = tensor / tensor.square().mean(dim=(-2, -1), keepdim=True).sqrt()


def _zero_queries(draw: Draw, generator: torch.Generator) -> None:
    """W_Q = 0: uniform attention."""
    draw["W_Q"] = torch.zeros_like(draw["W_Q"])


def _zero_keys(draw: Draw, generator: torch.Generator) -> None:
    """W_K = 0, W_Q large and no residual: uniform attention at a global minimum."""
    draw["W_K"], draw["W_Q"] = torch.zeros_like(draw["W_K"]), 100 * draw["W_Q"]
    draw["residual"] = torch.zeros_like(draw["residual"])


def _zero_values(draw: Draw, generator: torch.Generator) -> None:
    draw["W_V"] = torch.zeros_like(draw["W_V"])


def _tiny_feed_forward(draw: Draw, generator: torch.Generator) -> None:
    """W_2 nearly zero: the block is almost the identity around the feed-forward layer."""
    draw["W_2"] = 1e-6 * draw["W_2"]


def _zero_residual(draw: Draw, generator: torch.Generator) -> None:
    """The target is met: a global minimum, where A1 holds."""
    draw["residual"] = torch.zeros_like(draw["residual"])


def _large_residual(draw: Draw, generator: torch.Generator) -> None:
    draw["residual"] = 1e4 * draw["residual"]


def _rank_one(draw: Draw, generator: torch.Generator) -> None:
    """Rank-one weights and residual."""
    for name in draw:
        if name != "X":
            draw[name] = draw[name][:, :, :1] * draw[name][:, :1, :]


def _near_constant_rows(draw: Draw, generator: torch.Generator) -> None:
    """Rows of X whose variance is small beside their mean."""
    draw["X"] = 1 + 1e-3 * draw["X"]


def _collinear_tokens(draw: Draw, generator: torch.Generator) -> None:
    draw["X"] = draw["X"][:, :, :1] * draw["X"][:, :1, :]


def _identical_tokens(draw: Draw, generator: torch.Generator) -> None:
    """Equal up to a thousandth; exactly equal tokens leave only rounding in the covariances."""
    draw["X"] = draw["X"][:, :1, :] + 1e-3 * draw["X"]


def _antipodal_tokens(draw: Draw, generator: torch.Generator) -> None:
    """Tokens ±x, alternating."""
    sign = 1 - 2 * (torch.arange(draw["X"].shape[1]) % 2).to(torch.float64)
    draw["X"] = sign[:, None] * draw["X"][:, :1, :]


def _saturated_softmax(draw: Draw, generator: torch.Generator) -> None:
    """Logits so large that each row attends to one token."""
    draw["W_Q"], draw["W_K"] = 30 * draw["W_Q"], 30 * draw["W_K"]


def _pair(draw: Draw, generator: torch.Generator, tilt: float) -> None:
    """Two opposite tokens attend to each other alone, with odds e^tilt; weights align with what they make large.

    Tokens ±e_1 share a small last feature that carries their logits, 40 above all others. The rest of W_K or W_Q points
    along e_1, is larger and does not enter the logits; W_V is a multiple of I.
    """
    X = torch.zeros_like(draw["X"])
    b, L, d_V = X.shape
    if L < 2 or d_V < 2:
        return
    d_K, feature, logit = draw["W_Q"].shape[-1], 0.05, 40.0
    X += 1e-4 * draw["X"] / draw["X"].abs().amax(dim=(-2, -1), keepdim=True)
    X[:, 0, 0], X[:, 1, 0] = 1.0, -1.0
    X[:, 0, -1], X[:, 1, -1] = feature * (1 + tilt / logit), feature
    gain = (logit / feature**2 * d_K**0.5) ** 0.5
    W_Q, W_K = torch.zeros_like(draw["W_Q"]), torch.zeros_like(draw["W_K"])
    W_Q[:, -1, 0] = W_K[:, -1, 0] = gain
    if d_K > 1:
        on_keys = torch.arange(b) % 2 == 0
        W_K[:, 0, 1] = torch.where(on_keys, 10 * gain, 0.0)
        W_Q[:, 0, 1] = torch.where(on_keys, 0.0, 10 * gain)
    residual = torch.zeros_like(X)
    residual[:, 0, 0], residual[:, 1, 0] = 1.0, -1.0
    eye = torch.eye(d_V, dtype=torch.float64)
    draw |= {
        "X": X,
        "W_Q": W_Q,
        "W_K": W_K,
        "W_V": eye * _log_uniform(b, -6.0, 1.0, generator),
        "residual": residual * _log_uniform(b, -6.0, 6.0, generator),
    }


def _tied_pair(draw: Draw, generator: torch.Generator) -> None:
    """Even odds: the supremum of the softmax Jacobian."""
    _pair(draw, generator, tilt=0.0)


def _skewed_pair(draw: Draw, generator: torch.Generator) -> None:
    """Odds with a_1 a_2 = 1/6: the supremum of the softmax second derivative."""
    _pair(draw, generator, tilt=log((3 + 3**0.5) / (3 - 3**0.5)))


def _tied_pair_no_residual(draw: Draw, generator: torch.Generator) -> None:
    """The worst softmax at a global minimum."""
    _pair(draw, generator, tilt=0.0)
    draw["residual"] = torch.zeros_like(draw["residual"])


def _tied_pair_no_values(draw: Draw, generator: torch.Generator) -> None:
    """W_V = 0 and a large target: what is left of the attention Hessian is its functional V–Q part."""
    _pair(draw, generator, tilt=0.0)
    draw["W_V"], draw["residual"] = torch.zeros_like(draw["W_V"]), 1e8 * draw["residual"]


def _one_extreme_scale(draw: Draw, generator: torch.Generator) -> None:
    """One tensor far larger or smaller than the others."""
    names = list(draw)
    name = names[int(torch.randint(len(names), (1,), generator=generator))]
    draw[name] = draw[name] * _log_uniform(draw[name].shape[0], -5.0, 5.0, generator)


# The structures that break bounds come first, so that a small search meets them too.
STRUCTURES: tuple[Callable[[Draw, torch.Generator], None], ...] = (
    _tied_pair,
    _tied_pair_no_residual,
    _tied_pair_no_values,
    _skewed_pair,
    _zero_keys,
    _tiny_feed_forward,
    _unit_scale,
    _zero_residual,
    _near_constant_rows,
    _plain,
    _large_residual,
    _zero_values,
    _antipodal_tokens,
    _saturated_softmax,
    _one_extreme_scale,
    _zero_queries,
    _rank_one,
    _collinear_tokens,
    _identical_tokens,
)


def draw_instances(sizes: Sizes, n: int, generator: torch.Generator) -> Draw:
    """Return n instances in float64: about a third random at scales 10^±1.5, the rest spread over `STRUCTURES`.

    Raises:
        ValueError: If n is not positive.
    """
    if n < 1:
        raise ValueError(f"Ask for at least one instance; got {n}.")
    draw = {
        name: torch.randn(n, *shape, generator=generator, dtype=torch.float64) * _log_uniform(n, -1.5, 1.5, generator)
        for name, shape in sizes.shapes().items()
    }
    kinds = torch.arange(n) % (len(STRUCTURES) + len(STRUCTURES) // 2)
    for kind, structure in enumerate(STRUCTURES):
        chosen = (kinds == kind).nonzero().flatten()
        if len(chosen):
            part = {name: tensor[chosen] for name, tensor in draw.items()}
            structure(part, generator)
            for name, tensor in part.items():
                draw[name][chosen] = tensor
    return draw
