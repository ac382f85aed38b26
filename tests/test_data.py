"""Prepared datasets and subsets: order, nestedness, independence of the source, the file on disk."""

import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from curvature_gap import data


def tiny(n: int = 14, channels: int = 3, side: int = 5, classes: int = 2, seed: int = 0):
    """Return images and labels; with few grey values and tiny pictures some images are equal."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (n, channels, side, side), dtype=np.uint8)
    return images, rng.integers(0, classes, n)


def dataset(**changes) -> data.Dataset:
    train, test = tiny(14), tiny(7, seed=1)
    return replace(data.assemble("tiny", train, test, ("cat", "dog"), source="made up", note="not real"), **changes)


samples = st.integers(0, 2**32 - 1).map(lambda seed: tiny(n=30, channels=1, side=1, classes=3, seed=seed))


@given(samples, st.integers(0, 30), st.integers(0, 30), st.booleans(), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_a_smaller_subset_is_a_prefix_of_a_larger_one(sample, n, m, stratified, seed):
    smaller, larger = (data.subset_indices(*sample, k, seed, stratified) for k in sorted((n, m)))
    np.testing.assert_array_equal(smaller, larger[: len(smaller)])
    assert len(set(larger.tolist())) == len(larger) == max(n, m)


@given(samples, st.permutations(range(30)), st.integers(1, 30), st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_subset_does_not_depend_on_the_order_of_the_source(sample, shuffle, n, stratified):
    images, labels = sample
    original = data.subset_indices(images, labels, n, 7, stratified)
    shuffled = data.subset_indices(images[shuffle], labels[shuffle], n, 7, stratified)
    np.testing.assert_array_equal(images[original], images[shuffle][shuffled])
    np.testing.assert_array_equal(labels[original], labels[shuffle][shuffled])


def test_the_canonical_order_sorts_by_the_hexadecimal_hash_and_then_the_label():
    import hashlib

    images, labels = tiny(n=60, channels=1, side=1, seed=3)
    images //= 16  # sixteen different pictures: ties, decided by the label
    keys = [(hashlib.sha256(image.tobytes()).hexdigest(), label) for image, label in zip(images, labels, strict=True)]
    order = data.canonical_order(images, labels)
    assert [keys[i] for i in order] == sorted(keys)


def test_other_seeds_draw_other_subsets():
    images, labels = tiny(30)
    assert not np.array_equal(data.subset_indices(images, labels, 10, 0), data.subset_indices(images, labels, 10, 1))


@pytest.mark.parametrize("n", [1, 7, 12, 29])
def test_a_stratified_subset_of_equal_classes_is_balanced_to_one_image(n):
    images, _ = tiny(30)
    labels = np.arange(30) % 3
    counts = np.bincount(labels[data.subset_indices(images, labels, n, 5, stratified=True)], minlength=3)
    assert counts.max() - counts.min() <= 1


def test_a_stratified_subset_keeps_the_share_of_a_rare_class():
    images, _ = tiny(100)
    labels = (np.arange(100) < 10).astype(np.int64)
    chosen = labels[data.subset_indices(images, labels, 50, 5, stratified=True)]
    assert chosen.sum() == 5
    # A label that no image has leaves a gap in the histogram, not an error.
    assert len(data.subset_indices(images, labels * 5, 50, 5, stratified=True)) == 50


def test_impossible_subsets_are_refused():
    images, labels = tiny(14)
    with pytest.raises(ValueError, match="subset of 15 was asked for; there are 14"):
        data.subset_indices(images, labels, 15, 0)
    with pytest.raises(ValueError, match="subset of -1"):
        data.subset_indices(images, labels, -1, 0)
    with pytest.raises(ValueError, match=r"labels must be int64 \(14,\)"):
        data.subset_indices(images, labels[:13], 3, 0)
    with pytest.raises(ValueError, match="must be uint8"):
        data.subset_indices(images.astype(np.float32), labels, 3, 0)
    assert len(data.subset_indices(images, labels, 0, 0)) == 0
    assert len(data.subset_indices(images[:0], labels[:0], 0, 0, stratified=True)) == 0


def test_a_subsets_record_identifies_it():
    images, labels = tiny(14)
    indices = data.subset_indices(images, labels, 6, 2)
    record = data.subset_record(images, labels, indices)
    assert record["indices"] == indices.tolist()
    assert sum(record["label_histogram"].values()) == record["n"] == 6
    flipped = images.copy()
    flipped[indices[0], 0, 0, 0] ^= 1
    assert data.subset_record(flipped, labels, indices)["sha256"] != record["sha256"]
    assert data.subset_record(images, 1 - labels, indices)["sha256"] != record["sha256"]


def test_mean_and_std_are_numpys():
    images, _ = tiny(14)
    mean, std = data.channel_statistics(images)
    np.testing.assert_allclose(mean, (images / 255).mean(axis=(0, 2, 3)), rtol=1e-13)
    np.testing.assert_allclose(std, (images / 255).std(axis=(0, 2, 3)), rtol=1e-12)


def test_normalised_images_have_mean_zero_and_variance_one():
    images, _ = tiny(14)
    x = data.normalise(images, *data.channel_statistics(images))
    assert x.dtype == torch.float32
    assert x.shape == (14, 3, 5, 5)
    torch.testing.assert_close(x.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.square().mean(dim=(0, 2, 3)), torch.ones(3), atol=1e-5, rtol=0)


def test_normalise_refuses_what_does_not_fit():
    images, _ = tiny(3)
    with pytest.raises(ValueError, match=r"3 channels, mean \(1,\)"):
        data.normalise(images, np.zeros(1), np.ones(1))
    with pytest.raises(ValueError, match="must be uint8"):
        data.normalise(images / 255, np.zeros(3), np.ones(3))


def test_a_hessian_batch_is_the_beginning_of_its_subset():
    some = dataset()
    indices = data.subset_indices(some.train_images, some.train_labels, 9, 0)
    images, labels, digest = data.hessian_batch(some, indices, 4)
    torch.testing.assert_close(images, data.normalise(some.train_images[indices[:4]], some.mean, some.std))
    assert labels.tolist() == some.train_labels[indices[:4]].tolist()
    assert labels.dtype == torch.int64
    assert digest == data.subset_record(some.train_images, some.train_labels, indices[:4])["sha256"]
    for n in (0, 10):
        with pytest.raises(ValueError, match=f"batch of {n} was asked for; the subset has 9"):
            data.hessian_batch(some, indices, n)


def test_a_prepared_file_reads_back_and_has_the_same_bytes_each_time(tmp_path):
    some = dataset(attempts=(data.Attempt("cache", "empty"),))
    data.write_prepared(some, tmp_path / "new folder/a b;c'd.npz")
    data.write_prepared(dataset(), tmp_path / "again.npz")
    back = data.read_prepared(tmp_path / "new folder/a b;c'd.npz")
    for key in ("train_images", "train_labels", "test_images", "test_labels", "mean", "std"):
        np.testing.assert_array_equal(getattr(back, key), getattr(some, key))
    assert (back.name, back.class_names, back.note, back.sha256) == ("tiny", ("cat", "dog"), "not real", some.sha256)
    assert (tmp_path / "again.npz").read_bytes() == (tmp_path / "new folder/a b;c'd.npz").read_bytes()
    assert [path.name for path in (tmp_path / "new folder").iterdir()] == ["a b;c'd.npz"]


def test_a_damaged_prepared_file_is_named_with_the_way_out(tmp_path):
    path = tmp_path / "my data.npz"
    data.write_prepared(dataset(), path)
    intact = path.read_bytes()
    damaged = {
        "truncated": intact[:-200],
        "empty": b"",
        "not a zip": b"hello",
    }
    for content in damaged.values():
        path.write_bytes(content)
        with pytest.raises(
            data.CorruptDatasetError, match=r"my data\.npz is not .*rm '.*my data\.npz'\) and run again"
        ):
            data.read_prepared(path)
    with pytest.raises(FileNotFoundError):
        data.read_prepared(tmp_path / "missing.npz")


@pytest.mark.parametrize("mask", [0x01, 0xFF])
def test_a_flipped_byte_is_noticed_or_changes_nothing(tmp_path, mask):
    some, path = dataset(), tmp_path / "tiny.npz"
    data.write_prepared(some, path)
    intact = path.read_bytes()
    n_noticed = 0
    for k in range(0, len(intact), 23):
        path.write_bytes(bytes([*intact[:k], intact[k] ^ mask, *intact[k + 1 :]]))
        try:
            back = data.read_prepared(path)
        except data.CorruptDatasetError:
            n_noticed += 1
        else:  # in the zip's time stamps and paddings
            assert data.describe(back) == data.describe(some)
    assert n_noticed > len(intact) / 23 * 0.8


def test_a_prepared_file_with_another_content_or_with_a_pickle_is_refused(tmp_path):
    some = dataset()
    data.write_prepared(replace(some, test_images=255 - some.test_images), tmp_path / "other.npz")
    with pytest.raises(data.CorruptDatasetError, match="recorded is"):
        data.read_prepared(tmp_path / "other.npz")
    np.savez(tmp_path / "pickle.npz", train_images=np.array([{"an": "object"}], dtype=object))
    with pytest.raises(data.CorruptDatasetError, match="allow_pickle"):
        data.read_prepared(tmp_path / "pickle.npz")
    np.savez(tmp_path / "lacking.npz", train_images=some.train_images)
    with pytest.raises(data.CorruptDatasetError, match="train_labels"):
        data.read_prepared(tmp_path / "lacking.npz")


def test_a_dataset_that_could_not_be_had_keeps_its_shape_and_its_reason(tmp_path):
    absent = data.unavailable("cifar100", "every source failed", image_size=32, channels=3, classes=100)
    data.write_prepared(absent, tmp_path / "absent.npz")
    back = data.read_prepared(tmp_path / "absent.npz")
    assert not back.available
    assert (back.note, back.image_size, back.channels, back.classes) == ("every source failed", 32, 3, 100)
    assert data.describe(back)["train"]["label_histogram"] == {}
    assert len(data.subset_indices(back.train_images, back.train_labels, 0, 0)) == 0


def test_a_description_is_plain_json():
    import json

    some = dataset(attempts=(data.Attempt("cache", "empty"),))
    about = json.loads(json.dumps(data.describe(some)))
    assert about["attempts"] == ["cache: empty"]
    assert about["train"]["n"] == sum(about["train"]["label_histogram"].values()) == 14
    assert about["mean"] == some.mean.tolist()
    assert about["in_both_splits"] == 0


def test_images_in_both_splits_are_counted():
    train, test = tiny(14), tiny(7, seed=1)
    test[0][:2] = train[0][3]
    both = data.assemble("tiny", train, test, ("cat", "dog"), source="made up")
    assert data.describe(both)["in_both_splits"] == 2


def test_inconsistent_datasets_are_refused():
    some = dataset()
    with pytest.raises(ValueError, match="train labels 0 to 1, classes 1"):
        replace(some, class_names=("cat",))
    with pytest.raises(ValueError, match=r"test images \(1, 5, 5\)"):
        replace(some, test_images=some.test_images[:, :1])
    with pytest.raises(ValueError, match="test labels must be int64"):
        replace(some, test_labels=some.test_labels.astype(np.int32))
    images, labels = tiny(14)
    images[:, 1] = 3
    with pytest.raises(ValueError, match="channel 1 has the same value"):
        data.assemble("tiny", (images, labels), (images, labels), ("cat", "dog"), source="made up")


@pytest.mark.parametrize("sizes", [(10**6, 3, 10**4), (1, 1, 10**9)])
def test_what_cannot_fit_is_refused_before_memory_is_taken(sizes):
    with pytest.raises(ValueError, match=r"need \d+\.\d GiB, the limit is 4 GiB"):
        data.check_size("huge", *sizes)
    with pytest.raises(ValueError, match="at least 1"):
        data.check_size("nothing", 5, 3, -2)


def test_importing_the_module_is_cheap():
    code = "import curvature_gap.data_sources, sys; print({'torch', 'PIL', 'sklearn'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.slow
def test_hashing_sixty_thousand_images_is_quick():
    images, labels = np.zeros((60_000, 1, 28, 28), np.uint8), np.zeros(60_000, np.int64)
    started = time.process_time()
    data.canonical_order(images, labels)
    assert time.process_time() - started < 1
