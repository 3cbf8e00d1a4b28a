"""Decision trees and their sums: κ(x) is 1 for the leaf of each tree that x ends in, ψ has the values of the leaves.

Outputs of single trees and of forests are what scikit-learn predicts, of classes their probabilities; those of boosting are raw
scores, as of `decision_function`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.expansion import TreeLeaves
from kapsi.modules import Model
from kapsi.remainder import ConstantRemainder, ZeroRemainder
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec
from kapsi.zoo.base import Case, Comparison

__all__ = ["PARITY", "from_sklearn", "spec"]

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
    """Return the specification of a sum of decision trees: f(x) = Σ over trees of the value of the leaf that x ends in, + c.

        κ(x)_l = 1 if x ends in leaf l, else 0;    ψ = the values of the leaves, dense `(outputs, leaves)`;    π = 0 or c.

    Args:
        inputs: m, at least 1.
        outputs: n, at least 1.
        leaves: of all trees together, at least as many as trees.
        trees: number of trees.
        depth: largest number of splits on a path.
        single: whether inputs are rounded to float32 before they are compared, as scikit-learn's trees do (but not its
            histogram-based boosting).
        missing: whether a value that is not a number is missing and goes a stated way.
        constant: whether there is a constant c, as the start of boosting.

    Raises:
        SpecError: numbers that do not go together.

    Source: arXiv 2407.04819 has κ, ψ and π; `kapsi.TreeLeaves` says where trees are from.

    Example:
        >>> import kapsi as kp
        >>> kp.Model(spec(4, 3, leaves=8, depth=3), seed=0).layers[0].heads[0].psi["matrix"].shape
        torch.Size([3, 8])
    """
    expansion = TreeLeaves(leaves, trees, depth, single=single, missing=missing)
    head: Any = HeadSpec(expansion, remainder=ConstantRemainder(0.0) if constant else ZeroRemainder())
    return ModelSpec((inputs, outputs), LayerSpec(head))  # type: ignore[arg-type]  # one layer stands for a tuple


class _Tree(NamedTuple):
    """The nodes of a tree, parents before children: input, threshold, children, whether a leaf, way of missing values, values."""

    feature: NDArray[Any]
    threshold: NDArray[Any]
    left: NDArray[Any]
    right: NDArray[Any]
    leaf: NDArray[Any]
    missing_left: NDArray[Any]
    values: NDArray[Any]


def from_sklearn(estimator: Any) -> Model:
    """Return fitted trees of scikit-learn as a model in float64.

    | estimator | outputs of the model |
    |---|---|
    | `DecisionTreeClassifier`, `ExtraTreeClassifier`, `RandomForestClassifier`, `ExtraTreesClassifier` | `predict_proba` |
    | `DecisionTreeRegressor`, `ExtraTreeRegressor`, `RandomForestRegressor`, `ExtraTreesRegressor` | `predict`, one or several |
    | `GradientBoostingClassifier`, `HistGradientBoostingClassifier` | `decision_function`: one score for two classes, else each |
    | `GradientBoostingRegressor`, `HistGradientBoostingRegressor` | `predict` |

    Of boosting of classes `kapsi.predict_proba(model, x, "bernoulli")` (two) and `"cross_entropy"` (more) are probabilities; with
    `loss="exponential"` that of class 1 is σ of twice the output instead.
    Values that are not a number go the way that they go there, and where an estimator refuses them they make the row not a number.

    Args:
        estimator: the fitted estimator.

    Raises:
        SpecError: another estimator, one that is not fitted, several outputs of classes, categories as inputs, a boosting that
            begins with another model, or whose predictions are not its scores (`poisson` and `gamma`).

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
    from sklearn.exceptions import NotFittedError
    from sklearn.utils.validation import check_is_fitted

    kind, names = type(estimator), (*SINGLE, *FORESTS, *BOOSTED, *HISTOGRAMS)
    known = {getattr(tree if name in SINGLE else ensemble, name): name for name in names}
    if kind not in known:
        hint = "; a class derived from one of them may compute something else" if issubclass(kind, tuple(known)) else ""
        raise SpecError(f"from_sklearn: expected {', '.join(names)}; got {kind.__name__}{hint}")
    name = known[kind]
    where = f"from_sklearn({name})"
    try:
        check_is_fitted(estimator)
    except NotFittedError:
        raise SpecError(f"{where}: it is not fitted; call fit(x, y) first") from None
    if name in BOOSTED:
        return _boosted(estimator, where)
    if name in HISTOGRAMS:
        return _histogram(estimator, where)
    classes = name.endswith("Classifier")
    if classes and estimator.n_outputs_ > 1:
        raise SpecError(
            f"{where}: has {estimator.n_outputs_} outputs of classes; one can be carried over, fit one for each"
        )
    each = [estimator] if name in SINGLE else estimator.estimators_
    parts = [_of(one.tree_, classes) for one in each]
    parts = [part._replace(values=part.values / len(each)) for part in parts]
    return _assembled(parts, int(estimator.n_features_in_), None, missing=_takes_missing(each[0]))


def _takes_missing(estimator: Any) -> bool:
    """Return whether a tree of scikit-learn takes values that are not numbers."""
    from sklearn.utils import get_tags

    takes = bool(get_tags(estimator).input_tags.allow_nan) and getattr(estimator, "monotonic_cst", None) is None
    return takes and hasattr(estimator.tree_, "missing_go_to_left")


def _of(tree: Any, classes: bool) -> _Tree:
    values = np.asarray(tree.value, dtype=np.float64)
    if classes:
        values = values[:, 0, :]
        values = values / values.sum(1, keepdims=True)  # shares, which older versions had as counts
    else:
        values = values[:, :, 0]
    leaf = tree.children_left == -1
    missing = getattr(tree, "missing_go_to_left", np.zeros(len(leaf)))
    return _Tree(tree.feature, tree.threshold, tree.children_left, tree.children_right, leaf, missing, values)


def _boosted(estimator: Any, where: str) -> Model:
    from sklearn.dummy import DummyClassifier, DummyRegressor

    init = estimator.init_
    if type(init) not in (DummyClassifier, DummyRegressor) and not (isinstance(init, str) and init == "zero"):
        raise SpecError(
            f"{where}: init={type(init).__name__}: the trees stand on another model, which is not carried over; init=None and "
            "init='zero' are constants"
        )
    if isinstance(init, DummyClassifier | DummyRegressor) and init.strategy in ("stratified", "uniform"):
        raise SpecError(f"{where}: init has strategy={init.strategy!r}, which is no constant")
    inputs = int(estimator.n_features_in_)
    start = np.asarray(estimator._raw_predict_init(np.zeros((1, inputs), dtype=np.float32)), dtype=np.float64)[0]
    parts = []
    for stage in estimator.estimators_:
        for k, one in enumerate(stage):
            part = _of(one.tree_, False)
            parts.append(part._replace(values=_placed(part.values[:, 0] * estimator.learning_rate, k, len(start))))
    return _assembled(parts, inputs, start)


def _histogram(estimator: Any, where: str) -> Model:
    if estimator.is_categorical_ is not None and bool(np.any(estimator.is_categorical_)):
        some = np.flatnonzero(estimator.is_categorical_)[:5].tolist()
        raise SpecError(f"{where}: inputs {some} are categories, which are not carried over; encode them as numbers")
    link = type(estimator._loss.link).__name__
    if where.endswith("Regressor)") and link != "IdentityLink":
        raise SpecError(
            f"{where}: loss={estimator.loss!r} predicts exp of its scores, of which there is no counterpart; squared_error, "
            "absolute_error and quantile can be carried over"
        )
    start = np.asarray(estimator._baseline_prediction, dtype=np.float64).reshape(-1)
    parts = []
    for stage in estimator._predictors:
        for k, one in enumerate(stage):
            nodes = one.nodes
            values = _placed(nodes["value"], k, len(start))
            parts.append(
                _Tree(
                    nodes["feature_idx"],
                    nodes["num_threshold"],
                    nodes["left"].astype(np.int64),
                    nodes["right"].astype(np.int64),
                    nodes["is_leaf"].astype(bool),
                    nodes["missing_go_to_left"],
                    values,
                )
            )
    return _assembled(parts, int(estimator.n_features_in_), start, single=False, missing=True)


def _placed(values: NDArray[Any], place: int, count: int) -> NDArray[Any]:
    """Return values `(nodes,)` as those of one of several outputs, `(nodes, count)`."""
    made = np.zeros((len(values), count))
    made[:, place] = values
    return made


def _assembled(
    parts: list[_Tree], inputs: int, start: NDArray[Any] | None, *, single: bool = True, missing: bool = False
) -> Model:
    """Return the model of some trees, whose values add up."""
    leaves, trees = sum(int(part.leaf.sum()) for part in parts), len(parts)
    splits = leaves - trees
    begin, column, depth = 0, splits, 0
    collected: dict[str, list[NDArray[Any]]] = {
        name: [] for name in ("roots", "feature", "threshold", "branches", "missing_left")
    }
    values = []
    for part in parts:
        inner = ~part.leaf
        number = np.where(part.leaf, column - 1 + part.leaf.cumsum(), begin - 1 + inner.cumsum())
        level = np.zeros(len(number), dtype=np.int64)
        for node in np.flatnonzero(inner):
            level[part.left[node]] = level[part.right[node]] = level[node] + 1
        depth = max(depth, int(level.max()))
        collected["roots"].append(number[:1])
        collected["feature"].append(part.feature[inner])
        collected["threshold"].append(part.threshold[inner])
        collected["branches"].append(np.stack((number[part.left[inner]], number[part.right[inner]])))
        collected["missing_left"].append(part.missing_left[inner].astype(bool))
        values.append(part.values[part.leaf])
        begin, column = begin + int(inner.sum()), column + int(part.leaf.sum())
    tensors = {name: torch.tensor(np.concatenate(each, -1)) for name, each in collected.items()}
    # A split that only parts missing values from others has a threshold of infinity.
    most = torch.finfo(torch.float32 if single else torch.float64).max
    tensors["threshold"] = tensors["threshold"].double().clamp(-most, most)
    if single:
        tensors["threshold"] = _down_to_single(tensors["threshold"])
    if not missing:
        del tensors["missing_left"]
    matrix = torch.tensor(np.concatenate(values).T)
    made = spec(inputs, len(matrix), leaves, trees, depth, single=single, missing=missing, constant=start is not None)
    # Made without values: those of so many balanced trees would take longer than the import.
    model = Model(made, dtype=torch.float64, device="meta").to_empty(device="cpu")
    head = next(head for _, head in model.heads())
    head.assign("expansion", inputs=torch.tensor([inputs]), **tensors)
    head.assign("reconciliation", matrix=matrix)
    if start is not None:
        head.assign("remainder", value=torch.tensor(start))
    return model.eval()


def _down_to_single(threshold: Tensor) -> Tensor:
    """Return the largest numbers of float32 that are not above: x ≤ θ is the same for x of float32, in models of both types."""
    near = threshold.float()
    below = torch.nextafter(near, torch.full_like(near, -torch.inf))
    return torch.where(near.double() > threshold, below, near).double()


# ------------------------------------------------------------------------------------------------ comparisons


def _rows(name: str, seed: int, missing: bool = False) -> tuple[Any, Any]:
    from sklearn import datasets

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(x))[:500]
    x, y = x[order], y[order]
    if missing:
        x[generator.uniform(size=x.shape) < 0.1] = np.nan
    return x, y


def _compared(estimator: Any, x: Any, y: Any, wanted: Any, loss: str, targets: Any = None) -> Comparison:
    model = from_sklearn(estimator)
    with torch.no_grad():
        found = model(torch.tensor(x))
    expected = torch.tensor(np.asarray(wanted, dtype=np.float64)).reshape(found.shape)
    deviation = float(((found - expected).abs() / expected.abs().clamp_min(1)).max())
    (head,) = (head for _, head in model.heads())
    kappa: Any = head.spec.expansion
    splits = kappa.leaves - kappa.trees
    # Of a split: input, threshold, two children, and the way of missing values.
    theirs = splits * (4 + kappa.missing) + sum(
        tensor.numel() for tensor in (*head.psi.buffers(), *head.psi.parameters())
    )
    theirs += 0 if "value" not in head.pi.names() else head.pi["value"].numel()
    ours = sum(tensor.numel() for tensor in head.state_dict().values())
    clean = ~np.isnan(x).any(1)
    made = torch.tensor(y if targets is None else targets)
    return Comparison(deviation, ours, theirs, model, torch.tensor(x[clean]), made[clean], loss)


def _tree(seed: int) -> Comparison:
    from sklearn.tree import DecisionTreeClassifier

    x, y = _rows("iris", seed, missing=True)
    estimator = DecisionTreeClassifier(max_depth=5, random_state=seed).fit(x, y)
    return _compared(estimator, x, y, estimator.predict_proba(x), "mse", np.eye(3)[y])


def _forest(seed: int) -> Comparison:
    from sklearn.ensemble import RandomForestClassifier

    x, y = _rows("digits", seed)
    estimator = RandomForestClassifier(30, random_state=seed).fit(x, y)
    return _compared(estimator, x, y, estimator.predict_proba(x), "mse", np.eye(10)[y])


def _extra(seed: int) -> Comparison:
    from sklearn.ensemble import ExtraTreesRegressor

    x, y = _rows("diabetes", seed)
    estimator = ExtraTreesRegressor(20, max_depth=8, random_state=seed).fit(x, y)
    return _compared(estimator, x, y, estimator.predict(x), "mse")


def _boosting(seed: int) -> Comparison:
    from sklearn.ensemble import GradientBoostingClassifier

    x, y = _rows("breast_cancer", seed)
    estimator = GradientBoostingClassifier(n_estimators=30, random_state=seed).fit(x, y)
    return _compared(estimator, x, y.astype(float), estimator.decision_function(x), "bernoulli")


def _boosting_of_three(seed: int) -> Comparison:
    from sklearn.ensemble import GradientBoostingClassifier

    x, y = _rows("wine", seed)
    estimator = GradientBoostingClassifier(n_estimators=10, random_state=seed).fit(x, y)
    return _compared(estimator, x, y, estimator.decision_function(x), "cross_entropy")


def _boosting_of_numbers(seed: int) -> Comparison:
    from sklearn.ensemble import GradientBoostingRegressor

    x, y = _rows("diabetes", seed)
    estimator = GradientBoostingRegressor(n_estimators=30, random_state=seed).fit(x, y)
    return _compared(estimator, x, y, estimator.predict(x), "mse")


def _histograms(seed: int) -> Comparison:
    from sklearn.ensemble import HistGradientBoostingClassifier

    x, y = _rows("wine", seed, missing=True)
    estimator = HistGradientBoostingClassifier(max_iter=20, random_state=seed).fit(x, y)
    return _compared(estimator, x, y, estimator.decision_function(x), "cross_entropy")


def _case(model: str, quantity: str, data: str, compare: Any) -> Case:
    return Case(f"trees, {model}", quantity, data, "scikit-learn", 1e-9, compare)


PARITY: tuple[Case, ...] = (
    _case("DecisionTreeClassifier", "predict_proba", "iris, a tenth missing", _tree),
    _case("RandomForestClassifier", "predict_proba", "digits, 500 rows", _forest),
    _case("ExtraTreesRegressor", "predict", "diabetes", _extra),
    _case("GradientBoostingClassifier, two classes", "decision_function", "breast cancer, 500 rows", _boosting),
    _case("GradientBoostingClassifier, three classes", "decision_function", "wine", _boosting_of_three),
    _case("GradientBoostingRegressor", "predict", "diabetes", _boosting_of_numbers),
    _case("HistGradientBoostingClassifier", "decision_function", "wine, a tenth missing", _histograms),
)
