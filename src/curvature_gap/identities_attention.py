"""The attention layer and the Gauss–Newton split: GN1, OP, FN, G, SM, L2."""

from collections.abc import Callable

import torch
from torch import Tensor

from curvature_gap import maps
from curvature_gap.identity_rows import (
    Equation,
    Formula,
    Instance,
    Pair,
    Statement,
    attention_map,
    attention_weights,
    hessian_of,
    jacobian_of,
    supplied,
)
from curvature_gap.matrix_calculus import autodiff_hessian, autodiff_jacobian, eye, kron, multiply
from curvature_gap.statements import Row
from curvature_gap.theory import attention, loss, softmax

VV, QQ, VQ, QK = attention.PAIRS_AS_PRINTED
GN1_PAIRS: tuple[Pair, ...] = (VV, QK, ("W_K", "W_V"))
SUPPLIED_PAIRS: tuple[Pair, ...] = (("W_K", "W_K"), ("W_V", "W_K"), ("W_K", "W_Q"), ("W_Q", "W_V"), ("W_K", "W_V"))


def _labels(case: Instance) -> Tensor:
    return torch.arange(case.L) % case.d_V


def _GN1_equation(pair: Pair, name: str) -> Equation:
    """The attention layer under the mean squared error or, with its output as logits, under cross-entropy."""

    def criterion(case: Instance, F: Tensor) -> Tensor:
        return maps.mse(F, case.target) if name == "mse" else maps.cross_entropy(F, _labels(case))

    def derivatives(case: Instance) -> tuple[Tensor, ...]:
        """J_i, J_j and H_ij of F, then the loss's gradient and Hessian, all automatic."""
        F, w = attention_map(case), attention_weights(case)
        value = F(**w)
        gradient = autodiff_jacobian(lambda f: criterion(case, f), value)[0]
        curvature = autodiff_hessian(lambda f: criterion(case, f), value)
        return jacobian_of(F, w, pair[0]), jacobian_of(F, w, pair[1]), hessian_of(F, w, pair), gradient, curvature

    def ours(case: Instance) -> Tensor:
        F = maps.attention(*case.attention)
        if name == "mse":
            of_loss = loss.mse_gradient(F, case.target), loss.mse_hessian(F)
        else:
            of_loss = loss.cross_entropy_gradient(F, _labels(case)), loss.cross_entropy_hessian(F, _labels(case))
        J_i, J_j = (attention.attention_jacobian(*case.attention, name) for name in pair)
        H_ij = attention.attention_hessian(*case.attention, *pair)
        outer, functional = loss.gauss_newton_split(J_i, J_j, H_ij, *of_loss)
        return outer + functional

    def oracle(case: Instance) -> Tensor:
        F = attention_map(case)
        return hessian_of(lambda **w: criterion(case, F(**w)), attention_weights(case), pair)

    return Equation(
        f"{name}, {':'.join(pair)}", lambda c: loss.gauss_newton_as_printed(*derivatives(c)), oracle, (ours,)
    )


def _outer_product_equation(pair: Pair) -> Equation:
    """The oracle is the automatic Hessian of the loss whose target is F itself: there the functional part is zero."""

    def oracle(c: Instance) -> Tensor:
        F, w = attention_map(c), attention_weights(c)
        target = F(**w)
        return hessian_of(lambda **v: maps.mse(F(**v), target), w, pair)

    def ours(c: Instance) -> Tensor:
        J_i, J_j = (attention.attention_jacobian(*c.attention, name) for name in pair)
        return loss.outer_product_hessian(J_i, J_j, loss.mse_hessian(c.target))

    return Equation("", lambda c: attention.outer_product_hessian_as_printed(*c.attention, *pair), oracle, (ours,))


def _functional_oracle(pair: Pair) -> Formula:
    """The automatic Hessian of ⟨∂l/∂F, F(w)⟩ with ∂l/∂F held constant."""

    def oracle(c: Instance) -> Tensor:
        F, w = attention_map(c), attention_weights(c)
        gradient = 2 / c.target.numel() * (F(**w) - c.target)
        return hessian_of(lambda **v: (gradient * F(**v)).sum(), w, pair)

    return oracle


def _functional_equation(pair: Pair) -> Equation:
    def ours(c: Instance) -> Tensor:
        gradient = loss.mse_gradient(maps.attention(*c.attention), c.target)
        return loss.functional_hessian(attention.attention_hessian(*c.attention, *pair), gradient)

    def printed(c: Instance) -> Tensor:
        return attention.functional_hessian_as_printed(*c.attention, c.target, *pair)

    return Equation("", printed, _functional_oracle(pair), (ours,))


def _FN_QK_tight(c: Instance) -> Tensor:
    """The mixed term with `S ⊗ I_{d_K}` taken before the products to its left."""
    o = attention.attention_operators(*c.attention[:3])
    R = loss.residual_operator(c.target, c.d_V)
    I_V = eye(c.d_V)
    return multiply(R, kron(eye(c.L), c.weights["W_V"].T, I_V), kron(o.Z_1, I_V), kron(o.S, eye(c.d_K)))


def _at_attention(form: Callable[..., Tensor]) -> Formula:
    return lambda c: form(*c.attention)


def _G_equation(name: str, printed: Callable[..., Tensor], *more: Callable[..., Tensor]) -> Equation:
    return Equation(
        "",
        lambda c: printed(*c.attention),
        lambda c: jacobian_of(attention_map(c), attention_weights(c), name),
        (lambda c: attention.attention_jacobian(*c.attention, name), *(_at_attention(form) for form in more)),
    )


def _uniform_attention() -> Equation:
    """∂A/∂T where attention is uniform."""
    return Equation(
        "uniform attention",
        lambda c: softmax.uniform_softmax_jacobian_as_printed(c.L),
        lambda c: autodiff_jacobian(maps.softmax, torch.zeros(c.L, c.L, dtype=torch.float64)),
        (lambda c: softmax.softmax_jacobian(torch.zeros(c.L, c.L, dtype=torch.float64)),),
    )


def _logits(c: Instance) -> Tensor:
    return attention.attention_logits(*c.attention[:3])


def _SM() -> list[Equation]:
    def printed(c: Instance) -> Tensor:
        A = maps.softmax(_logits(c))
        formula = softmax.softmax_second_derivative_as_printed
        return torch.stack([torch.stack([formula(a, j) for j in range(c.L)]) for a in A])

    def oracle(c: Instance) -> Tensor:
        L, T = c.L, _logits(c)
        return torch.stack([autodiff_hessian(maps.softmax, t[None]).reshape(L, L, L) for t in T])

    return [Equation("", printed, oracle, (lambda c: softmax.softmax_row_hessians(maps.softmax(_logits(c))),))]


def _Phi_equation(pair: Pair) -> Equation:
    return Equation(
        "",
        lambda c: attention.Phi_as_printed(*c.attention, *pair),
        lambda c: hessian_of(attention_map(c), attention_weights(c), pair),
        (
            lambda c: attention.attention_hessian(*c.attention, *pair),
            lambda c: attention.Phi_corrected(*c.attention, *pair),
        ),
    )


def _supplied_equation(pair: Pair) -> Equation:
    def ours(c: Instance) -> Tensor:
        return attention.attention_hessian(*c.attention, *pair)

    def oracle(c: Instance) -> Tensor:
        return hessian_of(attention_map(c), attention_weights(c), pair)

    return Equation(":".join(pair), ours, oracle, (ours,))


STATEMENTS: dict[str, Statement] = {
    "GN1": Statement([_GN1_equation(pair, name) for pair in GN1_PAIRS for name in ("mse", "cross-entropy")]),
    "OP_VV": Statement([_outer_product_equation(VV)]),
    "OP_QQ": Statement([_outer_product_equation(QQ)]),
    "OP_VQ": Statement([_outer_product_equation(VQ)]),
    "OP_QK": Statement([_outer_product_equation(QK)]),
    "FN_VV": Statement([_functional_equation(VV)]),
    "FN_QQ": Statement([_functional_equation(QQ)]),
    "FN_VQ": Statement([_functional_equation(VQ)], "S is d_V³ × d_V; the stated d_V² × d_V is a misprint."),
    "FN_QK": Statement(
        [_functional_equation(QK)],
        "S is d_V³ × d_V; the stated d_V² × d_V is a misprint.",
        reading="the last ⊗ I_{d_K} takes the whole product",
        other_readings={"the last ⊗ I_{d_K} takes S alone": [Equation("", _FN_QK_tight, _functional_oracle(QK), ())]},
    ),
    "G_V": Statement([_G_equation("W_V", attention.G_V_as_printed)]),
    "G_Q": Statement(
        [_G_equation("W_Q", attention.G_Q_as_printed), _uniform_attention()], "The uniform case's 1/n is read as 1/L."
    ),
    "G_K": Statement(
        [_G_equation("W_K", attention.G_K_as_printed, attention.G_K_corrected)],
        "K_{d_V d_K} under D3; PR9 needs K_{d_K,d_V}, as OP's (Q, K) block prints.",
        remarks={"With K_{d_K,d_V}": [_G_equation("W_K", attention.G_K_corrected)]},
    ),
    "SM": Statement(_SM()),
    "L2_VV": Statement([_Phi_equation(VV)]),
    "L2_QQ": Statement([_Phi_equation(QQ)], "The loss's factor 2/(L d_V) is left in; right: 1/d_K."),
    "L2_VQ": Statement([_Phi_equation(VQ)], "The loss's factor 2/(L d_V) is left in; right: 1/√d_K."),
    "L2_QK": Statement(
        [_Phi_equation(QK)],
        "I_{d_V} where FN has I_L, and the loss's factor 2/(L d_V) left in; right: 1/d_K, 1/√d_K and I_L.",
    ),
}

ROWS: dict[str, Callable[[], Row]] = {
    "L2_supplied": lambda: supplied(
        "L2_supplied",
        [_supplied_equation(pair) for pair in SUPPLIED_PAIRS],
        "Φ_KK, Φ_VK, Φ_KQ, Φ_QV, Φ_KV have no formula in the paper; supplied. The remark in T5's proof that Φ_VQ "
        "vanishes for uniform attention is false: (1/√d_K)(I_L ⊗ S) Z_1 (I ⊗ W_K) does not vanish at W_Q = 0.",
    ),
}
