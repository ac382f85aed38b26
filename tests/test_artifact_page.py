from pathlib import Path

import pytest

from curvature_gap.artifact_page import (
    NOT_MEASURED,
    STEPS,
    cell,
    claim_lines,
    committed_page,
    compute_minutes,
    human_minutes,
    makers,
    measured_run,
    minutes_text,
    render,
    seconds_by_rule,
    step_lines,
    steps,
    structure,
)
from curvature_gap.claims import Claim, decide, read_claims
from curvature_gap.tables import write_table

ROOT = Path(__file__).resolve().parents[1]
CLAIMS = read_claims(ROOT / "paper/claims.yaml")
TEMPLATE = ROOT / "paper/ARTIFACT.md.jinja"
TIMES = [("identities", 60.0), ("bound_search", 120.0), ("bound_search", 180.0), ("train_mnist", 30.0)]


@pytest.fixture
def run(tmp_path):
    """A finished run that timed four jobs and decided all claims without a table."""
    rest = {
        "wildcards": "",
        "cpu_seconds": 1.0,
        "peak_mib": 2048.0,
        "threads": 1,
        "device": "cpu",
        "machine": "a machine",
    }
    write_table([{"rule": rule, "seconds": seconds} | rest for rule, seconds in TIMES], tmp_path / "tables/timings.csv")
    write_table([decide(claim, tmp_path, "smoke") for claim in CLAIMS], tmp_path / "claims.csv")
    return measured_run(tmp_path, "smoke")


def test_the_committed_page_has_the_structure_of_claims_yaml():
    """Times change with expected/; what is claimed must not lag behind. `make artifact-page` writes the page."""
    committed = (ROOT / "ARTIFACT.md").read_text(encoding="utf-8")
    assert structure(committed) == structure(committed_page(ROOT))


def test_structure_sees_a_changed_claim_and_not_a_changed_time():
    line = "| `FIG-3` | Entries | Figure 3 | smoke | reproduced | 1 | {} | {} |"
    assert structure(line.format("2.5", "drawn")) == structure(line.format("not measured", "not measured"))
    preset = "| smoke | kick the tyres | 3 min | {} | {} | {} | a machine | cpu |"
    assert structure(preset.format(1, 2, 3)) == structure(preset.format(4, 5, 6).replace("cpu", "cuda"))
    assert structure(line.format("2.5", "0")) != structure(line.format("2.5", "0").replace("Entries", "Entry"))


def test_every_claim_stands_on_the_page_with_its_command(run):
    page = render(CLAIMS, {"smoke": run}, "smoke", TEMPLATE)
    for claim in CLAIMS:
        name = f"`{claim.id}`" if claim.supported else claim.id
        assert f"| {name} |" in page
    assert "claim_FIG-3" in page


def test_pages_of_two_runs_have_one_structure(run, tmp_path):
    other = measured_run(tmp_path / "nowhere", "smoke")
    pages = [render(CLAIMS, {"smoke": one}, "smoke", TEMPLATE) for one in (run, other)]
    assert pages[0] != pages[1]
    assert structure(pages[0]) == structure(pages[1])


def test_every_file_that_decides_a_claim_has_known_makers():
    for claim in CLAIMS:
        for file in claim.needs():
            makers(file)
    with pytest.raises(KeyError, match="unheard_of"):
        makers("tables/unheard_of.csv")


def test_the_longest_name_that_fits_decides_the_makers():
    assert makers("figures/figx_seed_claims.pdf") != makers("figures/fig01.pdf") == ()


def test_compute_minutes_add_the_jobs_behind_a_file(run):
    assert compute_minutes(["tables/statements.csv"], run["seconds"]) == "6.0"
    assert compute_minutes(["figures/fig03.pdf"], run["seconds"]) == "< 1"
    assert compute_minutes(["tables/precision.csv"], run["seconds"]) == NOT_MEASURED
    assert compute_minutes(["figures/fig01.pdf"], {}) == "< 1"


def test_rules_named_with_a_star_match_all_their_variants():
    assert compute_minutes(["figures/fig05.pdf"], {"dynamics_mnist": 60.0, "dynamics_mnist_first": 120.0}) == "3.0"


@pytest.mark.parametrize(("seconds", "text"), [(59.0, "< 1"), (60.0, "1.0"), (599.0, "10.0"), (1500.0, "25")])
def test_minutes_are_rounded_to_two_digits(seconds, text):
    assert minutes_text(seconds) == text


def test_a_run_that_was_not_made_is_not_measured(tmp_path):
    empty = measured_run(tmp_path, "paper")
    assert (empty["minutes"], empty["machine"], empty["seconds"]) == (NOT_MEASURED, NOT_MEASURED, {})
    page = render(CLAIMS, {"paper": empty}, "paper", TEMPLATE)
    assert NOT_MEASURED in page


def test_a_run_is_measured(run):
    assert (run["jobs"], run["minutes"], run["peak_gib"]) == ("4", "6.5", "2.0")
    assert seconds_by_rule([]) == {}


def test_a_claim_that_is_not_supported_says_why(run):
    claim = Claim("X-1", "a|b", "text", {}, supported=False, reason="no such data")
    (line,) = claim_lines([claim], run)
    assert (line["compute"], line["reason"], line["statement"]) == ("–", "no such data", "a\\|b")
    page = render([*CLAIMS, claim], {"smoke": run}, "smoke", TEMPLATE)
    assert "| X-1 | a\\|b | no such data |" in page


def test_what_the_benchmark_decides_names_its_command(run):
    (claim,) = [claim for claim in CLAIMS if claim.id == "OURS_speed_over_curvlinops"]
    assert claim_lines([claim], run)[0]["compute"] == "`make bench`"


def test_cells_do_not_break_the_table():
    assert cell("|w*|") == "\\|w\\*\\|"


@pytest.mark.parametrize(
    ("id", "expected"),
    [
        ("P2", ("run", "place", "formula", "row")),
        ("T3", ("run", "place", "formula", "row", "erratum")),
        ("N1", ("run", "place", "formula", "row", "erratum", "witness")),
        ("FIG-3", ("run", "place", "figure")),
        ("TAB-1_mnist_hidden", ("run", "place", "row")),
        ("FIG-5_keys_and_values", ("run", "place", "row", "sense")),
        ("OURS_block_data_bound", ("run", "row", "sense", "proof")),
        ("OURS_bounds_valid_random", ("run", "row", "sense")),
        ("OURS_speed_over_curvlinops", ("run", "row", "sense")),
    ],
)
def test_what_decides_a_claim_says_how_to_check_it(id, expected):
    (claim,) = [claim for claim in CLAIMS if claim.id == id]
    assert steps(claim) == expected
    assert human_minutes(claim) == sum(STEPS[step][0] for step in expected)


def test_ways_of_checking_cover_all_claims_and_all_steps():
    lines = step_lines([claim for claim in CLAIMS if claim.supported])
    assert sum(int(line["claims"]) for line in lines) == len(CLAIMS) - 1
    assert {step for line in lines for step in line["steps"].split(", ")} == set(STEPS)
