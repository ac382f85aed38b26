"""The identities of matrix calculus and the norm facts: D1 to D3, P1 to P6, PR1 to PR9, P8 to P12, L1."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from curvature_gap.identity_rows import Equation, Instance, Statement, equation, inequality, instances
from curvature_gap.matrix_calculus import (
    K_as_printed,
    autodiff_hessian,
    autodiff_jacobian,
    commutation_matrix,
    diag_jacobian,
    eye,
    hadamard_root_jacobian,
    hadamard_square_jacobian,
    inverse_jacobian,
    kron,
    kron_jacobian,
    kron_left_jacobian,
    kron_right_jacobian,
    product_jacobian,
    sandwich_jacobian,
    vec,
    vec_r,
)
from curvature_gap.statements import Row
from curvature_gap.theory.feed_forward import relu_jacobian


def _scalars(*values: Tensor | float) -> Tensor:
    return torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in values])


def _norms_as_printed(case: Instance) -> Tensor:
    """Largest singular value, roots of sums of squares (two), column sum, row sum, entry. Source: D1."""
    A = case.X
    singular = torch.linalg.svdvals(A)
    return _scalars(
        singular[0],
        A.square().sum().sqrt(),
        singular.square().sum().sqrt(),
        A.abs().sum(dim=0).max(),
        A.abs().sum(dim=1).max(),
        A.abs().max(),
    )


def _norms(case: Instance) -> Tensor:
    A = case.X
    frobenius = torch.linalg.matrix_norm(A, "fro")
    spectral = torch.linalg.eigvalsh(A.T @ A)[-1].sqrt()
    one, infinity = torch.linalg.matrix_norm(A, 1), torch.linalg.matrix_norm(A, torch.inf)
    return _scalars(spectral, frobenius, frobenius, one, infinity, torch.linalg.vector_norm(A, torch.inf))


def _rows_one_by_one(case: Instance) -> Tensor:
    L, d_V = case.X.shape
    return torch.stack([case.X[i, j] for i in range(L) for j in range(d_V)])


def _columns_one_by_one(case: Instance) -> Tensor:
    L, d_V = case.X.shape
    return torch.stack([case.X[i, j] for j in range(d_V) for i in range(L)])


def _D3() -> list[Equation]:
    # A = X ∈ R^{L × d_V}, so K_{m,n} is K_{L,d_V}.
    return [
        equation(lambda c: K_as_printed(c.L, c.d_V) @ vec(c.X), lambda c: vec(c.X.T), part="K vec(A) = vec(Aᵀ)"),
        equation(lambda c: K_as_printed(c.L, c.d_V) @ vec(c.X), _rows_one_by_one, part="vec_r(A) = K_{m,n} vec(A)"),
        equation(
            lambda c: K_as_printed(c.d_V, c.L) @ vec_r(c.X), _columns_one_by_one, part="vec(A) = K_{n,m} vec_r(A)"
        ),
        equation(
            lambda c: K_as_printed(c.d_V, c.L) @ K_as_printed(c.L, c.d_V),
            lambda c: eye(c.L * c.d_V),
            lambda c: commutation_matrix(c.L, c.d_V) @ commutation_matrix(c.L, c.d_V).T,
            part="K_{n,m} K_{m,n} = I",
        ),
    ]


def _identification(case: Instance) -> Tensor:
    """PR1: the matrix of dX ↦ vec_r(dX W Xᵀ + X W dXᵀ), the differential of F(X) = X W Xᵀ, entry by entry of dX."""
    X, W = case.X, case.weights["W_V"]
    directions = eye(X.numel()).reshape(-1, *X.shape)
    return torch.stack([vec_r(dX @ W @ X.T + X @ W @ dX.T) for dX in directions], dim=1)


def _quadratic_jacobian(case: Instance) -> Tensor:
    return autodiff_jacobian(lambda X: X @ case.weights["W_V"] @ X.T, case.X)


def _factor_A(case: Instance, W: Tensor) -> Tensor:
    return torch.tanh(case.X) @ torch.sin(W) @ case.C  # L × d_ff


def _factor_B(case: Instance, W: Tensor) -> Tensor:
    return torch.sin(W) @ case.C + W.square() @ case.C  # d_V × d_ff


def _PR3(rule: Callable[..., Tensor], case: Instance) -> Tensor:
    """AB with A = tanh(X) sin(W) C and B = (sin(W) C + W² C)ᵀ: p = L, r = d_ff, q = d_V."""
    W = case.weights["W_Q"]
    A, B = _factor_A(case, W), _factor_B(case, W).T
    dA = autodiff_jacobian(lambda w: _factor_A(case, w), W)
    dB = autodiff_jacobian(lambda w: _factor_B(case, w).T, W)
    return rule(A, B, dA, dB)


def _product_rule_as_printed(A: Tensor, B: Tensor, dA: Tensor, dB: Tensor) -> Tensor:
    return kron(A, eye(B.shape[1])) @ dB + kron(eye(A.shape[0]), B.T) @ dA


def _PR4(rule: Callable[..., Tensor], case: Instance) -> Tensor:
    """A ⊗ B with A = tanh(X) sin(W) C (n = L, q = d_ff) and B = sin²(W) (p = d_V, r = d_K)."""
    W = case.weights["W_Q"]
    dA = autodiff_jacobian(lambda w: _factor_A(case, w), W)
    dB = autodiff_jacobian(lambda w: torch.sin(w).square(), W)
    return rule(_factor_A(case, W), torch.sin(W).square(), dA, dB)


def _kron_rule_as_printed(A: Tensor, B: Tensor, dA: Tensor, dB: Tensor) -> Tensor:
    (n, q), (p, r) = A.shape, B.shape
    bracket = kron(vec_r(A)[:, None], eye(p * r)) @ dB + kron(eye(n * q), vec_r(B)[:, None]) @ dA
    return kron(eye(n), K_as_printed(p, q), eye(r)) @ bracket


def _P6() -> list[Equation]:
    def shuffle(c: Instance) -> Tensor:
        # X ∈ R^{n x q} is X (n = L, q = d_V), Y ∈ R^{p x r} is C (p = d_K, r = d_ff).
        return kron(eye(c.L), K_as_printed(c.d_K, c.d_V), eye(c.d_ff))

    return [
        equation(
            lambda c: shuffle(c) @ kron(eye(c.L * c.d_V), vec_r(c.C)[:, None]),
            lambda c: autodiff_jacobian(lambda X: torch.kron(X, c.C), c.X),
            lambda c: kron_left_jacobian(c.X, c.C),
            part="∂(X⊗Y)/∂X",
        ),
        equation(
            lambda c: shuffle(c) @ kron(vec_r(c.X)[:, None], eye(c.d_K * c.d_ff)),
            lambda c: autodiff_jacobian(lambda C: torch.kron(c.X, C), c.C),
            lambda c: kron_right_jacobian(c.X, c.C),
            part="∂(X⊗Y)/∂Y",
        ),
    ]


def _positive(case: Instance) -> Tensor:
    return case.X.abs() + 0.1


def _invertible(case: Instance) -> Tensor:
    return case.weights["W_V"] + 3 * eye(case.d_V)


def _row_division_as_printed(case: Instance) -> Tensor:
    """diag⁻¹(b) A. Source: P4."""
    return torch.linalg.inv(torch.diag(case.target[:, 0])) @ case.X


def _norm(A: Tensor) -> Tensor:
    """The spectral norm. Source: PR2, P9, P12."""
    return torch.linalg.matrix_norm(A, 2)[None]


def _sum_ratios() -> Iterator[tuple[str, float]]:
    """‖A + B‖ / (‖A‖ + ‖B‖). Source: P8."""
    norm = partial(torch.linalg.matrix_norm, ord=2)
    for c in instances():
        for part, A, B in (("random", c.X, c.target), ("B = 2A", c.X, 2 * c.X), ("B = −A/2", c.X, -c.X / 2)):
            yield f"{part}, {c.sizes}", (norm(A + B) / (norm(A) + norm(B))).item()


def _product_ratios() -> Iterator[tuple[str, float]]:
    """‖A B‖ / (‖A‖ ‖B‖). Source: P10."""
    norm = partial(torch.linalg.matrix_norm, ord=2)
    for c in instances():
        W = c.weights["W_Q"]
        for part, A, B in (("random", c.X, W), ("B = Aᵀ", W, W.T), ("one token", c.X[:1], c.X[:1].T)):
            yield f"{part}, {c.sizes}", (norm(A @ B) / (norm(A) * norm(B))).item()


def _L1() -> list[Equation]:
    def zero(c: Instance) -> Tensor:
        return torch.zeros(c.X.numel() ** 2, c.X.numel(), dtype=torch.float64)

    return [
        equation(
            lambda c: torch.diag(vec_r((c.X > 0).to(c.X))),
            lambda c: autodiff_jacobian(torch.relu, c.X),
            lambda c: relu_jacobian(c.X),
            part="first derivative",
        ),
        equation(zero, lambda c: autodiff_hessian(torch.relu, c.X), part="second derivative"),
    ]


STATEMENTS: dict[str, Statement] = {
    "D1": Statement([equation(_norms_as_printed, _norms)]),
    "D2": Statement(
        [
            equation(lambda c: vec_r(c.X), _rows_one_by_one, part="vec_r"),
            equation(lambda c: _positive(c) ** 1.5, lambda c: (1.5 * _positive(c).log()).exp(), part="A^{∘α}"),
            equation(lambda c: eye(c.L) * c.X[:, :1], lambda c: torch.diag(c.X[:, 0]), part="diag(v)"),
        ]
    ),
    "D3": Statement(_D3()),
    "P1": Statement([equation(lambda c: vec(c.X.T), _rows_one_by_one, lambda c: vec_r(c.X))]),
    "P2": Statement(
        [
            equation(
                lambda c: kron(c.X, c.C.T) @ vec_r(c.weights["W_Q"]),
                lambda c: (c.X @ c.weights["W_Q"] @ c.C).flatten(),
                lambda c: sandwich_jacobian(c.X, c.C) @ vec_r(c.weights["W_Q"]),
            )
        ]
    ),
    "P3": Statement(
        [equation(lambda c: torch.diag(vec_r(c.X)) @ vec_r(c.target), lambda c: (c.X * c.target).flatten())]
    ),
    "P4": Statement([equation(_row_division_as_printed, lambda c: c.X / c.target[:, :1])]),
    "P5": Statement(
        [
            equation(
                lambda c: kron(c.X, c.C.T),
                lambda c: autodiff_jacobian(lambda W: c.X @ W @ c.C, c.weights["W_Q"]),
                lambda c: sandwich_jacobian(c.X, c.C),
            )
        ]
    ),
    "P6": Statement(_P6()),
    "PR1": Statement([equation(_identification, _quadratic_jacobian)]),
    "PR2": Statement(
        [
            equation(
                lambda c: _scalars(float(c.L)),
                lambda c: _norm(torch.ones(c.L, c.L, dtype=torch.float64)),
            )
        ]
    ),
    "PR3": Statement(
        [
            equation(
                partial(_PR3, _product_rule_as_printed),
                lambda c: autodiff_jacobian(lambda W: _factor_A(c, W) @ _factor_B(c, W).T, c.weights["W_Q"]),
                partial(_PR3, product_jacobian),
            )
        ]
    ),
    "PR4": Statement(
        [
            equation(
                partial(_PR4, _kron_rule_as_printed),
                lambda c: autodiff_jacobian(
                    lambda W: torch.kron(_factor_A(c, W), torch.sin(W).square()), c.weights["W_Q"]
                ),
                partial(_PR4, kron_jacobian),
            )
        ]
    ),
    "PR5": Statement(
        [
            equation(
                lambda c: -kron(torch.linalg.inv(_invertible(c)), torch.linalg.inv(_invertible(c)).T),
                lambda c: autodiff_jacobian(torch.linalg.inv, _invertible(c)),
                lambda c: inverse_jacobian(_invertible(c)),
            )
        ]
    ),
    "PR6": Statement(
        [
            equation(
                lambda c: torch.cat([kron(e[:, None], e[:, None]) for e in eye(c.L)], dim=1),
                lambda c: autodiff_jacobian(torch.diag, c.X[:, 0]),
                lambda c: diag_jacobian(c.L),
            )
        ]
    ),
    "PR7": Statement(
        [
            equation(
                lambda c: 2 * torch.diag(vec_r(c.X)),
                lambda c: autodiff_jacobian(torch.square, c.X),
                lambda c: hadamard_square_jacobian(c.X),
            )
        ]
    ),
    "PR8": Statement(
        [
            equation(
                lambda c: 0.5 * torch.linalg.inv(torch.diag(vec_r(_positive(c)).sqrt())),
                lambda c: autodiff_jacobian(torch.sqrt, _positive(c)),
                lambda c: hadamard_root_jacobian(_positive(c)),
            )
        ]
    ),
    "PR9": Statement(
        [
            equation(
                lambda c: K_as_printed(c.d_V, c.L),
                lambda c: autodiff_jacobian(lambda X: X.T, c.X),
                lambda c: commutation_matrix(c.L, c.d_V),
            )
        ]
    ),
    "P9": Statement(
        [
            equation(
                lambda c: _norm(c.X) * _norm(c.C),
                lambda c: _norm(kron(c.X, c.C)),
            )
        ]
    ),
    "P12": Statement(
        [
            equation(
                lambda c: _norm(c.X.T),
                lambda c: _norm(c.X),
            )
        ]
    ),
    "L1": Statement(_L1(), "Away from the kink, which random entries never meet."),
}

ROWS: dict[str, Callable[[], Row]] = {
    "P8": lambda: inequality("P8", _sum_ratios(), "Attained by A and B = 2A."),
    "P10": lambda: inequality("P10", _product_ratios(), "Attained by B = Aᵀ."),
}
