from dataclasses import dataclass

import pandas as pd
import pytest

from curvature_gap.tables import write_table


@dataclass(frozen=True)
class Line:
    id: str
    value: float


def test_floats_read_back_bit_for_bit(tmp_path):
    rows = [Line("W_Q", 0.1 + 0.2), Line("50 % & more", 1 / 3)]
    write_table(rows, tmp_path / "t.csv")
    back = pd.read_csv(tmp_path / "t.csv")
    assert back["value"].tolist() == [0.1 + 0.2, 1 / 3]


def test_latex_is_booktabs_and_escaped(tmp_path):
    write_table([Line("50 % & W_Q", 1 / 3)], tmp_path / "t.csv")
    text = (tmp_path / "t.tex").read_text()
    assert r"\toprule" in text
    assert r"50 \% \& W\_Q" in text


def test_an_empty_table_needs_columns(tmp_path):
    with pytest.raises(ValueError, match="no rows and no columns"):
        write_table([], tmp_path / "t.csv")
    write_table([], tmp_path / "t.csv", columns=["a", "b"])
    assert (tmp_path / "t.csv").read_text() == "a,b\n"


def test_a_row_that_lacks_a_column_is_named(tmp_path):
    with pytest.raises(ValueError, match="a row lacks b"):
        write_table([{"a": 1, "b": 2}, {"a": 3}], tmp_path / "t.csv")
