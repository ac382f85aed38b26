"""A copy of the tracked files in a path with a space, and one run of the real workflow in it, without network."""

import pytest
from clones import Clone, can_leave_the_network, copy_clone


@pytest.fixture(scope="session")
def clone(tmp_path_factory) -> Clone:
    """The finished smoke run that the tests look at; they leave it as they found it."""
    root = copy_clone(tmp_path_factory.mktemp("smoke") / "a clone")
    made = Clone(root, can_leave_the_network())
    done = made.snakemake()
    made.log = done.stdout + done.stderr
    return made
