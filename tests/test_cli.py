"""Every command with good and bad input: what it prints, what it says on stderr, its exit status."""

import contextlib
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from curvature_gap import cli, data, exact_hessian
from curvature_gap.architecture import Architecture
from curvature_gap.bound_cases import BOUND_CASES
from curvature_gap.bound_search import SearchBudget, save_witness, search
from curvature_gap.certificate import Certificate, CertificateError
from curvature_gap.claims import decide, read_claims
from curvature_gap.hessian import Hessian
from curvature_gap.loss_increments import Measurement
from curvature_gap.tables import write_table
from curvature_gap.training import write_checkpoint
from curvature_gap.vit import ViT

ROOT = Path(__file__).parents[1]
SMOKE = Architecture(image_size=28, channels=1, classes=10, patch=7, d_V=8, d_ff=16)
P = SMOKE.n_parameters


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A clone whose smoke run has one model, one witness, one run's increments and its claims."""
    root = tmp_path_factory.mktemp("clone")
    for name in (
        "config/config.yaml",
        "workflow/schemas/config.schema.yaml",
        "paper/claims.yaml",
        "paper/abstract.yaml",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, root / name)
    results = root / "results/smoke"
    write_model_and_batch(results)
    found = search(BOUND_CASES["N1"], BOUND_CASES["N1"].printed, SearchBudget(instances=20, ascents=0, steps=0))
    save_witness(results / "witnesses/part0/N1.npz", found.witness)
    losses = np.random.default_rng(0).exponential(size=900)
    stored = {"distance": 0.1, "M": 2.0, "M_residual": 0.0, "M_samples": 5, "M_tight": np.nan}
    Measurement(losses, losses, **stored, n_orderings=10, seed=0).save(results / "increments/mnist_seed0.npz")
    with contextlib.chdir(root):  # which has no benchmark
        write_claims(results, read_claims(root / "paper/claims.yaml"))
    return root


def write_model_and_batch(results):
    draw = np.random.default_rng(0)
    images = [draw.integers(0, 256, (n, 1, 28, 28)).astype(np.uint8) for n in (50, 10)]
    labels = [np.arange(len(x)) % 10 for x in images]
    names = tuple("0123456789")
    dataset = data.assemble("mnist", (images[0], labels[0]), (images[1], labels[1]), names, source="drawn")
    data.write_prepared(dataset, results / "data/mnist.npz")
    (results / "subsets").mkdir()
    np.savez(results / "subsets/mnist_seed0.npz", indices=np.arange(40))
    model = ViT(SMOKE, seed=0)
    write_checkpoint(results / "checkpoints/mnist_seed0/trained.safetensors", dict(model.named_parameters()))


def write_claims(results, claims):
    """Statement P2 holds; what else there is to claim was not run."""
    row = dict.fromkeys(("max_rel_error_printed", "max_rel_error_corrected", "worst_ratio", "witness", "note"), "")
    row |= {"id": "P2", "kind": "identity", "as_printed": "holds", "corrected": "not_needed", "n_cases": 3}
    write_table([row], results / "tables/statements.csv")
    write_table([decide(claim, results, "smoke") for claim in claims], results / "claims.csv")


@pytest.fixture
def clone(finished, monkeypatch):
    monkeypatch.chdir(finished)
    return finished


@pytest.fixture
def run(clone, capsys):
    """`run("hessian", "mnist_seed0")`: the command's exit status, its output and what it says on stderr."""

    def call(*arguments):
        try:
            status = cli.main(list(map(str, arguments)))
        except SystemExit as stop:  # argparse's own way out
            status = stop.code
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


# --- hessian and analyse ----------------------------------------------------------------------------------------------


def test_hessian_is_the_librarys_and_analyse_reads_it_back(run, clone, tmp_path):
    path = tmp_path / "H.npz"
    status, out, err = run("hessian", "mnist_seed0", "--preset", "smoke", "--json", "--output", path)
    assert (status, err) == (cli.DONE, "")
    printed = json.loads(out)
    H = Hessian.load(path)
    dataset = data.read_prepared(clone / "results/smoke/data/mnist.npz")
    images, labels, _ = data.hessian_batch(dataset, np.arange(40), 32)  # the preset's batch
    expected = exact_hessian(ViT(SMOKE, seed=0), images, labels)
    assert (printed["parameters"], printed["stored"]) == (P, str(path))
    assert printed["trace"] == pytest.approx(expected.trace(), rel=1e-12)
    torch.testing.assert_close(H.matrix(), expected.matrix(), rtol=0, atol=1e-13 * float(expected.matrix().abs().max()))
    read = json.loads(run("analyse", path, "--eigenvalues", 3, "--json")[1])
    spectrum = torch.linalg.eigvalsh(expected.matrix())
    largest = spectrum[spectrum.abs().argsort(descending=True)[:3]].sort().values
    assert read["largest eigenvalues by magnitude"] == pytest.approx(largest.tolist(), rel=1e-8)
    assert read["batch sha256"] == printed["batch sha256"]


def test_hessian_as_text_names_every_block_and_its_certificate(run):
    status, out, _ = run("hessian", "mnist_seed0", "--preset", "smoke", "--batch-size", 3)
    assert status == cli.DONE
    assert f"parameters: {P}" in out
    assert "engine: closed_form" in out
    assert "hvp_error" in out
    for name in ("W_Q", "LN2_beta", "classifier"):
        assert f"  {name}  " in out


def test_diagonal_blocks_have_norms_and_no_spectrum(run, tmp_path):
    path = tmp_path / "diagonal.npz"
    arguments = ("--preset", "smoke", "--batch-size", 2, "--blocks", "diagonal", "--output", path)
    assert run("hessian", "mnist_seed0", *arguments)[0] == cli.DONE
    status, out, _ = run("analyse", path)
    assert status == cli.DONE
    assert "not known: only some blocks are stored" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pets_seed0",), "no dataset is called pets; there are mnist, cifar100"),
        (("mnist_seed7",), "checkpoints/mnist_seed7/trained.safetensors does not exist; run the workflow"),
        (("mnist_seed0", "--stage", "middle"), "check --stage and --preset"),
        (("mnist_seed0", "--batch-size", "0"), "'0' is not a whole number of at least 1"),
        (("mnist_seed0", "--batch-size", "few"), "'few' is not a whole number"),
        (("mnist_seed0", "--batch-size", "41"), "A batch of 41 was asked for; the subset has 40 images"),
        (("mnist_seed0", "--threads", "0"), "--threads"),
        (("mnist_seed0", "--engine", "magic"), "invalid choice: 'magic'"),
        (("mnist_seed0", "--blocks", "some"), "invalid choice: 'some'"),
        ((), "the following arguments are required: RUN"),
    ],
)
def test_hessian_refuses_bad_input_in_words(run, arguments, message):
    status, out, err = run("hessian", *arguments, "--preset", "smoke")
    assert (status, out) == (cli.BAD_INPUT, "")
    assert message in err


def test_a_preset_that_was_not_run_names_the_command_that_runs_it(run):
    for command in (("hessian", "mnist_seed0"), ("witness", "N1"), ("sample-size", "--epsilon", 1), ("verify",)):
        status, _, err = run(*command, "--preset", "laptop")
        assert status == cli.BAD_INPUT
        assert "results/laptop does not exist here; run `make reproduce PRESET=laptop`" in err


def test_results_without_a_clone_are_named(run, tmp_path, monkeypatch):
    (tmp_path / "results/smoke").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    status, _, err = run("hessian", "mnist_seed0", "--preset", "smoke")
    assert status == cli.BAD_INPUT
    assert "config/config.yaml does not exist here; run this command in the clone" in err


def test_a_hessian_that_fails_its_certificate_is_a_failed_check(run, monkeypatch, tmp_path):
    def refuse(_):
        raise CertificateError("Certificate check hvp_error failed: 0.1")

    monkeypatch.setattr(Certificate, "check", refuse)
    path = tmp_path / "H.npz"
    arguments = ("--preset", "smoke", "--batch-size", 2, "--output", path)
    status, out, err = run("hessian", "mnist_seed0", *arguments)
    assert (status, out) == (cli.CHECK_FAILED, "")
    assert "hvp_error failed" in err
    assert not path.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"no zip", "is not an npz file"),
        (b"PK\x03\x04cut short", "is not an npz file"),
        ("other", "it is not a Hessian of this package"),
    ],
)
def test_analyse_refuses_what_is_no_hessian(run, tmp_path, content, message):
    path = tmp_path / "H.npz"
    if content == "other":
        np.savez(path, x=np.zeros(3))
    elif content:
        path.write_bytes(content)
    status, _, err = run("analyse", path)
    assert status == cli.BAD_INPUT
    assert str(path) in err
    assert message in err


def test_a_package_that_is_not_installed_is_named_with_its_extra(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    status, _, err = run("hessian", "mnist_seed0", "--preset", "smoke")
    assert status == cli.BAD_INPUT
    assert "package yaml is not installed; pip install 'curvature-gap[pipeline]'" in err


# --- witness, sample-size, verify -------------------------------------------------------------------------------------


def test_witness_recomputes_both_sides(run):
    status, out, err = run("witness", "N1", "--preset", "smoke")
    assert (status, err) == (cli.DONE, "")
    assert "VIOLATED" in out
    exact, again, bound = (float(line.split()[-1]) for line in out.splitlines()[1:4])
    assert exact == pytest.approx(again, rel=1e-9)
    assert exact > bound
    assert json.loads(run("witness", "N1", "--preset", "smoke", "--json")[1]) == out.rstrip("\n")


def test_witness_lists_what_there_is(run):
    status, _, err = run("witness", "T9", "--preset", "smoke")
    assert status == cli.BAD_INPUT
    assert "no witness is stored for 'T9'; there are: N1." in err


def test_sample_size_answers_three_ways(run):
    status, out, _ = run("sample-size", "--epsilon", "0.02", "--preset", "smoke", "--json")
    answer = json.loads(out)
    assert status == cli.DONE
    assert answer["epsilon"] == 0.02
    assert 1 <= answer["first"] <= answer["sustained"] <= answer["bound"]


def test_what_was_not_observed_is_null_in_json(run):
    """NaN is no JSON: other languages refuse a document that holds it."""
    status, out, _ = run("sample-size", "--epsilon", "1e-9", "--preset", "smoke", "--json")
    answer = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert (status, answer["sustained"]) == (cli.DONE, None)
    assert "sustained: nan" in run("sample-size", "--epsilon", "1e-9", "--preset", "smoke")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--epsilon", "0"), "--epsilon must be positive, got 0.0"),
        (("--epsilon", "nan"), "--epsilon must be positive, got nan"),
        (("--epsilon", "inf"), "epsilon must be a positive number, got inf"),
        (("--epsilon", "small"), "invalid float value: 'small'"),
        (("--epsilon", "0.1", "--run", "mnist_seed7"), "runs with measured increments: mnist_seed0"),
        ((), "the following arguments are required: --epsilon"),
    ],
)
def test_sample_size_refuses_bad_input_in_words(run, arguments, message):
    status, out, err = run("sample-size", *arguments, "--preset", "smoke")
    assert (status, out) == (cli.BAD_INPUT, "")
    assert message in err


def test_verify_passes_a_run_without_a_failed_claim(run):
    status, out, _ = run("verify", "--preset", "smoke", "--json")
    report = json.loads(out)
    assert (status, report["passed"], report["reference"]["class"]) == (cli.DONE, True, "no reference")
    assert ["PASS", "P2", "holds", "holds", "", "reproduced"] in report["claims"]
    to_be_run = [line for line in report["claims"] if line[1] not in ("P2", "A1", "PUB-1_speed")]
    assert report["counts"] == {"PASS": 3, "FAIL": 0, "NOT RUN": len(to_be_run)}


def test_verify_fails_with_one_failed_claim_and_says_which(run, clone, tmp_path, monkeypatch):
    shutil.copytree(clone, tmp_path / "clone")
    monkeypatch.chdir(tmp_path / "clone")
    path = Path("results/smoke/claims.csv")
    lines = path.read_text(encoding="utf-8").splitlines()
    broken = [
        line.replace("reproduced,reproduced", "reproduced,refuted") if line[:3] == "P2," else line for line in lines
    ]
    path.write_text("\n".join(broken) + "\n", encoding="utf-8")
    status, out, _ = run("verify", "--preset", "smoke")
    assert status == cli.CHECK_FAILED
    assert "FAIL  P2" in out
    path.unlink()
    status, _, err = run("verify", "--preset", "smoke")
    assert status == cli.BAD_INPUT
    assert "claims.csv does not exist; run `snakemake --cores all` first" in err


def test_abstract_reads_the_run_and_before_it_the_reference(run, tmp_path, monkeypatch):
    status, out, _ = run("abstract", 2, "--preset", "smoke", "--json")
    (two,) = json.loads(out)
    assert (status, two["from"]) == (cli.DONE, "results/smoke/claims.csv")
    assert two["verdicts"] == f"{len(two['claims'])} not run"
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(cli, "Path", lambda name: tmp_path if name == "results" else Path(name))
    status, out, _ = run("abstract", "--preset", "laptop")
    assert status == cli.DONE
    assert out.count("from: expected/laptop/claims.csv") == 6
    assert "PASS  T2  reproduced  holds" in out


def test_abstract_refuses_bad_input_in_words(run, tmp_path, monkeypatch):
    assert "the abstract has 6 sentences; got 7" in run("abstract", 7, "--preset", "smoke")[2]
    assert "'first' is not a whole number" in run("abstract", "first")[2]
    status, _, err = run("abstract", "--preset", "laptop")
    assert status == cli.BAD_INPUT
    assert "Neither results/laptop nor expected/laptop has a claims.csv; run `make reproduce`" in err
    monkeypatch.chdir(tmp_path)
    assert "paper/abstract.yaml does not exist here; run this command in the clone" in run("abstract")[2]


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["hessian", "analyse", "witness", "sample-size", "abstract", "verify"])
def test_every_command_explains_itself(run, command):
    status, out, _ = run(command, "--help")
    assert status == cli.DONE
    assert f"usage: curvature-gap {command}" in out
    assert "--json" in out


@pytest.mark.parametrize(("arguments", "message"), [((), "required: command"), (("prove",), "invalid choice: 'prove'")])
def test_no_or_an_unknown_command_lists_the_commands(run, arguments, message):
    status, _, err = run(*arguments)
    assert status == cli.BAD_INPUT
    assert message in err
    assert "hessian,analyse,witness,sample-size,abstract,verify" in err
