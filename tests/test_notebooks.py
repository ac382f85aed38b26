"""Every notebook draws and does nothing else; every figure of the workflow has one."""

import ast
import re
from pathlib import Path

import nbformat
import papermill
import pytest

from curvature_gap.workflow_support import package_files

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ALLOWED = {"curvature_gap", "json", "matplotlib", "numpy", "pandas", "pathlib", "seaborn", "textwrap"}


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


def code_of(path: Path) -> str:
    return "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")


def test_is_stripped_and_says_its_kernel(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.metadata.language_info.name == "python"
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


def test_has_one_parameters_cell_that_papermill_reads_whole(path):
    tagged = [c for c in nbformat.read(path, as_version=4).cells if "parameters" in c.metadata.get("tags", [])]
    assert len(tagged) == 1
    names = {target.id for node in ast.parse(tagged[0].source).body for target in node.targets}
    assert names == set(papermill.inspect_notebook(str(path)))
    assert {"preset", "figure"} <= names


def test_draws_only(path):
    tree = ast.parse(code_of(path))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module.split(".")[0] for module in modules} <= ALLOWED
    assert "linalg" not in code_of(path)
    assert "figure_style" in code_of(path)
    assert "style.save_figure(fig, figure, caption)" in code_of(path)


def test_imports_no_torch_through_the_package(path):
    for module in package_files(path, ROOT / "src", start=ROOT):
        tree = ast.parse((ROOT / module).read_text())
        top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = {alias.name for node in top for alias in node.names} | {getattr(node, "module", None) for node in top}
        assert "torch" not in names, module


def test_cells_are_short_and_begin_with_what_is_seen(path):
    cells = nbformat.read(path, as_version=4).cells
    assert cells[0].cell_type == "markdown"
    assert cells[0].source.startswith("# ")
    assert max(len(cell.source.splitlines()) for cell in cells if cell.cell_type == "code") <= 40


def test_every_figure_of_the_workflow_has_its_notebook_and_every_notebook_a_figure():
    rules = ROOT / "workflow/rules"
    table = "".join((rules / name).read_text(encoding="utf-8") for name in ("figures.smk", "functions.smk"))
    named = set(re.findall(r"(?:figure_entry|first_steps)\(\s*\"(\w+)\"", table))
    assert named == {path.stem for path in NOTEBOOKS}
