"""Damped Newton steps in parameters that outputs are linear in: all of them, or one group after another, the others fixed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from kapsi.errors import SpecError
from kapsi.modules import Layer
from kapsi.training.data import Batch
from kapsi.training.losses import Loss
from kapsi.training.penalties import Penalties
from kapsi.training.solvers.linear import LinearDesign, Structure

__all__ = ["LARGEST_SYSTEM", "Block", "ColumnBlock", "TensorBlock", "rows_at_once", "tensor_blocks"]

LARGEST_SYSTEM = 6_000
"""Unknowns of the largest system that is solved at once: 288 MB in float64, and some seconds."""

CHUNK = 2**22
"""Numbers of a design that are there at a time: 32 MiB in float64."""

BASIS_AT_ONCE = 64
"""Unknowns whose columns are made in one pass."""

SEPARATE = ("mse", "huber", "bernoulli")
"""Losses whose curvature has nothing beside the diagonal."""

LEAST_PIVOT = 1e-6
"""Pivot of a system with a diagonal of ones below which columns are looked at for whether they depend on each other."""


def rows_at_once(numbers: int) -> int:
    """Return how many rows of so many numbers are taken at a time."""
    return max(1, CHUNK // max(1, numbers))


@dataclass
class Totals:
    """Sums over rows at some values of the unknowns.

    Attributes:
        loss: Σ w · loss.
        gradient: of that in the unknowns, `(groups, T)`.
        curvature: `(groups, T, T)`.
    """

    loss: Tensor
    gradient: Tensor
    curvature: Tensor


class Block(ABC):
    """Unknowns `(groups, T)` that outputs are linear in; different groups have no curvature in common."""

    strength: Tensor
    """Weight of each unknown's square in the penalty, `(groups, T)`."""
    rough: Tensor | None = None
    """Second derivative of further penalties, `(groups, T, T)`."""
    numbers: int
    """Numbers of the design of a row."""

    @abstractmethod
    def get(self) -> Tensor:
        """Return the unknowns of the present parameters."""

    @abstractmethod
    def put(self, unknowns: Tensor) -> None:
        """Set the parameters."""

    @abstractmethod
    def design(self, x: Tensor) -> Any:
        """Return what the outputs of some rows are made with."""

    @abstractmethod
    def outputs(self, design: Any, unknowns: Tensor) -> Tensor:
        """Return the outputs `(b, n)`."""

    @abstractmethod
    def gather(self, design: Any, gradient: Tensor, root: Tensor, totals: Totals) -> None:
        """Add the weighted gradient `(b, n)` and the factors `(b, k, n)` of the weighted curvature to the totals."""

    def add(self, batch: Batch, loss: Loss, unknowns: Tensor, totals: Totals, design: Any) -> Tensor:
        """Add what some rows give to the totals; return their losses."""
        output = self.outputs(design, unknowns)
        weight = torch.ones(len(output), dtype=output.dtype) if batch.weight is None else batch.weight
        weight = weight.to(output.device, output.dtype)
        target = batch.y.to(output.device)
        target = target.double() if target.is_floating_point() else target
        losses = loss.rows(output, target)
        totals.loss += (weight * losses).sum()
        gradient, root = loss.curvature(output, target)
        self.gather(design, weight[:, None] * gradient, weight.sqrt()[:, None, None] * root, totals)
        return losses

    def totals(self) -> Totals:
        """Return zeros."""
        zero = torch.zeros_like(self.strength)
        groups, width = zero.shape
        return Totals(zero.new_zeros(()), zero, zero.new_zeros(groups, width, width))

    @abstractmethod
    def penalty(self, factor: float) -> Tensor:
        """Return the penalty of all present parameters, λ being `factor`."""

    def _bent(self, unknowns: Tensor) -> Tensor:
        if self.rough is None:
            return torch.zeros_like(unknowns)
        return (self.rough @ unknowns[..., None])[..., 0]

    def step(self, unknowns: Tensor, totals: Totals, count: float, factor: float) -> tuple[Tensor, float]:
        """Return the Newton step from some unknowns, −(curvature)⁻¹ gradient of the penalized mean loss, and what it promises."""
        gradient = totals.gradient / count + factor * self.strength * unknowns + self._bent(unknowns)
        matrix = totals.curvature / count
        matrix.diagonal(dim1=-2, dim2=-1).add_(factor * self.strength)
        if self.rough is not None:
            matrix += self.rough
        size = matrix.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
        nothing = size == 0
        size = size.masked_fill(nothing, 1)
        matrix /= size[:, :, None] * size[:, None, :]
        matrix.diagonal(dim1=-2, dim2=-1).add_(nothing.double())
        step = -_solved(matrix, gradient / size) / size
        return step, -0.5 * float((step * gradient).sum())


def _solved(matrix: Tensor, known: Tensor) -> Tensor:
    """Return M⁻¹ b of systems `(groups, T, T)`; directions that change nothing but by rounding stay out of it."""
    lower, failed = torch.linalg.cholesky_ex(matrix)
    pivots = lower.diagonal(dim1=-2, dim2=-1)
    if not bool(failed.any()) and (not pivots.numel() or float(pivots.min()) > LEAST_PIVOT):
        return torch.cholesky_solve(known[..., None], lower)[..., 0]
    values, vectors = torch.linalg.eigh(matrix)
    least = values[..., -1:] * 16 * values.shape[-1] * torch.finfo(values.dtype).eps
    inverse = torch.where(values > least, 1 / values, 0)
    return (vectors @ (inverse * (vectors.mT @ known[..., None])[..., 0])[..., None])[..., 0]


class ColumnBlock(Block):
    """All coefficients of a linear model.

    Where the outputs do not depend on each other in the loss, each is a group; else all of them are one.

    Args:
        design: the model.
        loss: says whether outputs depend on each other, and whether the same number added to all of them changes anything.

    Raises:
        SpecError: too many coefficients.
    """

    def __init__(self, design: LinearDesign, loss: Loss) -> None:
        self.linear = design
        coupled = loss.name not in SEPARATE
        self.shifts = loss.name == "cross_entropy"
        n, width = design.outputs, design.columns + design.constant
        self.groups = [list(range(n))] if coupled else [[j] for j in range(n)]
        size = width * len(self.groups[0])
        if size > LARGEST_SYSTEM:
            what = f"{n} outputs × {width:,} columns" if coupled else f"{width:,} columns"
            raise SpecError(
                f"ridge: {what} are {size:,} unknowns of one system, at most {LARGEST_SYSTEM:,} are solved at once; "
                "take solver lbfgs or adamw"
            )
        one = torch.ones(n, 1, dtype=torch.float64, device=design.device)
        extra = [0 * one] if design.constant else []
        strength = torch.cat([design.strength.expand(n, -1), *extra], 1)
        there = torch.cat([(design.counts > 0).double().expand(n, -1), *(one for _ in extra)], 1)
        self.there, self.strength = self._grouped(there), self._grouped(strength)
        self.numbers = width
        if design.config.smoothness:
            self.rough = self._roughness(size, width)

    def _roughness(self, size: int, width: int) -> Tensor:
        design = self.linear
        every = torch.arange(design.columns, device=design.device)
        made = torch.zeros(len(self.groups), size, size, dtype=torch.float64, device=design.device)
        piece = design.roughness(0, every)
        for i, group in enumerate(self.groups):
            for k, j in enumerate(group):
                if design.masked and j:
                    piece = design.roughness(j, every)
                where = slice(k * width, k * width + design.columns)
                if piece is not None:
                    made[i, where, where] = piece
        return made * self.there[:, :, None] * self.there[:, None, :]

    def _grouped(self, values: Tensor) -> Tensor:
        return values.reshape(len(self.groups), -1).clone()

    def get(self) -> Tensor:
        theta, bias = self.linear.coefficients()
        return self._grouped(torch.cat([theta, bias[:, None]], 1) if self.linear.constant else theta)

    def put(self, unknowns: Tensor) -> None:
        values = unknowns.reshape(self.linear.outputs, -1)
        width = self.linear.columns
        self.linear.assign(values[:, :width], values[:, width] if self.linear.constant else None)

    def design(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        columns, offset = self.linear.expand(x)
        if self.linear.constant:
            columns = torch.cat([columns, columns.new_ones(len(columns), 1)], 1)
        return columns, offset

    def outputs(self, design: Any, unknowns: Tensor) -> Tensor:
        columns, offset = design
        output = columns @ unknowns.reshape(self.linear.outputs, -1).T
        return output if offset is None else output + offset

    def gather(self, design: Any, gradient: Tensor, root: Tensor, totals: Totals) -> None:
        columns = design[0]
        width = columns.shape[1]
        totals.gradient += self._grouped(gradient.T @ columns) * self.there
        blocks = root.mT @ root
        for i, group in enumerate(self.groups):
            for k, first in enumerate(group):
                for m, second in enumerate(group[: k + 1]):
                    part = (columns * blocks[:, first, second, None]).T @ columns
                    rows, others = (slice(at * width, (at + 1) * width) for at in (k, m))
                    totals.curvature[i, rows, others] += part
                    if m < k:
                        totals.curvature[i, others, rows] += part.T

    def penalty(self, factor: float) -> Tensor:
        unknowns = self.get()
        bent = factor * self.strength * unknowns + self._bent(unknowns)
        return 0.5 * (unknowns * bent).sum()

    def step(self, unknowns: Tensor, totals: Totals, count: float, factor: float) -> tuple[Tensor, float]:
        """Return the Newton step; coefficients that are not there stay zero."""
        curvature = totals.curvature
        curvature *= self.there[:, :, None] * self.there[:, None, :]
        if not self.shifts:
            return super().step(unknowns, totals, count, factor)
        # What is the same for all outputs changes no probability: where no penalty decides, it stays as it is. A curvature of
        # its own, which meets no gradient, keeps the system regular.
        n, width = self.linear.outputs, self.linear.columns + self.linear.constant
        free = (factor * self.strength * self.there).reshape(n, -1).sum(0) == 0
        free &= (self.there.reshape(n, -1) > 0).all(0)
        if self.rough is not None:
            free[: self.linear.columns] = False
        for column in free.nonzero()[:, 0].tolist():
            own = slice(column, None, width)
            curvature[0, own, own] += curvature[0, own, own].diagonal().mean()
        step, promise = super().step(unknowns, totals, count, factor)
        values = step.reshape(n, -1)
        return self._grouped(values - values.mean(0) * free), promise


class TensorBlock(Block):
    """Some tensors of a layer in each of whose products at most one of them stands.

    Args:
        found: the structure of the model.
        names: of the parameters, as the layer calls them.
        penalties: on the model.
    """

    def __init__(self, found: Structure, names: list[str], penalties: Penalties) -> None:
        self.found, self.names, self.penalties = found, names, penalties
        layer: Any = found.layer
        self.layer: nn.Module = layer
        self.parameters = [layer.get_parameter(name) for name in names]
        self.sizes = [p.numel() for p in self.parameters]
        weights = {id(p): weight for p, weight in penalties.quadratic}
        strength = [torch.full((p.numel(),), weights.get(id(p), 0.0), dtype=torch.float64) for p in self.parameters]
        self.strength = torch.cat(strength)[None].to(self.parameters[0].device)
        self.numbers = layer.out_features * (self.strength.shape[1] + 1)

    def get(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.parameters])[None]

    @torch.no_grad()
    def put(self, unknowns: Tensor) -> None:
        for p, values in zip(self.parameters, unknowns[0].split(self.sizes), strict=True):
            p.copy_(values.view_as(p))

    @torch.no_grad()
    def penalty(self, factor: float) -> Tensor:
        value = self.strength.new_zeros(())
        for p, weight in self.penalties.quadratic if factor else []:
            value = value + 0.5 * factor * weight * p.square().sum()
        return value

    @torch.no_grad()
    def design(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.layout != torch.strided:
            x = x.to_dense()
        if x.dim() != 2:
            raise SpecError(f"ridge: expected inputs of shape (rows, m), got {tuple(x.shape)}")
        inputs = self.found.inputs(x.to(self.strength.device, torch.float64))
        features = self.layer.fixed_features(inputs) if isinstance(self.layer, Layer) else None

        def outputs(unknowns: Tensor) -> Tensor:
            pieces = zip(self.names, self.parameters, unknowns.split(self.sizes), strict=True)
            values = {name: piece.view(p.shape) for name, p, piece in pieces}
            return functional_call(self.layer, values, (inputs, features))

        width = self.strength.shape[1]
        base = outputs(torch.zeros(width, dtype=torch.float64, device=inputs.device))
        basis = torch.eye(width, dtype=torch.float64, device=inputs.device)
        made = torch.cat([vmap(outputs)(part) for part in basis.split(BASIS_AT_ONCE)])
        return (made - base).movedim(0, -1), base

    def outputs(self, design: Any, unknowns: Tensor) -> Tensor:
        made, base = design
        return base + made @ unknowns[0]

    def gather(self, design: Any, gradient: Tensor, root: Tensor, totals: Totals) -> None:
        made = design[0]
        totals.gradient[0] += torch.einsum("bn,bnt->t", gradient, made)
        rows = (root @ made).flatten(0, 1)
        totals.curvature[0].addmm_(rows.T, rows)


def tensor_blocks(found: Structure, penalties: Penalties) -> Iterator[TensorBlock]:
    """Yield the blocks of a sweep: one tensor of each ψ at a time, together with all that is linear by itself.

    Raises:
        SpecError: a block has too many unknowns.
    """
    layer = found.layer
    names = {id(p): name for name, p in layer.named_parameters()}
    linear = [member.parameter for part in found.parts.values() for member in part.members]
    alone = sum(p.numel() for p in linear)
    turns = [[f[k % len(f)] for f in found.factors] for k in range(max(map(len, found.factors)))]
    sizes = [sum(p.numel() for p in turn) for turn in turns]
    joined = max(sizes) + alone <= LARGEST_SYSTEM
    blocks = [turn + linear if joined else turn for turn in turns] + ([] if joined or not linear else [linear])
    for block in blocks:
        size = sum(p.numel() for p in block)
        if size > LARGEST_SYSTEM:
            shown = ", ".join(f"{names[id(p)]} {tuple(p.shape)}" for p in block[:3])
            raise SpecError(
                f"ridge: {shown} are {size:,} unknowns of one system, at most {LARGEST_SYSTEM:,} are solved at once; take solver "
                "lbfgs or adamw, or a smaller rank or expansion"
            )
    for block in blocks:
        yield TensorBlock(found, [names[id(p)] for p in block], penalties)
