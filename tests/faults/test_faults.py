"""Whatever dies or breaks: a clear message, at most one command to recover, no orphan, and the undisturbed tables.

docs/faults.md is the table of what is seen and what to do.
"""

import gzip
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from contextlib import contextmanager, suppress

import numpy as np
import psutil
import pytest
from drills import DATA, FIGURE, NORMS, OPTIONS, RESULTS, RUN, TABLE, TILED_NORMS, TILES, digest

from curvature_gap import mnist

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def kill(process):
    """SIGKILL Snakemake alone, as the out-of-memory killer would; its jobs must notice."""
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def assert_locked_then_unlock(drill, *targets):
    """A killed run leaves its lock: the next one says so and names the command."""
    text = drill.failing(*targets)
    assert "cannot be locked" in text
    assert "--unlock" in text
    drill.snakemake("--unlock")


def trained_past(drill, step):
    def condition():
        log = drill.path(f"{RESULTS}/logs/train/{RUN}.log")
        return log.is_file() and any(int(n) >= step for n in re.findall(r"step (\d+) of", log.read_text()))

    return condition


def test_sigkill_in_the_middle_of_training(drill):
    drill.forget_training()
    process = drill.start(NORMS)
    drill.wait_for(trained_past(drill, 100), process)
    kill(process)
    assert drill.orphans() == []
    assert not drill.path(f"{RESULTS}/checkpoints/{RUN}/trained.safetensors").exists()
    assert_locked_then_unlock(drill, NORMS)
    drill.assert_recovers(NORMS)
    assert "Resuming at step" in drill.path(f"{RESULTS}/logs/train/{RUN}.log").read_text()


def test_sigkill_in_the_middle_of_a_tile_job(drill):
    entries = drill.path(f"{TILES}/entries")
    n_tiles = len(list(entries.glob("*.npy")))
    drill.remove(TILES)
    process = drill.start(TILED_NORMS)
    drill.wait_for(lambda: entries.is_dir() and len(list(entries.glob("*.json"))) > 5, process, 0.002)
    # The job itself, not only its Snakemake: nothing may depend on its cleaning up.
    for child in descendants(process.pid):
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    kill(process)
    assert drill.orphans() == []
    finished = {path: path.stat().st_mtime_ns for path in entries.glob("*.json")}
    assert 5 < len(finished) < n_tiles
    drill.snakemake("--unlock")
    drill.assert_recovers(TILED_NORMS)
    assert all(path.stat().st_mtime_ns == time for path, time in finished.items()), "finished tiles were made again"


def descendants(pid):
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def test_sigkill_in_the_middle_of_a_notebook(drill):
    drill.remove(FIGURE)
    process = drill.start(FIGURE)
    drill.wait_for(lambda: any("ipykernel_launcher" in line for line in drill.processes()), process, 0.1)
    kill(process)
    assert drill.orphans() == []
    assert not drill.path(FIGURE).exists()
    drill.snakemake("--unlock")
    drill.assert_recovers(FIGURE)


def test_ctrl_c_leaves_nothing_behind(drill):
    drill.forget_training()
    process = drill.start(NORMS, start_new_session=True)
    drill.wait_for(trained_past(drill, 100), process)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(300) != 0
    assert drill.orphans() == []
    drill.assert_recovers(NORMS)  # no lock, nothing to do first


def test_a_second_run_is_refused_while_one_runs(drill):
    drill.forget_training()
    process = drill.start(NORMS)
    drill.wait_for(trained_past(drill, 25), process)
    assert "cannot be locked" in drill.failing(NORMS)
    assert process.wait(300) == 0, drill.path("messages").read_text()
    drill.assert_recovers(NORMS)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2].rstrip(b"\n"))  # in the middle of a line, say


def empty(path):
    path.write_bytes(b"")


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "name", "target", "message"),
    [
        (flip, f"{RESULTS}/data/mnist.npz", NORMS, "is not an intact prepared dataset"),
        (truncate, f"{RESULTS}/subsets/{RUN}.npz", NORMS, f"{RUN}.npz is damaged: delete it (rm"),
        (truncate, f"{RESULTS}/checkpoints/{RUN}/trained.safetensors", NORMS, "is damaged or not a safetensors file"),
        (truncate, f"{RESULTS}/hessians/{RUN}/init.npz", FIGURE, "init.npz is damaged: delete it (rm"),
        (truncate, NORMS, TABLE, f"{NORMS} is cut short: delete it (rm {NORMS})"),
        (empty, NORMS, TABLE, f"{NORMS} is cut short: delete it (rm {NORMS})"),
    ],
    ids=["dataset", "subset", "checkpoint", "hessian", "table", "empty-table"],
)
def test_a_damaged_file_is_named_and_deleting_it_is_enough(drill, damage, name, target, message):
    drill.forget_hessian() if target == NORMS else drill.remove(target)
    path = drill.path(name)
    stamp = path.stat()
    damage(path)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # as after a power loss
    text = drill.failing(target)
    assert message in text
    assert name in text
    assert not drill.path(target).exists()
    path.unlink()
    drill.assert_recovers(target)


def test_a_damaged_tile_is_made_again_by_the_same_command(drill):
    damaged = sorted(drill.path(f"{TILES}/entries").glob("*.npy"))[3]
    flip(damaged)
    drill.remove(f"{TILES}/hessian.npz", TILED_NORMS)
    text = drill.failing(TILED_NORMS)
    assert "Run the same command again: these jobs, and no others, are done again" in text
    drill.assert_recovers(TILED_NORMS)


def test_a_damaged_manifest_is_named(drill):
    manifest = drill.path(f"{TILES}/manifest.json")
    stamp = manifest.stat()
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"loss": 0.0}))
    os.utime(manifest, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    drill.remove(f"{TILES}/hessian.npz", TILED_NORMS)
    text = drill.failing(TILED_NORMS)
    assert "does not match its own key; it was edited or damaged" in text
    manifest.unlink()
    drill.assert_recovers(TILED_NORMS)


@contextmanager
def mounted(folder, *options):
    """Mount something over `folder` for the length of the block."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting needs root")
    done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"mount is not allowed here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(drill):
    drill.forget_hessian()
    folder = drill.path(f"{RESULTS}/hessians")
    folder.mkdir(exist_ok=True)
    with mounted(folder, "-t", "tmpfs", "-o", "size=200k", "tmpfs"):
        text = drill.failing(NORMS)
        assert "No space left on device" in text
        assert [path for path in folder.rglob("*") if path.is_file()] == []
    drill.assert_recovers(NORMS)  # once there is space: nothing else


def test_read_only_results(drill):
    drill.forget_hessian()
    folder = drill.path("results")
    with mounted(folder, "--bind", str(folder)):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        text = drill.failing(NORMS)
        assert "Write-protected output files" in text
        assert "timings/exact_hessian" in text
    drill.assert_recovers(NORMS)


@pytest.fixture
def stalling(server):
    """The local server, stopping in the middle of every file until `server.goes_on` is set."""
    server.goes_on = threading.Event()

    class Stalling(server.RequestHandlerClass):
        def do_GET(self):
            content = server.files[self.path]
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            server.asked.append(self.path)
            server.goes_on.wait(100)
            with suppress(OSError):  # whoever asked may be dead
                self.wfile.write(content[len(content) // 2 :])

    server.RequestHandlerClass = Stalling
    yield server
    server.goes_on.set()


def stand_in(drill, server):
    """Let the clone's MNIST be a few images of a local mirror."""
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (20, 28, 28), dtype=np.uint8), np.arange(20, dtype=np.uint8) % 10
    payloads = {name: mnist.idx_payload(pixels if "images" in name else labels) for name in mnist.PAYLOADS}
    server.files |= {f"/{name}.gz": gzip.compress(content) for name, content in payloads.items()}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in payloads.items()}
    with drill.path("src/curvature_gap/mnist.py").open("a", encoding="utf-8") as file:
        file.write(f"\n\nPAYLOADS.update({hashes!r})\nmirrors = lambda: [{server.url + '/'!r}]\n")
    drill.edit("tests/faults/tiny.yaml", "source: digits", "source: mnist")
    drill.environment["CURVATURE_GAP_CACHE"] = str(drill.path("cache"))


def test_sigkill_in_the_middle_of_a_download(drill, stalling):
    stand_in(drill, stalling)
    drill.remove(DATA)
    process = drill.start(DATA)
    drill.wait_for(lambda: list(drill.path("cache/mnist").glob(".partial-*/*")), process)
    kill(process)
    assert drill.orphans() == []
    assert not drill.path(DATA).exists()
    assert [path for path in drill.path("cache/mnist").iterdir() if not path.name.startswith(".")] == []
    stalling.goes_on.set()
    drill.snakemake("--unlock")
    drill.snakemake("--", DATA)
    recovered = digest(drill.path(DATA))
    assert sorted(path.name for path in drill.path("cache/mnist").iterdir()) == sorted([".lock", *mnist.PAYLOADS])
    drill.remove(DATA, "cache")
    drill.snakemake("--", DATA)
    assert digest(drill.path(DATA)) == recovered


def scripts(drill):
    """Return the jobs that run, without the shells around them."""
    return [line for line in drill.processes() if re.match(r"\S*python\S* \S*/\.snakemake/scripts/", line)]


@pytest.mark.parametrize("cores", [1, 16])
def test_any_number_of_cores_gives_the_same_tables(drill, cores):
    drill.options = ("--cores", str(cores), *OPTIONS[2:])
    drill.forget_training()
    drill.remove(TILES, TABLE)
    targets = (NORMS, TILED_NORMS, TABLE)
    process = drill.start(*targets)
    at_once = 0
    while process.poll() is None:
        at_once = max(at_once, len(scripts(drill)))
        time.sleep(0.2)
    assert process.returncode == 0, drill.path("messages").read_text()[-4000:]
    assert at_once == 1 if cores == 1 else 2 < at_once <= cores
    drill.assert_recovers(*targets)


def test_forty_tile_jobs(drill):
    """Other jobs add up in another order: the same matrix, not its bits."""
    whole = drill.path(f"{TILES}/hessian.npz")
    expected = whole_hessian(whole)
    drill.options = ("--cores", "16", *OPTIONS[2:])
    drill.edit("tests/faults/tiny.yaml", "job_mb: 1.5", "job_mb: 0.14")
    drill.remove(TILES)
    drill.snakemake("--", TILED_NORMS)
    assert len(list(drill.path(f"{TILES}/jobs").iterdir())) == 40
    np.testing.assert_allclose(whole_hessian(whole), expected, rtol=0, atol=1e-13 * np.abs(expected).max())
    assert drill.orphans(1) == []


def whole_hessian(path):
    with np.load(path) as file:
        return file["H"]
