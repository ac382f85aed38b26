"""Curvature along a training: norms of the parameter blocks and of their exact Hessian blocks, step by step."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvature_gap.architecture import Architecture, parameter_shapes
from curvature_gap.exact_hessian import exact_hessian
from curvature_gap.hessian import Hessian
from curvature_gap.norms import POOLED, block_norms_table, frobenius_norm, spectral_norm
from curvature_gap.training import stage_name
from curvature_gap.vit import ViT

Pair = tuple[str, str]
MEASURES = ("spectral", "frobenius", "max_abs", "mean_abs", "mean_log10_abs")


def diagonal_pairs(names: Sequence[str]) -> list[Pair]:
    """Return each block with itself, and γ with β of each LayerNorm, which the pooled LN1 and LN2 need."""
    pairs = [(name, name) for name in names]
    for gamma, beta in POOLED.values():
        pairs += [(name, name.removesuffix(gamma) + beta) for name in names if name.endswith(gamma)]
    return pairs


def hessian_at(
    parameters: Mapping[str, Tensor],
    images: Tensor,
    labels: Tensor,
    architecture: Architecture,
    *,
    whole: bool = False,
    batch_sha256: str | None = None,
) -> Hessian:
    """Return the exact Hessian at one step: the whole matrix, certified, or the diagonal blocks alone.

    The blocks of every step come from one engine; its certificate is taken where the whole matrix is.
    """
    model = ViT(architecture).to(images.device)
    model.load_state_dict(parameters)
    blocks = None if whole else diagonal_pairs(list(parameter_shapes(architecture)))
    return exact_hessian(model, images, labels, blocks=blocks, certify=whole, batch_sha256=batch_sha256)


def parameter_norms(parameters: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Return the spectral and the Frobenius norm of every block, and of LN1 and LN2 with γ and β in one vector.

    A vector's norms are both its length.
    """
    pooled = dict(parameters)
    for name in parameters:
        for pool, (gamma, beta) in POOLED.items():
            if name.endswith(gamma):
                prefix = name.removesuffix(gamma)
                pooled[prefix + pool] = torch.cat([parameters[name], parameters[prefix + beta]])
    matrices = {name: p.double().cpu().reshape(len(p), -1) for name, p in pooled.items()}
    return {name: (spectral_norm(W), frobenius_norm(W)) for name, W in matrices.items()}


def dynamics_rows(
    hessian: Hessian, parameters: Mapping[str, Tensor], *, run: str, seed: int, step: int, steps: int
) -> list[dict[str, Any]]:
    """Return one step's rows: per block the norms of the parameters and of the diagonal Hessian block.

    `hessian_*` are the columns of `block_norms.csv`; the loss and its gradient norm are those of the fixed batch.
    """
    norms = parameter_norms(parameters)
    lines = block_norms_table(hessian, run=run, stage=stage_name(step, steps), seed=seed, diagonal_only=True)
    return [
        {
            "run": run,
            "stage": line["stage"],
            "seed": seed,
            "step": step,
            "block": line["row"],
            "parameter_spectral": norms[line["row"]][0],
            "parameter_frobenius": norms[line["row"]][1],
            **{f"hessian_{measure}": line[measure] for measure in MEASURES},
            "loss": hessian.loss,
            "grad_norm": hessian.grad_norm,
        }
        for line in lines
    ]
