"""The fit that classifier and regressor share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import Tags, _safe_indexing
from sklearn.utils.validation import _check_sample_weight, check_consistent_length, check_is_fitted

from kapsi.data.tabular import Preprocessing, Table, TableProblem, TargetScale
from kapsi.data.tabular.types import Floats
from kapsi.errors import DataError, SpecError
from kapsi.estimators.options import device_of, recipe_of, spec_of, training_of
from kapsi.estimators.rows import SparseScale, check_dense, inputs_of, is_table, read_rows, seed_of, sparse_rows
from kapsi.estimators.training import fit_model, in_batches, takes_sparse
from kapsi.modules import Model
from kapsi.recipes.base import LeaderboardRow, Recipe
from kapsi.spec import ModelSpec
from kapsi.tables.configuration import RunConfig, TableConfig, check_loss, resolve_run
from kapsi.tables.fitting import fit_rows
from kapsi.tables.model import TableModel
from kapsi.tables.preparation import TrainingRows
from kapsi.tables.recipe_rows import fit_recipe, table_model
from kapsi.training.config import TrainConfig

__all__ = ["PartialFit", "RPNEstimator", "Target"]

RECIPE_OPTIONS = ("prefer", "budget", "heads")
SPEC_OPTIONS = ("solver", "l2", "max_epochs", "training", "early_stopping", "validation_fraction", "warm_start")
VALIDATION_FRACTION = TableConfig.early_stopping_fraction


class Target(NamedTuple):
    """The target of training rows.

    Attributes:
        y: class codes (rows,) int64, or values (rows,) or (rows, targets) float64.
        classes: labels of the classes; None in regression.
        shape: shape of the target of a row.
    """

    y: npt.NDArray[Any]
    classes: npt.NDArray[Any] | None = None
    shape: tuple[int, ...] = ()

    @property
    def outputs(self) -> int:
        """Number of outputs of a model."""
        return len(self.classes) if self.classes is not None else self.y[:1].size


class PartialFit:
    """Whether an estimator can be fitted in parts: its own model, and a solver in mini-batches."""

    def __call__(self, estimator: Any) -> bool:
        if estimator.spec is None:
            raise AttributeError("partial_fit needs spec=…: a recipe fits all rows at once")
        try:
            in_batches(training_of(estimator.training, 0, {"solver": estimator.solver}))
        except SpecError as error:
            raise AttributeError(str(error)) from None
        return True


class RPNEstimator(BaseEstimator):  # type: ignore[misc]
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

    model_: Model
    recipe_: Recipe | None
    leaderboard_: tuple[LeaderboardRow, ...]
    notes_: list[str]
    _table: TableModel
    _sparse: SparseScale | None
    _named: bool

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.sparse = True
        return tags

    def _target(self, y: Any, known: npt.NDArray[Any] | None) -> Target:
        """Return the target, with given classes if any."""
        raise NotImplementedError

    def _check_options(self) -> None:
        """Raise a `SpecError` for options without an effect."""
        name = type(self).__name__
        wrong = RECIPE_OPTIONS if self.spec is not None else SPEC_OPTIONS
        other = "a recipe, leave it or spec out" if self.spec is not None else "spec=…, give spec or leave it out"
        for option in wrong:
            value = getattr(self, option)
            if not (value is None or value is False or (isinstance(value, str) and value == "auto")):
                raise SpecError(f"{name}: {option}={value!r} has an effect only with {other}")
        if self.spec is not None and not (isinstance(self.recipe, str) and self.recipe == "auto"):
            raise SpecError(f"{name}: recipe and spec are both given; leave one out")
        if self.early_stopping is False and self.validation_fraction is not None:
            raise SpecError(f"{name}: validation_fraction has no effect without early_stopping; leave it out")
        device_of(self.device)

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

    def _fit(self, X: Any, y: Any, sample_weight: Any) -> Self:
        self._check_options()
        again = self.warm_start and hasattr(self, "model_")
        rows = self._rows(X, y, sample_weight, self._known_classes() if again else None)
        if again:
            self._continue(rows, self._config(rows.seed), self._share())
            return self._finish(rows.target)
        self.recipe_, self.leaderboard_, self.notes_ = None, (), []
        spec = None if self.spec is None else spec_of(self.spec)
        read = read_rows(self, rows.X, keep_sparse=spec is not None and takes_sparse(spec))
        self._check_rows(rows)
        self.notes_ += read.notes
        self._named, self._sparse = is_table(rows.X), None
        if read.features is None:
            self._fit_sparse(rows, read.sparse, spec)
            return self._finish(rows.target)
        problem = self._problem(rows, read.features)
        train = TrainingRows.of(problem, problem.rows, rows.seed)
        if spec is None:
            self._fit_recipe(problem, train, rows.seed)
        elif self.early_stopping is False:
            self._start(problem, train, spec, self._config(rows.seed))
        else:
            self._fit_selected(problem, train, spec, self._config(rows.seed))
        return self._finish(rows.target)

    def _partial_fit(self, X: Any, y: Any, sample_weight: Any, classes: Any = None) -> Self:
        self._check_options()
        again = hasattr(self, "model_")
        known = self._known_classes() if again else None if classes is None else np.unique(classes)
        if self.classifies and known is None:
            raise DataError(f"{type(self).__name__}: the first call of partial_fit needs classes=…, all labels")
        rows = self._rows(X, y, sample_weight, known)
        config, spec = in_batches(self._config(rows.seed)), spec_of(self.spec)
        if again:
            self._continue(rows, config, None)
            return self._finish(rows.target)
        self.recipe_, self.leaderboard_, self.notes_ = None, (), []
        read = read_rows(self, rows.X, keep_sparse=takes_sparse(spec))
        self._named, self._sparse = is_table(rows.X), None
        if read.features is None:
            self._fit_sparse(rows, read.sparse, spec, config)
        else:
            problem = self._problem(rows, read.features)
            self._start(problem, TrainingRows.of(problem, problem.rows, rows.seed), spec, config)
        return self._finish(rows.target)

    def _rows(self, X: Any, y: Any, sample_weight: Any, known: npt.NDArray[Any] | None) -> FitRows:
        """Return the rows of a fit without those with a weight of 0, after the checks of target and weights."""
        name, seed = type(self).__name__, seed_of(self.random_state)
        target = self._target(y, known)
        check_consistent_length(X, target.y)
        weight = None
        if sample_weight is not None:
            weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
            kept = np.flatnonzero(weight)
            if not len(kept):
                raise DataError(f"{name}: all weights are 0; give a row with more")
            if len(kept) < len(weight):
                labels = target.y if target.classes is None else target.classes[target.y]
                X, weight = _safe_indexing(X, kept), weight[kept]
                target = self._target(labels[kept], known)._replace(shape=target.shape)
        by_class = self._class_weights(target)
        if by_class is not None:
            weight = by_class if weight is None else weight * by_class
        return FitRows(X, target, weight, seed)

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
        )

    def _config(self, seed: int) -> TrainConfig:
        given = {"solver": self.solver, "loss": self.loss, "l2": self.l2, "epochs": self.max_epochs}
        return training_of(self.training, seed, given)

    def _share(self) -> float | None:
        """Return the share of held-out rows."""
        if self.early_stopping is False:
            return None
        return VALIDATION_FRACTION if self.validation_fraction is None else self.validation_fraction

    def _fit_recipe(self, problem: TableProblem, train: TrainingRows, seed: int) -> None:
        self.recipe_ = self._recipe()
        training = training_of(None, seed, {"loss": self.loss})
        table, result = fit_recipe(problem, train, self.recipe_, training)
        self._table, self.leaderboard_ = table, result.leaderboard
        self.notes_ += result.notes

    def _recipe(self) -> Recipe:
        return recipe_of(self.recipe, {name: getattr(self, name) for name in RECIPE_OPTIONS})

    def _fit_selected(self, problem: TableProblem, train: TrainingRows, spec: ModelSpec, config: TrainConfig) -> None:
        """Fit with the penalty and the number of epochs chosen on held-out rows, as `kapsi fit`."""
        share = VALIDATION_FRACTION if self.validation_fraction is None else self.validation_fraction
        table = TableConfig("y", early_stopping_fraction=share)
        run = resolve_run(problem, RunConfig(table, spec, config))
        self._table = fit_rows(problem, train, run, device=device_of(self.device)).model

    def _start(self, problem: TableProblem, train: TrainingRows, spec: ModelSpec, config: TrainConfig) -> None:
        """Fit from initial values to all rows."""
        check_loss(problem, config.loss)
        train = train.for_loss(problem, config.loss)
        sized = spec.sized(train.x.shape[1], train.y[:1].size if problem.classes is None else len(problem.classes))
        device = device_of(self.device)
        model = fit_model(sized, train.x, train.y, train.weight, config, device=device)
        self._table = table_model(problem, train, model)

    def _continue(self, rows: FitRows, config: TrainConfig, share: float | None) -> None:
        """Fit from the current weights, with the current scaling."""
        x, y = self._inputs(rows.X), rows.target.y
        y = y if self._table.scale is None else self._table.scale.apply(y)
        model = fit_model(self.model_, x, y, rows.weight, config, share=share, device=device_of(self.device))
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
        share = self._share() if config is None else None
        model = fit_model(
            spec.sized(x.shape[1], target.outputs),
            self._sparse.apply(x),
            target.y if scale is None else scale.apply(target.y),
            rows.weight,
            self._config(rows.seed) if config is None else config,
            share=share,
            device=device_of(self.device),
        )
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
    """

    X: Any
    target: Target
    weight: Floats | None
    seed: int
