"""Images made without network: scaled digits and coloured stripes."""

import numpy as np
import pytest
import torch

from curvature_gap import generated_images as generated


@pytest.mark.parametrize(("n", "m"), [(8, 28), (2, 3), (5, 7), (7, 5), (3, 1)])
def test_interpolation_is_torchs_bilinear_one(n, m):
    R = torch.as_tensor(generated.interpolation(n, m)) / (2 * m)
    torch.testing.assert_close(R.sum(dim=1), torch.ones(m))
    x = torch.randn(1, 1, n, n, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.interpolate(x, size=(m, m), mode="bilinear", align_corners=False)
    torch.testing.assert_close(R @ x @ R.T, expected)


def test_digits_are_scikit_learns_and_say_so():
    from sklearn.datasets import load_digits

    dataset = generated.load_digits("mnist")
    assert (len(dataset.train_labels), len(dataset.test_labels)) == (1437, 360)
    assert (dataset.channels, dataset.image_size, dataset.classes) == (1, 28, 10)
    assert "not MNIST" in dataset.note
    small = load_digits()
    both = np.concatenate([dataset.train_images, dataset.test_images])
    labels = np.concatenate([dataset.train_labels, dataset.test_labels])
    np.testing.assert_array_equal(np.bincount(labels), np.bincount(small.target))
    np.testing.assert_allclose(both.mean() / 255, small.images.mean() / 16, atol=0.02)
    assert both.max() == 255


def test_digits_at_their_own_size_are_exact():
    from sklearn.datasets import load_digits

    dataset = generated.load_digits("digits", image_size=8)
    expected = {image.astype(np.uint8).tobytes() for image in np.floor(load_digits().images * 255 / 16 + 0.5)}
    assert {image.tobytes() for image in np.concatenate([dataset.train_images, dataset.test_images])} == expected


def test_generated_sets_depend_on_their_seed_alone():
    one, same, other = (generated.load_synthetic("x", n_train=30, n_test=20, seed=seed) for seed in (1, 1, 2))
    assert one.sha256 == same.sha256 != other.sha256
    assert generated.load_digits("x", seed=1).sha256 != generated.load_digits("x", seed=2).sha256


def test_stripes_have_cifars_format_and_balanced_classes():
    dataset = generated.load_synthetic("cifar100", classes=7, n_train=70, n_test=21)
    assert dataset.train_images.shape == (70, 3, 32, 32)
    assert dataset.train_images.dtype == np.uint8
    assert np.bincount(dataset.train_labels).tolist() == [10] * 7
    assert np.bincount(dataset.test_labels).tolist() == [3] * 7
    assert "generated" in dataset.note
    assert "not CIFAR-100" in dataset.note


def test_stripes_can_be_learned():
    dataset = generated.load_synthetic("x", classes=10, n_train=300, n_test=100)

    def features(images):
        return np.sort(images.reshape(len(images), 3, -1), axis=2)[:, :, ::64].reshape(len(images), -1).astype(float)

    train, test = features(dataset.train_images), features(dataset.test_images)
    nearest = ((test[:, None] - train[None]) ** 2).sum(axis=2).argmin(axis=1)
    assert (dataset.train_labels[nearest] == dataset.test_labels).mean() > 0.9


def test_a_hundred_classes_of_stripes_differ():
    images, labels = generated._stripes(100, 100, 16, seed=0)
    assert len({(images[i].mean(axis=(1, 2)) // 4).tobytes() for i in labels}) > 90


@pytest.mark.parametrize(
    "settings", [{"classes": 1}, {"n_train": 5}, {"n_test": 0}, {"image_size": 0}, {"image_size": 10**6}]
)
def test_impossible_sets_are_refused(settings):
    with pytest.raises(ValueError, match=r"at least|limit"):
        generated.load_synthetic("x", **settings)
    with pytest.raises(ValueError, match=r"at least|limit"):
        generated.load_digits("x", image_size=settings.get("image_size", -1))
