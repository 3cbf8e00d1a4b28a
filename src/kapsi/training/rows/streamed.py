"""Rows of data sets and loaders of `torch.utils.data`, item by item or batch by batch."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate
from torch.utils.data.distributed import DistributedSampler

from kapsi.errors import DataError
from kapsi.training.rows.base import (
    Batch,
    ClassWeights,
    Convertible,
    Rows,
    Settings,
    batch_starts,
    fingerprint,
    mix_seed,
    part_of,
    require,
)
from kapsi.training.rows.stored import as_column, as_tensor, row_label, shuffled, split_rows

__all__ = ["DatasetRows", "IterableRows", "LoaderRows"]

SAMPLED = 8
"""First items, read for sizes and types."""

READ_AT_ONCE = 1024
"""Items collated at a time in a pass over all rows."""

T = TypeVar("T")


class _SeededDraws:
    """A context with a seeded state of torch's global generator; the previous state is restored afterwards."""

    def __init__(self, *seed: int) -> None:
        self.state = torch.Generator().manual_seed(mix_seed(*seed)).get_state()

    def __enter__(self) -> None:
        self.before = torch.get_rng_state()
        torch.set_rng_state(self.state)

    def __exit__(self, *error: object) -> None:
        self.state = torch.get_rng_state()
        torch.set_rng_state(self.before)

    def over(self, iterable: Any) -> Iterator[Any]:
        """Yield the items of an iterable, advancing it within this context only."""
        with self:
            iterator = iter(iterable)
        end = object()
        while True:
            with self:
                item = next(iterator, end)
            if item is end:
                return
            yield item


class _Parts(NamedTuple):
    """Inputs, targets and weights of several rows."""

    x: Tensor
    y: Tensor
    weight: Tensor | None

    def cut(self, begin: int, end: int) -> _Parts:
        if begin == 0 and end == len(self.y):
            return self
        weight = None if self.weight is None else self.weight[begin:end]
        x = as_column(self.x, "inputs", "fit") if self.x.layout == torch.sparse_csr else None
        return _Parts(self.x[begin:end] if x is None else x.cut(begin, end), self.y[begin:end], weight)


def _fields(item: object, source: str, where: str) -> list[object]:
    """Return the two or three fields of an item or a batch."""
    if not isinstance(item, tuple | list) or len(item) not in (2, 3):
        given = f"{type(item).__name__} of {len(item)}" if isinstance(item, tuple | list) else type(item).__name__
        raise DataError(f"{where}: expected tuples (x, y) or (x, y, weight) from {source}, got a {given}")
    return list(item)


def _collate(items: Sequence[object], source: str, where: str) -> _Parts:
    """Stack items along a leading axis of rows."""
    fields = [_fields(item, source, where) for item in items]
    require(len({len(parts) for parts in fields}) <= 1, where, _mixed_weights(source))
    columns = list(zip(*fields, strict=True))
    x, y, *weight = (_stack(c, name, source, where) for c, name in zip(columns, ("x", "y", "weight"), strict=False))
    return _Parts(x, y, weight[0] if weight else None)


def _mixed_weights(source: str) -> str:
    return f"only some rows from {source} have weights; give every row a weight, or none"


def _stack(values: Sequence[Any], name: str, source: str, where: str) -> Tensor:
    try:
        if isinstance(values[0], Tensor):
            layout = values[0].layout
            advice = "give all rows as one sparse CSR tensor or matrix"
            require(layout == torch.strided, where, f"{name} from {source} is {layout}; {advice}")
            return torch.stack(list(values)).detach()
        return as_tensor(np.asarray(values), f"values of {name}", where)
    except DataError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).split("\n")[0]
        raise DataError(f"{where}: {name} from {source} cannot be stacked in a batch ({reason})") from None


def _as_parts(batch: object, source: str, where: str) -> _Parts:
    """Return a batch of a loader as tensors."""
    parts = _fields(batch, source, where)
    columns = [
        as_column(part, name, where) for part, name in zip(parts, ("inputs", "targets", "weights"), strict=False)
    ]
    require(
        all(column.shape for column in columns),
        where,
        f"expected batches from {source}, got a single row; give it a batch_size",
    )
    x, y, *weight = tensors = [column.cut(0, len(column)) for column in columns]
    shapes = " and ".join(str(tuple(tensor.shape)) for tensor in tensors)
    require(len({len(tensor) for tensor in tensors}) == 1, where, f"{source} gave {shapes}; expected equally many rows")
    return _Parts(x, y, weight[0] if weight else None)


class _ReadRows(Rows):
    """Base of rows read from data sets and loaders.

    Args:
        first: the first rows.
        free: convertible types.
        source: source of the rows in error messages.
        described: further entries of `described`.
        where: beginning of error messages.
    """

    def __init__(self, first: _Parts, free: Convertible, source: str, described: dict[str, object], where: str) -> None:
        self.free, self.source, self.where = free, source, where
        shape, dtype = tuple(first.x.shape), first.x.dtype
        require(len(shape) > 1, where, f"{source} gives inputs of shape {shape[1:]}; expected (m,) for a row")
        require(
            free.x or dtype.is_floating_point,
            where,
            f"expected inputs of a floating-point type, got {dtype}; use x.float()",
        )
        self.classes = not first.y.is_floating_point()
        self.weighted = first.weight is not None
        self.in_features = first.x.shape[-1]
        self.target_columns = 1 if first.y.dim() < 2 else first.y.shape[1]
        self.described = {
            **described,
            "columns": self.in_features,
            "targets": self.target_columns,
            "types": [str(part.dtype).removeprefix("torch.") for part in first if part is not None],
            # Random augmentation may change the inputs of each pass.
            "checksum": fingerprint(first.y, first.weight),
        }

    def _bind(self, settings: Settings, class_weights: ClassWeights) -> None:
        if self.weighted or class_weights is not None:
            counted = 0

            def parts() -> Iterator[tuple[Tensor, Tensor | None]]:
                nonlocal counted
                for part, label in self._all():
                    y = settings.targets(part.y, self.free.y)
                    settings.check_targets(y, label)
                    self._check_weights(settings, part, label)
                    counted += len(y)
                    yield y, part.weight

            self.settings = settings.with_weights(parts(), class_weights)
            self.count = counted

    def _check_weights(self, settings: Settings, part: _Parts, label: Callable[[int], str]) -> None:
        require((part.weight is not None) == self.weighted, settings.where, _mixed_weights(self.source))
        if part.weight is not None:
            given = f"weights of shape {tuple(part.weight.shape)} for {len(part.y)} rows"
            fits = part.weight.shape == part.y.shape[:1]
            require(fits, settings.where, f"{self.source} gives {given}; expected one weight a row")
        settings.check_weights(part.weight, label)

    def _all(self) -> Iterator[tuple[_Parts, Callable[[int], str]]]:
        """Yield all rows, and functions naming them in error messages."""
        raise NotImplementedError

    def _batch(self, part: _Parts, count: int, label: Callable[[int], str]) -> Batch:
        settings = self.settings
        if settings is None:
            return Batch(*part, count)
        x, y = settings.convert(part.x, part.y, self.free, label)
        self._check_weights(settings, part, label)
        return settings.batch(x, y, settings.weights(y, part.weight), count)


# ------------------------------------------------------------------------------------------------ data sets


class DatasetRows(_ReadRows):
    """Rows of a data set with random access; draws from torch's generator depend on seed, epoch and batch only.

    Args:
        dataset: data set with items (x, y) or (x, y, weight).
        where: beginning of error messages.

    Attributes:
        rows: indices of the rows in use, None for all.
    """

    def __init__(self, dataset: Dataset[Any], *, where: str = "fit") -> None:
        self.dataset = dataset
        self.rows: Tensor | None = None
        name = type(dataset).__name__
        try:
            self.count: int = len(cast(Any, dataset))
        except (TypeError, NotImplementedError):
            raise DataError(f"{where}: the data set {name} has no length; give it a method __len__") from None
        require(self.count, where, f"the data set {name} has no rows; expected at least one row")
        with _SeededDraws(0):
            items = [dataset[number] for number in range(min(self.count, SAMPLED))]
        item = _fields(items[0], f"the data set {name}", where)
        free = Convertible(not isinstance(item[0], Tensor), not isinstance(item[1], Tensor))
        described: dict[str, object] = {"kind": "data set", "name": name, "rows": self.count}
        source = f"the data set {name}"
        super().__init__(_collate(items, source, where), free, source, described, where)

    def _items(self, indices: Tensor) -> _Parts:
        numbers = (indices if self.rows is None else self.rows[indices]).tolist()
        if not numbers:
            return self._items(torch.zeros(1, dtype=torch.int64)).cut(0, 0)
        several: Any = getattr(self.dataset, "__getitems__", None)
        items = several(numbers) if callable(several) else [self.dataset[number] for number in numbers]
        return _collate(items, self.source, self.where)

    def _label(self, indices: Tensor) -> Callable[[int], str]:
        return functools.partial(row_label, indices=indices if self.rows is None else self.rows[indices])

    def batches(
        self, size: int | None, *, seed: int, epoch: int, start: int = 0, rank: int = 0, ranks: int = 1
    ) -> Iterator[Batch]:
        starts = batch_starts(self.count, size)
        order = shuffled(self.count, mix_seed(seed, epoch))
        for number, begin in enumerate(starts[start:], start):
            end = self.count if begin == starts[-1] else begin + starts.step
            indices = order(*part_of(begin, end, rank, ranks))
            with _SeededDraws(seed, epoch, number, rank):
                part = self._items(indices)
            yield self._batch(part, end - begin, self._label(indices))

    def chunks(self, size: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        begin, end = part_of(0, self.count, rank, ranks)
        for i in range(begin, end, size):
            indices = torch.arange(i, min(i + size, end))
            with _SeededDraws(0, 0, i):
                part = self._items(indices)
            yield self._batch(part, len(indices), self._label(indices))

    def _all(self) -> Iterator[tuple[_Parts, Callable[[int], str]]]:
        for i in range(0, self.count, READ_AT_ONCE):
            indices = torch.arange(i, min(i + READ_AT_ONCE, self.count))
            with _SeededDraws(0, 0, i):
                part = self._items(indices)
            yield part, self._label(indices)

    def divide(
        self, share: float, seed: int, *, classes: bool | None = None, where: str = "fit"
    ) -> tuple[DatasetRows, DatasetRows]:
        require(self.settings is None, where, "split rows before bind: weights have mean 1 in each part")
        stratified = (self.classes if classes is None else classes) and self.target_columns == 1
        codes = torch.cat([read.y.reshape(-1) for read, _ in self._all()]).cpu().numpy() if stratified else None
        parts = []
        for indices in split_rows(codes, self.count, share, seed, where):
            part = copy.copy(self)
            part.rows, part.count = (indices if self.rows is None else self.rows[indices]), len(indices)
            part.described = {**self.described, "rows": len(indices), "checksum": fingerprint(part.rows)}
            parts.append(part)
        return parts[0], parts[1]


class IterableRows(_ReadRows):
    """Rows of an iterable data set, in its own order; each process reads all rows and takes its part of each batch.

    Args:
        dataset: data set with items (x, y) or (x, y, weight); every iteration starts a new pass.
        where: beginning of error messages.
    """

    count: int | None = None

    def __init__(self, dataset: IterableDataset[Any], *, where: str = "fit") -> None:
        self.dataset = dataset
        self.source = source = f"the data set {type(dataset).__name__}"
        items = list(itertools.islice(_SeededDraws(0).over(dataset), SAMPLED))
        require(items, where, f"{source} has no rows; expected at least one row")
        item = _fields(items[0], source, where)
        free = Convertible(not isinstance(item[0], Tensor), not isinstance(item[1], Tensor))
        described: dict[str, object] = {"kind": "stream", "name": type(dataset).__name__}
        super().__init__(_collate(items, source, where), free, source, described, where)

    def _groups(self, size: int | None, seed: int, epoch: int) -> Iterator[tuple[int, list[object]]]:
        """Yield groups of items with the number of the first item."""
        _set_epoch(self.dataset, epoch)
        waiting: list[object] = []
        begin = 0
        # With two further items the rest is no single row.
        enough = None if size is None else size + (1 if size > 1 else 0)
        for item in _SeededDraws(seed, epoch).over(self.dataset):
            waiting.append(item)
            if size is not None and enough is not None and len(waiting) > enough:
                yield begin, waiting[:size]
                waiting = waiting[size:]
                begin += size
        require(begin or waiting, self.where, f"{self.source} gave no rows in this pass; let __iter__ start a new pass")
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
                own = items[first:last]
                part = _collate(own or items[:1], self.source, self.where)
                label = functools.partial(row_label, offset=begin + first)
                yield self._batch(part if own else part.cut(0, 0), len(items), label)

    def chunks(self, size: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        for begin, items in self._groups(size, 0, 0):
            first, last = part_of(0, len(items), rank, ranks)
            for i in range(first, last, size):
                own = items[i : min(i + size, last)]
                part = _collate(own, self.source, self.where)
                yield self._batch(part, len(own), functools.partial(row_label, offset=begin + i))

    def _all(self) -> Iterator[tuple[_Parts, Callable[[int], str]]]:
        for begin, items in self._groups(READ_AT_ONCE, 0, 0):
            yield _collate(items, self.source, self.where), functools.partial(row_label, offset=begin)


def _set_epoch(thing: object, epoch: int) -> None:
    """Pass the epoch to a sampler or data set with a method `set_epoch`."""
    if callable(getattr(thing, "set_epoch", None)):
        cast(Any, thing).set_epoch(epoch)


# ------------------------------------------------------------------------------------------------ loaders


class LoaderRows(_ReadRows):
    """Rows of a loader, in its own batches and order; each process reads all batches and takes its part of each.

    Draws from torch's generator depend on seed and epoch only; the loader's own generators are seeded in each epoch by their
    initial seed and the epoch. Batches before `start` are read and dropped.

    Args:
        loader: loader with batches (x, y) or (x, y, weight).
        where: beginning of error messages.
    """

    count: int | None = None

    def __init__(self, loader: DataLoader[Any], *, where: str = "fit") -> None:
        self.loader = loader
        self.source = source = "the loader"
        inner = getattr(loader.batch_sampler, "sampler", None)
        samplers = [loader.sampler, loader.batch_sampler, inner]
        for sampler in samplers:
            divided = isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1
            advice = "leave it out: kapsi divides batches among processes"
            require(not divided, where, f"the loader has a DistributedSampler; {advice}")
        generators = [getattr(part, "generator", None) for part in (loader, *samplers)]
        self.generators = {id(g): (g, g.initial_seed()) for g in generators if isinstance(g, torch.Generator)}
        iterable = isinstance(loader.dataset, IterableDataset)
        self.sized = not iterable
        if not iterable and loader.batch_size is not None and hasattr(loader.sampler, "__len__"):
            rows = len(cast(Any, loader.sampler))
            self.count = rows - (rows % loader.batch_size if loader.drop_last else 0)
        for first in self._read(0, 0):
            described: dict[str, object] = {"kind": "loader", "name": type(loader.dataset).__name__, "rows": self.count}
            part = _as_parts(first, source, where)
            super().__init__(part, self._free(first), source, described, where)
            return
        raise DataError(f"{where}: the loader has no batches; expected at least one row")

    def _free(self, batch: Any) -> Convertible:
        """Return the convertible types: those of Python numbers and arrays, made tensors by the loader."""
        free = Convertible(*(not isinstance(part, Tensor) for part in batch[:2]))
        dataset: Any = self.loader.dataset
        if self.sized and self.loader.collate_fn is default_collate:
            with contextlib.suppress(LookupError, TypeError), _SeededDraws(0):
                item = dataset[0]
                return Convertible(*(not isinstance(part, Tensor) for part in item[:2]))
        return free

    def _read(self, seed: int, epoch: int) -> Iterator[Any]:
        for generator, own in self.generators.values():
            generator.manual_seed(mix_seed(own, epoch))
        for thing in (self.loader.sampler, self.loader.batch_sampler, self.loader.dataset):
            _set_epoch(thing, epoch)
        return _SeededDraws(seed, epoch).over(self.loader)

    def length(self, size: int | None) -> int | None:
        return len(self.loader) if self.sized else None

    def _parts(self, seed: int, epoch: int, start: int = 0) -> Iterator[tuple[_Parts, Callable[[int], str]]]:
        empty = True
        for number, batch in enumerate(self._read(seed, epoch)):
            empty = False
            if number >= start:
                yield _as_parts(batch, self.source, self.where), functools.partial(_in_batch, batch=number)
        require(not empty, self.where, f"{self.source} gave no rows in this pass; let __iter__ start a new pass")

    def batches(
        self, size: int | None, *, seed: int, epoch: int, start: int = 0, rank: int = 0, ranks: int = 1
    ) -> Iterator[Batch]:
        for part, label in self._parts(seed, epoch, start):
            first, last = part_of(0, len(part.y), rank, ranks)
            yield self._batch(part.cut(first, last), len(part.y), _shifted(label, first))

    def chunks(self, size: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        for part, label in self._parts(0, 0):
            first, last = part_of(0, len(part.y), rank, ranks)
            for i in range(first, last, size):
                end = min(i + size, last)
                yield self._batch(part.cut(i, end), end - i, _shifted(label, i))

    def _all(self) -> Iterator[tuple[_Parts, Callable[[int], str]]]:
        return self._parts(0, 0)


def _in_batch(row: int, batch: int) -> str:
    return f"row {row:,} of batch {batch:,} (counted from 0)"


def _shifted(label: Callable[[int], str], offset: int) -> Callable[[int], str]:
    return lambda row: label(row + offset)
