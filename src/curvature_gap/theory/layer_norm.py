"""LayerNorm: Jacobian, Hessian, derivatives in scale and shift, and the paper's factorised forms."""

from typing import NamedTuple

import torch
from torch import Tensor

from curvature_gap.maps import layer_norm
from curvature_gap.matrix_calculus import (
    K_as_printed,
    add,
    diag_jacobian,
    eye,
    kron,
    kron_left_jacobian,
    multiply,
    vec_r,
)
from curvature_gap.shapes import Float


def check_rows_vary(X: Float[Tensor, "L d"], eps: float) -> None:
    """Check assumption A2, which is needed where eps is zero.

    Raises:
        ValueError: If a row is constant and eps is zero.

    Source: A2.
    """
    if eps == 0 and (X[:, :1] == X).all(dim=1).any():
        raise ValueError("X has a constant row; LayerNorm needs eps > 0 there.")


def _standardised_rows(X: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the rows of LN(X) without scale and shift, and their standard deviations sqrt(σ² + ε)."""
    check_rows_vary(X, eps)
    M = X - X.mean(dim=1, keepdim=True)
    sigma = (M.square().mean(dim=1) + eps).sqrt()
    return M / sigma[:, None], sigma


def layer_norm_row_jacobians(
    X: Float[Tensor, "L d"], gamma: Float[Tensor, " d"] | None = None, eps: float = 0.0
) -> Float[Tensor, "L d d"]:
    """Return ∂LN(x_i)/∂x_iᵀ for every row: diag(γ)(C − y_i y_iᵀ/d)/σ_i, C = I − 11ᵀ/d, y_i the row before the scale.

    Args:
        X: Tokens, one per row.
        gamma: Scale; None is 1.
        eps: Added to each row's variance, as in `torch.nn.LayerNorm`; then σ_i stands for sqrt(σ_i² + ε).

    Raises:
        ValueError: If a row is constant and eps is zero; LN has no derivative there.

    Source: T2, A2.
    """
    Y, sigma = _standardised_rows(X, eps)
    d = X.shape[1]
    C = torch.eye(d, dtype=X.dtype) - 1 / d
    # y ⊥ 1 gives y yᵀ C = y yᵀ, so C need not multiply the second term.
    J = (C - Y[:, :, None] * Y[:, None, :] / d) / sigma[:, None, None]
    return J if gamma is None else gamma[:, None] * J


def layer_norm_row_hessians(
    X: Float[Tensor, "L d"], gamma: Float[Tensor, " d"] | None = None, eps: float = 0.0
) -> Float[Tensor, "L d d d"]:
    """Return ∂²LN(x_i)_a/∂x_ib∂x_ic at [i, a, b, c] for every row.

    Differentiating J = (C − y yᵀ/d)/σ with ∂y/∂x = J and ∂σ/∂x = y/d gives the form symmetric in a, b, c:
    −γ_a (J_ab y_c + J_ac y_b + J_bc y_a)/(d σ). Arguments and errors as in `layer_norm_row_jacobians`.

    Source: T3.
    """
    Y, sigma = _standardised_rows(X, eps)
    d = X.shape[1]
    J = layer_norm_row_jacobians(X, eps=eps)
    cyclic = J[:, :, :, None] * Y[:, None, None, :] + J[:, :, None, :] * Y[:, None, :, None]
    cyclic = cyclic + J[:, None, :, :] * Y[:, :, None, None]
    H = -cyclic / (d * sigma[:, None, None, None])
    return H if gamma is None else gamma[:, None, None] * H


def layer_norm_jacobian(
    X: Float[Tensor, "L d"], gamma: Float[Tensor, " d"] | None = None, eps: float = 0.0
) -> Float[Tensor, "L*d L*d"]:
    """Return ∂LN(X)/∂X: block diagonal, for rows do not interact. See `layer_norm_row_jacobians`. Source: T2."""
    return torch.block_diag(*layer_norm_row_jacobians(X, gamma, eps))


def layer_norm_hessian(
    X: Float[Tensor, "L d"], gamma: Float[Tensor, " d"] | None = None, eps: float = 0.0
) -> Float[Tensor, "L*d*L*d L*d"]:
    """Return ∂²LN(X)/∂X²: one d × d × d block a row. See `layer_norm_row_hessians`. Source: T3."""
    L, d = X.shape
    H = X.new_zeros(L, d, L, d, L, d)
    row = torch.arange(L)
    H[row, :, row, :, row, :] = layer_norm_row_hessians(X, gamma, eps)
    return H.reshape(L * d * L * d, L * d)


def layer_norm_scale_jacobian(X: Float[Tensor, "L d"], eps: float = 0.0) -> Float[Tensor, "L*d d"]:
    """Return ∂LN(X)/∂γ: diag of every standardised row, stacked. Source: notation, T2."""
    return torch.diag_embed(layer_norm(X, eps=eps)).reshape(-1, X.shape[1])


def layer_norm_shift_jacobian(X: Float[Tensor, "L d"]) -> Float[Tensor, "L*d d"]:
    """Return ∂LN(X)/∂β = 1_L ⊗ I_d. Source: notation, T2."""
    return torch.eye(X.shape[1], dtype=X.dtype).repeat(X.shape[0], 1)


def layer_norm_scale_input_hessian(X: Float[Tensor, "L d"], eps: float = 0.0) -> Float[Tensor, "L*d*d L*d"]:
    """Return ∂²LN/∂γ∂X: LN is linear in γ, so entry (row i, a; γ_b; x_ic) is [a = b] J_i[a, c] without the scale.

    All other second derivatives in γ and β vanish.

    Source: notation, T3.
    """
    L, d = X.shape
    H = X.new_zeros(L, d, d, L, d)
    row = torch.arange(L)[:, None]
    feature = torch.arange(d)
    H[row, feature, feature, row] = layer_norm_row_jacobians(X, eps=eps)
    return H.reshape(L * d * d, L * d)


# --- The paper's factors and formulas ----------------------------------------------------------


class LayerNormFactors(NamedTuple):
    """The factors of T2 and T3: M, D = diag(σ), P = D⁻¹, G = ∂M/∂X, E = [e_i ⊗ e_i], J = I_L ⊗ 1ᵀ, A_1 … B_2."""

    M: Tensor
    D: Tensor
    P: Tensor
    G: Tensor
    E: Tensor
    J: Tensor
    A_1: Tensor
    A_2: Tensor
    A_3: Tensor
    B_1: Tensor
    B_2: Tensor


def layer_norm_factors(X: Float[Tensor, "L d"]) -> LayerNormFactors:
    """Return the paper's factors at X (no scale, no shift, ε = 0).

    Raises:
        ValueError: If a row is constant.

    Source: T2, T3.
    """
    L, d = X.shape
    _, sigma = _standardised_rows(X, 0.0)
    M = X - X @ torch.ones(d, d, dtype=X.dtype) / d
    D = torch.diag(sigma)
    P = torch.diag(1 / sigma)
    G = eye(L * d) - kron(eye(L), torch.ones(d, d, dtype=X.dtype)) / d
    E = diag_jacobian(L)
    J = kron(eye(L), torch.ones(1, d, dtype=X.dtype))
    A_2 = torch.diag(1 / M.square().sum(dim=1).sqrt())
    A_3 = torch.diag(vec_r(M))
    B_2 = J @ A_3 @ G
    return LayerNormFactors(M, D, P, G, E, J, A_1=-kron(P, P.T), A_2=A_2, A_3=A_3, B_1=E @ A_2 @ B_2, B_2=B_2)


def P_jacobian_as_printed(X: Float[Tensor, "L d"]) -> Float[Tensor, "L*L L*d"]:
    """Return the paper's ∂P/∂X = (1/√d)(−D⁻¹ ⊗ D⁻ᵀ) E diag⁻¹(vec_r^{1/2}(M^{∘2}1)) (I_L ⊗ 1ᵀ) diag(vec_r M) G.

    It holds.

    Source: T2.
    """
    f = layer_norm_factors(X)
    return f.A_1 @ f.B_1 / X.shape[1] ** 0.5


def layer_norm_jacobian_as_printed(X: Float[Tensor, "L d"]) -> Float[Tensor, "L*d L*d"]:
    """Return the paper's (P ⊗ I_d) G + (I_L ⊗ Mᵀ) ∂P/∂X. It holds. Source: T2."""
    L, d = X.shape
    f = layer_norm_factors(X)
    return kron(f.P, eye(d)) @ f.G + kron(eye(L), f.M.T) @ P_jacobian_as_printed(X)


def D_jacobian(X: Float[Tensor, "L d"]) -> Float[Tensor, "L*L L*d"]:
    """Return ∂D/∂X = (1/√d) E A_2 B_2, D = diag(σ): σ = τ^{∘1/2}/√d with τ = M^{∘2} 1. Source: T3_dD (corrected)."""
    return D_jacobian_as_printed(X) / X.shape[1] ** 0.5


def D_jacobian_as_printed(X: Float[Tensor, "L d"]) -> Float[Tensor, "L*L L*d"]:
    """Return the paper's ∂D/∂X = E A_2 B_2. Wrong: too large by √d, for the 1/√d of σ = τ^{∘1/2}/√d was lost.

    T2's ∂P/∂X = −(D⁻¹ ⊗ D⁻ᵀ) ∂D/∂X carries the factor, so the paper contradicts itself here.

    Source: T3_dD.
    """
    return layer_norm_factors(X).B_1


def P_kron_I_jacobian(X: Float[Tensor, "L d"]) -> Float[Tensor, "L*d*L*d L*d"]:
    """Return ∂(P ⊗ I_d)/∂X = (I_L ⊗ K_{d,L} ⊗ I_d)(I_{L²} ⊗ vec_r I_d) ∂P/∂X. Source: T3_dP_kron_I (corrected), P6."""
    d = X.shape[1]
    return kron_left_jacobian(layer_norm_factors(X).P, eye(d)) @ P_jacobian_as_printed(X)


def P_kron_I_jacobian_as_printed(X: Float[Tensor, "L d"]) -> Tensor:
    """Return the paper's (I_L ⊗ K_{L,L} ⊗ I_L)(I_{L²} ⊗ vec_r I_L) ∂P/∂X.

    Wrong: this is ∂(P ⊗ I_L)/∂X with L⁴ rows, where P ⊗ I_d has L²d². The proof of L3 prints it correctly.

    Source: T3_dP_kron_I.
    """
    L = X.shape[0]
    vec_I = vec_r(eye(L))[:, None]
    return multiply(kron(eye(L), K_as_printed(L, L), eye(L)), kron(eye(L**2), vec_I), P_jacobian_as_printed(X))


def I_kron_MT_jacobian_as_printed(X: Float[Tensor, "L d"]) -> Float[Tensor, "L*d*L*L L*d"]:
    """Return the paper's ∂(I_L ⊗ Mᵀ)/∂X = (I_L ⊗ K_{d,L} ⊗ I_L)(vec_r I_L ⊗ I_{Ld}) K_{d,L} G. It holds.

    Source: T3_dI_kron_MT.
    """
    L, d = X.shape
    vec_I = vec_r(eye(L))[:, None]
    G = layer_norm_factors(X).G
    return multiply(kron(eye(L), K_as_printed(d, L), eye(L)), kron(vec_I, eye(L * d)), K_as_printed(d, L), G)


def A_1_jacobian_as_printed(X: Float[Tensor, "L d"], dD: Float[Tensor, "L*L L*d"]) -> Float[Tensor, "L*L*L*L L*d"]:
    """Return the paper's ∂A_1/∂X, A_1 = −D⁻¹ ⊗ D⁻ᵀ, from a given ∂D/∂X.

    (I_L ⊗ K_{L,L} ⊗ I_L)((I_{L²} ⊗ vec_r D⁻ᵀ) ∂(−D⁻¹)/∂X + (vec_r(−D⁻¹) ⊗ I_{L²}) ∂D⁻ᵀ/∂X) with
    ∂(−D⁻¹)/∂X = (D⁻¹ ⊗ D⁻ᵀ) ∂D/∂X and ∂D⁻ᵀ/∂X = K_{L,L}(−D⁻¹ ⊗ D⁻ᵀ) ∂D/∂X. It holds for the true ∂D/∂X.

    Source: T3_dA1.
    """
    L = X.shape[0]
    f = layer_norm_factors(X)
    D_inverse = torch.linalg.inv(f.D)
    d_minus_D_inverse = kron(D_inverse, D_inverse.T) @ dD
    d_D_inverse_T = K_as_printed(L, L) @ -kron(D_inverse, D_inverse.T) @ dD
    left = kron(eye(L**2), vec_r(D_inverse.T)[:, None]) @ d_minus_D_inverse
    right = kron(vec_r(-D_inverse)[:, None], eye(L**2)) @ d_D_inverse_T
    return kron(eye(L), K_as_printed(L, L), eye(L)) @ (left + right)


def A_2_jacobian(X: Float[Tensor, "L d"]) -> Float[Tensor, "L*L L*d"]:
    """Return ∂A_2/∂X = −(A_2 ⊗ A_2) E A_2 B_2; the paper uses it and never states it. Source: T3_d2P (supplied)."""
    f = layer_norm_factors(X)
    return -kron(f.A_2, f.A_2) @ f.B_1


def B_1_jacobian(X: Float[Tensor, "L d"]) -> Float[Tensor, "L*L*L*d L*d"]:
    """Return ∂B_1/∂X = (E ⊗ I_{Ld})((A_2 ⊗ I_{Ld}) ∂B_2/∂X + (I_L ⊗ B_2ᵀ) ∂A_2/∂X) as the proof prints it.

    ∂B_2/∂X = (J ⊗ I_{Ld})(I_{Ld} ⊗ Gᵀ) ∂A_3/∂X, ∂A_3/∂X = [e_i ⊗ e_i] G. ∂A_2/∂X, which the proof leaves out, is ours.

    Source: T3_d2P.
    """
    L, d = X.shape
    f = layer_norm_factors(X)
    dA_3 = diag_jacobian(L * d) @ f.G
    dB_2 = kron(f.J, eye(L * d)) @ kron(eye(L * d), f.G.T) @ dA_3
    return kron(f.E, eye(L * d)) @ (kron(f.A_2, eye(L * d)) @ dB_2 + kron(eye(L), f.B_2.T) @ A_2_jacobian(X))


def P_hessian(X: Float[Tensor, "L d"]) -> Float[Tensor, "L*L*L*d L*d"]:
    """Return ∂²P/∂X² = (1/√d)[(A_1 ⊗ I_{Ld}) ∂B_1/∂X + (I_{L²} ⊗ B_1ᵀ) ∂A_1/∂X]. Source: T3_d2P (corrected), PR3."""
    first, second = _P_hessian_terms(X)
    return (first + second) / X.shape[1] ** 0.5


def P_hessian_as_printed(X: Float[Tensor, "L d"]) -> Float[Tensor, "L*L*L*d L*d"]:
    """Return the paper's (1/√d)(A_1 ⊗ I_{Ld}) ∂B_1/∂X + (I_{L²} ⊗ B_1ᵀ) ∂A_1/∂X, with the true ∂A_1/∂X and ∂B_1/∂X.

    Wrong: ∂P/∂X = (1/√d) A_1 B_1, so the factor multiplies both terms. The lost bracket and the lost factor of
    ∂D/∂X (T3_dD) together make the second term d times too large.

    Source: T3_d2P.
    """
    first, second = _P_hessian_terms(X)
    return first / X.shape[1] ** 0.5 + second


def _P_hessian_terms(X: Tensor) -> tuple[Tensor, Tensor]:
    L, d = X.shape
    f = layer_norm_factors(X)
    dA_1 = A_1_jacobian_as_printed(X, D_jacobian(X))
    return kron(f.A_1, eye(L * d)) @ B_1_jacobian(X), kron(eye(L**2), f.B_1.T) @ dA_1


def layer_norm_hessian_from_parts(
    X: Float[Tensor, "L d"], dP_kron_I: Tensor, dI_kron_MT: Tensor, d2P: Tensor
) -> Tensor:
    """Return T3's sum ((P⊗I)⊗I) ∂²M + (I⊗Gᵀ) ∂(P⊗I)/∂X + ((I⊗Mᵀ)⊗I) ∂²P/∂X² + (I⊗Hᵀ) ∂(I⊗Mᵀ)/∂X, with ∂²M = 0.

    The sum holds; whether the total does depends on the parts that are put in.

    Raises:
        ShapeMismatchError: If a part has the wrong shape.

    Source: T3, T3_sum.
    """
    L, d = X.shape
    f = layer_norm_factors(X)
    H = P_jacobian_as_printed(X)
    return add(
        multiply(kron(eye(L * d), f.G.T), dP_kron_I),
        multiply(kron(eye(L), f.M.T, eye(L * d)), d2P),
        multiply(kron(eye(L * d), H.T), dI_kron_MT),
    )


def layer_norm_hessian_as_printed(X: Float[Tensor, "L d"]) -> Tensor:
    """Return T3 with the parts of its printed proof, ∂D/∂X included. Wrong: see T3_dP_kron_I, T3_d2P, T3_dD.

    Raises:
        ShapeMismatchError: Wherever L ≠ d.

    Source: T3, T3_total.
    """
    L, d = X.shape
    f = layer_norm_factors(X)
    dA_1 = A_1_jacobian_as_printed(X, D_jacobian_as_printed(X))
    d2P = kron(f.A_1, eye(L * d)) @ B_1_jacobian(X) / d**0.5 + kron(eye(L**2), f.B_1.T) @ dA_1
    return layer_norm_hessian_from_parts(X, P_kron_I_jacobian_as_printed(X), I_kron_MT_jacobian_as_printed(X), d2P)
