"""The block's Hessian in Kronecker sums against autodiff, and the data bound against exact norms."""

import itertools

import pytest
import torch
from torch.func import hessian

from curvature_gap.maps import block, mse
from curvature_gap.theory.block_bound import block_apriori_bounds, block_hessian, feed_forward_slope, norm_rows
from curvature_gap.theory.kronecker_sum import top_norm


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


def test_feed_forward_slope_bounds_every_pattern(randn):
    W_1, W_2 = randn(3, 5), randn(5, 3)
    bound = feed_forward_slope(W_1, W_2)
    for bits in itertools.product([0.0, 1.0], repeat=5):
        D = torch.tensor(bits).double()
        assert top_norm(torch.eye(3).double() + W_1 * D @ W_2) <= bound * (1 + 1e-12)


def test_layer_norm_curvature_attains_its_bound():
    """The worst angle between the target and the row has cos² = 1/3."""
    x = torch.tensor([[1.0, -1.0, 0.0, 0.0]]).double() * 2**0.5
    f = torch.tensor([[0.0, 0.0, 1.0, -1.0]]).double() / 2**0.5
    w = (1 / 3) ** 0.5 * x / 2 + (2 / 3) ** 0.5 * f
    torch.testing.assert_close(top_norm(norm_rows(x).curvature(w)), torch.tensor([2 / 12**0.5]).double())


def test_apriori_bounds_every_block(randn, weights):
    W = {name: w.expand(30, *w.shape) for name, w in weights(3, 2, 7).items()}
    scale = torch.logspace(-2, 1, 30).double()[:, None, None]
    W |= {"W_K": scale * W["W_K"], "W_V": scale.flip(0) * W["W_V"]}
    X, target = randn(30, 5, 3), scale * randn(30, 5, 3)
    H, bounds = block_hessian(X, W, target), block_apriori_bounds(X, W, target)
    assert bounds.keys() == H.terms.keys()
    for pair, bound in bounds.items():
        assert (top_norm(H.block(pair)) <= bound * (1 + 1e-10)).all(), pair
