"""Models that are linear in their trained parameters, or in each of their tensors: whether one is, and as a matrix of columns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kapsi.errors import SpecError
from kapsi.features import formed
from kapsi.fusion import Mean, Sum
from kapsi.modules import Head, Layer, Model, Store
from kapsi.process import BatchNorm, Process
from kapsi.reconciliation import Masked, Reconciliation, ZeroReconciliation
from kapsi.remainder import ExpansionRemainder, LinearRemainder, Remainder, ZeroRemainder
from kapsi.training.config import TrainConfig
from kapsi.training.penalties import Penalties
from kapsi.weights import DenseWeights, Weights

__all__ = [
    "LinearDesign",
    "NotLinear",
    "Structure",
    "reason_not_linear",
    "structure",
    "widened",
]

Make = Callable[[Tensor], Tensor]


class NotLinear(Exception):
    """Why a model is not linear in the parameters that are trained, nor in each tensor."""


@dataclass(frozen=True)
class Member:
    """A parameter that is added to the coefficients of some columns.

    Attributes:
        parameter: `(n, D)` or `(channels, n, D)`; `(n,)` for a bias; the kept values where there is a mask.
        mask: of the entries that it has, `(n, D)` or `(channels, n, D)`; None for all.
    """

    parameter: nn.Parameter
    mask: Tensor | None = None


@dataclass
class Part:
    """Columns with the same coefficients: f = s Σ_members coefficients · φ(x) + ….

    Attributes:
        make: φ, from the inputs of the layer to `(rows, columns)`; None for the constant one.
        columns: D.
        members: what is added up to the coefficients.
    """

    make: Make | None
    columns: int
    members: list[Member] = field(default_factory=list)


@dataclass
class Structure:
    """What the outputs of a model are made of.

    Attributes:
        prefix: layers before the one that is trained.
        layer: the layer that is trained, or the linear map of torch.
        share: s, by which the sum of heads is multiplied.
        parts: columns that are linear in their parameters.
        factors: for each ψ that is linear in each of its tensors, those that are trained.
        fixed: whether there is something that training does not change.
    """

    prefix: list[nn.Module]
    layer: nn.Module
    share: float = 1.0
    parts: dict[Any, Part] = field(default_factory=dict)
    factors: list[list[nn.Parameter]] = field(default_factory=list)
    fixed: bool = False

    def part(self, key: Any, make: Make | None, columns: int) -> Part:
        """Return the part of a key, made where it is not there yet."""
        return self.parts.setdefault(key, Part(make, columns))

    def inputs(self, x: Tensor) -> Tensor:
        """Return what the layer that is trained is given."""
        for layer in self.prefix:
            x = layer(x)
        return x


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def structure(model: nn.Module) -> Structure:
    """Return what the outputs of a model are made of.

    Raises:
        NotLinear: a trained tensor enters in another way than linearly.
    """
    if isinstance(model, nn.Linear):
        found = Structure([], model)
        found.part("linear", lambda x: x, model.in_features)
        if model.weight.requires_grad:
            found.parts["linear"].members.append(Member(cast(nn.Parameter, model.weight)))
        else:
            found.fixed = True
        _survey_bias(found, model.bias)
        return found
    if not isinstance(model, Model):
        raise NotLinear(f"the model is a {type(model).__name__}, no kapsi.Model, so it is not known to be linear")
    *before, last = cast(list[Layer], list(model.layers))
    for i, layer in enumerate(before):
        if _trained(layer):
            raise NotLinear(f"the model has {len(model.layers)} layers, and layers.{i} is trained")
        for head in cast(list[Head], layer.heads):
            _require_fixed((*head.spec.before, *head.spec.after, *layer.spec.output), f"layers.{i}")
    where = f"layers.{len(before)}"
    if last.spec.output:
        raise NotLinear(f"{where} has processing of its output")
    if not isinstance(last.spec.fusion, Sum | Mean):
        raise NotLinear(f"the fusion of {where} is {last.spec.fusion}, neither Sum nor Mean")
    share = 1 / len(last.heads) if isinstance(last.spec.fusion, Mean) else 1.0
    found = Structure(list(before), last, share)
    for i, head in enumerate(cast(list[Head], list(last.heads))):
        _survey_head(found, head, f"{where}.heads.{i}", last._owners[i])
    return found


def _require_fixed(steps: tuple[Process, ...], where: str) -> None:
    for step in steps:
        if step.random or isinstance(step, BatchNorm):
            raise NotLinear(f"{step} of {where} is not the same function in each pass")


def _survey_head(found: Structure, head: Head, where: str, owner: int) -> None:
    spec = head.spec
    _require_fixed((*spec.before, *spec.after), where)
    for name, module in (("κ", head.kappa), ("processing before κ", head.before), ("processing after κ", head.after)):
        if _trained(module):
            raise NotLinear(f"{name} of {where} is trained")

    def make(x: Tensor) -> Tensor:
        return formed(head.expand(x), where)

    _survey_psi(found, spec.reconciliation, head.psi, make, head.out_features, head.factors, ("psi", owner), where)
    _survey_bias(found, head.bias)
    _survey_remainder(found, spec.remainder, head.pi, (head.in_features, head.out_features), where)


def _survey_bias(found: Structure, bias: nn.Parameter | None) -> None:
    if bias is None:
        return
    if bias.requires_grad:
        found.part("constant", None, 1).members.append(Member(bias))
    else:
        found.fixed = True


def _survey_psi(
    found: Structure,
    psi: Reconciliation,
    store: Store,
    make: Make,
    outputs: int,
    factors: tuple[int, int],
    key: Any,
    where: str,
) -> None:
    columns = factors[0] * factors[1]
    trained = _trained(store)
    if not trained:
        found.fixed |= not isinstance(psi, ZeroReconciliation)
    elif isinstance(psi, Masked) and key[0] == "psi":
        found.part(key, make, columns).members.append(Member(trained[0], store["mask"]))
    elif not psi.multilinear:
        raise NotLinear(f"{psi} of {where} does not declare that it is linear in each of its tensors")
    elif len(trained) == 1 and _is_matrix(psi(store, outputs, factors), trained[0]):
        found.part(key, make, columns).members.append(Member(trained[0]))
    else:  # among them masked remainders: their values have no penalty, as biases
        found.factors.append(trained)


def _is_matrix(weights: Weights, parameter: nn.Parameter) -> bool:
    """Return whether ψ is one matrix of free entries, the parameter itself."""
    return isinstance(weights, DenseWeights) and weights.values is parameter


def _survey_remainder(found: Structure, pi: Remainder, store: Any, sizes: tuple[int, int], where: str) -> None:
    in_features, out_features = sizes
    if isinstance(pi, ZeroRemainder):
        return
    if not _trained(store):
        found.fixed = True
    elif isinstance(pi, LinearRemainder):
        if pi.after is not None:
            raise NotLinear(f"the linear remainder of {where} has an activation after its matrix")
        if store["matrix"].requires_grad:
            activation = pi.before
            make = (lambda x: x) if activation is None else activation.__call__
            found.part(("linear", activation), make, in_features).members.append(Member(store["matrix"]))
        else:
            found.fixed = True
        _survey_bias(found, store["bias"] if pi.bias else None)
    elif isinstance(pi, ExpansionRemainder):
        kappa = store["expansion"]
        if _trained(kappa):
            raise NotLinear(f"κ of the remainder of {where} is trained")
        expansion, factors = pi.expansion, pi.expansion.factors(in_features)

        def expanded(x: Tensor) -> Tensor:
            return formed(expansion(x, kappa), where)

        psi, key = store["reconciliation"], ("pi", id(store))
        _survey_psi(found, pi.reconciliation, psi, expanded, out_features, factors, key, where)
        _survey_remainder(found, pi.remainder, store["remainder"], sizes, where)
    elif pi.multilinear:
        found.factors.append(_trained(store))
    else:
        raise NotLinear(f"{pi} of {where} does not declare that it is linear in each of its tensors")


def reason_not_linear(model: nn.Module) -> str | None:
    """Return why a model is not linear in all of its trained parameters at once, or None where it is.

    Linear is one layer (others before it may be frozen) of heads with ψ `Dense` or `Masked` or without trained parameters, κ
    without trained tensors, a remainder that is linear in its own, and their sum or mean.

    Example:
        >>> import kapsi as kp
        >>> reason_not_linear(kp.Model(kp.rpn([2, 1], kp.Taylor(2), bias=True)))
        >>> reason_not_linear(kp.Model(kp.rpn([2, 1], kp.Taylor(2), kp.LowRank(1))))
        'a ψ is a product of tensors, or has entries that are tied'
    """
    try:
        found = structure(model)
    except NotLinear as reason:
        return str(reason)
    if found.factors:
        return "a ψ is a product of tensors, or has entries that are tied"
    if not any(part.members for part in found.parts.values()):
        return "it has no parameters that are trained"
    return None


def widened(model: nn.Module) -> nn.Module:
    """Return a copy of a model in float64, in evaluation mode, without hooks."""
    wide = copy.deepcopy(model).double().eval()
    for module in wide.modules():
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            getattr(module, name).clear()
    return wide


# ------------------------------------------------------------------------------------------------ as a matrix


class LinearDesign:
    """A linear model as f(x) = θ φ(x) + b + offset(x), with θ `(n, P)`.

    Parameters that have the same columns, such as those of several channels, are one coefficient: θ is their sum, and of all
    that have this sum those that are equal have the least penalty, θ / (s·count) each.

    Attributes:
        columns: P, without the constant.
        outputs: n.
        counts: how many parameters make an entry of θ, 0 for those that are not there; `(1, P)` where all outputs are alike.
        strength: weight of θ² in the penalty, of the shape of `counts`.
        constant: whether there is a b.

    Args:
        model: the copy in float64, see `widened`; its parameters are what `assign` sets.
        config: says the penalties.
    """

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self.model, self.config = model, config
        self.structure = structure(model)
        parts = dict(self.structure.parts)
        constant = parts.pop("constant", None)
        self.parts = [part for part in parts.values() if part.members]
        self.biases = [] if constant is None else constant.members
        self.constant = bool(self.biases)
        self.columns = sum(part.columns for part in self.parts)
        self.share = self.structure.share
        trained = self.parts[0].members if self.parts else self.biases
        layer: Any = self.structure.layer
        self.outputs: int = layer.out_features
        self.masked = any(member.mask is not None for part in self.parts for member in part.members)
        device, rows = trained[0].parameter.device, self.outputs if self.masked else 1
        counts = [self._count(part, rows) for part in self.parts]
        empty = torch.zeros(rows, 0, dtype=torch.float64)
        self.counts = torch.cat([empty, *counts], 1).to(device)
        weights = {id(p): weight for p, weight in Penalties(model, config).quadratic}
        strengths = [
            torch.full((1, part.columns), weights.get(id(part.members[0].parameter), 1.0), dtype=torch.float64)
            for part in self.parts
        ]
        strength = torch.cat([empty[:1], *strengths], 1).to(device)
        self.strength = strength / (self.share**2 * self.counts.clamp_min(1))
        self.device = device

    def _count(self, part: Part, rows: int) -> Tensor:
        total = torch.zeros(rows, part.columns, dtype=torch.float64)
        for member in part.members:
            if member.mask is None:
                total += member.parameter.shape[0] if member.parameter.dim() == 3 else 1
            else:
                kept = member.mask.double().cpu()
                total += kept.sum(0) if kept.dim() == 3 else kept
        return total

    def expand(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return φ(x) `(rows, P)`, and the outputs with all trained parameters zero, None where those are zero."""
        if x.layout != torch.strided:
            x = x.to_dense()
        if x.dim() != 2:
            raise SpecError(f"ridge: expected inputs of shape (rows, m), got {tuple(x.shape)}")
        x = x.to(self.device, torch.float64)
        with torch.no_grad():
            inputs = self.structure.inputs(x)
            made = [part.make(inputs) for part in self.parts if part.make is not None]
            columns = torch.cat(made, 1) if made else inputs.new_zeros(len(x), 0)
            if not self.structure.fixed:
                return columns, None
            zeros = {name: torch.zeros_like(p) for name, p in self.model.named_parameters() if p.requires_grad}
            return columns, functional_call(self.model, zeros, (x,))

    def _slices(self) -> Iterator[tuple[Part, slice]]:
        begin = 0
        for part in self.parts:
            yield part, slice(begin, begin + part.columns)
            begin += part.columns

    @torch.no_grad()
    def assign(self, theta: Tensor, bias: Tensor | None) -> None:
        """Set the parameters of the copy from θ `(n, P)` and b `(n,)`."""
        each = theta / (self.share * self.counts.clamp_min(1))
        for part, where in self._slices():
            for member in part.members:
                values = each[:, where]
                if member.mask is None:
                    member.parameter.copy_(values)
                else:
                    values = values.expand(member.mask.shape)[member.mask]
                    member.parameter.copy_(values.view_as(member.parameter))
        if bias is not None:
            for member in self.biases:
                member.parameter.copy_(bias / (self.share * len(self.biases)))

    @torch.no_grad()
    def coefficients(self) -> tuple[Tensor, Tensor]:
        """Return θ `(n, P)` and b `(n,)` of the present parameters."""
        theta = torch.zeros(self.outputs, self.columns, dtype=torch.float64, device=self.device)
        bias = theta.new_zeros(self.outputs)
        for part, where in self._slices():
            for member in part.members:
                values: Tensor = member.parameter
                if member.mask is not None:
                    values = torch.zeros_like(member.mask, dtype=values.dtype).masked_scatter(member.mask, values)
                theta[:, where] += self.share * (values.sum(0) if values.dim() == 3 else values)
        for member in self.biases:
            bias += self.share * member.parameter
        return theta, bias

    def patterns(self) -> list[tuple[Tensor, Tensor]]:
        """Return (outputs, columns) that belong together: outputs with the same columns, and those, as numbers."""
        every = torch.arange(self.outputs, device=self.device)
        if not self.masked:
            return [(every, torch.arange(self.columns, device=self.device))]
        _, number = torch.unique(self.counts, dim=0, return_inverse=True)
        found = [every[number == i] for i in range(int(number.max()) + 1)]
        return [(outputs, self.counts[outputs[0]].nonzero()[:, 0]) for outputs in found]

    def roughness(self, output: int, columns: Tensor) -> Tensor | None:
        """Return the second derivative of the smoothness penalty in the coefficients of an output, None where there is none."""
        if not self.config.smoothness:
            return None
        for part in self.parts:
            channels = {m.parameter.shape[0] if m.parameter.dim() == 3 else 1 for m in part.members}
            masks = [m.mask for m in part.members if m.mask is not None]
            # Equal shares of the sum are then not the best ones.
            if len(channels) > 1 or (masks and (len(part.members) > 1 or masks[0].dim() > 2)):
                raise SpecError(
                    "ridge: smoothness with several heads on one κ takes dense ψ with equally many channels, and masked ψ of one "
                    "channel; take solver lbfgs"
                )
        penalties = Penalties(self.model, replace(self.config, penalty=0.0))
        members = [member.parameter for part in self.parts for member in part.members]
        before = self.coefficients()
        made = torch.zeros(len(columns), len(columns), dtype=torch.float64, device=self.device)
        theta = torch.zeros_like(before[0])
        scale = (self.share * self.counts.clamp_min(1))[output if self.masked else 0, columns]
        try:
            for i, column in enumerate(columns.tolist()):
                theta.zero_()[:, column] = 1
                self.assign(theta, None)
                gradients = torch.autograd.grad(penalties.value(), members, allow_unused=True)
                made[i] = self._row(gradients, output)[columns] / scale
        finally:
            self.assign(*before)
        return (made + made.T) / 2

    def _row(self, gradients: tuple[Tensor | None, ...], output: int) -> Tensor:
        """Return the sum of gradients with respect to the members, of one output, `(P,)`."""
        row = torch.zeros(self.columns, dtype=torch.float64, device=self.device)
        left = iter(gradients)
        for part, where in self._slices():
            for member in part.members:
                gradient = next(left)
                if gradient is None:
                    continue
                if member.mask is not None:
                    gradient = torch.zeros_like(member.mask, dtype=row.dtype).masked_scatter(member.mask, gradient)
                row[where] += (gradient.sum(0) if gradient.dim() == 3 else gradient)[output]
        return row
