"""Is there an input that violates a printed bound? Random and structured instances, then ascent on exact / bound.

`run_bound_check(id, budget)` answers for one statement with a row of `statements.csv` and the worst instance met, its
witness. Every witness's exact side is recomputed by nested automatic differentiation before it is believed. A verdict
`holds` states the search effort: not violated is not proven.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any
from zipfile import BadZipFile
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from curvature_gap.bound_cases import BOUND_CASES, BoundCase, Comparison
from curvature_gap.bound_errata import ERRATA, MISPRINTS
from curvature_gap.bound_instances import Draw, Instances, Sizes, draw_instances
from curvature_gap.landscape_checks import LANDSCAPE_CHECKS
from curvature_gap.statements import Row, worst
from curvature_gap.theory.printed_bounds import NORM_NAMES, attaining_matrix, matrix_norm, norm_constant

__all__ = [
    "BOUND_CHECKS",
    "ERRATA",
    "LAPTOP",
    "MISPRINTS",
    "PAPER",
    "SMOKE",
    "SearchBudget",
    "Witness",
    "describe_witness",
    "load_witness",
    "norm_inequality_table",
    "run_bound_check",
    "run_bound_checks",
    "save_witness",
]

AGREEMENT = 1e-6
"""Largest relative difference between the two methods at a witness; larger ones are rounding, and not believed."""
TOLERANCE = AGREEMENT
"""A bound is violated when exact / bound exceeds 1 by more than this, by both methods: less may be rounding."""


@dataclass(frozen=True)
class SearchBudget:
    """How hard to search each bound.

    Args:
        instances: Random and structured instances.
        ascents: Gradient ascents, from the best of them and from random ones.
        steps: Steps of each ascent.
        seed: Seed of everything drawn.

    Raises:
        ValueError: If a count is negative or there are no instances.
    """

    instances: int
    ascents: int
    steps: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.instances < 1 or self.ascents < 0 or self.steps < 0:
            raise ValueError(f"A budget needs instances >= 1 and ascents, steps >= 0; got {self}.")

    def __str__(self) -> str:
        return f"{self.instances} instances and {self.ascents} ascents x {self.steps} steps"


SMOKE = SearchBudget(instances=60, ascents=3, steps=10)
LAPTOP = SearchBudget(instances=1_000, ascents=20, steps=200)
PAPER = SearchBudget(instances=10_000, ascents=200, steps=1_000)


@dataclass(frozen=True)
class Witness:
    """The worst instance met for one bound: unbatched inputs, both sides, and where it came from.

    `exact` is the smaller of two methods' values; `piece` names the part of the statement, for example the block `QK`.
    """

    id: str
    piece: str
    inputs: Mapping[str, Tensor]
    exact: float
    bound: float
    ratio: float
    budget: SearchBudget


@dataclass
class SearchResult:
    """The worst ratio of every piece, the witness of the worst, and how many candidates rounding had spoilt."""

    worst: dict[str, float] = field(default_factory=dict)
    witness: Witness | None = None
    rejected: int = 0

    @property
    def ratio(self) -> float:
        return nan if self.witness is None else self.witness.ratio


def ratios(comparison: Comparison, instances: Instances) -> Tensor:
    """Return exact / bound for each instance and piece, (b, p); NaN where both sides vanish or either is not finite."""
    exact, bound = comparison.sides(instances)
    defined = (bound > 0) & torch.isfinite(exact) & torch.isfinite(bound)
    ratio = torch.where(defined, exact / torch.where(defined, bound, 1), nan)
    return torch.where((bound == 0) & (exact > 0) & torch.isfinite(exact), inf, ratio)


@dataclass
class Search:
    """The search for one comparison's largest exact / bound, and what it has met so far."""

    case: BoundCase
    comparison: Comparison
    budget: SearchBudget

    def __post_init__(self) -> None:
        # One hash of both: torch seeds its CPU generator with the low 32 bits alone.
        self.generator = torch.Generator().manual_seed(crc32(f"{self.budget.seed} {self.case.id}".encode()))
        self.candidates: list[tuple[float, int, dict[str, Tensor]]] = []
        self.result = SearchResult(worst=dict.fromkeys(self.comparison.pieces, nan))

    def draw(self, place: int) -> "Start | None":
        """Evaluate the instances of the place-th sizes; return where to climb from, None where there is no budget."""
        sizes = self.case.sizes[place]
        n = _share(self.budget.instances, place, len(self.case.sizes))
        if n == 0:
            return None
        drawn = draw_instances(sizes, n, self.generator)
        drawn = {name: tensor for name, tensor in drawn.items() if name in self.case.inputs}
        found = _in_chunks(self.comparison, drawn)
        self.collect(drawn, found)
        chosen, columns = _starts(found, self._ascents(sizes), self.generator)
        return Start(self, {name: tensor[chosen] for name, tensor in drawn.items()}, torch.tensor(columns))

    def _ascents(self, sizes: Sizes) -> range:
        """Return the numbers of the ascents that start at these sizes."""
        climbed = self.case.climbed
        if sizes not in climbed:
            return range(0)
        shares = [_share(self.budget.ascents, place, len(climbed)) for place in range(len(climbed))]
        before = sum(shares[: climbed.index(sizes)])
        return range(before, before + shares[climbed.index(sizes)])

    def collect(self, inputs: Mapping[str, Tensor], found: Tensor) -> None:
        _collect(self.candidates, self.result, self.comparison, inputs, found)


@dataclass
class Start:
    """Where one search climbs from: instances, and the piece that each climbs on."""

    search: Search
    inputs: Draw
    columns: Tensor

    def __len__(self) -> int:
        return len(self.columns)


def search(case: BoundCase, comparison: Comparison, budget: SearchBudget) -> SearchResult:
    """Look for the largest exact / bound, spreading the budget over the case's sizes."""
    return search_together([(case, comparison)], budget)[0]


def search_together(wanted: Sequence[tuple[BoundCase, Comparison]], budget: SearchBudget) -> list[SearchResult]:
    """Search several comparisons of the same inputs and sizes, each with its own budget, in common ascents.

    The derivatives, on which nearly all the time goes, are then built once a step for all of them.
    """
    searches = [Search(case, comparison, budget) for case, comparison in wanted]
    for place in range(len(wanted[0][0].sizes)):
        starts = [start for s in searches if (start := s.draw(place)) is not None and len(start)]
        if starts and budget.steps:
            for start, climbed in zip(starts, _ascend(starts, budget.steps), strict=True):
                start.search.collect(climbed, _in_chunks(start.search.comparison, climbed))
    for s in searches:
        _believe(s.case, s.comparison, s.candidates, s.result, budget)
    return [s.result for s in searches]


def _share(total: int, place: int, places: int) -> int:
    return total // places + (place < total % places)


@torch.no_grad()
def _in_chunks(comparison: Comparison, drawn: Draw, size: int = 500) -> Tensor:
    n = len(next(iter(drawn.values())))
    parts = ({name: tensor[a : a + size] for name, tensor in drawn.items()} for a in range(0, n, size))
    return torch.cat([ratios(comparison, Instances(part)) for part in parts])


def _collect(
    candidates: list[tuple[float, int, dict[str, Tensor]]],
    result: SearchResult,
    comparison: Comparison,
    inputs: Mapping[str, Tensor],
    found: Tensor,
    keep: int = 8,
) -> None:
    """Record each piece's worst ratio and keep the worst few instances as candidates for the witness."""
    kept: dict[int, dict[str, Tensor]] = {}
    for column, piece in enumerate(comparison.pieces):
        values = found[:, column]
        order = torch.nan_to_num(values, nan=-inf).argsort(descending=True)[:keep]
        for index in order.tolist():
            ratio = float(values[index])
            if ratio == ratio:
                instance = kept.setdefault(index, {name: tensor[index].clone() for name, tensor in inputs.items()})
                candidates.append((ratio, column, instance))
        highest = float(torch.nan_to_num(values, nan=-inf).amax())
        if highest > -inf and not highest <= result.worst[piece]:
            result.worst[piece] = highest


def _believe(
    case: BoundCase,
    comparison: Comparison,
    candidates: list[tuple[float, int, dict[str, Tensor]]],
    result: SearchResult,
    budget: SearchBudget,
) -> None:
    """Set the witness: the worst candidate whose exact side a second method confirms; and clear spoilt maxima."""
    believed: dict[str, float] = {}
    both: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # an instance is a candidate for several pieces
    for _claimed, column, inputs in sorted(candidates, key=lambda c: -c[0]):
        piece = comparison.pieces[column]
        if piece in believed and (result.witness is not None):
            continue
        if id(inputs) not in both:
            both[id(inputs)] = _both_methods(comparison, inputs)
        exact, bound, second = (float(values[column]) for values in both[id(inputs)])
        if not abs(second - exact) <= AGREEMENT * max(abs(second), abs(exact)):
            result.rejected += 1
            continue
        # The smaller of the two: a violation must be one by both methods.
        smaller = min(second, exact)
        ratio = smaller / bound if bound > 0 else inf
        believed.setdefault(piece, ratio)
        if result.witness is None:
            result.witness = Witness(case.id, piece, inputs, smaller, bound, ratio, budget)
    result.worst = {piece: believed.get(piece, nan) for piece in comparison.pieces}


@torch.no_grad()
def _both_methods(comparison: Comparison, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the exact side, the bound and the exact side by the second method of one instance, piece by piece."""
    exact, bound = comparison.sides(Instances({name: tensor[None] for name, tensor in inputs.items()}))
    return exact[0], bound[0], torch.stack(list(comparison.second(inputs)))


def _starts(found: Tensor, ascents: Iterable[int], generator: torch.Generator) -> tuple[list[int], list[int]]:
    """Return the rows to start from and the piece each climbs: two thirds the best of their piece, a third at random.

    Ascents are numbered through all sizes, so that every piece gets its turn.
    """
    usable = torch.where(torch.isfinite(found), found, -inf)
    orders = usable.argsort(dim=0, descending=True)
    n, pieces = found.shape
    chosen, columns = [], []
    seen = [0] * pieces
    for ascent in ascents:
        column = ascent % pieces
        at_random = ascent % 3 == 2
        row = int(torch.randint(n, (1,), generator=generator)) if at_random else int(orders[seen[column] % n, column])
        seen[column] += not at_random
        if usable[row, column] > 0:
            chosen.append(row)
            columns.append(column)
    return chosen, columns


def _ascend(starts: Sequence[Start], steps: int) -> list[Draw]:
    """Climb log(exact / bound) from every start at once with Adam; return the best points of each search.

    Each tensor is e^τ times a matrix of unit root mean square: ratios that grow only along a scale (a weight towards 0
    or infinity) are climbed along τ. Tensors that start at zero stay zero, so a zero residual stays one.
    """
    start = {name: torch.cat([s.inputs[name] for s in starts]) for name in starts[0].inputs}
    best = {name: tensor.clone() for name, tensor in start.items()}
    size = {name: t.square().mean(dim=(-2, -1), keepdim=True).sqrt() for name, t in start.items()}
    shape = {name: (t / torch.where(size[name] > 0, size[name], 1)).requires_grad_() for name, t in start.items()}
    scale = {name: torch.zeros_like(s).requires_grad_() for name, s in size.items()}
    optimiser = torch.optim.Adam(
        [{"params": list(shape.values()), "lr": 0.03}, {"params": list(scale.values()), "lr": 0.06}]
    )
    best_ratio = torch.full((sum(map(len, starts)),), -inf, dtype=torch.float64)
    for _ in range(steps):
        # The range of τ is limited so that squares and fifth powers stay far from overflow.
        point = {name: size[name] * scale[name].clamp(-3, 3).exp() * shape[name] for name in start}
        found = _own_ratios(starts, Instances(point))
        usable = torch.isfinite(found) & (found > 0)
        better = usable & (found > best_ratio)
        best_ratio = torch.where(better, found, best_ratio).detach()
        for name, tensor in point.items():
            best[name] = torch.where(better[:, None, None], tensor, best[name]).detach()
        if not found.requires_grad:
            break  # a constant, such as ‖S‖: nothing to climb
        optimiser.zero_grad()
        (-torch.where(usable, found, 1).log().sum()).backward()
        for tensor in (*shape.values(), *scale.values()):
            if tensor.grad is not None:
                torch.nan_to_num_(tensor.grad, nan=0.0, posinf=0.0, neginf=0.0)
        optimiser.step()
    parts = {name: tensor.split([len(s) for s in starts]) for name, tensor in best.items()}
    return [{name: parts[name][k] for name in parts} for k in range(len(starts))]


def _own_ratios(starts: Sequence[Start], instances: Instances) -> Tensor:
    """Return exact / bound of every instance for its own search and piece; searches follow one another in the batch."""
    found, end = [], 0
    for start in starts:
        own = ratios(start.search.comparison, instances)[end : end + len(start)]
        found.append(own.gather(1, start.columns[:, None])[:, 0])
        end += len(start)
    return torch.cat(found)


# --- Verdicts -----------------------------------------------------------------------------------------------------

Checked = tuple[Row, Witness | None]
Found = Mapping[int, SearchResult]
"""Results by the comparison's identity: both versions of T1 share their corrected form's."""


@dataclass(frozen=True)
class BoundCheck:
    """How one statement is checked: by the search of a case, from its parts, or by the landscape's own functions."""

    id: str
    run: Callable[[SearchBudget, Found], Checked]
    parts: tuple[str, ...] = ()


def find(cases: Iterable[BoundCase], budget: SearchBudget) -> Found:
    """Search all comparisons of the cases, those of the same exact side, inputs and sizes together."""
    together: dict[tuple[Any, ...], dict[int, tuple[BoundCase, Comparison]]] = {}
    for case in cases:
        key = (case.exact_side or case.id, case.inputs, case.sizes)
        for comparison in filter(None, (case.printed, case.corrected, case.other)):
            together.setdefault(key, {}).setdefault(id(comparison), (case, comparison))
    return {
        key: result
        for group in together.values()
        for key, result in zip(group, search_together(list(group.values()), budget), strict=True)
    }


def _check_case(case: BoundCase, budget: SearchBudget, found: Found) -> Checked:
    printed = found[id(case.printed)]
    violated = printed.ratio > 1 + TOLERANCE
    notes = [case.reading] if case.reading else []
    notes.append(_summary("printed", printed, budget, violated))
    if case.other is not None:
        other = found[id(case.other)]
        notes.append(f"{case.other_reading}: {_summary('', other, budget, other.ratio > 1 + TOLERANCE)}")
    verdict = "not_needed"
    if case.corrected is not None:
        corrected = found[id(case.corrected)]
        fails = corrected.ratio > 1 + TOLERANCE
        notes.append(_summary("corrected", corrected, budget, fails))
        if violated:
            verdict = "not_applicable" if fails else "holds"
    row = Row(
        id=case.id,
        kind="bound",
        as_printed="violated" if violated else "holds",
        corrected=verdict,  # type: ignore[arg-type]
        worst_ratio=printed.ratio,
        witness=f"{case.id}.npz" if printed.witness is not None else "",
        n_cases=budget.instances + budget.ascents * budget.steps,
        note="; ".join(notes),
    )
    return row, printed.witness


def _summary(label: str, result: SearchResult, budget: SearchBudget, violated: bool) -> str:
    label = f"{label}: " if label else ""
    verdict = "violated" if violated else f"not violated in {budget}"
    text = f"{label}{verdict}, worst ratio {result.ratio:.4g}"
    if 1 < len(result.worst) <= 6:
        text += " (" + ", ".join(f"{piece} {ratio:.3g}" for piece, ratio in result.worst.items()) + ")"
    if result.rejected:
        text += f", {result.rejected} candidates not confirmed by the second method"
    return text


def combine(id: str, rows: list[Row]) -> Row:
    """Return a parent's row: the worst verdict and the largest ratio of its parts."""
    decisive = max(rows, key=lambda row: -inf if row.worst_ratio != row.worst_ratio else row.worst_ratio)
    verdict = worst([row.as_printed for row in rows])
    corrections = {row.corrected for row in rows} - {"not_needed"}
    return Row(
        id=id,
        kind="bound",
        as_printed=verdict,
        corrected="not_needed" if not corrections else "holds" if corrections == {"holds"} else "not_applicable",
        worst_ratio=decisive.worst_ratio,
        witness=decisive.witness,
        n_cases=sum(row.n_cases for row in rows),
        note="parts: " + ", ".join(f"{row.id} {row.as_printed}" for row in rows),
    )


def _case_check(case: BoundCase) -> BoundCheck:
    return BoundCheck(case.id, lambda budget, found: _check_case(case, budget, found))


def _parent_check(id: str, parts: tuple[str, ...]) -> BoundCheck:
    def run(budget: SearchBudget, found: Found) -> Checked:
        checked = [BOUND_CHECKS[part].run(budget, found) for part in parts]
        return combine(id, [row for row, _ in checked]), _worst_witness([w for _, w in checked])

    return BoundCheck(id, run, parts)


def _landscape_check(id: str, check: Callable[[int], Row]) -> BoundCheck:
    return BoundCheck(id, lambda budget, found: (check(budget.seed), None))


def _worst_witness(witnesses: Iterable[Witness | None]) -> Witness | None:
    present = [witness for witness in witnesses if witness is not None]
    return max(present, key=lambda witness: witness.ratio) if present else None


PARENTS: dict[str, tuple[str, ...]] = {
    "L3": ("L3_jacobian", "L3_hessian"),
    "T6_explicit": ("T6_explicit_pairs", "T6_explicit_total"),
}
BOUND_CHECKS: dict[str, BoundCheck] = {id: _case_check(case) for id, case in BOUND_CASES.items()}
BOUND_CHECKS |= {id: _parent_check(id, parts) for id, parts in PARENTS.items()}
BOUND_CHECKS |= {id: _landscape_check(id, check) for id, check in LANDSCAPE_CHECKS.items()}


def run_bound_check(id: str, budget: SearchBudget) -> Checked:
    """Return the verdict on one statement and its witness (None where a statement has none).

    Raises:
        KeyError: If the id is not in `BOUND_CHECKS`.
    """
    if id not in BOUND_CHECKS:
        raise KeyError(f"No bound check {id!r}; known: {', '.join(BOUND_CHECKS)}.")
    return run_bound_checks(budget, [id])[id]


def run_bound_checks(budget: SearchBudget, ids: Iterable[str] | None = None) -> dict[str, Checked]:
    """Return every verdict and witness, each search run once: parents are combined from their parts."""
    wanted = list(BOUND_CHECKS if ids is None else ids)
    needed = dict.fromkeys(part for id in wanted for part in (BOUND_CHECKS[id].parts or (id,)))
    found = find([BOUND_CASES[id] for id in needed if id in BOUND_CASES], budget)
    checked = {id: BOUND_CHECKS[id].run(budget, found) for id in needed}
    for id in wanted:
        parts = BOUND_CHECKS[id].parts
        if parts:
            row = combine(id, [checked[part][0] for part in parts])
            checked[id] = (row, _worst_witness([checked[part][1] for part in parts]))
    return {id: checked[id] for id in wanted}


# --- Witnesses on disk --------------------------------------------------------------------------------------------


def save_witness(path: Path, witness: Witness) -> None:
    """Write a witness as npz without pickles, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    b = witness.budget
    with temporary.open("wb") as file:
        np.savez(
            file,
            allow_pickle=False,
            id=np.array(witness.id),
            piece=np.array(witness.piece),
            sides=np.array([witness.exact, witness.bound, witness.ratio]),
            budget=np.array([b.instances, b.ascents, b.steps, b.seed], dtype=np.int64),
            **{f"input_{name}": tensor.detach().numpy() for name, tensor in witness.inputs.items()},
        )
    temporary.replace(path)


def load_witness(path: Path) -> Witness:
    """Read a witness.

    Raises:
        ValueError: If the file is missing or is not a witness.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            data = dict(archive)
        exact, bound, ratio = data["sides"].tolist()
        return Witness(
            id=str(data["id"]),
            piece=str(data["piece"]),
            inputs={
                name.removeprefix("input_"): torch.from_numpy(array)
                for name, array in data.items()
                if name.startswith("input_")
            },
            exact=exact,
            bound=bound,
            ratio=ratio,
            budget=SearchBudget(*data["budget"].tolist()),
        )
    except FileNotFoundError:
        raise ValueError(f"No witness at {path}; run the bound search first.") from None
    except (KeyError, OSError, BadZipFile, ValueError) as error:
        raise ValueError(f"{path} is not a witness file: {error}") from error


@dataclass(frozen=True)
class WitnessReport:
    """Both sides of a bound recomputed from a stored witness."""

    id: str
    piece: str
    reading: str
    exact: float
    exact_autodiff: float
    bound: float
    ratio: float
    stored_ratio: float
    corrected_bound: float
    """The corrected bound at the same piece; NaN where there is none."""

    def __str__(self) -> str:
        piece = f" [{self.piece}]" if self.piece else ""
        lines = [
            f"{self.id}{piece}" + (f" — {self.reading}" if self.reading else ""),
            f"  exact, closed form  {self.exact:.12g}",
            f"  exact, autodiff     {self.exact_autodiff:.12g}",
            f"  printed bound       {self.bound:.12g}",
            f"  exact / bound       {self.ratio:.6g} (stored {self.stored_ratio:.6g})"
            + (" VIOLATED" if self.ratio > 1 + TOLERANCE else " not violated"),
        ]
        if isfinite(self.corrected_bound):
            lines.append(f"  corrected bound     {self.corrected_bound:.12g}")
        return "\n".join(lines)


def recompute(witness: Witness) -> WitnessReport:
    """Evaluate both sides of the witness's bound anew, by both methods."""
    case = BOUND_CASES[witness.id]
    column = case.printed.pieces.index(witness.piece)
    exact, bound, second = (float(values[column]) for values in _both_methods(case.printed, witness.inputs))
    repaired, corrected = case.corrected, nan
    if repaired is not None and witness.piece in repaired.pieces:
        corrected = float(_both_methods(repaired, witness.inputs)[1][repaired.pieces.index(witness.piece)])
    smaller = min(exact, second)
    ratio = smaller / bound if bound > 0 else inf if smaller > 0 else nan
    return WitnessReport(witness.id, witness.piece, case.reading, exact, second, bound, ratio, witness.ratio, corrected)


def describe_witness(id: str, path: Path) -> str:
    """Return both sides of a bound, recomputed from the witness stored for `id`.

    `path` is the witness file, or the folder that holds `<id>.npz`.

    Raises:
        ValueError: If there is no such witness, or the file belongs to another statement.
    """
    file = path / f"{id}.npz" if path.is_dir() else path
    witness = load_witness(file)
    # A parent's witness is that of its worst part.
    if witness.id not in (id, *PARENTS.get(id, ())):
        raise ValueError(f"{file} holds a witness of {witness.id}, not of {id}.")
    return str(recompute(witness))


# --- TAB-2 --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NormInequality:
    """One entry of the norm table: ‖A‖_X ≤ c ‖A‖_Y for A of shape (m, n)."""

    X: str
    Y: str
    constant: str
    m: int
    n: int
    printed: float
    attained: float
    """‖A‖_X / (c ‖A‖_Y) at the attaining matrix: 1 says that the constant is sharp."""
    worst_ratio: float
    """The largest ratio in the search."""
    corrected: str
    verdict: str


_CONSTANT_NAMES: dict[str, tuple[str, ...]] = {
    "max": ("", "1", "1", "1", "1"),
    "1": ("m", "", "m", "√m", "√m"),
    "inf": ("n", "n", "", "√n", "√n"),
    "2": ("√(mn)", "√n", "√m", "", "1"),
    "F": ("√(mn)", "√n", "√m", "√d", ""),
}


def norm_inequality_table(budget: SearchBudget, m: int = 5, n: int = 3) -> list[NormInequality]:
    """Return the twenty entries of the table with the ratio each attains, at shape (m, n). Source: P7, TAB-2."""
    case = BOUND_CASES["P7"]
    result = search(case, case.printed, budget)
    rows = []
    for larger in NORM_NAMES:
        for column, smaller in enumerate(NORM_NAMES):
            if larger == smaller:
                continue
            A = attaining_matrix(larger, smaller, m, n)
            c = norm_constant(larger, smaller, m, n, int(torch.linalg.matrix_rank(A)))
            attained = float(matrix_norm(A, larger) / (c * matrix_norm(A, smaller)))
            searched = result.worst[f"{larger}<={smaller}"]
            holds = max(attained, searched) <= 1 + TOLERANCE
            rows.append(
                NormInequality(
                    larger,
                    smaller,
                    _CONSTANT_NAMES[larger][column],
                    m,
                    n,
                    c,
                    attained,
                    searched,
                    "not_needed" if holds else "not_applicable",
                    "holds" if holds else "violated",
                )
            )
    return rows
