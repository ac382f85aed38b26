"""How much one more sample changes the mean loss: the paper's bound, its sharp constant, what the true loss needs.

With L_k = (1/k) Σ_{i≤k} l_i, always L_{k+1} − L_k = (l_{k+1} − L_k)/(k + 1). The paper expands both to second order at
w*, drops the first order by A1 and bounds what is left. The printed inequality is a statement about that quadratic
model; on the true loss the Taylor remainder is missing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from curvature_gap.maps import attention, mse
from curvature_gap.shapes import Float
from curvature_gap.theory.printed_bounds import (
    Norms,
    Number,
    attention_blocks_corrected,
    attention_hessian_bound,
    largest,
)


def _check(k: int, **values: Number) -> None:
    if k < 1:
        raise ValueError(f"k counts the samples seen and must be at least 1, got {k}.")
    for name, value in values.items():
        if bool((torch.as_tensor(value) < 0).any()):
            raise ValueError(f"{name} must not be negative, got {value}.")


def increment_bound(k: int, L_max: Number, M: Number, distance: Number) -> Number:
    """Return 2 L/(k + 1) + M ‖w − w*‖²/(k + 1), the printed bound of |L_{k+1}(w) − L_k(w)|.

    Args:
        k: Samples already seen.
        L_max: Bound of every l_i(w*), which lie in [0, L_max].
        M: Bound of every ‖H_i(w*)‖_2.
        distance: ‖w − w*‖_2.

    Raises:
        ValueError: If k < 1 or a quantity is negative.

    Source: T7.
    """
    _check(k, L_max=L_max, M=M, distance=distance)
    return (2 * L_max + M * distance**2) / (k + 1)


def increment_bound_sharp(k: int, L_max: Number, M: Number, distance: Number) -> Number:
    """Return (L + M ‖w − w*‖²)/(k + 1), the best bound of the quadratic model under the printed assumptions.

    Two numbers of [0, L] differ by at most L, not 2L; two Hessians of norm M by at most 2M, of which the expansion
    takes half. `extreme_quadratic_model` attains the sum, at a minimum of L_k and L_{k+1}.

    Source: T7.
    """
    _check(k, L_max=L_max, M=M, distance=distance)
    return (L_max + M * distance**2) / (k + 1)


def increment_bound_true_loss(
    k: int, L_max: Number, M_path: Number, distance: Number, gradient: Number = 0.0
) -> Number:
    """Return (L + g d + M_path d²)/(k + 1), valid for the true loss.

    M_path bounds ‖H_i‖_2 on the whole segment from w* to w, not at w* alone, and g = ‖∇l_{k+1}(w*) − ∇L_k(w*)‖, which
    A1 makes zero. Taylor with the integral remainder: l(w) = l(w*) + ∇l·δ + ∫ (1 − s) δᵀ∇²l(w* + sδ)δ ds, and the
    integral is at most M_path d²/2, once for l_{k+1} and once for L_k.

    Source: T7, A1.
    """
    _check(k, L_max=L_max, M_path=M_path, distance=distance, gradient=gradient)
    return (L_max + gradient * distance + M_path * distance**2) / (k + 1)


def increment_bound_third_order(
    k: int, L_max: Number, M: Number, distance: Number, lipschitz: Number, gradient: Number = 0.0
) -> Number:
    """Return (L + g d + M d² + Λ d³/3)/(k + 1): M at w* alone, Λ a Lipschitz constant of every ∇²l_i on the segment.

    The remainder of each second-order expansion is at most Λ d³/6, and there are two.

    Source: T7, A1.
    """
    _check(k, L_max=L_max, M=M, distance=distance, lipschitz=lipschitz, gradient=gradient)
    return (L_max + gradient * distance + M * distance**2 + lipschitz * distance**3 / 3) / (k + 1)


@dataclass(frozen=True)
class QuadraticModel:
    """k + 1 sample losses l_i(w* + δ) = value_i + gradient_i·δ + δᵀ hessian_i δ/2, the last one being the new sample.

    Raises:
        ValueError: If there are fewer than two samples.
    """

    values: Float[Tensor, " n"]
    gradients: Float[Tensor, "n p"]
    hessians: Float[Tensor, "n p p"]

    def __post_init__(self) -> None:
        if len(self.values) < 2:
            raise ValueError("The model needs at least two samples: one seen and one new.")

    @property
    def k(self) -> int:
        return len(self.values) - 1

    def increment(self, step: Float[Tensor, " p"]) -> Float[Tensor, ""]:
        """Return L_{k+1}(w* + step) − L_k(w* + step)."""
        curved = torch.einsum("ipq,p,q->i", self.hessians, step, step)
        losses = self.values + self.gradients @ step + curved / 2
        return losses.mean() - losses[:-1].mean()

    def gradient_gap(self) -> Float[Tensor, ""]:
        """Return ‖∇l_{k+1}(w*) − ∇L_k(w*)‖, zero under A1."""
        return torch.linalg.vector_norm(self.gradients[-1] - self.gradients[:-1].mean(dim=0))

    def curvature(self) -> Float[Tensor, ""]:
        """Return M = max_i ‖H_i‖_2."""
        return torch.linalg.matrix_norm(self.hessians, 2).max()


def extreme_quadratic_model(k: int, L_max: float, M: float, p: int) -> QuadraticModel:
    """Return the model that attains `increment_bound_sharp` along the first axis, with w* a minimum of L_k and L_{k+1}.

    Old samples have value L and Hessian M e_1e_1ᵀ, the new one value 0 and Hessian −M e_1e_1ᵀ; the means' Hessians
    M e_1e_1ᵀ and (k − 1)/(k + 1) M e_1e_1ᵀ are positive semidefinite.

    Source: T7.
    """
    _check(k, L_max=L_max, M=M)
    values = torch.full((k + 1,), L_max, dtype=torch.float64)
    hessians = torch.zeros(k + 1, p, p, dtype=torch.float64)
    hessians[:, 0, 0] = M
    values[-1], hessians[-1, 0, 0] = 0.0, -M
    return QuadraticModel(values, torch.zeros(k + 1, p, dtype=torch.float64), hessians)


AttentionWeights = Mapping[str, Tensor]


@dataclass(frozen=True)
class FlatMinimum:
    """An attention layer whose loss is zero at w*, with zero gradient and almost no curvature, but not zero nearby.

    Half the tokens are c e_1 + offset e_2, half −c e_1 + offset e_2, and W_Q = W_K = 0, W_V = I, Target = F(w*):
    attention is uniform, A X has the rows offset e_2, and with the residual gone only the V–V block is left, of norm
    2 offset²/d_V. Moving W_Q and W_K by t e_1 lets every token attend to its own kind and moves F by up to c. The first
    sample has X = 0 and loss zero everywhere.

    Source: T7.
    """

    X: Float[Tensor, "L d"]
    weights: AttentionWeights
    moved: AttentionWeights

    @property
    def target(self) -> Float[Tensor, "L d"]:
        return self.output(self.weights)

    def output(self, weights: AttentionWeights) -> Float[Tensor, "L d"]:
        return attention(self.X, weights["W_Q"], weights["W_K"], weights["W_V"])

    def loss(self, weights: AttentionWeights) -> Float[Tensor, ""]:
        """l_2, the new sample's loss."""
        return mse(self.output(weights), self.target)

    def increment(self) -> Float[Tensor, ""]:
        """|L_2 − L_1| at the moved weights; L_1 = 0 everywhere."""
        return self.loss(self.moved) / 2

    def distance(self) -> Float[Tensor, ""]:
        """‖w − w*‖_2."""
        return distance_between(self.weights, self.moved)


def distance_between(first: AttentionWeights, second: AttentionWeights) -> Float[Tensor, ""]:
    """Return the Euclidean distance of two parameter points."""
    return torch.stack([(second[name] - first[name]).square().sum() for name in first]).sum().sqrt()


def flat_minimum(c: float = 1.0, offset: float = 0.0, t: float = 1.0, L: int = 4, d_V: int = 3) -> FlatMinimum:
    """Return the counterexample to T7 on the true loss. Raises ValueError if L is odd or d_V < 2."""
    if L % 2 or d_V < 2:
        raise ValueError(f"The counterexample needs an even number of tokens and d_V >= 2; got L = {L}, d_V = {d_V}.")
    X = torch.zeros(L, d_V, dtype=torch.float64)
    X[:, 0] = c * (1 - 2 * (torch.arange(L) % 2))
    X[:, 1] = offset
    zero, moved = torch.zeros(d_V, 1, dtype=torch.float64), torch.zeros(d_V, 1, dtype=torch.float64)
    moved[0, 0] = t
    W_V = torch.eye(d_V, dtype=torch.float64)
    return FlatMinimum(X, {"W_Q": zero, "W_K": zero, "W_V": W_V}, {"W_Q": moved, "W_K": moved, "W_V": W_V})


def attention_curvature_on_segment(
    X: Float[Tensor, "L d"], target: Float[Tensor, "L d"], start: AttentionWeights, end: AttentionWeights
) -> Number:
    """Return a bound of ‖H_i(w)‖_2 for every w on the segment from start to end.

    The corrected T1 grows with each weight's norm, and a norm is convex: on a segment it is largest at an end.

    Source: T1, T7.
    """

    def norm(name: str) -> Number:
        return largest([torch.linalg.matrix_norm(weights[name], 2) for weights in (start, end)])

    return attention_hessian_bound(
        attention_blocks_corrected(
            Norms(
                L=X.shape[0],
                d_V=X.shape[1],
                d_K=start["W_Q"].shape[1],
                x=torch.linalg.matrix_norm(X, 2),
                k=norm("W_K"),
                q=norm("W_Q"),
                v=norm("W_V"),
                target=torch.linalg.matrix_norm(target, 2),
            )
        )
    )
