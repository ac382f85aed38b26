"""The paper's abstract, sentence by sentence: which claims decide it, what they came to, where to look."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from curvature_gap.claims import VERDICTS, ClaimsError, outcome, read_rows


@dataclass(frozen=True)
class Sentence:
    """One entry of `paper/abstract.yaml`: what the sentence says, what was found, the claims' ids, where to look."""

    number: int
    says: str
    finding: str
    claims: tuple[str, ...]
    look: str


def read_abstract(path: Path, known: Sequence[str]) -> list[Sentence]:
    """Return the sentences in the abstract's order; `known` are the ids of claims.yaml.

    Raises:
        ClaimsError: If an entry lacks a key or names a claim that does not exist.
    """
    import yaml

    sentences = []
    for number, entry in enumerate(yaml.safe_load(path.read_text(encoding="utf-8")), start=1):
        if set(entry) != {"says", "finding", "claims", "look"}:
            raise ClaimsError(f"{path}: sentence {number} needs says, finding, claims and look; it has {list(entry)}.")
        unknown = [id for id in entry["claims"] if id not in known]
        if unknown:
            raise ClaimsError(f"{path}: sentence {number} names claims that do not exist: {', '.join(unknown)}.")
        sentences.append(Sentence(number, **(entry | {"claims": tuple(entry["claims"])})))
    return sentences


def verdict_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return how many claims have each verdict, in words; `–` for no claims."""
    counts = Counter(row["verdict"] for row in rows)
    return ", ".join(f"{counts[v]} {v.replace('_', ' ')}" for v in VERDICTS if counts[v]) or "–"


def decided(sentence: Sentence, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a run's lines on a sentence's claims; a claim that the run does not know is left out."""
    by_id = {row["id"]: row for row in rows}
    return [by_id[id] for id in sentence.claims if id in by_id]


def claims_at_hand(results: Path, expected: Path) -> tuple[Path, list[dict[str, str]]]:
    """Return the finished run's claims.csv, else the committed one, and its rows.

    Raises:
        FileNotFoundError: If there is neither.
    """
    for path in (results / "claims.csv", expected / "claims.csv"):
        if path.is_file():
            return path, read_rows(path)
    raise FileNotFoundError(f"Neither {results} nor {expected} has a claims.csv; run `make reproduce` in the clone.")


def account(sentence: Sentence, rows: Sequence[Mapping[str, Any]], source: Path) -> dict[str, Any]:
    """Return what there is to say on one sentence: the verdicts' count, a line a claim, where to look."""
    lines = decided(sentence, rows)
    return {
        f"sentence {sentence.number}": sentence.says,
        "found": sentence.finding,
        "verdicts": verdict_words(lines),
        "claims": [[outcome(line), line["id"], line["verdict"], line["measured"]] for line in lines],
        "look at": sentence.look,
        "from": str(source),
    }
