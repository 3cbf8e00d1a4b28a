"""The base of recipes whose models are linear in their parameters: closed forms and Newton steps for a path of penalties."""

from __future__ import annotations

import copy
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from kapsi.function import option
from kapsi.modules import Head, Model
from kapsi.modules.store import as_generator
from kapsi.recipes.base import CrossFit, Fold, HeadRecipe, RecipeData, row_losses
from kapsi.recipes.fold_newton import fold_newton_path, is_small
from kapsi.recipes.solve import (
    CHUNK,
    CONSTANT,
    MAX_STORED,
    Basis,
    DesignRows,
    correlated_ridge_path,
    leave_one_out,
    newton_path,
    orthogonal_basis,
    ridge_path,
)
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec

__all__ = ["LinearInParameters"]

MAX_PHI = 2**26
"""Values of κ(x) of all rows that are kept in memory: 512 MiB."""

MOST_KEPT = 2**23
"""Values of the coordinates of all rows that are kept for other folds and for the fit: 64 MiB for each head."""

MANY_ROWS = 200
"""DesignRows for each column above which penalties matter little: a third of them is tried."""

STRONG = 30.0
"""Strongest penalty on a path, relative to the largest mean square of a coordinate."""

ROUGH = 1e-3
"""Relative decrease of the loss that ends the Newton steps of a path; the error left is a tenth of it or less."""

STAGES = 4
"""Stronger penalties, by factors of ten, on the way to a given one."""

SAMPLE = 4_000
"""Rows that choose among the candidates, at most."""

SMALL = 30_000
"""Rows times columns up to which held-out rows choose among the candidates themselves, not squares."""

SLIGHT = 0.002
"""Relative gain of held-out loss from which a weaker penalty counts as better."""

WORSE = 3
"""Penalties in a row without gain of held-out loss after which weaker ones are not tried."""


@dataclass(frozen=True)
class LinearInParameters(HeadRecipe):
    """Base of recipes with a dense ψ; a subclass defines `model`, and may define `penalty`, `candidates` and `width`.

    Fits the mean loss plus (l2/2)‖ψ‖²_Q (for `mse` l2‖ψ‖²_Q) with the bias not penalized. Q is the variance of the columns,
    or that of `penalty`, with the trace of the covariance of the columns, so `l2` has no unit.

    Args:
        l2: the penalty λ, 10⁻¹² to 10¹²; None: chosen by the exact leave-one-out error for `mse`, otherwise by five folds;
            `cross_fit` chooses by all held-out rows.
    """

    l2: float | None = option(None, minimum=1e-12, maximum=1e12)

    closed_form: ClassVar[bool] = True
    penalties: ClassVar[tuple[float, ...]] = tuple(10 ** (4 - i / 2) for i in range(21))
    """Candidates for l2, strong ones first."""

    normalized: ClassVar[bool] = True
    """Whether Q is scaled to the trace of the covariance; otherwise l2 multiplies Q as it is."""

    bounded: ClassVar[bool] = True
    """Whether κ is constant beyond the range of the training rows."""
    blind: ClassVar[bool] = True
    """Whether κ and Q do not depend on the targets, apart from one option: folds share both."""

    @abstractmethod
    def model(self, data: RecipeData, seed: int = 0) -> Model:
        """Return a model of one layer in float64: κ calibrated on the rows, ψ dense, a bias; heads without remainders."""

    def penalty(self, model: Model, data: RecipeData) -> Tensor | Callable[[Tensor], Tensor] | None:
        """Return Q: a diagonal `(D,)`, a positive definite matrix `(D, D)`, or a function of the standard deviations of the
        columns that returns it; None for their variances. Columns are those of all heads in order.
        """
        return None

    def design(self, data: RecipeData, seed: int = 0) -> tuple[Model, Tensor | Callable[[Tensor], Tensor] | None]:
        """Return `model` and `penalty`; a subclass may compute both at once."""
        model = self.model(data, seed)
        return model, self.penalty(model, data)

    def candidates(self, data: RecipeData) -> Sequence[Self]:
        """Return recipes with options other than `l2` set, for `resolved` to choose from."""
        return (self,)

    def width(self, rows: int, inputs: int) -> int:
        """Return the number of columns of κ, for the estimate of time."""
        return inputs

    def seconds(self, rows: int, inputs: int, outputs: int) -> float:
        width = self.width(rows, inputs)
        small = min(rows, width)
        return 0.005 + 2e-10 * rows * width * small + 1e-9 * small**3 + 4e-8 * rows * small * outputs

    def memory(self, data: RecipeData, rows: int) -> int:
        width = self.width(rows, data.x.shape[1])
        # The columns of all rows and of folds, and the matrices of a decomposition.
        return 8 * (5 * min(rows * width, MAX_STORED) + 8 * min(rows, width) ** 2)

    def reason_against(self, data: RecipeData) -> str | None:
        if not (data.loss.closed_form or data.loss.has_curvature):
            return f"{type(self).name} needs a loss with curvature, and {data.loss.name} has none"
        return None

    @torch.no_grad()
    def fit(self, data: RecipeData, seed: int = 0) -> Model:
        recipe = self.resolved(data, seed)
        problem = LinearProblem.of(recipe, data, seed)
        if recipe.l2 is None and data.loss.closed_form:
            orthogonal = problem if problem.orthogonal else LinearProblem(recipe, data, seed, True)
            recipe = replace(recipe, l2=orthogonal.best(recipe.path(problem))[1])
        elif recipe.l2 is None:
            recipe = recipe.cross_fit(data, data.folds(5, 0), seed).recipe  # type: ignore[assignment]
            problem = LinearProblem.of(recipe, data, seed)
        assign(problem.model, *problem.solution(recipe.l2 or 0.0))
        return copy.deepcopy(problem.model)

    def resolved(self, data: RecipeData, seed: int = 0) -> Self:
        """Return the recipe with all options but `l2` chosen.

        The candidate with the least leave-one-out error of squares, of classes as zeros and ones: one decomposition each.
        """
        candidates = self.candidates(data)
        if len(candidates) == 1:
            return candidates[0]
        data = sample(data)
        return min(candidates, key=lambda each: LinearProblem(each, data, seed, True).best(self.penalties)[0])

    def path(self, problem: LinearProblem) -> tuple[float, ...]:
        """Return the penalties to try."""
        if self.l2 is not None:
            return (self.l2,)
        if not self.normalized:
            return self.penalties
        spectrum = problem.basis.spectrum
        # Stronger ones give the constant as well.
        useful = [penalty for penalty in self.penalties if penalty <= STRONG * problem.largest] or self.penalties[-1:]
        return tuple(useful[:: 3 if len(problem.data.x) > MANY_ROWS * len(spectrum) else 1])

    @torch.no_grad()
    def cross_fit(self, data: RecipeData, folds: Sequence[Fold], seed: int = 0) -> CrossFit:
        start = time.perf_counter()
        size = len(data.x) * self.width(*data.x.shape)
        candidates = self.candidates(data) if size <= SMALL else (self.resolved(data, seed),)
        crossed = min((_Crossed.of(each, data, folds, seed) for each in candidates), key=lambda each: each.loss)
        return CrossFit(crossed.outputs, crossed.recipe, time.perf_counter() - start)


def sample(data: RecipeData) -> RecipeData:
    """Return evenly spaced rows, at most `SAMPLE`."""
    rows = len(data.x)
    return data.take(torch.arange(SAMPLE) * rows // SAMPLE) if rows > SAMPLE else data


class LinearProblem:
    """κ(x) of some rows in orthogonal coordinates.

    Args:
        recipe: the recipe.
        data: the rows.
        seed: the seed of the model.
        orthogonal: whether coordinates are uncorrelated, which pays for many penalties; None: if Q is normalized.
    """

    def __init__(self, recipe: LinearInParameters, data: RecipeData, seed: int, orthogonal: bool | None = None) -> None:
        self.data, self.orthogonal = data, recipe.normalized if orthogonal is None else orthogonal
        self.model, penalty = recipe.design(data, seed)
        count = len(data.x)
        weight = data.x.new_ones(count) if data.weight is None else data.weight
        share = weight / weight.sum()
        chunks = columns_of(self.model, data.x)
        self.basis: Basis = orthogonal_basis(chunks, share, penalty, recipe.normalized, self.orthogonal)
        self.rows = DesignRows(chunks, self.basis, share)

    @classmethod
    def of(cls, recipe: LinearInParameters, data: RecipeData, seed: int) -> LinearProblem:
        """Return the problem of a recipe; that of the same rows is computed once for all folds and the fit."""
        known = _PROBLEMS.setdefault(data, {})
        key = replace(recipe, l2=None), seed
        if key not in known:
            problem = cls(recipe, data, seed)
            if problem.rows.stored is None or problem.rows.stored.numel() > MOST_KEPT:
                return problem
            known[key] = problem
        return known[key]

    def takes_folds_at_once(self, folds: int) -> bool:
        """Return whether the path of all folds is computed at once: for few rows and columns, and losses other than squares."""
        few = is_small(folds, len(self.data.x), self.rows.width, self.data.outputs)
        return few and folds > 1 and self.rows.stored is not None and not self.data.loss.closed_form

    @property
    def largest(self) -> float:
        """Return the largest mean square of a coordinate."""
        return float(self.basis.spectrum[-1]) if len(self.basis.spectrum) else 0.0

    def best(self, penalties: Sequence[float]) -> tuple[float, float]:
        """Return the least leave-one-out error of squares, and its penalty."""
        y = F.one_hot(self.data.y, self.data.classes).double() if self.data.classes else self.data.y
        errors = leave_one_out(self.rows, y, penalties)
        at = int(errors.argmin())
        return float(errors[at]), penalties[at]

    def solution(self, penalty: float) -> tuple[Tensor, Tensor]:
        """Return the coefficients and the bias for a penalty, approached from stronger ones."""
        stronger = [penalty * 10.0**i for i in range(STAGES, 0, -1) if penalty * 10.0**i < STRONG * self.largest]
        penalties = [penalty] if self.data.loss.closed_form else [*stronger, penalty]
        *_, last = self.path(penalties, 1e-8)
        return last

    def path(self, penalties: Sequence[float], tolerance: float) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the coefficients `(D, n)` and the bias `(n,)` for each penalty in turn; the tolerance is for the last."""
        for theta in self.thetas(penalties, tolerance):
            yield self.basis.coefficients(theta[:-1], theta[-1])

    def thetas(self, penalties: Sequence[float], tolerance: float, part: Tensor | None = None) -> Iterator[Tensor]:
        """Yield the coefficients in the coordinates of the basis, `(r + 1, n)`, for all rows or a part of them."""
        data, rows = self.data, self.rows
        y = data.y
        if part is not None:
            rows, y = rows.take(part, columns_of(self.model, data.x[part])), y[part]
        if not data.loss.closed_form:
            return newton_path(rows, y, data.loss, data.outputs, penalties, tolerance, ROUGH)
        if part is None and self.orthogonal:
            return iter(ridge_path(rows, y, penalties))
        return correlated_ridge_path(rows, y, penalties)

    def held_out(self, train: Tensor, test: Tensor, bounded: bool) -> Callable[[Tensor], Tensor]:
        """Return a map from coefficients in the coordinates of the basis to outputs for some of the rows.

        Args:
            train, test: training rows and held-out rows.
            bounded: whether inputs are kept within the range of the training rows.
        """
        x = self.data.x[test]
        inside = x.clamp(*self.data.x[train].aminmax(dim=0)) if bounded else x
        if self.rows.stored is None:
            return self.outputs_of(inside)
        moved = (inside != x).any(1).nonzero()[:, 0]
        z = self.rows.stored[test]
        if len(moved):
            z[moved] = torch.cat([self.rows.coordinates(phi) for phi in columns_of(self.model, inside[moved])()])
        return lambda theta: z @ theta

    def outputs_of(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a map from coefficients in the coordinates of the basis to outputs for further rows."""
        chunks = columns_of(self.model, x)

        def outputs(theta: Tensor) -> Tensor:
            matrix, bias = self.basis.coefficients(theta[:-1], theta[-1])
            return torch.cat([phi @ matrix + bias for phi in chunks()])

        return outputs


_PROBLEMS: WeakKeyDictionary[RecipeData, dict[tuple[LinearInParameters, int], LinearProblem]] = WeakKeyDictionary()


class _Crossed(NamedTuple):
    """A recipe with the best penalty, its loss, and its outputs for held-out rows, NaN for other rows."""

    loss: float
    recipe: LinearInParameters
    outputs: Tensor

    @classmethod
    def of(cls, recipe: LinearInParameters, data: RecipeData, folds: Sequence[Fold], seed: int) -> _Crossed:
        """Return the result for the penalty with the least loss of all held-out rows."""
        whole = LinearProblem.of(recipe, data, seed) if recipe.blind else None
        if whole and whole.takes_folds_at_once(len(folds)):
            parts = _folds_at_once(whole, folds, recipe)
        else:
            parts = _fold_by_fold(whole, data, folds, recipe, seed)
        common = [penalty for penalty in parts[0] if all(penalty in part for part in parts)]
        totals = [sum(part[penalty][0] for part in parts) for penalty in common]
        best = min(range(len(common)), key=totals.__getitem__)
        outputs = data.x.new_full((len(data.x), data.outputs), torch.nan)
        for (_, test), part in zip(folds, parts, strict=True):
            outputs[test] = part[common[best]][1]
        return cls(totals[best], replace(recipe, l2=common[best]), outputs)


def _fold_by_fold(
    whole: LinearProblem | None, data: RecipeData, folds: Sequence[Fold], recipe: LinearInParameters, seed: int
) -> list[dict[float, tuple[float, Tensor]]]:
    """Return loss and outputs of the held-out rows of each fold by penalty; `whole`: the problem of all rows, if folds share it."""
    # One path for all folds: the strongest useful penalty differs between them.
    penalties: tuple[float, ...] = ()
    parts = []
    for fold in folds:
        problem = whole or LinearProblem(recipe, data.take(fold[0]), seed)
        penalties = penalties or recipe.path(problem)
        outputs_of = whole.held_out(*fold, recipe.bounded) if whole else problem.outputs_of(data.x[fold[1]])
        thetas = problem.thetas(penalties, ROUGH, fold[0] if whole else None)
        parts.append(_held_out_path(data, fold[1], outputs_of, zip(penalties, thetas, strict=True)))
    return parts


def _folds_at_once(
    whole: LinearProblem, folds: Sequence[Fold], recipe: LinearInParameters
) -> list[dict[float, tuple[float, Tensor]]]:
    """Return the same for a small problem of a loss other than squares, whose folds share the path."""
    data, rows, penalties = whole.data, whole.rows, recipe.path(whole)
    shares = torch.zeros(len(folds), len(data.x), dtype=torch.float64)
    for number, (train, _) in enumerate(folds):
        shares[number, train] = rows.share[train]
    shares /= shares.sum(1, keepdim=True)
    maps = [whole.held_out(*fold, recipe.bounded) for fold in folds]
    z = cast(Tensor, rows.stored)
    path = zip(penalties, fold_newton_path(z, shares, data.y, data.loss, data.outputs, penalties, ROUGH), strict=True)
    steps = [_HeldOutPath(data, test, outputs_of) for (_, test), outputs_of in zip(folds, maps, strict=True)]
    for penalty, thetas in path:
        going = [step.add(penalty, theta) for step, theta in zip(steps, thetas, strict=True)]
        if not all(going):
            break
    return [step.results for step in steps]


def _held_out_path(
    data: RecipeData, test: Tensor, outputs_of: Callable[[Tensor], Tensor], path: Iterable[tuple[float, Tensor]]
) -> dict[float, tuple[float, Tensor]]:
    """Return loss and outputs of the held-out rows of a fold by penalty; `path` has penalties with their coefficients."""
    held_out = _HeldOutPath(data, test, outputs_of)
    for penalty, theta in path:
        if not held_out.add(penalty, theta):
            break
    return held_out.results


class _HeldOutPath:
    """Loss and outputs of the held-out rows of a fold by penalty, from strong ones to the first that are too weak.

    Args:
        data: the rows.
        test: the held-out rows.
        outputs_of: maps coefficients to their outputs.

    Attributes:
        results: loss and outputs by penalty.
    """

    def __init__(self, data: RecipeData, test: Tensor, outputs_of: Callable[[Tensor], Tensor]) -> None:
        self.data, self.outputs_of, self.y = data, outputs_of, data.y[test]
        self.weight = None if data.weight is None else data.weight[test]
        self.results: dict[float, tuple[float, Tensor]] = {}
        self.least, self.useless = math.inf, 0

    def add(self, penalty: float, theta: Tensor) -> bool:
        """Add the coefficients of a penalty; return whether weaker ones are worth a trial."""
        outputs = self.outputs_of(theta)
        value = _loss(outputs, self.y, self.weight, self.data)
        self.results[penalty] = value, outputs
        if value < self.least * (1 - SLIGHT):
            self.least, self.useless = value, 0
        else:
            self.useless += 1
        return self.useless < WORSE


def _loss(outputs: Tensor, y: Tensor, weight: Tensor | None, data: RecipeData) -> float:
    """Return the summed loss of held-out rows, infinite if not finite."""
    losses = row_losses(outputs, y, data.loss)
    total = float(losses.sum() if weight is None else weight @ losses)
    return total if total == total else float("inf")


def columns_of(model: Model, x: Tensor) -> Callable[[], Iterator[Tensor]]:
    """Return a function that yields κ(x) of all heads, `(b, D)`, stored up to a size, otherwise computed on each call."""
    heads = model.check_layers("recipe")[0].check_heads("recipe")
    size = max(1, CHUNK // max(1, sum(head.factors[0] * head.factors[1] for head in heads)))
    stored: list[Tensor] = []

    def compute() -> Iterator[Tensor]:
        for rows in x.split(size):
            parts = [head.expand(rows).dense() for head in heads]
            yield parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def chunks() -> Iterator[Tensor]:
        if not stored and size * len(x) * CHUNK <= MAX_PHI * size * size:
            stored.append(torch.cat(list(compute())))
        return iter(stored) if stored else compute()

    return chunks


def column_scale(data: RecipeData) -> tuple[Tensor, Tensor]:
    """Return means of the inputs, and scales: standard deviations of numbers, half the range of indicators, `(m,)`.

    Half the range is the standard deviation of a balanced indicator: effects of rare categories are shrunk more than those of
    frequent ones. A constant input has scale 1.
    """
    share = data.x.new_full((len(data.x),), 1 / len(data.x)) if data.weight is None else data.weight / data.weight.sum()
    mean = share @ data.x
    deviation = (share @ (data.x - mean).square()).sqrt()
    low, high = data.x.aminmax(dim=0)
    scale = torch.where(data.numeric, deviation, (high - low) / 2)
    return mean, torch.where(deviation > CONSTANT * mean.abs(), scale, 1)


def one_layer(head: HeadSpec, data: RecipeData, seed: int) -> tuple[Model, Head]:
    """Return a model of one head in float64, and the head."""
    spec = ModelSpec((data.x.shape[1], data.outputs), (LayerSpec((head,)),))
    # Without initial values of ψ, which take longer than the fit of a wide table.
    model = Model(spec, device="meta", dtype=torch.float64).to_empty(device="cpu")
    built = model.check_layers("recipe")[0].check_heads("recipe")[0]
    for step in built.before:
        if hasattr(step, "reset_parameters"):
            step.reset_parameters()  # type: ignore[operator]
    built.kappa.reset(as_generator(seed))
    return model, built


def bound(head: Head, data: RecipeData, mean: Tensor, scale: Tensor) -> None:
    """Set the steps `clamp` and `affine` before κ: inputs within the range of the rows, (x − mean)/scale."""
    clamp, affine = head.before[0], head.before[1]
    low, high = data.x.aminmax(dim=0)
    clamp.load_state_dict({"low": low, "high": high})
    affine.load_state_dict({"shift": mean, "low": torch.zeros_like(mean), "scale": 1 / scale})


def assign(model: Model, matrix: Tensor, bias: Tensor) -> None:
    """Set ψ of all heads from coefficients `(D, n)`, and the bias of the first one."""
    heads: list[Head] = model.check_layers("recipe")[0].check_heads("recipe")
    sizes = [head.factors[0] * head.factors[1] for head in heads]
    for head, rows in zip(heads, matrix.split(sizes), strict=True):
        head.psi["matrix"].copy_(rows.T)
    first, *others = [head.bias for head in heads if head.bias is not None]
    first.copy_(bias)
    for other in others:
        other.zero_()
    model.eval()
