"""Rows with random access: tensors, arrays, sparse matrices, memory maps."""

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
from kapsi.errors import DataError, TableError, refuse
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
    require,
)

__all__ = ["StoredRows", "as_column", "as_tensor", "row_label", "shuffled", "split_rows"]

PERMUTED_AT_ONCE = 2**24
"""Most rows with a stored permutation (128 MiB); longer permutations are computed on demand."""

ORDERED_AT_ONCE = 2**16
SCANNED_AT_ONCE = 2**18

ROUNDS = 6
"""Rounds of the Feistel network: four give pseudo-random permutations, two more cost little."""


# ------------------------------------------------------------------------------------------------ orders


def shuffled(count: int, seed: int) -> Callable[[int, int], Tensor]:
    """Return a random permutation of `count` rows as a function of a range of positions.

    Example:
        >>> order = shuffled(5, seed=0)
        >>> sorted(order(0, 5).tolist()), torch.equal(order(2, 4), order(0, 5)[2:4])
        ([0, 1, 2, 3, 4], True)
    """
    if count <= PERMUTED_AT_ONCE:
        whole = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        return lambda begin, end: whole[begin:end]
    network = _Feistel(count, seed)
    kept: dict[int, Tensor] = {}  # the last blocks, for many batches

    def indices(begin: int, end: int) -> Tensor:
        parts = []
        for number in range(begin // ORDERED_AT_ONCE, max(begin, end - 1) // ORDERED_AT_ONCE + 1):
            first = number * ORDERED_AT_ONCE
            if number not in kept:
                if len(kept) > 1:
                    kept.pop(next(iter(kept)))
                kept[number] = torch.from_numpy(network(first, min(count, first + ORDERED_AT_ONCE)))
            parts.append(kept[number][max(begin - first, 0) : max(end - first, 0)])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return indices


class _Feistel:
    """A permutation of 0 … count − 1, computed for any range of positions without memory.

    A Feistel network permutes the numbers of ⌈log₂ count⌉ bits; results beyond count − 1 are permuted again.
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
    """Inputs, targets or weights with random access to rows."""

    shape: tuple[int, ...]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def take(self, indices: Tensor) -> Tensor:
        """Return the rows at the indices."""

    @abstractmethod
    def cut(self, begin: int, end: int) -> Tensor:
        """Return the rows from `begin` to `end`."""


class _Dense(_Column):
    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.shape = tensor, tuple(tensor.shape)

    def __len__(self) -> int:
        return len(self.tensor)

    def take(self, indices: Tensor) -> Tensor:
        return self.tensor.index_select(0, indices.to(self.tensor.device))

    def cut(self, begin: int, end: int) -> Tensor:
        return self.tensor if begin == 0 and end == len(self.tensor) else self.tensor[begin:end]


class _Csr(_Column):
    """Rows of a `torch.sparse_csr` tensor; torch has no `index_select` for them."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.shape = tensor, tuple(tensor.shape)
        self.starts, self.columns, self.values = tensor.crow_indices(), tensor.col_indices(), tensor.values()
        self.lengths = self.starts[1:] - self.starts[:-1]

    def __len__(self) -> int:
        return self.tensor.shape[0]

    def take(self, indices: Tensor) -> Tensor:
        indices = indices.to(self.starts.device)
        lengths = self.lengths.index_select(0, indices)
        starts = self.starts.new_zeros(len(indices) + 1)
        torch.cumsum(lengths, 0, out=starts[1:])
        offsets = self.starts.index_select(0, indices) - starts[:-1]
        entries = int(starts[-1])
        chosen = torch.repeat_interleave(offsets, lengths, output_size=entries)
        chosen += torch.arange(entries, dtype=chosen.dtype, device=chosen.device)
        return self._csr(starts, self.columns.index_select(0, chosen), self.values.index_select(0, chosen))

    def cut(self, begin: int, end: int) -> Tensor:
        if begin == 0 and end == len(self):
            return self.tensor
        first, last = (int(start) for start in self.starts[[begin, end]])
        return self._csr(self.starts[begin : end + 1] - first, self.columns[first:last], self.values[first:last])

    def _csr(self, starts: Tensor, columns: Tensor, values: Tensor) -> Tensor:
        shape = (len(starts) - 1, self.tensor.shape[1])
        return torch.sparse_csr_tensor(starts, columns, values, shape, check_invariants=False)


class _Mapped(_Column):
    """A NumPy memory map: rows are read on demand."""

    def __init__(self, array: npt.NDArray[Any], name: str, where: str) -> None:
        self.array, self.name, self.where = array, name, where
        self.shape = tuple(array.shape)

    def __len__(self) -> int:
        return len(self.array)

    def take(self, indices: Tensor) -> Tensor:
        return as_tensor(np.asarray(self.array[indices.cpu().numpy()]), self.name, self.where)

    def cut(self, begin: int, end: int) -> Tensor:
        return as_tensor(np.array(self.array[begin:end]), self.name, self.where)


def is_mapped(array: npt.NDArray[Any]) -> bool:
    """Return whether an array is, or is a view of, a memory map."""
    base: object = array
    while isinstance(base, np.ndarray):
        if isinstance(base, np.memmap):
            return True
        base = base.base
    return False


def as_tensor(array: npt.NDArray[Any], name: str, where: str) -> Tensor:
    """Return an array of numbers as a tensor, without a copy if possible.

    Args:
        array: array of numbers.
        name: name of the array in error messages, such as `inputs`.
        where: beginning of error messages.

    Raises:
        DataError: the array has other values than numbers.
    """
    require(
        not isinstance(array, np.ma.MaskedArray),
        where,
        f"the {name} are a masked array; fill masked values with .filled(…)",
    )
    require(
        array.dtype.kind in "biuf",
        where,
        f"expected numbers as {name}, got an array of {array.dtype}; use .astype(float)",
    )
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        largest = np.iinfo(np.int64).max
        fits = array.dtype.itemsize < 8 or not len(array) or array.max() <= largest
        require(fits, where, f"the {name} have integers above {largest}; use .astype(float)")
        array = array.astype(np.int64)
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # read-only arrays: nothing writes to the tensor
        return torch.from_numpy(array)


# ------------------------------------------------------------------------------------------------ rows


class StoredRows(Rows):
    """Inputs, targets and weights in tensors or memory maps.

    Args:
        x: inputs, `(rows, ...)`.
        y: targets, `(rows,)` or `(rows, k)`.
        weight: `(rows,)`, or None.
        where: beginning of error messages.

    Raises:
        DataError: wrong kinds, types or shapes.
    """

    count: int

    def __init__(self, x: object, y: object, weight: object = None, *, where: str = "fit") -> None:
        self.free = Convertible(not isinstance(x, Tensor), not isinstance(y, Tensor))
        self.x, self.y = as_column(x, "inputs", where), as_column(y, "targets", where)
        self.weight = None if weight is None else as_column(weight, "weights", where)
        self.sparse = isinstance(self.x, _Csr)
        self.rows: Tensor | None = None  # indices of the rows in use, None for all
        self.in_memory = not any(isinstance(column, _Mapped) for column in self._columns())
        shape, count = self.x.shape, self.x.shape[0] if self.x.shape else 0
        require(
            len(shape) > 1 and count, where, f"expected inputs of shape (rows, m) with at least one row, got {shape}"
        )
        require(self.y.shape[:1] == (count,), where, f"{count:,} rows of inputs and {self.y.shape} of targets")
        if self.weight is not None and self.weight.shape != (count,):
            given = f"{count:,} rows of inputs and {self.weight.shape} of weights"
            raise DataError(f"{where}: {given}; expected one weight a row, of shape (rows,)")
        first = self.x.cut(0, 1)
        require(
            self.free.x or first.is_floating_point(),
            where,
            f"expected inputs of a floating-point type, got {first.dtype}; use x.float()",
        )
        self.classes = not (self.y.cut(0, 1).is_floating_point() or self.y.cut(0, 1).is_complex())
        self.in_features = self.x.shape[-1]
        self.target_columns = 1 if len(self.y.shape) < 2 else self.y.shape[1]
        self._describe(count)

    def _columns(self) -> list[_Column]:
        return [self.x, self.y, *([] if self.weight is None else [self.weight])]

    def _describe(self, count: int) -> None:
        self.count = count
        beginning = [self._read(column, 0, min(count, FINGERPRINTED)) for column in self._columns()]
        self.described = {
            "kind": "table in memory" if self.in_memory else "memory map",
            "rows": count,
            "columns": self.in_features,
            "targets": self.target_columns,
            "types": [str(part.dtype).removeprefix("torch.") for part in beginning],
            "checksum": fingerprint(*beginning),
        }

    def _read(self, column: _Column, begin: int, end: int) -> Tensor:
        """Return rows of a column in their own order."""
        return column.cut(begin, end) if self.rows is None else column.take(self.rows[begin:end])

    # -------------------------------------------------------------------------------------------- checks

    def _bind(self, settings: Settings, class_weights: ClassWeights) -> None:
        weighted = self.weight is not None or class_weights is not None
        if not self.in_memory:
            targets = self._bound_targets(settings)
            if weighted:
                self.settings = settings.with_weights(targets, class_weights)
            else:
                collections.deque(targets, maxlen=0)
            return
        x, y, weight = (None if c is None else c.cut(0, len(c)) for c in (self.x, self.y, self.weight))
        x, y = settings.convert(cast(Tensor, x), cast(Tensor, y), self.free, row_label)
        settings.check_weights(weight, row_label)
        if weighted:
            weight = settings.with_weights([(y, weight)], class_weights).weights(y, weight)
            # None for equal weights.
            self.weight = None if weight is None or bool((weight == weight[0]).all()) else _Dense(weight)
        self.x, self.y = _wrapped(x), _Dense(y)

    def _bound_targets(self, settings: Settings) -> Iterator[tuple[Tensor, Tensor | None]]:
        for i in range(0, self.count, SCANNED_AT_ONCE):
            label = functools.partial(row_label, indices=self.rows, offset=i)
            end = min(i + SCANNED_AT_ONCE, self.count)
            y = settings.targets(self._read(self.y, i, end), self.free.y)
            settings.check_targets(y, label)
            weight = None if self.weight is None else self._read(self.weight, i, end)
            settings.check_weights(weight, label)
            yield y, weight

    # -------------------------------------------------------------------------------------------- batches

    def batches(
        self, size: int | None, *, seed: int, epoch: int, start: int = 0, rank: int = 0, ranks: int = 1
    ) -> Iterator[Batch]:
        count = self.count
        starts = batch_starts(count, size)
        if len(starts) <= 1:  # all rows in each step: the order has no effect
            if start == 0 and count:
                begin, end = part_of(0, count, rank, ranks)
                yield self._cut(begin, end, count)
            return
        order = shuffled(count, mix_seed(seed, epoch))
        if self.in_memory:
            order = _on_device(order, self.y.cut(0, 1).device)
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

    def _take(self, indices: Tensor, count: int) -> Batch:
        if self.rows is not None:
            indices = self.rows[indices]
        weight = None if self.weight is None else self.weight.take(indices)
        return self._batch(self.x.take(indices), self.y.take(indices), weight, count, indices, 0)

    def _cut(self, begin: int, end: int, count: int) -> Batch:
        weight = None if self.weight is None else self._read(self.weight, begin, end)
        indices = None if self.rows is None else self.rows[begin:end]
        return self._batch(
            self._read(self.x, begin, end), self._read(self.y, begin, end), weight, count, indices, begin
        )

    def _batch(
        self, x: Tensor, y: Tensor, weight: Tensor | None, count: int, indices: Tensor | None, offset: int
    ) -> Batch:
        settings = self.settings
        if settings is None:
            return Batch(x, y, weight, count)
        if not self.in_memory:
            x, y = settings.convert(x, y, self.free, functools.partial(row_label, indices=indices, offset=offset))
            weight = settings.weights(y, weight)
        return settings.batch(x, y, weight, count)

    # -------------------------------------------------------------------------------------------- parts

    def divide(
        self, share: float, seed: int, *, classes: bool | None = None, where: str = "fit"
    ) -> tuple[StoredRows, StoredRows]:
        require(self.settings is None, where, "split rows before bind: weights have mean 1 in each part")
        stratified = (self.classes if classes is None else classes) and len(self.y.shape) == 1
        codes = self._read(self.y, 0, self.count).cpu().numpy() if stratified else None
        kept, held = split_rows(codes, self.count, share, seed, where)
        return self._part(kept), self._part(held)

    def _part(self, indices: Tensor) -> StoredRows:
        part = copy.copy(self)
        if self.in_memory:
            part.x, part.y = _wrapped(self.x.take(indices)), _Dense(self.y.take(indices))
            part.weight = None if self.weight is None else _Dense(self.weight.take(indices))
        else:
            part.rows = indices if self.rows is None else self.rows[indices]
        part._describe(len(indices))
        return part


def _on_device(order: Callable[[int, int], Tensor], device: torch.device) -> Callable[[int, int], Tensor]:
    """Return a permutation with results on another device, moved in large parts."""
    if device.type == "cpu":
        return order
    kept: dict[int, Tensor] = {}

    def indices(begin: int, end: int) -> Tensor:
        first = begin // ORDERED_AT_ONCE * ORDERED_AT_ONCE
        if first not in kept or end > first + len(kept[first]):
            kept.clear()
            kept[first] = order(first, max(end, first + ORDERED_AT_ONCE)).to(device)
        return kept[first][begin - first : end - first]

    return indices


def row_label(row: int, indices: Tensor | None = None, offset: int = 0) -> str:
    """Return the name of a row in messages."""
    number = row + offset if indices is None else int(indices[row])
    return f"row {number:,} (counted from 0)"


def split_rows(
    codes: npt.NDArray[Any] | None, count: int, share: float, seed: int, where: str
) -> tuple[Tensor, Tensor]:
    """Return the indices of training rows and of validation rows.

    Args:
        codes: class of each row for a stratified split, or None.
        count: number of rows.
        share: fraction of validation rows, above 0 and below 1.
        seed: seed of the split.
        where: beginning of error messages.

    Raises:
        SpecError: the fraction is out of range.
        DataError: too few rows.
    """
    if not 0 < share < 1:
        refuse(f"{where}: validation", "a fraction above 0 and below 1", share)
    # Classes with a single row each cannot be stratified.
    stratified = codes is not None and len(np.unique(codes)) < count
    y = codes if codes is not None and stratified else np.broadcast_to(np.zeros(1), (count,))
    try:
        kept, held = split(y, share, classes=stratified, seed=seed)
    except TableError as error:
        raise DataError(f"{where}: {error}") from None
    return torch.from_numpy(kept), torch.from_numpy(held)


def _wrapped(tensor: Tensor) -> _Column:
    return _Csr(tensor) if tensor.layout == torch.sparse_csr else _Dense(tensor)


def as_column(values: object, name: str, where: str) -> _Column:
    """Return inputs, targets or weights as a column, after checks independent of other columns.

    Args:
        values: a tensor, an array, a memory map, or a sparse matrix for inputs.
        name: `inputs`, `targets` or `weights`.
        where: beginning of error messages.

    Raises:
        DataError: another kind of values.
    """
    if isinstance(values, Tensor):
        require(not values.is_meta, where, f"the {name} are on the meta device and have no values")
        if values.is_inference() and not torch.is_inference_mode_enabled():
            values = values.clone()  # tensors of inference mode cannot take part in autograd
        if values.layout == torch.sparse_csr and name == "inputs":
            require(values.dim() == 2, where, f"expected sparse inputs of shape (rows, m), got {tuple(values.shape)}")
            parts = values.crow_indices(), values.col_indices(), values.values()
            return _Csr(_sparse(*parts, tuple(values.shape), where).detach())
        also = " or torch.sparse_csr" if name == "inputs" else ""
        dense = values.layout == torch.strided
        require(dense, where, f"expected dense {name}, got {values.layout}; use to_dense(), some rows at a time{also}")
        return _Dense(values.detach())
    if hasattr(values, "tocsr"):
        require(name == "inputs", where, f"expected dense {name}, got a sparse matrix; use .toarray()")
        return _Csr(_of_scipy(values, where))
    if isinstance(values, np.ndarray):
        return _Mapped(values, name, where) if is_mapped(values) else _Dense(as_tensor(values, name, where))
    hint = "use .to_numpy()" if hasattr(values, "to_numpy") else "use torch.tensor(…) or np.asarray(…)"
    raise DataError(f"{where}: the {name} are of type {type(values).__name__}, expected a tensor or an array; {hint}")


def _of_scipy(matrix: Any, where: str) -> Tensor:
    shape = matrix.shape
    require(len(shape) == 2, where, f"expected inputs of shape (rows, m), got a sparse array of shape {shape}")
    csr = matrix.tocsr()
    if not csr.has_canonical_format:
        csr = csr.copy() if csr is matrix else csr  # never change the user's matrix
        csr.sum_duplicates()
    starts, indices = csr.indptr, csr.indices
    if starts.dtype != indices.dtype:
        starts, indices = starts.astype(np.int64), indices.astype(np.int64)
    starts, indices, values = (as_tensor(part, "inputs", where) for part in (starts, indices, csr.data))
    return _sparse(starts, indices, values, shape, where)


def _sparse(starts: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, ...], where: str) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparse CSR is in beta
        try:
            return torch.sparse_csr_tensor(starts, indices, values, shape, check_invariants=True)
        except (RuntimeError, ValueError) as error:
            reason = str(error).split("\n")[0]
            raise DataError(f"{where}: the inputs are no valid sparse CSR tensor ({reason})") from None
