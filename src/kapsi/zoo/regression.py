"""Regressions of one layer: linear, logistic, polynomial, additive, and the factorization machine."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from math import factorial, prod, ulp
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kapsi.errors import DataError, SpecError, check_choice, check_number, unknown
from kapsi.expansion import Expansion, Hermite, Taylor
from kapsi.modules import Head, Model
from kapsi.reconciliation import Dense, KhatriRao
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec, from_dict
from kapsi.standardize import Moments, standardize
from kapsi.training.engine import fit
from kapsi.training.prediction import predict_proba
from kapsi.training.solvers import Ridge
from kapsi.zoo.base import (
    Case,
    Comparison,
    check_estimator,
    dense_rows,
    deviation,
    finite_tensor,
    float64,
    forbid,
    model_of,
    one_head,
    plain_head,
    row_weights,
    sizes,
    sklearn_rows,
)

KINDS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "polynomial": ("degree",),
    "additive": ("intervals", "degree", "knots", "extrapolation", "low", "high"),
    "factorization_machine": ("rank",),
}
"""Options of κ and ψ by kind."""

EXTRAPOLATIONS = {"constant": "clamp", "linear": "linear", "error": "error"}
"""kapsi extrapolation policies by scikit-learn name."""

LINEAR_MODELS = (
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


SCALERS = {"StandardScaler": "mean_", "MinMaxScaler": "min_", "MaxAbsScaler": "", "RobustScaler": "center_"}
"""Scalers at the beginning of a pipeline, and their attribute of the shift."""


def spec(inputs: int, outputs: int = 1, kind: str = "linear", **options: Any) -> ModelSpec:
    """Return the specification of a regression, linear in κ(x); for classes the outputs are logits.

        linear      y = W x + b:                       κ(x) = x
        polynomial  y = Σ w_α x^α + b:                 κ(x) = √(orderings of α) x^α, Taylor's monomials, each once
        additive    y = Σᵢ fᵢ(xᵢ) + b:                 κ(x) = B-splines of each input

    with a dense ψ, π = 0 and a bias. The factorization machine has two heads: Taylor's grid [1, x] ⊗ x, and the linear part with
    the diagonal:

        y = b + Σᵢ wᵢ xᵢ + Σ_{i<j} ⟨vᵢ, vⱼ⟩ xᵢ xⱼ,    Σ_{i<j} ⟨vᵢ, vⱼ⟩ xᵢ xⱼ = ½ Σ_k ⟨v_k, x⟩² − ½ Σᵢ ‖vᵢ‖² xᵢ²
        head 1      κ(x) = [1, x] ⊗ x,                 ψ = A (C ⊙ B), A = ½, C = [0, Vᵀ], B = Vᵀ
        head 2      κ(x) = [x, x² − 1],                ψ = [w, −½ ‖vᵢ‖²], with the bias b − ½ Σᵢ ‖vᵢ‖²

    Args:
        inputs: m, at least 1.
        outputs: n, at least 1.
        kind: `linear`, `polynomial`, `additive` or `factorization_machine`.
        **options: `degree` of `polynomial` (2); `intervals` (5), `degree` (3), `knots`, `low`, `high` and `extrapolation` of
            `additive`, as in `kapsi.BSpline`; `rank` of `factorization_machine` (8).

    Raises:
        SpecError: an unknown kind or option.

    Source: arXiv 2407.04819 lists them as open; Rendle, Factorization Machines (ICDM 2010); Hastie and Tibshirani, Generalized
        Additive Models (1986).

    Example:
        >>> import kapsi as kp
        >>> kp.Model(spec(4, 1, "polynomial", degree=3), seed=0).layers[0].heads[0].factors
        (1, 34)
    """
    where = f"regression.spec(kind={kind!r})"
    check_choice("regression.spec(kind)", kind, KINDS)
    for name in options:
        forbid(where, (name not in KINDS[kind], unknown("option", name, KINDS[kind])))
    if kind == "factorization_machine":
        psi = from_dict({"kind": "khatri_rao", "rank": options.get("rank", 8)}, KhatriRao, where)
        heads = (HeadSpec(Taylor(2), psi), HeadSpec(Hermite(2), bias=True))
        return ModelSpec((inputs, outputs), (LayerSpec(heads),))
    kappa: dict[str, Any] = {"kind": "identity"}
    if kind == "polynomial":
        kappa = {"kind": "taylor", "degree": 2, **options, "symmetric": True}
    elif kind == "additive":
        kappa = {"kind": "b_spline", **options}
    return one_head(HeadSpec(from_dict(kappa, Expansion, where), Dense(), bias=True), inputs, outputs)


# ------------------------------------------------------------------------------------------------ factorization machines


def factorization_machine(bias: float, linear: Any, factors: Any) -> Model:
    """Return a factorization machine with given weights: y = b + Σᵢ wᵢ xᵢ + Σ_{i<j} ⟨vᵢ, vⱼ⟩ xᵢ xⱼ, in float64.

    Further training leaves this family: the two factors of the grid and the diagonal of xᵢ² are separate parameters.
    `model.freeze("layers.0.heads.1.psi")` fixes the diagonal together with the linear part.

    Args:
        bias: the intercept b.
        linear: w, `(m,)`.
        factors: v, `(m, rank)`.

    Source: Rendle, Factorization Machines (ICDM 2010), doi 10.1109/ICDM.2010.127.

    Example:
        >>> import torch
        >>> model = factorization_machine(1.0, [1.0, 0.0, 0.0], [[2.0], [3.0], [0.0]])
        >>> model(torch.tensor([[1.0, 1.0, 5.0]], dtype=torch.float64)).item()    # 1 + x₁ + 6 x₁x₂
        8.0
    """
    where = "factorization_machine"
    b, w, v = (finite_tensor(values, where) for values in (bias, linear, factors))
    if v.dim() != 2 or w.shape != v.shape[:1] or b.dim() != 0 or 0 in v.shape:
        raise DataError(
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
    _set_bias(rest, (b - square.sum()).reshape(1))  # of −½‖vᵢ‖² (xᵢ² − 1)
    return model.eval()


def _set_bias(head: Head, values: Tensor) -> None:
    if head.bias is not None:
        with torch.no_grad():
            head.bias.copy_(values)


# ------------------------------------------------------------------------------------------------ scikit-learn


def from_sklearn(estimator: Any) -> Model:
    """Return a fitted scikit-learn linear model, or a pipeline of an expansion and a linear model, as a model in float64.

    | estimator | κ |
    |---|---|
    | `LinearRegression`, `Ridge`, `RidgeCV`, `Lasso`, `LassoCV`, `ElasticNet`, `ElasticNetCV` | x |
    | `LogisticRegression`, `LogisticRegressionCV`, `RidgeClassifier` | x; outputs are logits, a single output for two classes |
    | `Pipeline` of `PolynomialFeatures` and a linear model | Taylor's monomials |
    | `Pipeline` of `SplineTransformer` and a linear model | B-splines |

    A pipeline may begin with `StandardScaler`, `MinMaxScaler`, `MaxAbsScaler` or `RobustScaler`: they become the fixed first
    layer of `kapsi.standardized`.

    Args:
        estimator: the fitted estimator.

    Raises:
        SpecError: an unsupported estimator or step, an unfitted step, or splines with `extrapolation` "continue" or "periodic".

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
    from sklearn.pipeline import Pipeline

    where = f"from_sklearn({type(estimator).__name__})"
    steps, moments = [estimator], None
    if type(estimator) is Pipeline:
        steps = [step for _, step in estimator.steps if step is not None and step != "passthrough"]
        scalers = list(itertools.takewhile(lambda step: type(step).__name__ in SCALERS, steps))
        moments = _moments(scalers, where) if scalers else None
        steps = steps[len(scalers) :]
        if not 1 <= len(steps) <= 2:
            raise SpecError(
                f"{where}: expected scalers, then PolynomialFeatures or SplineTransformer and a linear model, got "
                f"{', '.join(type(step).__name__ for step in (*scalers, *steps)) or 'no step'}"
            )
    model = _converted(steps, where)
    if moments is not None:
        standardize(model, moments, None)
    return model.eval()


def _moments(scalers: list[Any], where: str) -> Moments:
    """Return the moments (μ, σ) of scalers one after the other: (x − μ) / σ."""
    from sklearn import preprocessing

    shift, scale = np.zeros(1), np.ones(1)
    for step in scalers:
        check_estimator(step, [getattr(preprocessing, name) for name in SCALERS], where)
        forbid(where, (bool(getattr(step, "clip", False)), f"{type(step).__name__}(clip=True) is not supported"))
        own_shift, own_scale = getattr(step, SCALERS[type(step).__name__], None), step.scale_
        own_shift = own_shift if getattr(step, "with_mean", True) else None  # mean_ is there all the same
        own_shift, own_scale = 0.0 if own_shift is None else own_shift, 1.0 if own_scale is None else own_scale
        if hasattr(step, "min_"):  # x · scale_ + min_
            own_shift, own_scale = -own_shift / own_scale, 1 / own_scale
        shift, scale = shift + own_shift * scale, scale * own_scale
    columns = scalers[0].n_features_in_
    return Moments(*(torch.tensor(np.broadcast_to(part, columns).copy()) for part in (shift, scale)))


def _converted(steps: list[Any], where: str) -> Model:
    """Return a linear model, possibly after an expansion, as a model."""
    from sklearn import linear_model
    from sklearn.preprocessing import PolynomialFeatures, SplineTransformer

    *first, last = steps
    check_estimator(last, [getattr(linear_model, name) for name in LINEAR_MODELS], where, "or a Pipeline")
    for step in first:
        check_estimator(step, (PolynomialFeatures, SplineTransformer), where, "scalers come first")
    matrix = torch.atleast_2d(float64(last.coef_))
    bias = float64(last.intercept_).reshape(-1).expand(len(matrix))
    if not first:
        return model_of(spec(matrix.shape[1], len(matrix)), bias, reconciliation={"matrix": matrix})
    convert = _polynomial if isinstance(first[0], PolynomialFeatures) else _additive
    return convert(first[0], matrix, bias, where)


def _polynomial(step: Any, matrix: Tensor, bias: Tensor, where: str) -> Model:
    """Write each coefficient to the column of its monomial, divided by the root of its number of orderings."""
    powers = np.asarray(step.powers_)
    inputs = powers.shape[1]
    degree = int(powers.sum(1).max())
    if degree < 1:
        raise SpecError(f"{where}: PolynomialFeatures of degree 0 leave a constant; use degree 1 or more")
    words = [word for k in range(1, degree + 1) for word in itertools.combinations_with_replacement(range(inputs), k)]
    columns = {word: column for column, word in enumerate(words)}
    coefficients = torch.zeros(len(matrix), len(words), dtype=torch.float64)
    total = bias.clone()
    for column, row in enumerate(powers.tolist()):
        word = tuple(i for i, power in enumerate(row) for _ in range(power))
        if not word:
            total += matrix[:, column]
            continue
        orderings = factorial(len(word)) / prod(factorial(count) for count in Counter(word).values())
        coefficients[:, columns[word]] = matrix[:, column] / orderings**0.5
    layout = spec(inputs, len(matrix), "polynomial", degree=degree)
    return model_of(layout, total, reconciliation={"matrix": coefficients})


def _additive(step: Any, matrix: Tensor, bias: Tensor, where: str) -> Model:
    """Copy the knots, and order the coefficients of the splines basis-major."""
    policy, missing = step.extrapolation, getattr(step, "handle_missing", "error")
    inputs, degree = int(step.n_features_in_), int(step.degree)
    constant = [i for i, spline in enumerate(step.bsplines_) if not spline.t[degree] < spline.t[-degree - 1]]
    # scikit-learn's loop over the inputs raises the degree by one after the first input: later inputs continue from a
    # point within their range.
    shifted = policy == "linear" and degree < 2 and (inputs > 1 or degree < 1)
    forbid(
        where,
        (
            policy not in EXTRAPOLATIONS,
            f"extrapolation={policy!r} is not supported; choose from {', '.join(EXTRAPOLATIONS)}",
        ),
        (missing != "error", f"handle_missing={missing!r} is not supported; use 'error'"),
        (
            bool(constant),
            f"input {constant[0] if constant else ''} was constant when SplineTransformer was fitted; drop it",
        ),
        (
            shifted,
            f"extrapolation='linear' with degree={degree} and {inputs} inputs differs from its description in scikit-learn; "
            "use degree 2 or more, or extrapolation='constant'",
        ),
    )
    knots = float64(np.stack([spline.t for spline in step.bsplines_], 1))
    functions = len(knots) - degree - 1
    columns = functions if step.include_bias else functions - 1
    table = matrix.reshape(len(matrix), inputs, columns)
    table = torch.nn.functional.pad(table, (0, functions - columns)).transpose(1, 2).flatten(1)
    options: dict[str, Any] = {"intervals": functions - degree, "degree": degree, "knots": "quantile"}
    layout = spec(inputs, len(matrix), "additive", extrapolation=EXTRAPOLATIONS[policy], **options)
    return model_of(layout, bias, expansion={"knots": knots}, reconciliation={"matrix": table})


# ------------------------------------------------------------------------------------------------ fitting


def fit_linear(model: Model, x: Any, y: Any, *, alpha: float = 0.0, sample_weight: Any = None) -> Model:
    """Fit a model linear in its parameters by least squares, in place: min Σ_r s_r ‖y_r − f(x_r)‖² + α ‖ψ‖².

    Equals `LinearRegression` (α = 0) and `Ridge` on κ(x); the bias is not penalized. Underdetermined ψ get the solution of
    minimum norm.

    Args:
        model: a layer with a single head, dense ψ, bias and π = 0, as built by `spec` (except the factorization machine).
        x: inputs, `(rows, m)`.
        y: targets, `(rows,)` or `(rows, n)`.
        alpha: L2 penalty α, at least 0.
        sample_weight: row weights s, `(rows,)`, at least 0; default: 1.

    Returns:
        The model.

    Raises:
        SpecError: an unsupported model.
        DataError: data with a wrong shape or non-finite values.

    Example:
        >>> import torch, kapsi as kp
        >>> x = torch.linspace(0, 1, 20, dtype=torch.float64).unsqueeze(1)
        >>> model = fit_linear(kp.Model(spec(1, 1, "polynomial"), dtype=torch.float64), x, 3 * x**2 - x + 2)
        >>> bool(torch.isclose(model(torch.tensor([[5.0]], dtype=torch.float64)), torch.tensor(72.0, dtype=torch.float64)))
        True
    """
    head = _head(model, "fit_linear")
    check_number("fit_linear(alpha)", alpha, 0)
    like = head.psi["matrix"]
    rows, targets, weight = _data("fit_linear", x, y, sample_weight, model.in_features, model.out_features)
    with torch.no_grad():
        kappa = head.expand(rows.to(like)).dense().double().cpu()
        total = weight.sum()
        kappa_mean, target_mean = (weight @ kappa) / total, (weight @ targets) / total
        root = weight.sqrt().unsqueeze(1)
        left, right = (kappa - kappa_mean) * root, (targets - target_mean) * root
        u, values, vh = torch.linalg.svd(left, full_matrices=False)
        cutoff = values[:1].amax() * torch.finfo(values.dtype).eps * max(left.shape) if len(values) else values
        inverse = values / (values.square() + alpha).clamp_min(torch.finfo(values.dtype).tiny)
        factors = torch.where(values > cutoff, inverse, 0)
        matrix = (vh.T @ (factors.unsqueeze(1) * (u.T @ right))).T
        head.assign("reconciliation", matrix=matrix)
        _set_bias(head, target_mean - matrix @ kappa_mean)
    return model


def fit_logistic(model: Model, x: Any, y: Any, *, c: float = 1.0, epochs: int = 100) -> Model:
    """Fit a model linear in its parameters to classes, in place: min C Σ_r loss_r + ½ ‖ψ‖², as `LogisticRegression`.

    Iteratively reweighted least squares; the bias is not penalized.

    Args:
        model: see `fit_linear`; a single output for two classes, else one output per class.
        x: inputs, `(rows, m)`.
        y: class labels `(rows,)`, from 0.
        c: C, above 0.
        epochs: maximum number of steps.

    Returns:
        The model.

    Raises:
        SpecError: an unsupported model.
        DataError: targets other than integer class labels.
    """
    _head(model, "fit_logistic")
    check_number("fit_logistic(c)", c, ulp(0.0), wanted="a finite number above 0")
    single = model.out_features == 1
    labels = finite_tensor(y, "fit_logistic: y (class labels 0, 1, …)")
    if not torch.equal(labels, labels.round()):
        raise DataError(
            "fit_logistic: expected class labels 0, 1, … as y; convert other labels by np.unique(y, return_inverse=True)"
        )
    targets = labels.double() if single else labels.long()
    fit(
        model,
        (x, targets),
        loss="bernoulli" if single else "cross_entropy",
        solver=Ridge(tolerance=1e-14),
        l2=1 / (c * max(1, len(labels))),
        epochs=epochs,
        seed=0,
    )
    return model.eval()


def _head(model: Any, where: str) -> Head:
    head = plain_head(model)
    if head is None or head.bias is None or head.kappa.trainable():
        raise SpecError(
            f"{where}: expected a model of one layer and head with a dense ψ, a bias, no π, one channel and no processing after "
            "κ, as built by regression.spec"
        )
    return head


def _data(where: str, x: Any, y: Any, weight: Any, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, targets = dense_rows(where, x, inputs), finite_tensor(y, f"{where}: y")
    targets = targets.unsqueeze(1) if targets.dim() == 1 else targets
    if targets.shape != (len(rows), outputs):
        raise DataError(f"{where}: expected y of shape ({len(rows)}, {outputs}), got {tuple(targets.shape)}")
    return rows, targets, row_weights(where, weight, len(rows))


# ------------------------------------------------------------------------------------------------ parity


def _compare(model: Model, estimator: Any, x: Any, y: Any, loss: str = "mse") -> Comparison:
    """Compare predictions, for classes their probabilities; `estimator` may be a pipeline."""
    inputs, targets = torch.tensor(x), torch.tensor(y)
    if not hasattr(estimator, "predict_proba"):
        difference = deviation(model(inputs), estimator.predict(x))
    else:
        expected, probabilities = estimator.predict_proba(x), predict_proba(model, x, loss)
        difference = deviation(probabilities, expected.reshape(probabilities.shape))
    last = estimator[-1] if hasattr(estimator, "steps") else estimator
    theirs = int(np.size(last.coef_) + np.size(last.intercept_))
    return Comparison(difference, sizes(model), theirs, model, inputs, targets, loss)


def _blank(seed: int, *arguments: Any, **options: Any) -> Model:
    return Model(spec(*arguments, **options), seed=seed, dtype=torch.float64)


def _linear(seed: int, *, fitted: bool) -> Comparison:
    from sklearn.linear_model import LinearRegression

    x, y = sklearn_rows("diabetes", seed, 400, scaled=True)
    estimator = LinearRegression().fit(x, y)
    model = fit_linear(_blank(seed, x.shape[1]), x, y) if fitted else from_sklearn(estimator)
    return _compare(model, estimator, x, y)


def _ridge(seed: int) -> Comparison:
    from sklearn.linear_model import Ridge

    x, y = sklearn_rows("diabetes", seed, 400, scaled=True)
    weight = np.random.default_rng(seed).uniform(0.1, 2, len(x))
    estimator = Ridge(alpha=3.0).fit(x, y, weight)
    model = fit_linear(_blank(seed, x.shape[1]), x, y, alpha=3.0, sample_weight=weight)
    return _compare(model, estimator, x, y)


def _logistic(seed: int, *, data: str, fitted: bool) -> Comparison:
    from sklearn.linear_model import LogisticRegression

    x, y = sklearn_rows(data, seed, 400, scaled=True)
    estimator = LogisticRegression(C=0.5, tol=1e-12, max_iter=10_000, solver="newton-cholesky").fit(x, y)
    model = from_sklearn(estimator)
    single = model.out_features == 1
    if fitted:
        model = fit_logistic(_blank(seed, x.shape[1], model.out_features), x, y, c=0.5)
    return _compare(model, estimator, x, y.astype(float) if single else y, "bernoulli" if single else "cross_entropy")


def _pipeline(seed: int, *, transformer: str, options: dict[str, Any], fitted: bool) -> Comparison:
    from sklearn import preprocessing
    from sklearn.linear_model import LinearRegression
    from sklearn.pipeline import make_pipeline

    x, y = sklearn_rows("diabetes", seed, 400, scaled=True)
    x = x[:, [0, 2, 3]]
    estimator = make_pipeline(getattr(preprocessing, transformer)(**options), LinearRegression()).fit(x, y)
    model = fit_linear(_blank(seed, 3, 1, "polynomial", **options), x, y) if fitted else from_sklearn(estimator)
    return _compare(model, estimator, x, y)


def _case(model: str, quantity: str, data: str, compare: Callable[[int], Comparison], tolerance: float = 1e-9) -> Case:
    return Case(f"regression, {model}", quantity, data, "scikit-learn", tolerance, compare)


_polynomial_case = partial(_pipeline, transformer="PolynomialFeatures", options={"degree": 3})
_spline_case = partial(_pipeline, transformer="SplineTransformer", options={"n_knots": 6, "knots": "quantile"})
_binary, _multinomial = partial(_logistic, data="breast_cancer"), partial(_logistic, data="wine")
_MULTINOMIAL, _PROBABILITY = "multinomial LogisticRegression", "predict_proba"
PARITY: tuple[Case, ...] = (
    _case("LinearRegression imported", "predict", "diabetes", partial(_linear, fitted=False)),
    _case("LinearRegression fitted in kapsi", "predict", "diabetes", partial(_linear, fitted=True)),
    _case("Ridge fitted in kapsi", "predict", "diabetes, weighted rows", _ridge),
    _case("LogisticRegression imported", _PROBABILITY, "breast cancer", partial(_binary, fitted=False)),
    _case("LogisticRegression fitted in kapsi", _PROBABILITY, "breast cancer", partial(_binary, fitted=True), 1e-6),
    _case(f"{_MULTINOMIAL} imported", _PROBABILITY, "wine", partial(_multinomial, fitted=False)),
    _case(f"{_MULTINOMIAL} fitted in kapsi", _PROBABILITY, "wine", partial(_multinomial, fitted=True), 1e-6),
    _case(
        "PolynomialFeatures and LinearRegression imported",
        "predict",
        "diabetes, 3 inputs",
        partial(_polynomial_case, fitted=False),
    ),
    _case("polynomial fitted in kapsi", "predict", "diabetes, 3 inputs", partial(_polynomial_case, fitted=True)),
    _case(
        "SplineTransformer and LinearRegression imported",
        "predict",
        "diabetes, 3 inputs",
        partial(_spline_case, fitted=False),
    ),
)
