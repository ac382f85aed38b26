import numpy as np
import pytest
import torch
from torch import nn

from curvature_gap.architecture import Architecture
from curvature_gap.autodiff_hessian import autodiff_hessian, block_slices
from curvature_gap.batch_loss import batch_loss
from curvature_gap.lanczos import (
    block_spectral_norm,
    extreme_eigenvalues,
    hessian_product,
    lanczos_quadrature,
    per_sample_hessian_norms,
    smoothed_density,
)
from curvature_gap.vit import ViT

DEEP = Architecture(image_size=4, channels=1, patch=2, classes=3, d_V=4, d_ff=5, depth=2, heads=2, bias=True)


@pytest.fixture
def batch(randn, generator):
    return randn(5, 1, 4, 4), torch.randint(3, (5,), generator=generator)


@pytest.fixture
def problem(batch):
    return batch_loss(ViT(DEEP, seed=4), *batch)


@pytest.fixture(scope="module")
def matrix():
    # The same generator, and so the same batch, as `problem` has.
    generator = torch.Generator().manual_seed(20251016)
    images = torch.randn(5, 1, 4, 4, generator=generator, dtype=torch.float64)
    loss = batch_loss(ViT(DEEP, seed=4), images, torch.randint(3, (5,), generator=generator))
    return autodiff_hessian(loss, loss.parameters)


@pytest.mark.parametrize("keep_bytes", [0, 2**30])
@pytest.mark.parametrize("samples", [2, 5, 8])
def test_product_is_the_matrix_times_the_vector(keep_bytes, samples, problem, matrix, randn):
    product = hessian_product(problem, samples=samples, keep_bytes=keep_bytes)
    for _ in range(2):
        v = randn(len(matrix))
        torch.testing.assert_close(product(v), matrix @ v, rtol=0, atol=1e-12)


def test_product_with_a_block(problem, matrix, randn):
    where = block_slices({name: p.numel() for name, p in problem.parameters.items()})
    row, column = "block1_W_Q", "block2_W_1"
    block = matrix[where[row], where[column]]
    v = randn(block.shape[1])
    torch.testing.assert_close(hessian_product(problem, (row, column), samples=3)(v), block @ v, rtol=0, atol=1e-13)
    for pair in [(row, column), (column, column)]:
        found = block_spectral_norm(problem, pair, tolerance=1e-10)
        exact = np.linalg.norm(matrix[where[pair[0]], where[pair[1]]].numpy(), 2)
        assert found.norm == pytest.approx(exact, rel=1e-9)
        assert abs(found.norm - exact) <= found.residual + 1e-14
        assert found.n_products > 0


@pytest.mark.parametrize("k", [1, 4])
def test_extreme_eigenvalues_lie_within_their_residuals(k, problem, matrix):
    eigenvalues = torch.linalg.eigvalsh(matrix).numpy()
    expected = np.sort(eigenvalues[np.argsort(-np.abs(eigenvalues))[:k]])
    found = extreme_eigenvalues(hessian_product(problem), len(matrix), k, tolerance=1e-4)
    assert (np.abs(found.values - expected) <= found.residuals + 1e-13).all()
    tight = extreme_eigenvalues(hessian_product(problem), len(matrix), k, tolerance=1e-12)
    np.testing.assert_allclose(tight.values, expected, rtol=1e-10)
    assert (tight.residuals < 1e-9).all()
    assert tight.n_products >= found.n_products


def test_nearly_all_eigenvalues_of_a_small_matrix(randn):
    A = randn(5, 5)
    A = A + A.T
    np.testing.assert_allclose(extreme_eigenvalues(A.__matmul__, 5, 5).values, np.linalg.eigvalsh(A.numpy()))
    with pytest.raises(ValueError, match=r"k must lie in 1 … 5, got 6"):
        extreme_eigenvalues(A.__matmul__, 5, 6)


def test_per_sample_norms_are_those_of_each_samples_matrix(batch, problem):
    exact = []
    for i in range(5):
        alone = problem.samples(i, i + 1)
        exact.append(float(torch.linalg.eigvalsh(autodiff_hessian(alone, alone.parameters)).abs().max()))
    exact = torch.tensor(exact, dtype=torch.float64)
    norms, residuals = per_sample_hessian_norms(ViT(DEEP, seed=4), *batch, iterations=40, tolerance=1e-10)
    torch.testing.assert_close(norms, exact, rtol=1e-9, atol=0)
    # After few steps the error bar is wide, and honest.
    rough, bars = per_sample_hessian_norms(ViT(DEEP, seed=4), *batch, iterations=6)
    assert (bars > residuals).all()
    assert ((rough - exact).abs() <= bars).all()
    assert (rough <= exact * (1 + 1e-12)).all()


def test_chunks_do_not_change_per_sample_norms(batch, generator):
    model = ViT(DEEP, seed=4)
    state = generator.get_state()
    together = per_sample_hessian_norms(model, *batch, iterations=12, generator=generator)
    generator.set_state(state)
    apart = per_sample_hessian_norms(model, *batch, iterations=12, generator=generator, memory=1)
    torch.testing.assert_close(together, apart, rtol=1e-8, atol=1e-12)


def test_more_steps_than_the_hessian_has_rank(randn):
    # One linear layer: each sample's Hessian has rank 2, so Lanczos exhausts its space at once.
    model = nn.Linear(4, 3, bias=False)
    images, labels = randn(3, 4), torch.tensor([0, 1, 2])
    norms, residuals = per_sample_hessian_norms(model, images, labels, iterations=10, tolerance=0.0)
    p = torch.softmax(images @ model.weight.detach().double().T, dim=1)
    inner = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    expected = torch.linalg.eigvalsh(inner)[:, -1] * images.square().sum(dim=1)
    torch.testing.assert_close(norms, expected)
    assert (residuals < 1e-12).all()


def test_per_sample_norms_through_a_fused_layer_norm(randn):
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))
    images, labels = randn(3, 4), torch.tensor([0, 1, 2])
    norms, _ = per_sample_hessian_norms(model, images, labels, iterations=58, tolerance=1e-10)
    problem = batch_loss(model, images, labels)
    for i in range(3):
        alone = problem.samples(i, i + 1)
        H = autodiff_hessian(alone, alone.parameters, chunk=1)
        assert float(norms[i]) == pytest.approx(float(torch.linalg.eigvalsh(H).abs().max()), rel=1e-9)


def test_quadrature_reproduces_moments(randn, generator):
    A = randn(7, 7)
    A = A + A.T
    nodes, weights = lanczos_quadrature(A.__matmul__, 7, probes=3, steps=20, generator=generator)
    assert weights.sum() == pytest.approx(1)
    eigenvalues = np.linalg.eigvalsh(A.numpy())
    assert nodes.min() >= eigenvalues.min() - 1e-10
    # A full run of one probe has all eigenvalues as its nodes.
    np.testing.assert_allclose(np.sort(nodes[:7]), eigenvalues, atol=1e-10)


def test_density_integrates_to_one_even_of_a_single_eigenvalue():
    for nodes in (np.array([2.0, 2.0]), np.array([-1.0, 0.0, 5.0])):
        grid, density = smoothed_density(nodes, np.full(len(nodes), 1 / len(nodes)))
        assert np.trapezoid(density, grid) == pytest.approx(1, abs=1e-4)


def test_bad_input(batch):
    with pytest.raises(ValueError, match="iterations must be at least 1, got 0"):
        per_sample_hessian_norms(ViT(DEEP), *batch, iterations=0)
