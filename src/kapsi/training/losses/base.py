"""Base of losses: values of one row, checks of targets, decisions, probabilities, and the curvature in the outputs.

Training minimizes the mean of `Loss.rows` over the rows, weighted by weights of mean one. Outputs are `(rows, n)`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kapsi.errors import DataError, SpecError, attempt
from kapsi.function import Function, catalogue
from kapsi.text import counted


def columns_of(target: Tensor) -> Tensor:
    """Return targets with an axis of columns, `(rows, k)`."""
    return target[:, None] if target.dim() == 1 else target


class Loss(Function, role="loss"):
    """A loss per row, a function of the outputs and the target of the row; a subclass must define `rows`.

    For a regression loss, targets have the shape of the outputs, and decisions are the outputs. A classification loss sets
    `classes`; targets are integer class labels, and the largest output is the decision.

    Example:
        >>> from dataclasses import dataclass
        >>> import torch, kapsi as kp
        >>> @dataclass(frozen=True)
        ... class LogCosh(kp.Loss, name="log_cosh"):
        ...     def rows(self, output, target):
        ...         return torch.log(torch.cosh(output - target.reshape(output.shape))).mean(1)
        >>> kp.TrainConfig(loss="log_cosh").loss
        LogCosh()
    """

    classes: ClassVar[bool] = False
    """Targets are integer class labels, `(rows,)`."""
    discrete: ClassVar[bool] = False
    """Decisions are classes, or zeros and ones; implied by `classes`."""
    separable: ClassVar[bool] = False
    """The curvature in the outputs is diagonal: outputs of a linear model are independent problems."""
    closed_form: ClassVar[bool] = False
    """The minimum over the parameters of a linear model has a closed form (least squares)."""
    gauss_newton: ClassVar[bool] = False
    """`auto` uses damped Gauss–Newton steps for small problems."""
    squares: ClassVar[bool] = False
    """A `TargetwiseLoss` that is the weighted mean of the squared errors of all targets."""
    log_link: ClassVar[bool] = False
    """Outputs are logarithms of means; targets are at least 0, in any unit."""
    shift_invariant: ClassVar[bool] = False
    """Adding a constant to all outputs of a row changes nothing."""
    unbounded: ClassVar[bool] = False
    """Without a penalty there is no minimum if a linear model separates the classes."""
    outputs_per_target: ClassVar[int] = 1
    """Number of outputs for each target column."""

    @abstractmethod
    def rows(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each row, `(rows,)`, differentiable in the outputs `(rows, n)`."""

    def mean(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean of `rows`; override for a faster torch operation."""
        return self.rows(output, target).mean()

    def dry_run(self, output: Tensor, target: Tensor, weighted: bool) -> None:
        """Raise a `SpecError` if `rows` or `mean` fails, or returns anything but differentiable values, `(rows,)` or `()`."""
        where = f"loss: {self.name}.rows"
        values = attempt(where, self.rows, output, target)
        check_values(where, values, output, f"one value per row, ({len(output)},)", ((len(output),),))
        where = f"loss: {self.name}.mean"
        check_values(where, attempt(where, self.mean, output, target), output, "a scalar", ((),))

    def decide(self, output: Tensor) -> Tensor:
        """Return predictions: real values `(rows, k)`, or integer class labels `(rows,)`."""
        return output.argmax(1) if self.classes else output

    def log_probabilities(self, output: Tensor) -> Tensor:
        """Return log-probabilities of the classes.

        Raises:
            SpecError: the loss has none.
        """
        raise SpecError(f"{self.name} has no probabilities; {losses_with('log_probabilities')} have")

    def curvature(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient g `(rows, n)` of the loss in the outputs, and a factor S `(rows, k, n)` of a curvature H = SᵀS.

        H is the Hessian if the loss is convex in the outputs (Gauss–Newton for squares; Fisher's for likelihoods).

        Raises:
            SpecError: the loss has no curvature.
        """
        raise SpecError(f"{self.name} has no curvature; {losses_with('curvature')} have")

    def diagonal_curvature(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient and the diagonal of H in `curvature`, `(rows, n)` each; override to save the factor."""
        gradient, root = self.curvature(output, target)
        return gradient, root.square().sum(1)

    @property
    def has_curvature(self) -> bool:
        """Whether `curvature` is defined."""
        return type(self).curvature is not Loss.curvature

    def training_metrics(self, mean: float) -> dict[str, float]:
        """Return metrics derived from the mean loss, for training rows without a further forward pass."""
        return {}

    @property
    def skips_missing(self) -> bool:
        """Whether missing targets (NaN) are ignored."""
        return False

    def observed(self, target: Tensor) -> Tensor | None:
        """Return the observed share of the targets of each row in float64, `(rows,)`; None if none may be missing."""
        return None

    def output_units(self, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
        """Return offset and factor of each output, `(n,)`, from standardized targets to targets in the units of the data.

        Args:
            mean, deviation: mean and standard deviation of each target column, `(k,)` in float64.

        Raises:
            SpecError: unknown for this loss, with several outputs for each target.
        """
        if self.outputs_per_target != 1:
            raise SpecError(
                f"fit(standardize=True): {self.name} has {self.outputs_per_target} outputs for each target and no method "
                "output_units with the unit of each; add the method, or scale the data and leave standardize out"
            )
        return mean, deviation

    # -------------------------------------------------------------------------------- checks

    def targets(self, outputs: int, where: str = "fit") -> int:
        """Return the number of target columns for a number of outputs."""
        if outputs % self.outputs_per_target:
            raise SpecError(
                f"{where}: {self.name} needs {self.outputs_per_target} outputs for each target; the model has {outputs}"
            )
        return outputs // self.outputs_per_target

    def class_count(self, outputs: int, where: str = "fit") -> int:
        """Return the number of classes for a number of outputs."""
        if outputs < 2:
            raise SpecError(
                f"{where}: {self.name} needs one output per class, at least 2; the model has {outputs}; for one output use loss "
                "bernoulli (targets 0 and 1) or mse (real values)"
            )
        return outputs

    def check_outputs(self, outputs: int, where: str) -> None:
        """Raise a `SpecError` if a model with this number of outputs cannot have this loss."""
        (self.class_count if self.classes else self.targets)(outputs, where)

    def check_targets(self, target: Tensor, outputs: int, where: str = "fit") -> None:
        """Raise a `DataError` if targets, of some or of all rows, do not fit a model with this number of outputs."""
        if self.classes:
            self._check_classes(target, outputs, where)
            return
        if not target.is_floating_point():
            raise DataError(f"{where}: {self.name} needs targets of a floating-point type, got {target.dtype}")
        columns = self.targets(outputs, where)
        if target.shape[1:] not in ((columns,), *([()] if columns == 1 else [])):
            shapes = f"(rows, {columns})" + (" or (rows,)" if columns == 1 else "")
            raise DataError(
                f"{where}: the model has {counted(outputs, 'output')}, and {self.name} needs targets of shape {shapes}; "
                f"got targets of shape {tuple(target.shape)}"
            )
        if not bool(torch.isfinite(target).all()):
            raise DataError(f"{where}: inputs and targets must be finite")

    def _check_classes(self, target: Tensor, outputs: int, where: str) -> None:
        if target.is_floating_point() or target.dim() != 1:
            shape = f"{target.dtype} of shape {tuple(target.shape)}"
            raise DataError(f"{where}: {self.name} needs integer class labels of shape (rows,), got {shape}")
        count, values = self.class_count(outputs, where), str(target.dtype)
        if target.dtype in (torch.int64, torch.int32, torch.uint8):
            if not len(target):
                return
            low, high = (int(bound) for bound in target.aminmax())
            if low >= 0 and high < count:
                return
            values += f" from {low} to {high}"
        raise DataError(
            f"{where}: class labels are integers from 0 to {count - 1} (int64), one per row, "
            f"for {counted(outputs, 'output')}; got {values}"
        )

    @classmethod
    def of_callable(cls, function: Callable[..., Any]) -> Self | None:
        return CallableLoss(function) if cls is Loss else None  # type: ignore[return-value]


def check_values(where: str, values: Any, output: Tensor, wanted: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Raise a `SpecError` unless values are a tensor of an allowed shape, and differentiable if the output is."""
    if not isinstance(values, Tensor) or values.shape not in shapes:
        result = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
    elif values.is_complex() or (output.requires_grad and not values.is_floating_point()):
        wanted, result = "a tensor of a floating-point type", str(values.dtype)
    elif output.requires_grad and not values.requires_grad:
        wanted, result = "a tensor differentiable in the outputs", "one without a gradient (detach, no_grad, argmax?)"
    else:
        return
    raise SpecError(f"{where} must return {wanted}; got {result}")


def losses_with(method: str) -> str:
    """Return the names of the losses that override a method."""
    kinds = (kind for kind in catalogue("loss") if issubclass(kind, Loss))
    return ", ".join(kind.name for kind in kinds if getattr(kind, method) is not getattr(Loss, method))


@dataclass(frozen=True)
class CallableLoss(Loss):
    """The loss of a plain callable `(output, target)`, returning a value per element or row, or a mean for rows
    without weights.

    Args:
        function: called with outputs `(rows, n)` and targets of the same shape, or integer class labels `(rows,)`; differentiable.
        of_classes: whether the targets are integer class labels.
    """

    function: Callable[..., Any]
    of_classes: bool = False
    name: ClassVar[str] = "callable"

    # No registered name: files cannot hold a callable.
    def __new__(cls, *_: Any, **__: Any) -> Self:
        return object.__new__(cls)

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", self.of_classes)

    def rows(self, output: Tensor, target: Tensor) -> Tensor:
        return self._call(output, target).expand(len(output))

    def _call(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the result, with values per element averaged over the outputs."""
        # (rows,) against (rows, 1) would broadcast to (rows, rows).
        alike = not self.classes and target.numel() == output.numel()
        values = self.function(output, target.reshape(output.shape) if alike else target)
        return values.mean(1) if isinstance(values, Tensor) and values.shape == output.shape else values

    def dry_run(self, output: Tensor, target: Tensor, weighted: bool) -> None:
        where = f"loss: {name_of(self.function)}"
        values = attempt(where, self._call, output, target)
        check_values(where, values, output, *value_or_mean(values, len(output), weighted))

    def check_targets(self, target: Tensor, outputs: int, where: str = "fit") -> None:
        if self.classes:
            super().check_targets(target, outputs, where)


def value_or_mean(values: Any, count: int, weighted: bool) -> tuple[str, tuple[tuple[int, ...], ...]]:
    """Return the allowed results of a plain callable, in words and as shapes: values per row, or a mean without weights."""
    if not weighted:
        return f"one value per row, ({count},), or their mean", ((), (count,))
    mean = isinstance(values, Tensor) and values.dim() == 0
    return f"one value per row, ({count},)" + ", since weights have no effect on a mean" * mean, ((count,),)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a callable for messages and records."""
    return str(getattr(function, "__name__", type(function).__name__))
