"""Formulas of the edges of a Kolmogorov–Arnold network: for each the best of a closed list of functions, c f(a x + b) + d."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from kapsi.errors import SpecError, did_you_mean
from kapsi.function import coerce
from kapsi.modules import Model
from kapsi.zoo.kan.edges import Edges, edge_functions

__all__ = ["FUNCTIONS", "Formula", "Formulas", "formulas"]

Search: TypeAlias = Literal["none", "scale", "half-line", "center", "phase", "window", "both"]
"""Where the search for a and b begins; the inputs lie in [−1, 1] then.

- none: a = 1, b = 0: c and d make the rest.
- scale: a of both signs, b = 0.
- half-line: a = ±1, and b such that a x + b is positive for all inputs.
- center: a = 1, and b near the inputs.
- phase: a and the part of a period that b is.
- window: all of a x + b lies between −π/2 and π/2.
- both: a, and b such that a x + b is zero near the inputs.
"""


@dataclass(frozen=True)
class _Function:
    """A function that an edge can be.

    Args:
        text: how it is written, with {} for the argument.
        complexity: a function that is one more complex must leave a quarter of what is not explained.
        value: f.
        slope: f′.
        search: where the search begins.
        domain: where the argument may be.
        power: p of a function with f(s z) = s^p f(z) for s > 0: its scale a is then 1 or −1.
        parity: 1 where f(−z) = f(z), −1 where f(−z) = −f(z), 0 otherwise: a is positive then.
    """

    text: str
    complexity: float
    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    search: Search
    domain: tuple[float, float] = (-math.inf, math.inf)
    power: float | None = None
    parity: int = 0

    @property
    def free(self) -> tuple[bool, bool]:
        """Return whether a and b are free, besides c and d."""
        return self.search in ("scale", "phase", "window", "both"), self.search not in ("none", "scale")


def _power(p: int, complexity: float) -> _Function:
    search: Search = "none" if p == 1 else "center"
    text = "{}" if p == 1 else f"{{}}**{p}"
    return _Function(
        text, complexity, lambda z: z**p, lambda z: p * z ** (p - 1), search, power=p, parity=1 if p % 2 == 0 else -1
    )


_LIST: dict[str, _Function] = {
    "x": _power(1, 1),
    "x^2": _power(2, 1.5),
    "x^3": _power(3, 2),
    "x^4": _power(4, 2.5),
    "exp": _Function("exp({})", 2, torch.exp, torch.exp, "scale"),
    "log": _Function("log({})", 2, torch.log, torch.reciprocal, "half-line", (0, math.inf), 0),
    "sqrt": _Function("sqrt({})", 2, torch.sqrt, lambda z: 0.5 * z.rsqrt(), "half-line", (0, math.inf), 0.5),
    "1/x": _Function("1/{}", 2, torch.reciprocal, lambda z: -(z**-2), "half-line", (0, math.inf), -1, -1),
    "1/x^2": _Function("1/{}**2", 3, lambda z: z**-2, lambda z: -2 * z**-3, "half-line", (0, math.inf), -2, 1),
    "1/sqrt": _Function("1/sqrt({})", 3, torch.rsqrt, lambda z: -0.5 * z**-1.5, "half-line", (0, math.inf), -0.5),
    "sin": _Function("sin({})", 2.5, torch.sin, torch.cos, "phase", parity=-1),
    "cos": _Function("cos({})", 2.5, torch.cos, lambda z: -torch.sin(z), "phase", parity=1),
    "tan": _Function(
        "tan({})", 3, torch.tan, lambda z: 1 / torch.cos(z) ** 2, "window", (-math.pi / 2, math.pi / 2), parity=-1
    ),
    "tanh": _Function("tanh({})", 3, torch.tanh, lambda z: 1 - torch.tanh(z) ** 2, "both", parity=-1),
    "arctan": _Function("arctan({})", 3.5, torch.atan, lambda z: 1 / (1 + z**2), "both", parity=-1),
    "abs": _Function("abs({})", 3, torch.abs, torch.sign, "center", power=1, parity=1),
    "gaussian": _Function(
        "exp(-{}**2)", 3, lambda z: torch.exp(-z * z), lambda z: -2 * z * torch.exp(-z * z), "both", parity=1
    ),
}

FUNCTIONS: tuple[str, ...] = tuple(_LIST)
"""The functions that the formula of an edge is looked for among, but for constants, which are not looked for."""

COARSE, FINE = 128, 512
"""Rows at which the search is made, and those at which what it found is improved."""
STARTS = 5
"""Places of the search that are improved."""
STEPS = 40
ENOUGH = 1e-9
"""Change of the best share that is left, relative to it, below which steps end."""
FLOOR = 1e-6
"""Share of variance that counts as nothing: what is below is not told apart."""
SAME_PHASE = 1e-3
ROUNDING = 1e-10


@dataclass(frozen=True)
class Formula:
    """The formula of an edge, c f(a x + b) + d.

    Attributes:
        function: the name of f, one of `FUNCTIONS`, or `0` for a constant.
        a, b, c, d: its numbers; in the text a power has a = 1, and what can be taken out of f is in c and d.
        r2: the share of the variance of the edge that it explains, at most 1; 1 where there is none.
    """

    function: str
    a: float
    b: float
    c: float
    d: float
    r2: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return c f(a x + b) + d."""
        if self.function == "0":
            return torch.full_like(x, self.d)
        return self.c * _LIST[self.function].value(self.a * x + self.b) + self.d

    def text(self, x: str = "x", digits: int = 4) -> str:
        """Return it as a Python expression of NumPy's functions."""
        return _sum([*_terms(self, x, digits), (self.d, "")], digits)


@dataclass(frozen=True)
class Formulas:
    """The formulas of all edges of a model.

    Attributes:
        edges: by layer, output and input.
        constants: b of each layer, by output.
        least: the R² that an edge needs for the formula of the whole.
    """

    edges: tuple[tuple[tuple[Formula, ...], ...], ...]
    constants: tuple[tuple[float, ...], ...]
    least: float

    def missing(self) -> list[tuple[int, int, int, Formula]]:
        """Return the edges without a formula that is good enough: (layer, output, input, the best one)."""
        return [
            (i, j, k, edge)
            for i, layer in enumerate(self.edges)
            for j, node in enumerate(layer)
            for k, edge in enumerate(node)
            if edge.r2 < self.least
        ]

    def __call__(self, x: Tensor) -> Tensor:
        """Return what the formulas of all edges make of inputs `(..., m)`, good ones or not."""
        m = len(self.edges[0][0])
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() == 0 or x.shape[-1] != m:
            given = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise SpecError(f"Formulas: expected floating-point inputs of shape (..., {m}), got {given}")
        for layer, constants in zip(self.edges, self.constants, strict=True):
            nodes = [
                torch.stack([edge(x[..., k]) for k, edge in enumerate(node)]).sum(0) + constant
                for node, constant in zip(layer, constants, strict=True)
            ]
            x = torch.stack(nodes, -1)
        return x

    def text(self, digits: int = 4, *, whole: bool = True) -> str:
        """Return the formula of each output as Python expressions of NumPy's functions, a line each.

        Args:
            digits: significant digits of the numbers, 1 to 17.
            whole: False: hidden nodes have lines of their own, `h1_1 = …`, `h1_2 = …`. True: they are written out in each place,
                where the lines have at most 10,000 characters then.

        Raises:
            SpecError: an edge whose R² is below `least`.
        """
        digits = coerce(int, digits, "Formulas.text(digits)")
        if not 1 <= digits <= 17:
            raise SpecError(f"Formulas.text(digits={digits}): expected 1 to 17")
        missing = self.missing()
        if missing:
            i, j, k, edge = min(missing, key=lambda each: each[3].r2)
            raise SpecError(
                f"Formulas: {len(missing)} edges have no formula of R² ≥ {self.least:g}; the worst is that of layer {i} from node "
                f"{k} to node {j}, {edge.function!r} with {edge.r2:.4f}; train on, prune, allow more functions, or a lower `least`"
            )
        if whole:
            lines = self._lines(digits, inline=True)
            if sum(map(len, lines)) <= LONGEST:
                return "\n".join(lines)
        return "\n".join(self._lines(digits, inline=False))

    def _lines(self, digits: int, *, inline: bool) -> list[str]:
        names = [f"x{i + 1}" for i in range(len(self.edges[0][0]))]
        lines: list[str] = []
        last = len(self.edges) - 1
        for i, (layer, constants) in enumerate(zip(self.edges, self.constants, strict=True)):
            prefix = "y" if i == last else f"h{i + 1}_"
            found = []
            for node, constant in zip(layer, constants, strict=True):
                terms = [term for name, edge in zip(names, node, strict=True) for term in _terms(edge, name, digits)]
                found.append(_sum([*terms, (constant + sum(edge.d for edge in node), "")], digits))
            if inline and i < last:
                names = [f"({text})" for text in found]
                if sum(map(len, names)) > LONGEST:
                    return [" " * (LONGEST + 1)]  # the next layer is longer yet
                continue
            names = [f"{prefix}{j + 1}" for j in range(len(found))]
            lines += [f"{name} = {text}" for name, text in zip(names, found, strict=True)]
        return lines


LONGEST = 10_000
"""Characters of formulas in which hidden nodes are written out."""


def _terms(edge: Formula, x: str, digits: int) -> list[tuple[float, str]]:
    """Return c f(a x + b) as factors and products; a linear function as two of them."""
    if edge.function == "0" or edge.c == 0:
        return []
    if edge.function == "x":
        return [(edge.c * edge.a, x), (edge.c * edge.b, "")]
    inside = _sum([(edge.a, x), (edge.b, "")], digits)
    text = _LIST[edge.function].text
    bare = inside == x and (x.isidentifier() or x.startswith("("))
    around = inside if bare or text.endswith("({})") else f"({inside})"
    return [(edge.c, text.format(around))]


def _sum(terms: Iterable[tuple[float, str]], digits: int) -> str:
    """Return the text of a sum of products of a number and something, which is empty for numbers by themselves."""
    constant = sum(factor for factor, what in terms if not what)
    parts = [(factor, what) for factor, what in terms if what]
    text = ""
    for factor, what in [*parts, (constant, "")]:
        number = f"{abs(factor):.{digits}g}"
        if float(number) == 0 and (text or what):
            continue
        # A quotient begins with a one, which the factor takes the place of.
        product = number + what[1:] if what.startswith("1/") else f"{number}*{what}"
        shown = what if what and float(number) == 1 else product if what else number
        sign = "-" if factor < 0 else "+"
        text += f" {sign} {shown}" if text else ("-" if factor < 0 and float(number) else "") + shown
    return text or "0"


# ------------------------------------------------------------------------------------------------ fitting


@torch.no_grad()
def formulas(model: Model, x: Tensor, functions: Iterable[str] | None = None, *, least: float = 0.99) -> Formulas:
    """Return for each edge the best of a closed list of functions, c f(a x + b) + d by least squares.

    Every function of the list is fitted: a and b are looked for on a grid and improved by damped Gauss–Newton steps together
    with c and d. The best is that with the least 2·complexity + log₂(1 − R² + 10⁻⁶): one that is more complex by one must leave
    a quarter of the variance that is not explained.

    Args:
        model: as in `edge_functions`. Edges that count little are best pruned first.
        x: inputs, at least two rows; the formulas hold in the range that these have.
        functions: names from `FUNCTIONS`; None: all of them.
        least: R² that an edge needs for the formula of the whole, 0 to 1.

    Source: `suggest_symbolic` of pykan (arXiv 2404.19756), which looks on a grid three times finer each time.

    Example:
        >>> import torch, kapsi as kp
        >>> from kapsi.zoo import kan
        >>> head = kp.HeadSpec(kp.Trigonometric(), remainder=kp.LinearRemainder())
        >>> model = kp.Model(kp.ModelSpec((2, 1), kp.LayerSpec(head)), dtype=torch.float64)
        >>> model.layers[0].heads[0].assign("reconciliation", matrix=[[0.0, 0.0, 3.0, 0.0, 0.0, 0.0]])    # 3 sin(x₁)
        >>> model.layers[0].heads[0].assign("remainder", matrix=[[0.0, -2.0]])
        >>> found = kan.formulas(model, torch.rand(100, 2, dtype=torch.float64) * 6)
        >>> print(found.text())
        y1 = 3*sin(x1) - 2*x2
    """
    names = FUNCTIONS if functions is None else _named(functions)
    least = coerce(float, least, "formulas(least)")
    if not 0 <= least <= 1:
        raise SpecError(f"formulas(least={least}): expected a number from 0 to 1")
    layers = edge_functions(model, x)
    if len(x) < 2:
        raise SpecError(f"formulas: expected at least two rows, got {len(x)}")
    edges = []
    for layer in layers:
        n, m = layer.values.shape[1:]
        edges.append(tuple(tuple(_best(layer, j, k, names) for k in range(m)) for j in range(n)))
    constants = tuple(tuple(layer.constant.tolist()) for layer in layers)
    return Formulas(tuple(edges), constants, least)


def _named(functions: Any) -> tuple[str, ...]:
    names = (functions,) if isinstance(functions, str) else tuple(functions)
    for name in names:
        if name not in _LIST:
            hint = did_you_mean(str(name), FUNCTIONS)
            raise SpecError(f"formulas: there is no function {name!r}; {hint}there are: {', '.join(FUNCTIONS)}")
    if not names:
        raise SpecError(f"formulas(functions=()): expected at least one of {', '.join(FUNCTIONS)}")
    return names


def _best(layer: Edges, j: int, k: int, names: Iterable[str]) -> Formula:
    """Return the best formula of the edge from node k to node j."""
    x, y = (values.to("cpu", torch.float64) for values in (layer.inputs[:, k], layer.values[:, j, k]))
    # What is a rounding step of its node varies by nothing.
    coarse = torch.finfo(layer.values.dtype).eps
    size = float(layer.values[:, j].abs().max())
    if float(y.std()) <= 16 * coarse * size or float(x.amax() - x.amin()) <= 16 * coarse * float(x.abs().max()):
        return Formula("0", 1.0, 0.0, 0.0, float(y.mean()), 1.0)
    found = [(_score(formula), formula) for name in names for formula in _fitted(name, x, y)]
    if not found:
        return Formula("0", 1.0, 0.0, 0.0, float(y.mean()), 0.0)
    return min(found, key=lambda each: each[0])[1]


def _score(formula: Formula) -> float:
    function = _LIST[formula.function]
    # A sine and a cosine are one function: the one with the smaller phase is taken.
    phase = SAME_PHASE * abs(formula.b) if function.search == "phase" else 0.0
    return 2 * function.complexity + math.log2(1 - min(1.0, formula.r2) + FLOOR) + phase


def _fitted(name: str, x: Tensor, y: Tensor) -> list[Formula]:
    """Return the best fit of a function to an edge; none where no numbers make it finite."""
    function = _LIST[name]
    center, half = (x.amax() + x.amin()) / 2, (x.amax() - x.amin()) / 2
    u, scale = (x - center) / half, y.std(correction=0)
    level = y.mean()
    v = (y - level) / scale
    order = u.argsort()
    some, several = (_spread(order, count) for count in (COARSE, FINE))
    a, b = _places(function)
    quality = _quality(function, u[some], v[some], a, b)
    top = quality.topk(min(STARTS, len(a))).indices
    top = top[quality[top] > -math.inf]
    if not len(top):
        return []
    numbers = _improved(function, u[several], v[several], a[top], b[top])
    values = numbers[:, 2:3] * function.value(numbers[:, :1] * u + numbers[:, 1:2]) + numbers[:, 3:4]
    left = (values - v).square().mean(1).nan_to_num(math.inf)
    place = int(left.argmin())
    if not math.isfinite(float(left[place])):
        return []
    a1, b1, c1, d1 = numbers[place].tolist()
    a1, b1 = a1 / float(half), b1 - a1 * float(center / half)
    c1, d1 = c1 * float(scale), d1 * float(scale) + float(level)
    a1, b1, c1, d1 = _normal(name, function, a1, b1, c1, d1)
    # What rounding leaves of a zero.
    b1 = b1 if abs(b1) > ROUNDING * abs(a1) * float(x.abs().max()) else 0.0
    d1 = d1 if abs(d1) > ROUNDING * float(y.abs().max()) else 0.0
    return [Formula(name, a1, b1, c1, d1, 1 - float(left[place]))]


def _spread(order: Tensor, count: int) -> Tensor:
    """Return at most so many rows, evenly chosen by their order."""
    if len(order) <= count:
        return order
    return order[torch.linspace(0, len(order) - 1, count, dtype=torch.float64).round().long()]


def _places(function: _Function) -> tuple[Tensor, Tensor]:
    """Return a and b where the search begins, for inputs in [−1, 1]."""
    kind = torch.float64
    scales = torch.logspace(-1, math.log10(25), 36, dtype=kind)
    one, zero = torch.ones(1, dtype=kind), torch.zeros(1, dtype=kind)
    if function.search == "none":
        return one, zero
    if function.search == "scale":
        a = torch.cat((scales, -scales))
        return a, torch.zeros_like(a)
    if function.search == "half-line":
        a, b = torch.meshgrid(
            torch.tensor([1.0, -1.0], dtype=kind), 1 + torch.logspace(-6, 2, 65, dtype=kind), indexing="ij"
        )
    elif function.search == "center":
        a, b = torch.meshgrid(one, torch.linspace(-4, 4, 161, dtype=kind), indexing="ij")
    elif function.search == "phase":
        fast = torch.arange(1, 101, dtype=kind) * 0.25
        a, b = torch.meshgrid(fast, torch.arange(12, dtype=kind) * (math.pi / 12), indexing="ij")
    elif function.search == "window":
        a, place = torch.meshgrid(
            torch.linspace(0.05, 1.56, 40, dtype=kind), torch.linspace(-0.99, 0.99, 21, dtype=kind), indexing="ij"
        )
        b = (math.pi / 2 - a) * place
    else:
        a, place = torch.meshgrid(scales, torch.linspace(-2, 2, 41, dtype=kind), indexing="ij")
        b = -a * place
    return a.flatten(), b.flatten()


def _quality(function: _Function, u: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return R² of c f(a u + b) + d with the best c and d, for each place; −∞ where it is not finite."""
    z = torch.outer(a, u) + b.unsqueeze(1)
    values = function.value(z)
    values = values - values.mean(1, keepdim=True)
    target = v - v.mean()
    spread = values.square().sum(1)
    r2 = (values @ target).square() / (spread * target.square().sum()).clamp_min(1e-300)
    return torch.where(_allowed(function, z) & r2.isfinite() & (spread > 0), r2, -math.inf)


def _allowed(function: _Function, z: Tensor) -> Tensor:
    low, high = function.domain
    return ((z > low) & (z < high)).all(-1)


def _improved(function: _Function, u: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return a, b, c, d `(starts, 4)` after damped Gauss–Newton steps from some a and b, all at once."""
    free_a, free_b = function.free
    numbers = torch.stack((a, b, torch.zeros_like(a), torch.zeros_like(a)), 1)
    numbers[:, 2:] = _outer(function.value(torch.outer(a, u) + b.unsqueeze(1)), v)
    damping = torch.full_like(a, 1e-3)
    best = _left(function, u, v, numbers)
    free = torch.tensor([free_a, free_b, True, True])
    for _ in range(STEPS if free_a or free_b else 0):
        z = numbers[:, :1] * u + numbers[:, 1:2]
        values, slopes = function.value(z), numbers[:, 2:3] * function.slope(z)
        jacobian = torch.stack((slopes * u, slopes, values, torch.ones_like(z)), -1) * free
        residual = numbers[:, 2:3] * values + numbers[:, 3:4] - v
        normal = (jacobian.mT @ jacobian / len(u)).nan_to_num(0, 0, 0)
        gradient = (jacobian.mT @ residual.unsqueeze(-1) / len(u)).nan_to_num(0, 0, 0)
        diagonal = normal.diagonal(dim1=-2, dim2=-1)
        ridge = damping.unsqueeze(1) * diagonal + 1e-12 * diagonal.amax(1, keepdim=True) + 1e-30
        step = torch.linalg.solve_ex(normal + torch.diag_embed(ridge), gradient).result.squeeze(-1)
        trial = numbers - step.nan_to_num(0, 0, 0)
        # c and d are the best ones for a and b always.
        outer = function.value(trial[:, :1] * u + trial[:, 1:2])
        trial[:, 2:] = _outer(outer, v)
        left = _left(function, u, v, trial)
        better = left < best
        numbers = torch.where(better.unsqueeze(1), trial, numbers)
        damping = torch.where(better, damping / 5, damping * 4).clamp(1e-12, 1e12)
        gain = torch.where(better, best - left, 0) > ENOUGH * best
        best = torch.where(better, left, best)
        # Those that have not moved have damping that is too small yet, or are there.
        waits = (damping < 1) & ~better
        if float(best.min()) < 1e-20 or not bool((gain | waits).any()):
            break
    return numbers


def _outer(values: Tensor, v: Tensor) -> Tensor:
    """Return c and d of least squares, `(starts, 2)`."""
    mean = values.mean(1, keepdim=True)
    centered = values - mean
    c = (centered @ (v - v.mean())) / centered.square().sum(1).clamp_min(1e-300)
    return torch.stack((c, v.mean() - c * mean.squeeze(1)), 1)


def _left(function: _Function, u: Tensor, v: Tensor, numbers: Tensor) -> Tensor:
    """Return the mean of squares that is left, ∞ where a number is not finite or an argument is out of the domain."""
    z = numbers[:, :1] * u + numbers[:, 1:2]
    left = (numbers[:, 2:3] * function.value(z) + numbers[:, 3:4] - v).square().mean(1)
    return torch.where(_allowed(function, z) & left.isfinite(), left, math.inf)


def _normal(
    name: str, function: _Function, a: float, b: float, c: float, d: float
) -> tuple[float, float, float, float]:
    """Return the same function in the form in which it is written: what can be is taken out of f."""
    size = abs(a)
    if function.power is not None:
        a, b = a / size, b / size
        if name == "log":
            d += c * math.log(size)
        else:
            c *= size**function.power
    if name == "exp" and abs(b) < 300:
        c, b = c * math.exp(b), 0.0
    if function.parity and a < 0:
        a, b, c = -a, -b, c * function.parity
    if name == "x":
        c, b, d = c * a, 0.0, d + c * b
        a = 1.0
    if function.search == "phase":
        turns = round(b / math.pi)
        b, c = b - turns * math.pi, -c if turns % 2 else c
    return a, b, c, d
