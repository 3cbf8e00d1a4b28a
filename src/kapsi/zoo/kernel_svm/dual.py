"""The dual of support vector machines, solved by sequential minimal optimization on working sets.

Both problems, classification and regression, are one in signed coefficients β = sα of some variables t, each of which belongs to
a row r(t) of the data:

    min ½ Σ β_t β_v k(x_{r(t)}, x_{r(v)}) − Σ f_t β_t   with   Σ β_t = 0,   low_t ≤ β_t ≤ high_t

Classification has a variable a row, f = y = ±1, and 0 ≤ yβ ≤ C; ε-regression has two, f = y − ε with 0 ≤ β ≤ C, and f = y + ε with
−C ≤ β ≤ 0. With F = f − Kβ a solution is where no β that may grow has an F above that of one that may shrink.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.expansion.kernel import similarity

__all__ = ["DualProgress", "DualSolution", "Problem", "classification", "regression", "solve_dual"]

Numbers: TypeAlias = NDArray[np.float64]
Kernel: TypeAlias = Literal["rbf", "linear", "polynomial", "sigmoid"]

WORKING_SET = 1024
"""Variables of the largest working set. Steps in a set take time with its size, rows of the kernel with the number of sets."""

LARGEST_BLOCK = 2**21
"""Elements of the largest block of the kernel that is made at once, beside the cache: some arrays of 16 MiB in float64."""

FLAT = 1e-12
"""Curvature that stands for one of zero or less, as of two equal rows, or of a kernel that is not positive."""

INNER = 0.1
"""A working set is left when its own violation is this share of that of the whole problem."""

STEP_WORK = 10**5
"""Operations of a Newton step, in units of count³, that take the time of one step of two coefficients."""

LARGEST_JUMP = 2 * 10**9
"""Operations of the Newton steps that are taken in a row."""

LEAST_ITERATIONS = 10**7
"""Steps of the default bound, or a hundred a variable if that is more."""


class DualProgress(NamedTuple):
    """Where a solution stands after a working set.

    Attributes:
        iterations: steps of two coefficients so far.
        violation: how far the optimality conditions are from being met, in units of outputs.
        objective: of the dual, which is minimized.
        support: number of rows with a coefficient that is not zero.
    """

    iterations: int
    violation: float
    objective: float
    support: int


@dataclass(frozen=True)
class DualSolution:
    """What came of it: f(x) = Σ coefficients_r k(x, x_r) + bias.

    Attributes:
        coefficients: β of each row, `(rows,)`.
        bias: b.
        objective: of the dual, which was minimized.
        iterations: steps of two coefficients.
        violation: how far the optimality conditions are from being met.
        converged: whether that is within the tolerance.
    """

    coefficients: Numbers
    bias: float
    objective: float
    iterations: int
    violation: float
    converged: bool


@dataclass(frozen=True)
class Problem:
    """The variables of a dual: the row of each, its linear term f, and its bounds, all `(variables,)`."""

    rows: NDArray[np.int64]
    linear: Numbers
    low: Numbers
    high: Numbers


def classification(positive: NDArray[np.bool_], cost: Numbers) -> Problem:
    """Return the dual of C-classification, for rows of the positive class and others, each with its own C."""
    sign = np.where(positive, 1.0, -1.0)
    low, high = np.where(positive, 0.0, -cost), np.where(positive, cost, 0.0)
    return Problem(np.arange(len(cost)), sign, low, high)


def regression(target: Numbers, cost: Numbers, epsilon: float) -> Problem:
    """Return the dual of ε-regression, for rows that each have their own C."""
    nothing, rows = np.zeros_like(cost), np.arange(len(cost))
    linear = np.concatenate([target - epsilon, target + epsilon])
    return Problem(
        np.concatenate([rows, rows]), linear, np.concatenate([nothing, -cost]), np.concatenate([cost, nothing])
    )


class _KernelRows:
    """Products with rows of the kernel matrix, which are made when they are needed; those used last are kept, within a bound.

    Args:
        x: the data, `(rows, m)`, float64.
        kernel, gamma, degree, coef0: of the kernel.
        bytes_kept: the bound; at least four rows are kept.
    """

    def __init__(self, x: Tensor, kernel: Kernel, gamma: float, degree: int, coef0: float, bytes_kept: float) -> None:
        self.x, self.kernel, self.degree, self.coef0 = x, kernel, degree, coef0
        self.gamma = torch.tensor(gamma, dtype=torch.float64)
        count = len(x)
        self.slots = min(count, max(4, int(bytes_kept // (8 * count))))
        self.kept = np.empty((self.slots, count))
        self.place = np.full(count, -1)  # the slot of each row
        self.row = np.full(self.slots, -1)  # the row in each slot
        self.used = np.zeros(self.slots, dtype=np.int64)
        self.clock = 0

    def block(self, rows: NDArray[np.int64]) -> Numbers:
        """Return the kernel of some rows with each other."""
        some = self.x[torch.from_numpy(rows)]
        made: Numbers = similarity(self.kernel, some, some, self.gamma, self.degree, self.coef0).numpy()
        return made

    def product(self, rows: NDArray[np.int64], weights: NDArray[Any]) -> Numbers:
        """Return Σ weights_r K_r over some different rows r, `(all rows,)`."""
        self.clock += 1
        total = np.zeros(len(self.x))
        step = max(1, LARGEST_BLOCK // len(self.x))
        there = self.place[rows] >= 0
        slots = self.place[rows[there]]
        self.used[slots] = self.clock
        for begin in range(0, len(slots), step):
            total += weights[there][begin : begin + step] @ self.kept[slots[begin : begin + step]]
        missing, weights = rows[~there], weights[~there]
        for begin in range(0, len(missing), step):
            some = missing[begin : begin + step]
            picked = self.x[torch.from_numpy(some)]
            lines = similarity(self.kernel, picked, self.x, self.gamma, self.degree, self.coef0).numpy()
            total += weights[begin : begin + step] @ lines
            self._keep(some, lines)
        return total

    def _keep(self, rows: NDArray[np.int64], lines: Numbers) -> None:
        """Keep rows in the place of those that were not used for the longest time; none of those of this call."""
        order = np.argsort(self.used, kind="stable")[: len(rows)]
        slots = order[self.used[order] < self.clock]
        rows, lines = rows[: len(slots)], lines[: len(slots)]
        old = self.row[slots]
        self.place[old[old >= 0]] = -1
        self.row[slots], self.place[rows], self.used[slots] = rows, slots, self.clock
        self.kept[slots] = lines


def solve_dual(
    problem: Problem,
    x: Tensor,
    *,
    kernel: Kernel,
    gamma: float = 1.0,
    degree: int = 3,
    coef0: float = 0.0,
    tolerance: float = 1e-3,
    iterations: int | None = None,
    cache: float = 200.0,
    progress: Callable[[DualProgress], None] | None = None,
) -> DualSolution:
    """Minimize the dual of a support vector machine.

    Working sets of the variables that violate the optimality conditions most are taken one after another; in each, pairs are chosen
    by second order (the first variable violates most, the second promises the largest decrease) and solved in closed form. Of the
    kernel only the rows of the present set are needed; those that were used last are kept.

    Args:
        problem: of `classification` or `regression`.
        x: the data, `(rows, m)`, float64, finite.
        kernel, gamma, degree, coef0: of the kernel, as in `kapsi.KernelMap`; γ is a number.
        tolerance: largest violation of the optimality conditions, in units of outputs, above 0.
        iterations: at most so many steps; None: ten million, or a hundred a variable if that is more.
        cache: MiB of kernel rows that are kept; 4 rows at least.
        progress: called after each working set.

    Warns:
        UserWarning: the steps were over before the tolerance was reached.

    Source: Fan, Chen and Lin, Working Set Selection Using Second Order Information for Training SVM (2005); Joachims, Making
    Large-Scale SVM Learning Practical (1999), for working sets.

    Example:
        >>> x = torch.tensor([[-1.0], [0.0], [3.0]], dtype=torch.float64)
        >>> made = solve_dual(classification(np.array([False, False, True]), np.full(3, 10.0)), x, kernel="linear")
        >>> bool(abs(made.coefficients @ x.numpy() - 2 / 3).max() < 1e-3), bool(abs(made.bias + 1) < 1e-3)
        (True, True)
    """
    rows, low, high = problem.rows, problem.low, problem.high
    count = len(rows)
    limit = max(LEAST_ITERATIONS, 100 * count) if iterations is None else iterations
    lines = _KernelRows(x, kernel, gamma, degree, coef0, cache * 2**20)
    size = min(count, WORKING_SET)
    beta = np.zeros(count)
    score = problem.linear.copy()  # F
    previous = np.empty(0, dtype=np.int64)
    done = 0
    while True:
        up, down = np.where(beta < high, score, -math.inf), np.where(beta > low, score, math.inf)
        violation = float(up.max() - down.min())
        if progress is not None:
            objective = -0.5 * float(beta @ (problem.linear + score))
            support = np.count_nonzero(np.bincount(rows, beta, len(x)))
            progress(DualProgress(done, max(violation, 0.0), objective, int(support)))
        if violation <= tolerance or done >= limit:
            break
        chosen = _working_set(up, down, size, previous)
        previous = chosen
        local, inverse = np.unique(rows[chosen], return_inverse=True)
        block = lines.block(local)
        if not np.array_equal(local, rows[chosen]):  # of regression: two variables a row
            block = block[np.ix_(inverse, inverse)]
        new, steps = _minimize(
            block,
            beta[chosen],
            score[chosen],
            low[chosen],
            high[chosen],
            max(tolerance, INNER * violation) if size < count else tolerance,
            limit - done,
        )
        change = np.bincount(inverse, new - beta[chosen], len(local))
        beta[chosen] = new
        done += steps
        moved = np.flatnonzero(change)
        if not len(moved):  # two coefficients at the end of the digits
            break
        score -= lines.product(local[moved], change[moved])[rows]
    if violation > tolerance:
        how = f"{done:,} steps" if done >= limit else "the last digit"
        hint = "allow more iterations, scale the inputs, or take a smaller C" if done >= limit else "take a larger one"
        warnings.warn(
            f"solve_dual: at {how} the optimality conditions are violated by {violation:.3g}, the tolerance is {tolerance:g}; "
            f"{hint}",
            stacklevel=3,
        )
    free = (beta > low) & (beta < high)
    bias = float(score[free].mean()) if free.any() else _middle(float(up.max()), float(down.min()))
    return DualSolution(
        np.bincount(rows, beta, len(x)).astype(np.float64),
        bias,
        -0.5 * float(beta @ (problem.linear + score)),
        done,
        max(violation, 0.0),
        violation <= tolerance,
    )


def _middle(largest: float, smallest: float) -> float:
    """Return the middle of the bounds of the bias; where there is one bound alone, that."""
    if math.isinf(largest):
        return smallest
    return largest if math.isinf(smallest) else (largest + smallest) / 2


def _working_set(up: Numbers, down: Numbers, size: int, previous: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return variables that violate the conditions most, half of them such that may grow; the others those of the last set."""
    count = len(up)
    if size >= count:
        return np.arange(count)
    most = max(1, size // 4)
    first = np.argpartition(-up, most - 1)[:most]
    second = np.argpartition(down, most - 1)[:most]
    chosen = np.zeros(count, dtype=bool)
    chosen[first[np.isfinite(up[first])]] = True
    chosen[second[np.isfinite(down[second])]] = True
    kept = previous[~chosen[previous]]
    # Those between the largest and the smallest F are of no use, unless they are free.
    alive = kept[np.isfinite(up[kept]) & np.isfinite(down[kept])]
    chosen[alive[: size - int(chosen.sum())]] = True
    chosen[kept[: size - int(chosen.sum())]] = True
    return np.flatnonzero(chosen)


def _minimize(
    block: Numbers, beta: Numbers, score: Numbers, low: Numbers, high: Numbers, tolerance: float, limit: int
) -> tuple[Numbers, int]:
    """Return coefficients that minimize the problem of some variables, others held, and the number of steps.

    Args:
        block: their kernel matrix, `(size, size)`.
        beta, score, low, high: their coefficients, F and bounds.
        tolerance: violation at which it is done.
        limit: at most so many steps.
    """
    beta = beta.copy()
    # F where a coefficient can grow, and where it can shrink; elsewhere infinite, so that it is not chosen.
    up, down = np.where(beta < high, score, -math.inf), np.where(beta > low, score, math.inf)
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
        # The second variable need not be the one of the largest gap.
        if gap[j] <= tolerance and not gap.max() > tolerance:
            break
        if steps >= next_jump:
            score = np.where(np.isfinite(up), up, down)
            work = _jump(block, beta, score, low, high)
            up, down = np.where(beta < high, score, -math.inf), np.where(beta > low, score, math.inf)
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
    """Take Newton steps in the coefficients between their bounds, in place, each up to the first bound; return the work in numbers.

    Pairs need a number of steps that grows with the condition of the kernel, 10⁶ for a linear kernel of few inputs and a large C;
    here one step is the minimum with the bounds left aside. F of all is kept up to date.
    """
    work = 0
    while True:
        free = np.flatnonzero((beta > low) & (beta < high))
        count = len(free)
        if count < 2 or work + count**3 > LARGEST_JUMP:
            return work
        work += count**3
        inner = block[np.ix_(free, free)]
        # Where the kernel is singular the step is long and ends at a bound.
        system = np.ones((count + 1, count + 1))
        system[:count, :count] = inner
        system[-1, -1] = 0.0
        system[np.arange(count), np.arange(count)] += 1e-10 * max(abs(float(np.trace(inner))) / count, FLAT)
        # Of F only differences count, as the step has the sum zero.
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


def check_options(kernel: str, tolerance: float, iterations: int | None, cache: float, where: str) -> None:
    """Raise a `SpecError` where options of `solve_dual` have no sense."""
    if kernel not in ("rbf", "linear", "polynomial", "sigmoid"):
        raise SpecError(f"{where}(kernel={kernel!r}): choose from rbf, linear, polynomial, sigmoid")
    if not _number(tolerance) or not 1e-12 <= tolerance <= 1:
        raise SpecError(f"{where}(tolerance={tolerance!r}): expected a number from 1e-12 to 1")
    if iterations is not None and (isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 1):
        raise SpecError(f"{where}(iterations={iterations!r}): expected an integer of at least 1, or None")
    if not _number(cache) or not 0 < cache < 2**24:
        raise SpecError(f"{where}(cache={cache!r}): expected MiB, a number above 0")


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
