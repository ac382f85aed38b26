"""The calculus: algebraic facts on random shapes, rules against automatic differentiation, illegal input."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from curvature_gap.matrix_calculus import (
    K_as_printed,
    ShapeMismatchError,
    add,
    autodiff_hessian,
    autodiff_jacobian,
    chain_hessian,
    commutation_matrix,
    diag_jacobian,
    eye,
    hadamard_root_jacobian,
    hadamard_square_jacobian,
    inverse_jacobian,
    kron,
    kron_hessian,
    kron_jacobian,
    kron_left_jacobian,
    kron_right_jacobian,
    multiply,
    product_hessian,
    product_jacobian,
    rows_chain_hessian,
    sandwich_jacobian,
    transpose_hessian,
    unvec_r,
    vec,
    vec_r,
)

size = st.integers(1, 4)
few = settings(max_examples=8, deadline=None)


def matrix(m: int, n: int, seed: int) -> torch.Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(value, reference):
    torch.testing.assert_close(value, reference, rtol=1e-10, atol=1e-10)


@few
@given(m=size, n=size, seed=st.integers(0, 99))
def test_vec_r_is_vec_of_the_transpose_and_commutation_turns_one_into_the_other(m, n, seed):
    A = matrix(m, n, seed)
    close(vec_r(A), vec(A.T))
    close(commutation_matrix(m, n) @ vec_r(A), vec_r(A.T))
    close(K_as_printed(m, n) @ vec(A), vec_r(A))
    close(K_as_printed(n, m) @ K_as_printed(m, n), eye(m * n))
    close(commutation_matrix(m, n).T, commutation_matrix(n, m))
    close(unvec_r(vec_r(A), m, n), A)


@few
@given(p=size, m=size, n=size, q=size, seed=st.integers(0, 99))
def test_a_product_of_three_is_one_kronecker_product_on_vec_r(p, m, n, q, seed):
    A, X, B = matrix(p, m, seed), matrix(m, n, seed + 1), matrix(n, q, seed + 2)
    close(kron(A, B.T) @ vec_r(X), vec_r(A @ X @ B))
    close(sandwich_jacobian(A, B), autodiff_jacobian(lambda W: A @ W @ B, X))


@few
@given(n=size, q=size, p=size, r=size, seed=st.integers(0, 99))
def test_kronecker_jacobians_match_autodiff(n, q, p, r, seed):
    X, Y = matrix(n, q, seed), matrix(p, r, seed + 1)
    close(kron_left_jacobian(X, Y), autodiff_jacobian(lambda A: torch.kron(A, Y), X))
    close(kron_right_jacobian(X, Y), autodiff_jacobian(lambda B: torch.kron(X, B), Y))


@few
@given(n=size, q=size, p=size, r=size, seed=st.integers(0, 99))
def test_the_kronecker_product_commutes_up_to_commutation_matrices(n, q, p, r, seed):
    A, B = matrix(n, q, seed), matrix(p, r, seed + 1)
    close(commutation_matrix(n, p) @ kron(A, B) @ commutation_matrix(r, q), kron(B, A))


@few
@given(p=size, r=size, q=size, seed=st.integers(0, 99))
def test_product_and_kronecker_rules_match_autodiff(p, r, q, seed):
    W = matrix(2, 3, seed)
    left, right = matrix(p, 2, seed + 1), matrix(3, q, seed + 2)
    middle = matrix(3, r, seed + 3)

    def A(w):
        return left @ torch.sin(w) @ middle  # p × r

    def B(w):
        return middle.T @ w.T.square() @ left.T @ left @ w @ right  # r × q

    dA, dB = autodiff_jacobian(A, W), autodiff_jacobian(B, W)
    d2A, d2B = autodiff_hessian(A, W), autodiff_hessian(B, W)
    close(product_jacobian(A(W), B(W), dA, dB), autodiff_jacobian(lambda w: A(w) @ B(w), W))
    close(kron_jacobian(A(W), B(W), dA, dB), autodiff_jacobian(lambda w: torch.kron(A(w), B(w)), W))
    arguments = A(W), B(W), dA, dB, dA, dB, d2A, d2B
    close(product_hessian(*arguments), autodiff_hessian(lambda w: A(w) @ B(w), W))
    close(kron_hessian(*arguments), autodiff_hessian(lambda w: torch.kron(A(w), B(w)), W))


def test_hessian_rules_keep_two_different_weights_apart(randn):
    V, W = randn(2, 3), randn(5, 2)
    constant = randn(3, 7)

    def A(v, w):
        return torch.tanh(w @ v)  # 5 × 3

    def B(v, w):
        return (v.T @ w.T).T.T @ w @ v.square() @ constant  # 3 × 7

    def both(f):
        J = autodiff_jacobian(lambda v: f(v, W), V), autodiff_jacobian(lambda w: f(V, w), W)
        return *J, autodiff_hessian(f, V, W)

    (A_v, A_w, A_vw), (B_v, B_w, B_vw) = both(A), both(B)
    arguments = A(V, W), B(V, W), A_v, B_v, A_w, B_w, A_vw, B_vw
    close(product_hessian(*arguments), autodiff_hessian(lambda v, w: A(v, w) @ B(v, w), V, W))
    close(kron_hessian(*arguments), autodiff_hessian(lambda v, w: torch.kron(A(v, w), B(v, w)), V, W))


def test_chain_rule_matches_autodiff_and_its_kronecker_form(randn):
    V, W, M = randn(2, 3), randn(3, 5), randn(2, 5)

    def g(v, w):
        return torch.sin(v) @ w.square()  # 2 × 5

    def f(x):
        return torch.tanh(x @ M.T) @ x  # 2 × 5

    J_f, H_f = autodiff_jacobian(f, g(V, W)), autodiff_hessian(f, g(V, W))
    J_v, J_w = autodiff_jacobian(lambda v: g(v, W), V), autodiff_jacobian(lambda w: g(V, w), W)
    H_vw = autodiff_hessian(g, V, W)
    H = chain_hessian(J_f, H_f, J_v, J_w, H_vw)
    close(H, autodiff_hessian(lambda v, w: f(g(v, w)), V, W))
    close(H, kron(eye(10), J_v.T) @ H_f @ J_w + kron(J_f, eye(6)) @ H_vw)


def test_row_by_row_chain_rule_is_the_chain_rule_of_a_block_diagonal_jacobian(randn):
    L, m, n, p, q = 3, 2, 5, 7, 4
    J, H = randn(L * m, n).reshape(L, m, n), randn(L * m, n * n).reshape(L, m, n, n)
    J_i, J_j, H_ij = randn(L * n, p), randn(L * n, q), randn(L * n * p, q)
    H_full = torch.zeros(L, m, L, n, L, n, dtype=torch.float64)
    for i in range(L):
        H_full[i, :, i, :, i, :] = H[i]
    expected = chain_hessian(torch.block_diag(*J), H_full.reshape(L * m * L * n, L * n), J_i, J_j, H_ij)
    close(rows_chain_hessian(J, H, J_i, J_j, H_ij), expected)


def test_elementary_jacobians_match_autodiff(randn):
    A, D, v = randn(3, 5), randn(3, 3) + 3 * eye(3), randn(7, 1)[:, 0]
    close(inverse_jacobian(D), autodiff_jacobian(torch.linalg.inv, D))
    close(diag_jacobian(7), autodiff_jacobian(torch.diag, v))
    close(hadamard_square_jacobian(A), autodiff_jacobian(torch.square, A))
    close(hadamard_root_jacobian(A.abs() + 0.1), autodiff_jacobian(torch.sqrt, A.abs() + 0.1))


@pytest.mark.parametrize(("p", "q"), [(2, 3), (1, 5), (4, 1)])
def test_transposing_the_slices_is_the_commutation_of_the_two_weights(p, q, randn):
    H = randn(7 * p, q)
    close(vec_r(transpose_hessian(H, p)), kron(eye(7), K_as_printed(q, p)) @ vec_r(H))
    close(transpose_hessian(transpose_hessian(H, p), q), H)


def test_kron_takes_transposed_views_and_several_factors(randn):
    A, B, C = randn(2, 3), randn(5, 7), randn(2, 2)
    close(kron(A, B.T), torch.kron(A, B.T.contiguous()))
    close(kron(A.T, B, C), kron(kron(A.T, B), C))


def test_oracle_agrees_with_finite_differences(randn):
    X, h = randn(2, 3), 1e-5

    def f(x):
        return torch.tanh(x @ x.T) @ x

    J = autodiff_jacobian(f, X)
    steps = h * torch.eye(6, dtype=torch.float64).reshape(6, 2, 3)
    close_to = torch.stack([(f(X + s) - f(X - s)).reshape(-1) / (2 * h) for s in steps], dim=1)
    torch.testing.assert_close(J, close_to, rtol=1e-8, atol=1e-8)
    of_J = [(autodiff_jacobian(f, X + s) - autodiff_jacobian(f, X - s)).reshape(-1) / (2 * h) for s in steps]
    torch.testing.assert_close(autodiff_hessian(f, X), torch.stack(of_J, dim=1), rtol=1e-7, atol=1e-7)


def test_illegal_input_is_named(randn):
    with pytest.raises(ValueError, match="takes a matrix"):
        vec_r(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="positive sizes"):
        commutation_matrix(0, 3)
    with pytest.raises(ShapeMismatchError, match="cannot multiply 2×3 · 5×7"):
        multiply(randn(2, 3), randn(5, 7))
    with pytest.raises(ShapeMismatchError, match="cannot add 2×3"):
        add(randn(2, 3), randn(1, 3))
    with pytest.raises(ValueError, match="positive entries"):
        hadamard_root_jacobian(torch.tensor([[1.0, -1.0]]))
    with pytest.raises(ValueError, match="does not divide"):
        transpose_hessian(randn(7, 3), 2)
