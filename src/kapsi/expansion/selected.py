"""Expansions of some of the inputs."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Generator, Tensor

from kapsi.errors import SpecError
from kapsi.expansion.base import Expansion, Interval, Refinement
from kapsi.features import Features, SparseFeatures
from kapsi.function import Param, Params, Tensors, option
from kapsi.process import Process

__all__ = ["SelectedInputs"]


@dataclass(frozen=True)
class SelectedInputs(Expansion, name="selected_inputs"):
    """An expansion of some of the inputs: κ(x) = κ₁(x_S), S a list of `count` inputs, D = D₁(count).

    The buffer `selection` `(count,)` holds the indices of S, the buffer `inputs` `(1,)` the number of inputs m. Before
    `head.assign("expansion", selection=…)` they are the first inputs, in turn if there are fewer than `count`. Parts of
    `Extended` with different selections give each group of inputs an expansion of its own. Of sparse inputs, x_S is dense.

    Args:
        expansion: the expansion κ₁.
        count: number of inputs in S, 1 to 1,000,000.

    Source: none needed.

    Example:
        >>> import torch, kapsi as kp
        >>> head = kp.Head(3, 1, kp.HeadSpec(SelectedInputs(kp.Taylor(2), count=1)))
        >>> head.assign("expansion", selection=[2])
        >>> head.expand(torch.tensor([5.0, 7.0, 3.0])).dense()
        tensor([3., 9.])
    """

    examples = (
        {"expansion": "identity", "count": 3},
        {"expansion": "b_spline", "count": 2},
        {"expansion": {"kind": "taylor", "symmetric": True}, "count": 3},
    )

    expansion: Expansion
    count: int = option(1, minimum=1, maximum=1_000_000)

    def inner_processes(self) -> tuple[Process, ...]:
        return self.expansion.inner_processes()

    def takes_sparse(self) -> bool:
        return True

    def factors(self, in_features: int) -> tuple[int, int]:
        return self.expansion.factors(self.count)

    def column_names(self, names: Sequence[str], tensors: Tensors) -> list[str]:
        chosen = [names[i] for i in tensors["selection"].tolist()]
        return self.expansion.column_names(chosen, tensors["expansion"])

    def heavy_tailed(self) -> bool:
        return self.expansion.heavy_tailed()

    def clamped(self) -> Self:
        return replace(self, expansion=self.expansion.clamped())

    def domain(self, in_features: int) -> tuple[Interval, ...]:
        return self.expansion.domain(self.count)

    def initial_rms(self) -> float:
        return self.expansion.initial_rms()

    def rough_products(self) -> bool:
        return self.expansion.rough_products()

    def params(self, in_features: int) -> Params:
        return {
            "inputs": Param((1,), (float(in_features),), trainable=False, dtype=torch.int64),
            "selection": Param(
                (self.count,), functools.partial(in_turn, in_features), trainable=False, dtype=torch.int64
            ),
            "expansion": self.expansion.params(self.count),
        }

    def validate(self, tensors: Tensors) -> None:
        """Raise a `SpecError` for indices other than those of inputs."""
        selection, inputs = tensors["selection"], int(tensors["inputs"])
        if bool(((selection < 0) | (selection >= inputs)).any()):
            raise SpecError(f"SelectedInputs: selection: expected indices of inputs from 0 to {inputs - 1}")
        self.expansion.validate(tensors["expansion"])

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        return {"expansion": self.expansion.calibrate(x[..., params["selection"]], params["expansion"], y)}

    def calibrate_hidden(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        return {"expansion": self.expansion.calibrate_hidden(x[..., params["selection"]], params["expansion"], y)}

    def has_grid(self) -> bool:
        return self.expansion.has_grid()

    def refined(self, tensors: Tensors, in_features: int, intervals: int) -> Refinement | None:
        new = self.expansion.refined(tensors["expansion"], self.count, intervals)
        return new and self._around(new, {name: tensors[name] for name in ("inputs", "selection")})

    def moved(self, x: Tensor, tensors: Tensors, margin: float = 1.0) -> Refinement | None:
        new = self.expansion.moved(x[..., tensors["selection"]], tensors["expansion"], margin)
        return new and self._around(new, {})

    def _around(self, inner: Refinement, others: Mapping[str, Tensor]) -> Refinement:
        """Return a refinement of κ₁ as one of the whole."""
        tensors: dict[str, Any] = {**others, "expansion": inner.tensors}
        return replace(inner, expansion=replace(self, expansion=inner.expansion), tensors=tensors)

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        chosen = params["selection"]
        inputs = x.index_select(-1, chosen) if x.layout == torch.strided else _selected(x, chosen)
        return self.expansion(inputs, params["expansion"])


def _selected(x: Tensor, chosen: Tensor) -> Tensor:
    """Return some columns of a sparse tensor as a dense one, `(rows, count)`."""
    features = SparseFeatures.of(x)
    distinct, place = chosen.unique(return_inverse=True)
    group = torch.full((features.width,), -1, device=chosen.device).index_put_(
        (distinct,), torch.arange(len(distinct), device=chosen.device)
    )
    group = group[features.indices]
    used = group >= 0
    part = replace(features, values=torch.where(used, features.values, 0))
    return part.grouped(group.clamp_min(0), len(distinct))[:, place]


def in_turn(in_features: int, shape: tuple[int, ...], generator: Generator | None) -> Tensor:
    """Return indices of inputs in turn."""
    return (torch.arange(math.prod(shape), device="cpu") % in_features).reshape(shape)
