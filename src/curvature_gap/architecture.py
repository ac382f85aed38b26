"""What varies between the transformers of this package, as data."""

from dataclasses import dataclass
from math import prod
from typing import Literal


@dataclass(frozen=True)
class Architecture:
    """A vision transformer: patches, linear embedding, blocks, mean over tokens, linear classifier.

    The defaults are the reading of the paper's model that its published Hessian figures fix: bias-free linear
    layers, one head, an output projection, post-norm, fixed sinusoidal positions.

    Raises:
        ValueError: If a size is not positive, the patch does not divide the image or the heads do not divide d_V.

    Source: TAB-1, FIG-2.
    """

    image_size: int
    channels: int
    patch: int
    classes: int
    d_V: int
    d_ff: int
    depth: int = 1
    heads: int = 1
    d_K: int | None = None
    """Key width of one head; None means d_V / heads."""
    norm: Literal["post", "pre"] = "post"
    mask: Literal["none", "causal"] = "none"
    activation: Literal["relu", "gelu", "tanh"] = "relu"
    bias: bool = False
    """Biases of the embedding, the feed-forward layers and the classifier; attention never has any."""
    output_projection: bool = True
    positions: Literal["none", "sinusoidal", "learned"] = "sinusoidal"
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("image_size", "channels", "patch", "classes", "d_V", "d_ff", "depth", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.d_K is not None and self.d_K < 1:
            raise ValueError(f"d_K must be at least 1, got {self.d_K}.")
        if self.image_size % self.patch:
            raise ValueError(f"patch {self.patch} does not divide image_size {self.image_size}.")
        if self.d_V % self.heads:
            raise ValueError(f"heads {self.heads} does not divide d_V {self.d_V}.")
        allowed = {
            "norm": ("post", "pre"),
            "mask": ("none", "causal"),
            "activation": ("relu", "gelu", "tanh"),
            "positions": ("none", "sinusoidal", "learned"),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} must be one of {', '.join(values)}, got {getattr(self, name)!r}.")
        if self.norm_eps < 0:
            raise ValueError(f"norm_eps must not be negative, got {self.norm_eps}.")

    @property
    def n_tokens(self) -> int:
        return (self.image_size // self.patch) ** 2

    @property
    def patch_size(self) -> int:
        """Numbers in one flattened patch."""
        return self.channels * self.patch**2

    @property
    def head_d_K(self) -> int:
        """Key width of one head."""
        return self.d_K if self.d_K is not None else self.d_V // self.heads

    @property
    def n_parameters(self) -> int:
        return sum(prod(shape) for shape in parameter_shapes(self).values())


def parameter_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return every parameter block's shape, in the order of the Hessian's rows, in the paper's orientation `X @ W`.

    With one block the names are the paper's (`W_Q`, `LN1_gamma`, ...); with more, `block1_W_Q`, `block2_W_Q`, ...
    """
    a = architecture
    keys = a.heads * a.head_d_K
    shapes: dict[str, tuple[int, ...]] = {"embed": (a.patch_size, a.d_V)}
    if a.bias:
        shapes["embed_bias"] = (a.d_V,)
    if a.positions == "learned":
        shapes["positions"] = (a.n_tokens, a.d_V)
    block: dict[str, tuple[int, ...]] = {"W_Q": (a.d_V, keys), "W_K": (a.d_V, keys), "W_V": (a.d_V, a.d_V)}
    if a.output_projection:
        block["W_O"] = (a.d_V, a.d_V)
    block |= {"LN1_gamma": (a.d_V,), "LN1_beta": (a.d_V,), "W_1": (a.d_V, a.d_ff)}
    if a.bias:
        block["b_1"] = (a.d_ff,)
    block["W_2"] = (a.d_ff, a.d_V)
    if a.bias:
        block["b_2"] = (a.d_V,)
    block |= {"LN2_gamma": (a.d_V,), "LN2_beta": (a.d_V,)}
    for prefix in block_prefixes(a):
        shapes |= {prefix + name: shape for name, shape in block.items()}
    shapes["classifier"] = (a.d_V, a.classes)
    if a.bias:
        shapes["classifier_bias"] = (a.classes,)
    return shapes


def block_prefixes(architecture: Architecture) -> list[str]:
    """Return the name prefix of each transformer block, first block first."""
    if architecture.depth == 1:
        return [""]
    return [f"block{i}_" for i in range(1, architecture.depth + 1)]
