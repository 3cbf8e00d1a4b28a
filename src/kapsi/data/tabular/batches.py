"""Read a table in batches of rows, in constant memory, with kinds of columns known from a fit."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kapsi.data.tabular.decide import Decider
from kapsi.data.tabular.delimited import WIDE, TextFile
from kapsi.data.tabular.image_folder import FILE, LABEL, folder_batches
from kapsi.data.tabular.read import by_name
from kapsi.data.tabular.reading import Reading
from kapsi.data.tabular.repair import RepairedRows
from kapsi.data.tabular.source import PARQUET_SUFFIXES, TEXT_SUFFIXES, check_regular, reading_file, table_suffix
from kapsi.data.tabular.types import Column, Table, listed, reject, short, table_error
from kapsi.data.tabular.wide import CELLS, WideNumbers, row_blocks
from kapsi.errors import nearest

__all__ = ["TableBatch", "read_batches"]

ROWS = 65_536
TEXT_ROWS = 2_048
"""Rows of a batch of a Parquet file with texts or images: 2 GB of values of a megabyte."""
MOST_CELLS = 2**22
BLOCK = 2**22
"""Rows and cells of a batch of a Parquet file, bytes of a batch of a text file."""
WIDE_ROWS = 64
"""Least rows of a batch of a wide text file: each batch takes 10 µs per column."""


class TableBatch(NamedTuple):
    """Some rows of a table.

    Attributes:
        table: the columns with a kind, typed.
        kept: the columns to keep, as in the file: Arrow arrays by name, texts for a text file.
        ignored: names of all other columns of the file.
    """

    table: Table
    kept: dict[str, Any]
    ignored: list[str]


def read_batches(
    path: str | Path,
    reading: Reading,
    kinds: Mapping[str, str],
    keep: Sequence[str] = (),
    decimal: str | None = None,
    categories: Mapping[str, Collection[str]] | None = None,
) -> Iterator[TableBatch]:
    """Yield the rows of a text or Parquet file in batches; the values are those of `read_table`.

    A column whose later rows show that the earlier ones had another meaning cannot be used from there on.

    Args:
        path: the file, as for `read_table`.
        reading: options of text files.
        kinds: kind of the columns to read by name; absent columns are left out.
        keep: names of columns to pass on as they are.
        decimal: decimal mark of a text file that does not show its own.
        categories: categories of a fit by column; words among them are no missing values.

    Raises:
        TableError: the file is not a table, or a column to keep is absent.
    """
    path = Path(path)
    if path.is_dir():
        yield from _folder(path, kinds, keep)
        return
    check_regular(path)
    suffix, compression = table_suffix(path)
    parts = (
        _parquet(path, reading, kinds, keep, compression, categories or {})
        if suffix in PARQUET_SUFFIXES
        else _text(TextFile(path, compression, reading, TEXT_SUFFIXES[suffix]), kinds, keep, decimal, categories)
    )
    empty = True
    for batch in parts:
        empty = False
        yield batch
    if empty:
        reject(path.name, "the file has a header but no rows; add at least one row")


def _find(
    names: Sequence[str], kinds: Mapping[str, str], keep: Sequence[str], where: str
) -> tuple[list[int], list[int]]:
    """Return the indices of the columns to read, and of those to keep."""
    for name in keep:
        count = names.count(name)
        if count != 1:
            near = nearest(name, list(names))
            hint = f" (nearest: {listed(near)})" if near else ""
            problem = (
                f"is there {count} times; rename the columns"
                if count
                else f"is no column{hint}; the columns are {listed(names)}"
            )
            reject(where, f"--keep {short(name)}: {problem}")
    return [i for i, name in enumerate(names) if name in kinds], [names.index(name) for name in keep]


def _parquet(
    path: Path,
    reading: Reading,
    kinds: Mapping[str, str],
    keep: Sequence[str],
    compression: str | None,
    categories: Mapping[str, Collection[str]],
) -> Iterator[TableBatch]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if compression is not None:
        reject(str(path), "a Parquet file is compressed already; decompress it first")
    try:
        with reading_file(path), open(path, "rb") as handle:
            if not path.stat().st_size:
                reject(path.name, "the file is empty; a table has at least one row")
            file = pq.ParquetFile(handle)
            names = [name or f"column {i}" for i, name in enumerate(file.schema_arrow.names, 1)]
            used, kept = _find(names, kinds, keep, path.name)
            wanted = sorted({*used, *kept})
            # Columns of equal names cannot be told apart by name.
            unique = len(set(names)) == len(names) == len(file.schema.names)
            columns = [file.schema_arrow.names[i] for i in wanted] if unique else None
            decider = Decider(reading, dict(kinds), typed=True, categories=categories, forms={}, folder=path.parent)
            most = TEXT_ROWS if {"text", "image"} & set(kinds.values()) else ROWS
            rows = max(1, min(most, MOST_CELLS // max(1, len(wanted))))
            for part in file.iter_batches(rows, columns=columns):
                part.validate(full=True)
                place = {i: n for n, i in enumerate(wanted)} if unique else {i: i for i in range(len(names))}
                typed = [decider.column(names[i], part.column(place[i])) for i in used]
                table = Table(path.name, by_name([names[i] for i in used], typed))
                yield TableBatch(table, {names[i]: part.column(place[i]) for i in kept}, _others(names, wanted))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise table_error(path.name, f"not readable as Parquet ({error})") from None


def _folder(path: Path, kinds: Mapping[str, str], keep: Sequence[str]) -> Iterator[TableBatch]:
    """Yield the rows of a folder of images."""
    for table, files in folder_batches(path):
        values = {name: column.values.tolist() for name, column in table.columns.items() if name == LABEL}
        values[FILE] = files
        names = [*table.columns, FILE]
        for name in keep:
            if name not in values:
                reject(path.name, f"--keep {short(name)}: is no column; choose from {listed(values)}")
        used = {name: column for name, column in table.columns.items() if name in kinds}
        ignored = [name for name in names if name not in used and name not in keep and name != FILE]
        yield TableBatch(Table(table.name, used), {name: values[name] for name in keep}, ignored)


def _others(names: Sequence[str], wanted: Sequence[int]) -> list[str]:
    skip = set(wanted)
    return [name for i, name in enumerate(names) if i not in skip]


def _text(
    file: TextFile,
    kinds: Mapping[str, str],
    keep: Sequence[str],
    decimal: str | None,
    categories: Mapping[str, Collection[str]] | None,
) -> Iterator[TableBatch]:
    names = [name or f"column {i}" for i, name in enumerate(file.dialect.names, 1)]
    used, kept = _find(names, kinds, keep, file.where)
    decider = replace(file.decider(dict(kinds), decimal, categories), forms={})
    read = _wide_rows if len(names) >= WIDE else _rows
    others = _others(names, [*used, *kept])
    try:
        for typed, passed in read(file, names, used, kept, decider):
            notes = (*file.notes, *file.dialect.notes)
            table = Table(file.where, by_name([names[i] for i in used], typed), notes=notes)
            yield TableBatch(table, dict(zip(keep, passed, strict=True)), others)
    except UnicodeError:
        file.reject_encoding()


def _rows(
    file: TextFile, names: list[str], used: list[int], kept: list[int], decider: Decider
) -> Iterator[tuple[list[Column], list[Any]]]:
    """Yield the used columns, typed, and the kept ones, in batches of `BLOCK` bytes."""
    import pyarrow.compute as pc

    # Without a column of the model, the caller reports the missing columns.
    wanted = sorted({*used, *kept}) or [0]
    scanned = decider.settled is not None
    for part in _strings(file, wanted):
        columns = dict(zip(wanted, part.columns, strict=True))
        numbers = [columns[i] for i in used if decider.kinds[names[i]] == "numeric"]
        if not scanned and any(pc.any(pc.match_substring_regex(column, "[.,]")).as_py() for column in numbers):
            decider, scanned = file.with_mark(decider), True
        yield [decider.column(names[i], columns[i]) for i in used], [columns[i] for i in kept]


def _wide_rows(
    file: TextFile, names: list[str], used: list[int], kept: list[int], decider: Decider
) -> Iterator[tuple[list[Column], list[Any]]]:
    """Yield the used columns, typed, and the kept ones, in batches of at least `WIDE_ROWS` rows."""
    import pyarrow as pa
    import pyarrow.compute as pc

    width, scanned = len(names), decider.settled is not None
    with reading_file(file.path), file.stream() as stream:
        blocks = row_blocks(stream, file.dialect)
        size = max(1, -(-WIDE_ROWS * width // CELLS))
        while several := list(itertools.islice(blocks, size)):
            if not scanned and any(pc.any(pc.match_substring_regex(values, "[.,]")).as_py() for values in several):
                decider, scanned = file.with_mark(decider), True
            numbers = WideNumbers(decider, width)
            for values in several:
                numbers.add(values)
            found = numbers.columns(names, used, decider)

            def strings(i: int, several: list[Any] = several) -> Any:
                places = [pa.array(np.arange(i, len(values), width)) for values in several]
                return pa.concat_arrays([values.take(at) for values, at in zip(several, places, strict=True)])

            typed = [
                decider.as_before(names[i], found[i]) if i in found else decider.column(names[i], strings(i))
                for i in used
            ]
            yield typed, [strings(i) for i in kept]


def _strings(file: TextFile, wanted: Sequence[int]) -> Iterator[Any]:
    """Yield batches of the wanted columns as strings."""
    import pyarrow as pa

    done, size, plain = 0, BLOCK, file.dialect.plain
    while True:
        try:
            for part in _blocks(file, wanted, plain, size, done):
                done += part.num_rows
                yield part
            return
        except (OSError, EOFError) as error:
            raise table_error(file.where, f"not readable after row {done:,} ({error})") from None
        except pa.ArrowInvalid as error:
            # Continue where Arrow has stopped: a row longer than a block; trailing separators, comments between the rows.
            if "straddling object" in str(error) and size < 2**30:
                size *= 16
            elif "invalid UTF8" in str(error):
                file.reject_encoding()
            elif plain:
                plain = False
            else:
                raise table_error(file.where, f"not readable after row {done:,} ({str(error)[:200]})") from None


def _blocks(file: TextFile, wanted: Sequence[int], plain: bool, size: int, skip: int) -> Iterator[Any]:
    """Yield batches of the wanted columns, without the first rows."""
    import pyarrow as pa
    import pyarrow.csv as pa_csv

    keys = [str(i) for i in range(file.dialect.width)]
    chosen = [str(i) for i in wanted]
    with reading_file(file.path):
        stream = file.stream()
    with stream:
        source = stream if plain else RepairedRows(stream, file.dialect)
        try:
            reader = pa_csv.open_csv(
                pa.PythonFile(source, mode="r"),
                read_options=pa_csv.ReadOptions(column_names=keys, block_size=size),
                parse_options=pa_csv.ParseOptions(delimiter=file.dialect.separator, newlines_in_values=True),
                convert_options=pa_csv.ConvertOptions(
                    include_columns=chosen, column_types=dict.fromkeys(chosen, pa.large_string())
                ),
            )
        except pa.ArrowInvalid as error:
            if "Empty CSV file" in str(error):
                return
            raise
        last = None
        for part in reader:
            left = part.slice(min(skip, part.num_rows))
            skip -= part.num_rows - left.num_rows
            if left.num_rows:
                last = left
                yield left
        if last is not None and stream.quotes % 2 and any("\n" in str(column[-1].as_py()) for column in last.columns):
            reject(file.where, "a quote is opened and never closed; close it")
