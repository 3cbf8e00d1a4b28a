"""Support vector machines as one layer: κ is the kernel's feature map, or the kernel against centers; ψ dense with a bias; π zero.

Outputs are decision values. Two classes have one, positive for class 1. More classes have n(n − 1)/2, for the pairs (0, 1),
(0, 2), …, (n − 2, n − 1), positive for the first of the pair; `one_vs_rest` and `vote` make values and decisions for the classes
of them. Regression has one, the prediction.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from kapsi.calibrate import calibrate
from kapsi.errors import SpecError
from kapsi.expansion import Expansion, Identity, KernelMap, Nystrom, PolynomialMap, RandomFourier
from kapsi.features import check_formed
from kapsi.modules import Model
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec
from kapsi.training.config import TrainConfig
from kapsi.training.engine import fit
from kapsi.zoo.kernel_svm.data import ClassWeight, costs, dense_inputs, finite_number, gamma_of, targets_of
from kapsi.zoo.kernel_svm.dual import DualProgress, check_options, classification, regression, solve_dual

__all__ = ["fit_dual", "fit_primal", "from_sklearn", "one_vs_rest", "spec", "support", "vote"]

Kernel: TypeAlias = Literal["linear", "polynomial", "rbf", "sigmoid"]
Map: TypeAlias = Literal["explicit", "centers", "random_fourier", "nystrom"]

MAPS: dict[str, tuple[str, ...]] = {
    "linear": ("explicit", "centers", "nystrom"),
    "polynomial": ("explicit", "centers", "nystrom"),
    "rbf": ("centers", "random_fourier", "nystrom"),
    "sigmoid": ("centers",),
}
"""The maps of each kernel, its default first."""

USED: dict[str, tuple[str, ...]] = {
    "linear": (),
    "polynomial": ("gamma", "degree", "coef0"),
    "rbf": ("gamma",),
    "sigmoid": ("gamma", "coef0"),
}
"""The options of each kernel."""

FIRST_EPOCHS = 200
"""Epochs of L-BFGS for the squared hinge."""

HINGE_EPOCHS = 2_000
"""Steps of AdamW for the plain hinge."""

LEARNING_SHARE = 0.05
"""Learning rate of those, as a share of the largest weight."""

LARGEST_SUPPORT = 2**29
"""Numbers in the support vectors of an estimator that are made dense: 4 GiB."""

COLUMNS_AT_ONCE = 2**22
"""Elements of κ of support vectors that are made at once, 32 MiB in float64."""


def spec(
    kernel: Kernel,
    in_features: int,
    classes: int = 2,
    *,
    features: Map | None = None,
    count: int = 100,
    decision: Literal["pairs", "classes"] = "pairs",
    gamma: float | None = None,
    degree: int = 3,
    coef0: float = 0.0,
) -> ModelSpec:
    """Return the specification of a support vector machine: y = W κ(x) + b.

    - `explicit`: κ is the feature map: x for `linear`, Taylor's monomials with binomial weights for `polynomial` (`PolynomialMap`).
    - `centers`: k(x, c) for each center c (`KernelMap`).
    - `random_fourier`: random Fourier features of `rbf` (`RandomFourier`).
    - `nystrom`: the Nyström map of landmarks (`Nystrom`).

    ψ is dense, with a bias; π is zero.

    Args:
        kernel: `linear` ⟨x, z⟩, `polynomial` (γ⟨x, z⟩ + c₀)^d, `rbf` exp(−γ‖x − z‖²), `sigmoid` tanh(γ⟨x, z⟩ + c₀).
        in_features: m.
        classes: number of classes; 1 for regression.
        features: which κ; None: `explicit` where there is one, else `centers`.
        count: number of centers, landmarks or frequencies.
        decision: outputs for `pairs` of classes, as SVC has, or one for each of the `classes`, as LinearSVC has; two classes
            have one.
        gamma: γ; None is 1/m, and after `kapsi.calibrate` 1/(m · variance of the data).
        degree, coef0: d and c₀.

    Raises:
        SpecError: a kernel without such a map, or options out of range.

    Source: arXiv 2407.04819, "Unifying Kernel SVM".

    Example:
        >>> made = spec("polynomial", 4, 3, degree=2)
        >>> made.widths, made.layers[0].heads[0].expansion
        ((4, 3), PolynomialMap(degree=2, gamma=None, coef0=0.0, symmetric=True))
        >>> spec("rbf", 4, 5, count=20).widths
        (4, 10)
    """
    if not isinstance(kernel, str) or kernel not in MAPS:
        raise SpecError(f"kernel_svm.spec(kernel={kernel!r}): choose from {', '.join(MAPS)}")
    name = MAPS[kernel][0] if features is None else features
    if name not in MAPS[kernel]:
        raise SpecError(
            f"kernel_svm.spec(features={name!r}): the {kernel} kernel has {', '.join(MAPS[kernel])}; choose one of those"
        )
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 1:
        raise SpecError(f"kernel_svm.spec(classes={classes!r}): expected an integer, 1 for regression")
    if decision not in ("pairs", "classes"):
        raise SpecError(f"kernel_svm.spec(decision={decision!r}): choose pairs or classes")
    _unused(kernel, "kernel_svm.spec", gamma=gamma is not None, degree=degree != 3, coef0=coef0 != 0)
    options: dict[str, Any] = {"gamma": gamma} if "gamma" in USED[kernel] else {}
    if kernel in ("polynomial", "sigmoid"):
        options["coef0"] = coef0
    if kernel == "polynomial":
        options["degree"] = degree
    expansion: Expansion
    if name == "explicit":
        expansion = Identity() if kernel == "linear" else PolynomialMap(**options)
    elif name == "random_fourier":
        expansion = RandomFourier(count, **options)
    else:
        kind: type[Expansion] = KernelMap if name == "centers" else Nystrom
        size = {"centers" if name == "centers" else "count": count}
        expansion = kind(**size, kernel=kernel, **options)
    return _spec(expansion, in_features, _outputs(classes, decision))


def _spec(expansion: Expansion, in_features: int, outputs: int) -> ModelSpec:
    return ModelSpec((in_features, outputs), LayerSpec(HeadSpec(expansion, bias=True)))  # type: ignore[arg-type]


def _outputs(classes: int, decision: str = "pairs") -> int:
    if classes <= 2:
        return 1
    return classes * (classes - 1) // 2 if decision == "pairs" else classes


def _unused(kernel: str, where: str, **given: bool) -> None:
    """Refuse options that the kernel does not have, rather than leave them without effect."""
    for name, set_by_user in given.items():
        if set_by_user and name not in USED[kernel]:
            raise SpecError(f"{where}: the {kernel} kernel has no {name}; leave it out")


# ------------------------------------------------------------------------------------------------ outputs


def _classes(values: Tensor, where: str) -> int:
    """Return the number of classes whose pairs have so many outputs."""
    columns = values.shape[-1] if values.dim() else 0
    count = (1 + math.isqrt(1 + 8 * columns)) // 2
    if columns < 1 or count * (count - 1) // 2 != columns:
        raise SpecError(
            f"{where}: expected values of the n(n − 1)/2 pairs of n classes (1, 3, 6, 10, …), got {columns}"
        )
    return count


def _pairs(classes: int) -> list[tuple[int, int]]:
    return list(itertools.combinations(range(classes), 2))


def _counts(first: Tensor, pairs: list[tuple[int, int]], classes: int) -> Tensor:
    """Return the number of pairs that each class has won, `(..., n)`, from whether the first of each won."""
    votes = torch.zeros(*first.shape[:-1], classes, dtype=torch.float64, device=first.device)
    index = torch.tensor(pairs, device=first.device)
    votes.index_add_(-1, index[:, 0], first.double())
    votes.index_add_(-1, index[:, 1], (~first).double())
    return votes


def one_vs_rest(values: Tensor) -> Tensor:
    """Return values of the classes from those of their pairs: votes, and a part of one by the sum of the values.

    For class i: the number of pairs it wins, plus s/(3(abs(s) + 1)), s the sum of its values over its pairs, negative where it
    is the second. As `decision_function_shape="ovr"` of scikit-learn, also where a value is zero: the first of the pair then has
    the vote.

    Args:
        values: outputs of a model for the pairs of n ≥ 3 classes, `(..., n(n − 1)/2)`.

    Returns:
        `(..., n)`, of the type of the values.

    Example:
        >>> one_vs_rest(torch.tensor([[1.0, -1.0, 0.5]]))
        tensor([[1.0000, 0.8889, 1.1111]])
    """
    count = _classes(values, "one_vs_rest")
    if count < 3:
        raise SpecError(
            "one_vs_rest: two classes have one value, and it is that of class 1; expected 3, 6, 10, … values"
        )
    pairs = _pairs(count)
    signs = values.new_zeros(count, len(pairs))
    for column, (i, j) in enumerate(pairs):
        signs[i, column], signs[j, column] = 1.0, -1.0
    sums = values @ signs.T
    return _counts(values >= 0, pairs, count).to(values.dtype) + sums / (3 * (sums.abs() + 1))


def vote(values: Tensor, *, break_ties: bool = False) -> Tensor:
    """Return class numbers from the values of pairs of classes, as libsvm decides: by most votes, the lower number of equals.

    A value of zero is a vote for the second of the pair. Two classes have one value: class 1 where it is at least zero.

    Args:
        values: outputs of a model, `(..., n(n − 1)/2)`.
        break_ties: decide by the largest of `one_vs_rest` instead, as scikit-learn does with its option of that name.

    Example:
        >>> even = torch.tensor([[1.0, -1.0, 0.5]])
        >>> vote(even), vote(even, break_ties=True), vote(torch.tensor([[-0.3], [0.2]]))
        (tensor([0]), tensor([2]), tensor([0, 1]))
    """
    count = _classes(values, "vote")
    if count == 2:
        return (values[..., 0] >= 0).long()
    made = one_vs_rest(values) if break_ties else _counts(values > 0, _pairs(count), count)
    return made.argmax(-1)


def support(model: Model) -> int:
    """Return the number of support vectors: centers whose weights are not all zero.

    Raises:
        SpecError: κ has no centers, as that of a linear model.
    """
    heads = [head for _, head in model.heads()] if isinstance(model, Model) else []
    if len(heads) != 1 or not isinstance(heads[0].spec.expansion, KernelMap):
        given = heads[0].spec.expansion if len(heads) == 1 else type(model).__name__
        raise SpecError(f"support: expected a model of one KernelMap, got {given}; only centers are support vectors")
    return int((heads[0].weights().dense() != 0).any(0).any(0).sum())


# ------------------------------------------------------------------------------------------------ from scikit-learn


def from_sklearn(other: Any, *, explicit: bool = False) -> Model:
    """Return a fitted support vector machine of scikit-learn as a model in float64.

    Its outputs are `decision_function` of a classifier, with `decision_function_shape="ovo"` where there are more than two classes
    (`one_vs_rest` makes those of `ovr` of them, `vote` decides), and `predict` of a regression. Classes are numbers, places in
    `classes_`. Values of LinearSVC are one a class: `kapsi.predict(model, x, "hinge")` decides.

    κ of a linear kernel is x; of the others the kernel at the support vectors, all of which are centers for all outputs.

    Args:
        other: a fitted SVC, NuSVC, SVR, NuSVR, LinearSVC or LinearSVR; also one that was fitted to sparse inputs.
        explicit: for the polynomial kernel: monomials with binomial weights instead of support vectors.

    Raises:
        SpecError: another estimator, one that is not fitted, a kernel that is a function or a matrix, `probability=True`.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> from sklearn.svm import SVC
        >>> x, y = load_iris(return_X_y=True)
        >>> theirs = SVC(decision_function_shape="ovo").fit(x, y)
        >>> ours = from_sklearn(theirs)
        >>> difference = ours(torch.tensor(x)).detach().numpy() - theirs.decision_function(x)
        >>> bool(abs(difference).max() < 1e-9), bool((vote(ours(torch.tensor(x))).numpy() == theirs.predict(x)).all())
        (True, True)
    """
    from sklearn import svm
    from sklearn.exceptions import NotFittedError
    from sklearn.utils.validation import check_is_fitted

    linear, kernels = (svm.LinearSVC, svm.LinearSVR), (svm.SVC, svm.NuSVC, svm.SVR, svm.NuSVR)
    name = type(other).__name__
    if type(other) not in linear + kernels:
        hint = "of a pipeline give the last step, and the model the inputs that the steps before it make"
        if isinstance(other, linear + kernels):
            hint = "a class derived from one of them may compute something else"
        raise SpecError(
            f"kernel_svm.from_sklearn: expected SVC, NuSVC, SVR, NuSVR, LinearSVC or LinearSVR, got {name}; {hint}"
        )
    try:
        check_is_fitted(other)
    except NotFittedError:
        raise SpecError(f"kernel_svm.from_sklearn: the {name} is not fitted; call its fit first") from None
    where = f"kernel_svm.from_sklearn({name})"
    if isinstance(other, linear):
        if explicit:
            raise SpecError(f"{where}: explicit is for the polynomial kernel; a linear model is explicit, leave it out")
        matrix = other.coef_ if isinstance(other.coef_, np.ndarray) else other.coef_.toarray()  # after its `sparsify`
        matrix = np.atleast_2d(matrix)
        return _model(_tensors(Identity(), matrix.shape[1], matrix, other.intercept_))
    if callable(other.kernel) or other.kernel == "precomputed":
        kind = "a function" if callable(other.kernel) else "precomputed"
        raise SpecError(
            f"{where}: the kernel is {kind}, which a model cannot hold; linear, poly, rbf and sigmoid can be carried over"
        )
    if getattr(other, "probability", False) is True:
        raise SpecError(
            f"{where}: probability=True adds a calibration that is not carried over; fit with probability=False, decision values "
            "are the same"
        )
    kernel = "polynomial" if other.kernel == "poly" else str(other.kernel)
    if explicit and kernel != "polynomial":
        raise SpecError(f"{where}: explicit is for the polynomial kernel, this is {kernel}; leave it out")
    vectors, coefficients = other.support_vectors_, other.dual_coef_
    if math.prod(vectors.shape) > LARGEST_SUPPORT:
        raise SpecError(
            f"{where}: {vectors.shape[0]:,} support vectors of {vectors.shape[1]:,} inputs are more than the {LARGEST_SUPPORT:,} "
            "numbers that are made dense; a linear kernel by LinearSVC has none"
        )
    vectors, coefficients = (a if isinstance(a, np.ndarray) else a.toarray() for a in (vectors, coefficients))
    classes = len(getattr(other, "classes_", (0,)))
    if classes > 2:
        coefficients = _of_pairs(coefficients, other.n_support_)
    return _machine(
        kernel,
        np.asarray(vectors, dtype=np.float64),
        np.asarray(coefficients, dtype=np.float64),
        other.intercept_,
        gamma=float(other._gamma),
        degree=int(other.degree),
        coef0=float(other.coef0),
        explicit=explicit or kernel == "linear",
        where=where,
    )


def _of_pairs(coefficients: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Return the coefficients of each pair, `(pairs, vectors)`, from libsvm's table `(classes − 1, vectors)`.

    The vectors of class i have their coefficient against class j in row j − 1 if j > i, and in row j if j < i.
    """
    ends = np.cumsum([0, *counts])
    pairs = _pairs(len(counts))
    made = np.zeros((len(pairs), coefficients.shape[1]))
    for row, (i, j) in enumerate(pairs):
        made[row, ends[i] : ends[i + 1]] = coefficients[j - 1, ends[i] : ends[i + 1]]
        made[row, ends[j] : ends[j + 1]] = coefficients[i, ends[j] : ends[j + 1]]
    return made


def _machine(
    kernel: str,
    vectors: np.ndarray,
    coefficients: np.ndarray,
    bias: np.ndarray,
    *,
    gamma: float,
    degree: int,
    coef0: float,
    explicit: bool,
    where: str,
) -> Model:
    """Return the model of Σ coefficients k(x, vector) + bias."""
    if kernel == "linear" and explicit:
        return _model(_tensors(Identity(), vectors.shape[1], coefficients @ vectors, bias))
    if not (gamma > 0 and math.isfinite(gamma)) and kernel != "linear":
        raise SpecError(f"{where}: gamma is {gamma:g}, it must be above 0 and finite")
    if not len(vectors):  # a regression whose tube holds all rows: a center without weight
        vectors, coefficients = np.zeros((1, vectors.shape[1])), np.zeros((coefficients.shape[0], 1))
    # Beyond the range of the option γ stands in the buffer alone.
    options: dict[str, Any] = {"gamma": gamma if 1e-12 <= gamma <= 1e6 else None} if kernel != "linear" else {}
    if kernel in ("polynomial", "sigmoid"):
        options["coef0"] = coef0
    if kernel == "polynomial":
        options["degree"] = degree
    log_gamma = {} if kernel == "linear" else {"log_gamma": [math.log(gamma)]}
    try:
        if not explicit:
            kappa = KernelMap(kernel=cast(Any, kernel), centers=len(vectors), **options)
            return _model(_tensors(kappa, vectors.shape[1], coefficients, bias, centers=vectors, **log_gamma))
        monomials = PolynomialMap(**options)
        columns = monomials.out_features(vectors.shape[1])
        check_formed(columns, "explicit=True")
        matrix = np.zeros((len(coefficients), columns))
        tensors = {"log_gamma": torch.tensor([math.log(gamma)], dtype=torch.float64)}
        for begin in range(0, len(vectors), step := max(1, COLUMNS_AT_ONCE // columns)):
            some = slice(begin, begin + step)
            matrix += coefficients[:, some] @ monomials(torch.from_numpy(vectors[some]), tensors).dense().numpy()
        return _model(_tensors(monomials, vectors.shape[1], matrix, bias, **log_gamma))
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None


Tensors: TypeAlias = tuple[ModelSpec, np.ndarray, np.ndarray, dict[str, Any]]


def _tensors(kappa: Expansion, in_features: int, matrix: np.ndarray, bias: Any, **tensors: Any) -> Tensors:
    return _spec(kappa, in_features, len(matrix)), matrix, np.broadcast_to(bias, len(matrix)), tensors


def _model(parts: Tensors) -> Model:
    made, matrix, bias, tensors = parts
    model = Model(made, seed=0, dtype=torch.float64)
    head = next(head for _, head in model.heads())
    head.assign("expansion", **tensors)
    head.assign("reconciliation", matrix=torch.as_tensor(matrix, dtype=torch.float64))
    with torch.no_grad():
        cast(Tensor, head.bias).copy_(torch.tensor(bias, dtype=torch.float64))
    return model.eval()


# ------------------------------------------------------------------------------------------------ training


def fit_dual(
    x: Any,
    y: Any,
    *,
    kernel: Kernel = "rbf",
    C: float = 1.0,
    gamma: float | Literal["scale", "auto"] = "scale",
    degree: int = 3,
    coef0: float = 0.0,
    epsilon: float | None = None,
    class_weight: ClassWeight = None,
    sample_weight: Any = None,
    tolerance: float = 1e-3,
    iterations: int | None = None,
    cache: float = 200.0,
    progress: Callable[[DualProgress], None] | None = None,
) -> Model:
    """Return the support vector machine of some data, by its dual: C-classification for class numbers, ε-regression for numbers.

    Classification minimizes ‖w‖²/2 + Σ Cᵢ max(0, 1 − yᵢ f(xᵢ)), pair by pair where there are more than two classes, and regression
    ‖w‖²/2 + Σ Cᵢ max(0, abs(yᵢ − f(xᵢ)) − ε), with f(x) = ⟨w, φ(x)⟩ + b in the space of the kernel: SVC and SVR of scikit-learn.
    Cᵢ is C times the weight of the class and that of the row.

    Outputs are as those of `from_sklearn`; κ is x for `linear`, otherwise the kernel at the support vectors.

    Args:
        x: inputs, `(rows, m)`, finite.
        y: class numbers 0 to n − 1, each of which is there, or numbers of a floating-point type; `(rows,)`.
        kernel: `rbf`, `linear`, `polynomial` or `sigmoid`, which is not positive: a local minimum is found then.
        C: above 0; the larger, the closer to the data.
        gamma: γ: a number above 0, `scale` for 1/(m · variance of x) or `auto` for 1/m.
        degree, coef0: d and c₀.
        epsilon: ε of regression, in units of y, at least 0; None: 0.1.
        class_weight: one for each class, by number or in order; `balanced`: rows/(n · rows of the class).
        sample_weight: of the rows, at least 0.
        tolerance: largest violation of the optimality conditions, in units of outputs.
        iterations: at most so many steps for each pair; None: ten million, or a hundred a variable if that is more.
        cache: MiB of kernel rows that are kept; what else is needed are some arrays of 16 MiB at most.
        progress: called after each working set with a `DualProgress`.

    Raises:
        SpecError: data or options that do not fit.

    Warns:
        UserWarning: the steps were over before the tolerance was reached; the model is what there was.

    Example:
        >>> x = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
        >>> model = fit_dual(x, torch.tensor([0, 0, 1, 1]), C=100.0, gamma=1.0)
        >>> vote(model(x.double())), support(model)
        (tensor([0, 0, 1, 1]), 4)
    """
    where = "fit_dual"
    check_options(kernel, tolerance, iterations, cache, where)
    inputs = dense_inputs(x, where)
    target, classes = targets_of(y, len(inputs), where)
    _unused(kernel, where, gamma=gamma != "scale", degree=degree != 3, coef0=coef0 != 0)
    width = gamma_of(gamma, inputs, where)
    if isinstance(degree, bool) or not isinstance(degree, int) or not 1 <= degree <= 32:
        raise SpecError(f"{where}(degree={degree!r}): expected an integer from 1 to 32")
    finite_number(where, "coef0", coef0, -math.inf)
    if classes and epsilon is not None:
        raise SpecError(
            f"{where}: epsilon is for regression, y are class numbers; leave it out, or give y as floating-point"
        )
    cost = costs(where, C, target, classes, class_weight, sample_weight)
    options: dict[str, Any] = {
        "kernel": kernel,
        "gamma": width,
        "degree": degree,
        "coef0": coef0,
        "tolerance": tolerance,
    }
    options |= {"iterations": iterations, "cache": cache, "progress": progress}
    if not classes:
        tube = 0.1 if epsilon is None else finite_number(where, "epsilon", epsilon, 0.0)
        solved = [solve_dual(regression(target, cost, tube), inputs, **options)]
        table = np.stack([each.coefficients for each in solved])
    elif classes == 2:
        solved = [solve_dual(classification(target == 1, cost), inputs, **options)]
        table = np.stack([each.coefficients for each in solved])
    else:
        pairs = _pairs(classes)
        solved, table = [], np.zeros((len(pairs), len(inputs)))
        for row, (i, j) in enumerate(pairs):
            of_pair = np.flatnonzero((target == i) | (target == j))
            problem = classification(target[of_pair] == i, cost[of_pair])
            solved.append(solve_dual(problem, inputs[torch.from_numpy(of_pair)], **options))
            table[row, of_pair] = solved[-1].coefficients
    vectors = np.flatnonzero(table.any(0))
    return _machine(
        kernel,
        inputs.numpy()[vectors],
        table[:, vectors],
        np.array([each.bias for each in solved]),
        gamma=width,
        degree=degree,
        coef0=coef0,
        explicit=kernel == "linear",
        where=where,
    )


def fit_primal(
    x: Any,
    y: Any,
    model: ModelSpec,
    *,
    C: float = 1.0,
    loss: Literal["hinge", "squared_hinge"] = "squared_hinge",
    class_weight: ClassWeight = None,
    sample_weight: Any = None,
    epochs: int | None = None,
    seed: int = 0,
) -> Model:
    """Return a support vector classifier with an explicit feature map, by its primal: ‖W‖²/2 + Σ Cᵢ loss(yᵢ, f(xᵢ)).

    That is `kapsi.fit` with the penalty 1/ΣCᵢ on W and none on the bias, after `kapsi.calibrate`: L-BFGS for the squared hinge, and
    AdamW on all rows from there for the plain one, whose kinks stop a line search. Two classes have one output and the loss of its
    margin; more have one a class, and the loss of the margin to the largest other (Crammer and Singer). With the plain hinge and a
    large C the last digits take many epochs; `fit_dual` has them.

    Args:
        x: inputs, `(rows, m)`, finite.
        y: class numbers 0 to n − 1, each of which is there.
        model: of `spec(kernel, m, n, decision="classes")`; ‖W‖ is the norm in the kernel's space where inner products of κ are the
            kernel: all maps but `centers`.
        C, class_weight, sample_weight: as in `fit_dual`.
        loss: `hinge` or its square.
        epochs: at most so many; None: 200 of five steps each for the squared hinge, 2,000 of one step for the plain one.
        seed: of initial values, and of the frequencies of `RandomFourier`.

    Raises:
        SpecError: data or options that do not fit.

    Example:
        >>> from sklearn.datasets import load_breast_cancer
        >>> x, y = load_breast_cancer(return_X_y=True)
        >>> x = (x - x.mean(0)) / x.std(0)
        >>> model = fit_primal(x, y, spec("rbf", 30, features="nystrom", count=60), C=1.0)
        >>> bool(((model(torch.tensor(x))[:, 0] > 0).numpy() == y).mean() > 0.97)
        True
    """
    where = "fit_primal"
    if loss not in ("hinge", "squared_hinge"):
        raise SpecError(f"{where}(loss={loss!r}): choose hinge or squared_hinge")
    if not isinstance(model, ModelSpec):
        raise SpecError(f"{where}: expected a ModelSpec, as of kernel_svm.spec, got {type(model).__name__}")
    inputs = dense_inputs(x, where)
    target, classes = targets_of(y, len(inputs), where)
    if not classes:
        raise SpecError(f"{where}: expected class numbers of an integer type, got numbers; fit_dual has regression")
    wanted = (inputs.shape[1], _outputs(classes, "classes"))
    if model.widths != wanted:
        raise SpecError(
            f"{where}: the data need widths {wanted}, the model has {model.widths}; use spec(…, decision='classes')"
        )
    cost = costs(where, C, target, classes, class_weight, sample_weight)
    made = calibrate(Model(model, seed=seed, dtype=torch.float64), inputs)
    with torch.no_grad():  # where it begins is of no matter but for time
        for name, parameter in made.named_parameters():
            if name.endswith(("psi.matrix", "bias")):
                parameter.zero_()
    data = (inputs, torch.from_numpy(target).long(), torch.from_numpy(cost))
    plain = loss == "hinge"
    config = TrainConfig(loss="squared_hinge", solver="lbfgs", penalty=1 / float(cost.sum()), tolerance=0.0, seed=seed)
    fit(made, data, config, epochs=FIRST_EPOCHS if plain or epochs is None else epochs)
    if plain:
        # As large as the weights: a step of AdamW is about one learning rate.
        rate = LEARNING_SHARE * max(float(p.detach().abs().max()) for p in made.parameters())
        rate = min(max(rate, 1e-6), 1e3)
        config = replace(config, loss="hinge", solver="adamw", batch_size=None, learning_rate=rate)
        fit(made, data, config, epochs=HINGE_EPOCHS if epochs is None else epochs)
    return made
