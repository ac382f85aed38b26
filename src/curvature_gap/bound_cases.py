"""What each printed bound compares: the exact quantity, the bound, and the exact quantity by a second method.

Every statement becomes a `BoundCase`. Its `printed` comparison is the paper's; `corrected` is the valid form where the
printed one fails; `other` is a second reading of the print, reported in the note. A comparison may have several
pieces (one per block, say), each searched for.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from curvature_gap import bound_oracles as oracles
from curvature_gap.bound_instances import Instances, Sizes
from curvature_gap.bound_oracles import (
    ALL_PAIRS,
    ATTENTION_PAIRS,
    MAIN_PAIRS,
    NORM_PAIRS,
    Oracle,
    blocks_of,
    places_of,
    shuffle_matrix,
)
from curvature_gap.theory import printed_bounds as pb
from curvature_gap.theory.exact_norms import (
    ATTENTION_WEIGHTS,
    BLOCK_WEIGHTS,
    frobenius_norm,
    layer_norm_hessian_blocks,
    layer_norm_jacobian_blocks,
    row_blocks_norm,
    softmax_jacobian,
    softmax_second_derivative,
    spectral_norm,
    unfolding_norm,
)

Sides = Sequence[pb.Number]
Side = Callable[[Instances], Sides]
Blocks = Callable[[Instances], Mapping[pb.Pair, pb.Number]]
ATTENTION = ("X", "W_Q", "W_K", "W_V")
BLOCK = (*ATTENTION, "W_1", "W_2")
ATTENTION_SIZES = (Sizes(3, 5, 2), Sizes(5, 3, 2), Sizes(7, 2, 3))
T1_SIZES = (Sizes(3, 5, 2), Sizes(7, 2, 3), Sizes(49, 2, 2))
BLOCK_SIZES = (Sizes(2, 3, 1, 2), Sizes(3, 4, 1, 2))
MATRIX_SIZES = (Sizes(2, 5, 1), Sizes(5, 3, 1), Sizes(3, 7, 1))
# ξ_k1 and ξ_k2 have no printed bound.
PRINTED_PAIRS = tuple(pair for pair in ALL_PAIRS if pair[0] in "12" or pair[1] in "KQV")


@dataclass(frozen=True)
class Comparison:
    """`exact(instances)` against `bound(instances)`, piece by piece; `second(inputs)` repeats the exact side.

    `exact` and `bound` return a number or a tensor (b,) per piece; `second` one number per piece of one instance.
    """

    pieces: tuple[str, ...]
    exact: Side
    bound: Side
    second: Oracle

    def sides(self, instances: Instances) -> tuple[Tensor, Tensor]:
        """Return both sides as tensors (b, pieces)."""
        return _stacked(self.exact(instances), instances.X), _stacked(self.bound(instances), instances.X)


def _stacked(values: Sides, X: Tensor) -> Tensor:
    return torch.stack([torch.as_tensor(v, dtype=X.dtype).expand(len(X)) for v in values], dim=-1)


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
    exact_side: str = ""
    """Cases of one name, inputs and sizes share derivatives: their ascents go together. Empty: alone."""

    @property
    def climbed(self) -> tuple[Sizes, ...]:
        """The sizes that ascents are spread over: all; of the block, whose derivatives cost most, the last alone."""
        return self.sizes[-1:] if "W_1" in self.inputs else self.sizes


def _single(exact: Side, bound: Side, second: Oracle) -> Comparison:
    """A comparison of one piece."""
    return Comparison(("",), exact, bound, second)


def _names(pairs: Sequence[pb.Pair]) -> tuple[str, ...]:
    return tuple("".join(pair) for pair in pairs)


# --- The exact and the printed sides ------------------------------------------------------------------------------


def _attention_loss(i: Instances) -> Sides:
    return [i.once("attention loss", lambda: spectral_norm(i.attention_loss_hessian))]


def _attention_loss_blocks(i: Instances) -> Sides:
    H = i.attention_loss_hessian
    places = places_of({k: i.attention.U[k].shape[-1] if k != "V" else i.d_V**2 for k in ATTENTION_WEIGHTS})

    def norm(a: str, b: str) -> Tensor:
        return i.once(("attention loss", a, b), lambda: spectral_norm(H[:, places[a], places[b]]))

    return [norm(*pair) for pair in MAIN_PAIRS]


def _main_with_keys(i: Instances) -> Sides:
    swapped = pb.attention_blocks_main(pb.exchange_query_key(i.norms))
    blocks = pb.with_key_blocks(pb.attention_blocks_main(i.norms), swapped)
    return [pb.attention_hessian_bound(blocks)]


def _appendix_with_keys(i: Instances) -> Sides:
    swapped = pb.attention_blocks_appendix(pb.exchange_query_key(i.norms), i.residual_rank)
    blocks = pb.with_key_blocks(pb.attention_blocks_appendix(i.norms, i.residual_rank), swapped)
    return [pb.attention_hessian_bound(blocks)]


def _rows(i: Instances) -> tuple[Tensor, Tensor, Tensor]:
    """Return ‖X‖_2, the smallest centred row norm and the smallest row standard deviation."""

    def compute() -> tuple[Tensor, Tensor, Tensor]:
        M = i.X - i.X.mean(dim=-1, keepdim=True)
        norm = torch.linalg.vector_norm(M, dim=-1).amin(dim=-1)
        return spectral_norm(i.X), norm, norm / sqrt(i.d_V)

    return i.once("rows", compute)


def _layer_norm_exact(order: int) -> Side:
    if order == 1:
        return lambda i: [i.once("LN Jacobian", lambda: row_blocks_norm(layer_norm_jacobian_blocks(i.X)))]

    def hessian_norm(i: Instances) -> Tensor:
        return spectral_norm(layer_norm_hessian_blocks(i.X).flatten(-3, -2)).amax(dim=-1)

    return lambda i: [i.once("LN Hessian", lambda: hessian_norm(i))]


def _layer_norm_bound(order: int, deviation: bool) -> Side:
    def bound(i: Instances) -> Sides:
        x, norm, s = _rows(i)
        sigma = s if deviation else norm
        if order == 1:
            return [pb.layer_norm_jacobian_printed(x, sigma, i.d_V)]
        return [pb.layer_norm_hessian_printed(x, sigma, i.L, i.d_V)]

    return bound


def _layer_norm_corrected(order: int) -> Side:
    exact = pb.layer_norm_jacobian_exact if order == 1 else pb.layer_norm_hessian_exact
    return lambda i: [exact(_rows(i)[2], i.d_V)]


def _phi_exact(pairs: tuple[pb.Pair, ...], loss_factor: bool) -> Side:
    def exact(i: Instances) -> Sides:
        scale = 2 / (i.L * i.d_V) if loss_factor else 1.0
        return [scale * i.second_norm(*pair) for pair in pairs]

    return exact


def _phi_comparison(
    pairs: tuple[pb.Pair, ...], bounds: Callable[[pb.Norms], Mapping[pb.Pair, pb.Number]], loss_factor: bool
) -> Comparison:
    return Comparison(
        tuple("".join(pair) for pair in pairs),
        _phi_exact(pairs, loss_factor),
        lambda i: [bounds(i.norms)[pair] for pair in pairs],
        oracles.attention_second_derivatives(pairs, loss_factor),
    )


def _xi_norms(i: Instances, pairs: tuple[pb.Pair, ...]) -> list[Tensor]:
    return [i.sum_second_norm(*pair) for pair in pairs]


def _smallest(values: Sequence[Tensor]) -> list[Tensor]:
    return [torch.stack(list(values)).amin(dim=0)]


def _xi_1k_bound(i: Instances) -> Sides:
    scale = sqrt(i.norms.d_ff) * i.norms.w_2 * i.row_norm("J_Y")
    return [scale * i.jacobian_norm(k) for k in ATTENTION_WEIGHTS]


def _xi_2k_bound(i: Instances) -> Sides:
    scale = sqrt(i.d_V) * i.norms.w_1 * i.row_norm("J_Y")
    return [scale * i.jacobian_norm(k) for k in ATTENTION_WEIGHTS]


def _xi_kl_bound(i: Instances) -> Sides:
    J_SY, J_Y, H_Y = (i.row_norm(name) for name in ("J_SY", "J_Y", "H_Y"))
    G = {k: i.jacobian_norm(k) for k in ATTENTION_WEIGHTS}
    return [J_SY * (G[k] * H_Y * G[m] + J_Y * i.second_norm(k, m)) for k, m in ATTENTION_PAIRS]


def _exact_pieces(i: Instances) -> pb.BlockNorms:
    """The block bound's pieces with every norm exact."""
    return pb.BlockNorms(
        J_Z=i.row_norm("J_Z"),
        H_Z=i.row_norm("H_Z"),
        B={k: i.sum_jacobian_norm(k) for k in BLOCK_WEIGHTS},
        xi={pair: i.sum_second_norm(*pair) for pair in ALL_PAIRS},
    )


def _block_pairs_bound(i: Instances) -> Sides:
    bounds = _exact_pieces(i).second_derivatives()
    return [bounds[pair] for pair in ALL_PAIRS]


def _output_exact(pairs: tuple[pb.Pair, ...]) -> Side:
    return lambda i: [i.output_second_norm(*pair) for pair in pairs]


def _block_loss(i: Instances) -> Sides:
    return [i.once("block loss", lambda: spectral_norm(i.block_loss_hessian))]


def _block_total_bound(i: Instances) -> Sides:
    """5 max_ij (2/(L d_V) ‖∂Z/∂W_i‖ ‖∂Z/∂W_j‖ + ‖R‖ ‖H_tr^(i,j)‖), every norm exact."""
    residual = frobenius_norm(i.inputs["residual"])
    J = {k: unfolding_norm(i.block.output_jacobian(k)) for k in BLOCK_WEIGHTS}
    terms = [2 / (i.L * i.d_V) * J[p] * J[q] + residual * i.output_second_norm(p, q) for p, q in ALL_PAIRS]
    return [5 * torch.stack(terms).amax(dim=0)]


def _explicit(i: Instances, corrected: bool) -> pb.BlockNorms:
    pieces = pb.explicit_block_norms_corrected if corrected else pb.explicit_block_norms_printed
    s_Y, s_Z = (_smallest_deviation(X) for X in (i.block.U, i.block.S))
    return i.once(("explicit", corrected), lambda: pieces(i.norms, _hidden(i), s_Y, s_Z))


def _hidden(i: Instances) -> Tensor:
    """‖σ(Y W_1)‖."""
    return i.once("hidden", lambda: spectral_norm(i.block.hidden))


def _smallest_deviation(X: Tensor) -> Tensor:
    return X.std(dim=-1, correction=0).amin(dim=-1)


def _explicit_pairs(pairs: tuple[pb.Pair, ...], corrected: bool) -> Side:
    def bound(i: Instances) -> Sides:
        bounds = _explicit(i, corrected).second_derivatives()
        return [bounds[pair] for pair in pairs]

    return bound


def _explicit_total(corrected: bool) -> Side:
    def bound(i: Instances) -> Sides:
        residual, scale = frobenius_norm(i.inputs["residual"]), 2 / (i.L * i.d_V)
        return [_explicit(i, corrected).loss_hessian(residual, scale, scale if corrected else 1.0)]

    return bound


def _matrix_norm(i: Instances, name: str) -> Tensor:
    return i.once(("norm", name), lambda: pb.matrix_norm(i.X, name))


def _table_bound(i: Instances) -> Sides:
    m, n = i.L, i.d_V
    rank = torch.linalg.matrix_rank(i.X.detach()).to(i.X.dtype)
    bounds = []
    for larger, smaller in NORM_PAIRS:
        norm = _matrix_norm(i, smaller)
        constant = rank.sqrt() if (larger, smaller) == ("F", "2") else pb.norm_constant(larger, smaller, m, n, 1)
        bounds.append(constant * norm)
    return bounds


def _block_diagonal(blocks: list[Tensor]) -> Tensor:
    """Return diag(first, last) for a batch."""
    first, last = blocks[0], blocks[-1]
    top = torch.cat([first, first.new_zeros(*first.shape[:-1], last.shape[-1])], dim=-1)
    bottom = torch.cat([last.new_zeros(*last.shape[:-1], first.shape[-1]), last], dim=-1)
    return torch.cat([top, bottom], dim=-2)


def _block_matrix_exact(i: Instances) -> Sides:
    blocks = blocks_of(i.X)
    diagonal, largest_block = spectral_norm(_block_diagonal(blocks)), _diagonal_blocks_norm(blocks)
    return [spectral_norm(i.X), diagonal, largest_block]


def _diagonal_blocks_norm(blocks: list[Tensor]) -> Tensor:
    return torch.stack([spectral_norm(blocks[0]), spectral_norm(blocks[-1])]).amax(dim=0)


def _block_matrix_bound(i: Instances) -> Sides:
    blocks = blocks_of(i.X)
    largest_block = torch.stack([spectral_norm(block) for block in blocks]).amax(dim=0)
    diagonal = _diagonal_blocks_norm(blocks)
    return [pb.block_matrix_printed(largest_block, 2, 2), diagonal, spectral_norm(_block_diagonal(blocks))]


# --- Norms and norm facts -----------------------------------------------------------------------------------------


def _matrix_cases() -> list[BoundCase]:
    table = Comparison(
        tuple(f"{a}<={b}" for a, b in NORM_PAIRS),
        lambda i: [_matrix_norm(i, larger) for larger, _ in NORM_PAIRS],
        _table_bound,
        oracles.matrix_norms,
    )
    blocks = Comparison(
        ("blocks", "diagonal<=", "diagonal>="), _block_matrix_exact, _block_matrix_bound, oracles.block_matrix
    )
    return [
        BoundCase("P7", ("X",), MATRIX_SIZES, table),
        BoundCase("P11", ("X",), MATRIX_SIZES, blocks, reading="m, n as the numbers of blocks, the stronger reading"),
    ]


def _softmax_jacobian_norm(i: Instances) -> Sides:
    return [i.once("softmax jacobian", lambda: row_blocks_norm(softmax_jacobian(i.attention.A)))]


def _softmax_second_norm(i: Instances) -> Sides:
    return [
        i.once(
            "softmax second",
            lambda: spectral_norm(softmax_second_derivative(i.attention.A).flatten(-3, -2)).amax(dim=-1),
        )
    ]


def _z_1_norm(i: Instances) -> Sides:
    return [i.once("Z_1", lambda: unfolding_norm(i.attention.Z_1))]


def _norm_fact_cases() -> list[BoundCase]:
    return [
        BoundCase(
            "N1",
            ATTENTION,
            ATTENTION_SIZES,
            _single(_softmax_jacobian_norm, lambda i: [pb.softmax_jacobian_printed(i.L)], oracles.softmax_jacobian),
            corrected=_single(
                _softmax_jacobian_norm, lambda i: [pb.softmax_jacobian_corrected(i.L)], oracles.softmax_jacobian
            ),
            reading="any attention; at uniform attention, which the cited lemma assumes, it is an equality",
        ),
        BoundCase(
            "N2",
            ATTENTION,
            ATTENTION_SIZES,
            _single(
                lambda i: [spectral_norm(i.attention.A)],
                lambda i: [pb.attention_matrix_printed(i.L)],
                oracles.attention_matrix,
            ),
            reading="sharp value sqrt(L)",
        ),
        BoundCase(
            "N3",
            ATTENTION,
            ATTENTION_SIZES,
            _single(
                _softmax_second_norm,
                lambda i: [pb.softmax_second_derivative_printed()],
                oracles.softmax_second_derivative,
            ),
            reading="the whole L⁴ x L² matrix; sharp value sqrt(2/27) = 0.272",
        ),
        BoundCase(
            "N4",
            ATTENTION,
            ATTENTION_SIZES,
            _single(_z_1_norm, lambda i: [pb.z_1_printed(i.L, i.norms.x)], oracles.z_1),
            corrected=_single(_z_1_norm, lambda i: [pb.z_1_corrected(i.L, i.norms.x)], oracles.z_1),
        ),
        BoundCase(
            "N5",
            ATTENTION,
            (Sizes(3, 4, 2), Sizes(5, 3, 2), Sizes(4, 2, 3)),
            _single(lambda i: [unfolding_norm(i.attention.Z_2)], lambda i: [pb.z_2_printed(i.norms.x)], oracles.z_2),
            reading="sharp constant sqrt(2/27) for 6",
        ),
        BoundCase(
            "N6",
            ("X",),
            MATRIX_SIZES,
            _single(
                lambda i: [spectral_norm(shuffle_matrix(i.d_V))],
                lambda i: [pb.shuffle_printed(i.d_V)],
                oracles.shuffle,
            ),
            reading="an equality; the matrix has d_V³ rows, not the printed d_V²",
        ),
        BoundCase(
            "N7",
            (*ATTENTION, "residual"),
            ATTENTION_SIZES,
            _single(
                lambda i: [frobenius_norm(i.inputs["residual"])],
                lambda i: [pb.residual_operator_printed(i.norms, i.residual_rank)],
                oracles.residual_operator,
            ),
        ),
    ]


# --- LayerNorm ----------------------------------------------------------------------------------------------------


def _layer_norm_case(order: int) -> BoundCase:
    def compare(bound: Side) -> Comparison:
        return _single(_layer_norm_exact(order), bound, oracles.layer_norm_derivative(order))

    return BoundCase(
        "L3_jacobian" if order == 1 else "L3_hessian",
        ("X",),
        (Sizes(1, 5, 1), Sizes(3, 7, 1), Sizes(2, 4, 1)),
        compare(_layer_norm_bound(order, deviation=False)),
        corrected=compare(_layer_norm_corrected(order)),
        other=compare(_layer_norm_bound(order, deviation=True)),
        reading="σ_min = min_i ‖M_i‖_2 as the lemma defines it",
        other_reading="σ_min = the smallest row standard deviation, which the proof uses",
    )


# --- The self-attention theorem -----------------------------------------------------------------------------------


def _main(i: Instances) -> Mapping[pb.Pair, pb.Number]:
    return pb.attention_blocks_main(i.norms)


def _appendix(i: Instances) -> Mapping[pb.Pair, pb.Number]:
    return pb.attention_blocks_appendix(i.norms, i.residual_rank)


def _attention_total(bound: Side) -> Comparison:
    return Comparison(("total",), _attention_loss, bound, oracles.attention_loss)


def _three_max(blocks: Blocks) -> Comparison:
    return _attention_total(lambda i: [pb.attention_hessian_bound(blocks(i))])


def _by_block(blocks: Blocks) -> Comparison:
    return Comparison(
        _names(MAIN_PAIRS),
        _attention_loss_blocks,
        lambda i: [blocks(i)[pair] for pair in MAIN_PAIRS],
        oracles.attention_loss_blocks,
    )


def _attention_cases() -> list[BoundCase]:
    inputs = (*ATTENTION, "residual")
    # One object for both versions: the search of a corrected form is shared by identity.
    total = _three_max(lambda i: pb.attention_blocks_corrected(i.norms))
    by_block = _by_block(lambda i: pb.attention_blocks_corrected(i.norms))
    with_keys = "with the K–K and V–K terms added by exchanging W_Q and W_K"
    return [
        BoundCase(
            "T1_main",
            inputs,
            T1_SIZES,
            _three_max(_main),
            corrected=total,
            other=_attention_total(_main_with_keys),
            reading="the maximum over the four printed terms",
            other_reading=with_keys,
            exact_side="attention loss",
        ),
        BoundCase(
            "T1_appendix",
            inputs,
            T1_SIZES,
            _three_max(_appendix),
            corrected=total,
            other=_attention_total(_appendix_with_keys),
            reading="the maximum over the four printed terms, rank(F − Target) as printed",
            other_reading=with_keys,
            exact_side="attention loss",
        ),
        BoundCase(
            "T1_main_blocks",
            inputs,
            T1_SIZES,
            _by_block(_main),
            corrected=by_block,
            exact_side="attention loss blocks",
        ),
        BoundCase(
            "T1_appendix_blocks",
            inputs,
            T1_SIZES,
            _by_block(_appendix),
            corrected=by_block,
            exact_side="attention loss blocks",
        ),
    ]


# --- The block theorem --------------------------------------------------------------------------------------------


def _outputs(pairs: tuple[pb.Pair, ...], bound: Side) -> Comparison:
    return Comparison(_names(pairs), _output_exact(pairs), bound, oracles.output_second_derivatives(pairs))


def _block_total(bound: Side) -> Comparison:
    return Comparison(("total",), _block_loss, bound, oracles.block_loss)


def _block_cases() -> list[BoundCase]:
    return [
        BoundCase(
            "T6_block",
            BLOCK,
            BLOCK_SIZES,
            _outputs(ALL_PAIRS, _block_pairs_bound),
            reading="every norm exact",
            exact_side="second derivative of Z",
        ),
        BoundCase(
            "T6_total_exact_norms",
            (*BLOCK, "residual"),
            BLOCK_SIZES,
            _block_total(_block_total_bound),
            reading="H_tr as the loss Hessian of the mean squared error, every norm exact",
            exact_side="loss Hessian of the block",
        ),
        BoundCase(
            "T6_explicit_pairs",
            BLOCK,
            BLOCK_SIZES,
            _outputs(PRINTED_PAIRS, _explicit_pairs(PRINTED_PAIRS, corrected=False)),
            corrected=_outputs(ALL_PAIRS, _explicit_pairs(ALL_PAIRS, corrected=True)),
            reading="σ_min the row standard deviation; ξ_k1 and ξ_k2 have no printed bound",
            exact_side="second derivative of Z",
        ),
        BoundCase(
            "T6_explicit_total",
            (*BLOCK, "residual"),
            BLOCK_SIZES,
            _block_total(_explicit_total(corrected=False)),
            corrected=_block_total(_explicit_total(corrected=True)),
            reading="the maximum over the pairs with a printed bound",
            exact_side="loss Hessian of the block",
        ),
    ]


# --- The explicit pieces of the block theorem ---------------------------------------------------------------------


def _y(i: Instances) -> Tensor:
    return i.once("Y", lambda: spectral_norm(i.block.Y))


def _proposition_10() -> BoundCase:
    comparison = Comparison(
        ("Y", "Y_F", "FFN", "S"),
        lambda i: [
            _y(i),
            frobenius_norm(i.block.Y),
            spectral_norm(i.block.hidden @ i.inputs["W_2"]),
            spectral_norm(i.block.S),
        ],
        lambda i: [
            sqrt(i.L * i.d_V),
            sqrt(i.L * i.d_V),
            pb.feed_forward_printed(i.norms, _y(i)),
            pb.block_sum_printed(i.norms),
        ],
        oracles.proposition_10,
    )
    return BoundCase("PR10", BLOCK, BLOCK_SIZES, comparison)


def _b_bound(i: Instances) -> Sides:
    chain = i.row_norm("J_SY") * i.row_norm("J_Y")
    attention = [chain * i.jacobian_norm(k) for k in ATTENTION_WEIGHTS]
    return [i.norms.w_2 * _y(i), _hidden(i), *attention]


def _jacobians(bounds: Callable[[pb.Norms], Mapping[str, pb.Number]]) -> Comparison:
    return Comparison(
        ATTENTION_WEIGHTS,
        lambda i: [i.jacobian_norm(k) for k in ATTENTION_WEIGHTS],
        lambda i: [bounds(i.norms)[k] for k in ATTENTION_WEIGHTS],
        oracles.attention_jacobians,
    )


def _phi_case(
    id: str, pairs: tuple[pb.Pair, ...], sizes: tuple[Sizes, ...], transposed: tuple[pb.Pair, ...] = ()
) -> BoundCase:
    return BoundCase(
        id,
        ATTENTION,
        sizes,
        _phi_comparison(pairs, pb.attention_second_printed, loss_factor=False),
        corrected=_phi_comparison((*pairs, *transposed), pb.attention_second_corrected, loss_factor=False),
        other=_phi_comparison(pairs, pb.attention_second_printed, loss_factor=True),
        reading="Φ_kl = ∂G_k/∂W_l as T5 and L2 define it",
        other_reading="Φ with the loss's factor 2/(L d_V), which L2's formula carries",
        exact_side="Φ",
    )


def _xi(pairs: tuple[pb.Pair, ...], bound: Side) -> Comparison:
    return Comparison(_names(pairs), lambda i: _xi_norms(i, pairs), bound, oracles.sum_second_derivatives(pairs))


def _xi_21_case() -> BoundCase:
    both: tuple[pb.Pair, ...] = (("2", "1"), ("1", "2"))
    return BoundCase(
        "T6_xi_21",
        BLOCK,
        BLOCK_SIZES,
        Comparison(
            ("21",),
            lambda i: _smallest(_xi_norms(i, both)),
            lambda i: [pb.xi_21_printed(i.norms)],
            oracles.sum_second_derivatives(both, combine=_smallest),
        ),
        corrected=_xi(both, lambda i: [pb.xi_21_corrected(i.norms, _y(i))] * 2),
        reading="the smaller of ∂B_2/∂W_1 and ∂B_1/∂W_2; the printed product has factors that do not multiply",
        exact_side="ξ",
    )


def _piece_cases() -> list[BoundCase]:
    first = tuple(("1", k) for k in ATTENTION_WEIGHTS)
    second = tuple(("2", k) for k in ATTENTION_WEIGHTS)
    exact = "‖J_Y‖, ‖G_k‖ exact"
    return [
        BoundCase(
            "T6_B",
            BLOCK,
            BLOCK_SIZES,
            Comparison(
                BLOCK_WEIGHTS,
                lambda i: [i.sum_jacobian_norm(k) for k in BLOCK_WEIGHTS],
                _b_bound,
                oracles.sum_jacobians,
            ),
        ),
        BoundCase(
            "T6_J_SY",
            BLOCK,
            BLOCK_SIZES,
            _single(
                lambda i: [i.row_norm("J_SY")],
                lambda i: [pb.residual_jacobian_printed(i.norms)],
                oracles.residual_jacobian,
            ),
        ),
        BoundCase(
            "T6_G",
            ATTENTION,
            ATTENTION_SIZES,
            _jacobians(pb.attention_jacobian_printed),
            corrected=_jacobians(pb.attention_jacobian_corrected),
        ),
        _phi_case("T6_Phi_QQ", (("Q", "Q"), ("K", "K")), (Sizes(3, 5, 2), Sizes(5, 3, 2), Sizes(16, 4, 2))),
        _phi_case("T6_Phi_VQ", (("V", "Q"), ("V", "K")), ATTENTION_SIZES, transposed=(("Q", "V"), ("K", "V"))),
        _phi_case("T6_Phi_QK", (("Q", "K"), ("K", "Q")), ATTENTION_SIZES),
        BoundCase(
            "T6_xi_12",
            BLOCK,
            BLOCK_SIZES,
            _xi((("1", "2"), ("2", "1")), lambda i: [sqrt(i.d_V) * _y(i)] * 2),
            reading="both ∂B_1/∂W_2 and ∂B_2/∂W_1, which the proof calls ξ_12",
            exact_side="ξ",
        ),
        _xi_21_case(),
        BoundCase("T6_xi_1k", BLOCK, BLOCK_SIZES, _xi(first, _xi_1k_bound), reading=exact, exact_side="ξ"),
        BoundCase("T6_xi_2k", BLOCK, BLOCK_SIZES, _xi(second, _xi_2k_bound), reading=exact, exact_side="ξ"),
        BoundCase(
            "T6_xi_kl",
            BLOCK,
            BLOCK_SIZES,
            _xi(ATTENTION_PAIRS, _xi_kl_bound),
            reading="norms on the right exact, Φ = ∂²F/∂W_k∂W_l",
            exact_side="ξ",
        ),
    ]


BOUND_CASES: dict[str, BoundCase] = {
    case.id: case
    for case in (
        *_matrix_cases(),
        _proposition_10(),
        *_norm_fact_cases(),
        _layer_norm_case(1),
        _layer_norm_case(2),
        *_attention_cases(),
        *_block_cases(),
        *_piece_cases(),
    )
}
