"""A readable list of the catalogue: formula, options, sizes and source of every function, from classes and docstrings."""

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

from kapsi.errors import SpecError, nearest, unknown
from kapsi.expansion.base import Expansion
from kapsi.function import ALIASES, ROLES, Function, Param, Params, catalogue, flatten, options_of
from kapsi.fusion import Fusion
from kapsi.installed import load_installed
from kapsi.notation import short_form
from kapsi.reconciliation.base import Reconciliation
from kapsi.remainder import Remainder
from kapsi.spec import from_dict, to_dict

TITLES = {
    "expansion": "expansions κ",
    "reconciliation": "reconciliations ψ",
    "remainder": "remainders π",
    "fusion": "fusions of heads",
    "process": "processing (before, after, output)",
}
"""Titles of the roles in a layer; see `title`."""

NAME_WIDTH = 27
"""Characters of the column of names."""

INPUTS, OUTPUTS, GRID = 4, 6, (3, 4)
"""The example behind `sizes`: m inputs, n outputs, and κ with D = 12 columns on a grid."""

SIZED = {
    "expansion": ("D", f"m = {INPUTS}"),
    "reconciliation": ("l", f"n = {OUTPUTS}, D = {math.prod(GRID)}"),
    "remainder": ("l", f"m = n = {INPUTS}"),
}
"""Roles with a size: letter, and sizes of the example."""


def title(role: str) -> str:
    """Return the title of a role: its plural, unless `TITLES` has another.

    Example:
        >>> title("fusion"), title("loss")
        ('fusions of heads', 'losses')
    """
    return TITLES.get(role, f"{role}{'es' if role.endswith('s') else 's'}")


def roles() -> list[str]:
    """Return all roles: roles in a layer first, then others in order of registration."""
    return [*TITLES, *(role for role in ROLES if role not in TITLES)]


# ------------------------------------------------------------------------------------------------ docstrings

_SECTION = re.compile(r"(Args|Attributes|Example|Examples|Note|Notes|Raises|References|Returns|Source): ?(.*)")
_ARGUMENT = re.compile(r"    (\w+(?:, \w+)*): (.*)")
_LETTERS = {"expansion": "κ", "reconciliation": "ψ", "remainder": "π"}
_CITATION = re.compile(r"arXiv \d{4}\.\d{4,5}|DLMF \d+(?:\.\d+)*")


def _sections(cls: type[Function]) -> dict[str, list[str]]:
    """Return the lines of a class's own docstring by section; lines outside of sections are under the empty name."""
    sections: dict[str, list[str]] = {"": []}
    name = ""
    for line in inspect.cleandoc(cls.__dict__.get("__doc__") or "").splitlines():
        heading = _SECTION.fullmatch(line)
        if heading:
            name = heading[1]
            sections[name] = [heading[2]] if heading[2] else []
            continue
        if line and not line.startswith(" "):
            name = ""
        sections[name].append(line)
    return sections


def _lineage(cls: type[Function]) -> list[dict[str, list[str]]]:
    """Return the sections of a class and of its bases, those of the class first."""
    return [_sections(base) for base in cls.__mro__ if issubclass(base, Function) and base is not Function]


def _formula(role: str, paragraph: str) -> re.Match[str] | None:
    """Return the formula of a paragraph: an equation that begins with the role's letter, or after a colon."""
    letter = _LETTERS.get(role, "κ")
    return re.search(rf"(?:(?<=: )[^:=]{{1,40}}|{letter}\S{{0,12}}) = .*?(?=\.(?:\s|$)|$)", paragraph)


def _paragraphs(lines: list[str]) -> list[str]:
    return [" ".join(part.split()) for part in "\n".join(lines).split("\n\n") if part.strip()]


def _arguments(lines: list[str]) -> dict[str, str]:
    """Return the descriptions of an Args section by name; `low, high: …` describes both."""
    meanings: dict[str, str] = {}
    names: list[str] = []
    for line in lines:
        start = _ARGUMENT.fullmatch(line)
        if start:
            names = start[1].split(", ")
            meanings |= dict.fromkeys(names, start[2])
        elif line.strip():
            meanings |= {name: f"{meanings[name]} {line.strip()}" for name in names}
    return meanings


# ------------------------------------------------------------------------------------------------ values as text


def number(value: float) -> str:
    """Return a short form of a number: 1, 0.5, 1e+12, ∞."""
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
        name: name in specifications and constructors.
        kind: type of the values, one of `integer`, `number`, `text`, `true or false`, a role, or choices, also within lists.
        default: the default in the notation of a specification, None for a required option.
        minimum, maximum: inclusive range, None for an open end.
        choices: allowed strings, empty without choices.
        meaning: description in the docstring.
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
        """Return choices, range or type, as text."""
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
    if hint is Any:
        return "any"
    return str(getattr(hint, "role", None) or getattr(hint, "__name__", hint))


def _choices(hint: Any) -> tuple[str, ...]:
    if get_origin(hint) is Literal:
        return tuple(map(str, get_args(hint)))
    return tuple(choice for member in get_args(hint) if get_origin(member) is Literal for choice in get_args(member))


@dataclass(frozen=True)
class Entry:
    """Everything known about a function of the catalogue; options have defaults unless set.

    Attributes:
        function: an instance.
    """

    function: Function

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    @property
    def cls(self) -> type[Function]:
        return type(self.function)

    @property
    def role(self) -> str:
        return self.function.role

    @property
    def name(self) -> str:
        return self.function.name

    @property
    def aliases(self) -> tuple[str, ...]:
        return tuple(alias for alias, name in ALIASES[self.role].items() if name == self.name)

    @cached_property
    def _lines(self) -> list[dict[str, list[str]]]:
        return _lineage(self.cls)

    @cached_property
    def summary(self) -> str:
        """Return a one-line description without formula and period."""
        first = (_paragraphs(self._lines[0][""]) or [""])[0]
        formula = _formula(self.role, first)
        before = first[: formula.start()] if formula else re.split(rf"[,;:] {self.letter} = ", first)[0]
        # Without words before the formula, the formula is the summary.
        return (before or first).rstrip(" :,.")

    @cached_property
    def formula(self) -> str | None:
        """Return the formula in the paper's letters with sizes, or None if the docstring has none."""
        for sections in self._lines:
            for paragraph in _paragraphs(sections[""]):
                match = _formula(self.role, paragraph)
                if match:
                    return match[0]
        return None

    @property
    def letter(self) -> str:
        """Return the letter of the size: D, the columns of κ, or l, the parameters."""
        return SIZED[self.role][0] if self.role in SIZED else "l"

    @cached_property
    def size(self) -> str | None:
        """Return D or l as a formula, or None if the docstring has none."""
        pattern = re.compile(rf"(?:^|[\s(;,]){self.letter} = (.+?)(?=\.(?:\s|$)|; |$)")
        for sections in self._lines:
            sizes = [
                match[1] for paragraph in _paragraphs(sections[""]) for match in [pattern.search(paragraph)] if match
            ]
            if sizes:
                return sizes[0]
        return None

    @cached_property
    def example_size(self) -> int | None:
        """Return D or l for the example of `sizes`; None if the function does not accept the example."""
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
        """Return D or l as formula and for the example, as text; empty for roles without size."""
        if self.role not in SIZED:
            return ""
        example = "" if self.example_size is None else number(self.example_size)
        if self.size == example or not example:
            return f"{self.letter} = {self.size}" if self.size else ""
        return f"{self.letter} = {f'{self.size}; ' if self.size else ''}{example} for {SIZED[self.role][1]}"

    def _params(self) -> Iterator[tuple[str, Param]]:
        function = self.function
        declared: Params = {}
        if isinstance(function, Expansion):
            declared = function.params(INPUTS)
        elif isinstance(function, Reconciliation):
            declared = function.params(OUTPUTS, GRID)
        elif isinstance(function, Remainder):
            declared = function.params(INPUTS, INPUTS)  # the identity needs as many outputs as inputs
        elif isinstance(function, Fusion):
            declared = function.params(2, OUTPUTS)
        yield from flatten(declared)

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """Return the names of the tensors in the example, with a note for buffers."""
        try:
            return tuple(name if param.trainable else f"{name} (buffer)" for name, param in self._params())
        except SpecError:
            return ()

    @property
    def learnable(self) -> bool:
        """Return whether an option makes buffers trainable."""
        return any(option.name == "learnable" for option in self.options)

    @cached_property
    def domain(self) -> str | None:
        """Return the domain of an expansion as text; None for other roles."""
        if not isinstance(self.function, Expansion):
            return None
        try:
            bounds = self.function.domain(INPUTS)
        except SpecError:
            return None
        intervals = list(dict.fromkeys(interval(low, high) for _, low, high in bounds))
        return ", ".join(intervals[:4]) + (", …" if len(intervals) > 4 else "")

    @cached_property
    def source(self) -> str | None:
        """Return the source given in the docstring."""
        for sections in self._lines:
            if sections.get("Source"):
                return " ".join(" ".join(sections["Source"]).split()).rstrip(".")
        return None

    @property
    def citation(self) -> str:
        """Return a short form of the source: numbers of papers and sections, or the part before the first comma."""
        source = self.source or ""
        return ", ".join(dict.fromkeys(_CITATION.findall(source))) or re.split(r"[,;]", source)[0]

    @cached_property
    def options(self) -> tuple[Option, ...]:
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
        """Return the function as YAML: in a specification if its role belongs to a layer, otherwise alone."""
        import yaml

        shown = yaml.safe_dump(to_dict(self.function), default_flow_style=True, sort_keys=False, width=math.inf).strip()
        if self.role == "fusion":
            return f"widths: [null, null]\nlayers:\n  - heads: [{{}}, {{}}]\n    fusion: {shown}"
        if self.role not in TITLES:
            return shown
        option = {"process": "before"}.get(self.role, self.role)
        return f"widths: [null, null]\nlayers:\n  - heads:\n      - {option}: {shown}"

    # -------------------------------------------------------------------------------- as text

    def line(self, width: int) -> str:
        """Return the entry of a list: the name, followed by description, options, sizes, domain and source."""
        names = self.name + (f" ({', '.join(self.aliases)})" if self.aliases else "")
        options = []
        for option in self.options:
            default = "" if option.default is None else f"={option.default}"
            bounds = f" [{option.range}]" if option.choices or ".." in option.range else ""
            options.append(f"{option.name}{default}{bounds}")
        domain = f"on {self.domain}" if self.domain not in (None, "all x") else ""
        facts = "; ".join(filter(None, (self.sizes, domain, self.citation)))
        indent = " " * NAME_WIDTH
        lines: list[str] = []
        for text in filter(None, (self.summary, ", ".join(options), facts)):
            lines += textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
        first = f"  {names}"
        if len(first) < len(indent):
            lines[0] = first.ljust(len(indent)) + lines[0].lstrip()
            return "\n".join(lines)
        return "\n".join((first, *lines))

    def text(self, width: int = 100) -> str:
        """Return the complete description, with lines up to a width.

        Example:
            >>> import kapsi as kp
            >>> print(kp.functions("reconciliation")["masked"].text(80))
            masked (masking), a reconciliation
            Trained values at random positions, zeros elsewhere
            <BLANKLINE>
            class    kapsi.Masked
            formula  ψ(w) = M ⊙ W, l = round(ratio·n·D)
            size     l = round(ratio·n·D); 36 for n = 6, D = 12
            tensors  entries, mask (buffer)
            source   arXiv 2407.04819, "Masking based Parameter Reconciliation"
            <BLANKLINE>
            options
              ratio  0.5  0..1  fraction of entries kept, 0 to 1.
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
        lines += [
            "",
            "in a specification" if self.role in TITLES else "as plain data",
            textwrap.indent(self.example, "  "),
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.text())}</pre>"


def _default(field: dataclasses.Field[Any]) -> str | None:
    if field.default is not dataclasses.MISSING:
        return short_form(field.default)
    return None if field.default_factory is dataclasses.MISSING else short_form(field.default_factory())


def public_name(cls: type) -> str:
    """Return the dotted name of a class in its package's public names, or the full name."""
    package = cls.__module__.split(".")[0]
    public = getattr(sys.modules[package], cls.__name__, None) is cls
    return f"{package if public else cls.__module__}.{cls.__name__}"


def _aligned(rows: Sequence[Sequence[str]], width: int, indent: int = 0) -> list[str]:
    """Return rows in aligned columns, the last column wrapped; cells wider than a column move the rest to the next line."""
    widths = [min(max(len(row[i]) for row in rows), 16) for i in range(len(rows[0]) - 1)]
    left = indent + sum(widths) + 2 * len(widths)
    lines: list[str] = []
    for row in rows:
        head = " " * indent
        for position, (cell, size) in enumerate(zip(row, widths, strict=False)):
            if len(cell) <= size:
                head += cell.ljust(size) + "  "
                continue
            first, *more = textwrap.wrap(cell, max(width - len(head), 24))
            lines += [head + first, *(" " * len(head) + part for part in more)]
            head = " " * (indent + sum(widths[: position + 1]) + 2 * (position + 1))
        rest = textwrap.wrap(row[-1], max(width - left, 24), break_on_hyphens=False) or [""]
        lines.append((head + rest[0]).rstrip())
        lines += [" " * left + more for more in rest[1:]]
    return lines


def entry_of(cls: type[Function], **options: Any) -> Entry:
    """Return the entry of a class with options set, as plain data; required options come from the first example.

    Raises:
        SpecError: invalid options.
    """
    required = {f.name for f in options_of(cls) if _default(f) is None}
    example = {key: value for key, value in (cls.examples or ({},))[0].items() if key in required}
    return Entry(typing.cast(Function, from_dict({"kind": cls.name, **example, **options}, cls, cls.name)))


# ------------------------------------------------------------------------------------------------ the list


MANY = 50
"""Largest number of names in a message."""


@dataclass(frozen=True, repr=False)
class Listing(Sequence[Entry]):
    """Entries of the catalogue in order of role and name; index by number, name or alias.

    Attributes:
        entries: all entries.
        failures: a line for each installed package whose functions cannot be loaded.
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
        """Return an entry by position, name or alias, or a part of the list by a slice."""
        if isinstance(key, slice):
            return dataclasses.replace(self, entries=self.entries[key])
        if not isinstance(key, str):
            return self.entries[key]
        entries = self.named(key)
        if len(entries) > 1:
            roles = " and ".join(f"functions({entry.role!r})[{key!r}]" for entry in entries)
            raise SpecError(f"functions: {key!r} is the name of {len(entries)} functions; write {roles}")
        return entries[0]

    def knows(self, name: str) -> bool:
        """Return whether a name or alias is in the list."""
        return any(entry.cls.is_called(name) for entry in self.entries)

    def named(self, name: str) -> list[Entry]:
        """Return the entries of a name or alias, one per role.

        Raises:
            SpecError: an unknown name; the message suggests similar names.
        """
        entries = [entry for entry in self.entries if entry.cls.is_called(name)]
        if not entries:
            names = [word for entry in self.entries for word in (entry.name, *entry.aliases)]
            suggestions = nearest(name, names)
            hint = f"did you mean {' or '.join(map(repr, suggestions))}? " if suggestions else ""
            known = list(dict.fromkeys(e.name for e in self.entries))
            listed = f"there are {', '.join(known)}" if len(known) <= MANY else "kapsi functions lists the names"
            allowed = "; ".join((f"{hint}{listed}", *self.failures))
            raise SpecError(f"no function is called {name!r}; {allowed}")
        return entries

    def text(self, width: int = 100) -> str:
        """Return the list as text of lines up to a width."""
        parts = []
        for role in dict.fromkeys(entry.role for entry in self.entries):
            rows = [entry.line(width) for entry in self.entries if entry.role == role]
            parts.append("\n".join((title(role), *rows)))
        return "\n\n".join(parts)

    def __repr__(self) -> str:
        return self.text()

    __str__ = __repr__

    def _repr_html_(self) -> str:
        head = ("role", "name", "description", "options", "size", "domain", "source")
        rows = [f"<tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>"]
        for entry in self.entries:
            options = ", ".join(f"{o.name}={o.default}" if o.default is not None else o.name for o in entry.options)
            names = ", ".join((entry.name, *entry.aliases))
            cells = (entry.role, names, entry.summary, options, entry.sizes, entry.domain or "", entry.citation)
            rows.append(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>")
        return f"<table>{''.join(rows)}</table>"


def functions(role: str | None = None) -> Listing:
    """List the registered functions of one role or of all, including those of installed third-party packages.

    The list prints as a table; an entry contains formula, options, sizes and source of a function.

    Args:
        role: a role, such as `expansion` or `solver`; None: all.

    Returns:
        A list of entries, accessible by name or index.

    Raises:
        SpecError: an unknown role.

    Example:
        >>> import kapsi as kp
        >>> taylor = kp.functions("expansion")["taylor"]
        >>> taylor.summary, taylor.size, taylor.example_size
        ('All monomials of degree 1 to d', 'Σ mᵏ', 20)
        >>> [option.name for option in taylor.options], taylor.options[0].range
        (['degree', 'symmetric'], '1..64')
    """
    failures = load_installed(all_of_them=True)
    if role is not None and role not in ROLES:
        raise SpecError(f"functions: {unknown('role', role, ROLES)}")
    chosen = roles() if role is None else [role]
    return Listing(tuple(entry_of(cls) for name in chosen for cls in catalogue(name)), failures)
