"""Rows that can be had in any order: tensors, arrays, sparse matrices, memory maps."""

from __future__ import annotations

import collections
import copy
import functools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kapsi.data.tabular import split
from kapsi.errors import SpecError, TableError
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

__all__ = ["StoredRows", "column_of", "held_out", "numbered", "shuffled", "tensor_of"]

PERMUTED_AT_ONCE = 2**24
"""Rows whose order is written down, 128 MiB; that of more rows is computed where it is needed."""

ORDERED_AT_ONCE = 2**16
SCANNED_AT_ONCE = 2**18

ROUNDS = 6
"""Rounds of the Feistel network: four are enough for a permutation that looks random, two more cost little."""


# ------------------------------------------------------------------------------------------------ orders


def shuffled(count: int, seed: int) -> Callable[[int, int], Tensor]:
    """Return a function that gives the places from one to another of a permutation of so many rows.

    Example:
        >>> order = shuffled(5, seed=0)
        >>> sorted(order(0, 5).tolist()), torch.equal(order(2, 4), order(0, 5)[2:4])
        ([0, 1, 2, 3, 4], True)
    """
    if count <= PERMUTED_AT_ONCE:
        whole = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        return lambda begin, end: whole[begin:end]
    network = _Feistel(count, seed)
    kept: dict[int, Tensor] = {}  # the block at hand: one call for many batches

    def places(begin: int, end: int) -> Tensor:
        parts = []
        for number in range(begin // ORDERED_AT_ONCE, max(begin, end - 1) // ORDERED_AT_ONCE + 1):
            first = number * ORDERED_AT_ONCE
            if number not in kept:
                if len(kept) > 1:
                    kept.pop(next(iter(kept)))
                kept[number] = torch.from_numpy(network(first, min(count, first + ORDERED_AT_ONCE)))
            parts.append(kept[number][max(begin - first, 0) : max(end - first, 0)])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return places


class _Feistel:
    """A permutation of 0 … count − 1 that is computed place by place, in no memory.

    A Feistel network permutes the numbers of so many bits, at most twice as many as there are rows; a number that is no row
    is permuted again until it is one.
    """

    def __init__(self, count: int, seed: int) -> None:
        bits = max(2, (count - 1).bit_length())
        self.count = count
        self.sizes = bits // 2, bits - bits // 2  # of the upper and the lower half
        self.keys = np.random.SeedSequence(seed).generate_state(ROUNDS, np.uint64)

    def __call__(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        numbers = self._once(np.arange(begin, end, dtype=np.uint64))
        while len(outside := np.flatnonzero(numbers >= self.count)):
            numbers[outside] = self._once(numbers[outside])
        return numbers.astype(np.int64)

    def _once(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        upper, lower = self.sizes
        left, right = numbers >> np.uint64(lower), numbers & np.uint64(2**lower - 1)
        for key in self.keys:
            # The finalizer of splitmix64: each bit of the result depends on each of the half.
            hashed = (right + key) * np.uint64(0x9E3779B97F4A7C15)
            hashed = (hashed ^ (hashed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            hashed = (hashed ^ (hashed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((hashed ^ (hashed >> np.uint64(31))) & np.uint64(2**upper - 1))
            upper, lower = lower, upper
        return (left << np.uint64(lower)) | right


# ------------------------------------------------------------------------------------------------ columns


class _Column(ABC):
    """Inputs, targets or weights, row by row."""

    shape: tuple[int, ...]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def take(self, places: Tensor) -> Tensor:
        """Return the rows at these places."""

    @abstractmethod
    def cut(self, begin: int, end: int) -> Tensor:
        """Return the rows from `begin` to `end`."""


class _Dense(_Column):
    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.shape = tensor, tuple(tensor.shape)

    def __len__(self) -> int:
        return len(self.tensor)

    def take(self, places: Tensor) -> Tensor:
        return self.tensor.index_select(0, places.to(self.tensor.device))

    def cut(self, begin: int, end: int) -> Tensor:
        return self.tensor if begin == 0 and end == len(self.tensor) else self.tensor[begin:end]


class _Csr(_Column):
    """Rows of a `torch.sparse_csr` tensor, which torch itself cannot take by number."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.shape = tensor, tuple(tensor.shape)
        self.starts, self.indices, self.values = tensor.crow_indices(), tensor.col_indices(), tensor.values()
        self.lengths = self.starts[1:] - self.starts[:-1]

    def __len__(self) -> int:
        return self.tensor.shape[0]

    def take(self, places: Tensor) -> Tensor:
        places = places.to(self.starts.device)
        lengths = self.lengths.index_select(0, places)
        starts = self.starts.new_zeros(len(places) + 1)
        torch.cumsum(lengths, 0, out=starts[1:])
        moved = self.starts.index_select(0, places) - starts[:-1]
        entries = int(starts[-1])
        wanted = torch.repeat_interleave(moved, lengths, output_size=entries)
        wanted += torch.arange(entries, dtype=wanted.dtype, device=wanted.device)
        return self._made(starts, self.indices.index_select(0, wanted), self.values.index_select(0, wanted))

    def cut(self, begin: int, end: int) -> Tensor:
        if begin == 0 and end == len(self):
            return self.tensor
        first, last = (int(place) for place in self.starts[[begin, end]])
        return self._made(self.starts[begin : end + 1] - first, self.indices[first:last], self.values[first:last])

    def _made(self, starts: Tensor, indices: Tensor, values: Tensor) -> Tensor:
        shape = (len(starts) - 1, self.tensor.shape[1])
        return torch.sparse_csr_tensor(starts, indices, values, shape, check_invariants=False)


class _Mapped(_Column):
    """A NumPy memory map: rows are read when they are asked for."""

    def __init__(self, array: npt.NDArray[Any], what: str, where: str) -> None:
        self.array, self.what, self.where = array, what, where
        self.shape = tuple(array.shape)

    def __len__(self) -> int:
        return len(self.array)

    def take(self, places: Tensor) -> Tensor:
        return tensor_of(np.asarray(self.array[places.cpu().numpy()]), self.what, self.where)

    def cut(self, begin: int, end: int) -> Tensor:
        return tensor_of(np.array(self.array[begin:end]), self.what, self.where)


def is_mapped(array: npt.NDArray[Any]) -> bool:
    """Return whether an array is, or is a view of, a memory map."""
    base: object = array
    while isinstance(base, np.ndarray):
        if isinstance(base, np.memmap):
            return True
        base = base.base
    return False


def tensor_of(array: npt.NDArray[Any], what: str, where: str) -> Tensor:
    """Return an array of numbers as a tensor, without a copy where that can be.

    Raises:
        SpecError: it is no array of numbers.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise SpecError(f"{where}: the {what} are a masked array; fill in what is masked, with .filled(…)")
    if array.dtype.kind not in "biuf":
        raise SpecError(f"{where}: expected {what} that are numbers, got an array of {array.dtype}; use .astype(float)")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        if array.dtype.itemsize == 8 and len(array) and array.max() > np.iinfo(np.int64).max:
            raise SpecError(
                f"{where}: the {what} have whole numbers above {np.iinfo(np.int64).max}; use .astype(float)"
            )
        array = array.astype(np.int64)
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of arrays that are not writable: nothing is written to them
        return torch.from_numpy(array)


# ------------------------------------------------------------------------------------------------ rows


class StoredRows(Rows):
    """Inputs, targets and weights in tensors or memory maps.

    Args:
        x: inputs, `(rows, ...)`.
        y: targets, `(rows,)` or `(rows, k)`.
        weight: `(rows,)`, or None.
        where: begins the messages of errors.

    Raises:
        SpecError: something is not what it should be.
    """

    count: int

    def __init__(self, x: object, y: object, weight: object = None, *, where: str = "fit") -> None:
        self.free = Free(not isinstance(x, Tensor), not isinstance(y, Tensor))
        self.x, self.y = column_of(x, "inputs", where), column_of(y, "targets", where)
        self.weight = None if weight is None else column_of(weight, "weights", where)
        self.sparse = isinstance(self.x, _Csr)
        self.rows: Tensor | None = None  # the numbers of those that count, where not all do
        self.in_memory = not any(isinstance(column, _Mapped) for column in self._columns())
        if len(self.x.shape) < 2 or self.x.shape[0] == 0:
            raise SpecError(f"{where}: expected inputs of shape (rows, m) with at least one row, got {self.x.shape}")
        count = self.count = self.x.shape[0]
        if self.y.shape[:1] != (count,):
            raise SpecError(f"{where}: {count:,} rows of inputs and {self.y.shape} of targets")
        if self.weight is not None and self.weight.shape != (count,):
            given = f"{count:,} rows of inputs and {self.weight.shape} of weights"
            raise SpecError(f"{where}: {given}; expected one weight a row, of shape (rows,)")
        first = self.x.cut(0, 1)
        if not self.free.x and not first.is_floating_point():
            raise SpecError(f"{where}: expected inputs of a floating-point type, got {first.dtype}; use x.float()")
        self.classes = not (self.y.cut(0, 1).is_floating_point() or self.y.cut(0, 1).is_complex())
        self.in_features = self.x.shape[-1]
        self.target_columns = 1 if len(self.y.shape) < 2 else self.y.shape[1]
        self._describe(count)

    def _columns(self) -> list[_Column]:
        return [self.x, self.y, *([] if self.weight is None else [self.weight])]

    def _describe(self, count: int) -> None:
        self.count = count
        beginning = [self._own(column, 0, min(count, FINGERPRINTED)) for column in self._columns()]
        self.described = {
            "kind": "table in memory" if self.in_memory else "memory map",
            "rows": count,
            "columns": self.in_features,
            "targets": self.target_columns,
            "types": [str(part.dtype).removeprefix("torch.") for part in beginning],
            "checksum": fingerprint(*beginning),
        }

    def _own(self, column: _Column, begin: int, end: int) -> Tensor:
        """Return what a column has for rows in their own order."""
        return column.cut(begin, end) if self.rows is None else column.take(self.rows[begin:end])

    # -------------------------------------------------------------------------------------------- checks

    def _settled(self, settings: Settings, class_weights: ClassWeights) -> None:
        weighted = self.weight is not None or class_weights is not None
        if not self.in_memory:
            targets = self._checked_targets(settings)
            if weighted:
                self.settings = settings.weighed(targets, class_weights)
            else:
                collections.deque(targets, maxlen=0)
            return
        x, y, weight = (None if c is None else c.cut(0, len(c)) for c in (self.x, self.y, self.weight))
        x, y = settings.checked(cast(Tensor, x), cast(Tensor, y), self.free, numbered)
        settings.check_weights(weight, numbered)
        if weighted:
            weight = settings.weighed([(y, weight)], class_weights).weights(y, weight)
            # Equal weights are none.
            self.weight = None if weight is None or bool((weight == weight[0]).all()) else _Dense(weight)
        self.x, self.y = _wrapped(x), _Dense(y)

    def _checked_targets(self, settings: Settings) -> Iterator[tuple[Tensor, Tensor | None]]:
        for i in range(0, self.count, SCANNED_AT_ONCE):
            named = functools.partial(numbered, places=self.rows, offset=i)
            end = min(i + SCANNED_AT_ONCE, self.count)
            y = settings.targets(self._own(self.y, i, end), self.free.y)
            settings.check_targets(y, named)
            weight = None if self.weight is None else self._own(self.weight, i, end)
            settings.check_weights(weight, named)
            yield y, weight

    # -------------------------------------------------------------------------------------------- batches

    def batches(
        self, size: int | None, *, seed: int, epoch: int, start: int = 0, rank: int = 0, ranks: int = 1
    ) -> Iterator[Batch]:
        count = self.count
        starts = sized(count, size)
        if len(starts) <= 1:  # all rows in each step: no order is better than another
            if start == 0 and count:
                begin, end = part_of(0, count, rank, ranks)
                yield self._cut(begin, end, count)
            return
        order = shuffled(count, mixed(seed, epoch))
        if self.in_memory:
            order = _moved(order, self.y.cut(0, 1).device)
        for begin in starts[start:]:
            end = count if begin == starts[-1] else begin + starts.step
            if ranks == 1:
                yield self._take(order(begin, end), end - begin)
            else:
                yield self._take(order(*part_of(begin, end, rank, ranks)), end - begin)

    def chunks(self, size: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        begin, end = part_of(0, self.count, rank, ranks)
        for i in range(begin, end, size):
            yield self._cut(i, min(i + size, end), min(size, end - i))

    def _take(self, places: Tensor, count: int) -> Batch:
        if self.rows is not None:
            places = self.rows[places]
        weight = None if self.weight is None else self.weight.take(places)
        return self._made(self.x.take(places), self.y.take(places), weight, count, places, 0)

    def _cut(self, begin: int, end: int, count: int) -> Batch:
        weight = None if self.weight is None else self._own(self.weight, begin, end)
        places = None if self.rows is None else self.rows[begin:end]
        return self._made(self._own(self.x, begin, end), self._own(self.y, begin, end), weight, count, places, begin)

    def _made(
        self, x: Tensor, y: Tensor, weight: Tensor | None, count: int, places: Tensor | None, offset: int
    ) -> Batch:
        settings = self.settings
        if settings is None:
            return Batch(x, y, weight, count)
        if not self.in_memory:
            x, y = settings.checked(x, y, self.free, functools.partial(numbered, places=places, offset=offset))
            weight = settings.weights(y, weight)
        return settings.batch(x, y, weight, count)

    # -------------------------------------------------------------------------------------------- parts

    def divide(
        self, share: float, seed: int, *, classes: bool | None = None, where: str = "fit"
    ) -> tuple[StoredRows, StoredRows]:
        if self.settings is not None:
            raise SpecError(
                f"{where}: rows are divided before they are settled, so that weights have mean one in each part"
            )
        spread = (self.classes if classes is None else classes) and len(self.y.shape) == 1
        codes = self._own(self.y, 0, self.count).cpu().numpy() if spread else None
        kept, held = held_out(codes, self.count, share, seed, where)
        return self._part(kept), self._part(held)

    def _part(self, places: Tensor) -> StoredRows:
        made = copy.copy(self)
        if self.in_memory:
            made.x, made.y = _wrapped(self.x.take(places)), _Dense(self.y.take(places))
            made.weight = None if self.weight is None else _Dense(self.weight.take(places))
        else:
            made.rows = places if self.rows is None else self.rows[places]
        made._describe(len(places))
        return made


def _moved(order: Callable[[int, int], Tensor], device: torch.device) -> Callable[[int, int], Tensor]:
    """Return an order on another device, moved in large parts."""
    if device.type == "cpu":
        return order
    kept: dict[int, Tensor] = {}

    def places(begin: int, end: int) -> Tensor:
        first = begin // ORDERED_AT_ONCE * ORDERED_AT_ONCE
        if first not in kept or end > first + len(kept[first]):
            kept.clear()
            kept[first] = order(first, max(end, first + ORDERED_AT_ONCE)).to(device)
        return kept[first][begin - first : end - first]

    return places


def numbered(row: int, places: Tensor | None = None, offset: int = 0) -> str:
    """Return what a row is called in messages."""
    number = row + offset if places is None else int(places[row])
    return f"row {number:,} (counted from 0)"


def held_out(codes: npt.NDArray[Any] | None, count: int, share: float, seed: int, where: str) -> tuple[Tensor, Tensor]:
    """Return the numbers of the rows to train on, and of a share of them to validate on.

    Args:
        codes: the class of each row, where each class gives its share.
        count: of rows.
        share: above 0 and below 1.
        seed: of the draw.
        where: begins the messages of errors.

    Raises:
        SpecError: the share is out of range, or the rows are too few.
    """
    # Where each class has a single row, there is nothing to spread.
    spread = codes is not None and len(np.unique(codes)) < count
    y = codes if codes is not None and spread else np.broadcast_to(np.zeros(1), (count,))
    try:
        kept, held = split(y, share, classes=spread, seed=seed)
    except TableError as error:
        raise SpecError(f"{where}: {error}") from None
    return torch.from_numpy(kept), torch.from_numpy(held)


def _wrapped(tensor: Tensor) -> _Column:
    return _Csr(tensor) if tensor.layout == torch.sparse_csr else _Dense(tensor)


def column_of(values: object, what: str, where: str) -> _Column:
    """Return what a user gave as a column, checked as far as one can without the others.

    Raises:
        SpecError: it is of a kind that is not taken.
    """
    if isinstance(values, Tensor):
        if values.is_meta:
            raise SpecError(f"{where}: the {what} are on the meta device and have no values")
        if values.is_inference() and not torch.is_inference_mode_enabled():
            values = values.clone()  # what was made in inference mode cannot be differentiated through
        if values.layout == torch.sparse_csr and what == "inputs":
            if values.dim() != 2:
                raise SpecError(f"{where}: expected sparse inputs of shape (rows, m), got {tuple(values.shape)}")
            parts = values.crow_indices(), values.col_indices(), values.values()
            return _Csr(_sparse(*parts, tuple(values.shape), where).detach())
        if values.layout != torch.strided:
            also = "; torch.sparse_csr is taken too" if what == "inputs" else ""
            raise SpecError(
                f"{where}: expected dense {what}, got {values.layout}; use to_dense(), some rows at a time{also}"
            )
        return _Dense(values.detach())
    if hasattr(values, "tocsr"):
        if what != "inputs":
            raise SpecError(f"{where}: expected dense {what}, got a sparse matrix; use .toarray()")
        return _Csr(_of_scipy(values, where))
    if isinstance(values, np.ndarray):
        return _Mapped(values, what, where) if is_mapped(values) else _Dense(tensor_of(values, what, where))
    hint = "use .to_numpy()" if hasattr(values, "to_numpy") else "use torch.tensor(…) or np.asarray(…)"
    raise SpecError(f"{where}: the {what} are of type {type(values).__name__}, expected a tensor or an array; {hint}")


def _of_scipy(matrix: Any, where: str) -> Tensor:
    if len(matrix.shape) != 2:
        raise SpecError(f"{where}: expected inputs of shape (rows, m), got a sparse array of shape {matrix.shape}")
    found = matrix.tocsr()
    if not found.has_canonical_format:
        found = found.copy() if found is matrix else found  # what the user has stays as it is
        found.sum_duplicates()
    starts, indices = found.indptr, found.indices
    if starts.dtype != indices.dtype:
        starts, indices = starts.astype(np.int64), indices.astype(np.int64)
    starts, indices, values = (tensor_of(part, "inputs", where) for part in (starts, indices, found.data))
    return _sparse(starts, indices, values, found.shape, where)


def _sparse(starts: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, ...], where: str) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that sparse CSR is a beta, said once
        try:
            return torch.sparse_csr_tensor(starts, indices, values, shape, check_invariants=True)
        except (RuntimeError, ValueError) as error:
            reason = str(error).split("\n")[0]
            raise SpecError(f"{where}: the inputs are no valid sparse CSR tensor ({reason})") from None
