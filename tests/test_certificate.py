from dataclasses import replace

import pytest
import torch

from curvature_gap.architecture import Architecture
from curvature_gap.autodiff_hessian import autodiff_blocks
from curvature_gap.batch_loss import batch_loss
from curvature_gap.certificate import Certificate, CertificateError, certify
from curvature_gap.vit import ViT

SMALL = Architecture(image_size=6, channels=1, patch=3, classes=3, d_V=5, d_ff=7)
GOOD = Certificate(0.0, 1e-15, "double_backward", 8, 1e-9, 1e-6, 8, 0, "float64")


@pytest.fixture
def problem(randn, generator):
    return batch_loss(ViT(SMALL, seed=5), randn(4, 1, 6, 6), torch.randint(3, (4,), generator=generator))


@pytest.mark.parametrize("engine", ["closed_form", "autodiff"])
def test_a_right_hessian_passes(engine, problem):
    blocks = autodiff_blocks(problem, problem.parameters)
    certificate = certify(blocks, problem, engine=engine, asymmetry=0.0)
    certificate.check()
    assert certificate.n_vectors == 8
    assert certificate.n_fd_columns == 8
    assert certificate.hvp_error < 1e-13
    assert 0 < certificate.fd_error < 1e-7
    assert certificate.relu_near_zero == 0


@pytest.mark.parametrize("pair", [("W_Q", "W_Q"), ("embed", "LN1_gamma"), ("W_1", "classifier")])
def test_one_wrong_entry_in_any_block_is_found(pair, problem):
    blocks = autodiff_blocks(problem, problem.parameters)
    blocks[pair][2, 1] += 1e-9 * max(float(block.abs().max()) for block in blocks.values())
    certificate = certify(blocks, problem, engine="closed_form", asymmetry=0.0)
    with pytest.raises(CertificateError, match=r"hvp_error \(double_backward\) failed: .* allowed 1e-12 in float64"):
        certificate.check()


def test_a_wrong_gradient_convention_is_found_by_finite_differences(problem):
    # The Hessian of another loss, consistent in itself, against the gradient of this one.
    blocks = {pair: 2 * block for pair, block in autodiff_blocks(problem, problem.parameters).items()}
    certificate = certify(blocks, problem, engine="closed_form", asymmetry=0.0)
    assert certificate.fd_error > 1e-3


def test_some_blocks_are_certified_too(problem):
    pairs = [("W_Q", "W_Q"), ("W_K", "W_1")]
    blocks = autodiff_blocks(problem, problem.parameters, pairs)
    certify(blocks, problem, engine="closed_form", asymmetry=0.0).check()
    blocks["W_K", "W_1"][0, 0] += 1e-3
    with pytest.raises(CertificateError, match="hvp_error"):
        certify(blocks, problem, engine="closed_form", asymmetry=0.0).check()


def test_columns_whose_step_crosses_a_kink_are_skipped(randn):
    # One weight per unit and inputs at the kink: any step of W crosses it, steps of the outer weights do not.
    class AtTheKink(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = torch.nn.Parameter(torch.full((3,), 1e-9, dtype=torch.float64))
            self.weight = torch.nn.Parameter(randn(3, 2))

        def forward(self, x):
            return torch.relu(x * 0 + self.shift) @ self.weight

    problem = batch_loss(AtTheKink(), randn(4, 3), torch.tensor([0, 1, 1, 1]))
    blocks = autodiff_blocks(problem, problem.parameters)
    certificate = certify(blocks, problem, engine="autodiff", asymmetry=0.0)
    assert 0 < certificate.n_fd_columns < 8
    assert certificate.relu_near_zero == 12
    certificate.check()
    only_shift = {pair: block for pair, block in blocks.items() if pair == ("shift", "shift")}
    with pytest.raises(CertificateError, match="no column could be differenced"):
        certify(only_shift, problem, engine="autodiff", asymmetry=0.0).check()


@pytest.mark.parametrize("field", ["asymmetry", "hvp_error", "fd_error"])
@pytest.mark.parametrize("value", [1e-3, float("nan")])
def test_check_names_what_failed(field, value):
    GOOD.check()
    with pytest.raises(CertificateError, match=f"{field}.* failed: {value:.3g}"):
        replace(GOOD, **{field: value}).check()


def test_arrays_and_back():
    arrays = GOOD.to_arrays()
    assert all(array.dtype != object for array in arrays.values())
    assert Certificate.from_arrays(arrays) == GOOD
    assert Certificate.from_arrays({}) is None
