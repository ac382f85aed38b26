"""Every fault of a configuration is told before any job starts, with its key and what is allowed."""

import copy
from pathlib import Path

import pytest
import yaml

from curvature_gap.settings import SettingsError, load_settings, merge

ROOT = Path(__file__).parents[1]
SCHEMA = ROOT / "workflow/schemas/config.schema.yaml"


@pytest.fixture
def config():
    return yaml.safe_load((ROOT / "config/config.yaml").read_text())


def test_merge_goes_level_by_level_and_replaces_lists_whole():
    base = {"a": {"b": 1, "c": [1, 2]}, "d": 3}
    assert merge(base, {"a": {"c": [5]}, "e": 4}) == {"a": {"b": 1, "c": [5]}, "d": 3, "e": 4}
    assert base == {"a": {"b": 1, "c": [1, 2]}, "d": 3}


@pytest.mark.parametrize("preset", ["smoke", "laptop", "paper"])
def test_the_presets_are_valid(config, preset):
    settings = load_settings(config | {"preset": preset}, SCHEMA)
    assert settings["preset"] == preset
    assert set(settings["datasets"]) == {"mnist", "cifar100"}


def test_the_laptop_preset_runs_mnist_at_the_papers_size(config):
    mnist = load_settings(config, SCHEMA)["datasets"]["mnist"]
    assert mnist["training"]["n_train"] == 60_000
    assert len(mnist["seeds"]) >= 5
    assert (mnist["architecture"]["d_V"], mnist["architecture"]["d_ff"]) == (16, 64)


TILES = {"batch_size": 32, "batch_seed": 0, "seeds": [0], "stages": ["trained"], "tile_mb": 1, "job_mb": 2}
FAULTS = [
    ("preset", "huge", "preset: 'huge' is not defined; choose one of laptop, paper, smoke"),
    ("device", "gpu", "device: 'gpu' is not one of auto, cpu, cuda"),
    ("common.datasets.mnist.training.stepps", 5, "training.stepps: unknown key. Did you mean steps?"),
    ("common.datasets.mnist.trainin", {}, "datasets.mnist.trainin: unknown key. Did you mean training?"),
    ("common.theorie", {}, "theorie: unknown key. Did you mean theory?"),
    ("comon", {}, "comon: unknown key. Did you mean common?"),
    ("common.datasets.mnist.training.steps", "many", "training.steps: 'many' is not of type 'integer'"),
    ("common.datasets.mnist.training.steps", -1, "training.steps: -1 is less than the minimum of 1"),
    ("common.datasets.mnist.training.steps", 2.5, "training.steps: 2.5 is not of type 'integer'"),
    ("common.datasets.mnist.training.learning_rate", 0, "learning_rate: 0 is less than or equal to the minimum of 0"),
    ("common.datasets.mnist.training.optimizer", "lion", "optimizer: 'lion' is not one of adam, adamw, sgd"),
    ("common.datasets.mnist.training.n_train", 70_000, "n_train: 70000 exceeds the 60000 training images"),
    ("common.datasets.mnist.training.batch_size", 60_001, "batch_size: 60001 exceeds n_train 60000"),
    ("common.datasets.mnist.training.checkpoint_steps", [9999], "checkpoint_steps: [9999] not below steps 4690"),
    ("common.datasets.mnist.hessian.batch_size", 60_001, "hessian.batch_size: 60001 exceeds n_train 60000"),
    ("common.datasets.mnist.architecture.patch", 5, "architecture: patch 5 does not divide image_size 28"),
    ("common.datasets.mnist.architecture.heads", 3, "architecture: heads 3 does not divide d_V 16"),
    ("common.datasets.mnist.architecture.d_V", 10**9, "d_V: 1000000000 is greater than the maximum of 16384"),
    ("common.datasets.mnist.architecture.positions", "rotary", "positions: 'rotary' is not one of none, sinusoidal"),
    ("common.datasets.mnist.seeds", [], "seeds: [] should be non-empty"),
    ("common.datasets.mnist.seeds", [1, 1], "seeds: [1, 1] has non-unique elements"),
    ("common.datasets.mnist.source", "imagenet", "source: 'imagenet' is not one of mnist, cifar100"),
    ("common.datasets.mnist.source", "folder", "datasets.mnist.path: missing"),
    ("common.datasets.mnist.path", "images", "datasets.mnist.path: only source folder takes a path"),
    ("common.datasets.my data", {}, "'my data' does not match"),
    (
        "common.datasets.mnist.dynamics.whole_steps",
        [1, 6],
        "dynamics.whole_steps: [6] are not among training.checkpoint",
    ),
    (
        "common.datasets.mnist.dynamics.whole_steps",
        list(range(1, 10)),
        "whole_steps: [1, 2, 3, 4, 5, 6, 7, 8, 9] is too l",
    ),
    ("common.datasets.mnist.increments.seeds", [0, 9], "increments.seeds: [9] are not among datasets.mnist.seeds"),
    ("common.datasets.mnist.increments.batch_size", 6000, "increments.batch_size: 6000 is too large; n_train 60000"),
    ("common.datasets.mnist.increments.dtype", "bfloat16", "dtype: 'bfloat16' is not one of float32, float64"),
    ("common.datasets.mnist.increments.orderings", 1, "orderings: 1 is less than the minimum of 2"),
    ("common.datasets.mnist.curvature_vs_data.sizes", [9, 99, 70_000], "sizes: 70000 exceeds n_train 60000"),
    ("common.datasets.cifar100.spectrum", {"seeds": [0]}, "cifar100.spectrum: needs datasets.cifar100.hessian"),
    (
        "common.datasets.mnist.tiles",
        {"seeds": [0]},
        "mnist.tiles: missing batch_size, batch_seed, stages, tile_mb, job_mb",
    ),
    ("common.datasets.mnist.tiles", TILES | {"seeds": [7]}, "tiles.seeds: [7] are not among datasets.mnist.seeds"),
    ("common.datasets.mnist.tiles", TILES | {"stages": ["step_5"]}, "'step_5' is not one of init, trained"),
    ("common.datasets.mnist.tiles", TILES | {"batch_size": 60_001}, "tiles.batch_size: 60001 exceeds n_train 60000"),
    ("common.datasets.mnist.tiles", TILES | {"tile_mb": 0}, "tile_mb: 0 is less than or equal to the minimum of 0"),
    ("common.theory.search_seed", -3, "theory.search_seed: -3 is less than the minimum of 0"),
]


@pytest.mark.parametrize(("key", "value", "message"), FAULTS, ids=[f"{k}={v}"[:60] for k, v, _ in FAULTS])
def test_a_fault_names_its_key_and_what_is_allowed(config, key, value, message):
    broken = copy.deepcopy(config)
    *parents, last = key.split(".")
    node = broken
    for parent in parents:
        node = node[parent]
    node[last] = value
    with pytest.raises(SettingsError) as caught:
        load_settings(broken, SCHEMA)
    assert message in str(caught.value)


def test_all_faults_are_told_at_once(config):
    config["common"]["datasets"]["mnist"]["training"] |= {"stepps": 1, "optimizer": "lion"}
    with pytest.raises(SettingsError) as caught:
        load_settings(config, SCHEMA)
    assert "stepps" in str(caught.value)
    assert "lion" in str(caught.value)
