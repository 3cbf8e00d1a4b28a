"""Specifications: what a head, a layer and a model are made of, as data; and the YAML and JSON files that hold them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kapsi.errors import SpecError
from kapsi.expansion import Expansion, Identity
from kapsi.files import atomic, plain
from kapsi.function import Function, Spec, coerce, option, options_of
from kapsi.fusion import Fusion, Sum
from kapsi.process import Process
from kapsi.reconciliation import Dense, Reconciliation
from kapsi.remainder import Remainder, ZeroRemainder

__all__ = [
    "HeadSpec",
    "LayerSpec",
    "ModelSpec",
    "from_dict",
    "load_spec",
    "parse_yaml",
    "rpn",
    "save_spec",
    "set_option",
    "to_dict",
]


@dataclass(frozen=True)
class HeadSpec(Spec):
    """One head: y = Σ_c ⟨κ(x), ψ(w_c)⟩ + π(x) + b.

    Args:
        expansion: κ.
        reconciliation: ψ.
        remainder: π.
        bias: whether there is a trainable b `(n,)`, zero at first.
        channels: number of parameter sets w_c that share κ and are summed, at least 1.
        before: processing of the inputs of κ (π has them unprocessed), by name or as functions, in order.
        after: processing of κ(x).
    """

    expansion: Expansion = Identity()
    reconciliation: Reconciliation = Dense()
    remainder: Remainder = ZeroRemainder()
    bias: bool = False
    channels: int = option(1, minimum=1, maximum=2**20)
    before: tuple[Process, ...] = ()
    after: tuple[Process, ...] = ()


@dataclass(frozen=True)
class LayerSpec(Spec):
    """One layer: heads side by side, fused into one output.

    Args:
        heads: at least one; heads with equal κ share it.
        fusion: how the outputs of the heads combine, the sum by default.
        output: processing of the fused output.
    """

    heads: tuple[HeadSpec, ...] = (HeadSpec(),)
    fusion: Fusion = Sum()
    output: tuple[Process, ...] = ()

    def check(self) -> None:
        if not self.heads:
            raise SpecError("LayerSpec(heads=()): at least one head is needed")


def _shown(widths: Sequence[int | None]) -> str:
    """Return widths for a message; a file can have a million of them."""
    text = ", ".join(map(str, widths[:12]))
    return f"[{text}, …]" if len(widths) > 12 else f"[{text}]"


@dataclass(frozen=True)
class ModelSpec(Spec):
    """A model: layers in sequence.

    Args:
        widths: numbers of features from the inputs to the outputs, at least two, each at least 1. The first and the last may
            be None: they are then taken from the table that the model is fitted to.
        layers: one layer for each pair of widths, or one that stands for all.
    """

    widths: tuple[int | None, ...]
    layers: tuple[LayerSpec, ...] = (LayerSpec(),)

    def check(self) -> None:
        if len(self.widths) < 2:
            raise SpecError(
                f"ModelSpec(widths={_shown(self.widths)}): at least two widths are needed, inputs and outputs"
            )
        for i, width in enumerate(self.widths):
            if width is None and 0 < i < len(self.widths) - 1:
                raise SpecError(
                    f"ModelSpec(widths={_shown(self.widths)}): only the first and the last width may be null, not widths[{i}]"
                )
            if width is not None and not 1 <= width <= 2**40:
                raise SpecError(f"ModelSpec(widths={_shown(self.widths)}): widths[{i}] must be 1 to 2⁴⁰")
        count = len(self.widths) - 1
        if len(self.layers) not in (1, count):
            raise SpecError(
                f"ModelSpec: {len(self.widths)} widths need {count} layers, or one that stands for all; got {len(self.layers)}"
            )

    def sized(self, in_features: int | None = None, out_features: int | None = None) -> ModelSpec:
        """Return the specification with widths that are None at the ends replaced by the given ones.

        Raises:
            SpecError: a width at an end is fixed and differs from the given one.
        """
        widths = list(self.widths)
        for place, given, what in ((0, in_features, "inputs"), (-1, out_features, "outputs")):
            if given is None:
                continue
            if widths[place] not in (None, given):
                raise SpecError(
                    f"ModelSpec.widths: the model has {widths[place]} {what} and the data {given}; set that width to null"
                )
            widths[place] = given
        return replace(self, widths=tuple(widths))

    def resolved(self) -> tuple[tuple[int, int, LayerSpec], ...]:
        """Return (in, out, layer) for each layer.

        Raises:
            SpecError: a width at an end is None.
        """
        pairs = []
        layers = self.layers * (len(self.widths) - 1) if len(self.layers) == 1 else self.layers
        for i, layer in enumerate(layers):
            width, next_width = self.widths[i], self.widths[i + 1]
            if width is None or next_width is None:
                raise SpecError(
                    f"ModelSpec(widths={_shown(self.widths)}): a model needs all widths; a null is filled in when a table is fitted"
                )
            pairs.append((width, next_width, layer))
        return tuple(pairs)


def rpn(
    widths: Sequence[int | None],
    expansion: Expansion | str = Identity(),
    reconciliation: Reconciliation | str = Dense(),
    remainder: Remainder | str = ZeroRemainder(),
    *,
    bias: bool = False,
    channels: int = 1,
    heads: int = 1,
    before: Sequence[Process | str] | Process | str = (),
    after: Sequence[Process | str] | Process | str = (),
    output: Sequence[Process | str] | Process | str = (),
    fusion: Fusion | str = Sum(),
) -> ModelSpec:
    """Return the specification of a model whose layers are all alike.

    Args:
        widths: numbers of features, from the inputs to the outputs.
        expansion, reconciliation, remainder, bias, channels, before, after: as in `HeadSpec`.
        heads: number of equal heads in each layer, at least 1.
        output: processing after every layer but the last, such as the activation of an MLP.
        fusion: as in `LayerSpec`.

    Example:
        >>> import kapsi as kp
        >>> spec = kp.rpn([784, 64, 10], expansion=kp.Taylor(2), reconciliation=kp.DualLowRankKronecker(rank=5))
        >>> len(spec.resolved())
        2
    """
    if not isinstance(widths, list | tuple):
        raise SpecError(f"rpn(widths={widths!r}): expected a list of widths, such as [784, 64, 10]")
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
        raise SpecError(f"rpn(heads={heads!r}): expected an integer of at least 1")
    head = coerce(
        HeadSpec,
        {
            "expansion": expansion,
            "reconciliation": reconciliation,
            "remainder": remainder,
            "bias": bias,
            "channels": channels,
            "before": before,
            "after": after,
        },
        "rpn",
    )
    last = coerce(LayerSpec, {"heads": (head,) * heads, "fusion": fusion}, "rpn")
    hidden = coerce(LayerSpec, {"heads": (head,) * heads, "fusion": fusion, "output": output}, "rpn")
    count = len(widths) - 1
    layers = (last,) if hidden == last or count < 2 else (hidden,) * (count - 1) + (last,)
    spec: ModelSpec = coerce(ModelSpec, {"widths": tuple(widths), "layers": layers}, "rpn")
    return spec


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


def from_dict(data: Any, kind: type[Any] | None = None, where: str = "") -> Any:
    """Return the function or specification that plain data describe; strict about names, options and types.

    Args:
        data: what `to_dict` returns; options that are left out have their defaults, a text stands for a function by name.
        kind: what is expected: `ModelSpec` (the default), `LayerSpec`, `HeadSpec`, or a role such as `Expansion`.
        where: what messages begin with.

    Raises:
        SpecError: names the path, what was given, and the choices.

    Example:
        >>> import kapsi as kp
        >>> kp.from_dict({"kind": "taylor", "degree": 3}, kp.Expansion)
        Taylor(degree=3, symmetric=False)
    """
    kind = ModelSpec if kind is None else kind
    if not isinstance(kind, type) or not issubclass(kind, Function | Spec) or kind is Function or kind is Spec:
        raise SpecError(
            f"from_dict(kind={kind!r}): expected ModelSpec, LayerSpec, HeadSpec, or a role such as Expansion"
        )
    try:
        return coerce(kind, data, where or kind.__name__)
    except RecursionError:
        raise SpecError(f"{where or kind.__name__}: the specification is nested too deeply") from None


# ------------------------------------------------------------------------------------------------ files


def parse_yaml(text: str, where: str) -> Any:
    """Return the plain data of YAML or JSON text; strict: no tags, no anchors, no merge keys, no key twice.

    Args:
        text: one document.
        where: what messages begin with, the file's name.

    Raises:
        SpecError: the text is not YAML, or has one of those.
    """
    import yaml

    try:
        _refuse_tricks(yaml, text, where)
        loader = yaml.SafeLoader(text)
        try:
            loader.yaml_implicit_resolvers = _resolvers(yaml)
            return loader.get_single_data()
        finally:
            loader.dispose()
    except SpecError:  # which is a ValueError, too
        raise
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be read"
        raise SpecError(f"{where}{place}: not YAML: {problem}") from None
    except RecursionError:
        raise SpecError(f"{where}: nested too deeply") from None
    except ValueError as error:  # an impossible date or number in YAML's own types
        problem = "a number of thousands of digits" if "int_max_str_digits" in str(error) else str(error)
        raise SpecError(f"{where}: not YAML: {problem}") from None


def to_yaml(data: Any, *, unicode: bool = False) -> str:
    """Return plain data as YAML that `parse_yaml` reads back: texts that look like its numbers, such as 1e3, are quoted."""
    import yaml

    dumper = type("Dumper", (yaml.SafeDumper,), {"yaml_implicit_resolvers": _resolvers(yaml)})
    return str(yaml.dump(data, Dumper=dumper, sort_keys=False, allow_unicode=unicode))


def _refuse_tricks(yaml: Any, text: str, where: str) -> None:
    """Refuse anchors (a few lines of which can stand for terabytes) and keys that appear twice (the first would be lost)."""
    node = yaml.compose(text, Loader=_plain_loader(yaml))
    pending = [node] if node is not None else []
    while pending:
        node = pending.pop()
        if isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, value in node.value:
                name = str(key.value)
                if key.tag == "tag:yaml.org,2002:merge":
                    raise SpecError(
                        f"{where}, line {key.start_mark.line + 1}: not YAML: merge keys (<<) are not allowed"
                    )
                if name in keys:
                    raise SpecError(f"{where}, line {key.start_mark.line + 1}: {name!r} appears twice")
                keys.add(name)
                pending.append(value)
        elif isinstance(node, yaml.SequenceNode):
            pending.extend(node.value)


def _plain_loader(yaml: Any) -> type:
    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()
            trick = None
            if event.anchor is not None:
                trick = "anchors (&name) and aliases (*name) are not allowed"
            elif event.tag is not None:
                trick = "tags (!name) are not allowed"
            if trick is not None:
                raise yaml.composer.ComposerError(None, None, trick, event.start_mark)
            return super().compose_node(parent, index)

    return Loader


def _resolvers(yaml: Any) -> dict[str, list[tuple[str, Any]]]:
    """Return YAML's scalar types with changes: 1e-3 is a number, a date is text, and so is 010, which YAML takes for 8."""
    import re

    number = re.compile(
        r"^[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$", re.ASCII
    )
    integer = re.compile(r"^[-+]?(0|[1-9]\d*)$", re.ASCII)
    kept: dict[str, list[tuple[str, Any]]] = {}
    changed = ("tag:yaml.org,2002:float", "tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp")
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items():
        kept[first] = [pair for pair in pairs if pair[0] not in changed]
    for first in "-+0123456789.":
        kept.setdefault(first, []).extend([("tag:yaml.org,2002:int", integer), ("tag:yaml.org,2002:float", number)])
    return kept


def read_text(path: str | Path, what: str) -> str:
    """Return the text of a file, with errors of one line."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError(f"{path}: there is no such {what}") from None
    except IsADirectoryError:
        raise SpecError(f"{path}: is a folder, expected {_a(what)}") from None
    except UnicodeDecodeError:
        raise SpecError(f"{path}: is not UTF-8 text, expected {_a(what)}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise SpecError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _a(what: str) -> str:
    return f"{'an' if what[0] in 'aeiou' else 'a'} {what}"


def load_spec(path: str | Path) -> ModelSpec:
    """Return the model specification of a YAML or JSON file (JSON is YAML).

    Raises:
        SpecError: the file cannot be read, or what it says does not fit; the message names the path.
    """
    spec: ModelSpec = from_dict(parse_yaml(read_text(path, "specification"), str(path)), ModelSpec, str(path))
    return spec


def save_spec(spec: ModelSpec, path: str | Path) -> None:
    """Write a specification as YAML, or as JSON where the file's name ends so; written beside and renamed."""
    data = to_dict(spec)
    text = json.dumps(data, indent=2) + "\n" if str(path).endswith(".json") else to_yaml(data)
    with atomic(path) as beside, plain(path, "write the file"):
        beside.write_text(text, encoding="utf-8")


def set_option(data: Any, path: str, value: Any, where: str = "--set") -> None:
    """Set one option in plain data, in place: `layers.0.heads.0.expansion.degree`.

    A function that stands by its name becomes a mapping; setting a `kind` begins a function anew. Whether the option exists
    is for `from_dict` to say. Messages begin with `where` and the path.

    Raises:
        SpecError: the path leads through something that has no options, or beyond the end of a list.
    """
    parts = path.split(".")
    if not all(parts):
        raise SpecError(f"{where} {path}: expected names and numbers with dots between, such as layers.0.heads.0.bias")
    for i, part in enumerate(parts):
        here = ".".join(parts[:i]) or "the specification"
        last = i == len(parts) - 1
        if isinstance(data, list):
            if not data:
                raise SpecError(f"{where} {path}: {here} is an empty list; set all of it, such as {here}=[...]")
            if part not in map(str, range(len(data))):
                raise SpecError(
                    f"{where} {path}: {here} is a list of {len(data)}, expected a number from 0 to {len(data) - 1}, got {part!r}"
                )
            key: Any = int(part)
        elif isinstance(data, dict):
            key = part
        else:
            raise SpecError(f"{where} {path}: {here} is {data!r} and has no {part!r}")
        if last:
            if part == "kind" and isinstance(data, dict):
                data.clear()
            data[key] = value
            return
        below = data.get(key) if isinstance(data, Mapping) else data[key]
        if below is None:
            below = {}
        elif isinstance(below, str):
            below = {"kind": below}
        data[key] = below
        data = below
