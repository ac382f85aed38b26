"""The forward maps, pure, once. Every other file differentiates, trains or bounds these.

All maps act on the last two axes (tokens, features) and broadcast over leading batch axes. They are written with
elementary operations: fused kernels (`scaled_dot_product_attention`, `layer_norm` with a learned weight) have second
derivatives that are missing or, in torch 2.14.1 under `torch.func.hessian`, wrong.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from curvature_gap.shapes import Float, Int

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "tanh": torch.tanh,
}


def softmax(T: Float[Tensor, "... L M"]) -> Float[Tensor, "... L M"]:
    """Row-wise softmax."""
    return torch.softmax(T, dim=-1)


def layer_norm(
    X: Float[Tensor, "... d"], gamma: Tensor | None = None, beta: Tensor | None = None, eps: float = 0.0
) -> Float[Tensor, "... d"]:
    """Return γ (X − μ)/sqrt(σ² + ε) + β per row, σ² the biased variance over the last axis.

    Source: notation; A2 asks σ² > 0 when ε = 0.
    """
    M = X - X.mean(dim=-1, keepdim=True)
    normalised = M * (M.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    if gamma is not None:
        normalised = normalised * gamma
    return normalised if beta is None else normalised + beta


def attention_matrix(
    X: Float[Tensor, "... L d_V"], W_Q: Tensor, W_K: Tensor, heads: int = 1, causal: bool = False
) -> Float[Tensor, "... h L L"]:
    """Return A = softmax(X W_Q W_Kᵀ Xᵀ / sqrt(d_K)) for each head; d_K is the width of one head."""
    L, d_K = X.shape[-2], W_Q.shape[-1] // heads
    Q = (X @ W_Q).unflatten(-1, (heads, d_K)).transpose(-2, -3)
    K = (X @ W_K).unflatten(-1, (heads, d_K)).transpose(-2, -3)
    T = Q @ K.transpose(-1, -2) / d_K**0.5
    if causal:
        future = torch.ones(L, L, dtype=torch.bool, device=X.device).triu(1)
        T = T.masked_fill(future, float("-inf"))
    return softmax(T)


def attention(
    X: Float[Tensor, "... L d_V"],
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    W_O: Tensor | None = None,
    heads: int = 1,
    causal: bool = False,
) -> Float[Tensor, "... L d_V"]:
    """Return F = A X W_V, times W_O if there is one. Head j uses columns j of W_Q, W_K and W_V. Source: notation."""
    A = attention_matrix(X, W_Q, W_K, heads, causal)
    V = (X @ W_V).unflatten(-1, (heads, -1)).transpose(-2, -3)
    F = (A @ V).transpose(-2, -3).flatten(-2)
    return F if W_O is None else F @ W_O


def feed_forward(
    Y: Float[Tensor, "... d_V"],
    W_1: Tensor,
    W_2: Tensor,
    b_1: Tensor | None = None,
    b_2: Tensor | None = None,
    activation: str = "relu",
) -> Float[Tensor, "... d_V"]:
    """Return σ(Y W_1 + b_1) W_2 + b_2. Source: notation."""
    U = Y @ W_1 if b_1 is None else Y @ W_1 + b_1
    out = ACTIVATIONS[activation](U) @ W_2
    return out if b_2 is None else out + b_2


def block(
    X: Float[Tensor, "... L d_V"],
    weights: Mapping[str, Tensor],
    *,
    norm: str = "post",
    heads: int = 1,
    causal: bool = False,
    activation: str = "relu",
    eps: float = 0.0,
) -> Float[Tensor, "... L d_V"]:
    """Return the transformer block's output Z.

    Post-norm, as in the paper: Y = LN1(X + F(X)), Z = LN2(Y + FFN(Y)). Pre-norm: Y = X + F(LN1(X)),
    Z = Y + FFN(LN2(Y)). `weights` holds W_Q, W_K, W_V, W_1, W_2 and, where used, W_O, b_1, b_2, LN1_gamma,
    LN1_beta, LN2_gamma, LN2_beta; an absent scale is 1, an absent shift 0.

    Source: notation, FIG-2.
    """

    def norm_1(x: Tensor) -> Tensor:
        return layer_norm(x, weights.get("LN1_gamma"), weights.get("LN1_beta"), eps)

    def norm_2(x: Tensor) -> Tensor:
        return layer_norm(x, weights.get("LN2_gamma"), weights.get("LN2_beta"), eps)

    def attend(x: Tensor) -> Tensor:
        return attention(x, weights["W_Q"], weights["W_K"], weights["W_V"], weights.get("W_O"), heads, causal)

    def feed(y: Tensor) -> Tensor:
        return feed_forward(y, weights["W_1"], weights["W_2"], weights.get("b_1"), weights.get("b_2"), activation)

    if norm == "pre":
        Y = X + attend(norm_1(X))
        return Y + feed(norm_2(Y))
    Y = norm_1(X + attend(X))
    return norm_2(Y + feed(Y))


def mse(output: Float[Tensor, "... L d_V"], target: Float[Tensor, "... L d_V"]) -> Float[Tensor, ""]:
    """Return ‖output − target‖_F² / (L d_V), averaged over leading batch axes. Source: notation."""
    return (output - target).square().mean()


def cross_entropy(logits: Float[Tensor, "b c"], labels: Int[Tensor, " b"]) -> Float[Tensor, ""]:
    """Return the mean cross-entropy of the batch."""
    return torch.nn.functional.cross_entropy(logits, labels)
