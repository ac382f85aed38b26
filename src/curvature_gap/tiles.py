"""The Hessian in output tiles: a block pair and a range of its rows, one file each, some of them one job.

Tiles are cut from the output, never from the batch: no reduction, one writer per tile. The plan is a JSON manifest that
names the model, the batch, every tile and its job; a tile is an npy file with a JSON beside it that holds its SHA-256.
A tile whose file and record agree is kept; one that does not is named and computed again, with its whole job, so that
an interruption changes no bit. `gather` streams the tiles into one npz file as `Hessian.save` writes it, a stripe of
rows at a time: the matrix is never in memory, and `Hessian.load(path, mmap=True)` maps it.
"""

import hashlib
import io
import json
import logging
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from curvature_gap.autodiff_hessian import Pair, block_slices
from curvature_gap.batch_loss import BatchLoss, Criterion, batch_loss, flatten
from curvature_gap.certificate import Certificate
from curvature_gap.exact_hessian import choose_engine, engine_blocks, hash_batch
from curvature_gap.files import atomic_path
from curvature_gap.hessian import Hessian
from curvature_gap.tile_plan import JOB_BYTES, TILE_BYTES, Tile, plan

logger = logging.getLogger(__name__)


class TileError(ValueError):
    """A tile that is missing, damaged or of another model or batch."""


def write_manifest(
    path: str | Path,
    model: nn.Module,
    images: Tensor,
    targets: Tensor,
    *,
    loss: str = "cross_entropy",
    tile_bytes: int = TILE_BYTES,
    job_bytes: int = JOB_BYTES,
    dtype: torch.dtype = torch.float64,
    batch_sha256: str | None = None,
) -> dict[str, Any]:
    """Write the plan of one Hessian as JSON, atomically, and return it.

    `key` names model, batch, loss, dtype and tiling: tiles with another key are not this Hessian's. A manifest that is
    there and says the same is left untouched.
    """
    problem = batch_loss(model, images, targets, loss=loss, dtype=dtype)
    shapes = {name: tuple(p.shape) for name, p in problem.parameters.items()}
    tiles = plan(shapes, tile_bytes=tile_bytes, job_bytes=job_bytes, itemsize=problem.images.element_size())
    value, gradient = problem.value_and_gradient()
    manifest: dict[str, Any] = {
        "names": list(shapes),
        "shapes": [list(shape) for shape in shapes.values()],
        "dtype": str(dtype).removeprefix("torch."),
        "loss_name": problem.loss,
        "engine": choose_engine("auto", problem, model),
        "loss": float(value),
        "grad_norm": float(flatten(gradient).norm()),
        "batch_sha256": batch_sha256 or hash_batch(images, targets),
        "problem_sha256": _hash_problem(problem),
        "tiles": [asdict(tile) for tile in tiles],
    }
    manifest["key"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    text = json.dumps(manifest, indent=1) + "\n"
    if not Path(path).exists() or Path(path).read_text() != text:
        with atomic_path(path) as temporary:
            temporary.write_text(text)
    return manifest


def read_manifest(path: str | Path) -> dict[str, Any]:
    """Return a manifest. Raises TileError, naming the file, if it is damaged or was edited."""
    try:
        manifest = json.loads(Path(path).read_text())
        key = manifest.pop("key")
    except (json.JSONDecodeError, KeyError, UnicodeDecodeError) as error:
        raise TileError(f"{path} is no manifest of tiles ({error}); write it again.") from error
    if hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest() != key:
        raise TileError(f"{path} does not match its own key; it was edited or damaged. Write it again.")
    return manifest | {"key": key}


def tiles_of(manifest: Mapping[str, Any]) -> dict[str, Tile]:
    """Return the tiles of a manifest by id."""
    return {tile["id"]: Tile(**tile) for tile in manifest["tiles"]}


def jobs_of(manifest: Mapping[str, Any]) -> dict[int, list[Tile]]:
    """Return the tiles of each job, in order."""
    jobs: dict[int, list[Tile]] = {}
    for tile in tiles_of(manifest).values():
        jobs.setdefault(tile.job, []).append(tile)
    return jobs


def compute_job(
    manifest: Mapping[str, Any], job: int, model: nn.Module, images: Tensor, targets: Tensor, folder: str | Path
) -> list[Path]:
    """Compute one job and write its tiles, `<id>.npy` and `<id>.json` (SHA-256, key) each, atomically.

    Tiles that are complete and valid are left as they are; damaged ones are named in the log and written again. With
    nothing to write, nothing is computed.

    Returns:
        The tiles' paths.

    Raises:
        KeyError: If the manifest has no such job.
        TileError: If model or batch are not the manifest's.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    jobs = jobs_of(manifest)
    if job not in jobs:
        raise KeyError(f"The manifest has jobs 0 … {max(jobs)}, not {job}.")
    faults = {tile: fault for tile in jobs[job] if (fault := tile_fault(manifest, tile, folder)) is not None}
    for tile, fault in faults.items():
        if fault != "missing":
            logger.warning("Tile %s is %s; computing it again.", folder / f"{tile.id}.npy", fault)
    if faults:
        problem = _problem(manifest, model, images, targets)
        rows: dict[Pair, slice] = {}
        for tile in jobs[job]:  # neighbouring tiles of one block are one range of rows
            start = rows[tile.pair].start if tile.pair in rows else tile.start
            rows[tile.pair] = slice(start, tile.stop)
        blocks = engine_blocks(problem, list(rows), manifest["engine"], rows=rows)
        for tile in faults:
            first = rows[tile.pair].start
            _write_tile(manifest, tile, blocks[tile.pair][tile.start - first : tile.stop - first], folder)
    return [folder / f"{tile.id}.npy" for tile in jobs[job]]


def tile_fault(manifest: Mapping[str, Any], tile: Tile, folder: str | Path) -> str | None:
    """Return None for a complete, valid tile, else what is wrong: "missing", "damaged", "of another Hessian"."""
    data, record = Path(folder) / f"{tile.id}.npy", Path(folder) / f"{tile.id}.json"
    if not data.exists() or not record.exists():
        return "missing"
    try:
        found = json.loads(record.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError):
        return "damaged (its record cannot be read)"
    if found.get("key") != manifest["key"]:
        return "of another Hessian"
    return None if found.get("sha256") == _sha256(data) else "damaged (its SHA-256 differs from its record)"


def missing_tiles(manifest: Mapping[str, Any], folder: str | Path) -> list[Tile]:
    """Return the tiles that are not there or not valid, in order."""
    return [tile for tile in tiles_of(manifest).values() if tile_fault(manifest, tile, folder) is not None]


def gather(
    manifest: Mapping[str, Any],
    folder: str | Path,
    path: str | Path,
    certify: Callable[[Hessian, float], Certificate] | None = None,
) -> None:
    """Write all tiles as one Hessian file (npz, as `Hessian.save`), a stripe of rows at a time.

    The lower triangle is the transpose of the upper one; diagonal blocks are averaged with their transposes: the
    matrix is exactly symmetric. Memory: one tile's rows across the matrix, twice; tiles are memory-mapped.

    Args:
        manifest: The plan.
        folder: Where the tiles lie.
        path: The npz to write, atomically.
        certify: Called with the gathered, memory-mapped Hessian and the asymmetry before averaging, before the file
            gets its name; the certificate it returns is stored in the file. It may raise, and then there is no file.

    Raises:
        TileError: If tiles are missing or damaged; names the first ones.
    """
    faults = {
        t.id: fault for t in tiles_of(manifest).values() if (fault := tile_fault(manifest, t, folder)) is not None
    }
    if faults:
        some = ", ".join(f"{name} ({fault})" for name, fault in list(faults.items())[:5])
        raise TileError(f"{len(faults)} of {len(manifest['tiles'])} tiles cannot be used: {some}. Compute them again.")
    hessian = _empty_hessian(manifest)
    with atomic_path(path) as temporary:
        asymmetry = _write_archive(temporary, hessian, manifest, Path(folder))
        if certify is not None:
            certificate = certify(Hessian.load(temporary, mmap=True), asymmetry)
            with zipfile.ZipFile(temporary, "a") as archive:
                for name, value in certificate.to_arrays().items():
                    _write_array(archive, name, value)


def _problem(manifest: Mapping[str, Any], model: nn.Module, images: Tensor, targets: Tensor) -> BatchLoss:
    dtype = getattr(torch, manifest["dtype"])
    loss: str | Criterion = manifest["loss_name"]
    problem = batch_loss(model, images, targets, loss=loss, dtype=dtype)
    if _hash_problem(problem) != manifest["problem_sha256"]:
        raise TileError("The manifest is of another model or batch: the hash of weights, images and targets differs.")
    return problem


def _hash_problem(problem: BatchLoss) -> str:
    digest = hashlib.sha256(f"{problem.loss} {problem.architecture}".encode())
    for t in (*problem.parameters.values(), problem.images, problem.targets):
        digest.update(t.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _write_tile(manifest: Mapping[str, Any], tile: Tile, entries: Tensor, folder: Path) -> None:
    data = folder / f"{tile.id}.npy"
    with atomic_path(data) as temporary:
        with temporary.open("wb") as file:
            np.save(file, np.ascontiguousarray(entries.cpu().numpy()), allow_pickle=False)
        digest = _sha256(temporary)
    with atomic_path(folder / f"{tile.id}.json") as temporary:
        temporary.write_text(json.dumps({"key": manifest["key"], "sha256": digest, "tile": asdict(tile)}) + "\n")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _empty_hessian(manifest: Mapping[str, Any]) -> Hessian:
    shapes = [tuple(shape) for shape in manifest["shapes"]]
    return Hessian(
        names=tuple(manifest["names"]),
        shapes=tuple((shape[0] if shape else 1, prod(shape[1:])) for shape in shapes),
        loss=manifest["loss"],
        grad_norm=manifest["grad_norm"],
        batch_sha256=manifest["batch_sha256"],
        engine=manifest["engine"],
        loss_name=manifest["loss_name"],
    )


def _write_archive(path: Path, hessian: Hessian, manifest: Mapping[str, Any], folder: Path) -> float:
    """Write everything but the certificate; return the diagonal blocks' asymmetry over the largest entry."""
    P = hessian.n_parameters
    apart = largest = 0.0
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, value in hessian.metadata().items():
            _write_array(archive, name, value)
        with archive.open("H.npy", "w", force_zip64=True) as member:
            descr = np.lib.format.dtype_to_descr(np.dtype(manifest["dtype"]))
            header = {"descr": descr, "fortran_order": False, "shape": (P, P)}
            np.lib.format.write_array_header_1_0(member, header)
            for stripe, difference in _stripes(hessian, manifest, folder):
                member.write(stripe.data)
                apart, largest = max(apart, difference), max(largest, float(np.abs(stripe).max()))
    return apart / largest if largest else apart


def _write_array(archive: zipfile.ZipFile, name: str, value: np.ndarray) -> None:
    buffer = io.BytesIO()
    np.save(buffer, value, allow_pickle=False)
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        member.write(buffer.getvalue())


def _stripes(hessian: Hessian, manifest: Mapping[str, Any], folder: Path) -> Iterator[tuple[np.ndarray, float]]:
    """Yield the matrix's rows from top to bottom, as many at a time as the shortest tile of a block row has.

    With each stripe comes the largest difference between its diagonal block and that block's transpose.
    """
    by_pair: dict[Pair, list[Tile]] = {}
    for tile in tiles_of(manifest).values():
        by_pair.setdefault(tile.pair, []).append(tile)
    where = block_slices(hessian.sizes)
    for row in hessian.names:
        step = min(t.stop - t.start for pair in by_pair for t in by_pair[pair][:1] if row == pair[0])
        for start in range(0, hessian.sizes[row], step):
            stop = min(start + step, hessian.sizes[row])
            stripe = np.empty((stop - start, hessian.n_parameters), dtype=manifest["dtype"])
            difference = 0.0
            for column in hessian.names:
                part = stripe[:, where[column]]
                if row == column:
                    upper, lower = (_cut(by_pair[row, row], folder, start, stop, side) for side in ("rows", "columns"))
                    part[:] = (upper + lower) / 2
                    difference = float(np.abs(upper - lower).max())
                elif (row, column) in by_pair:
                    part[:] = _cut(by_pair[row, column], folder, start, stop, "rows")
                else:
                    part[:] = _cut(by_pair[column, row], folder, start, stop, "columns")
            yield stripe, difference


def _cut(tiles: list[Tile], folder: Path, start: int, stop: int, side: str) -> np.ndarray:
    """Return rows start … stop − 1 of a block cut into tiles; with side "columns", of its transpose."""
    parts = []
    for tile in tiles:
        entries = np.load(folder / f"{tile.id}.npy", mmap_mode="r")
        if side == "columns":
            parts.append(entries[:, start:stop].T)
        elif tile.start < stop and start < tile.stop:
            parts.append(entries[max(start - tile.start, 0) : stop - tile.start])
    return np.concatenate(parts, axis=1 if side == "columns" else 0)
