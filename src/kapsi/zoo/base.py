"""Shared parts of the zoo: parity cases, their data and differences, and checks of the converters and fits."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kapsi.errors import DataError, KapsiError, SpecError
from kapsi.modules import Head, Model
from kapsi.reconciliation import Dense
from kapsi.remainder import ZeroRemainder
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec

# ------------------------------------------------------------------------------------------------ data and estimators


def tensor_of(values: Any) -> Tensor:
    """Return numbers as a tensor of the same type and device, without a gradient.

    Reversed, read-only and foreign-endian arrays, refused by torch or a cause of warnings, are copied.

    Raises:
        TypeError, ValueError: not numbers, or complex numbers.
    """
    if isinstance(values, Tensor):
        tensor = values.detach()
    else:
        array = np.asarray(values)
        if min(array.strides, default=0) < 0 or not array.dtype.isnative or not array.flags.writeable:
            array = array.astype(array.dtype.newbyteorder("="), order="C")
        tensor = torch.as_tensor(array)
    if tensor.is_complex():
        raise TypeError("complex numbers")
    return tensor


def finite_tensor(values: Any, where: str) -> Tensor:
    """Return finite numbers as a dense float64 tensor on the CPU.

    Args:
        values: a dense array, tensor or nested list.
        where: start of the message, with the name of the argument.
    """
    try:
        tensor = tensor_of(values).to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(f"{where}: expected numbers, got {type(values).__name__}") from None
    if not bool(tensor.isfinite().all()):
        raise DataError(f"{where}: expected finite numbers")
    return tensor


def dense_rows(where: str, x: Any, inputs: int | None = None) -> Tensor:
    """Return inputs `(rows, m)` with at least one row, finite, in float64 on the CPU; `inputs` is m, if known."""
    if hasattr(x, "toarray") or (isinstance(x, Tensor) and x.layout != torch.strided):
        dense = "x.to_dense()" if isinstance(x, Tensor) else "x.toarray()"
        raise DataError(f"{where}: expected dense inputs; use {dense}")
    rows = finite_tensor(x, f"{where}: x").contiguous()
    if rows.dim() != 2 or not rows.numel() or inputs not in (None, rows.shape[1]):
        shape = f"(rows, {inputs or 'm'})"
        raise DataError(f"{where}: expected x of shape {shape} with at least one row, got {tuple(rows.shape)}")
    return rows


def row_weights(where: str, weight: Any, rows: int) -> Tensor:
    """Return row weights `(rows,)` in float64, by default ones."""
    if weight is None:
        return torch.ones(rows, dtype=torch.float64)
    values = finite_tensor(weight, f"{where}: sample_weight")
    if values.shape != (rows,) or bool((values < 0).any()) or not float(values.sum()) > 0:
        got = f"of shape {tuple(values.shape)}" if values.shape != (rows,) else values.tolist()[:8]
        raise DataError(f"{where}: expected sample_weight as {rows} numbers, not negative and not all zero, got {got}")
    return values


def float64(values: Any) -> Tensor:
    """Return an estimator's values, a dense array or SciPy sparse matrix, as a new float64 tensor."""
    dense = values.toarray() if hasattr(values, "toarray") else values
    return torch.tensor(np.ascontiguousarray(dense, dtype=np.float64))


def check_estimator(estimator: Any, classes: Iterable[type], where: str, hint: str = "") -> str:
    """Raise a `SpecError` unless a scikit-learn estimator is fitted and its class is exactly one of `classes`.

    Returns:
        `where` with the name of the class, for further messages.
    """
    from sklearn.exceptions import NotFittedError
    from sklearn.utils.validation import check_is_fitted

    classes = tuple(classes)
    name = type(estimator).__name__
    if type(estimator) not in classes:
        if isinstance(estimator, classes):
            hint = "a derived class may compute something else"
        names = ", ".join(kind.__name__ for kind in classes)
        raise SpecError(f"{where}: expected {names}; got {name}{hint and f'; {hint}'}")
    where = f"{where}({name})"
    try:
        check_is_fitted(estimator)
    except NotFittedError:
        raise SpecError(f"{where}: the {name} is not fitted; call fit first") from None
    return where


def forbid(where: str, *problems: tuple[bool, str], error: type[KapsiError] = SpecError) -> None:
    """Raise an error with the message of the first problem present."""
    for present, text in problems:
        if present:
            raise error(f"{where}: {text}")


# ------------------------------------------------------------------------------------------------ models


def one_head(head: HeadSpec, in_features: int, out_features: int) -> ModelSpec:
    """Return the specification of a model of one layer with one head."""
    return ModelSpec((in_features, out_features), (LayerSpec((head,)),))


def model_of(spec: ModelSpec, bias: Tensor | None = None, **roles: dict[str, Any]) -> Model:
    """Return a one-head model in float64 on the CPU, in evaluation mode.

    Args:
        spec: specification with one layer and head.
        bias: bias of the head, finite, `(n,)`.
        **roles: tensors by role (`expansion`, `reconciliation`, `remainder`) and name.
    """
    model = Model(spec, seed=0, dtype=torch.float64, device="cpu")
    ((_, head),) = model.heads()
    for role, tensors in roles.items():
        head.assign(role, **tensors)  # type: ignore[arg-type]
    if bias is not None and head.bias is not None:
        with torch.no_grad():
            head.bias.copy_(finite_tensor(bias, "the intercept"))
    return model.eval()


def plain_head(model: Any) -> Head | None:
    """Return the head of a model of one layer and head, y = W κ(x) + b without processing after κ; None for other models."""
    heads = [head for _, head in model.heads()] if isinstance(model, Model) else []
    spec = heads[0].spec if len(heads) == 1 else HeadSpec(channels=2)
    linear = isinstance(spec.reconciliation, Dense) and isinstance(spec.remainder, ZeroRemainder) and spec.channels == 1
    return heads[0] if linear and not spec.after and not model.spec.resolved()[0][2].output else None


# ------------------------------------------------------------------------------------------------ parity


class Comparison(NamedTuple):
    """Result of a parity case.

    Attributes:
        deviation: largest absolute difference; relative for values above 1.
        ours: number of values of the kapsi model set by the conversion, parameters and buffers.
        theirs: number of values of the other model.
        model: the kapsi model.
        x: inputs for the model, some rows.
        y: targets for training with `loss`.
        loss: name of a loss of `kapsi.fit`.
    """

    deviation: float
    ours: int
    theirs: int
    model: Model
    x: Tensor
    y: Tensor
    loss: str


@dataclass(frozen=True)
class Case:
    """A comparison with another library.

    Args:
        model: name of the model, such as `SVC, RBF kernel`.
        quantity: compared quantity, such as `decision_function`.
        data: name of the data set.
        package: distribution of the other library, such as `scikit-learn`.
        tolerance: largest allowed deviation.
        compare: builds and compares both models for a seed (0 in tables); imports the other library on the call.
    """

    model: str
    quantity: str
    data: str
    package: str
    tolerance: float
    compare: Callable[[int], Comparison]


def cases() -> list[Case]:
    """Return the parity cases of all families: their tuples `PARITY`."""
    import kapsi.zoo as zoo

    collected: list[Case] = []
    for module in sorted(pkgutil.iter_modules(zoo.__path__), key=lambda module: module.name):
        collected += getattr(importlib.import_module(f"kapsi.zoo.{module.name}"), "PARITY", ())
    return collected


def deviation(ours: Any, theirs: Any) -> float:
    """Return the largest absolute difference; relative for values above 1."""
    a, b = (torch.as_tensor(values).detach().double() for values in (ours, theirs))
    return float(((a - b.reshape(a.shape)).abs() / b.reshape(a.shape).abs().clamp_min(1)).max())


def sizes(model: nn.Module) -> int:
    """Return the number of values of a model, parameters and buffers."""
    return sum(tensor.numel() for tensor in model.state_dict().values())


def sklearn_rows(name: str, seed: int, rows: int | None = None, *, scaled: bool = False) -> tuple[Any, Any]:
    """Return a scikit-learn data set in random order.

    Args:
        name: `iris`, `digits`, …
        seed: seed of the row order.
        rows: number of rows; None: all.
        scaled: standardize the inputs over all rows.
    """
    from sklearn import datasets

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))[:rows]
    if scaled:
        x = (x - x.mean(0)) / np.where(x.std(0) > 0, x.std(0), 1)
    return x[order], y[order]
