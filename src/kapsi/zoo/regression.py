"""Regressions of one layer: linear, logistic, polynomial, additive, and the factorization machine."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from math import factorial, prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.expansion import Expansion, Hermite, Taylor
from kapsi.modules import Model
from kapsi.reconciliation import Dense, KhatriRao
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec, from_dict
from kapsi.training.engine import fit
from kapsi.training.prediction import predict_proba
from kapsi.zoo.base import Case, Comparison, tensor_of

__all__ = ["PARITY", "factorization_machine", "fit_linear", "fit_logistic", "from_sklearn", "spec"]

KINDS = {
    "linear": (),
    "polynomial": ("degree",),
    "additive": ("intervals", "degree", "knots", "extrapolation", "low", "high"),
    "factorization_machine": ("rank",),
}
"""The options of κ and ψ, by kind."""

OUTSIDE = {"constant": "clamp", "linear": "linear", "error": "error"}
"""What scikit-learn calls the ways of splines outside of their range, and what they are called here."""


def spec(inputs: int, outputs: int = 1, kind: str = "linear", **options: Any) -> ModelSpec:
    """Return the specification of a regression, linear in what κ makes of x; for classes the outputs are logits.

        linear      y = W x + b:                       κ(x) = x
        polynomial  y = Σ w_α x^α + b:                 κ(x) = √(orderings of α) x^α, Taylor's monomials, each once
        additive    y = Σᵢ fᵢ(xᵢ) + b:                 κ(x) = B-splines of each input

    with a dense ψ, π = 0 and a bias. The factorization machine has two heads, of which the first has Taylor's grid [1, x] ⊗ x and
    the other the linear part and the diagonal:

        y = b + Σᵢ wᵢ xᵢ + Σ_{i<j} ⟨vᵢ, vⱼ⟩ xᵢ xⱼ,    Σ_{i<j} ⟨vᵢ, vⱼ⟩ xᵢ xⱼ = ½ Σ_k ⟨v_k, x⟩² − ½ Σᵢ ‖vᵢ‖² xᵢ²
        head 1      κ(x) = [1, x] ⊗ x,                 ψ = A (C ⊙ B), A = ½, C = [0, Vᵀ], B = Vᵀ
        head 2      κ(x) = [x, x² − 1],                ψ = [w, −½ ‖vᵢ‖²], with the bias b − ½ Σᵢ ‖vᵢ‖²

    Args:
        inputs: m, at least 1.
        outputs: n, at least 1.
        kind: `linear`, `polynomial`, `additive` or `factorization_machine`.
        **options: `degree` of `polynomial` (2); `intervals` (5), `degree` (3), `knots`, `low`, `high` and `extrapolation` of
            `additive`, as of `kapsi.BSpline`; `rank` of `factorization_machine` (8).

    Raises:
        SpecError: a kind that there is not, or an option that it does not have.

    Source: arXiv 2407.04819 lists them as open; Rendle, Factorization Machines (ICDM 2010); Hastie and Tibshirani, Generalized
        Additive Models (1986).

    Example:
        >>> import kapsi as kp
        >>> kp.Model(spec(4, 1, "polynomial", degree=3), seed=0).layers[0].heads[0].factors
        (1, 34)
    """
    where = f"regression.spec(kind={kind!r})"
    if not isinstance(kind, str) or kind not in KINDS:
        raise SpecError(f"{where}: choose from {', '.join(KINDS)}")
    for name in options:
        if name not in KINDS[kind]:
            raise SpecError(f"{where}: there is no option {name!r}; it has {', '.join(KINDS[kind]) or 'none'}")
    if kind == "factorization_machine":
        psi = from_dict({"kind": "khatri_rao", "rank": options.get("rank", 8)}, KhatriRao, where)
        heads: Any = (HeadSpec(Taylor(2), psi), HeadSpec(Hermite(2), bias=True))
        return ModelSpec((inputs, outputs), LayerSpec(heads))  # type: ignore[arg-type]
    made: dict[str, Any] = {"kind": "identity"}
    if kind == "polynomial":
        made = {"kind": "taylor", "degree": 2, **options, "symmetric": True}
    elif kind == "additive":
        made = {"kind": "b_spline", **options}
    return _of(from_dict(made, Expansion, where), inputs, outputs)


def _of(expansion: Expansion, inputs: int, outputs: int) -> ModelSpec:
    head: Any = HeadSpec(expansion, Dense(), bias=True)
    return ModelSpec((inputs, outputs), LayerSpec(head))  # type: ignore[arg-type]  # one head and layer stand for tuples


def _filled(made: ModelSpec, matrix: Tensor, bias: Tensor, **kappa: Tensor) -> Model:
    model = Model(made, seed=0, dtype=torch.float64, device="cpu")
    head = next(head for _, head in model.heads())
    if kappa:
        head.assign("expansion", **kappa)
    head.assign("reconciliation", matrix=matrix)
    _set_bias(head.bias, bias)
    return model.eval()


def _set_bias(ours: Any, values: Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise SpecError("regression: the intercept is not finite")
    with torch.no_grad():
        ours.copy_(values)


# ------------------------------------------------------------------------------------------------ factorization machines


def factorization_machine(bias: float, linear: Any, factors: Any) -> Model:
    """Return a factorization machine of given weights: y = b + Σᵢ wᵢ xᵢ + Σ_{i<j} ⟨vᵢ, vⱼ⟩ xᵢ xⱼ, in float64.

    It is exactly that machine. Trained on, it is somewhat more: the two factors of the grid are parameters of their own, and so
    is the diagonal that takes xᵢ² off; `model.freeze("layers.0.heads.1.psi")` keeps the latter, and the linear part.

    Args:
        bias: b.
        linear: w, `(m,)`.
        factors: v, `(m, rank)`.

    Raises:
        SpecError: shapes that do not fit, or numbers that are not finite.

    Source: Rendle, Factorization Machines (ICDM 2010), doi 10.1109/ICDM.2010.127.

    Example:
        >>> import torch
        >>> model = factorization_machine(1.0, [1.0, 0.0, 0.0], [[2.0], [3.0], [0.0]])
        >>> model(torch.tensor([[1.0, 1.0, 5.0]], dtype=torch.float64)).item()    # 1 + x₁ + 6 x₁x₂
        8.0
    """
    where = "factorization_machine"
    try:
        b, w, v = (tensor_of(each).to("cpu", torch.float64) for each in (bias, linear, factors))
    except (TypeError, ValueError):
        raise SpecError(f"{where}: expected numbers") from None
    if v.dim() != 2 or w.shape != v.shape[:1] or b.dim() != 0 or 0 in v.shape:
        raise SpecError(
            f"{where}: expected a number, linear weights (m,) and factors (m, rank); got shapes {tuple(b.shape)}, "
            f"{tuple(w.shape)} and {tuple(v.shape)}"
        )
    m, rank = v.shape
    model = Model(spec(m, 1, "factorization_machine", rank=rank), seed=0, dtype=torch.float64, device="cpu")
    pairs, rest = (head for _, head in model.heads())
    pairs.assign(
        "reconciliation",
        left=torch.full((1, rank), 0.5),
        first=torch.cat((torch.zeros(rank, 1, dtype=v.dtype), v.T), 1),
        second=v.T,
    )
    square = v.square().sum(1) / 2
    rest.assign("reconciliation", matrix=torch.cat((w, -square)).unsqueeze(0))
    _set_bias(rest.bias, (b - square.sum()).reshape(1))  # of −½‖vᵢ‖² (xᵢ² − 1)
    return model.eval()


# ------------------------------------------------------------------------------------------------ scikit-learn


def from_sklearn(estimator: Any) -> Model:
    """Return a fitted linear model of scikit-learn, or a pipeline of an expansion and one, as a model in float64.

    | estimator | κ |
    |---|---|
    | `LinearRegression`, `Ridge`, `RidgeCV`, `Lasso`, `LassoCV`, `ElasticNet`, `ElasticNetCV` | x |
    | `LogisticRegression`, `LogisticRegressionCV`, `RidgeClassifier` | x; outputs are logits, one for two classes |
    | `Pipeline` of `PolynomialFeatures` and one of these | Taylor's monomials |
    | `Pipeline` of `SplineTransformer` and one of these | B-splines |

    Args:
        estimator: the fitted estimator.

    Raises:
        SpecError: another estimator or step, one that is not fitted, interactions alone, or splines that continue or are periodic.

    Example:
        >>> import numpy as np, torch
        >>> from sklearn.linear_model import LinearRegression
        >>> from sklearn.pipeline import make_pipeline
        >>> from sklearn.preprocessing import PolynomialFeatures
        >>> x = np.random.default_rng(0).normal(size=(50, 3))
        >>> theirs = make_pipeline(PolynomialFeatures(3), LinearRegression()).fit(x, x.prod(1))
        >>> found = from_sklearn(theirs)(torch.tensor(x)).detach()
        >>> np.allclose(found[:, 0], theirs.predict(x), rtol=0, atol=1e-9)
        True
    """
    from sklearn.exceptions import NotFittedError
    from sklearn.pipeline import Pipeline
    from sklearn.utils.validation import check_is_fitted

    where = f"from_sklearn({type(estimator).__name__})"
    steps = [estimator]
    if type(estimator) is Pipeline:
        steps = [step for _, step in estimator.steps if step is not None and step != "passthrough"]
        if not 1 <= len(steps) <= 2:
            raise SpecError(
                f"{where}: expected PolynomialFeatures or SplineTransformer and a linear model, got "
                f"{', '.join(type(step).__name__ for step in steps) or 'no step'}"
            )
    *first, last = steps
    _check_linear(last, where)
    for step in steps:
        try:
            check_is_fitted(step)
        except NotFittedError:
            raise SpecError(f"{where}: {type(step).__name__} is not fitted; call fit(x, y) first") from None
    matrix = torch.tensor(np.atleast_2d(np.asarray(_dense(last.coef_), dtype=np.float64)))
    bias = torch.tensor(np.asarray(last.intercept_, dtype=np.float64)).reshape(-1).expand(len(matrix))
    if not first:
        return _filled(spec(matrix.shape[1], len(matrix)), matrix, bias)
    return _expanded(first[0], matrix, bias, where)


def _dense(values: Any) -> Any:
    return values.toarray() if hasattr(values, "toarray") else values


def _check_linear(estimator: Any, where: str) -> None:
    from sklearn import linear_model

    names = (
        "LinearRegression",
        "Ridge",
        "RidgeCV",
        "Lasso",
        "LassoCV",
        "ElasticNet",
        "ElasticNetCV",
        "LogisticRegression",
        "LogisticRegressionCV",
        "RidgeClassifier",
    )
    if type(estimator) not in [getattr(linear_model, name) for name in names]:
        raise SpecError(f"{where}: expected {', '.join(names)}, or a Pipeline; got {type(estimator).__name__}")


def _expanded(step: Any, matrix: Tensor, bias: Tensor, where: str) -> Model:
    from sklearn.preprocessing import PolynomialFeatures, SplineTransformer

    if type(step) is PolynomialFeatures:
        return _polynomial(step, matrix, bias, where)
    if type(step) is SplineTransformer:
        return _additive(step, matrix, bias, where)
    raise SpecError(
        f"{where}: {type(step).__name__} is not carried over; PolynomialFeatures and SplineTransformer are, and inputs can be "
        "standardized before"
    )


def _polynomial(step: Any, matrix: Tensor, bias: Tensor, where: str) -> Model:
    """Put each coefficient in the column of its monomial, divided by the root of its number of orderings."""
    powers = np.asarray(step.powers_)
    inputs = powers.shape[1]
    degree = int(powers.sum(1).max())
    if degree < 1:
        raise SpecError(f"{where}: PolynomialFeatures of degree 0 leave a constant; give degree 1 or more")
    words = [word for k in range(1, degree + 1) for word in itertools.combinations_with_replacement(range(inputs), k)]
    places = {word: place for place, word in enumerate(words)}
    made = torch.zeros(len(matrix), len(words), dtype=torch.float64)
    total = bias.clone()
    for column, row in enumerate(powers.tolist()):
        word = tuple(i for i, power in enumerate(row) for _ in range(power))
        if not word:
            total += matrix[:, column]
            continue
        orderings = factorial(len(word)) / prod(factorial(count) for count in Counter(word).values())
        made[:, places[word]] = matrix[:, column] / orderings**0.5
    return _filled(spec(inputs, len(matrix), "polynomial", degree=degree), made, total)


def _additive(step: Any, matrix: Tensor, bias: Tensor, where: str) -> Model:
    """Take the knots, and put the coefficients of each input's splines basis-major."""
    if step.extrapolation not in OUTSIDE:
        raise SpecError(
            f"{where}: extrapolation={step.extrapolation!r} is not carried over; choose from {', '.join(OUTSIDE)}"
        )
    if getattr(step, "handle_missing", "error") != "error":
        raise SpecError(f"{where}: handle_missing={step.handle_missing!r} is not carried over; 'error' is")
    inputs, degree = int(step.n_features_in_), int(step.degree)
    for i, spline in enumerate(step.bsplines_):
        if not spline.t[degree] < spline.t[-degree - 1]:
            raise SpecError(f"{where}: input {i} was constant when SplineTransformer was fitted; leave it out")
    if OUTSIDE[step.extrapolation] == "linear" and degree < 2 and (inputs > 1 or degree < 1):
        # Its loop over inputs raises the degree by one after the first, so that later ones go on from within their range.
        raise SpecError(
            f"{where}: extrapolation='linear' with degree={degree} and {inputs} inputs is not what it says in scikit-learn and is "
            "not carried over; take degree 2 or more, or extrapolation='constant'"
        )
    knots = torch.tensor(np.stack([spline.t for spline in step.bsplines_], 1).astype(np.float64))
    functions = len(knots) - degree - 1
    kept = functions if step.include_bias else functions - 1
    table = matrix.reshape(len(matrix), inputs, kept)
    table = torch.nn.functional.pad(table, (0, functions - kept))
    made = spec(
        inputs,
        len(matrix),
        "additive",
        intervals=functions - degree,
        degree=degree,
        knots="quantile",
        extrapolation=OUTSIDE[step.extrapolation],
    )
    return _filled(made, table.transpose(1, 2).flatten(1), bias, knots=knots)


# ------------------------------------------------------------------------------------------------ fitting


def fit_linear(model: Model, x: Any, y: Any, *, alpha: float = 0.0, sample_weight: Any = None) -> Model:
    """Fit a model that is linear in its parameters by least squares, in place: min Σ_r s_r ‖y_r − f(x_r)‖² + α ‖ψ‖².

    As `LinearRegression` (α = 0) and `Ridge` of what κ makes of x; the bias is not penalized. Where rows do not determine ψ
    the smallest one is taken.

    Args:
        model: one layer of one head with a dense ψ, no π and a bias, such as those of `spec` but the factorization machine.
        x: inputs, `(rows, m)`.
        y: targets, `(rows,)` or `(rows, n)`.
        alpha: α, at least 0.
        sample_weight: s, `(rows,)`, at least 0; all 1 by default.

    Returns:
        The model.

    Raises:
        SpecError: another model, or data that do not fit.

    Example:
        >>> import torch, kapsi as kp
        >>> x = torch.linspace(0, 1, 20, dtype=torch.float64).unsqueeze(1)
        >>> model = fit_linear(kp.Model(spec(1, 1, "polynomial"), dtype=torch.float64), x, 3 * x**2 - x + 2)
        >>> bool(torch.isclose(model(torch.tensor([[5.0]], dtype=torch.float64)), torch.tensor(72.0, dtype=torch.float64)))
        True
    """
    head = _head(model, "fit_linear")
    if not isinstance(alpha, int | float) or not 0 <= alpha < float("inf"):
        raise SpecError(f"fit_linear(alpha={alpha!r}): expected a number of at least 0")
    like = head.psi["matrix"]
    rows, targets, weight = _data("fit_linear", x, y, sample_weight, model.in_features, model.out_features)
    with torch.no_grad():
        kappa = head.expand(rows.to(like)).dense().double().cpu()
        total = weight.sum()
        middle, center = (weight @ kappa) / total, (weight @ targets) / total
        root = weight.sqrt().unsqueeze(1)
        left, right = (kappa - middle) * root, (targets - center) * root
        u, sizes, vh = torch.linalg.svd(left, full_matrices=False)
        least = sizes[:1].amax() * torch.finfo(sizes.dtype).eps * max(left.shape) if len(sizes) else sizes
        factors = torch.where(
            sizes > least, sizes / (sizes.square() + alpha).clamp_min(torch.finfo(sizes.dtype).tiny), 0
        )
        matrix = (vh.T @ (factors.unsqueeze(1) * (u.T @ right))).T
        head.assign("reconciliation", matrix=matrix)
        _set_bias(head.bias, center - matrix @ middle)
    return model


def fit_logistic(model: Model, x: Any, y: Any, *, c: float = 1.0, epochs: int = 100) -> Model:
    """Fit a model that is linear in its parameters to classes, in place: min C Σ_r loss_r + ½ ‖ψ‖², as `LogisticRegression`.

    By reweighted least squares, with the bias not penalized.

    Args:
        model: one layer of one head with a dense ψ, no π and a bias; one output for two classes, else one for each.
        x: inputs, `(rows, m)`.
        y: class numbers `(rows,)` from 0 on.
        c: C, above 0.
        epochs: at most so many steps.

    Returns:
        The model.

    Raises:
        SpecError: another model, or data that do not fit.
    """
    _head(model, "fit_logistic")
    if not isinstance(c, int | float) or not 0 < c < float("inf"):
        raise SpecError(f"fit_logistic(c={c!r}): expected a number above 0")
    single = model.out_features == 1
    try:
        labels = tensor_of(y)
        whole = bool((labels.double() == labels.double().round()).all())
    except (TypeError, ValueError, RuntimeError):
        whole = False
    if not whole:
        raise SpecError(
            "fit_logistic: expected class numbers 0, 1, … as y; np.unique(y, return_inverse=True) makes them of others"
        )
    targets = labels.double() if single else labels.long()
    fit(
        model,
        (x, targets),
        loss="bernoulli" if single else "cross_entropy",
        solver="ridge",
        penalty=1 / (c * max(1, len(labels))),
        epochs=epochs,
        tolerance=1e-14,
        seed=0,
    )
    return model.eval()


def _head(model: Any, where: str) -> Any:
    heads = [head for _, head in model.heads()] if isinstance(model, Model) else []
    if len(heads) == 1:
        (head,) = heads
        made = head.spec
        plain = (
            made.remainder.name == "zero" and made.channels == 1 and not made.after and not model.spec.layers[0].output
        )
        if isinstance(made.reconciliation, Dense) and plain and head.bias is not None and not head.kappa.trainable():
            return head
    raise SpecError(
        f"{where}: expected a model of one layer and head with a dense ψ, a bias, no π, one channel and no processing after κ, "
        "such as those of regression.spec"
    )


def _data(where: str, x: Any, y: Any, weight: Any, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    try:
        rows, targets = (tensor_of(each).to("cpu", torch.float64) for each in (x, y))
        weights = tensor_of(np.ones(len(rows)) if weight is None else weight).to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise SpecError(f"{where}: expected numbers as x, y and sample_weight") from None
    targets = targets.unsqueeze(1) if targets.dim() == 1 else targets
    if rows.dim() != 2 or rows.shape[1] != inputs or not len(rows):
        raise SpecError(f"{where}: expected x of shape (rows, {inputs}), got {tuple(rows.shape)}")
    if targets.shape != (len(rows), outputs) or weights.shape != (len(rows),):
        raise SpecError(
            f"{where}: expected y of shape ({len(rows)}, {outputs}) and weights ({len(rows)},), got {tuple(targets.shape)} "
            f"and {tuple(weights.shape)}"
        )
    if not all(bool(each.isfinite().all()) for each in (rows, targets, weights)):
        raise SpecError(f"{where}: expected finite numbers in x, y and sample_weight")
    if bool((weights < 0).any()) or not float(weights.sum()) > 0:
        raise SpecError(f"{where}: expected weights of at least 0, some of them above")
    return rows, targets, weights


# ------------------------------------------------------------------------------------------------ comparisons


def _rows(name: str, seed: int) -> tuple[Any, Any]:
    from sklearn import datasets

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))[:400]
    x = (x - x.mean(0)) / np.where(x.std(0) > 0, x.std(0), 1)
    return x[order], y[order]


def _compared(model: Model, x: Any, y: Any, wanted: Any, found: Any, theirs: int, loss: str) -> Comparison:
    expected = torch.tensor(np.asarray(wanted, dtype=np.float64)).reshape(found.shape)
    deviation = float(((found.detach() - expected).abs() / expected.abs().clamp_min(1)).max())
    ours = sum(tensor.numel() for tensor in model.state_dict().values())
    return Comparison(deviation, ours, theirs, model, torch.tensor(x), torch.tensor(y), loss)


def _size(estimator: Any) -> int:
    return int(np.size(estimator.coef_) + np.size(estimator.intercept_))


def _linear(seed: int, fitted: bool = False) -> Comparison:
    from sklearn.linear_model import LinearRegression

    x, y = _rows("diabetes", seed)
    estimator = LinearRegression().fit(x, y)
    model = from_sklearn(estimator)
    if fitted:
        model = fit_linear(Model(spec(x.shape[1]), seed=seed, dtype=torch.float64), x, y)
    return _compared(model, x, y, estimator.predict(x), model(torch.tensor(x)), _size(estimator), "mse")


def _linear_fitted(seed: int) -> Comparison:
    return _linear(seed, True)


def _ridge_fitted(seed: int) -> Comparison:
    from sklearn.linear_model import Ridge

    x, y = _rows("diabetes", seed)
    weight = np.random.default_rng(seed).uniform(0.1, 2, len(x))
    estimator = Ridge(alpha=3.0).fit(x, y, weight)
    model = fit_linear(Model(spec(x.shape[1]), seed=seed, dtype=torch.float64), x, y, alpha=3.0, sample_weight=weight)
    return _compared(model, x, y, estimator.predict(x), model(torch.tensor(x)), _size(estimator), "mse")


def _logistic(name: str, seed: int, fitted: bool) -> Comparison:
    from sklearn.linear_model import LogisticRegression

    x, y = _rows(name, seed)
    estimator = LogisticRegression(C=0.5, tol=1e-12, max_iter=10_000, solver="newton-cholesky").fit(x, y)
    model = from_sklearn(estimator)
    if fitted:
        model = fit_logistic(Model(spec(x.shape[1], model.out_features), seed=seed, dtype=torch.float64), x, y, c=0.5)
    single = model.out_features == 1
    loss = "bernoulli" if single else "cross_entropy"
    found = predict_proba(model, x, loss)
    wanted = estimator.predict_proba(x)
    return _compared(model, x, y.astype(float) if single else y, wanted, found, _size(estimator), loss)


def _logistic_imported(seed: int) -> Comparison:
    return _logistic("breast_cancer", seed, False)


def _logistic_fitted(seed: int) -> Comparison:
    return _logistic("breast_cancer", seed, True)


def _multinomial_imported(seed: int) -> Comparison:
    return _logistic("wine", seed, False)


def _multinomial_fitted(seed: int) -> Comparison:
    return _logistic("wine", seed, True)


def _pipeline(seed: int, transformer: Any, made: Callable[[Any], ModelSpec] | None = None) -> Comparison:
    from sklearn.linear_model import LinearRegression
    from sklearn.pipeline import make_pipeline

    x, y = _rows("diabetes", seed)
    x = x[:, [0, 2, 3]]
    estimator = make_pipeline(transformer, LinearRegression()).fit(x, y)
    model = from_sklearn(estimator)
    if made is not None:
        model = fit_linear(Model(made(x), seed=seed, dtype=torch.float64), x, y)
    return _compared(model, x, y, estimator.predict(x), model(torch.tensor(x)), _size(estimator[-1]), "mse")


def _polynomial_imported(seed: int) -> Comparison:
    from sklearn.preprocessing import PolynomialFeatures

    return _pipeline(seed, PolynomialFeatures(3))


def _polynomial_fitted(seed: int) -> Comparison:
    from sklearn.preprocessing import PolynomialFeatures

    return _pipeline(seed, PolynomialFeatures(3), lambda x: spec(3, 1, "polynomial", degree=3))


def _additive_imported(seed: int) -> Comparison:
    from sklearn.preprocessing import SplineTransformer

    return _pipeline(seed, SplineTransformer(6, knots="quantile"))


def _case(model: str, quantity: str, data: str, compare: Any, tolerance: float = 1e-9) -> Case:
    return Case(f"regression, {model}", quantity, data, "scikit-learn", tolerance, compare)


PARITY: tuple[Case, ...] = (
    _case("LinearRegression imported", "predict", "diabetes", _linear),
    _case("LinearRegression fitted in kapsi", "predict", "diabetes", _linear_fitted),
    _case("Ridge fitted in kapsi", "predict", "diabetes, weighted rows", _ridge_fitted),
    _case("LogisticRegression imported", "predict_proba", "breast cancer", _logistic_imported),
    _case("LogisticRegression fitted in kapsi", "predict_proba", "breast cancer", _logistic_fitted, 1e-6),
    _case("multinomial LogisticRegression imported", "predict_proba", "wine", _multinomial_imported),
    _case("multinomial LogisticRegression fitted in kapsi", "predict_proba", "wine", _multinomial_fitted, 1e-6),
    _case("PolynomialFeatures and LinearRegression imported", "predict", "diabetes, 3 inputs", _polynomial_imported),
    _case("polynomial fitted in kapsi", "predict", "diabetes, 3 inputs", _polynomial_fitted),
    _case("SplineTransformer and LinearRegression imported", "predict", "diabetes, 3 inputs", _additive_imported),
)
