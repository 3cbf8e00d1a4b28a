"""The notation of specifications on one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kapsi.function import Function, Spec, options_of

__all__ = ["short_form"]


def short_form(value: Any) -> str:
    """Return a function, or plain data, in the notation of a specification on one line; options with defaults are left out.

    Example:
        >>> import kapsi as kp
        >>> short_form(kp.Extended((kp.Taylor(3), kp.Identity())))
        'extended(parts=[taylor(degree=3), identity])'
        >>> short_form({"kind": "taylor", "degree": 3})
        'taylor(degree=3)'
    """
    if isinstance(value, Function | Spec):
        fields = ((f.name, getattr(value, f.name), f.default) for f in options_of(type(value)))
        kind = {"kind": value.name} if isinstance(value, Function) else {}
        value = {**kind, **{name: item for name, item, default in fields if item != default}}
    if isinstance(value, Mapping):
        if "kind" not in value:
            return f"{{{', '.join(f'{name}: {short_form(item)}' for name, item in value.items())}}}"
        options = ", ".join(f"{name}={short_form(item)}" for name, item in value.items() if name != "kind")
        return f"{value['kind']}({options})" if options else str(value["kind"])
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(short_form, value))}]"
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)
