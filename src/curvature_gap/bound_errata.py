"""Errata of the bounds: every bound of the paper that an input violates, and the slips that leave a verdict as it is.

The bounds are searched in `curvature_gap.bound_search` and proven in `theory.printed_bounds`; here they stand in words.
"""

from curvature_gap.errata import Erratum

ERRATA: dict[str, Erratum] = {
    "N1": Erratum(
        "‖∂A/∂T‖₂ ≤ 1/L",
        "‖∂A/∂T‖₂ ≤ 1/2, attained at the row (1/2, 1/2, 0, …)",
        "1/L is the value at uniform attention, which the cited lemma assumes and T1 does not. In general row j of "
        "diag(a) − a aᵀ has absolute sum 2 a_j (1 − a_j) ≤ 1/2. The printed value is too small by up to L/2.",
    ),
    "N4": Erratum(
        "‖Z_1‖₂ ≤ ‖X‖³/L",
        "‖Z_1‖₂ ≤ ‖X‖³/2",
        "N1. Two opposite tokens that attend to each other alone come as close to it as one likes.",
    ),
    "T1_main": Erratum(
        "M = 3 max(V–V, Q–Q, V–Q, Q–K)",
        "M = 3 max over V–V, Q–Q, K–K, V–Q, V–K, Q–K with V–V = 2x²/d_V; Q–Q = 2/(L d_V d_K) k²(v²x⁶/4 + "
        "√(2/27) v ρ x⁵), "
        "K–K with q² for k²; V–Q = k x³(√L x v + ρ)/(L d_V √d_K), V–K with q for k; Q–K = Q–Q with k q for k² plus "
        "r ρ v x³/(L d_V √d_K); ρ = √L x v + ‖Target‖, r = √min(L, d_V)",
        "The maximum leaves out K–K and V–K. At W_K = 0, with the target met (a global minimum), the K–K "
        "block grows as "
        "‖W_Q‖² and M does not move: exact/M has no bound. With the two terms added the main text's M still fails for "
        "long sequences (L = 49, d_V = 2), because N1 enters its V–Q term; its other constants are generous enough.",
    ),
    "T1_appendix": Erratum(
        "M = 3 max(V–V, Q–Q, V–Q, Q–K), with √rank(F − Target) in the functional parts",
        "as T1_main",
        "As T1_main. Besides, at a met target the rank is 0 and only the outer-product parts are left, which N1 makes "
        "too small by L²/4: the bound fails by up to L²/12 even with K–K and V–K added. The last lines put "
        "√(d_V d_K) for d_K, and 12/(d_V d_K) has lost the 1/L of the line before.",
    ),
    "L3_jacobian": Erratum(
        "‖J_LN‖₂ ≤ 1/σ_min + ‖X‖²/(√n σ_min³), σ_min = min_i ‖M_i‖₂",
        "‖J_LN‖₂ = 1/min_i s_i for n ≥ 3, s_i = ‖M_i‖₂/√n the row standard deviation; the printed form holds with "
        "σ_min = min_i s_i",
        "The proof sets ‖P‖ = 1/σ_min with P = diag⁻¹(σ), so its σ_min is the standard deviation, smaller by √n. "
        "As defined, one centred row violates it by n/(√n + 1).",
    ),
    "L3_hessian": Erratum(
        "‖H_LN‖₂ ≤ ‖X‖/σ³(1 + √(m/n)) + ‖X‖²/(√n σ³) + 3‖X‖³/(n σ⁵), σ = min_i ‖M_i‖₂",
        "‖H_LN‖₂ = √(max(2, n − 2)/n)/min_i s_i² for n ≥ 3; the printed form holds with σ = min_i s_i",
        "As L3_jacobian. The second term, ‖X‖²/σ³, also scales as 1/X where H scales as 1/X².",
    ),
    "T6_G": Erratum(
        "‖G_Q‖ ≤ ‖W_V‖‖W_K‖‖X‖³/(L √d_K), ‖G_K‖ ≤ ‖W_V‖‖W_Q‖‖X‖³/(L √d_K), ‖G_V‖ ≤ L‖X‖",
        "‖G_Q‖ ≤ ‖W_V‖‖W_K‖‖X‖³/(2√d_K), ‖G_K‖ ≤ ‖W_V‖‖W_Q‖‖X‖³/(2√d_K), ‖G_V‖ ≤ √L‖X‖",
        "N1; G_V's bound holds and can be lowered, since ‖A‖₂ ≤ √L.",
    ),
    "T6_Phi_QQ": Erratum(
        "‖Φ_QQ‖ ≤ 12/(L d_V d_K) ‖W_V‖‖W_K‖²‖X‖⁵",
        "‖Φ_QQ‖ ≤ √(2/27)/d_K ‖W_V‖‖W_K‖²‖X‖⁵",
        "Φ = ∂²F/∂W_i∂W_j has no loss factor 2/(L d_V). The 6 of N3 is generous enough to hide it while L d_V ≤ 44; "
        "beyond, two tokens with a_1 a_2 = 1/6 violate the bound, by up to L d_V √(2/27)/12.",
    ),
    "T6_Phi_VQ": Erratum(
        "‖Φ_VQ‖ ≤ 2/(L² √(d_V d_K)) ‖W_K‖‖X‖³",
        "‖Φ_VQ‖ ≤ √d_V/(2√d_K) ‖W_K‖‖X‖³",
        "The loss factor 2/(L d_V) again, and N1: too small by up to L² d_V/4. With the factor left in Φ it "
        "is still too "
        "small by L/2.",
    ),
    "T6_Phi_QK": Erratum(
        "‖Φ_QK‖ ≤ 12/(L d_V d_K) ‖W_V‖‖W_K‖‖W_Q‖‖X‖⁵ + 2/(L² √(d_V d_K)) ‖W_V‖‖X‖³",
        "‖Φ_QK‖ ≤ √(2/27)/d_K ‖W_V‖‖W_K‖‖W_Q‖‖X‖⁵ + √min(L, d_V)/(2√d_K) ‖W_V‖‖X‖³",
        "As Φ_VQ.",
    ),
    "T6_xi_21": Erratum(
        "‖ξ_21‖ ≤ √d_ff ‖W_2‖",
        "‖ξ_21‖ ≤ √d_V ‖Y‖",
        "ξ_21 = ∂B_2/∂W_1 does not contain W_2: for W_2 → 0 it stays and the bound vanishes. The printed "
        "bound is that of "
        "the printed ξ_21, whose factors do not multiply (T5_xi_21).",
    ),
    "T6_explicit": Erratum(
        "‖H_tr^(i,j)‖ ≤ ‖J_Z‖‖ξ_ij‖ + ‖B_i‖‖H_Z‖‖B_j‖ with the explicit pieces",
        "the same with the corrected pieces of L3, T6_G, T6_Phi and T6_xi_21, and ‖ξ_k1‖ ≤ √L ‖W_2‖‖J_Y‖‖G_k‖, "
        "‖ξ_k2‖ ≤ √L ‖W_1‖‖J_Y‖‖G_k‖",
        "The pair (2,1) inherits the bound of ξ_21 and fails as W_2 → 0. The bounds of (k,1) and (k,2) are "
        "not printed. "
        "The total 5 max_ij(…) survives the search: its maximum contains the pair (1,2), and each LayerNorm bound "
        "is loose by a factor that grows with L.",
    ),
    "T7_true_loss": Erratum(
        "|L_{k+1}(w) − L_k(w)| ≤ 2L/(k + 1) + M‖w − w*‖²/(k + 1), ‖H_i(w*)‖ ≤ M",
        "|L_{k+1}(w) − L_k(w)| ≤ (L + M d²)/(k + 1), d = ‖w − w*‖, with ‖H_i‖ ≤ M on the segment from w* to w; or "
        "(L + M d² + Λ d³/3)/(k + 1) with M at w* and Λ a Lipschitz constant of the Hessians; without A1 add "
        "‖∇l_{k+1}(w*) − ∇L_k(w*)‖ d/(k + 1)",
        "The proof bounds the second-order expansion, not the loss. At W_Q = W_K = 0, tokens of mean zero "
        "and the target "
        "met, loss, gradient and Hessian vanish, and the loss does not nearby. With the M that T7 takes "
        "from T1 it fails "
        "too, through the missing K–K term.",
    ),
}
"""Every bound that fails as printed. `L3` fails through its parts."""

MISPRINTS: dict[str, Erratum] = {
    "N3": Erratum(
        "‖∂²A/∂T²‖₂ = max_{i,j} ‖∂²A_ij/∂T_i∂T_i‖₂ ≤ 6, by the block-diagonal form",
        "‖∂²A/∂T²‖₂ ≤ √(2/27) ≈ 0.272, attained by two tokens with a_1 a_2 = 1/6",
        "The L blocks of one row stand above one another, not on a diagonal, so the norm is not their "
        "maximum; the bound 6 "
        "holds nevertheless, and is 22 times too large. N5 inherits the constant.",
    ),
    "N2": Erratum("‖A‖₂ ≤ L", "‖A‖₂ ≤ √L, attained when every row attends to one token", "‖A‖₂² ≤ ‖A‖₁‖A‖_∞ ≤ L · 1."),
    "N6": Erratum("S ∈ R^{d_V² × d_V}", "S ∈ R^{d_V³ × d_V}", "(I ⊗ K_{d_V,d_V}) is d_V³ × d_V³; ‖S‖₂ = √d_V exactly."),
    "P11": Erratum(
        "A ∈ R^{m×n} with blocks B_ij: ‖A‖₂ ≤ √(mn) max ‖B_ij‖₂",
        "m × n blocks: ‖A‖₂ ≤ √(mn) max ‖B_ij‖₂",
        "T1 uses it with the numbers of blocks; that stronger reading holds.",
    ),
    "T6_total_exact_norms": Erratum(
        "H_tr the full Hessian with blocks H_tr^(i,j); … + ‖R_m^tr‖‖H_tr^(i,j)‖",
        "the loss's Hessian, with blocks bounded by 2/(L d_V)(‖∂Z/∂W_i‖‖∂Z/∂W_j‖ + ‖R_m^tr‖‖H_tr^(i,j)‖)",
        "H_tr^(i,j) are the second derivatives of Z; at Z = Target the right side does not contain them. "
        "Read as the loss's "
        "Hessian the bound holds; the functional part lacks the factor 2/(L d_V) ≤ 1.",
    ),
    "T7_quadratic": Erratum(
        "2L/(k + 1) + M‖w − w*‖²/(k + 1)",
        "(L + M‖w − w*‖²)/(k + 1), attained",
        "Two numbers of [0, L] differ by at most L. The constant of M cannot be lowered.",
    ),
}
"""Slips, and constants that could be sharp, of bounds that hold."""
