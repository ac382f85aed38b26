"""The frame around every script of the workflow: log, threads, GPU, timing, and a failure that says what to do."""

import json
import logging
import os
import platform
import resource
import shlex
import signal
import sys
import threading
import time
import traceback
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from curvature_gap.files import atomic_path

GRACE_SECONDS = 5
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@contextmanager
def job(snakemake: Any) -> Iterator[logging.Logger]:
    """Run a rule's body: messages go to the rule's log, the named output `timing` is written at the end.

    An exception is logged in full, told in one line on stderr, and ends the process with exit status 1.
    """
    set_threads(snakemake.threads)
    log_path = Path(snakemake.log[0])
    log_path.parent.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        handlers=[logging.FileHandler(log_path, mode="w", encoding="utf-8")],
        force=True,
    )
    log = logging.getLogger(snakemake.rule)
    end_with_the_run(log)
    device = snakemake.params.get("device", "cpu")
    started, cpu_started = time.perf_counter(), time.process_time()
    try:
        from curvature_gap.gpus import claimed_gpu

        with claimed_gpu(device):
            yield log
    except BaseException as error:
        log.exception("failed")
        last = traceback.format_exception_only(error)[-1].strip()
        print(f"{snakemake.rule}: {last}\n  full log: {log_path}", file=sys.stderr)
        for path in damaged_archives(snakemake.input):
            print(f"  {path} is damaged: delete it (rm {shlex.quote(path)}) and run again", file=sys.stderr)
        sys.exit(1)
    timing = snakemake.output.get("timing")
    if timing:
        record = {
            "rule": snakemake.rule,
            "wildcards": dict(snakemake.wildcards.items()),
            "seconds": time.perf_counter() - started,
            "cpu_seconds": time.process_time() - cpu_started,
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "threads": snakemake.threads,
            "device": device,
            "machine": machine(),
        }
        with atomic_path(timing) as temporary:
            temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def damaged_archives(paths: Iterable[str]) -> list[str]:
    """Return the npz files that are no intact archives: what a job failed of, when it failed of reading its inputs."""
    damaged = []
    for path in paths:
        if path.endswith(".npz") and Path(path).is_file():
            try:
                with zipfile.ZipFile(path) as archive:
                    whole = archive.testzip() is None
            except (zipfile.BadZipFile, OSError, EOFError, ValueError, zlib.error):
                whole = False
            if not whole:
                damaged.append(path)
    return damaged


def end_with_the_run(log: logging.Logger, poll_seconds: float = 0.5) -> None:
    """End this process when the Snakemake that started it is gone, killed say: else it would go on writing beside the
    next run. Where no Snakemake is among the ancestors nothing happens.
    """
    import psutil

    try:
        ancestors = psutil.Process().parents()
        run = next((p for p in ancestors if "snakemake" in {Path(word).name for word in p.cmdline()[:4]}), None)
    except psutil.Error:
        return
    if run is None:
        return

    def watch() -> None:
        try:
            while run.is_running() and run.status() != psutil.STATUS_ZOMBIE:
                time.sleep(poll_seconds)
        except psutil.NoSuchProcess:
            pass
        log.error("the Snakemake that started this job is gone; the job ends")
        # First in a way that lets temporary files go; then by force, out of a long computation.
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_SECONDS)
        os._exit(1)

    signal.signal(signal.SIGTERM, _terminated)
    threading.Thread(target=watch, daemon=True).start()


def _terminated(*_: Any) -> None:
    raise SystemExit("ended by SIGTERM: the scheduler or the end of the run stopped this job")


def set_threads(n: int) -> None:
    """Give every numerical library n threads, whether it is loaded already or not."""
    for variable in THREAD_VARIABLES:
        os.environ[variable] = str(n)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(n)


def machine() -> str:
    """Name the processor type, as precisely as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} cores"
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
