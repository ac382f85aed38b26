"""Images without network, for small runs: scikit-learn's bundled digits, and generated colour pictures."""

import numpy as np

from curvature_gap.data import Dataset, assemble, check_size

DIGITS_TEST = 360
DIGITS_SIDE, DIGITS_MAX = 8, 16
STRIPES_PERIOD = 16
NOISE = 48


def load_digits(name: str, *, image_size: int = 28, seed: int = 0) -> Dataset:
    """Return scikit-learn's 1,797 grey 8 x 8 digits, scaled bilinearly; 360, drawn by the seed, are the test set.

    In integers throughout, so the pixels are the same on every machine.
    """
    from sklearn.datasets import load_digits as bundled

    small = bundled()
    grey = small.images.astype(np.int64)
    check_size(name, len(grey), 1, image_size)
    R = interpolation(DIGITS_SIDE, image_size)
    weight = (2 * image_size) ** 2 * DIGITS_MAX
    images = (((R @ grey @ R.T) * 255 + weight // 2) // weight).astype(np.uint8)[:, None]
    labels = small.target.astype(np.int64)
    order = _permutation(len(labels), seed)
    test, train = order[:DIGITS_TEST], order[DIGITS_TEST:]
    return assemble(
        name,
        (images[train], labels[train]),
        (images[test], labels[test]),
        tuple("0123456789"),
        source="scikit-learn digits",
        note=f"scikit-learn's bundled 8 x 8 digits scaled to {image_size} x {image_size}, not MNIST",
    )


def interpolation(n: int, m: int) -> np.ndarray:
    """Return the m x n matrix of bilinear interpolation times 2 m, in integers; edges are repeated."""
    # Centre of pixel i of m, in pixels of the n: (2 i + 1) n / (2 m) - 1/2, clipped to the centres of the outermost.
    place = np.clip((2 * np.arange(m) + 1) * n - m, 0, 2 * m * (n - 1))
    left, share = place // (2 * m), place % (2 * m)
    R = np.zeros((m, n), np.int64)
    R[np.arange(m), left] += 2 * m - share
    R[np.arange(m), np.minimum(left + 1, n - 1)] += share
    return R


def load_synthetic(
    name: str,
    *,
    image_size: int = 32,
    classes: int = 10,
    n_train: int = 2000,
    n_test: int = 500,
    seed: int = 0,
) -> Dataset:
    """Return generated colour images in CIFAR's format: a class is a direction and two colours of noisy stripes.

    Phase and noise differ from image to image, so a class must be learned and can be. In integers throughout.

    Raises:
        ValueError: If there are fewer than two classes or fewer images than classes, or the set is too large.
    """
    if classes < 2 or min(n_train, n_test) < classes:
        raise ValueError(
            f"{name}: {classes} classes, {n_train} + {n_test} images; at least two and one each are needed."
        )
    check_size(name, n_train + n_test, 3, image_size)
    return assemble(
        name,
        _stripes(n_train, classes, image_size, 2 * seed),
        _stripes(n_test, classes, image_size, 2 * seed + 1),
        tuple(f"stripes{c:03d}" for c in range(classes)),
        source="generated",
        note=f"generated colour images, {classes} classes of noisy stripes, not CIFAR-100",
    )


def _stripes(n: int, classes: int, side: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return n images (n, 3, side, side) and their labels, the classes in equal numbers to within one."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    labels = np.arange(n) % classes
    phase = torch.randint(STRIPES_PERIOD, (n, 1, 1), generator=generator).numpy()
    noise = torch.randint(-NOISE, NOISE + 1, (n, 3, side, side), generator=generator, dtype=torch.int16).numpy()
    y, x = np.mgrid[:side, :side]
    # Directions (1, 0), (0, 1), (1, 1), (1, 2), ...; colours come from a multiplicative hash of the class.
    a, b = (labels % 4)[:, None, None], ((labels // 4 + (labels % 4 == 0)) % 4)[:, None, None]
    bright = (a * x + b * y + phase) % STRIPES_PERIOD < STRIPES_PERIOD // 2
    high, low = _colours(labels, 0), _colours(labels, 1)
    clean = np.where(bright[:, None], high[:, :, None, None], low[:, :, None, None])
    return np.clip(clean + noise, 0, 255).astype(np.uint8), labels.astype(np.int64)


def _colours(labels: np.ndarray, which: int) -> np.ndarray:
    """Return a fixed pseudo-random colour of each label, int64 (n, 3), between 40 and 215."""
    keys = (labels[:, None] * 2 + which) * 3 + np.arange(3)
    return 40 + (keys * 2654435761 % 2**32 >> 16) % 176


def _permutation(n: int, seed: int) -> np.ndarray:
    import torch

    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).numpy()
