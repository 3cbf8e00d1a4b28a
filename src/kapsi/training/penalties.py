"""Penalties on the parameters of a model: L2, L1, smoothness of splines, group sparsity of edges."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kapsi.errors import SpecError
from kapsi.expansion import BSpline, Expansion, Extended, Nested
from kapsi.features import add
from kapsi.function import Param, Submodule
from kapsi.modules import ExpansionModule, Head, Layer, Store
from kapsi.process import Activation, BatchNorm, Dropout, Process
from kapsi.reconciliation import Reconciliation
from kapsi.remainder import ExpansionRemainder
from kapsi.weights import DenseWeights, LowRankWeights, Weights

if TYPE_CHECKING:
    from kapsi.training.config import TrainConfig

REMAINDER_SHARE = 0.01
"""Weight of the remainder in the penalty: π carries the plain part of the function, ψ the rest."""

MAX_ELEMENTS = 2**24
"""Maximum number of elements of a ψ materialized in every step for a penalty: 128 MiB in float64."""

MAX_MATRIX = 5_000
"""Maximum number of parameters for the matrix of the quadratic penalties: 200 MB in float64."""

COLUMNS_AT_ONCE = 64
"""Columns of the matrix computed at a time."""


@dataclass(frozen=True)
class _GridColumns:
    """Columns of κ with functions on a grid of each input: start + g·inputs + i is function g of input i."""

    start: int
    functions: int
    inputs: int


@dataclass(frozen=True)
class _Pair:
    """κ and ψ of a head, or of a remainder with an expansion."""

    name: str
    expansion: Expansion
    reconciliation: Reconciliation
    store: Store
    in_features: int
    out_features: int
    steps: tuple[Process, ...]

    def weights(self, replaced: Mapping[int, Tensor] | None = None) -> Weights:
        """Return ψ of whole tensors, some replaced: new tensors by the `id` of a parameter."""
        with self.store.evaluating():
            tensors = _Whole(self.store, replaced or {})
            return self.reconciliation(tensors, self.out_features, self.expansion.factors(self.in_features))

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.store.parameters() if p.requires_grad]


class _Whole:
    """The tensors of a store, gathered from all processes; some replaced."""

    def __init__(self, store: Store, replaced: Mapping[int, Tensor]) -> None:
        self.store, self.replaced = store, replaced

    def __getitem__(self, name: str) -> Any:
        param, value = self.store._declared[name], getattr(self.store, name)
        if isinstance(param, Submodule):
            return value
        if not isinstance(param, Param):
            return _Whole(value, self.replaced)
        tensor = _whole(self.replaced.get(id(value), value))
        return tensor.movedim(0, -1) if param.transposed else tensor


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor gathered from all processes."""
    full: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


class Penalties:
    """The penalties of a configuration for the parameters of one model.

    λ/2 Σ weight·‖p‖² + l1 Σ weight·|p| + smoothness Σ (c_{g+2} − 2c_{g+1} + c_g)² + group_l1 Σ ‖edge‖

    Parameters of κ and ψ of a head have weight 1, tensors of π with more than one axis 0.01, and biases and all other
    parameters of a kapsi model 0. In other modules, tensors with more than one axis have weight 1. Frozen parameters have none.

    c are the coefficients of a B-spline along the grid, of a head (summed over channels) or a remainder: κ is a `BSpline`, has a
    `BSpline` as a part of `Extended`, or ends with a `BSpline` in `Nested`. An edge is all weights of ψ, over columns of κ and
    channels, between an input and an output of a head or remainder; the norm of an edge has the gradient 0 at 0.

    Shard a model among processes before creating its penalties.

    Args:
        model: model with the penalized parameters.
        config: training options `l2`, `l1`, `smoothness` and `group_l1`.

    Raises:
        SpecError: no parameter for a penalty, or a ψ too large to be materialized.

    Attributes:
        any: whether a penalty is above zero.
        strength: λ, zero if `config.l2` is None.
        quadratic: `(parameter, weight)` of all parameters under L2 and L1.
        only_quadratic: whether the sum is quadratic in all trained parameters jointly: L2, and smoothness of a ψ linear in a
            single trained tensor (dense or masked).

    Example:
        >>> import kapsi as kp, torch
        >>> model = kp.Model(kp.rpn([2, 1], expansion=kp.BSpline()), seed=0, dtype=torch.float64)
        >>> penalties = Penalties(model, kp.TrainConfig(l2=0.1, smoothness=0.01))
        >>> penalties.only_quadratic
        True
        >>> w = penalties.parameters[0].detach()
        >>> half = (w * penalties.hessian_vector([w])[0]).sum() / 2
        >>> torch.allclose(half, penalties.value())
        True
    """

    any: bool
    strength: float
    quadratic: list[tuple[nn.Parameter, float]]
    only_quadratic: bool

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.strength, self._l1 = config.l2 or 0.0, config.l1
        self._smoothness, self._group = config.fixed_smoothness, config.group_l1
        self.quadratic = _weighted(model)
        groups: dict[float, list[Tensor]] = {}
        for parameter, weight in self.quadratic:
            groups.setdefault(weight, []).append(parameter)
        self._penalized = [(self.strength * weight, group) for weight, group in groups.items()] if self.strength else []
        parts = [part for part in _parts(model) if part.trained()] if self._smoothness or self._group else []
        for part in parts:
            part.store.check_as_declared(
                f"TrainConfig({_options(smoothness=self._smoothness, group_l1=self._group)}): {part.name}"
            )
        self._splines = _splines(parts, self._smoothness) if self._smoothness else []
        self._edges = _edges(parts, self._group) if self._group else []
        held = bool(self.quadratic) and (self.strength > 0 or self._l1 > 0)
        self.any = held or bool(self._splines) or bool(self._edges)
        self.only_quadratic = (
            not (self._l1 and self.quadratic)
            and not self._edges
            and all(_is_quadratic(part) for part, _ in self._splines)
        )

    # -------------------------------------------------------------------------------- values

    def value(self) -> Tensor:
        """Return the sum of the penalties, `()`, differentiable in the parameters."""
        terms = [(0.5 * strength) * _whole(p.square().sum()) for strength, group in self._penalized for p in group]
        rest = self.rest_value()
        if rest is not None:
            terms.append(rest)
        return add(terms) if terms else torch.zeros((), **_like(self.parameters))

    def rest_value(self) -> Tensor | None:
        """Return the sum of all but L2, `()`, differentiable in the parameters; None if there is nothing else."""
        terms: list[Tensor] = []
        if self._l1:
            terms += [(self._l1 * weight) * _whole(p.abs().sum()) for p, weight in self.quadratic]
        terms += [self._smoothness * _roughness(part.weights(), blocks) for part, blocks in self._splines]
        terms += [self._group * _edge_norms(part.weights(), part.in_features) for part in self._edges]
        return add(terms) if terms else None

    @torch.no_grad()
    def apply_gradient(self) -> None:
        """Add the gradient of the L2 part to `.grad` of the parameters, in place; a parameter without a gradient gets one.

        Gradients scaled for float16 must be unscaled before.
        """
        for strength, group in self._penalized:
            gradients = [gradient for p in group if (gradient := p.grad) is not None]
            if len(gradients) < len(group):
                for p in group:
                    p.grad = strength * p.detach() if p.grad is None else p.grad.add_(p, alpha=strength)
            else:
                torch._foreach_add_(gradients, group, alpha=strength)

    # -------------------------------------------------------------------------------- second derivatives

    @torch.no_grad()
    def hessian_vector(self, vector: Sequence[Tensor]) -> list[Tensor]:
        """Return H v for the constant Hessian H of the penalties; H p of the parameters p is the gradient.

        Args:
            vector: v, a tensor of the shape of each trained parameter, in the order of `model.parameters()`.

        Raises:
            SpecError: not all penalties are quadratic.
        """
        self._check_quadratic("hessian_vector", self.only_quadratic)
        index = {id(p): i for i, p in enumerate(self.parameters)}
        product = [torch.zeros_like(v) for v in vector]
        for parameter, weight in self.quadratic:
            i = index[id(parameter)]
            product[i] = (self.strength * weight) * vector[i]
        for part, _ in self._splines:
            (parameter,) = part.trained()
            i = index[id(parameter)]
            product[i] = product[i] + self._smooth_product(parameter)(vector[i])
        return product

    def matrix(self) -> Tensor:
        """Return the Hessian `(P, P)` of the penalties, the P trained parameters in the order of `model.parameters()`.

        Raises:
            SpecError: not all penalties are quadratic, or P is above 5,000.
        """
        self._check_quadratic("matrix", self.only_quadratic)
        total = sum(p.numel() for p in self.parameters)
        _check_matrix(total)
        matrix = torch.zeros(total, total, **_like(self.parameters))
        start = 0
        for parameter in self.parameters:
            end = start + parameter.numel()
            matrix[start:end, start:end] = self.block(parameter)
            start = end
        return matrix

    @torch.no_grad()
    def block(self, parameter: nn.Parameter) -> Tensor:
        """Return the Hessian `(p, p)` of L2 and smoothness in a trained parameter, the others fixed.

        Smoothness is quadratic in each tensor of a multilinear ψ (`LowRank`, for instance); H p is the gradient.

        Raises:
            SpecError: L1 or group sparsity, more than 5,000 parameters, or a ψ without `multilinear`.
        """
        self._check_quadratic("block", not self._edges and not (self._l1 and self.quadratic))
        size = parameter.numel()
        _check_matrix(size)
        weight = next((weight for p, weight in self.quadratic if p is parameter), 0.0)
        block = (self.strength * weight) * torch.eye(size, **_like([parameter]))
        if any(p is parameter for part, _ in self._splines for p in part.trained()):
            block += self.roughness_matrix(parameter)
        return block

    @torch.no_grad()
    def roughness_matrix(self, parameter: nn.Parameter) -> Tensor:
        """Return the Hessian `(p, p)` of smoothness in a trained parameter of a ψ on splines, the others fixed."""
        product = self._smooth_product(parameter)
        columns = torch.func.vmap(lambda v: product(v.view(parameter.shape)).flatten(), chunk_size=COLUMNS_AT_ONCE)
        with warnings.catch_warnings():
            # Masked ψ are filled one vector after another, and torch warns of the cost.
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            return columns(torch.eye(parameter.numel(), **_like([parameter])))

    def smooth_parameters(self) -> list[nn.Parameter]:
        """Return the parameters in which smoothness is quadratic with a constant Hessian: the only trained tensor of a ψ."""
        parts = [part for part, _ in self._splines if _is_quadratic(part)]
        return list({id(p): p for part in parts for p in part.trained()}.values())

    def _check_quadratic(self, where: str, quadratic: bool) -> None:
        if not quadratic:
            options = _options(l1=self._l1, group_l1=self._group)
            several = f"smoothness={self._smoothness} of a ψ with several trained tensors"
            raise SpecError(
                f"Penalties.{where}: {options or several} is not quadratic; use a gradient solver (adamw, sgd, lbfgs), or "
                f"{'l2' if options else 'a dense or masked ψ'}"
            )

    def _smooth_product(self, parameter: nn.Parameter) -> Callable[[Tensor], Tensor]:
        """Return the function v ↦ H v for the Hessian H of smoothness in one tensor: the gradient of vᵀH v/2."""
        owners = [(part, blocks) for part, blocks in self._splines if any(p is parameter for p in part.trained())]
        for part, _ in owners:
            if not part.reconciliation.multilinear:
                raise SpecError(
                    f"TrainConfig(smoothness={self._smoothness}): {part.name}: {part.reconciliation} is not linear in each "
                    "tensor; use another ψ, or a gradient solver (adamw, sgd, lbfgs)"
                )

        def roughness(values: Tensor) -> Tensor:
            terms = [_roughness(part.weights({id(parameter): values}), blocks) for part, blocks in owners]
            return self._smoothness * add(terms)

        return torch.func.grad(roughness)


def _options(**options: float) -> str:
    """Return the penalties above zero as options, for messages."""
    return ", ".join(f"{name}={value}" for name, value in options.items() if value)


def _like(parameters: Sequence[Tensor]) -> dict[str, Any]:
    return {"dtype": parameters[0].dtype, "device": parameters[0].device} if parameters else {}


def _check_matrix(count: int) -> None:
    if count > MAX_MATRIX:
        raise SpecError(f"Penalties: a matrix of {count:,} parameters; at most {MAX_MATRIX:,}; use hessian_vector")


# ------------------------------------------------------------------------------------------------ penalized parameters


def _weighted(model: nn.Module) -> list[tuple[nn.Parameter, float]]:
    """Return the penalized parameters, each once, with the weights."""
    pairs: list[tuple[nn.Parameter, float]] = []
    ours: set[int] = set()
    for module in model.modules():
        if isinstance(module, Head):
            pairs += [(p, 1.0) for p in (*module.psi.parameters(), *_kappa_parameters(module))]
            # By shape: the bias of a remainder has one axis.
            pairs += [(p, REMAINDER_SHARE) for p in module.pi.parameters() if p.dim() > 1]
        if isinstance(module, Head | Layer):
            ours |= {id(p) for p in module.parameters()}
        if isinstance(module, ExpansionModule):
            pairs += [(p, 1.0) for p in _kappa_parameters(module)]
            ours |= {id(p) for p in module.parameters()}
    pairs += [(p, 1.0) for p in model.parameters() if id(p) not in ours and p.dim() > 1]
    once = {id(p): (p, weight) for p, weight in reversed(pairs) if p.requires_grad}
    return list(reversed(once.values()))


def _kappa_parameters(module: Head | ExpansionModule) -> list[nn.Parameter]:
    """Return the parameters of κ without those of layers inside of κ, which have weights of their own."""
    inner = {id(p) for part in module.kappa.modules() if isinstance(part, Layer) for p in part.parameters()}
    return [p for p in module.kappa.parameters() if id(p) not in inner]


def _is_quadratic(part: _Pair) -> bool:
    """Return whether smoothness is quadratic with a constant Hessian."""
    return len(part.trained()) == 1 and part.reconciliation.multilinear


def has_smooth_parameters(model: nn.Module) -> bool:
    """Return whether a model has splines for `smoothness: auto`, and no spline has a ψ with computed tensors."""
    parts = [part for part in _parts(model) if part.trained() and _grids(part)]
    return any(_is_quadratic(part) for part in parts) and all(part.store.as_declared() for part in parts)


def _parts(model: nn.Module) -> Iterator[_Pair]:
    """Yield all pairs of κ and ψ."""
    for name, head in model.named_modules():
        if not isinstance(head, Head):
            continue
        spec, width, outputs = head.spec, head.in_features, head.out_features
        yield _Pair(name, spec.expansion, spec.reconciliation, head.psi, width, outputs, spec.steps())
        remainder, store, where = spec.remainder, head.pi, f"{name}.pi"
        while isinstance(remainder, ExpansionRemainder):
            psi = store["reconciliation"]
            yield _Pair(where, remainder.expansion, remainder.reconciliation, psi, width, outputs, ())
            remainder, store, where = remainder.remainder, store["remainder"], f"{where}.remainder"


def _check_formed(part: _Pair, option: str, *, but: type[Weights] | tuple[type[Weights], ...]) -> None:
    """Raise a `SpecError` if a penalty materializes a ψ of too many elements."""
    with torch.no_grad():
        weights = part.weights()
    size = (weights.channels or 1) * part.out_features * weights.columns
    if size > MAX_ELEMENTS and not isinstance(weights, but):
        raise SpecError(
            f"TrainConfig({option}): {part.name}: {part.reconciliation} would materialize {size:,} entries in every step, "
            f"at most {MAX_ELEMENTS:,} are allowed; use fewer basis functions, or {option.split('=')[0]}=0"
        )


# ------------------------------------------------------------------------------------------------ smoothness


def _splines(parts: list[_Pair], factor: float) -> list[tuple[_Pair, list[_GridColumns]]]:
    """Return the pairs with splines in κ, and the positions of the splines."""
    splines = []
    for part in parts:
        blocks = _grids(part)
        if blocks:
            _check_formed(part, f"smoothness={factor}", but=(DenseWeights, LowRankWeights))
            splines.append((part, blocks))
    if not splines:
        raise SpecError(
            f"TrainConfig(smoothness={factor}): the model has no trained ψ on a BSpline of at least three functions; "
            "use a BSpline as expansion, or smoothness=0"
        )
    return splines


def _grids(part: _Pair) -> list[_GridColumns]:
    """Return the positions of the splines with second differences."""
    return [block for block in _spline_blocks(part.expansion, part.in_features) if block.functions > 2]


def _spline_blocks(expansion: Expansion, in_features: int, start: int = 0) -> Iterator[_GridColumns]:
    if isinstance(expansion, BSpline):
        yield _GridColumns(start, *expansion.factors(in_features))
    elif isinstance(expansion, Extended):
        for part in expansion.parts:
            yield from _spline_blocks(part, in_features, start)
            start += part.out_features(in_features)
    elif isinstance(expansion, Nested):
        for part in expansion.parts[:-1]:
            in_features = part.out_features(in_features)
        yield from _spline_blocks(expansion.parts[-1], in_features, start)


def _roughness(weights: Weights, blocks: list[_GridColumns]) -> Tensor:
    """Return Σ of squared second differences of coefficients along the grid, `()`."""
    merged = weights.merged()
    if isinstance(merged, LowRankWeights):
        # ‖A R‖² = ⟨AᵀA, RRᵀ⟩ needs no n × D matrix.
        rows = torch.cat([_differences(merged.right, block) for block in blocks], -1)
        return ((merged.left.mT @ merged.left) * (rows @ rows.mT)).sum()
    matrix = merged.matrix() if merged.channels is None else merged.matrix().sum(0)
    return add([_differences(matrix, block).square().sum() for block in blocks])


def _differences(rows: Tensor, block: _GridColumns) -> Tensor:
    """Return second differences along the grid of rows `(k, D)`, `(k, (functions − 2)·inputs)`."""
    at, width = block.start, block.inputs
    c = rows[:, at : at + block.functions * width]
    # Neighbors on the grid are `inputs` columns apart.
    return c[:, 2 * width :] - 2 * c[:, width:-width] + c[:, : -2 * width]


# ------------------------------------------------------------------------------------------------ group sparsity


def _edges(parts: list[_Pair], factor: float) -> list[_Pair]:
    """Return the pairs, all with edges."""
    option = f"group_l1={factor}"
    if not parts:
        raise SpecError(f"TrainConfig({option}): the model has no trained ψ of a kapsi head; set group_l1=0, or l1")
    for part in parts:
        if not part.expansion.element_wise():
            raise SpecError(
                f"TrainConfig({option}): {part.name}: the columns of {part.expansion} depend on several inputs, so there are no "
                "edges; use an element-wise κ, such as Identity, BSpline, Chebyshev, Fourier, GaussianRBF, or Extended and Nested "
                "made of them, or group_l1=0"
            )
        mixing = [step for step in part.steps if not isinstance(step, Activation | BatchNorm | Dropout)]
        if mixing:
            raise SpecError(
                f"TrainConfig({option}): {part.name}: {mixing[0]} mixes inputs, so there are no edges; use activations, "
                "BatchNorm and Dropout before and after κ only, or group_l1=0"
            )
        _check_formed(part, option, but=DenseWeights)
    return parts


def _edge_norms(weights: Weights, in_features: int) -> Tensor:
    """Return the sum of the norms of all edges, `()`; the gradient at 0 is 0."""
    edges = weights.dense().unflatten(-1, (-1, in_features))
    return torch.linalg.vector_norm(edges, dim=(0, 2)).sum()
