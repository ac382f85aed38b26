"""Which per-token matrices meet in which block: the first and second derivatives of the groups of parameters.

Three kinds of terms make a block of the functional part of the loss Hessian (the logits' own curvature is added in
`closed_form`):

- both parameters move the same token: tangentᵀ (second derivative behind) tangent, the outer products in the layers;
- one moves what the other is multiplied by: ∂U = Y ∂W_1 while R moves Y, and so on (`targets`);
- two factors of one product move at once: T = X B Xᵀ, X C, gamma ∘ r̂, Y W_1, h W_2 (`add_moved_…`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from curvature_gap.block_requests import ATTENTION, FEED_FORWARD, Pair, Plan, Span
from curvature_gap.shapes import Float
from curvature_gap.token_curvature import AttentionCurvature, FeedForwardCurvature, Forward, Weights, with_ones
from curvature_gap.token_sums import (
    KEY,
    MATRIX_FIRST,
    VALUE,
    VALUE_OF_R_BAR,
    VECTOR_FIRST,
    Side,
    Square,
    Sums,
    accumulate,
    outer,
    pack,
    pack_outer,
)

Spans = tuple[Span, Span]


@dataclass(frozen=True)
class Tangent:
    """How a group moves R, token by token: ∂R[a] = Σ matrix[α, a] vector[β], matrix None being the identity.

    `score` maps z to the statistic φ with ∂T[t, s] = vector[β] φ_s[α], None where the attention logits stay put;
    `value` says which part of z the averaged values are, None where A X C does not move by its values. The last
    numbers of the vector may be part of the one-hot vector of the position: those of the slice `positions`.
    """

    matrix: Float[Tensor, "N x a"] | None
    vector: Float[Tensor, "N b"]
    side: Side
    score: Callable[[Tensor], Tensor] | None = None
    value: slice | None = None
    positions: slice | None = None

    def pull(self, M: Float[Tensor, "N a g"], plus: Tensor | None = None) -> Float[Tensor, "N x g"]:
        """Return matrix M + plus."""
        if self.matrix is None:
            return M if plus is None else M + plus
        return self.matrix @ M if plus is None else (self.matrix @ M).add_(plus)


@dataclass(frozen=True)
class Target:
    """A mixed derivative: ∂²loss/∂R∂θ = M[a, γ] w[δ] per token, w None being a 1, times a constant.

    M is (base W) ∘ mask where W and mask are given. A tangent is applied to the base, which is narrower.
    """

    base: Float[Tensor, "N a y"]
    w: Float[Tensor, "N c"] | None
    side: Side
    constant: Tensor | None = None
    """Broadcasts to (a, γ, β, δ)."""
    W: Float[Tensor, "y g"] | None = None
    mask: Float[Tensor, "N g"] | None = None

    @property
    def M(self) -> Float[Tensor, "N a g"]:
        """Return the matrix."""
        M = self.base if self.W is None else self.base @ self.W
        return M if self.mask is None else M.mul_(self.mask[:, None, :])


@dataclass(frozen=True)
class Chunk:
    """A chunk's weights, values and curvatures; `att` is None where no attention group is asked for."""

    w: Weights
    t: Forward
    ff: FeedForwardCurvature
    att: AttentionCurvature | None
    known: dict[tuple[str, Span], list[Tangent]] = field(default_factory=dict)

    @property
    def d(self) -> int:
        return self.t.Y.shape[1]

    def tangents(self, group: str, span: Span) -> list[Tangent]:
        """Return `tangents`, computed once."""
        if (group, span) not in self.known:
            self.known[group, span] = tangents(self, group, span)
        return self.known[group, span]

    def y_hat(self, part: slice) -> Float[Tensor, "N l"]:
        """Return the input of W1: Y, and 1 for the bias."""
        return with_ones(self.t.Y, self.w.architecture.bias)[:, part]

    def h_hat(self, part: slice) -> Float[Tensor, "N l"]:
        """Return the input of W2: h, and 1 for the bias."""
        return with_ones(self.t.h, self.w.architecture.bias)[:, part]


# ------------------------------------------------------------------------------------------------- attention's groups


def tangents(chunk: Chunk, group: str, span: Span) -> list[Tangent]:
    """Return an attention group's tangents.

    B moves the logits by x_t ∂B x_sᵀ, hence R by Γ_x = Σ_s A x_s (x_s C − F), a covariance. C moves R by A X. The
    inputs do both, and move X itself: as query and residual x_t, as values, and as keys, with κ = X B.

    Source: G.
    """
    t, att, B, C_Q, d = chunk.t, chunk.att, chunk.w.B, chunk.w.C_Q, chunk.d
    assert att is not None
    X = t.X.flatten(0, 1)
    if group == "C":
        return [Tangent(None, att.mean[:, span.leading], VECTOR_FIRST, value=span.leading)]
    if group == "B":
        keys = span.trailing
        Gamma = att.covariance[:, keys, :d] @ C_Q
        return [Tangent(Gamma, X[:, span.leading], VECTOR_FIRST, score=lambda z: z[:, keys])]
    inputs = slice(d + span.start, d + span.stop)
    as_query = B @ (att.covariance[:, :d, :d] @ C_Q) + chunk.w.Q
    as_key = att.covariance[:, inputs, :d] @ C_Q
    p = t.p.flatten(0, 1)[:, span.leading]
    return [
        Tangent(as_query, p, VECTOR_FIRST, lambda z: B @ z[:, :d], positions=positions_in(chunk, span)),
        Tangent(None, att.mean[:, inputs], VALUE, value=inputs),
        Tangent(as_key, X, KEY, score=lambda z: z[:, inputs]),
    ]


def positions_in(chunk: Chunk, span: Span) -> slice | None:
    """Return which positions' rows are in a span of E, if they are learned."""
    a = chunk.w.architecture
    before = a.patch_size + a.bias
    if a.positions != "learned" or span.stop <= before:
        return None
    return slice(max(span.start - before, 0), span.stop - before)


def add_tangent(sums: Sums, chunk: Chunk, pair: Pair, f: Tangent, target: Target, mirrored: bool = False) -> None:
    """Add M ⊗ (f's vector) ⊗ w; one-hot vectors are summed position by position instead of multiplied by zeros."""
    M, w, v = target.M, target.w, f.vector
    if f.positions is not None:
        n, L = chunk.t.X.shape[:2]
        some = f.positions
        M_there = M.view(n, L, *M.shape[1:])[:, some]
        w_there = None if w is None else w.reshape(n, L, -1)[:, some]
        sums.add_by_position(pair, (replace(f.side, position=True), target.side), M_there, w_there, mirrored)
        v = v[:, : v.shape[1] - (some.stop - some.start)]
    if v.shape[1]:
        sums.add(pair, (f.side, target.side), M, v, w, mirrored, target.constant)


def attention_pair(sums: Sums, chunk: Chunk, pair: Pair, spans: Spans) -> None:
    """Add tangentᵀ H_RR tangent and the second derivatives of A and of A (X C) against R_bar. Source: OP, FN, L2."""
    att, ff = chunk.att, chunk.ff
    assert att is not None
    same = pair[0] == pair[1] and spans[0] == spans[1]
    columns = chunk.tangents(pair[1], spans[1])
    for j, g in enumerate(columns):
        H_R = ff.H_RR if g.matrix is None else ff.H_RR @ g.matrix.mT
        third = g.score(att.third).mT if g.score else None
        for i, f in enumerate(chunk.tangents(pair[0], spans[0])):
            if same and i > j:
                continue
            mirrored = same and i < j
            M = f.pull(H_R, f.score(third) if f.score and third is not None else None)
            if same and i == j:
                add_tangent_square(sums, chunk, pair, f, M)
            else:
                add_tangent(sums, chunk, pair, f, Target(M, g.vector, g.side), mirrored)
            # A moved row of A times a moved value: R_bar is the value's trailing index.
            if f.score and g.value:
                M = f.score(att.covariance[:, :, g.value])
                add_tangent(sums, chunk, pair, f, Target(M, ff.R_bar, of_R_bar(g.side)), mirrored)
            if f.value and g.score:
                M = g.score(att.covariance[:, :, f.value]).mT
                sums.add(pair, (of_R_bar(f.side), g.side), M, ff.R_bar, g.vector, mirrored, symmetric=same)


def of_R_bar(side: Side) -> Side:
    """Return the side of a value whose trailing index is that of R_bar, its matrix index that of the values."""
    return VALUE_OF_R_BAR if side == VALUE else MATRIX_FIRST


def add_tangent_square(sums: Sums, chunk: Chunk, pair: Pair, f: Tangent, M: Float[Tensor, "N x x"]) -> None:
    """Add M ⊗ v vᵀ for a tangent's vector; two one-hot vectors meet only at the same position."""
    v = f.vector
    if f.positions is not None:
        n, L = chunk.t.X.shape[:2]
        M_there = M.view(n, L, *M.shape[1:])[:, f.positions]
        n_dense = v.shape[1] - M_there.shape[1]
        there = replace(f.side, position=True)
        sums.add_by_position(pair, (there, there), M_there, None)
        if n_dense:
            dense = v[:, :n_dense].view(n, L, -1)[:, f.positions]
            sums.add_by_position(pair, (there, f.side), M_there, dense, mirrored=True)
        v = v[:, :n_dense]
    if v.shape[1]:
        add_square(sums, pair, f.side, M, v)


def add_square(sums: Sums, pair: Pair, side: Side, M: Float[Tensor, "N a a"], v: Float[Tensor, "N b"]) -> None:
    """Add M ⊗ v vᵀ with M symmetric, the smaller factor packed."""
    a, b = M.shape[1], v.shape[1]
    if a < b:
        sums.add_square(pair, side, pack(M), lambda i, j: outer(v[:, i], v[:, j]), Square(a, b, True))
    else:
        sums.add_square(pair, side, pack_outer(v), lambda i, j: M[:, i, j].flatten(1), Square(b, a, False))


def add_moved_products(
    block: Float[Tensor, "l t m u"],
    pair: Pair,
    spans: Spans,
    w: Weights,
    z_T_z: Float[Tensor, "z z"],
    z_A_R: Float[Tensor, "z a"],
) -> None:
    """Add the terms in which two factors of T = X B Xᵀ, or of X C, move at once.

    z_T_z = Σ z_t T_bar[t, s] z_sᵀ and z_A_R = Σ A[t, s] z_s R_barᵀ hold ∂loss/∂B and
    ∂loss/∂C Q, z = (X, p̂).
    """
    if pair[0] != "E":
        return
    d = w.architecture.d_V
    rows, columns = (slice(d + span.start, d + span.stop) for span in spans)
    leading, trailing = spans[1].leading, spans[1].trailing
    identity = torch.eye(d, dtype=block.dtype, device=block.device)
    if pair[1] == "E":
        block += torch.einsum("bg,ij->bigj", z_T_z[rows, columns], w.B)
        block += torch.einsum("gb,ji->bigj", z_T_z[columns, rows], w.B)
    elif pair[1] == "B":
        block += torch.einsum("bk,ic->bick", z_T_z[rows, trailing], identity[:, leading])
        block += torch.einsum("cb,ik->bick", z_T_z[leading, rows], identity[:, trailing])
    else:
        block += torch.einsum("ba,ij->bija", z_A_R[rows], identity[:, leading])


# ---------------------------------------------------------------------------------------------- feed-forward's groups


def scaled_rows(M: Float[Tensor, "N c x"], r_hat: Float[Tensor, "N c"]) -> Float[Tensor, "N e x"]:
    """Return the rows by (gamma, beta) from the rows by Y = gamma ∘ r̂ + beta."""
    return torch.cat([M * r_hat[:, :, None], M], dim=1)


def targets(chunk: Chunk, group: str, span: Span) -> list[Target]:
    """Return the mixed derivatives of R and a feed-forward group.

    First through H_SS, then because R moves what the group is multiplied by. Source: T5.
    """
    w, t, ff, d = chunk.w, chunk.t, chunk.ff, chunk.d
    if group == "LN1":  # ∂Y = r̂ ∘ ∂gamma: r̂ moves with R
        by_Y = ff.H_RS @ ff.M.mT
        by_gamma = by_Y * t.r_hat[:, None, :] + ff.J_R * ff.Y_bar[:, None, :]
        return [Target(torch.cat([by_gamma, by_Y], dim=-1), None, VECTOR_FIRST)]
    if group == "W1":  # ∂U = Y ∂W_1: Y moves with R
        first = Target(ff.H_RS, chunk.y_hat(span.leading), VECTOR_FIRST, W=w.W_2_Q.T, mask=t.D)
        again = slice(span.start, min(span.stop, d))
        second = Target(ff.R_to_Y[:, :, again], ff.U_bar, MATRIX_FIRST)
    else:  # ∂S = h ∂W_2: h moves with R where its unit is active
        first = Target(ff.H_RS, chunk.h_hat(span.leading), VECTOR_FIRST)
        again = slice(span.start, min(span.stop, t.h.shape[1]))
        second = Target(ff.R_to_Y, ff.S_bar, MATRIX_FIRST, W=w["W_1"][:, again], mask=t.D[:, again])
    return [first, second] if again.start < again.stop else [first]


def folded_targets(chunk: Chunk, span: Span, first: Target) -> list[Target]:
    """Return the targets of W1 for a tangent whose matrix is the identity: one dense product instead of two.

    ∂Y/∂R = Qᵀ diag(gamma)/σ − λ (Y − beta)ᵀ with λ = Qᵀ r̂/(d σ). The last part has the vector Y, as the first
    target has, and joins it; what is left has constants in place of a matrix or a vector.
    """
    w, t, ff, d = chunk.w, chunk.t, chunk.ff, chunk.d
    shift = with_ones(w["LN1_beta"], w.architecture.bias)[span.leading]
    again = slice(span.start, min(span.stop, d))
    centred = w.Q.T * w["LN1_gamma"]
    folded = (t.r_hat @ w.Q / (d * t.r_sigma))[:, :, None] * ff.U_bar[:, None, :]
    return [
        Target(first.M - folded, first.w, VECTOR_FIRST),
        Target(folded, None, Side(constant="shift"), shift),
        Target((ff.U_bar / t.r_sigma)[:, None, :], None, Side(constant="centred"), centred[:, None, None, again]),
    ]


def mixed_pairs(sums: Sums, chunk: Chunk, column: str, rows: dict[str, Spans]) -> None:
    """Add the attention groups `rows` against one feed-forward group."""
    for column_span in dict.fromkeys(spans[1] for spans in rows.values()):
        dense = targets(chunk, column, column_span)
        # W1's second target exists where Y moves, not where only its bias is asked for.
        folded = folded_targets(chunk, column_span, dense[0]) if column == "W1" and len(dense) == 2 else dense
        for row, spans in rows.items():
            if spans[1] == column_span:
                for f in chunk.tangents(row, spans[0]):
                    for target in folded if f.matrix is None else dense:
                        add_tangent(sums, chunk, (row, column), f, replace(target, base=f.pull(target.base)))


def feed_forward_pair(sums: Sums, chunk: Chunk, pair: Pair, spans: Spans) -> None:
    """Add two feed-forward groups: tangentᵀ H_SS tangent, with ∂S/∂U = D W_2 and ∂S/∂Y = M. Source: T5."""
    w, t, ff = chunk.w, chunk.t, chunk.ff
    W_2, D = w.W_2_Q, t.D
    leading, columns = spans[0].leading, spans[1].leading
    sides = (VECTOR_FIRST, VECTOR_FIRST)
    if pair == ("LN1", "LN1"):
        H_LY = scaled_rows(ff.M @ ff.H_SS, t.r_hat) @ ff.M.mT
        sums.add(pair, sides, scaled_rows(H_LY.mT, t.r_hat), None, None)
    elif pair == ("LN1", "W1"):
        H_LS = scaled_rows(ff.M @ ff.H_SS, t.r_hat)
        sums.add(pair, sides, (H_LS @ W_2.T) * D[:, None, :], None, chunk.y_hat(columns))
    elif pair == ("LN1", "W2"):
        sums.add(pair, sides, scaled_rows(ff.M @ ff.H_SS, t.r_hat), None, chunk.h_hat(columns))
    elif pair == ("W1", "W2"):
        sums.add(pair, sides, (W_2 @ ff.H_SS) * D[:, :, None], chunk.y_hat(leading), chunk.h_hat(columns))
    elif pair == ("W2", "W2"):
        if leading == columns:
            add_square(sums, pair, VECTOR_FIRST, ff.H_SS, chunk.h_hat(leading))
        else:
            sums.add(pair, sides, ff.H_SS, chunk.h_hat(leading), chunk.h_hat(columns))
    else:
        H_US = (W_2 @ ff.H_SS) * D[:, :, None]

        def H_UU(i: slice, j: slice) -> Float[Tensor, "N ij"]:
            return ((H_US[:, i] @ W_2[j].T) * D[:, None, j]).flatten(1)

        v, everything = chunk.y_hat(leading), slice(None)
        if leading == columns:
            sums.add_square(pair, VECTOR_FIRST, pack_outer(v), H_UU, Square(v.shape[1], len(W_2), False))
        else:
            M = H_UU(everything, everything).view(len(D), len(W_2), -1)
            sums.add(pair, sides, M, v, chunk.y_hat(columns))


def add_moved_layers(
    block: Float[Tensor, "l t m u"], pair: Pair, spans: Spans, w: Weights, r_S_D: Float[Tensor, "c k f"]
) -> None:
    """Add the terms in which two of gamma, beta, W_1, W_2 move at once; S is linear in each of them.

    r_S_D = Σ (r̂, 1)_c S_bar_k D_i holds the gradients by all of them.
    """
    d, f = w["W_1"].shape
    scale, shift = r_S_D[:d], r_S_D[d:]
    both = torch.stack([scale, shift.expand_as(scale)])
    n_columns = d if pair[1] == "W1" else f
    columns = slice(spans[1].start, max(spans[1].start, min(spans[1].stop, n_columns)))
    inside = block[:, :, : columns.stop - columns.start]
    if pair == ("LN1", "W1"):
        identity = torch.eye(d, dtype=block.dtype, device=block.device)
        inside += torch.einsum("scki,ik,ce->scei", both, w.W_2_Q, identity[:, columns])
    elif pair == ("LN1", "W2"):
        inside += torch.einsum("sckj,cj->scjk", both[..., columns], w["W_1"][:, columns])
    elif pair == ("W1", "W2"):
        gamma, beta = w["LN1_gamma"][:, None, None], w["LN1_beta"][:, None, None]
        y_S_D = torch.cat([scale * gamma + shift * beta, shift])[spans[0].leading]
        same_unit = inside[:, columns].diagonal(dim1=1, dim2=2)
        same_unit += y_S_D[..., columns]


# ---------------------------------------------------------------------------------------------------- pooled Jacobian


def pooled_terms(chunk: Chunk, group: str, span: Span) -> Iterator[tuple[Tensor, Tensor | None, Side]]:
    """Yield the terms M[α, k] v[β] of ∂ŝ_k/∂group per token. Source: T4."""
    w, t, ff = chunk.w, chunk.t, chunk.ff
    if group == "LN1":
        yield scaled_rows(ff.M @ ff.J_S, t.r_hat), None, VECTOR_FIRST
    elif group == "W1":
        yield (w.W_2_Q @ ff.J_S) * t.D[:, :, None], chunk.y_hat(span.leading), VECTOR_FIRST
    elif group == "W2":
        yield ff.J_S, chunk.h_hat(span.leading), VECTOR_FIRST
    else:
        R_to_s = ff.R_to_S @ ff.J_S
        for f in chunk.tangents(group, span):
            yield f.pull(R_to_s), f.vector, f.side


def pooled_jacobian(chunk: Chunk, group: str, span: Span) -> Float[Tensor, "n k l t"]:
    """Return ∂(mean over tokens of ŝ)/∂group for every sample; ŝ is LN2's output before scale and shift."""
    n, L = chunk.t.X.shape[:2]
    total: Tensor | None = None
    for M, v, side in pooled_terms(chunk, group, span):
        matrices = M.reshape(n, L, -1)
        vectors = torch.ones_like(matrices[..., :1]) if v is None else v.reshape(n, L, -1)
        term = (matrices.mT @ vectors / L).reshape(n, *M.shape[1:], vectors.shape[2])
        for index, name in ((1, side.matrix_by), (3, side.vector_by)):
            if name:
                term = torch.tensordot(chunk.w.maps[name], term, dims=([1], [index])).movedim(0, index)
        term = term.permute(0, 2, 1, 3) if side.matrix_first else term.permute(0, 2, 3, 1)
        total = term if total is None else total + term
    assert total is not None
    return total.reshape(n, chunk.d, 2, -1) if group == "LN1" else total


def add_gradients(sums: dict, chunk: Chunk) -> None:
    """Add the sums that hold the gradients by B, C and the feed-forward weights."""
    t, ff, att = chunk.t, chunk.ff, chunk.att
    accumulate(sums, "r_S_D", outer(with_ones(t.r_hat, True), ff.S_bar), t.D)
    if att is not None:
        z = torch.cat([t.X, t.p], dim=-1).flatten(0, 1)[:, : att.tilted.shape[1]]
        accumulate(sums, "z_T_z", z, att.tilted)
        accumulate(sums, "z_A_R", att.mean, ff.R_bar)


def add_pairs(sums: Sums, chunk: Chunk, plan: Plan) -> None:
    """Add all pairs of a plan that lie below the head, except those to be derived from the inputs' in the end."""
    pairs = {pair: spans for pair, spans in plan.pairs.items() if not plan.derives(pair)}
    for pair, spans in pairs.items():
        if pair[1] in ATTENTION:
            attention_pair(sums, chunk, pair, spans)
        elif pair[0] not in ATTENTION and pair[1] in FEED_FORWARD:
            feed_forward_pair(sums, chunk, pair, spans)
    for column in FEED_FORWARD:
        rows = {pair[0]: spans for pair, spans in pairs.items() if pair[1] == column and pair[0] in ATTENTION}
        mixed_pairs(sums, chunk, column, rows)
