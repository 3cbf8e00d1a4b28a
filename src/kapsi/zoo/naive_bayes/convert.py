"""Converter of scikit-learn's naive Bayes classifiers, and parity cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.modules import Model
from kapsi.training.prediction import predict_log_proba
from kapsi.zoo.base import Case, Comparison
from kapsi.zoo.naive_bayes.estimation import (
    CountStatistics,
    GaussianStatistics,
    fit_gaussian,
    fit_multinomial,
    partial_fit,
)
from kapsi.zoo.naive_bayes.model import check_variance, filled, spec

__all__ = ["PARITY", "from_sklearn"]


def from_sklearn(estimator: Any, *, learnable: bool = True) -> Model:
    """Return a fitted naive Bayes of scikit-learn as a model in float64, with outputs in the order of its `classes_`.

    `kapsi.predict_log_proba(model, x)` is `estimator.predict_log_proba(x)`, and the outputs are its joint log-likelihoods. The
    parameters of `GaussianNB` are those of its densities, the others have a dense ψ.

    A category that an input of `CategoricalNB` did not have when it was fitted adds nothing to any class, as if that input were
    missing; scikit-learn ends with an index error.

    Args:
        estimator: a fitted `GaussianNB`, `MultinomialNB`, `BernoulliNB`, `ComplementNB` or `CategoricalNB`.
        learnable: of `GaussianNB`: whether means and scales are trained; without that nothing in the model is.

    Raises:
        SpecError: another estimator, one that is not fitted, or one with probabilities of zero.
    """
    from sklearn.exceptions import NotFittedError
    from sklearn.naive_bayes import BernoulliNB, CategoricalNB, ComplementNB, GaussianNB, MultinomialNB
    from sklearn.utils.validation import check_is_fitted

    kind, known = type(estimator), (GaussianNB, MultinomialNB, BernoulliNB, ComplementNB, CategoricalNB)
    name = kind.__name__
    if kind not in known:
        hint = "; a class derived from one of them may compute something else" if issubclass(kind, known) else ""
        raise SpecError(f"from_sklearn: expected {', '.join(each.__name__ for each in known)}; got {name}{hint}")
    where = f"from_sklearn({name})"
    try:
        check_is_fitted(estimator)
    except NotFittedError:
        raise SpecError(f"{where}: it is not fitted; call fit(x, y) first") from None
    inputs, classes = int(estimator.n_features_in_), len(estimator.classes_)
    if kind is GaussianNB:
        prior = np.asarray(estimator.class_prior_, dtype=np.float64)
        variance = _given(estimator.var_)
        if not (prior > 0).all():
            absent = estimator.classes_[~(prior > 0)][0]
            raise SpecError(f"{where}: class {absent!r} has a prior of zero; leave it out when fitting, or give priors")
        check_variance(where, variance, "var_smoothing")
        return filled(
            spec(inputs, classes, learnable=learnable),
            _given(prior).log(),
            mean=_given(estimator.theta_),
            log_scale=variance.log() / 2,
        )
    if not learnable:
        raise SpecError(f"{where}: learnable=False is for GaussianNB; model.freeze('*.psi') stops training")
    prior = np.asarray(estimator.class_log_prior_, dtype=np.float64)
    if kind is ComplementNB and classes > 1:  # which has no use for priors then
        prior = np.zeros(classes)
    if not np.isfinite(prior).all():
        absent = estimator.classes_[~np.isfinite(prior)][0]
        raise SpecError(
            f"{where}: class {absent!r} has a prior of zero; fit it with rows of that class, or give class_prior"
        )
    if kind is CategoricalNB:
        categories = max(table.shape[1] for table in estimator.feature_log_prob_)
        matrix = _of_categories(estimator.feature_log_prob_, categories, where)
        return filled(spec(inputs, classes, "categorical", categories=categories), _given(prior), matrix)
    logs = np.asarray(estimator.feature_log_prob_, dtype=np.float64)
    if kind is not BernoulliNB:
        _check_logs(where, logs)
        return filled(spec(inputs, classes, "multinomial"), _given(prior), _given(logs))
    with np.errstate(divide="ignore"):
        none = np.log(1 - np.exp(logs))  # as scikit-learn rounds it
    _check_logs(where, np.stack((logs, none)))
    made = spec(inputs, classes, "bernoulli", threshold=estimator.binarize)
    return filled(made, _given(prior + none.sum(1)), _given(logs - none))


def _given(values: Any) -> Tensor:
    return torch.tensor(np.asarray(values, dtype=np.float64))


def _check_logs(where: str, logs: Any) -> None:
    if not np.isfinite(logs).all():
        raise SpecError(
            f"{where}: {int((~np.isfinite(logs)).sum()):,} probabilities are zero; fit it with alpha above 0"
        )


def _of_categories(tables: Any, categories: int, where: str) -> Tensor:
    """Return ψ of a `CategoricalNB`, basis-major as κ is: category by category, the inputs of each side by side."""
    rows = []
    for table in tables:
        logs = np.asarray(table, dtype=np.float64)
        _check_logs(where, logs)
        rows.append(np.pad(logs, ((0, 0), (0, categories - logs.shape[1]))))
    return _given(np.stack(rows, -1).reshape(len(rows[0]), -1))


# ------------------------------------------------------------------------------------------------ comparisons


def _compared(model: Model, estimator: Any, x: Any, y: Any, theirs: int) -> Comparison:
    """Compare log-probabilities on all rows, relative where they are larger than one."""
    wanted = torch.tensor(estimator.predict_log_proba(x))
    found = predict_log_proba(model, x)
    deviation = float(((found - wanted).abs() / wanted.abs().clamp_min(1)).max())
    (head,) = (head for _, head in model.heads())
    # Of a constant ψ nothing is filled in, of indicators nothing in κ.
    stores = (head.kappa if "mean" in head.kappa.names() else head.psi, head.pi)
    ours = sum(tensor.numel() for store in stores for tensor in store.state_dict().values())
    return Comparison(
        deviation, ours, theirs, model, torch.tensor(x, dtype=torch.float64), torch.tensor(y), "cross_entropy"
    )


def _rows(name: str, seed: int) -> tuple[Any, Any, Any]:
    """Return a data set of scikit-learn in a random order, and weights of its rows."""
    from sklearn import datasets

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(x))
    return x[order], y[order], generator.uniform(0.1, 2, len(x))


def _gaussian(seed: int) -> Comparison:
    from sklearn.naive_bayes import GaussianNB

    x, y, weight = _rows("iris", seed)
    estimator = GaussianNB().fit(x, y, weight)
    return _compared(from_sklearn(estimator), estimator, x, y, 2 * estimator.var_.size + 3)


def _gaussian_fitted(seed: int) -> Comparison:
    from sklearn.naive_bayes import GaussianNB

    x, y, weight = _rows("wine", seed)
    estimator = GaussianNB(var_smoothing=1e-6).fit(x, y, weight)
    model = fit_gaussian(x, y, sample_weight=weight, smoothing=1e-6)
    return _compared(model, estimator, x, y, 2 * estimator.var_.size + 3)


def _gaussian_in_parts(seed: int) -> Comparison:
    from sklearn.naive_bayes import GaussianNB

    x, y, _ = _rows("breast_cancer", seed)
    estimator, statistics = GaussianNB(), GaussianStatistics.none(x.shape[1], 2)
    for part in np.array_split(np.arange(len(x)), 5):
        estimator.partial_fit(x[part], y[part], classes=[0, 1])
        statistics = partial_fit(statistics, x[part], y[part])
    return _compared(statistics.model(), estimator, x, y, 2 * estimator.var_.size + 2)


def _multinomial(seed: int) -> Comparison:
    from sklearn.naive_bayes import MultinomialNB

    x, y, weight = _rows("digits", seed)
    estimator = MultinomialNB(alpha=0.5).fit(x, y, weight)
    return _compared(from_sklearn(estimator), estimator, x, y, estimator.feature_log_prob_.size + 10)


def _multinomial_fitted(seed: int) -> Comparison:
    from sklearn.naive_bayes import MultinomialNB

    x, y, weight = _rows("digits", seed)
    estimator = MultinomialNB(alpha=0.5).fit(x, y, weight)
    model = fit_multinomial(x, y, sample_weight=weight, alpha=0.5)
    return _compared(model, estimator, x, y, estimator.feature_log_prob_.size + 10)


def _bernoulli(seed: int) -> Comparison:
    from sklearn.naive_bayes import BernoulliNB

    x, y, weight = _rows("digits", seed)
    estimator = BernoulliNB(binarize=7.5).fit(x, y, weight)
    return _compared(from_sklearn(estimator), estimator, x, y, estimator.feature_log_prob_.size + 10)


def _bernoulli_in_parts(seed: int) -> Comparison:
    from sklearn.naive_bayes import BernoulliNB

    x, y, _ = _rows("digits", seed)
    estimator, statistics = BernoulliNB(binarize=7.5), CountStatistics.none(x.shape[1], 10, "bernoulli", threshold=7.5)
    for part in np.array_split(np.arange(len(x)), 5):
        estimator.partial_fit(x[part], y[part], classes=np.arange(10))
        statistics = partial_fit(statistics, x[part], y[part])
    return _compared(statistics.model(), estimator, x, y, estimator.feature_log_prob_.size + 10)


def _complement(seed: int) -> Comparison:
    from sklearn.naive_bayes import ComplementNB

    x, y, weight = _rows("digits", seed)
    estimator = ComplementNB().fit(x, y, weight)
    return _compared(from_sklearn(estimator), estimator, x, y, estimator.feature_log_prob_.size)


def _categorical(seed: int) -> Comparison:
    from sklearn.naive_bayes import CategoricalNB

    x, y, weight = _rows("iris", seed)
    x = (2 * x).round()
    estimator = CategoricalNB().fit(x, y, weight)
    theirs = sum(table.size for table in estimator.feature_log_prob_) + 3
    return _compared(from_sklearn(estimator), estimator, x, y, theirs)


def _case(model: str, data: str, compare: Any) -> Case:
    return Case(f"naive Bayes, {model}", "predict_log_proba", data, "scikit-learn", 1e-9, compare)


PARITY: tuple[Case, ...] = (
    _case("GaussianNB imported", "iris, weighted rows", _gaussian),
    _case("GaussianNB fitted in kapsi", "wine, weighted rows", _gaussian_fitted),
    _case("GaussianNB by partial_fit", "breast cancer, 5 batches", _gaussian_in_parts),
    _case("MultinomialNB imported", "digits, weighted rows", _multinomial),
    _case("MultinomialNB fitted in kapsi", "digits, weighted rows", _multinomial_fitted),
    _case("BernoulliNB imported", "digits, weighted rows", _bernoulli),
    _case("BernoulliNB by partial_fit", "digits, 5 batches", _bernoulli_in_parts),
    _case("ComplementNB imported", "digits, weighted rows", _complement),
    _case("CategoricalNB imported", "iris in halves of a centimeter, weighted rows", _categorical),
)
