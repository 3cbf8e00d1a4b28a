"""Models linear in their trained parameters, or in each trained tensor: detection, and the design matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kapsi.errors import DataError, SpecError
from kapsi.features import formed
from kapsi.fusion import Mean, Sum
from kapsi.hooks import copied, has_hooks, original
from kapsi.modules import Head, Layer, Model, Store, has_own_forward
from kapsi.process import BatchNorm, Process
from kapsi.reconciliation import Masked, Reconciliation, ZeroReconciliation
from kapsi.remainder import ExpansionRemainder, LinearRemainder, Remainder, ZeroRemainder
from kapsi.training.penalties import Penalties
from kapsi.weights import DenseWeights, Weights

if TYPE_CHECKING:
    from kapsi.training.config import TrainConfig

Expand = Callable[[Tensor], Tensor]


class NotLinear(Exception):
    """The reason why a model is not linear in each trained tensor."""


@dataclass(frozen=True)
class Member:
    """A parameter added to the coefficients of some columns.

    Attributes:
        parameter: `(n, D)` or `(channels, n, D)`; `(n,)` for a bias; the values of the true entries of a mask.
        mask: trained entries, `(n, D)` or `(channels, n, D)`; None for all.
    """

    parameter: nn.Parameter
    mask: Tensor | None = None


@dataclass
class Part:
    """Columns with the same coefficients: f = s Σ_members coefficients · φ(x) + ….

    Attributes:
        expand: φ, from the inputs of the layer to `(rows, columns)`; None for the constant column.
        columns: D.
        members: summands of the coefficients.
    """

    expand: Expand | None
    columns: int
    members: list[Member] = field(default_factory=list)


@dataclass
class Structure:
    """How the outputs of a model depend on its trained parameters.

    Attributes:
        prefix: frozen layers before the trained one.
        layer: the trained layer, or `nn.Linear`.
        share: s, the factor of the sum of heads.
        parts: columns with their linear coefficients.
        factors: the trained tensors of each ψ (or π) linear in every tensor, the others fixed.
        fixed: whether some terms have no trained parameters.
    """

    prefix: list[nn.Module]
    layer: nn.Module
    share: float = 1.0
    parts: dict[Any, Part] = field(default_factory=dict)
    factors: list[list[nn.Parameter]] = field(default_factory=list)
    fixed: bool = False

    def part(self, key: Any, expand: Expand | None, columns: int) -> Part:
        """Return the part of a key; create it on first use."""
        return self.parts.setdefault(key, Part(expand, columns))

    def inputs(self, x: Tensor) -> Tensor:
        """Return the inputs of the trained layer."""
        for layer in self.prefix:
            x = layer(x)
        return x


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def structure(model: nn.Module) -> Structure:
    """Return the structure of a model.

    Raises:
        NotLinear: the outputs are not linear in a trained tensor.
    """
    changed = next((name for name, m in model.named_modules() if has_hooks(m) or has_own_forward(m)), None)
    if changed is not None:
        raise NotLinear(f"{changed or 'the model'} has hooks, or a forward method of its own")
    if isinstance(model, nn.Linear) and not {"weight", "bias"} <= model._parameters.keys():
        raise NotLinear("the weight of the model is computed by a parametrization")
    if isinstance(model, nn.Linear):
        result = Structure([], model)
        result.part("linear", lambda x: x, model.in_features)
        if model.weight.requires_grad:
            result.parts["linear"].members.append(Member(cast(nn.Parameter, model.weight)))
        else:
            result.fixed = True
        _add_bias(result, model.bias)
        return result
    if not isinstance(model, Model):
        raise NotLinear(f"the model is a {type(model).__name__}, not a kapsi.Model or nn.Linear")
    if not all(isinstance(original(layer), Layer) for layer in model.layers):
        raise NotLinear("another module is in the place of a layer")
    *before, last = cast(list[Layer], list(model.layers))
    for i, layer in enumerate(before):
        if _trained(layer):
            raise NotLinear(f"the model has {len(model.layers)} layers, and layers.{i} is trained")
        for head in layer.heads:
            if not isinstance(head, Head):
                raise NotLinear(f"layers.{i} has a {type(head).__name__} in the place of a head")
            _require_deterministic((*head.spec.steps(), *layer.spec.output), f"layers.{i}")
    where = f"layers.{len(before)}"
    if last.spec.output:
        raise NotLinear(f"{where} has output processing")
    if not isinstance(last.spec.fusion, Sum | Mean):
        raise NotLinear(f"the fusion of {where} is {last.spec.fusion}, neither Sum nor Mean")
    share = 1 / len(last.heads) if isinstance(last.spec.fusion, Mean) else 1.0
    result = Structure(list(before), last, share)
    for i, head in enumerate(last.heads):
        if not isinstance(head, Head) or not head.fusible():
            raise NotLinear(
                f"{where}.heads.{i} has hooks, a replaced method, pruned or parametrized tensors, or is no Head"
            )
        _add_head(result, head, f"{where}.heads.{i}", last._owners[i])
    return result


def _require_deterministic(steps: tuple[Process, ...], where: str) -> None:
    for step in steps:
        if step.random or isinstance(step, BatchNorm):
            raise NotLinear(f"{step} of {where} differs between passes")


def _add_head(result: Structure, head: Head, where: str, owner: int) -> None:
    spec = head.spec
    _require_deterministic(spec.steps(), where)
    if not isinstance(spec.fusion, Sum):
        raise NotLinear(f"the channels of {where} are combined by {spec.fusion}, not summed")
    for name, module in (("κ", head.kappa), ("processing before κ", head.before), ("processing after κ", head.after)):
        if _trained(module):
            raise NotLinear(f"{name} of {where} is trained")

    def expand(x: Tensor) -> Tensor:
        return formed(head.expand(x), where)

    _add_psi(result, spec.reconciliation, head.psi, expand, head.out_features, head.factors, ("psi", owner), where)
    _add_bias(result, head.bias)
    _add_remainder(result, spec.remainder, head.pi, (head.in_features, head.out_features), where)


def _add_bias(result: Structure, bias: nn.Parameter | None) -> None:
    if bias is None:
        return
    if bias.requires_grad:
        result.part("constant", None, 1).members.append(Member(bias))
    else:
        result.fixed = True


def _add_psi(
    result: Structure,
    psi: Reconciliation,
    store: Store,
    expand: Expand,
    outputs: int,
    factors: tuple[int, int],
    key: Any,
    where: str,
) -> None:
    columns = factors[0] * factors[1]
    trained = _trained(store)
    if not trained:
        result.fixed |= not isinstance(psi, ZeroReconciliation)
    elif psi.random:
        raise NotLinear(f"{psi} of {where} differs between passes")
    elif isinstance(psi, Masked) and key[0] == "psi":
        result.part(key, expand, columns).members.append(Member(trained[0], store["mask"]))
    elif not psi.multilinear:
        raise NotLinear(f"{psi} of {where} is not declared linear in each tensor (multilinear = True)")
    elif len(trained) == 1 and _is_matrix(psi(store, outputs, factors), trained[0]):
        result.part(key, expand, columns).members.append(Member(trained[0]))
    else:  # includes masked remainders: their values have no penalty, as biases
        result.factors.append(trained)


def _is_matrix(weights: Weights, parameter: nn.Parameter) -> bool:
    """Return whether ψ is one matrix of free entries, the parameter itself."""
    return isinstance(weights, DenseWeights) and weights.values is parameter


def _add_remainder(result: Structure, pi: Remainder, store: Any, sizes: tuple[int, int], where: str) -> None:
    in_features, out_features = sizes
    if isinstance(pi, ZeroRemainder):
        return
    if not _trained(store):
        result.fixed = True
    elif isinstance(pi, LinearRemainder):
        if pi.after is not None:
            raise NotLinear(f"the linear remainder of {where} has an activation after the matrix")
        if store["matrix"].requires_grad:
            activation = pi.before
            expand = (lambda x: x) if activation is None else activation.__call__
            result.part(("linear", activation), expand, in_features).members.append(Member(store["matrix"]))
        else:
            result.fixed = True
        _add_bias(result, store["bias"] if pi.bias else None)
    elif isinstance(pi, ExpansionRemainder):
        kappa = store["expansion"]
        if _trained(kappa):
            raise NotLinear(f"κ of the remainder of {where} is trained")
        expansion, factors = pi.expansion, pi.expansion.factors(in_features)

        def expanded(x: Tensor) -> Tensor:
            return formed(expansion(x, kappa), where)

        psi, key = store["reconciliation"], ("pi", id(store))
        _add_psi(result, pi.reconciliation, psi, expanded, out_features, factors, key, where)
        _add_remainder(result, pi.remainder, store["remainder"], sizes, where)
    elif pi.multilinear:
        result.factors.append(_trained(store))
    else:
        raise NotLinear(f"{pi} of {where} is not declared linear in each tensor (multilinear = True)")


def reason_not_linear(model: nn.Module) -> str | None:
    """Return the reason why a model is not linear in all trained parameters jointly; None for a linear model.

    A linear model has one trained layer, the last one: the sum or mean of heads with κ without trained tensors, ψ of one trained
    matrix (`Dense`, `Masked`) or none, and a linear remainder.

    Example:
        >>> import kapsi as kp
        >>> reason_not_linear(kp.Model(kp.rpn([2, 1], kp.Taylor(2), bias=True)))
        >>> reason_not_linear(kp.Model(kp.rpn([2, 1], kp.Taylor(2), kp.LowRank(1))))
        'a ψ is a product of tensors, or shares entries'
    """
    try:
        result = structure(model)
    except NotLinear as reason:
        return str(reason)
    if result.factors:
        return "a ψ is a product of tensors, or shares entries"
    if not any(part.members for part in result.parts.values()):
        return "it has no trainable parameters"
    return None


def widened(model: nn.Module) -> nn.Module:
    """Return a copy of a model in float64, in evaluation mode."""
    return copied(model).double().eval()


# ------------------------------------------------------------------------------------------------ the design matrix


class LinearDesign:
    """A linear model as f(x) = θ φ(x) + b + offset(x), with θ `(n, P)`.

    Parameters with the same columns, for instance of several channels, share one coefficient θ, their sum. Equal values
    θ / (s·count) have the least penalty.

    Attributes:
        columns: P, without the constant.
        outputs: n.
        counts: number of parameters per entry of θ, 0 for masked ones; `(n, P)`, or `(1, P)` without masks.
        strength: weight of θ² in the penalty, of the shape of `counts`.
        constant: whether b is trained.

    Args:
        model: the copy in float64, see `widened`; `assign` sets its parameters.
        config: training options `l2` and `smoothness`.
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
        """Return φ(x) `(rows, P)`, and the outputs at trained parameters of zero; None for zero outputs."""
        if x.layout != torch.strided:
            x = x.to_dense()
        if x.dim() != 2:
            raise DataError(f"ridge: expected inputs of shape (rows, m), got {tuple(x.shape)}")
        x = x.to(self.device, torch.float64)
        with torch.no_grad():
            inputs = self.structure.inputs(x)
            pieces = [part.expand(inputs) for part in self.parts if part.expand is not None]
            columns = torch.cat(pieces, 1) if pieces else inputs.new_zeros(len(x), 0)
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
        mean = theta / (self.share * self.counts.clamp_min(1))
        for part, where in self._slices():
            for member in part.members:
                values = mean[:, where]
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
        """Return θ `(n, P)` and b `(n,)` of the current parameters."""
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
        """Return the indices of outputs with equal masks, and of their columns, for each mask."""
        outputs = torch.arange(self.outputs, device=self.device)
        if not self.masked:
            return [(outputs, torch.arange(self.columns, device=self.device))]
        _, number = torch.unique(self.counts, dim=0, return_inverse=True)
        groups = [outputs[number == i] for i in range(int(number.max()) + 1)]
        return [(group, self.counts[group[0]].nonzero()[:, 0]) for group in groups]

    def roughness(self, output: int, columns: Tensor) -> Tensor | None:
        """Return the Hessian of the smoothness penalty in the coefficients of one output; None without smoothness."""
        if not self.config.fixed_smoothness:
            return None
        for part in self.parts:
            channels = {m.parameter.shape[0] if m.parameter.dim() == 3 else 1 for m in part.members}
            masks = [m.mask for m in part.members if m.mask is not None]
            # Otherwise equal summands are not optimal.
            if len(channels) > 1 or (masks and (len(part.members) > 1 or masks[0].dim() > 2)):
                raise SpecError(
                    "ridge: smoothness with several heads on one κ needs dense ψ with equal numbers of channels, or masked ψ with "
                    "one channel; use solver lbfgs"
                )
        penalties = Penalties(self.model, replace(self.config, l2=0.0))
        members = [member.parameter for part in self.parts for member in part.members]
        before = self.coefficients()
        hessian = torch.zeros(len(columns), len(columns), dtype=torch.float64, device=self.device)
        theta = torch.zeros_like(before[0])
        scale = (self.share * self.counts.clamp_min(1))[output if self.masked else 0, columns]
        try:
            for i, column in enumerate(columns.tolist()):
                theta.zero_()[:, column] = 1
                self.assign(theta, None)
                gradients = torch.autograd.grad(penalties.value(), members, allow_unused=True)
                hessian[i] = self._row(gradients, output)[columns] / scale
        finally:
            self.assign(*before)
        return (hessian + hessian.T) / 2

    def _row(self, gradients: tuple[Tensor | None, ...], output: int) -> Tensor:
        """Return the sum of the gradients in all members, for one output, `(P,)`."""
        row = torch.zeros(self.columns, dtype=torch.float64, device=self.device)
        remaining = iter(gradients)
        for part, where in self._slices():
            for member in part.members:
                gradient = next(remaining)
                if gradient is None:
                    continue
                if member.mask is not None:
                    gradient = torch.zeros_like(member.mask, dtype=row.dtype).masked_scatter(member.mask, gradient)
                row[where] += (gradient.sum(0) if gradient.dim() == 3 else gradient)[output]
        return row
