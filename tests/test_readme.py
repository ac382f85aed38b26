"""What README.md and ARTIFACT.md tell a newcomer to do exists and does what they say."""

import re
from pathlib import Path

import pytest
import torch

from curvature_gap import cli
from curvature_gap.claims import read_claims
from curvature_gap.hessian import Hessian

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "ARTIFACT.md", "CONTRIBUTING.md", "config/README.md", "profiles/README.md")


@pytest.fixture(params=PAGES)
def page(request):
    return (ROOT / request.param).read_text(encoding="utf-8")


def code_of(text: str) -> str:
    """Return all code of a page: fenced blocks and code within lines."""
    fenced = re.findall(r"```\w*\n(.*?)```", text, flags=re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return "\n".join([*fenced, *inline])


@pytest.mark.slow
def test_the_python_example_runs_and_gives_what_its_comments_say(tmp_path, monkeypatch):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    H = names["H"]
    assert (H.n_parameters, H.dtype, H.engine) == (3552, torch.float64, "closed_form")
    assert H.certificate is not None
    assert H["W_Q", "W_K"].shape == (256, 256)
    values = H.eigenvalues(5)
    assert values.abs().max() == pytest.approx(float(torch.linalg.matrix_norm(H.matrix(), ord=2)), rel=1e-8)
    assert H.spectral_norms()["W_V", "W_V"] <= float(values.abs().max())
    assert H.trace() == pytest.approx(float(H.matrix().diagonal().sum()))
    torch.testing.assert_close(Hessian.load(tmp_path / "hessian.npz").matrix(), H.matrix(), rtol=0, atol=0)


def test_every_make_target_exists(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = set(re.findall(r"^make ([a-z][a-z-]*)", code_of(page), flags=re.MULTILINE))
    assert named <= targets


def test_every_command_line_is_one_that_the_parser_takes(page):
    for line in re.findall(r"^curvature-gap (\w[^#\n|]*)$", code_of(page), flags=re.MULTILINE):
        cli.parser().parse_args(line.split())


def test_every_target_of_snakemake_is_a_rule_or_a_claim(page):
    rules = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "workflow/rules").glob("*.smk"))
    known = set(re.findall(r"^\s*rule (\w+):", rules, flags=re.MULTILINE)) | {"all", "claim_ID"}
    known |= {f"claim_{claim.id}" for claim in read_claims(ROOT / "paper/claims.yaml")}
    for line in re.findall(r"^snakemake (--cores all [^#\n]*)", code_of(page), flags=re.MULTILINE):
        targets = [word for word in re.split(r"\s+", line.strip())[2:] if re.fullmatch(r"[a-z]\w*(-\d+\w*)?", word)]
        assert set(targets) <= known, line


def test_every_link_and_picture_is_a_file(page, request):
    folder = (ROOT / request.node.callspec.params["page"]).parent
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page):
        if not target.startswith("http"):
            assert (folder / target).is_file(), target


def test_the_map_names_modules_and_notebooks_that_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|(.+)\|$", text.split("## Map")[1].split("## Gallery")[0], flags=re.MULTILINE)[2:]
    assert len(rows) > 10
    for row in rows:
        _, _, modules, notebooks, _ = row.split("|")
        for module in re.findall(r"`([^`]+)`", modules):
            assert list(ROOT.glob(f"src/curvature_gap/{expanded(module)}.py")), module
        for notebook in re.findall(r"`([^`]+)`", notebooks):
            assert (ROOT / f"notebooks/{notebook}.ipynb").is_file(), notebook


def expanded(module: str) -> str:
    """Return a name as `glob` takes it: `theory/{attention,block}_bound` as `theory/*_bound`."""
    return re.sub(r"\{[^}]*\}", "*", module)
