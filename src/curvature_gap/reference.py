"""A run against the committed reference: exact on the same machine type, within stated tolerances elsewhere."""

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ELSEWHERE = 1e-9
"""Relative tolerance for theory and initialisation on another machine or device: float64, other summation order."""
SPREAD = 3.0
"""Trained quantities elsewhere: within this many standard deviations of the committed seeds' mean."""
# Columns that name a row rather than measure something.
IDENTITIES = ("run", "seed", "ordering")
# Training amplifies the last bit, so these tables hold trained quantities throughout.
TRAINED_TABLES = (
    "increments",
    "increment_fits",
    "curvature_vs_data",
    "curvature_vs_data_fits",
    "sample_size",
    "a1_gradients",
)


def compare_with_reference(results: Path, expected: Path) -> dict[str, Any]:
    """Compare every table of a run with the committed one.

    Returns:
        `agrees`; `class`: `exact` (same machine type, versions and device), `elsewhere` or `no reference`; `tables`
        with one word each; `differs_in`: which of data, environment, device, machine, configuration (and seeds) are
        not those of the reference.
    """
    reference_path = expected / "provenance.json"
    if not reference_path.is_file():
        return {"agrees": True, "class": "no reference", "tables": {}, "differs_in": []}
    reference = json.loads(reference_path.read_text(encoding="utf-8"))
    record = json.loads((results / "provenance.json").read_text(encoding="utf-8"))
    differs = differences(record, reference)
    exact = not differs
    tables = {}
    for name, digest in reference["tables"].items():
        ours = record["tables"].get(name)
        if ours == digest:
            tables[name] = "identical"
        elif ours is None:
            tables[name] = "missing"
        elif exact:
            tables[name] = "differs, though machine type, versions, data and configuration are the reference's"
        elif "configuration" in differs or "data" in differs:
            tables[name] = (
                f"not comparable: {' and '.join(d for d in differs if d in ('configuration', 'data'))} differ"
            )
        else:
            faults = table_faults(results / "tables" / name, expected / "tables" / name)
            tables[name] = f"outside tolerance: {faults[0]} ({len(faults)} in all)" if faults else "within tolerance"
    agrees = all(word in ("identical", "within tolerance") for word in tables.values())
    return {"agrees": agrees, "class": "exact" if exact else "elsewhere", "tables": tables, "differs_in": differs}


def differences(record: Mapping[str, Any], reference: Mapping[str, Any]) -> list[str]:
    """Name what is not as in the reference."""
    found = []
    hashes = [{k: d["sha256"] for k, d in r["datasets"].items()} for r in (record, reference)]
    if hashes[0] != hashes[1]:
        found.append("data")
    if record["versions"] != reference["versions"]:
        found.append("environment")
    if record["device"] != reference["device"]:
        found.append("device")
    if record["hardware"]["machine"].split(",")[0] != reference["hardware"]["machine"].split(",")[0]:
        found.append("machine")
    if record["config_sha256"] != reference["config_sha256"]:
        found.append("configuration")
    return found


def table_faults(ours: Path, theirs: Path) -> list[str]:
    """Return what lies outside the tolerances of another machine, one sentence a cell."""
    import pandas as pd

    if not theirs.is_file():
        return []
    mine, reference = pd.read_csv(ours), pd.read_csv(theirs)
    if list(mine.columns) != list(reference.columns) or len(mine) != len(reference):
        return [f"{mine.shape[0]} rows and columns {list(mine.columns)}, expected {reference.shape[0]} rows"]
    numbers = [c for c in reference.select_dtypes("number").columns if c not in (*IDENTITIES, "k")]
    keys = [c for c in reference.columns if c not in numbers]
    faults = []
    trained = _trained_rows(reference, ours.stem)
    groups = reference.groupby([c for c in keys if c not in IDENTITIES], dropna=False) if trained.any() else None
    for column in numbers:
        scale = reference[column].abs().max() or 1.0
        gap = (mine[column] - reference[column]).abs()
        if groups is None:
            allowed = pd.Series(ELSEWHERE * scale, index=gap.index)
        else:
            centre, spread = groups[column].transform("mean"), groups[column].transform("std").fillna(0)
            allowed = (SPREAD * spread).where(trained, ELSEWHERE * scale)
            gap = gap.where(~trained, (mine[column] - centre).abs())
        wrong = (gap > allowed + ELSEWHERE * scale) | (mine[column].isna() != reference[column].isna())
        for row in wrong[wrong].index:
            name = ", ".join(str(reference.loc[row, key]) for key in keys)
            faults.append(f"{column} of {name}: {mine.loc[row, column]:.6g}, expected {reference.loc[row, column]:.6g}")
    return faults


def _trained_rows(reference: Any, table: str) -> Any:
    """Mark the rows that depend on training."""
    import pandas as pd

    if table in TRAINED_TABLES:
        return pd.Series(True, index=reference.index)
    if "stage" in reference:
        return reference["stage"] != "init"
    if "step" in reference:
        return reference["step"] > 0
    return pd.Series(False, index=reference.index)


def store_reference(results: Path, expected: Path, largest: int = 400_000) -> list[Path]:
    """Copy a finished run's record, claims and tables to expected/<preset>; larger tables stand there as hashes only.

    Args:
        results: results/<preset>.
        expected: expected/<preset>, replaced.
        largest: Bytes of the largest table that is copied.

    Raises:
        FileNotFoundError: If the run is not finished.
    """
    if not (results / "provenance.json").is_file():
        raise FileNotFoundError(f"{results}/provenance.json does not exist; finish the run first.")
    shutil.rmtree(expected, ignore_errors=True)
    (expected / "tables").mkdir(parents=True)
    tables = [path for path in sorted((results / "tables").glob("*.csv")) if path.stat().st_size <= largest]
    stored = []
    for source in [results / "provenance.json", results / "claims.csv", *tables]:
        stored.append(expected / source.relative_to(results))
        shutil.copyfile(source, stored[-1])
    return stored


if __name__ == "__main__":
    preset = sys.argv[1]
    for path in store_reference(Path("results") / preset, Path("expected") / preset):
        print(path)
