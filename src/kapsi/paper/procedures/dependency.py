"""What four models say of iris: which of its variables depend on which, and how well each predicts the species."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Any, Literal

from kapsi.errors import SpecError, did_you_mean
from kapsi.function import Spec, coerce, option
from kapsi.paper.experiment import Outcome, Run
from kapsi.zoo import three_models

__all__ = ["MODELS", "Options", "check", "run"]

MODELS = {
    "naive_bayes": ("naive Bayes", "naive Bayes"),
    "bayesian_network": ("Bayesian network", "Bayesian network"),
    "markov_network": ("Markov network", "Markov network, likelihood"),
    "rpn": ("RPN", "RPN"),
}
"""Name of a model: that of its graph, and that of its accuracy, in `kapsi.zoo.three_models`."""


@dataclass(frozen=True)
class Options(Spec):
    """The options.

    Args:
        model: a key of `MODELS`; by default the name of the method.
        table: of which the graphs are; by default that which the row is called after.
        strongest: how many combinations of inputs with the largest positive, and as many with the largest negative entries
            the graph of the RPN shows.
        folds: number of folds; there are 50 rows of each species.
    """

    model: str
    table: Literal["iris"] = "iris"
    strongest: int = option(2, minimum=1, maximum=14)
    folds: int = option(10, minimum=2, maximum=50)

    def check(self) -> None:
        if self.model not in MODELS:
            hint = did_you_mean(self.model, MODELS)
            raise SpecError(f"model: there is no {self.model!r}; {hint}choose from {', '.join(MODELS)}")


def _options(run: Run) -> Options:
    run.expects("accuracy", "validation")
    own: Options = coerce(Options, {"model": run.method, "table": run.row, **run.options}, run.where)
    return own


def check(run: Run) -> None:
    """Raise a `SpecError` where the options of a run do not fit."""
    _options(run)


def run(run: Run) -> Outcome:
    """Score one model by ten folds that the seed spreads, and write down the graph of the model that is fitted to all rows.

    Options: those of `Options`. Nothing is chosen, so there are no validation rows. `extra` has `nodes`, and `arrows` and `lines`
    as pairs of their numbers.

    Raises:
        SpecError: an option that there is not, or one that does not fit.
    """
    own = _options(run)
    started = time.process_time()
    graph_name, score_name = MODELS[own.model]
    (score,) = three_models.scores(own.folds, run.seed, [score_name])
    seconds = time.process_time() - started
    graph = next(each for each in _graphs(own.strongest) if each.model == graph_name)
    extra: dict[str, Any] = {
        "nodes": list(three_models.NODES),
        "arrows": [list(pair) for pair in graph.arrows],
        "lines": [list(pair) for pair in graph.lines],
        "deviation_of_folds": score.deviation,
    }
    return Outcome(score.mean, seconds=seconds, extra=extra)


@functools.cache
def _graphs(strongest: int) -> tuple[three_models.Graph, ...]:
    """Return the graphs, which no seed changes."""
    return tuple(three_models.graphs(strongest))
