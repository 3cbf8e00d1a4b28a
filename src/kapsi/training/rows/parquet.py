"""Tables in Parquet files larger than memory: row groups in shuffled order, rows shuffled within a buffer."""

from __future__ import annotations

import collections
import functools
import operator
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kapsi.arrays import as_tensor
from kapsi.errors import SpecError, TableError, did_you_mean, refuse
from kapsi.training.rows.base import (
    FINGERPRINTED,
    Batch,
    Parts,
    RowLabel,
    Rows,
    batch_starts,
    fingerprint,
    mix_seed,
    part_of,
)

SUFFIXES = (".parquet", ".pq")

BUFFER_BYTES = 2**27
"""Size of the shuffle buffer, in the type of the model: 128 MiB."""

PIECE_NUMBERS = 2**19
"""Number of values decoded at a time: 8,192 rows of 64 columns, which fit into the cache for the transposition."""

READ_BYTES = 2**16
"""Bytes read at once of each column; without a bound pyarrow reads whole row groups, however large."""

KEPT_FOOTERS = 8
"""Footers of files in memory: reading the footer of a large file takes milliseconds."""


class _File(NamedTuple):
    """A file when first opened: size in bytes, time of the last change in nanoseconds, rows of each row group."""

    path: Path
    size: int
    changed: int
    groups: tuple[int, ...]


class _Span(NamedTuple):
    """Rows `begin` to `end` of a row group."""

    file: int
    group: int
    begin: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.begin


class _Cursor:
    """The position of the reader, so that a row group larger than the buffer is read once.

    Attributes:
        group: indices of the file and of its row group, None at first.
        record: rows `begin` to `end` of the group.
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
        """Read the rest of the group; the reader checks the file for changes at the end."""
        collections.deque(self.records, maxlen=0)
        self.group, self.record = None, None


class ParquetRows(Rows):
    """A table in Parquet files of any size, read through a buffer of 128 MiB.

    Row groups are read in an order fixed by seed and epoch. Rows of all groups in the buffer are shuffled together, so groups
    much smaller than the buffer mix best; a larger group is shuffled part by part. Shuffle files sorted by the target once
    before training.

    Integer and Boolean targets are class labels, others are real values. Nulls, strings and dates are refused.

    Each of several processes reads the table and uses its part of each batch.

    Args:
        path: a file, a folder (all `.parquet` and `.pq` files in the folder and below, by name), or a list of files.
        target: column of the targets, or a list of several columns.
        weight: column of row weights.
        columns: columns of the inputs, in this order; None for all but target and weight.

    Raises:
        TableError: a missing or unreadable file, or a column missing or of an unsupported type.
        SpecError: an invalid path, or invalid columns.

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
        import pyarrow.types as types

        self._footers: dict[int, Any] = {}
        paths = _paths(path)
        name = str(path) if isinstance(path, str | os.PathLike) else f"{len(paths)} files"
        self.targets, self.weight = [target] if isinstance(target, str) else list(target), weight
        self.files: list[_File] = []
        kinds: dict[str, Any] = {}
        for file in paths:
            opened, file_kinds = _open(file)
            if not self.files:
                kinds = file_kinds
                self.columns = _inputs(file, file_kinds, self.targets, weight, columns)
            self.files.append(opened)
            _check_columns(file, file_kinds, self._names(), kinds, paths[0])
        self.count = sum(sum(file.groups) for file in self.files)
        if not self.count:
            raise TableError(f"{name}: the table has no rows; expected at least one row")
        # Several columns are real values, of whatever type.
        classes = len(self.targets) == 1 and not types.is_floating(kinds[self.targets[0]])
        self.classes = classes
        self._describe(
            Parts(*next(iter(self.chunks(FINGERPRINTED)))[:3]),
            "ParquetRows",
            kind="Parquet table",
            rows=self.count,
            types=[str(kinds[column]) for column in self._names()],
            names=self._names(),
            groups=fingerprint(torch.tensor([n for file in self.files for n in file.groups])),
        )
        self.classes = classes

    def _names(self) -> list[str]:
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
                    spans.append(_Span(file, group, first, last))
                number += rows
        return spans

    def _parts(
        self, spans: Sequence[_Span], cursor: _Cursor | None = None, *, inputs: bool = True
    ) -> Iterator[tuple[Parts, RowLabel]]:
        """Yield the rows of some spans and their names in pieces, from a cursor on."""
        cursor = _Cursor() if cursor is None else cursor
        names = self._names() if inputs else self._names()[len(self.columns) :]
        rows = max(1024, min(65_536, PIECE_NUMBERS // max(1, len(names))))
        for span in spans:
            file = self.files[span.file]
            if cursor.group != (span.file, span.group) or cursor.begin > span.begin:
                cursor.open(span, self._records(span, names, rows))
            begin = span.begin
            while begin < span.end:
                if begin >= cursor.end:
                    if not cursor.advance():
                        self._changed(span.file, f"row group {span.group} has {cursor.end:,} rows now")
                    continue
                end = min(span.end, cursor.end)
                piece = cursor.record.slice(begin - cursor.begin, end - begin)
                name = functools.partial(_row_name, path=file.path, group=span.group, offset=begin)
                yield self._piece(piece, file.path, span.group, begin, inputs), name
                begin = end
            if begin == file.groups[span.group]:
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
                # One thread: several threads hold the buffers of all columns at the same time, for little speed.
                yield from file.iter_batches(rows, row_groups=[span.group], columns=names, use_threads=False)
            self._check_unchanged(os.stat(path), span.file)
        pa.default_memory_pool().release_unused()  # returns memory to the system before the next group

    def _check_unchanged(self, state: os.stat_result, number: int) -> None:
        file = self.files[number]
        if (state.st_size, state.st_mtime_ns) != (file.size, file.changed):
            self._changed(number, "size or time differ")

    def _changed(self, number: int, change: str) -> NoReturn:
        raise TableError(
            f"{self.files[number].path}: the file has changed since it was opened ({change}); start again, and leave the file "
            "unchanged during training"
        )

    def _piece(self, record: Any, path: Path, group: int, begin: int, inputs: bool) -> Parts:
        columns = dict(zip(record.schema.names, record.columns, strict=True))
        for name, column in columns.items():
            if column.null_count:
                row = int(np.flatnonzero(np.asarray(column.is_null()))[0])
                raise TableError(
                    f"{path}: column {name!r} has a null in row group {group}, row {begin + row:,} of it (counted from 0); "
                    "fill nulls in, or leave such rows or columns out"
                )
        x = np.empty((len(self.columns) if inputs else 0, record.num_rows), dtype=self._dtype())
        with np.errstate(over="ignore"):  # infinities are refused later
            for i, name in enumerate(self.columns if inputs else []):
                x[i] = columns[name].to_numpy(zero_copy_only=False)
        y = [columns[name].to_numpy(zero_copy_only=False) for name in self.targets]
        target = as_tensor(y[0] if len(y) == 1 else np.stack(y, 1), "targets", f"{path}: column {self.targets[0]!r}")
        weight = None
        if self.weight is not None:
            weight = torch.from_numpy(columns[self.weight].to_numpy(zero_copy_only=False).astype(np.float64))
        return Parts(torch.from_numpy(x.T), target.long() if self.classes else target, weight)

    def _dtype(self) -> npt.DTypeLike:
        """Return the type of inputs taken from the file, float32 for bfloat16, unknown to NumPy."""
        dtype = torch.get_default_dtype() if self.binding is None else self.binding.input_dtype(torch.float64)
        return {torch.float64: np.float64, torch.float16: np.float16}.get(dtype, np.float32)

    def _targets(self) -> Iterator[tuple[Tensor, Tensor | None, RowLabel]]:
        for parts, name in self._parts(self._spans(0, self.count), inputs=False):
            yield parts.y, parts.weight, name

    # -------------------------------------------------------------------------------------------- batches

    def _buffers(self, seed: int, epoch: int) -> Iterator[list[_Span]]:
        """Yield the contents of the buffer: row groups in shuffled order, whole unless larger than the buffer."""
        width = self.in_features + self.target_columns + 1
        size = 4 if self.binding is None else self.binding.input_dtype(torch.float64).itemsize
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
                filled.append(_Span(span.file, span.group, begin, end))
                held += end - begin
                if held >= room:
                    yield filled
                    filled, held = [], 0
        if filled:
            yield filled

    def _filled(self, spans: list[_Span], buffer: list[Tensor | None], cursor: _Cursor) -> Parts:
        """Read some spans into a reused buffer and return the filled part."""
        rows = sum(span.rows for span in spans)
        begin = 0
        for piece, name in self._parts(spans, cursor):
            for i, part in enumerate(self._checked(piece, name)):
                tensor = buffer[i]
                if part is None:
                    continue
                if begin == 0 and (tensor is None or len(tensor) < rows):
                    buffer[i] = tensor = None  # free the old buffer first
                    buffer[i] = tensor = part.new_empty((rows, *part.shape[1:]))
                cast(Tensor, tensor)[begin : begin + len(part)] = part
            begin += len(piece.y)
        return Parts(*cast(Any, [None if tensor is None else tensor[:rows] for tensor in buffer]))

    def batches(
        self, size: int | None, *, seed: int, epoch: int, start: int = 0, rank: int = 0, ranks: int = 1
    ) -> Iterator[Batch]:
        bounds = [*batch_starts(self.count, size)[start:], self.count]
        if len(bounds) < 2:
            return
        number = 0  # the current batch
        waiting: list[Parts] = []  # rows of the batch from earlier buffers
        buffer: list[Tensor | None] = [None, None, None]
        cursor = _Cursor()
        first = 0
        for index, spans in enumerate(self._buffers(seed, epoch)):
            last = first + sum(span.rows for span in spans)
            if last > bounds[0]:  # rows before the start are not even read
                rows = self._filled(spans, buffer, cursor)
                seeds = torch.Generator().manual_seed(mix_seed(seed, epoch, index))
                order = torch.randperm(last - first, generator=seeds)
                while number < len(bounds) - 1 and bounds[number] < last:
                    begin, end = part_of(bounds[number], bounds[number + 1], rank, ranks)
                    begin, end = max(begin, first), min(end, last)
                    complete = bounds[number + 1] <= last
                    if begin < end or complete:
                        indices = order[max(begin - first, 0) : max(end - first, 0)]
                        waiting.append(rows.map(functools.partial(torch.index_select, dim=0, index=indices)))
                    if not complete:
                        break
                    yield self._merged(waiting, bounds[number + 1] - bounds[number])
                    waiting = []
                    number += 1
                del rows  # frees the old buffer before a larger one is made
            first = last

    def chunks(self, size: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        waiting: list[Parts] = []
        held = 0
        for piece, name in self._parts(self._spans(*part_of(0, self.count, rank, ranks))):
            parts, rows = self._checked(piece, name), len(piece.y)
            begin = 0
            while begin < rows:
                end = min(begin + size - held, rows)
                waiting.append(parts.map(operator.itemgetter(slice(begin, end))))
                begin, held = end, held + end - begin
                if held == size:
                    yield self._merged(waiting, held)
                    waiting, held = [], 0
        if held:
            yield self._merged(waiting, held)

    def _merged(self, parts: list[Parts], count: int) -> Batch:
        first = parts[0]
        if len(parts) > 1:
            weights = [part.weight for part in parts if part.weight is not None]
            weight = torch.cat(weights) if weights else None
            first = Parts(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]), weight)
        return self._batch(first._replace(x=first.x.contiguous()), count)


def _row_name(row: int, path: Path, group: int, offset: int) -> str:
    return f"row {row + offset:,} of row group {group} of {path} (counted from 0)"


# ------------------------------------------------------------------------------------------------ files


@contextmanager
def _readable(path: Path, part: str) -> Iterator[None]:
    """Convert a failure to read a part of a file into a `TableError`."""
    import pyarrow as pa

    try:
        yield
    except FileNotFoundError:
        raise TableError(f"{path}: there is no such file; check the path") from None
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise TableError(
            f"{path}: {part} cannot be read as Parquet ({reason}); the file may be cut or damaged"
        ) from None


def _paths(path: object) -> list[Path]:
    """Return the files of an argument."""
    if isinstance(path, str | os.PathLike):
        folder = Path(path)
        if not folder.is_dir():
            return [folder]
        below = (file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        # By convention, names beginning with a dot or an underscore are temporary or not data.
        files = sorted(file for file in below if not file.name.startswith((".", "_")))
        if not files:
            raise TableError(f"{folder}: the folder has no files ending in {' or '.join(SUFFIXES)}")
        return files
    if not isinstance(path, list | tuple) or not path or not all(isinstance(file, str | os.PathLike) for file in path):
        refuse("ParquetRows", "a file, a folder, or a list of files", path)
    return [Path(file) for file in path]


def _open(path: Path) -> tuple[_File, dict[str, Any]]:
    """Return the description of a file, and the types of its columns."""
    import pyarrow.parquet as pq

    with _readable(path, "the file"), pq.ParquetFile(path, memory_map=False, pre_buffer=False) as file:
        state = os.stat(path)
        metadata, schema = file.metadata, file.schema_arrow
        repeated = sorted(name for name, count in collections.Counter(schema.names).items() if count > 1)
        if repeated:
            raise TableError(f"{path}: several columns have the name {repeated[0]!r}; rename them")
        groups = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
        return _File(path, state.st_size, state.st_mtime_ns, groups), dict(zip(schema.names, schema.types, strict=True))


def _inputs(
    path: Path, kinds: dict[str, Any], targets: list[str], weight: str | None, columns: Sequence[str] | None
) -> list[str]:
    """Return the columns of the inputs."""
    others = [*targets, *([] if weight is None else [weight])]
    inputs = [name for name in kinds if name not in others] if columns is None else list(columns)
    repeated = sorted(name for name, count in collections.Counter([*others, *inputs]).items() if count > 1)
    if not targets:
        problem = "(target=[]): expected at least one column"
    elif isinstance(columns, str):
        problem = f"(columns={columns!r}): expected a list of columns; use columns=[{columns!r}]"
    elif repeated:
        problem = f": column {repeated[0]!r} is given more than once; a column is input, target or weight"
    elif not inputs:
        problem = f": {path} has no column besides {', '.join(others)}; there is nothing to learn from"
    else:
        return inputs
    raise SpecError(f"ParquetRows{problem}")


def _check_columns(
    path: Path, kinds: dict[str, Any], names: list[str], first: dict[str, Any], first_path: Path
) -> None:
    """Raise a `TableError` for a missing column, or a type unsupported or different from the first file."""
    import pyarrow.types as types

    for name in names:
        kind = kinds.get(name)
        if kind is None:
            listed = ", ".join(list(kinds)[:10]) + (", …" if len(kinds) > 10 else "")
            problem = f"there is no column {name!r}; {did_you_mean(str(name), kinds)}there are {listed}"
        elif kind != first[name]:
            problem = f"column {name!r} is {kind}, but {first[name]} in {first_path}; give all files the same types"
        elif not (types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)):
            problem = (
                f"column {name!r} has the type {kind}, expected numbers or Booleans; convert strings to integer class labels, "
                "dates to days, decimals to floats, or name the columns to be used with columns=[…]"
            )
        else:
            continue
        raise TableError(f"{path}: {problem}")
