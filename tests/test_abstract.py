"""The abstract's sentences name claims that exist, and every theorem and headline of the paper is behind one."""

import re
from pathlib import Path

import pytest

from curvature_gap.abstract import account, claims_at_hand, decided, read_abstract, verdict_words
from curvature_gap.claims import ClaimsError, read_claims

ROOT = Path(__file__).parents[1]
IDS = [claim.id for claim in read_claims(ROOT / "paper/claims.yaml")]
SENTENCES = read_abstract(ROOT / "paper/abstract.yaml", IDS)
ROWS = [
    {"id": "T2", "verdict": "reproduced", "expected_verdict": "reproduced", "measured": "holds"},
    {"id": "T3", "verdict": "refuted", "expected_verdict": "reproduced_after_correction", "measured": "wrong"},
]


def test_the_abstract_has_six_sentences():
    assert [sentence.number for sentence in SENTENCES] == [1, 2, 3, 4, 5, 6]


def test_every_theorem_and_every_claim_on_figures_is_behind_a_sentence():
    behind = {id for sentence in SENTENCES for id in sentence.claims}
    theorems = {id.split("_")[0] for id in behind}
    assert {f"T{n}" for n in range(1, 8)} <= theorems
    assert {f"FIG-{n}" for n in range(3, 13)} <= theorems


def test_what_is_to_be_looked_at_exists():
    notebooks = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    for sentence in SENTENCES:
        for name in re.findall(r"fig(?:\d\d|x_\w+)", sentence.look):
            assert name in notebooks


def test_no_number_is_typed_into_a_finding():
    for sentence in SENTENCES:
        assert not re.search(r"\d", sentence.finding.replace("Theorem 7", "").replace("slope −1", ""))


def test_verdicts_are_counted_in_one_order():
    assert verdict_words(ROWS) == "1 reproduced, 1 refuted"
    assert verdict_words([]) == "–"


def test_an_account_has_a_line_a_claim_of_the_run():
    two = SENTENCES[1]
    said = account(two, ROWS, Path("claims.csv"))
    assert said["claims"] == [["PASS", "T2", "reproduced", "holds"], ["FAIL", "T3", "refuted", "wrong"]]
    assert decided(SENTENCES[3], ROWS) == []


def test_a_run_comes_before_the_reference(tmp_path):
    for folder in ("expected", "results"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "claims.csv").write_text("id\nT2\n")
        path, rows = claims_at_hand(tmp_path / "results", tmp_path / "expected")
        assert (path.parent.name, rows) == (folder, [{"id": "T2"}])
    with pytest.raises(FileNotFoundError, match="make reproduce"):
        claims_at_hand(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("- {says: a, finding: b, claims: [T9], look: c}", "sentence 1 names claims that do not exist: T9"),
        ("- {says: a, claims: [], look: c}", "sentence 1 needs says, finding, claims and look"),
    ],
)
def test_a_malformed_sentence_is_named(tmp_path, entry, message):
    path = tmp_path / "abstract.yaml"
    path.write_text(entry)
    with pytest.raises(ClaimsError, match=message):
        read_abstract(path, IDS)
