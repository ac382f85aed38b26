import json
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from curvature_gap import archive
from curvature_gap.archive import ArchiveError, manifest, pack, source_files, verify_elsewhere
from curvature_gap.provenance import sha256
from curvature_gap.tables import write_table

RESULTS = Path("results/smoke")


def claim(id, verdict, expected="reproduced"):
    return {"id": id, "verdict": verdict, "expected_verdict": expected}


@pytest.fixture
def clone(tmp_path):
    """A clone with a small finished run."""
    root = tmp_path / "clone"
    results = root / RESULTS
    for name in ("src/curvature_gap/maps.py", "Snakefile", "src/curvature_gap/__pycache__/maps.pyc"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    write_table([{"id": "P1", "as_printed": "holds"}], results / "tables/statements.csv")
    write_table([claim("P1", "reproduced"), claim("FIG-6", "not_run")], results / "claims.csv")
    (results / "hessians/mnist_seed0").mkdir(parents=True)
    np.savez(results / "hessians/mnist_seed0/init.npz", H=np.eye(50))
    for name in ("logs/a.log", "unfinished/b.pt", "figures/fig01.pdf"):
        (results / name).parent.mkdir(parents=True, exist_ok=True)
        (results / name).write_text(name)
    tables = {path.name: sha256(path) for path in (results / "tables").glob("*.csv")}
    (results / "provenance.json").write_text(json.dumps({"tables": tables}))
    return root


@pytest.fixture
def packed(clone, tmp_path):
    path = tmp_path / "archive.tar.gz"
    pack(clone, RESULTS, path)
    return path


def unpack(path, folder):
    with tarfile.open(path) as tar:
        tar.extractall(folder, filter="data")
    return folder / "curvature-gap-smoke"


def verify(folder):
    command = [sys.executable, "-I", "-S", str(folder / "verify.py")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_archive_verifies_where_it_is_unpacked(packed):
    said = verify_elsewhere(packed)
    assert "1 by hash alone, 0 faults" in said
    assert "1 passed, 0 failed, 1 not run" in said


def test_all_that_a_clone_tracks_goes_in():
    root = Path(archive.__file__).parents[2]
    listed = subprocess.run(["git", "-C", str(root), "ls-files"], capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a clone")
    tops = {name.split("/")[0] for name in listed.stdout.split()}
    # results/ holds its README alone; the rest serves the repository, not the artifact.
    assert tops - {"results", ".ci", ".gitignore"} == set(archive.SOURCES)


def test_whole_hessians_are_hashes_and_logs_stay_out(clone, packed, tmp_path):
    contents = manifest(clone, RESULTS)
    hessian = "results/smoke/hessians/mnist_seed0/init.npz"
    assert list(contents["hash_only"]) == [hessian]
    names = {path.relative_to(tmp_path / "out").as_posix() for path in unpack(packed, tmp_path / "out").rglob("*")}
    assert not any(name.endswith((".npz", ".log", ".pt", ".pyc")) for name in names)
    assert "curvature-gap-smoke/src/curvature_gap/maps.py" in names


def test_equal_runs_give_equal_archives(clone, packed, tmp_path):
    for path in clone.rglob("*"):
        if path.is_file():
            path.touch()
    pack(clone, RESULTS, tmp_path / "again.tar.gz")
    assert packed.read_bytes() == (tmp_path / "again.tar.gz").read_bytes()


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda root: (root / "Snakefile").write_text("other"), "changed: Snakefile"),
        (lambda root: (root / "Snakefile").unlink(), "missing: Snakefile"),
        (lambda root: (root / "extra.py").write_text("x"), "not in the manifest: extra.py"),
        (
            lambda root: (root / RESULTS / "tables/statements.csv").write_text("id\n"),
            "not the table of the recorded run: statements.csv",
        ),
    ],
)
def test_the_verifier_names_what_was_tampered_with(packed, tmp_path, spoil, fault):
    root = unpack(packed, tmp_path / "out")
    assert verify(root).returncode == 0
    spoil(root)
    done = verify(root)
    assert done.returncode == 1
    assert fault in done.stdout


def test_a_hessian_may_be_put_back_if_it_is_the_same(clone, packed, tmp_path):
    root = unpack(packed, tmp_path / "out")
    path = RESULTS / "hessians/mnist_seed0/init.npz"
    (root / path).parent.mkdir(parents=True)
    (root / path).write_bytes((clone / path).read_bytes())
    assert verify(root).returncode == 0
    (root / path).write_bytes(b"another")
    assert f"put back, but not the same: {path.as_posix()}" in verify(root).stdout


def test_a_failed_claim_fails_the_verifier_and_is_named(clone, tmp_path):
    write_table([claim("P1", "refuted")], clone / RESULTS / "claims.csv")
    pack(clone, RESULTS, tmp_path / "a.tar.gz")
    assert "failed: P1" in verify_elsewhere(tmp_path / "a.tar.gz")
    assert verify(unpack(tmp_path / "a.tar.gz", tmp_path / "out")).returncode == 1


def test_an_archive_with_a_fault_is_an_error(clone, tmp_path):
    (clone / RESULTS / "provenance.json").write_text(json.dumps({"tables": {"statements.csv": "0"}}))
    pack(clone, RESULTS, tmp_path / "a.tar.gz")
    with pytest.raises(ArchiveError, match=r"statements\.csv"):
        verify_elsewhere(tmp_path / "a.tar.gz")


def test_an_unfinished_run_is_not_packed(clone, tmp_path):
    (clone / RESULTS / "claims.csv").unlink()
    with pytest.raises(ArchiveError, match=r"claims\.csv"):
        pack(clone, RESULTS, tmp_path / "a.tar.gz")


def test_an_archive_that_is_too_large_names_its_largest_folders_and_is_not_left(clone, tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "LIMIT", 10)
    with pytest.raises(ArchiveError, match=r"limit.*largest"):
        pack(clone, RESULTS, tmp_path / "a.tar.gz")
    assert not (tmp_path / "a.tar.gz").exists()


def test_sources_are_named_relative_to_the_clone(clone):
    assert source_files(clone) == [Path("src/curvature_gap/maps.py"), Path("Snakefile")]
