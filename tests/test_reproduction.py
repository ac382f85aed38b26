import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from curvature_gap import bound_errata, errata, reproduction
from curvature_gap.claims import Claim, decide, read_claims
from curvature_gap.provenance import sha256
from curvature_gap.reproduction import (
    below,
    block_rows,
    block_text,
    bound_rows,
    certificate_facts,
    certificate_rows,
    claim_rows,
    errata_rows,
    figure_rows,
    hash_of,
    light,
    powers,
    report_data,
    shown,
    spread,
    statement_facts,
    table_rows,
    time_facts,
    time_rows,
    typeset,
    verdict_facts,
)
from curvature_gap.tables import write_table

ROOT = Path(__file__).resolve().parents[1]
FIGURE = {"title": "t", "category": "c", "notebook": "absent.ipynb", "code": [], "inputs": []}


def statement(id, kind="identity", as_printed="holds", **cells):
    row = {
        "id": id,
        "kind": kind,
        "as_printed": as_printed,
        "corrected": "not_needed" if as_printed == "holds" else "holds",
        "max_rel_error_printed": "",
        "max_rel_error_corrected": "",
        "worst_ratio": "",
        "witness": "",
        "n_cases": 3,
        "note": "",
    }
    return row | cells


STATEMENTS = [
    statement("P2", max_rel_error_printed=2e-16),
    statement("T4_appendix", as_printed="shape_error", max_rel_error_corrected=3e-15, witness="L=2 d_V=3"),
    statement("N1", "bound", "violated", worst_ratio=3.5, witness="witnesses/N1.npz"),
    statement("N2", "bound", worst_ratio=0.5),
]


def provenance_of(results):
    return {
        "preset": results.name,
        "versions": {"python": "3.11", "torch": "2.14"},
        "lock_sha256": "0123456789abcdef",
        "hardware": {"machine": "a machine, 2 cores", "architecture": "x86_64", "system": "Linux"},
        "device": "cpu",
        "datasets": {"mnist": {"source": "digits", "sha256": "ab" * 32, "available": True, "note": "not MNIST"}},
        "config_sha256": "cd" * 32,
        "git": {"commit": "ef" * 20, "dirty": False},
        "command": "snakemake --cores all",
        "tables": {path.name: sha256(path) for path in (results / "tables").glob("*.csv")},
    }


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A small finished run, results/smoke, in a clone of its own."""
    monkeypatch.chdir(tmp_path)
    for folder in ("paper", "docs"):
        shutil.copytree(ROOT / folder, folder)
    results = Path("results/smoke")
    write_table(STATEMENTS, results / "tables/statements.csv")
    claims = read_claims(Path("paper/claims.yaml"))
    timing = {
        "rule": "identities",
        "wildcards": "",
        "seconds": 61.0,
        "cpu_seconds": 30.0,
        "peak_mib": 512.0,
        "threads": 1,
    }
    write_table([timing | {"device": "cpu", "machine": "a machine"}], results / "tables/timings.csv")
    norms = [
        {"run": f"mnist_seed{seed}", "stage": stage, "seed": seed, "row": "W_Q", "column": "W_Q"}
        | {"spectral": 1.0 + seed, "frobenius": 2.0, "max_abs": 1.0, "mean_abs": 0.5, "mean_log10_abs": -1.0}
        for seed in (0, 1)
        for stage in ("init", "trained")
    ]
    write_table(norms, results / "tables/block_norms.csv")
    write_table([decide(claim, results, "smoke") for claim in claims], results / "claims.csv")
    (results / "provenance.json").write_text(json.dumps(provenance_of(results)))
    return results


def gather(results, figures=None):
    return report_data(
        results, figures or {}, Path("paper/claims.yaml"), Path("expected/smoke"), Path("expected/bench/benchmarks.csv")
    )


def write_json(data, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        ("3552", "3552"),
        (0.123456, "0.1235"),
        ("1.2e-15", "1.2×10⁻¹⁵"),
        (-2.5e20, "−2.5×10²⁰"),
        ("", "–"),
        (float("nan"), "–"),
        ("-inf", "−∞"),
        ("True", "yes"),
        ("W_Q", "W_Q"),
    ],
)
def test_cells_are_printed_with_four_digits_and_powers_of_ten(cell, text):
    assert shown(cell) == text


def test_powers_leave_names_and_hashes_alone():
    assert powers("error 1.2e-05, hash 12ab3e45, seed0e1") == "error 1.2×10⁻⁵, hash 12ab3e45, seed0e1"


def test_every_erratum_of_the_package_is_listed_once_with_its_evidence():
    rows = errata_rows([{key: str(value) for key, value in row.items()} for row in STATEMENTS])
    words = len(errata.ERRATA) + len(errata.MISPRINTS) + len(bound_errata.ERRATA) + len(bound_errata.MISPRINTS)
    assert len(rows) == words
    (found,) = [row for row in rows if row["id"] == "N1"]
    assert (found["kind"], found["worst_ratio"], found["witness"]) == ("bound", "3.5", "witnesses/N1.npz")
    assert {row["kind"] for row in rows} == {"identity", "bound", "misprint"}


def test_statement_facts_count_and_name_the_extremes():
    facts = statement_facts([{key: str(value) for key, value in row.items()} for row in STATEMENTS])
    assert facts["identity"] == {"n": 2, "verdicts": {"holds": 1, "shape_error": 1}, "corrected": 1, "cases": 6}
    assert facts["worst_violation"] == {"id": "N1", "value": "3.5"}
    assert facts["closest_bound"]["id"] == "N2"
    assert facts["error_corrected"] == {"id": "T4_appendix", "value": "3×10⁻¹⁵"}


def test_counts_are_those_of_claims_csv(run):
    rows = claim_rows(run, read_claims(Path("paper/claims.yaml")))
    facts = verdict_facts(rows)
    assert facts["n"] == len(rows) == sum(facts["verdicts"].values()) == sum(facts["outcomes"].values())
    assert facts["verdicts"]["reproduced"] == 2  # P2 and N2
    assert facts["verdicts"]["reproduced_after_correction"] == 2
    assert sum(sum(counts.values()) for counts in facts["by_kind"].values()) == facts["n"]


def test_a_claim_missing_from_claims_yaml_still_has_a_line(run):
    rows = claim_rows(run, [Claim("P2", "a", "b", {"statement": "P2"})])
    assert [row["where"] for row in rows if row["id"] in ("P2", "N1")] == ["b", ""]


def test_figures_carry_the_hashes_of_code_inputs_and_data(run):
    Path("notebook.ipynb").write_text("{}")
    Path("code.py").write_text("x = 1")
    record = run / "data/mnist.json"
    write_json({}, record)
    entry = {"title": "t", "category": "c", "notebook": "notebook.ipynb", "code": ["code.py"], "inputs": [str(record)]}
    datasets = provenance_of(run)["datasets"]
    (before,) = figure_rows(run, {"fig01": entry}, datasets)
    assert before["file"] == ""
    assert before["data"] == [["mnist", "abababababab"]]
    Path("code.py").write_text("x = 2")
    (after,) = figure_rows(run, {"fig01": entry}, datasets)
    assert after["code"] != before["code"]
    assert after["inputs"] == before["inputs"]


def test_hash_depends_on_contents_and_not_on_order(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("1")
    b.write_text("2")
    assert hash_of([str(a), str(b)]) == hash_of([str(b), str(a)])
    assert hash_of([str(a), str(tmp_path / "absent")]) == "missing"


def test_a_heavy_figure_is_printed_from_a_light_copy(run, monkeypatch):
    from PIL import Image

    figures = run / "figures"
    figures.mkdir()
    (figures / "fig03.pdf").write_bytes(b"x" * 200_000)
    noise = np.random.default_rng(0).integers(0, 255, (700, 990, 3), dtype=np.uint8)
    Image.fromarray(noise).save(figures / "fig03.png")
    (figures / "fig01.pdf").write_bytes(b"x")
    assert light(figures / "fig01.pdf") == figures / "fig01.pdf"
    copy = light(figures / "fig03.pdf")
    assert copy == run / "report/figures/fig03.jpg"
    with Image.open(copy) as picture:
        assert picture.size == (660, 467)
    # A copy heavier than the PDF is of no use.
    monkeypatch.setattr(reproduction, "HEAVY", 1000)
    (figures / "fig03.pdf").write_bytes(b"x" * 1001)
    assert light(figures / "fig03.pdf") == figures / "fig03.pdf"


def test_blocks_are_named_as_text():
    assert [block_text(name) for name in ("LN1_gamma", "LN2_beta", "embed_bias", "W_Q", "LN1")] == [
        "LN1 γ",
        "LN2 β",
        "embed bias",
        "W_Q",
        "LN1",
    ]


def test_certificates_are_read_from_the_stored_hessians(run):
    path = run / "hessians/mnist_seed0/init.npz"
    path.parent.mkdir(parents=True)
    certificate = {"asymmetry": 1e-16, "hvp_error": 2e-15, "fd_error": 3e-9, "n_fd_columns": 8, "relu_near_zero": 0}
    arrays = {f"certificate_{name}": np.array(value) for name, value in certificate.items()}
    np.savez(path, offsets=np.array([0, 7]), engine="closed_form", loss=2.3, grad_norm=0.5, **arrays)
    np.savez(path.with_name("trained.npz"), offsets=np.array([0, 7]))
    rows = certificate_rows(run)
    assert [row["stage"] for row in rows] == ["init"]
    facts = certificate_facts(rows)
    assert (facts["n"], facts["parameters"], facts["hvp_error"]) == (1, ["7"], "2×10⁻¹⁵")
    assert certificate_facts([])["fd_error"] == "–"


def test_spread_is_mean_and_standard_deviation_over_seeds(run):
    assert spread([1.0, 2.0, 3.0]) == "2 ± 1"
    assert spread([1.5]) == "1.5"
    assert spread([float("nan")]) == "–"
    (row,) = block_rows(run)
    assert row["init_spectral"] == "1.5 ± 0.71"


def test_bounds_are_ranges_over_seeds_of_whole_hessians(run):
    ratios = {"exact": 2.0, "ratio_printed_main": "", "ratio_tight_data": 1.0}
    rows = [
        {"run": f"theory_block_small_seed{seed}", "stage": "init", "seed": seed, "block": block}
        | ratios
        | {"ratio_corrected": 10.0 + seed}
        for seed in (0, 1)
        for block in ("W_Q:W_Q", "total")
    ]
    write_table(rows, run / "tables/bounds.csv")
    (row,) = bound_rows(run)
    assert (row["run"], row["n"], row["exact"], row["corrected"]) == ("theory block small", "2", "2", "10 to 11")
    assert (row["printed_main"], row["printed_appendix"], row["tight_data"]) == ("–", "–", "1")


def test_times_are_summed_by_rule(run):
    facts = time_facts(time_rows(run))
    assert (facts["jobs"], facts["minutes"], facts["peak_gib"]) == ("1", "1.0", "0.5")
    assert time_facts([])["minutes"] == "–"


def test_long_tables_are_named_with_their_size_only(run):
    write_table([{"k": i, "value": i / 7} for i in range(100)], run / "tables/increments.csv")
    tables = {table["name"]: table for table in table_rows(run, left_out=["statements"])}
    assert (tables["increments"]["n_rows"], tables["increments"]["rows"]) == (100, [])
    assert tables["statements"]["rows"] == []
    assert tables["block_norms"]["rows"][0][0] == "mnist_seed0"


def test_an_unfinished_run_has_no_report(run):
    (run / "claims.csv").unlink()
    with pytest.raises(FileNotFoundError, match=r"claims\.csv"):
        gather(run)


def test_paths_are_named_from_the_root(tmp_path):
    assert below(tmp_path / "results/a.pdf", tmp_path) == "/results/a.pdf"


def test_the_report_compiles_offline_and_byte_for_byte_again(run):
    data = write_json(gather(run, {"fig01": FIGURE}), run / "report/reproduction.json")
    pdfs = [run / "report/a.pdf", run / "report/b.pdf"]
    for pdf in pdfs:
        typeset(Path("paper/reproduction.typ"), data, pdf, Path())
    assert pdfs[0].read_bytes().startswith(b"%PDF")
    assert pdfs[0].read_bytes() == pdfs[1].read_bytes()


def test_the_report_prints_the_runs_numbers_and_not_others(run):
    """Two runs that differ in one verdict give two reports: the counts come from the run."""
    template = Path("paper/reproduction.typ")
    first = write_json(gather(run), run / "report/first.json")
    write_table([statement("P2", as_printed="wrong")], run / "tables/statements.csv")
    claims = read_claims(Path("paper/claims.yaml"))
    write_table([decide(claim, run, "smoke") for claim in claims], run / "claims.csv")
    second = write_json(gather(run), run / "report/second.json")
    for data in (first, second):
        typeset(template, data, data.with_suffix(".pdf"), Path())
    assert first.with_suffix(".pdf").read_bytes() != second.with_suffix(".pdf").read_bytes()
