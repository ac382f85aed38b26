"""A copy of the tracked files and the environment in a path with a space, and one offline run of the real workflow."""

import pytest
from clones import Clone, can_leave_the_network, copy_clone, own_environment


@pytest.fixture(scope="session")
def clone(tmp_path_factory) -> Clone:
    """The finished smoke run that the tests look at; they leave it as they found it."""
    root = copy_clone(tmp_path_factory.mktemp("smoke") / "a clone")
    made = Clone(root, can_leave_the_network(), program=own_environment(root))
    done = made.snakemake()
    made.log = done.stdout + done.stderr
    return made
