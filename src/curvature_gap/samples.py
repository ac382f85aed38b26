"""From a stored dataset to the tensors a model takes."""

import numpy as np
import torch
from torch import Tensor

from curvature_gap.data import Dataset, normalise

Samples = tuple[Tensor, Tensor]
"""Normalised float32 images (n, c, s, s) and int64 labels (n,)."""


def training_samples(dataset: Dataset, indices: np.ndarray) -> Samples:
    """Return the training images of a subset, in its order, and their labels."""
    images = normalise(dataset.train_images[indices], dataset.mean, dataset.std)
    return images, torch.as_tensor(dataset.train_labels[indices])


def held_out_samples(dataset: Dataset) -> Samples:
    """Return the whole test split."""
    return normalise(dataset.test_images, dataset.mean, dataset.std), torch.as_tensor(dataset.test_labels)
