"""Contributions: the prediction of a row as a mean plus one number for each column.

The contribution of a column is its interventional Shapley value: starting from a background row, the columns take the values of
the row in random order; the contribution is the mean change of f when the column changes. Each background row is used with an
order and its reverse, which is exact for models without products of three columns or more. From the contributions of a column
its mean over the background is subtracted, so that for a sum of functions of columns they *are* these functions with mean 0.

The changes along an order telescope: contributions add up to the prediction minus the mean, whatever the number of samples.

Source: E. Strumbelj and I. Kononenko, Explaining prediction models and individual predictions with feature contributions,
Knowledge and Information Systems 41 (2014); R. Mitchell et al., Sampling permutations for Shapley value estimation, Journal of
Machine Learning Research 23 (2022), for reversed orders; D. Janzing et al., Feature relevance quantification in explainable AI: a
causal problem, AISTATS 2020, for interventions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kapsi.data.tabular import Table
from kapsi.data.tabular.types import Floats
from kapsi.errors import check_integer
from kapsi.interpret.view import View, deviation, mixed, of_table, view
from kapsi.tables.model import TableModel
from kapsi.tables.run_folder import LoadedRun

__all__ = ["Contributions", "Explainer", "contributions"]

BACKGROUND, SAMPLES = 200, 16
"""Background rows whose mean is the base, and of these the rows where paths begin."""
EXACT = 1e-6
"""Differences of paths, relative to the deviation of the outputs, below which one path is enough."""
MOST_VALUES = 2**22
"""Values of the inputs of a step of all paths; more rows are explained in parts."""


class Contributions(NamedTuple):
    """Contributions of the columns to the predictions of rows.

    Attributes:
        columns: names of the columns.
        outputs: names of the outputs, see `kapsi.interpret.effects`.
        values: (rows, columns, outputs).
        base: the mean output of the background, (outputs,); predictions = base + sum of the contributions.
        predictions: outputs of the model, (rows, outputs).
    """

    columns: tuple[str, ...]
    outputs: tuple[str, ...]
    values: Floats
    base: Floats
    predictions: Floats


@dataclass(frozen=True, eq=False)
class Explainer:
    """Explains rows, the same in any batches.

    Args:
        background: a model with background rows.
        starts: background rows where paths begin, (paths, m).
        ranks: position of each input in the order of a path, (paths, m), counted in columns.
        center: mean contribution of each column over the background, (columns, outputs).
        base: mean output of the background, (outputs,).
    """

    background: View
    starts: Any
    ranks: Any
    center: Floats
    base: Floats

    @classmethod
    def of(cls, background: View, samples: int = SAMPLES, seed: int = 0) -> Explainer:
        """Return an explainer; a model that is a sum of functions of columns takes one path."""
        check_integer("contributions: samples", samples, 1)
        count, columns = background.rows, len(background.columns)
        rng = np.random.default_rng([seed, 3])
        chosen = rng.permutation(count)[: min(samples, count)]
        orders = np.stack([rng.permutation(columns) for _ in chosen])
        orders = np.concatenate([orders, columns - 1 - orders])  # the rank of each column, and of the reverse order
        chosen = np.concatenate([chosen, chosen])
        outputs = background.function(background.inputs)
        first = cls(
            background, background.inputs[chosen], orders, np.zeros((columns, outputs.shape[1])), outputs.mean(0)
        )
        some = background.inputs[rng.permutation(count)[:8]]
        paths = first._paths(some)
        spread = np.abs((paths - paths[:, :1]) - (paths - paths[:, :1])[:1]).max(initial=0.0, axis=(0, 1, 2))
        if bool((spread <= EXACT * deviation(outputs)).all()):
            first = cls(background, background.inputs[chosen[:1]], orders[:1], first.center, first.base)
        center = np.concatenate([part.mean(0) for part in first._in_parts(background.inputs)]).mean(0)
        return cls(background, first.starts, first.ranks, center, first.base)

    def _in_parts(self, inputs: Any) -> Iterator[Floats]:
        """Yield contributions of parts of the rows, (paths, part, columns, outputs)."""
        size = max(1, MOST_VALUES // (len(self.ranks) * max(1, inputs.shape[1])))
        for begin in range(0, inputs.shape[0], size):
            yield self._paths(inputs[begin : begin + size])

    def _paths(self, inputs: Any) -> Floats:
        """Return the change of f at each column along each path, (paths, rows, columns, outputs)."""
        columns, paths, rows = self.background.columns, len(self.ranks), inputs.shape[0]
        owner = np.zeros(inputs.shape[1], dtype=np.int64)
        for position, column in enumerate(columns):
            owner[column.inputs] = position
        begin = self.background.function(self.starts)
        end = self.background.function(inputs)
        before = np.repeat(begin[:, np.newaxis], rows, axis=1)
        changes = np.zeros((paths, rows, len(columns), begin.shape[1]))
        for step in range(len(columns)):
            if step == len(columns) - 1:
                after = np.repeat(end[np.newaxis], paths, axis=0)
            else:
                after = self._step(inputs, self.ranks[:, owner] <= step)
            position = (self.ranks == step).argmax(1)
            changes[np.arange(paths), :, position] = after - before
            before = after
        return changes

    def _step(self, inputs: Any, masks: Any) -> Floats:
        """Return the outputs of all rows with the inputs of a mask for each path, (paths, rows, outputs)."""
        paths, rows = len(masks), inputs.shape[0]
        if isinstance(inputs, np.ndarray):
            states = np.where(masks[:, np.newaxis], inputs[np.newaxis], self.starts[:, np.newaxis])
            return self.background.function(states.reshape(paths * rows, -1)).reshape(paths, rows, -1)
        return np.stack(
            [self.background.function(mixed(inputs, self.starts[[path] * rows], masks[path])) for path in range(paths)]
        )

    def explain(self, inputs: Any) -> Contributions:
        """Return the contributions for encoded rows."""
        parts = [part.mean(0) for part in self._in_parts(inputs)]
        columns, outputs = tuple(c.name for c in self.background.columns), self.background.outputs
        shape = (0, len(columns), len(outputs))
        values = np.concatenate(parts) - self.center if parts else np.zeros(shape)
        predictions = self.background.function(inputs) if parts else np.zeros((0, len(outputs)))
        return Contributions(columns, outputs, values, self.base, predictions)


def contributions(
    model: Any, rows: Any, *, background: Any = None, samples: int = SAMPLES, seed: int = 0
) -> Contributions:
    """Return the contribution of each column to the prediction of each row.

    For regressions in the unit of the target; for two classes to the log odds of the second; for several classes to the logits
    minus their mean.

    Args:
        model: a run of `kp.load_run`, a fitted estimator, or a `kp.Model`.
        rows: the rows to explain, of the columns of the model.
        background: rows whose mean prediction is the base; None: the rows that a run keeps, for other models `rows`.
        samples: background rows where paths begin.
        seed: seed of the samples.

    Returns:
        The contributions; `base + values.sum(1)` equals `predictions` to 1e-9 of their size.

    Raises:
        DataError: no background.

    Example:
        >>> import kapsi as kp, torch
        >>> model = kp.Model(kp.rpn([2, 1], expansion=kp.Taylor(2)), seed=0, dtype=torch.float64)
        >>> found = kp.interpret.contributions(model, torch.rand(5, 2))
        >>> bool(abs(found.base + found.values.sum(1) - found.predictions).max() < 1e-9)
        True
    """
    given = background if background is not None or isinstance(model, LoadedRun) else rows
    explainer = Explainer.of(view(model, given, seed=seed, most=BACKGROUND), samples, seed)
    return explainer.explain(view(model, rows, seed=seed, most=2**62).inputs)


def explainer_of(run: LoadedRun, seed: int = 0) -> Callable[[Table], dict[str, list[float]]]:
    """Return a function from rows, typed as fitted, to base and contributions as columns of predictions.

    With one output `base` and `contribution_COLUMN`, with several `base_OUTPUT` and `contribution_OUTPUT_COLUMN`.

    Raises:
        DataError: the run keeps no rows.
    """
    explainer = Explainer.of(view(run, seed=seed, most=BACKGROUND), seed=seed)
    return lambda table: _columns(explainer, run.model, table)


def _columns(explainer: Explainer, model: TableModel, table: Table) -> dict[str, list[float]]:
    found = explainer.explain(of_table(model, table).inputs)
    columns: dict[str, list[float]] = {}
    for i, output in enumerate(found.outputs):
        prefix = f"_{output}" if len(found.outputs) > 1 else ""
        columns[f"base{prefix}"] = [float(found.base[i])] * len(found.values)
        for j, name in enumerate(found.columns):
            columns[f"contribution{prefix}_{name}"] = found.values[:, j, i].tolist()
    return columns
