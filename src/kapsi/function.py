"""Functions as data: the protocol of catalogue functions, the registry of names, options and their types.

A *function* is a frozen dataclass with a registered name. It holds options, declares the tensors it needs (`Param`) and
owns none, so the same object is code, configuration, hash key and YAML entry.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeAlias, Union, get_args, get_origin

import torch
from torch import Generator, Tensor, nn

from kapsi.errors import (
    SpecError,
    UnknownFunction,
    check_choice,
    check_integer,
    check_number,
    did_you_mean,
    refuse,
    shown,
    unknown,
)
from kapsi.frozen import Immutable
from kapsi.installed import load_installed, load_own
from kapsi.migrate import RENAMED_OPTIONS

Initializer: TypeAlias = Callable[[tuple[int, ...], Generator | None], Tensor]
"""Draw a tensor of a shape from a generator, or from torch's default generator."""

NAMED_INITIALIZERS: dict[str, Initializer] = {
    "zeros": lambda shape, generator: torch.zeros(shape, device="cpu"),
    "ones": lambda shape, generator: torch.ones(shape, device="cpu"),
    "normal": lambda shape, generator: torch.randn(shape, generator=generator, device="cpu"),
    "uniform": lambda shape, generator: torch.rand(shape, generator=generator, device="cpu") * 2 - 1,
}

MAX_TENSOR = 2**36
"""Elements of the largest single tensor that a function may declare; more is a typo in a specification."""

MAX_EXPANSION = 2**53
"""Columns of the widest κ, materialized or not: the largest exact count of a float."""


@dataclass(frozen=True)
class Param(Immutable):
    """A tensor declared by a function and owned by the head.

    Args:
        shape: shape without the leading channel axis of heads with several channels.
        init: a standard deviation; constants (1, one per row, or all elements); the name of an initializer (`zeros`, `ones`,
            `normal`, `uniform` on [−1, 1)); or a callable `(shape, generator) -> Tensor`, picklable for a picklable model.
        trainable: False for a buffer, saved with the model and not trained: masks, grid ends, centers, constants.
        dtype: a type independent of the model's, such as `torch.bool` for a mask.
        transposed: store the tensor, also in `state_dict`, with the last axis first (before the channel axis), as sparse inputs
            gather rows; `store["name"]` has the declared shape.
    """

    shape: tuple[int, ...]
    init: float | tuple[float, ...] | str | Initializer = 1.0
    trainable: bool = True
    dtype: torch.dtype | None = None
    transposed: bool = False

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise SpecError(f"Param({problem}")

    def _problem(self) -> str:
        """Return the end of a message about the first invalid argument, empty if all are valid."""
        shape, init = self.shape, self.init
        if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
            return f"shape={shape!r}): expected a tuple of integers of at least 0"
        if isinstance(init, str) and init not in NAMED_INITIALIZERS:
            return f"init={init!r}): choose from {', '.join(NAMED_INITIALIZERS)}, or give a number"
        if self.transposed and len(shape) < 2:
            return f"shape={shape!r}, transposed=True): expected a shape of at least two axes"
        numbers = init if isinstance(init, tuple) else () if isinstance(init, str) or callable(init) else (init,)
        if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
            return f"init={init!r}): expected finite numbers, a name, or a callable"
        rows = shape[0] if shape else 1
        if isinstance(init, tuple) and len(init) not in (1, rows, self.numel):
            return f"init=…): {len(init)} constants for shape {shape}; give 1, {rows} (rows) or {self.numel}"
        if self.trainable and self.dtype is not None and not self.dtype.is_floating_point:
            return f"dtype={self.dtype}): only floating-point tensors can be trained; set trainable=False"
        return ""

    @property
    def numel(self) -> int:
        """Return the number of elements, a Python integer without overflow."""
        return math.prod(self.shape)

    @property
    def random(self) -> bool:
        """Return whether the parameter is trained from random initial values, not from constants."""
        init = self.init
        return self.trainable and (callable(init) or isinstance(init, int | float) or init in ("normal", "uniform"))

    def draw(self, channels: int | None, generator: Generator | None, rule: Initializer | None = None) -> Tensor:
        """Return initial values, float32 or the parameter's own type, drawn on the CPU; by a rule if random and given one."""
        if channels is not None:
            return torch.stack([self.draw(None, generator, rule) for _ in range(channels)])
        if rule is not None and self.random:
            return rule(self.shape, generator)
        if callable(self.init):
            drawn = self.init(self.shape, generator)
            if not isinstance(drawn, Tensor) or drawn.shape != self.shape:
                result = tuple(drawn.shape) if isinstance(drawn, Tensor) else type(drawn).__name__
                raise SpecError(f"Param(init={self.init!r}): expected a tensor of shape {self.shape}, got {result}")
            return drawn
        if isinstance(self.init, str):
            return NAMED_INITIALIZERS[self.init](self.shape, generator)
        if isinstance(self.init, tuple):
            # In float64: constants such as grid ends are exact in every type of model.
            values = torch.tensor(self.init, dtype=torch.float64, device="cpu")
            if len(self.init) == self.numel:
                return values.reshape(self.shape)
            if len(self.init) == 1:
                return values.expand(self.shape).clone()
            return values.reshape(-1, *[1] * (len(self.shape) - 1)).expand(self.shape).clone()
        return torch.randn(self.shape, generator=generator, device="cpu") * self.init


class Submodule:
    """A module declared by a function among its parameters, built and owned by the head: processing inside of κ."""

    @abstractmethod
    def build(self, device: torch.device | None, dtype: torch.dtype | None) -> nn.Module:
        """Return the module."""

    def reset(self, module: nn.Module, generator: Generator | None) -> None:
        """Draw new initial values of the module; by default by the methods `reset_parameters` of its parts."""
        for part in (part for part in module.modules() if hasattr(part, "reset_parameters")):
            part.reset_parameters()  # type: ignore[operator]


Params: TypeAlias = "Mapping[str, Param | Submodule | Params]"
"""Parameters declared by a function, by name; nested for functions made of functions."""


def flatten(params: Params, prefix: str = "") -> Iterator[tuple[str, Param]]:
    """Yield all parameters of a nested declaration with dotted names, without those of submodules."""
    if not isinstance(params, Mapping):
        raise SpecError(f"expected Param, or mappings of names to Param, got {shown(params)}")
    for name, param in params.items():
        if isinstance(param, Param):
            yield prefix + name, param
        elif not isinstance(param, Submodule):
            yield from flatten(param, f"{prefix}{name}.")


class Tensors(typing.Protocol):
    """The tensors of a function by name, in a `Store` or a plain dictionary."""

    def __getitem__(self, name: str, /) -> Any: ...


# ------------------------------------------------------------------------------------------------ the registry

LAYER_ROLES = ("expansion", "reconciliation", "remainder", "fusion", "process")
"""Roles of the functions in a layer; loss, metric and solver are the roles of training."""

ROLES: dict[str, dict[str, type[Function]]] = {role: {} for role in LAYER_ROLES}
ALIASES: dict[str, dict[str, str]] = {}


class Function(Immutable):
    """Base of everything with a name in specifications: options in, tensors in, tensors out.

    A subclass is a frozen dataclass; `name=` registers the class under its role, `aliases=` adds further names::

        @dataclass(frozen=True)
        class Cubes(Expansion, name="cubes"):
            ...

    Attributes:
        role: such as `expansion`, `reconciliation`, `remainder`, `fusion` or `process`.
        name: the registered name.
        examples: options of further instances tested by the laws, in addition to all defaults.
        default_kind: name of the function meant by a mapping without `kind`.
    """

    role: ClassVar[str]
    name: ClassVar[str]
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)
    default_kind: ClassVar[str | None] = None

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
        reserved = {"kind", *{"metric": ("auto", "loss"), "recipe": ()}.get(cls.role, ("auto",))}
        for word in ("", aliases) if isinstance(aliases, str) else (name, *aliases):
            if not isinstance(word, str) or not re.fullmatch("[a-z][a-z0-9_]*", word) or word in reserved:
                wanted = f"names of lower-case letters, digits and _, not {' or '.join(sorted(reserved))}"
                refuse(f"{cls.__name__}(name={name!r}, aliases={aliases!r})", wanted, word)
        known, other_names = ROLES[cls.role], ALIASES[cls.role]
        for word in (name, *aliases):
            holder = known.get(word) or known.get(other_names.get(word, ""))
            # The same definition again is a notebook cell run twice, or a reloaded module.
            if holder is not None and (holder.__module__, holder.__qualname__) != (cls.__module__, cls.__qualname__):
                taken = f"{holder.__module__}.{holder.__qualname__}"
                raise SpecError(
                    f"{cls.__name__}: the {cls.role} name {word!r} is taken by {taken}; choose another name"
                )
        cls.name = name
        known[name] = cls
        other_names.update(dict.fromkeys(aliases, name))

    def __new__(cls, *_: Any, **options: Any) -> Self:
        _check_definition(typing.cast(Any, cls))
        _check_names(cls, options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        _check_fields(self)
        self.check()

    @classmethod
    def of_callable(cls, function: Callable[..., Any]) -> Self | None:
        """Return a function of this role that calls a plain callable, None for roles without plain callables."""
        return None

    @classmethod
    def is_called(cls, name: str) -> bool:
        """Return whether a name or an alias, with or without the role as a suffix, is of this function."""
        return registered_name(cls.role, name) == cls.name

    def check(self) -> None:
        """Raise a `SpecError` if options of the right type and range contradict each other."""

    def validate(self, tensors: Tensors) -> None:
        """Raise a `SpecError` if tensors of the right shapes have values that are not allowed."""


@functools.cache
def _check_definition(cls: Any) -> None:
    """Raise a `SpecError` for an incomplete class at the first instance, before a file with it is written."""
    params = cls.__dict__.get("__dataclass_params__")
    registered: Any = ROLES.get(cls.role, {}).get(cls.__dict__.get("name", ""))
    missing = [n for n in dir(cls) if getattr(getattr(cls, n, None), "__isabstractmethod__", False)]
    options = {field.name for field in options_of(cls)} if params else set()
    hidden = [n for n in options if any(isinstance(vars(c).get(n), types.FunctionType) for c in cls.__mro__[1:])]
    if params is None or not params.frozen:
        problem = "a function is a frozen dataclass; write @dataclass(frozen=True) above the class"
    elif {"name", "kind"} & options:
        problem = "no option may be called name or kind; rename the field"
    elif hidden:
        problem = f"the option {hidden[0]} hides a method of the role {cls.role}; rename the field"
    elif registered is not cls:
        problem = f'a function has a name of its own; write class {cls.__name__}(…, name="…")'
    elif missing:
        problem = f"a function of role {cls.role} defines {', '.join(missing)}"
    else:
        return
    raise SpecError(f"{cls.__name__}: {problem}")


def catalogue(role: str | None = None) -> list[type[Function]]:
    """Return the registered functions of one role, or of all, in order of role and name.

    Example:
        >>> [f.name for f in catalogue("fusion")]
        ['concatenation', 'mean', 'sum', 'weighted_sum']
    """
    load_own()
    if role is not None and role not in ROLES:
        raise SpecError(unknown("role", role, ROLES))
    return [ROLES[r][name] for r in (ROLES if role is None else [role]) for name in sorted(ROLES[r])]


def registered_name(role: str, name: str) -> str | None:
    """Return the registered name of a function by name or alias, with or without the role as a suffix; None if unknown.

    Example:
        >>> registered_name("reconciliation", "lorr"), registered_name("reconciliation", "lorr_reconciliation")
        ('low_rank', 'low_rank')
    """
    for word in (name, name.removesuffix(f"_{role}")):
        word = ALIASES[role].get(word, word)
        if word in ROLES[role]:
            return word
    return None


def lookup(role: str, name: str, where: str = "", kind: type | None = None) -> type[Function]:
    """Return the function of a role by name or alias; an unknown name loads installed packages with the user's consent.

    Raises:
        SpecError: an unknown name; the message lists the names, of a kind if given, and packages that cannot be loaded.
    """
    word = registered_name(role, name)
    failures = load_installed() if word is None else ()
    word = word or registered_name(role, name)
    if word is None:
        known = sorted(n for n, c in ROLES[role].items() if kind is None or issubclass(c, kind))
        hint = did_you_mean(name, [*known, *ALIASES[role]])
        package = "" if hint else ", or install the package that defines it"
        allowed = "; ".join((f"{hint}choose from {', '.join(known)}{package}", *failures))
        raise UnknownFunction(f"{f'{where}: ' if where else ''}no {role} is called {name!r}; {allowed}")
    return ROLES[role][word]


# ------------------------------------------------------------------------------------------------ options and their types

MOST_PARTS = 4096
"""Most functions in a list; lists of specifications have their own `longest`."""


def option(
    default: Any = dataclasses.MISSING,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    longest: int | None = None,
    read: Callable[[Any, str], Any] | None = None,
) -> Any:
    """Return a dataclass field for an option of a function or a specification.

    Args:
        default: value of an option left out; without a default the option is required.
        minimum, maximum: inclusive range of a number.
        longest: most items of a list; a longer list is refused before its items are read.
        read: expands short forms before the type is checked, `(value, where) -> value`; values already read pass through.
    """
    metadata = {"minimum": minimum, "maximum": maximum, "longest": longest, "read": read}
    return dataclasses.field(default=default, metadata=metadata)


class Spec(Immutable):
    """Base of the specification dataclasses other than functions; fields are checked and coerced at construction."""

    def __new__(cls, *_: Any, **options: Any) -> Self:
        _check_names(cls, options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        _check_fields(self)
        self.check()

    @classmethod
    def owner_of(cls, option: str) -> str:
        """Return a hint on the owner of an option that belongs elsewhere, empty if there is none."""
        return ""

    def check(self) -> None:
        """Raise a `SpecError` if fields of the right type and range contradict each other."""


_hints = functools.cache(typing.get_type_hints)


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
            below = low is not None and coerced < low
            if below or (high is not None and coerced > high):
                bound = f"at least {low}" if below else f"at most {high}"
                raise SpecError(f"{cls.__name__}({field.name}={coerced}): {field.name} must be {bound}")
        if coerced is not value:
            object.__setattr__(instance, field.name, coerced)


def _coerce_field(field: dataclasses.Field[Any], kind: Any, value: Any, where: str) -> Any:
    read, longest = field.metadata.get("read"), field.metadata.get("longest")
    if longest is not None and isinstance(value, list | tuple):
        _check_length(value, longest, where)
    return coerce(kind, value if read is None else read(value, where), where)


def _check_length(value: list[Any] | tuple[Any, ...], longest: int, where: str) -> None:
    if len(value) > longest:
        raise SpecError(f"{where}: {len(value):,} items; at most {longest:,} are allowed")


def coerce(kind: Any, value: Any, where: str) -> Any:
    """Return a value in the annotated type of an option, from Python objects or from plain data.

    Lists become tuples, integers become floats for a float, names and mappings with a `kind` become functions, mappings
    become parts of a specification, one part becomes a tuple of one. Nothing else is converted.

    Raises:
        SpecError: a wrong type, an unknown name or option; the message begins with `where`.
    """
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _coerce_union(get_args(kind), value, where)
    if origin is Literal:
        return check_choice(where, value, map(str, get_args(kind)))
    if origin is tuple:
        return _coerce_tuple(get_args(kind), value, where)
    if origin is Mapping:
        return _coerce_mapping(get_args(kind)[1], value, where)
    if kind is Any:
        return _plain_data(value, where)
    if isinstance(kind, type) and issubclass(kind, Function):
        return _coerce_function(kind, value, where)
    if isinstance(kind, type) and issubclass(kind, Spec):
        return value if isinstance(value, kind) else _build(kind, value, where)
    return _coerce_scalar(kind, value, where)


def _coerce_union(members: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in members:
        return None
    words = [word for m in members if get_origin(m) is Literal for word in get_args(m)]
    if isinstance(value, str) and value in words:
        return value
    wanted = [m for m in members if m is not type(None)]
    functions = [m for m in wanted if isinstance(m, type) and issubclass(m, Function)]
    if len(functions) == 1 and len(wanted) == 1 + bool(words):
        # Options next to a word such as `auto`, without a kind, belong to the default kind.
        if isinstance(value, Mapping) and value.get("kind") in words:
            value = {name: item for name, item in value.items() if name != "kind"} or value["kind"]
            return value if isinstance(value, str) else coerce(functions[0], value, where)
        return coerce(functions[0], value, where)
    if len(wanted) == 1:
        return coerce(wanted[0], value, where)
    for member in wanted:
        try:
            return coerce(member, value, where)
        except SpecError as error:
            if str(error).startswith(f"{where}["):  # a list with an unsuitable item
                raise
    return refuse(where, " or ".join(_type_name(m) for m in members), value)


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is tuple:
        return "a list"
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(kind) or str(getattr(kind, "__name__", kind))


def _coerce_tuple(members: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    open_ended = len(members) == 2 and members[1] is Ellipsis
    parts = open_ended and isinstance(members[0], type) and issubclass(members[0], Function | Spec)
    if parts and (isinstance(value, str | Mapping | members[0]) or callable(value)):
        value = (value,)
    if not isinstance(value, list | tuple) or (not open_ended and len(value) != len(members)):
        refuse(where, "a list" if open_ended else f"a list of {len(members)}", value)
    if parts and issubclass(members[0], Function):
        _check_length(value, MOST_PARTS, where)
    kinds = members[:1] * len(value) if open_ended else members
    return tuple(coerce(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True)))


def _coerce_mapping(kind: Any, value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        refuse(where, "a mapping of options", value)
    for key in value:
        if not isinstance(key, str):
            refuse(f"{where}.{str(key)[:60]}", "text as a key", key)
    coerced = {key: coerce(kind, item, f"{where}.{key[:60]}") for key, item in value.items()}
    # The same object if nothing changed, as for every other type.
    return value if all(coerced[key] is item for key, item in value.items()) else coerced


def _plain_data(value: Any, where: str) -> Any:
    """Return mappings, lists, finite numbers, strings and null unchanged; refuse anything else."""
    if isinstance(value, Mapping):
        return _coerce_mapping(Any, value, where)
    if isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _plain_data(item, f"{where}[{i}]")
    elif isinstance(value, float):
        check_number(where, value)
    elif value is not None and not isinstance(value, str | bool | int):
        refuse(where, "plain data", value)
    return value


def _coerce_function(kind: type[Function], value: Any, where: str) -> Function:
    if isinstance(value, kind):
        return value
    wrapped = kind.of_callable(value) if callable(value) and not isinstance(value, type | Function) else None
    if wrapped is not None:
        return wrapped
    data = {"kind": value} if isinstance(value, str) else value
    if not isinstance(data, Mapping):
        if isinstance(value, Function):
            problem = f"the {value.role} {type(value).__name__}"
        elif isinstance(value, type) and issubclass(value, Function):
            problem = f"the class {value.__name__}; call it: {value.__name__}()"
        else:
            problem = f"{shown(value)}; give a name, or a mapping with a kind"
        raise SpecError(f"{where}: expected {_article(kind.role)}, got {problem}")
    options = dict(data)
    name = options.pop("kind", kind.default_kind)
    cls = lookup(kind.role, name, where, kind) if isinstance(name, str) else None
    if cls is None or not issubclass(cls, kind):
        problem = f"{_article(kind.role)} needs a kind" if cls is None else f"{name!r} is not allowed here"
        owners = _owners(kind, options) if options and cls is None else []
        if 0 < len(owners) <= 3:
            problem += f"; {', '.join(options)} belongs to {' or '.join(owners)}"
        allowed = sorted(n for n, c in ROLES[kind.role].items() if issubclass(c, kind))
        raise SpecError(f"{where}: {problem}; choose from {', '.join(allowed)}")
    _check_definition(typing.cast(Any, cls))
    return typing.cast(Function, _build(cls, options, where))


def _article(role: str) -> str:
    return f"{'an' if role[0] in 'aeiou' else 'a'} {role}"


def _build(cls: type, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        refuse(where, f"a mapping of {cls.__name__}", value)
    _check_names(cls, value, f"{where}: ")
    fields, hints = {f.name: f for f in options_of(cls)}, _hints(cls)
    options = {key: _coerce_field(fields[key], hints[key], item, f"{where}.{key}") for key, item in value.items()}
    for name, field in fields.items():
        if name not in value and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise SpecError(f"{where}: {cls.__name__} needs {name!r}")
    try:
        return cls(**options)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None


def _check_names(cls: type, names: Iterable[Any], where: str = "") -> None:
    """Raise a `SpecError` for an option unknown to a function or a part of a specification; name owners."""
    fields = [f.name for f in options_of(cls)]
    for name in names:
        if name in fields:
            continue
        owners = _owners(cls, [name]) if issubclass(cls, Function) else []
        few = f"; {name} is an option of {', '.join(owners)}" if 0 < len(owners) <= 3 else ""
        hint = "" if few else did_you_mean(str(name), fields)
        allowed = f"{hint}it has {', '.join(fields)}{few}" if fields else f"it has no options{few}"
        if issubclass(cls, Spec):
            allowed = cls.owner_of(str(name)) or allowed
        elif name in (renamed := RENAMED_OPTIONS.get(getattr(cls, "name", ""), {})):
            allowed = f"it is called {renamed[name]} now"
        raise SpecError(f"{where}{cls.__name__} has no option {name!r}; {allowed}")


def _owners(kind: type[Function], options: Iterable[str]) -> list[str]:
    """Return the names of the functions of a role with all of some options."""
    known = sorted(ROLES[kind.role].items())
    return [name for name, cls in known if set(options) <= set(getattr(cls, "__dataclass_fields__", ()))]


def _coerce_scalar(kind: Any, value: Any, where: str) -> Any:
    if kind in (bool, str) and isinstance(value, kind):
        return value
    if kind is int and not isinstance(value, bool | float | str):
        return check_integer(where, value)
    if kind is float and not isinstance(value, bool | str):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            number = math.nan
        if math.isfinite(number):
            return number
    return refuse(where, "a finite number" if kind is float and isinstance(value, float) else _type_name(kind), value)
