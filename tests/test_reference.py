"""A run against the reference: identical, within tolerance, outside, and what to blame."""

import copy
import json

import pandas as pd
import pytest

from curvature_gap.provenance import sha256
from curvature_gap.reference import compare_with_reference, differences, store_reference

RECORD = {
    "versions": {"torch": "2.14.1"},
    "device": "cpu",
    "hardware": {"machine": "EPYC, 2 cores"},
    "datasets": {"mnist": {"sha256": "aa"}},
    "config_sha256": "cc",
    "tables": {},
}


@pytest.fixture
def pair(tmp_path):
    """A reference and a run that equals it, and a way to change one table of the run."""
    seeds = [{"run": f"mnist_seed{s}", "seed": s, "stage": t} for s in range(3) for t in ("init", "trained")]
    frame = pd.DataFrame([row | {"norm": 1.0 + 0.1 * row["seed"]} for row in seeds])

    def write(folder, frame):
        (folder / "tables").mkdir(parents=True, exist_ok=True)
        frame.to_csv(folder / "tables/block_norms.csv", index=False)
        record = copy.deepcopy(RECORD) | {"tables": {"block_norms.csv": sha256(folder / "tables/block_norms.csv")}}
        (folder / "provenance.json").write_text(json.dumps(record))

    write(tmp_path / "expected", frame)
    write(tmp_path / "run", frame)
    return tmp_path, frame, write


def on_another_machine(folder):
    record = json.loads((folder / "provenance.json").read_text())
    record["hardware"]["machine"] = "Xeon, 8 cores"
    (folder / "provenance.json").write_text(json.dumps(record))


def compare(root):
    return compare_with_reference(root / "run", root / "expected")


def test_the_same_run_is_identical(pair):
    report = compare(pair[0])
    assert report == {"agrees": True, "class": "exact", "tables": {"block_norms.csv": "identical"}, "differs_in": []}


def test_no_reference_is_said(tmp_path):
    assert compare_with_reference(tmp_path, tmp_path / "expected")["class"] == "no reference"


@pytest.mark.parametrize(
    ("stage", "change", "agrees"),
    [("init", 1e-11, True), ("init", 1e-6, False), ("trained", 0.05, True), ("trained", 0.5, False)],
)
def test_another_machine_has_tolerances(pair, stage, change, agrees):
    root, frame, write = pair
    changed = frame.copy()
    changed.loc[(frame.stage == stage) & (frame.seed == 1), "norm"] += change
    write(root / "run", changed)
    on_another_machine(root / "run")
    report = compare(root)
    assert report["class"] == "elsewhere"
    assert report["differs_in"] == ["machine"]
    assert report["agrees"] is agrees


def test_the_same_machine_must_be_exact(pair):
    root, frame, write = pair
    write(root / "run", frame.assign(norm=frame.norm + 1e-12))
    report = compare(root)
    assert not report["agrees"]
    assert "differs, though" in report["tables"]["block_norms.csv"]


@pytest.mark.parametrize(
    ("change", "blamed"),
    [
        ({"versions": {"torch": "2.13"}}, "environment"),
        ({"device": "cuda"}, "device"),
        ({"datasets": {"mnist": {"sha256": "bb"}}}, "data"),
        ({"config_sha256": "dd"}, "configuration"),
        ({"hardware": {"machine": "Xeon, 2 cores"}}, "machine"),
    ],
)
def test_what_differs_is_named(change, blamed):
    assert differences(RECORD | change, RECORD) == [blamed]


def test_a_missing_table_is_a_fault(pair):
    root, _, _ = pair
    record = json.loads((root / "run/provenance.json").read_text()) | {"tables": {}}
    (root / "run/provenance.json").write_text(json.dumps(record))
    assert compare(root)["tables"] == {"block_norms.csv": "missing"}


def test_a_stored_run_agrees_with_itself(pair):
    root, _, _ = pair
    (root / "run/claims.csv").write_text("id\n")
    (root / "run/tables/large.csv").write_text("x\n" * 1000)
    stored = store_reference(root / "run", root / "expected", largest=1000)
    assert [path.name for path in stored] == ["provenance.json", "claims.csv", "block_norms.csv"]
    assert compare(root)["agrees"]


def test_an_unfinished_run_is_no_reference(tmp_path):
    with pytest.raises(FileNotFoundError, match="finish the run first"):
        store_reference(tmp_path, tmp_path / "expected")
