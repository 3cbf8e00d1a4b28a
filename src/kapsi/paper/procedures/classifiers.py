"""Selection among classifiers: candidates of a grid are compared on held-out rows, and the best is refitted on all rows.

Every kind is selected, fitted and counted alike, so that baselines get the same treatment as the model compared with them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

import numpy as np

from kapsi.errors import SpecError
from kapsi.function import Spec, coerce, option
from kapsi.paper.experiment import Budget
from kapsi.paper.procedures.classifier_kinds import (
    Augmentation,
    ClassifierKind,
    ClassifierTask,
    EpochCallback,
    FittedClassifier,
    GaussianNaiveBayes,
    KernelSVM,
    LabeledRows,
    Labels,
    LinearSVM,
    LogisticRegression,
    MultinomialNaiveBayes,
)
from kapsi.paper.procedures.dry_run import refuse
from kapsi.paper.procedures.networks import KANClassifier, MLPClassifier, ModelClassifier, NetworkClassifier
from kapsi.paper.procedures.recipe_classifier import RecipeClassifier
from kapsi.paper.short_forms import merged, require_known
from kapsi.spec import set_option

Split: TypeAlias = Callable[[], tuple[LabeledRows, LabeledRows]]
"""Returns fitted rows and held-out rows."""

KINDS: dict[str, type[ClassifierKind]] = {
    "network": NetworkClassifier,
    "model": ModelClassifier,
    "mlp": MLPClassifier,
    "kan": KANClassifier,
    "svm_linear": LinearSVM,
    "svm_rbf": KernelSVM,
    "naive_bayes_gaussian": GaussianNaiveBayes,
    "naive_bayes_multinomial": MultinomialNaiveBayes,
    "logistic_regression": LogisticRegression,
    "recipe": RecipeClassifier,
}
NETWORKS = tuple(name for name, kind in KINDS.items() if kind.in_epochs)
"""Kinds trained in epochs."""


@dataclass(frozen=True)
class SearchOptions(Spec):
    """Options of the selection, for every kind.

    Args:
        grid: values by option, nested options with dots as in `train.epochs`; the candidates are the product. Without a grid,
            the only candidate is fitted once, to all rows.
        tune_rows: number of leading rows for the fits of the selection; null for all.
        tune: options of the candidates during the selection, for example fewer epochs.
        refit: refit the selected candidate on all rows.
        early_stopping: stop networks by the validation loss; without a refit.
        variants: further options by name, each with a grid; the candidates are concatenated.
    """

    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    tune_rows: int | None = option(None, minimum=1)
    tune: Mapping[str, Any] = field(default_factory=dict)
    refit: bool = True
    early_stopping: bool = False
    variants: Mapping[str, Mapping[str, Any]] | None = None

    @property
    def fits_once(self) -> bool:
        """Whether the selected fit is final: without a refit on all rows."""
        return self.early_stopping or not self.refit

    def check(self) -> None:
        for path, values in self.grid.items():
            if not values:
                raise SpecError(f"grid.{path}: expected a list of values to try, got an empty one")
        only_tuning = "tune" if self.tune else "tune_rows" if self.tune_rows is not None else None
        if only_tuning and self.variants is None and (self.fits_once or not self.grid):
            problem = "needs a selection with a refit" if self.fits_once else "needs a selection, and there is no grid"
            raise SpecError(f"{only_tuning}: {problem}; leave it out")
        for path, other in itertools.product((*self.grid, *self.tune), self.grid):
            if other.startswith(f"{path}.") or (path == other and path in self.tune):
                raise SpecError(f"{path} and {other} of grid and tune set the same option; leave one out")


@dataclass(frozen=True)
class ClassifierCandidate:
    """A point of a grid.

    Attributes:
        chosen: option and value of each axis.
        tuned: the kind during the selection, with the options of `tune`.
        final: the kind of the last fit.
    """

    chosen: Mapping[str, Any]
    tuned: ClassifierKind
    final: ClassifierKind


@dataclass(frozen=True)
class ClassifierSearch:
    """Candidates and their selection.

    Attributes:
        kind: key of `KINDS`.
        candidates: the candidates, at least one.
        options: options of the selection.
        where: prefix of error messages.
        selects: whether there is a selection: a grid or early stopping.
    """

    kind: str
    candidates: tuple[ClassifierCandidate, ...]
    options: SearchOptions
    where: str
    selects: bool

    def kinds(self) -> Iterator[ClassifierKind]:
        """Yield all kinds of the candidates."""
        for candidate in self.candidates:
            yield from (candidate.tuned, candidate.final)

    def budget(self, splits: int = 1) -> Budget:
        """Return the search for a number of splits of the rows."""
        count = len(self.candidates)
        epochs = [[kind.passes or 0 for kind in (c.tuned, c.final)] for c in self.candidates]
        if not all(map(all, epochs)):
            return Budget(count, count)
        selection = splits * sum(tuned for tuned, _ in epochs) if self.selects else 0
        final = 0 if self.selects and self.options.fits_once else max(final for _, final in epochs)
        return Budget(count, count, selection + final)

    def dry_run(self, inputs: int, classes: int, *, sparse: bool = False) -> None:
        """Raise a `SpecError` if a candidate does not fit the inputs and classes."""
        for kind in self.kinds():
            kind.dry_run(inputs, classes, self.where, sparse=sparse)

    def fit(
        self,
        rows: LabeledRows,
        splits: Sequence[Split] = (),
        *,
        classes: int,
        seed: int = 0,
        augment: Augmentation | None = None,
        on_epoch: EpochCallback | None = None,
        shape: tuple[int, int, int] | None = None,
    ) -> FittedClassifier:
        """Select by the mean accuracy over the splits, the first of equal candidates, and fit the selected candidate to all rows.

        Args:
            rows: rows of the last fit.
            splits: splits of the rows; unused without a selection, unless `refit` is false.
            classes: number of classes.
            seed: seed of initial values, dropout and the order of rows.
            augment: random changes of the inputs of each batch, for networks.
            on_epoch: callback after each epoch of the last fit of a network.
            shape: (channels, height, width) of images.

        Raises:
            SpecError: a grid or early stopping without a split, or `refit: false` without a single split.
        """
        started = time.process_time()
        once = self.options.fits_once
        if self.selects and not splits:
            raise SpecError(f"{self.where}: a grid and early_stopping need validation rows; set held_out")
        if once and len(splits) != 1:
            raise SpecError(
                f"{self.where}: early_stopping, and refit: false, need one split of the rows, not {len(splits)}"
            )
        task = ClassifierTask(*rows, classes, seed, self.where, augment=augment, on_epoch=on_epoch, shape=shape)
        accuracies, fitted = self._accuracies(task, splits if self.selects else ())
        best = int(accuracies.argmax())
        fit_started = time.process_time()
        if fitted is None:
            if once:  # held-out rows without a selection
                (x, y), _ = splits[0]()
                task = replace(task, x=x, y=y)
            self._require_classes(task.y)
            fitted = replace(self.candidates[best].final.fit(task), rows=len(task.y))
            fit_seconds = time.process_time() - fit_started
        else:
            fit_seconds = 0.0
        chosen = [candidate.chosen for candidate in self.candidates]
        return replace(
            fitted,
            kind=self.kind,
            chosen=chosen[best],
            validation=float(accuracies[best]) if self.selects else None,
            candidates=tuple(zip(chosen, map(float, accuracies), strict=True)) if self.selects else (),
            seconds=time.process_time() - started,
            fit_seconds=fit_seconds,
        )

    def _accuracies(self, task: ClassifierTask, splits: Sequence[Split]) -> tuple[Any, FittedClassifier | None]:
        """Return the mean accuracy of each candidate, and a final best fit."""
        options = self.options
        accuracies = np.zeros((len(self.candidates), len(splits)))
        best: FittedClassifier | None = None
        for j, split in enumerate(splits):
            (x, y), held_out = split()
            count = min(options.tune_rows or len(y), len(y))
            self._require_classes(y[:count])
            validation = held_out if options.early_stopping else None
            part = replace(task, x=x[:count], y=y[:count], validation=validation, on_epoch=None)
            for i, candidate in enumerate(self.candidates):
                fitted = candidate.tuned.fit(part)
                accuracies[i, j] = (fitted.predict(held_out[0]) == held_out[1]).mean()
                if options.fits_once and (i == 0 or accuracies[i, 0] > accuracies[:i, 0].max()):
                    best = replace(fitted, rows=count)
        return (accuracies.mean(1) if splits else np.zeros(1)), best

    def _require_classes(self, y: Labels) -> None:
        if len(np.unique(y)) < 2:
            raise SpecError(f"{self.where}: the {len(y)} rows to fit are all of one class; use more rows")


def divided(options: Mapping[str, Any], cls: type[Spec]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of a specification, and the others."""
    names = names_of(cls)
    known = {name: value for name, value in options.items() if name in names}
    return known, {name: value for name, value in options.items() if name not in names}


def names_of(cls: type[Any]) -> tuple[str, ...]:
    """Return the names of the options of a specification."""
    return tuple(each.name for each in fields(cls))


def read(
    kind: str, options: Mapping[str, Any] | None = None, where: str = "options", also: Sequence[str] = ()
) -> ClassifierSearch:
    """Return the candidates given by options, all validated.

    Args:
        kind: key of `KINDS`.
        options: options of the kind and of the selection (`SearchOptions`); plain data.
        where: prefix of error messages.
        also: options read elsewhere, to be accepted here.

    Raises:
        SpecError: unknown kind or option, or an invalid value.

    Example:
        >>> x = np.random.default_rng(0).random((60, 3)); y = (x[:, 0] > 0.5).astype(np.int64)
        >>> search = read("svm_linear", {"grid": {"C": [0.01, 1.0]}})
        >>> fitted = search.fit((x, y), [lambda: ((x[:40], y[:40]), (x[40:], y[40:]))], classes=2)
        >>> fitted.chosen, fitted.predict(x).shape
        ({'C': 1.0}, (60,))
    """
    require_known([kind], KINDS, f"{where}.classifier")
    cls = KINDS[kind]
    require_known(options or {}, (*names_of(cls), *names_of(SearchOptions), *also), f"{where}: options of {kind}")
    selection, others = divided(options or {}, SearchOptions)
    selection = {name: value for name, value in selection.items() if value is not None}
    search: SearchOptions = coerce(SearchOptions, selection, where)
    if search.variants is not None:
        return _variants(kind, search, merged({}, options or {}), where, also)
    _refuse_training(others, search, where)
    if search.early_stopping and not cls.in_epochs:
        raise SpecError(f"{where}.early_stopping: {kind} is not trained in epochs, leave it out")
    candidates = []
    for values in itertools.product(*search.grid.values()):
        chosen = dict(zip(search.grid, values, strict=True))
        final = _with(others, chosen, f"{where}.grid")
        kinds = [coerce(cls, final, where)]
        if search.tune:
            kinds.insert(0, coerce(cls, _with(final, search.tune, f"{where}.tune"), where))
        candidates.append(ClassifierCandidate(chosen, kinds[0], kinds[-1]))
    return ClassifierSearch(kind, tuple(candidates), search, where, bool(search.grid) or search.early_stopping)


def _refuse_training(options: Mapping[str, Any], search: SearchOptions, where: str) -> None:
    """Refuse training options that have no effect, in the options, the grid and `tune`."""
    others = {} if search.early_stopping else {"patience": "is for early_stopping; set that, or leave it out"}
    refuse(options.get("train"), f"{where}.train", **others)
    refuse(search.tune.get("train"), f"{where}.tune.train", **others)
    for training in search.grid.get("train", ()):
        refuse(training, f"{where}.grid.train", **others)
    for path in (*search.grid, *search.tune):
        if path.startswith("train."):
            refuse({path.removeprefix("train."): None}, f"{where}.train", **others)


def _variants(
    kind: str, search: SearchOptions, common: dict[str, Any], where: str, also: Sequence[str]
) -> ClassifierSearch:
    """Return a search over the candidates of all variants."""
    if not search.variants:
        raise SpecError(f"{where}.variants: expected {{name: {{options}}}}, got none")
    common.pop("variants")
    candidates: list[ClassifierCandidate] = []
    searches = []
    for name, options in search.variants.items():
        here = f"{where}.variants.{name}"
        for shared in ("tune_rows", "refit", "early_stopping", "variants"):
            if shared in options:
                raise SpecError(f"{here}.{shared}: is the same for all variants; set it next to variants")
        searches.append(read(kind, merged(common, options), here, also))
        if not searches[-1].selects:
            raise SpecError(f"{here}: give a grid, of one value at least, so that variants can be compared")
        candidates += [replace(c, chosen={"variant": name, **c.chosen}) for c in searches[-1].candidates]
    return replace(searches[0], candidates=tuple(candidates), where=where)


def _with(options: Mapping[str, Any], changes: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return options with changes by path."""
    result = merged({}, options)
    for path, value in changes.items():
        set_option(result, path, value, where)
    return result
