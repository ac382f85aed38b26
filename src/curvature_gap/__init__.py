"""Exact Hessians of transformers; the statements of "Closing the Curvature Gap" (arXiv 2510.16927), checked.

Notation. A letter means one thing per file; this table settles the clashes.

=====================  ==========================  =====================================================
paper                  code                        meaning
=====================  ==========================  =====================================================
L (tokens)             ``L`` in theory             number of tokens, ``n_tokens`` elsewhere
L, L_k (loss)          ``loss``                    mean loss over k samples
d_V, d_K, d_ff         ``d_V``, ``d_K``, ``d_ff``  model, key and feed-forward width
X, Y, S, Z             ``X``, ``Y``, ``S``, ``Z``  block input, LN(X + F), FFN(Y) + Y, LN(S)
F, A, T                ``F``, ``A``, ``T``         attention output, attention matrix, attention logits
W_Q, W_K, W_V          ``W_Q``, ``W_K``, ``W_V``   queries, keys, values, used as ``X @ W_Q``
W_1, W_2, b_1, b_2     ``W_1`` ...                 feed-forward weights, used as ``Y @ W_1 + b_1``
gamma, beta            ``LN1_gamma``, ...          LayerNorm scale and shift; LN1 after attention, LN2 after FFN
Target                 ``target``                  regression target of the theory's loss
vec_r                  ``vec_r``                   row-major ravel
K_{m,n}                ``commutation_matrix``      the K of D3; ``K`` alone is the keys
J, H                   ``J``, ``H``                d vec_r(F)/d vec_r(X)^T, and d vec_r(J)/d vec_r(X)^T
=====================  ==========================  =====================================================

Convention: ``vec_r(A X B) = (A kron B^T) vec_r(X)``. Theory and Hessians are in float64, training is in float32.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Architecture": "architecture",
    "ViT": "vit",
    "exact_hessian": "exact_hessian",
    "Hessian": "exact_hessian",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    # Lazy: a notebook or a rule that needs no torch does not pay two seconds for it.
    if name in _PUBLIC:
        return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
