"""One head, y = Σ_c ⟨κ(x), ψ(w_c)⟩ + π(x) + b."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kapsi.contraction import Route, contract_sum
from kapsi.errors import SpecError
from kapsi.features import DenseFeatures, Features, check_formed, formed
from kapsi.function import LARGEST_EXPANSION, LARGEST_TENSOR, Params, flatten
from kapsi.initial import output_spread, probe
from kapsi.modules.store import Seed, Store, as_generator, integer, memory
from kapsi.process import LayerNorm, pipeline
from kapsi.reconciliation import DualLowRankKronecker, KhatriRao
from kapsi.remainder import ZeroRemainder
from kapsi.spec import HeadSpec
from kapsi.weights import Weights

__all__ = [
    "LARGEST_TRAINED",
    "Head",
]

LARGEST_TRAINED = 2**29
"""Trainable numbers of the largest ψ that is made: 8.6 GB in training, with gradient and the two moments of AdamW in float32."""

Role = Literal["expansion", "reconciliation", "remainder"]


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
        in_features = check_width("Head", "in_features", in_features)
        out_features = check_width("Head", "out_features", out_features)
        check_dtype("Head", dtype)
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
                check_trained(spec, psi, pi, out_features, self.factors, dtype)
            self.psi = Store(psi, channels, device, dtype)
            self.pi = Store(pi, None, device, dtype)
        except SpecError as error:
            raise SpecError(f"{where}: {error}") from None
        if spec.bias:
            with memory(f"{where}: the bias"):
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
        self.check_inputs(x)
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

    def check_inputs(self, x: Tensor) -> None:
        """Raise a `SpecError` where inputs do not fit the head, before anything is computed."""
        check_tensor("Head", x, self.in_features, sparse=True)
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
            self.check_inputs(x)
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
            check_trained(self.spec, self.psi._declared, self.pi._declared, self.out_features, self.factors, dtype)
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


def check_trained(
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


def check_tensor(where: str, x: Any, in_features: int, *, sparse: bool = False) -> None:
    if not isinstance(x, Tensor):
        raise SpecError(f"{where}: expected inputs as a torch.Tensor, got {type(x).__name__}; {_conversion(x, sparse)}")
    if x.layout != torch.strided:
        check_layout(where, x, in_features, sparse)
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


def check_layout(where: str, x: Tensor, in_features: int, sparse: bool) -> None:
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


def check_width(where: str, name: str, value: Any) -> int:
    width = integer(f"{where}({name}={value!r})", value, "an integer of at least 1")
    if width < 1:
        raise SpecError(f"{where}({name}={value!r}): expected an integer of at least 1")
    if width > LARGEST_TENSOR:
        raise SpecError(f"{where}({name}={value!r}): at most {LARGEST_TENSOR:,} are allowed")
    return width


def check_dtype(where: str, dtype: Any) -> None:
    if dtype not in (None, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise SpecError(f"{where}(dtype={dtype!r}): expected torch.float64, float32, bfloat16 or float16")
