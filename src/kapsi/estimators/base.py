"""The fit that classifier and regressor share."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import Tags, _safe_indexing
from sklearn.utils.validation import _check_sample_weight, check_consistent_length, check_is_fitted

from kapsi.data.tabular import Preprocessing, Table, TableProblem, TargetScale
from kapsi.data.tabular.split import Splits
from kapsi.data.tabular.types import Floats, Ints
from kapsi.errors import DataError, SpecError, check_integer, check_number, shown
from kapsi.estimators.export import ExportMixin
from kapsi.estimators.labels import Target, group_codes, labels_of
from kapsi.estimators.options import device_of, recipe_of, spec_of, training_of
from kapsi.estimators.rows import (
    SparseScale,
    check_dense,
    check_frame,
    inputs_of,
    is_table,
    read_rows,
    seed_of,
    sparse_rows,
)
from kapsi.estimators.training import check_warm_start, fit_model, in_batches, takes_sparse
from kapsi.modules import Model
from kapsi.recipes.base import LeaderboardRow, Recipe
from kapsi.spec import ModelSpec
from kapsi.tables.configuration import RunConfig, TableConfig, check_loss, outputs_of, resolve_run
from kapsi.tables.fitting import fit_rows
from kapsi.tables.intervals import Intervals, fit_intervals
from kapsi.tables.model import TableModel
from kapsi.tables.preparation import TrainingRows
from kapsi.tables.recipe_rows import fit_recipe, table_model
from kapsi.training.config import TrainConfig
from kapsi.training.resolve import RowsInfo

__all__ = ["RPNEstimator", "in_parts"]

RECIPE_OPTIONS = ("prefer", "budget", "heads")
SPEC_OPTIONS = ("solver", "l2", "max_epochs", "training", "early_stopping", "validation_fraction", "warm_start")
VALIDATION_FRACTION = TableConfig.early_stopping_fraction


class in_parts:
    """Method of an estimator that can be fitted in parts: with its own model, and a solver in mini-batches.

    For other options the attribute is missing, as scikit-learn expects; the error has the reason.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method, self.__doc__ = method, method.__doc__

    def __get__(self, estimator: Any, owner: type | None = None) -> Callable[..., Any]:
        if estimator is None:
            return self.method
        name = f"{type(estimator).__name__}: partial_fit"
        if estimator.spec is None:
            raise AttributeError(f"{name} needs spec=…: a recipe fits all rows at once")
        try:
            in_batches(training_of(estimator.training, 0, {"solver": estimator.solver}))
        except SpecError as error:
            raise AttributeError(f"{name}: {error}") from None
        return types.MethodType(self.method, estimator)


class RPNEstimator(ExportMixin, BaseEstimator):  # type: ignore[misc]
    """Base of the estimators: options, fit and outputs; a subclass reads its target and decides."""

    classifies: ClassVar[bool] = False

    recipe: Any
    spec: Any
    loss: Any
    solver: Any
    l2: float | None
    max_epochs: int | None
    training: Any
    early_stopping: bool | None
    validation_fraction: float | None
    warm_start: bool
    device: Any
    random_state: Any
    intervals: bool

    model_: Model
    recipe_: Recipe | None
    leaderboard_: tuple[LeaderboardRow, ...]
    notes_: list[str]
    _table: TableModel
    _sparse: SparseScale | None
    _named: bool
    _spec: ModelSpec | None
    _l2: float | None

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.sparse = True
        return tags

    def _target(self, y: Any, known: npt.NDArray[Any] | None) -> Target:
        """Return the target, with given classes if any."""
        raise NotImplementedError

    def _check_options(self) -> None:
        """Raise a `SpecError` for options of a wrong type, and for options without an effect."""
        name = type(self).__name__
        if not (self.early_stopping is None or isinstance(self.early_stopping, bool | np.bool_)):
            raise SpecError(f"{name}: early_stopping: expected True, False or None, got {shown(self.early_stopping)}")
        if not isinstance(self.warm_start, bool | np.bool_):
            raise SpecError(f"{name}: warm_start: expected True or False, got {shown(self.warm_start)}")
        wrong = RECIPE_OPTIONS if self.spec is not None else SPEC_OPTIONS
        other = "a recipe, leave it or spec out" if self.spec is not None else "spec=…, give spec or leave it out"
        for option in wrong:
            value = getattr(self, option)
            default = value is None or (option == "warm_start" and not value)
            if not (default or (isinstance(value, str) and value == "auto")):
                raise SpecError(f"{name}: {option}={value!r} has an effect only with {other}")
        if self.spec is not None and not (isinstance(self.recipe, str) and self.recipe == "auto"):
            raise SpecError(f"{name}: recipe and spec are both given; leave one out")
        if not isinstance(self.intervals, bool | np.bool_):
            raise SpecError(f"{name}: intervals: expected True or False, got {shown(self.intervals)}")
        if self.intervals and self.spec is not None:
            raise SpecError(f"{name}: intervals=True needs the held-out rows of a recipe; leave it or spec out")
        if self._on_all_rows and self.validation_fraction is not None:
            raise SpecError(f"{name}: validation_fraction has no effect without early_stopping; leave it out")
        if isinstance(self.heads, list | tuple) and not self.heads:
            raise SpecError(f"{name}: heads={self.heads!r} names no head; leave heads out for all")
        if self.max_epochs is not None:
            check_integer(f"{name}: max_epochs", self.max_epochs, 1, 10**9)
        if self.l2 is not None:
            check_number(f"{name}: l2", self.l2, 0, 1e30)
        if self.validation_fraction is not None:
            check_number(f"{name}: validation_fraction", self.validation_fraction, 0.05, 0.5)
        device_of(self.device)

    @property
    def _on_all_rows(self) -> bool:
        """Whether the own model is one fit on all rows, without held-out rows."""
        return self.early_stopping is not None and not self.early_stopping

    def _set_classes(self, target: Target) -> None:
        """Keep the classes, or the shape of the target."""
        raise NotImplementedError

    def _class_weights(self, target: Target) -> Floats | None:
        """Return the weight of each row by its class, None for equal weights."""
        return None

    def _known_classes(self) -> npt.NDArray[Any] | None:
        """Return the classes of the last fit, None without one."""
        return None

    # -------------------------------------------------------------------------------- fit

    def _fit(self, X: Any, y: Any, sample_weight: Any, groups: Any) -> Self:
        self._check_options()
        if groups is not None and self._on_all_rows:
            raise SpecError(f"{type(self).__name__}: groups has no effect without held-out rows; leave it out")
        again = bool(self.warm_start) and hasattr(self, "model_")
        rows = self._rows(X, y, sample_weight, self._known_classes() if again else None, groups)
        spec = None if self.spec is None else spec_of(self.spec)
        if again:
            if spec != self._spec:
                raise SpecError(f"{type(self).__name__}: spec is not that of the last fit, which warm_start continues")
            self._continue(rows, self._config(rows.seed))
            return self._finish(rows.target)
        self.recipe_, self.leaderboard_, self.notes_ = None, (), []
        self._spec, self._l2 = spec, None
        read = read_rows(self, rows.X, keep_sparse=spec is not None and takes_sparse(spec))
        self._check_rows(rows)
        self.notes_ += read.notes
        self._named, self._sparse = is_table(rows.X), None
        if read.features is None:
            self._fit_sparse(rows, read.sparse, spec)
            return self._finish(rows.target)
        problem = self._problem(rows, read.features)
        if spec is not None:
            problem = problem.without_texts()
            self.notes_ += problem.notes
        train = TrainingRows.of(problem, problem.rows, rows.seed)
        if spec is None:
            self._fit_recipe(problem, train, rows.seed)
        elif self._on_all_rows:
            self._start(problem, train, spec, self._config(rows.seed))
        else:
            self._fit_selected(problem, train, spec, self._config(rows.seed))
        return self._finish(rows.target)

    def _partial_fit(self, X: Any, y: Any, sample_weight: Any, classes: Any = None) -> Self:
        self._check_options()
        name, again = type(self).__name__, hasattr(self, "model_")
        known = None if classes is None else np.unique(labels_of(classes, f"{name}: classes"))
        fitted = self._known_classes() if again else None
        if fitted is not None:
            if known is not None and not np.array_equal(known, fitted):
                raise DataError(f"{name}: classes={known.tolist()} are not those of the first call, {fitted.tolist()}")
            known = fitted
        if self.classifies and known is None:
            raise DataError(f"{name}: the first call of partial_fit needs classes=…, all labels")
        rows = self._rows(X, y, sample_weight, known)
        config, spec = in_batches(self._config(rows.seed)), spec_of(self.spec)
        if again:
            self._continue(rows, config, in_parts=True)
            return self._finish(rows.target)
        self.recipe_, self.leaderboard_, self.notes_ = None, (), []
        self._spec, self._l2 = spec, None
        read = read_rows(self, rows.X, keep_sparse=takes_sparse(spec))
        self._named, self._sparse = is_table(rows.X), None
        if read.features is None:
            self._fit_sparse(rows, read.sparse, spec, config)
        else:
            problem = self._problem(rows, read.features).without_texts()
            self.notes_ += problem.notes
            self._start(problem, TrainingRows.of(problem, problem.rows, rows.seed), spec, config)
        return self._finish(rows.target)

    def _rows(self, X: Any, y: Any, sample_weight: Any, known: npt.NDArray[Any] | None, groups: Any = None) -> FitRows:
        """Return the rows of a fit without those with a weight of 0, after the checks of target, weights and groups."""
        name, seed = type(self).__name__, seed_of(self.random_state)
        check_frame(X, name)
        target = self._target(y, known)
        check_consistent_length(X, target.y)
        codes = None if groups is None else group_codes(groups, len(target.y), name)
        weight = None
        if sample_weight is not None:
            weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
            kept = np.flatnonzero(weight)
            if not len(kept):
                raise DataError(f"{name}: all weights are 0; give a row with more")
            if len(kept) < len(weight):
                X, weight = _safe_indexing(X, kept), weight[kept]
                codes = None if codes is None else codes[kept]
                target = self._target(target.take(kept), known)._replace(shape=target.shape)
            # Powers of two scale exactly; sums of weights near the limits of float64 stay finite.
            weight = np.ldexp(weight, -np.frexp(weight.max())[1])
        by_class = self._class_weights(target)
        if by_class is not None:
            weight = by_class if weight is None else weight * by_class
        return FitRows(X, target, weight, seed, codes)

    def _check_rows(self, rows: FitRows) -> None:
        """Refuse a single row."""
        if len(rows.target.y) < 2:
            raise DataError(f"{type(self).__name__}: 1 sample is too few, n_samples = 1; give 2 rows or more")

    def _problem(self, rows: FitRows, features: Table) -> TableProblem:
        """Return features and target as the problem of a table."""
        y, classes = rows.target.y, rows.target.classes
        several = classes is None and y.ndim > 1
        return TableProblem(
            name=type(self).__name__,
            target=tuple(f"y{i}" for i in range(y.shape[1])) if several else "y",
            task="regression" if classes is None else "classification",
            features=features,
            y=y,
            classes=None if classes is None else tuple(classes.tolist()),
            rows=np.arange(len(y)),
            notes=(),
            weight=rows.weight,
            groups=rows.groups,
        )

    def _config(self, seed: int) -> TrainConfig:
        given = {"solver": self.solver, "loss": self.loss, "l2": self.l2, "epochs": self.max_epochs}
        return training_of(self.training, seed, given)

    @property
    def _share(self) -> float:
        """The share of held-out rows."""
        return VALIDATION_FRACTION if self.validation_fraction is None else float(self.validation_fraction)

    def _held(self, rows: FitRows) -> tuple[Ints, Ints] | None:
        """Return the training rows and the held-out rows of a single split, None for a fit on all rows."""
        if self._on_all_rows:
            return None
        return Splits(rows.target.y, self.classifies, rows.seed, rows.groups).split(self._share)

    def _check_warm_start(self, spec: ModelSpec, config: TrainConfig, count: int, *, sparse: bool = False) -> None:
        """Raise a `SpecError` if there is nothing to continue from: the solver finds the solution from any weights."""
        if self.warm_start:
            check_warm_start(spec, config, RowsInfo(count, self.classifies, sparse=sparse), type(self).__name__)

    def _fit_recipe(self, problem: TableProblem, train: TrainingRows, seed: int) -> None:
        self.recipe_ = self._recipe()
        training = training_of(None, seed, {"loss": self.loss})
        table, result = fit_recipe(problem, train, self.recipe_, training)
        if self.intervals:
            predicted = table.decoded(result.held_out)
            known = np.flatnonzero(~np.isnan(predicted.reshape(len(predicted), -1)).any(1))
            table = replace(
                table, intervals=fit_intervals(problem, table, train.rows[known], predicted[known], seed=seed)
            )
        self._table, self.leaderboard_ = table, result.leaderboard
        self.notes_ += result.notes

    def _intervals(self) -> Intervals:
        """Return the errors of held-out rows."""
        check_is_fitted(self)
        if self._table.intervals is None:
            raise SpecError(
                f"{type(self).__name__}: was fitted without the errors of held-out rows; set intervals=True, and fit again"
            )
        return self._table.intervals

    def _recipe(self) -> Recipe:
        return recipe_of(self.recipe, {name: getattr(self, name) for name in RECIPE_OPTIONS})

    def _fit_selected(self, problem: TableProblem, train: TrainingRows, spec: ModelSpec, config: TrainConfig) -> None:
        """Fit with the penalty and the number of epochs chosen on held-out rows, as `kapsi fit`."""
        self._check_warm_start(spec.sized(train.x.shape[1], outputs_of(problem)), config, len(train.y))
        table = TableConfig("y", early_stopping_fraction=self._share)
        run = resolve_run(problem, RunConfig(table, spec, config))
        part = fit_rows(problem, train, run, device=device_of(self.device))
        self._table = part.model
        self._l2 = next((choice.l2 for choice in part.choices if choice.chosen), None)

    def _start(self, problem: TableProblem, train: TrainingRows, spec: ModelSpec, config: TrainConfig) -> None:
        """Fit from initial values to all rows."""
        check_loss(problem, config.loss)
        train = train.for_loss(problem, config.loss)
        sized = spec.sized(train.x.shape[1], outputs_of(problem))
        self._check_warm_start(sized, config, len(train.y))
        model = fit_model(sized, train.x, train.y, train.weight, config, device=device_of(self.device))
        self._table = table_model(problem, train, model)

    def _continue(self, rows: FitRows, config: TrainConfig, *, in_parts: bool = False) -> None:
        """Fit from the current weights, with the current scaling and the chosen penalty."""
        x, y = self._inputs(rows.X), rows.target.y
        y = y if self._table.scale is None else self._table.scale.apply(y)
        if not in_parts:
            self._check_warm_start(self.model_.spec, config, len(y), sparse=self._sparse is not None)
        config = replace(config, l2=self._l2 if config.l2 is None else config.l2)
        held = None if in_parts else self._held(rows)
        model = fit_model(self.model_, x, y, rows.weight, config, held=held, device=device_of(self.device))
        self._table = replace(self._table, model=model)

    def _fit_sparse(self, rows: FitRows, x: Any, spec: ModelSpec | None, config: TrainConfig | None = None) -> None:
        """Fit to sparse rows; a recipe that has a linear head becomes a linear model."""
        target = rows.target
        if spec is not None and not takes_sparse(spec):
            check_dense(type(self).__name__, x, "use a model with κ(x) = x, such as spec=kp.Identity()")
        if spec is None:
            self.recipe_ = self._recipe()
            if self.recipe_.name not in ("auto", "linear"):
                check_dense(type(self).__name__, x, "use a model with κ(x) = x, such as spec=kp.Identity()")
            self.notes_.append(
                f"a linear model: {x.shape[0]:,} × {x.shape[1]:,} sparse rows are too large for other heads"
            )
            spec, config = spec_of("identity"), training_of(None, rows.seed, {"loss": self.loss})
        self._sparse = SparseScale.fit(x, rows.weight)
        scale = None if target.classes is not None else TargetScale.fit(target.y, rows.weight)
        problem = self._problem(rows, Table(type(self).__name__, {}))
        sized, held = spec.sized(x.shape[1], target.outputs), self._held(rows) if config is None else None
        config = self._config(rows.seed) if config is None else config
        self._check_warm_start(sized, config, x.shape[0], sparse=True)
        y = target.y if scale is None else scale.apply(target.y)
        scaled, device = self._sparse.apply(x), device_of(self.device)
        model = fit_model(sized, scaled, y, rows.weight, config, held=held, device=device)
        self._table = TableModel(model, Preprocessing(()), problem.target, problem.task, problem.classes, scale)

    def _finish(self, target: Target) -> Self:
        self.model_ = self._table.model.double().to(device_of(self.device)).eval()
        self._set_classes(target)
        return self

    # -------------------------------------------------------------------------------- outputs

    def _inputs(self, X: Any) -> Any:
        """Return the inputs of the model for rows, (rows, m) float64, or CSR."""
        check_is_fitted(self)
        if self._sparse is not None:
            return self._sparse.apply(sparse_rows(self, X))
        return inputs_of(self, X, self._table.preprocessing, named=self._named)

    def _outputs(self, X: Any) -> torch.Tensor:
        """Return the outputs of the model for rows, (rows, n) float64 on the CPU."""
        inputs = self._inputs(X)
        return self._table.raw_outputs(inputs, type(self).__name__)


class FitRows(NamedTuple):
    """The rows of a fit.

    Attributes:
        X: the rows as given.
        target: the target.
        weight: weights of the rows, or None.
        seed: the seed.
        groups: codes of the groups that held-out rows do not divide, or None.
    """

    X: Any
    target: Target
    weight: Floats | None
    seed: int
    groups: Ints | None = None
