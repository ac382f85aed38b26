import hashlib
import json
import logging
import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch import nn

from curvature_gap.architecture import Architecture
from curvature_gap.batch_loss import batch_loss
from curvature_gap.certificate import CertificateError, certify
from curvature_gap.exact_hessian import exact_hessian
from curvature_gap.hessian import Hessian
from curvature_gap.tile_plan import plan
from curvature_gap.tiles import (
    TileError,
    compute_job,
    gather,
    jobs_of,
    missing_tiles,
    read_manifest,
    tiles_of,
    write_manifest,
)
from curvature_gap.vit import ViT

SMALL = Architecture(image_size=6, channels=1, patch=3, classes=2, d_V=3, d_ff=5)
SIZES = {"embed": 27, "W_Q": 9, "W_K": 9, "W_V": 9, "W_O": 9, "LN1_gamma": 3, "LN1_beta": 3, "W_1": 15, "W_2": 15}
SIZES |= {"LN2_gamma": 3, "LN2_beta": 3, "classifier": 6}
TILE_BYTES = 13 * 15 * 8  # divides no block evenly
JOB_BYTES = 5_000


@pytest.fixture
def batch(randn, generator):
    return randn(4, 1, 6, 6), torch.randint(2, (4,), generator=generator)


def manifest_of(model, batch, path):
    return write_manifest(path, model, *batch, tile_bytes=TILE_BYTES, job_bytes=JOB_BYTES)


def run(model, batch, folder):
    manifest = manifest_of(model, batch, folder / "manifest.json")
    for job in jobs_of(manifest):
        compute_job(manifest, job, model, *batch, folder / "tiles")
    return manifest


def hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("tile_bytes", [27 * 8, TILE_BYTES, 10**9])
@pytest.mark.parametrize("job_bytes", [1, 3_000, 10**9])
def test_tiles_cover_the_upper_triangle_once(tile_bytes, job_bytes):
    covered = Counter()
    jobs = Counter()
    tiles = plan(SMALL, tile_bytes=tile_bytes, job_bytes=job_bytes)
    for tile in tiles:
        assert 0 < tile.bytes <= tile_bytes
        jobs[tile.job] += tile.bytes
        covered.update((tile.row, tile.column, i) for i in range(tile.start, tile.stop))
    names = list(SIZES)
    assert set(covered.values()) == {1}
    assert set(covered) == {(r, c, i) for k, r in enumerate(names) for c in names[k:] for i in range(SIZES[r])}
    assert [tile.job for tile in tiles] == sorted(tile.job for tile in tiles)
    assert list(jobs) == list(range(len(jobs)))
    assert all(size <= max(job_bytes, tile_bytes) for size in jobs.values())


def test_tiles_do_not_split_a_weights_row_when_they_can_hold_one():
    cuts = [tile for tile in plan(SMALL, tile_bytes=TILE_BYTES) if tile.row == "W_1"]
    assert any(tile.start for tile in cuts)
    assert all(tile.start % 5 == 0 for tile in cuts)


def test_a_row_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"One row of \(embed, embed\) takes 216 bytes, more than tile_bytes = 100"):
        plan(SMALL, tile_bytes=100)


def foreign():
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 3), nn.Tanh(), nn.Linear(3, 2))


@pytest.mark.parametrize("engine", ["closed_form", "autodiff"])
def test_gathered_tiles_are_the_untiled_matrix(engine, batch, tmp_path):
    model = ViT(SMALL, seed=1) if engine == "closed_form" else foreign()
    manifest = run(model, batch, tmp_path)
    assert manifest["engine"] == engine
    assert any(tile["start"] for tile in manifest["tiles"])
    gather(manifest, tmp_path / "tiles", tmp_path / "h.npz")
    tiled, whole = Hessian.load(tmp_path / "h.npz"), exact_hessian(model, *batch)
    scale = float(whole.matrix().abs().max())
    torch.testing.assert_close(tiled.matrix(), whole.matrix(), rtol=0, atol=1e-13 * scale)
    assert torch.equal(tiled.matrix(), tiled.matrix().T)
    assert (tiled.names, tiled.shapes, tiled.offsets) == (whole.names, whole.shapes, whole.offsets)
    assert tiled.loss == whole.loss
    assert tiled.grad_norm == pytest.approx(whole.grad_norm, rel=1e-14)
    assert tiled.batch_sha256 == whole.batch_sha256


def test_interrupted_or_not_the_bits_are_the_same(batch, tmp_path):
    model = ViT(SMALL, seed=1)
    manifest = run(model, batch, tmp_path / "once")
    again = manifest_of(model, batch, tmp_path / "twice" / "manifest.json")
    assert again == manifest == read_manifest(tmp_path / "once" / "manifest.json")
    tiles = tmp_path / "twice" / "tiles"
    jobs = jobs_of(again)
    assert len(jobs) > 2
    compute_job(again, 1, model, *batch, tiles)
    for tile in jobs[1][::2]:  # interrupted between two tiles of a job
        (tiles / f"{tile.id}.json").unlink()
    (tiles / ".half-written.npy").write_bytes(b"x")  # what a killed writer leaves
    missing = missing_tiles(again, tiles)
    assert len(missing) == len(again["tiles"]) - len(jobs[1][1::2])
    for job in sorted({tile.job for tile in missing}, reverse=True):  # in another order
        compute_job(again, job, model, *batch, tiles)
    (tiles / ".half-written.npy").unlink()
    assert hashes(tiles) == hashes(tmp_path / "once" / "tiles")
    for folder in ("once", "twice"):
        gather(manifest, tmp_path / folder / "tiles", tmp_path / folder / "h.npz")
    assert (tmp_path / "once" / "h.npz").read_bytes() == (tmp_path / "twice" / "h.npz").read_bytes()


def test_a_valid_tile_is_kept_and_a_damaged_one_is_named_and_replaced(batch, tmp_path, caplog):
    model = ViT(SMALL, seed=1)
    manifest = run(model, batch, tmp_path)
    kept, damaged, truncated, lost = list(tiles_of(manifest))[:4]
    tiles = tmp_path / "tiles"
    before = hashes(tiles)
    time = (tiles / f"{kept}.npy").stat().st_mtime_ns
    data = bytearray((tiles / f"{damaged}.npy").read_bytes())
    data[-3] ^= 1
    (tiles / f"{damaged}.npy").write_bytes(bytes(data))
    (tiles / f"{truncated}.json").write_text('{"key": "')
    (tiles / f"{lost}.npy").unlink()
    assert [tile.id for tile in missing_tiles(manifest, tiles)] == [damaged, truncated, lost]
    with pytest.raises(TileError, match=rf"3 of \d+ tiles cannot be used: {damaged} \(damaged .* {lost} \(missing\)"):
        gather(manifest, tiles, tmp_path / "h.npz")
    assert not (tmp_path / "h.npz").exists()
    with caplog.at_level(logging.WARNING):
        run(model, batch, tmp_path)
    assert [record.getMessage() for record in caplog.records] == [
        f"Tile {tiles / damaged}.npy is damaged (its SHA-256 differs from its record); computing it again.",
        f"Tile {tiles / truncated}.npy is damaged (its record cannot be read); computing it again.",
    ]
    assert hashes(tiles) == before
    assert (tiles / f"{kept}.npy").stat().st_mtime_ns == time


def test_tiles_of_another_model_are_not_mixed_in(batch, tmp_path):
    first, second = ViT(SMALL, seed=1), ViT(SMALL, seed=2)
    run(first, batch, tmp_path)
    other = manifest_of(second, batch, tmp_path / "other.json")
    assert len(missing_tiles(other, tmp_path / "tiles")) == len(other["tiles"])
    with pytest.raises(TileError, match="another model or batch"):
        compute_job(other, 0, first, *batch, tmp_path / "tiles")
    with pytest.raises(KeyError, match=r"has jobs 0 … \d+, not 99"):
        compute_job(other, 99, second, *batch, tmp_path / "tiles")


def test_an_edited_manifest_is_refused(batch, tmp_path):
    path = tmp_path / "manifest.json"
    manifest = write_manifest(path, ViT(SMALL), *batch)
    path.write_text(json.dumps(manifest | {"loss": 0.0}))
    with pytest.raises(TileError, match=r"manifest.json does not match its own key"):
        read_manifest(path)
    path.write_text("{")
    with pytest.raises(TileError, match=r"manifest.json is no manifest"):
        read_manifest(path)


def test_the_gathered_matrix_is_certified_and_mapped(batch, tmp_path):
    model = ViT(SMALL, seed=1)
    manifest = run(model, batch, tmp_path)
    problem = batch_loss(model, *batch)

    def check(hessian, asymmetry):
        assert 0 < asymmetry < 1e-14
        certificate = certify(hessian.held(), problem, engine=hessian.engine, asymmetry=asymmetry)
        certificate.check()
        return certificate

    gather(manifest, tmp_path / "tiles", tmp_path / "h.npz", certify=check)
    assert 0 < Hessian.load(tmp_path / "h.npz", mmap=True).certificate.hvp_error < 1e-12

    def refuse(hessian, asymmetry):
        raise CertificateError("no")

    with pytest.raises(CertificateError):
        gather(manifest, tmp_path / "tiles", tmp_path / "refused.npz", certify=refuse)
    assert not list(tmp_path.glob("*refused*"))


LARGEST_JOB = """
import resource, sys, torch
from curvature_gap.architecture import Architecture
from curvature_gap.tiles import compute_job, jobs_of, write_manifest
from curvature_gap.vit import ViT

torch.set_num_threads(1)
model = ViT(Architecture(image_size=28, channels=1, patch=4, classes=10, d_V=32, d_ff=128))
images = torch.randn(64, 1, 28, 28, generator=torch.Generator().manual_seed(0))
labels = torch.arange(64) % 10
manifest = write_manifest(sys.argv[1] + "/manifest.json", model, images, labels)
jobs = jobs_of(manifest)
largest = max(jobs, key=lambda job: sum(tile.bytes for tile in jobs[job]))
print(len(compute_job(manifest, largest, model, images, labels, sys.argv[1])))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


@pytest.mark.slow
def test_the_largest_job_at_width_32_stays_within_4_gib(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LARGEST_JOB, str(tmp_path)], capture_output=True, text=True, check=True
    )
    tiles, gib = done.stdout.split()
    assert int(tiles) > 3
    assert float(gib) < 4


def test_the_default_plan_at_width_32():
    architecture = Architecture(image_size=28, channels=1, patch=4, classes=10, d_V=32, d_ff=128)
    tiles = plan(architecture)
    jobs = Counter()
    for tile in tiles:
        jobs[tile.job] += tile.bytes
    assert sum(jobs.values()) > architecture.n_parameters**2 * 4
    assert max(tile.bytes for tile in tiles) <= 2**27
    assert max(jobs.values()) <= 2**29
    assert len(jobs) == 2


def test_planning_needs_no_torch():
    code = "import sys, curvature_gap.tile_plan; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
