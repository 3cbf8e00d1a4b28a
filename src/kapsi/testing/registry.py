"""The registry of laws, and the checks of a function against them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kapsi.errors import SpecError
from kapsi.features import DenseFeatures
from kapsi.function import Function
from kapsi.testing.cases import LAYER_ROLES, example, examples_of, features_of, fits, instances

Over: TypeAlias = Literal["function", "class", "pair"]

EVERY_ROLE = "every role"


@dataclass(frozen=True)
class Law:
    """One law: a plain function that raises if a case violates it.

    Args:
        name: used in messages and tests.
        over: extent of a case, one `function`, all examples of a `class`, or a `pair` of an expansion and a reconciliation.
        roles: the roles concerned.
        rule: the law itself.
    """

    name: str
    over: Over
    roles: frozenset[str]
    rule: Callable[..., None]

    def applies(self, function: Function | type[Function]) -> bool:
        """Return whether the law concerns the role of a function."""
        return function.role in self.roles or EVERY_ROLE in self.roles

    def __call__(self, *case: Function) -> None:
        """Check one case.

        Raises:
            AssertionError: the law does not hold; the message gives the law, the functions and the violation.
        """
        try:
            self.rule(*case)
        except Exception as error:
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            shown = " × ".join(map(repr, case))
            raise AssertionError(f"law {self.name!r} fails for {shown}: {kind}{error}") from error


LAWS: dict[str, Law] = {}
"""All laws by name."""


def law(over: Over, *roles: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function in `LAWS` under its name.

    Args:
        over: kind of a case.
        *roles: the roles concerned, or `EVERY_ROLE`; by default the roles of functions in a layer.
    """

    def enter(rule: Callable[..., None]) -> Callable[..., None]:
        LAWS[rule.__name__] = Law(rule.__name__, over, frozenset(roles or LAYER_ROLES), rule)
        return rule

    return enter


def _selected(laws: Iterable[str] | None, *over: Over) -> list[Law]:
    names = list(LAWS) if laws is None else list(laws)
    unknown = [name for name in names if name not in LAWS]
    if unknown:
        raise SpecError(f"check: no law is called {unknown[0]!r}; choose from {', '.join(LAWS)}")
    return [LAWS[name] for name in names if LAWS[name].over in over]


def check(subject: type[Function] | Function, laws: Iterable[str] | None = None) -> None:
    """Check all laws about single functions, for a class with all examples or for an instance.

    Args:
        subject: a registered class, or an instance.
        laws: names of laws; default: all.

    Raises:
        AssertionError: a law does not hold; the message gives law and case.

    Example:
        >>> import kapsi as kp
        >>> check(kp.Taylor, laws=["leading_shapes", "row_independence"])
    """
    functions = [subject] if isinstance(subject, Function) else examples_of(subject)
    for rule in _selected(laws, "function", "class"):
        if not rule.applies(subject):
            continue
        if rule.over == "class":
            rule(*functions)
            continue
        for function in functions:
            rule(function)


def check_pairs(subject: type[Function] | Function, laws: Iterable[str] | None = None) -> None:
    """Check all laws about pairs: an expansion with every registered reconciliation, or the reverse.

    Redundant pairs are skipped; see `pair_matters`.

    Args:
        subject: an expansion or a reconciliation: a class with all examples, or an instance.
        laws: names of laws; default: all.

    Raises:
        AssertionError: a law does not hold; the message gives law and pair.
        SpecError: the subject has another role.
    """
    if subject.role not in ("expansion", "reconciliation"):
        raise SpecError(
            f"check_pairs: expected an expansion or a reconciliation, got the {subject.role} {subject.name}"
        )
    functions = [subject] if isinstance(subject, Function) else examples_of(subject)
    first = subject.role == "expansion"
    others = instances("reconciliation" if first else "expansion")
    for rule in _selected(laws, "pair"):
        for function in functions:
            for other in others:
                pair = (function, other) if first else (other, function)
                if pair_matters(*pair):
                    rule(*pair)


# Called for each expansion with every reconciliation, and builds a head.
@functools.lru_cache(maxsize=1024)
def has_structure(expansion: Function) -> bool:
    """Return whether κ(x) is more than a dense array."""
    return not isinstance(features_of(expansion), DenseFeatures)


def pair_matters(expansion: Function, reconciliation: Function) -> bool:
    """Return whether a pair is not redundant: κ has structure, or κ and ψ are the first examples of their classes.

    All dense features are contracted alike; all examples with all of ψ would repeat the same product thousands of times.
    """
    distinct = has_structure(expansion) or expansion.name == "identity"
    if not distinct and not (_is_first(reconciliation) and _is_first(expansion)):
        return False
    return any(fits(reconciliation, n, expansion.factors(3)) for n in (4, 6))  # type: ignore[arg-type, attr-defined]


def _is_first(function: Function) -> bool:
    cls = type(function)
    return function == example(cls, cls.examples[0])
