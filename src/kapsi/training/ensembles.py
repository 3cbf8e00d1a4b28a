"""Training of many small networks of one specification at once, each on rows of its own, in batched tensors.

Small networks take most of their time in Python: thirty networks at once take about four times the time of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from kapsi.errors import SpecError
from kapsi.expansion import Identity
from kapsi.modules import Layer, Model
from kapsi.process import Activation, SiLU
from kapsi.reconciliation import Dense
from kapsi.remainder import ZeroRemainder
from kapsi.training.losses import Loss

__all__ = ["Ensemble", "Schedule"]

WARM_UP = 0.1
"""Share of the steps in which the learning rate rises from 0."""

BETAS = (0.9, 0.95)
"""Decay rates of the moments of AdamW; a short memory of squares suits a few hundred steps."""


@dataclass(frozen=True)
class Schedule:
    """Length and learning rate of a training run.

    Args:
        epochs: passes over the rows.
        batch: rows of each network in a step.
        learning_rate: highest learning rate: it rises linearly in the first tenth of the steps, and falls as a cosine to 0.
    """

    epochs: int
    batch: int
    learning_rate: float


class Ensemble:
    """Networks of one specification whose tensors are stacked along a leading axis E.

    Args:
        models: the networks, of one specification and type, without frozen parameters.

    Raises:
        SpecError: different specifications.

    Example:
        >>> import torch, kapsi as kp
        >>> models = [kp.Model(kp.rpn([2, 8, 1], bias=True, output="silu"), seed=seed) for seed in range(3)]
        >>> together, x = Ensemble(models), torch.rand(5, 2)
        >>> torch.allclose(together.outputs(x.expand(3, 5, 2))[1], models[1](x), atol=1e-6)
        True
    """

    def __init__(self, models: Sequence[Model]) -> None:
        first = models[0]
        if any(model.spec != first.spec for model in models):
            raise SpecError("Ensemble: expected models of one specification")
        self.models = list(models)
        states = [model.state_dict() for model in models]
        self.trained = sorted(name for name, _ in first.named_parameters())
        self.tensors = {name: torch.stack([state[name] for state in states]) for name in states[0]}
        self.layers = [
            _Plain.of(i, layer) or _mapped(i, layer) for i, layer in enumerate(first.check_layers("Ensemble"))
        ]

    def outputs(self, x: Tensor) -> Tensor:
        """Return the outputs of all networks, `(E, rows, n)`, for inputs of each, `(E, rows, m)`."""
        for layer in self.layers:
            x = layer(self.tensors, x)
        return x

    @torch.no_grad()
    def train(
        self,
        x: Tensor,
        y: Tensor,
        rows: Sequence[Tensor],
        loss: Loss,
        schedule: Schedule,
        *,
        weight: Tensor | None = None,
        decay: Sequence[float] = (),
        seed: int = 0,
    ) -> None:
        """Train all networks by AdamW, in place.

        Args:
            x: inputs of all rows, `(rows, m)`, in the type of the models.
            y: targets or class labels of all rows.
            rows: indices of the training rows of each network.
            loss: the loss.
            schedule: length and learning rate.
            weight: weights of the rows, with mean 1.
            decay: weight decay of each network, of tensors other than biases; none by default.
            seed: seed of the order of rows.
        """
        count = len(self.models)
        sizes = [self.tensors[name][0].numel() for name in self.trained]
        flat = torch.cat([self.tensors[name].flatten(1) for name in self.trained], 1)
        self._view(flat, sizes)
        factors = x.new_tensor(list(decay) or [0.0] * count)[:, None]
        matrices = torch.cat([x.new_full((size,), float(self.tensors[n].dim() > 2)) for n, size in self._sized(sizes)])
        factors = factors * matrices
        optimizer = _AdamW(flat, factors)
        plain = all(isinstance(layer, _Plain) for layer in self.layers)
        gradients = self._by_hand if plain else self._by_autograd
        steps = schedule.epochs * _steps(rows, schedule.batch)

        def objective(outputs: Tensor, index: Tensor) -> Tensor:
            outputs, at = outputs.flatten(0, 1), index.flatten()
            if weight is None:
                return loss.mean(outputs, y[at]) * count
            values = loss.rows(outputs, y[at])
            return ((values if values.dim() == 1 else values.mean(1)) * weight[at]).mean() * count

        def derivative(outputs: Tensor, index: Tensor) -> Tensor:
            if not loss.has_curvature:
                return _slope(partial(objective, index=index), outputs)
            at = index.flatten()
            slope = loss.diagonal_curvature(outputs.flatten(0, 1), y[at])[0] * (1 / index.shape[1])
            return (slope if weight is None else slope * weight[at, None]).view(outputs.shape)

        for step, index in enumerate(_batches(rows, schedule, seed)):
            rate = schedule.learning_rate * _share_of_rate((step + 0.5) / steps)
            function = derivative if plain else objective
            gradient = gradients(flat, sizes, x[index], partial(function, index=index))
            optimizer.step(gradient, rate)
        self.tensors |= {name: self.tensors[name].clone() for name in self.trained}

    def _sized(self, sizes: Sequence[int]) -> Iterator[tuple[str, int]]:
        return zip(self.trained, sizes, strict=True)

    def _view(self, flat: Tensor, sizes: Sequence[int]) -> None:
        """Let the trained tensors be parts of one tensor `(E, parameters)`."""
        for (name, _), part in zip(self._sized(sizes), flat.split(list(sizes), 1), strict=True):
            self.tensors[name] = part.view(self.tensors[name].shape)

    def _by_autograd(
        self, flat: Tensor, sizes: Sequence[int], x: Tensor, objective: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the gradient of all trained tensors, `(E, parameters)`."""
        with torch.enable_grad():
            leaf = flat.detach().requires_grad_()
            self._view(leaf, sizes)
            (gradient,) = torch.autograd.grad(objective(self.outputs(x)), leaf)
        self._view(flat, sizes)
        return gradient

    def _by_hand(self, flat: Tensor, sizes: Sequence[int], x: Tensor, derivative: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the same for plain layers and the derivative of the objective: autograd takes half the time of a step."""
        layers = cast(list[_Plain], self.layers)
        inputs, products = [x], []
        for layer in layers:
            products.append(layer.product(self.tensors, inputs[-1]))
            inputs.append(layer.activate(products[-1]))
        slope = derivative(inputs[-1])
        parts: dict[str, Tensor] = {}
        for i in reversed(range(len(layers))):
            slope = layers[i].back(products[i], slope)
            parts[layers[i].matrix] = torch.bmm(slope.mT, inputs[i])
            parts[layers[i].bias] = slope.sum(1)
            slope = torch.bmm(slope, self.tensors[layers[i].matrix]) if i else slope
        return torch.cat([parts[name].flatten(1) for name in self.trained], 1)

    def finite(self) -> Tensor:
        """Return whether all tensors of a network are finite, `(E,)`."""
        return torch.stack([tensor.flatten(1).isfinite().all(1) for tensor in self.tensors.values()]).all(0)

    def member(self, number: int) -> Model:
        """Return a network with its trained values."""
        model = self.models[number]
        model.load_state_dict({name: tensor[number] for name, tensor in self.tensors.items()})
        return model


class _AdamW:
    """AdamW without the optimizer of PyTorch, whose first step imports the compiler, a second of time.

    Args:
        values: the parameters, changed in place.
        decay: decay of each.
    """

    def __init__(self, values: Tensor, decay: Tensor) -> None:
        self.values, self.decay, self.most = values, decay, float(decay.max())
        self.first, self.second, self.steps = torch.zeros_like(values), torch.zeros_like(values), 0

    def step(self, gradient: Tensor, rate: float) -> None:
        """Change the parameters, for a learning rate."""
        self.steps += 1
        self.first.lerp_(gradient, 1 - BETAS[0])
        self.second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        first, second = (1 - beta**self.steps for beta in BETAS)
        root = math.sqrt(second)
        below = self.second.sqrt().add_(1e-8 * root)
        if rate * self.most <= 1:
            self.values.addcmul_(self.values, self.decay, value=-rate)
        else:
            self.values.mul_((1 - rate * self.decay).clamp_min_(0))
        self.values.addcdiv_(self.first, below, value=-rate * root / first)


def _share_of_rate(share: float) -> float:
    """Return the learning rate at a share of the steps, relative to the highest."""
    if share < WARM_UP:
        return share / WARM_UP
    return (1 + math.cos(math.pi * (share - WARM_UP) / (1 - WARM_UP))) / 2


def _steps(rows: Sequence[Tensor], batch: int) -> int:
    """Return the steps of an epoch."""
    return max(1, math.ceil(max(map(len, rows)) / batch))


def _batches(rows: Sequence[Tensor], schedule: Schedule, seed: int) -> Iterator[Tensor]:
    """Yield indices of rows `(E, batch)`: each network sees its rows in random order; short ones begin again."""
    generator = torch.Generator().manual_seed(seed)
    steps = _steps(rows, schedule.batch)
    size = math.ceil(max(map(len, rows)) / steps)
    for _ in range(schedule.epochs):
        orders = []
        for own in rows:
            order = own[torch.randperm(len(own), generator=generator)]
            orders.append(order.repeat(math.ceil(steps * size / len(own)))[: steps * size])
        yield from torch.stack(orders).split(size, 1)


_BatchedLayer = Callable[[dict[str, Tensor], Tensor], Tensor]


@dataclass(frozen=True)
class _Plain:
    """A stacked layer of matrices and activations, as batched products.

    `vmap` takes 1.5 ms longer for two layers, half the time of a step.

    Args:
        matrix, bias: names of the tensors.
        steps: the activations.
    """

    matrix: str
    bias: str
    steps: tuple[Activation, ...]

    @classmethod
    def of(cls, number: int, layer: Layer) -> _Plain | None:
        """Return the call of a layer; None for other layers."""
        head = layer.check_heads("Ensemble")[0]
        spec = head.spec
        same = type(spec.expansion) is Identity and type(spec.reconciliation) is Dense
        steps = tuple(step for step in layer.spec.output if isinstance(step, Activation))
        if not same or spec.remainder != ZeroRemainder() or len(steps) < len(layer.spec.output):
            return None
        if len(layer.heads) > 1 or spec.channels > 1 or spec.before or spec.after or not spec.bias:
            return None
        name = f"layers.{number}.heads.0"
        return cls(f"{name}.psi.matrix", f"{name}.bias", steps)

    def __call__(self, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        return self.activate(self.product(tensors, x))

    def product(self, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        """Return the outputs before the activations."""
        return torch.baddbmm(tensors[self.bias].unsqueeze(1), x, tensors[self.matrix].mT)

    def back(self, y: Tensor, slope: Tensor) -> Tensor:
        """Return the gradient of the outputs before the activations, for that of those after."""
        if self.steps == (SiLU(),):
            return cast(Tensor, torch.ops.aten.silu_backward(slope, y))
        # With a gradient of the outputs, autograd would import SymPy.
        return slope * _slope(lambda y: self.activate(y).sum(), y) if self.steps else slope

    def activate(self, y: Tensor) -> Tensor:
        """Apply the activations."""
        for step in self.steps:
            y = step(y)
        return y


def _slope(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the gradient of a scalar function of values alone."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(function(x), x)
    return gradient


def _mapped(number: int, layer: Layer) -> _BatchedLayer:
    """Return the call of a stacked layer by `vmap`."""
    prefix = f"layers.{number}."

    def one(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        return cast(Tensor, functional_call(layer, tensors, (x,)))

    def call(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        return vmap(one)(own, x)

    return call
