"""One layer: heads side by side, fused into one output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from kapsi.contraction import Route, contract, contract_sum
from kapsi.errors import SpecError, refuse
from kapsi.features import Features, add
from kapsi.fusion import Mean, Sum
from kapsi.hooks import has_global_hooks
from kapsi.modules.head import Head
from kapsi.modules.store import Seed, Store, allocate, as_generator, memory
from kapsi.process import pipeline
from kapsi.spec import LayerSpec
from kapsi.weights import DenseWeights, Weights

__all__ = ["Layer"]

MAX_FUSED = 2**21
"""Elements of ψ of all fused heads: 8 MiB in float32."""


class Layer(nn.Module):
    """A layer: heads on the same inputs, combined (by default summed), then processed.

    Heads with equal κ share the tensors and the evaluation of κ, except if κ or its processing is trained or random.

    Args:
        in_features: number of inputs m.
        out_features: number of outputs n.
        spec: heads, fusion and processing.
        seed, device, dtype: see `Head`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        spec: LayerSpec | None = None,
        *,
        seed: Seed = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        spec = LayerSpec() if spec is None else spec
        if not isinstance(spec, LayerSpec):
            refuse("Layer", "a LayerSpec", spec)
        device = None if device is None else torch.device(device)
        self.in_features, self.out_features, self.spec = in_features, out_features, spec
        generator = as_generator(seed)
        heads: list[Head] = []
        owners: dict[Any, int] = {}
        self._owners: list[int] = []
        gain = 1 / spec.fusion.gain(len(spec.heads))
        for i, head_spec in enumerate(spec.heads):
            try:
                # On the meta device first: a shared κ is not drawn again.
                head = Head(in_features, out_features, head_spec, device="meta", dtype=dtype)
            except SpecError as error:
                raise SpecError(f"heads[{i}]: {error}") from None
            kappa = (head_spec.expansion, head_spec.before, head_spec.after)
            owner = owners.setdefault(kappa, i) if _can_share(head) else i
            if owner != i:
                head._owner = (heads[owner],)
                head.kappa, head.before, head.after = Store({}), nn.Sequential(), nn.Sequential()
            head._gain = gain
            heads.append(head)
            self._owners.append(owner)
        self._sums = isinstance(spec.fusion, Sum | Mean)
        self._groups = _grouped(heads, self._owners, self._sums)
        target = device or torch.get_default_device()
        for i, head in enumerate(heads):
            if target.type != "meta":
                try:
                    head.check_size()
                except SpecError as error:
                    raise SpecError(f"heads[{i}]: {error}") from None
            with memory(f"heads[{i}]: Head({in_features} → {out_features})"):
                allocate(head, target)
        self.heads = nn.ModuleList(heads)
        self.fusion = Store(spec.fusion.params(len(heads), out_features), None, device, dtype)
        self.output = pipeline(spec.output, out_features, device, dtype)
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, seed: Seed = None) -> None:
        """Draw all tensors."""
        generator = as_generator(seed)
        for head in self.heads:
            if hasattr(head, "reset_parameters"):
                cast(Any, head).reset_parameters(generator)
        if not any(tensor.is_meta for tensor in self.fusion.parameters()):
            self.fusion.reset(generator)
        for module in self.output:
            if hasattr(module, "reset_parameters") and not any(t.is_meta for t in module.parameters()):
                module.reset_parameters()  # type: ignore[operator]

    def fixed_features(self, x: Tensor) -> dict[int, Features]:
        """Return κ(x) of heads with untrained κ by the index of the head, to be computed once for many steps."""
        return {
            i: head.expand(x).materialize()
            for i, head in enumerate(self.heads)
            if isinstance(head, Head)
            and not head._owner
            and head.fusible()
            and not head.kappa.trainable()
            and head.kappa.as_declared()
            and all(step.fixed for step in head.spec.steps())
        }

    def forward(self, x: Tensor, features: Mapping[int, Features] | None = None, *, route: Route = None) -> Tensor:
        """Return the fused output of the heads, `(..., n)`.

        Args:
            x: inputs, `(..., m)`.
            features: result of `fixed_features(x)`.
            route: see `Head.forward`; with a route heads are not fused.
        """
        modules: dict[str, Any] = self._modules
        heads = modules["heads"]._modules
        if len(heads) == 1 and self._sums and features is None and route is None:
            (head,) = heads.values()
            y = head(x)
        else:
            y = self._forward(x, features or {}, route)
        output = modules["output"]
        return output(y) if output._modules else y

    def groups(self, route: Route = None) -> list[list[int]]:
        """Return the indices of fused heads, contracted by one product: heads with the same κ, and ψ of the same options.

        No head is fused with a route, with a hook of all modules, or if a call of one of them does more than the formula of
        its specification: hooks, replaced methods, computed tensors, other modules.
        """
        heads = list(self.heads)
        if route is None and len(heads) == len(self._owners) and not has_global_hooks() and all(map(_fusible, heads)):
            return self._groups
        return [[i] for i in range(len(heads))]

    def check_heads(self, where: str) -> list[Head]:
        """Return the heads.

        Raises:
            SpecError: another module is in the place of a head.
        """
        for i, head in enumerate(self.heads):
            if not isinstance(head, Head):
                raise SpecError(
                    f"{where}.heads.{i} is a {type(head).__name__}, expected a Head; put the head back first"
                )
        return cast(list[Head], list(self.heads))

    def fused_weights(self, group: list[int]) -> Weights:
        """Return the weights of a group of heads as weights of one head: summed, or concatenated along the channel axis."""
        heads = cast(list[Head], [self.heads[i] for i in group])
        first, weights = heads[0], heads[0].weights()
        if isinstance(weights, DenseWeights) and self._sums:  # summed without stacking
            others = (head.weights().merged().matrix() for head in heads[1:])
            return DenseWeights(add((weights.merged().matrix(), *others)))
        return first.spec.reconciliation(_FusedStores([head.psi for head in heads]), first.out_features, first.factors)

    def fused_outputs(self, group: list[int], x: Tensor, features: Features) -> list[Tensor]:
        """Return the outputs of a group of heads with the same κ(x) from one product: the sum, or each output for other fusions."""
        heads = cast(list[Head], [self.heads[i] for i in group])
        weights = self.fused_weights(group)
        if self._sums:
            biases = [head.bias for head in heads if head.bias is not None]
            y = contract_sum(features, weights, add(biases) if biases else None)
            return [add((y, *(head.remainder(x) for head in heads if head._has_remainder)))]
        products = contract(features, weights)
        if heads[0].spec.channels > 1:
            products = products.unflatten(-2, (len(heads), -1)).sum(-2)
        outputs = []
        for head, y in zip(heads, products.unbind(-2), strict=True):
            y = y if head.bias is None else y + head.bias
            outputs.append(y + head.remainder(x) if head._has_remainder else y)
        return outputs

    def _forward(self, x: Tensor, features: Mapping[int, Features], route: Route) -> Tensor:
        heads = list(self.heads)
        shared = {heads[i]: kappa for i, kappa in features.items()}
        outputs: dict[int, Tensor] = {}
        groups = self.groups(route)
        hooked = has_global_hooks()
        if isinstance(x, Tensor) and x.layout != torch.strided:
            # Columns of each ψ are gathered; fusion would copy each ψ whole.
            groups = [[i] for i in range(len(heads))]
            for head in heads:
                if isinstance(head, Head):
                    head.check_inputs(x)
        for group in groups:
            first = heads[group[0]]
            if hooked or not isinstance(first, Head) or not first.fusible():
                # With κ of its own input, which a hook may replace, and through which gradients pass a hook.
                takes_route = route is not None and isinstance(first, Head)
                outputs[group[0]] = first(x, route=route) if takes_route else first(x)
                continue
            owner = first._owner[0] if first._owner else first
            if owner not in shared:
                shared[owner] = first.expand(x)
            if len(group) == 1:
                outputs[group[0]] = first(x, shared[owner], route=route)
            else:
                outputs |= zip(group, self.fused_outputs(group, x, shared[owner]), strict=False)
        if self._sums:
            total = add(outputs.values())
            return total / len(heads) if isinstance(self.spec.fusion, Mean) else total
        return self.spec.fusion(torch.stack([outputs[i] for i in range(len(heads))]), self.fusion.ready())

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features}, fusion={self.spec.fusion}"


class _FusedStores:
    """View the stores of several heads as one store, concatenated along the channel axis."""

    def __init__(self, stores: list[Store]) -> None:
        self.stores = stores

    def __getitem__(self, name: str) -> Any:
        values = [store[name] for store in self.stores]
        if isinstance(values[0], Store):
            return _FusedStores(values)
        concatenate = torch.stack if self.stores[0]._channels is None else torch.cat
        # Tensors stored with the last axis first keep this order: channels of a column are adjacent.
        if values[0].dim() > 1 and not values[0].is_contiguous():
            return concatenate([value.movedim(-1, 0) for value in values], 1).movedim(0, -1)
        return concatenate(values)


def _grouped(heads: list[Head], owners: list[int], summed: bool) -> list[list[int]]:
    """Return the indices of heads to be fused; the heads are on the meta device.

    Time of separate heads over time of fused heads, forward and backward, 64 rows, one thread, 4, 8 and 16 heads:

        Taylor × low rank 2                   64 → 64   1.5  1.9  2.0    784 → 64   0.6  0.6  0.6
        Taylor × dual low-rank Kronecker 5    64 → 64   1.2  1.6  2.0    784 → 64   1.3  1.8  2.3
        Taylor × Khatri–Rao 2                 64 → 64   1.2  1.5  1.9    784 → 64   1.5  2.0  2.4
        Taylor × Kronecker                    64 → 64   1.4  1.8  2.2    784 → 64   1.5  1.8  2.1
        B-spline × dense                      64 → 64   1.4  1.7  2.3    784 → 64   1.7  2.1  2.3
        identity × dense                      64 → 64   1.5  1.9  2.2    784 → 64   2.0  2.8  3.5

    Two heads of one channel gain nothing (0.8 to 1.1), two heads of three channels do (1.1 to 1.5), as do sums (1.1 to
    1.7). Copies of a large ψ cost more than fusion saves: low rank with 784 inputs has 1.2 million elements per head.
    """
    alike: dict[Any, list[int]] = {}
    for i, head in enumerate(heads):
        alike.setdefault((owners[i], head.spec.reconciliation, head.spec.channels, head.spec.fusion), []).append(i)
    groups: list[list[int]] = []
    for members in alike.values():
        head, most, fewest = heads[members[0]], 1, 1
        if len(members) > 1 and isinstance(head.spec.fusion, Sum):
            weights = head.weights()
            dense = isinstance(weights, DenseWeights)  # summed without a new axis
            if weights.can_stack and (summed or not dense):
                size = sum(tensor.numel() for tensor in (*head.psi.parameters(), *head.psi.buffers()))
                most = max(1, MAX_FUSED // max(1, size))
                fewest = 2 if dense else -(-3 // head.spec.channels)
        for start in range(0, len(members), most):
            part = members[start : start + most]
            groups += [part] if len(part) >= fewest else [[i] for i in part]
    return sorted(groups)


def _fusible(head: nn.Module) -> bool:
    return isinstance(head, Head) and head.fusible()


def _can_share(head: Head) -> bool:
    """Return whether other heads may use κ of a head: no part of κ is trained or random."""
    trained = (
        head.kappa.trainable()
        or any(True for _ in head.before.parameters())
        or any(True for _ in head.after.parameters())
    )
    return not trained and not any(step.random for step in head.spec.steps())
