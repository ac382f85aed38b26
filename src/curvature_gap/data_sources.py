"""Where datasets come from. A new one is a function that returns a `Dataset`, and a line in `SOURCES`."""

import inspect
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from curvature_gap import cifar100, generated_images, image_folder, mnist
from curvature_gap.data import Dataset

log = logging.getLogger(__name__)

COMMON = ("image_size", "channels", "classes")
"""Settings that every source takes: to follow if it can choose, else to be compared with what it has."""


def _always() -> tuple[bool, str]:
    return True, "made here, without network"


@dataclass(frozen=True)
class Source:
    """`load(name, **settings)` returns the dataset; its keywords are the settings it takes. `at_hand` is quick."""

    load: Callable[..., Dataset]
    at_hand: Callable[..., tuple[bool, str]] = _always


SOURCES = {
    "mnist": Source(mnist.load, mnist.at_hand),
    "cifar100": Source(cifar100.load, cifar100.at_hand),
    "digits": Source(generated_images.load_digits),
    "synthetic": Source(generated_images.load_synthetic),
    "folder": Source(image_folder.load, image_folder.at_hand),
}


def prepare(source: str, *, name: str | None = None, **settings: Any) -> Dataset:
    """Fetch, verify and return a dataset in canonical order.

    Args:
        source: A key of `SOURCES`.
        name: Of the dataset; the source's if None.
        **settings: `image_size`, `channels`, `classes`, and what the source's `load` takes (`path` for a folder); None
            means not given.

    Raises:
        DatasetUnavailable: If it has to be fetched and no source of it works.
        ImageFolderError: If a folder of images cannot be used.
        ValueError: If the source or a setting is unknown, or the data are not what the settings say.
    """
    chosen = _source(source)
    given = {key: value for key, value in settings.items() if value is not None}
    takes = list(inspect.signature(chosen.load).parameters)[1:]
    unknown = sorted(set(given) - set(takes) - set(COMMON))
    if unknown:
        allowed = ", ".join(dict.fromkeys([*takes, *COMMON]))
        raise ValueError(f"Source {source} does not take {', '.join(unknown)}; it takes {allowed}.")
    if "path" in takes and "path" not in given:
        raise ValueError(f"Source {source} needs path: a directory of class folders or a zip of it.")
    dataset = chosen.load(name or source, **{key: value for key, value in given.items() if key in takes})
    for key in COMMON:
        if key in given and getattr(dataset, key) != given[key]:
            raise ValueError(f"{dataset.name} has {key} {getattr(dataset, key)}, the settings say {given[key]}.")
    n_train, n_test = len(dataset.train_labels), len(dataset.test_labels)
    log.info("%s: %d + %d images from %s, content %s", dataset.name, n_train, n_test, dataset.source, dataset.sha256)
    return dataset


def is_at_hand(source: str, path: str | None = None) -> tuple[bool, str]:
    """Say whether a dataset can be had without network, and why; quick, the content is not looked at."""
    chosen = _source(source)
    return chosen.at_hand(path) if path is not None else chosen.at_hand()


def at_hand_or_prepared(source: str, record: str | Path, path: str | None = None) -> bool:
    """Return what a workflow watches to notice data added later: `is_at_hand`, frozen once the dataset was prepared.

    Without the freeze, a download that fills the cache would look like data added later and rerun everything once.

    Args:
        source: A key of `SOURCES`.
        record: The dataset's JSON side file, with the answer of its own run under `at_hand`.
        path: Of a folder.
    """
    try:
        written = json.loads(Path(record).read_text(encoding="utf-8"))
        if written["available"]:
            return bool(written["at_hand"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no record, or not an intact one: the rule has to run anyway
    return is_at_hand(source, path)[0]


def _source(source: str) -> Source:
    if source not in SOURCES:
        raise ValueError(f"There is no source {source!r}; choose one of {', '.join(SOURCES)}.")
    return SOURCES[source]
