"""Rows of data: batches, parts of processes, checks and weights, shared by all kinds of rows."""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, NoReturn, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kapsi.arrays import wider_dtype
from kapsi.data.tabular import split
from kapsi.errors import DataError, SpecError, TableError, refuse
from kapsi.training.losses import Loss

ClassWeights: TypeAlias = tuple[float, ...] | Literal["balanced"] | None

RowLabel: TypeAlias = Callable[[int], str]
"""Returns the name of a row for messages, by its index in a tensor."""

CHECKED_AT_ONCE = 2**22
"""Number of values checked at a time, so that temporary arrays stay small."""

LARGE_WEIGHT = 1e100
MAX_SCALE = 1e300
"""Largest inverse of a mean weight."""

FINGERPRINTED = 64
"""First rows covered by the checksum."""


class Batch(NamedTuple):
    """A batch of rows.

    Attributes:
        x: inputs, `(b, m)`, or a `torch.sparse_csr` tensor.
        y: targets, `(b,)` or `(b, k)`.
        weight: row weights `(b,)`, with mean one over all rows (not over the batch), or None for equal weights.
        count: number of rows of the whole batch over all processes, the divisor of sums of losses.
    """

    x: Tensor
    y: Tensor
    weight: Tensor | None
    count: int  # type: ignore[assignment]  # hides the method of tuples


class Parts(NamedTuple):
    """Inputs, targets and weights of some rows."""

    x: Tensor
    y: Tensor
    weight: Tensor | None

    def map(self, function: Callable[[Tensor], Tensor]) -> Parts:
        """Apply a function to each tensor."""
        return Parts(function(self.x), function(self.y), None if self.weight is None else function(self.weight))


class Rows(ABC):
    """Rows in some order, as batches on the CPU or on the device of the data.

    Attributes:
        count: number of rows, None for a stream of unknown length.
        described: the data's description in a checkpoint: kind, number of rows and columns, types, a checksum of the first rows.
        classes: whether targets are of an integer or Boolean type.
        in_features: m, the size of the last axis of the inputs.
        row_shape: shape of the inputs of a row; empty if unknown.
        target_columns: k, 1 for targets without an axis of columns.
        weighted: whether the rows have weights.
        in_memory: whether all rows are tensors.
        sparse: whether inputs are sparse.
        divisible: whether rows can be read in any order, for held-out rows.
        indices: row indices in the data, None for all rows.
        binding: set by `bind`, None before.
    """

    count: int | None
    described: dict[str, object]
    classes: bool = False
    in_features: int = 0
    row_shape: tuple[int, ...] = ()
    target_columns: int = 1
    weighted: bool = False
    in_memory: bool = False
    sparse: bool = False
    divisible: bool = False
    indices: Tensor | None = None
    binding: Binding | None = None

    @abstractmethod
    def batches(
        self, size: int | None, *, seed: int, epoch: int, start: int = 0, rank: int = 0, ranks: int = 1
    ) -> Iterator[Batch]:
        """Yield the batches of an epoch from number `start`, in an order fixed by seed and epoch.

        A batch has `size` rows over all processes. The last may have fewer; a single last row joins the batch before. Process
        `rank` gets a contiguous part of each batch; sizes of parts differ by at most one, and parts may be empty. All processes
        get the same number of batches.
        """

    @abstractmethod
    def chunks(self, size: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        """Yield all rows of this process once, in the order of the data, at most `size` at a time; `count` is the chunk size."""

    @abstractmethod
    def _targets(self) -> Iterator[tuple[Tensor, Tensor | None, RowLabel]]:
        """Yield targets, weights and names of all rows, piece by piece."""

    def length(self, size: int | None) -> int | None:
        """Return the number of batches of an epoch, None if unknown."""
        return None if self.count is None else len(batch_starts(self.count, size))

    # -------------------------------------------------------------------------------------------- binding

    def bind(
        self,
        loss: Loss,
        *,
        in_features: int | None,
        outputs: int | None,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        class_weights: ClassWeights = None,
        wide_inputs: bool = False,
        where: str = "fit",
    ) -> Self:
        """Return the rows in the types of a loss and a model, checked: types, sizes, finite values, integer class labels, weights.

        Rows in memory are checked at once, all others during reading. Inputs and real-valued targets are cast to `dtype`, class
        labels to int64. Weights are multiplied by class weights, then divided by their mean.

        Args:
            loss: the loss, which defines the allowed targets.
            in_features: number of inputs of the model, None if unknown.
            outputs: number of outputs of the model, None if unknown.
            dtype: dtype of the model's parameters.
            device: device of the batches; None leaves batches on the device of the data.
            class_weights: weight per class, or `balanced`: rows / (classes · rows of the class).
            wide_inputs: whether inputs keep a wider type than `dtype`, for a model that shifts inputs first.
            where: prefix of error messages.

        Raises:
            DataError: inputs, targets or weights do not fit.
            SpecError: class weights do not fit the loss.
        """
        if class_weights is not None and not loss.classes:
            raise SpecError(
                f"{where}: class_weights are for losses of classes, the loss is {loss.name}; leave them out"
            )
        if outputs is not None and isinstance(class_weights, tuple):
            _check_class_weights(class_weights, loss.class_count(outputs, where), where)
        target_device = None if device is None else torch.device(device)
        bound = copy.copy(self)
        bound.binding = Binding(loss, in_features, outputs, dtype, target_device, where, wide_inputs)
        bound._check_all(bound.binding, class_weights)
        return bound

    def _check_all(self, binding: Binding, class_weights: ClassWeights) -> None:
        """Check targets and weights of all rows if the rows are weighted."""
        if self.weighted or class_weights is not None or binding.loss.skips_missing:
            self.binding, self.count = weighed(binding, self._checked_targets(binding), class_weights)

    def _checked_targets(self, binding: Binding) -> Iterator[tuple[Tensor, Tensor | None]]:
        for y, weight, name in self._targets():
            y = binding.cast_targets(y)
            binding.check_targets(y, name)
            binding.check_weights(weight, len(y), name)
            yield y, weight

    def _checked(self, parts: Parts, name: RowLabel) -> Parts:
        """Return rows in their final types and with their final weights, checked if the rows are bound."""
        binding = self.binding
        if binding is None:
            return parts
        x, y = binding.checked(parts.x, parts.y, name)
        binding.check_weights(parts.weight, len(y), name)
        return Parts(x, y, binding.weights(y, parts.weight))

    def _batch(self, parts: Parts, count: int) -> Batch:
        """Return a batch on the device of the binding."""
        device = None if self.binding is None else self.binding.device
        return Batch(*(parts if device is None else parts.map(lambda tensor: tensor.to(device))), count)

    def _describe(self, first: Parts, where: str, **entries: object) -> None:
        """Set sizes and description from the first rows; `entries` extend or replace the description."""
        x, y, weight = first
        for kind, tensor in (("inputs", x), ("targets", y)):
            if tensor.is_complex():
                reject(
                    where,
                    f"expected real numbers as {kind}, got {tensor.dtype}; give real and imaginary parts as columns",
                )
        self.classes = not y.is_floating_point()
        self.in_features, self.target_columns = x.shape[-1], 1 if y.dim() < 2 else y.shape[1]
        self.row_shape = tuple(x.shape[1:])
        self.weighted = weight is not None
        self.described = {
            "columns": self.in_features,
            "targets": self.target_columns,
            "types": [str(part.dtype).removeprefix("torch.") for part in first if part is not None],
            "checksum": fingerprint(*first),
            **entries,
        }

    # -------------------------------------------------------------------------------------------- held-out rows

    def divide(self, share: float, seed: int, *, classes: bool | None = None, where: str = "fit") -> tuple[Self, Self]:
        """Return training rows and a random share of held-out rows.

        Args:
            share: share of held-out rows, above 0 and below 1.
            seed: seed of the draw.
            classes: whether to stratify by class; None to stratify targets that are integer class labels by their type.
            where: prefix of error messages.

        Raises:
            SpecError: a share out of range, or rows read as a stream.
            DataError: too few rows, or bound rows.
        """
        if not self.divisible or self.count is None:
            kind = self.described.get("kind", type(self).__name__)
            raise SpecError(
                f"{where}: a {kind} is read in a fixed order and cannot be split; give validation rows, such as validation=(x, y)"
            )
        if self.binding is not None:
            reject(where, "split rows before bind: weights have mean 1 in each part")
        if not 0 < share < 1:
            refuse(f"{where}: validation", "a fraction above 0 and below 1", share)
        codes = np.broadcast_to(np.zeros(1), (self.count,))
        stratify = (self.classes if classes is None else classes) and self.target_columns == 1
        if stratify:
            labels = torch.cat([y.reshape(-1) for y, _, _ in self._targets()]).cpu().numpy()
            stratify = len(np.unique(labels)) < self.count  # else each class has a single row
            codes = labels if stratify else codes
        try:
            kept, held = split(codes, share, classes=stratify, seed=seed)
        except TableError as error:
            reject(where, str(error))
        return self._select(torch.from_numpy(kept)), self._select(torch.from_numpy(held))

    def _select(self, indices: Tensor) -> Self:
        """Return some of the rows."""
        part = copy.copy(self)
        part.indices, part.count = indices if self.indices is None else self.indices[indices], len(indices)
        return part


def reject(where: str, problem: str) -> NoReturn:
    """Raise a `DataError`."""
    raise DataError(f"{where}: {problem}")


# ------------------------------------------------------------------------------------------------ order and parts


def mix_seed(*numbers: int) -> int:
    """Return a seed of 32 bits from integers such as seed and epoch; neighboring integers give unrelated seeds."""
    return int(np.random.SeedSequence([abs(number) for number in numbers]).generate_state(1)[0])


def batch_starts(count: int, size: int | None) -> range:
    """Return the first rows of batches; a single last row, too few for a batch norm, joins the batch before.

    Example:
        >>> list(batch_starts(9, 4)), list(batch_starts(10, 4)), list(batch_starts(10, None))
        ([0, 4], [0, 4, 8], [0])
    """
    if size is None or size >= count:
        return range(min(count, 1))
    return range(0, count - 1 if size > 1 else count, size)  # batches of one row are allowed if requested


def part_of(begin: int, end: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the part of a process of the rows from `begin` to `end`: sizes differ by at most one.

    Example:
        >>> [part_of(10, 15, rank, 3) for rank in range(3)]
        [(10, 12), (12, 14), (14, 15)]
    """
    base, extra = divmod(end - begin, ranks)
    first = begin + rank * base + min(rank, extra)
    return first, first + base + (rank < extra)


def batch_parts(
    count: int, size: int | None, start: int, rank: int, ranks: int
) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Yield number and rows of each batch from number `start`, and the part of a process as `(begin, end)`."""
    starts = batch_starts(count, size)
    for number, begin in enumerate(starts[start:], start):
        end = count if begin == starts[-1] else begin + starts.step
        yield number, end - begin, part_of(begin, end, rank, ranks)


def row_label(row: int, indices: Tensor | None = None, offset: int = 0) -> str:
    """Return the name of a row for messages."""
    number = row + offset if indices is None else int(indices[row + offset])
    return f"row {number:,} (counted from 0)"


def fingerprint(*tensors: Tensor | None) -> str:
    """Return a checksum of the first rows of some tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            digest.update(f"{tensor.dtype} {tuple(tensor.shape[1:])};".encode())
            for part in _values(tensor):
                _update(digest, part[:FINGERPRINTED])
    return digest.hexdigest()[:16]


def contents(rows: Rows) -> str:
    """Return a checksum of all rows, in the types of the model."""
    digest = hashlib.sha256()
    for batch in rows.chunks(max(1, CHECKED_AT_ONCE // max(1, rows.in_features))):
        for tensor in (batch.x, batch.y, batch.weight):
            for part in () if tensor is None else _values(tensor):
                _update(digest, part)
    return digest.hexdigest()[:16]


def _update(digest: hashlib._Hash, tensor: Tensor) -> None:
    if tensor.numel():
        flat = tensor.detach().cpu().reshape(-1)
        if flat.stride(0) != 1:  # also of a single number, which is contiguous with any stride
            flat = flat.new_empty(flat.shape).copy_(flat)
        digest.update(flat.view(torch.uint8).numpy().data)


def _values(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout == torch.sparse_csr:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return (tensor,)


# ------------------------------------------------------------------------------------------------ checks


def bad_row(tensor: Tensor) -> int | None:
    """Return the first row with a non-finite value, or None."""
    values = tensor.values() if tensor.layout == torch.sparse_csr else tensor
    if not values.is_floating_point() or not values.numel():
        return None
    step = max(1, CHECKED_AT_ONCE * len(values) // values.numel())
    for i in range(0, len(values), step):
        part = values[i : i + step]
        # The sum is quick and needs no memory, but may overflow, hence the closer look.
        if not bool(torch.isfinite(part.sum())):
            bad = (~torch.isfinite(part)).reshape(len(part), -1).any(1)
            if bool(bad.any()):
                index = i + int(bad.nonzero()[0, 0])
                if tensor.layout == torch.sparse_csr:
                    return int(torch.searchsorted(tensor.crow_indices(), index, right=True)) - 1
                return index
    return None


def check_weight_shape(weight: Tensor | tuple[int, ...], rows: int, where: str) -> None:
    """Raise a `DataError` unless there is one weight per row."""
    shape = tuple(weight.shape) if isinstance(weight, Tensor) else weight
    if shape != (rows,):
        reject(where, f"weights of shape {shape} for {rows:,} rows; expected one weight per row, of shape (rows,)")


def _check_class_weights(weights: tuple[float, ...], classes: int, where: str) -> None:
    if len(weights) != classes:
        raise SpecError(
            f"{where}: class_weights has {len(weights)} weights for {classes} classes; give one for each class"
        )


@dataclass(frozen=True)
class Binding:
    """Types and checks of rows for a loss and a model.

    Args:
        loss: the loss, which defines the allowed targets.
        in_features: number of inputs of the model, None if unknown.
        outputs: number of outputs of the model, None if unknown.
        dtype: dtype of the model.
        device: device of the batches, None for the device of the data.
        where: prefix of error messages.
        wide_inputs: whether inputs keep a wider type; integers of 32 and 64 bits are float64 then.
        factors: weight per class, None without class weights.
        scale: inverse of the mean weight.
    """

    loss: Loss
    in_features: int | None
    outputs: int | None
    dtype: torch.dtype
    device: torch.device | None
    where: str
    wide_inputs: bool = False
    factors: Tensor | None = None
    scale: float = 1.0

    def cast_targets(self, y: Tensor) -> Tensor:
        """Return targets in the type of the loss: class labels `(rows,)` in int64, real values in the type of the model."""
        if not self.loss.classes:
            return y.to(self.dtype)
        if y.is_floating_point():
            return y
        return y.reshape(len(y)).long() if y.shape[1:] == (1,) else y.long()

    def checked(self, x: Tensor, y: Tensor, name: RowLabel) -> tuple[Tensor, Tensor]:
        """Return inputs and targets in their final types.

        Raises:
            DataError: inputs or targets do not fit.
        """
        x, given = self._cast_inputs(x, name), y
        y = self.cast_targets(y)
        self._check_finite(y, "targets", name, given)
        if self.loss.classes:
            self.check_targets(y)
        if self.in_features is not None and x.shape[-1] != self.in_features:
            reject(self.where, f"the model has {self.in_features} inputs, got x of shape {tuple(x.shape)}")
        if not self.loss.classes:
            self.check_targets(y)
        return x, y

    def input_dtype(self, given: torch.dtype) -> torch.dtype:
        """Return the type for inputs of a given type."""
        return wider_dtype(given, self.dtype) if self.wide_inputs else self.dtype

    def _cast_inputs(self, x: Tensor, name: RowLabel) -> Tensor:
        inputs = x.to(self.input_dtype(x.dtype))
        self._check_finite(inputs, "inputs", name, x)
        return inputs

    def check_targets(self, y: Tensor, name: RowLabel | None = None) -> None:
        """Raise a `DataError` if targets do not fit the loss and the outputs; with names of rows, also if not finite."""
        if name is not None:
            self._check_finite(y, "targets", name, y)
        outputs = self.outputs
        if outputs is None:  # a fitting number, for the checks of types and values
            columns = 1 if y.dim() < 2 else int(y.shape[1])
            most = int(y.max()) + 1 if self.loss.classes and len(y) and not y.is_floating_point() else 2
            outputs = max(2, most) if self.loss.classes else columns * self.loss.outputs_per_target
        self.loss.check_targets(y, outputs, self.where)

    def check_weights(self, weight: Tensor | None, rows: int, name: RowLabel) -> None:
        """Raise a `DataError` for weights of a wrong shape or type, negative weights, or non-finite weights."""
        if weight is None:
            return
        check_weight_shape(weight, rows, self.where)
        if weight.is_complex():
            reject(self.where, f"expected real numbers as weights, got {weight.dtype}")
        if rows and not (bool(weight.min() >= 0) and bool(torch.isfinite(weight.sum()))):
            bad = (~(torch.isfinite(weight) & (weight >= 0))).nonzero()
            if len(bad):
                row = int(bad[0, 0])
                value = weight[row].item()
                reject(self.where, f"weights must be finite and at least 0; the weight of {name(row)} is {value}")

    def _check_finite(self, tensor: Tensor, kind: str, name: RowLabel, given: Tensor) -> None:
        """Raise a `DataError` for non-finite values; `given` are the values before a change of type."""
        targets = kind == "targets" and tensor.is_floating_point()
        if targets and self.loss.skips_missing:
            tensor, given = (values.masked_fill(values.isnan(), 0) for values in (tensor, given))
        row = bad_row(tensor)
        if row is None:
            return
        if bad_row(given) is None:
            reject(
                self.where,
                f"the {kind} of {name(row)} exceed the range of {self.dtype}; scale them or train in float64",
            )
        hint = ""
        if targets and hasattr(self.loss, "ignore_missing") and bool(tensor[row].isnan().any()):
            hint = f"; drop the row, or ignore NaN targets by loss=kp.{type(self.loss).__name__}(ignore_missing=True)"
        reject(self.where, f"inputs and targets must be finite; the {kind} of {name(row)} are not{hint}")

    def weights(self, y: Tensor, weight: Tensor | None) -> Tensor | None:
        """Return weights of mean one over all rows, None for equal weights."""
        if self.factors is not None:
            factor = self.factors.to(y.device)[y.long()]
            weight = factor if weight is None else factor * weight.to(factor.dtype)
        if weight is None and self.scale != 1:  # of the observed share of the targets
            weight = torch.ones(len(y), device=y.device)
        return None if weight is None else (weight.double() * self.scale).to(self.dtype)


def weighed(
    binding: Binding, parts: Iterable[tuple[Tensor, Tensor | None]], class_weights: ClassWeights
) -> tuple[Binding, int]:
    """Return the binding with class weights and mean weight, and the number of rows, in one pass over targets and weights."""
    where = binding.where
    rows = 0
    totals = np.zeros((2, 0))  # number of rows and sum of weights, by class
    for y, weight in parts:
        rows += len(y)
        codes = np.zeros(len(y), dtype=np.int64) if class_weights is None else y.long().cpu().numpy()
        weights = np.ones(len(y)) if weight is None else weight.double().cpu().numpy()
        observed = binding.loss.observed(y)
        weights = weights if observed is None else weights * observed.cpu().numpy()
        size = max(totals.shape[1], int(codes.max()) + 1 if len(codes) else 0)
        totals = np.pad(totals, ((0, 0), (0, size - totals.shape[1])))
        totals += [np.bincount(codes, minlength=size), np.bincount(codes, weights=weights, minlength=size)]
    if not rows:
        reject(where, "expected at least one row")
    factors: np.ndarray[Any, Any] | None = None
    if class_weights is not None:
        outputs = binding.outputs
        size = max(totals.shape[1], 0 if outputs is None else binding.loss.class_count(outputs, where))
        totals = np.pad(totals, ((0, 0), (0, size - totals.shape[1])))
        if isinstance(class_weights, str):  # classes without rows get weight 0
            factors = np.divide(rows, size * totals[0], out=np.zeros(size), where=totals[0] > 0)
        else:
            _check_class_weights(class_weights, size, where)
            factors = np.array(class_weights, dtype=np.float64)
            if factors.max() > LARGE_WEIGHT:  # only ratios count, and sums of huge weights overflow
                factors = factors / factors.max()
    total = float(totals[1].sum() if factors is None else (factors * totals[1]).sum())
    if not total > 0 or not np.isfinite(total) or rows / total > MAX_SCALE:
        if not total > 0 and binding.loss.skips_missing:
            reject(where, "all targets are missing (NaN), or have weight 0; give at least one")
        problem = "0 for all rows" if not total > 0 else "too large" if total > 1 else "too small"
        reject(where, f"the weights are {problem}; give weights above 0, of ordinary size")
    by_class = None if factors is None else torch.from_numpy(factors)
    return replace(binding, factors=by_class, scale=rows / total), rows
