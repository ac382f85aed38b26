"""Training of the vision transformer: functional, deterministic, resumable.

Every random choice is a pure function of the seed and of the epoch or step, so a resumed training needs the weights,
the optimiser's moments and the step, and gives the same bits as one that was never broken.
"""

import csv
import io
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from math import ceil, cos, isfinite, pi
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvature_gap.architecture import Architecture, parameter_shapes
from curvature_gap.devices import threads
from curvature_gap.files import atomic_path
from curvature_gap.shapes import Float, Int
from curvature_gap.vit import ViT, initial_parameters, vit_logits

METRICS = ("step", "loss", "train_accuracy", "validation_accuracy")
CROP_PADDING = 4
LOG_LINES = 10
"""Plain lines of progress in the log, beside one for each row of the metrics."""


@dataclass(frozen=True)
class TrainingSettings:
    """How a model is trained.

    Raises:
        ValueError: On a value out of range; the message names the key.
    """

    steps: int
    batch_size: int = 128
    optimizer: str = "adam"
    """`adam`, `adamw` or `sgd`."""
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    """Of matrices only: scales, shifts and biases do not decay."""
    momentum: float = 0.9
    """Of `sgd` alone."""
    schedule: str = "constant"
    """After the warm-up: `constant`, or `cosine`, which falls to zero at the last step."""
    warmup_steps: int = 0
    augmentation: str = "none"
    """`none` or `crop_flip`."""
    label_smoothing: float = 0.0
    gradient_clip: float | None = None
    """Largest Euclidean norm of the whole gradient."""
    checkpoint_steps: tuple[int, ...] = ()
    evaluate_every: int = 100
    threads: int = 1

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "evaluate_every", "threads"):
            _require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("weight_decay", "warmup_steps"):
            _require(getattr(self, name) >= 0, name, "not negative", getattr(self, name))
        _require(self.learning_rate > 0, "learning_rate", "positive", self.learning_rate)
        for name in ("label_smoothing", "momentum"):
            _require(0 <= getattr(self, name) < 1, name, "in [0, 1)", getattr(self, name))
        _require(self.gradient_clip is None or self.gradient_clip > 0, "gradient_clip", "positive", self.gradient_clip)
        _require(self.optimizer in ("adam", "adamw", "sgd"), "optimizer", "adam, adamw or sgd", self.optimizer)
        _require(self.schedule in ("constant", "cosine"), "schedule", "constant or cosine", self.schedule)
        _require(self.augmentation in ("none", "crop_flip"), "augmentation", "none or crop_flip", self.augmentation)
        inside = all(0 <= step <= self.steps for step in self.checkpoint_steps)
        _require(inside, "checkpoint_steps", f"between 0 and steps = {self.steps}", self.checkpoint_steps)


def _require(condition: bool, name: str, what: str, value: object) -> None:
    if not condition:
        raise ValueError(f"{name} must be {what}, got {value!r}.")


class TrainingDivergedError(ArithmeticError):
    """The loss or a weight is no longer finite."""


def stage_name(step: int, steps: int) -> str:
    """Return the checkpoint's name: `init` at step 0, `trained` at the last step, else `step_00500`."""
    return "init" if step == 0 else "trained" if step == steps else f"step_{step:05d}"


def learning_rate_at(step: int, settings: TrainingSettings) -> float:
    """Return the rate of update number `step` (from 0): linear warm-up, then constant or half a cosine to zero."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    progress = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return settings.learning_rate * (1 + cos(pi * progress)) / 2


def generator_for(*key: int) -> torch.Generator:
    """Return a CPU generator that is a pure function of the key, for example (seed, epoch)."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1))


def batch_indices(step: int, n: int, batch_size: int, seed: int, order: dict[int, Tensor]) -> Int[Tensor, " b"]:
    """Return the samples of update `step` (from 0). Each epoch is a fresh permutation; its last batch may be smaller.

    `order` keeps the current epoch's permutation between calls.
    """
    epoch, position = divmod(step, ceil(n / batch_size))
    if epoch not in order:
        order.clear()
        order[epoch] = torch.randperm(n, generator=generator_for(seed, 0, epoch))
    return order[epoch][position * batch_size : (position + 1) * batch_size]


def crop_flip(images: Float[Tensor, "b c s s"], generator: torch.Generator) -> Float[Tensor, "b c s s"]:
    """Return each image shifted by up to 4 pixels (zeros, the mean, come in) and mirrored with probability 1/2."""
    b, c, s, _ = images.shape
    top, left = torch.randint(2 * CROP_PADDING + 1, (2, b), generator=generator)
    mirrored = torch.rand(b, generator=generator) < 0.5
    pixels = torch.arange(s)
    rows = top[:, None] + pixels
    columns = left[:, None] + torch.where(mirrored[:, None], pixels.flip(0), pixels)
    padded = torch.nn.functional.pad(images, (CROP_PADDING,) * 4)
    sample, channel = torch.arange(b)[:, None, None, None], torch.arange(c)[:, None, None]
    where = (sample, channel, rows[:, None, :, None], columns[:, None, None, :])
    return padded[tuple(index.to(images.device) for index in where)]


@torch.no_grad()
def accuracy(
    parameters: Mapping[str, Tensor], images: Tensor, labels: Tensor, architecture: Architecture, chunk: int = 500
) -> float:
    """Return the share of images whose largest logit is the label's."""
    device = next(iter(parameters.values())).device
    correct = 0
    for x, y in zip(images.split(chunk), labels.split(chunk), strict=True):
        logits = vit_logits(parameters, x.to(device), architecture)
        correct += int((logits.argmax(1) == y.to(device)).sum())
    return correct / len(labels)


def train(
    architecture: Architecture,
    settings: TrainingSettings,
    train_set: tuple[Tensor, Tensor],
    validation_set: tuple[Tensor, Tensor],
    directory: Path | None,
    *,
    seed: int,
    unfinished: Path | None = None,
    device: torch.device | str = "cpu",
    log: Callable[[str], None] = print,
) -> dict[str, Tensor]:
    """Train from `initial_parameters(seed)` in float32 and return the weights on the CPU.

    Writes `init`, the named steps and `trained` as safetensors, and `metrics.csv` (loss and training accuracy are means
    over the updates since the row before), into `directory`; they appear there together, when the training is done.
    Until then they and the state to resume from lie in `unfinished`.

    Args:
        architecture: The model.
        settings: Optimiser, schedule, steps, checkpoints.
        train_set: Normalised float32 images (n, c, s, s) and int64 labels (n,).
        validation_set: The same, held out.
        directory: Where the checkpoints go. None leaves everything in `unfinished`, which must then be given: a
            repeated call finds the finished training there and returns at once.
        seed: Of the initial weights, the order of the data and the augmentation.
        unfinished: Default `directory` with the suffix `.unfinished`.
        device: Where to compute.
        log: Receives one line per row of the metrics.

    Raises:
        ValueError: If images and architecture do not fit each other.
        TrainingDivergedError: If the loss or a weight stops being finite; names the step and the last good checkpoint.
    """
    _check_data(architecture, train_set, validation_set)
    if unfinished is None:
        if directory is None:
            raise ValueError("train needs a directory, or a place for the unfinished training, or both.")
        unfinished = directory.with_name(directory.name + ".unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    with threads(settings.threads):
        trainer = _Trainer(architecture, settings, train_set, validation_set, unfinished, seed, device, log)
        trainer.resume()
        trainer.run()
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        # Copied, not moved: whoever is killed here, or has these outputs deleted, finds them in `unfinished` again.
        for path in sorted(unfinished.iterdir()):
            if path.name != STATE and not path.name.startswith("."):
                _write(directory / path.name, path.read_bytes())
        shutil.rmtree(unfinished)
    return {name: p.detach().cpu() for name, p in trainer.parameters.items()}


STATE = "state.safetensors"


class _Trainer:
    """One training between two kills: the state that `state.safetensors` holds, and the loop that moves it."""

    def __init__(
        self,
        architecture: Architecture,
        settings: TrainingSettings,
        train_set: tuple[Tensor, Tensor],
        validation_set: tuple[Tensor, Tensor],
        unfinished: Path,
        seed: int,
        device: torch.device | str,
        log: Callable[[str], None],
    ) -> None:
        self.architecture, self.settings, self.seed, self.log = architecture, settings, seed, log
        self.device = torch.device(device)
        self.images, self.labels = (tensor.to(self.device) for tensor in train_set)
        self.validation = validation_set
        self.unfinished = unfinished
        initial = initial_parameters(architecture, torch.Generator().manual_seed(seed))
        self.parameters = {name: p.to(self.device).requires_grad_() for name, p in initial.items()}
        self.optimizer = make_optimizer(self.parameters, settings)
        self.step = 0
        self.order: dict[int, Tensor] = {}
        self.rows: list[dict[str, float | int]] = []
        self.sums: dict[str, float | int] = {"loss": 0.0, "correct": 0, "samples": 0, "updates": 0}
        self.last_good = "none"
        self.identity = identity(architecture, settings, seed, train_set, validation_set, self.device)

    def run(self) -> None:
        from tqdm import tqdm

        if self.step == 0:
            self.save()
        steps = range(self.step, self.settings.steps)
        for _ in tqdm(steps, initial=self.step, total=self.settings.steps, disable=not sys.stderr.isatty()):
            self.update()
            ended = self.step == self.settings.steps
            if self.step % max(1, self.settings.steps // LOG_LINES) == 0:
                self.log(
                    f"step {self.step} of {self.settings.steps}: loss {self.sums['loss'] / self.sums['updates']:.4f}"
                )
            evaluates = ended or self.step % self.settings.evaluate_every == 0
            if evaluates:
                self.evaluate()
            if evaluates or self.step in self.settings.checkpoint_steps:
                self.save()

    def update(self) -> None:
        """Take one step of the optimiser."""
        s = self.settings
        index = batch_indices(self.step, len(self.labels), s.batch_size, self.seed, self.order).to(self.device)
        x, y = self.images[index], self.labels[index]
        if s.augmentation == "crop_flip":
            x = crop_flip(x, generator_for(self.seed, 1, self.step))
        logits = vit_logits(self.parameters, x, self.architecture)
        loss = torch.nn.functional.cross_entropy(logits, y, label_smoothing=s.label_smoothing)
        value = loss.item()
        if not isfinite(value):
            raise self.diverged(f"The loss is {value}")
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if s.gradient_clip is not None:
            torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), s.gradient_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(self.step, s)
        self.optimizer.step()
        self.step += 1
        self.sums["loss"] += value
        self.sums["correct"] += int((logits.detach().argmax(1) == y).sum())
        self.sums["samples"] += len(y)
        self.sums["updates"] += 1

    def evaluate(self) -> None:
        """Append a row to the metrics and report it."""
        row = {
            "step": self.step,
            "loss": self.sums["loss"] / self.sums["updates"],
            "train_accuracy": self.sums["correct"] / self.sums["samples"],
            "validation_accuracy": accuracy(self.parameters, *self.validation, self.architecture),
        }
        self.rows.append(row)
        self.sums = dict.fromkeys(self.sums, 0)
        self.log(
            f"step {self.step} of {self.settings.steps}: loss {row['loss']:.4f}, "
            f"train accuracy {row['train_accuracy']:.4f}, validation accuracy {row['validation_accuracy']:.4f}"
        )

    def save(self) -> None:
        """Write the named checkpoint if this step has one, the metrics so far, and last of all the state."""
        if not all(bool(p.isfinite().all()) for p in self.parameters.values()):
            raise self.diverged("A weight is not finite")
        weights = {name: p.detach().cpu() for name, p in self.parameters.items()}
        if self.step in {0, self.settings.steps, *self.settings.checkpoint_steps}:
            name = stage_name(self.step, self.settings.steps)
            self.last_good = str(self.unfinished / f"{name}.safetensors")
            write_checkpoint(Path(self.last_good), weights)
        _write(self.unfinished / "metrics.csv", metrics_csv(self.rows).encode())
        progress = {"step": self.step, "sums": self.sums, "rows": self.rows, "last_good": self.last_good}
        moments = {key: value.cpu() for key, value in optimizer_tensors(self.optimizer, self.parameters).items()}
        write_safetensors(
            self.unfinished / STATE,
            {f"weights.{name}": p for name, p in weights.items()} | moments,
            {"identity": self.identity, "progress": json.dumps(progress)},
        )

    def resume(self) -> None:
        """Take up the state that an unfinished training of exactly this kind left, if there is one."""
        path = self.unfinished / STATE
        if not path.exists():
            return self.start_anew("")
        try:
            tensors, metadata = read_safetensors(path)
        except ValueError as error:
            return self.start_anew(f"Starting anew: {error}")
        if metadata.get("identity") != self.identity:
            return self.start_anew(f"Starting anew: {path} belongs to a training with other settings, data or code.")
        progress = json.loads(metadata["progress"])
        self.step, self.sums, self.rows = progress["step"], progress["sums"], progress["rows"]
        self.last_good = progress["last_good"]
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(tensors[f"weights.{name}"])
        load_optimizer_tensors(self.optimizer, self.parameters, tensors)
        self.log(f"Resuming at step {self.step} of {self.settings.steps} from {path}.")

    def start_anew(self, why: str) -> None:
        """Remove what another training left, so that none of it is taken for this one's."""
        if why:
            self.log(why)
        shutil.rmtree(self.unfinished)
        self.unfinished.mkdir(parents=True)

    def diverged(self, what: str) -> TrainingDivergedError:
        return TrainingDivergedError(
            f"{what} at step {self.step} of {self.settings.steps}. The last good checkpoint is {self.last_good}. "
            f"Lower learning_rate (now {self.settings.learning_rate}) or raise warmup_steps "
            f"(now {self.settings.warmup_steps})."
        )


def make_optimizer(parameters: Mapping[str, Tensor], settings: TrainingSettings) -> torch.optim.Optimizer:
    """Return the torch optimiser; the parameters with one axis are a group of their own, without weight decay."""
    matrices = [p for p in parameters.values() if p.ndim > 1]
    vectors = [p for p in parameters.values() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=settings.learning_rate, momentum=settings.momentum, fused=True)
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return kind(groups, lr=settings.learning_rate, fused=True)


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the optimiser's state as flat tensors named `optimizer.<block>.<moment>`."""
    return {
        f"optimizer.{name}.{key}": value
        for name, p in parameters.items()
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, Tensor)
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    """Put back what `optimizer_tensors` returned."""
    for name, p in parameters.items():
        prefix = f"optimizer.{name}."
        state = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
        if state:
            optimizer.state[p] = {key: t.clone().to(p.device) for key, t in state.items()}


def identity(
    architecture: Architecture,
    settings: TrainingSettings,
    seed: int,
    train_set: tuple[Tensor, Tensor],
    validation_set: tuple[Tensor, Tensor],
    device: torch.device,
) -> str:
    """Return what a state must agree in to be resumed, as JSON: settings, data, versions, device and this code."""
    digest = sha256()
    for tensor in (*train_set, *validation_set):
        digest.update(np.ascontiguousarray(tensor.cpu().numpy()).data)
    code = sha256(
        b"".join((Path(__file__).parent / f"{m}.py").read_bytes() for m in ("training", "vit", "maps", "architecture"))
    )
    return json.dumps(
        {
            "architecture": asdict(architecture),
            "settings": asdict(settings),
            "seed": seed,
            "data_sha256": digest.hexdigest(),
            "code_sha256": code.hexdigest(),
            "torch": torch.__version__,
            "device": device.type,
        },
        sort_keys=True,
    )


def metrics_csv(rows: list[dict[str, float | int]]) -> str:
    """Return the metrics as CSV text."""
    text = io.StringIO()
    writer = csv.DictWriter(text, METRICS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write_checkpoint(path: Path, parameters: Mapping[str, Tensor]) -> None:
    """Write the weights as safetensors, atomically, under the block names."""
    write_safetensors(path, parameters, {"format": "pt"})


def read_checkpoint(path: Path, architecture: Architecture) -> dict[str, Tensor]:
    """Return the weights of a checkpoint, in the order of `parameter_shapes`.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is damaged or is not safetensors, or if it belongs to another architecture; the message
            lists the blocks that are missing, unknown or of another shape.
    """
    tensors, _ = read_safetensors(path)
    expected = parameter_shapes(architecture)
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [f"{name} is unknown" for name in tensors if name not in expected]
    problems += [
        f"{name} is {tuple(tensors[name].shape)}, not {shape}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if problems:
        raise ValueError(f"{path} is a checkpoint of another architecture: {'; '.join(problems)}.")
    bad = [name for name, p in tensors.items() if not p.isfinite().all()]
    if bad:
        raise ValueError(f"{path} holds numbers that are not finite, in {', '.join(bad)}.")
    return {name: tensors[name] for name in expected}


def load_model(path: Path | str, architecture: Architecture) -> ViT:
    """Return the module that holds a checkpoint's weights. Raises as `read_checkpoint` does."""
    model = ViT(architecture)
    model.load_state_dict(read_checkpoint(Path(path), architecture))
    return model


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write tensors atomically."""
    from safetensors.torch import save

    _write(path, save({name: t.contiguous() for name, t in tensors.items()}, metadata=metadata))


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata. Raises ValueError, naming the file, if it is damaged or not safetensors."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).exists():
        raise FileNotFoundError(f"{path} does not exist; train the model first.")
    try:
        with safe_open(str(path), "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not a safetensors file ({error}); delete it and run again.") from error


def _write(path: Path, content: bytes) -> None:
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def _check_data(architecture: Architecture, *sets: tuple[Any, Any]) -> None:
    a = architecture
    for name, (images, labels) in zip(("train", "validation"), sets, strict=True):
        if tuple(images.shape[1:]) != (a.channels, a.image_size, a.image_size):
            raise ValueError(
                f"The {name} images are {tuple(images.shape[1:])}; the model takes "
                f"{(a.channels, a.image_size, a.image_size)}."
            )
        if len(images) != len(labels) or len(labels) == 0:
            raise ValueError(f"The {name} set has {len(images)} images and {len(labels)} labels.")
        if images.dtype != torch.float32 or labels.dtype != torch.int64:
            raise ValueError(f"The {name} set must be float32 images and int64 labels.")
        if int(labels.min()) < 0 or int(labels.max()) >= a.classes:
            raise ValueError(f"The {name} labels must lie in 0 … {a.classes - 1}, got {labels.min()} … {labels.max()}.")
