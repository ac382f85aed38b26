"""A copy of the tracked files in a path with a space, and one run of the real workflow in it, without network."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def copy_clone(destination: Path) -> Path:
    """Copy what git tracks, or would track, as a fresh clone would have it."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, capture_output=True, check=True).stdout.decode().split("\0"):
        source = ROOT / name
        if name and source.is_file():
            (destination / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, destination / name)
    return destination


def can_leave_the_network() -> bool:
    """Whether this user may create a network namespace with a loopback."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    probe = ["unshare", "-rn", "sh", "-c", "ip link set lo up"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@dataclass
class Clone:
    """A clone in which Snakemake can be run."""

    root: Path
    offline: bool
    log: str = ""

    def snakemake(self, *arguments: str, check: bool = True, timeout: float = 900) -> subprocess.CompletedProcess[str]:
        """Run Snakemake on the smoke preset; `check` fails the test with the run's output."""
        command = [str(Path(sys.executable).parent / "snakemake"), "--cores", "2", "--config", "preset=smoke"]
        if self.offline:
            # papermill talks to its kernels over loopback, which a new namespace starts without.
            command = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$0" "$@"', *command]
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        for variable in ("CURVATURE_GAP_DATA", "SNAKEMAKE_OUTPUT_CACHE"):
            environment.pop(variable, None)
        done = subprocess.run(
            [*command, *arguments],
            cwd=self.root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check:
            assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return done

    def planned(self, *arguments: str) -> str:
        """Return what a dry run would do."""
        done = self.snakemake("-n", *arguments)
        return done.stdout + done.stderr


@pytest.fixture(scope="session")
def clone(tmp_path_factory) -> Clone:
    """The finished smoke run that the tests look at; they leave it as they found it."""
    root = copy_clone(tmp_path_factory.mktemp("smoke") / "a clone")
    made = Clone(root, can_leave_the_network())
    done = made.snakemake()
    made.log = done.stdout + done.stderr
    return made
