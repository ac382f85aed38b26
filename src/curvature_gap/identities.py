"""Every identity of the paper, evaluated as printed and as corrected against automatic differentiation.

`IDENTITY_CHECKS` maps an id to the function that computes its row; how a row comes about is in
`curvature_gap.identity_rows`, the statements themselves are in `identities_calculus`, `identities_attention`,
`identities_layer_norm` and `identities_block`, the printed formulas in `curvature_gap.theory`.
"""

from collections.abc import Callable
from functools import cache, partial

from curvature_gap import identities_attention, identities_block, identities_calculus, identities_layer_norm
from curvature_gap.errata import ERRATA, MISPRINTS, Erratum
from curvature_gap.identity_rows import Statement, identity, whole
from curvature_gap.statements import Row

__all__ = ["ERRATA", "IDENTITY_CHECKS", "MISPRINTS", "PARENTS", "STATEMENTS", "Erratum"]

_MODULES = (identities_calculus, identities_attention, identities_layer_norm, identities_block)

STATEMENTS: dict[str, Statement] = {id: s for module in _MODULES for id, s in module.STATEMENTS.items()}
"""Id → equations, readings and note."""

PARENTS: dict[str, tuple[str, ...]] = {
    "OP": ("OP_VV", "OP_QQ", "OP_VQ", "OP_QK"),
    "FN": ("FN_VV", "FN_QQ", "FN_VQ", "FN_QK"),
    "G": ("G_V", "G_Q", "G_K"),
    "L2": ("L2_VV", "L2_QQ", "L2_VQ", "L2_QK"),
    "T3": ("T3_sum", "T3_total", "T3_dP_kron_I", "T3_dI_kron_MT", "T3_d2P", "T3_dA1", "T3_dD"),
    "T4": ("T4_main", "T4_appendix"),
    "T5": (
        "T5_boxed",
        "T5_xi_11",
        "T5_xi_22",
        "T5_xi_12",
        "T5_xi_21",
        "T5_xi_1k",
        "T5_xi_2k",
        "T5_xi_kl",
        "T5_symmetry",
    ),
}
"""A parent's row is the worst of its parts'."""


def _checks() -> dict[str, Callable[[], Row]]:
    # Each check is a deterministic function of nothing, so a parent reuses its parts' rows.
    checks: dict[str, Callable[[], Row]] = {id: cache(partial(identity, id, s)) for id, s in STATEMENTS.items()}
    for module in _MODULES:
        checks |= {id: cache(check) for id, check in module.ROWS.items()}
    return checks | {id: cache(partial(whole, id, [checks[part] for part in parts])) for id, parts in PARENTS.items()}


IDENTITY_CHECKS: dict[str, Callable[[], Row]] = _checks()
"""Every identity id → its row. Some parts are finer than the paper's ids (`T3_sum`, `T3_total`, `T5_boxed`);
`..._supplied` are formulas the paper does not print. The bounds are in `bound_search.BOUND_CHECKS`."""
