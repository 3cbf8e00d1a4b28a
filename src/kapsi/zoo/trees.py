"""Decision trees, forests and boosting: κ(x) indicates the leaf of x in each tree, ψ has the values of the leaves.

Outputs of trees and forests are predictions, for classifiers probabilities; outputs of boosting are raw scores, as in
`decision_function`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.expansion import TreeLeaves
from kapsi.function import lookup
from kapsi.modules import Model
from kapsi.remainder import ConstantRemainder, ZeroRemainder
from kapsi.spec import HeadSpec, ModelSpec
from kapsi.zoo.base import Case, Comparison, check_estimator, deviation, one_head, sklearn_rows

FORESTS = ("RandomForestClassifier", "RandomForestRegressor", "ExtraTreesClassifier", "ExtraTreesRegressor")
SINGLE = ("DecisionTreeClassifier", "DecisionTreeRegressor", "ExtraTreeClassifier", "ExtraTreeRegressor")
BOOSTED = ("GradientBoostingClassifier", "GradientBoostingRegressor")
HISTOGRAMS = ("HistGradientBoostingClassifier", "HistGradientBoostingRegressor")


def spec(
    inputs: int,
    outputs: int,
    leaves: int,
    trees: int = 1,
    depth: int = 30,
    *,
    single: bool = True,
    missing: bool = False,
    constant: bool = False,
) -> ModelSpec:
    """Return the specification of a sum of decision trees: f(x) = Σ over trees of the value of the leaf of x, + c.

        κ(x)_l = 1 if x is in leaf l, else 0;    ψ = the values of the leaves, dense `(outputs, leaves)`;    π = 0 or c.

    Args:
        inputs: number of inputs m, at least 1.
        outputs: number of outputs n, at least 1.
        leaves: total number of leaves, at least `trees`.
        trees: number of trees.
        depth: maximum number of splits on a path.
        single: round inputs to float32 before comparisons, as scikit-learn's trees except histogram-based boosting.
        missing: treat NaN as missing, with a direction at each split.
        constant: add a constant c, the initial score of boosting.

    Raises:
        SpecError: inconsistent sizes.

    Source: arXiv 2407.04819 for κ, ψ and π; see `kapsi.TreeLeaves` for trees.

    Example:
        >>> import kapsi as kp
        >>> kp.Model(spec(4, 3, leaves=8, depth=3), seed=0).layers[0].heads[0].psi["matrix"].shape
        torch.Size([3, 8])
    """
    expansion = TreeLeaves(leaves, trees, depth, single=single, missing=missing)
    return one_head(
        HeadSpec(expansion, remainder=ConstantRemainder(0.0) if constant else ZeroRemainder()), inputs, outputs
    )


class JoinedTrees(NamedTuple):
    """Nodes of trees, one tree after the other.

    Attributes:
        roots: first node of each tree.
        feature, threshold: input and threshold of a split.
        left, right: children of a split.
        leaf: whether the node is a leaf.
        missing_left: direction of missing values.
        values: value of the node, `(nodes, outputs)`.
    """

    roots: NDArray[Any]
    feature: NDArray[Any]
    threshold: NDArray[Any]
    left: NDArray[Any]
    right: NDArray[Any]
    leaf: NDArray[Any]
    missing_left: NDArray[Any]
    values: NDArray[Any]


def from_sklearn(estimator: Any) -> Model:
    """Return fitted scikit-learn trees as a model in float64.

    | estimator | outputs of the model |
    |---|---|
    | `DecisionTreeClassifier`, `ExtraTreeClassifier`, `RandomForestClassifier`, `ExtraTreesClassifier` | `predict_proba` |
    | `DecisionTreeRegressor`, `ExtraTreeRegressor`, `RandomForestRegressor`, `ExtraTreesRegressor` | `predict`, one or several |
    | `GradientBoostingClassifier`, `HistGradientBoostingClassifier` | `decision_function`: one score for two classes, else each |
    | `GradientBoostingRegressor`, `HistGradientBoostingRegressor` | `predict` |

    Probabilities of boosted classifiers are `kapsi.predict_proba(model, x, "bernoulli")` for two classes, with `"cross_entropy"`
    for more; with `loss="exponential"` the probability of class 1 is σ(2 · output). NaN takes the direction of the estimator; for
    estimators without support of missing values the output is NaN.

    Args:
        estimator: the fitted estimator.

    Raises:
        SpecError: an unsupported or unfitted estimator, multi-output classification, categorical inputs, boosting with an
            initial model, or with predictions other than the scores (`poisson` and `gamma`).

    Example:
        >>> import torch
        >>> from sklearn.datasets import load_iris
        >>> from sklearn.tree import DecisionTreeClassifier
        >>> x, y = load_iris(return_X_y=True)
        >>> theirs = DecisionTreeClassifier(max_depth=3, random_state=0).fit(x, y)
        >>> torch.equal(from_sklearn(theirs)(torch.tensor(x)), torch.tensor(theirs.predict_proba(x)))
        True
    """
    from sklearn import ensemble, tree

    names = (*SINGLE, *FORESTS, *BOOSTED, *HISTOGRAMS)
    kinds = [getattr(tree if name in SINGLE else ensemble, name) for name in names]
    where, name = check_estimator(estimator, kinds, "from_sklearn"), type(estimator).__name__
    if name in BOOSTED:
        return _boosted(estimator, where)
    if name in HISTOGRAMS:
        return _histogram(estimator, where)
    classes = name.endswith("Classifier")
    if classes and estimator.n_outputs_ > 1:
        raise SpecError(
            f"{where}: {estimator.n_outputs_} outputs of classes are not supported; fit an estimator per output"
        )
    trees = [estimator] if name in SINGLE else estimator.estimators_
    values = [_predictions(tree.tree_, classes) for tree in trees]
    joined = joined_trees([tree.tree_ for tree in trees], np.concatenate(values) / len(trees))
    return model_of_trees(joined, int(estimator.n_features_in_), None, missing=_allows_missing(trees[0]))


def _allows_missing(estimator: Any) -> bool:
    """Return whether a scikit-learn tree supports missing values."""
    from sklearn.utils import get_tags

    allowed = bool(get_tags(estimator).input_tags.allow_nan) and getattr(estimator, "monotonic_cst", None) is None
    return allowed and hasattr(estimator.tree_, "missing_go_to_left")


def _predictions(tree: Any, classes: bool) -> NDArray[Any]:
    """Return the prediction of each node, `(nodes, outputs)`."""
    values = np.asarray(tree.value, dtype=np.float64)
    if not classes:
        return values[:, :, 0]
    values = values[:, 0, :]
    return values / values.sum(1, keepdims=True)  # older versions have counts instead of shares


def joined_trees(trees: Sequence[Any], values: NDArray[Any]) -> JoinedTrees:
    """Return scikit-learn's exact trees, with values of the nodes."""
    sizes = [tree.node_count for tree in trees]
    roots, first = _offsets(sizes)
    left, right = (
        np.concatenate([getattr(tree, name) for tree in trees]) for name in ("children_left", "children_right")
    )
    feature, threshold = (np.concatenate([getattr(tree, name) for tree in trees]) for name in ("feature", "threshold"))
    leaf = left == -1
    missing = [getattr(tree, "missing_go_to_left", np.zeros(size)) for tree, size in zip(trees, sizes, strict=True)]
    return JoinedTrees(roots, feature, threshold, left + first, right + first, leaf, np.concatenate(missing), values)


def _offsets(sizes: Sequence[int]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the first node of each tree, and for each node that of its tree."""
    roots = np.cumsum([0, *sizes[:-1]])
    return roots, np.repeat(roots, sizes)


def _boosted(estimator: Any, where: str) -> Model:
    from sklearn.dummy import DummyClassifier, DummyRegressor

    init = estimator.init_
    if type(init) not in (DummyClassifier, DummyRegressor) and not (isinstance(init, str) and init == "zero"):
        raise SpecError(
            f"{where}: init={type(init).__name__}: an initial model is not supported; init=None and init='zero' are"
        )
    if isinstance(init, DummyClassifier | DummyRegressor) and init.strategy in ("stratified", "uniform"):
        raise SpecError(f"{where}: init has strategy={init.strategy!r}; expected a constant")
    inputs = int(estimator.n_features_in_)
    start = np.asarray(estimator._raw_predict_init(np.zeros((1, inputs), dtype=np.float32)), dtype=np.float64)[0]
    trees = [tree.tree_ for stage in estimator.estimators_ for tree in stage]
    values = np.concatenate([tree.value[:, 0, 0] for tree in trees]) * estimator.learning_rate
    sizes = [tree.node_count for tree in trees]
    return model_of_trees(joined_trees(trees, _in_columns(values, sizes, len(start))), inputs, start)


def _histogram(estimator: Any, where: str) -> Model:
    if estimator.is_categorical_ is not None and bool(np.any(estimator.is_categorical_)):
        first = np.flatnonzero(estimator.is_categorical_)[:5].tolist()
        raise SpecError(f"{where}: inputs {first} are categorical, which is not supported; encode them as numbers")
    link = type(estimator._loss.link).__name__
    if where.endswith("Regressor)") and link != "IdentityLink":
        raise SpecError(
            f"{where}: loss={estimator.loss!r} predicts exp of the scores, which is not supported; squared_error, absolute_error "
            "and quantile are"
        )
    start = np.asarray(estimator._baseline_prediction, dtype=np.float64).reshape(-1)
    joined = histogram_trees([estimator._predictors], len(start))
    return model_of_trees(joined, int(estimator.n_features_in_), start, single=False, missing=True)


def histogram_trees(boosters: Sequence[Sequence[Sequence[Any]]], outputs: int) -> JoinedTrees:
    """Return the trees of boosters: for each booster and iteration the predictors of the outputs."""
    nodes = [predictor.nodes for stages in boosters for stage in stages for predictor in stage]
    sizes = [len(part) for part in nodes]
    roots, first = _offsets(sizes)
    names = ("feature_idx", "num_threshold", "left", "right", "is_leaf", "missing_go_to_left", "value")
    feature, threshold, left, right, leaf, missing, value = (
        np.concatenate([part[name] for part in nodes]) for name in names
    )
    left, right = left.astype(np.int64) + first, right.astype(np.int64) + first
    return JoinedTrees(
        roots, feature, threshold, left, right, leaf.astype(bool), missing, _in_columns(value, sizes, outputs)
    )


def _in_columns(values: NDArray[Any], sizes: Sequence[int], outputs: int) -> NDArray[Any]:
    """Return values of nodes in zeros, `(nodes, outputs)`; trees belong to the outputs in turn."""
    result = np.zeros((len(values), outputs))
    result[np.arange(len(values)), np.repeat(np.arange(len(sizes)) % outputs, sizes)] = values
    return result


def model_of_trees(
    nodes: JoinedTrees, inputs: int, start: NDArray[Any] | None, *, single: bool = True, missing: bool = False
) -> Model:
    """Return the model of a sum of trees: values of leaves, plus a constant if `start` is not None."""
    inner = ~nodes.leaf
    leaves, trees = int(nodes.leaf.sum()), len(nodes.roots)
    number = np.where(nodes.leaf, leaves - trees - 1 + nodes.leaf.cumsum(), inner.cumsum() - 1)
    depth, level = 0, nodes.roots[inner[nodes.roots]]
    while len(level):
        below = np.concatenate((nodes.left[level], nodes.right[level]))
        depth, level = depth + 1, below[inner[below]]
    arrays = {
        "roots": number[nodes.roots],
        "feature": nodes.feature[inner].astype(np.int64),
        "threshold": nodes.threshold[inner],
        "branches": np.stack((number[nodes.left[inner]], number[nodes.right[inner]])),
        "missing_left": nodes.missing_left[inner].astype(bool),
    }
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    # A split of missing values from all others has an infinite threshold.
    most = torch.finfo(torch.float32 if single else torch.float64).max
    tensors["threshold"] = tensors["threshold"].double().clamp(-most, most)
    if single:
        tensors["threshold"] = _round_down(tensors["threshold"])
    if not missing:
        del tensors["missing_left"]
    matrix = torch.from_numpy(nodes.values[nodes.leaf].T)
    constant = start is not None
    architecture = spec(inputs, len(matrix), leaves, trees, depth, single=single, missing=missing, constant=constant)
    # Without initial values: drawing those of many balanced trees would take longer than the import.
    model = Model(architecture, dtype=torch.float64, device="meta").to_empty(device="cpu")
    ((_, head),) = model.heads()
    head.assign("expansion", inputs=torch.tensor([inputs]), **tensors)
    head.assign("reconciliation", matrix=matrix)
    if start is not None:
        head.assign("remainder", value=torch.tensor(start))
    return model.eval()


def _round_down(threshold: Tensor) -> Tensor:
    """Round down to float32: x ≤ θ is equivalent for float32 x, in models of both dtypes."""
    near = threshold.float()
    below = torch.nextafter(near, torch.full_like(near, -torch.inf))
    return torch.where(near.double() > threshold, below, near).double()


# ------------------------------------------------------------------------------------------------ parity


def _fitted(
    seed: int, *, name: str, data: str, output: str, loss: str, missing: bool = False, **options: Any
) -> Comparison:
    """Compare a scikit-learn estimator, fitted to a data set, with the imported model."""
    from sklearn import ensemble, tree

    x, y = sklearn_rows(data, seed, 500)
    if missing:
        x[np.random.default_rng(seed).uniform(size=x.shape) < 0.1] = np.nan
    estimator = getattr(tree if name in SINGLE else ensemble, name)(random_state=seed, **options).fit(x, y)
    model = from_sklearn(estimator)
    difference = deviation(model(torch.tensor(x)), getattr(estimator, output)(x))
    if output == "predict_proba":
        y = np.eye(len(estimator.classes_))[y]
    ((_, head),) = model.heads()
    kappa: Any = head.spec.expansion
    splits = kappa.leaves - kappa.trees
    # Per split: input, threshold, two children, and the direction of missing values.
    theirs = splits * (4 + kappa.missing) + sum(
        tensor.numel() for tensor in (*head.psi.buffers(), *head.psi.parameters())
    )
    theirs += 0 if "value" not in head.pi.names() else head.pi["value"].numel()
    ours = sum(tensor.numel() for tensor in head.state_dict().values())
    clean = ~np.isnan(x).any(1)
    targets = torch.tensor(y.astype(float) if cast(Any, lookup("loss", loss)).discrete else y)
    return Comparison(difference, ours, theirs, model, torch.tensor(x[clean]), targets[clean], loss)


def _case(model: str, name: str, output: str, data: str, source: str, loss: str = "mse", **options: Any) -> Case:
    compare = partial(_fitted, name=name, data=source, output=output, loss=loss, **options)
    return Case(f"trees, {model or name}", output, data, "scikit-learn", 1e-9, compare)


PARITY: tuple[Case, ...] = (
    _case("", "DecisionTreeClassifier", "predict_proba", "iris, a tenth missing", "iris", missing=True, max_depth=5),
    _case("", "RandomForestClassifier", "predict_proba", "digits, 500 rows", "digits", n_estimators=30),
    _case("", "ExtraTreesRegressor", "predict", "diabetes", "diabetes", n_estimators=20, max_depth=8),
    _case(
        "GradientBoostingClassifier, two classes", "GradientBoostingClassifier", "decision_function",
        "breast cancer, 500 rows", "breast_cancer", "bernoulli", n_estimators=30,
    ),
    _case(
        "GradientBoostingClassifier, three classes", "GradientBoostingClassifier", "decision_function",
        "wine", "wine", "cross_entropy", n_estimators=10,
    ),
    _case("", "GradientBoostingRegressor", "predict", "diabetes", "diabetes", n_estimators=30),
    _case(
        "", "HistGradientBoostingClassifier", "decision_function",
        "wine, a tenth missing", "wine", "cross_entropy", missing=True, max_iter=20,
    ),
)  # fmt: skip
