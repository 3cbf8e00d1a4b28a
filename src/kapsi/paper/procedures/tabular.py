"""Small tables by cross-validation: everything is chosen inside of the training rows of each fold.

A run is one repeat: the rows are spread over ten folds by the seed, each class evenly, and the score is the mean accuracy of the
folds. In each fold

1. inputs are standardized by the training rows (for multinomial naive Bayes moved to [0, 1], for Bayesian and Markov networks cut
   into bins);
2. candidates are compared by ten folds of the training rows;
3. the chosen one is fitted to all training rows, and scored once on the rows of the fold.

A candidate is a model and a penalty. The rule `one_standard_error` takes the first candidate that is not surely worse than the best
one: whose mean loss on the rows left out is above the lowest by at most one standard error of the difference, row by row.
Candidates stand from simple to flexible, penalties from strong to weak, so that what differs by chance alone does not count.

Under the protocol `paper` the one candidate is trained on the training rows, and the score is that of the best epoch on the rows
of the fold.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kapsi.data.bundled import BUNDLED, bundled
from kapsi.data.tabular import folds, make_problem
from kapsi.errors import SpecError
from kapsi.function import coerce
from kapsi.modules import Model, calibrate, trained_count
from kapsi.paper.experiment import Outcome, Run
from kapsi.paper.procedures import classifiers
from kapsi.paper.procedures.choice import Pair, choose
from kapsi.spec import ModelSpec, from_dict
from kapsi.training.config import TrainConfig
from kapsi.training.engine import train
from kapsi.training.selection import near_zero
from kapsi.zoo import bayesian_network, markov_network

__all__ = ["Candidate", "Rule", "first_good", "fitted", "run"]

Rows = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
OWN = ("table", "classifier", "folds", "inner", "rule", "limit_folds")
NETWORKS_OF_TABLES = ("bayesian_network", "markov_network")


@dataclass(frozen=True)
class Candidate:
    """A model and how it is trained.

    Args:
        name: in results.
        spec: with all widths.
        training: of it.
    """

    name: str
    spec: ModelSpec
    training: TrainConfig


@dataclass(frozen=True)
class Rule:
    """How one of the candidates is chosen.

    Args:
        by: `log_loss`, or `accuracy`, of the rows left out.
        rule: `one_standard_error`, the first that is not surely worse than the best; `best`.
    """

    by: str = "log_loss"
    rule: str = "one_standard_error"


def run(run: Run) -> Outcome:
    """Fit one classifier in every fold, and score it on the rows of the fold.

    Options, beside those of the kind: `table`, one of iris, pima, banknote, by default the name of the row; `classifier`: `model`
    (`candidates`, a list of {name, model, training, penalties}, and `rule`), `bayesian_network` (`bins`), `markov_network` (`bins`,
    `penalties`), or a kind of `procedures.classifiers`; `folds` (10), and `inner` (10), the folds of the training rows;
    `limit_folds`, how many of the folds are done.

    Raises:
        SpecError: an option that there is not, or one that does not fit.
    """
    where = f"{run.experiment}, {run.row}, {run.method}"
    options = dict(run.options)
    own = {name: options.pop(name) for name in OWN if name in options}
    name = own.get("table", run.row)
    if name not in BUNDLED:
        raise SpecError(f"{where}.table: expected one of {', '.join(BUNDLED)}, got {name!r}")
    table, target = bundled(name)
    problem = make_problem(table, target, task="classification")
    x = np.stack([column.numbers for key, column in table.columns.items() if key != target], 1)
    y, classes = np.asarray(problem.y, dtype=np.int64), len(problem.classes or ())
    count, inner = (_count(own.get(key, 10), f"{where}.{key}") for key in ("folds", "inner"))
    kinds = ("model", *NETWORKS_OF_TABLES, *classifiers.KINDS)
    kind = classifiers.kind_of(own.get("classifier", "model"), tuple(dict.fromkeys(kinds)), where)
    started = time.process_time()
    scores, validations, chosen, parameters = [], [], [], []
    for test in folds(y, count, classes=True, seed=run.seed)[: own.get("limit_folds")]:
        kept = np.setdiff1d(np.arange(len(y)), test)
        fold = _Fold(x[kept], y[kept], x[test], y[test], classes, run.seed, inner, where)
        if run.protocol == "paper":
            found = _paper(fold, options)
        elif kind == "model":
            found = _models(fold, options, own.get("rule") or {})
        elif kind in NETWORKS_OF_TABLES:
            found = _tables(fold, kind, options)
        else:
            found = _classifier(fold, kind, options)
        scores.append(float((found.predicted == y[test]).mean()) if found.score is None else found.score)
        validations.append(found.validation)
        chosen.append(found.chosen)
        parameters.append(found.parameters)
    extra = {
        "folds": scores,
        "deviation_of_folds": float(np.std(scores)),
        "chosen": chosen,
        "inner_folds": inner,
        "parameters": parameters,
    }
    if run.protocol == "paper":
        extra |= {"best_epoch_on_test": float(np.mean(scores)), "best_epoch": chosen}
    known = [value for value in validations if value is not None]
    return Outcome(
        float(np.mean(scores)),
        float(np.mean(known)) if known else None,
        round(float(np.mean(parameters))),
        time.process_time() - started,
        extra,
    )


def _count(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 2:
        raise SpecError(f"{where}: expected a whole number of at least 2, got {value!r}")
    return value


@dataclass(frozen=True, eq=False)
class _Fold:
    """Rows to choose and fit on, and those of the fold."""

    x: Floats
    y: Rows
    test_x: Floats
    test_y: Rows
    classes: int
    seed: int
    inner: int
    where: str

    def parts(self) -> list[tuple[Rows, Rows]]:
        """Return (rows to fit, rows to judge on) of each inner fold."""
        count = min(self.inner, len(self.y))
        held = folds(self.y, count, classes=True, seed=self.seed)
        return [(np.setdiff1d(np.arange(len(self.y)), part), part) for part in held]


@dataclass(frozen=True, eq=False)
class _Found:
    """What came of a fold."""

    predicted: Rows
    chosen: Any
    parameters: int
    validation: float | None = None
    score: float | None = None


# ------------------------------------------------------------------------------------------------ models


def _models(fold: _Fold, options: Mapping[str, Any], rule: Mapping[str, Any]) -> _Found:
    by = _rule(rule, f"{fold.where}.rule")
    candidates = _candidates(fold, options)
    chosen, accuracy = candidates[0], None
    if len(candidates) > 1:
        logs = [np.empty((len(fold.y), fold.classes)) for _ in candidates]
        for kept, held in fold.parts():
            for candidate, values in zip(candidates, logs, strict=True):
                values[held] = _logs(
                    fitted(candidate, fold.x[kept], fold.y[kept], fold.seed), fold.x[held], fold.classes
                )
        wrong = np.stack([values.argmax(1) != fold.y for values in logs]).astype(np.float64)
        losses = np.stack([-values[np.arange(len(fold.y)), fold.y] for values in logs])
        place = first_good(wrong if by.by == "accuracy" else losses, best=by.rule == "best")
        chosen, accuracy = candidates[place], 1 - float(wrong[place].mean())
    model = fitted(chosen, fold.x, fold.y, fold.seed)
    predicted = _logs(model, fold.test_x, fold.classes).argmax(1)
    return _Found(predicted, chosen.name, model.parameters, accuracy)


def _rule(given: Any, where: str) -> Rule:
    if not isinstance(given, Mapping) or set(given) - {"by", "rule"}:
        raise SpecError(f"{where}: expected {{by: …, rule: …}}, got {str(given)[:60]!r}")
    rule = Rule(**given)
    for name, value, allowed in (
        ("by", rule.by, ("log_loss", "accuracy")),
        ("rule", rule.rule, ("one_standard_error", "best")),
    ):
        if value not in allowed:
            raise SpecError(f"{where}.{name}: expected {' or '.join(allowed)}, got {value!r}")
    return rule


def first_good(losses: Floats, *, best: bool = False) -> int:
    """Return the number of the first candidate that is not surely worse than the best one, or of the best one.

    Args:
        losses: of each candidate and row, `(candidates, rows)`.
        best: the one with the lowest mean, the first of equal ones.

    Example:
        >>> first_good(np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]))
        0
        >>> first_good(np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]), best=True)
        1
    """
    means = losses.mean(1)
    lowest = int(means.argmin())
    if best:
        return lowest
    difference = losses - losses[lowest]
    errors = difference.std(1, ddof=1) / math.sqrt(losses.shape[1])
    return int(np.flatnonzero(difference.mean(1) <= errors)[0])


def _candidates(fold: _Fold, options: Mapping[str, Any]) -> list[Candidate]:
    """Return every model with every penalty, in the order in which they are written."""
    unknown = set(options) - {"candidates", "training"}
    if unknown:
        raise SpecError(
            f"{fold.where}: there is no option {sorted(unknown)[0]!r} here; there are candidates, training, rule"
        )
    given = options.get("candidates")
    if not isinstance(given, list) or not given:
        raise SpecError(
            f"{fold.where}.candidates: expected a list of {{name, model, training, penalties}}, got {str(given)[:60]!r}"
        )
    made = []
    for i, entry in enumerate(given):
        where = f"{fold.where}.candidates[{i}]"
        if not isinstance(entry, Mapping) or set(entry) - {"name", "model", "training", "penalties"}:
            raise SpecError(f"{where}: expected {{name, model, training, penalties}}, got {str(entry)[:60]!r}")
        training = {
            "loss": "cross_entropy",
            "solver": "lbfgs",
            **(options.get("training") or {}),
            **(entry.get("training") or {}),
        }
        config: TrainConfig = coerce(TrainConfig, {**training, "seed": fold.seed}, f"{where}.training")
        outputs = 1 if config.loss == "mse" else fold.classes
        spec: ModelSpec = from_dict(entry.get("model"), ModelSpec, f"{where}.model")
        spec = spec.sized(fold.x.shape[1], outputs)
        for penalty in entry.get("penalties") or [config.penalty]:
            name = str(entry.get("name", i)) + ("" if penalty is None else f", penalty {penalty:g}")
            made.append(Candidate(name, spec, replace(config, penalty=penalty)))
    return made


@dataclass(frozen=True, eq=False)
class _Fitted:
    """A model with the scale of its inputs."""

    model: Model
    center: Floats
    spread: Floats

    @property
    def parameters(self) -> int:
        return trained_count(self.model)

    def outputs(self, x: Floats) -> Floats:
        with torch.no_grad():
            made = self.model.eval()(torch.from_numpy((x - self.center) / self.spread))
        return made.numpy().astype(np.float64)


def _scale(x: Floats) -> tuple[Floats, Floats]:
    spread = x.std(0)
    return x.mean(0), np.where(spread > 0, spread, 1.0)


def _made(candidate: Candidate, x: Floats, y: Rows, seed: int) -> tuple[_Fitted, Tensor, Tensor]:
    """Return a new model, calibrated, with the inputs and targets to train it on."""
    center, spread = _scale(x)
    inputs, targets = torch.from_numpy((x - center) / spread), torch.from_numpy(y)
    model = calibrate(Model(candidate.spec, seed=seed, dtype=torch.float64), inputs, targets)
    if candidate.training.loss == "mse":
        return _Fitted(model, center, spread), inputs, targets.double().unsqueeze(1)
    return _Fitted(near_zero(model), center, spread), inputs, targets


def fitted(candidate: Candidate, x: Floats, y: Rows, seed: int) -> _Fitted:
    """Return a candidate fitted to rows, the last iterate."""
    made, inputs, targets = _made(candidate, x, y, seed)
    for _ in train(made.model, (inputs, targets), candidate.training):
        pass
    return made


def _logs(made: _Fitted, x: Floats, classes: int) -> Floats:
    """Return log-probabilities; where the output is the number of a class, nearly 0 for the nearest one and −1 a class away."""
    outputs = made.outputs(x)
    if outputs.shape[1] == classes and classes > 1:
        shifted = outputs - outputs.max(1, keepdims=True)
        return cast(Floats, shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))
    return cast(Floats, -np.abs(outputs - np.arange(classes)))


def _paper(fold: _Fold, options: Mapping[str, Any]) -> _Found:
    """Train the one candidate, and keep the best figure on the rows of the fold, as the paper does."""
    candidates = _candidates(fold, options)
    if len(candidates) > 1:
        raise SpecError(
            f"{fold.where}.candidates: the protocol of the paper chooses among epochs; give one candidate, not {len(candidates)}"
        )
    made, inputs, targets = _made(candidates[0], fold.x, fold.y, fold.seed)
    best, number = -1.0, 0
    for record in train(made.model, (inputs, targets), candidates[0].training):
        right = float((_logs(made, fold.test_x, fold.classes).argmax(1) == fold.test_y).mean())
        if right > best:
            best, number = right, record.number
    return _Found(fold.test_y, number, made.parameters, None, best)


# ------------------------------------------------------------------------------------------------ others


def _classifier(fold: _Fold, kind: str, options: Mapping[str, Any]) -> _Found:
    prepared = functools.partial(_prepared, positive=kind == "naive_bayes_multinomial")

    def part(kept: Rows, held: Rows) -> tuple[Pair, Pair]:
        first, second = prepared(fold.x[kept], fold.x[held])
        return (first, fold.y[kept]), (second, fold.y[held])

    x, test_x = prepared(fold.x, fold.test_x)
    parts = [functools.partial(part, *each) for each in fold.parts()]
    made = choose(kind, (x, fold.y), parts, options, fold.seed, classes=fold.classes, where=fold.where)
    return _Found(made.predict(test_x), dict(made.chosen), made.parameters, made.validation)


def _prepared(x: Floats, other: Floats, *, positive: bool) -> tuple[Floats, Floats]:
    """Return inputs on the scale of the first ones: standardized, or from 0 to 1."""
    if positive:
        low, high = x.min(0), x.max(0)
        width = np.where(high > low, high - low, 1.0)
        return (x - low) / width, ((other - low) / width).clip(0, 1)
    center, spread = _scale(x)
    return (x - center) / spread, (other - center) / spread


def _tables(fold: _Fold, kind: str, options: Mapping[str, Any]) -> _Found:
    """Choose the number of bins (and the penalty of a Markov network) by the mean accuracy of the inner folds."""
    unknown = set(options) - {"bins", "penalties", "restarts"}
    if unknown:
        raise SpecError(
            f"{fold.where}: there is no option {sorted(unknown)[0]!r} here; there are bins, penalties, restarts"
        )
    grid = list(itertools.product(options.get("bins", [3]), options.get("penalties", [0.01])))
    restarts = int(options.get("restarts", 5))
    means = np.zeros(len(grid))
    if len(grid) > 1:
        for kept, held in fold.parts():
            for i, (bins, penalty) in enumerate(grid):
                predict, _ = _network(kind, fold.x[kept], fold.y[kept], fold.classes, bins, penalty, restarts)
                means[i] += float((predict(fold.x[held]) == fold.y[held]).mean())
    bins, penalty = grid[int(means.argmax())]
    predict, parameters = _network(kind, fold.x, fold.y, fold.classes, bins, penalty, restarts)
    chosen = {"bins": bins} if kind == "bayesian_network" else {"bins": bins, "penalty": penalty}
    validation = None if len(grid) == 1 else float(means.max()) / fold.inner
    return _Found(predict(fold.test_x), chosen, parameters, validation)


def _network(
    kind: str, x: Floats, y: Rows, classes: int, bins: int, penalty: float, restarts: int
) -> tuple[Callable[[Floats], Rows], int]:
    """Return a network on bins with about as many rows each: how it predicts, and how many numbers it has.

    The structure of a Bayesian network is found by hill climbing on the Bayesian information criterion. A Markov network has a
    factor for each pair of inputs with the class, fitted to the conditional likelihood of the class.
    """
    edges = [np.unique(np.quantile(column, np.arange(1, bins) / bins)) for column in x.T]
    label = x.shape[1]
    states = [len(edge) + 1 for edge in edges] + [classes]

    def codes(rows: Floats) -> Floats:
        return np.stack([np.searchsorted(edge, column) for edge, column in zip(edges, rows.T, strict=True)], 1).astype(
            np.float64
        )

    joint = np.column_stack([codes(x), y])
    if kind == "bayesian_network":
        parents = bayesian_network.hill_climb(joint, states=states, restarts=restarts)
        model = bayesian_network.fit_discrete(joint, parents, states=states, label=label)
        # Free numbers: of each node one less than its states, for each state of its parents.
        count = sum((states[i] - 1) * math.prod(states[p] for p in given) for i, given in enumerate(parents))
    else:
        cliques = [(i, j, label) for i, j in itertools.combinations(range(label), 2)]
        model = markov_network.fit(joint, cliques, method="conditional", states=states, label=label, penalty=penalty)
        count = sum(math.prod(states[i] for i in clique) for clique in cliques)

    def predict(rows: Floats) -> Rows:
        with torch.no_grad():
            return cast(Rows, model(torch.from_numpy(codes(rows))).argmax(-1).numpy())

    return predict, count
