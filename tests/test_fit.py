"""kp.fit: what it refuses, and the weights that it leaves behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import kapsi as kp


def data(rows: int = 40, outputs: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 3, generator=generator)
    return x, torch.stack([x.sum(1) * (i + 1) for i in range(outputs)], 1)


def model(outputs: int = 2, **options: object) -> kp.Model:
    return kp.Model(kp.rpn([3, outputs], bias=True, **options), seed=0)


X, Y = data()
CLASSES = (Y[:, 0] > 0).long()


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ((X, Y[:, 0]), "the model has 2 outputs"),
        ((X, Y.T.reshape(40, 1, 2)), "the model has 2 outputs"),
        ((X[:, :2], Y), "the model has 3 inputs"),
        ((X, Y[:10]), "40 rows of inputs"),
        ((X.to(torch.complex64), Y), "expected real numbers as inputs"),
        ((X, Y.to(torch.complex64)), "expected real numbers as targets"),
        ((X.double() * 1e300, Y), "exceed the range of torch.float32"),
        ((X, CLASSES + 1), "class labels are integers from 0 to 1"),
        ((X, CLASSES - 1), "class labels are integers from 0 to 1"),
        (X, "a pair of tensors"),
        ((X, Y, Y, Y), "a pair of tensors"),
        ((X, Y, Y), "weights"),
        ((X.tolist(), Y), "of type list"),
        ((X[:0], Y[:0]), "at least one row"),
        ((X[0], Y[0]), "shape \\(rows, m\\)"),
        ((X / 0, Y), "must be finite"),
    ],
)
def test_data_that_do_not_fit(pair, said) -> None:
    with pytest.raises(kp.KapsiError, match=said):
        kp.fit(model(), pair)
    with pytest.raises(kp.KapsiError, match=said):
        kp.fit(model(), (X, CLASSES if "class labels" in said else Y), validation=pair)


def test_what_is_not_a_configuration() -> None:
    with pytest.raises(kp.SpecError, match="expected a TrainConfig"):
        kp.fit(model(), (X, Y), {"epochs": 3})


def test_one_output_takes_targets_with_and_without_an_axis() -> None:
    x, y = data(outputs=1)
    for target in (y, y[:, 0]):
        fitted = model(1)
        kp.fit(fitted, (x, target))
        torch.testing.assert_close(fitted(x), y, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("solver", ["lbfgs", "ridge", "levenberg_marquardt"])
def test_least_squares_is_solved_exactly(solver) -> None:
    x, y = data(200)
    y = y + torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    fitted = kp.Model(kp.rpn([3, 2], bias=True), seed=0, dtype=torch.float64)
    kp.fit(fitted, (x.double(), y.double()), kp.TrainConfig(solver=solver, l2=0.0))
    design = np.c_[x.double().numpy(), np.ones(200)]
    exact = np.linalg.lstsq(design, y.double().numpy(), rcond=None)[0]
    head = fitted.layers[0].heads[0]
    np.testing.assert_allclose(head.psi.matrix.detach().numpy(), exact[:3].T, atol=1e-5)
    np.testing.assert_allclose(head.bias.detach().numpy(), exact[3], atol=1e-5)


def test_a_training_that_goes_astray_leaves_the_weights_it_came_with() -> None:
    for validation in (None, (X, Y)):
        fitted = kp.Model(kp.rpn([3, 8, 2], kp.Taylor(2)), seed=0)
        before = {name: tensor.clone() for name, tensor in fitted.state_dict().items()}
        config = kp.TrainConfig(solver=kp.AdamW(learning_rate=1e6), epochs=50)
        with pytest.raises(kp.KapsiError, match=r"not finite.*lower learning_rate"):
            kp.fit(fitted, (X, Y), config, validation=validation)
        after = fitted.state_dict()
        assert all(torch.isfinite(tensor).all() for tensor in after.values())
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_weights_of_the_best_epoch_are_restored() -> None:
    # The validation targets contradict the training targets: every epoch after the first few makes them worse.
    x, y = data()
    fitted = model()
    config = kp.TrainConfig(solver=kp.AdamW(learning_rate=0.05), epochs=40, patience=3)
    records = kp.fit(fitted, (x, y), config, validation=(x, -y + 1))
    best = min(records, key=lambda record: record.validation_loss)
    assert len(records) < 40
    assert best.number < records[-1].number
    loss = float(((fitted(x).detach() - (-y + 1)) ** 2).mean())
    assert loss == pytest.approx(best.validation_loss, rel=1e-5)


def test_a_last_batch_of_one_row_joins_the_one_before() -> None:
    x, y = data(257)
    fitted = model(before="batch_norm")
    assert len(kp.fit(fitted, (x, y), kp.TrainConfig(solver="adamw", epochs=2))) == 2


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    runs = []
    for _ in range(2):
        fitted = model(before=kp.Dropout(0.5))
        kp.fit(fitted, (X, Y), kp.TrainConfig(solver=kp.AdamW(batch_size=8), epochs=3))
        runs.append(fitted.layers[0].heads[0].psi.matrix.detach().clone())
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(*runs)
    assert not fitted.training


# ------------------------------------------------------------------------------------------------ modules of torch


def mlp(outputs: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"data": (X, torch.tensor([0, 1] * 19 + [2, 2]))}, "integers from 0 to 1 .* got torch.int64 from 0 to 2"),
        ({"data": (X, CLASSES), "validation": (X, CLASSES + 1)}, "got torch.int64 from 1 to 2"),
        ({"data": (X, CLASSES), "class_weights": (1.0, 2.0, 3.0)}, "3 weights for 2 classes"),
        ({"data": (X, Y), "validation": (X, Y[:, :1])}, "the model has 2 outputs"),
        ({"data": (X, Y), "validation": (X[:, :2], Y)}, "Sequential cannot take inputs of shape \\(40, 2\\)"),
        ({"data": (X[:, :2], Y)}, "fit: Sequential cannot take inputs of shape \\(2, 2\\)"),
    ],
)
def test_a_module_that_does_not_tell_its_sizes_is_asked_for_them(options, said):
    data = options.pop("data")
    with pytest.raises(kp.KapsiError, match=said):
        kp.fit(mlp(), data, solver="adamw", epochs=1, **options)


def test_balanced_classes_count_those_without_rows_as_the_module_has_them():
    # Each class of k that has rows counts rows / (k · rows of the class), which has mean one again after division.
    rows = torch.cat([X[:10], X])
    numbers = torch.cat([torch.zeros(10, dtype=torch.int64), torch.ones(40, dtype=torch.int64)])
    own = mlp(5)
    with torch.no_grad():
        losses = nn.functional.cross_entropy(own(rows), numbers, reduction="none")
    record = kp.fit(own, (rows, numbers), solver=kp.AdamW(batch_size=None), epochs=1, class_weights="balanced")[0]
    assert record.loss == pytest.approx(float(losses[:10].mean() + losses[10:].mean()) / 2, rel=1e-6)


class Detached(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x).detach()


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.LazyLinear(2), "uninitialized parameters"),
        (Detached(), "depend on no trained parameter"),
        (nn.LSTM(3, 2), "it returned tuple"),
        (nn.Sequential(nn.Linear(3, 2), nn.Flatten(0)), "it returned shape \\(4,\\)"),
        (nn.Linear(3, 2, device="meta"), "meta device"),
    ],
)
def test_modules_that_cannot_be_trained_are_refused(module, said):
    with pytest.raises(kp.SpecError, match=said):
        kp.fit(module, (X, Y), solver="adamw", epochs=1)


def test_one_row_and_a_batch_norm_of_torch_are_refused_in_a_line():
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with pytest.raises(kp.SpecError, match=r"cannot take inputs of shape \(1, 3\).* more than 1 value per channel"):
        kp.fit(module, (X, Y), solver=kp.AdamW(batch_size=1), epochs=1)


class Counted(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        pass


def test_a_module_may_keep_more_than_tensors(tmp_path):
    torch.manual_seed(0)
    module = Counted(3, 2)
    before = kp.fit(module, (X, Y), solver="adamw", epochs=2, checkpoints=kp.Checkpoints(tmp_path, steps=1))
    assert before[1].loss < before[0].loss


# ------------------------------------------------------------------------------------------------ modes of torch


@pytest.mark.parametrize("solver", ["adamw", "lbfgs", "levenberg_marquardt"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_training_takes_gradients_in_every_mode(mode, solver):
    one, other = model(), model()
    kp.fit(one, (X, Y), solver=kp.AdamW(ema_decay=0.9) if solver == "adamw" else solver, epochs=2)
    with mode():
        kp.fit(other, (X.clone(), Y.clone()), solver=kp.AdamW(ema_decay=0.9) if solver == "adamw" else solver, epochs=2)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_model_of_inference_mode_is_refused():
    with torch.inference_mode():
        made = model()
    with pytest.raises(kp.SpecError, match=r"made in torch\.inference_mode"):
        kp.fit(made, (X, Y), epochs=1)


def test_modules_keep_their_modes_in_predict():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout()).train()
    module[1].eval()
    kp.predict(module, X)
    assert [part.training for part in module.modules()] == [True, True, False, True]


# ------------------------------------------------------------------------------------------------ validation


def test_a_share_may_be_any_number():
    records = [kp.fit(model(), (X, Y), solver="adamw", epochs=1, validation=s)[0] for s in (0.25, np.float32(0.25))]
    assert records[0].validation_loss == records[1].validation_loss is not None
    with pytest.raises(kp.SpecError, match="expected a fraction above 0 and below 1"):
        kp.fit(model(), (X, Y), epochs=1, validation=1)


def test_a_validation_loss_that_never_is_finite_is_an_error():
    own = model()
    before = {name: tensor.clone() for name, tensor in own.state_dict().items()}
    with pytest.raises(
        kp.KapsiError, match="validation loss was inf after the 3 epochs, and never finite; step 3: the mse"
    ):
        kp.fit(own, (X, Y), validation=(X, Y * 1e30), solver="adamw", epochs=9, patience=3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in own.state_dict().items())


# ------------------------------------------------------------------------------------------------ steps


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


def test_exponential_decay_is_one_of_epochs_in_a_stream_too():
    solver = kp.SGD(schedule="exponential", gamma=0.5, batch_size=8, learning_rate=0.01)
    for data in ((X, Y), Stream()):
        records = kp.fit(model(), data, solver=solver, epochs=3)
        assert [record.learning_rate for record in records] == [0.01, 0.005, 0.0025]


def test_lbfgs_counts_the_rows_of_a_stream():
    one, other = model(), model()
    a = kp.fit(one, (X, Y), solver="lbfgs", epochs=3)[-1].loss
    assert kp.fit(other, Stream(), solver="lbfgs", epochs=3)[-1].loss == pytest.approx(a, rel=1e-5)


def test_lbfgs_ends_by_the_relative_change_of_the_loss():
    # y = 10⁻⁴ x₀²: the loss is of order 10⁻⁸ from the beginning, and falls to nearly nothing of it.
    x = X.double()
    y = 1e-4 * x[:, :1] ** 2
    own = kp.Model(kp.rpn([3, 1], expansion=kp.Taylor(2), bias=True), seed=0, dtype=torch.float64)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.mul_(1e-4)
    record = kp.fit(own, (x, y), solver=kp.LBFGS(tolerance=1e-3), epochs=200)[-1]
    assert record.ended == "the loss no longer falls" or record.loss == 0
    assert record.loss < 1e-3 * float(y.var())


def test_auto_takes_another_solver_where_the_first_cannot_have_the_model():
    module = nn.Sequential(nn.Unflatten(1, (1, 3)), nn.InstanceNorm1d(1), nn.Flatten(1), nn.Linear(3, 2))
    assert kp.fit(module, (X, Y), epochs=2)[-1].solver == "lbfgs"
    with pytest.raises(kp.SpecError, match="has batch statistics"):
        kp.fit(module, (X, Y), solver="levenberg_marquardt", epochs=2)
