"""Other programs' ways to the same Hessian, on the model a user would write: torch's fused `layer_norm`.

Each peer prepares once (graph, operator) and then returns columns of the Hessian; `benchmark.py` times and compares
them. Peers outside torch are imported only when asked for (`make bench` installs them beside the environment).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from curvature_gap.architecture import Architecture
from curvature_gap.exact_hessian import exact_hessian
from curvature_gap.shapes import Float, Int
from curvature_gap.vit import ViT, flatten_parameters, sinusoidal_positions, unflatten_parameters


class FusedViT(nn.Module):
    """The one-block post-norm ViT with `torch.nn.functional.layer_norm`: the parameters and the values of `ViT`."""

    def __init__(self, architecture: Architecture, seed: int = 0) -> None:
        super().__init__()
        self.architecture = architecture
        for name, p in ViT(architecture, seed).named_parameters():
            self.register_parameter(name, nn.Parameter(p.detach().clone()))

    def forward(self, images: Float[Tensor, "b c s s"]) -> Float[Tensor, "b k"]:
        w = dict(self.named_parameters())
        a = self.architecture
        patches = functional.unfold(images, a.patch, stride=a.patch).transpose(1, 2)
        X = functional.linear(patches, w["embed"].T, w.get("embed_bias"))
        if a.positions == "learned":
            X = X + w["positions"]
        elif a.positions == "sinusoidal":
            X = X + sinusoidal_positions(a.n_tokens, a.d_V).to(X)
        scores = (X @ w["W_Q"]) @ (X @ w["W_K"]).transpose(1, 2) / a.head_d_K**0.5
        F = torch.softmax(scores, dim=-1) @ (X @ w["W_V"])
        if a.output_projection:
            F = F @ w["W_O"]
        Y = functional.layer_norm(X + F, (a.d_V,), w["LN1_gamma"], w["LN1_beta"], a.norm_eps)
        hidden = functional.relu(functional.linear(Y, w["W_1"].T, w.get("b_1")))
        R = Y + functional.linear(hidden, w["W_2"].T, w.get("b_2"))
        Z = functional.layer_norm(R, (a.d_V,), w["LN2_gamma"], w["LN2_beta"], a.norm_eps)
        return functional.linear(Z.mean(dim=1), w["classifier"].T, w.get("classifier_bias"))


@dataclass(frozen=True)
class Problem:
    """One Hessian to compute: the mean cross-entropy of a freshly initialised model on a batch of noise."""

    model: FusedViT
    images: Tensor
    labels: Tensor

    @property
    def architecture(self) -> Architecture:
        return self.model.architecture

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    @property
    def theta(self) -> Float[Tensor, " P"]:
        return flatten_parameters(dict(self.model.named_parameters()), self.architecture).detach()

    def loss(self, theta: Float[Tensor, " P"] | None = None) -> Float[Tensor, ""]:
        """Return the loss at the model's own parameters, or at a vector of parameters."""
        if theta is None:
            logits = self.model(self.images)
        else:
            weights = unflatten_parameters(theta, self.architecture)
            logits = torch.func.functional_call(self.model, weights, (self.images,))
        return functional.cross_entropy(logits, self.labels)


def make_problem(architecture: Architecture, batch: int, dtype: torch.dtype, seed: int = 0) -> Problem:
    """Return the problem drawn from `seed`: the same numbers, up to rounding, in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    size = (batch, architecture.channels, architecture.image_size, architecture.image_size)
    images = torch.randn(size, generator=generator)
    labels = torch.randint(architecture.classes, (batch,), generator=generator)
    return Problem(FusedViT(architecture, seed).to(dtype), images.to(dtype), labels)


Columns = Callable[[Int[Tensor, " k"]], Float[Tensor, "P k"]]
"""Returns the columns of the Hessian with the given indices."""


@dataclass(frozen=True)
class Peer:
    """A way to compute a Hessian. `chunk`: columns per call, None for a method that only gives the whole matrix."""

    name: str
    package: str
    chunk: int | None
    prepare: Callable[[Problem], Columns]


def one_hot(problem: Problem, indices: Int[Tensor, " k"]) -> Float[Tensor, "P k"]:
    """Return the columns of the identity with the given indices."""
    theta = problem.theta
    E = theta.new_zeros(len(theta), len(indices))
    E[indices, torch.arange(len(indices))] = 1
    return E


def split(problem: Problem, v: Float[Tensor, " P"]) -> list[Tensor]:
    """Return a vector cut into the parameters' shapes."""
    parts = v.split([p.numel() for p in problem.parameters])
    return [part.reshape(p.shape) for part, p in zip(parts, problem.parameters, strict=True)]


def join(parts: Any) -> Float[Tensor, " P"]:
    """Return tensors in the parameters' order as one vector."""
    return torch.cat([part.detach().reshape(-1) for part in parts])


def closed_form(problem: Problem) -> Columns:
    """This package's engine, as `exact_hessian` runs it; its model is the `ViT` with the elementary LayerNorm."""
    model = ViT(problem.architecture).to(problem.images.dtype)
    model.load_state_dict(problem.model.state_dict())

    def columns(indices: Tensor) -> Tensor:
        found = exact_hessian(
            model,
            problem.images,
            problem.labels,
            engine="closed_form",
            dtype=problem.images.dtype,
            certify=False,
        )
        assert found.H is not None
        return found.H if len(indices) == len(found.H) else found.H[:, indices]

    return columns


def autograd_loop(problem: Problem) -> Columns:
    """One backward pass per row through a retained graph, started at the row's own block of the gradient."""
    gradient = torch.autograd.grad(problem.loss(), problem.parameters, create_graph=True)
    entries = [(g.reshape(-1), j) for g in gradient for j in range(g.numel())]

    def row(i: int) -> Tensor:
        g, j = entries[i]
        return join(torch.autograd.grad(g[j], problem.parameters, retain_graph=True, materialize_grads=True))

    return lambda indices: torch.stack([row(i) for i in indices.tolist()], dim=1)


def vmap_jvp_grad(problem: Problem) -> Columns:
    """Forward over reverse, several columns at a time."""
    gradient, theta = torch.func.grad(problem.loss), problem.theta

    def product(v: Tensor) -> Tensor:
        return torch.func.jvp(gradient, (theta,), (v,))[1]

    return lambda indices: torch.func.vmap(product, in_dims=1, out_dims=1)(one_hot(problem, indices))


def func_hessian(problem: Problem) -> Columns:
    """`torch.func.hessian`, which is jacfwd(jacrev)."""
    return lambda indices: torch.func.hessian(problem.loss)(problem.theta)[:, indices]


def functional_hessian(problem: Problem) -> Columns:
    """`torch.autograd.functional.hessian` with vmap over its rows."""

    def columns(indices: Tensor) -> Tensor:
        H = torch.autograd.functional.hessian(problem.loss, problem.theta, vectorize=True)
        return H[:, indices]

    return columns


def curvlinops(problem: Problem) -> Columns:
    """`HessianLinearOperator` times columns of the identity."""
    from curvlinops import HessianLinearOperator

    operator = HessianLinearOperator(
        problem.model,
        nn.CrossEntropyLoss(),
        problem.parameters,
        [(problem.images, problem.labels)],
        check_deterministic=False,
    )
    return lambda indices: operator @ one_hot(problem, indices)


def product_loop(problem: Problem, product: Callable[[list[Tensor]], Any]) -> Columns:
    """Return columns by one Hessian–vector product each."""

    def columns(indices: Tensor) -> Tensor:
        E = one_hot(problem, indices)
        return torch.stack([join(product(split(problem, E[:, j]))) for j in range(E.shape[1])], dim=1)

    return columns


def pyhessian(problem: Problem) -> Columns:
    """PyHessian's product on the gradient graph that its `hessian` object keeps."""
    from pyhessian import hessian
    from pyhessian.utils import hessian_vector_product

    kept = hessian(problem.model, nn.CrossEntropyLoss(), data=(problem.images, problem.labels), cuda=False)
    return product_loop(problem, lambda v: hessian_vector_product(kept.gradsH, kept.params, v))


def backpack(problem: Problem) -> Columns:
    """BackPACK's product, given the gradient so that it is not computed again."""
    from backpack.hessianfree.hvp import hessian_vector_product

    parameters, loss = problem.parameters, problem.loss()
    gradient = torch.autograd.grad(loss, parameters, create_graph=True)
    return product_loop(problem, lambda v: hessian_vector_product(loss, parameters, v, grad_params=gradient))


def hessian_eigenthings(problem: Problem) -> Columns:
    """hessian-eigenthings' operator; it builds the graph again for every product."""
    from hessian_eigenthings import HessianOperator

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    operator = HessianOperator(problem.model, [(problem.images, problem.labels)], loss)
    return product_loop(problem, lambda v: [operator.matvec(join(v))])


ENGINE = "closed form"
PEERS = {
    peer.name: peer
    for peer in (
        Peer(ENGINE, "curvature-gap", None, closed_form),
        Peer("autograd loop", "torch", 1, autograd_loop),
        Peer("curvlinops, 16 columns", "curvlinops-for-pytorch", 16, curvlinops),
        Peer("vmap(jvp(grad)), 4 columns", "torch", 4, vmap_jvp_grad),
        Peer("torch.func.hessian", "torch", None, func_hessian),
        Peer("autograd.functional.hessian", "torch", None, functional_hessian),
        Peer("PyHessian", "pyhessian", 1, pyhessian),
        Peer("BackPACK", "backpack-for-pytorch", 1, backpack),
        Peer("hessian-eigenthings", "hessian-eigenthings", 1, hessian_eigenthings),
    )
}
