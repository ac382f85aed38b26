"""Errata: every identity of the paper that fails as printed, and the slips that leave a verdict as it is.

The formulas are checked in `curvature_gap.identities`; here they stand in words, for the report.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Erratum:
    """What stands in the paper, what should, and why."""

    printed: str
    corrected: str
    reason: str


ERRATA: dict[str, Erratum] = {
    "G_K": Erratum(
        "∂F/∂W_K = (I_L ⊗ W_Vᵀ Xᵀ)(∂A/∂T)(X W_Q ⊗ X) K_{d_V d_K}/√d_K",
        "∂F/∂W_K = (I_L ⊗ W_Vᵀ Xᵀ)(∂A/∂T)(X W_Q ⊗ X) K_{d_K,d_V}/√d_K",
        "T = (X W_Q) W_Kᵀ Xᵀ/√d_K, so ∂T/∂W_K = (X W_Q ⊗ X) ∂W_Kᵀ/∂W_K/√d_K, and PR9 gives ∂W_Kᵀ/∂W_K = "
        "K_{d_K,d_V} for the d_V × d_K matrix W_K. K_{d_V,d_K} is its inverse; the two agree where d_V = d_K.",
    ),
    "L2_QQ": Erratum(
        "Φ_QQ = 2/(L d_V d_K) (I_L ⊗ W_Vᵀ ⊗ I ⊗ W_Kᵀ) Z_2 (I ⊗ W_K)",
        "Φ_QQ = 1/d_K (I_L ⊗ W_Vᵀ ⊗ I ⊗ W_Kᵀ) Z_2 (I ⊗ W_K)",
        "Φ = ∂²F/∂W_i∂W_j knows no loss. H_f = (∂l/∂F ⊗ I) Φ and ∂l/∂F ⊗ I = 2/(L d_V) R_m for l = ‖F − "
        "Target‖²/(L d_V), so taking off the contraction takes off the factor 2/(L d_V) too.",
    ),
    "L2_VQ": Erratum(
        "Φ_VQ = 2/(L d_V √d_K) (I_L ⊗ S) Z_1 (I ⊗ W_K)",
        "Φ_VQ = 1/√d_K (I_L ⊗ S) Z_1 (I ⊗ W_K), S of size d_V³ × d_V",
        "As Φ_QQ. The proof of T5 adds that Φ_VQ vanishes where attention is uniform; it does not: at W_Q = 0"
        " attention is uniform and ∂A/∂T = (1/L) I ⊗ (I − 11ᵀ/L) is not zero.",
    ),
    "L2_QK": Erratum(
        "Φ_QK = 2/(L d_V d_K) (I_L ⊗ W_Vᵀ ⊗ I ⊗ W_Kᵀ) Z_2 (W_Q ⊗ I) K_{d_K,d_V} + 2/(L d_V √d_K) (I_{d_V} ⊗ "
        "W_Vᵀ ⊗ I)(Z_1 ⊗ I) S ⊗ I_{d_K}",
        "Φ_QK = 1/d_K (I_L ⊗ W_Vᵀ ⊗ I ⊗ W_Kᵀ) Z_2 (W_Q ⊗ I) K_{d_K,d_V} + 1/√d_K [(I_L ⊗ W_Vᵀ ⊗ I)(Z_1 ⊗ I) "
        "S] ⊗ I_{d_K}",
        "The factor as in Φ_QQ; and G_Q = (I_L ⊗ W_Vᵀ) Z_1 (I ⊗ W_K)/√d_K has I_L on the left, as FN's (Q, K)"
        " block prints: with I_{d_V} the factors fit only where L = d_V.",
    ),
    "T3_dP_kron_I": Erratum(
        "∂(P ⊗ I_{d_V})/∂X = (I_L ⊗ K_{L,L} ⊗ I_L)(I_{L²} ⊗ vec_r I_L) ∂P/∂X",
        "∂(P ⊗ I_{d_V})/∂X = (I_L ⊗ K_{d_V,L} ⊗ I_{d_V})(I_{L²} ⊗ vec_r I_{d_V}) ∂P/∂X",
        "P6 with n = q = L and p = r = d_V. What is printed is ∂(P ⊗ I_L)/∂X, with L⁴ rows instead of L² "
        "d_V². The proof of L3 prints the right form.",
    ),
    "T3_d2P": Erratum(
        "∂²P/∂X² = (1/√d_V)(A_1 ⊗ I_{L d_V}) ∂B_1/∂X + (I_{L²} ⊗ B_1ᵀ) ∂A_1/∂X",
        "∂²P/∂X² = (1/√d_V) [(A_1 ⊗ I_{L d_V}) ∂B_1/∂X + (I_{L²} ⊗ B_1ᵀ) ∂A_1/∂X], with ∂A_2/∂X = −(A_2 ⊗ "
        "A_2) E A_2 B_2",
        "∂P/∂X = (1/√d_V) A_1 B_1 and PR3: the factor stands before both terms. ∂A_2/∂X enters ∂B_1/∂X and is"
        " not printed; A_2 = diag⁻¹(τ^{1/2}) with ∂τ^{1/2}/∂X = A_2 B_2, PR5 and PR6 give it.",
    ),
    "T3_dD": Erratum(
        "∂D/∂X = E A_2 (I_L ⊗ 1ᵀ) diag(vec_r M) G",
        "∂D/∂X = (1/√d_V) E A_2 (I_L ⊗ 1ᵀ) diag(vec_r M) G",
        "D = diag(σ) and σ = (M^{∘2} 1)^{∘1/2}/√d_V; T2's ∂P/∂X has the factor. It carries over to ∂A_1/∂X, "
        "so that with the lost bracket of ∂²P/∂X² its second term comes out d_V times too large.",
    ),
    "T3_total": Erratum(
        "∂²LN/∂X² with the parts of the printed proof",
        "∂²LN_a/∂x_b∂x_c = −(J_ab y_c + J_ac y_b + J_bc y_a)/(d_V σ) in each row, J = (I − 11ᵀ/d_V − y "
        "yᵀ/d_V)/σ, y = LN(x)",
        "The sum of four terms is right, three of its parts are not (T3_dP_kron_I, T3_d2P, T3_dD). The short "
        "form is ∂J/∂x with ∂y/∂x = J and ∂σ/∂x = y/d_V.",
    ),
    "T4_appendix": Erratum(
        "∂S/∂W_1 = (I_L ⊗ W_2ᵀ) diag(vec_r 1_{X>0}) (Y ⊗ I_{d_ff}), the same mask in ∂S/∂Y",
        "∂S/∂W_1 = (I_L ⊗ W_2ᵀ) diag(vec_r 1_{Y W_1>0}) (Y ⊗ I_{d_ff}), ∂S/∂Y = (I_L ⊗ W_2ᵀ) diag(vec_r 1_{Y "
        "W_1>0}) (I_L ⊗ W_1ᵀ) + I",
        "The mask belongs to ReLU's argument Y W_1 ∈ R^{L×d_ff}; L1's letter for the argument was kept, where"
        " X is the block's L × d_V input. T5 prints it right. An intermediate line of the proof also has (I_L"
        " ⊗ W_1ᵀ) for (Y ⊗ I_{d_ff}).",
    ),
    "T5_xi_12": Erratum(
        "ξ_12 = (I_L ⊗ K_{d_V,d_ff} ⊗ I_{d_V})(I_{L d_ff} ⊗ vec_r I_{d_V}) D_σ (Y ⊗ I_{d_ff})",
        "ξ_12 = (I_{L d_V} ⊗ (Y ⊗ I_{d_ff})ᵀ D_σ)(I_L ⊗ K_{d_V,L} ⊗ I_{d_ff})(vec_r I_L ⊗ I_{d_V d_ff}) K_{d_V,d_ff}",
        "ξ_12 = ∂B_1/∂W_2 by definition; the proof differentiates B_2 in W_1, so the printed expression is "
        "ξ_21. Equal sizes n_1 = n_2 hide the exchange. PR3 on B_1 = (I_L ⊗ W_2ᵀ) · D_σ(Y ⊗ I) and P6, PR9 "
        "for ∂(I_L ⊗ W_2ᵀ)/∂W_2 give ξ_12; the proof's K_{d_ff,d_V} there must be K_{d_V,d_ff}, for W_2 is "
        "d_ff × d_V.",
    ),
    "T5_xi_21": Erratum(
        "ξ_21 = (I_L ⊗ W_2ᵀ) D_σ (I_L ⊗ K_{d_ff,d_V} ⊗ I_{d_ff})(I_{L d_V} ⊗ vec_r I_{d_ff})",
        "ξ_21 = (I_L ⊗ K_{d_V,d_ff} ⊗ I_{d_V})(I_{L d_ff} ⊗ vec_r I_{d_V}) D_σ (Y ⊗ I_{d_ff})",
        "ξ_21 = ∂B_2/∂W_1 with B_2 = σ(Y W_1) ⊗ I: P6 and the chain rule. In the printed product D_σ has L "
        "d_ff columns and the next factor L d_V d_ff² rows; it does not follow from the line above it, which "
        "is ∂B_1/∂W_2.",
    ),
    "T5_xi_1k": Erratum(
        "ξ_1k = ((I_L ⊗ W_2ᵀ) D_σ ⊗ I_{n_k})(I_L ⊗ K_{d_ff,d_V} ⊗ I_{d_ff})(I_{L d_V} ⊗ vec_r I_{d_ff}) J_Y G_k",
        "ξ_1k = ((I_L ⊗ W_2ᵀ) D_σ ⊗ I_{n_1})(I_L ⊗ K_{d_ff,d_V} ⊗ I_{d_ff})(I_{L d_V} ⊗ vec_r I_{d_ff}) J_Y G_k",
        "PR3 on B_1 = ((I_L ⊗ W_2ᵀ) D_σ)(Y ⊗ I_{d_ff}): the identity has the size of the product's columns, "
        "n_1 = d_V d_ff.",
    ),
    "T5_symmetry": Erratum(
        "H_tr^(i,j) = H_tr^(j,i) almost everywhere",
        "vec_r H_tr^(j,i) = (I_{L d_V} ⊗ K_{n_j,n_i}) vec_r H_tr^(i,j), and for the scalar loss H^(j,i) = (H^(i,j))ᵀ",
        "The blocks have L d_V n_i × n_j and L d_V n_j × n_i entries. The partial derivatives of one output "
        "commute, so its n_j × n_i slice is the transpose of its n_i × n_j slice.",
    ),
}
"""Every identity that fails as printed. Parents (`T3`, `L2`, ...) fail through their parts."""

MISPRINTS: dict[str, Erratum] = {
    "GN2": Erratum(
        "L(·) = ‖· − Target‖², second derivative 2/(L d_V); ∂L/∂Z ⊗ I = R_m^tr",
        "L(·) = ‖· − Target‖²/(L d_V), second derivative 2/(L d_V) I; ∂L/∂Z ⊗ I = 2/(L d_V) R_m^tr",
        "With the paper's loss the residual operator needs the factor it has in FN.",
    ),
    "FN_VQ": Erratum(
        "S ∈ R^{d_V² × d_V}",
        "S ∈ R^{d_V³ × d_V}",
        "(I ⊗ K_{d_V,d_V}) is d_V³ × d_V³.",
    ),
    "FN_QK": Erratum(
        "(…)(Z_1 ⊗ I_{d_V}) S ⊗ I_{d_K}",
        "[(…)(Z_1 ⊗ I_{d_V}) S] ⊗ I_{d_K}",
        "Taken with S alone the factors do not fit.",
    ),
    "G_Q": Erratum(
        "(1/n) I_L ⊗ (I_L − 11ᵀ/L)",
        "(1/L) I_L ⊗ (I_L − 11ᵀ/L)",
        "Uniform attention has entries 1/L.",
    ),
    "T2": Erratum(
        "U ∈ R^{m×n}: μ_i = (1/m) Σ_{j≤m} U_ij",
        "U ∈ R^{m×n}: μ_i = (1/n) Σ_{j≤n} U_ij",
        "LayerNorm averages over the features; the block's section prints it right. In the proof of T2, "
        "τ = Q 1_L must be Q 1_{d_V}, as the next line has it.",
    ),
}
"""Slips that leave the verdict as it is: the reading that is plainly meant holds."""
