"""The frame of every script: how a job ends, and what it says."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from curvature_gap.job import damaged_archives

SOURCE = Path(__file__).parents[1] / "src"

WORK = """
import logging, sys, time
sys.path.insert(0, {source!r})
from curvature_gap.job import end_with_the_run
end_with_the_run(logging.getLogger(), poll_seconds=0.05)
print("working", flush=True)
try:
    time.sleep(60)
finally:
    open({trace!r}, "w").close()
"""


def test_a_damaged_archive_among_the_inputs_is_found(tmp_path):
    whole, cut, flipped = (str(tmp_path / f"{name}.npz") for name in ("whole", "cut", "flipped"))
    for path in (whole, cut, flipped):
        np.savez(path, indices=np.arange(100))
    Path(cut).write_bytes(Path(cut).read_bytes()[:300])
    data = bytearray(Path(flipped).read_bytes())
    data[400] ^= 1
    Path(flipped).write_bytes(bytes(data))
    assert damaged_archives([whole, cut, "absent.npz", __file__, flipped]) == [cut, flipped]


@pytest.mark.slow  # waits on processes: failed once in 15 runs on a machine with much other work
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
@pytest.mark.parametrize("name", ["snakemake", "other"])
def test_a_job_ends_with_the_snakemake_that_started_it_and_with_nothing_else(name, tmp_path):
    trace = tmp_path / "cleaned"
    (tmp_path / "job.py").write_text(WORK.format(source=str(SOURCE), trace=str(trace)))
    parent = tmp_path / name
    parent.write_text(f"import subprocess\nsubprocess.run(['sh', '-c', '{sys.executable} {tmp_path}/job.py; true'])\n")
    process = subprocess.Popen([sys.executable, parent], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout.readline() == "working\n"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        end = time.monotonic() + (5 if name == "snakemake" else 0.7)
        while not trace.exists() and time.monotonic() < end:
            time.sleep(0.02)
        assert trace.exists() == (name == "snakemake")
    finally:
        process.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
