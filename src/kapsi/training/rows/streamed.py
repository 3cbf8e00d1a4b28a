"""Rows produced by data sets and loaders of `torch.utils.data`, item by item or batch by batch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Self, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from kapsi.arrays import as_tensor
from kapsi.errors import DataError
from kapsi.training.rows.base import (
    Batch,
    Parts,
    RowLabel,
    Rows,
    batch_parts,
    fingerprint,
    mix_seed,
    part_of,
    reject,
    row_label,
)
from kapsi.training.rows.stored import as_column, cut, reject_several, shuffled

SAMPLED = 8
"""First items, which define sizes and types."""

READ_AT_ONCE = 1024
"""Items stacked at once in passes over all rows."""

MIXED_WEIGHTS = "only some rows from {} have weights; give every row a weight, or none"
NO_ROWS = "gave no rows in this pass; let __iter__ start a new pass each time"


class _Seeded:
    """Context with a given seed of torch's global generator; the previous state is restored afterwards."""

    def __init__(self, *seed: int) -> None:
        self.state = torch.Generator().manual_seed(mix_seed(*seed)).get_state()

    def __enter__(self) -> None:
        self.before = torch.get_rng_state()
        torch.set_rng_state(self.state)

    def __exit__(self, *error: object) -> None:
        self.state = torch.get_rng_state()
        torch.set_rng_state(self.before)

    def over(self, iterable: Any) -> Iterator[Any]:
        """Yield from an iterable, advanced within this context only."""
        with self:
            iterator = iter(iterable)
        end = object()
        while True:
            with self:
                item = next(iterator, end)
            if item is end:
                return
            yield item


class _UserRows(Rows):
    """Rows produced by user code (data set, iterable or loader).

    Args:
        source: name of the source in messages.
        where: prefix of error messages.
    """

    def __init__(self, source: str, where: str) -> None:
        self.source, self.where = source, where

    def _start(self, first: Parts, **described: object) -> None:
        """Set sizes, types and description from the first rows."""
        if first.x.dim() < 2:
            self._fail(f"{self.source} gives inputs of shape {tuple(first.x.shape[1:])}; expected (m,) per row")
        # Without the inputs: random transforms may change x in each pass.
        self._describe(first, self.where, **described, checksum=fingerprint(first.y, first.weight))

    def _fail(self, problem: str) -> NoReturn:
        reject(self.where, problem)

    def _pieces(self) -> Iterator[tuple[Parts, RowLabel]]:
        """Yield all rows and their names, piece by piece."""
        raise NotImplementedError

    def _targets(self) -> Iterator[tuple[Tensor, Tensor | None, RowLabel]]:
        for parts, name in self._pieces():
            yield parts.y, self._weight(parts), name

    def _weight(self, parts: Parts) -> Tensor | None:
        if (parts.weight is not None) != self.weighted:
            self._fail(MIXED_WEIGHTS.format(self.source))
        return parts.weight

    def _produce(self, parts: Parts, count: int, name: RowLabel) -> Batch:
        if self.binding is not None:
            self._weight(parts)
        return self._batch(self._checked(parts, name), count)

    # -------------------------------------------------------------------------------------------- items and batches

    def _fields(self, item: object) -> list[Any]:
        """Return the two or three fields of an item or a batch."""
        if not isinstance(item, tuple | list) or len(item) not in (2, 3):
            kind = type(item).__name__ + (f" of {len(item)}" if isinstance(item, tuple | list) else "")
            self._fail(f"expected tuples (x, y) or (x, y, weight) from {self.source}, got a {kind}")
        return list(item)

    def _stack(self, items: Sequence[object]) -> Parts:
        """Return items as tensors with a leading axis of rows."""
        fields = [self._fields(item) for item in items]
        if len({len(parts) for parts in fields}) > 1:
            self._fail(MIXED_WEIGHTS.format(self.source))
        columns = [*zip(*fields, strict=True)]
        return _parts([self._column(column, kind) for column, kind in zip(columns, ("x", "y", "weight"), strict=False)])

    def _column(self, values: Sequence[Any], kind: str) -> Tensor:
        reject_several(values[0], f"{kind} of an item", self.where)
        layout = values[0].layout if isinstance(values[0], Tensor) else torch.strided
        if layout != torch.strided:
            self._fail(f"{kind} from {self.source} is {layout}; give all rows as one sparse CSR tensor or matrix")
        try:
            if isinstance(values[0], Tensor):
                return torch.stack(list(values)).detach()
            return as_tensor(np.asarray(values), f"values of {kind}", self.where)
        except DataError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            reason = str(error).split("\n")[0]
            self._fail(f"{kind} from {self.source} cannot be stacked in a batch ({reason})")

    def _whole(self, batch: object) -> Parts:
        """Return a batch of the source as tensors."""
        fields, kinds = self._fields(batch), ("inputs", "targets", "weights")
        columns = [as_column(field, kind, self.where) for field, kind in zip(fields, kinds, strict=False)]
        if not all(column.shape for column in columns):
            self._fail(f"expected batches from {self.source}, got a single row; give it a batch_size")
        if len({len(column) for column in columns}) > 1:
            shapes = " and ".join(str(column.shape) for column in columns)
            self._fail(f"{self.source} gave {shapes}; expected equally many rows")
        return _parts([column.cut(0, len(column)) for column in columns])


def _parts(columns: Sequence[Tensor]) -> Parts:
    return Parts(columns[0], columns[1], columns[2] if len(columns) > 2 else None)


def _cut(parts: Parts, begin: int, end: int) -> Parts:
    return parts.map(lambda tensor: cut(tensor, begin, end))


# ------------------------------------------------------------------------------------------------ data sets


class DatasetRows(_UserRows):
    """A data set with rows by index; random transforms draw from torch's generator, seeded by seed, epoch and batch.

    Args:
        dataset: returns (x, y) or (x, y, weight) for an index.
        where: prefix of error messages.
    """

    count: int
    divisible = True

    def __init__(self, dataset: Dataset[Any], *, where: str = "fit") -> None:
        self.dataset, name = dataset, type(dataset).__name__
        super().__init__(f"the data set {name}", where)
        try:
            self.count = len(cast(Any, dataset))
        except (TypeError, NotImplementedError):
            self._fail(f"{self.source} has no length; give it a method __len__")
        if not self.count:
            self._fail(f"{self.source} has no rows; expected at least one row")
        with _Seeded(0):
            items = [dataset[number] for number in range(min(self.count, SAMPLED))]
        self._start(self._stack(items), kind="data set", name=name, rows=self.count)

    def _items(self, indices: Tensor) -> Parts:
        numbers = self._numbers(indices).tolist()
        if not numbers:
            return _cut(self._items(torch.zeros(1, dtype=torch.int64)), 0, 0)
        several: Any = getattr(self.dataset, "__getitems__", None)
        return self._stack(several(numbers) if callable(several) else [self.dataset[number] for number in numbers])

    def _numbers(self, indices: Tensor) -> Tensor:
        return indices if self.indices is None else self.indices[indices]

    def _read(self, indices: Tensor, *seed: int) -> tuple[Parts, RowLabel]:
        with _Seeded(*seed):
            parts = self._items(indices)
        return parts, functools.partial(row_label, indices=self._numbers(indices))

    def batches(
        self, size: int | None, *, seed: int, epoch: int, start: int = 0, rank: int = 0, ranks: int = 1
    ) -> Iterator[Batch]:
        order = shuffled(self.count, mix_seed(seed, epoch))
        for number, count, part in batch_parts(self.count, size, start, rank, ranks):
            parts, name = self._read(order(*part), seed, epoch, number, rank)
            yield self._produce(parts, count, name)

    def chunks(self, size: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        for parts, name in self._pieces(size, *part_of(0, self.count, rank, ranks)):
            yield self._produce(parts, len(parts.y), name)

    def _pieces(
        self, size: int = READ_AT_ONCE, begin: int = 0, end: int | None = None
    ) -> Iterator[tuple[Parts, RowLabel]]:
        end = self.count if end is None else end
        for i in range(begin, end, size):
            yield self._read(torch.arange(i, min(i + size, end)), 0, 0, i)

    def _select(self, indices: Tensor) -> Self:
        part = super()._select(indices)
        part.described = {**self.described, "rows": len(indices), "checksum": fingerprint(part.indices)}
        return part


class IterableRows(_UserRows):
    """A data set of rows in a fixed order; each process reads all rows and uses a part of each batch.

    Args:
        dataset: yields (x, y) or (x, y, weight), and starts again for each pass.
        where: prefix of error messages.
    """

    count: int | None = None

    def __init__(self, dataset: IterableDataset[Any], *, where: str = "fit") -> None:
        self.dataset, name = dataset, type(dataset).__name__
        super().__init__(f"the data set {name}", where)
        items = list(itertools.islice(_Seeded(0).over(dataset), SAMPLED))
        if not items:
            self._fail(f"{self.source} has no rows; expected at least one row")
        self._start(self._stack(items), kind="stream", name=name)

    def _groups(self, size: int | None, seed: int, epoch: int) -> Iterator[tuple[int, list[object]]]:
        """Yield groups of items, each with the number of the first item."""
        _set_epoch(self.dataset, epoch)
        waiting: list[object] = []
        begin = 0
        for item in _Seeded(seed, epoch).over(self.dataset):
            waiting.append(item)
            # Hold two more items back: the last group must not be a single row.
            if size is not None and len(waiting) > size + (size > 1):
                yield begin, waiting[:size]
                waiting = waiting[size:]
                begin += size
        if not begin and not waiting:
            self._fail(f"{self.source} {NO_ROWS}")
        if size == 1:
            yield from ((begin + i, [item]) for i, item in enumerate(waiting))
        else:
            yield begin, waiting

    def batches(
        self, size: int | None, *, seed: int, epoch: int, start: int = 0, rank: int = 0, ranks: int = 1
    ) -> Iterator[Batch]:
        for number, (begin, items) in enumerate(self._groups(size, seed, epoch)):
            if number >= start:
                first, last = part_of(0, len(items), rank, ranks)
                part = items[first:last]
                parts = self._stack(part or items[:1])
                name = functools.partial(row_label, offset=begin + first)
                yield self._produce(parts if part else _cut(parts, 0, 0), len(items), name)

    def chunks(self, size: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        for begin, items in self._groups(size, 0, 0):
            first, last = part_of(0, len(items), rank, ranks)
            for i in range(first, last, size):
                parts = self._stack(items[i : min(i + size, last)])
                yield self._produce(parts, len(parts.y), functools.partial(row_label, offset=begin + i))

    def _pieces(self) -> Iterator[tuple[Parts, RowLabel]]:
        for begin, items in self._groups(READ_AT_ONCE, 0, 0):
            yield self._stack(items), functools.partial(row_label, offset=begin)


def _set_epoch(target: object, epoch: int) -> None:
    """Call `set_epoch` if there is a method, by the convention of samplers."""
    if callable(getattr(target, "set_epoch", None)):
        cast(Any, target).set_epoch(epoch)


# ------------------------------------------------------------------------------------------------ loaders


class LoaderRows(_UserRows):
    """The batches of a loader in the order of its sampler; each process reads all batches and uses a part of each.

    Draws of the loader from torch's generator are fixed by seed and epoch. Generators of the loader itself begin each epoch
    with a seed derived from their initial seed and the epoch. Batches before `start` are read and dropped.

    Args:
        loader: yields batches (x, y) or (x, y, weight).
        where: prefix of error messages.
    """

    count: int | None = None

    def __init__(self, loader: DataLoader[Any], *, where: str = "fit") -> None:
        super().__init__("the loader", where)
        self.loader = loader
        samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
        if any(isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1 for sampler in samplers):
            self._fail(
                "the loader has a DistributedSampler, but batches are divided among processes here; leave it out"
            )
        generators = [getattr(part, "generator", None) for part in (loader, *samplers)]
        self.generators = {id(g): (g, g.initial_seed()) for g in generators if isinstance(g, torch.Generator)}
        self.sized = not isinstance(loader.dataset, IterableDataset)
        if self.sized and loader.batch_size is not None and hasattr(loader.sampler, "__len__"):
            rows = len(cast(Any, loader.sampler))
            self.count = rows - (rows % loader.batch_size if loader.drop_last else 0)
        first = next(self._read(0, 0), None)
        if first is None:
            self._fail("the loader has no batches; expected at least one row")
        parts, name = self._whole(first), type(loader.dataset).__name__
        self._start(parts, kind="loader", name=name, rows=self.count)

    def _read(self, seed: int, epoch: int) -> Iterator[Any]:
        for generator, initial in self.generators.values():
            generator.manual_seed(mix_seed(initial, epoch))
        for target in (self.loader.sampler, self.loader.batch_sampler, self.loader.dataset):
            _set_epoch(target, epoch)
        return _Seeded(seed, epoch).over(self.loader)

    def length(self, size: int | None) -> int | None:
        return len(self.loader) if self.sized else None

    def _numbered(self, seed: int = 0, epoch: int = 0, start: int = 0) -> Iterator[tuple[int, Parts]]:
        empty = True
        for number, batch in enumerate(self._read(seed, epoch)):
            empty = False
            if number >= start:
                yield number, self._whole(batch)
        if empty:
            self._fail(f"{self.source} {NO_ROWS}")

    def batches(
        self, size: int | None, *, seed: int, epoch: int, start: int = 0, rank: int = 0, ranks: int = 1
    ) -> Iterator[Batch]:
        for number, parts in self._numbered(seed, epoch, start):
            first, last = part_of(0, len(parts.y), rank, ranks)
            name = functools.partial(_name_in_batch, batch=number, offset=first)
            yield self._produce(_cut(parts, first, last), len(parts.y), name)

    def chunks(self, size: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        for number, parts in self._numbered():
            first, last = part_of(0, len(parts.y), rank, ranks)
            for i in range(first, last, size):
                end = min(i + size, last)
                name = functools.partial(_name_in_batch, batch=number, offset=i)
                yield self._produce(_cut(parts, i, end), end - i, name)

    def _pieces(self) -> Iterator[tuple[Parts, RowLabel]]:
        for number, parts in self._numbered():
            yield parts, functools.partial(_name_in_batch, batch=number)


def _name_in_batch(row: int, batch: int, offset: int = 0) -> str:
    return f"row {row + offset:,} of batch {batch:,} (counted from 0)"
