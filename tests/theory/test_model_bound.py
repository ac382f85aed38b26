"""The model's Hessian, exact part plus Kronecker sums, against autodiff; the bound against exact norms."""

import itertools
from math import prod

import pytest
import torch
from torch.func import hessian, jacfwd

from curvature_gap.architecture import Architecture, parameter_shapes
from curvature_gap.maps import cross_entropy
from curvature_gap.theory.kronecker_sum import top_norm
from curvature_gap.theory.model_bound import (
    TokenCurvature,
    check_architecture,
    exact_part,
    feature_jacobians,
    model_bounds,
)
from curvature_gap.vit import flatten_parameters, initial_parameters, unflatten_parameters, vit_logits

SMALL = {"image_size": 6, "channels": 1, "patch": 2, "classes": 3, "d_V": 5, "d_ff": 7, "d_K": 2}


class Case:
    """Two images through a small model: its exact Hessian by autodiff and its parts by name."""

    def __init__(self, generator: torch.Generator, scale: float = 1.0, **changes) -> None:
        self.a = Architecture(**(SMALL | changes))
        noise = {k: torch.randn(s, generator=generator) for k, s in parameter_shapes(self.a).items()}
        initial = initial_parameters(self.a, generator)
        self.W = {k: scale * (p + 0.3 * noise[k]).double() for k, p in initial.items()}
        self.images = torch.randn(2, 1, 6, 6, generator=generator, dtype=torch.float64)
        self.labels = torch.tensor([0, 2])
        self.logits = vit_logits(self.W, self.images, self.a)
        self.residual = (self.logits.softmax(-1) - torch.nn.functional.one_hot(self.labels, 3)) / 2
        sizes = [prod(s) for s in parameter_shapes(self.a).values()]
        ends = list(itertools.accumulate(sizes))
        starts = [end - size for end, size in zip(ends, sizes, strict=True)]
        self.at = {n: slice(s, e) for n, s, e in zip(parameter_shapes(self.a), starts, ends, strict=True)}

    def loss(self, theta: torch.Tensor) -> torch.Tensor:
        return cross_entropy(vit_logits(unflatten_parameters(theta, self.a), self.images, self.a), self.labels)

    def hessian(self) -> torch.Tensor:
        return hessian(self.loss)(flatten_parameters(self.W, self.a))

    def curvature(self) -> TokenCurvature:
        return TokenCurvature(self.W, self.images, self.residual, self.a)


VARIANTS = [{}, {"output_projection": False}, {"positions": "none", "d_K": 7}, {"norm_eps": 0.5, "patch": 3}]


@pytest.mark.parametrize("changes", VARIANTS)
def test_exact_part_and_kronecker_sums_make_the_whole_hessian(changes, generator):
    case = Case(generator, **changes)
    H, exact = case.hessian(), exact_part(case.curvature(), case.logits, case.residual)
    K = case.curvature().hessian()
    for b, c in itertools.combinations_with_replacement(case.at, 2):
        block = exact.block(b, c) + (K.block((b, c)) if (b, c) in K.terms else 0)
        torch.testing.assert_close(
            block, H[case.at[b], case.at[c]], rtol=1e-10, atol=1e-12, msg=lambda m, p=(b, c): f"{p}: {m}"
        )


def test_feature_jacobians_equal_autodiff(generator):
    case = Case(generator)
    J = feature_jacobians(case.curvature(), 2)

    def features(theta):
        W = unflatten_parameters(theta, case.a) | {"classifier": torch.eye(5).double()}
        return vit_logits(W, case.images, case.a)

    exact = jacfwd(features)(flatten_parameters(case.W, case.a))
    for name, block in J.items():
        torch.testing.assert_close(block, exact[..., case.at[name]])


def test_norm_of_the_exact_part(generator):
    case = Case(generator)
    exact = exact_part(case.curvature(), case.logits, case.residual)
    rows = [
        [exact.block(b, c) if i <= j else exact.block(c, b).mT for j, c in enumerate(case.at)]
        for i, b in enumerate(case.at)
    ]
    torch.testing.assert_close(exact.norm(), top_norm(torch.cat([torch.cat(row, 1) for row in rows])))


@pytest.mark.parametrize(
    ("scale", "n"), [(1.0, 1), *(pytest.param(s, 20, marks=pytest.mark.slow) for s in (0.1, 1.0, 4.0))]
)
def test_bounds_are_never_below(scale, n, generator):
    for _ in range(n):
        case = Case(generator, scale)
        H, bounds = case.hessian(), model_bounds(case.W, case.images, case.labels, case.a)
        for (b, c), bound in bounds.blocks.items():
            assert top_norm(H[case.at[b], case.at[c]]) <= bound * (1 + 1e-10) + 1e-14, (b, c)
        exact = top_norm(H)
        assert exact <= bounds.total * (1 + 1e-12)
        assert bounds.total <= 10 * exact, "a bound this loose is a finding"


def test_classifier_and_last_shift_have_exact_blocks(generator):
    case = Case(generator)
    H, bounds = case.hessian(), model_bounds(case.W, case.images, case.labels, case.a)
    for b in case.at:
        exact = top_norm(H[case.at[b], case.at["classifier"]])
        torch.testing.assert_close(torch.tensor(bounds.blocks[b, "classifier"]).double(), exact)


@pytest.mark.parametrize("changes", [{"bias": True}, {"norm": "pre"}, {"depth": 2}, {"positions": "learned"}])
def test_what_is_not_covered_is_refused(changes):
    with pytest.raises(ValueError, match="The model bound covers"):
        check_architecture(Architecture(**(SMALL | changes)))
