"""Attention: all 16 second-derivative pairs, rectangular values, the paper's operators."""

from itertools import pairwise, product

import pytest
import torch

from curvature_gap import maps
from curvature_gap.matrix_calculus import ShapeMismatchError, autodiff_hessian, autodiff_jacobian, transpose_hessian
from curvature_gap.theory import attention as at

SIZES = [(2, 3, 5), (3, 5, 2), (5, 3, 7)]


def draw(L, d_V, d_K, randn, d_out=None):
    return {"X": randn(L, d_V), "W_Q": randn(d_V, d_K), "W_K": randn(d_V, d_K), "W_V": randn(d_V, d_out or d_V)}


def hessian_by_autodiff(arguments, first, second):
    if first == second:
        return autodiff_hessian(lambda a: maps.attention(**{**arguments, first: a}), arguments[first])
    f = lambda a, b: maps.attention(**{**arguments, first: a, second: b})  # noqa: E731
    return autodiff_hessian(f, arguments[first], arguments[second])


def close(value, reference):
    torch.testing.assert_close(value, reference, rtol=0, atol=1e-10 * max(reference.abs().max().item(), 1e-300))


@pytest.mark.parametrize("sizes", SIZES)
def test_jacobians_match_autodiff(sizes, randn):
    a = draw(*sizes, randn)
    for name in at.ARGUMENTS:
        J = autodiff_jacobian(lambda w, name=name: maps.attention(**{**a, name: w}), a[name])
        close(at.attention_jacobian(**a, name=name), J)


@pytest.mark.parametrize("sizes", SIZES[:2])
def test_all_sixteen_hessians_match_autodiff(sizes, randn):
    a = draw(*sizes, randn)
    for first, second in product(at.ARGUMENTS, repeat=2):
        close(at.attention_hessian(**a, first=first, second=second), hessian_by_autodiff(a, first, second))


def test_values_may_be_rectangular(randn):
    a = draw(2, 3, 5, randn, d_out=4)

    def F(W_K, W_V):
        return maps.attention_matrix(a["X"], a["W_Q"], W_K)[0] @ a["X"] @ W_V

    close(at.attention_jacobian(**a, name="W_V"), autodiff_jacobian(lambda W: F(a["W_K"], W), a["W_V"]))
    H = autodiff_hessian(F, a["W_K"], a["W_V"])
    close(at.attention_hessian(**a, first="W_K", second="W_V"), H)


def test_second_derivatives_commute_slice_by_slice(randn):
    a = draw(2, 3, 5, randn)
    for first, second in pairwise(at.ARGUMENTS):
        H = at.attention_hessian(**a, first=first, second=second)
        close(transpose_hessian(H, a[first].numel()), at.attention_hessian(**a, first=second, second=first))


def test_corrected_operator_forms_match_the_direct_ones(randn):
    a = draw(2, 3, 5, randn)
    close(at.G_K_corrected(**a), at.attention_jacobian(**a, name="W_K"))
    for first, second in at.PAIRS_AS_PRINTED:
        direct = at.attention_hessian(**a, first=first, second=second)
        close(at.Phi_corrected(**a, first=first, second=second), direct)


def test_printed_Phi_keeps_the_factor_of_the_loss(randn):
    a = draw(2, 3, 5, randn)
    for first, second in (("W_Q", "W_Q"), ("W_V", "W_Q")):
        printed, corrected = (f(**a, first=first, second=second) for f in (at.Phi_as_printed, at.Phi_corrected))
        close(printed * (2 * 3) / 2, corrected)
    with pytest.raises(ShapeMismatchError):
        at.Phi_as_printed(**a, first="W_Q", second="W_K")


def test_printed_G_K_holds_where_the_two_widths_agree_and_not_elsewhere(randn):
    square, uneven = draw(2, 3, 3, randn), draw(2, 3, 5, randn)
    close(at.G_K_as_printed(**square), at.attention_jacobian(**square, name="W_K"))
    G_K = at.attention_jacobian(**uneven, name="W_K")
    assert (at.G_K_as_printed(**uneven) - G_K).abs().max() > 0.1 * G_K.abs().max()


def test_Phi_VQ_does_not_vanish_under_uniform_attention(randn):
    """Against the remark in the proof of T5."""
    a = draw(2, 3, 5, randn) | {"W_Q": torch.zeros(3, 5, dtype=torch.float64)}
    assert (maps.attention_matrix(a["X"], a["W_Q"], a["W_K"]) == 1 / 2).all()
    H = hessian_by_autodiff(a, "W_V", "W_Q")
    assert H.abs().max() > 0.1
    close(at.attention_hessian(**a, first="W_V", second="W_Q"), H)


def test_S_has_d_V_cubed_rows(randn):
    a = draw(2, 3, 5, randn)
    assert at.attention_operators(a["X"], a["W_Q"], a["W_K"]).S.shape == (27, 3)


def test_illegal_names_are_refused(randn):
    a = draw(2, 3, 5, randn)
    with pytest.raises(ValueError, match="arguments X, W_Q, W_K, W_V"):
        at.attention_jacobian(**a, name="W_O")
    for formula in (at.Phi_as_printed, at.outer_product_hessian_as_printed):
        with pytest.raises(ValueError, match="prints no"):
            formula(**a, first="W_K", second="W_K")
    with pytest.raises(ValueError, match="prints no functional block"):
        at.functional_hessian_as_printed(**a, target=a["X"], first="W_K", second="W_V")
