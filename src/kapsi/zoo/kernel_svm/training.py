"""Training of support vector machines, by the dual and by the primal problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from kapsi.calibrate import calibrate
from kapsi.errors import SpecError, check_choice, check_number
from kapsi.modules import Model
from kapsi.spec import ModelSpec
from kapsi.training.config import TrainConfig
from kapsi.training.engine import fit
from kapsi.training.losses import Hinge, SquaredHinge
from kapsi.training.solvers import LBFGS, AdamW
from kapsi.zoo.base import dense_rows
from kapsi.zoo.kernel_svm.convert import KernelOptions, machine
from kapsi.zoo.kernel_svm.data import ClassWeight, costs, gamma_of, targets_of
from kapsi.zoo.kernel_svm.dual import DualOptions, DualProgress, classification, regression, solve_dual
from kapsi.zoo.kernel_svm.model import Kernel, check_used, outputs_of, pairs_of

FIRST_EPOCHS = 200
"""Epochs of L-BFGS for the squared hinge."""

HINGE_EPOCHS = 2_000
"""Steps of AdamW for the plain hinge."""

LEARNING_SHARE = 0.05
"""Learning rate of AdamW, relative to the largest weight."""


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
    on_step: Callable[[DualProgress], None] | None = None,
) -> Model:
    """Return a support vector machine fitted in the dual: C-classification for class labels, ε-regression for real targets.

    Classification minimizes ‖w‖²/2 + Σ Cᵢ max(0, 1 − yᵢ f(xᵢ)), pair by pair for more than two classes, and regression
    ‖w‖²/2 + Σ Cᵢ max(0, abs(yᵢ − f(xᵢ)) − ε), with f(x) = ⟨w, φ(x)⟩ + b in the space of the kernel: scikit-learn's SVC and SVR.
    Cᵢ is C times the weights of the class and of the row.

    Outputs are as in `from_sklearn`; κ is x for `linear`, otherwise the kernel at the support vectors.

    Args:
        x: inputs, `(rows, m)`, finite.
        y: class labels 0 to n − 1, each with rows, or real targets of a floating-point type; `(rows,)`.
        kernel: `rbf`, `linear`, `polynomial` or `sigmoid` (indefinite: finds a local minimum).
        C: weight of the loss, above 0.
        gamma: γ, a number above 0, `scale` for 1/(m · variance of x) or `auto` for 1/m.
        degree, coef0: d and c₀.
        epsilon: ε of regression, in units of y, at least 0; None: 0.1.
        class_weight: weights of the classes, by label or in order; `balanced`: rows/(n · rows of the class).
        sample_weight: weights of the rows, at least 0.
        tolerance, iterations, cache: see `DualOptions`.
        on_step: callback after each working set.

    Raises:
        SpecError: options out of range.
        DataError: data with a wrong shape or non-finite values.

    Warns:
        UserWarning: the limit of steps was reached before the tolerance; the model is the last iterate.

    Example:
        >>> from kapsi.zoo.kernel_svm import support, vote
        >>> x = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
        >>> model = fit_dual(x, torch.tensor([0, 0, 1, 1]), C=100.0, gamma=1.0)
        >>> vote(model(x.double())), support(model)
        (tensor([0, 0, 1, 1]), 4)
    """
    where = "fit_dual"
    options = DualOptions(kernel, 1.0, degree, coef0, tolerance, iterations, cache)
    inputs = dense_rows(where, x)
    target, classes = targets_of(y, len(inputs), where)
    check_used(kernel, where, gamma=gamma != "scale", degree=degree != 3, coef0=coef0 != 0)
    options = replace(options, gamma=gamma_of(gamma, inputs, where))
    if classes and epsilon is not None:
        raise SpecError(
            f"{where}: epsilon is for regression, y are class labels; leave it out, or give y as floating-point"
        )
    cost = costs(where, C, target, classes, class_weight, sample_weight)
    every = np.arange(len(target))
    if not classes:
        tube = check_number(f"{where}(epsilon)", 0.1 if epsilon is None else epsilon, 0)
        problems = [(every, regression(target, cost, tube))]
    elif classes == 2:
        problems = [(every, classification(target == 1, cost))]
    else:
        parts = [(i, np.flatnonzero((target == i) | (target == j))) for i, j in pairs_of(classes)]
        problems = [(rows, classification(target[rows] == i, cost[rows])) for i, rows in parts]
    table, bias = np.zeros((len(problems), len(inputs))), np.zeros(len(problems))
    for number, (rows, problem) in enumerate(problems):
        solution = solve_dual(problem, inputs[torch.from_numpy(rows)], options, on_step)
        table[number, rows], bias[number] = solution.coefficients, solution.bias
    used = np.flatnonzero(table.any(0))
    used_kernel = KernelOptions(kernel, options.gamma, options.degree, options.coef0)
    return machine(used_kernel, inputs.numpy()[used], table[:, used], bias, explicit=False, where=where)


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

    Equals `kapsi.fit` with the L2 penalty 1/ΣCᵢ on W (none on the bias) after `kapsi.calibrate`: L-BFGS for the squared hinge,
    then AdamW on all rows for the plain hinge, since its kinks stop a line search. Two classes have one output with the loss of its
    margin; more classes have an output each, with the loss of the margin to the largest other output (Crammer and Singer). With
    the plain hinge and a large C the last digits take many epochs; use `fit_dual` instead.

    Args:
        x: inputs, `(rows, m)`, finite.
        y: class labels 0 to n − 1, each with rows.
        model: a `spec(kernel, m, n, decision="classes")`; ‖W‖ is the norm in the space of the kernel for all maps except `centers`.
        C, class_weight, sample_weight: see `fit_dual`.
        loss: `hinge` or `squared_hinge`.
        epochs: maximum number of epochs; None: 200 of five steps each for the squared hinge, 2,000 of one step for the plain hinge.
        seed: seed of the initial values, and of the frequencies of `RandomFourier`.

    Raises:
        SpecError: options out of range, or a model with other widths.
        DataError: data with a wrong shape or non-finite values.

    Example:
        >>> from kapsi.zoo.kernel_svm import spec
        >>> from sklearn.datasets import load_breast_cancer
        >>> x, y = load_breast_cancer(return_X_y=True)
        >>> x = (x - x.mean(0)) / x.std(0)
        >>> model = fit_primal(x, y, spec("rbf", 30, features="nystrom", count=60), C=1.0)
        >>> bool(((model(torch.tensor(x))[:, 0] > 0).numpy() == y).mean() > 0.97)
        True
    """
    where = "fit_primal"
    check_choice(f"{where}(loss)", loss, ("hinge", "squared_hinge"))
    if not isinstance(model, ModelSpec):
        raise SpecError(f"{where}: expected a ModelSpec, such as from kernel_svm.spec, got {type(model).__name__}")
    inputs = dense_rows(where, x)
    target, classes = targets_of(y, len(inputs), where)
    widths = (inputs.shape[1], outputs_of(classes, "classes"))
    if not classes or model.widths != widths:
        needed = f"the data need widths {widths}, the model has {model.widths}; use spec(…, decision='classes')"
        regression = "expected integer class labels, got real values; fit_dual has regression"
        raise SpecError(f"{where}: {needed if classes else regression}")
    cost = costs(where, C, target, classes, class_weight, sample_weight)
    machine = calibrate(Model(model, seed=seed, dtype=torch.float64), inputs)
    with torch.no_grad():  # initial values only change the time
        for name, parameter in machine.named_parameters():
            if name.endswith(("psi.matrix", "bias")):
                parameter.zero_()
    data = (inputs, torch.from_numpy(target).long(), torch.from_numpy(cost))
    plain = loss == "hinge"
    config = TrainConfig(loss=SquaredHinge(), solver=LBFGS(tolerance=0.0), l2=1 / float(cost.sum()), seed=seed)
    fit(machine, data, config, epochs=FIRST_EPOCHS if plain or epochs is None else epochs)
    if plain:
        # A step of AdamW has about the size of the learning rate.
        rate = LEARNING_SHARE * max(float(p.detach().abs().max()) for p in machine.parameters())
        rate = min(max(rate, 1e-6), 1e3)
        config = replace(config, loss=Hinge(), solver=AdamW(batch_size=None, learning_rate=rate))
        fit(machine, data, config, epochs=HINGE_EPOCHS if epochs is None else epochs)
    return machine
