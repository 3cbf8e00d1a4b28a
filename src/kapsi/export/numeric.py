"""The numeric part of a prediction as one module: standardization, encodings, the model, and the unit of the target."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Sequence
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn

from kapsi.data.tabular import CategoryColumn, DateColumn, NumberColumn, Preprocessing, TargetScale
from kapsi.data.tabular.encoders import FARTHEST
from kapsi.data.tabular.image_column import ImageColumn
from kapsi.data.tabular.target_encoding import TargetColumn
from kapsi.data.tabular.text_column import TextColumn
from kapsi.errors import SpecError, shown
from kapsi.export.texts_and_images import MISSING, EncoderPart, ImagePart, Standardize, TextPart
from kapsi.modules import Model

__all__ = ["NumericPart"]

DATE_PARTS = DateColumn.PARTS
Inputs: TypeAlias = list[tuple[str, int]]


class NumericPart(nn.Module):
    """From numbers and category codes of rows to probabilities, or to values in the unit of the target.

    The columns of `numbers` are the number and date columns of the table in order (dates in seconds since 1970, UTC), NaN for
    missing. The columns of `codes` are those of categories in order: the position of a category, -1 for missing, -2 for unseen.
    Each text and image is an argument of its own, see `TextPart` and `ImagePart`.

    Args:
        model: maps encoded rows to logits, or to standardized targets; a copy is kept on the CPU.
        preprocessing: the encoders of the columns.
        scale: the scale of the target; None for classes.

    Raises:
        SpecError: a column has an encoder without a numeric form.

    Example:
        >>> import kapsi as kp
        >>> columns = Preprocessing((NumberColumn("x", mean=1.0, scale=2.0, missing=False),))
        >>> model = kp.Model(kp.rpn([1, 1]), seed=0, dtype=torch.float64)
        >>> part = NumericPart(model, columns, TargetScale(10.0, 3.0))
        >>> part(torch.tensor([[1.0], [torch.nan]], dtype=torch.float64), torch.empty(2, 0, dtype=torch.int64))
        tensor([10., 10.], dtype=torch.float64)
    """

    def __init__(self, model: Model, preprocessing: Preprocessing, scale: TargetScale | None) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).cpu().eval().requires_grad_(False)
        self.dtype = next((p.dtype for p in self.model.parameters()), torch.float64)
        self.encoding = Encoding(preprocessing)
        self.scale = None if scale is None else InverseScale(scale)

    def forward(self, numbers: Tensor, codes: Tensor, *others: Tensor) -> Tensor:
        """Return probabilities `(rows, classes)`, or values `(rows,)` or `(rows, targets)`, float64.

        Args:
            numbers: `(rows, columns)` float64.
            codes: `(rows, columns)` int64.
            others: the arguments of texts and images, in the order of the columns.
        """
        outputs = self.model(self.encoding(numbers, codes, *others).to(self.dtype)).double()
        return outputs.softmax(-1) if self.scale is None else self.scale(outputs)


class Encoding(nn.Module):
    """The encoders of all columns at once: numbers and codes in, inputs of the model out, `(rows, m)` float64.

    Inputs are computed in five blocks (standardized numbers, marks of missing numbers, indicators of codes, target encodings,
    those of texts and images) and brought into the order of the encoders; terms and pixels are behind all others.
    """

    first: Tensor
    source: Tensor
    marked: Tensor
    indicated: Tensor
    category: Tensor
    averaged: Tensor
    default: Tensor
    stride: Tensor
    begin: Tensor
    values: Tensor
    order: Tensor | None

    def __init__(self, preprocessing: Preprocessing) -> None:
        super().__init__()
        numbers = [c for c in preprocessing.columns if isinstance(c, NumberColumn | DateColumn)]
        self.dates = [i for i, column in enumerate(numbers) if isinstance(column, DateColumn)]
        first = [column.first for column in numbers if isinstance(column, DateColumn)]
        self.register_buffer("first", torch.tensor(first, dtype=torch.float64))
        self.numbers = len(numbers)
        self.parts = nn.ModuleList()
        self._blocks: dict[str, list[tuple[float, ...]]] = {
            name: [] for name in ("number", "mark", "indicator", "mean", "part")
        }
        self._values: list[float] = []
        inputs: Inputs = []
        number = code = date = 0
        for column in preprocessing.columns:
            if isinstance(column, NumberColumn):
                inputs += self._add("number", [(number, column.mean, column.scale)])
                inputs += self._add("mark", [(number,)] * column.missing)
                number += 1
            elif isinstance(column, DateColumn):
                inputs += self._add("number", self._of_date(column, date))
                inputs += self._add("mark", [(number,)] * column.missing)
                number, date = number + 1, date + 1
            elif isinstance(column, CategoryColumn):
                known = range(int(column.binary), len(column.categories))
                inputs += self._add("indicator", [(code, i) for i in known] + [(code, MISSING)] * column.missing)
                code += 1
            elif isinstance(column, TargetColumn):
                inputs += self._add("mean", self._of_means(column, code))
                inputs += self._add("indicator", [(code, MISSING)] * column.missing)
                code += 1
            elif isinstance(column, TextColumn | ImageColumn):
                inputs += self._add("part", [()] * len(column.names()))
                self.parts.append(TextPart(column) if isinstance(column, TextColumn) else ImagePart(column))
            else:
                raise SpecError(
                    f"export: the column {shown(getattr(column, 'name', ''))} is encoded by {type(column).__name__}, which has no "
                    "form in ONNX and torch.export; use the format huggingface, or fit without the column (--drop)"
                )
        self.codes = code
        self.rounded = {type(part) for part in self.parts} == {ImagePart}  # to float32, as in the preprocessing
        self._finish(inputs)

    def _add(self, block: str, entries: Sequence[tuple[float, ...]]) -> Inputs:
        """Append entries to a block; return block and position of each."""
        begin = len(self._blocks[block])
        self._blocks[block] += entries
        return [(block, begin + i) for i in range(len(entries))]

    def _of_date(self, column: DateColumn, date: int) -> list[tuple[float, ...]]:
        begin = self.numbers + date * len(DATE_PARTS)
        parts = zip(column.parts, column.means, column.scales, strict=True)
        return [(begin + DATE_PARTS.index(part), mean, scale) for part, mean, scale in parts]

    def _of_means(self, column: TargetColumn, code: int) -> list[tuple[float, ...]]:
        begin, outputs, count = len(self._values), len(column.outputs), len(column.categories)
        self._values += [*column.values, *column.default]
        return [(code, count, outputs, begin + i) for i in range(outputs)]

    def _finish(self, inputs: Inputs) -> None:
        """Make buffers of the blocks and of the order of the inputs."""
        begins, total = {}, 0
        for block, entries in self._blocks.items():
            begins[block], total = total, total + len(entries)
        order = [begins[block] + position for block, position in inputs]

        def buffer(name: str, values: Sequence[float], dtype: torch.dtype = torch.int64) -> None:
            self.register_buffer(name, torch.tensor(values, dtype=dtype))

        number, indicator, mean = (self._blocks[block] for block in ("number", "indicator", "mean"))
        buffer("source", [entry[0] for entry in number])
        center, width = (torch.tensor([entry[i] for entry in number], dtype=torch.float64) for i in (1, 2))
        self.standardize = Standardize(center, width)
        buffer("marked", [entry[0] for entry in self._blocks["mark"]])
        buffer("indicated", [entry[0] for entry in indicator])
        buffer("category", [entry[1] for entry in indicator])
        for i, name in enumerate(("averaged", "default", "stride", "begin")):
            buffer(name, [entry[i] for entry in mean])
        buffer("values", self._values, torch.float64)
        self.register_buffer("order", None if order == list(range(total)) else torch.tensor(order))

    def forward(self, numbers: Tensor, codes: Tensor, *others: Tensor) -> Tensor:
        blocks = []
        if len(self.source):
            parts = [calendar(numbers[:, column], self.first[i]) for i, column in enumerate(self.dates)]
            reals = torch.cat([numbers, *parts], 1).index_select(1, self.source)
            blocks.append(self.standardize(reals))
        if len(self.marked):
            blocks.append(numbers.index_select(1, self.marked).isnan().double())
        if len(self.indicated):
            blocks.append((codes.index_select(1, self.indicated) == self.category).double())
        if len(self.averaged):
            category = codes.index_select(1, self.averaged)
            index = torch.where(category < 0, self.default, category) * self.stride + self.begin
            blocks.append(self.values[index].clamp(-FARTHEST, FARTHEST))
        terms, pixels = self._wide(blocks, others)
        inputs = torch.cat(blocks, 1)
        inputs = inputs if self.order is None else inputs.index_select(1, self.order)
        inputs = inputs.float().double() if self.rounded else inputs
        return torch.cat([inputs, *terms, *pixels], 1) if terms or pixels else inputs

    def _wide(self, blocks: list[Tensor], others: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the terms of texts and the pixels of images; append their other inputs to the blocks."""
        terms: list[Tensor] = []
        pixels: list[Tensor] = []
        given = iter(others)
        for part in cast(Iterable[EncoderPart], self.parts):
            beside, wide = part(*itertools.islice(given, len(part.examples(0))))
            blocks.append(beside)
            (terms if isinstance(part, TextPart) else pixels).append(wide)
        return terms, pixels

    def others(self, rows: int) -> list[Tensor]:
        """Return arguments of texts and images, for tracing."""
        return [example for part in cast(Iterable[EncoderPart], self.parts) for example in part.examples(rows)]


def calendar(seconds: Tensor, first: Tensor) -> Tensor:
    """Return the parts of times in the order of `DateColumn.PARTS`, `(rows, parts)`, by arithmetic of whole numbers in float64.

    Args:
        seconds: seconds since 1970, `(rows,)` float64; NaN stays.
        first: the time from which days are counted, in seconds, `()` float64.

    Source: Hinnant, chrono-compatible low-level date algorithms (2013).

    Example:
        >>> times = torch.tensor([951_782_400.0, 0.0], dtype=torch.float64)  # Tuesday, 29 February 2000
        >>> calendar(times, times[1])[0].tolist()
        [2000.0, 2.0, 60.0, 1.0, 0.0, 11016.0]
    """
    whole = seconds.floor()
    days = (whole / 86_400).floor()
    shifted = days + 719_468  # days since 1 March of the year 0
    era = (shifted / 146_097).floor()
    day = shifted - era * 146_097
    year = ((day - (day / 1_460).floor() + (day / 36_524).floor() - (day / 146_096).floor()) / 365).floor()
    rest = day - (365 * year + (year / 4).floor() - (year / 100).floor())
    month = ((5 * rest + 2) / 153).floor()
    month = torch.where(month < 10, month + 3, month - 9)
    year = year + era * 400 + (month <= 2).double()
    before = year - 1
    new_year = 365 * before + (before / 4).floor() - (before / 100).floor() + (before / 400).floor() - 719_162
    weekday = days + 3 - 7 * ((days + 3) / 7).floor()
    hour = (whole - days * 86_400) / 3_600
    return torch.stack([year, month, days - new_year + 1, weekday, hour, (seconds - first) / 86_400], 1)


class InverseScale(nn.Module):
    """Outputs of a model in the unit of the target, see `TargetScale.invert`.

    All numbers are tensors: the exporter rounds Python's to float32. Tiny targets are computed in a unit near their size, a
    power of two, since onnxruntime takes constants below 10⁻⁴⁵ for zero.
    """

    center: Tensor
    scale: Tensor
    unit: Tensor
    power: Tensor
    factor: Tensor
    largest: Tensor

    def __init__(self, scale: TargetScale) -> None:
        super().__init__()
        self.transform, self.exponents = scale.transform, (scale.power, 2 - scale.power)
        center, deviation = np.asarray(scale.center), np.asarray(scale.scale)
        unit = np.ldexp(1.0, np.clip(np.frexp(np.maximum(np.abs(center), deviation))[1], -1022, 0))
        numbers = {"center": center / unit, "scale": deviation / unit, "unit": unit}
        others = {"power": self.exponents, "factor": scale.factor, "largest": np.finfo(np.float64).max}
        for name, value in {**numbers, **others}.items():
            self.register_buffer(name, torch.tensor(value, dtype=torch.float64))

    def forward(self, outputs: Tensor) -> Tensor:
        values = outputs if outputs.shape[1] > 1 else outputs.squeeze(-1)
        if self.transform == "log_link":
            values = values.exp() * self.scale * self.unit
        else:
            values = (values * self.scale + self.center) * self.unit
        if self.transform == "log":
            values = values.exp() * self.factor
        elif self.transform == "yeo_johnson":
            above, below = (self._side(side * values, i) for i, side in enumerate((1, -1)))
            values = torch.where(values >= 0, above, -below) * self.factor
        return torch.minimum(torch.maximum(values, -self.largest), self.largest)

    def _side(self, t: Tensor, side: int) -> Tensor:
        """Return T⁻¹ of Yeo and Johnson for t ≥ 0."""
        t, power = t.clamp(min=0.0), self.power[side]
        return torch.expm1(t if self.exponents[side] == 0 else torch.log1p(power * t) / power)
