import pytest

from curvature_gap import workflow_support
from curvature_gap.settings import SettingsError


@pytest.fixture(autouse=True)
def forget_gpu_count():
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
