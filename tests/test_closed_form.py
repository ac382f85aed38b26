"""The closed form against automatic differentiation, and that once against finite differences."""

import pytest
import torch

from curvature_gap.architecture import Architecture, parameter_shapes
from curvature_gap.closed_form import closed_form_blocks, closed_form_hessian, covers
from curvature_gap.vit import flatten_parameters, initial_parameters, unflatten_parameters, vit_logits

ARCHITECTURES = {
    "plain": Architecture(6, 2, 3, 3, d_V=5, d_ff=7, positions="none"),
    "pinned_reading": Architecture(6, 1, 2, 4, d_V=6, d_ff=5),
    "narrow_keys": Architecture(6, 1, 3, 5, d_V=7, d_ff=3, d_K=2, bias=True),
    "wide_keys_no_projection": Architecture(4, 2, 2, 2, d_V=3, d_ff=8, d_K=5, output_projection=False, norm_eps=1e-2),
    "all_trainable": Architecture(6, 1, 2, 3, d_V=5, d_ff=6, d_K=4, bias=True, positions="learned"),
    "learned_positions_no_bias": Architecture(
        4, 3, 2, 7, d_V=6, d_ff=2, positions="learned", output_projection=False, norm_eps=0.0
    ),
    "one_token_one_class": Architecture(2, 1, 2, 1, d_V=5, d_ff=3, bias=True),
}
LOSSES = ("cross_entropy", "mse")


def problem(architecture, loss, generator, batch=5, dtype=torch.float64):
    """Random parameters (scales around 1, biases not 0) and a random batch."""

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    parameters = {
        name: (0.6 * draw(*shape) + (1 if name.endswith("gamma") else 0)).to(dtype)
        for name, shape in parameter_shapes(architecture).items()
    }
    a = architecture
    images = draw(batch, a.channels, a.image_size, a.image_size).to(dtype)
    if loss == "mse":
        return parameters, images, draw(batch, a.classes).to(dtype)
    return parameters, images, torch.randint(a.classes, (batch,), generator=generator)


def loss_of(images, targets, architecture, loss):
    def value(theta):
        logits = vit_logits(unflatten_parameters(theta, architecture), images, architecture)
        if loss == "mse":
            return (logits - targets).square().mean()
        return torch.nn.functional.cross_entropy(logits, targets)

    return value


def oracle(parameters, images, targets, architecture, loss):
    """Forward over reverse mode: right, because the maps are elementary."""
    theta = flatten_parameters(parameters, architecture).double()
    images = images.double()
    targets = targets.double() if loss == "mse" else targets
    return torch.func.jacfwd(torch.func.grad(loss_of(images, targets, architecture, loss)))(theta)


def offsets(architecture):
    found, start = {}, 0
    for name, shape in parameter_shapes(architecture).items():
        found[name] = slice(start, start := start + torch.Size(shape).numel())
    return found


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hessian_equals_automatic_differentiation(name, loss, generator):
    architecture = ARCHITECTURES[name]
    case = problem(architecture, loss, generator)
    H = closed_form_hessian(*case, architecture, loss=loss)
    expected = oracle(*case, architecture, loss)
    scale = expected.abs().max()
    assert (H - expected).abs().max() <= 1e-13 * scale
    assert (H - H.T).abs().max() <= 1e-13 * scale


@pytest.mark.parametrize("loss", LOSSES)
def test_oracle_equals_finite_differences(loss, generator):
    architecture = ARCHITECTURES["all_trainable"]
    parameters, images, targets = problem(architecture, loss, generator, batch=2)
    theta = flatten_parameters(parameters, architecture)
    gradient = torch.func.grad(loss_of(images, targets, architecture, loss))
    H = closed_form_hessian(parameters, images, targets, architecture, loss=loss)
    steps = 1e-5 * torch.eye(len(theta), dtype=theta.dtype)
    differences = torch.func.vmap(lambda e: (gradient(theta + e) - gradient(theta - e)) / 2e-5)(steps)
    assert (H - differences).abs().max() <= 1e-7 * H.abs().max()


def test_float32_is_accurate_to_a_millionth(generator):
    """Where the problem is well conditioned; with narrow random layers float32 autodiff is as far off as this is."""
    architecture = ARCHITECTURES["pinned_reading"]
    case = problem(architecture, "cross_entropy", generator, dtype=torch.float32)
    exact = oracle(*case, architecture, "cross_entropy")
    H = closed_form_hessian(*case, architecture)
    assert H.dtype == torch.float32
    assert (H - exact).abs().max() <= 1e-6 * exact.abs().max()


def test_float32_at_the_initialisation_of_the_pinned_model(generator):
    architecture = Architecture(28, 1, 4, 10, d_V=16, d_ff=64)
    parameters = initial_parameters(architecture, generator)
    images = torch.randn(2, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (2,), generator=generator)
    H = closed_form_hessian(parameters, images, labels, architecture)
    exact = closed_form_hessian({k: p.double() for k, p in parameters.items()}, images.double(), labels, architecture)
    assert (H - exact).abs().max() <= 1e-6 * exact.abs().max()


@pytest.mark.parametrize("loss", LOSSES)
def test_batch_of_one_and_uneven_chunks(loss, generator):
    architecture = ARCHITECTURES["narrow_keys"]
    case = problem(architecture, loss, generator, batch=1)
    expected = oracle(*case, architecture, loss)
    H = closed_form_hessian(*case, architecture, loss=loss)
    assert (H - expected).abs().max() <= 1e-13 * expected.abs().max()
    case = problem(architecture, loss, generator, batch=3)
    expected = oracle(*case, architecture, loss)
    for tokens_per_chunk in (1, 73):  # one sample; two samples and a rest of one
        H = closed_form_hessian(*case, architecture, loss=loss, tokens_per_chunk=tokens_per_chunk)
        assert (H - expected).abs().max() <= 1e-13 * expected.abs().max()


def test_whole_is_the_upper_triangle_in_block_order(generator):
    architecture = ARCHITECTURES["pinned_reading"]
    blocks = closed_form_blocks(*problem(architecture, "cross_entropy", generator, batch=1), architecture)
    names = list(parameter_shapes(architecture))
    assert list(blocks) == [(row, column) for i, row in enumerate(names) for column in names[i:]]


ONE_PAIR_PER_GROUP_PAIR = [
    ("positions", "positions"),
    ("embed", "positions"),
    ("embed_bias", "positions"),
    ("positions", "W_1"),
    ("positions", "W_2"),
    ("positions", "LN1_gamma"),
    ("positions", "W_K"),
    ("embed", "W_V"),
    ("W_Q", "W_K"),
    ("W_K", "W_V"),
    ("W_V", "W_O"),
    ("W_O", "W_1"),
    ("W_K", "W_2"),
    ("W_Q", "LN1_beta"),
    ("W_V", "classifier"),
    ("LN1_gamma", "b_1"),
    ("LN1_beta", "W_2"),
    ("W_1", "W_1"),
    ("W_1", "W_2"),
    ("b_1", "W_2"),
    ("W_2", "b_2"),
    ("b_2", "LN2_gamma"),
    ("LN2_gamma", "classifier"),
    ("classifier", "classifier_bias"),
]


def test_a_pair_or_some_of_its_rows_equal_the_whole(generator):
    architecture = ARCHITECTURES["all_trainable"]
    case = problem(architecture, "cross_entropy", generator, batch=2)
    H, where = closed_form_hessian(*case, architecture), offsets(architecture)
    for row, column in ONE_PAIR_PER_GROUP_PAIR:
        expected = H[where[row], where[column]]
        n = len(expected)
        for rows in (slice(0, n), slice(n // 3, n // 3 + (n + 1) // 2)):
            asked = {(row, column): rows}
            part = closed_form_blocks(*case, architecture, pairs=asked, rows=asked)[row, column]
            assert part.shape == expected[rows].shape
            assert (part - expected[rows]).abs().max() <= 1e-13 * H.abs().max()


@pytest.mark.parametrize("name", ["pinned_reading", "all_trainable"])
def test_pairs_of_one_group_may_ask_for_different_rows(name, generator):
    """As a tile job does: the last pair of one tile whole, the first rows of the next."""
    architecture = ARCHITECTURES[name]
    case = problem(architecture, "cross_entropy", generator, batch=2)
    H, where = closed_form_hessian(*case, architecture), offsets(architecture)
    names = list(where)
    for i, row in enumerate(names):
        n = where[row].stop - where[row].start
        for first, second in zip(names[i:], names[i + 1 :], strict=False):
            asked = {(row, first): slice(0, n), (row, second): slice(n // 3, n // 3 + (n + 1) // 2)}
            blocks = closed_form_blocks(*case, architecture, pairs=asked, rows=asked)
            for (_, column), rows in asked.items():
                difference = blocks[row, column] - H[where[row], where[column]][rows]
                assert difference.abs().max() <= 1e-13 * H.abs().max(), (row, column)


def test_diagonal_blocks(generator):
    architecture = ARCHITECTURES["all_trainable"]
    case = problem(architecture, "mse", generator)
    expected = oracle(*case, architecture, "mse")
    pairs = [(name, name) for name in parameter_shapes(architecture)]
    blocks = closed_form_blocks(*case, architecture, loss="mse", pairs=pairs)
    assert list(blocks) == pairs
    for name, rows in offsets(architecture).items():
        assert (blocks[name, name] - expected[rows, rows]).abs().max() <= 1e-13 * expected.abs().max()


def test_two_runs_agree_bit_for_bit(generator):
    architecture = ARCHITECTURES["pinned_reading"]
    case = problem(architecture, "cross_entropy", generator, dtype=torch.float32)
    first, second = (closed_form_hessian(*case, architecture) for _ in range(2))
    assert torch.equal(first, second)


def test_blocks_are_written_where_out_says(generator):
    architecture = ARCHITECTURES["plain"]
    case = problem(architecture, "cross_entropy", generator)
    buffers = {}

    def out(row, column):
        shapes = parameter_shapes(architecture)
        sizes = [torch.Size(shapes[name]).numel() for name in (row, column)]
        return buffers.setdefault((row, column), torch.full(sizes, float("nan"), dtype=torch.float64))

    pair = ("W_Q", "W_1")
    blocks = closed_form_blocks(*case, architecture, pairs=[pair], out=out)
    assert blocks[pair] is buffers[pair]
    assert torch.equal(blocks[pair], closed_form_blocks(*case, architecture, pairs=[pair])[pair])


def test_what_is_covered():
    base = {"image_size": 4, "channels": 1, "patch": 2, "classes": 3, "d_V": 6, "d_ff": 5}
    assert covers(Architecture(**base), "cross_entropy")
    assert covers(Architecture(**base, bias=True, output_projection=False, positions="learned", d_K=2), "mse")
    assert not covers(Architecture(**base), "hinge")
    for variant in ({"depth": 2}, {"heads": 2}, {"norm": "pre"}, {"mask": "causal"}, {"activation": "gelu"}):
        assert not covers(Architecture(**base, **variant), "cross_entropy")


def test_illegal_requests_are_named(generator):
    architecture = ARCHITECTURES["plain"]
    case = problem(architecture, "cross_entropy", generator)
    with pytest.raises(ValueError, match="no closed form"):
        closed_form_blocks(*case, architecture, loss="hinge")
    with pytest.raises(ValueError, match="unknown blocks W_3"):
        closed_form_blocks(*case, architecture, pairs=[("W_1", "W_3")])
    with pytest.raises(ValueError, match=r"ask for \(W_Q, W_1\)"):
        closed_form_blocks(*case, architecture, pairs=[("W_1", "W_Q")])
    for rows in (slice(3, 3), slice(0, 10_000), slice(0, 4, 2)):
        with pytest.raises(ValueError, match=r"rows of \(W_1, W_2\)"):
            closed_form_blocks(*case, architecture, pairs=[("W_1", "W_2")], rows={("W_1", "W_2"): rows})
    with pytest.raises(ValueError, match="not among the pairs"):
        closed_form_blocks(*case, architecture, pairs=[("W_1", "W_2")], rows={("W_1", "W_1"): slice(0, 1)})
