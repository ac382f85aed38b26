import pytest
import torch

from curvature_gap.architecture import Architecture
from curvature_gap.curvature_vs_data import curvature_rows, exponent_rows, train_on_prefixes
from curvature_gap.dynamics import hessian_at
from curvature_gap.training import TrainingSettings, train

SMALL = Architecture(image_size=6, channels=2, patch=3, classes=5, d_V=4, d_ff=7)
SETTINGS = TrainingSettings(steps=5, batch_size=7)


@pytest.fixture
def data(generator):
    labels = torch.randint(5, (31,), generator=generator)
    images = torch.randn(31, 2, 6, 6, generator=generator)
    return (images[:23], labels[:23]), (images[23:], labels[23:])


def test_each_size_is_an_ordinary_training_on_a_prefix(data, tmp_path):
    (images, labels), validation = data
    quiet = {"seed": 1, "log": lambda line: None}
    models = train_on_prefixes(SMALL, SETTINGS, *data, [3, 23], tmp_path / "u", **quiet)
    small = TrainingSettings(steps=5, batch_size=3)
    for n, settings in ((3, small), (23, SETTINGS)):
        alone = train(SMALL, settings, (images[:n], labels[:n]), validation, tmp_path / f"a{n}", **quiet)
        assert all(torch.equal(models[n][name], alone[name]) for name in alone)
    assert not torch.equal(models[3]["W_V"], models[23]["W_V"])
    with pytest.raises(ValueError, match="subset of 24 was asked for; there are 23"):
        train_on_prefixes(SMALL, SETTINGS, *data, [3, 24], tmp_path / "u", **quiet)


def test_rows_hold_the_exact_norms(data, tmp_path):
    (images, labels), validation = data
    parameters = train(SMALL, SETTINGS, *data, tmp_path / "a", seed=1, log=lambda line: None)
    batch = (images[:5], labels[:5])
    rows = {
        row["block"]: row for row in curvature_rows(parameters, batch, validation, SMALL, {"seed": 1, "n_train": 23})
    }
    H = hessian_at(parameters, *batch, SMALL, whole=True)
    eigenvalues = torch.linalg.eigvalsh(H.matrix())
    assert rows["total"]["spectral"] == pytest.approx(float(eigenvalues.abs().max()), rel=1e-9)
    assert rows["total"]["residual"] < 1e-6 * rows["total"]["spectral"]
    assert rows["W_1"]["spectral"] == pytest.approx(float(torch.linalg.matrix_norm(H["W_1", "W_1"], 2)))
    assert rows["W_1"]["loss"] == pytest.approx(H.loss)
    largest = rows.pop("M")
    assert largest["bound"] >= largest["spectral"] >= rows["total"]["spectral"]
    assert max(row["spectral"] for row in rows.values()) == rows["total"]["spectral"]


def test_exponents_are_fitted_block_by_block():
    rows = [
        {"block": block, "n_train": n, "seed": seed, "spectral": (1 + 0.01 * seed) * n**p}
        for block, p in (("total", -0.5), ("W_V", 0.25))
        for n in (10, 100, 1000)
        for seed in range(3)
    ]
    found = {row["block"]: row for row in exponent_rows(rows)}
    assert found["total"]["exponent"] == pytest.approx(-0.5)
    assert found["W_V"]["low"] < 0.25 < found["W_V"]["high"]
    assert found["W_V"]["n_points"] == 9
