"""Which reading of what the paper leaves open gives the published Hessian figure: one change at a time.

`python -m curvature_gap.published_readings results/laptop/data/mnist.npz --output expected/published` measures all
readings once, outside the presets; see DECISIONS.md.
"""

import argparse
import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvature_gap import data
from curvature_gap.architecture import Architecture
from curvature_gap.exact_hessian import exact_hessian
from curvature_gap.hessian import Hessian
from curvature_gap.norms import LOG_FLOOR, POOLED
from curvature_gap.published import STRIPS
from curvature_gap.tables import write_table
from curvature_gap.vit import ViT, initial_parameters

PINNED = Architecture(image_size=28, channels=1, patch=4, classes=10, d_V=16, d_ff=64)
PUBLISHED = Path("paper/published_blocks_init.csv")


@dataclass(frozen=True)
class Reading:
    """One reading: the model, how pixels in [0, 1] are shifted and scaled, and how weights are drawn.

    `pixels` is `dataset` (its own mean and deviation), `unit` ([0, 1] as they are) or `centred` ([−1, 1]). `weights` is
    `torch` (uniform in ±1/√fan_in), `xavier` (uniform in ±√(6/(fan_in + fan_out))) or `normal` (N(0, 0.02²)).
    """

    name: str
    architecture: Architecture = PINNED
    pixels: str = "dataset"
    weights: str = "torch"


def readings() -> list[Reading]:
    """Return the pinned reading and its neighbours."""
    pinned = Reading("pinned")
    changed: dict[str, dict[str, Any]] = {
        "positions none": {"positions": "none"},
        "positions learned": {"positions": "learned"},
        "biases": {"bias": True},
        "no output projection": {"output_projection": False},
    }
    models = [replace(pinned, name=name, architecture=replace(PINNED, **change)) for name, change in changed.items()]
    pixels = [replace(pinned, name=f"pixels {name}", pixels=name) for name in ("unit", "centred")]
    weights = [replace(pinned, name=f"weights {name}", weights=name) for name in ("xavier", "normal")]
    return [pinned, *models, *pixels, *weights]


def drawn(reading: Reading, seed: int) -> dict[str, Tensor]:
    """Return the reading's initial parameters; vectors and learned positions are drawn as in the pinned model."""
    generator = torch.Generator().manual_seed(seed)
    parameters = initial_parameters(reading.architecture, generator)
    for name, p in parameters.items():
        if p.ndim < 2 or name == "positions" or reading.weights == "torch":
            continue
        if reading.weights == "normal":
            parameters[name] = 0.02 * torch.randn(p.shape, generator=generator)
        else:
            parameters[name] = (2 * torch.rand(p.shape, generator=generator) - 1) * math.sqrt(6 / sum(p.shape))
    return parameters


def batch(reading: Reading, dataset: data.Dataset, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the first n images of the training set's order `seed`, shifted and scaled as read, and their labels."""
    indices = data.subset_indices(dataset.train_images, dataset.train_labels, n, seed)
    images, labels, _ = data.hessian_batch(dataset, indices, n)
    raw = torch.as_tensor(dataset.train_images[indices]).float() / 255
    return {"dataset": images, "unit": raw, "centred": 2 * raw - 1}[reading.pixels], labels


def block_means(H: Hessian) -> dict[tuple[str, str], float]:
    """Return the mean log10 |entry| of every ordered pair of blocks, LN1 and LN2 pooled, floored as the figure is."""
    magnitude = H.matrix().abs().clamp(min=LOG_FLOOR).log10()
    pool_of = {part: pool for pool, parts in POOLED.items() for part in parts}
    rows: dict[str, list[int]] = {}
    for name, start, stop in zip(H.names, H.offsets, H.offsets[1:], strict=False):
        rows.setdefault(pool_of.get(name, name), []).extend(range(start, stop))
    return {(a, b): float(magnitude[rows[a]][:, rows[b]].double().mean()) for a in rows for b in rows}


def distances(means: Mapping[tuple[str, str], float], published: Mapping[tuple[str, str], float]) -> dict[str, Any]:
    """Return the mean and root mean square gap to the published block means, the latter also without the LN strips.

    Pairs that the reading does not have are left out; `n_pairs` says how many remain.
    """
    pairs = [pair for pair in published if pair in means]
    gaps = {pair: means[pair] - published[pair] for pair in pairs}
    wide = [gap for pair, gap in gaps.items() if not set(pair) & set(STRIPS)]

    def rms(values: Sequence[float]) -> float:
        return math.sqrt(sum(v * v for v in values) / len(values))

    return {
        "n_pairs": len(pairs),
        "mean": sum(gaps.values()) / len(gaps),
        "rms": rms(list(gaps.values())),
        "rms_without_strips": rms(wide),
    }


def measured(dataset: data.Dataset, published: Path, seeds: int, n: int = 128) -> Iterator[dict[str, Any]]:
    """Yield one row a reading and seed, the batch fixed."""
    with published.open(encoding="utf-8", newline="") as file:
        figure = {(row["row"], row["column"]): float(row["mean_log10_abs"]) for row in csv.DictReader(file)}
    for reading in readings():
        images, labels = batch(reading, dataset, n, seed=0)
        for seed in range(seeds):
            model = ViT(reading.architecture)
            model.load_state_dict(drawn(reading, seed))
            # float32: what its rounding moves lies below the figure's floor.
            H = exact_hessian(model, images, labels, dtype=torch.float32, certify=False, threads=1)
            about = {"reading": reading.name, "parameters": H.n_parameters, "seed": seed}
            yield about | distances(block_means(H), figure)


def over_seeds(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line a reading, nearest first: means over seeds, and the standard deviation of the distance."""
    lines = []
    for name in dict.fromkeys(row["reading"] for row in rows):
        of = [row for row in rows if row["reading"] == name]
        line = {key: of[0][key] for key in ("reading", "parameters", "n_pairs")} | {"n_seeds": len(of)}
        for key in ("mean", "rms", "rms_without_strips"):
            line[key] = sum(row[key] for row in of) / len(of)
        variance = sum((row["rms"] - line["rms"]) ** 2 for row in of) / max(len(of) - 1, 1)
        lines.append(line | {"rms_sd": math.sqrt(variance)})
    return sorted(lines, key=lambda line: line["rms"])


def main() -> None:
    """Measure all readings and write readings.csv, and readings_by_seed.csv, to the output folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("dataset", type=Path, help="the prepared MNIST of a run, results/laptop/data/mnist.npz")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds (default: 3)")
    parser.add_argument("--output", type=Path, default=Path("expected/published"))
    options = parser.parse_args()
    rows = []
    for row in measured(data.read_prepared(options.dataset), PUBLISHED, options.seeds):
        rows.append(row)
        print(f"{row['reading']}, seed {row['seed']}: {row['rms']:.3f}", flush=True)
    write_table(rows, options.output / "readings_by_seed.csv")
    write_table(over_seeds(rows), options.output / "readings.csv")


if __name__ == "__main__":
    main()
