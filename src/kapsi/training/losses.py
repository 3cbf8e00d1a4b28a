"""Losses of one row: values, checks of targets, decisions, probabilities, and the curvature in the outputs.

Training minimizes the mean of `Loss.rows` over the rows, weighted by weights of mean one. Outputs are `(rows, n)`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from kapsi.errors import DataError, SpecError, attempt, refuse
from kapsi.function import Function, catalogue, option

MIN_LOG_VARIANCE, MAX_LOG_VARIANCE = -30.0, 80.0
"""Range of log-variances: e³⁰ times a squared error is finite in float32, and e⁻⁸⁰ above its smallest number."""

LOG_VARIANCE_MARGIN = 6.0
"""Distance of the log-variance of the targets from the ends of this range, a factor of 20 in the standard deviation."""


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
                f"{where}: the model has {outputs} outputs, and {self.name} needs targets of shape {shapes}; "
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
            f"{where}: class labels are integers from 0 to {count - 1} (int64), one per row, for {outputs} outputs; got {values}"
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


# ------------------------------------------------------------------------------------------------ regression


@dataclass(frozen=True, kw_only=True)
class TargetwiseLoss(Loss):
    """Base of losses that are a mean or a sum over the targets of a row; a subclass must define `elements` and `slopes`.

    Args:
        output_weights: weight of each target column, divided by the mean of all; None for equal weights.
        ignore_missing: whether NaN targets are ignored; the loss is then the mean over the observed targets.
    """

    output_weights: tuple[float, ...] | None = None
    ignore_missing: bool = False
    summed: ClassVar[bool] = False
    """Whether values are summed over the targets, not averaged."""

    def check(self) -> None:
        weights = self.output_weights
        if weights is not None and not (weights and min(weights) >= 0 and max(weights) > 0):
            refuse(f"{type(self).__name__}(output_weights=…)", "a weight of at least 0 per target, not all 0", weights)

    @abstractmethod
    def elements(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the value of each target `(rows, k)`."""

    @abstractmethod
    def slopes(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return `curvature` for equal weights and observed targets; S is diagonal."""

    @property
    def plain(self) -> bool:
        """Whether all targets have the same weight."""
        return self.output_weights is None and not self.ignore_missing

    @property
    def skips_missing(self) -> bool:
        return self.ignore_missing

    def rows(self, output: Tensor, target: Tensor) -> Tensor:
        target, weights = self.entries(columns_of(target), output)
        values = self.elements(output, target)
        values = values if weights is None else values * weights
        return values.sum(1) if self.summed else values.mean(1)

    def curvature(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        target, weights = self.entries(columns_of(target), output)
        gradient, root = self.slopes(output, target)
        if weights is None:
            return gradient, root
        weights = weights.repeat(1, self.outputs_per_target)
        return gradient * weights, root * weights.sqrt().unsqueeze(1)

    def observed(self, target: Tensor) -> Tensor | None:
        if not self.ignore_missing:
            return None
        known = (~columns_of(target).isnan()).double()
        weights = self._weights(known)
        return known.mean(1) if weights is None else (known * weights).mean(1)

    def entries(self, target: Tensor, output: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return targets without NaN, and the weight of each, `(rows, k)` or `(1, k)`; None for equal weights."""
        if self.plain:
            return target, None
        weights = self._weights(output)
        if not self.ignore_missing:
            return target, weights
        missing = target.isnan()
        known = (~missing).to(output.dtype)
        return target.masked_fill(missing, 0), known if weights is None else known * weights

    def _weights(self, like: Tensor) -> Tensor | None:
        """Return weights of the targets with mean one, `(1, k)`, in the type of a tensor."""
        if self.output_weights is None:
            return None
        mean = sum(self.output_weights) / len(self.output_weights)
        return like.new_tensor([[weight / mean for weight in self.output_weights]])

    def targets(self, outputs: int, where: str = "fit") -> int:
        columns = super().targets(outputs, where)
        if self.output_weights is not None and len(self.output_weights) != columns:
            raise SpecError(
                f"{where}: {self.name} has {len(self.output_weights)} output_weights for {columns} targets; give one for each"
            )
        return columns

    def check_targets(self, target: Tensor, outputs: int, where: str = "fit") -> None:
        missing = self.ignore_missing and target.is_floating_point()
        super().check_targets(target.masked_fill(target.isnan(), 0) if missing else target, outputs, where)


@dataclass(frozen=True)
class MSE(TargetwiseLoss, name="mse"):
    """Mean squared error: (y − f)², averaged over outputs.

    Args:
        output_weights: weight of each target column, divided by the mean of all; None for equal weights.
        ignore_missing: whether NaN targets are ignored; the loss is then the mean over the observed targets.

    Example:
        >>> import torch
        >>> y = torch.tensor([[1.0, 5.0], [2.0, float("nan")]])
        >>> MSE(output_weights=(3, 1), ignore_missing=True).rows(torch.zeros(2, 2), y)
        tensor([7., 3.])
    """

    separable: ClassVar[bool] = True
    gauss_newton: ClassVar[bool] = True
    squares: ClassVar[bool] = True

    @property
    def closed_form(self) -> bool:  # type: ignore[override]
        """Whether all outputs share the least-squares problem."""
        return self.plain

    def elements(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target.reshape(output.shape)).square()

    def mean(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target.reshape(output.shape)) if self.plain else super().mean(output, target)

    def training_metrics(self, mean: float) -> dict[str, float]:
        return {"rmse": math.sqrt(mean)} if mean >= 0 and self.output_weights is None else {}

    def slopes(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        n = output.shape[1]
        gradient = (2 / n) * (output - target.reshape(output.shape))
        eye = torch.eye(n, dtype=output.dtype, device=output.device) * math.sqrt(2 / n)
        return gradient, eye.expand(len(output), n, n)


@dataclass(frozen=True)
class Huber(TargetwiseLoss, name="huber"):
    """Huber loss: e²/2 for errors e up to δ, linear with slope δ beyond, averaged over outputs.

    Args:
        delta: δ > 0, in the unit of the target.
        output_weights, ignore_missing: see `MSE`.

    Example:
        >>> Huber(delta=0.5).rows(torch.tensor([[0.4], [2.0]]), torch.zeros(2, 1))
        tensor([0.0800, 0.8750])
    """

    delta: float = option(1.0, minimum=1e-12)
    separable: ClassVar[bool] = True

    def elements(self, output: Tensor, target: Tensor) -> Tensor:
        return F.huber_loss(output, target.reshape(output.shape), reduction="none", delta=self.delta)

    def slopes(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        error = output - target.reshape(output.shape)
        # The slope over the error, as in iteratively reweighted least squares: zero curvature would stop a step for nothing.
        curvature = (self.delta / error.abs().clamp_min(self.delta)) / output.shape[1]
        return curvature * error, curvature.sqrt().diag_embed()


@dataclass(frozen=True)
class Gaussian(TargetwiseLoss, name="gaussian"):
    """Gaussian likelihood: −log N(y; μ, σ²), summed over targets; the outputs are all μ, then all log σ².

    Args:
        output_weights, ignore_missing: see `MSE`.

    Example:
        >>> Gaussian().rows(torch.tensor([[0.0, 0.0]]), torch.tensor([[2.0]]))  # log √(2π) + 2²/2
        tensor([2.9189])
    """

    summed: ClassVar[bool] = True
    gauss_newton: ClassVar[bool] = True
    outputs_per_target: ClassVar[int] = 2

    def elements(self, output: Tensor, target: Tensor) -> Tensor:
        mean, log_variance = output.chunk(2, 1)
        log_variance = log_variance.clamp(MIN_LOG_VARIANCE, MAX_LOG_VARIANCE)
        squares = (columns_of(target) - mean).square() * torch.exp(-log_variance)
        return 0.5 * (squares + log_variance + math.log(2 * math.pi))

    def decide(self, output: Tensor) -> Tensor:
        return output.chunk(2, 1)[0]

    def output_units(self, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
        shift = 2 * deviation.log()  # of the log-variance
        low, high = MIN_LOG_VARIANCE + LOG_VARIANCE_MARGIN, MAX_LOG_VARIANCE - LOG_VARIANCE_MARGIN
        if not bool(((low <= shift) & (shift <= high)).all()):
            given = f"from {float(deviation.min()):.3g} to {float(deviation.max()):.3g}"
            raise DataError(
                f"fit(standardize=True): gaussian has log-variances from {MIN_LOG_VARIANCE:g} to {MAX_LOG_VARIANCE:g}, the targets "
                f"standard deviations {given}; use another unit"
            )
        return torch.cat([mean, shift]), torch.cat([deviation, torch.ones_like(deviation)])

    def slopes(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = output.chunk(2, 1)
        clamped = log_variance.clamp(MIN_LOG_VARIANCE, MAX_LOG_VARIANCE)
        inside, precision = log_variance == clamped, torch.exp(-clamped)
        error = mean - columns_of(target)
        gradient = torch.cat([precision * error, 0.5 * (1 - precision * error.square()) * inside], 1)
        # Fisher's information: 1/σ² for the mean, 1/2 for the log-variance.
        return gradient, torch.cat([precision.sqrt(), math.sqrt(0.5) * inside.to(precision.dtype)], 1).diag_embed()


# ------------------------------------------------------------------------------------------------ classes


@dataclass(frozen=True)
class CrossEntropy(Loss, name="cross_entropy"):
    """Cross entropy: −log p(class), p = softmax of the outputs.

    With smoothing s the target distribution has (1 − s) on the class and s/n on every class.

    Args:
        label_smoothing: s, from 0 to below 1.

    Example:
        >>> CrossEntropy().rows(torch.zeros(1, 4), torch.tensor([2]))  # log 4
        tensor([1.3863])
    """

    label_smoothing: float = option(0.0, minimum=0.0, maximum=0.999)
    classes: ClassVar[bool] = True
    shift_invariant: ClassVar[bool] = True
    unbounded: ClassVar[bool] = True

    def rows(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target.long(), reduction="none", label_smoothing=self.label_smoothing)

    def mean(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target.long(), label_smoothing=self.label_smoothing)

    def log_probabilities(self, output: Tensor) -> Tensor:
        return output.log_softmax(1)

    def curvature(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        p, s = output.softmax(1), self.label_smoothing
        n = output.shape[1]
        wanted = F.one_hot(target.long(), n).to(p.dtype) * (1 - s) + s / n
        root = p.sqrt()
        # diag(p) − ppᵀ = (diag(√p) − √p pᵀ)ᵀ(diag(√p) − √p pᵀ)
        return p - wanted, root.diag_embed() - root[:, :, None] * p[:, None, :]


@dataclass(frozen=True)
class Hinge(Loss, name="hinge"):
    """Hinge loss: max(0, 1 − margin).

    One output: margin (2·class − 1)·f. Several: f of the class minus the largest other output (Crammer, Singer).

    Example:
        >>> Hinge().rows(torch.tensor([[0.25], [3.0]]), torch.tensor([1, 1]))
        tensor([0.7500, 0.0000])
    """

    classes: ClassVar[bool] = True

    def class_count(self, outputs: int, where: str = "fit") -> int:
        return max(2, outputs)

    def rows(self, output: Tensor, target: Tensor) -> Tensor:
        if output.shape[1] == 1:
            return F.relu(1 - (2 * target.to(output.dtype) - 1) * output[:, 0])
        index = target.long()[:, None]
        others = output.scatter(1, index, float("-inf")).amax(1)
        return F.relu(1 - output.gather(1, index)[:, 0] + others)

    def decide(self, output: Tensor) -> Tensor:
        return (output[:, 0] > 0).long() if output.shape[1] == 1 else output.argmax(1)


@dataclass(frozen=True)
class SquaredHinge(Hinge, name="squared_hinge"):
    """Squared hinge loss: max(0, 1 − margin)², with the margins of the hinge loss."""

    def rows(self, output: Tensor, target: Tensor) -> Tensor:
        return super().rows(output, target).square()


@dataclass(frozen=True)
class Bernoulli(TargetwiseLoss, name="bernoulli"):
    """Bernoulli likelihood: −log p(y), p = sigmoid of the outputs, summed over outputs; targets from 0 to 1.

    Args:
        output_weights, ignore_missing: see `MSE`.

    Example:
        >>> Bernoulli().rows(torch.zeros(1, 2), torch.tensor([[0.0, 1.0]]))  # 2 log 2
        tensor([1.3863])
    """

    summed: ClassVar[bool] = True
    discrete: ClassVar[bool] = True
    separable: ClassVar[bool] = True
    unbounded: ClassVar[bool] = True

    def check_targets(self, target: Tensor, outputs: int, where: str = "fit") -> None:
        values = target if target.is_floating_point() else target.to(torch.get_default_dtype())
        super().check_targets(values, outputs, where)
        values = values.masked_fill(values.isnan(), 0)
        if len(target) and (float(values.min()) < 0 or float(values.max()) > 1):
            low, high = float(values.min()), float(values.max())
            raise DataError(f"{where}: bernoulli needs targets from 0 to 1, got {low} to {high}")

    def elements(self, output: Tensor, target: Tensor) -> Tensor:
        wanted = target.reshape(output.shape).to(output.dtype)
        return F.binary_cross_entropy_with_logits(output, wanted, reduction="none")

    def decide(self, output: Tensor) -> Tensor:
        return (output[:, 0] > 0).long() if output.shape[1] == 1 else (output > 0).long()

    def log_probabilities(self, output: Tensor) -> Tensor:
        """Return log-probabilities `(rows, 2)` of 0 and 1 for one output; for several, `(rows, n)` of 1."""
        return F.logsigmoid(torch.cat([-output, output], 1) if output.shape[1] == 1 else output)

    def slopes(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        p = output.sigmoid()
        return p - target.reshape(output.shape).to(p.dtype), (p * (1 - p)).sqrt().diag_embed()


# ------------------------------------------------------------------------------------------------ plain callables


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
