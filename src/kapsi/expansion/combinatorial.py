"""Combinations of inputs: themselves side by side, their joint log-density, and tables of their joint states."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Generator, Tensor

from kapsi.errors import SpecError
from kapsi.expansion.base import Expansion
from kapsi.expansion.density import LARGEST_INPUT, SMOOTHING, deviation
from kapsi.expansion.numerics import concat_basis, working_precision
from kapsi.features import LARGEST_FORMED, DenseFeatures, Features
from kapsi.function import Param, Params, Tensors, option

__all__ = ["Combinatorial", "CombinatorialCategorical", "CombinatorialNormal"]

MOST_STATES = 100_000
"""Of an input of tables; float32 counts them."""


@dataclass(frozen=True)
class Combinations(Expansion):
    """Columns for every combination of 1 to `order` inputs, or for chosen ones.

    Combinations come by size, those of a size in lexicographic order; chosen ones as they are given. Columns are counted
    before anything is made.
    """

    takes_empty: ClassVar[bool] = False  # whether the combination of no inputs is one
    takes_repeated: ClassVar[bool] = False  # whether an input may be in one more than once

    order: int = option(2, minimum=1, maximum=4)
    subsets: tuple[tuple[int, ...], ...] | None = None

    def check(self) -> None:
        if self.subsets is None:
            return
        where = f"{type(self).__name__}(subsets=…)"
        if not self.subsets:
            raise SpecError(f"{where}: at least one combination is needed; None stands for all of up to {self.order}")
        for subset in self.subsets:
            repeated = len(set(subset)) < len(subset) and not self.takes_repeated
            if not (subset or self.takes_empty) or min(subset, default=0) < 0 or repeated:
                once = "" if self.takes_repeated else " and each once"
                raise SpecError(f"{where}: expected numbers of inputs, from 0 on{once}, got {subset}")

    def factors(self, in_features: int) -> tuple[int, int]:
        name = type(self).__name__
        if self.subsets is None:
            columns = sum(self._columns(i) * math.comb(in_features, i) for i in range(1, self.order + 1))
            if columns > LARGEST_FORMED:
                raise SpecError(
                    f"{name}(order={self.order}): {in_features:,} inputs make {columns:,} columns, at most "
                    f"{LARGEST_FORMED:,} are formed; choose a lower order, or name combinations in subsets"
                )
            return 1, columns
        for subset in self.subsets:
            if max(subset, default=0) >= in_features:
                raise SpecError(
                    f"{name}(subsets=…): {subset} names input {max(subset)}; there are {in_features:,} inputs, "
                    f"numbered from 0 to {in_features - 1}"
                )
        columns = sum(self._columns(len(subset)) for subset in self.subsets)
        if columns > LARGEST_FORMED:
            raise SpecError(f"{name}(subsets=…): {columns:,} columns, at most {LARGEST_FORMED:,} are formed")
        return 1, columns

    @abstractmethod
    def _columns(self, size: int) -> int:
        """Return how many columns a combination of so many inputs has."""


@dataclass(frozen=True)
class Combinatorial(Combinations, name="combinatorial"):
    """The inputs of every combination side by side: κ(x) = [(x choose 1), …, (x choose d)], d = order, D = Σ i·C(m, i).

    Combinations come by size, those of a size in lexicographic order, the inputs of each in ascending order:
    x₁, x₂, x₃, x₁x₂, x₁x₃, x₂x₃ for three inputs and order 2, where x₁x₂ are two columns.

    Args:
        order: d, the largest combination, 1 to 4; above m there are no more.
        subsets: combinations instead of all, as tuples of the numbers of inputs, from 0 on, of any sizes and in any order;
            D is then the sum of their sizes, and the order is not used.

    Raises:
        SpecError: more than 16.7 million columns, or a subset with an input that is not there.

    Source: arXiv 2407.04819, "Combinatorial Data Expansion".

    Example:
        >>> import torch
        >>> Combinatorial()(torch.tensor([1.0, 2.0, 3.0]), {}).dense()
        tensor([1., 2., 3., 1., 2., 1., 3., 2., 3.])
        >>> Combinatorial(subsets=((2, 0), (1,)))(torch.tensor([1.0, 2.0, 3.0]), {}).dense()
        tensor([3., 1., 2.])
    """

    examples = ({}, {"order": 3}, {"subsets": ((0,),)})

    def _columns(self, size: int) -> int:
        return size

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        self.factors(x.shape[-1])  # before the numbers are made
        if self.subsets is None:
            index = torch.cat([c.T.flatten() for c in all_combinations(x.shape[-1], self.order, x.device)])
        else:
            index = torch.tensor([number for subset in self.subsets for number in subset], device=x.device)
        return DenseFeatures(x.index_select(-1, index))


@dataclass(frozen=True)
class CombinatorialNormal(Combinations, name="combinatorial_normal"):
    """Joint normal log-density of every combination: κ(x) = [log N(x_S | μ_S, Σ_S) for all S], D = Σ C(m, i).

    All combinations of 1 to d = order inputs, by size and lexicographic. Mean and covariance of a combination are the parts
    of one mean μ and one covariance Σ = LLᵀ of all inputs, a buffer unless they are learnable. Sums and differences of
    columns are joint and conditional log-probabilities. `kapsi.calibrate` sets μ and Σ by maximum likelihood; 10⁻⁹ of its
    variance is added to that of each input, so that collinear inputs work, and a constant input gets variance 1.

    Before calibration all is standard normal, as in the paper. There is one mean, so values at the same distance on its two
    sides are alike for the single inputs (−2 and 2 before calibration): give the head a `LinearRemainder`, or put it beside
    `NaiveNormal` in `Extended`, where the side counts.

    Args:
        order: d, the largest combination, 1 to 4; above m there are no more.
        subsets: combinations instead of all, as tuples of the numbers of inputs, from 0 on, of any sizes and in any order;
            D is then their number, and the order is not used.
        learnable: the parameters `mean` (μ) and `factor` (L: its strictly lower part, and the logarithms of its diagonal;
            what is above is not used) are trained.

    Raises:
        SpecError: more than 16.7 million columns, or a subset with an input that is not there.

    Source: arXiv 2407.04819, "Combinatorial Probabilistic Data Expansion".

    Example:
        >>> import torch
        >>> kappa = CombinatorialNormal()
        >>> kappa(torch.tensor([1.0, 0.0]), {"mean": torch.zeros(2), "factor": torch.zeros(2, 2)}).dense()
        tensor([-1.4189, -0.9189, -2.3379])
    """

    examples = ({}, {"order": 3, "learnable": True}, {"subsets": ((0,),)})

    learnable: bool = False

    def _columns(self, size: int) -> int:
        return 1

    def params(self, in_features: int) -> Params:
        return {
            "mean": Param((in_features,), "zeros", trainable=self.learnable),
            "factor": Param((in_features, in_features), "zeros", trainable=self.learnable),
        }

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        """Return mean and covariance of the rows."""
        rows = x.double().clamp(-LARGEST_INPUT, LARGEST_INPUT)
        mean, scale = rows.mean(0), deviation(rows)
        constant = scale == 0
        scale = torch.where(constant, 1.0, scale)
        units = torch.where(constant, 0.0, (rows - mean) / scale)
        correlation = units.T @ units / len(rows) + torch.where(constant, 1.0, SMOOTHING).diag()
        lower = scale.unsqueeze(-1) * torch.linalg.cholesky(correlation)
        return {"mean": mean, "factor": lower.tril(-1) + lower.diagonal().log().diag()}

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        self.factors(x.shape[-1])  # before the numbers are made
        centered = working_precision(x) - working_precision(params["mean"])
        # In float64: a conditional variance is a small difference. It costs nothing a row.
        factor = params["factor"].double()
        scale = factor.diagonal().exp()
        lower = factor.tril(-1) + scale.diag()
        covariance, least = lower @ lower.T, scale.square()
        if self.subsets is None:
            combinations: Iterable[Tensor] = all_combinations(x.shape[-1], self.order, x.device)
            columns = concat_basis([_log_density(centered, c, covariance, least) for c in combinations])
            return DenseFeatures(columns.to(x.dtype))
        sizes = sorted({len(subset) for subset in self.subsets})
        order = [[i for i, subset in enumerate(self.subsets) if len(subset) == size] for size in sizes]
        combinations = (torch.tensor([sorted(self.subsets[i]) for i in places], device=x.device).T for places in order)
        columns = concat_basis([_log_density(centered, c, covariance, least) for c in combinations])
        places = [i for group in order for i in group]
        back = sorted(range(len(places)), key=places.__getitem__)
        return DenseFeatures(columns.index_select(-1, torch.tensor(back, device=x.device)).to(x.dtype))


@dataclass(frozen=True)
class StateCombinations(Combinations):
    """Combinations of inputs that are numbers of states, and the places of their joint states in tables."""

    takes_empty = True

    states: int | tuple[int, ...] = option(2, minimum=1, maximum=MOST_STATES)
    outside: Literal["nearest", "error"] = "nearest"

    def check(self) -> None:
        super().check()
        if isinstance(self.states, tuple) and not all(1 <= number <= MOST_STATES for number in self.states or (0,)):
            raise SpecError(f"{type(self).__name__}(states={self.states}): each must be from 1 to {MOST_STATES:,}")

    def factors(self, in_features: int) -> tuple[int, int]:
        if isinstance(self.states, tuple) and len(self.states) != in_features:
            raise SpecError(
                f"{type(self).__name__}(states=…): {len(self.states):,} numbers of states for {in_features:,} inputs; give one "
                "for each, or one for all"
            )
        found = super().factors(in_features)
        entries = self._entries(in_features)
        if entries > LARGEST_FORMED:
            raise SpecError(
                f"{type(self).__name__}: the tables would have {float(entries):.4g} numbers, at most {LARGEST_FORMED:,} are "
                "made; choose smaller combinations, or fewer states"
            )
        return found

    def clamped(self) -> Self:
        return replace(self, outside="nearest")

    def sizes(self, in_features: int) -> tuple[int, ...]:
        """Return the number of states of each input."""
        return self.states if isinstance(self.states, tuple) else (self.states,) * in_features

    def _entries(self, in_features: int) -> int:
        sizes = self.sizes(in_features)
        if self.subsets is not None:
            return sum([math.prod([sizes[i] for i in subset]) for subset in self.subsets])
        # Of combinations of each size: an elementary symmetric polynomial.
        products = [1] + [0] * self.order
        for size in sizes:
            for i in range(self.order, 0, -1):
                products[i] += size * products[i - 1]
        return sum(products[1:])

    def _layout(self, in_features: int, device: torch.device) -> _Layout:
        """Return where the table of each combination is, and how far apart the states of each of its inputs are."""
        if self.subsets is None:
            made = all_combinations(in_features, self.order, device)
            last = len(made)
            padded = [torch.nn.functional.pad(each, (0, 0, 0, last - len(each)), value=-1) for each in made]
            inputs = torch.cat(padded, 1)
        else:
            last = max([len(subset) for subset in self.subsets])
            rows = [[*subset, *[-1] * (last - len(subset))] for subset in self.subsets]
            inputs = torch.tensor(rows, dtype=torch.int64, device=device).reshape(len(rows), last).T
        sizes = torch.tensor((*self.sizes(in_features), 1), device=device)[inputs]  # one state where there is no input
        ends = sizes.flip(0).cumprod(0).flip(0)
        widths = sizes.prod(0)
        return _Layout(
            inputs.clamp_min(0), ends // sizes * (inputs >= 0), widths.cumsum(0) - widths, self._entries(in_features)
        )

    def _places(self, x: Tensor, layout: _Layout) -> Tensor:
        """Return the place of the joint state of each combination in the tables, `(..., D)`."""
        states = self._nearest(x).long()
        places = layout.offsets.expand(*x.shape[:-1], -1)
        for inputs, strides in zip(layout.inputs, layout.strides, strict=True):
            places = places + states.index_select(-1, inputs) * strides
        return places

    def _nearest(self, x: Tensor) -> Tensor:
        values = working_precision(x).detach().nan_to_num(0.0)
        last = torch.tensor(self.sizes(x.shape[-1]), dtype=values.dtype, device=x.device) - 1
        return torch.minimum(values.round().clamp_min(0), last)

    def _spoiled(self, x: Tensor) -> Tensor:
        """Return which rows are not numbers, `(..., 1)`: after a check of x where that is the policy."""
        spoiled = x.isnan()
        if self.outside == "error" and not x.is_meta:
            outside = ~spoiled & (self._nearest(x) != x)
            if torch.compiler.is_compiling():
                spoiled = spoiled | outside
            elif bool(outside.any()):
                first = outside.nonzero()[0, -1].item()
                raise SpecError(
                    f"{type(self).__name__}(outside='error'): {int(outside.sum()):,} inputs are not the number of a state, the "
                    f"first is {x[outside][0].item():.6g} of input {first}, which has the states 0 to "
                    f"{self.sizes(x.shape[-1])[int(first)] - 1:,}"
                )
        return spoiled.any(-1, keepdim=True)


@dataclass(frozen=True)
class CombinatorialCategorical(StateCombinations, name="combinatorial_categorical"):
    """A number for the joint state of every combination: κ(x) = [T_S(x_S) for all S], D = Σ C(m, i).

    Inputs are numbers of states, 0 to k − 1. The tables T_S are logarithms of joint or conditional probabilities, one after
    another in the buffer `tables` (a parameter if they are learnable); in each the last input of the combination runs fastest.
    Sums and differences of columns are then the log-probabilities of a Bayesian network. `kapsi.calibrate` sets the tables to the
    logarithms of relative frequencies, with one added to each count. What is assigned must be finite, since zeros of ψ times −∞
    would be no number: a probability of zero is a number such as −10,000, whose exponential is zero.

    Before calibration inputs are independent, and each state is e² times less likely than the one before. There is no gradient
    with respect to x.

    Args:
        order: the largest combination, 1 to 4; above m there are no more.
        subsets: combinations instead of all, as tuples of the numbers of inputs, from 0 on, of any sizes and in any order, which
            is the order of the axes of their tables; () has one number, the same for all x. D is then their number, and the
            order is not used.
        states: k, the number of states of each input, 1 to 100,000, or one for all.
        outside: what an input is that is not the number of a state: the `nearest` one; or an `error`, a ValueError where values
            can be looked at, and no number in a compiled or exported model.
        learnable: the parameter `tables` is trained.

    Raises:
        SpecError: more than 16.7 million columns or numbers in tables, or a subset with an input that is not there.

    Source: arXiv 2407.04819, "Combinatorial Probabilistic Data Expansion"; Koller and Friedman, Probabilistic Graphical Models
        (2009), 3.2.

    Example:
        >>> import torch
        >>> kappa = CombinatorialCategorical(subsets=((0, 1), (1,)), states=(2, 3))
        >>> tables = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0])
        >>> kappa(torch.tensor([1.0, 2.0]), {"tables": tables}).dense()
        tensor([6., 9.])
    """

    examples = (
        {},
        {"order": 3, "states": 3, "learnable": True},
        {"subsets": ((0,), (), (0,)), "states": 4},
    )

    learnable: bool = False

    def _columns(self, size: int) -> int:
        return 1

    def params(self, in_features: int) -> Params:
        self.factors(in_features)
        initial = functools.partial(_independent_states, self, in_features)
        return {"tables": Param((self._entries(in_features),), initial, trainable=self.learnable)}

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        """Return the logarithms of the relative frequencies of joint states, one added to each count."""
        layout = self._layout(x.shape[-1], x.device)
        counts = torch.zeros(layout.entries, dtype=torch.int64, device=x.device)
        for rows in x.split(max(1, LARGEST_FORMED // max(1, layout.offsets.numel()))):
            counts += torch.bincount(self._places(rows, layout).flatten(), minlength=layout.entries)
        widths = torch.diff(layout.offsets, append=layout.offsets.new_tensor([layout.entries]))
        totals = torch.repeat_interleave(len(x) + widths, widths, output_size=layout.entries)
        return {"tables": ((counts.double() + 1) / totals).log()}

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        self.factors(x.shape[-1])  # before the numbers are made
        columns = params["tables"][self._places(x, self._layout(x.shape[-1], x.device))]
        return DenseFeatures(torch.where(self._spoiled(x), math.nan, columns.to(x.dtype)))


class _Layout(NamedTuple):
    """Where tables are.

    Attributes:
        inputs: the inputs of each combination, zeros where it has fewer, `(largest, D)`.
        strides: how far apart their states are, 0 where there is no input, `(largest, D)`.
        offsets: where the table of each begins, `(D,)`.
        entries: of all tables.
    """

    inputs: Tensor
    strides: Tensor
    offsets: Tensor
    entries: int


def _independent_states(
    function: CombinatorialCategorical, in_features: int, shape: tuple[int, ...], generator: Generator | None
) -> Tensor:
    """Return tables of independent inputs, each state e² times less likely than the one before."""
    layout = function._layout(in_features, torch.device("cpu"))
    widths = torch.diff(layout.offsets, append=layout.offsets.new_tensor([layout.entries]))
    sizes = torch.tensor(function.sizes(in_features))
    constants = torch.log(-torch.expm1(-2.0 * sizes.double()) / -math.expm1(-2.0))
    column = torch.repeat_interleave(torch.arange(len(widths)), widths, output_size=layout.entries)
    place = torch.arange(layout.entries) - layout.offsets[column]
    total = torch.zeros(layout.entries, dtype=torch.float64)
    for inputs, strides in zip(layout.inputs, layout.strides, strict=True):
        states = place // strides[column].clamp_min(1) % sizes[inputs[column]]
        total -= torch.where(strides[column] > 0, 2.0 * states + constants[inputs[column]], 0.0)
    return total


def all_combinations(m: int, order: int, device: torch.device) -> list[Tensor]:
    """Return all combinations of 1, 2, … order of m inputs, `(size, C(m, size))`, the columns in lexicographic order.

    Those of a size are those of one less, each followed by every later input.
    """
    last = torch.arange(m, device=device)
    made = [last.unsqueeze(0)]
    for size in range(2, min(order, m) + 1):
        total = math.comb(m, size)
        later = m - 1 - last
        parent = torch.repeat_interleave(later, output_size=total)
        begin = later.cumsum(0) - later
        last = last[parent] + 1 + torch.arange(total, device=device) - begin[parent]
        made.append(torch.cat((made[-1][:, parent], last.unsqueeze(0))))
    return made


def _log_density(centered: Tensor, index: Tensor, covariance: Tensor, least: Tensor) -> Tensor:
    """Return the joint normal log-density of combinations of inputs, `(..., combinations)`.

    Inputs are eliminated one after another: what is left of the others is their residual given those before.

    Args:
        centered: x − μ, `(..., m)`.
        index: the inputs of each combination, in ascending order, `(size, combinations)`.
        covariance: Σ, `(m, m)`.
        least: the variance of each input given all inputs before it, `(m,)`: given some of them it is not smaller.
    """
    size = len(index)
    residual = centered.index_select(-1, index.flatten()).unflatten(-1, index.shape)
    joint = covariance[index.unsqueeze(1), index.unsqueeze(0)]
    total = torch.zeros_like(residual[..., 0, :])
    for k in range(size):
        variance = torch.maximum(joint[0, 0], least[index[k]])
        first = residual[..., 0, :]
        total = total + (first * variance.rsqrt().to(first.dtype)).square() + variance.log().to(first.dtype)
        if k + 1 < size:
            slopes = joint[1:, 0] / variance
            residual = residual[..., 1:, :] - first.unsqueeze(-2) * slopes.to(first.dtype)
            joint = joint[1:, 1:] - slopes.unsqueeze(1) * joint[:1, 1:]
    return -0.5 * (total + size * math.log(2 * math.pi))
