"""A Hessian as a result: its blocks by name, what can be read off it, and its file."""

import importlib.util
import math
import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvature_gap.autodiff_hessian import Pair, block_slices, upper_pairs
from curvature_gap.certificate import Certificate
from curvature_gap.files import atomic_path
from curvature_gap.norms import frobenius_norm, spectral_norm
from curvature_gap.shapes import Float

FILE_KEYS = ("names", "offsets", "shapes", "loss", "grad_norm", "batch_sha256", "engine", "loss_name")


@dataclass
class Hessian:
    """The exact Hessian of a mean loss on one batch, or some of its blocks.

    Rows and columns are the parameters, row-major within a block, in the units of the loss per parameter². Blocks are
    read by name in either order, `H["W_Q", "W_K"]`; the lower triangle is the transpose of the upper one.

    Attributes:
        names: Parameter blocks, in the order of the rows.
        shapes: One (rows, columns) per block; a vector is (d, 1), a tensor of higher rank (first, product of the rest).
        loss: The mean loss.
        grad_norm: Euclidean norm of the gradient.
        batch_sha256: Of the batch it was computed on.
        engine: "closed_form" or "autodiff".
        loss_name: "cross_entropy", "mse" or the callable's name.
        H: The whole symmetric matrix, or None if only some blocks were computed.
        blocks: Without a whole matrix, the blocks computed, (row, column) in upper order.
        certificate: The checks it passed, or None if none were made.
        operator: v ↦ H v on the same loss, where the model is at hand; never stored.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    loss: float
    grad_norm: float
    batch_sha256: str
    engine: str
    loss_name: str = "cross_entropy"
    H: Tensor | None = None
    blocks: dict[Pair, Tensor] = field(default_factory=dict)
    certificate: Certificate | None = None
    operator: Callable[[Tensor], Tensor] | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Number of parameters of each block."""
        return {name: math.prod(shape) for name, shape in zip(self.names, self.shapes, strict=True)}

    @property
    def n_parameters(self) -> int:
        return sum(self.sizes.values())

    @property
    def offsets(self) -> list[int]:
        """First row of each block, and P at the end."""
        return [s.start for s in self._where.values()] + [self.n_parameters]

    @property
    def dtype(self) -> torch.dtype:
        return self._any.dtype

    @property
    def device(self) -> torch.device:
        return self._any.device

    @property
    def _any(self) -> Tensor:
        return self.H if self.H is not None else next(iter(self.blocks.values()), torch.empty(0, dtype=torch.float64))

    @cached_property
    def _where(self) -> dict[str, slice]:
        return block_slices(self.sizes)

    def holds(self, row: str, column: str) -> bool:
        """Return whether the block of this pair was computed."""
        known = row in self.names and column in self.names
        return known and (self.H is not None or (row, column) in self.blocks or (column, row) in self.blocks)

    def __getitem__(self, pair: Pair) -> Float[Tensor, "_rows _columns"]:
        row, column = pair
        for name in pair:
            if name not in self.names:
                raise KeyError(f"No block is called {name!r}; there are {', '.join(self.names)}.")
        if self.H is not None:
            return self.H[self._where[row], self._where[column]]
        if (row, column) in self.blocks:
            return self.blocks[row, column]
        if (column, row) in self.blocks:
            return self.blocks[column, row].T
        raise KeyError(f"The block ({row}, {column}) was not computed; ask exact_hessian for it with blocks=[...].")

    def held(self) -> dict[Pair, Tensor]:
        """Return the blocks of the upper triangle that were computed, as views."""
        if self.H is None:
            return dict(self.blocks)
        return {(row, column): self[row, column] for row, column in upper_pairs(self.names)}

    def matrix(self) -> Float[Tensor, "P P"]:
        """Return the whole matrix. Raises ValueError if only some blocks were computed."""
        if self.H is None:
            raise ValueError(
                f"Only {len(self.blocks)} blocks were computed, not the whole matrix; "
                "call exact_hessian with blocks=None."
            )
        return self.H

    def to_numpy(self) -> np.ndarray:
        """Return the whole matrix as a numpy array (P, P); shares memory with it on the CPU."""
        return self.matrix().cpu().numpy()

    def spectral_norms(self) -> dict[Pair, float]:
        """Return the largest singular value of each block of the upper triangle that was computed."""
        return {pair: spectral_norm(block) for pair, block in self.held().items()}

    def frobenius_norms(self) -> dict[Pair, float]:
        """Return the Frobenius norm of each block of the upper triangle that was computed."""
        return {pair: frobenius_norm(block) for pair, block in self.held().items()}

    def trace(self) -> float:
        """Return the trace, exact. Raises KeyError if a diagonal block was not computed."""
        return float(sum(self[name, name].diagonal().double().sum() for name in self.names))

    def eigenvalues(self, k: int | None = None) -> Float[Tensor, " k"]:
        """Return eigenvalues in ascending order: all of them, or the k of largest magnitude.

        All need the whole matrix and take about (P / 3,500)³ · 4 s on one core. With k, Lanczos (scipy's) works on the
        matrix, or on Hessian–vector products where only blocks were computed.

        Raises:
            ValueError: If k is not in 1 … P, or there is neither a matrix nor a model to multiply with.
        """
        if k is None:
            return self._spectrum
        if not 1 <= k <= self.n_parameters:
            raise ValueError(f"k must lie in 1 … {self.n_parameters}, got {k}.")
        lanczos_pays = k < self.n_parameters // 10 and importlib.util.find_spec("scipy") is not None
        if "_spectrum" in self.__dict__ or (self.H is not None and not lanczos_pays):
            largest = self._spectrum.abs().argsort(descending=True)[:k]
            return self._spectrum[largest].sort().values
        from curvature_gap.lanczos import extreme_eigenvalues

        return torch.from_numpy(extreme_eigenvalues(self._product(), self.n_parameters, k).values)

    @cached_property
    def _spectrum(self) -> Tensor:
        return torch.linalg.eigvalsh(self.matrix())

    def _product(self) -> Callable[[Tensor], Tensor]:
        H = self.H
        if H is not None:
            return lambda v: H @ v.to(H)
        if self.operator is None:
            raise ValueError("Only some blocks were computed and no model is attached (it is not stored in files).")
        return self.operator

    def spectral_density(
        self, points: int = 512, width: float | None = None, probes: int = 8, steps: int = 80, seed: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (eigenvalue grid, density), the eigenvalue distribution smoothed by a Gaussian; it integrates to 1.

        Exact from all eigenvalues where the matrix exists. Otherwise stochastic Lanczos quadrature on Hessian–vector
        products: `probes` random vectors, `steps` products each.

        Args:
            points: Size of the grid.
            width: Standard deviation of the Gaussian, in units of the eigenvalues; None is 1/100 of their range.
            probes: Random vectors, without a matrix.
            steps: Lanczos steps per vector, without a matrix.
            seed: Of the random vectors.
        """
        from curvature_gap.lanczos import lanczos_quadrature, smoothed_density

        if self.H is not None:
            nodes = self._spectrum.cpu().double().numpy()
            weights = np.full(len(nodes), 1 / len(nodes))
        else:
            generator = torch.Generator().manual_seed(seed)
            nodes, weights = lanczos_quadrature(self._product(), self.n_parameters, probes, steps, generator)
        return smoothed_density(nodes, weights, points, width)

    def plot(self, ax: Any = None, floor: float = 1e-6) -> Any:
        """Draw log10 |entry| with dashed lines between blocks; needs matplotlib. Returns the axes."""
        import matplotlib.pyplot as plt

        ax = plt.subplots()[1] if ax is None else ax
        picture = np.log10(np.maximum(np.abs(self.to_numpy()), floor))
        image = ax.imshow(picture, cmap="viridis", rasterized=True)
        for edge in self.offsets[1:-1]:
            ax.axhline(edge - 0.5, color="white", linestyle="--", linewidth=0.5)
            ax.axvline(edge - 0.5, color="white", linestyle="--", linewidth=0.5)
        middles = [(a + b) / 2 for a, b in zip(self.offsets, self.offsets[1:], strict=False)]
        ax.set_xticks(middles, self.names, rotation=90)
        ax.set_yticks(middles, self.names)
        ax.figure.colorbar(image, ax=ax, label="log10 |entry|")
        return ax

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an npz file, atomically: `H` or, where only some blocks exist, one `block:row:column` each.

        Beside it: names, offsets (int64, n + 1), shapes (int64, n × 2), loss, grad_norm, batch_sha256, engine,
        loss_name and the certificate's fields. No pickles.
        """
        arrays = self.metadata()
        if self.H is not None:
            arrays["H"] = self.to_numpy()
        else:
            arrays |= {f"block:{row}:{column}": b.cpu().numpy() for (row, column), b in self.blocks.items()}
        with atomic_path(Path(path)) as temporary, temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)

    def metadata(self) -> dict[str, np.ndarray]:
        """Return everything but the entries, as arrays."""
        arrays = {
            "names": np.array(self.names),
            "offsets": np.array(self.offsets, dtype=np.int64),
            "shapes": np.array(self.shapes, dtype=np.int64).reshape(-1, 2),
            "loss": np.array(self.loss),
            "grad_norm": np.array(self.grad_norm),
            "batch_sha256": np.array(self.batch_sha256),
            "engine": np.array(self.engine),
            "loss_name": np.array(self.loss_name),
        }
        return arrays | (self.certificate.to_arrays() if self.certificate is not None else {})

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, mmap: bool = False) -> "Hessian":
        """Read a file written by `save`.

        Args:
            path: The npz file.
            mmap: Map the matrix instead of reading it; the result must then not be changed.

        Raises:
            ValueError: If the file is damaged or is not a Hessian; the message names it.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                missing = [key for key in FILE_KEYS if key not in file]
                if missing:
                    raise ValueError(f"{path} lacks {', '.join(missing)}; it is not a Hessian of this package.")
                arrays = {key: file[key] for key in file.files if not (mmap and key == "H")}
                has_matrix = "H" in file.files
        except (zipfile.BadZipFile, EOFError, OSError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise ValueError(f"{path} is damaged ({error}); remove it and compute it again.") from error
        if has_matrix and mmap:
            arrays["H"] = _map_member(Path(path), "H.npy")
        return cls._from_arrays(arrays, path)

    @classmethod
    def _from_arrays(cls, arrays: Mapping[str, np.ndarray], path: str | os.PathLike[str]) -> "Hessian":
        blocks = {
            (key.split(":")[1], key.split(":")[2]): torch.from_numpy(value)
            for key, value in arrays.items()
            if key.startswith("block:")
        }
        hessian = cls(
            names=tuple(str(name) for name in arrays["names"]),
            shapes=tuple((int(m), int(n)) for m, n in arrays["shapes"]),
            loss=float(arrays["loss"]),
            grad_norm=float(arrays["grad_norm"]),
            batch_sha256=str(arrays["batch_sha256"]),
            engine=str(arrays["engine"]),
            loss_name=str(arrays["loss_name"]),
            H=torch.from_numpy(arrays["H"]) if "H" in arrays else None,
            blocks=blocks,
            certificate=Certificate.from_arrays(arrays),
        )
        P = hessian.n_parameters
        if hessian.offsets != arrays["offsets"].tolist() or (hessian.H is not None and hessian.H.shape != (P, P)):
            raise ValueError(f"{path} is inconsistent: names, shapes, offsets and H do not agree on {P} parameters.")
        return hessian


def _map_member(path: Path, name: str) -> np.ndarray:
    """Map an uncompressed npy member of a zip file, copy on write: no entry is read before it is used."""
    with zipfile.ZipFile(path) as archive, archive.open(name) as member:
        version = np.lib.format.read_magic(member)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read_header(member)
        header = member.tell()
        info = archive.getinfo(name)
    with path.open("rb") as file:
        # The local header's name and extra field lie between the record and the data.
        file.seek(info.header_offset + 26)
        lengths = np.frombuffer(file.read(4), dtype="<u2")
        start = info.header_offset + 30 + int(lengths.sum()) + header
    return np.memmap(path, dtype=dtype, mode="c", offset=start, shape=shape, order="F" if fortran else "C")
