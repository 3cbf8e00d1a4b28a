"""Rows of estimators: frames of any kind as tables, arrays of numbers, and sparse matrices."""

from __future__ import annotations

import numbers
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
from sklearn.base import BaseEstimator
from sklearn.utils.validation import validate_data

from kapsi.arrays import MAX_DENSE
from kapsi.data.tabular import Column, Preprocessing, Table, table_of
from kapsi.data.tabular.target import informative
from kapsi.data.tabular.types import Floats
from kapsi.errors import DataError, SpecError, shown

__all__ = ["Read", "check_frame", "inputs_of", "read_rows", "seed_of"]

WIDEST_DENSE = MAX_DENSE
"""Largest number of values of sparse rows as an array."""


class Read(NamedTuple):
    """Training rows of an estimator.

    Attributes:
        features: the columns; None for sparse rows.
        sparse: a CSR matrix of rows with too many values for an array, or None.
        notes: columns left out, with reasons.
    """

    features: Table | None
    sparse: Any = None
    notes: tuple[str, ...] = ()


def is_table(X: Any) -> bool:
    """Return whether rows are a frame of named columns: of pandas, polars or pyarrow."""
    frame = (hasattr(X, "iloc") and hasattr(X, "columns")) or hasattr(X, "iter_columns") or hasattr(X, "column_names")
    # A frame of pandas whose columns are all sparse is read as a sparse matrix; one without columns has the accessor, too.
    return frame and not (hasattr(X, "sparse") and X.shape[1])


def read_rows(estimator: BaseEstimator, X: Any, *, keep_sparse: bool) -> Read:
    """Return training rows, and set names and number of the features of an estimator.

    A frame is read by the rules of `kapsi fit`: empty, constant and ID-like columns are left out. All columns of an array are kept.

    Args:
        estimator: the estimator.
        X: a frame, an array of numbers, or a sparse matrix.
        keep_sparse: whether sparse rows stay sparse; otherwise those with at most 2²⁷ values become an array.

    Raises:
        ValueError, TypeError: as scikit-learn's `validate_data`.
        TableError: a column that has no use, or no column that has.
    """
    name = type(estimator).__name__
    if is_table(X):
        X = validate_data(estimator, X, skip_check_array=True)
        table = table_of(_readable(X), name)
        notes = [*table.notes, *table.use(table.columns)]
        features = informative(table, list(table.columns), np.arange(table.rows), notes)
        return Read(features, notes=tuple(notes))
    values = _numbers(estimator, X, reset=True)
    if scipy.sparse.issparse(values):
        if keep_sparse or values.shape[0] * values.shape[1] > WIDEST_DENSE:
            values.data = np.nan_to_num(values.data, nan=0.0)
            return Read(None, values)
        values = values.toarray()
    return Read(Table(name, {f"x{i}": Column("real", column) for i, column in enumerate(values.T)}))


def _numbers(estimator: BaseEstimator, X: Any, *, reset: bool) -> Any:
    """Return an array or a CSR matrix of numbers in float64, after the checks of scikit-learn; NaN is missing."""
    name = type(estimator).__name__
    try:
        return validate_data(
            estimator, X, reset=reset, dtype=np.float64, accept_sparse="csr", ensure_all_finite="allow-nan"
        )
    except ValueError as error:
        text = re.search(r"could not convert string to float: (?:np\.str_\()?('[^']*')", str(error))
        if text is None:
            raise
        raise DataError(
            f"{name}: the array has the text {text[1][:60]}, and arrays hold numbers; give a DataFrame, whose columns of text "
            "become categories, or encode them first, for example by OneHotEncoder"
        ) from None


def check_frame(X: Any, name: str) -> None:
    """Refuse frames with repeated names, without rows or without columns, and dictionaries; other rows are not looked at.

    Raises:
        DataError: such a frame.
    """
    if isinstance(X, Mapping):
        raise DataError(f"{name}: expected a frame, an array or a sparse matrix, got a dictionary; use pd.DataFrame(…)")
    if not is_table(X):
        return
    counts = Counter(X.column_names if hasattr(X, "column_names") else X.columns)
    repeated = next((column for column, count in counts.items() if count > 1), None)
    if repeated is not None:
        raise DataError(f"{name}: {counts[repeated]} columns of the frame are called {repeated!r}; rename the columns")
    if 0 in X.shape:
        missing = "sample(s)" if X.shape[1] else "feature(s)"
        shape = f"(shape={tuple(X.shape)})"
        raise DataError(f"{name}: the frame has 0 {missing} {shape} while a minimum of 1 is required.")


def _readable(X: Any) -> Any:
    """Return a frame whose sparse columns of pandas are dense, and whose categories of intervals and other objects are text."""
    if not hasattr(X, "iloc"):
        return X
    changed = {}
    for column, dtype in X.dtypes.items():
        if hasattr(dtype, "fill_value") and hasattr(dtype, "subtype"):
            changed[column] = X[column].sparse.to_dense()
        elif hasattr(dtype, "categories") and dtype.categories.inferred_type in (
            "interval",
            "period",
            "mixed",
            "tuples",
        ):
            changed[column] = X[column].cat.rename_categories(str)
    return X.assign(**changed) if changed else X


def inputs_of(estimator: BaseEstimator, X: Any, preprocessing: Preprocessing, *, named: bool) -> Floats:
    """Return the encoded inputs of further rows, (rows, m).

    Args:
        estimator: a fitted estimator.
        X: a frame or an array; sparse rows become an array.
        preprocessing: the fitted preprocessing.
        named: whether the estimator was fitted to a frame.

    Raises:
        ValueError, TypeError: as scikit-learn's `validate_data`.
        TableError: a column has other types than in training.
    """
    name = type(estimator).__name__
    check_frame(X, name)
    if named and is_table(X):
        X = validate_data(estimator, X, reset=False, skip_check_array=True)
        values = _plain_numbers(X, preprocessing)
        if values is not None:
            return preprocessing.transform_numbers(values)
        return preprocessing.transform(preprocessing.check(preprocessing.table_of(_readable(X), name))[0])
    values = _numbers(estimator, X, reset=False)
    if scipy.sparse.issparse(values):
        check_dense(name, values)
        values = values.toarray()
    if not named:
        return preprocessing.transform_numbers(values)
    names = getattr(estimator, "feature_names_in_", range(values.shape[1]))
    columns = {str(key): Column("real", column) for key, column in zip(names, values.T, strict=True)}
    return preprocessing.transform(preprocessing.check(Table(name, columns))[0])


def _plain_numbers(X: Any, preprocessing: Preprocessing) -> Floats | None:
    """Return the columns of a pandas frame of plain numbers without infinities, for a model of numbers; None for others.

    Ten times as fast for one row as the types of Arrow.
    """
    if not (preprocessing.all_numbers and hasattr(X, "iloc")):
        return None
    if not all(isinstance(dtype, np.dtype) and dtype.kind in "biuf" for dtype in X.dtypes):
        return None
    places = {str(name): i for i, name in enumerate(X.columns)}
    values = np.asarray(X.to_numpy(), dtype=np.float64)[:, [places[column.name] for column in preprocessing.columns]]
    return None if np.isinf(values).any() else values


def sparse_rows(estimator: BaseEstimator, X: Any) -> Any:
    """Return further rows as a CSR matrix, after the checks of scikit-learn; NaN counts as 0."""
    rows = scipy.sparse.csr_matrix(_numbers(estimator, X, reset=False))
    rows.data = np.nan_to_num(rows.data, nan=0.0)
    return rows


def check_dense(name: str, rows: Any, remedy: str = "give fewer rows at a time") -> None:
    """Raise a `DataError` if sparse rows are too large for an array."""
    count = rows.shape[0] * rows.shape[1]
    if count > WIDEST_DENSE:
        raise DataError(
            f"{name}: the sparse rows have {rows.shape[0]:,} × {rows.shape[1]:,} values, more than {WIDEST_DENSE:,}, and the "
            f"model takes no sparse rows; {remedy}"
        )


def seed_of(random_state: Any) -> int:
    """Return the seed of a `random_state`; None draws one from the operating system, and leaves NumPy's global state alone.

    Raises:
        SpecError: neither an integer from 0 to 2³² − 1, nor None, nor a `RandomState`.
    """
    if random_state is None:
        return int(np.random.SeedSequence().generate_state(1)[0])
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**31 - 1))
    whole = isinstance(random_state, numbers.Integral) and not isinstance(random_state, bool)
    if whole and 0 <= int(random_state) < 2**32:
        return int(random_state)
    raise SpecError(
        f"random_state: expected an integer from 0 to 2**32 − 1, None or a RandomState, got {shown(random_state)}"
    )


class SparseScale(NamedTuple):
    """Scale of the columns of sparse rows: the root mean square of each, 1 for columns of zeros; nothing is shifted.

    Attributes:
        scale: (columns,).
    """

    scale: Floats

    @classmethod
    def fit(cls, rows: Any, weight: Floats | None) -> SparseScale:
        """Fit the scale to the rows of a CSR matrix."""
        share = np.full(rows.shape[0], 1 / rows.shape[0]) if weight is None else weight / weight.sum()
        squares = rows.multiply(rows).T @ share
        return cls(np.where(squares > 0, np.sqrt(squares), 1.0))

    def apply(self, rows: Any) -> Any:
        """Return scaled rows, CSR in float64."""
        return scipy.sparse.csr_matrix(rows.multiply(1 / self.scale))
