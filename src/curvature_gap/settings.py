"""From config/config.yaml to the settings of one preset, checked before any job starts."""

import difflib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Settings = dict[str, Any]


class SettingsError(ValueError):
    """A configuration that cannot be run; the message names the key and what is allowed."""


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Settings:
    """Return `base` with `changes` laid over it, level by level; lists and numbers are replaced whole."""
    merged = dict(base)
    for key, value in changes.items():
        both_trees = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both_trees else value
    return merged


def load_settings(config: Mapping[str, Any], schema_path: Path) -> Settings:
    """Return the checked settings of the preset that `config` names.

    Args:
        config: The parsed configuration: `preset`, `device`, `common`, `presets`.
        schema_path: JSON schema of the merged settings.

    Raises:
        SettingsError: If the preset is unknown, a key is misspelt or a value impossible. All faults are listed.
    """
    unknown = sorted(set(config) - {"preset", "device", "common", "presets"})
    if unknown:
        raise SettingsError(_unknown_keys("", unknown, ["preset", "device", "common", "presets"]))
    presets = config.get("presets") or {}
    name = config.get("preset")
    if name not in presets:
        raise SettingsError(f"preset: {name!r} is not defined; choose one of {', '.join(sorted(presets))}.")
    settings = merge(config.get("common") or {}, presets[name] or {})
    settings |= {"preset": name, "device": config.get("device", "auto")}
    _check_schema(settings, schema_path)
    _check_sense(settings)
    return settings


def _check_schema(settings: Settings, schema_path: Path) -> None:
    import yaml

    # jsonschema would build 38 grammars for URL formats that no schema of ours uses: three seconds at every start.
    grammars = sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    import jsonschema

    if grammars is None:
        del sys.modules["rfc3987_syntax"]

    schema = yaml.safe_load(schema_path.read_text(encoding="utf-8"))
    errors = jsonschema.Draft202012Validator(schema).iter_errors(settings)
    faults = [_sentence(error) for error in sorted(errors, key=lambda error: list(map(str, error.absolute_path)))]
    if faults:
        raise SettingsError("\n".join(faults))


def _sentence(error: Any) -> str:
    """Say a schema violation the way its reader would fix it."""
    key = ".".join(map(str, error.absolute_path))
    if error.validator == "additionalProperties":
        allowed = list(error.schema.get("properties", {}))
        return _unknown_keys(key, [k for k in error.instance if k not in allowed], allowed)
    if error.validator == "enum":
        return f"{key}: {error.instance!r} is not one of {', '.join(map(str, error.validator_value))}."
    if error.validator == "required":
        missing = [k for k in error.validator_value if k not in error.instance]
        return f"{key}: missing {', '.join(missing)}."
    return f"{key}: {error.message}."


def _unknown_keys(parent: str, unknown: list[str], allowed: list[str]) -> str:
    where = f"{parent}." if parent else ""
    sentences = []
    for key in unknown:
        close = difflib.get_close_matches(str(key), allowed, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        sentences.append(f"{where}{key}: unknown key.{hint} Allowed: {', '.join(allowed)}.")
    return "\n".join(sentences)


def _check_sense(settings: Settings) -> None:
    """Refuse what the schema cannot express: relations between two values."""
    from curvature_gap.architecture import Architecture

    faults = []
    for name, dataset in settings["datasets"].items():
        where = f"datasets.{name}"
        training = dataset["training"]
        try:
            Architecture(**dataset["architecture"])
        except ValueError as error:
            faults.append(f"{where}.architecture: {error}")
        if dataset["source"] == "folder" and "path" not in dataset:
            faults.append(f"{where}.path: missing; source folder needs the path of a folder or zip of class folders.")
        if dataset["source"] != "folder" and "path" in dataset:
            faults.append(f"{where}.path: only source folder takes a path, source is {dataset['source']}.")
        if training["batch_size"] > training["n_train"]:
            faults.append(
                f"{where}.training.batch_size: {training['batch_size']} exceeds n_train {training['n_train']}."
            )
        late = [step for step in training.get("checkpoint_steps", []) if step >= training["steps"]]
        if late:
            faults.append(f"{where}.training.checkpoint_steps: {late} not below steps {training['steps']}.")
        sizes = {"mnist": 60_000, "cifar100": 50_000, "digits": 1_437}
        largest = sizes.get(dataset["source"])
        if largest and training["n_train"] > largest:
            faults.append(f"{where}.training.n_train: {training['n_train']} exceeds the {largest} training images.")
        batch = dataset.get("hessian", {}).get("batch_size", 0)
        if batch > training["n_train"]:
            faults.append(f"{where}.hessian.batch_size: {batch} exceeds n_train {training['n_train']}.")
        faults += _experiment_faults(where, dataset)
    if faults:
        raise SettingsError("\n".join(faults))


def _experiment_faults(where: str, dataset: Mapping[str, Any]) -> list[str]:
    """Say what the experiments ask for and the dataset's other sections do not give."""
    faults = []
    training = dataset["training"]
    for section in ("dynamics", "sensitivity", "spectrum", "curvature_vs_data"):
        if section in dataset and "hessian" not in dataset:
            faults.append(f"{where}.{section}: needs {where}.hessian, which names the batch.")
    for section in ("increments", "spectrum", "curvature_vs_data", "tiles"):
        missing = sorted(set(dataset.get(section, {}).get("seeds", [])) - set(dataset["seeds"]))
        if missing:
            faults.append(f"{where}.{section}.seeds: {missing} are not among {where}.seeds {dataset['seeds']}.")
    whole = dataset.get("dynamics", {}).get("whole_steps", [])
    absent = sorted(set(whole) - set(training.get("checkpoint_steps", [])))
    if absent:
        faults.append(f"{where}.dynamics.whole_steps: {absent} are not among training.checkpoint_steps.")
    tiled = dataset.get("tiles", {}).get("batch_size", 0)
    if tiled > training["n_train"]:
        faults.append(f"{where}.tiles.batch_size: {tiled} exceeds n_train {training['n_train']}.")
    sizes = dataset.get("curvature_vs_data", {}).get("sizes", [])
    if sizes and max(sizes) > training["n_train"]:
        faults.append(f"{where}.curvature_vs_data.sizes: {max(sizes)} exceeds n_train {training['n_train']}.")
    increments = dataset.get("increments", {})
    for key, parts in (("batch_size", 20), ("gradient_batch", 4)):
        if increments.get(key, 0) * parts > training["n_train"]:
            faults.append(
                f"{where}.increments.{key}: {increments[key]} is too large; "
                f"n_train {training['n_train']} must hold {parts} of them."
            )
    if increments.get("hessian_samples", 0) > training["n_train"]:
        faults.append(f"{where}.increments.hessian_samples exceeds n_train {training['n_train']}.")
    return faults
