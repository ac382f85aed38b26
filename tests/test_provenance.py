import json
import subprocess

import pytest

from curvature_gap.provenance import git_state, provenance, sha256, table_hashes


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results" / "smoke"
    (folder / "tables").mkdir(parents=True)
    (folder / "data").mkdir()
    (folder / "tables/a.csv").write_text("x\n1\n")
    (folder / "tables/timings.csv").write_text("seconds\n3\n")
    (folder / "data/mnist.json").write_text(json.dumps({"source": "digits", "sha256": "ab", "available": True}))
    return folder


def test_measured_times_are_not_hashed(results):
    assert table_hashes(results) == {"a.csv": sha256(results / "tables/a.csv")}


def test_outside_a_clone_the_commit_is_unknown(tmp_path):
    assert git_state(tmp_path) == {"commit": "unknown", "dirty": "unknown"}


def test_a_changed_tracked_file_is_dirty(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "f").write_text("1")
    for arguments in (["init", "-q"], ["add", "f"], ["commit", "-qm", "m"]):
        subprocess.run([*git, *arguments], check=True)
    assert git_state(tmp_path)["dirty"] is False
    (tmp_path / "f").write_text("2")
    assert git_state(tmp_path)["dirty"] is True


def test_the_record_names_what_decides_a_number(results, tmp_path):
    record = provenance(results, tmp_path, {"b": 1, "a": 2}, "lock", "cpu", {"tf32": False})
    again = provenance(results, tmp_path, {"a": 2, "b": 1}, "lock", "cpu", {"tf32": False})
    assert record == again
    assert record["datasets"]["mnist"]["sha256"] == "ab"
    assert record["versions"]["torch"] != "not installed"
    assert record["device"] == "cpu"
