"""The block's Hessian in Kronecker sums against autodiff, and the data bound against exact norms."""

import pytest
import torch
from torch.func import hessian

from curvature_gap.maps import block, mse
from curvature_gap.theory.block_bound import block_hessian, norm_rows


@pytest.fixture
def weights(randn):
    def draw(d_V, d_K, d_ff):
        shapes = {"W_Q": (d_V, d_K), "W_K": (d_V, d_K), "W_V": (d_V, d_V), "W_1": (d_V, d_ff), "W_2": (d_ff, d_V)}
        return {name: randn(*shape) for name, shape in shapes.items()}

    return draw


@pytest.mark.parametrize(("L", "d_V", "d_K", "d_ff"), [(5, 3, 2, 7), (2, 4, 3, 5), (1, 3, 2, 4)])
def test_assembled_terms_equal_autodiff(L, d_V, d_K, d_ff, randn, weights):
    W, X, target = weights(d_V, d_K, d_ff), randn(L, d_V), randn(L, d_V)

    def loss(theta):
        parts = theta.split([w.numel() for w in W.values()])
        return mse(block(X, {n: p.view(w.shape) for (n, w), p in zip(W.items(), parts, strict=True)}), target)

    exact = hessian(loss)(torch.cat([w.reshape(-1) for w in W.values()]))
    torch.testing.assert_close(block_hessian(X, W, target).dense(), exact, rtol=1e-11, atol=1e-12 * exact.abs().max())


def test_layer_norm_curvature_equals_autodiff(randn):
    x, w = randn(4, 5), randn(4, 5)
    rows = norm_rows(x, 0.1)

    def paired(row, weight):
        M = row - row.mean()
        return (weight * M / (M.square().mean() + 0.1).sqrt()).sum()

    exact = torch.stack([hessian(paired)(row, weight) for row, weight in zip(x, w, strict=True)])
    torch.testing.assert_close(rows.curvature(w), exact)


def test_no_target_no_curvature(randn, weights):
    """Rows of constant length: with Target = 0 the loss is constant."""
    assert block_hessian(randn(5, 3), weights(3, 2, 4), torch.zeros(5, 3).double()).dense().abs().max() == 0


def test_constant_row_and_wrong_shape_are_refused(randn, weights):
    with pytest.raises(ValueError, match="constant row"):
        norm_rows(torch.ones(2, 3).double())
    W = weights(3, 2, 4) | {"W_2": randn(5, 3)}
    with pytest.raises(ValueError, match=r"W_2 \(5, 3\)"):
        block_hessian(randn(5, 3), W, randn(5, 3))
