"""Models: layers in sequence; and a single expansion as a torch module."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping
from typing import Any, Self, cast

import torch
from torch import Generator, Tensor, nn

from kapsi.arrays import as_dense, wider_dtype
from kapsi.contraction import Route
from kapsi.errors import DataError, SpecError, refuse
from kapsi.expansion.base import Expansion
from kapsi.features import Features, check_formed
from kapsi.hooks import original
from kapsi.html import data_table, joined, tag
from kapsi.modules.head import Head, check_dtype, check_tensor, check_width
from kapsi.modules.layer import Layer
from kapsi.modules.store import Seed, Store, allocate, as_generator
from kapsi.notation import short_form
from kapsi.spec import STANDARDIZING, HeadSpec, ModelSpec
from kapsi.text import text_table

NUMBERS = (1, 2, 3, 7, 8)
"""Columns of numbers of a summary."""

__all__ = ["ExpansionModule", "Model", "checked_rows", "has_own_forward", "scale_last_layer", "trained_count"]


class Model(nn.Module):
    """A Reconciled Polynomial Network: layers in sequence, for inputs `(..., m)` and outputs `(..., n)`.

    Args:
        spec: specification of the model, without null widths.
        seed: a seed or a generator for initial values; None uses torch's default generator.
        device, dtype: device and dtype of the tensors; default: those of torch.

    Raises:
        SpecError: a part is invalid; the message names it.

    Example:
        >>> import torch, kapsi as kp
        >>> model = kp.Model(kp.rpn([4, 8, 3], expansion=kp.Taylor(2), reconciliation=kp.LowRank(2)), seed=0)
        >>> model(torch.ones(5, 4)).shape
        torch.Size([5, 3])
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        seed: Seed = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(spec, ModelSpec):
            refuse("Model", "a ModelSpec, such as kp.rpn([…])", spec)
        check_dtype("Model", dtype)
        self.spec = spec
        generator = as_generator(seed)
        layers = []
        for i, (width, next_width, layer) in enumerate(spec.resolved()):
            try:
                layers.append(Layer(width, next_width, layer, seed=generator, device=device, dtype=dtype))
            except SpecError as error:
                raise SpecError(f"layers[{i}].{error}") from None
        self.layers = nn.ModuleList(layers)

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> Self:
        """Allocate the tensors without values on a device, for instance of a model on the meta device."""
        if not recurse:
            return super().to_empty(device=device, recurse=False)
        allocate(self, device)  # type: ignore[arg-type]
        return self

    @property
    def in_features(self) -> int:
        """Return the number of inputs."""
        return int(self.spec.widths[0] or 0)

    @property
    def out_features(self) -> int:
        """Return the number of outputs."""
        return int(self.spec.widths[-1] or 0)

    @property
    def standardized(self) -> bool:
        """Whether the first layer is the fixed affine map of `kapsi.standardized`."""
        return len(self.spec.layers) > 1 and self.spec.layers[0] == STANDARDIZING

    def input_dtype(self, given: torch.dtype) -> torch.dtype:
        """Return the type for inputs of a given type: that of the model; with a standardizing first layer a wider one is kept.

        Args:
            given: type of the inputs; integers of 32 and 64 bits count as float64.
        """
        own = next((t.dtype for t in (*self.parameters(), *self.buffers()) if t.is_floating_point()), given)
        return wider_dtype(given, own) if self.standardized else own

    def reset_parameters(self, seed: Seed = None) -> None:
        """Draw all tensors, for instance after `to_empty` of a model on the meta device."""
        generator = as_generator(seed)
        for layer in self.layers:
            _reset(layer, generator)

    def forward(self, x: Tensor, features: Mapping[int, Features] | None = None, *, route: Route = None) -> Tensor:
        """Return y of shape `(..., n)`.

        Args:
            x: inputs, `(..., m)`.
            features: κ(x) of the first layer, if known, from `Layer.fixed_features`.
            route: the route of all heads, see `Head.forward`; `model(x, route="dense")` computes without structure.
        """
        for layer in self.layers:
            if (features is None and route is None) or not isinstance(layer, Layer):
                x = layer(x)
            else:
                x = layer(x, features, route=route)
            features = None
        return x

    def heads(self) -> Iterator[tuple[str, Head]]:
        """Yield names and heads, such as `layers.0.heads.0`, without those inside of an expansion."""
        for name, module in self.named_modules():
            if isinstance(module, Head) and ".kappa." not in name:
                yield name, module

    def check_layers(self, where: str) -> list[Layer]:
        """Return the layers, of compiled ones the originals.

        Raises:
            SpecError: another module is in the place of a layer or a head.
        """
        layers = []
        for i, layer in enumerate(map(original, self.layers)):
            if not isinstance(layer, Layer):
                raise SpecError(
                    f"{where}: layers.{i} is a {type(layer).__name__}, expected a Layer; put the layer back first"
                )
            layer.check_heads(f"{where}: layers.{i}")
            layers.append(layer)
        expected = len(self.spec.resolved())
        if len(layers) != expected:
            raise SpecError(f"{where}: the model has {len(layers)} layers, and its specification {expected}")
        return layers

    def freeze(self, *patterns: str, frozen: bool = True) -> list[str]:
        """Freeze parameters, or with `frozen=False` unfreeze them; saved with the model.

        Args:
            *patterns: names of parameters or modules from `named_parameters()`, with `*` for any text:
                `"layers.0"`, `"*.psi"`, `"layers.*.bias"`.
            frozen: False to train again.

        Returns:
            The names of the parameters.

        Raises:
            SpecError: a pattern matches no parameter.
        """
        matched: list[str] = []
        names = [name for name, _ in self.named_parameters()]
        for pattern in patterns:
            fitting = [
                n for n in names if fnmatch.fnmatchcase(n, str(pattern)) or fnmatch.fnmatchcase(n, f"{pattern}.*")
            ]
            if not fitting:
                listed = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
                raise SpecError(
                    f"Model.freeze({pattern!r}): no parameter or module has this name; choose from {listed}"
                )
            matched += [name for name in fitting if name not in matched]
        for name in matched:
            self.get_parameter(name).requires_grad_(not frozen)
        return matched

    def summary(self) -> str:
        """Return a human-readable table: one line per head, and totals."""
        rows, footer = self._summary()
        return "\n".join((*text_table(rows, right=NUMBERS), footer))

    def _repr_html_(self) -> str:
        """Return the table of `summary` for notebooks."""
        (header, *rows), footer = self._summary()
        return joined([data_table(header, rows, right=NUMBERS), tag("p", footer)])

    def _summary(self) -> tuple[list[tuple[str, ...]], str]:
        rows: list[tuple[str, ...]] = [
            ("", "in", "D", "out", "expansion", "reconciliation", "remainder", "parameters", "frozen")
        ]
        for name, head in self.heads():
            spec, tensors = head.spec, list(head.parameters())
            frozen = sum(p.numel() for p in tensors if not p.requires_grad)
            sizes = [str(head.in_features), f"{math.prod(head.factors):,}", str(head.out_features)]
            functions = [short_form(spec.expansion), short_form(spec.reconciliation), short_form(spec.remainder)]
            if spec.channels > 1:
                functions[1] = f"{spec.channels} × {functions[1]}"
            if head._owner:
                functions[0] += " (shared)"
            rows.append(
                (name, *sizes, *functions, f"{sum(p.numel() for p in tensors):,}", f"{frozen:,}" if frozen else "-")
            )
        total = sum(p.numel() for p in self.parameters())
        trained = trained_count(self)
        buffers = sum(b.numel() for b in self.buffers())
        footer = f"{total:,} parameters, {trained:,} trained; {buffers:,} values in buffers"
        return rows, footer

    def extra_repr(self) -> str:
        return f"widths={list(self.spec.widths)}"


class ExpansionModule(nn.Module):
    """An expansion as a module, x → κ(x), for `nn.Sequential` and other torch models.

    Args:
        in_features: number of inputs m, at least 1.
        expansion: the expansion κ.
        seed, device, dtype: see `Head`.

    Attributes:
        out_features: number of columns D of κ(x).
        kappa: the store of the tensors of κ; `kapsi.calibrate` sets the tensors from data.

    Raises:
        SpecError: κ has too many columns.

    Example:
        >>> import torch, kapsi as kp
        >>> kappa = kp.ExpansionModule(4, kp.Chebyshev(3))
        >>> model = torch.nn.Sequential(torch.nn.Tanh(), kappa, torch.nn.Linear(kappa.out_features, 2))
        >>> model(torch.ones(5, 4)).shape
        torch.Size([5, 2])
    """

    def __init__(
        self,
        in_features: int,
        expansion: Expansion,
        *,
        seed: Seed = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        spec = HeadSpec(expansion)
        where = f"ExpansionModule({in_features})"
        self.in_features = check_width("ExpansionModule", "in_features", in_features)
        self.expansion = spec.expansion
        self.out_features = math.prod(self.expansion.factors(self.in_features))
        check_formed(self.out_features, where)
        check_dtype("ExpansionModule", dtype)
        params = self.expansion.params(self.in_features)
        self.kappa = Store(params, None, None if device is None else torch.device(device), dtype)
        self.reset_parameters(seed)

    @torch.no_grad()
    def reset_parameters(self, seed: Seed = None) -> None:
        """Draw all tensors."""
        if not any(tensor.is_meta for tensor in (*self.parameters(), *self.buffers())):
            self.kappa.reset(as_generator(seed))

    def forward(self, x: Tensor) -> Tensor:
        """Return κ(x), `(..., D)`, for x of shape `(..., m)`."""
        check_tensor("ExpansionModule", x, self.in_features)
        return self.expansion(x, self.kappa.ready()).dense()

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features}, {self.expansion}"


def _reset(module: nn.Module, generator: Generator | None) -> None:
    """Draw the tensors of a module in the place of a layer: of all modules in it with a method for that."""
    reset = getattr(module, "reset_parameters", None)
    if isinstance(module, Model | Layer | Head | ExpansionModule):
        module.reset_parameters(generator)
    elif callable(reset):
        reset()
    else:
        for child in module.children():
            _reset(child, generator)


def has_own_forward(module: nn.Module) -> bool:
    """Return whether a `Model`, `Layer`, `Head` or `nn.Linear` has a forward method other than that of its class."""
    kind = next((kind for kind in (Model, Layer, Head, nn.Linear) if isinstance(module, kind)), None)
    return kind is not None and ("forward" in module.__dict__ or type(module).forward is not kind.forward)


@torch.no_grad()
def scale_last_layer(model: Model, factor: float = 0.01) -> Model:
    """Scale the last layer of a model, in place: with a small factor the first outputs are near zero."""
    for head in cast(list[Head], list(model.check_layers("scale_last_layer")[-1].heads)):
        weights = list(head.psi.parameters())
        if weights:
            head.spec.reconciliation.scale(weights, factor)
        for tensor in head.pi.parameters():
            tensor.mul_(factor)
    return model


def trained_count(model: nn.Module) -> int:
    """Return the number of trained values of a module."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def checked_rows(model: Any, x: Any, where: str, least: int = 1) -> Tensor:
    """Return at least `least` rows of a tensor, array or frame in the type and on the device of a model."""
    if not isinstance(model, Model):
        raise SpecError(f"{where}: expected a kapsi Model, got {type(model).__name__}")
    x = as_dense(x, "inputs", where)
    if x.dim() != 2 or x.shape[1] != model.in_features or len(x) < least:
        size = "" if least == 1 else f" with at least {least} rows"
        raise DataError(f"{where}: expected inputs of shape (rows, {model.in_features}){size}, got {tuple(x.shape)}")
    if not bool(x.isfinite().all()):
        raise DataError(f"{where}: the inputs must be finite")
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        raise SpecError(f"{where}: the model is on the meta device and has no values")
    like = next(
        (tensor for tensor in tensors if tensor.is_floating_point()), x.new_empty(0, dtype=torch.get_default_dtype())
    )
    return x.to(like.device, like.dtype)
