"""The block: all 25 pairs for ReLU and smooth activations, learned norms, ε, biases; the printed ξ."""

from itertools import product

import pytest
import torch

from curvature_gap import maps
from curvature_gap.matrix_calculus import ShapeMismatchError, autodiff_hessian, autodiff_jacobian, transpose_hessian
from curvature_gap.theory import block as bl


def draw(randn, L=2, d_V=3, d_K=5, d_ff=7):
    weights = {"W_Q": randn(d_V, d_K), "W_K": randn(d_V, d_K), "W_V": randn(d_V, d_V)}
    return randn(L, d_V), weights | {"W_1": randn(d_V, d_ff), "W_2": randn(d_ff, d_V)}


def learned(randn, d_V=3, d_ff=7):
    sizes = {"b_1": d_ff, "b_2": d_V} | {f"LN{i}_{name}": d_V for i in (1, 2) for name in ("gamma", "beta")}
    return {name: randn(n, 1)[:, 0] for name, n in sizes.items()}


def hessian_by_autodiff(X, w, i, j, **options):
    if i == j:
        return autodiff_hessian(lambda v: maps.block(X, {**w, i: v}, **options), w[i])
    return autodiff_hessian(lambda v, u: maps.block(X, {**w, i: v, j: u}, **options), w[i], w[j])


def close(value, reference):
    torch.testing.assert_close(value, reference, rtol=0, atol=1e-10 * max(reference.abs().max().item(), 1e-300))


@pytest.mark.parametrize(("activation", "eps", "with_learned"), [("relu", 0.0, False), ("gelu", 0.1, True)])
def test_all_jacobians_and_all_25_hessians_match_autodiff(activation, eps, with_learned, randn):
    X, w = draw(randn)
    if with_learned:
        w |= learned(randn)
    options = {"activation": activation, "eps": eps}
    b = bl.Block(X, w, **options)
    torch.testing.assert_close(b.Z, maps.block(X, w, **options))
    for name in bl.WEIGHTS:
        close(b.jacobian(name), autodiff_jacobian(lambda v, n=name: maps.block(X, {**w, n: v}, **options), w[name]))
    for i, j in product(bl.WEIGHTS, repeat=2):
        close(b.hessian(i, j), hessian_by_autodiff(X, w, i, j, **options))


@pytest.mark.parametrize("pair", [("W_V", "W_Q"), ("W_1", "W_K"), ("W_1", "W_1")])
@pytest.mark.parametrize("sizes", [(3, 5, 2, 7), (5, 3, 7, 2)])
def test_other_uneven_sizes(sizes, pair, randn):
    X, w = draw(randn, *sizes)
    close(bl.block_hessian(X, w, *pair, activation="tanh"), hessian_by_autodiff(X, w, *pair, activation="tanh"))
    close(bl.block_jacobian(X, w, pair[0]), bl.Block(X, w).jacobian(pair[0]))


def test_dense_pieces_agree_with_the_token_by_token_ones(randn):
    b = bl.Block(*draw(randn))
    torch.testing.assert_close(b.J_SY, torch.block_diag(*b._feed_forward_rows[0]))
    torch.testing.assert_close(b.J_Z, torch.block_diag(*b._second_norm_rows[0]))
    assert b.H_Y.shape == b.H_Z.shape == (36, 6)


def test_the_blocks_of_a_scalar_loss_are_each_others_transposes(randn):
    X, w = draw(randn)
    b, gradient = bl.Block(X, w), randn(6, 1)[:, 0]
    for i, j in (("W_1", "W_Q"), ("W_V", "W_K")):
        H_ij, H_ji = (b.hessian(*pair) for pair in ((i, j), (j, i)))
        assert H_ij.shape != H_ji.shape
        close(transpose_hessian(H_ji, w[j].numel()), H_ij)
        scalar = [(gradient @ H.reshape(6, -1)).reshape(-1, H.shape[1]) for H in (H_ij, H_ji)]
        close(scalar[0], scalar[1].T)


def test_printed_xi_12_is_xi_21(randn):
    b = bl.Block(*draw(randn))
    close(bl.xi_12_as_printed(b), b.xi("W_2", "W_1"))
    close(bl.xi_12_corrected(b), b.xi("W_1", "W_2"))
    assert (bl.xi_12_as_printed(b) - b.xi("W_1", "W_2")).abs().max() > 0.1


def test_printed_products_that_do_not_fit(randn):
    b = bl.Block(*draw(randn))
    with pytest.raises(ShapeMismatchError):
        bl.xi_21_as_printed(b)
    for name in bl.ATTENTION_WEIGHTS:
        with pytest.raises(ShapeMismatchError):
            bl.xi_1k_as_printed(b, name)
        close(bl.xi_1k_corrected(b, name), b.xi("W_1", name))
    with pytest.raises(ShapeMismatchError):
        bl.block_jacobian_as_printed(b, "W_1", b.X)


def test_smooth_activations_need_the_term_the_paper_drops(randn):
    b = bl.Block(*draw(randn), activation="gelu")
    printed = bl.xi_kl_as_printed(b, "W_V", "W_Q", b.Phi("W_V", "W_Q"))
    assert (printed - b.xi("W_V", "W_Q")).abs().max() > 1e-3
    assert b.xi("W_1", "W_1").abs().max() > 1e-3


def test_illegal_input_is_named(randn):
    X, w = draw(randn)
    with pytest.raises(ValueError, match="W_2 is missing"):
        bl.Block(X, {name: W for name, W in w.items() if name != "W_2"})
    with pytest.raises(ValueError, match="weights are W_Q"):
        bl.Block(X, w).hessian("W_Q", "W_O")
    with pytest.raises(ValueError, match="constant row"):
        bl.Block(torch.ones_like(X), w | {"W_V": torch.zeros(3, 3, dtype=torch.float64)}).hessian("W_1", "W_1")
