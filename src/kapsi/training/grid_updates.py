"""Grids of splines that follow their inputs during training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from kapsi.errors import SpecError
from kapsi.function import Spec, option
from kapsi.grids import check_grids, update_grids
from kapsi.hooks import original
from kapsi.modules import Model
from kapsi.training.distributed import Group
from kapsi.training.prediction import rows_at_a_time
from kapsi.training.rows.base import Rows

if TYPE_CHECKING:
    from kapsi.training.resolve import Resolved
    from kapsi.training.resume import Progress
    from kapsi.training.solvers.base import SolverRun

MAX_ROWS = 2**14
"""Largest number of training rows that grids are moved to."""

MARGIN = 1.2
"""Width of the range of hidden layers relative to their inputs: outputs grow between two updates."""

WHERE = "fit(grid_updates=…)"


@dataclass(frozen=True)
class GridUpdates(Spec):
    """Schedule of grid updates: spline grids adapt to their current inputs during training.

    The function is kept as far as the new grids allow; `details["grid_change"]` of a record is the change of the outputs. Bad seeds
    of Levenberg–Marquardt become rarer for B-splines in `Extended`, and more frequent for plain spline networks.

    Args:
        every: number of epochs between two updates.
        until: last epoch with an update at its end.
    """

    every: int = option(10, minimum=1)
    until: int = option(40, minimum=1)

    def check(self) -> None:
        if self.until < self.every:
            raise SpecError(
                f"GridUpdates(every={self.every}, until={self.until}): there is no update; until must be at least every"
            )

    def due(self, number: int) -> bool:
        """Return whether grids move after a number of completed epochs."""
        return 0 < number <= self.until and number % self.every == 0


class GridMover:
    """Moves the grids of a model between epochs.

    Args:
        model: the model.
        x: training rows.
        options: when grids move.
    """

    def __init__(self, model: Model, x: Tensor, options: GridUpdates) -> None:
        self.model, self.x, self.options = model, x, options

    def begin_epoch(self, progress: Progress, solver: SolverRun) -> None:
        """Move the grids if an update is due before the first step of an epoch."""
        if progress.step:
            return  # of a resumed run
        change = 0.0
        if self.options.due(progress.number):
            update = update_grids(self.model, self.x, WHERE, MARGIN)
            solver.follow_grids(update)
            change = update.change
        progress.details = {"grid_change": change}


def grid_mover(model: nn.Module, rows: Rows, chosen: Resolved, group: Group) -> GridMover | None:
    """Return what moves the grids of a model; None without the option.

    Raises:
        SpecError: grids that cannot move, a solver whose steps cannot follow, or no update within the epochs.
    """
    options, solver, epochs = chosen.config.grid_updates, chosen.solver, chosen.config.epochs
    if options is None:
        return None
    problem, model = "", original(model)
    if not isinstance(model, Model):
        problem = "the model is no kapsi.Model"
    elif group.sharded:
        problem = "the parameters are divided among processes"
    elif rows.sparse:
        problem = "sparse inputs are not supported"
    elif not solver.follows_grids:
        able = "adamw, sgd, lbfgs, or levenberg_marquardt with restarts=1"
        problem = f"solver {solver.name} does not continue on moved grids; use {able}"
    elif options.every >= epochs:
        problem = f"the first update is after epoch {options.every}, and training ends with epoch {epochs}"
    if problem or not isinstance(model, Model):
        raise SpecError(f"{WHERE}: {problem}; or leave grid_updates out")
    x = next(iter(rows.chunks(max(1, min(MAX_ROWS, rows_at_a_time(model)))))).x
    check_grids(model, x, WHERE)
    return GridMover(model, x, options)
