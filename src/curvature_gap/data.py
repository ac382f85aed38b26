"""Prepared datasets: one format, one order, seeded nested subsets, and the tensors a model takes.

Where images come from is `data_sources`; training and Hessians import this module alone.
"""

import hashlib
import json
import lzma
import shlex
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from curvature_gap.files import atomic_path

if TYPE_CHECKING:
    import torch

MAX_BYTES = 4 * 2**30
"""Largest dataset that is held in memory (uint8 pixels)."""

DAMAGED = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, OSError, EOFError, ValueError, LookupError),
    *(TypeError, OverflowError, MemoryError, RuntimeError, SyntaxError),
)
"""What zipfile and numpy raise on damaged files, found by flipping every byte."""

_ARRAYS = ("train_images", "train_labels", "test_images", "test_labels", "mean", "std")


class CorruptDatasetError(ValueError):
    """A prepared file that does not hold what was written."""


@dataclass(frozen=True)
class Attempt:
    """One source that was tried, and what happened."""

    source: str
    outcome: str

    def __str__(self) -> str:
        return f"{self.source}: {self.outcome}"


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled images, split into training and test, each in canonical order (see `canonical_order`).

    Images are uint8 of shape (n, c, s, s), labels int64 of shape (n,), `mean` and `std` (population) float64 of shape
    (c,), over the training images scaled to [0, 1]. `source` names what the images came from, `note` is what a caption
    must say (empty for the real thing), `sha256` covers images, labels and class names. A dataset that could not be
    had is empty and has its reason in `note`.

    Raises:
        ValueError: If a shape, a dtype or a label does not fit.
    """

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    class_names: tuple[str, ...]
    source: str
    note: str
    sha256: str
    attempts: tuple[Attempt, ...] = ()

    def __post_init__(self) -> None:
        for split in ("train", "test"):
            images, labels = getattr(self, f"{split}_images"), getattr(self, f"{split}_labels")
            _check_images(f"{self.name}: {split}", images, labels)
            if len(labels) and not 0 <= labels.min() <= labels.max() < self.classes:
                raise ValueError(
                    f"{self.name}: {split} labels {labels.min()} to {labels.max()}, classes {self.classes}."
                )
        if self.train_images.shape[1:] != self.test_images.shape[1:]:
            shapes = f"{self.train_images.shape[1:]}, test images {self.test_images.shape[1:]}"
            raise ValueError(f"{self.name}: training images are {shapes}.")

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def channels(self) -> int:
        return int(self.train_images.shape[1])

    @property
    def image_size(self) -> int:
        return int(self.train_images.shape[2])

    @property
    def available(self) -> bool:
        return len(self.train_labels) > 0


def _check_images(where: str, images: np.ndarray, labels: np.ndarray) -> None:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[2] != images.shape[3]:
        raise ValueError(f"{where} images must be uint8 (n, c, s, s), got {images.dtype} {images.shape}.")
    if labels.dtype != np.int64 or labels.shape != images.shape[:1]:
        raise ValueError(f"{where} labels must be int64 ({len(images)},), got {labels.dtype} {labels.shape}.")


def check_size(where: str, n: int, channels: int, image_size: int) -> None:
    """Refuse, before any memory is taken, what `MAX_BYTES` cannot hold. Raises ValueError with the sizes."""
    if min(n, channels, image_size) < 1:
        raise ValueError(f"{where}: {n} images, {channels} channels, image_size {image_size}; each must be at least 1.")
    needed = n * channels * image_size**2
    if needed > MAX_BYTES:
        raise ValueError(
            f"{where}: {n} images of {channels} x {image_size} x {image_size} pixels need {needed / 2**30:.1f} GiB, "
            f"the limit is {MAX_BYTES / 2**30:.0f} GiB. Choose a smaller image_size or fewer images."
        )


def assemble(
    name: str,
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    class_names: tuple[str, ...],
    *,
    source: str,
    note: str = "",
    attempts: tuple[Attempt, ...] = (),
) -> Dataset:
    """Return the dataset of images and labels as a source delivers them: canonical order, mean, std and hash added.

    Raises:
        ValueError: If arrays and class names do not fit, or a channel is constant (its std is zero).
    """
    for images, labels in (train, test):
        _check_images(name, images, labels)
    (train_images, train_labels), (test_images, test_labels) = _canonical(*train), _canonical(*test)
    mean, std = channel_statistics(train_images)
    if (std == 0).any():
        channel = int(np.flatnonzero(std == 0)[0])
        raise ValueError(f"{name}: channel {channel} has the same value in all training images; nothing to learn from.")
    digest = content_sha256(train_images, train_labels, test_images, test_labels, class_names=class_names)
    return Dataset(
        name=name,
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
        mean=mean,
        std=std,
        class_names=class_names,
        source=source,
        note=note,
        sha256=digest,
        attempts=attempts,
    )


def _canonical(images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = canonical_order(images, labels)
    return images[order], labels[order]


def unavailable(
    name: str, reason: str, *, image_size: int, channels: int, classes: int, attempts: tuple[Attempt, ...] = ()
) -> Dataset:
    """Return the empty dataset that stands for one that could not be had, in the shape it would have."""
    images, labels = np.empty((0, channels, image_size, image_size), np.uint8), np.empty(0, np.int64)
    class_names = tuple(map(str, range(classes)))
    digest = content_sha256(images, labels, images, labels, class_names=class_names)
    mean, std = np.zeros(channels), np.ones(channels)
    return Dataset(name, images, labels, images, labels, mean, std, class_names, "none", reason, digest, attempts)


def channel_statistics(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each channel's mean and population standard deviation, of pixels scaled to [0, 1], in float64.

    From the histogram, in integers until the last division, so the order of the images does not matter.
    """
    value = np.arange(256, dtype=np.int64)
    means, stds = [], []
    for c in range(images.shape[1]):
        count = np.bincount(images[:, c].reshape(-1), minlength=256)
        n = int(count.sum())
        first, second = int(count @ value), int(count @ value**2)
        means.append(first / n / 255)
        stds.append((n * second - first**2) ** 0.5 / n / 255)
    return np.array(means), np.array(stds)


def image_digests(images: np.ndarray) -> np.ndarray:
    """Return the SHA-256 of every image's raw pixels, as four big-endian words: uint64 of shape (n, 4)."""
    rows = np.ascontiguousarray(images).reshape(len(images), prod(images.shape[1:]))
    digests = b"".join(hashlib.sha256(row.data).digest() for row in rows)
    return np.frombuffer(digests, dtype=">u8").reshape(len(images), 4).astype(np.uint64)


def canonical_order(images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the permutation that sorts by (SHA-256 of raw pixels, label).

    It does not depend on the order or the format in which a source delivers the images; ties are identical samples.
    """
    words = image_digests(images)
    return np.lexsort((labels, *words.T[::-1])).astype(np.int64)


def content_sha256(*arrays: np.ndarray, class_names: tuple[str, ...] = ()) -> str:
    """Return the SHA-256 of the arrays' dtypes, shapes and bytes, in this order, and of the class names."""
    digest = hashlib.sha256()
    for array in arrays:
        array = np.ascontiguousarray(array)
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(array.data if array.size else b"")
    digest.update(json.dumps(class_names).encode())
    return digest.hexdigest()


def subset_indices(images: np.ndarray, labels: np.ndarray, n: int, seed: int, stratified: bool = False) -> np.ndarray:
    """Return the indices of n images drawn without replacement: int64 of shape (n,).

    The draw permutes the canonical order, so the chosen images do not depend on where the data came from, and a smaller
    subset with the same seed is a prefix of a larger one. Stratified: every prefix holds the classes in proportion, to
    within one image where classes have equal sizes.

    Raises:
        ValueError: If n is negative or exceeds the number of images, or images and labels do not fit.
    """
    import torch

    _check_images("subset:", images, labels)
    if not 0 <= n <= len(images):
        raise ValueError(f"A subset of {n} was asked for; there are {len(images)} images.")
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randperm(len(images), generator=generator).numpy()
    drawn = canonical_order(images, labels)[draw]
    if stratified:
        drawn = drawn[_interleave(labels[drawn])]
    return drawn[:n]


def _interleave(labels: np.ndarray) -> np.ndarray:
    """Return the order in which sample r of a class of size m stands at (r + 1/2) / m, for all classes alike."""
    by_class = np.argsort(labels, kind="stable")
    counts = np.bincount(labels)
    starts = np.cumsum(counts) - counts
    rank = np.empty(len(labels), np.int64)
    rank[by_class] = np.arange(len(labels)) - starts[labels[by_class]]
    # Stable: equal positions (classes of one size) keep the order of the draw.
    return np.argsort((2 * rank + 1) / (2 * counts[labels]), kind="stable")


def subset_record(images: np.ndarray, labels: np.ndarray, indices: np.ndarray) -> dict[str, Any]:
    """Return what identifies a subset: its size, indices, label histogram and content hash (in the subset's order)."""
    return {
        "n": len(indices),
        "sha256": content_sha256(images[indices], labels[indices]),
        "label_histogram": label_histogram(labels[indices]),
        "indices": [int(i) for i in indices],
    }


def label_histogram(labels: np.ndarray) -> dict[str, int]:
    """Return how often each label occurs; labels are strings because JSON's keys are."""
    values, counts = np.unique(labels, return_counts=True)
    return {str(value): int(count) for value, count in zip(values, counts, strict=True)}


def normalise(images: np.ndarray, mean: np.ndarray, std: np.ndarray) -> "torch.Tensor":
    """Return float32 (n, c, s, s): pixels scaled to [0, 1], minus the channel's mean, divided by its std.

    Raises:
        ValueError: If images are not uint8 (n, c, s, s) or mean and std not (c,).
    """
    import torch

    if images.dtype != np.uint8 or images.ndim != 4:
        raise ValueError(f"Images must be uint8 (n, c, s, s), got {images.dtype} {images.shape}.")
    if mean.shape != images.shape[1:2] or std.shape != images.shape[1:2]:
        raise ValueError(f"Images have {images.shape[1]} channels, mean {mean.shape} and std {std.shape}.")
    centre, scale = (torch.as_tensor(x, dtype=torch.float32).reshape(-1, 1, 1) for x in (mean, std))
    return (torch.as_tensor(np.ascontiguousarray(images)).to(torch.float32) / 255 - centre) / scale


def hessian_batch(dataset: Dataset, indices: np.ndarray, n: int) -> tuple["torch.Tensor", "torch.Tensor", str]:
    """Return the first n of a subset's training images, normalised (float32), their labels (int64), and their SHA-256.

    The hash covers raw pixels and labels in this order.

    Raises:
        ValueError: If n is below 1 or exceeds the subset.
    """
    import torch

    if not 1 <= n <= len(indices):
        raise ValueError(f"A batch of {n} was asked for; the subset has {len(indices)} images.")
    images, labels = dataset.train_images[indices[:n]], dataset.train_labels[indices[:n]]
    batch = normalise(images, dataset.mean, dataset.std)
    return batch, torch.as_tensor(labels), content_sha256(images, labels)


def describe(dataset: Dataset) -> dict[str, Any]:
    """Return the JSON side file of a dataset: the source that won, every attempt, hashes, counts, mean and std."""
    splits = {}
    for split in ("train", "test"):
        images, labels = getattr(dataset, f"{split}_images"), getattr(dataset, f"{split}_labels")
        histogram = label_histogram(labels)
        splits[split] = {"n": len(labels), "sha256": content_sha256(images, labels), "label_histogram": histogram}
    return {
        "name": dataset.name,
        "available": dataset.available,
        "source": dataset.source,
        "note": dataset.note,
        "attempts": [str(attempt) for attempt in dataset.attempts],
        "sha256": dataset.sha256,
        "channels": dataset.channels,
        "image_size": dataset.image_size,
        "classes": dataset.classes,
        "class_names": list(dataset.class_names),
        "mean": dataset.mean.tolist(),
        "std": dataset.std.tolist(),
        "in_both_splits": _n_shared(dataset.train_images, dataset.test_images),
        **splits,
    }


def _n_shared(train: np.ndarray, test: np.ndarray) -> int:
    """Count the test images whose pixels also occur in training."""
    known = {row.tobytes() for row in image_digests(train)}
    return sum(row.tobytes() in known for row in image_digests(test))


def write_prepared(dataset: Dataset, path: str | Path) -> None:
    """Write a dataset as .npz, whole or not at all; its bytes depend on the data and the source that won alone."""
    keys = ("name", "class_names", "source", "note", "sha256")
    text = json.dumps({key: getattr(dataset, key) for key in keys})
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.savez(file, about=np.array(text), **{key: getattr(dataset, key) for key in _ARRAYS})


def read_prepared(path: str | Path) -> Dataset:
    """Read what `write_prepared` wrote; no pickle is ever read.

    Raises:
        FileNotFoundError: If there is no such file.
        CorruptDatasetError: If the file is damaged or its content does not have the recorded hash.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in _ARRAYS}
            about: Mapping[str, Any] = json.loads(str(file["about"]))
        class_names = tuple(about["class_names"])
        dataset = Dataset(
            **arrays, class_names=class_names, **{key: about[key] for key in ("name", "source", "note", "sha256")}
        )
    except (FileNotFoundError, PermissionError):
        raise
    except DAMAGED as error:
        raise CorruptDatasetError(_corrupt(path, str(error))) from error
    found = content_sha256(*(arrays[key] for key in _ARRAYS[:4]), class_names=class_names)
    if found != dataset.sha256:
        raise CorruptDatasetError(_corrupt(path, f"content has SHA-256 {found}, recorded is {dataset.sha256}"))
    return dataset


def _corrupt(path: str | Path, reason: str) -> str:
    return f"{path} is not an intact prepared dataset: {reason}. Delete it (rm {shlex.quote(str(path))}) and run again."
