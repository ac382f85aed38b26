"""The exact loss Hessian of the post-norm one-block ViT in closed form.

For the mean loss over the batch, with m the pooled features and o the logits of a sample,

    H = Σ_samples (∂o)ᵀ Λ ∂o + Σ_samples residual · ∂²o.

The first part is one product of a (samples x classes, P) matrix with itself. In the second every block is a sum over
tokens of (matrix ⊗ vector) pairs, hence one matrix product with inner size "number of tokens"; `token_curvature` has
the per-token matrices and `group_curvature` says which of them meet in which block. Nothing of size
tokens x width x P is ever formed.

Queries and keys enter through B = W_Q W_Kᵀ / √d_K alone, values and output projection through C = W_V W_O Q, so blocks
are computed for B and C (`block_requests` lists these groups) and the chain rule leads back to the weights. B and C are
bilinear: ∂²loss/∂W_Q∂W_K has the extra term ∂loss/∂B ⊗ I / √d_K, and W_V, W_O likewise.

Source: GN1, GN2, L2, T4, T5, for cross-entropy or mean squared error of the logits.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from curvature_gap.architecture import Architecture, parameter_shapes
from curvature_gap.block_requests import ATTENTION, HEAD, Pair, Plan, Request, Span, plan_of, requests
from curvature_gap.group_curvature import (
    Chunk,
    add_gradients,
    add_moved_layers,
    add_moved_products,
    add_pairs,
    pooled_jacobian,
)
from curvature_gap.shapes import Float
from curvature_gap.token_curvature import Weights, attention_curvature, feed_forward_curvature, forward, with_ones
from curvature_gap.token_sums import Sums, add_terms, aligned_zeros, strips

LOSSES = ("cross_entropy", "mse")
TOKENS_PER_CHUNK = 784
"""A chunk's operands should fit the cache; larger and smaller chunks were slower."""


def covers(architecture: Architecture, loss: str) -> bool:
    """Return whether the closed form holds for this model and loss; everything else is left to autodiff."""
    a = architecture
    kind = (a.depth, a.heads, a.norm, a.mask, a.activation)
    return loss in LOSSES and kind == (1, 1, "post", "none", "relu")


# ----------------------------------------------------------------------------------------------------- logits and loss


def loss_derivatives(
    logits: Float[Tensor, "n c"], targets: Tensor, loss: str, n_samples: int
) -> tuple[Float[Tensor, "n c"], Float[Tensor, "n c r"]]:
    """Return the gradient of the mean loss by the logits, and G with G Gᵀ its Hessian.

    Cross-entropy: diag(π) − π πᵀ = diag(√π) (I − √π √πᵀ) diag(√π). The projection has rank c − 1; its factor is the
    Householder reflection that sends √π to the last axis, without its last column.
    """
    n, c = logits.shape
    identity = torch.eye(c, dtype=logits.dtype, device=logits.device)
    if loss == "mse":
        scale = 2 / (n_samples * c)
        return scale * (logits - targets), scale**0.5 * identity.expand(n, c, c)
    p = logits.softmax(dim=-1)
    root = p.sqrt()
    reflected = identity - (root[:, :, None] + identity[:, -1:]) * (root / (1 + root[:, -1:]))[:, None, :]
    G = root[:, :, None] * reflected[:, :, :-1] / n_samples**0.5
    return (p - torch.nn.functional.one_hot(targets, c)) / n_samples, G


@dataclass(frozen=True)
class Head:
    """What LN2's scale and shift and the classifier see of a chunk."""

    s_hat: Float[Tensor, "n k"]
    """Mean over tokens of LN2's output before scale and shift."""
    residual: Float[Tensor, "n c"]
    G: Float[Tensor, "n c r"]


def logits_of(w: Weights, s_hat: Float[Tensor, "n k"]) -> Float[Tensor, "n c"]:
    """Return the logits: pooling commutes with LN2's scale and shift."""
    logits = (s_hat * w["LN2_gamma"] + w["LN2_beta"]) @ w["classifier"]
    return logits + w["classifier_bias"] if w.architecture.bias else logits


def head_jacobian(w: Weights, head: Head, group: str) -> Float[Tensor, "n c l t"]:
    """Return ∂logits/∂group for LN2 and the classifier."""
    n, c = head.residual.shape
    W = w["classifier"].T
    if group == "LN2":
        return torch.stack([head.s_hat[:, None, :] * W, W.expand(n, -1, -1)], dim=2)
    m = with_ones(head.s_hat * w["LN2_gamma"] + w["LN2_beta"], w.architecture.bias)
    return torch.einsum("bk,co->bcko", m, torch.eye(c, dtype=W.dtype, device=W.device))


def add_below_head(sums: dict, w: Weights, head: Head, pair: Pair, J: Float[Tensor, "n k x"]) -> None:
    """Add residual · ∂²logits for a group below: logits are products of ŝ with LN2_gamma and the classifier."""
    if pair[1] == "LN2":
        term = torch.einsum("bk,bkx->xk", head.residual @ w["classifier"].T, J)
    else:
        term = torch.einsum("bo,bkx->xko", head.residual, J) * w["LN2_gamma"][:, None]
    sums[pair] = sums[pair] + term if pair in sums else term


def add_within_head(sums: dict, head: Head) -> None:
    """Add residual · ∂²logits for (gamma, beta) and the classifier, at equal features."""
    by_gamma = torch.einsum("bo,bk->ko", head.residual, head.s_hat)
    term = torch.stack([by_gamma, head.residual.sum(dim=0).expand_as(by_gamma)])
    pair = ("LN2", "classifier")
    sums[pair] = sums[pair] + term if pair in sums else term


def add_head(block: Float[Tensor, "l t m u"], pair: Pair, sums: dict) -> None:
    """Add these terms to a block. LN2_beta and classifier_bias have none: they are summands."""
    if pair not in sums:
        return
    if pair == ("LN2", "classifier"):
        same_feature = block[:, :, : block.shape[1]].diagonal(dim1=1, dim2=2)
        same_feature += sums[pair].transpose(1, 2)
    elif pair[1] == "LN2":
        block[:, :, 0] += sums[pair].view_as(block[:, :, 0])
    else:
        inside = block[:, :, : sums[pair].shape[1]]
        inside += sums[pair].view_as(inside)


# -------------------------------------------------------------------------------------------------- sums over chunks


@dataclass
class State:
    """Everything summed over chunks, and the factor of the first part."""

    sums: Sums = field(default_factory=Sums)
    plain: dict = field(default_factory=dict)
    roots: dict[str, list[Tensor]] = field(default_factory=dict)
    """By group, chunk by chunk: Gᵀ ∂o, one row per sample and column of G."""


def add_chunk(state: State, plan: Plan, w: Weights, images: Tensor, targets: Tensor, loss: str, n_samples: int) -> None:
    """Add some of the batch's `n_samples` samples."""
    t = forward(w, images)
    n, L, d = t.X.shape
    s_hat = t.s_hat.reshape(n, L, d).mean(dim=1)
    head = Head(s_hat, *loss_derivatives(logits_of(w, s_hat), targets, loss, n_samples))
    s_to_logits = w["LN2_gamma"][:, None] * w["classifier"]
    ff = feed_forward_curvature(w, t, (head.residual @ s_to_logits.T / L).repeat_interleave(L, dim=0))
    attends = any(group in ATTENTION for group in plan.jacobians)
    att = attention_curvature(w, t, ff.R_bar, "E" in plan.jacobians) if attends else None
    chunk = Chunk(w, t, ff, att)
    add_pairs(state.sums, chunk, plan)
    add_gradients(state.plain, chunk)
    for group, span in plan.jacobians.items():
        if group in HEAD:
            root = head.G.mT @ head_jacobian(w, head, group).flatten(2)
        else:
            J = pooled_jacobian(chunk, group, span)
            root = (s_to_logits @ head.G).mT @ J.flatten(2)
            for other in HEAD:
                if (group, other) in plan.pairs:
                    # The pair's own span: another pair of this group can ask for more.
                    leading, trailing = plan.pairs[group, other][0].within(span)
                    add_below_head(state.plain, w, head, (group, other), J[:, :, leading, trailing].flatten(2))
        state.roots.setdefault(group, []).append(root.flatten(0, 1))
    if ("LN2", "classifier") in plan.pairs:
        add_within_head(state.plain, head)


def group_block(state: State, plan: Plan, w: Weights, pair: Pair) -> Float[Tensor, "l t m u"]:
    """Return the finished block of a group pair."""
    spans = plan.pairs[pair]
    left, right = (root_of(state, plan, group, span).flatten(1) for group, span in zip(pair, spans, strict=True))
    if pair[0] == pair[1] and spans[0] == spans[1]:
        product = gram(left)
    else:
        product = aligned_zeros(left, left.shape[1], right.shape[1]).addmm_(left.T, right)
    block = product.view(*spans[0].shape, *spans[1].shape)
    terms = state.sums.derived(pair) if plan.derives(pair) else state.sums.finished(pair)
    add_terms(block, terms, pair, w.maps)
    if not plan.inputs_make_tokens:
        state.sums.forget(pair)
    if pair[1] in HEAD:
        add_head(block, pair, state.plain)
    elif pair[1] in ATTENTION:
        add_moved_products(block, pair, spans, w, state.plain["z_T_z"], state.plain["z_A_R"])
    elif pair[0] not in ATTENTION:
        d, f = w["W_1"].shape
        add_moved_layers(block, pair, spans, w, state.plain["r_S_D"].view(d + 1, d - 1, f))
    return block


def gram(root: Float[Tensor, "x n"]) -> Float[Tensor, "n n"]:
    """Return rootᵀ root, computed on and above the diagonal, strip by strip."""
    n = root.shape[1]
    product = aligned_zeros(root, n, n)
    for rows, columns in strips(n):
        strip = root[:, rows].T @ root[:, columns]
        product[columns, rows] = strip.T
        product[rows, columns] = strip
    return product


def root_of(state: State, plan: Plan, group: str, span: Span) -> Float[Tensor, "x l t"]:
    """Return Gᵀ ∂o for a span of a group."""
    outer_span = plan.jacobians[group]
    if len(state.roots[group]) > 1:
        state.roots[group] = [torch.cat(state.roots[group])]
    whole = state.roots[group][0]
    leading, trailing = span.within(outer_span)
    return whole.view(len(whole), *outer_span.shape)[:, leading, trailing]


# ------------------------------------------------------------------------------------------------- back to the weights


def to_weight(
    block: Float[Tensor, "l t x"], name: str, w: Weights, span: Span, outer_span: Span
) -> Float[Tensor, "y x"]:
    """Return a parameter's rows from its group's: the chain rule through B and C, the rows themselves elsewhere."""
    leading, trailing = span.within(outer_span)
    rows = block[leading, trailing]
    if name == "W_Q":
        rows = w.temperature * torch.einsum("ckx,ki->cix", rows, w["W_K"])
    elif name == "W_K":
        rows = w.temperature * torch.einsum("ckx,ci->kix", rows, w["W_Q"])
    elif name == "W_V":
        rows = torch.einsum("eax,ja->ejx", rows, w["W_O"] @ w.Q if w.architecture.output_projection else w.Q)
    elif name == "W_O":
        rows = torch.einsum("eax,ej,ba->jbx", rows, w["W_V"], w.Q)
    elif name in ("W_2", "b_2"):
        rows = torch.einsum("eax,ja->ejx", rows, w.Q)
    return rows.flatten(0, 1)


def both_factors(request: Request, w: Weights, plain: dict) -> Float[Tensor, "y x"] | None:
    """Return the term in which both factors of B, or of C, move at once."""
    d = w.architecture.d_V
    if (request.row, request.column) == ("W_Q", "W_K"):
        gradient, width = w.temperature * plain["z_T_z"][:d, :d], w["W_Q"].shape[1]
        term = torch.einsum("ck,ij->cikj", gradient[request.row_span.leading], torch.eye(width).to(gradient))
    elif (request.row, request.column) == ("W_V", "W_O"):
        gradient = plain["z_A_R"][:d] @ w.Q.T
        term = torch.einsum("ea,ij->eija", gradient[request.row_span.leading], torch.eye(d).to(gradient))
    else:
        return None
    return term.flatten(2).flatten(0, 1)


def weight_block(
    block: Float[Tensor, "l t m u"], request: Request, spans: tuple[Span, Span], w: Weights, plain: dict
) -> Float[Tensor, "y x"]:
    """Return a requested block from its group pair's."""
    half = to_weight(block.flatten(2), request.row, w, request.row_span, spans[0])[request.rows]
    half = half.T.reshape(*block.shape[2:], -1)
    value = to_weight(half, request.column, w, request.column_span, spans[1]).T
    term = both_factors(request, w, plain)
    return value if term is None else value + term[request.rows]


# ----------------------------------------------------------------------------------------------------------- interface


def closed_form_blocks(
    parameters: Mapping[str, Tensor],
    images: Float[Tensor, "b c s s"],
    targets: Tensor,
    architecture: Architecture,
    *,
    loss: str = "cross_entropy",
    pairs: Iterable[Pair] | None = None,
    rows: Mapping[Pair, slice] | None = None,
    out: Callable[[str, str], Tensor] | None = None,
    tokens_per_chunk: int = TOKENS_PER_CHUNK,
) -> dict[Pair, Tensor]:
    """Return blocks of the exact Hessian of the mean loss, computing no more than they need.

    Everything runs in the dtype and on the device of `parameters` and `images`, which must agree; the number of
    threads is the caller's. The result is the same, bit for bit, for the same request, chunk and threads.

    Args:
        parameters: By name, as in `parameter_shapes`.
        images: The batch.
        targets: Labels (b,) for "cross_entropy"; real targets (b, classes) for "mse", whose loss is the mean over
            batch and classes of (logits − targets)².
        architecture: One block, one head, post-norm, ReLU, no mask.
        loss: "cross_entropy" or "mse".
        pairs: Wanted (row, column) blocks, row not after column in the order of `parameter_shapes`; None means the
            whole upper triangle.
        rows: A range of rows for some of the pairs, to cut large blocks into tiles. A tile of a weight's rows costs
            its share of the block and the per-token work again; only tiles of W_O cost the whole block (C mixes all).
        out: Returns the tensor a block is written into; without it, blocks are new tensors.
        tokens_per_chunk: About how many tokens are worked on at a time; memory grows with it, results do not depend
            on it but for rounding.

    Returns:
        (row, column) → block, of size (parameters of row, parameters of column), in the order asked for.

    Raises:
        ValueError: If the architecture or the loss is not covered, or a block or a range of rows does not exist.
    """
    if not covers(architecture, loss):
        raise ValueError(f"no closed form for loss {loss!r} and {architecture}; use the autodiff engine.")
    wanted = requests(architecture, pairs, rows)
    plan = plan_of(wanted, architecture)
    w, state = Weights({name: p.detach() for name, p in parameters.items()}, architecture), State()
    n = max(1, tokens_per_chunk // architecture.n_tokens)
    blocks: dict[Pair, Tensor] = {}
    with torch.no_grad():
        for some, their_targets in zip(images.split(n), targets.split(n), strict=True):
            add_chunk(state, plan, w, some, their_targets, loss, len(images))
        for pair, spans in plan.pairs.items():
            block = group_block(state, plan, w, pair)
            for request in wanted:
                if request.groups == pair:
                    value = weight_block(block, request, spans, w, state.plain)
                    name = (request.row, request.column)
                    blocks[name] = value.contiguous() if out is None else out(*name).copy_(value)
    return {(request.row, request.column): blocks[request.row, request.column] for request in wanted}


def closed_form_hessian(
    parameters: Mapping[str, Tensor],
    images: Float[Tensor, "b c s s"],
    targets: Tensor,
    architecture: Architecture,
    *,
    loss: str = "cross_entropy",
    tokens_per_chunk: int = TOKENS_PER_CHUNK,
) -> Float[Tensor, "P P"]:
    """Return the whole Hessian of the mean loss, rows in the order of `parameter_shapes`.

    Blocks are written straight into the matrix. Raises as `closed_form_blocks` does.
    """
    where, start = {}, 0
    for name, shape in parameter_shapes(architecture).items():
        where[name] = slice(start, start + prod(shape))
        start += prod(shape)
    H = torch.empty(start, start, dtype=images.dtype, device=images.device)
    closed_form_blocks(
        parameters,
        images,
        targets,
        architecture,
        loss=loss,
        out=lambda row, column: H[where[row], where[column]],
        tokens_per_chunk=tokens_per_chunk,
    )
    for i, row in enumerate(where):
        for column in list(where)[i + 1 :]:
            H[where[column], where[row]] = H[where[row], where[column]].T
    return H
