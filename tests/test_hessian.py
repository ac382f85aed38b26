import numpy as np
import pytest
import torch

from curvature_gap.certificate import Certificate
from curvature_gap.hessian import Hessian

NAMES = ("A", "b", "C")
SHAPES = ((2, 3), (3, 1), (5, 2))
CERTIFICATE = Certificate(1e-16, 1e-15, "double_backward", 8, 1e-9, 1e-6, 8, 2, "float64")


@pytest.fixture
def hessian(randn):
    A = randn(19, 19)
    return Hessian(NAMES, SHAPES, 2.5, 0.25, "ab" * 32, "closed_form", "mse", H=A + A.T, certificate=CERTIFICATE)


@pytest.fixture
def diagonal(hessian):
    blocks = {(name, name): hessian[name, name].clone() for name in NAMES}
    return Hessian(NAMES, SHAPES, 2.5, 0.25, "", "autodiff", blocks=blocks, operator=hessian.H.__matmul__)


def test_blocks_by_name(hessian):
    assert hessian.offsets == [0, 6, 9, 19]
    assert torch.equal(hessian["b", "C"], hessian.H[6:9, 9:19])
    assert torch.equal(hessian["C", "b"], hessian["b", "C"].T)
    with pytest.raises(KeyError, match="No block is called 'D'; there are A, b, C"):
        hessian["A", "D"]


def test_norms_trace_eigenvalues(hessian):
    H = hessian.to_numpy()
    eigenvalues = np.linalg.eigvalsh(H)
    assert hessian.spectral_norms()["A", "C"] == pytest.approx(np.linalg.norm(H[:6, 9:], 2), rel=1e-13)
    assert hessian.frobenius_norms()["b", "b"] == pytest.approx(np.linalg.norm(H[6:9, 6:9]), rel=1e-13)
    assert hessian.trace() == pytest.approx(np.trace(H), rel=1e-13)
    np.testing.assert_allclose(hessian.eigenvalues().numpy(), eigenvalues, rtol=1e-12)
    largest = sorted(sorted(eigenvalues, key=abs)[-4:])
    np.testing.assert_allclose(hessian.eigenvalues(4).numpy(), largest, rtol=1e-12)
    with pytest.raises(ValueError, match=r"k must lie in 1 … 19, got 0"):
        hessian.eigenvalues(0)


def test_lanczos_stands_in_where_there_is_no_matrix(hessian, diagonal):
    np.testing.assert_allclose(diagonal.eigenvalues(3).numpy(), hessian.eigenvalues(3).numpy(), rtol=1e-10)
    grid, exact = hessian.spectral_density(width=1.0)
    # With as many steps as rows the quadrature of one probe is exact for that probe; many probes average.
    other, density = diagonal.spectral_density(width=1.0, probes=200, steps=19)
    assert np.trapezoid(exact, grid) == pytest.approx(1, abs=1e-3)
    assert np.trapezoid(density, other) == pytest.approx(1, abs=1e-3)
    assert np.abs(np.interp(grid, other, density) - exact).max() < 0.2 * exact.max()
    diagonal.operator = None
    with pytest.raises(ValueError, match="no model is attached"):
        diagonal.eigenvalues(3)


@pytest.mark.parametrize("mmap", [False, True])
def test_file_and_back(hessian, tmp_path, mmap):
    path = tmp_path / "new folder" / "init.npz"
    hessian.save(path)
    assert list(path.parent.iterdir()) == [path]
    back = Hessian.load(path, mmap=mmap)
    assert torch.equal(back.matrix(), hessian.matrix())
    for field in ("names", "shapes", "loss", "grad_norm", "batch_sha256", "engine", "loss_name", "certificate"):
        assert getattr(back, field) == getattr(hessian, field)


def test_file_is_as_designed(hessian, tmp_path):
    hessian.save(tmp_path / "h.npz")
    with np.load(tmp_path / "h.npz", allow_pickle=False) as file:
        assert file["H"].dtype == np.float64
        assert file["offsets"].dtype == file["shapes"].dtype == np.int64
        assert file["shapes"].shape == (3, 2)
        assert file["names"].tolist() == list(NAMES)
        assert float(file["certificate_hvp_error"]) == CERTIFICATE.hvp_error


def test_some_blocks_and_back(diagonal, tmp_path):
    diagonal.save(tmp_path / "h.npz")
    back = Hessian.load(tmp_path / "h.npz")
    assert back.H is None
    assert back.certificate is None
    assert back.held().keys() == diagonal.held().keys()
    assert torch.equal(back["b", "b"], diagonal["b", "b"])
    with pytest.raises(KeyError, match="was not computed"):
        back["A", "b"]


def test_damaged_and_foreign_files_are_named(hessian, tmp_path):
    path = tmp_path / "h.npz"
    hessian.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"h.npz is damaged"):
        Hessian.load(path)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    path.write_bytes(bytes(flipped))
    with pytest.raises(ValueError, match=r"h.npz is damaged"):
        Hessian.load(path)
    np.savez(path, H=np.zeros((2, 2)))
    with pytest.raises(ValueError, match="lacks names, offsets"):
        Hessian.load(path)
    np.savez(path, **(hessian.metadata() | {"H": np.zeros((2, 2))}))
    with pytest.raises(ValueError, match="inconsistent"):
        Hessian.load(path)
    with pytest.raises(FileNotFoundError):
        Hessian.load(tmp_path / "absent.npz")


def test_plot_marks_the_blocks(hessian):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    ax = hessian.plot()
    assert [label.get_text() for label in ax.get_xticklabels()] == list(NAMES)
    assert len(ax.lines) == 4
