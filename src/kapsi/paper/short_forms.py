"""Short forms in experiment files: seeds, names, and rows from a grid or from a group of functions."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from kapsi.errors import KapsiError, SpecError, did_you_mean, refuse, shown
from kapsi.function import coerce

MAX_ROWS, MAX_SEEDS = 100_000, 10_000


def merged(base: Mapping[str, Any], update: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep merge of plain data: mappings merge, other values are replaced, and another `kind` replaces the whole mapping.

    A name stands for a mapping with this `kind`.

    Example:
        >>> merged({"train": {"solver": "lbfgs", "epochs": 9}}, {"train": {"epochs": 1}})
        {'train': {'solver': 'lbfgs', 'epochs': 1}}
        >>> merged({"solver": "lbfgs"}, {"solver": {"tolerance": 0.1}})
        {'solver': {'kind': 'lbfgs', 'tolerance': 0.1}}
        >>> merged({"expansion": {"kind": "taylor", "degree": 3}}, {"expansion": {"kind": "identity"}})
        {'expansion': {'kind': 'identity'}}
    """
    result = {key: _copied(value) for key, value in base.items()}
    for key, value in update.items():
        below = result.get(key)
        if isinstance(below, str) and isinstance(value, Mapping):
            below = {"kind": below}
        if (
            isinstance(below, Mapping)
            and isinstance(value, Mapping)
            and value.get("kind", below.get("kind")) == below.get("kind")
        ):
            result[key] = merged(below, value)
        else:
            result[key] = _copied(value)
    return result


def _copied(value: Any) -> Any:
    """Copy nested mappings and lists."""
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def one_line(value: Any, where: str) -> Any:
    """Return a string with single spaces; refuse empty strings and control characters."""
    if not isinstance(value, str):
        return value
    text = " ".join(value.split())
    if value and not (text and text.isprintable()):
        refuse(where, "printable text", value)
    return text


def read_lines(value: Any, where: str) -> Any:
    """Return a tuple of single-line strings; a string stands for a list of one."""
    lines = [value] if isinstance(value, str) else value
    return (
        [one_line(line, f"{where}[{i}]") for i, line in enumerate(lines)] if isinstance(lines, list | tuple) else lines
    )


def row_name(value: Any, where: str) -> str:
    """Return the name of a row; a number becomes a string."""
    name = _as_text(value)
    if not (isinstance(name, str) and name.isprintable() and name == " ".join(name.split()) and 0 < len(name) <= 100):
        refuse(where, "a name of one line, at most 100 characters", value)
    return name


def _as_text(value: Any) -> Any:
    """Convert a number to a string, since YAML reads the name 1 as a number."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def read_names(value: Any, where: str) -> Any:
    """Return a list of names; a name stands for a list of one, and numbers become strings."""
    if value is None or isinstance(value, tuple):
        return value
    names = [_as_text(name) for name in value] if isinstance(value, list) else [_as_text(value)]
    if not names or len(set(map(str, names))) != len(names):
        refuse(where, "a list of different names", value)
    return names


def read_named(kind: type[Any], rows: bool = False) -> Callable[[Any, str], Any]:
    """Return a reader of {name: options} as a tuple of specs with a field `name`; of rows also in short form."""

    def read(value: Any, where: str) -> Any:
        value = read_rows(value, where) if rows else value
        if not isinstance(value, Mapping):
            return value
        entries = {name: {} if options is None else options for name, options in value.items()}
        for name, options in entries.items():
            if not isinstance(options, Mapping):
                refuse(f"{where}.{name}", "a mapping", options)
        return tuple(coerce(kind, {"name": name, **options}, f"{where}.{name}") for name, options in entries.items())

    return read


def require_known(names: Iterable[str], choices: Collection[str], where: str) -> None:
    """Raise a `SpecError` for the first unknown name, with the choices."""
    for name in names:
        if name not in choices:
            listed = ", ".join(list(choices)[:20]) + (f" and {len(choices) - 20} more" if len(choices) > 20 else "")
            hint = did_you_mean(str(name), choices, quoted=False)
            raise SpecError(f"{where}: there is no {shown(name)}; {hint}there are {listed}")


# ------------------------------------------------------------------------------------------------ seeds


def read_seeds(value: Any, where: str = "seeds") -> tuple[int, ...] | None:
    """Return seeds from a count, a range, or a list.

    Example:
        >>> read_seeds(3), read_seeds("2-4"), read_seeds("100,101"), read_seeds([5, 7])
        ((0, 1, 2), (2, 3, 4), (100, 101), (5, 7))

    Raises:
        SpecError: another value, or repeated, negative, too large or too many seeds.
    """
    if value is None:
        return None
    seeds: list[int] = []
    with contextlib.suppress(TypeError):
        # At most MAX_SEEDS + 1: a range of 10¹² seeds must not be expanded.
        some = itertools.islice(_seeds_of(value), MAX_SEEDS + 1)
        seeds = [-1 if isinstance(seed, bool) else operator.index(seed) for seed in some]
    if not seeds or len(seeds) > MAX_SEEDS or len(set(seeds)) < len(seeds) or not all(0 <= s < 2**31 for s in seeds):
        wanted = "a count such as 5, a range such as '0-4', or different whole numbers from 0 such as [100, 101]"
        refuse(where, f"{wanted}, at most {MAX_SEEDS:,} seeds", value)
    return tuple(seeds)


def _seeds_of(value: Any) -> Iterator[Any]:
    if isinstance(value, bool | bytes | Mapping):
        raise TypeError
    if isinstance(value, int):
        return iter(range(value))
    if not isinstance(value, str):
        return iter(value)
    if re.fullmatch(r"\d{1,9}", value.strip(), re.ASCII):
        return iter(range(int(value)))
    parts = [re.fullmatch(r"\s*(\d{1,10})(?:-(\d{1,10}))?\s*", part, re.ASCII) for part in value.split(",")]
    ranges = [range(int(part[1]), int(part[2] or part[1]) + 1) for part in parts if part]
    # A part without seeds is a typo, or a range with end before start.
    return itertools.chain.from_iterable(ranges) if all(ranges) and len(ranges) == len(parts) else iter(())


# ------------------------------------------------------------------------------------------------ rows


def read_rows(value: Any, where: str) -> Any:
    """Return rows as mappings with a name, from a list of names, a group of functions or a grid; other forms are unchanged."""
    if isinstance(value, list):
        return [{"name": row_name(name, f"{where}[{i}]")} for i, name in enumerate(value)]
    if isinstance(value, Mapping) and "functions" in value:
        require_known(value, ("functions", "except", "only"), where)
        return [{"name": name} for name in _functions(value, where)]
    if isinstance(value, Mapping) and "grid" in value:
        require_known(value, ("grid",), where)
        return _grid(value["grid"], f"{where}.grid")
    return value


def _functions(value: Mapping[str, Any], where: str) -> list[str]:
    """Return the names of the functions of groups; `except` and `only` are a group or a list of names."""
    names = [
        name
        for group in read_names(value["functions"], f"{where}.functions")
        for name in _group(group, f"{where}.functions")
    ]
    for key, keep in (("except", False), ("only", True)):
        if key not in value:
            continue
        selected = value[key]
        if isinstance(selected, str):
            selected = _group(selected, f"{where}.{key}")
        else:
            selected = read_names(selected, f"{where}.{key}")
            require_known(selected, names, f"{where}.{key}")
        names = [name for name in names if (name in selected) is keep]
    return names


def _group(name: Any, where: str) -> list[str]:
    from kapsi.data.problems import problems

    try:
        return [problem.name for problem in problems(name)]
    except KapsiError as error:
        raise SpecError(f"{where}: {error}; give a group, or a list of names in brackets") from None


def _grid(value: Any, where: str) -> list[dict[str, Any]]:
    """Return the product of the axes of a grid; several grids are concatenated."""
    rows: list[dict[str, Any]] = []
    for i, axes in enumerate(value if isinstance(value, list) else [value]):
        here = f"{where}[{i}]" if isinstance(value, list) else where
        if not (isinstance(axes, Mapping) and axes and all(isinstance(axis, str) for axis in axes)):
            refuse(here, "{axis: values}", axes)
        values = [_axis(entries, f"{here}.{axis}", axis) for axis, entries in axes.items()]
        if len(rows) + math.prod(map(len, values)) > MAX_ROWS:
            raise SpecError(f"{here}: has more than {MAX_ROWS:,} rows")
        for point in itertools.product(*values):
            options: dict[str, Any] = {}
            for _, point_options in point:
                options = merged(options, point_options)
            position = {axis: entry for axis, (entry, _) in zip(axes, point, strict=True)}
            words = [*position, *position.values()] if len(position) == 1 else position.values()
            rows.append(
                {
                    "name": (" " if len(position) == 1 else " · ").join(map(str, words)),
                    "options": options,
                    "axes": position,
                }
            )
    return rows


def _axis(value: Any, where: str, axis: str) -> list[tuple[Any, dict[str, Any]]]:
    """Return (value, options) of an axis: a list or a range sets the option named as the axis, a mapping gives the options."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d{1,6})\.\.(\d{1,6})\s*", value, re.ASCII)):
        low, high = int(match[1]), int(match[2])
        if high - low >= MAX_ROWS:
            raise SpecError(f"{where}: has more than {MAX_ROWS:,} values")
        value = list(range(low, high + 1))
    if not value or not isinstance(value, list | Mapping):
        refuse(where, "a list, a mapping or a range such as 1..10", value)
    if isinstance(value, Mapping):
        return [(row_name(name, where), options or {axis: name}) for name, options in value.items()]
    for i, entry in enumerate(value):
        row_name(entry, f"{where}[{i}]")
        if isinstance(entry, float) and not math.isfinite(entry):
            raise SpecError(f"{where}[{i}]: expected a finite number, got {entry}")
    return [(entry, {axis: entry}) for entry in value]
