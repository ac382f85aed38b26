import doctest
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from curvature_gap import exact_hessian as module
from curvature_gap.architecture import Architecture, parameter_shapes
from curvature_gap.autodiff_hessian import autodiff_hessian
from curvature_gap.batch_loss import batch_loss
from curvature_gap.exact_hessian import available_bytes, bytes_needed, exact_hessian
from curvature_gap.vit import ViT

SMALL = Architecture(image_size=6, channels=1, patch=3, classes=3, d_V=5, d_ff=7)
PRE_NORM = Architecture(image_size=4, channels=2, patch=2, classes=3, d_V=4, d_ff=5, depth=2, norm="pre", bias=True)


@pytest.fixture
def batch(randn, generator):
    return randn(4, 1, 6, 6), torch.randint(3, (4,), generator=generator)


def oracle(model, images, targets, loss="cross_entropy"):
    problem = batch_loss(model, images, targets, loss=loss)
    return autodiff_hessian(problem, problem.parameters, symmetric=False)


def close(A, B):
    torch.testing.assert_close(A, B, rtol=0, atol=1e-13 * float(B.abs().max()))


@pytest.mark.parametrize("engine", ["auto", "autodiff"])
def test_whole_matrix_is_the_oracles(engine, batch):
    model = ViT(SMALL, seed=2)
    H = exact_hessian(model, *batch, engine=engine)
    close(H.matrix(), oracle(model, *batch))
    assert torch.equal(H.matrix(), H.matrix().T)
    assert H.names == tuple(parameter_shapes(SMALL))
    assert H.shapes[H.names.index("LN1_beta")] == (5, 1)
    loss = nn.functional.cross_entropy(model.double()(batch[0]), batch[1])
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    assert H.loss == pytest.approx(float(loss.detach()), rel=1e-14)
    assert H.grad_norm == pytest.approx(float(torch.cat([g.flatten() for g in gradient]).norm()), rel=1e-13)


@pytest.mark.parametrize("engine", ["auto", "autodiff"])
def test_mean_squared_error(engine, batch, randn):
    model, targets = ViT(SMALL, seed=2), randn(4, 3)
    H = exact_hessian(model, batch[0], targets, loss="mse", engine=engine)
    close(H.matrix(), oracle(model, batch[0], targets, "mse"))


def test_other_architectures_and_foreign_modules_go_through_the_general_engine(randn):
    labels = torch.tensor([0, 2, 1])
    deep = exact_hessian(ViT(PRE_NORM), randn(3, 2, 4, 4), labels)
    assert deep.engine == "autodiff"
    foreign = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 3))
    images = randn(3, 1, 4, 4)
    H = exact_hessian(foreign, images, labels, loss=lambda output, t: nn.functional.cross_entropy(output, t))
    assert H.engine == "autodiff"
    assert H.loss_name == "<lambda>"
    assert H.shapes[0] == (2, 9)
    close(H.matrix(), oracle(foreign, images, labels))


def test_diagonal_and_pairs(batch):
    model = ViT(SMALL, seed=2)
    whole = exact_hessian(model, *batch)
    diagonal = exact_hessian(model, *batch, blocks="diagonal")
    assert set(diagonal.held()) == {(name, name) for name in whole.names}
    close(diagonal["W_1", "W_1"], whole["W_1", "W_1"])
    assert diagonal.trace() == pytest.approx(whole.trace(), rel=1e-13)
    # Pairs in either order, and twice, are one block.
    pairs = exact_hessian(model, *batch, blocks=[("W_1", "W_K"), ("W_K", "W_1"), ("W_2", "W_2")])
    assert list(pairs.held()) == [("W_K", "W_1"), ("W_2", "W_2")]
    close(pairs["W_1", "W_K"], whole["W_1", "W_K"])
    close(pairs["W_K", "W_1"], whole["W_1", "W_K"].T)
    assert pairs.certificate is not None
    with pytest.raises(KeyError, match=r"block \(embed, W_Q\) was not computed"):
        pairs["embed", "W_Q"]
    with pytest.raises(ValueError, match="not the whole matrix"):
        pairs.matrix()


def test_float32_is_certified_against_float64(batch):
    H = exact_hessian(ViT(SMALL, seed=2), *batch, dtype=torch.float32)
    assert H.dtype == torch.float32
    assert H.certificate.dtype == "float32"
    assert 1e-12 < H.certificate.hvp_error < 1e-5


def test_frozen_parameters_are_left_out(batch):
    model = ViT(SMALL, seed=2)
    whole = exact_hessian(model, *batch)
    model.W_Q.requires_grad_(False)
    H = exact_hessian(model, *batch)
    assert H.engine == "autodiff"
    assert "W_Q" not in H.names
    close(H["embed", "W_1"], whole["embed", "W_1"])


def test_what_cannot_fit_is_refused_before_it_is_computed(batch):
    model = ViT(SMALL)
    problem = batch_loss(model, *batch)
    needed = bytes_needed(problem)
    assert needed > 8 * SMALL.n_parameters**2
    assert bytes_needed(problem, [("W_Q", "W_Q")]) < needed
    with pytest.raises(MemoryError, match=rf"P = {SMALL.n_parameters} parameters on 4 samples need .* tiles"):
        exact_hessian(model, *batch, memory_limit=1000)
    assert available_bytes(torch.device("cpu")) > 2**20


# VmHWM, because ru_maxrss of a child begins at its parent's.
PEAK = """
import sys, torch
from curvature_gap import Architecture, ViT, exact_hessian
from curvature_gap.batch_loss import batch_loss
from curvature_gap.exact_hessian import bytes_needed

def peak():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024

torch.set_num_threads(1)
model = ViT(Architecture(image_size=28, channels=1, patch=4, classes=10, d_V=16, d_ff=64))
images = torch.randn(int(sys.argv[1]), 1, 28, 28, generator=torch.Generator().manual_seed(0))
labels = torch.arange(len(images)) % 10
needed = bytes_needed(batch_loss(model, images, labels), engine="closed_form")
before = peak()
exact_hessian(model, images, labels, certify=False)
print(needed, peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("b", [8, 128])
def test_the_preflight_is_near_the_measured_peak(b):
    done = subprocess.run([sys.executable, "-c", PEAK, str(b)], capture_output=True, text=True, check=True)
    needed, peak = map(int, done.stdout.split())
    assert peak <= needed <= 2.5 * peak


def test_a_bad_request_says_what_is_allowed(batch):
    model = ViT(SMALL)
    with pytest.raises(ValueError, match="engine must be auto, closed_form or autodiff, got 'fast'"):
        exact_hessian(model, *batch, engine="fast")
    with pytest.raises(ValueError, match='blocks must be None, "diagonal" or a list'):
        exact_hessian(model, *batch, blocks="all")
    with pytest.raises(ValueError, match="No trainable block is called 'W_X'; there are embed, W_Q"):
        exact_hessian(model, *batch, blocks=[("W_Q", "W_X")])
    with pytest.raises(ValueError, match="closed form does not cover Sequential"):
        exact_hessian(nn.Sequential(model), *batch, engine="closed_form")


def test_threads_are_restored_and_the_batch_is_named(batch):
    before = torch.get_num_threads()
    chosen = {"blocks": [("W_Q", "W_Q")], "certify": False}
    H = exact_hessian(ViT(SMALL), *batch, threads=2, **chosen)
    assert torch.get_num_threads() == before
    other = exact_hessian(ViT(SMALL), batch[0] + 1, batch[1], **chosen)
    assert len(H.batch_sha256) == 64
    assert H.batch_sha256 != other.batch_sha256
    assert exact_hessian(ViT(SMALL), *batch, batch_sha256="ab", **chosen).batch_sha256 == "ab"


def test_no_blocks_leaves_an_operator(batch, randn):
    whole = exact_hessian(ViT(SMALL, seed=2), *batch)
    H = exact_hessian(ViT(SMALL, seed=2), *batch, blocks=[])
    v = randn(H.n_parameters)
    torch.testing.assert_close(H.operator(v), whole.matrix() @ v)


def test_the_docstrings_example_runs():
    results = doctest.testmod(module, extraglobs={"np": np})
    assert results.attempted >= 6
    assert results.failed == 0


def test_the_package_offers_it_whatever_was_imported_before(batch):
    # The submodule of the same name shadows the function in the package; both can be called.
    from curvature_gap import exact_hessian as offered

    assert offered(ViT(SMALL), *batch, blocks=[], certify=False).n_parameters == SMALL.n_parameters
    assert module(ViT(SMALL), *batch, blocks=[], certify=False).n_parameters == SMALL.n_parameters
