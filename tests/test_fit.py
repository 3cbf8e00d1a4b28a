"""kp.fit: what it refuses, and the weights that it leaves behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch

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
        ((X[:, :2], Y), "the model takes 3 inputs"),
        ((X, Y[:10]), "40 rows of inputs"),
        ((X.double(), Y.double()), "they must agree"),
        ((X, Y.double()), "they must agree"),
        ((X.long(), Y), "floating-point type"),
        ((X, CLASSES + 1), "classes are whole numbers 0 to 1"),
        ((X, CLASSES - 1), "classes are whole numbers 0 to 1"),
        ((X, CLASSES.bool()), "classes are whole numbers 0 to 1"),
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
    with pytest.raises(kp.SpecError, match=said):
        kp.fit(model(), pair)
    with pytest.raises(kp.SpecError, match=said):
        kp.fit(model(), (X, CLASSES if "classes" in said else Y), validation=pair)


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
    kp.fit(fitted, (x.double(), y.double()), kp.TrainConfig(solver=solver, penalty=0.0))
    design = np.c_[x.double().numpy(), np.ones(200)]
    exact = np.linalg.lstsq(design, y.double().numpy(), rcond=None)[0]
    head = fitted.layers[0].heads[0]
    np.testing.assert_allclose(head.psi.matrix.detach().numpy(), exact[:3].T, atol=1e-5)
    np.testing.assert_allclose(head.bias.detach().numpy(), exact[3], atol=1e-5)


def test_a_training_that_goes_astray_leaves_the_weights_it_came_with() -> None:
    for validation in (None, (X, Y)):
        fitted = kp.Model(kp.rpn([3, 8, 2], kp.Taylor(2)), seed=0)
        before = {name: tensor.clone() for name, tensor in fitted.state_dict().items()}
        config = kp.TrainConfig(solver="adamw", learning_rate=1e6, epochs=50)
        with pytest.raises(kp.KapsiError, match=r"not finite.*lower learning_rate"):
            kp.fit(fitted, (X, Y), config, validation=validation)
        after = fitted.state_dict()
        assert all(torch.isfinite(tensor).all() for tensor in after.values())
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_weights_of_the_best_epoch_are_restored() -> None:
    # The validation targets contradict the training targets: every epoch after the first few makes them worse.
    x, y = data()
    fitted = model()
    config = kp.TrainConfig(solver="adamw", epochs=40, learning_rate=0.05, patience=3)
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
        kp.fit(fitted, (X, Y), kp.TrainConfig(solver="adamw", epochs=3, batch_size=8))
        runs.append(fitted.layers[0].heads[0].psi.matrix.detach().clone())
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(*runs)
    assert not fitted.training
