"""Set grids, centers and other buffers of expansions from data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from kapsi.arrays import as_dense
from kapsi.errors import DataError, SpecError
from kapsi.hooks import hooked_inputs
from kapsi.modules import ExpansionModule, Head, Layer, Model, check_layout

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def calibrate(model: M, x: Any, y: Any = None) -> M:
    """Set grids, centers and other buffers of all expansions from data, layer by layer, in place.

    Each layer is calibrated on the outputs of the calibrated layers before. These outputs grow and move during training, so the
    ranges of hidden layers (splines, radial bases, wavelets) are three times as wide as the outputs of the untrained layers, and
    at least as wide as before. Forward pre-hooks of the model, its layers and heads change the inputs first. The function of the
    model may change; `kapsi.zoo.kan.update_grid` keeps it.

    Args:
        model: a model, layer, head or expansion module.
        x: inputs, `(rows, m)` or with more leading axes, or sparse as in `Head.forward`; at least one row, finite; a tensor, an
            array or a data frame.
        y: labels or targets of the rows, for expansions fitted with labels.

    Returns:
        The same model.

    Raises:
        SpecError: not a model, or a model without values.
        DataError: no rows, a wrong number of columns, or values other than finite numbers.

    Example:
        >>> import torch, kapsi as kp
        >>> model = kp.Model(kp.rpn([1, 1], kp.BSpline()), seed=0)
        >>> kp.calibrate(model, torch.tensor([[0.0], [4.0], [10.0]])).layers[0].heads[0].kappa["range"].tolist()
        [[0.0], [10.0]]
    """
    if not isinstance(model, Model | Layer | Head | ExpansionModule):
        hint = "; give the model that was compiled or wrapped" if isinstance(model, nn.Module) else ""
        raise SpecError(f"calibrate: expected a kapsi Model, Layer or Head, got {type(model).__name__}{hint}")
    x = _inputs(model, x)
    if y is not None:
        y = _targets(y, x)
    with _all_or_nothing(model):
        x = hooked_inputs(model, x) if isinstance(model, Model) else x
        layers: list[nn.Module] = [*model.check_layers("calibrate")] if isinstance(model, Model) else [model]
        moves = False  # whether training changes the inputs of the layer
        for i, layer in enumerate(layers):
            inputs = hooked_inputs(layer, x)
            if isinstance(layer, ExpansionModule):
                layer.kappa.assign(layer.expansion.calibrate(inputs, layer.kappa, y), "calibrate")
            for head in layer.check_heads("calibrate: layer") if isinstance(layer, Layer) else [layer]:
                if isinstance(head, Head):
                    _calibrate_head(head, inputs if head is layer else hooked_inputs(head, inputs), y, hidden=moves)
            moves = moves or any(parameter.requires_grad for parameter in layer.parameters())
            if i + 1 < len(layers):  # the outputs of the last layer are not needed
                x = layer(x)
    return model


def _calibrate_head(head: Head, x: Tensor, y: Tensor | None, *, hidden: bool) -> None:
    if x.layout != torch.strided:
        head.check_inputs(x)
    if not head._owner:
        if x.shape[-1] != head.in_features:
            raise DataError(f"calibrate: expected inputs of shape (rows, {head.in_features}), got {tuple(x.shape)}")
        kappa = head.spec.expansion
        new = (kappa.calibrate_hidden if hidden else kappa.calibrate)(head.before(x), head.kappa, y)
        head.kappa.assign(new, "calibrate")
    pi = head.spec.remainder
    head.pi.assign((pi.calibrate_hidden if hidden else pi.calibrate)(x, head.pi, y), "calibrate")


@contextmanager
def _all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Evaluate a model in evaluation mode; after an exception all tensors have their old values."""
    training = model.training
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.eval()
    try:
        yield
    except Exception:
        model.load_state_dict(before)
        raise
    finally:
        model.train(training)


def _inputs(model: nn.Module, x: Any) -> Tensor:
    """Return inputs `(rows, m)` on the device and in the type of a model, after a check."""
    if not (isinstance(x, Tensor) and x.is_floating_point()):
        x = as_dense(x, "inputs", "calibrate").double()
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        raise SpecError("calibrate: the model is on the meta device and has no values")
    like = next((tensor for tensor in tensors if tensor.is_floating_point()), x)
    x = x.to(like.device, model.input_dtype(x.dtype) if isinstance(model, Model) else like.dtype)
    if x.dim() == 0 or x.numel() == 0:
        raise DataError(f"calibrate: expected inputs of shape (rows, m) with at least one row, got {tuple(x.shape)}")
    sparse = x.layout != torch.strided
    if sparse:
        check_layout("calibrate", x, x.shape[-1], not isinstance(model, ExpansionModule))
    if not bool(torch.isfinite(x.values() if sparse else x).all()):
        raise DataError("calibrate: the inputs must be finite")
    return x if sparse else x.reshape(-1, x.shape[-1])


def _targets(y: Any, x: Tensor) -> Tensor:
    """Return targets on the device of the inputs, after a check."""
    y = as_dense(y, "targets", "calibrate").to(x.device)
    if y.shape[:1] != x.shape[:1]:
        raise DataError(f"calibrate: {x.shape[0]:,} rows of x and {y.shape[0] if y.dim() else 0:,} of y")
    return y
