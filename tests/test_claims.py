"""Claims: the file is complete, and each way of deciding gives each verdict it can give."""

import json
from pathlib import Path

import pytest

from curvature_gap.claims import Claim, ClaimsError, decide, outcome, read_claims

ROOT = Path(__file__).parents[1]


@pytest.fixture
def results(tmp_path):
    tables = tmp_path / "tables"
    tables.mkdir()
    (tables / "statements.csv").write_text(
        "id,kind,as_printed,corrected,max_rel_error_printed,max_rel_error_corrected,worst_ratio,witness,n_cases,note\n"
        "P2,identity,holds,not_needed,1e-16,,,,3,\n"
        "N1,bound,violated,holds,,,3.5,w,50,\n"
        "T5_xi_12,identity,wrong,holds,0.7,1e-16,,,3,\n"
        "T9,bound,violated,not_applicable,,,2,w,50,\n"
        "A2,claim,not_applicable,not_applicable,,,,,0,\n"
    )
    (tables / "slopes.csv").write_text("seed,dataset,slope\n0,mnist,-0.9\n1,mnist,-1.1\n0,cifar100,-0.5\n1,other,\n")
    return tmp_path


def statement(id):
    return Claim(id=id, statement="s", where="w", decide={"statement": id})


def number(**changes):
    base = {
        "id": "slope",
        "statement": "s",
        "where": "w",
        "decide": {"table": "slopes", "filter": "dataset == 'mnist'", "value": "slope"},
        "comparison": "within",
        "expected": -1.0,
        "tolerance": 0.05,
        "tolerance_reason": "half the step",
    }
    return Claim(**(base | changes))


@pytest.mark.parametrize(
    ("id", "verdict"),
    [
        ("P2", "reproduced"),
        ("N1", "reproduced_after_correction"),
        ("T5_xi_12", "reproduced_after_correction"),
        ("T9", "refuted"),
        ("A2", "not_run"),
        ("absent", "not_run"),
    ],
)
def test_a_statement_is_decided_by_its_row(results, id, verdict):
    assert decide(statement(id), results, "laptop").verdict == verdict


def test_a_violated_bound_says_by_how_much(results):
    assert decide(statement("N1"), results, "laptop").measured == "violated, exact/bound 3.5"


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "reproduced"),
        ({"expected": -1.1}, "not_reproduced"),
        ({"expected": -1.1, "otherwise": "refuted"}, "refuted"),
        ({"expected": -1.04, "comparison": "at_least", "tolerance": 0.0}, "reproduced"),
        ({"expected": -1.04, "comparison": "at_most", "tolerance": 0.0}, "not_reproduced"),
        ({"decide": {"table": "slopes", "filter": "dataset == 'pets'", "value": "slope"}}, "not_run"),
        ({"decide": {"table": "slopes", "filter": "dataset == 'other'", "value": "slope"}}, "not_run"),
        ({"decide": {"table": "nothing", "value": "slope"}}, "not_run"),
        ({"presets": ("paper",)}, "not_run"),
        ({"supported": False, "reason": "no machine"}, "not_run"),
    ],
)
def test_a_number_is_compared_with_the_papers(results, changes, verdict):
    assert decide(number(**changes), results, "laptop").verdict == verdict


@pytest.mark.parametrize(("expected", "verdict"), [(8.0, "reproduced"), (9.0, "not_reproduced")])
def test_a_speed_is_read_from_the_committed_benchmark(results, tmp_path, monkeypatch, expected, verdict):
    monkeypatch.chdir(tmp_path)
    claim = number(
        decide={"bench": "over", "filter": "parameters == 7", "reduce": "min"}, comparison="at_least", expected=expected
    )
    missing = decide(claim, results, "smoke")
    assert (missing.verdict, missing.evidence) == ("not_run", "expected/bench/machine.json has no such row in this run")
    path = tmp_path / "expected/bench/machine.json"
    path.parent.mkdir(parents=True)
    rows = [{"parameters": p, "over": over} for p, over in ((7, 8.5), (7, 10.0), (5, 1.0))]
    path.write_text(json.dumps({"ratios": rows}))
    found = decide(claim, results, "smoke")
    assert (found.verdict, found.measured) == (verdict, "8.5")
    assert claim.needs() == []


def test_the_tolerance_factor_moves_the_verdict(results):
    claim = number(expected=-1.04)
    assert decide(claim, results, "laptop").verdict == "reproduced"
    assert decide(claim, results, "laptop", tolerance_factor=0.5).verdict == "not_reproduced"


def test_outcomes():
    line = {"verdict": "refuted", "expected_verdict": "refuted"}
    assert outcome(line) == "PASS"
    assert outcome(line | {"verdict": "reproduced"}) == "FAIL"
    assert outcome(line | {"verdict": "not_run"}) == "NOT RUN"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("- statement: s", "has no id"),
        ("- {id: a, statement: s, where: w, decide: {statement: a}, verdikt: x}", "unknown key verdikt"),
        ("- {id: a, statement: s, where: w, decide: {}}", "exactly one of"),
        ("- {id: a, statement: s, where: w, decide: {statement: a}, expected_verdict: fine}", "is not one of"),
        ("- {id: a, statement: s, where: w, decide: {statement: a}, comparison: near}", "comparison 'near'"),
        ("- {id: a, statement: s, where: w, decide: {table: t, value: v}, comparison: within}", "needs its reason"),
        ("- {id: a, statement: s, where: w, decide: {statement: a}, supported: false}", "no reason is given"),
        ("- &c {id: a, statement: s, where: w, decide: {statement: a}}\n- *c", "a stands twice"),
    ],
)
def test_a_malformed_claim_is_named(tmp_path, entry, message):
    path = tmp_path / "claims.yaml"
    path.write_text(entry)
    with pytest.raises(ClaimsError, match=message):
        read_claims(path)


def test_every_statement_of_the_paper_is_claimed():
    ids = (ROOT / "paper/statement_ids.txt").read_text().split()
    claims = {claim.id for claim in read_claims(ROOT / "paper/claims.yaml")}
    assert set(ids) <= claims


def test_every_table_figure_and_text_claim_of_the_paper_is_claimed():
    claims = {claim.id.split("_")[0] for claim in read_claims(ROOT / "paper/claims.yaml")}
    wanted = {f"FIG-{n}" for n in range(1, 13)} | {"TAB-1", "TAB-2", "THESIS-1", "TXT-1"}
    assert wanted <= claims
