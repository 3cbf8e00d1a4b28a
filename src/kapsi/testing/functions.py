"""Laws of every function in a layer, and of every registered function."""

# The first line of a law's docstring is the law: a statement, not a command.
# ruff: noqa: D401

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import json
import pickle
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from kapsi.errors import SpecError
from kapsi.function import Function, options_of
from kapsi.model_file import load, save
from kapsi.modules import Model
from kapsi.spec import from_dict, parse_yaml, to_dict
from kapsi.testing.cases import (
    LAYER_ROLES,
    assert_close,
    assert_equal,
    functional,
    gradients_of,
    inputs,
    model_with,
    perturbed_model,
    require,
    role_class,
    seeded,
)
from kapsi.testing.registry import EVERY_ROLE, law


@law("function")
def leading_shapes(function: Function) -> None:
    """Leading shape, no batch axis, an empty batch and non-contiguous inputs do not change the result of a row."""
    model = perturbed_model(function)
    m, n = model.in_features, 4
    x = inputs(2, 3, m)
    expected = torch.stack([model(row) for row in x.reshape(6, m)])
    require(expected.shape == (6, n), f"a row of {m} gives {tuple(expected.shape[1:])}, expected ({n},)")
    assert_close(model(x), expected.reshape(2, 3, n), "two leading axes")
    assert_close(model(x.reshape(6, m)), expected, "one leading axis")
    for shape in ((0, m), (2, 0, m)):
        empty = torch.zeros(shape, dtype=x.dtype, requires_grad=True)
        y = model(empty)
        require(y.shape == (*shape[:-1], n), f"an empty batch {shape} gives {tuple(y.shape)}")
        if y.requires_grad:
            y.sum().backward()
    apart = torch.stack((x, -x), -1)[..., 0]
    turned = x.transpose(0, 1)
    assert_close(model(apart), model(x), "inputs with gaps in memory")
    assert_close(model(turned), model(x).transpose(0, 1), "transposed inputs")


@law("function")
def input_unchanged(function: Function) -> None:
    """Neither the inputs nor the tensors of the model change in a forward and backward pass."""
    model = perturbed_model(function)
    x = inputs(5, model.in_features).requires_grad_()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    original = x.detach().clone()
    gradients_of(model(x), [x, *model.parameters()])
    assert_equal(x.detach(), original, "the inputs")
    for name, tensor in model.state_dict().items():
        assert_equal(tensor, before[name], name)


@law("function")
def row_independence(function: Function) -> None:
    """Row i of the output depends on row i of the input alone."""
    model = perturbed_model(function)
    x = inputs(6, model.in_features)
    y = model(x)
    for row in range(6):
        changed = x.clone()
        changed[row] = inputs(x.shape[1], seed=row + 100) * 7  # also outside of domains
        others = [i for i in range(6) if i != row]
        assert_close(model(changed)[others], y[others], f"the other rows when row {row} changes", 1e-12)


@law("function")
def not_a_number(function: Function) -> None:
    """A NaN in the input affects only its row."""
    model = perturbed_model(function)
    x = inputs(5, model.in_features)
    expected = model(x)
    spoiled = x.clone()
    spoiled[2] = torch.nan
    y = model(spoiled)
    require(bool(y[2].isnan().any()), "a row with a NaN gives an output without NaN")
    others = [0, 1, 3, 4]
    assert_close(y[others], expected[others], "the other rows", 1e-12)


@law("function")
def finite(function: Function) -> None:
    """Value and gradient are finite in float32 for |x| up to 1,000, and at 0."""
    model = model_with(function, dtype=torch.float32)
    m = model.in_features
    points = torch.tensor([0.0, 1.0, 1e-30, 1e-3, 0.5, 1.5, 3.0, 10.0, 30.0, 100.0, 300.0, 999.0, 1000.0])
    points = torch.cat((points, -points))
    alike = points.unsqueeze(-1).expand(-1, m)
    mixed = points[torch.randint(len(points), (40, m), generator=seeded(4))]
    x = torch.cat((alike, mixed)).requires_grad_()
    y = model(x)
    gradient = gradients_of(y, [x])[0]
    for label, tensor in (("the value", y), ("the gradient", gradient)):
        rows = (~tensor.isfinite()).any(-1)
        if bool(rows.any()):
            raise AssertionError(f"{label} is not finite at x = {x[rows][0].tolist()}")


@law("function")
def dtypes(function: Function) -> None:
    """Inputs and outputs have the type of the model; the error is below 32 rounding steps of the largest output."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        low = perturbed_model(function).to(dtype)
        x = inputs(16, low.in_features, dtype=dtype).requires_grad_()
        y = low(x)
        require(y.dtype == dtype, f"{dtype} in, {y.dtype} out")
        require(gradients_of(y, [x])[0].dtype == dtype, f"{dtype} in, a gradient of another type")
        with torch.no_grad():
            exact = copy.deepcopy(low).double()(x.double())
            error = float((y.double() - exact).abs().max())
        limit = 32 * torch.finfo(dtype).eps * max(1.0, float(exact.abs().max()))
        require(error <= limit, f"{dtype}: the error is {error:.2e}, at most {limit:.2e} is allowed")


@law("function")
def meta_device(function: Function) -> None:
    """A model on the meta device can be built and called, allocates nothing, and has the same shapes."""
    model = model_with(function)
    blank = model_with(function, device="meta")
    y = blank(torch.empty(5, model.in_features, dtype=torch.float64, device="meta"))
    require(y.is_meta and y.shape == (5, 4), f"the output on the meta device is {y.device}, {tuple(y.shape)}")
    shapes = {name: (t.shape, t.dtype) for name, t in model.state_dict().items()}
    blanks = blank.state_dict()
    require(all(tensor.is_meta for tensor in blanks.values()), "a tensor is not on the meta device")
    require({name: (t.shape, t.dtype) for name, t in blanks.items()} == shapes, "names, shapes or types differ")


@law("function")
def same_seed(function: Function) -> None:
    """Equal seeds give equal models and leave torch's global generator unchanged; it is the default without a seed."""
    state = torch.get_rng_state()
    first, second, other = (model_with(function, seed=seed) for seed in (0, 0, 1))
    require(torch.equal(state, torch.get_rng_state()), "a build with a seed changed torch's global generator")
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert_equal(a, b, f"{name} of two models with equal seeds")
    drawn = [name for name, a in first.state_dict().items() if not torch.equal(a, other.state_dict()[name])]
    require(bool(drawn) or not any(True for _ in first.parameters()), "two seeds give the same model")


@law("function")
def gradients(function: Function) -> None:
    """First and second derivatives agree with finite differences, in all inputs and parameters."""
    model = perturbed_model(function)
    call, values = functional(model)
    arguments = (inputs(2, model.in_features).requires_grad_(), *values)
    torch.autograd.gradcheck(call, arguments)
    torch.autograd.gradgradcheck(call, arguments, fast_mode=True, atol=1e-4)


@law("function")
def transforms(function: Function) -> None:
    """Vmap over rows equals batching, vmap over stacked models equals the models, jacrev equals jacfwd."""
    models = [perturbed_model(function, seed=seed) for seed in (0, 1)]
    with warnings.catch_warnings():
        # torch warns at the first use of forward mode, and for vmap by a loop, slow but correct.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message="There is a performance drop")
        _transforms(models)


def _transforms(models: Sequence[Model]) -> None:
    model = models[0]
    x = inputs(4, model.in_features)
    assert_close(torch.func.vmap(model)(x), model(x), "vmap over rows")
    parameters, buffers = torch.func.stack_module_state(models)

    def one(p: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
        result: Tensor = functional_call(model, (p, b), (x,))
        return result

    stacked = (
        torch.func.vmap(one)(parameters, buffers) if parameters or buffers else torch.stack([model(x)] * len(models))
    )
    assert_close(stacked, torch.stack([m(x) for m in models]), "vmap over stacked parameters")
    call, values = functional(model)
    arguments = tuple(range(1 + len(values)))
    row = x[0]
    reverse, forward = (
        jacobian(call, argnums=arguments)(row, *values) for jacobian in (torch.func.jacrev, torch.func.jacfwd)
    )
    for position, (a, b) in enumerate(zip(reverse, forward, strict=True)):
        assert_close(a, b, f"jacrev and jacfwd of argument {position}")
    expected = torch.autograd.functional.jacobian(lambda value: call(value, *values), row)
    assert_close(reverse[0], expected, "jacrev and autograd")


@law("function")
def second_derivatives(function: Function) -> None:
    """The second derivative along a line through inputs and parameters agrees in all orders of both modes."""
    model = perturbed_model(function)
    call, values = functional(model)
    start = (inputs(2, model.in_features), *values)
    generator = torch.Generator().manual_seed(3)
    along = [torch.randn(value.shape, generator=generator, dtype=value.dtype) for value in start]

    def line(t: Tensor) -> Tensor:
        return call(*(value.detach() + t * step for value, step in zip(start, along, strict=True))).sin().sum()

    zero = torch.zeros((), dtype=torch.float64)
    modes: dict[str, Callable[..., Any]] = {"jacrev": torch.func.jacrev, "jacfwd": torch.func.jacfwd}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # as above
        warnings.filterwarnings("ignore", message="There is a performance drop")
        expected = torch.func.jacrev(torch.func.jacrev(line))(zero)
        for (outer, first), (inner, second) in itertools.product(modes.items(), repeat=2):
            if (outer, inner) != ("jacrev", "jacrev"):
                assert_close(first(second(line))(zero), expected, f"{outer} of {inner} and jacrev of jacrev")


@law("function")
def saved(function: Function) -> None:
    """Outputs of a model from a file, or with a state from torch.save (`weights_only`), are bitwise identical."""
    model = perturbed_model(function)
    x = inputs(5, model.in_features)
    y = model(x)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save(model, path)
        loaded = load(path).eval()
    require(loaded.spec == model.spec, "the specification differs")
    assert_equal(loaded(x), y, "the output of the loaded model")
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other = model_with(function, seed=5)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert_equal(other(x), y, "the output with the loaded state")


@law("function", EVERY_ROLE)
def copied(function: Function) -> None:
    """Pickle and deepcopy of a function and of its model give equal copies with separate tensors."""
    require(pickle.loads(pickle.dumps(function)) == function, "the pickled function differs")  # noqa: S301
    require(hash(copy.deepcopy(function)) == hash(function), "the copied function has another hash")
    if function.role not in LAYER_ROLES:
        return
    model = perturbed_model(function)
    x = inputs(5, model.in_features)
    y = model(x).detach()
    pickled = pickle.loads(pickle.dumps(model))  # noqa: S301
    copies = {"pickled": pickled, "copied": copy.deepcopy(model)}
    for name, other in copies.items():
        assert_equal(other(x).detach(), y, f"the output of the {name} model")
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(1.0)
        assert_equal(model(x).detach(), y, f"the output after the {name} model changed")


@law("function", EVERY_ROLE)
def plain_data(function: Function) -> None:
    """A function survives the round trip through plain data, JSON and YAML; an unknown option lists the known options."""
    import yaml

    role = role_class(type(function))
    data = to_dict(function)
    require(from_dict(data, role) == function, "from_dict(to_dict(f)) differs")
    require(from_dict(json.loads(json.dumps(data)), role) == function, "JSON text differs")
    text = yaml.safe_dump(data, sort_keys=False)
    require(from_dict(parse_yaml(text, "text"), role) == function, "YAML text differs")
    require(from_dict(data, role) is not function, "from_dict returns the original object")
    try:
        from_dict({**data, "no_such_option": 1}, role, "here")
    except SpecError as error:
        message = str(error)
        require(message.startswith("here"), f"the message does not begin with the path: {message}")
        require("'no_such_option'" in message, f"the message does not name the option: {message}")
        for name in data.keys() - {"kind"}:
            require(name in message, f"the message does not list {name!r}: {message}")
    else:
        raise AssertionError("an unknown option is accepted")


@law("function", EVERY_ROLE)
def options_checked(function: Function) -> None:
    """A number out of range and a value of a wrong type are refused, with the name of the option."""
    for field in options_of(type(function)):
        wrong: list[Any] = [object()]
        low, high = field.metadata.get("minimum"), field.metadata.get("maximum")
        wrong += [low - 1 - abs(low)] if low is not None else []
        wrong += [high + 1 + abs(high)] if high is not None else []
        for value in wrong:
            try:
                dataclasses.replace(function, **{field.name: value})  # type: ignore[type-var]
            except SpecError as error:
                require(field.name in str(error), f"the message does not name {field.name!r}: {error}")
            else:
                raise AssertionError(f"{field.name}={value!r} is accepted")


@law("function")
def options_crossed(function: Function) -> None:
    """Numeric options at the ends of their ranges, two equal or two exchanged, are refused or give finite outputs."""
    numbers = {f.name: f for f in options_of(type(function)) if isinstance(getattr(function, f.name), float)}
    values = {
        name: {getattr(function, name), *(field.metadata.get(end) for end in ("minimum", "maximum"))} - {None}
        for name, field in numbers.items()
    }
    cases: list[dict[str, Any]] = [{name: value} for name in numbers for value in values[name]]
    for pair in itertools.combinations(numbers, 2):
        both = set().union(*(values[name] for name in pair))
        cases += [dict(zip(pair, chosen, strict=True)) for chosen in itertools.product(both, both)]
    for options in cases:
        try:
            model = model_with(dataclasses.replace(function, **options))  # type: ignore[type-var]
        except SpecError:
            continue
        y = model(inputs(5, model.in_features))
        require(bool(y.isfinite().all()), f"an output is not finite with {options}")
