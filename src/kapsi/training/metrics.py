"""Metrics of a model on some rows, from sums over rows: sums of parts add up."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor

from kapsi.errors import DataError, SpecError, attempt
from kapsi.function import Function, catalogue
from kapsi.training.losses.base import Loss, check_values, columns_of, losses_with, name_of, value_or_mean


class Metric(Function, role="metric"):
    """A score of predictions; a subclass must define `rows`, or `sums` and `value`.

    The default is the weighted mean of `rows`. Early stopping on a metric follows `greater_is_better`.

    Example:
        >>> from dataclasses import dataclass
        >>> import kapsi as kp
        >>> @dataclass(frozen=True)
        ... class Within(kp.Metric, name="within"):
        ...     tolerance: float = 0.1
        ...     greater_is_better = True
        ...     def rows(self, prediction, target):
        ...         return ((prediction - target.reshape(prediction.shape)).abs() <= self.tolerance).double().mean(1)
        >>> kp.TrainConfig(metrics={"kind": "within", "tolerance": 0.5}).metrics
        (Within(tolerance=0.5),)
    """

    greater_is_better: ClassVar[bool] = False
    discrete: ClassVar[bool | None] = None
    """Whether predictions must be classes (True) or real values (False); None for both."""
    gathered: ClassVar[bool] = False
    """Whether `sums` needs all rows at once, because sums of parts do not add up."""
    skips_missing: ClassVar[bool] = False
    """Whether missing targets (NaN) are ignored, for losses that ignore them."""

    def rows(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the value per row, `(rows,)`, from the decisions of the loss."""
        raise SpecError(f"the metric {self.name} defines neither rows nor sums and value")

    def sums(self, output: Tensor, target: Tensor, weight: Tensor | None, loss: Loss) -> Tensor:
        """Return sums over rows in float64, a vector of fixed length."""
        values = self.rows(loss.decide(output), target).double()
        w = torch.ones_like(values) if weight is None else weight.double()
        return torch.stack([w.sum(), w @ values])

    def value(self, sums: list[float]) -> float:
        """Return the metric computed from sums over all rows."""
        return sums[1] / sums[0]

    def dry_run(self, output: Tensor, target: Tensor, weight: Tensor | None, loss: Loss) -> None:
        """Raise a `SpecError` if `rows` or `sums` fails on a few rows, or returns anything but values per row, or a vector."""
        where, count = f"metrics: {self.name}", len(output)
        if type(self).sums is Metric.sums:
            values = attempt(f"{where}.rows", self.rows, loss.decide(output), target)
            check_values(f"{where}.rows", values, output, f"one value per row, ({count},)", ((count,),))
        else:
            sums = attempt(f"{where}.sums", self.sums, output, target, weight, loss)
            check_values(
                f"{where}.sums", sums, output, "a vector", ((sums.numel(),) if isinstance(sums, Tensor) else (),)
            )

    def check_loss(self, loss: Loss, outputs: int = 1) -> None:
        """Raise a `SpecError` if predictions of a loss, or of several outputs, do not have this metric."""
        if self.discrete is not None and self.discrete != (loss.classes or loss.discrete):
            kind, other = ("classes", "real values") if self.discrete else ("real values", "classes")
            raise SpecError(
                f"metrics: {self.name} scores {kind}, and the loss {loss.name} predicts {other}; leave it out"
            )
        if loss.skips_missing and not self.skips_missing:
            able = ", ".join(sorted(kind.name for kind in catalogue("metric") if cast(Any, kind).skips_missing))
            raise SpecError(f"metrics: {self.name} does not ignore missing targets, as {able} do; leave it out")

    @classmethod
    def of_callable(cls, function: Callable[..., Any]) -> Self | None:
        return CallableMetric(function) if cls is Metric else None  # type: ignore[return-value]


class TargetwiseMetric(Metric):
    """Base of means over rows and targets; a subclass must define `elements`. Missing targets are ignored."""

    skips_missing: ClassVar[bool] = True

    @abstractmethod
    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Return the value of each target `(rows, k)` in float64."""

    def rows(self, prediction: Tensor, target: Tensor) -> Tensor:
        return self.elements(columns_of(prediction), columns_of(target)).mean(1)

    def sums(self, output: Tensor, target: Tensor, weight: Tensor | None, loss: Loss) -> Tensor:
        if not loss.skips_missing:
            return super().sums(output, target, weight, loss)
        target = columns_of(target)
        known = ~target.isnan()
        values = self.elements(columns_of(loss.decide(output)), target).masked_fill(~known, 0)
        shares = known.double().mean(1)
        w = torch.ones_like(shares) if weight is None else weight.double()
        return torch.stack([w @ shares, w @ values.mean(1)])


@dataclass(frozen=True)
class Accuracy(TargetwiseMetric, name="accuracy"):
    """Fraction of rows with the correct class; for several zeros and ones per row, the fraction of correct ones.

    Source: the definition of `sklearn.metrics.accuracy_score`.
    """

    greater_is_better: ClassVar[bool] = True
    discrete: ClassVar[bool | None] = True

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        truth = target > 0.5 if target.is_floating_point() else target
        return (prediction == truth).double()


@dataclass(frozen=True)
class MeanSquaredError(TargetwiseMetric, name="mse", aliases=("mean_squared_error",)):
    """Mean squared error, in the squared unit of the target, averaged over targets.

    Source: the definition of `sklearn.metrics.mean_squared_error`.
    """

    discrete: ClassVar[bool | None] = False

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        return (prediction.double() - target.double()).square()


@dataclass(frozen=True)
class RMSE(MeanSquaredError, name="rmse"):
    """Root mean squared error, in the unit of the target; squares are averaged over targets before the root (not so in sklearn)."""

    def value(self, sums: list[float]) -> float:
        return math.sqrt(sums[1] / sums[0])


@dataclass(frozen=True)
class MAE(TargetwiseMetric, name="mae", aliases=("mean_absolute_error",)):
    """Mean absolute error, in the unit of the target, averaged over targets.

    Source: the definition of `sklearn.metrics.mean_absolute_error`.
    """

    discrete: ClassVar[bool | None] = False

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        return (prediction.double() - target.double()).abs()


@dataclass(frozen=True)
class MAPE(TargetwiseMetric, name="mape", aliases=("mean_absolute_percentage_error",)):
    """Mean absolute relative error abs(y − f) / abs(y), a fraction, averaged over targets; zeros count as 2.2e-16.

    Source: the definition of `sklearn.metrics.mean_absolute_percentage_error`.
    """

    discrete: ClassVar[bool | None] = False

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        values = target.double()
        return (prediction.double() - values).abs() / values.abs().clamp_min(torch.finfo(torch.float64).eps)


@dataclass(frozen=True)
class MedianAbsoluteError(Metric, name="median_absolute_error"):
    """Median of the absolute errors, in the unit of the target, averaged over targets.

    A weight counts a row that many times; between two middle rows the median is their mean.

    Source: the definition of `sklearn.metrics.median_absolute_error`.
    """

    discrete: ClassVar[bool | None] = False
    gathered: ClassVar[bool] = True

    def sums(self, output: Tensor, target: Tensor, weight: Tensor | None, loss: Loss) -> Tensor:
        errors = (columns_of(loss.decide(output)).double() - columns_of(target).double()).abs()
        w = torch.ones(len(errors), dtype=torch.float64, device=errors.device) if weight is None else weight.double()
        ordered, order = errors.sort(0)
        share = w[order].cumsum(0) / w.sum()
        # The first rows at and above one half; a share within rounding of one half is one half.
        low, high = ((share < 0.5 + shift).sum(0).clamp_max(len(errors) - 1) for shift in (-1e-12, 1e-12))
        middle = (ordered.gather(0, low.unsqueeze(0)) + ordered.gather(0, high.unsqueeze(0))) / 2
        return torch.stack([w.new_ones(()), middle.mean()])


@dataclass(frozen=True)
class R2(Metric, name="r2"):
    """Coefficient of determination: 1 − Σ(y − f)²/Σ(y − ȳ)², both sums over all targets.

    As `r2_score(…, multioutput="variance_weighted")` of scikit-learn. For constant targets: 1 for exact predictions, otherwise 0.
    """

    greater_is_better: ClassVar[bool] = True
    discrete: ClassVar[bool | None] = False
    gathered: ClassVar[bool] = True  # sums of y² lose the digits of a standard deviation far below the mean
    skips_missing: ClassVar[bool] = True

    def sums(self, output: Tensor, target: Tensor, weight: Tensor | None, loss: Loss) -> Tensor:
        values = columns_of(target).double()
        known = ~values.isnan() if loss.skips_missing else torch.ones_like(values, dtype=torch.bool)
        values = values.masked_fill(~known, 0)
        squares = (columns_of(loss.decide(output)).double() - values).square()
        w = known.double() if weight is None else known * weight.double().unsqueeze(1)
        return torch.stack([(w * squares).sum(), _squared_deviations(values, w)])

    def value(self, sums: list[float]) -> float:
        squares, deviations = sums
        return 1 - squares / deviations if deviations else float(squares == 0)


@dataclass(frozen=True)
class ExplainedVariance(Metric, name="explained_variance"):
    """Explained variance: 1 − Var(y − f)/Var(y), variances summed over all targets: `r2` without a constant error.

    As `explained_variance_score(…, multioutput="variance_weighted")` of scikit-learn. For constant targets: 1 for errors without
    variance, otherwise 0.

    Source: the definition of `sklearn.metrics.explained_variance_score(…, multioutput="variance_weighted")`.
    """

    greater_is_better: ClassVar[bool] = True
    discrete: ClassVar[bool | None] = False
    gathered: ClassVar[bool] = True

    def sums(self, output: Tensor, target: Tensor, weight: Tensor | None, loss: Loss) -> Tensor:
        values = columns_of(target).double()
        errors = columns_of(loss.decide(output)).double() - values
        w = torch.ones_like(values) if weight is None else weight.double().unsqueeze(1).expand_as(values)
        return torch.stack([_squared_deviations(errors, w, size=values), _squared_deviations(values, w)])

    def value(self, sums: list[float]) -> float:
        errors, deviations = sums
        return 1 - errors / deviations if deviations else float(errors == 0)


def _squared_deviations(values: Tensor, weight: Tensor, size: Tensor | None = None) -> Tensor:
    """Return Σ w (v − v̄)² over all columns; deviations of nothing but rounding, relative to `size`, count as zero."""
    total = weight.sum(0).clamp_min(torch.finfo(torch.float64).tiny)
    mean = (weight * values).sum(0) / total
    squares = (weight * (values - mean).square()).sum(0)
    largest = (values if size is None else size).abs().amax(0)
    rounding = total * (8 * torch.finfo(torch.float64).eps * largest).square()
    return torch.where(squares > rounding, squares, 0).sum()


@dataclass(frozen=True)
class LogLoss(Metric, name="log_loss"):
    """Mean −log p of the true class, from the probabilities of the loss; no class has less than 2.3e-308.

    For targets from 0 to 1, −y log p − (1 − y) log(1 − p), averaged over targets.

    Source: the definition of `sklearn.metrics.log_loss`.
    """

    discrete: ClassVar[bool | None] = True

    def sums(self, output: Tensor, target: Tensor, weight: Tensor | None, loss: Loss) -> Tensor:
        lowest, scores = math.log(2.3e-308), output.double()
        if loss.classes:
            log_p = loss.log_probabilities(scores).gather(1, target.long()[:, None])[:, 0].clamp_min(lowest)
        else:  # zeros and ones, or probabilities of one
            zero, one = loss.log_probabilities(scores.reshape(-1, 1)).clamp_min(lowest).unbind(1)
            share = target.reshape(-1).double()
            log_p = ((1 - share) * zero + share * one).reshape(scores.shape).mean(1)
        values = -log_p
        w = torch.ones_like(values) if weight is None else weight.double()
        return torch.stack([w.sum(), w @ values])

    def check_loss(self, loss: Loss, outputs: int = 1) -> None:
        super().check_loss(loss, outputs)
        _check_probabilities(self, loss)


class ClassCounts(Metric):
    """A metric of the counts of each class: hits, rows predicted, and rows that have the class.

    Targets are integer class labels, or zeros and ones for one output.
    """

    greater_is_better: ClassVar[bool] = True
    discrete: ClassVar[bool | None] = True

    def sums(self, output: Tensor, target: Tensor, weight: Tensor | None, loss: Loss) -> Tensor:
        predicted, truth = loss.decide(output).reshape(-1), _labels(self, target, loss)
        count = loss.class_count(output.shape[1]) if loss.classes else 2
        w = torch.ones_like(truth, dtype=torch.float64) if weight is None else weight.double()
        pairs = ((truth, w * (predicted == truth)), (predicted, w), (truth, w))
        return torch.cat([w.new_zeros(count).index_add_(0, classes, weights) for classes, weights in pairs])

    def check_loss(self, loss: Loss, outputs: int = 1) -> None:
        super().check_loss(loss, outputs)
        _check_single(self, loss, outputs)

    def value(self, sums: list[float]) -> float:
        count = len(sums) // 3
        return self.of_counts(sums[:count], sums[count : 2 * count], sums[2 * count :])

    @abstractmethod
    def of_counts(self, hits: list[float], predicted: list[float], true: list[float]) -> float:
        """Return the metric from the weighted counts of each class."""


def _averaged(hits: list[float], totals: list[float]) -> float:
    """Return hits / total of class 1 for two classes, averaged over the classes for more; 0 for a class without rows."""
    ratios = [hit / total if total else 0.0 for hit, total in zip(hits, totals, strict=True)]
    return ratios[1] if len(ratios) == 2 else sum(ratios) / len(ratios)


@dataclass(frozen=True)
class F1(ClassCounts, name="f1"):
    """F1 score, 2·TP/(2·TP + FP + FN): of class 1 for two classes, averaged over the classes for more.

    Targets are integer class labels, or zeros and ones for one output.

    Source: the definition of `sklearn.metrics.f1_score(…, average="binary" or "macro")`.
    """

    def of_counts(self, hits: list[float], predicted: list[float], true: list[float]) -> float:
        return _averaged([2 * hit for hit in hits], [a + b for a, b in zip(predicted, true, strict=True)])


@dataclass(frozen=True)
class Precision(ClassCounts, name="precision"):
    """Precision, TP/(TP + FP): of class 1 for two classes, averaged over the classes for more; 0 if never predicted.

    Targets are integer class labels, or zeros and ones for one output.

    Source: the definition of `sklearn.metrics.precision_score(…, average="binary" or "macro")`.
    """

    def of_counts(self, hits: list[float], predicted: list[float], true: list[float]) -> float:
        return _averaged(hits, predicted)


@dataclass(frozen=True)
class Recall(ClassCounts, name="recall"):
    """Recall, TP/(TP + FN): of class 1 for two classes, averaged over the classes for more; 0 for a class without rows.

    Targets are integer class labels, or zeros and ones for one output.

    Source: the definition of `sklearn.metrics.recall_score(…, average="binary" or "macro")`.
    """

    def of_counts(self, hits: list[float], predicted: list[float], true: list[float]) -> float:
        return _averaged(hits, true)


@dataclass(frozen=True)
class BalancedAccuracy(ClassCounts, name="balanced_accuracy"):
    """Mean of the recall TP/(TP + FN) over the classes that have rows.

    Targets are integer class labels, or zeros and ones for one output.

    Source: the definition of `sklearn.metrics.balanced_accuracy_score`.
    """

    def of_counts(self, hits: list[float], predicted: list[float], true: list[float]) -> float:
        recalls = [hit / total for hit, total in zip(hits, true, strict=True) if total]
        return sum(recalls) / len(recalls)


@dataclass(frozen=True)
class Matthews(ClassCounts, name="matthews", aliases=("matthews_corrcoef",)):
    """Matthews' correlation of predicted and true classes: (c·s − Σ pₖtₖ) / √((s² − Σ pₖ²)(s² − Σ tₖ²)), from −1 to 1.

    c are the hits, s the rows, pₖ the rows predicted and tₖ the rows that have class k; 0 for a single class on either side.
    Targets are integer class labels, or zeros and ones for one output.

    Source: the definition of `sklearn.metrics.matthews_corrcoef`.
    """

    def of_counts(self, hits: list[float], predicted: list[float], true: list[float]) -> float:
        rows = sum(true)
        p, t = [a / rows for a in predicted], [b / rows for b in true]
        # 1 − Σ p² as Σ p (1 − p): no difference of large numbers.
        spreads = [sum(share * (1 - share) for share in shares) for shares in (p, t)]
        if min(spreads) <= 1e-15:
            return 0.0
        covariance = sum(hits) / rows - sum(a * b for a, b in zip(p, t, strict=True))
        return covariance / math.sqrt(spreads[0] * spreads[1])


@dataclass(frozen=True)
class AUC(Metric, name="auc"):
    """Area under the ROC curve; for more than two classes averaged one-vs-rest.

    Targets are integer class labels, or zeros and ones for one output.

    Source: the definition of `sklearn.metrics.roc_auc_score(…, multi_class="ovr")`.
    """

    greater_is_better: ClassVar[bool] = True
    discrete: ClassVar[bool | None] = True
    gathered: ClassVar[bool] = True

    def sums(self, output: Tensor, target: Tensor, weight: Tensor | None, loss: Loss) -> Tensor:
        from sklearn.metrics import roc_auc_score

        truth = _labels(self, target, loss).cpu().numpy()
        if output.shape[1] <= 2:
            score = (output[:, -1] - output[:, 0] if output.shape[1] == 2 else output[:, 0]).double()
        else:
            score = loss.log_probabilities(output.double()).exp()
        w = None if weight is None else weight.double().cpu().numpy()
        present = len(set(truth.tolist())) == max(2, output.shape[1])
        area = roc_auc_score(truth, score.cpu().numpy(), sample_weight=w, multi_class="ovr") if present else math.nan
        return torch.tensor([1.0, area], dtype=torch.float64)

    def check_loss(self, loss: Loss, outputs: int = 1) -> None:
        super().check_loss(loss, outputs)
        _check_single(self, loss, outputs)
        if outputs > 2:
            _check_probabilities(self, loss)


def _check_single(metric: Metric, loss: Loss, outputs: int) -> None:
    if outputs > 1 and not loss.classes:
        raise SpecError(f"metrics: {metric.name} needs one target of zeros and ones, got {outputs}; leave it out")


def _check_probabilities(metric: Metric, loss: Loss) -> None:
    if type(loss).log_probabilities is Loss.log_probabilities:
        able = losses_with("log_probabilities")
        raise SpecError(
            f"metrics: {metric.name} needs the probabilities of {able}, the loss is {loss.name}; leave it out"
        )


def _labels(metric: Metric, target: Tensor, loss: Loss) -> Tensor:
    """Return integer class labels, `(rows,)`; refuse targets between 0 and 1."""
    labels = target.long().reshape(-1)
    if not loss.classes and not torch.equal(labels.to(target.dtype), target.reshape(-1)):
        raise DataError(f"metrics: {metric.name} needs targets 0 or 1, not between; leave it out")
    return labels


@dataclass(frozen=True)
class CallableMetric(Metric):
    """The metric of a plain callable `(prediction, target)`, returning a value per element or row, or a mean for rows
    without weights.

    Args:
        function: called once with the decisions of all rows, values `(rows, k)` or class labels `(rows,)`, and targets of the
            same shape. The attribute `greater_is_better`, if present, allows early stopping.
    """

    function: Callable[..., Any]
    gathered: ClassVar[bool] = True

    # No registered name: files cannot hold a callable.
    def __new__(cls, *_: Any, **__: Any) -> Self:
        return object.__new__(cls)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", name_of(self.function))
        object.__setattr__(self, "greater_is_better", bool(getattr(self.function, "greater_is_better", False)))

    def sums(self, output: Tensor, target: Tensor, weight: Tensor | None, loss: Loss) -> Tensor:
        prediction = loss.decide(output)
        # (rows,) against (rows, 1) would broadcast to (rows, rows).
        target = target.reshape(prediction.shape) if target.numel() == prediction.numel() else target
        where = f"metrics: {self.name}"
        result = attempt(where, self.function, prediction, target)
        values = attempt(where, lambda: torch.as_tensor(result, dtype=torch.float64, device="cpu"))
        values = values.mean(1) if values.dim() == 2 and values.shape == prediction.shape else values
        weighted = weight is not None and not bool((weight == 1).all())
        check_values(where, values, output, *value_or_mean(values, len(output), weighted))
        w = torch.ones(len(output), dtype=torch.float64) if weight is None else weight.double().cpu()
        return torch.stack([w.sum(), w @ values.expand(len(output))])


def default_metrics(loss: Loss) -> tuple[Metric, ...]:
    """Return the default metrics of a loss: accuracy, or RMSE and R²."""
    return (Accuracy(),) if loss.classes or loss.discrete else (RMSE(), R2())
