"""Losses against automatic differentiation, and the Gauss–Newton split."""

import pytest
import torch

from curvature_gap import maps
from curvature_gap.matrix_calculus import autodiff_hessian, autodiff_jacobian
from curvature_gap.theory import loss


def test_mean_squared_error(randn):
    F, target = randn(2, 3), randn(2, 3)
    torch.testing.assert_close(loss.mse_gradient(F, target), autodiff_jacobian(lambda f: maps.mse(f, target), F)[0])
    torch.testing.assert_close(loss.mse_hessian(F), autodiff_hessian(lambda f: maps.mse(f, target), F))


def test_cross_entropy(randn):
    logits, labels = randn(3, 5), torch.tensor([4, 0, 2])
    f = lambda z: maps.cross_entropy(z, labels)  # noqa: E731
    torch.testing.assert_close(loss.cross_entropy_gradient(logits, labels), autodiff_jacobian(f, logits)[0])
    torch.testing.assert_close(loss.cross_entropy_hessian(logits, labels), autodiff_hessian(f, logits))


def test_residual_operator_contracts_the_outputs(randn):
    residual, H = randn(2, 3), randn(6 * 5, 7)
    contracted = loss.residual_operator(residual, 5) @ H
    torch.testing.assert_close(contracted, loss.functional_hessian(H, residual.reshape(-1)))


def test_split_adds_up_to_the_hessian_of_the_loss(randn):
    X, W, target = randn(2, 3), randn(3, 5), randn(2, 5)

    def F(w):
        return torch.tanh(X @ w)

    J, H = autodiff_jacobian(F, W), autodiff_hessian(F, W)
    gradient, curvature = loss.mse_gradient(F(W), target), loss.mse_hessian(F(W))
    outer, functional = loss.gauss_newton_split(J, J, H, gradient, curvature)
    torch.testing.assert_close(outer + functional, autodiff_hessian(lambda w: maps.mse(F(w), target), W))
    torch.testing.assert_close(loss.gauss_newton_as_printed(J, J, H, gradient, curvature), outer + functional)
    assert torch.linalg.eigvalsh(outer).min() > -1e-12  # the outer-product part alone is positive semidefinite


def test_a_label_outside_the_classes_is_refused(randn):
    with pytest.raises(ValueError, match="classes 0 to 4"):
        loss.cross_entropy_hessian(randn(2, 5), torch.tensor([0, 5]))
