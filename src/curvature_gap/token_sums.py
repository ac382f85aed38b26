"""Sums over tokens of (matrix ⊗ vector) pairs: each is one matrix product with inner size "number of tokens".

H[(β, α), (δ, γ)] = Σ_t M_t[α, γ] v_t[β] w_t[δ]
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from curvature_gap.block_requests import Pair
from curvature_gap.shapes import Float

PARTS = 4
"""A symmetric operand is computed in this many strips, each from its diagonal on: 5/8 of the work at 4."""
STRIP = 8
"""Strips are no narrower than this."""


@dataclass(frozen=True)
class Side:
    """How the indices (matrix, vector) of one side become (leading, trailing) of its group.

    `mix` says that the trailing index is still one of A X, to be multiplied by Cᵀ: X enters A X C through C.
    `position` says that the vector is the one-hot vector of the token's position, whose numbers come last in the group.
    """

    matrix_first: bool = False
    mix: bool = False
    position: bool = False
    constant: str = ""
    """Names the constant the sum is to be multiplied by."""


def outer(v: Float[Tensor, "N x"], w: Float[Tensor, "N y"]) -> Float[Tensor, "N x*y"]:
    """Return v wᵀ per token, flat."""
    return (v[:, :, None] * w[:, None, :]).flatten(1)


def accumulate(sums: dict, key: Hashable, left: Float[Tensor, "N x"], right: Float[Tensor, "N y"]) -> None:
    """Add leftᵀ right to sums[key]."""
    if key in sums:
        sums[key].addmm_(left.T, right)
    else:
        sums[key] = left.T @ right


def strips(n: int) -> list[tuple[slice, slice]]:
    """Cut the upper triangle of an n x n matrix into strips (rows, columns)."""
    step = max(STRIP, -(-n // PARTS))
    return [(slice(i, min(i + step, n)), slice(i, n)) for i in range(0, n, step)]


def pack(M: Float[Tensor, "N n n"]) -> Float[Tensor, "N m"]:
    """Return the upper triangle of symmetric matrices, flat."""
    i, j = torch.triu_indices(*M.shape[1:], device=M.device)
    return M[:, i, j]


def pack_outer(v: Float[Tensor, "N n"]) -> Float[Tensor, "N m"]:
    """Return `pack(v vᵀ)`."""
    i, j = torch.triu_indices(v.shape[1], v.shape[1], device=v.device)
    return v[:, i] * v[:, j]


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


@dataclass
class Sums:
    """All terms, by group pair, by how their sides are laid out, and whether their transpose belongs to the block."""

    terms: dict[tuple[Pair, Side, Side, bool], Tensor] = field(default_factory=dict)
    sizes: dict[tuple[Pair, Side, Side, bool], tuple[int, ...]] = field(default_factory=dict)
    """(α, γ, β, δ)."""
    constants: dict[tuple[Pair, Side, Side, bool], Tensor] = field(default_factory=dict)
    """Broadcast to (α, γ, β, δ); they multiply the finished sum."""
    squares: dict[tuple[Pair, Side], Square] = field(default_factory=dict)

    def add(
        self,
        pair: Pair,
        sides: tuple[Side, Side],
        M: Float[Tensor, "N a g"],
        v: Float[Tensor, "N b"] | None,
        w: Float[Tensor, "N c"] | None,
        mirrored: bool = False,
        constant: Tensor | None = None,
    ) -> None:
        """Add a chunk. A vector None is a 1; a mirrored term stands for itself and its transpose."""
        key = (pair, *sides, mirrored)
        self.sizes[key] = (*M.shape[1:], 1 if v is None else v.shape[1], 1 if w is None else w.shape[1])
        if constant is not None:
            self.constants[key] = constant
        vectors = [x for x in (v, w) if x is not None] or [torch.ones_like(M[:, :1, 0])]
        accumulate(self.terms, key, M.flatten(1), outer(*vectors) if len(vectors) == 2 else vectors[0])

    def add_by_position(
        self,
        pair: Pair,
        sides: tuple[Side, Side],
        M: Float[Tensor, "n l a g"],
        w: Float[Tensor, "n l c"] | None,
        mirrored: bool = False,
    ) -> None:
        """Add a chunk whose first vector is the one-hot vector of the position: one sum over samples per position."""
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

    def take(self, pair: Pair, shape: tuple[int, ...], C: Tensor) -> Float[Tensor, "l t m u"] | None:
        """Remove a group pair's terms and return their sum: rows (leading, trailing), columns likewise."""
        found = []
        for key in [key for key in self.terms if key[0] == pair]:
            _, row, column, mirrored = key
            term = as_term(self.terms.pop(key), row, self.sizes[key])
            found.append((row, column, mirrored, term * self.constants[key] if key in self.constants else term))
        found += [(side, side, False, square.whole()) for (of, side), square in self.squares.items() if of == pair]
        self.squares = {key: square for key, square in self.squares.items() if key[0] != pair}
        if not found:
            return None
        total = found[0][-1].new_zeros(shape)
        for row, column, mirrored, term in found:
            term = laid_out(term, row, column, C)
            if pair[0] == "LN1":  # its one matrix index is (gamma, beta) in a row
                term = term.reshape(*shape[:2], *term.shape[2:])
            if pair[1] == "LN1":
                term = term.reshape(*term.shape[:2], *shape[2:])
            # A second-order term of a weight has no column for the bias, which comes last; positions are last rows.
            n = len(term)
            rows = slice(len(total) - n, None) if row.position else slice(0, n)
            total[rows, :, : term.shape[2]] += term
            if mirrored:
                total[:, :, rows] += term.permute(2, 3, 0, 1)
        return total


def as_term(value: Tensor, row: Side, sizes: tuple[int, ...]) -> Float[Tensor, "a g b c"]:
    """Return a sum with its four indices apart."""
    if not row.position:
        return value.view(sizes)
    a, g, b, c = sizes
    return value.view(b, a, g, c).permute(1, 2, 0, 3)


def laid_out(term: Float[Tensor, "a g b c"], row: Side, column: Side, C: Tensor) -> Float[Tensor, "l t m u"]:
    """Return a term with its indices in the order of its groups."""
    rows = (0, 2) if row.matrix_first else (2, 0)
    columns = (1, 3) if column.matrix_first else (3, 1)
    term = term.permute(*rows, *columns)
    if row.mix:
        term = torch.einsum("bacd,ja->bjcd", term, C)
    if column.mix:
        term = torch.einsum("bacd,jd->bacj", term, C)
    return term
