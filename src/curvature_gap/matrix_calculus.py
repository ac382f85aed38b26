"""Matrix calculus in the row-wise convention: vec_r, the commutation matrix, and the rules for J and H.

Convention, stated once: ``vec_r(A X B) = (A ⊗ Bᵀ) vec_r(X)``; ``J = ∂vec_r(F)/∂vec_r(W)ᵀ`` has shape (outputs, p q);
``H = ∂vec_r(J)/∂vec_r(W_j)ᵀ`` has shape (outputs · p_i q_i, p_j q_j), so row (o, a) and column b of H hold
∂²F_o/∂W_i,a ∂W_j,b.
"""

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from curvature_gap.shapes import Float


class ShapeMismatchError(ValueError):
    """Factors that cannot be multiplied or terms that cannot be added; the message holds the sizes."""


def vec_r(A: Tensor) -> Tensor:
    """Return the rows of A one after another (row-major ravel). Source: D2.

    Raises:
        ValueError: If A is not a matrix.
    """
    if A.ndim != 2:
        raise ValueError(f"vec_r takes a matrix, got a tensor of shape {tuple(A.shape)}; reshape it to two axes first.")
    return A.reshape(-1)


def vec(A: Tensor) -> Tensor:
    """Return the columns of A one after another. Source: P1: vec_r(A) = vec(Aᵀ)."""
    return vec_r(A.T)


def unvec_r(v: Tensor, m: int, n: int) -> Tensor:
    """Return the (m, n) matrix whose row-wise vectorisation is v."""
    return v.reshape(m, n)


def commutation_matrix(m: int, n: int) -> Float[Tensor, "{m}*{n} {m}*{n}"]:
    """Return the permutation that turns vec_r(X) into vec_r(Xᵀ) for every X of shape (m, n).

    Its inverse is its transpose. Texts that stack columns, the paper among them, call this matrix K_{n,m}.

    Raises:
        ValueError: If a size is below 1.

    Source: D3, PR9.
    """
    if m < 1 or n < 1:
        raise ValueError(f"commutation_matrix takes positive sizes, got m = {m}, n = {n}.")
    position_in_X = torch.arange(m * n).reshape(m, n)
    return torch.eye(m * n, dtype=torch.float64)[vec_r(position_in_X.T)]


def K_as_printed(m: int, n: int) -> Float[Tensor, "{m}*{n} {m}*{n}"]:
    """Return the paper's K_{m,n}: K_{m,n} vec(A) = vec(Aᵀ) for A of shape (m, n), columns stacked. Source: D3."""
    return commutation_matrix(n, m)


def kron(*factors: Tensor) -> Tensor:
    """Return the Kronecker product of matrices, left to right.

    torch.kron fails on some transposed views, and a copy does not help where a size is 1; hence the outer product.
    """

    def pair(A: Tensor, B: Tensor) -> Tensor:
        (n, q), (p, r) = A.shape, B.shape
        return (A[:, None, :, None] * B[None, :, None, :]).reshape(n * p, q * r)

    return reduce(pair, factors)


def eye(n: int) -> Float[Tensor, "{n} {n}"]:
    """Return the identity in float64."""
    return torch.eye(n, dtype=torch.float64)


def multiply(*factors: Tensor) -> Tensor:
    """Return the matrix product, left to right.

    Raises:
        ShapeMismatchError: If neighbouring sizes differ; the message lists every factor's shape.
    """
    product = factors[0]
    for factor in factors[1:]:
        if product.shape[-1] != factor.shape[0]:
            shapes = " · ".join("×".join(map(str, f.shape)) for f in factors)
            raise ShapeMismatchError(f"cannot multiply {shapes}")
        product = product @ factor
    return product


def add(*terms: Tensor) -> Tensor:
    """Return the sum of matrices of one shape.

    Raises:
        ShapeMismatchError: If shapes differ; torch would broadcast some of these silently.
    """
    if len({term.shape for term in terms}) > 1:
        raise ShapeMismatchError("cannot add " + " + ".join("×".join(map(str, t.shape)) for t in terms))
    return sum(terms[1:], terms[0])


# --- Jacobians of elementary maps --------------------------------------------------------------


def sandwich_jacobian(A: Float[Tensor, "p m"], B: Float[Tensor, "n q"]) -> Float[Tensor, "p*q m*n"]:
    """Return ∂(A X B)/∂X = A ⊗ Bᵀ. Source: P2, P5."""
    return kron(A, B.T)


def kron_left_jacobian(X: Float[Tensor, "n q"], Y: Float[Tensor, "p r"]) -> Float[Tensor, "n*p*q*r n*q"]:
    """Return ∂(X ⊗ Y)/∂X = (I_n ⊗ K_{p,q} ⊗ I_r)(I_nq ⊗ vec_r Y), K_{p,q} the paper's. Source: P6."""
    (n, q), (p, r) = X.shape, Y.shape
    return kron(eye(n), K_as_printed(p, q), eye(r)).to(Y) @ kron(eye(n * q).to(Y), vec_r(Y)[:, None])


def kron_right_jacobian(X: Float[Tensor, "n q"], Y: Float[Tensor, "p r"]) -> Float[Tensor, "n*p*q*r p*r"]:
    """Return ∂(X ⊗ Y)/∂Y = (I_n ⊗ K_{p,q} ⊗ I_r)(vec_r X ⊗ I_pr), K_{p,q} the paper's. Source: P6."""
    (n, q), (p, r) = X.shape, Y.shape
    return kron(eye(n), K_as_printed(p, q), eye(r)).to(X) @ kron(vec_r(X)[:, None], eye(p * r).to(X))


def inverse_jacobian(D: Float[Tensor, "n n"]) -> Float[Tensor, "n*n n*n"]:
    """Return ∂D⁻¹/∂D = −D⁻¹ ⊗ D⁻ᵀ. Source: PR5."""
    D_inverse = torch.linalg.inv(D)
    return -kron(D_inverse, D_inverse.T)


def diag_jacobian(n: int) -> Float[Tensor, "{n}*{n} {n}"]:
    """Return ∂diag(v)/∂v = [e_1 ⊗ e_1 … e_n ⊗ e_n] for v of length n. Source: PR6."""
    return torch.stack([kron(e[:, None], e[:, None])[:, 0] for e in eye(n)], dim=1)


def hadamard_square_jacobian(A: Float[Tensor, "m n"]) -> Float[Tensor, "m*n m*n"]:
    """Return ∂A^{∘2}/∂A = 2 diag(vec_r A). Source: PR7, P3."""
    return 2 * torch.diag(vec_r(A))


def hadamard_root_jacobian(A: Float[Tensor, "m n"]) -> Float[Tensor, "m*n m*n"]:
    """Return ∂A^{∘1/2}/∂A = ½ diag⁻¹(vec_r^{∘1/2} A), for positive entries.

    Raises:
        ValueError: If an entry is not positive; the root has no derivative there.

    Source: PR8.
    """
    if (A <= 0).any():
        raise ValueError(f"The elementwise root needs positive entries, the smallest is {A.min().item():.3g}.")
    return torch.diag(0.5 / vec_r(A).sqrt())


# --- Rules for J: product, Kronecker product, chain --------------------------------------------


def product_jacobian(
    A: Float[Tensor, "p r"], B: Float[Tensor, "r q"], dA: Float[Tensor, "p*r x"], dB: Float[Tensor, "r*q x"]
) -> Float[Tensor, "p*q x"]:
    """Return ∂(AB)/∂X = (A ⊗ I_q) ∂B/∂X + (I_p ⊗ Bᵀ) ∂A/∂X. Source: PR3."""
    p, q = A.shape[0], B.shape[1]
    return kron(A, eye(q).to(A)) @ dB + kron(eye(p).to(B), B.T) @ dA


def kron_jacobian(
    A: Float[Tensor, "n q"], B: Float[Tensor, "p r"], dA: Float[Tensor, "n*q x"], dB: Float[Tensor, "p*r x"]
) -> Float[Tensor, "n*p*q*r x"]:
    """Return ∂(A⊗B)/∂X = (I_n ⊗ K_{p,q} ⊗ I_r)((vec_r A ⊗ I_pr) ∂B/∂X + (I_nq ⊗ vec_r B) ∂A/∂X). Source: PR4."""
    return kron_right_jacobian(A, B) @ dB + kron_left_jacobian(A, B) @ dA


# --- Rules for H -------------------------------------------------------------------------------


def chain_hessian(
    J_f: Float[Tensor, "m n"],
    H_f: Float[Tensor, "m*n n"],
    J_i: Float[Tensor, "n p"],
    J_j: Float[Tensor, "n q"],
    H_ij: Float[Tensor, "n*p q"],
) -> Float[Tensor, "m*p q"]:
    """Return ∂²f(g)/∂W_i∂W_j = (I_m ⊗ J_iᵀ) H_f J_j + (J_f ⊗ I_p) H_ij, with J_i = ∂g/∂W_i, H_ij = ∂²g/∂W_i∂W_j.

    The product rule PR3 applied to J_f J_i. Computed without forming a Kronecker product.

    Source: T5_boxed, PR3.
    """
    m, n = J_f.shape
    p, q = J_i.shape[1], J_j.shape[1]
    curvature_of_f = J_i.T @ (H_f @ J_j).reshape(m, n, q)
    curvature_of_g = (J_f @ H_ij.reshape(n, p * q)).reshape(m, p, q)
    return (curvature_of_f + curvature_of_g).reshape(m * p, q)


def rows_chain_hessian(
    J_f: Float[Tensor, "L m n"],
    H_f: Float[Tensor, "L m n n"],
    J_i: Float[Tensor, "L*n p"],
    J_j: Float[Tensor, "L*n q"],
    H_ij: Float[Tensor, "L*n*p q"],
) -> Float[Tensor, "L*m*p q"]:
    """Return `chain_hessian` for an f that acts on each of L rows alone, given row by row: L times fewer operations.

    Source: T5_boxed, PR3.
    """
    L, m, n = J_f.shape
    p, q = J_i.shape[1], J_j.shape[1]
    curvature_of_f = J_i.reshape(L, 1, n, p).mT @ (H_f @ J_j.reshape(L, 1, n, q))
    curvature_of_g = (J_f @ H_ij.reshape(L, n, p * q)).reshape(L, m, p, q)
    return (curvature_of_f + curvature_of_g).reshape(L * m * p, q)


def product_hessian(
    A: Float[Tensor, "p r"],
    B: Float[Tensor, "r q"],
    A_i: Float[Tensor, "p*r x"],
    B_i: Float[Tensor, "r*q x"],
    A_j: Float[Tensor, "p*r y"],
    B_j: Float[Tensor, "r*q y"],
    A_ij: Float[Tensor, "p*r*x y"],
    B_ij: Float[Tensor, "r*q*x y"],
) -> Float[Tensor, "p*q*x y"]:
    """Return ∂²(AB)/∂W_i∂W_j = A_ij B + A_i B_j + A_j B_i + A B_ij, laid out as H; A_i = ∂A/∂W_i and so on.

    Source: PR3 applied twice.
    """
    (p, r), q = A.shape, B.shape[1]
    x, y = A_i.shape[1], A_j.shape[1]
    A_i, A_j, A_ij = A_i.reshape(p, r, x), A_j.reshape(p, r, y), A_ij.reshape(p, r, x, y)
    B_i, B_j, B_ij = B_i.reshape(r, q, x), B_j.reshape(r, q, y), B_ij.reshape(r, q, x, y)
    H = torch.einsum("prxy,rq->pqxy", A_ij, B) + torch.einsum("pr,rqxy->pqxy", A, B_ij)
    H += torch.einsum("prx,rqy->pqxy", A_i, B_j) + torch.einsum("pry,rqx->pqxy", A_j, B_i)
    return H.reshape(p * q * x, y)


def kron_hessian(
    A: Float[Tensor, "n q"],
    B: Float[Tensor, "p r"],
    A_i: Float[Tensor, "n*q x"],
    B_i: Float[Tensor, "p*r x"],
    A_j: Float[Tensor, "n*q y"],
    B_j: Float[Tensor, "p*r y"],
    A_ij: Float[Tensor, "n*q*x y"],
    B_ij: Float[Tensor, "p*r*x y"],
) -> Float[Tensor, "n*p*q*r*x y"]:
    """Return ∂²(A⊗B)/∂W_i∂W_j = A_ij⊗B + A_i⊗B_j + A_j⊗B_i + A⊗B_ij, laid out as H. Source: PR4 applied twice."""
    (n, q), (p, r) = A.shape, B.shape
    x, y = A_i.shape[1], A_j.shape[1]
    A_i, A_j, A_ij = A_i.reshape(n, q, x), A_j.reshape(n, q, y), A_ij.reshape(n, q, x, y)
    B_i, B_j, B_ij = B_i.reshape(p, r, x), B_j.reshape(p, r, y), B_ij.reshape(p, r, x, y)
    H = torch.einsum("nqxy,pr->npqrxy", A_ij, B) + torch.einsum("nq,prxy->npqrxy", A, B_ij)
    H += torch.einsum("nqx,pry->npqrxy", A_i, B_j) + torch.einsum("nqy,prx->npqrxy", A_j, B_i)
    return H.reshape(n * p * q * r * x, y)


def transpose_hessian(H: Float[Tensor, "mp q"], p: int) -> Float[Tensor, "mq {p}"]:
    """Return H^(j,i) from H^(i,j): second derivatives commute, so each output's p × q slice is transposed.

    With the paper's K: vec_r H^(j,i) = (I_m ⊗ K_{q,p}) vec_r H^(i,j).

    Raises:
        ValueError: If p does not divide the number of rows.

    Source: T5_symmetry (its true form).
    """
    rows, q = H.shape
    if p < 1 or rows % p:
        raise ValueError(f"H has {rows} rows, which p = {p} does not divide; p is the size of W_i.")
    return H.reshape(-1, p, q).transpose(1, 2).reshape(-1, p)


# --- The oracle --------------------------------------------------------------------------------


def autodiff_jacobian(function: Callable[[Tensor], Tensor], W: Tensor) -> Tensor:
    """Return ∂vec_r(F)/∂vec_r(W)ᵀ by forward-mode automatic differentiation. Source: PR1."""
    return torch.func.jacfwd(lambda w: function(w).reshape(-1))(W).reshape(-1, W.numel())


def autodiff_hessian(function: Callable[..., Tensor], W_i: Tensor, W_j: Tensor | None = None) -> Tensor:
    """Return ∂²F/∂W_i∂W_j in the convention of this file, by forward over reverse automatic differentiation.

    Args:
        function: `function(W_i, W_j)`; with `W_j` None it is `function(W)` and both derivatives are in W.
    """

    def J_i(w_i: Tensor, w_j: Tensor | None) -> Tensor:
        f = function if w_j is None else lambda w: function(w, w_j)
        return torch.func.jacrev(lambda w: f(w).reshape(-1))(w_i).reshape(-1)

    if W_j is None:
        return torch.func.jacfwd(lambda w: J_i(w, None))(W_i).reshape(-1, W_i.numel())
    return torch.func.jacfwd(lambda w: J_i(W_i, w))(W_j).reshape(-1, W_j.numel())
