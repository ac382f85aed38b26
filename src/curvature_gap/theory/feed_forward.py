"""The feed-forward layer σ(Y W_1 + b_1) W_2 + b_2: Jacobians and Hessians in Y, W_1, b_1, W_2, b_2.

σ enters through σ' and σ'' alone, so any smooth activation does; for ReLU σ'' = 0 almost everywhere. In the einsums i
is the token, f and g are hidden features, a and b input features, o and e output features, m and n tokens of Y.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvature_gap.matrix_calculus import (
    K_as_printed,
    eye,
    kron_left_jacobian,
    kron_right_jacobian,
    transpose_hessian,
    vec_r,
)
from curvature_gap.shapes import Float

ARGUMENTS = ("Y", "W_1", "b_1", "W_2", "b_2")


@dataclass(frozen=True)
class Activation:
    """An elementwise activation with its first two derivatives."""

    value: Callable[[Tensor], Tensor]
    first: Callable[[Tensor], Tensor]
    second: Callable[[Tensor], Tensor]


def _normal_density(u: Tensor) -> Tensor:
    return torch.exp(-u.square() / 2) / (2 * torch.pi) ** 0.5


def _normal_distribution(u: Tensor) -> Tensor:
    return (1 + torch.erf(u / 2**0.5)) / 2


ACTIVATIONS: dict[str, Activation] = {
    # At u = 0 the derivative is taken as 0, as torch does; the kink has measure zero.
    "relu": Activation(torch.relu, lambda u: (u > 0).to(u), torch.zeros_like),
    "tanh": Activation(
        torch.tanh, lambda u: 1 - torch.tanh(u).square(), lambda u: -2 * torch.tanh(u) * (1 - torch.tanh(u).square())
    ),
    "gelu": Activation(
        lambda u: u * _normal_distribution(u),
        lambda u: _normal_distribution(u) + u * _normal_density(u),
        lambda u: (2 - u.square()) * _normal_density(u),
    ),
}


def activation_derivatives(activation: str | Activation) -> Activation:
    """Return σ, σ' and σ'' for a name of `ACTIVATIONS`, or the given `Activation` itself.

    Raises:
        ValueError: If the name is unknown.
    """
    if isinstance(activation, Activation):
        return activation
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"Unknown activation {activation!r}; known are {', '.join(ACTIVATIONS)}. Pass an Activation for others."
        )
    return ACTIVATIONS[activation]


def relu_jacobian(X: Float[Tensor, "m n"]) -> Float[Tensor, "m*n m*n"]:
    """Return ∂ReLU(X)/∂X = diag(vec_r(1_{X>0})), almost everywhere; the second derivative is zero there.

    Source: L1.
    """
    return torch.diag(vec_r(X > 0).to(X))


def feed_forward_jacobian(
    Y: Float[Tensor, "L d_V"],
    W_1: Float[Tensor, "d_V d_ff"],
    W_2: Float[Tensor, "d_ff d_out"],
    name: str,
    b_1: Float[Tensor, " d_ff"] | None = None,
    activation: str | Activation = "relu",
) -> Float[Tensor, "L*d_out size"]:
    """Return ∂FFN/∂(argument) = σ'(U)∘∂U W_2 + σ(U) ∂W_2 + ∂b_2, U = Y W_1 + b_1.

    In the paper's letters, with D_σ = diag(vec_r σ'(U)): in W_1 it is B_1 = (I_L ⊗ W_2ᵀ) D_σ (Y ⊗ I_{d_ff}), in W_2
    B_2 = σ(U) ⊗ I_{d_V}, in Y it is J_SY − I = (I_L ⊗ W_2ᵀ) D_σ (I_L ⊗ W_1ᵀ).

    Args:
        Y: Tokens, one per row.
        W_1: First weight, used as `Y @ W_1`.
        W_2: Second weight.
        name: One of "Y", "W_1", "b_1", "W_2", "b_2".
        b_1: First bias; None is 0. The second bias does not enter any derivative.
        activation: A name of `ACTIVATIONS`, or an `Activation`.

    Raises:
        ValueError: If the name or the activation is unknown.

    Source: T4_appendix (corrected).
    """
    _check_names(name)
    sigma = activation_derivatives(activation)
    U = Y @ W_1 if b_1 is None else Y @ W_1 + b_1
    I_out = torch.eye(W_2.shape[1], dtype=Y.dtype)
    if name == "Y":
        return torch.block_diag(*torch.einsum("if,fo,af->ioa", sigma.first(U), W_2, W_1))
    if name == "W_1":
        J = torch.einsum("if,fo,ia->ioaf", sigma.first(U), W_2, Y)
    elif name == "b_1":
        J = torch.einsum("if,fo->iof", sigma.first(U), W_2)
    elif name == "W_2":
        J = torch.einsum("if,oe->iofe", sigma.value(U), I_out)
    else:
        J = I_out.expand(Y.shape[0], -1, -1)
    return J.reshape(Y.shape[0] * W_2.shape[1], -1)


def feed_forward_hessian(
    Y: Float[Tensor, "L d_V"],
    W_1: Float[Tensor, "d_V d_ff"],
    W_2: Float[Tensor, "d_ff d_out"],
    first: str,
    second: str,
    b_1: Float[Tensor, " d_ff"] | None = None,
    activation: str | Activation = "relu",
) -> Float[Tensor, "outputs_times_p q"]:
    """Return ∂²FFN/∂(first)∂(second), all 25 pairs.

    FFN_io = Σ_f σ(U_if) W_2,fo, and U_if = Σ_a Y_ia W_1,af + b_1,f is bilinear. Each line below is one product of
    the table: σ'' times two derivatives of U, σ' times the mixed derivative of U in Y and W_1, and σ' times a
    derivative of U times that of W_2. Arguments and errors as in `feed_forward_jacobian`.

    Source: T5_xi_11, T5_xi_22, T5_xi_12, T5_xi_21, T5_xi_1k, T5_xi_2k (corrected, for any σ).
    """
    _check_names(first, second)
    if ARGUMENTS.index(first) > ARGUMENTS.index(second):
        H = feed_forward_hessian(Y, W_1, W_2, second, first, b_1, activation)
        return transpose_hessian(H, H.shape[0] // (Y.shape[0] * W_2.shape[1]))
    sigma = activation_derivatives(activation)
    U = Y @ W_1 if b_1 is None else Y @ W_1 + b_1
    one, two = sigma.first(U), sigma.second(U)
    I_L, I_V, I_ff, I_out = (torch.eye(n, dtype=Y.dtype) for n in (*Y.shape, *W_2.shape))
    terms: dict[tuple[str, str], list[tuple[str, tuple[Tensor, ...]]]] = {
        ("Y", "Y"): [("if,fo,af,bf,im,in->iomanb", (two, W_2, W_1, W_1, I_L, I_L))],
        ("Y", "W_1"): [
            ("if,fo,af,ib,im->iomabf", (two, W_2, W_1, Y, I_L)),
            ("if,fo,ab,im->iomabf", (one, W_2, I_V, I_L)),
        ],
        ("Y", "b_1"): [("if,fo,af,im->iomaf", (two, W_2, W_1, I_L))],
        ("Y", "W_2"): [("if,af,oe,im->iomafe", (one, W_1, I_out, I_L))],
        ("W_1", "W_1"): [("if,fo,ia,ib,fg->ioafbg", (two, W_2, Y, Y, I_ff))],
        ("W_1", "b_1"): [("if,fo,ia,fg->ioafg", (two, W_2, Y, I_ff))],
        ("W_1", "W_2"): [("if,ia,fg,oe->ioafge", (one, Y, I_ff, I_out))],
        ("b_1", "b_1"): [("if,fo,fg->iofg", (two, W_2, I_ff))],
        ("b_1", "W_2"): [("if,fg,oe->iofge", (one, I_ff, I_out))],
    }
    size = {"Y": Y.numel(), "W_1": W_1.numel(), "b_1": W_1.shape[1], "W_2": W_2.numel(), "b_2": W_2.shape[1]}
    H = Y.new_zeros(Y.shape[0] * W_2.shape[1] * size[first], size[second])
    for subscripts, factors in terms.get((first, second), []):
        H += torch.einsum(subscripts, *factors).reshape(H.shape)
    return H


def _check_names(*names: str) -> None:
    for name in names:
        if name not in ARGUMENTS:
            raise ValueError(f"The feed-forward layer has the arguments {', '.join(ARGUMENTS)}, got {name!r}.")


# --- The paper's formulas ----------------------------------------------------------------------


def D_sigma(Y: Float[Tensor, "L d_V"], W_1: Float[Tensor, "d_V d_ff"]) -> Float[Tensor, "L*d_ff L*d_ff"]:
    """Return D_σ = diag(vec_r(1_{Y W_1 > 0})). Source: L1, T5_xi_12."""
    return relu_jacobian(Y @ W_1)


def I_kron_W_2T_jacobian(W_2: Float[Tensor, "d_ff d_V"], L: int) -> Tensor:
    """Return ∂(I_L ⊗ W_2ᵀ)/∂W_2 = (I_L ⊗ K_{d_V,L} ⊗ I_{d_ff})(vec_r I_L ⊗ I_{d_V d_ff}) K_{d_V,d_ff}.

    The proof of T5 prints K_{d_ff,d_V} at the end; PR9 for the d_ff × d_V matrix W_2 gives K_{d_V,d_ff}.

    Source: T5_xi_12 (corrected), P6, PR9.
    """
    d_ff, d_V = W_2.shape
    return kron_right_jacobian(eye(L), W_2.T) @ K_as_printed(d_V, d_ff)


def Y_kron_I_jacobian(Y: Float[Tensor, "L d"], n: int) -> Tensor:
    """Return ∂(Y ⊗ I_n)/∂Y = (I_L ⊗ K_{n,d} ⊗ I_n)(I_{Ld} ⊗ vec_r I_n). Source: P6, T5_xi_1k, T5_xi_2k."""
    return kron_left_jacobian(Y, eye(n))
