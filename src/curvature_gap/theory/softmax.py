"""The row-wise softmax: Jacobian and second derivative."""

import torch
from torch import Tensor

from curvature_gap.maps import softmax
from curvature_gap.matrix_calculus import kron
from curvature_gap.shapes import Float


def softmax_row_jacobians(A: Float[Tensor, "L M"]) -> Float[Tensor, "L M M"]:
    """Return ∂a_i/∂t_i = diag(a_i) − a_i a_iᵀ for every row of A = softmax(T). Source: G_Q."""
    return torch.diag_embed(A) - A[:, :, None] * A[:, None, :]


def softmax_row_hessians(A: Float[Tensor, "L M"]) -> Float[Tensor, "L M M M"]:
    """Return ∂²a_ij/∂t_ik∂t_il at [i, j, k, l] for every row of A = softmax(T).

    With e the rows of I: a_j ((e_j − a)(e_j − a)ᵀ − (diag(a) − a aᵀ)).

    Source: SM.
    """
    deviation = torch.eye(A.shape[1], dtype=A.dtype) - A[:, None, :]
    spread = deviation[..., :, None] * deviation[..., None, :] - softmax_row_jacobians(A)[:, None]
    return A[:, :, None, None] * spread


def softmax_jacobian(T: Float[Tensor, "L M"]) -> Float[Tensor, "L*M L*M"]:
    """Return ∂A/∂T = blockdiag(diag(a_i) − a_i a_iᵀ), A the row-wise softmax of T. Source: G_Q."""
    return torch.block_diag(*softmax_row_jacobians(softmax(T)))


def softmax_hessian(T: Float[Tensor, "L M"]) -> Float[Tensor, "L*M*L*M L*M"]:
    """Return ∂²A/∂T², A the row-wise softmax of T; only derivatives within one row differ from zero. Source: SM."""
    L, M = T.shape
    H = T.new_zeros(L, M, L, M, L, M)
    row = torch.arange(L)
    # H[row, :, row, :, row, :] has the indexed axis first: exactly the layout of softmax_row_hessians.
    H[row, :, row, :, row, :] = softmax_row_hessians(softmax(T))
    return H.reshape(L * M * L * M, L * M)


def softmax_second_derivative_as_printed(a: Float[Tensor, " M"], j: int) -> Float[Tensor, "M M"]:
    """Return the paper's ∂²A_ij/∂T_i² = A_ij (2 a aᵀ + E_jj − diag(a) − e_j aᵀ − a e_jᵀ). It holds. Source: SM."""
    e_j = torch.zeros_like(a)
    e_j[j] = 1
    bracket = 2 * torch.outer(a, a) + torch.outer(e_j, e_j) - torch.diag(a) - torch.outer(e_j, a) - torch.outer(a, e_j)
    return a[j] * bracket


def uniform_softmax_jacobian_as_printed(L: int) -> Float[Tensor, "{L}*{L} {L}*{L}"]:
    """Return the paper's (1/L) I_L ⊗ (I_L − 11ᵀ/L), ∂A/∂T where attention is uniform.

    It holds there and nowhere else; the proof of T1 uses it for every A. The statement's `1/n` is read as 1/L.

    Source: G_Q (its uniform case).
    """
    I_L = torch.eye(L, dtype=torch.float64)
    return kron(I_L, I_L - 1 / L) / L
