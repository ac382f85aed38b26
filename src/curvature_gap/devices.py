"""Device, precision flags and threads: the one place that sets torch's global switches."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.utils.deterministic

CUBLAS_WORKSPACE = ":4096:8"


def resolve_device(name: str) -> torch.device:
    """Return the device that `auto`, `cpu` or `cuda` stands for on this machine.

    `auto` is CUDA where there is a device and the CPU elsewhere. Record the result, never `auto`.

    Raises:
        ValueError: If the name is none of the three.
        RuntimeError: If `cuda` is asked for and there is none; never falls back in silence.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {name!r}.")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise RuntimeError(
            f"device is cuda, but torch {torch.__version__} sees no CUDA device (CUDA_VISIBLE_DEVICES={visible!r}). "
            "Set device: cpu or auto, or run where there is a GPU."
        )
    return torch.device("cuda" if name == "cuda" or (name == "auto" and available) else "cpu")


def set_precision() -> dict[str, object]:
    """Switch off every reduced precision and non-deterministic kernel; return the flags as they now stand.

    TF32 is off for matrix products and for convolutions, bf16 and fp16 reductions are off, algorithms are
    deterministic, cuBLAS has the fixed workspace that determinism asks for. Call it before the first CUDA operation.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory with NaN finds uninitialised reads and costs a tenth of the training time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return precision_flags()


def precision_flags() -> dict[str, object]:
    """Return the precision switches as they stand, for provenance."""
    return {
        "cuda_matmul_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cuda_matmul_bf16_reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "cuda_matmul_fp16_reduction": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "autocast": torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
    }


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Use `n` intra-operation threads inside the block. Sums may differ in the last bit between thread counts.

    Raises:
        ValueError: If `n` is below one.
    """
    if n < 1:
        raise ValueError(f"threads must be at least 1, got {n}.")
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
