"""The transformer block: GN2, T4, T5."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from curvature_gap import maps
from curvature_gap.identity_rows import (
    Equation,
    Formula,
    Instance,
    Pair,
    S_map,
    Statement,
    Y_map,
    block_map,
    hessian_of,
    jacobian_of,
    supplied,
)
from curvature_gap.matrix_calculus import autodiff_jacobian, multiply, transpose_hessian
from curvature_gap.statements import Row
from curvature_gap.theory import attention, block, loss

GN2_PAIRS: tuple[Pair, ...] = (("W_1", "W_2"), ("W_Q", "W_1"), ("W_V", "W_V"), ("W_2", "W_K"))
KL_PAIRS: tuple[Pair, ...] = tuple((k, m) for k in block.ATTENTION_WEIGHTS for m in block.ATTENTION_WEIGHTS)
MIXED_PAIRS: tuple[Pair, ...] = (("W_1", "W_2"), ("W_1", "W_Q"), ("W_2", "W_V"), ("W_Q", "W_K"), ("W_V", "W_K"))
SAMPLE_PAIRS: tuple[Pair, ...] = (("W_1", "W_1"), ("W_2", "W_1"), ("W_1", "W_K"), ("W_V", "W_2"), ("W_Q", "W_V"))


def _GN2_equation(pair: Pair, normalised_loss: bool, R_factor: Callable[[Instance], float]) -> Equation:
    def printed(c: Instance) -> Tensor:
        Z, w = block_map(c), c.weights
        J_i, J_j = jacobian_of(Z, w, pair[0]), jacobian_of(Z, w, pair[1])
        residual = Z(**w) - c.target
        return loss.block_gauss_newton_as_printed(J_i, J_j, hessian_of(Z, w, pair), residual, R_factor(c))

    def ours(c: Instance) -> Tensor:
        b = c.block
        gradient, curvature = loss.mse_gradient(b.Z, c.target), loss.mse_hessian(b.Z)
        J_i, J_j = b.jacobian(pair[0]), b.jacobian(pair[1])
        outer, functional = loss.gauss_newton_split(J_i, J_j, b.hessian(*pair), gradient, curvature)
        return outer + functional

    def oracle(c: Instance) -> Tensor:
        Z = block_map(c)
        scale = 1 if normalised_loss else c.target.numel()
        return scale * hessian_of(lambda **w: maps.mse(Z(**w), c.target), c.weights, pair)

    return Equation(":".join(pair), printed, oracle, (ours,) if normalised_loss else ())


def _GN2(normalised_loss: bool, R_factor: Callable[[Instance], float]) -> list[Equation]:
    return [_GN2_equation(pair, normalised_loss, R_factor) for pair in GN2_PAIRS]


def _T4_main() -> list[Equation]:
    """The printed products, every factor by automatic differentiation."""

    def J_Z(c: Instance) -> Tensor:
        return autodiff_jacobian(maps.layer_norm, S_map(c)(**c.weights))

    def J_SY(c: Instance) -> Tensor:
        W_1, W_2 = c.weights["W_1"], c.weights["W_2"]
        return autodiff_jacobian(lambda Y: Y + maps.feed_forward(Y, W_1, W_2), Y_map(c)(**c.weights))

    def equation(name: str) -> Equation:
        def printed(c: Instance) -> Tensor:
            if name in block.FEED_FORWARD_WEIGHTS:
                return multiply(J_Z(c), jacobian_of(S_map(c), c.weights, name))
            return multiply(J_Z(c), J_SY(c), jacobian_of(Y_map(c), c.weights, name))

        return Equation(name, printed, lambda c: jacobian_of(block_map(c), c.weights, name), (_ours_jacobian(name),))

    return [equation(name) for name in block.WEIGHTS]


def _ours_jacobian(name: str) -> Formula:
    return lambda c: c.block.jacobian(name)


def _T4_appendix_equations(mask: Formula) -> list[Equation]:
    def equation(name: str) -> Equation:
        return Equation(
            name,
            lambda c: block.block_jacobian_as_printed(c.block, name, mask(c)),
            lambda c: jacobian_of(block_map(c), c.weights, name),
            (_ours_jacobian(name),),
        )

    return [equation(name) for name in block.WEIGHTS]


def _at_block(form: Callable[[block.Block], Tensor]) -> Formula:
    return lambda c: form(c.block)


def _xi_equation(
    pair: Pair, printed: Callable[[block.Block], Tensor], *more: Callable[[block.Block], Tensor]
) -> Equation:
    return Equation(
        ":".join(pair),
        _at_block(printed),
        lambda c: hessian_of(S_map(c), c.weights, pair),
        (lambda c: c.block.xi(*pair), *(_at_block(form) for form in more)),
    )


def _zero_xi(pair: Pair) -> Callable[[block.Block], Tensor]:
    def zero(b: block.Block) -> Tensor:
        n_i, n_j = (b.weights[name].numel() for name in pair)
        return torch.zeros(b.Y.numel() * n_i, n_j, dtype=torch.float64)

    return zero


def _xi_kl_equation(pair: Pair, Phi_as_printed: bool = False) -> Equation:
    def printed(b: block.Block) -> Tensor:
        W_Q, W_K, W_V = (b.weights[name] for name in block.ATTENTION_WEIGHTS)
        Phi = attention.Phi_as_printed(b.X, W_Q, W_K, W_V, *pair) if Phi_as_printed else b.Phi(*pair)
        return block.xi_kl_as_printed(b, *pair, Phi=Phi)

    return _xi_equation(pair, printed)


def _boxed_equation(pair: Pair) -> Equation:
    return Equation(
        ":".join(pair),
        lambda c: block.block_hessian_as_printed(c.block, *pair, xi=hessian_of(S_map(c), c.weights, pair)),
        lambda c: hessian_of(block_map(c), c.weights, pair),
        (lambda c: c.block.hessian(*pair),),
    )


def _symmetry_equation(pair: Pair) -> Equation:
    i, j = pair
    return Equation(
        ":".join(pair),
        lambda c: block.symmetric_block_as_printed(c.block, i, j),
        lambda c: hessian_of(block_map(c), c.weights, pair),
        (lambda c: transpose_hessian(c.block.hessian(j, i), c.weights[j].numel()),),
    )


def _smooth_activation_equation(pair: Pair, activation: str) -> Equation:
    def ours(c: Instance) -> Tensor:
        return block.block_hessian(c.X, c.weights, *pair, activation=activation)

    def oracle(c: Instance) -> Tensor:
        return hessian_of(lambda **w: maps.block(c.X, w, activation=activation), c.weights, pair)

    return Equation(f"{activation}, {':'.join(pair)}", ours, oracle, (ours,))


STATEMENTS: dict[str, Statement] = {
    "GN2": Statement(
        _GN2(True, lambda c: 2 / (c.L * c.d_V)),
        "The text names the loss ‖· − Target‖² with second derivative 2/(L d_V), and R_m^tr without that factor.",
        reading="loss ‖·‖²/(L d_V), and R_m^tr behind the factor 2/(L d_V) as R_m is in FN",
        other_readings={
            "loss ‖·‖²/(L d_V), ∂l/∂Z ⊗ I = R_m^tr to the letter": _GN2(True, lambda c: 1.0),
            "loss ‖·‖² to the letter, R_m^tr to the letter": _GN2(False, lambda c: 1.0),
        },
    ),
    "T4_main": Statement(_T4_main()),
    "T4_appendix": Statement(
        _T4_appendix_equations(lambda c: c.X),
        "The statement's mask is 1_{X>0} with X ∈ R^{L×d_V} the block's input (the proof repeats the size).",
        remarks={"With 1_{Y W_1>0}, as T5 prints": _T4_appendix_equations(lambda c: c.block.Y @ c.weights["W_1"])},
    ),
    "T5_boxed": Statement([_boxed_equation(pair) for pair in SAMPLE_PAIRS], "With the true ξ put in."),
    "T5_xi_11": Statement([_xi_equation(("W_1", "W_1"), _zero_xi(("W_1", "W_1")))], "ReLU only."),
    "T5_xi_22": Statement([_xi_equation(("W_2", "W_2"), _zero_xi(("W_2", "W_2")))]),
    "T5_xi_12": Statement(
        [_xi_equation(("W_1", "W_2"), block.xi_12_as_printed, block.xi_12_corrected)],
        "The proof differentiates B_2 in W_1; ξ_12 is ∂B_1/∂W_2.",
        remarks={"As ξ_21 = ∂B_2/∂W_1": [_xi_equation(("W_2", "W_1"), block.xi_12_as_printed)]},
    ),
    "T5_xi_21": Statement(
        [_xi_equation(("W_2", "W_1"), block.xi_21_as_printed, block.xi_21_corrected)],
        "Fits no sizes but d_V = d_ff = 1, under either label. Right: the expression printed as ξ_12.",
        remarks={"As ξ_12 = ∂B_1/∂W_2": [_xi_equation(("W_1", "W_2"), block.xi_21_as_printed)]},
    ),
    "T5_xi_1k": Statement(
        [
            _xi_equation(("W_1", k), partial(block.xi_1k_as_printed, name=k), partial(block.xi_1k_corrected, name=k))
            for k in block.ATTENTION_WEIGHTS
        ],
        "⊗ I_{n_k} must be ⊗ I_{n_1}.",
    ),
    "T5_xi_2k": Statement(
        [_xi_equation(("W_2", k), partial(block.xi_2k_as_printed, name=k)) for k in block.ATTENTION_WEIGHTS]
    ),
    "T5_xi_kl": Statement(
        [_xi_kl_equation(pair) for pair in KL_PAIRS],
        "For ReLU and with Φ_kl = ∂G_k/∂W_l.",
        remarks={"With the Φ_VQ printed in L2": [_xi_kl_equation(("W_V", "W_Q"), Phi_as_printed=True)]},
    ),
    "T5_symmetry": Statement(
        [_symmetry_equation(pair) for pair in MIXED_PAIRS],
        "H^(j,i) is H^(i,j) with each output's n_i × n_j slice transposed, vec_r H^(j,i) = "
        "(I_{L d_V} ⊗ K_{n_j,n_i}) vec_r H^(i,j); only the blocks of the scalar loss are each other's transposes.",
    ),
}


def _supplied_equations() -> list[Equation]:
    mixed = [(k, i) for k in block.ATTENTION_WEIGHTS[1:] for i in block.FEED_FORWARD_WEIGHTS]
    smooth = (*SAMPLE_PAIRS, ("W_Q", "W_K"))
    equations = [_smooth_activation_equation(pair, "relu") for pair in mixed]
    return equations + [_smooth_activation_equation(pair, "gelu") for pair in smooth]


ROWS: dict[str, Callable[[], Row]] = {
    "T5_supplied": lambda: supplied(
        "T5_supplied",
        _supplied_equations(),
        "ξ_k1 and ξ_k2 are not printed (ξ_1k, ξ_2k with each output's slice transposed); for a smooth activation ξ_11 "
        "and the term (I ⊗ (J_Y G_k)ᵀ)(∂J_SY/∂Y)(J_Y G_l) of ξ_kl are missing. All 25 pairs are supplied for any σ.",
    ),
}
