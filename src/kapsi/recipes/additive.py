"""Additive heads: a smooth or a stepwise function of each input."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kapsi.expansion import BSpline, Expansion, Extended, Identity, SelectedInputs
from kapsi.expansion.spline_knots import with_outer_knots
from kapsi.function import option
from kapsi.modules import Model
from kapsi.recipes.base import RecipeData, Searched
from kapsi.recipes.linear_in_parameters import LinearInParameters, columns_of, one_layer
from kapsi.recipes.smoothing import PenaltyBlocks, SecondMoments, evidence, penalty_matrix
from kapsi.spec import HeadSpec

__all__ = ["AdditiveHead", "StepsHead"]

FEW_VALUES = 8
"""Most distinct values of an input that has a node at each value, with straight lines between them."""

GRIDS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 40)
"""Numbers of intervals; inputs with equal numbers share an expansion."""

MAX_INPUTS = 300
"""Most numeric inputs: each has a few columns, and the time of a fit grows with their cube."""


@dataclass(frozen=True)
class AdditiveHead(LinearInParameters, name="additive"):
    """A sum of smooth functions of the inputs: Σ_i f_i(x_i) + b, each f_i a spline with penalized curvature.

    Knots are quantiles of the rows; functions are constant beyond the range of the rows. An input of few values has a node
    at each; indicators, and numbers with two values, have a slope. The penalty is the sum of squares of second differences
    of the coefficients, divided by the distances of the knots, so straight lines are free of it; slopes have a weak penalty
    in common. The smoothness of each input is estimated by `evidence`, from squares of errors whatever the loss, and `l2` is a
    common factor near 1.

    Args:
        l2: common factor of the penalties; see `LinearInParameters`.
        degree: degree of the pieces, 1 to 5; 0 for steps, with penalized differences of neighbors.
        intervals: most intervals of an input; None: by the numbers of rows and inputs.
        rounds: rounds of `evidence`, 0 to 100.
    """

    complexity: ClassVar[int] = 1
    explainable: ClassVar[bool] = True
    blind: ClassVar[bool] = False
    normalized: ClassVar[bool] = False
    penalties: ClassVar[tuple[float, ...]] = (30.0, 10.0, 3.0, 1.0, 0.3, 0.1)

    searched: ClassVar[Searched] = (("degree", (3, 1, 2)),)

    degree: int = option(3, minimum=0, maximum=5)
    intervals: int | None = option(None, minimum=2, maximum=1000)
    rounds: int = option(8, minimum=0, maximum=100)

    def reason_against(self, data: RecipeData) -> str | None:
        numbers = int(data.numeric.sum())
        if not numbers:
            return "there are no numeric inputs"
        if numbers > MAX_INPUTS:
            return f"there are {numbers:,} numeric inputs, more than {MAX_INPUTS}"
        return super().reason_against(data)

    def width(self, rows: int, inputs: int) -> int:
        return inputs * (self._most(rows, inputs) + self.degree)

    def seconds(self, rows: int, inputs: int, outputs: int) -> float:
        return super().seconds(rows, inputs, outputs) + 2e-10 * self.rounds * self.width(rows, inputs) ** 3

    def _most(self, rows: int, inputs: int) -> int:
        """Return the largest number of intervals of an input."""
        if self.intervals is not None:
            return self.intervals
        columns = 240 if rows < 3_000 else 400
        by_rows, largest = (rows // 10, 40 if self.degree == 0 else 20)
        return max(3, min(by_rows, largest, columns // max(1, inputs) - self.degree))

    def model(self, data: RecipeData, seed: int = 0) -> Model:
        layout = self.layout(data)
        return layout_model(layout.expansion(), layout.tensors(), data, seed)

    def layout(self, data: RecipeData) -> AdditiveLayout:
        """Return the expansion for the rows."""
        return AdditiveLayout.of(data, self._most(len(data.x), int(data.numeric.sum())), self.degree)

    def penalty(self, model: Model, data: RecipeData) -> Tensor:
        moments = second_moments(model, data)
        blocks = self.layout(data).blocks(data)
        strength = evidence(moments, blocks, self.rounds)
        return penalty_matrix(moments.columns.diagonal(), blocks, strength) * curvature(data)


@dataclass(frozen=True)
class StepsHead(AdditiveHead, name="steps"):
    """A sum of step functions of the inputs: Σ_i f_i(x_i) + b, constant between quantiles of the rows.

    It suits thresholds; see `AdditiveHead`. Differences of neighboring steps are penalized.

    Args:
        l2: common factor of the penalties; see `LinearInParameters`.
        degree: degree of the pieces, 0 to 5.
        intervals: most steps of an input; None: by the numbers of rows and inputs.
        rounds: rounds of `evidence`, 0 to 100.
    """

    searched = ()

    degree: int = option(0, minimum=0, maximum=5)


# ------------------------------------------------------------------------------------------------ the expansion


class InputGroup(NamedTuple):
    """Inputs with an expansion of equal size.

    Attributes:
        inputs: indices of the inputs, `(count,)`.
        knots: all knots of each, `(knots, count)`; None for the inputs themselves.
        degree: degree of the spline.
    """

    inputs: Tensor
    knots: Tensor | None
    degree: int

    @property
    def functions(self) -> int:
        """Number of columns of each input."""
        return 1 if self.knots is None else len(self.knots) - self.degree - 1

    def expansion(self) -> Expansion:
        """Return the expansion of the inputs."""
        if self.knots is None:
            return Identity()
        intervals = self.functions - self.degree
        return BSpline(intervals, self.degree, extrapolation="clamp", knots="quantile")


class AdditiveLayout(NamedTuple):
    """The expansion of an additive head: splines of groups of inputs, side by side.

    Attributes:
        parts: the groups.
    """

    parts: tuple[InputGroup, ...]

    @classmethod
    def of(cls, data: RecipeData, most: int, degree: int) -> AdditiveLayout:
        """Return the expansion for the rows, with at most `most` intervals of an input."""
        groups: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
        plain: list[int] = []
        for i in range(data.x.shape[1]):
            points, own = breakpoints(data.x[:, i], data.weight, most, degree) if data.numeric[i] else (None, 0)
            if points is None:
                plain.append(i)
            else:
                groups.setdefault((own, len(points)), []).append((i, points))
        parts = [InputGroup(torch.tensor(plain), None, 1)] if plain else []
        for (own, _), members in sorted(groups.items(), key=lambda item: item[0]):
            knots = with_outer_knots(torch.stack([points for _, points in members], 1), own)
            parts.append(InputGroup(torch.tensor([i for i, _ in members]), knots, own))
        return cls(tuple(parts))

    @property
    def columns(self) -> int:
        """Number of columns of κ."""
        return sum(part.functions * len(part.inputs) for part in self.parts)

    def expansions(self) -> tuple[Expansion, ...]:
        """Return the expansion of each group."""
        return tuple(SelectedInputs(part.expansion(), len(part.inputs)) for part in self.parts)

    def expansion(self) -> Expansion:
        """Return κ."""
        parts = self.expansions()
        return parts[0] if len(parts) == 1 else Extended(parts)

    def tensors_of_parts(self) -> list[dict[str, Any]]:
        """Return the tensors of the expansion of each group, to assign."""
        return [
            {"selection": part.inputs} | ({} if part.knots is None else {"expansion": {"knots": part.knots}})
            for part in self.parts
        ]

    def tensors(self) -> dict[str, Any]:
        """Return the tensors of κ to assign."""
        each = self.tensors_of_parts()
        return each[0] if len(each) == 1 else {str(i): tensors for i, tensors in enumerate(each)}

    def blocks(self, data: RecipeData) -> list[PenaltyBlocks]:
        """Return the penalties: roughness of each input, slopes of numbers in common, and those of indicators in common."""
        shared: dict[str, int] = {}
        blocks: list[PenaltyBlocks] = []
        offset, roughness = 0, sum(len(part.inputs) for part in self.parts if part.knots is not None)
        share = shares(data)
        deviation = (share @ (data.x - share @ data.x).square()).sqrt()
        spread = torch.where(data.numeric, deviation, (data.x.amax(0) - data.x.amin(0)) / 2).clamp_min(1e-12)
        first = 0
        for part in self.parts:
            count = len(part.inputs)
            index = offset + torch.arange(part.functions) * count + torch.arange(count)[:, None]
            offset += part.functions * count
            slope = spread[part.inputs][:, None, None]
            if part.knots is not None:
                points = greville(part.knots, part.degree).T
                own = torch.arange(first, first + count)
                blocks.append(PenaltyBlocks(index, roughness_root(points, 2 if part.degree else 1), own))
                first += count
                if not part.degree:
                    continue
                centered = points - points.mean(1, keepdim=True)
                slope = slope * (centered / centered.square().sum(1, keepdim=True))[:, None, :]
            kind = ["number" if number else "indicator" for number in data.numeric[part.inputs].tolist()]
            common = torch.tensor([shared.setdefault(each, roughness + len(shared)) for each in kind])
            blocks.append(PenaltyBlocks(index, slope, common))
        return blocks


def breakpoints(x: Tensor, weight: Tensor | None, most: int, degree: int) -> tuple[Tensor | None, int]:
    """Return the breakpoints of a number and the degree of its pieces; None for at most two distinct values."""
    values, group = x.unique(return_inverse=True)
    if len(values) <= 2:
        return None, 0
    total = x.new_zeros(len(values)).index_add_(0, group, torch.ones_like(x) if weight is None else weight)
    if degree == 0:
        inner = values[:-1].lerp(values[1:], 0.5)
        bins = max(grid for grid in GRIDS if grid <= min(most, len(values)))
        if bins < len(values):
            inner = inner[quantiles(total, bins)[1:-1].clamp_max(len(inner) - 1)]
        return torch.cat([values[:1], inner, values[-1:]]), 0
    if len(values) <= min(FEW_VALUES, most + 1):
        return values, 1
    intervals = max(grid for grid in GRIDS if grid <= min(most, len(values) - 1))
    return values[quantiles(total, intervals)], degree


def quantiles(weight: Tensor, parts: int) -> Tensor:
    """Return increasing indices `(parts + 1,)` that divide distinct values into parts of about equal weight.

    The weight of a value counts up to the mean of a part: a frequent value leaves the other knots to the others.
    """
    share = weight.clamp_max(weight.sum() / parts).cumsum(0)
    levels = torch.arange(1, parts, dtype=share.dtype) / parts * share[-1]
    inner = torch.searchsorted(share, levels * (1 - 1e-12))
    # Distinct indices in ascending order, with room for those on either side.
    number = torch.arange(1, parts)
    inner = torch.maximum((inner - number).cummax(0).values, torch.zeros_like(number)) + number
    inner = torch.minimum(inner, len(weight) - 1 - (parts - number))
    return F.pad(F.pad(inner, (1, 0)), (0, 1), value=len(weight) - 1)


def greville(knots: Tensor, degree: int) -> Tensor:
    """Return the points at which coefficients of a line are its values: means of `degree` knots, `(functions, count)`."""
    if not degree:
        return knots[:-1].lerp(knots[1:], 0.5)
    return knots[1:-1].unfold(0, degree, 1).mean(2)


def roughness_root(points: Tensor, order: int) -> Tensor:
    """Return R with ‖Rc‖² the penalty of coefficients at points `(count, G)`: `(count, G − order, G)`.

    Order 1: differences of neighbors. Order 2: differences of slopes, 2 (h₀ c₂ − (h₀ + h₁) c₁ + h₁ c₀)/(h₀ + h₁), with h the
    distances: second differences for equal distances, and 0 for lines.
    """
    size = points.shape[1]
    eye = torch.eye(size, dtype=points.dtype)
    if order == 1:
        return eye.diff(dim=0).expand(len(points), -1, -1)
    step = points.diff(dim=1)
    before, after = step[:, :-1, None], step[:, 1:, None]
    return 2 * (before * eye[2:] + after * eye[:-2]) / (before + after) - 2 * eye[1:-1]


# ------------------------------------------------------------------------------------------------ moments


def second_moments(model: Model, data: RecipeData) -> SecondMoments:
    """Return the moments of the columns of a model, and of the targets; classes as indicators."""
    y = F.one_hot(data.y, data.classes).to(data.x.dtype) if data.classes else data.y
    share = shares(data)[:, None]
    y = y - (share * y).sum(0)
    chunks = columns_of(model, data.x)

    def parts() -> Iterator[tuple[Tensor, slice]]:
        begin = 0
        for phi in chunks():
            yield phi, slice(begin, begin + len(phi))
            begin += len(phi)

    mean: Tensor = sum((phi.T @ share[at] for phi, at in parts()), share.new_zeros(()))[:, 0]
    columns, mixed = share.new_zeros(len(mean), len(mean)), share.new_zeros(len(mean), y.shape[1])
    for phi, at in parts():
        weighted = (phi - mean) * share[at]
        columns.addmm_(weighted.T, phi - mean)
        mixed.addmm_(weighted.T, y[at])
    return SecondMoments(columns, mixed, (share * y.square()).sum(0), len(y))


def curvature(data: RecipeData) -> float:
    """Return the mean curvature of the loss around a constant, in units of that of squares; 1 if unknown."""
    if not data.classes:
        return 1.0
    frequency = data.x.new_zeros(data.classes).index_add_(0, data.y, shares(data))
    return float((frequency * (1 - frequency)).mean().clamp_min(1e-3))


def shares(data: RecipeData) -> Tensor:
    """Return the weights of the rows with sum 1, `(rows,)`."""
    weight = torch.ones_like(data.x[:, 0]) if data.weight is None else data.weight
    return weight / weight.sum()


def layout_model(kappa: Expansion, tensors: dict[str, Any], data: RecipeData, seed: int) -> Model:
    """Return a model of one head with an expansion and its tensors."""
    model, head = one_layer(HeadSpec(kappa, bias=True), data, seed)
    head.assign("expansion", **tensors)
    return model
