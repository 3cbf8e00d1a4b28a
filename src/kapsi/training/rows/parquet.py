"""Parquet tables larger than memory: row groups in shuffled order, rows shuffled within a buffer."""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kapsi.errors import SpecError, TableError, did_you_mean
from kapsi.files import one_line
from kapsi.training.rows.base import (
    FINGERPRINTED,
    Batch,
    ClassWeights,
    Convertible,
    Rows,
    Settings,
    batch_starts,
    fingerprint,
    mix_seed,
    part_of,
)
from kapsi.training.rows.stored import as_tensor

__all__ = ["ParquetRows"]

SUFFIXES = (".parquet", ".pq")

BUFFER_BYTES = 2**27
"""Size of the buffer in which rows are shuffled: 128 MiB, as numbers of the model's type."""

PIECE_NUMBERS = 2**19
"""Numbers decoded at once: 8,192 rows of 64 columns, transposed within the cache."""

READ_BYTES = 2**16
"""Bytes read at once of each column; without a bound pyarrow reads whole row groups."""

KEPT_FOOTERS = 8
"""Files with footers kept in memory: reading the footer of a large file takes milliseconds."""

Ints: TypeAlias = npt.NDArray[np.int64]


class _File(NamedTuple):
    """State of a file when opened first.

    Attributes:
        path: path of the file.
        size: size in bytes.
        changed: time of the last change in nanoseconds.
        groups: number of rows of each row group.
    """

    path: Path
    size: int
    changed: int
    groups: tuple[int, ...]


class _Span(NamedTuple):
    """Rows `begin` to `end` of a row group; the first one is row `number` of the table."""

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
    """Position within a row group; a row group larger than the buffer is read in one pass.

    Attributes:
        group: indices of the file and its row group, None at first.
        record: rows `begin` to `end` of the row group.
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
        """Read to the end, with the last check for changes of the file."""
        collections.deque(self.records, maxlen=0)
        self.group, self.record = None, None


class ParquetRows(Rows):
    """A table of any size in Parquet files, read through a buffer of 128 MiB.

    Each epoch reads the row groups in another order, determined by seed and epoch, and shuffles the rows of as many groups as
    fit into the buffer. Groups much smaller than the buffer give the best order; larger groups are read in several parts.
    Shuffle files sorted by the target once before training.

    Integer and Boolean targets are class numbers. Nulls, texts and dates are errors.

    With several processes, each reads the table and takes its part of each batch.

    Args:
        path: a file, a folder (all its `.parquet` and `.pq` files, also in sub-folders, by name), or a list of files.
        target: column of the targets, or a list of several columns.
        weight: column of row weights, or None.
        columns: columns of the inputs, in this order; None for all columns except target and weight.

    Raises:
        TableError: files are missing or unreadable, or columns are missing or of an unsupported type.
        SpecError: an option of a wrong type, or a column given twice.

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
        paths = _files_of(path)
        self.name = str(path) if isinstance(path, str | os.PathLike) else f"{len(paths)} files"
        targets = [target] if isinstance(target, str) else list(target)
        self.files = []
        kinds: dict[str, Any] = {}
        for file in paths:
            opened, own = _open(file)
            if not kinds:
                kinds = own
                self.targets, self.weight = targets, weight
                self.columns = _input_columns(file, own, targets, weight, columns)
            for name in self._needed():
                if name not in own:
                    raise _missing(file, name, own)
                if own[name] != kinds[name]:
                    raise TableError(f"{file}: column {name!r} is {own[name]}, but {kinds[name]} in {paths[0]}")
            self.files.append(opened)
        for name in self._needed():
            _check_type(paths[0], name, kinds[name])
        self.count = sum(sum(file.groups) for file in self.files)
        if not self.count:
            raise TableError(f"{self.name}: the table has no rows; expected at least one row")
        import pyarrow.types as types

        whole = [not types.is_floating(kinds[name]) for name in targets]
        # Several columns are always numbers.
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
        """Return the spans of the rows from `begin` to `end` of the table."""
        spans = []
        number = 0
        for file, opened in enumerate(self.files):
            for group, rows in enumerate(opened.groups):
                first, last = max(begin - number, 0), min(end - number, rows)
                if first < last:
                    spans.append(_Span(file, group, first, last, number + first))
                number += rows
        return spans

    def _parts(
        self, spans: Sequence[_Span], cursor: _Cursor | None = None, *, inputs: bool = True
    ) -> Iterator[tuple[_Span, _Piece]]:
        """Yield the rows of spans in pieces, each with its own span, starting at the cursor."""
        cursor = _Cursor() if cursor is None else cursor
        names = self._needed() if inputs else self._needed()[len(self.columns) :]
        rows = max(1024, min(65_536, PIECE_NUMBERS // max(1, len(names))))
        for span in spans:
            file = self.files[span.file]
            if cursor.group != (span.file, span.group) or cursor.begin > span.begin:
                cursor.open(span, self._records(span, names, rows))
            row = span.begin
            while row < span.end:
                if row >= cursor.end:
                    if not cursor.advance():
                        raise TableError(
                            f"{file.path}: row group {span.group} has {cursor.end:,} rows instead of "
                            f"{file.groups[span.group]:,}; do not change the file during training"
                        )
                    continue
                end = min(span.end, cursor.end)
                own = cursor.record.slice(row - cursor.begin, end - row)
                part = _Span(span.file, span.group, row, end, span.number + row - span.begin)
                yield part, self._piece(own, file.path, part, inputs)
                row = end
            if row == file.groups[span.group]:
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
                memory_map=False,  # pages of a map count as memory
                buffer_size=READ_BYTES,
                pre_buffer=False,
                page_checksum_verification=True,
            ) as file:
                self._footers[span.file] = file.metadata
                while len(self._footers) > KEPT_FOOTERS:
                    self._footers.pop(next(iter(self._footers)))
                # One thread: several threads hold buffers of all columns at once, for little speed.
                yield from file.iter_batches(rows, row_groups=[span.group], columns=names, use_threads=False)
            self._check_unchanged(os.stat(path), span.file)
        # Free the memory before the next group.
        pa.default_memory_pool().release_unused()

    def _check_unchanged(self, state: os.stat_result, number: int) -> None:
        file = self.files[number]
        if (state.st_size, state.st_mtime_ns) != (file.size, file.changed):
            raise TableError(f"{file.path}: the file has changed since it was opened; do not change it during training")

    def _piece(self, record: Any, path: Path, span: _Span, inputs: bool) -> _Piece:
        columns = dict(zip(record.schema.names, record.columns, strict=True))
        for name, column in columns.items():
            if column.null_count:
                row = int(np.flatnonzero(np.asarray(column.is_null()))[0])
                raise TableError(
                    f"{path}: column {name!r} has a null in row group {span.group}, row {span.begin + row:,} of it (counted "
                    "from 0); fill nulls, or drop the rows or the column"
                )
        x = np.empty((len(self.columns) if inputs else 0, record.num_rows), dtype=self._dtype())
        with np.errstate(over="ignore"):  # infinities are an error later
            for i, name in enumerate(self.columns if inputs else []):
                x[i] = columns[name].to_numpy(zero_copy_only=False)
        y = [columns[name].to_numpy(zero_copy_only=False) for name in self.targets]
        if self.classes:
            if y[0].dtype == np.uint64 and len(y[0]) and y[0].max() > np.iinfo(np.int64).max:
                raise TableError(f"{path}: column {self.targets[0]!r} has integers too large for class numbers")
            target = y[0].astype(np.int64)
        else:
            target = y[0] if len(y) == 1 else np.stack(y, 1)
        weight = None
        if self.weight is not None:
            weight = columns[self.weight].to_numpy(zero_copy_only=False).astype(np.float64)
        return _Piece(x.T, target, weight)

    def _dtype(self) -> npt.DTypeLike:
        """Return NumPy's type of the inputs: float32 instead of bfloat16, absent from NumPy."""
        dtype = torch.get_default_dtype() if self.settings is None else self.settings.dtype
        return {torch.float64: np.float64, torch.float16: np.float16}.get(dtype, np.float32)

    # -------------------------------------------------------------------------------------------- checks

    def _bind(self, settings: Settings, class_weights: ClassWeights) -> None:
        if self.weight is not None or class_weights is not None:
            self.settings = settings.with_weights(self._targets(settings), class_weights)

    def _targets(self, settings: Settings) -> Iterator[tuple[Tensor, Tensor | None]]:
        for span, piece in self._parts(self._spans(0, self.count), inputs=False):
            _, y, weight = _tensors(piece)
            y = settings.targets(y, True)
            settings.check_targets(y, self._label(span))
            settings.check_weights(weight, self._label(span))
            yield y, weight

    def _label(self, span: _Span) -> Callable[[int], str]:
        return functools.partial(_row_label, path=self.files[span.file].path, group=span.group, offset=span.begin)

    def _checked(self, span: _Span, piece: _Piece) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return a piece as checked tensors in their final types."""
        x, y, weight = _tensors(piece)
        settings = self.settings
        if settings is None:
            return x, y, weight
        x, y = settings.convert(x, y, Convertible(True, True), self._label(span))
        settings.check_weights(weight, self._label(span))
        return x, y, settings.weights(y, weight)

    # -------------------------------------------------------------------------------------------- batches

    def _buffers(self, seed: int, epoch: int) -> Iterator[list[_Span]]:
        """Yield the spans of each buffer: row groups in shuffled order, in parts if larger than the buffer."""
        width = self.in_features + self.target_columns + 1
        size = 4 if self.settings is None else self.settings.dtype.itemsize
        room = max(1, BUFFER_BYTES // (width * size))
        groups = self._spans(0, self.count)
        order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(mix_seed(seed, epoch)))
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
        """Read spans into a reused buffer, and return the filled part."""
        rows = sum(span.rows for span in spans)
        filled = 0
        for span, piece in self._parts(spans, cursor):
            parts = self._checked(span, piece)
            if not filled:
                for i, part in enumerate(parts):
                    had = buffer[i]
                    if part is not None and (had is None or len(had) < rows):
                        buffer[i] = had = None  # free the old buffer first
                        buffer[i] = part.new_empty((rows, *part.shape[1:]))
            for i, part in enumerate(parts):
                own = buffer[i]
                if part is not None and own is not None:
                    own[filled : filled + len(part)] = part
            filled += len(piece.y)
        return [None if part is None else part[:rows] for part in buffer]

    def batches(
        self, size: int | None, *, seed: int, epoch: int, start: int = 0, rank: int = 0, ranks: int = 1
    ) -> Iterator[Batch]:
        starts = batch_starts(self.count, size)
        bounds = [*starts[start:], self.count]
        if len(bounds) < 2:
            return
        number = 0  # of the batch
        waiting: list[list[Tensor | None]] = []  # its parts from earlier buffers
        buffer: list[Tensor | None] = [None, None, None]
        cursor = _Cursor()
        first = 0
        for which, spans in enumerate(self._buffers(seed, epoch)):
            last = first + sum(span.rows for span in spans)
            if last > bounds[0]:  # buffers before the start are not read
                own = []  # release the buffer before filling it
                own = self._filled(spans, buffer, cursor)
                order = torch.randperm(
                    last - first, generator=torch.Generator().manual_seed(mix_seed(seed, epoch, which))
                )
                while number < len(bounds) - 1 and bounds[number] < last:
                    begin, end = part_of(bounds[number], bounds[number + 1], rank, ranks)
                    begin, end = max(begin, first), min(end, last)
                    if begin < end or bounds[number + 1] <= last:
                        indices = order[max(begin - first, 0) : max(end - first, 0)]
                        waiting.append([None if part is None else part.index_select(0, indices) for part in own])
                    if bounds[number + 1] > last:
                        break
                    yield self._batch(waiting, bounds[number + 1] - bounds[number])
                    waiting = []
                    number += 1
            first = last

    def _batch(self, parts: list[list[Tensor | None]], count: int) -> Batch:
        columns = [[part for part in column if part is not None] for column in zip(*parts, strict=True)]
        x, y, weight = (None if not c else c[0] if len(c) == 1 else torch.cat(c) for c in columns)
        x, y = cast(Tensor, x).contiguous(), cast(Tensor, y)
        return Batch(x, y, weight, count) if self.settings is None else self.settings.batch(x, y, weight, count)

    def chunks(self, size: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        begin, end = part_of(0, self.count, rank, ranks)
        waiting: list[list[Tensor | None]] = []
        held = 0
        for span, piece in self._parts(self._spans(begin, end)):
            parts: list[Tensor | None] = [*self._checked(span, piece)]
            used, rows = 0, len(piece.y)
            while used < rows:
                taken = min(size - held, rows - used)
                waiting.append([None if part is None else part[used : used + taken] for part in parts])
                used, held = used + taken, held + taken
                if held == size:
                    yield self._batch(waiting, held)
                    waiting, held = [], 0
        if held:
            yield self._batch(waiting, held)


def _tensors(piece: _Piece) -> tuple[Tensor, Tensor, Tensor | None]:
    y = as_tensor(piece.y, "targets", "ParquetRows")
    return torch.from_numpy(piece.x), y, None if piece.weight is None else torch.from_numpy(piece.weight)


def _row_label(row: int, path: Path, group: int, offset: int) -> str:
    return f"row {row + offset:,} of row group {group} of {path} (counted from 0)"


# ------------------------------------------------------------------------------------------------ files


@contextmanager
def _readable(path: Path, part: str) -> Iterator[None]:
    """Convert errors of reading a part of a file into a `TableError`."""
    import pyarrow as pa

    try:
        yield
    except FileNotFoundError:
        raise TableError(f"{path}: there is no such file; check the path") from None
    except (pa.ArrowException, OSError) as error:
        reason = one_line(error)
        raise TableError(f"{path}: {part} cannot be read as Parquet ({reason}); the file may be damaged") from None


def _files_of(path: object) -> list[Path]:
    """Return the Parquet files of a path, a folder or a list."""
    if isinstance(path, str | os.PathLike):
        root = Path(path)
        if not root.is_dir():
            return [root]
        below = (file for file in root.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        # By convention, names starting with a dot or an underscore are no data.
        files = sorted(file for file in below if not file.name.startswith((".", "_")))
        if not files:
            raise TableError(f"{root}: the folder has no files ending in {' or '.join(SUFFIXES)}")
        return files
    if not isinstance(path, list | tuple) or not path or not all(isinstance(file, str | os.PathLike) for file in path):
        raise SpecError(f"ParquetRows: expected a file, a folder, or a list of files, got {path!r}")
    return [Path(file) for file in path]


def _open(path: Path) -> tuple[_File, dict[str, Any]]:
    """Return the state of a file, and the types of its columns."""
    import pyarrow.parquet as pq

    with _readable(path, "the file"), pq.ParquetFile(path, memory_map=False, pre_buffer=False) as file:
        state = os.stat(path)
        metadata, schema = file.metadata, file.schema_arrow
        repeated = {name for name in schema.names if schema.names.count(name) > 1}
        if repeated:
            raise TableError(f"{path}: several columns have the name {sorted(repeated)[0]!r}")
        groups = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
        return _File(path, state.st_size, state.st_mtime_ns, groups), dict(zip(schema.names, schema.types, strict=True))


def _input_columns(
    path: Path, kinds: dict[str, Any], targets: list[str], weight: str | None, columns: Sequence[str] | None
) -> list[str]:
    """Return the columns of the inputs."""
    others = [*targets, *([] if weight is None else [weight])]
    inputs = [name for name in kinds if name not in others] if columns is None else list(columns)
    every = (*others, *inputs)
    twice = sorted({str(name) for name in every if every.count(name) > 1})
    problem = None
    if not targets:
        problem = "target=[]: expected at least one column"
    elif isinstance(columns, str):
        problem = f"columns={columns!r}: expected a list of columns; use columns=[{columns!r}]"
    elif unknown := [name for name in every if name not in kinds]:
        raise _missing(path, unknown[0], kinds)
    elif twice:
        problem = f"column {twice[0]!r} is given more than once; use it as input, target or weight"
    elif not inputs:
        problem = f"{path} has no column beside {', '.join(others)}"
    if problem is not None:
        raise SpecError(f"ParquetRows: {problem}")
    return inputs


def _missing(path: Path, name: str, kinds: dict[str, Any]) -> TableError:
    shown = ", ".join(list(kinds)[:10]) + (", …" if len(kinds) > 10 else "")
    return TableError(f"{path}: there is no column {name!r}; {did_you_mean(str(name), kinds)}there are {shown}")


def _check_type(path: Path, name: str, kind: Any) -> None:
    import pyarrow.types as types

    if not (types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)):
        raise TableError(
            f"{path}: column {name!r} has the type {kind}, expected numbers or Booleans; convert it (texts to class numbers, dates "
            "to days, decimals to floats), or select columns with columns=[…]"
        )
