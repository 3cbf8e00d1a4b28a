"""What four models say of iris: which of its variables depend on which, and how well each predicts the species."""

from __future__ import annotations

import functools
import time
from typing import Any

from kapsi.errors import SpecError, did_you_mean
from kapsi.paper.experiment import Outcome, Run
from kapsi.zoo import three_models

__all__ = ["MODELS", "run"]

MODELS = {
    "naive_bayes": ("naive Bayes", "naive Bayes"),
    "bayesian_network": ("Bayesian network", "Bayesian network"),
    "markov_network": ("Markov network", "Markov network, likelihood"),
    "rpn": ("RPN", "RPN"),
}
"""Name of a model: that of its graph, and that of its accuracy, in `kapsi.zoo.three_models`."""


def run(run: Run) -> Outcome:
    """Score one model by ten folds that the seed spreads, and write down the graph of the model that is fitted to all rows.

    Options: `model`, a key of `MODELS`, by default the name of the method; `strongest`, how many combinations of inputs with the
    largest positive, and as many with the largest negative entries the graph of the RPN shows; `folds` (10). Nothing is chosen,
    so there are no validation rows. `extra` has `nodes`, and `arrows` and `lines` as pairs of their numbers.

    Raises:
        SpecError: an option that there is not, or one that does not fit.
    """
    where = f"{run.experiment}, {run.row}, {run.method}"
    unknown = set(run.options) - {"model", "strongest", "folds"}
    if unknown:
        raise SpecError(f"{where}: there is no option {sorted(unknown)[0]!r} here; there are model, strongest, folds")
    name = run.options.get("model", run.method)
    if name not in MODELS:
        hint = did_you_mean(str(name), MODELS)
        raise SpecError(f"{where}.model: there is no {name!r}; {hint}choose from {', '.join(MODELS)}")
    for option in ("strongest", "folds"):
        value = run.options.get(option, 2)
        if isinstance(value, bool) or not isinstance(value, int) or value < (2 if option == "folds" else 1):
            raise SpecError(
                f"{where}.{option}: expected a whole number of at least {2 if option == 'folds' else 1}, got {value!r}"
            )
    started = time.process_time()
    graph_name, score_name = MODELS[name]
    (score,) = three_models.scores(run.options.get("folds", 10), run.seed, [score_name])
    seconds = time.process_time() - started
    graph = next(each for each in _graphs(run.options.get("strongest", 2)) if each.model == graph_name)
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
