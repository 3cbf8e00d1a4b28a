"""The interface of an exported model: columns in, codes of categories, labels and units out, as plain data."""

from __future__ import annotations

import re
from typing import Any, Protocol

from kapsi.data.tabular import DateColumn, Label, NumberColumn, Preprocessing, Reading, TargetScale
from kapsi.data.tabular.encoders import Categories, places
from kapsi.data.tabular.image_column import ImageColumn
from kapsi.data.tabular.text_column import TAG, TOKEN, TextColumn
from kapsi.data.tabular.words import MISSING_WORDS, WEAK_WORDS
from kapsi.export.texts_and_images import EMPTY, MISSING
from kapsi.modules import Model
from kapsi.version import __version__

__all__ = ["FittedTable", "codes_of", "interface"]

NO_WORDS = " "
"""What stands for the words of a text without any; a missing text has none at all."""

WHOLE_NUMBER = re.compile(r"-?\d+")


class FittedTable(Protocol):
    """What an export needs of a model of a table, see `kapsi.tables.TableModel`."""

    @property
    def model(self) -> Model: ...
    @property
    def preprocessing(self) -> Preprocessing: ...
    @property
    def target(self) -> str | tuple[str, ...]: ...
    @property
    def task(self) -> str: ...
    @property
    def classes(self) -> tuple[Label, ...] | None: ...
    @property
    def scale(self) -> TargetScale | None: ...
    @property
    def reading(self) -> Reading: ...


def codes_of(column: Categories, reading: Reading) -> dict[str, int]:
    """Return the code of each known spelling in a text column: a category, or -1 for the words that stand for a missing value.

    Categories are also known without blanks around them and, if they are whole numbers, without leading zeros or with `.0`.

    Example:
        >>> from kapsi.data.tabular import CategoryColumn
        >>> codes = codes_of(CategoryColumn("c", ("07", "NA")), Reading(missing=("none given",)))
        >>> [codes[word] for word in ("07", "7", "7.0", "NA", "n/a", "", "none given")]
        [0, 0, 0, 1, -1, -1, -1]
    """
    codes = places(column.categories)
    for word, code in list(codes.items()):
        if WHOLE_NUMBER.fullmatch(word):
            codes.setdefault(f"{word}.0", code)
    codes |= dict.fromkeys(reading.missing, MISSING)
    words = [form(word) for word in (*MISSING_WORDS, *WEAK_WORDS) for form in (str, str.upper, str.title)]
    return dict.fromkeys(words, MISSING) | codes


def interface(model: FittedTable) -> dict[str, Any]:
    """Return a description of the inputs and outputs of an exported model, plain JSON data.

    Example:
        >>> from types import SimpleNamespace
        >>> columns = Preprocessing((NumberColumn("x", 1.0, 2.0, missing=False, unit="kg"),))
        >>> facts = {"preprocessing": columns, "target": "y", "task": "regression", "classes": None, "reading": Reading()}
        >>> interface(SimpleNamespace(**facts))["columns"]
        [{'name': 'x', 'kind': 'number', 'unit': 'kg'}]
    """
    columns: list[dict[str, Any]] = []
    for column in model.preprocessing.columns:
        if isinstance(column, NumberColumn):
            columns.append({"name": column.name, "kind": "number"} | ({"unit": column.unit} if column.unit else {}))
        elif isinstance(column, DateColumn):
            columns.append({"name": column.name, "kind": "date", "unit": "seconds since 1970-01-01 00:00 UTC"})
        elif isinstance(column, TextColumn):
            codes = {"": MISSING, NO_WORDS: EMPTY} | places(column.words)
            patterns = {"tag": TAG.pattern, "word": TOKEN.pattern}
            columns.append({"name": column.name, "kind": "text", **patterns, "codes": codes})
        elif isinstance(column, ImageColumn):
            size = {"height": column.height, "width": column.width, "channels": column.channels}
            mark = {"missing": f"{column.name} is missing"} if column.missing else {}
            columns.append({"name": column.name, "kind": "image"} | size | mark)
        else:
            columns.append({"name": column.name, "kind": "category", "codes": codes_of(column, model.reading)})
    return {
        "format": "kapsi export",
        "kapsi": __version__,
        "task": model.task,
        "target": list(model.target) if isinstance(model.target, tuple) else model.target,
        "classes": None if model.classes is None else list(model.classes),
        "columns": columns,
    }
