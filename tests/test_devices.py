import pytest
import torch

from curvature_gap import devices


def test_cuda_without_a_gpu_is_an_error_and_auto_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="sees no CUDA device"):
        devices.resolve_device("cuda")
    assert devices.resolve_device("auto") == torch.device("cpu")
    assert devices.resolve_device("cpu") == torch.device("cpu")


def test_auto_takes_the_gpu_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert devices.resolve_device("auto").type == "cuda"
    assert devices.resolve_device("cuda").type == "cuda"
    assert devices.resolve_device("cpu").type == "cpu"


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="'gpu'"):
        devices.resolve_device("gpu")


@pytest.fixture
def flags_restored():
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32, torch.are_deterministic_algorithms_enabled())
    yield
    matmul.allow_tf32, cudnn.allow_tf32 = before[:2]
    torch.use_deterministic_algorithms(before[2])


def test_every_reduced_precision_is_off_and_recorded(flags_restored, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    flags = devices.set_precision()
    assert flags == devices.precision_flags()
    assert flags["deterministic_algorithms"] is True
    assert flags["cublas_workspace"] == ":4096:8"
    off = set(flags) - {"deterministic_algorithms", "cublas_workspace"}
    assert all(flags[name] is False for name in off), flags


def test_threads_are_set_inside_and_restored():
    before = torch.get_num_threads()
    with devices.threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with pytest.raises(ValueError, match="at least 1"), devices.threads(0):
        pass


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_in_float64_agrees_with_the_cpu(randn):
    devices.set_precision()
    A, B = randn(70, 50), randn(50, 30)
    torch.testing.assert_close((A.cuda() @ B.cuda()).cpu(), A @ B, rtol=1e-10, atol=1e-10)
