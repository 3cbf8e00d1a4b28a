"""Converter of scikit-learn's naive Bayes classifiers, and parity cases."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.modules import Model
from kapsi.training.prediction import predict_log_proba
from kapsi.zoo.base import Case, Comparison, check_estimator, deviation, float64, model_of, sklearn_rows
from kapsi.zoo.naive_bayes.estimation import (
    CountStatistics,
    GaussianStatistics,
    fit_gaussian,
    fit_multinomial,
    partial_fit,
)
from kapsi.zoo.naive_bayes.model import check_variance, spec


def from_sklearn(estimator: Any, *, learnable: bool = True) -> Model:
    """Return a fitted scikit-learn naive Bayes classifier as a model in float64, with outputs in the order of `classes_`.

    Outputs are the joint log-likelihoods; `kapsi.predict_log_proba(model, x)` equals `estimator.predict_log_proba(x)`. The
    parameters of `GaussianNB` become those of its densities, all others a dense ψ.

    A category of `CategoricalNB` unseen in training counts as missing; scikit-learn raises an index error.

    Args:
        estimator: a fitted `GaussianNB`, `MultinomialNB`, `BernoulliNB`, `ComplementNB` or `CategoricalNB`.
        learnable: whether means and scales of `GaussianNB` are trainable; otherwise the model has no trainable parameters.

    Raises:
        SpecError: an unsupported or unfitted estimator, or probabilities of zero.
    """
    from sklearn.naive_bayes import BernoulliNB, CategoricalNB, ComplementNB, GaussianNB, MultinomialNB

    where = check_estimator(
        estimator, (GaussianNB, MultinomialNB, BernoulliNB, ComplementNB, CategoricalNB), "from_sklearn"
    )
    kind, inputs, classes = type(estimator), int(estimator.n_features_in_), len(estimator.classes_)
    if kind is GaussianNB:
        log_prior = _log_prior(where, float64(estimator.class_prior_).log(), estimator.classes_)
        variance = float64(estimator.var_)
        check_variance(where, variance, "var_smoothing")
        kappa = {"mean": float64(estimator.theta_), "log_scale": variance.log() / 2}
        return model_of(spec(inputs, classes, learnable=learnable), remainder={"value": log_prior}, expansion=kappa)
    if not learnable:
        raise SpecError(f"{where}: learnable=False is for GaussianNB; use model.freeze('*.psi') against training")
    if kind is ComplementNB and classes > 1:  # ignores priors
        log_prior = torch.zeros(classes, dtype=torch.float64)
    else:
        log_prior = _log_prior(where, estimator.class_log_prior_, estimator.classes_)
    if kind is CategoricalNB:
        categories = max(table.shape[1] for table in estimator.feature_log_prob_)
        architecture = spec(inputs, classes, "categorical", categories=categories)
        matrix = _category_matrix(estimator.feature_log_prob_, categories, where)
    elif kind is BernoulliNB:
        present = np.asarray(estimator.feature_log_prob_, dtype=np.float64)
        with np.errstate(divide="ignore"):
            absent = np.log(1 - np.exp(present))  # rounded as in scikit-learn
        _check_logs(where, np.stack((present, absent)))
        architecture = spec(inputs, classes, "bernoulli", threshold=estimator.binarize)
        matrix, log_prior = float64(present - absent), log_prior + float64(absent.sum(1))
    else:
        _check_logs(where, estimator.feature_log_prob_)
        architecture, matrix = spec(inputs, classes, "multinomial"), float64(estimator.feature_log_prob_)
    return model_of(architecture, remainder={"value": log_prior}, reconciliation={"matrix": matrix})


def _log_prior(where: str, values: Any, classes: Any) -> Tensor:
    """Return finite log-priors."""
    finite = np.isfinite(np.asarray(values))
    if not finite.all():
        raise SpecError(
            f"{where}: class {classes[~finite][0]!r} has a prior of zero; fit with rows of each class, or set the priors"
        )
    return float64(values)


def _check_logs(where: str, logs: Any) -> None:
    if not np.isfinite(logs).all():
        raise SpecError(f"{where}: {int((~np.isfinite(logs)).sum()):,} probabilities are zero; fit with alpha above 0")


def _category_matrix(tables: Any, categories: int, where: str) -> Tensor:
    """Return ψ of a `CategoricalNB` in the order of κ: category by category, with all inputs of each."""
    rows = []
    for table in tables:
        _check_logs(where, table)
        rows.append(np.pad(np.asarray(table, dtype=np.float64), ((0, 0), (0, categories - table.shape[1]))))
    return float64(np.stack(rows, -1).reshape(len(rows[0]), -1))


# ------------------------------------------------------------------------------------------------ parity


def _rows(data: str, seed: int) -> tuple[Any, Any, Any]:
    """Return a scikit-learn data set in random order, and random row weights."""
    x, y = sklearn_rows(data, seed)
    generator = np.random.default_rng(seed)
    generator.permutation(len(x))  # drawn for the order
    return x, y, generator.uniform(0.1, 2, len(x))


def _comparison(model: Model, estimator: Any, x: Any, y: Any) -> Comparison:
    """Compare log-probabilities of all rows."""
    difference = deviation(predict_log_proba(model, x), estimator.predict_log_proba(x))
    ((_, head),) = model.heads()
    # Fitted are κ or ψ, and π.
    stores = (head.kappa if "mean" in head.kappa.names() else head.psi, head.pi)
    ours = sum(tensor.numel() for store in stores for tensor in store.state_dict().values())
    tables = [estimator.theta_, estimator.var_] if hasattr(estimator, "theta_") else estimator.feature_log_prob_
    theirs = sum(np.size(table) for table in tables)
    theirs += 0 if type(estimator).__name__ == "ComplementNB" else len(estimator.classes_)
    rows, labels = torch.tensor(x, dtype=torch.float64), torch.tensor(y)
    return Comparison(difference, ours, theirs, model, rows, labels, "cross_entropy")


def _imported(seed: int, *, name: str, data: str, **options: Any) -> Comparison:
    from sklearn import naive_bayes

    x, y, weight = _rows(data, seed)
    if name == "CategoricalNB":
        x = (2 * x).round()
    estimator = getattr(naive_bayes, name)(**options).fit(x, y, weight)
    return _comparison(from_sklearn(estimator), estimator, x, y)


def _gaussian_fitted(seed: int) -> Comparison:
    from sklearn.naive_bayes import GaussianNB

    x, y, weight = _rows("wine", seed)
    estimator = GaussianNB(var_smoothing=1e-6).fit(x, y, weight)
    return _comparison(fit_gaussian(x, y, sample_weight=weight, smoothing=1e-6), estimator, x, y)


def _multinomial_fitted(seed: int) -> Comparison:
    from sklearn.naive_bayes import MultinomialNB

    x, y, weight = _rows("digits", seed)
    estimator = MultinomialNB(alpha=0.5).fit(x, y, weight)
    return _comparison(fit_multinomial(x, y, sample_weight=weight, alpha=0.5), estimator, x, y)


def _in_batches(data: str, seed: int) -> Comparison:
    from sklearn.naive_bayes import BernoulliNB, GaussianNB

    x, y, _ = _rows(data, seed)
    classes = np.unique(y)
    statistics: GaussianStatistics | CountStatistics
    if data == "digits":
        estimator = BernoulliNB(binarize=7.5)
        statistics = CountStatistics.none(x.shape[1], len(classes), "bernoulli", threshold=7.5)
    else:
        estimator, statistics = GaussianNB(), GaussianStatistics.none(x.shape[1], len(classes))
    for batch in np.array_split(np.arange(len(x)), 5):
        estimator.partial_fit(x[batch], y[batch], classes=classes)
        statistics = partial_fit(statistics, x[batch], y[batch])
    return _comparison(statistics.model(), estimator, x, y)


def _case(model: str, data: str, compare: Any) -> Case:
    return Case(f"naive Bayes, {model}", "predict_log_proba", data, "scikit-learn", 1e-9, compare)


PARITY: tuple[Case, ...] = (
    _case("GaussianNB imported", "iris, weighted rows", partial(_imported, name="GaussianNB", data="iris")),
    _case("GaussianNB fitted in kapsi", "wine, weighted rows", _gaussian_fitted),
    _case("GaussianNB by partial_fit", "breast cancer, 5 batches", partial(_in_batches, "breast_cancer")),
    _case(
        "MultinomialNB imported",
        "digits, weighted rows",
        partial(_imported, name="MultinomialNB", data="digits", alpha=0.5),
    ),
    _case("MultinomialNB fitted in kapsi", "digits, weighted rows", _multinomial_fitted),
    _case(
        "BernoulliNB imported",
        "digits, weighted rows",
        partial(_imported, name="BernoulliNB", data="digits", binarize=7.5),
    ),
    _case("BernoulliNB by partial_fit", "digits, 5 batches", partial(_in_batches, "digits")),
    _case("ComplementNB imported", "digits, weighted rows", partial(_imported, name="ComplementNB", data="digits")),
    _case(
        "CategoricalNB imported",
        "iris in halves of a centimeter, weighted rows",
        partial(_imported, name="CategoricalNB", data="iris"),
    ),
)
