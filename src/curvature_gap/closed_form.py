"""The exact loss Hessian of the post-norm one-block ViT in closed form.

Every block is a sum over tokens of (matrix ⊗ vector) pairs,

    H[(β, α), (δ, γ)] = Σ_t M_t[α, γ] v_t[β] w_t[δ],

hence one matrix product with inner size "number of tokens". `token_curvature` has the per-token matrices; here stands
which of them meet in which block. Nothing of size tokens x width x parameters is ever formed.

The blocks are computed for seven matrices of parameters, called groups here:

    E = [embed; embed_bias; positions]     B = W_Q W_Kᵀ / √d_K     C = W_V W_O     LN1 = [gamma; beta]
    W1 = [W_1; b_1]     W2 = [W_2; b_2]     LN2 = [gamma; beta]     classifier = [classifier; classifier_bias]

A group is a matrix (leading index: a number of the input vector, trailing index: a number of the output), so a range
of a block's rows is a range of leading indices. `B` and `C` lead back to the weights by the chain rule, in which
`B` and `C` are bilinear: ∂²loss/∂W_Q∂W_K has the extra term (∂loss/∂B) ⊗ I / √d_K, and W_V, W_O likewise.

Source: GN1, GN2, L2, T4, T5, for the mean cross-entropy or mean squared error of the logits.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations_with_replacement
from math import prod

import torch
from torch import Tensor

from curvature_gap.architecture import Architecture, parameter_shapes
from curvature_gap.shapes import Float
from curvature_gap.token_curvature import (
    AttentionCurvature,
    FeedForwardCurvature,
    Forward,
    Weights,
    attention_curvature,
    feed_forward_curvature,
    forward,
    with_ones,
)

Pair = tuple[str, str]
Span = tuple[slice, slice]
"""Leading and trailing indices of a group."""

LOSSES = ("cross_entropy", "mse")
TOKENS_PER_CHUNK = 784
"""What fits the cache: a chunk's operands are about 20 matrices of (tokens, 1024)."""

GROUP_OF = {
    "embed": "E",
    "embed_bias": "E",
    "positions": "E",
    "W_Q": "B",
    "W_K": "B",
    "W_V": "C",
    "W_O": "C",
    "LN1_gamma": "LN1",
    "LN1_beta": "LN1",
    "W_1": "W1",
    "b_1": "W1",
    "W_2": "W2",
    "b_2": "W2",
    "LN2_gamma": "LN2",
    "LN2_beta": "LN2",
    "classifier": "classifier",
    "classifier_bias": "classifier",
}
ATTENTION_GROUPS = ("E", "B", "C")
HEAD_GROUPS = ("LN2", "classifier")
SMALL_GROUPS = ("LN1", "LN2", "classifier")


def covers(architecture: Architecture, loss: str) -> bool:
    """Return whether the closed form holds for this model and loss; everything else is left to autodiff."""
    a = architecture
    return loss in LOSSES and (a.depth, a.heads, a.norm, a.mask, a.activation) == (1, 1, "post", "none", "relu")


# ---------------------------------------------------------------------------------------------------- what is asked


@dataclass(frozen=True)
class Request:
    """One block pair, or some of its rows, and where in its groups it lies."""

    row: str
    column: str
    rows: slice
    row_span: Span
    column_span: Span

    @property
    def groups(self) -> Pair:
        return GROUP_OF[self.row], GROUP_OF[self.column]


def group_shapes(architecture: Architecture) -> dict[str, tuple[int, int]]:
    """Return (leading, trailing) sizes of every group; a bias or a scale counts as one more row."""
    shapes: dict[str, tuple[int, int]] = {}
    for name, shape in parameter_shapes(architecture).items():
        group, n_rows = GROUP_OF[name], 1 if len(shape) == 1 else shape[0]
        shapes[group] = (shapes.get(group, (0, 0))[0] + n_rows, shape[-1])
    shapes["B"] = shapes["C"] = (architecture.d_V, architecture.d_V)
    return shapes


def block_span(name: str, architecture: Architecture, leading: slice | None = None) -> Span:
    """Return where the rows `leading` of a parameter matrix lie in its group; all its rows by default."""
    sizes = group_shapes(architecture)[GROUP_OF[name]]
    everything = slice(0, sizes[1])
    if name == "W_K":  # B = W_Q W_Kᵀ: a row of W_K is a column of B
        return slice(0, sizes[0]), leading or everything
    if name == "W_O" or GROUP_OF[name] in ("B", "C"):  # every row of W_O mixes all rows of C
        return (leading if leading and name != "W_O" else slice(0, sizes[0])), everything
    before = 0
    for other, shape in parameter_shapes(architecture).items():
        n_rows = 1 if len(shape) == 1 else shape[0]
        if other == name:
            inside = leading or slice(0, n_rows)
            return slice(before + inside.start, before + inside.stop), everything
        before += n_rows if GROUP_OF[other] == GROUP_OF[name] else 0
    raise AssertionError(name)


def requests(
    architecture: Architecture, pairs: Iterable[Pair] | None, rows: Mapping[Pair, slice] | None
) -> list[Request]:
    """Check and locate the wanted pairs. Raises ValueError as `closed_form_blocks` does."""
    shapes = parameter_shapes(architecture)
    names = list(shapes)
    wanted = list(combinations_with_replacement(names, 2)) if pairs is None else list(dict.fromkeys(pairs))
    rows = rows or {}
    if unknown := sorted({name for pair in wanted for name in pair} - set(names)):
        raise ValueError(f"unknown blocks {', '.join(unknown)}; this architecture has {', '.join(names)}.")
    if unasked := sorted(set(rows) - set(wanted)):
        raise ValueError(f"rows are given for {unasked}, which are not among the pairs.")
    found = []
    for row, column in wanted:
        if names.index(row) > names.index(column):
            raise ValueError(f"({row}, {column}) lies below the diagonal; ask for ({column}, {row}).")
        size, width = prod(shapes[row]), shapes[row][-1] if len(shapes[row]) == 2 else prod(shapes[row])
        part = rows.get((row, column), slice(0, size))
        start, stop, step = part.indices(size)
        if step != 1 or start >= stop or (part.stop or 0) > size:
            raise ValueError(f"rows of ({row}, {column}) must be a non-empty range within 0…{size}, got {part}.")
        leading = slice(start // width, -(-stop // width))
        before = 0 if row == "W_O" else leading.start * width  # rows of the group's block that precede the range
        found.append(
            Request(
                row,
                column,
                slice(start - before, stop - before),
                block_span(row, architecture, leading),
                block_span(column, architecture),
            )
        )
    return found


def hull(spans: list[Span]) -> Span:
    """Return the smallest span that contains all."""

    def union(part: list[slice]) -> slice:
        return slice(min(s.start for s in part), max(s.stop for s in part))

    return union([leading for leading, _ in spans]), union([trailing for _, trailing in spans])


def within(span: Span, outer: Span) -> Span:
    """Return `span` counted from the start of `outer`."""
    (a, b), (c, d) = span, outer
    return slice(a.start - c.start, a.stop - c.start), slice(b.start - d.start, b.stop - d.start)


@dataclass(frozen=True)
class Plan:
    """Which parts of which group pairs are needed, and of which groups the pooled Jacobian."""

    pairs: dict[Pair, tuple[Span, Span]]
    jacobians: dict[str, Span]


def make_plan(wanted: list[Request], architecture: Architecture) -> Plan:
    """Collect the requests by group pair; small groups are computed whole."""
    sizes = group_shapes(architecture)

    def common(group: str, spans: list[Span]) -> Span:
        return (slice(0, sizes[group][0]), slice(0, sizes[group][1])) if group in SMALL_GROUPS else hull(spans)

    asked: dict[Pair, list[Request]] = {}
    for request in wanted:
        asked.setdefault(request.groups, []).append(request)
    pairs = {
        (row, column): (common(row, [r.row_span for r in some]), common(column, [r.column_span for r in some]))
        for (row, column), some in asked.items()
    }
    of_group: dict[str, list[Span]] = {}
    for groups, spans in pairs.items():
        for group, span in zip(groups, spans, strict=True):
            of_group.setdefault(group, []).append(span)
    return Plan(pairs, {group: hull(spans) for group, spans in of_group.items()})


# ------------------------------------------------------------------------------------------ sums of (matrix ⊗ vector)


@dataclass(frozen=True)
class Side:
    """How the indices (matrix, vector) of one side of a term become (leading, trailing) of its group.

    `mix` says that the trailing index is still one of A X, to be multiplied by Cᵀ: X enters A X C through C.
    """

    matrix_first: bool = False
    mix: bool = False


@dataclass
class Sums:
    """Sums over tokens of M[α, γ] v[β] w[δ], by group pair and by the sides' layouts."""

    terms: dict[tuple[Pair, Side, Side], Tensor] = field(default_factory=dict)
    sizes: dict[tuple[Pair, Side, Side], tuple[int, int, int, int]] = field(default_factory=dict)

    def add(self, pair: Pair, sides: tuple[Side, Side], M: Tensor, v: Tensor, w: Tensor | None) -> None:
        """Add a chunk: M (N, α, γ), v (N, β), w (N, δ) or None for a 1."""
        key = (pair, *sides)
        vectors = v if w is None else outer(v, w).flatten(1)
        self.sizes[key] = (M.shape[1], M.shape[2], v.shape[1], 1 if w is None else w.shape[1])
        accumulate(self.terms, key, M.flatten(1), vectors)

    def block(self, pair: Pair, sizes: tuple[int, ...], C: Tensor) -> Float[Tensor, "l t m u"] | None:
        """Take out a group pair's block, (leading, trailing) of its rows, then of its columns."""
        total: Tensor | None = None
        for key in [key for key in self.terms if key[0] == pair]:
            _, row, column = key
            term = self.terms.pop(key).view(self.sizes.pop(key))
            term = term.permute(*((0, 2) if row.matrix_first else (2, 0)), *((1, 3) if column.matrix_first else (3, 1)))
            if row.mix:
                term = torch.einsum("bacd,ja->bjcd", term, C)
            if column.mix:
                term = torch.einsum("bacd,jd->bacj", term, C)
            if "LN1" in pair:  # its matrix side is (gamma, beta) in a row
                term = term.reshape(
                    *(sizes[:2] if pair[0] == "LN1" else term.shape[:2]),
                    *(sizes[2:] if pair[1] == "LN1" else term.shape[2:]),
                )
            if total is None:
                total = term.new_zeros(sizes)
            # Second-order terms of a weight have no row for its bias, which comes last.
            total[:, :, : term.shape[2]] += term
        return total


def accumulate(sums: dict, key: object, left: Float[Tensor, "N x"], right: Float[Tensor, "N y"]) -> None:
    """Add leftᵀ right to sums[key]."""
    if key in sums:
        sums[key].addmm_(left.T, right)
    else:
        sums[key] = left.T @ right


def outer(v: Float[Tensor, "N x"], w: Float[Tensor, "N y"]) -> Float[Tensor, "N x y"]:
    """Return v wᵀ per token."""
    return v[:, :, None] * w[:, None, :]


# ------------------------------------------------------------------------------------------------ attention's groups

VECTOR_FIRST, MATRIX_FIRST = Side(), Side(matrix_first=True)


@dataclass(frozen=True)
class Tangent:
    """How a group moves R, token by token: ∂R[a] = Σ matrix[a, α] vector[β], matrix None being the identity.

    `score` is the map from z to the statistic φ with ∂T[t, s] = vector[β] φ_s[α], and None where the attention
    logits stay; then `value` says which part of z the averaged values are.
    """

    matrix: Tensor | None
    vector: Tensor
    side: Side
    score: Callable[[Tensor], Tensor] | None = None
    value: slice | None = None

    def pull(self, M: Float[Tensor, "N a g"]) -> Float[Tensor, "N x g"]:
        """Return matrixᵀ M."""
        return M if self.matrix is None else self.matrix.mT @ M


@dataclass(frozen=True)
class Chunk:
    """A chunk's values and curvatures."""

    w: Weights
    t: Forward
    ff: FeedForwardCurvature
    att: AttentionCurvature | None

    @property
    def width(self) -> int:
        return self.t.Y.shape[1]


def tangents(chunk: Chunk, group: str, span: Span) -> list[Tangent]:
    """Return the tangents of an attention group; Source: G.

    B moves the logits by x_t ∂B x_sᵀ, hence R by Γ_xᵀ with Γ_z = Σ_s A (V_s − F)(z_s)ᵀ. C moves R by A X. The inputs
    do both, and move X itself: as the query and the residual x_t, as values, and as keys, with κ = X B.
    """
    t, att, B, C, d = chunk.t, chunk.att, chunk.w.B, chunk.w.C, chunk.width
    assert att is not None
    lead, trail = span
    X = t.X.flatten(0, 1)
    x_part, p_part = slice(0, d), slice(d + lead.start, d + lead.stop)
    if group == "C":
        return [Tangent(None, att.mean[:, lead], VECTOR_FIRST, value=lead)]
    Gamma = C.T @ att.covariance[:, :d, trail if group == "B" else x_part]
    if group == "B":
        return [Tangent(Gamma, X[:, lead], VECTOR_FIRST, score=lambda M: M[:, trail])]
    query = Gamma @ B.T
    query.diagonal(dim1=1, dim2=2).add_(1)
    return [
        Tangent(query, t.p.flatten(0, 1)[:, lead], VECTOR_FIRST, score=lambda M: B @ M[:, x_part]),
        Tangent(None, att.mean[:, p_part], Side(mix=True), value=p_part),
        Tangent(C.T @ att.covariance[:, :d, p_part], X @ B, MATRIX_FIRST, score=lambda M: M[:, p_part]),
    ]


def attention_pair(sums: Sums, chunk: Chunk, pair: Pair, spans: tuple[Span, Span]) -> None:
    """Add ∂R ᵀ H_RR ∂R and the second derivatives of A and A X C against R_bar. Source: OP, FN, L2."""
    att, ff = chunk.att, chunk.ff
    assert att is not None
    for f in tangents(chunk, pair[0], spans[0]):
        for g in tangents(chunk, pair[1], spans[1]):
            M = f.pull(ff.H_RR if g.matrix is None else ff.H_RR @ g.matrix)
            if f.score and g.score:
                M = M + f.score(g.score(att.third.mT).mT)
            sums.add(pair, (f.side, g.side), M, f.vector, g.vector)
            # A ∂(X C): a moved attention row times a moved value, R_bar being the value's trailing side.
            if f.score and g.value:
                sides = (f.side, Side(True, g.side.mix))
                sums.add(pair, sides, f.score(att.covariance[:, :, g.value]), f.vector, ff.R_bar)
            if f.value and g.score:
                M = g.score(att.covariance[:, :, f.value]).mT
                sums.add(pair, (Side(True, f.side.mix), g.side), M, ff.R_bar, g.vector)


def add_moved_products(
    block: Float[Tensor, "l t m u"],
    pair: Pair,
    spans: tuple[Span, Span],
    w: Weights,
    z_T_z: Float[Tensor, "z z"],
    z_A_R: Float[Tensor, "z d"],
) -> None:
    """Add the terms in which two factors of T = X B Xᵀ, or of X C, move at once.

    z_T_z = Σ z_t T_bar[t, s] z_sᵀ and z_A_R = Σ A[t, s] z_s R_barᵀ hold ∂loss/∂B and ∂loss/∂C among others.
    """
    if pair[0] != "E":
        return
    (l0, _), (l1, t1) = spans
    d = w.architecture.d_V
    row = slice(d + l0.start, d + l0.stop)
    identity = torch.eye(d, dtype=block.dtype, device=block.device)
    if pair[1] == "E":
        column = slice(d + l1.start, d + l1.stop)
        block += torch.einsum("bg,ij->bigj", z_T_z[row, column], w.B)
        block += torch.einsum("gb,ji->bigj", z_T_z[column, row], w.B)
    elif pair[1] == "B":
        block += torch.einsum("bk,ic->bick", z_T_z[row, t1], identity[:, l1])
        block += torch.einsum("cb,ik->bick", z_T_z[l1, row], identity[:, t1])
    elif pair[1] == "C":
        block += torch.einsum("ba,ij->bija", z_A_R[row], identity[:, l1])


# ---------------------------------------------------------------------------------------------- feed-forward's groups


@dataclass(frozen=True)
class Target:
    """A mixed derivative with R: ∂²loss/∂R∂θ = M[a, γ] w[δ] per token, w None being a 1."""

    M: Float[Tensor, "N a g"]
    w: Tensor | None
    side: Side


def y_hat(chunk: Chunk, span: slice) -> Float[Tensor, "N l"]:
    """Return the input of W1."""
    return with_ones(chunk.t.Y, chunk.w.architecture.bias)[:, span]


def h_hat(chunk: Chunk, span: slice) -> Float[Tensor, "N l"]:
    """Return the input of W2."""
    return with_ones(chunk.t.h, chunk.w.architecture.bias)[:, span]


def with_scale(M: Float[Tensor, "N x c"], r_hat: Float[Tensor, "N c"]) -> Float[Tensor, "N x 2*c"]:
    """Return derivatives by (gamma, beta) from derivatives by Y = gamma r̂ + beta."""
    return torch.cat([M * r_hat[:, None, :], M], dim=-1)


def targets(chunk: Chunk, group: str, span: slice) -> list[Target]:
    """Return the mixed derivatives of R and a feed-forward group: first order twice, then the group's own curvature."""
    w, t, ff = chunk.w, chunk.t, chunk.ff
    if group == "LN1":
        M = with_scale(ff.H_RS @ ff.M.mT, t.r_hat)
        # ∂Y = ∂gamma ∘ r̂: r̂ moves with R.
        M[:, :, : chunk.width] += ff.J_R * ff.Y_bar[:, None, :]
        return [Target(M, None, VECTOR_FIRST)]
    if group == "W1":
        inside = slice(span.start, min(span.stop, chunk.width))
        H_RU = (ff.H_RS @ w["W_2"].T) * t.D[:, None, :]
        terms = [Target(H_RU, y_hat(chunk, span), VECTOR_FIRST)]
        # ∂U = Y ∂W_1: Y moves with R.
        return terms + [Target(ff.R_to_Y[:, :, inside], ff.U_bar, MATRIX_FIRST)] * (inside.start < inside.stop)
    inside = slice(span.start, min(span.stop, t.h.shape[1]))
    terms = [Target(ff.H_RS, h_hat(chunk, span), VECTOR_FIRST)]
    # ∂S = h ∂W_2: h moves with R where its unit is active.
    R_to_h = (ff.R_to_Y @ w["W_1"][:, inside]) * t.D[:, None, inside]
    return terms + [Target(R_to_h, ff.S_bar, MATRIX_FIRST)] * (inside.start < inside.stop)


def mixed_pair(sums: Sums, chunk: Chunk, pair: Pair, spans: tuple[Span, Span]) -> None:
    """Add an attention group against a feed-forward group."""
    some = targets(chunk, pair[1], spans[1][0])
    for f in tangents(chunk, pair[0], spans[0]):
        for target in some:
            sums.add(pair, (f.side, target.side), f.pull(target.M), f.vector, target.w)


def feed_forward_pair(sums: Sums, chunk: Chunk, pair: Pair, spans: tuple[Span, Span]) -> None:
    """Add two feed-forward groups: ∂S ᵀ H_SS ∂S, and the products in which both move."""
    w, t, ff = chunk.w, chunk.t, chunk.ff
    (l0, _), (l1, _) = spans
    one = torch.ones_like(t.Y[:, :1])
    sides = (VECTOR_FIRST, VECTOR_FIRST)
    match pair:
        case ("LN1", "LN1"):
            H_YY = ff.M @ ff.H_SS @ ff.M.mT
            sums.add(pair, sides, with_scale(with_scale(H_YY, t.r_hat).mT, t.r_hat), one, None)
        case ("LN1", "W1"):
            H_YU = (ff.M @ ff.H_SS @ w["W_2"].T) * t.D[:, None, :]
            sums.add(pair, sides, with_scale(H_YU.mT, t.r_hat).mT, one, y_hat(chunk, l1))
        case ("LN1", "W2"):
            sums.add(pair, sides, with_scale((ff.M @ ff.H_SS).mT, t.r_hat).mT, one, h_hat(chunk, l1))
        case ("W1", "W1"):
            H_SU = (w["W_2"] @ ff.H_SS).mT * t.D[:, None, :]
            H_UU = (w["W_2"] @ H_SU) * t.D[:, :, None]
            sums.add(pair, sides, H_UU, y_hat(chunk, l0), y_hat(chunk, l1))
        case ("W1", "W2"):
            H_US = (w["W_2"] @ ff.H_SS) * t.D[:, :, None]
            sums.add(pair, sides, H_US, y_hat(chunk, l0), h_hat(chunk, l1))
        case ("W2", "W2"):
            sums.add(pair, sides, ff.H_SS, h_hat(chunk, l0), h_hat(chunk, l1))


def add_moved_layers(
    block: Float[Tensor, "l t m u"], pair: Pair, spans: tuple[Span, Span], w: Weights, r_S_D: Float[Tensor, "c k f"]
) -> None:
    """Add the terms in which two of gamma, beta, W_1, W_2 move at once: S is linear in each of them.

    r_S_D = Σ (r̂, 1)_c S_bar_k D_i, which holds ∂loss/∂(gamma, beta, W_1, W_2) in all its parts.
    """
    (l0, _), (l1, _) = spans
    d, f = w["W_1"].shape
    scale, shift = r_S_D[:d], r_S_D[d:]
    both = torch.stack([scale, shift.expand_as(scale)])
    if pair == ("LN1", "W1"):
        inside = slice(l1.start, min(l1.stop, d))
        r_U = torch.einsum("scki,ik->sci", both, w["W_2"])
        identity = torch.eye(d, dtype=block.dtype, device=block.device)[:, inside]
        block[:, :, : identity.shape[1]] += torch.einsum("sci,ce->scei", r_U, identity)
    elif pair == ("LN1", "W2"):
        inside = slice(l1.start, min(l1.stop, f))
        term = torch.einsum("sckj,cj->scjk", both[..., inside], w["W_1"][:, inside])
        block[:, :, : term.shape[2]] += term
    elif pair == ("W1", "W2"):
        inside = slice(l1.start, min(l1.stop, f))
        y_S_D = torch.cat([scale * w["LN1_gamma"][:, None, None] + shift * w["LN1_beta"][:, None, None], shift])[l0]
        diagonal = block[:, inside, : max(inside.stop - inside.start, 0)].diagonal(dim1=1, dim2=2)
        diagonal += y_S_D[..., inside]


# ----------------------------------------------------------------------------------------------------- logits and loss


def pooled_terms(chunk: Chunk, group: str, span: Span) -> Iterator[tuple[Tensor, Tensor | None, Side]]:
    """Yield the terms M[α, k] v[β] of ∂ŝ_k/∂group per token."""
    w, t, ff = chunk.w, chunk.t, chunk.ff
    if group == "LN1":
        yield with_scale((ff.M @ ff.J_S).mT, t.r_hat).mT, None, VECTOR_FIRST
    elif group == "W1":
        yield (w["W_2"] @ ff.J_S) * t.D[:, :, None], y_hat(chunk, span[0]), VECTOR_FIRST
    elif group == "W2":
        yield ff.J_S, h_hat(chunk, span[0]), VECTOR_FIRST
    else:
        R_to_s = ff.R_to_S @ ff.J_S
        for f in tangents(chunk, group, span):
            yield f.pull(R_to_s), f.vector, f.side


def pooled_jacobian(chunk: Chunk, group: str, span: Span) -> Float[Tensor, "n k l t"]:
    """Return ∂(mean over tokens of ŝ)/∂group for every sample."""
    n, L = chunk.t.X.shape[:2]
    total: Tensor | None = None
    for M, v, side in pooled_terms(chunk, group, span):
        if v is None:
            term = M.reshape(n, L, *M.shape[1:]).mean(dim=1)[..., None]
        else:
            term = M.flatten(1).reshape(n, L, -1).mT @ v.reshape(n, L, -1) / L
            term = term.reshape(n, M.shape[1], M.shape[2], v.shape[1])
        # (n, α, k, β)
        term = term.permute(0, 2, 1, 3) if side.matrix_first else term.permute(0, 2, 3, 1)
        if side.mix:
            term = term @ chunk.w.C.T
        total = term if total is None else total + term
    assert total is not None
    return total.reshape(n, chunk.width, 2, -1) if group == "LN1" else total


def loss_derivatives(
    logits: Float[Tensor, "n c"], targets: Tensor, loss: str, n_samples: int
) -> tuple[Float[Tensor, "n c"], Float[Tensor, "n c r"]]:
    """Return the gradient of the mean loss by the logits, and G with G Gᵀ its Hessian.

    Cross-entropy: diag(π) − π πᵀ = diag(√π) (I − √π √πᵀ) diag(√π). The projection has rank c − 1; its factor is the
    Householder reflection that sends √π to the last axis, without its last column.
    """
    n, c = logits.shape
    identity = torch.eye(c, dtype=logits.dtype, device=logits.device)
    if loss == "mse":
        scale = 2 / (n_samples * c)
        return scale * (logits - targets), scale**0.5 * identity.expand(n, c, c)
    p = logits.softmax(dim=-1)
    root = p.sqrt()
    reflected = identity - (root[:, :, None] + identity[:, -1:]) * (root / (1 + root[:, -1:]))[:, None, :]
    G = root[:, :, None] * reflected[:, :, :-1] / n_samples**0.5
    return (p - torch.nn.functional.one_hot(targets, c)) / n_samples, G


@dataclass
class Head:
    """What LN2's scale and shift and the classifier see of a chunk."""

    s_hat: Float[Tensor, "n k"]
    """Mean over tokens."""
    residual: Float[Tensor, "n c"]
    G: Float[Tensor, "n c r"]


def logits_of(w: Weights, s_hat: Float[Tensor, "n k"]) -> Float[Tensor, "n c"]:
    logits = (s_hat * w["LN2_gamma"] + w["LN2_beta"]) @ w["classifier"]
    return logits + w["classifier_bias"] if w.architecture.bias else logits


def head_jacobian(w: Weights, head: Head, group: str) -> Float[Tensor, "n c l t"]:
    """Return ∂logits/∂group for LN2 and the classifier."""
    n, c = head.residual.shape
    W = w["classifier"].T
    if group == "LN2":
        return torch.stack([head.s_hat[:, None, :] * W, W.expand(n, -1, -1)], dim=2)
    m = with_ones(head.s_hat * w["LN2_gamma"] + w["LN2_beta"], w.architecture.bias)
    return torch.einsum("bk,co->bcko", m, torch.eye(c, dtype=W.dtype, device=W.device))


def add_to_head(sums: dict, w: Weights, head: Head, pair: Pair, J: Float[Tensor, "n k l t"]) -> None:
    """Add a lower group against LN2 or the classifier: logits are bilinear in ŝ and these."""
    J = J.flatten(2)
    if pair[1] == "LN2":
        term = torch.einsum("bk,bkx->xk", head.residual @ w["classifier"].T, J)
    else:
        term = torch.einsum("bo,bkx->xko", head.residual, J) * w["LN2_gamma"][:, None]
    sums[pair] = sums[pair] + term if pair in sums else term


def add_moved_head(block: Float[Tensor, "l t m u"], pair: Pair, sums: dict) -> None:
    """Add the functional parts with LN2 or the classifier. beta and classifier_bias are additive: no row of theirs."""
    if pair == ("LN2", "classifier"):
        d = block.shape[1]
        diagonal = block[:, :, :d].diagonal(dim1=1, dim2=2)
        diagonal += sums[pair].transpose(1, 2)
    elif pair in sums:
        if pair[1] == "LN2":
            block[:, :, 0] += sums[pair].view_as(block[:, :, 0])
        else:
            part = block[:, :, : sums[pair].shape[1]]
            part += sums[pair].view_as(part)


# ------------------------------------------------------------------------------------------------------------- driver


@dataclass
class State:
    """Everything summed over chunks."""

    sums: Sums = field(default_factory=Sums)
    plain: dict = field(default_factory=dict)
    roots: dict[str, list[Tensor]] = field(default_factory=dict)
    """Per group the factor of the outer-product part, one row per sample and column of G."""


def add_chunk(
    state: State, plan: Plan, w: Weights, images: Tensor, targets_: Tensor, loss: str, n_samples: int
) -> None:
    """Add one chunk of samples."""
    t = forward(w, images)
    n, L, d = t.X.shape
    s_hat = t.s_hat.reshape(n, L, d).mean(dim=1)
    logits = logits_of(w, s_hat)
    residual, G = loss_derivatives(logits, targets_, loss, n_samples)
    head = Head(s_hat, residual, G)
    s_to_logits = w["LN2_gamma"][:, None] * w["classifier"]
    ff = feed_forward_curvature(w, t, (residual @ s_to_logits.T / L).repeat_interleave(L, dim=0))
    uses_attention = any(group in ATTENTION_GROUPS for group in plan.jacobians)
    att = attention_curvature(w, t, ff.R_bar, "E" in plan.jacobians) if uses_attention else None
    chunk = Chunk(w, t, ff, att)
    for pair, spans in plan.pairs.items():
        if pair[1] in ATTENTION_GROUPS:
            attention_pair(state.sums, chunk, pair, spans)
        elif pair[0] in ATTENTION_GROUPS and pair[1] not in HEAD_GROUPS:
            mixed_pair(state.sums, chunk, pair, spans)
        elif pair[1] not in HEAD_GROUPS:
            feed_forward_pair(state.sums, chunk, pair, spans)
    add_gradients(state.plain, chunk)
    G_s = s_to_logits @ G
    for group, span in plan.jacobians.items():
        if group in HEAD_GROUPS:
            J, factor = head_jacobian(w, head, group), G
        else:
            J, factor = pooled_jacobian(chunk, group, span), G_s
            for other in HEAD_GROUPS:
                if (group, other) in plan.pairs:
                    add_to_head(state.plain, w, head, (group, other), J)
        root = factor.mT @ J.flatten(2)
        state.roots.setdefault(group, []).append(root.reshape(-1, *J.shape[2:]))
    term = torch.einsum("bo,bk->ko", residual, s_hat)
    both = torch.stack([term, residual.sum(dim=0).expand_as(term)])
    state.plain["LN2", "classifier"] = state.plain.get(("LN2", "classifier"), 0) + both


def add_gradients(plain: dict, chunk: Chunk) -> None:
    """Add the sums that hold the loss's gradients by B, C and the feed-forward weights."""
    t, ff, att = chunk.t, chunk.ff, chunk.att
    r_S = outer(with_ones(t.r_hat, True), ff.S_bar).flatten(1)
    accumulate(plain, "r_S_D", r_S, t.D)
    if att is not None:
        z = torch.cat([t.X, t.p], dim=-1).flatten(0, 1)[:, : att.tilted.shape[1]]
        accumulate(plain, "z_T_z", z, att.tilted)
        accumulate(plain, "z_A_R", att.mean, ff.R_bar)


def group_block(state: State, plan: Plan, w: Weights, pair: Pair) -> Float[Tensor, "l t m u"]:
    """Return the finished block of a group pair."""
    spans = plan.pairs[pair]
    left, right = (root_of(state, plan, group, span) for group, span in zip(pair, spans, strict=True))
    block = (left.flatten(1).T @ right.flatten(1)).reshape(*left.shape[1:], *right.shape[1:])
    functional = state.sums.block(pair, block.shape, w.C)
    if functional is not None:
        block += functional
    if pair[1] in HEAD_GROUPS:
        add_moved_head(block, pair, state.plain)
    elif pair[0] in ATTENTION_GROUPS and pair[1] in ATTENTION_GROUPS:
        add_moved_products(block, pair, spans, w, state.plain["z_T_z"], state.plain["z_A_R"])
    elif pair[0] not in ATTENTION_GROUPS:
        d, f = w["W_1"].shape
        add_moved_layers(block, pair, spans, w, state.plain["r_S_D"].view(d + 1, d, f))
    return block


def root_of(state: State, plan: Plan, group: str, span: Span) -> Float[Tensor, "x l t"]:
    parts = state.roots[group]
    if len(parts) > 1:
        parts[:] = [torch.cat(parts)]
    inside = within(span, plan.jacobians[group])
    return parts[0][:, inside[0], inside[1]]


def to_weights(
    block: Float[Tensor, "l t *x"], name: str, w: Weights, span: Span, outer_span: Span
) -> Float[Tensor, "y *x"]:
    """Return a parameter's rows from its group's: the chain rule through B and C, a copy for all others."""
    inside = within(span, outer_span)
    rows = block[inside]
    if name == "W_Q":
        rows = w.temperature * torch.einsum("ck...,ki->ci...", rows, w["W_K"])
    elif name == "W_K":
        rows = w.temperature * torch.einsum("ck...,ci->ki...", rows, w["W_Q"])
    elif name == "W_V" and w.architecture.output_projection:
        rows = torch.einsum("ea...,ja->ej...", rows, w["W_O"])
    elif name == "W_O":
        rows = torch.einsum("ea...,ej->ja...", rows, w["W_V"])
    return rows.flatten(0, 1)


def weight_block(
    block: Float[Tensor, "l t m u"], request: Request, plan: Plan, w: Weights, plain: dict
) -> Float[Tensor, "y x"]:
    """Return the requested block from its group pair's."""
    spans = plan.pairs[request.groups]
    half = to_weights(block, request.row, w, request.row_span, spans[0])[request.rows]
    full = to_weights(half.permute(1, 2, 0), request.column, w, request.column_span, spans[1]).T
    rows = request.rows
    d = w.architecture.d_V
    if (request.row, request.column) == ("W_Q", "W_K"):
        grad_B = plain["z_T_z"][:d, :d][request.row_span[0]]
        extra = torch.einsum("ck,ij->cikj", w.temperature * grad_B, torch.eye(w["W_Q"].shape[1]).to(block))
        full = full + extra.flatten(2).flatten(0, 1)[rows]
    elif (request.row, request.column) == ("W_V", "W_O"):
        grad_C = plain["z_A_R"][:d][request.row_span[0]]
        extra = torch.einsum("ea,ij->eija", grad_C, torch.eye(d).to(block))
        full = full + extra.flatten(2).flatten(0, 1)[rows]
    return full


def closed_form_blocks(
    parameters: Mapping[str, Tensor],
    images: Float[Tensor, "b c s s"],
    targets: Tensor,
    architecture: Architecture,
    *,
    loss: str = "cross_entropy",
    pairs: Iterable[Pair] | None = None,
    rows: Mapping[Pair, slice] | None = None,
    out: Callable[[str, str], Tensor] | None = None,
    tokens_per_chunk: int = TOKENS_PER_CHUNK,
) -> dict[Pair, Tensor]:
    """Return blocks of the exact Hessian of the mean loss."""
    if not covers(architecture, loss):
        raise ValueError(f"no closed form for loss {loss!r} and {architecture}; use the autodiff engine.")
    wanted = requests(architecture, pairs, rows)
    w = Weights({name: p.detach() for name, p in parameters.items()}, architecture)
    plan = make_plan(wanted, architecture)
    state = State()
    n = max(1, tokens_per_chunk // architecture.n_tokens)
    with torch.no_grad():
        for some, labels in zip(images.split(n), targets.split(n), strict=True):
            add_chunk(state, plan, w, some, labels, loss, len(images))
        blocks: dict[Pair, Tensor] = {}
        for pair in plan.pairs:
            block = group_block(state, plan, w, pair)
            for request in wanted:
                if request.groups == pair:
                    value = weight_block(block, request, plan, w, state.plain)
                    if out is not None:
                        value = out(request.row, request.column).copy_(value)
                    blocks[request.row, request.column] = value
    return {(r.row, r.column): blocks[r.row, r.column] for r in wanted}


def closed_form_hessian(
    parameters: Mapping[str, Tensor],
    images: Float[Tensor, "b c s s"],
    targets: Tensor,
    architecture: Architecture,
    *,
    loss: str = "cross_entropy",
    tokens_per_chunk: int = TOKENS_PER_CHUNK,
) -> Float[Tensor, "P P"]:
    """Return the whole Hessian of the mean loss, rows in the order of `parameter_shapes`.

    Blocks are written straight into the matrix. Raises as `closed_form_blocks` does.
    """
    where, start = {}, 0
    for name, shape in parameter_shapes(architecture).items():
        where[name] = slice(start, start + prod(shape))
        start += prod(shape)
    H = torch.empty(start, start, dtype=images.dtype, device=images.device)
    closed_form_blocks(
        parameters,
        images,
        targets,
        architecture,
        loss=loss,
        out=lambda row, column: H[where[row], where[column]],
        tokens_per_chunk=tokens_per_chunk,
    )
    for i, row in enumerate(where):
        for column in list(where)[i + 1 :]:
            H[where[column], where[row]] = H[where[row], where[column]].T
    return H
