"""Naive Bayes in closed form: sufficient statistics, updated by further rows, and models from statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from kapsi.calibrate import calibrate
from kapsi.errors import DataError, KapsiError, SpecError, check_choice, check_integer, check_number, refuse
from kapsi.expansion.density import MAX_INPUT, SMOOTHING
from kapsi.expansion.simple import Binarize
from kapsi.features import features_of
from kapsi.modules import MAX_TRAINED, Model
from kapsi.training.rows.stored import as_column
from kapsi.zoo.base import finite_tensor, forbid, model_of
from kapsi.zoo.naive_bayes.model import DENSITIES, check_variance, spec

NO_WEIGHT = 1e-8
"""Total weight of a class in a batch counted as zero, as in scikit-learn."""

Numbers: TypeAlias = Sequence[float] | Tensor | Any
"""Arguments of `torch.as_tensor`."""


# ------------------------------------------------------------------------------------------------ data


class _WeightedRows(NamedTuple):
    """Rows of a fit in float64: x `(rows, m)`, dense or sparse; class labels and weights `(rows,)`; the number of classes."""

    x: Tensor
    y: Tensor
    weight: Tensor
    classes: int

    def sums(self, entries: Tensor | None = None) -> Tensor:
        """Return the weighted sums of x per class, `(classes, m)`, or of other values for the entries of x."""
        count, width = self.classes, self.x.shape[1]
        if self.x.layout == torch.strided:
            values = self.x if entries is None else entries
            return values.new_zeros(count, width).index_add_(0, self.y, values * self.weight[:, None])
        sparse = cast(Any, features_of(self.x))
        rows, values = sparse.rows(), sparse.values if entries is None else entries
        index = self.y[rows] * width + sparse.indices
        return values.new_zeros(count * width).index_add_(0, index, values * self.weight[rows]).view(count, width)

    def entries(self) -> Tensor:
        """Return the stored values of x."""
        return self.x if self.x.layout == torch.strided else self.x.values()

    def class_weights(self) -> Tensor:
        return self.weight.new_zeros(self.classes).index_add_(0, self.y, self.weight)


def _rows(where: str, x: Any, y: Any, sample_weight: Any, classes: int | None, sparse: bool = False) -> _WeightedRows:
    """Return checked rows."""
    inputs = _inputs(where, x, sparse)
    labels = _numbers(where, "y", y, len(inputs)).to(inputs.device)
    if classes is not None:
        check_integer(f"{where}: classes", classes, 1)
    whole = bool((labels == labels.round()).all()) and float(labels.min()) >= 0
    largest = int(labels.max())
    count = largest + 1 if classes is None else classes
    absent = next(c for c, label in enumerate((*labels.unique().tolist(), -1)) if c != label)
    weight = torch.ones_like(labels)
    if sample_weight is not None:
        weight = _numbers(where, "sample_weight", sample_weight, len(inputs)).to(inputs.device)
    forbid(
        where,
        (not whole, "expected y as class labels 0, 1, …; np.unique(y, return_inverse=True) converts other labels"),
        (
            classes is None and count > len(labels),
            f"y goes up to class {largest:,}, and class {absent:,} has no rows; renumber the classes",
        ),
        (largest >= count, f"y has class {largest}, and the classes are 0 to {count - 1}"),
        (float(weight.min()) < 0, "sample_weight must not be negative"),
        error=DataError,
    )
    return _WeightedRows(inputs, labels.long(), weight, count)


def _inputs(where: str, x: Any, sparse: bool) -> Tensor:
    try:
        rows = as_column(x if hasattr(x, "shape") else np.asarray(x), "inputs", where)
    except ValueError as error:  # from NumPy for ragged rows; other errors are KapsiErrors
        raise error if isinstance(error, KapsiError) else DataError(f"{where}: expected rows of equal length") from None
    shape = tuple(rows.shape)
    empty = len(shape) != 2 or 0 in shape
    forbid(where, (empty, f"expected inputs of shape (rows, m) with at least one row, got {shape}"), error=DataError)
    inputs: Tensor = rows.cut(0, len(rows)).double()
    dense = inputs.layout == torch.strided
    finite = bool(((inputs if dense else inputs.values()).abs() <= MAX_INPUT).all())
    forbid(
        where,
        (not dense and not sparse, "sparse inputs are not supported; use x.to_dense(), or x.toarray()"),
        (not finite, f"the inputs must be finite, and at most {MAX_INPUT:g} in size"),
        error=DataError,
    )
    return inputs


def _numbers(where: str, name: str, values: Any, count: int) -> Tensor:
    """Return `count` finite numbers in float64."""
    numbers = finite_tensor(values, f"{where}: {name}")
    if numbers.numel() != count or numbers.dim() > 2:
        refuse(where, f"{name} of shape ({count:,},)", tuple(numbers.shape), DataError)
    return numbers.reshape(-1)


def _log_priors(where: str, priors: Numbers | None, weight: Tensor) -> Tensor:
    """Return the logarithms of given priors, or of the shares of the classes; each class must have rows."""
    absent = (weight <= NO_WEIGHT).nonzero().flatten().tolist()
    if absent:
        raise DataError(
            f"{where}: class {absent[0]} of {len(weight)} has no rows, or only rows without weight; renumber the classes"
        )
    if priors is None:
        return weight.log() - weight.sum().log()
    values = _numbers(where, "priors", priors, len(weight)).to(weight.device)
    if float(values.min()) <= 0 or abs(float(values.sum()) - 1) > 1e-8:
        raise SpecError(f"{where}: priors must be above 0 and sum to 1; got {[round(p, 6) for p in values.tolist()]}")
    return values.log()


# ------------------------------------------------------------------------------------------------ statistics


@dataclass(frozen=True, eq=False)
class GaussianStatistics:
    """Sufficient statistics of normal densities; `partial_fit` returns the statistics updated by further rows.

    A model has means, scales and priors, but no row counts; statistics are therefore stored separately, for instance as
    `dataclasses.asdict(statistics)`.

    Attributes:
        weight: total weight of the rows of each class, `(classes,)`.
        mean: `(classes, m)`.
        variance: smoothed variances, `(classes, m)`.
        smoothing: share of the largest variance of an input in a batch, added to all variances; combined over batches as in
            scikit-learn, by the mean over batches weighted by previous rows.

    Example:
        >>> import torch
        >>> x, y = torch.arange(8.0).reshape(4, 2) ** 2, torch.tensor([0, 1, 0, 1])
        >>> first = partial_fit(GaussianStatistics.none(inputs=2, classes=2), x, y)
        >>> partial_fit(first, x + 1, y).model().layers[0].heads[0].kappa["mean"].tolist()
        [[8.5, 13.5], [20.5, 29.5]]
    """

    weight: Tensor
    mean: Tensor
    variance: Tensor
    smoothing: float = SMOOTHING

    def __post_init__(self) -> None:
        _check_shapes("GaussianStatistics", self.weight, self.mean, self.variance)

    @classmethod
    def none(cls, inputs: int, classes: int, smoothing: float = SMOOTHING) -> GaussianStatistics:
        """Return zero-initialized statistics."""
        shape = _shape("GaussianStatistics", inputs, classes)
        check_number("GaussianStatistics: smoothing", smoothing, 0, 1)
        zeros = torch.zeros(shape, dtype=torch.float64)
        return cls(zeros[:, 0].clone(), zeros, zeros.clone(), float(smoothing))

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of inputs and of classes."""
        return self.mean.shape[1], self.mean.shape[0]

    def _updated(self, data: _WeightedRows) -> GaussianStatistics:
        past, new = self.weight.to(data.x.device)[:, None], data.class_weights()[:, None]
        total, present = (past + new).clamp_min(torch.finfo(torch.float64).tiny), new > NO_WEIGHT
        share = new.clamp_min(NO_WEIGHT)
        mean = data.sums() / share
        square = data.sums((data.x - mean[data.y]).square())
        added = self.smoothing * data.x.var(0, correction=0).max()
        # The smoothing of this batch is subtracted, and added again, as in scikit-learn.
        old = torch.where(past.sum() > 0, self.variance.to(mean) - added, self.variance.to(mean))
        both = past * old + square + new * past / total * (self.mean.to(mean) - mean).square()
        return GaussianStatistics(
            (past + new)[:, 0],
            torch.where(present, (new * mean + past * self.mean.to(mean)) / total, self.mean.to(mean)),
            torch.where(present, both / total, old) + added,
            self.smoothing,
        )

    def model(self, *, priors: Numbers | None = None, learnable: bool = True) -> Model:
        """Return naive Bayes with these means and variances; arguments as in `fit_gaussian`."""
        return self._model("GaussianStatistics.model", priors, learnable)

    def _model(self, where: str, priors: Numbers | None, learnable: bool) -> Model:
        logs = _log_priors(where, priors, self.weight)
        check_variance(where, self.variance, "smoothing")
        classes, inputs = self.mean.shape
        architecture = spec(inputs, classes, learnable=learnable, smoothing=self.smoothing)
        kappa = {"mean": self.mean, "log_scale": self.variance.log() / 2}
        return model_of(architecture, remainder={"value": logs}, expansion=kappa)


@dataclass(frozen=True, eq=False)
class CountStatistics:
    """Sufficient statistics of naive Bayes of counts; `partial_fit` returns the statistics updated by further rows.

    Attributes:
        kind: `multinomial` or `bernoulli`.
        weight: total weight of the rows of each class, `(classes,)`.
        count: weighted sums of the inputs, or of the indicators of inputs above the threshold, `(classes, m)`.
        threshold: threshold for `bernoulli`; None for binary inputs.
    """

    kind: Literal["multinomial", "bernoulli"]
    weight: Tensor
    count: Tensor
    threshold: float | None = 0.0

    def __post_init__(self) -> None:
        _check_shapes("CountStatistics", self.weight, self.count)

    @classmethod
    def none(
        cls, inputs: int, classes: int, kind: Literal["multinomial", "bernoulli"], threshold: float | None = 0.0
    ) -> CountStatistics:
        """Return zero-initialized statistics."""
        shape = _shape("CountStatistics", inputs, classes)
        check_choice("CountStatistics: kind", kind, ("multinomial", "bernoulli"))
        if threshold is not None:
            Binarize(threshold)  # checks the number
        zeros = torch.zeros(shape, dtype=torch.float64)
        return cls(kind, zeros[:, 0].clone(), zeros, threshold)

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of inputs and of classes."""
        return self.count.shape[1], self.count.shape[0]

    def _updated(self, data: _WeightedRows) -> CountStatistics:
        where, entries = self.kind, data.entries()
        binary, threshold = self.kind == "bernoulli", self.threshold
        least = float(entries.min()) if entries.numel() else 0.0
        forbid(
            where,
            (
                binary and threshold is not None and threshold < 0 and data.x.layout != torch.strided,
                "sparse inputs need a threshold of at least 0; use x.to_dense()",
            ),
            (
                binary and threshold is None and not bool(((entries == 0) | (entries == 1)).all()),
                "without a threshold the inputs must be zeros and ones; use threshold=0.0",
            ),
            (not binary and least < 0, f"counts must not be negative, the smallest is {least:g}"),
            error=DataError,
        )
        if binary and threshold is not None:
            entries = (entries > threshold).double()
        like = data.weight
        return replace(
            self, weight=self.weight.to(like) + data.class_weights(), count=self.count.to(like) + data.sums(entries)
        )

    def model(self, *, alpha: float | Numbers = 1.0, fit_prior: bool = True, priors: Numbers | None = None) -> Model:
        """Return naive Bayes with these probabilities; arguments as in `fit_multinomial` and `fit_bernoulli`."""
        return self._model(f"CountStatistics.model({self.kind})", alpha, fit_prior, priors)

    def _model(self, where: str, alpha: float | Numbers, fit_prior: bool, priors: Numbers | None) -> Model:
        classes, inputs = self.count.shape
        smoothing = finite_tensor(alpha, f"{where}: alpha")
        if smoothing.shape not in ((), (inputs,)) or not bool((smoothing > 0).all()):
            raise SpecError(f"{where}: alpha must be above 0, a number or {inputs:,} numbers, one per input")
        logs = _log_priors(where, priors, self.weight)
        if priors is None and not fit_prior:
            logs = torch.full_like(logs, -math.log(classes))
        smoothing = smoothing.to(self.count.device)
        counts = self.count + smoothing
        if self.kind == "multinomial":
            matrix = counts.log() - counts.sum(1, keepdim=True).log()
            architecture = spec(inputs, classes, "multinomial")
            return model_of(architecture, remainder={"value": logs}, reconciliation={"matrix": matrix})
        # log(1 − p) from counts is always finite.
        missing = (self.weight[:, None] - self.count).clamp_min(0) + smoothing
        absent = missing.log() - (self.weight[:, None] + 2 * smoothing).log()
        architecture = spec(inputs, classes, "bernoulli", threshold=self.threshold)
        matrix = counts.log() - missing.log()
        return model_of(architecture, remainder={"value": logs + absent.sum(1)}, reconciliation={"matrix": matrix})


Statistics: TypeAlias = GaussianStatistics | CountStatistics


def _shape(where: str, inputs: int, classes: int) -> tuple[int, int]:
    for name, value in (("inputs", inputs), ("classes", classes)):
        check_integer(f"{where}: {name}", value, 1)
    if classes * inputs > MAX_TRAINED:
        raise SpecError(
            f"{where}: {classes:,} classes × {inputs:,} inputs are {classes * inputs:,} parameters; "
            f"at most {MAX_TRAINED:,} are supported"
        )
    return classes, inputs


def _check_shapes(where: str, weight: Tensor, values: Tensor, *others: Tensor) -> None:
    shapes = [tuple(tensor.shape) for tensor in (weight, values, *others)]
    if values.dim() != 2 or weight.shape != values.shape[:1] or any(t.shape != values.shape for t in others):
        raise SpecError(f"{where}: expected tensors (classes,), (classes, m), …; got {', '.join(map(str, shapes))}")


def partial_fit(statistics: Statistics, x: Any, y: Any, *, sample_weight: Any = None) -> Any:
    """Return statistics updated by a batch of rows; `statistics.model()` returns naive Bayes.

    The model after some batches equals that of scikit-learn's `partial_fit`; for counts also that of a fit to all rows.

    Args:
        statistics: `GaussianStatistics.none(inputs, classes)` or `CountStatistics.none(inputs, classes, kind)` for the first batch,
            afterwards the previous result.
        x, y, sample_weight: see `fit_gaussian`; a batch may lack some classes.
    """
    if not isinstance(statistics, GaussianStatistics | CountStatistics):
        raise SpecError(
            f"partial_fit: expected GaussianStatistics or CountStatistics, got {type(statistics).__name__}; a model has no row "
            "counts, so its statistics are stored separately"
        )
    inputs, classes = statistics.shape
    data = _rows("partial_fit", x, y, sample_weight, classes, sparse=isinstance(statistics, CountStatistics))
    if data.x.shape[1] != inputs:
        raise DataError(f"partial_fit: the statistics have {inputs:,} inputs, got {data.x.shape[1]:,}")
    return statistics._updated(data)


# ------------------------------------------------------------------------------------------------ fits


def fit_gaussian(
    x: Any,
    y: Any,
    *,
    sample_weight: Any = None,
    smoothing: float = SMOOTHING,
    priors: Numbers | None = None,
    classes: int | None = None,
    learnable: bool = True,
) -> Model:
    """Return naive Bayes of normal densities in closed form, the model of scikit-learn's `GaussianNB`.

    Args:
        x: inputs `(rows, m)`, a tensor or an array.
        y: class labels `(rows,)`, from 0 up; each class needs rows.
        sample_weight: nonnegative weights of the rows, `(rows,)`; default: equal weights.
        smoothing: share of the largest variance of an input, added to all variances, 0 to 1; the only variance of inputs constant
            within a class.
        priors: probabilities of the classes, above 0, with sum 1; default: shares of the rows.
        classes: number of classes; default: the largest label plus 1.
        learnable: whether means and scales are trainable in further fits.

    Raises:
        DataError: a class without rows, or a variance of zero despite smoothing.

    Example:
        >>> import torch, kapsi as kp
        >>> model = fit_gaussian([[0.0], [2.0], [8.0], [12.0]], [0, 0, 1, 1])
        >>> kp.predict(model, torch.tensor([[1.0], [11.0]], dtype=torch.float64), "cross_entropy")
        tensor([0, 1])
    """
    data = _rows("fit_gaussian", x, y, sample_weight, classes)
    statistics = GaussianStatistics.none(data.x.shape[1], data.classes, smoothing)._updated(data)
    return statistics._model("fit_gaussian", priors, learnable)


def fit_multinomial(
    x: Any,
    y: Any,
    *,
    sample_weight: Any = None,
    alpha: float | Numbers = 1.0,
    fit_prior: bool = True,
    priors: Numbers | None = None,
    classes: int | None = None,
) -> Model:
    """Return naive Bayes of counts, for instance of words, the model of scikit-learn's `MultinomialNB`.

    Args:
        x: nonnegative counts `(rows, m)`: a tensor, an array, a SciPy matrix or a `torch.sparse_csr` tensor.
        y, sample_weight, priors, classes: see `fit_gaussian`.
        alpha: pseudo-count, above 0, or one per input.
        fit_prior: False for equal priors.

    Example:
        >>> model = fit_multinomial([[3, 0], [2, 1], [0, 4]], [0, 0, 1])
        >>> model.layers[0].heads[0].psi["matrix"].exp()
        tensor([[0.7500, 0.2500],
                [0.1667, 0.8333]], dtype=torch.float64, grad_fn=<ExpBackward0>)
    """
    data = _rows("fit_multinomial", x, y, sample_weight, classes, sparse=True)
    statistics = CountStatistics.none(data.x.shape[1], data.classes, "multinomial")._updated(data)
    return statistics._model("fit_multinomial", alpha, fit_prior, priors)


def fit_bernoulli(
    x: Any,
    y: Any,
    *,
    sample_weight: Any = None,
    threshold: float | None = 0.0,
    alpha: float | Numbers = 1.0,
    fit_prior: bool = True,
    priors: Numbers | None = None,
    classes: int | None = None,
) -> Model:
    """Return naive Bayes of binary inputs, the model of scikit-learn's `BernoulliNB`.

    With b = 1[x > θ] the log-likelihood Σᵢ bᵢ log pᵢ + (1 − bᵢ) log(1 − pᵢ) is linear in b: its weights
    log pᵢ − log(1 − pᵢ) are ψ, and the constant Σᵢ log(1 − pᵢ) is added to the log-priors in π.

    Args:
        x: inputs `(rows, m)`, as in `fit_multinomial`; sparse inputs need θ ≥ 0.
        y, sample_weight, priors, classes: see `fit_gaussian`.
        threshold: θ, in units of x; None for binary inputs.
        alpha: pseudo-count of rows with and of rows without, above 0, or one per input.
        fit_prior: False for equal priors.
    """
    data = _rows("fit_bernoulli", x, y, sample_weight, classes, sparse=True)
    statistics = CountStatistics.none(data.x.shape[1], data.classes, "bernoulli", threshold)._updated(data)
    return statistics._model("fit_bernoulli", alpha, fit_prior, priors)


def fit_naive(
    kind: str,
    x: Any,
    y: Any,
    *,
    priors: Numbers | None = None,
    classes: int | None = None,
    learnable: bool = True,
    **options: Any,
) -> Model:
    """Return naive Bayes of any density, fitted by maximum likelihood class by class, as in `kapsi.calibrate`.

    Args:
        kind: `normal`, `cauchy`, `laplace`, `exponential`, `gamma` or `chi_squared`.
        x, y, priors, classes, learnable: see `fit_gaussian`.
        **options: `smoothing` of `normal`, `floor` of `exponential`, `gamma` and `chi_squared`.

    Example:
        >>> import torch, kapsi as kp
        >>> model = fit_naive("exponential", [[1.0], [3.0], [4.0], [12.0]], [0, 0, 1, 1])
        >>> model.layers[0].heads[0].kappa["log_rate"].detach().exp().flatten()
        tensor([0.5000, 0.1250], dtype=torch.float64)
    """
    where = f"fit_naive({kind!r})"
    check_choice(where, kind, DENSITIES)
    data = _rows(where, x, y, None, classes)
    logs = _log_priors(where, priors, data.class_weights())
    architecture = spec(data.x.shape[1], data.classes, kind, learnable=learnable, **options)
    model = model_of(architecture, remainder={"value": logs})
    return calibrate(model, data.x, data.y)
