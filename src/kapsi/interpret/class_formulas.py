"""Short formulas for classes: log-odds of two classes, a logit for each of several.

A search fits formulas to the logits of the model; their constants are refitted to the classes of the rows by maximum likelihood.
The best compromise has the shortest description: the log loss of all rows plus the costs of numbers, operations and constants.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import sympy
import torch
from torch import Tensor

from kapsi.clock import Stopwatch
from kapsi.interpret.expressions import Floats, complexity, evaluate, slope
from kapsi.interpret.search import search_formula
from kapsi.interpret.search.constants import NODE, with_constants
from kapsi.training.losses import CrossEntropy
from kapsi.training.selection import clearly_worse

MAX_CLASSES = 10
LOSS = CrossEntropy()
STEPS, FAR = 30, 30.0
"""Largest number of steps of the refit, and the largest logit: classes that a formula separates have no finite optimum."""
SEARCHED = 0.8
"""Share of the time for searches; the rest is for the refits to classes."""
MOST_LEVELS = 12
"""Largest number of compared complexities of formulas of several classes."""


class ClassFormula(NamedTuple):
    """Formulas of the logits and their errors on the rows.

    Attributes:
        expressions: log-odds of the second of two classes, or the logit of each class.
        complexity: number of numbers, variables and operations of all.
        log_loss: mean log loss.
        accuracy: share of rows of the class with the largest logit.
        cost: description length.
    """

    expressions: tuple[sympy.Expr, ...]
    complexity: int
    log_loss: float
    accuracy: float
    cost: float


def class_formulas(
    x: Floats, codes: Floats, logits: Floats, symbols: Sequence[sympy.Symbol], seconds: float
) -> list[ClassFormula]:
    """Return formulas of the logits, the simplest first, each with a lower log loss than the one before.

    A longer formula must lower the log loss by more than one standard error of the difference of the rows.

    Args:
        x: (rows, inputs).
        codes: class of each row, (rows,).
        logits: of the model, (rows, 1) log-odds of the second of two classes, or (rows, classes).
        symbols: a symbol for each input.
        seconds: time after which nothing further is tried.
    """
    codes = codes.astype(np.int64)
    values = {symbol: x[:, i] for i, symbol in enumerate(symbols)}
    clock = Stopwatch(seconds)
    found = _linear(x, codes, logits, values, clock)
    fronts: list[list[sympy.Expr]] = []
    for k, (goal, noise) in enumerate(zip(logits.T, noise_of_logits(logits), strict=True)):
        share = max(SEARCHED * seconds - clock.seconds(), 0.0) / (logits.shape[1] - k)
        with np.errstate(all="ignore"):
            results = search_formula(x, goal, symbols, seconds=share, noise=float(noise))
        fronts.append([one.expression for one in results if one.expression.free_symbols] or [sympy.Float(goal.mean())])
    combined = itertools.takewhile(lambda _: not clock.over(), dict.fromkeys(_combined(fronts)))
    found += [scored(chosen, values, codes) for chosen in combined]
    target = torch.from_numpy(codes)
    front: list[ClassFormula] = []
    lowest = torch.empty(0)
    for one in sorted(found, key=lambda f: (f.complexity, f.log_loss)):
        losses = LOSS.rows(_logits(one.expressions, values, len(codes)), target)
        if not front or clearly_worse(lowest, losses):
            front.append(one)
            lowest = losses
    return front


def noise_of_logits(logits: Floats) -> Floats:
    """Return the variance of the noise of each logit, at most the variance of the logit.

    A change δ of a logit raises the log loss by p(1 − p) δ²/2, as an error of a target with the variance 1/(p(1 − p)).

    Args:
        logits: (rows, 1) log-odds of the second of two classes, or (rows, classes).

    Example:
        >>> noise_of_logits(np.array([[-3.0], [-3.0], [3.0], [3.0]])).round(1), noise_of_logits(np.zeros((4, 2)))
        (array([9.]), array([0., 0.]))
    """
    both = np.concatenate([np.zeros_like(logits), logits], 1) if logits.shape[1] == 1 else logits
    p = torch.from_numpy(both).softmax(1).numpy()[:, -logits.shape[1] :]
    return np.minimum(1 / np.maximum(np.mean(p * (1 - p), axis=0), 1e-300), logits.var(0))


def _linear(
    x: Floats, codes: Floats, logits: Floats, values: dict[sympy.Symbol, Floats], clock: Stopwatch
) -> list[ClassFormula]:
    """Return linear formulas of no, one, … and all inputs, each with the next best input, until the time is over."""
    symbols = list(values)
    shares = np.log(np.maximum(np.bincount(codes, minlength=max(2, logits.shape[1])), 0.5))
    constants = shares - shares.mean() if logits.shape[1] > 1 else shares[1:] - shares[:1]

    def linear(chosen: Sequence[int]) -> ClassFormula:
        columns = np.column_stack([np.ones(len(x)), x[:, list(chosen)]])
        weights = np.linalg.lstsq(columns, logits, rcond=None)[0].T if chosen else constants[:, None]
        terms = [sympy.Integer(1), *(symbols[i] for i in chosen)]
        expressions = [
            sympy.Add(*[sympy.Float(float(w)) * t for w, t in zip(row, terms, strict=True)]) for row in weights
        ]
        return scored(expressions, values, codes)

    chosen: list[int] = []
    found = [linear(chosen)]
    while len(chosen) < len(symbols) and not clock.over():
        trials = {i: linear([*chosen, i]) for i in range(len(symbols)) if i not in chosen}
        best = min(trials, key=lambda i: trials[i].log_loss)
        chosen.append(best)
        found.append(trials[best])
    return found


def _combined(fronts: Sequence[Sequence[sympy.Expr]]) -> list[tuple[sympy.Expr, ...]]:
    """Return a formula for each output, of all complexities in turn."""
    if len(fronts) == 1:
        return [(expression,) for expression in fronts[0]]
    levels = sorted({complexity(e) for front in fronts for e in front})
    levels = [levels[i] for i in np.unique(np.linspace(0, len(levels) - 1, min(len(levels), MOST_LEVELS)).astype(int))]

    def best(front: Sequence[sympy.Expr], level: int) -> sympy.Expr:
        return max((e for e in front if complexity(e) <= level), key=complexity, default=front[0])

    return [tuple(best(front, level) for front in fronts) for level in levels]


def scored(expressions: Sequence[sympy.Expr], values: dict[sympy.Symbol, Floats], codes: Floats) -> ClassFormula:
    """Return formulas of the logits with the constants of maximum likelihood, and their errors."""
    free: list[sympy.Expr] = []
    start: dict[sympy.Symbol, float] = {}
    for k, expression in enumerate(expressions):
        changed, numbers = with_constants(expression, f"c{k}_")
        free.append(changed)
        start |= numbers
    constants = _refitted(free, start, values, torch.from_numpy(codes.astype(np.int64)))
    filled = tuple(e.xreplace({symbol: sympy.Float(value) for symbol, value in constants.items()}) for e in free)
    return measured(filled, values, codes)


def measured(expressions: Sequence[sympy.Expr], values: dict[sympy.Symbol, Floats], codes: Floats) -> ClassFormula:
    """Return formulas of the logits with their errors and their description length."""
    logits, target = _logits(expressions, values, len(codes)), torch.from_numpy(codes.astype(np.int64))
    loss, size = _log_loss(logits, target), sum(map(complexity, expressions))
    free = sum(len(with_constants(expression)[1]) for expression in expressions)
    cost = len(codes) * loss + NODE * size + 0.5 * math.log(len(codes)) * free
    accuracy = float((logits.argmax(1) == target).double().mean())
    return ClassFormula(tuple(expressions), size, loss, accuracy, cost)


def _logits(expressions: Sequence[sympy.Expr], values: Mapping[sympy.Symbol, Any], rows: int) -> Tensor:
    """Return the logit of each class, (rows, classes); that of the first of two classes is 0."""
    columns = [np.broadcast_to(evaluate(e, values), (rows,)) for e in expressions]
    return torch.from_numpy(np.stack([np.zeros(rows), *columns] if len(columns) == 1 else columns, axis=1))


def _log_loss(logits: Tensor, target: Tensor) -> float:
    return float(LOSS.mean(logits, target)) if bool(logits.isfinite().all()) else math.inf


def _refitted(
    expressions: Sequence[sympy.Expr],
    start: dict[sympy.Symbol, float],
    values: dict[sympy.Symbol, Floats],
    target: Tensor,
) -> dict[sympy.Symbol, float]:
    """Return the constants of the least log loss near a start, by damped Newton steps."""
    free, rows = list(start), len(target)
    at, damping = np.array(list(start.values())), 1e-3
    first = 1 if len(expressions) == 1 else 0
    fixed: Mapping[sympy.Symbol, Any] = values
    logits = _logits(expressions, {**fixed, **start}, rows)
    best = _log_loss(logits, target)
    for _ in range(STEPS if free and math.isfinite(best) else 0):
        known = {**fixed, **dict(zip(free, at, strict=True))}
        jacobian = np.zeros((rows, logits.shape[1], len(free)))
        for k, expression in enumerate(expressions):
            for j, symbol in enumerate(free):
                if expression.has(symbol):
                    jacobian[:, k + first, j] = slope(expression, known, symbol)
        if not np.isfinite(jacobian).all():
            break
        error, root = (part.numpy() for part in LOSS.curvature(logits, target))
        weighted = (root @ jacobian).reshape(-1, len(free))
        curvature = weighted.T @ weighted
        gradient = np.einsum("rk,rkj->j", error, jacobian)
        improved = False
        for _ in range(6):
            ridge = damping * np.diag(curvature) + 1e-9
            step = np.linalg.lstsq(curvature + np.diag(ridge), gradient, rcond=1e-12)[0]
            trial = _logits(expressions, {**fixed, **dict(zip(free, at - step, strict=True))}, rows)
            loss = _log_loss(trial, target)
            if loss < best and float(trial.abs().max()) <= FAR:
                improved = True
                break
            damping = max(damping, 1e-3) * 10
        if not improved:
            break
        gain, at, logits, best, damping = best - loss, at - step, trial, loss, damping / 10
        if gain < 1e-7:
            break
    return dict(zip(free, map(float, at), strict=True))
