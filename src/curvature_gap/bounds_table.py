"""`bounds.csv`: printed, corrected and tight bounds beside exact norms; the search for violations of the tight ones.

Functions take tensors and return lists of rows; writing files is the workflow's business.

Source: T1, T6.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import nan
from typing import Any, Literal

import torch
from torch import Tensor

from curvature_gap.architecture import Architecture
from curvature_gap.maps import attention, block, layer_norm, mse
from curvature_gap.shapes import Float
from curvature_gap.theory.attention_bound import attention_apriori_bounds, attention_hessian
from curvature_gap.theory.block_bound import block_apriori_bounds, block_hessian
from curvature_gap.theory.kronecker_sum import (
    KroneckerHessian,
    Pair,
    RitzPairs,
    core_bound,
    data_bounds,
    deflated_frobenius,
    frobenius,
    krylov_basis,
    leading_directions,
    norm_of_norms,
    ritz,
    ritz_on,
    top_norm,
)
from curvature_gap.theory.model_bound import model_bounds
from curvature_gap.vit import tokens

Setting = Literal["attention", "block"]
INITIALISATIONS = ("default", "xavier", "small", "large_qk")
COLUMNS = ("printed_main", "printed_appendix", "corrected", "tight_apriori", "tight_data")
PRODUCTS = 60
"""The most products with a Hessian that a row of `bound_baselines.csv` spends."""
DIRECTION_PRODUCTS = 20
"""Products with a Hessian that choose the directions of its core."""
WEIGHTS: dict[Setting, tuple[str, ...]] = {
    "attention": ("W_Q", "W_K", "W_V"),
    "block": ("W_Q", "W_K", "W_V", "W_1", "W_2"),
}


@dataclass(frozen=True)
class Regression:
    """One input of the theory's setting: tokens, weights, and the target of the mean-squared error; batchable."""

    setting: Setting
    X: Float[Tensor, "*b L d_V"]
    weights: Mapping[str, Tensor]
    target: Float[Tensor, "*b L d_V"]

    @property
    def attention_weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.weights["W_Q"], self.weights["W_K"], self.weights["W_V"]

    def hessian(self) -> KroneckerHessian:
        """The exact Hessian in Kronecker sums."""
        if self.setting == "attention":
            return attention_hessian(self.X, *self.attention_weights, self.target)
        return block_hessian(self.X, self.weights, self.target)

    def rows(self, rows: Sequence[int]) -> "Regression":
        """Return some instances of a batch."""
        weights = {name: W[rows] for name, W in self.weights.items()}
        return Regression(self.setting, self.X[rows], weights, self.target[rows])

    def apriori_bounds(self) -> dict[Pair, Tensor]:
        """Bounds on the blocks from norms alone."""
        if self.setting == "attention":
            return attention_apriori_bounds(self.X, *self.attention_weights, self.target)
        return block_apriori_bounds(self.X, self.weights, self.target)

    @cached_property
    def H(self) -> KroneckerHessian:
        """`hessian`, built once."""
        return self.hessian()

    @cached_property
    def exact_norms(self) -> dict[Any, float]:
        """The exact spectral norms of every block pair, and of the whole as "total"."""
        norms: dict[Any, float] = {pair: float(top_norm(self.H.block(pair))) for pair in self.H.terms}
        return norms | {"total": float(torch.linalg.eigvalsh(self.H.dense()).abs().max())}

    def pair_norm(self, pair: Pair) -> Tensor:
        """The exact norm of one block, 0 where its square is too small for float64 and means nothing."""
        norm = top_norm(self.H.block(pair))
        return torch.where(norm < 1e-140, 0.0, norm)

    @cached_property
    def few_products(self) -> RitzPairs:
        """Ritz pairs of six products, for small instances."""
        return ritz(self.H, 6)

    @cached_property
    def krylov(self) -> tuple[Tensor, Tensor]:
        """A Krylov basis and the Hessian times it, by `PRODUCTS` products; fewer products give its first vectors."""
        return krylov_basis(self.H, PRODUCTS)

    def ritz(self, n_products: int) -> RitzPairs:
        """The Ritz pairs after so many products."""
        Q, HQ = self.krylov
        return ritz_on(Q[..., :n_products], HQ[..., :n_products])

    @cached_property
    def data_bounds(self) -> dict[str, Tensor]:
        """The data bounds on the whole Hessian, by name."""
        return data_bounds(self.H, 3, DIRECTION_PRODUCTS, self.ritz(DIRECTION_PRODUCTS))

    def loss(self, theta: Float[Tensor, " P"], X: Tensor, target: Tensor) -> Float[Tensor, ""]:
        """The loss of one instance as a function of its weights in one vector, for autodiff."""
        shapes = [self.weights[name].shape[-2:] for name in WEIGHTS[self.setting]]
        parts = theta.split([shape.numel() for shape in shapes])
        weights = {n: p.view(s) for n, p, s in zip(WEIGHTS[self.setting], parts, shapes, strict=True)}
        if self.setting == "attention":
            return mse(attention(X, weights["W_Q"], weights["W_K"], weights["W_V"]), target)
        return mse(block(X, weights), target)

    def autodiff_hessian(self) -> Float[Tensor, "b P P"]:
        """The exact Hessians of a batch by forward over reverse differentiation: the oracle of small cases."""
        theta = torch.cat([self.weights[name].flatten(-2) for name in WEIGHTS[self.setting]], dim=-1)
        return torch.func.vmap(torch.func.hessian(self.loss))(theta, self.X, self.target)


def initial_weights(
    initialisation: str, d_V: int, d_K: int, d_ff: int, generator: torch.Generator
) -> dict[str, Float[Tensor, "m n"]]:
    """Draw the five weights: torch's U(±1/√fan_in), Xavier's uniform, N(0, 0.02²), or torch's with W_Q, W_K times 3.

    Raises:
        ValueError: If the initialisation is unknown.
    """
    if initialisation not in INITIALISATIONS:
        raise ValueError(f"Choose an initialisation among {', '.join(INITIALISATIONS)}; got {initialisation!r}.")
    shapes = {"W_Q": (d_V, d_K), "W_K": (d_V, d_K), "W_V": (d_V, d_V), "W_1": (d_V, d_ff), "W_2": (d_ff, d_V)}
    weights = {}
    for name, (rows, columns) in shapes.items():
        if initialisation == "small":
            weights[name] = 0.02 * torch.randn(rows, columns, generator=generator, dtype=torch.float64)
            continue
        uniform = 2 * torch.rand(rows, columns, generator=generator, dtype=torch.float64) - 1
        width = (6 / (rows + columns)) ** 0.5 if initialisation == "xavier" else rows**-0.5
        larger = 3 if initialisation == "large_qk" and name in ("W_Q", "W_K") else 1
        weights[name] = larger * width * uniform
    return weights


def theory_instance(
    setting: Setting, initialisation: str, seed: int, L: int = 49, d_V: int = 16, d_K: int = 16, d_ff: int = 64
) -> Regression:
    """Return the stated setting: standard normal tokens and target, weights as initialised."""
    generator = torch.Generator().manual_seed(seed)
    X, target = torch.randn(2, L, d_V, generator=generator, dtype=torch.float64)
    weights = initial_weights(initialisation, d_V, d_K, d_ff, generator)
    return Regression(setting, X, {name: weights[name] for name in WEIGHTS[setting]}, target)


# --- Rows of bounds.csv -----------------------------------------------------------------------------------------


def bound_row(run: str, stage: str, seed: int, name: str, exact: float, bounds: Mapping[str, float]) -> dict[str, Any]:
    """Return one line: exact norm, every column of `COLUMNS` (NaN where there is no such bound), and bound/exact."""
    values = {column: bounds.get(column, nan) for column in COLUMNS}
    # A ratio over zero says nothing.
    ratios = {f"ratio_{column}": value / exact if exact > 0 else nan for column, value in values.items()}
    return {"run": run, "stage": stage, "seed": seed, "block": name, "exact": exact} | values | ratios


def regression_rows(run: str, stage: str, seed: int, case: Regression) -> list[dict[str, Any]]:
    """Return the rows of one input of the theory's setting: every block pair, then the total."""
    bounds = printed_bounds(case)
    bounds["tight_apriori"] = with_total(case.H, case.apriori_bounds())
    bounds["tight_data"] = {**case.H.block_bounds(), "total": min(case.data_bounds.values())}
    return [
        bound_row(
            run,
            stage,
            seed,
            key if key == "total" else ":".join(key),
            value,
            {column: float(of_pair[key]) for column, of_pair in bounds.items() if key in of_pair},
        )
        for key, value in case.exact_norms.items()
    ]


def with_total(H: KroneckerHessian, blocks: Mapping[Pair, Tensor]) -> dict[Any, Any]:
    """Add the norm of the block bounds' matrix as `total`."""
    return {**blocks, "total": norm_of_norms(H.shapes, blocks)}


def printed_bounds(case: Regression) -> dict[str, dict[Any, Any]]:
    """Return the paper's bounds and their corrections by column, for every pair they cover and for the total.

    Attention: T1 of the main text and of the appendix, the K–K and V–K terms by symmetry. Block: T6 with its explicit
    pieces and σ_min read as the least row deviation; the appendix has no other version.
    """
    from curvature_gap.theory import printed_bounds as printed

    inputs = {"X": case.X, **case.weights}
    if case.setting == "block":
        return _printed_block_bounds(case, inputs)
    F = attention(case.X, *case.attention_weights)
    n = printed.norms_of(inputs, case.target)
    swapped = printed.exchange_query_key(n)
    rank = float(torch.linalg.matrix_rank(F - case.target))
    main, appendix = printed.attention_blocks_main, printed.attention_blocks_appendix
    versions = {
        "printed_main": (main(n), main(swapped)),
        "printed_appendix": (appendix(n, rank), appendix(swapped, rank)),
        "corrected": (printed.attention_blocks_corrected(n), printed.attention_blocks_corrected(swapped)),
    }
    return {
        column: {**_renamed(printed.with_key_blocks(own, other)), "total": printed.attention_hessian_bound(own)}
        for column, (own, other) in versions.items()
    }


def _printed_block_bounds(case: Regression, inputs: Mapping[str, Tensor]) -> dict[str, dict[Any, Any]]:
    from curvature_gap.theory import printed_bounds as printed

    U = case.X + attention(case.X, *case.attention_weights)
    Y = layer_norm(U)
    hidden = (Y @ case.weights["W_1"]).relu()
    S = Y + hidden @ case.weights["W_2"]
    residual = frobenius(layer_norm(S) - case.target)
    s_Y, s_Z = (M.std(dim=-1, correction=0).amin(-1) for M in (U, S))
    scale = 2 / case.X.shape[-2:].numel()
    columns = {}
    # As printed the functional part lacks the loss's factor.
    for column, pieces, functional in (
        ("printed_main", printed.explicit_block_norms_printed, 1.0),
        ("corrected", printed.explicit_block_norms_corrected, scale),
    ):
        norms = pieces(printed.norms_of(inputs, case.target), top_norm(hidden), s_Y, s_Z)
        pairs = {
            (i, j): scale * norms.J_Z**2 * norms.B[i] * norms.B[j] + functional * residual * second
            for (i, j), second in norms.second_derivatives().items()
        }
        columns[column] = {**_renamed(pairs), "total": norms.loss_hessian(residual, scale, functional)}
    return columns


def _renamed(blocks: Mapping[Pair, Any]) -> dict[Any, Any]:
    """Name weights W_Q, ... for Q, ..., both orders of a pair."""
    named = {(f"W_{i}", f"W_{j}"): value for (i, j), value in blocks.items()}
    return {(j, i): value for (i, j), value in named.items()} | named


@dataclass(frozen=True)
class TheoryCase:
    """The stated setting at one initialisation and seed."""

    setting: Setting
    initialisation: str
    seed: int
    case: Regression


def theory_cases(seeds: Iterable[int] = (0, 1), **sizes: int) -> list[TheoryCase]:
    """Return the stated setting, of the sizes that `theory_instance` takes, at the four initialisations."""
    return [
        TheoryCase(setting, initialisation, seed, theory_instance(setting, initialisation, seed, **sizes))
        for setting in WEIGHTS
        for initialisation in INITIALISATIONS
        for seed in seeds
    ]


def theory_rows(cases: Iterable[TheoryCase]) -> list[dict[str, Any]]:
    """Return the rows of the stated setting, runs `theory_<setting>_<init>_seed<k>`."""
    return [
        row
        for c in cases
        for row in regression_rows(f"theory_{c.setting}_{c.initialisation}_seed{c.seed}", "init", c.seed, c.case)
    ]


def checkpoint_case(
    setting: Setting, parameters: Mapping[str, Tensor], image: Tensor, architecture: Architecture, seed: int
) -> Regression:
    """Return the theory's setting on one image's token embeddings and a checkpoint's weights.

    W_V W_O takes W_V's place, for the theory has no output projection and F only sees the product; LayerNorm's scale
    and shift are left out as the theory has none. The target is standard normal.

    Raises:
        ValueError: If the architecture is not the theory's: one block, one head, post-norm, ReLU, no biases, no mask.
    """
    a = architecture
    theory = (a.depth, a.heads, a.norm, a.mask, a.activation, a.bias) == (1, 1, "post", "none", "relu", False)
    if not theory:
        raise ValueError(f"The theory covers one bias-free post-norm block with one head and ReLU; got {a}.")
    parameters = {name: p.detach().double() for name, p in parameters.items()}
    X = tokens(parameters, image[None].double(), architecture)[0]
    target = torch.randn(X.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weights = {name: parameters[name] for name in WEIGHTS[setting]}
    if a.output_projection:
        weights["W_V"] = parameters["W_V"] @ parameters["W_O"]
    return Regression(setting, X, weights, target)


def checkpoint_rows(
    run: str, stage: str, seed: int, parameters: Mapping[str, Tensor], image: Tensor, architecture: Architecture
) -> list[dict[str, Any]]:
    """Return the rows of a checkpoint in the theory's setting on one image: runs `<run>_attention`, `<run>_block`."""
    return [
        row
        for setting in WEIGHTS
        for row in regression_rows(
            f"{run}_{setting}", stage, seed, checkpoint_case(setting, parameters, image, architecture, seed)
        )
    ]


def model_rows(
    run: str,
    stage: str,
    seed: int,
    parameters: Mapping[str, Tensor],
    images: Tensor,
    labels: Tensor,
    architecture: Architecture,
    exact: Mapping[Any, float],
) -> list[dict[str, Any]]:
    """Return the rows of the pipeline's own model on one batch: every block pair, then the total.

    The paper has no bound for it, nor is there an a priori one: only `tight_data` is filled.

    Args:
        exact: The exact spectral norms, by pair (row before column) and "total", as `exact_block_norms` gives them.
    """
    bounds = model_bounds(parameters, images, labels, architecture)
    tight: dict[Any, float] = {**bounds.blocks, "total": bounds.total}
    return [
        bound_row(run, stage, seed, key if key == "total" else ":".join(key), exact[key], {"tight_data": value})
        for key, value in tight.items()
    ]


def exact_block_norms(H: Float[Tensor, "P P"], names: Iterable[str], offsets: Iterable[int]) -> dict[Any, float]:
    """Return the spectral norms of every block pair (row before column) and of the whole symmetric matrix.

    `names` and `offsets` are those of a stored Hessian: block k covers rows `offsets[k]` to `offsets[k + 1]`.
    """
    names, ends = list(names), [int(offset) for offset in offsets]
    at = {name: slice(start, end) for name, start, end in zip(names, ends[:-1], ends[1:], strict=True)}
    pairs = [(b, c) for i, b in enumerate(names) for c in names[i:]]
    norms: dict[Any, float] = {(b, c): float(top_norm(H[at[b], at[c]])) for b, c in pairs}
    return norms | {"total": float(torch.linalg.eigvalsh(H).abs().max())}


def baseline_rows(cases: Iterable[TheoryCase], n_products: Iterable[int] = (10, 20, 40, 60)) -> list[dict[str, Any]]:
    """Return what stands beside the tight bounds in the stated setting, as multiples of the exact norm.

    `floor` is the least any bound from exact block norms can give, `block_norms` the bound without products with the
    Hessian, `core_r<k>` with k directions a weight taken out, `lanczos_<m>` the lower estimate after m products.
    """
    rows = []
    for c in cases:
        case, H = c.case, c.case.H
        exact = case.exact_norms["total"]
        pairs = case.ritz(DIRECTION_PRODUCTS)
        norms = {pair: torch.tensor(case.exact_norms[pair], dtype=torch.float64) for pair in H.terms}
        values = {
            "floor": norm_of_norms(H.shapes, norms),
            "block_norms": case.data_bounds["block_norms"],
            "tight_apriori": norm_of_norms(H.shapes, case.apriori_bounds()),
        }
        values |= {f"core_r{r}": core_bound(H, leading_directions(H, r, pairs)) for r in (1, 2)}
        values |= {"core_r3": case.data_bounds["core"]}
        values |= {f"lanczos_{m}": case.ritz(m).theta.abs().amax(-1) for m in n_products}
        row = {"setting": c.setting, "initialisation": c.initialisation, "seed": c.seed, "exact": exact}
        rows.append(row | {name: float(value / exact) for name, value in values.items()})
    return rows


# --- Validation -------------------------------------------------------------------------------------------------

BATCH = 1000
"""Instances evaluated at a time."""
SMALL = {"L": 5, "d_V": 3, "d_K": 2, "d_ff": 7}


def drawn_cases(setting: Setting, n: int, generator: torch.Generator) -> Regression:
    """Draw n small instances, random ones at many scales and structured ones, of uneven sizes."""
    from curvature_gap.bound_instances import Sizes, draw_instances

    draw = draw_instances(Sizes(**SMALL), n, generator)
    weights = {name: draw[name] for name in WEIGHTS[setting]}
    X = draw["X"]
    plain = attention(X, weights["W_Q"], weights["W_K"], weights["W_V"])
    output = block(X, weights) if setting == "block" else plain
    return Regression(setting, X, weights, output - draw["residual"])


KINDS = ("tight_apriori", "block_norms", "deflated_frobenius", "core")
"""The tight bounds; the first two also bound every block pair."""


def attained_ratios(
    case: Regression, exact: Tensor | None = None, kinds: Iterable[str] = KINDS
) -> dict[str, Float[Tensor, " b"]]:
    """Return exact/bound of a batch for tight bounds: in total and, where they bound blocks, for every block pair.

    `exact` is the total's exact norm where another method knows it. 0/0 counts as 0 (nothing to bound).
    """
    H = case.H
    total = top_norm(H.dense())
    # Two methods must agree that a bound is exceeded: on extreme inputs each has its own rounding.
    exact = total if exact is None else torch.minimum(exact, total)
    ratios = {}
    for kind in kinds:
        if kind in ("tight_apriori", "block_norms"):
            blocks = case.apriori_bounds() if kind == "tight_apriori" else H.block_bounds()
            ratios[kind] = exact / norm_of_norms(H.shapes, blocks)
            ratios |= {f"{kind} {':'.join(pair)}": case.pair_norm(pair) / blocks[pair] for pair in H.terms}
        elif kind == "deflated_frobenius":
            ratios[kind] = exact / deflated_frobenius(H, pairs=case.few_products)
        else:
            ratios[kind] = exact / core_bound(H, leading_directions(H, 1, case.few_products))
    return {name: ratio.nan_to_num(nan=0.0, posinf=float("inf")) for name, ratio in ratios.items()}


def moved(case: Regression, generator: torch.Generator) -> Regression:
    """Return every instance of a batch with a random step: noise of a random size, and now and then a new scale."""
    b = case.X.shape[0]

    def draw(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(b, 1, 1, generator=generator, dtype=torch.float64)

    def step(M: Tensor) -> Tensor:
        size = M.square().mean((-1, -2), keepdim=True).sqrt() * 10 ** draw(-3.0, 0.3) * (draw(0.0, 1.0) < 0.5)
        scale = torch.where(draw(0.0, 1.0) < 0.2, 10 ** draw(-0.5, 0.5), 1.0)
        return scale * (M + size * torch.randn(M.shape, generator=generator, dtype=M.dtype))

    weights = {name: step(W) for name, W in case.weights.items()}
    return Regression(case.setting, step(case.X), weights, step(case.target))


def climb(case: Regression, own: Sequence[str], steps: int, generator: torch.Generator) -> dict[str, float]:
    """Climb on exact/bound by accepted random steps; return the largest ratios met.

    Args:
        own: The ratio that each instance of the batch climbs on, all of one of `KINDS`.
    """
    kinds = {name.split(" ")[0] for name in own}
    ratios = attained_ratios(case, kinds=kinds)
    worst = {name: ratio.max().item() for name, ratio in ratios.items()}
    place = torch.tensor([list(ratios).index(name) for name in own])

    def of_own(ratios: Mapping[str, Tensor]) -> Tensor:
        return torch.stack(list(ratios.values()))[place, torch.arange(len(own))]

    best = of_own(ratios)
    for _ in range(steps):
        trial = moved(case, generator)
        ratios = attained_ratios(trial, kinds=kinds)
        worst = {name: max(worst[name], ratio.max().item()) for name, ratio in ratios.items()}
        better = of_own(ratios) > best
        best = torch.where(better, of_own(ratios), best)
        take = better[:, None, None]
        weights = {name: torch.where(take, trial.weights[name], W) for name, W in case.weights.items()}
        X, target = torch.where(take, trial.X, case.X), torch.where(take, trial.target, case.target)
        case = Regression(case.setting, X, weights, target)
    return worst


def climb_all(case: Regression, names: Sequence[str], steps: int, generator: torch.Generator) -> dict[str, float]:
    """Let the instances of a batch climb on the ratios `names` in turn; only an instance's own kind is computed."""
    own = [names[k % len(names)] for k in range(case.X.shape[0])]
    worst: dict[str, float] = {}
    for kind in KINDS:
        rows = [k for k, name in enumerate(own) if name.split(" ")[0] == kind]
        if rows:
            worst |= climb(case.rows(rows), [own[k] for k in rows], steps, generator)
    return worst


def validate_bounds(
    n_instances: int, ascents: int, seed: int, steps: int = 100, settings: Iterable[Setting] = ("attention", "block")
) -> list[dict[str, Any]]:
    """Search for an input above a tight bound: random and structured instances, then hill-climbs from new ones.

    Returns one row a setting and bound: `setting, bound, n_instances, ascents, steps, worst_random, worst_ascent,
    violated`; pairs of one kind are pooled as `<bound> blocks`. A bound counts as violated beyond 1 + 1e-9.

    Raises:
        ValueError: If a budget is not positive.
    """
    for name, value in (("n_instances", n_instances), ("ascents", ascents), ("steps", steps)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    rows = []
    for setting in settings:
        generator = torch.Generator().manual_seed(seed)
        random: dict[str, float] = {}
        for start in range(0, n_instances, BATCH):
            case = drawn_cases(setting, min(BATCH, n_instances - start), generator)
            found = attained_ratios(case, top_norm(case.autodiff_hessian()))
            random = {name: max(random.get(name, 0.0), ratio.max().item()) for name, ratio in found.items()}
        climbed = climb_all(drawn_cases(setting, ascents, generator), list(random), steps, generator)
        for bound in dict.fromkeys(name.split(" ")[0] + " blocks" * (" " in name) for name in random):
            names = [n for n in random if n.split(" ")[0] + " blocks" * (" " in n) == bound]
            worst_random = max(random[n] for n in names)
            worst_ascent = max((climbed[n] for n in names if n in climbed), default=nan)
            rows.append(
                {
                    "setting": setting,
                    "bound": bound,
                    "n_instances": n_instances,
                    "ascents": ascents,
                    "steps": steps,
                    "worst_random": worst_random,
                    "worst_ascent": worst_ascent,
                    "violated": max(worst_random, worst_ascent) > 1 + 1e-9,
                }
            )
    return rows
