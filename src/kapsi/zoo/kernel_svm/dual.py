"""The dual of support vector machines, solved by sequential minimal optimization on working sets.

Classification and regression are the same problem in signed coefficients β = sα of variables t, each of a row r(t) of the data:

    min ½ Σ β_t β_v k(x_{r(t)}, x_{r(v)}) − Σ f_t β_t   with   Σ β_t = 0,   low_t ≤ β_t ≤ high_t

Classification has one variable per row, f = y = ±1, 0 ≤ yβ ≤ C; ε-regression has two, f = y − ε with 0 ≤ β ≤ C, and f = y + ε with
−C ≤ β ≤ 0. With F = f − Kβ, at a solution no increasable β has a larger F than a decreasable β.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kapsi.expansion.kernel import Kernel, similarity
from kapsi.function import Spec, option

Numbers: TypeAlias = NDArray[np.float64]

WORKING_SET = 1024
"""Variables of the largest working set. Steps take time with the size of the set, kernel rows with the number of sets."""

MAX_BLOCK = 2**21
"""Elements of the largest block of the kernel besides the cache: a few arrays of 16 MiB in float64."""

FLAT = 1e-12
"""Replaces zero or negative curvature, which equal rows and indefinite kernels cause."""

INNER = 0.1
"""Violation of a working set, relative to the whole problem, that ends its steps."""

STEP_WORK = 10**5
"""Operations of a Newton step, in units of count³, as expensive as a step of two coefficients."""

MAX_JUMP = 2 * 10**9
"""Operations of successive Newton steps."""

MIN_ITERATION_LIMIT = 10**7
"""Smallest default limit of steps; the default is 100 a variable if larger."""


@dataclass(frozen=True)
class DualOptions(Spec):
    """Options of the dual solver.

    Args:
        kernel, gamma, degree, coef0: the kernel, see `kapsi.KernelMap`; γ is a number.
        tolerance: largest violation of the optimality conditions, in units of outputs.
        iterations: maximum number of steps of two coefficients; None: ten million, or 100 per variable if larger.
        cache: memory of cached kernel rows, in MiB; at least 4 rows are cached.
    """

    kernel: Kernel = "rbf"
    gamma: float = 1.0
    degree: int = option(3, minimum=1, maximum=32)
    coef0: float = 0.0
    tolerance: float = option(1e-3, minimum=1e-12, maximum=1)
    iterations: int | None = option(None, minimum=1)
    cache: float = option(200.0, minimum=1e-9, maximum=2**24)

    def similarity(self, x: Tensor, z: Tensor) -> Numbers:
        """Return the kernel matrix of x and z, `(len(x), len(z))`."""
        gamma = torch.tensor(self.gamma, dtype=torch.float64)
        values: Numbers = similarity(self.kernel, x, z, gamma, self.degree, self.coef0).numpy()
        return values


class DualProgress(NamedTuple):
    """Progress of the solver after a working set.

    Attributes:
        iterations: steps of two coefficients so far.
        violation: violation of the optimality conditions, in units of outputs.
        objective: minimized objective of the dual.
        support: number of rows with a non-zero coefficient.
    """

    iterations: int
    violation: float
    objective: float
    support: int


@dataclass(frozen=True)
class DualSolution:
    """Solution f(x) = Σ coefficients_r k(x, x_r) + bias.

    Attributes:
        coefficients: β of each row, `(rows,)`.
        bias: the intercept b.
        objective: minimized objective of the dual.
        iterations: steps of two coefficients.
        violation: violation of the optimality conditions.
        converged: whether the violation is within the tolerance.
    """

    coefficients: Numbers
    bias: float
    objective: float
    iterations: int
    violation: float
    converged: bool


@dataclass(frozen=True)
class DualProblem:
    """Variables of a dual: rows, linear terms f, and bounds, all `(variables,)`."""

    rows: NDArray[np.int64]
    linear: Numbers
    low: Numbers
    high: Numbers


def classification(positive: NDArray[np.bool_], cost: Numbers) -> DualProblem:
    """Return the dual of C-classification, with a C for each row."""
    sign = np.where(positive, 1.0, -1.0)
    low, high = np.where(positive, 0.0, -cost), np.where(positive, cost, 0.0)
    return DualProblem(np.arange(len(cost)), sign, low, high)


def regression(target: Numbers, cost: Numbers, epsilon: float) -> DualProblem:
    """Return the dual of ε-regression, with a C for each row."""
    zero, rows = np.zeros_like(cost), np.arange(len(cost))
    linear = np.concatenate([target - epsilon, target + epsilon])
    return DualProblem(
        np.concatenate([rows, rows]), linear, np.concatenate([zero, -cost]), np.concatenate([cost, zero])
    )


class _KernelRows:
    """Products with rows of the kernel matrix, computed on demand, with a least-recently-used cache.

    Args:
        x: the data, `(rows, m)`, float64.
        options: kernel and size of the cache.
    """

    def __init__(self, x: Tensor, options: DualOptions) -> None:
        self.x, self.options = x, options
        count = len(x)
        self.slots = min(count, max(4, int(options.cache * 2**20 // (8 * count))))
        self.cached = np.empty((self.slots, count))
        self.slot = np.full(count, -1)  # slot of each row
        self.row = np.full(self.slots, -1)  # row of each slot
        self.used = np.zeros(self.slots, dtype=np.int64)
        self.clock = 0

    def block(self, rows: NDArray[np.int64]) -> Numbers:
        """Return the kernel matrix of some rows."""
        picked = self.x[torch.from_numpy(rows)]
        return self.options.similarity(picked, picked)

    def product(self, rows: NDArray[np.int64], weights: NDArray[Any]) -> Numbers:
        """Return Σ weights_r K_r over distinct rows r, `(all rows,)`."""
        self.clock += 1
        total = np.zeros(len(self.x))
        step = max(1, MAX_BLOCK // len(self.x))
        hit = self.slot[rows] >= 0
        slots = self.slot[rows[hit]]
        self.used[slots] = self.clock
        for begin in range(0, len(slots), step):
            total += weights[hit][begin : begin + step] @ self.cached[slots[begin : begin + step]]
        missing, weights = rows[~hit], weights[~hit]
        for begin in range(0, len(missing), step):
            block = missing[begin : begin + step]
            lines = self.options.similarity(self.x[torch.from_numpy(block)], self.x)
            total += weights[begin : begin + step] @ lines
            self._keep(block, lines)
        return total

    def _keep(self, rows: NDArray[np.int64], lines: Numbers) -> None:
        """Cache rows in place of the least recently used rows, except the rows of this call."""
        order = np.argsort(self.used, kind="stable")[: len(rows)]
        slots = order[self.used[order] < self.clock]
        rows, lines = rows[: len(slots)], lines[: len(slots)]
        old = self.row[slots]
        self.slot[old[old >= 0]] = -1
        self.row[slots], self.slot[rows], self.used[slots] = rows, slots, self.clock
        self.cached[slots] = lines


def solve_dual(
    problem: DualProblem,
    x: Tensor,
    options: DualOptions | None = None,
    on_step: Callable[[DualProgress], None] | None = None,
) -> DualSolution:
    """Minimize the dual of a support vector machine.

    Working sets hold the variables with the largest violations of the optimality conditions. Within a set, pairs are chosen by
    second order (first variable: largest violation; second: largest predicted decrease) and solved in closed form. Only kernel
    rows of the present set are computed; recently used rows are cached.

    Args:
        problem: the dual problem, from `classification` or `regression`.
        x: the data, `(rows, m)`, float64, finite.
        options: kernel, tolerance, limit of steps and cache; default: `DualOptions()`.
        on_step: callback after each working set.

    Warns:
        UserWarning: the limit of steps was reached before the tolerance.

    Source: Fan, Chen and Lin, Working Set Selection Using Second Order Information for Training SVM (2005); Joachims, Making
    Large-Scale SVM Learning Practical (1999), for working sets.

    Example:
        >>> x = torch.tensor([[-1.0], [0.0], [3.0]], dtype=torch.float64)
        >>> problem = classification(np.array([False, False, True]), np.full(3, 10.0))
        >>> solution = solve_dual(problem, x, DualOptions(kernel="linear"))
        >>> bool(abs(solution.coefficients @ x.numpy() - 2 / 3).max() < 1e-3), bool(abs(solution.bias + 1) < 1e-3)
        (True, True)
    """
    options = DualOptions() if options is None else options
    tolerance, count = options.tolerance, len(problem.rows)
    limit = max(MIN_ITERATION_LIMIT, 100 * count) if options.iterations is None else options.iterations
    lines = _KernelRows(x, options)
    size = min(count, WORKING_SET)
    beta, score = np.zeros(count), problem.linear.copy()  # β, F
    chosen = np.empty(0, dtype=np.int64)
    steps = 0
    while True:
        up, down = _candidates(beta, score, problem.low, problem.high)
        violation = float(up.max() - down.min())
        if on_step is not None:
            objective = -0.5 * float(beta @ (problem.linear + score))
            support = np.count_nonzero(np.bincount(problem.rows, beta, len(x)))
            on_step(DualProgress(steps, max(violation, 0.0), objective, int(support)))
        if violation <= tolerance or steps >= limit:
            break
        chosen = _working_set(up, down, size, chosen)
        inner = max(tolerance, INNER * violation) if size < count else tolerance
        done, converged = _improve(problem, lines, chosen, beta, score, inner, limit - steps)
        steps += done
        if converged:
            break
    if violation > tolerance:
        stop = f"{steps:,} steps" if steps >= limit else "the last digit"
        hint = (
            "allow more iterations, scale the inputs, or use a smaller C"
            if steps >= limit
            else "use a larger tolerance"
        )
        warnings.warn(
            f"solve_dual: at {stop} the optimality conditions are violated by {violation:.3g}, the tolerance is {tolerance:g}; "
            f"{hint}",
            stacklevel=3,
        )
    free = (beta > problem.low) & (beta < problem.high)
    bias = float(score[free].mean()) if free.any() else _middle(float(up.max()), float(down.min()))
    return DualSolution(
        np.bincount(problem.rows, beta, len(x)).astype(np.float64),
        bias,
        -0.5 * float(beta @ (problem.linear + score)),
        steps,
        max(violation, 0.0),
        violation <= tolerance,
    )


def _candidates(beta: Numbers, score: Numbers, low: Numbers, high: Numbers) -> tuple[Numbers, Numbers]:
    """Return F of increasable and of decreasable coefficients; ∓∞ for the others."""
    return np.where(beta < high, score, -math.inf), np.where(beta > low, score, math.inf)


def _improve(
    problem: DualProblem,
    lines: _KernelRows,
    chosen: NDArray[np.int64],
    beta: Numbers,
    score: Numbers,
    tolerance: float,
    limit: int,
) -> tuple[int, bool]:
    """Minimize over the chosen variables, in place; return the number of steps, and whether no coefficient changed."""
    rows, inverse = np.unique(problem.rows[chosen], return_inverse=True)
    block = lines.block(rows)
    if not np.array_equal(rows, problem.rows[chosen]):  # regression: two variables per row
        block = block[np.ix_(inverse, inverse)]
    low, high = problem.low[chosen], problem.high[chosen]
    new, steps = _minimize(block, beta[chosen], score[chosen], low, high, tolerance, limit)
    change = np.bincount(inverse, new - beta[chosen], len(rows))
    beta[chosen] = new
    changed = np.flatnonzero(change)
    if len(changed):
        score -= lines.product(rows[changed], change[changed])[problem.rows]
    return steps, not len(changed)


def _middle(largest: float, smallest: float) -> float:
    """Return the middle of the bounds of the bias, or the only finite bound."""
    if math.isinf(largest):
        return smallest
    return largest if math.isinf(smallest) else (largest + smallest) / 2


def _working_set(up: Numbers, down: Numbers, size: int, previous: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the variables with the largest violations, half of them increasable, filled up from the previous set."""
    count = len(up)
    if size >= count:
        return np.arange(count)
    most = max(1, size // 4)
    first = np.argpartition(-up, most - 1)[:most]
    second = np.argpartition(down, most - 1)[:most]
    chosen = np.zeros(count, dtype=bool)
    chosen[first[np.isfinite(up[first])]] = True
    chosen[second[np.isfinite(down[second])]] = True
    earlier = previous[~chosen[previous]]
    # Free variables first.
    free = earlier[np.isfinite(up[earlier]) & np.isfinite(down[earlier])]
    chosen[free[: size - int(chosen.sum())]] = True
    chosen[earlier[: size - int(chosen.sum())]] = True
    return np.flatnonzero(chosen)


def _minimize(
    block: Numbers, beta: Numbers, score: Numbers, low: Numbers, high: Numbers, tolerance: float, limit: int
) -> tuple[Numbers, int]:
    """Minimize over some variables with the others fixed; return the coefficients and the number of steps.

    Args:
        block: kernel matrix of the variables, `(size, size)`.
        beta, score, low, high: coefficients, F and bounds.
        tolerance: violation that ends the steps.
        limit: maximum number of steps.
    """
    beta = beta.copy()
    up, down = _candidates(beta, score, low, high)
    diagonal = block.diagonal()
    # The decrease of a step is the square of gap · slope.
    curvature = diagonal[:, None] + diagonal - 2 * block
    np.maximum(curvature, FLAT, out=curvature)
    slopes = 1 / np.sqrt(curvature)
    gap, gain, change = np.empty_like(beta), np.empty_like(beta), np.empty_like(beta)
    steps, next_jump = 0, len(beta)
    while steps < limit:
        i = int(up.argmax())
        np.subtract(up[i], down, out=gap)
        np.multiply(gap, slopes[i], out=gain)
        j = int(gain.argmax())
        # The second variable does not always have the largest gap.
        if gap[j] <= tolerance and not gap.max() > tolerance:
            break
        if steps >= next_jump:
            score = np.where(np.isfinite(up), up, down)
            work = _jump(block, beta, score, low, high)
            up, down = _candidates(beta, score, low, high)
            next_jump = steps + max(len(beta), work // STEP_WORK) + 1
            steps += 1
            continue
        step = min(float(gap[j] / curvature[i, j]), float(high[i] - beta[i]), float(beta[j] - low[j]))
        above, below = float(up[i]), float(down[j])
        beta[i] = grown = float(high[i]) if step == high[i] - beta[i] else float(beta[i]) + step
        beta[j] = shrunk = float(low[j]) if step == beta[j] - low[j] else float(beta[j]) - step
        up[i] = above if grown < high[i] else -math.inf
        down[i] = above if grown > low[i] else math.inf
        up[j] = below if shrunk < high[j] else -math.inf
        down[j] = below if shrunk > low[j] else math.inf
        np.subtract(block[i], block[j], out=change)
        change *= step
        up -= change
        down -= change
        steps += 1
    return beta, steps


def _jump(block: Numbers, beta: Numbers, score: Numbers, low: Numbers, high: Numbers) -> int:
    """Take Newton steps in the free coefficients, in place, each up to the first bound; return the work.

    Pairs need more steps the worse the condition of the kernel, 10⁶ for a linear kernel of few inputs and a large C; a Newton step
    reaches the minimum without bounds. F of all variables is updated.
    """
    work = 0
    while True:
        free = np.flatnonzero((beta > low) & (beta < high))
        count = len(free)
        if count < 2 or work + count**3 > MAX_JUMP:
            return work
        work += count**3
        inner = block[np.ix_(free, free)]
        # Singular kernels give long steps up to a bound.
        system = np.ones((count + 1, count + 1))
        system[:count, :count] = inner
        system[-1, -1] = 0.0
        system[np.arange(count), np.arange(count)] += 1e-10 * max(abs(float(np.trace(inner))) / count, FLAT)
        # Only differences of F matter: the step sums to zero.
        slope = score[free] - score[free].mean()
        try:
            direction = np.linalg.solve(system, np.append(slope, 0.0))[:count]
        except np.linalg.LinAlgError:
            return work
        direction -= direction.mean()
        gain, curvature = float(slope @ direction), float(direction @ inner @ direction)
        if not gain > 0 or not np.isfinite(direction).all():
            return work
        bound = np.where(direction > 0, high[free], low[free])
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.where(direction == 0, math.inf, (bound - beta[free]) / direction)
        first = int(room.argmin())
        whole = gain / curvature if curvature > 0 else math.inf
        step = min(whole, float(room[first]))
        if not math.isfinite(step):
            return work
        beta[free] = np.clip(beta[free] + step * direction, low[free], high[free])
        if step < whole:
            beta[free[first]] = bound[first]
        score -= (step * direction) @ block[free]
        if step == whole:
            return work
