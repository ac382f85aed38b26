"""How an identity of the paper becomes a row: random instances, the printed side, the oracle, and our form.

The oracle is automatic differentiation of the forward maps, which knows nothing of matrix calculus. Verdicts are
computed: a printed formula whose factors do not fit raises ShapeMismatchError, and that alone is caught.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import isnan, nan
from typing import Literal

import torch
from torch import Tensor

from curvature_gap import maps
from curvature_gap.matrix_calculus import ShapeMismatchError, autodiff_hessian, autodiff_jacobian
from curvature_gap.statements import AS_PRINTED_ORDER, AsPrinted, Row, worst
from curvature_gap.theory import block

TOLERANCE = 1e-10
"""Largest error, relative to the oracle's largest entry, that counts as rounding in float64."""

UNEVEN_SIZES = ((2, 3, 5, 7), (3, 5, 2, 7), (5, 3, 7, 2), (3, 7, 5, 2))
"""(L, d_V, d_K, d_ff), all different. d_V ≥ 3: LayerNorm of two features is constant, so errors would be 0/0."""

EQUAL_SIZES = ((3, 3, 3, 3), (4, 4, 4, 4))

Formula = Callable[["Instance"], Tensor]


@dataclass(frozen=True)
class Instance:
    """Random weights of one block at one set of sizes, standard normal, in float64."""

    L: int
    d_V: int
    d_K: int
    d_ff: int
    X: Tensor
    weights: Mapping[str, Tensor]
    target: Tensor
    C: Tensor
    """A d_K × d_ff matrix, for products of four different sizes."""

    @property
    def sizes(self) -> str:
        return f"L={self.L} d_V={self.d_V} d_K={self.d_K} d_ff={self.d_ff}"

    @property
    def equal_sizes(self) -> bool:
        return self.L == self.d_V == self.d_K == self.d_ff

    @property
    def attention(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """X, W_Q, W_K, W_V."""
        return self.X, self.weights["W_Q"], self.weights["W_K"], self.weights["W_V"]

    @property
    def block(self) -> block.Block:
        return block.Block(self.X, self.weights)


@cache
def instance(L: int, d_V: int, d_K: int, d_ff: int, seed: int = 0) -> Instance:
    """Return the instance of these sizes and this seed."""
    generator = torch.Generator().manual_seed(seed)

    def randn(m: int, n: int) -> Tensor:
        return torch.randn(m, n, generator=generator, dtype=torch.float64)

    X = randn(L, d_V)
    weights = {"W_Q": randn(d_V, d_K), "W_K": randn(d_V, d_K), "W_V": randn(d_V, d_V)}
    weights |= {"W_1": randn(d_V, d_ff), "W_2": randn(d_ff, d_V)}
    return Instance(L, d_V, d_K, d_ff, X, weights, target=randn(L, d_V), C=randn(d_K, d_ff))


def instances() -> list[Instance]:
    """Return the instances every identity is checked on: uneven sizes first, then equal ones."""
    return [instance(*sizes) for sizes in UNEVEN_SIZES + EQUAL_SIZES]


@dataclass(frozen=True)
class Equation:
    """One equation of a statement: the printed side, the true value, and our forms of it (checked as well)."""

    part: str
    printed: Formula
    oracle: Formula
    ours: tuple[Formula, ...]


@dataclass(frozen=True)
class Outcome:
    """What one equation gave on one instance."""

    verdict: AsPrinted
    error: float
    error_ours: float
    witness: str
    equal_sizes: bool


def relative_error(value: Tensor, oracle: Tensor) -> float:
    """Return max |value − oracle| over the oracle's largest entry; the absolute error where the oracle is zero.

    Raises:
        ShapeMismatchError: If the shapes differ.
    """
    if value.shape != oracle.shape:
        shapes = " where ".join("×".join(map(str, t.shape)) for t in (value, oracle))
        raise ShapeMismatchError(f"result is {shapes} is needed")
    if oracle.numel() == 0:
        return 0.0
    scale = oracle.abs().max().item()
    return (value - oracle).abs().max().item() / (scale if scale > 0 else 1.0)


def outcome(equation: Equation, case: Instance) -> Outcome:
    """Evaluate one equation on one instance."""
    oracle = equation.oracle(case)
    error_ours = max((relative_error(form(case), oracle) for form in equation.ours), default=nan)
    where = f"{equation.part}, {case.sizes}" if equation.part else case.sizes
    try:
        error = relative_error(equation.printed(case), oracle)
    except ShapeMismatchError as mismatch:
        return Outcome("shape_error", nan, error_ours, f"{where}: {mismatch}", case.equal_sizes)
    verdict: AsPrinted = "holds" if error <= TOLERANCE else "wrong"
    return Outcome(verdict, error, error_ours, f"{where}: relative error {error:.2g}", case.equal_sizes)


@dataclass(frozen=True)
class Statement:
    """An identity of the paper.

    `reading` names how `equations` read the print where it can be read in several ways; `other_readings` are the rest,
    and the most favourable one counts. `remarks` are evaluated for the note alone.
    """

    equations: Sequence[Equation]
    note: str = ""
    reading: str = ""
    other_readings: Mapping[str, Sequence[Equation]] = field(default_factory=dict)
    remarks: Mapping[str, Sequence[Equation]] = field(default_factory=dict)


def identity(id: str, statement: Statement) -> Row:
    """Return the row of an identity: of its most favourable reading, the worst verdict over equations and instances.

    The note ends with the other readings' verdicts and, where the statement fails, with what equal sizes give: many
    slips show only at different ones.
    """
    readings = {statement.reading: statement.equations, **statement.other_readings}
    rows = {reading: _row(id, equations) for reading, equations in readings.items()}
    best = min(rows, key=lambda r: (AS_PRINTED_ORDER.index(rows[r].as_printed), rows[r].max_rel_error_printed))
    sentences = [statement.note]
    sentences += [f"{remark}: {in_words(_row(id, equations))}." for remark, equations in statement.remarks.items()]
    if statement.other_readings:
        others = "; ".join(f"{reading}: {in_words(row)}" for reading, row in rows.items() if reading != best)
        sentences.append(f"Read as: {best}. Other readings: {others}.")
    return replace(rows[best], note=" ".join([*sentences, rows[best].note]).strip())


def _row(id: str, equations: Sequence[Equation]) -> Row:
    outcomes = [outcome(equation, case) for case in instances() for equation in equations]
    verdict = worst([o.verdict for o in outcomes])
    deciding = max((o for o in outcomes if o.verdict == verdict), key=lambda o: 0.0 if isnan(o.error) else o.error)
    error_ours = _largest([o.error_ours for o in outcomes])
    return Row(
        id=id,
        kind="identity",
        as_printed=verdict,
        corrected=_corrected(verdict, error_ours),
        max_rel_error_printed=_largest([o.error for o in outcomes]),
        max_rel_error_corrected=error_ours,
        witness=deciding.witness,
        n_cases=len(outcomes),
        note="" if verdict == "holds" else f"At equal sizes: {_summary([o for o in outcomes if o.equal_sizes])}.",
    )


def _summary(outcomes: list[Outcome]) -> str:
    verdict = worst([o.verdict for o in outcomes])
    error = _largest([o.error for o in outcomes])
    return {"holds": "holds", "wrong": f"wrong by {error:.2g}"}.get(verdict, verdict.replace("_", " "))


def _corrected(verdict: AsPrinted, error_ours: float) -> Literal["holds", "not_needed", "not_applicable"]:
    if verdict == "holds":
        return "not_needed"
    return "holds" if error_ours <= TOLERANCE else "not_applicable"


def _largest(errors: list[float]) -> float:
    return max((e for e in errors if not isnan(e)), default=nan)


def in_words(row: Row) -> str:
    """Return the verdict as a few words."""
    if row.as_printed == "wrong":
        return f"wrong by {row.max_rel_error_printed:.2g}"
    return row.as_printed.replace("_", " ")


def equation(printed: Formula, oracle: Formula, *ours: Formula, part: str = "") -> Equation:
    """Return an equation, ours last."""
    return Equation(part, printed, oracle, ours)


def whole(id: str, parts: Sequence[Callable[[], Row]]) -> Row:
    """Return a parent's row: the worst verdict of its parts, with the witness of the part that decides."""
    rows = [part() for part in parts]
    verdict = worst([row.as_printed for row in rows])
    failing = [row.id for row in rows if row.as_printed not in ("holds", "not_applicable")]
    deciding = next(row for row in rows if row.as_printed == verdict)
    error_ours = _largest([row.max_rel_error_corrected for row in rows])
    return Row(
        id=id,
        kind="identity",
        as_printed=verdict,
        corrected=_corrected(verdict, error_ours),
        max_rel_error_printed=_largest([row.max_rel_error_printed for row in rows]),
        max_rel_error_corrected=error_ours,
        witness=f"{deciding.id}: {deciding.witness}",
        n_cases=sum(row.n_cases for row in rows),
        note=f"Parts that fail: {', '.join(failing)}." if failing else "All parts hold.",
    )


def inequality(id: str, ratios: Iterator[tuple[str, float]], note: str) -> Row:
    """Return the row of a norm inequality from ratios left / right; above 1 by more than rounding it is violated."""
    cases = list(ratios)
    witness, largest = max(cases, key=lambda case: case[1])
    violated = largest > 1 + 1e-12
    return Row(
        id=id,
        kind="bound",
        as_printed="violated" if violated else "holds",
        corrected="not_applicable" if violated else "not_needed",
        worst_ratio=largest,
        witness=f"{witness}: left / right = {largest:.6g}",
        n_cases=len(cases),
        note=note,
    )


def supplied(id: str, equations: Sequence[Equation], note: str) -> Row:
    """Return the row of what the paper leaves out: nothing is printed, ours is checked."""
    row = _row(id, equations)
    holds = row.max_rel_error_corrected <= TOLERANCE
    return replace(
        row,
        as_printed="not_applicable",
        corrected="holds" if holds else "not_applicable",
        max_rel_error_printed=nan,
        witness=f"largest error of ours {row.max_rel_error_corrected:.2g}",
        note=note,
    )


# --- The forward maps as functions of named weights, and their automatic derivatives ---


Pair = tuple[str, str]
Map = Callable[..., Tensor]


def hessian_of(function: Map, weights: Mapping[str, Tensor], pair: Pair) -> Tensor:
    """Return the automatic second derivative of `function(**weights)` in a pair of its weights."""
    i, j = pair
    if i == j:
        return autodiff_hessian(lambda w: function(**{**weights, i: w}), weights[i])
    return autodiff_hessian(lambda w, v: function(**{**weights, i: w, j: v}), weights[i], weights[j])


def jacobian_of(function: Map, weights: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the automatic Jacobian of `function(**weights)` in one of its weights."""
    return autodiff_jacobian(lambda w: function(**{**weights, name: w}), weights[name])


def attention_weights(case: Instance) -> dict[str, Tensor]:
    """Return W_Q, W_K, W_V."""
    return {name: case.weights[name] for name in block.ATTENTION_WEIGHTS}


def attention_map(case: Instance) -> Map:
    """Return F as a function of the attention weights."""
    return lambda **weights: maps.attention(case.X, **weights)


def block_map(case: Instance) -> Map:
    """Return Z as a function of the five weights."""
    return lambda **weights: maps.block(case.X, weights)


def Y_map(case: Instance) -> Map:
    """Return Y as a function of the attention weights."""
    return lambda **w: maps.layer_norm(case.X + maps.attention(case.X, w["W_Q"], w["W_K"], w["W_V"]))


def S_map(case: Instance) -> Map:
    """Return S = Y + FFN(Y) as a function of the five weights."""

    def S(**w: Tensor) -> Tensor:
        Y = Y_map(case)(**w)
        return Y + maps.feed_forward(Y, w["W_1"], w["W_2"])

    return S
