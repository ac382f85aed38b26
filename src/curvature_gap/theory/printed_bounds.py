"""The paper's bounds, transcribed literally, each beside the valid form where the printed one fails.

A bound is a function of norms alone: `Norms` holds sizes and spectral norms, as floats or as batched tensors, so the
same line serves the adversarial search, the tables and the tests. Names ending in `_printed` (or `_main`, `_appendix`)
are the paper's, also where they are wrong; names ending in `_corrected` are proven in their docstrings.

The constants behind the corrections are exact suprema:

- softmax Jacobian: sup ‖diag(a) − a aᵀ‖_2 = 1/2 (`SOFTMAX_JACOBIAN_SUP`), attained at a = (1/2, 1/2, 0, ...);
- softmax second derivative: sup = sqrt(2/27) (`SOFTMAX_SECOND_SUP`), attained at a = (1/2 ± 1/sqrt(12), 0, ...);
- row-stochastic matrices: sup ‖A‖_2 = sqrt(L), attained when every row attends to the same token;
- LayerNorm: ‖J‖_2 = 1/s and ‖H‖_2 = sqrt(max(2, d − 2)/d)/s² exactly, s the smallest row standard deviation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from curvature_gap.theory.exact_norms import ATTENTION_WEIGHTS, Inputs, spectral_norm

Number = float | Tensor
Pair = tuple[str, str]

SOFTMAX_JACOBIAN_SUP = 1 / 2
SOFTMAX_SECOND_SUP = sqrt(2 / 27)


@dataclass(frozen=True)
class Norms:
    """Sizes and spectral norms that the paper's bounds are made of.

    `x`, `k`, `q`, `v`, `w_1`, `w_2`, `target` are ‖X‖, ‖W_K‖, ‖W_Q‖, ‖W_V‖, ‖W_1‖, ‖W_2‖, ‖Target‖ (spectral).
    """

    L: int
    d_V: int
    d_K: int
    x: Number
    k: Number
    q: Number
    v: Number
    target: Number = 0.0
    d_ff: int = 0
    w_1: Number = 0.0
    w_2: Number = 0.0

    @property
    def r(self) -> float:
        """sqrt(min(L, d_V)), at least the root of the residual's rank."""
        return sqrt(min(self.L, self.d_V))

    @property
    def rho(self) -> Number:
        """The paper's L ‖X‖ ‖W_V‖ + ‖Target‖."""
        return self.L * self.x * self.v + self.target

    @property
    def rho_corrected(self) -> Number:
        """sqrt(L) ‖X‖ ‖W_V‖ + ‖Target‖ ≥ ‖F − Target‖_2, because ‖A‖_2 ≤ sqrt(L)."""
        return sqrt(self.L) * self.x * self.v + self.target


def norms_of(inputs: Inputs, target: Tensor | None = None) -> Norms:
    """Return the norms of batched inputs (X, W_Q, W_K, W_V and, where present, W_1, W_2) and of the target."""
    L, d_V = inputs["X"].shape[-2:]
    feed_forward: dict[str, Number] = {}
    if "W_1" in inputs:
        feed_forward = {"w_1": spectral_norm(inputs["W_1"]), "w_2": spectral_norm(inputs["W_2"])}
    return Norms(
        L=L,
        d_V=d_V,
        d_K=inputs["W_Q"].shape[-1],
        x=spectral_norm(inputs["X"]),
        k=spectral_norm(inputs["W_K"]),
        q=spectral_norm(inputs["W_Q"]),
        v=spectral_norm(inputs["W_V"]),
        target=0.0 if target is None else spectral_norm(target),
        d_ff=inputs["W_1"].shape[-1] if "W_1" in inputs else 0,
        **feed_forward,
    )


def largest(values: list[Number]) -> Number:
    """Return the largest of numbers that may be floats, tensors or both."""
    tensors = [v for v in values if isinstance(v, Tensor)]
    if not tensors:
        return max(float(v) for v in values)
    return torch.stack([torch.as_tensor(v, dtype=tensors[0].dtype).expand_as(tensors[0]) for v in values]).amax(dim=0)


# --- Norm facts of the proofs -----------------------------------------------------------------------------------


def softmax_jacobian_printed(L: int) -> float:
    """‖∂A/∂T‖_2 ≤ 1/L. True at uniform attention, where it is an equality, and for L ≤ 2. Source: N1."""
    return 1 / L


def softmax_jacobian_corrected(L: int) -> float:
    """‖∂A/∂T‖_2 ≤ 1/2, the supremum for L ≥ 2.

    Row j of diag(a) − a aᵀ has absolute sum a_j (1 − a_j) + a_j Σ_{l≠j} a_l = 2 a_j (1 − a_j) ≤ 1/2; a symmetric
    matrix's norm is at most its largest row sum. At a = (1/2, 1/2, 0, ...) the vector (1, −1, 0, ...) attains it.

    Source: N1.
    """
    return SOFTMAX_JACOBIAN_SUP if L > 1 else 0.0


def attention_matrix_printed(L: int) -> float:
    """‖A‖_2 ≤ L. Source: N2."""
    return float(L)


def attention_matrix_sharp(L: int) -> float:
    """‖A‖_2 ≤ sqrt(‖A‖_1 ‖A‖_∞) ≤ sqrt(L), attained when all rows attend to one token. Source: N2."""
    return sqrt(L)


def softmax_second_derivative_printed() -> float:
    """‖∂²A/∂T²‖_2 ≤ 6. Source: N3."""
    return 6.0


def softmax_second_derivative_sharp() -> float:
    """‖∂²A/∂T²‖_2 ≤ sqrt(2/27) ≈ 0.272, the supremum for L ≥ 2, of the L² x L matrix of a row.

    In direction k, with κ = k − a·k and v = a∘κ, the derivative of the row's Jacobian is
    Q = diag(v) − v aᵀ − a vᵀ with ‖Q‖_F² = Σ a_i²κ_i²(1 − 2a_i)² + Σ_{i≠j} a_i²a_j²(κ_i + κ_j)², convex in k and
    blind to shifts of k. ‖k‖ = 1 puts k in a cube of side R = max k − min k ≤ sqrt(2); a convex function peaks at the
    cube's corners, where k takes two values, on sets of mass p and q = 1 − p. There, with s = Σ_P a²/p² ≤ 1,
    t = Σ_N a²/q² ≤ 1, y = pq and Σ_P a³ ≥ (Σ_P a²)²/p,  ‖Q‖_F² ≤ R² y² (s + t + 2st − 4y (s + t)²) ≤ R²/27:
    for y ≤ 3/16 the bracket is largest at s = t = 1, giving 4y²(1 − 4y) ≤ 1/27 (at y = 1/6); for y > 3/16 it is at
    most 1/(2(8y − 1)), giving less than 0.0352. Attained by two tokens with y = 1/6 and k = (1, −1)/sqrt(2).

    Source: N3.
    """
    return SOFTMAX_SECOND_SUP


def z_1_printed(L: int, x: Number) -> Number:
    """‖Z_1‖_2 ≤ ‖X‖³/L. Source: N4."""
    return x**3 / L


def z_1_corrected(L: int, x: Number) -> Number:
    """‖Z_1‖_2 ≤ ‖X‖³/2: the same product of three norms with the supremum of N1. Source: N4."""
    return softmax_jacobian_corrected(L) * x**3


def z_2_printed(x: Number) -> Number:
    """‖Z_2‖_2 ≤ 6 ‖X‖⁵. Source: N5."""
    return 6 * x**5


def z_2_sharp(x: Number) -> Number:
    """‖Z_2‖_2 ≤ sqrt(2/27) ‖X‖⁵: the same product of norms with the supremum of N3. Source: N5."""
    return SOFTMAX_SECOND_SUP * x**5


def shuffle_printed(d_V: int) -> float:
    """‖S‖_2 ≤ sqrt(d_V); in fact an equality: S is a permutation times vec_r(I) ⊗ I. Source: N6."""
    return sqrt(d_V)


def residual_operator_printed(n: Norms, rank: Number) -> Number:
    """‖R_m‖_2 ≤ sqrt(rank(F − Target)) (L ‖X‖ ‖W_V‖ + ‖Target‖). Source: N7."""
    return rank**0.5 * n.rho


def feed_forward_printed(n: Norms, y: Number) -> Number:
    """‖FFN(Y)‖_2 ≤ sqrt(min(L, d_ff)) ‖Y‖_2 ‖W_1‖_2 ‖W_2‖_2. Source: PR10."""
    return sqrt(min(n.L, n.d_ff)) * y * n.w_1 * n.w_2


def block_sum_printed(n: Norms) -> Number:
    """‖S‖_2 ≤ sqrt(L d_V) (1 + sqrt(min(L, d_ff)) ‖W_1‖_2 ‖W_2‖_2). Source: PR10."""
    return sqrt(n.L * n.d_V) * (1 + sqrt(min(n.L, n.d_ff)) * n.w_1 * n.w_2)


# --- Norm equivalences ------------------------------------------------------------------------------------------

NORM_NAMES = ("max", "1", "inf", "2", "F")


def norm_constant(larger: str, smaller: str, m: int, n: int, rank: int) -> float:
    """Return the printed c in ‖A‖_X ≤ c ‖A‖_Y for A of shape (m, n), X = `larger`, Y = `smaller`.

    All twenty are sharp: `attaining_matrix` gives an equality case for each.

    Raises:
        ValueError: If a name is unknown or both are equal; the table's diagonal is empty.

    Source: P7.
    """
    if larger not in NORM_NAMES or smaller not in NORM_NAMES or larger == smaller:
        raise ValueError(f"Choose two different norms among {', '.join(NORM_NAMES)}; got {larger!r} and {smaller!r}.")
    rows: dict[str, tuple[float, ...]] = {
        "max": (1, 1, 1, 1, 1),
        "1": (m, 1, m, sqrt(m), sqrt(m)),
        "inf": (n, n, 1, sqrt(n), sqrt(n)),
        "2": (sqrt(m * n), sqrt(n), sqrt(m), 1, 1),
        "F": (sqrt(m * n), sqrt(n), sqrt(m), sqrt(rank), 1),
    }
    return float(rows[larger][NORM_NAMES.index(smaller)])


def matrix_norm(A: Tensor, name: str) -> Tensor:
    """Return the norm of D1 with this name, for each matrix of a batch. Source: D1."""
    if name == "2":
        return spectral_norm(A)
    if name == "F":
        return torch.linalg.vector_norm(A, dim=(-2, -1))
    if name == "max":
        return A.abs().amax(dim=(-2, -1))
    return A.abs().sum(dim=-2 if name == "1" else -1).amax(dim=-1)


def attaining_matrix(larger: str, smaller: str, m: int, n: int) -> Tensor:
    """Return an (m, n) matrix for which `norm_constant` is attained. Source: P7."""
    A = torch.zeros(m, n, dtype=torch.float64)
    if larger == "max" or (larger, smaller) == ("2", "F"):
        A[0, 0] = 1  # one entry: all five norms agree
    elif smaller == "max":
        A[:] = 1
    elif larger == "1" or (larger in "2F" and smaller == "inf"):
        A[:, 0] = 1  # one column
    elif larger == "inf" or (larger in "2F" and smaller == "1"):
        A[0, :] = 1  # one row
    else:
        A.fill_diagonal_(1)  # F against 2: equal singular values
    return A


def block_matrix_printed(largest_block: Number, block_rows: int, block_columns: int) -> Number:
    """‖A‖_2 ≤ sqrt(m n) max_ij ‖B_ij‖_2.

    The paper gives A ∈ R^{m x n} and calls m, n the matrix's own sizes; its use (3 for three blocks a side) takes them
    as the numbers of blocks, the stronger reading, which holds too: ‖A‖_2 ≤ ‖(‖B_ij‖)_ij‖_F. Equal blocks of equal
    entries attain it.

    Source: P11.
    """
    return sqrt(block_rows * block_columns) * largest_block


# --- Self-attention ---------------------------------------------------------------------------------------------


def attention_blocks_main(n: Norms) -> dict[Pair, Number]:
    """The four terms of the maximum in the main text, by the block of the Hessian each one stands for. Source: T1."""
    L, d_V, d_K, x, k, q, v, r, rho = n.L, n.d_V, n.d_K, n.x, n.k, n.q, n.v, n.r, n.rho
    return {
        ("V", "V"): 2 * L / d_V * x**2,
        ("Q", "Q"): 8 / (L**3 * d_V * d_K) * k**2 * v**2 * x**6 + 12 / (d_V * d_K) * r * rho * v * k**2 * x**5,
        ("V", "Q"): 4 / (L * d_V * sqrt(d_K)) * v * k * x**4 + 4 * r / (L**2 * sqrt(d_K)) * rho * k * x**3,
        ("Q", "K"): 8 / (L**3 * d_V * d_K) * k * q * v**2 * x**6
        + 4 * r * rho / (L * d_V * sqrt(d_K)) * v * (3 * L * k * q * x**5 + d_V / L * x**3),
    }


def attention_blocks_appendix(n: Norms, rank: Number) -> dict[Pair, Number]:
    """The four terms of the proof's last lines; `rank` is rank(F − Target). Source: T1."""
    L, d_V, d_K, x, k, q, v, rho = n.L, n.d_V, n.d_K, n.x, n.k, n.q, n.v, n.rho
    r = rank**0.5
    return {
        ("V", "V"): 2 * L / d_V * x**2,
        ("Q", "Q"): 2 / (L**3 * d_V * d_K) * k**2 * v**2 * x**6 + 12 / (d_V * d_K) * r * rho * v * k**2 * x**5,
        ("V", "Q"): 2 / (L * d_V * sqrt(d_K)) * v * k * x**4 + 2 * r / (L**2 * sqrt(d_V * d_K)) * rho * k * x**3,
        ("Q", "K"): 2 / (L**3 * d_V * d_K) * k * q * v**2 * x**6
        + 2 * r * rho / (L * d_V * sqrt(d_V * d_K)) * v * (3 * L * k * q * x**5 + d_V / L * x**3),
    }


def with_key_blocks(blocks: Mapping[Pair, Number], swapped: Mapping[Pair, Number]) -> dict[Pair, Number]:
    """Add the K–K and V–K terms that the printed maximum omits: Q–Q and V–Q with W_Q and W_K exchanged. Source: T1."""
    return dict(blocks) | {("K", "K"): swapped["Q", "Q"], ("V", "K"): swapped["V", "Q"]}


def exchange_query_key(n: Norms) -> Norms:
    """Return the norms with those of W_Q and W_K exchanged."""
    return Norms(n.L, n.d_V, n.d_K, n.x, n.q, n.k, n.v, n.target, n.d_ff, n.w_1, n.w_2)


def attention_blocks_corrected(n: Norms) -> dict[Pair, Number]:
    """Valid bounds of all six blocks in the paper's quantities.

    With Δ = F − Target, C_i = Xᵀ J_i X (‖C_i‖ ≤ x²/2 by N1) and the third moments M3_i (|M3_i[u, w, z]| ≤
    sqrt(2/27) x³ |u||w||z| by N3), for unit directions dQ, dK, dV:
    V–V  Σ |dVᵀ μ_i|² ≤ ‖A X‖² ≤ L x².
    Q–Q  Gauss–Newton Σ |W_Vᵀ C_i W_K dQᵀ x_i|² ≤ (v k x²/2)² x²; functional
         Σ M3_i[W_V Δ_i, W_K dQᵀ x_i, W_K dQᵀ x_i] ≤ sqrt(2/27) x³ v k² max_i |Δ_i| ‖X dQ‖_F², max_i |Δ_i| ≤ ‖Δ‖_2 ≤ ρ.
    V–Q  Σ μ_iᵀ dV W_Vᵀ C_i W_K dQᵀ x_i ≤ sqrt(L) x · v k (x²/2) · x; functional
         Σ Δ_iᵀ dVᵀ C_i W_K dQᵀ x_i ≤ ρ (x²/2) k x.
    Q–K  as Q–Q with k q for k², plus tr(dK dQᵀ Xᵀ B), B_i = C_i W_V Δ_i, at most x ‖B‖_F ≤ x (x²/2) v r ρ.

    Source: T1.
    """
    L, d_V, d_K, x, k, q, v, r, rho = n.L, n.d_V, n.d_K, n.x, n.k, n.q, n.v, n.r, n.rho_corrected
    half, third = SOFTMAX_JACOBIAN_SUP, SOFTMAX_SECOND_SUP
    scale = 2 / (L * d_V)

    def same(w: Number, z: Number) -> Number:
        return scale / d_K * w * z * (half**2 * v**2 * x**6 + third * v * rho * x**5)

    def mixed(w: Number) -> Number:
        return scale / sqrt(d_K) * half * w * x**3 * (sqrt(L) * x * v + rho)

    return {
        ("V", "V"): scale * L * x**2,
        ("Q", "Q"): same(k, k),
        ("K", "K"): same(q, q),
        ("V", "Q"): mixed(k),
        ("V", "K"): mixed(q),
        ("Q", "K"): same(k, q) + scale / sqrt(d_K) * half * r * rho * v * x**3,
    }


def attention_hessian_bound(blocks: Mapping[Pair, Number]) -> Number:
    """Return 3 max over the given block terms. Source: T1."""
    return 3 * largest(list(blocks.values()))


# --- LayerNorm --------------------------------------------------------------------------------------------------


def layer_norm_jacobian_printed(x: Number, sigma_min: Number, n: int) -> Number:
    """‖J_LN‖_2 ≤ 1/σ_min + ‖X‖²/(sqrt(n) σ_min³).

    The lemma defines σ_min = min_i ‖M_i‖_2, the norm of a centred row; its proof uses the row standard deviation,
    which is smaller by sqrt(n). With the standard deviation the bound holds, with the norm it does not.

    Source: L3.
    """
    return 1 / sigma_min + x**2 / (sqrt(n) * sigma_min**3)


def layer_norm_hessian_printed(x: Number, sigma_min: Number, m: int, n: int) -> Number:
    """‖H_LN‖_2 ≤ ‖X‖/σ³ (1 + sqrt(m/n)) + ‖X‖²/(sqrt(n) σ³) + 3‖X‖³/(n σ⁵); σ_min as above. Source: L3."""
    s = sigma_min
    return x / s**3 * (1 + sqrt(m / n)) + x**2 / (sqrt(n) * s**3) + 3 * x**3 / (n * s**5)


def layer_norm_jacobian_exact(deviation: Number, n: int) -> Number:
    """‖J_LN‖_2 = 1/min_i s_i for n ≥ 3, and 0 for n = 2; s_i the row standard deviation.

    Block i is P_i/s_i, and P_i = I − 11ᵀ/n − y yᵀ/n projects onto n − 2 dimensions.

    Source: L3.
    """
    return 1 / deviation if n > 2 else 0 * deviation


def layer_norm_hessian_exact(deviation: Number, n: int) -> Number:
    """‖H_LN‖_2 = sqrt(max(2, n − 2)/n)/min_i s_i² for n ≥ 3, and 0 for n = 2.

    With u = y/sqrt(n), D²LN[·, k] = −((u·k) P + P k uᵀ + u (P k)ᵀ)/(sqrt(n) s²). Its squared Frobenius norm is
    (n − 2)/(n s⁴) for k = u and 2/(n s⁴) for unit k ⊥ u, 1, and the two kinds of k give orthogonal matrices.

    Source: L3.
    """
    return sqrt(max(2, n - 2) / n) / deviation**2 if n > 2 else 0 * deviation


# --- Attention pieces of the block bound ------------------------------------------------------------------------


def attention_jacobian_printed(n: Norms) -> dict[str, Number]:
    """‖G_V‖ ≤ L x, ‖G_Q‖ ≤ v k x³/(L sqrt(d_K)), ‖G_K‖ ≤ v q x³/(L sqrt(d_K)). Source: T6."""
    scale = 1 / (n.L * sqrt(n.d_K))
    return {"V": n.L * n.x, "Q": scale * n.v * n.k * n.x**3, "K": scale * n.v * n.q * n.x**3}


def attention_jacobian_corrected(n: Norms) -> dict[str, Number]:
    """‖G_V‖ ≤ sqrt(L) x, ‖G_Q‖ ≤ v k x³/(2 sqrt(d_K)), ‖G_K‖ ≤ v q x³/(2 sqrt(d_K)).

    G_V = A X ⊗ I with ‖A‖ ≤ sqrt(L); the other two have row blocks x_iᵀ ⊗ W_Vᵀ C_i W_K and W_Vᵀ C_i ⊗ z_iᵀ with
    ‖C_i‖ ≤ x²/2, and stacking them over i gives one more factor x (or ‖X W_Q‖ ≤ x q).

    Source: T6.
    """
    scale = SOFTMAX_JACOBIAN_SUP / sqrt(n.d_K)
    return {"V": sqrt(n.L) * n.x, "Q": scale * n.v * n.k * n.x**3, "K": scale * n.v * n.q * n.x**3}


def attention_second_printed(n: Norms) -> dict[Pair, Number]:
    """The printed bounds of Φ_VV, Φ_QQ, Φ_VQ, Φ_QK, and by the symmetry the paper states those of the other pairs.

    All carry the loss's factor 2/(L d_V), which ∂²F/∂W_i∂W_j does not have.

    Source: T6.
    """
    L, d_V, d_K, x, k, q, v = n.L, n.d_V, n.d_K, n.x, n.k, n.q, n.v
    cube = 2 / (L**2 * sqrt(d_V * d_K)) * x**3
    fifth = 12 / (L * d_V * d_K) * v * x**5
    bounds = {("V", "V"): 0 * x, ("Q", "Q"): fifth * k**2, ("K", "K"): fifth * q**2}
    bounds |= {("V", "Q"): cube * k, ("V", "K"): cube * q, ("Q", "K"): fifth * k * q + cube * v}
    return bounds | {(j, i): bound for (i, j), bound in bounds.items()}


def attention_second_corrected(n: Norms) -> dict[Pair, Number]:
    """Bounds of ‖Φ_ij‖, Φ_ij = ∂²F/∂W_i∂W_j with rows (F, W_i) and columns W_j.

    Φ_QQ is Z_2 between W_V, W_K, W_K: sqrt(2/27) v k² x⁵/d_K. Φ_VQ is d_V orthogonal copies of Z_1 (I ⊗ W_K):
    sqrt(d_V) k x³/(2 sqrt(d_K)). Its transposed arrangement Φ_QV stacks x_ip C_i W_K over i and p, at most
    ‖X‖_F k x²/2 ≤ r k x³/2, and so does the part of Φ_QK that comes from the bilinear logits, with v for k.

    Source: T6, L2.
    """
    d_V, d_K, x, k, q, v, r = n.d_V, n.d_K, n.x, n.k, n.q, n.v, n.r
    cube = SOFTMAX_JACOBIAN_SUP * x**3 / sqrt(d_K)
    fifth = SOFTMAX_SECOND_SUP * v * x**5 / d_K
    cross = fifth * k * q + r * v * cube
    bounds = {("V", "V"): 0 * x, ("Q", "Q"): fifth * k**2, ("K", "K"): fifth * q**2}
    bounds |= {("Q", "K"): cross, ("K", "Q"): cross}
    for name, weight in (("Q", k), ("K", q)):
        bounds["V", name] = sqrt(d_V) * weight * cube
        bounds[name, "V"] = r * weight * cube
    return bounds


def residual_jacobian_printed(n: Norms) -> Number:
    """‖J_SY‖_2 ≤ ‖W_2‖ ‖W_1‖ + 1. Source: T6."""
    return n.w_2 * n.w_1 + 1


def xi_21_printed(n: Norms) -> Number:
    """‖ξ_21‖_2 ≤ sqrt(d_ff) ‖W_2‖_2. Source: T6."""
    return sqrt(n.d_ff) * n.w_2


def xi_21_corrected(n: Norms, y: Number) -> Number:
    """‖ξ_21‖_2 ≤ sqrt(d_V) ‖Y‖_2.

    ξ_21 = ∂B_2/∂W_1 does not contain W_2: it is d_V orthogonal copies of ∂σ(Y W_1)/∂W_1 = D_σ (Y ⊗ I). (The label
    (2,1) stands for ∂B_1/∂W_2 in the proof; that arrangement has norm max_f ‖D_f Y‖_F ≤ ‖Y‖_F ≤ sqrt(d_V) ‖Y‖_2.)

    Source: T6.
    """
    return sqrt(n.d_V) * y


@dataclass(frozen=True)
class BlockNorms:
    """What the block bound is assembled from: norms of J_Z, H_Z, J_Y, H_Y, J_SY, of B_i, G_k and of ξ_ij."""

    J_Z: Number
    H_Z: Number
    B: Mapping[str, Number]
    xi: Mapping[Pair, Number]

    def second_derivatives(self) -> dict[Pair, Number]:
        """‖H_tr^(i,j)‖ ≤ ‖J_Z‖ ‖ξ_ij‖ + ‖B_i‖ ‖H_Z‖ ‖B_j‖ for every pair whose ξ is known. Source: T6."""
        return {(i, j): self.J_Z * xi + self.B[i] * self.H_Z * self.B[j] for (i, j), xi in self.xi.items()}

    def loss_hessian(self, residual: Number, scale: float, functional_scale: float) -> Number:
        """5 max_ij (scale ‖∂Z/∂W_i‖ ‖∂Z/∂W_j‖ + functional_scale ‖R‖ ‖H_tr^(i,j)‖). Source: T6."""
        return 5 * largest(
            [
                scale * self.J_Z**2 * self.B[i] * self.B[j] + functional_scale * residual * second
                for (i, j), second in self.second_derivatives().items()
            ]
        )


def explicit_block_norms_printed(n: Norms, hidden: Number, s_Y: Number, s_Z: Number) -> BlockNorms:
    """The explicit pieces as printed, from norms of the inputs, `hidden` = ‖σ(Y W_1)‖ and the two σ_min.

    Where the text leaves a choice the larger, more favourable one is taken: σ_min is the standard deviation (see L3),
    ‖X + F‖ ≤ x + L x v, ‖Y‖ = sqrt(L d_V), ‖S‖ by PR10. ξ_k1 and ξ_k2 have no printed bound and are left out.

    Source: T6.
    """
    U = n.x + n.L * n.x * n.v
    S, Y = block_sum_printed(n), sqrt(n.L * n.d_V)
    J_Y = layer_norm_jacobian_printed(U, s_Y, n.d_V)
    H_Y = layer_norm_hessian_printed(U, s_Y, n.L, n.d_V)
    J_SY = residual_jacobian_printed(n)
    G, Phi = attention_jacobian_printed(n), attention_second_printed(n)
    B = {"1": n.w_2 * Y, "2": hidden} | {k: J_SY * J_Y * G[k] for k in ATTENTION_WEIGHTS}
    zero = 0 * n.w_2
    xi: dict[Pair, Number] = {("1", "1"): zero, ("2", "2"): zero}
    xi |= {("1", "2"): sqrt(n.d_V) * Y + zero, ("2", "1"): xi_21_printed(n)}
    for k in ATTENTION_WEIGHTS:
        xi["1", k] = sqrt(n.d_ff) * n.w_2 * J_Y * G[k]
        xi["2", k] = sqrt(n.d_V) * n.w_1 * J_Y * G[k]
        xi |= {(k, m): J_SY * (G[k] * H_Y * G[m] + J_Y * Phi[k, m]) for m in ATTENTION_WEIGHTS}
    return BlockNorms(
        J_Z=layer_norm_jacobian_printed(S, s_Z, n.d_V),
        H_Z=layer_norm_hessian_printed(S, s_Z, n.L, n.d_V),
        B=B,
        xi=xi,
    )


def explicit_block_norms_corrected(n: Norms, hidden: Number, s_Y: Number, s_Z: Number) -> BlockNorms:
    """Valid explicit pieces for all 25 pairs, in the same quantities.

    LayerNorm exactly (`layer_norm_jacobian_exact`, `layer_norm_hessian_exact`); G and Φ corrected; ξ_12, ξ_21 ≤
    sqrt(d_V) ‖Y‖; ‖D_i W_2‖_F ≤ sqrt(min(d_ff, d_V)) w_2 in ξ_1k. In ξ_k1 and ξ_k2 the tokens are stacked along the
    rows: at most sqrt(L) times the largest token's ‖W_2‖ ‖J_Y G_k‖ and ‖W_1‖ ‖J_Y G_k‖.

    Source: T6.
    """
    Y = sqrt(n.L * n.d_V)
    J_Y, H_Y = layer_norm_jacobian_exact(s_Y, n.d_V), layer_norm_hessian_exact(s_Y, n.d_V)
    J_SY = residual_jacobian_printed(n)
    G, Phi = attention_jacobian_corrected(n), attention_second_corrected(n)
    B = {"1": n.w_2 * Y, "2": hidden} | {k: J_SY * J_Y * G[k] for k in ATTENTION_WEIGHTS}
    zero = 0 * n.w_2
    xi: dict[Pair, Number] = {("1", "1"): zero, ("2", "2"): zero}
    xi |= {("1", "2"): sqrt(n.d_V) * Y + zero, ("2", "1"): xi_21_corrected(n, Y) + zero}
    for k in ATTENTION_WEIGHTS:
        xi["1", k] = sqrt(min(n.d_ff, n.d_V)) * n.w_2 * J_Y * G[k]
        xi["2", k] = sqrt(n.d_V) * n.w_1 * J_Y * G[k]
        xi[k, "1"], xi[k, "2"] = sqrt(n.L) * n.w_2 * J_Y * G[k], sqrt(n.L) * n.w_1 * J_Y * G[k]
        xi |= {(k, m): J_SY * (G[k] * H_Y * G[m] + J_Y * Phi[k, m]) for m in ATTENTION_WEIGHTS}
    return BlockNorms(J_Z=layer_norm_jacobian_exact(s_Z, n.d_V), H_Z=layer_norm_hessian_exact(s_Z, n.d_V), B=B, xi=xi)
