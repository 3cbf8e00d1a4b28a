"""The laws that all functions keep, for authors of functions outside the package as well as for its own tests.

A function that is registered by name is found with its `examples`, so that a new class is tested without touching a test::

    kapsi.testing.check(MyExpansion)         # every law on every example
    kapsi.testing.check_pairs(MyExpansion)   # against every registered reconciliation

A law that does not hold raises an AssertionError that names the law and the case.
"""

# The first line of a law's docstring is the law: a statement, not a command.
# ruff: noqa: D401

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import itertools
import json
import math
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from kapsi.calibrate import calibrate
from kapsi.contraction import Route, contract, contract_sum
from kapsi.errors import SpecError
from kapsi.expansion import Expansion, Identity, Taylor
from kapsi.expansion.base import clamp_to_domain, rms
from kapsi.features import DenseFeatures, Features, RecomputedFeatures
from kapsi.function import Function, Params, catalogue, flatten, options_of
from kapsi.fusion import Fusion
from kapsi.model_file import load, save
from kapsi.modules import Head, Model
from kapsi.process import LayerNorm, Process
from kapsi.reconciliation import Reconciliation
from kapsi.remainder import Remainder
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec, from_dict, parse_yaml, to_dict
from kapsi.weights import ActingWeights, Weights

__all__ = [
    "LAWS",
    "Law",
    "WatchSizes",
    "check",
    "check_pairs",
    "examples_of",
    "instances",
    "layer_with",
    "model_with",
    "pair_matters",
]

ROLE_TYPES: dict[str, type[Function]] = {
    "expansion": Expansion,
    "reconciliation": Reconciliation,
    "remainder": Remainder,
    "fusion": Fusion,
    "process": Process,
}

Over: TypeAlias = Literal["function", "class", "pair"]


# ------------------------------------------------------------------------------------------------ cases


def examples_of(cls: type[Function]) -> list[Function]:
    """Return an instance of a class of functions for each of its `examples`.

    Example:
        >>> import kapsi as kp
        >>> examples_of(kp.LowRank)
        [LowRank(rank=2), LowRank(rank=1), LowRank(rank=5)]
    """
    return [_example(cls, options) for options in cls.examples]


def _example(cls: type[Function], options: Mapping[str, Any]) -> Function:
    return from_dict({"kind": cls.name, **options}, ROLE_TYPES[cls.role], f"{cls.__name__}.examples")


def instances(role: str | None = None) -> list[Function]:
    """Return an instance for each example of every registered function of one role, or of all roles."""
    return [instance for cls in catalogue(role) for instance in examples_of(cls)]


def layer_with(*functions: Function) -> LayerSpec:
    """Return a small layer in which functions of one role are at work, a head for each.

    Args:
        *functions: expansions, reconciliations or remainders, as many as wanted; or one fusion; or processes, which stand
            before κ, after κ and at the output.
    """
    role, first = functions[0].role, functions[0]
    heads: list[HeadSpec]
    if role == "expansion":
        heads = [HeadSpec(expansion=f) for f in functions if isinstance(f, Expansion)]
    elif role == "reconciliation":
        heads = [HeadSpec(Taylor(2), f) for f in functions if isinstance(f, Reconciliation)]
    elif role == "remainder":
        heads = [HeadSpec(remainder=f) for f in functions if isinstance(f, Remainder)]
    elif isinstance(first, Fusion):
        return LayerSpec((HeadSpec(), HeadSpec(Taylor(2)), HeadSpec(bias=True)), first)
    else:
        steps = tuple(f for f in functions if isinstance(f, Process))
        return LayerSpec((HeadSpec(before=steps, after=steps),), output=steps)
    return LayerSpec(tuple(heads))


def model_with(*functions: Function, seed: int = 0, dtype: torch.dtype | None = torch.float64, **place: Any) -> Model:
    """Return a small model in evaluation mode in which functions of one role are at work, of 3 inputs and 4 outputs.

    Args:
        *functions: as in `layer_with`; one that needs as many outputs as inputs gets 4 of both.
        seed: of the initial values.
        dtype: of the tensors.
        **place: `device="meta"` for a model without values.
    """
    layer = layer_with(*functions)
    # Some need as many outputs as inputs, an eye as many as columns.
    plain = LayerSpec(tuple(dataclasses.replace(head, expansion=Identity()) for head in layer.heads), layer.fusion)
    choices = [((3, 4), layer), ((4, 4), layer)] + [((4, 4), plain)] * (functions[0].role == "reconciliation")
    for widths, chosen in choices[:-1]:
        try:
            return Model(ModelSpec(widths, (chosen,)), seed=seed, dtype=dtype, **place).eval()
        except SpecError:
            continue
    widths, chosen = choices[-1]
    return Model(ModelSpec(widths, (chosen,)), seed=seed, dtype=dtype, **place).eval()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return inputs in (−0.9, 0.9), within the range of every basis and away from its kinks with probability one."""
    return (torch.rand(shape, generator=_generator(seed), dtype=torch.float64) * 1.8 - 0.9).to(dtype)


def _moved(function: Function, *more: Function, seed: int = 0) -> Model:
    """Return a model with trainable tensors off their initial values, so that a zero or one among those hides nothing."""
    model, generator = model_with(function, *more, seed=seed), _generator(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.1 * noise.to(parameter.dtype))
    return model


# ------------------------------------------------------------------------------------------------ the registry of laws


@dataclass(frozen=True)
class Law:
    """One law: a plain function that raises where a case breaks it.

    Args:
        name: what messages and tests call it.
        over: what a case is: one `function`, all examples of a `class`, or a `pair` of an expansion and a reconciliation.
        roles: the roles that it is about.
        rule: the law itself.
    """

    name: str
    over: Over
    roles: frozenset[str]
    rule: Callable[..., None]

    def applies(self, function: Function | type[Function]) -> bool:
        """Return whether the law is about such functions."""
        return function.role in self.roles

    def __call__(self, *case: Function) -> None:
        """Check one case.

        Raises:
            AssertionError: the law does not hold; the message names it, the functions, and what is wrong.
        """
        try:
            self.rule(*case)
        except Exception as error:
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            shown = " × ".join(map(repr, case))
            raise AssertionError(f"law {self.name!r} fails for {shown}: {kind}{error}") from error


LAWS: dict[str, Law] = {}
"""All laws by name."""


def law(over: Over, *roles: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enter a function into `LAWS` under its own name; without roles it is about all of them."""

    def enter(rule: Callable[..., None]) -> Callable[..., None]:
        LAWS[rule.__name__] = Law(rule.__name__, over, frozenset(roles or ROLE_TYPES), rule)
        return rule

    return enter


def _chosen(laws: Iterable[str] | None, *over: Over) -> list[Law]:
    names = list(LAWS) if laws is None else list(laws)
    unknown = [name for name in names if name not in LAWS]
    if unknown:
        raise SpecError(f"check: no law is called {unknown[0]!r}; choose from {', '.join(LAWS)}")
    return [LAWS[name] for name in names if LAWS[name].over in over]


def check(subject: type[Function] | Function, laws: Iterable[str] | None = None) -> None:
    """Check all laws about single functions, on a class with its examples or on one instance.

    Args:
        subject: a class that is registered by name, or an instance of one.
        laws: names of laws, all by default.

    Raises:
        AssertionError: the first law that does not hold, and for which case.

    Example:
        >>> import kapsi as kp
        >>> check(kp.Taylor, laws=["leading_shapes", "row_independence"])
    """
    functions = [subject] if isinstance(subject, Function) else examples_of(subject)
    for rule in _chosen(laws, "function", "class"):
        if not rule.applies(subject):
            continue
        if rule.over == "class":
            rule(*functions)
            continue
        for function in functions:
            rule(function)


def check_pairs(subject: type[Function] | Function, laws: Iterable[str] | None = None) -> None:
    """Check all laws about pairs: an expansion with every registered reconciliation, or the other way round.

    Of pairs that are contracted alike those are left out that `pair_matters` says show nothing new.

    Args:
        subject: an expansion or a reconciliation, a class with its examples or one instance.
        laws: names of laws, all by default.

    Raises:
        AssertionError: the first law that does not hold, and for which pair.
        SpecError: the subject has another role.
    """
    if subject.role not in ("expansion", "reconciliation"):
        raise SpecError(
            f"check_pairs: expected an expansion or a reconciliation, got the {subject.role} {subject.name}"
        )
    functions = [subject] if isinstance(subject, Function) else examples_of(subject)
    first = subject.role == "expansion"
    others = instances("reconciliation" if first else "expansion")
    for rule in _chosen(laws, "pair"):
        for function in functions:
            for other in others:
                pair = (function, other) if first else (other, function)
                if pair_matters(*pair):
                    rule(*pair)


# Each expansion is asked about with every reconciliation, and to answer a head is made.
@functools.lru_cache(maxsize=1024)
def has_structure(expansion: Function) -> bool:
    """Return whether κ(x) is anything but an array of its values."""
    return not isinstance(_made(expansion), DenseFeatures)


def _made(expansion: Function) -> Features:
    head = Head(3, 1, HeadSpec(expansion), seed=0)  # type: ignore[arg-type]
    return head.expand(torch.zeros(1, 3))


def pair_matters(expansion: Function, reconciliation: Function) -> bool:
    """Return whether a pair can show what others do not: κ or ψ in its first example, or a structure of κ.

    Dense features of one expansion are contracted like those of any other; all examples of them with all of ψ would be
    thousands of times the same product.
    """
    distinct = has_structure(expansion) or expansion.name == "identity"
    if not distinct and not (_is_first(reconciliation) and _is_first(expansion)):
        return False
    return any(_fits(reconciliation, n, expansion.factors(3)) for n in (4, 6))  # type: ignore[arg-type, attr-defined]


def _is_first(function: Function) -> bool:
    cls = type(function)
    return function == _example(cls, cls.examples[0])


# ------------------------------------------------------------------------------------------------ comparing


def _close(actual: Tensor, expected: Tensor, what: str, tolerance: float = 1e-10) -> None:
    """Compare in units of the largest expected value: sums of large terms cancel."""
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if actual.dtype != expected.dtype:
        raise AssertionError(f"{what}: type {actual.dtype}, expected {expected.dtype}")
    if actual.numel() == 0:
        return
    largest = max(1.0, float(expected.detach().abs().max()))
    # Laws compare thousands of times, and what explains a deviation takes longer than to find that there is none.
    if (actual.device, actual.layout) == (expected.device, expected.layout):
        deviation = float((actual.detach() - expected.detach()).abs().max())
        if math.isfinite(deviation) and deviation <= tolerance * largest:
            return
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=tolerance * largest, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def _equal(actual: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what} must be bit-equal: {text}"
    )


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def _gradients(output: Tensor, leaves: Sequence[Tensor], again: bool = False) -> list[Tensor]:
    """Return the gradients of a random combination of the outputs; `again` keeps the graph for another one."""
    weights = torch.randn(output.shape, generator=_generator(3), dtype=torch.float64).to(output)
    if not output.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    scalar = (output * weights).sum()
    return list(torch.autograd.grad(scalar, leaves, retain_graph=again, allow_unused=True, materialize_grads=True))


# ------------------------------------------------------------------------------------------------ laws of every function


@law("function")
def leading_shapes(function: Function) -> None:
    """Any leading shape, no batch axis, an empty batch and inputs that are not contiguous mean the same rows."""
    model = _moved(function)
    m, n = model.in_features, 4
    x = inputs(2, 3, m)
    expected = torch.stack([model(row) for row in x.reshape(6, m)])
    _require(expected.shape == (6, n), f"a row of {m} gives {tuple(expected.shape[1:])}, expected ({n},)")
    _close(model(x), expected.reshape(2, 3, n), "two leading axes")
    _close(model(x.reshape(6, m)), expected, "one leading axis")
    for shape in ((0, m), (2, 0, m)):
        empty = torch.zeros(shape, dtype=x.dtype, requires_grad=True)
        y = model(empty)
        _require(y.shape == (*shape[:-1], n), f"an empty batch {shape} gives {tuple(y.shape)}")
        if y.requires_grad:
            y.sum().backward()
    apart = torch.stack((x, -x), -1)[..., 0]
    turned = x.transpose(0, 1)
    _close(model(apart), model(x), "inputs with gaps in memory")
    _close(model(turned), model(x).transpose(0, 1), "transposed inputs")


@law("function")
def input_unchanged(function: Function) -> None:
    """Neither the inputs nor the tensors of the model change in a forward and backward pass."""
    model = _moved(function)
    x = inputs(5, model.in_features).requires_grad_()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kept = x.detach().clone()
    _gradients(model(x), [x, *model.parameters()])
    _equal(x.detach(), kept, "the inputs")
    for name, tensor in model.state_dict().items():
        _equal(tensor, before[name], name)


@law("function")
def row_independence(function: Function) -> None:
    """Row i of the output depends on row i of the input alone."""
    model = _moved(function)
    x = inputs(6, model.in_features)
    y = model(x)
    for row in range(6):
        changed = x.clone()
        changed[row] = inputs(x.shape[1], seed=row + 100) * 7  # and outside of ranges
        others = [i for i in range(6) if i != row]
        _close(model(changed)[others], y[others], f"the other rows when row {row} changes", 1e-12)


@law("function")
def not_a_number(function: Function) -> None:
    """An input that is not a number makes its own row not a number, and no other."""
    model = _moved(function)
    x = inputs(5, model.in_features)
    expected = model(x)
    spoiled = x.clone()
    spoiled[2] = torch.nan
    y = model(spoiled)
    _require(bool(y[2].isnan().any()), "a row that is not a number gives numbers")
    others = [0, 1, 3, 4]
    _close(y[others], expected[others], "the other rows", 1e-12)


@law("function")
def finite(function: Function) -> None:
    """Value and gradient are finite in float32 for |x| up to 1,000, and at 0."""
    model = model_with(function, dtype=torch.float32)
    m = model.in_features
    points = torch.tensor([0.0, 1.0, 1e-30, 1e-3, 0.5, 1.5, 3.0, 10.0, 30.0, 100.0, 300.0, 999.0, 1000.0])
    points = torch.cat((points, -points))
    alike = points.unsqueeze(-1).expand(-1, m)
    mixed = points[torch.randint(len(points), (40, m), generator=_generator(4))]
    x = torch.cat((alike, mixed)).requires_grad_()
    y = model(x)
    gradient = _gradients(y, [x])[0]
    for what, tensor in (("the value", y), ("the gradient", gradient)):
        rows = (~tensor.isfinite()).any(-1)
        if bool(rows.any()):
            raise AssertionError(f"{what} is not finite at x = {x[rows][0].tolist()}")


@law("function")
def dtypes(function: Function) -> None:
    """A model of a type takes and gives that type; its error is below 32 rounding steps of the largest output."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        low = _moved(function).to(dtype)
        x = inputs(16, low.in_features, dtype=dtype).requires_grad_()
        y = low(x)
        _require(y.dtype == dtype, f"{dtype} in, {y.dtype} out")
        _require(_gradients(y, [x])[0].dtype == dtype, f"{dtype} in, a gradient of another type")
        with torch.no_grad():
            exact = copy.deepcopy(low).double()(x.double())
            error = float((y.double() - exact).abs().max())
        limit = 32 * torch.finfo(dtype).eps * max(1.0, float(exact.abs().max()))
        _require(error <= limit, f"{dtype}: the error is {error:.2e}, at most {limit:.2e} is allowed")


@law("function")
def meta_device(function: Function) -> None:
    """On the meta device a model can be made and called, allocates nothing, and has the same shapes."""
    model = model_with(function)
    blank = model_with(function, device="meta")
    y = blank(torch.empty(5, model.in_features, dtype=torch.float64, device="meta"))
    _require(y.is_meta and y.shape == (5, 4), f"the output on the meta device is {y.device}, {tuple(y.shape)}")
    shapes = {name: (t.shape, t.dtype) for name, t in model.state_dict().items()}
    blanks = blank.state_dict()
    _require(all(tensor.is_meta for tensor in blanks.values()), "a tensor is not on the meta device")
    _require({name: (t.shape, t.dtype) for name, t in blanks.items()} == shapes, "names, shapes or types differ")


@law("function")
def same_seed(function: Function) -> None:
    """The same seed gives the same model and leaves torch's own generator alone; without a seed that one is used."""
    state = torch.get_rng_state()
    first, second, other = (model_with(function, seed=seed) for seed in (0, 0, 1))
    _require(torch.equal(state, torch.get_rng_state()), "a seed is given, and still torch's generator moved")
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        _equal(a, b, f"{name} of two models of one seed")
    drawn = [name for name, a in first.state_dict().items() if not torch.equal(a, other.state_dict()[name])]
    _require(bool(drawn) or not any(True for _ in first.parameters()), "two seeds give the same model")


def _flat(module: nn.Module) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Return a module as a function of its inputs and its trainable tensors, and those."""
    names = [name for name, _ in module.named_parameters()]
    values = [value.detach().clone().requires_grad_() for value in module.parameters()]

    def call(x: Tensor, *tensors: Tensor) -> Tensor:
        result: Tensor = functional_call(module, dict(zip(names, tensors, strict=True)), (x,))
        return result

    return call, values


@law("function")
def gradients(function: Function) -> None:
    """First and second derivatives agree with differences, in all inputs and parameters."""
    model = _moved(function)
    call, values = _flat(model)
    arguments = (inputs(2, model.in_features).requires_grad_(), *values)
    torch.autograd.gradcheck(call, arguments)
    torch.autograd.gradgradcheck(call, arguments, fast_mode=True, atol=1e-4)


@law("function")
def transforms(function: Function) -> None:
    """Vmap over rows equals batching, vmap over stacked models equals the models, jacrev equals jacfwd."""
    models = [_moved(function, seed=seed) for seed in (0, 1)]
    with warnings.catch_warnings():
        # Of torch about itself when its forward mode is first used, and where vmap falls back to a loop: slow, but right.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message="There is a performance drop")
        _transforms(models)


def _transforms(models: Sequence[Model]) -> None:
    model = models[0]
    x = inputs(4, model.in_features)
    _close(torch.func.vmap(model)(x), model(x), "vmap over rows")
    parameters, buffers = torch.func.stack_module_state(models)

    def one(p: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
        result: Tensor = functional_call(model, (p, b), (x,))
        return result

    every = len(models)
    stacked = torch.func.vmap(one)(parameters, buffers) if parameters or buffers else torch.stack([model(x)] * every)
    _close(stacked, torch.stack([m(x) for m in models]), "vmap over stacked parameters")
    call, values = _flat(model)
    places = tuple(range(1 + len(values)))
    row = x[0]
    reverse, forward = (
        jacobian(call, argnums=places)(row, *values) for jacobian in (torch.func.jacrev, torch.func.jacfwd)
    )
    for place, (a, b) in enumerate(zip(reverse, forward, strict=True)):
        _close(a, b, f"jacrev and jacfwd of argument {place}")
    expected = torch.autograd.functional.jacobian(lambda value: call(value, *values), row)
    _close(reverse[0], expected, "jacrev and autograd")


@law("function")
def second_derivatives(function: Function) -> None:
    """Along a line through inputs and parameters the second derivative is one number, in all orders of both modes."""
    model = _moved(function)
    call, values = _flat(model)
    start = (inputs(2, model.in_features), *values)
    generator = torch.Generator().manual_seed(3)
    along = [torch.randn(value.shape, generator=generator, dtype=value.dtype) for value in start]

    def line(t: Tensor) -> Tensor:
        return call(*(value.detach() + t * step for value, step in zip(start, along, strict=True))).sin().sum()

    zero = torch.zeros((), dtype=torch.float64)
    modes: dict[str, Callable[..., Any]] = {"jacrev": torch.func.jacrev, "jacfwd": torch.func.jacfwd}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # of torch about itself, as above
        warnings.filterwarnings("ignore", message="There is a performance drop")
        expected = torch.func.jacrev(torch.func.jacrev(line))(zero)
        for (outer, first), (inner, second) in itertools.product(modes.items(), repeat=2):
            if (outer, inner) != ("jacrev", "jacrev"):
                _close(first(second(line))(zero), expected, f"{outer} of {inner} and jacrev of jacrev")


@law("function")
def saved(function: Function) -> None:
    """A model from a file, or with a state from torch.save (`weights_only`), gives the same bits."""
    model = _moved(function)
    x = inputs(5, model.in_features)
    y = model(x)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save(model, path)
        again = load(path).eval()
    _require(again.spec == model.spec, "the specification differs")
    _equal(again(x), y, "the output of the loaded model")
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other = model_with(function, seed=5)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    _equal(other(x), y, "the output with the loaded state")


@law("function")
def copied(function: Function) -> None:
    """Pickle and deepcopy of the function and of its model give equal ones, with tensors of their own."""
    _require(pickle.loads(pickle.dumps(function)) == function, "the pickled function differs")  # noqa: S301
    _require(hash(copy.deepcopy(function)) == hash(function), "the copied function has another hash")
    model = _moved(function)
    x = inputs(5, model.in_features)
    y = model(x).detach()
    pickled = pickle.loads(pickle.dumps(model))  # noqa: S301
    copies = {"pickled": pickled, "copied": copy.deepcopy(model)}
    for name, other in copies.items():
        _equal(other(x).detach(), y, f"the output of the {name} model")
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(1.0)
        _equal(model(x).detach(), y, f"the output after the {name} model changed")


@law("function")
def plain_data(function: Function) -> None:
    """A function comes back equal from plain data, JSON text and YAML text; a wrong option lists the right ones."""
    import yaml

    role = ROLE_TYPES[function.role]
    data = to_dict(function)
    _require(from_dict(data, role) == function, "from_dict(to_dict(f)) differs")
    _require(from_dict(json.loads(json.dumps(data)), role) == function, "JSON text differs")
    text = yaml.safe_dump(data, sort_keys=False)
    _require(from_dict(parse_yaml(text, "text"), role) == function, "YAML text differs")
    _require(from_dict(data, role) is not function, "the function itself went through plain data")
    try:
        from_dict({**data, "no_such_option": 1}, role, "here")
    except SpecError as error:
        message = str(error)
        _require(message.startswith("here"), f"the message does not begin with the path: {message}")
        _require("'no_such_option'" in message, f"the message does not name the option: {message}")
        for name in data.keys() - {"kind"}:
            _require(name in message, f"the message does not list {name!r}: {message}")
    else:
        raise AssertionError("an option that does not exist is taken")


@law("function")
def options_checked(function: Function) -> None:
    """A number beyond its stated range and a value of another type are refused, with the name of the option."""
    for field in options_of(type(function)):
        bad: list[Any] = [object()]
        low, high = field.metadata.get("minimum"), field.metadata.get("maximum")
        bad += [low - 1] if low is not None else []
        bad += [high + 1] if high is not None else []
        for value in bad:
            try:
                dataclasses.replace(function, **{field.name: value})  # type: ignore[type-var]
            except SpecError as error:
                _require(field.name in str(error), f"the message does not name {field.name!r}: {error}")
            else:
                raise AssertionError(f"{field.name}={value!r} is taken")


# ------------------------------------------------------------------------------------------------ laws of one role


@law("function", "expansion")
def columns(function: Expansion) -> None:
    """D is the same by every way of counting: factors, out_features, the columns themselves, and the domain's groups."""
    for m in (1, 2, 3, 5):
        head = Head(m, 1, HeadSpec(expansion=function), seed=0, dtype=torch.float64)
        made = head.expand(inputs(2, m))
        q, t = function.factors(m)
        counts = {
            "factors": q * t,
            "out_features": function.out_features(m),
            "Features.columns": made.columns,
            "Features.dense": made.dense().shape[-1],
            "domain": sum(count for count, _, _ in function.domain(m)),
        }
        _require(len(set(counts.values())) == 1, f"{m} inputs: {counts}")
        _require(all(low < high for _, low, high in function.domain(m)), f"the domain is {function.domain(m)}")


@law("function", "expansion")
def features(function: Expansion) -> None:
    """What Features do without forming κ(x) equals what its dense form gives."""
    m = 3
    head = Head(m, 1, HeadSpec(expansion=function), seed=0, dtype=torch.float64)
    for lead in ((), (4,), (2, 3)):
        made = head.expand(inputs(*lead, m))
        for what, structure in (("κ", made), ("the layer norm of κ", made.normalized(1e-5))):
            _same_as_dense(structure, what)
        expected = F.layer_norm(made.dense(), (made.columns,), eps=1e-5)
        _close(made.normalized(1e-5).dense(), expected, "the layer norm of κ", 1e-8)


@law("function", "expansion", "remainder")
def calibrated(function: Expansion | Remainder) -> None:
    """Calibration keeps names, shapes and types of all tensors, repeats to the bit, and leaves finite outputs.

    On ordinary data, on a constant column, on a single row, and on values far from the defaults.
    """
    model = model_with(function)
    m = model.in_features
    x = torch.randn(64, m, generator=_generator(7), dtype=torch.float64) * 2 + 1
    constant = x.clone()
    constant[:, 0] = 3.0
    shapes = {name: (t.shape, t.dtype) for name, t in model.state_dict().items()}
    for what, data in {"data": x, "a constant": constant, "one row": x[:1], "far": x * 1e3 - 5e3}.items():
        state = torch.get_rng_state()
        first, second = (calibrate(model_with(function), data) for _ in range(2))
        _require(torch.equal(state, torch.get_rng_state()), "calibration moves torch's own generator")
        found = {name: (t.shape, t.dtype) for name, t in first.state_dict().items()}
        _require(found == shapes, f"{what}: names, shapes or types of the tensors change")
        for name, tensor in first.state_dict().items():
            _equal(second.state_dict()[name], tensor, f"{what}: {name} calibrated again")
        y = first(data)
        _require(bool(y.isfinite().all()), f"{what}: an output is not finite after calibration")


@law("function")
def learnable(function: Function) -> None:
    """Where tensors can be learned, the choice changes neither their names nor their values, in a model and in a file."""
    if "learnable" not in (field.name for field in options_of(type(function))):
        return
    models = [model_with(dataclasses.replace(function, learnable=choice)) for choice in (False, True)]  # type: ignore[type-var]
    fixed, learned = (model.state_dict() for model in models)
    _require(list(fixed) == list(learned), f"the names change: {sorted(set(fixed) ^ set(learned))}")
    more = len(list(models[1].parameters())) - len(list(models[0].parameters()))
    _require(more > 0, "learnable=True adds no parameter")
    x = inputs(20, models[0].in_features)
    data = torch.randn(50, models[0].in_features, generator=_generator(7), dtype=torch.float64)
    calibrate(models[0], data)
    models[1].load_state_dict(models[0].state_dict())
    _equal(models[1](x), models[0](x), "the output with the tensors learnable")
    calibrate(models[1], data)
    _equal(models[1](x), models[0](x), "the output calibrated with the tensors learnable")
    names = [name for name, tensor in models[1].named_parameters() if ".kappa." in name or ".pi." in name]
    leaves = [models[1].get_parameter(name) for name in names]
    for name, gradient in zip(names, _gradients(models[1](x), leaves), strict=True):
        _require(bool(gradient.isfinite().all()), f"the gradient of {name} is not finite")


def _same_as_dense(made: Features, what: str) -> None:
    dense = made.dense()
    _close(made.total(), dense.sum(-1), f"total of {what}", 1e-9)
    _close(made.square_norm(), dense.square().sum(-1), f"square_norm of {what}", 1e-9)
    generator = _generator(5)
    for shape in ((1,), (2,), (made.columns + 1,), (1, 1), (2, 1), (2, made.columns)):
        matrix = torch.randn(*shape, made.columns, generator=generator, dtype=torch.float64)
        expected = torch.einsum("...d,rd->...r", dense, matrix.flatten(0, -2)).unflatten(-1, shape)
        _close(made.matmul(matrix), expected, f"{what} times a matrix {tuple(matrix.shape)}", 1e-9)


@law("function", "reconciliation")
def weights(function: Reconciliation) -> None:
    """What Weights do without forming ψ(w) equals what its dense form gives."""
    for n, factors in ((4, (3, 4)), (6, (1, 5)), (6, (6, 2)), (6, (3, 2)), (1, (1, 1))):
        width = factors[0] * factors[1]
        for count in (1, 3) if _fits(function, n, factors) else ():
            made, _ = _weights(function, n, factors, count)
            dense = made.dense()
            _require(dense.shape == (count, n, width), f"ψ(w) is {tuple(dense.shape)}, expected {(count, n, width)}")
            _require(made.columns == width, f"columns is {made.columns}, expected {width}")
            _require(made.channels in ((None,) if count == 1 else (count,)), f"channels is {made.channels}")
            _close(made.matrix(), dense[0] if count == 1 else dense, "matrix")
            sums = dense.sum(-1)
            _close(made.row_sums(), sums[0] if count == 1 else sums, "row_sums")
            _close(made.merged().dense().sum(0), dense.sum(0), "merged")
            if width > 2:
                sizes = [1, width - 3, 2] if width > 3 else [1, 2]
                pieces = made.split(sizes)
                if pieces is not None:
                    _require([p.columns for p in pieces] == sizes, "the pieces of split have other sizes")
                    _close(torch.cat([p.dense() for p in pieces], -1), dense, "split")


def _fits(function: Reconciliation, n: int, factors: tuple[int, int]) -> bool:
    """Return whether ψ has such sizes: an eye has few, others all that divide."""
    try:
        function.params(n, factors)
    except SpecError:
        return False
    return True


def _drawn(params: Params, channels: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return random tensors of a declaration in float64, nested and by dotted names."""
    generator = _generator(6)
    tensors: dict[str, Tensor] = {}
    nested: dict[str, Any] = {}
    for name, param in flatten(params):
        value = param.draw(None if channels == 1 else channels, generator)
        if param.dtype is None:
            value = value.double()
        tensors[name] = value.requires_grad_(param.trainable)
        *path, last = name.split(".")
        place = nested
        for part in path:
            place = place.setdefault(part, {})
        place[last] = tensors[name]
    return nested, tensors


def _weights(
    function: Reconciliation, n: int, factors: tuple[int, int], channels: int
) -> tuple[Weights, dict[str, Tensor]]:
    """Return ψ(w) with random trainable tensors, and those."""
    nested, tensors = _drawn(function.params(n, factors), channels)
    return function(nested, n, factors), tensors


@law("function", "reconciliation", "remainder")
@torch.no_grad()
def multilinear(function: Reconciliation | Remainder) -> None:
    """ψ that declares `multilinear` is linear in each trainable tensor, the others fixed; π is affine."""
    for n, factors in ((4, (3, 4)), (6, (1, 5)), (6, (6, 2)), (1, (1, 1))) if function.multilinear else ():
        if isinstance(function, Remainder):
            nested, tensors = _drawn(function.params(4, n), 1)
            x = torch.randn(5, 4, generator=_generator(7), dtype=torch.float64)
            value = functools.partial(function, x, nested, n)
        elif _fits(function, n, factors):
            nested, tensors = _drawn(function.params(n, factors), 1)
            value = functools.partial(lambda *arguments: function(*arguments).dense(), nested, n, factors)
        else:
            continue
        for name, tensor in tensors.items():
            if tensor.requires_grad:
                first, second = tensor.clone(), torch.randn(tensor.shape, generator=_generator(8)).double()
                points = (first, second, 2 * first - second, torch.zeros_like(first), first)
                at_first, at_second, beyond, zero, _ = [
                    value().clone() for point in points if tensor.copy_(point) is tensor
                ]
                _close(beyond, 2 * at_first - at_second, f"the value at {name} = 2a − b")
                if isinstance(function, Reconciliation):
                    _close(zero, torch.zeros_like(zero), f"the value at {name} = 0")


@law("function", "reconciliation")
def count(function: Reconciliation) -> None:
    """The count l is the number of trainable elements of a head's ψ, times the channels."""
    for kappa, n in ((Taylor(2), 4), (Taylor(2), 6), (Identity(), 3)):
        for channels in (1, 3) if _fits(function, n, kappa.factors(3)) else ():
            head = Head(3, n, HeadSpec(kappa, function, channels=channels), seed=0)
            trainable = sum(parameter.numel() for parameter in head.psi.parameters())
            expected = function.count(n, head.factors) * channels
            _require(trainable == expected, f"{trainable} trainable elements, count says {expected}")


@law("function", "remainder", "fusion")
def layer_scale(function: Remainder | Fusion) -> None:
    """Outputs of a layer of one head and of four heads have a standard deviation of ⅓ to 3 at initial values."""
    for count in (1, 4):
        if isinstance(function, Fusion):
            layer = LayerSpec((HeadSpec(Taylor(2)),) * count, function)
        elif count == 1 or any(True for _ in flatten(function.params(8, 8))):
            layer = LayerSpec((HeadSpec(Taylor(2), remainder=function),) * count)
        else:
            continue  # four times the same function of the inputs is as large as it is
        model = Model(ModelSpec((8, 8), (layer,)), seed=0)
        spreads = []
        for seed in range(9):
            model.reset_parameters(seed)
            with torch.no_grad():
                spreads.append(float(model(torch.randn(512, 8, generator=_generator(1000 + seed))).std()))
        spread = sorted(spreads)[len(spreads) // 2]
        _require(1 / 3 <= spread <= 3, f"{count} heads: the standard deviation is {spread:.3g}")


@law("function", "fusion")
def gain(function: Fusion) -> None:
    """The gain is the standard deviation of the fusion of independent outputs of unit deviation, at initial values."""
    for heads in (1, 4, 9):
        outputs = torch.randn(heads, 1024, 16, generator=_generator(8))
        tensors = {name: param.draw(None, _generator(9)) for name, param in flatten(function.params(heads, 16))}
        measured = float(function(outputs, tensors).std())
        stated = function.gain(heads)
        _require(0.8 < measured / stated < 1.25, f"{heads} heads: the gain is {measured:.3g}, stated is {stated:.3g}")


# ------------------------------------------------------------------------------------------------ laws of a class


@law("class")
def compiles(*functions: Function) -> None:
    """One full graph, equal to eager in value and gradient; batches of another size make one more, and that is all."""
    for group in _groups(functions):
        model = _moved(*group)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        leaves = list(model.parameters())
        for rows, stance in ((5, "default"), (5, "fail_on_recompile"), (7, "default"), (11, "fail_on_recompile")):
            x = inputs(rows, model.in_features, seed=rows).requires_grad_()
            with torch.compiler.set_stance(stance):
                y = compiled(x)
            expected = model(x)
            _close(y, expected, f"the compiled output of {rows} rows")
            ours, theirs = _gradients(y, [x, *leaves]), _gradients(expected, [x, *leaves])
            for a, b in zip(ours, theirs, strict=True):
                _close(a, b, f"the compiled gradient of {rows} rows")


@law("class")
def exports(*functions: Function) -> None:
    """The exported program takes batches of any size and equals eager."""
    for group in _groups(functions):
        model = _moved(*group)
        m = model.in_features
        with warnings.catch_warnings():
            # Of the exporter about itself, in some versions.
            warnings.simplefilter("ignore", category=FutureWarning)
            warnings.simplefilter("ignore", category=DeprecationWarning)
            program = torch.export.export(model, (inputs(3, m),), dynamic_shapes=({0: torch.export.Dim("batch")},))
        run = program.module()
        for rows in (3, 8):
            x = inputs(rows, m, seed=rows)
            _close(run(x), model(x), f"the exported output of {rows} rows")


def _groups(functions: Sequence[Function]) -> Iterator[Sequence[Function]]:
    """Yield what fits in one model: all functions as its heads; each fusion on its own."""
    if functions[0].role == "fusion":
        yield from ([function] for function in functions)
    else:
        yield functions


# ------------------------------------------------------------------------------------------------ laws of pairs


def _pair_heads(
    expansion: Expansion, reconciliation: Reconciliation, after: tuple[Process, ...] = ()
) -> Iterator[Head]:
    made = 0
    for n in (4, 6):
        for channels in (1, 3):
            spec = HeadSpec(expansion, reconciliation, channels=channels, after=after)
            try:
                yield Head(3, n, spec, seed=n + channels, dtype=torch.float64)
            except SpecError:
                continue  # sizes that do not divide 4 or 6 outputs
            made += 1
    _require(made > 0, "no head of 3 inputs and 4 or 6 outputs can be made")


def _contracts(head: Head, dense: Tensor, x: Tensor, tolerance: float, routes: Sequence[Route] = ()) -> None:
    leaves = [x, *head.parameters()]
    made, matrices = head.expand(x), head.weights()
    expected = torch.einsum("...d,cnd->...cn", dense, matrices.dense())
    products = {
        "contract": (contract(made, matrices), False),
        "contract_sum": (contract_sum(made, matrices), True),
        "the head": (head(x), True),
        **{f"contract, route {r}": (contract(made, matrices, route=r), False) for r in routes},
        **{f"the head, route {r}": (head(x, route=r), True) for r in routes},
    }
    references = (expected, expected.sum(-2))
    gradients = [_gradients(reference, leaves, again=True) for reference in references]
    for what, (product, summed) in products.items():
        reference, theirs = references[summed], gradients[summed]
        case = f"{what}, {head.out_features} outputs, {head.spec.channels} channels, inputs {tuple(x.shape)}"
        _close(product, reference, case, tolerance)
        for ours, other in zip(_gradients(product, leaves, again=True), theirs, strict=True):
            _close(ours, other, f"gradient of {case}", tolerance)


@law("pair", "expansion", "reconciliation")
def contraction(expansion: Expansion, reconciliation: Reconciliation) -> None:
    """The contraction equals the product of the dense forms, in value and gradient, on every route."""
    routes: dict[tuple[int, ...], tuple[Route, ...]] = {(5,): ("dense", "structured"), (2, 3): ()}
    for head in _pair_heads(expansion, reconciliation):
        for lead, chosen in routes.items():
            x = inputs(*lead, 3).requires_grad_()
            _contracts(head, expansion(x, head.kappa).dense(), x, 1e-10, chosen)


@law("pair", "expansion", "reconciliation")
def folded_layer_norm(expansion: Expansion, reconciliation: Reconciliation) -> None:
    """A layer norm after κ that is folded into the contraction equals one of the formed κ(x)."""
    for head in _pair_heads(expansion, reconciliation, (LayerNorm(),)):
        x = inputs(5, 3).requires_grad_()
        dense = expansion(x, head.kappa).dense()
        # Folded, the variance is a difference of two means: it loses digits where κ is nearly constant.
        _contracts(head, F.layer_norm(dense, dense.shape[-1:], eps=1e-5), x, 1e-8)


@law("pair", "expansion", "reconciliation")
def pair_gradients(expansion: Expansion, reconciliation: Reconciliation) -> None:
    """First and second derivatives of a head agree with differences along random directions."""
    n = next(n for n in (4, 6) if _fits(reconciliation, n, expansion.factors(3)))
    for channels in (1, 2):
        spec = HeadSpec(expansion, reconciliation, channels=channels, bias=True)
        call, values = _flat(Head(3, n, spec, seed=0, dtype=torch.float64))
        arguments = (inputs(2, 3).requires_grad_(), *values)
        torch.autograd.gradcheck(call, arguments, fast_mode=True, atol=1e-4)
        torch.autograd.gradgradcheck(call, arguments, fast_mode=True, atol=1e-4)


@law("pair", "expansion", "reconciliation")
def sizes(expansion: Expansion, reconciliation: Reconciliation) -> None:
    """Nothing as large as κ(x), B × D, or ψ(w), n × D, is made where κ or ψ has structure, forward or backward.

    Gradients of the parameters are as large as those, which are smaller here, but for a ψ that has all its n·D entries.
    """
    made = _made(expansion)
    if isinstance(made, DenseFeatures) and expansion.name != "identity":
        return  # contracted like the identity
    # What is made anew in each pass is made as a whole.
    structured = not isinstance(made, DenseFeatures | RecomputedFeatures)
    # So many columns that the widest factor of κ has more than the ranks and channels of all examples of ψ.
    wanted, batch, target = (4000, 128, 120) if structured else (300, 1, 400)
    m = next(m for m in itertools.count(1) if expansion.out_features(m) >= wanted)
    width, factors = expansion.out_features(m), expansion.factors(m)
    # The outputs are as many as fit and as have more entries in a row of ψ than there are parameters.
    fitting = [n for n in range(2, 2 * target) if _fits(reconciliation, n, factors)]
    if not fitting:
        return  # an eye: its outputs are the columns of κ, one by one
    n = min(fitting, key=lambda n: abs(n - target))
    limits = {"B·D": batch * width} if structured else {}
    if any(param.numel >= n * width for _, param in flatten(reconciliation.params(n, factors))):
        # All of ψ is there, as parameters or with a mask of its size. Of κ as a product one factor is left for the other
        # only where the outputs are fewer than the columns of either; above that κ is the smallest array.
        n = 4
    else:
        limits["n·D"] = n * width
    if not limits:
        return
    for channels, after in itertools.product((1, 3), ((), (LayerNorm(),))):
        head = Head(m, n, HeadSpec(expansion, reconciliation, channels=channels, after=after), seed=0)
        if isinstance(head.weights(), ActingWeights):
            return  # works in pieces of a size of its own, larger than a small case has in all
        x = inputs(batch, m, dtype=torch.float32).requires_grad_()
        with WatchSizes(x, *head.parameters(), *head.buffers()) as watch:
            _gradients(head(x), [x, *head.parameters()])
        for what, size in limits.items():
            found = f"{watch.operation} makes {watch.largest:,} elements, {what} is {size:,}"
            _require(watch.largest < size, f"{channels} channels, after={after}, {m} → {n}, {batch} rows: {found}")


@law("pair", "expansion", "reconciliation")
def initial_scale(expansion: Expansion, reconciliation: Reconciliation) -> None:
    """Outputs have a standard deviation of ⅓ to 3 for standard normal inputs at initial values.

    For 8 inputs and outputs the median over seeds; for one input and output all seeds pooled, since one function of one
    input may be as good as constant. Inputs of heavy-tailed expansions are moved into their domain, and the middle half of
    the outputs counts.
    """
    if not any(param.trainable for _, param in flatten(reconciliation.params(4, (1, 4)))):
        return
    for channels in (1, 3):
        head = Head(8, 8, HeadSpec(expansion, reconciliation, channels=channels), seed=0)
        spreads = []
        for seed in range(7):
            head.reset_parameters(seed)
            with torch.no_grad():
                x = clamp_to_domain(expansion, torch.randn(1024, 8, generator=_generator(1000 + seed)))
                y = head(x)
                spreads.append(rms(expansion, y - y.mean()))
        middle = sorted(spreads)[len(spreads) // 2]
        _require(1 / 3 <= middle <= 3, f"8 → 8, {channels} channels: the standard deviation is {middle:.3g}")
    head = Head(1, 1, HeadSpec(expansion, reconciliation), seed=0)
    if not any(parameter.numel() for parameter in head.psi.parameters()):
        return  # a share of one entry can be none
    outputs = []
    for seed in range(15):
        head.reset_parameters(seed)
        with torch.no_grad():
            x = clamp_to_domain(expansion, torch.randn(1024, 1, generator=_generator(2000 + seed)))
            outputs.append(head(x))
    pooled = rms(expansion, torch.cat(outputs))
    _require(1 / 3 <= pooled <= 3, f"1 → 1: the standard deviation is {pooled:.3g}")


# ------------------------------------------------------------------------------------------------ sizes


class WatchSizes(TorchDispatchMode):
    """Notes how many elements the largest tensor has that is made while it is entered, forward and backward.

    Views count as the memory behind them. Tensors that were there before do not count when they are named.

    Args:
        *known: tensors whose memory does not count, such as inputs and parameters.

    Attributes:
        largest: elements of the largest tensor made.
        operation: the name of the operation that made it.

    Example:
        >>> x = torch.ones(10, 10)
        >>> with WatchSizes(x) as watch:
        ...     y = (x.t() @ x[:, :2]).sum()
        >>> watch.largest
        20
    """

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.largest, self.operation = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do the operation and look at what it made."""
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if not isinstance(made, Tensor) or made.is_meta:
                continue
            memory = made.untyped_storage()
            elements = memory.nbytes() // made.element_size()
            if elements > self.largest and memory.data_ptr() not in self.known:
                self.largest, self.operation = elements, str(func)
        return result
