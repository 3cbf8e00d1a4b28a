"""Rows read in any order: tensors, arrays, sparse matrices, memory maps."""

from __future__ import annotations

import collections
import functools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kapsi.arrays import as_tensor, frame_values, is_frame
from kapsi.errors import DataError
from kapsi.training.rows.base import (
    FINGERPRINTED,
    Batch,
    Binding,
    ClassWeights,
    Parts,
    RowLabel,
    Rows,
    batch_parts,
    batch_starts,
    check_weight_shape,
    mix_seed,
    part_of,
    reject,
    row_label,
    weighed,
)

PERMUTED_AT_ONCE = 2**24
"""Rows with a stored permutation, 128 MiB; the order of more rows is computed block by block."""

ORDERED_AT_ONCE = 2**16
SCANNED_AT_ONCE = 2**18

ROUNDS = 6
"""Rounds of the Feistel network: four are enough for a permutation that looks random, two more cost little."""


# ------------------------------------------------------------------------------------------------ orders


def shuffled(count: int, seed: int) -> Callable[[int, int], Tensor]:
    """Return a function from `(begin, end)` to this part of a random permutation of `count` row indices.

    Example:
        >>> order = shuffled(5, seed=0)
        >>> sorted(order(0, 5).tolist()), torch.equal(order(2, 4), order(0, 5)[2:4])
        ([0, 1, 2, 3, 4], True)
    """
    if count <= PERMUTED_AT_ONCE:
        whole = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        return lambda begin, end: whole[begin:end]
    network = _Feistel(count, seed)
    kept: dict[int, Tensor] = {}  # the last blocks: one call for many batches

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
    """A permutation of 0 … count − 1, computed element by element without memory.

    A Feistel network permutes all numbers of the same number of bits; results of at least `count` are permuted again.
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
    """Inputs, targets or weights, with access by row."""

    shape: tuple[int, ...]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def take(self, indices: Tensor) -> Tensor:
        """Return the rows at some indices."""

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
    """Rows of a `torch.sparse_csr` tensor, without `index_select` in torch."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.shape = tensor, tuple(tensor.shape)
        self.starts, self.indices, self.values = tensor.crow_indices(), tensor.col_indices(), tensor.values()
        self.lengths = self.starts[1:] - self.starts[:-1]

    def __len__(self) -> int:
        return self.tensor.shape[0]

    def take(self, indices: Tensor) -> Tensor:
        indices = indices.to(self.starts.device)
        lengths = self.lengths.index_select(0, indices)
        starts = self.starts.new_zeros(len(indices) + 1)
        torch.cumsum(lengths, 0, out=starts[1:])
        shifts = self.starts.index_select(0, indices) - starts[:-1]
        count = int(starts[-1])
        entries = torch.repeat_interleave(shifts, lengths, output_size=count)
        entries += torch.arange(count, dtype=entries.dtype, device=entries.device)
        return self._tensor(starts, self.indices.index_select(0, entries), self.values.index_select(0, entries))

    def cut(self, begin: int, end: int) -> Tensor:
        if begin == 0 and end == len(self):
            return self.tensor
        first, last = self.starts[[begin, end]].tolist()
        return self._tensor(self.starts[begin : end + 1] - first, self.indices[first:last], self.values[first:last])

    def _tensor(self, starts: Tensor, indices: Tensor, values: Tensor) -> Tensor:
        shape = (len(starts) - 1, self.tensor.shape[1])
        return torch.sparse_csr_tensor(starts, indices, values, shape, check_invariants=False)


class _Mapped(_Column):
    """A NumPy memory map; rows are read on access."""

    def __init__(self, array: npt.NDArray[Any], kind: str, where: str) -> None:
        self.array, self.kind, self.where = array, kind, where
        self.shape = tuple(array.shape)

    def __len__(self) -> int:
        return len(self.array)

    def take(self, indices: Tensor) -> Tensor:
        return as_tensor(np.asarray(self.array[indices.cpu().numpy()]), self.kind, self.where)

    def cut(self, begin: int, end: int) -> Tensor:
        return as_tensor(np.array(self.array[begin:end]), self.kind, self.where)


def _is_mapped(array: npt.NDArray[Any]) -> bool:
    base: object = array
    while isinstance(base, np.ndarray):
        if isinstance(base, np.memmap):
            return True
        base = base.base
    return False


# ------------------------------------------------------------------------------------------------ rows


class StoredRows(Rows):
    """Inputs, targets and weights in tensors or memory maps.

    Args:
        x: inputs, `(rows, ...)`.
        y: targets, `(rows,)` or `(rows, k)`.
        weight: row weights `(rows,)`, or None.
        where: prefix of error messages.

    Raises:
        DataError: a wrong type or shape.
    """

    count: int
    divisible = True

    def __init__(self, x: object, y: object, weight: object = None, *, where: str = "fit") -> None:
        self.x, self.y = as_column(x, "inputs", where), as_column(y, "targets", where)
        self.weight = None if weight is None else as_column(weight, "weights", where)
        self.sparse = isinstance(self.x, _Csr)
        self.in_memory = not any(isinstance(column, _Mapped) for column in (self.x, self.y, self.weight))
        if len(self.x.shape) < 2 or self.x.shape[0] == 0:
            hint = "; of a single column use x[:, None]" if len(self.x.shape) == 1 else ""
            reject(where, f"expected inputs of shape (rows, m) with at least one row, got {self.x.shape}{hint}")
        self.count = self.x.shape[0]
        if self.y.shape[:1] != (self.count,):
            reject(where, f"{self.count:,} rows of inputs and {self.y.shape} of targets")
        if self.weight is not None:
            check_weight_shape(self.weight.shape, self.count, where)
        self._describe_first(where)

    def _describe_first(self, where: str = "fit") -> None:
        first = self._cut(0, min(self.count, FINGERPRINTED))
        kind = "table in memory" if self.in_memory else "memory map"
        self._describe(first, where, kind=kind, rows=self.count)

    # -------------------------------------------------------------------------------------------- checks

    def _check_all(self, binding: Binding, class_weights: ClassWeights) -> None:
        if not self.in_memory:
            super()._check_all(binding, class_weights)
            if not self.weighted and class_weights is None and not binding.loss.skips_missing:
                collections.deque(self._checked_targets(binding), maxlen=0)
            return
        x, y, weight = self._cut(0, self.count)
        x, y = binding.checked(x, y, row_label)
        binding.check_weights(weight, self.count, row_label)
        skips_missing = binding.loss.skips_missing
        if self.weighted or class_weights is not None or skips_missing:
            weight = weighed(binding, [(y, weight)], class_weights)[0].weights(y, weight)
            equal = weight is None or (not skips_missing and bool((weight == weight[0]).all()))
            self.weight = None if weight is None or equal else _Dense(weight)
        self.x, self.y = _wrapped(x), _Dense(y)

    def _targets(self) -> Iterator[tuple[Tensor, Tensor | None, RowLabel]]:
        for i in range(0, self.count, SCANNED_AT_ONCE):
            end = min(i + SCANNED_AT_ONCE, self.count)
            weight = None if self.weight is None else self._own(self.weight, i, end)
            yield self._own(self.y, i, end), weight, functools.partial(row_label, indices=self.indices, offset=i)

    # -------------------------------------------------------------------------------------------- batches

    def batches(
        self, size: int | None, *, seed: int, epoch: int, start: int = 0, rank: int = 0, ranks: int = 1
    ) -> Iterator[Batch]:
        order: Callable[[int, int], Tensor] | None = None
        if len(batch_starts(self.count, size)) > 1:
            order = shuffled(self.count, mix_seed(seed, epoch))
            if self.in_memory:
                order = _moved(order, self.y.cut(0, 1).device)
        for _, count, (begin, end) in batch_parts(self.count, size, start, rank, ranks):
            if order is None:
                yield self._stored(self._cut(begin, end), count, self.indices, begin)
                continue
            indices = order(begin, end) if self.indices is None else self.indices[order(begin, end)]
            yield self._stored(self._take(indices), count, indices, 0)

    def spaced(self, count: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of at most `count` rows at equal distances."""
        indices = torch.linspace(0, self.count - 1, min(count, self.count), dtype=torch.float64).long()
        x, y, _ = self._take(indices if self.indices is None else self.indices[indices])
        return x, y

    def chunks(self, size: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        begin, end = part_of(0, self.count, rank, ranks)
        for i in range(begin, end, size):
            last = min(i + size, end)
            yield self._stored(self._cut(i, last), last - i, self.indices, i)

    def _take(self, indices: Tensor) -> Parts:
        weight = None if self.weight is None else self.weight.take(indices)
        return Parts(self.x.take(indices), self.y.take(indices), weight)

    def _cut(self, begin: int, end: int) -> Parts:
        weight = None if self.weight is None else self._own(self.weight, begin, end)
        return Parts(self._own(self.x, begin, end), self._own(self.y, begin, end), weight)

    def _own(self, column: _Column, begin: int, end: int) -> Tensor:
        return column.cut(begin, end) if self.indices is None else column.take(self.indices[begin:end])

    def _stored(self, parts: Parts, count: int, indices: Tensor | None, offset: int) -> Batch:
        if not self.in_memory:  # else checked by `bind`
            parts = self._checked(parts, functools.partial(row_label, indices=indices, offset=offset))
        return self._batch(parts, count)

    def _select(self, indices: Tensor) -> Self:
        part = super()._select(indices)
        if self.in_memory:
            x, y, weight = self._take(indices)
            part.x, part.y, part.weight = _wrapped(x), _Dense(y), None if weight is None else _Dense(weight)
            part.indices = None
        part._describe_first()
        return part


def _moved(order: Callable[[int, int], Tensor], device: torch.device) -> Callable[[int, int], Tensor]:
    """Return an order on another device, moved in large blocks."""
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


# ------------------------------------------------------------------------------------------------ arguments


def _wrapped(tensor: Tensor) -> _Column:
    return _Csr(tensor) if tensor.layout == torch.sparse_csr else _Dense(tensor)


def cut(tensor: Tensor, begin: int, end: int) -> Tensor:
    """Return some rows of a dense or `torch.sparse_csr` tensor."""
    return _wrapped(tensor).cut(begin, end)


def as_column(values: object, kind: str, where: str) -> _Column:
    """Return an argument as a column.

    Args:
        values: a tensor, an array, a SciPy matrix, or a frame (see `kapsi.arrays`).
        kind: `inputs`, `targets` or `weights`; only inputs may be sparse.
        where: prefix of error messages.

    Raises:
        DataError: an unsupported type or layout.
    """
    reject_several(values, kind, where)
    if isinstance(values, Tensor):
        if values.is_inference() and not torch.is_inference_mode_enabled():
            values = values.clone()  # inference tensors cannot be differentiated
        csr = values.layout == torch.sparse_csr and kind == "inputs"
        if values.is_nested:
            problem = (
                f"the {kind} are a nested tensor, of rows of different lengths; pad them, with .to_padded_tensor(0.0)"
            )
        elif values.is_meta:
            problem = f"the {kind} are on the meta device and have no values"
        elif csr and values.dim() != 2:
            problem = f"expected sparse inputs of shape (rows, m), got {tuple(values.shape)}"
        elif csr:
            parts = values.crow_indices(), values.col_indices(), values.values()
            return _Csr(_sparse(*parts, tuple(values.shape), where).detach())
        elif values.layout == torch.strided:
            return _Dense(values.detach())
        else:
            also = "; torch.sparse_csr is supported too" if kind == "inputs" else ""
            problem = f"expected dense {kind}, got {values.layout}; use to_dense(), some rows at a time{also}"
    elif hasattr(values, "tocsr"):
        if kind == "inputs":
            return _Csr(of_scipy(values, where))
        problem = f"expected dense {kind}, got a sparse matrix; use .toarray()"
    elif isinstance(values, np.ndarray):
        return _Mapped(values, kind, where) if _is_mapped(values) else _Dense(as_tensor(values, kind, where))
    elif is_frame(values):
        return _Dense(as_tensor(frame_values(values, kind, where), kind, where))
    else:
        hint = "use torch.tensor(…) or np.asarray(…)"
        problem = f"the {kind} are of type {type(values).__name__}, expected a tensor, an array or a data frame; {hint}"
    raise DataError(f"{where}: {problem}")


def reject_several(values: object, kind: str, where: str) -> None:
    """Raise a `DataError` for several arrays in place of one, in a mapping, a tuple or a list."""
    several = isinstance(values, tuple | list) and any(getattr(part, "ndim", 0) for part in values)
    if several or isinstance(values, Mapping):
        given = f"{type(values).__name__} of {len(cast(Any, values))}"
        reject(
            where,
            f"expected one tensor or array as {kind}, got a {given}; concatenate the parts along the last axis, and split them in "
            "the forward method of the model",
        )


def of_scipy(matrix: Any, where: str) -> Tensor:
    """Return a SciPy matrix as a sparse CSR tensor; `where` begins messages."""
    if len(matrix.shape) != 2:
        reject(where, f"expected inputs of shape (rows, m), got a sparse array of shape {matrix.shape}")
    csr = matrix.tocsr()
    if not csr.has_canonical_format:
        csr = csr.copy() if csr is matrix else csr  # never change the argument
        csr.sum_duplicates()
    starts, indices = csr.indptr, csr.indices
    if starts.dtype != indices.dtype:
        starts, indices = starts.astype(np.int64), indices.astype(np.int64)
    starts, indices, values = (as_tensor(part, "inputs", where) for part in (starts, indices, csr.data))
    return _sparse(starts, indices, values, csr.shape, where)


def _sparse(starts: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, ...], where: str) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sparse CSR in beta
        try:
            return torch.sparse_csr_tensor(starts, indices, values, shape, check_invariants=True)
        except (RuntimeError, ValueError) as error:
            reason = str(error).split("\n")[0]
            reject(where, f"the inputs are no valid sparse CSR tensor ({reason})")
