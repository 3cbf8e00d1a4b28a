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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kapsi.calibrate import calibrate
from kapsi.data.bundled import bundled
from kapsi.data.tabular import make_problem
from kapsi.errors import SpecError, did_you_mean
from kapsi.function import Spec, coerce, option
from kapsi.modules import Model, scale_last_layer, trained_count
from kapsi.paper.experiment import Outcome, Run
from kapsi.paper.procedures import classifiers
from kapsi.paper.procedures.classifiers import Choice, Pair
from kapsi.paper.procedures.rehearsal import refuse, rehearse
from kapsi.spec import ModelSpec
from kapsi.training.config import TrainConfig
from kapsi.training.engine import train
from kapsi.zoo import bayesian_network, markov_network

__all__ = ["Candidate", "Entry", "Models", "Networks", "Options", "Rule", "check", "first_good", "fitted", "run"]

Rows = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
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
class Rule(Spec):
    """How one of the candidates is chosen.

    Args:
        by: which losses of the rows left out count.
        rule: `one_standard_error`, the first that is not surely worse than the best; `best`.
    """

    by: Literal["log_loss", "accuracy"] = "log_loss"
    rule: Literal["one_standard_error", "best"] = "one_standard_error"


@dataclass(frozen=True, kw_only=True)
class Options(Spec):
    """The options beside those of the classifier.

    Args:
        table: which one; by default that which the row is called after.
        classifier: `model` (with the options of `Models`), `bayesian_network` or `markov_network` (of `Networks`), or a key of
            `classifiers.KINDS`.
        folds: number of folds.
        inner: number of folds of the training rows of a fold.
        limit_folds: how many of the folds are done, None for all.
    """

    table: Literal["iris", "pima", "banknote"]
    classifier: str = "model"
    folds: int = option(10, minimum=2)
    inner: int = option(10, minimum=2)
    limit_folds: int | None = option(None, minimum=1)


@dataclass(frozen=True, kw_only=True)
class Entry(Spec):
    """A model with several penalties, each of which is a candidate.

    Args:
        name: in results; by default the place in the list.
        model: its specification; widths at the ends may be null.
        training: of it.
        penalties: that are tried, from strong to weak; none: that of the training.
    """

    name: str = ""
    model: ModelSpec
    training: TrainConfig
    penalties: tuple[float, ...] = ()

    def check(self) -> None:
        if any(not 0 <= penalty <= 1e12 for penalty in self.penalties):
            raise SpecError(f"penalties: expected numbers of at least 0, got {list(self.penalties)}")


@dataclass(frozen=True, kw_only=True)
class Models(Spec):
    """Models of which one is chosen.

    Args:
        candidates: from simple to flexible.
        rule: how one is chosen.
    """

    candidates: tuple[Entry, ...]
    rule: Rule = Rule()

    def check(self) -> None:
        if not self.candidates:
            raise SpecError("candidates: expected a list of {name, model, training, penalties}, got an empty one")
        names = [entry.name for entry in self.candidates]
        if len(set(names)) != len(names):
            raise SpecError(f"candidates: a name is there twice, {', '.join(names)}")


@dataclass(frozen=True)
class Networks(Spec):
    """A Bayesian or a Markov network on bins, whose number is chosen by the mean accuracy of the inner folds.

    Args:
        bins: numbers of bins that are tried.
        penalties: that are tried, of a Markov network.
        restarts: of the search for the structure of a Bayesian network.
    """

    bins: tuple[int, ...] = (3,)
    penalties: tuple[float, ...] = (0.01,)
    restarts: int = option(5, minimum=0)

    def check(self) -> None:
        if not self.bins or min(self.bins) < 2 or not self.penalties or min(self.penalties) < 0:
            raise SpecError("expected at least one number of bins of 2 or more, and one penalty of 0 or more")


def _options(run: Run) -> tuple[Options, Models | Networks | Choice]:
    """Return the options, and those of the classifier."""
    run.expects("accuracy", "validation", "paper")
    where = run.where
    given, others = classifiers.divided(run.options, Options)
    own: Options = coerce(Options, {"table": run.row, **given}, where)
    x, y, classes = _table(own.table)
    if own.folds > len(y):
        raise SpecError(f"{where}.folds: {own.folds} folds are more than the {len(y)} rows of {own.table}; give fewer")
    kinds = tuple(dict.fromkeys(("model", *NETWORKS_OF_TABLES, *classifiers.KINDS)))
    kind = classifiers.kind_of(own.classifier, kinds, where)
    if kind == "model":
        models: Models = coerce(Models, _with_training(others, where), where)
        if run.protocol == "paper" and sum(len(each.penalties) or 1 for each in models.candidates) > 1:
            raise SpecError(f"{where}.candidates: the protocol of the paper chooses among epochs; give one candidate")
        for candidate in _candidates(models, x.shape[1], classes, 0, where):
            number = candidate.training.loss == "mse"
            rehearse(candidate.spec, candidate.training, f"{where}.candidates", classes=None if number else classes)
        return own, models
    if run.protocol == "paper":
        raise SpecError(f"{where}: the protocol of the paper chooses among epochs, which {kind} has none of here")
    if kind in NETWORKS_OF_TABLES:
        other = "penalties" if kind == "bayesian_network" else "restarts"
        if other in others:
            raise SpecError(f"{where}.{other}: is not for a {kind.replace('_', ' ')}, leave it out")
        return own, coerce(Networks, others, where)
    choice = classifiers.read(kind, others, where, [each.name for each in fields(Options)])
    if choice.early_stopping or not choice.refit:
        raise SpecError(f"{where}: early_stopping, and refit: false, are not for tables, where folds are held out")
    choice.rehearse(x.shape[1], classes)
    return own, choice


@functools.cache
def _table(name: str) -> tuple[Floats, Rows, int]:
    """Return inputs, class numbers and the number of classes of a bundled table."""
    table, target = bundled(name)
    problem = make_problem(table, target, task="classification")
    x = np.stack([column.numbers for key, column in table.columns.items() if key != target], 1)
    return x, np.asarray(problem.y, dtype=np.int64), len(problem.classes or ())


def _with_training(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return options with the training of all candidates in each of them, which may say some of it anew."""
    made = dict(options)
    common = made.pop("training", None) or {}
    entries = made.get("candidates")
    if not isinstance(entries, list) or not entries:
        raise SpecError(
            f"{where}.candidates: expected a list of {{name, model, training, penalties}}, got {str(entries)[:60]!r}"
        )
    made["candidates"] = []
    for i, entry in enumerate(entries):
        place = f"{where}.candidates[{i}]"
        if not isinstance(entry, Mapping):
            raise SpecError(f"{place}: expected {{name, model, training, penalties}}, got {str(entry)[:60]!r}")
        training: dict[str, Any] = {"loss": "cross_entropy", "solver": "lbfgs"}
        for part in (common, entry.get("training") or {}):
            if not isinstance(part, Mapping):
                raise SpecError(f"{place}.training: expected options with values, got {str(part)[:60]!r}")
            refuse(
                part, f"{place}.training", patience="is for early stopping, which there is none of here; leave it out"
            )
            training |= part
        made["candidates"].append({"name": str(i), **entry, "training": training})
    for name in made:
        if name not in ("candidates", "rule"):
            names = ("candidates", "training", "rule", *(each.name for each in fields(Options)))
            raise SpecError(
                f"{where}: there is no option {name!r} here; {did_you_mean(str(name), names)}there are {', '.join(names)}"
            )
    return made


def check(run: Run) -> None:
    """Raise a `SpecError` where the options of a run do not fit."""
    _options(run)


def stratified_folds(y: npt.NDArray[Any], k: int, seed: int) -> list[Rows]:
    """Return the test rows of k folds: rows shuffled by the seed, sorted by class and dealt out in turn.

    The stored results are scores on these rows, so the rows do not follow `kapsi.data.tabular.folds`.
    """
    order = np.random.default_rng(seed).permutation(len(y))
    order = order[np.argsort(y[order], kind="stable")]
    return [np.sort(order[fold::k]).astype(np.int64) for fold in range(k)]


def run(run: Run) -> Outcome:
    """Fit one classifier in every fold, and score it on the rows of the fold.

    Options: those of `Options` and of the classifier.

    Raises:
        SpecError: an option that there is not, or one that does not fit.
    """
    own, classifier = _options(run)
    x, y, classes = _table(own.table)
    started = time.process_time()
    scores, validations, chosen, parameters = [], [], [], []
    for test in stratified_folds(y, own.folds, run.seed)[: own.limit_folds]:
        kept = np.setdiff1d(np.arange(len(y)), test)
        fold = _Fold(x[kept], y[kept], x[test], y[test], classes, run.seed, own.inner, run.where)
        if isinstance(classifier, Models):
            find = _paper if run.protocol == "paper" else _models
            found = find(fold, classifier)
        elif isinstance(classifier, Networks):
            found = _tables(fold, own.classifier, classifier)
        else:
            found = _classifier(fold, classifier)
        scores.append(float((found.predicted == y[test]).mean()) if found.score is None else found.score)
        validations.append(found.validation)
        chosen.append(found.chosen)
        parameters.append(found.parameters)
    extra = {
        "folds": scores,
        "deviation_of_folds": float(np.std(scores)),
        "chosen": chosen,
        "inner_folds": own.inner,
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

    def candidates(self, models: Models) -> list[Candidate]:
        """Return every model with every penalty."""
        return _candidates(models, self.x.shape[1], self.classes, self.seed, self.where)

    def parts(self) -> list[tuple[Rows, Rows]]:
        """Return (rows to fit, rows to judge on) of each inner fold."""
        count = min(self.inner, len(self.y))
        held = stratified_folds(self.y, count, self.seed)
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


def _models(fold: _Fold, models: Models) -> _Found:
    by, candidates = models.rule, fold.candidates(models)
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


def _candidates(models: Models, inputs: int, classes: int, seed: int, where: str) -> list[Candidate]:
    """Return every model with every penalty, in the order in which they are written."""
    made = []
    for i, entry in enumerate(models.candidates):
        config = replace(entry.training, seed=seed)
        try:
            spec = entry.model.sized(inputs, 1 if config.loss == "mse" else classes)
        except SpecError as error:
            raise SpecError(f"{where}.candidates[{i}].model: {error}") from None
        penalties: Sequence[float | None] = entry.penalties or (config.penalty,)
        for penalty in penalties:
            name = entry.name + ("" if penalty is None else f", penalty {penalty:g}")
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
    return _Fitted(scale_last_layer(model), center, spread), inputs, targets


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


def _paper(fold: _Fold, models: Models) -> _Found:
    """Train the one candidate, and keep the best figure on the rows of the fold, as the paper does."""
    candidates = fold.candidates(models)
    made, inputs, targets = _made(candidates[0], fold.x, fold.y, fold.seed)
    best, number = -1.0, 0
    for record in train(made.model, (inputs, targets), candidates[0].training):
        right = float((_logs(made, fold.test_x, fold.classes).argmax(1) == fold.test_y).mean())
        if right > best:
            best, number = right, record.number
    return _Found(fold.test_y, number, made.parameters, None, best)


# ------------------------------------------------------------------------------------------------ others


def _classifier(fold: _Fold, choice: Choice) -> _Found:
    prepared = functools.partial(_prepared, positive=choice.kind == "naive_bayes_multinomial")

    def part(kept: Rows, held: Rows) -> tuple[Pair, Pair]:
        if choice.tune_rows is not None:  # the first rows are to be any ones, and tables are sorted by class
            kept = np.random.default_rng(fold.seed).permutation(kept)
        first, second = prepared(fold.x[kept], fold.x[held])
        return (first, fold.y[kept]), (second, fold.y[held])

    x, test_x = prepared(fold.x, fold.test_x)
    parts = [functools.partial(part, *each) for each in fold.parts()]
    made = choice.fit((x, fold.y), parts, classes=fold.classes, seed=fold.seed)
    return _Found(made.predict(test_x), dict(made.chosen), made.parameters, made.validation)


def _prepared(x: Floats, other: Floats, *, positive: bool) -> tuple[Floats, Floats]:
    """Return inputs on the scale of the first ones: standardized, or from 0 to 1."""
    if positive:
        low, high = x.min(0), x.max(0)
        width = np.where(high > low, high - low, 1.0)
        return (x - low) / width, ((other - low) / width).clip(0, 1)
    center, spread = _scale(x)
    return (x - center) / spread, (other - center) / spread


def _tables(fold: _Fold, kind: str, options: Networks) -> _Found:
    """Choose the number of bins (and the penalty of a Markov network) by the mean accuracy of the inner folds."""
    grid = list(itertools.product(options.bins, options.penalties))
    restarts = options.restarts
    means, parts = np.zeros(len(grid)), fold.parts()
    if len(grid) > 1:
        for kept, held in parts:
            for i, (bins, penalty) in enumerate(grid):
                predict, _ = _network(kind, fold.x[kept], fold.y[kept], fold.classes, bins, penalty, restarts)
                means[i] += float((predict(fold.x[held]) == fold.y[held]).mean())
    bins, penalty = grid[int(means.argmax())]
    predict, parameters = _network(kind, fold.x, fold.y, fold.classes, bins, penalty, restarts)
    chosen = {"bins": bins} if kind == "bayesian_network" else {"bins": bins, "penalty": penalty}
    validation = None if len(grid) == 1 else float(means.max()) / len(parts)
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
