"""The same values from a function and from its reference, side by side."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

import kapsi as kp
from kapsi.process import pipeline
from kapsi.testing import inputs


class Case(NamedTuple):
    """One comparison: what it is, our values, and those of the reference."""

    name: str
    ours: Tensor
    reference: ndarray


def cases(function: Any) -> Iterator[Case]:
    """Yield comparisons of a function with its reference, all in float64."""
    from references import REFERENCES  # this file is part of the package

    values = REFERENCES[function.role][function.name].values
    for name, ours, reference in globals()[f"_{function.role}"](function, values):
        yield Case(name, ours.detach(), np.ascontiguousarray(reference, dtype=np.float64))


def deviation(case: Case) -> float:
    """Return the largest difference, relative to the reference where that is above one."""
    difference = np.abs(case.ours.numpy() - case.reference) / np.maximum(1.0, np.abs(case.reference))
    return float(difference.max()) if difference.size else 0.0


def arrays(store: Any) -> Any:
    """Return the tensors of a store as arrays, nested as they are."""
    if isinstance(store, Tensor):
        return store.detach().numpy()
    declared = {name: store[name] for name in store._declared}
    values = {name: arrays(value) for name, value in declared.items() if isinstance(value, Tensor | kp.Store)}
    modules = {name: value for name, value in declared.items() if isinstance(value, kp.Model)}
    return values | {name: arrays_of_module(module) for name, module in modules.items()}


def arrays_of_module(module: Any) -> Any:
    """Return the tensors of a module and of its parts as arrays, nested as they are."""
    parts = module.named_children()
    inner = {name: arrays(part) if isinstance(part, kp.Store) else arrays_of_module(part) for name, part in parts}
    return {name: arrays(tensor) for name, tensor in module.named_parameters(recurse=False)} | inner


def _expansion(f: Any, values: Any) -> Iterator[tuple[str, Tensor, ndarray]]:
    head = kp.Head(3, 1, kp.HeadSpec(expansion=f), dtype=torch.float64, seed=0)
    # Within the range, at its ends, and beyond.
    ends = torch.tensor([[-1.0, 0.0, 1.0], [1.0, -1.0, 1.5]]).double()
    x = torch.cat((inputs(40, 3), inputs(40, 3, seed=9) * 2.5, ends))
    yield "as made", f(x, head.kappa).dense(), values(f, x.numpy(), arrays(head.kappa))
    if head.kappa.names():
        kp.calibrate(head, inputs(50, 3, seed=11) * 1.5 + 0.3)
        yield "calibrated", f(x, head.kappa).dense(), values(f, x.numpy(), arrays(head.kappa))


def _reconciliation(f: Any, values: Any) -> Iterator[tuple[str, Tensor, ndarray]]:
    # Channels of a hypernet differ in more than their tensors.
    by_channel = "channel" in inspect.signature(values).parameters
    for n, kappa in ((6, kp.Taylor(2)), (4, kp.BSpline(2)), (1, kp.Identity()), (3, kp.Identity())):
        for channels in (1, 3):
            try:
                head = kp.Head(3, n, kp.HeadSpec(kappa, f, channels=channels), dtype=torch.float64, seed=0)
            except kp.SpecError:
                continue  # sizes that do not fit
            made, tensors = head.eval().weights().dense(), arrays(head.psi)
            assert made.shape == (channels, n, kappa.out_features(3))
            for c in range(channels):
                one = {name: value if channels == 1 else value[c] for name, value in tensors.items()}
                more = {"channel": c} if by_channel else {}
                yield f"{n} outputs, channel {c}", made[c], values(f, one, n, head.factors, **more)


def _remainder(f: Any, values: Any) -> Iterator[tuple[str, Tensor, ndarray]]:
    n = 3 if f.name == "identity" else 5
    store = kp.Store(f.params(3, n), dtype=torch.float64)
    store.reset(torch.Generator().manual_seed(0))
    for name, tensor in store.named_parameters():
        if name.split(".")[-1] == "bias":
            tensor.data.copy_(torch.arange(n))  # zero at first
    x = inputs(9, 3) * 3
    yield "", f(x, store, n), values(f, x.numpy(), arrays(store), n)


def _fusion(f: Any, values: Any) -> Iterator[tuple[str, Tensor, ndarray]]:
    store = kp.Store(f.params(3, 2), dtype=torch.float64)
    store.reset(torch.Generator().manual_seed(0))
    for tensor in store.parameters():
        tensor.data.add_(torch.arange(tensor.numel(), dtype=torch.float64).reshape(tensor.shape))
    y = inputs(3, 7, 2)
    yield "", f(y, store), values(f, y.numpy(), arrays(store))


def _process(f: Any, values: Any) -> Iterator[tuple[str, Tensor, ndarray]]:
    module = pipeline([f], 4, None, torch.float64).eval()
    x = inputs(9, 4) * 4
    yield "", module(x), values(f, x.numpy())
