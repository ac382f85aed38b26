"""Softmax derivatives against automatic differentiation, and exact facts."""

import pytest
import torch

from curvature_gap import maps
from curvature_gap.matrix_calculus import autodiff_hessian, autodiff_jacobian
from curvature_gap.theory.softmax import (
    softmax_hessian,
    softmax_jacobian,
    softmax_row_hessians,
    softmax_row_jacobians,
    softmax_second_derivative_as_printed,
    uniform_softmax_jacobian_as_printed,
)


@pytest.mark.parametrize(("L", "M"), [(2, 3), (5, 2), (3, 7), (1, 1)])
def test_jacobian_and_hessian_match_autodiff(L, M, randn):
    T = 2 * randn(L, M)
    torch.testing.assert_close(softmax_jacobian(T), autodiff_jacobian(maps.softmax, T), rtol=0, atol=1e-14)
    torch.testing.assert_close(softmax_hessian(T), autodiff_hessian(maps.softmax, T), rtol=0, atol=1e-14)


def test_rows_sum_to_one_so_every_derivative_sums_to_zero(randn):
    A = maps.softmax(randn(3, 5))
    zero = torch.zeros(3, 5, dtype=torch.float64)
    torch.testing.assert_close(softmax_row_jacobians(A).sum(dim=1), zero)
    torch.testing.assert_close(softmax_row_hessians(A).sum(dim=1), torch.zeros(3, 5, 5, dtype=torch.float64))
    torch.testing.assert_close(softmax_row_jacobians(A).sum(dim=2), zero)  # shifting a row changes nothing


def test_saturated_rows_have_no_derivative():
    T = torch.tensor([[1e3, 0.0, -1e3]], dtype=torch.float64)
    assert softmax_jacobian(T).abs().max() == 0
    assert softmax_hessian(T).abs().max() == 0


def test_printed_second_derivative_is_the_slice_of_ours(randn):
    A = maps.softmax(randn(3, 5))
    for i in range(3):
        for j in range(5):
            printed = softmax_second_derivative_as_printed(A[i], j)
            torch.testing.assert_close(printed, softmax_row_hessians(A)[i, j])


def test_uniform_form_holds_for_uniform_attention_alone(randn):
    uniform = uniform_softmax_jacobian_as_printed(4)
    torch.testing.assert_close(uniform, softmax_jacobian(torch.zeros(4, 4, dtype=torch.float64)))
    assert (uniform - softmax_jacobian(randn(4, 4))).abs().max() > 1e-3
