import pytest
import torch
from torch import nn

from curvature_gap.architecture import Architecture
from curvature_gap.batch_loss import ReLUInputs, batch_loss, flatten, unflatten
from curvature_gap.vit import ViT

SMALL = Architecture(image_size=4, channels=1, patch=2, classes=3, d_V=4, d_ff=6)
LABELS = torch.tensor([0, 2, 1, 0, 2])


@pytest.fixture
def images(randn):
    return randn(5, 1, 4, 4)


def test_is_the_loss_of_the_module_in_float64(images):
    model = ViT(SMALL, seed=3)
    problem = batch_loss(model, images, LABELS)
    expected = nn.functional.cross_entropy(model.double()(images), LABELS)
    torch.testing.assert_close(problem(problem.parameters), expected.detach(), rtol=0, atol=1e-15)
    assert problem.architecture is SMALL
    assert problem.n_parameters == SMALL.n_parameters


def test_a_vit_and_the_same_vit_as_an_unknown_module_agree(images):
    model = ViT(SMALL, seed=3)
    wrapped = nn.Sequential(model)
    ours, theirs = batch_loss(model, images, LABELS), batch_loss(wrapped, images, LABELS)
    assert theirs.architecture is None
    for a, b in zip(ours.value_and_gradient()[1].values(), theirs.value_and_gradient()[1].values(), strict=True):
        torch.testing.assert_close(a, b)


def test_the_model_is_left_alone_and_fixed_parameters_stay_fixed(images):
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model[1].weight.requires_grad_(False)
    problem = batch_loss(model, images, LABELS)
    assert "1.weight" not in problem.parameters
    assert list(problem.parameters) == ["1.bias", "2.weight", "2.bias", "3.weight", "3.bias"]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
        assert value.dtype == before[name].dtype


def test_flatten_and_unflatten(randn):
    parts = {"a": randn(2, 3), "b": randn(5)}
    for name, value in unflatten(flatten(parts), parts).items():
        torch.testing.assert_close(value, parts[name])


def test_counts_pre_activations_near_the_kink():
    with ReLUInputs() as relus:
        torch.relu(torch.tensor([-1.0, 1e-7, 0.0, 2.0]))
        nn.ReLU(inplace=True)(torch.tensor([-1e-8, 5.0]))
    assert relus.n_near_zero(1e-6) == 3
    assert [signs.tolist() for signs in relus.signs()] == [[False, True, False, True], [False, True]]


def bad_batches(images):
    nan = images.clone()
    nan[[1, 4]] = float("nan")
    return {
        "integer": (images.long(), LABELS, TypeError, "images are torch.int64; convert and normalise"),
        "empty": (images[:0], LABELS[:0], ValueError, "batch is empty"),
        "lengths": (images, LABELS[:3], ValueError, "5 images but 3 targets"),
        "nan": (nan, LABELS, ValueError, "images hold NaN or infinite values in samples 1, 4"),
        "range": (images, LABELS + 1, ValueError, r"2 labels lie outside 0 … 2; the first is 3 at sample 1"),
        "negative": (images, LABELS - 1, ValueError, "the first is -1 at sample 0"),
        "type": (images, LABELS.int(), TypeError, "needs int64 labels"),
    }


@pytest.mark.parametrize("case", ["integer", "empty", "lengths", "nan", "range", "negative", "type"])
def test_bad_batch(case, images):
    images, labels, error, message = bad_batches(images)[case]
    with pytest.raises(error, match=message):
        batch_loss(ViT(SMALL), images, labels)


def test_bad_mse_targets(images):
    with pytest.raises(
        ValueError, match=r"mse needs float targets of the output's shape \(5, 3\), got torch.int64 \(5,\)"
    ):
        batch_loss(ViT(SMALL), images, LABELS, loss="mse")


def test_bad_models(images):
    with pytest.raises(TypeError, match=r"Parameter embed is torch.float16"):
        batch_loss(ViT(SMALL).half(), images, LABELS)
    with pytest.raises(TypeError, match="dtype must be"):
        batch_loss(ViT(SMALL), images, LABELS, dtype=torch.float16)
    with pytest.raises(ValueError, match="nothing to differentiate"):
        batch_loss(ViT(SMALL).requires_grad_(False), images, LABELS)
    with pytest.raises(ValueError, match="loss must be one of cross_entropy, mse or a callable, got 'hinge'"):
        batch_loss(ViT(SMALL), images, LABELS, loss="hinge")


class RandomModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(48.0).reshape(16, 3) / 48)

    def forward(self, x):
        return nn.functional.dropout(x.flatten(1), 0.5) @ self.weight


def test_dropout_is_refused_whether_a_module_or_a_function(images):
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.25), nn.Linear(16, 3))
    with pytest.raises(ValueError, match=r"Dropout '1' drops out at rate 0.25.*model.eval"):
        batch_loss(model, images, LABELS)
    batch_loss(model.eval(), images, LABELS)
    with pytest.raises(ValueError, match="the model is random"):
        batch_loss(RandomModel(), images, LABELS)


def test_a_constant_row_without_epsilon_says_where(images):
    architecture = Architecture(4, 1, 2, 3, d_V=4, d_ff=6, norm_eps=0.0, positions="none")
    images[2] = 0.0  # no positions, no bias: every token of this sample is zero
    message = r"not finite for samples 2. LayerNorm number 1 .* 4 constant rows, .*\(sample, token\) = \(2, 0\)"
    with pytest.raises(ValueError, match=message):
        batch_loss(ViT(architecture), images, LABELS)


def test_a_loss_that_is_no_scalar_or_not_finite(images):
    with pytest.raises(ValueError, match=r"must be a scalar, a mean over the batch; it has shape \(5,\)"):
        batch_loss(ViT(SMALL), images, LABELS, loss=lambda o, t: o.sum(dim=1))
    with pytest.raises(ValueError, match="check the loss function"):
        batch_loss(ViT(SMALL), images, LABELS, loss=lambda o, t: o.sum() * float("inf"))
