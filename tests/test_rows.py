"""Rows to train on: orders, parts, weights, checks, and what is refused, for each kind of data."""

from __future__ import annotations

import json
import math
import os
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse as sp
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

import kapsi as kp
from kapsi.errors import DataError, SpecError, TableError
from kapsi.training.data import ParquetRows, make_rows
from kapsi.training.rows import parquet, stored, streamed
from kapsi.training.rows.base import mix_seed

COUNT = 103
FLOAT = torch.float32


def table(count=COUNT, columns=3, dtype=torch.float32):
    """Inputs whose first column is the number of the row, and class numbers."""
    x = torch.randn(count, columns, generator=torch.Generator().manual_seed(0), dtype=dtype)
    x[:, 0] = torch.arange(count)
    return x, torch.arange(count) % 3


class Items(Dataset):
    def __init__(self, *columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns[0])

    def __getitem__(self, number):
        return tuple(column[number] for column in self.columns)


class Stream(IterableDataset):
    def __init__(self, *columns):
        self.columns = columns

    def __iter__(self):
        return iter(zip(*self.columns, strict=True))


def mapped(folder, name, values):
    array = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", values.dtype, values.shape)
    array[:] = values
    array.flush()
    return np.load(folder / f"{name}.npy", mmap_mode="r")


def written(folder, x, y, weight=None, group=7, files=2):
    """Write a table in several files, with small row groups."""
    folder.mkdir(exist_ok=True)
    columns = {f"x{i}": np.asarray(x[:, i]) for i in range(x.shape[1])}
    columns |= {"y": np.asarray(y)} | ({} if weight is None else {"w": np.asarray(weight)})
    whole = pa.table(columns)
    cut = -(-len(y) // files)
    for i in range(files):
        pq.write_table(whole.slice(i * cut, cut), folder / f"part-{i}.parquet", row_group_size=group)
    return folder


KINDS = ("tensors", "arrays", "csr", "scipy", "memmap", "dataset", "stream", "loader", "parquet")
SHUFFLED = ("tensors", "arrays", "csr", "scipy", "memmap", "dataset", "parquet")


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Return a function that makes rows of a kind from the same numbers."""
    monkeypatch.setattr(parquet, "BUFFER_BYTES", 20 * 20)  # 20 rows of 3 inputs, target and weight

    def made(kind, x=None, y=None, weight=None):
        if x is None:
            x, y = table()
        own = () if weight is None else (weight,)
        if kind == "parquet":
            return ParquetRows(
                written(tmp_path / "table", x, y, weight), target="y", weight=None if weight is None else "w"
            )
        if kind == "loader":
            return make_rows(DataLoader(TensorDataset(x, y, *own), batch_size=10, shuffle=True))
        if kind == "memmap":
            arrays = [mapped(tmp_path, name, part.numpy()) for name, part in zip("xyw", (x, y, *own), strict=False)]
            return make_rows(tuple(arrays))
        return make_rows(
            {
                "tensors": lambda: (x, y, *own),
                "arrays": lambda: tuple(part.numpy() for part in (x, y, *own)),
                "csr": lambda: (x.to_sparse_csr(), y, *own),
                "scipy": lambda: (sp.coo_array(x.numpy()), y, *own),
                "dataset": lambda: Items(x, y, *own),
                "stream": lambda: Stream(x, y, *own),
            }[kind]()
        )

    return made


def bound(rows, loss="cross_entropy", outputs=3, dtype=FLOAT, class_weights=None, in_features=3):
    return rows.bind(
        kp.from_dict(loss, kp.Loss),
        in_features=in_features,
        outputs=outputs,
        dtype=dtype,
        class_weights=class_weights,
        where="fit",
    )


def dense(x):
    return x.to_dense() if x.layout == torch.sparse_csr else x


def numbers(batches):
    """Return the numbers of the rows of each batch."""
    return [dense(batch.x)[:, 0].long().tolist() for batch in batches]


def flat(parts):
    return [number for part in parts for number in part]


# ------------------------------------------------------------------------------------------------ order


@pytest.mark.parametrize("kind", KINDS)
def test_each_epoch_has_each_row_once_with_its_own_target(make, kind) -> None:
    rows = bound(make(kind))
    x, y = table()
    orders = []
    for epoch in (1, 2):
        batches = list(rows.batches(10, seed=5, epoch=epoch))
        assert {len(batch.y) for batch in batches[:-1]} == {10}
        assert all(batch.count == len(batch.y) == len(batch.x) for batch in batches)
        order = flat(numbers(batches))
        assert sorted(order) == list(range(COUNT))
        assert torch.equal(torch.cat([dense(batch.x) for batch in batches]), x[order])
        assert torch.equal(torch.cat([batch.y for batch in batches]), y[order])
        orders.append(order)
    again = flat(numbers(rows.batches(10, seed=5, epoch=2)))
    assert again == orders[1]
    if kind == "stream":
        assert orders[0] == orders[1] == list(range(COUNT))
        return
    other = flat(numbers(rows.batches(10, seed=6, epoch=2)))
    assert len({tuple(order) for order in (*orders, other, range(COUNT))}) == 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", [0, 3, 10, 11])
def test_a_later_start_gives_exactly_the_rest(make, kind, start) -> None:
    rows = bound(make(kind))
    whole = numbers(rows.batches(10, seed=1, epoch=4))
    assert numbers(rows.batches(10, seed=1, epoch=4, start=start)) == whole[start:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 4, 102, 103, None])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_parts_of_all_processes_are_the_batch_of_one(make, kind, size, ranks) -> None:
    rows = bound(make(kind))
    whole = list(rows.batches(size, seed=1, epoch=1))
    parts = [list(rows.batches(size, seed=1, epoch=1, rank=rank, ranks=ranks)) for rank in range(ranks)]
    assert {len(part) for part in parts} == {len(whole)}
    if rows.length(size) is not None:
        assert rows.length(size) == len(whole)
    for batch, *own in zip(whole, *parts, strict=True):
        assert flat(numbers(own)) == numbers([batch])[0]
        assert {part.count for part in own} == {batch.count} == {len(batch.y)}
        sizes = [len(part.y) for part in own]
        assert max(sizes) - min(sizes) <= 1
        assert all(part.x.shape == (n, 3) for part, n in zip(own, sizes, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_are_all_rows_in_their_own_order(make, kind) -> None:
    rows = bound(make(kind))
    one = list(rows.chunks(8))
    assert all(batch.count == len(batch.y) <= 8 for batch in one)
    order = flat(numbers(one))
    assert order == list(range(COUNT)) or kind == "loader"
    assert numbers(rows.chunks(8)) == numbers(one)
    shared = [flat(numbers(rows.chunks(8, rank=rank, ranks=2))) for rank in range(2)]
    assert sorted(flat(shared)) == list(range(COUNT))
    if kind in SHUFFLED:
        assert flat(shared) == order


@pytest.mark.parametrize("kind", SHUFFLED)
def test_513_rows_on_two_processes_are_513(make, kind) -> None:
    rows = bound(make(kind, *table(513)))
    found = [sum(batch.count for batch in rows.chunks(100, rank=rank, ranks=2)) for rank in range(2)]
    assert found == [257, 256]
    assert rows.count == 513


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "loader"])
def test_a_single_row_at_the_end_joins_the_batch_before(make, kind) -> None:
    rows = bound(make(kind, *table(41)))
    assert [batch.count for batch in rows.batches(10, seed=0, epoch=1)] == [10, 10, 10, 11]
    assert [batch.count for batch in rows.batches(20, seed=0, epoch=1)] == [20, 21]
    assert [batch.count for batch in rows.batches(40, seed=0, epoch=1)] == [41]
    assert [batch.count for batch in rows.batches(1, seed=0, epoch=1)] == [1] * 41
    assert [batch.count for batch in rows.batches(13, seed=0, epoch=1)] == [13, 13, 13, 2]


def test_batches_of_all_rows_are_the_tensors_themselves() -> None:
    x, y = table()
    rows = bound(make_rows((x, y)))
    (batch,) = rows.batches(None, seed=0, epoch=1)
    (chunk,) = rows.chunks(10**9)
    for found in (batch, chunk):
        assert found.x.data_ptr() == x.data_ptr()
        assert found.y.data_ptr() == y.data_ptr()


@pytest.mark.parametrize("count", [1, 2, 3, 64, 65, 1000])
def test_a_computed_order_is_a_permutation(monkeypatch, count) -> None:
    monkeypatch.setattr(stored, "PERMUTED_AT_ONCE", 0)
    monkeypatch.setattr(stored, "ORDERED_AT_ONCE", 16)
    order = stored.shuffled(count, seed=3)
    whole = torch.cat([order(i, min(i + 7, count)) for i in range(0, count, 7)])
    assert whole.sort().values.tolist() == list(range(count))
    assert torch.equal(order(0, count), whole)
    assert torch.equal(order(count, count), whole[:0])
    if count == 1000:
        assert not torch.equal(stored.shuffled(count, seed=4)(0, count), whole)
        # Neighbors, and what was before, say nothing about each other: rank correlations of a random order are near 0.03.
        ranks = torch.stack([whole, whole.roll(1), torch.arange(count)]).double()
        assert (torch.corrcoef(ranks) - torch.eye(3)).abs().max() < 0.15


def test_seeds_of_neighbors_are_all_different() -> None:
    assert len({mix_seed(seed, epoch) for seed in range(50) for epoch in range(50)}) == 2500


def test_rows_of_a_table_are_shuffled_across_groups_within_a_buffer(make) -> None:
    rows = make("parquet", *table(112))
    order = flat(numbers(rows.batches(10, seed=0, epoch=1)))
    for i in range(0, 112, 14):  # two groups of 7 rows fit into a buffer of 20
        buffer = order[i : i + 14]
        groups = {number // 7 for number in buffer}
        assert len(groups) == 2
        assert max(groups) - min(groups) > 1 or i
        assert buffer != sorted(buffer)


def test_a_group_larger_than_the_buffer_is_taken_in_parts(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(parquet, "BUFFER_BYTES", 20 * 20)
    monkeypatch.setattr(parquet, "PIECE_NUMBERS", 1)
    rows = ParquetRows(written(tmp_path / "t", *table(3000), group=10_000, files=1), target="y")
    read = []
    before = ParquetRows._records
    monkeypatch.setattr(
        ParquetRows, "_records", lambda self, span, *rest: read.append(span) or before(self, span, *rest)
    )
    for start in (0, 7, 200):  # read once, whatever the number of parts
        assert sum(len(batch.y) for batch in rows.batches(10, seed=0, epoch=1, start=start)) == 3000 - 10 * start
        assert len(read) == 1
        read.clear()
    order = flat(numbers(rows.batches(10, seed=0, epoch=1)))
    assert sorted(order) == list(range(3000))
    assert sorted(order[:20]) == list(range(20))
    assert order[:20] != list(range(20))


def test_groups_before_the_start_are_not_read(make, monkeypatch) -> None:
    rows = bound(make("parquet"))
    read = []
    before = ParquetRows._records
    monkeypatch.setattr(
        ParquetRows, "_records", lambda self, span, *rest: read.append(span) or before(self, span, *rest)
    )
    whole = numbers(rows.batches(10, seed=0, epoch=1))
    assert sum(span.rows for span in read) == COUNT
    read.clear()
    assert numbers(rows.batches(10, seed=0, epoch=1, start=8)) == whole[8:]
    assert sum(span.rows for span in read) <= 23 + 20
    read.clear()
    list(rows.chunks(10, rank=1, ranks=2))
    assert sum(span.rows for span in read) == 51


# ------------------------------------------------------------------------------------------------ weights

WEIGHT = torch.rand(COUNT, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1


def weights_of(rows):
    """Return the weights, row by row."""
    batches = list(rows.batches(10, seed=0, epoch=1))
    order = torch.tensor(flat(numbers(batches)))
    found = torch.cat([batch.weight for batch in batches])
    return found[order.argsort()].double()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("classes", [None, "balanced", (1.0, 0.0, 4.0)])
def test_weights_have_mean_one(make, kind, classes) -> None:
    x, y = table()
    y = (torch.arange(COUNT) % 5 > 2).long() + (torch.arange(COUNT) % 7 == 0).long()
    rows = bound(make(kind, x, y, WEIGHT), class_weights=classes)
    expected = WEIGHT.clone()
    counts = torch.bincount(y)
    if classes == "balanced":
        expected = expected * (COUNT / (3 * counts))[y]
    elif classes:
        expected = expected * torch.tensor(classes, dtype=torch.float64)[y]
    torch.testing.assert_close(weights_of(rows), expected / expected.mean(), rtol=1e-6, atol=0)
    assert rows.count == COUNT
    chunks = list(rows.chunks(9))
    assert sum(float(c.weight.sum()) for c in chunks) == pytest.approx(COUNT, rel=1e-6)
    assert {c.weight.dtype for c in chunks} == {FLOAT}


@pytest.mark.parametrize("kind", KINDS)
def test_balanced_classes_count_the_same(make, kind) -> None:
    x, _ = table()
    y = (torch.arange(COUNT) < 10).long()
    rows = bound(make(kind, x, y), class_weights="balanced")  # the third class has no rows
    found = weights_of(rows)
    assert float(found[y == 0].sum()) == pytest.approx(float(found[y == 1].sum()), rel=1e-6)
    assert float(found.mean()) == pytest.approx(1, rel=1e-6)


def test_equal_weights_become_none() -> None:
    rows = bound(make_rows((*table(), torch.full((COUNT,), 0.3))))
    assert next(iter(rows.chunks(5))).weight is None
    assert next(iter(bound(make_rows(table())).chunks(5))).weight is None


def test_huge_weights_do_not_overflow() -> None:
    rows = bound(make_rows((*table(), WEIGHT * 1e300)), dtype=torch.float32)
    torch.testing.assert_close(weights_of(rows), WEIGHT / WEIGHT.mean(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("value", "said"), [(-1.0, "row .*is -1.0"), (math.nan, "is nan"), (math.inf, "is inf")])
def test_invalid_weights(make, kind, value, said) -> None:
    weight = WEIGHT.clone()
    weight[17] = value
    with pytest.raises(DataError, match=f"fit: weights must be finite and at least 0; the weight of .*{said}"):
        bound(make(kind, *table(), weight))
    with pytest.raises(DataError, match="fit: the weights are 0 for all rows"):
        bound(make(kind, *table(), torch.zeros(COUNT)))


@pytest.mark.parametrize(
    ("loss", "weights", "said"),
    [
        ("mse", "balanced", "class_weights are for losses of classes, the loss is mse"),
        ("bernoulli", (1.0, 2.0), "class_weights are for losses of classes, the loss is bernoulli"),
        ("cross_entropy", (1.0, 2.0), "class_weights has 2 weights for 3 classes"),
    ],
)
def test_wrong_class_weights(loss, weights, said) -> None:
    with pytest.raises(SpecError, match=said):
        bound(make_rows(table()), loss, class_weights=weights)


def test_weights_of_a_wrong_shape() -> None:
    x, y = table()
    for weight in (torch.ones(COUNT, 1), torch.ones(COUNT - 1), torch.tensor(1.0)):
        with pytest.raises(DataError, match="expected one weight per row"):
            make_rows((x, y, weight))
    with pytest.raises(DataError, match="expected one weight per row"):
        bound(make_rows(Items(x, y, torch.ones(COUNT, 2))))


# ------------------------------------------------------------------------------------------------ types and checks

X, Y = table()
Z = torch.randn(COUNT, 2, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("x", "y", "loss", "said"),
    [
        (X.double() * 1e300, Z, "mse", "the inputs of row 0 .* exceed the range of torch.float32; scale them"),
        (X, Z.double() * 1e300, "mse", "the targets of row 0 .* exceed the range of torch.float32; scale them"),
        (X[:, :2], Z, "mse", r"the model has 3 inputs, got x of shape \(103, 2\)"),
        (X, Z[:, 0], "mse", r"the model has 2 outputs, .* got targets of shape \(103,\)"),
        (X, Z.T.reshape(COUNT, 1, 2), "mse", "the model has 2 outputs"),
        (X, Y, "mse", "the model has 2 outputs, and mse needs targets of shape .rows, 2.; got targets of shape"),
        (
            X,
            Z[:, 0],
            "cross_entropy",
            r"cross_entropy needs integer class labels of shape \(rows,\), got torch.float32",
        ),
        (
            X,
            torch.stack([Y, Y], 1),
            "cross_entropy",
            r"integer class labels of shape \(rows,\), got torch.int64 of shape \(103, 2\)",
        ),
        (X, Y, "cross_entropy", r"class labels are integers from 0 to 1 \(int64\), .*from 0 to 2"),
        (X, Y - 1, "cross_entropy", "class labels are integers from 0 to 1"),
        (X.index_fill(0, torch.tensor(7), math.inf), Z, "mse", r"must be finite; the inputs of row 7 \(counted"),
        (X, Z.index_fill(0, torch.tensor(9), math.nan), "mse", r"must be finite; the targets of row 9 \(counted"),
    ],
)
@pytest.mark.parametrize("way", ["tensors", "set"])
def test_rows_without_a_fit_to_the_model(x, y, loss, said, way) -> None:
    rows = make_rows((x, y) if way == "tensors" else Items(x, y))
    said = said.replace("(103, 2)", r"(\d+, 2)").replace("103", r"\d+") if way == "set" else said
    with pytest.raises(kp.KapsiError, match=f"fit: .*{said}"):
        list(bound(rows, loss, outputs=2).chunks(50))


@pytest.mark.parametrize("kind", KINDS)
def test_non_finite_rows_are_named(make, kind) -> None:
    x, _ = table()
    x[31, 2] = math.nan
    with pytest.raises(DataError, match="inputs and targets must be finite; the inputs of row") as error:
        list(bound(make(kind, x, x[:, 1].clone()), "mse", outputs=1).batches(10, seed=0, epoch=1))
    named = {"parquet": "row 3 of row group 4 of ", "loader": " of batch "}.get(kind, r"row 31 (counted from 0)")
    assert named in str(error.value)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("tensors", "csr", "loader")])
def test_class_numbers_above_the_outputs(make, kind) -> None:
    x, y = table()
    y = y.clone()
    y[50] = 3
    with pytest.raises(kp.KapsiError, match="class labels are integers from 0 to 2"):
        list(bound(make(kind, x, y)).batches(10, seed=0, epoch=1))


def test_large_finite_numbers_are_finite() -> None:
    x = torch.full((5, 3), 3e38)
    bound(make_rows((x, torch.zeros(5))), "mse", outputs=1)
    bound(make_rows((torch.zeros(5, 3), torch.zeros(5))), "mse", outputs=1)


@pytest.mark.parametrize(
    "kind", [np.float64, np.float16, np.longdouble, np.int8, np.uint8, np.uint16, np.uint64, bool, ">f8"]
)
def test_arrays_become_numbers_of_the_model(kind) -> None:
    values = np.arange(12).reshape(4, 3)
    x = (values % 2 if kind is bool else values).astype(kind)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        rows = bound(make_rows((x, x[:, :1])), "mse", outputs=1, dtype=dtype)
        (batch,) = rows.chunks(9)
        assert batch.x.dtype == batch.y.dtype == dtype
        assert batch.x.double().tolist() == x.astype(float).tolist()
    if np.dtype(kind).kind in "biu":
        rows = make_rows((x, x[:, 0]))
        assert rows.classes
        (batch,) = bound(rows, outputs=10).chunks(9)
        assert batch.y.dtype == torch.int64
        assert batch.y.tolist() == x[:, 0].astype(int).tolist()


def test_views_of_arrays_and_arrays_that_may_not_be_written() -> None:
    x = np.arange(24.0).reshape(8, 3)
    x.setflags(write=False)
    for view in (x, x[::-1], x[:, ::-1], np.asfortranarray(x), np.broadcast_to(x[0], x.shape)):
        (batch,) = bound(make_rows((view, view[:, 0])), "mse", outputs=1).chunks(9)
        assert batch.x.tolist() == view.tolist()


def test_data_in_memory_are_neither_copied_nor_changed() -> None:
    x = np.random.default_rng(0).random((50, 3), dtype=np.float32)
    before = x.copy()
    rows = bound(make_rows((x, x[:, 0])), "mse", outputs=1)
    assert next(iter(rows.chunks(50))).x.data_ptr() == x.ctypes.data
    list(rows.batches(7, seed=0, epoch=1))
    assert np.array_equal(x, before)
    assert rows.in_memory


def test_a_memory_map_is_never_copied_whole(make, monkeypatch) -> None:
    rows = make("memmap")
    assert not rows.in_memory
    most = 0
    before = stored.as_tensor

    def watched(array, *rest):
        nonlocal most
        most = max(most, len(array) if array.ndim > 1 else 0)
        return before(array, *rest)

    monkeypatch.setattr(stored, "as_tensor", watched)
    kept, held = rows.divide(0.3, 0)
    for part in (kept, held):
        list(bound(part).batches(10, seed=0, epoch=1))
    assert 0 < most <= 64


def test_gradients_do_not_go_into_the_data() -> None:
    x = torch.randn(6, 3, requires_grad=True)
    batch = next(iter(bound(make_rows((x, x[:, 0])), "mse", outputs=1).batches(3, seed=0, epoch=1)))
    assert not batch.x.requires_grad
    assert not batch.y.requires_grad


@pytest.mark.parametrize("loss", ["bernoulli", "mse", "huber"])
def test_whole_numbers_of_arrays_are_numbers_where_the_loss_wants_some(loss, tmp_path) -> None:
    x, y = table()
    y = y % 2
    for rows in (make_rows((x.numpy(), y.numpy())), ParquetRows(written(tmp_path / loss, x, y), target="y")):
        assert rows.classes
        batch = next(iter(bound(rows, loss, outputs=1).chunks(9)))
        assert batch.y.dtype == FLOAT
    assert next(iter(bound(make_rows((x, y)), "bernoulli", outputs=1).chunks(9))).y.dtype == FLOAT


def test_images_stay_images() -> None:
    x = torch.randn(9, 2, 4, 4)
    rows = bound(make_rows((x, torch.arange(9) % 2)), outputs=2, in_features=None)
    assert next(iter(rows.batches(4, seed=0, epoch=1))).x.shape == (4, 2, 4, 4)


def test_a_model_that_does_not_say_its_sizes() -> None:
    for loss, y in (("mse", Z), ("gaussian", Z), ("cross_entropy", Y), ("hinge", Y)):
        bound(make_rows((X, y)), loss, outputs=None, in_features=None)
    with pytest.raises(kp.KapsiError, match="needs integer class labels"):
        bound(make_rows((X, Z)), "cross_entropy", outputs=None, in_features=None)
    with pytest.raises(kp.KapsiError, match="class labels are integers"):
        bound(make_rows((X, Y - 1)), "cross_entropy", outputs=None, in_features=None)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ((X, Y[:10]), r"103 rows of inputs and \(10,\) of targets"),
        ((X[:0], Y[:0]), r"at least one row, got \(0, 3\)"),
        ((X[0], Y[0]), r"expected inputs of shape \(rows, m\)"),
        ((X, torch.tensor(1.0)), r"103 rows of inputs and \(\) of targets"),
        ((X.to(torch.complex64), Y), "expected real numbers as inputs, got torch.complex64"),
        ((X, Z.to(torch.complex64)), "expected real numbers as targets, got torch.complex64"),
        ((X.to_sparse(), Y), r"expected dense inputs, got torch.sparse_coo; use to_dense\(\), some rows at a time"),
        ((X, Z.to_sparse()), r"expected dense targets, got torch.sparse_coo; use to_dense\(\)"),
        ((X, Z.to_sparse_csr()), "expected dense targets, got torch.sparse_csr"),
        ((X, sp.csr_array(Z.numpy())), "expected dense targets, got a sparse matrix"),
        ((X.tolist(), Y), "the inputs are of type list, expected a tensor, an array or a data frame; use torch.tensor"),
        ((X, Y.tolist()), "the targets are of type list"),
        ((X, Y, Y.tolist()), "the weights are of type list"),
        ((X.numpy().astype(object), Y), "numbers as inputs, got an array of object"),
        ((X.numpy().astype(str), Y), "expected numbers as inputs"),
        ((np.ma.masked_array(X.numpy()), Y), "masked array"),
        ((X, np.full(COUNT, 2**64 - 1, dtype=np.uint64)), "integers above"),
        ((X,), "a pair of tensors or arrays, .*got a tuple of 1"),
        ((X, Y, Y, Y), "got a tuple of 4"),
        (X, "got a Tensor"),
        ({"x": X, "y": Y}, "got a dict"),
        (None, "got a NoneType"),
        (Items(X[:0], Y[:0]), "the data set Items has no rows"),
        (Items(X), "expected tuples (x, y) or (x, y, weight) from the data set Items, got a tuple of 1"),
        (Items(X[:, 0], Y), r"the data set Items gives inputs of shape \(\)"),
        (Items(X.to(torch.complex64), Y), "expected real numbers as inputs, got torch.complex64"),
        (Stream(X[:0], Y[:0]), "the data set Stream has no rows"),
        (Stream(X), "from the data set Stream, got a tuple of 1"),
        (DataLoader(Items(X), batch_size=4), "from the loader, got a list of 1"),
        (DataLoader([{"x": 1.0}] * 5, batch_size=4), "from the loader, got a dict"),
        (DataLoader(Items(X, Y), sampler=DistributedSampler(Items(X, Y), 2, 0)), "the loader has a DistributedSampler"),
        (DataLoader(Items(X, Y), batch_size=200, drop_last=True), "the loader has no batches"),
        (DataLoader(Items(X, Y), batch_size=None), "expected batches from the loader, got a single row"),
    ],
)
def test_wrong_kinds_of_data(data, said) -> None:
    with pytest.raises(
        DataError,
        match=said.replace("(x, y)", r"\(x, y\)").replace("(x, y, w", r"\(x, y, w").replace("weight)", r"weight\)"),
    ):
        make_rows(data)


def test_a_validation_says_that_it_is_one() -> None:
    with pytest.raises(DataError, match=r"^validation: expected inputs"):
        make_rows((X[:0], Y[:0]), where="validation")


def test_a_list_of_two_tensors_is_a_pair() -> None:
    assert make_rows([X, Y]).count == COUNT


# ------------------------------------------------------------------------------------------------ sparse inputs


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_rows_of_a_sparse_matrix_are_those_of_the_dense_one(kind) -> None:
    matrix = sp.random_array((60, 40), density=0.1, format="csr", rng=np.random.default_rng(0), dtype=np.float32)
    matrix.data[:] = np.arange(1, matrix.nnz + 1)
    matrix.indices, matrix.indptr = matrix.indices.astype(kind), matrix.indptr.astype(kind)
    whole = torch.from_numpy(matrix.toarray())
    rows = bound(make_rows((matrix, whole[:, 0].clone())), "mse", outputs=1, in_features=40)
    order = stored.shuffled(60, mix_seed(3, 2))(0, 60)
    batches = list(rows.batches(7, seed=3, epoch=2))
    assert torch.equal(torch.cat([batch.x.to_dense() for batch in batches]), whole[order])
    for batch in (*batches, *rows.chunks(11)):
        x = batch.x
        torch.sparse_csr_tensor(x.crow_indices(), x.col_indices(), x.values(), x.shape, check_invariants=True)
        assert x.crow_indices().dtype == x.col_indices().dtype == (torch.int32 if kind is np.int32 else torch.int64)
    assert torch.equal(torch.cat([batch.x.to_dense() for batch in rows.chunks(11)]), whole)


def test_duplicates_of_a_sparse_matrix_are_added_up_and_it_stays_as_it_was() -> None:
    def doubled():
        return sp.csr_matrix((np.array([1.0, 2.0, 4.0]), np.array([2, 2, 0]), np.array([0, 2, 3])), shape=(2, 3))

    matrix = doubled()
    for given in (matrix, doubled().tocoo(), doubled().tolil(), doubled().tocsc(), sp.csr_array(doubled())):
        assert next(iter(make_rows((given, np.zeros(2))).chunks(5))).x.to_dense().tolist() == [[0, 0, 3], [4, 0, 0]]
    assert matrix.nnz == 3
    assert matrix.indices.tolist() == [2, 2, 0]


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int64, np.int8, bool])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sparse_matrices_become_numbers_of_the_model(kind, dtype) -> None:
    matrix = sp.csr_array(np.array([[0, 1, 0], [1, 0, 1]]).astype(kind))
    rows = bound(make_rows((matrix, np.zeros(2))), "mse", outputs=1, dtype=dtype)
    for batch in rows.batches(1, seed=0, epoch=1):
        assert batch.x.dtype == batch.y.dtype == dtype
        assert batch.x.to_dense()[0].tolist() in ([0, 1, 0], [1, 0, 1])


def test_an_invalid_sparse_tensor() -> None:
    broken = torch.sparse_csr_tensor([0, 1, 2], [5, 0], [1.0, 1.0], (2, 3), check_invariants=False)
    with pytest.raises(DataError, match="the inputs are no valid sparse CSR tensor"):
        make_rows((broken, torch.zeros(2)))
    several = torch.randn(2, 3, 4).to_sparse_csr()
    with pytest.raises(DataError, match=r"sparse inputs of shape \(rows, m\), got \(2, 3, 4\)"):
        make_rows((several, torch.zeros(2)))


# ------------------------------------------------------------------------------------------------ parts


@pytest.mark.parametrize("kind", SHUFFLED[:-1])
def test_a_share_is_held_out_class_by_class(make, kind) -> None:
    x, _ = table(100)
    y = (torch.arange(100) < 20).long()
    rows = make(kind, x, y)
    kept, held = rows.divide(0.25, 7)
    assert (kept.count, held.count) == (75, 25)
    found = [flat(numbers(part.chunks(8))) for part in (kept, held)]
    assert sorted(flat(found)) == list(range(100))
    assert sum(number < 20 for number in found[1]) == 5
    assert [flat(numbers(part.chunks(8))) for part in rows.divide(0.25, 7)] == found
    assert [flat(numbers(part.chunks(8))) for part in rows.divide(0.25, 8)] != found
    batches = list(bound(kept, class_weights="balanced").batches(10, seed=0, epoch=1))
    assert sorted(flat(numbers(batches))) == sorted(found[0])
    assert sum(float(batch.weight.sum()) for batch in batches) == pytest.approx(75, rel=1e-6)
    assert all(torch.equal(batch.y, (dense(batch.x)[:, 0] < 20).long()) for batch in batches)
    assert kept.described != held.described
    again, _ = kept.divide(0.2, 1)
    assert set(flat(numbers(again.chunks(8)))) < set(found[0])


def test_numbers_are_held_out_without_regard_to_them(make) -> None:
    x, _ = table(100)
    kept, held = make("tensors", x, x[:, 1].clone()).divide(0.1, 0)
    assert (kept.count, held.count) == (90, 10)
    counts = torch.arange(100)  # each its own class, if they were classes
    assert make("tensors", x, counts).divide(0.1, 0, classes=False)[1].count == 10
    assert make("tensors", x, counts).divide(0.1, 0)[1].count == 10
    assert make("tensors", x, counts[:, None]).divide(0.1, 0)[1].count == 10


@pytest.mark.parametrize("kind", ["stream", "loader", "parquet"])
def test_no_share_of_a_stream_is_held_out(make, kind) -> None:
    with pytest.raises(
        SpecError,
        match=r"fit: a .* is read in a fixed order and cannot be split; give validation rows, such as validation=\(x, y\)",
    ):
        make(kind).divide(0.2, 0)


def test_wrong_fractions(make) -> None:
    for share in (0.0, 1.0, -1.0, math.nan):
        with pytest.raises(SpecError, match="fit: validation: expected a fraction above 0"):
            make("tensors").divide(share, 0)
    with pytest.raises(DataError, match="none of 1 row can be held out"):
        make_rows((X[:1], Y[:1])).divide(0.2, 0)
    with pytest.raises(DataError, match="split rows before bind"):
        bound(make("dataset")).divide(0.2, 0)


# ------------------------------------------------------------------------------------------------ programs


class Noisy(Items):
    def __getitem__(self, number):
        x, y = super().__getitem__(number)
        return x + torch.rand(3) / 2, y


@pytest.mark.parametrize("kind", ["set", "loader", "workers"])
def test_draws_of_data_sets_are_seeded_and_leave_the_global_state(kind) -> None:
    def rows():
        if kind == "set":
            return bound(make_rows(Noisy(X, Y)))
        options = {"num_workers": 1} if kind == "workers" else {"generator": torch.Generator().manual_seed(4)}
        return bound(make_rows(DataLoader(Noisy(X, Y), batch_size=40, shuffle=True, **options)))

    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, second = ([b.x for b in rows().batches(40, seed=0, epoch=1)] for _ in range(2))
    torch.rand(5)
    third = [batch.x for batch in rows().batches(40, seed=0, epoch=1, start=1)]
    other = [batch.x for batch in rows().batches(40, seed=0, epoch=2)]
    torch.set_rng_state(before)
    list(rows().batches(40, seed=0, epoch=1))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first[1:], third, strict=True))
    assert not torch.equal(first[0], other[0])


def test_batches_of_a_loader_are_taken_as_they_are() -> None:
    rows = bound(make_rows(DataLoader(Items(X, Y), batch_size=40)))
    assert [batch.count for batch in rows.batches(7, seed=0, epoch=1)] == [40, 40, 23]
    assert (rows.count, rows.length(7)) == (COUNT, 3)
    assert flat(numbers(rows.batches(7, seed=0, epoch=1))) == list(range(COUNT))
    dropping = make_rows(DataLoader(Items(X, Y), batch_size=40, drop_last=True))
    assert (dropping.count, dropping.length(7)) == (80, 2)
    of_stream = make_rows(DataLoader(Stream(X, Y), batch_size=40))
    assert (of_stream.count, of_stream.length(7)) == (None, None)
    assert [batch.count for batch in bound(of_stream).batches(7, seed=0, epoch=1)] == [40, 40, 23]


def test_numbers_of_python_become_those_of_the_model() -> None:
    class Plain(Dataset):
        def __len__(self):
            return 10

        def __getitem__(self, number):
            if number >= 10:
                raise IndexError
            return np.arange(3.0), 0.5 * number, 2

    for rows in (make_rows(Plain()), make_rows(DataLoader(Plain(), batch_size=4))):
        batch = next(iter(bound(rows, "mse", outputs=1).batches(4, seed=0, epoch=1)))
        assert batch.x.dtype == batch.y.dtype == batch.weight.dtype == FLOAT


def test_a_stream_of_a_single_pass() -> None:
    class Once(IterableDataset):
        def __init__(self):
            self.items = iter(zip(X, Y, strict=True))

        def __iter__(self):
            return self.items

    rows = bound(make_rows(Once()))
    list(rows.batches(10, seed=0, epoch=1))
    with pytest.raises(DataError, match="the data set Once gave no rows in this pass; let __iter__ start a new pass"):
        list(rows.batches(10, seed=0, epoch=2))


def test_items_of_different_sizes() -> None:
    with pytest.raises(DataError, match=r"x from the data set Items cannot be stacked in a batch"):
        make_rows(Items([torch.zeros(3), torch.zeros(4)], [0, 1]))
    rows = bound(make_rows(Items([torch.zeros(3)] * 30 + [torch.zeros(4)], [0] * 31)))
    with pytest.raises(DataError, match=r"x from the data set Items cannot be stacked in a batch"):
        list(rows.chunks(50))
    with pytest.raises(DataError, match=r"the loader gave .* expected equally many rows"):
        make_rows(DataLoader(Items(X, Y), batch_size=4, collate_fn=lambda items: (X[:4], Y[:3])))


def test_getitems_reads_several_items() -> None:
    class Many(Items):
        def __getitems__(self, numbers):
            return [super(Many, self).__getitem__(number) for number in numbers]

        def __getitem__(self, number):
            if number >= streamed.SAMPLED:
                raise AssertionError
            return super().__getitem__(number)

    assert sorted(flat(numbers(bound(make_rows(Many(X, Y))).batches(10, seed=0, epoch=1)))) == list(range(COUNT))


# ------------------------------------------------------------------------------------------------ what a checkpoint compares


@pytest.mark.parametrize("kind", KINDS)
def test_a_description_is_plain_and_tells_data_apart(make, kind) -> None:
    x, y = table()
    described = make(kind, x, y).described
    assert json.loads(json.dumps(described)) == described
    assert make(kind, x, y).described == described
    assert make(kind, x, y.flip(0)).described != described
    assert make(kind, x, y, WEIGHT).described != described
    if kind in ("tensors", "csr", "memmap", "parquet"):
        changed = x.clone()
        changed[1, 2] += 1
        assert make(kind, changed, y).described != described
    assert bound(make(kind, x, y)).described == described
    assert (described["columns"], described["targets"]) == (3, 1)


# ------------------------------------------------------------------------------------------------ Parquet


def test_columns_of_a_table(tmp_path) -> None:
    x, y = table()
    folder = written(tmp_path / "t", x, y, WEIGHT)
    rows = ParquetRows(folder, target=["x1", "x2"], weight="w", columns=["y", "x0"])
    batch = next(iter(rows.chunks(COUNT)))
    assert torch.equal(batch.x, torch.stack([y.float(), x[:, 0]], 1))
    assert torch.equal(batch.y, x[:, 1:])
    assert torch.equal(batch.weight, WEIGHT)
    assert (rows.in_features, rows.target_columns, rows.classes, rows.count) == (2, 2, False, COUNT)
    parts = sorted(folder.iterdir())
    assert numbers(ParquetRows(parts[::-1], target="y").chunks(99))[0][0] == 52
    assert ParquetRows(str(parts[0]), target="y").count == 52
    boolean = tmp_path / "b.parquet"
    pq.write_table(
        pa.table({"a.b": pa.array([1, 2], pa.uint8()), "é": pa.array([0.5, 1.5], pa.float16()), "t": [True, False]}),
        boolean,
    )
    rows = ParquetRows(boolean, target="t")
    (batch,) = bound(rows, outputs=2, in_features=2).chunks(5)
    assert batch.x.tolist() == [[1, 0.5], [2, 1.5]]
    assert batch.y.tolist() == [1, 0]


def test_a_folder_is_read_with_sub_folders(tmp_path) -> None:
    x, y = table()
    written(tmp_path / "t", x, y)
    (tmp_path / "t" / "below").mkdir()
    (tmp_path / "t" / "part-1.parquet").rename(tmp_path / "t" / "below" / "part-1.pq")
    (tmp_path / "t" / "_metadata.parquet").write_text("no table")
    (tmp_path / "t" / "notes.txt").write_text("no table")
    assert ParquetRows(tmp_path / "t", target="y").count == COUNT


def one(folder, **columns):
    path = folder / "one.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        ({"a": ["u", "v"], "y": [0, 1]}, {}, "column 'a' has the type string, expected numbers or Booleans"),
        ({"a": [1.0, 2.0], "y": ["u", "v"]}, {}, "column 'y' has the type string"),
        ({"a": pa.array([1, 2], pa.date32()), "y": [0, 1]}, {}, "column 'a' has the type date32"),
        ({"a": pa.array([1, 2], pa.decimal128(5, 2)), "y": [0, 1]}, {}, "has the type decimal128"),
        ({"a": [[1.0], [2.0]], "y": [0, 1]}, {}, "has the type list"),
        ({"a": [1.0, 2.0], "y": [0, 1]}, {"target": "Y"}, "there is no column 'Y'; did you mean 'y'\\? there are a, y"),
        ({"a": [1.0, 2.0], "y": [0, 1]}, {"columns": ["b"]}, "there is no column 'b'"),
        ({"a": [1.0, 2.0], "y": [0, 1]}, {"columns": "a"}, r"expected a list of columns; use columns=\['a'\]"),
        ({"a": [1.0, 2.0], "y": [0, 1]}, {"columns": ["a", "y"]}, "column 'y' is given more than once"),
        ({"a": [1.0, 2.0], "y": [0, 1]}, {"weight": "y"}, "column 'y' is given more than once"),
        ({"a": [1.0, 2.0], "y": [0, 1]}, {"target": []}, "expected at least one column"),
        ({"y": [0, 1]}, {}, "has no column besides y"),
        ({"a": pa.array([], pa.float64()), "y": pa.array([], pa.int64())}, {}, "the table has no rows"),
    ],
)
def test_wrong_tables(tmp_path, columns, options, said) -> None:
    with pytest.raises((TableError, SpecError), match=said):
        ParquetRows(one(tmp_path, **columns), **{"target": "y", **options})


def test_wrong_paths(tmp_path) -> None:
    with pytest.raises(TableError, match=r"there is no such file; check the path"):
        ParquetRows(tmp_path / "none.parquet", target="y")
    with pytest.raises(TableError, match=r"the folder has no files ending in .parquet or .pq"):
        ParquetRows(tmp_path, target="y")
    (tmp_path / "text.parquet").write_text("a,b\n1,2\n")
    with pytest.raises(TableError, match=r"text.parquet: the file cannot be read as Parquet"):
        ParquetRows(tmp_path / "text.parquet", target="y")
    for path in ([], 3, [3], None):
        with pytest.raises(SpecError, match="expected a file, a folder, or a list of files"):
            ParquetRows(path, target="y")
    folder = written(tmp_path / "t", *table())
    pq.write_table(pa.table({"x0": [1], "x1": [1.0], "x2": [1.0], "y": [1]}), folder / "z.parquet")
    with pytest.raises(TableError, match="column 'x0' is int64, but float in "):
        ParquetRows(folder, target="y")
    pq.write_table(pa.table({"x0": [1.0], "y": [1]}), folder / "z.parquet")
    with pytest.raises(TableError, match="there is no column 'x1'"):
        ParquetRows(folder, target="y", columns=["x1"])


def test_a_null_is_named(tmp_path) -> None:
    path = one(tmp_path, a=[1.0, 2.0, 3.0, None], y=[0, 1, 1, 0])
    said = "column 'a' has a null in row group 1, row 1 of it"
    with pytest.raises(TableError, match=said):
        ParquetRows(path, target="y")  # it is among the first rows
    rows = ParquetRows(one(tmp_path, a=[1.0] * 70 + [None], y=[0] * 71), target="y")
    with pytest.raises(TableError, match="column 'a' has a null in row group 35, row 0 of it"):
        list(rows.batches(4, seed=0, epoch=1))
    rows = ParquetRows(one(tmp_path, a=[1.0] * 71, y=[0] * 70 + [None]), target="y")
    with pytest.raises(TableError, match="column 'y' has a null in row group 35, row 0 of it"):
        bound(rows, in_features=1, class_weights="balanced")


def test_files_that_change_while_they_are_read(tmp_path) -> None:
    folder = written(tmp_path / "t", *table(2000), group=100)
    rows = bound(ParquetRows(folder, target="y"))
    file = folder / "part-1.parquet"
    whole = file.read_bytes()
    batches = rows.batches(10, seed=0, epoch=1)
    next(batches)
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TableError, match=r"part-1.parquet: the file has changed since it was opened"):
        list(rows.chunks(100))
    file.write_bytes(whole)
    os.utime(file, (1, 1))
    with pytest.raises(TableError, match="has changed since it was opened"):
        list(rows.chunks(100))
    file.unlink()
    with pytest.raises(TableError, match="there is no such file"):
        list(rows.chunks(100))


def test_damaged_pages(tmp_path) -> None:
    folder = written(tmp_path / "t", *table(2000), group=100, files=1)
    file = folder / "part-0.parquet"
    content = bytearray(file.read_bytes())
    middle = slice(len(content) // 3, len(content) // 2)
    content[middle] = random.Random(0).randbytes(middle.stop - middle.start)
    file.write_bytes(content)
    rows = bound(ParquetRows(file, target="y"))
    with pytest.raises((TableError, SpecError), match=r"part-0.parquet: row group \d+ cannot be read as Parquet"):
        list(rows.chunks(100))


def test_numbers_that_overflow_the_type_of_the_model_are_refused(tmp_path) -> None:
    rows = ParquetRows(one(tmp_path, a=[1.0, 1e300], y=[0.0, 1.0]), target="y")
    with pytest.raises(DataError, match=r"the inputs of row 1 of row group 0 of .* are not"):
        list(bound(rows, "mse", outputs=1, in_features=1).chunks(5))
    list(bound(rows, "mse", outputs=1, in_features=1, dtype=torch.float64).chunks(5))


def test_wide_tables_and_batches_larger_than_the_buffer(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(parquet, "BUFFER_BYTES", 50)  # two rows
    rows = bound(ParquetRows(written(tmp_path / "t", *table()), target="y"))
    batches = list(rows.batches(50, seed=0, epoch=1))
    assert [len(batch.y) for batch in batches] == [50, 50, 3]
    assert sorted(flat(numbers(batches))) == list(range(COUNT))


def test_rows_of_which_some_have_weights_are_refused():
    x, y = table(20)
    items = [(x[i], y[i]) for i in range(10)] + [(x[i], y[i], 2.0) for i in range(10, 20)]
    for size in (5, 20):
        rows = make_rows(Listed(items)).bind(kp.CrossEntropy(), in_features=3, outputs=3, dtype=FLOAT)
        with pytest.raises(DataError, match="only some rows from the data set Listed have weights"):
            list(rows.batches(size, seed=0, epoch=1))
    loader = DataLoader(items, batch_size=10)
    rows = make_rows(loader).bind(kp.CrossEntropy(), in_features=3, outputs=3, dtype=FLOAT)
    with pytest.raises(DataError, match="only some rows from the loader have weights"):
        list(rows.batches(None, seed=0, epoch=1))


class Listed(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, number):
        return self.items[number]


def test_a_sparse_matrix_without_entries_is_all_zeros():
    rows = make_rows((sp.csr_matrix((4, 3), dtype="f4"), np.zeros(4)))
    (batch,) = rows.chunks(4)
    assert torch.equal(batch.x.to_dense(), torch.zeros(4, 3))


def test_weights_without_a_mean_are_refused():
    weight = torch.arange(5, dtype=torch.float64)
    for factor, said in ((1e-320, "too small"), (1e308, "finite|too large"), (0.0, "0 for all rows")):
        with pytest.raises(DataError, match=said):
            make_rows((*table(5), weight * factor)).bind(kp.CrossEntropy(), in_features=3, outputs=3, dtype=FLOAT)
    with pytest.raises(DataError, match="the weights are too large"):
        make_rows((*table(5), torch.full((5,), 1e308, dtype=torch.float64))).bind(
            kp.CrossEntropy(), in_features=3, outputs=3, dtype=FLOAT
        )


def test_tensors_on_the_meta_device_are_refused():
    x, y = table(5)
    for pair, what in (((x.to("meta"), y), "inputs"), ((x, y.to("meta")), "targets")):
        with pytest.raises(DataError, match=f"the {what} are on the meta device"):
            make_rows(pair)
