"""Specifications of naive Bayes, and the conversion to a trainable ψ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from kapsi.errors import DataError, SpecError, check_choice, check_integer
from kapsi.expansion import Expansion
from kapsi.expansion.density import HALF_LINE, LINE
from kapsi.expansion.simple import Binarize, Identity
from kapsi.expansion.spline import BSpline
from kapsi.modules import Model
from kapsi.reconciliation import Dense, Eye, Reconciliation
from kapsi.remainder import ConstantRemainder
from kapsi.spec import HeadSpec, ModelSpec, from_dict
from kapsi.zoo.base import one_head

DENSITIES = (*LINE, *HALF_LINE)
COUNTS = ("multinomial", "bernoulli", "categorical")
OPTIONS: dict[str, tuple[str, ...]] = {
    "normal": ("smoothing",),
    **dict.fromkeys(HALF_LINE, ("floor",)),
    "bernoulli": ("threshold",),
    "categorical": ("categories",),
}
"""The options of each kind."""


def spec(
    inputs: int,
    classes: int,
    kind: str = "normal",
    *,
    learnable: bool = True,
    dense: bool = False,
    bias: bool = False,
    **options: Any,
) -> ModelSpec:
    """Return the specification of naive Bayes: log p(x, c) = Σᵢ log p(xᵢ | c) + log P(c).

    Densities have parameters per class and input, and a constant ψ:

        κ(x) = [log p(xᵢ | θ_ci)], class by class;    ψ = I ⊗ 1ᵀ;    π = log P(c).

    The log-likelihood of counts is linear in κ, with logarithms of probabilities in ψ and terms independent of x in π:

        multinomial   κ(x) = x;              ψ_ci = log p_ci;                   π_c = log P(c)
        bernoulli     κ(x) = 1[x > θ];       ψ_ci = log p_ci − log(1 − p_ci);   π_c = log P(c) + Σᵢ log(1 − p_ci)
        categorical   κ(x) = 1[xᵢ = k];      ψ_c,ki = log p_cik;                π_c = log P(c)

    Args:
        inputs: m, at least 1.
        classes: n, at least 1.
        kind: `normal`, `cauchy`, `laplace`, `exponential`, `gamma` or `chi_squared`; `multinomial`, `bernoulli` or `categorical`.
        learnable: whether the parameters of densities are trainable. Without trainable parameters and `dense`, the model is
            fitted in closed form only.
        dense: whether ψ of densities has a parameter per entry; `learned` sets I ⊗ 1ᵀ as initial values.
        bias: whether to add a trainable bias, initially zero, to the constant priors.
        **options: options of κ: `smoothing` of `normal`; `floor` of `exponential`, `gamma` and `chi_squared`; `threshold` θ of
            `bernoulli`, default 0, None for binary inputs; `categories` of `categorical`, for inputs 0 to categories − 1. Other
            values count as missing.

    Raises:
        SpecError: an unknown kind or option.

    Source: arXiv 2407.04819, "Representing PMs with RPN"; the priors are a constant remainder.

    Example:
        >>> import kapsi as kp
        >>> kp.Model(spec(4, 3)).layers[0].heads[0]
        Head(
          4 → 3, NaiveNormal(count=3, ...), Eye(blocks=True), ConstantRemainder(value=0.0)
          ...
    """
    where = f"naive_bayes.spec(kind={kind!r})"
    check_choice(where, kind, (*DENSITIES, *COUNTS))
    allowed = OPTIONS.get(kind, ())
    for name in options:
        if name not in allowed:
            raise SpecError(f"{where}: there is no option {name!r}; options: {', '.join(allowed) or 'none'}")
    density = kind in DENSITIES
    if not density and (dense or not learnable):
        raise SpecError(
            f"{where}: ψ of counts is dense and trainable; omit dense and learnable, and use model.freeze('*.psi') against training"
        )
    psi: Reconciliation = Dense() if dense or not density else Eye(blocks=True)
    expansion = _expansion(kind, where, {"count": classes, "learnable": learnable} if density else {}, options)
    return one_head(HeadSpec(expansion, psi, ConstantRemainder(0.0), bias=bias), inputs, classes)


def _expansion(kind: str, where: str, always: Mapping[str, Any], options: Mapping[str, Any]) -> Expansion:
    if kind in DENSITIES:
        expansion: Expansion = from_dict({"kind": f"naive_{kind}", **always, **options}, Expansion, where)
        return expansion
    if kind == "bernoulli":
        threshold = options.get("threshold", 0.0)
        return Identity() if threshold is None else Binarize(threshold)
    if kind == "multinomial":
        return Identity()
    categories = check_integer(f"{where}: categories", options.get("categories"), 1)
    # A step around each integer.
    return BSpline(categories, degree=0, low=-0.5, high=categories - 0.5, extrapolation="zero")


def learned(model: Model) -> Model:
    """Return an equal naive Bayes with a trainable dense ψ, initially I ⊗ 1ᵀ, and a trainable bias.

    Dependent inputs count several times in naive Bayes; trained weights of the log-densities correct this.

    Args:
        model: naive Bayes of a density, from `spec`, `fit_gaussian`, `fit_naive` or `from_sklearn`.

    Raises:
        SpecError: an unsupported model, or a ψ already trainable.

    Example:
        >>> import kapsi as kp
        >>> learned(kp.Model(spec(1, 2))).layers[0].heads[0].psi["matrix"].tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    if not isinstance(model, Model):
        raise SpecError(f"learned: expected a kapsi.Model, got {type(model).__name__}")
    heads = [head for _, head in model.heads()]
    if len(heads) != 1 or heads[0].spec.reconciliation != Eye(blocks=True):
        raise SpecError(
            "learned: expected naive Bayes of a density, one head with Eye(blocks=True); ψ of counts is trainable already"
        )
    (old,) = heads
    layer = model.spec.layers[0]
    head = replace(old.spec, reconciliation=Dense(), bias=True)
    like = next(tensor for tensor in old.kappa.state_dict().values())
    spec = replace(model.spec, layers=(replace(layer, heads=(head,)),))
    result = Model(spec, seed=0, device=like.device, dtype=like.dtype)
    ((_, new),) = result.heads()
    state = {name: tensor for name, tensor in old.state_dict().items() if not name.startswith("psi.")}
    new.load_state_dict({**new.state_dict(), **state, "psi.matrix": old.weights().matrix()})
    return result.eval()


def check_variance(where: str, variance: Tensor, option: str) -> None:
    """Raise a `DataError` unless all variances, `(classes, m)`, are positive; `option` is the name of the smoothing."""
    bad = (~(variance > 0)).nonzero().tolist()
    if bad:
        c, i = bad[0]
        raise DataError(
            f"{where}: input {i} has a smoothed variance of {float(variance[c, i])} in class {c}; use {option} above 0, or remove "
            "constant inputs"
        )
