"""The network head: a bag of small networks trained by AdamW."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from kapsi.expansion import Expansion
from kapsi.function import option
from kapsi.hidden_layers import Layers
from kapsi.modules import Model, scale_last_layer
from kapsi.process import Clamp
from kapsi.recipes.base import CrossFit, Fold, HeadRecipe, RecipeData, row_losses
from kapsi.recipes.constant import ConstantHead
from kapsi.recipes.mixture import mixture
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec
from kapsi.training.ensembles import Ensemble, Schedule
from kapsi.training.threads import threads_for

__all__ = ["NetworkHead"]

HIDDEN = LayerSpec((HeadSpec(bias=True, init="xavier_uniform"),), output=("silu",))  # type: ignore[arg-type]

MANY_ROWS = 5_000
"""Rows above which two decays are tried, and a single network in each fold."""

MAX_DEVIATION = 5.0
"""Standard deviations that inputs are clamped to: a few far values would lead the training."""

CHUNK = 4_096
"""Rows evaluated at once."""

TOGETHER = 24
"""Networks that take hardly more time together than one: a comparison trains all at once up to this number."""

EPOCHS = 40
"""Epochs of up to 2,000 rows. Spiral of 600 rows, accuracy: 0.990 with 50, 0.972 with 35; noisy tables prefer a stronger decay."""


@dataclass(frozen=True)
class NetworkHead(HeadRecipe, name="network"):
    """A bag of small networks: f(x) = (1/K) Σ_k ⟨κ_k(x), ψ(w_k)⟩ + b_k, κ_k the hidden layers of a network.

    Inputs are clamped to the range of the training rows, at most five standard deviations. Trained by AdamW with decoupled
    weight decay, a fixed number of steps with a cosine schedule, and no early stopping, so that all rows are used. All folds,
    decays and networks of a comparison are trained at once, in float32; the model is in float64.

    Args:
        widths: widths of the hidden layers.
        layers: the hidden layers, one for each width, or one for all.
        decay: weight decay, 0 to 100; None: chosen by `cross_fit` from the held-out rows.
        networks: number of networks K.
        epochs: passes over the rows; None: 40, fewer above 2,000 rows.

    Source: Loshchilov, Hutter: Decoupled Weight Decay Regularization, ICLR 2019.

    Example:
        >>> import torch, kapsi as kp
        >>> from kapsi.recipes import RecipeData
        >>> x = torch.randn(200, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> data = RecipeData(x, x[:, :1] * x[:, 1:], kp.MSE(), 0, torch.ones(2, dtype=torch.bool))
        >>> model = NetworkHead(decay=0.1, networks=2).fit(data)
        >>> len(model.layers), bool((model(x) - data.y).square().mean() < 0.1)
        (1, True)
    """

    complexity: ClassVar[int] = 6
    examples = ({}, {"widths": (8,), "decay": 0.1, "networks": 2})

    searched = (("widths", ((32, 32), (16,), (64,), (64, 64))), ("networks", (4, 8)))

    widths: tuple[int, ...] = option((32, 32), minimum=1)
    layers: tuple[LayerSpec, ...] = (HIDDEN,)
    decay: float | None = option(None, minimum=0.0, maximum=100.0)
    networks: int = option(4, minimum=1, maximum=64)
    epochs: int | None = option(None, minimum=1)

    decays: ClassVar[tuple[float, ...]] = (3.0, 1.0, 0.3, 0.03)
    """Candidates for the decay, strong ones first."""

    def check(self) -> None:
        Layers(self.widths, self.layers)

    def seconds(self, rows: int, inputs: int, outputs: int) -> float:
        # A comparison trains half as many networks more in a fold as a fit has.
        sizes = (inputs, *self.widths, outputs)
        weights = sum(a * b for a, b in pairwise(sizes))
        schedule = self._schedule(rows)
        steps = schedule.epochs * math.ceil(rows / schedule.batch)
        return steps * (2e-4 + 1.5 * self.networks * schedule.batch * (3e-10 * weights + 3e-9 * sum(sizes)))

    def memory(self, data: RecipeData, rows: int) -> int:
        sizes = (data.x.shape[1], *self.widths, data.outputs)
        weights, batch = sum(a * b for a, b in pairwise(sizes)), self._schedule(rows).batch
        # A weight with gradient and two moments, and the values of a batch with their gradients, in float32.
        return max(TOGETHER, self.networks) * (16 * weights + 8 * batch * sum(sizes))

    def fit(self, data: RecipeData, seed: int = 0) -> Model:
        recipe = self if self.decay is not None else self.cross_fit(data, data.folds(5), seed).recipe
        rows = torch.arange(len(data.x))
        bag = _Bag(recipe, data, seed)  # type: ignore[arg-type]
        bag.train([(rows, recipe.decay, k) for k in range(self.networks)])  # type: ignore[attr-defined]
        low, high = _range(data.x)
        models = [bag.head(number, low, high) for number in bag.finite()]
        if not models:
            return ConstantHead().fit(data, seed)
        return mixture(models, [1 / len(models)] * len(models))

    def cross_fit(self, data: RecipeData, folds: Sequence[Fold], seed: int = 0) -> CrossFit:
        start = time.perf_counter()
        many = len(data.x) > MANY_ROWS
        decays = (self.decay,) if self.decay is not None else self.decays[2:] if many else self.decays
        count = min(self.networks, 1 if many else 3)
        together = len(decays) == 1 or count * len(folds) * len(decays) <= TOGETHER
        first = _HeldOut(self, data, folds, seed, decays, range(count if together else 1))
        losses = [first.loss(i) for i in range(len(decays))]
        best = min(range(len(decays)), key=lambda i: losses[i])
        outputs, further = first.outputs[best], count - 1
        if further > 0 and not together:
            more = _HeldOut(self, data, folds, seed, decays[best : best + 1], range(1, 1 + further))
            outputs = (outputs + further * more.outputs[0]) / (1 + further)
        return CrossFit(outputs, replace(self, decay=decays[best]), time.perf_counter() - start)

    def _schedule(self, rows: int) -> Schedule:
        batch = min(256, max(16, 2 ** round(math.log2(max(1, rows) / 8))))
        epochs = self.epochs or max(3, round(EPOCHS * min(1.0, (2_000 / max(1, rows)) ** 0.5)))
        return Schedule(epochs, batch, 0.03 * (batch / 64) ** 0.5)


class _Bag:
    """Networks on the same rows of inputs.

    Args:
        recipe: the recipe.
        data: the rows.
        seed: seed of initial values and of the order of rows.
    """

    def __init__(self, recipe: NetworkHead, data: RecipeData, seed: int) -> None:
        self.recipe, self.data, self.seed = recipe, data, seed
        self.spec = ModelSpec(
            (data.x.shape[1], *recipe.widths, data.outputs),
            (*_repeated(recipe), LayerSpec((HeadSpec(bias=True, init="xavier_uniform"),))),
        )

    def train(self, plan: Sequence[tuple[Tensor, float | None, int]]) -> None:
        """Train a network for each (rows, decay, number); equal numbers have equal initial values."""
        numbers = {number for _, _, number in plan}
        seeds = {number: (self.seed * 1_000_003 + number) % 2**62 for number in numbers}
        initial = {k: Model(self.spec, seed=seeds[k], dtype=torch.float32) for k in numbers}
        for model in initial.values():
            scale_last_layer(model, 0.1)
        data, rows = self.data, [part for part, _, _ in plan]
        schedule = self.recipe._schedule(max(map(len, rows)))
        self.ensemble = Ensemble([initial[number] for _, _, number in plan])
        with threads_for(len(plan) * schedule.batch * max(data.x.shape[1], *self.recipe.widths)):
            self.ensemble.train(
                data.x.clamp(-MAX_DEVIATION, MAX_DEVIATION).float(),
                data.y if data.classes else data.y.float(),
                rows,
                data.loss,
                schedule,
                weight=None if data.weight is None else data.weight.float(),
                decay=[decay or 0.0 for _, decay, _ in plan],
                seed=seeds[min(numbers)],
            )

    def finite(self) -> list[int]:
        """Return the positions of networks with finite weights."""
        return self.ensemble.finite().nonzero()[:, 0].tolist()

    @torch.no_grad()
    def head(self, position: int, low: Tensor, high: Tensor) -> Model:
        """Return a network as one head in float64, with inputs clamped to a range."""
        network = self.ensemble.member(position)
        kappa: Expansion = Layers(self.recipe.widths, _repeated(self.recipe))
        head = HeadSpec(kappa, bias=True, before=(Clamp(),))
        spec = ModelSpec((self.spec.widths[0], self.spec.widths[-1]), (LayerSpec((head,)),))
        model = Model(spec, device="meta", dtype=torch.float64).to_empty(device="cpu")
        last = len(self.recipe.widths)
        state = {}
        for name, tensor in network.state_dict().items():
            inside = name.startswith(f"layers.{last}.heads.0.")
            renamed = name.replace(f"layers.{last}.", "layers.0.") if inside else f"layers.0.heads.0.kappa.model.{name}"
            state[renamed] = tensor.double()
        state |= {"layers.0.heads.0.before.0.low": low, "layers.0.heads.0.before.0.high": high}
        model.load_state_dict(state)
        return model.eval()


class _HeldOut:
    """Outputs for held-out rows of networks for several decays.

    Attributes:
        outputs: for each decay the mean of the networks with finite weights, `(rows, n)` in float64; NaN for other rows.
    """

    def __init__(
        self,
        recipe: NetworkHead,
        data: RecipeData,
        folds: Sequence[Fold],
        seed: int,
        decays: Sequence[float],
        numbers: Sequence[int],
    ) -> None:
        self.data = data
        bag = _Bag(recipe, data, seed)
        bag.train([(train, decay, number) for decay in decays for train, _ in folds for number in numbers])
        shape = (len(decays), len(data.x), data.outputs)
        self.outputs = torch.full(shape, torch.nan, dtype=torch.float64)
        finite = bag.ensemble.finite()
        with torch.no_grad():
            for f, (train, test) in enumerate(folds):
                low, high = _range(data.x[train])
                x = data.x[test].clamp(low, high).float()
                chunks = (bag.ensemble.outputs(part.expand(len(finite), -1, -1)) for part in x.split(CHUNK))
                out = torch.cat(tuple(chunks), 1).double()
                for d in range(len(decays)):
                    at = slice((d * len(folds) + f) * len(numbers), (d * len(folds) + f + 1) * len(numbers))
                    if finite[at].any():
                        self.outputs[d, test] = out[at][finite[at]].mean(0)
                    else:
                        self.outputs[d, test] = ConstantHead().fit(data.take(train))(data.x[test])

    def loss(self, number: int) -> float:
        """Return the mean loss of the held-out rows with a decay."""
        outputs = self.outputs[number]
        known = ~outputs.isnan().any(1)
        weight = torch.ones(len(known), dtype=torch.float64) if self.data.weight is None else self.data.weight
        values = row_losses(outputs[known], self.data.y[known], self.data.loss)
        return float((weight[known] * values).sum() / weight[known].sum())


def _range(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the range that inputs are clamped to, `(m,)` each."""
    low, high = x.aminmax(dim=0)
    return low.clamp_min(-MAX_DEVIATION), high.clamp_max(MAX_DEVIATION)


def _repeated(recipe: NetworkHead) -> tuple[LayerSpec, ...]:
    """Return the specification of each hidden layer."""
    return recipe.layers * len(recipe.widths) if len(recipe.layers) == 1 else recipe.layers
