"""Rows that come from a program, item by item or batch by batch: data sets and loaders of `torch.utils.data`."""

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

from kapsi.errors import DataError, SpecError
from kapsi.training.rows.base import Batch, ClassWeights, Free, Rows, Settings, fingerprint, mixed, part_of, sized
from kapsi.training.rows.stored import column_of, held_out, numbered, shuffled, tensor_of

__all__ = ["DatasetRows", "IterableRows", "LoaderRows"]

LOOKED_AT = 8
"""Items at the beginning that sizes and types are taken from."""

READ_AT_ONCE = 1024
"""Items that are put together at a time where all of them are looked at."""

T = TypeVar("T")


class _Draws:
    """What is drawn from torch's own generator while rows are made: from a seed, and the generator is put back after it."""

    def __init__(self, *seed: int) -> None:
        self.state = torch.Generator().manual_seed(mixed(*seed)).get_state()

    def __enter__(self) -> None:
        self.before = torch.get_rng_state()
        torch.set_rng_state(self.state)

    def __exit__(self, *error: object) -> None:
        self.state = torch.get_rng_state()
        torch.set_rng_state(self.before)

    def over(self, iterable: Any) -> Iterator[Any]:
        """Yield from an iterable that is moved on within this context only."""
        with self:
            moving = iter(iterable)
        ended = object()
        while True:
            with self:
                item = next(moving, ended)
            if item is ended:
                return
            yield item


class _Parts(NamedTuple):
    """Inputs, targets and weights of some rows."""

    x: Tensor
    y: Tensor
    weight: Tensor | None

    def cut(self, begin: int, end: int) -> _Parts:
        if begin == 0 and end == len(self.y):
            return self
        weight = None if self.weight is None else self.weight[begin:end]
        x = column_of(self.x, "inputs", "fit") if self.x.layout == torch.sparse_csr else None
        return _Parts(self.x[begin:end] if x is None else x.cut(begin, end), self.y[begin:end], weight)


def _fields(item: object, what: str, where: str) -> list[object]:
    """Return the two or three parts of an item or a batch."""
    if not isinstance(item, tuple | list) or len(item) not in (2, 3):
        given = f"{type(item).__name__} of {len(item)}" if isinstance(item, tuple | list) else type(item).__name__
        raise SpecError(
            f"{where}: expected (x, y) or (x, y, weight) from {what}, got a {given}; let it return such a tuple"
        )
    return list(item)


def _together(items: Sequence[object], what: str, where: str) -> _Parts:
    """Return items as tensors with a leading axis of rows."""
    fields = [_fields(item, what, where) for item in items]
    if len({len(each) for each in fields}) > 1:
        raise SpecError(f"{where}: some rows from {what} have weights and some have none; give one to each")
    columns = list(zip(*fields, strict=True))
    made = [_stacked(column, name, what, where) for column, name in zip(columns, ("x", "y", "weight"), strict=False)]
    return _Parts(made[0], made[1], made[2] if len(made) > 2 else None)


def _stacked(values: Sequence[Any], name: str, what: str, where: str) -> Tensor:
    try:
        if isinstance(values[0], Tensor):
            if values[0].layout != torch.strided:
                raise SpecError(
                    f"{where}: {name} from {what} is {values[0].layout}; give all rows as one sparse CSR tensor or matrix"
                )
            return torch.stack(list(values)).detach()
        return tensor_of(np.asarray(values), f"values of {name}", where)
    except (SpecError, DataError):
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).split("\n")[0]
        raise SpecError(f"{where}: {name} from {what} cannot be put together in a batch ({reason})") from None


def _whole(batch: object, what: str, where: str) -> _Parts:
    """Return a batch that is one already."""
    parts = _fields(batch, what, where)
    columns = [
        column_of(part, name, where) for part, name in zip(parts, ("inputs", "targets", "weights"), strict=False)
    ]
    if not all(column.shape for column in columns):
        raise SpecError(f"{where}: expected batches from {what}, got a single row; give it a batch_size")
    made = [column.cut(0, len(column)) for column in columns]
    if len({len(part) for part in made}) > 1:
        raise SpecError(
            f"{where}: {what} gave {' and '.join(str(tuple(part.shape)) for part in made)}; as many rows in each"
        )
    return _Parts(made[0], made[1], made[2] if len(made) > 2 else None)


class _Produced(Rows):
    """What rows made by a program have in common.

    Args:
        first: some of the rows.
        free: which types may be changed.
        what: what they come from, in words.
        described: further entries of `described`.
        where: begins the messages of errors.
    """

    def __init__(self, first: _Parts, free: Free, what: str, described: dict[str, object], where: str) -> None:
        self.free, self.what, self.where = free, what, where
        if first.x.dim() < 2:
            raise SpecError(
                f"{where}: {what} gives inputs of shape {tuple(first.x.shape[1:])}; expected (m,) for a row"
            )
        if not free.x and not first.x.is_floating_point():
            raise SpecError(f"{where}: expected inputs of a floating-point type, got {first.x.dtype}; use x.float()")
        self.classes = not first.y.is_floating_point()
        self.weighted = first.weight is not None
        self.in_features = first.x.shape[-1]
        self.target_columns = 1 if first.y.dim() < 2 else first.y.shape[1]
        self.described = {
            **described,
            "columns": self.in_features,
            "targets": self.target_columns,
            "types": [str(part.dtype).removeprefix("torch.") for part in first if part is not None],
            # Inputs may be different in each pass: what makes them may do so by chance.
            "checksum": fingerprint(first.y, first.weight),
        }

    def _settled(self, settings: Settings, class_weights: ClassWeights) -> None:
        if self.weighted or class_weights is not None:
            counted = 0

            def parts() -> Iterator[tuple[Tensor, Tensor | None]]:
                nonlocal counted
                for part, named in self._all():
                    y = settings.targets(part.y, self.free.y)
                    settings.check_targets(y, named)
                    self._check_weights(settings, part, named)
                    counted += len(y)
                    yield y, part.weight

            self.settings = settings.weighed(parts(), class_weights)
            self.count = counted

    def _check_weights(self, settings: Settings, part: _Parts, named: Callable[[int], str]) -> None:
        if (part.weight is not None) != self.weighted:
            raise SpecError(
                f"{settings.where}: some rows from {self.what} have weights and some have none; give one to each"
            )
        if part.weight is not None and part.weight.shape != part.y.shape[:1]:
            given = f"weights of shape {tuple(part.weight.shape)} for {len(part.y)} rows"
            raise SpecError(f"{settings.where}: {self.what} gives {given}; expected one weight a row")
        settings.check_weights(part.weight, named)

    def _all(self) -> Iterator[tuple[_Parts, Callable[[int], str]]]:
        """Yield all rows, and what they are called."""
        raise NotImplementedError

    def _made(self, part: _Parts, count: int, named: Callable[[int], str]) -> Batch:
        settings = self.settings
        if settings is None:
            return Batch(*part, count)
        x, y = settings.checked(part.x, part.y, self.free, named)
        self._check_weights(settings, part, named)
        return settings.batch(x, y, settings.weights(y, part.weight), count)


# ------------------------------------------------------------------------------------------------ data sets


class DatasetRows(_Produced):
    """A data set whose rows have numbers. What it draws from torch's generator is fixed by seed, epoch and batch.

    Args:
        dataset: gives (x, y) or (x, y, weight) for a number.
        where: begins the messages of errors.
    """

    def __init__(self, dataset: Dataset[Any], *, where: str = "fit") -> None:
        self.dataset, self.rows = dataset, None
        name = type(dataset).__name__
        try:
            self.count: int = len(cast(Any, dataset))
        except (TypeError, NotImplementedError):
            raise SpecError(f"{where}: the data set {name} has no length; give it a method __len__") from None
        if not self.count:
            raise SpecError(f"{where}: the data set {name} has no rows; expected at least one row")
        with _Draws(0):
            items = [dataset[number] for number in range(min(self.count, LOOKED_AT))]
        item = _fields(items[0], f"the data set {name}", where)
        free = Free(not isinstance(item[0], Tensor), not isinstance(item[1], Tensor))
        described: dict[str, object] = {"kind": "data set", "name": name, "rows": self.count}
        what = f"the data set {name}"
        super().__init__(_together(items, what, where), free, what, described, where)

    rows: Tensor | None
    """Numbers of the rows that count, where not all do."""

    def _items(self, places: Tensor) -> _Parts:
        numbers = (places if self.rows is None else self.rows[places]).tolist()
        if not numbers:
            return self._items(torch.zeros(1, dtype=torch.int64)).cut(0, 0)
        several: Any = getattr(self.dataset, "__getitems__", None)
        items = several(numbers) if callable(several) else [self.dataset[number] for number in numbers]
        return _together(items, self.what, self.where)

    def _named(self, places: Tensor) -> Callable[[int], str]:
        return functools.partial(numbered, places=places if self.rows is None else self.rows[places])

    def batches(
        self, size: int | None, *, seed: int, epoch: int, start: int = 0, rank: int = 0, ranks: int = 1
    ) -> Iterator[Batch]:
        starts = sized(self.count, size)
        order = shuffled(self.count, mixed(seed, epoch))
        for number, begin in enumerate(starts[start:], start):
            end = self.count if begin == starts[-1] else begin + starts.step
            places = order(*part_of(begin, end, rank, ranks))
            with _Draws(seed, epoch, number, rank):
                part = self._items(places)
            yield self._made(part, end - begin, self._named(places))

    def chunks(self, size: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        begin, end = part_of(0, self.count, rank, ranks)
        for i in range(begin, end, size):
            places = torch.arange(i, min(i + size, end))
            with _Draws(0, 0, i):
                part = self._items(places)
            yield self._made(part, len(places), self._named(places))

    def _all(self) -> Iterator[tuple[_Parts, Callable[[int], str]]]:
        for i in range(0, self.count, READ_AT_ONCE):
            places = torch.arange(i, min(i + READ_AT_ONCE, self.count))
            with _Draws(0, 0, i):
                part = self._items(places)
            yield part, self._named(places)

    def divide(
        self, share: float, seed: int, *, classes: bool | None = None, where: str = "fit"
    ) -> tuple[DatasetRows, DatasetRows]:
        if self.settings is not None:
            raise SpecError(
                f"{where}: rows are divided before they are settled, so that weights have mean one in each part"
            )
        spread = (self.classes if classes is None else classes) and self.target_columns == 1
        codes = torch.cat([part.y.reshape(-1) for part, _ in self._all()]).cpu().numpy() if spread else None
        parts = []
        for places in held_out(codes, self.count, share, seed, where):
            made = copy.copy(self)
            made.rows, made.count = (places if self.rows is None else self.rows[places]), len(places)
            made.described = {**self.described, "rows": len(places), "checksum": fingerprint(made.rows)}
            parts.append(made)
        return parts[0], parts[1]


class IterableRows(_Produced):
    """A data set that gives its rows one after another, in its own order; each process reads all and takes its part of a batch.

    Args:
        dataset: gives (x, y) or (x, y, weight), and begins anew for each pass.
        where: begins the messages of errors.
    """

    count: int | None = None

    def __init__(self, dataset: IterableDataset[Any], *, where: str = "fit") -> None:
        self.dataset = dataset
        self.what = what = f"the data set {type(dataset).__name__}"
        items = list(itertools.islice(_Draws(0).over(dataset), LOOKED_AT))
        if not items:
            raise SpecError(f"{where}: {what} has no rows; expected at least one row")
        item = _fields(items[0], what, where)
        free = Free(not isinstance(item[0], Tensor), not isinstance(item[1], Tensor))
        described: dict[str, object] = {"kind": "stream", "name": type(dataset).__name__}
        super().__init__(_together(items, what, where), free, what, described, where)

    def _groups(self, size: int | None, seed: int, epoch: int) -> Iterator[tuple[int, list[object]]]:
        """Yield where a group of items begins, and the items."""
        _set_epoch(self.dataset, epoch)
        waiting: list[object] = []
        begin = 0
        # With two more at hand, what remains is no single row.
        enough = None if size is None else size + (1 if size > 1 else 0)
        for item in _Draws(seed, epoch).over(self.dataset):
            waiting.append(item)
            if size is not None and enough is not None and len(waiting) > enough:
                yield begin, waiting[:size]
                waiting = waiting[size:]
                begin += size
        if not begin and not waiting:
            raise SpecError(
                f"{self.where}: {self.what} gave no rows in this pass; let its __iter__ begin anew each time"
            )
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
                part = _together(own or items[:1], self.what, self.where)
                named = functools.partial(numbered, offset=begin + first)
                yield self._made(part if own else part.cut(0, 0), len(items), named)

    def chunks(self, size: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        for begin, items in self._groups(size, 0, 0):
            first, last = part_of(0, len(items), rank, ranks)
            for i in range(first, last, size):
                own = items[i : min(i + size, last)]
                part = _together(own, self.what, self.where)
                yield self._made(part, len(own), functools.partial(numbered, offset=begin + i))

    def _all(self) -> Iterator[tuple[_Parts, Callable[[int], str]]]:
        for begin, items in self._groups(READ_AT_ONCE, 0, 0):
            yield _together(items, self.what, self.where), functools.partial(numbered, offset=begin)


def _set_epoch(thing: object, epoch: int) -> None:
    """Say the epoch to what has a method for it, by the convention of samplers."""
    if callable(getattr(thing, "set_epoch", None)):
        cast(Any, thing).set_epoch(epoch)


# ------------------------------------------------------------------------------------------------ loaders


class LoaderRows(_Produced):
    """The batches of a loader as they are, in the order of its sampler; each process reads all and takes its part of each.

    What the loader draws from torch's generator is fixed by seed and epoch; generators of its own begin each epoch with what
    they were seeded with and the epoch. Batches before `start` are read and dropped.

    Args:
        loader: gives (x, y) or (x, y, weight) in batches.
        where: begins the messages of errors.
    """

    count: int | None = None

    def __init__(self, loader: DataLoader[Any], *, where: str = "fit") -> None:
        self.loader = loader
        self.what = what = "the loader"
        inner = getattr(loader.batch_sampler, "sampler", None)
        samplers = [loader.sampler, loader.batch_sampler, inner]
        for sampler in samplers:
            if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
                raise SpecError(
                    f"{where}: the loader has a DistributedSampler, but batches are divided among processes here; leave it out"
                )
        generators = [getattr(each, "generator", None) for each in (loader, *samplers)]
        self.generators = {id(g): (g, g.initial_seed()) for g in generators if isinstance(g, torch.Generator)}
        iterable = isinstance(loader.dataset, IterableDataset)
        self.sized = not iterable
        if not iterable and loader.batch_size is not None and hasattr(loader.sampler, "__len__"):
            rows = len(cast(Any, loader.sampler))
            self.count = rows - (rows % loader.batch_size if loader.drop_last else 0)
        for first in self._read(0, 0):
            described: dict[str, object] = {"kind": "loader", "name": type(loader.dataset).__name__, "rows": self.count}
            part = _whole(first, what, where)
            super().__init__(part, self._free(first), what, described, where)
            return
        raise SpecError(f"{where}: the loader has no batches; expected at least one row")

    def _free(self, batch: Any) -> Free:
        """Return which types may be changed: those of numbers and arrays that the loader itself made tensors of."""
        free = Free(*(not isinstance(part, Tensor) for part in batch[:2]))
        dataset: Any = self.loader.dataset
        if self.sized and self.loader.collate_fn is default_collate:
            with contextlib.suppress(LookupError, TypeError), _Draws(0):
                item = dataset[0]
                return Free(*(not isinstance(part, Tensor) for part in item[:2]))
        return free

    def _read(self, seed: int, epoch: int) -> Iterator[Any]:
        for generator, own in self.generators.values():
            generator.manual_seed(mixed(own, epoch))
        for thing in (self.loader.sampler, self.loader.batch_sampler, self.loader.dataset):
            _set_epoch(thing, epoch)
        return _Draws(seed, epoch).over(self.loader)

    def length(self, size: int | None) -> int | None:
        return len(self.loader) if self.sized else None

    def _parts(self, seed: int, epoch: int, start: int = 0) -> Iterator[tuple[_Parts, Callable[[int], str]]]:
        empty = True
        for number, batch in enumerate(self._read(seed, epoch)):
            empty = False
            if number >= start:
                yield _whole(batch, self.what, self.where), functools.partial(_in_batch, batch=number)
        if empty:
            raise SpecError(f"{self.where}: {self.what} gave no rows in this pass; let it begin anew each time")

    def batches(
        self, size: int | None, *, seed: int, epoch: int, start: int = 0, rank: int = 0, ranks: int = 1
    ) -> Iterator[Batch]:
        for part, named in self._parts(seed, epoch, start):
            first, last = part_of(0, len(part.y), rank, ranks)
            yield self._made(part.cut(first, last), len(part.y), _shifted(named, first))

    def chunks(self, size: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        for part, named in self._parts(0, 0):
            first, last = part_of(0, len(part.y), rank, ranks)
            for i in range(first, last, size):
                end = min(i + size, last)
                yield self._made(part.cut(i, end), end - i, _shifted(named, i))

    def _all(self) -> Iterator[tuple[_Parts, Callable[[int], str]]]:
        return self._parts(0, 0)


def _in_batch(row: int, batch: int) -> str:
    return f"row {row:,} of batch {batch:,} (counted from 0)"


def _shifted(named: Callable[[int], str], offset: int) -> Callable[[int], str]:
    return lambda row: named(row + offset)
