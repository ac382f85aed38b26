import csv
from dataclasses import replace
from math import ceil, nan

import pytest
import torch
from safetensors.torch import load_file

from curvature_gap import training
from curvature_gap.architecture import Architecture, parameter_shapes
from curvature_gap.training import (
    TrainingDivergedError,
    TrainingSettings,
    batch_indices,
    crop_flip,
    generator_for,
    learning_rate_at,
    load_model,
    read_checkpoint,
    stage_name,
    train,
    write_checkpoint,
)
from curvature_gap.vit import initial_parameters, vit_logits

SMALL = Architecture(image_size=6, channels=2, patch=3, classes=5, d_V=4, d_ff=7)
SETTINGS = TrainingSettings(
    steps=13,
    batch_size=7,
    schedule="cosine",
    warmup_steps=3,
    learning_rate=0.01,
    augmentation="crop_flip",
    checkpoint_steps=(4, 9),
    evaluate_every=5,
)


@pytest.fixture
def data(generator):
    """23 + 11 images whose label can be read off one channel's mean."""
    labels = torch.randint(5, (34,), generator=generator)
    images = torch.randn(34, 2, 6, 6, generator=generator) + labels[:, None, None, None]
    return (images[:23], labels[:23]), (images[23:], labels[23:])


def run(data, directory, settings=SETTINGS, seed=3, **options):
    return train(SMALL, settings, *data, directory, seed=seed, log=lambda line: None, **options)


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_one_update_is_the_textbook_one(optimizer, data, tmp_path):
    settings = TrainingSettings(
        steps=1, batch_size=23, optimizer=optimizer, learning_rate=0.1, weight_decay=0.5, gradient_clip=0.01
    )
    after = run(data, tmp_path / "a", settings)
    before = initial_parameters(SMALL, torch.Generator().manual_seed(3))
    leaves = {name: p.clone().requires_grad_() for name, p in before.items()}
    loss = torch.nn.functional.cross_entropy(vit_logits(leaves, data[0][0], SMALL), data[0][1])
    gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    scale = 0.01 / torch.cat([g.reshape(-1) for g in gradients.values()]).norm()
    for name, w in before.items():
        g = gradients[name] * scale
        decay = 0.5 if w.ndim > 1 else 0.0
        if optimizer == "sgd":
            expected = w - 0.1 * (g + decay * w)
        elif optimizer == "adam":
            g = g + decay * w
            expected = w - 0.1 * g / (g.abs() + 1e-8)
        else:
            expected = w * (1 - 0.1 * decay) - 0.1 * g / (g.abs() + 1e-8)
        # Where the gradient is rounding error (constant logit shifts), Adam's g/|g| is not determined.
        firm = gradients[name].abs() > 1e-6
        torch.testing.assert_close(after[name][firm], expected[firm], rtol=2e-3, atol=1e-6)


def test_training_learns(data, tmp_path):
    settings = replace(SETTINGS, steps=150, augmentation="none", checkpoint_steps=(), evaluate_every=50)
    run(data, tmp_path / "a", settings)
    with (tmp_path / "a/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [50, 100, 150]
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])
    assert float(rows[-1]["train_accuracy"]) > 0.6


def test_two_runs_give_the_same_bits_and_another_seed_does_not(data, tmp_path):
    first, second, other = (run(data, tmp_path / name, seed=s) for name, s in (("a", 3), ("b", 3), ("c", 4)))
    assert_same(first, second)
    assert not torch.equal(first["W_Q"], other["W_Q"])
    for name in ("init", "step_00004", "step_00009", "trained"):
        path = f"{name}.safetensors"
        assert (tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes()


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("killed_at", [0, 2, 4, 5, 8, 12])
def test_a_killed_training_resumes_to_the_same_bits(killed_at, optimizer, data, tmp_path, monkeypatch):
    settings = replace(SETTINGS, optimizer=optimizer)
    whole = run(data, tmp_path / "whole", settings)
    update = training._Trainer.update

    def dies(self):
        if self.step == killed_at:
            raise KeyboardInterrupt
        update(self)

    monkeypatch.setattr(training._Trainer, "update", dies)
    with pytest.raises(KeyboardInterrupt):
        run(data, tmp_path / "broken", settings)
    assert not (tmp_path / "broken").exists()
    monkeypatch.setattr(training._Trainer, "update", update)
    lines = []
    broken = train(SMALL, settings, *data, tmp_path / "broken", seed=3, log=lines.append)
    saved = max(step for step in (0, 4, 5, 9, 10) if step <= killed_at)
    assert f"Resuming at step {saved} of 13" in lines[0]
    assert_same(whole, broken)
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "broken" / path.name).read_bytes(), path.name
    assert not (tmp_path / "broken.unfinished").exists()


def test_a_finished_training_left_in_place_is_not_repeated(data, tmp_path, monkeypatch):
    first = run(data, None, unfinished=tmp_path / "kept")
    monkeypatch.setattr(training._Trainer, "update", lambda self: 1 / 0)
    assert_same(first, run(data, None, unfinished=tmp_path / "kept"))
    with pytest.raises(ValueError, match="needs a directory"):
        run(data, None)


def test_a_state_of_other_settings_or_a_damaged_one_is_not_resumed(data, tmp_path, monkeypatch):
    whole = run(data, tmp_path / "whole")
    for spoil in ("settings", "bytes"):
        unfinished = tmp_path / f"{spoil}.unfinished"
        with monkeypatch.context() as patch:
            patch.setattr(training._Trainer, "evaluate", lambda self: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                run(
                    data,
                    tmp_path / spoil,
                    replace(SETTINGS, checkpoint_steps=(2,)) if spoil == "settings" else SETTINGS,
                )
        if spoil == "bytes":
            state = unfinished / "state.safetensors"
            state.write_bytes(state.read_bytes()[:100])
        lines = []
        again = train(SMALL, SETTINGS, *data, tmp_path / spoil, seed=3, log=lines.append)
        assert lines[0].startswith("Starting anew")
        assert_same(whole, again)
        assert not (tmp_path / spoil / "step_00002.safetensors").exists()


def test_a_loss_that_is_not_finite_names_the_step_and_the_last_good_checkpoint(data, tmp_path):
    (images, labels), validation = data
    bad = images.clone()
    settings = replace(SETTINGS, augmentation="none", batch_size=2)
    bad[batch_indices(10, 23, 2, 3, {})[0]] = nan
    with pytest.raises(TrainingDivergedError, match=r"loss is nan at step 10 of 13.*step_00009\.safetensors") as caught:
        run(((bad, labels), validation), tmp_path / "a", settings)
    checkpoint = tmp_path / "a.unfinished/step_00009.safetensors"
    assert str(checkpoint) in str(caught.value)
    assert read_checkpoint(checkpoint, SMALL)["W_Q"].isfinite().all()


def test_every_epoch_visits_every_sample_once_and_in_a_new_order():
    n, b = 23, 7
    per_epoch = ceil(n / b)
    order: dict = {}
    epochs = [torch.cat([batch_indices(e * per_epoch + i, n, b, 5, order) for i in range(per_epoch)]) for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(n))
    assert not torch.equal(epochs[0], epochs[1])
    torch.testing.assert_close(batch_indices(5, n, b, 5, {}), epochs[1][7:14])


def test_learning_rate():
    settings = replace(SETTINGS, steps=11, warmup_steps=3, learning_rate=6.0)
    rates = [learning_rate_at(step, settings) for step in range(12)]
    assert rates[:3] == pytest.approx([2, 4, 6])
    assert rates[3] == pytest.approx(6)
    assert rates[7] == pytest.approx(3)
    assert rates[11] == pytest.approx(0)
    assert {learning_rate_at(s, replace(settings, schedule="constant")) for s in range(2, 11)} == {6.0}


def test_crop_flip_moves_and_mirrors_each_image(generator):
    images = torch.arange(1.0, 1 + 40 * 2 * 36).reshape(40, 2, 6, 6)
    moved = crop_flip(images, generator_for(1, 2))
    assert torch.equal(moved, crop_flip(images, generator_for(1, 2)))
    padded = torch.nn.functional.pad(images, (4,) * 4)
    mirrored = 0
    for image, source in zip(moved, padded, strict=True):
        windows = [source[:, i : i + 6, j : j + 6] for i in range(9) for j in range(9)]
        straight = any(torch.equal(image, w) for w in windows)
        flipped = any(torch.equal(image, w.flip(2)) for w in windows)
        assert straight or flipped
        mirrored += flipped and not straight
    assert 8 < mirrored < 32


def test_checkpoints_carry_the_block_names_and_the_module_computes_the_same(data, tmp_path):
    weights = run(data, tmp_path / "a")
    assert set(load_file(tmp_path / "a/trained.safetensors")) == set(parameter_shapes(SMALL))
    model = load_model(tmp_path / "a/trained.safetensors", SMALL)
    assert torch.equal(model(data[0][0]), vit_logits(weights, data[0][0], SMALL))


def test_a_checkpoint_of_another_architecture_is_refused_with_names_and_shapes(tmp_path):
    other = replace(SMALL, d_ff=11, bias=True, output_projection=False)
    path = tmp_path / "other.safetensors"
    write_checkpoint(path, initial_parameters(other, torch.Generator().manual_seed(0)))
    with pytest.raises(ValueError, match="another architecture") as caught:
        read_checkpoint(path, SMALL)
    for part in (str(path), "W_O is missing", "b_1 is unknown", "W_1 is (4, 11), not (4, 7)"):
        assert part in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"PK\x03\x04 not a tensor"])
def test_a_damaged_checkpoint_or_a_pickle_is_refused_unread(content, tmp_path):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.safetensors is damaged or not a safetensors file.*delete it"):
        read_checkpoint(path, SMALL)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_checkpoint(tmp_path / "absent.safetensors", SMALL)


def test_weights_that_are_not_finite_are_refused(tmp_path):
    weights = initial_parameters(SMALL, torch.Generator().manual_seed(0))
    weights["W_V"][0, 0] = nan
    write_checkpoint(tmp_path / "nan.safetensors", weights)
    with pytest.raises(ValueError, match="not finite, in W_V"):
        read_checkpoint(tmp_path / "nan.safetensors", SMALL)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", 0),
        ("batch_size", -1),
        ("learning_rate", 0.0),
        ("optimizer", "lion"),
        ("schedule", "linear"),
        ("augmentation", "cutout"),
        ("checkpoint_steps", (14,)),
        ("gradient_clip", 0.0),
        ("label_smoothing", 1.0),
        ("threads", 0),
        ("weight_decay", -0.1),
    ],
)
def test_impossible_settings_are_refused_by_name(key, value):
    with pytest.raises(ValueError, match=key):
        replace(SETTINGS, **{key: value})


def test_data_that_do_not_fit_the_model_are_refused(data, tmp_path):
    (images, labels), validation = data
    for broken, message in [
        ((images[:, :1], labels), r"\(1, 6, 6\); the model takes \(2, 6, 6\)"),
        ((images, labels[:-1]), "23 images and 22 labels"),
        ((images, labels + 1), "must lie in 0 … 4"),
        ((images.double(), labels), "float32"),
    ]:
        with pytest.raises(ValueError, match=message):
            run((broken, validation), tmp_path / "a")


def test_stage_names():
    assert [stage_name(s, 4690) for s in (0, 5, 500, 4690)] == ["init", "step_00005", "step_00500", "trained"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_two_runs_on_cuda_give_the_same_bits(data, tmp_path):
    first, second = (run(data, tmp_path / name, device="cuda") for name in ("a", "b"))
    assert_same(first, second)
