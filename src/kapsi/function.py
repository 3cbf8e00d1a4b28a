"""Functions as data: the protocol of κ, ψ, π and their fusion, the closed registry of names, and plain data from and to options.

A *function* is a frozen dataclass with a registered name. It holds options, declares the tensors it needs (`Param`) and
owns none, so the same object is code, configuration, hash key and YAML entry.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeAlias, Union, get_args, get_origin

import torch
from torch import Generator, Tensor

from kapsi.errors import SpecError, did_you_mean
from kapsi.installed import load_installed

__all__ = [
    "Function",
    "Param",
    "Params",
    "Spec",
    "Tensors",
    "catalogue",
    "lookup",
    "option",
    "to_dict",
]

Initializer: TypeAlias = Callable[[tuple[int, ...], Generator | None], Tensor]
"""Draws one tensor of a given shape, from a generator or from torch's default one."""

NAMED_INITIALIZERS: dict[str, Initializer] = {
    "zeros": lambda shape, generator: torch.zeros(shape, device="cpu"),
    "ones": lambda shape, generator: torch.ones(shape, device="cpu"),
    "normal": lambda shape, generator: torch.randn(shape, generator=generator, device="cpu"),
    "uniform": lambda shape, generator: torch.rand(shape, generator=generator, device="cpu") * 2 - 1,
}

LARGEST_TENSOR = 2**36
"""Elements of the largest single tensor that a function may declare; more is a slip in a specification, not a model."""

LARGEST_EXPANSION = 2**53
"""Columns of the widest κ, formed or not: up to here a float counts them."""


@dataclass(frozen=True)
class Param:
    """A tensor that a function needs; the head owns it.

    Args:
        shape: its shape, without the leading channel axis that a head with several channels adds.
        init: a standard deviation; constant values (one for all elements, one for each row, or all of them); the name of
            an initializer (`zeros`, `ones`, `normal`, `uniform` on [−1, 1)); or a callable `(shape, generator) -> Tensor`,
            which must be a function of a module (or a partial of one) if the model is to be pickled.
        trainable: False for a buffer, which is saved with the model but not trained: masks, grid ends, centers, constants.
        dtype: the type of a tensor that does not follow the model's, such as `torch.bool` for a mask.
        transposed: whether it is kept with its last axis first (before that of the channels): one row of memory a column of
            ψ, which is what sparse inputs gather. The parameter itself, and with it `state_dict`, has the exchanged shape;
            by its name a store gives it in the declared one.
    """

    shape: tuple[int, ...]
    init: float | tuple[float, ...] | str | Initializer = 1.0
    trainable: bool = True
    dtype: torch.dtype | None = None
    transposed: bool = False

    def __post_init__(self) -> None:
        shape, init = self.shape, self.init
        if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
            raise SpecError(f"Param(shape={shape!r}): expected a tuple of integers of at least 0")
        if isinstance(init, str) and init not in NAMED_INITIALIZERS:
            raise SpecError(f"Param(init={init!r}): choose from {', '.join(NAMED_INITIALIZERS)}, or give a number")
        if self.transposed and len(shape) < 2:
            raise SpecError(f"Param(shape={shape!r}, transposed=True): expected a shape of at least two axes")
        numbers = init if isinstance(init, tuple) else () if isinstance(init, str) or callable(init) else (init,)
        if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
            raise SpecError(f"Param(init={init!r}): expected finite numbers, a name, or a callable")
        rows = shape[0] if shape else 1
        if isinstance(init, tuple) and len(init) not in (1, rows, self.numel):
            raise SpecError(
                f"Param(init=…): {len(init)} constants for shape {shape}; give 1, {rows} (rows) or {self.numel}"
            )
        if self.trainable and self.dtype is not None and not self.dtype.is_floating_point:
            raise SpecError(
                f"Param(dtype={self.dtype}): only floating-point tensors can be trained; set trainable=False"
            )

    @property
    def numel(self) -> int:
        """Return the number of elements, a Python integer that cannot overflow."""
        return math.prod(self.shape)

    def draw(self, channels: int | None, generator: Generator | None) -> Tensor:
        """Return initial values, float32 or the parameter's own type, drawn on the CPU."""
        if channels is not None:
            return torch.stack([self.draw(None, generator) for _ in range(channels)])
        if callable(self.init):
            drawn = self.init(self.shape, generator)
            if not isinstance(drawn, Tensor) or drawn.shape != self.shape:
                given = tuple(drawn.shape) if isinstance(drawn, Tensor) else type(drawn).__name__
                raise SpecError(f"Param(init={self.init!r}): expected a tensor of shape {self.shape}, got {given}")
            return drawn
        if isinstance(self.init, str):
            return NAMED_INITIALIZERS[self.init](self.shape, generator)
        if isinstance(self.init, tuple):
            # In float64, so that constants such as grid ends are exact in every type of model.
            values = torch.tensor(self.init, dtype=torch.float64, device="cpu")
            if len(self.init) == self.numel:
                return values.reshape(self.shape)
            if len(self.init) == 1:
                return values.expand(self.shape).clone()
            return values.reshape(-1, *[1] * (len(self.shape) - 1)).expand(self.shape).clone()
        return torch.randn(self.shape, generator=generator, device="cpu") * self.init


Params: TypeAlias = "Mapping[str, Param | Params]"
"""What a function declares: parameters by name; nested for functions made of functions."""


class Tensors(typing.Protocol):
    """The tensors of a function by name, as `Store` and plain dictionaries give them."""

    def __getitem__(self, name: str, /) -> Any: ...


# ------------------------------------------------------------------------------------------------ the registry

ROLES: dict[str, dict[str, type[Function]]] = {}
ALIASES: dict[str, dict[str, str]] = {}


class Function:
    """Base of everything that a specification can name: options in, tensors in, tensors out.

    A subclass is a frozen dataclass; `name=` registers it under its role, `aliases=` gives further names::

        @dataclass(frozen=True)
        class Cubes(Expansion, name="cubes"):
            ...

    Attributes:
        role: `expansion`, `reconciliation`, `remainder`, `fusion` or `process`.
        name: the registered name.
        examples: options of further instances that the laws are run on, beside the one with all defaults.
    """

    role: ClassVar[str]
    name: ClassVar[str]
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)
    default_kind: ClassVar[str | None] = None
    """Name of the function of a role that a mapping without `kind` stands for."""

    def __init_subclass__(
        cls, *, role: str | None = None, name: str | None = None, aliases: Sequence[str] = ()
    ) -> None:
        super().__init_subclass__()
        if role is not None:
            cls.role = role
            ROLES.setdefault(role, {})
            ALIASES.setdefault(role, {})
        if name is None:
            return
        if isinstance(aliases, str) or not all(isinstance(word, str) and word for word in (name, *aliases)):
            raise SpecError(
                f"{cls.__name__}(name={name!r}, aliases={aliases!r}): expected a name, and a tuple of names"
            )
        known, other_names = ROLES[cls.role], ALIASES[cls.role]
        for word in (name, *aliases):
            holder = known.get(word) or known.get(other_names.get(word, ""))
            same_place = holder is not None and (holder.__module__, holder.__qualname__) == (
                cls.__module__,
                cls.__qualname__,
            )
            # The same definition again is a notebook cell run twice, or a module that was reloaded.
            if holder is not None and not same_place:
                raise SpecError(
                    f"{cls.__name__}: the {cls.role} name {word!r} is taken by {holder.__module__}.{holder.__name__}"
                )
        cls.name = name
        known[name] = cls
        other_names.update(dict.fromkeys(aliases, name))

    def __new__(cls, *_: Any, **__: Any) -> Self:
        checked: Any = cls
        _check_definition(checked)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        _check_fields(self)
        self.check()

    @classmethod
    def of_callable(cls, function: Callable[..., Any]) -> Self | None:
        """Return a function of this role that calls a plain callable, None for roles without plain callables."""
        return None

    def check(self) -> None:
        """Raise a `SpecError` where options of the right type and range do not go together."""

    def validate(self, tensors: Tensors) -> None:
        """Raise a `SpecError` where tensors that a user sets have the right shapes and still are not allowed."""


@functools.cache
def _check_definition(cls: Any) -> None:
    """Raise a `SpecError` where a class forgets what would only be missed later, such as in a file that cannot be read."""
    own = cls.__dict__.get("__dataclass_params__")
    if own is None or not own.frozen:
        raise SpecError(
            f"{cls.__name__}: a function is a frozen dataclass; write @dataclass(frozen=True) above the class"
        )
    registered: Any = ROLES.get(cls.role, {}).get(cls.__dict__.get("name", ""))
    if registered is not cls:
        raise SpecError(f'{cls.__name__}: a function has a name of its own; write class {cls.__name__}(…, name="…")')
    missing = [name for name in dir(cls) if getattr(getattr(cls, name, None), "__isabstractmethod__", False)]
    if missing:
        raise SpecError(f"{cls.__name__}: a function of role {cls.role} defines {', '.join(missing)}")


def catalogue(role: str | None = None) -> list[type[Function]]:
    """Return the registered functions of one role, or of all, in order of role and name.

    Example:
        >>> [f.name for f in catalogue("fusion")]
        ['concatenation', 'mean', 'sum', 'weighted_sum']
    """
    if role is not None and role not in ROLES:
        raise SpecError(f"there is no role {role!r}; there are {', '.join(ROLES)}")
    roles = ROLES if role is None else [role]
    return [known[name] for r in roles for known in [ROLES[r]] for name in sorted(known)]


def lookup(role: str, name: str, where: str = "") -> type[Function]:
    """Return the function of a role by its name or alias; packages that are installed are asked for a name that is not known.

    Raises:
        SpecError: no such name; the message lists those there are, and the packages that cannot be loaded.
    """
    known, prefix = ROLES[role], f"{where}: " if where else ""
    found = known.get(name) or known.get(ALIASES[role].get(name, ""))
    if found is not None:
        return found
    failures = load_installed()
    found = known.get(name) or known.get(ALIASES[role].get(name, ""))
    if found is None:
        hint = did_you_mean(name, [*known, *ALIASES[role]])
        allowed = "; ".join((f"{hint}choose from {', '.join(sorted(known))}", *failures))
        raise SpecError(f"{prefix}no {role} is called {name!r}; {allowed}")
    return found


# ------------------------------------------------------------------------------------------------ options and plain data


def option(
    default: Any = dataclasses.MISSING,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    read: Callable[[Any, str], Any] | None = None,
) -> Any:
    """Return a dataclass field for an option of a function or a specification.

    Args:
        default: value of an option left out; without a default the option is required.
        minimum, maximum: inclusive range of a number.
        read: expands short forms before the type is checked, `(value, where) -> value`; values already read pass through.
    """
    metadata = {"minimum": minimum, "maximum": maximum, "read": read}
    return dataclasses.field(default=default, metadata=metadata)


class Spec:
    """Base of the dataclasses that a specification is made of, beside functions: checked and coerced when they are made."""

    def __post_init__(self) -> None:
        _check_fields(self)
        self.check()

    @classmethod
    def owner_of(cls, option: str) -> str:
        """Return a hint on the owner of an option that belongs elsewhere, empty if there is none."""
        return ""

    def check(self) -> None:
        """Raise a `SpecError` where fields of the right type and range do not go together."""


@functools.cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def options_of(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    """Return the dataclass fields of a function or a part of a specification."""
    return dataclasses.fields(cls)


def _check_fields(instance: Any) -> None:
    cls: Any = type(instance)
    hints = _hints(cls)
    for field in options_of(cls):
        value = getattr(instance, field.name)
        coerced = _coerce_field(field, hints[field.name], value, f"{cls.__name__}.{field.name}")
        low, high = field.metadata.get("minimum"), field.metadata.get("maximum")
        if isinstance(coerced, int | float) and not isinstance(coerced, bool):
            given = f"{cls.__name__}({field.name}={coerced}): {field.name} must be"
            if low is not None and coerced < low:
                raise SpecError(f"{given} at least {low}")
            if high is not None and coerced > high:
                raise SpecError(f"{given} at most {high}")
        if coerced is not value:
            object.__setattr__(instance, field.name, coerced)


def _coerce_field(field: dataclasses.Field[Any], kind: Any, value: Any, where: str) -> Any:
    read = field.metadata.get("read")
    return coerce(kind, value if read is None else read(value, where), where)


def coerce(kind: Any, value: Any, where: str) -> Any:
    """Return a value as the annotated type of an option wants it, from Python objects or from plain data.

    Lists become tuples, integers become floats where floats are wanted, names and mappings with a `kind` become functions,
    mappings become parts of a specification, one part becomes a tuple of one. Nothing else is converted.

    Raises:
        SpecError: a wrong type, an unknown name or option; the message begins with `where`.
    """
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _coerce_union(get_args(kind), value, where)
    if origin is Literal:
        if isinstance(value, str) and value in get_args(kind):
            return value
        hint = f"; {did_you_mean(value, get_args(kind)).strip()}" if isinstance(value, str) else ""
        allowed = ", ".join(map(str, get_args(kind)))
        raise SpecError(f"{where}: expected one of {allowed}, got {_short(value)}{hint.rstrip('; ')}")
    if origin is tuple:
        return _coerce_tuple(get_args(kind), value, where)
    if origin is Mapping:
        return _coerce_mapping(get_args(kind)[1], value, where)
    if kind is Any:
        return _plain_data(value, where)
    if isinstance(kind, type) and issubclass(kind, Function):
        return _coerce_function(kind, value, where)
    if isinstance(kind, type) and issubclass(kind, Spec):
        if isinstance(value, kind):
            return value
        return _build(kind, value, where)
    return _coerce_scalar(kind, value, where)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _coerce_union(members: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in members:
        return None
    words = [word for m in members if get_origin(m) is Literal for word in get_args(m)]
    if isinstance(value, str) and value in words:
        return value
    wanted = [m for m in members if m is not type(None)]
    functions = [m for m in wanted if isinstance(m, type) and issubclass(m, Function)]
    if len(functions) == 1 and len(wanted) == 1 + bool(words):
        # Options without a kind, set beside a word such as `auto`, are those of the default kind.
        if isinstance(value, Mapping) and value.get("kind") in words:
            value = {name: item for name, item in value.items() if name != "kind"} or value["kind"]
            return value if isinstance(value, str) else coerce(functions[0], value, where)
        return coerce(functions[0], value, where)
    if len(wanted) == 1:
        return coerce(wanted[0], value, where)
    for member in wanted:
        try:
            return coerce(member, value, where)
        except SpecError:
            continue
    raise SpecError(f"{where}: expected {' or '.join(_type_name(m) for m in members)}, got {_short(value)}")


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is tuple:
        return "a list"
    names = {int: "an integer", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(kind) or str(getattr(kind, "__name__", kind))


def _coerce_tuple(members: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if len(members) == 2 and members[1] is Ellipsis:
        element = members[0]
        part = isinstance(element, type) and issubclass(element, Function | Spec)
        if part and isinstance(value, str | Mapping | element):
            value = (value,)
        if not isinstance(value, list | tuple):
            raise SpecError(f"{where}: expected a list, got {_short(value)}")
        return tuple(coerce(element, item, f"{where}[{i}]") for i, item in enumerate(value))
    if not isinstance(value, list | tuple) or len(value) != len(members):
        raise SpecError(f"{where}: expected a list of {len(members)}, got {_short(value)}")
    return tuple(coerce(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(members, value, strict=True)))


def _coerce_mapping(kind: Any, value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SpecError(f"{where}: expected a mapping of options, got {_short(value)}")
    for key in value:
        if not isinstance(key, str):
            raise SpecError(f"{where}.{str(key)[:60]}: expected text as a key, got {_short(key)}")
    coerced = {key: coerce(kind, item, f"{where}.{key[:60]}") for key, item in value.items()}
    # The same object where nothing changed, as for every other type.
    return value if all(coerced[key] is item for key, item in value.items()) else coerced


def _plain_data(value: Any, where: str) -> Any:
    """Return mappings, lists, finite numbers, texts and null unchanged; refuse anything else."""
    if isinstance(value, Mapping):
        return _coerce_mapping(Any, value, where)
    if isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _plain_data(item, f"{where}[{i}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise SpecError(f"{where}: expected a finite number, got {value}")
    elif value is not None and not isinstance(value, str | bool | int | float):
        raise SpecError(f"{where}: expected plain data, got {_short(value)}")
    return value


def _coerce_function(kind: type[Function], value: Any, where: str) -> Function:
    if isinstance(value, kind):
        return value
    if isinstance(value, Function):
        raise SpecError(
            f"{where}: expected a function of role {kind.role}, got the {value.role} {type(value).__name__}"
        )
    if isinstance(value, type) and issubclass(value, Function):
        raise SpecError(f"{where}: expected a function, got the class {value.__name__}; call it: {value.__name__}()")
    if callable(value):
        wrapped = kind.of_callable(value)
        if wrapped is not None:
            return wrapped
    data = {"kind": value} if isinstance(value, str) else value
    if not isinstance(data, Mapping):
        raise SpecError(
            f"{where}: expected the name of a function of role {kind.role}, or a mapping with a kind, got {_short(value)}"
        )
    options = dict(data)
    name = options.pop("kind", kind.default_kind)
    if not isinstance(name, str):
        raise SpecError(
            f"{where}: a function of role {kind.role} needs a kind; choose from {', '.join(sorted(ROLES[kind.role]))}"
        )
    cls = lookup(kind.role, name, where)
    if not issubclass(cls, kind):
        allowed = sorted(n for n, c in ROLES[kind.role].items() if issubclass(c, kind))
        raise SpecError(f"{where}: {name!r} cannot stand here; choose from {', '.join(allowed)}")
    return typing.cast(Function, _build(cls, options, where))


def _build(cls: type, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise SpecError(f"{where}: expected a mapping of {cls.__name__}, got {_short(value)}")
    fields = {f.name: f for f in options_of(cls)}
    for key in value:
        if key not in fields:
            hint = did_you_mean(str(key), fields)
            allowed = f"{hint}it has {', '.join(fields)}" if fields else "it has no options"
            allowed = cls.owner_of(str(key)) or allowed if issubclass(cls, Spec) else allowed
            raise SpecError(f"{where}: {cls.__name__} has no option {key!r}; {allowed}")
    for name, field in fields.items():
        if name not in value and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise SpecError(f"{where}: {cls.__name__} needs {name!r}")
    hints = _hints(cls)
    options = {key: _coerce_field(fields[key], hints[key], item, f"{where}.{key}") for key, item in value.items()}
    try:
        return cls(**options)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None


def _coerce_scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is bool and isinstance(value, bool):
        return value
    if kind is str and isinstance(value, str):
        return value
    if kind is int and not isinstance(value, bool | float | str):
        # Index protocol: NumPy's integers are as good as Python's.
        try:
            return operator.index(value)
        except TypeError:
            pass
    if kind is float and not isinstance(value, bool | str):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            number = math.nan
        if math.isfinite(number):
            return number
        if isinstance(value, float):
            raise SpecError(f"{where}: expected a finite number, got {value}")
    raise SpecError(f"{where}: expected {_type_name(kind)}, got {_short(value)}")


def to_dict(value: Any) -> Any:
    """Return a function or a specification as plain data: mappings, lists, numbers, text, nothing else.

    Example:
        >>> import kapsi as kp
        >>> kp.to_dict(kp.Taylor(3))
        {'kind': 'taylor', 'degree': 3, 'symmetric': False}
    """
    if isinstance(value, Function):
        return {"kind": value.name, **{f.name: to_dict(getattr(value, f.name)) for f in options_of(type(value))}}
    if isinstance(value, Spec):
        return {f.name: to_dict(getattr(value, f.name)) for f in options_of(type(value))}
    if isinstance(value, Mapping):
        return {name: to_dict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_dict(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise SpecError(f"to_dict: expected a function or a specification, got {type(value).__name__}")


def flatten(params: Params, prefix: str = "") -> Iterator[tuple[str, Param]]:
    """Yield all parameters of a nested declaration with dotted names."""
    for name, param in params.items():
        if isinstance(param, Param):
            yield prefix + name, param
        else:
            yield from flatten(param, f"{prefix}{name}.")
