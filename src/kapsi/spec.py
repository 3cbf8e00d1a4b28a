"""Specifications of heads, layers and models as data, and their YAML and JSON files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from kapsi.errors import SpecError, check_integer, refuse
from kapsi.expansion import Expansion, Identity
from kapsi.files import atomic, plain
from kapsi.function import Function, Spec, coerce, option, options_of
from kapsi.fusion import Fusion, Sum
from kapsi.process import Affine, Process
from kapsi.reconciliation import Dense, Eye, Reconciliation, ZeroReconciliation
from kapsi.remainder import IdentityRemainder, Remainder, ZeroRemainder

Init: TypeAlias = Literal["smooth", "measured", "xavier_uniform", "xavier_normal", "kaiming_uniform", "fan_out"]
"""Rules of initial values; see `HeadSpec`."""

MAX_HEADS = 4096
"""Heads of all layers of a model: a few lines of a file may state millions."""

MAX_TEXT = 1_000_000
"""Characters of a specification in YAML or JSON: 20 seconds of parsing."""

SPEC_EXAMPLE = "the config.yaml of a run"
"""A file with a specification."""


@dataclass(frozen=True)
class HeadSpec(Spec):
    """Specification of a head: y = Σ_c ⟨κ(x), ψ(w_c)⟩ + π(x) + b.

    Args:
        expansion: the expansion κ, R^m → R^D.
        reconciliation: the reconciliation ψ, which returns weights `(n, D)`.
        remainder: the remainder π, R^m → R^n.
        bias: whether to add a trainable bias b `(n,)`, initially zero.
        channels: number of parameter sets w_c on the same κ(x), 1 to 2²⁰.
        before: processing of the inputs of κ (not of π), by name or as functions, in order.
        after: processing of κ(x).
        init: rule for the initial values of ψ and π, drawn from the seed. `smooth` and `measured` draw normal numbers and scale
            ψ to outputs of unit RMS for standard normal inputs. With B-splines in `Extended` or `Nested`, `smooth` scales to
            an RMS of 0.5 and adds a random linear function to every row of a `Dense` or `LowRank` ψ on products of B-splines,
            as in `Nested((BSpline(), Taylor(2)))`. `xavier_uniform`, `xavier_normal`, `kaiming_uniform` and `fan_out` (uniform
            up to 1/√fan_out) depend on the shape of each random tensor only, as in `torch.nn.init`; vectors count as a row,
            and channels are initialized separately. These four raise an error if no tensor is random.
        fusion: how the products ⟨κ(x), ψ(w_c)⟩ of several channels are combined; default: their sum.

    Example:
        >>> import kapsi as kp
        >>> head = kp.HeadSpec(kp.Taylor(2), kp.LowRank(4), kp.LinearRemainder(), bias=True, before="tanh")
        >>> sum(p.numel() for p in kp.Head(10, 3, head, seed=0).parameters())  # 4(3 + 110) + 30 + 3
        485
    """

    expansion: Expansion = Identity()
    reconciliation: Reconciliation = Dense()
    remainder: Remainder = ZeroRemainder()
    bias: bool = False
    channels: int = option(1, minimum=1, maximum=2**20)
    before: tuple[Process, ...] = ()
    after: tuple[Process, ...] = ()
    init: Init = "smooth"
    fusion: Fusion = Sum()

    def check(self) -> None:
        if self.channels == 1 and self.fusion != Sum():
            raise SpecError(
                f"HeadSpec(fusion={self.fusion}): needs several channels; LayerSpec has the fusion of heads"
            )

    def steps(self) -> tuple[Process, ...]:
        """Return all steps before, inside of, and after κ."""
        return (*self.before, *self.expansion.inner_processes(), *self.after)


@dataclass(frozen=True)
class LayerSpec(Spec):
    """Specification of a layer: heads on the same inputs, whose outputs are combined.

    Args:
        heads: at least one head; heads with equal κ share its tensors and its evaluation.
        fusion: how the outputs of the heads are combined; default: their sum.
        output: processing of the fused output.

    Example:
        >>> import kapsi as kp
        >>> kp.LayerSpec((kp.HeadSpec(kp.BSpline()), kp.HeadSpec(kp.Taylor(2))), output="layer_norm").output
        (LayerNorm(affine=False, epsilon=1e-05),)
    """

    heads: tuple[HeadSpec, ...] = option((HeadSpec(),), longest=MAX_HEADS)
    fusion: Fusion = Sum()
    output: tuple[Process, ...] = ()

    def check(self) -> None:
        if not self.heads:
            raise SpecError("LayerSpec(heads=()): at least one head is needed")


def passing(*output: Process) -> LayerSpec:
    """Return a layer y = 0 + x with processing: later layers receive the processed inputs, remainders too."""
    return LayerSpec((HeadSpec(Identity(), ZeroReconciliation(), IdentityRemainder()),), output=output)


STANDARDIZING = LayerSpec((HeadSpec(Identity(), Eye()),), output=(Affine(),))
"""The first layer of `kapsi.standardized`: (x − mean) / deviation."""


def _widths(widths: Sequence[int | None]) -> str:
    """Return at most twelve widths for a message."""
    text = ", ".join(map(str, widths[:12]))
    return f"[{text}, …]" if len(widths) > 12 else f"[{text}]"


@dataclass(frozen=True)
class ModelSpec(Spec):
    """Specification of a model: layers in sequence.

    Args:
        widths: numbers of features from the inputs to the outputs, at least two, each at least 1. The first and the last may be
            None; `kapsi fit` takes these from the table.
        layers: one layer per pair of consecutive widths, or a single layer used for all.

    Example:
        >>> import torch, kapsi as kp
        >>> spec = kp.ModelSpec(widths=(2, 16, 1), layers=kp.LayerSpec(kp.HeadSpec(kp.Chebyshev(3))))
        >>> kp.Model(spec, seed=0)(torch.zeros(5, 2)).shape
        torch.Size([5, 1])
    """

    widths: tuple[int | None, ...] = option(longest=MAX_HEADS + 1)
    layers: tuple[LayerSpec, ...] = option((LayerSpec(),), longest=MAX_HEADS)

    def check(self) -> None:
        count, ends = len(self.widths) - 1, (0, len(self.widths) - 1)
        problem = ""
        if count < 1:
            problem = "at least two widths are needed, inputs and outputs"
        for i, width in enumerate(self.widths):
            if width is None and i not in ends:
                problem = f"only the first and the last width may be null, not widths[{i}]"
            elif width is not None and not 1 <= width <= 2**40:
                problem = problem or f"widths[{i}] must be 1 to 2⁴⁰"
        if not problem and len(self.layers) not in (1, count):
            problem = f"{count + 1} widths need {count} layers, or one layer for all; got {len(self.layers)}"
        heads = sum(len(layer.heads) for layer in self.layers) * (count if len(self.layers) == 1 else 1)
        if heads > MAX_HEADS:
            problem = (
                problem or f"{heads:,} heads in all layers, at most {MAX_HEADS:,} are allowed; one wide head is faster"
            )
        if problem:
            raise SpecError(f"ModelSpec(widths={_widths(self.widths)}): {problem}")

    def sized(self, in_features: int | None = None, out_features: int | None = None) -> ModelSpec:
        """Return the specification with given numbers of inputs and outputs in place of None.

        Raises:
            SpecError: the specification fixes a different number.
        """
        widths = list(self.widths)
        for end, size, name in ((0, in_features, "inputs"), (-1, out_features, "outputs")):
            if size is None:
                continue
            if widths[end] not in (None, size):
                raise SpecError(
                    f"ModelSpec.widths: the model has {widths[end]} {name} and the data {size}; set this width to null"
                )
            widths[end] = size
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
                    f"ModelSpec(widths={_widths(self.widths)}): a model needs all widths; null widths are set from a table"
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
    init: Init = "smooth",
) -> ModelSpec:
    """Return the specification of a model whose layers are equal.

    Args:
        widths: numbers of features, from the inputs to the outputs.
        expansion, reconciliation, remainder, bias, channels, before, after, init: see `HeadSpec`.
        heads: number of equal heads in each layer, at least 1.
        output: processing after all layers except the last, such as the activation of an MLP.
        fusion: see `LayerSpec`.

    Returns:
        A specification for `kapsi.Model`, with a layer for each pair of widths.

    Raises:
        SpecError: invalid widths, functions or options.

    Example:
        >>> import kapsi as kp
        >>> spec = kp.rpn([784, 64, 10], expansion=kp.Taylor(2), reconciliation=kp.DualLowRankKronecker(rank=5))
        >>> len(spec.resolved())
        2
    """
    if not isinstance(widths, list | tuple):
        refuse("rpn(widths)", "a list of widths, such as [784, 64, 10]", widths)
    check_integer("rpn(heads)", heads, 1)
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
            "init": init,
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
    """Return a function or a specification as plain data: mappings, lists, numbers, strings, booleans and None.

    Args:
        value: a function, a specification, or a tuple of them.

    Raises:
        SpecError: the value contains something else, such as a plain callable as loss.

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
    if callable(value):
        name = getattr(value, "__name__", type(value).__name__)
        raise SpecError(
            f"to_dict: {name} is a plain callable, unknown to files; define a class, such as a kp.Loss, instead"
        )
    raise SpecError(f"to_dict: expected a function or a specification, got {type(value).__name__}")


def from_dict(data: Any, kind: type[Any] | None = None, where: str = "") -> Any:
    """Return the function or specification described by plain data; the inverse of `to_dict`.

    Args:
        data: plain data as from `to_dict`; missing options get their defaults, and a name stands for a function without options.
        kind: the result: `ModelSpec` (default), `LayerSpec`, `HeadSpec`, `TrainConfig`, or a role such as `Expansion`.
        where: prefix of error messages.

    Raises:
        SpecError: an unknown name or option, or a value of a wrong type; the message names the path, the value and the choices.

    Example:
        >>> import kapsi as kp
        >>> kp.from_dict({"kind": "taylor", "degree": 3}, kp.Expansion)
        Taylor(degree=3, symmetric=False)
    """
    if kind is None and isinstance(data, Mapping) and not {"widths", "layers"} & data.keys():
        refuse(
            where or "ModelSpec", "widths; for other data give a kind, as in kp.from_dict(data, kp.TrainConfig)", data
        )
    kind = ModelSpec if kind is None else kind
    if not isinstance(kind, type) or not issubclass(kind, Function | Spec) or kind is Function or kind is Spec:
        refuse("from_dict(kind)", "ModelSpec, LayerSpec, HeadSpec, or a role such as Expansion", kind)
    try:
        return coerce(kind, data, where or kind.__name__)
    except RecursionError:
        raise SpecError(f"{where or kind.__name__}: the specification is nested too deeply") from None


# ------------------------------------------------------------------------------------------------ files


def parse_yaml(text: str, where: str, *, scalar_anchors: bool = False) -> Any:
    """Return the plain data of YAML or JSON text; strict: no tags, anchors, merge keys or repeated keys.

    Args:
        text: one document.
        where: prefix of error messages, such as the name of the file.
        scalar_anchors: allow anchors of single values, which cannot expand to more than the text.

    Raises:
        SpecError: the text is not YAML in this sense.
    """
    import yaml

    if len(text) > MAX_TEXT:
        raise SpecError(f"{where}: {len(text):,} characters; a specification has at most {MAX_TEXT:,}")
    try:
        loader = _plain_loader(yaml, scalar_anchors)(text)
        try:
            loader.yaml_implicit_resolvers = _resolvers(yaml)
            node = loader.get_single_node()
            _refuse_tricks(yaml, node, where)
            return None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except SpecError:  # a ValueError
        raise
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        line, problem = "", f"not YAML: {error}"  # such as a date without such a day
        if isinstance(error, RecursionError):
            problem = "nested too deeply"
        elif "int_max_str_digits" in str(error):
            problem = "not YAML: a number of thousands of digits"
        elif isinstance(error, yaml.YAMLError):
            mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
            line = f", line {mark.line + 1}" if mark else ""
            problem = (
                f"not YAML: {getattr(error, 'problem', None) or getattr(error, 'reason', None) or 'cannot be read'}"
            )
        raise SpecError(f"{where}{line}: {problem}") from None


def to_yaml(data: Any, *, unicode: bool = False) -> str:
    """Return plain data as YAML for `parse_yaml`; strings that look like numbers, such as 1e3, are quoted."""
    import yaml

    dumper = type("Dumper", (yaml.SafeDumper,), {"yaml_implicit_resolvers": _resolvers(yaml)})
    return str(yaml.dump(data, Dumper=dumper, sort_keys=False, allow_unicode=unicode))


def _refuse_tricks(yaml: Any, node: Any, where: str) -> None:
    """Refuse merge keys and repeated keys (the first value would be lost)."""
    pending = [node] if node is not None else []
    while pending:
        node = pending.pop()
        if isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, value in node.value:
                name = str(key.value)
                merge = key.tag == "tag:yaml.org,2002:merge"
                if merge or name in keys:
                    problem = "not YAML: merge keys (<<) are not allowed" if merge else f"{name!r} appears twice"
                    raise SpecError(f"{where}, line {key.start_mark.line + 1}: {problem}")
                keys.add(name)
                pending.append(value)
        elif isinstance(node, yaml.SequenceNode):
            pending.extend(node.value)


def _plain_loader(yaml: Any, scalar_anchors: bool) -> Any:
    """Return a loader that refuses tags, and anchors: a few lines can expand to terabytes."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()
            trick = None
            single = isinstance(event, yaml.ScalarEvent | yaml.AliasEvent)
            if event.anchor is not None and not (scalar_anchors and single):
                trick = "anchors (&name) and aliases (*name) are not allowed"
            elif not isinstance(event, yaml.AliasEvent) and event.tag is not None:
                trick = "tags (!name) are not allowed"
            if trick is not None:
                raise yaml.composer.ComposerError(None, None, trick, event.start_mark)
            return super().compose_node(parent, index)

    return Loader


def _resolvers(yaml: Any) -> dict[str, list[tuple[str, Any]]]:
    """Return YAML's scalar types with changes: 1e-3 is a number; dates and 010 (8 in YAML) are text."""
    import re

    number = re.compile(
        r"^[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$", re.ASCII
    )
    integer = re.compile(r"^[-+]?(0|[1-9]\d*)$", re.ASCII)
    resolvers: dict[str, list[tuple[str, Any]]] = {}
    changed = ("tag:yaml.org,2002:float", "tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp")
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items():
        resolvers[first] = [pair for pair in pairs if pair[0] not in changed]
    for first in "-+0123456789.":
        resolvers.setdefault(first, []).extend(
            [("tag:yaml.org,2002:int", integer), ("tag:yaml.org,2002:float", number)]
        )
    return resolvers


def read_text(path: str | Path, what: str) -> str:
    """Return the content of a text file of at most `MAX_TEXT` characters; error messages have one line.

    A device without an end, such as /dev/zero, is read up to the limit only.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_TEXT + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        expected = f"expected {'an' if what[0] in 'aeiou' else 'a'} {what}"
        problem = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        if isinstance(error, FileNotFoundError):
            problem = f"there is no such {what}"
        elif isinstance(error, IsADirectoryError):
            problem = f"is a folder, {expected}"
        elif isinstance(error, UnicodeDecodeError):
            problem = f"is not UTF-8 text, {expected}"
        raise SpecError(f"{path}: {problem}") from None
    if len(text) > MAX_TEXT:
        raise SpecError(f"{path}: is too long; a {what} has at most {MAX_TEXT:,} characters")
    return text


def read_yaml(path: str | Path, what: str, example: str, *, scalar_anchors: bool = False) -> Any:
    """Return the plain data of a YAML or JSON file, see `read_text` and `parse_yaml`.

    Args:
        path: the file.
        what: the content, for messages.
        example: what to give instead of an empty file.
        scalar_anchors: see `parse_yaml`.

    Raises:
        SpecError: the file is not readable, not YAML, or empty.
    """
    data = parse_yaml(read_text(path, what), str(path), scalar_anchors=scalar_anchors)
    if data is None:
        raise SpecError(f"{path}: is empty, expected {'an' if what[0] in 'aeiou' else 'a'} {what}, such as {example}")
    return data


def load_spec(path: str | Path) -> ModelSpec:
    """Read a model specification from a YAML or JSON file.

    Args:
        path: the file, with the fields of `ModelSpec`.

    Returns:
        The specification; see `save_spec` for an example.

    Raises:
        SpecError: the file cannot be read, or its content is invalid; the message names the path.
    """
    spec: ModelSpec = from_dict(read_yaml(path, "specification", SPEC_EXAMPLE), ModelSpec, str(path))
    return spec


def save_spec(spec: ModelSpec, path: str | Path) -> None:
    """Write a model specification to a YAML file, or to a JSON file if the suffix is `.json`.

    Args:
        spec: the specification.
        path: the file; an existing file is replaced at the end.

    Raises:
        FileError: the file cannot be written.

    Example:
        >>> import tempfile, kapsi as kp
        >>> spec = kp.rpn([2, 8, 1], kp.Chebyshev(3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     kp.save_spec(spec, f"{folder}/model.yaml")
        ...     kp.load_spec(f"{folder}/model.yaml") == spec
        True
    """
    data = to_dict(spec)
    text = json.dumps(data, indent=2) + "\n" if str(path).endswith(".json") else to_yaml(data)
    with atomic(path) as temporary, plain(path, "write the file"):
        temporary.write_text(text, encoding="utf-8")


def set_option(data: Any, path: str, value: Any, where: str = "--set") -> None:
    """Set one option in plain data, in place: `layers.0.heads.0.expansion.degree`.

    The name of a function becomes a mapping; a new `kind` drops the old options. `from_dict` checks the option afterwards.
    Messages begin with `where` and the path.

    Raises:
        SpecError: the path leads through a value without options, or beyond the end of a list.
    """
    parts = path.split(".")
    if not all(parts):
        raise SpecError(f"{where} {path}: expected names and numbers with dots between, such as layers.0.heads.0.bias")
    for i, part in enumerate(parts):
        here = ".".join(parts[:i]) or "the specification"
        last = i == len(parts) - 1
        key: Any = part
        problem = ""
        if isinstance(data, list):
            if part in map(str, range(len(data))):
                key = int(part)
            elif data:
                problem = f"is a list of {len(data)}, expected a number from 0 to {len(data) - 1}, got {part!r}"
            else:
                problem = f"is an empty list; set the whole list, such as {here}=[...]"
        elif not isinstance(data, dict):
            problem = f"is {data!r} and has no {part!r}"
        if problem:
            raise SpecError(f"{where} {path[:200]}: {here[:200]} {problem[:400]}")
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
