"""What cannot fit is refused before any job."""

import copy
from pathlib import Path

import pytest
import yaml

from curvature_gap import preflight
from curvature_gap.settings import SettingsError, load_settings

ROOT = Path(__file__).parents[1]


@pytest.fixture
def settings():
    config = yaml.safe_load((ROOT / "config/config.yaml").read_text())
    return load_settings(config | {"preset": "laptop"}, ROOT / "workflow/schemas/config.schema.yaml")


def test_the_default_fits_a_small_laptop(settings):
    preflight.check(settings, memory_mb=8_000)


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("architecture", "d_V", 4096, "datasets.mnist.hessian: the whole Hessian of 67,7"),
        ("architecture", "depth", 200, "Make d_V or d_ff smaller or leave out datasets.mnist.hessian"),
        ("training", "n_train", 10**8, "datasets.mnist.training: 100,000,000 images"),
    ],
)
def test_huge_sizes_are_refused_with_what_they_need(settings, section, key, value, message):
    broken = copy.deepcopy(settings)
    broken["datasets"]["mnist"][section][key] = value
    with pytest.raises(SettingsError) as caught:
        preflight.check(broken, memory_mb=24_000)
    assert message in str(caught.value)
    assert "this machine has 24.0 GB" in str(caught.value)


def test_a_containers_limit_counts(tmp_path):
    (tmp_path / "memory.max").write_text("5000000000\n")
    (tmp_path / "memory.current").write_text("1000000000\n")
    assert preflight.total_mb(tmp_path) == 5000
    assert preflight.free_mb(tmp_path) <= 4000
    (tmp_path / "memory.max").write_text("max\n")
    assert preflight.total_mb(tmp_path) >= preflight.free_mb(tmp_path) > 0


@pytest.mark.parametrize(("visible", "n"), [("", 0), ("3", 1), ("0,2", 2), ("0,1,2,3", 4)])
def test_local_runs_are_limited_to_the_memory_and_gpus_there_are(monkeypatch, visible, n):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    preflight.n_gpus.cache_clear()
    assert preflight.limits("cuda")["gpu"] == n
    assert set(preflight.limits("cpu")) == {"mem_mb"}
    assert preflight.limits("cpu")["mem_mb"] <= preflight.total_mb()
    preflight.n_gpus.cache_clear()
