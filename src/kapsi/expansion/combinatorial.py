"""Combinations of inputs: concatenated, as joint log-densities, and as tables of joint states."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Generator, Tensor

from kapsi.errors import DataError, SpecError
from kapsi.expansion.base import Expansion
from kapsi.expansion.density import MAX_INPUT, SMOOTHING, deviation
from kapsi.expansion.numerics import concat_basis, working_precision
from kapsi.features import MAX_MATERIALIZED, DenseFeatures, Features
from kapsi.function import Param, Params, Tensors, option
from kapsi.text import counted

__all__ = ["Combinatorial", "CombinatorialCategorical", "CombinatorialNormal"]

MAX_STATES = 100_000
"""Of an input of tables; exact integers in float32."""


@dataclass(frozen=True)
class Combinations(Expansion):
    """Columns for every combination of 1 to `order` inputs, or for given combinations.

    Combinations are in order of size, then lexicographic; given combinations keep their order. Sizes are checked before
    allocation.
    """

    takes_empty: ClassVar[bool] = False  # allow the empty combination
    takes_repeated: ClassVar[bool] = False  # allow repeated inputs in a combination

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
                raise SpecError(f"{where}: expected indices of inputs, from 0 on{once}, got {subset}")

    def factors(self, in_features: int) -> tuple[int, int]:
        name = type(self).__name__
        if self.subsets is None:
            columns = sum(self._columns(i) * self._number(in_features, i) for i in range(1, self.order + 1))
            if columns > MAX_MATERIALIZED:
                raise SpecError(
                    f"{name}(order={self.order}): {counted(in_features, 'input')} make {columns:,} columns, at most "
                    f"{MAX_MATERIALIZED:,} are materialized; choose a lower order, or name combinations in subsets"
                )
            return 1, columns
        for subset in self.subsets:
            if max(subset, default=0) >= in_features:
                raise SpecError(
                    f"{name}(subsets=…): {subset} names input {max(subset)} of {counted(in_features, 'input')}, "
                    f"numbered from 0 to {in_features - 1}"
                )
        columns = sum(self._columns(len(subset)) for subset in self.subsets)
        if columns > MAX_MATERIALIZED:
            raise SpecError(f"{name}(subsets=…): {columns:,} columns, at most {MAX_MATERIALIZED:,} are materialized")
        return 1, columns

    def chosen(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        """Return the names of the inputs of each combination, in order."""
        if self.subsets is not None:
            return [tuple(names[i] for i in subset) for subset in self.subsets]
        return [way for size in range(1, self.order + 1) for way in itertools.combinations(names, size)]

    def _columns(self, size: int) -> int:
        """Return the number of columns of a combination of `size` inputs."""
        return 1

    def _number(self, in_features: int, size: int) -> int:
        """Return the number of combinations of `size` inputs."""
        return math.comb(in_features, size)


@dataclass(frozen=True)
class Combinatorial(Combinations, name="combinatorial"):
    """The inputs of every combination, concatenated: κ(x) = [(x choose 1), …, (x choose d)], d = order, D = Σ i·C(m, i);
    with replacement D = Σ i·C(m + i − 1, i).

    Combinations are in order of size, then lexicographic, the inputs of each in ascending order: x₁, x₂, x₃, x₁x₂, x₁x₃,
    x₂x₃ for three inputs and order 2, where x₁x₂ are two columns.

    Args:
        order: d, size of the largest combination, 1 to 4; combinations of more than m inputs do not exist.
        subsets: combinations to use instead of all, as tuples of input indices from 0, of any sizes and in any order; D is
            then the sum of their sizes. Overrides the order.
        replacement: combinations with replacement: an input may appear several times, as in x₁x₁.

    Raises:
        SpecError: more than 16.7 million columns, or a subset with an unknown input.

    Source: arXiv 2407.04819, "Combinatorial Data Expansion".

    Example:
        >>> import torch
        >>> Combinatorial()(torch.tensor([1.0, 2.0, 3.0]), {}).dense()
        tensor([1., 2., 3., 1., 2., 1., 3., 2., 3.])
        >>> Combinatorial(subsets=((2, 0), (1,)))(torch.tensor([1.0, 2.0, 3.0]), {}).dense()
        tensor([3., 1., 2.])
    """

    examples = ({}, {"order": 3}, {"subsets": ((0,),)}, {"order": 3, "replacement": True})

    replacement: bool = False

    def check(self) -> None:
        super().check()
        if self.replacement and self.subsets is not None:
            raise SpecError("Combinatorial(subsets=…, replacement=True): replacement has no effect with given subsets")

    def column_names(self, names: Sequence[str], tensors: Tensors) -> list[str]:
        return [f"{name} of ({', '.join(chosen)})" for chosen in self.chosen(names) for name in chosen]

    def chosen(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        if self.replacement:
            sizes = range(1, self.order + 1)
            return [way for size in sizes for way in itertools.combinations_with_replacement(names, size)]
        return super().chosen(names)

    def _columns(self, size: int) -> int:
        return size

    def _number(self, in_features: int, size: int) -> int:
        return math.comb(in_features + size - 1, size) if self.replacement else super()._number(in_features, size)

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        self.factors(x.shape[-1])  # check the size first
        if self.subsets is None:
            combinations = all_combinations(x.shape[-1], self.order, x.device, replacement=self.replacement)
            index = torch.cat([c.T.flatten() for c in combinations])
        else:
            index = torch.tensor([number for subset in self.subsets for number in subset], device=x.device)
        return DenseFeatures(x.index_select(-1, index))


@dataclass(frozen=True)
class CombinatorialNormal(Combinations, name="combinatorial_normal", aliases=("normal_combinatorial",)):
    """Joint normal log-density of every combination: κ(x) = [log N(x_S | μ_S, Σ_S) for all S], D = Σ C(m, i).

    Combinations of 1 to d = order inputs, in order of size, then lexicographic. All use parts of one mean μ and one
    covariance Σ = LLᵀ, buffers unless learnable. Sums and differences of columns are joint and conditional
    log-probabilities. `kapsi.calibrate` sets μ and Σ by maximum likelihood, with 10⁻⁹ of each variance added, so that
    collinear inputs work; a constant input gets variance 1.

    Before calibration all densities are standard normal, as in the paper. With a single mean, values on either side at the
    same distance are indistinguishable for single inputs (−2 and 2 before calibration): give the head a `LinearRemainder`,
    or combine with `NaiveNormal` in `Extended`.

    Args:
        order: d, size of the largest combination, 1 to 4; combinations of more than m inputs do not exist.
        subsets: combinations to use instead of all, as tuples of input indices from 0, of any sizes and in any order; D is
            then their number. Overrides the order.
        learnable: train the parameters `mean` (μ) and `factor` (L: strictly lower part, and the logarithms of the diagonal;
            the upper part is ignored).

    Raises:
        SpecError: more than 16.7 million columns, or a subset with an unknown input.

    Source: arXiv 2407.04819, "Combinatorial Probabilistic Data Expansion".

    Example:
        >>> import torch
        >>> kappa = CombinatorialNormal()
        >>> kappa(torch.tensor([1.0, 0.0]), {"mean": torch.zeros(2), "factor": torch.zeros(2, 2)}).dense()
        tensor([-1.4189, -0.9189, -2.3379])
    """

    examples = ({}, {"order": 3, "learnable": True}, {"subsets": ((0,),)})

    learnable: bool = False

    def params(self, in_features: int) -> Params:
        return {
            "mean": Param((in_features,), "zeros", trainable=self.learnable),
            "factor": Param((in_features, in_features), "zeros", trainable=self.learnable),
        }

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        """Return mean and covariance of the rows."""
        rows = x.double().clamp(-MAX_INPUT, MAX_INPUT)
        mean, scale = rows.mean(0), deviation(rows)
        constant = scale == 0
        scale = torch.where(constant, 1.0, scale)
        units = torch.where(constant, 0.0, (rows - mean) / scale)
        correlation = units.T @ units / len(rows) + torch.where(constant, 1.0, SMOOTHING).diag()
        lower = scale.unsqueeze(-1) * torch.linalg.cholesky(correlation)
        return {"mean": mean, "factor": lower.tril(-1) + lower.diagonal().log().diag()}

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        self.factors(x.shape[-1])  # check the size first
        centered = working_precision(x) - working_precision(params["mean"])
        # In float64, since a conditional variance is a small difference; the cost is independent of the rows.
        factor = params["factor"].double()
        scale = factor.diagonal().exp()
        lower = factor.tril(-1) + scale.diag()
        covariance, min_variance = lower @ lower.T, scale.square()
        if self.subsets is None:
            combinations: Iterable[Tensor] = all_combinations(x.shape[-1], self.order, x.device)
            columns = concat_basis([_log_density(centered, c, covariance, min_variance) for c in combinations])
            return DenseFeatures(columns.to(x.dtype))
        sizes = sorted({len(subset) for subset in self.subsets})
        order = [[i for i, subset in enumerate(self.subsets) if len(subset) == size] for size in sizes]
        combinations = (
            torch.tensor([sorted(self.subsets[i]) for i in indices], device=x.device).T for indices in order
        )
        columns = concat_basis([_log_density(centered, c, covariance, min_variance) for c in combinations])
        indices = [i for group in order for i in group]
        inverse = sorted(range(len(indices)), key=indices.__getitem__)
        return DenseFeatures(columns.index_select(-1, torch.tensor(inverse, device=x.device)).to(x.dtype))


@dataclass(frozen=True)
class StateCombinations(Combinations):
    """Combinations of inputs that are state indices, and the cells of their joint states in tables."""

    takes_empty = True

    states: int | tuple[int, ...] = option(2, minimum=1, maximum=MAX_STATES)
    outside: Literal["nearest", "error"] = "nearest"

    def check(self) -> None:
        super().check()
        if isinstance(self.states, tuple) and not all(1 <= number <= MAX_STATES for number in self.states or (0,)):
            raise SpecError(f"{type(self).__name__}(states={self.states}): each must be from 1 to {MAX_STATES:,}")

    def factors(self, in_features: int) -> tuple[int, int]:
        if isinstance(self.states, tuple) and len(self.states) != in_features:
            raise SpecError(
                f"{type(self).__name__}(states=…): {counted(len(self.states), 'number')} of states for "
                f"{counted(in_features, 'input')}; give one for each, or one for all"
            )
        factors = super().factors(in_features)
        entries = self._entries(in_features)
        if entries > MAX_MATERIALIZED:
            raise SpecError(
                f"{type(self).__name__}: the tables would have {float(entries):.4g} entries, at most {MAX_MATERIALIZED:,} are "
                "allowed; choose smaller combinations, or fewer states"
            )
        return factors

    def clamped(self) -> Self:
        return replace(self, outside="nearest")

    def sizes(self, in_features: int) -> tuple[int, ...]:
        """Return the number of states of each input."""
        return self.states if isinstance(self.states, tuple) else (self.states,) * in_features

    def _entries(self, in_features: int) -> int:
        sizes = self.sizes(in_features)
        if self.subsets is not None:
            return sum([math.prod([sizes[i] for i in subset]) for subset in self.subsets])
        # Elementary symmetric polynomials: entries of the combinations of each size.
        products = [1] + [0] * self.order
        for size in sizes:
            for i in range(self.order, 0, -1):
                products[i] += size * products[i - 1]
        return sum(products[1:])

    def _layout(self, in_features: int, device: torch.device) -> _Layout:
        """Return the layout of the tables."""
        if self.subsets is None:
            combinations = all_combinations(in_features, self.order, device)
            largest = len(combinations)
            padded = [
                torch.nn.functional.pad(index, (0, 0, 0, largest - len(index)), value=-1) for index in combinations
            ]
            inputs = torch.cat(padded, 1)
        else:
            largest = max([len(subset) for subset in self.subsets])
            rows = [[*subset, *[-1] * (largest - len(subset))] for subset in self.subsets]
            inputs = torch.tensor(rows, dtype=torch.int64, device=device).reshape(len(rows), largest).T
        sizes = torch.tensor((*self.sizes(in_features), 1), device=device)[inputs]  # a single state for padding
        # Products from the last row on; ONNX has no cumulative product.
        products = list(itertools.accumulate(reversed(sizes.unbind(0)), torch.mul))
        ends, widths = torch.stack(products[::-1]), products[-1]
        return _Layout(
            inputs.clamp_min(0), ends // sizes * (inputs >= 0), widths.cumsum(0) - widths, self._entries(in_features)
        )

    def _cells(self, x: Tensor, layout: _Layout) -> Tensor:
        """Return the table cell of the joint state of each combination, `(..., D)`."""
        states = self._nearest(x).long()
        cells = layout.offsets.expand(*x.shape[:-1], -1)
        for inputs, strides in zip(layout.inputs, layout.strides, strict=True):
            cells = cells + states.index_select(-1, inputs) * strides
        return cells

    def _nearest(self, x: Tensor) -> Tensor:
        values = working_precision(x).detach().nan_to_num(0.0)
        last = torch.tensor(self.sizes(x.shape[-1]), dtype=values.dtype, device=x.device) - 1
        return torch.minimum(values.round().clamp_min(0), last)

    def _spoiled(self, x: Tensor) -> Tensor:
        """Return the rows with NaN, `(..., 1)`; invalid states are refused, or marked in a compiled model, with
        `outside="error"`.

        Raises:
            DataError: an input is not a state index.
        """
        invalid = x.isnan()
        if self.outside == "error" and not x.is_meta:
            outside = ~invalid & (self._nearest(x) != x)
            if torch.compiler.is_compiling():
                invalid = invalid | outside
            elif bool(outside.any()):
                first = outside.nonzero()[0, -1].item()
                raise DataError(
                    f"{type(self).__name__}(outside='error'): {int(outside.sum()):,} inputs are not the number of a state, the "
                    f"first is {x[outside][0].item():.6g} of input {first}, which has the states 0 to "
                    f"{self.sizes(x.shape[-1])[int(first)] - 1:,}"
                )
        return invalid.any(-1, keepdim=True)


@dataclass(frozen=True)
class CombinatorialCategorical(StateCombinations, name="combinatorial_categorical"):
    """A table entry for the joint state of every combination: κ(x) = [T_S(x_S) for all S], D = Σ C(m, i).

    Inputs are state indices, 0 to k − 1. The tables T_S are logarithms of joint or conditional probabilities, concatenated
    in the buffer `tables` (a parameter if learnable), the last input of a combination running fastest. Sums and differences
    of columns are then log-probabilities of a Bayesian network. `kapsi.calibrate` sets the tables to logarithms of relative
    frequencies, with one added to each count. Assigned values must be finite, since zeros of ψ times −∞ are NaN: represent
    a probability of zero by a number such as −10,000.

    Before calibration inputs are independent, each state e² times less likely than the state before. The gradient with
    respect to x is zero.

    Args:
        order: size of the largest combination, 1 to 4; combinations of more than m inputs do not exist.
        subsets: combinations to use instead of all, as tuples of input indices from 0, of any sizes; the order within a
            tuple is the order of the axes of its table; () has a single entry. D is then their number. Overrides the order.
        states: k, number of states of each input, 1 to 100,000, or one number for all.
        outside: treatment of invalid state indices. `nearest`: the nearest valid state; `error`: a ValueError in eager
            mode, NaN in a compiled or exported model.
        learnable: train the parameter `tables`.

    Raises:
        SpecError: more than 16.7 million columns or table entries, or a subset with an unknown input.

    Source: arXiv 2407.04819, "Combinatorial Probabilistic Data Expansion"; Koller and Friedman, Probabilistic Graphical
        Models (2009), 3.2.

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

    def params(self, in_features: int) -> Params:
        self.factors(in_features)
        initial = functools.partial(_independent_states, self, in_features)
        return {"tables": Param((self._entries(in_features),), initial, trainable=self.learnable)}

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        """Return logarithms of the relative frequencies of joint states, with one added to each count."""
        layout = self._layout(x.shape[-1], x.device)
        counts = torch.zeros(layout.entries, dtype=torch.int64, device=x.device)
        for rows in x.split(max(1, MAX_MATERIALIZED // max(1, layout.offsets.numel()))):
            counts += torch.bincount(self._cells(rows, layout).flatten(), minlength=layout.entries)
        widths = torch.diff(layout.offsets, append=layout.offsets.new_tensor([layout.entries]))
        totals = torch.repeat_interleave(len(x) + widths, widths, output_size=layout.entries)
        return {"tables": ((counts.double() + 1) / totals).log()}

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        self.factors(x.shape[-1])  # check the size first
        columns = params["tables"][self._cells(x, self._layout(x.shape[-1], x.device))]
        return DenseFeatures(torch.where(self._spoiled(x), math.nan, columns.to(x.dtype)))


class _Layout(NamedTuple):
    """Positions of the tables.

    Attributes:
        inputs: inputs of each combination, padded with zeros, `(largest, D)`.
        strides: distances between states of each input, 0 for padding, `(largest, D)`.
        offsets: start of the table of each combination, `(D,)`.
        entries: number of entries of all tables.
    """

    inputs: Tensor
    strides: Tensor
    offsets: Tensor
    entries: int


def _independent_states(
    function: CombinatorialCategorical, in_features: int, shape: tuple[int, ...], generator: Generator | None
) -> Tensor:
    """Return tables of independent inputs, each state e² times less likely than the state before."""
    layout = function._layout(in_features, torch.device("cpu"))
    widths = torch.diff(layout.offsets, append=layout.offsets.new_tensor([layout.entries]))
    sizes = torch.tensor(function.sizes(in_features))
    constants = torch.log(-torch.expm1(-2.0 * sizes.double()) / -math.expm1(-2.0))
    column = torch.repeat_interleave(torch.arange(len(widths)), widths, output_size=layout.entries)
    position = torch.arange(layout.entries) - layout.offsets[column]
    total = torch.zeros(layout.entries, dtype=torch.float64)
    for inputs, strides in zip(layout.inputs, layout.strides, strict=True):
        states = position // strides[column].clamp_min(1) % sizes[inputs[column]]
        total -= torch.where(strides[column] > 0, 2.0 * states + constants[inputs[column]], 0.0)
    return total


def all_combinations(m: int, order: int, device: torch.device, *, replacement: bool = False) -> list[Tensor]:
    """Return all combinations of 1, 2, … order of m inputs, `(size, C(m, size))`, with columns in lexicographic order.

    Each combination of one size less is extended by every later input; with replacement also by its last input.
    """
    last = torch.arange(m, device=device)
    combinations = [last.unsqueeze(0)]
    step = int(not replacement)  # from the last input of a combination to the first that extends it
    for size in range(2, (order if replacement else min(order, m)) + 1):
        total = math.comb(m + size - 1, size) if replacement else math.comb(m, size)
        later = m - step - last
        begin = later.cumsum(0) - later
        # The last combination that begins at or before each column; ONNX has no repeat_interleave of a known size.
        starts = torch.zeros(total + 1, dtype=torch.int64, device=device).scatter_add(0, begin, torch.ones_like(begin))
        parent = starts.cumsum(0)[:total] - 1
        last = last[parent] + step + torch.arange(total, device=device) - begin[parent]
        combinations.append(torch.cat((combinations[-1][:, parent], last.unsqueeze(0))))
    return combinations


def _log_density(centered: Tensor, index: Tensor, covariance: Tensor, min_variance: Tensor) -> Tensor:
    """Return the joint normal log-density of combinations of inputs, `(..., combinations)`.

    Inputs are eliminated one after another; the others are replaced by their residuals given the eliminated inputs.

    Args:
        centered: x − μ, `(..., m)`.
        index: inputs of each combination in ascending order, `(size, combinations)`.
        covariance: Σ, `(m, m)`.
        min_variance: variance of each input given all inputs before it, `(m,)`: a lower bound given only some of them.
    """
    size = len(index)
    residual = centered.index_select(-1, index.flatten()).unflatten(-1, index.shape)
    joint = covariance[index.unsqueeze(1), index.unsqueeze(0)]
    total = torch.zeros_like(residual[..., 0, :])
    for k in range(size):
        variance = torch.maximum(joint[0, 0], min_variance[index[k]])
        first = residual[..., 0, :]
        total = total + (first * variance.rsqrt().to(first.dtype)).square() + variance.log().to(first.dtype)
        if k + 1 < size:
            slopes = joint[1:, 0] / variance
            residual = residual[..., 1:, :] - first.unsqueeze(-2) * slopes.to(first.dtype)
            joint = joint[1:, 1:] - slopes.unsqueeze(1) * joint[:1, 1:]
    return -0.5 * (total + size * math.log(2 * math.pi))
