"""Time, memory and error of whole Hessians: this package's engine beside other programs. `make bench` runs it.

Every measurement is a process of its own with the same number of threads, a memory cap and a time limit; what fails
says so in its row. Peers compute the Hessian of `FusedViT`, the model a user would write, the engine that of `ViT`: the
same function. Expensive peers compute some columns, evenly spread over the matrix, and their time is extrapolated.
"""

import argparse
import contextlib
import csv
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvature_gap.architecture import Architecture, parameter_shapes
from curvature_gap.benchmark_peers import ENGINE, PEERS, Peer, Problem, make_problem
from curvature_gap.exact_hessian import available_bytes, exact_hessian
from curvature_gap.files import atomic_path
from curvature_gap.job import machine, set_threads
from curvature_gap.power_law import fit_power_law
from curvature_gap.vit import ViT

TABLE = ["method", "version", "dtype", "threads", "batch", "parameters", "columns", "seconds", "extrapolated"]
TABLE += ["peak_gib", "max_error_rel", "asymmetry_rel", "status"]
GROWTH_TABLE = ["series", "dtype", "threads", "batch", "width", "parameters", "seconds"]
GIB = 2**30
# Above these, in units of max |H|, a result is called wrong: rounding stays far below, the wrong blocks far above.
WRONG = {"float64": 1e-10, "float32": 1e-4}
REFERENCE_COLUMNS = 32
REFERENCE_TOLERANCE = 1e-12

PINNED = Architecture(image_size=28, channels=1, patch=4, classes=10, d_V=16, d_ff=64)
TINY = Architecture(image_size=8, channels=1, patch=4, classes=3, d_V=4, d_ff=6)


def with_biases(architecture: Architecture) -> Architecture:
    """Return the variant with biases and learned positions and without output projection."""
    return replace(architecture, bias=True, output_projection=False, positions="learned")


@dataclass(frozen=True)
class Plan:
    """What one run of the benchmark measures."""

    architectures: tuple[Architecture, ...] = (PINNED, with_biases(PINNED))
    methods: tuple[str, ...] = tuple(PEERS)
    dtypes: tuple[str, ...] = ("float32", "float64")
    batch: int = 128
    columns: int = 256
    """Columns of a peer that is not run in full."""
    repetitions: int = 3
    """Runs of the engine; its row is their median."""
    full: str = "autograd loop"
    """The peer that computes every column: the fastest correct one."""
    once: tuple[str, ...] = ("BackPACK", "hessian-eigenthings")
    """Peers run on the first architecture only: the same double backward as PyHessian's, in other clothes."""
    growth_batches: tuple[int, ...] = (32, 64, 128, 256, 512)
    growth_widths: tuple[int, ...] = (16, 20, 24, 28, 32)
    diagonal_widths: tuple[int, ...] = (16, 24, 32, 48, 64)
    growth_batch: int = 32
    """Batch of the growth in width."""
    cap_gib: float = 12.0
    """Memory that a method may take beyond what the process holds before it starts."""
    timeout: float = 600.0
    """Seconds a method may take."""
    budget: float = 1500.0
    """Seconds the whole run may take; what comes later is not run."""


QUICK = Plan(
    architectures=(TINY,),
    methods=(ENGINE, "autograd loop", "torch.func.hessian"),
    dtypes=("float64",),
    batch=4,
    columns=12,
    repetitions=1,
    growth_batches=(2, 4, 8),
    growth_widths=(3, 4, 6),
    diagonal_widths=(3, 4, 6),
    growth_batch=3,
    cap_gib=2.0,
    timeout=60.0,
)


@dataclass(frozen=True)
class Job:
    """One measurement, as handed to its process. `reference` is the file of the reference Hessian."""

    method: str
    architecture: Architecture
    dtype: str
    batch: int
    columns: int | None
    threads: int
    cap_gib: float | None
    reference: str


# ------------------------------------------------------------------------------------------------------- one process


def spread(total: int, count: int | None) -> Tensor:
    """Return `count` column indices from the first to the last, evenly spread; None means every column."""
    if count is None or count >= total:
        return torch.arange(total)
    return torch.linspace(0, total - 1, count).round().long().unique()


def measure(job: Job) -> dict[str, Any]:
    """Run one method and return its part of a row: seconds, memory, error, asymmetry, status."""
    set_threads(job.threads)
    peer, dtype = PEERS[job.method], getattr(torch, job.dtype)
    row: dict[str, Any] = {"version": _version(peer.package), "extrapolated": False}
    try:
        warm = make_problem(TINY, 2, dtype)
        peer.prepare(warm)(torch.arange(4))
        problem = make_problem(job.architecture, job.batch, dtype)
        total = job.architecture.n_parameters
        indices = spread(total, None if peer.chunk is None else job.columns)
        with MemoryCap(job.cap_gib) as peak:
            H, setup, seconds = _timed(peer, problem, indices)
        row |= {
            "columns": len(indices),
            "seconds": setup + seconds * total / len(indices),
            "extrapolated": len(indices) < total,
            "peak_gib": peak() / GIB,
        }
        return row | judged(H, indices, np.load(job.reference, mmap_mode="r"), job)
    except ImportError as error:
        return row | {"status": f"not installed: {error}"}
    except (MemoryError, RuntimeError) as error:
        return row | {"status": failure(error, job.cap_gib)}
    except Exception as error:  # a peer may raise anything; its row says what
        return row | {"status": f"failed: {type(error).__name__}: {_first_line(error)}"}


def _timed(peer: Peer, problem: Problem, indices: Tensor) -> tuple[Tensor, float, float]:
    """Return the columns, the seconds of the preparation and the seconds of the columns."""
    start = time.perf_counter()
    columns = peer.prepare(problem)
    ready = time.perf_counter()
    if peer.chunk is None:
        H = columns(indices).detach()
    else:
        H = problem.theta.new_empty(problem.architecture.n_parameters, len(indices))
        for first in range(0, len(indices), peer.chunk):
            H[:, first : first + peer.chunk] = columns(indices[first : first + peer.chunk]).detach()
    return H, ready - start, time.perf_counter() - ready


class MemoryCap:
    """Limit the address space to what is held now plus `cap_gib`; gives a function that returns the peak so far.

    The peak is of resident memory above what was held at the start, so it is the method's own, result included. It
    needs Linux's /proc to be exact; elsewhere it is the process's peak above its earlier peak.
    """

    def __init__(self, cap_gib: float | None) -> None:
        self.cap_gib = cap_gib
        self.before = resource.getrlimit(resource.RLIMIT_AS)

    def __enter__(self) -> Callable[[], int]:
        held = _status_bytes("VmRSS")
        if held is None:
            earlier = _max_resident()
            return lambda: _max_resident() - earlier
        if self.cap_gib is not None:
            limit = (_status_bytes("VmSize") or 0) + int(self.cap_gib * GIB)
            resource.setrlimit(resource.RLIMIT_AS, (limit, self.before[1]))
        start = held
        # Resets the high-water mark of this process; where that is forbidden, imports may count towards the peak.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        return lambda: max(0, (_status_bytes("VmHWM") or 0) - start)

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self.before)


def _status_bytes(field: str) -> int | None:
    path = Path("/proc/self/status")
    if not path.exists():
        return None
    fields = dict(line.split(":", 1) for line in path.read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


def _max_resident() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def judged(H: Tensor, indices: Tensor, reference: np.ndarray, job: Job) -> dict[str, Any]:
    """Compare columns with the reference: the largest error and asymmetry over max |H|, and a verdict.

    The asymmetry is that of the rows and columns of `indices`.
    """
    right = torch.from_numpy(np.array(reference[:, indices.numpy()] if len(indices) < len(reference) else reference))
    scale = float(np.abs(reference).max())
    difference = (H.double() - right).abs_()
    square = H[indices].double()
    error = float(difference.max()) / scale
    found = {"max_error_rel": error, "asymmetry_rel": float((square - square.T).abs().max()) / scale, "status": "ok"}
    if not error <= WRONG[job.dtype]:
        place = divmod(int(difference.argmax()), difference.shape[1])
        row, column = block_of(place[0], job.architecture), block_of(int(indices[place[1]]), job.architecture)
        found["status"] = f"wrong: block ({row}, {column}) is off by {error:.1e} of max |H|"
    return found


def block_of(index: int, architecture: Architecture) -> str:
    """Return the name of the parameter block that a row of the Hessian belongs to."""
    for name, shape in parameter_shapes(architecture).items():
        index -= int(np.prod(shape))
        if index < 0:
            return name
    raise ValueError("The index lies beyond the last parameter.")


def failure(error: Exception, cap_gib: float | None) -> str:
    """Return a status that says why a method failed: out of memory, or the first line of its message."""
    text = str(error)
    if isinstance(error, MemoryError) or "allocate memory" in text or "bad_alloc" in text:
        return f"out of memory: needs more than {cap_gib:g} GiB" if cap_gib else "out of memory"
    return f"failed: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def write_reference(architecture: Architecture, batch: int, threads: int, path: Path) -> dict[str, Any]:
    """Write the engine's certified float64 Hessian; check it against the autograd loop's columns on the fused model.

    Raises:
        ValueError: If the two differ by more than rounding; no peer could then be judged.
    """
    set_threads(threads)
    problem = make_problem(architecture, batch, torch.float64)
    model = ViT(architecture).double()
    model.load_state_dict(problem.model.state_dict())
    hessian = exact_hessian(model, problem.images, problem.labels, engine="closed_form")
    assert hessian.H is not None
    assert hessian.certificate is not None
    indices = spread(len(hessian.H), REFERENCE_COLUMNS)
    columns = PEERS["autograd loop"].prepare(problem)(indices)
    error = float((columns - hessian.H[:, indices]).abs().max() / hessian.H.abs().max())
    if not error <= REFERENCE_TOLERANCE:
        raise ValueError(
            f"The reference Hessian differs from {len(indices)} columns of the autograd loop by {error:.3g} of max |H| "
            f"(allowed {REFERENCE_TOLERANCE:g}): find out which is wrong before comparing anything with it."
        )
    np.save(path, hessian.H.numpy())
    return {"autograd_loop_error_rel": error, "autograd_loop_columns": len(indices), **asdict(hessian.certificate)}


# ------------------------------------------------------------------------------------------------------------ growth


def growth_points(plan: Plan) -> dict[str, list[tuple[Architecture, int]]]:
    """Return, for each series, the models and batches to time, smallest first."""
    first = plan.architectures[0]
    ratio = first.d_ff / first.d_V

    def wide(d: int) -> Architecture:
        return replace(first, d_V=d, d_ff=round(ratio * d))

    return {
        "batch": [(first, b) for b in plan.growth_batches],
        "width": [(wide(d), plan.growth_batch) for d in plan.growth_widths],
        "width, diagonal blocks": [(wide(d), plan.growth_batch) for d in plan.diagonal_widths],
    }


def grow(series: str, points: Sequence[tuple[Architecture, int]], threads: int) -> list[dict[str, Any]]:
    """Return a row of `growth.csv` for each point: seconds of the engine in float32, the best of up to three runs."""
    set_threads(threads)
    rows = []
    for architecture, batch in points:
        problem = make_problem(architecture, batch, torch.float32)
        model = ViT(architecture)
        blocks = "diagonal" if "diagonal" in series else None
        seconds: list[float] = []
        while len(seconds) < 3 and sum(seconds) < 4:
            start = time.perf_counter()
            exact_hessian(
                model,
                problem.images,
                problem.labels,
                blocks=blocks,
                engine="closed_form",
                dtype=torch.float32,
                certify=False,
            )
            seconds.append(time.perf_counter() - start)
        rows.append(
            {
                "series": series,
                "dtype": "float32",
                "threads": threads,
                "batch": batch,
                "width": architecture.d_V,
                "parameters": architecture.n_parameters,
                "seconds": min(seconds),
            }
        )
    return rows


def exponent_row(series: str, points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the row of `benchmarks.csv` that states the fitted exponent of one series."""
    variable = "batch" if series == "batch" else "width"
    x, y = np.array([p[variable] for p in points], float), np.array([p["seconds"] for p in points])
    law = fit_power_law(x, y)
    last = points[-1]
    return {
        "method": f"{ENGINE}, growth in {series}",
        "version": _version("curvature-gap"),
        "extrapolated": False,
        **{name: last[name] for name in ("dtype", "threads", "batch", "parameters", "seconds")},
        "status": f"seconds grow as {variable}^{law.exponent:.2f} (95 % {law.low:.2f} to {law.high:.2f}) "
        f"from {variable} {x[0]:g} to {x[-1]:g}",
    }


# ----------------------------------------------------------------------------------------------------------- the run


def in_process_of_its_own(task: str, request: Mapping[str, Any], timeout: float) -> Any:
    """Run `task` on a request in a fresh Python and return its answer; a dead process gives a status instead."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-W", "ignore", "-m", "curvature_gap.benchmark", "--task", task]
        command += ["--answer", str(answer), "--request", json.dumps(request)]
        try:
            done = subprocess.run(command, timeout=timeout, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            return {"status": f"timed out after {timeout:g} s"}
        if answer.exists():
            return json.loads(answer.read_text(encoding="utf-8"))
    last = (done.stderr.strip().splitlines() or ["no message"])[-1][:200]
    return {"status": f"failed: the process ended with {done.returncode}: {last}"}


def run_task(task: str, request: Mapping[str, Any]) -> Any:
    """Do in this process what `in_process_of_its_own` asks for."""
    if task == "measure":
        return measure(Job(**{**request, "architecture": Architecture(**request["architecture"])}))
    if task == "reference":
        architecture = Architecture(**request["architecture"])
        return write_reference(architecture, request["batch"], request["threads"], Path(request["path"]))
    points = [(Architecture(**a), batch) for a, batch in request["points"]]
    return grow(request["series"], points, request["threads"])


def schedule(plan: Plan) -> list[str]:
    """Return the order of methods: the engine's runs before, between and after the peers', so that load hits both."""
    peers = [m for m in plan.methods if m not in (ENGINE, plan.full)]
    engine = [ENGINE] if ENGINE in plan.methods else []
    runs = [*engine, *peers]
    if plan.full in plan.methods:
        runs += [*engine, plan.full] if plan.repetitions > 1 else [plan.full]
    return runs + engine * max(0, plan.repetitions - runs.count(ENGINE))


def columns_of(method: str, plan: Plan) -> int | None:
    """Return how many columns a method computes; None is all."""
    return None if method == plan.full else plan.columns


def combined(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one row for the runs of one method: median seconds, worst of the rest."""
    row = dict(runs[-1])
    bad = [r for r in runs if r.get("seconds") is None]
    if bad:
        return dict(bad[0])
    row["seconds"] = statistics.median(r["seconds"] for r in runs)
    for name in ("peak_gib", "max_error_rel", "asymmetry_rel"):
        row[name] = max(r[name] for r in runs)
    return row


def ratios(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return how many times faster the engine is than curvlinops and than the fastest correct peer, per problem."""
    problems: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("seconds") is not None and row["method"] in PEERS:
            problems.setdefault((row["parameters"], row["dtype"]), []).append(row)
    found = []
    for (parameters, dtype), group in problems.items():
        seconds = {row["method"]: row["seconds"] for row in group}
        correct = [row for row in group if row["status"] == "ok" and row["method"] != ENGINE]
        if ENGINE not in seconds or not correct:
            continue
        best = min(correct, key=lambda row: row["seconds"])
        curvlinops = [s for method, s in seconds.items() if method.startswith("curvlinops")]
        found.append(
            {
                "parameters": parameters,
                "dtype": dtype,
                "engine_seconds": seconds[ENGINE],
                "over_curvlinops": curvlinops[0] / seconds[ENGINE] if curvlinops else None,
                "fastest_correct_peer": best["method"],
                "over_fastest_correct_peer": best["seconds"] / seconds[ENGINE],
            }
        )
    return found


def compare(plan: Plan, threads: int, folder: Path, left: Callable[[], float]) -> tuple[list[dict], list[dict], dict]:
    """Measure every method on every problem. Returns the rows, every single run, and the references' evidence."""
    rows, log, references = [], [], {}
    for architecture in plan.architectures:
        P = architecture.n_parameters
        path = folder / f"reference_{P}.npy"
        request = {"architecture": asdict(architecture), "batch": plan.batch, "threads": threads, "path": str(path)}
        references[str(P)] = in_process_of_its_own("reference", request, plan.timeout)
        print(f"P = {P:,}: reference {references[str(P)]}", flush=True)
        if not path.exists():
            raise RuntimeError(f"No reference Hessian for P = {P:,}: {references[str(P)]['status']}")
        for dtype in plan.dtypes:
            runs: dict[str, list[dict[str, Any]]] = {}
            for method in schedule(plan):
                columns = columns_of(method, plan)
                job = Job(method, architecture, dtype, plan.batch, columns, threads, plan.cap_gib, str(path))
                limit = min(plan.timeout, left())
                if method in plan.once and architecture != plan.architectures[0]:
                    found = {"status": f"not run: measured at P = {plan.architectures[0].n_parameters:,} only"}
                elif limit <= 0:
                    found = {"status": "not run: the time of the whole run was spent"}
                else:
                    found = in_process_of_its_own("measure", asdict(job), limit)
                same = {"method": method, "dtype": dtype, "threads": threads, "batch": plan.batch, "parameters": P}
                runs.setdefault(method, []).append({"version": _version(PEERS[method].package), **same, **found})
                log.append({**same, **found, "load": os.getloadavg()[0]})
                print(_line(runs[method][-1]), flush=True)
            rows += [combined(runs[method]) for method in plan.methods]
            if ENGINE in plan.methods and dtype == "float64":
                # It agrees with itself: what counts is its distance from the other method and its own two halves.
                engine = rows[-len(plan.methods) + plan.methods.index(ENGINE)]
                engine["max_error_rel"] = references[str(P)]["autograd_loop_error_rel"]
                engine["asymmetry_rel"] = references[str(P)]["asymmetry"]
        path.unlink()
    return rows, log, references


def growth(plan: Plan, threads: int, left: Callable[[], float]) -> tuple[list[dict], list[dict]]:
    """Measure the engine's growth. Returns the rows with the exponents and the points."""
    rows, points = [], []
    for series, models in growth_points(plan).items():
        request = {"series": series, "threads": threads, "points": [(asdict(a), b) for a, b in models]}
        found = in_process_of_its_own("growth", request, max(1.0, min(plan.timeout, left())))
        if isinstance(found, dict):
            last, batch = models[-1]
            same = {"dtype": "float32", "threads": threads, "batch": batch, "parameters": last.n_parameters}
            row = {"method": f"{ENGINE}, growth in {series}", "version": _version("curvature-gap"), **same, **found}
        else:
            points += found
            row = exponent_row(series, found)
        rows.append(row)
        print(f"{row['method']}: {row['status']}", flush=True)
    return rows, points


def _line(row: Mapping[str, Any]) -> str:
    seconds = row.get("seconds")
    took = "" if seconds is None else f"{seconds:9.2f} s{' (extrapolated)' if row['extrapolated'] else ''}"
    peak = "" if row.get("peak_gib") is None else f"{row['peak_gib']:6.2f} GiB"
    error = "" if row.get("max_error_rel") is None else f"error {row['max_error_rel']:.1e}"
    return f"{row['parameters']:6,} {row['dtype']} {row['method']:28s} {took} {peak} {error}  {row['status']}"


def write_csv(rows: Iterable[Mapping[str, Any]], path: Path, columns: Sequence[str]) -> None:
    """Write rows to a CSV file; what a row lacks stays empty."""
    with atomic_path(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows({"extrapolated": False, **row} for row in rows)


def run(plan: Plan, threads: int, output: Path) -> list[dict[str, Any]]:
    """Run the whole benchmark and write `benchmarks.csv`, `growth.csv` and `machine.json` into `output`."""
    set_threads(threads)
    start, load = time.monotonic(), os.getloadavg()
    free = available_bytes(torch.device("cpu")) / GIB
    plan = replace(plan, cap_gib=min(plan.cap_gib, round(0.75 * free, 1)))
    print(f"{machine()}, {threads} thread(s), load {load[0]:.2f}, memory cap {plan.cap_gib:g} GiB", flush=True)

    def left() -> float:
        return plan.budget - (time.monotonic() - start)

    with tempfile.TemporaryDirectory() as folder:
        rows, log, references = compare(plan, threads, Path(folder), left)
    more, points = growth(plan, threads, left)
    rows += more
    write_csv(rows, output / "benchmarks.csv", TABLE)
    write_csv(points, output / "growth.csv", GROWTH_TABLE)
    faster = ratios(rows)
    record = {
        "machine": machine(),
        "threads": threads,
        "load_before": load,
        "load_after": os.getloadavg(),
        "memory_cap_gib": plan.cap_gib,
        "peak_gib": "peak resident memory above what the process held before the method, result included",
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "seconds": time.monotonic() - start,
        "references": references,
        "ratios": faster,
        "runs": log,
    }
    with atomic_path(output / "machine.json") as temporary:
        temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for ratio in faster:
        print(json.dumps(ratio), flush=True)
    return rows


def cores() -> int:
    """Return how many cores this process may use. More threads than that slow every method down badly."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, or one task of it in this process."""
    parser = argparse.ArgumentParser(prog="python -m curvature_gap.benchmark", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results/bench"), help="folder of the results")
    parser.add_argument("--threads", type=int, default=cores(), help="threads of every method (default: every core)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few methods, to try the program")
    parser.add_argument("--methods", nargs="+", choices=list(PEERS), help="only these methods")
    for internal in ("--task", "--request", "--answer"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.task:
        answer = json.dumps(run_task(given.task, json.loads(given.request)))
        with atomic_path(given.answer) as temporary:
            temporary.write_text(answer, encoding="utf-8")
        return 0
    plan = QUICK if given.quick else Plan()
    run(replace(plan, methods=tuple(given.methods)) if given.methods else plan, given.threads, given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
