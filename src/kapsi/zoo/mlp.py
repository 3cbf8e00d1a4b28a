"""Multilayer perceptrons: κ(x) = x, a dense ψ with a bias, π = 0, and an activation after each layer except the last."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kapsi.errors import SpecError
from kapsi.function import lookup
from kapsi.modules import Model
from kapsi.process import BatchNorm, Dropout, LayerNorm, Process
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec
from kapsi.training.prediction import predict_proba
from kapsi.zoo.base import Case, Comparison, check_estimator, deviation, finite_tensor, float64, forbid, sklearn_rows

ACTIVATIONS: dict[type[nn.Module], tuple[str, dict[str, Any]]] = {
    nn.ReLU: ("relu", {}),
    nn.LeakyReLU: ("leaky_relu", {"negative_slope": 0.01}),
    nn.ELU: ("elu", {"alpha": 1.0}),
    nn.SELU: ("selu", {}),
    nn.GELU: ("gelu", {"approximate": "none"}),
    nn.SiLU: ("silu", {}),
    nn.Mish: ("mish", {}),
    nn.Sigmoid: ("sigmoid", {}),
    nn.Tanh: ("tanh", {}),
    nn.Softplus: ("softplus", {"beta": 1.0, "threshold": 20.0}),
    nn.Softsign: ("softsign", {}),
}
"""kapsi names of the torch activations, and their required options."""

OF_SKLEARN = {"identity": (), "logistic": ("sigmoid",), "tanh": ("tanh",), "relu": ("relu",)}


def spec(
    widths: Sequence[int],
    activation: Process | str | Sequence[Process | str] = "relu",
    *,
    bias: bool = True,
    dropout: float = 0.0,
) -> ModelSpec:
    """Return the specification of a multilayer perceptron: y = W₂ σ(W₁ x + b₁) + b₂, of any depth.

    Each layer is κ(x) = x, ψ = W, π = 0, with b as the bias of the head and σ as the processing of its output.

    Args:
        widths: numbers of features from the inputs to the outputs, at least two.
        activation: σ, by name or as a function, or several in order; () for none.
        bias: add the biases b.
        dropout: share of the hidden values set to zero in training, 0 to 1.

    Source: arXiv 2407.04819, "Unifying MLP".

    Example:
        >>> import kapsi as kp
        >>> print(kp.Model(spec([4, 8, 3], "tanh"), seed=0).summary())
                          in  D  out  expansion  reconciliation  remainder  parameters  frozen
        layers.0.heads.0   4  4    8  identity   dense           zero               40       -
        layers.1.heads.0   8  8    3  identity   dense           zero               27       -
        67 parameters, 67 trained; 0 values in buffers
    """
    if not isinstance(widths, Iterable):
        raise SpecError(f"mlp.spec(widths={widths!r}): expected numbers of features, such as [4, 8, 3]")
    if not isinstance(activation, Process | str | Iterable):
        raise SpecError(
            f"mlp.spec(activation={activation!r}): expected a name, a function or a sequence of both; () for none"
        )
    steps: Any = (activation,) if isinstance(activation, Process | str) else tuple(activation)
    if dropout:
        steps = (*steps, Dropout(dropout))
    head: Any = HeadSpec(bias=bias)
    count = len(widths) - 1
    layers = (*(LayerSpec(head, output=steps) for _ in range(count - 1)), LayerSpec(head))
    return ModelSpec(tuple(widths), layers)


# ------------------------------------------------------------------------------------------------ torch


@dataclass
class _LinearBlock:
    """A linear map (None: the inputs) and the modules behind it.

    Attributes:
        linear: the map.
        steps: the modules as processing functions.
        modules: modules with tensors, by position among the steps.
    """

    linear: nn.Linear | None
    steps: list[Process] = field(default_factory=list)
    modules: dict[int, nn.Module] = field(default_factory=dict)


def from_torch(module: nn.Module) -> Model:
    """Return a `torch.nn.Sequential` of linear maps and activations as a model in float64, in the same mode (training or not).

    Linear maps become layers; modules before the first map process its inputs, modules behind a map process its outputs. Frozen
    parameters stay frozen.

    | torch | kapsi |
    |---|---|
    | `Linear` | a layer: κ(x) = x, dense ψ, optional bias, π = 0 |
    | `ReLU`, `LeakyReLU`, `ELU`, `SELU`, `GELU`, `SiLU`, `Mish`, `Sigmoid`, `Tanh`, `Softplus`, `Softsign` | the activation |
    | `Dropout` | `dropout` |
    | `LayerNorm`, `BatchNorm1d` | `layer_norm`, `batch_norm`, with their tensors |
    | `Identity` | nothing |
    | `Sequential` inside | its modules |

    Args:
        module: a `Sequential`, or a `Linear`.

    Raises:
        SpecError: a module or option without counterpart, a shared module or parameter, widths that do not match, hooks, or
            no linear map.
        DataError: weights that are not finite.

    Example:
        >>> import torch, kapsi as kp
        >>> theirs = torch.nn.Sequential(torch.nn.Linear(2, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()
        >>> ours = from_torch(theirs)
        >>> x = torch.ones(3, 2, dtype=torch.float64)
        >>> torch.equal(ours(x), theirs(x))
        True
    """
    first, *parts = _parts(module)
    linears = [part.linear for part in parts if part.linear is not None]
    if not linears:
        raise SpecError("from_torch: expected at least one torch.nn.Linear; there is none")
    widths = (linears[0].in_features, *(linear.out_features for linear in linears))
    layers = []
    for i, (part, linear) in enumerate(zip(parts, linears, strict=True)):
        head = HeadSpec(bias=linear.bias is not None, before=tuple(first.steps) if i == 0 else ())
        layers.append(LayerSpec((head,), output=tuple(part.steps)))
    model = Model(ModelSpec(widths, tuple(layers)), seed=0, dtype=torch.float64, device="cpu")
    frozen: list[str] = []
    for i, ((_, head_module), part, linear) in enumerate(zip(model.heads(), parts, linears, strict=True)):
        where = f"layers.{i}"
        pairs = [("psi.matrix", head_module.psi["matrix"], linear.weight)]
        if head_module.bias is not None:
            pairs.append(("bias", head_module.bias, linear.bias))
        for name, ours, theirs in pairs:
            _copy(ours, theirs, f"from_torch: {name.replace('psi.matrix', 'weight')} of linear map {i}")
            if not theirs.requires_grad:
                frozen.append(f"{where}.heads.0.{name}")
        if i == 0:
            frozen += _copy_steps(head_module.before, first, f"{where}.heads.0.before")
        frozen += _copy_steps(model.layers[i].output, part, f"{where}.output")  # type: ignore[arg-type]
    if frozen:
        model.freeze(*frozen)
    return model.train(module.training)


def _flat(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of nested sequences in order, with their names."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    forbid(
        f"from_torch: {name} ({type(module).__name__})",
        ("forward" in vars(module), "overrides forward, lost by a conversion"),
        (
            any(getattr(module, kind) for kind in kinds),
            "has hooks, lost by a conversion; remove them first (spectral_norm and weight_norm are hooks: "
            "torch.nn.utils.remove_weight_norm)",
        ),
    )
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        for child_name, child in module._modules.items():  # `named_children` skips repeated modules
            if child is not None:
                yield from _flat(child, f"{name}.{child_name}" if name != "module" else child_name)
    else:
        yield name, module


def _parts(module: nn.Module) -> list[_LinearBlock]:
    """Return the modules before the first linear map, then each linear map with the modules behind it."""
    if not isinstance(module, nn.Sequential | nn.Linear):
        raise SpecError(f"from_torch: expected a torch.nn.Sequential or Linear, got {type(module).__name__}")
    parts, owners, width = [_LinearBlock(None)], dict[int, str](), None
    for name, child in _flat(module, "module"):
        where = f"from_torch: {name} ({type(child).__name__})"
        tensors: list[Tensor] = list(child.parameters())
        shared = next((owners[id(tensor)] for tensor in tensors if id(tensor) in owners), None)
        forbid(
            where,
            (shared is not None, f"shares a parameter with {shared}; kapsi has no shared parameters, use a copy"),
            (
                any(tensor.is_meta for tensor in (*tensors, *child.buffers())),
                "is on the meta device and has no values",
            ),
        )
        owners |= {id(tensor): name for tensor in tensors}
        step, features = (None, child.in_features) if type(child) is nn.Linear else _step(child, where)
        if features is not None:
            if width is not None and features != width:
                raise SpecError(f"{where}: expects {features} features, the module before has {width}")
            width = features
        if type(child) is nn.Linear:
            width = child.out_features
            parts.append(_LinearBlock(child))
        elif step is not None:
            if tensors or list(child.buffers()):
                parts[-1].modules[len(parts[-1].steps)] = child
            parts[-1].steps.append(step)
    return parts


def _step(module: nn.Module, where: str) -> tuple[Process | None, int | None]:
    """Return a torch module as processing (None for the identity), and its number of features if fixed."""
    kind = type(module)
    if kind is nn.Identity:
        return None, None
    if kind in ACTIVATIONS:
        name, options = ACTIVATIONS[kind]
        for option, value in options.items():
            actual = getattr(module, option)
            if actual != value:
                raise SpecError(f"{where}: {option}={actual}; the activation {name!r} has {option}={value} only")
        return _activation(name), None
    if isinstance(module, nn.Dropout) and kind is nn.Dropout:
        return Dropout(float(module.p)), None
    if isinstance(module, nn.LayerNorm) and kind is nn.LayerNorm:
        axes = len(module.normalized_shape)
        forbid(where, (axes != 1, f"normalizes over {axes} axes; only a norm over one axis, the features, converts"))
        return LayerNorm(affine=module.elementwise_affine, epsilon=module.eps), module.normalized_shape[0]
    if isinstance(module, nn.BatchNorm1d) and kind is nn.BatchNorm1d:
        forbid(
            where,
            (
                not module.track_running_stats,
                "needs track_running_stats=True: kapsi evaluates with the running statistics",
            ),
            (module.momentum is None, "momentum=None, a cumulative average, is not supported; use a number"),
        )
        momentum = float(module.momentum or 0.0)
        return BatchNorm(affine=module.affine, momentum=momentum, epsilon=module.eps), module.num_features
    hint = ""
    if kind in (nn.Softmax, nn.LogSoftmax):
        hint = "; leave it out: kapsi.predict_proba and the loss cross_entropy take logits"
    elif kind is nn.Flatten:
        hint = "; leave it out and flatten the inputs to (rows, features)"
    known = ", ".join(sorted(activation.__name__ for activation in ACTIVATIONS))
    raise SpecError(
        f"{where}: has no counterpart{hint}; supported are Linear, {known}, Dropout, LayerNorm, BatchNorm1d, Identity and "
        "Sequential, without derived classes"
    )


def _activation(name: str) -> Process:
    process: Any = lookup("process", name)()
    return process


def _copy(ours: Tensor, theirs: Tensor, where: str) -> None:
    if not theirs.is_floating_point():
        raise SpecError(f"{where}: expected real numbers, got {theirs.dtype}")
    with torch.no_grad():
        ours.copy_(finite_tensor(theirs, where))


def _copy_steps(ours: nn.Module, part: _LinearBlock, where: str) -> list[str]:
    """Copy the tensors of norms; return the names of the frozen parameters."""
    frozen = []
    for position, theirs in part.modules.items():
        source = theirs.state_dict(keep_vars=True)
        for name, tensor in ours.get_submodule(str(position)).state_dict(keep_vars=True).items():
            value = source.get(name)
            if value is None or (isinstance(value, nn.Parameter) and not value.requires_grad):
                frozen.append(f"{where}.{position}.{name}")
            if value is None:  # a layer norm without a shift: fixed at zero
                continue
            if tensor.is_floating_point():
                _copy(tensor, value, f"from_torch: {name} of {type(theirs).__name__}")
            else:
                tensor.copy_(value)
    return frozen


# ------------------------------------------------------------------------------------------------ scikit-learn


def from_sklearn(estimator: Any) -> Model:
    """Return a fitted scikit-learn `MLPClassifier` or `MLPRegressor` as a model in float64.

    Outputs of classifiers are logits: a single output for two classes, or an output for each of several labels (probabilities by
    `kapsi.predict_proba(model, x, "bernoulli")`); else one output per class, in the order of `classes_` (loss `cross_entropy`).

    Args:
        estimator: the fitted estimator.

    Raises:
        SpecError: an unsupported or unfitted estimator, or `loss="poisson"`, with outputs through exp.
    """
    from sklearn.neural_network import MLPClassifier, MLPRegressor

    where = check_estimator(estimator, (MLPClassifier, MLPRegressor), "from_sklearn")
    output = estimator.out_activation_
    forbid(
        where,
        (
            output not in ("identity", "logistic", "softmax"),
            f"outputs go through {output}, without counterpart in kapsi; loss='squared_error' converts",
        ),
        (
            estimator.activation not in OF_SKLEARN,
            f"activation={estimator.activation!r}; choose from {', '.join(OF_SKLEARN)}",
        ),
    )
    widths = [len(estimator.coefs_[0]), *(matrix.shape[1] for matrix in estimator.coefs_)]
    model = Model(spec(widths, OF_SKLEARN[estimator.activation]), seed=0, dtype=torch.float64, device="cpu")
    for (_, head), matrix, bias in zip(model.heads(), estimator.coefs_, estimator.intercepts_, strict=True):
        _copy(head.psi["matrix"], float64(matrix).T, f"{where}.coefs_")
        if head.bias is not None:
            _copy(head.bias, float64(bias), f"{where}.intercepts_")
    return model.eval()


# ------------------------------------------------------------------------------------------------ parity


def _size(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _digits(seed: int) -> tuple[Tensor, Tensor]:
    x, y = sklearn_rows("digits", seed, 300)
    return torch.tensor(x / 16), torch.tensor(y)


def _ordered(model: Model) -> list[nn.Parameter]:
    """Return the parameters in torch's order: before, weight, bias, output."""
    ordered: list[nn.Parameter] = []
    for (_, head), layer in zip(model.heads(), model.layers, strict=True):
        ordered += [*head.before.parameters(), *head.psi.parameters()]
        ordered += [] if head.bias is None else [head.bias]
        ordered += list(layer.output.parameters())  # type: ignore[union-attr]
    return ordered


def _sequential(seed: int, *, build: Callable[[], nn.Sequential]) -> Comparison:
    """Compare outputs and the gradients of all parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        theirs = build().double()
    x, y = _digits(seed)
    theirs(x)  # sets the running statistics of norms
    theirs.eval()
    ours = from_torch(theirs)
    outputs, expected = ours(x), theirs(x)
    F.cross_entropy(outputs, y).backward()
    F.cross_entropy(expected, y).backward()
    difference = deviation(outputs, expected)
    ordered, parameters = _ordered(ours), list(theirs.parameters())
    for a, b in zip(ordered, parameters, strict=True):
        difference = max(difference, deviation(a.grad, b.grad))
    ours.zero_grad()
    return Comparison(difference, _size(ordered), _size(parameters), ours.eval(), x, y, "cross_entropy")


def _plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 16, bias=False), nn.Tanh(), nn.Linear(16, 10))


def _with_norms() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.SiLU(), nn.Linear(32, 10))


def _fitted(estimator: Any, x: Any, y: Any) -> tuple[Model, int]:
    """Fit an estimator; return it as a model, and its number of values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # thirty steps do not converge
        estimator.fit(x, y)
    return from_sklearn(estimator), sum(array.size for array in (*estimator.coefs_, *estimator.intercepts_))


def _classifier(seed: int, *, classes: int, activation: str) -> Comparison:
    from sklearn.neural_network import MLPClassifier

    x, y = _digits(seed)
    y = y % classes
    estimator = MLPClassifier((20, 10), activation, max_iter=30, random_state=seed, solver="lbfgs", tol=0.1)
    model, theirs = _fitted(estimator, x.numpy(), y.numpy())
    loss = "bernoulli" if classes == 2 else "cross_entropy"
    difference = deviation(predict_proba(model, x, loss), estimator.predict_proba(x.numpy()))
    y = y.double() if classes == 2 else y
    return Comparison(difference, _size(model.parameters()), theirs, model, x, y, loss)


def _regressor(seed: int) -> Comparison:
    from sklearn.datasets import load_diabetes
    from sklearn.neural_network import MLPRegressor

    x, y = load_diabetes(return_X_y=True)
    y = np.stack(((y - y.mean()) / y.std(), x[:, 0] * 20), 1)
    estimator = MLPRegressor(
        hidden_layer_sizes=(20, 10), activation="tanh", max_iter=30, random_state=seed, solver="lbfgs"
    )
    model, theirs = _fitted(estimator, x, y)
    inputs = torch.tensor(x)
    difference = deviation(model(inputs), estimator.predict(x))
    return Comparison(difference, _size(model.parameters()), theirs, model, inputs, torch.tensor(y), "mse")


_two, _ten = (
    partial(_classifier, classes=classes, activation=name) for classes, name in ((2, "logistic"), (10, "relu"))
)
_GRADIENTS = "outputs and gradients"
PARITY: tuple[Case, ...] = (
    Case("MLP, torch Sequential", _GRADIENTS, "digits", "torch", 1e-12, partial(_sequential, build=_plain)),
    Case(
        "MLP, torch Sequential with norms",
        _GRADIENTS,
        "digits",
        "torch",
        1e-12,
        partial(_sequential, build=_with_norms),
    ),
    Case("MLP, MLPClassifier of two classes", "predict_proba", "digits, odd or even", "scikit-learn", 1e-9, _two),
    Case("MLP, MLPClassifier of ten classes", "predict_proba", "digits", "scikit-learn", 1e-9, _ten),
    Case("MLP, MLPRegressor", "predict", "diabetes, two targets", "scikit-learn", 1e-9, _regressor),
)
