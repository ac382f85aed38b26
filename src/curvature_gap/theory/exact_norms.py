"""Exact derivatives of softmax, LayerNorm, attention and the block, batched, small and differentiable.

The adversarial search climbs on exact / bound, so the exact side must be cheap for many small instances at once and
must itself have gradients. Every tensor here is assembled from a closed form; `bound_search` compares each with nested
automatic differentiation of the forward maps at the witness it reports.

Inputs are mappings of batched tensors, batch axis first: `X` (L, d_V), `W_Q`, `W_K` (d_V, d_K), `W_V` (d_V, d_V),
`W_1` (d_V, d_ff), `W_2` (d_ff, d_V) and `residual` = F − Target or Z − Target (L, d_V). Derivative tensors carry the
axes (token, feature, parameters...), parameters raveled row-major. The matrix of the paper's `∂²N/∂W_i∂W_j` has rows
(token, feature, W_i) and columns W_j; `unfolding_norm` is its spectral norm.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from curvature_gap.maps import layer_norm
from curvature_gap.shapes import Float

Inputs = Mapping[str, Tensor]
ATTENTION_WEIGHTS = ("K", "Q", "V")
BLOCK_WEIGHTS = ("1", "2", "K", "Q", "V")
ORDER = ("V", "Q", "K")
"""Pairs of attention weights whose second derivative is assembled; the others are transposes."""


class TopSingularValue(torch.autograd.Function):
    """The largest singular value of each matrix of a batch, through the smaller Gram matrix; its slope is u vᵀ."""

    @staticmethod
    def forward(ctx: Any, M: Tensor) -> Tensor:
        wide = M.shape[-2] <= M.shape[-1]
        gram = M @ M.mT if wide else M.mT @ M
        if not ctx.needs_input_grad[0]:
            return torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0).sqrt()
        values, vectors = torch.linalg.eigh(gram)
        norm = values[..., -1].clamp_min(0).sqrt()
        ctx.wide = wide
        ctx.save_for_backward(M, norm, vectors[..., -1:])
        return norm

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        M, norm, near = ctx.saved_tensors
        # A zero matrix has the slope zero, one of its subgradients.
        slope = torch.where(norm > 0, slope / torch.where(norm > 0, norm, 1), 0)[..., None, None] * near
        return slope @ (near.mT @ M) if ctx.wide else M @ near @ slope.mT


def spectral_norm(M: Float[Tensor, "... m n"]) -> Float[Tensor, "..."]:
    """Return the largest singular value; zero matrices have gradient zero."""
    return TopSingularValue.apply(M)


def frobenius_norm(M: Float[Tensor, "... m n"]) -> Float[Tensor, "..."]:
    """Return the root of the sum of squares."""
    return torch.linalg.vector_norm(M, dim=(-2, -1))


def unfolding_norm(tensor: Float[Tensor, "b *axes n"]) -> Float[Tensor, " b"]:
    """Return the spectral norm of the matrix whose columns are the last axis and whose rows are all others."""
    return spectral_norm(tensor.flatten(1, -2))


def softmax_jacobian(A: Float[Tensor, "... L"]) -> Float[Tensor, "... L L"]:
    """Return diag(a) − a aᵀ for every row a of A. Source: G."""
    return torch.diag_embed(A) - A[..., :, None] * A[..., None, :]


def softmax_second_derivative(A: Float[Tensor, "... L"]) -> Float[Tensor, "... L L L"]:
    """Return ∂²a_j/∂t_l∂t_m = a_j ((δ_jl − a_l)(δ_jm − a_m) − J_lm) for every row, axes (j, l, m). Source: SM."""
    centred = torch.eye(A.shape[-1], dtype=A.dtype) - A[..., None, :]
    return A[..., :, None, None] * (
        centred[..., :, :, None] * centred[..., :, None, :] - softmax_jacobian(A)[..., None, :, :]
    )


def layer_norm_parts(X: Float[Tensor, "b L d"]) -> tuple[Tensor, Tensor, Tensor]:
    """Return y = LN(x), the row standard deviation s, and P = I − 11ᵀ/d − y yᵀ/d, for every row x of X."""
    d = X.shape[-1]
    M = X - X.mean(dim=-1, keepdim=True)
    s = torch.linalg.vector_norm(M, dim=-1) / d**0.5
    Y = M / s[..., None]
    C = torch.eye(d, dtype=X.dtype) - 1 / d
    return Y, s, C - Y[..., :, None] * Y[..., None, :] / d


def layer_norm_jacobian_blocks(X: Float[Tensor, "b L d"]) -> Float[Tensor, "b L d d"]:
    """Return the diagonal blocks P_i / s_i of the LayerNorm Jacobian. Source: T2."""
    _, s, P = layer_norm_parts(X)
    return P / s[..., None, None]


def layer_norm_hessian_blocks(X: Float[Tensor, "b L d"]) -> Float[Tensor, "b L d d d"]:
    """Return D²LN(x)[h, k] = −((y·h) P k + (y·k) P h + (h·P k) y)/(d s²), axes (output, h, k). Source: T3."""
    Y, s, P = layer_norm_parts(X)
    symmetric = (
        P[..., :, None, :] * Y[..., None, :, None]
        + P[..., :, :, None] * Y[..., None, None, :]
        + P[..., None, :, :] * Y[..., :, None, None]
    )
    return -symmetric / (X.shape[-1] * s.square())[..., None, None, None]


class AttentionDerivatives:
    """First and second derivatives of one attention head F = A X W_V, each computed when first asked for.

    Attributes: `A` (b, L, L); `F` (b, L, d); `C` (b, L, d, d), C_i the covariance of the tokens under row i of A;
    `M3` (b, L, d, d, d), their third central moment, which is the derivative of C in the logits.

    Source: G, L2, SM.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.X, self.W_Q, self.W_K, self.W_V = (inputs[name] for name in ("X", "W_Q", "W_K", "W_V"))
        self.d_V, self.d_K = self.W_Q.shape[-2:]
        T = self.X @ self.W_Q @ (self.X @ self.W_K).mT / self.d_K**0.5
        self.A = torch.softmax(T, dim=-1)
        self.F = self.A @ self.X @ self.W_V
        self._Phi: dict[tuple[str, str], Tensor] = {}

    @cached_property
    def centred(self) -> Float[Tensor, "b L M d"]:
        """The tokens minus their mean under row i, axes (row i, token, feature)."""
        return self.X[:, None, :, :] - (self.A @ self.X)[:, :, None, :]

    @cached_property
    def C(self) -> Float[Tensor, "b L d d"]:
        return torch.einsum("bil,bilx,bily->bixy", self.A, self.centred, self.centred)

    @cached_property
    def M3(self) -> Float[Tensor, "b L d d d"]:
        return torch.einsum("bil,bilx,bily,bilz->bixyz", self.A, self.centred, self.centred, self.centred)

    @cached_property
    def Z_1(self) -> Float[Tensor, "b L d dd"]:
        """(I_L ⊗ Xᵀ)(∂A/∂T)(X ⊗ X); row block i is x_iᵀ ⊗ C_i. Source: OP."""
        return torch.einsum("bip,bixq->bixpq", self.X, self.C).flatten(-2)

    @cached_property
    def Z_2(self) -> Float[Tensor, "b L d d d dd"]:
        """(I_L ⊗ Xᵀ ⊗ Xᵀ ⊗ Xᵀ)(∂²A/∂T²)(X ⊗ X), axes (token, output, x_i, first, (x_i, second)). Source: FN."""
        return torch.einsum("bip,bir,bixyz->bixpyrz", self.X, self.X, self.M3).flatten(-2)

    @cached_property
    def U(self) -> dict[str, Tensor]:
        """U_Q, U_K of shape (b, L, d_V, n): the logits of row i move by X U_i dW when W_Q or W_K moves by dW."""
        eye = torch.eye(self.d_V, dtype=self.X.dtype)
        scale = self.d_K**-0.5
        return {
            "Q": scale * torch.einsum("bip,baq->biapq", self.X, self.W_K).flatten(-2),
            "K": scale * torch.einsum("ap,biq->biapq", eye, self.X @ self.W_Q).flatten(-2),
        }

    @cached_property
    def G(self) -> dict[str, Tensor]:
        """G_V, G_Q, G_K = ∂F/∂W, shapes (b, L, d_V, n). Source: G."""
        eye = torch.eye(self.d_V, dtype=self.X.dtype)
        G_V = torch.einsum("bip,jq->bijpq", self.A @ self.X, eye).flatten(-2)
        return {"V": G_V, "Q": self.V_C @ self.U["Q"], "K": self.V_C @ self.U["K"]}

    @cached_property
    def V_C(self) -> Float[Tensor, "b L d d"]:
        """W_Vᵀ C_i."""
        return self.W_V.mT[:, None] @ self.C

    @cached_property
    def V_M3(self) -> Float[Tensor, "b L d d d"]:
        """The third moments, their first slot turned by W_V."""
        return (self.W_V.mT[:, None] @ self.M3.flatten(-2)).unflatten(-1, self.M3.shape[-2:])

    def Phi(self, k: str, m: str) -> Float[Tensor, "b L d n m"]:
        """Φ_km = ∂²F/∂W_k∂W_m, without a loss factor; Φ_mk is its transpose in the last two axes. Source: L2."""
        if ORDER.index(k) > ORDER.index(m):
            return self.Phi(m, k).mT
        if (k, m) not in self._Phi:
            self._Phi[k, m] = self._second_derivative(k, m)
        return self._Phi[k, m]

    def _second_derivative(self, k: str, m: str) -> Float[Tensor, "b L d n m"]:
        if k == m == "V":
            n_V = self.d_V**2
            return self.X.new_zeros(*self.X.shape, n_V, n_V)
        if k == "V":
            eye = torch.eye(self.d_V, dtype=self.X.dtype)
            return torch.einsum("bixn,jq->bijxqn", self.C @ self.U[m], eye).flatten(-3, -2)
        Phi = self.U[k].mT[:, :, None] @ self.V_M3 @ self.U[m][:, :, None]
        if k == m:
            return Phi
        # The logits are bilinear in (W_Q, W_K): the mixed derivative adds Xᵀ J_i X dW_K dW_Qᵀ x_i / sqrt(d_K).
        eye_K = torch.eye(self.d_K, dtype=self.X.dtype) * self.d_K**-0.5
        bilinear = torch.einsum("bir,bijp,qs->bijrspq", self.X, self.V_C, eye_K).flatten(-4, -3).flatten(-2)
        return Phi + bilinear

    def weighted(self, k: str, m: str, p: Float[Tensor, "b L d"]) -> Float[Tensor, "b n m"]:
        """Return Σ p_ij Φ_km over tokens i and features j without forming Φ. Source: FN."""
        if ORDER.index(k) > ORDER.index(m):
            return self.weighted(m, k, p).mT
        if k == m == "V":
            return self.X.new_zeros(len(self.X), self.d_V**2, self.d_V**2)
        if k == "V":
            return torch.einsum("bixn,biq->bxqn", self.C @ self.U[m], p).flatten(1, 2)
        v = p @ self.W_V.mT
        third = (self.M3.flatten(-3, -2) @ v[..., None]).unflatten(-2, (self.d_V, self.d_V))[..., 0]
        part = _over_tokens(self.U[k], third @ self.U[m])
        if k == m:
            return part
        cross = self.X.mT @ (self.C @ v[..., None])[..., 0]
        eye_K = torch.eye(self.d_K, dtype=self.X.dtype) * self.d_K**-0.5
        return part + torch.einsum("brp,sq->brspq", cross, eye_K).flatten(-4, -3).flatten(-2)


def _over_tokens(left: Float[Tensor, "b L d n"], right: Float[Tensor, "b L d m"]) -> Float[Tensor, "b n m"]:
    """Return Σ_i left_iᵀ right_i."""
    return left.flatten(1, 2).mT @ right.flatten(1, 2)


def loss_hessian(
    J: Mapping[str, Tensor], weighted: Callable[[str, str, Tensor], Tensor], residual: Float[Tensor, "b L d"]
) -> Float[Tensor, "b n n"]:
    """Return the Hessian of ‖output − Target‖_F²/(L d), 2/(L d) (Σ J Jᵀ + Σ residual ∂² output).

    Args:
        J: The output's Jacobian in each weight, axes (b, L, d, n); their order is the Hessian's.
        weighted: The output's second derivative in two weights, summed over tokens and features with given weights.
        residual: output − Target.

    Source: GN1.
    """
    names = tuple(J)
    functional = {(i, j): weighted(i, j, residual) for a, i in enumerate(names) for j in names[a:]}
    functional |= {(j, i): block.mT for (i, j), block in functional.items()}
    stacked = torch.cat(list(J.values()), dim=-1)
    scale = 2 / (residual.shape[-1] * residual.shape[-2])
    return scale * (_over_tokens(stacked, stacked) + assemble(functional, names))


def assemble(pieces: Mapping[tuple[str, str], Tensor], names: tuple[str, ...]) -> Tensor:
    """Return the tensor whose last two axes run over all weights, in the order of `names`."""
    return torch.cat([torch.cat([pieces[i, j] for j in names], dim=-1) for i in names], dim=-2)


def attention_loss_hessian(
    derivatives: AttentionDerivatives, residual: Float[Tensor, "b L d"]
) -> Float[Tensor, "b n n"]:
    """Return the exact loss Hessian of one attention layer, weights in the order K, Q, V. Source: OP, FN."""
    return loss_hessian({k: derivatives.G[k] for k in ATTENTION_WEIGHTS}, derivatives.weighted, residual)


class BlockDerivatives:
    """First and second derivatives of the block's S and Z, in the letters of T4 to T6 (ReLU, no bias, ε = 0).

    Attributes: `Y`, `S` (b, L, d); `D` = 1_{Y W_1 > 0} and `hidden` = σ(Y W_1) (b, L, d_ff); `J_Y`, `J_SY`, `J_Z`
    (b, L, d, d), row blocks; `H_Y`, `H_Z` (b, L, d, d, d); `attention`, the derivatives of F.

    Source: T4, T5 (with the blocks that T5 leaves out).
    """

    def __init__(self, inputs: Inputs) -> None:
        self.attention = AttentionDerivatives(inputs)
        self.W_1, self.W_2 = inputs["W_1"], inputs["W_2"]
        self.eye = torch.eye(self.W_1.shape[-2], dtype=self.W_1.dtype)
        self.U = inputs["X"] + self.attention.F
        self.Y = layer_norm(self.U)
        self.D = (self.Y @ self.W_1 > 0).to(self.W_1.dtype)
        self.hidden = torch.relu(self.Y @ self.W_1)
        self.S = self.Y + self.hidden @ self.W_2
        self._xi: dict[tuple[str, str], Tensor] = {}
        self._output_hessian: dict[tuple[str, str], Tensor] = {}

    @cached_property
    def J_Y(self) -> Float[Tensor, "b L d d"]:
        return layer_norm_jacobian_blocks(self.U)

    @cached_property
    def H_Y(self) -> Float[Tensor, "b L d d d"]:
        return layer_norm_hessian_blocks(self.U)

    @cached_property
    def J_Z(self) -> Float[Tensor, "b L d d"]:
        return layer_norm_jacobian_blocks(self.S)

    @cached_property
    def H_Z(self) -> Float[Tensor, "b L d d d"]:
        return layer_norm_hessian_blocks(self.S)

    @cached_property
    def J_SY(self) -> Float[Tensor, "b L d d"]:
        """∂S/∂Y = I + W_2ᵀ diag(D_i) W_1ᵀ for every token."""
        return self.eye + (self.W_2.mT[:, None] * self.D[:, :, None, :]) @ self.W_1.mT[:, None]

    @cached_property
    def dY(self) -> dict[str, Tensor]:
        """∂Y/∂W_k = J_Y G_k."""
        return {k: self.J_Y @ self.attention.G[k] for k in ATTENTION_WEIGHTS}

    @cached_property
    def B(self) -> dict[str, Tensor]:
        """B_i = ∂S/∂W_i, shapes (b, L, d, n_i). Source: T4."""
        B_1 = torch.einsum("bfj,bif,bip->bijpf", self.W_2, self.D, self.Y).flatten(-2)
        B_2 = torch.einsum("bif,jq->bijfq", self.hidden, self.eye).flatten(-2)
        return {"1": B_1, "2": B_2} | {k: self.J_SY @ self.dY[k] for k in ATTENTION_WEIGHTS}

    def xi(self, i: str, j: str) -> Float[Tensor, "b L d n m"]:
        """ξ_ij = ∂B_i/∂W_j, that is ∂²S/∂W_i∂W_j; ξ_ji is its transpose in the last two axes. Source: T5."""
        if BLOCK_WEIGHTS.index(i) > BLOCK_WEIGHTS.index(j):
            return self.xi(j, i).mT
        if (i, j) not in self._xi:
            self._xi[i, j] = self._second_derivative_of_S(i, j)
        return self._xi[i, j]

    def _second_derivative_of_S(self, i: str, j: str) -> Float[Tensor, "b L d n m"]:
        if i == j and i in "12":
            n = self.B[i].shape[-1]
            return self.Y.new_zeros(*self.Y.shape, n, n)
        if (i, j) == ("1", "2"):
            eye_ff = torch.eye(self.D.shape[-1], dtype=self.Y.dtype)
            xi = torch.einsum("fg,jq,bif,bip->bijpfgq", eye_ff, self.eye, self.D, self.Y)
            return xi.flatten(-4, -3).flatten(-2)
        if i == "1":
            return torch.einsum("bfj,bif,bipn->bijpfn", self.W_2, self.D, self.dY[j]).flatten(-3, -2)
        if i == "2":
            dU = self.D[..., None] * (self.W_1.mT[:, None] @ self.dY[j])
            return torch.einsum("jq,bifn->bijfqn", self.eye, dU).flatten(-3, -2)
        G, Phi = self.attention.G, self.attention.Phi(i, j)
        d2Y = _bilinear(self.H_Y, G[i], G[j]) + _left(self.J_Y, Phi)
        return _left(self.J_SY, d2Y)

    def output_jacobian(self, i: str) -> Float[Tensor, "b L d n"]:
        """∂Z/∂W_i = J_Z B_i. Source: T4."""
        return self.J_Z @ self.B[i]

    def output_hessian(self, i: str, j: str) -> Float[Tensor, "b L d n m"]:
        """H_tr^(i,j) = (J_Z ⊗ I) ξ_ij + (I ⊗ B_iᵀ) H_Z B_j. Source: T5."""
        if BLOCK_WEIGHTS.index(i) > BLOCK_WEIGHTS.index(j):
            return self.output_hessian(j, i).mT
        if (i, j) not in self._output_hessian:
            curved = _bilinear(self.H_Z, self.B[i], self.B[j])
            flat = i == j and i in "12"
            self._output_hessian[i, j] = curved if flat else curved + _left(self.J_Z, self.xi(i, j))
        return self._output_hessian[i, j]

    def weighted(self, i: str, j: str, r: Float[Tensor, "b L d"]) -> Float[Tensor, "b n m"]:
        """Return Σ r ∂²Z/∂W_i∂W_j over tokens and features, i not after j, without forming the second derivative.

        Z_x curves by H_Z and hands J_Zᵀ r down to S; S hands q = J_SYᵀ J_Zᵀ r to Y and J_Y q to F. Source: T5.
        """
        w = (self.J_Z.mT @ r[..., None])[..., 0]
        curved = _over_tokens(self.B[i], _along(r, self.H_Z) @ self.B[j])
        return curved if i == j and i in "12" else curved + self._weighted_sum(i, j, w)

    def _weighted_sum(self, i: str, j: str, w: Float[Tensor, "b L d"]) -> Float[Tensor, "b n m"]:
        """Return Σ w ξ_ij over tokens and features."""
        if (i, j) == ("1", "2"):
            eye_ff = torch.eye(self.D.shape[-1], dtype=self.Y.dtype)
            mixed = torch.einsum("bip,bif,biq->bpfq", self.Y, self.D, w)
            return torch.einsum("bpfq,fg->bpfgq", mixed, eye_ff).flatten(-4, -3).flatten(-2)
        if i == "1":
            return torch.einsum("bif,bipn->bpfn", self.D * (w @ self.W_2.mT), self.dY[j]).flatten(1, 2)
        if i == "2":
            dU = self.D[..., None] * (self.W_1.mT[:, None] @ self.dY[j])
            return torch.einsum("biq,bifn->bfqn", w, dU).flatten(1, 2)
        q = (self.J_SY.mT @ w[..., None])[..., 0]
        G = self.attention.G
        curved = _over_tokens(G[i], _along(q, self.H_Y) @ G[j])
        return curved + self.attention.weighted(i, j, (self.J_Y.mT @ q[..., None])[..., 0])


def _along(r: Float[Tensor, "b L d"], H: Float[Tensor, "b L d d d"]) -> Float[Tensor, "b L d d"]:
    """Return Σ_x r_x H_x for every token."""
    return (r[..., None, :] @ H.flatten(-2)).unflatten(-1, H.shape[-2:])[..., 0, :, :]


def _bilinear(H: Float[Tensor, "b L d d d"], left: Float[Tensor, "b L d n"], right: Float[Tensor, "b L d m"]) -> Tensor:
    """Return leftᵀ H_x right for every output x, shape (b, L, d, n, m)."""
    return left.mT[:, :, None] @ H @ right[:, :, None]


def _left(J: Float[Tensor, "b L d d"], tensor: Float[Tensor, "b L d n m"]) -> Float[Tensor, "b L d n m"]:
    """Return J applied to the output axis."""
    return (J @ tensor.flatten(-2)).unflatten(-1, tensor.shape[-2:])


def block_loss_hessian(derivatives: BlockDerivatives, residual: Float[Tensor, "b L d"]) -> Float[Tensor, "b n n"]:
    """Return the exact loss Hessian of the block, weights in the order 1, 2, K, Q, V. Source: GN2."""
    J = {i: derivatives.output_jacobian(i) for i in BLOCK_WEIGHTS}
    return loss_hessian(J, derivatives.weighted, residual)


def row_blocks_norm(blocks: Float[Tensor, "b L m n"]) -> Float[Tensor, " b"]:
    """Return the spectral norm of the block-diagonal matrix with these blocks: the largest block norm. Source: P11."""
    return spectral_norm(blocks).amax(dim=-1)
