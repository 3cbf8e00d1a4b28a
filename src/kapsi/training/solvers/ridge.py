"""Closed-form and alternating least squares, and Newton's method, for models linear in their trained parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kapsi.errors import SpecError
from kapsi.function import option
from kapsi.hooks import refuse_gradient_hooks
from kapsi.training.data import Batch
from kapsi.training.losses.base import Loss, losses_with
from kapsi.training.penalties import Penalties
from kapsi.training.solvers.base import NotFinite, Report, Solver, SolverRun, State, Task
from kapsi.training.solvers.blocks import Block, ColumnBlock, Totals, rows_at_once, tensor_blocks
from kapsi.training.solvers.least_squares import Columns, Dual, Factored, Pattern, Stored, Streamed, sums_of
from kapsi.training.solvers.linear import LinearDesign, NotLinear, reason_not_linear, structure, widened

__all__ = ["PENALTIES", "Ridge", "reason_not_closed", "reason_not_linear"]

MAX_COLUMNS = 8_000
"""Most columns of normal equations: 512 MB in float64, three times as much during the solution."""

MAX_ROWS = 4_000
"""Most rows of a Gram matrix, used for fewer rows than columns: 128 MB in float64."""

MAX_STORED = 2**23
"""Rows times columns of κ(x) solved by orthogonal transformations in memory: 64 MiB in float64."""

MAX_KEPT = 2**24
"""Rows times columns of κ(x) stored between Newton steps: 128 MiB in float64."""

PENALTIES = tuple(10 ** (-10 + i / 4) for i in range(53))
"""Candidates for λ in units of the mean eigenvalue of the curvature: 10⁻¹⁰ to 1,000, four per decade."""

NEGLIGIBLE = 1e-15
"""Relative change of the penalized loss at rounding level."""

SHORTEST = 2.0**-20
"""Shortest step of the line search, in parts of the Newton step."""

SEPARATED = 0.1
"""Change of an output per Newton step at convergence that indicates separable classes: the steps do not become shorter."""

SEPARATED_LOSS = 1e-8
"""Mean loss without a penalty that indicates separable classes."""


def method_for(
    width: int, count: int | None, processes: int, smooth: bool
) -> type[Stored] | type[Streamed] | type[Dual] | None:
    """Return the method for a number of columns and rows; None for too many of both."""
    if processes == 1 and count is not None:
        if count * width <= MAX_STORED and min(count, width) <= MAX_ROWS:
            return Stored
        if count < width and count <= MAX_ROWS and not smooth:
            return Dual
    return Streamed if width <= MAX_COLUMNS else None


def _too_many(width: int) -> str:
    size = 8 * MAX_COLUMNS**2 / 1e6
    return (
        f"{width:,} columns; at most {MAX_COLUMNS:,} are supported (their products use {size:.0f} MB), or more with at most "
        f"{MAX_ROWS:,} rows in one process and without smoothness"
    )


def reason_not_closed(model: nn.Module, count: int | None, processes: int = 1) -> str | None:
    """Return why no closed-form solution exists (a nonlinear or too large model), or None.

    Args:
        model: the model.
        count: number of rows; None if unknown.
        processes: number of processes sharing the rows.
    """
    reason = reason_not_linear(model)
    if reason is not None:
        return reason
    width = sum(part.columns for part in structure(model).parts.values() if part.members and part.expand is not None)
    return None if method_for(width, count, processes, False) else f"it has {_too_many(width)}"


@dataclass(frozen=True)
class Ridge(Solver, name="ridge"):
    """Closed form or few steps for models linear in their trained parameters; in float64 for any dtype of the model.

    The method depends on model and loss:

    - Model linear in all parameters jointly (see `reason_not_linear`), `mse`: the exact minimum, in one epoch. Small problems
      use orthogonal transformations of κ(x), others sums over the rows without κ(x) in memory, or the Gram matrix of few rows.
      Without `l2`, λ is the best of 53 values by the exact leave-one-out error. `l2=0` is the limit of small λ: the
      minimum of least norm.
    - The same model, another loss with curvature: one damped Newton step per epoch; for `cross_entropy` and `bernoulli` this
      is iteratively reweighted least squares. The penalized loss never rises. Without `l2`, λ is one over the number of
      rows, as in scikit-learn's `LogisticRegression`.
    - Model linear in each tensor (ψ of low rank, Kronecker products, any ψ with `multilinear = True`): alternating least
      squares, one tensor of each ψ at a time together with all linear parameters. An epoch is a sweep over all tensors; the
      penalized loss never rises. Parameters without effect on the outputs are unchanged. Without `l2`, λ is zero.

    Args:
        tolerance: relative decrease of the penalized loss below which training ends; unused for closed forms.
    """

    scale_invariant: ClassVar[bool] = True
    rotation_invariant: ClassVar[bool] = True

    tolerance: float = option(1e-9, minimum=0.0, maximum=1.0)

    def start(self, task: Task) -> SolverRun:
        return RidgeRun(task, self)

    def chooses_l2(self, model: nn.Module, loss: Loss) -> bool:
        return loss.closed_form and reason_not_linear(model) is None


class RidgeRun(SolverRun):
    """A run of ridge.

    Raises:
        SpecError: an unsupported model, loss, penalty or size; the message names alternatives.
    """

    def __init__(self, task: Task, options: Ridge) -> None:
        super().__init__(task)
        config = task.config
        for name in ("l1", "group_l1"):
            if getattr(config, name):
                raise SpecError(f"ridge: {name} is not quadratic; use solver adamw or sgd, or {name}=0")
        if not task.loss.has_curvature:
            raise SpecError(
                f"ridge: {task.loss.name} has no curvature; losses with curvature: {losses_with('curvature')}; "
                "or use solver lbfgs or adamw"
            )
        refuse_gradient_hooks(task.model, "ridge")
        self.wide = widened(task.model)
        try:
            parts = structure(self.wide)
        except NotLinear as reason:
            raise SpecError(
                f"ridge: {reason}; ridge needs a model of one trained layer, linear in each trained tensor; use solver "
                "levenberg_marquardt or lbfgs"
            ) from None
        self.work: _Closed | _Iterated
        if parts.factors:
            if config.fixed_smoothness:
                raise SpecError("ridge: smoothness needs dense or masked ψ; use solver lbfgs")
            blocks: list[Block] = list(tensor_blocks(parts, Penalties(self.wide, config)))
            self.work = _Iterated(task, blocks, 0.0 if config.l2 is None else config.l2, options.tolerance)
        else:
            design = LinearDesign(self.wide, config)
            if task.loss.closed_form:
                self.work, self.at_once = _Closed(task, design), True
            else:
                self.work = _Iterated(task, [ColumnBlock(design, task.loss)], config.l2, options.tolerance)

    def steps(self, epoch: int, start: int = 0) -> Iterator[None]:
        if start < 1:
            self.work.step()
            parameters, wide = dict(self.task.model.named_parameters()), dict(self.wide.named_parameters())
            for name, parameter in parameters.items():
                if parameter.requires_grad:
                    self.task.group.assign(parameter, wide[name].detach().to(parameter.dtype))
            yield

    def report(self) -> Report:
        return Report(self.work.loss, None, dict(self.work.details), self.work.ended)

    def state(self) -> State:
        tensors = {name: p.detach() for name, p in self.wide.named_parameters() if p.requires_grad}
        work = self.work
        return tensors, {"loss": work.loss, "details": dict(work.details), "ended": work.ended}

    @torch.no_grad()
    def restore(self, state: State) -> None:
        tensors, rest = state
        for name, p in self.wide.named_parameters():
            if p.requires_grad:
                p.copy_(tensors[name])
        self.work.loss, self.work.details, self.work.ended = rest["loss"], dict(rest["details"]), rest["ended"]


class _Closed:
    """Least squares in closed form, one step."""

    def __init__(self, task: Task, design: LinearDesign) -> None:
        self.task, self.design = task, design
        self.loss, self.details = math.nan, dict[str, float]()
        self.ended: str | None = None
        self.last: Batch | None = None
        self.bad: Batch | None = None
        self.method = self._choose_method()

    def _choose_method(self) -> type[Stored] | type[Streamed] | type[Dual]:
        """Return the method for the size of the problem."""
        width, count = self.design.columns, self.task.rows.count
        smooth = self.task.config.fixed_smoothness > 0
        method = method_for(width, count, self.task.group.size, smooth)
        if method is None:
            raise SpecError(f"ridge: the model has {_too_many(width)}; use solver lbfgs or adamw")
        return method

    def _chunks(self) -> Iterator[Columns]:
        """Yield all rows of this process as a design."""
        design, group = self.design, self.task.group
        layer: Any = design.structure.layer
        size = rows_at_once(max(design.columns, layer.in_features))
        for batch in self.task.rows.chunks(size, rank=group.rank, ranks=group.size):
            x, offset = design.expand(batch.x)
            y = batch.y.to(x.device, x.dtype).reshape(len(x), design.outputs)
            y = y if offset is None else y - offset
            weight = x.new_ones(len(x)) if batch.weight is None else batch.weight.to(x.device, x.dtype)
            self.last = batch
            if not math.isfinite(float(x.sum()) + float(y.sum())) and self.bad is None:
                self.bad = batch
            yield Columns(x, y, weight)

    @torch.no_grad()
    def _patterns(self) -> list[Pattern]:
        design, patterns = self.design, []
        for outputs, columns in design.patterns():
            strength = design.strength[outputs[0] if design.masked else 0, columns]
            scale = strength.rsqrt()
            with torch.enable_grad():
                rough = design.roughness(int(outputs[0]), columns)
            if rough is not None:
                rough = rough * scale[:, None] * scale
            patterns.append(Pattern(outputs, columns, scale, rough))
        return patterns

    @torch.no_grad()
    def step(self) -> None:
        design, group, config = self.design, self.task.group, self.task.config
        like = torch.zeros((), dtype=torch.float64, device=design.device)
        constant, method = design.constant, self.method
        chunks: Any = self._chunks
        if method is Stored:
            parts = list(self._chunks())
            stored = Columns(*(torch.cat(pieces) for pieces in zip(*parts, strict=True)))
            chunks = lambda: iter([stored])  # noqa: E731
        sums = sums_of(chunks, group, constant, design.columns, design.outputs, like, method is Streamed)
        whole = [sums.x, sums.y, *(t for t in (sums.squares, sums.products) if t is not None)]
        if group.any(self.bad is not None) or not all(math.isfinite(float(t.sum())) for t in whole):
            batch = self.bad or self.last
            raise NotFinite("loss", batch or Batch(like.new_zeros(0, 1), like.new_zeros(0), None, 0))
        patterns = self._patterns()
        problems: list[Factored] = []
        for pattern in patterns:
            if method is Stored:
                problems.append(Stored(stored, sums, pattern, constant))
            elif method is Dual:
                problems.append(Dual(chunks, sums, pattern, constant))
            else:
                problems.append(Streamed(chunks, sums, pattern, constant, group))
        penalty = config.l2
        if penalty is None:
            penalty, error = choose_penalty(problems, like)
            self.details = {"l2": penalty, "leave_one_out": error}
            origin = "λ has the least leave-one-out error"
        else:
            self.details = {"l2": penalty}
            origin = "λ is fixed"
        theta = like.new_zeros(design.outputs, design.columns)
        for pattern, problem in zip(patterns, problems, strict=True):
            theta[pattern.outputs[:, None], pattern.columns] = (problem.solve(penalty) * pattern.scale[:, None]).T
        design.assign(theta, sums.y - theta @ sums.x if constant else None)
        self.loss = self._loss()
        if not math.isfinite(self.loss) and self.last is not None:
            raise NotFinite("loss", self.last)
        self.ended = f"solved in closed form; {origin}"

    def _loss(self) -> float:
        """Return the mean loss with weights rounded to the dtype of the model."""
        like = dict(self.task.model.named_parameters())
        for name, p in self.design.model.named_parameters():
            p.copy_(p.to(like[name].dtype))
        theta, bias = self.design.coefficients()
        sums = torch.zeros(2, dtype=torch.float64, device=self.design.device)
        for rows in self._chunks():
            error = (rows.x @ theta.T + bias - rows.y).square().mean(1)
            sums += torch.stack([(rows.weight * error).sum(), error.new_tensor(float(len(error)))])
        total, count = self.task.group.sum(sums).tolist()
        return total / count


def choose_penalty(problems: Sequence[Factored], like: Tensor) -> tuple[float, float]:
    """Return the λ with the least leave-one-out error, summed over all patterns, and the error.

    Args:
        problems: the least-squares problem of each pattern.
        like: a tensor with dtype and device of the result.
    """
    for problem in problems:
        problem.factor()
    eigenvalues = [float(problem.spectrum.sum()) / problem.width for problem in problems if problem.width]
    mean = sum(eigenvalues) / len(eigenvalues) if eigenvalues else 0.0
    penalties = like.new_tensor(PENALTIES[::-1]) * (mean or 1.0)
    errors = sum((problem.leave_one_out(penalties) for problem in problems), torch.zeros_like(penalties))
    # The strongest of equal ones, also if none is determined, as for a single row.
    best = int(torch.where(errors.isnan(), torch.inf, errors).argmin())
    return float(penalties[best]), float(errors[best])


class _Iterated:
    """Newton steps in blocks of unknowns, in turn; no step raises the penalized loss.

    Args:
        task: model, rows, loss and penalties.
        blocks: the blocks of unknowns.
        penalty: the penalty λ; None for one over the number of rows.
        tolerance: relative change of the penalized loss that ends the run.
    """

    def __init__(self, task: Task, blocks: list[Block], penalty: float | None, tolerance: float) -> None:
        self.task, self.blocks, self.penalty, self.tolerance = task, blocks, penalty, tolerance
        self.loss, self.details = math.nan, dict[str, float]()
        self.ended: str | None = None
        self.stored: list[tuple[Batch, Any]] | None = None
        self.bad: Batch | None = None
        self.passed: _Pass | None = None

    def _designs(self, block: Block) -> Iterator[tuple[Batch, Any]]:
        """Yield the rows of this process with their designs; small designs of linear models are stored."""
        if self.stored is not None:
            yield from self.stored
            return
        rows, group = self.task.rows, self.task.group
        keep = isinstance(block, ColumnBlock) and rows.count is not None and rows.count * block.width <= MAX_KEPT
        stored: list[tuple[Batch, Any]] = []
        for batch in rows.chunks(rows_at_once(block.width), rank=group.rank, ranks=group.size):
            design = block.design(batch.x)
            if keep:
                stored.append((batch, design))
            yield batch, design
        if keep:
            self.stored = stored

    @torch.no_grad()
    def _pass(self, block: Block) -> _Pass:
        """Return the sums over all rows at the current parameters, for a step of a block."""
        totals, count, unknowns = block.totals(), 0, block.get()
        self.bad = None
        last: Batch | None = None
        for batch, design in self._designs(block):
            losses = block.add(batch, self.task.loss, unknowns, totals, design)
            last = batch
            if self.bad is None and not math.isfinite(float(losses.sum())):
                self.bad = batch
            count += len(losses)
        self.bad = self.bad or last
        group = self.task.group
        ends = group.sum(torch.stack([totals.loss, totals.loss.new_tensor(float(count))]))
        number = float(ends[1])
        summed = Totals(ends[0], group.sum(totals.gradient), group.sum(totals.curvature))
        if self.penalty is None:
            self.penalty = 1 / number
        loss = float(ends[0]) / number
        return _Pass(unknowns, summed, number, loss, loss + float(block.penalty(self.penalty)))

    @torch.no_grad()
    def step(self) -> None:
        if self.passed is None:
            self.passed = self._pass(self.blocks[0])
        before = self.passed
        if not math.isfinite(before.total) or not bool(before.totals.curvature.isfinite().all()):
            empty = torch.zeros(0, 1)
            raise NotFinite("loss", self.bad or Batch(empty, empty, None, 0))
        changed, step = False, torch.zeros(())
        for i, block in enumerate(self.blocks):
            step = self._advance(block, self.blocks[(i + 1) % len(self.blocks)])
            changed |= bool(step.any())
        after = self.passed
        self.loss = after.loss
        self.details = {"l2": self.penalty or 0.0, "penalized_loss": after.total}
        change = before.total - after.total
        if self._diverges(step, after, change):
            self.ended = (
                "the classes are separable and there is no penalty, so the weights diverge; the model has those of the last step; "
                "set l2 above 0"
            )
        elif after.total == 0:
            self.ended = "the loss is zero"
        elif not changed:
            self.ended = "no step lowers the penalized loss further"
        elif change <= self.tolerance * abs(after.total):
            self.ended = f"the relative decrease of the penalized loss was below {self.tolerance:g}"

    def _advance(self, block: Block, following: Block) -> Tensor:
        """Take the longest step in a block that lowers the loss, evaluate the following block, and return the step."""
        now = self.passed
        if now is None:
            raise ValueError("_advance: no pass before the step")
        unknowns, total = now.unknowns, now.total
        step, decrease = block.step(unknowns, now.totals, now.count, self.penalty or 0.0)
        share = 1.0
        if decrease > NEGLIGIBLE * abs(total) and bool(step.isfinite().all()):
            while share >= SHORTEST:
                block.put(unknowns + share * step)
                self.passed = self._pass(following)
                if self.passed.total <= total and bool(self.passed.totals.curvature.isfinite().all()):
                    return share * step
                share /= 2
        block.put(unknowns)
        self.passed = self._pass(following)
        return torch.zeros_like(step)

    def _diverges(self, step: Tensor, after: _Pass, change: float) -> bool:
        """Return whether Newton steps keep their length although the loss hardly falls: there is no minimum."""
        loss, block = self.task.loss, self.blocks[0]
        if self.penalty or not loss.unbounded or len(self.blocks) > 1:
            return False
        if after.loss > SEPARATED_LOSS and change > self.tolerance * abs(after.total):
            return False
        largest = 0.0
        for _, design in self._designs(block):
            difference = block.outputs(design, step) - block.outputs(design, torch.zeros_like(step))
            if difference.numel():
                common = difference.mean(1, keepdim=True) * (difference.shape[1] > 1)
                largest = max(largest, float((difference - common).abs().max()))
        return self.task.group.max(largest) > SEPARATED


class _Pass:
    """Sums over all rows at the current parameters, for a step of a block."""

    def __init__(self, unknowns: Tensor, totals: Totals, count: float, loss: float, total: float) -> None:
        self.unknowns, self.totals, self.count, self.loss, self.total = unknowns, totals, count, loss, total
