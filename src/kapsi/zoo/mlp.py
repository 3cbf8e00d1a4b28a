"""Multilayer perceptrons: κ(x) = x, a dense ψ with a bias, π = 0, and the activation after each layer but the last."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
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
from kapsi.zoo.base import Case, Comparison

__all__ = ["PARITY", "from_sklearn", "from_torch", "spec"]

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
"""What activations of torch are called, and the options that they must have."""

OF_SKLEARN = {"identity": (), "logistic": ("sigmoid",), "tanh": ("tanh",), "relu": ("relu",)}


def spec(
    widths: Sequence[int],
    activation: Process | str | Sequence[Process | str] = "relu",
    *,
    bias: bool = True,
    dropout: float = 0.0,
) -> ModelSpec:
    """Return the specification of a multilayer perceptron: y = W₂ σ(W₁ x + b₁) + b₂, of any depth.

    Each layer is κ(x) = x, ψ = W, π = 0, with b as the bias of the head and σ as the processing of the output.

    Args:
        widths: numbers of features from the inputs to the outputs, at least two.
        activation: σ, by name or as a function, or several in order; none with `()`.
        bias: whether there are b.
        dropout: share of the hidden values that are zero in training, 0 to 1.

    Raises:
        SpecError: fewer than two widths, or an activation that there is not.

    Source: arXiv 2407.04819, "Unifying MLP".

    Example:
        >>> import kapsi as kp
        >>> print(kp.Model(spec([4, 8, 3], "tanh"), seed=0).summary())
                          in  D  out  expansion  reconciliation  remainder      parameters  frozen
        layers.0.heads.0   4  4    8  Identity   Dense           ZeroRemainder          40       -
        layers.1.heads.0   8  8    3  Identity   Dense           ZeroRemainder          27       -
        67 parameters, 67 of them trained; 0 values in buffers
    """
    if not isinstance(widths, Iterable):
        raise SpecError(f"mlp.spec(widths={widths!r}): expected numbers of features, such as [4, 8, 3]")
    if not isinstance(activation, Process | str | Iterable):
        raise SpecError(
            f"mlp.spec(activation={activation!r}): expected a name, a function or several of them; () is none"
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
class _Part:
    """A linear map, and the modules that follow it: as functions, and those that have tensors by their place."""

    linear: nn.Linear | None
    steps: list[Process] = field(default_factory=list)
    modules: dict[int, nn.Module] = field(default_factory=dict)


def from_torch(module: nn.Module) -> Model:
    """Return a `torch.nn.Sequential` of linear maps and activations as a model in float64, in the mode (training or not) of it.

    Linear maps become layers; what comes before the first one is processing of its inputs, what follows one processing of its
    outputs. Parameters that are not trained there are not trained here.

    | torch | kapsi |
    |---|---|
    | `Linear` | a layer: κ(x) = x, dense ψ, bias or none, π = 0 |
    | `ReLU`, `LeakyReLU`, `ELU`, `SELU`, `GELU`, `SiLU`, `Mish`, `Sigmoid`, `Tanh`, `Softplus`, `Softsign` | the activation |
    | `Dropout` | `dropout` |
    | `LayerNorm`, `BatchNorm1d` | `layer_norm`, `batch_norm`, with their tensors |
    | `Identity` | nothing |
    | `Sequential` inside | its modules |

    Args:
        module: a `Sequential`, or one `Linear`.

    Raises:
        SpecError: a module or an option of one that has no counterpart, a module or parameter that is there twice, widths that do
            not fit, hooks, no linear map, or weights that are not finite.

    Example:
        >>> import torch, kapsi as kp
        >>> theirs = torch.nn.Sequential(torch.nn.Linear(2, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()
        >>> ours = from_torch(theirs)
        >>> x = torch.ones(3, 2, dtype=torch.float64)
        >>> torch.equal(ours(x), theirs(x))
        True
    """
    first, *parts = _parts(module)
    if not parts:
        raise SpecError("from_torch: expected at least one torch.nn.Linear; there is none")
    widths = [_linear(parts[0]).in_features, *(_linear(part).out_features for part in parts)]
    layers = []
    for i, part in enumerate(parts):
        bias = _linear(part).bias is not None
        head: Any = HeadSpec(bias=bias, before=tuple(first.steps) if i == 0 else ())
        layers.append(LayerSpec(head, output=tuple(part.steps)))
    model = Model(ModelSpec(tuple(widths), tuple(layers)), seed=0, dtype=torch.float64, device="cpu")
    frozen: list[str] = []
    for i, part in enumerate(parts):
        where, layer = f"layers.{i}", model.layers[i]
        head = layer.heads[0]  # type: ignore[index]
        linear = _linear(part)
        pairs = [(f"{where}.heads.0.psi.matrix", head.psi["matrix"], linear.weight)]
        if linear.bias is not None:
            pairs.append((f"{where}.heads.0.bias", head.bias, linear.bias))
        for place, (name, ours, theirs) in enumerate(pairs):
            _copy(ours, theirs, f"from_torch: {'weight' if place == 0 else 'bias'} of linear map {i}")
            if not theirs.requires_grad:
                frozen.append(name)
        if i == 0:
            frozen += _copy_steps(head.before, first, f"{where}.heads.0.before")
        frozen += _copy_steps(layer.output, part, f"{where}.output")  # type: ignore[arg-type]
    if frozen:
        model.freeze(*frozen)
    return model.train(module.training)


def _linear(part: _Part) -> nn.Linear:
    if part.linear is None:
        raise SpecError("from_torch: expected a torch.nn.Linear")
    return part.linear


def _flat(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of sequences in order, with their names."""
    if "forward" in vars(module):
        raise SpecError(
            f"from_torch: {name} ({type(module).__name__}) has a forward of its own, which is not carried over"
        )
    for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        if getattr(module, kind):
            raise SpecError(
                f"from_torch: {name} ({type(module).__name__}) has hooks, which are not carried over; remove them first "
                "(spectral_norm and weight_norm are hooks: torch.nn.utils.remove_weight_norm)"
            )
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        for child_name, child in module._modules.items():  # `named_children` leaves out those that are there twice
            if child is not None:
                yield from _flat(child, f"{name}.{child_name}" if name != "module" else child_name)
    else:
        yield name, module


def _parts(module: nn.Module) -> list[_Part]:
    """Return what comes before the first linear map, and each linear map with what follows it."""
    if not isinstance(module, nn.Sequential | nn.Linear):
        raise SpecError(f"from_torch: expected a torch.nn.Sequential or Linear, got {type(module).__name__}")
    parts, seen, width = [_Part(None)], dict[int, str](), None
    for name, each in _flat(module, "module"):
        where = f"from_torch: {name} ({type(each).__name__})"
        tensors: list[Tensor] = list(each.parameters())
        for tensor in tensors:
            if id(tensor) in seen:
                raise SpecError(
                    f"{where}: shares a parameter with {seen[id(tensor)]}; a model of kapsi has no shared parameters, copy one"
                )
            seen[id(tensor)] = name
        if any(tensor.is_meta for tensor in (*tensors, *each.buffers())):
            raise SpecError(f"{where}: is on the meta device and has no values")
        if type(each) is nn.Linear:
            if width is not None and each.in_features != width:
                raise SpecError(f"{where}: takes {each.in_features} inputs, what comes before it has {width}")
            width = each.out_features
            parts.append(_Part(each))
            continue
        made, features = _step(each, where)
        if features is not None:
            if width is not None and features != width:
                raise SpecError(f"{where}: has {features} features, what comes before it has {width}")
            width = features
        if made is None:
            continue
        part = parts[-1]
        if tensors or list(each.buffers()):
            part.modules[len(part.steps)] = each
        part.steps.append(made)
    return parts


def _step(module: nn.Module, where: str) -> tuple[Process | None, int | None]:
    """Return the processing that a module of torch is, none for the identity, and its number of features where it has one."""
    kind = type(module)
    if kind is nn.Identity:
        return None, None
    if kind in ACTIVATIONS:
        name, options = ACTIVATIONS[kind]
        for option, value in options.items():
            given = getattr(module, option)
            if given != value:
                raise SpecError(f"{where}: {option}={given}; the activation {name!r} has {option}={value} only")
        return _named(name), None
    if isinstance(module, nn.Dropout) and kind is nn.Dropout:
        return Dropout(float(module.p)), None
    if isinstance(module, nn.LayerNorm) and kind is nn.LayerNorm:
        if len(module.normalized_shape) != 1:
            raise SpecError(
                f"{where}: normalizes over {len(module.normalized_shape)} axes; over one, the features, it can be carried over"
            )
        return LayerNorm(affine=module.elementwise_affine, epsilon=module.eps), module.normalized_shape[0]
    if isinstance(module, nn.BatchNorm1d) and kind is nn.BatchNorm1d:
        if not module.track_running_stats:
            raise SpecError(f"{where}: needs track_running_stats=True: kapsi evaluates with the running statistics")
        if module.momentum is None:
            raise SpecError(f"{where}: momentum=None, a cumulative average, is not carried over; give a number")
        made = BatchNorm(affine=module.affine, momentum=float(module.momentum), epsilon=module.eps)
        return made, module.num_features
    hint = ""
    if kind in (nn.Softmax, nn.LogSoftmax):
        hint = "; leave it out: kapsi.predict_proba and the loss cross_entropy take logits"
    elif kind is nn.Flatten:
        hint = "; leave it out and flatten the inputs to (rows, features)"
    known = ", ".join(sorted(each.__name__ for each in ACTIVATIONS))
    raise SpecError(
        f"{where}: has no counterpart{hint}; there are Linear, {known}, Dropout, LayerNorm, BatchNorm1d, Identity and "
        "Sequential, and no classes derived from them"
    )


def _named(name: str) -> Process:
    made: Any = lookup("process", name)()
    return made


def _copy(ours: Tensor, theirs: Tensor, where: str) -> None:
    values = theirs.detach()
    if values.is_complex() or not values.is_floating_point():
        raise SpecError(f"{where}: expected real numbers, got {values.dtype}")
    if not bool(values.isfinite().all()):
        raise SpecError(f"{where}: expected finite numbers")
    with torch.no_grad():
        ours.copy_(values)


def _copy_steps(ours: nn.Module, part: _Part, where: str) -> list[str]:
    """Copy the tensors of norms; return the names of the parameters that are not trained."""
    frozen = []
    for place, theirs in part.modules.items():
        mine = ours.get_submodule(str(place))
        there = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
        for name, tensor in {**dict(mine.named_parameters()), **dict(mine.named_buffers())}.items():
            if name not in there:  # the shift of a layer norm without one: zero, and it stays so
                frozen.append(f"{where}.{place}.{name}")
                continue
            if tensor.is_floating_point():
                _copy(tensor, there[name], f"from_torch: {name} of {type(theirs).__name__}")
            else:
                tensor.copy_(there[name])
            if isinstance(there[name], nn.Parameter) and not there[name].requires_grad:
                frozen.append(f"{where}.{place}.{name}")
    return frozen


# ------------------------------------------------------------------------------------------------ scikit-learn


def from_sklearn(estimator: Any) -> Model:
    """Return a fitted `MLPClassifier` or `MLPRegressor` of scikit-learn as a model in float64.

    Of classes the outputs are logits: one for two classes, or for each of several labels (`kapsi.predict_proba(model, x,
    "bernoulli")` are probabilities then), one for each of more than two classes, in the order of `classes_` (loss
    `cross_entropy`).

    Args:
        estimator: the fitted estimator.

    Raises:
        SpecError: another estimator, one that is not fitted, or one of counts (`loss="poisson"`), whose outputs go through exp.
    """
    from sklearn.exceptions import NotFittedError
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.utils.validation import check_is_fitted

    kind = type(estimator)
    if kind not in (MLPClassifier, MLPRegressor):
        raise SpecError(f"from_sklearn: expected MLPClassifier or MLPRegressor, got {kind.__name__}")
    where = f"from_sklearn({kind.__name__})"
    try:
        check_is_fitted(estimator)
    except NotFittedError:
        raise SpecError(f"{where}: it is not fitted; call fit(x, y) first") from None
    if estimator.out_activation_ not in ("identity", "logistic", "softmax"):
        raise SpecError(
            f"{where}: outputs go through {estimator.out_activation_}, of which there is no counterpart; "
            "loss='squared_error' can be carried over"
        )
    if estimator.activation not in OF_SKLEARN:
        raise SpecError(f"{where}: activation={estimator.activation!r}; choose from {', '.join(OF_SKLEARN)}")
    widths = [len(estimator.coefs_[0]), *(matrix.shape[1] for matrix in estimator.coefs_)]
    model = Model(spec(widths, OF_SKLEARN[estimator.activation]), seed=0, dtype=torch.float64, device="cpu")
    for (_, head), matrix, bias in zip(model.heads(), estimator.coefs_, estimator.intercepts_, strict=True):
        _copy(head.psi["matrix"], torch.tensor(np.asarray(matrix, dtype=np.float64).T), f"{where}.coefs_")
        if head.bias is not None:
            _copy(head.bias, torch.tensor(np.asarray(bias, dtype=np.float64)), f"{where}.intercepts_")
    return model.eval()


# ------------------------------------------------------------------------------------------------ comparisons


def _size(tensors: Any) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _difference(ours: Tensor, theirs: Tensor) -> float:
    return float(((ours - theirs).abs() / theirs.abs().clamp_min(1)).max())


def _digits(seed: int) -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))[:300]
    return torch.tensor(x[order] / 16), torch.tensor(y[order])


def _ordered(model: Model) -> list[nn.Parameter]:
    """Return the parameters in the order that torch has them in: before, weight, bias, output."""
    found: list[nn.Parameter] = []
    for (_, head), layer in zip(model.heads(), model.layers, strict=True):
        found += [*head.before.parameters(), *head.psi.parameters()]
        found += [] if head.bias is None else [head.bias]
        found += list(layer.output.parameters())  # type: ignore[union-attr]
    return found


def _of_torch(theirs: nn.Sequential, x: Tensor, y: Tensor) -> Comparison:
    """Compare outputs and the gradients of all parameters."""
    ours = from_torch(theirs)
    outputs, expected = ours(x), theirs(x)
    F.cross_entropy(outputs, y).backward()
    F.cross_entropy(expected, y).backward()
    deviation = _difference(outputs.detach(), expected.detach())
    mine, yours = _ordered(ours), list(theirs.parameters())
    for a, b in zip(mine, yours, strict=True):
        if a.grad is None or b.grad is None:
            raise SpecError("a parameter without a gradient")
        deviation = max(deviation, _difference(a.grad, b.grad))
    ours.zero_grad()
    return Comparison(deviation, _size(mine), _size(yours), ours.eval(), x, y, "cross_entropy")


def _sequential(seed: int) -> Comparison:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        theirs = nn.Sequential(
            nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 16, bias=False), nn.Tanh(), nn.Linear(16, 10)
        )
    return _of_torch(theirs.double(), *_digits(seed))


def _with_norms(seed: int) -> Comparison:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        theirs = nn.Sequential(
            nn.LayerNorm(64),
            nn.Linear(64, 32),
            nn.BatchNorm1d(32),
            nn.SiLU(),
            nn.Linear(32, 10),
        ).double()
        x, y = _digits(seed)
        theirs(x)  # running statistics
    return _of_torch(theirs.eval(), x, y)


def _classifier(seed: int, classes: int, activation: str) -> Comparison:
    from sklearn.neural_network import MLPClassifier

    x, y = _digits(seed)
    y = y % classes
    estimator = MLPClassifier((20, 10), activation, max_iter=30, random_state=seed, solver="lbfgs", tol=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # thirty steps do not converge
        estimator.fit(x.numpy(), y.numpy())
    model, loss = from_sklearn(estimator), "bernoulli" if classes == 2 else "cross_entropy"
    wanted = torch.tensor(estimator.predict_proba(x.numpy()))
    found = predict_proba(model, x, loss)
    y = y.double() if classes == 2 else y
    theirs = sum(each.size for each in (*estimator.coefs_, *estimator.intercepts_))
    return Comparison(_difference(found, wanted), _size(model.parameters()), theirs, model, x, y, loss)


def _regressor(seed: int) -> Comparison:
    from sklearn.datasets import load_diabetes
    from sklearn.neural_network import MLPRegressor

    x, y = load_diabetes(return_X_y=True)
    y = np.stack(((y - y.mean()) / y.std(), x[:, 0] * 20), 1)
    estimator = MLPRegressor(
        hidden_layer_sizes=(20, 10), activation="tanh", max_iter=30, random_state=seed, solver="lbfgs"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        estimator.fit(x, y)
    model = from_sklearn(estimator)
    with torch.no_grad():
        deviation = _difference(model(torch.tensor(x)), torch.tensor(estimator.predict(x)))
    theirs = sum(each.size for each in (*estimator.coefs_, *estimator.intercepts_))
    return Comparison(deviation, _size(model.parameters()), theirs, model, torch.tensor(x), torch.tensor(y), "mse")


def _two(seed: int) -> Comparison:
    return _classifier(seed, 2, "logistic")


def _ten(seed: int) -> Comparison:
    return _classifier(seed, 10, "relu")


PARITY: tuple[Case, ...] = (
    Case("MLP, torch Sequential", "outputs and gradients", "digits", "torch", 1e-12, _sequential),
    Case("MLP, torch Sequential with norms", "outputs and gradients", "digits", "torch", 1e-12, _with_norms),
    Case("MLP, MLPClassifier of two classes", "predict_proba", "digits, odd or even", "scikit-learn", 1e-9, _two),
    Case("MLP, MLPClassifier of ten classes", "predict_proba", "digits", "scikit-learn", 1e-9, _ten),
    Case("MLP, MLPRegressor", "predict", "diabetes, two targets", "scikit-learn", 1e-9, _regressor),
)
