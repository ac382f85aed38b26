import itertools

import numpy as np
import pytest
import torch

from curvature_gap.hessian import Hessian
from curvature_gap.norms import block_norms_table, frobenius_norm, spectral_norm

NAMES = ("embed", "W_Q", "LN1_gamma", "LN1_beta", "LN2_gamma", "LN2_beta", "classifier")
SHAPES = ((2, 3), (3, 3), (3, 1), (3, 1), (3, 1), (3, 1), (3, 2))


@pytest.fixture
def hessian(randn):
    P = sum(m * n for m, n in SHAPES)
    A = randn(P, P)
    return Hessian(NAMES, SHAPES, 1.0, 0.5, "", "autodiff", H=A + A.T)


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (3, 7), (6, 6)])
def test_norms_against_the_singular_values(shape, randn):
    A = randn(*shape)
    singular = np.linalg.svd(A.numpy(), compute_uv=False)
    assert spectral_norm(A) == pytest.approx(singular[0], rel=1e-14)
    assert frobenius_norm(A) == pytest.approx(np.sqrt((singular**2).sum()), rel=1e-14)


def test_spectral_norm_of_an_indefinite_symmetric_matrix_is_not_its_largest_eigenvalue(randn):
    A = torch.diag(torch.tensor([1.0, -3.0, 2.0], dtype=torch.float64))
    assert spectral_norm(A) == 3.0


def test_a_close_second_singular_value_costs_no_accuracy():
    A = torch.diag(torch.tensor([1.0, 1 - 1e-12, 0.1], dtype=torch.float64))[:, [1, 2, 0]]
    assert spectral_norm(A) == pytest.approx(1.0, rel=1e-14)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_extreme_scales(scale, randn):
    A = randn(4, 3)
    assert spectral_norm(A * scale) == pytest.approx(spectral_norm(A) * scale, rel=1e-13)


def test_zero_and_nan():
    assert spectral_norm(torch.zeros(2, 3)) == 0.0
    with pytest.raises(ValueError, match="NaN or infinite"):
        spectral_norm(torch.full((2, 2), float("nan")))


def test_table_has_every_ordered_pair_of_fine_blocks_and_the_pools(hessian):
    rows = block_norms_table(hessian, "mnist_seed0", "init", 0)
    assert list(rows[0]) == [
        *("run", "stage", "seed", "row", "column", "spectral", "frobenius", "max_abs", "mean_abs", "mean_log10_abs")
    ]
    lines = {(row["row"], row["column"]): row for row in rows}
    assert len(lines) == len(rows)
    assert set(itertools.product(NAMES, NAMES)) <= set(lines)
    ten = ("embed", "W_Q", "LN1", "LN2", "classifier")
    assert set(lines) - set(itertools.product(NAMES, NAMES)) == {
        pair for pair in itertools.product(ten, ten) if set(pair) & {"LN1", "LN2"}
    }
    block = hessian["W_Q", "classifier"].numpy()
    line = lines["classifier", "W_Q"]
    assert line["spectral"] == pytest.approx(np.linalg.norm(block, 2), rel=1e-13)
    assert line["mean_log10_abs"] == pytest.approx(np.log10(np.abs(block)).mean(), rel=1e-12)
    pool = hessian.to_numpy()[15:21, 0:6]
    assert lines["LN1", "embed"]["frobenius"] == pytest.approx(np.linalg.norm(pool), rel=1e-13)
    assert lines["embed", "LN1"]["spectral"] == pytest.approx(np.linalg.norm(pool, 2), rel=1e-13)


def test_entries_below_the_floor_count_as_the_floor():
    hessian = Hessian(("x",), ((2, 1),), 0.0, 0.0, "", "autodiff", H=torch.zeros(2, 2, dtype=torch.float64))
    (row,) = block_norms_table(hessian, "r", "init", 0)
    assert row["mean_log10_abs"] == pytest.approx(-6)
    assert row["spectral"] == row["frobenius"] == 0.0


def test_diagonal_blocks_only(hessian):
    blocks = {(name, name): hessian[name, name] for name in NAMES}
    part = Hessian(NAMES, SHAPES, 1.0, 0.5, "", "autodiff", blocks=blocks)
    rows = block_norms_table(part, "r", "init", 0, diagonal_only=True)
    assert [(row["row"], row["column"]) for row in rows] == [(name, name) for name in NAMES]
    # Pools need γ against β as well, which diagonal blocks do not hold; a whole matrix does.
    whole = block_norms_table(hessian, "r", "init", 0, diagonal_only=True)
    assert [row["row"] for row in whole] == [*NAMES, "LN1", "LN2"]
