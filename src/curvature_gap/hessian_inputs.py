"""What a Hessian is computed from: a checkpoint's model and the fixed batch, read from the workflow's files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvature_gap.architecture import Architecture
from curvature_gap.data import hessian_batch, read_prepared
from curvature_gap.training import load_model
from curvature_gap.vit import ViT


def read_hessian_inputs(
    data: str | Path,
    subset: str | Path,
    checkpoint: str | Path,
    *,
    architecture: Mapping[str, Any],
    batch_size: int,
    device: torch.device | str = "cpu",
) -> tuple[ViT, Tensor, Tensor]:
    """Return the model, images (b, c, s, s) and labels (b,) on `device`.

    Args:
        data: A prepared dataset.
        subset: npz with `indices`; the batch is their first `batch_size`.
        checkpoint: The weights.
        architecture: The model's fields, as in the configuration.
        batch_size: b.
        device: Where to put all three.

    Raises:
        ValueError: If a file is damaged, or the checkpoint is of another architecture. Names the file.
    """
    model = load_model(checkpoint, Architecture(**architecture))
    with np.load(subset) as file:
        images, labels, _ = hessian_batch(read_prepared(data), file["indices"], batch_size)
    return model.to(device), images.to(device), labels.to(device)
