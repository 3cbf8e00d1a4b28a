"""Preprocessed training rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kapsi.data.tabular import Preprocessing, TableProblem, TargetScale
from kapsi.errors import TableError
from kapsi.text import counted
from kapsi.training.losses import Loss

ENCODING_FOLDS = 5


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """Training rows, preprocessed by statistics of these rows only.

    Args:
        rows: row indices in the problem.
        preprocessing: fitted preprocessing of the features.
        x: inputs, (rows, inputs) float64; CSR with texts.
        y: class codes, or standardized targets, (rows,).
        scale: standardization of the target; None in classification.
        weight: weights of the rows, (rows,); None for equal weights.
    """

    rows: npt.NDArray[np.int64]
    preprocessing: Preprocessing
    x: Any
    y: npt.NDArray[Any]
    scale: TargetScale | None
    weight: npt.NDArray[np.float64] | None = None

    @classmethod
    def of(cls, problem: TableProblem, rows: npt.NDArray[np.int64], seed: int = 0) -> TrainingRows:
        """Fit the preprocessing to training rows of a problem; target encodings are fitted without the fold of a row."""
        everything = len(rows) == len(problem.y)
        outputs, ways = problem.outputs(rows), problem.splits(seed).take(rows)
        weight = None if problem.weight is None else problem.weight[rows]
        preprocessing = (
            problem.preprocessing if everything else Preprocessing.fit(problem.features, rows, outputs, weight)
        )

        def folds() -> Any:
            ordered = replace(ways, times=None)  # folds in time leave the first rows out
            ordered = replace(ordered, groups=None) if ordered.most < 2 else ordered
            return ordered.folds(min(ENCODING_FOLDS, ordered.most))

        x, y = preprocessing.cross_fitted(problem.features, rows, outputs, folds), problem.y[rows]
        if x.shape[1] == 0:
            raise TableError(
                f"{problem.name}: no inputs are left in a part of {counted(len(rows), 'row')}; give more rows or fewer folds"
            )
        scale = None if problem.classes is not None else TargetScale.fit(y.astype(np.float64), weight)
        prepared = cls(rows, preprocessing, x, y if scale is None else scale.apply(y), scale, weight)
        # Rows of weight 0 decide nothing, but could fill a fold.
        return prepared if weight is None or weight.all() else prepared.take(np.flatnonzero(weight))

    def take(self, selection: npt.NDArray[Any]) -> TrainingRows:
        """Return a selection of the rows, by positions among them."""
        weight = None if self.weight is None else self.weight[selection]
        return replace(self, rows=self.rows[selection], x=self.x[selection], y=self.y[selection], weight=weight)

    def for_loss(self, problem: TableProblem, loss: Loss | str) -> TrainingRows:
        """Return the rows with the target as a loss requires it: divided by its mean for a logarithmic link, else unchanged.

        Args:
            problem: the problem of which these are rows.
            loss: the loss, or `auto`.
        """
        if not (isinstance(loss, Loss) and loss.log_link):
            return self
        y = problem.y[self.rows].astype(np.float64)
        scale = TargetScale.fit(y, self.weight, "log_link")
        return replace(self, y=scale.apply(y), scale=scale)
