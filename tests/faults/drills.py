"""A clone with a finished run of a tiny preset, to be damaged: how to start, kill and look after it."""

import hashlib
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from clones import Clone

OPTIONS = ("--cores", "2", "--configfile", "tests/faults/tiny.yaml", "--config", "preset=tiny", "device=cpu")
RUN = "mnist_seed0"
RESULTS = "results/tiny"
DATA = f"{RESULTS}/data/mnist.npz"
NORMS = f"{RESULTS}/block_norms/{RUN}.csv"
TILES = f"{RESULTS}/tiles/{RUN}/trained"
TILED_NORMS = f"{TILES}/block_norms.csv"
TABLE = f"{RESULTS}/tables/block_norms.csv"
FIGURE = f"{RESULTS}/figures/fig03.pdf"
TARGETS = (NORMS, TILED_NORMS, TABLE, FIGURE)


@dataclass
class Drill(Clone):
    """A copy of the finished run, and what the files that count hashed to there."""

    expected: dict[str, str] | None = None

    def path(self, name: str) -> Path:
        return self.root / name

    def remove(self, *names: str) -> None:
        for name in names:
            path = self.path(name)
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def forget_training(self) -> None:
        """Leave data and subset; everything from the training on is to be made again."""
        self.remove(f"{RESULTS}/checkpoints/{RUN}", f"{RESULTS}/metrics/{RUN}.csv", f"{RESULTS}/logs/train")
        self.forget_hessian()

    def forget_hessian(self) -> None:
        self.remove(f"{RESULTS}/hessians/{RUN}", NORMS)

    def edit(self, name: str, old: str, new: str) -> None:
        text = self.path(name).read_text(encoding="utf-8")
        assert old in text, f"{name} does not contain {old!r}"
        self.path(name).write_text(text.replace(old, new), encoding="utf-8")

    def start(self, *targets: str, **options) -> subprocess.Popen[str]:
        """Start a run; its messages go to `messages`."""
        with self.path("messages").open("w") as file:
            return subprocess.Popen(
                self.command("--", *targets),
                cwd=self.root,
                env=self.variables(),
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                **options,
            )

    def wait_for(self, condition, process: subprocess.Popen[str], poll_seconds: float = 0.01) -> None:
        """Return as soon as `condition()` is true while the run is alive."""
        end = time.monotonic() + 300
        while time.monotonic() < end:
            if condition():
                return
            assert process.poll() is None, f"the run ended too early:\n{self.path('messages').read_text()[-3000:]}"
            time.sleep(poll_seconds)
        process.kill()
        pytest.fail("the moment of the drill never came")

    def orphans(self, seconds: float = 12) -> list[str]:
        """Return the processes that still work in this clone, after giving them time to end."""
        end = time.monotonic() + seconds
        while (alive := self.processes()) and time.monotonic() < end:
            time.sleep(0.2)
        return alive

    def processes(self) -> list[str]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(self.root):
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return found

    def failing(self, *targets: str) -> str:
        """Run what must fail; return the messages."""
        done = self.snakemake("--", *targets, check=False)
        assert done.returncode != 0, "this run was expected to fail"
        return done.stdout + done.stderr

    def assert_recovers(self, *targets: str) -> str:
        """Run to the end, compare with the undisturbed run, look for leftovers; return the messages."""
        done = self.snakemake("--", *targets)
        for target in targets:
            assert digest(self.path(target)) == self.expected[target], f"{target} differs from the undisturbed run"
        assert self.orphans(1) == []
        return done.stdout + done.stderr


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
