"""M of the theorems, the largest Hessian norm of one sample's loss: estimated from samples, and bounded."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from curvature_gap.architecture import Architecture
from curvature_gap.lanczos import per_sample_hessian_norms
from curvature_gap.theory.model_bound import check_architecture, model_bounds
from curvature_gap.vit import ViT


@dataclass(frozen=True)
class SampleCurvature:
    """The largest ‖∇²l_i(w)‖ among some samples, from below by Lanczos and from above by the tight bound.

    Over all data M can be larger. `residual` is the largest relative residual of the Lanczos runs. `tight` bounds the
    Hessian of the sample that attains `M`, so it is above every norm among the samples; NaN where the bound does not
    cover the architecture.
    """

    M: float
    residual: float
    tight: float
    n_samples: int


def sample_curvature(
    parameters: Mapping[str, Tensor],
    images: Tensor,
    labels: Tensor,
    architecture: Architecture,
    iterations: int = 30,
    dtype: torch.dtype = torch.float64,
) -> SampleCurvature:
    """Return M over these samples. Source: T1, T7."""
    model = ViT(architecture).to(images.device)
    model.load_state_dict(parameters)
    norms, residuals = per_sample_hessian_norms(model, images, labels, iterations, dtype=dtype)
    worst = int(norms.argmax())
    one = slice(worst, worst + 1)
    tight = float("nan")
    if is_covered(architecture):
        on_cpu = {name: p.cpu() for name, p in parameters.items()}
        tight = model_bounds(on_cpu, images[one].cpu(), labels[one].cpu(), architecture).total
    return SampleCurvature(float(norms[worst]), float((residuals / norms).max()), tight, len(labels))


def is_covered(architecture: Architecture) -> bool:
    """Return whether the tight bound covers the architecture."""
    try:
        check_architecture(architecture)
    except ValueError:
        return False
    return True
