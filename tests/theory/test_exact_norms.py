"""Batched closed forms against nested automatic differentiation, on sizes that are all different."""

import pytest
import torch
from torch.func import hessian, jacfwd, jacrev

from curvature_gap import maps
from curvature_gap.theory.exact_norms import (
    ATTENTION_WEIGHTS,
    BLOCK_WEIGHTS,
    AttentionDerivatives,
    BlockDerivatives,
    attention_loss_hessian,
    block_loss_hessian,
    layer_norm_hessian_blocks,
    layer_norm_jacobian_blocks,
    softmax_jacobian,
    softmax_second_derivative,
    spectral_norm,
    unfolding_norm,
)

NAMES = {"1": "W_1", "2": "W_2", "K": "W_K", "Q": "W_Q", "V": "W_V"}


@pytest.fixture
def inputs(randn):
    L, d_V, d_K, d_ff = 5, 3, 2, 4
    shapes = {"X": (L, d_V), "W_Q": (d_V, d_K), "W_K": (d_V, d_K), "W_V": (d_V, d_V), "W_1": (d_V, d_ff)}
    return {name: randn(2, *shape) for name, shape in (shapes | {"W_2": (d_ff, d_V), "residual": (L, d_V)}).items()}


def map_of_weights(inputs, weights, forward):
    """θ ↦ forward, θ the raveled weights of the second instance."""
    shapes = [inputs[NAMES[w]].shape[1:] for w in weights]
    theta = torch.cat([inputs[NAMES[w]][1].reshape(-1) for w in weights])

    def f(theta):
        parts = theta.split([shape.numel() for shape in shapes])
        return forward({NAMES[w]: p.reshape(s) for w, p, s in zip(weights, parts, shapes, strict=True)})

    return f, theta


def test_attention_loss_hessian_equals_autodiff(inputs):
    X = inputs["X"][1]
    F, theta = map_of_weights(inputs, ATTENTION_WEIGHTS, lambda W: maps.attention(X, W["W_Q"], W["W_K"], W["W_V"]))
    target = F(theta) - inputs["residual"][1]
    expected = hessian(lambda t: maps.mse(F(t), target))(theta)
    actual = attention_loss_hessian(AttentionDerivatives(inputs), inputs["residual"])[1]
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_block_loss_hessian_equals_autodiff(inputs):
    Z, theta = map_of_weights(inputs, BLOCK_WEIGHTS, lambda W: maps.block(inputs["X"][1], W))
    target = Z(theta) - inputs["residual"][1]
    expected = hessian(lambda t: maps.mse(Z(t), target))(theta)
    actual = block_loss_hessian(BlockDerivatives(inputs), inputs["residual"])[1]
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))


def test_the_block_hessian_sums_the_pairs_the_search_uses(inputs):
    derivatives, residual = BlockDerivatives(inputs), inputs["residual"]
    H = block_loss_hessian(derivatives, residual)
    n_1 = derivatives.B["1"].shape[-1]
    J = derivatives.output_jacobian("1")
    second = derivatives.output_hessian("1", "1")
    expected = 2 / 15 * (torch.einsum("bijn,bijm->bnm", J, J) + torch.einsum("bij,bijnm->bnm", residual, second))
    torch.testing.assert_close(H[:, :n_1, :n_1], expected)


@pytest.mark.parametrize(("i", "j"), [("1", "K"), ("2", "V"), ("1", "2"), ("Q", "K"), ("V", "Q")])
def test_swapping_the_weights_transposes_the_last_axes(inputs, i, j):
    derivatives = BlockDerivatives(inputs)
    torch.testing.assert_close(derivatives.xi(j, i), derivatives.xi(i, j).mT)
    torch.testing.assert_close(derivatives.output_hessian(j, i), derivatives.output_hessian(i, j).mT)


def test_softmax_and_layer_norm_derivatives_equal_autodiff(randn):
    t, x = randn(5), randn(7)

    def softmax(t):
        return maps.softmax(t[None])[0]

    torch.testing.assert_close(softmax_jacobian(softmax(t)), jacrev(softmax)(t))
    torch.testing.assert_close(softmax_second_derivative(softmax(t)), jacfwd(jacrev(softmax))(t))
    torch.testing.assert_close(layer_norm_jacobian_blocks(x[None, None])[0, 0], jacrev(maps.layer_norm)(x))
    torch.testing.assert_close(layer_norm_hessian_blocks(x[None, None])[0, 0], jacfwd(jacrev(maps.layer_norm))(x))


@pytest.mark.parametrize("shape", [(3, 2, 5), (2, 7, 3)])
def test_spectral_norm_equals_the_largest_singular_value(randn, shape):
    M = randn(*shape)
    torch.testing.assert_close(spectral_norm(M), torch.linalg.matrix_norm(M, 2))
    tensor = randn(2, 3, 4, 5)
    torch.testing.assert_close(unfolding_norm(tensor), torch.linalg.matrix_norm(tensor.reshape(2, 12, 5), 2))


def test_the_norm_of_a_zero_matrix_is_zero_with_gradient_zero():
    M = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    norm = spectral_norm(M)
    norm.backward()
    assert float(norm.detach()) == 0
    assert torch.equal(M.grad, torch.zeros_like(M))
