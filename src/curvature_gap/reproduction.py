"""What the reproduction report says, gathered from a finished run's files; `paper/reproduction.typ` sets it in type.

Every number of the report passes through here from a generated file. Counts and extremes are taken here, prose stands
in the template.
"""

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from curvature_gap import bound_errata, errata
from curvature_gap.claims import VERDICTS, Claim, outcome, passes_at, read_claims
from curvature_gap.files import atomic_path
from curvature_gap.provenance import sha256
from curvature_gap.reference import compare_with_reference

SHORT = 12
"""Digits of a SHA-256 that the report shows."""
LONGEST = 48
"""Rows of the longest table that is printed in full; longer ones are named with their size and hash."""
HEAVY = 100_000
"""Bytes of the largest figure that goes into the report as a PDF."""
COLUMN, DPI, QUALITY = 3.3, 200, 60
"""Width of the report's figures in inches; resolution and JPEG quality of those that are too heavy for a PDF."""
WIDEST = 11
"""Columns of the widest table that is printed."""
EPOCH = 1760832000
"""Date written into the PDF: the paper's. A wall clock would make equal reports unequal files."""

TITLES = {
    "tab01_architectures": "Table 1 of the paper: architectures, with parameters counted from the models",
    "tab02_norm_inequalities": "Table 2 of the paper: each constant of the norm table with the ratio it attains",
    "accuracies": "Accuracy and loss of the trained models",
    "bounds": "Exact norms and bounds",
    "bound_validation": "Whether a tight bound was ever below the exact norm: random instances and ascents",
    "bound_baselines": "What other bounds and Lanczos give beside the tight ones",
    "precision": "Closed forms against automatic differentiation: relative errors",
    "precision_timing": "Closed forms against automatic differentiation: times",
    "increment_fits": "Slopes of the loss increments",
    "assumption_a1_fits": "Slopes of the gradient norms (assumption A1)",
    "sample_size": "Samples that a tolerance on the loss increment needs",
    "t7": "Theorem 7 on the trained models",
    "seed_claims": "Claims about blocks, seed by seed",
    "seed_claim_shares": "In how many seeds the claims about blocks hold",
    "spectrum_summary": "Spectra of the exact Hessians",
    "curvature_vs_data": "Curvature of models trained on nested subsets",
    "curvature_exponents": "Exponents of curvature against the amount of data",
    "published_comparison": "Block means beside those read off the published figure",
}


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return a CSV's rows as text; no file, no rows."""
    import csv

    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def number(text: Any) -> float:
    """Return the number a cell holds, NaN if it holds none."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return math.nan


def shown(cell: Any) -> str:
    """Return a cell as it is printed: whole numbers in full, others to four digits, powers of ten set as such."""
    if isinstance(cell, str) and cell in ("True", "False"):
        return "yes" if cell == "True" else "no"
    value = number(cell)
    if math.isnan(value):
        return "–" if cell in ("", None, "nan") or isinstance(cell, float) else str(cell)
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    # Whole numbers are counts and sizes as long as they look like ones.
    if value.is_integer() and abs(value) < 1e7:
        return f"{value:.0f}".replace("-", "−")
    return powers(f"{value:.4g}").replace("-", "−")


def powers(text: str) -> str:
    """Return text with numbers such as 1.2e-05 written as 1.2×10⁻⁵."""

    def power(match: re.Match[str]) -> str:
        return f"{match[1]}×10{str(int(match[2])).translate(RAISED)}"

    return re.sub(r"(?<![\w.])(-?\d+(?:\.\d+)?)e([+-]\d+)\b", power, text)


RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def errata_rows(statements: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return every erratum with its evidence, in the order of `statements` (rows of statements.csv).

    `kind` is `identity` or `bound` where the statement fails as printed, `misprint` where the reading that is plainly
    meant holds. An erratum without a row in this run keeps its words and has no evidence.
    """
    rows = {row["id"]: row for row in statements}
    order = {id: place for place, id in enumerate(rows)}
    sources = [
        ("identity", errata.ERRATA),
        ("bound", bound_errata.ERRATA),
        ("misprint", errata.MISPRINTS),
        ("misprint", bound_errata.MISPRINTS),
    ]
    found = []
    for kind, words in sources:
        for id in sorted(words, key=lambda id: order.get(id, len(order))):
            row = rows.get(id, {})
            evidence = {
                key: row.get(key, "") for key in ("as_printed", "worst_ratio", "max_rel_error_printed", "witness")
            }
            found.append({"id": id, "kind": kind, **asdict(words[id]), **evidence})
    return found


def statement_facts(rows: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return counts and extremes of statements.csv: identities, bounds and other claims apart."""

    def chosen(kind: str, *verdicts: str) -> list[Mapping[str, str]]:
        return [row for row in rows if row["kind"] == kind and (not verdicts or row["as_printed"] in verdicts)]

    def largest(chosen: Iterable[Mapping[str, str]], column: str) -> dict[str, str]:
        known = [row for row in chosen if not math.isnan(number(row[column]))]
        if not known:
            return {"id": "", "value": "–"}
        top = max(known, key=lambda row: number(row[column]))
        return {"id": top["id"], "value": shown(top[column])}

    facts: dict[str, Any] = {"n": len(rows)}
    for kind in ("identity", "bound", "claim"):
        facts[kind] = {
            "n": len(chosen(kind)),
            "verdicts": dict(Counter(row["as_printed"] for row in chosen(kind))),
            "corrected": sum(row["corrected"] == "holds" for row in chosen(kind)),
            "cases": sum(int(number(row["n_cases"])) for row in chosen(kind) if not math.isnan(number(row["n_cases"]))),
        }
    facts["error_holding"] = largest(chosen("identity", "holds"), "max_rel_error_printed")
    facts["error_corrected"] = largest(chosen("identity"), "max_rel_error_corrected")
    facts["worst_violation"] = largest(chosen("bound", "violated"), "worst_ratio")
    facts["closest_bound"] = largest(chosen("bound", "holds"), "worst_ratio")
    return facts


def claim_rows(results: Path, claims: Sequence[Claim]) -> list[dict[str, Any]]:
    """Return claims.csv with what claims.yaml adds: place in the paper, kind, outcome, tolerance's reason."""
    words = {claim.id: claim for claim in claims}
    rows = []
    for line in read_rows(results / "claims.csv"):
        claim = words.get(line["id"])
        added = {
            "where": claim.where if claim else "",
            "outcome": outcome(line),
            "kind": kind_of(claim) if claim else "",
            "tolerance_reason": claim.tolerance_reason if claim else "",
        }
        cells = {key: powers(line[key]) for key in ("statement", "expected", "tolerance")}
        rows.append(line | added | cells | {"measured": measured_text(line["measured"])})
    return rows


def measured_text(text: str) -> str:
    """Return a measured value as it is printed; words stay as they are."""
    return shown(text) if not math.isnan(number(text)) else powers(text.replace("_", " "))


def kind_of(claim: Claim) -> str:
    """Return statement, measurement or figure, by what decides the claim; other where nothing does."""
    kinds = {"statement": "statement", "table": "measurement", "bench": "measurement", "files": "figure"}
    return kinds.get(next(iter(claim.decide), ""), "other")


def verdict_facts(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how many claims have each verdict and outcome, in all and by what decides them."""
    verdicts = Counter(row["verdict"] for row in rows)
    kinds = sorted({row["kind"] for row in rows})
    by_kind = {kind: Counter(row["verdict"] for row in rows if row["kind"] == kind) for kind in kinds}
    return {
        "n": len(rows),
        "verdicts": {verdict: verdicts[verdict] for verdict in VERDICTS},
        "outcomes": {kind: sum(row["outcome"] == kind for row in rows) for kind in ("PASS", "FAIL", "NOT RUN")},
        "by_kind": {kind: {verdict: by_kind[kind][verdict] for verdict in VERDICTS} for kind in kinds},
    }


def figure_rows(results: Path, figures: Mapping[str, Mapping[str, Any]], datasets: Mapping[str, Any]) -> list[dict]:
    """Return each figure with its caption and the hashes of its code, its inputs and its datasets.

    Args:
        results: results/<preset>.
        figures: name → title, category, notebook, code (files), inputs (files), as the rule `figure` has them.
        datasets: As in provenance.json.
    """
    rows = []
    for name, entry in figures.items():
        image = results / "figures" / f"{name}.pdf"
        caption = image.with_suffix(".txt")
        # A prepared dataset's record is an input of the figure: its name says whose data they are.
        names = [Path(path).stem for path in entry["inputs"] if Path(path).parent.name == "data"]
        rows.append(
            {
                "name": name,
                "title": entry["title"],
                "category": entry["category"],
                "file": below(light(image)) if image.is_file() else "",
                "caption": caption.read_text(encoding="utf-8").strip() if caption.is_file() else entry["title"],
                "rule": f"figure, {entry['notebook']}",
                "code": hash_of([entry["notebook"], *entry["code"]]),
                "inputs": hash_of(entry["inputs"]),
                "data": [[n, str(datasets[n]["sha256"])[:SHORT]] for n in names if datasets.get(n, {}).get("sha256")],
            }
        )
    return rows


def light(image: Path) -> Path:
    """Return the image to print for a figure: its PDF, or a JPEG of its PNG if the PDF is heavy and the JPEG lighter.

    Heat maps of Hessian entries do not compress without loss; at `DPI` and `QUALITY` the loss does not show in print.
    """
    drawn = image.with_suffix(".png")
    if image.stat().st_size <= HEAVY or not drawn.is_file():
        return image
    from PIL import Image

    small = image.parent.parent / "report/figures" / f"{image.stem}.jpg"
    with Image.open(drawn) as picture, atomic_path(small) as temporary:
        colour = picture.convert("RGB")
        width = round(COLUMN * DPI)
        colour = colour.resize((width, round(colour.height * width / colour.width)), Image.Resampling.LANCZOS)
        colour.save(temporary, quality=QUALITY, subsampling="4:2:0", optimize=True, progressive=True)
    return small if small.stat().st_size < image.stat().st_size else image


def below(path: Path, root: Path = Path()) -> str:
    """Return `path` as typst names it: from the root folder, without following links."""
    return f"/{Path(os.path.relpath(path, root)).as_posix()}"


def hash_of(paths: Iterable[str]) -> str:
    """Return the first digits of the SHA-256 of the files' own SHA-256, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted({str(path) for path in paths}):
        if not Path(path).is_file():
            return "missing"
        digest.update(f"{sha256(Path(path))}\n".encode())
    return digest.hexdigest()[:SHORT]


def certificate_rows(results: Path) -> list[dict[str, Any]]:
    """Return the certificate of every stored Hessian, by run and stage: as printed, and `raw` as numbers."""
    import numpy as np

    fields = ("asymmetry", "hvp_error", "fd_error", "n_fd_columns", "relu_near_zero")
    rows = []
    for path in sorted((results / "hessians").glob("*/*.npz")):
        with np.load(path) as arrays:
            if "certificate_hvp_error" not in arrays:
                continue
            numbers = {name: arrays[f"certificate_{name}"].item() for name in fields}
            numbers |= {name: arrays[name].item() for name in ("loss", "grad_norm")}
            numbers["parameters"] = int(arrays["offsets"][-1])
            about = {"run": path.parent.name, "stage": path.stem, "engine": str(arrays["engine"])}
        printed = {name: shown(value) for name, value in numbers.items()}
        rows.append({**about, **printed, "raw": [numbers[name] for name in WORST_OF]})
    return rows


WORST_OF = ("asymmetry", "hvp_error", "fd_error")


def certificate_facts(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the number of certified Hessians, their sizes and the worst of each check."""
    return {
        "n": len(rows),
        "parameters": sorted({row["parameters"] for row in rows}, key=int),
        "engines": sorted({row["engine"].replace("_", " ") for row in rows}),
    } | {name: shown(max((row["raw"][i] for row in rows), default="")) for i, name in enumerate(WORST_OF)}


def block_rows(results: Path, run_prefix: str = "mnist_seed") -> list[dict[str, str]]:
    """Return mean and standard deviation over seeds of the diagonal blocks' norms, at initialisation and trained."""
    rows = [
        row
        for row in read_rows(results / "tables/block_norms.csv")
        if row["row"] == row["column"] and row["run"].startswith(run_prefix)
    ]
    blocks = list(dict.fromkeys(row["row"] for row in rows))
    table = []
    for block in blocks:
        entry = {"block": block_text(block)}
        for stage in ("init", "trained"):
            for measure in ("spectral", "mean_abs"):
                values = [number(r[measure]) for r in rows if r["row"] == block and r["stage"] == stage]
                entry[f"{stage}_{measure}"] = spread(values)
        table.append(entry)
    return table


def block_text(name: str) -> str:
    """Return a block's name as text: a Greek letter for scale and shift, words without underscores."""
    name = name.replace("_gamma", " γ").replace("_beta", " β")
    return name.replace("_bias", " bias")


def spread(values: Sequence[float]) -> str:
    """Return mean ± standard deviation (n − 1) of the values over seeds; one seed has no spread."""
    values = [value for value in values if not math.isnan(value)]
    if not values:
        return "–"
    mean = sum(values) / len(values)
    if len(values) == 1:
        return shown(float(f"{mean:.3g}"))
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return f"{shown(float(f'{mean:.3g}'))} ± {shown(float(f'{deviation:.2g}'))}"


def time_rows(results: Path) -> list[dict[str, Any]]:
    """Return jobs, seconds, CPU seconds and peak memory by rule, from timings.csv."""
    rules: dict[str, list[dict[str, str]]] = {}
    for row in read_rows(results / "tables/timings.csv"):
        rules.setdefault(row["rule"], []).append(row)
    return [
        {
            "rule": rule,
            "jobs": len(rows),
            "seconds": sum(number(row["seconds"]) for row in rows),
            "cpu_seconds": sum(number(row["cpu_seconds"]) for row in rows),
            "peak_mib": max(number(row["peak_mib"]) for row in rows),
            "device": " ".join(sorted({row["device"] for row in rows})),
            "machine": " / ".join(sorted({row["machine"] for row in rows})),
        }
        for rule, rows in sorted(rules.items())
    ]


def time_facts(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return totals over all jobs, as printed."""
    if not rows:
        return {"jobs": "0", "minutes": "–", "cpu_minutes": "–", "peak_gib": "–", "machines": []}
    return {
        "jobs": str(sum(row["jobs"] for row in rows)),
        "minutes": f"{sum(row['seconds'] for row in rows) / 60:.1f}",
        "cpu_minutes": f"{sum(row['cpu_seconds'] for row in rows) / 60:.1f}",
        "peak_gib": f"{max(row['peak_mib'] for row in rows) / 1024:.1f}",
        "machines": sorted({row["machine"] for row in rows}),
    }


def table_rows(results: Path, left_out: Iterable[str]) -> list[dict[str, Any]]:
    """Return every table of the run: in print if it fits, else with its size alone; with the hash of its file."""
    tables = []
    for path in sorted((results / "tables").glob("*.csv"), key=lambda path: (path.stem[:3] != "tab", path.stem)):
        rows = read_rows(path)
        columns = list(rows[0]) if rows else []
        fits = 0 < len(rows) <= LONGEST and path.stem not in left_out
        kept = columns if len(columns) <= WIDEST else narrowed(rows, columns)
        tables.append(
            {
                "name": path.stem,
                "title": TITLES.get(path.stem, path.stem.replace("_", " ").capitalize()),
                "n_rows": len(rows),
                "n_columns": len(columns),
                "sha256": sha256(path)[:SHORT],
                "columns": [column.replace("_", " ") for column in kept] if fits else [],
                "rows": [[shown(row[column]) for column in kept] for row in rows] if fits else [],
                "left_out": len(columns) - len(kept) if fits else 0,
            }
        )
    return tables


def narrowed(rows: Sequence[Mapping[str, str]], columns: Sequence[str]) -> list[str]:
    """Return the first columns that vary or are few; a column of one value tells least."""
    varying = [column for column in columns if len({row[column] for row in rows}) > 1]
    return (varying or list(columns))[:WIDEST]


def bound_rows(results: Path) -> list[dict[str, str]]:
    """Return, by setting and stage, exact norms of whole Hessians and bound / exact as ranges over seeds."""
    columns = ("printed_main", "printed_appendix", "corrected", "tight_apriori", "tight_data")
    groups: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in read_rows(results / "tables/bounds.csv"):
        if row["block"] == "total":
            groups.setdefault((re.sub(r"_seed\d+", "", row["run"]), row["stage"]), []).append(row)
    return [
        {"run": run.replace("_", " "), "stage": stage, "n": str(len(rows)), "exact": span(rows, "exact")}
        | {column: span(rows, f"ratio_{column}") for column in columns}
        for (run, stage), rows in groups.items()
    ]


def span(rows: Iterable[Mapping[str, str]], column: str) -> str:
    """Return the smallest and the largest value of a column to three digits."""
    values = sorted(value for row in rows if not math.isnan(value := number(row.get(column, ""))))
    if not values:
        return "–"
    low, high = (powers(f"{value:.3g}") for value in (values[0], values[-1]))
    return low if low == high else f"{low} to {high}"


def report_data(
    results: Path, figures: Mapping[str, Mapping[str, Any]], claims_path: Path, expected: Path, benchmarks: Path
) -> dict[str, Any]:
    """Return all that the report prints about the finished run in `results`; the working directory is the clone.

    Raises:
        FileNotFoundError: If the run has no claims.csv or provenance.json.
    """
    for name in ("claims.csv", "provenance.json"):
        if not (results / name).is_file():
            raise FileNotFoundError(f"{results / name} does not exist; the report needs a finished run.")
    claims = read_claims(claims_path)
    record = json.loads((results / "provenance.json").read_text(encoding="utf-8"))
    statements = read_rows(results / "tables/statements.csv")
    rows, certificates, times = claim_rows(results, claims), certificate_rows(results), time_rows(results)
    preset = record["preset"]
    printed_elsewhere = ("statements", "timings", "block_norms", "bounds")
    return {
        "preset": preset,
        "provenance": record,
        "verdicts": verdict_facts(rows)
        | {
            "half": passes_at(claims, results, preset, 0.5),
            "double": passes_at(claims, results, preset, 2.0),
        },
        "reference": compare_with_reference(results, expected),
        "claims": rows,
        "statements": [row | printed(row, SHOWN_OF_STATEMENTS) for row in statements],
        "facts": statement_facts(statements),
        "errata": [row | printed(row, SHOWN_OF_ERRATA) for row in errata_rows(statements)],
        "figures": figure_rows(results, figures, record["datasets"]),
        "certificates": certificates,
        "certificate_facts": certificate_facts(certificates),
        "blocks": block_rows(results),
        "bounds": bound_rows(results),
        "times": [row | {key: f"{row[key]:.1f}" for key in ("seconds", "cpu_seconds", "peak_mib")} for row in times],
        "time_facts": time_facts(times),
        "tables": table_rows(results, printed_elsewhere),
        "benchmarks": [{key: shown(value) for key, value in row.items()} for row in read_rows(benchmarks)],
    }


SHOWN_OF_STATEMENTS = ("max_rel_error_printed", "max_rel_error_corrected", "worst_ratio", "n_cases")
SHOWN_OF_ERRATA = ("worst_ratio", "max_rel_error_printed")


def printed(row: Mapping[str, str], numbers: Iterable[str]) -> dict[str, str]:
    """Return the cells of a row that are printed otherwise than they are stored: numbers, and numbers within words."""
    words = {key: powers(row[key]) for key in ("witness", "note") if key in row}
    return words | {key: shown(row[key]) for key in numbers}


def typeset(template: Path, data: Path, pdf: Path, root: Path) -> None:
    """Compile the report with the fonts that typst carries: offline, and byte for byte the same from the same data.

    Args:
        template: The main .typ file, below `root`.
        data: The JSON of `report_data`, below `root`.
        pdf: Where the PDF goes.
        root: Folder that all of the report's files lie in.

    Raises:
        typst.TypstError: If the template does not compile.
    """
    import typst

    typst.compile(
        str(template),
        output=str(pdf),
        root=str(root),
        ignore_system_fonts=True,
        sys_inputs={"data": below(data, root)},
        timestamp=EPOCH,
        # Tags for a hundred table rows are larger than the text.
        pdf_tags=False,
    )
