"""LayerNorm's derivatives against automatic differentiation of the map and of torch's own layer."""

import pytest
import torch

from curvature_gap import maps
from curvature_gap.matrix_calculus import ShapeMismatchError, autodiff_hessian, autodiff_jacobian
from curvature_gap.theory import layer_norm as ln


def close(value, reference):
    torch.testing.assert_close(value, reference, rtol=0, atol=1e-10 * reference.abs().max().item() + 1e-14)


@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.5])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("L", "d"), [(2, 3), (5, 3), (3, 7)])
def test_jacobian_and_hessian_match_autodiff(L, d, scaled, eps, randn):
    X, gamma = randn(L, d), randn(d, 1)[:, 0] if scaled else None
    close(ln.layer_norm_jacobian(X, gamma, eps), autodiff_jacobian(lambda x: maps.layer_norm(x, gamma, None, eps), X))
    close(ln.layer_norm_hessian(X, gamma, eps), autodiff_hessian(lambda x: maps.layer_norm(x, gamma, None, eps), X))


def test_jacobian_matches_torchs_own_layer(randn):
    X, gamma, beta = randn(3, 5), randn(5, 1)[:, 0], randn(5, 1)[:, 0]
    J = autodiff_jacobian(lambda x: torch.nn.functional.layer_norm(x, (5,), gamma, beta, 1e-3), X)
    close(ln.layer_norm_jacobian(X, gamma, 1e-3), J)


def test_hessian_matches_differences_of_the_jacobian(randn):
    X, h = randn(2, 5), 1e-5
    steps = h * torch.eye(10, dtype=torch.float64).reshape(10, 2, 5)
    columns = [(ln.layer_norm_jacobian(X + s) - ln.layer_norm_jacobian(X - s)).reshape(-1) / (2 * h) for s in steps]
    torch.testing.assert_close(ln.layer_norm_hessian(X), torch.stack(columns, dim=1), rtol=1e-7, atol=1e-7)


def test_scale_and_shift(randn):
    X, gamma, beta = randn(3, 5), randn(5, 1)[:, 0], randn(5, 1)[:, 0]
    close(ln.layer_norm_scale_jacobian(X, 0.1), autodiff_jacobian(lambda g: maps.layer_norm(X, g, beta, 0.1), gamma))
    close(ln.layer_norm_shift_jacobian(X), autodiff_jacobian(lambda b: maps.layer_norm(X, gamma, b), beta))
    mixed = autodiff_hessian(lambda g, x: maps.layer_norm(x, g, beta, 0.1), gamma, X)
    close(ln.layer_norm_scale_input_hessian(X, 0.1), mixed)


def test_shifting_or_scaling_a_row_changes_nothing(randn):
    X = randn(3, 5)
    flat = torch.stack([torch.ones_like(X).reshape(-1), X.reshape(-1)], dim=1)
    torch.testing.assert_close(ln.layer_norm_jacobian(X) @ flat, torch.zeros_like(flat), rtol=0, atol=1e-13)


def test_a_constant_row_is_refused_without_eps():
    X = torch.ones(2, 3, dtype=torch.float64)
    for derivative in (ln.layer_norm_jacobian, ln.layer_norm_hessian, ln.layer_norm_factors):
        with pytest.raises(ValueError, match="constant row"):
            derivative(X)
    assert ln.layer_norm_jacobian(X, eps=1e-5).isfinite().all()


def test_float32_stays_float32(randn):
    X = randn(2, 3).float()
    assert ln.layer_norm_jacobian(X).dtype == ln.layer_norm_hessian(X).dtype == torch.float32


@pytest.mark.parametrize(("L", "d"), [(2, 5), (4, 3)])
def test_corrected_parts_add_up_and_printed_parts_do_not_fit(L, d, randn):
    X = randn(L, d)
    parts = ln.P_kron_I_jacobian(X), ln.I_kron_MT_jacobian_as_printed(X), ln.P_hessian(X)
    close(ln.layer_norm_hessian_from_parts(X, *parts), ln.layer_norm_hessian(X))
    with pytest.raises(ShapeMismatchError):
        ln.layer_norm_hessian_as_printed(X)


def test_lost_factors_are_the_ones_named(randn):
    """∂D/∂X lost 1/√d; with it and the lost bracket the second term of ∂²P/∂X² is d times too large."""
    X, d = randn(2, 5), 5
    close(ln.D_jacobian_as_printed(X), d**0.5 * ln.D_jacobian(X))
    printed_dA_1 = ln.A_1_jacobian_as_printed(X, ln.D_jacobian_as_printed(X))
    true_dA_1 = ln.A_1_jacobian_as_printed(X, ln.D_jacobian(X))
    close(printed_dA_1, d**0.5 * true_dA_1)
    first, second = ln._P_hessian_terms(X)
    close(ln.P_hessian(X), (first + second) / d**0.5)
    close(ln.P_hessian_as_printed(X), first / d**0.5 + second)
