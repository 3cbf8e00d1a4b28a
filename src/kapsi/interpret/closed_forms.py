"""Closed forms of models: heads of linear, polynomial, trigonometric, spline and tree expansions, in any number of layers."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import sympy
import torch
from torch import Tensor

from kapsi.errors import FormulaError
from kapsi.expansion import Expansion, Extended, Nested, Processed, SelectedInputs
from kapsi.expansion.spline import BSpline
from kapsi.expansion.tree import TreeLeaves
from kapsi.fusion import Mean, Sum
from kapsi.hidden_layers import Layers
from kapsi.interpret.tracing import Array, traced
from kapsi.modules import Head, Model
from kapsi.remainder import ZeroRemainder

MOST_WEIGHTS = 200_000
"""Largest number of weights of a head, outputs times columns."""
MOST_LEAVES = 5_000
"""Largest number of leaves of a head of trees."""


def model_expressions(model: Model, inputs: Array) -> Array:
    """Return the outputs of a model as expressions, (n,).

    Args:
        model: the model; computed in float64, in evaluation mode.
        inputs: the expressions of the inputs, (m,).

    Raises:
        FormulaError: a function without a closed form.
    """
    model = copy.deepcopy(model).to("cpu", torch.float64).eval().requires_grad_(False)
    return _of_model(model, inputs)


def _of_model(model: Model, inputs: Array) -> Array:
    layers: Any = model.layers
    for i, layer in enumerate(layers):
        outputs = [_of_head(head, inputs) for head in layer.check_heads(f"layers[{i}]")]
        fusion = layer.spec.fusion
        if isinstance(fusion, Sum | Mean):
            inputs = np.array([sympy.Add(*parts) for parts in zip(*outputs, strict=True)], dtype=object)
            inputs = inputs / len(outputs) if isinstance(fusion, Mean) and len(outputs) > 1 else inputs
        else:
            fused = functools.partial(_fused, layer, len(outputs))
            inputs = traced(fused, np.concatenate(outputs), fusion.name)
        for step, process in zip(layer.output, layer.spec.output, strict=True):
            inputs = traced(step, inputs, process.name)
    return inputs


def _fused(layer: Any, count: int, outputs: Tensor) -> Tensor:
    fused: Tensor = layer.spec.fusion(outputs.unflatten(-1, (count, -1)).movedim(-2, 0), layer.fusion)
    return fused


def _of_head(head: Head, inputs: Array) -> Array:
    """Return the outputs of a head."""
    spec, owner = head.spec, head._owner[0] if head._owner else head
    if not isinstance(spec.fusion, Sum):
        raise FormulaError(f"formula: channels fused by {spec.fusion.name} have no closed form")
    weights = (
        head.weights().dense().sum(0) if spec.channels > 1 else head.weights().dense().reshape(head.out_features, -1)
    )
    matrix = weights.numpy()
    if matrix.size > MOST_WEIGHTS:
        raise FormulaError(
            f"formula: {spec.expansion.name} has {matrix.size:,} weights, at most {MOST_WEIGHTS:,} make a formula"
        )
    x = inputs
    for step, process in zip(owner.before, spec.before, strict=True):
        x = traced(step, x, process.name)
    if spec.after:
        columns = contracted(spec.expansion, x, owner.kappa, np.eye(matrix.shape[1]))
        for step, process in zip(owner.after, spec.after, strict=True):
            columns = traced(step, columns, process.name)
        outputs = _product(matrix, columns)
    else:
        outputs = contracted(spec.expansion, x, owner.kappa, matrix)
    if not isinstance(spec.remainder, ZeroRemainder):
        outputs = outputs + traced(head.remainder, inputs, spec.remainder.name)
    if head.bias is not None:
        outputs = outputs + np.array([sympy.Float(b) for b in head.bias.tolist()], dtype=object)
    return outputs


def contracted(expansion: Expansion, x: Array, tensors: Any, matrix: Any) -> Array:
    """Return W κ(x) as expressions, (n,).

    Args:
        expansion: κ.
        x: expressions of the inputs, (m,).
        tensors: the tensors of κ.
        matrix: W, (n, D) numbers.
    """
    if isinstance(expansion, SelectedInputs):
        return contracted(expansion.expansion, x[tensors["selection"].numpy()], tensors["expansion"], matrix)
    if isinstance(expansion, Extended):
        parts = expansion.processed_parts
        sizes = np.cumsum([0, *(part.out_features(len(x)) for part in parts)])
        pieces = [
            contracted(part, x, tensors[str(i)], matrix[:, sizes[i] : sizes[i + 1]]) for i, part in enumerate(parts)
        ]
        return np.array([sympy.Add(*row) for row in zip(*pieces, strict=True)], dtype=object)
    if isinstance(expansion, Nested):
        *inner, last = expansion.processed_parts
        for i, part in enumerate(inner):
            x = contracted(part, x, tensors[str(i)], np.eye(part.out_features(len(x))))
        return contracted(last, x, tensors[str(len(inner))], matrix)
    if isinstance(expansion, Processed):
        for name, steps in (("before", expansion.before), ("after", expansion.after)):
            if name == "after":
                count = expansion.expansion.out_features(len(x))
                x = contracted(expansion.expansion, x, tensors["expansion"], np.eye(count) if steps else matrix)
            for step, process in zip(tensors[name] if steps else (), steps, strict=True):
                x = traced(step, x, process.name)
        return _product(matrix, x) if expansion.after else x
    if isinstance(expansion, Layers):
        return _product(matrix, _of_model(tensors["model"], x))
    if isinstance(expansion, BSpline):
        return np.array([sympy.Add(*_splines(expansion, x, tensors, row)) for row in matrix], dtype=object)
    if isinstance(expansion, TreeLeaves):
        return _trees(expansion, x, tensors, matrix)
    columns = traced(lambda t: expansion(t, tensors).dense(), x, expansion.name)
    return _product(matrix, columns)


def _product(matrix: Any, columns: Array) -> Array:
    terms = [[sympy.Float(w) * c for w, c in zip(row, columns, strict=True) if w != 0] for row in matrix.tolist()]
    return np.array([sympy.Add(*row) for row in terms], dtype=object)


# ------------------------------------------------------------------------------------------------ splines


def _splines(spline: BSpline, x: Array, tensors: Any, row: Any) -> Iterator[sympy.Expr]:
    """Yield the spline of each input as a piecewise polynomial."""
    weights = torch.from_numpy(np.ascontiguousarray(row)).unflatten(-1, spline.factors(len(x)))
    degree, count = spline.degree, spline.intervals
    if spline.knots == "uniform":
        low, high = tensors["range"].numpy()
        outer = degree if spline.extrapolation == "extended" else 0
        steps = np.arange(-outer, count + outer + 1)[:, None]
        knots = low + (high - low) * steps / count
    else:
        knots = tensors["knots"].numpy()
        knots = knots if spline.extrapolation == "extended" else knots[degree : degree + count + 1]

    def values(i: int, points: Any) -> Any:
        full = torch.zeros(len(points), len(x), dtype=torch.float64)
        full[:, i] = torch.from_numpy(points)
        columns = spline.clamped()(full, tensors).dense().unflatten(-1, weights.shape)
        return (columns[..., i] @ weights[:, i]).numpy()

    for i, expression in enumerate(x):
        if bool((weights[:, i] == 0).all()):
            continue
        yield _piecewise(spline, expression, knots[:, i], functools.partial(values, i))


def _piecewise(spline: BSpline, x: sympy.Expr, knots: Any, values: Callable[[Any], Any]) -> sympy.Expr:
    """Return a spline as a polynomial in x − knot for each interval."""
    pieces: list[tuple[Any, Any]] = []
    scale, shift, variable = _affine(x)
    distinct = [(a, b) for a, b in itertools.pairwise(knots) if b > a]
    polynomials = []
    for a, b in distinct:
        nodes = (1 - np.cos(np.pi * (np.arange(spline.degree + 1) + 0.5) / (spline.degree + 1))) / 2
        inside = values(a + (b - a) * nodes)
        powers = np.linalg.solve(np.vander(nodes, increasing=True), inside) / (b - a) ** np.arange(spline.degree + 1)
        polynomials.append((a, b, powers))
        ends = sympy.Float((b - shift) / scale)
        pieces.append(
            (
                _polynomial(variable, scale, (a - shift) / scale, powers),
                variable < ends if scale > 0 else variable > ends,
            )
        )
    begin, end = _beyond(spline, variable, scale, shift, polynomials)
    low, high = (sympy.Float((v - shift) / scale) for v in (distinct[0][0], distinct[-1][1]))
    first = (begin, variable < low if scale > 0 else variable > low)
    inner = [*pieces[:-1], (pieces[-1][0], sympy.Le(variable, high) if scale > 0 else sympy.Ge(variable, high))]
    return sympy.Piecewise(first, *inner, (end, True))


def _beyond(spline: BSpline, x: Any, scale: float, shift: float, polynomials: Any) -> tuple[Any, Any]:
    """Return the expressions below and above the range."""
    if spline.extrapolation in ("zero", "extended"):
        return sympy.Integer(0), sympy.Integer(0)
    ends: list[sympy.Expr] = []
    for a, b, powers in (polynomials[0], polynomials[-1]):
        at = a if not ends else b
        orders = np.arange(len(powers))
        value = float((powers * (at - a) ** orders).sum())
        slope = float((powers[1:] * orders[1:] * (at - a) ** (orders[1:] - 1)).sum())
        line = [value, slope] if spline.extrapolation == "linear" and spline.degree else [value]
        ends.append(_polynomial(x, scale, (at - shift) / scale, np.array(line)))
    return ends[0], ends[1]


def _polynomial(x: Any, scale: float, origin: float, powers: Any) -> sympy.Expr:
    """Return Σ powers[k] (scale (x − origin))ᵏ."""
    step = x - sympy.Float(origin) if origin else x
    return sympy.Add(*[sympy.Float(float(p) * scale**k) * step**k for k, p in enumerate(powers)])


def _affine(x: sympy.Expr) -> tuple[float, float, sympy.Expr]:
    """Return a, b and v of x = a v + b with a symbol v, and 1, 0, x for other expressions."""
    if len(x.free_symbols) == 1 and not x.is_Symbol:
        (symbol,) = x.free_symbols
        slope = sympy.diff(x, symbol)
        if slope.is_number and slope != 0:
            return float(slope), float(x.subs(symbol, 0)), symbol
    return 1.0, 0.0, x


# ------------------------------------------------------------------------------------------------ trees


def _trees(expansion: TreeLeaves, x: Array, tensors: Any, matrix: Any) -> Array:
    """Return the sums of the values of the leaves."""
    if expansion.leaves > MOST_LEAVES:
        raise FormulaError(
            f"formula: TreeLeaves has {expansion.leaves:,} leaves, at most {MOST_LEAVES:,} make a formula; fit a smaller model"
        )
    splits = expansion.leaves - expansion.trees
    feature, threshold = tensors["feature"].tolist(), tensors["threshold"].tolist()
    branches = tensors["branches"].T.tolist()
    affine = [_affine(e) for e in x]

    def node(k: int, row: Any) -> sympy.Expr:
        if k >= splits:
            return sympy.Float(float(row[k - splits]))
        scale, shift, variable = affine[feature[k]]
        end = sympy.Float((threshold[k] - shift) / scale)
        condition = sympy.Le(variable, end) if scale > 0 else sympy.Ge(variable, end)
        left, right = (node(child, row) for child in branches[k])
        return left if left == right else sympy.Piecewise((left, condition), (right, True), evaluate=False)

    return np.array(
        [sympy.Add(*[node(root, row) for root in tensors["roots"].tolist()]) for row in matrix], dtype=object
    )
