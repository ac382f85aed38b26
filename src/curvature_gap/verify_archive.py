"""Verify an unpacked archive with Python's standard library: every SHA-256, nothing missing or added, the verdicts.

    python3 verify.py            exit status 0 if all is as packed and no claim failed, 1 otherwise

It lies at the archive's root as verify.py and imports nothing of this package.
"""

import csv
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, read piece by piece."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def file_faults(root: Path, manifest: dict[str, Any]) -> Iterator[str]:
    """Name every file that is missing, changed, or not in the manifest."""
    present = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()} - {"MANIFEST.json"}
    for name, entry in manifest["files"].items():
        if name not in present:
            yield f"missing: {name}"
        elif sha256(root / name) != entry["sha256"]:
            yield f"changed: {name}"
    by_hash = manifest["hash_only"]
    for name in sorted(present - set(manifest["files"])):
        # A file that was left out may be put back; then it must be the one that was left out.
        if name not in by_hash:
            yield f"not in the manifest: {name}"
        elif sha256(root / name) != by_hash[name]["sha256"]:
            yield f"put back, but not the same: {name}"


def table_faults(results: Path) -> Iterator[str]:
    """Name every table that is not the one the run's provenance recorded."""
    record = json.loads((results / "provenance.json").read_text(encoding="utf-8"))
    for name, digest in record["tables"].items():
        path = results / "tables" / name
        if not path.is_file() or sha256(path) != digest:
            yield f"not the table of the recorded run: {name}"


def verdicts(results: Path) -> tuple[int, list[str], int]:
    """Return how many claims passed, which failed, and how many were not run."""
    with (results / "claims.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    failed = [line["id"] for line in lines if line["verdict"] not in (line["expected_verdict"], "not_run")]
    passed = sum(line["verdict"] == line["expected_verdict"] for line in lines)
    return passed, failed, len(lines) - passed - len(failed)


def main() -> int:
    """Print all faults and the verdicts; return the exit status."""
    manifest = json.loads((ROOT / "MANIFEST.json").read_text(encoding="utf-8"))
    results = ROOT / manifest["results"]
    found = [*file_faults(ROOT, manifest), *table_faults(results)]
    passed, failed, not_run = verdicts(results)
    for fault in found:
        print(fault)
    print(f"{len(manifest['files'])} files, {len(manifest['hash_only'])} by hash alone, {len(found)} faults")
    print(f"claims: {passed} passed, {len(failed)} failed, {not_run} not run")
    for id in failed:
        print(f"  failed: {id}")
    return 1 if found or failed else 0


if __name__ == "__main__":
    sys.exit(main())
