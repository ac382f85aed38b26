from dataclasses import replace

import pytest
import torch

from curvature_gap.architecture import Architecture
from curvature_gap.dynamics import hessian_at
from curvature_gap.sample_curvature import sample_curvature
from curvature_gap.vit import initial_parameters

SMALL = Architecture(image_size=6, channels=2, patch=3, classes=5, d_V=4, d_ff=7)


def test_m_is_the_largest_exact_norm_and_lies_below_the_tight_bound(randn, generator):
    parameters = initial_parameters(SMALL, torch.Generator().manual_seed(1))
    images, labels = randn(3, 2, 6, 6), torch.randint(5, (3,), generator=generator)
    found = sample_curvature(parameters, images, labels, SMALL, iterations=60)
    exact = [
        float(
            torch.linalg.matrix_norm(
                hessian_at(parameters, images[i : i + 1], labels[i : i + 1], SMALL, whole=True).matrix(), 2
            )
        )
        for i in range(3)
    ]
    assert pytest.approx(max(exact), rel=1e-6) == found.M
    assert found.residual < 1e-3
    assert max(exact) <= found.tight < 50 * max(exact)
    assert found.n_samples == 3


def test_where_the_bound_does_not_cover_the_model_there_is_none(randn, generator):
    deep = replace(SMALL, depth=2)
    parameters = initial_parameters(deep, torch.Generator().manual_seed(1))
    found = sample_curvature(parameters, randn(2, 2, 6, 6), torch.randint(5, (2,), generator=generator), deep, 8)
    assert found.M > 0
    assert found.tight != found.tight
