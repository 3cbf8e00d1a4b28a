"""The transformer: rows in, the columns of an expansion out."""

from __future__ import annotations

from collections import Counter
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import scipy.sparse
import torch
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils import Tags
from sklearn.utils.validation import _check_feature_names_in, check_consistent_length, check_is_fitted, validate_data

from kapsi.calibrate import calibrate
from kapsi.errors import DataError
from kapsi.estimators.rows import check_dense, seed_of
from kapsi.expansion import Expansion
from kapsi.function import coerce
from kapsi.modules import ExpansionModule

__all__ = ["ExpansionTransformer"]

BLOCK = 2**24
"""Elements of κ(x) computed at a time."""


class ExpansionTransformer(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Transformer by an expansion: each row x becomes κ(x), for every κ of the catalogue.

    `fit` calibrates κ to the rows: grids, centers, principal components; densities by class if y has class labels. Inputs are
    numbers, and an expansion with a domain, such as Chebyshev polynomials on [−1, 1], needs scaled ones.

    Args:
        expansion: κ: a name, a mapping with a kind, or an `Expansion`.
        sparse_output: return CSR matrices, for expansions with few values other than 0, such as splines and indicators.
        random_state: seed of random expansions, 0 to 2³² − 1; a `RandomState`; None for another seed in each fit.

    Attributes:
        module_: the calibrated `kapsi.ExpansionModule`, in float64.
        n_features_in_: number of inputs.
        feature_names_in_: names of the inputs, if the rows of the fit have some.

    Example:
        >>> import kapsi as kp, numpy as np
        >>> squares = kp.ExpansionTransformer(kp.Taylor(2, symmetric=True)).fit([[1.0, 2.0], [3.0, 4.0]])
        >>> squares.get_feature_names_out(["a", "b"]).tolist()
        ['a', 'b', 'a^2', 'a*b', 'b^2']
        >>> kp.ExpansionTransformer("chebyshev").fit_transform([[0.5]])
        array([[ 0.5, -0.5, -1. ]])
    """

    def __init__(self, expansion: Any = "taylor", *, sparse_output: bool = False, random_state: Any = 0) -> None:
        self.expansion = expansion
        self.sparse_output = sparse_output
        self.random_state = random_state

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def fit(self, X: Any, y: Any = None) -> Self:
        """Calibrate the expansion to rows.

        Args:
            X: numbers, `(rows, m)`: a frame, an array or a sparse matrix.
            y: class labels or targets of the rows, for densities by class; None for none.

        Returns:
            The transformer.

        Raises:
            KapsiError: an unknown expansion, or one that does not suit the rows; a `ValueError`.
        """
        kappa: Expansion = coerce(Expansion, self.expansion, "expansion")
        rows = self._numbers(X, reset=True)
        module = ExpansionModule(rows.shape[1], kappa, seed=seed_of(self.random_state), dtype=torch.float64)
        if list(module.kappa.state_dict()):
            if scipy.sparse.issparse(rows):
                check_dense(type(self).__name__, rows)
                rows = rows.toarray()
            labels = None if y is None else _labels(X, y)
            calibrate(module, torch.from_numpy(np.ascontiguousarray(rows, dtype=np.float64)), labels)
        self.module_ = module.eval()
        self._n_features_out = module.out_features
        return self

    def transform(self, X: Any) -> Any:
        """Return κ(x) of each row, `(rows, D)`, in the type of the rows; a CSR matrix with `sparse_output`.

        Args:
            X: numbers, `(rows, m)`.

        Raises:
            DataError: too many values for an array.
        """
        check_is_fitted(self)
        rows = self._numbers(X, reset=False)
        count, columns = rows.shape[0], self._n_features_out
        size = max(1, BLOCK // max(columns, rows.shape[1]))
        blocks = [self._block(rows[begin : begin + size]) for begin in range(0, count, size)]
        if self.sparse_output:
            return scipy.sparse.vstack([scipy.sparse.csr_matrix(block) for block in blocks], format="csr")
        return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)

    def _block(self, rows: Any) -> npt.NDArray[Any]:
        dense = rows.toarray() if scipy.sparse.issparse(rows) else rows
        with torch.inference_mode():
            values = self.module_(torch.from_numpy(np.ascontiguousarray(dense, dtype=np.float64)))
        return np.asarray(values.numpy(), dtype=dense.dtype)

    def get_feature_names_out(self, input_features: Any = None) -> npt.NDArray[np.object_]:
        """Return the names of the columns, such as `x1*x2`, `x1^2`, `T3(age)`; equal ones are numbered.

        Args:
            input_features: names of the inputs, by default those of the fit, or `x0`, `x1`, ….
        """
        check_is_fitted(self)
        names = [str(name) for name in _check_feature_names_in(self, input_features)]
        columns = self.module_.expansion.column_names(names, self.module_.kappa.ready())
        seen: Counter[str] = Counter()
        unique = []
        for column in columns:
            seen[column] += 1
            unique.append(column if seen[column] == 1 else f"{column} ({seen[column]})")
        return np.array(unique, dtype=object)

    def _numbers(self, X: Any, *, reset: bool) -> Any:
        """Return rows in float64 or float32 after the checks of scikit-learn."""
        return validate_data(self, X, reset=reset, dtype=[np.float64, np.float32], accept_sparse="csr")


def _labels(X: Any, y: Any) -> torch.Tensor:
    """Return targets as a tensor, class labels other than numbers as codes."""
    check_consistent_length(X, y)
    values = np.asarray(y)
    if values.dtype.kind not in "biuf":
        values = np.unique(values.astype(str), return_inverse=True)[1]
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise DataError("ExpansionTransformer: y has values that are not finite")
    return torch.from_numpy(np.ascontiguousarray(values))
