"""One head, y = Σ_c ⟨κ(x), ψ(w_c)⟩ + π(x) + b."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kapsi.contraction import Route, contract, contract_sum
from kapsi.errors import DataError, SpecError, attempt, check_choice, check_integer, refuse
from kapsi.expansion import Identity
from kapsi.features import Features, check_formed
from kapsi.function import MAX_EXPANSION, MAX_TENSOR, Function, Params, catalogue, flatten
from kapsi.fusion import Sum
from kapsi.hooks import has_hooks
from kapsi.initial import RULES, add_linear, output_rms, probe
from kapsi.modules.store import Seed, Store, as_generator, memory
from kapsi.process import folds, pipeline, processed
from kapsi.reconciliation import Dense, Reconciliation
from kapsi.remainder import ZeroRemainder
from kapsi.spec import HeadSpec
from kapsi.weights import Weights

__all__ = ["MAX_TRAINED", "Head", "check_layout"]

MAX_TRAINED = 2**29
"""Trainable parameters of the largest ψ: 8.6 GB in training, with gradient and both moments of AdamW in float32."""

Role = Literal["expansion", "reconciliation", "remainder"]


class Head(nn.Module):
    """A head, y = Σ_c ⟨κ(x), ψ(w_c)⟩ + π(x) + b, for inputs `(..., m)` and outputs `(..., n)`.

    Args:
        in_features: number of inputs m, at least 1.
        out_features: number of outputs n, at least 1.
        spec: κ, ψ, π and their processing.
        seed: a seed or a generator for initial values; None uses torch's default generator, as `nn.Linear`.
        device, dtype: device and dtype of the tensors; default: those of torch.

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
            refuse("Head", "a HeadSpec", spec)
        in_features = check_width("Head", "in_features", in_features)
        out_features = check_width("Head", "out_features", out_features)
        check_dtype("Head", dtype)
        device = None if device is None else torch.device(device)
        self.in_features, self.out_features, self.spec = in_features, out_features, spec
        self.factors = spec.expansion.factors(in_features)
        columns = self.factors[0] * self.factors[1]
        channels = None if spec.channels == 1 else spec.channels
        where = f"Head({in_features} → {out_features})"
        self._fold = folds(spec.after)
        if columns > MAX_EXPANSION:
            raise SpecError(f"{where}: κ has 10^{math.log10(columns):.1f} columns, at most 10^15.9 are allowed")
        if len(spec.after) > self._fold:
            check_formed(columns, f"{where}: processing after κ")
        try:
            self.before = pipeline(spec.before, in_features, device, dtype)
            self.kappa = Store(_declared(spec.expansion, in_features), None, device, dtype)
            self.after = pipeline(spec.after, columns, device, dtype)
            psi = _declared(spec.reconciliation, out_features, self.factors)
            pi = _declared(spec.remainder, in_features, out_features)
            if spec.init in RULES and not any(param.random for params in (psi, pi) for _, param in flatten(params)):
                raise SpecError(
                    f"init={spec.init!r} has no effect: {spec.reconciliation} and {spec.remainder} have no random initial "
                    "values; leave init out"
                )
            if (device or torch.get_default_device()).type != "meta":
                check_trained(spec, psi, pi, out_features, self.factors, dtype)
            self.psi = Store(psi, channels, device, dtype)
            self.pi = Store(pi, None, device, dtype)
            if not isinstance(spec.fusion, Sum):
                self.fusion = Store(spec.fusion.params(spec.channels, out_features), None, device, dtype)
        except SpecError as error:
            raise SpecError(f"{where}: {error}") from None
        if spec.bias:
            with memory(f"{where}: the bias"):
                self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        # A head with the κ of another head refers to the owner without registering κ a second time.
        self._owner: tuple[Head, ...] = ()
        self._gain = 1.0
        self._has_remainder = not isinstance(spec.remainder, ZeroRemainder)
        self._columns = columns
        self._is_linear = type(spec.expansion) is Identity and type(spec.reconciliation) is Dense and channels is None
        self._sums_channels = isinstance(spec.fusion, Sum)
        self.reset_parameters(seed)

    # -------------------------------------------------------------------------------- the formula

    def expand(self, x: Tensor) -> Features:
        """Return κ(x) with processing before and after; x as in `forward`."""
        self.check_inputs(x)
        owner: dict[str, Any] = self._owner[0]._modules if self._owner else self._modules
        before, after = owner["before"], owner["after"]
        expansion = self.spec.expansion
        features = expansion(before(x) if before._modules else x, owner["kappa"].ready())
        if not isinstance(features, Features) or features.columns != self._columns:
            result = f"{features.columns} columns" if isinstance(features, Features) else type(features).__name__
            wanted = f"Features of {self._columns} columns, the product of `factors`"
            raise SpecError(f"{type(expansion).__name__}: must return {wanted}; returned {result}")
        if not after._modules:
            return features
        where = f"Head({self.in_features} → {self.out_features}): processing after κ"
        return processed(features, self.spec.after, after, where)

    def check_inputs(self, x: Tensor) -> None:
        """Raise a `DataError` if inputs do not match the head, before any computation."""
        if is_dense(x, self.in_features):
            return
        check_tensor("Head", x, self.in_features, sparse=True)
        spec, name = self.spec, f"Head({self.in_features} → {self.out_features})"
        if not spec.expansion.takes_sparse():
            function: Any = spec.expansion
            advice = "Identity and Taylor do, and Extended and Nested made of these; use x.to_dense()"
        elif spec.before or len(spec.after) > self._fold:
            step, option = (spec.before[0], "before") if spec.before else (spec.after[self._fold], "after")
            function, but = (
                f"{step} in `{option}`",
                "" if spec.before else " other than a layer norm without affine part",
            )
            advice = f"use x.to_dense(), or a head without processing there{but}"
        elif not spec.remainder.takes_sparse():
            function = spec.remainder
            advice = (
                "ZeroRemainder and ConstantRemainder do, LinearRemainder without `before`, and ExpansionRemainder with an "
                "expansion for sparse inputs; use x.to_dense()"
            )
        else:
            return
        raise DataError(f"{name}: {function} takes no sparse inputs; {advice}")

    def weights(self) -> Weights:
        """Return ψ(w); `weights().dense()` is `(channels, n, D)`."""
        psi: Any = self._modules["psi"]
        return self.spec.reconciliation(psi.ready(), self.out_features, self.factors)

    def remainder(self, x: Tensor) -> Tensor:
        """Return π(x), `(..., n)`."""
        if x.layout != torch.strided:
            self.check_inputs(x)
        return self.spec.remainder(x, self.pi.ready(), self.out_features)

    def forward(self, x: Tensor, features: Features | None = None, *, route: Route = None) -> Tensor:
        """Return y of shape `(..., n)`.

        Args:
            x: inputs, `(..., m)`; with κ of `Identity` and `Taylor` also a `torch.sparse_csr` tensor `(rows, m)` without a
                gradient; neither x nor κ(x) is made dense.
            features: κ(x), if known already.
            route: `"dense"` or `"structured"`, for comparisons; see `kapsi.contract`.
        """
        if self._is_linear and features is None and route is None:
            matrix = self._plain_matrix(x)
            if matrix is not None:
                y = F.linear(x, matrix, self._bias())
                return y + self.remainder(x) if self._has_remainder else y
        y = self.product(self.expand(x) if features is None else features, self.weights(), route)
        return y + self.remainder(x) if self._has_remainder else y

    def product(self, features: Features, weights: Weights, route: Route = None) -> Tensor:
        """Return the fused products ⟨κ(x), ψ(w_c)⟩ of all channels, plus b, `(..., n)`."""
        bias = self._bias()
        if self._sums_channels:
            return contract_sum(features, weights, bias, route=route)
        products = contract(features, weights, route=route)
        y = self.spec.fusion(products.movedim(-2, 0), self.fusion)
        return y if bias is None else y + bias

    def _bias(self) -> Tensor | None:
        """Return b, also computed by a hook; the attribute of a parameter takes as long as an operation."""
        return self._parameters["bias"] if "bias" in self._parameters else self.bias  # noqa: SIM401

    def _plain_matrix(self, x: Tensor) -> Tensor | None:
        """Return ψ(w) of a head that is `nn.Linear` for x; None if x needs an error or a part does more than it declares.

        A shortcut for single rows, where Python takes most of the time.
        """
        modules = self._modules
        psi = modules["psi"]
        if (
            not is_dense(x, self.in_features)
            or self._owner  # with the processing of another head
            or modules["before"]._modules  # type: ignore[union-attr]
            or modules["after"]._modules  # type: ignore[union-attr]
            or psi._forward_pre_hooks  # type: ignore[union-attr]
            or not _as_written(self)
        ):
            return None
        return psi._parameters.get("matrix")  # type: ignore[union-attr]

    def fusible(self) -> bool:
        """Return whether the head may be computed jointly with others: a call does nothing but the formula of its specification."""
        return (
            _as_written(self)
            and not has_hooks(self)
            and cast(Store, self._modules["psi"]).as_declared()
            and cast(Store, self._modules["pi"]).as_declared()
        )

    # -------------------------------------------------------------------------------- initial values

    def check_size(self) -> None:
        """Raise a `SpecError` if ψ or π is too large to be trained."""
        try:
            dtype = next((tensor.dtype for tensor in self.psi.parameters()), None)
            check_trained(self.spec, self.psi._declared, self.pi._declared, self.out_features, self.factors, dtype)
        except SpecError as error:
            raise SpecError(f"Head({self.in_features} → {self.out_features}): {error}") from None

    @torch.no_grad()
    def reset_parameters(self, seed: Seed = None) -> None:
        """Draw all tensors by the rule `init` of the specification."""
        if any(tensor.is_meta for tensor in (*self.parameters(), *self.buffers())):
            return
        generator = as_generator(seed)
        for module in (*self.before, *self.after):
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        rule = RULES.get(self.spec.init)
        self.kappa.reset(generator)
        self.psi.reset(generator, rule)
        self.pi.reset(generator, rule)
        if self.bias is not None:
            self.bias.zero_()
        psi, gain = self.spec.reconciliation, self._gain
        if self.spec.init == "smooth":
            gain *= self.spec.expansion.initial_rms()
            if psi.linear_rows in self.psi.names():
                add_linear(self.spec.expansion, self.psi[psi.linear_rows], self.in_features, generator)
        weights: list[Tensor] = list(self.psi.parameters())
        if not self._sums_channels:
            self.fusion.reset(generator)
        if rule is None:
            if weights:
                # Measured for the sum of the channels, of unit standard deviation each.
                channels = self.spec.channels
                fused = self.spec.fusion.gain(channels) / channels**0.5
                psi.scale(weights, gain / self._output_rms(weights[0]) / fused)
            self.spec.remainder.scale(self.pi, self.in_features, self.out_features, gain)
        self.validate()

    def _output_rms(self, like: Tensor) -> float:
        """Return the measured RMS of Σ_c ⟨κ(x), ψ(w_c)⟩ for standard normal x."""
        owner = self._owner[0] if self._owner else self
        # Squares of heavy tails overflow in single precision.
        heavy = owner.spec.expansion.heavy_tailed()
        precision = torch.float64 if heavy else torch.promote_types(like.dtype, torch.float32)
        # In training mode, with the batch statistics of the data; of copies, as norms record statistics.
        measured = copy.copy(owner)
        steps = {name: copy.deepcopy(owner.get_submodule(name)).to(precision) for name in ("before", "kappa", "after")}
        measured._modules = {**owner._modules, **steps}
        measured.spec = replace(owner.spec, expansion=owner.spec.expansion.clamped())
        for module in (module for step in steps.values() for module in step.modules()):
            module.train(not isinstance(module, nn.Dropout))
        psi = self.psi if like.dtype == precision else copy.deepcopy(self.psi).to(precision)
        with psi.evaluating():
            weights = self._checked_weights(psi)
        x = probe(self.spec.expansion, self.in_features, self.out_features).to(like.device, precision)
        return output_rms(self.spec.expansion, measured.expand(x), weights)

    def _checked_weights(self, psi: Store) -> Weights:
        """Call ψ as a user function and return ψ(w), checked."""
        where = f"Head({self.in_features} → {self.out_features}): {type(self.spec.reconciliation).__name__}"
        weights = attempt(where, self.spec.reconciliation, psi, self.out_features, self.factors)
        shape = (self.out_features, self.factors[0] * self.factors[1])
        found = (weights.outputs, weights.columns) if isinstance(weights, Weights) else type(weights).__name__
        if found != shape:
            raise SpecError(f"{where} must return Weights of shape {shape}; got {found}")
        return weights

    # -------------------------------------------------------------------------------- tensors from the user

    def store(self, role: Role) -> Store:
        """Return the tensors of κ, ψ or π."""
        if role == "expansion":
            return self._owner[0].kappa if self._owner else self.kappa
        check_choice("Head: role", role, ("expansion", "reconciliation", "remainder"))
        return self.psi if role == "reconciliation" else self.pi

    def assign(self, role: Role, **tensors: Any) -> None:
        """Set tensors of κ, ψ or π in place: matrices, grid ranges, masks.

        Heads of a layer with the same κ share the tensors of κ.

        Args:
            role: `expansion`, `reconciliation` or `remainder`.
            **tensors: new values by name, in the present shapes; nested mappings for nested expansions. One set of values
                stands for every channel.

        Raises:
            SpecError: a wrong name or shape, or values that are not finite or not allowed; nothing is changed.

        Example:
            >>> import torch, kapsi as kp
            >>> head = kp.Head(2, 1, kp.HeadSpec(kp.BSpline()))
            >>> head.assign("expansion", range=torch.tensor([[-3.0, 0.0], [3.0, 1.0]]))
        """
        store = self.store(role)
        function = getattr(self.spec, role)
        pairs = store.matched(tensors, f"Head.assign({role!r})")
        old = [(target, target.detach().clone()) for target, _ in pairs]
        with torch.no_grad():
            for target, value in pairs:
                target.copy_(value)
            try:
                function.validate(store)
            except SpecError:
                for target, value in old:
                    target.copy_(value)
                raise

    def validate(self) -> None:
        """Raise a `SpecError` if values of tensors, for example from a file, are not allowed."""
        self.spec.expansion.validate(self.store("expansion"))
        self.spec.reconciliation.validate(self.psi)
        self.spec.remainder.validate(self.pi)

    def extra_repr(self) -> str:
        spec = self.spec
        return f"{self.in_features} → {self.out_features}, {spec.expansion}, {spec.reconciliation}, {spec.remainder}"


_EXPAND, _WEIGHTS, _REMAINDER, _FORWARD = Head.expand, Head.weights, Head.remainder, Head.forward


def _as_written(head: Head) -> bool:
    """Return whether the formula of a head is that of `Head`, replaced neither in the object nor in the class."""
    own = head.__dict__
    return (
        type(head) is Head
        and "expand" not in own
        and "weights" not in own
        and "remainder" not in own
        and "forward" not in own
        and Head.expand is _EXPAND
        and Head.weights is _WEIGHTS
        and Head.remainder is _REMAINDER
        and Head.forward is _FORWARD
    )


# ------------------------------------------------------------------------------------------------ checks


def _declared(function: Function, *sizes: Any) -> Params:
    """Call a user function that declares parameters, and return them, checked."""
    where = f"{type(function).__name__}.params"
    params = attempt(where, cast(Any, function).params, *sizes)
    try:
        list(flatten(params))
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None
    return cast(Params, params)


def check_trained(
    spec: HeadSpec, psi: Params, pi: Params, out_features: int, factors: tuple[int, int], dtype: torch.dtype | None
) -> None:
    """Raise a `SpecError` if ψ or π declares more parameters than can be trained."""
    size = (dtype or torch.get_default_dtype()).itemsize
    for function, params, channels in ((spec.reconciliation, psi, spec.channels), (spec.remainder, pi, 1)):
        declared = [param for _, param in flatten(params)]
        trained = channels * sum(param.numel for param in declared if param.trainable)
        frozen = [param for param in declared if not param.trainable]
        fixed = channels * sum(param.numel for param in frozen)
        if trained + fixed / 4 <= MAX_TRAINED:
            continue
        sizes = (param.numel * (param.dtype.itemsize if param.dtype else size) for param in frozen)
        needed = (4 * size * trained + channels * sum(sizes)) / 1e9
        rank = getattr(function, "rank", 1)
        share = f" ({needed / rank:,.1f} GB a rank with AdamW)" if rank > 1 and needed / rank >= 0.1 else ""
        advice = "use fewer inputs, a smaller rank or a smaller expansion"
        if function is spec.reconciliation:
            advice = _smaller(out_features, factors, channels) or advice
        numbers = f"{trained:,} trainable parameters" + (f" and {fixed:,} fixed values" if fixed > trained else "")
        raise SpecError(
            f"{function} has {numbers}, {needed:,.1f} GB with AdamW{share}; at most {MAX_TRAINED:,} trainable parameters, "
            f"and four times as many fixed values, are allowed except on the meta device; {advice}"
        )


def _smaller(out_features: int, factors: tuple[int, int], channels: int) -> str:
    """Return compact reconciliations with few enough parameters, for a message."""
    fitting = []
    for cls in cast(list[type[Reconciliation]], catalogue("reconciliation")):
        count = channels * cls(**cls.compact).count(out_features, factors) if cls.compact else math.inf
        if count <= MAX_TRAINED:
            fitting.append(f"{cls.__name__}({', '.join(map(str, cls.compact.values()))}) with {count:,}")
    return f"on this κ {' and '.join(fitting)} fit, for instance" if fitting else ""


def is_dense(x: Any, in_features: int) -> bool:
    """Return whether x is a dense floating-point tensor `(..., in_features)`."""
    return (
        isinstance(x, Tensor)
        and x.layout is torch.strided
        and x.dim() > 0
        and x.shape[-1] == in_features
        and x.is_floating_point()
    )


def check_tensor(where: str, x: Any, in_features: int, *, sparse: bool = False) -> None:
    """Raise a `DataError` unless x is a floating-point tensor `(..., in_features)`, dense or (if allowed) sparse."""
    if isinstance(x, Tensor):
        if x.layout != torch.strided:
            check_layout(where, x, in_features, sparse)
        if x.dim() > 0 and x.shape[-1] == in_features and x.is_floating_point():
            return
        problem = f"expected inputs of a floating-point type, got {x.dtype}; use x.float()"
        if x.dim() == 0 or x.shape[-1] != in_features:
            problem = f"expected inputs of shape (..., {in_features}), got {tuple(x.shape)}"
    else:
        problem = f"expected inputs as a torch.Tensor, got {type(x).__name__}; {_conversion(x, sparse)}"
    raise DataError(f"{where}: {problem}")


def _conversion(x: Any, sparse: bool) -> str:
    """Return a hint on converting x to a tensor; SciPy matrices become sparse tensors if allowed."""
    if not hasattr(x, "tocsr"):
        return "use torch.as_tensor(x)"
    if not sparse:
        return "use torch.as_tensor(x.toarray())"
    return (
        "with a = x.tocsr() and a.sum_duplicates() use "
        "torch.sparse_csr_tensor(a.indptr, a.indices, a.data, a.shape, check_invariants=True)"
    )


def check_layout(where: str, x: Tensor, in_features: int, sparse: bool) -> None:
    """Raise a `DataError` for a tensor of a layout other than dense or (if allowed) sparse rows."""
    if not sparse:
        problem = f"expected dense inputs, got {x.layout}; use x.to_dense()"
    elif x.layout != torch.sparse_csr:
        problem = (
            f"expected inputs that are dense or torch.sparse_csr, got {x.layout}; use x.to_sparse_csr() or x.to_dense()"
        )
    elif x.dim() != 2:
        problem = f"expected sparse inputs of shape (rows, {in_features}), got {tuple(x.shape)}; use x.to_dense()"
    elif x.requires_grad:
        problem = "there is no gradient with respect to sparse inputs; use x.detach(), or x.to_dense() for a gradient"
    else:
        return
    raise DataError(f"{where}: {problem}")


def check_width(where: str, name: str, value: Any) -> int:
    """Return a number of features, after a check."""
    argument = f"{where}({name}={value!r})"
    wanted = f"an integer of at least 1, at most {MAX_TENSOR:,}"
    return check_integer(argument, value, 1, MAX_TENSOR, wanted=wanted)


def check_dtype(where: str, dtype: Any) -> None:
    """Raise a `SpecError` for a type without gradients."""
    if dtype not in (None, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        refuse(f"{where}(dtype={dtype!r})", "torch.float64, float32, bfloat16 or float16", dtype)
