"""Read text and Parquet files as typed tables."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kapsi.data.tabular.decide import Decider, unusable
from kapsi.data.tabular.delimited import read_text
from kapsi.data.tabular.image_folder import IMAGE, LABEL, read_folder
from kapsi.data.tabular.pictures import may_be_images
from kapsi.data.tabular.reading import Reading
from kapsi.data.tabular.source import PARQUET_SUFFIXES, check_regular, reading_file, table_suffix
from kapsi.data.tabular.types import Column, Table, listed, reject, short, table_error
from kapsi.errors import nearest

__all__ = ["check_options", "read_table"]

IMAGE_ROWS = 256
"""Encoded images in memory together."""

TEXT_OPTIONS = ("decimal", "thousands", "separator", "skip", "comment", "encoding", "header")


def read_table(
    path: str | Path,
    reading: Reading | None = None,
    *,
    kinds: Mapping[str, str] | None = None,
    decimal: str | None = None,
    categories: Mapping[str, Collection[str]] | None = None,
) -> Table:
    """Read a text file (.csv, .tsv, .txt, .dat, .data; also .gz, .zip, .zst), a Parquet file or a folder of images.

    An unusable column, for example of lists or with a repeated name, is an error only in a call with this column.

    Args:
        path: the file.
        reading: options; others are guessed from the file.
        kinds: kind of some columns by name, see `Decider`, in addition to the options.
        decimal: decimal mark of a text file without numbers to show the mark.
        categories: categories of a fit by column; these words are not missing values.

    Raises:
        TableError: the file is not a table, or has no rows.

    Example:
        >>> import tempfile, pathlib
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "t.csv")
        ...     _ = path.write_text("a;b\\n0,5;x\\n1,25;-\\n")
        ...     table = read_table(path)
        >>> [column.line(name) for name, column in table.columns.items()]
        ["column 'a': real (a decimal comma)", "column 'b': text (1 different texts)"]
    """
    path = Path(path)
    reading = Reading() if reading is None else reading
    given = dict(reading.kinds())
    if path.is_dir():
        check_options(path, _given_options(reading))
        table = read_folder(path)
        if kinds is None:
            given |= dict.fromkeys(reading.units(), "unit")
            _check_names(path, given, list(table.columns))
            _check_kinds_of_folder(path, given)
        return table
    check_regular(path)
    suffix, compression = table_suffix(path)
    wanted, given = {**given, **(kinds or {})}, {**given, **dict.fromkeys(reading.units(), "unit")}
    notes: tuple[str, ...] = ()
    if suffix in PARQUET_SUFFIXES:
        if kinds is None:
            check_options(path, _given_options(reading))
        if compression is not None:
            reject(str(path), "a Parquet file is compressed already; decompress it first")
        decider = Decider(reading, wanted, typed=True, categories=categories or {}, folder=path.parent)
        names, columns, digest = _read_parquet(path, decider)
    else:
        parts = read_text(path, suffix, compression, reading, wanted, decimal, categories)
        names, columns, digest, notes, decimal = parts
    names = [name or f"column {number}" for number, name in enumerate(names, start=1)]
    if not columns or not len(columns[0]):
        reject(path.name, "the file has a header but no rows; add at least one row")
    if kinds is None:
        _check_names(path, given, names)
    return Table(path.name, by_name(names, columns), digest, notes, decimal)


def _check_names(path: Path, given: Mapping[str, str], names: list[str]) -> None:
    """Refuse columns of options, with the option, that are not in the table."""
    for name, option in given.items():
        if name not in names:
            near = nearest(name, names)
            hint = f" (nearest: {listed(near)})" if near else ""
            there = f"there is no such column{hint}; the columns are {listed(names)}"
            reject(path.name, f"--{option} {short(name)}: {there}")


def _check_kinds_of_folder(path: Path, given: Mapping[str, str]) -> None:
    """Refuse another kind of the columns of a folder of images."""
    for name, kind in given.items():
        known = {IMAGE: "image", LABEL: "categorical"}[name]
        if kind != known:
            what = "images" if name == IMAGE else "names of folders, which are classes"
            reject(path.name, f"--{kind} {short(name)}: the column has {what}; leave --{kind} out")


def by_name(names: list[str], columns: list[Column]) -> dict[str, Column]:
    """Return columns by name; columns of the same name cannot be used."""
    table = dict(zip(names, columns, strict=True))
    if len(table) < len(names):
        for name, count in Counter(names).items():
            if count > 1:
                table[name] = unusable(len(columns[0]), f": {count} columns have the same name; rename them")
    return table


def check_options(path: Path, given: Iterable[str]) -> None:
    """Refuse options of text files, by name, for a Parquet file or a folder."""
    names = [name for name in given if name in TEXT_OPTIONS]
    if names and path.is_dir():
        reject(path.name, f"{names[0]} has no effect on a folder of images; leave it out")
    if names and table_suffix(path)[0] in PARQUET_SUFFIXES:
        reject(path.name, f"{names[0]} has no effect on a Parquet file; leave it out")


def _given_options(reading: Reading) -> list[str]:
    """Return the options of text files that differ from the defaults."""
    return [name for name in TEXT_OPTIONS if getattr(reading, name) != getattr(Reading(), name)]


def _read_parquet(path: Path, decider: Decider) -> tuple[list[str], list[Column], str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with reading_file(path):
        if not path.stat().st_size:
            reject(path.name, "the file is empty; a table has at least one row")
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    try:
        file = pq.ParquetFile(path)
        names = list(file.schema_arrow.names)
        images = _image_columns(path, file, decider) if len(set(names)) == len(names) else {}
        raw = file.read([name for name in names if name not in images] if images else None)
        raw.validate(full=True)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise table_error(path.name, f"not readable as Parquet ({error})") from None
    if not images:
        columns = zip(names, raw.columns, strict=True)
        return names, [decider.column(name, column.combine_chunks()) for name, column in columns], digest
    return (
        names,
        [images[name] if name in images else decider.column(name, raw.column(name).combine_chunks()) for name in names],
        digest,
    )


def _image_columns(path: Path, file: Any, decider: Decider) -> dict[str, Column]:
    """Return the columns of images of a Parquet file; encoded ones are in memory a few at a time."""

    def parts(name: str) -> Iterator[Any]:
        for batch in file.iter_batches(IMAGE_ROWS, columns=[name]):
            batch.validate(full=True)
            yield batch.column(name)

    found: dict[str, Column] = {}
    for field in file.schema_arrow:
        if may_be_images(field.type) and file.metadata.num_rows:
            images = decider.images(field.name, parts(field.name))
            if images is not None:
                found[field.name] = images
    return found
