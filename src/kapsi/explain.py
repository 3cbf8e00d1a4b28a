"""A report by head: sizes, parameters, the product of κ and ψ, and the work and memory of a batch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from kapsi.contraction import Route, check_route, describe
from kapsi.errors import SpecError, check_integer, refuse
from kapsi.features import Features, NormalizedFeatures
from kapsi.modules import Head, Layer, Model
from kapsi.notation import short_form
from kapsi.remainder import ZeroRemainder
from kapsi.weights import ActingWeights


class HeadReport(NamedTuple):
    """Sizes, work and memory of a head.

    Shared work is counted once: κ(x) at the owner; product, remainders and biases of fused heads at the first head.

    Attributes:
        name: the name of the head in `named_modules()`.
        in_features, columns, out_features: the sizes m, D and n.
        parameters: number of parameters.
        route: a description of the product of κ(x) and ψ(w).
        bytes: new memory of a forward pass of the batch, in bytes.
        largest: elements of the largest new tensor.
        shape: shape of the largest new tensor.
        operations: work of a forward pass of the batch, 2 for each multiplication and addition of a matrix product, 1 for each
            new element of other operations; views are free.
        hint: a warning on a grid of ψ that multiplies the work, with the grid of κ in its place; empty if there is none.
    """

    name: str
    in_features: int
    columns: int
    out_features: int
    parameters: int
    route: str
    bytes: int
    largest: int
    shape: tuple[int, ...]
    operations: int
    hint: str = ""


MIN_SAVING = 2.0
"""Smallest ratio of operations that is worth a hint on the grid of ψ."""


class _Work(TorchDispatchMode):
    """Counts operations and the memory of new tensors; views are free."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        # Kept alive: addresses of freed storages are reused.
        self.kept: list[Any] = [tensor.untyped_storage() for tensor in known]
        self.seen = {storage._cdata for storage in self.kept}
        self.restart()

    def restart(self) -> None:
        """Reset the counts, but not the record of known tensors."""
        self.bytes = self.largest = self.operations = 0
        self.shape: tuple[int, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        elements = 0
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor):
                continue
            storage = leaf.untyped_storage()
            new = storage._cdata not in self.seen
            if new:
                self.seen.add(storage._cdata)
                self.kept.append(storage)
                self.bytes += storage.nbytes()
                if leaf.numel() > self.largest:
                    self.largest, self.shape = leaf.numel(), tuple(leaf.shape)
            if (new or func._schema.is_mutable) and "empty" not in func._schema.name:
                elements += leaf.numel()
        counted = flop_registry.get(_out_of_place(func._overloadpacket))
        self.operations += elements if counted is None else counted(*args, **(kwargs or {}), out_val=result)
        return result


def _out_of_place(packet: Any) -> Any:
    """Return the out-of-place variant of an operation, `addmm` for `addmm_`; others unchanged."""
    name = packet.__name__
    return getattr(torch.ops.aten, name.rstrip("_"), packet) if name.endswith("_") else packet


@torch.no_grad()
def explain(model: Model, batch: int = 64, *, route: Route = None) -> list[HeadReport]:
    """Report size, parameters, method, operations and memory of each head; only sizes are computed, on the meta device.

    Args:
        model: any model.
        batch: number of rows, 0 or more.
        route: the route, see `model(x, route=…)`; `"dense"` shows the savings of the structure.

    Returns:
        A report for each head, layer by layer.

    Raises:
        SpecError: a wrong batch or route, or a tensor too large for any machine.

    Example:
        >>> import kapsi as kp
        >>> model = kp.Model(kp.rpn([4, 3], expansion=kp.Taylor(2), reconciliation=kp.Kronecker()), device="meta")
        >>> kp.explain(model)[0].route
        'mixed product (A u) ⊗ (B v), neither κ nor ψ materialized'
    """
    if not isinstance(model, Model):
        refuse("explain", "a kapsi.Model", model)
    check_integer("explain: batch", batch, 0)
    check_route("explain", route)
    dtype = next((p.dtype for p in model.parameters()), torch.get_default_dtype())
    layers = model.check_layers("explain")
    sized = Model(model.spec, device="meta", dtype=dtype).eval()
    reports: list[HeadReport] = []
    try:
        for i, (real, layer) in enumerate(zip(layers, sized.layers, strict=True)):
            # Groups of the real model: heads with hooks are not fused.
            groups = real.groups(route)
            x = torch.empty(batch, cast(Layer, layer).in_features, device="meta", dtype=dtype)
            reports += _of_layer(f"layers.{i}", cast(Layer, layer), groups, x, route)
    except (RuntimeError, TypeError) as error:
        if "overflow" not in str(error).lower():
            raise
        raise SpecError(
            f"explain: a batch of {batch:,} rows has a tensor of more than 2⁶³ bytes; use fewer rows"
        ) from None
    return reports


def _of_layer(name: str, layer: Layer, groups: list[list[int]], x: Tensor, route: Route) -> list[HeadReport]:
    work = _Work([x, *layer.parameters(), *layer.buffers()])
    shared: dict[int, Features] = {}
    reports: dict[int, HeadReport] = {}
    for group in groups:
        work.restart()
        first, owner = cast(Head, layer.heads[group[0]]), layer._owners[group[0]]
        if owner not in shared:
            first.expand(x[:1])  # constants kept for later calls are created before counting
            with work:
                shared[owner] = first.expand(x)
        features = shared[owner]
        if len(group) > 1:
            with work:
                layer.fused_outputs(group, x, features)
            words = f"{len(group)} heads fused: {describe(features, layer.fused_weights(group).merged())}"
        else:
            words = describe(features, first.weights().merged(), route)
            _follow(work, first, x, features, route)
        for i in group:
            head = cast(Head, layer.heads[i])
            reports[i] = HeadReport(
                name=f"{name}.heads.{i}",
                in_features=head.in_features,
                columns=math.prod(head.factors),
                out_features=head.out_features,
                parameters=sum(p.numel() for p in head.parameters()),
                route=words if i == group[0] else f"fused with {name}.heads.{group[0]}",
                bytes=work.bytes,
                largest=work.largest,
                shape=work.shape,
                operations=work.operations,
                hint=_hint(head, x, route),
            )
            work.restart()
    return [reports[i] for i in range(len(layer.heads))]


def _hint(head: Head, x: Tensor, route: Route) -> str:
    """Return a warning if ψ on the grid of κ takes a fraction of the operations, empty otherwise."""
    psi = head.spec.reconciliation
    own = None if route == "dense" else psi.on_own_grid(head.factors)
    if own is None or not x.numel():
        return ""
    counts = []
    for variant in (psi, own):
        spec = replace(head.spec, reconciliation=variant, remainder=ZeroRemainder(), bias=False)
        alone = Head(head.in_features, head.out_features, spec, device="meta", dtype=x.dtype).eval()
        work = _Work([x, *alone.parameters(), *alone.buffers()])
        with work:
            features = alone.expand(x)
        _follow(work, alone, x, features, route)
        counts.append(work.operations)
    ratio = counts[0] / max(1, counts[1])
    if ratio < MIN_SAVING:
        return ""
    options = ", ".join(f"{name}={getattr(own, name)}" for name in ("rows", "columns") if getattr(own, name, None))
    many = f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.1f}"
    grid = f"{head.factors[0]:,} × {head.factors[1]:,}"
    return f"{short_form(psi)}: {options}, the grid {grid} of κ, would need {many} times fewer operations"


def _follow(work: _Work, head: Head, x: Tensor, features: Features, route: Route) -> None:
    """Count the work of a head after κ(x)."""
    with work:
        weights = head.weights()
        before = work.operations
        y = head.product(features, weights, route)
    if isinstance(weights, ActingWeights) and route != "dense":
        base = features.base if isinstance(features, NormalizedFeatures) else features
        work.operations = before + round(weights.passes(base) * (work.operations - before))
    with work:
        if head._has_remainder:
            y + head.remainder(x)
