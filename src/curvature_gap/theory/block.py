"""The post-norm transformer block: Jacobians in its five weights, all 25 second-derivative blocks, the paper's ξ.

Y = LN(X + F(X)), S = FFN(Y) + Y, Z = LN(S). Weights are named "W_Q", "W_K", "W_V", "W_1", "W_2".
"""

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from curvature_gap.maps import attention, layer_norm
from curvature_gap.matrix_calculus import (
    add,
    eye,
    kron,
    multiply,
    rows_chain_hessian,
    transpose_hessian,
)
from curvature_gap.shapes import Float
from curvature_gap.theory.attention import attention_hessian, attention_jacobian
from curvature_gap.theory.feed_forward import (
    Activation,
    D_sigma,
    I_kron_W_2T_jacobian,
    Y_kron_I_jacobian,
    activation_derivatives,
    feed_forward_hessian,
    feed_forward_jacobian,
    relu_jacobian,
)
from curvature_gap.theory.layer_norm import (
    check_rows_vary,
    layer_norm_hessian,
    layer_norm_jacobian,
    layer_norm_row_hessians,
    layer_norm_row_jacobians,
)

ATTENTION_WEIGHTS = ("W_Q", "W_K", "W_V")
FEED_FORWARD_WEIGHTS = ("W_1", "W_2")
WEIGHTS = ATTENTION_WEIGHTS + FEED_FORWARD_WEIGHTS


class Block:
    """The block at one point: every piece of T4 and T5, computed when first asked for.

    Args:
        X: Tokens, one per row.
        weights: W_Q, W_K, W_V, W_1, W_2 and, where used, b_1, b_2, LN1_gamma, LN1_beta, LN2_gamma, LN2_beta.
        activation: A name of `feed_forward.ACTIVATIONS`, or an `Activation`.
        eps: Added to the variances of both LayerNorms.

    Raises:
        ValueError: If a weight is missing or the activation unknown; on use, if an LN input has a constant row and
            eps is zero.

    Source: T4_main, T5_boxed, A2.
    """

    def __init__(
        self,
        X: Float[Tensor, "L d_V"],
        weights: Mapping[str, Tensor],
        activation: str | Activation = "relu",
        eps: float = 0.0,
    ) -> None:
        missing = [name for name in WEIGHTS if name not in weights]
        if missing:
            raise ValueError(f"The block needs the weights {', '.join(WEIGHTS)}; {', '.join(missing)} is missing.")
        self.X, self.weights, self.eps = X, dict(weights), eps
        self.activation = activation_derivatives(activation)

    @property
    def _attention(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        w = self.weights
        return self.X, w["W_Q"], w["W_K"], w["W_V"]

    @cached_property
    def S_0(self) -> Tensor:
        """X + F(X), the first LN's input."""
        return self.X + attention(*self._attention)

    @cached_property
    def Y(self) -> Tensor:
        check_rows_vary(self.S_0, self.eps)
        return layer_norm(self.S_0, self.weights.get("LN1_gamma"), self.weights.get("LN1_beta"), self.eps)

    @cached_property
    def U(self) -> Tensor:
        """Y W_1 + b_1."""
        w = self.weights
        return self.Y @ w["W_1"] if "b_1" not in w else self.Y @ w["W_1"] + w["b_1"]

    @cached_property
    def S(self) -> Tensor:
        """Y + FFN(Y), the second LN's input."""
        w = self.weights
        out = self.activation.value(self.U) @ w["W_2"]
        return self.Y + (out if "b_2" not in w else out + w["b_2"])

    @cached_property
    def Z(self) -> Tensor:
        check_rows_vary(self.S, self.eps)
        return layer_norm(self.S, self.weights.get("LN2_gamma"), self.weights.get("LN2_beta"), self.eps)

    @cached_property
    def J_Y(self) -> Tensor:
        """∂Y/∂(X + F)."""
        return layer_norm_jacobian(self.S_0, self.weights.get("LN1_gamma"), self.eps)

    @cached_property
    def H_Y(self) -> Tensor:
        return layer_norm_hessian(self.S_0, self.weights.get("LN1_gamma"), self.eps)

    @cached_property
    def J_Z(self) -> Tensor:
        """∂Z/∂S."""
        return layer_norm_jacobian(self.S, self.weights.get("LN2_gamma"), self.eps)

    @cached_property
    def H_Z(self) -> Tensor:
        return layer_norm_hessian(self.S, self.weights.get("LN2_gamma"), self.eps)

    @cached_property
    def J_SY(self) -> Tensor:
        """∂S/∂Y = (I_L ⊗ W_2ᵀ) D_σ (I_L ⊗ W_1ᵀ) + I."""
        J = self._ffn_jacobian("Y")
        return J + torch.eye(J.shape[0], dtype=J.dtype)

    def _ffn_jacobian(self, name: str) -> Tensor:
        w = self.weights
        return feed_forward_jacobian(self.Y, w["W_1"], w["W_2"], name, w.get("b_1"), self.activation)

    def _ffn_hessian(self, first: str, second: str) -> Tensor:
        w = self.weights
        return feed_forward_hessian(self.Y, w["W_1"], w["W_2"], first, second, w.get("b_1"), self.activation)

    # LayerNorm and the feed-forward layer act on each token alone: their derivatives, token by token.

    @cached_property
    def _first_norm_rows(self) -> tuple[Tensor, Tensor]:
        arguments = self.S_0, self.weights.get("LN1_gamma"), self.eps
        return layer_norm_row_jacobians(*arguments), layer_norm_row_hessians(*arguments)

    @cached_property
    def _second_norm_rows(self) -> tuple[Tensor, Tensor]:
        arguments = self.S, self.weights.get("LN2_gamma"), self.eps
        return layer_norm_row_jacobians(*arguments), layer_norm_row_hessians(*arguments)

    @cached_property
    def _feed_forward_rows(self) -> tuple[Tensor, Tensor]:
        W_1, W_2 = self.weights["W_1"], self.weights["W_2"]
        J = torch.einsum("if,fo,af->ioa", self.activation.first(self.U), W_2, W_1)
        H = torch.einsum("if,fo,af,bf->ioab", self.activation.second(self.U), W_2, W_1, W_1)
        return J + torch.eye(J.shape[1], dtype=J.dtype), H

    def G(self, name: str) -> Tensor:
        """Return ∂F/∂W for an attention weight. Source: G_V, G_Q, G_K."""
        return attention_jacobian(*self._attention, name)

    def Phi(self, first: str, second: str) -> Tensor:
        """Return ∂²F/∂W_i∂W_j for attention weights. Source: L2_VV, L2_QQ, L2_VQ, L2_QK."""
        return attention_hessian(*self._attention, first, second)

    def dY(self, name: str) -> Tensor:
        """Return ∂Y/∂W = J_Y G for an attention weight. Source: T4_appendix."""
        return self.J_Y @ self.G(name)

    def B(self, name: str) -> Tensor:
        """Return B = ∂S/∂W: of the feed-forward layer in W_1, W_2, and J_SY J_Y G in W_Q, W_K, W_V. Source: T4_main.

        Raises:
            ValueError: If the name is none of the five weights.
        """
        _check_names(name)
        return self._ffn_jacobian(name) if name in FEED_FORWARD_WEIGHTS else self.J_SY @ self.dY(name)

    def xi(self, first: str, second: str) -> Tensor:
        """Return ξ_ij = ∂B_i/∂W_j for any of the 25 pairs and any activation.

        ξ_ij is the second derivative of FFN for two feed-forward weights. For one attention weight k it is the
        feed-forward's second derivative in (W_i, Y), times ∂Y/∂W_k. For two,
        ξ_kl = (I ⊗ Y_kᵀ) (∂J_SY/∂Y) Y_l + (J_SY ⊗ I)[(I ⊗ G_kᵀ) H_Y G_l + (J_Y ⊗ I) Φ_kl], Y_k = J_Y G_k;
        the first term vanishes for ReLU, and the paper has the rest.

        Raises:
            ValueError: If a name is none of the five weights.

        Source: T5_xi_11, T5_xi_22, T5_xi_12, T5_xi_21, T5_xi_1k, T5_xi_2k, T5_xi_kl (corrected), T5_supplied.
        """
        _check_names(first, second)
        if first in FEED_FORWARD_WEIGHTS and second in FEED_FORWARD_WEIGHTS:
            return self._ffn_hessian(first, second)
        if first in FEED_FORWARD_WEIGHTS:
            return self._ffn_hessian(first, "Y") @ self.dY(second)
        if second in FEED_FORWARD_WEIGHTS:
            return transpose_hessian(self.xi(second, first), self.weights[second].numel())
        J_Y, H_Y = self._first_norm_rows
        Y_kl = rows_chain_hessian(J_Y, H_Y, self.G(first), self.G(second), self.Phi(first, second))
        J_SY, H_SY = self._feed_forward_rows
        return rows_chain_hessian(J_SY, H_SY, self.dY(first), self.dY(second), Y_kl)

    def jacobian(self, name: str) -> Tensor:
        """Return ∂Z/∂W = J_Z B. Source: T4_main."""
        return self.J_Z @ self.B(name)

    def hessian(self, first: str, second: str) -> Tensor:
        """Return ∂²Z/∂W_i∂W_j = (J_Z ⊗ I) ξ_ij + (I ⊗ B_iᵀ) H_Z B_j. Source: T5_boxed."""
        J_Z, H_Z = self._second_norm_rows
        return rows_chain_hessian(J_Z, H_Z, self.B(first), self.B(second), self.xi(first, second))


def _check_names(*names: str) -> None:
    for name in names:
        if name not in WEIGHTS:
            raise ValueError(f"The block's weights are {', '.join(WEIGHTS)}, got {name!r}.")


def block_jacobian(
    X: Float[Tensor, "L d_V"],
    weights: Mapping[str, Tensor],
    name: str,
    activation: str | Activation = "relu",
    eps: float = 0.0,
) -> Float[Tensor, "outputs size"]:
    """Return ∂Z/∂W, see `Block`. Source: T4_main."""
    return Block(X, weights, activation, eps).jacobian(name)


def block_hessian(
    X: Float[Tensor, "L d_V"],
    weights: Mapping[str, Tensor],
    first: str,
    second: str,
    activation: str | Activation = "relu",
    eps: float = 0.0,
) -> Float[Tensor, "outputs_times_p q"]:
    """Return ∂²Z/∂W_i∂W_j, see `Block`. Source: T5_boxed."""
    return Block(X, weights, activation, eps).hessian(first, second)


# --- The paper's formulas (ReLU, no bias, LN scale 1, ε = 0) -----------------------------------


def B_1_as_printed(indicator: Tensor, Y: Tensor, W_2: Tensor) -> Tensor:
    """Return (I_L ⊗ W_2ᵀ) diag(vec_r 1_{indicator > 0}) (Y ⊗ I_{d_ff}).

    T5 prints 1_{Y W_1 > 0}, which holds. The appendix's T4 prints 1_{X > 0} with X ∈ R^{L × d_V} the block's input:
    L d_V entries where L d_ff are needed, and the wrong mask where the two sizes agree.

    Raises:
        ShapeMismatchError: If the mask does not have L d_ff entries.

    Source: T4_appendix.
    """
    L, d_ff = Y.shape[0], W_2.shape[0]
    return multiply(kron(eye(L), W_2.T), relu_jacobian(indicator), kron(Y, eye(d_ff)))


def J_SY_as_printed(indicator: Tensor, W_1: Tensor, W_2: Tensor) -> Tensor:
    """Return (I_L ⊗ W_2ᵀ) diag(vec_r 1_{indicator > 0}) (I_L ⊗ W_1ᵀ) + I. As `B_1_as_printed`. Source: T4_appendix."""
    L, d_V = indicator.shape[0], W_1.shape[0]
    return add(multiply(kron(eye(L), W_2.T), relu_jacobian(indicator), kron(eye(L), W_1.T)), eye(L * d_V))


def block_jacobian_as_printed(block: Block, name: str, indicator: Tensor) -> Tensor:
    """Return the appendix's ∂Z/∂W_i with the given mask argument: X to the letter, Y W_1 for what is meant.

    ∂F/∂W_k is the true one here; the printed ones are checked under G_V, G_Q, G_K.

    Source: T4_appendix.
    """
    w = block.weights
    if name == "W_1":
        return multiply(block.J_Z, B_1_as_printed(indicator, block.Y, w["W_2"]))
    if name == "W_2":
        return multiply(block.J_Z, kron(feed_forward_hidden(block), eye(w["W_2"].shape[1])))
    return multiply(block.J_Z, J_SY_as_printed(indicator, w["W_1"], w["W_2"]), block.J_Y, block.G(name))


def feed_forward_hidden(block: Block) -> Tensor:
    """Return σ(Y W_1), no bias."""
    return block.activation.value(block.Y @ block.weights["W_1"])


def xi_12_as_printed(block: Block) -> Tensor:
    """Return the paper's ξ_12 = (I_L ⊗ K_{d_V,d_ff} ⊗ I_{d_V})(I_{L d_ff} ⊗ vec_r I_{d_V}) D_σ (Y ⊗ I_{d_ff}).

    Wrong as ξ_12 = ∂B_1/∂W_2: the proof differentiates B_2 = σ(Y W_1) ⊗ I in W_1, so this is ξ_21. The two have one
    size, n_1 = n_2, which hides the slip; they differ by the exchange of the two weights' indices. See
    `xi_12_corrected`.

    Source: T5_xi_12.
    """
    d_ff, d_V = block.weights["W_2"].shape
    hidden = feed_forward_hidden(block)
    return Y_kron_I_jacobian(hidden, d_V) @ D_sigma(block.Y, block.weights["W_1"]) @ kron(block.Y, eye(d_ff))


def xi_12_corrected(block: Block) -> Tensor:
    """Return ξ_12 = ∂B_1/∂W_2 = (I_{L d_V} ⊗ (Y ⊗ I_{d_ff})ᵀ D_σ) ∂(I_L ⊗ W_2ᵀ)/∂W_2.

    PR3 on B_1 = (I_L ⊗ W_2ᵀ)(D_σ (Y ⊗ I)), whose second factor does not depend on W_2. ReLU only.

    Source: T5_xi_12 (corrected).
    """
    w, L = block.weights, block.Y.shape[0]
    d_ff, d_V = w["W_2"].shape
    right = D_sigma(block.Y, w["W_1"]) @ kron(block.Y, eye(d_ff))
    return kron(eye(L * d_V), right.T) @ I_kron_W_2T_jacobian(w["W_2"], L)


def xi_21_as_printed(block: Block) -> Tensor:
    """Return the paper's ξ_21 = (I_L ⊗ W_2ᵀ) D_σ (I_L ⊗ K_{d_ff,d_V} ⊗ I_{d_ff})(I_{L d_V} ⊗ vec_r I_{d_ff}).

    Wrong: D_σ has L d_ff columns and the next factor L d_V d_ff² rows, so no sizes but d_V d_ff = 1 fit. The proof
    derives ∂B_1/∂W_2 (which is ξ_12) and, when collecting, replaces its factors by those of ∂(Y ⊗ I_{d_ff})/∂Y.

    Raises:
        ShapeMismatchError: Always, unless d_V = d_ff = 1.

    Source: T5_xi_21.
    """
    W_2, Y = block.weights["W_2"], block.Y
    return multiply(kron(eye(Y.shape[0]), W_2.T), D_sigma(Y, block.weights["W_1"]), Y_kron_I_jacobian(Y, W_2.shape[0]))


def xi_21_corrected(block: Block) -> Tensor:
    """Return ξ_21 = ∂B_2/∂W_1, the expression the paper prints under the name ξ_12. Source: T5_xi_21 (corrected)."""
    return xi_12_as_printed(block)


def xi_1k_as_printed(block: Block, name: str) -> Tensor:
    """Return the paper's ((I_L ⊗ W_2ᵀ) D_σ ⊗ I_{n_k})(I_L ⊗ K_{d_ff,d_V} ⊗ I_{d_ff})(I ⊗ vec_r I_{d_ff}) J_Y G_k.

    Wrong: PR3 on B_1 = ((I ⊗ W_2ᵀ) D_σ)(Y ⊗ I_{d_ff}) gives ⊗ I_q with q = n_1 = d_V d_ff, the columns of B_1, where
    the paper has n_k. It fits where n_k = n_1: for V where d_V = d_ff, for Q and K where d_K = d_ff.

    Raises:
        ShapeMismatchError: Wherever n_k ≠ n_1.

    Source: T5_xi_1k.
    """
    return _xi_1k(block, name, block.weights[name].numel())


def xi_1k_corrected(block: Block, name: str) -> Tensor:
    """Return ξ_1k as printed with I_{n_1} in place of I_{n_k}. Source: T5_xi_1k (corrected)."""
    return _xi_1k(block, name, block.weights["W_1"].numel())


def _xi_1k(block: Block, name: str, n: int) -> Tensor:
    W_2, Y = block.weights["W_2"], block.Y
    left = kron(eye(Y.shape[0]), W_2.T) @ D_sigma(Y, block.weights["W_1"])
    return multiply(kron(left, eye(n)), Y_kron_I_jacobian(Y, W_2.shape[0]), block.dY(name))


def xi_2k_as_printed(block: Block, name: str) -> Tensor:
    """Return the paper's ξ_2k = (I_L ⊗ K_{d_V,d_ff} ⊗ I_{d_V})(I ⊗ vec_r I_{d_V}) D_σ (I_L ⊗ W_1ᵀ) J_Y G_k. It holds.

    Source: T5_xi_2k.
    """
    W_1, Y = block.weights["W_1"], block.Y
    left = Y_kron_I_jacobian(feed_forward_hidden(block), block.weights["W_2"].shape[1])
    return multiply(left, D_sigma(Y, W_1), kron(eye(Y.shape[0]), W_1.T), block.dY(name))


def xi_kl_as_printed(block: Block, first: str, second: str, Phi: Tensor) -> Tensor:
    """Return the paper's ξ_kl = (J_SY ⊗ I)[(I ⊗ G_kᵀ)(H_Y G_l) + (J_Y ⊗ I) Φ_kl], from a given Φ_kl.

    It holds for ReLU and the true Φ_kl; the Φ_kl of L2 are wrong. For a smooth σ the term of ∂J_SY/∂Y is missing.

    Raises:
        ShapeMismatchError: If Φ_kl does not have the shape of ∂G_k/∂W_l.

    Source: T5_xi_kl.
    """
    outputs, n_k = block.Y.numel(), block.weights[first].numel()
    G_k, G_l = block.G(first), block.G(second)
    curved = multiply(kron(eye(outputs), G_k.T), block.H_Y, G_l)
    return multiply(kron(block.J_SY, eye(n_k)), add(curved, multiply(kron(block.J_Y, eye(n_k)), Phi)))


def block_hessian_as_printed(block: Block, first: str, second: str, xi: Tensor) -> Tensor:
    """Return the paper's (J_Z ⊗ I_{n_i}) ξ_ij + (I ⊗ B_iᵀ) H_Z B_j, from a given ξ_ij. It holds. Source: T5_boxed."""
    outputs, n_i = block.Z.numel(), block.weights[first].numel()
    B_i, B_j = block.B(first), block.B(second)
    return add(multiply(kron(block.J_Z, eye(n_i)), xi), multiply(kron(eye(outputs), B_i.T), block.H_Z, B_j))


def symmetric_block_as_printed(block: Block, first: str, second: str) -> Tensor:
    """Return H_tr^(j,i), which the paper says equals H_tr^(i,j) almost everywhere.

    Wrong: the first has L d_V n_j rows, the second L d_V n_i. What commutes are the partial derivatives of one
    output, so H^(j,i) is H^(i,j) with each output's n_i × n_j slice transposed (`transpose_hessian`); only the blocks
    of the scalar loss are each other's transposes.

    Source: T5_symmetry.
    """
    return block.hessian(second, first)
