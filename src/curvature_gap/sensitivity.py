"""How far the claims on the largest block depend on what the paper leaves open: one change at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from curvature_gap.architecture import Architecture


@dataclass(frozen=True)
class Variant:
    """One reading of the experiment. `normalised` is mean and deviation one; without, pixels lie in [0, 1]."""

    name: str
    architecture: Architecture
    normalised: bool = True
    batch_size: int = 128
    batch_seed: int = 0


def variants(architecture: Architecture, batch_size: int, batch_seed: int) -> Iterator[Variant]:
    """Yield the pinned model and its neighbours: positions, normalisation, batch, biases, output projection."""
    pinned = Variant("pinned", architecture, True, batch_size, batch_seed)
    yield pinned
    for positions in ("none", "sinusoidal", "learned"):
        if positions != architecture.positions:
            yield _with(pinned, f"positions_{positions}", positions=positions)
    yield replace(pinned, name="pixels_0_to_1", normalised=False)
    yield replace(pinned, name=f"batch_{max(1, batch_size // 4)}", batch_size=max(1, batch_size // 4))
    for i in (1, 2):
        yield replace(pinned, name=f"batch_seed_{batch_seed + i}", batch_seed=batch_seed + i)
    yield _with(pinned, "bias" if not architecture.bias else "no_bias", bias=not architecture.bias)
    name = "no_output_projection" if architecture.output_projection else "output_projection"
    yield _with(pinned, name, output_projection=not architecture.output_projection)


def _with(variant: Variant, name: str, **changes: Any) -> Variant:
    return replace(variant, name=name, architecture=replace(variant.architecture, **changes))
