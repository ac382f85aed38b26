"""The losses, and the split of a loss Hessian into outer-product (Gauss–Newton) and functional part."""

import torch
from torch import Tensor

from curvature_gap.matrix_calculus import kron, vec_r
from curvature_gap.shapes import Float, Int


def mse_gradient(output: Float[Tensor, "L d"], target: Float[Tensor, "L d"]) -> Float[Tensor, " L*d"]:
    """Return ∂l/∂F = 2/(L d) vec_r(F − Target) for l = ‖F − Target‖_F²/(L d). Source: GN1, GN2."""
    return 2 / output.numel() * vec_r(output - target)


def mse_hessian(output: Float[Tensor, "L d"]) -> Float[Tensor, "L*d L*d"]:
    """Return ∂²l/∂F² = 2/(L d) I for l = ‖F − Target‖_F²/(L d). Source: GN1, GN2."""
    return 2 / output.numel() * torch.eye(output.numel(), dtype=output.dtype)


def cross_entropy_gradient(logits: Float[Tensor, "b c"], labels: Int[Tensor, " b"]) -> Float[Tensor, " b*c"]:
    """Return the gradient of the mean cross-entropy in the logits: (softmax − one-hot)/b.

    Raises:
        ValueError: If a label is not one of the c classes.
    """
    _check_labels(logits, labels)
    one_hot = torch.nn.functional.one_hot(labels, logits.shape[1]).to(logits)
    return vec_r(torch.softmax(logits, dim=1) - one_hot) / logits.shape[0]


def cross_entropy_hessian(logits: Float[Tensor, "b c"], labels: Int[Tensor, " b"]) -> Float[Tensor, "b*c b*c"]:
    """Return the Hessian of the mean cross-entropy in the logits: blockdiag(diag(π) − π πᵀ)/b, whatever the labels.

    Raises:
        ValueError: If a label is not one of the c classes.
    """
    _check_labels(logits, labels)
    pi = torch.softmax(logits, dim=1)
    return torch.block_diag(*(torch.diag_embed(pi) - pi[:, :, None] * pi[:, None, :])) / logits.shape[0]


def _check_labels(logits: Tensor, labels: Tensor) -> None:
    c = logits.shape[1]
    if labels.min() < 0 or labels.max() >= c:
        raise ValueError(f"Labels lie in [{labels.min()}, {labels.max()}], but the logits have classes 0 to {c - 1}.")


def residual_operator(residual: Float[Tensor, "L d"], m: int) -> Float[Tensor, "{m} {m}*L*d"]:
    """Return R_m = vec_r(F − Target)ᵀ ⊗ I_m. The mean squared error needs the factor 2/(L d) besides.

    Source: FN, GN2.
    """
    return kron(vec_r(residual)[None, :], torch.eye(m, dtype=residual.dtype))


def outer_product_hessian(
    J_i: Float[Tensor, "n p"], J_j: Float[Tensor, "n q"], loss_hessian: Float[Tensor, "n n"]
) -> Float[Tensor, "p q"]:
    """Return H_o = (∂f/∂W_i)ᵀ (∂²l/∂f²) (∂f/∂W_j). Source: GN1."""
    return J_i.T @ loss_hessian @ J_j


def functional_hessian(H_ij: Float[Tensor, "np q"], loss_gradient: Float[Tensor, " n"]) -> Float[Tensor, "p q"]:
    """Return H_f = (∂l/∂f ⊗ I_p) ∂²f/∂W_i∂W_j, a sum over the outputs. Source: GN1."""
    n, q = loss_gradient.numel(), H_ij.shape[1]
    return (loss_gradient @ H_ij.reshape(n, -1)).reshape(-1, q)


def gauss_newton_split(
    J_i: Float[Tensor, "n p"],
    J_j: Float[Tensor, "n q"],
    H_ij: Float[Tensor, "n*p q"],
    loss_gradient: Float[Tensor, " n"],
    loss_hessian: Float[Tensor, "n n"],
) -> tuple[Float[Tensor, "p q"], Float[Tensor, "p q"]]:
    """Return (H_o, H_f), whose sum is the block ∂²(l∘f)/∂W_i∂W_j of the loss Hessian. Source: GN1, GN2."""
    return outer_product_hessian(J_i, J_j, loss_hessian), functional_hessian(H_ij, loss_gradient)


def gauss_newton_as_printed(
    J_i: Float[Tensor, "n p"],
    J_j: Float[Tensor, "n q"],
    H_ij: Float[Tensor, "n*p q"],
    loss_gradient: Float[Tensor, " n"],
    loss_hessian: Float[Tensor, "n n"],
) -> Float[Tensor, "p q"]:
    """Return the paper's (∂f/∂W_i)ᵀ (∂²L/∂f²) (∂f/∂W_j) + (∂L/∂f ⊗ I_{p_i q_i}) ∂²f/∂W_i∂W_j. It holds. Source: GN1."""
    I_p = torch.eye(J_i.shape[1], dtype=J_i.dtype)
    return J_i.T @ loss_hessian @ J_j + kron(loss_gradient[None, :], I_p) @ H_ij


def block_gauss_newton_as_printed(
    J_i: Float[Tensor, "n p"],
    J_j: Float[Tensor, "n q"],
    H_ij: Float[Tensor, "n*p q"],
    residual: Float[Tensor, "L d"],
    R_factor: float,
) -> Float[Tensor, "p q"]:
    """Return the paper's GN2, (∂Z/∂W_i)ᵀ 2/(L d_V) (∂Z/∂W_j) + (∂l/∂Z ⊗ I) H_tr with ∂l/∂Z ⊗ I = R_factor · R_m^tr.

    R_factor = 1 is the formula to the letter; 2/(L d_V) reads "calculated similarly to R_m", which stands behind that
    factor in FN. Only the second holds. The loss is named ‖· − Target‖² there, whose second derivative would be 2.

    Source: GN2.
    """
    R = residual_operator(residual, J_i.shape[1])
    return 2 / residual.numel() * J_i.T @ J_j + R_factor * R @ H_ij
