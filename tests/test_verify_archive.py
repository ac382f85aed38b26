import ast
import json
import sys
from pathlib import Path

import pytest

from curvature_gap import verify_archive
from curvature_gap.tables import write_table
from curvature_gap.verify_archive import file_faults, sha256, table_faults, verdicts


@pytest.fixture
def root(tmp_path):
    """An unpacked archive of two files, one of them named by its hash alone and absent."""
    (tmp_path / "a.txt").write_text("a")
    return tmp_path


def manifest(root, **hash_only):
    return {"files": {"a.txt": {"sha256": sha256(root / "a.txt")}}, "hash_only": hash_only}


def test_it_imports_the_standard_library_alone():
    tree = ast.parse(Path(verify_archive.__file__).read_text(encoding="utf-8"))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules <= set(sys.stdlib_module_names)


def test_a_sound_archive_has_no_faults(root):
    assert list(file_faults(root, manifest(root, **{"big.npz": {"sha256": "0"}}))) == []


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda root: (root / "a.txt").write_text("b"), "changed: a.txt"),
        (lambda root: (root / "a.txt").unlink(), "missing: a.txt"),
        (lambda root: (root / "b.txt").write_text("b"), "not in the manifest: b.txt"),
        (lambda root: (root / "big.npz").write_text("b"), "put back, but not the same: big.npz"),
    ],
)
def test_every_kind_of_fault_is_named(root, spoil, fault):
    packed = manifest(root, **{"big.npz": {"sha256": "0"}})
    spoil(root)
    assert list(file_faults(root, packed)) == [fault]


def test_tables_are_those_of_the_provenance(root):
    write_table([{"x": 1}], root / "tables/t.csv")
    record = {"tables": {"t.csv": sha256(root / "tables/t.csv"), "gone.csv": "0"}}
    (root / "provenance.json").write_text(json.dumps(record))
    assert list(table_faults(root)) == ["not the table of the recorded run: gone.csv"]


def test_verdicts_are_counted_against_the_expected_ones(root):
    lines = [("A", "refuted", "refuted"), ("B", "refuted", "reproduced"), ("C", "not_run", "reproduced")]
    rows = [{"id": id, "verdict": verdict, "expected_verdict": expected} for id, verdict, expected in lines]
    write_table(rows, root / "claims.csv")
    assert verdicts(root) == (1, ["B"], 1)
