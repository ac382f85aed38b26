"""The search finds the known violations, believes only what two methods agree on, and can show its witnesses again."""

import dataclasses
from math import isnan

import numpy as np
import pytest
import torch

from curvature_gap.bound_cases import BOUND_CASES, BoundCase, Comparison
from curvature_gap.bound_instances import STRUCTURES, Instances, Sizes, _unit_scale, draw_instances
from curvature_gap.bound_search import (
    BOUND_CHECKS,
    ERRATA,
    PARENTS,
    SearchBudget,
    _starts,
    describe_witness,
    load_witness,
    norm_inequality_table,
    recompute,
    run_bound_check,
    run_bound_checks,
    save_witness,
    search,
    search_together,
)

TINY = SearchBudget(instances=57, ascents=2, steps=3, seed=1)
VIOLATED = {
    "N1", "N4", "T1_main", "T1_appendix", "T1_main_blocks", "T1_appendix_blocks", "L3", "L3_jacobian", "L3_hessian",
    "T6_explicit", "T6_explicit_pairs", "T6_G", "T6_Phi_QQ", "T6_Phi_VQ", "T6_Phi_QK", "T6_xi_21", "T7_true_loss",
}  # fmt: skip


@pytest.fixture(scope="module")
def checked():
    return run_bound_checks(TINY)


def test_verdicts(checked):
    assert {id for id, (row, _) in checked.items() if row.as_printed == "violated"} == VIOLATED


def test_every_violated_bound_has_a_correction_that_survives(checked):
    for id in VIOLATED:
        row, _ = checked[id]
        assert row.corrected == "holds", (id, row.note)


def test_every_violated_bound_has_an_erratum():
    parts = {"L3", "T6_explicit_pairs", "T1_main_blocks", "T1_appendix_blocks"}
    assert VIOLATED - parts == set(ERRATA)


def test_a_bound_that_holds_states_the_effort(checked):
    row, _ = checked["N2"]
    assert "not violated in 57 instances and 2 ascents x 3 steps" in row.note


def test_the_search_is_reproducible_and_depends_on_its_seed(checked):
    row, witness = checked["T6_Phi_VQ"]
    again, same = run_bound_check("T6_Phi_VQ", TINY)
    assert again == row
    assert all(torch.equal(same.inputs[name], tensor) for name, tensor in witness.inputs.items())
    _, other = run_bound_check("T6_Phi_VQ", dataclasses.replace(TINY, seed=2))
    assert not all(
        other.inputs[name].shape == tensor.shape and torch.equal(other.inputs[name], tensor)
        for name, tensor in witness.inputs.items()
    )


def test_witnesses_survive_the_disk_and_reproduce_both_sides(checked, tmp_path):
    for id, (row, witness) in checked.items():
        if witness is None:
            continue
        file = tmp_path / f"{id}.npz"
        save_witness(file, witness)
        report = recompute(load_witness(file))
        assert report.ratio == pytest.approx(row.worst_ratio, rel=1e-12)
        assert report.exact == pytest.approx(report.exact_autodiff, rel=1e-6)
        text = describe_witness(id, tmp_path)
        assert "exact / bound" in text
        assert (" VIOLATED" in text) == (row.as_printed == "violated")
    assert describe_witness("N1", tmp_path / "N1.npz") == describe_witness("N1", tmp_path)


def test_a_witness_that_breaks_the_print_respects_the_correction(checked):
    for id in ("N1", "N4", "T1_main", "L3_jacobian", "T6_G", "T6_xi_21"):
        report = recompute(checked[id][1])
        assert report.bound < report.exact <= report.corrected_bound * (1 + 1e-9)


@pytest.mark.parametrize("id", list(BOUND_CASES))
def test_closed_form_and_autodiff_agree_on_the_exact_side(id):
    case = BOUND_CASES[id]
    # Unit scales: extreme ones lose digits to rounding, which the search itself rejects.
    plain = STRUCTURES.index(_unit_scale)
    drawn = draw_instances(case.sizes[0], plain + 1, torch.Generator().manual_seed(3))
    inputs = {name: tensor[plain] for name, tensor in drawn.items()}
    for comparison in filter(None, (case.printed, case.corrected, case.other)):
        exact, _ = comparison.sides(Instances({name: tensor[None] for name, tensor in inputs.items()}))
        second = torch.stack(list(comparison.second(inputs)))
        torch.testing.assert_close(exact[0], second, rtol=1e-8, atol=1e-10)


def test_what_two_methods_disagree_on_is_not_believed():
    honest = BOUND_CASES["N2"]
    wrong = dataclasses.replace(honest.printed, exact=lambda i: [3 * x for x in honest.printed.exact(i)])
    case = BoundCase("N2", honest.inputs, honest.sizes, wrong)
    result = search(case, wrong, SearchBudget(30, 0, 0))
    assert result.witness is None
    assert isnan(result.ratio)
    assert result.rejected > 0


def test_ascent_finds_what_random_instances_miss():
    # x ↦ exp(−(x − 3)²) against 1: random starts are far from 3, ascent reaches it.
    comparison = Comparison(
        ("",),
        lambda i: [(-((i.X[:, 0, 0] - 3) ** 2)).exp()],
        lambda i: [1.0],
        lambda s: [(-((s["X"][0, 0] - 3) ** 2)).exp()],
    )
    case = BoundCase("toy", ("X",), (Sizes(1, 1, 1),), comparison)
    without = search(case, comparison, SearchBudget(20, 0, 0))
    climbed = search(case, comparison, SearchBudget(20, 5, 200))
    assert without.ratio < climbed.ratio
    assert climbed.ratio == pytest.approx(1, abs=1e-4)


def test_a_bound_of_zero_below_a_positive_value_is_an_infinite_ratio():
    comparison = Comparison(("",), lambda i: [i.X[:, 0, 0].abs()], lambda i: [0.0], lambda s: [s["X"][0, 0].abs()])
    result = search(BoundCase("toy", ("X",), (Sizes(2, 3, 1),), comparison), comparison, SearchBudget(5, 2, 3))
    assert result.ratio == float("inf")


def test_parents_are_made_of_their_parts(checked):
    for id, parts in PARENTS.items():
        row = checked[id][0]
        assert row.worst_ratio == max(checked[part][0].worst_ratio for part in parts)
        assert checked[id][1].id in parts
    assert set(PARENTS) <= set(BOUND_CHECKS)


def test_norm_table_is_sharp_in_all_twenty_entries():
    rows = norm_inequality_table(SearchBudget(30, 0, 0))
    assert len(rows) == 20
    assert all(row.verdict == "holds" and row.attained == pytest.approx(1, abs=1e-12) for row in rows)
    assert next(row for row in rows if (row.X, row.Y) == ("F", "2")).constant == "√d"


def test_all_structures_appear_and_are_finite():
    drawn = draw_instances(Sizes(5, 3, 2, 4), 81, torch.Generator().manual_seed(0))
    assert all(torch.isfinite(tensor).all() for tensor in drawn.values())
    assert any((drawn["residual"] == 0).all(dim=(1, 2)))
    assert any((drawn["W_Q"] == 0).all(dim=(1, 2)))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: SearchBudget(0, 1, 1), ValueError, "instances >= 1"),
        (lambda: Sizes(3, 0, 1), ValueError, "d_V must be"),
        (lambda: draw_instances(Sizes(2, 3, 1), 0, torch.Generator()), ValueError, "at least one"),
        (lambda: run_bound_check("T9", TINY), KeyError, "No bound check"),
    ],
)
def test_illegal_input_is_refused_in_words(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_missing_or_foreign_witness_is_refused_in_words(checked, tmp_path):
    with pytest.raises(ValueError, match="run the bound search"):
        load_witness(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(ValueError, match="not a witness"):
        load_witness(tmp_path / "text.npz")
    np.savez(tmp_path / "other.npz", a=np.zeros(2))
    with pytest.raises(ValueError, match="not a witness"):
        load_witness(tmp_path / "other.npz")
    save_witness(tmp_path / "N2.npz", checked["N1"][1])
    with pytest.raises(ValueError, match="of N1, not of N2"):
        describe_witness("N2", tmp_path)


def test_searching_together_changes_no_result():
    cases = [BOUND_CASES[id] for id in ("T1_main", "T1_appendix")]
    wanted = [(case, comparison) for case in cases for comparison in (case.printed, case.other)]
    for (case, comparison), together in zip(wanted, search_together(wanted, TINY), strict=True):
        alone = search(case, comparison, TINY)
        assert together.witness.piece == alone.witness.piece
        assert together.ratio == pytest.approx(alone.ratio, rel=1e-9)
        for name, tensor in together.witness.inputs.items():
            torch.testing.assert_close(tensor, alone.witness.inputs[name], rtol=1e-9, atol=1e-12)


def test_every_piece_is_climbed_when_ascents_suffice():
    first, second = (_starts(torch.ones(4, 5), range(a, a + 3), torch.Generator())[1] for a in (0, 3))
    assert first + second == [0, 1, 2, 3, 4, 0]
