"""Penalized least squares in closed form: from the columns themselves, from sums over the rows, or from products of rows.

All of it minimizes ‖√(cw)(y − Xθ)‖²/2 + θᵀ(λQ + H)θ/2 with c = 2/(nN), rows centered where there is a constant. In coordinates
φ = √Q θ the penalty is λ‖φ‖²/2, and λ = 0 stands for the limit of small λ: the solution with the least ‖φ‖.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kapsi.training.distributed import Group

__all__ = ["Columns", "Dual", "Factored", "Pattern", "Stored", "Streamed", "Sums", "sums_of"]


class Columns(NamedTuple):
    """Some rows as a design.

    Attributes:
        x: φ(x), `(b, P)`.
        y: targets, less what is fixed, `(b, n)`.
        weight: `(b,)`.
    """

    x: Tensor
    y: Tensor
    weight: Tensor


Chunks = Callable[[], Iterator[Columns]]
"""Goes through all rows of this process, each time from the beginning."""


@dataclass(frozen=True)
class Pattern:
    """Outputs with the same columns.

    Attributes:
        outputs, columns: their numbers.
        scale: 1/√Q of the columns.
        rough: H in the coordinates φ, or None.
    """

    outputs: Tensor
    columns: Tensor
    scale: Tensor
    rough: Tensor | None = None


@dataclass(frozen=True)
class Sums:
    """What the rows add up to.

    Attributes:
        total: N, the sum of the weights.
        outputs: n.
        x, y: weighted means, zeros where there is no constant.
        squares, products: c Σ w (x − x̄)(x − x̄)ᵀ and c Σ w (x − x̄)(y − ȳ)ᵀ; None where they were not asked for.
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
        """Return √(cw)(x − x̄)/√Q, √(cw)(y − ȳ), and √(cw), of the columns and outputs of a pattern."""
        root = (self.factor * rows.weight).sqrt()[:, None]
        x = (rows.x[:, pattern.columns] - self.x[pattern.columns]) * pattern.scale
        y = rows.y[:, pattern.outputs] - self.y[pattern.outputs]
        return x * root, y * root, root


def sums_of(
    chunks: Chunks, group: Group, constant: bool, width: int, outputs: int, like: Tensor, squares: bool
) -> Sums:
    """Return what the rows of all processes add up to.

    Squares of numbers far from zero lose their digits, so means of the first chunks are subtracted first, which are no exact
    means; what is left of them is small, and its square is subtracted afterwards.

    Args:
        chunks: the rows.
        group: the processes.
        constant: whether there is a constant, so that rows are centered.
        width, outputs: P and n.
        like: gives type and device.
        squares: whether products of columns are added up too.
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
        spectrum: eigenvalues of XᵀX + H in the coordinates φ, known after `factor`.
        width: number of columns.
    """

    spectrum: Tensor
    width: int

    @abstractmethod
    def factor(self) -> None:
        """Make what the choice of λ needs."""

    @abstractmethod
    def solve(self, penalty: float) -> Tensor:
        """Return φ, `(p, k)`."""

    @abstractmethod
    def left_out(self, penalties: Tensor) -> Tensor:
        """Return the sum over rows of the loss of each row, fitted without it, for each λ: exact, all else as it is.

        The prediction of a row by the fit to the others is off by e/(1 − h), e its residual and h its leverage.
        """


def _press(residuals: Tensor, leverage: Tensor) -> Tensor:
    """Return Σ (e/(1 − h))²/2 for residuals `(b, k)` and leverages `(b,)` of rows with the factor √(cw)."""
    rest = 1 - leverage
    # A row that is fitted whatever it says: nothing is known of it from the others.
    lost = rest < 1e-13
    out = residuals / rest.masked_fill(lost, 1)[:, None]
    return torch.where(lost[:, None], torch.inf, out.square()).sum() / 2


def _least(x: Tensor, y: Tensor) -> Tensor:
    """Return the φ with the least ‖y − Xφ‖, of several the one with the least ‖φ‖.

    Whether columns depend on each other is looked for with all of them scaled to the same length.
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
    known = q.T @ y
    if bool(kept.all()):
        return torch.linalg.solve_triangular(r, known, upper=True) / scale[:, None]
    found = (right[kept].T @ ((left[:, kept].T @ known) / s[kept, None])) / scale[:, None]
    return _shortened(found, right[~kept].T / scale[:, None])


def _shortened(found: Tensor, free: Tensor) -> Tensor:
    """Return solutions less what they have in the space of directions that change nothing."""
    basis, _ = torch.linalg.qr(free)
    return found - basis @ (basis.T @ found)


class Stored(Factored):
    """From all rows at once, by orthogonal transformations: the most exact.

    Args:
        rows: all of them.
        sums: their means.
        pattern: the columns.
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
            return _least(x, y)
        rows, columns = x.shape
        if rows < columns:
            left, s, right = torch.linalg.svd(x, full_matrices=False)
            return right.T @ ((s / (s.square() + penalty))[:, None] * (left.T @ y))
        root = torch.eye(columns, dtype=x.dtype, device=x.device) * penalty**0.5
        q, r = torch.linalg.qr(torch.cat([x, root]))
        return torch.linalg.solve_triangular(r, q[:rows].T @ y, upper=True)

    def factor(self) -> None:
        rows, columns = self.x.shape
        if rows > columns:  # a small decomposition after a cheap one
            q, r = torch.linalg.qr(self.x)
            left, s, _ = torch.linalg.svd(r)
            self.left = q @ left
        else:
            self.left, s, _ = torch.linalg.svd(self.x, full_matrices=False)
        self.spectrum = s.square()

    def left_out(self, penalties: Tensor) -> Tensor:
        return _left_out_of_rows(self.left, self.spectrum, self.y, self.leverage, self.count, penalties)


def _left_out_of_rows(
    left: Tensor, spectrum: Tensor, y: Tensor, leverage: Tensor, count: int, penalties: Tensor
) -> Tensor:
    known, own = left.T @ y, left[:count]
    squares, y = own.square(), y[:count]
    # 1 − h without the difference of nearly equal numbers: what no column reaches, and what λ holds back.
    beyond = 1 - leverage - squares.sum(1)
    found = []
    for penalty in penalties.tolist():
        share = spectrum / (spectrum + penalty)
        rest = beyond + squares @ (penalty / (spectrum + penalty))
        found.append(_press(y - own @ (share[:, None] * known), 1 - rest))
    return torch.stack(found)


class Streamed(Factored):
    """From sums over the rows, which are gone through again for the choice of λ.

    Args:
        chunks: the rows.
        sums: theirs, with squares.
        pattern: the columns.
        constant: whether there is a constant.
        group: the processes.
    """

    def __init__(self, chunks: Chunks, sums: Sums, pattern: Pattern, constant: bool, group: Group) -> None:
        self.chunks, self.sums, self.pattern, self.constant, self.group = chunks, sums, pattern, constant, group
        squares, products = sums.squares, sums.products
        if squares is None or products is None:
            raise ValueError("sums without squares")
        columns, scale = pattern.columns, pattern.scale
        self.width = len(columns)
        self.matrix = squares[columns][:, columns] * scale[:, None] * scale
        if pattern.rough is not None:
            self.matrix = self.matrix + pattern.rough
        self.known = products[columns][:, pattern.outputs] * scale[:, None]

    def solve(self, penalty: float) -> Tensor:
        matrix = self.matrix.clone()
        matrix.diagonal().add_(penalty)
        size = matrix.diagonal().clamp_min(0).sqrt()
        size = size.masked_fill(size == 0, 1)
        matrix /= size[:, None] * size
        lower, failed = torch.linalg.cholesky_ex(matrix)
        # Pivots below that are the rounding of the sums.
        if not int(failed) and (not len(matrix) or float(lower.diagonal().min()) > 1e-6):
            return torch.cholesky_solve(self.known / size[:, None], lower) / size[:, None]
        values, vectors = torch.linalg.eigh(matrix)
        kept = values > values[-1] * 16 * len(values) * torch.finfo(values.dtype).eps
        along = vectors[:, kept]
        found = (along / values[kept]) @ (along.T @ (self.known / size[:, None])) / size[:, None]
        return _shortened(found, vectors[:, ~kept] / size[:, None]) if penalty == 0 and not bool(kept.all()) else found

    def factor(self) -> None:
        values, self.vectors = torch.linalg.eigh(self.matrix)
        self.spectrum = values.clamp_min(0)

    def left_out(self, penalties: Tensor) -> Tensor:
        found = torch.zeros_like(penalties)
        known = self.vectors.T @ self.known
        inverse = 1 / (self.spectrum[:, None] + penalties)
        for rows in self.chunks():
            x, y, _root = self.sums.centered(rows, self.pattern)
            z = x @ self.vectors
            leverage = z.square() @ inverse
            if self.constant:
                leverage += rows.weight[:, None] / self.sums.total
            for i in range(len(penalties)):
                found[i] += _press(y - z @ (known * inverse[:, i, None]), leverage[:, i])
        return self.group.sum(found)


class Dual(Factored):
    """From the products of rows with each other, where rows are fewer than columns and these too many to keep.

    Args:
        chunks: the rows, for the first and for the second of two.
        sums: their means.
        pattern: the columns.
        constant: whether there is a constant.
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
        values, self.left = torch.linalg.eigh(lower)  # of which it reads the lower half
        # The centered rows add up to zero, so one eigenvalue is nothing but rounding.
        self.spectrum = torch.where(values > values[-1] * 16 * count * torch.finfo(values.dtype).eps, values, 0)
        self.leverage = weight / sums.total if constant else torch.zeros_like(weight)
        self.count, self.width = count, len(pattern.columns)

    def factor(self) -> None:
        """Do nothing: all that is needed is there."""

    def solve(self, penalty: float) -> Tensor:
        inverse = self.spectrum + penalty
        inverse = torch.where(self.spectrum > 0, 1 / inverse.masked_fill(inverse == 0, 1), 0)
        coefficients = (self.left * inverse) @ (self.left.T @ self.y)
        found, begin = torch.zeros(1, dtype=self.y.dtype, device=self.y.device), 0
        for rows in self.chunks():
            x = self.sums.centered(rows, self.pattern)[0]
            found = found + x.T @ coefficients[begin : begin + len(x)]
            begin += len(x)
        return found

    def left_out(self, penalties: Tensor) -> Tensor:
        return _left_out_of_rows(self.left, self.spectrum, self.y, self.leverage, self.count, penalties)
