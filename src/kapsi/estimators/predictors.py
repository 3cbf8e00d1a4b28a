"""The classifier and the regressor: rows in, a recipe or a model of one's own fitted by kapsi, predictions out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
from sklearn.base import ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.utils import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d, validate_data

from kapsi.data.tabular.types import Floats, label_text
from kapsi.errors import DataError, SpecError
from kapsi.estimators.base import RPNEstimator, in_parts
from kapsi.estimators.labels import Target, labels_of, plain
from kapsi.tables.intervals import Decisions, bounds_of_rows, decided

__all__ = ["RPNClassifier", "RPNRegressor"]


class RPNClassifier(ClassifierMixin, RPNEstimator):  # type: ignore[misc]
    """Classifier: a model of one layer that a recipe chooses, or a model of one's own.

    Frames of pandas, polars and pyarrow are read by the rules of `kapsi fit`: strings and categories become indicators, dates
    their parts, missing values are filled and marked. Arrays hold numbers, NaN is missing.

    Args:
        recipe: the recipe that chooses and fits the model: a name, a mapping with a kind, or a `Recipe`.
        prefer: `accuracy`, `explainable`, `small` or `fast`, an option of the recipe `auto`.
        budget: seconds, an option of the recipe `auto`.
        heads: names of the heads to choose from, an option of the recipe `auto`.
        spec: a model of one's own instead of a recipe: a `ModelSpec` whose widths at the ends may be None, or an expansion (one
            layer with a dense ψ and a bias). The options from `solver` to `warm_start` need it.
        loss: the loss; `auto` is `cross_entropy`.
        solver: the solver; `auto` chooses by size.
        l2: λ of the L2 penalty. None: chosen on held-out rows; without held-out rows 1e-4, or the leave-one-out error.
        max_epochs: maximum number of epochs; None for 200.
        training: further fields of `TrainConfig`, as an object or a mapping, such as `{"patience": 10, "l1": 1e-3}`.
        early_stopping: hold out rows to choose the penalty and the number of epochs, as `kapsi fit`; otherwise one fit on all
            rows. None is true.
        validation_fraction: share of the rows held out by solvers in mini-batches and above 5,000 rows; None for 0.15.
        warm_start: continue from the weights, scaling, classes and penalty of the last `fit`; an error if the solver has a
            closed form.
        class_weight: `balanced`, weights by label, or None.
        device: device of the model, such as `cuda`; None for the CPU.
        random_state: seed, 0 to 2³² − 1; a `RandomState`; None for another seed in each fit. NumPy's and torch's global states
            are neither read nor changed.
        intervals: keep the errors of held-out rows, for `predict_set`; needs a recipe.

    Attributes:
        model_: the fitted `kapsi.Model`; its inputs are the encoded rows, its outputs logits.
        classes_: labels of the classes, `(classes,)`.
        recipe_: the recipe with its options; None with `spec`.
        leaderboard_: the heads that the recipe compared, best first; empty with `spec`.
        notes_: notes of the fit, such as columns left out.
        n_features_in_: number of columns.
        feature_names_in_: names of the columns, if all are strings.

    Example:
        >>> import kapsi as kp
        >>> from sklearn.datasets import load_iris
        >>> x, y = load_iris(return_X_y=True)
        >>> classifier = kp.RPNClassifier(spec=kp.Taylor(2)).fit(x, y)
        >>> classifier.predict(x[:2]), classifier.score(x, y) > 0.95
        (array([0, 0]), True)
    """

    classifies = True

    def __init__(
        self,
        recipe: Any = "auto",
        *,
        prefer: str | None = None,
        budget: float | None = None,
        heads: Any = None,
        spec: Any = None,
        loss: Any = "auto",
        solver: Any = "auto",
        l2: float | None = None,
        max_epochs: int | None = None,
        training: Any = None,
        early_stopping: bool | None = None,
        validation_fraction: float | None = None,
        warm_start: bool = False,
        class_weight: Any = None,
        device: Any = None,
        random_state: Any = 0,
        intervals: bool = False,
    ) -> None:
        self.recipe = recipe
        self.prefer = prefer
        self.budget = budget
        self.heads = heads
        self.spec = spec
        self.loss = loss
        self.solver = solver
        self.l2 = l2
        self.max_epochs = max_epochs
        self.training = training
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.warm_start = warm_start
        self.class_weight = class_weight
        self.device = device
        self.random_state = random_state
        self.intervals = intervals

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> Self:
        """Fit the model.

        Args:
            X: a frame, an array of numbers `(rows, columns)`, or a sparse matrix.
            y: labels, `(rows,)`.
            sample_weight: weights of the rows, at least 0.
            groups: labels of groups, `(rows,)`: rows of a group are held out together wherever the fit holds out rows.

        Returns:
            The estimator.

        Raises:
            KapsiError: rows or options that do not fit; a `ValueError`.
        """
        return self._fit(X, y, sample_weight, groups)

    @in_parts
    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Take one pass over the rows in mini-batches, from the current weights; the first call also fits the scaling.

        Args:
            X: rows, of the kind of the first call.
            y: labels, `(rows,)`.
            classes: all labels, in the first call.
            sample_weight: weights of the rows, at least 0.
        """
        return self._partial_fit(X, y, sample_weight, classes)

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """Return the most probable label of each row, `(rows,)`."""
        codes = self._outputs(X).argmax(1).numpy()
        return self.classes_[codes]

    def predict_proba(self, X: Any) -> Floats:
        """Return the probability of each class, `(rows, classes)`, in the order of `classes_`."""
        return self._outputs(X).softmax(1).numpy()

    def predict_log_proba(self, X: Any) -> Floats:
        """Return the logarithm of the probability of each class, `(rows, classes)`, finite where a probability is 0."""
        return self._outputs(X).log_softmax(1).numpy()

    def predict_set(self, X: Any, level: float = 0.9) -> npt.NDArray[np.bool_]:
        """Return which classes are in the conformal set of each row, `(rows, classes)`; see `kapsi.recipes.Conformal`.

        Args:
            X: rows.
            level: share of new rows whose class is in the set, above 0 and below 1.

        Raises:
            KapsiError: a fit without `intervals=True`, or too few rows for the level.
        """
        probabilities = self._outputs(X).softmax(1)
        return self._intervals().conformal.sets(probabilities, level).numpy()

    def decide(
        self, X: Any, *, costs: Mapping[Any, float] | None = None, recall: tuple[Any, float] | None = None
    ) -> npt.NDArray[Any]:
        """Return the label of each row by costs, or for a share of the rows of a class to be found, `(rows,)`.

        Args:
            X: rows.
            costs: cost of missing a row of a class, by label, above 0; 1 for other labels. The label with the largest
                probability × cost is chosen.
            recall: a label and the share of its rows to be found, above 0 and below 1, for a fit with `intervals=True`; the
                label is chosen if its probability reaches a threshold set on held-out rows.

        Raises:
            KapsiError: an unknown label, a recall without `intervals=True`, or too few rows for the share.
        """
        probabilities = self.predict_proba(X)
        labels = [label_text(plain(label)) for label in self.classes_]
        return self.classes_[decided(labels, probabilities, Decisions.of(costs, recall), self._intervals)]

    def decision_function(self, X: Any) -> Floats:
        """Return the logits, `(rows, classes)`; for two classes their difference, `(rows,)`, positive for the second."""
        outputs = self._outputs(X)
        return (outputs[:, 1] - outputs[:, 0] if outputs.shape[1] == 2 else outputs).numpy()

    def _target(self, y: Any, known: npt.NDArray[Any] | None) -> Target:
        name = type(self).__name__
        y = validate_data(self, X="no_validation", y=labels_of(y, f"{name}: y"), multi_output=True)
        if np.ndim(y) == 2 and y.shape[1] > 1:
            advice = "fit a classifier for each column, as sklearn.multioutput.MultiOutputClassifier does"
            raise ValueError(f"{name}: y should be a 1d array, got an array of shape {y.shape}; {advice}")
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        classes = np.unique(y) if known is None else known
        text = "OUS"  # codes of NumPy's types of text
        if (y.dtype.kind in text) != (classes.dtype.kind in text):
            codes, odd = np.zeros(len(y)), np.zeros(1, dtype=np.int64)
        else:
            codes = np.searchsorted(classes, y).clip(max=len(classes) - 1)
            odd = np.flatnonzero(classes[codes] != y)
        if len(odd):
            label = plain(y[odd[0]])
            raise DataError(f"{name}: y has the label {label!r}; the known classes are {classes.tolist()[:20]}")
        if len(classes) < 2:
            raise DataError(f"{name}: y has the one class {plain(classes[0])!r}; at least 2 classes are needed")
        return Target(codes.astype(np.int64), classes)

    def _class_weights(self, target: Target) -> Floats | None:
        if self.class_weight is None or target.classes is None:
            return None
        present = np.unique(target.y)
        weights = np.ones(len(target.classes))
        labels = target.classes[target.y]
        weights[present] = compute_class_weight(self.class_weight, classes=target.classes[present], y=labels)
        if not (np.isfinite(weights).all() and (weights >= 0).all() and weights[present].any()):
            raise SpecError(
                f"{type(self).__name__}(class_weight={self.class_weight!r}): expected a finite weight of at least 0 for each "
                "class, not all 0; or 'balanced'"
            )
        return weights[target.y]

    def _set_classes(self, target: Target) -> None:
        self.classes_ = cast(npt.NDArray[Any], target.classes)

    def _known_classes(self) -> npt.NDArray[Any] | None:
        return getattr(self, "classes_", None)


class RPNRegressor(MultiOutputMixin, RegressorMixin, RPNEstimator):  # type: ignore[misc]
    """Regressor: a model of one layer that a recipe chooses, or a model of one's own; one target or several.

    Args:
        recipe, prefer, budget, heads, spec, solver, l2, max_epochs, training: see `RPNClassifier`.
        early_stopping, validation_fraction, warm_start, device, random_state: see `RPNClassifier`.
        intervals: keep the errors of held-out rows, for `predict_interval`; needs a recipe.
        loss: the loss; `auto` is `mse`.

    Attributes:
        model_: the fitted `kapsi.Model`; its inputs are the encoded rows, its outputs standardized targets.
        recipe_, leaderboard_, notes_, n_features_in_, feature_names_in_: see `RPNClassifier`.

    Example:
        >>> import numpy as np, kapsi as kp
        >>> x = np.linspace(-1, 1, 50)[:, None]
        >>> regressor = kp.RPNRegressor(spec=kp.Taylor(2)).fit(x, 3 * x[:, 0] ** 2)
        >>> regressor.predict([[0.5]]).round(2)
        array([0.75])
    """

    def __init__(
        self,
        recipe: Any = "auto",
        *,
        prefer: str | None = None,
        budget: float | None = None,
        heads: Any = None,
        spec: Any = None,
        loss: Any = "auto",
        solver: Any = "auto",
        l2: float | None = None,
        max_epochs: int | None = None,
        training: Any = None,
        early_stopping: bool | None = None,
        validation_fraction: float | None = None,
        warm_start: bool = False,
        device: Any = None,
        random_state: Any = 0,
        intervals: bool = False,
    ) -> None:
        self.recipe = recipe
        self.prefer = prefer
        self.budget = budget
        self.heads = heads
        self.spec = spec
        self.loss = loss
        self.solver = solver
        self.l2 = l2
        self.max_epochs = max_epochs
        self.training = training
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.warm_start = warm_start
        self.device = device
        self.random_state = random_state
        self.intervals = intervals

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> Self:
        """Fit the model.

        Args:
            X: a frame, an array of numbers `(rows, columns)`, or a sparse matrix.
            y: targets, `(rows,)` or `(rows, targets)`.
            sample_weight: weights of the rows, at least 0.
            groups: labels of groups, `(rows,)`: rows of a group are held out together wherever the fit holds out rows.

        Returns:
            The estimator.

        Raises:
            KapsiError: rows or options that do not fit; a `ValueError`.
        """
        return self._fit(X, y, sample_weight, groups)

    @in_parts
    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Take one pass over the rows in mini-batches, from the current weights; the first call also fits the scaling.

        Args:
            X: rows, of the kind of the first call.
            y: targets.
            sample_weight: weights of the rows, at least 0.
        """
        return self._partial_fit(X, y, sample_weight)

    def predict(self, X: Any) -> Floats:
        """Return the predictions in the unit of the target, `(rows,)`, or `(rows, targets)` for targets of two axes."""
        outputs = self._outputs(X)
        predicted = self._table.decoded(outputs)
        return predicted.reshape(len(predicted), *self._target_shape)

    def predict_interval(self, X: Any, level: float = 0.9) -> Floats:
        """Return lower and upper bounds of the target, `(rows, 2)`, or `(rows, targets, 2)` for targets of two axes.

        Args:
            X: rows.
            level: share of new rows whose target is inside, above 0 and below 1; see `kapsi.recipes.Conformal`.

        Raises:
            KapsiError: a fit without `intervals=True`, or too few rows for the level.
        """
        x = self._inputs(X)
        self._intervals()
        outputs = self._table.decoded(self._table.raw_outputs(x, type(self).__name__))
        bounds = bounds_of_rows(self._table, x, outputs, level)
        return bounds.reshape(len(bounds), *self._target_shape, 2)

    def _target(self, y: Any, known: npt.NDArray[Any] | None) -> Target:
        y = np.asarray(validate_data(self, X="no_validation", y=y, multi_output=True, y_numeric=True), dtype=np.float64)
        return Target(y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y, None, y.shape[1:])

    def _set_classes(self, target: Target) -> None:
        self._target_shape = target.shape
