import pytest
import torch
from torch import nn

from curvature_gap import maps


def test_softmax_rows_sum_to_one_and_ignore_shifts(randn):
    T = randn(3, 5)
    A = maps.softmax(T)
    torch.testing.assert_close(A.sum(-1), torch.ones(3, dtype=T.dtype))
    torch.testing.assert_close(maps.softmax(T + randn(3, 1)), A)
    torch.testing.assert_close(A, T.exp() / T.exp().sum(-1, keepdim=True))


@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.3])
def test_layer_norm_is_torchs(eps, randn):
    X, gamma, beta = randn(2, 3, 5), randn(5), randn(5)
    expected = nn.functional.layer_norm(X, (5,), gamma, beta, eps)
    torch.testing.assert_close(maps.layer_norm(X, gamma, beta, eps), expected)
    torch.testing.assert_close(maps.layer_norm(X, eps=eps), nn.functional.layer_norm(X, (5,), eps=eps))


def test_layer_norm_has_the_right_second_derivative_in_its_scale(randn):
    # The trap this package avoids: torch's fused kernel is wrong here under torch.func.hessian.
    X, gamma, w = randn(2, 3), randn(3), randn(2, 3)

    def f(theta):
        return (maps.layer_norm(theta[:6].reshape(2, 3), theta[6:], None, 1e-5) * w).sin().sum()

    theta = torch.cat([X.reshape(-1), gamma])
    H = torch.func.hessian(f)(theta)
    step = 1e-5 * torch.eye(9, dtype=X.dtype)
    gradient = torch.func.vmap(torch.func.grad(f))
    differences = (gradient(theta + step) - gradient(theta - step)) / 2e-5
    torch.testing.assert_close(H, differences, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(H, H.T)


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_torchs(heads, causal, randn):
    L, d = 5, 6
    X, W_Q, W_K, W_V, W_O = randn(2, L, d), *(randn(d, d) for _ in range(4))
    layer = nn.MultiheadAttention(d, heads, bias=False, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        layer.in_proj_weight.copy_(torch.cat([W_Q.T, W_K.T, W_V.T]))
        layer.out_proj.weight.copy_(W_O.T)
    mask = torch.ones(L, L, dtype=torch.bool).triu(1) if causal else None
    expected, weights = layer(X, X, X, attn_mask=mask, average_attn_weights=False)
    torch.testing.assert_close(maps.attention(X, W_Q, W_K, W_V, W_O, heads, causal), expected)
    torch.testing.assert_close(maps.attention_matrix(X, W_Q, W_K, heads, causal), weights)


def test_one_head_is_the_papers_formula(randn):
    X, W_Q, W_K, W_V = randn(5, 3), randn(3, 2), randn(3, 2), randn(3, 3)
    T = X @ W_Q @ W_K.T @ X.T / 2**0.5
    torch.testing.assert_close(maps.attention(X, W_Q, W_K, W_V), maps.softmax(T) @ X @ W_V)


def test_causal_attention_does_not_see_the_future(randn):
    X, W = randn(5, 4), [randn(4, 4) for _ in range(3)]
    changed = X.clone()
    changed[3:] = randn(2, 4)
    before, after = (maps.attention(x, *W, causal=True) for x in (X, changed))
    torch.testing.assert_close(before[:3], after[:3])
    assert not torch.allclose(before[3:], after[3:])


@pytest.mark.parametrize(("activation", "module"), [("relu", nn.ReLU()), ("gelu", nn.GELU()), ("tanh", nn.Tanh())])
def test_feed_forward_is_two_linear_layers(activation, module, randn):
    Y, W_1, W_2, b_1, b_2 = randn(2, 3, 5), randn(5, 7), randn(7, 5), randn(7), randn(5)
    expected = module(Y @ W_1 + b_1) @ W_2 + b_2
    torch.testing.assert_close(maps.feed_forward(Y, W_1, W_2, b_1, b_2, activation), expected)
    torch.testing.assert_close(maps.feed_forward(Y, W_1, W_2, activation=activation), module(Y @ W_1) @ W_2)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_block_is_torchs_encoder_layer(norm, randn):
    d, d_ff = 6, 7
    names = {"W_Q": (d, d), "W_K": (d, d), "W_V": (d, d), "W_O": (d, d), "W_1": (d, d_ff), "W_2": (d_ff, d)}
    names |= {"b_1": (d_ff,), "b_2": (d,), "LN1_gamma": (d,), "LN1_beta": (d,), "LN2_gamma": (d,), "LN2_beta": (d,)}
    w = {name: randn(*shape) for name, shape in names.items()}
    layer = nn.TransformerEncoderLayer(
        d, 2, d_ff, dropout=0.0, batch_first=True, norm_first=norm == "pre", layer_norm_eps=1e-5, dtype=torch.float64
    )
    torch_names = {
        "linear1.weight": w["W_1"].T,
        "linear1.bias": w["b_1"],
        "linear2.weight": w["W_2"].T,
        "linear2.bias": w["b_2"],
        "norm1.weight": w["LN1_gamma"],
        "norm1.bias": w["LN1_beta"],
        "norm2.weight": w["LN2_gamma"],
        "norm2.bias": w["LN2_beta"],
        "self_attn.in_proj_weight": torch.cat([w["W_Q"].T, w["W_K"].T, w["W_V"].T]),
        "self_attn.in_proj_bias": torch.zeros(3 * d, dtype=torch.float64),
        "self_attn.out_proj.weight": w["W_O"].T,
        "self_attn.out_proj.bias": torch.zeros(d, dtype=torch.float64),
    }
    layer.load_state_dict(torch_names)
    X = randn(2, 5, d)
    torch.testing.assert_close(maps.block(X, w, norm=norm, heads=2, eps=1e-5), layer(X))


def test_absent_scales_and_shifts_are_one_and_zero(randn):
    X = randn(5, 3)
    w = {"W_Q": randn(3, 2), "W_K": randn(3, 2), "W_V": randn(3, 3), "W_1": randn(3, 7), "W_2": randn(7, 3)}
    ones = {
        "LN1_gamma": torch.ones(3),
        "LN2_gamma": torch.ones(3),
        "LN1_beta": torch.zeros(3),
        "LN2_beta": torch.zeros(3),
    }
    full = w | {name: value.double() for name, value in ones.items()}
    torch.testing.assert_close(maps.block(X, w), maps.block(X, full))
    # With neither, every row of Z has squared norm d_V.
    torch.testing.assert_close(maps.block(X, w).square().sum(-1), torch.full((5,), 3.0, dtype=torch.float64))


def test_losses(randn, generator):
    Z, target = randn(5, 3), randn(5, 3)
    torch.testing.assert_close(maps.mse(Z, target), torch.linalg.matrix_norm(Z - target) ** 2 / 15)
    logits, labels = randn(4, 3), torch.randint(3, (4,), generator=generator)
    expected = (logits.exp().sum(1).log() - logits[torch.arange(4), labels]).mean()
    torch.testing.assert_close(maps.cross_entropy(logits, labels), expected)
