"""Every claim of the paper, and the verdict that a finished run gives on it."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["reproduced", "reproduced_after_correction", "refuted", "not_reproduced", "not_run"]
VERDICTS: tuple[Verdict, ...] = ("reproduced", "reproduced_after_correction", "refuted", "not_reproduced", "not_run")
COMPARISONS = ("within", "at_least", "at_most", "exists")
BENCHMARK = Path("expected/bench/machine.json")
"""The committed benchmark, in the clone: measured apart from any run, so every preset reads the same."""


class ClaimsError(ValueError):
    """A malformed claims.yaml; the message names the claim and the key."""


@dataclass(frozen=True)
class Claim:
    """One entry of `paper/claims.yaml`.

    Attributes:
        id: The paper's id, or one of ours for a claim that goes beyond it.
        statement: What is claimed, in a sentence.
        where: Where it stands in the paper.
        decide: What decides it: `{statement: ID}`, `{table, filter, value, reduce}`, `{files: [...]}`, or, for the
            ratios of the committed benchmark, `{bench: COLUMN, filter, reduce}`.
        expected_verdict: PASS means that the measured verdict equals it.
        presets: The presets that can decide it.
        comparison: How measured and expected are compared, for a table.
        expected: The number the paper (or we) claim, for a table.
        tolerance: In the units of `expected`; 0 with `at_least` and `at_most`.
        tolerance_reason: Why that tolerance.
        otherwise: The verdict when the comparison fails, `not_reproduced` or `refuted`.
        supported: False where the artifact does not try; `reason` says why.
    """

    id: str
    statement: str
    where: str
    decide: Mapping[str, Any]
    expected_verdict: str = "reproduced"
    presets: tuple[str, ...] = ("smoke", "laptop", "paper")
    comparison: str = "exists"
    expected: float = math.nan
    tolerance: float = 0.0
    tolerance_reason: str = ""
    otherwise: str = "not_reproduced"
    supported: bool = True
    reason: str = ""

    def __post_init__(self) -> None:
        kinds = [key for key in ("statement", "table", "files", "bench") if key in self.decide]
        if self.supported and len(kinds) != 1:
            raise ClaimsError(f"{self.id}: decide needs exactly one of statement, table, files, bench; it has {kinds}.")
        if self.comparison not in COMPARISONS:
            raise ClaimsError(f"{self.id}: comparison {self.comparison!r} is not one of {', '.join(COMPARISONS)}.")
        for verdict in (self.expected_verdict, self.otherwise):
            if verdict not in VERDICTS:
                raise ClaimsError(f"{self.id}: {verdict!r} is not one of {', '.join(VERDICTS)}.")
        if not self.supported and not self.reason:
            raise ClaimsError(f"{self.id}: supported is false and no reason is given.")
        if self.comparison == "within" and not self.tolerance_reason:
            raise ClaimsError(f"{self.id}: a tolerance needs its reason.")

    def needs(self) -> list[str]:
        """Return the files below results/<preset> that decide this claim; the benchmark's claims need none of a run."""
        if not self.supported or "bench" in self.decide:
            return []
        if "statement" in self.decide:
            return ["tables/statements.csv"]
        if "table" in self.decide:
            return [f"tables/{self.decide['table']}.csv"]
        return list(self.decide["files"])


@dataclass(frozen=True)
class Decision:
    """One line of `claims.csv`. Columns as in the contract; `evidence` names the file and row that decided."""

    id: str
    statement: str
    expected: str
    measured: str
    tolerance: str
    expected_verdict: str
    verdict: str
    n_seeds: int
    evidence: str


@dataclass
class Measurement:
    """What a run says about a claim."""

    value: Any
    n_seeds: int
    evidence: str
    rows: list[dict[str, Any]] = field(default_factory=list)


def read_claims(path: Path) -> list[Claim]:
    """Return the claims of `paper/claims.yaml`, in its order.

    Raises:
        ClaimsError: On an unknown key, a bad value or an id that stands twice.
    """
    import yaml

    entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    claims = []
    for entry in entries:
        if "id" not in entry:
            raise ClaimsError(f"{path}: an entry has no id: {entry}")
        unknown = set(entry) - set(Claim.__dataclass_fields__)
        if unknown:
            raise ClaimsError(f"{entry['id']}: unknown key {', '.join(sorted(unknown))}.")
        converted = {"presets": tuple, "expected": float, "tolerance": float}
        entry = {key: converted[key](value) if key in converted else value for key, value in entry.items()}
        claims.append(Claim(**entry))
    twice = {claim.id for claim in claims if sum(other.id == claim.id for other in claims) > 1}
    if twice:
        raise ClaimsError(f"{path}: {', '.join(sorted(twice))} stands twice.")
    return claims


def decide(claim: Claim, results: Path, preset: str, tolerance_factor: float = 1.0) -> Decision:
    """Return the verdict of the run in `results` on one claim; `not_run` where this run cannot decide it.

    Args:
        claim: The claim.
        results: results/<preset>.
        preset: Its name.
        tolerance_factor: Scales the tolerance, to see how close a verdict is.
    """
    expected = _expected_text(claim)
    if not claim.supported:
        return _decision(claim, expected, "", "not_run", 0, f"not supported: {claim.reason}")
    if preset not in claim.presets:
        return _decision(claim, expected, "", "not_run", 0, f"decided by preset {' or '.join(claim.presets)}")
    missing = [name for name in claim.needs() if not (results / name).is_file()]
    if missing:
        return _decision(claim, expected, "", "not_run", 0, f"missing {', '.join(missing)}")
    if "statement" in claim.decide:
        return _decide_statement(claim, results)
    if "files" in claim.decide:
        return _decision(claim, "drawn", "drawn", "reproduced", 0, ", ".join(claim.needs()))
    measured = _measure(claim, results)
    if measured is None or not math.isfinite(measured.value):
        where = claim.needs()[0] if claim.needs() else BENCHMARK.as_posix()
        return _decision(claim, expected, "", "not_run", 0, f"{where} has no such row in this run")
    holds = _holds(claim, measured.value, tolerance_factor)
    verdict = "reproduced" if holds else claim.otherwise
    return _decision(claim, expected, f"{measured.value:.6g}", verdict, measured.n_seeds, measured.evidence)


def _holds(claim: Claim, value: float, factor: float) -> bool:
    slack = claim.tolerance * factor
    if claim.comparison == "at_least":
        return value >= claim.expected - slack
    if claim.comparison == "at_most":
        return value <= claim.expected + slack
    return abs(value - claim.expected) <= slack


def _expected_text(claim: Claim) -> str:
    signs = {"within": "", "at_least": "≥ ", "at_most": "≤ ", "exists": ""}
    return "" if math.isnan(claim.expected) else f"{signs[claim.comparison]}{claim.expected:g}"


def _decision(claim: Claim, expected: str, measured: str, verdict: str, n_seeds: int, evidence: str) -> Decision:
    tolerance = f"{claim.tolerance:g}" if claim.tolerance else ""
    return Decision(
        claim.id, claim.statement, expected, measured, tolerance, claim.expected_verdict, verdict, n_seeds, evidence
    )


def _decide_statement(claim: Claim, results: Path) -> Decision:
    """A statement that fails as printed and holds once corrected is `reproduced_after_correction`."""
    rows = {row["id"]: row for row in read_rows(results / "tables/statements.csv")}
    row = rows.get(claim.decide["statement"])
    if row is None:
        return _decision(claim, "holds", "", "not_run", 0, f"tables/statements.csv has no {claim.decide['statement']}")
    printed, corrected = row["as_printed"], row["corrected"]
    if printed == "holds":
        verdict = "reproduced"
    elif printed == "not_applicable":
        verdict = "not_run"
    else:
        verdict = "reproduced_after_correction" if corrected == "holds" else "refuted"
    ratio = f", exact/bound {float(row['worst_ratio']):.4g}" if _number(row["worst_ratio"]) else ""
    error = row["max_rel_error_printed"]
    off = f", relative error {float(error):.2g}" if _number(error) and printed == "wrong" else ""
    evidence = f"tables/statements.csv, row {row['id']}"
    return _decision(claim, "holds", f"{printed}{ratio}{off}", verdict, 0, evidence)


def _number(text: Any) -> bool:
    try:
        return math.isfinite(float(text))
    except (TypeError, ValueError):
        return False


def _measure(claim: Claim, results: Path) -> Measurement | None:
    import pandas as pd

    rule = claim.decide
    if "bench" in rule:
        source, name = BENCHMARK.as_posix(), rule["bench"]
        frame = pd.DataFrame(json.loads(BENCHMARK.read_text(encoding="utf-8"))["ratios"] if BENCHMARK.is_file() else [])
    else:
        source, name = f"tables/{rule['table']}.csv", rule["value"]
        frame = pd.read_csv(results / source)
    chosen = frame.query(rule["filter"]) if "filter" in rule and len(frame) else frame
    if chosen.empty:
        return None
    column = pd.to_numeric(chosen[name], errors="coerce").dropna()
    if column.empty:
        return None
    value = float(getattr(column, rule.get("reduce", "mean"))())
    n_seeds = int(chosen["seed"].nunique()) if "seed" in chosen else int(chosen.get("n_seeds", pd.Series(0)).max())
    filter_text = f", {rule['filter']}" if "filter" in rule else ""
    evidence = f"{source}: {rule.get('reduce', 'mean')} of {name}{filter_text}"
    return Measurement(value, n_seeds, evidence)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return a CSV's rows as text."""
    import csv

    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def outcome(decision: Mapping[str, Any] | Decision) -> Literal["PASS", "FAIL", "NOT RUN"]:
    """PASS if the verdict is the expected one, NOT RUN if this run could not decide, FAIL otherwise."""
    get = decision.get if isinstance(decision, Mapping) else lambda key: getattr(decision, key)
    if get("verdict") == get("expected_verdict"):
        return "PASS"
    return "NOT RUN" if get("verdict") == "not_run" else "FAIL"


def passes_at(claims: Sequence[Claim], results: Path, preset: str, factor: float) -> int:
    """Return how many claims pass when every tolerance is scaled by `factor`."""
    return sum(outcome(decide(claim, results, preset, factor)) == "PASS" for claim in claims)


def verify_run(results: Path, expected: Path, claims_path: Path = Path("paper/claims.yaml")) -> dict[str, Any]:
    """Decide whether a finished run reproduces what is expected of it.

    Args:
        results: results/<preset>.
        expected: expected/<preset>, the committed reference; absent, only the claims are checked.

    Returns:
        `passed`, one entry a claim, the counts, the pass count at half and double tolerance, the comparison with the
        reference and, where it fails, what differs: data, environment, device, seed or configuration.

    Raises:
        FileNotFoundError: If the run has no claims.csv.
    """
    from curvature_gap.reference import compare_with_reference

    path = results / "claims.csv"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; run `snakemake --cores all` first.")
    lines = read_rows(path)
    outcomes = {line["id"]: outcome(line) for line in lines}
    counts = {kind: sum(o == kind for o in outcomes.values()) for kind in ("PASS", "FAIL", "NOT RUN")}
    claims = read_claims(claims_path)
    comparison = compare_with_reference(results, expected)
    return {
        "passed": counts["FAIL"] == 0 and comparison["agrees"],
        "claims": [
            [outcomes[line["id"]], line["id"], line["expected"], line["measured"], line["tolerance"], line["verdict"]]
            for line in lines
        ],
        "counts": counts,
        "passes at half tolerance": passes_at(claims, results, results.name, 0.5),
        "passes at double tolerance": passes_at(claims, results, results.name, 2.0),
        "reference": comparison,
    }


def as_json(report: Mapping[str, Any]) -> str:
    return json.dumps(report, indent=1, default=str) + "\n"
