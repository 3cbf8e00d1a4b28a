"""The dependency graphs of iris as an experiment."""

from __future__ import annotations

import pytest

import kapsi as kp
from kapsi.paper.experiment import Run, load_shipped
from kapsi.paper.procedures import dependency
from kapsi.zoo import three_models


def test_scores_and_graphs_are_those_of_the_zoo() -> None:
    experiment = load_shipped("dependency")
    graphs = {graph.model: graph for graph in three_models.graphs(2)}
    for method, (graph_name, score_name) in dependency.MODELS.items():
        run = experiment.run(experiment.row("iris"), experiment.method(method), 3, quick=True)
        made = dependency.run(run)
        (score,) = three_models.scores(3, 3, [score_name])
        assert made.score == score.mean > 0.85
        assert made.extra["nodes"][-1] == "species"
        assert made.extra["arrows"] == [list(pair) for pair in graphs[graph_name].arrows]
        assert made.extra["lines"] == [list(pair) for pair in graphs[graph_name].lines]


def test_some_of_the_models() -> None:
    names = [score.model for score in three_models.scores(3, 0, ["Bayesian network", "naive Bayes"])]
    assert names == ["naive Bayes", "Bayesian network"]
    with pytest.raises(kp.SpecError, match="got 'naive'"):
        three_models.scores(3, 0, ["naive"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "rnp"}, "did you mean rpn"),
        ({"strongest": 0}, "strongest"),
        ({"folds": True}, "folds"),
        ({"fold": 3}, "'fold'"),
        ({"folds": 51}, "folds"),
        ({"strongest": 15}, "strongest"),
        ({"table": "pima"}, "expected one of iris, got 'pima'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(kp.SpecError, match=message) as error:
        dependency.run(Run("dependency", "iris", "rpn", 0, options=options, procedure="dependency", metric="accuracy"))
    assert "\n" not in str(error.value)
