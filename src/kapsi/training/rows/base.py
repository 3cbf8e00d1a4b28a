"""Base of all rows: batches, their division among processes, checks and weights."""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kapsi.errors import DataError, SpecError
from kapsi.training.losses import Loss

__all__ = [
    "Batch",
    "ClassWeights",
    "Convertible",
    "Rows",
    "Settings",
    "batch_starts",
    "contents",
    "fingerprint",
    "first_invalid_weight",
    "first_nonfinite_row",
    "mix_seed",
    "part_of",
    "require",
]

ClassWeights: TypeAlias = tuple[float, ...] | Literal["balanced"] | None

CHECKED_AT_ONCE = 2**22
"""Numbers checked in one step: temporary arrays stay small."""

LARGEST_SCALE = 1e300
"""Reciprocal of the smallest mean weight."""

FINGERPRINTED = 64
"""First rows in the checksum of a checkpoint."""


class Batch(NamedTuple):
    """A batch of rows.

    Attributes:
        x: inputs, `(b, m)`, or a `torch.sparse_csr` tensor.
        y: targets, `(b,)` or `(b, k)`.
        weight: weights, `(b,)`, with mean 1 over all rows; None for equal weights.
        count: rows of the batch over all processes, the divisor of sums of losses.
    """

    x: Tensor
    y: Tensor
    weight: Tensor | None
    count: int  # type: ignore[assignment]  # hides tuple.count


class Rows(ABC):
    """Rows in batches.

    Attributes:
        count: number of rows, None for a stream of unknown length.
        described: plain data compared when a run resumes: kind, numbers of rows and columns, types, checksum of the first rows.
        classes: whether targets have an integer type, such as class numbers.
        in_features: m, the size of the last axis of the inputs.
        target_columns: k, 1 for targets without an axis of columns.
        in_memory: whether all rows are tensors in memory.
        sparse: whether inputs are sparse.
        settings: types, sizes and weights set by `bind`, None before.
    """

    count: int | None
    described: dict[str, object]
    classes: bool = False
    in_features: int = 0
    target_columns: int = 1
    in_memory: bool = False
    sparse: bool = False
    settings: Settings | None = None

    @abstractmethod
    def batches(
        self, size: int | None, *, seed: int, epoch: int, start: int = 0, rank: int = 0, ranks: int = 1
    ) -> Iterator[Batch]:
        """Yield the batches of an epoch except the first `start`, in an order determined by seed and epoch.

        Each batch has `size` rows over all processes. The last batch may have fewer, and a single last row joins the batch
        before. Process `rank` gets a contiguous part of each batch; sizes of parts differ by at most one and may be zero. Every
        process gets the same number of batches.
        """

    @abstractmethod
    def chunks(self, size: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        """Yield all rows of this process once, in their own order, at most `size` at a time; `count` is the size of the chunk."""

    def length(self, size: int | None) -> int | None:
        """Return the number of batches of an epoch, None if unknown."""
        return None if self.count is None else len(batch_starts(self.count, size))

    def bind(
        self,
        loss: Loss,
        *,
        in_features: int | None,
        outputs: int | None,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        class_weights: ClassWeights = None,
        where: str = "fit",
    ) -> Self:
        """Return the rows converted and checked for a loss and a model: types, sizes, finite numbers, class numbers, weights.

        Rows in memory are checked at once, others while reading. Numbers of arrays, files and Python are converted to `dtype`;
        tensors must have this type already. Class weights are multiplied into the weights; then all are divided by their mean.

        Args:
            loss: loss; determines the allowed targets.
            in_features: inputs of the model, None if unknown.
            outputs: outputs of the model, None if unknown.
            dtype: type of the model's parameters.
            device: device of the batches; None for the device of the data.
            class_weights: one weight for each class, or `balanced`: rows / (classes · rows of the class).
            where: beginning of error messages.

        Raises:
            DataError: rows do not fit the loss or the model.
            SpecError: class weights do not fit the loss or the model.
        """
        check_class_weights(loss, class_weights, outputs, where)
        settings = Settings(loss, in_features, outputs, dtype, None if device is None else torch.device(device), where)
        bound = copy.copy(self)
        bound.settings = settings
        bound._bind(settings, class_weights)
        return bound

    def _bind(self, settings: Settings, class_weights: ClassWeights) -> None:  # noqa: B027
        """Check and convert the rows of a copy made by `bind`."""

    def divide(self, share: float, seed: int, *, classes: bool | None = None, where: str = "fit") -> tuple[Rows, Rows]:
        """Split the rows at random into training rows and validation rows.

        Args:
            share: fraction of validation rows, above 0 and below 1.
            seed: seed of the split.
            classes: whether to stratify by class; None for targets of an integer type.
            where: beginning of error messages.

        Raises:
            SpecError: a fraction out of range, or rows read as a stream.
            DataError: too few rows.
        """
        kind = self.described.get("kind", type(self).__name__)
        raise SpecError(
            f"{where}: a {kind} is read in its own order and cannot be split; give validation rows, such as validation=(x, y)"
        )


# ------------------------------------------------------------------------------------------------ order and parts


def mix_seed(*numbers: int) -> int:
    """Return a seed of 32 bits for numbers such as seed and epoch; seeds of neighboring numbers are independent."""
    return int(np.random.SeedSequence([abs(number) for number in numbers]).generate_state(1)[0])


def batch_starts(count: int, size: int | None) -> range:
    """Return the starts of batches; a single last row, too few for a batch norm, joins the batch before.

    Example:
        >>> list(batch_starts(9, 4)), list(batch_starts(10, 4)), list(batch_starts(10, None))
        ([0, 4], [0, 4, 8], [0])
    """
    if size is None or size >= count:
        return range(min(count, 1))
    return range(0, count - 1 if size > 1 else count, size)


def part_of(begin: int, end: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return begin and end of a process's part of the rows from `begin` to `end`; sizes differ by at most one.

    Example:
        >>> [part_of(10, 15, rank, 3) for rank in range(3)]
        [(10, 12), (12, 14), (14, 15)]
    """
    base, extra = divmod(end - begin, ranks)
    first = begin + rank * base + min(rank, extra)
    return first, first + base + (rank < extra)


def fingerprint(*tensors: Tensor | None) -> str:
    """Return a checksum of the first rows of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            digest.update(f"{tensor.dtype} {tuple(tensor.shape[1:])};".encode())
            for part in _values(tensor):
                first = part.detach()[:FINGERPRINTED].cpu().contiguous()
                if first.numel():
                    digest.update(first.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def contents(rows: Rows) -> str:
    """Return a checksum of all rows, after conversion for the model."""
    digest = hashlib.sha256()
    for batch in rows.chunks(max(1, CHECKED_AT_ONCE // max(1, rows.in_features))):
        for tensor in (batch.x, batch.y, batch.weight):
            for part in () if tensor is None else _values(tensor):
                digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _values(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout == torch.sparse_csr:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return (tensor,)


# ------------------------------------------------------------------------------------------------ checks


def require(condition: object, where: str, problem: str) -> None:
    """Raise a `DataError` with place and problem unless the condition holds."""
    if not condition:
        raise DataError(f"{where}: {problem}")


def first_nonfinite_row(tensor: Tensor) -> int | None:
    """Return the first row with NaN or infinity, None if all numbers are finite."""
    values = tensor.values() if tensor.layout == torch.sparse_csr else tensor
    if not values.is_floating_point() or not values.numel():
        return None
    step = max(1, CHECKED_AT_ONCE * len(values) // values.numel())
    for i in range(0, len(values), step):
        part = values[i : i + step]
        # The sum is fast and needs no memory; sums of finite numbers may overflow, so check the numbers then.
        if not bool(torch.isfinite(part.sum())):
            bad = (~torch.isfinite(part)).reshape(len(part), -1).any(1)
            if bool(bad.any()):
                position = i + int(bad.nonzero()[0, 0])
                if tensor.layout == torch.sparse_csr:
                    return int(torch.searchsorted(tensor.crow_indices(), position, right=True)) - 1
                return position
    return None


def first_invalid_weight(weight: Tensor) -> int | None:
    """Return the first row with a negative or non-finite weight, None if all weights are valid."""
    if len(weight) and not (bool(weight.min() >= 0) and bool(torch.isfinite(weight.sum()))):
        bad = ~(torch.isfinite(weight) & (weight >= 0))
        if bool(bad.any()):
            return int(bad.nonzero()[0, 0])
    return None


def check_class_weights(loss: Loss, weights: ClassWeights, outputs: int | None, where: str) -> None:
    """Raise a `SpecError` if class weights do not fit the loss or the number of classes."""
    if weights is None:
        return
    if not loss.classes:
        raise SpecError(f"{where}: class_weights are for losses of classes, the loss is {loss.name}; leave them out")
    if isinstance(weights, tuple) and outputs is not None:
        _check_class_count(weights, loss.class_count(outputs, where), where)


def _check_class_count(weights: tuple[float, ...], count: int, where: str) -> None:
    if len(weights) != count:
        raise SpecError(
            f"{where}: class_weights has {len(weights)} weights for {count} classes; give one for each class"
        )


class Convertible(NamedTuple):
    """Whether types may be converted: types of arrays, files and Python numbers, not the types of tensors."""

    x: bool
    y: bool


@dataclass(frozen=True)
class Settings:
    """Types, sizes and weights of rows for a loss and a model.

    Args:
        loss: loss; determines the allowed targets.
        in_features: inputs of the model, None if unknown.
        outputs: outputs of the model, None if unknown.
        dtype: type of the model's parameters.
        device: device of the batches, None for the device of the data.
        where: beginning of error messages.
        factors: class weights, None without.
        scale: reciprocal of the mean weight.
    """

    loss: Loss
    in_features: int | None
    outputs: int | None
    dtype: torch.dtype
    device: torch.device | None
    where: str = "fit"
    factors: Tensor | None = None
    scale: float = 1.0

    def inputs(self, x: Tensor) -> Tensor:
        """Return inputs in the type of the model."""
        return x if x.dtype == self.dtype else x.to(self.dtype)

    def targets(self, y: Tensor, free: bool) -> Tensor:
        """Return targets in the type of the loss, if convertible."""
        if self.loss.classes:
            return y.long() if free and not y.is_floating_point() else y
        return y.to(self.dtype) if free and y.dtype != self.dtype else y

    def convert(self, x: Tensor, y: Tensor, free: Convertible, label: Callable[[int], str]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets in their final types after checking them.

        Args:
            x: inputs.
            y: targets.
            free: convertible types.
            label: name of a row in error messages.

        Raises:
            DataError: inputs or targets do not fit.
        """
        loss = self.loss
        y = self.targets(y, free.y)
        self._check_finite(x, "inputs", label)
        self._check_finite(y, "targets", label)
        if loss.classes or not y.is_floating_point():
            self.check_targets(y)
        wrong = (not free.x and x.dtype != self.dtype) or (
            y.is_floating_point() and not free.y and y.dtype != self.dtype
        )
        require(
            not wrong,
            self.where,
            f"inputs are {x.dtype}, targets {y.dtype} and the model {self.dtype}; they must agree",
        )
        require(
            self.in_features in (None, x.shape[-1]),
            self.where,
            f"the model takes {self.in_features} inputs, got x of shape {tuple(x.shape)}",
        )
        if y.is_floating_point():
            self.check_targets(y)
        return self.inputs(x), y if loss.classes else y.to(self.dtype)

    def check_targets(self, y: Tensor, label: Callable[[int], str] | None = None) -> None:
        """Raise a `DataError` if targets do not fit the loss and the outputs."""
        if label is not None:
            self._check_finite(y, "targets", label)
        outputs = self.outputs
        if outputs is None:  # assume a fitting number
            columns = 1 if y.dim() < 2 else int(y.shape[1])
            most = int(y.max()) + 1 if self.loss.classes and len(y) and not y.is_floating_point() else 2
            outputs = max(2, most) if self.loss.classes else columns * self.loss.outputs_per_target
        self.loss.check_targets(y, outputs, self.where)

    def check_weights(self, weight: Tensor | None, label: Callable[[int], str]) -> None:
        """Raise a `DataError` if weights are negative or not finite."""
        if weight is None:
            return
        require(not weight.is_complex(), self.where, f"expected real numbers as weights, got {weight.dtype}")
        row = first_invalid_weight(weight)
        if row is not None:
            given = f"the weight of {label(row)} is {weight[row].item()}"
            raise DataError(f"{self.where}: weights must be finite and at least 0; {given}")

    def _check_finite(self, tensor: Tensor, name: str, label: Callable[[int], str]) -> None:
        row = first_nonfinite_row(tensor)
        if row is not None:
            raise DataError(f"{self.where}: inputs and targets must be finite; the {name} of {label(row)} are not")

    def with_weights(self, parts: Iterable[tuple[Tensor, Tensor | None]], class_weights: ClassWeights) -> Self:
        """Return the settings with class weights and the scale of the weights.

        Args:
            parts: checked targets and weights of all rows.
            class_weights: as in `Rows.bind`.

        Raises:
            DataError: all weights are zero.
        """
        factors, scale = _weight_factors(self, parts, class_weights)
        return replace(self, factors=factors, scale=scale)

    def weights(self, y: Tensor, weight: Tensor | None) -> Tensor | None:
        """Return the weights of a part of the rows, with mean 1 over all rows; None for equal weights."""
        if self.factors is not None:
            own = self.factors.to(y.device)[y.long()]
            weight = own if weight is None else own * weight.to(own.dtype)
        if weight is None:
            return None
        return (weight.double() * self.scale).to(self.dtype)

    def batch(self, x: Tensor, y: Tensor, weight: Tensor | None, count: int) -> Batch:
        """Return a batch on the device of the settings."""
        device = self.device
        if device is None:
            return Batch(x, y, weight, count)
        return Batch(x.to(device), y.to(device), None if weight is None else weight.to(device), count)


def _weight_factors(
    settings: Settings, parts: Iterable[tuple[Tensor, Tensor | None]], class_weights: ClassWeights
) -> tuple[Tensor | None, float]:
    """Return the class weights and the reciprocal of the mean weight, from one pass over the rows."""
    where = settings.where
    rows = 0
    counts = np.zeros(0, dtype=np.int64)
    sums = np.zeros(0)
    for y, weight in parts:
        rows += len(y)
        codes = np.zeros(len(y), dtype=np.int64) if class_weights is None else y.long().cpu().numpy()
        own = np.ones(len(y)) if weight is None else weight.double().cpu().numpy()
        size = max(len(counts), int(codes.max()) + 1 if len(codes) else 0)
        counts = np.pad(counts, (0, size - len(counts))) + np.bincount(codes, minlength=size)
        sums = np.pad(sums, (0, size - len(sums))) + np.bincount(codes, weights=own, minlength=size)
    require(rows, where, "expected at least one row")
    factors: np.ndarray[Any, Any] | None = None
    if class_weights is not None:
        outputs = settings.outputs
        size = max(len(counts), 0 if outputs is None else settings.loss.class_count(outputs, where))
        counts, sums = np.pad(counts, (0, size - len(counts))), np.pad(sums, (0, size - len(sums)))
        if isinstance(class_weights, str):
            # Zero for classes without rows.
            factors = np.divide(rows, size * counts, out=np.zeros(size), where=counts > 0)
        else:
            _check_class_count(class_weights, size, where)
            factors = np.array(class_weights, dtype=np.float64)
    total = float(sums.sum() if factors is None else (factors * sums).sum())
    if not total > 0 or not np.isfinite(total) or rows / total > LARGEST_SCALE:
        problem = "0 for all rows" if not total > 0 else "too large" if total > 1 else "too small"
        raise DataError(f"{where}: the weights are {problem}; give weights above 0, of ordinary size")
    return (None if factors is None else torch.from_numpy(factors)), rows / total
