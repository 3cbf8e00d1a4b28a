"""Options of training written flat, for tests that vary them one by one."""

from __future__ import annotations

from typing import Any

from kapsi.function import catalogue, lookup, options_of


def nested(**flat: Any) -> dict[str, Any]:
    """Return options with those of the solver and the loss inside of them; a solver that lacks an option goes without it."""
    options = dict(flat)
    for role, default in (("solver", "adamw"), ("loss", None)):
        names = {field.name for kind in catalogue(role) for field in options_of(kind)} & set(options)
        own = {name: options.pop(name) for name in names}
        kind = options.get(role, default)
        if own and isinstance(kind, dict):
            options[role] = {**kind, **own}
        elif own and isinstance(kind, str):
            has = {field.name for field in options_of(lookup(role, kind))}
            options[role] = {"kind": kind, **{name: value for name, value in own.items() if name in has}}
    return options
