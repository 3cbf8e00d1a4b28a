"""Levenberg–Marquardt: damped Gauss–Newton steps on all rows, from several initial values at the same time.

Each step solves (A + μ D) v = −b with

    A = (1/count) Σ w JᵀSᵀSJ + Hessian of the penalties,   b = (1/count) Σ w Jᵀg + gradient of the penalties,

J the Jacobian of the outputs in the parameters, g and SᵀS gradient and curvature of the loss in the outputs (`Loss.curvature`).
D is the largest diagonal of A so far (Moré 1978), μ follows the ratio of actual and predicted decrease (Nielsen 1999). Where J can
be kept, a step is bent by half of the geodesic acceleration (Transtrum, Sethna 2012): it follows curved valleys, which products of
parameters make everywhere.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacfwd, jvp, vmap

from kapsi.errors import SpecError
from kapsi.fusion import Sum
from kapsi.modules import Head, Layer, Model
from kapsi.reconciliation import Dense, LowRank
from kapsi.remainder import LinearRemainder, ZeroRemainder
from kapsi.training.data import Batch
from kapsi.training.penalties import Penalties
from kapsi.training.solvers.base import NotFinite, Report, Solver, State, Task

__all__ = ["LevenbergMarquardt"]

LARGEST_JACOBIAN = 2**25
"""Numbers of Jacobians that are kept at the same time, of all starts: 256 MiB in float64. More is made in chunks of rows."""

LARGEST_STORED = 2**27
"""Numbers of inputs and targets that are kept in float64 through the training, 1 GiB; more are read in each iteration."""

LARGEST_DIRECT = 2_000
"""Parameters up to which A is formed and factored; above that steps are found by conjugate gradients.

Seconds an iteration for 4,000 rows, a tanh network and one thread, direct and by conjugate gradients: 0.06 and 0.14 with
469 parameters, 0.43 and 0.27 with 1,457, 1.8 and 0.55 with 2,965. Direct steps are exact where A is ill-conditioned, so they
get some more.
"""

ROWS_AT_ONCE = 2**13
"""Rows that go through the model at once where J is not made."""

ACCELERATION = 0.75
"""Largest length of the acceleration, in lengths of the step, that is believed (Transtrum and Sethna's α).

Without it training losses of nine elementary functions were 6 times as large after 40 iterations (geometric mean, one seed).
"""

PROBE = 0.1
"""How far along the step the second derivative is measured, as a part of it."""

FIRST_DAMPING, LEAST_DAMPING, MOST_DAMPING = 1e-2, 1e-16, 1e16

PATIENCE = 10
"""Iterations in which the loss must change by more than the tolerance: plateaus are common, and left again."""

GRADIENT = 1e-14
"""Largest slope along any parameter, in units of what its curvature and the first loss make of it, that counts as none."""

STEP = 1e-15
"""Largest step, in parts of the largest parameter, that counts as none."""

EXACT = 1e-30
"""Loss, in parts of the first one, that counts as zero: float64 has no more digits."""

CONJUGATE_STEPS = 200
"""Most steps of conjugate gradients; what they have found by then is a good step, too."""

START_SEEDS = 0x6B61707369
"""What the seeds of further starts begin with: they are none that a caller is likely to give to a model."""

RUNNING, DROPPED = "", "it is not finite"


@dataclass
class _Point:
    """What is known at some parameters, of several starts.

    Attributes:
        data: mean loss of the rows, `(s,)`.
        total: with the penalties, `(s,)`.
        gradient: b, `(s, P)`.
        matrix: A, `(s, P, P)`; None where it is not formed.
        parts: for each chunk of rows the outputs `(s, b, n)`, √(w/count) S `(s, b, k, n)`, and that times J `(s, b·k, P)`;
            None where J is not kept.
    """

    data: Tensor
    total: Tensor
    gradient: Tensor
    matrix: Tensor | None = None
    parts: list[tuple[Tensor, Tensor, Tensor]] | None = None


class LevenbergMarquardt(Solver, name="levenberg_marquardt"):
    """Damped Gauss–Newton steps with geodesic acceleration on all rows, in float64 whatever the type of the model.

    An epoch is one iteration: damping grows until a step lowers the objective. Several starts are solved as one batch; each has its
    own damping, and the model gets the best one at the end of every iteration. A start is done when it has converged, and dropped
    when it is not finite. Up to 2,000 parameters A is formed and factored, above that steps are found by conjugate gradients from
    products with J, which is never made.

    Args:
        task: what is to be minimized; `config.starts`, `config.tolerance` and `config.seed` are used.

    Raises:
        SpecError: a loss without curvature; a model that is random, or has batch statistics; penalties that are not smooth; sparse
            inputs; several starts of a model that has no initial values to draw.

    Source: Moré, The Levenberg–Marquardt algorithm (1978); Nielsen, Damping parameter in Marquardt's method (1999); Transtrum and
        Sethna, Improvements to the Levenberg–Marquardt algorithm (arXiv 1201.5885); for other losses than squares Schraudolph,
        Fast curvature matrix-vector products (2002).
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._check()
        self._ready = False
        self._point: _Point | None = None
        self._at: list[int] = []
        self._ended: str | None = None
        self._best = 0
        self._reason: list[str] = []

    def _check(self) -> None:
        model, config = self.task.model, self.task.config
        for name, module in model.named_modules():
            kind = type(module).__name__
            if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.modules.instancenorm._InstanceNorm):
                why = f"{name} ({kind}) has statistics of the batch"
            elif isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                why = f"{name} ({kind}) is random"
            else:
                continue
            raise SpecError(
                f"levenberg_marquardt: the model must be the same function of each row; {why}; leave it out, or take solver adamw"
            )
        for name in ("l1", "group_sparsity"):
            if getattr(config, name):
                raise SpecError(
                    f"levenberg_marquardt: TrainConfig({name}={getattr(config, name)}) has corners; take solver adamw, sgd or "
                    f"lbfgs, or {name}=0"
                )
        if not self.task.parameters():
            raise SpecError("levenberg_marquardt: the model has no parameters that are trained")
        try:
            # The loss itself says where it has no curvature, and which have.
            self.task.loss.curvature(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))
        except SpecError as error:
            raise SpecError(f"levenberg_marquardt: {error}; or take solver adamw or lbfgs") from None
        except (RuntimeError, IndexError):
            pass  # of shapes that are not the model's

    # -------------------------------------------------------------------------------- the objective

    def _begin(self) -> None:
        """Take what the model is by now: buffers may have been read from a checkpoint after the solver was made."""
        if self._ready:
            return
        task, config = self.task, self.task.config
        model = self._model = copy.deepcopy(task.model).to(torch.float64)
        for parameter in model.parameters():
            parameter.grad = None
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._names = [name for name, _ in named]
        self._shapes = [p.shape for _, p in named]
        self._sizes = [p.numel() for _, p in named]
        self._device = named[0][1].device
        self._count = sum(self._sizes)
        self._direct = self._count <= LARGEST_DIRECT
        self._layered = _Layered(cast(Model, model)) if self._direct and _Layered.fits(model) else None
        self._outputs = self._examine()
        self._penalize(named)
        numbers = config.starts * self._count * self._outputs
        self._rows = max(1, min(ROWS_AT_ONCE, LARGEST_JACOBIAN // numbers)) if self._direct else ROWS_AT_ONCE
        self._store()
        if self._layered is not None and self._stored is not None:
            self._layered.keep([batch.x for batch in self._stored])
        self._kept = self._direct and self.task.group.largest(self._length) * numbers <= LARGEST_JACOBIAN
        self._ready = True

    def _examine(self) -> int:
        """Return the number of outputs, after a check that the model can be taken row by row."""
        group = self.task.group
        batch = next(iter(self.task.rows.chunks(2, rank=group.rank, ranks=group.size)), None)
        if batch is None:  # a process without rows
            return int(group.largest(0))
        if batch.x.layout != torch.strided:
            raise SpecError(
                "levenberg_marquardt: sparse inputs have no Jacobian of their own; use x.to_dense(), or take solver adamw or lbfgs"
            )
        x = batch.x.to(self._device, torch.float64)
        with torch.no_grad():
            outputs = self._model(x).shape[-1]
            if len(x) and self._layered is None:
                try:
                    vmap(self._of_row, (None, 0))(self._vector(self._model), x)
                except SpecError:
                    raise
                except RuntimeError as error:
                    said = str(error).splitlines()[0]
                    raise SpecError(
                        "levenberg_marquardt: the model must be the same function of each row, and of one that torch.func.vmap "
                        f"takes; it says: {said}; take solver adamw or lbfgs"
                    ) from None
        return int(group.largest(outputs))

    def _penalize(self, named: list[tuple[str, nn.Parameter]]) -> None:
        """Prepare the penalties: L2 as a diagonal, smoothness of splines as a function of all parameters."""
        config = self.task.config
        own = {id(p): start for p, start in zip(self.task.parameters(), _starts(self._sizes), strict=True)}
        self._l2 = torch.zeros(self._count, dtype=torch.float64, device=self._device)
        if config.penalty:
            for parameter, weight in self.task.penalties.quadratic:
                start = own[id(parameter)]
                self._l2[start : start + parameter.numel()] = config.penalty * weight
        self._rough = _Rough(self._model, config) if config.smoothness else None

    def _store(self) -> None:
        """Count the rows, and keep them where they are few."""
        self._stored: list[Batch] | None = None
        stored: list[Batch] | None = []
        rows = numbers = chunks = 0
        for batch in self._chunks():
            rows, chunks = rows + len(batch.y), chunks + 1
            numbers += batch.x.numel() + batch.y.numel()
            if numbers > LARGEST_STORED:
                stored = None
            if stored is not None:
                stored.append(batch)
        self._stored, self._length = stored, rows
        self._total = float(self.task.group.sum(torch.tensor(float(rows), dtype=torch.float64, device=self._device)))

    def _chunks(self) -> Iterator[Batch]:
        """Yield all rows of this process, in float64."""
        if self._stored is not None:
            yield from self._stored
            return
        group = self.task.group
        for batch in self.task.rows.chunks(self._rows, rank=group.rank, ranks=group.size):
            if len(batch.y):
                x, y = batch.x.to(self._device, torch.float64), batch.y.to(self._device)
                weight = None if batch.weight is None else batch.weight.to(self._device, torch.float64)
                yield Batch(x, y.double() if y.is_floating_point() else y, weight, batch.count)

    def _vector(self, model: nn.Module) -> Tensor:
        """Return the trained parameters of a model, `(P,)`, in float64."""
        return torch.cat([p.detach().flatten().to(torch.float64) for p in model.parameters() if p.requires_grad])

    def _named(self, vector: Tensor) -> dict[str, Tensor]:
        parts = zip(self._names, vector.split(self._sizes), self._shapes, strict=True)
        return {name: part.view(shape) for name, part, shape in parts}

    def _of_rows(self, vector: Tensor, x: Tensor) -> Tensor:
        """Return outputs `(b, n)` for parameters `(P,)`."""
        return functional_call(self._model, self._named(vector), (x,))

    def _of_row(self, vector: Tensor, row: Tensor) -> Tensor:
        return self._of_rows(vector, row.unsqueeze(0)).flatten()

    def _of_starts(self, vectors: Tensor, x: Tensor) -> Tensor:
        """Return outputs `(s, b, n)` for parameters `(s, P)`."""
        if self._layered is not None:
            return self._layered(vectors, x)[0]
        if len(vectors) == 1:
            return self._of_rows(vectors[0], x).unsqueeze(0)
        return vmap(self._of_rows, (0, None))(vectors, x)

    def _jacobian(self, vectors: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs `(s, b, n)` and their Jacobians `(s, b, n, P)`, by the cheaper of the two modes."""
        if self._layered is not None:
            outputs, made = self._layered(vectors, x, jacobian=True)
            return outputs, cast(Tensor, made)
        if self._count <= self._outputs:
            with torch.no_grad():
                jacobian = vmap(lambda vector: jacfwd(self._of_rows)(vector, x))(vectors)
                return self._of_starts(vectors, x), jacobian
        # Each row gets parameters of its own, so that one backward pass an output gives the gradients of all rows. It takes 0.75
        # times as long as jacrev under vmap for one start, and 1.2 to 1.3 times as long for 8 to 32.
        with torch.enable_grad():
            if len(vectors) == 1:
                own = vectors.expand(len(x), -1).clone().requires_grad_()
                outputs = vmap(self._of_row)(own, x)
            else:
                own = vectors.unsqueeze(1).expand(-1, len(x), -1).clone().requires_grad_()
                outputs = vmap(vmap(self._of_row), (0, None))(own, x)
            n = outputs.shape[-1]
            sums = outputs.flatten(0, -2).sum(0)
            each = [torch.autograd.grad(sums[i], own, retain_graph=i + 1 < n)[0] for i in range(n)]
        shape = (len(vectors), len(x))
        jacobian = each[0].unsqueeze(-2) if n == 1 else torch.stack(each, -2)
        return outputs.detach().view(*shape, n), jacobian.view(*shape, n, -1)

    def _penalty(self, vectors: Tensor) -> Tensor:
        value = 0.5 * (vectors.square() * self._l2).sum(1)
        if self._rough is not None:
            value = value + torch.stack([self._roughness(vector) for vector in vectors])
        return value

    def _roughness(self, vector: Tensor) -> Tensor:
        named = {f"model.{name}": value for name, value in self._named(vector).items()}
        return functional_call(cast(nn.Module, self._rough), named, ())

    def _row_losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the sum of the weighted losses of a chunk, `(s,)`."""
        losses = torch.stack([self.task.loss.rows(output, batch.y) for output in outputs])
        return (losses if batch.weight is None else losses * batch.weight).sum(1)

    @torch.no_grad()
    def _losses(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean losses without and with penalties, `(s,)` each."""
        total = vectors.new_zeros(len(vectors))
        for batch in self._chunks():
            total += self._row_losses(self._of_starts(vectors, batch.x), batch)
        data = self.task.group.sum(total) / self._total
        return data, data + self._penalty(vectors)

    def _local(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the weighted gradients `(s, b, n)` of a chunk, and factors √(w/count) S `(s, b, k, n)`."""
        pairs = [self.task.loss.curvature(each, batch.y) for each in output]
        gradients, factors = (torch.stack(each) for each in zip(*pairs, strict=True))
        if batch.weight is None:
            return gradients / self._total, factors / math.sqrt(self._total)
        weight = batch.weight / self._total
        return gradients * weight[:, None], factors * weight.sqrt()[:, None, None]

    @torch.no_grad()
    def _expand(self, vectors: Tensor) -> _Point:
        """Return the loss, b and A at some parameters."""
        s, count = vectors.shape
        # One tensor, for one sum over the processes.
        sums = vectors.new_zeros(s, 1 + count + count * count)
        loss, gradient, matrix = sums[:, 0], sums[:, 1 : 1 + count], sums[:, 1 + count :].view(s, count, count)
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for batch in self._chunks():
            outputs, jacobian = self._jacobian(vectors, batch.x)
            slopes, factors = self._local(outputs, batch)
            loss += self._row_losses(outputs, batch)
            gradient += (slopes.flatten(1).unsqueeze(1) @ jacobian.flatten(1, 2)).squeeze(1)
            scaled = (
                jacobian.mul_(factors) if self._outputs == 1 and factors.shape[2] == 1 else factors @ jacobian
            ).flatten(1, 2)
            matrix += scaled.mT @ scaled
            if self._kept:
                parts.append((outputs, factors, scaled))
        sums = self.task.group.sum(sums)
        loss, gradient, matrix = sums[:, 0], sums[:, 1 : 1 + count], sums[:, 1 + count :].reshape(s, count, count)
        data = loss / self._total
        matrix.diagonal(dim1=1, dim2=2).add_(self._l2)
        gradient = gradient + vectors * self._l2
        if self._rough is not None:
            gradient += torch.stack([torch.func.grad(self._roughness)(vector) for vector in vectors])
            matrix = matrix + torch.stack([torch.func.hessian(self._roughness)(vector) for vector in vectors])
        return _Point(data, data + self._penalty(vectors), gradient, matrix, parts if self._kept else None)

    # -------------------------------------------------------------------------------- large models

    def _slopes(self, vectors: Tensor) -> _Point:
        """Return the loss and b at the parameters of one start, without J."""
        vector = vectors[0].detach().requires_grad_()
        sums = vector.new_zeros(1 + self._count)
        for batch in self._chunks():
            with torch.enable_grad():
                losses = self.task.loss.rows(self._of_rows(vector, batch.x), batch.y)
                value = (losses if batch.weight is None else losses * batch.weight).sum()
            sums[0] += value.detach()
            sums[1:] += torch.autograd.grad(value, vector)[0]
        sums = self.task.group.sum(sums) / self._total
        gradient = sums[1:] + vectors[0] * self._l2
        if self._rough is not None:
            gradient = gradient + torch.func.grad(self._roughness)(vectors[0])
        data = sums[:1]
        return _Point(data, data + self._penalty(vectors), gradient.unsqueeze(0))

    def _times(self, vector: Tensor, tangent: Tensor) -> Tensor:
        """Return A t for one start, by products with J and its transpose."""
        total = torch.zeros_like(vector)
        for batch in self._chunks():
            x = batch.x
            outputs, moved = cast(
                tuple[Tensor, Tensor], jvp(functools.partial(self._of_rows, x=x), (vector,), (tangent,))
            )
            _, factors = self._local(outputs.unsqueeze(0), batch)
            curved = (factors[0].mT @ (factors[0] @ moved.unsqueeze(-1))).squeeze(-1)
            own = vector.detach().requires_grad_()
            with torch.enable_grad():
                total += torch.autograd.grad((self._of_rows(own, x) * curved.detach()).sum(), own)[0]
        total = self.task.group.sum(total) + tangent * self._l2
        if self._rough is not None:
            total = total + jvp(torch.func.grad(self._roughness), (vector,), (tangent,))[1]
        return total

    def _conjugate(self, vector: Tensor, gradient: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
        """Return v with (A + μ D) v ≈ −b, and A v: conjugate gradients until the residual is small enough for a step to be good."""
        step, product = torch.zeros_like(vector), torch.zeros_like(vector)
        residual = -gradient
        direction = residual.clone()
        square = first = residual @ residual
        for _ in range(min(CONJUGATE_STEPS, self._count)):
            image = self._times(vector, direction)
            curvature = direction @ image + damping * (direction @ direction)
            if not bool(curvature > 0):  # flat, or bent the other way by a penalty that is not convex
                break
            length = square / curvature
            step, product = step + length * direction, product + length * image
            residual = residual - length * (image + damping * direction)
            before, square = square, residual @ residual
            if bool(square <= 1e-8 * first):
                break
            direction = residual + (square / before) * direction
        return step, product

    # -------------------------------------------------------------------------------- starts

    def _first(self) -> None:
        """Set the initial values of all starts."""
        self._begin()
        starts = self.task.config.starts
        own = self._vector(self.task.model)
        self._theta = torch.stack([own, *(self._drawn(i) for i in range(1, starts))])
        like: dict[str, Any] = {"dtype": torch.float64, "device": self._device}
        self._damping = torch.full((starts,), FIRST_DAMPING, **like)
        self._growth = torch.full((starts,), 2.0, **like)
        # Of conjugate gradients one number a start: the diagonal of A would be as dear as A.
        self._scale = torch.zeros(starts, self._count if self._direct else 1, **like)
        self._data, self._objective = (torch.full((starts,), math.inf, **like) for _ in range(2))
        self._initial, self._reference = (torch.full((starts,), math.nan, **like) for _ in range(2))
        self._idle = torch.zeros(starts, dtype=torch.int64, device=self._device)
        self._norm = torch.zeros(starts, **like)
        self._reason = [RUNNING] * starts

    def _drawn(self, start: int) -> Tensor:
        """Return initial values of a further start, drawn by its number: ψ, π and biases anew, what κ has learned stays."""
        model = copy.deepcopy(self.task.model)
        fixed = [*model.named_buffers(), *((name, p) for name, p in model.named_parameters() if not p.requires_grad)]
        for head_name, head in model.named_modules():
            if isinstance(head, Head):
                fixed += [(f"{head_name}.kappa.{name}", p) for name, p in head.kappa.named_parameters()]
        kept = [(tensor, tensor.detach().clone()) for _, tensor in fixed]
        seed = (START_SEEDS << 20) + self.task.config.seed * 4096 + start
        # Modules of torch draw from its global generator, which is put back as it was.
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices):
            torch.manual_seed(seed % 2**63)
            if not _reset(model, torch.Generator().manual_seed(seed % 2**63)):
                raise SpecError(
                    "levenberg_marquardt: several starts need initial values to draw, and the model has no module with "
                    "reset_parameters; take starts=1"
                )
            for tensor, value in kept:
                tensor.copy_(value)
        return self._vector(model).to(self._device)

    def _active(self) -> list[int]:
        return [i for i, reason in enumerate(self._reason) if reason == RUNNING]

    # -------------------------------------------------------------------------------- iterations

    def steps(self, epoch: int, start: int = 0) -> Iterator[None]:
        if start:
            return
        if not self._reason:
            self._first()
        self._begin()
        if self._ended is None:
            self._iterate()
        yield

    @torch.no_grad()
    def _iterate(self) -> None:
        """Take one step of each start that is not done."""
        self._settle()
        before = self._active()
        if self._direct and before:
            index = torch.tensor(before, device=self._device)
            while not self._try(index) and self._active() == before:
                pass
        elif before:
            for i in before:
                self._try_large(i)
        self._judge()
        if self._active() != self._at:
            # The others are expanded anew as a smaller batch: what a resumed run has, too.
            self._point = None
        self._write()

    def _settle(self) -> None:
        """Make sure that losses and derivatives of the running starts are known; drop starts that have none that are finite."""
        active = self._active()
        if not self._direct:
            for i in active:
                if math.isnan(float(self._initial[i])):
                    data, total = self._losses(self._theta[i : i + 1])
                    self._record([i], data, total)
                    if not math.isfinite(float(total)):
                        self._drop([i], [False], "loss")
            return
        if self._point is None and active:
            self._at = active
            point = self._point = self._expand(self._theta[active])
            self._record(active, point.data, point.total)
            self._norm[active] = point.gradient.abs().amax(1)
            finite = (point.total.isfinite() & point.gradient.isfinite().all(1)).tolist()
            if not all(finite):
                self._drop(active, finite, "gradient" if bool(point.total.isfinite().all()) else "loss")
                self._settle()
                return
        if active:
            self._check_gradients(active, cast(_Point, self._point))

    def _check_gradients(self, active: list[int], point: _Point) -> None:
        """Mark starts whose gradient is nothing but rounding."""
        if self._at != active:
            return
        curvature = cast(Tensor, point.matrix).diagonal(dim1=1, dim2=2)
        scale = torch.maximum(self._scale[active], curvature).clamp_min(torch.finfo(torch.float64).tiny).sqrt()
        flat = (point.gradient.abs() / scale).amax(1) <= GRADIENT * self._initial[active].abs().sqrt()
        for i, done in zip(active, flat.tolist(), strict=True):
            if done:
                self._reason[i] = "the gradient is zero but for rounding"
        if self._active() != active:
            self._point = None
            self._settle()

    def _record(self, active: list[int], data: Tensor, total: Tensor) -> None:
        """Take the losses of running starts; the first ones are what later ones are compared with."""
        self._data[active], self._objective[active] = data, total
        for known in (self._initial, self._reference):
            known[active] = torch.where(known[active].isnan(), total, known[active])

    def _drop(self, active: list[int], finite: list[bool], statistic: str) -> None:
        """Drop starts that are not finite.

        Raises:
            NotFinite: none is left.
        """
        for i, fine in zip(active, finite, strict=True):
            if not fine:
                self._reason[i] = DROPPED
                self._data[i] = self._objective[i] = math.inf
        self._point = None
        if all(reason == DROPPED for reason in self._reason):
            raise NotFinite(statistic, self._culprit(self._theta[active[0]]))

    def _culprit(self, vector: Tensor) -> Batch:
        """Return the first rows with a loss that is not finite, or the first of all."""
        found: Batch | None = None
        for batch in self._chunks():
            losses = self.task.loss.rows(self._of_rows(vector, batch.x), batch.y)
            if not bool(losses.isfinite().all()):
                return batch
            found = found or batch
        return found or Batch(vector.new_zeros(0, 1), vector.new_zeros(0), None, 0)

    def _try(self, index: Tensor) -> bool:
        """Try one step of each running start, and return whether any lowers its objective."""
        point = cast(_Point, self._point)
        matrix, theta = cast(Tensor, point.matrix), self._theta[index]
        scale = torch.maximum(self._scale[index], matrix.diagonal(dim1=1, dim2=2))
        self._scale[index] = scale
        # A parameter that nothing depends on would make the matrix singular.
        scale = scale.clamp_min(1e-14 * scale.amax(1, keepdim=True))
        scale = torch.where(scale > 0, scale, 1.0)
        damping = self._damping[index]
        # QR of the stacked √w S J and √(μ D) does not square the condition number. On nine elementary functions with
        # errors down to 1e-13 it changed them by less than 0.2 %, and takes five times as long as the product.
        factor, failed = torch.linalg.cholesky_ex(matrix + (damping[:, None] * scale).diag_embed())
        step = -torch.cholesky_solve(point.gradient.unsqueeze(-1), factor).squeeze(-1)
        solved = (failed == 0) & step.isfinite().all(1)
        step = torch.where(solved[:, None], step, 0.0)
        moved = theta + step + self._acceleration(theta, step, scale, factor, point)
        predicted = -(point.gradient * step).sum(1) - 0.5 * (step * (matrix @ step.unsqueeze(-1)).squeeze(-1)).sum(1)
        # Where J is kept, it is made at once: nearly all steps are taken.
        new = self._expand(moved) if self._kept else None
        data, total = (new.data, new.total) if new else self._losses(moved)
        good = solved & (total < point.total)
        if new:
            good &= new.gradient.isfinite().all(1)
        self._follow(index, good, (point.total - total) / predicted)
        tiny = solved & ((moved - theta).abs().amax(1) <= STEP * theta.abs().amax(1))
        for i, stuck in zip(
            index.tolist(), (~good & (tiny | (self._damping[index] >= MOST_DAMPING))).tolist(), strict=True
        ):
            if stuck:
                self._reason[i] = "no step lowers the loss any more"
        self._theta[index] = torch.where(good[:, None], moved, theta)
        self._data[index] = torch.where(good, data, point.data)
        self._objective[index] = torch.where(good, total, point.total)
        if new:
            self._merge(point, new, good)
            self._norm[index] = point.gradient.abs().amax(1)
        elif bool(good.any()):
            self._point = None
        return bool(good.any())

    def _acceleration(self, theta: Tensor, step: Tensor, scale: Tensor, factor: Tensor, point: _Point) -> Tensor:
        """Return half of the geodesic acceleration of each step, zero where it is too long to be believed."""
        if point.parts is None:
            return torch.zeros_like(step)
        pull = torch.zeros_like(step)
        ahead = theta + PROBE * step
        for batch, (outputs, factors, scaled) in zip(self._chunks(), point.parts, strict=True):
            change = (self._of_starts(ahead, batch.x) - outputs) / PROBE
            if factors.shape[2:] == (1, 1):
                change = change * factors[..., 0]
            else:
                change = (factors @ change.unsqueeze(-1)).squeeze(-1)
            bend = (2 / PROBE) * (change.flatten(1).unsqueeze(-1) - scaled @ step.unsqueeze(-1))
            pull += (scaled.mT @ bend).squeeze(-1)
        bent = -0.5 * torch.cholesky_solve(self.task.group.sum(pull).unsqueeze(-1), factor).squeeze(-1)
        lengths = [(vector.square() * scale).sum(1).sqrt() for vector in (bent, step)]
        believed = bent.isfinite().all(1) & (2 * lengths[0] <= ACCELERATION * lengths[1])
        return torch.where(believed[:, None], bent, 0.0)

    def _follow(self, index: Tensor, good: Tensor, ratio: Tensor) -> None:
        """Set the damping by the ratio of actual and predicted decrease: down to a third, or up, faster each time."""
        damping, growth = self._damping[index], self._growth[index]
        eased = damping * (1 - (2 * ratio.clamp(-10, 10) - 1) ** 3).clamp_min(1 / 3)
        self._damping[index] = torch.where(good, eased, damping * growth).clamp(LEAST_DAMPING, MOST_DAMPING)
        self._growth[index] = torch.where(good, 2.0, growth * 2)

    def _merge(self, point: _Point, new: _Point, good: Tensor) -> None:
        """Take what is known at the new parameters, for the starts whose step was good."""
        if bool(good.all()):
            self._point = new
            return
        if not bool(good.any()):
            return
        for name in ("data", "total", "gradient", "matrix"):
            getattr(point, name)[good] = getattr(new, name)[good]
        for old, fresh in zip(cast(list[Any], point.parts), cast(list[Any], new.parts), strict=True):
            for one, other in zip(old, fresh, strict=True):
                one[good] = other[good]

    def _try_large(self, i: int) -> None:
        """Take one step of one start by conjugate gradients."""
        theta = self._theta[i : i + 1]
        point = self._slopes(theta)
        gradient = point.gradient[0]
        self._norm[i] = gradient.abs().max()
        square = gradient @ gradient
        if not bool(square.isfinite()):
            return self._drop([i], [False], "gradient")
        if bool(square > 0):
            along = gradient @ self._times(theta[0], gradient) / square
            self._scale[i, 0] = torch.maximum(self._scale[i, 0], along)
        index = torch.tensor([i], device=self._device)
        while self._reason[i] == RUNNING:
            step, product = self._conjugate(theta[0], gradient, self._damping[i] * self._scale[i, 0])
            data, total = self._losses(theta + step)
            predicted = -(gradient @ step) - 0.5 * (step @ product)
            good = total < point.total
            self._follow(index, good, (point.total - total) / predicted)
            if bool(good):
                self._theta[i], self._data[i], self._objective[i] = theta[0] + step, data[0], total[0]
                return None
            if bool(step.abs().max() <= STEP * theta.abs().max()) or float(self._damping[i]) >= MOST_DAMPING:
                self._reason[i] = "no step lowers the loss any more"
        return None

    def _judge(self) -> None:
        """Mark starts that are done, and choose the best."""
        tolerance = self.task.config.tolerance
        moved = (self._reference - self._objective) > tolerance * self._reference.abs()
        self._idle = torch.where(moved, 0, self._idle + 1)
        self._reference = torch.where(moved, self._objective, self._reference)
        for i in self._active():
            if 0 <= float(self._objective[i]) <= EXACT * abs(float(self._initial[i])):
                self._reason[i] = "the loss is zero but for rounding"
            elif int(self._idle[i]) >= PATIENCE:
                self._reason[i] = f"the loss changed by less than {tolerance:g} of itself in {PATIENCE} iterations"
        self._best = int(self._objective.nan_to_num(nan=math.inf).argmin())
        if not self._active():
            self._ended = self._reason[self._best]

    def _write(self) -> None:
        """Give the best start to the model."""
        if not math.isfinite(float(self._objective[self._best])):
            return
        vector = self._theta[self._best]
        for parameter, part in zip(self.task.parameters(), vector.split(self._sizes), strict=True):
            parameter.copy_(part.view(parameter.shape))

    # -------------------------------------------------------------------------------- the protocol

    def report(self) -> Report:
        best = self._best
        details = {
            "damping": float(self._damping[best]),
            "gradient_norm": float(self._norm[best]),
            "starts": float(len(self._active())),
        }
        return Report(float(self._data[best]), None, details, self._ended)

    def state(self) -> State:
        """Return what is needed to go on; the parameters of all starts in float64, which those of the model may not hold."""
        if not self._reason:
            return {}, {}
        return {name: getattr(self, f"_{name}") for name in _TENSORS}, {
            "reasons": self._reason,
            "ended": self._ended,
            "best": self._best,
        }

    def restore(self, state: State) -> None:
        tensors, known = state
        if not known:
            return
        device = self.task.parameters()[0].device
        for name in _TENSORS:
            setattr(self, f"_{name}", tensors[name].to(device).clone())
        self._reason, self._ended, self._best = list(known["reasons"]), known["ended"], int(known["best"])
        self._point = None


_TENSORS = (
    "theta",
    "damping",
    "growth",
    "scale",
    "data",
    "objective",
    "initial",
    "reference",
    "idle",
    "norm",
)


class _Layered:
    """Outputs and Jacobians of a kapsi model with one head a layer, ψ dense or of low rank, π zero or linear, for several starts.

    A row of the Jacobian is an outer product of κ(x) and of the slope of the outputs in those of the head, which one backward
    pass gives. For 1,000 rows and 47 parameters the evaluations of an iteration take 0.44 times as long as with
    `torch.func` for one start, and 0.57 times for eight; κ of the first layer is made once.
    """

    def __init__(self, model: Model) -> None:
        self.layers = [(cast(Layer, layer), cast(Head, cast(Layer, layer).heads[0])) for layer in model.layers]
        named = list(model.named_parameters())
        sizes = [p.numel() for _, p in named]
        self.places = {id(p): (start, p) for (_, p), start in zip(named, _starts(sizes), strict=True)}
        self.count = sum(sizes)
        self.first: dict[int, tuple[Tensor, Tensor]] = {}

    @staticmethod
    def fits(model: nn.Module) -> bool:
        """Return whether the model is such a one, with all of its parameters trained."""
        if type(model) is not Model or not all(p.requires_grad for p in model.parameters()):
            return False
        if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
            return False
        known = 0
        for layer in cast("list[Layer]", list(model.layers)):
            head = cast(Head, layer.heads[0])
            spec = head.spec
            if len(layer.heads) > 1 or not isinstance(layer.spec.fusion, Sum) or spec.channels > 1:
                return False
            if type(spec.reconciliation) not in (Dense, LowRank):
                return False
            remainder = spec.remainder
            if type(remainder) is LinearRemainder:
                if remainder.after is not None or remainder.bias:
                    return False
            elif type(remainder) is not ZeroRemainder:
                return False
            known += sum(p.numel() for store in (head.psi, head.pi) for p in store.parameters())
            known += 0 if head.bias is None else head.bias.numel()
        return known == sum(p.numel() for p in model.parameters())

    def keep(self, inputs: list[Tensor]) -> None:
        """Make κ(x) of the first layer for inputs that come again and again."""
        with torch.no_grad():
            self.first = {id(x): (x, self.layers[0][1].expand(x).dense()) for x in inputs}

    def _taken(self, vectors: Tensor, parameter: Tensor) -> Tensor:
        start, own = self.places[id(parameter)]
        return vectors[:, start : start + own.numel()].unflatten(1, own.shape)

    def __call__(self, vectors: Tensor, x: Tensor, *, jacobian: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return outputs `(s, b, n)` for parameters `(s, P)`, and the Jacobian `(s, b, n, P)` if it is wanted."""
        steps: list[tuple[Tensor, Tensor, Tensor, Tensor | None]] = []
        h = x
        with torch.set_grad_enabled(jacobian):
            for i, (layer, head) in enumerate(self.layers):
                known = self.first.get(id(x)) if i == 0 else None
                kappa = head.expand(h).dense() if known is None else known[1]
                inner = kappa
                if isinstance(head.spec.reconciliation, LowRank):
                    inner = kappa @ self._taken(vectors, head.psi.get_parameter("right"))
                    weights = self._taken(vectors, head.psi.get_parameter("left"))
                else:
                    weights = self._taken(vectors, head.psi.get_parameter("matrix"))
                y = inner @ weights.mT
                passed = None
                if isinstance(head.spec.remainder, LinearRemainder):
                    passed = h if head.spec.remainder.before is None else head.spec.remainder.before(h)
                    y = y + passed @ self._taken(vectors, head.pi.get_parameter("matrix")).mT
                if head.bias is not None:
                    y = y + self._taken(vectors, head.bias).unsqueeze(1)
                if jacobian and not y.requires_grad:
                    y.requires_grad_()
                steps.append((y, kappa.detach(), inner.detach(), None if passed is None else passed.detach()))
                h = layer.output(y) if layer.spec.output else y
            if not jacobian:
                return h, None
            n = h.shape[-1]
            sums = h.flatten(0, 1).sum(0)
            made = h.new_empty(*h.shape, self.count)
            for j in range(n):
                slopes = torch.autograd.grad(sums[j], [step[0] for step in steps], retain_graph=j + 1 < n)
                for (_, head), (_, kappa, inner, passed), slope in zip(self.layers, steps, slopes, strict=True):
                    self._fill(made[:, :, j], head, kappa, inner, passed, slope, vectors)
        return h.detach(), made

    @torch.no_grad()
    def _fill(
        self,
        made: Tensor,
        head: Head,
        kappa: Tensor,
        inner: Tensor,
        passed: Tensor | None,
        slope: Tensor,
        vectors: Tensor,
    ) -> None:
        """Write the columns of one head of the Jacobian of one output."""
        blocks: list[tuple[Tensor, Tensor, Tensor]] = []
        if isinstance(head.spec.reconciliation, LowRank):
            back = slope @ self._taken(vectors, head.psi.get_parameter("left"))
            blocks.append((head.psi.get_parameter("left"), slope.unsqueeze(-1), inner.unsqueeze(-2)))
            blocks.append(
                (head.psi.get_parameter("right"), kappa.unsqueeze(-1), back.unsqueeze(-2))
            )  # kept column by column
        else:
            blocks.append((head.psi.get_parameter("matrix"), slope.unsqueeze(-1), kappa.unsqueeze(-2)))
        if passed is not None:
            blocks.append((head.pi.get_parameter("matrix"), slope.unsqueeze(-1), passed.unsqueeze(-2)))
        for parameter, left, right in blocks:
            start, own = self.places[id(parameter)]
            made[..., start : start + own.numel()] = (left * right).flatten(2)
        if head.bias is not None:
            start, own = self.places[id(head.bias)]
            made[..., start : start + own.numel()] = slope


class _Rough(nn.Module):
    """The penalties beside L2 as a function of the parameters of a model."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        super().__init__()
        self.model = model
        self.penalties = Penalties(model, config)

    def forward(self) -> Tensor:
        value = self.penalties.rest_value()
        return torch.zeros((), dtype=torch.float64) if value is None else value


def _starts(sizes: list[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _reset(module: nn.Module, generator: torch.Generator) -> bool:
    """Draw initial values of a module and of those in it anew, and return whether there are any."""
    if isinstance(module, Model | Layer | Head):
        module.reset_parameters(generator)
        return True
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()
        return True
    return sum(_reset(child, generator) for child in module.children()) > 0
