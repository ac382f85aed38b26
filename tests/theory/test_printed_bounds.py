"""Transcriptions against values by hand, suprema against examples, corrections against the exact side."""

from math import sqrt

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from curvature_gap import maps
from curvature_gap.bound_cases import BOUND_CASES
from curvature_gap.bound_instances import Instances, Sizes, draw_instances
from curvature_gap.theory import printed_bounds as pb
from curvature_gap.theory.exact_norms import (
    layer_norm_hessian_blocks,
    layer_norm_jacobian_blocks,
    softmax_jacobian,
    softmax_second_derivative,
    spectral_norm,
)

ONES = pb.Norms(L=2, d_V=3, d_K=4, x=1.0, k=1.0, q=1.0, v=1.0, target=1.0, d_ff=5, w_1=1.0, w_2=1.0)


def padded(row, L):
    return torch.tensor([*row, *([0.0] * (L - len(row)))], dtype=torch.float64)


# --- Transcriptions: with all norms 1, ρ = 3 and r = √2 at L = 2, d_V = 3, d_K = 4 ---


def test_main_text_terms():
    blocks = pb.attention_blocks_main(ONES)
    assert blocks["V", "V"] == pytest.approx(4 / 3)
    assert blocks["Q", "Q"] == pytest.approx(8 / 96 + sqrt(2) * 3)
    assert blocks["V", "Q"] == pytest.approx(4 / 12 + 4 * sqrt(2) / 8 * 3)
    assert blocks["Q", "K"] == pytest.approx(8 / 96 + 4 * sqrt(2) * 3 / 12 * (6 + 1.5))
    assert pb.attention_hessian_bound(blocks) == pytest.approx(3 * max(blocks.values()))


def test_appendix_terms():
    blocks = pb.attention_blocks_appendix(ONES, rank=2.0)
    assert blocks["Q", "Q"] == pytest.approx(2 / 96 + sqrt(2) * 3)
    assert blocks["V", "Q"] == pytest.approx(2 / 12 + 2 * sqrt(2) / (4 * sqrt(12)) * 3)
    assert blocks["Q", "K"] == pytest.approx(2 / 96 + 2 * sqrt(2) * 3 / (6 * sqrt(12)) * (6 + 1.5))
    assert pb.attention_blocks_appendix(ONES, rank=0.0)["V", "Q"] == pytest.approx(2 / 12)


def test_block_pieces():
    Phi, G = pb.attention_second_printed(ONES), pb.attention_jacobian_printed(ONES)
    assert Phi["Q", "Q"] == pytest.approx(12 / 24)
    assert Phi["V", "Q"] == pytest.approx(2 / (4 * sqrt(12)))
    assert Phi["Q", "K"] == pytest.approx(12 / 24 + 2 / (4 * sqrt(12)))
    assert (G["V"], G["Q"]) == (2, pytest.approx(1 / 4))
    assert pb.xi_21_printed(ONES) == pytest.approx(sqrt(5))
    assert pb.residual_jacobian_printed(ONES) == 2
    assert pb.feed_forward_printed(ONES, 1.0) == pytest.approx(sqrt(2))
    assert pb.block_sum_printed(ONES) == pytest.approx(sqrt(6) * (1 + sqrt(2)))
    assert pb.layer_norm_jacobian_printed(2.0, 1.0, 4) == 1 + 4 / 2
    assert pb.layer_norm_hessian_printed(2.0, 1.0, 1, 4) == pytest.approx(2 * 1.5 + 4 / 2 + 24 / 4)


def test_the_explicit_bound_leaves_out_the_pairs_that_are_not_printed():
    printed = pb.explicit_block_norms_printed(ONES, 1.0, 1.0, 1.0)
    corrected = pb.explicit_block_norms_corrected(ONES, 1.0, 1.0, 1.0)
    assert set(corrected.xi) - set(printed.xi) == {(k, i) for k in "KQV" for i in "12"}
    assert len(corrected.xi) == 25


# --- Suprema, attained ---


@pytest.mark.parametrize("L", [2, 3, 7])
def test_softmax_jacobian_attains_one_half(L):
    A = padded([0.5, 0.5], L)
    assert float(spectral_norm(softmax_jacobian(A))) == pytest.approx(pb.softmax_jacobian_corrected(L), abs=1e-12)


@pytest.mark.parametrize("L", [2, 3, 7])
def test_softmax_second_derivative_attains_its_supremum(L):
    A = padded([1 / 2 + 1 / sqrt(12), 1 / 2 - 1 / sqrt(12)], L)
    norm = float(spectral_norm(softmax_second_derivative(A).flatten(-3, -2)))
    assert norm == pytest.approx(pb.softmax_second_derivative_sharp(), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-30, 30), min_size=2, max_size=7))
def test_no_softmax_row_exceeds_the_suprema(logits):
    A = maps.softmax(torch.tensor([logits], dtype=torch.float64))[0]
    assert float(spectral_norm(softmax_jacobian(A))) <= pb.SOFTMAX_JACOBIAN_SUP + 1e-12
    norm = float(spectral_norm(softmax_second_derivative(A).flatten(-3, -2)))
    assert norm <= pb.SOFTMAX_SECOND_SUP + 1e-12


def test_one_token_has_no_softmax_derivative():
    assert pb.softmax_jacobian_corrected(1) == 0


@pytest.mark.parametrize("L", [3, 5])
def test_attention_matrix_attains_the_root_of_L(L):
    A = torch.zeros(L, L, dtype=torch.float64)
    A[:, 1] = 1
    assert float(spectral_norm(A)) == pytest.approx(pb.attention_matrix_sharp(L), abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([2, 3, 4, 5, 7]), st.floats(-3, 3))
def test_layer_norm_norms_are_exactly_as_stated(seed, n, exponent):
    generator = torch.Generator().manual_seed(seed)
    X = 10**exponent * torch.randn(1, 3, n, generator=generator, dtype=torch.float64)
    s = X.std(dim=-1, correction=0).amin()
    J = spectral_norm(layer_norm_jacobian_blocks(X)).amax()
    H = spectral_norm(layer_norm_hessian_blocks(X).flatten(-3, -2)).amax()
    torch.testing.assert_close(J * s, pb.layer_norm_jacobian_exact(s, n) * s, rtol=0, atol=1e-8)
    torch.testing.assert_close(H * s**2, pb.layer_norm_hessian_exact(s, n) * s**2, rtol=0, atol=1e-8)


@pytest.mark.parametrize("n", [3, 5, 16])
def test_one_centred_row_violates_the_lemma_as_it_defines_sigma(n):
    x = torch.arange(n, dtype=torch.float64) - (n - 1) / 2
    norm = torch.linalg.vector_norm(x)
    J = torch.linalg.matrix_norm(torch.func.jacrev(maps.layer_norm)(x), 2)
    assert float(J / pb.layer_norm_jacobian_printed(norm, norm, n)) == pytest.approx(n / (sqrt(n) + 1))
    assert float(J / pb.layer_norm_jacobian_printed(norm, norm / sqrt(n), n)) < 1


# --- TAB-2 ---


@pytest.mark.parametrize(("m", "n"), [(2, 5), (5, 3), (7, 7)])
@pytest.mark.parametrize("larger", pb.NORM_NAMES)
@pytest.mark.parametrize("smaller", pb.NORM_NAMES)
def test_every_norm_constant_is_attained(larger, smaller, m, n):
    if larger == smaller:
        with pytest.raises(ValueError, match="two different norms"):
            pb.norm_constant(larger, smaller, m, n, 1)
        return
    A = pb.attaining_matrix(larger, smaller, m, n)
    c = pb.norm_constant(larger, smaller, m, n, int(torch.linalg.matrix_rank(A)))
    assert float(pb.matrix_norm(A, larger)) == pytest.approx(c * float(pb.matrix_norm(A, smaller)), rel=1e-12)


def test_unknown_norms_are_refused():
    with pytest.raises(ValueError, match="nuclear"):
        pb.norm_constant("nuclear", "2", 2, 3, 1)


# --- Corrections: never below the exact side ---

CORRECTED = [id for id, case in BOUND_CASES.items() if case.corrected is not None]


@pytest.mark.parametrize("id", CORRECTED)
@settings(max_examples=4, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(seed=st.integers(0, 10**6), L=st.integers(1, 5), d_V=st.integers(2, 4), d_K=st.integers(1, 2))
def test_corrected_bounds_are_not_below_the_exact_side(id, seed, L, d_V, d_K):
    case = BOUND_CASES[id]
    if id.startswith(("L3", "T6_explicit", "T6_xi")):
        d_V += 1  # with two features LayerNorm's derivatives are zero and their computed norms nothing but rounding
    drawn = draw_instances(Sizes(L, d_V, d_K, 2), 20, torch.Generator().manual_seed(seed))
    exact, bound = case.corrected.sides(Instances(drawn))
    usable = torch.isfinite(exact) & torch.isfinite(bound)
    # Equalities (LayerNorm) are met up to rounding.
    floor = 1e-12 * exact[usable].abs().max() if usable.any() else 0
    assert (exact[usable] <= bound[usable] * (1 + 1e-9) + floor).all()


def test_bounds_accept_plain_numbers_and_tensors():
    tensors = pb.Norms(2, 3, 4, *(torch.ones(5, dtype=torch.float64) for _ in range(4)), target=1.0)
    for blocks in (pb.attention_blocks_main, pb.attention_blocks_corrected):
        number, tensor = pb.attention_hessian_bound(blocks(ONES)), pb.attention_hessian_bound(blocks(tensors))
        torch.testing.assert_close(tensor, torch.full((5,), float(number), dtype=torch.float64))
