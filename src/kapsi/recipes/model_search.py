"""The recipe of a search over given models for small tables: penalties, folds, the one-standard-error rule."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kapsi.calibrate import calibrate
from kapsi.errors import DataError, SpecError
from kapsi.expansion import Nystrom, Taylor
from kapsi.function import Spec, option
from kapsi.modules import Model, scale_last_layer
from kapsi.recipes.base import CrossFit, Fold, HeadRecipe, RecipeData, row_losses
from kapsi.recipes.function_search import network_head
from kapsi.spec import ModelSpec, rpn
from kapsi.training.config import TrainConfig
from kapsi.training.engine import train
from kapsi.training.records import Epoch
from kapsi.training.selection import clearly_worse
from kapsi.training.solvers import LBFGS
from kapsi.training.threads import threads_for

__all__ = ["ModelCandidate", "ModelSearch", "SelectionRule"]

TRAINING = TrainConfig(solver=LBFGS(tolerance=1e-4), epochs=10)


def _read_training(value: Any, where: str) -> Any:
    """Return plain options of a training, with L-BFGS if no solver is given."""
    return {"solver": "lbfgs", **value} if isinstance(value, Mapping) else value


@dataclass(frozen=True, kw_only=True)
class ModelCandidate(Spec):
    """A model with several L2 penalties, each a candidate.

    Args:
        name: name in the results.
        model: specification; widths at the ends may be null.
        training: training options; L-BFGS if left out. Null: those of the search.
        penalties: L2 penalties, from strong to weak; none: the penalty of the training.
    """

    name: str
    model: ModelSpec
    training: TrainConfig | None = option(None, read=_read_training)
    penalties: tuple[float, ...] = ()

    def check(self) -> None:
        if any(not 0 <= penalty <= 1e12 for penalty in self.penalties):
            raise SpecError(f"penalties: expected numbers of at least 0, got {list(self.penalties)}")

    @property
    def config(self) -> TrainConfig:
        """The training; known in a search."""
        return self.training or TRAINING

    @property
    def label(self) -> str:
        """Name with the penalty."""
        return self.name + ("" if self.config.l2 is None else f", penalty {self.config.l2:g}")

    def each(self) -> Iterator[ModelCandidate]:
        """Yield a candidate for each penalty."""
        for penalty in self.penalties or (self.config.l2,):
            yield replace(self, penalties=(), training=replace(self.config, l2=penalty))


class StandardizedFit:
    """A candidate on standardized inputs, calibrated and not yet trained.

    Args:
        candidate: model and training, with a single penalty.
        data: training rows.
        seed: seed of initial values and the training.
    """

    def __init__(self, candidate: ModelCandidate, data: RecipeData, seed: int) -> None:
        x = data.x.numpy()  # NumPy's sums: stored results depend on their last bits
        scale = torch.from_numpy(x.std(0))
        self.center, self.scale = torch.from_numpy(x.mean(0)), torch.where(scale > 0, scale, 1.0)
        inputs = (data.x - self.center) / self.scale
        spec = candidate.model.sized(data.x.shape[1], data.outputs)
        self.model = calibrate(Model(spec, seed=seed, dtype=torch.float64), inputs, data.y)
        if data.classes:
            scale_last_layer(self.model)
        rows = (inputs, data.y) if data.weight is None else (inputs, data.y, data.weight)
        config = replace(candidate.config, seed=seed, loss=data.loss)
        self.epochs: Iterator[Epoch] = train(self.model, rows, config)

    def trained(self) -> StandardizedFit:
        """Train to the last epoch."""
        for _ in self.epochs:
            pass
        return self

    @torch.no_grad()
    def outputs(self, x: Tensor) -> Tensor:
        """Return the outputs `(rows, n)` for inputs."""
        outputs: Tensor = self.model.eval()((x - self.center) / self.scale)
        return outputs


@dataclass(frozen=True)
class SelectionRule(Spec):
    """Rule for selecting a candidate.

    Args:
        by: criterion on the held-out rows: the loss, or the accuracy of classes.
        rule: `one_standard_error`, the first candidate not significantly worse than the best; `best`.
    """

    by: Literal["log_loss", "accuracy"] = "log_loss"
    rule: Literal["one_standard_error", "best"] = "one_standard_error"

    def index(self, outputs: Sequence[Tensor], data: RecipeData) -> int:
        """Return the index of the selected candidate, by outputs for held-out rows; the mean loss of a candidate counts as
        worse if it exceeds the lowest by more than one standard error of the row-wise difference.
        """
        known = ~outputs[0].isnan().any(1)
        y = data.y[known]
        weight = 1.0 if data.weight is None else data.weight[known]
        if self.by == "accuracy":
            losses = [weight * (out[known].argmax(1) != y).double() for out in outputs]
        else:
            losses = [weight * row_losses(out[known], y, data.loss) for out in outputs]
        lowest = min(losses, key=lambda values: float(values.mean()))
        if self.rule == "best":
            return next(i for i, values in enumerate(losses) if values is lowest)
        return next(i for i, values in enumerate(losses) if not clearly_worse(values, lowest))


@dataclass(frozen=True, kw_only=True)
class ModelSearch(HeadRecipe, name="model_search"):
    """The model f(x) selected among specifications and L2 penalties by folds, fitted to all rows.

    The recipe of the paper's small tables. Inputs are standardized in every fit. Candidates are ordered from simple to flexible,
    and penalties from strong to weak, to discount random differences; each fit ends after the last epoch.

    Args:
        candidates: the candidates. Default: linear, kernel and quadratic models.
        training: training of candidates without their own; L-BFGS if left out.
        rule: rule of the selection.
        folds: number of folds of `fit`.

    Source: Breiman, Friedman, Olshen and Stone, Classification and Regression Trees (1984), for the rule.

    Example:
        >>> import torch, kapsi as kp
        >>> from kapsi.recipes import ModelCandidate, ModelSearch, RecipeData
        >>> x = torch.linspace(-1, 1, 60, dtype=torch.float64).unsqueeze(1)
        >>> data = RecipeData(x, (x[:, 0].abs() > 0.5).long(), kp.CrossEntropy(), 2, torch.ones(1, dtype=torch.bool))
        >>> model = ModelSearch(folds=3).fit(data)
        >>> bool((model(x).argmax(1) == data.y).double().mean() > 0.95)
        True
    """

    complexity: ClassVar[int] = 6
    examples = ({}, {"candidates": ({"name": "linear", "model": {"widths": [None, None]}, "penalties": [0.1, 0.01]},)})

    candidates: tuple[ModelCandidate, ...] = (
        ModelCandidate(name="linear", model=rpn((None, None), bias=True), penalties=(0.01,)),
        ModelCandidate(
            name="kernel",
            model=rpn((None, None), Nystrom(count=60), remainder="linear", bias=True),
            penalties=(0.1, 0.01),
        ),
        ModelCandidate(
            name="quadratic",
            model=rpn((None, None), Taylor(symmetric=True), remainder="linear", bias=True),
            penalties=(1e-3, 1e-5),
        ),
    )
    training: TrainConfig = option(TRAINING, read=_read_training)
    rule: SelectionRule = SelectionRule()
    folds: int = option(10, minimum=2)

    def check(self) -> None:
        names = [entry.name for entry in self.candidates]
        if not names or len(set(names)) != len(names):
            raise SpecError(
                f"candidates: expected at least one, with different names, got {', '.join(names) or 'none'}"
            )
        filled = tuple(replace(c, training=c.training or self.training) for c in self.candidates)
        object.__setattr__(self, "candidates", filled)

    @classmethod
    def offered(cls) -> tuple[HeadRecipe, ...]:
        return ()  # by request: other heads have these functions with finer penalties

    def label(self) -> str:
        return f"{self.name}({', '.join(candidate.name for candidate in self.candidates)})"

    def expanded(self) -> list[ModelCandidate]:
        """Return every model with every penalty."""
        return [each for candidate in self.candidates for each in candidate.each()]

    def reason_against(self, data: RecipeData) -> str | None:
        for candidate in self.candidates:
            try:
                candidate.model.sized(data.x.shape[1], data.outputs)
            except (SpecError, DataError) as error:
                raise SpecError(f"candidates.{candidate.name}.model: {error}") from None
        return None

    def fit(self, data: RecipeData, seed: int = 0) -> Model:
        self.reason_against(data)
        recipe = self if len(self.expanded()) == 1 else self.cross_fit(data, data.folds(self.folds), seed).recipe
        (candidate,) = recipe.expanded()  # type: ignore[attr-defined]
        with threads_for(0):
            fit = StandardizedFit(candidate, data, seed).trained()
        low, high = data.x.aminmax(dim=0)
        return network_head(fit.model, low, high, (fit.center, fit.scale))

    def cross_fit(self, data: RecipeData, folds: Sequence[Fold], seed: int = 0) -> CrossFit:
        start = time.perf_counter()
        candidates = self.expanded()
        outputs = [data.x.new_full((len(data.x), data.outputs), torch.nan) for _ in candidates]
        with threads_for(0):
            for rows, test in folds:
                part = data.take(rows)
                for candidate, out in zip(candidates, outputs, strict=True):
                    out[test] = StandardizedFit(candidate, part, seed).trained().outputs(data.x[test])
        chosen = self.rule.index(outputs, data)
        recipe = replace(self, candidates=(candidates[chosen],))
        return CrossFit(outputs[chosen], recipe, time.perf_counter() - start)
