"""What one token contributes to the loss Hessian: first and second derivatives around it, for a chunk of samples.

The chain of one block, row vectors throughout (n samples, L tokens, N = n L tokens in all):

    X = p̂ W_in,  T = X B Xᵀ,  A = softmax(T),  F = A X C,  R = X + F,      B = W_Q W_Kᵀ / √d_K,  C = W_V W_O
    Y = LN1(R),  U = Y W_1 + b_1,  h = U ∘ D,  S = Y + h W_2 + b_2,  Z = LN2(S),      D = 1[U > 0]

Queries and keys enter through B alone, values and output projection through C alone; so curvature is computed with
respect to B and C, and one small multiplication per block leads back to the four weights.

LayerNorm sees only what is orthogonal to 1, so ∂R and ∂S are taken in an orthonormal basis of that: the columns of Q,
d x (d − 1). That saves a share 1/d of most sums over tokens. Y, r̂ and ŝ stay in their own coordinates.

A bar is a derivative of the loss (`S_bar` = ∂loss/∂S per token), `H_SS` the second derivative with respect to S of
that token, everything behind S held fixed. `L` is the number of tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from curvature_gap.architecture import Architecture
from curvature_gap.maps import layer_norm
from curvature_gap.shapes import Float
from curvature_gap.vit import patches, tokens


@dataclass(frozen=True)
class Weights:
    """The parameters, with the products the block depends on; absent biases are None, an absent W_O is C = W_V."""

    parameters: Mapping[str, Tensor]
    architecture: Architecture

    def __getitem__(self, name: str) -> Tensor:
        return self.parameters[name]

    def get(self, name: str) -> Tensor | None:
        return self.parameters.get(name)

    @property
    def temperature(self) -> float:
        return self.architecture.head_d_K**-0.5

    @property
    def B(self) -> Float[Tensor, "d d"]:
        return self.temperature * self["W_Q"] @ self["W_K"].T

    @property
    def C(self) -> Float[Tensor, "d d"]:
        return self["W_V"] @ self["W_O"] if self.architecture.output_projection else self["W_V"]

    @property
    def Q(self) -> Float[Tensor, "d a"]:
        return orthogonal_to_ones(self["W_1"])

    @property
    def C_Q(self) -> Float[Tensor, "d a"]:
        """Return C Q: how A X moves R."""
        return self.C @ self.Q

    @property
    def W_2_Q(self) -> Float[Tensor, "f k"]:
        """Return W_2 Q: how h moves S."""
        return self["W_2"] @ self.Q

    @property
    def E(self) -> Float[Tensor, "m d"]:
        rows = [self.parameters[name] for name in ("embed", "embed_bias", "positions") if name in self.parameters]
        return torch.cat([torch.atleast_2d(row) for row in rows])

    @property
    def maps(self) -> dict[str, Tensor]:
        """What sums over tokens are multiplied by at the end, by the names that `token_sums.Side` uses."""
        return {"B": self.B.T, "C": self.C_Q, "E": self.E.T}


def orthogonal_to_ones(like: Float[Tensor, "d _"]) -> Float[Tensor, "d a"]:
    """Return an orthonormal basis of what is orthogonal to 1, as columns: the reflection of 1/√d onto the last axis."""
    d = len(like)
    identity = torch.eye(d, dtype=like.dtype, device=like.device)
    v = identity[:, -1] - d**-0.5
    return (identity - torch.outer(v, v) * (2 / (v @ v)))[:, :-1]


def with_ones(V: Float[Tensor, "... v"], append: bool) -> Float[Tensor, "... w"]:
    """Append a 1 to every vector: the input of a bias."""
    return torch.cat([V, torch.ones_like(V[..., :1])], dim=-1) if append else V


def input_features(images: Float[Tensor, "n c s s"], architecture: Architecture) -> Float[Tensor, "n L m"]:
    """Return p̂, whose product with the rows of embed, embed_bias and positions is the trainable part of X."""
    P = with_ones(patches(images, architecture.patch), architecture.bias)
    if architecture.positions != "learned":
        return P
    one_hot = torch.eye(architecture.n_tokens, dtype=P.dtype, device=P.device)
    return torch.cat([P, one_hot.expand(len(P), -1, -1)], dim=-1)


def layer_norm_core(X: Float[Tensor, "... d"], eps: float) -> tuple[Float[Tensor, "... d"], Float[Tensor, "... 1"]]:
    """Return x̂ = (X − μ)/σ and σ = sqrt(variance + ε)."""
    sigma = (X.var(dim=-1, correction=0, keepdim=True) + eps).sqrt()
    return layer_norm(X, eps=eps), sigma


def layer_norm_jacobian(x_hat: Float[Tensor, "N a"], sigma: Float[Tensor, "N 1"]) -> Float[Tensor, "N a a"]:
    """Return ∂x̂/∂X = (I − x̂ x̂ᵀ/d)/σ, symmetric, with X and x̂ in the basis Q, d − 1 numbers each. Source: T2."""
    d = x_hat.shape[-1] + 1
    identity = torch.eye(d - 1, dtype=x_hat.dtype, device=x_hat.device)
    return (identity - x_hat[..., :, None] * (x_hat / d)[..., None, :]) / sigma[..., None]


def layer_norm_second(
    w: Float[Tensor, "N a"], x_hat: Float[Tensor, "N a"], sigma: Float[Tensor, "N 1"], J: Float[Tensor, "N a a"]
) -> tuple[Float[Tensor, "N a"], Float[Tensor, "N a a"]]:
    """Return gradient and Hessian of w · x̂(X) with respect to X, all in the basis Q.

    ∇ = J w and ∇² = −(∇ x̂ᵀ + x̂ ∇ᵀ + (w·x̂) J)/(σ d), from ∂σ/∂X = x̂/d. Source: T3, contracted with a cotangent.
    """
    d = x_hat.shape[-1] + 1
    s = (w * x_hat).sum(dim=-1, keepdim=True)
    gradient = (w - x_hat * (s / d)) / sigma
    G = gradient[..., :, None] * x_hat[..., None, :]
    scale = (-1 / (d * sigma))[..., None]
    return gradient, (G + G.mT + s[..., None] * J) * scale


@dataclass(frozen=True)
class Forward:
    """Values of a chunk; (n, L, ·) for attention, (N, ·) behind it."""

    p: Float[Tensor, "n L m"]
    X: Float[Tensor, "n L d"]
    A: Float[Tensor, "n L L"]
    r_hat: Float[Tensor, "N d"]
    r_sigma: Float[Tensor, "N 1"]
    Y: Float[Tensor, "N d"]
    D: Float[Tensor, "N f"]
    h: Float[Tensor, "N f"]
    s_hat: Float[Tensor, "N d"]
    s_sigma: Float[Tensor, "N 1"]


def forward(w: Weights, images: Float[Tensor, "n c s s"]) -> Forward:
    """Run the block on a chunk and keep what the derivatives need."""
    eps = w.architecture.norm_eps
    X = tokens(w.parameters, images, w.architecture)
    A = torch.softmax(X @ w.B @ X.mT, dim=-1)
    R = (X + A @ (X @ w.C)).flatten(0, 1)
    r_hat, r_sigma = layer_norm_core(R, eps)
    Y = r_hat * w["LN1_gamma"] + w["LN1_beta"]
    U = Y @ w["W_1"]
    if w.architecture.bias:
        U = U + w["b_1"]
    D = (U > 0).to(U)
    h = U * D
    S = Y + h @ w["W_2"]
    if w.architecture.bias:
        S = S + w["b_2"]
    s_hat, s_sigma = layer_norm_core(S, eps)
    return Forward(input_features(images, w.architecture), X, A, r_hat, r_sigma, Y, D, h, s_hat, s_sigma)


@dataclass(frozen=True)
class FeedForwardCurvature:
    """Derivatives of a token from LN2 back to R, the input of LN1.

    `a` runs over R and `k` over S, both in the basis Q; `c` over Y, r̂ or ŝ.
    """

    S_bar: Float[Tensor, "N k"]
    J_S: Float[Tensor, "N k c"]
    """∂ŝ/∂S."""
    H_SS: Float[Tensor, "N k k"]
    M: Float[Tensor, "N c k"]
    """∂S/∂Y = (I + W_1 D W_2) Q."""
    U_bar: Float[Tensor, "N f"]
    Y_bar: Float[Tensor, "N c"]
    J_R: Float[Tensor, "N a c"]
    """∂r̂/∂R."""
    R_to_Y: Float[Tensor, "N a c"]
    R_to_S: Float[Tensor, "N a k"]
    H_RS: Float[Tensor, "N a k"]
    """(∂S/∂R) H_SS."""
    R_bar: Float[Tensor, "N a"]
    H_RR: Float[Tensor, "N a a"]


def feed_forward_curvature(w: Weights, t: Forward, s_hat_bar: Float[Tensor, "N k"]) -> FeedForwardCurvature:
    """Go back from a cotangent on ŝ = LN2's normalised output to R. Source: T4, T5, L1."""
    Q, W_2 = w.Q, w.W_2_Q
    r_hat, s_hat = t.r_hat @ Q, t.s_hat @ Q
    J_S = layer_norm_jacobian(s_hat, t.s_sigma)
    S_bar, H_SS = layer_norm_second(s_hat_bar @ Q, s_hat, t.s_sigma, J_S)
    # W_1 D W_2 = Σ_i D_i (column i of W_1)(row i of W_2): one matrix product for all tokens.
    rank_ones = (w["W_1"].T[:, :, None] * W_2[:, None, :]).flatten(1)
    M = (t.D @ rank_ones).view(-1, *Q.shape) + Q
    U_bar = t.D * (S_bar @ W_2.T)
    Y_bar = S_bar @ Q.T + U_bar @ w["W_1"].T
    J_R = layer_norm_jacobian(r_hat, t.r_sigma)
    R_bar, H_RR_of_LN = layer_norm_second((w["LN1_gamma"] * Y_bar) @ Q, r_hat, t.r_sigma, J_R)
    J_R = J_R @ Q.T
    R_to_Y = J_R * w["LN1_gamma"]
    R_to_S = R_to_Y @ M
    H_RS = R_to_S @ H_SS
    H_RR = torch.baddbmm(H_RR_of_LN, H_RS, R_to_S.mT)
    return FeedForwardCurvature(S_bar, J_S @ Q.T, H_SS, M, U_bar, Y_bar, J_R, R_to_Y, R_to_S, H_RS, R_bar, H_RR)


@dataclass(frozen=True)
class AttentionCurvature:
    """Moments of the keys' statistics z under one row of the attention matrix, for every token.

    With z_s = (X_s, p̂_s), `a_s = (C R_bar) · X_s` the value of key s for the loss and T_bar = A ∘ (a − Σ A a):
    `mean` = Σ A z, `tilted` = Σ T_bar z, `covariance` = Σ A x zᵀ − mean_x meanᵀ, and
    `third` = Σ T_bar z zᵀ − mean tiltedᵀ − tilted meanᵀ, the softmax's second derivative contracted.
    """

    mean: Float[Tensor, "N z"]
    tilted: Float[Tensor, "N z"]
    covariance: Float[Tensor, "N z z"]
    third: Float[Tensor, "N z z"]


def attention_curvature(w: Weights, t: Forward, R_bar: Float[Tensor, "N a"], with_inputs: bool) -> AttentionCurvature:
    """Return the moments; without `with_inputs` z is X alone. Source: L2, SM."""
    value = (R_bar.view(*t.X.shape[:2], -1) @ w.C_Q.T) @ t.X.mT
    T_bar = t.A * (value - (t.A * value).sum(dim=-1, keepdim=True))
    z = torch.cat([t.X, t.p], dim=-1) if with_inputs else t.X
    mean, tilted = t.A @ z, T_bar @ z
    one_hot = with_inputs and w.architecture.positions == "learned"
    k = z.shape[-1] - one_hot * w.architecture.n_tokens
    covariance, third = (z.new_empty(*z.shape, z.shape[-1]) for _ in range(2))
    some = (t.A, T_bar, z[..., :k], mean[..., :k], tilted[..., :k])
    covariance[..., :k, :k], third[..., :k, :k] = dense_moments(*some)
    if one_hot:
        write_one_hot_moments(covariance, third, *some)
    flat = [moment.flatten(0, 1) for moment in (mean, tilted, covariance, third)]
    return AttentionCurvature(*flat)


def dense_moments(A: Tensor, T_bar: Tensor, z: Tensor, mean: Tensor, tilted: Tensor) -> tuple[Tensor, Tensor]:
    """Return covariance and third moment of dense statistics: two matrix products per sample."""
    zz = (z[..., :, None] * z[..., None, :]).flatten(-2)
    shape = (*z.shape, z.shape[-1])
    covariance = (A @ zz).view(shape).sub_(mean[..., :, None] * mean[..., None, :])
    mixed = mean[..., :, None] * tilted[..., None, :]
    return covariance, (T_bar @ zz).view(shape).sub_(mixed).sub_(mixed.mT)


def write_one_hot_moments(
    covariance: Tensor, third: Tensor, A: Tensor, T_bar: Tensor, z: Tensor, mean: Tensor, tilted: Tensor
) -> None:
    """Write the moments of one-hot statistics e_s, the last, with z and with each other: sums with one summand."""
    k = z.shape[-1]
    centred = z[:, None] - mean[:, :, None]
    with_z = torch.mul(A[..., None], centred, out=covariance[..., k:, :k])
    covariance[..., :k, k:] = with_z.mT
    each = torch.mul(A[..., :, None], -A[..., None, :], out=covariance[..., k:, k:])
    each.diagonal(dim1=-2, dim2=-1).add_(A)
    with_z = torch.mul(T_bar[..., None], centred, out=third[..., k:, :k])
    with_z -= A[..., None] * tilted[:, :, None]
    third[..., :k, k:] = with_z.mT
    mixed = A[..., :, None] * -T_bar[..., None, :]
    each = torch.add(mixed, mixed.mT, out=third[..., k:, k:])
    each.diagonal(dim1=-2, dim2=-1).add_(T_bar)
