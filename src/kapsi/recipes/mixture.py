"""Weighted sums of one-layer models as one model of one layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from kapsi.errors import SpecError
from kapsi.expansion import Processed
from kapsi.modules import Head, Model
from kapsi.process import Clamp
from kapsi.remainder import ConstantRemainder
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec

__all__ = ["mixture"]

KAPPA = ("kappa.", "before.", "after.")
"""Names of the tensors of κ and its processing."""


@torch.no_grad()
def mixture(
    models: Sequence[Model], weights: Sequence[float], bounds: tuple[torch.Tensor, torch.Tensor] | None = None
) -> Model:
    """Return f(x) = Σ_i a_i f_i(x) as one layer with the heads of all models; weights are multiplied into ψ, π and b.

    Args:
        models: models of one layer with equal widths, summed heads and no processing of the output.
        weights: a_i; heads with a weight of 0 are left out.
        bounds: lowest and highest value of each output, `(n,)` each, as a process `clamp` of the layer; None without.

    Raises:
        SpecError: other models, or no weight other than 0.

    Example:
        >>> import torch, kapsi as kp
        >>> first = kp.Model(kp.rpn([3, 2], kp.Taylor(2)), seed=0, dtype=torch.float64)
        >>> second = kp.Model(kp.rpn([3, 2], "b_spline", bias=True), seed=1, dtype=torch.float64)
        >>> x, both = torch.rand(5, 3, dtype=torch.float64), mixture([first, second], [0.25, 0.75])
        >>> torch.allclose(both(x), 0.25 * first(x) + 0.75 * second(x))
        True
    """
    pairs = [(model, float(weight)) for model, weight in zip(models, weights, strict=True) if weight]
    if not pairs:
        raise SpecError("mixture: expected at least one weight other than 0")
    if any(weight < 0 for _, weight in pairs):
        raise SpecError("mixture: expected weights of at least 0")
    parts: list[_Part] = []
    for model, weight in pairs:
        for head in _heads(model, pairs[0][0]):
            parts.append(_Part.of(head, weight, parts))
    output = () if bounds is None else (Clamp(),)
    layer = LayerSpec(tuple(part.spec for part in parts), output=output)
    spec = ModelSpec(pairs[0][0].spec.widths, (layer,))
    # Without initial values: drawing many leaves or centers would take longer than the copy.
    result = Model(spec, device="meta", dtype=torch.float64).to_empty(device="cpu")
    for target, part in zip(result.check_layers("mixture")[0].check_heads("mixture"), parts, strict=True):
        part.copy_to(target)
    if bounds is not None:
        result.layers[0].output[0].load_state_dict({"low": bounds[0], "high": bounds[1]})  # type: ignore[index, union-attr]
    return result.eval()


class _Part(NamedTuple):
    """A head of the sum.

    Attributes:
        head: the head.
        weight: factor of the head.
        spec: specification in the sum.
        wraps: number of expansions around κ in it.
    """

    head: Head
    weight: float
    spec: HeadSpec
    wraps: int

    @classmethod
    def of(cls, head: Head, weight: float, others: Sequence[_Part]) -> _Part:
        """Return a part; heads with equal specifications and tensors of κ share the tensors.

        Heads with a trained κ never share tensors.
        """
        spec, wraps = head.spec, 0
        others = [] if (head._owner[0] if head._owner else head).kappa.trainable() else others
        while any(_same_kappa(spec, other.spec) and not _equal(head, other.head) for other in others):
            spec, wraps = replace(spec, expansion=Processed(spec.expansion)), wraps + 1
        return cls(head, weight, spec, wraps)

    def copy_to(self, target: Head) -> None:
        """Copy all tensors, with ψ, π and b multiplied by the weight."""
        inside = "kappa." + "expansion." * self.wraps
        theirs = {name.replace("kappa.", inside, 1): tensor for name, tensor in _kappa(self.head).items()}
        theirs |= {name: tensor for name, tensor in self.head.state_dict().items() if not name.startswith(KAPPA)}
        for name, tensor in target.state_dict().items():
            tensor.copy_(theirs[name])
        weights = list(target.psi.parameters())
        if not weights:
            raise SpecError(f"mixture: {target.spec.reconciliation} has no parameters that a weight could multiply")
        target.spec.reconciliation.scale(weights, self.weight)
        constant = list(target.pi.buffers()) if isinstance(target.spec.remainder, ConstantRemainder) else []
        for tensor in (*target.pi.parameters(), *constant, *([] if target.bias is None else [target.bias])):
            tensor.mul_(self.weight)


def _heads(model: Model, first: Model) -> list[Head]:
    """Return the heads of a model, checked as a part of a sum."""
    layers = model.check_layers("mixture")
    plain = len(layers) == 1 and layers[0].spec.fusion == LayerSpec().fusion and not layers[0].spec.output
    if not plain or model.spec.widths != first.spec.widths:
        raise SpecError(
            f"mixture: expected models of one layer, summed, without output processing, of equal widths; got {model.spec}"
        )
    return layers[0].check_heads("mixture")


def _same_kappa(one: HeadSpec, other: HeadSpec) -> bool:
    return (one.expansion, one.before, one.after) == (other.expansion, other.before, other.after)


def _kappa(head: Head) -> dict[str, torch.Tensor]:
    """Return the tensors of κ and of the processing; of the owner if shared."""
    owner = head._owner[0] if head._owner else head
    return {name: tensor for name, tensor in owner.state_dict().items() if name.startswith(KAPPA)}


def _equal(one: Head, other: Head) -> bool:
    first, second = _kappa(one), _kappa(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
