"""The attention Hessian in Kronecker sums against autodiff, and the data bound against exact norms."""

import pytest
import torch
from torch.func import hessian

from curvature_gap.maps import attention, mse
from curvature_gap.theory.attention_bound import attention_hessian
from curvature_gap.theory.kronecker_sum import data_bound, top_norm


@pytest.mark.parametrize(("L", "d_V", "d_K"), [(5, 3, 2), (2, 3, 7), (7, 5, 1), (1, 2, 3)])
def test_assembled_terms_equal_autodiff(L, d_V, d_K, randn):
    shapes = {"W_Q": (d_V, d_K), "W_K": (d_V, d_K), "W_V": (d_V, d_V)}
    X, target, weights = randn(L, d_V), randn(L, d_V), [randn(*s) for s in shapes.values()]

    def loss(theta):
        parts = theta.split([a * b for a, b in shapes.values()])
        return mse(attention(X, *(p.view(s) for p, s in zip(parts, shapes.values(), strict=True))), target)

    exact = hessian(loss)(torch.cat([W.reshape(-1) for W in weights]))
    torch.testing.assert_close(attention_hessian(X, *weights, target).dense(), exact, rtol=1e-12, atol=1e-13)


def test_values_alone_attain_the_data_bound(randn):
    """With W_V = 0 and no target only the Values block is left, and its norm is exact."""
    X, Q, K = randn(5, 3), randn(3, 2), randn(3, 2)
    H = attention_hessian(X, Q, K, torch.zeros(3, 3).double(), torch.zeros(5, 3).double())
    torch.testing.assert_close(data_bound(H), top_norm(H.dense()))


def test_a_weight_that_does_not_fit_is_named(randn):
    with pytest.raises(ValueError, match=r"W_K has shape \(4, 2\)"):
        attention_hessian(randn(5, 3), randn(3, 2), randn(4, 2), randn(3, 3), randn(5, 3))
