"""Training data as rows: tensors, arrays, sparse matrices, data sets, loaders, and tables larger than memory."""

from __future__ import annotations

from typing import Any, TypeAlias

from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from kapsi.errors import DataError
from kapsi.training.rows.base import Batch, ClassWeights, Rows
from kapsi.training.rows.parquet import ParquetRows
from kapsi.training.rows.stored import StoredRows
from kapsi.training.rows.streamed import DatasetRows, IterableRows, LoaderRows

__all__ = ["Batch", "ClassWeights", "Data", "ParquetRows", "Rows", "make_rows"]

Data: TypeAlias = "tuple[Any, Any] | tuple[Any, Any, Any] | Dataset[Any] | DataLoader[Any] | Rows"
"""Kinds of data accepted by `make_rows`."""


def make_rows(data: Data, *, where: str = "fit") -> Rows:
    """Return data as rows; data in memory are not copied, all others are read on demand.

    - `(x, y)` or `(x, y, weight)`: tensors (x may be `torch.sparse_csr`), NumPy arrays (memory maps are never copied whole), data
      frames or columns of pandas, polars or pyarrow, or a SciPy matrix as x. Each epoch shuffles all rows.
    - A `Dataset` with random access: shuffled as well, read item by item. A `TensorDataset` stands for its tensors.
    - An `IterableDataset`: rows in the order of the stream.
    - A `DataLoader`: batches and order of the loader; the solver's batch size has no effect.
    - `ParquetRows`: a table larger than memory.

    With several processes, every process gets a part of each batch. All processes read the whole stream: rows must be equal.

    Args:
        data: data of one of these kinds, with items and batches (x, y) or (x, y, weight).
        where: prefix of error messages.

    Raises:
        DataError: an unsupported kind of data, or no rows.

    Example:
        >>> import torch
        >>> rows = make_rows((torch.randn(5, 2), torch.arange(5)))
        >>> rows.count, rows.in_features, rows.classes
        (5, 2, True)
    """
    if isinstance(data, Rows):
        return data
    if isinstance(data, DataLoader):
        return LoaderRows(data, where=where)
    if isinstance(data, TensorDataset) and len(data.tensors) in (2, 3):
        return StoredRows(*data.tensors, where=where)
    if isinstance(data, IterableDataset):
        return IterableRows(data, where=where)
    if isinstance(data, Dataset):
        return DatasetRows(data, where=where)
    if isinstance(data, tuple | list) and len(data) in (2, 3):
        return StoredRows(*data, where=where)
    given = type(data).__name__ + (f" of {len(data)}" if isinstance(data, tuple | list) else "")
    raise DataError(
        f"{where}: expected inputs and targets as a pair of tensors or arrays, (x, y) or (x, y, weight), or a data set, a "
        f"DataLoader or ParquetRows; got a {given}"
    )
