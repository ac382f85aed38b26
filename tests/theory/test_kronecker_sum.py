"""Kronecker sums against the matrices they stand for; bounds against exact norms."""

import itertools

import pytest
import torch

from curvature_gap.theory.kronecker_sum import (
    Directions,
    KroneckerHessian,
    KroneckerSum,
    core_bound,
    data_bound,
    deflated_frobenius,
    kappa,
    lanczos_estimate,
    norm_of_norms,
    ritz,
    schatten_norm,
    top_norm,
    weighted_gram,
)

SWAPS = list(itertools.product([False, True], repeat=2))


def loop(term: KroneckerSum) -> torch.Tensor:
    """The definition, entry by entry."""
    L, d = term.X.shape
    e, N = term.Z.shape[1], term.full_N
    _, p, q = N.shape
    out = torch.zeros(
        p if term.swap_rows else d, d if term.swap_rows else p, *((q, e) if term.swap_columns else (e, q))
    )
    out = out.double()
    for i, c, a, k, f in itertools.product(range(L), range(d), range(p), range(e), range(q)):
        row = (a, c) if term.swap_rows else (c, a)
        column = (f, k) if term.swap_columns else (k, f)
        out[row + column] += term.X[i, c] * term.Z[i, k] * N[i, a, f]
    return out.flatten(2).flatten(0, 1)


@pytest.mark.parametrize(("rows", "columns"), SWAPS)
@pytest.mark.parametrize("diagonal", [False, True])
def test_dense_apply_and_transpose_follow_the_definition(rows, columns, diagonal, randn):
    N = randn(4, 5) if diagonal else randn(4, 5, 2)
    term = KroneckerSum(randn(4, 3), randn(4, 7), N, rows, columns, diagonal)
    M = loop(term)
    torch.testing.assert_close(term.dense(), M)
    torch.testing.assert_close(term.mT.dense(), M.mT)
    U = randn(M.shape[1], 3)
    torch.testing.assert_close(term.apply(U), M @ U)


@pytest.mark.parametrize(("first", "second"), list(itertools.product(SWAPS, SWAPS)))
def test_inner_product_of_two_sums_is_that_of_their_matrices(first, second, randn):
    a = KroneckerSum(randn(4, 3), randn(4, 2), randn(4, 3, 2), *first)
    b = KroneckerSum(randn(4, 3), randn(4, 2), randn(4, 3, 2), *second)
    torch.testing.assert_close(a.inner(b), (a.dense() * b.dense()).sum())


def test_projected_sum_is_the_matrix_between_projections(randn):
    term = KroneckerSum(randn(4, 3), randn(4, 7), randn(4, 5, 2), False, True)
    rows = Directions(torch.linalg.qr(randn(5, 2))[0], False)
    columns = Directions(torch.linalg.qr(randn(2, 1))[0], True)
    U, V = rows.columns((3, 5)), columns.columns((2, 7))
    wanted = (torch.eye(15).double() - U @ U.mT) @ term.dense() @ (torch.eye(14).double() - V @ V.mT)
    torch.testing.assert_close(term.without(rows, columns).dense(), wanted)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_kappa_is_never_below_the_norm(scale, generator):
    X, Z, N = (torch.randn(300, *s, generator=generator).double() for s in [(6, 5), (6, 7), (6, 3, 2)])
    X[:50] = X[:50, :1]  # identical tokens
    Z[50:100, 1:] *= 1e-9
    N[100:150] = N[100:150, :1]  # one matrix: the sum is a single Kronecker product
    X[150:200, :, 1:] = 0
    N[200:210] = 0
    term = KroneckerSum(scale * X, Z, N)
    exact, bound = top_norm(term.dense()), kappa(scale * X, Z, N)
    assert (exact <= bound * (1 + 1e-12)).all()
    torch.testing.assert_close(bound[100:150], exact[100:150], rtol=1e-6, atol=0)


def test_weighted_gram_is_attained_by_equal_matrices_and_tokens(randn):
    X = randn(6, 4)
    torch.testing.assert_close(weighted_gram(X, X, torch.ones(6).double()), top_norm(X) ** 2)


def test_diagonal_sum_has_its_exact_norm(randn):
    term = KroneckerSum(randn(6, 4), randn(6, 2), randn(6, 5), False, True, diagonal=True)
    torch.testing.assert_close(term.norm_bound(), top_norm(term.dense()))


def test_a_scale_has_exact_blocks(randn):
    terms = (
        KroneckerSum(randn(6, 1), randn(6, 2), randn(6, 4, 5)),
        KroneckerSum(randn(6, 1), randn(6, 2), randn(6, 4, 5)),
    )
    H = KroneckerHessian({"gamma": (1, 4), "W": (2, 5)}, {("gamma", "W"): terms})
    torch.testing.assert_close(H.term_bound(("gamma", "W")), top_norm(H.block(("gamma", "W"))))


def test_kappa_knows_equal_sides_and_one_matrix_for_all_tokens(randn):
    X, Z, N = randn(6, 5), randn(6, 3), randn(4, 7)
    torch.testing.assert_close(kappa(X, X, N.expand(6, 4, 7)), kappa(X, X.clone(), N.repeat(6, 1, 1)))
    torch.testing.assert_close(kappa(X, Z, N.expand(6, 4, 7)), kappa(X, Z, N.repeat(6, 1, 1)))


def test_kappa_says_which_stack_is_too_short(randn):
    with pytest.raises(ValueError, match="4, 4, 5 tokens"):
        kappa(randn(4, 2), randn(4, 2), randn(5, 2, 2))


@pytest.fixture
def hessian(randn) -> KroneckerHessian:
    """Two weights, 3 x 5 and 2 x 7, 12 symmetric matrices at once, one pair with two swapped terms."""
    X, Z = randn(12, 6, 3), randn(12, 6, 2)
    A, B = randn(12, 6, 5, 5), randn(12, 6, 7, 7)
    cross = (
        KroneckerSum(X, Z, randn(12, 6, 5, 7)),
        KroneckerSum(randn(12, 6, 5), Z, randn(12, 6, 3, 7), True, False),
    )
    terms = {
        ("a", "a"): (KroneckerSum(X, X, A + A.mT),),
        ("a", "b"): cross,
        ("b", "b"): (KroneckerSum(Z, Z, B + B.mT),),
    }
    return KroneckerHessian({"a": (3, 5), "b": (2, 7)}, terms)


def test_hessian_products_and_frobenius_norm_match_the_matrix(hessian, randn):
    H, U = hessian.dense(), randn(12, 29, 3)
    torch.testing.assert_close(H, H.mT)
    torch.testing.assert_close(hessian.apply(U), H @ U)
    torch.testing.assert_close(hessian.total_squared_frobenius(), H.square().sum((-1, -2)))


@pytest.mark.parametrize("r", [0, 2])
@pytest.mark.parametrize("n_products", [1, 5, 60])
def test_every_bound_is_above_and_lanczos_below(hessian, r, n_products):
    exact = top_norm(hessian.dense())
    above = 1 - 1e-12
    assert (norm_of_norms(hessian.shapes, hessian.block_bounds()) >= exact * above).all()
    assert (deflated_frobenius(hessian, n_products) >= exact * above).all()
    assert (data_bound(hessian, r, n_products) >= exact * above).all()
    assert (lanczos_estimate(hessian, n_products) <= exact * (1 + 1e-12)).all()


def test_enough_products_make_the_deflated_bound_exact(hessian):
    torch.testing.assert_close(deflated_frobenius(hessian, 29), top_norm(hessian.dense()))


def test_directions_that_span_everything_make_the_core_bound_exact(hessian):
    a, b = (torch.eye(n).double().expand(12, n, n) for n in (3, 7))
    full = {"a": Directions(a, True), "b": Directions(b, False)}
    torch.testing.assert_close(core_bound(hessian, full), top_norm(hessian.dense()))


def test_exact_block_norms_give_the_floor(hessian):
    exact = {pair: top_norm(hessian.block(pair)) for pair in hessian.terms}
    floor = norm_of_norms(hessian.shapes, exact)
    assert (floor >= top_norm(hessian.dense()) * (1 - 1e-12)).all()
    assert (floor <= norm_of_norms(hessian.shapes, hessian.block_bounds()) * (1 + 1e-12)).all()


def test_krylov_space_that_ends_early_still_bounds(hessian):
    """Of a multiple of the identity the space is one-dimensional."""
    one = KroneckerSum(torch.ones(1, 1).double(), torch.ones(1, 1).double(), 3 * torch.eye(5).double()[None])
    H = KroneckerHessian({"a": (1, 5)}, {("a", "a"): (one,)})
    assert ritz(H, 4).theta.abs().max() == pytest.approx(3)
    assert deflated_frobenius(H, 4) >= 3 * (1 - 1e-12)


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (16, 16), (1, 3)])
def test_schatten_norm_is_above_the_norm_by_little(shape, randn):
    M = randn(11, *shape)
    ratio = schatten_norm(M) / top_norm(M)
    assert (ratio >= 1 - 1e-14).all()
    assert (ratio <= min(shape) ** (1 / 16) * (1 + 1e-14)).all()
    torch.testing.assert_close(schatten_norm(M[:, :1]), top_norm(M[:, :1]))
    assert schatten_norm(torch.zeros(2, 3, 3)).tolist() == [0, 0]


def test_many_tokens_keep_kappa_above_the_norm(randn):
    X, Z, N = randn(1001, 3), randn(1001, 2), randn(1001, 2, 3)
    exact, bound = top_norm(KroneckerSum(X, Z, N).dense()), kappa(X, Z, N)
    assert exact <= bound * (1 + 1e-12)
