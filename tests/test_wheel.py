"""The wheel in an environment that holds torch and numpy alone: `pip install .` promises no more."""

import json
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from curvature_gap import Architecture, ViT, exact_hessian

ROOT = Path(__file__).parents[1]
ABSENT = ("pandas", "scipy", "matplotlib", "snakemake", "yaml", "safetensors", "jaxtyping", "torchvision")

pytestmark = pytest.mark.slow

USE = """
import importlib.util, json, sys
import torch
from curvature_gap import Architecture, ViT, exact_hessian
import curvature_gap

architecture = Architecture(image_size=6, channels=1, patch=2, classes=3, d_V=4, d_ff=7)
images = torch.randn(5, 1, 6, 6, generator=torch.Generator().manual_seed(0))
labels = torch.arange(5) % 3
H = exact_hessian(ViT(architecture, seed=1), images, labels)
by_autodiff = exact_hessian(ViT(architecture, seed=1), images, labels, engine="autodiff")
H.save(sys.argv[1])
points, density = H.spectral_density()
print(json.dumps({
    "file": curvature_gap.__file__,
    "present": [name for name in sys.argv[2:] if importlib.util.find_spec(name)],
    "engines": [H.engine, by_autodiff.engine],
    "apart": float((H.matrix() - by_autodiff.matrix()).abs().max() / H.matrix().abs().max()),
    "eigenvalues": H.eigenvalues().tolist(),
    "largest": H.eigenvalues(2).tolist(),
    "trace": H.trace(),
    "norms": {"/".join(pair): norm for pair, norm in H.spectral_norms().items()},
}))
"""


def requirements(name: str, found: set[str], extra: str = "") -> set[str]:
    """Return a distribution and all that it requires on this machine, added to `found`."""
    found.add(name)
    for text in metadata.requires(name) or []:
        needed = Requirement(text)
        if needed.marker is not None and not needed.marker.evaluate({"extra": extra}):
            continue
        other = canonicalize_name(needed.name)
        if other not in found:
            requirements(other, found)
        for wanted in needed.extras:
            requirements(other, found, wanted)
    return found


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    # Without the caller's variables: a PYTHONPATH would bring the clone in.
    variables = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    return subprocess.run(list(map(str, command)), cwd=cwd, env=variables, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    done = run(sys.executable, "-m", "pip", "wheel", *options, "-w", folder, ROOT, cwd=folder)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory) -> Path:
    """The bin folder of a venv with this machine's torch and numpy, what they require, and the wheel."""
    root = tmp_path_factory.mktemp("bare")
    done = run(sys.executable, "-m", "venv", "--without-pip", root / "venv", cwd=root)
    assert done.returncode == 0, done.stderr
    lent = root / "lent"
    lent.mkdir()
    for name in requirements("torch", set()) | requirements("numpy", set()):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            link = lent / top
            if not link.exists():  # namespaces are shared
                link.symlink_to(Path(distribution.locate_file(top)).resolve())
    (site,) = (root / "venv/lib").glob("python*/site-packages")
    (site / "lent.pth").write_text(f"{lent}\n")
    # With dependencies and without an index: what is not lent cannot come, so a further requirement fails here.
    options = ("--no-index", "--disable-pip-version-check")
    done = run(sys.executable, "-m", "pip", "--python", root / "venv/bin/python", "install", *options, wheel, cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "venv/bin"


@pytest.fixture(scope="module")
def used(bare, tmp_path_factory):
    """What the script above printed, and the Hessian it stored."""
    folder = tmp_path_factory.mktemp("use")
    done = run(bare / "python", "-c", USE, folder / "H.npz", *ABSENT, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), folder / "H.npz"


def test_the_wheel_holds_the_package_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"curvature_gap", f"curvature_gap-{version()}.dist-info"}
    assert {Path(name).suffix for name in names if name.startswith("curvature_gap/")} <= {".py"}


def version() -> str:
    return metadata.version("curvature-gap")


def test_the_environment_is_bare_and_the_package_is_the_wheels(used, bare):
    said, _ = used
    assert said["present"] == []
    assert Path(said["file"]).is_relative_to(bare.parent)


def test_hessian_eigenvalues_trace_and_norms_are_those_of_the_full_environment(used):
    said, _ = used
    architecture = Architecture(image_size=6, channels=1, patch=2, classes=3, d_V=4, d_ff=7)
    images = torch.randn(5, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    H = exact_hessian(ViT(architecture, seed=1), images, torch.arange(5) % 3)
    scale = float(H.matrix().abs().max())
    assert said["engines"] == ["closed_form", "autodiff"]
    assert said["apart"] < 1e-13
    assert said["eigenvalues"] == pytest.approx(torch.linalg.eigvalsh(H.matrix()).tolist(), abs=1e-12 * scale)
    assert sorted(map(abs, said["largest"])) == pytest.approx(sorted(map(abs, said["eigenvalues"]))[-2:])
    assert said["trace"] == pytest.approx(sum(said["eigenvalues"]), rel=1e-10)
    assert len(said["norms"]) == len(H.names) * (len(H.names) + 1) // 2
    block = H["W_Q", "W_V"]
    assert said["norms"]["W_Q/W_V"] == pytest.approx(float(torch.linalg.svdvals(block)[0]), rel=1e-9)


def test_the_command_reads_a_stored_hessian(used, bare):
    said, path = used
    done = run(bare / "curvature-gap", "analyse", path, "--json", cwd=path.parent)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["trace"] == pytest.approx(said["trace"])


def test_a_command_of_the_workflow_names_the_extra_it_needs(bare, tmp_path):
    for name in ("config/config.yaml", "results/smoke/claims.csv"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    done = run(bare / "curvature-gap", "hessian", "mnist_seed0", "--preset", "smoke", cwd=tmp_path)
    assert done.returncode == 2
    assert "package yaml is not installed; pip install 'curvature-gap[pipeline]'" in done.stderr
    assert "Traceback" not in done.stderr
