"""Training of many small networks of one specification at once, each on rows of its own, in batched tensors.

Small networks take most of their time in Python: thirty networks at once take about four times the time of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from kapsi.errors import SpecError
from kapsi.expansion import Identity
from kapsi.modules import Layer, Model
from kapsi.process import Activation
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
        self.trained = {name for name, _ in first.named_parameters()}
        self.tensors = {name: torch.stack([state[name] for state in states]) for name in states[0]}
        self.layers = [_plain(i, layer) or _mapped(i, layer) for i, layer in enumerate(first.check_layers("Ensemble"))]

    def outputs(self, x: Tensor) -> Tensor:
        """Return the outputs of all networks, `(E, rows, n)`, for inputs of each, `(E, rows, m)`."""
        for layer in self.layers:
            x = layer(self.tensors, x)
        return x

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
        parameters = [self.tensors[name].requires_grad_() for name in sorted(self.trained)]
        matrices = [tensor for tensor in parameters if tensor.dim() > 2]
        factors = x.new_tensor(list(decay) or [0.0] * len(self.models))
        optimizer = torch.optim.AdamW(parameters, lr=0.0, betas=BETAS, weight_decay=0.0, fused=True)
        steps = schedule.epochs * _steps(rows, schedule.batch)
        for step, index in enumerate(_batches(rows, schedule, seed)):
            rate = schedule.learning_rate * _share_of_rate((step + 0.5) / steps)
            optimizer.param_groups[0]["lr"] = rate
            outputs = self.outputs(x[index]).flatten(0, 1)
            flat = index.flatten()
            values = loss.rows(outputs, y[flat]) if weight is not None else None
            mean = loss.mean(outputs, y[flat]) if values is None else _weighted(values, cast(Tensor, weight)[flat])
            optimizer.zero_grad()
            (mean * len(self.models)).backward()
            with torch.no_grad():
                for tensor in matrices:
                    tensor.mul_((1 - rate * factors).clamp_min(0).view(-1, *[1] * (tensor.dim() - 1)))
            optimizer.step()
        for tensor in parameters:
            tensor.requires_grad_(False).grad = None

    def finite(self) -> Tensor:
        """Return whether all tensors of a network are finite, `(E,)`."""
        return torch.stack([tensor.flatten(1).isfinite().all(1) for tensor in self.tensors.values()]).all(0)

    def member(self, number: int) -> Model:
        """Return a network with its trained values."""
        model = self.models[number]
        model.load_state_dict({name: tensor[number] for name, tensor in self.tensors.items()})
        return model


def _weighted(values: Tensor, weight: Tensor) -> Tensor:
    return ((values if values.dim() == 1 else values.mean(1)) * weight).mean()


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


def _plain(number: int, layer: Layer) -> _BatchedLayer | None:
    """Return the call of a stacked layer of matrices and activations as batched products; None for other layers.

    `vmap` takes 1.5 ms longer for two layers, half the time of a step.
    """
    head = layer.check_heads("Ensemble")[0]
    spec = head.spec
    same = type(spec.expansion) is Identity and type(spec.reconciliation) is Dense and spec.remainder == ZeroRemainder()
    steps = [step for step in layer.spec.output if isinstance(step, Activation)]
    if not same or len(layer.heads) > 1 or spec.channels > 1 or spec.before or spec.after or not spec.bias:
        return None
    if len(steps) < len(layer.spec.output):
        return None
    name = f"layers.{number}.heads.0"

    def call(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        y = torch.baddbmm(tensors[f"{name}.bias"].unsqueeze(1), x, tensors[f"{name}.psi.matrix"].mT)
        for step in steps:
            y = step(y)
        return y

    return call


def _mapped(number: int, layer: Layer) -> _BatchedLayer:
    """Return the call of a stacked layer by `vmap`."""
    prefix = f"layers.{number}."

    def one(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        return cast(Tensor, functional_call(layer, tensors, (x,)))

    def call(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        return vmap(one)(own, x)

    return call
