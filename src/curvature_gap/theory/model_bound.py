"""A valid bound on the whole vision transformer's Hessian: cross-entropy after pooling, learned scales, W_O, embedding.

H = Gauss–Newton part + Σ_b ∇²⟨r_b, o_b⟩ with r = (softmax − one-hot)/batch at the logits o. The first, and whatever
touches the classifier, come exactly from the Jacobians of the pooled features (as many backward passes as features).
The rest is a sum over tokens of Kronecker products and is bounded as such, pair by pair; it is never formed.

Source: T6, GN1; the paper's text names cross-entropy and pooling as extensions (TXT-1).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from curvature_gap.architecture import Architecture, parameter_shapes
from curvature_gap.maps import attention_matrix
from curvature_gap.shapes import Float, Int
from curvature_gap.theory.block_bound import NormRows, feed_forward_terms, norm_rows, relu_pass
from curvature_gap.theory.kronecker_sum import KroneckerHessian, KroneckerSum, Pair, norm_of_norms, top_norm
from curvature_gap.vit import patches, tokens, vit_logits

ATTENTION_BLOCKS = ("embed", "W_Q", "W_K", "W_V", "W_O")


@dataclass(frozen=True)
class Piece:
    """One way a weight moves a token's row: by (matrix)(dWᵀ vector), in and out of dW exchanged if `swap`.

    `tilt`, where the weight acts through the attention logits, is the matrix of ds_i and of s_i·dx_l together: row i of
    the logits moves by (tilt dWᵀ vector)·ξ_l, with ξ_l = (x_l, patch_l).
    """

    vector: Float[Tensor, "N d"]
    matrix: Float[Tensor, "N m q"]
    swap: bool = False
    tilt: Tensor | None = None

    def through(self, J: Tensor) -> "Piece":
        """The same movement, seen after a linear map per token."""
        return Piece(self.vector, J @ self.matrix, self.swap, self.tilt)

    def meets(self, other: "Piece", E: Tensor) -> KroneckerSum:
        """The second derivative that the curvature E between two movements gives."""
        return KroneckerSum(self.vector, other.vector, self.matrix.mT @ E @ other.matrix, self.swap, other.swap)


def check_architecture(a: Architecture) -> None:
    """Raise ValueError where the derivation does not cover the architecture."""
    if (a.depth, a.heads, a.norm, a.mask, a.activation, a.bias) != (1, 1, "post", "none", "relu", False):
        raise ValueError(f"The model bound covers one bias-free post-norm block with one head and ReLU; got {a}.")
    if a.positions == "learned":
        raise ValueError("The model bound covers fixed positions; learned ones are parameters it does not bound.")


class TokenCurvature:
    """The functional Hessian Σ_b ∇²⟨r_b, o_b⟩ of all weights but the classifier, in Kronecker sums over tokens.

    Backwards through the block each map gives the gradient and curvature that the map before it sees:
    features u = W_c r/L; scale γ_2; LN2 → (G, N) at S; feed-forward → q = MᵀG, H_Y = MᵀNM at Y; scale γ_1; LN1 →
    (p, E) at X + F W_O. Rows of all samples are stacked, N = batch · L of them.

    Source: T5 with scale, shift and output projection.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], images: Tensor, residual: Float[Tensor, "b c"], a: Architecture
    ) -> None:
        W = parameters
        self.W, self.a = W, a
        X, P = tokens(W, images, a), patches(images, a.patch)
        identity = torch.eye(a.d_V, dtype=X.dtype, device=X.device)
        self.identity = identity
        self.W_O = W.get("W_O", identity)
        A = attention_matrix(X, W["W_Q"], W["W_K"]).squeeze(-3)
        xi = torch.cat([X, P], dim=-1)
        centre = xi.mean(dim=-2, keepdim=True)
        xi = xi - centre
        shift = A @ xi
        self.C = (torch.einsum("bil,blc,ble->bice", A, xi, xi) - shift[..., :, None] * shift[..., None, :]).flatten(
            0, 1
        )
        mean = (shift + centre).flatten(0, 1)
        self.mu, self.P_mean = mean[:, : a.d_V], mean[:, a.d_V :]
        self.X, self.P = X.flatten(0, 1), P.flatten(0, 1)
        self.tau = a.head_d_K**-0.5
        self.z = self.X @ W["W_Q"]
        self.s = self.tau * self.z @ W["W_K"].mT
        self.f = self.mu @ W["W_V"]
        self.rows_1 = norm_rows(self.X + self.f @ self.W_O, a.norm_eps)
        gamma_1, gamma_2 = W["LN1_gamma"], W["LN2_gamma"]
        self.Y = self.rows_1.normalised * gamma_1 + W["LN1_beta"]
        self.ff = relu_pass(self.Y, W["W_1"])
        self.rows_2: NormRows = norm_rows(self.Y + self.ff.h @ W["W_2"], a.norm_eps)
        self.u = (residual @ W["classifier"].mT / a.n_tokens).repeat_interleave(a.n_tokens, dim=0)
        self.G = _times(self.rows_2.jacobian, gamma_2 * self.u)
        self.N = self.rows_2.curvature(gamma_2 * self.u)
        self.J_h = self.ff.D[..., None] * W["W_2"]
        self.M = identity + self.J_h.mT @ W["W_1"].mT
        self.q = _times(self.M.mT, self.G)
        self.H_Y = self.M.mT @ self.N @ self.M
        self.L_1 = gamma_1[:, None] * self.rows_1.jacobian
        self.p = _times(self.rows_1.jacobian, gamma_1 * self.q)
        self.E = self.L_1.mT @ self.H_Y @ self.L_1 + self.rows_1.curvature(gamma_1 * self.q)
        self.p_F = self.p @ self.W_O.mT
        self.v = self.p_F @ W["W_V"].mT
        # Σ_l S̄_il ξ_l and Σ_l S̄_il (ξ − mean)(ξ − mean)ᵀ with S̄_il = a_il ⟨x_l − mu_i, v_i⟩: the third moment along v.
        v = self.v.unflatten(0, X.shape[:2])
        weight = A * (v @ xi[..., : a.d_V].mT - (shift[..., : a.d_V] * v).sum(-1, keepdim=True))
        b = weight @ xi
        cross = b[..., :, None] * shift[..., None, :]
        self.M_3 = (torch.einsum("bil,blc,ble->bice", weight, xi, xi) - cross - cross.mT).flatten(0, 1)
        b = b.flatten(0, 1)
        self.B, self.B_P = b[:, : a.d_V], b[:, a.d_V :]

    @property
    def C_x(self) -> Float[Tensor, "N d m"]:
        """The rows of Cov(ξ) that belong to the tokens."""
        return self.C[:, : self.a.d_V]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The covered weights as (in, out); a scale or shift has one input."""
        covered = {k: s for k, s in parameter_shapes(self.a).items() if k not in ("classifier", "LN2_beta")}
        return {name: (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1]) for name, shape in covered.items()}

    def constant(self, M: Tensor) -> Tensor:
        """The same matrix for every token."""
        return M.expand(self.X.shape[0], *M.shape)

    @cached_property
    def tilts(self) -> dict[str, list[tuple[Tensor, Tensor, bool]]]:
        """Vector, tilt and swap of every movement of the logits, by weight."""
        W, tau, c = self.W, self.tau, self.P.shape[-1]
        zero = self.X.new_zeros
        into_x = {"W_Q": tau * W["W_K"], "W_K": tau * self.identity, "embed": tau * W["W_K"] @ W["W_Q"].mT}
        tall = {name: torch.cat([M, zero(c, M.shape[1])]) for name, M in into_x.items()}
        patch = torch.cat([zero(self.a.d_V, c), torch.eye(c, dtype=self.X.dtype, device=self.X.device)])
        return {
            "embed": [(self.P, tall["embed"], False), (self.s, patch, True)],
            "W_Q": [(self.X, tall["W_Q"], False)],
            "W_K": [(self.z, tall["W_K"], True)],
        }

    @cached_property
    def at_attention(self) -> dict[str, list[Piece]]:
        """Movements of X + F W_O. Source: G; the embedding moves a token, its mean and its logits."""
        VO = (self.W["W_V"] @ self.W_O).mT
        pieces = {
            name: [Piece(vector, VO @ self.C_x @ tilt, swap, tilt) for vector, tilt, swap in found]
            for name, found in self.tilts.items()
        }
        own = pieces["embed"][0]
        pieces["embed"][0] = Piece(own.vector, self.identity + own.matrix, own.swap, own.tilt)
        pieces["embed"].append(Piece(self.P_mean, self.constant(VO)))
        pieces["W_V"] = [Piece(self.mu, self.constant(self.W_O.mT))]
        if "W_O" in self.W:
            pieces["W_O"] = [Piece(self.f, self.constant(self.identity))]
        return pieces

    @cached_property
    def at_Y(self) -> dict[str, list[Piece]]:
        """Movements of Y = γ_1 LN1 + β_1."""
        one = self.X.new_ones(self.X.shape[0], 1)
        pieces = {name: [piece.through(self.L_1) for piece in found] for name, found in self.at_attention.items()}
        pieces["LN1_gamma"] = [Piece(one, torch.diag_embed(self.rows_1.normalised))]
        pieces["LN1_beta"] = [Piece(one, self.constant(self.identity))]
        return pieces

    @cached_property
    def at_S(self) -> dict[str, list[Piece]]:
        """Movements of S = Y + h W_2."""
        pieces = {name: [piece.through(self.M) for piece in found] for name, found in self.at_Y.items()}
        pieces["W_1"] = [Piece(self.Y, self.J_h.mT)]
        pieces["W_2"] = [Piece(self.ff.h, self.constant(self.identity))]
        return pieces

    def pairs(self) -> Iterator[Pair]:
        """Every pair of covered weights whose block is not zero, row before column."""
        names = list(self.shapes)
        for i, b in enumerate(names):
            for c in names[i:]:
                if (b, c) != ("LN2_gamma", "LN2_gamma"):
                    yield b, c

    def terms(self, b: str, c: str) -> tuple[KroneckerSum, ...]:
        """Return one block's Kronecker sums; b stands before c in the order of the parameters."""
        if c == "LN2_gamma":
            return self._with_scale(b, self.at_S, self.rows_2, self.u)
        if c in ("W_1", "W_2"):
            return self._with_feed_forward(b, c)
        if b in ATTENTION_BLOCKS and c in ATTENTION_BLOCKS:
            return self._within_attention(b, c)
        terms = tuple(x.meets(y, self.H_Y) for x in self.at_Y[b] for y in self.at_Y[c])
        if c == "LN1_gamma" and b in ATTENTION_BLOCKS:
            terms += self._with_scale(b, self.at_attention, self.rows_1, self.q)
        return terms

    def _with_scale(
        self, b: str, before: Mapping[str, list[Piece]], rows: NormRows, w: Tensor
    ) -> tuple[KroneckerSum, ...]:
        """The second derivative ⟨w, dγ ∘ dx̂⟩ between a LayerNorm's scale and what moves the LayerNorm's input."""
        one = self.X.new_ones(self.X.shape[0], 1)
        J = w[..., None] * rows.jacobian
        return tuple(KroneckerSum(x.vector, one, (J @ x.matrix).mT, x.swap) for x in before[b])

    def _with_feed_forward(self, b: str, c: str) -> tuple[KroneckerSum, ...]:
        W_1, W_2 = self.W["W_1"], self.W["W_2"]
        if b in ("W_1", "W_2"):
            return feed_forward_terms(self.Y, self.ff, W_1, W_2, self.N, self.G)[b, c]
        terms = tuple(x.meets(y, self.N) for x in self.at_S[b] for y in self.at_S[c])
        # dW_1 meets dY through D W_2 G, dW_2 meets dh = D W_1ᵀ dY through G.
        gradient = _times(self.J_h, self.G) if c == "W_1" else self.G
        bend = self.identity if c == "W_1" else self.ff.D[..., None] * W_1.mT
        bent = tuple(KroneckerSum(x.vector, gradient, (bend @ x.matrix).mT, x.swap, True) for x in self.at_Y[b])
        return terms + bent

    def _within_attention(self, b: str, c: str) -> tuple[KroneckerSum, ...]:
        """First derivatives through E, the logits' third moment, and the mixed second derivatives."""
        terms = []
        for x in self.at_attention[b]:
            for y in self.at_attention[c]:
                term = x.meets(y, self.E)
                if x.tilt is not None and y.tilt is not None:
                    third = x.tilt.mT @ self.M_3 @ y.tilt
                    term = KroneckerSum(term.X, term.Z, term.N + third, term.swap_rows, term.swap_columns)
                terms.append(term)
        mixed = self._mixed(b, c)
        if b == c:
            mixed = mixed + [term.mT for term in mixed]
        return tuple(terms + mixed)

    def _mixed(self, b: str, c: str) -> list[KroneckerSum]:
        """Second derivatives of F W_O that are bilinear in dW_b and dW_c; for b = c, half of them.

        With ds = Σ tilts, d²s = 2τ(dW_K dW_Qᵀ x + dW_K W_Qᵀ dx + W_K dW_Qᵀ dx): B·d²s, 2 ds·Σ S̄ dx_l and
        2 Σ a (dt − E dt)⟨v, dx_l⟩ in the embedding; dW_V and dW_O against d mu.
        """
        W, tau = self.W, self.tau
        ones = self.X.new_ones(self.X.shape[0], max(self.a.d_V, self.a.head_d_K))
        eye_V, eye_K = ones[:, : self.a.d_V], ones[:, : self.a.head_d_K]
        found: list[KroneckerSum] = []
        if (b, c) == ("W_Q", "W_K"):
            found.append(KroneckerSum(self.X, tau * self.B, eye_K, diagonal=True))
        if (b, c) == ("embed", "W_K"):
            found.append(KroneckerSum(self.P, self.B, self.constant(tau * W["W_Q"])))
            found.append(KroneckerSum(self.B_P, tau * self.z, eye_V, False, True, diagonal=True))
        if (b, c) == ("embed", "W_Q"):
            found.append(KroneckerSum(self.P, tau * self.B @ W["W_K"], eye_V, False, True, diagonal=True))
            found.append(KroneckerSum(self.B_P, self.X, self.constant(tau * W["W_K"])))
        if (b, c) == ("embed", "embed"):
            found.append(KroneckerSum(self.B_P, self.P, self.constant(tau * W["W_K"] @ W["W_Q"].mT)))
        if b == "embed" and c in self.tilts:
            C_P = self.C[:, self.a.d_V :]
            found += [KroneckerSum(self.v, x, C_P @ tilt, True, swap) for x, tilt, swap in self.tilts[c]]
        if c == "W_V" and b in self.tilts:
            found += [KroneckerSum(x, self.p_F, (self.C_x @ tilt).mT, swap, True) for x, tilt, swap in self.tilts[b]]
            if b == "embed":
                found.append(KroneckerSum(self.P_mean, self.p_F, eye_V, False, True, diagonal=True))
        if c == "W_O" and b in self.tilts:
            V = W["W_V"].mT
            found += [KroneckerSum(x, self.p, (V @ self.C_x @ tilt).mT, swap, True) for x, tilt, swap in self.tilts[b]]
            if b == "embed":
                found.append(KroneckerSum(self.P_mean, self.p, self.constant(W["W_V"]), False, True))
        if (b, c) == ("W_V", "W_O"):
            found.append(KroneckerSum(self.mu, self.p, eye_V, False, True, diagonal=True))
        return found

    def hessian(self) -> KroneckerHessian:
        """All pairs at once: for small cases."""
        return KroneckerHessian(self.shapes, {pair: self.terms(*pair) for pair in self.pairs()})


def _times(J: Float[Tensor, "N m n"], w: Float[Tensor, "N n"]) -> Float[Tensor, "N m"]:
    """Matrix times vector, token by token."""
    return (J @ w[..., None])[..., 0]


@dataclass(frozen=True)
class ExactPart:
    """The Hessian's part that pooled-feature Jacobians give exactly, by weight.

    `gauss_newton[w]` has shape (batch·classes, size of w): the Gauss–Newton block of (w, w') is their product.
    `with_classifier[w]` = Σ_b J_bᵀ ⊗ r_b, shape (size of w, size of the classifier): the rest of block (w, classifier).
    """

    gauss_newton: dict[str, Tensor]
    with_classifier: dict[str, Tensor]

    def block(self, b: str, c: str) -> Tensor:
        """Return the exact part of one block; the whole block where c is the classifier or b or c is LN2_beta."""
        block = self.gauss_newton[b].mT @ self.gauss_newton[c]
        return block + self.with_classifier[b] if c == "classifier" and b != c else block

    def norm(self) -> Float[Tensor, ""]:
        """Return the exact norm of this part as a whole.

        It is F D Fᵀ with F = (Gauss–Newton factorᵀ, unit vectors of the classifier, Σ J_bᵀ ⊗ r_b) and D the identity
        beside an exchange of the last two; with a root R of FᵀF its nonzero eigenvalues are those of R D R.
        """
        names = list(self.gauss_newton)
        M = torch.cat([self.gauss_newton[name] for name in names], dim=-1)
        k = self.gauss_newton["classifier"].shape[1]
        C = torch.cat([self.with_classifier.get(name, M.new_zeros(k, k)) for name in names])
        unit = M.new_zeros(M.shape[1], k)
        at = sum(self.gauss_newton[name].shape[1] for name in names[: names.index("classifier")])
        unit[at : at + k] = torch.eye(k, dtype=M.dtype, device=M.device)
        F = torch.cat([M.mT, unit, C], dim=-1)
        w, S = torch.linalg.eigh(F.mT @ F)
        root = S * w.clamp_min(0).sqrt() @ S.mT
        D = torch.eye(F.shape[1], dtype=M.dtype, device=M.device)
        last = slice(M.shape[0], None)
        D[last, last] = D[last, last].roll(k, dims=0)
        return torch.linalg.eigvalsh(root @ D @ root).abs().max()


def feature_jacobians(curvature: TokenCurvature, batch: int) -> dict[str, Float[Tensor, "b d n"]]:
    """Return ∂(pooled features of each sample)/∂w for every weight but the classifier: Σ over tokens of the pieces."""
    a, T = curvature.a, curvature
    J = T.W["LN2_gamma"][:, None] * T.rows_2.jacobian / a.n_tokens
    pieces = {name: [piece.through(J) for piece in found] for name, found in T.at_S.items()}
    one = T.X.new_ones(T.X.shape[0], 1)
    pieces["LN2_gamma"] = [Piece(one, torch.diag_embed(T.rows_2.normalised) / a.n_tokens)]
    pieces["LN2_beta"] = [Piece(one, T.constant(T.identity) / a.n_tokens)]

    def summed(piece: Piece) -> Tensor:
        vector, matrix = piece.vector.unflatten(0, (batch, -1)), piece.matrix.unflatten(0, (batch, -1))
        return torch.einsum(f"bld,blmq->bm{'qd' if piece.swap else 'dq'}", vector, matrix).flatten(-2)

    order = [name for name in parameter_shapes(a) if name != "classifier"]
    return {name: torch.stack([summed(piece) for piece in pieces[name]]).sum(0) for name in order}


def exact_part(curvature: TokenCurvature, logits: Float[Tensor, "b c"], residual: Float[Tensor, "b c"]) -> ExactPart:
    """Return the Gauss–Newton factors and the classifier's blocks. With π the softmax, diag π − ππᵀ = G Gᵀ for
    G = diag(√π) − π √πᵀ. Source: GN1.
    """
    b = logits.shape[0]
    T = curvature
    features = (T.W["LN2_gamma"] * T.rows_2.normalised + T.W["LN2_beta"]).unflatten(0, (b, -1)).mean(dim=1)
    probability = logits.softmax(dim=-1)
    root = probability.sqrt()
    G = torch.diag_embed(root) - probability[:, :, None] * root[:, None, :]
    J = feature_jacobians(T, b)
    scale = b**-0.5
    factor = scale * G.mT @ T.W["classifier"].mT
    gauss_newton = {name: (factor @ J_w).flatten(0, 1) for name, J_w in J.items()}
    own = torch.einsum("bok,bd->bkdo", G, features).flatten(-2)
    gauss_newton["classifier"] = scale * own.flatten(0, 1)
    with_classifier = {name: torch.einsum("bdn,bo->ndo", J_w, residual).flatten(-2) for name, J_w in J.items()}
    return ExactPart(gauss_newton, with_classifier)


@dataclass(frozen=True)
class ModelBounds:
    """Upper bounds on the spectral norms of every block pair (row before column) and of the whole Hessian.

    `gauss_newton` is the exact norm of the exact part, `functional` the bound on the rest; `total` is the lesser of
    their sum and of the norm of the matrix of block bounds.
    """

    blocks: dict[Pair, float]
    gauss_newton: float
    functional: float
    total: float


def model_bounds(
    parameters: Mapping[str, Tensor],
    images: Float[Tensor, "b c s s"],
    labels: Int[Tensor, " b"],
    architecture: Architecture,
) -> ModelBounds:
    """Bound the Hessian of the mean cross-entropy of `vit_logits` in all its parameters, block by block and in total.

    Works in float64 whatever comes in, pair by pair: no more than one pair's token matrices are held, and nothing of
    the size of the Hessian. Cost: linear in the tokens, d_V³ a token and pair.

    Raises:
        ValueError: If the architecture is not one post-norm block with one head, ReLU, no biases, fixed positions.

    Source: T6, GN1, TXT-1.
    """
    check_architecture(architecture)
    W = {name: p.detach().double() for name, p in parameters.items()}
    images = images.double()
    logits = vit_logits(W, images, architecture)
    one_hot = torch.nn.functional.one_hot(labels, architecture.classes)
    residual = (logits.softmax(dim=-1) - one_hot) / images.shape[0]
    curvature = TokenCurvature(W, images, residual, architecture)
    exact = exact_part(curvature, logits, residual)
    functional = {}
    for pair in curvature.pairs():
        one = KroneckerHessian(curvature.shapes, {pair: curvature.terms(*pair)})
        functional[pair] = float(one.term_bound(pair))
    names = list(parameter_shapes(architecture))
    blocks = {
        (b, c): float(top_norm(exact.block(b, c))) + functional.get((b, c), 0.0)
        for i, b in enumerate(names)
        for c in names[i:]
    }
    rest = float(_norm(curvature.shapes, functional))
    whole = float(exact.norm())
    return ModelBounds(blocks, whole, rest, min(whole + rest, float(_norm(names, blocks))))


def _norm(names: Iterable[str], norms: Mapping[Pair, float]) -> Tensor:
    return norm_of_norms(names, {pair: torch.tensor(value, dtype=torch.float64) for pair, value in norms.items()})
