"""Inputs and targets of `kp.fit` and `kp.predict`: types, shapes, frames, missing targets, weights of outputs."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import kapsi as kp
from kapsi.arrays import frame_values
from kapsi.training.data import make_rows

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randint(-3, 4, (60, 3), generator=GENERATOR)
F = X.float()
Y = torch.stack([X[:, 0] * X[:, 1] + X[:, 2], X[:, 2] ** 2], 1)  # integers
LABELS = (Y[:, 0] > 0).long()
HOLES = torch.rand(60, 2, generator=GENERATOR) < 0.3
HOLES[7] = True  # a row without targets
MISSING = Y.double().masked_fill(HOLES, math.nan)
NAN = math.nan


def model_of(outputs: int = 2, *, dtype: torch.dtype = torch.float32, widths: tuple[int, ...] = (4,)) -> kp.Model:
    return kp.Model(kp.rpn([3, *widths, outputs], kp.Taylor(2), bias=True), seed=0, dtype=dtype)


def linear(outputs: int = 2) -> kp.Model:
    return model_of(outputs, dtype=torch.float64, widths=())


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trained(data, loss="auto", solver="adamw", outputs=2, epochs=3, **options):
    model = model_of(outputs)
    records = kp.fit(model, data, loss=loss, solver=solver, epochs=epochs, **options)
    return weights_of(model), records


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


# ------------------------------------------------------------------------------------------------ types

KINDS = {
    "tensors": lambda *columns: columns,
    "arrays": lambda *columns: tuple(column.numpy() for column in columns),
    "set": Items,
    "tensor set": TensorDataset,
    "loader": lambda *columns: DataLoader(TensorDataset(*columns), batch_size=16),
    "stream": Stream,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("solver", ["adamw", "sgd", "lbfgs", "levenberg_marquardt"])
def test_tensors_of_any_type_are_cast_to_the_type_of_the_model(kind, solver) -> None:
    if solver in ("adamw", "sgd"):
        solver = {"kind": solver, "schedule": "constant", "learning_rate": 1e-5}
    wanted, _ = trained(KINDS[kind](F, Y.float()), "mse", solver)
    for x, y in ((X, Y), (X.double(), Y.double()), (X.to(torch.int8), Y.half()), (F, Y.int())):
        assert torch.equal(trained(KINDS[kind](x, y), "mse", solver)[0], wanted)


def test_ridge_validation_and_predictions_cast_as_well() -> None:
    first, second = linear(), linear()
    one = kp.fit(first, (X, Y), loss="mse", solver="ridge", validation=(X.double(), Y.half()), metrics="mae")
    two = kp.fit(second, (X.double(), Y.double()), loss="mse", solver="ridge", validation=(F, Y.float()), metrics="mae")
    assert torch.equal(weights_of(first), weights_of(second))
    assert (one[-1].validation_loss, one[-1].metrics) == (two[-1].validation_loss, two[-1].metrics)
    wanted = first(X.double())
    for x in (X, X.half(), X.to(torch.uint8).to(torch.int8), X.numpy(), pd.DataFrame(X.numpy())):
        assert torch.equal(kp.predict(first, x), wanted)
    torch.testing.assert_close(kp.predict_proba(first, X), wanted.detach().softmax(1))
    torch.testing.assert_close(kp.predict(first, X.double().to_sparse_csr().float(), batch_size=7), wanted.detach())


@pytest.mark.parametrize("kind", KINDS)
def test_boolean_targets_and_labels_in_a_column_are_classes(kind) -> None:
    schedule = kp.AdamW(schedule="constant")
    wanted, _ = trained(KINDS[kind](F, LABELS), "auto", schedule)
    for y in (LABELS.bool(), LABELS[:, None], LABELS.to(torch.uint8)):
        assert torch.equal(trained(KINDS[kind](F, y), "auto", schedule)[0], wanted)
    one, _ = trained(KINDS[kind](F, LABELS.float()[:, None]), "bernoulli", schedule, outputs=1)
    two, _ = trained(KINDS[kind](F, LABELS.bool()), "bernoulli", schedule, outputs=1)
    assert torch.equal(one, two)


def test_boolean_targets_and_one_output_name_the_loss() -> None:
    with pytest.raises(kp.SpecError, match=r"for one output use loss bernoulli \(targets 0 and 1\) or mse"):
        trained((F, LABELS.bool()), outputs=1)


def test_values_beyond_the_type_of_the_model_are_refused() -> None:
    with pytest.raises(kp.DataError, match=r"the inputs of row 0 .* exceed the range of torch.float32"):
        trained((X.double() * 1e300, Y))


# ------------------------------------------------------------------------------------------------ frames

NAMES = ["a", "b", "c"]
FRAMES = {
    "pandas": lambda x: pd.DataFrame(x, columns=NAMES[: x.shape[1]], index=range(100, 100 + len(x))),
    "nullable": lambda x: pd.DataFrame(x, columns=NAMES[: x.shape[1]]).convert_dtypes(),
    "arrow": lambda x: pa.table({name: x[:, i] for i, name in enumerate(NAMES[: x.shape[1]])}),
    "batch": lambda x: pa.record_batch({name: x[:, i] for i, name in enumerate(NAMES[: x.shape[1]])}),
}


@pytest.mark.parametrize("kind", FRAMES)
def test_frames_are_their_numbers(kind) -> None:
    frame = FRAMES[kind]
    wanted, _ = trained((F, Y.float()), "mse")
    assert torch.equal(trained((frame(X.numpy()), frame(Y.numpy())), "mse")[0], wanted)
    model = model_of()
    assert torch.equal(kp.predict(model, frame(X.numpy())), model(F))


@pytest.mark.parametrize(
    "column",
    [pd.Series, pa.array, lambda y: pa.chunked_array([y]), lambda y: pd.Series(y, dtype="Int64")],
    ids=["pandas", "arrow", "chunks", "nullable"],
)
def test_a_column_of_a_frame_is_a_target_and_a_weight(column) -> None:
    weight = torch.arange(60) % 5
    wanted, _ = trained((F, LABELS, weight))
    assert torch.equal(trained((X, column(LABELS.numpy()), column(weight.numpy())))[0], wanted)


def test_missing_entries_of_a_frame_are_nan() -> None:
    table = pa.table({"a": [1, None, 3], "b": [True, None, False]})
    frame = pd.DataFrame(
        {"a": pd.array([1, None, 3], dtype="Int64"), "b": pd.array([True, None, False], dtype="boolean")}
    )
    for values in (table, frame):
        rows = make_rows((np.zeros((3, 1)), values))
        assert torch.equal(
            next(iter(rows.chunks(3))).y.isnan(), torch.tensor([[False, False], [True, True], [False, False]])
        )


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (
            pd.DataFrame({"a": [1.0], "city": ["x"]}),
            "expected numbers in column 'city' of the inputs, got values of type str",
        ),
        (pd.DataFrame({"a": pd.Categorical(["u"])}), "column 'a' of the inputs has categories, not quantities; encode"),
        (pd.DataFrame({"a": pd.to_datetime(["2020-01-01"])}), "got values of type datetime64"),
        (pa.table({"a": ["x"]}), "column 'a' of the inputs, got values of type string"),
        (pd.DataFrame(index=[0]), "the inputs are a DataFrame without columns"),
        (pd.Series([1.0]), r"expected inputs of shape \(rows, m\)"),
    ],
)
def test_frames_without_numbers_are_refused(x, said) -> None:
    with pytest.raises(kp.DataError, match=said):
        kp.fit(model_of(), (x, np.zeros((1, 2))))


# ------------------------------------------------------------------------------------------------ outputs (rows,)


class Flat(nn.Module):
    """A model with one output, without an axis of columns."""

    def __init__(self, squeeze: bool = False) -> None:
        super().__init__()
        self.inner, self.squeeze = model_of(1, dtype=torch.float64), squeeze

    def forward(self, x):
        output = self.inner(x)
        return output.squeeze() if self.squeeze else output[:, 0]


@pytest.mark.parametrize("solver", ["adamw", "lbfgs", "levenberg_marquardt"])
@pytest.mark.parametrize("squeeze", [False, True])
def test_outputs_without_columns_are_one_output(solver, squeeze) -> None:
    target = Y[:, 0]
    wanted, model = model_of(1, dtype=torch.float64), Flat(squeeze)
    one = kp.fit(
        wanted, (X, target), loss="mse", solver=solver, epochs=3, validation=(X[:1], target[:1]), metrics="mae"
    )
    two = kp.fit(
        model, (X, target[:, None]), loss="mse", solver=solver, epochs=3, validation=(X[:1], target[:1]), metrics="mae"
    )
    torch.testing.assert_close(weights_of(model), weights_of(wanted), rtol=1e-6, atol=1e-8)
    assert [r.loss for r in two] == pytest.approx([r.loss for r in one], rel=1e-6)
    assert kp.predict(model, X).shape == (60,)
    assert torch.equal(kp.predict(model, X, "bernoulli"), (model(X.double()) > 0).long())


# ------------------------------------------------------------------------------------------------ missing targets, weights

LOSSES = {
    "mse": lambda e: e**2,
    "huber": lambda e: torch.where(e.abs() < 1, e**2 / 2, e.abs() - 0.5),
}
SHARES = torch.tensor([[1.5, 0.5]], dtype=torch.float64)  # weights 3 and 1, divided by their mean


def reference(loss, output, target, shares, weight=None):
    """The weighted mean over the observed targets, in float64."""
    known = ~target.isnan()
    entries = known * shares * (1 if weight is None else weight.double()[:, None])
    values = LOSSES[loss](output - target.masked_fill(~known, 0))
    return (values * entries).sum() / entries.sum()


@pytest.mark.parametrize("kind", ["tensors", "arrays", "set", "loader"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_is_the_weighted_mean_of_the_observed_targets(kind, weighted, loss) -> None:
    own = (torch.arange(60) % 4,) if weighted else ()
    model = model_of(dtype=torch.float64)
    options = {"kind": loss, "output_weights": [3, 1], "ignore_missing": True}
    records = kp.fit(
        model, (X, MISSING, *own), loss=options, epochs=1, validation=KINDS[kind](X, MISSING, *own), solver="lbfgs"
    )
    wanted = reference(loss, kp.predict(model, X), MISSING, SHARES, *own)
    assert records[-1].validation_loss == pytest.approx(float(wanted), rel=1e-12)
    assert records[-1].loss == pytest.approx(float(wanted), rel=1e-12)


@pytest.mark.parametrize("solver", ["lbfgs", "levenberg_marquardt", "ridge"])
@pytest.mark.parametrize("own", [(), (torch.arange(60) % 4,)], ids=["", "weighted"])
def test_missing_targets_and_weights_of_outputs_lead_to_the_minimum(solver, own) -> None:
    # Outputs of a linear model are independent: each is a least-squares problem over its own rows.
    model = linear()
    loss = kp.MSE(output_weights=(3, 1), ignore_missing=True)
    kp.fit(model, (X, MISSING, *own), loss=loss, solver=solver, epochs=400, l2=1e-3)
    x = torch.cat([X.double(), (X.double()[:, :, None] * X.double()[:, None, :]).flatten(1)], 1)
    entries = ~MISSING.isnan() * SHARES * (own[0].double()[:, None] if own else 1.0)
    for j in range(2):
        w = entries[:, j] / entries.sum()  # the loss is Σ w (y − f)²
        centered = x - (w @ x) / w.sum()
        y = MISSING[:, j].nan_to_num(0)
        y = y - (w @ y) / w.sum()
        gram = (centered.T * w) @ centered + 0.5 * 1e-3 * torch.eye(x.shape[1], dtype=torch.float64)
        f = centered @ torch.linalg.solve(gram, (centered.T * w) @ y)
        output = kp.predict(model, X)[:, j]
        output = output - (w @ output) / w.sum()
        torch.testing.assert_close(output, f, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("solver", ["adamw", "sgd"])
def test_a_step_follows_the_gradient_of_the_observed_targets(solver) -> None:
    model, wanted = model_of(dtype=torch.float64), model_of(dtype=torch.float64)
    loss = kp.MSE(output_weights=(3, 1), ignore_missing=True)
    rate = {"kind": solver, "learning_rate": 1e-5, "schedule": "constant", "batch_size": None}
    kp.fit(model, (X, MISSING), loss=loss, solver=rate, epochs=3)
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    defaults = {"weight_decay": 0.0} if solver == "adamw" else {"momentum": 0.9, "nesterov": True}
    optimizer = kinds[solver](wanted.parameters(), lr=1e-5, **defaults)
    for _ in range(3):
        optimizer.zero_grad()
        reference("mse", wanted(X.double()), MISSING, SHARES).backward()
        optimizer.step()
    torch.testing.assert_close(weights_of(model), weights_of(wanted), rtol=1e-9, atol=1e-11)


def test_likelihoods_ignore_missing_targets() -> None:
    output = torch.randn(60, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    mean, log_variance = output.chunk(2, 1)
    known = ~HOLES
    values = -torch.distributions.Normal(mean, (log_variance / 2).exp()).log_prob(Y.double())
    rows = kp.Gaussian(output_weights=(3, 1), ignore_missing=True).rows(output, MISSING)
    torch.testing.assert_close(rows, (values * known * SHARES).sum(1))
    bits = (Y > 0).double()
    values = -torch.distributions.Bernoulli(logits=mean).log_prob(bits)
    rows = kp.Bernoulli(output_weights=(3, 1), ignore_missing=True).rows(mean, bits.masked_fill(HOLES, NAN))
    torch.testing.assert_close(rows, (values * known * SHARES).sum(1))


@pytest.mark.parametrize("name", ["mse", "huber", "gaussian", "bernoulli"])
def test_the_curvature_belongs_to_the_weighted_loss(name) -> None:
    loss = kp.from_dict({"kind": name, "output_weights": [3, 1], "ignore_missing": True}, kp.Loss)
    plain = kp.from_dict({"kind": name}, kp.Loss)
    target = (MISSING > 0).double().masked_fill(HOLES, NAN)
    output = torch.randn(
        60, 2 * loss.outputs_per_target, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    output.requires_grad_()
    gradient, root = loss.curvature(output.detach(), target)
    (wanted,) = torch.autograd.grad(loss.rows(output, target).sum(), output)
    torch.testing.assert_close(gradient, wanted)
    _, other = plain.curvature(output.detach(), target.nan_to_num(0))
    factors = (~HOLES * SHARES).repeat(1, loss.outputs_per_target)
    torch.testing.assert_close(root.mT @ root, (other.mT @ other) * factors[:, None, :])


def test_metrics_ignore_missing_targets() -> None:
    model = model_of(dtype=torch.float64)
    loss = kp.MSE(ignore_missing=True)
    record = kp.fit(model, (X, Y), loss=loss, epochs=1, validation=(X, MISSING), metrics=("rmse", "mae", "r2"))[-1]
    error, known = (kp.predict(model, X) - Y), ~HOLES
    assert record.metrics["rmse"] == pytest.approx(float(error[known].square().mean().sqrt()))
    assert record.metrics["mae"] == pytest.approx(float(error[known].abs().mean()))
    deviations = sum(float((Y[known[:, j], j] - Y[known[:, j], j].double().mean()).square().sum()) for j in range(2))
    assert record.metrics["r2"] == pytest.approx(1 - float(error[known].square().sum()) / deviations)
    bits = (Y > 0).double().masked_fill(HOLES, NAN)
    loss = kp.Bernoulli(ignore_missing=True)
    record = kp.fit(model, (X, bits), loss=loss, epochs=1, validation=(X, bits), solver="adamw")[-1]
    hits = ((kp.predict(model, X) > 0) == (Y > 0))[known]
    assert record.metrics["accuracy"] == pytest.approx(float(hits.double().mean()))


def test_without_missing_targets_the_option_changes_nothing() -> None:
    one, _ = trained((X, Y), kp.MSE())
    two, _ = trained((X, Y), kp.MSE(ignore_missing=True))
    torch.testing.assert_close(two, one)


@pytest.mark.parametrize("solver", ["adamw", "lbfgs"])
def test_a_resumed_run_ignores_the_same_targets(solver, tmp_path) -> None:
    loss = kp.MSE(output_weights=(3, 1), ignore_missing=True)
    config = kp.TrainConfig(loss=loss, solver=solver, epochs=6)
    wanted = model_of()
    kp.fit(wanted, (X, MISSING), config)
    folder = tmp_path / "run"
    checkpoints = kp.Checkpoints(folder, steps=1)
    kp.fit(model_of(), (X, MISSING), config, checkpoints=checkpoints, callbacks=lambda epoch: epoch.number == 3)
    resumed = model_of()
    kp.fit(resumed, (X, MISSING), config, checkpoints=kp.Checkpoints(folder, resume=True))
    assert torch.equal(weights_of(resumed), weights_of(wanted))


@pytest.mark.parametrize(
    ("y", "options", "said"),
    [
        (
            MISSING,
            {},
            r"the targets of row \d+ .* are not; drop the row, or ignore NaN targets by loss=kp.MSE\(ignore_missing=True\)",
        ),
        (MISSING, {"loss": "huber"}, r"by loss=kp.Huber\(ignore_missing=True\)"),
        (MISSING, {"loss": lambda f, y: (f - y) ** 2}, r"the targets of row .* are not$"),
        (MISSING * NAN, {"loss": kp.MSE(ignore_missing=True)}, r"all targets are missing \(NaN\)"),
        (MISSING / 0, {"loss": kp.MSE(ignore_missing=True)}, "inputs and targets must be finite"),
        (Y, {"loss": kp.MSE(output_weights=(1, 2, 3))}, "mse has 3 output_weights for 2 targets; give one for each"),
        (
            Y,
            {"output_weights": (1, 2)},
            "output_weights is an option of the losses bernoulli, gamma, gaussian",
        ),
        (
            MISSING,
            {"loss": kp.MSE(ignore_missing=True), "metrics": lambda p, y: (p - y) ** 2},
            "does not ignore missing",
        ),
    ],
)
def test_what_is_refused_names_the_remedy(y, options, said) -> None:
    with pytest.raises(kp.KapsiError, match=said):
        kp.fit(model_of(), (X, y), **options)


@pytest.mark.parametrize("weights", [(), (0, 0), (-1, 1)])
def test_weights_of_outputs_are_not_negative(weights) -> None:
    with pytest.raises(kp.SpecError, match=r"MSE\(output_weights=…\): expected a weight of at least 0 per target"):
        kp.MSE(output_weights=weights)


PAIR = (F, F)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            (PAIR, Y),
            "expected one tensor or array as inputs, got a tuple of 2; concatenate the parts along the last axis",
        ),
        ((list(PAIR), Y), "as inputs, got a list of 2"),
        (({"a": F, "b": F}, Y), "as inputs, got a dict of 2"),
        ((F, PAIR), "as targets, got a tuple of 2"),
        (Items([PAIR] * 4, Y), "as x of an item, got a tuple of 2"),
        (Items([{"a": F}] * 4, Y), "as x of an item, got a dict of 1"),
        (DataLoader(Items([{"a": F[0]}] * 4, Y), batch_size=2), "as inputs, got a dict of 1"),
        (DataLoader(Items([(F[0], F[0])] * 4, Y), batch_size=2), "as inputs, got a list of 2"),
    ],
)
def test_several_inputs_are_refused(data, said) -> None:
    with pytest.raises(kp.DataError, match=said):
        kp.fit(model_of(), data)
    if isinstance(data, tuple) and not isinstance(data[0], torch.Tensor):
        with pytest.raises(kp.DataError, match=said):
            kp.predict(model_of(), data[0])


# ------------------------------------------------------------------------------------------------ values that do not fit


def test_values_beyond_the_type_of_the_model_are_named() -> None:
    model = kp.Model(kp.rpn([2, 1]), seed=0)
    x = np.ones((5, 2))
    x[3, 1] = 1e39
    message = r"column 1 of row 3 \(counted from 0\) is 1e\+39, beyond the range of torch\.float32; .* float64"
    for table in (x, pd.DataFrame(x), scipy.sparse.csr_matrix(x), torch.from_numpy(x)):
        with pytest.raises(kp.DataError, match=message):
            kp.predict(model, table, batch_size=2)
    assert torch.equal(kp.predict(model.double(), x)[:3], kp.predict(model, np.ones((3, 2))))


def test_outputs_beyond_the_type_of_the_model_get_a_warning() -> None:
    model = kp.Model(kp.rpn([2, 1], kp.Taylor(2)), seed=0)
    x = torch.ones(5, 2)
    x[4] = 1e30
    with pytest.warns(kp.ScaleWarning, match=r"the outputs of row 4 .* are not finite, the inputs are; scale"):
        kp.predict(model, x, batch_size=2)


def test_unknown_inputs_give_unknown_values_but_no_class() -> None:
    x = torch.ones(5, 2)
    x[2, 0] = torch.nan
    output = kp.predict(kp.Model(kp.rpn([2, 1]), seed=0), x)
    assert output.isnan().flatten().tolist() == [False, False, True, False, False]
    model = kp.Model(kp.rpn([2, 3]), seed=0)
    for loss in ("cross_entropy", "hinge", "bernoulli"):
        with pytest.raises(kp.DataError, match=rf"row 2 .* are not numbers, so {loss} has no class; look for NaN"):
            kp.predict(model, x, loss, batch_size=2)
    assert kp.predict_proba(model, x)[2].isnan().all()


@pytest.mark.parametrize("fill", [0.0, np.nan])
def test_sparse_columns_of_pandas_are_taken_as_numbers(fill: float) -> None:
    x = np.array([[0.0, 1.0], [2.0, fill], [0.0, 3.0]])
    frame = pd.DataFrame(x, columns=["a", "b"]).astype(pd.SparseDtype(float, fill))
    np.testing.assert_array_equal(frame_values(frame, "inputs", "fit"), x)
    np.testing.assert_array_equal(frame_values(frame["b"], "inputs", "fit"), x[:, 1])
    wide = pd.DataFrame.sparse.from_spmatrix(scipy.sparse.csr_matrix((2**15, 2**3)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kapsi.arrays.MAX_DENSE", 2**17)
        with pytest.raises(
            kp.DataError, match=r"sparse frame of 262,144 values; give a SciPy matrix, frame\.sparse\.to_coo"
        ):
            kp.predict(kp.Model(kp.rpn([8, 1])), wide)


def test_calibrate_takes_the_tables_that_fit_takes() -> None:
    x = F.double()
    frame = pd.DataFrame(x.numpy(), columns=["a", "b", "c"])
    expected = kp.calibrate(kp.Model(kp.rpn([3, 2], kp.BSpline()), seed=0), x).state_dict()
    for table in (
        frame,
        frame.astype(pd.SparseDtype(float, 0.0)),
        x.numpy(),
        x.tolist(),
        pa.Table.from_pandas(frame),
        X,
        X.numpy(),
    ):
        state = kp.calibrate(kp.Model(kp.rpn([3, 2], kp.BSpline()), seed=0), table).state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    kappa = kp.expansion.NaiveNormal(2)
    by_class = kp.calibrate(kp.Model(kp.rpn([3, 2], kappa), seed=0), x, LABELS).state_dict()
    state = kp.calibrate(kp.Model(kp.rpn([3, 2], kappa), seed=0), frame, pd.Series(LABELS.numpy())).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in by_class.items())


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (X.numpy() + 1j, "give real and imaginary parts as columns"),
        (
            pd.DataFrame({"a": pd.Categorical([1, 2] * 30), "b": 0.0, "c": 0.0}),
            "column 'a' of the inputs has categories",
        ),
        (np.full((60, 3), np.timedelta64(1, "h")), r"use a unit, such as \(x\) / np\.timedelta64"),
        (F[:, 0], r"of a single column use x\[:, None\]"),
        (F.reshape(60, 1, 3), r"got \(rows, 1, 3\); use x\.flatten\(0, -2\)"),
    ],
)
def test_inputs_that_are_no_table_get_a_remedy(x, message) -> None:
    model = kp.Model(kp.rpn([3, 1]), seed=0)
    for standardize in (False, True):
        with pytest.raises(kp.KapsiError, match=message):
            kp.fit(model, (x, Y[:, 0].float()), standardize=standardize)


def test_items_of_several_axes_are_refused() -> None:
    class Images(Dataset):
        def __len__(self) -> int:
            return 60

        def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
            return F[i].reshape(1, 3), Y[i, :1].float()

    for solver in ("adamw", "levenberg_marquardt"):
        with pytest.raises(kp.SpecError, match=r"got \(rows, 1, 3\); use x\.flatten\(0, -2\)"):
            kp.fit(kp.Model(kp.rpn([3, 1]), seed=0), Images(), solver=solver)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")
def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([F[0], F[1, :2]])
    with pytest.raises(kp.DataError, match="a nested tensor, of rows of different lengths; pad"):
        kp.predict(kp.Model(kp.rpn([3, 1])), nested)
    with pytest.raises(kp.DataError, match="a tensor that is nested"):
        kp.standardized(kp.rpn([3, 1]), nested)


def test_categories_of_integers_are_class_labels_as_targets() -> None:
    labels = pd.Series(LABELS.numpy())
    records = [kp.fit(kp.Model(kp.rpn([3, 2]), seed=0), (F, y), epochs=2) for y in (labels, labels.astype("category"))]
    assert records[0][-1].loss == records[1][-1].loss
