"""Compositions of expansions: nested (composed), extended (concatenated), and with processing before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.expansion.base import Expansion, Interval, Refinement, RowMap, common_domain
from kapsi.expansion.simple import Identity
from kapsi.features import (
    ConcatenatedFeatures,
    DenseFeatures,
    Features,
    SparseFeatures,
    check_formed,
    formed,
    side_by_side,
)
from kapsi.function import Params, Tensors
from kapsi.process import Activation, Process, Steps, folds, processed

__all__ = ["Extended", "Nested", "Processed"]

GRID_RMS = 0.5
"""Initial RMS of the outputs of heads with splines beside or within other functions: within the next grid, [−1, 1].

Error over that of Xavier's values, median over 34 functions (zero and linear remainder): nested 1.3 and 0.6, extended 1.0 and 0.6;
with an RMS of 1 up to 1.8.
"""


@dataclass(frozen=True)
class Processed(Expansion, name="processed"):
    """An expansion with processing before and after: κ(x) = after(κ₁(before(x))), D = D₁.

    As a part of `Nested` or `Extended` it has its own activations and norms; for a whole head, `before` and `after` of the
    head do the same. Tensors are named `expansion`, `before` and `after`.

    Args:
        expansion: the expansion κ₁.
        before: steps before κ₁, by name or as functions, in order.
        after: steps after κ₁; a first layer norm without affine part keeps the structure of κ₁.

    Source: arXiv 2407.04819, "Identity and Reciprocal Data Expansion": σ before and after an expansion.

    Example:
        >>> import torch, kapsi as kp
        >>> kappa = kp.Processed(kp.Taylor(2), after="tanh")
        >>> kp.ExpansionModule(1, kappa)(torch.tensor([1.0]))
        tensor([0.7616, 0.7616])
    """

    examples = (
        {"expansion": "chebyshev", "after": "tanh"},
        {"expansion": "taylor", "before": ("layer_norm", "silu"), "after": "layer_norm"},
        {"expansion": "b_spline", "after": ({"kind": "layer_norm", "affine": True}, "sigmoid")},
    )

    expansion: Expansion
    before: tuple[Process, ...] = ()
    after: tuple[Process, ...] = ()

    def inner_processes(self) -> tuple[Process, ...]:
        return (*self.before, *self.expansion.inner_processes(), *self.after)

    def takes_sparse(self) -> bool:
        return not self.before and not self.after and self.expansion.takes_sparse()

    def factors(self, in_features: int) -> tuple[int, int]:
        q, t = self.expansion.factors(in_features)
        if len(self.after) > folds(self.after):
            check_formed(q * t, f"Processed({self.expansion.name}): processing after κ")
        return q, t

    def column_names(self, names: Sequence[str], tensors: Tensors) -> list[str]:
        inputs = [_applied(self.before, name) for name in names]
        return [_applied(self.after, name) for name in self.expansion.column_names(inputs, tensors["expansion"])]

    def element_wise(self) -> bool:
        return self.expansion.element_wise() and all(
            isinstance(step, Activation) for step in (*self.before, *self.after)
        )

    def heavy_tailed(self) -> bool:
        return self.expansion.heavy_tailed()

    def clamped(self) -> Self:
        return replace(self, expansion=self.expansion.clamped())

    def domain(self, in_features: int) -> tuple[Interval, ...]:
        """Return the domain of κ₁; all numbers if steps come before it."""
        return super().domain(in_features) if self.before else self.expansion.domain(in_features)

    def params(self, in_features: int) -> Params:
        sizes = {"before": in_features, "after": self.out_features(in_features)}
        steps = {name: Steps(getattr(self, name), size) for name, size in sizes.items() if getattr(self, name)}
        return {"expansion": self.expansion.params(in_features), **steps}

    def validate(self, tensors: Tensors) -> None:
        self.expansion.validate(tensors["expansion"])

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        return {"expansion": self.expansion.calibrate(self._prepared(x, params), params["expansion"], y)}

    def calibrate_hidden(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        return {"expansion": self.expansion.calibrate_hidden(self._prepared(x, params), params["expansion"], y)}

    def covered(self, params: Tensors, in_features: int) -> tuple[Tensor, Tensor] | None:
        return None if self.before else self.expansion.covered(params["expansion"], in_features)

    def has_grid(self) -> bool:
        return self.expansion.has_grid()

    def refined(self, tensors: Tensors, in_features: int, intervals: int) -> Refinement | None:
        return self._around(self.expansion.refined(tensors["expansion"], in_features, intervals))

    def moved(self, x: Tensor, tensors: Tensors, margin: float = 1.0) -> Refinement | None:
        return self._around(self.expansion.moved(self._prepared(x, tensors), tensors["expansion"], margin))

    def _around(self, inner: Refinement | None) -> Refinement | None:
        """Return a refinement of κ₁ as one of the whole."""
        if inner is None:
            return None
        if self.after:
            steps = ", ".join(type(step).__name__ for step in self.after)
            raise SpecError(f"Processed: {steps} after κ acts on its columns, and another grid has other columns")
        return replace(inner, expansion=replace(self, expansion=inner.expansion), tensors={"expansion": inner.tensors})

    def _prepared(self, x: Tensor, params: Tensors) -> Tensor:
        result: Tensor = params["before"](x) if self.before else x
        return result

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        features = self.expansion(self._prepared(x, params), params["expansion"])
        return processed(features, self.after, params["after"], "Processed") if self.after else features


def _applied(steps: Sequence[Process], name: str) -> str:
    """Return the name of a column after some steps."""
    for step in steps:
        name = f"{step.name}({name})"
    return name


@dataclass(frozen=True)
class ComposedExpansion(Expansion):
    """An expansion of several parts; tensors are named by position, `0`, `1`, …."""

    parts: tuple[Expansion, ...]
    between: tuple[Process, ...] = ()

    def check(self) -> None:
        if not self.parts:
            raise SpecError(f"{type(self).__name__}(parts=()): at least one expansion is needed")

    @cached_property  # cached before compilation
    def processed_parts(self) -> tuple[Expansion, ...]:
        """Return the parts with the processing between them."""
        return tuple(Processed(part, after=self.between) if self.between else part for part in self.parts)

    def inner_processes(self) -> tuple[Process, ...]:
        return tuple(step for part in self.processed_parts for step in part.inner_processes())

    def element_wise(self) -> bool:
        return all(part.element_wise() for part in self.processed_parts)

    def heavy_tailed(self) -> bool:
        return any(part.heavy_tailed() for part in self.parts)

    def clamped(self) -> Self:
        return replace(self, parts=tuple(part.clamped() for part in self.parts))

    def validate(self, tensors: Tensors) -> None:
        for i, part in enumerate(self.processed_parts):
            part.validate(tensors[str(i)])

    def covered(self, params: Tensors, in_features: int) -> tuple[Tensor, Tensor] | None:
        """Return the range of the first part that has one; of `Nested`, only the first part sees the inputs."""
        parts = self.processed_parts[:1] if isinstance(self, Nested) else self.processed_parts
        ranges = (part.covered(params[str(i)], in_features) for i, part in enumerate(parts))
        return next((ends for ends in ranges if ends is not None), None)

    def has_grid(self) -> bool:
        return any(part.has_grid() for part in self.parts)

    def initial_rms(self) -> float:
        return GRID_RMS if len(self.parts) > 1 and self.has_grid() else 1.0

    def rough_products(self) -> bool:
        return any(part.rough_products() for part in self.parts)


@dataclass(frozen=True)
class Extended(ComposedExpansion, name="extended"):
    """Concatenated expansions: κ(x) = [κ₁(x), κ₂(x), …], D = ΣDᵢ.

    Args:
        parts: the expansions, at least one; tensors are named by position, `0`, `1`, ….
        between: steps applied to the columns of each part by itself: activations, norms. For steps of a single part, make it a
            `Processed`.

    Source: arXiv 2407.04819, "Nested and Extended Expansion Functions".

    Example:
        >>> import torch
        >>> from kapsi import Identity, Taylor
        >>> Extended((Identity(), Taylor(2)))(torch.tensor([3.0]), {"0": {}, "1": {}}).dense()
        tensor([3., 3., 9.])
    """

    examples = (
        {"parts": ("identity", "chebyshev")},
        {"parts": ("taylor", "b_spline", "identity")},
        {"parts": ({"kind": "nested", "parts": ("chebyshev", "taylor")}, "b_spline")},
        {"parts": ("taylor", "identity"), "between": "layer_norm"},
    )

    def factors(self, in_features: int) -> tuple[int, int]:
        return 1, sum(part.out_features(in_features) for part in self.processed_parts)

    def column_names(self, names: Sequence[str], tensors: Tensors) -> list[str]:
        parts = enumerate(self.processed_parts)
        return [name for i, part in parts for name in part.column_names(names, tensors[str(i)])]

    def domain(self, in_features: int) -> tuple[Interval, ...]:
        return tuple(interval for part in self.processed_parts for interval in part.domain(in_features))

    def params(self, in_features: int) -> Params:
        return {str(i): part.params(in_features) for i, part in enumerate(self.processed_parts)}

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        return {str(i): part.calibrate(x, params[str(i)], y) for i, part in enumerate(self.processed_parts)}

    def calibrate_hidden(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        return {str(i): part.calibrate_hidden(x, params[str(i)], y) for i, part in enumerate(self.processed_parts)}

    def refined(self, tensors: Tensors, in_features: int, intervals: int) -> Refinement | None:
        """Return all parts with a grid refined, the others unchanged."""
        inner = [part.refined(tensors[str(i)], in_features, intervals) for i, part in enumerate(self.processed_parts)]
        unchanged = {str(i): tensors[str(i)] for i, new in enumerate(inner) if new is None}
        return self._joined(inner, unchanged, in_features)

    def moved(self, x: Tensor, tensors: Tensors, margin: float = 1.0) -> Refinement | None:
        """Return the grids of all parts moved to the data."""
        inner = [part.moved(x, tensors[str(i)], margin) for i, part in enumerate(self.processed_parts)]
        return self._joined(inner, {}, x.shape[-1])

    def _joined(
        self, inner: list[Refinement | None], unchanged: Mapping[str, Any], in_features: int
    ) -> Refinement | None:
        """Return refinements of some parts as one of the whole, with the tensors of some unchanged parts."""
        if not any(inner):
            return None
        sizes = [part.out_features(in_features) for part in self.processed_parts]

        def columns(rows: Tensor) -> Tensor:
            pieces = zip(rows.split(sizes, -1), inner, strict=True)
            return torch.cat([piece if new is None else new.columns(piece) for piece, new in pieces], -1)

        parts = tuple(part if new is None else new.expansion for part, new in zip(self.parts, inner, strict=True))
        values = {str(i): new.tensors for i, new in enumerate(inner) if new is not None}
        return Refinement(replace(self, parts=parts), {**unchanged, **values}, columns)

    def linear_coefficients(self, weights: Tensor) -> Tensor | None:
        """Return the coefficients of equal shares of all parts that have linear functions, 0 for the others."""
        rows = [part.linear_coefficients(weights) for part in self.processed_parts]
        count = sum(row is not None for row in rows)
        if not count:
            return None
        sizes = [part.out_features(weights.shape[-1]) for part in self.parts]
        shares = (
            weights.new_zeros(*weights.shape[:-1], size) if row is None else row / count
            for row, size in zip(rows, sizes, strict=True)
        )
        return torch.cat(tuple(shares), -1)

    def takes_sparse(self) -> bool:
        return all(part.takes_sparse() for part in self.processed_parts)

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        pieces: list[Features] = []
        for i, part in enumerate(self.processed_parts):
            features = part(x, params[str(i)])
            for piece in features.parts if isinstance(features, ConcatenatedFeatures) else (features,):
                # Merge neighbors without structure into one array: a single matrix product instead of several.
                if pieces and isinstance(piece, DenseFeatures) and isinstance(pieces[-1], DenseFeatures):
                    pieces[-1] = DenseFeatures(torch.cat((pieces[-1].values, piece.values), -1))
                elif pieces and isinstance(piece, SparseFeatures) and isinstance(pieces[-1], SparseFeatures):
                    pieces[-1] = side_by_side([pieces[-1], piece])
                else:
                    pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else ConcatenatedFeatures(tuple(pieces))


@dataclass(frozen=True)
class Nested(ComposedExpansion, name="nested"):
    """Composed expansions: κ(x) = κ_k(… κ₂(κ₁(x))), D = D_k(… D₂(D₁)).

    Parts are in order of application. The last part keeps its structure; the inputs of every part are dense.

    Args:
        parts: the expansions, at least one; `Nested((BSpline(), Taylor(2)))` is Taylor of B-splines.
        between: steps applied to the outputs of each part before the next part: activations, norms. For steps of a single part,
            make it a `Processed`.

    Source: arXiv 2407.04819, "Nested and Extended Expansion Functions".

    Example:
        >>> import torch
        >>> from kapsi import Chebyshev, Taylor
        >>> Nested((Chebyshev(2), Taylor(2))).out_features(3)
        42
    """

    examples = (
        {"parts": ("chebyshev", "taylor")},
        {"parts": ("b_spline", {"kind": "taylor", "symmetric": True})},
        {"parts": ("taylor", {"kind": "extended", "parts": ("identity", "b_spline")})},
        {"parts": ("b_spline", "taylor"), "between": ("layer_norm", "tanh")},
    )

    @cached_property
    def processed_parts(self) -> tuple[Expansion, ...]:
        return (*super().processed_parts[:-1], self.parts[-1])

    def check(self) -> None:
        super().check()
        if self.between and len(self.parts) == 1:
            raise SpecError("Nested(between=…): a single part has no part after it; use Processed")

    def _widths(self, in_features: int) -> list[int]:
        """Return the number of inputs of each part."""
        widths = [in_features]
        # Without the last part: its width is not needed, and computing it for every nesting level takes exponential time.
        for part in self.processed_parts[:-1]:
            widths.append(part.out_features(widths[-1]))
        return widths

    def factors(self, in_features: int) -> tuple[int, int]:
        return self.processed_parts[-1].factors(self._widths(in_features)[-1])

    def column_names(self, names: Sequence[str], tensors: Tensors) -> list[str]:
        columns = list(names)
        for i, part in enumerate(self.processed_parts):
            columns = part.column_names(columns, tensors[str(i)])
        return columns

    def domain(self, in_features: int) -> tuple[Interval, ...]:
        """Return the domain of the first part for all columns: only the first part sees the inputs."""
        return ((self.out_features(in_features), *common_domain(self.processed_parts[0], in_features)),)

    def params(self, in_features: int) -> Params:
        widths = self._widths(in_features)
        return {
            str(i): part.params(width) for i, (part, width) in enumerate(zip(self.processed_parts, widths, strict=True))
        }

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        """Return new values part by part, each from the outputs of the calibrated parts before."""
        return self._calibrated(x, params, y, hidden=False)

    def calibrate_hidden(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        return self._calibrated(x, params, y, hidden=True)

    def _calibrated(self, x: Tensor, params: Tensors, y: Tensor | None, *, hidden: bool) -> Mapping[str, Any]:
        values: dict[str, Any] = {}
        for i, part in enumerate(self.processed_parts):
            new = (part.calibrate_hidden if hidden else part.calibrate)(x, params[str(i)], y)
            values[str(i)] = new
            if i + 1 < len(self.processed_parts):
                x = formed(part(x, _Overlay(params[str(i)], new)), "Nested")
        return values

    def refined(self, tensors: Tensors, in_features: int, intervals: int) -> Refinement | None:
        """Return the last part refined; the parts before must have no grid."""
        last = len(self.processed_parts) - 1
        for i, part in enumerate(self.processed_parts[:last]):
            if part.has_grid():
                raise SpecError(
                    f"Nested: the function cannot be kept with a finer grid of {type(part).__name__}, part {i}, as other "
                    "parts come after it; only the last part may have a grid"
                )
        finer = self.processed_parts[last].refined(tensors[str(last)], self._widths(in_features)[last], intervals)
        if finer is None:
            return None
        values = {str(i): tensors[str(i)] for i in range(last)} | {str(last): finer.tensors}
        return replace(finer, expansion=replace(self, parts=(*self.parts[:last], finer.expansion)), tensors=values)

    def moved(self, x: Tensor, tensors: Tensors, margin: float = 1.0) -> Refinement | None:
        """Return the grid of a part moved to its inputs; the parts after it must turn linear maps of inputs into linear maps."""
        widths, values = self._widths(x.shape[-1]), {}
        columns: RowMap | None = None
        grid: RowMap | None = None
        for i, part in enumerate(self.processed_parts):
            if columns is not None:
                grid, columns = None, part.substituted(columns, widths[i])
                if columns is None:
                    raise SpecError(
                        f"Nested: the function cannot be kept with another grid of part {i - 1}, as {type(part).__name__}, "
                        "not a polynomial in its outputs, comes after it"
                    )
            else:
                new = part.moved(x, tensors[str(i)], margin)
                if new is not None:
                    values[str(i)], columns, grid = new.tensors, new.columns, new.grid
                elif i + 1 < len(widths):
                    x = formed(part(x, tensors[str(i)]), "Nested")
        return None if columns is None else Refinement(self, values, columns, grid)

    def rough_products(self) -> bool:
        grid_inside = not self.element_wise() and any(part.has_grid() for part in self.parts[:-1])
        return grid_inside or super().rough_products()

    def linear_coefficients(self, weights: Tensor) -> Tensor | None:
        """Return the coefficients in the last part: each part has those of the part before as weights."""
        rows: Tensor | None = weights
        for part in self.processed_parts:
            rows = None if rows is None else part.linear_coefficients(rows)
        return rows

    def takes_sparse(self) -> bool:
        """Return whether the last part takes sparse inputs and the others are the identity."""
        return (
            all(isinstance(part, Identity) for part in self.processed_parts[:-1])
            and self.processed_parts[-1].takes_sparse()
        )

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        last = len(self.processed_parts) - 1
        for i, part in enumerate(self.processed_parts[:last]):
            if not isinstance(part, Identity):
                x = formed(part(x, params[str(i)]), "Nested")
        return self.processed_parts[last](x, params[str(last)])


class _Overlay:
    """Tensors by name, some replaced."""

    def __init__(self, tensors: Tensors, replaced: Mapping[str, Any]) -> None:
        self.tensors, self.replaced = tensors, replaced

    def __getitem__(self, name: str) -> Any:
        if name not in self.replaced:
            return self.tensors[name]
        value = self.replaced[name]
        return _Overlay(self.tensors[name], value) if isinstance(value, Mapping) else value
