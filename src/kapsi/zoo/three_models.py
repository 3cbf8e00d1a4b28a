"""Naive Bayes, Bayesian network, Markov network and RPN on iris: accuracy and dependency graphs side by side."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kapsi.calibrate import calibrate
from kapsi.errors import SpecError, check_choice, check_integer
from kapsi.expansion import CombinatorialNormal
from kapsi.files import atomic
from kapsi.modules import Model
from kapsi.reconciliation import Dense
from kapsi.remainder import LinearRemainder
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec
from kapsi.training.engine import fit
from kapsi.training.prediction import predict
from kapsi.zoo import bayesian_network, markov_network, naive_bayes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NODES = ("sepal length", "sepal width", "petal length", "petal width", "species")
LABEL = 4
BINS = 3
MOST_IN_TRIPLES = 10
"""Largest number of inputs for densities of three inputs."""
STATES = (BINS,) * 4 + (3,)

Fitted = Callable[[Tensor], Tensor]
"""Maps inputs to predicted class labels."""


class Score(NamedTuple):
    """Accuracy on held-out rows.

    Attributes:
        model: name of the model.
        mean, deviation: mean and standard deviation of the accuracy over the folds.
    """

    model: str
    mean: float
    deviation: float


class Graph(NamedTuple):
    """Dependency graph, with nodes as indices of `NODES`.

    Attributes:
        model: name of the model.
        arrows: directed pairs (from, to).
        lines: undirected pairs.
    """

    model: str
    arrows: tuple[tuple[int, int], ...]
    lines: tuple[tuple[int, int], ...]


def scores(folds: int = 10, seed: int = 0, models: Sequence[str] | None = None) -> list[Score]:
    """Return the accuracy of five models by stratified cross-validation; bins use training rows only.

    Args:
        folds: number of folds.
        seed: seed of the row order.
        models: names of models; default: all.
    """
    for name in models or ():
        check_choice("scores(models)", name, _MODELS)
    from sklearn.model_selection import StratifiedKFold

    x, y = _iris()
    splits = list(StratifiedKFold(folds, shuffle=True, random_state=seed).split(x.numpy(), y.numpy()))
    results = []
    for name, train_model in _MODELS.items():
        if models is None or name in models:
            accuracy = [
                float((train_model(x[train], y[train])(x[test]) == y[test]).double().mean()) for train, test in splits
            ]
            mean = sum(accuracy) / folds
            results.append(Score(name, mean, math.sqrt(sum((value - mean) ** 2 for value in accuracy) / folds)))
    return results


def graphs(strongest: int = 2) -> list[Graph]:
    """Return the dependency graphs of four models fitted to all rows.

    Naive Bayes and the Markov network have the specified structure: each input depends on the species alone; all nodes depend on
    each other. Hill climbing on the Bayesian information criterion sets the structure of the Bayesian network. The RPN shows the
    combinations of inputs with the largest entries of ψ, each times the standard deviation of its column.

    Args:
        strongest: number of combinations with the largest positive entries, and of combinations with the largest negative
            entries, at least 1.
    """
    check_integer("graphs(strongest)", strongest, 1)
    return dependencies(*_iris(), strongest)


def dependencies(x: Tensor, y: Tensor, strongest: int = 2) -> list[Graph]:
    """Return the graphs of `graphs` for other rows; the node of the target has the last number.

    Args:
        x: inputs `(rows, m)`, float64, finite, at least two inputs.
        y: class indices `(rows,)`.
        strongest: see `graphs`.
    """
    inputs, label = x.shape[1], x.shape[1]
    states = (BINS,) * inputs + (int(y.max()) + 1,)
    parents = bayesian_network.hill_climb(_binned(x, y, _edges(x)), states=states)
    largest = min(3, inputs) if inputs <= MOST_IN_TRIPLES else 2
    model = _trained(x, y, largest)
    (_, head), *_ = model.heads()
    with torch.no_grad():
        strength = head.psi["matrix"] * head.expand(x).dense().std(0)
    subsets = [c for size in range(1, largest + 1) for c in itertools.combinations(range(inputs), size)]
    strongest = min(strongest, len(subsets))
    top, bottom = strength.amax(0).topk(strongest).indices, (-strength.amin(0)).topk(strongest).indices
    chosen = [subsets[i] for i in sorted({*top.tolist(), *bottom.tolist()})]
    near = sorted({pair for subset in chosen for pair in itertools.combinations(subset, 2)})
    return [
        Graph("naive Bayes", tuple((label, i) for i in range(inputs)), ()),
        Graph("Bayesian network", tuple((p, i) for i, sources in enumerate(parents) for p in sources), ()),
        Graph("Markov network", (), tuple(itertools.combinations(range(inputs + 1), 2))),
        Graph("RPN", tuple((i, label) for i in sorted({i for subset in chosen for i in subset})), tuple(near)),
    ]


def figure(strongest: int = 2) -> Figure:
    """Return the dependency graphs side by side, as a matplotlib figure."""
    return draw(graphs(strongest))


def draw(graphs: Sequence[Graph]) -> Figure:
    """Return graphs side by side, as a matplotlib figure."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(3.2 * len(graphs), 3.4), layout="constrained")
    for axes, graph in zip(picture.subplots(1, len(graphs), squeeze=False)[0], graphs, strict=True):
        _draw(axes, graph)
    return picture


def save(path: str | Path, strongest: int = 2) -> None:
    """Write the figure to a file: SVG, PNG or PDF by extension."""
    target = Path(path)
    if target.suffix not in (".svg", ".png", ".pdf"):
        raise SpecError(f"save: expected a file name with .svg, .png or .pdf, got {target.name}")
    from matplotlib import rc_context

    # Bitwise identical files.
    with rc_context({"svg.hashsalt": "kapsi"}), atomic(target) as part:
        metadata = {"Date": None} if target.suffix == ".svg" else None
        figure(strongest).savefig(part, format=target.suffix[1:], metadata=metadata)


PLACES = ((-1.25, 0.3), (1.25, 0.3), (-0.8, -1.1), (0.8, -1.1), (0.0, 1.15))


def _draw(axes: Axes, graph: Graph) -> None:
    axes.set_title(graph.model)
    axes.set_axis_off()
    axes.set_xlim(-1.8, 1.8)
    axes.set_ylim(-1.55, 1.45)
    for pairs, style, color in ((graph.lines, "-", "0.6"), (graph.arrows, "-|>", "tab:blue")):
        for a, b in pairs:
            arrow = {"arrowstyle": style, "color": color, "shrinkA": 22, "shrinkB": 22, "lw": 1.4, "mutation_scale": 14}
            axes.annotate("", PLACES[b], PLACES[a], arrowprops=arrow)
    for node, (left, up) in enumerate(PLACES):
        box = {"boxstyle": "round,pad=0.35", "fc": "moccasin" if node == LABEL else "white", "ec": "0.3"}
        axes.text(left, up, NODES[node].replace(" ", "\n"), ha="center", va="center", size=9, bbox=box)


# ------------------------------------------------------------------------------------------------ the models


def _iris() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_iris

    x, y = load_iris(return_X_y=True)
    return torch.tensor(x, dtype=torch.float64), torch.tensor(y)


def _edges(x: Tensor) -> Tensor:
    """Return the inner edges of bins with nearly equal numbers of rows, `(4, bins − 1)`."""
    return torch.quantile(x, torch.arange(1, BINS, dtype=torch.float64) / BINS, dim=0).T.contiguous()


def _binned(x: Tensor, y: Tensor | None, edges: Tensor) -> Tensor:
    """Return the bin indices of the inputs, followed by the species if given."""
    codes = torch.searchsorted(edges, x.T.contiguous()).T.double()
    return codes if y is None else torch.cat((codes, y.double().unsqueeze(1)), 1)


def _naive(x: Tensor, y: Tensor) -> Fitted:
    model = naive_bayes.fit_gaussian(x, y)
    return lambda rows: predict(model, rows, "cross_entropy")


def _on_bins(fit_codes: Callable[[Tensor], Model], x: Tensor, y: Tensor) -> Fitted:
    edges = _edges(x)
    model = fit_codes(_binned(x, y, edges))
    return lambda rows: predict(model, _binned(rows, None, edges), "cross_entropy")


def _bayesian(codes: Tensor) -> Model:
    parents = bayesian_network.hill_climb(codes, states=STATES)
    return bayesian_network.fit_discrete(codes, parents, states=STATES, label=LABEL)


def _markov_counts(codes: Tensor) -> Model:
    return markov_network.fit_counts(codes, [tuple(range(5))], states=STATES, label=LABEL)


def _markov(codes: Tensor) -> Model:
    cliques = [(i, j, LABEL) for i, j in itertools.combinations(range(4), 2)]
    return markov_network.fit(codes, cliques, states=STATES, label=LABEL, penalty=0.01)


def _trained(x: Tensor, y: Tensor, largest: int = 3) -> Model:
    """Return an RPN of the joint normal densities of 1 to `largest` inputs, trained on the classes."""
    head = HeadSpec(CombinatorialNormal(largest), Dense(), LinearRemainder(), bias=True)
    widths = (x.shape[1], int(y.max()) + 1)
    model = calibrate(Model(ModelSpec(widths, (LayerSpec((head,)),)), seed=0, dtype=torch.float64), x)
    fit(model, (x, y), loss="cross_entropy", solver="lbfgs", l2=1e-3, epochs=50)
    return model.eval()


def _rpn(x: Tensor, y: Tensor) -> Fitted:
    model = _trained(x, y)
    return lambda rows: predict(model, rows, "cross_entropy")


_MODELS: dict[str, Callable[[Tensor, Tensor], Fitted]] = {
    "naive Bayes": _naive,
    "Bayesian network": partial(_on_bins, _bayesian),
    "Markov network, counts": partial(_on_bins, _markov_counts),
    "Markov network, likelihood": partial(_on_bins, _markov),
    "RPN": _rpn,
}
