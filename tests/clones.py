"""Clones of the repository in which tests run the real workflow."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
SNAKEMAKE = str(Path(sys.executable).parent / "snakemake")

# What would steer a run from outside.
STEERING = ("CURVATURE_GAP_DATA", "CURVATURE_GAP_RESOLVED_DEVICE", "SNAKEMAKE_OUTPUT_CACHE", "CUDA_VISIBLE_DEVICES")


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


def own_environment(root: Path) -> tuple[str, ...]:
    """Give a clone the environment under its own path, as `make setup` does; return the command of its Snakemake."""
    (root / ".venv").symlink_to(sys.prefix, target_is_directory=True)
    return str(root / ".venv" / "bin" / "python"), "-m", "snakemake"


@dataclass
class Clone:
    """A clone in which Snakemake can be run."""

    root: Path
    offline: bool = False
    log: str = ""
    options: tuple[str, ...] = ("--config", "preset=smoke", "--cores", "2")  # targets may follow
    environment: dict[str, str] = field(default_factory=dict)
    program: tuple[str, ...] = (SNAKEMAKE,)

    def command(self, *arguments: str) -> list[str]:
        command = [*self.program, *self.options]
        if self.offline:
            # papermill talks to its kernels over loopback, which a new namespace starts without.
            command = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$0" "$@"', *command]
        return [*command, *arguments]

    def variables(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in STEERING}
        own = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(self.root / "src")}
        return kept | own | self.environment

    def snakemake(self, *arguments: str, check: bool = True, timeout: float = 900) -> subprocess.CompletedProcess[str]:
        """Run Snakemake; `check` fails the test with the run's output."""
        done = subprocess.run(
            self.command(*arguments),
            cwd=self.root,
            env=self.variables(),
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
