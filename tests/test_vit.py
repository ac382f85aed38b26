from dataclasses import replace

import pytest
import torch

from curvature_gap import maps
from curvature_gap.architecture import Architecture, parameter_shapes
from curvature_gap.vit import (
    ViT,
    flatten_parameters,
    initial_parameters,
    patches,
    sinusoidal_positions,
    tokens,
    unflatten_parameters,
    vit_logits,
)

SMALL = Architecture(image_size=6, channels=2, patch=3, classes=5, d_V=4, d_ff=7)
VARIANTS = [
    SMALL,
    replace(SMALL, bias=True, positions="learned", output_projection=False),
    replace(SMALL, depth=2, heads=2, norm="pre", mask="causal", activation="gelu", positions="none"),
]


def parameters(architecture, seed=0):
    drawn = initial_parameters(architecture, torch.Generator().manual_seed(seed))
    return {name: p.double() for name, p in drawn.items()}


def test_patches_run_row_by_row_and_channel_first(randn):
    images = randn(3, 2, 6, 6)
    cut = patches(images, 3)
    assert cut.shape == (3, 4, 18)
    expected = [images[:, :, i : i + 3, j : j + 3].reshape(3, 18) for i in (0, 3) for j in (0, 3)]
    torch.testing.assert_close(cut, torch.stack(expected, dim=1))


def test_patch_embedding_is_a_strided_convolution(randn):
    images, embed = randn(3, 2, 6, 6), randn(18, 4)
    kernel = embed.T.reshape(4, 2, 3, 3)
    convolved = torch.nn.functional.conv2d(images, kernel, stride=3).flatten(2).transpose(1, 2)
    torch.testing.assert_close(patches(images, 3) @ embed, convolved)


def test_sinusoidal_positions_are_those_of_the_formula():
    P = sinusoidal_positions(7, 5)
    for t in range(7):
        for i in range(5):
            angle = torch.tensor(t / 10_000 ** (2 * (i // 2) / 5), dtype=torch.float64)
            torch.testing.assert_close(P[t, i], angle.cos() if i % 2 else angle.sin())


@pytest.mark.parametrize("architecture", VARIANTS, ids=["pinned", "biased", "deep"])
def test_logits_follow_the_description_step_by_step(architecture, randn):
    a, p, images = architecture, parameters(architecture), randn(3, 2, 6, 6)
    X = patches(images, 3) @ p["embed"] + p.get("embed_bias", 0)
    if a.positions != "none":
        X = X + (p["positions"] if a.positions == "learned" else sinusoidal_positions(4, 4))
    torch.testing.assert_close(tokens(p, images, a), X)
    for prefix in [""] if a.depth == 1 else ["block1_", "block2_"]:
        w = {name: p[prefix + name] for name in ("W_Q", "W_K", "W_V", "W_1", "W_2")}
        w |= {name: p[prefix + name] for name in ("W_O", "b_1", "b_2") if prefix + name in p}
        w |= {f"LN{i}_{part}": p[f"{prefix}LN{i}_{part}"] for i in (1, 2) for part in ("gamma", "beta")}
        options = {"norm": a.norm, "heads": a.heads, "causal": a.mask == "causal", "activation": a.activation}
        X = maps.block(X, w, **options, eps=a.norm_eps)
    expected = X.mean(1) @ p["classifier"] + p.get("classifier_bias", 0)
    torch.testing.assert_close(vit_logits(p, images, a), expected)


def test_without_positions_the_order_of_the_patches_does_not_matter(randn):
    a = replace(SMALL, positions="none")
    images = randn(3, 2, 6, 6)
    swapped = torch.cat([images[:, :, 3:], images[:, :, :3]], dim=2)
    torch.testing.assert_close(vit_logits(parameters(a), images, a), vit_logits(parameters(a), swapped, a))
    assert not torch.allclose(
        vit_logits(parameters(SMALL), images, SMALL), vit_logits(parameters(SMALL), swapped, SMALL)
    )


@pytest.mark.parametrize("architecture", VARIANTS, ids=["pinned", "biased", "deep"])
def test_every_parameter_is_used(architecture, randn, generator):
    p = {name: value.requires_grad_() for name, value in parameters(architecture).items()}
    loss = maps.cross_entropy(
        vit_logits(p, randn(3, 2, 6, 6), architecture), torch.randint(5, (3,), generator=generator)
    )
    for name, gradient in zip(p, torch.autograd.grad(loss, list(p.values())), strict=True):
        assert gradient.abs().max() > 0, name


def test_a_seed_names_one_model(randn):
    first, again, other = (initial_parameters(SMALL, torch.Generator().manual_seed(s)) for s in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["W_Q"], other["W_Q"])
    assert all(p.dtype == torch.float32 for p in first.values())


def test_initialisation_is_pytorchs_uniform_with_the_fan_in():
    a = Architecture(image_size=28, channels=1, patch=4, classes=10, d_V=64, d_ff=256, bias=True, positions="learned")
    drawn = initial_parameters(a, torch.Generator().manual_seed(0))
    fan_in = {"embed": 16, "W_Q": 64, "W_1": 64, "W_2": 256, "classifier": 64, "b_1": 64, "b_2": 256, "embed_bias": 16}
    for name, n in fan_in.items():
        bound = n**-0.5
        assert 0.9 * bound < drawn[name].abs().max() <= bound, name
        if drawn[name].numel() > 1000:
            torch.testing.assert_close(drawn[name].std().item(), bound / 3**0.5, rtol=0.05, atol=0)
    assert torch.equal(drawn["LN1_gamma"], torch.ones(64))
    assert torch.equal(drawn["LN2_beta"], torch.zeros(64))
    torch.testing.assert_close(drawn["positions"].std().item(), 0.02, rtol=0.05, atol=0)


@pytest.mark.parametrize("architecture", VARIANTS, ids=["pinned", "biased", "deep"])
def test_the_module_is_the_function(architecture, randn):
    model = ViT(architecture, seed=3).double()
    images = randn(3, 2, 6, 6)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == parameter_shapes(architecture)
    torch.testing.assert_close(model(images), vit_logits(dict(model.named_parameters()), images, architecture))
    assert torch.equal(
        model.state_dict()["embed"].float(), initial_parameters(architecture, torch.Generator().manual_seed(3))["embed"]
    )


@pytest.mark.parametrize("architecture", VARIANTS, ids=["pinned", "biased", "deep"])
def test_flattening_is_row_major_in_block_order_and_inverts(architecture):
    p = parameters(architecture)
    theta = flatten_parameters(p, architecture)
    assert theta.shape == (architecture.n_parameters,)
    torch.testing.assert_close(theta[: 18 * 4], p["embed"].reshape(-1))
    torch.testing.assert_close(theta[1 * 4 + 2], p["embed"][1, 2])
    back = unflatten_parameters(theta, architecture)
    assert list(back) == list(parameter_shapes(architecture))
    for name, value in p.items():
        torch.testing.assert_close(back[name], value)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("architecture", VARIANTS, ids=["pinned", "biased", "deep"])
def test_logits_on_cuda_are_the_cpus(architecture, randn):
    p, images = parameters(architecture), randn(3, 2, 6, 6)
    on_cuda = vit_logits({name: value.cuda() for name, value in p.items()}, images.cuda(), architecture)
    torch.testing.assert_close(on_cuda.cpu(), vit_logits(p, images, architecture), rtol=1e-10, atol=1e-10)
