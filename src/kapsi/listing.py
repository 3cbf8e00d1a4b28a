"""The catalogue as a list to read: every function with its formula, options, sizes and source, from classes and docstrings."""

from __future__ import annotations

import dataclasses
import html
import inspect
import math
import re
import sys
import textwrap
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self, get_args, get_origin, overload

from kapsi.errors import SpecError, did_you_mean, nearest
from kapsi.expansion.base import Expansion
from kapsi.function import ALIASES, ROLES, Function, Param, Params, catalogue, flatten, options_of, short_form
from kapsi.installed import load_installed
from kapsi.process import Process
from kapsi.reconciliation.base import Reconciliation
from kapsi.remainder import Remainder
from kapsi.spec import from_dict, to_dict

__all__ = ["Entry", "Listing", "Option", "entry_of", "functions"]

TITLES = {
    "expansion": "expansions κ",
    "reconciliation": "reconciliations ψ",
    "remainder": "remainders π",
    "fusion": "fusions of heads",
    "process": "processing (before, after, output)",
}
NAMES = 27
"""Letters of the column of names in a list."""
INPUTS, OUTPUTS, GRID = 4, 6, (3, 4)
"""The small example that sizes are shown for: m inputs, n outputs, and a κ of D = 12 columns on its grid."""

# ------------------------------------------------------------------------------------------------ docstrings

_SECTION = re.compile(r"(Args|Attributes|Example|Examples|Note|Notes|Raises|References|Returns|Source): ?(.*)")
_ARGUMENT = re.compile(r"    (\w+(?:, \w+)*): (.*)")
_LETTERS = {"expansion": "κ", "reconciliation": "ψ", "remainder": "π"}
_CITATION = re.compile(r"arXiv \d{4}\.\d{4,5}|DLMF \d+(?:\.\d+)*")


def _sections(cls: type[Function]) -> dict[str, list[str]]:
    """Return the lines of a class's own docstring by section; what stands in none is under the empty name."""
    found: dict[str, list[str]] = {"": []}
    name = ""
    for line in inspect.cleandoc(cls.__dict__.get("__doc__") or "").splitlines():
        heading = _SECTION.fullmatch(line)
        if heading:
            name = heading[1]
            found[name] = [heading[2]] if heading[2] else []
            continue
        if line and not line.startswith(" "):
            name = ""
        found[name].append(line)
    return found


def _lineage(cls: type[Function]) -> list[dict[str, list[str]]]:
    """Return the sections of a class and of the families it belongs to, its own first."""
    return [_sections(base) for base in cls.__mro__ if issubclass(base, Function) and base is not Function]


def _formula(role: str, paragraph: str) -> re.Match[str] | None:
    """Return the formula of a paragraph: what begins with the role's letter, or behind a colon, and has an equals sign."""
    letter = _LETTERS.get(role, "κ")
    return re.search(rf"(?:(?<=: )[^:=]{{1,40}}|{letter}\S{{0,12}}) = .*?(?=\.(?:\s|$)|$)", paragraph)


def _paragraphs(lines: list[str]) -> list[str]:
    return [" ".join(part.split()) for part in "\n".join(lines).split("\n\n") if part.strip()]


def _arguments(lines: list[str]) -> dict[str, str]:
    """Return what an Args section says of each name; `low, high: …` is about both."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in lines:
        start = _ARGUMENT.fullmatch(line)
        if start:
            names = start[1].split(", ")
            found |= dict.fromkeys(names, start[2])
        elif line.strip():
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


# ------------------------------------------------------------------------------------------------ values as text


def number(value: float) -> str:
    """Return a number in few letters: 1, 0.5, 1e+12, ∞."""
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return str(value) if isinstance(value, int) and abs(value) < 10**6 else f"{value:.4g}"


def interval(low: float, high: float) -> str:
    """Return a range of inputs as text."""
    if math.isinf(low) and math.isinf(high):
        return "all x"
    return f"{'(' if math.isinf(low) else '['}{number(low)}, {number(high)}{')' if math.isinf(high) else ']'}"


# ------------------------------------------------------------------------------------------------ options and entries


@dataclass(frozen=True)
class Option:
    """One option of a function.

    Attributes:
        name: as specifications and constructors call it.
        kind: what a value is: `integer`, `number`, `text`, `true or false`, a role, the choices, and what lists are made of.
        default: the default as a specification writes it, None where a value must be given.
        minimum, maximum: the inclusive range, None where there is no end.
        choices: the texts that are allowed, empty where there is no choice.
        meaning: what the docstring says.
    """

    name: str
    kind: str
    default: str | None
    minimum: float | None
    maximum: float | None
    choices: tuple[str, ...]
    meaning: str

    @property
    def range(self) -> str:
        """Return the choices, the range, or what a value is, as text."""
        if self.choices:
            return self.kind.replace(" or ", " | ")
        if self.minimum is None and self.maximum is None:
            return self.kind
        low, high = ("" if end is None else number(end) for end in (self.minimum, self.maximum))
        return f"{low}..{high}"


def _kind(hint: Any) -> str:
    names = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null"}
    if hint in names:
        return names[hint]
    inner = [_kind(member) for member in get_args(hint) if member is not Ellipsis]
    if get_origin(hint) is tuple:
        return f"list of {' and '.join(dict.fromkeys(inner))}"
    if inner:
        return " or ".join(inner)
    return str(getattr(hint, "role", hint)) if hint not in (Any,) else "any"


def _choices(hint: Any) -> tuple[str, ...]:
    if get_origin(hint) is Literal:
        return tuple(map(str, get_args(hint)))
    return tuple(choice for member in get_args(hint) if get_origin(member) is Literal for choice in get_args(member))


@dataclass(frozen=True)
class Entry:
    """What is known of one function of the catalogue; its options stand at their defaults unless others are set.

    Attributes:
        function: an instance.
    """

    function: Function

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    @property
    def cls(self) -> type[Function]:
        """Return its class."""
        return type(self.function)

    @property
    def role(self) -> str:
        """Return its role."""
        return self.function.role

    @property
    def name(self) -> str:
        """Return its registered name."""
        return self.function.name

    @property
    def aliases(self) -> tuple[str, ...]:
        """Return its further names."""
        return tuple(alias for alias, name in ALIASES[self.role].items() if name == self.name)

    @cached_property
    def _lines(self) -> list[dict[str, list[str]]]:
        return _lineage(self.cls)

    @cached_property
    def summary(self) -> str:
        """Return what it is, one line without the formula and the period."""
        first = (_paragraphs(self._lines[0][""]) or [""])[0]
        formula = _formula(self.role, first)
        before = first[: formula.start()] if formula else re.split(rf"[,;:] {self.letter} = ", first)[0]
        # Without words before it the formula is the summary.
        return (before or first).rstrip(" :,.")

    @cached_property
    def formula(self) -> str | None:
        """Return the formula in the paper's letters, with the sizes, or None where there is none in the docstring."""
        for sections in self._lines:
            for paragraph in _paragraphs(sections[""]):
                found = _formula(self.role, paragraph)
                if found:
                    return found[0]
        return None

    @property
    def letter(self) -> str:
        """Return what its size is called: D, the columns of κ, or l, the parameters."""
        return "D" if self.role == "expansion" else "l"

    @cached_property
    def size(self) -> str | None:
        """Return D or l as the docstring writes it, or None where it does not."""
        pattern = re.compile(rf"(?:^|[\s(;,]){self.letter} = (.+?)(?=\.(?:\s|$)|; |$)")
        for sections in self._lines:
            found = [
                match[1] for paragraph in _paragraphs(sections[""]) for match in [pattern.search(paragraph)] if match
            ]
            if found:
                return found[0]
        return None

    @cached_property
    def example_size(self) -> int | None:
        """Return D or l in the small example that `sizes` names; None where that does not fit."""
        function = self.function
        try:
            if isinstance(function, Expansion):
                return function.out_features(INPUTS)
            if isinstance(function, Reconciliation):
                return function.count(OUTPUTS, GRID)
            return sum(param.numel for _, param in self._params() if param.trainable)
        except SpecError:
            return None

    @property
    def sizes(self) -> str:
        """Return D or l as formula and for the example, as text; empty for what has neither."""
        if self.role in ("fusion", "process"):
            return ""
        example = "" if self.example_size is None else number(self.example_size)
        place = {
            "expansion": f"m = {INPUTS}",
            "reconciliation": f"n = {OUTPUTS}, D = {math.prod(GRID)}",
            "remainder": f"m = n = {INPUTS}",
        }[self.role]
        if self.size == example or not example:
            return f"{self.letter} = {self.size}" if self.size else ""
        return f"{self.letter} = {f'{self.size}; ' if self.size else ''}{example} for {place}"

    def _params(self) -> Iterator[tuple[str, Param]]:
        function = self.function
        declared: Params = {}
        if isinstance(function, Expansion):
            declared = function.params(INPUTS)
        elif isinstance(function, Reconciliation):
            declared = function.params(OUTPUTS, GRID)
        elif isinstance(function, Remainder):
            declared = function.params(INPUTS, INPUTS)  # some need as many outputs as inputs
        elif not isinstance(function, Process):
            declared = typing.cast(Any, function).params(2, OUTPUTS)
        yield from flatten(declared)

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """Return the names of its tensors in the example, buffers with a note; empty where it has none."""
        try:
            return tuple(name if param.trainable else f"{name} (buffer)" for name, param in self._params())
        except SpecError:
            return ()

    @property
    def learnable(self) -> bool:
        """Return whether its buffers can be made trainable by an option."""
        return any(option.name == "learnable" for option in self.options)

    @cached_property
    def domain(self) -> str | None:
        """Return where an expansion is well behaved, in words; None for other roles."""
        if not isinstance(self.function, Expansion):
            return None
        try:
            bounds = self.function.domain(INPUTS)
        except SpecError:
            return None
        found = list(dict.fromkeys(interval(low, high) for _, low, high in bounds))
        return ", ".join(found[:4]) + (", …" if len(found) > 4 else "")

    @cached_property
    def source(self) -> str | None:
        """Return where it comes from, as the docstring says."""
        for sections in self._lines:
            if sections.get("Source"):
                return " ".join(" ".join(sections["Source"]).split()).rstrip(".")
        return None

    @property
    def citation(self) -> str:
        """Return the source in short: the numbers of papers and sections, or what stands before the first comma."""
        source = self.source or ""
        return ", ".join(dict.fromkeys(_CITATION.findall(source))) or re.split(r"[,;]", source)[0]

    @cached_property
    def options(self) -> tuple[Option, ...]:
        """Return its options."""
        hints = typing.get_type_hints(self.cls)
        meanings: dict[str, str] = {}
        for sections in reversed(self._lines):
            meanings |= _arguments(sections.get("Args", []))
        return tuple(
            Option(
                name=field.name,
                kind=_kind(hints[field.name]),
                default=_default(field),
                minimum=field.metadata.get("minimum"),
                maximum=field.metadata.get("maximum"),
                choices=_choices(hints[field.name]),
                meaning=meanings.get(field.name, ""),
            )
            for field in options_of(self.cls)
        )

    @property
    def example(self) -> str:
        """Return a specification with it, as YAML."""
        import yaml

        shown = yaml.safe_dump(to_dict(self.function), default_flow_style=True, sort_keys=False, width=math.inf).strip()
        if self.role == "fusion":
            return f"widths: [null, null]\nlayers:\n  - heads: [{{}}, {{}}]\n    fusion: {shown}"
        place = {"process": "before"}.get(self.role, self.role)
        return f"widths: [null, null]\nlayers:\n  - heads:\n      - {place}: {shown}"

    # -------------------------------------------------------------------------------- as text

    def line(self, width: int) -> str:
        """Return the entry of a list: its name, and beside it what it is, its options, sizes, domain and source."""
        names = self.name + (f" ({', '.join(self.aliases)})" if self.aliases else "")
        options = []
        for option in self.options:
            default = "" if option.default is None else f"={option.default}"
            bounds = f" [{option.range}]" if option.choices or ".." in option.range else ""
            options.append(f"{option.name}{default}{bounds}")
        domain = f"on {self.domain}" if self.domain not in (None, "all x") else ""
        facts = "; ".join(filter(None, (self.sizes, domain, self.citation)))
        indent = " " * NAMES
        made: list[str] = []
        for text in filter(None, (self.summary, ", ".join(options), facts)):
            made += textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
        first = f"  {names}"
        if len(first) < len(indent):
            made[0] = first.ljust(len(indent)) + made[0].lstrip()
            return "\n".join(made)
        return "\n".join((first, *made))

    def text(self, width: int = 100) -> str:
        """Return all that is known, as text of lines up to a width.

        Example:
            >>> import kapsi as kp
            >>> print(kp.functions("reconciliation")["masked"].text(80))
            masked (masking), a reconciliation
            A random share of the entries are parameters, the rest zero
            <BLANKLINE>
            class    kapsi.Masked
            formula  ψ(w) = M ⊙ W, l = round(ratio·n·D)
            size     l = round(ratio·n·D); 36 for n = 6, D = 12
            tensors  values, mask (buffer)
            source   arXiv 2407.04819, "Masking based Parameter Reconciliation"
            <BLANKLINE>
            options
              ratio  0.5  0..1  share of the entries that is kept, 0 to 1.
            <BLANKLINE>
            in a specification
              widths: [null, null]
              layers:
                - heads:
                    - reconciliation: {kind: masked, ratio: 0.5}
        """
        names = self.name + (f" ({', '.join(self.aliases)})" if self.aliases else "")
        article = "an" if self.role[0] in "aeiou" else "a"
        facts = {
            "class": public_name(self.cls),
            "formula": self.formula,
            "size": self.sizes,
            "domain": self.domain,
            "tensors": ", ".join(self.tensors) + (" (learnable)" if self.learnable else ""),
            "source": self.source,
        }
        lines = [f"{names}, {article} {self.role}", *textwrap.wrap(self.summary, width), ""]
        lines += _aligned([(name, text) for name, text in facts.items() if text], width)
        if self.options:
            rows = [
                (o.name, "(required)" if o.default is None else o.default, o.range, o.meaning) for o in self.options
            ]
            lines += ["", "options", *_aligned(rows, width, indent=2)]
        lines += ["", "in a specification", textwrap.indent(self.example, "  ")]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.text())}</pre>"


def _default(field: dataclasses.Field[Any]) -> str | None:
    if field.default is not dataclasses.MISSING:
        return short_form(field.default)
    return None if field.default_factory is dataclasses.MISSING else short_form(field.default_factory())


def public_name(cls: type) -> str:
    """Return the dotted name of a class as its package offers it, the full one where it does not."""
    package = cls.__module__.split(".")[0]
    public = getattr(sys.modules[package], cls.__name__, None) is cls
    return f"{package if public else cls.__module__}.{cls.__name__}"


def _aligned(rows: Sequence[Sequence[str]], width: int, indent: int = 0) -> list[str]:
    """Return rows in aligned columns, the last one wrapped; cells that are too long push what follows a line down."""
    widths = [min(max(len(row[i]) for row in rows), 16) for i in range(len(rows[0]) - 1)]
    left = indent + sum(widths) + 2 * len(widths)
    lines: list[str] = []
    for row in rows:
        head = " " * indent
        for place, (cell, size) in enumerate(zip(row, widths, strict=False)):
            if len(cell) <= size:
                head += cell.ljust(size) + "  "
                continue
            first, *more = textwrap.wrap(cell, max(width - len(head), 24))
            lines += [head + first, *(" " * len(head) + part for part in more)]
            head = " " * (indent + sum(widths[: place + 1]) + 2 * (place + 1))
        rest = textwrap.wrap(row[-1], max(width - left, 24), break_on_hyphens=False) or [""]
        lines.append((head + rest[0]).rstrip())
        lines += [" " * left + more for more in rest[1:]]
    return lines


def entry_of(cls: type[Function], **options: Any) -> Entry:
    """Return the entry of a class with some options set, as plain data; what must be given is that of its first example.

    Raises:
        SpecError: options that do not fit.
    """
    required = {f.name for f in options_of(cls) if _default(f) is None}
    example = {key: value for key, value in (cls.examples or ({},))[0].items() if key in required}
    return Entry(typing.cast(Function, from_dict({"kind": cls.name, **example, **options}, cls, cls.name)))


# ------------------------------------------------------------------------------------------------ the list


@dataclass(frozen=True, repr=False)
class Listing(Sequence[Entry]):
    """Entries of the catalogue, in order of role and name; by number, or by name or alias.

    Attributes:
        entries: all of them.
        failures: one line for each installed package whose functions cannot be loaded.
    """

    entries: tuple[Entry, ...]
    failures: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, key: int | str) -> Entry: ...
    @overload
    def __getitem__(self, key: slice) -> Self: ...
    def __getitem__(self, key: int | slice | str) -> Entry | Self:
        """Return an entry by its place, name or alias, or a part of the list by a slice."""
        if isinstance(key, slice):
            return dataclasses.replace(self, entries=self.entries[key])
        if not isinstance(key, str):
            return self.entries[key]
        found = self.named(key)
        if len(found) > 1:
            roles = " and ".join(f"functions({entry.role!r})[{key!r}]" for entry in found)
            raise SpecError(f"functions: {key!r} is the name of {len(found)} functions; write {roles}")
        return found[0]

    def knows(self, name: str) -> bool:
        """Return whether a function of the list has a name or alias."""
        return any(name in (entry.name, *entry.aliases) for entry in self.entries)

    def named(self, name: str) -> list[Entry]:
        """Return the entries of a name or alias, one a role.

        Raises:
            SpecError: there is none; the message has the nearest.
        """
        found = [entry for entry in self.entries if name in (entry.name, *entry.aliases)]
        if not found:
            names = [word for entry in self.entries for word in (entry.name, *entry.aliases)]
            close = nearest(name, names)
            hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
            allowed = "; ".join(
                (f"{hint}there are {', '.join(dict.fromkeys(e.name for e in self.entries))}", *self.failures)
            )
            raise SpecError(f"no function is called {name!r}; {allowed}")
        return found

    def text(self, width: int = 100) -> str:
        """Return the list as text of lines up to a width."""
        parts = []
        for role in dict.fromkeys(entry.role for entry in self.entries):
            rows = [entry.line(width) for entry in self.entries if entry.role == role]
            parts.append("\n".join((TITLES.get(role, role), *rows)))
        return "\n\n".join(parts)

    def __repr__(self) -> str:
        return self.text()

    __str__ = __repr__

    def _repr_html_(self) -> str:
        head = ("role", "name", "what it is", "options", "size", "domain", "source")
        rows = [f"<tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>"]
        for entry in self.entries:
            options = ", ".join(f"{o.name}={o.default}" if o.default is not None else o.name for o in entry.options)
            names = ", ".join((entry.name, *entry.aliases))
            cells = (entry.role, names, entry.summary, options, entry.sizes, entry.domain or "", entry.citation)
            rows.append(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>")
        return f"<table>{''.join(rows)}</table>"


def functions(role: str | None = None) -> Listing:
    """Return the catalogue to read: of one role, or of all; functions of other installed packages are in it.

    The list shows itself as a table; an entry has all that is known of a function.

    Args:
        role: `expansion`, `reconciliation`, `remainder`, `fusion` or `process`.

    Raises:
        SpecError: there is no such role.

    Example:
        >>> import kapsi as kp
        >>> taylor = kp.functions("expansion")["taylor"]
        >>> taylor.summary, taylor.size, taylor.example_size
        ('All monomials of degree 1 to d', 'Σ mᵏ', 20)
        >>> [option.name for option in taylor.options], taylor.options[0].range
        (['degree', 'symmetric'], '1..64')
    """
    failures = load_installed()
    if role is not None and role not in ROLES:
        hint = did_you_mean(str(role), ROLES)
        raise SpecError(f"functions: there is no role {role!r}; {hint}there are {', '.join(ROLES)}")
    roles = TITLES if role is None else (role,)
    return Listing(tuple(entry_of(cls) for name in roles for cls in catalogue(name)), failures)
