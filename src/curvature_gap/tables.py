"""Tidy tables: one CSV that reads back bit for bit, and the same as a booktabs LaTeX table for authors."""

from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from curvature_gap.files import atomic_path


def write_table(rows: Sequence[Any], path: str | Path, columns: Sequence[str] | None = None) -> None:
    """Write rows (mappings or dataclasses) to `path` (.csv) and beside it, with the same stem, as .tex.

    Floats are written with the digits that identify them (`repr`); the LaTeX table shows four.

    Raises:
        ValueError: If there are no rows and no columns, or a row lacks a column.
    """
    import pandas as pd

    records = [asdict(row) if is_dataclass(row) and not isinstance(row, type) else dict(row) for row in rows]
    if not records and columns is None:
        raise ValueError(f"{path}: no rows and no columns, nothing to write.")
    names = list(columns) if columns is not None else list(records[0])
    for record in records:
        missing = [name for name in names if name not in record]
        if missing:
            raise ValueError(f"{path}: a row lacks {', '.join(missing)}: {record}")
    frame = pd.DataFrame.from_records(records, columns=names)
    path = Path(path)
    with atomic_path(path) as temporary:
        frame.to_csv(temporary, index=False, lineterminator="\n")
    with atomic_path(path.with_suffix(".tex")) as temporary:
        temporary.write_text(latex(frame), encoding="utf-8")


def latex(frame: Any) -> str:
    """Return a booktabs tabular with every cell escaped."""
    text = frame.to_latex(index=False, escape=True, float_format="%.4g", na_rep="--")
    return str(text)
