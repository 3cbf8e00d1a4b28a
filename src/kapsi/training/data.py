"""The rows that a model is trained on: tensors, arrays, sparse matrices, data sets, loaders, and tables larger than memory."""

from __future__ import annotations

from typing import Any, TypeAlias

from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from kapsi.errors import SpecError
from kapsi.training.rows.base import Batch, ClassWeights, Rows
from kapsi.training.rows.parquet import ParquetRows
from kapsi.training.rows.stored import StoredRows
from kapsi.training.rows.streamed import DatasetRows, IterableRows, LoaderRows

__all__ = ["Batch", "ClassWeights", "Data", "ParquetRows", "Rows", "make_rows"]

Data: TypeAlias = "tuple[Any, Any] | tuple[Any, Any, Any] | Dataset[Any] | DataLoader[Any] | Rows"
"""What `make_rows` takes."""


def make_rows(data: Data, *, where: str = "fit") -> Rows:
    """Return data as rows: what is in memory stays where it is, and everything else is read as it is needed.

    - `(x, y)` or `(x, y, weight)`: tensors (x may be `torch.sparse_csr`), NumPy arrays (memory maps are never copied whole), and
      for x a SciPy matrix. Batches are drawn anew from all rows in each epoch.
    - A `Dataset` whose rows have numbers: the same order, item by item. A `TensorDataset` is its tensors.
    - An `IterableDataset`: rows in its own order.
    - A `DataLoader`: its batches as they are, in the order of its sampler; a batch size given elsewhere does not count.
    - `ParquetRows`: a table larger than memory.

    With several processes each gets its part of each batch. A stream is read by all of them and must be the same in each.

    Args:
        data: one of these; items and batches are (x, y) or (x, y, weight).
        where: begins the messages of errors.

    Raises:
        SpecError: it is something else, or empty.

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
    raise SpecError(
        f"{where}: expected inputs and targets as a pair of tensors or arrays, (x, y) or (x, y, weight), or a data set, a "
        f"DataLoader or ParquetRows; got a {given}"
    )
