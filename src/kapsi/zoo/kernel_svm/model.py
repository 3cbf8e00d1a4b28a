"""Specification and outputs of support vector machines."""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from kapsi.errors import DataError, SpecError, check_choice, check_integer
from kapsi.expansion import Expansion, Identity, KernelMap, Nystrom, PolynomialMap, RandomFourier
from kapsi.expansion.kernel import Kernel
from kapsi.modules import Model
from kapsi.spec import HeadSpec, ModelSpec
from kapsi.zoo.base import one_head

__all__ = [
    "MAPS",
    "Kernel",
    "Map",
    "check_used",
    "machine_spec",
    "one_vs_rest",
    "outputs_of",
    "pairs_of",
    "spec",
    "support",
    "used_options",
    "vote",
]

Map: TypeAlias = Literal["explicit", "centers", "random_fourier", "nystrom"]

MAPS: dict[str, tuple[str, ...]] = {
    "linear": ("explicit", "centers", "nystrom"),
    "polynomial": ("explicit", "centers", "nystrom"),
    "rbf": ("centers", "random_fourier", "nystrom"),
    "sigmoid": ("centers",),
}
"""Feature maps of each kernel, the default first."""

USED: dict[str, tuple[str, ...]] = {
    "linear": (),
    "polynomial": ("gamma", "degree", "coef0"),
    "rbf": ("gamma",),
    "sigmoid": ("gamma", "coef0"),
}
"""Options of each kernel."""


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
    """Return the specification of a support vector machine: y = W κ(x) + b, with dense ψ = W and π = 0.

    - `explicit`: κ is the feature map: x for `linear`, Taylor's monomials with binomial weights for `polynomial` (`PolynomialMap`).
    - `centers`: k(x, c) for each center c (`KernelMap`).
    - `random_fourier`: random Fourier features of `rbf` (`RandomFourier`).
    - `nystrom`: the Nyström map of landmarks (`Nystrom`).

    Args:
        kernel: `linear` ⟨x, z⟩, `polynomial` (γ⟨x, z⟩ + c₀)^d, `rbf` exp(−γ‖x − z‖²), `sigmoid` tanh(γ⟨x, z⟩ + c₀).
        in_features: number of inputs m.
        classes: number of classes; 1 for regression.
        features: feature map; None: `explicit` for linear and polynomial kernels, else `centers`.
        count: number of centers, landmarks or frequencies.
        decision: outputs for `pairs` of classes, as in SVC, or for each of the `classes`, as in LinearSVC; a single output for two
            classes.
        gamma: γ; None: 1/m, and after `kapsi.calibrate` 1/(m · variance of the data).
        degree, coef0: d and c₀.

    Raises:
        SpecError: a kernel without the map, or options out of range.

    Source: arXiv 2407.04819, "Unifying Kernel SVM".

    Example:
        >>> machine = spec("polynomial", 4, 3, degree=2)
        >>> machine.widths, machine.layers[0].heads[0].expansion
        ((4, 3), PolynomialMap(degree=2, gamma=None, coef0=0.0, symmetric=True))
        >>> spec("rbf", 4, 5, count=20).widths
        (4, 10)
    """
    where = "kernel_svm.spec"
    name = MAPS[check_choice(f"{where}(kernel)", kernel, MAPS)][0] if features is None else features
    if kernel not in MAPS or name not in MAPS[kernel]:
        check_choice(f"{where}(features) of the {kernel} kernel", name, MAPS.get(kernel, ()))
    check_integer(f"{where}(classes)", classes, 1)
    check_choice(f"{where}(decision)", decision, ("pairs", "classes"))
    check_used(kernel, where, gamma=gamma is not None, degree=degree != 3, coef0=coef0 != 0)
    options: dict[str, Any] = used_options(kernel, gamma=gamma, degree=degree, coef0=coef0)
    expansion: Expansion
    if name == "explicit":
        expansion = Identity() if kernel == "linear" else PolynomialMap(**options)
    elif name == "random_fourier":
        expansion = RandomFourier(count, **options)
    elif name == "centers":
        expansion = KernelMap(kernel, count, **options)
    else:
        expansion = Nystrom(count, **{"kernel": kernel, **options})
    return machine_spec(expansion, in_features, outputs_of(classes, decision))


def machine_spec(expansion: Expansion, in_features: int, outputs: int) -> ModelSpec:
    """Return the specification of W κ(x) + b."""
    return one_head(HeadSpec(expansion, bias=True), in_features, outputs)


def outputs_of(classes: int, decision: str = "pairs") -> int:
    """Return the number of outputs for some classes."""
    if classes <= 2:
        return 1
    return classes * (classes - 1) // 2 if decision == "pairs" else classes


def used_options(kernel: str, **options: Any) -> dict[str, Any]:
    """Return only the options that apply to a kernel."""
    return {name: value for name, value in options.items() if name in USED[kernel]}


def check_used(kernel: str, where: str, **changed: bool) -> None:
    """Refuse changed options that a kernel ignores."""
    for name, present in changed.items():
        if present and name not in USED[kernel]:
            raise SpecError(f"{where}: the {kernel} kernel has no {name}; leave it out")


# ------------------------------------------------------------------------------------------------ outputs


def _classes(values: Tensor, where: str) -> int:
    """Return the number of classes with this number of pairs."""
    columns = values.shape[-1] if values.dim() else 0
    count = (1 + math.isqrt(1 + 8 * columns)) // 2
    if columns < 1 or count * (count - 1) // 2 != columns:
        raise DataError(
            f"{where}: expected values of the n(n − 1)/2 pairs of n classes (1, 3, 6, 10, …), got {columns}"
        )
    return count


def pairs_of(classes: int) -> list[tuple[int, int]]:
    """Return the pairs of classes in the order of the outputs."""
    return list(itertools.combinations(range(classes), 2))


def _count_votes(first: Tensor, pairs: list[tuple[int, int]], classes: int) -> Tensor:
    """Return the number of votes of each class, `(..., n)`; `first` is true for votes for the first class of a pair."""
    votes = torch.zeros(*first.shape[:-1], classes, dtype=torch.float64, device=first.device)
    index = torch.tensor(pairs, device=first.device)
    votes.index_add_(-1, index[:, 0], first.double())
    votes.index_add_(-1, index[:, 1], (~first).double())
    return votes


def one_vs_rest(values: Tensor) -> Tensor:
    """Return class values from pair values: votes plus a fraction below 1 from the sum of the values.

    For class i: the number of pairs won, plus s/(3(abs(s) + 1)), with s the sum of the values of the pairs of i, negative for i as
    the second class. Equals scikit-learn's `decision_function_shape="ovr"`; a value of zero is a vote for the first class.

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
        raise DataError("one_vs_rest: two classes have one value, that of class 1; expected 3, 6, 10, … values")
    pairs = pairs_of(count)
    signs = values.new_zeros(count, len(pairs))
    for column, (i, j) in enumerate(pairs):
        signs[i, column], signs[j, column] = 1.0, -1.0
    sums = values @ signs.T
    return _count_votes(values >= 0, pairs, count).to(values.dtype) + sums / (3 * (sums.abs() + 1))


def vote(values: Tensor, *, break_ties: bool = False) -> Tensor:
    """Return class labels from pair values, as libsvm: most votes, the lower class label for ties.

    A value of zero is a vote for the second class of the pair. For two classes: class 1 for a value of at least zero.

    Args:
        values: outputs of a model, `(..., n(n − 1)/2)`.
        break_ties: decide by the largest of `one_vs_rest` instead, as scikit-learn's `break_ties`.

    Example:
        >>> even = torch.tensor([[1.0, -1.0, 0.5]])
        >>> vote(even), vote(even, break_ties=True), vote(torch.tensor([[-0.3], [0.2]]))
        (tensor([0]), tensor([2]), tensor([0, 1]))
    """
    count = _classes(values, "vote")
    if count == 2:
        return (values[..., 0] >= 0).long()
    scores = one_vs_rest(values) if break_ties else _count_votes(values > 0, pairs_of(count), count)
    return scores.argmax(-1)


def support(model: Model) -> int:
    """Return the number of support vectors: centers with a non-zero weight.

    Raises:
        SpecError: a model without centers, such as a linear model.
    """
    heads = [head for _, head in model.heads()] if isinstance(model, Model) else []
    if len(heads) != 1 or not isinstance(heads[0].spec.expansion, KernelMap):
        actual = heads[0].spec.expansion if len(heads) == 1 else type(model).__name__
        raise SpecError(f"support: expected a model of one KernelMap, got {actual}; only centers are support vectors")
    return int((heads[0].weights().dense() != 0).any(0).any(0).sum())
