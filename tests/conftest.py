"""Shared fixtures. The import hook checks every annotated shape of the package at each call of the tests."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from jaxtyping import install_import_hook

install_import_hook("curvature_gap", "beartype.beartype")

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture
def generator() -> torch.Generator:
    """An explicit generator, seeded the same in every test."""
    return torch.Generator().manual_seed(20251016)


@pytest.fixture
def randn(generator):
    """`randn(2, 3)`: standard normal numbers in float64."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return draw
