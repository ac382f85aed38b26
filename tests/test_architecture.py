from dataclasses import replace

import pytest

from curvature_gap.architecture import Architecture, block_prefixes, parameter_shapes

MNIST = Architecture(image_size=28, channels=1, patch=4, classes=10, d_V=16, d_ff=64)
CIFAR = Architecture(image_size=32, channels=3, patch=4, classes=100, d_V=128, d_ff=512, depth=8)


def test_the_pinned_mnist_model():
    sizes = {name: shape[0] * (shape[1] if len(shape) > 1 else 1) for name, shape in parameter_shapes(MNIST).items()}
    assert sizes == {
        "embed": 256,
        "W_Q": 256,
        "W_K": 256,
        "W_V": 256,
        "W_O": 256,
        "LN1_gamma": 16,
        "LN1_beta": 16,
        "W_1": 1024,
        "W_2": 1024,
        "LN2_gamma": 16,
        "LN2_beta": 16,
        "classifier": 160,
    }
    assert MNIST.n_parameters == 3552
    assert (MNIST.n_tokens, MNIST.patch_size, MNIST.head_d_K) == (49, 16, 16)


def test_the_variant_with_biases_and_learned_positions():
    variant = replace(MNIST, bias=True, output_projection=False, positions="learned")
    assert variant.n_parameters == 4186
    assert list(parameter_shapes(variant))[:4] == ["embed", "embed_bias", "positions", "W_Q"]
    assert "W_O" not in parameter_shapes(variant)


def test_the_cifar_model_counts_what_its_formula_says():
    block = 4 * 128 * 128 + 2 * 128 * 512 + 4 * 128
    assert CIFAR.n_parameters == 48 * 128 + 8 * block + 128 * 100
    names = list(parameter_shapes(CIFAR))
    assert names[:2] == ["embed", "block1_W_Q"]
    assert names[-1] == "classifier"
    assert block_prefixes(CIFAR) == [f"block{i}_" for i in range(1, 9)]
    assert block_prefixes(MNIST) == [""]


def test_heads_share_the_width_unless_their_keys_are_given():
    four = replace(MNIST, heads=4)
    assert four.head_d_K == 4
    assert parameter_shapes(four)["W_Q"] == (16, 16)
    wide = replace(MNIST, heads=2, d_K=5)
    assert parameter_shapes(wide)["W_K"] == (16, 10)
    assert parameter_shapes(wide)["W_V"] == (16, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch": 5}, "patch 5 does not divide image_size 28"),
        ({"heads": 3}, "heads 3 does not divide d_V 16"),
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"classes": -1}, "classes must be at least 1"),
        ({"d_K": 0}, "d_K must be at least 1"),
        ({"norm_eps": -1e-5}, "norm_eps must not be negative"),
    ],
)
def test_impossible_sizes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(MNIST, **changes)


@pytest.mark.parametrize("key", ["norm", "mask", "activation", "positions"])
def test_unknown_variants_are_refused(key):
    # The tests' import hook checks the literal types first; a plain import meets the ValueError.
    with pytest.raises(Exception, match=key):
        replace(MNIST, **{key: "other"})
