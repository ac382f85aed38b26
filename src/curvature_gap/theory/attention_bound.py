"""Valid, tight bounds on the loss Hessian of one self-attention layer in (W_Q, W_K, W_V), in place of T1.

The Hessian of Σ_i φ_i(F_i), F = A X W_V, needs per token only the gradient p_i = ∇φ_i and the curvature E_i = ∇²φ_i at
F_i; for the mean-squared error E_i = c I and p_i = c (F − Target)_i with c = 2/(L d_V). The block adds its own p, E.

Source: T1, OP, FN.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from curvature_gap.maps import attention_matrix
from curvature_gap.shapes import Float
from curvature_gap.theory.kronecker_sum import (
    KroneckerHessian,
    KroneckerSum,
    Pair,
)


@dataclass(frozen=True)
class Statistics:
    """What one attention row a_i knows about the tokens: mu_i = Σ_l a_il x_l, C_i = Cov_{a_i}(x), z_i = W_Qᵀ x_i."""

    A: Float[Tensor, "*b L L"]
    mu: Float[Tensor, "*b L d_V"]
    C: Float[Tensor, "*b L d_V d_V"]
    z: Float[Tensor, "*b L d_K"]


def attention_statistics(X: Float[Tensor, "*b L d_V"], W_Q: Tensor, W_K: Tensor) -> Statistics:
    """Return mean and covariance of the tokens under each attention row."""
    A = attention_matrix(X, W_Q, W_K).squeeze(-3)
    mu = A @ X
    second = torch.einsum("...il,...lc,...le->...ice", A, X, X)
    return Statistics(A, mu, second - mu[..., :, None] * mu[..., None, :], X @ W_Q)


def right_factors(X: Tensor, W_K: Tensor, W_V: Tensor, s: Statistics) -> dict[str, tuple[Tensor, Tensor, bool]]:
    """Return vector, matrix and swap of ∂F_i/∂W for each weight: F_i moves by (matrix)(dWᵀ vector).

    With τ = 1/√d_K: W_V by dW_Vᵀ mu_i; W_Q by τ W_Vᵀ C_i W_K dW_Qᵀ x_i; W_K by τ W_Vᵀ C_i dW_K z_i (swapped).

    Source: G.
    """
    tau = W_K.shape[-1] ** -0.5
    VC = tau * W_V.mT[..., None, :, :] @ s.C
    identity = torch.eye(W_V.shape[-1], dtype=X.dtype, device=X.device).expand(*VC.shape[:-2], -1, -1)
    return {
        "W_V": (s.mu, identity, False),
        "W_Q": (X, VC @ W_K[..., None, :, :], False),
        "W_K": (s.z, VC, True),
    }


def attention_terms(
    X: Float[Tensor, "*b L d_V"], W_Q: Tensor, W_K: Tensor, W_V: Tensor, E: Tensor, p: Tensor
) -> dict[Pair, tuple[KroneckerSum, ...]]:
    """Return the exact Hessian of Σ_i φ_i(F_i) in Kronecker sums, pairs in the order W_Q, W_K, W_V.

    Derivation. F_i = W_Vᵀ mu(s_i), mu the mean of the tokens under softmax(X s_i), s_i = τ W_K W_Qᵀ x_i. Along a
    direction, D mu = C_i ds and D² mu = M3_i(ds, ds) + C_i d²s, with M3_i the third central moment. Gauss–Newton and
    third moment meet in one matrix, S_i = C_i W_V E_i W_Vᵀ C_i + M3_i[W_V p_i]:
    QQ τ² x xᵀ ⊗ W_Kᵀ S W_K; KK and QK the same with z for x and no W_K; QK besides τ x B_iᵀ ⊗ I, B_i = C_i W_V p_i,
    from d²s = 2τ dW_K dW_Qᵀ x; VQ, VK the product of the first derivatives, besides p_i ⊗ τ C_i from dW_Vᵀ D mu.
    """
    s = attention_statistics(X, W_Q, W_K)
    tau = W_K.shape[-1] ** -0.5
    K, V = W_K[..., None, :, :], W_V[..., None, :, :]
    v = p @ W_V.mT
    B = torch.einsum("...ice,...ie->...ic", s.C, v)
    weight = s.A * (v @ X.mT - (s.mu * v).sum(-1, keepdim=True))
    cross = B[..., :, None] * s.mu[..., None, :]
    M3 = torch.einsum("...il,...lc,...le->...ice", weight, X, X) - cross - cross.mT
    S = tau**2 * (s.C @ V @ E @ V.mT @ s.C + M3)
    identity = torch.ones(*B.shape[:-1], W_K.shape[-1], dtype=X.dtype, device=X.device)
    factors = right_factors(X, W_K, W_V, s)
    QQ = KroneckerSum(X, X, K.mT @ S @ K)
    KK = KroneckerSum(s.z, s.z, S, True, True)
    QK = (KroneckerSum(X, s.z, K.mT @ S, False, True), KroneckerSum(X, tau * B, identity, diagonal=True))
    QV = (
        KroneckerSum(X, s.mu, (E @ factors["W_Q"][1]).mT),
        KroneckerSum(X, p, tau * K.mT @ s.C, False, True),
    )
    KV = (
        KroneckerSum(s.z, s.mu, (E @ factors["W_K"][1]).mT, True, False),
        KroneckerSum(s.z, p, tau * s.C, True, True),
    )
    VV = KroneckerSum(s.mu, s.mu, E)
    return {
        ("W_Q", "W_Q"): (QQ,),
        ("W_Q", "W_K"): QK,
        ("W_Q", "W_V"): QV,
        ("W_K", "W_K"): (KK,),
        ("W_K", "W_V"): KV,
        ("W_V", "W_V"): (VV,),
    }


def attention_hessian(
    X: Float[Tensor, "*b L d_V"], W_Q: Tensor, W_K: Tensor, W_V: Tensor, target: Float[Tensor, "*b L d_V"]
) -> KroneckerHessian:
    """Return the Hessian of ‖F − Target‖_F²/(L d_V) in (W_Q, W_K, W_V) in Kronecker sums.

    Raises:
        ValueError: If a shape does not fit.

    Source: T1, OP, FN.
    """
    check_shapes(X, W_Q, W_K, W_V, target)
    L, d_V = X.shape[-2:]
    c = 2 / (L * d_V)
    F = attention_matrix(X, W_Q, W_K).squeeze(-3) @ X @ W_V
    E = c * torch.eye(d_V, dtype=X.dtype, device=X.device).expand(*X.shape[:-1], d_V, d_V)
    d_K = W_Q.shape[-1]
    shapes = {"W_Q": (d_V, d_K), "W_K": (d_V, d_K), "W_V": (d_V, d_V)}
    return KroneckerHessian(shapes, attention_terms(X, W_Q, W_K, W_V, E, c * (F - target)))


def check_shapes(X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, target: Tensor) -> None:
    """Raise ValueError, saying which, if a weight or the target does not fit X."""
    L, d_V = X.shape[-2:]
    d_K = W_Q.shape[-1]
    wanted = {
        "W_Q": (W_Q, (d_V, d_K)),
        "W_K": (W_K, (d_V, d_K)),
        "W_V": (W_V, (d_V, d_V)),
        "target": (target, (L, d_V)),
    }
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape[-2:]) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape[-2:])}; X of shape {(L, d_V)} needs {shape}.")
