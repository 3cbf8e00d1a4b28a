"""Regression problems with known functions: the paper's, the AI Feynman equations, and user-defined formulas.

Elementary (E.0 to E.16) and composite (C.0 to C.16) functions are from arXiv 2407.04819. The AI Feynman database has 100
equations from physics lectures (I.6.2a to III.21.20) and 20 more (test_1 to test_20). F.0 to F.26 are the paper's names for 27
of the 100; D.I.6.2 to D.III.17.37 are their dimensionless forms, after the paper on KAN.

Source: S. Udrescu and M. Tegmark, AI Feynman, Science Advances 6 (2020), arXiv 1905.11481; J. Zhang, arXiv 2407.04819;
Z. Liu et al., KAN: Kolmogorov-Arnold Networks, arXiv 2404.19756.
"""

from __future__ import annotations

import csv
import functools
import math
import numbers
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kapsi.data.formulas import NUMBER, Formula, check_names, parse, quoted
from kapsi.errors import FormulaError, check_integer, nearest, unknown
from kapsi.text import counted

Floats: TypeAlias = npt.NDArray[np.float64]

GROUPS = ("elementary", "composite", "feynman", "feynman_bonus", "feynman_dimensionless")

# The Feynman equations in the paper's tables, numbered F.0 to F.26.
_PAPER = (
    "I.6.2 I.6.2b I.9.18 I.12.11 I.13.12 I.15.3x I.16.6 I.18.4 I.26.2 I.27.6 I.29.16 I.30.3 I.30.5 I.37.4 I.40.1 I.44.4 "
    "I.50.26 II.2.42 II.6.15a II.11.17 II.11.27 II.35.18 II.36.38 II.38.3 III.9.52 III.10.19 III.17.37"
)
ALIASES: Mapping[str, str] = MappingProxyType({f"F.{number}": name for number, name in enumerate(_PAPER.split())})

MAX_REDRAWN = 0.5
JUDGED = 1000  # minimum number of rows to estimate the share of non-finite values from
MAX_ROUNDS = 200
MAX_ROWS = 10**9
RANGE_END = re.compile(rf"[-+]?{NUMBER}")


@dataclass(frozen=True)
class Variable:
    """A variable, uniform over a range.

    Args:
        name: name in the formula.
        low: smallest value.
        high: largest value, above low.

    Raises:
        FormulaError: the range is empty or not finite.
    """

    name: str
    low: float
    high: float

    def __post_init__(self) -> None:
        check_names([self.name])
        for value in (self.low, self.high):
            if not _is_number(value):
                raise FormulaError(
                    f"variable {self.name}: {_shown(value)} is not a number; give low and high as numbers"
                )
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise FormulaError(
                f"variable {self.name}: the range {self.low} to {self.high}; both must be finite, low below high"
            )
        object.__setattr__(self, "low", float(self.low))
        object.__setattr__(self, "high", float(self.high))
        if not math.isfinite(self.high - self.low):
            raise FormulaError(f"variable {self.name}: the range {self.low} to {self.high} is too wide for float64")


class Sample(NamedTuple):
    """Rows drawn from a function.

    Args:
        x: (rows, variables) float64.
        y: (rows,) float64, with noise if requested.
        redrawn: number of replaced rows, where the function was not finite.
    """

    x: Floats
    y: Floats
    redrawn: int


@dataclass(frozen=True)
class FunctionProblem:
    """A function to learn: a formula and the ranges of its variables.

    Args:
        name: name such as E.3 or I.9.18.
        formula: text in the grammar of `kapsi.data.formulas.parse`.
        variables: variables in the order of the columns of x.
        title: common name of the function, if any.
        output: name of the value in the source.

    Raises:
        FormulaError: the formula or a variable is invalid.

    Example:
        >>> problem = FunctionProblem("mine", "x*sin(y)", (Variable("x", 0, 1), Variable("y", -1, 1)))
        >>> x, y = problem.sample(100, seed=0)
        >>> x.shape, y.shape
        ((100, 2), (100,))
        >>> problem.parsed.latex
        'x \\\\sin{\\\\left(y \\\\right)}'
    """

    name: str
    formula: str
    variables: tuple[Variable, ...]
    title: str = ""
    output: str = "f"

    def __post_init__(self) -> None:
        variables = tuple(self.variables) if isinstance(self.variables, Iterable) else (self.variables,)
        if not variables or not all(isinstance(variable, Variable) for variable in variables):
            raise FormulaError(
                f"function {self.name}: expected one or more Variable(name, low, high), as in x:0:1, got {variables!r}"
            )
        object.__setattr__(self, "variables", variables)
        check_names(variable.name for variable in self.variables)
        _ = self.parsed

    @functools.cached_property
    def parsed(self) -> Formula:
        """The parsed formula, with values, sympy expression and LaTeX."""
        return parse(self.formula, [variable.name for variable in self.variables])

    @property
    def inputs(self) -> int:
        """The number of variables."""
        return len(self.variables)

    @property
    def ranges(self) -> str:
        """The ranges as text, grouped: `x, y in [0, 1]; t in [1, 5]`."""
        grouped: dict[tuple[float, float], list[str]] = {}
        for variable in self.variables:
            grouped.setdefault((variable.low, variable.high), []).append(variable.name)
        return "; ".join(f"{', '.join(names)} in [{low:g}, {high:g}]" for (low, high), names in grouped.items())

    def values(self, x: npt.ArrayLike) -> Floats:
        """Return the values of the function in float64; NaN or infinite outside its domain.

        Args:
            x: (..., variables).
        """
        return self.parsed.evaluate(x)

    def draw(self, rows: int, *, seed: int, noise: float = 0.0) -> Sample:
        """Draw rows uniformly from the ranges; rows without a finite value are redrawn.

        Numbers come from PCG64 and depend on the seed only: functions with equally many variables get the same uniform
        numbers, scaled to their ranges, for comparisons row by row.

        Args:
            rows: number of rows, at least 1.
            seed: seed, at least 0.
            noise: standard deviation of normal noise in y, as a fraction of the standard deviation of y over the rows; 0
                for none. x does not depend on the noise.

        Raises:
            FormulaError: an argument is out of range, or the function is not finite on most of the range.
        """
        rows = check_integer("rows", rows, 1, MAX_ROWS, error=FormulaError)
        check_integer("seed", seed, 0, error=FormulaError)
        if not _is_number(noise) or not 0.0 <= noise < math.inf:
            raise FormulaError(
                f"noise {_shown(noise)}: expected a fraction of the target's standard deviation, 0 or more and finite, as in 0.1"
            )
        generator = np.random.Generator(np.random.PCG64(seed))
        x = self._uniform(generator, rows)
        y = self.values(x)
        bad = np.flatnonzero(~np.isfinite(y))
        self._check_domain(bad, rows, seed)
        redrawn = 0
        for _ in range(MAX_ROUNDS):
            if not len(bad):
                break
            redrawn += len(bad)
            x[bad] = self._uniform(generator, len(bad))
            y[bad] = self.values(x[bad])
            bad = bad[~np.isfinite(y[bad])]
        if len(bad):
            raise self._not_finite(len(bad), len(bad))
        if noise:
            y = y + float(noise) * self._deviation(y) * generator.standard_normal(rows)
            if not np.isfinite(y).all():
                raise FormulaError(
                    f"function {self.name}: noise {noise} makes targets too large for float64; give less"
                )
        return Sample(x, y, redrawn)

    def sample(self, rows: int, *, seed: int, noise: float = 0.0) -> tuple[Floats, Floats]:
        """Return x (rows, variables) and y (rows,) of `draw`.

        Args:
            rows: number of rows, at least 1.
            seed: seed, at least 0.
            noise: normal noise, as a fraction of the standard deviation of y.

        Raises:
            FormulaError: an argument is out of range, or the function is not finite on most of the range.
        """
        drawn = self.draw(rows, seed=seed, noise=noise)
        return drawn.x, drawn.y

    def split(
        self, rows: int = 2000, train: int = 1000, *, seed: int, noise: float = 0.0
    ) -> tuple[Floats, Floats, Floats, Floats]:
        """Return training x and y, test x and y: the first `train` rows of `sample`, and the rest.

        Args:
            rows: total number of rows; default: 2,000, as in the paper.
            train: number of training rows, 1 to rows − 1; half as in the paper.
            seed: seed, at least 0.
            noise: normal noise in the targets of both parts, see `draw`.

        Raises:
            FormulaError: an argument is out of range.
        """
        check_integer("rows", rows, 2, MAX_ROWS, error=FormulaError)
        check_integer("train", train, 1, rows - 1, error=FormulaError)
        x, y = self.sample(rows, seed=seed, noise=noise)
        return x[:train], y[:train], x[train:], y[train:]

    def _uniform(self, generator: np.random.Generator, rows: int) -> Floats:
        low = np.array([variable.low for variable in self.variables])
        high = np.array([variable.high for variable in self.variables])
        # Rounding may exceed the end.
        return np.minimum(low + (high - low) * generator.random((rows, self.inputs)), high)

    def _check_domain(self, bad: npt.NDArray[np.intp], rows: int, seed: int) -> None:
        """Reject a function that is not finite on most of its range."""
        count, drawn = len(bad), rows
        if count and rows < JUDGED:
            more = self._uniform(np.random.Generator(np.random.PCG64(seed)), JUDGED)
            count, drawn = int((~np.isfinite(self.values(more))).sum()), JUDGED
        if count > MAX_REDRAWN * drawn:
            raise self._not_finite(count, drawn)

    def _not_finite(self, bad: int, rows: int) -> FormulaError:
        return FormulaError(
            f"function {self.name}: {quoted(self.formula)} is not finite on {bad} of {rows} rows drawn with "
            f"{self.ranges}; give ranges inside its domain"
        )

    def _deviation(self, y: Floats) -> float:
        largest = float(np.abs(y).max())
        deviation = float(np.std(y / largest)) * largest if largest else 0.0
        if not deviation:
            raise FormulaError(
                f"function {self.name}: the target does not vary over {counted(len(y), 'row')}, but noise is a fraction "
                "of its variation; draw more rows, or no noise"
            )
        return deviation


def problems(group: str) -> tuple[FunctionProblem, ...]:
    """Return the problems of a group, in the order of the source.

    Args:
        group: elementary (17), composite (17), feynman (100), feynman_bonus (20) or feynman_dimensionless (27).

    Raises:
        FormulaError: the group is unknown.

    Example:
        >>> [problem.name for problem in problems("elementary")][:3]
        ['E.0', 'E.1', 'E.2']
    """
    if group not in GROUPS:
        raise FormulaError(unknown("group of functions", group, GROUPS))
    return _read(group)


def problem(name: str) -> FunctionProblem:
    """Return a problem by name, or by the paper's number: F.2 is I.9.18.

    Args:
        name: E.3, C.0, I.9.18, test_4, D.I.9.18, F.2, ….

    Raises:
        FormulaError: the name is unknown.

    Example:
        >>> problem("F.2").name, problem("I.9.18").formula
        ('I.9.18', 'G*m1*m2/((x2-x1)**2+(y2-y1)**2+(z2-z1)**2)')
    """
    wanted = ALIASES.get(str(name), str(name))
    known = {problem.name: problem for group in GROUPS for problem in _read(group)}
    if wanted in known:
        return known[wanted]
    close = nearest(str(name), [*known, *ALIASES])
    hint = f"did you mean {', '.join(close)}? " if close else ""
    raise FormulaError(
        f"there is no function {name!r}; {hint}there are E.0 to E.16, C.0 to C.16, I.6.2a to III.21.20, test_1 to "
        "test_20, D.I.6.2 to D.III.17.37, and F.0 to F.26 as in the paper"
    )


def read_variable(text: str) -> Variable:
    """Parse a variable, `name:low:high`.

    Raises:
        FormulaError: the text has another form.
    """
    parts = [part.strip() for part in text.split(":")]
    if len(parts) != 3 or not all(RANGE_END.fullmatch(part) for part in parts[1:]):
        raise FormulaError(f"variable {text!r}: expected name:low:high with plain numbers, as in x:0:1")
    return Variable(parts[0], float(parts[1]), float(parts[2]))


def problem_from(formula: str, variables: Sequence[str], name: str = "f") -> FunctionProblem:
    """Return the problem of a user-defined formula with variables `name:low:high`.

    Raises:
        FormulaError: the formula or a variable is invalid.

    Example:
        >>> problem_from("x+y", ["x:0:1", "y:-1:1"]).inputs
        2
    """
    return FunctionProblem(name, formula, tuple(read_variable(text) for text in variables))


@functools.cache
def _read(group: str) -> tuple[FunctionProblem, ...]:
    from importlib.resources import files

    text = (files("kapsi.data") / "equations" / f"{group}.csv").read_text(encoding="utf-8")
    return tuple(
        FunctionProblem(
            row["name"],
            row["formula"],
            tuple(read_variable(part) for part in row["variables"].split()),
            row["title"],
            row["output"],
        )
        for row in csv.DictReader(text.splitlines())
    )


def _is_number(value: object) -> bool:
    """Return whether a value is a real number within the range of float64."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _shown(value: object) -> str:
    return "beyond float64" if isinstance(value, int) and value.bit_length() > 1024 else repr(value)
