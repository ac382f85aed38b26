"""CIFAR-100 from tiny stand-ins in its two formats: class folders of PNGs, and the archive of pickles."""

import hashlib
import io
import os
import pickle
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from curvature_gap import cifar100, data
from curvature_gap.downloads import DatasetUnavailable

NAMES = ("apple", "aquarium_fish", "baby")
N_TRAIN, N_TEST = 11, 7


def tiny_split(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8), rng.permutation(np.arange(n) % len(NAMES))


SPLITS = {"train": tiny_split(N_TRAIN, 0), "test": tiny_split(N_TEST, 1)}


def pngs() -> dict[str, bytes]:
    """Return name -> PNG, in the folders of their classes."""
    content = {}
    for split, (images, labels) in SPLITS.items():
        for i, (image, label) in enumerate(zip(images, labels, strict=True)):
            buffer = io.BytesIO()
            Image.fromarray(image.transpose(1, 2, 0)).save(buffer, "PNG")
            content[f"{split}/{NAMES[label]}/{NAMES[label]}_s_{i:06d}.png"] = buffer.getvalue()
    return content


def archive(harmful: object = None) -> bytes:
    """Return a tar.gz laid out like the official one: rows of 3,072 bytes, red first."""
    parts = {
        split: {"data": images.reshape(len(images), -1), "fine_labels": labels.tolist(), "batch_label": split}
        for split, (images, labels) in SPLITS.items()
    }
    parts["meta"] = {"fine_label_names": list(NAMES), "coarse_label_names": ["fruit"], "extra": harmful}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, part in parts.items():
            content = pickle.dumps(part, protocol=4)
            info = tarfile.TarInfo(f"cifar-100-python/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def places(monkeypatch, tmp_path):
    """The tiny set stands for CIFAR-100; the mirror answers nothing. Return the data folder and the cache."""
    expected = data.assemble("", SPLITS["train"], SPLITS["test"], NAMES, source="")
    monkeypatch.setattr(cifar100, "CONTENT_SHA256", expected.sha256)
    monkeypatch.setattr(cifar100, "N_TRAIN", N_TRAIN)
    monkeypatch.setattr(cifar100, "N_TEST", N_TEST)
    monkeypatch.setattr(cifar100, "mirror", lambda: "http://nowhere.invalid/cifar-100-python.tar.gz")
    monkeypatch.setenv("CURVATURE_GAP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("CURVATURE_GAP_CACHE", str(tmp_path / "cache"))
    own, cache = tmp_path / "data/cifar100", tmp_path / "cache/cifar100"
    own.mkdir(parents=True)
    cache.mkdir(parents=True)
    return own, cache


def unpack(folder: Path) -> None:
    for name, content in pngs().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def zip_up(folder: Path, *, sums: bool = True) -> list[Path]:
    """Write one test zip and two train zips, as the set is handed around, and their SHA256SUMS."""
    content = pngs()
    train = [name for name in content if name.startswith("train/")]
    groups = {"test": [name for name in content if name not in train], "train-0": train[:5], "train-1": train[5:]}
    paths = [folder / f"cifar100-{group}.zip" for group in groups]
    for path, names in zip(paths, groups.values(), strict=True):
        with zipfile.ZipFile(path, "w") as file:
            for name in names:
                file.writestr(name, content[name])
    if sums:
        lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in paths]
        (folder / "SHA256SUMS").write_text("".join(lines))
    return paths


def put_archive(path: Path, monkeypatch, content: bytes | None = None) -> None:
    content = archive() if content is None else content
    path.write_bytes(content)
    monkeypatch.setattr(cifar100, "ARCHIVE_SHA256", hashlib.sha256(content).hexdigest())


def test_every_source_gives_the_same_dataset_and_the_same_subsets(places, monkeypatch):
    own, cache = places
    assert not cifar100.at_hand()[0]
    found = {}
    unpack(own)
    found["unpacked"] = cifar100.load("cifar100")
    shutil.rmtree(own)
    own.mkdir()
    zip_up(own)
    found["zips"] = cifar100.load("cifar100")
    shutil.rmtree(own)
    own.mkdir()
    put_archive(own / cifar100.ARCHIVE, monkeypatch)
    found["archive"] = cifar100.load("cifar100")
    assert {dataset.source for dataset in found.values()} == {"CURVATURE_GAP_DATA"}
    (own / cifar100.ARCHIVE).rename(cache / cifar100.ARCHIVE)
    found["cache"] = cifar100.load("cifar100")
    assert found["cache"].source == "cache"
    assert len({dataset.sha256 for dataset in found.values()}) == 1
    for stratified in (False, True):
        subsets = []
        for dataset in found.values():
            images, labels = dataset.train_images, dataset.train_labels
            indices = data.subset_indices(images, labels, 6, 3, stratified)
            subsets.append((data.subset_record(images, labels, indices)["sha256"], indices.tolist()))
        assert all(subset == subsets[0] for subset in subsets)
    first = found["zips"]
    assert (first.channels, first.image_size, first.class_names) == (3, 32, NAMES)


def test_the_two_formats_agree_before_any_sorting(places, monkeypatch, tmp_path):
    own, _ = places
    unpack(own)
    put_archive(tmp_path / "x.tar.gz", monkeypatch)
    folders, names = cifar100.read_class_folders([own])
    official, official_names = cifar100.read_archive(tmp_path / "x.tar.gz")
    assert names == official_names
    for split in ("train", "test"):
        records = [
            data.subset_record(*part[split], data.subset_indices(*part[split], 5, 1)) for part in (folders, official)
        ]
        assert records[0]["sha256"] == records[1]["sha256"]
        np.testing.assert_array_equal(official[split][0], SPLITS[split][0])


@pytest.mark.parametrize("prepare", [unpack, zip_up, lambda own: (own / cifar100.ARCHIVE).write_bytes(b"x")])
def test_what_is_at_hand_is_seen_without_reading_it(places, prepare):
    own, _ = places
    prepare(own)
    assert cifar100.at_hand() == (True, f"files in {own}")


def test_the_cache_is_at_hand_too(places):
    _, cache = places
    (cache / cifar100.ARCHIVE).write_bytes(b"x")
    assert cifar100.at_hand() == (True, str(cache / cifar100.ARCHIVE))


def refusal() -> str:
    with pytest.raises(DatasetUnavailable) as caught:
        cifar100.load("cifar100")
    return str(caught.value)


def test_damaged_zips_are_named_and_left_alone(places):
    own, _ = places
    paths = zip_up(own)
    content = paths[1].read_bytes()
    flipped = bytes([*content[:200], content[200] ^ 1, *content[201:]])
    for damaged in (flipped, content[:-30]):
        paths[1].write_bytes(damaged)
        assert f"{paths[1]} is truncated or altered: it does not match SHA256SUMS" in refusal()
        assert paths[1].read_bytes() == damaged
    paths[1].write_bytes(content)
    paths[2].unlink()
    assert "lacks cifar100-train-1.zip, which SHA256SUMS lists" in refusal()
    (own / "SHA256SUMS").unlink()
    assert "5 + 7 images, 11 + 7 are expected" in refusal()


def test_without_sums_the_content_decides(places):
    own, _ = places
    paths = zip_up(own, sums=False)
    assert cifar100.load("cifar100").available
    with zipfile.ZipFile(paths[0], "a") as file:
        file.writestr("test/apple/more.png", next(iter(pngs().values())))
    assert "11 + 8 images, 11 + 7 are expected" in refusal()


def test_an_altered_or_missing_image_is_noticed(places):
    own, _ = places
    unpack(own)
    victim = sorted((own / "train/apple").iterdir())[0]
    intact = victim.read_bytes()
    victim.write_bytes(intact[:-30])
    assert f"{victim} is not an intact image" in refusal()
    Image.open(io.BytesIO(intact)).rotate(90).save(victim)
    assert "images or class names are not CIFAR-100's" in refusal()
    victim.unlink()
    assert "10 + 7 images, 11 + 7 are expected" in refusal()
    Image.open(io.BytesIO(intact)).convert("L").save(victim)
    assert f"{victim} is grey where colour is expected" in refusal()


def test_an_empty_folder_says_what_it_should_hold(places):
    own, _ = places
    text = refusal()
    assert f"{own} holds neither train/ and test/ nor zip files nor cifar-100-python.tar.gz" in text
    assert "nowhere.invalid" in text
    assert "By hand: set CURVATURE_GAP_DATA to a folder whose cifar100/ holds cifar-100-python.tar.gz" in text


def test_a_damaged_archive_in_the_cache_is_removed_and_fetched_again(places, monkeypatch, server):
    _, cache = places
    put_archive(cache / cifar100.ARCHIVE, monkeypatch)
    intact = (cache / cifar100.ARCHIVE).read_bytes()
    server.files["/cifar-100-python.tar.gz"] = intact[:-1]
    monkeypatch.setattr(cifar100, "mirror", lambda: f"{server.url}/cifar-100-python.tar.gz")
    (cache / cifar100.ARCHIVE).write_bytes(intact[:-7])
    text = refusal()
    assert f"cache: {cache / cifar100.ARCHIVE} is truncated or altered" in text
    assert "; removed" in text
    assert f"mirror {server.url}/cifar-100-python.tar.gz: {server.url}/cifar-100-python.tar.gz is truncated" in text
    assert not (cache / cifar100.ARCHIVE).exists()
    server.files["/cifar-100-python.tar.gz"] = intact
    assert cifar100.load("cifar100").source.startswith("mirror")
    assert (cache / cifar100.ARCHIVE).read_bytes() == intact
    assert cifar100.load("cifar100").source == "cache"


def test_a_pickle_with_code_is_refused(places, monkeypatch, tmp_path):
    own, _ = places

    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "done"),)

    (own / cifar100.ARCHIVE).write_bytes(archive(Harmful()))
    assert "is truncated or altered: SHA-256" in refusal()
    # Even with the right hash nothing but arrays is read.
    put_archive(own / cifar100.ARCHIVE, monkeypatch, archive(Harmful()))
    assert "cifar-100-python/meta was not read: the pickle names posix.mkdir" in refusal()
    assert not (tmp_path / "done").exists()


def test_an_archive_of_something_else_is_refused(places, monkeypatch):
    own, _ = places
    put_archive(own / cifar100.ARCHIVE, monkeypatch, b"hello")
    assert "cannot be read" in refusal()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        info = tarfile.TarInfo("cifar-100-python/train")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(info)
    put_archive(own / cifar100.ARCHIVE, monkeypatch, buffer.getvalue())
    assert "the archive lacks cifar-100-python/train" in refusal()


@pytest.mark.slow
def test_torchvision_still_knows_the_mirror():
    assert cifar100.mirror().endswith(f"/{cifar100.ARCHIVE}")
