"""Tables from CSV and Parquet files, made into standardized inputs and targets; folds, splits, written tables."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kapsi.errors import TableError, nearest
from kapsi.files import atomic, plain

__all__ = [
    "CategoryColumn",
    "Column",
    "NumberColumn",
    "Preprocessing",
    "Problem",
    "Table",
    "TargetScale",
    "csv_text",
    "folds",
    "make_problem",
    "read_table",
    "split",
    "target_of",
    "write_table",
]

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Objects: TypeAlias = npt.NDArray[np.object_]
Label: TypeAlias = str | int | bool
Kind: TypeAlias = Literal["integer", "real", "boolean", "text"]

CSV_DELIMITERS = {".csv": ",", ".txt": ",", ".tsv": "\t"}
PARQUET_SUFFIXES = (".parquet", ".pq")
DELIMITERS = ",;\t|"
MISSING_WORDS = ("", "NA", "N/A", "#N/A", "NaN", "nan", "null", "NULL", "None", "none", "?")
BLANKS = " \t\r\n"
INTEGER = r"^[+-]?\d+$"
NUMBER = r"^[+-]?(\d+\.?\d*([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?|(?i:inf|infinity))$"
# Any delimiter is quoted, since the reader tells the delimiter from the header; a leading U+FEFF would be a BOM.
NEEDS_QUOTES = re.compile('[,;\t|"\r\n\ufeff]')
MAX_AUTO_CLASSES = 20
MAX_CLASSES = 1000
MAX_CATEGORIES = 50
EXACT_INTEGERS = 2.0**53  # beyond it, neighboring integers share one float64
FARTHEST = 1e6  # standard deviations; the inputs' products of low degree stay finite in float32
LARGEST_FLOAT64 = float(np.finfo(np.float64).max)


# ---------------------------------------------------------------- messages


def _refuse(where: str, text: str) -> TableError:
    # File names and library messages may hold line breaks; an error stays one line.
    return TableError(" ".join(f"{where}: {text}".splitlines()))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}...{text[-10:]}"


def _listed(values: Iterable[object], most: int = 10) -> str:
    shown = [_shown(value) for value in values]
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more


def _no_column(where: str, what: str, name: str, columns: Iterable[str]) -> TableError:
    columns = list(columns)
    near = nearest(name, columns)
    hint = f" (nearest: {_listed(near)})" if near else ""
    return _refuse(where, f"{what} {_shown(name)} is not a column{hint}; the columns are {_listed(columns)}")


# ---------------------------------------------------------------- tables


@dataclass(frozen=True, eq=False)
class Column:
    """One typed column.

    Args:
        kind: "integer", "real", "boolean" or "text".
        values: (rows,) float64 with NaN for missing; for text, (rows,) objects: str, or None for missing.
    """

    kind: Kind
    values: Floats | Objects

    @property
    def missing(self) -> npt.NDArray[np.bool_]:
        """Return (rows,) booleans: where the value is missing."""
        if self.kind == "text":
            return np.array([value is None for value in self.values], dtype=np.bool_)
        return np.isnan(self.values.astype(np.float64, copy=False))

    @property
    def numbers(self) -> Floats:
        """Return the values of a column that is not text, as (rows,) float64."""
        if self.kind == "text":
            raise TableError("a text column has no numbers; read its values instead")
        return self.values.astype(np.float64, copy=False)


@dataclass(frozen=True, eq=False)
class Table:
    """Typed columns of one file, all of the same length.

    Args:
        name: the file's name, for messages.
        columns: the columns by name, in the file's order.
    """

    name: str
    columns: dict[str, Column]

    @property
    def rows(self) -> int:
        """Return the number of data rows."""
        return next((len(column.values) for column in self.columns.values()), 0)

    def take(self, rows: npt.NDArray[np.integer[Any]], names: Iterable[str] | None = None) -> Table:
        """Return these rows (0-based numbers) of these columns, all columns where names is None."""
        chosen = self.columns if names is None else names
        return Table(self.name, {n: Column(self.columns[n].kind, self.columns[n].values[rows]) for n in chosen})


def read_table(path: str | Path) -> Table:
    """Read a CSV (.csv, .tsv, .txt) or Parquet (.parquet, .pq) file and type its columns.

    Args:
        path: the file; CSV is UTF-8 with one header line, delimited by a comma, semicolon, tab or bar.

    Raises:
        TableError: the file cannot be read as a table with unique column names and at least one row.
    """
    path = Path(path)
    if path.is_dir():
        raise _refuse(str(path), "this is a folder; give a CSV or Parquet file")
    suffix = _suffix(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise _refuse(str(path), "there is no such file; check the path") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise _refuse(str(path), f"the file cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if not data.strip(b" \t\r\n\xef\xbb\xbf"):
        raise _refuse(path.name, "the file is empty; a table has a header line and at least one row")
    names, columns = (_read_csv if suffix in CSV_DELIMITERS else _read_parquet)(data, path.name)
    names = [name or f"column {position}" for position, name in enumerate(names, start=1)]
    repeated = [name for name in dict.fromkeys(names) if names.count(name) > 1] if len(set(names)) < len(names) else []
    if repeated:
        raise _refuse(path.name, f"several columns have the same name: {_listed(repeated)}; rename them")
    if not columns or not len(columns[0].values):
        raise _refuse(path.name, "the file has a header but no rows; add at least one row")
    return Table(path.name, dict(zip(names, columns, strict=True)))


def _suffix(path: Path) -> str:
    suffix, allowed = path.suffix.lower(), (*CSV_DELIMITERS, *PARQUET_SUFFIXES)
    if suffix not in allowed:
        raise _refuse(str(path), f"the suffix {suffix!r} is not known; allowed are {', '.join(allowed)}")
    return suffix


def _read_csv(data: bytes, where: str) -> tuple[list[str], list[Column]]:
    import pyarrow as pa
    import pyarrow.csv as pa_csv

    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _refuse(where, f"line {line} is not UTF-8 text; save the file as UTF-8") from None
    delimiter, width = max(((mark, _header_width(text, mark)) for mark in DELIMITERS), key=lambda pair: pair[1])
    keys = [str(position) for position in range(width)]
    try:
        # Reading the header as a row of unnamed strings keeps odd names, and leaves typing to the whole column.
        raw = pa_csv.read_csv(
            pa.BufferReader(data),
            read_options=pa_csv.ReadOptions(column_names=keys, block_size=min(max(len(data) + 1, 2**16), 2**31 - 1)),
            parse_options=pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=pa_csv.ConvertOptions(column_types=dict.fromkeys(keys, pa.large_string())),
        )
    except pa.ArrowException as error:
        raise _refuse(where, _ragged(text, delimiter, width) or f"not readable as CSV ({str(error)[:200]})") from None
    strings = [column.combine_chunks() for column in raw.columns]
    # A quote that is never closed takes in the rest of the file, in silence.
    last = strings[-1][-1].as_py() if len(strings[-1]) else ""
    if "\n" in last and data.count(b'"') % 2 and not data.rstrip().endswith(b'"'):
        raise _refuse(where, f"a quote is opened and never closed, before {_shown(last.splitlines()[0])}; close it")
    return [column[0].as_py() for column in strings], [_typed(column.slice(1)) for column in strings]


def _header_width(text: str, delimiter: str) -> int:
    """Return how many fields the first line that is not blank has with this delimiter."""
    try:
        return next((len(row) for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter) if row), 1)
    except csv.Error:
        return 1


def _ragged(text: str, delimiter: str, width: int) -> str:
    """Return what is wrong with the first row that has another number of fields than the header."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    line = 1
    try:
        for row in reader:
            if row and len(row) != width:
                return (
                    f"line {line} has {len(row)} values, the header has {width}; quote values that hold {delimiter!r}"
                )
            line = reader.line_num + 1
    except csv.Error:  # a field beyond the csv module's limit
        return ""
    return ""


def _typed(strings: Any) -> Column:
    """Type a whole column of strings, each different string once."""
    import pyarrow as pa
    import pyarrow.compute as pc

    encoded = strings.dictionary_encode()
    codes = encoded.indices.to_numpy()
    words = encoded.dictionary
    trimmed = pc.utf8_trim(words, characters=BLANKS)
    missing = pc.is_in(trimmed, value_set=pa.array(MISSING_WORDS, trimmed.type))
    known = trimmed.filter(pc.invert(missing))
    kind: Kind
    if len(known) and pc.all(pc.is_in(pc.utf8_lower(known), value_set=pa.array(["true", "false"], known.type))).as_py():
        kind, numbers = "boolean", pc.equal(pc.utf8_lower(known), "true").to_numpy(zero_copy_only=False)
    else:
        kind, numbers = ("integer" if len(known) and _are_integers(known) else "real"), _parsed(known)
        if np.isnan(numbers).any():
            texts = words.to_numpy(zero_copy_only=False).astype(object)
            texts[missing.to_numpy(zero_copy_only=False)] = None
            return Column("text", texts[codes])
    values = np.full(len(words), np.nan)
    values[~missing.to_numpy(zero_copy_only=False)] = numbers
    return Column(kind, values[codes])


def _are_integers(strings: Any) -> bool:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pc.all(pc.match_substring_regex(strings, INTEGER)).as_py():
        return False
    try:
        pc.cast(pc.replace_substring_regex(strings, r"^\+", ""), pa.int64())
    except pa.ArrowInvalid:  # too large for int64
        return False
    return True


def _parsed(strings: Any) -> Floats:
    """Return the numbers that these trimmed strings spell, NaN for a string that spells none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    spelled = pc.if_else(pc.match_substring_regex(strings, NUMBER), strings, pa.scalar(None, strings.type))
    return _floats(spelled)


def _floats(column: Any) -> Floats:
    import pyarrow as pa
    import pyarrow.compute as pc

    numbers = pc.fill_null(pc.cast(column, pa.float64(), safe=False), math.nan)
    return np.asarray(numbers.to_numpy(zero_copy_only=False), dtype=np.float64)


def _read_parquet(data: bytes, where: str) -> tuple[list[str], list[Column]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        raw = pq.ParquetFile(pa.BufferReader(data)).read()
        raw.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise _refuse(where, f"not readable as Parquet ({error})") from None
    columns = zip(raw.column_names, raw.columns, strict=True)
    return list(raw.column_names), [_typed_arrow(column.combine_chunks(), name, where) for name, column in columns]


def _typed_arrow(column: Any, name: str, where: str) -> Column:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if pa.types.is_dictionary(kind):
        return _typed_arrow(pc.cast(column, kind.value_type), name, where)
    if column.null_count == len(column):
        return Column("real", np.full(len(column), np.nan))
    if pa.types.is_boolean(kind):
        return Column("boolean", _floats(column))
    if pa.types.is_integer(kind):
        fits = kind != pa.uint64() or pc.max(column).as_py() < 2**63
        return Column("integer" if fits else "real", _floats(column))
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return Column("real", _floats(column))
    if pa.types.is_date(kind):
        return _typed_arrow(pc.cast(column, pa.timestamp("s" if kind == pa.date32() else "ms")), name, where)
    if pa.types.is_timestamp(kind):
        ticks = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}[kind.unit]
        return Column("real", _floats(pc.cast(column, pa.int64())) / ticks)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return Column("text", pc.cast(column, pa.large_string()).to_numpy(zero_copy_only=False).astype(object))
    allowed = "numbers, booleans, text, dates and timestamps"
    raise _refuse(where, f"column {_shown(name)} has the type {kind}; allowed are {allowed}; convert or remove it")


def _encoded(values: npt.NDArray[Any]) -> tuple[Ints, list[str]]:
    """Return each text's position in the list of different texts (-1 for missing), and that list, sorted."""
    import pyarrow as pa

    encoded = pa.array(values, pa.large_string()).dictionary_encode()
    words: list[str] = encoded.dictionary.to_pylist()
    order = sorted(range(len(words)), key=words.__getitem__)
    place = np.empty(len(words) + 1, dtype=np.int64)
    place[order] = np.arange(len(words))
    place[-1] = -1
    return place[encoded.indices.fill_null(len(words)).to_numpy()], [words[position] for position in order]


def _numbers_in(words: Sequence[str]) -> Floats:
    """Return the numbers that these texts spell, NaN for a text that spells none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return _parsed(pc.utf8_trim(pa.array(list(words), pa.large_string()), characters=BLANKS))


def _as_numbers(column: Column, name: str, where: str, rows: Ints | None = None) -> Floats:
    """Return a column's numbers; refuse infinite ones, and text that is not numbers throughout.

    Rows are the column's row numbers in the file, where the column is not all of it.
    """
    if column.kind == "text":
        codes, words = _encoded(column.values)
        numbers = np.append(_numbers_in(words), np.nan)[codes]
        bad = ~np.isfinite(numbers) & (codes >= 0)
        # True and false among other text mean a boolean column: the other text is what is in the way.
        odd = bad & ~np.array([*(_truth(word) in (True, False) for word in words), False])[codes]
        bad = odd if odd.any() else bad
    else:
        numbers = column.numbers
        bad = np.isinf(numbers)
    if bad.any():
        place = int(np.argmax(bad))
        row = int(place if rows is None else rows[place]) + 1
        what = f"column {_shown(name)} has {_shown(column.values.tolist()[place])} in row {row}"
        raise _refuse(where, f"{what}, where only finite numbers are allowed; mend or empty that value")
    return np.asarray(numbers, dtype=np.float64)


def _truth(word: str) -> object:
    return {"true": True, "false": False}.get(word.strip(BLANKS).lower(), word)


def _as_text(column: Column, known: Sequence[str]) -> Objects:
    """Return a column's texts; numbers become the known text that spells them ("1", "01", "1.0"), or a plain one."""
    if column.kind == "text":
        return column.values.astype(object, copy=False)
    numbers, codes = np.unique(column.numbers, return_inverse=True)
    spelled: dict[object, str] = {}
    if column.kind == "boolean":
        plain = ["true" if number else "false" for number in numbers]
        keys: list[object] = list(plain)
        spelled.update((word.strip(BLANKS).lower(), word) for word in known)
    else:
        # The file's own spelling is gone once a column is all numbers, so the known texts are matched by value.
        plain = [str(int(n)) if n.is_integer() else repr(n) for n in numbers.tolist()]
        keys = numbers.tolist()
        spelled.update(zip(_numbers_in(known).tolist(), known, strict=True))
    exact = set(known)
    words = [p if p in exact else spelled.get(key, p) for p, key in zip(plain, keys, strict=True)]
    texts = np.array([*words, None], dtype=object)[:-1]
    texts[np.isnan(numbers)] = None
    return np.asarray(texts[codes], dtype=object)


# ---------------------------------------------------------------- problems


@dataclass(frozen=True, eq=False)
class Problem:
    """A table split into features and target, ready to fit.

    Args:
        name: the file's name, for messages.
        target: the target column's name.
        task: "classification" or "regression".
        features: the kept rows of the kept columns, without the target.
        y: (rows kept,) int64 class codes, or float64 values.
        classes: the original labels, sorted, so that a code is a position; None in regression.
        rows: (rows kept,) int64 row numbers in the file, 0-based, the header not counted.
        notes: what was dropped and why, one line each.
    """

    name: str
    target: str
    task: str
    features: Table
    y: Ints | Floats
    classes: tuple[Label, ...] | None
    rows: Ints
    notes: tuple[str, ...]


def make_problem(
    table: Table, target: str, *, task: str = "auto", strict: bool = False, drop: Sequence[str] = ()
) -> Problem:
    """Split a table into features and target; drop what no function can learn from.

    Args:
        table: the table.
        target: the target column's name.
        task: "classification", "regression", or "auto": text, booleans and at most 20 different integers are classes.
        strict: refuse rows with a missing target instead of dropping them.
        drop: names of columns to leave out.

    Raises:
        TableError: the target or a feature column cannot be learned from as it is.
    """
    where = table.name
    if task not in ("auto", "classification", "regression"):
        raise _refuse(
            where, f"the task {_shown(task)} is not known; allowed are 'auto', 'classification', 'regression'"
        )
    if target not in table.columns:
        raise _no_column(where, "the target", target, table.columns)
    for name in drop:
        if name not in table.columns:
            raise _no_column(where, "the column to drop", name, table.columns)
    if target in drop:
        raise _refuse(where, f"the column {_shown(target)} is both the target and to be dropped; choose one")

    notes: list[str] = []
    missing = table.columns[target].missing
    rows = np.flatnonzero(~missing).astype(np.int64)
    if missing.any():
        count, first = int(missing.sum()), int(np.argmax(missing)) + 1
        if not len(rows):
            raise _refuse(where, f"the target {_shown(target)} is missing in every row; choose another target")
        if strict:
            what = f"the target {_shown(target)} is missing in {count} of {table.rows} rows, first in row {first}"
            raise _refuse(where, f"{what}; fill them in, or allow dropping them")
        notes.append(
            f"dropped {count} of {table.rows} rows, whose target {_shown(target)} is missing (first: row {first})"
        )

    column = table.columns[target]
    if column.kind != "text":
        _as_numbers(column, target, where)  # refuses infinite values
    if task == "auto":
        task = _task_of(column, rows, target, notes)
    y: Ints | Floats
    classes: tuple[Label, ...] | None = None
    if task == "classification":
        y, classes = _classes_of(column, rows, target, where, notes)
    elif column.kind == "text":
        raise _refuse(where, f"the target {_shown(target)} is text, which has no regression; use --task classification")
    else:
        y = column.numbers[rows]
        if y.min() == y.max():
            raise _refuse(where, f"the target {_shown(target)} is {y[0]} in every row; choose a target that varies")

    names = [name for name in table.columns if name != target and name not in drop]
    features = _kept_features(table, names, rows, notes)
    return Problem(where, target, task, features, y, classes, rows, tuple(notes))


def _task_of(column: Column, rows: Ints, target: str, notes: list[str]) -> str:
    if column.kind in ("text", "boolean"):
        return "classification"
    different = np.unique(column.numbers[rows])
    few = len(different) <= MAX_AUTO_CLASSES
    if few and column.kind == "integer":
        return "classification"
    if few and np.all(different == np.floor(different)):
        what = f"the target {_shown(target)} has {len(different)} different whole values written as real numbers"
        notes.append(f"{what}: taken as regression; --task classification makes them classes")
    return "regression"


def _classes_of(
    column: Column, rows: Ints, target: str, where: str, notes: list[str]
) -> tuple[Ints, tuple[Label, ...]]:
    labels: list[Label]
    if column.kind == "text":
        codes, words = _encoded(column.values[rows])
        labels = list(words)
    else:
        values, codes = np.unique(column.numbers[rows], return_inverse=True)
        bad = values[(values != np.floor(values)) | (np.abs(values) > EXACT_INTEGERS)]
        if len(bad):
            what = f"the target {_shown(target)} has the value {float(bad[0])!r}, which is no class label"
            allowed = "labels are text, booleans or whole numbers up to 2**53"
            raise _refuse(where, f"{what}; {allowed}; use --task regression")
        labels = [bool(value) if column.kind == "boolean" else int(value) for value in values]
    if len(labels) == 1:
        raise _refuse(
            where, f"the target {_shown(target)} has the one class {_shown(labels[0])}; at least 2 are needed"
        )
    if len(labels) > MAX_CLASSES:
        what = f"the target {_shown(target)} has {len(labels)} classes; at most {MAX_CLASSES} are allowed"
        raise _refuse(
            where, f"{what}; choose another target" + ("" if column.kind == "text" else " or --task regression")
        )
    single = [labels[code] for code in np.flatnonzero(np.bincount(codes) == 1)]
    if single:
        notes.append(f"classes of {_shown(target)} with a single row: {_listed(single)}")
    return codes.astype(np.int64), tuple(labels)


def _kept_features(table: Table, names: list[str], rows: Ints, notes: list[str]) -> Table:
    features = table.take(rows, names)
    empty = [name for name, column in features.columns.items() if column.missing.all()]
    if empty:
        advice = f"leave them out with --drop NAME (here {' '.join(f'--drop {_shown(name)}' for name in empty[:10])})"
        raise _refuse(table.name, f"columns with no value in any used row: {_listed(empty, len(empty))}; {advice}")
    kept = []
    for name, column in features.columns.items():
        present = ~column.missing
        if column.kind == "text":
            words = _encoded(column.values)[1]
            different, identifies = len(words), 2 <= len(words) == int(present.sum())
            if identifies or different > max(MAX_CATEGORIES, 0.9 * len(rows)):
                what = f"{different} different texts in {len(rows)} rows"
                notes.append(f"dropped the column {_shown(name)}: it identifies rows ({what})")
                continue
        else:
            numbers = _as_numbers(column, name, table.name, rows)[present]
            different = 1 if numbers.min() == numbers.max() else 2
        if different == 1 and present.all():  # where values are missing, which ones are may still tell something
            notes.append(f"dropped the column {_shown(name)}: it is {_shown(column.values.tolist()[0])} in every row")
            continue
        kept.append(name)
    if not kept:
        reason = f" ({'; '.join(notes)})" if notes else ""
        raise _refuse(table.name, f"no feature column is left{reason}; at least one that varies is needed")
    return Table(table.name, {name: features.columns[name] for name in kept})


def target_of(table: Table, target: str, task: str, classes: Sequence[Label] | None) -> Ints | Floats:
    """Return the target of a table as an already fitted problem codes it.

    Args:
        table: the table to evaluate on.
        target: the target column's name.
        task: "classification" or "regression".
        classes: the fitted problem's labels, in the order of their codes; unused in regression.

    Returns:
        (rows,) int64 codes with -1 for missing, or float64 values with NaN for missing.

    Raises:
        TableError: no such column, a label that is not among the classes, or a value that is no finite number.
    """
    where = table.name
    if target not in table.columns:
        raise _no_column(where, "the target", target, table.columns)
    column = table.columns[target]
    if task == "regression":
        return _as_numbers(column, target, where)
    known = list(classes or ())
    place: dict[object, int] = {label: code for code, label in enumerate(known)}
    labels: list[object]
    if known and all(isinstance(label, str) for label in known):
        codes, words = _encoded(_as_text(column, [str(label) for label in known]))
        labels = list(words)
    elif column.kind == "text":
        codes, words = _encoded(column.values)
        pairs = zip(words, _numbers_in(words).tolist(), strict=True)
        labels = [_truth(word) if math.isnan(number) else number for word, number in pairs]
    else:
        values, found = np.unique(column.numbers, return_inverse=True)
        codes, labels = np.where(np.isnan(values)[found], -1, found), values.tolist()
    coded = np.array([*(place.get(label, -2) for label in labels), -1], dtype=np.int64)[codes]
    unknown = np.flatnonzero(coded == -2)
    if len(unknown):
        value = column.values.tolist()[int(unknown[0])]
        shown = _shown(int(value) if isinstance(value, float) and value.is_integer() else value)
        what = (
            f"row {unknown[0] + 1} of the target {_shown(target)} has the label {shown}, which the model does not know"
        )
        raise _refuse(where, f"{what}; the known labels are {_listed(known, 20)}")
    return coded


# ---------------------------------------------------------------- preprocessing


def _center_and_scale(values: Floats) -> tuple[float, float]:
    """Return the mean and the population standard deviation (1 where it is 0), safe from overflow at any size."""
    if not len(values):
        return 0.0, 1.0
    largest = float(np.abs(values).max())
    exponent = math.frexp(largest)[1] if largest else 0
    # Powers of two scale exactly, and differences from one value keep the digits that a large offset would take.
    small = np.ldexp(values, -exponent)
    shifted = small - small[0]
    mean = float(shifted.mean())
    deviation = float(np.sqrt(np.mean((shifted - mean) ** 2)))
    limit = 1.0 - 2.0**-53  # rounding up to 1 would overflow at the largest exponent
    center = math.ldexp(min(max(float(small[0]) + mean, -limit), limit), exponent)
    return center, math.ldexp(min(deviation, limit), exponent) or 1.0


def _standardized(values: Floats, center: float, scale: float) -> Floats:
    # Halves keep the difference of two huge values finite; halving and doubling are exact.
    with np.errstate(over="ignore"):
        return np.asarray((values / 2 - center / 2) / scale * 2, dtype=np.float64)


@dataclass(frozen=True)
class NumberColumn:
    """How one column of numbers or booleans becomes an input.

    Args:
        name: the column's name.
        mean: the mean of the fitted values; it also stands in for a missing value.
        scale: their population standard deviation, 1 where that is 0.
        missing: whether a further 0/1 input tells which values are missing.
    """

    name: str
    mean: float
    scale: float
    missing: bool

    @classmethod
    def fit(cls, name: str, column: Column) -> NumberColumn:
        """Take the mean, the scale and whether values are missing from the column."""
        present = ~column.missing
        return cls(name, *_center_and_scale(column.numbers[present]), missing=not present.all())

    def names(self) -> list[str]:
        """Return one name for each input that the column becomes."""
        return [self.name, f"{self.name} is missing"] if self.missing else [self.name]

    def accept(self, column: Column, where: str) -> Column:
        """Return the column as numbers; refuse text and infinite values."""
        return Column("real" if column.kind == "text" else column.kind, _as_numbers(column, self.name, where))

    def transform(self, column: Column) -> Floats:
        """Return (rows, inputs) float64."""
        missing = np.isnan(column.numbers)
        inputs = _standardized(np.where(missing, self.mean, column.numbers), self.mean, self.scale)
        # Fitted values are within √rows; one far outside must not make a product of inputs infinite.
        inputs = np.clip(inputs, -FARTHEST, FARTHEST)
        return np.stack([inputs, missing], axis=1) if self.missing else inputs[:, np.newaxis]


@dataclass(frozen=True)
class CategoryColumn:
    """How one column of text becomes 0/1 inputs, one for each category.

    Args:
        name: the column's name.
        categories: the categories that are told apart, sorted; any other text and missing values give only zeros.
        binary: whether the second of two categories alone is an input.
    """

    name: str
    categories: tuple[str, ...]
    binary: bool

    @classmethod
    def fit(cls, name: str, column: Column) -> CategoryColumn:
        """Take the most frequent categories from the column."""
        codes, words = _encoded(column.values)
        counts = np.bincount(codes[codes >= 0], minlength=len(words))
        most = np.sort(np.argsort(-counts, kind="stable")[:MAX_CATEGORIES])
        return cls(name, tuple(words[code] for code in most), binary=len(words) == 2 and bool((codes >= 0).all()))

    def names(self) -> list[str]:
        """Return one name for each input that the column becomes."""
        return [f"{self.name} = {category}" for category in self.categories[int(self.binary) :]]

    def accept(self, column: Column, where: str) -> Column:
        """Return the column as text."""
        return Column("text", _as_text(column, self.categories))

    def transform(self, column: Column) -> Floats:
        """Return (rows, inputs) float64."""
        codes, words = _encoded(column.values)
        place = {category: code for code, category in enumerate(self.categories)}
        coded = np.array([*(place.get(word, -1) for word in words), -1], dtype=np.int64)[codes]
        inputs: Floats = (coded[:, np.newaxis] == np.arange(len(self.categories))).astype(np.float64)
        return inputs[:, int(self.binary) :]


@dataclass(frozen=True)
class Preprocessing:
    """How raw columns become standardized inputs, as plain data.

    Args:
        columns: one entry for each feature column, in order.

    Example:
        >>> import numpy as np
        >>> table = Table("t.csv", {"age": Column("real", np.array([1.0, 3.0]))})
        >>> Preprocessing.fit(table).transform(table).tolist()
        [[-1.0], [1.0]]
    """

    columns: tuple[NumberColumn | CategoryColumn, ...]

    @classmethod
    def fit(cls, features: Table, rows: npt.NDArray[np.integer[Any]] | None = None) -> Preprocessing:
        """Take the statistics of these rows (0-based numbers within features), of all rows where None."""
        if rows is not None:
            features = features.take(rows)
        return cls(
            tuple(
                CategoryColumn.fit(name, column)
                if column.kind == "text"
                else NumberColumn.fit(name, Column(column.kind, _as_numbers(column, name, features.name)))
                for name, column in features.columns.items()
            )
        )

    def transform(self, features: Table, rows: npt.NDArray[np.integer[Any]] | None = None) -> Floats:
        """Return the inputs of these rows, of all rows where None: (rows, len(names())) float64, finite.

        Raises:
            TableError: as in check.
        """
        features, _ = self.check(features if rows is None else features.take(rows))
        parts = [spec.transform(features.columns[spec.name]) for spec in self.columns]
        return np.concatenate(parts, axis=1, dtype=np.float64)

    def names(self) -> list[str]:
        """Return one name for each input."""
        return [name for spec in self.columns for name in spec.names()]

    def check(self, table: Table) -> tuple[Table, list[str]]:
        """Return the columns that are needed, in order and typed as fitted, and notes on what was ignored.

        Raises:
            TableError: a column is absent, has text where numbers are expected, or is infinite somewhere.
        """
        needed = {spec.name for spec in self.columns}
        extra = [name for name in table.columns if name not in needed]
        absent = [spec.name for spec in self.columns if spec.name not in table.columns]
        if absent:
            near = {name: nearest(name, extra) for name in absent}
            shown = [_shown(n) + (f" (nearest: {_listed(near[n])})" if near[n] else "") for n in absent]
            raise _refuse(table.name, f"missing columns: {', '.join(shown)}; add them or rename the columns to match")
        columns = {spec.name: spec.accept(table.columns[spec.name], table.name) for spec in self.columns}
        notes = [f"ignored columns that the model does not use: {_listed(extra)}"] if extra else []
        return Table(table.name, columns), notes

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types that from_dict reads."""
        kinds = {NumberColumn: "number", CategoryColumn: "category"}
        columns: list[dict[str, Any]] = [{"kind": kinds[type(spec)], **asdict(spec)} for spec in self.columns]
        for column in columns:
            if column["kind"] == "category":
                column["categories"] = list(column["categories"])
        return {"columns": columns}

    @classmethod
    def from_dict(cls, data: object) -> Preprocessing:
        """Read what to_dict returned.

        Raises:
            TableError: the data is damaged.
        """
        where = "preprocessing"
        columns: list[NumberColumn | CategoryColumn] = []
        for position, entry in enumerate(_fields(data, where, {"columns": list})["columns"]):
            here = f"{where}.columns[{position}]"
            kind = entry.get("kind") if isinstance(entry, dict) else None
            if kind == "number":
                found = _fields(entry, here, {"kind": str, "name": str, "mean": float, "scale": float, "missing": bool})
                if found["scale"] <= 0:
                    raise _refuse(here, f"scale is {found['scale']!r}; it must be above 0")
                columns.append(NumberColumn(found["name"], found["mean"], found["scale"], found["missing"]))
            elif kind == "category":
                found = _fields(entry, here, {"kind": str, "name": str, "categories": list, "binary": bool})
                words = found["categories"]
                if not all(isinstance(word, str) for word in words) or words != sorted(set(words)):
                    raise _refuse(here, f"categories are {_shown(words)}; they must be different texts in order")
                if len(words) > MAX_CATEGORIES or (found["binary"] and len(words) != 2):
                    raise _refuse(here, f"{len(words)} categories do not fit; at most {MAX_CATEGORIES}, 2 where binary")
                columns.append(CategoryColumn(found["name"], tuple(words), found["binary"]))
            else:
                what = f"kind is {_shown(kind)}" if isinstance(entry, dict) else f"this is {_shown(entry)}"
                raise _refuse(here, f"{what}; it must be an object of the kind 'number' or 'category'")
        if not columns or len({spec.name for spec in columns}) < len(columns):
            raise _refuse(where, "columns must be at least one, with different names")
        return cls(tuple(columns))


def _fields(data: object, where: str, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return the fields of a JSON object that has just these, of these types; float takes any finite number."""
    if not isinstance(data, dict):
        raise _refuse(where, f"this is {_shown(data)}; it must be an object")
    if set(data) != set(kinds):
        lost, unknown = [k for k in kinds if k not in data], [k for k in data if k not in kinds]
        what = [f"missing keys: {_listed(lost)}"] * bool(lost) + [f"unknown keys: {_listed(unknown)}"] * bool(unknown)
        raise _refuse(where, f"{'; '.join(what)}; the keys are {_listed(kinds)}")
    found: dict[str, Any] = {}
    for key, kind in kinds.items():
        value = data[key]
        if kind is float and type(value) in (int, float):
            try:
                value = float(value)
            except OverflowError:  # an integer beyond float64
                value = math.inf
        if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
            needed = "a finite number" if kind is float else f"of the type {kind.__name__}"
            raise _refuse(where, f"{key} is {_shown(data[key])}; it must be {needed}")
        found[key] = value
    return found


@dataclass(frozen=True)
class TargetScale:
    """How a regression target is standardized, and predictions are brought back.

    Args:
        center: the mean of the fitted values.
        scale: their population standard deviation, 1 where that is 0.

    Example:
        >>> import numpy as np
        >>> TargetScale.fit(np.array([1.0, 3.0])).apply(np.array([5.0])).tolist()
        [3.0]
    """

    center: float
    scale: float

    @classmethod
    def fit(cls, y: Floats) -> TargetScale:
        """Take the mean and the population standard deviation of y, (rows,) float64, finite."""
        return cls(*_center_and_scale(np.asarray(y, dtype=np.float64)))

    def apply(self, y: npt.ArrayLike) -> Floats:
        """Return y, in the target's unit, standardized: the same shape, float64; NaN stays."""
        scaled = _standardized(np.asarray(y, dtype=np.float64), self.center, self.scale)
        return np.clip(scaled, -LARGEST_FLOAT64, LARGEST_FLOAT64)

    def invert(self, y: npt.ArrayLike) -> Floats:
        """Return y, standardized, in the target's unit: the same shape, float64; NaN stays, no value overflows."""
        with np.errstate(over="ignore"):
            values = np.asarray(y, dtype=np.float64) * self.scale + self.center
        return np.clip(values, -LARGEST_FLOAT64, LARGEST_FLOAT64)

    def to_dict(self) -> dict[str, float]:
        """Return plain JSON types that from_dict reads."""
        return {"center": self.center, "scale": self.scale}

    @classmethod
    def from_dict(cls, data: object) -> TargetScale:
        """Read what to_dict returned.

        Raises:
            TableError: the data is damaged.
        """
        found = _fields(data, "target scale", {"center": float, "scale": float})
        if found["scale"] <= 0:
            raise _refuse("target scale", f"scale is {found['scale']!r}; it must be above 0")
        return cls(found["center"], found["scale"])


# ---------------------------------------------------------------- writing


def write_table(path: str | Path, columns: Mapping[str, list[Any] | npt.NDArray[Any]]) -> None:
    """Write a CSV or Parquet file, by suffix; an interrupted write leaves the old file as it was.

    Args:
        path: the file to write; its folder exists.
        columns: values by column name, all of the same length; None and NaN are missing.

    Raises:
        TableError: the folder, the suffix or the columns do not fit.
        FileError: the file cannot be written.
    """
    path = Path(path)
    suffix = _suffix(path)
    if not path.parent.is_dir():
        there = path.parent.exists()
        what = "is not a folder; give another path" if there else "does not exist; create it first"
        raise _refuse(str(path), f"{'' if there else 'the folder '}{_shown(str(path.parent))} {what}")
    lists = _lists(columns, path)
    data = (
        _parquet_bytes(lists, path) if suffix in PARQUET_SUFFIXES else _csv_bytes(lists, path, CSV_DELIMITERS[suffix])
    )
    with atomic(path) as beside, plain(path, "write the file"):
        beside.write_bytes(data)


def csv_text(columns: Mapping[str, list[Any] | npt.NDArray[Any]]) -> str:
    """Return what `write_table` writes to a CSV file, as text.

    Args:
        columns: values by column name, all of the same length; None and NaN are missing.

    Raises:
        TableError: the columns do not fit.
    """
    where = Path("CSV")
    return _csv_bytes(_lists(columns, where), where, ",").decode("utf-8")


def _lists(columns: Mapping[str, list[Any] | npt.NDArray[Any]], path: Path) -> dict[str, list[Any]]:
    lists = {name: values.tolist() if isinstance(values, np.ndarray) else values for name, values in columns.items()}
    if len({len(values) for values in lists.values()}) != 1:
        raise _refuse(str(path), "there must be at least one column, and all columns must be of the same length")
    return lists


def _csv_bytes(columns: dict[str, list[Any]], path: Path, delimiter: str) -> bytes:
    cells = [[_cell(name), *map(_cell, values)] for name, values in columns.items()]
    # A blank line is no row, so in a single column a missing value is an empty quoted one.
    lines = [line or '""' for line in map(delimiter.join, zip(*cells, strict=True))]
    try:
        return "".join(f"{line}\n" for line in lines).encode("utf-8")
    except UnicodeEncodeError as error:
        raise _refuse(str(path), f"a text cannot be written as UTF-8 ({error.reason})") from None


def _cell(value: object) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or value != value:  # NaN
        return ""
    if isinstance(value, float | int):
        return repr(value)  # the shortest spelling that reads back exactly
    text = str(value)
    return '"' + text.replace('"', '""') + '"' if NEEDS_QUOTES.search(text) else text


def _parquet_bytes(columns: dict[str, list[Any]], path: Path) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    try:
        pq.write_table(pa.table([pa.array(values) for values in columns.values()], names=list(columns)), sink)
    except (pa.ArrowException, UnicodeEncodeError, OverflowError) as error:
        raise _refuse(str(path), f"the columns cannot be written as Parquet ({error})") from None
    return bytes(sink.getvalue().to_pybytes())


# ---------------------------------------------------------------- folds


def folds(y: npt.NDArray[Any], k: int, *, classes: bool, seed: int) -> list[Ints]:
    """Return the test rows of k folds: shuffled, their sizes differing by at most one.

    Args:
        y: (rows,) the target.
        k: the number of folds, 2 to the number of rows.
        classes: whether y holds class codes; each class is then spread over the folds as evenly as possible.
        seed: the shuffle's seed.

    Raises:
        TableError: k is out of range.

    Example:
        >>> import numpy as np
        >>> [len(fold) for fold in folds(np.array([0, 0, 0, 1, 1]), 2, classes=True, seed=0)]
        [3, 2]
    """
    if not 2 <= k <= len(y):
        raise TableError(f"folds: {k} folds of {len(y)} rows; give 2 folds or more, and no more than there are rows")
    order = np.random.default_rng(seed).permutation(len(y))
    if classes:
        order = order[np.argsort(y[order], kind="stable")]
    fold_of = np.empty(len(y), dtype=np.int64)
    fold_of[order] = np.arange(len(y)) % k
    return [np.flatnonzero(fold_of == fold).astype(np.int64) for fold in range(k)]


def split(y: npt.NDArray[Any], share: float, *, classes: bool, seed: int) -> tuple[Ints, Ints]:
    """Return the rows to train on and the rows held out, each in ascending order and not empty.

    Args:
        y: (rows,) the target.
        share: the share of rows to hold out, above 0 and below 1; at least one row is held out.
        classes: whether y holds class codes; each class then gives its share, and keeps a row to train on.
        seed: the shuffle's seed.

    Raises:
        TableError: the share is out of range, or too few rows are there.
    """
    if not 0.0 < share < 1.0:
        raise TableError(f"split: the share held out is {share!r}; it must be above 0 and below 1")
    order = np.random.default_rng(seed).permutation(len(y))
    codes = np.unique(y, return_inverse=True)[1] if classes else np.zeros(len(y), dtype=np.int64)
    sizes = np.bincount(codes, minlength=1)
    most = np.maximum(sizes - 1, 0)
    total = min(max(1, round(share * len(y))), int(most.sum()))
    if total < 1:
        kept = "each class keeps one row to train on" if classes else "one row is needed to train on"
        raise TableError(f"split: {len(y)} rows leave none to hold out, since {kept}; give more rows")
    quota = np.minimum(np.floor(share * sizes).astype(np.int64), most)
    # Largest remainders first; shuffled before, so that ties do not favor the first classes.
    ranked = np.random.default_rng(seed).permutation(len(sizes))
    ranked = ranked[np.argsort(-(share * sizes - quota)[ranked], kind="stable")]
    while (lacking := total - int(quota.sum())) > 0:
        quota[ranked[quota[ranked] < most[ranked]][:lacking]] += 1
    held = np.zeros(len(y), dtype=np.bool_)
    for code, count in enumerate(quota):
        held[order[codes[order] == code][:count]] = True
    return np.flatnonzero(~held).astype(np.int64), np.flatnonzero(held).astype(np.int64)
