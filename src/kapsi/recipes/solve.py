"""Penalized fits of functions linear in their parameters, for a whole path of penalties.

The objective is the mean loss plus (λ/2) tr ΘᵀQΘ (for squares: the mean square plus λ tr ΘᵀQΘ), with a constant that is not
penalized. Q is normalized by default, so λ has no unit: its trace equals that of the covariance of the columns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from kapsi.training.losses import CrossEntropy
from kapsi.training.losses.base import Loss

__all__ = [
    "Basis",
    "DesignRows",
    "contrasts",
    "correlated_ridge_path",
    "leave_one_out",
    "newton_path",
    "orthogonal_basis",
    "ridge_path",
]

Chunks: TypeAlias = Callable[[], Iterator[Tensor]]
"""Returns a new iterator over the columns Φ of all rows, a chunk of rows `(b, D)` at a time."""

MAX_STORED = 2**26
"""Values of a design that are kept in memory: 512 MiB."""

CHUNK = 2**22
"""Values of a chunk of rows: 32 MiB."""

CONSTANT = 1e-7
"""Standard deviation of a constant column, relative to its mean."""

MAX_STEPS = 60
"""Newton steps for one penalty; a handful is usual."""

SHORTEST = 2.0**-24
"""Shortest step of the line search, in parts of the Newton step."""

INEXACT = 0.3
"""Relative error of the conjugate gradients of a Newton step."""


class Basis(NamedTuple):
    """Coordinates in which columns are uncorrelated and the penalty is λ‖θ‖².

    Attributes:
        mean: weighted means of the columns, `(D,)`.
        transform: T `(D, r)`; the coordinates of a row are (φ − mean) T.
        spectrum: mean squares of the coordinates, `(r,)`, ascending.
    """

    mean: Tensor
    transform: Tensor
    spectrum: Tensor

    def coefficients(self, theta: Tensor, constant: Tensor) -> tuple[Tensor, Tensor]:
        """Return coefficients `(…, D, n)` of Φ and the bias `(…, n)` for coefficients `(…, r, n)` and `(…, n)`."""
        matrix = self.transform @ theta
        return matrix, constant - (self.mean[:, None] * matrix).sum(-2)


def orthogonal_basis(
    chunks: Chunks,
    share: Tensor,
    penalty: Tensor | Callable[[Tensor], Tensor] | None = None,
    normalized: bool = True,
    orthogonal: bool = True,
) -> Basis:
    """Return the coordinates for rows and a penalty, from one eigen-decomposition of the smaller side.

    Directions without effect on the rows, such as constant columns, are left out.

    Args:
        chunks: columns of the rows.
        share: weights of the rows with sum 1, `(rows,)`.
        penalty: Q, a diagonal `(D,)` or a positive definite matrix `(D, D)`, or a function of the standard deviations `(D,)`
            that returns it; None for the variances of the columns.
        normalized: whether Q is scaled to the trace of the covariance.
        orthogonal: whether coordinates are uncorrelated; otherwise the decomposition, most of the time, is left out.
    """
    mean, moments, rows = _moments(chunks, share)
    deviation = (moments.diagonal() if rows is None else share @ rows.square()).clamp_min(0).sqrt()
    moving = deviation > CONSTANT * mean.abs()
    strength = penalty(deviation) if callable(penalty) else penalty
    if strength is None:
        strength = deviation.square()
    total = deviation.square().sum()
    if strength.dim() == 1:
        root = torch.where(moving, strength.rsqrt(), 0)
        unit = total / (strength * moving).sum().clamp_min(1e-300)
    else:
        lower = torch.linalg.cholesky(strength)
        eye = torch.eye(len(strength), dtype=mean.dtype, device=mean.device)
        root = torch.linalg.solve_triangular(lower, eye, upper=False).T * moving[:, None]
        unit = total / strength.diagonal().sum()
    if normalized:
        root = root / unit.sqrt() if float(unit) > 0 else torch.zeros_like(root)

    def apply(matrix: Tensor) -> Tensor:
        return matrix * root if root.dim() == 1 else matrix @ root

    if not orthogonal:
        transform = root if root.dim() == 2 else root.diag()
        second = moments @ transform if rows is None else rows.T @ (share[:, None] * (rows @ transform))
        return Basis(mean, transform, (transform * second).sum(0))
    if rows is None:
        matrix = apply(apply(moments).T).T if root.dim() == 2 else moments * root * root[:, None]
        spectrum, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
        kept = _kept(spectrum)
        transform = root[:, None] * vectors[:, kept] if root.dim() == 1 else root @ vectors[:, kept]
        return Basis(mean, transform, spectrum[kept])
    scaled = apply(rows * share.sqrt()[:, None])
    spectrum, left = torch.linalg.eigh(scaled @ scaled.T)
    kept = _kept(spectrum)
    vectors = scaled.T @ (left[:, kept] * spectrum[kept].rsqrt())
    transform = root[:, None] * vectors if root.dim() == 1 else root @ vectors
    return Basis(mean, transform, spectrum[kept])


def _kept(spectrum: Tensor) -> Tensor:
    largest = spectrum[-1:] if len(spectrum) else spectrum.new_zeros(1)
    return spectrum > (largest * 4 * len(spectrum) * torch.finfo(spectrum.dtype).eps).clamp_min(1e-280)


def _moments(chunks: Chunks, share: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return means, covariance, and the centered rows if there are fewer than columns; the covariance is empty then."""
    first = next(chunks())
    columns = first.shape[1]
    # Squares of values far from zero lose digits: an approximate mean is subtracted first.
    shift = first.mean(0)
    if len(share) < columns:
        rows = torch.cat(list(chunks())) if len(first) < len(share) else first
        mean = shift + share @ (rows - shift)
        return mean, rows.new_zeros(0, 0), rows - mean
    mean, second, begin = shift.new_zeros(columns), shift.new_zeros(columns, columns), 0
    for phi in chunks():
        part = share[begin : begin + len(phi), None]
        begin += len(phi)
        phi = phi - shift
        mean += (part * phi).sum(0)
        second.addmm_(phi.T, part * phi)
    return shift + mean, second - mean[:, None] * mean, None


class DesignRows:
    """DesignRows in the coordinates of a basis, with a last column of ones; stored up to a size, otherwise computed on each pass.

    Args:
        chunks: columns of the rows.
        basis: the coordinates.
        share: weights of the rows with sum 1.
    """

    direct: ClassVar[bool] = True
    """Whether the Hessian may be factorized: `chunks` is needed then."""

    def __init__(self, chunks: Chunks, basis: Basis, share: Tensor) -> None:
        self.source, self.basis, self.share = chunks, basis, share
        self.width = len(basis.spectrum) + 1
        self.stored: Tensor | None = None
        if len(share) * self.width <= MAX_STORED:
            parts = [self.coordinates(phi) for phi in chunks()]
            self.stored = parts[0] if len(parts) == 1 else torch.cat(parts)

    def take(self, index: Tensor, chunks: Chunks) -> DesignRows:
        """Return some rows in the same coordinates, which are correlated then; shares have sum 1.

        Args:
            index: indices of the rows.
            chunks: columns of these rows, for coordinates that are not stored.
        """
        part = copy.copy(self)
        part.source, part.stored = chunks, None if self.stored is None else self.stored[index]
        part.share = self.share[index] / self.share[index].sum()
        return part

    def coordinates(self, phi: Tensor) -> Tensor:
        """Return the coordinates of rows with columns Φ, `(rows, width)`."""
        z = phi.new_ones(len(phi), self.width)
        torch.mm(phi - self.basis.mean, self.basis.transform, out=z[:, :-1])
        return z

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield positions and coordinates of chunks of rows."""
        begin, size = 0, max(1, CHUNK // self.width)
        pieces = map(self.coordinates, self.source()) if self.stored is None else iter(self.stored.split(size))
        for z in pieces:
            yield slice(begin, begin + len(z)), z
            begin += len(z)

    def times(self, theta: Tensor) -> Tensor:
        """Return Zθ, `(rows, n)`."""
        parts = [z @ theta for _, z in self.chunks()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def gradient(self, values: Tensor) -> Tensor:
        """Return Zᵀ · values, `(r + 1, n)`."""
        total = values.new_zeros(self.width, values.shape[1])
        for at, z in self.chunks():
            total.addmm_(z.T, values[at])
        return total


# ------------------------------------------------------------------------------------------------ least squares


def ridge_path(rows: DesignRows, y: Tensor, penalties: Sequence[float]) -> Tensor:
    """Return the least-squares coefficients for each penalty, `(L, r + 1, n)`, the constant last.

    Args:
        rows: the rows.
        y: targets, `(rows, n)`.
        penalties: values of λ, at least 0.
    """
    target = rows.gradient(rows.share[:, None] * y)
    inverse = 1 / (rows.basis.spectrum + y.new_tensor(penalties)[:, None])
    return torch.cat([inverse[:, :, None] * target[:-1], target[-1:].expand(len(penalties), 1, -1)], 1)


def correlated_ridge_path(rows: DesignRows, y: Tensor, penalties: Sequence[float]) -> Iterator[Tensor]:
    """Yield the same as `ridge_path` for a part of the rows of a basis, by a factorization for each penalty."""
    target, gram = rows.gradient(rows.share[:, None] * y), y.new_zeros(rows.width, rows.width)
    for at, z in rows.chunks():
        gram.addmm_(z.T, rows.share[at, None] * z)
    for penalty in penalties:
        matrix = gram.clone()
        matrix.diagonal()[:-1] += penalty
        lower, failed = torch.linalg.cholesky_ex(matrix)
        yield torch.linalg.pinv(matrix, hermitian=True) @ target if int(failed) else torch.cholesky_solve(target, lower)


def leave_one_out(rows: DesignRows, y: Tensor, penalties: Sequence[float]) -> Tensor:
    """Return the exact leave-one-out mean squared error for each penalty, `(L,)`.

    The error of a row predicted from all others is e/(1 − h), with residual e and leverage h. A row whose prediction the
    others do not determine makes the error infinite.
    """
    path = ridge_path(rows, y, penalties).permute(1, 0, 2).flatten(1)
    spectrum, count = rows.basis.spectrum, len(penalties)
    shrunk = y.new_tensor(penalties)[:, None]
    shrunk = (shrunk / (spectrum + shrunk)).T.contiguous()
    total = y.new_zeros(count)
    for at, z in rows.chunks():
        share = rows.share[at, None]
        squares = z[:, :-1].square() * (share / spectrum)
        # 1 − h without cancellation: the part outside of the column space, plus the shrinkage.
        rest = (1 - share - squares.sum(1, keepdim=True)).clamp_min(0) + squares @ shrunk
        determined = rest > 1e-13
        error = (y[at, None] - (z @ path).view(len(z), count, -1)).square().mean(2)
        error = error / rest.masked_fill(~determined, 1).square()
        total += torch.where(determined, share * error, torch.where(share > 0, torch.inf, 0)).sum(0)
    return total


# ------------------------------------------------------------------------------------------------ other losses


def newton_path(
    rows: DesignRows,
    y: Tensor,
    loss: Loss,
    outputs: int,
    penalties: Sequence[float],
    tolerance: float = 1e-7,
    rough: float | None = None,
) -> Iterator[Tensor]:
    """Yield the coefficients `(r + 1, n)` of each penalty in turn, the constant last, by damped Newton steps.

    Each penalty starts from the solution of the one before; no step raises the penalized loss. Outputs that a common shift
    does not change, as logits, are fitted in n − 1 scores: two classes have the logits (−s/2, s/2).

    Args:
        rows: the rows.
        y: targets as required by the loss.
        loss: a loss with curvature.
        outputs: number of outputs n.
        penalties: values of λ above 0, best in descending order.
        tolerance: relative decrease of the penalized loss that ends the steps.
        rough: that of all penalties but the last; None for the same.
    """
    mix = contrasts(outputs, rows.share) if loss.shift_invariant else torch.eye(outputs, dtype=rows.share.dtype)
    mix = mix.to(rows.share.device)
    here = rows.share.new_zeros(rows.width, len(mix)), rows.share.new_zeros(len(rows.share), len(mix))
    before = here
    for i, penalty in enumerate(penalties):
        goal = _Objective(rows, y, loss, mix, penalty)
        # Solutions move at an even pace along penalties in geometric order: the start is extrapolated if that helps.
        ahead = 2 * here[0] - before[0], 2 * here[1] - before[1]
        start = ahead if i > 1 and goal.value(*ahead) < goal.value(*here) else here
        enough = tolerance if rough is None or i == len(penalties) - 1 else rough
        before, here = here, _newton(goal, *start, enough)
        yield here[0] @ mix


def contrasts(n: int, like: Tensor) -> Tensor:
    """Return n − 1 orthonormal rows with sum 0, `(n − 1, n)`."""
    rows = torch.eye(n, dtype=like.dtype)[1:].clone()
    for i in range(n - 1):
        rows[i, : i + 1] = -1 / (i + 1)
    return rows / rows.norm(dim=1, keepdim=True)


class _Objective:
    """The penalized loss of scores Zθ, whose outputs are Zθ · mix."""

    def __init__(self, rows: DesignRows, y: Tensor, loss: Loss, mix: Tensor, penalty: float) -> None:
        self.rows, self.y, self.loss, self.mix = rows, y, loss, mix
        self.penalty = torch.cat([torch.full_like(rows.basis.spectrum, penalty), mix.new_zeros(1)])[:, None]

    def value(self, theta: Tensor, scores: Tensor) -> float:
        losses = self.loss.rows(scores @ self.mix, self.y)
        return float(self.rows.share @ losses + 0.5 * (self.penalty * theta.square()).sum())

    def gradient(self, theta: Tensor, slopes: Tensor) -> Tensor:
        return self.rows.gradient(slopes * self.rows.share[:, None]) + self.penalty * theta


class _Curvature:
    """Slopes and curvature of the loss in the scores of each row.

    Attributes:
        slopes: `(rows, k)`.
    """

    def __init__(self, goal: _Objective, scores: Tensor) -> None:
        outputs, self.mix, self.share = scores @ goal.mix, goal.mix, goal.rows.share
        self.p: Tensor | None = None
        self.root: Tensor | None = None
        if isinstance(goal.loss, CrossEntropy):  # without `(rows, n, n)`
            self.p = outputs.softmax(1)
            smoothing, n = goal.loss.label_smoothing, outputs.shape[1]
            gradient = self.p - smoothing / n
            index = goal.y.long()[:, None]
            gradient.scatter_add_(1, index, gradient.new_full((1, 1), smoothing - 1).expand_as(index))
        else:
            gradient, root = goal.loss.curvature(outputs, goal.y)
            self.root = root @ self.mix.T
        self.slopes = gradient @ self.mix.T

    def blocks(self, at: slice) -> Tensor:
        """Return the Hessian of some rows in their scores, times the shares, `(b, k, k)`."""
        share = self.share[at, None, None]
        if self.root is not None:
            return (self.root[at].mT @ self.root[at]) * share
        p = self.p[at]  # type: ignore[index]
        if len(self.mix) == 1:  # two classes: ½(0, 1)-contrast
            return (2 * p[:, :1] * p[:, 1:])[:, :, None] * share
        means = p @ self.mix.T
        return ((p[:, None, :] * self.mix) @ self.mix.T - means[:, :, None] * means[:, None, :]) * share

    def diagonal(self) -> Tensor:
        """Return the diagonal of the mean Hessian, `(k,)`."""
        if self.root is not None:
            return self.share @ self.root.square().sum(1)
        p = self.p
        return self.share @ (p @ self.mix.T.square() - (p @ self.mix.T).square())  # type: ignore[operator]

    def times(self, scores: Tensor) -> Tensor:
        """Return the Hessian of each row times a vector of scores, times the shares, `(rows, k)`."""
        share = self.share[:, None]
        if self.root is not None:
            return (self.root.mT @ (self.root @ scores[:, :, None]))[:, :, 0] * share
        outputs = scores @ self.mix
        product = self.p * (outputs - (self.p * outputs).sum(1, keepdim=True))  # type: ignore[operator]
        return (product @ self.mix.T) * share


def _newton(goal: _Objective, theta: Tensor, scores: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Return the minimizer and its scores."""
    value = goal.value(theta, scores)
    for _ in range(MAX_STEPS):
        curvature = _Curvature(goal, scores)
        gradient = goal.gradient(theta, curvature.slopes)
        direct = goal.rows.direct and _solves_directly(len(goal.y), *theta.shape)
        step = _exact(goal, curvature, gradient) if direct else _inexact(goal, curvature, gradient)
        decrease = float((gradient * step).sum())
        if not decrease > 0:
            break
        move, size = goal.rows.times(step), 1.0
        while True:
            new_theta, new_scores = theta - size * step, scores - size * move
            new = goal.value(new_theta, new_scores)
            if new <= value - 1e-4 * size * decrease or size < SHORTEST:
                break
            size /= 2
        if not new < value:
            break
        theta, scores, value = new_theta, new_scores, new
        if decrease <= 2 * tolerance * abs(value):
            break
    return theta, scores


def _solves_directly(rows: int, width: int, scores: int) -> bool:
    """Return whether a factorization is expected to take less time than conjugate gradients."""
    unknowns = width * scores
    direct = rows * width**2 * scores * (scores + 1) + unknowns**3
    iterative = 200 * rows * unknowns + 2e7
    return direct <= iterative and unknowns <= 4_000


def _exact(goal: _Objective, curvature: _Curvature, gradient: Tensor) -> Tensor:
    """Return the Newton step from a factorization."""
    width, k = gradient.shape
    matrix = gradient.new_zeros(k, width, k, width)
    for at, z in goal.rows.chunks():
        blocks = curvature.blocks(at)
        for i in range(k):
            for j in range(i + 1):
                matrix[i, :, j] += (z * blocks[:, i, j, None]).T @ z
    for i in range(k):
        for j in range(i):
            matrix[j, :, i] = matrix[i, :, j].T
    matrix = matrix.reshape(k * width, k * width)
    diagonal = matrix.diagonal()
    diagonal += goal.penalty[:, 0].repeat(k)
    # Saturated rows leave no curvature along the constant.
    diagonal += 1e-14 * diagonal.max() + 1e-300
    lower, failed = torch.linalg.cholesky_ex(matrix)
    if int(failed):
        return _inexact(goal, curvature, gradient)
    return torch.cholesky_solve(gradient.T.reshape(-1, 1), lower).reshape(k, width).T


def _inexact(goal: _Objective, curvature: _Curvature, gradient: Tensor) -> Tensor:
    """Return the Newton step from preconditioned conjugate gradients: coordinates are uncorrelated on average."""
    spectrum = torch.cat([goal.rows.basis.spectrum, gradient.new_ones(1)])[:, None]
    scale = 1 / (spectrum * curvature.diagonal() + goal.penalty).clamp_min(1e-300)
    step, rest = torch.zeros_like(gradient), gradient.clone()
    direction = scale * rest
    size = first = float((rest * direction).sum())
    for _ in range(100):
        product = goal.rows.gradient(curvature.times(goal.rows.times(direction))) + goal.penalty * direction
        bend = float((direction * product).sum())
        if not bend > 0:
            break
        length = size / bend
        step += length * direction
        rest -= length * product
        scaled = scale * rest
        new = float((rest * scaled).sum())
        if new <= INEXACT**2 * first:
            break
        direction = scaled + (new / size) * direction
        size = new
    return step if float(step.abs().max()) > 0 else scale * gradient
