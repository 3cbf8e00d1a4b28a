"""Programs of `torch.export`: the numeric part of a prediction in a .pt2 file, with a description of the columns inside."""

from __future__ import annotations

import io
import itertools
import json
import warnings

import torch

from kapsi.export.interface import FittedTable, interface
from kapsi.export.numeric import NumericPart

__all__ = ["DESCRIPTION", "exported_program", "torch_bytes"]

DESCRIPTION = "columns.json"
"""Name of the description of columns and outputs in a .pt2 file."""


def exported_program(part: NumericPart) -> torch.export.ExportedProgram:
    """Return the numeric part of a prediction as a program for any number of rows."""
    rows = torch.export.Dim("rows")
    numbers = torch.zeros(3, part.encoding.numbers, dtype=torch.float64)
    codes = torch.zeros(3, part.encoding.codes, dtype=torch.int64)
    others = tuple(part.encoding.others(3))
    words = (torch.export.Dim(f"words_{i}", min=3) for i in itertools.count(1))
    dynamic = tuple({0: rows, 1: next(words)} if value.dtype == torch.int64 else {0: rows} for value in others)
    shapes = {"numbers": {0: rows}, "codes": {0: rows}, **({"others": dynamic} if others else {})}
    with torch.no_grad():
        return torch.export.export(part, (numbers, codes, *others), dynamic_shapes=shapes)


def torch_bytes(model: FittedTable) -> bytes:
    """Return a model of a table as the content of a .pt2 file of `torch.export.save`.

    The program takes numbers and codes, see `NumericPart`; `columns.json` in the file describes both.

    Raises:
        SpecError: a column or a function without a form in `torch.export`.
    """
    part = NumericPart(model.model, model.preprocessing, model.scale)
    description = json.dumps(interface(model), ensure_ascii=False)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(exported_program(part), buffer, extra_files={DESCRIPTION: description})
    return buffer.getvalue()
