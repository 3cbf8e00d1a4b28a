"""Dependencies between the variables of iris in four models, and how well each model predicts the species."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Any, Literal

from kapsi.function import Spec, coerce, option
from kapsi.paper.experiment import Outcome, Run
from kapsi.paper.short_forms import require_known
from kapsi.zoo import three_models

MODELS = {
    "naive_bayes": ("naive Bayes", "naive Bayes"),
    "bayesian_network": ("Bayesian network", "Bayesian network"),
    "markov_network": ("Markov network", "Markov network, likelihood"),
    "rpn": ("RPN", "RPN"),
}
"""Model: the names of its graph and of its accuracy in `kapsi.zoo.three_models`."""


def _model(value: Any, where: str) -> Any:
    require_known([value], MODELS, where)
    return value


@dataclass(frozen=True)
class DependencyOptions(Spec):
    """Options of the procedure `dependency`.

    Args:
        model: key of `MODELS`, by default the name of the method.
        table: name of the table, by default the name of the row.
        strongest: number of combinations of inputs in the graph of the RPN, with the largest positive and negative entries each.
        folds: number of folds; there are 50 rows of each species.
    """

    model: str = option(read=_model)
    table: Literal["iris"] = "iris"
    strongest: int = option(2, minimum=1, maximum=14)
    folds: int = option(10, minimum=2, maximum=50)


def read_options(run: Run) -> DependencyOptions:
    """Return the options of a run."""
    run.expects("accuracy", "validation")
    data = {"model": run.method, "table": run.row, **run.options}
    options: DependencyOptions = coerce(DependencyOptions, data, run.where)
    return options


def run(run: Run) -> Outcome:
    """Score a model by cross-validation, and record the graph of the model fitted to all rows.

    Options: `DependencyOptions`. Without a selection there are no validation rows. `extra` has `nodes`, and `arrows` and
    `lines` as pairs of node numbers.

    Raises:
        SpecError: unknown option, or invalid value.
    """
    options = read_options(run)
    started = time.process_time()
    graph_name, score_name = MODELS[options.model]
    (score,) = three_models.scores(options.folds, run.seed, [score_name])
    seconds = time.process_time() - started
    graph = next(graph for graph in _graphs(options.strongest) if graph.model == graph_name)
    extra: dict[str, Any] = {
        "nodes": list(three_models.NODES),
        "arrows": [list(pair) for pair in graph.arrows],
        "lines": [list(pair) for pair in graph.lines],
        "deviation_of_folds": score.deviation,
    }
    return Outcome(score.mean, seconds=seconds, extra=extra)


@functools.cache
def _graphs(strongest: int) -> tuple[three_models.Graph, ...]:
    """Return the graphs, the same for every seed."""
    return tuple(three_models.graphs(strongest))
