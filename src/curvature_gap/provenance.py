"""Where a run's numbers come from: versions, hardware, precision, data, configuration, code, and the tables' hashes."""

import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from curvature_gap.job import machine

PACKAGES = ("torch", "torchvision", "numpy", "scipy", "pandas", "seaborn", "matplotlib", "snakemake", "papermill")
# Measured times differ from run to run; every other table is bit-identical on one machine type.
TABLES_OF_TIMES = ("timings.csv", "precision_timing.csv")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def table_hashes(results: Path) -> dict[str, str]:
    """Return the SHA-256 of every table of a run, measured times left out."""
    tables = sorted((results / "tables").glob("*.csv"))
    return {path.name: sha256(path) for path in tables if path.name not in TABLES_OF_TIMES}


def git_state(root: Path) -> dict[str, Any]:
    """Return the commit and whether tracked files differ from it; `unknown` outside a clone."""

    def git(*arguments: str) -> str | None:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        commit = git("rev-parse", "HEAD")
        dirty = git("status", "--porcelain", "--untracked-files=no")
    except FileNotFoundError:
        commit, dirty = None, None
    return {"commit": commit or "unknown", "dirty": bool(dirty) if dirty is not None else "unknown"}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that compute the numbers."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def provenance(
    results: Path, root: Path, settings: Mapping[str, Any], lock_hash: str, device: str, precision: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the record of a finished run.

    Args:
        results: results/<preset>.
        root: The clone.
        settings: The merged settings of the preset.
        lock_hash: Of envs/requirements.lock.
        device: Resolved device, cpu or cuda.
        precision: Precision flags of `devices.precision_flags`.
    """
    canonical = json.dumps(settings, sort_keys=True).encode()
    records = sorted((results / "data").glob("*.json"))
    datasets = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in records}
    return {
        "preset": results.name,
        "versions": versions(),
        "lock_sha256": lock_hash,
        "hardware": {"machine": machine(), "architecture": platform.machine(), "system": platform.system()},
        "device": device,
        "precision": dict(precision),
        "datasets": {
            name: {key: record.get(key) for key in ("source", "sha256", "available", "note")}
            for name, record in datasets.items()
        },
        "config_sha256": hashlib.sha256(canonical).hexdigest(),
        "git": git_state(root),
        "command": " ".join(["snakemake", "--cores", "all", "--config", f"preset={results.name}"]),
        "python": sys.version.split()[0],
        "tables": table_hashes(results),
    }
