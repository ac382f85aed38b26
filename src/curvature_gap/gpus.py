"""One GPU per job on one machine: Snakemake counts GPUs but hands out no ids."""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from curvature_gap.workflow_support import gpu_ids


@contextmanager
def claimed_gpu(device: str, poll_seconds: float = 0.5) -> Iterator[str | None]:
    """Hold one of the visible GPUs for the length of the block and set CUDA_VISIBLE_DEVICES to it.

    A file lock per id keeps two jobs apart, also jobs of two workflows, and is released by the kernel when a job is
    killed. Must come before torch is imported. On the CPU nothing happens; where a scheduler has already pinned the
    job to one GPU, that one is taken.

    Raises:
        RuntimeError: If the device is cuda and no GPU is visible.
    """
    if device != "cuda":
        yield None
        return
    from filelock import FileLock, Timeout

    ids = gpu_ids()
    if not ids:
        raise RuntimeError("device is cuda, but no GPU is visible to this job; check CUDA_VISIBLE_DEVICES.")
    if "SLURM_JOB_ID" in os.environ and len(ids) == 1:
        # Slurm hands out GPUs itself and, where it confines devices, calls each job's GPU 0: a lock by id would let two
        # jobs with different GPUs wait for each other.
        yield ids[0]
        return
    folder = Path(tempfile.gettempdir()) / f"curvature-gap-gpus-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    while True:
        for gpu in ids:
            lock = FileLock(folder / f"{gpu.replace('/', '_')}.lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            before = os.environ.get("CUDA_VISIBLE_DEVICES")
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu
            try:
                yield gpu
            finally:
                lock.release()
                if before is None:
                    del os.environ["CUDA_VISIBLE_DEVICES"]
                else:
                    os.environ["CUDA_VISIBLE_DEVICES"] = before
            return
        time.sleep(poll_seconds)
