"""The text's claims on which Hessian block is largest, seed by seed and measure by measure.

"Larger" is not defined in the paper, so each claim is tested by the mean, the median and the largest |entry| and by
the spectral and the Frobenius norm; within the self-attention part (queries, keys, values) and among all blocks.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import nan
from typing import Any

from curvature_gap.hessian import Hessian
from curvature_gap.norms import POOLED, frobenius_norm, spectral_norm

MEASURES = ("mean", "median", "max", "spectral", "frobenius")
SCOPES: dict[str, tuple[str, ...]] = {
    "attention": ("W_Q", "W_K", "W_V"),
    "attention_and_output": ("W_Q", "W_K", "W_V", "W_O"),
    "all": (),
}
"""Blocks compared with one another; empty means every parameter block of the model."""
Measures = Mapping[str, Mapping[str, float]]


def block_measures(hessian: Hessian, blocks: Iterable[str] | None = None) -> dict[str, dict[str, float]]:
    """Return, for each diagonal block (W, W) that is held, the five measures of its size."""
    names = hessian.names if blocks is None else blocks
    measures = {}
    for name in names:
        if hessian.holds(name, name):
            block = hessian[name, name]
            magnitude = block.abs()
            measures[name] = {
                "mean": float(magnitude.mean()),
                "median": float(magnitude.flatten().quantile(0.5)) if magnitude.numel() < 2**24 else nan,
                "max": float(magnitude.max()),
                "spectral": spectral_norm(block),
                "frobenius": frobenius_norm(block),
            }
    return measures


def ranking(measures: Measures, measure: str, scope: str) -> list[str]:
    """Return the scope's blocks, largest first. Raises ValueError if fewer than two of them were measured."""
    among = [name for name in (SCOPES[scope] or measures) if name in measures]
    if len(among) < 2:
        raise ValueError(f"Scope {scope!r} needs two blocks to compare; measured are {', '.join(measures) or 'none'}.")
    return sorted(among, key=lambda name: measures[name][measure], reverse=True)


def largest_rows(measures: Measures, identity: Mapping[str, Any], block: str = "W_V") -> list[dict[str, Any]]:
    """Return, per scope and measure, which block is largest, whether it is `block`, and by which factor.

    `ratio` is the size of `block` over the largest of the others: above one where the claim holds.
    """
    rows = []
    for scope in SCOPES:
        for measure in MEASURES:
            order = ranking(measures, measure, scope)
            rival = order[1] if order[0] == block else order[0]
            rows.append(
                {
                    **identity,
                    "scope": scope,
                    "measure": measure,
                    "largest": order[0],
                    "holds": order[0] == block,
                    "ratio": measures[block][measure] / measures[rival][measure],
                    "share_of_steps": nan,
                }
            )
    return rows


def growth_rows(before: Measures, after: Measures, identity: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return, per scope and measure, whether every diagonal block grew; `ratio` is the smallest growth factor."""
    rows = []
    for scope in SCOPES:
        for measure in MEASURES:
            growth = {
                name: after[name][measure] / before[name][measure]
                for name in (SCOPES[scope] or before)
                if name in before and name in after
            }
            slowest = min(growth, key=lambda name: growth[name])
            rows.append(
                {
                    **identity,
                    "scope": scope,
                    "measure": measure,
                    "largest": slowest,
                    "holds": growth[slowest] > 1,
                    "ratio": growth[slowest],
                    "share_of_steps": nan,
                }
            )
    return rows


GROUPS: dict[str, tuple[str, ...]] = {
    "queries": ("W_Q",),
    "keys": ("W_K",),
    "values": ("W_V",),
    "layer_norm": tuple(POOLED),
    "feed_forward": ("W_1", "W_2"),
}
"""FIG-5's groups; a group counts with its largest block."""


def keys_and_values_rows(dynamics: Sequence[Mapping[str, Any]], identity: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return, for the norms along one run, whether keys and values are the two highest of FIG-5's groups.

    `share_of_steps` says at how many steps they are; the claim `holds` if at more than half. `ratio` is the mean over
    the steps of the lower of the two over the highest of the others ("much smaller"), `largest` the group that is
    highest most often.
    """
    rows = []
    for measure in ("parameter_spectral", "parameter_frobenius", "hessian_spectral", "hessian_frobenius"):
        ratios, highest = [], []
        for sizes in _by_step(dynamics, measure):
            group = {name: max(sizes[b] for b in blocks if b in sizes) for name, blocks in GROUPS.items()}
            others = max(group[name] for name in ("queries", "layer_norm", "feed_forward"))
            ratios.append(min(group["keys"], group["values"]) / others)
            highest.append(max(group, key=lambda name: group[name]))
        share = sum(ratio > 1 for ratio in ratios) / len(ratios)
        rows.append(
            {
                **identity,
                "scope": "training",
                "measure": measure,
                "largest": max(dict.fromkeys(highest), key=highest.count),
                "holds": share > 0.5,
                "ratio": sum(ratios) / len(ratios),
                "share_of_steps": share,
            }
        )
    return rows


def _by_step(dynamics: Sequence[Mapping[str, Any]], measure: str) -> Iterable[dict[str, float]]:
    steps: dict[int, dict[str, float]] = {}
    for row in dynamics:
        steps.setdefault(int(row["step"]), {})[row["block"]] = row[measure]
    return steps.values()


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return Wilson's score interval of a share; unlike the normal interval it is sensible at 0 and 1.

    Raises:
        ValueError: If n is not positive or successes are not in 0 … n.
    """
    from scipy import stats

    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"A share needs 0 ≤ successes ≤ n and n ≥ 1, got {successes} of {n}.")
    interval = stats.binomtest(successes, n).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)


def shares(rows: Sequence[Mapping[str, Any]], by: Sequence[str]) -> list[dict[str, Any]]:
    """Return, per combination of the columns `by`, the share of seeds in which `holds`, with its interval."""
    groups: dict[tuple[Any, ...], list[bool]] = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in by), []).append(bool(row["holds"]))
    table = []
    for key, holds in groups.items():
        low, high = wilson_interval(sum(holds), len(holds))
        counts = {"n_seeds": len(holds), "n_holds": sum(holds), "share": sum(holds) / len(holds)}
        table.append({**dict(zip(by, key, strict=True)), **counts, "low": low, "high": high})
    return table
