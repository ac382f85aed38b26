"""The registry: settings, what is at hand, and what a workflow watches."""

import json

import numpy as np
import pytest
from PIL import Image

from curvature_gap import data, data_sources
from curvature_gap.downloads import DatasetUnavailable


def write_images(root, n: int = 4, side: int = 5) -> None:
    rng = np.random.default_rng(0)
    for name in ("cat", "dog", "emu"):
        (root / name).mkdir(parents=True)
        for i in range(n):
            Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(root / name / f"{i}.png")


def test_a_dataset_is_prepared_from_settings_alone(tmp_path):
    write_images(tmp_path / "pets")
    settings = {"path": str(tmp_path / "pets"), "image_size": 6, "channels": 1, "classes": 3}
    dataset = data_sources.prepare("folder", name="mine", **settings)
    assert (dataset.name, dataset.image_size, dataset.channels, dataset.classes) == ("mine", 6, 1, 3)
    data.write_prepared(dataset, tmp_path / "mine.npz")
    assert data.describe(data.read_prepared(tmp_path / "mine.npz"))["mean"] == dataset.mean.tolist()


def test_the_sources_of_the_smoke_run_fit_its_models():
    digits = data_sources.prepare("digits", path=None, image_size=28, channels=1, classes=10)
    stripes = data_sources.prepare("synthetic", name="cifar100", path=None, image_size=32, channels=3, classes=5)
    assert (digits.name, stripes.name) == ("digits", "cifar100")
    assert stripes.classes == 5
    assert digits.note
    assert stripes.note


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        ("minst", {}, "no source 'minst'; choose one of mnist, cifar100, digits, synthetic, folder"),
        (
            "digits",
            {"imagesize": 28},
            "Source digits does not take imagesize; it takes image_size, seed, channels, classes",
        ),
        ("digits", {"path": "x"}, "Source digits does not take path"),
        ("digits", {"channels": 3}, "digits has channels 1, the settings say 3"),
        ("digits", {"classes": 9}, "digits has classes 10, the settings say 9"),
        ("folder", {}, "Source folder needs path"),
        ("folder", {"path": "/nowhere/at all"}, "/nowhere/at all does not exist"),
    ],
)
def test_impossible_settings_are_refused(source, settings, message):
    with pytest.raises(ValueError, match=message):
        data_sources.prepare(source, **settings)


def test_a_folder_with_another_number_of_classes_is_refused(tmp_path):
    write_images(tmp_path)
    with pytest.raises(ValueError, match="folder has classes 3, the settings say 10"):
        data_sources.prepare("folder", path=str(tmp_path), classes=10)


@pytest.fixture
def nothing_at_hand(monkeypatch, tmp_path):
    monkeypatch.setenv("CURVATURE_GAP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("CURVATURE_GAP_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_what_is_at_hand_needs_no_network(nothing_at_hand):
    assert data_sources.is_at_hand("digits") == (True, "made here, without network")
    assert data_sources.is_at_hand("synthetic")[0]
    assert not data_sources.is_at_hand("mnist")[0]
    assert not data_sources.is_at_hand("cifar100")[0]
    assert data_sources.is_at_hand("folder", str(nothing_at_hand)) == (True, f"{nothing_at_hand} exists")
    assert not data_sources.is_at_hand("folder", str(nothing_at_hand / "absent"))[0]
    with pytest.raises(ValueError, match="no source 'cifar10'"):
        data_sources.is_at_hand("cifar10")


def test_data_added_later_are_noticed_and_a_download_is_not_taken_for_it(nothing_at_hand):
    record = nothing_at_hand / "cifar100.json"

    def watched():
        return data_sources.at_hand_or_prepared("cifar100", record)

    def ran(available):
        record.write_text(json.dumps({"available": available, "at_hand": watched()}))

    assert watched() is False
    ran(available=False)
    assert watched() is False  # nothing new, nothing reruns
    zips = nothing_at_hand / "data/cifar100"
    zips.mkdir(parents=True)
    (zips / "all.zip").write_bytes(b"")
    assert watched() is True  # added by hand: rerun once
    ran(available=True)
    (zips / "all.zip").unlink()
    assert watched() is True  # prepared already, nothing reruns
    record.write_text("{")
    assert watched() is False


def test_a_download_that_fills_the_cache_changes_nothing(nothing_at_hand):
    record, cached = nothing_at_hand / "cifar100.json", nothing_at_hand / "cache/cifar100/cifar-100-python.tar.gz"
    before = data_sources.at_hand_or_prepared("cifar100", record)
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"")
    record.write_text(json.dumps({"available": True, "at_hand": before}))
    assert data_sources.at_hand_or_prepared("cifar100", record) is before is False


def test_a_dataset_out_of_reach_says_so(nothing_at_hand, monkeypatch):
    from curvature_gap import cifar100

    monkeypatch.setattr(cifar100, "mirror", lambda: "http://nowhere.invalid/x.tar.gz")
    with pytest.raises(DatasetUnavailable, match=r"CIFAR-100 could not be had(.|\n)*By hand: set CURVATURE_GAP_DATA"):
        data_sources.prepare("cifar100", image_size=32, channels=3, classes=100)
