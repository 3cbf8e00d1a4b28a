"""Preprocessed training rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kapsi.data.tabular import Preprocessing, TableProblem, TargetScale, Transform
from kapsi.errors import TableError

ENCODING_FOLDS = 5


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """Training rows, preprocessed by statistics of these rows only.

    Args:
        rows: row indices in the problem.
        preprocessing: fitted preprocessing of the features.
        x: inputs, (rows, inputs) float64.
        y: class codes, or standardized targets, (rows,).
        scale: standardization of the target; None in classification.
        weight: weights of the rows, (rows,); None for equal weights.
    """

    rows: npt.NDArray[np.int64]
    preprocessing: Preprocessing
    x: npt.NDArray[np.float64]
    y: npt.NDArray[Any]
    scale: TargetScale | None
    weight: npt.NDArray[np.float64] | None = None

    @classmethod
    def of(
        cls, problem: TableProblem, rows: npt.NDArray[np.int64], seed: int = 0, transform: Transform = "none"
    ) -> TrainingRows:
        """Fit the preprocessing to training rows of a problem; target encodings are fitted without the fold of a row.

        Args:
            problem: features and target.
            rows: indices of the training rows.
            seed: seed of the folds of target encodings.
            transform: transformation of a single real target, `log_link` for losses with this link.
        """
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
                f"{problem.name}: no inputs are left in a part of {len(rows)} rows; give more rows or fewer folds"
            )
        if problem.classes is not None:
            return cls(rows, preprocessing, x, y, None, weight)
        scale = TargetScale.fit(y.astype(np.float64), weight, transform)
        return cls(rows, preprocessing, x, scale.apply(y), scale, weight)
