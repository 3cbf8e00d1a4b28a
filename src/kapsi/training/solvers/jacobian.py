"""The objective of Levenberg–Marquardt at the parameters of several starts: losses, gradients, Jacobians, Gauss–Newton matrices.

Shapes: s starts, b rows of a chunk, n outputs, P trained parameters, k rows of the factor of the loss's curvature.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacfwd, jvp, vmap

from kapsi.errors import DataError, SpecError
from kapsi.hooks import copied
from kapsi.modules import Model
from kapsi.training.data import Batch
from kapsi.training.losses.targetwise import TargetwiseLoss
from kapsi.training.penalties import Penalties, has_smooth_parameters
from kapsi.training.solvers.base import Task
from kapsi.training.solvers.layered import LayeredJacobian, offsets
from kapsi.training.solvers.smoothing import Smoothing

MAX_JACOBIAN = 2**25
"""Numbers of the Jacobians in memory, of all starts: 256 MiB in float64. Larger ones are computed in chunks of rows."""

MAX_STORED = 2**27
"""Numbers of inputs and targets stored in float64 during training, 1 GiB; larger data are read in each iteration."""

MAX_DIRECT = 2_500
"""Parameters up to which A is computed and factored; steps of larger models use conjugate gradients.

Seconds per iteration for 4,000 rows, a tanh network and one thread, direct and by conjugate gradients: 0.06 and 0.14 with
469 parameters, 0.43 and 0.27 with 1,457, 1.8 and 0.55 with 2,965. Direct steps are exact for ill-conditioned A, hence a limit
above the break-even point.
"""

ROWS_AT_ONCE = 2**13
"""Rows per forward pass without a Jacobian."""


@dataclass
class Point:
    """The objective and its quadratic model at the parameters of several starts.

    Attributes:
        data: mean loss of the rows, `(s,)`.
        total: mean loss plus penalties, `(s,)`.
        gradient: b, `(s, P)`.
        matrix: A, `(s, P, P)`; None for conjugate gradients.
        parts: for each chunk of rows the outputs `(s, b, n)`, √(w/count) S `(s, b, k, n)`, and its product with J
            `(s, b·k, P)`; None if J is not stored.
    """

    data: Tensor
    total: Tensor
    gradient: Tensor
    matrix: Tensor | None = None
    parts: list[tuple[Tensor, Tensor, Tensor]] | None = None

    def update(self, other: Point, accepted: Tensor) -> None:
        """Copy the values of another point for some of the starts, in place."""
        for name in ("data", "total", "gradient", "matrix"):
            getattr(self, name)[accepted] = getattr(other, name)[accepted]
        for part, new in zip(cast(list[Any], self.parts), cast(list[Any], other.parts), strict=True):
            for tensor, values in zip(part, new, strict=True):
                tensor[accepted] = values[accepted]


class Objective:
    """The penalized mean loss as a function of the trained parameters, in float64.

    Args:
        task: model, rows, loss and penalties.
        starts: number of parameter vectors evaluated together; decides the chunk size.

    Attributes:
        model: the copy in float64.
        count: P.
        direct: whether A is computed; otherwise only products with A.
        keep_jacobian: whether the scaled Jacobian of a point is stored.
        smoothing: penalties whose factors the solver chooses, not part of the objective; None without any.
        targets: effective number of targets, (Σw)²/Σw² for weights w of rows times those of outputs, 0 for missing targets.

    Raises:
        SpecError: sparse inputs, or a model without support for `torch.func.vmap`.
    """

    def __init__(self, task: Task, starts: int) -> None:
        self.task = task
        model = self.model = copied(task.model).to(torch.float64)
        for parameter in model.parameters():
            parameter.grad = None
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._names = [name for name, _ in named]
        self._shapes = [p.shape for _, p in named]
        self.sizes = [p.numel() for _, p in named]
        self.device = named[0][1].device
        self.count = sum(self.sizes)
        self.direct = self.count <= MAX_DIRECT
        self.layered = LayeredJacobian(cast(Model, model)) if self.direct and LayeredJacobian.supports(model) else None
        self.outputs = self._check_rows()
        self._l2 = self._l2_diagonal()
        self._set_smoothness({id(p): at for (_, p), at in zip(named, offsets(self.sizes), strict=True)})
        elements = starts * self.count * self.outputs
        self._rows = max(1, min(ROWS_AT_ONCE, MAX_JACOBIAN // elements)) if self.direct else ROWS_AT_ONCE
        self.stored: list[Batch] | None = None
        self._weights = torch.zeros(3, dtype=torch.float64, device=self.device)
        self.stored, length = self._store()
        self._total = float(task.group.sum(torch.tensor(float(length), dtype=torch.float64, device=self.device)))
        total, squares, targets = task.group.sum(self._weights).tolist()
        self._square = targets / total if total else 0.0
        self.targets = total * total / squares if squares else self._total * self.outputs
        if self.layered is not None and self.stored is not None:
            self.layered.store_inputs([batch.x for batch in self.stored])
        self.keep_jacobian = self.direct and task.group.max(length) * elements <= MAX_JACOBIAN

    def _check_rows(self) -> int:
        """Return the number of outputs; check that the model maps each row independently."""
        group = self.task.group
        batch = next(iter(self.task.rows.chunks(2, rank=group.rank, ranks=group.size)), None)
        if batch is None:  # a process without rows
            return int(group.max(0))
        if batch.x.layout != torch.strided:
            raise SpecError(
                "levenberg_marquardt: sparse inputs are not supported; use x.to_dense(), or solver adamw or lbfgs"
            )
        x = batch.x.to(self.device, torch.float64)
        with torch.no_grad():
            outputs = self.outputs_of_start(parameter_vector(self.model), x).shape[-1]
            if len(x) and self.layered is None:
                try:
                    vmap(self._row_outputs)(parameter_vector(self.model).expand(len(x), -1), x)
                except (SpecError, DataError):
                    raise
                except RuntimeError as error:
                    message = str(error).splitlines()[0]
                    raise SpecError(
                        "levenberg_marquardt: the model must map each row independently and support torch.func.vmap, which "
                        f"fails with: {message}; use solver adamw or lbfgs"
                    ) from None
        return int(group.max(outputs))

    def _l2_diagonal(self) -> Tensor:
        """Return the diagonal of the Hessian of the L2 penalty, `(P,)`."""
        strength = self.task.config.l2
        diagonal = torch.zeros(self.count, dtype=torch.float64, device=self.device)
        if strength:
            start = {id(p): at for p, at in zip(self.task.parameters(), offsets(self.sizes), strict=True)}
            for parameter, weight in self.task.penalties.quadratic:
                at = start[id(parameter)]
                diagonal[at : at + parameter.numel()] = strength * weight
        return diagonal

    def _set_smoothness(self, start: Mapping[int, int]) -> None:
        """Compute what is constant of the smoothness penalties: for `auto` without factors, for a number with the number."""
        config, self.smoothing, self._fixed = self.task.config, None, None
        self._other_penalties: _OtherPenalties | None = None
        if config.smoothness == "auto":
            if self.direct and self.task.loss.squares and has_smooth_parameters(self.model):
                self.smoothing = Smoothing(Penalties(self.model, dataclasses.replace(config, smoothness=1.0)), start)
        elif config.smoothness:
            other = _OtherPenalties(self.model, config)
            if self.direct and other.penalties.only_quadratic:
                self._fixed = Smoothing(other.penalties, start)
            else:
                self._other_penalties = other

    def _store(self) -> tuple[list[Batch] | None, int]:
        """Return the chunks of small data (None for large data) and the number of rows of this process."""
        stored: list[Batch] | None = []
        rows = elements = 0
        for batch in self.chunks():
            rows += len(batch.y)
            elements += batch.x.numel() + batch.y.numel()
            if self.task.loss.squares:
                y, weights = self._weighted_targets(batch)
                self._weights += torch.stack([s.sum() for s in (weights, weights.square(), weights * y.square())])
            if elements > MAX_STORED:
                stored = None
            if stored is not None:
                stored.append(batch)
        return stored, rows

    def _weighted_targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the targets of a chunk, 0 where missing, and the weight of each, `(b, n)`."""
        y = batch.y.reshape(len(batch.y), -1)
        y, weights = cast(TargetwiseLoss, self.task.loss).entries(y, y)
        weights = torch.ones_like(y) if weights is None else weights.expand_as(y)
        return y, weights if batch.weight is None else weights * batch.weight.unsqueeze(1)

    def size_of(self, initial: Tensor) -> Tensor:
        """Return the size of losses with rounding errors in the last digits: the initial loss, at most that of zero outputs.

        Initial outputs may be larger than the targets by any factor.
        """
        return initial.abs().clamp_max(self._square) if self._square > 0 else initial.abs()

    def chunks(self) -> Iterator[Batch]:
        """Yield all rows of this process, in float64."""
        if self.stored is not None:
            yield from self.stored
            return
        group = self.task.group
        for batch in self.task.rows.chunks(self._rows, rank=group.rank, ranks=group.size):
            if len(batch.y):
                x, y = batch.x.to(self.device, torch.float64), batch.y.to(self.device)
                weight = None if batch.weight is None else batch.weight.to(self.device, torch.float64)
                yield Batch(x, y.double() if y.is_floating_point() else y, weight, batch.count)

    # -------------------------------------------------------------------------------- outputs

    def _named(self, vector: Tensor) -> dict[str, Tensor]:
        parts = zip(self._names, vector.split(self.sizes), self._shapes, strict=True)
        return {name: part.view(shape) for name, part, shape in parts}

    def outputs_of_start(self, vector: Tensor, x: Tensor) -> Tensor:
        """Return outputs `(b, n)` for parameters `(P,)`."""
        outputs = functional_call(self.model, self._named(vector), (x,))
        return outputs if outputs.dim() == 2 else outputs.reshape(len(x), -1)

    def _row_outputs(self, vector: Tensor, row: Tensor) -> Tensor:
        return self.outputs_of_start(vector, row.unsqueeze(0)).flatten()

    def outputs_of(self, vectors: Tensor, x: Tensor) -> Tensor:
        """Return outputs `(s, b, n)` for parameters `(s, P)`."""
        if self.layered is not None:
            return self.layered.outputs(vectors, x)
        if len(vectors) == 1:
            return self.outputs_of_start(vectors[0], x).unsqueeze(0)
        return vmap(self.outputs_of_start, (0, None))(vectors, x)

    def jacobian(self, vectors: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs `(s, b, n)` and their Jacobians `(s, b, n, P)`, by the cheaper of forward and reverse mode."""
        if self.layered is not None:
            return self.layered.jacobian(vectors, x)
        if self.count <= self.outputs:
            with torch.no_grad():
                jacobian = vmap(lambda vector: jacfwd(self.outputs_of_start)(vector, x))(vectors)
                return self.outputs_of(vectors, x), jacobian
        # With a copy of the parameters per row, one backward pass per output gives the gradients of all rows: 0.75 times the
        # time of jacrev under vmap for one start, 1.2 to 1.3 times for 8 to 32.
        with torch.enable_grad():
            if len(vectors) == 1:
                copies = vectors.expand(len(x), -1).clone().requires_grad_()
                outputs = vmap(self._row_outputs)(copies, x)
            else:
                copies = vectors.unsqueeze(1).expand(-1, len(x), -1).clone().requires_grad_()
                outputs = vmap(vmap(self._row_outputs), (0, None))(copies, x)
            n = outputs.shape[-1]
            sums = outputs.flatten(0, -2).sum(0)
            gradients = [torch.autograd.grad(sums[i], copies, retain_graph=i + 1 < n)[0] for i in range(n)]
        shape = (len(vectors), len(x))
        jacobian = gradients[0].unsqueeze(-2) if n == 1 else torch.stack(gradients, -2)
        return outputs.detach().view(*shape, n), jacobian.view(*shape, n, -1)

    # -------------------------------------------------------------------------------- losses

    def _penalty(self, vectors: Tensor) -> Tensor:
        value = 0.5 * (vectors.square() * self._l2).sum(1)
        if self._other_penalties is not None:
            value = value + torch.stack([self._other_penalty(vector) for vector in vectors])
        return value if self._fixed is None else value + self._fixed.roughness(vectors).sum(1)

    def _other_penalty(self, vector: Tensor) -> Tensor:
        named = {f"model.{name}": value for name, value in self._named(vector).items()}
        return functional_call(cast(nn.Module, self._other_penalties), named, ())

    def _row_losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the sum of the weighted losses of a chunk, `(s,)`."""
        losses = torch.stack([self.task.loss.rows(output, batch.y) for output in outputs])
        return (losses if batch.weight is None else losses * batch.weight).sum(1)

    @torch.no_grad()
    def losses(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean losses without and with penalties, `(s,)` each."""
        total = vectors.new_zeros(len(vectors))
        for batch in self.chunks():
            total += self._row_losses(self.outputs_of(vectors, batch.x), batch)
        data = self.task.group.sum(total) / self._total
        return data, data + self._penalty(vectors)

    def non_finite_batch(self, vector: Tensor) -> Batch:
        """Return the first chunk with a non-finite loss; fall back to the first chunk."""
        first: Batch | None = None
        for batch in self.chunks():
            losses = self.task.loss.rows(self.outputs_of_start(vector, batch.x), batch.y)
            if not bool(losses.isfinite().all()):
                return batch
            first = first or batch
        return first or Batch(vector.new_zeros(0, 1), vector.new_zeros(0), None, 0)

    def _curvature(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the weighted gradients `(s, b, n)` of a chunk, and factors √(w/count) S `(s, b, k, n)`."""
        pairs = [self.task.loss.curvature(output, batch.y) for output in outputs]
        gradients, factors = (torch.stack(tensors) for tensors in zip(*pairs, strict=True))
        if batch.weight is None:
            return gradients / self._total, factors / math.sqrt(self._total)
        weight = batch.weight / self._total
        return gradients * weight[:, None], factors * weight.sqrt()[:, None, None]

    # -------------------------------------------------------------------------------- quadratic models

    @torch.no_grad()
    def expand(self, vectors: Tensor) -> Point:
        """Return the losses, b and A at parameters `(s, P)`."""
        s, count = vectors.shape
        # One tensor, for one sum over the processes.
        sums = vectors.new_zeros(s, 1 + count + count * count)
        loss, gradient, matrix = sums[:, 0], sums[:, 1 : 1 + count], sums[:, 1 + count :].view(s, count, count)
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for batch in self.chunks():
            outputs, jacobian = self.jacobian(vectors, batch.x)
            slopes, factors = self._curvature(outputs, batch)
            loss += self._row_losses(outputs, batch)
            gradient += (slopes.flatten(1).unsqueeze(1) @ jacobian.flatten(1, 2)).squeeze(1)
            scalar = self.outputs == 1 and factors.shape[2] == 1
            scaled = (jacobian.mul_(factors) if scalar else factors @ jacobian).flatten(1, 2)
            matrix += scaled.mT @ scaled
            if self.keep_jacobian:
                parts.append((outputs, factors, scaled))
        sums = self.task.group.sum(sums)
        loss, gradient, matrix = sums[:, 0], sums[:, 1 : 1 + count], sums[:, 1 + count :].reshape(s, count, count)
        data = loss / self._total
        matrix.diagonal(dim1=1, dim2=2).add_(self._l2)
        gradient = gradient + vectors * self._l2
        if self._other_penalties is not None:
            gradient += torch.stack([torch.func.grad(self._other_penalty)(vector) for vector in vectors])
            matrix = matrix + torch.stack([torch.func.hessian(self._other_penalty)(vector) for vector in vectors])
        if self._fixed is not None:
            once = vectors.new_ones(s, self._fixed.count)
            gradient, matrix = gradient + self._fixed.gradient(vectors, once), self._fixed.add_to(matrix, once)
        return Point(data, data + self._penalty(vectors), gradient, matrix, parts if self.keep_jacobian else None)

    def bend(self, theta: Tensor, step: Tensor, point: Point, distance: float) -> Tensor:
        """Return Jᵀ times the second derivative of the outputs along a step, from a finite difference, `(s, P)`.

        Args:
            theta: parameters, `(s, P)`.
            step: direction, `(s, P)`.
            point: the quadratic model at `theta`, with its Jacobian.
            distance: step length of the difference, in parts of the step.
        """
        pull = torch.zeros_like(step)
        ahead = theta + distance * step
        for batch, (outputs, factors, scaled) in zip(self.chunks(), point.parts or [], strict=True):
            change = (self.outputs_of(ahead, batch.x) - outputs) / distance
            if factors.shape[2:] == (1, 1):
                change = change * factors[..., 0]
            else:
                change = (factors @ change.unsqueeze(-1)).squeeze(-1)
            second = (2 / distance) * (change.flatten(1).unsqueeze(-1) - scaled @ step.unsqueeze(-1))
            pull += (scaled.mT @ second).squeeze(-1)
        return self.task.group.sum(pull)

    def slopes(self, vectors: Tensor) -> Point:
        """Return the loss and b at the parameters of one start, without J."""
        vector = vectors[0].detach().requires_grad_()
        sums = vector.new_zeros(1 + self.count)
        for batch in self.chunks():
            with torch.enable_grad():
                losses = self.task.loss.rows(self.outputs_of_start(vector, batch.x), batch.y)
                value = (losses if batch.weight is None else losses * batch.weight).sum()
            sums[0] += value.detach()
            sums[1:] += torch.autograd.grad(value, vector)[0]
        sums = self.task.group.sum(sums) / self._total
        gradient = sums[1:] + vectors[0] * self._l2
        if self._other_penalties is not None:
            gradient = gradient + torch.func.grad(self._other_penalty)(vectors[0])
        data = sums[:1]
        return Point(data, data + self._penalty(vectors), gradient.unsqueeze(0))

    def product(self, vector: Tensor, tangent: Tensor) -> Tensor:
        """Return A t for one start, by products with J and Jᵀ."""
        total = torch.zeros_like(vector)
        for batch in self.chunks():
            x = batch.x
            outputs, change = cast(
                tuple[Tensor, Tensor], jvp(functools.partial(self.outputs_of_start, x=x), (vector,), (tangent,))
            )
            _, factors = self._curvature(outputs.unsqueeze(0), batch)
            curved = (factors[0].mT @ (factors[0] @ change.unsqueeze(-1))).squeeze(-1)
            leaf = vector.detach().requires_grad_()
            with torch.enable_grad():
                total += torch.autograd.grad((self.outputs_of_start(leaf, x) * curved.detach()).sum(), leaf)[0]
        total = self.task.group.sum(total) + tangent * self._l2
        if self._other_penalties is not None:
            total = total + jvp(torch.func.grad(self._other_penalty), (vector,), (tangent,))[1]
        return total


class _OtherPenalties(nn.Module):
    """The penalties other than L2 as a function of the model's parameters."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        super().__init__()
        self.model = model
        self.penalties = Penalties(model, config)

    def forward(self) -> Tensor:
        value = self.penalties.rest_value()
        return torch.zeros((), dtype=torch.float64) if value is None else value


def parameter_vector(model: nn.Module) -> Tensor:
    """Return the trained parameters of a model as one vector `(P,)` in float64."""
    return torch.cat([p.detach().flatten().to(torch.float64) for p in model.parameters() if p.requires_grad])
