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
    top_norm,
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
    # Centred first: tokens that differ little beside their mean keep their digits.
    mean = X.mean(dim=-2, keepdim=True)
    Y = X - mean
    shift = A @ Y
    second = torch.einsum("...il,...lc,...le->...ice", A, Y, Y)
    return Statistics(A, shift + mean, second - shift[..., :, None] * shift[..., None, :], X @ W_Q)


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
    Y, shift = X - X.mean(dim=-2, keepdim=True), s.mu - X.mean(dim=-2, keepdim=True)
    weight = s.A * (v @ Y.mT - (shift * v).sum(-1, keepdim=True))
    cross = B[..., :, None] * shift[..., None, :]
    M3 = torch.einsum("...il,...lc,...le->...ice", weight, Y, Y) - cross - cross.mT
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


@dataclass(frozen=True)
class TokenNorms:
    """What norms of X, of the weights and of products formed before the softmax say about the attention rows.

    Scalars per instance: `x` = ‖X‖, `xc` = ‖X_c‖ (X_c centred over tokens), `mean` = |x̄|, `c0` = ‖X_c‖²/L, `k`, `q`,
    `v` weights' norms, `xc_V` = ‖X_c W_V‖, `mean_V` = |W_Vᵀ x̄|, `reach_V` = max_l |W_Vᵀ(x_l − x̄)|. Upper bounds per
    token: `gamma` ≥ ‖C_i‖, `eps` ≥ ‖C_i − C_0‖ with C_0 = X_cᵀX_c/L, `m3` ≥ ‖M3_i‖, `chi` ≥ √L |a_i − 1/L|,
    `shift` ≥ |mu_i − x̄|, `radius` ≥ |mu_i|. X and Z = X W_Q stand for norms of the form ‖diag(r) X‖.
    """

    X: Float[Tensor, "*b L d_V"]
    Z: Float[Tensor, "*b L d_K"]
    x: Tensor
    xc: Tensor
    mean: Tensor
    c0: Tensor
    k: Tensor
    q: Tensor
    v: Tensor
    xc_V: Tensor
    mean_V: Tensor
    reach_V: Tensor
    gamma: Float[Tensor, "*b L"]
    eps: Float[Tensor, "*b L"]
    m3: Float[Tensor, "*b L"]
    chi: Float[Tensor, "*b L"]
    shift: Float[Tensor, "*b L"]
    radius: Float[Tensor, "*b L"]

    def weighted_X(self, r: Float[Tensor, "*b L"]) -> Tensor:
        """‖diag(r) X‖."""
        return top_norm(r[..., None] * self.X)

    def weighted_Z(self, r: Float[Tensor, "*b L"]) -> Tensor:
        """‖diag(r) Z‖."""
        return top_norm(r[..., None] * self.Z)

    def weighted_mu(self, r: Float[Tensor, "*b L"]) -> Tensor:
        """Bound ‖diag(r) A X‖: by its rows, or with A X = 1 x̄ᵀ + (A − 11ᵀ/L) X_c."""
        L = r.shape[-1]
        by_rows = (r * self.radius).norm(dim=-1)
        split = r.norm(dim=-1) * self.mean + (r * self.chi).norm(dim=-1) / L**0.5 * self.xc
        return torch.minimum(by_rows, split)

    def norm_F(self) -> Tensor:
        """Bound ‖F‖, F = A X W_V."""
        L = self.chi.shape[-1]
        return L**0.5 * self.mean_V + self.chi.norm(dim=-1) / L**0.5 * self.xc_V


def softmax_distance(T_c: Float[Tensor, "*b L L"]) -> Float[Tensor, "*b L"]:
    """Bound χ_i, χ_i² = L Σ_l a_il² − 1 the χ² distance of attention row i from uniform, by norms of its logits.

    T_c holds logits centred per row, with row maximum τ, minimum −λ and variance v. With E the mean over l,
    1 + χ² = E e^{2t} / (E e^t)². Numerator: Bennett, (τ² e^{−2v/τ} + v e^{2τ})/(τ² + v). Denominator: 1 + ψ v, for
    e^t ≥ 1 + t + ψ t² with ψ = (e^{−λ} − 1 + λ)/λ², as (e^t − 1 − t)/t² increases. Also χ² ≤ L max_l a_il − 1.
    χ grows with the logits' scale (cumulants are convex), so the bound holds for all smaller scales.
    """
    L = T_c.shape[-1]
    tau = T_c.amax(-1).clamp_min(1e-12)
    low = (-T_c).amax(-1).clamp_min(1e-12)
    v = T_c.square().mean(-1)
    # Beyond e^300 the trivial bound L − 1 decides.
    top = (2 * tau).clamp_max(300).exp()
    numerator = (tau.square() * (-2 * v / tau).exp() + v * top) / (tau.square() + v)
    psi = torch.where(low > 1e-3, ((-low).exp() - 1 + low) / low.square(), 0.5 - low / 6)
    bennett = numerator / (1 + psi * v).square()
    # The difference from 1 has lost its digits below 1e-15.
    return (torch.minimum(bennett, L * largest_weight(tau, L)).sub(1).clamp_min(0) + 1e-15).clamp_max(L - 1).sqrt()


def largest_weight(tau: Float[Tensor, "*b L"], L: int) -> Float[Tensor, "*b L"]:
    """Bound max_l a_il by 1/(1 + (L − 1) exp(−τ L/(L − 1))), τ the row's largest centred logit (Jensen)."""
    if L == 1:
        return torch.ones_like(tau)
    return 1 / (1 + (L - 1) * (-tau * L / (L - 1)).exp())


def token_norms(X: Float[Tensor, "*b L d_V"], W_Q: Tensor, W_K: Tensor, W_V: Tensor) -> TokenNorms:
    """Return the a priori statistics; no softmax is evaluated.

    Proofs. Attention row i is the uniform measure tilted by t_l = s_i·(x_l − x̄), s_i = τ W_K W_Qᵀ x_i.
    Popoviciu: ‖C_i‖ ≤ diam²/4. C_i ≼ Σ_l a_il y_l y_lᵀ ≼ max a X_cᵀX_c, y_l = x_l − x̄. With b = a_i − 1/L,
    C_i − C_0 = Σ b_l (y_l y_lᵀ − C_0) − δδᵀ, δ = Σ b_l y_l = mu_i − x̄, and |b| = χ_i/√L, so the first part is at most
    χ_i κ, κ√L the norm of the L x d_V² matrix of rows vec(y_l y_lᵀ − C_0); from below C_i ≽ 0. Third moment: E ξ³ ≤
    g √(r² − 4g) for a centred ξ of variance g and range r, increasing up to g = r²/6; symmetric, so it bounds
    M3_i[w]/|w|. Along the segment from 0 to s_i, D mu = C and D C = M3, hence |δ| ≤ |s_i| γ and ‖C_i − C_0‖ ≤ |s_i| m3;
    every bound on this list holds on the whole segment.
    """
    L, d_K = X.shape[-2], W_K.shape[-1]
    mean = X.mean(dim=-2, keepdim=True)
    X_c = X - mean
    s = d_K**-0.5 * (X @ W_Q) @ W_K.mT
    T_c = s @ X_c.mT
    chi = softmax_distance(T_c)
    xc = top_norm(X_c)
    c0 = xc.square() / L
    outer = X_c[..., :, None] * X_c[..., None, :]
    kappa_c = top_norm((outer - outer.mean(dim=-3, keepdim=True)).flatten(-2)) / L**0.5
    diameter = torch.cdist(X, X, compute_mode="donot_use_mm_for_euclid_dist").amax((-1, -2))
    length, tilt = s.norm(dim=-1), chi * kappa_c[..., None]
    C0, range_2 = c0[..., None], diameter.square()[..., None]
    drift = C0 * chi.square()
    eps = torch.maximum(tilt, torch.minimum(tilt + drift, C0))
    weight = largest_weight(T_c.amax(-1), L)
    cap = torch.minimum(range_2 / 4, torch.minimum(weight * xc.square()[..., None], C0 + tilt))
    for _ in range(5):
        gamma = torch.minimum(cap, C0 + eps)
        g = torch.minimum(gamma, range_2 / 6)
        m3 = g * (range_2 - 4 * g).clamp_min(0).sqrt()
        eps = torch.minimum(eps, torch.minimum(m3 * length, torch.maximum(gamma, C0)))
    reach = X_c.norm(dim=-1).amax(-1)[..., None]
    shift = torch.minimum(torch.minimum(c0.sqrt()[..., None] * chi, gamma * length), reach)
    far = X.norm(dim=-1).amax(-1)[..., None]
    mean_norm = mean.squeeze(-2).norm(dim=-1)
    return TokenNorms(
        X=X,
        Z=X @ W_Q,
        x=top_norm(X),
        xc=xc,
        mean=mean_norm,
        c0=c0,
        k=top_norm(W_K),
        q=top_norm(W_Q),
        v=top_norm(W_V),
        xc_V=top_norm(X_c @ W_V),
        mean_V=(mean @ W_V).squeeze(-2).norm(dim=-1),
        reach_V=(X_c @ W_V).norm(dim=-1).amax(-1),
        gamma=gamma,
        eps=eps,
        m3=m3,
        chi=chi,
        shift=shift,
        radius=torch.minimum(mean_norm[..., None] + shift, far),
    )


@dataclass(frozen=True)
class OutputNorms:
    """Upper bounds on what attention's output meets: e_i ≥ ‖E_i‖, p_i ≥ |p_i|, and of the stacked p the norms.

    `spectral` ≥ ‖p‖, `with_X` ≥ ‖Xᵀp‖, `slope` ≥ max_l |⟨x_l − mu_i, W_V p_i⟩| per token. `scalar` says that E_i is the
    same multiple of the identity for all tokens.
    """

    e: Float[Tensor, "*b L"]
    p: Float[Tensor, "*b L"]
    spectral: Tensor
    with_X: Tensor
    slope: Float[Tensor, "*b L"]
    scalar: bool = False


def attention_norm_bounds(n: TokenNorms, out: OutputNorms, d_K: int) -> dict[Pair, Tensor]:
    """Return a priori bounds on the six block pairs of `attention_terms`.

    Each term is bounded by `weighted_gram` with bounds in place of the ‖N_i‖, or after taking C_0 out of C_i: then
    Σ mu_i x_iᵀ = XᵀAX and Σ p_i x_iᵀ = Xᵀp meet C_0, and only `eps` multiplies the product of norms.
    """
    tau = d_K**-0.5
    L = n.gamma.shape[-1]
    k, v = n.k, n.v
    S = v.square()[..., None] * n.gamma.square() * out.e
    S = S + torch.minimum(n.m3 * v[..., None] * out.p, n.gamma * out.slope)
    root = S.sqrt()
    QQ, KK = tau**2 * k.square() * n.weighted_X(root).square(), tau**2 * n.weighted_Z(root).square()
    B = torch.minimum(
        n.x * v * (n.gamma * out.p).norm(dim=-1),
        n.c0 * v * out.with_X + n.x * v * (n.eps * out.p).norm(dim=-1),
    )
    QK = tau**2 * k * n.weighted_X(root) * n.weighted_Z(root) + tau * B
    a = n.weighted_mu(torch.ones_like(n.gamma))
    bounds = {("W_Q", "W_Q"): QQ, ("W_Q", "W_K"): QK, ("W_K", "W_K"): KK}
    mean_part = L * n.mean.square() + n.chi.norm(dim=-1) / L**0.5 * n.xc * n.x
    for name, right, factor, across in (("W_Q", n.weighted_X, k, 1.0), ("W_K", n.weighted_Z, 1.0, n.q)):
        first = n.weighted_mu((out.e * n.gamma).sqrt()) * right((out.e * n.gamma).sqrt())
        if out.scalar:
            split = out.e[..., 0] * (torch.minimum(mean_part, a * n.x) * across * n.c0 + a * right(n.eps))
            first = torch.minimum(first, split)
        second = torch.minimum(
            (n.gamma.sqrt() * out.p).norm(dim=-1) * right(n.gamma.sqrt()),
            torch.minimum(out.spectral * right(n.gamma), out.with_X * across * n.c0 + out.spectral * right(n.eps)),
        )
        bounds[name, "W_V"] = tau * factor * (v * first + second)
    bounds["W_V", "W_V"] = n.weighted_mu(out.e.sqrt()).square()
    return bounds


def attention_apriori_bounds(
    X: Float[Tensor, "*b L d_V"], W_Q: Tensor, W_K: Tensor, W_V: Tensor, target: Float[Tensor, "*b L d_V"]
) -> dict[Pair, Tensor]:
    """Return a priori bounds on the blocks of `attention_hessian`, from norms alone; `norm_of_norms` gives the total.

    p = c (F − Target): |F_i| ≤ |W_Vᵀx̄| + v |mu_i − x̄|; Xᵀp by ‖XᵀTarget‖ and F = 1 x̄ᵀW_V + (A − 11ᵀ/L) X_c W_V; the
    slope by max_l |⟨x_l − x̄, W_V Target_i⟩|, an entry of a product, and |W_Vᵀ(x_l − x̄)| |F_i|.

    Source: T1.
    """
    check_shapes(X, W_Q, W_K, W_V, target)
    L, d_V = X.shape[-2:]
    c = 2 / (L * d_V)
    n = token_norms(X, W_Q, W_K, W_V)
    v = n.v[..., None]
    F_rows = torch.minimum(n.mean_V[..., None] + v * n.shift, v * n.radius)
    rows = target.norm(dim=-1) + F_rows
    along = ((X - X.mean(dim=-2, keepdim=True)) @ W_V @ target.mT).abs().amax(-2) + n.reach_V[..., None] * F_rows
    slope = along + torch.minimum(along, v * n.shift * rows)
    XF = L * n.mean * n.mean_V + n.x * n.chi.norm(dim=-1) / L**0.5 * n.xc_V
    spectral = top_norm(target) + n.norm_F()
    with_X = torch.minimum(top_norm(X.mT @ target) + XF, n.x * spectral)
    e = torch.full_like(rows, c)
    out = OutputNorms(e, c * rows, c * spectral, c * with_X, c * slope, scalar=True)
    return attention_norm_bounds(n, out, W_K.shape[-1])
