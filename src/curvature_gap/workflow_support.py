"""What the Snakefile needs at read time: devices and a script's own code, found without importing torch."""

import ast
import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from curvature_gap.settings import SettingsError

DEVICE_VARIABLE = "CURVATURE_GAP_RESOLVED_DEVICE"
"""How a run tells its jobs their device; executors hand the environment on, `sbatch --export=ALL` does."""


@cache
def n_gpus() -> int:
    """Count the GPUs a local job may use: CUDA_VISIBLE_DEVICES if it is set, else what nvidia-smi lists."""
    return len(gpu_ids())


def gpu_ids() -> list[str]:
    """Return the ids of the usable GPUs, as CUDA_VISIBLE_DEVICES would name them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu for gpu in visible.split(",") if gpu.strip() not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    count = sum(line.startswith("GPU ") for line in listing.stdout.splitlines()) if listing.returncode == 0 else 0
    return [str(i) for i in range(count)]


def device(wanted: str) -> str:
    """Resolve `auto | cpu | cuda` to the device that will be used.

    Raises:
        SettingsError: If cuda is asked for and there is no GPU; falling back silently would misstate the results.
    """
    if wanted == "cpu":
        return "cpu"
    if n_gpus():
        return "cuda"
    if wanted == "cuda":
        raise SettingsError(
            "device: cuda, but no GPU is visible (CUDA_VISIBLE_DEVICES is empty or nvidia-smi lists none). "
            "Set device: auto or cpu, or run on a machine with a GPU."
        )
    return "cpu"


def device_of_jobs(wanted: str, *, main: bool, local: bool) -> str:
    """Return the device that every job of a run uses; the main process decides and its jobs take over what it found.

    Otherwise `auto` would be one thing on a login node and another on a GPU node, and the rules' params with it. On a
    cluster `cuda` is believed without a look, because the login node's GPUs are not the jobs'.

    Args:
        wanted: `auto | cpu | cuda`.
        main: Whether this process plans the run, and not a job of it.
        local: Whether the jobs run on this machine.

    Raises:
        SettingsError: If cuda is asked for, jobs run here, and there is no GPU.
    """
    if not main and DEVICE_VARIABLE in os.environ:
        return os.environ[DEVICE_VARIABLE]
    resolved = "cuda" if wanted == "cuda" and not local else device(wanted)
    os.environ[DEVICE_VARIABLE] = resolved
    return resolved


def package_files(script: Path, source_root: Path, start: Path) -> list[str]:
    """Return the files of `curvature_gap` that `script` imports, transitively, as sorted paths relative to `start`.

    `script` may be a notebook. Read from the syntax tree, so imports inside functions count and nothing is executed.
    """
    found: set[Path] = set()
    waiting = [script]
    while waiting:
        for module in _imported_modules(waiting.pop()):
            path = _module_file(module, source_root)
            if path and path not in found:
                found.add(path)
                waiting.append(path)
    return sorted(os.path.relpath(path, start) for path in found)


@cache
def _imported_modules(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(_python_source(path))):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            # `from curvature_gap import maps` names a module as well as an attribute.
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    return {module for module in modules if module.split(".")[0] == "curvature_gap"}


def _python_source(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")


def _module_file(module: str, source_root: Path) -> Path | None:
    base = source_root.joinpath(*module.split("."))
    if base.with_suffix(".py").is_file():
        return base.with_suffix(".py")
    package = base / "__init__.py"
    return package if package.is_file() else None
