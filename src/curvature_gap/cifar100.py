"""CIFAR-100: class folders of PNGs or the official archive, from the data folder, the cache or the mirror."""

import tarfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from curvature_gap import downloads, image_folder
from curvature_gap.data import Dataset, assemble
from curvature_gap.downloads import Cache, SourceError

ARCHIVE = "cifar-100-python.tar.gz"
ARCHIVE_SHA256 = "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"
CONTENT_SHA256 = "dfbbe1a34125eab300ca176809d714aa5a8c690f23aaae4c911b3e2c0b30ffb7"
"""Of the whole dataset in canonical order, whatever format it came in."""

N_TRAIN, N_TEST, SIDE = 50_000, 10_000, 32
MAX_MEMBER = 256 * 2**20

BY_HAND = (
    f"set CURVATURE_GAP_DATA to a folder whose cifar100/ holds {ARCHIVE} (from the dataset's home page), or class "
    "folders of PNGs as train/<class>/*.png and test/<class>/*.png, unpacked or in zip files, and run again."
)

Loaded = tuple[dict[str, tuple[np.ndarray, np.ndarray]], tuple[str, ...]]
"""Images and labels of train and test, and the class names."""


def load(name: str) -> Dataset:
    """Return CIFAR-100, colour 32 x 32. Raises DatasetUnavailable if no source delivers it whole."""
    with downloads.locked_cache("cifar100") as cache:
        (splits, class_names), source, attempts = downloads.first_that_verifies("CIFAR-100", _sources(cache), BY_HAND)
    return assemble(name, splits["train"], splits["test"], class_names, source=source, attempts=attempts)


def at_hand() -> tuple[bool, str]:
    """Say whether the data folder or the cache holds CIFAR-100; the content is not looked at."""
    directory = _own_directory()
    if directory and (_zips(directory) or _unpacked(directory) or (directory / ARCHIVE).is_file()):
        return True, f"files in {directory}"
    cached = downloads.cache_directory() / "cifar100" / ARCHIVE
    if cached.is_file():
        return True, f"{cached}"
    return False, "neither in CURVATURE_GAP_DATA/cifar100 nor in the cache; the mirror is needed"


def _sources(cache: Cache) -> Iterator[tuple[str, Callable[[], Loaded]]]:
    yield "CURVATURE_GAP_DATA", _from_data_directory
    yield "cache", partial(_from_cache, cache)
    address = mirror()
    yield f"mirror {address}", partial(_from_mirror, address, cache)


def mirror() -> str:
    """Return the address that torchvision knows."""
    from torchvision.datasets import CIFAR100

    return str(CIFAR100.url)


def _own_directory() -> Path | None:
    directory = downloads.data_directory()
    return directory / "cifar100" if directory else None


def _zips(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.zip"))


def _unpacked(directory: Path) -> bool:
    return (directory / "train").is_dir() and (directory / "test").is_dir()


def _from_data_directory() -> Loaded:
    directory = _own_directory()
    if directory is None:
        raise SourceError("not set")
    if _unpacked(directory):
        return read_class_folders([directory])
    if zips := _zips(directory):
        _check_sums(directory, zips)
        return read_class_folders(zips)
    if (directory / ARCHIVE).is_file():
        return read_archive(directory / ARCHIVE)
    raise SourceError(f"{directory} holds neither train/ and test/ nor zip files nor {ARCHIVE}")


def _check_sums(directory: Path, zips: list[Path]) -> None:
    """Compare zips with the SHA256SUMS beside them, if there is one: it names the damaged file."""
    sums = directory / "SHA256SUMS"
    if not sums.is_file():
        return
    lines = sums.read_text(encoding="utf-8", errors="replace").splitlines()
    recorded = {name.strip().lstrip("*"): digest for digest, _, name in (line.partition(" ") for line in lines) if name}
    missing = sorted(set(recorded) - {path.name for path in zips})
    if missing:
        raise SourceError(f"{directory} lacks {', '.join(missing)}, which SHA256SUMS lists")
    for path in zips:
        if path.name in recorded and downloads.sha256_of(path) != recorded[path.name]:
            raise SourceError(f"{path} is truncated or altered: it does not match SHA256SUMS")


def read_class_folders(paths: list[Path]) -> Loaded:
    """Read train/<class>/*.png and test/<class>/*.png of a directory or of zip files, and verify the whole.

    Raises:
        SourceError: If a file is bad, the counts are wrong, or the content is not CIFAR-100's.
    """
    try:
        with image_folder.open_entries(paths) as entries:
            splits, class_names = image_folder.read_splits(entries, str(paths[0].parent), SIDE, 3)
    except ValueError as error:
        raise SourceError(str(error)) from error
    if set(splits) != {"train", "test"}:
        raise SourceError(f"{paths[0].parent} has no train/ and test/")
    counts = {split: len(labels) for split, (_, labels) in splits.items()}
    if counts != {"train": N_TRAIN, "test": N_TEST}:
        raise SourceError(f"{counts['train']} + {counts['test']} images, {N_TRAIN} + {N_TEST} are expected")
    found = assemble("cifar100", splits["train"], splits["test"], class_names, source="").sha256
    if found != CONTENT_SHA256:
        raise SourceError(f"images or class names are not CIFAR-100's: content {found}, expected {CONTENT_SHA256}")
    return splits, class_names


def read_archive(path: Path, where: str = "") -> Loaded:
    """Read the official archive after its hash matched; its pickles may hold arrays and plain containers alone.

    Raises:
        SourceError: If the archive is truncated or altered, before anything in it is looked at.
    """
    found = downloads.sha256_of(path)
    if found != ARCHIVE_SHA256:
        raise SourceError(f"{where or path} is truncated or altered: SHA-256 {found}, expected {ARCHIVE_SHA256}")
    try:
        with tarfile.open(path) as archive:
            parts = {part: _member(archive, part) for part in ("train", "test", "meta")}
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise SourceError(f"{path} cannot be read: {error}") from error
    names = tuple(str(name) for name in parts["meta"]["fine_label_names"])
    splits = {split: (_images(parts[split]["data"]), _labels(parts[split])) for split in ("train", "test")}
    return splits, names


def _member(archive: tarfile.TarFile, part: str) -> dict[str, Any]:
    name = f"cifar-100-python/{part}"
    try:
        file = archive.extractfile(name)
    except KeyError as error:
        raise SourceError(f"the archive lacks {name}") from error
    if file is None:
        raise SourceError(f"in the archive, {name} is not a file")
    return dict(downloads.unpickle_arrays(file.read(MAX_MEMBER), name))


def _images(data: object) -> np.ndarray:
    return np.asarray(data, np.uint8).reshape(-1, 3, SIDE, SIDE)


def _labels(part: dict[str, Any]) -> np.ndarray:
    return np.asarray(part["fine_labels"], np.int64)


def _from_cache(cache: Cache) -> Loaded:
    path = cache.directory / ARCHIVE
    if not path.is_file():
        raise SourceError(f"no {path}")
    try:
        return read_archive(path)
    except SourceError as error:
        raise SourceError(f"{error}; {cache.discard(path)}") from error


def _from_mirror(address: str, cache: Cache) -> Loaded:
    path = downloads.download(address, cache.scratch)
    loaded = read_archive(path, where=address)
    cache.keep(ARCHIVE, path)
    return loaded
