"""Formulas of the edges of a model of univariate functions, c f(a x + b) + d with f from a closed list."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from kapsi.errors import DataError, SpecError, check_choice, check_integer, check_number, refuse
from kapsi.interpret.edges import Edges, edge_functions
from kapsi.modules import Model, checked_rows

__all__ = ["FUNCTIONS", "EdgeFormula", "EdgeFormulas", "edge_formulas"]

Search: TypeAlias = Literal["none", "scale", "half-line", "center", "phase", "window", "both"]
"""Starting points of the search for a and b, for inputs in [−1, 1].

- none: a = 1, b = 0, both fixed.
- scale: a of both signs, b = 0 fixed.
- half-line: a = ±1, and b with a x + b positive for all inputs.
- center: a = 1, and b near the inputs.
- phase: a, and b as a part of a period.
- window: a x + b between −π/2 and π/2.
- both: a, and b with a zero of a x + b near the inputs.
"""


@dataclass(frozen=True)
class _EdgeFunction:
    """A candidate function of an edge.

    Attributes:
        text: template of the formula, with {} for the argument.
        complexity: cost in units; each unit must reduce the unexplained variance to a quarter.
        value: the function f.
        slope: the derivative f′.
        search: starting points.
        domain: allowed arguments.
        power: p of a function with f(s z) = s^p f(z) for s > 0; a is 1 or −1 then.
        parity: 1 for even, −1 for odd functions, else 0; a is positive for even and odd functions.
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
        """Return whether a and b are free."""
        return self.search in ("scale", "phase", "window", "both"), self.search not in ("none", "scale")


def _power(p: int, complexity: float) -> _EdgeFunction:
    search: Search = "none" if p == 1 else "center"
    text = "{}" if p == 1 else f"{{}}**{p}"
    return _EdgeFunction(
        text, complexity, lambda z: z**p, lambda z: p * z ** (p - 1), search, power=p, parity=1 if p % 2 == 0 else -1
    )


_FUNCTIONS: dict[str, _EdgeFunction] = {
    "x": _power(1, 1),
    "x^2": _power(2, 1.5),
    "x^3": _power(3, 2),
    "x^4": _power(4, 2.5),
    "exp": _EdgeFunction("exp({})", 2, torch.exp, torch.exp, "scale"),
    "log": _EdgeFunction("log({})", 2, torch.log, torch.reciprocal, "half-line", (0, math.inf), 0),
    "sqrt": _EdgeFunction("sqrt({})", 2, torch.sqrt, lambda z: 0.5 * z.rsqrt(), "half-line", (0, math.inf), 0.5),
    "1/x": _EdgeFunction("1/{}", 2, torch.reciprocal, lambda z: -(z**-2), "half-line", (0, math.inf), -1, -1),
    "1/x^2": _EdgeFunction("1/{}**2", 3, lambda z: z**-2, lambda z: -2 * z**-3, "half-line", (0, math.inf), -2, 1),
    "1/sqrt": _EdgeFunction("1/sqrt({})", 3, torch.rsqrt, lambda z: -0.5 * z**-1.5, "half-line", (0, math.inf), -0.5),
    "sin": _EdgeFunction("sin({})", 2.5, torch.sin, torch.cos, "phase", parity=-1),
    "cos": _EdgeFunction("cos({})", 2.5, torch.cos, lambda z: -torch.sin(z), "phase", parity=1),
    "tan": _EdgeFunction(
        "tan({})", 3, torch.tan, lambda z: 1 / torch.cos(z) ** 2, "window", (-math.pi / 2, math.pi / 2), parity=-1
    ),
    "tanh": _EdgeFunction("tanh({})", 3, torch.tanh, lambda z: 1 - torch.tanh(z) ** 2, "both", parity=-1),
    "arctan": _EdgeFunction("arctan({})", 3.5, torch.atan, lambda z: 1 / (1 + z**2), "both", parity=-1),
    "abs": _EdgeFunction("abs({})", 3, torch.abs, torch.sign, "center", power=1, parity=1),
    "gaussian": _EdgeFunction(
        "exp(-{}**2)", 3, lambda z: torch.exp(-z * z), lambda z: -2 * z * torch.exp(-z * z), "both", parity=1
    ),
}

FUNCTIONS: tuple[str, ...] = tuple(_FUNCTIONS)
"""Candidate functions of an edge; constant edges are recognized separately."""

COARSE, FINE = 128, 512
"""Rows of the grid search and of the refinement."""
STARTS = 5
"""Number of refined starting points."""
STEPS = 40
"""Largest number of Gauss–Newton steps."""
MIN_IMPROVEMENT = 1e-9
"""Relative change of the best residual that ends the steps."""
FLOOR = 1e-6
"""Share of variance treated as zero."""
PHASE_WEIGHT = 1e-3
ROUNDING = 1e-10


@dataclass(frozen=True)
class EdgeFormula:
    """The formula of an edge, c f(a x + b) + d.

    Attributes:
        function: name of f from `FUNCTIONS`, or `0` for a constant.
        a, b, c, d: coefficients, with constant factors and summands moved from f to c and d.
        r2: explained share of the edge's variance, at most 1; 1 for an edge without variance.
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
        return self.c * _FUNCTIONS[self.function].value(self.a * x + self.b) + self.d

    def text(self, x: str = "x", digits: int = 4) -> str:
        """Return the formula as a Python expression with NumPy functions."""
        return _sum([*_terms(self, x, digits), (self.d, "")], digits)


@dataclass(frozen=True)
class EdgeFormulas:
    """Formulas of all edges of a model.

    Attributes:
        edges: formulas by layer, output and input.
        constants: b of each layer, by output.
        least: R² required of each edge for the formula.
    """

    edges: tuple[tuple[tuple[EdgeFormula, ...], ...], ...]
    constants: tuple[tuple[float, ...], ...]
    least: float

    def missing(self) -> list[tuple[int, int, int, EdgeFormula]]:
        """Return the edges without a good formula: (layer, output, input, best formula)."""
        return [
            (i, j, k, edge)
            for i, layer in enumerate(self.edges)
            for j, node in enumerate(layer)
            for k, edge in enumerate(node)
            if edge.r2 < self.least
        ]

    def __call__(self, x: Tensor) -> Tensor:
        """Evaluate the formulas of all edges, good or not, at inputs `(..., m)`."""
        m = len(self.edges[0][0])
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() == 0 or x.shape[-1] != m:
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise DataError(f"EdgeFormulas: expected floating-point inputs of shape (..., {m}), got {shape}")
        for layer, constants in zip(self.edges, self.constants, strict=True):
            nodes = [
                torch.stack([edge(x[..., k]) for k, edge in enumerate(node)]).sum(0) + constant
                for node, constant in zip(layer, constants, strict=True)
            ]
            x = torch.stack(nodes, -1)
        return x

    def text(self, digits: int = 4, *, whole: bool = True) -> str:
        """Return the formula of each output as a Python expression with NumPy functions, one per line.

        Args:
            digits: significant digits of the constants, 1 to 17.
            whole: substitute hidden nodes, up to 10,000 characters in all. False, and longer formulas: a line for each hidden
                node, `h1_1 = …`, `h1_2 = …`.

        Raises:
            SpecError: an edge with R² below `least`.
        """
        digits = check_integer("EdgeFormulas.text(digits)", digits, 1, 17)
        missing = self.missing()
        if missing:
            i, j, k, edge = min(missing, key=lambda entry: entry[3].r2)
            raise SpecError(
                f"EdgeFormulas: {len(missing)} edges have no formula of R² ≥ {self.least:g}; the worst is in layer {i} from node "
                f"{k} to {j}, {edge.function!r} with {edge.r2:.4f}; train longer, prune, allow other functions, or lower `least`"
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
            sums = []
            for node, constant in zip(layer, constants, strict=True):
                terms = [term for name, edge in zip(names, node, strict=True) for term in _terms(edge, name, digits)]
                sums.append(_sum([*terms, (constant + sum(edge.d for edge in node), "")], digits))
            if inline and i < last:
                names = [f"({term})" for term in sums]
                if sum(map(len, names)) > LONGEST:
                    return [" " * (LONGEST + 1)]  # the next layer is even longer
                continue
            names = [f"{prefix}{j + 1}" for j in range(len(sums))]
            lines += [f"{name} = {value}" for name, value in zip(names, sums, strict=True)]
        return lines


LONGEST = 10_000
"""Largest number of characters of formulas with substituted hidden nodes."""


def _terms(edge: EdgeFormula, x: str, digits: int) -> list[tuple[float, str]]:
    """Return c f(a x + b) as pairs of factor and string; a linear function as two pairs."""
    if edge.function == "0" or edge.c == 0:
        return []
    if edge.function == "x":
        return [(edge.c * edge.a, x), (edge.c * edge.b, "")]
    inside = _sum([(edge.a, x), (edge.b, "")], digits)
    text = _FUNCTIONS[edge.function].text
    bare = inside == x and (x.isidentifier() or x.startswith("("))
    around = inside if bare or text.endswith("({})") else f"({inside})"
    return [(edge.c, text.format(around))]


def _sum(terms: Iterable[tuple[float, str]], digits: int) -> str:
    """Return the string of a sum of products of a factor and a string, empty for a plain number."""
    constant = sum(factor for factor, term in terms if not term)
    products = [(factor, term) for factor, term in terms if term]
    text = ""
    for factor, term in [*products, (constant, "")]:
        number = f"{abs(factor):.{digits}g}"
        if float(number) == 0 and (text or term):
            continue
        # The factor replaces the 1 of a quotient.
        product = number + term[1:] if term.startswith("1/") else f"{number}*{term}"
        shown = term if term and float(number) == 1 else product if term else number
        sign = "-" if factor < 0 else "+"
        text += f" {sign} {shown}" if text else ("-" if factor < 0 and float(number) else "") + shown
    return text or "0"


# ------------------------------------------------------------------------------------------------ fitting


@torch.no_grad()
def edge_formulas(
    model: Model, x: Tensor, functions: Iterable[str] | None = None, *, least: float = 0.99
) -> EdgeFormulas:
    """Fit c f(a x + b) + d to each edge by least squares and return the best f of a closed list.

    A grid search for a and b is refined by damped Gauss–Newton steps in all four coefficients. The best function has the smallest
    2·complexity + log₂(1 − R² + 10⁻⁶): each unit of complexity must reduce the unexplained variance to a quarter.

    Args:
        model: see `edge_functions`; best pruned first.
        x: inputs, at least two rows; the formulas are valid within their range.
        functions: names from `FUNCTIONS`; None: all.
        least: R² required of each edge to print the whole model as one formula, 0 to 1.

    Source: `suggest_symbolic` of pykan (arXiv 2404.19756), with a grid refined threefold in each pass.

    Example:
        >>> import torch, kapsi as kp
        >>> head = kp.HeadSpec(kp.Trigonometric(), remainder=kp.LinearRemainder())
        >>> model = kp.Model(kp.ModelSpec((2, 1), kp.LayerSpec(head)), dtype=torch.float64)
        >>> model.layers[0].heads[0].assign("reconciliation", matrix=[[0.0, 0.0, 3.0, 0.0, 0.0, 0.0]])    # 3 sin(x₁)
        >>> model.layers[0].heads[0].assign("remainder", matrix=[[0.0, -2.0]])
        >>> result = kp.interpret.edge_formulas(model, torch.rand(100, 2, dtype=torch.float64) * 6)
        >>> print(result.text())
        y1 = 3*sin(x1) - 2*x2
    """
    names = checked_functions(functions)
    least = check_number("edge_formulas(least)", least, 0, 1)
    layers = edge_functions(model, checked_rows(model, x, "edge_formulas", least=2))
    if any(layer.output is not None for layer in layers):
        raise SpecError("edge_formulas: outputs are processed by activations; kapsi.interpret.simplify includes these")
    edges = []
    for layer in layers:
        n, m = layer.values.shape[1:]
        edges.append(tuple(tuple(_best(layer, j, k, names) for k in range(m)) for j in range(n)))
    constants = tuple(tuple(layer.constant.tolist()) for layer in layers)
    return EdgeFormulas(tuple(edges), constants, least)


def checked_functions(functions: Any) -> tuple[str, ...]:
    """Return names of functions of edges, all for None."""
    if functions is None:
        return FUNCTIONS
    if not isinstance(functions, Iterable):
        refuse("edge_formulas(functions)", "names of functions", functions)
    names = (functions,) if isinstance(functions, str) else tuple(functions)
    if not names:
        raise SpecError(f"edge_formulas(functions): expected at least one of {', '.join(FUNCTIONS)}")
    return tuple(check_choice("edge_formulas(functions)", name, FUNCTIONS) for name in names)


def _best(layer: Edges, j: int, k: int, names: Iterable[str]) -> EdgeFormula:
    """Return the best formula of the edge from node k to node j."""
    # Variation by rounding of the node counts as zero.
    coarse = torch.finfo(layer.values.dtype).eps
    rounding = 16 * coarse * float(layer.values[:, j].abs().max())
    return fitted_edge(layer.inputs[:, k], layer.values[:, j, k], rounding, names)


def fitted_edge(x: Tensor, y: Tensor, rounding: float, names: Iterable[str], floor: float = FLOOR) -> EdgeFormula:
    """Return the best formula y = c f(a x + b) + d, a constant if the deviation of y is at most `rounding`.

    Args:
        x, y: inputs and values of the edge, (rows,).
        rounding: deviation of y that counts as zero.
        names: names from `FUNCTIONS`.
        floor: share of the variance of y treated as zero.
    """
    still = 16 * torch.finfo(x.dtype).eps * float(x.abs().max())
    x, y = x.to("cpu", torch.float64), y.to("cpu", torch.float64)
    if float(y.std()) <= rounding or float(x.amax() - x.amin()) <= still:
        return EdgeFormula("0", 1.0, 0.0, 0.0, float(y.mean()), 1.0)
    best, least = EdgeFormula("0", 1.0, 0.0, 0.0, float(y.mean()), 0.0), math.inf
    for name in sorted(names, key=lambda name: _FUNCTIONS[name].complexity):
        if 2 * _FUNCTIONS[name].complexity + math.log2(floor) >= least:
            break  # no error would be small enough
        formula = _fit(name, x, y)
        if formula is not None and (score := _score(formula, floor)) < least:
            best, least = formula, score
    return best


def _score(formula: EdgeFormula, floor: float) -> float:
    function = _FUNCTIONS[formula.function]
    # Sine and cosine are the same function: prefer the smaller phase.
    phase = PHASE_WEIGHT * abs(formula.b) if function.search == "phase" else 0.0
    return 2 * function.complexity + math.log2(1 - min(1.0, formula.r2) + floor) + phase


def _fit(name: str, x: Tensor, y: Tensor) -> EdgeFormula | None:
    """Return the best fit of a function to an edge; None without a finite fit."""
    function = _FUNCTIONS[name]
    center, half = (x.amax() + x.amin()) / 2, (x.amax() - x.amin()) / 2
    u, scale = (x - center) / half, y.std(correction=0)
    level = y.mean()
    v = (y - level) / scale
    order = u.argsort()
    coarse, fine = (_subsample(order, count) for count in (COARSE, FINE))
    a, b = _starting_points(function)
    quality = _quality(function, u[coarse], v[coarse], a, b)
    top = quality.topk(min(STARTS, len(a))).indices
    top = top[quality[top] > -math.inf]
    if not len(top):
        return None
    numbers = _refine(function, u[fine], v[fine], a[top], b[top])
    values = numbers[:, 2:3] * function.value(numbers[:, :1] * u + numbers[:, 1:2]) + numbers[:, 3:4]
    residual = (values - v).square().mean(1).nan_to_num(math.inf)
    best = int(residual.argmin())
    if not math.isfinite(float(residual[best])):
        return None
    a1, b1, c1, d1 = numbers[best].tolist()
    a1, b1 = a1 / float(half), b1 - a1 * float(center / half)
    c1, d1 = c1 * float(scale), d1 * float(scale) + float(level)
    a1, b1, c1, d1 = _normalize(name, function, a1, b1, c1, d1)
    # Rounding errors of zeros.
    b1 = b1 if abs(b1) > ROUNDING * abs(a1) * float(x.abs().max()) else 0.0
    d1 = d1 if abs(d1) > ROUNDING * float(y.abs().max()) else 0.0
    return EdgeFormula(name, a1, b1, c1, d1, 1 - float(residual[best]))


def _subsample(order: Tensor, count: int) -> Tensor:
    """Return at most `count` rows, evenly spaced in the order."""
    if len(order) <= count:
        return order
    return order[torch.linspace(0, len(order) - 1, count, dtype=torch.float64).round().long()]


def _starting_points(function: _EdgeFunction) -> tuple[Tensor, Tensor]:
    """Return the starting points a and b of the search, for inputs in [−1, 1]."""
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
        a, position = torch.meshgrid(
            torch.linspace(0.05, 1.56, 40, dtype=kind), torch.linspace(-0.99, 0.99, 21, dtype=kind), indexing="ij"
        )
        b = (math.pi / 2 - a) * position
    else:
        a, position = torch.meshgrid(scales, torch.linspace(-2, 2, 41, dtype=kind), indexing="ij")
        b = -a * position
    return a.flatten(), b.flatten()


def _quality(function: _EdgeFunction, u: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return R² of c f(a u + b) + d with the best c and d, for each starting point; −∞ if not finite."""
    z = torch.outer(a, u) + b.unsqueeze(1)
    values = function.value(z)
    values = values - values.mean(1, keepdim=True)
    target = v - v.mean()
    variation = values.square().sum(1)
    r2 = (values @ target).square() / (variation * target.square().sum()).clamp_min(1e-300)
    return torch.where(_allowed(function, z) & r2.isfinite() & (variation > 0), r2, -math.inf)


def _allowed(function: _EdgeFunction, z: Tensor) -> Tensor:
    low, high = function.domain
    return ((z > low) & (z < high)).all(-1)


def _refine(function: _EdgeFunction, u: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return a, b, c, d `(starts, 4)` after damped Gauss–Newton steps from each starting point."""
    free_a, free_b = function.free
    numbers = torch.stack((a, b, torch.zeros_like(a), torch.zeros_like(a)), 1)
    numbers[:, 2:] = _least_squares(function.value(torch.outer(a, u) + b.unsqueeze(1)), v)
    damping = torch.full_like(a, 1e-3)
    best = _residual(function, u, v, numbers)
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
        # c and d are always optimal for a and b.
        inner = function.value(trial[:, :1] * u + trial[:, 1:2])
        trial[:, 2:] = _least_squares(inner, v)
        loss = _residual(function, u, v, trial)
        better = loss < best
        numbers = torch.where(better.unsqueeze(1), trial, numbers)
        damping = torch.where(better, damping / 5, damping * 4).clamp(1e-12, 1e12)
        gain = torch.where(better, best - loss, 0) > MIN_IMPROVEMENT * best
        best = torch.where(better, loss, best)
        # Starts without a step need more damping, or have converged.
        waits = (damping < 1) & ~better
        if float(best.min()) < 1e-20 or not bool((gain | waits).any()):
            break
    return numbers


def _least_squares(values: Tensor, v: Tensor) -> Tensor:
    """Return the least-squares c and d, `(starts, 2)`."""
    mean = values.mean(1, keepdim=True)
    centered = values - mean
    c = (centered @ (v - v.mean())) / centered.square().sum(1).clamp_min(1e-300)
    return torch.stack((c, v.mean() - c * mean.squeeze(1)), 1)


def _residual(function: _EdgeFunction, u: Tensor, v: Tensor, numbers: Tensor) -> Tensor:
    """Return the mean squared residual; ∞ for values that are not finite or arguments outside the domain."""
    z = numbers[:, :1] * u + numbers[:, 1:2]
    loss = (numbers[:, 2:3] * function.value(z) + numbers[:, 3:4] - v).square().mean(1)
    return torch.where(_allowed(function, z) & loss.isfinite(), loss, math.inf)


def _normalize(
    name: str, function: _EdgeFunction, a: float, b: float, c: float, d: float
) -> tuple[float, float, float, float]:
    """Return the same function in normal form, with factors and summands moved from f to c and d."""
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
