"""What a run asks of the machine, before any job: settings that cannot fit are refused in words, not by the kernel."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from curvature_gap.architecture import Architecture
from curvature_gap.settings import SettingsError
from curvature_gap.workflow_support import n_gpus

BASE_MB = 1000
"""Interpreter, torch and a small model."""

CGROUP = Path("/sys/fs/cgroup")


def total_mb(cgroup: Path = CGROUP) -> int:
    """Return the memory that this machine, or the container around us, has: 10^6 bytes."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup / "memory.max"
    text = limit.read_text().strip() if limit.is_file() else "max"
    return (pages if text == "max" else min(pages, int(text))) // 10**6


def free_mb(cgroup: Path = CGROUP) -> int:
    """Return the memory that can be had now without swapping: 10^6 bytes."""
    import psutil

    free = psutil.virtual_memory().available
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return max(0, free // 10**6)


def limits(device: str) -> dict[str, int]:
    """Return what all local jobs together may take: `mem_mb`, and with cuda `gpu`."""
    return {"mem_mb": max(BASE_MB, free_mb())} | ({"gpu": n_gpus()} if device == "cuda" else {})


def hessian_mb(architecture: Mapping[str, Any]) -> int:
    """Return about what a whole Hessian's job takes: the matrix twice (computing and certifying it), and torch."""
    return BASE_MB + 2 * 8 * Architecture(**architecture).n_parameters ** 2 // 10**6


def training_mb(dataset: Mapping[str, Any]) -> int:
    """Return about what a training's job takes: images as bytes and as float32, weights, gradients, Adam's moments."""
    shape = dataset["architecture"]
    pixels = dataset["training"]["n_train"] * shape["channels"] * shape["image_size"] ** 2
    return BASE_MB + (5 * pixels + 16 * Architecture(**shape).n_parameters) // 10**6


def check(settings: Mapping[str, Any], memory_mb: int) -> None:
    """Refuse what one machine cannot hold.

    Raises:
        SettingsError: Naming each setting, what it needs and what there is.
    """
    faults = []
    for name, dataset in settings["datasets"].items():
        n = Architecture(**dataset["architecture"]).n_parameters
        if "hessian" in dataset and (needed := hessian_mb(dataset["architecture"])) > memory_mb:
            faults.append(
                f"datasets.{name}.hessian: the whole Hessian of {n:,} parameters takes about {needed / 1000:,.1f} GB, "
                f"this machine has {memory_mb / 1000:,.1f} GB. Make d_V or d_ff smaller or leave out "
                f"datasets.{name}.hessian."
            )
        if (needed := training_mb(dataset)) > memory_mb:
            faults.append(
                f"datasets.{name}.training: {dataset['training']['n_train']:,} images and {n:,} parameters take about "
                f"{needed / 1000:,.1f} GB, this machine has {memory_mb / 1000:,.1f} GB. Lower n_train, image_size or "
                "the model's width."
            )
    if faults:
        raise SettingsError("\n".join(faults))
