"""What naive Bayes is made of: its specification, models of given tensors, and the step to a ψ that is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.expansion import Expansion
from kapsi.expansion.density import HALF_LINE, LINE
from kapsi.expansion.simple import Binarize, Identity
from kapsi.expansion.spline import BSpline
from kapsi.modules import Model
from kapsi.reconciliation import Dense, Eye, Reconciliation
from kapsi.remainder import ConstantRemainder
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec, from_dict

__all__ = ["DENSITIES", "check_variance", "filled", "learned", "spec"]

DENSITIES = (*LINE, *HALF_LINE)
COUNTS = ("multinomial", "bernoulli", "categorical")
OPTIONS: dict[str, tuple[str, ...]] = {
    "normal": ("smoothing",),
    **dict.fromkeys(HALF_LINE, ("floor",)),
    "bernoulli": ("threshold",),
    "categorical": ("categories",),
}
"""What is said of κ beside the number of classes, by kind."""


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

    Densities have parameters for each class and input, and a constant ψ:

        κ(x) = [log p(xᵢ | θ_ci)], class by class;    ψ = I ⊗ 1ᵀ;    π = log P(c).

    Counts are linear in what κ makes, with the logarithms of probabilities in ψ and what does not depend on x in π:

        multinomial   κ(x) = x;              ψ_ci = log p_ci;                   π_c = log P(c)
        bernoulli     κ(x) = 1[x > θ];       ψ_ci = log p_ci − log(1 − p_ci);   π_c = log P(c) + Σᵢ log(1 − p_ci)
        categorical   κ(x) = 1[xᵢ = k];      ψ_c,ki = log p_cik;                π_c = log P(c)

    Args:
        inputs: m, at least 1.
        classes: n, at least 1.
        kind: `normal`, `cauchy`, `laplace`, `exponential`, `gamma` or `chi_squared`; `multinomial`, `bernoulli` or `categorical`.
        learnable: of densities: whether their parameters are trained. With False and without `dense` nothing in the model is
            trainable: it is fitted in closed form alone.
        dense: of densities: whether ψ has a parameter for each entry. Set by hand, or made by `learned`, it begins at I ⊗ 1ᵀ.
        bias: whether there is a trainable b, zero at first, beside the constant priors.
        **options: of κ: `smoothing` of `normal`; `floor` of `exponential`, `gamma` and `chi_squared`; `threshold` θ of
            `bernoulli`, 0 by default, None for inputs that are zeros and ones already; `categories` of `categorical`: inputs are
            whole numbers from 0 to below it; one that is not says nothing of the class, as if it were missing.

    Raises:
        SpecError: a kind that there is not, or an option that it does not have.

    Source: arXiv 2407.04819, "Representing PMs with RPN"; the priors are its constant remainder.

    Example:
        >>> import kapsi as kp
        >>> kp.Model(spec(4, 3)).layers[0].heads[0]
        Head(
          4 → 3, NaiveNormal(count=3, learnable=True, smoothing=1e-09), Eye(blocks=True), ConstantRemainder(value=0.0)
          ...
    """
    where = f"naive_bayes.spec(kind={kind!r})"
    if kind not in (*DENSITIES, *COUNTS):
        raise SpecError(f"{where}: choose from {', '.join((*DENSITIES, *COUNTS))}")
    allowed = OPTIONS.get(kind, ())
    for name in options:
        if name not in allowed:
            raise SpecError(f"{where}: there is no option {name!r}; it has {', '.join(allowed) or 'none'}")
    density = kind in DENSITIES
    if not density and (dense or not learnable):
        raise SpecError(
            f"{where}: ψ is dense and trained, so dense and learnable are left out; model.freeze('*.psi') stops training"
        )
    psi: Reconciliation = Dense() if dense or not density else Eye(blocks=True)
    expansion = _expansion(kind, where, {"count": classes, "learnable": learnable} if density else {}, options)
    head = HeadSpec(expansion, psi, ConstantRemainder(0.0), bias=bias)
    return ModelSpec((inputs, classes), LayerSpec(head))  # type: ignore[arg-type]  # one head and one layer stand for tuples


def _expansion(kind: str, where: str, always: Mapping[str, Any], options: Mapping[str, Any]) -> Expansion:
    if kind in DENSITIES:
        made: Expansion = from_dict({"kind": f"naive_{kind}", **always, **options}, Expansion, where)
        return made
    if kind == "bernoulli":
        threshold = options.get("threshold", 0.0)
        return Identity() if threshold is None else Binarize(threshold)
    if kind == "multinomial":
        return Identity()
    categories = options.get("categories")
    if isinstance(categories, bool) or not isinstance(categories, int) or categories < 1:
        raise SpecError(f"{where}: categories={categories!r}: expected an integer of at least 1")
    # A step around each whole number.
    return BSpline(categories, degree=0, low=-0.5, high=categories - 0.5, extrapolation="zero")


def learned(model: Model) -> Model:
    """Return the same naive Bayes with a ψ that is trained, and a bias: dense, and I ⊗ 1ᵀ at first.

    Inputs that depend on each other count several times in naive Bayes; trained weights of their log-densities mend that.

    Args:
        model: naive Bayes of a density, as `spec`, `fit_gaussian`, `fit_naive` and `from_sklearn` make it.

    Raises:
        SpecError: another model, or one whose ψ is trained already.

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
            "learned: expected naive Bayes of a density, one head with Eye(blocks=True); "
            "a model of counts has a ψ that is trained already"
        )
    (old,) = heads
    layer = model.spec.layers[0]
    head = replace(old.spec, reconciliation=Dense(), bias=True)
    like = next(tensor for tensor in old.kappa.state_dict().values())
    made = Model(
        replace(model.spec, layers=(replace(layer, heads=(head,)),)), seed=0, device=like.device, dtype=like.dtype
    )
    (new,) = (head for _, head in made.heads())
    state = {name: tensor for name, tensor in old.state_dict().items() if not name.startswith("psi.")}
    new.load_state_dict({**new.state_dict(), **state, "psi.matrix": old.weights().matrix()})
    return made.eval()


def filled(made: ModelSpec, pi: Tensor, psi: Tensor | None = None, **kappa: Tensor) -> Model:
    """Return a model in float64 with these tensors."""
    model = Model(made, seed=0, dtype=torch.float64)
    head = next(head for _, head in model.heads())
    head.assign("remainder", value=pi)
    if psi is not None:
        head.assign("reconciliation", matrix=psi)
    if kappa:
        head.assign("expansion", **kappa)
    return model.eval()


def check_variance(where: str, variance: Tensor, option: str) -> None:
    """Raise a `SpecError` where a variance, `(classes, m)`, is not positive; `option` is what smoothing is called."""
    bad = (~(variance > 0)).nonzero().tolist()
    if bad:
        c, i = bad[0]
        raise SpecError(
            f"{where}: input {i} has a variance of {float(variance[c, i])} in class {c}, smoothed; "
            f"give {option} above 0, or leave out inputs that do not vary"
        )
