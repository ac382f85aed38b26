import numpy as np
import pytest
import torch

from curvature_gap.hessian import Hessian
from curvature_gap.spectra import outliers, spectra, spectrum_rows


def hessian(H):
    return Hessian(
        names=("A", "B"),
        shapes=((2, 1), (3, 1)),
        loss=1.0,
        grad_norm=0.0,
        batch_sha256="",
        engine="autodiff",
        H=torch.as_tensor(H, dtype=torch.float64),
    )


def test_spectra_of_a_matrix_with_known_eigenvalues():
    rng = np.random.default_rng(0)
    Q, _ = np.linalg.qr(rng.standard_normal((5, 5)))
    known = np.array([-2.0, -0.5, 0.0, 1.0, 7.0])
    H = (Q * known) @ Q.T
    found = spectra(hessian((H + H.T) / 2))
    np.testing.assert_allclose(found["total"], known, atol=1e-12)
    assert found["A"].sum() + found["B"].sum() == pytest.approx(known.sum())
    # Cauchy: a principal block's eigenvalues lie between those of the whole.
    assert known[0] <= found["B"][0] <= found["B"][-1] <= known[-1]


@pytest.mark.parametrize("count", [1, 9, 10])
def test_planted_outliers_are_counted(count):
    rng = np.random.default_rng(1)
    bulk = rng.uniform(-0.1, 1.0, 500)
    planted = np.geomspace(20, 60, count) if count > 1 else np.array([30.0])
    found, gap = outliers(np.sort(np.concatenate([bulk, planted])), classes=10)
    assert found == count
    assert gap == pytest.approx(planted.min() / bulk.max())


def test_the_gap_above_rounding_errors_is_not_one_of_outliers():
    low_rank = np.concatenate([1e-15 * np.ones(50), [1.0, 1.1, 1.2, 9.0, 10.0]])
    assert outliers(low_rank, classes=10) == (2, pytest.approx(9 / 1.2))


def test_the_scale_does_not_matter_and_nothing_positive_has_no_outliers():
    values = np.sort(np.random.default_rng(2).exponential(size=50))
    assert outliers(values, 10)[0] == outliers(1e-9 * values, 10)[0]
    n, gap = outliers(np.array([-3.0, -1.0, 2.0]), 10)
    assert n == 0
    assert np.isnan(gap)


def test_rows_are_ranked_from_the_largest():
    values, summary = spectrum_rows({"total": np.array([-1.0, 0.0, 1e-20, 1.0, 4.0])}, 1, {"run": "r", "stage": "init"})
    assert [row["eigenvalue"] for row in values[:2]] == [4.0, 1.0]
    assert [row["rank"] for row in values] == [1, 2, 3, 4, 5]
    row = summary[0]
    assert (row["largest"], row["smallest"], row["trace"]) == (4.0, -1.0, 4.0)
    assert row["negative"] == pytest.approx(0.2)
    assert row["near_zero"] == pytest.approx(0.4)


def test_a_hessian_of_blocks_alone_is_refused():
    part = hessian(np.eye(5))
    part.H = None
    part.blocks = {("A", "A"): torch.eye(2, dtype=torch.float64)}
    with pytest.raises(ValueError, match="whole matrix"):
        spectra(part)
