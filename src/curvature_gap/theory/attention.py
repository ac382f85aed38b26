"""Single-head self-attention F = A X W_V: Jacobians and Hessians in X, W_Q, W_K, W_V, and the paper's blocks.

T = X W_Q W_Kᵀ Xᵀ/√d_K, A = softmax(T), V = X W_V. Arguments are named "X", "W_Q", "W_K", "W_V". In the einsums i is
the querying token, j and k attended tokens, o an output feature, p and q entries of the two arguments.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from curvature_gap.maps import softmax
from curvature_gap.matrix_calculus import K_as_printed, add, eye, kron, multiply, vec_r
from curvature_gap.shapes import Float
from curvature_gap.theory.loss import residual_operator
from curvature_gap.theory.softmax import softmax_hessian, softmax_jacobian, softmax_row_hessians, softmax_row_jacobians

ARGUMENTS = ("X", "W_Q", "W_K", "W_V")
PAIRS_AS_PRINTED = (("W_V", "W_V"), ("W_Q", "W_Q"), ("W_V", "W_Q"), ("W_Q", "W_K"))


def attention_logits(X: Float[Tensor, "L d_V"], W_Q: Tensor, W_K: Tensor) -> Float[Tensor, "L L"]:
    """Return T = X W_Q W_Kᵀ Xᵀ/√d_K. Source: notation."""
    return X @ W_Q @ (X @ W_K).T / W_Q.shape[1] ** 0.5


def attention_jacobian(
    X: Float[Tensor, "L d_V"],
    W_Q: Float[Tensor, "d_V d_K"],
    W_K: Float[Tensor, "d_V d_K"],
    W_V: Float[Tensor, "d_V d_out"],
    name: str,
) -> Float[Tensor, "L*d_out size"]:
    """Return ∂F/∂(argument): ∂F = ∂A V + A ∂V, with ∂a_i = (∂a_i/∂t_i) ∂t_i.

    Args:
        X: Tokens, one per row.
        W_Q: Queries' weight.
        W_K: Keys' weight.
        W_V: Values' weight; it need not be square.
        name: One of "X", "W_Q", "W_K", "W_V".

    Raises:
        ValueError: If the name is none of these.

    Source: G_V, G_Q, G_K (corrected).
    """
    _check_names(name)
    arguments = {"X": X, "W_Q": W_Q, "W_K": W_K, "W_V": W_V}
    V, A = X @ W_V, softmax(attention_logits(X, W_Q, W_K))
    dA = torch.einsum("ijk,ikp->ijp", softmax_row_jacobians(A), _logit_derivative(arguments, name))
    J = torch.einsum("ijp,jo->iop", dA, V) + torch.einsum("ij,jop->iop", A, _value_derivative(arguments, name))
    return J.reshape(V.numel(), -1)


def attention_hessian(
    X: Float[Tensor, "L d_V"],
    W_Q: Float[Tensor, "d_V d_K"],
    W_K: Float[Tensor, "d_V d_K"],
    W_V: Float[Tensor, "d_V d_out"],
    first: str,
    second: str,
) -> Float[Tensor, "outputs_times_p q"]:
    """Return ∂²F/∂(first)∂(second), all 16 pairs: the product rule on F = A V and the chain rule on A = softmax(T).

    F_pq = A_pq V + A_p V_q + A_q V_p + A V_pq, with A_pq = (∂²a/∂t²)[T_p, T_q] + (∂a/∂t) T_pq per row.
    Arguments and errors as in `attention_jacobian`.

    Source: L2_VV, L2_QQ, L2_VQ, L2_QK (corrected), and the pairs the paper leaves out, L2_supplied.
    """
    _check_names(first, second)
    arguments = {"X": X, "W_Q": W_Q, "W_K": W_K, "W_V": W_V}
    V, A = X @ W_V, softmax(attention_logits(X, W_Q, W_K))
    softmax_1, softmax_2 = softmax_row_jacobians(A), softmax_row_hessians(A)
    T_p, T_q = _logit_derivative(arguments, first), _logit_derivative(arguments, second)
    V_p, V_q = _value_derivative(arguments, first), _value_derivative(arguments, second)
    T_pq = _logit_second_derivative(arguments, first, second)
    A_p, A_q = (torch.einsum("ijk,ikp->ijp", softmax_1, dT) for dT in (T_p, T_q))
    # Weighted by the values first: the (L, L, p, q) second derivative of A is never formed.
    curvature = torch.einsum("ijkl,jo->iokl", softmax_2, V)
    H = torch.einsum("iokl,ikp,ilq->iopq", curvature, T_p, T_q)
    H += torch.einsum("ijk,jo,ikpq->iopq", softmax_1, V, T_pq)
    H += torch.einsum("ijp,joq->iopq", A_p, V_q) + torch.einsum("ijq,jop->iopq", A_q, V_p)
    if {first, second} == {"X", "W_V"}:
        H += torch.einsum("ij,jopq->iopq", A, _value_second_derivative(arguments, first))
    return H.reshape(-1, T_q.shape[-1])


def _check_names(*names: str) -> None:
    for name in names:
        if name not in ARGUMENTS:
            raise ValueError(f"Attention has the arguments {', '.join(ARGUMENTS)}, got {name!r}.")


def _logit_derivative(arguments: dict[str, Tensor], name: str) -> Tensor:
    """Return ∂T_ij/∂(argument)_p at [i, j, p]; T_ij = x_iᵀ W_Q W_Kᵀ x_j/√d_K."""
    X, W_Q, W_K = arguments["X"], arguments["W_Q"], arguments["W_K"]
    L = X.shape[0]
    Q, K, I_L = X @ W_Q, X @ W_K, torch.eye(L, dtype=X.dtype)
    if name == "W_V":
        return X.new_zeros(L, L, arguments["W_V"].numel())
    if name == "W_Q":
        J = torch.einsum("ia,jc->ijac", X, K)
    elif name == "W_K":
        J = torch.einsum("ic,ja->ijac", Q, X)
    else:
        J = torch.einsum("im,ja->ijma", I_L, K @ W_Q.T) + torch.einsum("jm,ia->ijma", I_L, Q @ W_K.T)
    return J.reshape(L, L, -1) / W_Q.shape[1] ** 0.5


def _logit_second_derivative(arguments: dict[str, Tensor], first: str, second: str) -> Tensor:
    """Return ∂²T_ij/∂(first)_p∂(second)_q at [i, j, p, q]."""
    if ARGUMENTS.index(first) > ARGUMENTS.index(second):
        return _logit_second_derivative(arguments, second, first).transpose(2, 3)
    X, W_Q, W_K = arguments["X"], arguments["W_Q"], arguments["W_K"]
    (L, d_V), d_K = X.shape, W_Q.shape[1]
    Q, K = X @ W_Q, X @ W_K
    I_L, I_V, I_K = (torch.eye(n, dtype=X.dtype) for n in (L, d_V, d_K))
    if (first, second) == ("W_Q", "W_K"):
        H = torch.einsum("ia,jb,ce->ijaceb", X, X, I_K).transpose(4, 5)
    elif (first, second) == ("X", "W_Q"):
        H = torch.einsum("im,ab,jc->ijmabc", I_L, I_V, K) + torch.einsum("jm,ib,ac->ijmabc", I_L, X, W_K)
    elif (first, second) == ("X", "W_K"):
        H = torch.einsum("jm,ab,ic->ijmabc", I_L, I_V, Q) + torch.einsum("im,jb,ac->ijmabc", I_L, X, W_Q)
    elif (first, second) == ("X", "X"):
        N = W_Q @ W_K.T
        H = torch.einsum("im,jn,ab->ijmanb", I_L, I_L, N) + torch.einsum("jm,in,ba->ijmanb", I_L, I_L, N)
    else:
        return X.new_zeros(L, L, arguments[first].numel(), arguments[second].numel())
    return H.reshape(L, L, arguments[first].numel(), arguments[second].numel()) / d_K**0.5


def _value_derivative(arguments: dict[str, Tensor], name: str) -> Tensor:
    """Return ∂V_jo/∂(argument)_p at [j, o, p]; V = X W_V."""
    X, W_V = arguments["X"], arguments["W_V"]
    L, d_out = X.shape[0], W_V.shape[1]
    if name == "W_V":
        J = torch.einsum("jb,oe->jobe", X, torch.eye(d_out, dtype=X.dtype))
    elif name == "X":
        J = torch.einsum("jm,ao->joma", torch.eye(L, dtype=X.dtype), W_V)
    else:
        return X.new_zeros(L, d_out, arguments[name].numel())
    return J.reshape(L, d_out, -1)


def _value_second_derivative(arguments: dict[str, Tensor], first: str) -> Tensor:
    """Return ∂²V_jo/∂X∂W_V at [j, o, p, q], or ∂²V_jo/∂W_V∂X where `first` is "W_V"."""
    X, W_V = arguments["X"], arguments["W_V"]
    (L, d_V), d_out = X.shape, W_V.shape[1]
    identities = (torch.eye(n, dtype=X.dtype) for n in (L, d_V, d_out))
    H = torch.einsum("jm,ab,oe->jomabe", *identities).reshape(L, d_out, X.numel(), W_V.numel())
    return H if first == "X" else H.transpose(2, 3)


# --- The paper's operators and formulas --------------------------------------------------------


class AttentionOperators(NamedTuple):
    """M_1 = A X, Z_1 and Z_2 of Ormaniec et al., S, and ∂A/∂T. S has shape d_V³ × d_V; the paper prints d_V² × d_V."""

    M_1: Tensor
    Z_1: Tensor
    Z_2: Tensor
    S: Tensor
    dA_dT: Tensor


def attention_operators(X: Float[Tensor, "L d_V"], W_Q: Tensor, W_K: Tensor) -> AttentionOperators:
    """Return M_1, Z_1 = (I_L ⊗ Xᵀ)(∂A/∂T)(X ⊗ X), Z_2 = (I_L ⊗ Xᵀ ⊗ Xᵀ ⊗ Xᵀ)(∂²A/∂T²)(X ⊗ X) and S.

    S = (I ⊗ K_{d_V,d_V})(vec_r I ⊗ I) = [e_a ⊗ e_c ⊗ e_a summed over a] in column c.

    Source: OP, FN.
    """
    L, d_V = X.shape
    T = attention_logits(X, W_Q, W_K)
    dA_dT = softmax_jacobian(T)
    XT = X.T
    Z_1 = kron(eye(L), XT) @ dA_dT @ kron(X, X)
    Z_2 = kron(eye(L), XT, XT, XT) @ softmax_hessian(T) @ kron(X, X)
    S = kron(eye(d_V), K_as_printed(d_V, d_V)) @ kron(vec_r(eye(d_V))[:, None], eye(d_V))
    return AttentionOperators(softmax(T) @ X, Z_1, Z_2, S, dA_dT)


def G_V_as_printed(X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor) -> Tensor:
    """Return the paper's ∂F/∂W_V = A X ⊗ I_{d_V}. It holds. Source: G_V."""
    return kron(attention_operators(X, W_Q, W_K).M_1, eye(W_V.shape[1]))


def G_Q_as_printed(X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor) -> Tensor:
    """Return the paper's ∂F/∂W_Q = (I_L ⊗ W_Vᵀ Xᵀ)(∂A/∂T)(X ⊗ X W_K)/√d_K. It holds. Source: G_Q."""
    L, d_K = X.shape[0], W_Q.shape[1]
    dA_dT = softmax_jacobian(attention_logits(X, W_Q, W_K))
    return multiply(kron(eye(L), (X @ W_V).T), dA_dT, kron(X, X @ W_K)) / d_K**0.5


def G_K_as_printed(X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor) -> Tensor:
    """Return the paper's ∂F/∂W_K = (I_L ⊗ W_Vᵀ Xᵀ)(∂A/∂T)(X W_Q ⊗ X) K_{d_V,d_K}/√d_K.

    Wrong unless d_V = d_K. T = (X W_Q) W_Kᵀ Xᵀ needs ∂W_Kᵀ/∂W_K, which by PR9 is K_{d_K,d_V} for the d_V × d_K
    matrix W_K; the printed K_{d_V,d_K} is its inverse. OP's block (Q, K) prints K_{d_K,d_V}, correctly.

    Source: G_K.
    """
    d_V, d_K = W_K.shape
    return _G_K(X, W_Q, W_K, W_V, K_as_printed(d_V, d_K))


def G_K_corrected(X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor) -> Tensor:
    """Return ∂F/∂W_K = (I_L ⊗ W_Vᵀ Xᵀ)(∂A/∂T)(X W_Q ⊗ X) K_{d_K,d_V}/√d_K. Source: G_K (corrected), PR9."""
    d_V, d_K = W_K.shape
    return _G_K(X, W_Q, W_K, W_V, K_as_printed(d_K, d_V))


def _G_K(X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, K: Tensor) -> Tensor:
    L, d_K = X.shape[0], W_Q.shape[1]
    dA_dT = softmax_jacobian(attention_logits(X, W_Q, W_K))
    return multiply(kron(eye(L), (X @ W_V).T), dA_dT, kron(X @ W_Q, X), K) / d_K**0.5


def outer_product_hessian_as_printed(
    X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, first: str, second: str
) -> Tensor:
    """Return the paper's H_o of the attention layer under the mean squared error; the four printed pairs hold.

    Raises:
        ValueError: If the paper prints no formula for the pair.

    Source: OP_VV, OP_QQ, OP_VQ, OP_QK.
    """
    (L, d_V), d_K = X.shape, W_Q.shape[1]
    o = attention_operators(X, W_Q, W_K)
    I_V = eye(d_V)
    middle = kron(eye(L), W_V @ W_V.T)
    match first, second:
        case "W_V", "W_V":
            return 2 / (L * d_V) * kron(o.M_1.T @ o.M_1, I_V)
        case "W_Q", "W_Q":
            scale = 2 / (L * d_V * d_K)
            return scale * multiply(kron(I_V, W_K.T), o.Z_1.T, middle, o.Z_1, kron(I_V, W_K))
        case "W_V", "W_Q":
            scale = 2 / (L * d_V * d_K**0.5)
            return scale * multiply(kron(o.M_1.T, W_V.T), o.Z_1, kron(I_V, W_K))
        case "W_Q", "W_K":
            scale, K = 2 / (L * d_V * d_K), K_as_printed(d_K, d_V)
            return scale * multiply(kron(I_V, W_K.T), o.Z_1.T, middle, o.Z_1, kron(W_Q, I_V), K)
    raise ValueError(f"The paper prints no outer-product block ({first}, {second}); it prints {PAIRS_AS_PRINTED}.")


def functional_hessian_as_printed(
    X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, target: Tensor, first: str, second: str
) -> Tensor:
    """Return the paper's H_f of the attention layer under the mean squared error; the four printed pairs hold.

    In (Q, K) the last `⊗ I_{d_K}` is read as taking the whole product before it; taken with S alone the factors do
    not fit. S is taken as its formula says, d_V³ × d_V, not the printed d_V² × d_V.

    Raises:
        ValueError: If the paper prints no formula for the pair.

    Source: FN_VV, FN_QQ, FN_VQ, FN_QK.
    """
    (L, d_V), d_K = X.shape, W_Q.shape[1]
    o = attention_operators(X, W_Q, W_K)
    residual = o.M_1 @ W_V - target
    I_V = eye(d_V)
    left = kron(eye(L), W_V.T, I_V, W_K.T)
    match first, second:
        case "W_V", "W_V":
            return torch.zeros(d_V**2, d_V**2, dtype=X.dtype)
        case "W_Q", "W_Q":
            R = residual_operator(residual, d_V * d_K)
            return 2 / (L * d_V * d_K) * multiply(R, left, o.Z_2, kron(I_V, W_K))
        case "W_V", "W_Q":
            R = residual_operator(residual, d_V**2)
            return 2 / (L * d_V * d_K**0.5) * multiply(R, kron(eye(L), o.S), o.Z_1, kron(I_V, W_K))
        case "W_Q", "W_K":
            R, K = residual_operator(residual, d_V * d_K), K_as_printed(d_K, d_V)
            curved = 2 / (L * d_V * d_K) * multiply(R, left, o.Z_2, kron(W_Q, I_V), K)
            R_V = residual_operator(residual, d_V)
            mixed = multiply(R_V, kron(eye(L), W_V.T, I_V), kron(o.Z_1, I_V), o.S)
            return add(curved, 2 / (L * d_V * d_K**0.5) * kron(mixed, eye(d_K)))
    raise ValueError(f"The paper prints no functional block ({first}, {second}); it prints {PAIRS_AS_PRINTED}.")


def Phi_as_printed(X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, first: str, second: str) -> Tensor:
    """Return the paper's Φ = ∂²F/∂W_i∂W_j (Lemma L2).

    Wrong but for Φ_VV = 0. The lemma takes R_m off the blocks FN but leaves their factor 2/(L d_V), which belongs to
    the loss ‖F − Target‖²/(L d_V) and not to F (the lemma's own loss ½‖F − Target‖² has factor 1). Φ_QK has besides
    I_{d_V} where FN has I_L, so that its factors do not fit unless L = d_V. See `Phi_corrected`.

    Raises:
        ShapeMismatchError: For (W_Q, W_K) wherever L ≠ d_V.
        ValueError: If the paper prints no formula for the pair.

    Source: L2_VV, L2_QQ, L2_VQ, L2_QK.
    """
    L, d_V = X.shape
    return _Phi(X, W_Q, W_K, W_V, first, second, loss_factor=2 / (L * d_V), leading=d_V)


def Phi_corrected(X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, first: str, second: str) -> Tensor:
    """Return Φ = ∂²F/∂W_i∂W_j in the paper's operators, corrected.

    Φ_QQ = (1/d_K)(I_L ⊗ W_Vᵀ ⊗ I ⊗ W_Kᵀ) Z_2 (I ⊗ W_K):  G_Q = (1/√d_K)(I_L ⊗ W_VᵀXᵀ)(∂A/∂T)(X ⊗ XW_K), and
    vec_r(A B C) = (A ⊗ Cᵀ) vec_r B with B = ∂A/∂T, whose derivative is (∂²A/∂T²)(X ⊗ XW_K)/√d_K.
    Φ_VQ = (1/√d_K)(I_L ⊗ S) Z_1 (I ⊗ W_K):  G_V = M_1 ⊗ I, ∂M_1/∂W_Q = Z_1(I ⊗ W_K)/√d_K, and P6.
    Φ_QK = (1/d_K)(I_L ⊗ W_Vᵀ ⊗ I ⊗ W_Kᵀ) Z_2 (W_Q ⊗ I) K_{d_K,d_V}
           + (1/√d_K) ((I_L ⊗ W_Vᵀ ⊗ I)(Z_1 ⊗ I) S) ⊗ I_{d_K}:  the first as Φ_QQ with ∂T/∂W_K, the second from
    ∂(I ⊗ W_K)/∂W_K = S ⊗ I_{d_K} (P6).

    Source: L2_QQ, L2_VQ, L2_QK (corrected).
    """
    return _Phi(X, W_Q, W_K, W_V, first, second, loss_factor=1.0, leading=X.shape[0])


def _Phi(
    X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, first: str, second: str, loss_factor: float, leading: int
) -> Tensor:
    (L, d_V), d_K = X.shape, W_Q.shape[1]
    o = attention_operators(X, W_Q, W_K)
    I_V = eye(d_V)
    left = kron(eye(L), W_V.T, I_V, W_K.T)
    match first, second:
        case "W_V", "W_V":
            return torch.zeros(L * d_V**3, d_V**2, dtype=X.dtype)
        case "W_Q", "W_Q":
            return loss_factor / d_K * multiply(left, o.Z_2, kron(I_V, W_K))
        case "W_V", "W_Q":
            return loss_factor / d_K**0.5 * multiply(kron(eye(L), o.S), o.Z_1, kron(I_V, W_K))
        case "W_Q", "W_K":
            curved = loss_factor / d_K * multiply(left, o.Z_2, kron(W_Q, I_V), K_as_printed(d_K, d_V))
            mixed = multiply(kron(eye(leading), W_V.T, I_V), kron(o.Z_1, I_V), o.S)
            return add(curved, loss_factor / d_K**0.5 * kron(mixed, eye(d_K)))
    raise ValueError(f"The paper prints no Φ for ({first}, {second}); it prints {PAIRS_AS_PRINTED}.")
