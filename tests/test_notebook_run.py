"""Notebooks run with checked parameters in this interpreter's kernel, and leave a whole figure or a traceback."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest

from curvature_gap.notebook_run import NotebookError, check_parameters, draw, execute, kernel_manager

PARAMETERS = 'number = 0\nfigure = ""'
WRITES = "\n".join(
    [
        "import sys",
        "from pathlib import Path",
        'for suffix in (".pdf", ".png", ".txt"):',
        "    Path(figure + suffix).write_text(f'{number} {sys.executable}')",
    ]
)


def notebook(path: Path, *sources: str, tags: int = 1) -> Path:
    """Write a notebook whose first `tags` cells are tagged `parameters`."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    for cell in cells[:tags]:
        cell.metadata["tags"] = ["parameters"]
    kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernelspec, "language_info": {"name": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), path)
    return path


def text_of_outputs(path: Path) -> str:
    return json.dumps(nbformat.read(path, as_version=4).cells)


def test_a_misspelt_a_missing_and_a_surplus_parameter_are_named(tmp_path):
    path = notebook(tmp_path / "a.ipynb", PARAMETERS)
    check_parameters(path, ["figure", "number"])
    with pytest.raises(NotebookError, match=r"unknown parameter nmber; no value for parameter number"):
        check_parameters(path, ["figure", "nmber"])


@pytest.mark.parametrize("tags", [0, 2])
def test_there_must_be_one_parameters_cell(tmp_path, tags):
    path = notebook(tmp_path / "a.ipynb", PARAMETERS, "other = 1", tags=tags)
    with pytest.raises(NotebookError, match=f"{tags} cells are tagged"):
        check_parameters(path, ["figure", "number"])


def test_drawing_moves_all_files_into_place_and_uses_this_interpreter(tmp_path):
    path = notebook(tmp_path / "a.ipynb", PARAMETERS, WRITES)
    out = tmp_path / "with a space"
    draw(path, {"number": 7}, figure=out / "fig", executed=out / "notebooks" / "fig.ipynb")
    assert (out / "fig.pdf").read_text() == f"7 {sys.executable}"
    assert sorted(p.name for p in out.iterdir()) == ["fig.pdf", "fig.png", "fig.txt", "notebooks"]
    assert [p.name for p in (out / "notebooks").iterdir()] == ["fig.ipynb"]
    executed = nbformat.read(out / "notebooks" / "fig.ipynb", as_version=4)
    assert executed.metadata.kernelspec.name == "python3"
    assert executed.metadata.language_info.name == "python"


def test_a_failing_notebook_keeps_its_traceback_and_yields_no_figure(tmp_path):
    path = notebook(tmp_path / "a.ipynb", PARAMETERS, WRITES, "ratio = 1 / number")
    out = tmp_path / "out"
    with pytest.raises(NotebookError, match="ZeroDivisionError: division by zero"):
        draw(path, {"number": 0}, figure=out / "fig", executed=out / "fig.ipynb")
    assert [p.name for p in out.iterdir()] == ["fig.failed.ipynb"]
    assert "ZeroDivisionError" in text_of_outputs(out / "fig.failed.ipynb")
    draw(path, {"number": 1}, figure=out / "fig", executed=out / "fig.ipynb")
    assert not (out / "fig.failed.ipynb").exists()


def test_a_notebook_that_writes_no_figure_fails(tmp_path):
    path = notebook(tmp_path / "a.ipynb", PARAMETERS)
    with pytest.raises(NotebookError, match=r"did not write its \.pdf and \.png and \.txt"):
        draw(path, {"number": 1}, figure=tmp_path / "out/fig", executed=tmp_path / "out/fig.ipynb")
    assert not list(tmp_path.glob("out/*.pdf"))


def test_a_users_own_kernel_and_startup_files_are_ignored(tmp_path, monkeypatch):
    kernels = tmp_path / "jupyter/kernels/python3"
    kernels.mkdir(parents=True)
    spec = {"argv": ["/no/such/python", "{connection_file}"], "display_name": "mine", "language": "python"}
    (kernels / "kernel.json").write_text(json.dumps(spec))
    startup = tmp_path / "ipython/profile_default/startup"
    startup.mkdir(parents=True)
    (startup / "00.py").write_text("number = 'from the start-up file'\nraise SystemExit(1)")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    execute(
        notebook(tmp_path / "a.ipynb", PARAMETERS, "number + 1"), tmp_path / "b.ipynb", {"number": 41, "figure": ""}
    )
    assert '"42"' in text_of_outputs(tmp_path / "b.ipynb")


def test_sockets_are_files_unless_their_path_is_too_long(tmp_path):
    assert kernel_manager(Path("/tmp/nb"))().transport == "ipc"
    long_path = Path("/tmp") / ("x" * 100)
    assert kernel_manager(long_path)().transport == "tcp"


@pytest.mark.slow
def test_sixteen_at_once_do_not_clash(tmp_path):
    path = notebook(tmp_path / "a.ipynb", PARAMETERS, WRITES)

    def one(i: int) -> str:
        out = tmp_path / str(i)
        code = (
            "import sys; from pathlib import Path; from curvature_gap.notebook_run import draw\n"
            "source, number, out = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])\n"
            "draw(source, {'number': number}, out / 'fig', out / 'fig.ipynb')"
        )
        command = [sys.executable, "-c", code, str(path), str(i), str(out)]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        return (out / "fig.png").read_text()

    with ThreadPoolExecutor(16) as pool:
        drawn = list(pool.map(one, range(32)))  # twice over
    assert [text.split()[0] for text in drawn] == [str(i) for i in range(32)]
