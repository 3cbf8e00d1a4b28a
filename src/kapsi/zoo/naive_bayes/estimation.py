"""Naive Bayes in closed form: statistics of rows, to which further rows are added, and the models that they make."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from kapsi.calibrate import calibrate
from kapsi.errors import KapsiError, SpecError
from kapsi.expansion.density import LARGEST_INPUT, SMOOTHING
from kapsi.expansion.simple import Binarize
from kapsi.features import features_of
from kapsi.modules import LARGEST_TRAINED, Model
from kapsi.training.rows.stored import column_of
from kapsi.zoo.base import tensor_of
from kapsi.zoo.naive_bayes.model import DENSITIES, check_variance, filled, spec

__all__ = [
    "CountStatistics",
    "GaussianStatistics",
    "fit_bernoulli",
    "fit_gaussian",
    "fit_multinomial",
    "fit_naive",
    "partial_fit",
]

NOTHING = 1e-8
"""Weights of a class in a batch that count as none, as in scikit-learn."""

Numbers: TypeAlias = Sequence[float] | Tensor | Any
"""What `torch.as_tensor` takes."""


# ------------------------------------------------------------------------------------------------ data


class _Data(NamedTuple):
    """Rows of a fit, in float64: x `(rows, m)`, dense or sparse; class numbers, weights `(rows,)`; the number of classes."""

    x: Tensor
    y: Tensor
    weight: Tensor
    classes: int

    def sums(self, entries: Tensor | None = None) -> Tensor:
        """Return the weighted sums over the rows of each class, `(classes, m)`, of x or of others with x's entries."""
        count, width = self.classes, self.x.shape[1]
        if self.x.layout == torch.strided:
            values = self.x if entries is None else entries
            return values.new_zeros(count, width).index_add_(0, self.y, values * self.weight[:, None])
        sparse = cast(Any, features_of(self.x))
        rows, values = sparse.rows(), sparse.values if entries is None else entries
        places = self.y[rows] * width + sparse.indices
        return values.new_zeros(count * width).index_add_(0, places, values * self.weight[rows]).view(count, width)

    def entries(self) -> Tensor:
        """Return what is there of x."""
        return self.x if self.x.layout == torch.strided else self.x.values()

    def class_weights(self) -> Tensor:
        return self.weight.new_zeros(self.classes).index_add_(0, self.y, self.weight)


def _data(where: str, x: Any, y: Any, sample_weight: Any, classes: int | None, sparse: bool = False) -> _Data:
    try:
        rows = column_of(x if hasattr(x, "shape") else np.asarray(x), "inputs", where)
    except ValueError as error:  # of NumPy about rows of different lengths; the others are kapsi's own
        raise error if isinstance(error, KapsiError) else SpecError(f"{where}: expected rows of equal length") from None
    if len(rows.shape) != 2 or not len(rows) or not rows.shape[1]:
        raise SpecError(f"{where}: expected inputs of shape (rows, m) with at least one row, got {tuple(rows.shape)}")
    inputs = rows.cut(0, len(rows)).double()
    if inputs.layout != torch.strided and not sparse:
        raise SpecError(f"{where}: takes no sparse inputs; use x.to_dense(), or x.toarray()")
    entries = inputs if inputs.layout == torch.strided else inputs.values()
    if not bool((entries.abs() <= LARGEST_INPUT).all()):
        raise SpecError(f"{where}: the inputs must be finite, and at most {LARGEST_INPUT:g} in size")
    labels = _numbers(where, "y", y, len(rows)).to(inputs.device)
    if classes is not None and (isinstance(classes, bool) or not isinstance(classes, int) or classes < 1):
        raise SpecError(f"{where}: classes={classes!r}: expected an integer of at least 1")
    if not bool((labels == labels.round()).all()) or float(labels.min()) < 0:
        raise SpecError(
            f"{where}: expected y as class numbers 0, 1, …; np.unique(y, return_inverse=True) makes them of others"
        )
    count = int(labels.max()) + 1 if classes is None else classes
    if classes is None and count > len(rows):
        absent = next(c for c, label in enumerate((*labels.long().unique().tolist(), -1)) if c != label)
        raise SpecError(
            f"{where}: y goes up to class {count - 1:,}, and class {absent:,} has no rows; number the classes without it"
        )
    if int(labels.max()) >= count:
        raise SpecError(f"{where}: y has class {int(labels.max())}, and the classes are 0 to {count - 1}")
    if sample_weight is None:
        weight = torch.ones_like(labels)
    else:
        weight = _numbers(where, "sample_weight", sample_weight, len(rows)).to(inputs.device)
        if float(weight.min()) < 0:
            raise SpecError(f"{where}: sample_weight must not be negative")
    return _Data(inputs, labels.long(), weight, count)


def _numbers(where: str, what: str, values: Any, rows: int) -> Tensor:
    try:
        made = tensor_of(values)
    except (TypeError, ValueError, RuntimeError):
        raise SpecError(f"{where}: expected {what} as numbers, one a row; got {type(values).__name__}") from None
    if made.numel() != rows or made.dim() > 2:
        raise SpecError(f"{where}: expected {what} of shape ({rows:,},), got {tuple(made.shape)}")
    if made.is_complex() or not bool(torch.isfinite(made).all()):
        raise SpecError(f"{where}: {what} must be real and finite")
    return made.reshape(-1).double()


def _log_priors(where: str, priors: Numbers | None, weight: Tensor) -> Tensor:
    """Return the logarithms of given priors, or of the shares of the classes; each class must have rows."""
    absent = (weight <= NOTHING).nonzero().flatten().tolist()
    if absent:
        raise SpecError(
            f"{where}: class {absent[0]} of {len(weight)} has no rows, or none with a weight; number the classes without it"
        )
    if priors is None:
        return weight.log() - weight.sum().log()
    given = _numbers(where, "priors", priors, len(weight)).to(weight.device)
    if float(given.min()) <= 0 or abs(float(given.sum()) - 1) > 1e-8:
        raise SpecError(f"{where}: priors must be above 0 and add up to 1; got {[round(p, 6) for p in given.tolist()]}")
    return given.log()


# ------------------------------------------------------------------------------------------------ statistics


@dataclass(frozen=True, eq=False)
class GaussianStatistics:
    """What normal densities are fitted from, and further rows are added to: `partial_fit` returns new ones.

    A model has means, scales and priors, but not how many rows they come from, so this is kept beside it. It is four values to
    be saved, `dataclasses.asdict(statistics)`.

    Attributes:
        weight: the weights of the rows of each class, added up, `(classes,)`.
        mean: `(classes, m)`.
        variance: with smoothing, `(classes, m)`.
        smoothing: share of the largest variance of an input in a batch that is added to all variances. Batches are combined as in
            scikit-learn: a class has the mean of what each batch adds, weighted by the rows before it.

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
        """Return the statistics of no rows."""
        shape = _shape("GaussianStatistics", inputs, classes)
        if isinstance(smoothing, bool) or not isinstance(smoothing, int | float) or not 0 <= smoothing <= 1:
            raise SpecError(f"GaussianStatistics: smoothing={smoothing!r}: expected a number from 0 to 1")
        zeros = torch.zeros(shape, dtype=torch.float64)
        return cls(zeros[:, 0].clone(), zeros, zeros.clone(), float(smoothing))

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of inputs and of classes."""
        return self.mean.shape[1], self.mean.shape[0]

    def _added(self, data: _Data) -> GaussianStatistics:
        past, new = self.weight.to(data.x.device)[:, None], data.class_weights()[:, None]
        total, there = (past + new).clamp_min(torch.finfo(torch.float64).tiny), new > NOTHING
        share = new.clamp_min(NOTHING)
        mean = data.sums() / share
        square = data.sums((data.x - mean[data.y]).square())
        added = self.smoothing * data.x.var(0, correction=0).max()
        # What this batch adds is taken off, and added again, as scikit-learn does.
        old = torch.where(past.sum() > 0, self.variance.to(mean) - added, self.variance.to(mean))
        both = past * old + square + new * past / total * (self.mean.to(mean) - mean).square()
        return GaussianStatistics(
            (past + new)[:, 0],
            torch.where(there, (new * mean + past * self.mean.to(mean)) / total, self.mean.to(mean)),
            torch.where(there, both / total, old) + added,
            self.smoothing,
        )

    def model(self, *, priors: Numbers | None = None, learnable: bool = True) -> Model:
        """Return naive Bayes with these means and variances, as `fit_gaussian`."""
        return self._model("GaussianStatistics.model", priors, learnable)

    def _model(self, where: str, priors: Numbers | None, learnable: bool) -> Model:
        logs = _log_priors(where, priors, self.weight)
        check_variance(where, self.variance, "smoothing")
        classes, inputs = self.mean.shape
        made = spec(inputs, classes, learnable=learnable, smoothing=self.smoothing)
        return filled(made, logs, mean=self.mean, log_scale=self.variance.log() / 2)


@dataclass(frozen=True, eq=False)
class CountStatistics:
    """What naive Bayes of counts is fitted from, and further rows are added to: `partial_fit` returns new ones.

    Attributes:
        kind: `multinomial` or `bernoulli`.
        weight: the weights of the rows of each class, added up, `(classes,)`.
        count: the inputs, or how many are above the threshold, added up with the weights of their rows, `(classes, m)`.
        threshold: of `bernoulli`, None for inputs that are zeros and ones already.
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
        """Return the statistics of no rows."""
        shape = _shape("CountStatistics", inputs, classes)
        if kind not in ("multinomial", "bernoulli"):
            raise SpecError(f"CountStatistics: kind={kind!r}: expected multinomial or bernoulli")
        if threshold is not None:
            Binarize(threshold)  # refuses what is no number
        zeros = torch.zeros(shape, dtype=torch.float64)
        return cls(kind, zeros[:, 0].clone(), zeros, threshold)

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of inputs and of classes."""
        return self.count.shape[1], self.count.shape[0]

    def _added(self, data: _Data) -> CountStatistics:
        where, entries = self.kind, data.entries()
        if self.kind == "bernoulli":
            if self.threshold is not None:
                if data.x.layout != torch.strided and self.threshold < 0:
                    raise SpecError(f"{where}: sparse inputs need a threshold of at least 0; use x.to_dense()")
                entries = (entries > self.threshold).double()
            elif not bool(((entries == 0) | (entries == 1)).all()):
                raise SpecError(f"{where}: without a threshold inputs must be zeros and ones; give threshold=0.0")
        elif float(entries.min() if entries.numel() else 0) < 0:
            raise SpecError(f"{where}: counts must not be negative, the least is {float(entries.min()):g}")
        like = data.weight
        return replace(
            self, weight=self.weight.to(like) + data.class_weights(), count=self.count.to(like) + data.sums(entries)
        )

    def model(self, *, alpha: float | Numbers = 1.0, fit_prior: bool = True, priors: Numbers | None = None) -> Model:
        """Return naive Bayes with these probabilities, as `fit_multinomial` and `fit_bernoulli`."""
        return self._model(f"CountStatistics.model({self.kind})", alpha, fit_prior, priors)

    def _model(self, where: str, alpha: float | Numbers, fit_prior: bool, priors: Numbers | None) -> Model:
        classes, inputs = self.count.shape
        try:
            smoothing = tensor_of(alpha).double()
        except (TypeError, ValueError, RuntimeError):
            raise SpecError(f"{where}: expected alpha as a number or numbers, got {type(alpha).__name__}") from None
        if smoothing.shape not in ((), (inputs,)) or not bool((torch.isfinite(smoothing) & (smoothing > 0)).all()):
            raise SpecError(f"{where}: alpha must be above 0, a number or one for each of the {inputs:,} inputs")
        logs = _log_priors(where, priors, self.weight)
        if priors is None and not fit_prior:
            logs = torch.full_like(logs, -math.log(classes))
        smoothing = smoothing.to(self.count.device)
        counts = self.count + smoothing
        if self.kind == "multinomial":
            matrix = counts.log() - counts.sum(1, keepdim=True).log()
            return filled(spec(inputs, classes, "multinomial"), logs, matrix)
        # The share of rows without, of counts and not as 1 − p, is never the logarithm of zero.
        missing = (self.weight[:, None] - self.count).clamp_min(0) + smoothing
        none = missing.log() - (self.weight[:, None] + 2 * smoothing).log()
        made = spec(inputs, classes, "bernoulli", threshold=self.threshold)
        return filled(made, logs + none.sum(1), counts.log() - missing.log())


Statistics: TypeAlias = GaussianStatistics | CountStatistics


def _shape(where: str, inputs: int, classes: int) -> tuple[int, int]:
    for name, value in (("inputs", inputs), ("classes", classes)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SpecError(f"{where}: {name}={value!r}: expected an integer of at least 1")
    if classes * inputs > LARGEST_TRAINED:
        raise SpecError(
            f"{where}: {classes:,} classes of {inputs:,} inputs are {classes * inputs:,} numbers; "
            f"at most {LARGEST_TRAINED:,} are kept"
        )
    return classes, inputs


def _check_shapes(where: str, weight: Tensor, values: Tensor, *others: Tensor) -> None:
    shapes = [tuple(each.shape) for each in (weight, values, *others)]
    if values.dim() != 2 or weight.shape != values.shape[:1] or any(each.shape != values.shape for each in others):
        raise SpecError(f"{where}: expected tensors (classes,), (classes, m), …; got {', '.join(map(str, shapes))}")


def partial_fit(statistics: Statistics, x: Any, y: Any, *, sample_weight: Any = None) -> Any:
    """Return the statistics of the rows so far and some more; `.model()` makes naive Bayes of them.

    After the same batches the model is that of scikit-learn's `partial_fit`; of counts it is that of all rows at once.

    Args:
        statistics: `GaussianStatistics.none(inputs, classes)` or `CountStatistics.none(inputs, classes, kind)` at first, then
            what this returned.
        x, y, sample_weight: as for `fit_gaussian`; a batch need not have rows of each class.
    """
    if not isinstance(statistics, GaussianStatistics | CountStatistics):
        raise SpecError(
            f"partial_fit: expected GaussianStatistics or CountStatistics, got {type(statistics).__name__}; a model does not "
            "know how many rows it comes from, so its statistics are kept beside it"
        )
    inputs, classes = statistics.shape
    data = _data("partial_fit", x, y, sample_weight, classes, sparse=isinstance(statistics, CountStatistics))
    if data.x.shape[1] != inputs:
        raise SpecError(f"partial_fit: the statistics are of {inputs:,} inputs, got {data.x.shape[1]:,}")
    return statistics._added(data)


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
        y: class numbers `(rows,)`, from 0 up; each class has rows.
        sample_weight: weights of the rows, `(rows,)`, not negative; all alike by default.
        smoothing: share of the largest variance of an input that is added to all variances, 0 to 1; inputs that do not vary
            within a class are that narrow there.
        priors: probabilities of the classes, above 0, of sum 1; their shares of the rows by default.
        classes: the number of classes; one more than the largest in y by default.
        learnable: whether means and scales are trained in further fits.

    Raises:
        SpecError: a class has no rows, or an input has no variance in a class and smoothing adds nothing.

    Example:
        >>> import torch, kapsi as kp
        >>> model = fit_gaussian([[0.0], [2.0], [8.0], [12.0]], [0, 0, 1, 1])
        >>> kp.predict(model, torch.tensor([[1.0], [11.0]], dtype=torch.float64), "cross_entropy")
        tensor([0, 1])
    """
    data = _data("fit_gaussian", x, y, sample_weight, classes)
    statistics = GaussianStatistics.none(data.x.shape[1], data.classes, smoothing)._added(data)
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
    """Return naive Bayes of counts, such as of words, the model of scikit-learn's `MultinomialNB`.

    Args:
        x: counts `(rows, m)`, not negative: a tensor, an array, a SciPy matrix or a `torch.sparse_csr` tensor.
        y, sample_weight, priors, classes: as for `fit_gaussian`.
        alpha: what is added to each count, above 0; a number, or one for each input.
        fit_prior: False for classes that are all as likely.

    Example:
        >>> model = fit_multinomial([[3, 0], [2, 1], [0, 4]], [0, 0, 1])
        >>> model.layers[0].heads[0].psi["matrix"].exp()
        tensor([[0.7500, 0.2500],
                [0.1667, 0.8333]], dtype=torch.float64, grad_fn=<ExpBackward0>)
    """
    data = _data("fit_multinomial", x, y, sample_weight, classes, sparse=True)
    statistics = CountStatistics.none(data.x.shape[1], data.classes, "multinomial")._added(data)
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
    """Return naive Bayes of inputs that are there or not, the model of scikit-learn's `BernoulliNB`.

    With b = 1[x > θ] the log-likelihood Σᵢ bᵢ log pᵢ + (1 − bᵢ) log(1 − pᵢ) is linear in b: its weights
    log pᵢ − log(1 − pᵢ) are ψ, and what is constant, Σᵢ log(1 − pᵢ), is added to the log-priors in π.

    Args:
        x: inputs `(rows, m)`, as for `fit_multinomial`; sparse ones need θ ≥ 0.
        y, sample_weight, priors, classes: as for `fit_gaussian`.
        threshold: θ, in units of x; None for inputs that are zeros and ones already.
        alpha: what is added to the rows with and to the rows without, above 0; a number, or one for each input.
        fit_prior: False for classes that are all as likely.
    """
    data = _data("fit_bernoulli", x, y, sample_weight, classes, sparse=True)
    statistics = CountStatistics.none(data.x.shape[1], data.classes, "bernoulli", threshold)._added(data)
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
    """Return naive Bayes of any density, each fitted by maximum likelihood class by class, as `kapsi.calibrate` does.

    Args:
        kind: `normal`, `cauchy`, `laplace`, `exponential`, `gamma` or `chi_squared`.
        x, y, priors, classes, learnable: as for `fit_gaussian`.
        **options: `smoothing` of `normal`, `floor` of `exponential`, `gamma` and `chi_squared`.

    Example:
        >>> import torch, kapsi as kp
        >>> model = fit_naive("exponential", [[1.0], [3.0], [4.0], [12.0]], [0, 0, 1, 1])
        >>> model.layers[0].heads[0].kappa["log_rate"].detach().exp().flatten()
        tensor([0.5000, 0.1250], dtype=torch.float64)
    """
    where = f"fit_naive({kind!r})"
    if kind not in DENSITIES:
        raise SpecError(
            f"{where}: choose from {', '.join(DENSITIES)}; fit_multinomial and fit_bernoulli are for counts"
        )
    data = _data(where, x, y, None, classes)
    logs = _log_priors(where, priors, data.class_weights())
    model = filled(spec(data.x.shape[1], data.classes, kind, learnable=learnable, **options), logs)
    return calibrate(model, data.x, data.y)
