"""Small tables by cross-validation: all choices use only the training rows of each fold.

A run is a repeat: the seed spreads the rows over ten folds, stratified by class, and the score is the mean accuracy of the folds.
In each fold

1. inputs are standardized by the training rows (scaled to [0, 1] for multinomial naive Bayes, binned for Bayesian and Markov
   networks);
2. candidates are compared by ten folds of the training rows;
3. the selected candidate is fitted to all training rows and scored once on the rows of the fold.

Models with L2 penalties are selected and fitted by the recipe `model_search`.

Under the protocol `paper`, the only candidate is trained on the training rows, and the score is the best epoch on the rows of the
fold.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kapsi.data.bundled import bundled
from kapsi.data.tabular import make_problem
from kapsi.errors import SpecError
from kapsi.function import Spec, coerce, option
from kapsi.modules import trained_count
from kapsi.paper.experiment import Budget, Outcome, Run
from kapsi.paper.procedures import classifiers
from kapsi.paper.procedures.classifier_kinds import LabeledRows
from kapsi.paper.procedures.classifiers import ClassifierSearch
from kapsi.paper.procedures.dry_run import dry_run, refuse
from kapsi.paper.short_forms import merged, require_known
from kapsi.recipes.base import RecipeData
from kapsi.recipes.model_search import ModelSearch, StandardizedFit
from kapsi.training.losses import MSE, Loss
from kapsi.zoo import bayesian_network, markov_network

Labels = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
BINNED = ("bayesian_network", "markov_network")
DEFAULT_TRAINING = {"loss": "cross_entropy", "solver": {"kind": "lbfgs"}}


@dataclass(frozen=True, kw_only=True)
class TabularOptions(Spec):
    """Options of the procedure `tabular`, in addition to the options of the classifier.

    Args:
        table: name of a bundled table, by default the name of the row.
        classifier: `model` (with the options of `kapsi.recipes.ModelSearch`), `bayesian_network` or `markov_network` (of
            `BinnedNetworks`), or a key of `classifiers.KINDS`.
        folds: number of folds.
        inner: number of folds of the training rows of a fold.
        limit_folds: number of folds evaluated, null for all.
    """

    table: Literal["iris", "pima", "banknote"]
    classifier: str = "model"
    folds: int = option(10, minimum=2)
    inner: int = option(10, minimum=2)
    limit_folds: int | None = option(None, minimum=1)


@dataclass(frozen=True)
class BinnedNetworks(Spec):
    """A Bayesian or a Markov network on bins; the mean accuracy of the inner folds selects their number.

    Args:
        bins: numbers of bins.
        penalties: L2 penalties of a Markov network.
        restarts: number of restarts of the structure search of a Bayesian network.
    """

    bins: tuple[int, ...] = (3,)
    penalties: tuple[float, ...] = (0.01,)
    restarts: int = option(5, minimum=0)

    def check(self) -> None:
        if not self.bins or min(self.bins) < 2 or not self.penalties or min(self.penalties) < 0:
            raise SpecError("expected at least one number of bins of 2 or more, and one penalty of 0 or more")


def read_options(run: Run) -> tuple[TabularOptions, ModelSearch | BinnedNetworks | ClassifierSearch]:
    """Return the options of the procedure and of the classifier."""
    run.expects("accuracy", "validation", "paper")
    where = run.where
    known, others = classifiers.divided(run.options, TabularOptions)
    options: TabularOptions = coerce(TabularOptions, {"table": run.row, **known}, where)
    x, y, classes = _table(options.table)
    if options.folds > len(y):
        raise SpecError(
            f"{where}.folds: {options.folds} folds are more than the {len(y)} rows of {options.table}; give fewer"
        )
    kind = options.classifier
    require_known([kind], dict.fromkeys(("model", *BINNED, *classifiers.KINDS)), f"{where}.classifier")
    if kind == "model":
        data = {"kind": ModelSearch.name, **_with_training(others, where)}
        models: ModelSearch = coerce(ModelSearch, data, where)
        candidates = models.expanded()
        if run.protocol == "paper" and len(candidates) > 1:
            raise SpecError(f"{where}.candidates: the protocol of the paper selects epochs; give one candidate")
        if len({candidate.config.loss for candidate in candidates}) > 1:
            raise SpecError(f"{where}.candidates: losses of different kinds cannot be compared; give all the same loss")
        rows = _recipe_data(x, y, classes, models)
        try:
            models.reason_against(rows)
        except SpecError as error:
            raise SpecError(f"{where}.{error}") from None
        for candidate in candidates:
            spec = candidate.model.sized(x.shape[1], rows.outputs)
            dry_run(spec, candidate.config, f"{where}.candidates", classes=rows.classes or None)
        return options, models
    if run.protocol == "paper":
        raise SpecError(f"{where}: the protocol of the paper selects epochs, and {kind} has none here")
    if kind in BINNED:
        other = "penalties" if kind == "bayesian_network" else "restarts"
        if other in others:
            raise SpecError(f"{where}.{other}: is not for a {kind.replace('_', ' ')}, leave it out")
        return options, coerce(BinnedNetworks, others, where)
    search = classifiers.read(kind, others, where, classifiers.names_of(TabularOptions))
    if search.options.fits_once:
        raise SpecError(f"{where}: early_stopping, and refit: false, are not for tables, where folds are held out")
    search.dry_run(x.shape[1], classes)
    return options, search


def budget(run: Run) -> Budget:
    """Return the search of a run, in a fold."""
    options, models = read_options(run)
    if isinstance(models, ClassifierSearch):
        return models.budget(options.inner)
    if isinstance(models, BinnedNetworks):
        count = len(models.bins) * (len(models.penalties) if options.classifier == "markov_network" else 1)
        return Budget(count, count)
    fits = [candidate.config.epochs for candidate in models.expanded()]
    return Budget(len(fits), len(fits), options.inner * sum(fits) + max(fits))


@functools.cache
def _table(name: str) -> tuple[Floats, Labels, int]:
    """Return inputs, integer class labels and the number of classes of a bundled table."""
    table, target = bundled(name)
    problem = make_problem(table, target, task="classification")
    x = np.stack([column.numbers for key, column in table.columns.items() if key != target], 1)
    return x, np.asarray(problem.y, dtype=np.int64), len(problem.classes or ())


def _with_training(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return options with the shared training merged into every candidate."""
    known = (*classifiers.names_of(ModelSearch), *classifiers.names_of(TabularOptions))
    require_known(options, known, f"{where}: options of model")
    entries = coerce(tuple[Mapping[str, Any], ...], options.get("candidates", ()), f"{where}.candidates")
    candidates = []
    for i, entry in enumerate(entries):
        here = f"{where}.candidates[{i}].training"
        training: dict[str, Any] = dict(DEFAULT_TRAINING)
        for part in (options.get("training") or {}, entry.get("training") or {}):
            part = coerce(Mapping[str, Any], part, here)
            refuse(part, here, patience="is for early stopping, which this procedure does not use; leave it out")
            training = merged(training, part)
        candidates.append({"name": str(i), **entry, "training": training})
    return {**options, "candidates": candidates}


def stratified_folds(y: npt.NDArray[Any], k: int, seed: int) -> list[Labels]:
    """Return the test rows of k folds: rows shuffled by the seed, sorted by class and dealt out in turn.

    The stored results are scores on these rows, so the rows do not follow `kapsi.data.tabular.folds`.
    """
    order = np.random.default_rng(seed).permutation(len(y))
    order = order[np.argsort(y[order], kind="stable")]
    return [np.sort(order[fold::k]).astype(np.int64) for fold in range(k)]


def run(run: Run) -> Outcome:
    """Fit a classifier in every fold, and score it on the rows of the fold.

    Options: `TabularOptions` and the classifier.

    Raises:
        SpecError: unknown option, or invalid value.
    """
    options, classifier = read_options(run)
    x, y, classes = _table(options.table)
    started = time.process_time()
    results: list[_FoldResult] = []
    for test in stratified_folds(y, options.folds, run.seed)[: options.limit_folds]:
        train_rows = np.setdiff1d(np.arange(len(y)), test)
        fold = _Fold(x[train_rows], y[train_rows], x[test], y[test], classes, run.seed, options.inner, run.where)
        if isinstance(classifier, ModelSearch):
            results.append((_best_epoch if run.protocol == "paper" else _models)(fold, classifier))
        elif isinstance(classifier, BinnedNetworks):
            results.append(_binned(fold, options.classifier, classifier))
        else:
            results.append(_classifier(fold, classifier))
    scores = [result.score for result in results]
    chosen = [result.chosen for result in results]
    parameters = [result.parameters for result in results]
    extra = {
        "folds": scores,
        "deviation_of_folds": float(np.std(scores)),
        "chosen": chosen,
        "inner_folds": options.inner,
        "parameters": parameters,
    }
    if run.protocol == "paper":
        extra |= {"best_epoch_on_test": float(np.mean(scores)), "best_epoch": chosen}
    validations = [result.validation for result in results if result.validation is not None]
    return Outcome(
        float(np.mean(scores)),
        float(np.mean(validations)) if validations else None,
        round(float(np.mean(parameters))),
        time.process_time() - started,
        extra,
    )


@dataclass(frozen=True, eq=False)
class _Fold:
    """Training rows and test rows of a fold."""

    x: Floats
    y: Labels
    test_x: Floats
    test_y: Labels
    classes: int
    seed: int
    inner: int
    where: str

    def splits(self) -> list[tuple[Labels, Labels]]:
        """Return the indices of fitted and held-out rows of each inner fold."""
        held_out = stratified_folds(self.y, min(self.inner, len(self.y)), self.seed)
        return [(np.setdiff1d(np.arange(len(self.y)), part), part) for part in held_out]

    def result(self, predicted: Labels, chosen: Any, parameters: int, validation: float | None) -> _FoldResult:
        """Score predictions of the test rows."""
        return _FoldResult(float((predicted == self.test_y).mean()), chosen, parameters, validation)


@dataclass(frozen=True, eq=False)
class _FoldResult:
    """Score, choice and size of the classifier of a fold."""

    score: float
    chosen: Any
    parameters: int
    validation: float | None = None


# ------------------------------------------------------------------------------------------------ models


def _recipe_data(x: Floats, y: Labels, classes: int, models: ModelSearch) -> RecipeData:
    """Return rows for a recipe; the targets are numbers of classes if the models have the squared error."""
    loss = models.candidates[0].config.loss
    numbers = isinstance(loss, MSE)
    targets = torch.from_numpy(y)
    targets = targets.double().unsqueeze(1) if numbers else targets
    numeric = torch.ones(x.shape[1], dtype=torch.bool)
    return RecipeData(torch.from_numpy(x), targets, cast(Loss, loss), 0 if numbers else classes, numeric)


def _labels(outputs: Tensor, classes: int) -> Labels:
    """Return predicted labels; of numbers of classes, the nearest class."""
    if outputs.shape[1] != classes:
        outputs = -(outputs - torch.arange(classes)).abs()
    return cast(Labels, outputs.argmax(1).numpy())


def _models(fold: _Fold, models: ModelSearch) -> _FoldResult:
    """Select a candidate by the inner folds, and fit the candidate to all training rows."""
    data, accuracy = _recipe_data(fold.x, fold.y, fold.classes, models), None
    candidates = models.expanded()
    if len(candidates) > 1:
        folds = [(torch.from_numpy(rows), torch.from_numpy(held_out)) for rows, held_out in fold.splits()]
        crossed = models.cross_fit(data, folds, fold.seed)
        candidates = cast(ModelSearch, crossed.recipe).expanded()
        accuracy = 1 - float((_labels(crossed.outputs, fold.classes) != fold.y).mean())
    fit = StandardizedFit(candidates[0], data, fold.seed).trained()
    predicted = _labels(fit.outputs(torch.from_numpy(fold.test_x)), fold.classes)
    return fold.result(predicted, candidates[0].label, trained_count(fit.model), accuracy)


def _best_epoch(fold: _Fold, models: ModelSearch) -> _FoldResult:
    """Train the only candidate; keep the best epoch on the rows of the fold, as the paper does."""
    (candidate,) = models.expanded()
    fit = StandardizedFit(candidate, _recipe_data(fold.x, fold.y, fold.classes, models), fold.seed)
    best, number = -1.0, 0
    for record in fit.epochs:
        labels = _labels(fit.outputs(torch.from_numpy(fold.test_x)), fold.classes)
        accuracy = float((labels == fold.test_y).mean())
        if accuracy > best:
            best, number = accuracy, record.number
    return _FoldResult(best, number, trained_count(fit.model))


def _center_and_scale(x: Floats) -> tuple[Floats, Floats]:
    scale = x.std(0)
    return x.mean(0), np.where(scale > 0, scale, 1.0)


# ------------------------------------------------------------------------------------------------ other classifiers


def _classifier(fold: _Fold, search: ClassifierSearch) -> _FoldResult:
    """Select and fit a classifier of `classifiers.KINDS`."""
    scaled = functools.partial(_scaled, positive=search.kind == "naive_bayes_multinomial")

    def split(rows: Labels, held_out: Labels) -> tuple[LabeledRows, LabeledRows]:
        if search.options.tune_rows is not None:  # the first rows must be random, and tables are sorted by class
            rows = np.random.default_rng(fold.seed).permutation(rows)
        first, second = scaled(fold.x[rows], fold.x[held_out])
        return (first, fold.y[rows]), (second, fold.y[held_out])

    x, test_x = scaled(fold.x, fold.test_x)
    splits = [functools.partial(split, *indices) for indices in fold.splits()]
    best = search.fit((x, fold.y), splits, classes=fold.classes, seed=fold.seed)
    return fold.result(best.predict(test_x), dict(best.chosen), best.parameters, best.validation)


def _scaled(x: Floats, other: Floats, *, positive: bool) -> tuple[Floats, Floats]:
    """Return both inputs on the scale of the first: standardized, or from 0 to 1."""
    if positive:
        low, high = x.min(0), x.max(0)
        width = np.where(high > low, high - low, 1.0)
        return (x - low) / width, ((other - low) / width).clip(0, 1)
    center, scale = _center_and_scale(x)
    return (x - center) / scale, (other - center) / scale


def _binned(fold: _Fold, kind: str, options: BinnedNetworks) -> _FoldResult:
    """Select the number of bins (and the penalty of a Markov network) by the mean accuracy of the inner folds."""
    grid = list(itertools.product(options.bins, options.penalties))
    means, splits = np.zeros(len(grid)), fold.splits()
    if len(grid) > 1:
        for rows, held_out in splits:
            for i, (bins, penalty) in enumerate(grid):
                predict, _ = _network(kind, fold.x[rows], fold.y[rows], fold.classes, bins, penalty, options.restarts)
                means[i] += float((predict(fold.x[held_out]) == fold.y[held_out]).mean())
    bins, penalty = grid[int(means.argmax())]
    predict, parameters = _network(kind, fold.x, fold.y, fold.classes, bins, penalty, options.restarts)
    chosen = {"bins": bins} if kind == "bayesian_network" else {"bins": bins, "penalty": penalty}
    validation = None if len(grid) == 1 else float(means.max()) / len(splits)
    return fold.result(predict(fold.test_x), chosen, parameters, validation)


def _network(
    kind: str, x: Floats, y: Labels, classes: int, bins: int, penalty: float, restarts: int
) -> tuple[Callable[[Floats], Labels], int]:
    """Return the predictions and the number of parameters of a network on bins of about equal counts.

    The structure of a Bayesian network comes from hill climbing on the Bayesian information criterion. A Markov network has a
    factor for each pair of inputs with the class, fitted to the conditional likelihood of the class.
    """
    edges = [np.unique(np.quantile(column, np.arange(1, bins) / bins)) for column in x.T]
    label = x.shape[1]
    states = [len(edge) + 1 for edge in edges] + [classes]

    def codes(rows: Floats) -> Floats:
        columns = [np.searchsorted(edge, column) for edge, column in zip(edges, rows.T, strict=True)]
        return np.stack(columns, 1).astype(np.float64)

    joint = np.column_stack([codes(x), y])
    if kind == "bayesian_network":
        parents = bayesian_network.hill_climb(joint, states=states, restarts=restarts)
        model = bayesian_network.fit_discrete(joint, parents, states=states, label=label)
        # Free parameters of a node: the number of states minus 1, for each state of the parents.
        count = sum((states[i] - 1) * math.prod(states[p] for p in indices) for i, indices in enumerate(parents))
    else:
        cliques = [(i, j, label) for i, j in itertools.combinations(range(label), 2)]
        model = markov_network.fit(joint, cliques, method="conditional", states=states, label=label, penalty=penalty)
        count = sum(math.prod(states[i] for i in clique) for clique in cliques)

    def predict(rows: Floats) -> Labels:
        with torch.no_grad():
            return cast(Labels, model(torch.from_numpy(codes(rows))).argmax(-1).numpy())

    return predict, count
