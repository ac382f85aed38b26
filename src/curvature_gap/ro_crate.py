"""A finished run as an RO-Crate: files with SHA-256 and format, data, software, and the action that made them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from curvature_gap.files import atomic_path
from curvature_gap.provenance import sha256

PUBLISHED = "2025-10-19"
"""The paper's date. A wall clock would make equal runs unequal crates."""
AUTHORS = "The curvature-gap authors"
MIT = {
    "@type": "CreativeWork",
    "name": "MIT License",
    "description": "Use, copy, change and pass on, with the notice; no warranty.",
}
HOMES = {
    "python": "https://www.python.org",
    "torch": "https://pytorch.org",
    "torchvision": "https://pytorch.org/vision",
    "numpy": "https://numpy.org",
    "scipy": "https://scipy.org",
    "pandas": "https://pandas.pydata.org",
    "seaborn": "https://seaborn.pydata.org",
    "matplotlib": "https://matplotlib.org",
    "snakemake": "https://snakemake.github.io",
    "papermill": "https://papermill.readthedocs.io",
}
FORMATS = {
    ".csv": "text/csv",
    ".tex": "application/x-tex",
    ".txt": "text/plain",
    ".json": "application/json",
    ".pdf": "application/pdf",
    ".png": "image/png",
    ".safetensors": "application/octet-stream",
}
CONTENTS = {
    "tables": "A table of results, tidy CSV or the same in LaTeX",
    "figures": "A figure, or its caption as text",
    "checkpoints": "Weights of a model at one step of training",
    "provenance.json": "Versions, hardware, data, configuration and the tables' hashes",
}


def file_properties(path: Path, name: str) -> dict[str, str]:
    """Return what the crate says of one file; `name` is its path within the run."""
    return {
        "name": name,
        "description": CONTENTS.get(name.split("/", maxsplit=1)[0], "A file of the run"),
        "encodingFormat": FORMATS.get(path.suffix, "application/octet-stream"),
        "sha256": sha256(path),
        "contentSize": str(path.stat().st_size),
    }


def ro_crate(results: Path, record: Mapping[str, Any], files: Iterable[Path]) -> dict[str, Any]:
    """Return the document `ro-crate-metadata.json` of a run.

    Args:
        results: results/<preset>; the payload stays there.
        record: The run's `provenance`.
        files: The payload, below `results`.
    """
    from rocrate.model.contextentity import ContextEntity
    from rocrate.rocrate import ROCrate

    crate = ROCrate()
    crate.name = f"Reproduction of arXiv 2510.16927, preset {record['preset']}"
    crate.description = "Tables, figures and verdicts recomputed by the workflow, with their provenance."

    def add(id: str, properties: Mapping[str, Any]) -> Any:
        return crate.add(ContextEntity(crate, id, dict(properties)))

    crate.license = add("https://spdx.org/licenses/MIT", MIT)
    authors = add("#authors", {"@type": "Organization", "name": AUTHORS})
    crate.publisher = authors
    outputs = []
    for path in sorted(files):
        name = path.relative_to(results).as_posix()
        outputs.append(crate.add_file(path, dest_path=name, properties=file_properties(path, name)))
    software = [
        add(f"#{package}", {"@type": "SoftwareApplication", "name": package, "version": version, "url": HOMES[package]})
        for package, version in record["versions"].items()
    ]
    inputs = [
        add(f"#dataset-{name}", {"@type": "Dataset", "name": name, "sha256": d["sha256"], "description": d["source"]})
        for name, d in record["datasets"].items()
    ]
    action = {
        "@type": "CreateAction",
        "name": record["command"],
        "description": f"on {record['hardware']['machine']}, device {record['device']}",
        "identifier": record["git"]["commit"],
    }
    run = add("#run", action)
    run["agent"], run["object"], run["result"], run["instrument"] = authors, inputs, outputs, software
    crate.root_dataset["mentions"] = run
    document: dict[str, Any] = crate.metadata.generate()
    for entity in document["@graph"]:
        entity.pop("datePublished", None)
        if entity["@id"] == "./":
            entity["datePublished"] = PUBLISHED
    return document


def write_ro_crate(results: Path, record: Mapping[str, Any], files: Iterable[Path], destination: Path) -> None:
    """Write `ro_crate` to `destination`, the metadata file."""
    document = ro_crate(results, record, files)
    with atomic_path(destination) as temporary:
        temporary.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
