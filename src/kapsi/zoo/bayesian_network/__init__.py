"""Bayesian networks: κ has log-probabilities of families and parent sets, ψ adds the former and subtracts the latter."""

from __future__ import annotations

from kapsi.zoo.bayesian_network.convert import PARITY, from_pgmpy
from kapsi.zoo.bayesian_network.estimation import encode, fit_discrete, fit_gaussian
from kapsi.zoo.bayesian_network.inference import log_conditional, log_marginal, log_posterior
from kapsi.zoo.bayesian_network.model import spec
from kapsi.zoo.bayesian_network.structure import hill_climb, parents_from_pgmpy, structure_score
from kapsi.zoo.graphical import LOG_ZERO

__all__ = [
    "LOG_ZERO",
    "PARITY",
    "encode",
    "fit_discrete",
    "fit_gaussian",
    "from_pgmpy",
    "hill_climb",
    "log_conditional",
    "log_marginal",
    "log_posterior",
    "parents_from_pgmpy",
    "spec",
    "structure_score",
]
