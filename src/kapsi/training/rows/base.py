"""What all rows have in common: batches, their division among processes, checks and weights."""

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

from kapsi.errors import SpecError
from kapsi.training.losses import Loss

__all__ = ["Batch", "ClassWeights", "Free", "Rows", "Settings", "contents", "fingerprint", "mixed", "part_of", "sized"]

ClassWeights: TypeAlias = tuple[float, ...] | Literal["balanced"] | None

CHECKED_AT_ONCE = 2**22
"""Numbers that are looked at in one go: temporary arrays stay small."""

LARGEST_SCALE = 1e300
"""One over the smallest mean weight that is taken."""

FINGERPRINTED = 64
"""Rows at the beginning that the checksum is of."""


class Batch(NamedTuple):
    """Some rows.

    Attributes:
        x: inputs, `(b, m)`, or a `torch.sparse_csr` tensor.
        y: targets, `(b,)` or `(b, k)`.
        weight: `(b,)`, of mean one over all rows (not over the batch), or None where all are one.
        count: rows of the whole batch over all processes: what sums of losses are divided by.
    """

    x: Tensor
    y: Tensor
    weight: Tensor | None
    count: int  # type: ignore[assignment]  # rows are counted here, and nobody asks a tuple how often it has something


class Rows(ABC):
    """Rows in some order, as batches; on the CPU or where they are.

    Attributes:
        count: number of rows, None where a stream has to be read to its end to know.
        described: what a checkpoint compares: kind, number of rows and columns, types, a checksum of the first rows.
        classes: whether targets are class numbers (or other whole numbers) by their type.
        in_features: m, the size of the last axis of the inputs.
        target_columns: k, 1 for targets without an axis of columns.
        in_memory: whether all rows are tensors already.
        sparse: whether inputs are sparse.
    """

    count: int | None
    described: dict[str, object]
    classes: bool = False
    in_features: int = 0
    target_columns: int = 1
    in_memory: bool = False
    sparse: bool = False
    settings: Settings | None = None
    """What `settle` has fixed, None before."""

    @abstractmethod
    def batches(
        self, size: int | None, *, seed: int, epoch: int, start: int = 0, rank: int = 0, ranks: int = 1
    ) -> Iterator[Batch]:
        """Yield the batches of an epoch in an order that seed and epoch fix, all but the first `start`.

        Each batch has `size` rows over all processes (the last may have fewer; where it would have a single one it is joined
        with the one before); process `rank` gets its part of each, contiguous parts whose sizes differ by at most one, some
        perhaps empty, and every process gets the same number of batches.
        """

    @abstractmethod
    def chunks(self, size: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        """Yield all rows of this process once, in their own order, at most `size` at a time; `count` is that of the chunk."""

    def length(self, size: int | None) -> int | None:
        """Return the number of batches of an epoch, None where it is not known."""
        return None if self.count is None else len(sized(self.count, size))

    def settle(
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
        """Return the rows as a loss and a model take them, checked: types, sizes, finite numbers, class numbers, weights.

        What is in memory is checked at once, everything else as it is read. Numbers of arrays, files and Python become `dtype`;
        tensors must have it already. Weights are divided by their mean, class weights are multiplied in before.

        Args:
            loss: says what targets are allowed.
            in_features: inputs of the model, None where it does not say.
            outputs: outputs of the model, None where it does not say.
            dtype: of the model's parameters.
            device: where batches are moved; None leaves them where they are.
            class_weights: one for each class, or `balanced`: rows / (classes · rows of the class).
            where: begins the messages of errors.

        Raises:
            SpecError: something does not fit.
        """
        check_class_weights(loss, class_weights, outputs, where)
        settings = Settings(loss, in_features, outputs, dtype, None if device is None else torch.device(device), where)
        made = copy.copy(self)
        made.settings = settings
        made._settled(settings, class_weights)
        return made

    def _settled(self, settings: Settings, class_weights: ClassWeights) -> None:  # noqa: B027
        """Finish what `settle` began, on the copy that it returns."""

    def divide(self, share: float, seed: int, *, classes: bool | None = None, where: str = "fit") -> tuple[Rows, Rows]:
        """Return the rows to train on and a share of them to validate on, drawn by seed.

        Args:
            share: of the rows to validate on, above 0 and below 1.
            seed: of the draw.
            classes: whether each class gives its share; None: where the targets are class numbers by their type.
            where: begins the messages of errors.

        Raises:
            SpecError: the rows are a stream, or too few.
        """
        kind = self.described.get("kind", type(self).__name__)
        raise SpecError(
            f"{where}: no share of a {kind} can be held out, since its rows are read in their own order; "
            "give the rows to validate on as validation=(x, y), or as further rows of any kind"
        )


# ------------------------------------------------------------------------------------------------ order and parts


def mixed(*numbers: int) -> int:
    """Return a seed of 32 bits that numbers such as seed and epoch fix; neighbors have nothing to do with each other."""
    return int(np.random.SeedSequence([abs(number) for number in numbers]).generate_state(1)[0])


def sized(count: int, size: int | None) -> range:
    """Return where batches begin: a single row at the end, which has no statistics for a batch norm, joins those before.

    Example:
        >>> list(sized(9, 4)), list(sized(10, 4)), list(sized(10, None))
        ([0, 4], [0, 4, 8], [0])
    """
    if size is None or size >= count:
        return range(min(count, 1))
    # Batches of one row each are what was asked for.
    return range(0, count - 1 if size > 1 else count, size)


def part_of(begin: int, end: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return which of the rows from `begin` to `end` are those of a process: sizes differ by at most one.

    Example:
        >>> [part_of(10, 15, rank, 3) for rank in range(3)]
        [(10, 12), (12, 14), (14, 15)]
    """
    base, extra = divmod(end - begin, ranks)
    first = begin + rank * base + min(rank, extra)
    return first, first + base + (rank < extra)


def fingerprint(*tensors: Tensor | None) -> str:
    """Return a checksum of the first rows of some tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            found.update(f"{tensor.dtype} {tuple(tensor.shape[1:])};".encode())
            for part in _values(tensor):
                first = part.detach()[:FINGERPRINTED].cpu().contiguous()
                if first.numel():
                    found.update(first.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def contents(rows: Rows) -> str:
    """Return a checksum of all rows, as the model gets them."""
    found = hashlib.sha256()
    for batch in rows.chunks(max(1, CHECKED_AT_ONCE // max(1, rows.in_features))):
        for tensor in (batch.x, batch.y, batch.weight):
            for part in () if tensor is None else _values(tensor):
                found.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


def _values(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout == torch.sparse_csr:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return (tensor,)


# ------------------------------------------------------------------------------------------------ checks


def bad_row(tensor: Tensor) -> int | None:
    """Return the first row with a number that is not finite, None where there is none."""
    values = tensor.values() if tensor.layout == torch.sparse_csr else tensor
    if not values.is_floating_point() or not values.numel():
        return None
    step = max(1, CHECKED_AT_ONCE * len(values) // values.numel())
    for i in range(0, len(values), step):
        part = values[i : i + step]
        # The sum is quick and needs no memory; where finite numbers overflow, a closer look follows.
        if not bool(torch.isfinite(part.sum())):
            bad = (~torch.isfinite(part)).reshape(len(part), -1).any(1)
            if bool(bad.any()):
                place = i + int(bad.nonzero()[0, 0])
                if tensor.layout == torch.sparse_csr:
                    return int(torch.searchsorted(tensor.crow_indices(), place, right=True)) - 1
                return place
    return None


def bad_weight(weight: Tensor) -> int | None:
    """Return the first row whose weight is negative or not finite, None where there is none."""
    if len(weight) and not (bool(weight.min() >= 0) and bool(torch.isfinite(weight.sum()))):
        bad = ~(torch.isfinite(weight) & (weight >= 0))
        if bool(bad.any()):
            return int(bad.nonzero()[0, 0])
    return None


def check_class_weights(loss: Loss, weights: ClassWeights, outputs: int | None, where: str) -> None:
    """Raise a `SpecError` where weights of classes do not fit a loss."""
    if weights is None:
        return
    if not loss.classes:
        raise SpecError(f"{where}: class_weights are for losses of classes, and {loss.name} is none; leave them out")
    if isinstance(weights, tuple) and outputs is not None:
        count = loss.class_count(outputs, where)
        if len(weights) != count:
            raise SpecError(
                f"{where}: class_weights has {len(weights)} weights for {count} classes; give one for each class"
            )


class Free(NamedTuple):
    """Which types may be changed: those of arrays, files and Python, not those that a tensor was given."""

    x: bool
    y: bool


@dataclass(frozen=True)
class Settings:
    """What rows are made into, and checked against, once loss and model are known.

    Args:
        loss: says what targets are allowed.
        in_features: inputs of the model, None if unknown.
        outputs: outputs of the model, None if unknown.
        dtype: of the model.
        device: where batches go, None where they are.
        where: begins the messages of errors.
        factors: weight of each class, None where there are none.
        scale: one over the mean weight.
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
        """Return targets as the loss takes them, as far as their type may be changed."""
        if self.loss.classes:
            return y.long() if free and not y.is_floating_point() else y
        return y.to(self.dtype) if free and y.dtype != self.dtype else y

    def checked(self, x: Tensor, y: Tensor, free: Free, named: Callable[[int], str]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets in their final types.

        Args:
            x: inputs.
            y: targets.
            free: which types may be changed.
            named: what a row is called in the message of an error.

        Raises:
            SpecError: they do not fit.
        """
        where, loss = self.where, self.loss
        y = self.targets(y, free.y)
        self._check_finite(x, "inputs", named)
        self._check_finite(y, "targets", named)
        if loss.classes or not y.is_floating_point():
            self.check_targets(y)
        if (not free.x and x.dtype != self.dtype) or (y.is_floating_point() and not free.y and y.dtype != self.dtype):
            raise SpecError(
                f"{where}: inputs are {x.dtype}, targets {y.dtype} and the model {self.dtype}; they must agree"
            )
        if self.in_features is not None and x.shape[-1] != self.in_features:
            raise SpecError(f"{where}: the model takes {self.in_features} inputs, got x of shape {tuple(x.shape)}")
        if y.is_floating_point():
            self.check_targets(y)
        return self.inputs(x), y if loss.classes else y.to(self.dtype)

    def check_targets(self, y: Tensor, named: Callable[[int], str] | None = None) -> None:
        """Raise a `SpecError` where targets do not fit the loss and the outputs."""
        if named is not None:
            self._check_finite(y, "targets", named)
        outputs = self.outputs
        if outputs is None:  # as many as make the targets fit, so that the rest is checked
            columns = 1 if y.dim() < 2 else int(y.shape[1])
            most = int(y.max()) + 1 if self.loss.classes and len(y) and not y.is_floating_point() else 2
            outputs = max(2, most) if self.loss.classes else columns * self.loss.outputs_per_target
        self.loss.check_targets(y, outputs, self.where)

    def check_weights(self, weight: Tensor | None, named: Callable[[int], str]) -> None:
        """Raise a `SpecError` where weights are negative or not finite."""
        if weight is None:
            return
        if weight.is_complex():
            raise SpecError(f"{self.where}: expected weights that are real numbers, got {weight.dtype}")
        place = bad_weight(weight)
        if place is not None:
            given = weight[place].item()
            raise SpecError(f"{self.where}: weights must be finite and at least 0; that of {named(place)} is {given}")

    def _check_finite(self, tensor: Tensor, what: str, named: Callable[[int], str]) -> None:
        place = bad_row(tensor)
        if place is not None:
            raise SpecError(f"{self.where}: inputs and targets must be finite; the {what} of {named(place)} are not")

    def weighed(self, parts: Iterable[tuple[Tensor, Tensor | None]], class_weights: ClassWeights) -> Self:
        """Return the settings with the weights of classes, and the mean that weights are divided by.

        Args:
            parts: targets and weights of all rows, checked.
            class_weights: as in `Rows.settle`.

        Raises:
            SpecError: all weights are zero.
        """
        factors, scale = _weigh(self, parts, class_weights)
        return replace(self, factors=factors, scale=scale)

    def weights(self, y: Tensor, weight: Tensor | None) -> Tensor | None:
        """Return the weights of some rows, of mean one over all rows, None where all are one."""
        if self.factors is not None:
            own = self.factors.to(y.device)[y.long()]
            weight = own if weight is None else own * weight.to(own.dtype)
        if weight is None:
            return None
        return (weight.double() * self.scale).to(self.dtype)

    def batch(self, x: Tensor, y: Tensor, weight: Tensor | None, count: int) -> Batch:
        """Return a batch, on its device."""
        device = self.device
        if device is None:
            return Batch(x, y, weight, count)
        return Batch(x.to(device), y.to(device), None if weight is None else weight.to(device), count)


def _weigh(
    settings: Settings, parts: Iterable[tuple[Tensor, Tensor | None]], class_weights: ClassWeights
) -> tuple[Tensor | None, float]:
    """Return the factor of each class, and one over the mean weight, from one pass over the rows."""
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
    if not rows:
        raise SpecError(f"{where}: expected at least one row")
    factors: np.ndarray[Any, Any] | None = None
    if class_weights is not None:
        outputs = settings.outputs
        size = max(len(counts), 0 if outputs is None else settings.loss.class_count(outputs, where))
        counts, sums = np.pad(counts, (0, size - len(counts))), np.pad(sums, (0, size - len(sums)))
        if isinstance(class_weights, str):
            # A class without rows gets no weight: there is nothing to be weighed.
            factors = np.divide(rows, size * counts, out=np.zeros(size), where=counts > 0)
        elif len(class_weights) != size:
            raise SpecError(
                f"{where}: class_weights has {len(class_weights)} weights for {size} classes; give one for each"
            )
        else:
            factors = np.array(class_weights, dtype=np.float64)
    total = float(sums.sum() if factors is None else (factors * sums).sum())
    if not total > 0 or not np.isfinite(total) or rows / total > LARGEST_SCALE:
        what = "0 for all rows" if not total > 0 else "too large" if total > 1 else "too small"
        raise SpecError(f"{where}: the weights are {what}; give some that are above 0, of ordinary size")
    return (None if factors is None else torch.from_numpy(factors)), rows / total
