"""How a Hessian is cut into tiles and jobs: from sizes alone, so that a workflow can plan without importing torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import prod

from curvature_gap.architecture import Architecture, parameter_shapes

TILE_BYTES = 2**27
JOB_BYTES = 2**29


@dataclass(frozen=True)
class Tile:
    """Rows `start` … `stop` − 1 of the block (row, column), counted within the block; computed in job `job`."""

    id: str
    row: str
    column: str
    start: int
    stop: int
    bytes: int
    job: int

    @property
    def pair(self) -> tuple[str, str]:
        return self.row, self.column


def plan(
    shapes: Architecture | Mapping[str, tuple[int, ...]],
    *,
    tile_bytes: int = TILE_BYTES,
    job_bytes: int = JOB_BYTES,
    itemsize: int = 8,
) -> list[Tile]:
    """Cut the upper block triangle into tiles, and gather neighbouring tiles into jobs.

    A tile is one file. A job computes its tiles in one pass over the batch: what is done per token, whatever the
    output, is then done once per job. A tile holds whole rows of its weight where one fits. A job of n bytes needs
    about 2 n of memory and the engine's work space.

    Args:
        shapes: An architecture, or the parameters' shapes in order.
        tile_bytes: Of one tile's file at most.
        job_bytes: Of one job's tiles at most; a job has one tile at least.
        itemsize: 8 for float64, 4 for float32.

    Raises:
        ValueError: If a single row of some block is larger than `tile_bytes`.
    """
    shapes = parameter_shapes(shapes) if isinstance(shapes, Architecture) else shapes
    tiles: list[Tile] = []
    job = filled = 0
    for row, column in combinations_with_replacement(shapes, 2):
        n_rows, row_bytes = prod(shapes[row]), prod(shapes[column]) * itemsize
        step = _rows_per_tile(row, column, tile_bytes // row_bytes, prod(shapes[row][1:]), row_bytes, tile_bytes)
        for start in range(0, n_rows, step):
            stop = min(start + step, n_rows)
            size = (stop - start) * row_bytes
            if filled and filled + size > job_bytes:
                job, filled = job + 1, 0
            filled += size
            tiles.append(Tile(f"{row}--{column}--{start:06d}-{stop:06d}", row, column, start, stop, size, job))
    return tiles


def _rows_per_tile(row: str, column: str, fit: int, width: int, row_bytes: int, tile_bytes: int) -> int:
    if fit < 1:
        raise ValueError(
            f"One row of ({row}, {column}) takes {row_bytes:,} bytes, more than tile_bytes = {tile_bytes:,}."
        )
    return fit - fit % width if fit >= width else fit
