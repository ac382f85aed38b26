"""The vision transformer: one pure function of its parameters, and the module that holds them."""

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor, nn

from curvature_gap.architecture import Architecture, block_prefixes, parameter_shapes
from curvature_gap.maps import block
from curvature_gap.shapes import Float


def patches(images: Float[Tensor, "b c s s"], patch: int) -> Float[Tensor, "b L p"]:
    """Cut square images into flattened patches, row by row; within a patch the order is (channel, row, column)."""
    b, c, s, _ = images.shape
    grid = images.reshape(b, c, s // patch, patch, s // patch, patch)
    return grid.permute(0, 2, 4, 1, 3, 5).reshape(b, (s // patch) ** 2, c * patch * patch)


def sinusoidal_positions(n_tokens: int, d: int) -> Float[Tensor, "{n_tokens} {d}"]:
    """Return the fixed encodings of Vaswani et al. (2017) in float64: sines in even columns, cosines in odd ones."""
    position = torch.arange(n_tokens, dtype=torch.float64)[:, None]
    column = torch.arange(d)
    angle = position / 10_000 ** (2 * (column // 2).double() / d)
    return torch.where(column % 2 == 0, angle.sin(), angle.cos())


def tokens(
    parameters: Mapping[str, Tensor], images: Float[Tensor, "b c s s"], architecture: Architecture
) -> Float[Tensor, "b L d"]:
    """Return the embedded tokens X, the first block's input."""
    X = patches(images, architecture.patch) @ parameters["embed"]
    if architecture.bias:
        X = X + parameters["embed_bias"]
    if architecture.positions == "learned":
        X = X + parameters["positions"]
    elif architecture.positions == "sinusoidal":
        X = X + sinusoidal_positions(architecture.n_tokens, architecture.d_V).to(X)
    return X


def vit_logits(
    parameters: Mapping[str, Tensor], images: Float[Tensor, "b c s s"], architecture: Architecture
) -> Float[Tensor, "b k"]:
    """Return the class logits, a pure function of the parameters named as in `parameter_shapes`.

    Source: FIG-2 and the experiments' description: blocks, mean over tokens, linear classifier.
    """
    X = tokens(parameters, images, architecture)
    for prefix in block_prefixes(architecture):
        weights = {name.removeprefix(prefix): p for name, p in parameters.items() if name.startswith(prefix)}
        X = block(
            X,
            weights,
            norm=architecture.norm,
            heads=architecture.heads,
            causal=architecture.mask == "causal",
            activation=architecture.activation,
            eps=architecture.norm_eps,
        )
    logits = X.mean(dim=-2) @ parameters["classifier"]
    return logits + parameters["classifier_bias"] if architecture.bias else logits


def initial_parameters(architecture: Architecture, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw parameters as PyTorch initialises `nn.Linear` and `nn.LayerNorm`, in float32 on the CPU.

    Weights and biases are uniform in ±1/sqrt(fan_in); scales are 1, shifts 0; learned positions are N(0, 0.02²).
    Drawn block by block in the order of `parameter_shapes`, so a seed names one model on every machine.
    """
    fan_in_of_bias = {
        "embed_bias": architecture.patch_size,
        "b_1": architecture.d_V,
        "b_2": architecture.d_ff,
        "classifier_bias": architecture.d_V,
    }
    parameters = {}
    for name, shape in parameter_shapes(architecture).items():
        kind = name.split("_", 1)[1] if name.startswith("block") else name
        if kind.endswith("gamma"):
            parameters[name] = torch.ones(shape)
        elif kind.endswith("beta"):
            parameters[name] = torch.zeros(shape)
        elif kind == "positions":
            parameters[name] = 0.02 * torch.randn(shape, generator=generator)
        else:
            fan_in = fan_in_of_bias.get(kind, shape[0])
            parameters[name] = (2 * torch.rand(shape, generator=generator) - 1) / fan_in**0.5
    return parameters


class ViT(nn.Module):
    """A vision transformer whose parameters carry the names and the order of `parameter_shapes`.

    Args:
        architecture: Sizes and variants.
        seed: Seed of the initialisation, drawn on the CPU.

    Example:
        >>> model = ViT(Architecture(image_size=28, channels=1, patch=4, classes=10, d_V=16, d_ff=64), seed=0)
        >>> sum(p.numel() for p in model.parameters())
        3552
    """

    def __init__(self, architecture: Architecture, seed: int = 0) -> None:
        super().__init__()
        self.architecture = architecture
        initial = initial_parameters(architecture, torch.Generator().manual_seed(seed))
        for name, value in initial.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, images: Float[Tensor, "b c s s"]) -> Float[Tensor, "b k"]:
        return vit_logits(dict(self.named_parameters()), images, self.architecture)


def flatten_parameters(parameters: Mapping[str, Tensor], architecture: Architecture) -> Float[Tensor, " P"]:
    """Return all parameters as one vector, row-major within a block."""
    return torch.cat([parameters[name].reshape(-1) for name in parameter_shapes(architecture)])


def unflatten_parameters(theta: Float[Tensor, " P"], architecture: Architecture) -> dict[str, Tensor]:
    """Return the named blocks of a parameter vector, as views. Inverse of `flatten_parameters`."""
    shapes = parameter_shapes(architecture)
    parts = theta.split([prod(shape) for shape in shapes.values()])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
