"""Run a figure's notebook: parameters checked by name, this interpreter's kernel, files moved into place at the end."""

import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from curvature_gap.files import atomic_path

SUFFIXES = (".pdf", ".png", ".txt")
"""What a notebook writes for `figure`, the path without suffix that it is given: two images and the caption."""

SOURCE_DATE_EPOCH = "0"
"""The date that matplotlib writes into a PDF, so that equal figures are equal files."""


class NotebookError(RuntimeError):
    """A notebook that cannot be run with these parameters, failed, or did not write its figure."""


def draw(notebook: Path, parameters: Mapping[str, Any], figure: Path, executed: Path) -> None:
    """Execute `notebook` and put `figure` + `.pdf`, `.png`, `.txt` and the executed copy into place, or nothing of it.

    The notebook gets `parameters` and `figure`, the path without suffix that it shall write to. When it fails, the
    executed copy with the traceback becomes `<executed stem>.failed.ipynb` beside `executed`.

    Args:
        notebook: A notebook with exactly one cell tagged `parameters`, one assignment a line.
        parameters: Values for all names of that cell except `figure`; paths as strings, relative to the working
            directory.
        figure: Where the figure goes, without suffix.
        executed: Where the executed copy goes.

    Raises:
        NotebookError: If the names differ from the parameters cell, a cell fails, or a file was not written.
    """
    check_parameters(notebook, [*parameters, "figure"])
    failed = executed.with_name(f"{executed.stem}.failed.ipynb")
    failed.unlink(missing_ok=True)
    figure.parent.mkdir(parents=True, exist_ok=True)
    with (
        atomic_path(executed) as copy,
        tempfile.TemporaryDirectory(prefix=f".{figure.name}-", dir=figure.parent) as folder,
    ):
        drawn = Path(folder) / figure.name
        try:
            execute(notebook, copy, {**parameters, "figure": str(drawn)})
            written = [drawn.with_name(drawn.name + suffix) for suffix in SUFFIXES]
            missing = [path.suffix for path in written if not path.is_file()]
            if missing:
                raise NotebookError(
                    f"{notebook} ran but did not write its {' and '.join(missing)}. It must end with "
                    f"figure_style.save_figure(fig, figure, caption)."
                )
        except BaseException:
            if copy.stat().st_size:
                copy.replace(failed)
            raise
        for path in written:
            path.replace(figure.parent / path.name)


def check_parameters(notebook: Path, given: Iterable[str]) -> None:
    """Compare the given names with the parameters cell; papermill itself would only warn and keep the defaults.

    Raises:
        NotebookError: If there is not exactly one parameters cell, or a name is unknown to it or missing from `given`.
    """
    with _fast_jsonschema():
        import nbformat
        import papermill

    cells = nbformat.read(notebook, as_version=4).cells
    tagged = sum("parameters" in cell.metadata.get("tags", []) for cell in cells)
    if tagged != 1:
        raise NotebookError(f"{notebook}: {tagged} cells are tagged `parameters`, one is needed.")
    known = set(papermill.inspect_notebook(str(notebook)))
    given = set(given)
    faults = [f"unknown parameter {name}" for name in sorted(given - known)]
    faults += [f"no value for parameter {name}" for name in sorted(known - given)]
    if faults:
        raise NotebookError(f"{notebook}: {'; '.join(faults)}. Its parameters cell names {', '.join(sorted(known))}.")


def execute(notebook: Path, executed: Path, parameters: Mapping[str, Any]) -> None:
    """Execute a notebook in a kernel of this interpreter; `executed` is written cell by cell.

    Raises:
        NotebookError: If a cell fails or the kernel dies; the message holds the error, `executed` the traceback.
    """
    with _fast_jsonschema():
        import papermill
        from nbclient.exceptions import DeadKernelError
        from papermill.exceptions import PapermillExecutionError

    with tempfile.TemporaryDirectory(prefix="nb-") as folder:
        try:
            papermill.execute_notebook(
                notebook,
                executed,
                parameters=dict(parameters),
                kernel_name="python3",
                kernel_manager_class=kernel_manager(Path(folder)),
                progress_bar=False,
                log_output=True,
                start_timeout=300,
            )
        except PapermillExecutionError as error:
            raise NotebookError(
                f"{notebook}, cell {error.exec_count}: {error.ename}: {_plain(error.evalue)}"
            ) from error
        except DeadKernelError as error:
            raise NotebookError(f"{notebook}: the kernel died; too little memory is the usual reason.") from error


def kernel_manager(folder: Path) -> type:
    """Return a kernel manager class for one kernel of this interpreter, which keeps its files in `folder`.

    A user's own `python3` kernelspec may name another interpreter, and their IPython start-up files may change
    anything; neither is looked at. Sockets are files where the path is short enough: free TCP ports are guessed and
    clash when many notebooks start at once, and need a network interface.
    """
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec

    spec = KernelSpec(
        argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        display_name="Python 3",
        language="python",
        env={
            "IPYTHONDIR": str(folder),
            "PYTHONPATH": os.pathsep.join(filter(None, [_package_root(), os.environ.get("PYTHONPATH")])),
            "SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH,
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        },
    )
    connection = folder / "k.json"
    # A socket's path is the connection file's without suffix, "-ipc-" and a digit; systems allow 104 to 108 bytes.
    uses_files = sys.platform != "win32" and len(os.fsencode(connection)) < 95

    class OwnKernelManager(AsyncKernelManager):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.connection_file = str(connection)
            self.transport = "ipc" if uses_files else "tcp"

        @property
        def kernel_spec(self) -> KernelSpec:
            return spec

    return OwnKernelManager


@contextmanager
def _fast_jsonschema() -> Iterator[None]:
    """Let jsonschema, which reads notebooks, be imported without its optional check of IRIs.

    That check compiles a grammar at import, which takes longer than the rest of papermill; notebooks hold no IRIs.
    """
    name = "rfc3987_syntax"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # an import of it now raises ImportError
    try:
        yield
    finally:
        del sys.modules[name]


def _package_root() -> str:
    return str(Path(__file__).resolve().parents[1])


def _plain(text: str) -> str:
    """Drop the terminal's colours and all but the first lines of an error."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text).strip()[:2000]
