"""One undisturbed run from data to tables of a tiny preset, and copies of it that the drills may damage."""

import shutil

import pytest
from clones import copy_clone
from drills import OPTIONS, TARGETS, Drill, digest


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    root = copy_clone(tmp_path_factory.mktemp("undisturbed") / "clone")
    made = Drill(root, options=OPTIONS)
    made.snakemake("--", *TARGETS)
    made.expected = {target: digest(root / target) for target in TARGETS}
    return made


@pytest.fixture
def drill(undisturbed, tmp_path):
    """A finished copy to damage; times are kept, so it counts as finished."""
    root = tmp_path / "clone"
    shutil.copytree(undisturbed.root, root, symlinks=True)
    yield Drill(root, options=OPTIONS, expected=undisturbed.expected)
    shutil.rmtree(root, ignore_errors=True)
