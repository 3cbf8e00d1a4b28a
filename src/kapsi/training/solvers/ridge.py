"""Least squares in closed form, alternating least squares, and Newton's method for models that are linear in what is trained."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kapsi.errors import SpecError
from kapsi.training.data import Batch
from kapsi.training.losses import LOSSES, Loss
from kapsi.training.penalties import Penalties
from kapsi.training.solvers.base import NotFinite, Report, Solver, State, Task
from kapsi.training.solvers.blocks import Block, ColumnBlock, Totals, rows_at_once, tensor_blocks
from kapsi.training.solvers.least_squares import Columns, Dual, Factored, Pattern, Stored, Streamed, sums_of
from kapsi.training.solvers.linear import LinearDesign, NotLinear, reason_not_linear, structure, widened

__all__ = ["PENALTIES", "Ridge", "reason_not_closed", "reason_not_linear"]

LARGEST_COLUMNS = 8_000
"""Columns whose products are added up: 512 MB in float64, and three times that while they are solved."""

LARGEST_ROWS = 4_000
"""Rows whose products with each other are made where there are more columns than that: 128 MB in float64."""

LARGEST_STORED = 2**23
"""Rows times columns up to which all of κ(x) is kept and solved by orthogonal transformations: 64 MiB in float64."""

LARGEST_KEPT = 2**24
"""Rows times columns up to which κ(x) is kept from one Newton step to the next: 128 MiB in float64."""

PENALTIES = tuple(10 ** (-10 + i / 4) for i in range(53))
"""λ that are tried by leaving rows out, over the mean eigenvalue of the curvature: 10⁻¹⁰ to 1,000, four a decade."""

NEGLIGIBLE = 1e-15
"""Relative change of the penalized loss that is nothing but rounding."""

SHORTEST = 2.0**-20
"""Shortest share of a step that is tried."""

SEPARATED = 0.1
"""Change of an output in the last of many Newton steps from which on the steps do not become shorter: the classes are separated."""

SEPARATED_LOSS = 1e-8
"""Mean loss without a penalty from which on the classes are separated."""


def way_of(
    width: int, count: int | None, processes: int, smooth: bool
) -> type[Stored] | type[Streamed] | type[Dual] | None:
    """Return how least squares with so many columns and rows are solved, None where they are too large."""
    if processes == 1 and count is not None:
        if count * width <= LARGEST_STORED and min(count, width) <= LARGEST_ROWS:
            return Stored
        if count < width and count <= LARGEST_ROWS and not smooth:
            return Dual
    return Streamed if width <= LARGEST_COLUMNS else None


def _too_many(width: int) -> str:
    size = 8 * LARGEST_COLUMNS**2 / 1e6
    return (
        f"{width:,} columns; at most {LARGEST_COLUMNS:,} are solved at once (their products are {size:.0f} MB), or more with at "
        f"most {LARGEST_ROWS:,} rows in one process and without smoothness"
    )


def reason_not_closed(model: nn.Module, count: int | None, processes: int = 1) -> str | None:
    """Return why least squares of a model are not solved in closed form: it is not linear, or too large; None where they are.

    Args:
        model: the model.
        count: number of rows, None where it is not known.
        processes: number of processes that share them.
    """
    reason = reason_not_linear(model)
    if reason is not None:
        return reason
    width = sum(part.columns for part in structure(model).parts.values() if part.members and part.make is not None)
    return None if way_of(width, count, processes, False) else f"it has {_too_many(width)}"


class Ridge(Solver, name="ridge"):
    """Models that are linear in what is trained, in closed form or by few steps; in float64, whatever the model's type.

    What is solved depends on model and loss:

    - Linear in all parameters at once (see `reason_not_linear`), `mse`: the minimum itself, in one epoch. Small problems by
      orthogonal transformations of κ(x), others from sums over the rows, κ(x) never being there as a whole, or from products of
      rows where these are few. Without `penalty` λ is chosen: the best of 53 by the exact leave-one-out error, each row
      predicted by the fit to all others. `penalty=0` is the limit of small λ: the solution with the least penalty, where there
      are several.
    - The same model, any other loss with a curvature: damped Newton steps, one an epoch; for `cross_entropy` and `bernoulli`
      that is iteratively reweighted least squares. The penalized loss never rises. Without `penalty` λ is one over the number
      of rows, as in scikit-learn's `LogisticRegression`.
    - Linear in each tensor (ψ of low rank, Kronecker products and the like): alternating least squares, one tensor of each ψ at
      a time, together with all that is linear by itself; a sweep over all of them is an epoch, and the penalized loss never
      rises. Tensors stay as they are in directions that change nothing. Without `penalty` λ is zero.

    Raises:
        SpecError: a model, a loss, a penalty or a size that does not fit; the message says what does.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        config = task.config
        for name in ("l1", "group_sparsity"):
            if getattr(config, name):
                raise SpecError(f"ridge: {name} is not quadratic; take solver adamw or sgd, or {name}=0")
        if type(task.loss).curvature is Loss.curvature:
            having = ", ".join(name for name, kind in LOSSES.items() if kind.curvature is not Loss.curvature)
            raise SpecError(
                f"ridge: {task.loss.name} has no curvature to be used, {having} have; take solver lbfgs or adamw"
            )
        self.wide = widened(task.model)
        try:
            found = structure(self.wide)
        except NotLinear as reason:
            raise SpecError(
                f"ridge: {reason}; it is for models of one layer that are linear in each trained tensor; take solver "
                "levenberg_marquardt or lbfgs"
            ) from None
        self.work: _Closed | _Iterated
        if found.factors:
            if config.smoothness:
                raise SpecError("ridge: smoothness is for dense and masked ψ here; take solver lbfgs")
            blocks: list[Block] = list(tensor_blocks(found, Penalties(self.wide, config)))
            self.work = _Iterated(task, blocks, 0.0 if config.penalty is None else config.penalty)
        else:
            design = LinearDesign(self.wide, config)
            if task.loss.name == "mse":
                self.work = _Closed(task, design)
            else:
                self.work = _Iterated(task, [ColumnBlock(design, task.loss)], config.penalty)

    def steps(self, epoch: int, start: int = 0) -> Iterator[None]:
        if start < 1:
            self.work.step()
            own, wide = dict(self.task.model.named_parameters()), dict(self.wide.named_parameters())
            for name, parameter in own.items():
                if parameter.requires_grad:
                    self.task.group.place(parameter, wide[name].detach().to(parameter.dtype))
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
    """Least squares in one step."""

    def __init__(self, task: Task, design: LinearDesign) -> None:
        self.task, self.design = task, design
        self.loss, self.details = math.nan, dict[str, float]()
        self.ended: str | None = None
        self.last: Batch | None = None
        self.bad: Batch | None = None
        self.way = self._way()

    def _way(self) -> type[Stored] | type[Streamed] | type[Dual]:
        """Return how it is solved, by size."""
        width, count = self.design.columns, self.task.rows.count
        smooth = self.task.config.smoothness > 0
        way = way_of(width, count, self.task.group.size, smooth)
        if way is None:
            raise SpecError(f"ridge: the model has {_too_many(width)}; take solver lbfgs or adamw")
        return way

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
        design, found = self.design, []
        for outputs, columns in design.patterns():
            strength = design.strength[outputs[0] if design.masked else 0, columns]
            scale = strength.rsqrt()
            with torch.enable_grad():
                rough = design.roughness(int(outputs[0]), columns)
            if rough is not None:
                rough = rough * scale[:, None] * scale
            found.append(Pattern(outputs, columns, scale, rough))
        return found

    @torch.no_grad()
    def step(self) -> None:
        design, group, config = self.design, self.task.group, self.task.config
        like = torch.zeros((), dtype=torch.float64, device=design.device)
        constant, way = design.constant, self.way
        chunks: Any = self._chunks
        if way is Stored:
            parts = list(self._chunks())
            stored = Columns(*(torch.cat(pieces) for pieces in zip(*parts, strict=True)))
            chunks = lambda: iter([stored])  # noqa: E731
        sums = sums_of(chunks, group, constant, design.columns, design.outputs, like, way is Streamed)
        whole = [sums.x, sums.y, *(t for t in (sums.squares, sums.products) if t is not None)]
        if group.any(self.bad is not None) or not all(math.isfinite(float(t.sum())) for t in whole):
            batch = self.bad or self.last
            raise NotFinite("loss", batch or Batch(like.new_zeros(0, 1), like.new_zeros(0), None, 0))
        patterns = self._patterns()
        solved: list[Factored] = []
        for pattern in patterns:
            if way is Stored:
                solved.append(Stored(stored, sums, pattern, constant))
            elif way is Dual:
                solved.append(Dual(chunks, sums, pattern, constant))
            else:
                solved.append(Streamed(chunks, sums, pattern, constant, group))
        penalty = config.penalty
        if penalty is None:
            penalty, left_out = choose(solved, like)
            self.details = {"penalty": penalty, "leave_one_out": left_out}
            how = "λ is the best by leaving one row out"
        else:
            self.details = {"penalty": penalty}
            how = "λ was given"
        theta = like.new_zeros(design.outputs, design.columns)
        for pattern, one in zip(patterns, solved, strict=True):
            found = (one.solve(penalty) * pattern.scale[:, None]).T
            theta[pattern.outputs[:, None], pattern.columns] = found
        design.assign(theta, sums.y - theta @ sums.x if constant else None)
        self.loss = self._loss()
        self.ended = f"solved in closed form; {how}"

    def _loss(self) -> float:
        """Return the mean loss with the weights as the model has them."""
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


def choose(solved: Sequence[Factored], like: Tensor) -> tuple[float, float]:
    """Return the λ with the least leave-one-out error for all patterns together, and that error.

    Args:
        solved: the patterns.
        like: gives type and device.
    """
    for one in solved:
        one.factor()
    known = [float(one.spectrum.sum()) / one.width for one in solved if one.width]
    mean = sum(known) / len(known) if known else 0.0
    penalties = like.new_tensor(PENALTIES[::-1]) * (mean or 1.0)
    errors = sum((one.left_out(penalties) for one in solved), torch.zeros_like(penalties))
    # Of equal ones the strongest; where nothing is known, as with a single row, too.
    best = int(torch.where(errors.isnan(), torch.inf, errors).argmin())
    return float(penalties[best]), float(errors[best])


class _Iterated:
    """Newton steps in blocks of unknowns, each in turn; none makes the penalized loss larger.

    Args:
        task: what is minimized.
        blocks: the unknowns.
        penalty: λ; None for one over the number of rows.
    """

    def __init__(self, task: Task, blocks: list[Block], penalty: float | None) -> None:
        self.task, self.blocks, self.penalty = task, blocks, penalty
        self.loss, self.details = math.nan, dict[str, float]()
        self.ended: str | None = None
        self.kept: list[tuple[Batch, Any]] | None = None
        self.bad: Batch | None = None
        self.passed: _Pass | None = None

    def _designs(self, block: Block) -> Iterator[tuple[Batch, Any]]:
        """Yield the rows of this process with their designs; those of a linear model are kept if they are small."""
        if self.kept is not None:
            yield from self.kept
            return
        rows, group = self.task.rows, self.task.group
        keep = isinstance(block, ColumnBlock) and rows.count is not None and rows.count * block.numbers <= LARGEST_KEPT
        made: list[tuple[Batch, Any]] = []
        for batch in rows.chunks(rows_at_once(block.numbers), rank=group.rank, ranks=group.size):
            design = block.design(batch.x)
            if keep:
                made.append((batch, design))
            yield batch, design
        if keep:
            self.kept = made

    @torch.no_grad()
    def _pass(self, block: Block) -> _Pass:
        """Go through all rows with the present parameters, for a step of a block."""
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
        config = self.task.config
        if self.passed is None:
            self.passed = self._pass(self.blocks[0])
        before = self.passed
        if not math.isfinite(before.total) or not bool(before.totals.curvature.isfinite().all()):
            empty = torch.zeros(0, 1)
            raise NotFinite("loss", self.bad or Batch(empty, empty, None, 0))
        moved, step = False, torch.zeros(())
        for i, block in enumerate(self.blocks):
            step = self._advance(block, self.blocks[(i + 1) % len(self.blocks)])
            moved |= bool(step.any())
        after = self.passed
        self.loss = after.loss
        self.details = {"penalty": self.penalty or 0.0, "penalized_loss": after.total}
        change = before.total - after.total
        if self._diverges(step, after, change):
            self.ended = (
                "the classes can be separated and there is no penalty, so that the weights would grow without end; they are those "
                "of the last step; set penalty above 0"
            )
        elif after.total == 0:
            self.ended = "the loss is zero"
        elif not moved:
            self.ended = "no step lowers the penalized loss any more"
        elif change <= config.tolerance * abs(after.total):
            self.ended = f"the penalized loss fell by less than {config.tolerance:g} of itself"

    def _advance(self, block: Block, following: Block) -> Tensor:
        """Take a step in a block, as long as it lowers the loss; go through the rows for the one that follows; return the step."""
        now = self.passed
        if now is None:
            raise ValueError("no pass before the step")
        unknowns, total = now.unknowns, now.total
        step, promise = block.step(unknowns, now.totals, now.count, self.penalty or 0.0)
        share = 1.0
        if promise > NEGLIGIBLE * abs(total) and bool(step.isfinite().all()):
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
        """Return whether Newton's steps go on as long as they were, although the loss hardly falls: it has no minimum."""
        loss, block = self.task.loss, self.blocks[0]
        if self.penalty or loss.name not in ("cross_entropy", "bernoulli") or len(self.blocks) > 1:
            return False
        if after.loss > SEPARATED_LOSS and change > self.task.config.tolerance * abs(after.total):
            return False
        largest = 0.0
        for _, design in self._designs(block):
            moved = block.outputs(design, step) - block.outputs(design, torch.zeros_like(step))
            if moved.numel():
                largest = max(largest, float((moved - moved.mean(1, keepdim=True) * (moved.shape[1] > 1)).abs().max()))
        return self.task.group.largest(largest) > SEPARATED


class _Pass:
    """What all rows say of the present parameters, for a step of a block."""

    def __init__(self, unknowns: Tensor, totals: Totals, count: float, loss: float, total: float) -> None:
        self.unknowns, self.totals, self.count, self.loss, self.total = unknowns, totals, count, loss, total
