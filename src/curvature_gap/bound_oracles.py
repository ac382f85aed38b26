"""The exact side of every bound by a second method: nested automatic differentiation of the forward maps.

One instance at a time, slow, and with nothing of `theory.exact_norms` in it. The search believes a witness only if both
methods agree on it.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod, sqrt

import torch
from torch import Tensor
from torch.func import hessian, jacfwd, jacrev

from curvature_gap import maps
from curvature_gap.theory.printed_bounds import NORM_NAMES, Pair

Values = Sequence[Tensor]
Single = Mapping[str, Tensor]
Oracle = Callable[[Single], Values]

ATTENTION_WEIGHTS = ("K", "Q", "V")
BLOCK_WEIGHTS = ("1", "2", "K", "Q", "V")
MAIN_PAIRS: tuple[Pair, ...] = (("V", "V"), ("Q", "Q"), ("V", "Q"), ("Q", "K"))
NORM_PAIRS = tuple((a, b) for a in NORM_NAMES for b in NORM_NAMES if a != b)
ALL_PAIRS: tuple[Pair, ...] = tuple((i, j) for i in BLOCK_WEIGHTS for j in BLOCK_WEIGHTS)
ATTENTION_PAIRS: tuple[Pair, ...] = tuple((k, m) for k in ATTENTION_WEIGHTS for m in ATTENTION_WEIGHTS)


def _norm(M: Tensor) -> Tensor:
    """The spectral norm by a singular value decomposition (`spectral_norm` uses a Gram matrix)."""
    return torch.linalg.matrix_norm(M, 2)


def _unfolded(tensor: Tensor) -> Tensor:
    return _norm(tensor.reshape(-1, tensor.shape[-1]))


def _attention_map(s: Single) -> tuple[Callable[[Tensor], Tensor], Tensor, dict[str, slice]]:
    """Return θ ↦ F, θ = (W_K, W_Q, W_V) raveled, and each weight's place in θ."""
    names = {"K": "W_K", "Q": "W_Q", "V": "W_V"}
    shapes = {key: s[name].shape for key, name in names.items()}
    places = places_of({key: prod(shape) for key, shape in shapes.items()})
    theta = torch.cat([s[name].reshape(-1) for name in names.values()])

    def F(theta: Tensor) -> Tensor:
        W = {key: theta[places[key]].reshape(shapes[key]) for key in names}
        return maps.attention(s["X"], W["Q"], W["K"], W["V"])

    return F, theta, places


def _block_map(s: Single, stop: str = "Z") -> tuple[Callable[[Tensor], Tensor], Tensor, dict[str, slice]]:
    """Return θ ↦ Z (or S, its input), θ = (W_1, W_2, W_K, W_Q, W_V) raveled, and each weight's place in θ."""
    names = {"1": "W_1", "2": "W_2", "K": "W_K", "Q": "W_Q", "V": "W_V"}
    shapes = {key: s[name].shape for key, name in names.items()}
    places = places_of({key: prod(shape) for key, shape in shapes.items()})
    theta = torch.cat([s[name].reshape(-1) for name in names.values()])

    def Z(theta: Tensor) -> Tensor:
        W = {names[key]: theta[places[key]].reshape(shapes[key]) for key in names}
        if stop == "Z":
            return maps.block(s["X"], W)
        Y = maps.layer_norm(s["X"] + maps.attention(s["X"], W["W_Q"], W["W_K"], W["W_V"]))
        return Y + maps.feed_forward(Y, W["W_1"], W["W_2"])

    return Z, theta, places


def places_of(lengths: Mapping[str, int]) -> dict[str, slice]:
    places, start = {}, 0
    for key, length in lengths.items():
        places[key] = slice(start, start + length)
        start += length
    return places


def _second_derivatives(f: Callable[[Tensor], Tensor], theta: Tensor, places: Mapping[str, slice]) -> dict:
    """Return ∂²f/∂W_i∂W_j for all pairs, axes (token, feature, W_i, W_j)."""
    full = jacfwd(jacrev(f))(theta)
    return {(i, j): full[..., a, :][..., b] for i, a in places.items() for j, b in places.items()}


def _logits(s: Single) -> Tensor:
    return s["X"] @ s["W_Q"] @ (s["X"] @ s["W_K"]).T / sqrt(s["W_Q"].shape[1])


def _softmax_jacobian(s: Single) -> Tensor:
    """∂vec_r(A)/∂vec_r(T)ᵀ as one L² x L² matrix."""
    T = _logits(s)
    return jacrev(maps.softmax)(T).reshape(T.numel(), T.numel())


def _softmax_second_derivative(s: Single) -> Tensor:
    """∂²A/∂T² as one (L² · L²) x L² matrix."""
    T = _logits(s)
    return jacfwd(jacrev(maps.softmax))(T).reshape(-1, T.numel())


def softmax_jacobian(s: Single) -> Values:
    return [_norm(_softmax_jacobian(s))]


def softmax_second_derivative(s: Single) -> Values:
    return [_norm(_softmax_second_derivative(s))]


def attention_matrix(s: Single) -> Values:
    return [_norm(maps.attention_matrix(s["X"], s["W_Q"], s["W_K"])[0])]


def residual_operator(s: Single) -> Values:
    """R_m = vec_r(residual)ᵀ ⊗ I_m with m = 2."""
    return [_norm(kron(s["residual"].reshape(1, -1), torch.eye(2, dtype=s["residual"].dtype)))]


def z_1(s: Single) -> Values:
    """Z_1 as the printed product of Kronecker factors."""
    X, eye = s["X"], torch.eye(len(s["X"]), dtype=s["X"].dtype)
    return [_norm(kron(eye, X.T) @ _softmax_jacobian(s) @ kron(X, X))]


def z_2(s: Single) -> Values:
    """Z_2 as the printed product of Kronecker factors."""
    X, eye = s["X"], torch.eye(len(s["X"]), dtype=s["X"].dtype)
    return [_norm(kron(eye, X.T, X.T, X.T) @ _softmax_second_derivative(s) @ kron(X, X))]


def kron(*factors: Tensor) -> Tensor:
    product = factors[0].contiguous()
    for factor in factors[1:]:
        # torch.kron fails when exactly one operand is a transposed view.
        product = torch.kron(product, factor.contiguous())
    return product


def attention_loss(s: Single) -> Values:
    F, theta, _ = _attention_map(s)
    target = F(theta) - s["residual"]
    return [_norm(hessian(lambda t: maps.mse(F(t), target))(theta))]


def block_loss(s: Single) -> Values:
    Z, theta, _ = _block_map(s)
    target = Z(theta) - s["residual"]
    return [_norm(hessian(lambda t: maps.mse(Z(t), target))(theta))]


def attention_loss_blocks(s: Single) -> Values:
    F, theta, places = _attention_map(s)
    target = F(theta) - s["residual"]
    H = hessian(lambda t: maps.mse(F(t), target))(theta)
    return [_norm(H[places[i], places[j]]) for i, j in MAIN_PAIRS]


def attention_jacobians(s: Single) -> Values:
    F, theta, places = _attention_map(s)
    J = jacrev(F)(theta).flatten(0, 1)
    return [_norm(J[:, places[k]]) for k in ATTENTION_WEIGHTS]


def attention_second_derivatives(pairs: tuple[Pair, ...], loss_factor: bool) -> Oracle:
    def second(s: Single) -> Values:
        Phi = _second_derivatives(*_attention_map(s))
        scale = 2 / s["X"].numel() if loss_factor else 1.0
        return [scale * _unfolded(Phi[pair]) for pair in pairs]

    return second


def sum_second_derivatives(pairs: tuple[Pair, ...], combine: Callable[[Values], Values] | None = None) -> Oracle:
    def second(s: Single) -> Values:
        xi = _second_derivatives(*_block_map(s, stop="S"))
        values = [_unfolded(xi[pair]) for pair in pairs]
        return values if combine is None else combine(values)

    return second


def output_second_derivatives(pairs: tuple[Pair, ...]) -> Oracle:
    def second(s: Single) -> Values:
        H = _second_derivatives(*_block_map(s))
        return [_unfolded(H[pair]) for pair in pairs]

    return second


def sum_jacobians(s: Single) -> Values:
    S, theta, places = _block_map(s, stop="S")
    J = jacrev(S)(theta).flatten(0, 1)
    return [_norm(J[:, places[i]]) for i in BLOCK_WEIGHTS]


def residual_jacobian(s: Single) -> Values:
    Y = maps.layer_norm(s["X"] + maps.attention(s["X"], s["W_Q"], s["W_K"], s["W_V"]))
    J = jacrev(lambda y: y + maps.feed_forward(y, s["W_1"], s["W_2"]))(Y)
    return [_norm(J.reshape(Y.numel(), Y.numel()))]


def layer_norm_derivative(order: int) -> Oracle:
    def second(s: Single) -> Values:
        X = s["X"]
        derivative = jacrev(maps.layer_norm) if order == 1 else jacfwd(jacrev(maps.layer_norm))
        return [_norm(derivative(X).reshape(-1, X.numel()))]

    return second


def proposition_10(s: Single) -> Values:
    Y = maps.layer_norm(s["X"] + maps.attention(s["X"], s["W_Q"], s["W_K"], s["W_V"]))
    feed = maps.feed_forward(Y, s["W_1"], s["W_2"])
    return [_norm(Y), torch.linalg.matrix_norm(Y), _norm(feed), _norm(Y + feed)]


def matrix_norms(s: Single) -> Values:
    """The five norms through `torch.linalg.matrix_norm`."""
    A = s["X"]
    norms = {
        "max": A.abs().max(),
        "1": torch.linalg.matrix_norm(A, 1),
        "inf": torch.linalg.matrix_norm(A, float("inf")),
        "2": _norm(A),
        "F": torch.linalg.matrix_norm(A, "fro"),
    }
    return [norms[larger] for larger, _ in NORM_PAIRS]


def blocks_of(X: Tensor) -> list[Tensor]:
    """Cut into 2 x 2 blocks of unequal sizes, over leading batch axes."""
    rows, columns = (X.shape[-2] + 1) // 2, (X.shape[-1] + 1) // 2
    return [part for half in X.split(rows, dim=-2) for part in half.split(columns, dim=-1)]


def block_matrix(s: Single) -> Values:
    """The whole matrix, diag(first block, last block), and the larger of those two blocks."""
    first, *_, last = blocks_of(s["X"])
    return [_norm(s["X"]), _norm(torch.block_diag(first, last)), torch.maximum(_norm(first), _norm(last))]


def shuffle_matrix(d_V: int) -> Tensor:
    """S = (I ⊗ K_{d_V,d_V})(vec_r I ⊗ I). Its rows number d_V³, not d_V² as printed."""
    eye = torch.eye(d_V, dtype=torch.float64)
    K = eye.reshape(1, d_V, 1, d_V) * eye.reshape(d_V, 1, d_V, 1)
    return kron(eye, K.reshape(d_V * d_V, d_V * d_V)) @ kron(eye.reshape(-1, 1), eye)


def shuffle(s: Single) -> Values:
    return [_norm(shuffle_matrix(s["X"].shape[1]))]
