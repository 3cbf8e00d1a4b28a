"""B-splines on arbitrary knots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def with_outer_knots(breakpoints: Tensor, degree: int) -> Tensor:
    """Return breakpoints `(n + 1, m)` with `degree` further knots on either side, at the mean width of the intervals."""
    low, high = breakpoints[:1], breakpoints[-1:]
    width = high / (len(breakpoints) - 1) - low / (len(breakpoints) - 1)
    steps = torch.arange(1, degree + 1, dtype=breakpoints.dtype, device=breakpoints.device).unsqueeze(-1) * width
    return torch.cat((low - steps.flip(0), breakpoints, high + steps))


def pieces_on_knots(x: Tensor, knots: Tensor, degree: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the non-zero functions at inputs `(..., m)`, for non-decreasing knots `(n + 1 + 2·degree, m)`.

    Returns:
        The inputs clamped to the range; the interval of each, equal to the index of its first function; the functions
        `(..., degree + 1, m)`; and terms with the slopes as differences, `(..., degree, m)`.
    """
    ends = knots[degree : len(knots) - degree]
    clamped = x.clamp(ends[0], ends[-1])
    inputs = torch.arange(x.shape[-1], device=x.device)
    # Bisection for the last interval that begins before the upper end: repeated knots make intervals of zero width.
    last = (ends < ends[-1]).sum(0) - 1
    cell = torch.zeros_like(clamped, dtype=torch.long)
    for bit in reversed(range((len(ends) - 2).bit_length())):
        trial = torch.minimum(cell + 2**bit, last)
        cell = torch.where(ends[trial, inputs] <= clamped, trial, cell)
    rows = cell.unsqueeze(-2) + torch.arange(1, 2 * degree + 1, device=x.device).unsqueeze(-1)
    pieces, lower = _pieces([clamped] * degree, knots[rows, inputs].unbind(-2), torch.ones_like(clamped) + 0 * clamped)
    return clamped, cell, torch.stack(pieces, -2), torch.stack(lower, -2) if lower else clamped.unsqueeze(-2)


def _pieces(points: Sequence[Tensor], window: Sequence[Tensor], one: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return the degree + 1 non-zero functions on an interval, and terms with their slopes as differences.

    Recursion of Cox and de Boor with a point for each degree. If all points equal x, the results are the values at x; with
    `degree` consecutive knots of a finer grid, weights of these functions in a function of the finer grid (Oslo algorithm,
    or blossoming). No divisor is zero for an interval of positive width, also with repeated knots.

    Args:
        points: a point for each degree from 1.
        window: the last `degree` knots up to the lower end of the interval, and the first `degree` from its upper end.
        one: ones in the shape of the result.
    """
    degree = len(points)
    basis = [one]
    lower: list[Tensor] = []
    for d, x in enumerate(points, 1):
        shares = [basis[i] / (window[degree + i] - window[degree - d + i]) for i in range(d)]
        left = [(x - window[degree - d + i]) * share for i, share in enumerate(shares)]
        right = [(window[degree + i] - x) * share for i, share in enumerate(shares)]
        basis = [right[0], *(left[i - 1] + right[i] for i in range(1, d)), left[-1]]
        lower = [d * share for share in shares] if d == degree else []
    return basis, lower


def subdivide(breakpoints: Tensor, parts: int) -> Tensor:
    """Return breakpoints `(n + 1, m)` with each interval divided into equal parts, `(n·parts + 1, m)`."""
    share = torch.arange(parts, dtype=breakpoints.dtype, device=breakpoints.device).unsqueeze(-1) / parts
    inner = torch.lerp(breakpoints[:-1].unsqueeze(1), breakpoints[1:].unsqueeze(1), share)
    return torch.cat((inner.flatten(0, 1), breakpoints[-1:]))


def insertion(old: Tensor, new: Tensor, degree: int, parts: int) -> tuple[Tensor, Tensor]:
    """Return coefficients of new functions in old ones, for new intervals that are equal parts of the old.

    Args:
        old, new: all knots, `(…, m)`.
        degree: degree of old and new splines.
        parts: number of new intervals in each old interval.

    Returns:
        For each new function the index of the first old function with a share in it, `(q′, m)`, and the weights of this and
        the next old functions, `(degree + 1, q′, m)`.
    """
    functions, inputs = len(new) - degree - 1, torch.arange(new.shape[1], device="cpu")
    number = torch.arange(functions, device="cpu").unsqueeze(-1)
    has_width = new[degree : len(new) - degree].diff(dim=0) > 0
    # Any interval of a function determines its weights; the middle ones lose the fewest digits.
    cell = torch.full((functions, new.shape[1]), -1, device="cpu")
    for back in sorted(range(degree + 1), key=lambda i: abs(2 * i - degree)):
        trial = (number - back).expand_as(cell)
        inside = (trial >= 0) & (trial < len(has_width))
        usable = inside & has_width[trial.clamp(0, len(has_width) - 1), inputs]
        cell = torch.where((cell < 0) & usable, trial, cell)
    first = cell.clamp_min(0) // parts
    window = [old[first + i, inputs] for i in range(1, 2 * degree + 1)]
    points = [new[d : d + functions] for d in range(1, degree + 1)]
    pieces, _ = _pieces(points, window, torch.ones_like(new[:functions]))
    # A function between equal knots is zero, with arbitrary weights.
    return first, torch.stack([torch.where(cell < 0, 0, piece) for piece in pieces])


def express_in(rows: Tensor, *, first: Tensor, weights: Tensor, inputs: int) -> Tensor:
    """Return coefficients `(..., q·inputs)` of old functions as coefficients of new ones; see `insertion`."""
    # In float64, unavailable on some devices.
    old = rows.detach().to("cpu", torch.float64).unflatten(-1, (-1, inputs))
    index = first.expand(*old.shape[:-2], len(first), inputs)
    new = sum((weight * old.gather(-2, index + i) for i, weight in enumerate(weights)), old.new_zeros(()))
    return new.flatten(-2).to(rows)
