"""The laws of kapsi, and training with all functions of the package."""

import pytest
import torch
from kapsi_steps import Adagrad, Coverage, Outer, Pinball, SoftSteps

import kapsi as kp
from kapsi.testing import check, check_pairs

X = torch.rand(200, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1
Y = torch.outer(X[:, 0].tanh() + X[:, 1], torch.tensor([1.0, -2.0], dtype=torch.float64))


def model(reconciliation="outer", outputs=2):
    spec = kp.rpn([2, outputs], expansion=SoftSteps(5), reconciliation=reconciliation, bias=True)
    return kp.calibrate(kp.Model(spec, seed=0, dtype=torch.float64), X)


@pytest.mark.parametrize("function", [SoftSteps, Outer, Pinball, Coverage, Adagrad])
def test_every_law(function):
    check(function)


def test_every_law_of_pairs():
    check_pairs(SoftSteps)
    check_pairs(Outer, laws=["contraction", "sizes"])


def test_calibration_puts_the_steps_at_the_quantiles():
    spec = kp.rpn([1, 1], expansion=SoftSteps(2))
    model = kp.calibrate(kp.Model(spec, seed=0), torch.arange(101.0).unsqueeze(1))
    positions = model.layers[0].heads[0].kappa["positions"]
    assert torch.equal(positions, torch.tensor([[25.0], [75.0]]))


def test_the_weights_are_never_formed(monkeypatch):
    fitted, x = model(), X[:3].requires_grad_()
    expected = fitted(x)
    monkeypatch.setattr(type(fitted.layers[0].heads[0].weights()), "matrix", lambda self: pytest.fail("formed"))
    torch.testing.assert_close(fitted.layers[0].heads[0](x), expected)


def test_ridge_and_levenberg_marquardt_fit_the_structure():
    for solver in ("ridge", "levenberg_marquardt"):
        fitted = model()
        records = kp.fit(fitted, (X, Y), solver=solver, epochs=100)
        assert records[-1].loss < 1e-3, solver


def test_a_quantile_with_early_stopping_on_the_metric():
    noisy = Y[:, :1] + torch.randn(200, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    fitted = model("dense", 1)
    records = kp.fit(
        fitted,
        (X, noisy),
        loss=Pinball(0.9),
        solver=Adagrad(learning_rate=0.5),
        epochs=60,
        validation=0.2,
        metrics=Coverage(),
        monitor="coverage",
        patience=60,
    )
    best = max(record.metrics["coverage"] for record in records)
    assert next(record for record in reversed(records) if record.best).metrics["coverage"] == best
    assert float((noisy <= fitted(X)).double().mean()) > 0.75


def test_checkpoints_of_all_of_them_resume_exactly(tmp_path):
    options = {"loss": "pinball", "solver": {"kind": "adagrad", "batch_size": 32}, "metrics": "coverage", "epochs": 4}

    class Kill(kp.Callback):
        def on_step(self, record):
            if (record.epoch, record.step) == (3, 2):
                raise KeyError

    whole, again = model(), model()
    records = kp.fit(whole, (X, Y), **options)
    with pytest.raises(KeyError):
        kp.fit(model(), (X, Y), **options, callbacks=Kill(), checkpoints=kp.Checkpoints(tmp_path, steps=1))
    found = kp.fit(again, (X, Y), **options, checkpoints=kp.Checkpoints(tmp_path, steps=1, resume=True))
    assert [r._replace(seconds=0) for r in found] == [r._replace(seconds=0) for r in records]
    assert torch.equal(again(X), whole(X))
