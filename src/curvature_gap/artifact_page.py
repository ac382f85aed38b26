"""ARTIFACT.md, the artifact appendix: generated from paper/claims.yaml and from measured times.

`python -m curvature_gap.artifact_page` (or `make artifact-page`) writes the page at the root from the references in
expected/; the workflow writes one with its own run's times into results/<preset>/report.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from curvature_gap import bound_errata
from curvature_gap.abstract import Sentence, read_abstract, verdict_words
from curvature_gap.claims import VERDICTS, Claim, outcome, read_claims
from curvature_gap.files import atomic_path
from curvature_gap.reproduction import measured_text, number, read_rows

PRESETS = ("smoke", "laptop", "paper")
NOT_MEASURED = "not measured"

# What a file takes to make from nothing: names of rules, as timings.csv has them; `*` stands for any ending.
DATA = ("dataset_mnist", "subset")
MODELS = (*DATA, "train_mnist")
HESSIANS = (*MODELS, "exact_hessian")
DYNAMICS = (*HESSIANS, "dynamics_mnist*")
INCREMENTS = (*MODELS, "dataset_cifar100", "train_cifar100", "loss_increments")
MAKERS: dict[str, tuple[str, ...]] = {
    "tables/statements": ("identities", "bound_search"),
    "tables/tab01": (),
    "tables/tab02": ("norm_inequalities",),
    "tables/precision": ("precision",),
    "tables/accuracies": (*MODELS, "dataset_cifar100", "train_cifar100"),
    "tables/seed_claim": (*DYNAMICS, "seed_claims"),
    "tables/block_norms": DYNAMICS,
    "tables/dynamics": DYNAMICS,
    "tables/bounds": (*HESSIANS, "bounds"),
    "tables/bound_baselines": (*HESSIANS, "bounds"),
    "tables/bound_validation": ("bound_validation",),
    "tables/published": HESSIANS,
    "tables/increment": INCREMENTS,
    "tables/assumption_a1": INCREMENTS,
    "tables/sample_size": INCREMENTS,
    "tables/t7": INCREMENTS,
    "tables/spectrum": (*HESSIANS, "spectra"),
    "tables/sensitivity": (*DATA, "sensitivity"),
    "tables/curvature": (*DATA, "curvature_vs_data"),
    "figures/fig01": (),
    "figures/fig02": (),
    "figures/fig03": HESSIANS,
    "figures/fig04": HESSIANS,
    "figures/fig05": DYNAMICS,
    "figures/fig06": INCREMENTS,
    "figures/fig07": DYNAMICS,
    "figures/fig08": DYNAMICS,
    "figures/fig09": DYNAMICS,
    "figures/fig10": DYNAMICS,
    "figures/fig11": DYNAMICS,
    "figures/fig12": INCREMENTS,
    "figures/figx_seed_claims": (*DYNAMICS, "seed_claims"),
    "figures/figx_spectrum": (*HESSIANS, "spectra"),
    "figures/figx_sensitivity": (*DATA, "sensitivity"),
    "figures/figx_sample_size": INCREMENTS,
    "figures/figx_curvature_vs_data": (*DATA, "curvature_vs_data"),
    "figures/figx_published": HESSIANS,
    "figures/figx_bounds": (*HESSIANS, "bounds"),
    "figures/figx_benchmark": (),
}


STEPS: dict[str, tuple[int, str]] = {
    "run": (1, "type the command, read the line that it prints; computing is counted apart"),
    "place": (1, "find the claim where it stands in the paper"),
    "formula": (2, "read a displayed formula and what its letters mean"),
    "erratum": (3, "read its line in `report/errata.csv`: printed, corrected, reason"),
    "witness": (2, "`curvature-gap witness ID`: both sides of the bound, recomputed"),
    "row": (1, "find the row of the table that the line names, compare it with what is claimed"),
    "sense": (2, "see in which sense it is decided: which measure, which blocks, which tolerance and why"),
    "figure": (2, "lay the figure beside the paper's: axes, order of curves, blocks that stand out"),
    "proof": (10, "read the proof of the bound in the report"),
}
"""What checking a claim by hand takes, and the minutes with the paper open: estimates, not timed on people."""


def steps(claim: Claim) -> tuple[str, ...]:
    """Return what a reader does to check a claim, by names of `STEPS`; it follows from what decides the claim."""
    if "statement" in claim.decide:
        corrected = ("erratum",) if claim.expected_verdict == "reproduced_after_correction" else ()
        has_witness = ("witness",) if corrected and claim.decide["statement"] in bound_errata.ERRATA else ()
        return ("run", "place", "formula", "row", *corrected, *has_witness)
    if "files" in claim.decide:
        return ("run", "place", "figure")
    ours = claim.id.startswith("OURS")
    proven = ("proof",) if ours and "_bound" in claim.id and "valid" not in claim.id else ()
    a_plain_number = claim.comparison == "within" and claim.tolerance == 0
    return ("run", *(() if ours else ("place",)), "row", *(() if a_plain_number else ("sense",)), *proven)


def human_minutes(claim: Claim) -> int:
    """Return the minutes of a claim's steps."""
    return sum(STEPS[step][0] for step in steps(claim))


def step_lines(claims: Sequence[Claim]) -> list[dict[str, str]]:
    """Return each way of checking that occurs: its steps, its minutes, how many claims go that way and an example."""
    ways: dict[tuple[str, ...], list[Claim]] = {}
    for claim in claims:
        ways.setdefault(steps(claim), []).append(claim)
    return [
        {"steps": ", ".join(way), "minutes": str(human_minutes(of[0])), "claims": str(len(of)), "example": of[0].id}
        for way, of in sorted(ways.items(), key=lambda item: -len(item[1]))
    ]


def abstract_lines(sentences: Sequence[Sentence], claims: Sequence[Claim]) -> list[dict[str, str]]:
    """Return one line a sentence of the abstract, with the expected verdicts of its claims."""
    by_id = {claim.id: claim for claim in claims}
    return [
        {
            "number": str(sentence.number),
            "says": cell(sentence.says),
            "found": cell(sentence.finding.strip()),
            "verdicts": verdict_words([{"verdict": by_id[id].expected_verdict} for id in sentence.claims]),
            "look": sentence.look,
        }
        for sentence in sentences
    ]


def makers(file: str) -> tuple[str, ...]:
    """Return the rules whose jobs a result file needs, from nothing.

    Raises:
        KeyError: If `MAKERS` does not know the file.
    """
    known = [prefix for prefix in MAKERS if file.startswith(prefix)]
    if not known:
        raise KeyError(f"{file}: name the rules that it needs in artifact_page.MAKERS.")
    return MAKERS[max(known, key=len)]


def compute_minutes(files: Iterable[str], seconds: Mapping[str, float]) -> str:
    """Return the minutes that all jobs behind some result files took one after the other, or `NOT_MEASURED`.

    Args:
        files: Result files, relative to results/<preset>.
        seconds: Summed seconds by rule.
    """
    needed = {rule for file in files for rule in makers(file)}
    if not needed:
        return "< 1"
    found = [name for name in seconds if any(matches(name, rule) for rule in needed)]
    if not found:
        return NOT_MEASURED
    return minutes_text(sum(seconds[name] for name in found))


def compute_cell(claim: Claim, seconds: Mapping[str, float]) -> str:
    """Return the compute minutes of a claim; what the benchmark decides is measured apart from any run."""
    if "bench" in claim.decide:
        return "`make bench`"
    return compute_minutes(claim.needs(), seconds) if claim.supported else "–"


def matches(name: str, rule: str) -> bool:
    """Compare a rule's name with one that may end in `*`."""
    return name.startswith(rule[:-1]) if rule.endswith("*") else name == rule


def minutes_text(seconds: float) -> str:
    """Return minutes to two digits; below one, `< 1`."""
    minutes = seconds / 60
    if minutes < 1:
        return "< 1"
    return f"{minutes:.1f}" if minutes < 10 else f"{minutes:.0f}"


def seconds_by_rule(rows: Iterable[Mapping[str, str]]) -> dict[str, float]:
    """Return summed seconds by rule of the rows of a timings.csv."""
    totals: dict[str, float] = {}
    for row in rows:
        totals[row["rule"]] = totals.get(row["rule"], 0.0) + number(row["seconds"])
    return totals


def measured_run(folder: Path, preset: str) -> dict[str, Any]:
    """Return what one run, or the reference committed for it, measured: times, machines, verdicts, claims.

    `folder` is results/<preset> or expected/<preset>; tables may lie in it or in its `tables`. Whatever is missing is
    `NOT_MEASURED`.
    """
    rows = read_rows(folder / "tables/timings.csv") or read_rows(folder / "timings.csv")
    seconds = seconds_by_rule(rows)
    claims = {row["id"]: row for row in read_rows(folder / "claims.csv")}
    return {
        "preset": preset,
        "seconds": seconds,
        "jobs": str(len(rows)) if rows else NOT_MEASURED,
        "minutes": minutes_text(sum(seconds.values())) if seconds else NOT_MEASURED,
        "peak_gib": f"{max(number(r['peak_mib']) for r in rows) / 1024:.1f}" if rows else NOT_MEASURED,
        "machine": "; ".join(sorted({row["machine"] for row in rows})) or NOT_MEASURED,
        "device": ", ".join(sorted({row["device"] for row in rows})) or NOT_MEASURED,
        "claims": claims,
        "verdicts": {v: sum(row["verdict"] == v for row in claims.values()) for v in VERDICTS} if claims else {},
        "outcomes": [sum(outcome(row) == o for row in claims.values()) for o in ("PASS", "FAIL", "NOT RUN")],
    }


def claim_lines(claims: Sequence[Claim], run: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return one line a claim for the step-by-step table; times and measured values are those of `run`."""
    lines = []
    for claim in claims:
        measured = run["claims"].get(claim.id, {}).get("measured", "")
        lines.append(
            {
                "id": claim.id,
                "statement": cell(claim.statement),
                "where": cell(claim.where),
                "expected": claim.expected_verdict.replace("_", " "),
                "presets": ", ".join(claim.presets),
                "human": str(human_minutes(claim)),
                "compute": compute_cell(claim, run["seconds"]),
                "measured": cell(measured_text(measured)) if measured else NOT_MEASURED,
                "files": ", ".join(f"`{file}`" for file in claim.needs()),
                "reason": claim.reason,
            }
        )
    return lines


def cell(text: str) -> str:
    """Return text that may stand in a Markdown table: a bar would end the cell."""
    return text.replace("|", "\\|").replace("*", "\\*")


def section_of(claim: Claim) -> str:
    """Return the part of the step-by-step table a claim belongs to."""
    if "statement" in claim.decide:
        return "Statements of the theory"
    return "Figures" if "files" in claim.decide else "Tables and what the text says of the figures"


def render(claims: Sequence[Claim], runs: Mapping[str, Mapping[str, Any]], chosen: str, template: Path) -> str:
    """Return the page.

    Args:
        claims: All claims.
        runs: preset → `measured_run`, for the table of presets.
        chosen: The preset whose times and values stand beside each claim.
        template: paper/ARTIFACT.md.jinja; paper/abstract.yaml lies beside it.
    """
    import jinja2

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    sentences = read_abstract(template.with_name("abstract.yaml"), [claim.id for claim in claims])
    sections: dict[str, list[dict[str, str]]] = {}
    supported = [claim for claim in claims if claim.supported]
    for claim, line in zip(supported, claim_lines(supported, runs[chosen]), strict=True):
        sections.setdefault(section_of(claim), []).append(line)
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        runs=[runs[preset] for preset in runs],
        chosen=runs[chosen],
        sections=sections,
        unsupported=claim_lines([claim for claim in claims if not claim.supported], runs[chosen]),
        n_claims=len(claims),
        n_supported=len(supported),
        abstract=abstract_lines(sentences, claims),
        steps=STEPS,
        ways=step_lines(supported),
        human_hours=f"{sum(map(human_minutes, supported)) / 60:.0f}",
        by_verdict={v: sum(claim.expected_verdict == v for claim in supported) for v in VERDICTS},
    )


def structure(page: str) -> str:
    """Return the page without what is measured, to compare pages made from different runs."""
    lines = []
    for line in page.splitlines():
        if re.match(rf"\| ({'|'.join(PRESETS)}) \|", line):
            # Preset, purpose, budget; the rest of the line is measured.
            line = "|".join(line.split("|")[:4])
        elif line.startswith("| `"):
            # A claim's line ends with compute minutes and the measured value.
            line = re.sub(r"(?<!\\)\|(?:[^|]|\\\|)*(?<!\\)\|(?:[^|]|\\\|)*\|$", "", line)
        lines.append(line)
    return "\n".join(lines)


def committed_page(root: Path) -> str:
    """Return the page that belongs at the root: times and values from expected/, laptop's beside each claim."""
    runs = {preset: measured_run(root / "expected" / preset, preset) for preset in PRESETS}
    claims = read_claims(root / "paper/claims.yaml")
    return render(claims, runs, "laptop", root / "paper/ARTIFACT.md.jinja")


def main() -> None:
    """Write ARTIFACT.md into the working directory, the clone."""
    page = committed_page(Path())
    with atomic_path("ARTIFACT.md") as temporary:
        temporary.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
