"""Simplified formulas of models of univariate functions: every edge becomes an elementary function, constants are refitted."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy
import torch
from torch import Tensor

from kapsi.clock import Stopwatch
from kapsi.errors import DataError, SpecError, check_number
from kapsi.interpret.class_formulas import noise_of_logits
from kapsi.interpret.edge_fits import FLOOR, EdgeFormula, checked_functions, fitted_edge
from kapsi.interpret.edges import Edges, edge_functions, shares_of
from kapsi.interpret.expressions import Floats, evaluate
from kapsi.interpret.formulas import ModelFormula, check_columns, class_outputs, input_scales, unscaled, valid_range
from kapsi.interpret.rows import ModelRows, model_rows
from kapsi.interpret.search.constants import (
    NODE,
    SearchRows,
    cost_of_structure,
    encoded,
    fit,
    leave_one_out,
    simplify_constants,
)
from kapsi.interpret.tracing import traced

__all__ = ["Simplified", "SimplifiedEdge", "simplify"]

MOST_EDGES = 400
MOST_CONSTANTS = 60
"""Largest number of constants that are refitted together."""
MOST_ROWS = 1000
IGNORED = 20.0
"""Misfit of an edge, in squared standard errors of a mean of the targets, that costs less than a further constant."""
DEPENDENT = 1e-10
"""Ridge of the factors of terms: of dependent terms, one after the other is dropped."""
SYMBOLIC: dict[str, Any] = {
    "x": lambda z: z,
    "x^2": lambda z: z**2,
    "x^3": lambda z: z**3,
    "x^4": lambda z: z**4,
    "exp": sympy.exp,
    "log": sympy.log,
    "sqrt": sympy.sqrt,
    "1/x": lambda z: 1 / z,
    "1/x^2": lambda z: z**-2,
    "1/sqrt": lambda z: 1 / sympy.sqrt(z),
    "sin": sympy.sin,
    "cos": sympy.cos,
    "tan": sympy.tan,
    "tanh": sympy.tanh,
    "arctan": sympy.atan,
    "abs": sympy.Abs,
    "gaussian": lambda z: sympy.exp(-(z**2)),
}
"""Functions of an edge by their names in `FUNCTIONS`."""


@dataclass(frozen=True)
class SimplifiedEdge:
    """An edge and its elementary function.

    Attributes:
        layer: index of the layer.
        input, output: indices of its nodes.
        function: the formula; its `r2` is the explained share of the variance of the edge.
        share: importance of the edge, as in `attribution`.
    """

    layer: int
    input: int
    output: int
    function: EdgeFormula
    share: float


@dataclass(frozen=True)
class Simplified:
    """A simplified formula of a model.

    Attributes:
        formula: the formula of each output, with refitted constants and without the dropped terms.
        edges: the edges of the model with their functions before refitting.
        r2: explained share of the variance of the outputs of the model, for each output.
        target_r2: explained share of the variance of the targets, None without targets.
    """

    formula: ModelFormula
    edges: tuple[SimplifiedEdge, ...]
    r2: Mapping[str, float]
    target_r2: Mapping[str, float] | None

    def text(self, digits: int = 4) -> str:
        """Return a line `output = expression` for each output."""
        return self.formula.text(digits)

    def __repr__(self) -> str:
        lines = [
            f"layer {e.layer}  {e.input} → {e.output}  {e.function.function:<8}  R² {e.function.r2:.6f}"
            for e in self.edges
        ]
        lines += [f"{name}: R² {r2:.6f}" for name, r2 in self.r2.items()]
        return "\n".join([*lines, self.text()])


def simplify(
    model: Any, data: Any = None, *, functions: Iterable[str] | None = None, seconds: float = 60.0
) -> Simplified:
    """Return a short formula of a model of univariate functions.

    Every edge is replaced by the best c f(a x + b) + d with f from a list (see `edge_formulas`), its R² is reported. Then all
    constants of an output are refitted together by least squares, to the outputs of the model or to targets; terms are dropped
    and constants become simple numbers (0, fractions, multiples of π, square roots) if this shortens the description: half the
    number of rows times the logarithm of the error, plus the cost of numbers, operations and constants. Targets and logits of
    classes have noise: misfits far below it are no reason for a longer formula.

    Args:
        model: a `kp.Model`, a run of `kp.load_run`, or a fitted estimator, of sums of univariate functions of any expansion, see
            `edge_functions`.
        data: rows x, or (x, y) with targets, as for `kapsi.interpret.prune`; the formula is valid in their range.
        functions: names from `kapsi.interpret.FUNCTIONS`; None: all.
        seconds: time after which edges, the least important last, get the first of the functions, and constants stay as they are.

    Raises:
        SpecError: a model that mixes inputs, of more than 400 edges, or unknown functions.
        FormulaError: a column of texts or images.

    Example:
        >>> import torch, kapsi as kp
        >>> model = kp.Model(kp.rpn([2, 1], kp.Chebyshev(7), bias=True), seed=0, dtype=torch.float64)
        >>> x = torch.rand(300, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1
        >>> y = torch.exp(x[:, :1]) + 3 * torch.sin(2 * x[:, 1:])
        >>> records = kp.fit(model, (x, y), epochs=20)
        >>> print(kp.interpret.simplify(model, x).text())
        y = exp(x1) + 3*sin(2*x2)
    """
    names = checked_functions(functions)
    clock = Stopwatch(check_number("simplify(seconds)", seconds, 0, math.inf))
    task = model_rows(model, data, "simplify")
    if task.table is not None:
        check_columns(task.table.preprocessing)
    chosen = torch.linspace(0, len(task.x) - 1, min(len(task.x), MOST_ROWS)).long()
    x = task.x[chosen]
    layers = edge_functions(task.model, x)
    count = sum(layer.values.shape[1] * layer.values.shape[2] for layer in layers)
    if count > MOST_EDGES:
        raise SpecError(f"simplify: {count:,} edges, at most {MOST_EDGES} are simplified; prune the model first")
    symbols, raw, layers, outputs = _in_units(task, layers)
    nodes, start = list(symbols), dict[sympy.Symbol, float]()
    known = layers[-1].outputs().double().cpu().numpy()
    targets = _targets(task, chosen)
    noise = _noise(task, known, targets)
    edges = _edges(layers, noise, names, clock)
    for number, layer in enumerate(layers):
        nodes = _snapped(layer, nodes, start, [edge.function for edge in edges if edge.layer == number])
    rows = {symbol: raw[chosen.numpy(), i] for i, symbol in enumerate(symbols)}
    expressions, r2, target_r2 = {}, {}, {}
    for k, (name, transform) in enumerate(outputs.items()):
        goal = known[:, k] if targets is None else targets[:, k]
        unseen = noise[k] if noise is not None and targets is None else 0.0
        expression = _refitted(nodes[k], start, rows, goal, float(unseen), clock)
        values = np.broadcast_to(evaluate(expression, rows), goal.shape)
        r2[name] = _r2(values, known[:, k])
        if targets is not None:
            target_r2[name] = _r2(values, goal)
        expressions[name] = transform(expression)
    notes = () if task.table is None else tuple(valid_range(task.table))
    return Simplified(ModelFormula(expressions, symbols, notes), tuple(edges), r2, target_r2 or None)


def _r2(values: Floats, goal: Floats) -> float:
    variance = float(goal.var())
    return 1 - float(np.mean((values - goal) ** 2)) / variance if variance else 1.0


def _in_units(task: ModelRows, layers: list[Edges]) -> tuple[Any, Floats, list[Edges], dict[str, Any]]:
    """Return symbols and values of the inputs in the units of the columns, layers in these units, and the outputs.

    The last item maps names of outputs to functions that end a formula. Classes: log odds of two, else logits minus their mean.
    """
    if task.table is None:
        symbols = tuple(sympy.Symbol(f"x{i + 1}", real=True) for i in range(task.x.shape[1]))
        names = list(task.seen.outputs)
        return symbols, task.x.double().cpu().numpy(), layers, dict.fromkeys(names, lambda e: e)
    table = task.table
    symbols = tuple(sympy.Symbol(name, real=True) for name in table.preprocessing.names())
    raw, scales = task.x.double().cpu().numpy().copy(), input_scales(table.preprocessing)
    first = layers[0].inputs.double().clone()
    for i, pair in enumerate(scales):
        if pair is not None:
            raw[:, i] = raw[:, i] * pair[1] + pair[0]
            first[:, i] = first[:, i] * pair[1] + pair[0]
    layers = [layers[0]._replace(inputs=first), *layers[1:]]
    last = layers[-1]
    if last.output is not None and not bool(torch.isclose(last.outputs(), last.sums()).all()):
        raise SpecError("simplify: the outputs are processed by other steps than limits that no row reaches")
    last = last._replace(output=None)
    if table.classes is not None:
        values, constant = last.values, last.constant
        if len(table.classes) == 2:
            last = last._replace(values=values[:, 1:] - values[:, :1], constant=constant[1:] - constant[:1])
        else:
            last = last._replace(values=values - values.mean(1, keepdim=True), constant=constant - constant.mean())
        outputs = dict.fromkeys(class_outputs(table), lambda e: e)
    else:
        outputs, scale = {}, table.scale
        if scale is not None and scale.transform == "none":
            center, width = (torch.as_tensor(v).to(last.constant).reshape(-1) for v in (scale.center, scale.scale))
            last = last._replace(values=last.values * width[:, None], constant=last.constant * width + center)
            scale = None
        for k, name in enumerate(table.targets):
            outputs[name] = functools.partial(unscaled, scale=scale, index=k)
    return symbols, raw, [*layers[:-1], last], outputs


def _edges(layers: list[Edges], noise: Floats | None, names: tuple[str, ...], clock: Stopwatch) -> list[SimplifiedEdge]:
    """Return the edges with their functions, by layer, output and input; the most important ones are fitted first."""
    shares = shares_of(layers).edges
    found = []
    for number, layer in enumerate(layers):
        node, edge = layer.sums().var(0), layer.values.var(0)
        ignored = FLOOR * node  # variance that counts as zero
        if noise is not None and number == len(layers) - 1 and layer.output is None:
            ignored = torch.maximum(ignored, torch.from_numpy(noise).to(node) * IGNORED / len(layer.inputs))
        floors = (ignored[:, None] / edge).nan_to_num(FLOOR).clamp(FLOOR, 1e12)
        sizes = 16 * torch.finfo(edge.dtype).eps * layer.values.abs().amax((0, 2))
        for o, i in itertools.product(*map(range, edge.shape)):
            found.append((float(shares[number][o, i]), number, i, o, float(sizes[o]), float(floors[o, i])))
    fitted = {}
    for share, number, i, o, rounding, floor in sorted(found, reverse=True):
        x, y = layers[number].inputs[:, i], layers[number].values[:, o, i]
        allowed = names[:1] if clock.over() else names
        fitted[number, o, i] = SimplifiedEdge(number, i, o, fitted_edge(x, y, rounding, allowed, floor), share)
    return [fitted[key] for key in sorted(fitted)]


def _snapped(
    layer: Edges, inputs: list[sympy.Expr], start: dict[sympy.Symbol, float], functions: Iterable[EdgeFormula]
) -> list[sympy.Expr]:
    """Return the outputs of a layer as expressions with symbols for constants, added to `start`.

    Args:
        layer: the edges.
        inputs: expressions of the inputs.
        start: values of the symbols.
        functions: of the edges, by output and input.
    """

    def constant(value: float) -> sympy.Expr:
        if value in (0.0, 1.0, -1.0):
            return sympy.Integer(int(value))
        symbol = sympy.Dummy(f"c{len(start)}")
        start[symbol] = value
        return symbol

    nodes, edges = [], iter(functions)
    for rest in layer.constant.tolist():
        terms = []
        for node, edge in zip(inputs, edges, strict=False):
            rest += edge.d
            if edge.function == "x":
                terms.append(constant(edge.c * edge.a) * node)
                rest += edge.c * edge.b
            elif edge.function != "0":
                terms.append(constant(edge.c) * SYMBOLIC[edge.function](constant(edge.a) * node + constant(edge.b)))
        nodes.append(sympy.Add(*terms, constant(rest)))
    if layer.output is not None:
        nodes = list(traced(layer.output, np.array(nodes, dtype=object), "processing of the outputs"))
    return nodes


def _refitted(
    expression: sympy.Expr,
    start: Mapping[sympy.Symbol, float],
    values: Mapping[Any, Floats],
    goal: Floats,
    noise: float,
    clock: Stopwatch,
) -> sympy.Expr:
    """Return an expression with refitted constants, fewer terms and simple numbers."""
    own = _constants_of(expression, start)
    variance = float(goal.var())
    if not variance:
        return sympy.Float(float(goal.mean()))
    rows = SearchRows(tuple(values), np.stack(list(values.values()), 1), goal, variance, noise)
    expression = _without_terms(expression, own, rows)
    own = _constants_of(expression, own)
    best = fit(rows, expression, own) if len(own) <= MOST_CONSTANTS else None
    if best is None:
        return expression.xreplace({symbol: sympy.Float(value) for symbol, value in own.items()})
    return simplify_constants(rows, best, clock).filled()


def _constants_of(expression: sympy.Expr, start: Mapping[sympy.Symbol, float]) -> dict[sympy.Symbol, float]:
    """Return the constants in an expression with their values."""
    used = expression.free_symbols
    return {symbol: value for symbol, value in start.items() if symbol in used}


def _without_terms(expression: sympy.Expr, start: Mapping[sympy.Symbol, float], rows: SearchRows) -> sympy.Expr:
    """Return a sum without the terms that cost more than they explain; their factors are refitted, their arguments are not."""
    terms = [term for term in sympy.Add.make_args(expression) if term.has(*rows.symbols)]
    rest = expression - sympy.Add(*terms)
    known = {**rows.values(), **start}
    columns = np.stack([np.broadcast_to(evaluate(t, known), rows.y.shape) for t in terms] or [np.zeros_like(rows.y)], 1)
    if not np.isfinite(columns).all():
        return expression
    columns = columns - columns.mean(0)
    columns /= np.maximum(np.linalg.norm(columns, axis=0), 1e-300)
    matrix = np.vstack([columns, DEPENDENT * np.eye(columns.shape[1])])
    goal = np.append(rows.y - rows.y.mean(), np.zeros(columns.shape[1]))
    structure = np.array([cost_of_structure(term) + NODE for term in terms])
    uses = np.array([[symbol in term.free_symbols for symbol in start] for term in terms])
    kept = list(range(len(terms)))
    while len(kept) > 1:
        error, increases = leave_one_out(matrix[:, kept], goal)
        users, total = uses[kept].sum(0), float(structure[kept].sum())
        free, own = int((users > 0).sum()), (uses[kept] & (users == 1)).sum(1)
        trials = [
            encoded(rows, (error + increases[j]) / len(rows.y), total - structure[k], free - int(own[j]))
            for j, k in enumerate(kept)
        ]
        smallest = int(np.argmin(trials))
        if trials[smallest] > encoded(rows, error / len(rows.y), total, free):
            break
        del kept[smallest]
    return rest + sympy.Add(*[terms[k] for k in kept])


def _noise(task: ModelRows, known: Floats, targets: Floats | None) -> Floats | None:
    """Return the variance of the noise of each output; None for values without targets."""
    if targets is not None:
        return np.asarray(np.mean((targets - known) ** 2, axis=0))
    of_classes = task.table.classes is not None if task.table is not None else task.y is not None
    return noise_of_logits(known) if of_classes else None


def _targets(task: ModelRows, chosen: Tensor) -> Floats | None:
    """Return the targets in the unit of the formulas before their last function; None for classes and without targets."""
    if task.y is None or not task.y.is_floating_point():
        return None
    if not bool(task.y.isfinite().all()):
        raise DataError("simplify: the targets must be finite; drop the rows without a target")
    y = np.asarray(task.y[chosen].double().cpu().numpy())
    scale = None if task.table is None else task.table.scale
    return y * np.asarray(scale.scale) + np.asarray(scale.center) if scale and scale.transform == "none" else y
