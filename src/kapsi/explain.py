"""What a model does, head by head: sizes, parameters, how κ and ψ are contracted, and the memory that a batch takes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kapsi.contraction import route
from kapsi.errors import SpecError
from kapsi.modules import Head, Layer, Model

__all__ = ["HeadReport", "explain"]


class HeadReport(NamedTuple):
    """What one head does.

    Attributes:
        name: as in `named_modules()`.
        in_features, columns, out_features: m, D and n.
        parameters: number of its parameters.
        route: how κ(x) and ψ(w) are contracted, in words.
        bytes: what a forward pass of the batch makes, in bytes of new memory.
        largest: elements of the largest single tensor of those.
    """

    name: str
    in_features: int
    columns: int
    out_features: int
    parameters: int
    route: str
    bytes: int
    largest: int


class _NewMemory(TorchDispatchMode):
    """Counts the memory of the tensors that operations make; views of what is there cost nothing."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        # Kept alive: a freed storage's address would come again.
        self.kept: list[Any] = [tensor.untyped_storage() for tensor in known]
        self.seen = {storage._cdata for storage in self.kept}
        self.bytes = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self.seen:
                    self.seen.add(storage._cdata)
                    self.kept.append(storage)
                    self.bytes += storage.nbytes()
                    self.largest = max(self.largest, leaf.numel())
        return result


@torch.no_grad()
def explain(model: Model, batch: int = 64) -> list[HeadReport]:
    """Return a report for each head of a model; nothing is computed, the sizes are followed on the meta device.

    Args:
        model: any model.
        batch: number of rows, 0 or more.

    Raises:
        SpecError: no such batch, or one that makes a tensor beyond any machine.

    Example:
        >>> import kapsi as kp
        >>> model = kp.Model(kp.rpn([4, 3], expansion=kp.Taylor(2), reconciliation=kp.Kronecker()), device="meta")
        >>> kp.explain(model)[0].route
        'mixed product (A u) ⊗ (B v), neither κ nor ψ formed'
    """
    if not isinstance(model, Model):
        raise SpecError(f"explain: expected a kapsi.Model, got {type(model).__name__}")
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 0:
        raise SpecError(f"explain: batch is {batch!r}, expected an integer of 0 or more")
    dtype = next((p.dtype for p in model.parameters()), torch.get_default_dtype())
    sized = Model(model.spec, device="meta", dtype=dtype).eval()
    reports = []
    try:
        for i, layer in enumerate(sized.layers):
            x = torch.empty(batch, cast(Layer, layer).in_features, device="meta", dtype=dtype)
            for j, head in enumerate(cast(Layer, layer).heads):
                reports.append(_report(f"layers.{i}.heads.{j}", cast(Head, head), x))
    except (RuntimeError, TypeError) as error:
        if "overflow" not in str(error).lower():
            raise
        raise SpecError(
            f"explain: a batch of {batch:,} rows makes a tensor of more than 2⁶³ bytes; take fewer"
        ) from None
    return reports


def _report(name: str, head: Head, x: Tensor) -> HeadReport:
    with _NewMemory([x, *head.parameters(), *head.buffers()]) as memory:
        head(x)
    return HeadReport(
        name=name,
        in_features=head.in_features,
        columns=math.prod(head.factors),
        out_features=head.out_features,
        parameters=sum(p.numel() for p in head.parameters()),
        route=route(head.expand(x), head.weights().merged()),
        bytes=memory.bytes,
        largest=memory.largest,
    )
