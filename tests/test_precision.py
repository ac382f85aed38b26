"""The precision table and its timing: schema, and that both sides compute the same thing."""

from math import isnan

import pytest
import torch

from curvature_gap.precision import PUBLISHED, RandomBlock, all_components, precision_table, precision_timing


@pytest.fixture(scope="module")
def table():
    return precision_table(sizes=(2, 3, 5, 7), seeds=1)


def test_table_has_every_component_in_both_dtypes(table):
    assert [(r.component, r.dtype) for r in table] == [(c, d) for d in ("float32", "float64") for c in PUBLISHED]


def test_errors_are_rounding_and_published_values_belong_to_float32(table):
    for row in table:
        limit = 2e-5 if row.dtype == "float32" else 1e-13
        assert 0 <= row.max_rel_error < limit
        assert isnan(row.published) == (row.dtype == "float64")


def test_float32_is_computed_in_float32(table):
    of = {(r.component, r.dtype): r.max_rel_error for r in table}
    assert of["block Hessian", "float32"] > 1e3 * of["block Hessian", "float64"]
    for parts in all_components(RandomBlock.draw((2, 3, 5, 7), torch.float32, 0)).values():
        assert parts[0].closed_form().dtype == parts[0].vectorised().dtype == torch.float32


def test_all_three_ways_compute_the_same_derivative():
    for parts in all_components(RandomBlock.draw((2, 3, 1, 2), torch.float64, 0)).values():
        for part in parts[:2]:
            expected = part.vectorised()
            torch.testing.assert_close(part.closed_form(), expected, rtol=0, atol=1e-10)
            torch.testing.assert_close(part.one_by_one(), expected, rtol=0, atol=1e-10)


def test_timing_counts_outputs_and_ratios():
    rows = precision_timing(sizes=(2, 3, 1, 2), repetitions=1)
    assert len(rows) == 10
    for row in rows:
        assert row.outputs == 6
        assert row.ratio == pytest.approx(row.autograd_seconds / row.closed_form_seconds)
        assert row.vectorised_ratio == pytest.approx(row.vectorised_seconds / row.closed_form_seconds)
