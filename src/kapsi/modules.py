"""Head → Layer → Model, and the stores that hold their tensors: the only stateful file.

y = contract(self.expand(x), self.weights()).sum(channels) + self.remainder(x)
"""

from __future__ import annotations

import copy
import fnmatch
import keyword
import math
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Generator, Tensor, nn

from kapsi.contraction import Route, contract, contract_sum
from kapsi.errors import SpecError, did_you_mean
from kapsi.expansion.base import Expansion
from kapsi.features import DenseFeatures, Features, add, check_formed, formed
from kapsi.function import LARGEST_EXPANSION, LARGEST_TENSOR, Param, Params, flatten
from kapsi.fusion import Mean, Sum
from kapsi.initial import output_spread, probe
from kapsi.process import LayerNorm, pipeline
from kapsi.reconciliation import DualLowRankKronecker, KhatriRao
from kapsi.remainder import ZeroRemainder
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec
from kapsi.weights import DenseWeights, Weights, can_stack

__all__ = ["ExpansionModule", "Head", "Layer", "Model", "Store", "calibrate", "trained_count"]

LARGEST_TRAINED = 2**29
"""Trainable numbers of the largest ψ that is made: 8.6 GB in training, with gradient and the two moments of AdamW in float32."""

LARGEST_JOINED = 2**21
"""Elements of ψ of all heads that are contracted together: 8 MiB in float32."""

M = TypeVar("M", bound=nn.Module)
Role = Literal["expansion", "reconciliation", "remainder"]
Seed = int | Generator | None
"""Where random values come from: a seed, a generator, or None for torch's default generator."""


def as_generator(seed: Seed) -> Generator | None:
    """Return a generator of one's own for a seed, the given one, or None."""
    if seed is None or isinstance(seed, Generator):
        return seed
    try:
        return torch.Generator().manual_seed(_integer("seed", seed, "an integer, a torch.Generator or None"))
    except (RuntimeError, ValueError, OverflowError):
        raise SpecError(f"seed: expected an integer of at most 64 bits, got {seed}") from None


class Store(nn.Module):
    """The tensors that a function declares, by name: trainable ones are parameters, the rest buffers.

    Access is plain `store["name"]`; the stores of nested functions are reached the same way. What is declared `transposed` is a
    tensor with its last axis first, `(D, rank)`, and has that shape in `parameters()` and `state_dict()`; `store["name"]` is
    its view of the declared shape, `(rank, D)`, and so are the values that are assigned to it.

    Args:
        params: the declaration.
        channels: length of the leading channel axis, None for no such axis.
        device, dtype: of the tensors.

    Raises:
        SpecError: a name that `nn.Module` uses for itself, or a tensor beyond any machine.
    """

    def __init__(
        self,
        params: Params,
        channels: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._declared = dict(params)
        self._channels = channels
        for name, param in params.items():
            self._check_name(name)
            if not isinstance(param, Param):
                self.add_module(name, Store(param, channels, device, dtype))
                continue
            shape = param.shape if channels is None else (channels, *param.shape)
            if math.prod(shape) > LARGEST_TENSOR:
                sizes = " × ".join(f"{size:,}" for size in shape)
                raise SpecError(f"{name!r} would have {sizes} elements; at most {LARGEST_TENSOR:,} are allowed")
            kept = (shape[-1], *shape[:-1]) if param.transposed else shape
            try:
                tensor = torch.empty(kept, device=device, dtype=param.dtype or dtype)
            except (RuntimeError, MemoryError):
                sizes = " × ".join(f"{size:,}" for size in shape)
                raise SpecError(f"{name!r} of {sizes} elements does not fit into memory") from None
            if param.trainable:
                self.register_parameter(name, nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)

    def _check_name(self, name: str) -> None:
        if (
            not isinstance(name, str)
            or (not name.isidentifier() and not name.isdecimal())
            or hasattr(Store, name)
            or name in self.__dict__
            or keyword.iskeyword(name)
            or name.startswith("_")
        ):
            raise SpecError(
                f"Store: {name!r} cannot be the name of a tensor; a module uses it for itself, or it is not an identifier"
            )

    def __getitem__(self, name: str) -> Any:
        value = getattr(self, name, None)
        if name not in self._declared or value is None:
            raise KeyError(f"there is no tensor {name!r}; there are: {', '.join(self._declared) or 'none'}")
        param = self._declared[name]
        return value.movedim(0, -1) if isinstance(param, Param) and param.transposed else value

    def names(self) -> list[str]:
        """Return the names of all tensors, dotted for those of nested functions."""
        return [name for name, _ in flatten(self._declared)]

    def trainable(self) -> bool:
        """Return whether any tensor is declared trainable."""
        return any(param.trainable for _, param in flatten(self._declared))

    @torch.no_grad()
    def reset(self, generator: Generator | None = None) -> None:
        """Draw initial values anew."""
        for name, param in self._declared.items():
            if isinstance(param, Param):
                try:
                    drawn = param.draw(self._channels, generator)
                except (RuntimeError, MemoryError) as error:
                    if isinstance(error, RuntimeError) and "allocate" not in str(error):
                        raise
                    sizes = " × ".join(f"{size:,}" for size in self[name].shape)
                    raise SpecError(f"the initial values of {name!r}, {sizes}, do not fit into memory") from None
                self[name].copy_(drawn)
            else:
                self[name].reset(generator)

    def assign(self, values: Mapping[str, Any], where: str = "Store") -> None:
        """Set some tensors, in place, after a check of names and shapes; nothing is set if one does not fit.

        Args:
            values: new values by name, tensors or what `torch.as_tensor` takes; mappings for nested functions.
            where: what messages begin with.
        """
        with torch.no_grad():
            for target, value in self._fitted(values, where):
                target.copy_(value)

    def _fitted(self, values: Mapping[str, Any], where: str) -> list[tuple[Tensor, Tensor]]:
        pairs: list[tuple[Tensor, Tensor]] = []
        for name, value in values.items():
            if name not in self._declared:
                hint = did_you_mean(str(name), self._declared)
                raise SpecError(
                    f"{where}: there is no tensor {name!r}; {hint}there are: {', '.join(self._declared) or 'none'}"
                )
            target = self[name]
            if isinstance(target, Store):
                if not isinstance(value, Mapping):
                    raise SpecError(f"{where}.{name}: expected a mapping of tensors, got {type(value).__name__}")
                pairs += target._fitted(value, f"{where}.{name}")
                continue
            try:
                # Numbers of Python have 64 bits, and so has what they become.
                wide = None if isinstance(value, Tensor) or not target.is_floating_point() else torch.float64
                tensor = torch.as_tensor(value, dtype=wide)
            except (TypeError, ValueError, RuntimeError):
                raise SpecError(
                    f"{where}.{name}: expected numbers of shape {tuple(target.shape)}, got {type(value).__name__}"
                ) from None
            # A single set of values stands for every channel.
            if self._channels is not None and tensor.shape == target.shape[1:]:
                tensor = tensor.expand(target.shape)
            if tensor.shape != target.shape:
                raise SpecError(f"{where}.{name}: expected shape {tuple(target.shape)}, got {tuple(tensor.shape)}")
            if target.dtype == torch.bool and not bool(((tensor == 0) | (tensor == 1)).all()):
                raise SpecError(f"{where}.{name}: expected true and false, or ones and zeros")
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise SpecError(f"{where}.{name}: expected finite numbers")
            if tensor.is_complex():
                raise SpecError(f"{where}.{name}: expected real numbers, got {tensor.dtype}")
            if target.is_floating_point() and not bool(torch.isfinite(tensor.to(target.dtype)).all()):
                raise SpecError(f"{where}.{name}: expected numbers within the range of {target.dtype}")
            pairs.append((target, tensor))
        return pairs

    def forward(self, *args: Any) -> Any:
        raise SpecError("Store: holds tensors and is not called; call the head, the layer or the model")

    def extra_repr(self) -> str:
        own = [(name, p) for name, p in self._declared.items() if isinstance(p, Param)]
        return ", ".join(f"{name}{'' if p.trainable else ' (buffer)'}: {tuple(self[name].shape)}" for name, p in own)


class Head(nn.Module):
    """One head, y = Σ_c ⟨κ(x), ψ(w_c)⟩ + π(x) + b.

    Args:
        in_features: m, at least 1.
        out_features: n, at least 1.
        spec: what it is made of.
        seed: a seed or a generator for initial values; None draws from torch's default generator, as `nn.Linear` does.
        device, dtype: of the tensors.

    Attributes:
        kappa, psi, pi: the stores of the tensors of κ, ψ and π.
        bias: b, or None.

    Example:
        >>> import torch, kapsi as kp
        >>> head = kp.Head(3, 2, kp.HeadSpec(kp.Taylor(2), kp.LowRank(1), kp.LinearRemainder()), seed=0)
        >>> head(torch.ones(5, 3)).shape
        torch.Size([5, 2])
        >>> head.expand(torch.ones(5, 3)).dense().shape
        torch.Size([5, 12])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        spec: HeadSpec | None = None,
        *,
        seed: Seed = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        spec = HeadSpec() if spec is None else spec
        if not isinstance(spec, HeadSpec):
            raise SpecError(f"Head: expected a HeadSpec, got {type(spec).__name__}")
        in_features = _check_width("Head", "in_features", in_features)
        out_features = _check_width("Head", "out_features", out_features)
        _check_dtype("Head", dtype)
        device = None if device is None else torch.device(device)
        self.in_features, self.out_features, self.spec = in_features, out_features, spec
        self.factors = spec.expansion.factors(in_features)
        columns = self.factors[0] * self.factors[1]
        channels = None if spec.channels == 1 else spec.channels
        where = f"Head({in_features} → {out_features})"
        self._fold = bool(spec.after) and isinstance(spec.after[0], LayerNorm) and not spec.after[0].affine
        if columns > LARGEST_EXPANSION:
            raise SpecError(f"{where}: κ has 10^{math.log10(columns):.1f} columns, at most 10^15.9 are allowed")
        if len(spec.after) > self._fold:
            check_formed(columns, f"{where}: processing after κ")
        try:
            self.before = pipeline(spec.before, in_features, device, dtype)
            self.kappa = Store(spec.expansion.params(in_features), None, device, dtype)
            self.after = pipeline(spec.after, columns, device, dtype)
            psi = spec.reconciliation.params(out_features, self.factors)
            pi = spec.remainder.params(in_features, out_features)
            if (device or torch.get_default_device()).type != "meta":
                _check_trained(spec, psi, pi, out_features, self.factors, dtype)
            self.psi = Store(psi, channels, device, dtype)
            self.pi = Store(pi, None, device, dtype)
        except SpecError as error:
            raise SpecError(f"{where}: {error}") from None
        if spec.bias:
            with _memory(f"{where}: the bias"):
                self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        # A head whose κ another head of its layer owns refers to it without registering it a second time.
        self._owner: tuple[Head, ...] = ()
        self._gain = 1.0
        self._has_remainder = not isinstance(spec.remainder, ZeroRemainder)
        self.reset_parameters(seed)

    # -------------------------------------------------------------------------------- the formula

    def expand(self, x: Tensor) -> Features:
        """Return κ(x) with its processing before and after, for x of shape `(..., m)`, or for sparse x as `forward` says."""
        self.admit(x)
        if self._owner:
            return self._owner[0].expand(x)
        spec = self.spec
        features = spec.expansion(self.before(x) if spec.before else x, self.kappa)
        if not isinstance(features, Features) or features.columns != self.factors[0] * self.factors[1]:
            made = f"{features.columns} columns" if isinstance(features, Features) else type(features).__name__
            wanted = f"Features of {self.factors[0] * self.factors[1]} columns, as its factors say"
            raise SpecError(f"{type(spec.expansion).__name__}: must return {wanted}; returned {made}")
        if not spec.after:
            return features
        first = spec.after[0]
        if self._fold and isinstance(first, LayerNorm):
            features = features.normalized(first.epsilon)
            if len(spec.after) == 1:
                return features
        values = formed(features, f"Head({self.in_features} → {self.out_features}): processing after κ")
        return DenseFeatures((self.after[1:] if self._fold else self.after)(values))

    def admit(self, x: Tensor) -> None:
        """Raise a `SpecError` where inputs do not fit the head, before anything is computed."""
        _check_inputs("Head", x, self.in_features, sparse=True)
        if x.layout == torch.strided:
            return
        spec, name = self.spec, f"Head({self.in_features} → {self.out_features})"
        if not spec.expansion.takes_sparse():
            raise SpecError(
                f"{name}: {spec.expansion} takes no sparse inputs; Identity and Taylor do, and Extended and Nested made of them; "
                "use x.to_dense()"
            )
        if spec.before or len(spec.after) > self._fold:
            step, place = (spec.before[0], "before") if spec.before else (spec.after[self._fold], "after")
            but = "" if spec.before else "but for a layer norm without affine part "
            raise SpecError(
                f"{name}: {step} in `{place}` takes no sparse inputs; use x.to_dense(), or a head without processing {but}there"
            )
        if not spec.remainder.takes_sparse():
            raise SpecError(
                f"{name}: {spec.remainder} takes no sparse inputs; ZeroRemainder and ConstantRemainder do, LinearRemainder "
                "without `before`, and ExpansionRemainder of an expansion that does; use x.to_dense()"
            )

    def weights(self) -> Weights:
        """Return ψ(w); `weights().dense()` is `(channels, n, D)`."""
        return self.spec.reconciliation(self.psi, self.out_features, self.factors)

    def remainder(self, x: Tensor) -> Tensor:
        """Return π(x), `(..., n)`."""
        if x.layout != torch.strided:
            self.admit(x)
        return self.spec.remainder(x, self.pi, self.out_features)

    def forward(self, x: Tensor, features: Features | None = None, *, route: Route = None) -> Tensor:
        """Return y of shape `(..., n)`.

        Args:
            x: inputs, `(..., m)`; a `torch.sparse_csr` tensor `(rows, m)` without a gradient where κ is made of `Identity` and
                `Taylor`: neither x nor κ(x) is made dense then.
            features: κ(x), where it is known already.
            route: `"dense"` or `"structured"` to have κ and ψ multiplied in that way, as in `kapsi.contract`; for comparisons.
        """
        y = contract_sum(self.expand(x) if features is None else features, self.weights(), self.bias, route=route)
        return y + self.remainder(x) if self._has_remainder else y

    # -------------------------------------------------------------------------------- initial values

    def check_size(self) -> None:
        """Raise a `SpecError` where ψ or π is too large to be trained, as when a head is made on any device but meta."""
        try:
            dtype = next((tensor.dtype for tensor in self.psi.parameters()), None)
            _check_trained(self.spec, self.psi._declared, self.pi._declared, self.out_features, self.factors, dtype)
        except SpecError as error:
            raise SpecError(f"Head({self.in_features} → {self.out_features}): {error}") from None

    @torch.no_grad()
    def reset_parameters(self, seed: Seed = None) -> None:
        """Draw all tensors anew and scale ψ, so that outputs have unit deviation for standard normal inputs."""
        if any(tensor.is_meta for tensor in (*self.parameters(), *self.buffers())):
            return
        generator = as_generator(seed)
        for module in (*self.before, *self.after):
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        for store in (self.kappa, self.psi, self.pi):
            store.reset(generator)
        if self.bias is not None:
            self.bias.zero_()
        weights: list[Tensor] = list(self.psi.parameters())
        if weights:
            self.spec.reconciliation.scale(weights, self._gain / self._spread(weights[0]))
        self.spec.remainder.scale(self.pi, self.in_features, self.out_features, self._gain)
        self.validate()

    def _spread(self, like: Tensor) -> float:
        """Return the spread of Σ_c ⟨κ(x), ψ(w_c)⟩ for standard normal x, measured; that of κ where it is nothing."""
        owner = self._owner[0] if self._owner else self
        # Squares of heavy tails overflow in single precision.
        heavy = owner.spec.expansion.heavy_tailed()
        precision = torch.float64 if heavy else torch.promote_types(like.dtype, torch.float32)
        # In training mode, as batch statistics are then those of the data; copies, since a norm would remember them.
        measured = copy.copy(owner)
        steps = {name: copy.deepcopy(owner.get_submodule(name)).to(precision) for name in ("before", "kappa", "after")}
        measured._modules = {**owner._modules, **steps}
        measured.spec = replace(owner.spec, expansion=owner.spec.expansion.clamped())
        for module in (*steps["before"].modules(), *steps["after"].modules()):
            module.train(not isinstance(module, nn.Dropout))
        psi = self.psi if like.dtype == precision else copy.deepcopy(self.psi).to(precision)
        weights = self.spec.reconciliation(psi, self.out_features, self.factors)
        x = probe(self.spec.expansion, self.in_features, self.out_features).to(like.device, precision)
        return output_spread(self.spec.expansion, measured.expand(x), weights)

    # -------------------------------------------------------------------------------- tensors from the user

    def store(self, role: Role) -> Store:
        """Return the tensors of κ, ψ or π."""
        if role == "expansion":
            return self._owner[0].kappa if self._owner else self.kappa
        if role not in ("reconciliation", "remainder"):
            raise SpecError(f"Head: expected expansion, reconciliation or remainder, got {role!r}")
        return self.psi if role == "reconciliation" else self.pi

    def assign(self, role: Role, **tensors: Any) -> None:
        """Set tensors of κ, ψ or π in place: matrices, grid ranges, masks.

        Heads of a layer that share κ share its tensors too.

        Args:
            role: `expansion`, `reconciliation` or `remainder`.
            **tensors: new values by name, of the shapes they have; nested mappings for nested expansions. One set of values
                stands for every channel.

        Raises:
            SpecError: a name or a shape that does not fit, values that are not finite, or that the function refuses; nothing
                is changed then.

        Example:
            >>> import torch, kapsi as kp
            >>> head = kp.Head(2, 1, kp.HeadSpec(kp.BSpline()))
            >>> head.assign("expansion", range=torch.tensor([[-3.0, 0.0], [3.0, 1.0]]))
        """
        store = self.store(role)
        function = getattr(self.spec, role)
        fitted = store._fitted(tensors, f"Head.assign({role!r})")
        old = [(target, target.detach().clone()) for target, _ in fitted]
        with torch.no_grad():
            for target, value in fitted:
                target.copy_(value)
            try:
                function.validate(store)
            except SpecError:
                for target, value in old:
                    target.copy_(value)
                raise

    def validate(self) -> None:
        """Raise a `SpecError` where a function refuses the values of its tensors, such as those of a file."""
        self.spec.expansion.validate(self.store("expansion"))
        self.spec.reconciliation.validate(self.psi)
        self.spec.remainder.validate(self.pi)

    def extra_repr(self) -> str:
        spec = self.spec
        return f"{self.in_features} → {self.out_features}, {spec.expansion}, {spec.reconciliation}, {spec.remainder}"


class Layer(nn.Module):
    """Heads side by side, fused (summed by default), then processed.

    Heads with equal κ share its tensors and its evaluation, unless κ has trainable tensors or processing that is random or
    trained.

    Args:
        in_features: m.
        out_features: n.
        spec: what it is made of.
        seed, device, dtype: as in `Head`.
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
            raise SpecError(f"Layer: expected a LayerSpec, got {type(spec).__name__}")
        device = None if device is None else torch.device(device)
        self.in_features, self.out_features, self.spec = in_features, out_features, spec
        generator = as_generator(seed)
        heads: list[Head] = []
        owners: dict[Any, int] = {}
        self._owners: list[int] = []
        gain = 1 / spec.fusion.gain(len(spec.heads))
        for i, head_spec in enumerate(spec.heads):
            try:
                # On the meta device first, where nothing is drawn: whether κ is shared decides what is there to draw.
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
        self._groups = _grouped(heads, self._owners, self._is_sum())
        place = device or torch.get_default_device()
        for i, head in enumerate(heads):
            if place.type != "meta":
                try:
                    head.check_size()
                except SpecError as error:
                    raise SpecError(f"heads[{i}]: {error}") from None
            with _memory(f"heads[{i}]: Head({in_features} → {out_features})"):
                head.to_empty(device=place)
        self.heads = nn.ModuleList(heads)
        self.fusion = Store(spec.fusion.params(len(heads), out_features), None, device, dtype)
        self.output = pipeline(spec.output, out_features, device, dtype)
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, seed: Seed = None) -> None:
        """Draw all tensors anew."""
        generator = as_generator(seed)
        for head in self.heads:
            head.reset_parameters(generator)  # type: ignore[operator]
        if not any(tensor.is_meta for tensor in self.fusion.parameters()):
            self.fusion.reset(generator)
        for module in self.output:
            if hasattr(module, "reset_parameters") and not any(t.is_meta for t in module.parameters()):
                module.reset_parameters()  # type: ignore[operator]

    def fixed_features(self, x: Tensor) -> dict[int, Features]:
        """Return κ(x) of the heads whose κ training does not change, by the head's number: to be made once for many steps."""
        return {
            i: head.expand(x).kept()
            for i, head in enumerate(cast(list[Head], self.heads))
            if self._owners[i] == i
            and not head.kappa.trainable()
            and all(step.fixed for step in (*head.spec.before, *head.spec.after))
        }

    def forward(self, x: Tensor, features: Mapping[int, Features] | None = None, *, route: Route = None) -> Tensor:
        """Return the fused output of the heads, `(..., n)`.

        Args:
            x: inputs, `(..., m)`.
            features: what `fixed_features(x)` returned.
            route: as in `Head.forward`; where it is given, heads are contracted one by one.
        """
        if len(self._owners) == 1 and self._is_sum():
            for head in self.heads:
                y = head(x, features.get(0) if features else None, route=route)
        else:
            y = self._fused(x, dict(features or {}), route)
        return self.output(y) if self.spec.output else y

    def groups(self, route: Route = None) -> list[list[int]]:
        """Return which heads, by their numbers, are contracted together: those with the same κ and ψ of the same kind and sizes.

        A head with a hook of its own, and every head where a route is given, is by itself.
        """
        heads = cast(list[Head], list(self.heads))
        if route is None and not any(_is_watched(head) for head in heads):
            return self._groups
        return [[i] for i in range(len(heads))]

    def _is_sum(self) -> bool:
        return isinstance(self.spec.fusion, Sum | Mean)

    def joined(self, group: list[int]) -> Weights:
        """Return the weights of a group of heads as those of one head: added up, or with a channel axis for all of theirs."""
        heads = cast(list[Head], [self.heads[i] for i in group])
        first, weights = heads[0], heads[0].weights()
        if isinstance(weights, DenseWeights) and self._is_sum():  # added without being stacked
            others = (head.weights().merged().matrix() for head in heads[1:])
            return DenseWeights(add((weights.merged().matrix(), *others)))
        return first.spec.reconciliation(_Joined([head.psi for head in heads]), first.out_features, first.factors)

    def together(self, group: list[int], x: Tensor, features: Features) -> list[Tensor]:
        """Return the outputs of a group of heads with the same κ(x), made by one product: their sum, or each for other fusions."""
        heads = cast(list[Head], [self.heads[i] for i in group])
        weights = self.joined(group)
        if self._is_sum():
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

    def _fused(self, x: Tensor, shared: dict[int, Features], route: Route) -> Tensor:
        heads = cast(list[Head], list(self.heads))
        outputs: dict[int, Tensor] = {}
        groups = self.groups(route)
        if isinstance(x, Tensor) and x.layout != torch.strided:
            # Of each ψ columns are gathered; together they would be copied whole.
            groups = [[i] for i in range(len(heads))]
            for head in heads:
                head.admit(x)
        for group in groups:
            owner, first = self._owners[group[0]], heads[group[0]]
            if owner not in shared:
                shared[owner] = first.expand(x)
            if len(group) == 1:
                outputs[group[0]] = first(x, shared[owner], route=route)
            else:
                outputs |= zip(group, self.together(group, x, shared[owner]), strict=False)
        if self._is_sum():
            total = add(outputs.values())
            return total / len(heads) if isinstance(self.spec.fusion, Mean) else total
        return self.spec.fusion(torch.stack([outputs[i] for i in range(len(heads))]), self.fusion)

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features}, fusion={self.spec.fusion}"


class Model(nn.Module):
    """Layers in sequence.

    Args:
        spec: what it is made of; all widths must be given.
        seed: a seed or a generator for initial values; None draws from torch's default generator.
        device, dtype: of the tensors.

    Raises:
        SpecError: a part does not fit; the message names it.

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
            raise SpecError(f"Model: expected a ModelSpec, got {type(spec).__name__}; kp.rpn([…]) makes one")
        _check_dtype("Model", dtype)
        self.spec = spec
        generator = as_generator(seed)
        layers = []
        for i, (width, next_width, layer) in enumerate(spec.resolved()):
            try:
                layers.append(Layer(width, next_width, layer, seed=generator, device=device, dtype=dtype))
            except SpecError as error:
                raise SpecError(f"layers[{i}].{error}") from None
        self.layers = nn.ModuleList(layers)

    @property
    def in_features(self) -> int:
        """Return the number of inputs."""
        return int(self.spec.widths[0] or 0)

    @property
    def out_features(self) -> int:
        """Return the number of outputs."""
        return int(self.spec.widths[-1] or 0)

    def reset_parameters(self, seed: Seed = None) -> None:
        """Draw all tensors anew, as after `to_empty` of a model that was made on the meta device."""
        generator = as_generator(seed)
        for layer in self.layers:
            layer.reset_parameters(generator)  # type: ignore[operator]

    def forward(self, x: Tensor, features: Mapping[int, Features] | None = None, *, route: Route = None) -> Tensor:
        """Return y of shape `(..., n)`.

        Args:
            x: inputs, `(..., m)`.
            features: those of the first layer, where they are known.
            route: as in `Head.forward`, for all heads: `model(x, route="dense")` is what the model computes without structure.
        """
        for layer in self.layers:
            x = layer(x) if features is None and route is None else layer(x, features, route=route)
            features = None
        return x

    def heads(self) -> Iterator[tuple[str, Head]]:
        """Yield all heads with their names, `layers.0.heads.0`."""
        for name, module in self.named_modules():
            if isinstance(module, Head):
                yield name, module

    def freeze(self, *patterns: str, frozen: bool = True) -> list[str]:
        """Stop (or with `frozen=False` resume) the training of some parameters; saved with the model.

        Args:
            *patterns: names of parameters or of what holds them, as in `named_parameters()`, with `*` for any text:
                `"layers.0"`, `"*.psi"`, `"layers.*.bias"`.
            frozen: False to train them again.

        Returns:
            The names of the parameters.

        Raises:
            SpecError: a pattern that no parameter fits.
        """
        found: list[str] = []
        names = [name for name, _ in self.named_parameters()]
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise SpecError(f"Model.freeze({pattern!r}): expected the name of a parameter or of what holds it")
            fitting = [n for n in names if fnmatch.fnmatchcase(n, pattern) or fnmatch.fnmatchcase(n, f"{pattern}.*")]
            if not fitting:
                shown = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
                raise SpecError(f"Model.freeze({pattern!r}): fits no parameter; there are {shown}")
            found += [name for name in fitting if name not in found]
        for name in found:
            self.get_parameter(name).requires_grad_(not frozen)
        return found

    def summary(self) -> str:
        """Return a table of the model for people: a line a head, and the totals."""
        rows: list[tuple[str, ...]] = [
            ("", "in", "D", "out", "expansion", "reconciliation", "remainder", "parameters", "frozen")
        ]
        for name, head in self.heads():
            spec, tensors = head.spec, list(head.parameters())
            frozen = sum(p.numel() for p in tensors if not p.requires_grad)
            shown = [str(head.in_features), f"{math.prod(head.factors):,}", str(head.out_features)]
            functions = [_brief(spec.expansion), _brief(spec.reconciliation), _brief(spec.remainder)]
            if spec.channels > 1:
                functions[1] = f"{spec.channels} × {functions[1]}"
            if head._owner:
                functions[0] += " (shared)"
            rows.append(
                (name, *shown, *functions, f"{sum(p.numel() for p in tensors):,}", f"{frozen:,}" if frozen else "-")
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        numeric = (1, 2, 3, 7, 8)
        lines = [
            "  ".join(
                cell.rjust(w) if i in numeric else cell.ljust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        total = sum(p.numel() for p in self.parameters())
        trained = trained_count(self)
        buffers = sum(b.numel() for b in self.buffers())
        footer = f"{total:,} parameters, {trained:,} of them trained; {buffers:,} values in buffers"
        return "\n".join(line.rstrip() for line in (*lines, footer))

    def extra_repr(self) -> str:
        return f"widths={list(self.spec.widths)}"


class ExpansionModule(nn.Module):
    """An expansion by itself as a module, x → κ(x), for `nn.Sequential` and other models of torch.

    Args:
        in_features: m, at least 1.
        expansion: κ; its columns are formed.
        seed, device, dtype: as in `Head`.

    Attributes:
        out_features: D.
        kappa: the store of the tensors of κ; `kapsi.calibrate` sets them from data.

    Raises:
        SpecError: κ has more columns than are formed.

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
        self.in_features = _check_width("ExpansionModule", "in_features", in_features)
        self.expansion = spec.expansion
        self.out_features = math.prod(self.expansion.factors(self.in_features))
        check_formed(self.out_features, where)
        _check_dtype("ExpansionModule", dtype)
        params = self.expansion.params(self.in_features)
        self.kappa = Store(params, None, None if device is None else torch.device(device), dtype)
        self.reset_parameters(seed)

    @torch.no_grad()
    def reset_parameters(self, seed: Seed = None) -> None:
        """Draw all tensors anew."""
        if not any(tensor.is_meta for tensor in (*self.parameters(), *self.buffers())):
            self.kappa.reset(as_generator(seed))

    def forward(self, x: Tensor) -> Tensor:
        """Return κ(x), `(..., D)`, for x of shape `(..., m)`."""
        _check_inputs("ExpansionModule", x, self.in_features)
        return self.expansion(x, self.kappa).dense()

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features}, {self.expansion}"


def trained_count(model: nn.Module) -> int:
    """Return how many numbers of a module are trained."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _brief(function: Any) -> str:
    """Return a function as it is written, options that have their defaults left out."""
    from kapsi.function import options_of

    changed = [f for f in options_of(type(function)) if getattr(function, f.name) != f.default]
    shown = []
    for field in changed:
        value = getattr(function, field.name)
        if isinstance(value, tuple):
            text = ", ".join(_brief(v) if hasattr(v, "role") else str(v) for v in value)
            shown.append(f"({text})" if field.name == "parts" else f"{field.name}=({text})")
        else:
            shown.append(f"{field.name}={_brief(value) if hasattr(value, 'role') else value}")
    return type(function).__name__ + (f"({', '.join(shown)})" if shown else "")


@contextmanager
def _memory(what: str) -> Iterator[None]:
    """Raise a `SpecError` where there is no memory for tensors."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        raise SpecError(f"{what} does not fit into memory") from None


def _integer(name: str, value: Any, wanted: str) -> int:
    """Return an integer of Python or NumPy as one of Python."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise SpecError(f"{name}: expected {wanted}, got {value!r}")


def _check_trained(
    spec: HeadSpec, psi: Params, pi: Params, out_features: int, factors: tuple[int, int], dtype: torch.dtype | None
) -> None:
    """Raise a `SpecError` where ψ or π has more numbers than are trained, from what they declare."""
    size = (dtype or torch.get_default_dtype()).itemsize
    for function, params, several in ((spec.reconciliation, psi, spec.channels), (spec.remainder, pi, 1)):
        declared = [param for _, param in flatten(params)]
        trained = several * sum(param.numel for param in declared if param.trainable)
        fixed = several * sum(param.numel for param in declared if not param.trainable)
        if trained + fixed / 4 <= LARGEST_TRAINED:
            continue
        needed = 4 * size * trained + sum(
            several * param.numel * (param.dtype.itemsize if param.dtype else size)
            for param in declared
            if not param.trainable
        )
        rank = getattr(function, "rank", 1)
        each = needed / rank / 1e9
        share = (
            f" ({each:,.1f} GB a rank with AdamW)" if function.name == "low_rank" and rank > 1 and each >= 0.1 else ""
        )
        advice = "take fewer inputs, a smaller rank or a smaller expansion"
        if function is spec.reconciliation:
            kinds = {"KhatriRao(64)": KhatriRao(rank=64), "DualLowRankKronecker(5)": DualLowRankKronecker(rank=5)}
            counts = {text: several * kind.count(out_features, factors) for text, kind in kinds.items()}
            fitting = [f"{text} with {count:,}" for text, count in counts.items() if count <= LARGEST_TRAINED]
            advice = f"on this κ {' and '.join(fitting)} fit, for instance" if fitting else advice
        numbers = f"{trained:,} trainable numbers" + (f" and {fixed:,} that are fixed" if fixed > trained else "")
        raise SpecError(
            f"{function} has {numbers}, {needed / 1e9:,.1f} GB with AdamW{share}; at most {LARGEST_TRAINED:,} trainable ones are "
            f"made, and four times as many fixed ones, other than on the meta device; {advice}"
        )


def _check_inputs(where: str, x: Any, in_features: int, *, sparse: bool = False) -> None:
    if not isinstance(x, Tensor):
        raise SpecError(f"{where}: expected inputs as a torch.Tensor, got {type(x).__name__}; {_conversion(x, sparse)}")
    if x.layout != torch.strided:
        _check_layout(where, x, in_features, sparse)
    if x.dim() == 0 or x.shape[-1] != in_features:
        raise SpecError(f"{where}: expected inputs of shape (..., {in_features}), got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise SpecError(f"{where}: expected inputs of a floating-point type, got {x.dtype}; use x.float()")


def _conversion(x: Any, sparse: bool) -> str:
    """Return how a user makes a tensor of what is none: of a SciPy matrix as `Head` takes it, where it takes one."""
    if not hasattr(x, "tocsr"):
        return "use torch.as_tensor(x)"
    if not sparse:
        return "use torch.as_tensor(x.toarray())"
    return (
        "with a = x.tocsr() and a.sum_duplicates() use "
        "torch.sparse_csr_tensor(a.indptr, a.indices, a.data, a.shape, check_invariants=True)"
    )


def _check_layout(where: str, x: Tensor, in_features: int, sparse: bool) -> None:
    """Raise a `SpecError` where a tensor that is not dense is not of the one kind that is taken."""
    if not sparse:
        raise SpecError(f"{where}: expected dense inputs, got {x.layout}; use x.to_dense()")
    if x.layout != torch.sparse_csr:
        raise SpecError(
            f"{where}: expected inputs that are dense or torch.sparse_csr, got {x.layout}; use x.to_sparse_csr() or x.to_dense()"
        )
    if x.dim() != 2:
        raise SpecError(
            f"{where}: expected sparse inputs of shape (rows, {in_features}), got {tuple(x.shape)}; use x.to_dense()"
        )
    if x.requires_grad:
        raise SpecError(
            f"{where}: there is no gradient with respect to sparse inputs; use x.detach(), or x.to_dense() for a gradient"
        )


def _check_width(where: str, name: str, value: Any) -> int:
    width = _integer(f"{where}({name}={value!r})", value, "an integer of at least 1")
    if width < 1:
        raise SpecError(f"{where}({name}={value!r}): expected an integer of at least 1")
    if width > LARGEST_TENSOR:
        raise SpecError(f"{where}({name}={value!r}): at most {LARGEST_TENSOR:,} are allowed")
    return width


def _check_dtype(where: str, dtype: Any) -> None:
    if dtype not in (None, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise SpecError(f"{where}(dtype={dtype!r}): expected torch.float64, float32, bfloat16 or float16")


class _Joined:
    """Tensors of the stores of several heads as those of one head, its channels being all of theirs, one after another."""

    def __init__(self, stores: list[Store]) -> None:
        self.stores = stores

    def __getitem__(self, name: str) -> Any:
        values = [store[name] for store in self.stores]
        if isinstance(values[0], Store):
            return _Joined(values)
        join = torch.stack if self.stores[0]._channels is None else torch.cat
        # What lies in memory with its last axis first is joined as it lies, channels of a column beside each other.
        if values[0].dim() > 1 and not values[0].is_contiguous():
            return join([value.movedim(-1, 0) for value in values], 1).movedim(0, -1)
        return join(values)


def _grouped(heads: list[Head], owners: list[int], summed: bool) -> list[list[int]]:
    """Return which heads, by their numbers, are contracted together; they are still on the meta device.

    Time of the heads one by one over that of one product, forward and backward, 64 rows, one thread, 4, 8 and 16 heads:

        Taylor × low rank 2                   64 → 64   1.5  1.9  2.0    784 → 64   0.6  0.6  0.6
        Taylor × dual low-rank Kronecker 5    64 → 64   1.2  1.6  2.0    784 → 64   1.3  1.8  2.3
        Taylor × Khatri–Rao 2                 64 → 64   1.2  1.5  1.9    784 → 64   1.5  2.0  2.4
        Taylor × Kronecker                    64 → 64   1.4  1.8  2.2    784 → 64   1.5  1.8  2.1
        B-spline × dense                      64 → 64   1.4  1.7  2.3    784 → 64   1.7  2.1  2.3
        identity × dense                      64 → 64   1.5  1.9  2.2    784 → 64   2.0  2.8  3.5

    Two heads of one channel gain nothing that a new axis does not cost (0.8 to 1.1), those of three channels do (1.1 to 1.5),
    and so do those that are added up (1.1 to 1.7). Large ψ cost more to copy than there is to save: the 1.2 million elements
    a head of the low rank with 784 inputs.
    """
    alike: dict[Any, list[int]] = {}
    for i, head in enumerate(heads):
        alike.setdefault((owners[i], head.spec.reconciliation, head.spec.channels), []).append(i)
    groups: list[list[int]] = []
    for members in alike.values():
        head, most, fewest = heads[members[0]], 1, 1
        if len(members) > 1:
            weights = head.weights()
            dense = isinstance(weights, DenseWeights)  # which are added up, without a new axis
            if can_stack(weights) and (summed or not dense):
                size = sum(tensor.numel() for tensor in (*head.psi.parameters(), *head.psi.buffers()))
                most = max(1, LARGEST_JOINED // max(1, size))
                fewest = 2 if dense else -(-3 // head.spec.channels)
        for start in range(0, len(members), most):
            part = members[start : start + most]
            groups += [part] if len(part) >= fewest else [[i] for i in part]
    return sorted(groups)


def _is_watched(head: Head) -> bool:
    """Return whether a head has to be called by itself: it has hooks."""
    return bool(head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks)


def _can_share(head: Head) -> bool:
    """Return whether other heads may use κ of this one: nothing in it is trained, or random."""
    steps = (*head.spec.before, *head.spec.after)
    trained = (
        head.kappa.trainable()
        or any(True for _ in head.before.parameters())
        or any(True for _ in head.after.parameters())
    )
    return not trained and not any(step.random for step in steps)


@torch.no_grad()
def calibrate(model: M, x: Tensor, y: Tensor | None = None) -> M:
    """Set grids, centers and other buffers of all expansions from data, layer by layer, in place.

    Each layer is calibrated on what the calibrated layers before it make of x. It may change the function of the model.

    Args:
        model: a model (or a layer, a head, an expansion module).
        x: inputs, `(rows, m)` or with more leading axes, or sparse as a head takes them; at least one row, finite.
        y: labels or targets, one a row, for the expansions that use them.

    Returns:
        The same model.

    Raises:
        SpecError: no rows, the wrong number of columns, or values that are not finite.
    """
    if not isinstance(model, Model | Layer | Head | ExpansionModule):
        hint = "; give the model that was compiled or wrapped" if isinstance(model, nn.Module) else ""
        raise SpecError(f"calibrate: expected a kapsi Model, Layer or Head, got {type(model).__name__}{hint}")
    if not isinstance(x, Tensor) or not x.is_floating_point():
        given = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise SpecError(f"calibrate: expected inputs as a floating-point tensor, got {given}")
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        raise SpecError("calibrate: the model is on the meta device and has no values")
    like = next((tensor for tensor in tensors if tensor.is_floating_point()), x)
    x = x.to(like.device, like.dtype)
    if x.dim() == 0 or x.numel() == 0:
        raise SpecError(f"calibrate: expected inputs of shape (rows, m) with at least one row, got {tuple(x.shape)}")
    sparse = x.layout != torch.strided
    if sparse:
        _check_layout("calibrate", x, x.shape[-1], not isinstance(model, ExpansionModule))
    if not bool(torch.isfinite(x.values() if sparse else x).all()):
        raise SpecError("calibrate: the inputs must be finite")
    x = x if sparse else x.reshape(-1, x.shape[-1])
    if y is not None:
        try:
            y = torch.as_tensor(y, device=x.device)
        except (TypeError, ValueError, RuntimeError):
            raise SpecError(f"calibrate: expected y as numbers, one a row, got {type(y).__name__}") from None
        if y.is_complex():
            raise SpecError(f"calibrate: expected y as real numbers, got {y.dtype}")
        if y.shape[:1] != x.shape[:1]:
            raise SpecError(f"calibrate: {x.shape[0]:,} rows of x and {y.shape[0] if y.dim() else 0:,} of y")
    training = model.training
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.eval()
    try:
        layers: list[nn.Module] = list(model.layers) if isinstance(model, Model) else [model]
        for i, layer in enumerate(layers):
            if isinstance(layer, ExpansionModule):
                layer.kappa.assign(layer.expansion.calibrate(x, layer.kappa, y), "calibrate")
                break
            for head in layer.heads if isinstance(layer, Layer) else [layer]:
                if isinstance(head, Head) and x.layout != torch.strided:
                    head.admit(x)
                if isinstance(head, Head) and not head._owner:
                    if x.shape[-1] != head.in_features:
                        raise SpecError(
                            f"calibrate: expected inputs of shape (rows, {head.in_features}), got {tuple(x.shape)}"
                        )
                    inputs = head.before(x)
                    head.kappa.assign(head.spec.expansion.calibrate(inputs, head.kappa, y), "calibrate")
                if isinstance(head, Head):
                    head.pi.assign(head.spec.remainder.calibrate(x, head.pi, y), "calibrate")
            if i + 1 < len(layers):  # the last one would make its κ of all rows for nothing
                x = layer(x)
    except Exception:
        model.load_state_dict(before)
        raise
    finally:
        model.train(training)
    return model
