"""Splines of pairs of inputs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from kapsi.errors import SpecError
from kapsi.expansion.base import HIDDEN_MARGIN, Expansion, Interval
from kapsi.expansion.numerics import working_precision
from kapsi.expansion.spline import BSpline
from kapsi.expansion.spline_knots import pieces_on_knots
from kapsi.features import DenseFeatures, Features
from kapsi.function import Param, Params, Tensors, option

__all__ = ["PairSplines"]


@dataclass(frozen=True)
class PairSplines(Expansion, name="pair_splines"):
    """Products of the splines of two inputs, for some pairs: κ(x) = [B_a(x_i) B_b(x_j) for each pair (i, j), a and b], D =
    pairs·(intervals₁ + degree)(intervals₂ + degree).

    Columns are pair by pair, b fastest. A pair has (degree + 1)² non-zero columns, which add up to one. Functions are
    constant beyond the range of the knots.

    The buffers are `pairs` `(2, pairs)`, the inputs i and j of each pair; `first` and `second`, all knots of the splines of
    i and of j, `(intervals + 1 + 2·degree, pairs)` as in `BSpline`; and `inputs` `(1,)`, the number of inputs m. At first
    the pairs of different inputs come in turn, on uniform knots from −1 to 1; `kapsi.calibrate` moves the knots to
    quantiles.

    Args:
        pairs: number of pairs, 1 to 1,000,000.
        intervals: numbers of intervals of the first and of the second input of a pair, 1 to 1,000.
        degree: degree of the pieces, 0 (steps) to 5.

    Source: Eilers and Marx, "Multivariate calibration with temperature interaction using two-dimensional penalized signal
        regression", Chemometrics 66 (2003): products of B-splines; Lou et al., "Accurate intelligible models with pairwise
        interactions" (2013), for selected pairs.

    Example:
        >>> import torch, kapsi as kp
        >>> head = kp.Head(2, 1, kp.HeadSpec(PairSplines(pairs=1, intervals=(1, 1))))
        >>> head.expand(torch.tensor([0.5, -1.0])).dense()  # corners of [−1, 1]²
        tensor([0.2500, 0.0000, 0.7500, 0.0000])
    """

    examples = (
        {},
        {"pairs": 1, "intervals": (1, 3)},
        {"pairs": 2, "intervals": (2, 2), "degree": 2},
    )

    hidden_margin: ClassVar[float] = HIDDEN_MARGIN

    pairs: int = option(3, minimum=1, maximum=1_000_000)
    intervals: tuple[int, int] = (3, 3)
    degree: int = option(1, minimum=0, maximum=5)

    def check(self) -> None:
        if len(self.intervals) != 2 or not all(1 <= count <= 1_000 for count in self.intervals):
            raise SpecError(f"PairSplines(intervals={self.intervals}): expected two numbers from 1 to 1,000")

    def factors(self, in_features: int) -> tuple[int, int]:
        first, second = (count + self.degree for count in self.intervals)
        return self.pairs, first * second

    def domain(self, in_features: int) -> tuple[Interval, ...]:
        return ((self.out_features(in_features), -1.0, 1.0),)

    def splines(self) -> tuple[BSpline, BSpline]:
        """Return the splines of the first and of the second input of a pair."""
        first, second = (
            BSpline(count, self.degree, extrapolation="clamp", knots="quantile") for count in self.intervals
        )
        return first, second

    def params(self, in_features: int) -> Params:
        first, second = (spline.params(self.pairs)["knots"] for spline in self.splines())
        return {
            "inputs": Param((1,), (float(in_features),), trainable=False, dtype=torch.int64),
            "pairs": Param(
                (2, self.pairs), functools.partial(_in_turn, in_features), trainable=False, dtype=torch.int64
            ),
            "first": first,
            "second": second,
        }

    def validate(self, tensors: Tensors) -> None:
        """Raise a `SpecError` for indices other than those of inputs, and for knots that decrease."""
        pairs, inputs = tensors["pairs"], int(tensors["inputs"])
        if bool(((pairs < 0) | (pairs >= inputs)).any()):
            raise SpecError(f"PairSplines: pairs: expected indices of inputs from 0 to {inputs - 1}")
        for name, spline in zip(("first", "second"), self.splines(), strict=True):
            spline.validate({"knots": tensors[name]})

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        """Return knots at quantiles of the rows."""
        return {
            name: spline.calibrate(x[..., inputs], {"knots": params[name]})["knots"]
            for name, spline, inputs in zip(("first", "second"), self.splines(), params["pairs"], strict=True)
        }

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        values, degree = working_precision(x), self.degree
        (_, cell, pieces, _), (_, other_cell, other, _) = (
            pieces_on_knots(values.index_select(-1, inputs), working_precision(params[name]), degree)
            for name, inputs in zip(("first", "second"), params["pairs"].unbind(), strict=True)
        )
        # Non-zero products and their columns within the pair, (..., pairs, (degree + 1)²).
        products = (pieces.unsqueeze(-2) * other.unsqueeze(-3)).flatten(-3, -2).transpose(-1, -2)
        width = self.intervals[1] + degree
        step = torch.arange(degree + 1, device=x.device)
        columns = (cell * width + other_cell).unsqueeze(-1) + (step.unsqueeze(-1) * width + step).flatten()
        size = (self.intervals[0] + degree) * width
        basis = torch.zeros_like(products[..., :1]).expand(*products.shape[:-1], size).scatter(-1, columns, products)
        return DenseFeatures(basis.flatten(-2).to(x.dtype))


def _in_turn(in_features: int, shape: tuple[int, ...], generator: Generator | None) -> Tensor:
    """Return pairs of different inputs in turn; of a single input, pairs with itself."""
    every = itertools.combinations(range(in_features), 2) if in_features > 1 else iter([(0, 0)])
    first = torch.tensor(list(itertools.islice(every, shape[1])), device="cpu").T
    return first[:, torch.arange(shape[1], device="cpu") % first.shape[1]]
