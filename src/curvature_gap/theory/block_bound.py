"""Valid, tight bounds on the loss Hessian of the transformer block in (W_Q, W_K, W_V, W_1, W_2), in place of T6.

Y = LN1(X + F(X)), S = Y + σ(Y W_1) W_2, Z = LN2(S), loss ‖Z − Target‖_F²/(L d_V). Rows of a LayerNorm without scale,
shift and ε have constant length, so the loss is a constant minus c ⟨Z, Target⟩, c = 2/(L d_V): no Gauss–Newton part
remains. With scale and shift the curvature at Z stays, and the same formulas hold.

Source: T5, T6, GN2.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from curvature_gap.maps import attention
from curvature_gap.shapes import Float
from curvature_gap.theory.attention_bound import attention_statistics, attention_terms, check_shapes, right_factors
from curvature_gap.theory.kronecker_sum import KroneckerHessian, KroneckerSum, Pair


@dataclass(frozen=True)
class NormRows:
    """LayerNorm's rows: normalised tokens x̂ (scale and shift not applied) and deviations σ."""

    normalised: Float[Tensor, "*b L d"]
    sigma: Float[Tensor, "*b L"]

    @property
    def jacobian(self) -> Float[Tensor, "*b L d d"]:
        """∂x̂_i/∂x_i = (I − 11ᵀ/d − x̂ x̂ᵀ/d)/σ_i. Source: T2."""
        x = self.normalised
        d = x.shape[-1]
        C = torch.eye(d, dtype=x.dtype, device=x.device) - 1 / d
        return (C - x[..., :, None] * x[..., None, :] / d) / self.sigma[..., None, None]

    def curvature(self, w: Float[Tensor, "*b L d"]) -> Float[Tensor, "*b L d d"]:
        """Return ∂²(w_i·x̂_i)/∂x_i² = −(∇ x̂ᵀ + x̂ ∇ᵀ + (w·x̂) J)/(σ d) with J the Jacobian and ∇ = J w. Source: T3."""
        x, J = self.normalised, self.jacobian
        d = x.shape[-1]
        slope = (J @ w[..., None]) * x[..., None, :]
        along = (w * x).sum(-1)[..., None, None]
        return -(slope + slope.mT + along * J) / (self.sigma[..., None, None] * d)


def norm_rows(X: Float[Tensor, "*b L d"], eps: float = 0.0) -> NormRows:
    """Return the normalised rows and deviations sqrt(σ² + ε).

    Raises:
        ValueError: If a row is constant and eps is zero; LN has no derivative there.

    Source: A2.
    """
    M = X - X.mean(dim=-1, keepdim=True)
    if eps == 0 and (M == 0).all(dim=-1).any():
        raise ValueError("A LayerNorm input has a constant row; LayerNorm needs eps > 0 there.")
    sigma = (M.square().mean(dim=-1) + eps).sqrt()
    return NormRows(M / sigma[..., None], sigma)


@dataclass(frozen=True)
class FeedForward:
    """One pass through S = Y + h W_2, h = σ(Y W_1): activations h, slopes D = σ'(Y W_1), bends σ''(Y W_1)."""

    h: Float[Tensor, "*b L d_ff"]
    D: Float[Tensor, "*b L d_ff"]


def relu_pass(Y: Float[Tensor, "*b L d_V"], W_1: Tensor) -> FeedForward:
    """Return ReLU's activations and slopes; σ'' = 0 almost everywhere. Source: L1."""
    U = Y @ W_1
    return FeedForward(U.relu(), (U > 0).to(Y.dtype))


def feed_forward_terms(
    Y: Tensor, ff: FeedForward, W_1: Tensor, W_2: Tensor, N: Tensor, G: Tensor
) -> dict[Pair, tuple[KroneckerSum, ...]]:
    """Return the Hessian of Σ φ_i(S_i) in (W_1, W_2), with G_i = ∇φ_i and N_i = ∇²φ_i at S_i.

    S_i moves by W_2ᵀ D_i dW_1ᵀ y_i and dW_2ᵀ h_i; the mixed second derivative dW_2ᵀ D_i dW_1ᵀ y_i meets G_i.

    Source: T5.
    """
    J_h = ff.D[..., None] * W_2[..., None, :, :]
    mixed = KroneckerSum(Y, G, ff.D, False, True, diagonal=True)
    return {
        ("W_1", "W_1"): (KroneckerSum(Y, Y, J_h @ N @ J_h.mT),),
        ("W_1", "W_2"): (KroneckerSum(Y, ff.h, J_h @ N), mixed),
        ("W_2", "W_2"): (KroneckerSum(ff.h, ff.h, N),),
    }


def block_terms(
    X: Tensor, weights: Mapping[str, Tensor], Y: Tensor, rows_1: NormRows, N: Tensor, G: Tensor
) -> dict[Pair, tuple[KroneckerSum, ...]]:
    """Return the Hessian of Σ φ_i(S_i) in the five weights, LN1 without scale and shift.

    With M = I + W_2ᵀ D W_1ᵀ the derivative of S in Y, J_Y that of Y in X + F and R = M J_Y: F sees the gradient
    p = Rᵀ G and the curvature E = Rᵀ N R + Λ, Λ the second derivative of LN1 against Mᵀ G. Attention's terms follow
    from (E, p); the pairs across are products of first derivatives through N, and the second derivatives
    g ⊗ J_Y (W_1, g = D W_2 G) and G ⊗ D W_1ᵀ J_Y (W_2) times ∂F/∂W.

    Source: T5.
    """
    W_Q, W_K, W_V, W_1, W_2 = (weights[name] for name in ("W_Q", "W_K", "W_V", "W_1", "W_2"))
    ff = relu_pass(Y, W_1)
    J_h = ff.D[..., None] * W_2[..., None, :, :]
    identity = torch.eye(Y.shape[-1], dtype=Y.dtype, device=Y.device)
    M = identity + J_h.mT @ W_1.mT[..., None, :, :]
    J_Y = rows_1.jacobian
    R = M @ J_Y
    q = (M.mT @ G[..., None])[..., 0]
    p = (J_Y @ q[..., None])[..., 0]
    E = R.mT @ N @ R + rows_1.curvature(q)
    terms = attention_terms(X, W_Q, W_K, W_V, E, p) | feed_forward_terms(Y, ff, W_1, W_2, N, G)
    g = (J_h @ G[..., None])[..., 0]
    bend = ff.D[..., None] * (W_1.mT[..., None, :, :] @ J_Y)
    for name, (vector, matrix, swap) in right_factors(X, W_K, W_V, attention_statistics(X, W_Q, W_K)).items():
        through = R @ matrix
        terms[name, "W_1"] = (
            KroneckerSum(vector, Y, (J_h @ N @ through).mT, swap, False),
            KroneckerSum(vector, g, (J_Y @ matrix).mT, swap, True),
        )
        terms[name, "W_2"] = (
            KroneckerSum(vector, ff.h, (N @ through).mT, swap, False),
            KroneckerSum(vector, G, (bend @ matrix).mT, swap, True),
        )
    return terms


def block_hessian(
    X: Float[Tensor, "*b L d_V"], weights: Mapping[str, Tensor], target: Float[Tensor, "*b L d_V"]
) -> KroneckerHessian:
    """Return the Hessian of ‖Z − Target‖_F²/(L d_V) in (W_Q, W_K, W_V, W_1, W_2) in Kronecker sums (ReLU, no ε).

    ‖Z_i‖² = d_V whatever the weights, so φ_i(S_i) = const − c Target_i·Z_i: the target takes the residual's place and
    there is no outer-product part.

    Raises:
        ValueError: If a shape does not fit or a LayerNorm input has a constant row.

    Source: T5, T6.
    """
    W_Q, W_K, W_V, W_1, W_2 = (weights[name] for name in ("W_Q", "W_K", "W_V", "W_1", "W_2"))
    check_shapes(X, W_Q, W_K, W_V, target)
    L, d_V = X.shape[-2:]
    if W_1.shape[-2] != d_V or tuple(W_2.shape[-2:]) != (W_1.shape[-1], d_V):
        raise ValueError(
            f"W_1 {tuple(W_1.shape[-2:])} and W_2 {tuple(W_2.shape[-2:])} must be ({d_V}, d_ff) and (d_ff, {d_V})."
        )
    rows_1 = norm_rows(X + attention(X, W_Q, W_K, W_V))
    Y = rows_1.normalised
    rows_2 = norm_rows(Y + (Y @ W_1).relu() @ W_2)
    w = -2 / (L * d_V) * target
    G = (rows_2.jacobian @ w[..., None])[..., 0]
    terms = block_terms(X, weights, Y, rows_1, rows_2.curvature(w), G)
    order = ("W_Q", "W_K", "W_V", "W_1", "W_2")
    shapes = {name: (weights[name].shape[-2], weights[name].shape[-1]) for name in order}
    return KroneckerHessian(shapes, terms)
