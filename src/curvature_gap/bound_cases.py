"""What each printed bound compares: the exact quantity, the bound, and the exact quantity by a second method.

Every statement becomes a `BoundCase`. Its `printed` comparison is the paper's; `corrected` is the valid form where the
printed one fails; `other` is a second reading of the print, reported in the note. A comparison may have several
pieces (one per block, say), each searched for.

The second method differentiates the forward maps of `maps` with nested automatic differentiation, one instance at a
time; nothing of `theory.exact_norms` enters it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod, sqrt

import torch
from torch import Tensor
from torch.func import hessian, jacfwd, jacrev

from curvature_gap import maps
from curvature_gap.bound_instances import Instances, Sizes
from curvature_gap.theory import printed_bounds as pb
from curvature_gap.theory.exact_norms import (
    ATTENTION_WEIGHTS,
    BLOCK_WEIGHTS,
    attention_loss_hessian,
    block_loss_hessian,
    frobenius_norm,
    layer_norm_hessian_blocks,
    layer_norm_jacobian_blocks,
    row_blocks_norm,
    softmax_jacobian,
    softmax_second_derivative,
    spectral_norm,
    unfolding_norm,
)

Values = list[Tensor]
Single = Mapping[str, Tensor]
ATTENTION_INPUTS = ("X", "W_Q", "W_K", "W_V")
BLOCK_INPUTS = ("X", "W_Q", "W_K", "W_V", "W_1", "W_2")
ATTENTION_SIZES = (Sizes(3, 5, 2), Sizes(5, 3, 2), Sizes(7, 2, 3))
T1_SIZES = (Sizes(3, 5, 2), Sizes(7, 2, 3), Sizes(49, 2, 2))
BLOCK_SIZES = (Sizes(2, 3, 1, 2), Sizes(3, 4, 1, 2))
MATRIX_SIZES = (Sizes(2, 5, 1), Sizes(5, 3, 1), Sizes(3, 7, 1))


@dataclass(frozen=True)
class Comparison:
    """`exact(instances)` against `bound(instances)`, piece by piece; `second(inputs)` repeats the exact side.

    `exact` and `bound` return one tensor (b,) per piece; `second` returns one number per piece.
    """

    pieces: tuple[str, ...]
    exact: Callable[[Instances], Values]
    bound: Callable[[Instances], Values]
    second: Callable[[Single], Values]


@dataclass(frozen=True)
class BoundCase:
    """One statement: what it compares, at which sizes, and what to say about it."""

    id: str
    inputs: tuple[str, ...]
    sizes: tuple[Sizes, ...]
    printed: Comparison
    corrected: Comparison | None = None
    other: Comparison | None = None
    reading: str = ""
    other_reading: str = ""


# --- The second method: nested automatic differentiation of the forward maps --------------------------------------


def _matrix_norm(M: Tensor) -> Tensor:
    """The spectral norm by a singular value decomposition (`spectral_norm` uses a Gram matrix)."""
    return torch.linalg.matrix_norm(M, 2)


def _unfolded(tensor: Tensor) -> Tensor:
    return _matrix_norm(tensor.reshape(-1, tensor.shape[-1]))


def _attention_map(s: Single) -> tuple[Callable[[Tensor], Tensor], Tensor, dict[str, slice]]:
    """Return θ ↦ F, θ = (W_K, W_Q, W_V) raveled, and each weight's place in θ."""
    names = {"K": "W_K", "Q": "W_Q", "V": "W_V"}
    shapes = {key: s[name].shape for key, name in names.items()}
    places = _places({key: prod(shape) for key, shape in shapes.items()})
    theta = torch.cat([s[name].reshape(-1) for name in names.values()])

    def F(theta: Tensor) -> Tensor:
        W = {key: theta[places[key]].reshape(shapes[key]) for key in names}
        return maps.attention(s["X"], W["Q"], W["K"], W["V"])

    return F, theta, places


def _block_map(s: Single, stop: str = "Z") -> tuple[Callable[[Tensor], Tensor], Tensor, dict[str, slice]]:
    """Return θ ↦ Z (or S, its input), θ = (W_1, W_2, W_K, W_Q, W_V) raveled, and each weight's place in θ."""
    names = {"1": "W_1", "2": "W_2", "K": "W_K", "Q": "W_Q", "V": "W_V"}
    shapes = {key: s[name].shape for key, name in names.items()}
    places = _places({key: prod(shape) for key, shape in shapes.items()})
    theta = torch.cat([s[name].reshape(-1) for name in names.values()])

    def Z(theta: Tensor) -> Tensor:
        W = {names[key]: theta[places[key]].reshape(shapes[key]) for key in names}
        if stop == "Z":
            return maps.block(s["X"], W)
        Y = maps.layer_norm(s["X"] + maps.attention(s["X"], W["W_Q"], W["W_K"], W["W_V"]))
        return Y + maps.feed_forward(Y, W["W_1"], W["W_2"])

    return Z, theta, places


def _places(lengths: Mapping[str, int]) -> dict[str, slice]:
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


def _softmax_jacobian_second(s: Single) -> Tensor:
    """∂vec_r(A)/∂vec_r(T)ᵀ as one L² x L² matrix."""
    T = _logits(s)
    return jacrev(maps.softmax)(T).reshape(T.numel(), T.numel())


def _softmax_second_second(s: Single) -> Tensor:
    """∂²A/∂T² as one (L² · L²) x L² matrix."""
    T = _logits(s)
    return jacfwd(jacrev(maps.softmax))(T).reshape(-1, T.numel())


def _z_1_second(s: Single) -> Tensor:
    """Z_1 as the printed product of Kronecker factors."""
    X, eye = s["X"], torch.eye(len(s["X"]), dtype=s["X"].dtype)
    return _kron(eye, X.T) @ _softmax_jacobian_second(s) @ _kron(X, X)


def _z_2_second(s: Single) -> Tensor:
    """Z_2 as the printed product of Kronecker factors."""
    X, eye = s["X"], torch.eye(len(s["X"]), dtype=s["X"].dtype)
    return _kron(eye, X.T, X.T, X.T) @ _softmax_second_second(s) @ _kron(X, X)


def _kron(*factors: Tensor) -> Tensor:
    product = factors[0].contiguous()
    for factor in factors[1:]:
        # torch.kron fails when exactly one operand is a transposed view.
        product = torch.kron(product, factor.contiguous())
    return product


def _attention_loss_second(s: Single) -> Values:
    F, theta, _ = _attention_map(s)
    target = F(theta) - s["residual"]
    return [_matrix_norm(hessian(lambda t: maps.mse(F(t), target))(theta))]


def _block_loss_second(s: Single) -> Values:
    Z, theta, _ = _block_map(s)
    target = Z(theta) - s["residual"]
    return [_matrix_norm(hessian(lambda t: maps.mse(Z(t), target))(theta))]


def _attention_loss_blocks_second(s: Single) -> Values:
    F, theta, places = _attention_map(s)
    target = F(theta) - s["residual"]
    H = hessian(lambda t: maps.mse(F(t), target))(theta)
    return [_matrix_norm(H[places[i], places[j]]) for i, j in MAIN_PAIRS]


def _attention_jacobians_second(s: Single) -> Values:
    F, theta, places = _attention_map(s)
    J = jacrev(F)(theta).flatten(0, 1)
    return [_matrix_norm(J[:, places[k]]) for k in ATTENTION_WEIGHTS]


def _phi_second(pairs: tuple[pb.Pair, ...], loss_factor: bool) -> Callable[[Single], Values]:
    def second(s: Single) -> Values:
        Phi = _second_derivatives(*_attention_map(s))
        scale = 2 / s["X"].numel() if loss_factor else 1.0
        return [scale * _unfolded(Phi[pair]) for pair in pairs]

    return second


def _xi_second(pairs: tuple[pb.Pair, ...], combine: Callable[[Values], Values] | None = None):
    def second(s: Single) -> Values:
        xi = _second_derivatives(*_block_map(s, stop="S"))
        values = [_unfolded(xi[pair]) for pair in pairs]
        return values if combine is None else combine(values)

    return second


def _output_second(pairs: tuple[pb.Pair, ...]) -> Callable[[Single], Values]:
    def second(s: Single) -> Values:
        H = _second_derivatives(*_block_map(s))
        return [_unfolded(H[pair]) for pair in pairs]

    return second


def _b_second(s: Single) -> Values:
    S, theta, places = _block_map(s, stop="S")
    J = jacrev(S)(theta).flatten(0, 1)
    return [_matrix_norm(J[:, places[i]]) for i in BLOCK_WEIGHTS]


def _j_sy_second(s: Single) -> Values:
    Y = maps.layer_norm(s["X"] + maps.attention(s["X"], s["W_Q"], s["W_K"], s["W_V"]))
    J = jacrev(lambda y: y + maps.feed_forward(y, s["W_1"], s["W_2"]))(Y)
    return [_matrix_norm(J.reshape(Y.numel(), Y.numel()))]


def _layer_norm_second(order: int) -> Callable[[Single], Values]:
    def second(s: Single) -> Values:
        X = s["X"]
        derivative = jacrev(maps.layer_norm) if order == 1 else jacfwd(jacrev(maps.layer_norm))
        return [_matrix_norm(derivative(X).reshape(-1, X.numel()))]

    return second


def _proposition_10_second(s: Single) -> Values:
    Y = maps.layer_norm(s["X"] + maps.attention(s["X"], s["W_Q"], s["W_K"], s["W_V"]))
    feed = maps.feed_forward(Y, s["W_1"], s["W_2"])
    return [_matrix_norm(Y), torch.linalg.matrix_norm(Y), _matrix_norm(feed), _matrix_norm(Y + feed)]


def _table_second(s: Single) -> Values:
    """The five norms through `torch.linalg.matrix_norm`."""
    A = s["X"]
    norms = {
        "max": A.abs().max(),
        "1": torch.linalg.matrix_norm(A, 1),
        "inf": torch.linalg.matrix_norm(A, float("inf")),
        "2": _matrix_norm(A),
        "F": torch.linalg.matrix_norm(A, "fro"),
    }
    return [norms[larger] for larger, _ in NORM_PAIRS]


# --- The exact and the printed sides ------------------------------------------------------------------------------

MAIN_PAIRS: tuple[pb.Pair, ...] = (("V", "V"), ("Q", "Q"), ("V", "Q"), ("Q", "K"))
NORM_PAIRS = tuple((a, b) for a in pb.NORM_NAMES for b in pb.NORM_NAMES if a != b)
ALL_PAIRS: tuple[pb.Pair, ...] = tuple((i, j) for i in BLOCK_WEIGHTS for j in BLOCK_WEIGHTS)
ATTENTION_PAIRS: tuple[pb.Pair, ...] = tuple((k, m) for k in ATTENTION_WEIGHTS for m in ATTENTION_WEIGHTS)
PRINTED_PAIRS: tuple[pb.Pair, ...] = tuple(pair for pair in ALL_PAIRS if pair[0] in "12" or pair[1] in "KQV")
MIXED_PAIRS_1: tuple[pb.Pair, ...] = tuple(("1", k) for k in ATTENTION_WEIGHTS)
MIXED_PAIRS_2: tuple[pb.Pair, ...] = tuple(("2", k) for k in ATTENTION_WEIGHTS)


def _constant(value: float) -> Callable[[Instances], Values]:
    return lambda i: [i.X.new_full((len(i.X),), value)]


def _attention_loss(i: Instances) -> Values:
    return [spectral_norm(attention_loss_hessian(i.attention, i.inputs["residual"]))]


def _attention_loss_blocks(i: Instances) -> Values:
    H = attention_loss_hessian(i.attention, i.inputs["residual"])
    places = _places({k: i.attention.U[k].shape[-1] if k != "V" else i.d_V**2 for k in ATTENTION_WEIGHTS})
    return [spectral_norm(H[:, places[a], places[b]]) for a, b in MAIN_PAIRS]


def _main_with_keys(i: Instances) -> Values:
    swapped = pb.attention_blocks_main(pb.exchange_query_key(i.norms))
    blocks = pb.with_key_blocks(pb.attention_blocks_main(i.norms), swapped)
    return [_full(pb.attention_hessian_bound(blocks), i)]


def _appendix_with_keys(i: Instances) -> Values:
    swapped = pb.attention_blocks_appendix(pb.exchange_query_key(i.norms), i.residual_rank)
    blocks = pb.with_key_blocks(pb.attention_blocks_appendix(i.norms, i.residual_rank), swapped)
    return [_full(pb.attention_hessian_bound(blocks), i)]


def _full(value: pb.Number, i: Instances) -> Tensor:
    """Return a number or a tensor as a tensor (b,)."""
    return torch.as_tensor(value, dtype=i.X.dtype).expand(len(i.X))


def _rows(i: Instances) -> tuple[Tensor, Tensor, Tensor]:
    """Return ‖X‖_2, the smallest centred row norm and the smallest row standard deviation."""
    M = i.X - i.X.mean(dim=-1, keepdim=True)
    norm = torch.linalg.vector_norm(M, dim=-1).amin(dim=-1)
    return spectral_norm(i.X), norm, norm / sqrt(i.d_V)


def _layer_norm_exact(order: int) -> Callable[[Instances], Values]:
    if order == 1:
        return lambda i: [row_blocks_norm(layer_norm_jacobian_blocks(i.X))]
    return lambda i: [spectral_norm(layer_norm_hessian_blocks(i.X).flatten(-3, -2)).amax(dim=-1)]


def _layer_norm_bound(order: int, deviation: bool) -> Callable[[Instances], Values]:
    def bound(i: Instances) -> Values:
        x, norm, s = _rows(i)
        sigma = s if deviation else norm
        if order == 1:
            return [pb.layer_norm_jacobian_printed(x, sigma, i.d_V)]
        return [pb.layer_norm_hessian_printed(x, sigma, i.L, i.d_V)]

    return bound


def _layer_norm_corrected(order: int) -> Callable[[Instances], Values]:
    exact = pb.layer_norm_jacobian_exact if order == 1 else pb.layer_norm_hessian_exact
    return lambda i: [exact(_rows(i)[2], i.d_V)]


def _phi_exact(pairs: tuple[pb.Pair, ...], loss_factor: bool) -> Callable[[Instances], Values]:
    def exact(i: Instances) -> Values:
        scale = 2 / (i.L * i.d_V) if loss_factor else 1.0
        return [scale * unfolding_norm(i.attention.Phi(*pair)) for pair in pairs]

    return exact


def _phi_comparison(pairs: tuple[pb.Pair, ...], bounds: Callable[[pb.Norms], dict], loss_factor: bool) -> Comparison:
    return Comparison(
        tuple("".join(pair) for pair in pairs),
        _phi_exact(pairs, loss_factor),
        lambda i: [bounds(i.norms)[pair] for pair in pairs],
        _phi_second(pairs, loss_factor),
    )


def _xi_exact(pairs: tuple[pb.Pair, ...]) -> Callable[[Instances], Values]:
    return lambda i: [unfolding_norm(i.block.xi(*pair)) for pair in pairs]


def _smallest(values: Values) -> Values:
    return [torch.stack(values).amin(dim=0)]


def _xi_1k_bound(i: Instances) -> Values:
    scale = sqrt(i.norms.d_ff) * i.norms.w_2 * row_blocks_norm(i.block.J_Y)
    return [scale * unfolding_norm(i.block.attention.G[k]) for k in ATTENTION_WEIGHTS]


def _xi_2k_bound(i: Instances) -> Values:
    scale = sqrt(i.d_V) * i.norms.w_1 * row_blocks_norm(i.block.J_Y)
    return [scale * unfolding_norm(i.block.attention.G[k]) for k in ATTENTION_WEIGHTS]


def _xi_kl_bound(i: Instances) -> Values:
    b = i.block
    J_SY, J_Y = row_blocks_norm(b.J_SY), row_blocks_norm(b.J_Y)
    H_Y = spectral_norm(b.H_Y.flatten(-3, -2)).amax(dim=-1)
    G = {k: unfolding_norm(b.attention.G[k]) for k in ATTENTION_WEIGHTS}
    return [J_SY * (G[k] * H_Y * G[m] + J_Y * unfolding_norm(b.attention.Phi(k, m))) for k, m in ATTENTION_PAIRS]


def _exact_pieces(i: Instances) -> pb.BlockNorms:
    """The block bound's pieces with every norm exact."""
    b = i.block
    return pb.BlockNorms(
        J_Z=row_blocks_norm(b.J_Z),
        H_Z=spectral_norm(b.H_Z.flatten(-3, -2)).amax(dim=-1),
        B={k: unfolding_norm(b.B[k]) for k in BLOCK_WEIGHTS},
        xi={pair: unfolding_norm(b.xi(*pair)) for pair in ALL_PAIRS},
    )


def _block_pairs_bound(i: Instances) -> Values:
    bounds = _exact_pieces(i).second_derivatives()
    return [bounds[pair] for pair in ALL_PAIRS]


def _output_exact(pairs: tuple[pb.Pair, ...]) -> Callable[[Instances], Values]:
    return lambda i: [unfolding_norm(i.block.output_hessian(*pair)) for pair in pairs]


def _block_loss(i: Instances) -> Values:
    return [spectral_norm(block_loss_hessian(i.block, i.inputs["residual"]))]


def _block_total_bound(i: Instances) -> Values:
    """5 max_ij (2/(L d_V) ‖∂Z/∂W_i‖ ‖∂Z/∂W_j‖ + ‖R‖ ‖H_tr^(i,j)‖), every norm exact."""
    b = i.block
    residual = frobenius_norm(i.inputs["residual"])
    J = {k: unfolding_norm(b.output_jacobian(k)) for k in BLOCK_WEIGHTS}
    terms = [2 / (i.L * i.d_V) * J[p] * J[q] + residual * unfolding_norm(b.output_hessian(p, q)) for p, q in ALL_PAIRS]
    return [5 * torch.stack(terms).amax(dim=0)]


def _explicit(i: Instances, corrected: bool) -> pb.BlockNorms:
    pieces = pb.explicit_block_norms_corrected if corrected else pb.explicit_block_norms_printed
    s_Y, s_Z = (_smallest_deviation(X) for X in (i.block.U, i.block.S))
    return pieces(i.norms, spectral_norm(i.block.hidden), s_Y, s_Z)


def _smallest_deviation(X: Tensor) -> Tensor:
    return X.std(dim=-1, correction=0).amin(dim=-1)


def _explicit_pairs(pairs: tuple[pb.Pair, ...], corrected: bool) -> Callable[[Instances], Values]:
    def bound(i: Instances) -> Values:
        bounds = _explicit(i, corrected).second_derivatives()
        return [bounds[pair] for pair in pairs]

    return bound


def _explicit_total(corrected: bool) -> Callable[[Instances], Values]:
    def bound(i: Instances) -> Values:
        residual, scale = frobenius_norm(i.inputs["residual"]), 2 / (i.L * i.d_V)
        return [_explicit(i, corrected).loss_hessian(residual, scale, scale if corrected else 1.0)]

    return bound


def _table_bound(i: Instances) -> Values:
    m, n = i.L, i.d_V
    rank = torch.linalg.matrix_rank(i.X.detach()).to(i.X.dtype)
    bounds = []
    for larger, smaller in NORM_PAIRS:
        norm = pb.matrix_norm(i.X, smaller)
        constant = rank.sqrt() if (larger, smaller) == ("F", "2") else pb.norm_constant(larger, smaller, m, n, 1)
        bounds.append(constant * norm)
    return bounds


def _blocks_of(X: Tensor) -> list[Tensor]:
    """Cut into 2 x 2 blocks of unequal sizes."""
    rows, columns = (X.shape[-2] + 1) // 2, (X.shape[-1] + 1) // 2
    return [part for half in X.split(rows, dim=-2) for part in half.split(columns, dim=-1)]


def _block_diagonal(blocks: list[Tensor]) -> Tensor:
    """Return diag(first, last) for a batch."""
    first, last = blocks[0], blocks[-1]
    top = torch.cat([first, first.new_zeros(*first.shape[:-1], last.shape[-1])], dim=-1)
    bottom = torch.cat([last.new_zeros(*last.shape[:-1], first.shape[-1]), last], dim=-1)
    return torch.cat([top, bottom], dim=-2)


def _block_matrix_exact(i: Instances) -> Values:
    blocks = _blocks_of(i.X)
    diagonal, largest_block = spectral_norm(_block_diagonal(blocks)), _diagonal_blocks_norm(blocks)
    return [spectral_norm(i.X), diagonal, largest_block]


def _diagonal_blocks_norm(blocks: list[Tensor]) -> Tensor:
    return torch.stack([spectral_norm(blocks[0]), spectral_norm(blocks[-1])]).amax(dim=0)


def _block_matrix_bound(i: Instances) -> Values:
    blocks = _blocks_of(i.X)
    largest_block = torch.stack([spectral_norm(block) for block in blocks]).amax(dim=0)
    diagonal = _diagonal_blocks_norm(blocks)
    return [pb.block_matrix_printed(largest_block, 2, 2), diagonal, spectral_norm(_block_diagonal(blocks))]


def _block_matrix_second(s: Single) -> Values:
    blocks = _blocks_of(s["X"])
    diagonal = torch.block_diag(blocks[0], blocks[-1])
    return [_matrix_norm(s["X"]), _matrix_norm(diagonal), max(_matrix_norm(blocks[0]), _matrix_norm(blocks[-1]))]


def _shuffle_matrix(d_V: int) -> Tensor:
    """S = (I ⊗ K_{d_V,d_V})(vec_r I ⊗ I); its rows number d_V³, not d_V² as printed."""
    eye = torch.eye(d_V, dtype=torch.float64)
    K = eye.reshape(1, d_V, 1, d_V) * eye.reshape(d_V, 1, d_V, 1)
    return _kron(eye, K.reshape(d_V * d_V, d_V * d_V)) @ _kron(eye.reshape(-1, 1), eye)


def _cases() -> dict[str, BoundCase]:
    attention, block = ATTENTION_INPUTS, BLOCK_INPUTS
    logits = ("X", "W_Q", "W_K", "W_V")

    def case(id: str, inputs: tuple[str, ...], sizes: tuple[Sizes, ...], printed: Comparison, **rest) -> BoundCase:
        return BoundCase(id, inputs, sizes, printed, **rest)

    def jacobian_norm(i: Instances) -> Values:
        return [row_blocks_norm(softmax_jacobian(i.attention.A))]

    def second_norm(i: Instances) -> Values:
        return [spectral_norm(softmax_second_derivative(i.attention.A).flatten(-3, -2)).amax(dim=-1)]

    def jacobian_second(s: Single) -> Values:
        return [_matrix_norm(_softmax_jacobian_second(s))]

    def z_1_second(s: Single) -> Values:
        return [_matrix_norm(_z_1_second(s))]

    def z_1_exact(i: Instances) -> Values:
        return [unfolding_norm(i.attention.Z_1)]

    def total(bound: Callable[[Instances], Values]) -> Comparison:
        return Comparison(("total",), _attention_loss, bound, _attention_loss_second)

    def three_max(blocks: Callable[[Instances], dict]) -> Callable[[Instances], Values]:
        return lambda i: [_full(pb.attention_hessian_bound(blocks(i)), i)]

    def by_block(blocks: Callable[[Instances], dict]) -> Comparison:
        names = tuple("".join(pair) for pair in MAIN_PAIRS)
        return Comparison(
            names,
            _attention_loss_blocks,
            lambda i: [_full(blocks(i)[pair], i) for pair in MAIN_PAIRS],
            _attention_loss_blocks_second,
        )

    def main(i: Instances) -> dict:
        return pb.attention_blocks_main(i.norms)

    def appendix(i: Instances) -> dict:
        return pb.attention_blocks_appendix(i.norms, i.residual_rank)

    def repaired(i: Instances) -> dict:
        return pb.attention_blocks_corrected(i.norms)

    repaired_total, repaired_blocks = total(three_max(repaired)), by_block(repaired)

    def layer_norm(order: int) -> BoundCase:
        def compare(bound: Callable[[Instances], Values]) -> Comparison:
            return Comparison(("",), _layer_norm_exact(order), bound, _layer_norm_second(order))

        return case(
            "L3_jacobian" if order == 1 else "L3_hessian",
            ("X",),
            (Sizes(1, 5, 1), Sizes(3, 7, 1), Sizes(2, 4, 1)),
            compare(_layer_norm_bound(order, deviation=False)),
            corrected=compare(_layer_norm_corrected(order)),
            other=compare(_layer_norm_bound(order, deviation=True)),
            reading="σ_min = min_i ‖M_i‖_2 as the lemma defines it",
            other_reading="σ_min = the smallest row standard deviation, which the proof uses",
        )

    def jacobians(bounds: Callable[[pb.Norms], dict]) -> Comparison:
        return Comparison(
            ATTENTION_WEIGHTS,
            lambda i: [unfolding_norm(i.attention.G[k]) for k in ATTENTION_WEIGHTS],
            lambda i: [bounds(i.norms)[k] for k in ATTENTION_WEIGHTS],
            _attention_jacobians_second,
        )

    def phi(
        id: str, pairs: tuple[pb.Pair, ...], sizes: tuple[Sizes, ...], transposed: tuple[pb.Pair, ...] = ()
    ) -> BoundCase:
        return case(
            id,
            attention,
            sizes,
            _phi_comparison(pairs, pb.attention_second_printed, loss_factor=False),
            corrected=_phi_comparison((*pairs, *transposed), pb.attention_second_corrected, loss_factor=False),
            other=_phi_comparison(pairs, pb.attention_second_printed, loss_factor=True),
            reading="Φ_kl = ∂G_k/∂W_l as T5 and L2 define it",
            other_reading="Φ with the loss's factor 2/(L d_V), which L2's formula carries",
        )

    def xi(pairs: tuple[pb.Pair, ...], bound: Callable[[Instances], Values]) -> Comparison:
        return Comparison(tuple("".join(p) for p in pairs), _xi_exact(pairs), bound, _xi_second(pairs))

    def xi_21(bound: Callable[[Instances], Values]) -> Comparison:
        both: tuple[pb.Pair, ...] = (("2", "1"), ("1", "2"))
        return Comparison(("21",), lambda i: _smallest(_xi_exact(both)(i)), bound, _xi_second(both, combine=_smallest))

    def outputs(pairs: tuple[pb.Pair, ...], bound: Callable[[Instances], Values]) -> Comparison:
        return Comparison(tuple("".join(p) for p in pairs), _output_exact(pairs), bound, _output_second(pairs))

    def block_total(bound: Callable[[Instances], Values]) -> Comparison:
        return Comparison(("total",), _block_loss, bound, _block_loss_second)

    def y_norm(i: Instances) -> Tensor:
        return spectral_norm(i.block.Y)

    cases = [
        case(
            "P7",
            ("X",),
            MATRIX_SIZES,
            Comparison(
                tuple(f"{a}<={b}" for a, b in NORM_PAIRS),
                lambda i: [pb.matrix_norm(i.X, larger) for larger, _ in NORM_PAIRS],
                _table_bound,
                _table_second,
            ),
        ),
        case(
            "P11",
            ("X",),
            MATRIX_SIZES,
            Comparison(
                ("blocks", "diagonal<=", "diagonal>="), _block_matrix_exact, _block_matrix_bound, _block_matrix_second
            ),
            reading="m, n as the numbers of blocks, the stronger reading",
        ),
        case(
            "PR10",
            block,
            BLOCK_SIZES,
            Comparison(
                ("Y", "Y_F", "FFN", "S"),
                lambda i: [
                    y_norm(i),
                    frobenius_norm(i.block.Y),
                    spectral_norm(i.block.hidden @ i.inputs["W_2"]),
                    spectral_norm(i.block.S),
                ],
                lambda i: [
                    _full(sqrt(i.L * i.d_V), i),
                    _full(sqrt(i.L * i.d_V), i),
                    pb.feed_forward_printed(i.norms, y_norm(i)),
                    pb.block_sum_printed(i.norms),
                ],
                _proposition_10_second,
            ),
        ),
        case(
            "N1",
            logits,
            ATTENTION_SIZES,
            Comparison(("",), jacobian_norm, lambda i: _constant(pb.softmax_jacobian_printed(i.L))(i), jacobian_second),
            corrected=Comparison(
                ("",), jacobian_norm, lambda i: _constant(pb.softmax_jacobian_corrected(i.L))(i), jacobian_second
            ),
            reading="any attention; at uniform attention, which the cited lemma assumes, it is an equality",
        ),
        case(
            "N2",
            logits,
            ATTENTION_SIZES,
            Comparison(
                ("",),
                lambda i: [spectral_norm(i.attention.A)],
                lambda i: _constant(pb.attention_matrix_printed(i.L))(i),
                lambda s: [_matrix_norm(maps.attention_matrix(s["X"], s["W_Q"], s["W_K"])[0])],
            ),
            reading="sharp value sqrt(L)",
        ),
        case(
            "N3",
            logits,
            ATTENTION_SIZES,
            Comparison(
                ("",),
                second_norm,
                lambda i: _constant(pb.softmax_second_derivative_printed())(i),
                lambda s: [_matrix_norm(_softmax_second_second(s))],
            ),
            reading="the whole L⁴ x L² matrix; sharp value sqrt(2/27) = 0.272",
        ),
        case(
            "N4",
            logits,
            ATTENTION_SIZES,
            Comparison(("",), z_1_exact, lambda i: [pb.z_1_printed(i.L, spectral_norm(i.X))], z_1_second),
            corrected=Comparison(("",), z_1_exact, lambda i: [pb.z_1_corrected(i.L, spectral_norm(i.X))], z_1_second),
        ),
        case(
            "N5",
            logits,
            (Sizes(3, 4, 2), Sizes(5, 3, 2), Sizes(4, 2, 3)),
            Comparison(
                ("",),
                lambda i: [unfolding_norm(i.attention.Z_2)],
                lambda i: [pb.z_2_printed(spectral_norm(i.X))],
                lambda s: [_matrix_norm(_z_2_second(s))],
            ),
            reading="sharp constant sqrt(2/27) for 6",
        ),
        case(
            "N6",
            ("X",),
            MATRIX_SIZES,
            Comparison(
                ("",),
                lambda i: _constant(float(spectral_norm(_shuffle_matrix(i.d_V))))(i),
                lambda i: _constant(pb.shuffle_printed(i.d_V))(i),
                lambda s: [_matrix_norm(_shuffle_matrix(s["X"].shape[1]))],
            ),
            reading="an equality; the matrix has d_V³ rows, not the printed d_V²",
        ),
        case(
            "N7",
            (*attention, "residual"),
            ATTENTION_SIZES,
            Comparison(
                ("",),
                lambda i: [frobenius_norm(i.inputs["residual"])],
                lambda i: [pb.residual_operator_printed(i.norms, i.residual_rank)],
                lambda s: [_matrix_norm(_kron(s["residual"].reshape(1, -1), torch.eye(2, dtype=torch.float64)))],
            ),
        ),
        layer_norm(1),
        layer_norm(2),
        case(
            "T1_main",
            (*attention, "residual"),
            T1_SIZES,
            total(three_max(main)),
            corrected=repaired_total,
            other=Comparison(("total",), _attention_loss, _main_with_keys, _attention_loss_second),
            reading="the maximum over the four printed terms",
            other_reading="with the K–K and V–K terms added by exchanging W_Q and W_K",
        ),
        case(
            "T1_appendix",
            (*attention, "residual"),
            T1_SIZES,
            total(three_max(appendix)),
            corrected=repaired_total,
            other=Comparison(("total",), _attention_loss, _appendix_with_keys, _attention_loss_second),
            reading="the maximum over the four printed terms, rank(F − Target) as printed",
            other_reading="with the K–K and V–K terms added by exchanging W_Q and W_K",
        ),
        case("T1_main_blocks", (*attention, "residual"), ATTENTION_SIZES, by_block(main), corrected=repaired_blocks),
        case(
            "T1_appendix_blocks",
            (*attention, "residual"),
            ATTENTION_SIZES,
            by_block(appendix),
            corrected=repaired_blocks,
        ),
        case("T6_block", block, BLOCK_SIZES, outputs(ALL_PAIRS, _block_pairs_bound), reading="every norm exact"),
        case(
            "T6_total_exact_norms",
            (*block, "residual"),
            BLOCK_SIZES,
            block_total(_block_total_bound),
            reading="H_tr as the loss Hessian of the mean squared error, every norm exact",
        ),
        case(
            "T6_explicit_pairs",
            block,
            BLOCK_SIZES,
            outputs(PRINTED_PAIRS, _explicit_pairs(PRINTED_PAIRS, corrected=False)),
            corrected=outputs(ALL_PAIRS, _explicit_pairs(ALL_PAIRS, corrected=True)),
            reading="σ_min the row standard deviation; ξ_k1 and ξ_k2 have no printed bound",
        ),
        case(
            "T6_explicit_total",
            (*block, "residual"),
            BLOCK_SIZES,
            block_total(_explicit_total(corrected=False)),
            corrected=block_total(_explicit_total(corrected=True)),
            reading="the maximum over the pairs with a printed bound",
        ),
        case(
            "T6_B",
            block,
            BLOCK_SIZES,
            Comparison(
                BLOCK_WEIGHTS,
                lambda i: [unfolding_norm(i.block.B[k]) for k in BLOCK_WEIGHTS],
                lambda i: [
                    i.norms.w_2 * y_norm(i),
                    spectral_norm(i.block.hidden),
                    *(
                        row_blocks_norm(i.block.J_SY)
                        * row_blocks_norm(i.block.J_Y)
                        * unfolding_norm(i.block.attention.G[k])
                        for k in ATTENTION_WEIGHTS
                    ),
                ],
                _b_second,
            ),
        ),
        case(
            "T6_J_SY",
            block,
            BLOCK_SIZES,
            Comparison(
                ("",),
                lambda i: [row_blocks_norm(i.block.J_SY)],
                lambda i: [pb.residual_jacobian_printed(i.norms)],
                _j_sy_second,
            ),
        ),
        case(
            "T6_G",
            attention,
            ATTENTION_SIZES,
            jacobians(pb.attention_jacobian_printed),
            corrected=jacobians(pb.attention_jacobian_corrected),
        ),
        phi("T6_Phi_QQ", (("Q", "Q"), ("K", "K")), (Sizes(3, 5, 2), Sizes(5, 3, 2), Sizes(16, 4, 2))),
        phi("T6_Phi_VQ", (("V", "Q"), ("V", "K")), ATTENTION_SIZES, transposed=(("Q", "V"), ("K", "V"))),
        phi("T6_Phi_QK", (("Q", "K"), ("K", "Q")), ATTENTION_SIZES),
        case(
            "T6_xi_12",
            block,
            BLOCK_SIZES,
            xi((("1", "2"), ("2", "1")), lambda i: [sqrt(i.d_V) * y_norm(i)] * 2),
            reading="both ∂B_1/∂W_2 and ∂B_2/∂W_1, which the proof calls ξ_12",
        ),
        case(
            "T6_xi_21",
            block,
            BLOCK_SIZES,
            xi_21(lambda i: [pb.xi_21_printed(i.norms)]),
            corrected=xi((("2", "1"), ("1", "2")), lambda i: [pb.xi_21_corrected(i.norms, y_norm(i))] * 2),
            reading="the smaller of ∂B_2/∂W_1 and ∂B_1/∂W_2; the printed product has factors that do not multiply",
        ),
        case("T6_xi_1k", block, BLOCK_SIZES, xi(MIXED_PAIRS_1, _xi_1k_bound), reading="‖J_Y‖, ‖G_k‖ exact"),
        case("T6_xi_2k", block, BLOCK_SIZES, xi(MIXED_PAIRS_2, _xi_2k_bound), reading="‖J_Y‖, ‖G_k‖ exact"),
        case(
            "T6_xi_kl",
            block,
            BLOCK_SIZES,
            xi(ATTENTION_PAIRS, _xi_kl_bound),
            reading="norms on the right exact, Φ = ∂²F/∂W_k∂W_l",
        ),
    ]
    return {c.id: c for c in cases}


BOUND_CASES: dict[str, BoundCase] = _cases()
