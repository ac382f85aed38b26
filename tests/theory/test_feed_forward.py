"""The feed-forward layer: all pairs, three activations and one of the caller's own."""

from functools import partial
from itertools import product

import pytest
import torch

from curvature_gap import maps
from curvature_gap.matrix_calculus import autodiff_hessian, autodiff_jacobian
from curvature_gap.theory import feed_forward as ff


def draw(randn, L=2, d_V=3, d_ff=7, d_out=5):
    vectors = {"b_1": randn(d_ff, 1)[:, 0], "b_2": randn(d_out, 1)[:, 0]}
    return {"Y": randn(L, d_V), "W_1": randn(d_V, d_ff), "W_2": randn(d_ff, d_out)} | vectors


def rectangular(activation, Y, W_1, b_1, W_2, b_2):
    """The layer with an output width of its own, which the block's map does not have."""
    return activation(Y @ W_1 + b_1) @ W_2 + b_2


def close(value, reference):
    torch.testing.assert_close(value, reference, rtol=0, atol=1e-10 * max(reference.abs().max().item(), 1e-300))


def check_all(a, function, activation):
    rest = {"b_1": a["b_1"], "activation": activation}
    for name in ff.ARGUMENTS:
        J = autodiff_jacobian(lambda w, name=name: function(**{**a, name: w}), a[name])
        close(ff.feed_forward_jacobian(a["Y"], a["W_1"], a["W_2"], name, **rest), J)
    for first, second in product(ff.ARGUMENTS, repeat=2):
        if first == second:
            H = autodiff_hessian(lambda w, first=first: function(**{**a, first: w}), a[first])
        else:
            f = lambda w, v, i=first, j=second: function(**{**a, i: w, j: v})  # noqa: E731
            H = autodiff_hessian(f, a[first], a[second])
        close(ff.feed_forward_hessian(a["Y"], a["W_1"], a["W_2"], first, second, **rest), H)


@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu"])
def test_all_derivatives_match_autodiff(activation, randn):
    check_all(draw(randn), partial(rectangular, maps.ACTIVATIONS[activation]), activation)


def test_any_smooth_activation_will_do(randn):
    sine = ff.Activation(torch.sin, torch.cos, lambda u: -torch.sin(u))
    check_all(draw(randn), partial(rectangular, torch.sin), sine)


@pytest.mark.parametrize("name", ["tanh", "gelu"])
def test_named_activations_match_the_maps_and_their_finite_differences(name):
    u = torch.linspace(-3, 3, 41, dtype=torch.float64)
    sigma, h = ff.ACTIVATIONS[name], 1e-5
    torch.testing.assert_close(sigma.value(u), maps.ACTIVATIONS[name](u))
    torch.testing.assert_close(
        sigma.first(u), (sigma.value(u + h) - sigma.value(u - h)) / (2 * h), rtol=1e-8, atol=1e-8
    )
    torch.testing.assert_close(
        sigma.second(u), (sigma.first(u + h) - sigma.first(u - h)) / (2 * h), rtol=1e-8, atol=1e-8
    )


def test_relu_is_piecewise_linear(randn):
    X = randn(3, 5)
    torch.testing.assert_close(ff.relu_jacobian(X) @ X.reshape(-1), torch.relu(X).reshape(-1))
    # Inside a linear piece a second difference vanishes: the second derivative is zero without trusting autodiff.
    step = 0.4 * X.abs().min() * torch.sign(randn(3, 5))
    second = torch.relu(X + step) + torch.relu(X - step) - 2 * torch.relu(X)
    torch.testing.assert_close(second, torch.zeros_like(X), rtol=0, atol=1e-15)


def test_derivative_of_I_kron_W_2T_needs_K_of_the_transposed_sizes(randn):
    """The proof of T5 prints K_{d_ff,d_V}; W_2 is d_ff × d_V."""
    W_2 = randn(7, 3)
    expected = autodiff_jacobian(lambda W: torch.kron(torch.eye(2, dtype=W.dtype), W.T.contiguous()), W_2)
    torch.testing.assert_close(ff.I_kron_W_2T_jacobian(W_2, 2), expected)


def test_illegal_input_is_named(randn):
    a = draw(randn)
    with pytest.raises(ValueError, match="arguments Y, W_1"):
        ff.feed_forward_jacobian(a["Y"], a["W_1"], a["W_2"], "X")
    with pytest.raises(ValueError, match="Unknown activation 'swish'"):
        ff.feed_forward_hessian(a["Y"], a["W_1"], a["W_2"], "Y", "Y", activation="swish")
