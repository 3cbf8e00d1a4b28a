"""Base of all kinds of classifiers, and the classical scikit-learn classifiers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kapsi.function import Spec, option
from kapsi.training.records import Epoch

Labels = npt.NDArray[np.int64]
LabeledRows: TypeAlias = tuple[Any, Labels]
"""Inputs `(rows, m)`, an array or a SciPy matrix, and integer class labels `(rows,)` from 0."""
Augmentation = Callable[[Tensor], Tensor]
"""Random changes of a batch of inputs, `(b, m)` to `(b, m)`, with torch's default generator, seeded by the engine."""
EpochCallback = Callable[[Epoch, Callable[[Any], Labels]], None]
"""Called after each epoch with its record and the current predictions of the model."""

DENSE_ROWS = 4096
"""Sparse rows converted to dense ones at once."""


@dataclass(frozen=True)
class FittedClassifier:
    """A selected and fitted classifier.

    Attributes:
        predict: maps inputs `(rows, m)` to integer class labels `(rows,)`.
        parameters: number of values trained, or stored from the training rows.
        kind: name in `KINDS`.
        chosen: option and value of each axis of the grid.
        validation: mean accuracy of the selected candidate on held-out rows; None without a selection.
        candidates: options and accuracy of every candidate, in the order of the grid.
        seconds: CPU seconds of selection and fit.
        fit_seconds: CPU seconds of the last fit.
        rows: number of rows of the last fit.
        details: further JSON values.
        scores: log-probabilities `(rows, classes)` of inputs, for kinds trained in epochs with the cross-entropy.
    """

    predict: Callable[[Any], Labels]
    parameters: int
    kind: str = ""
    chosen: Mapping[str, Any] = field(default_factory=dict)
    validation: float | None = None
    candidates: tuple[tuple[Mapping[str, Any], float], ...] = ()
    seconds: float = 0.0
    fit_seconds: float = 0.0
    rows: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)
    scores: Callable[[Any], npt.NDArray[np.float32]] | None = None


@dataclass(frozen=True)
class ClassifierTask:
    """Rows and options of a fit.

    Attributes:
        x, y: training rows.
        classes: number of classes.
        seed: seed of initial values and the order of rows.
        where: prefix of error messages.
        validation: rows for early stopping.
        augment: random changes of each batch.
        on_epoch: callback after each epoch.
        shape: (channels, height, width) of images.
    """

    x: Any
    y: Labels
    classes: int
    seed: int
    where: str
    validation: LabeledRows | None = None
    augment: Augmentation | None = None
    on_epoch: EpochCallback | None = None
    shape: tuple[int, int, int] | None = None


class ClassifierKind(Spec):
    """A kind of classifier, with its options as fields."""

    in_epochs: ClassVar[bool] = False

    @property
    def passes(self) -> int | None:
        """Return the number of passes over the rows in a fit, None for a kind without a fixed number."""
        return None

    def fit(self, task: ClassifierTask) -> FittedClassifier:
        """Return a classifier fitted to the rows of a task."""
        raise NotImplementedError

    def dry_run(self, inputs: int, classes: int, where: str, *, sparse: bool = False) -> None:
        """Raise a `SpecError` if the kind does not fit the inputs and classes."""


@dataclass(frozen=True)
class LinearSVM(ClassifierKind):
    """`svm_linear`: scikit-learn's linear support vector machine.

    Args:
        C: weight of the losses relative to the L2 penalty.
        solver: `liblinear` (one-vs-rest, squared hinge) or `libsvm` (one-vs-one, hinge).
        max_iter: maximum number of iterations; null for 1,000 with `liblinear` and no limit with `libsvm`.
    """

    C: float = option(1.0, minimum=1e-12, maximum=1e12)
    solver: Literal["liblinear", "libsvm"] = "liblinear"
    max_iter: int | None = option(None, minimum=1, maximum=10**9)

    def fit(self, task: ClassifierTask) -> FittedClassifier:
        from sklearn.svm import SVC, LinearSVC

        with _ignore_convergence():
            if self.solver == "liblinear":
                model = LinearSVC(C=self.C, random_state=task.seed, max_iter=self.max_iter or 1000).fit(task.x, task.y)
            else:
                model = SVC(C=self.C, kernel="linear", cache_size=1000, max_iter=self.max_iter or -1).fit(
                    task.x, task.y
                )
        return FittedClassifier(_predictions(model), int(model.coef_.size + model.intercept_.size))


@dataclass(frozen=True)
class KernelSVM(ClassifierKind):
    """`svm_rbf`: scikit-learn's support vector machine with a Gaussian kernel.

    Args:
        C: weight of the losses relative to the penalty.
        gamma: γ of exp(−γ‖x − x′‖²), or the name of a scikit-learn rule.
    """

    C: float = option(1.0, minimum=1e-12, maximum=1e12)
    gamma: float | Literal["scale", "auto"] = option("scale", minimum=1e-12, maximum=1e12)

    def fit(self, task: ClassifierTask) -> FittedClassifier:
        from sklearn.svm import SVC

        model = SVC(C=self.C, gamma=self.gamma, cache_size=1000).fit(task.x, task.y)
        vectors = int(model.n_support_.sum())
        # Support vectors, dual coefficients and intercepts.
        count = vectors * task.x.shape[1] + int(np.prod(model.dual_coef_.shape)) + model.intercept_.size
        return FittedClassifier(_predictions(model), count, details={"support_vectors": vectors})


@dataclass(frozen=True)
class GaussianNaiveBayes(ClassifierKind):
    """`naive_bayes_gaussian`: scikit-learn's Gaussian naive Bayes.

    Args:
        var_smoothing: share of the largest variance added to all variances.
    """

    var_smoothing: float = option(1e-9, minimum=0.0, maximum=1e12)

    def fit(self, task: ClassifierTask) -> FittedClassifier:
        from sklearn.naive_bayes import GaussianNB

        model = GaussianNB(var_smoothing=self.var_smoothing)
        if isinstance(task.x, np.ndarray):
            model.fit(task.x, task.y)
            return FittedClassifier(_predictions(model), 2 * model.theta_.size + model.class_prior_.size)
        model.var_smoothing = 0.0  # added below: partial_fit would use the largest variance of each part
        for begin in range(0, len(task.y), DENSE_ROWS):
            part = slice(begin, begin + DENSE_ROWS)
            model.partial_fit(task.x[part].toarray(), task.y[part], classes=np.arange(task.classes))
        means, squares = (np.asarray(x.astype(np.float64).mean(0)).ravel() for x in (task.x, task.x.multiply(task.x)))
        model.var_ += self.var_smoothing * (squares - means**2).max()

        def predict(x: Any) -> Labels:
            parts = [model.predict(x[i : i + DENSE_ROWS].toarray()) for i in range(0, x.shape[0], DENSE_ROWS)]
            return np.concatenate(parts).astype(np.int64)

        return FittedClassifier(predict, 2 * model.theta_.size + model.class_prior_.size)


@dataclass(frozen=True)
class MultinomialNaiveBayes(ClassifierKind):
    """`naive_bayes_multinomial`: scikit-learn's multinomial naive Bayes, for inputs of at least 0.

    Args:
        alpha: smoothing constant added to each count.
    """

    alpha: float = option(1.0, minimum=1e-10, maximum=1e12)

    def fit(self, task: ClassifierTask) -> FittedClassifier:
        from sklearn.naive_bayes import MultinomialNB

        model = MultinomialNB(alpha=self.alpha).fit(task.x, task.y)
        return FittedClassifier(_predictions(model), model.feature_log_prob_.size + model.class_log_prior_.size)


@dataclass(frozen=True)
class LogisticRegression(ClassifierKind):
    """`logistic_regression`: scikit-learn's logistic regression.

    Args:
        C: weight of the losses relative to the L2 penalty.
        max_iter: maximum number of iterations.
    """

    C: float = option(1.0, minimum=1e-12, maximum=1e12)
    max_iter: int = option(1000, minimum=1, maximum=10**9)

    def fit(self, task: ClassifierTask) -> FittedClassifier:
        from sklearn import linear_model

        with _ignore_convergence():
            model = linear_model.LogisticRegression(C=self.C, max_iter=self.max_iter).fit(task.x, task.y)
        return FittedClassifier(_predictions(model), int(model.coef_.size + model.intercept_.size))


@contextlib.contextmanager
def _ignore_convergence() -> Iterator[None]:
    """Hide the warning of a solver at the iteration limit; the score shows the effect."""
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


def _predictions(model: Any) -> Callable[[Any], Labels]:
    return lambda x: np.asarray(model.predict(x), dtype=np.int64)
