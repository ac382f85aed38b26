"""The RO-Crate of a run.

Which profile is checked by which means: these tests check, with nothing but the JSON, what RO-Crate 1.3 requires of a
crate like ours (descriptor, root, flat graph without dangling references, files, software) and what it recommends of
files and licence. A crate of the smoke run was also validated by the independent `rocrate-validator` 0.13 (profile
ro-crate-1.3), which is not part of the environment: no required check failed; of the recommended ones four did, all on
the publisher, who has no URL, no ROR identifier and no contact to name.
"""

import json

import pytest

from curvature_gap.provenance import PACKAGES, sha256
from curvature_gap.ro_crate import HOMES, ro_crate, write_ro_crate

RECORD = {
    "preset": "smoke",
    "versions": {"python": "3.11", "torch": "2.14"},
    "hardware": {"machine": "a machine"},
    "device": "cpu",
    "datasets": {"mnist": {"source": "digits", "sha256": "ab" * 32}},
    "git": {"commit": "cd" * 20},
    "command": "snakemake --cores all",
}


@pytest.fixture
def results(tmp_path):
    for name in (
        "tables/a.csv",
        "tables/a.tex",
        "figures/fig01.png",
        "checkpoints/x/init.safetensors",
        "provenance.json",
    ):
        path = tmp_path / "results/smoke" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "results/smoke"


@pytest.fixture
def files(results):
    return [path for path in results.rglob("*") if path.is_file()]


@pytest.fixture
def document(results, files):
    return ro_crate(results, RECORD, files)


@pytest.fixture
def graph(document):
    return {entity["@id"]: entity for entity in document["@graph"]}


def test_the_descriptor_names_the_profile_and_the_root(document, graph):
    descriptor = graph["ro-crate-metadata.json"]
    version = descriptor["conformsTo"]["@id"]
    assert (descriptor["@type"], descriptor["about"]) == ("CreativeWork", {"@id": "./"})
    assert (version, document["@context"]) == ("https://w3id.org/ro/crate/1.3", f"{version}/context")


def test_the_root_has_what_a_root_needs(graph):
    root = graph["./"]
    assert root["@type"] == "Dataset"
    assert root["datePublished"] == "2025-10-19"
    assert all(root[key] for key in ("name", "description", "license", "publisher"))
    assert graph[root["license"]["@id"]]["name"] == "MIT License"


def test_the_graph_is_flat_without_repeats_or_dangling_references(document, graph):
    assert len(graph) == len(document["@graph"])
    for entity in document["@graph"]:
        for value in entity.values():
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, dict):
                    assert set(item) == {"@id"}
                    assert item["@id"] in graph or item["@id"].startswith("https://w3id.org/ro/crate/")


def test_every_file_is_described_and_part_of_the_root(results, files, graph):
    names = {path.relative_to(results).as_posix() for path in files}
    assert {part["@id"] for part in graph["./"]["hasPart"]} >= names
    for name in names:
        entity = graph[name]
        assert (entity["@type"], entity["sha256"]) == ("File", sha256(results / name))
        assert int(entity["contentSize"]) == (results / name).stat().st_size
        assert entity["description"] != "A file of the run"
        assert "/" in entity["encodingFormat"]


def test_the_action_says_who_made_what_from_what_with_what(graph):
    run = graph["#run"]
    assert run["@type"] == "CreateAction"
    assert graph["./"]["mentions"] == {"@id": "#run"}
    assert {"@id": "tables/a.csv"} in run["result"]
    assert run["object"] == {"@id": "#dataset-mnist"} or run["object"] == [{"@id": "#dataset-mnist"}]
    assert {entity["@id"] for entity in run["instrument"]} == {"#python", "#torch"}
    assert graph["#torch"] | {"version": "2.14", "url": "https://pytorch.org"} == graph["#torch"]
    assert graph[run["agent"]["@id"]]["@type"] == "Organization"


def test_every_package_of_the_record_has_a_home():
    assert set(HOMES) == {"python", *PACKAGES}


def test_equal_runs_give_equal_crates(results, files, tmp_path):
    for name, order in (("one.json", files), ("two.json", files[::-1])):
        write_ro_crate(results, RECORD, order, tmp_path / name)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    assert json.loads((tmp_path / "one.json").read_text())["@graph"]
