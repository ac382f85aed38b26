"""Readings of the paper's model against its published figure: what varies, how it is measured, and what is decided."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from curvature_gap import data, exact_hessian
from curvature_gap.architecture import Architecture
from curvature_gap.norms import block_norms_table
from curvature_gap.published_readings import (
    PINNED,
    Reading,
    batch,
    block_means,
    distances,
    drawn,
    over_seeds,
    readings,
)
from curvature_gap.vit import ViT, initial_parameters

ROOT = Path(__file__).parents[1]
SMALL = Architecture(image_size=4, channels=1, patch=2, classes=3, d_V=5, d_ff=7)


def test_readings_differ_from_the_pinned_one_in_one_thing():
    pinned, *others = readings()
    assert pinned.architecture.n_parameters == 3552
    assert len({reading.name for reading in others}) == len(others) == 8
    for other in others:
        changed = [key for key in ("architecture", "pixels", "weights") if getattr(other, key) != getattr(pinned, key)]
        assert len(changed) == 1


def test_weights_are_drawn_as_the_reading_says():
    torch_default = drawn(Reading("a"), seed=3)
    expected = initial_parameters(PINNED, torch.Generator().manual_seed(3))
    assert all(torch.equal(torch_default[name], expected[name]) for name in expected)
    xavier, normal = (drawn(Reading("a", weights=weights), seed=3) for weights in ("xavier", "normal"))
    bound = (6 / (16 + 64)) ** 0.5
    assert 0.95 * bound < float(xavier["W_1"].abs().max()) <= bound
    assert float(normal["W_1"].std()) == pytest.approx(0.02, rel=0.1)
    for weights in (xavier, normal):
        assert torch.equal(weights["LN1_gamma"], torch.ones(16))


def test_pixels_are_shifted_and_scaled_as_the_reading_says():
    images = np.random.default_rng(0).integers(0, 256, (20, 1, 4, 4)).astype(np.uint8)
    labels = np.arange(20) % 3
    dataset = data.assemble("a", (images, labels), (images[:5], labels[:5]), ("0", "1", "2"), source="drawn")
    whole, unit, centred = (batch(Reading("a", pixels=p), dataset, 20, 0)[0] for p in ("dataset", "unit", "centred"))
    assert float(whole.mean()) == pytest.approx(0, abs=1e-6)
    assert float(whole.square().mean()) == pytest.approx(1, rel=1e-6)
    assert (float(unit.min()), float(unit.max())) == (images.min() / 255, images.max() / 255)
    torch.testing.assert_close(centred, 2 * unit - 1)
    torch.testing.assert_close(
        whole, (unit - dataset.mean[0]) / dataset.std[0], check_dtype=False, rtol=1e-5, atol=1e-6
    )


def test_block_means_are_those_of_the_runs_tables(generator):
    images = torch.randn(3, 1, 4, 4, generator=generator)
    H = exact_hessian(ViT(SMALL, seed=1), images, torch.arange(3))
    lines = block_norms_table(H, run="a", stage="init", seed=0)
    expected = {(line["row"], line["column"]): line["mean_log10_abs"] for line in lines}
    means = block_means(H)
    assert len(means) == 100
    assert means == pytest.approx({pair: expected[pair] for pair in means}, rel=1e-12)


def test_distances_leave_out_pairs_that_a_reading_lacks():
    published = {("a", "a"): -1.0, ("a", "LN1"): -2.0, ("b", "b"): -3.0}
    found = distances({("a", "a"): -1.3, ("a", "LN1"): -1.6}, published)
    assert found["n_pairs"] == 2
    assert found["mean"] == pytest.approx(0.05)
    assert found["rms"] == pytest.approx((0.125) ** 0.5)
    assert found["rms_without_strips"] == pytest.approx(0.3)


def test_the_nearest_reading_comes_first():
    row = {"parameters": 7, "n_pairs": 100, "mean": 0.0, "rms_without_strips": 0.1}
    rows = [row | {"reading": name, "rms": rms} for name, rms in (("far", 2.0), ("near", 0.1), ("near", 0.3))]
    near, far = over_seeds(rows)
    assert (near["reading"], near["n_seeds"], near["rms"]) == ("near", 2, pytest.approx(0.2))
    assert near["rms_sd"] == pytest.approx(0.02**0.5)
    assert far["rms_sd"] == 0


def stated() -> str:
    """The entry of DECISIONS.md, in one line."""
    entry = (ROOT / "DECISIONS.md").read_text(encoding="utf-8").split("against the published figure.**")[1]
    return " ".join(entry.split("\n\n")[0].split())


def test_the_decision_states_the_committed_numbers():
    with (ROOT / "expected/published/readings.csv").open(encoding="utf-8", newline="") as file:
        rows = {row["reading"]: row for row in csv.DictReader(file)}
    assert set(rows) == {reading.name for reading in readings()}
    for name, row in rows.items():
        assert f"{name} {float(row['rms']):.2f} ± {float(row['rms_sd']):.2f}" in stated()


def test_the_decision_states_the_comparison_over_five_seeds():
    with (ROOT / "expected/laptop/tables/published_comparison.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    gaps = np.array([float(row["deviation"]) for row in rows])
    assert {row["n_seeds"] for row in rows} == {"5"}
    assert f"{np.sqrt((gaps**2).mean()):.2f} away, {gaps.mean():.2f} on average" in stated()
