import pytest
import torch

from curvature_gap.architecture import Architecture
from curvature_gap.autodiff_hessian import (
    autodiff_blocks,
    autodiff_hessian,
    default_chunk,
    graph_bytes,
    hvp_double_backward,
    hvp_forward_over_reverse,
    upper_pairs,
)
from curvature_gap.batch_loss import batch_loss, flatten, unflatten
from curvature_gap.vit import ViT

SMALL = Architecture(image_size=6, channels=1, patch=3, classes=3, d_V=5, d_ff=7)
VARIANTS = {
    "pinned": SMALL,
    "biased": Architecture(4, 2, 2, 3, d_V=4, d_ff=6, bias=True, output_projection=False, positions="learned"),
    "deep": Architecture(4, 1, 2, 3, d_V=4, d_ff=5, depth=2, heads=2, norm="pre", mask="causal", activation="gelu"),
}


def problem(architecture, generator, b=3):
    shape = (b, architecture.channels, architecture.image_size, architecture.image_size)
    images = torch.randn(shape, generator=generator, dtype=torch.float64)
    labels = torch.randint(architecture.classes, (b,), generator=generator)
    return batch_loss(ViT(architecture, seed=1), images, labels)


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_forward_over_reverse_column_by_column(name, generator):
    loss = problem(VARIANTS[name], generator)
    H = autodiff_hessian(loss, loss.parameters)

    def product(v):
        return flatten(hvp_forward_over_reverse(loss, loss.parameters, unflatten(v, loss.parameters)))

    columns = torch.func.vmap(product)(torch.eye(loss.n_parameters, dtype=torch.float64))
    torch.testing.assert_close(H, columns.T, rtol=0, atol=1e-13 * float(H.abs().max()))


def test_both_halves_agree_and_so_do_all_chunks(generator):
    loss = problem(SMALL, generator)
    whole = autodiff_hessian(loss, loss.parameters, symmetric=False, chunk=1)
    scale = float(whole.abs().max())
    torch.testing.assert_close(whole, whole.T, rtol=0, atol=1e-14 * scale)
    for chunk in (3, 50):
        H = autodiff_hessian(loss, loss.parameters, chunk=chunk)
        torch.testing.assert_close(H, whole, rtol=0, atol=1e-14 * scale)


def test_a_quadratic_has_its_matrix_and_unused_or_linear_parts_are_zero(randn):
    A = randn(7, 7)
    parameters = {"x": randn(2, 2), "y": randn(3), "unused": randn(2), "linear": randn(4)}

    def loss(p):
        z = torch.cat([p["x"].reshape(-1), p["y"]])
        return z @ A @ z / 2 + p["linear"].sum()

    H = autodiff_hessian(loss, parameters)
    expected = torch.zeros(13, 13, dtype=torch.float64)
    expected[:7, :7] = (A + A.T) / 2
    torch.testing.assert_close(H, expected)
    torch.testing.assert_close(autodiff_hessian(lambda p: p["linear"].sum(), parameters), torch.zeros_like(expected))


def test_layer_norm_with_a_learned_weight(generator, randn):
    # torch.func.hessian is wrong here; both halves of ours, and a product by another method, must agree.
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.LayerNorm(5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    loss = batch_loss(model, randn(6, 4), torch.randint(3, (6,), generator=generator))
    H = autodiff_hessian(loss, loss.parameters, symmetric=False)
    scale = float(H.abs().max())
    torch.testing.assert_close(H, H.T, rtol=0, atol=1e-14 * scale)
    v = randn(loss.n_parameters)
    product = flatten(hvp_double_backward(loss, loss.parameters, unflatten(v, loss.parameters)))
    torch.testing.assert_close(H @ v, product, rtol=0, atol=1e-13 * scale * 10)


def test_chosen_pairs_rows_and_out(generator):
    loss = problem(SMALL, generator)
    whole = autodiff_blocks(loss, loss.parameters)
    pair = ("W_K", "W_1")
    out = torch.full((11, 35), float("nan"), dtype=torch.float64)
    part = autodiff_blocks(loss, loss.parameters, [pair], rows={pair: slice(3, 14)}, out={pair: out})
    assert part[pair] is out
    torch.testing.assert_close(out, whole[pair][3:14])
    # A pair below the diagonal is computed as asked.
    lower = autodiff_blocks(loss, loss.parameters, [("W_1", "W_K")])
    torch.testing.assert_close(lower["W_1", "W_K"], whole[pair].T)


def test_progress_counts_every_row(generator):
    loss = problem(SMALL, generator)
    seen = []
    autodiff_blocks(loss, loss.parameters, progress=lambda done, total: seen.append((done, total)), chunk=4)
    assert seen[-1] == (loss.n_parameters, loss.n_parameters)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_bad_input(randn):
    parameters = {"x": randn(3)}
    with pytest.raises(ValueError, match=r"must be a scalar; it has shape \(3,\)"):
        autodiff_hessian(lambda p: p["x"], parameters)
    with pytest.raises(ValueError, match="No parameter is called 'y'; there are x"):
        autodiff_blocks(lambda p: p["x"].sum(), parameters, [("x", "y")])
    with pytest.raises(ValueError, match=r"has shape \(2, 2\); the block needs \(3, 3\)"):
        autodiff_blocks(lambda p: (p["x"] ** 2).sum(), parameters, out={("x", "x"): randn(2, 2)})


def test_chunks_shrink_as_the_graph_grows(generator):
    small, large = (problem(SMALL, generator, b) for b in (2, 8))
    assert graph_bytes(small, small.parameters) < graph_bytes(large, large.parameters)
    assert default_chunk(10**9, "cpu") == 1
    assert default_chunk(2**21, "cpu") == 8
    assert upper_pairs(["a", "b"]) == [("a", "a"), ("a", "b"), ("b", "b")]
