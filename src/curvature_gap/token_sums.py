"""Sums over tokens of (matrix ⊗ vector) pairs: each is one matrix product with inner size "number of tokens".

H[(β, α), (δ, γ)] = Σ_t M_t[α, γ] v_t[β] w_t[δ]
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from curvature_gap.block_requests import Pair
from curvature_gap.shapes import Float

PARTS = 4
"""A symmetric operand is computed in this many strips, each from its diagonal on: 5/8 of the work at 4."""
STRIP = 8
"""Strips are no narrower than this."""


ALIGNED = 16
"""Sums have rows of a multiple of this length in memory: odd ones made float32 products a third slower."""


@dataclass(frozen=True)
class Side:
    """How the indices (matrix, vector) of one side become (leading, trailing) of its group.

    `matrix_by` and `vector_by` name constant matrices that the finished sum's indices are still to be multiplied by:
    a sum over tokens of small things, then one product, instead of that product for every token.
    `position` says that the vector is the one-hot vector of the token's position, whose numbers come last in the group.
    """

    matrix_first: bool = False
    matrix_by: str = ""
    vector_by: str = ""
    position: bool = False
    constant: str = ""
    """Names the constant the sum is to be multiplied by."""


VECTOR_FIRST = Side()
MATRIX_FIRST = Side(matrix_first=True)
# The inputs, X = p̂ E, move R as queries (vector p̂), as keys (κ = X B) and as values (A X C). A mixed derivative by a
# value and by R_bar has the value's index in its matrix.
KEY = Side(matrix_first=True, vector_by="B")
VALUE = Side(matrix_by="C")
VALUE_OF_R_BAR = Side(matrix_first=True, vector_by="C")
DERIVED = {
    "B": {KEY: Side(matrix_by="E")},
    "C": {VALUE: Side(vector_by="E"), VALUE_OF_R_BAR: Side(matrix_first=True, matrix_by="E")},
}
"""With learned positions X is p̂ E in full, so B moves R as E's keys do with Eᵀ p̂ for p̂, and C as E's values do."""


def outer(v: Float[Tensor, "N x"], w: Float[Tensor, "N y"]) -> Float[Tensor, "N x*y"]:
    """Return v wᵀ per token, flat."""
    return (v[:, :, None] * w[:, None, :]).flatten(1)


def accumulate(sums: dict, key: Hashable, left: Float[Tensor, "N x"], right: Float[Tensor, "N y"]) -> None:
    """Add leftᵀ right to sums[key]; the narrower side has the rows in memory, which is the faster way round."""
    if key not in sums:
        narrow, wide = sorted((left.shape[1], right.shape[1]))
        zeros = aligned_zeros(left, narrow, wide)
        sums[key] = zeros if left.shape[1] == narrow else zeros.T
    sums[key].addmm_(left.T, right)


def aligned_zeros(like: Tensor, n_rows: int, n_columns: int) -> Float[Tensor, "r c"]:
    """Return zeros whose rows start at multiples of `ALIGNED` numbers in memory."""
    return like.new_zeros(n_rows, -(-n_columns // ALIGNED) * ALIGNED)[:, :n_columns]


def strips(n: int) -> list[tuple[slice, slice]]:
    """Cut the upper triangle of an n x n matrix into strips (rows, columns)."""
    step = max(STRIP, -(-n // PARTS))
    return [(slice(i, min(i + step, n)), slice(i, n)) for i in range(0, n, step)]


def pack(M: Float[Tensor, "N n n"]) -> Float[Tensor, "N m"]:
    """Return the upper triangle of symmetric matrices, flat; slices are several times faster than indices."""
    return torch.cat([M[:, i, i:] for i in range(M.shape[1])], dim=1)


def pack_outer(v: Float[Tensor, "N n"]) -> Float[Tensor, "N m"]:
    """Return `pack(v vᵀ)`."""
    return torch.cat([v[:, i : i + 1] * v[:, i:] for i in range(v.shape[1])], dim=1)


def unpacking(n: int, device: torch.device) -> Tensor:
    """Return the (n, n) matrix of positions in `pack`'s result."""
    i, j = torch.triu_indices(n, n, device=device)
    where = torch.empty(n, n, dtype=torch.long, device=device)
    where[i, j] = where[j, i] = torch.arange(len(i), device=device)
    return where


@dataclass
class Square:
    """The sum of M ⊗ v vᵀ with M symmetric: one factor packed, the other, of size n, in strips."""

    n_packed: int
    n: int
    packed_matrix: bool
    strips: dict[int, Tensor] = field(default_factory=dict)

    def whole(self) -> Float[Tensor, "a g b c"]:
        """Return the sum in full."""
        full = self.strips[0].new_empty(self.n, self.n, len(self.strips[0]))
        for rows, columns in strips(self.n):
            part = self.strips[rows.start].T.reshape(rows.stop - rows.start, self.n - rows.start, -1)
            full[rows, columns] = part
            full[columns, rows] = part.transpose(0, 1)
        full = full[:, :, unpacking(self.n_packed, full.device)]
        return full.permute(2, 3, 0, 1) if self.packed_matrix else full


Key = tuple[Pair, Side, Side, bool]
Term = tuple[Side, Side, bool, Tensor]
"""The sides, whether mirrored, and the sum (α, γ, β, δ)."""


@dataclass
class Sums:
    """All terms, by group pair, by how their sides are laid out, and whether their transpose belongs to the block."""

    terms: dict[Key, Tensor] = field(default_factory=dict)
    sizes: dict[Key, tuple[int, ...]] = field(default_factory=dict)
    """(α, γ, β, δ)."""
    constants: dict[Key, Tensor] = field(default_factory=dict)
    """Broadcast to (α, γ, β, δ); they multiply the finished sum."""
    packed: set[Key] = field(default_factory=set)
    """Terms whose matrix is symmetric and summed packed."""
    squares: dict[tuple[Pair, Side], Square] = field(default_factory=dict)
    unfolded: dict[Pair, list[Term]] = field(default_factory=dict)
    """What `finished` returned."""

    def add(
        self,
        pair: Pair,
        sides: tuple[Side, Side],
        M: Float[Tensor, "N a g"],
        v: Float[Tensor, "N b"] | None,
        w: Float[Tensor, "N c"] | None,
        mirrored: bool = False,
        constant: Tensor | None = None,
        symmetric: bool = False,
    ) -> None:
        """Add a chunk. A vector None is a 1; a mirrored term stands for itself and its transpose.

        `symmetric` says that M is, in every term added under these sides.
        """
        key = (pair, *sides, mirrored)
        self.sizes[key] = (*M.shape[1:], 1 if v is None else v.shape[1], 1 if w is None else w.shape[1])
        if constant is not None:
            self.constants[key] = constant
        if symmetric:
            self.packed.add(key)
        vectors = [x for x in (v, w) if x is not None] or [torch.ones_like(M[:, :1, 0])]
        left = pack(M) if symmetric else M.flatten(1)
        accumulate(self.terms, key, left, outer(*vectors) if len(vectors) == 2 else vectors[0])

    def add_by_position(
        self,
        pair: Pair,
        sides: tuple[Side, Side],
        M: Float[Tensor, "n l a g"],
        w: Float[Tensor, "n l c"] | None,
        mirrored: bool = False,
    ) -> None:
        """Add a chunk whose first vector is the one-hot vector of the position: one sum over samples per position.

        The second is w, None being a 1, or the same one-hot vector where its side says so.
        """
        key = (pair, *sides, mirrored)
        L, sizes = M.shape[1], M.shape[2:]
        self.sizes[key] = (*sizes, L, 1 if w is None else w.shape[2])
        w = torch.ones_like(M[..., :1, 0]) if w is None else w
        left, right = M.flatten(2).permute(1, 2, 0), w.transpose(0, 1)
        if key in self.terms:
            self.terms[key].baddbmm_(left, right)
        else:
            self.terms[key] = left @ right

    def add_square(
        self,
        pair: Pair,
        side: Side,
        packed: Float[Tensor, "N m"],
        strip: Callable[[slice, slice], Tensor],
        square: Square,
    ) -> None:
        """Add a chunk of M ⊗ v vᵀ. It is symmetric in (α, γ) and in (β, δ): 5/16 of it is computed.

        `strip(rows, columns)` returns a part of the larger factor, one flat row per token.
        """
        known = self.squares.setdefault((pair, side), square)
        for rows, columns in strips(square.n):
            accumulate(known.strips, rows.start, packed, strip(rows, columns))

    def finished(self, pair: Pair) -> list[Term]:
        """Return a group pair's sums, their indices apart."""
        if pair not in self.unfolded:
            terms = self.unfolded[pair] = []
            for key in [key for key in self.terms if key[0] == pair]:
                _, row, column, mirrored = key
                term = as_term(self.terms.pop(key), row, column, self.sizes[key], key in self.packed)
                terms.append((row, column, mirrored, term * self.constants[key] if key in self.constants else term))
            for of, side in [of for of in self.squares if of[0] == pair]:
                terms.append((side, side, False, self.squares.pop((of, side)).whole()))
        return self.unfolded[pair]

    def derived(self, pair: Pair) -> Iterator[Term]:
        """Yield the terms of a pair with B or C in it, from those with the inputs in their place."""
        source = ("E" if pair[0] in DERIVED else pair[0], "E" if pair[1] in DERIVED else pair[1])
        for row, column, mirrored, term in self.finished(source):
            ways = [(row, column, term)]
            if mirrored:
                ways.append((column, row, term.permute(1, 0, 3, 2)))
            for one, other, value in ways:
                left = DERIVED[pair[0]].get(one) if pair[0] in DERIVED else one
                right = DERIVED[pair[1]].get(other) if pair[1] in DERIVED else other
                if left and right:
                    yield left, right, False, value

    def forget(self, pair: Pair) -> None:
        """Drop a finished pair's terms, to free their memory."""
        del self.unfolded[pair]


def add_terms(block: Float[Tensor, "l t m u"], terms: Iterable[Term], pair: Pair, maps: Mapping[str, Tensor]) -> None:
    """Add a group pair's sums to its block; `maps` holds the constant matrices that sides name."""
    shape = block.shape
    for row, column, mirrored, term in terms:
        value = laid_out(term, row, column, maps)
        if pair[0] == "LN1":  # its one matrix index is (gamma, beta) in a row
            value = value.reshape(*shape[:2], *value.shape[2:])
        if pair[1] == "LN1":
            value = value.reshape(*value.shape[:2], *shape[2:])
        # A second-order term of a weight has no column for the bias, which comes last; positions are last rows.
        n_rows, n_columns = len(value), value.shape[2]
        rows = slice(shape[0] - n_rows, None) if row.position else slice(0, n_rows)
        columns = slice(shape[2] - n_columns, None) if column.position else slice(0, n_columns)
        block[rows, :, columns] += value
        if mirrored:
            block[columns, :, rows] += value.permute(2, 3, 0, 1)


def as_term(value: Tensor, row: Side, column: Side, sizes: tuple[int, ...], packed: bool) -> Float[Tensor, "a g b c"]:
    """Return a sum with its four indices apart."""
    a, g, b, c = sizes
    if packed:
        return value[unpacking(a, value.device)].view(a, g, b, c)
    if not row.position:
        return value.view(sizes)
    by_position = value.view(b, a, g, c).permute(1, 2, 0, 3)
    return torch.diag_embed(by_position[..., 0]) if column.position else by_position


def laid_out(
    term: Float[Tensor, "a g b c"], row: Side, column: Side, maps: Mapping[str, Tensor]
) -> Float[Tensor, "l t m u"]:
    """Return a term with its indices in the order of its groups."""
    named = enumerate((row.matrix_by, column.matrix_by, row.vector_by, column.vector_by))
    todo = [(index, maps[name]) for index, name in named if name]
    for index, map_ in sorted(todo, key=lambda item: item[1].shape[0] / item[1].shape[1]):  # what shrinks it most first
        term = torch.tensordot(map_, term, dims=([1], [index])).movedim(0, index)
    rows = (0, 2) if row.matrix_first else (2, 0)
    columns = (1, 3) if column.matrix_first else (3, 1)
    return term.permute(*rows, *columns)
