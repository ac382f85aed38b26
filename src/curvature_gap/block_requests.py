"""Which parts of the closed-form Hessian are asked for, located in the groups of parameters it is computed for.

A group is a matrix of parameters, its leading index a number of an input vector, its trailing index of an output:

    E = [embed; embed_bias; positions]     B = W_Q W_Kᵀ / √d_K     C = W_V W_O Q     LN1 = [gamma; beta]
    W1 = [W_1; b_1]     W2 = [W_2; b_2] Q     LN2 = [gamma; beta]     classifier = [classifier; classifier_bias]

so a range of a parameter's rows is a range of its group's leading indices. The columns of Q span what is orthogonal to
1: of the outputs of C and W2 LayerNorm sees no more.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import prod
from typing import NamedTuple

from curvature_gap.architecture import Architecture, parameter_shapes

Pair = tuple[str, str]

GROUP_OF = {
    "embed": "E",
    "embed_bias": "E",
    "positions": "E",
    "W_Q": "B",
    "W_K": "B",
    "W_V": "C",
    "W_O": "C",
    "LN1_gamma": "LN1",
    "LN1_beta": "LN1",
    "W_1": "W1",
    "b_1": "W1",
    "W_2": "W2",
    "b_2": "W2",
    "LN2_gamma": "LN2",
    "LN2_beta": "LN2",
    "classifier": "classifier",
    "classifier_bias": "classifier",
}
ATTENTION = ("E", "B", "C")
FEED_FORWARD = ("LN1", "W1", "W2")
HEAD = ("LN2", "classifier")
SMALL = ("LN1", "LN2", "classifier")
"""Groups too small to be worth computing in parts."""


class Span(NamedTuple):
    """A rectangle of a group: leading indices start … stop, trailing indices first … last (excluded)."""

    start: int
    stop: int
    first: int
    last: int

    @property
    def leading(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def trailing(self) -> slice:
        return slice(self.first, self.last)

    @property
    def shape(self) -> tuple[int, int]:
        return self.stop - self.start, self.last - self.first

    def within(self, outer: "Span") -> tuple[slice, slice]:
        """Return the slices that cut this span out of a tensor that holds `outer`."""
        leading = slice(self.start - outer.start, self.stop - outer.start)
        return leading, slice(self.first - outer.first, self.last - outer.first)


def hull(spans: list[Span]) -> Span:
    """Return the smallest span that contains all."""
    starts, stops, firsts, lasts = zip(*spans, strict=True)
    return Span(min(starts), max(stops), min(firsts), max(lasts))


@dataclass(frozen=True)
class Request:
    """One block, or some of its rows: `rows` of what the row span gives."""

    row: str
    column: str
    rows: slice
    row_span: Span
    column_span: Span

    @property
    def groups(self) -> Pair:
        return GROUP_OF[self.row], GROUP_OF[self.column]


@dataclass(frozen=True)
class Plan:
    """Which parts of which group pairs are needed, and of which groups the Jacobian of the logits."""

    pairs: dict[Pair, tuple[Span, Span]]
    jacobians: dict[str, Span]
    inputs_make_tokens: bool
    """Positions are learned and everything is asked for: the inputs' blocks hold those of B and C."""

    def derives(self, pair: Pair) -> bool:
        """Return whether a pair's sums are to be derived from those with E in the place of B and C."""
        return self.inputs_make_tokens and ("B" in pair or "C" in pair)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return a parameter's shape as a matrix: a bias or a scale is one row."""
    return (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1])


def group_spans(architecture: Architecture) -> dict[str, Span]:
    """Return the whole of every group."""
    n_rows: dict[str, int] = {}
    width: dict[str, int] = {}
    for name, shape in parameter_shapes(architecture).items():
        group, (leading, trailing) = GROUP_OF[name], matrix_shape(shape)
        n_rows[group], width[group] = n_rows.get(group, 0) + leading, trailing
    d = architecture.d_V
    spans = {group: Span(0, n, 0, width[group]) for group, n in n_rows.items()}
    return spans | {"B": Span(0, d, 0, d), "C": Span(0, d, 0, d - 1), "W2": Span(0, n_rows["W2"], 0, d - 1)}


def span_of(name: str, architecture: Architecture, leading: slice) -> Span:
    """Return what the rows `leading` of a parameter need of its group."""
    group = GROUP_OF[name]
    whole = group_spans(architecture)[group]
    if name == "W_K":  # B = W_Q W_Kᵀ: a row of W_K is a column of B
        return whole._replace(first=leading.start, last=leading.stop)
    if name == "W_O":  # C = W_V W_O: a row of W_O meets every row of C
        return whole
    before = 0
    if group not in ("B", "C"):
        shapes = parameter_shapes(architecture)
        earlier = list(shapes)[: list(shapes).index(name)]
        before = sum(matrix_shape(shapes[other])[0] for other in earlier if GROUP_OF[other] == group)
    return whole._replace(start=before + leading.start, stop=before + leading.stop)


def requests(
    architecture: Architecture, pairs: Iterable[Pair] | None, rows: Mapping[Pair, slice] | None
) -> list[Request]:
    """Check and locate the wanted blocks; None means the whole upper triangle.

    Raises:
        ValueError: If a block does not exist, lies below the diagonal, or a range of rows is empty or out of bounds.
    """
    shapes = parameter_shapes(architecture)
    names = list(shapes)
    wanted = list(combinations_with_replacement(names, 2)) if pairs is None else list(dict.fromkeys(pairs))
    rows = rows or {}
    if unknown := sorted({name for pair in wanted for name in pair} - set(names)):
        raise ValueError(f"unknown blocks {', '.join(unknown)}; this architecture has {', '.join(names)}.")
    if unasked := sorted(set(rows) - set(wanted)):
        raise ValueError(f"rows are given for {unasked}, which are not among the pairs.")
    if lower := [pair for pair in wanted if names.index(pair[0]) > names.index(pair[1])]:
        row, column = lower[0]
        raise ValueError(f"({row}, {column}) lies below the diagonal; ask for ({column}, {row}).")
    return [_request(architecture, pair, rows.get(pair, slice(None))) for pair in wanted]


def _request(architecture: Architecture, pair: Pair, rows: slice) -> Request:
    row, column = pair
    shapes = parameter_shapes(architecture)
    size, width = prod(shapes[row]), matrix_shape(shapes[row])[1]
    start, stop, step = rows.indices(size)
    if step != 1 or start >= stop or (rows.stop or 0) > size:
        raise ValueError(f"rows of ({row}, {column}) must be a non-empty range within 0…{size}, got {rows}.")
    leading = slice(start // width, -(-stop // width))
    before = 0 if row == "W_O" else leading.start * width
    all_columns = slice(0, matrix_shape(shapes[column])[0])
    return Request(
        row,
        column,
        slice(start - before, stop - before),
        span_of(row, architecture, leading),
        span_of(column, architecture, all_columns),
    )


def plan_of(wanted: list[Request], architecture: Architecture) -> Plan:
    """Collect the requests by group pair; small groups are computed whole."""
    whole = group_spans(architecture)

    def common(group: str, spans: list[Span]) -> Span:
        return whole[group] if group in SMALL else hull(spans)

    asked: dict[Pair, list[Request]] = {}
    for request in wanted:
        asked.setdefault(request.groups, []).append(request)
    pairs = {
        (row, column): (common(row, [r.row_span for r in some]), common(column, [r.column_span for r in some]))
        for (row, column), some in asked.items()
    }
    of_group: dict[str, list[Span]] = {}
    for groups, spans in pairs.items():
        for group, span in zip(groups, spans, strict=True):
            of_group.setdefault(group, []).append(span)
    everything = {pair: (whole[pair[0]], whole[pair[1]]) for pair in combinations_with_replacement(whole, 2)}
    inputs_make_tokens = architecture.positions == "learned" and pairs == everything
    return Plan(pairs, {group: hull(spans) for group, spans in of_group.items()}, inputs_make_tokens)
