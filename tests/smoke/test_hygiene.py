"""The workflow where the surroundings are not the developer's: users, homes, locales, paths, GPUs."""

import hashlib
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from clones import SNAKEMAKE, Clone, copy_clone, own_environment

pytestmark = [pytest.mark.smoke, pytest.mark.slow, pytest.mark.timeout(600)]

# One job without torch, one with it, one notebook.
DATA = "results/smoke/data/mnist.npz"
SUBSET = "results/smoke/subsets/mnist_seed0.npz"
FIGURE = "results/smoke/figures/fig02.pdf"
TARGETS = (SUBSET, FIGURE)


def digests(root, names=(DATA, *TARGETS)):
    return {name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in names}


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """What the usual surroundings give."""
    made = Clone(copy_clone(tmp_path_factory.mktemp("usual") / "clone"))
    made.snakemake("--", *TARGETS)
    return digests(made.root)


def run_bare(clone, variables, *prefix, umask=None):
    """Run Snakemake with these variables and no others."""
    options = {} if umask is None else {"umask": umask}
    done = subprocess.run(
        [*prefix, *clone.command("--", *TARGETS)],
        cwd=clone.root,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        **options,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]


def test_without_home_user_or_a_locale(usual, tmp_path):
    clone = Clone(copy_clone(tmp_path / "clone"))
    run_bare(clone, {"PATH": os.environ["PATH"], "LC_ALL": "C"}, umask=0o077)
    assert digests(clone.root) == usual
    for name in (DATA, *TARGETS):
        assert stat.S_IMODE((clone.root / name).stat().st_mode) == 0o600, f"{name} does not follow the umask"


def test_with_a_home_that_cannot_be_written(usual, tmp_path):
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv")
    home = tmp_path / "home"
    home.mkdir(mode=0o555)
    clone = Clone(copy_clone(tmp_path / "clone"))
    # Root without its powers is bound by permissions.
    powerless = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    run_bare(clone, {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8"}, *powerless)
    assert digests(clone.root) == usual
    assert list(home.iterdir()) == []


def test_as_another_user_with_a_closed_umask_and_an_unknown_locale(usual, public_path):
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv")
    # May read everything, for the interpreter can lie in root's home, and write only what is its own.
    reading = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *reading]
    clone = Clone(copy_clone(public_path / "clone"))
    for path in (clone.root, *clone.root.rglob("*")):
        os.chown(path, 65534, 65534)
    variables = {"PATH": os.environ["PATH"], "LC_ALL": "tr_TR.UTF-8", "LANG": "xx_XX", "TMPDIR": str(clone.root)}
    run_bare(clone, variables, *nobody, umask=0o077)
    assert digests(clone.root) == usual
    for name in (DATA, *TARGETS):
        made = (clone.root / name).stat()
        assert (made.st_uid, stat.S_IMODE(made.st_mode)) == (65534, 0o600)


def test_in_a_path_that_a_shell_would_read_otherwise(usual, tmp_path):
    root = copy_clone(tmp_path / "it's; touch injected; $(touch injected) & a clone")
    clone = Clone(root, program=own_environment(root))
    clone.snakemake("--", *TARGETS)
    assert digests(clone.root) == usual
    assert list(tmp_path.rglob("injected")) == []


TINY = """
sys.path.insert(0, {source!r})
from curvature_gap import preflight

for limit, value in preflight.limits("cuda").items():
    workflow.register_resource(limit, value)

rule all:
    input: expand("{{i}}.txt", i=range({jobs}))

rule one:
    output: "{{i}}.txt"
    log: "{{i}}.log"
    params: device="cuda"
    resources: gpu=1, mem_mb=10
    script: "one.py"
"""
ONE = """
import os, sys, time
sys.path.insert(0, {source!r})
from curvature_gap.job import job
with job(snakemake):
    begin = time.time()
    time.sleep(0.4)
    with open(snakemake.output[0], "w") as file:
        print(os.environ["CUDA_VISIBLE_DEVICES"], begin, time.time(), file=file)
"""


@pytest.mark.parametrize("n", [1, 2, 4])
def test_at_most_n_gpu_jobs_at_once_each_with_its_own_id(n, tmp_path):
    source = str(Path(__file__).parents[2] / "src")
    jobs = n + 2
    (tmp_path / "Snakefile").write_text(TINY.format(source=source, jobs=jobs))
    (tmp_path / "one.py").write_text(ONE.format(source=source))
    ids = [str(3 + i) for i in range(n)]
    variables = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(ids), "TMPDIR": str(tmp_path)}
    command = [SNAKEMAKE, "--cores", "16"]
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    held = [(tmp_path / f"{i}.txt").read_text().split() for i in range(jobs)]
    assert {gpu for gpu, _, _ in held} <= set(ids)
    for i, (gpu, begin, end) in enumerate(held):
        at_once = [other for other, b, e in held[:i] if float(b) < float(end) and float(begin) < float(e)]
        assert gpu not in at_once


def test_cuda_without_a_gpu_stops_before_any_job(tmp_path):
    options = ("--config", "preset=smoke", "device=cuda", "--cores", "2")
    clone = Clone(copy_clone(tmp_path / "clone"), options=options, environment={"CUDA_VISIBLE_DEVICES": ""})
    done = clone.snakemake(SUBSET, check=False)
    assert done.returncode != 0
    assert "device: cuda, but no GPU is visible" in done.stdout + done.stderr
    assert not (clone.root / "results/smoke").exists()
