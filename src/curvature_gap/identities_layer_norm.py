"""LayerNorm: T2, T3 with the parts of its proof, and A2."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from curvature_gap import maps
from curvature_gap.identity_rows import UNEVEN_SIZES, Equation, Formula, Statement, instance, relative_error
from curvature_gap.matrix_calculus import autodiff_hessian, autodiff_jacobian, eye
from curvature_gap.statements import Row
from curvature_gap.theory import layer_norm


def _M(X: Tensor) -> Tensor:
    return X - X.mean(dim=1, keepdim=True)


def _sigma(X: Tensor) -> Tensor:
    return _M(X).square().mean(dim=1).sqrt()


def _P(X: Tensor) -> Tensor:
    return torch.diag(1 / _sigma(X))


def _at_X(form: Callable[[Tensor], Tensor]) -> Formula:
    return lambda c: form(c.X)


def _of_X(
    part: str,
    printed: Callable[[Tensor], Tensor],
    oracle: Callable[[Tensor], Tensor],
    *ours: Callable[[Tensor], Tensor],
) -> Equation:
    return Equation(part, _at_X(printed), _at_X(oracle), tuple(_at_X(form) for form in ours))


def _A_1_jacobian(D_jacobian: Callable[[Tensor], Tensor], X: Tensor) -> Tensor:
    return layer_norm.A_1_jacobian_as_printed(X, D_jacobian(X))


def _minus_P_kron_P_jacobian(X: Tensor) -> Tensor:
    return autodiff_jacobian(lambda x: -torch.kron(_P(x), _P(x)), X)


def _P_hessian(X: Tensor) -> Tensor:
    return autodiff_hessian(_P, X)


def _layer_norm_hessian_from_true_parts(X: Tensor) -> Tensor:
    dP_kron_I, d2P = layer_norm.P_kron_I_jacobian(X), layer_norm.P_hessian(X)
    return layer_norm.layer_norm_hessian_from_parts(X, dP_kron_I, layer_norm.I_kron_MT_jacobian_as_printed(X), d2P)


STATEMENTS: dict[str, Statement] = {
    "T2": Statement(
        [
            _of_X("∂P/∂X", layer_norm.P_jacobian_as_printed, lambda X: autodiff_jacobian(_P, X)),
            _of_X(
                "∂LN/∂X",
                layer_norm.layer_norm_jacobian_as_printed,
                lambda X: autodiff_jacobian(maps.layer_norm, X),
                layer_norm.layer_norm_jacobian,
            ),
        ],
        "The preliminaries print the mean and variance of an m × n input as sums over m; the n features are meant.",
    ),
    "T3_sum": Statement(
        [
            _of_X(
                "",
                _layer_norm_hessian_from_true_parts,
                lambda X: autodiff_hessian(maps.layer_norm, X),
                layer_norm.layer_norm_hessian,
            )
        ],
        "T3's sum of four terms, with the true parts put in.",
    ),
    "T3_total": Statement(
        [
            _of_X(
                "",
                layer_norm.layer_norm_hessian_as_printed,
                lambda X: autodiff_hessian(maps.layer_norm, X),
                layer_norm.layer_norm_hessian,
            )
        ],
        "Every part as its proof prints it.",
    ),
    "T3_dP_kron_I": Statement(
        [
            _of_X(
                "",
                layer_norm.P_kron_I_jacobian_as_printed,
                lambda X: autodiff_jacobian(lambda x: torch.kron(_P(x), eye(x.shape[1])), X),
                layer_norm.P_kron_I_jacobian,
            )
        ],
        "Prints ∂(P ⊗ I_L)/∂X. Right: (I_L ⊗ K_{d_V,L} ⊗ I_{d_V})(I_{L²} ⊗ vec_r I_{d_V}) ∂P/∂X, as L3's proof has it.",
    ),
    "T3_dI_kron_MT": Statement(
        [
            _of_X(
                "",
                layer_norm.I_kron_MT_jacobian_as_printed,
                lambda X: autodiff_jacobian(lambda x: torch.kron(eye(x.shape[0]), _M(x).T.contiguous()), X),
            )
        ],
    ),
    "T3_d2P": Statement(
        [_of_X("", layer_norm.P_hessian_as_printed, _P_hessian, layer_norm.P_hessian)],
        "∂P/∂X = (1/√d_V) A_1 B_1, so 1/√d_V multiplies both terms; printed before the first alone. Evaluated with the "
        "true ∂A_1/∂X and ∂B_1/∂X. ∂A_2/∂X, needed for ∂B_1/∂X, is nowhere printed: −(A_2 ⊗ A_2) E A_2 B_2.",
        remarks={"With brackets around the sum": [_of_X("", layer_norm.P_hessian, _P_hessian)]},
    ),
    "T3_dA1": Statement(
        [_of_X("", partial(_A_1_jacobian, layer_norm.D_jacobian), _minus_P_kron_P_jacobian)],
        "Evaluated with the true ∂D/∂X.",
        remarks={
            "With the printed one (T3_dD), √d_V times too large": [
                _of_X("", partial(_A_1_jacobian, layer_norm.D_jacobian_as_printed), _minus_P_kron_P_jacobian)
            ]
        },
    ),
    "T3_dD": Statement(
        [
            _of_X(
                "",
                layer_norm.D_jacobian_as_printed,
                lambda X: autodiff_jacobian(lambda x: torch.diag(_sigma(x)), X),
                layer_norm.D_jacobian,
            )
        ],
        "The factor 1/√d_V of σ is missing; T2's ∂P/∂X has it.",
    ),
}


def _A2() -> Row:
    """Shrink a row's spread: ‖∂LN/∂X‖ grows as 1/σ and is undefined at σ = 0; with ε it stays below 1/√ε."""
    case, eps = instance(*UNEVEN_SIZES[0]), 1e-5
    spreads = (1.0, 1e-2, 1e-4, 1e-6)
    products = []
    for spread in spreads:
        X = 1 + spread * case.X
        J = autodiff_jacobian(maps.layer_norm, X)
        products.append((torch.linalg.matrix_norm(J, 2) * _sigma(X).min()).item())
    constant = torch.ones_like(case.X)
    undefined = not autodiff_jacobian(maps.layer_norm, constant).isfinite().all().item()
    exact = autodiff_jacobian(lambda x: maps.layer_norm(x, eps=eps), constant)
    error = relative_error(layer_norm.layer_norm_jacobian(constant, eps=eps), exact)
    grows = max(products) <= (1 + 1e-6) * min(products)
    return Row(
        id="A2",
        kind="claim",
        as_printed="holds" if undefined and grows else "wrong",
        corrected="not_needed",
        max_rel_error_corrected=error,
        witness=f"‖∂LN/∂X‖ σ_min = {products[0]:.6g} at every spread from 1 to 1e-6; at a constant row the derivative "
        f"is {'not finite' if undefined else 'finite'}",
        n_cases=len(spreads) + 2,
        note="Needed: without it ∂LN/∂X grows as 1/σ_min and does not exist at a constant row. With ε in the root, "
        f"‖∂LN/∂X‖ ≤ 1/√ε everywhere ({torch.linalg.matrix_norm(exact, 2):.4g} at a constant row, ε = 1e-5), and the "
        "closed forms stay true with σ replaced by √(σ² + ε).",
    )


ROWS: dict[str, Callable[[], Row]] = {"A2": _A2}
