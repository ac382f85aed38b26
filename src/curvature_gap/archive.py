"""A finished run as one file for a deposit: what the numbers rest on, whole Hessians as hashes, and its own verifier.

`python -m curvature_gap.archive results/laptop` (or `make archive`) packs, unpacks into a temporary folder and verifies
there. The archive holds MANIFEST.json (SHA-256 and size of every file; hash alone where a file is left out) and
verify.py, which needs Python's standard library only.
"""

import argparse
import gzip
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from curvature_gap.files import atomic_path
from curvature_gap.provenance import sha256

LIMIT = 300 * 10**6
"""Bytes that an archive may have."""
SOURCES = (
    "src",
    "workflow",
    "notebooks",
    "config",
    "envs",
    "profiles",
    "expected",
    "paper",
    "tests",
    "docs",
    "Snakefile",
    "Makefile",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CITATION.cff",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "DECISIONS.md",
    "ARTIFACT.md",
)
"""What of the clone goes in, as far as it is there."""
HASH_ONLY = ("hessians", "data", "subsets")
"""Folders of a run whose files are named by their hash alone: large, or not ours to give, and recomputed exactly."""
LEFT_OUT = ("logs", "unfinished", "archive")
"""Folders of a run that hold no result."""
PASSED_OVER = ("__pycache__", ".pytest_cache", ".ipynb_checkpoints", ".snakemake_timestamp")

VERIFIER = Path(__file__).with_name("verify_archive.py")
"""The archive's own verifier; it lies at the archive's root as verify.py."""


class ArchiveError(RuntimeError):
    """An archive that cannot be made or does not verify; the message says why."""


def run_files(results: Path) -> list[Path]:
    """Return every file of a run but logs and unfinished work."""
    return [
        path
        for path in sorted(results.rglob("*"))
        if path.is_file() and path.relative_to(results).parts[0] not in LEFT_OUT and not passed_over(path)
    ]


def passed_over(path: Path) -> bool:
    """Tell caches and temporary files."""
    return any(part in PASSED_OVER or part.startswith(".") for part in path.parts[1:])


def source_files(root: Path) -> list[Path]:
    """Return the clone's files that go into the archive, relative to it."""
    found = []
    for name in SOURCES:
        path = root / name
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        found += [file.relative_to(root) for file in files]
    return [path for path in found if not any(part in PASSED_OVER for part in path.parts)]


def entry(path: Path) -> dict[str, Any]:
    return {"sha256": sha256(path), "bytes": path.stat().st_size}


def manifest(root: Path, results: Path) -> dict[str, Any]:
    """Return which files the archive holds and which it names by hash alone; paths relative to `root`.

    Raises:
        ArchiveError: If the run is not finished.
    """
    for name in ("claims.csv", "provenance.json"):
        if not (root / results / name).is_file():
            raise ArchiveError(f"{results / name} does not exist; finish the run (make reproduce) before packing it.")
    files: dict[str, Any] = {path.as_posix(): entry(root / path) for path in source_files(root)}
    hash_only: dict[str, Any] = {}
    for path in run_files(root / results):
        name = path.relative_to(root).as_posix()
        by_hash = path.relative_to(root / results).parts[0] in HASH_ONLY and path.suffix == ".npz"
        (hash_only if by_hash else files)[name] = entry(path)
    files["verify.py"] = entry(VERIFIER)
    return {"results": results.as_posix(), "files": dict(sorted(files.items())), "hash_only": hash_only}


def pack(root: Path, results: Path, destination: Path) -> dict[str, Any]:
    """Write the archive (.tar.gz) and return its manifest. Equal runs give equal archives, byte for byte.

    Args:
        root: The clone.
        results: results/<preset>, relative to the clone.
        destination: Where the archive goes.

    Raises:
        ArchiveError: If the run is not finished or the archive is larger than `LIMIT`.
    """
    contents = manifest(root, results)
    written: dict[str, bytes] = {
        "MANIFEST.json": (json.dumps(contents, indent=1, ensure_ascii=False) + "\n").encode(),
        "verify.py": VERIFIER.read_bytes(),
    }
    folder = f"curvature-gap-{results.name}"
    with atomic_path(destination) as temporary:
        # Neither gzip's header nor any member carries a clock, a user or a mode of this machine.
        with (
            temporary.open("wb") as raw,
            gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            for name in sorted({*contents["files"], *written}):
                data = written[name] if name in written else (root / name).read_bytes()
                tar.addfile(member(f"{folder}/{name}", len(data)), io.BytesIO(data))
        size = temporary.stat().st_size
        if size > LIMIT:
            largest = largest_folders(contents["files"])
            raise ArchiveError(f"{size / 1e6:.0f} MB, the limit is {LIMIT / 1e6:.0f} MB; largest: {largest}.")
    return contents


def member(name: str, size: int) -> tarfile.TarInfo:
    """Return a tar header that depends on name and size alone."""
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = size, 0, 0o644
    return info


def largest_folders(files: Mapping[str, Mapping[str, Any]]) -> str:
    """Name the three folders that hold most bytes."""
    totals: dict[str, int] = {}
    for name, about in files.items():
        folder = "/".join(name.split("/")[:3])
        totals[folder] = totals.get(folder, 0) + about["bytes"]
    top: Iterable[tuple[str, int]] = sorted(totals.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{folder} {size / 1e6:.0f} MB" for folder, size in top)


def verify_elsewhere(archive: Path) -> str:
    """Unpack an archive into a fresh folder, run its own verifier there with nothing installed, return what it says.

    Raises:
        ArchiveError: If a file is missing, changed or added. Failed claims are the run's affair and stand in the text.
    """
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive, "r:gz") as tar:
            tar.extractall(folder, filter="data")
        (unpacked,) = Path(folder).iterdir()
        # -I -S: neither this environment's packages nor its variables.
        command = [sys.executable, "-I", "-S", str(unpacked / "verify.py")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        if done.returncode != 0 and ", 0 faults" not in done.stdout:
            raise ArchiveError(f"{archive} does not verify where it was unpacked:\n{done.stdout}{done.stderr}")
        return done.stdout.strip()


def main() -> None:
    """Pack the run that the command line names, and verify the archive elsewhere."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("results", type=Path, help="results/<preset> of a finished run, relative to the clone")
    parser.add_argument("--output", type=Path, help="default: results/<preset>/archive/curvature-gap-<preset>.tar.gz")
    options = parser.parse_args()
    destination = options.output or options.results / "archive" / f"curvature-gap-{options.results.name}.tar.gz"
    try:
        pack(Path(), options.results, destination)
        print(verify_elsewhere(destination))
    except ArchiveError as error:
        sys.exit(f"archive: {error}")
    print(f"{destination}: {destination.stat().st_size / 1e6:.1f} MB, SHA-256 {sha256(destination)}")


if __name__ == "__main__":
    main()
