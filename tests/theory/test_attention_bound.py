"""The attention Hessian in Kronecker sums against autodiff, and the data bound against exact norms."""

import pytest
import torch
from torch.func import hessian

from curvature_gap.maps import attention, mse
from curvature_gap.theory.attention_bound import (
    attention_apriori_bounds,
    attention_hessian,
    attention_statistics,
    largest_weight,
    token_norms,
)
from curvature_gap.theory.kronecker_sum import data_bound, norm_of_norms, top_norm


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


@pytest.fixture
def tokens(randn):
    """X, W_Q, W_K, W_V of 40 instances whose logits range from tiny to saturated."""
    scale = torch.logspace(-3, 1, 40).double()[:, None, None]
    return randn(40, 7, 3), scale * randn(40, 3, 2), randn(40, 3, 2), randn(40, 3, 3)


def test_each_statistic_bounds_what_it_stands_for(tokens):
    X, W_Q, W_K, W_V = tokens
    n, s = token_norms(X, W_Q, W_K, W_V), attention_statistics(X, W_Q, W_K)
    mean = X.mean(-2, keepdim=True)
    C_0 = (X - mean).mT @ (X - mean) / 7
    chi = (7 * s.A.square().sum(-1) - 1).clamp_min(0).sqrt()
    above = 1 + 1e-10
    assert (chi <= n.chi * above).all()
    assert (
        s.A.amax(-1) <= largest_weight((W_Q.shape[-1] ** -0.5 * X @ W_Q @ W_K.mT @ (X - mean).mT).amax(-1), 7)
    ).all()
    assert (top_norm(s.C) <= n.gamma * above).all()
    assert (top_norm(s.C - C_0[:, None]) <= n.eps * above).all()
    assert ((s.mu - mean).norm(dim=-1) <= n.shift * above).all()
    assert (s.mu.norm(dim=-1) <= n.radius * above).all()
    r = torch.arange(1, 8).double().expand(40, 7)
    assert (top_norm(r[..., None] * s.mu) <= n.weighted_mu(r) * above).all()
    assert (top_norm(s.mu @ W_V) <= n.norm_F() * above).all()
    w = torch.eye(3).double()[0]
    weight = s.A * ((X - mean) @ w)[:, None] - s.A * ((s.mu - mean) @ w)[..., None]
    Y = X[:, None] - s.mu[:, :, None]
    M3 = torch.einsum("bil,bilc,bile->bice", weight, Y, Y)
    assert (top_norm(M3) <= n.m3 * above).all()


def test_apriori_statistics_are_not_vacuous(tokens):
    """At the smallest logits attention is uniform and the bounds collapse onto it."""
    X, W_Q, W_K, W_V = (t[0] for t in tokens)
    n, s = token_norms(X, W_Q * 1e-3, W_K, W_V), attention_statistics(X, W_Q * 1e-3, W_K)
    torch.testing.assert_close(n.gamma, top_norm(s.C), rtol=1e-3, atol=0)
    assert n.chi.max() < 1e-4


def test_uniform_attention_attains_the_apriori_bound(randn):
    X, Q = randn(5, 3), torch.zeros(3, 2).double()
    V, T = torch.zeros(3, 3).double(), torch.zeros(5, 3).double()
    H = attention_hessian(X, Q, Q, V, T)
    bound = norm_of_norms(H.shapes, attention_apriori_bounds(X, Q, Q, V, T))
    torch.testing.assert_close(bound, top_norm(H.dense()), rtol=1e-6, atol=0)


def test_one_token_has_no_attention_to_bend(randn):
    X, Q, K, V, T = randn(1, 3), randn(3, 2), randn(3, 2), randn(3, 3), randn(1, 3)
    bounds = attention_apriori_bounds(X, Q, K, V, T)
    assert bounds["W_Q", "W_Q"] == 0
    torch.testing.assert_close(bounds["W_V", "W_V"], 2 / 3 * X.square().sum(), rtol=1e-6, atol=0)
