"""Sums of Kronecker products over tokens: the form of every block of a transformer's Hessian, and bounds on its norm.

A token i sees a weight W through W ᵀx_i, so every block of the loss Hessian is a sum Σ_i x_i z_iᵀ ⊗ N_i with small
matrices N_i. Whatever is asked of the Hessian (its product with a vector, its Frobenius norm, upper bounds on its
spectral norm) follows from the stacked X, Z, N without forming a block. All functions broadcast over leading batch
axes; norms are spectral unless the name says otherwise.

Source: T1, T6 (tight replacements).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from curvature_gap.shapes import Float

Pair = tuple[str, str]

# Bounds that subtract add this share of what they subtracted from: above the rounding of float64 sums, below any use.
ROUNDING = 1e-14


def top_norm(M: Float[Tensor, "*b m n"]) -> Float[Tensor, "*b"]:
    """Return ‖M‖_2 from the Gram matrix of the shorter side.

    Squaring costs small singular values their digits, not the largest one.
    """
    G = M.mT @ M if M.shape[-1] <= M.shape[-2] else M @ M.mT
    return torch.linalg.eigvalsh(G)[..., -1].clamp_min(0).sqrt()


def schatten_norm(M: Float[Tensor, "*b m n"]) -> Float[Tensor, "*b"]:
    """Return (tr (MᵀM)⁸)^(1/16), an upper bound on ‖M‖_2 that is at most rank^(1/16) above it (1.19 at rank 16).

    Three products of small matrices, half the time of their eigenvalues.
    """
    G = M.mT @ M if M.shape[-1] <= M.shape[-2] else M @ M.mT
    trace = G.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(torch.finfo(G.dtype).tiny)
    G_2 = (G / trace[..., None, None]).matrix_power(2)
    return trace.sqrt() * frobenius(G_2 @ G_2) ** 0.125


def frobenius(M: Float[Tensor, "*b m n"]) -> Float[Tensor, "*b"]:
    """Return ‖M‖_F."""
    return M.flatten(-2).norm(dim=-1)


@dataclass(frozen=True)
class KroneckerSum:
    """Σ_i x_i z_iᵀ ⊗ N_i, acting from a weight W_c (in' x out') to a weight W_b (in x out), both row-major.

    Its entry at (in, out; in', out') is Σ_i X[i, in] Z[i, in'] N[i, out, out']. `swap_rows` exchanges in and out,
    `swap_columns` in' and out': the vector then sits in the output slot and the matrix in the input slot. Swaps permute
    rows or columns, so norms do not see them. With `diagonal`, N has shape (L, p) and stands for diag(N_i). `cap` is
    an upper bound on the norm known from elsewhere.
    """

    X: Float[Tensor, "*b L d"]
    Z: Float[Tensor, "*b L e"]
    N: Tensor
    swap_rows: bool = False
    swap_columns: bool = False
    diagonal: bool = False
    cap: Tensor | None = None

    @cached_property
    def full_N(self) -> Float[Tensor, "*b L p q"]:
        """N_i as matrices."""
        return torch.diag_embed(self.N) if self.diagonal else self.N

    def dense(self) -> Float[Tensor, "*b m n"]:
        """Return the block as a matrix. For tests and the exact norms of small cases."""
        rows = "ac" if self.swap_rows else "ca"
        columns = "fe" if self.swap_columns else "ef"
        block = torch.einsum(f"...ic,...ie,...iaf->...{rows}{columns}", self.X, self.Z, self.full_N)
        return block.flatten(-4, -3).flatten(-2)

    def apply(self, U: Float[Tensor, "*b n k"]) -> Float[Tensor, "*b m k"]:
        """Return the block times k vectors."""
        e, f = self.Z.shape[-1], self.N.shape[-1]
        shape = (f, e) if self.swap_columns else (e, f)
        letters = "fe" if self.swap_columns else "ef"
        seen = torch.einsum(f"...ie,...{letters}k->...ifk", self.Z, U.unflatten(-2, shape))
        felt = self.N[..., None] * seen if self.diagonal else self.N @ seen
        rows = "ac" if self.swap_rows else "ca"
        return torch.einsum(f"...ic,...iak->...{rows}k", self.X, felt).flatten(-3, -2)

    @property
    def mT(self) -> "KroneckerSum":
        """The transpose."""
        N = self.N if self.diagonal else self.N.mT
        return KroneckerSum(self.Z, self.X, N, self.swap_columns, self.swap_rows, self.diagonal, self.cap)

    def inner(self, other: "KroneckerSum") -> Float[Tensor, "*b"]:
        """Return the Frobenius inner product in O(L² p²), from Gram matrices of the tokens."""
        rows_differ, columns_differ = self.swap_rows != other.swap_rows, self.swap_columns != other.swap_columns
        N, M = self.full_N, other.full_N
        if rows_differ and columns_differ:
            # Σ_ij (x_iᵀ M_j z_i)(x_jᵀ N_i z_j): each pair of vectors meets the other's matrix.
            mine = torch.einsum("...ic,...jce,...ie->...ij", self.X, M, self.Z)
            theirs = torch.einsum("...ja,...iaf,...jf->...ij", other.X, N, other.Z)
            return (mine * theirs).sum((-1, -2))
        if rows_differ:
            # Σ_ij (z_i·z_j) x_jᵀ N_i M_jᵀ x_i: each vector meets the other's matrix.
            left = torch.einsum("...jc,...icf->...ijf", other.X, N)
            right = torch.einsum("...ia,...jaf->...ijf", self.X, M)
            return (self.Z @ other.Z.mT * (left * right).sum(-1)).sum((-1, -2))
        if columns_differ:
            return self.mT.inner(other.mT)
        grams = (self.X @ other.X.mT) * (self.Z @ other.Z.mT)
        return (grams * (N.flatten(-2) @ M.flatten(-2).mT)).sum((-1, -2))

    def norm_bound(self) -> Float[Tensor, "*b"]:
        """Return an upper bound on the norm of this sum: the exact one if N_i is diagonal, else `kappa`."""
        if self.diagonal:
            # diag(N_i) makes the sum block diagonal: block a is Xᵀ diag(N_·a) Z.
            return top_norm(torch.einsum("...ic,...ia,...ie->...ace", self.X, self.N, self.Z)).amax(-1)
        bound = kappa(self.X, self.Z, self.N)
        return bound if self.cap is None else torch.minimum(bound, self.cap)

    def without_rows(self, directions: "Directions") -> "KroneckerSum":
        """Return (I − projection) times this sum, the projection acting on one slot of W_b.

        A projection lengthens nothing, so a bound known before it still holds.
        """
        E = directions.basis
        cap = self.norm_bound() if self.diagonal else self.cap
        if directions.on_inputs != self.swap_rows:
            return replace(self, X=self.X - self.X @ E @ E.mT, N=self.full_N, diagonal=False, cap=cap)
        E = E[..., None, :, :]
        return replace(self, N=self.full_N - E @ (E.mT @ self.full_N), diagonal=False, cap=cap)

    def without(self, rows: "Directions", columns: "Directions") -> "KroneckerSum":
        """Return this sum between the complements of two projections."""
        return self.without_rows(rows).mT.without_rows(columns).mT


@dataclass(frozen=True)
class Directions:
    """Orthonormal directions (d, r) in the input slot of a weight, or in its output slot."""

    basis: Float[Tensor, "*b d r"]
    on_inputs: bool

    def columns(self, shape: tuple[int, int]) -> Float[Tensor, "*b m k"]:
        """Return the orthonormal vectors e ⊗ (every unit vector of the other slot), as columns."""
        other = torch.eye(shape[1 if self.on_inputs else 0], dtype=self.basis.dtype, device=self.basis.device)
        equation = "...ir,ab->...iarb" if self.on_inputs else "...ir,ab->...airb"
        return torch.einsum(equation, self.basis, other).flatten(-4, -3).flatten(-2)


def weighted_gram(X: Tensor, Z: Tensor, w: Tensor) -> Tensor:
    """Return ‖Xᵀ diag(w s) X‖^½ ‖Zᵀ diag(w/s) Z‖^½ with w_i ≥ ‖N_i‖_2, the lesser of s_i = 1 and s_i = |z_i|/|x_i|.

    Proof: |⟨u, (Σ x_i z_iᵀ ⊗ N_i) v⟩| = |Σ (U x_i)ᵀ N_i (V z_i)| ≤ Σ w_i |U x_i| |V z_i|; Cauchy–Schwarz for any
    s_i > 0, and Σ w_i s_i |U x_i|² = tr U (Xᵀ diag(w s) X) Uᵀ ≤ ‖Xᵀ diag(w s) X‖ |u|².
    """
    root = w.sqrt()[..., None]
    if X is Z:
        return top_norm(root * X).square()
    plain = top_norm(root * X) * top_norm(root * Z)
    x, z = X.norm(dim=-1, keepdim=True), Z.norm(dim=-1, keepdim=True)
    # A token with x_i = 0 or z_i = 0 adds nothing; any positive s_i will do for it.
    s = torch.where((x > 0) & (z > 0), z / x, 1.0).sqrt()
    return torch.minimum(plain, top_norm(root * s * X) * top_norm(root / s * Z))


def frobenius_of_sum(X: Tensor, Z: Tensor, N: Tensor) -> Tensor:
    """Return ‖Σ x_i z_iᵀ ⊗ N_i‖_F = (Σ_ij (x_i·x_j)(z_i·z_j)⟨N_i, N_j⟩)^½, plus what rounding may have eaten."""
    flat = N.flatten(-2)
    square = ((X @ X.mT) * (Z @ Z.mT) * (flat @ flat.mT)).sum((-1, -2))
    return (square.clamp_min(0) + ROUNDING * lengths(X, Z, N).square()).sqrt()


def lengths(X: Tensor, Z: Tensor, N: Tensor) -> Tensor:
    """Return Σ_i |x_i| |z_i| ‖N_i‖_F, the size of a sum's terms before they cancel."""
    return (X.norm(dim=-1) * Z.norm(dim=-1) * N.flatten(-2).norm(dim=-1)).sum(-1)


@dataclass(frozen=True)
class TokenMatrices:
    """The matrices N_i with what every bound asks of them: ‖N_i‖_2, their mean, and ‖N_i − mean‖_2.

    Of more than `GRAM_TOKENS` matrices the norms are bounded by `schatten_norm`; bounds need no more.
    """

    N: Float[Tensor, "*b L p q"]

    @property
    def constant(self) -> bool:
        """Whether one matrix is expanded to all tokens: its norm is then computed once."""
        return self.N.shape[-3] > 1 and self.N.stride(-3) == 0

    @cached_property
    def norms(self) -> Float[Tensor, "*b L"]:
        return top_norm(self.N[..., :1, :, :]).expand(self.N.shape[:-2]) if self.constant else self._norms_of(self.N)

    @cached_property
    def mean(self) -> Float[Tensor, "*b p q"]:
        return self.N[..., 0, :, :] if self.constant else self.N.mean(dim=-3)

    @cached_property
    def deviations(self) -> Float[Tensor, "*b L"]:
        if self.constant:
            return torch.zeros_like(self.norms)
        return self._norms_of(self.N - self.mean[..., None, :, :])

    def _norms_of(self, M: Float[Tensor, "*b L p q"]) -> Float[Tensor, "*b L"]:
        return schatten_norm(M) if M.shape[-3] > GRAM_TOKENS else top_norm(M)


# Beyond so many tokens their L x L Gram matrices cost more than they tell.
GRAM_TOKENS = 1000


def undeflated(X: Tensor, Z: Tensor, matrices: TokenMatrices) -> Tensor:
    """Return the least of three bounds: weighted Gram, mean split and (up to `GRAM_TOKENS` tokens) Frobenius.

    Split: Σ x_i z_iᵀ ⊗ N_i = XᵀZ ⊗ N̄ + Σ x_i z_iᵀ ⊗ (N_i − N̄), whose first norm is ‖XᵀZ‖ ‖N̄‖.
    """
    split = top_norm(X.mT @ Z) * top_norm(matrices.mean) + weighted_gram(X, Z, matrices.deviations)
    bound = torch.minimum(weighted_gram(X, Z, matrices.norms), split)
    if X.shape[-2] > GRAM_TOKENS:
        return bound
    return torch.minimum(bound, frobenius_of_sum(X, Z, matrices.N))


def right_singular_vectors(X: Tensor) -> Tensor:
    """Return X's right singular vectors, by ascending singular value."""
    return torch.linalg.eigh(X.mT @ X).eigenvectors


def split(X: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """Return coordinates (L, r) along r orthonormal directions, and the tokens without them."""
    along = X @ directions
    return along, X - along @ directions.mT


def deflated(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], matrices: TokenMatrices) -> Tensor:
    """Return the bound after taking directions out of the tokens on both sides, split by `split`.

    Splitting each side orthogonally gives a 2 x 2 block operator. The corner (r p x r q) and the two borders are
    exact, the remainder is `undeflated`; an operator's norm is at most the norm of the matrix of its blocks' norms.
    """
    N = matrices.N
    (alpha, x), (beta, z) = left, right
    corner = torch.einsum("...ik,...il,...iaf->...kalf", alpha, beta, N).flatten(-4, -3).flatten(-2)
    upper = torch.einsum("...ik,...ie,...iaf->...kaef", alpha, z, N).flatten(-4, -3).flatten(-2)
    lower = torch.einsum("...ic,...il,...iaf->...lfca", x, beta, N).flatten(-4, -3).flatten(-2)
    first = torch.stack([top_norm(corner), top_norm(upper)], -1)
    second = torch.stack([top_norm(lower), undeflated(x, z, matrices)], -1)
    return torch.linalg.matrix_norm(torch.stack([first, second], -2), 2)


def kappa(X: Float[Tensor, "*b L d"], Z: Tensor, N: Tensor) -> Float[Tensor, "*b"]:
    """Return an upper bound on ‖Σ_i x_i z_iᵀ ⊗ N_i‖_2: the least over zero, one, two and four deflated directions.

    Cost O(L p³ + L² p²), beyond `GRAM_TOKENS` tokens O(L p³) and two directions only; nothing of the size of the block
    is formed.

    Raises:
        ValueError: If the stacks do not hold the same number of tokens.
    """
    if not X.shape[-2] == Z.shape[-2] == N.shape[-3]:
        raise ValueError(f"X, Z, N hold {X.shape[-2]}, {Z.shape[-2]}, {N.shape[-3]} tokens; one number is needed.")
    matrices = TokenMatrices(N)
    bound = undeflated(X, Z, matrices)
    U = right_singular_vectors(X)
    V = U if X is Z else right_singular_vectors(Z)
    for r in (1, 2, 4) if X.shape[-2] <= GRAM_TOKENS else (2,):
        if r < min(X.shape[-1], Z.shape[-1]):
            left = split(X, U[..., -r:])
            right = left if X is Z else split(Z, V[..., -r:])
            bound = torch.minimum(bound, deflated(left, right, matrices))
    return bound


@dataclass(frozen=True)
class KroneckerHessian:
    """A symmetric matrix whose blocks are sums of Kronecker sums.

    `shapes` names the weights in order, as (in, out); `terms` holds the block pairs (b, c) with b not after c; absent
    pairs are zero.
    """

    shapes: Mapping[str, tuple[int, int]]
    terms: Mapping[Pair, tuple[KroneckerSum, ...]]

    @property
    def sizes(self) -> dict[str, int]:
        """Number of parameters of each block."""
        return {name: rows * columns for name, (rows, columns) in self.shapes.items()}

    def block(self, pair: Pair) -> Float[Tensor, "*b m n"]:
        """Return one block as a matrix."""
        if pair in self.terms:
            return torch.stack([term.dense() for term in self.terms[pair]]).sum(0)
        return self.block(pair[::-1]).mT

    def dense(self) -> Float[Tensor, "*b P P"]:
        """Return the whole matrix. For tests and the exact norms of small cases."""
        names = list(self.shapes)
        like = next(iter(self.terms.values()))[0].X
        batch = like.shape[:-2]

        def block(b: str, c: str) -> Tensor:
            if (b, c) in self.terms or (c, b) in self.terms:
                return self.block((b, c))
            return like.new_zeros(*batch, self.sizes[b], self.sizes[c])

        return torch.cat([torch.cat([block(b, c) for c in names], dim=-1) for b in names], dim=-2)

    def apply(self, U: Float[Tensor, "*b P k"]) -> Float[Tensor, "*b P k"]:
        """Return the matrix times k vectors, block by block."""
        parts = dict(zip(self.shapes, U.split(list(self.sizes.values()), dim=-2), strict=True))
        out = {name: torch.zeros_like(part) for name, part in parts.items()}
        for (b, c), terms in self.terms.items():
            for term in terms:
                out[b] = out[b] + term.apply(parts[c])
                if b != c:
                    out[c] = out[c] + term.mT.apply(parts[b])
        return torch.cat(list(out.values()), dim=-2)

    def squared_frobenius(self, pair: Pair) -> Float[Tensor, "*b"]:
        """Return ‖block‖_F², an upper bound within rounding: what cancellation may have eaten is added back."""
        terms = self.terms[pair]
        squares = [term.inner(term) for term in terms]
        crosses = [2 * a.inner(b) for i, a in enumerate(terms) for b in terms[i + 1 :]]
        size = torch.stack([lengths(term.X, term.Z, term.full_N) for term in terms]).sum(0)
        return torch.stack(squares + crosses).sum(0).clamp_min(0) + ROUNDING * size.square()

    def total_squared_frobenius(self) -> Float[Tensor, "*b"]:
        """Return ‖H‖_F²; a pair off the diagonal stands for two blocks."""
        return torch.stack([(1 if b == c else 2) * self.squared_frobenius((b, c)) for b, c in self.terms]).sum(0)

    def restrict(self, pairs: Iterable[Pair]) -> "KroneckerHessian":
        """Return the symmetric matrix that keeps the given block pairs and is zero elsewhere."""
        kept = {pair: self.terms[pair] for pair in pairs if pair in self.terms}
        names = {name for pair in kept for name in pair}
        return replace(self, shapes={n: s for n, s in self.shapes.items() if n in names}, terms=kept)

    def term_bound(self, pair: Pair) -> Float[Tensor, "*b"]:
        """Return a bound on one block: its terms' bounds added, or (up to `GRAM_TOKENS`) its Frobenius norm.

        The block of a weight with one input, a scale or shift, is a few rows: its norm is exact.
        """
        terms = self.terms[pair]
        if 1 in (self.shapes[pair[0]][0], self.shapes[pair[1]][0]):
            return top_norm(self.block(pair))
        bounds = torch.stack([term.norm_bound() for term in terms]).sum(0)
        if terms[0].X.shape[-2] > GRAM_TOKENS:
            return bounds
        return torch.minimum(bounds, self.squared_frobenius(pair).sqrt())

    def block_bounds(self) -> dict[Pair, Float[Tensor, "*b"]]:
        """Return `term_bound` of every stored block pair."""
        return self._block_bounds

    @cached_property
    def _block_bounds(self) -> dict[Pair, Float[Tensor, "*b"]]:
        return {pair: self.term_bound(pair) for pair in self.terms}


def norm_of_norms(names: Iterable[str], norms: Mapping[Pair, Tensor]) -> Float[Tensor, "*b"]:
    """Return the norm of the symmetric matrix of block norms, an upper bound on the whole matrix's norm.

    Proof: |uᵀHv| ≤ Σ_bc ‖H_bc‖ |u_b| |v_c|, and (|u_b|)_b has the length of u. With exact block norms this is the
    floor of every bound that knows the blocks only by their norms.
    """
    names = list(names)
    zero = torch.zeros_like(next(iter(norms.values())))
    rows = [torch.stack([norms.get((b, c), norms.get((c, b), zero)) for c in names], -1) for b in names]
    return torch.linalg.eigvalsh(torch.stack(rows, -2))[..., -1]


def krylov_basis(H: KroneckerHessian, n_products: int) -> tuple[Tensor, Tensor]:
    """Return an orthonormal Krylov basis Q (P, m) of H and H Q, from a fixed start, by `n_products` products.

    Where the space is exhausted the remaining vectors are zero. The start is arbitrary: it moves the tightness of what
    is built on Q, never its validity.
    """
    like = next(iter(H.terms.values()))[0].X
    P = sum(H.sizes.values())
    q = torch.arange(1, P + 1, dtype=like.dtype, device=like.device).square().cos()
    q = (q / q.norm()).expand(*like.shape[:-2], P)[..., None]
    basis, products = [], []
    for _ in range(min(n_products, P)):
        basis.append(q)
        products.append(H.apply(q))
        Q, w = torch.cat(basis, -1), products[-1]
        length = w.norm(dim=-2, keepdim=True)
        for _ in range(2):
            w = w - Q @ (Q.mT @ w)
        rest = w.norm(dim=-2, keepdim=True)
        # Below 1e-10 of the product what is left is rounding, not a new direction.
        q = torch.where(rest > 1e-10 * length, w / rest.clamp_min(torch.finfo(w.dtype).tiny), 0.0)
    return torch.cat(basis, -1), torch.cat(products, -1)


@dataclass(frozen=True)
class RitzPairs:
    """Ritz values θ (m) by ascending modulus, their vectors (P, m), and the lengths of the residuals H u − θ u."""

    theta: Float[Tensor, "*b m"]
    vectors: Float[Tensor, "*b P m"]
    residual: Float[Tensor, "*b m"]


def ritz(H: KroneckerHessian, n_products: int) -> RitzPairs:
    """Return the Ritz pairs of H on `krylov_basis`."""
    return ritz_on(*krylov_basis(H, n_products))


def ritz_on(Q: Float[Tensor, "*b P m"], HQ: Float[Tensor, "*b P m"]) -> RitzPairs:
    """Return the Ritz pairs on an orthonormal basis Q, from Q and H Q."""
    theta, S = torch.linalg.eigh((Q.mT @ HQ + HQ.mT @ Q) / 2)
    order = theta.abs().argsort(dim=-1)
    theta, S = theta.gather(-1, order), S.gather(-1, order[..., None, :].expand_as(S))
    U, HU = Q @ S, HQ @ S
    return RitzPairs(theta, U, (HU - U * theta[..., None, :]).norm(dim=-2))


def deflated_frobenius(
    H: KroneckerHessian, n_products: int = 40, pairs: RitzPairs | None = None
) -> Float[Tensor, "*b"]:
    """Return an upper bound on ‖H‖_2 from m products with H and its exact Frobenius norm, with certainty.

    `pairs` are the Ritz pairs, if at hand.

    Let θ_i, u_i be Ritz pairs of H on an m-dimensional space U, r_i the length of H u_i − θ_i u_i. The part of H that
    maps U's complement to itself has squared Frobenius norm d² = ‖H‖_F² − Σ θ_i² − 2 Σ r_i². Hence ‖H‖_2 is at most
    the norm of the arrow matrix with diagonal (|θ_1|, ..., |θ_m|, d) and borders r_i: each u_i is a block of its own.
    It comes down to the largest |θ_i| as soon as the rest of the spectrum is shorter than it. Lanczos alone gives a
    lower bound, and an upper one with a probability.
    """
    square = H.total_squared_frobenius()
    pairs = ritz(H, n_products) if pairs is None else pairs
    theta, residual = pairs.theta, pairs.residual
    rest = square - theta.square().sum(-1) - 2 * residual.square().sum(-1)
    d = (rest.clamp_min(0) + ROUNDING * square).sqrt()
    diagonal = torch.cat([theta.abs(), d[..., None]], -1)
    arrow = torch.diag_embed(diagonal)
    arrow[..., -1, :-1] = residual
    arrow[..., :-1, -1] = residual
    return torch.minimum(torch.linalg.eigvalsh(arrow)[..., -1], square.sqrt())


def lanczos_estimate(H: KroneckerHessian, n_products: int = 40) -> Float[Tensor, "*b"]:
    """Return Lanczos' lower estimate of ‖H‖_2: the largest Ritz value's modulus."""
    return ritz(H, n_products).theta.abs().amax(-1)


def leading_directions(H: KroneckerHessian, r: int, pairs: RitzPairs) -> dict[str, Directions]:
    """Return r directions per weight, on its longer side, that carry most of the leading Ritz vectors.

    Eight Ritz vectors, weighted by the root of their value, are read as matrices of the weight's shape. The choice
    moves the tightness of `core_bound`, never its validity.
    """
    U = (pairs.vectors * pairs.theta.abs().sqrt()[..., None, :])[..., -8:]
    directions = {}
    for (name, shape), part in zip(H.shapes.items(), U.split(list(H.sizes.values()), dim=-2), strict=True):
        on_inputs = shape[0] >= shape[1]
        M = part.unflatten(-2, shape)
        M = (M if on_inputs else M.transpose(-3, -2)).flatten(-2)
        directions[name] = Directions(torch.linalg.eigh(M @ M.mT).eigenvectors[..., -r:], on_inputs)
    return directions


def core_bound(H: KroneckerHessian, directions: Mapping[str, Directions]) -> Float[Tensor, "*b"]:
    """Return an upper bound on ‖H‖_2 from its exact compression to a small core and a bound on the rest.

    Let U span, for every weight, (its directions) ⊗ (the other slot); T = UᵀHU, G = Uᵀ H (I − UUᵀ) H U, and β any bound
    on the compression to the complement, here `norm_of_norms` or Frobenius. With H₂₂ ≼ β I, H is at most
    [[T, H₁₂], [H₂₁, β I]], whose eigenvalues beyond β depend on H₁₂ only through H₁₂H₂₁ = G: they are those of
    [[T, G^½], [G^½, β I]]. The same for −H.
    """
    columns = [directions[name].columns(shape) for name, shape in H.shapes.items()]
    U = block_columns(columns)
    HU = H.apply(U)
    T = U.mT @ HU
    R = HU - U @ T
    rest = {
        (b, c): torch.stack([t.without(directions[b], directions[c]).norm_bound() for t in terms]).sum(0)
        for (b, c), terms in H.terms.items()
    }
    total = H.total_squared_frobenius()
    left = (total - T.square().sum((-1, -2)) - 2 * R.square().sum((-1, -2))).clamp_min(0) + 10 * ROUNDING * total
    beta = torch.minimum(norm_of_norms(H.shapes, rest), left.sqrt())
    w, S = torch.linalg.eigh(R.mT @ R)
    root = S * w.clamp_min(0).sqrt()[..., None, :] @ S.mT
    corner = beta[..., None, None] * torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
    T = (T + T.mT) / 2
    lower = torch.cat([root, corner], -1)
    sides = [torch.linalg.eigvalsh(torch.cat([torch.cat([t, root], -1), lower], -2))[..., -1] for t in (T, -T)]
    return torch.maximum(*sides)


def block_columns(parts: list[Tensor]) -> Tensor:
    """Return the block diagonal matrix of (batched) rectangular parts."""
    widths = [part.shape[-1] for part in parts]
    batch = parts[0].shape[:-2]
    rows = [
        torch.cat([part if i == j else part.new_zeros(*batch, part.shape[-2], w) for j, w in enumerate(widths)], -1)
        for i, part in enumerate(parts)
    ]
    return torch.cat(rows, -2)


def data_bounds(
    H: KroneckerHessian, r: int = 3, n_products: int = 20, pairs: RitzPairs | None = None
) -> dict[str, Float[Tensor, "*b"]]:
    """Return the bounds on ‖H‖_2 from its Kronecker sums: `block_norms`, `deflated_frobenius` and, for r > 0, `core`.

    Args:
        r: Directions taken out per weight.
        n_products: Products with H that choose the directions. In all it takes `n_products` + r Σ (shorter sides).
        pairs: The Ritz pairs of `n_products` products, if at hand.
    """
    pairs = ritz(H, n_products) if pairs is None else pairs
    bounds = {
        "block_norms": norm_of_norms(H.shapes, H.block_bounds()),
        "deflated_frobenius": deflated_frobenius(H, n_products, pairs),
    }
    if r > 0:
        bounds["core"] = core_bound(H, leading_directions(H, r, pairs))
    return bounds


def data_bound(H: KroneckerHessian, r: int = 3, n_products: int = 20) -> Float[Tensor, "*b"]:
    """Return the least of `data_bounds`."""
    return torch.stack(list(data_bounds(H, r, n_products).values())).amin(0)
