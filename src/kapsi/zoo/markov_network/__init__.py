"""Markov networks: κ has indicators of joint states of cliques, or products of inputs, ψ has log-potentials."""

from __future__ import annotations

from kapsi.zoo.graphical import LOG_ZERO
from kapsi.zoo.markov_network.convert import PARITY, from_pgmpy
from kapsi.zoo.markov_network.estimation import fit, fit_counts, fit_gaussian
from kapsi.zoo.markov_network.inference import log_marginal, log_partition, log_posterior, normalized
from kapsi.zoo.markov_network.model import from_precision, spec

__all__ = [
    "LOG_ZERO",
    "PARITY",
    "fit",
    "fit_counts",
    "fit_gaussian",
    "from_pgmpy",
    "from_precision",
    "log_marginal",
    "log_partition",
    "log_posterior",
    "normalized",
    "spec",
]
