"""Damped Newton steps in blocks of parameters with linear outputs: all parameters, or a few tensors with the others fixed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from kapsi.errors import DataError, SpecError
from kapsi.modules import Layer
from kapsi.training.data import Batch
from kapsi.training.losses import Loss
from kapsi.training.penalties import Penalties
from kapsi.training.solvers.linear import LinearDesign, Structure

MAX_SYSTEM = 6_000
"""Unknowns of the largest linear system: 288 MB in float64, and some seconds."""

CHUNK = 2**22
"""Numbers of a design in memory: 32 MiB in float64."""

BASIS_AT_ONCE = 64
"""Unknowns per forward pass of a design."""

MIN_PIVOT = 1e-6
"""Smallest Cholesky pivot of a system with unit diagonal; below it, linearly dependent columns are removed by eigenvalues."""


def rows_at_once(width: int) -> int:
    """Return the number of rows per chunk, for `width` values per row."""
    return max(1, CHUNK // max(1, width))


@dataclass
class Totals:
    """Sums over rows at the current unknowns.

    Attributes:
        loss: Σ w · loss.
        gradient: gradient of the loss in the unknowns, `(groups, T)`.
        curvature: Gauss–Newton matrix, `(groups, T, T)`.
    """

    loss: Tensor
    gradient: Tensor
    curvature: Tensor


class Block(ABC):
    """Unknowns `(groups, T)` with linear outputs; the curvature is block diagonal in the groups."""

    strength: Tensor
    """L2 weight of each unknown, `(groups, T)`."""
    rough: Tensor | None = None
    """Hessian of the smoothness penalty, `(groups, T, T)`."""
    width: int
    """Numbers per row of the design."""

    @abstractmethod
    def get(self) -> Tensor:
        """Return the unknowns from the current parameters."""

    @abstractmethod
    def put(self, unknowns: Tensor) -> None:
        """Set the parameters from unknowns."""

    @abstractmethod
    def design(self, x: Tensor) -> Any:
        """Return the design of some rows, the argument of `outputs` and `gather`."""

    @abstractmethod
    def outputs(self, design: Any, unknowns: Tensor) -> Tensor:
        """Return the outputs `(b, n)`."""

    @abstractmethod
    def gather(self, design: Any, gradient: Tensor, root: Tensor, totals: Totals) -> None:
        """Add the weighted gradient `(b, n)` and the factors `(b, k, n)` of the weighted curvature to the totals."""

    def add(self, batch: Batch, loss: Loss, unknowns: Tensor, totals: Totals, design: Any) -> Tensor:
        """Add loss, gradient and curvature of some rows to the totals; return the losses."""
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
        """Return totals of zero."""
        zero = torch.zeros_like(self.strength)
        groups, width = zero.shape
        return Totals(zero.new_zeros(()), zero, zero.new_zeros(groups, width, width))

    @abstractmethod
    def penalty(self, factor: float) -> Tensor:
        """Return the penalty of all current parameters for λ = `factor`."""

    def _smoothness_gradient(self, unknowns: Tensor) -> Tensor:
        if self.rough is None:
            return torch.zeros_like(unknowns)
        return (self.rough @ unknowns[..., None])[..., 0]

    def step(self, unknowns: Tensor, totals: Totals, count: float, factor: float) -> tuple[Tensor, float]:
        """Return the Newton step, −(curvature)⁻¹ gradient of the penalized mean loss, and the predicted decrease."""
        gradient = totals.gradient / count + factor * self.strength * unknowns + self._smoothness_gradient(unknowns)
        matrix = totals.curvature / count
        matrix.diagonal(dim1=-2, dim2=-1).add_(factor * self.strength)
        if self.rough is not None:
            matrix += self.rough
        size = matrix.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
        unused = size == 0
        size = size.masked_fill(unused, 1)
        matrix /= size[:, :, None] * size[:, None, :]
        matrix.diagonal(dim1=-2, dim2=-1).add_(unused.double())
        step = -_solve(matrix, gradient / size) / size
        return step, -0.5 * float((step * gradient).sum())


def _solve(matrix: Tensor, target: Tensor) -> Tensor:
    """Return M⁻¹ b of systems `(groups, T, T)`, with the pseudo-inverse for singular ones."""
    lower, failed = torch.linalg.cholesky_ex(matrix)
    pivots = lower.diagonal(dim1=-2, dim2=-1)
    if not bool(failed.any()) and (not pivots.numel() or float(pivots.min()) > MIN_PIVOT):
        return torch.cholesky_solve(target[..., None], lower)[..., 0]
    values, vectors = torch.linalg.eigh(matrix)
    least = values[..., -1:] * 16 * values.shape[-1] * torch.finfo(values.dtype).eps
    inverse = torch.where(values > least, 1 / values, 0)
    return (vectors @ (inverse * (vectors.mT @ target[..., None])[..., 0])[..., None])[..., 0]


class ColumnBlock(Block):
    """All coefficients of a linear model.

    Each output is a group for losses with a diagonal curvature; otherwise all outputs form one group.

    Args:
        design: the model.
        loss: the loss, which determines the groups.

    Raises:
        SpecError: too many coefficients.
    """

    def __init__(self, design: LinearDesign, loss: Loss) -> None:
        self.linear = design
        coupled = not loss.separable
        self.shifts = loss.shift_invariant
        n, width = design.outputs, design.columns + design.constant
        self.groups = [list(range(n))] if coupled else [[j] for j in range(n)]
        size = width * len(self.groups[0])
        if size > MAX_SYSTEM:
            product = f"{n} outputs × {width:,} columns" if coupled else f"{width:,} columns"
            raise SpecError(
                f"ridge: {product} give a linear system of {size:,} unknowns; at most {MAX_SYSTEM:,} are supported; "
                "use solver lbfgs or adamw"
            )
        ones = torch.ones(n, 1, dtype=torch.float64, device=design.device)
        extra = [0 * ones] if design.constant else []
        strength = torch.cat([design.strength.expand(n, -1), *extra], 1)
        mask = torch.cat([(design.counts > 0).double().expand(n, -1), *(ones for _ in extra)], 1)
        self.mask, self.strength = self._grouped(mask), self._grouped(strength)
        self.width = width
        if design.config.fixed_smoothness:
            self.rough = self._roughness(size, width)

    def _roughness(self, size: int, width: int) -> Tensor:
        design = self.linear
        columns = torch.arange(design.columns, device=design.device)
        rough = torch.zeros(len(self.groups), size, size, dtype=torch.float64, device=design.device)
        piece = design.roughness(0, columns)
        for i, group in enumerate(self.groups):
            for k, j in enumerate(group):
                if design.masked and j:
                    piece = design.roughness(j, columns)
                where = slice(k * width, k * width + design.columns)
                if piece is not None:
                    rough[i, where, where] = piece
        return rough * self.mask[:, :, None] * self.mask[:, None, :]

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
        totals.gradient += self._grouped(gradient.T @ columns) * self.mask
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
        slope = factor * self.strength * unknowns + self._smoothness_gradient(unknowns)
        return 0.5 * (unknowns * slope).sum()

    def step(self, unknowns: Tensor, totals: Totals, count: float, factor: float) -> tuple[Tensor, float]:
        """Return the Newton step; masked coefficients stay zero."""
        curvature = totals.curvature
        curvature *= self.mask[:, :, None] * self.mask[:, None, :]
        if not self.shifts:
            return super().step(unknowns, totals, count, factor)
        # A change common to all outputs changes no probability. Without a penalty it stays zero; an added curvature, orthogonal to
        # the gradient, keeps the system regular.
        n, width = self.linear.outputs, self.linear.columns + self.linear.constant
        free = (factor * self.strength * self.mask).reshape(n, -1).sum(0) == 0
        free &= (self.mask.reshape(n, -1) > 0).all(0)
        if self.rough is not None:
            free[: self.linear.columns] = False
        for column in free.nonzero()[:, 0].tolist():
            same = slice(column, None, width)
            curvature[0, same, same] += curvature[0, same, same].diagonal().mean()
        step, decrease = super().step(unknowns, totals, count, factor)
        values = step.reshape(n, -1)
        return self._grouped(values - values.mean(0) * free), decrease


class TensorBlock(Block):
    """Tensors of a layer with outputs linear in all of them jointly: at most one from each product.

    Args:
        structure: the structure of the model.
        names: names of the parameters within the layer.
        penalties: the penalties of the model.
    """

    def __init__(self, structure: Structure, names: list[str], penalties: Penalties) -> None:
        self.structure, self.names, self.penalties = structure, names, penalties
        layer: Any = structure.layer
        self.layer: nn.Module = layer
        self.parameters = [layer.get_parameter(name) for name in names]
        self.sizes = [p.numel() for p in self.parameters]
        weights = {id(p): weight for p, weight in penalties.quadratic}
        strength = [torch.full((p.numel(),), weights.get(id(p), 0.0), dtype=torch.float64) for p in self.parameters]
        self.strength = torch.cat(strength)[None].to(self.parameters[0].device)
        self.width = layer.out_features * (self.strength.shape[1] + 1)

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
            raise DataError(f"ridge: expected inputs of shape (rows, m), got {tuple(x.shape)}")
        inputs = self.structure.inputs(x.to(self.strength.device, torch.float64))
        features = self.layer.fixed_features(inputs) if isinstance(self.layer, Layer) else None

        def outputs(unknowns: Tensor) -> Tensor:
            pieces = zip(self.names, self.parameters, unknowns.split(self.sizes), strict=True)
            values = {name: piece.view(p.shape) for name, p, piece in pieces}
            return functional_call(self.layer, values, (inputs, features))

        width = self.strength.shape[1]
        base = outputs(torch.zeros(width, dtype=torch.float64, device=inputs.device))
        basis = torch.eye(width, dtype=torch.float64, device=inputs.device)
        columns = torch.cat([vmap(outputs)(part) for part in basis.split(BASIS_AT_ONCE)])
        return (columns - base).movedim(0, -1), base

    def outputs(self, design: Any, unknowns: Tensor) -> Tensor:
        columns, base = design
        return base + columns @ unknowns[0]

    def gather(self, design: Any, gradient: Tensor, root: Tensor, totals: Totals) -> None:
        columns = design[0]
        totals.gradient[0] += torch.einsum("bn,bnt->t", gradient, columns)
        rows = (root @ columns).flatten(0, 1)
        totals.curvature[0].addmm_(rows.T, rows)


def tensor_blocks(structure: Structure, penalties: Penalties) -> Iterator[TensorBlock]:
    """Yield the blocks of a sweep: one tensor of each ψ at a time, together with all linear parameters.

    Raises:
        SpecError: a block has too many unknowns.
    """
    layer = structure.layer
    names = {id(p): name for name, p in layer.named_parameters()}
    linear = [member.parameter for part in structure.parts.values() for member in part.members]
    alone = sum(p.numel() for p in linear)
    turns = [[f[k % len(f)] for f in structure.factors] for k in range(max(map(len, structure.factors)))]
    sizes = [sum(p.numel() for p in turn) for turn in turns]
    together = max(sizes) + alone <= MAX_SYSTEM
    blocks = [turn + linear if together else turn for turn in turns] + ([] if together or not linear else [linear])
    for block in blocks:
        size = sum(p.numel() for p in block)
        if size > MAX_SYSTEM:
            shown = ", ".join(f"{names[id(p)]} {tuple(p.shape)}" for p in block[:3])
            raise SpecError(
                f"ridge: {shown} give a linear system of {size:,} unknowns; at most {MAX_SYSTEM:,} are supported; use solver "
                "lbfgs or adamw, or a smaller rank or expansion"
            )
    for block in blocks:
        yield TensorBlock(structure, [names[id(p)] for p in block], penalties)
