"""Naive Bayes: κ has the log-densities of each input and class, a constant ψ adds those of a class, π has the log-priors.

Outputs are joint log-likelihoods log p(x, class); `kapsi.predict_log_proba` gives the log-probabilities of the classes.
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
