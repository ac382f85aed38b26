"""The verdict on every numbered statement of the paper: the row, and how parts make a whole."""

from dataclasses import dataclass
from typing import Literal

AsPrinted = Literal["holds", "shape_error", "wrong", "violated", "vacuous", "not_applicable"]
# From best to worst: a parent's verdict is the worst of its parts.
AS_PRINTED_ORDER: tuple[AsPrinted, ...] = ("not_applicable", "holds", "vacuous", "violated", "wrong", "shape_error")


@dataclass(frozen=True)
class Row:
    """One line of `statements.csv`.

    `as_printed`: `holds`; `shape_error` (factors cannot be multiplied or the result has the wrong shape); `wrong`
    (an identity off by more than rounding); `violated` (a bound below the exact value); `vacuous` (says nothing, for
    example because it is infinite). `worst_ratio` is the largest exact / bound met. Errors are relative to the largest
    entry of the oracle. `witness` names the case that decides. NaN where a number does not apply.
    """

    id: str
    kind: Literal["identity", "bound", "claim"]
    as_printed: AsPrinted
    corrected: Literal["holds", "not_needed", "not_applicable"]
    max_rel_error_printed: float = float("nan")
    max_rel_error_corrected: float = float("nan")
    worst_ratio: float = float("nan")
    witness: str = ""
    n_cases: int = 0
    note: str = ""


def worst(verdicts: list[AsPrinted]) -> AsPrinted:
    """Return the worst verdict. Raises ValueError on an empty list."""
    return max(verdicts, key=AS_PRINTED_ORDER.index)
