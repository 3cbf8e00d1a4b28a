"""Bayesian networks: log-probabilities of families and parent sets as κ, a ψ that adds the ones and subtracts the others."""

from __future__ import annotations

from kapsi.zoo.bayesian_network.convert import PARITY, from_pgmpy
from kapsi.zoo.bayesian_network.estimation import encode, fit_discrete, fit_gaussian
from kapsi.zoo.bayesian_network.inference import log_conditional, log_marginal, log_posterior
from kapsi.zoo.bayesian_network.model import LOG_ZERO, spec
from kapsi.zoo.bayesian_network.structure import hill_climb, parents_from_pgmpy, structure_score

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
