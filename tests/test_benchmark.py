import csv
import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from curvature_gap import benchmark
from curvature_gap.architecture import Architecture
from curvature_gap.benchmark import ENGINE, QUICK, TINY, Job, measure, with_biases
from curvature_gap.benchmark_peers import PEERS, make_problem
from curvature_gap.vit import ViT

UNEVEN = Architecture(image_size=6, channels=1, patch=3, classes=2, d_V=3, d_ff=5)
IN_TORCH = [name for name, peer in PEERS.items() if peer.package == "torch"]


def job(method, path, architecture=UNEVEN, dtype="float64", columns=None, cap_gib=None):
    return Job(method, architecture, dtype, 3, columns, 1, cap_gib, str(path))


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """The reference's file and evidence, for both variants of a small model."""
    found = {}
    for architecture in (UNEVEN, with_biases(UNEVEN)):
        path = tmp_path_factory.mktemp("reference") / "H.npy"
        found[architecture] = path, benchmark.write_reference(architecture, 3, 1, path)
    return found


@pytest.mark.parametrize("architecture", [UNEVEN, with_biases(UNEVEN)])
def test_the_peers_model_is_ours(architecture):
    problem = make_problem(architecture, 3, torch.float64)
    model = ViT(architecture).double()
    torch.testing.assert_close(problem.model(problem.images), model(problem.images), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("architecture", [UNEVEN, with_biases(UNEVEN)])
def test_the_reference_agrees_with_the_autograd_loop_and_is_certified(architecture, references):
    path, evidence = references[architecture]
    assert evidence["autograd_loop_error_rel"] < 1e-13
    assert evidence["hvp_error"] < 1e-12
    assert np.load(path).shape == (architecture.n_parameters,) * 2


@pytest.mark.parametrize("method", [ENGINE, *IN_TORCH])
def test_every_method_is_right_or_says_that_it_is_wrong(method, references):
    path, _ = references[UNEVEN]
    row = measure(job(method, path))
    assert row["columns"] == UNEVEN.n_parameters
    assert not row["extrapolated"]
    assert row["seconds"] > 0
    if method == "torch.func.hessian" and row["status"] != "ok":
        assert row["status"].startswith("wrong: block (LN")
        assert row["max_error_rel"] > 1e-3
        assert row["asymmetry_rel"] > 1e-3
    else:
        assert row["status"] == "ok"
        assert row["max_error_rel"] < 1e-13
        assert row["asymmetry_rel"] < 1e-13


def test_some_columns_are_extrapolated_to_all(references):
    path, _ = references[UNEVEN]
    row = measure(job("autograd loop", path, dtype="float32", columns=7))
    assert (row["columns"], row["extrapolated"], row["status"]) == (7, True, "ok")
    assert row["max_error_rel"] < 1e-5


def test_a_wrong_result_names_its_worst_block(references):
    path, _ = references[UNEVEN]
    H = torch.from_numpy(np.load(path))
    H[-1, 0] += 1
    row = benchmark.judged(H, torch.arange(len(H)), np.load(path), job(ENGINE, path))
    assert row["status"].startswith("wrong: block (classifier, embed) is off by")
    H[-1, 0] = float("nan")
    assert benchmark.judged(H, torch.arange(len(H)), np.load(path), job(ENGINE, path))["status"].startswith("wrong")


def test_a_reference_that_disagrees_with_the_autograd_loop_is_refused(tmp_path, monkeypatch):
    right = PEERS["autograd loop"]
    broken = replace(right, prepare=lambda problem: lambda indices: 1.001 * right.prepare(problem)(indices))
    monkeypatch.setitem(benchmark.PEERS, "autograd loop", broken)
    with pytest.raises(ValueError, match=r"differs from 32 columns of the autograd loop by 0\.00"):
        benchmark.write_reference(UNEVEN, 3, 1, tmp_path / "H.npy")
    assert not (tmp_path / "H.npy").exists()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ImportError("No module named 'peer'"), "not installed: No module named 'peer'"),
        (MemoryError(), "out of memory: needs more than 2 GiB"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory: needs more than 2 GiB"),
        (RuntimeError("a rule is missing\nmore"), "failed: a rule is missing"),
        (KeyError("x"), "failed: KeyError: 'x'"),
    ],
)
def test_a_peer_that_fails_says_so_in_its_row(error, status, monkeypatch):
    def fail(problem):
        raise error

    monkeypatch.setitem(benchmark.PEERS, "PyHessian", replace(PEERS["PyHessian"], prepare=fail))
    row = measure(replace(job("PyHessian", "none"), cap_gib=2.0))
    assert row["status"] == status
    assert "seconds" not in row


def test_the_memory_cap_stops_an_allocation_and_measures_the_peak():
    with benchmark.MemoryCap(0.5) as peak, pytest.raises(RuntimeError, match="allocate memory"):
        torch.empty(2**30, dtype=torch.uint8)
    with benchmark.MemoryCap(None) as peak:
        torch.zeros(2**26, dtype=torch.uint8) + 1
        found = peak()
    assert 2**26 <= found < 2**28


def test_columns_are_spread_from_the_first_to_the_last():
    assert benchmark.spread(10, 4).tolist() == [0, 3, 6, 9]
    assert benchmark.spread(5, None).tolist() == benchmark.spread(5, 9).tolist() == [0, 1, 2, 3, 4]


def test_the_engine_runs_before_between_and_after_the_peers():
    order = benchmark.schedule(benchmark.Plan())
    assert [i for i, m in enumerate(order) if m == ENGINE] == [0, len(order) - 3, len(order) - 1]
    assert set(order) == set(PEERS)
    assert benchmark.schedule(QUICK).count(ENGINE) == 1


def test_the_engines_row_is_the_median_and_a_failure_is_not_hidden():
    runs = [
        {"seconds": s, "peak_gib": p, "max_error_rel": 0.0, "asymmetry_rel": 0.0} for s, p in ((3, 1), (1, 2), (2, 0))
    ]
    assert (benchmark.combined(runs)["seconds"], benchmark.combined(runs)["peak_gib"]) == (2, 2)
    assert benchmark.combined([*runs, {"status": "failed"}]) == {"status": "failed"}


def test_ratios_leave_wrong_peers_out_of_the_fastest_correct_one():
    same = {"parameters": 7, "dtype": "float64", "status": "ok"}
    rows = [
        {**same, "method": ENGINE, "seconds": 2.0},
        {**same, "method": "autograd loop", "seconds": 30.0},
        {**same, "method": "curvlinops, 16 columns", "seconds": 10.0, "status": "wrong: block"},
        {**same, "method": "PyHessian", "status": "failed"},
    ]
    (found,) = benchmark.ratios(rows)
    assert (found["over_curvlinops"], found["fastest_correct_peer"]) == (5.0, "autograd loop")
    assert found["over_fastest_correct_peer"] == 15.0


def test_the_exponent_of_a_power_law_is_found():
    points = [
        {"dtype": "float32", "threads": 1, "batch": b, "parameters": 7, "seconds": 0.5 * b**1.25} for b in (2, 4, 8)
    ]
    assert "seconds grow as batch^1.25" in benchmark.exponent_row("batch", points)["status"]


def test_growth_is_measured_in_every_series():
    series = benchmark.growth_points(QUICK)
    assert [b for _, b in series["batch"]] == [2, 4, 8]
    assert [(a.d_V, a.d_ff) for a, _ in series["width"]] == [(3, 4), (4, 6), (6, 9)]
    (row,) = benchmark.grow("width, diagonal blocks", series["width, diagonal blocks"][:1], 1)
    assert (row["width"], row["batch"]) == (3, 3)
    assert row["seconds"] > 0


def test_a_process_that_dies_or_takes_too_long_gives_a_status():
    request = asdict(job("no such method", "none", TINY))
    assert benchmark.in_process_of_its_own("measure", request, 0.01)["status"] == "timed out after 0.01 s"


@pytest.mark.slow
def test_the_whole_benchmark_in_small(tmp_path):
    broken = benchmark.in_process_of_its_own("measure", asdict(job("no such method", "none", TINY)), 60.0)
    assert broken["status"].startswith("failed: the process ended with 1: KeyError")

    assert benchmark.main(["--quick", "--threads", "1", "--output", str(tmp_path)]) == 0
    with (tmp_path / "benchmarks.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert list(rows[ENGINE]) == benchmark.TABLE
    assert rows[ENGINE]["status"] == rows["autograd loop"]["status"] == "ok"
    assert 0 < float(rows[ENGINE]["max_error_rel"]) < 1e-13
    assert "seconds grow as" in rows[f"{ENGINE}, growth in batch"]["status"]
    record = json.loads((tmp_path / "machine.json").read_text())
    assert record["threads"] == 1
    assert {run["method"] for run in record["runs"]} == set(QUICK.methods)
    with (tmp_path / "growth.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 9
