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
    """

    matrix_first: bool = False
    mix: bool = False


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
    squares: dict[tuple[Pair, Side], Square] = field(default_factory=dict)

    def add(
        self,
        pair: Pair,
        sides: tuple[Side, Side],
        M: Float[Tensor, "N a g"],
        v: Float[Tensor, "N b"] | None,
        w: Float[Tensor, "N c"] | None,
        mirrored: bool = False,
    ) -> None:
        """Add a chunk. A vector None is a 1; a mirrored term stands for itself and its transpose."""
        key = (pair, *sides, mirrored)
        self.sizes[key] = (*M.shape[1:], 1 if v is None else v.shape[1], 1 if w is None else w.shape[1])
        vectors = [x for x in (v, w) if x is not None] or [torch.ones_like(M[:, :1, 0])]
        accumulate(self.terms, key, M.flatten(1), outer(*vectors) if len(vectors) == 2 else vectors[0])

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
        found = [
            (row, column, mirrored, self.terms.pop((pair, row, column, mirrored)).view(sizes))
            for (of, row, column, mirrored), sizes in self.sizes.items()
            if of == pair
        ]
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
            # A second-order term of a weight has no column for the bias, which comes last.
            total[:, :, : term.shape[2]] += term
            if mirrored:
                total += term.permute(2, 3, 0, 1)
        return total


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
