"""docs/faults.md, which the report prints: four cells a row, and every test it names exists."""

import re

import pytest
from clones import ROOT

TESTS = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
LINES = [line for line in (ROOT / "docs/faults.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]


@pytest.mark.parametrize("line", LINES[1:])
def test_every_fault_names_tests_that_exist(line):
    cells = line.strip("|").split("|")
    assert len(cells) == 4
    named = re.findall(r"`(test_[\w.]+)`", cells[-1])
    assert named
    for name in named:
        assert name in TESTS or any(f"def {name}(" in text for text in TESTS.values()), name
