"""One GPU per job, tested with made-up ids: no GPU is needed."""

import os
import subprocess
import sys

import pytest

from curvature_gap.gpus import claimed_gpu

CLAIM = """
import os, time
from curvature_gap.gpus import claimed_gpu
with claimed_gpu("cuda", poll_seconds=0.02):
    start = time.time()
    time.sleep(0.3)
    print(os.environ["CUDA_VISIBLE_DEVICES"], start, time.time())
"""


@pytest.fixture
def lock_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def test_cpu_claims_nothing():
    with claimed_gpu("cpu") as gpu:
        assert gpu is None


def test_no_gpu_is_an_error(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(RuntimeError, match="no GPU is visible"), claimed_gpu("cuda"):
        pass


def test_the_environment_is_restored(monkeypatch, lock_folder):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    with claimed_gpu("cuda") as gpu:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == gpu == "4"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,6"


def test_two_slurm_jobs_that_both_see_gpu_0_do_not_wait_for_each_other(monkeypatch, lock_folder):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with claimed_gpu("cuda") as first, claimed_gpu("cuda") as second:
        assert first == second == "0"


@pytest.mark.parametrize("n", [1, 2, 4])
def test_jobs_at_the_same_time_hold_distinct_gpus(monkeypatch, lock_folder, n):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(str(10 + i) for i in range(n)))
    jobs = [subprocess.Popen([sys.executable, "-c", CLAIM], stdout=subprocess.PIPE, text=True) for _ in range(n + 1)]
    held = []
    for process in jobs:
        out, _ = process.communicate(timeout=60)
        gpu, start, end = out.split()
        held.append((gpu, float(start), float(end)))
    for i, (gpu, start, end) in enumerate(held):
        for other, other_start, other_end in held[:i]:
            assert gpu != other or start >= other_end or other_start >= end
