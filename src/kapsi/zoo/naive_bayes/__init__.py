"""Naive Bayes: log-densities of each input, class by class; a constant ψ that adds those of a class; the log-priors as π.

Outputs are joint log-likelihoods log p(x, class), so that `kapsi.predict_log_proba` has the log-probabilities of the classes.
"""

from __future__ import annotations

from kapsi.zoo.naive_bayes.convert import PARITY, from_sklearn
from kapsi.zoo.naive_bayes.estimation import (
    CountStatistics,
    GaussianStatistics,
    fit_bernoulli,
    fit_gaussian,
    fit_multinomial,
    fit_naive,
    partial_fit,
)
from kapsi.zoo.naive_bayes.model import learned, spec

__all__ = [
    "PARITY",
    "CountStatistics",
    "GaussianStatistics",
    "fit_bernoulli",
    "fit_gaussian",
    "fit_multinomial",
    "fit_naive",
    "from_sklearn",
    "learned",
    "partial_fit",
    "spec",
]
