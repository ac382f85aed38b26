import pytest

from curvature_gap import workflow_support
from curvature_gap.settings import SettingsError


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setenv(workflow_support.DEVICE_VARIABLE, "none yet")  # restored afterwards
    monkeypatch.delenv(workflow_support.DEVICE_VARIABLE)
    workflow_support.n_gpus.cache_clear()
    yield
    workflow_support.n_gpus.cache_clear()


@pytest.mark.parametrize(("visible", "ids"), [("", []), ("-1", []), ("3", ["3"]), ("0,2,5,7", ["0", "2", "5", "7"])])
def test_visible_gpus_are_honoured(monkeypatch, visible, ids):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert workflow_support.gpu_ids() == ids
    assert workflow_support.n_gpus() == len(ids)


def test_cuda_without_a_gpu_is_an_error_not_a_fallback(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SettingsError, match="device: cuda, but no GPU"):
        workflow_support.device("cuda")
    assert workflow_support.device("auto") == "cpu"


def test_auto_takes_a_gpu_that_is_there(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert workflow_support.device("auto") == "cuda"
    assert workflow_support.device("cpu") == "cpu"


@pytest.mark.parametrize("visible", ["", "1"])
def test_a_cluster_may_have_the_gpus_that_the_login_node_lacks(monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert workflow_support.device_of_jobs("cuda", main=True, local=False) == "cuda"


def test_jobs_take_over_the_device_that_the_run_found(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert workflow_support.device_of_jobs("auto", main=True, local=False) == "cpu"
    workflow_support.n_gpus.cache_clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # the job's node has a GPU
    assert workflow_support.device_of_jobs("auto", main=False, local=True) == "cpu"
    assert workflow_support.device_of_jobs("auto", main=True, local=True) == "cuda"


def test_cuda_without_a_gpu_stays_an_error_for_local_runs(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SettingsError, match="device: cuda, but no GPU"):
        workflow_support.device_of_jobs("cuda", main=True, local=True)


def test_a_scripts_own_code_is_found_through_imports_of_imports(tmp_path):
    package = tmp_path / "src" / "curvature_gap"
    (package / "theory").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "theory" / "__init__.py").write_text("")
    (package / "theory" / "block.py").write_text("from curvature_gap.maps import softmax\n")
    (package / "maps.py").write_text("import torch\n")
    (package / "unrelated.py").write_text("")
    script = tmp_path / "check.py"
    script.write_text("def late():\n    from curvature_gap.theory import block\n    import curvature_gap_other\n")
    files = workflow_support.package_files(script, tmp_path / "src", start=tmp_path)
    assert files == [
        "src/curvature_gap/maps.py",
        "src/curvature_gap/theory/__init__.py",
        "src/curvature_gap/theory/block.py",
    ]
