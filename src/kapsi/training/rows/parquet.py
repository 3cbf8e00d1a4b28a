"""Tables in Parquet files that need not fit into memory: row groups in a shuffled order, rows shuffled within a buffer."""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kapsi.errors import SpecError, TableError, did_you_mean
from kapsi.training.rows.base import (
    FINGERPRINTED,
    Batch,
    ClassWeights,
    Free,
    Rows,
    Settings,
    fingerprint,
    mixed,
    part_of,
    sized,
)
from kapsi.training.rows.stored import tensor_of

__all__ = ["ParquetRows"]

SUFFIXES = (".parquet", ".pq")

BUFFER_BYTES = 2**27
"""Size of the buffer in which rows are shuffled: 128 MiB, as numbers of the model's type."""

PIECE_NUMBERS = 2**19
"""Numbers that are decoded at once: 8,192 rows of 64 columns, which stay in the cache while they are transposed."""

READ_BYTES = 2**16
"""Bytes read at once of each column; without such a bound a whole row group would be read, however large it is."""

KEPT_FOOTERS = 8
"""Files whose footers stay in memory: those of large files take milliseconds to read."""

ALLOWED = "numbers and Booleans"

Ints: TypeAlias = npt.NDArray[np.int64]


class _File(NamedTuple):
    """A file as it was when it was first seen.

    Attributes:
        path: where it is.
        size: in bytes.
        changed: when it was last changed, in nanoseconds.
        groups: rows of each row group.
    """

    path: Path
    size: int
    changed: int
    groups: tuple[int, ...]


class _Span(NamedTuple):
    """Some rows of one row group, from `begin` to `end` within it; the first of all of them is the `number`-th of the table."""

    file: int
    group: int
    begin: int
    end: int
    number: int

    @property
    def rows(self) -> int:
        return self.end - self.begin


class _Piece(NamedTuple):
    x: npt.NDArray[Any]
    y: npt.NDArray[Any]
    weight: npt.NDArray[np.float64] | None


class _Cursor:
    """How far a row group has been read: one that is larger than the buffer is read once, and not from its beginning for each part.

    Attributes:
        group: numbers of the file and of its row group, None at first.
        record: some rows of it, from `begin` to `end`.
    """

    def __init__(self) -> None:
        self.group: tuple[int, int] | None = None
        self.records: Iterator[Any] = iter(())
        self.record: Any = None
        self.begin = self.end = 0

    def open(self, span: _Span, records: Iterator[Any]) -> None:
        self.group, self.records = (span.file, span.group), records
        self.record, self.begin, self.end = None, 0, 0

    def advance(self) -> bool:
        self.record = next(self.records, None)
        if self.record is None:
            return False
        self.begin, self.end = self.end, self.end + self.record.num_rows
        return True

    def close(self) -> None:
        """Read to the end, where the file is looked at once more."""
        collections.deque(self.records, maxlen=0)
        self.group, self.record = None, None


class ParquetRows(Rows):
    """A table in Parquet files, of any size: memory is needed for a buffer of 128 MiB and not for the table.

    In each epoch the row groups are read in another order, fixed by seed and epoch. Rows of as many groups as fill the buffer are
    shuffled together, so that groups much smaller than it make the best order; a larger group is taken in parts, one
    after another. Files written by a sort on the target should be shuffled once before.

    Whole-number and Boolean targets are class numbers, others are numbers. Nulls, text and dates are refused.

    Several processes each read the table and take their part of each batch.

    Args:
        path: a file, a folder (all `.parquet` and `.pq` files in it and below, by name), or a list of files.
        target: the column of the targets, or a list of several.
        weight: the column of the weights of the rows.
        columns: those of the inputs, in this order; None: all but target and weight.

    Raises:
        TableError: there is no such file, it cannot be read, or columns are missing or of a type that is not taken.

    Example:
        >>> import tempfile, pathlib, pyarrow, pyarrow.parquet
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = pathlib.Path(folder, "table.parquet")
        ...     table = pyarrow.table({"a": [0.0, 1.0, 2.0], "b": [5.0, 6.0, 7.0], "class": [0, 1, 1]})
        ...     pyarrow.parquet.write_table(table, file)
        ...     rows = ParquetRows(file, target="class")
        ...     rows.count, rows.in_features, [batch.y.tolist() for batch in rows.chunks(2)]
        (3, 2, [[0, 1], [1]])
    """

    count: int

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        target: str | Sequence[str],
        weight: str | None = None,
        columns: Sequence[str] | None = None,
    ) -> None:
        self._footers: dict[int, Any] = {}
        paths = _paths(path)
        self.name = str(path) if isinstance(path, str | os.PathLike) else f"{len(paths)} files"
        targets = [target] if isinstance(target, str) else list(target)
        self.files = []
        kinds: dict[str, Any] = {}
        for file in paths:
            found, own = _open(file)
            if not kinds:
                kinds = own
                self.targets, self.weight = targets, weight
                self.columns = _chosen(file, own, targets, weight, columns)
            for name in self._needed():
                if name not in own:
                    raise _missing(file, name, own)
                if own[name] != kinds[name]:
                    raise TableError(
                        f"{file}: column {name!r} is {own[name]}, but {kinds[name]} in {paths[0]}; give all files the same types"
                    )
            self.files.append(found)
        for name in self._needed():
            _check_type(paths[0], name, kinds[name])
        self.count = sum(sum(file.groups) for file in self.files)
        if not self.count:
            raise TableError(f"{self.name}: the table has no rows; expected at least one row")
        import pyarrow.types as types

        whole = [not types.is_floating(kinds[name]) for name in targets]
        # Several columns are numbers, of whatever type they are.
        self.classes = len(targets) == 1 and whole[0]
        self.in_features, self.target_columns = len(self.columns), len(targets)
        first = next(iter(self.chunks(FINGERPRINTED)))
        self.described = {
            "kind": "Parquet table",
            "rows": self.count,
            "columns": self.in_features,
            "targets": self.target_columns,
            "types": [str(kinds[name]) for name in self._needed()],
            "names": self._needed(),
            "groups": fingerprint(torch.tensor([n for file in self.files for n in file.groups])),
            "checksum": fingerprint(*first[:3]),
        }

    def _needed(self) -> list[str]:
        return [*self.columns, *self.targets, *([] if self.weight is None else [self.weight])]

    # -------------------------------------------------------------------------------------------- reading

    def _spans(self, begin: int, end: int) -> list[_Span]:
        """Return where the rows from `begin` to `end` of the table are."""
        spans = []
        number = 0
        for file, found in enumerate(self.files):
            for group, rows in enumerate(found.groups):
                first, last = max(begin - number, 0), min(end - number, rows)
                if first < last:
                    spans.append(_Span(file, group, first, last, number + first))
                number += rows
        return spans

    def _parts(
        self, spans: Sequence[_Span], cursor: _Cursor | None = None, *, inputs: bool = True
    ) -> Iterator[tuple[_Span, _Piece]]:
        """Yield the rows of some spans in pieces, each with its own span, from where a cursor is."""
        cursor = _Cursor() if cursor is None else cursor
        names = self._needed() if inputs else self._needed()[len(self.columns) :]
        rows = max(1024, min(65_536, PIECE_NUMBERS // max(1, len(names))))
        for span in spans:
            file = self.files[span.file]
            if cursor.group != (span.file, span.group) or cursor.begin > span.begin:
                cursor.open(span, self._records(span, names, rows))
            place = span.begin
            while place < span.end:
                if place >= cursor.end:
                    if not cursor.advance():
                        raise TableError(
                            f"{file.path}: row group {span.group} has {cursor.end:,} rows and not {file.groups[span.group]:,} any "
                            "more; leave the file alone while it is read"
                        )
                    continue
                end = min(span.end, cursor.end)
                own = cursor.record.slice(place - cursor.begin, end - place)
                part = _Span(span.file, span.group, place, end, span.number + place - span.begin)
                yield part, self._piece(own, file.path, part, inputs)
                place = end
            if place == file.groups[span.group]:
                cursor.close()

    def _records(self, span: _Span, names: list[str], rows: int) -> Iterator[Any]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self.files[span.file].path
        with _readable(path, f"row group {span.group}"):
            footer = self._footers.pop(span.file, None)
            self._check_unchanged(os.stat(path), span.file)
            with pq.ParquetFile(
                path,
                metadata=footer,
                memory_map=False,  # pages of a map would count as memory
                buffer_size=READ_BYTES,
                pre_buffer=False,
                page_checksum_verification=True,
            ) as file:
                self._footers[span.file] = file.metadata
                while len(self._footers) > KEPT_FOOTERS:
                    self._footers.pop(next(iter(self._footers)))
                # One thread: in several, each column's buffers would be there at the same time, for little speed.
                yield from file.iter_batches(rows, row_groups=[span.group], columns=names, use_threads=False)
            self._check_unchanged(os.stat(path), span.file)
        # What was read is given back to the system before the next group.
        pa.default_memory_pool().release_unused()

    def _check_unchanged(self, state: os.stat_result, number: int) -> None:
        file = self.files[number]
        if (state.st_size, state.st_mtime_ns) != (file.size, file.changed):
            raise TableError(
                f"{file.path}: the file has changed since it was opened; begin again, and leave it alone meanwhile"
            )

    def _piece(self, record: Any, path: Path, span: _Span, inputs: bool) -> _Piece:
        columns = dict(zip(record.schema.names, record.columns, strict=True))
        for name, column in columns.items():
            if column.null_count:
                place = int(np.flatnonzero(np.asarray(column.is_null()))[0])
                raise TableError(
                    f"{path}: column {name!r} has a null in row group {span.group}, row {span.begin + place:,} of it (counted "
                    "from 0); fill it in, or leave such rows or columns out"
                )
        x = np.empty((len(self.columns) if inputs else 0, record.num_rows), dtype=self._dtype())
        with np.errstate(over="ignore"):  # what becomes infinite is refused
            for i, name in enumerate(self.columns if inputs else []):
                x[i] = columns[name].to_numpy(zero_copy_only=False)
        y = [columns[name].to_numpy(zero_copy_only=False) for name in self.targets]
        if self.classes:
            if y[0].dtype == np.uint64 and len(y[0]) and y[0].max() > np.iinfo(np.int64).max:
                raise TableError(f"{path}: column {self.targets[0]!r} has whole numbers that are too large for classes")
            target = y[0].astype(np.int64)
        else:
            target = y[0] if len(y) == 1 else np.stack(y, 1)
        weight = None
        if self.weight is not None:
            weight = columns[self.weight].to_numpy(zero_copy_only=False).astype(np.float64)
        return _Piece(x.T, target, weight)

    def _dtype(self) -> npt.DTypeLike:
        """Return the type in which inputs are taken out of the file: bfloat16 is none of NumPy's."""
        dtype = torch.get_default_dtype() if self.settings is None else self.settings.dtype
        return {torch.float64: np.float64, torch.float16: np.float16}.get(dtype, np.float32)

    # -------------------------------------------------------------------------------------------- checks

    def _settled(self, settings: Settings, class_weights: ClassWeights) -> None:
        if self.weight is not None or class_weights is not None:
            self.settings = settings.weighed(self._targets(settings), class_weights)

    def _targets(self, settings: Settings) -> Iterator[tuple[Tensor, Tensor | None]]:
        for span, piece in self._parts(self._spans(0, self.count), inputs=False):
            _, y, weight = _tensors(piece)
            y = settings.targets(y, True)
            settings.check_targets(y, self._named(span))
            settings.check_weights(weight, self._named(span))
            yield y, weight

    def _named(self, span: _Span) -> Callable[[int], str]:
        return functools.partial(_row_of, path=self.files[span.file].path, group=span.group, offset=span.begin)

    def _checked(self, span: _Span, piece: _Piece) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return a piece as tensors in their final types."""
        x, y, weight = _tensors(piece)
        settings = self.settings
        if settings is None:
            return x, y, weight
        x, y = settings.checked(x, y, Free(True, True), self._named(span))
        settings.check_weights(weight, self._named(span))
        return x, y, settings.weights(y, weight)

    # -------------------------------------------------------------------------------------------- batches

    def _buffers(self, seed: int, epoch: int) -> Iterator[list[_Span]]:
        """Yield what goes into the buffer together: row groups in shuffled order, whole unless they are larger than it."""
        width = self.in_features + self.target_columns + 1
        size = 4 if self.settings is None else self.settings.dtype.itemsize
        room = max(1, BUFFER_BYTES // (width * size))
        groups = self._spans(0, self.count)
        order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(mixed(seed, epoch)))
        filled: list[_Span] = []
        held = 0
        for span in (groups[i] for i in order.tolist()):
            if held and held + span.rows > room:
                yield filled
                filled, held = [], 0
            for begin in range(span.begin, span.end, room):
                end = min(begin + room, span.end)
                filled.append(_Span(span.file, span.group, begin, end, span.number + begin - span.begin))
                held += end - begin
                if held >= room:
                    yield filled
                    filled, held = [], 0
        if filled:
            yield filled

    def _filled(self, spans: list[_Span], buffer: list[Tensor | None], cursor: _Cursor) -> list[Tensor | None]:
        """Read some spans into a buffer that is used again and again, and return the part of it that they take."""
        rows = sum(span.rows for span in spans)
        place = 0
        for span, piece in self._parts(spans, cursor):
            parts = self._checked(span, piece)
            if not place:
                for i, part in enumerate(parts):
                    had = buffer[i]
                    if part is not None and (had is None or len(had) < rows):
                        buffer[i] = had = None  # the old one goes before the new one comes
                        buffer[i] = part.new_empty((rows, *part.shape[1:]))
            for i, part in enumerate(parts):
                own = buffer[i]
                if part is not None and own is not None:
                    own[place : place + len(part)] = part
            place += len(piece.y)
        return [None if each is None else each[:rows] for each in buffer]

    def batches(
        self, size: int | None, *, seed: int, epoch: int, start: int = 0, rank: int = 0, ranks: int = 1
    ) -> Iterator[Batch]:
        starts = sized(self.count, size)
        bounds = [*starts[start:], self.count]
        if len(bounds) < 2:
            return
        number = 0  # the batch at hand
        waiting: list[list[Tensor | None]] = []  # what earlier buffers gave to it
        buffer: list[Tensor | None] = [None, None, None]
        cursor = _Cursor()
        first = 0
        for which, spans in enumerate(self._buffers(seed, epoch)):
            last = first + sum(span.rows for span in spans)
            if last > bounds[0]:  # what lies before the start is not even read
                own = []  # nothing of the buffer is held on to while it is filled anew
                own = self._filled(spans, buffer, cursor)
                order = torch.randperm(last - first, generator=torch.Generator().manual_seed(mixed(seed, epoch, which)))
                while number < len(bounds) - 1 and bounds[number] < last:
                    begin, end = part_of(bounds[number], bounds[number + 1], rank, ranks)
                    begin, end = max(begin, first), min(end, last)
                    if begin < end or bounds[number + 1] <= last:
                        places = order[max(begin - first, 0) : max(end - first, 0)]
                        waiting.append([None if each is None else each.index_select(0, places) for each in own])
                    if bounds[number + 1] > last:
                        break
                    yield self._batch(waiting, bounds[number + 1] - bounds[number])
                    waiting = []
                    number += 1
            first = last

    def _batch(self, parts: list[list[Tensor | None]], count: int) -> Batch:
        x, y, weight = (
            None
            if each[0] is None
            else torch.cat([part for part in each if part is not None])
            if len(each) > 1
            else each[0]
            for each in zip(*parts, strict=True)
        )
        if x is None or y is None:
            raise TableError(f"{self.name}: no rows were read")
        x = x.contiguous()
        return Batch(x, y, weight, count) if self.settings is None else self.settings.batch(x, y, weight, count)

    def chunks(self, size: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        begin, end = part_of(0, self.count, rank, ranks)
        waiting: list[list[Tensor | None]] = []
        held = 0
        for span, piece in self._parts(self._spans(begin, end)):
            parts: list[Tensor | None] = [*self._checked(span, piece)]
            place, rows = 0, len(piece.y)
            while place < rows:
                taken = min(size - held, rows - place)
                waiting.append([None if each is None else each[place : place + taken] for each in parts])
                place, held = place + taken, held + taken
                if held == size:
                    yield self._batch(waiting, held)
                    waiting, held = [], 0
        if held:
            yield self._batch(waiting, held)


def _tensors(piece: _Piece) -> tuple[Tensor, Tensor, Tensor | None]:
    y = tensor_of(piece.y, "targets", "ParquetRows")
    return torch.from_numpy(piece.x), y, None if piece.weight is None else torch.from_numpy(piece.weight)


def _row_of(row: int, path: Path, group: int, offset: int) -> str:
    return f"row {row + offset:,} of row group {group} of {path} (counted from 0)"


# ------------------------------------------------------------------------------------------------ files


class _readable:
    """Says what a file cannot be read for, in one line."""

    def __init__(self, path: Path, what: str) -> None:
        self.path, self.what = path, what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        import pyarrow as pa

        if isinstance(error, FileNotFoundError):
            raise TableError(f"{self.path}: there is no such file; check the path") from None
        if isinstance(error, pa.ArrowException | OSError):
            reason = " ".join(str(getattr(error, "strerror", None) or error).split())
            raise TableError(
                f"{self.path}: {self.what} cannot be read as Parquet ({reason}); the file may be cut or damaged"
            ) from None


def _paths(path: object) -> list[Path]:
    """Return the files that a user means."""
    if isinstance(path, str | os.PathLike):
        one = Path(path)
        if not one.is_dir():
            return [one]
        below = (file for file in one.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        # Names that begin with a dot or a line are temporary or not data, by convention.
        found = sorted(file for file in below if not file.name.startswith((".", "_")))
        if not found:
            raise TableError(f"{one}: the folder has no files that end in {' or '.join(SUFFIXES)}")
        return found
    if not isinstance(path, list | tuple) or not path or not all(isinstance(each, str | os.PathLike) for each in path):
        raise SpecError(f"ParquetRows: expected a file, a folder, or a list of files, got {path!r}")
    return [Path(each) for each in path]


def _open(path: Path) -> tuple[_File, dict[str, Any]]:
    """Return what is known about a file, and the types of its columns."""
    import pyarrow.parquet as pq

    with _readable(path, "the file"), pq.ParquetFile(path, memory_map=False, pre_buffer=False) as file:
        state = os.stat(path)
        metadata, schema = file.metadata, file.schema_arrow
        repeated = {name for name in schema.names if schema.names.count(name) > 1}
        if repeated:
            raise TableError(f"{path}: several columns have the name {sorted(repeated)[0]!r}; rename them")
        groups = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
        return _File(path, state.st_size, state.st_mtime_ns, groups), dict(zip(schema.names, schema.types, strict=True))


def _chosen(
    path: Path, kinds: dict[str, Any], targets: list[str], weight: str | None, columns: Sequence[str] | None
) -> list[str]:
    """Return the columns of the inputs."""
    if not targets:
        raise SpecError("ParquetRows(target=[]): expected at least one column")
    if isinstance(columns, str):
        raise SpecError(f"ParquetRows(columns={columns!r}): expected a list of columns; use columns=[{columns!r}]")
    others = [*targets, *([] if weight is None else [weight])]
    chosen = [name for name in kinds if name not in others] if columns is None else list(columns)
    for name in (*others, *chosen):
        if name not in kinds:
            raise _missing(path, name, kinds)
    twice = sorted({name for name in (*others, *chosen) if (*others, *chosen).count(name) > 1})
    if twice:
        raise SpecError(f"ParquetRows: column {twice[0]!r} is given more than once; each is input, target or weight")
    if not chosen:
        raise SpecError(f"ParquetRows: {path} has no column beside {', '.join(others)}; there is nothing to learn from")
    return chosen


def _missing(path: Path, name: str, kinds: dict[str, Any]) -> TableError:
    shown = ", ".join(list(kinds)[:10]) + (", …" if len(kinds) > 10 else "")
    return TableError(f"{path}: there is no column {name!r}; {did_you_mean(str(name), kinds)}there are {shown}")


def _check_type(path: Path, name: str, kind: Any) -> None:
    import pyarrow.types as types

    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        return
    raise TableError(
        f"{path}: column {name!r} has the type {kind}, and only {ALLOWED} are taken; make numbers of it (of text class numbers, of "
        "dates days, of decimals floats), or name the columns to be used with columns=[…]"
    )
