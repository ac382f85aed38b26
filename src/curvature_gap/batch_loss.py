"""The loss of a model on one batch, as a function of its named parameters, and the checks of what a user hands in."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from curvature_gap.architecture import Architecture
from curvature_gap.maps import cross_entropy, mse
from curvature_gap.vit import ViT, vit_logits

Criterion = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, Criterion] = {"cross_entropy": cross_entropy, "mse": mse}


@dataclass(frozen=True)
class BatchLoss:
    """θ ↦ criterion(forward(θ, images), targets), the mean loss of one batch.

    `parameters` are the trainable ones, detached, in the order of the Hessian's rows; `architecture` is None unless
    the model is this package's ViT. Call it with a mapping of the same names to get the loss as a scalar tensor.
    """

    parameters: dict[str, Tensor]
    images: Tensor
    targets: Tensor
    forward: Callable[[Mapping[str, Tensor], Tensor], Tensor]
    criterion: Criterion
    loss: str
    architecture: Architecture | None = None

    def __call__(self, parameters: Mapping[str, Tensor]) -> Tensor:
        return self.criterion(self.forward(parameters, self.images), self.targets)

    def samples(self, start: int, stop: int) -> "BatchLoss":
        """Return the mean loss of samples start … stop − 1."""
        return replace(self, images=self.images[start:stop], targets=self.targets[start:stop])

    def value_and_gradient(self, parameters: Mapping[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and its gradient, by default at the model's own parameters."""
        leaves = as_leaves(self.parameters if parameters is None else parameters)
        value = self(leaves)
        gradient = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return value.detach(), dict(zip(leaves, gradient, strict=True))

    @property
    def n_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters.values())


def as_leaves(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters as fresh leaves of a graph."""
    return {name: p.detach().requires_grad_() for name, p in parameters.items()}


def flatten(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return named tensors as one vector, row-major, in the order of the mapping."""
    return torch.cat([t.reshape(-1) for t in tensors.values()])


def unflatten(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the named parts of a vector, as views. Inverse of `flatten`."""
    parts = vector.split([p.numel() for p in like.values()])
    return {name: part.reshape(p.shape) for (name, p), part in zip(like.items(), parts, strict=True)}


def batch_loss(
    model: nn.Module,
    images: Tensor,
    targets: Tensor,
    *,
    loss: str | Criterion = "cross_entropy",
    dtype: torch.dtype = torch.float64,
) -> BatchLoss:
    """Return the loss of `model` on a batch, after every check that can be made before any derivative is taken.

    Args:
        model: A `ViT` of this package or any module. Parameters with `requires_grad=False` are held fixed. The model
            is copied, never changed.
        images: (b, ...), floating point; moved to the device of the model.
        targets: Class labels (b,) for "cross_entropy"; float, shaped as the output, for "mse"; for a callable, whatever
            it takes.
        loss: "cross_entropy" (mean over the batch), "mse" (mean over batch and classes) or a callable
            (output, targets) → scalar, a mean over samples.
        dtype: float64 or float32; parameters, buffers and images are converted.

    Raises:
        TypeError: Integer images, labels of the wrong type, a model in half precision or a dtype that is neither
            float32 nor float64.
        ValueError: An empty batch, lengths that differ, NaN or infinite images, labels out of range, nothing to
            differentiate, active dropout, a random loss, or a loss or gradient that is not finite (the message says
            where).
    """
    _check_dtypes(model, dtype)
    _check_dropout(model)
    _check_batch(images, targets)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ValueError("No parameter of the model has requires_grad=True; there is nothing to differentiate.")
    device = next(iter(trainable.values())).device
    problem = BatchLoss(
        parameters={name: p.detach().to(dtype).clone() for name, p in trainable.items()},
        images=images.detach().to(device=device, dtype=dtype),
        targets=(targets.to(dtype) if targets.is_floating_point() else targets).to(device),
        forward=_forward(model, dtype),
        criterion=LOSSES[loss] if isinstance(loss, str) and loss in LOSSES else _custom(loss),
        loss=loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__),
        architecture=model.architecture if isinstance(model, ViT) else None,
    )
    with torch.no_grad():
        output = problem.forward(problem.parameters, problem.images)
    _check_targets(problem, output)
    _check_finite(problem, output)
    return problem


def _forward(model: nn.Module, dtype: torch.dtype) -> Callable[[Mapping[str, Tensor], Tensor], Tensor]:
    if isinstance(model, ViT):
        fixed = {name: p.detach().to(dtype) for name, p in model.named_parameters() if not p.requires_grad}
        architecture = model.architecture
        return lambda parameters, images: vit_logits({**fixed, **parameters}, images, architecture)
    # A copy: the conversion must not touch the user's model, nor a buffer updated in the forward pass.
    module = copy.deepcopy(model).to(dtype)
    return lambda parameters, images: torch.func.functional_call(module, dict(parameters), (images,))


def _custom(loss: str | Criterion) -> Criterion:
    if callable(loss):
        return loss
    raise ValueError(f"loss must be one of {', '.join(LOSSES)} or a callable, got {loss!r}.")


def _check_dtypes(model: nn.Module, dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"dtype must be torch.float64 or torch.float32, got {dtype}.")
    for name, p in model.named_parameters():
        if p.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"Parameter {name} is {p.dtype}; second derivatives need float32 or float64. Convert: model.double()."
            )


def _check_dropout(model: nn.Module) -> None:
    for name, module in model.named_modules():
        # nn.Dropout keeps its rate in p; attention and recurrent layers in dropout.
        rate = getattr(module, "p", 0.0) if isinstance(module, nn.modules.dropout._DropoutNd) else None
        rate = getattr(module, "dropout", 0.0) if rate is None else rate
        if module.training and isinstance(rate, float) and rate > 0:
            raise ValueError(
                f"{type(module).__name__} {name!r} drops out at rate {rate}: the loss is random and has no Hessian. "
                "Call model.eval() first."
            )


def _check_batch(images: Tensor, targets: Tensor) -> None:
    if not images.is_floating_point():
        raise TypeError(f"images are {images.dtype}; convert and normalise them to floating point first.")
    if images.ndim == 0 or len(images) == 0:
        raise ValueError("The batch is empty; a mean loss needs at least one sample.")
    if targets.ndim == 0 or len(images) != len(targets):
        n_targets = len(targets) if targets.ndim else "a scalar"
        raise ValueError(f"{len(images)} images but {n_targets} targets; each image needs one target.")
    for what, values in (("images", images), ("targets", targets)):
        if values.is_floating_point() and not values.isfinite().all():
            bad = _samples_not_finite(values)
            raise ValueError(f"{what} hold NaN or infinite values in samples {bad}; clean or drop these samples.")


def _check_targets(problem: BatchLoss, output: Tensor) -> None:
    targets = problem.targets
    if problem.loss == "mse" and (targets.shape != output.shape or not targets.is_floating_point()):
        raise ValueError(
            f"mse needs float targets of the output's shape {tuple(output.shape)}, got {targets.dtype} "
            f"{tuple(targets.shape)}. Class labels: torch.nn.functional.one_hot(labels, classes).double()."
        )
    if problem.loss != "cross_entropy":
        return
    if targets.dtype != torch.int64 or targets.ndim != 1:
        raise TypeError(
            f"cross_entropy needs int64 labels of shape (b,), got {targets.dtype} {tuple(targets.shape)}. "
            "Convert: labels.long()."
        )
    classes = output.shape[1]
    wrong = ((targets < 0) | (targets >= classes)).nonzero().flatten()
    if len(wrong):
        first = int(wrong[0])
        raise ValueError(
            f"{len(wrong)} labels lie outside 0 … {classes - 1}; the first is {int(targets[first])} at sample {first}."
        )


def _check_finite(problem: BatchLoss, output: Tensor) -> None:
    if not output.isfinite().all():
        raise ValueError(
            f"The model's output is not finite for samples {_samples_not_finite(output)}. {_constant_rows(problem)}"
        )
    with torch.no_grad():
        value = problem(problem.parameters)
    if value.ndim:
        raise ValueError(f"The loss must be a scalar, a mean over the batch; it has shape {tuple(value.shape)}.")
    if not value.isfinite():
        raise ValueError(f"The loss is {float(value)} although the model's output is finite; check the loss function.")
    again, gradient = problem.value_and_gradient()
    bad = [name for name, g in gradient.items() if not g.isfinite().all()]
    if bad:
        raise ValueError(f"The gradient is not finite in {', '.join(bad)}. {_constant_rows(problem)}")
    if again != value:
        raise ValueError(
            f"Two evaluations of the loss differ ({float(value)!r}, {float(again)!r}): the model is random (dropout?) "
            "and has no Hessian. Call model.eval() first."
        )


def _samples_not_finite(values: Tensor) -> str:
    bad = (~values.reshape(len(values), -1).isfinite()).any(dim=1).nonzero().flatten().tolist()
    return ", ".join(map(str, bad[:8])) + (f" and {len(bad) - 8} more" if len(bad) > 8 else "")


class _ZeroVariances(TorchFunctionMode):
    """Notes which inputs of rsqrt are zero: the constant rows of `maps.layer_norm` without ε."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.found: list[tuple[int, list[int]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.rsqrt:
            self.calls += 1
            self.found += [(self.calls, where[:-1]) for where in (args[0] == 0).nonzero().tolist()]
        return func(*args, **(kwargs or {}))


def _constant_rows(problem: BatchLoss) -> str:
    with torch.no_grad(), _ZeroVariances() as mode:
        problem.forward(problem.parameters, problem.images)
    if not mode.found:
        return "Check the parameters and the scale of the images."
    layer, where = mode.found[0]
    return (
        f"LayerNorm number {layer} of the forward pass meets {len(mode.found)} constant rows, the first at "
        f"(sample, token) = {tuple(where)}, and norm_eps is 0 there: it has no derivative. Use norm_eps > 0."
    )


# The names under which a module may call a function with a kink at zero; the outermost call is the one seen.
KINKED = {
    *(torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, nn.functional.relu, nn.functional.relu_),
    *(nn.functional.leaky_relu, nn.functional.leaky_relu_, nn.functional.prelu, torch.prelu),
}


class ReLUInputs(TorchFunctionMode):
    """Records the pre-activations of every ReLU evaluated inside the context, on any module."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in KINKED:
            self.inputs.append(cast(Tensor, args[0]).detach().clone())
        return func(*args, **(kwargs or {}))

    def n_near_zero(self, distance: float) -> int:
        """Return how many pre-activations lie within `distance` of the kink."""
        return sum(int((U.abs() < distance).sum()) for U in self.inputs)

    def signs(self) -> list[Tensor]:
        """Return which side of the kink each pre-activation lies on."""
        return [U > 0 for U in self.inputs]
