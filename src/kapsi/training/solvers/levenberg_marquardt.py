"""Levenberg–Marquardt: damped Gauss–Newton steps on all rows, for several initial values at once.

Each step solves (A + μ D) v = −b with

    A = (1/count) Σ w JᵀSᵀSJ + Hessian of the penalties,   b = (1/count) Σ w Jᵀg + gradient of the penalties,

J the Jacobian of the outputs in the parameters, g and SᵀS gradient and curvature of the loss in the outputs (`Loss.curvature`).
D is the running maximum of the diagonal of A (Moré 1978); μ follows the ratio of actual and predicted decrease (Nielsen 1999).
With J in memory, steps include half of the geodesic acceleration (Transtrum, Sethna 2012), which follows the curved valleys
typical of products of parameters.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from kapsi.function import option
from kapsi.grids import GridUpdate
from kapsi.modules import trained_count
from kapsi.training.losses import Loss
from kapsi.training.penalties import has_smooth_parameters
from kapsi.training.solvers.base import NotFinite, Report, Solver, SolverRun, State, Task
from kapsi.training.solvers.conjugate_gradients import conjugate_gradients
from kapsi.training.solvers.function_of_rows import check_function_of_rows
from kapsi.training.solvers.jacobian import MAX_DIRECT, Objective, Point, parameter_vector
from kapsi.training.solvers.starts import DROPPED, FIRST_DAMPING, MAX_DAMPING, RUNNING, TENSORS, Starts, initial_values

ACCELERATION = 0.75
"""Largest accepted length of the acceleration, relative to the step (Transtrum and Sethna's α).

Without acceleration the training losses of nine elementary functions were 6 times as large after 40 iterations (geometric mean,
one seed).
"""

PROBE = 0.1
"""Distance of the finite difference for the second derivative, as a part of the step."""


PATIENCE = 10
"""Iterations without a change of the loss above the tolerance until convergence; plateaus are common and temporary."""

GRADIENT = 1e-14
"""Largest gradient counted as zero, relative to the scale given by curvature and `Objective.size_of`."""

STEP = 1e-15
"""Largest step counted as zero, relative to the largest parameter."""

EXACT = 1e-30
"""Largest loss counted as zero, relative to `Objective.size_of`: the precision of float64."""


FREE_EPOCHS = 3
"""Epochs before smoothness is chosen: a factor from initial values, smooth and far from the targets, would keep them smooth."""


@dataclass(frozen=True)
class LevenbergMarquardt(Solver, name="levenberg_marquardt"):
    """Levenberg–Marquardt: damped Gauss–Newton steps on all rows, in float64, from several initial values at the same time.

    The model must map each row independently, and the loss must have a curvature.

    Args:
        restarts: number of initial values, trained as one batch; the first is the model's.
        tolerance: relative change of the loss in 10 iterations below which training ends.

    Source: Moré, The Levenberg–Marquardt algorithm (1978); Nielsen, Damping parameter in Marquardt's method (1999); Transtrum and
        Sethna, Improvements to the Levenberg–Marquardt algorithm (arXiv 1201.5885).
    """

    scale_invariant: ClassVar[bool] = True

    restarts: int = option(1, minimum=1, maximum=4096)
    tolerance: float = option(1e-9, minimum=0.0, maximum=1.0)

    @property
    def follows_grids(self) -> bool:
        """Whether there is a single start: all starts have the grids of the model."""
        return self.restarts == 1

    def chooses_smoothness(self, model: nn.Module, loss: Loss) -> bool:
        return loss.squares and trained_count(model) <= MAX_DIRECT and has_smooth_parameters(model)

    def start(self, task: Task) -> SolverRun:
        return LevenbergMarquardtRun(task, self)


class LevenbergMarquardtRun(SolverRun):
    """Damped Gauss–Newton steps with geodesic acceleration on all rows, in float64 for any dtype of the model.

    An epoch is an iteration: damping grows until a step lowers the objective. Several starts are solved as one batch, each with a
    separate damping; the model gets the best start after every iteration. Converged starts stop, non-finite ones are dropped. Up
    to 2,500 parameters A is computed and factored; for more parameters, conjugate gradients use products with J without
    computing J.

    Args:
        task: model, rows, loss and penalties; uses `config.starts`, `config.tolerance` and `config.seed`.

    Raises:
        SpecError: a loss without curvature; a random model, or batch statistics; penalties without second derivatives;
            sparse inputs; several starts of a model without initial values to draw.

    Source: Moré, The Levenberg–Marquardt algorithm (1978); Nielsen, Damping parameter in Marquardt's method (1999); Transtrum and
        Sethna, Improvements to the Levenberg–Marquardt algorithm (arXiv 1201.5885); for losses other than squares Schraudolph,
        Fast curvature matrix-vector products (2002).
    """

    def __init__(self, task: Task, options: LevenbergMarquardt) -> None:
        super().__init__(task)
        self.options = options
        check_function_of_rows(task)
        self._objective: Objective | None = None
        self._starts: Starts | None = None
        self._point: Point | None = None
        self._expanded: list[int] = []
        self._ended: str | None = None
        self._best = 0

    # -------------------------------------------------------------------------------- starts

    @property
    def objective(self) -> Objective:
        """The objective, created on first use: buffers of the model may change before, as by a checkpoint."""
        if self._objective is None:
            self._objective = Objective(self.task, self.options.restarts)
        return self._objective

    @property
    def starts(self) -> Starts:
        """The state of all starts, drawn on first use."""
        if self._starts is None:
            objective, count = self.objective, self.options.restarts
            vectors = [parameter_vector(self.task.model), *(initial_values(self.task, i) for i in range(1, count))]
            like: dict[str, Any] = {"dtype": torch.float64, "device": objective.device}
            self._starts = Starts(
                theta=torch.stack(vectors),
                damping=torch.full((count,), FIRST_DAMPING, **like),
                growth=torch.full((count,), 2.0, **like),
                # One number per start for conjugate gradients: the diagonal of A would cost as much as A.
                scale=torch.zeros(count, objective.count if objective.direct else 1, **like),
                data=torch.full((count,), math.inf, **like),
                objective=torch.full((count,), math.inf, **like),
                initial=torch.full((count,), math.nan, **like),
                reference=torch.full((count,), math.nan, **like),
                idle=torch.zeros(count, dtype=torch.int64, device=objective.device),
                norm=torch.zeros(count, **like),
                smoothness=torch.zeros(count, 0 if objective.smoothing is None else objective.smoothing.count, **like),
                reasons=[RUNNING] * count,
            )
        return self._starts

    # -------------------------------------------------------------------------------- iterations

    def steps(self, epoch: int, start: int = 0) -> Iterator[None]:
        if start:
            return
        if self._ended is None:
            with warnings.catch_warnings():
                # Norms of weights are mapped one start after another, and torch warns of the cost.
                warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
                self._iterate(self.starts, smooth=epoch > FREE_EPOCHS)
        yield

    @torch.no_grad()
    def _iterate(self, starts: Starts, smooth: bool) -> None:
        """Take one step of each running start."""
        self._evaluate()
        if smooth:
            self._choose_smoothness()
        active = starts.active()
        if self.objective.direct and active:
            index = torch.tensor(active, device=self.objective.device)
            while not self._direct_step(index) and starts.active() == active:
                pass
        elif active:
            for i in active:
                self._conjugate_step(i)
        self._check_convergence()
        if starts.active() != self._expanded:
            # The remaining starts are expanded again as a smaller batch, as in a resumed run.
            self._point = None
        self._update_model()

    def _evaluate(self) -> None:
        """Compute losses and derivatives of the running starts where unknown; drop non-finite starts."""
        starts, objective = self.starts, self.objective
        active = starts.active()
        if not objective.direct:
            for i in active:
                if math.isnan(float(starts.initial[i])):
                    data, total = objective.losses(starts.theta[i : i + 1])
                    starts.record([i], data, total)
                    if not math.isfinite(float(total)):
                        self._drop([i], [False], "loss")
            return
        if self._point is None and active:
            self._expanded = active
            point = self._point = objective.expand(starts.theta[active])
            starts.record(active, point.data, point.total + self._smoothness(active, starts.theta[active]))
            starts.norm[active] = self._gradient(active, point).abs().amax(1)
            finite = (point.total.isfinite() & point.gradient.isfinite().all(1)).tolist()
            if not all(finite):
                self._drop(active, finite, "gradient" if bool(point.total.isfinite().all()) else "loss")
                self._evaluate()
                return
        if active:
            self._check_gradients(active, cast(Point, self._point))

    def _choose_smoothness(self) -> None:
        """Choose the factors of the smoothness of the running starts by their points; objectives change with the factors."""
        smoothing, starts = self.objective.smoothing, self.starts
        active = starts.active()
        if smoothing is None or not active:
            return
        point, theta = cast(Point, self._point), starts.theta[active]
        before = self._smoothness(active, theta)
        matrix = cast(Tensor, point.matrix)
        starts.smoothness[active] = smoothing.chosen(
            starts.smoothness[active], point.data, matrix, theta, self.objective.targets
        )
        change = self._smoothness(active, theta) - before
        starts.objective[active] += change
        starts.reference[active] += change

    def _smoothness(self, index: list[int] | Tensor, theta: Tensor) -> Tensor:
        """Return the penalties with chosen factors at parameters `(s, P)` of some starts, `(s,)`."""
        smoothing = self.objective.smoothing
        if smoothing is None:
            return theta.new_zeros(len(theta))
        return (self.starts.smoothness[index] * smoothing.roughness(theta)).sum(1)

    def _gradient(self, index: list[int] | Tensor, point: Point) -> Tensor:
        """Return the gradients of some starts with the smoothness of chosen factors, `(s, P)`."""
        smoothing, starts = self.objective.smoothing, self.starts
        if smoothing is None:
            return point.gradient
        return point.gradient + smoothing.gradient(starts.theta[index], starts.smoothness[index])

    def _penalized(self, index: Tensor, point: Point) -> Point:
        """Return the objective and its quadratic model with the smoothness of chosen factors."""
        smoothing, starts = self.objective.smoothing, self.starts
        if smoothing is None:
            return point
        total = point.total + self._smoothness(index, starts.theta[index])
        matrix = smoothing.add_to(cast(Tensor, point.matrix), starts.smoothness[index])
        return Point(point.data, total, self._gradient(index, point), matrix, point.parts)

    def _check_gradients(self, active: list[int], point: Point) -> None:
        """End starts with a gradient of rounding errors only."""
        if self._expanded != active:
            return
        starts = self.starts
        curvature = cast(Tensor, point.matrix).diagonal(dim1=1, dim2=2)
        scale = torch.maximum(starts.scale[active], curvature).clamp_min(torch.finfo(torch.float64).tiny).sqrt()
        size = self.objective.size_of(starts.initial[active])
        flat = (self._gradient(active, point).abs() / scale).amax(1) <= GRADIENT * size.sqrt()
        for i, done in zip(active, flat.tolist(), strict=True):
            if done:
                starts.reasons[i] = "the gradient is zero up to rounding"
        if starts.active() != active:
            self._point = None
            self._evaluate()

    def _drop(self, active: list[int], finite: list[bool], statistic: str) -> None:
        """Drop non-finite starts.

        Raises:
            NotFinite: no start is left.
        """
        starts = self.starts
        for i, fine in zip(active, finite, strict=True):
            if not fine:
                starts.reasons[i] = DROPPED
                starts.data[i] = starts.objective[i] = math.inf
        self._point = None
        if all(reason == DROPPED for reason in starts.reasons):
            raise NotFinite(statistic, self.objective.non_finite_batch(starts.theta[active[0]]))

    def _direct_step(self, index: Tensor) -> bool:
        """Try one step of each running start, and return whether any start accepts it."""
        starts, objective, raw = self.starts, self.objective, cast(Point, self._point)
        point = self._penalized(index, raw)
        matrix, theta = cast(Tensor, point.matrix), starts.theta[index]
        scale = torch.maximum(starts.scale[index], matrix.diagonal(dim1=1, dim2=2))
        starts.scale[index] = scale
        # A parameter without effect on the outputs would make the matrix singular.
        scale = scale.clamp_min(1e-14 * scale.amax(1, keepdim=True))
        scale = torch.where(scale > 0, scale, 1.0)
        damping = starts.damping[index]
        # QR of the stacked √w S J and √(μ D) does not square the condition number. On nine elementary functions with
        # errors down to 1e-13 it changed them by less than 0.2 %, and takes five times as long as the product.
        factor, failed = torch.linalg.cholesky_ex(matrix + (damping[:, None] * scale).diag_embed())
        step = -torch.cholesky_solve(point.gradient.unsqueeze(-1), factor).squeeze(-1)
        solved = (failed == 0) & step.isfinite().all(1)
        step = torch.where(solved[:, None], step, 0.0)
        trial = theta + step + self._acceleration(theta, step, scale, factor, point)
        predicted = -(point.gradient * step).sum(1) - 0.5 * (step * (matrix @ step.unsqueeze(-1)).squeeze(-1)).sum(1)
        # With J in memory the trial point is expanded immediately: nearly all steps are accepted.
        new = objective.expand(trial) if objective.keep_jacobian else None
        data, total = (new.data, new.total) if new else objective.losses(trial)
        total = total + self._smoothness(index, trial)
        accepted = solved & (total < point.total)
        if new:
            accepted &= new.gradient.isfinite().all(1)
        starts.adapt_damping(index, accepted, (point.total - total) / predicted)
        tiny = solved & ((trial - theta).abs().amax(1) <= STEP * theta.abs().amax(1))
        stuck = ~accepted & (tiny | (starts.damping[index] >= MAX_DAMPING))
        for i in index[stuck].tolist():
            starts.reasons[i] = "no step lowers the loss further"
        starts.theta[index] = torch.where(accepted[:, None], trial, theta)
        starts.data[index] = torch.where(accepted, data, point.data)
        starts.objective[index] = torch.where(accepted, total, point.total)
        if new:
            if bool(accepted.all()):
                self._point = raw = new
            elif bool(accepted.any()):
                raw.update(new, accepted)
            starts.norm[index] = self._gradient(index, raw).abs().amax(1)
        elif bool(accepted.any()):
            self._point = None
        return bool(accepted.any())

    def _acceleration(self, theta: Tensor, step: Tensor, scale: Tensor, factor: Tensor, point: Point) -> Tensor:
        """Return half of the geodesic acceleration of each step, zero above the largest accepted length."""
        if point.parts is None:
            return torch.zeros_like(step)
        pull = self.objective.bend(theta, step, point, PROBE)
        half = -0.5 * torch.cholesky_solve(pull.unsqueeze(-1), factor).squeeze(-1)
        lengths = [(vector.square() * scale).sum(1).sqrt() for vector in (half, step)]
        accepted = half.isfinite().all(1) & (2 * lengths[0] <= ACCELERATION * lengths[1])
        return torch.where(accepted[:, None], half, 0.0)

    def _conjugate_step(self, i: int) -> None:
        """Take one step of one start by conjugate gradients."""
        starts, objective = self.starts, self.objective
        theta = starts.theta[i : i + 1]
        point = objective.slopes(theta)
        gradient = point.gradient[0]
        starts.norm[i] = gradient.abs().max()
        square = gradient @ gradient
        if not bool(square.isfinite()):
            return self._drop([i], [False], "gradient")

        def product(tangent: Tensor) -> Tensor:
            return objective.product(theta[0], tangent)

        if bool(square > 0):
            starts.scale[i, 0] = torch.maximum(starts.scale[i, 0], gradient @ product(gradient) / square)
        index = torch.tensor([i], device=objective.device)
        while starts.reasons[i] == RUNNING:
            step, image = conjugate_gradients(product, -gradient, starts.damping[i] * starts.scale[i, 0])
            data, total = objective.losses(theta + step)
            predicted = -(gradient @ step) - 0.5 * (step @ image)
            accepted = total < point.total
            starts.adapt_damping(index, accepted, (point.total - total) / predicted)
            if bool(accepted):
                starts.theta[i], starts.data[i], starts.objective[i] = theta[0] + step, data[0], total[0]
                return None
            if bool(step.abs().max() <= STEP * theta.abs().max()) or float(starts.damping[i]) >= MAX_DAMPING:
                starts.reasons[i] = "no step lowers the loss further"
        return None

    def _check_convergence(self) -> None:
        """End converged starts, and choose the best start."""
        starts, tolerance = self.starts, self.options.tolerance
        changed = (starts.reference - starts.objective) > tolerance * starts.reference.abs()
        starts.idle = torch.where(changed, 0, starts.idle + 1)
        starts.reference = torch.where(changed, starts.objective, starts.reference)
        for i in starts.active():
            if 0 <= float(starts.objective[i]) <= EXACT * float(self.objective.size_of(starts.initial[i])):
                starts.reasons[i] = "the loss is zero up to rounding"
            elif int(starts.idle[i]) >= PATIENCE:
                starts.reasons[i] = f"the relative change of the loss was below {tolerance:g} for {PATIENCE} iterations"
        self._best = int(starts.objective.nan_to_num(nan=math.inf).argmin())
        if not starts.active():
            self._ended = starts.reasons[self._best]

    def _update_model(self) -> None:
        """Copy the best start to the model."""
        if not math.isfinite(float(self.starts.objective[self._best])):
            return
        vector = self.starts.theta[self._best]
        for parameter, part in zip(self.task.parameters(), vector.split(self.objective.sizes), strict=True):
            parameter.copy_(part.view(parameter.shape))

    # -------------------------------------------------------------------------------- the protocol

    def follow_grids(self, update: GridUpdate) -> None:
        """Continue from the model, with the scale of the new parameters; the damping stays."""
        starts, self._objective, self._point = self.starts, None, None
        starts.theta[0] = parameter_vector(self.task.model)
        starts.scale.zero_()

    def report(self) -> Report:
        best, starts = self._best, self.starts
        details = {
            "damping": float(starts.damping[best]),
            "gradient_norm": float(starts.norm[best]),
            "starts": float(len(starts.active())),
        }
        if starts.smoothness.numel():
            details["smoothness"] = float(starts.smoothness[best].max())
        return Report(float(starts.data[best]), None, details, self._ended)

    def state(self) -> State:
        """Return the state of all starts, with parameters in float64, beyond the precision of the model."""
        starts = self._starts
        if starts is None:
            return {}, {}
        plain = {"reasons": starts.reasons, "ended": self._ended, "best": self._best}
        tensors = {name: getattr(starts, name) for name in TENSORS}
        return {name: tensor for name, tensor in tensors.items() if tensor.numel()}, plain

    def restore(self, state: State) -> None:
        tensors, plain = state
        if not plain:
            return
        device = self.task.parameters()[0].device
        none = torch.zeros(len(plain["reasons"]), 0, dtype=torch.float64)  # without smooth heads
        values = {name: tensors.get(name, none).to(device).clone() for name in TENSORS}
        self._starts = Starts(**values, reasons=list(plain["reasons"]))
        self._ended, self._best = plain["ended"], int(plain["best"])
        self._point = None
