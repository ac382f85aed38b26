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
from curvature_gap.theory.attention_bound import (
    OutputNorms,
    attention_norm_bounds,
    attention_statistics,
    attention_terms,
    check_shapes,
    right_factors,
    token_norms,
)
from curvature_gap.theory.kronecker_sum import KroneckerHessian, KroneckerSum, Pair, top_norm


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


def feed_forward_slope(W_1: Tensor, W_2: Tensor) -> Tensor:
    """Bound ‖I + W_2ᵀ D W_1ᵀ‖ for every 0–1 diagonal D: D = (I + Σ)/2 with Σ = ±1, so only half of W_1 W_2 moves."""
    identity = torch.eye(W_1.shape[-2], dtype=W_1.dtype, device=W_1.device)
    product = top_norm(W_1) * top_norm(W_2)
    return torch.minimum(1 + product, top_norm(identity + W_1 @ W_2 / 2) + product / 2)


def block_apriori_bounds(
    X: Float[Tensor, "*b L d_V"], weights: Mapping[str, Tensor], target: Float[Tensor, "*b L d_V"]
) -> dict[Pair, Tensor]:
    """Return a priori bounds on the blocks of `block_hessian`, from norms alone; `norm_of_norms` gives the total.

    Besides the norms of attention's bound it takes the two rows of LayerNorm deviations σ_Y, σ_Z, as L3 does. With
    T_i the centred target row, d = d_V, u = ‖I + W_2ᵀDW_1ᵀ‖ (`feed_forward_slope`): |G_i| ≤ c |T_i|/σ_Z,
    ‖N_i‖ ≤ ν_i = 2 c |T_i|/(√(3d) σ_Z²) (on span(z, T_i) the curvature is a 2 x 2 matrix of norm
    |T|(cos + √(cos² + 4 sin²))/(2√d σ²)), likewise ‖Λ_i‖ ≤ 2 u |G_i|/(√(3d) σ_Y²), so e_i = u² ν_i/σ_Y² + ‖Λ_i‖ and
    |p_i| ≤ u |G_i|/σ_Y. |y_i| = √d; ‖diag(r) Y‖ also by Y = diag(1/σ_Y)(X + F) without row means; h by Y's.

    Source: T6, L3.
    """
    W_Q, W_K, W_V, W_1, W_2 = (weights[name] for name in ("W_Q", "W_K", "W_V", "W_1", "W_2"))
    check_shapes(X, W_Q, W_K, W_V, target)
    L, d_V = X.shape[-2:]
    tau = W_K.shape[-1] ** -0.5
    rows_1 = norm_rows(X + attention(X, W_Q, W_K, W_V))
    Y = rows_1.normalised
    sigma_Y, sigma_Z = rows_1.sigma, norm_rows(Y + (Y @ W_1).relu() @ W_2).sigma
    n = token_norms(X, W_Q, W_K, W_V)
    k, v = n.k[..., None], n.v[..., None]
    w_1, w_2, u = top_norm(W_1)[..., None], top_norm(W_2)[..., None], feed_forward_slope(W_1, W_2)[..., None]
    T = 2 / (L * d_V) * (target - target.mean(dim=-1, keepdim=True)).norm(dim=-1)
    bend = 2 / (3 * d_V) ** 0.5
    G = T / sigma_Z
    nu = bend * T / sigma_Z.square()
    e = u.square() * nu / sigma_Y.square() + bend * u * G / sigma_Y.square()
    p = u * G / sigma_Y

    def weighted_Y(r: Tensor) -> Tensor:
        scaled = r / sigma_Y
        by_input = n.weighted_X(scaled) + n.v * n.weighted_mu(scaled)
        return torch.minimum(d_V**0.5 * r.norm(dim=-1), by_input)

    def weighted_h(r: Tensor) -> Tensor:
        by_rows = w_1[..., 0] * d_V**0.5 * r.norm(dim=-1)
        return torch.minimum(by_rows, weighted_Y(r) * W_1.flatten(-2).norm(dim=-1))

    p_all = p.norm(dim=-1)
    slope = (n.reach_V[..., None] + v * n.shift) * p
    bounds = attention_norm_bounds(n, OutputNorms(e, p, p_all, n.x * p_all, slope), W_K.shape[-1])
    through = u * nu / sigma_Y
    into = {
        "W_V": (n.weighted_mu, torch.ones_like(T)),
        "W_Q": (n.weighted_X, tau * k * v * n.gamma),
        "W_K": (n.weighted_Z, tau * v * n.gamma),
    }
    for name, (right, size) in into.items():
        first, second = (through * size).sqrt(), (size / sigma_Y).sqrt()
        straight = (second * G).norm(dim=-1) * right(second)
        bounds[name, "W_1"] = w_2[..., 0] * (weighted_Y(first) * right(first) + straight)
        bounds[name, "W_2"] = weighted_h(first) * right(first) + w_1[..., 0] * straight
    root = nu.sqrt()
    mixed = torch.minimum(weighted_Y(G.sqrt()) * G.sum(-1).sqrt(), weighted_Y(torch.ones_like(G)) * G.norm(dim=-1))
    bounds["W_1", "W_1"] = (w_2[..., 0] * weighted_Y(root)).square()
    bounds["W_1", "W_2"] = w_2[..., 0] * weighted_Y(root) * weighted_h(root) + mixed
    bounds["W_2", "W_2"] = weighted_h(root).square()
    return bounds
