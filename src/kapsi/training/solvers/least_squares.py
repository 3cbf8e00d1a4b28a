"""Penalized least squares in closed form: from the columns themselves, from sums over the rows, or from products of rows.

The objective is ‖√(cw)(y − Xθ)‖²/2 + θᵀ(λQ + H)θ/2 with c = 2/(nN), rows centered where there is a constant. In coordinates
φ = √Q θ the penalty is λ‖φ‖²/2; λ = 0 stands for the limit of small λ, the solution with the least ‖φ‖.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kapsi.training.distributed import Group


class Columns(NamedTuple):
    """A chunk of rows of the design matrix.

    Attributes:
        x: φ(x), `(b, P)`.
        y: targets minus fixed terms, `(b, n)`.
        weight: row weights, `(b,)`.
    """

    x: Tensor
    y: Tensor
    weight: Tensor


Chunks = Callable[[], Iterator[Columns]]
"""Returns a new iterator over all rows of this process."""


@dataclass(frozen=True)
class Pattern:
    """Outputs with the same columns.

    Attributes:
        outputs, columns: indices.
        scale: 1/√Q of the columns.
        rough: H in the coordinates φ; None without smoothness.
    """

    outputs: Tensor
    columns: Tensor
    scale: Tensor
    rough: Tensor | None = None


@dataclass(frozen=True)
class Sums:
    """Sums over all rows.

    Attributes:
        total: N, the sum of the weights.
        outputs: n.
        x, y: weighted means; zeros without a constant.
        squares, products: c Σ w (x − x̄)(x − x̄)ᵀ and c Σ w (x − x̄)(y − ȳ)ᵀ; None if not requested.
    """

    total: float
    outputs: int
    x: Tensor
    y: Tensor
    squares: Tensor | None = None
    products: Tensor | None = None

    @property
    def factor(self) -> float:
        """Return c."""
        return 2 / (self.outputs * self.total)

    def centered(self, rows: Columns, pattern: Pattern) -> tuple[Tensor, Tensor, Tensor]:
        """Return √(cw)(x − x̄)/√Q, √(cw)(y − ȳ) and √(cw) for the columns and outputs of a pattern."""
        root = (self.factor * rows.weight).sqrt()[:, None]
        x = (rows.x[:, pattern.columns] - self.x[pattern.columns]) * pattern.scale
        y = rows.y[:, pattern.outputs] - self.y[pattern.outputs]
        return x * root, y * root, root


def sums_of(
    chunks: Chunks, group: Group, constant: bool, width: int, outputs: int, like: Tensor, squares: bool
) -> Sums:
    """Return the sums over the rows of all processes.

    Squares of values far from zero lose digits. Approximate means, from the first chunk, are therefore subtracted before summation,
    and the square of the small remaining means afterwards.

    Args:
        chunks: the rows.
        group: the processes.
        constant: whether the model has a constant; rows are centered then.
        width, outputs: P and n.
        like: a tensor with dtype and device of the result.
        squares: whether to sum products of columns.
    """
    both = width + outputs
    shift = like.new_zeros(both)
    if constant:
        first = like.new_zeros(both + 1)
        for rows in chunks():
            first[:-1] = (torch.cat([rows.x, rows.y], 1) * rows.weight[:, None]).sum(0)
            first[-1] = rows.weight.sum()
            break
        first = group.sum(first)
        if float(first[-1]):
            shift = first[:-1] / first[-1]
    sums, total = like.new_zeros(both), like.new_zeros(())
    second = like.new_zeros(width, both) if squares else None
    for rows in chunks():
        values = torch.cat([rows.x, rows.y], 1) - shift
        weighted = values * rows.weight[:, None]
        sums += weighted.sum(0)
        total += rows.weight.sum()
        if second is not None:
            second.addmm_(weighted[:, :width].T, values)
    packed = group.sum(torch.cat([sums, total[None]]))
    sums, number = packed[:-1], float(packed[-1])
    rest = sums / number if constant else like.new_zeros(both)
    means = shift + rest
    if second is None:
        return Sums(number, outputs, means[:width], means[width:])
    second = (group.sum(second) - number * rest[:width, None] * rest) * (2 / (outputs * number))
    return Sums(number, outputs, means[:width], means[width:], second[:, :width], second[:, width:])


class Factored(ABC):
    """The least squares of one pattern, factored for any λ.

    Attributes:
        spectrum: eigenvalues of XᵀX + H in the coordinates φ, set by `factor`.
        width: number of columns.
    """

    spectrum: Tensor
    width: int

    @abstractmethod
    def factor(self) -> None:
        """Compute the decomposition for `leave_one_out`."""

    @abstractmethod
    def solve(self, penalty: float) -> Tensor:
        """Return φ, `(p, k)`."""

    @abstractmethod
    def leave_one_out(self, penalties: Tensor) -> Tensor:
        """Return the exact leave-one-out error, summed over rows, for each λ.

        The error of a row predicted from all others is e/(1 − h), with residual e and leverage h.
        """


def _press(residuals: Tensor, leverage: Tensor) -> Tensor:
    """Return Σ (e/(1 − h))²/2 for residuals `(b, k)` and leverages `(b,)` of rows with the factor √(cw)."""
    rest = 1 - leverage
    # A leverage of one: the other rows do not determine the prediction.
    undetermined = rest < 1e-13
    out = residuals / rest.masked_fill(undetermined, 1)[:, None]
    return torch.where(undetermined[:, None], torch.inf, out.square()).sum() / 2


def _least_norm(x: Tensor, y: Tensor) -> Tensor:
    """Return the φ of least ‖φ‖ among the minimizers of ‖y − Xφ‖.

    The numerical rank is determined with columns scaled to equal length.
    """
    rows, columns = x.shape
    epsilon = torch.finfo(x.dtype).eps
    if rows < columns:
        left, s, right = torch.linalg.svd(x, full_matrices=False)
        kept = s > (s[:1] if len(s) else 0) * columns * epsilon
        return right[kept].T @ ((left[:, kept].T @ y) / s[kept, None])
    scale = torch.linalg.vector_norm(x, dim=0)
    scale = scale.masked_fill(scale == 0, 1)
    q, r = torch.linalg.qr(x / scale)
    left, s, right = torch.linalg.svd(r)
    kept = s > s[:1] * rows * epsilon
    target = q.T @ y
    if bool(kept.all()):
        return torch.linalg.solve_triangular(r, target, upper=True) / scale[:, None]
    solution = (right[kept].T @ ((left[:, kept].T @ target) / s[kept, None])) / scale[:, None]
    return _without(solution, right[~kept].T / scale[:, None])


def _without(solution: Tensor, null_space: Tensor) -> Tensor:
    """Return a solution minus the projection on the null space."""
    basis, _ = torch.linalg.qr(null_space)
    return solution - basis @ (basis.T @ solution)


class Stored(Factored):
    """All rows in memory, by orthogonal transformations: the most exact method.

    Args:
        rows: all rows.
        sums: their means.
        pattern: the columns.
        constant: whether the model has a constant.
    """

    def __init__(self, rows: Columns, sums: Sums, pattern: Pattern, constant: bool) -> None:
        self.x, self.y, _ = sums.centered(rows, pattern)
        self.count, self.width = self.x.shape
        self.leverage = rows.weight / sums.total if constant else torch.zeros_like(rows.weight)
        if pattern.rough is not None:
            values, vectors = torch.linalg.eigh(pattern.rough)
            self.x = torch.cat([self.x, (vectors * values.clamp_min(0).sqrt()).T])
            self.y = torch.cat([self.y, self.y.new_zeros(len(self.x) - self.count, self.y.shape[1])])

    def solve(self, penalty: float) -> Tensor:
        x, y = self.x, self.y
        if penalty == 0:
            return _least_norm(x, y)
        rows, columns = x.shape
        if rows < columns:
            left, s, right = torch.linalg.svd(x, full_matrices=False)
            return right.T @ ((s / (s.square() + penalty))[:, None] * (left.T @ y))
        root = torch.eye(columns, dtype=x.dtype, device=x.device) * penalty**0.5
        q, r = torch.linalg.qr(torch.cat([x, root]))
        return torch.linalg.solve_triangular(r, q[:rows].T @ y, upper=True)

    def factor(self) -> None:
        rows, columns = self.x.shape
        if rows > columns:  # a cheap decomposition before the small one
            q, r = torch.linalg.qr(self.x)
            left, s, _ = torch.linalg.svd(r)
            self.left = q @ left
        else:
            self.left, s, _ = torch.linalg.svd(self.x, full_matrices=False)
        self.spectrum = s.square()

    def leave_one_out(self, penalties: Tensor) -> Tensor:
        return _leave_one_out(self.left, self.spectrum, self.y, self.leverage, self.count, penalties)


def _leave_one_out(
    left: Tensor, spectrum: Tensor, y: Tensor, leverage: Tensor, count: int, penalties: Tensor
) -> Tensor:
    target, basis = left.T @ y, left[:count]
    squares, y = basis.square(), y[:count]
    # 1 − h without cancellation: the part outside of the column space, plus the shrinkage by λ.
    beyond = 1 - leverage - squares.sum(1)
    errors = []
    for penalty in penalties.tolist():
        share = spectrum / (spectrum + penalty)
        rest = beyond + squares @ (penalty / (spectrum + penalty))
        errors.append(_press(y - basis @ (share[:, None] * target), 1 - rest))
    return torch.stack(errors)


class Streamed(Factored):
    """Normal equations from sums over the rows; the choice of λ needs a second pass.

    Args:
        chunks: the rows.
        sums: their sums, with squares.
        pattern: the columns.
        constant: whether the model has a constant.
        group: the processes.
    """

    def __init__(self, chunks: Chunks, sums: Sums, pattern: Pattern, constant: bool, group: Group) -> None:
        self.chunks, self.sums, self.pattern, self.constant, self.group = chunks, sums, pattern, constant, group
        squares, products = sums.squares, sums.products
        if squares is None or products is None:
            raise ValueError("Streamed: sums_of(…, squares=True) is required")
        columns, scale = pattern.columns, pattern.scale
        self.width = len(columns)
        self.matrix = squares[columns][:, columns] * scale[:, None] * scale
        if pattern.rough is not None:
            self.matrix = self.matrix + pattern.rough
        self.target = products[columns][:, pattern.outputs] * scale[:, None]

    def solve(self, penalty: float) -> Tensor:
        matrix = self.matrix.clone()
        matrix.diagonal().add_(penalty)
        size = matrix.diagonal().clamp_min(0).sqrt()
        size = size.masked_fill(size == 0, 1)
        matrix /= size[:, None] * size
        lower, failed = torch.linalg.cholesky_ex(matrix)
        # Smaller pivots are rounding errors of the sums.
        if not int(failed) and (not len(matrix) or float(lower.diagonal().min()) > 1e-6):
            return torch.cholesky_solve(self.target / size[:, None], lower) / size[:, None]
        values, vectors = torch.linalg.eigh(matrix)
        kept = values > values[-1] * 16 * len(values) * torch.finfo(values.dtype).eps
        along = vectors[:, kept]
        solution = (along / values[kept]) @ (along.T @ (self.target / size[:, None])) / size[:, None]
        if penalty == 0 and not bool(kept.all()):
            return _without(solution, vectors[:, ~kept] / size[:, None])
        return solution

    def factor(self) -> None:
        values, self.vectors = torch.linalg.eigh(self.matrix)
        self.spectrum = values.clamp_min(0)

    def leave_one_out(self, penalties: Tensor) -> Tensor:
        errors = torch.zeros_like(penalties)
        target = self.vectors.T @ self.target
        inverse = 1 / (self.spectrum[:, None] + penalties)
        for rows in self.chunks():
            x, y, _root = self.sums.centered(rows, self.pattern)
            z = x @ self.vectors
            leverage = z.square() @ inverse
            if self.constant:
                leverage += rows.weight[:, None] / self.sums.total
            for i in range(len(penalties)):
                errors[i] += _press(y - z @ (target * inverse[:, i, None]), leverage[:, i])
        return self.group.sum(errors)


class Dual(Factored):
    """The Gram matrix of the rows, for fewer rows than columns, too many columns for memory.

    Args:
        chunks: the rows.
        sums: their means.
        pattern: the columns.
        constant: whether the model has a constant.
    """

    def __init__(self, chunks: Chunks, sums: Sums, pattern: Pattern, constant: bool) -> None:
        self.chunks, self.sums, self.pattern = chunks, sums, pattern
        blocks, targets, weights = [], [], []
        for i, rows in enumerate(chunks()):
            x, y, _ = sums.centered(rows, pattern)
            line = []
            for j, others in enumerate(chunks()):
                if j > i:
                    break
                line.append(x @ (x if j == i else sums.centered(others, pattern)[0]).T)
            blocks.append(torch.cat(line, 1))
            targets.append(y)
            weights.append(rows.weight)
        self.y, weight = torch.cat(targets), torch.cat(weights)
        count = len(weight)
        lower = torch.cat([torch.nn.functional.pad(block, (0, count - block.shape[1])) for block in blocks])
        values, self.left = torch.linalg.eigh(lower)  # reads the lower triangle
        # Centered rows sum to zero, so one eigenvalue is a rounding error.
        self.spectrum = torch.where(values > values[-1] * 16 * count * torch.finfo(values.dtype).eps, values, 0)
        self.leverage = weight / sums.total if constant else torch.zeros_like(weight)
        self.count, self.width = count, len(pattern.columns)

    def factor(self) -> None:
        """Do nothing: the decomposition exists."""

    def solve(self, penalty: float) -> Tensor:
        inverse = self.spectrum + penalty
        inverse = torch.where(self.spectrum > 0, 1 / inverse.masked_fill(inverse == 0, 1), 0)
        coefficients = (self.left * inverse) @ (self.left.T @ self.y)
        solution, begin = torch.zeros(1, dtype=self.y.dtype, device=self.y.device), 0
        for rows in self.chunks():
            x = self.sums.centered(rows, self.pattern)[0]
            solution = solution + x.T @ coefficients[begin : begin + len(x)]
            begin += len(x)
        return solution

    def leave_one_out(self, penalties: Tensor) -> Tensor:
        return _leave_one_out(self.left, self.spectrum, self.y, self.leverage, self.count, penalties)
