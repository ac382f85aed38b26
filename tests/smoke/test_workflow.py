"""The real workflow on the smoke preset: everything appears, nothing is done twice, and an edit reruns what it must."""

import csv
import json
import os
import re

import numpy as np
import pytest

pytestmark = [pytest.mark.smoke, pytest.mark.timeout(1500)]


@pytest.fixture
def results(clone):
    return clone.root / "results" / "smoke"


def planned_rules(plan):
    """The rules that a dry run announces, with repetitions."""
    return re.findall(r"^(?:local)?rule (\w+):", plan, re.MULTILINE)


def rows(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def edited(clone):
    """`edited(path, old, new)`: change a tracked file for one test."""
    originals = {}

    def edit(name, old, new):
        path = clone.root / name
        originals.setdefault(path, (path.read_bytes(), path.stat()))
        text = path.read_text(encoding="utf-8")
        assert old in text, f"{name} does not contain {old!r}"
        path.write_text(text.replace(old, new), encoding="utf-8")

    yield edit
    for path, (content, stat) in originals.items():
        path.write_bytes(content)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_every_figure_of_the_paper_is_drawn(results):
    for n in range(1, 13):
        for suffix in ("pdf", "png"):
            figure = results / "figures" / f"fig{n:02d}.{suffix}"
            assert figure.stat().st_size > 3_000, figure
        assert (results / "figures" / f"fig{n:02d}.pdf").stat().st_size < 1_000_000


def test_captions_say_that_the_data_is_substituted(results):
    for name in ("fig03", "fig05", "fig06"):
        assert "digits" in (results / "figures" / f"{name}.txt").read_text(encoding="utf-8")


def test_no_claim_fails_and_every_statement_is_decided(results, clone):
    decisions = {row["id"]: row for row in rows(results / "claims.csv")}
    failed = [i for i, row in decisions.items() if row["verdict"] not in (row["expected_verdict"], "not_run")]
    assert failed == []
    ids = (clone.root / "paper/statement_ids.txt").read_text().split()
    assert {row["id"] for row in rows(results / "tables/statements.csv")} >= set(ids)


def test_a_hessian_file_keeps_its_contract(results):
    with np.load(results / "hessians/mnist_seed0/init.npz", allow_pickle=False) as file:
        H, names, offsets, shapes = (file[key] for key in ("H", "names", "offsets", "shapes"))
        assert {"loss", "grad_norm", "batch_sha256"} <= set(file.files)
    assert H.dtype == np.float64
    assert (H == H.T).all()
    assert offsets.dtype == shapes.dtype == np.int64
    assert len(offsets) == len(names) + 1
    assert offsets[-1] == len(H) == shapes.prod(axis=1).sum()


def test_the_provenance_names_data_versions_and_tables(results):
    record = json.loads((results / "provenance.json").read_text())
    assert record["datasets"]["mnist"]["source"] == "scikit-learn digits"
    assert record["versions"]["torch"]
    assert "timings.csv" not in record["tables"]
    assert record["tables"]["statements.csv"]


def test_a_second_run_does_nothing(clone):
    assert "Nothing to be done" in clone.planned()


def test_touched_files_rerun_nothing(clone):
    for path in clone.root.rglob("*"):
        relative = path.relative_to(clone.root).parts
        if path.is_file() and relative[0] not in ("results", ".snakemake"):
            os.utime(path)
    assert "Nothing to be done" in clone.planned()


def test_an_edited_notebook_redraws_one_figure(clone, edited):
    edited("notebooks/fig05.ipynb", "FIG-5", "FIG-5,")
    plan = clone.planned()
    assert "notebooks/fig05.ipynb" in plan
    rules = planned_rules(plan)
    assert rules.count("figure") == 1
    assert not {"train_mnist", "exact_hessian", "dataset_mnist", "identities"} & set(rules)


def test_an_edited_theorem_trains_nothing(clone, edited):
    edited("src/curvature_gap/theory/layer_norm.py", '"""', '""" ')
    rules = planned_rules(clone.planned())
    assert "identities" in rules
    assert not {"train_mnist", "exact_hessian", "dataset_mnist", "dynamics_mnist"} & set(rules)


def test_an_edited_model_trains_again(clone, edited):
    edited("src/curvature_gap/vit.py", '"""The vision transformer', '""" The vision transformer')
    rules = planned_rules(clone.planned())
    assert {"train_mnist", "exact_hessian"} <= set(rules)
    assert "dataset_mnist" not in rules


def test_a_misspelt_key_stops_before_any_job(clone, edited):
    edited(
        "config/config.yaml", "batch_size: 128\n        optimizer: adam\n", "batchsize: 128\n        optimizer: adam\n"
    )
    done = clone.snakemake(check=False)
    assert done.returncode != 0
    text = done.stdout + done.stderr
    assert "training.batchsize: unknown key. Did you mean batch_size?" in text
    assert "Traceback" not in text


def test_a_failing_notebook_keeps_its_traceback_and_yields_no_figure(clone, edited, results):
    before = (results / "figures/fig01.pdf").read_bytes()
    edited("notebooks/fig01.ipynb", "style.use()", "style.use(); raise RuntimeError('drawn wrong')")
    done = clone.snakemake("results/smoke/figures/fig01.pdf", check=False)
    assert done.returncode != 0
    assert not (results / "figures/fig01.pdf").exists()
    assert "drawn wrong" in (results / "notebooks/fig01.failed.ipynb").read_text(encoding="utf-8")
    edited("notebooks/fig01.ipynb", "style.use(); raise RuntimeError('drawn wrong')", "style.use()")
    clone.snakemake()
    assert (results / "figures/fig01.pdf").read_bytes() == before
