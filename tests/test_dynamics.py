import pytest
import torch

from curvature_gap.architecture import Architecture
from curvature_gap.dynamics import diagonal_pairs, dynamics_rows, hessian_at, parameter_norms
from curvature_gap.vit import initial_parameters

SMALL = Architecture(image_size=6, channels=2, patch=3, classes=5, d_V=4, d_ff=7)


@pytest.fixture
def problem(randn, generator):
    parameters = initial_parameters(SMALL, torch.Generator().manual_seed(1))
    return parameters, randn(3, 2, 6, 6), torch.randint(5, (3,), generator=generator)


def test_diagonal_blocks_are_those_of_the_whole_matrix(problem):
    whole = hessian_at(*problem, SMALL, whole=True)
    diagonal = hessian_at(*problem, SMALL)
    assert whole.certificate is not None
    assert not diagonal.holds("W_Q", "W_K")
    for pair in diagonal_pairs(whole.names):
        torch.testing.assert_close(diagonal[pair], whole[pair], rtol=1e-10, atol=1e-12)


def test_pairs_are_the_diagonal_and_each_layer_norm_with_itself():
    names = ["embed", "block1_LN1_gamma", "block1_LN1_beta", "block2_LN2_gamma", "block2_LN2_beta"]
    assert diagonal_pairs(names) == [
        *((name, name) for name in names),
        ("block1_LN1_gamma", "block1_LN1_beta"),
        ("block2_LN2_gamma", "block2_LN2_beta"),
    ]


def test_parameter_norms():
    W = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    norms = parameter_norms({"W_Q": W, "LN1_gamma": torch.tensor([2.0, 1.0]), "LN1_beta": torch.tensor([2.0, 0.0])})
    assert norms["W_Q"] == pytest.approx((4, 5))
    assert norms["LN1_gamma"] == pytest.approx((5**0.5,) * 2)
    assert norms["LN1"] == pytest.approx((3, 3))


def test_rows_of_one_step(problem):
    rows = dynamics_rows(hessian_at(*problem, SMALL), problem[0], run="mnist_seed0", seed=0, step=20, steps=60)
    by_block = {row["block"]: row for row in rows}
    assert {"W_Q", "W_1", "LN1", "LN2", "LN1_gamma", "classifier"} <= set(by_block)
    assert len(by_block) == len(rows)
    row = by_block["W_V"]
    assert (row["stage"], row["step"]) == ("step_00020", 20)
    expected = torch.linalg.matrix_norm(hessian_at(*problem, SMALL)["W_V", "W_V"], 2)
    assert row["hessian_spectral"] == pytest.approx(float(expected))
    assert row["parameter_frobenius"] == pytest.approx(float(problem[0]["W_V"].double().norm()))
    assert row["hessian_frobenius"] >= row["hessian_spectral"]
