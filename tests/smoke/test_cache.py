"""Two clones with one cache: the second trains nothing, and what was changed is not taken from it."""

import hashlib
import shutil

import pytest
from clones import Clone, copy_clone

pytestmark = [pytest.mark.smoke, pytest.mark.slow, pytest.mark.timeout(600)]

NORMS = "results/smoke/block_norms/mnist_seed0.csv"
FILES = (
    NORMS,
    "results/smoke/data/mnist.npz",
    "results/smoke/checkpoints/mnist_seed0/trained.safetensors",
    "results/smoke/hessians/mnist_seed0/trained.npz",
)
RULES = ("dataset", "train", "exact_hessian")


@pytest.fixture(scope="module")
def make_clone(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    # Of one state of the sources, whatever is edited meanwhile.
    original = copy_clone(tmp_path_factory.mktemp("original") / "clone")

    def make(name):
        root = shutil.copytree(original, tmp_path_factory.mktemp(name) / "clone")
        return Clone(root, environment={"SNAKEMAKE_OUTPUT_CACHE": str(cache)})

    return make


def run(clone):
    clone.snakemake("--cache", "--", NORMS)
    return {name: hashlib.sha256((clone.root / name).read_bytes()).hexdigest() for name in FILES}


def executed(clone):
    """Return the rules that really ran: their scripts wrote to their logs, which Snakemake only creates."""
    logs = {rule: (clone.root / f"results/smoke/logs/{rule}").glob("mnist*") for rule in RULES}
    return {rule for rule in RULES if any(log.stat().st_size for log in logs[rule])}


@pytest.fixture(scope="module")
def first(make_clone):
    clone = make_clone("first")
    hashes = run(clone)
    assert executed(clone) == set(RULES)
    return hashes


def edit(clone, name, old, new):
    path = clone.root / name
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_a_second_clone_computes_nothing(make_clone, first):
    clone = make_clone("second")
    assert run(clone) == first
    assert executed(clone) == set()


def test_a_changed_setting_misses_the_cache(make_clone, first):
    clone = make_clone("setting")
    edit(clone, "config/config.yaml", "steps: 60,", "steps: 61,")
    assert run(clone)[NORMS] != first[NORMS]
    assert executed(clone) == {"train", "exact_hessian"}


def test_a_changed_source_file_misses_the_cache(make_clone, first):
    clone = make_clone("source")
    edit(clone, "src/curvature_gap/exact_hessian.py", '"""', '""" ')
    assert run(clone)[NORMS] == first[NORMS]
    assert executed(clone) == {"exact_hessian"}
