"""Grids that move to their inputs: functions of both grids are kept, changes are reported, training resumes exactly."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

import kapsi as kp
from kapsi.grids import update_grids
from kapsi.training import grid_updates
from kapsi.zoo import kan

F64 = torch.float64
SPLINE = kp.BSpline(4, low=-2.0, high=2.0)
EXPANSIONS = {
    "spline": SPLINE,
    "extended": kp.Extended((kp.Chebyshev(2), SPLINE, kp.Taylor(2))),
    "nested": kp.Nested((SPLINE, kp.Taylor(3))),
    "nested in extended": kp.Extended((kp.Nested((SPLINE, kp.Identity(), kp.Taylor(2))), kp.Identity())),
    "processed": kp.Processed(SPLINE, before="tanh"),
}


def rows(count: int = 200, columns: int = 2, seed: int = 0) -> torch.Tensor:
    """Return inputs in [−1, 1] with both ends in every column."""
    x = torch.rand(count, columns, generator=torch.Generator().manual_seed(seed), dtype=F64) * 2 - 1
    x[0], x[1] = -1, 1
    return x


def error(model: kp.Model, x: torch.Tensor) -> float:
    """Return the mean squared error."""
    return float((model(x).detach() - target(x)).square().mean())


def target(x: torch.Tensor) -> torch.Tensor:
    return (2 * x[:, :1] + x[:, 1:2]).sin()


def grids_of(model: kp.Model) -> list[torch.Tensor]:
    return [tensor.clone() for name, tensor in model.named_buffers() if name.endswith("range")]


# ------------------------------------------------------------------------------------------------ the function


@pytest.mark.parametrize("psi", [kp.Dense(), kp.LowRank(2)], ids=["dense", "low rank"])
@pytest.mark.parametrize("name", [name for name in EXPANSIONS if name != "processed"])
def test_functions_of_both_grids_are_kept(name: str, psi: kp.Reconciliation) -> None:
    # On [−1, 1], the breakpoints of the old grid, −1, 0 and 1, are breakpoints of the new one.
    head = kp.HeadSpec(EXPANSIONS[name], psi, remainder="linear", channels=2)
    model = kp.Model(kp.ModelSpec((2, 3), kp.LayerSpec((head, head))), seed=0, dtype=F64)
    x = rows()
    before = model(x).detach()
    update = update_grids(model, x, "test")
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-10 * float(before.abs().max()))
    assert update.change == 0
    assert len(update.bases) == 2
    expected = torch.tensor([[-1.0, -1.0], [1.0, 1.0]], dtype=F64)
    assert all(torch.equal(found, expected) for found in grids_of(model))


def test_inputs_processed_inside_of_the_expansion_set_its_grid() -> None:
    model = kp.Model(kp.rpn([2, 3], EXPANSIONS["processed"]), seed=0, dtype=F64)
    update_grids(model, rows(), "test")
    torch.testing.assert_close(grids_of(model)[0], torch.tensor([[-1.0] * 2, [1.0] * 2], dtype=F64).tanh())


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("intervals", [5, 20, 80])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_change_above_one_percent_is_reported(intervals: int, scale: float, seed: int) -> None:
    model = kp.Model(kan.spec([3, 4, 1], intervals=5), seed=seed, dtype=F64)
    model = kp.refine(model, intervals) if intervals > 5 else model
    x = scale * torch.randn(300, 3, generator=torch.Generator().manual_seed(1), dtype=F64)
    before = model(x).detach()
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        kan.update_grid(model, x)
    change = float((model(x).detach() - before).square().mean().sqrt() / before.std(0, correction=0))
    assert len(reported) == (change > 0.01)
    assert all(issubclass(each.category, kp.ScaleWarning) and __file__ == each.filename for each in reported)


def test_a_margin_widens_hidden_layers_only() -> None:
    model = kp.Model(kp.rpn([2, 3, 1], kp.BSpline()), seed=0, dtype=F64)
    x = rows()
    update_grids(model, x, "test", margin=1.5)
    hidden = model.layers[0](x).detach()
    low, high = hidden.amin(0), hidden.amax(0)
    first, second = grids_of(model)
    assert torch.equal(first, torch.stack((x.amin(0), x.amax(0))))
    torch.testing.assert_close(second.mean(0), (low + high) / 2)
    torch.testing.assert_close(second[1] - second[0], 1.5 * (high - low))


def test_expansions_after_a_spline_that_are_no_polynomials_are_refused() -> None:
    spec = kp.rpn([2, 1], kp.Nested((kp.BSpline(), kp.Chebyshev(3))))
    with pytest.raises(kp.SpecError, match=r"Nested: .* another grid of part 0, as Chebyshev"):
        update_grids(kp.Model(spec, seed=0, dtype=F64), rows(), "test")


# ------------------------------------------------------------------------------------------------ training

SOLVERS: dict[str, Any] = {
    "adamw": kp.AdamW(batch_size=64),
    "average": kp.AdamW(batch_size=64, ema_decay=0.9),
    "sgd": kp.SGD(learning_rate=0.01, batch_size=64),
    "lbfgs": "lbfgs",
    "levenberg_marquardt": "levenberg_marquardt",
}
KAPPA = {"spline": kp.BSpline(), "extended": kp.Extended((kp.BSpline(), kp.Taylor(2)))}


def trained(solver: str, kappa: str = "spline", epochs: int = 9, **options: Any) -> tuple[kp.Model, list[kp.Epoch]]:
    model = kp.Model(kp.rpn([2, 3, 1], KAPPA[kappa], kp.LowRank(2)), seed=0, dtype=F64)
    x = rows()
    kp.calibrate(model, x)
    options = {"grid_updates": {"every": 3, "until": 6}, "validation": 0.25, "patience": 9, **options}
    return model, kp.fit(model, (x, target(x)), solver=SOLVERS[solver], epochs=epochs, **options)


@pytest.mark.parametrize("kappa", KAPPA)
@pytest.mark.parametrize("solver", SOLVERS)
def test_grids_move_at_the_epochs_of_the_option(solver: str, kappa: str) -> None:
    seen = []
    model = kp.Model(kp.rpn([2, 3, 1], KAPPA[kappa], kp.LowRank(2)), seed=0, dtype=F64)
    x = rows()
    data = x, target(x)
    options = {"grid_updates": {"every": 3, "until": 6}}
    run = kp.train(
        model, data, solver=SOLVERS[solver], epochs=9, callbacks=lambda _: seen.append(grids_of(model)), **options
    )
    inputs: list[torch.Tensor] = []
    for record in run:
        inputs.append(model.layers[0](x).detach())
        assert (record.details["grid_change"] > 0) == (record.number in (4, 7))
    for number in range(2, 10):
        moved = not torch.equal(seen[number - 1][1], seen[number - 2][1])
        assert moved == (number in (4, 7))
    if solver != "average":  # the yielded model has the averaged weights
        for number in (4, 7):
            low, high = seen[number - 1][1]
            width = inputs[number - 2].amax(0) - inputs[number - 2].amin(0)
            torch.testing.assert_close(high - low, grid_updates.MARGIN * width, rtol=0.05, atol=0)


@pytest.mark.parametrize("solver", SOLVERS)
def test_training_goes_on_from_the_same_function(solver: str) -> None:
    """Grids that have both functions: the loss after the first move is that of training on, and no worse."""
    model = kp.Model(kp.rpn([2, 1], kp.Extended((SPLINE, kp.Taylor(2))), kp.LowRank(1)), seed=0, dtype=F64)
    x = rows()
    values: list[float] = []
    records = kp.train(model, (x, target(x)), solver=SOLVERS[solver], epochs=4, grid_updates={"every": 2, "until": 2})
    for record in records:
        values.append(error(model, x))
        if record.number == 3:
            assert record.details["grid_change"] == 0
            assert torch.equal(grids_of(model)[0], torch.tensor([[-1.0, -1.0], [1.0, 1.0]], dtype=F64))
    assert values[2] < values[1] < values[0]


@pytest.mark.parametrize("solver", SOLVERS)
def test_resumed_runs_with_moving_grids_are_bitwise_identical(solver: str, tmp_path: Any) -> None:
    whole, records = trained(solver)
    steps = []
    trained(solver, callbacks=StopAt(10**9, steps))
    for stop in sorted({len(steps) // 3 - 1, len(steps) // 3, len(steps) // 3 + 1, len(steps) - 1}):
        folder = tmp_path / str(stop)
        with pytest.raises(Stop):
            trained(solver, checkpoints=kp.Checkpoints(folder, steps=1), callbacks=StopAt(stop, []))
        again, found = trained(solver, checkpoints=kp.Checkpoints(folder, steps=1, resume=True))
        assert [each._replace(seconds=0.0) for each in found] == [each._replace(seconds=0.0) for each in records]
        for name, tensor in again.state_dict().items():
            assert torch.equal(tensor, whole.state_dict()[name])


class Stop(Exception):
    """Stands for a kill."""


class StopAt(kp.Callback):
    """Raises an exception after a number of steps."""

    def __init__(self, number: int, seen: list[int]) -> None:
        self.number, self.seen = number, seen

    def on_step(self, record: Any) -> None:
        self.seen.append(record.step)
        if len(self.seen) == self.number:
            raise Stop


def test_averaged_weights_move_to_the_new_grid() -> None:
    model = kp.Model(kp.rpn([2, 1], SPLINE, kp.LowRank(1)), seed=0, dtype=F64)
    x = rows()
    moved, values = [], []

    class Watch(kp.Callback):
        def on_epoch(self, record: kp.Epoch) -> None:
            moved.append(grids_of(model)[0][0, 0].item())
            values.append(error(model, x))

    solver = kp.AdamW(learning_rate=1e-9, batch_size=None, ema_decay=0.5)
    list(
        kp.train(
            model, (x, target(x)), solver=solver, epochs=4, grid_updates={"every": 2, "until": 2}, callbacks=Watch()
        )
    )
    assert moved == [-2, -2, -1, -1]
    # Steps are tiny: averages of the old coefficients on the new grid would be another function.
    assert max(values) - min(values) < 1e-6


def test_the_best_weights_have_their_grids() -> None:
    model, records = trained("lbfgs", epochs=12)
    x = rows()
    assert max(record.number for record in records if record.best) > 6 or records[-1].ended
    best = min(record.validation_loss for record in records if record.validation_loss is not None)
    again = min(record.loss for record in records)
    assert error(model, x) <= 2 * max(best, again)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (kp.rpn([2, 3, 1], kp.Chebyshev(3)), {}, "no head of the model has a spline"),
        (kp.rpn([2, 3, 1], kp.BSpline(), after="layer_norm"), {}, "LayerNorm after κ"),
        (kp.rpn([2, 3, 1], kp.BSpline(), kp.HyperNet()), {}, "HyperNet: cannot be carried over"),
        (kp.rpn([2, 1], kp.BSpline()), {"solver": "ridge"}, "solver ridge does not continue on moved grids"),
        (
            kp.rpn([2, 3, 1], kp.BSpline()),
            {"solver": kp.LevenbergMarquardt(restarts=2)},
            "levenberg_marquardt does not continue on moved grids; use .* restarts=1",
        ),
        (
            kp.rpn([2, 3, 1], kp.BSpline()),
            {"epochs": 3},
            "the first update is after epoch 3, and training ends with epoch 3",
        ),
        (kp.rpn([2, 3, 1], kp.BSpline()), {"grid_updates": {"every": 5, "until": 4}}, "there is no update"),
    ],
)
def test_an_option_without_effect_is_refused(spec: kp.ModelSpec, options: dict[str, Any], message: str) -> None:
    x = rows()
    model = kp.Model(spec, seed=0, dtype=F64)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(kp.SpecError, match=message):
        kp.fit(
            model,
            (x, target(x)),
            **{"solver": "lbfgs", "epochs": 9, "grid_updates": {"every": 3, "until": 6}, **options},
        )
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_standardized_and_compiled_models_follow_too() -> None:
    x = rows()
    for data, options in (((1000 * x + 5000, target(x)), {"standardize": True}), ((x, target(x)), {"compile": True})):
        model: Any = kp.Model(kp.rpn([2, 3, 1], kp.BSpline()), seed=0, dtype=F64)
        trained_model = torch.compile(model, backend="eager") if options.pop("compile", False) else model
        before = len(model.layers)
        records = kp.fit(
            trained_model, data, solver="lbfgs", epochs=5, grid_updates={"every": 4, "until": 4}, **options
        )
        assert [record.details["grid_change"] > 0 for record in records] == [False] * 4 + [True]
        hidden = model.layers[: 1 + len(model.layers) - before]
        outputs = data[0]
        for layer in hidden:
            outputs = layer(outputs)
        low, high = grids_of(model)[-1]
        assert bool((low < outputs.mean(0)).all() & (outputs.mean(0) < high).all())


def test_a_module_of_torch_has_no_grids() -> None:
    x = rows()
    with pytest.raises(kp.SpecError, match=r"grid_updates.*no kapsi.Model"):
        kp.fit(torch.nn.Linear(2, 1).double(), (x, target(x)), solver="lbfgs", grid_updates={})


# ------------------------------------------------------------------------------------------------ the size of a change


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 0.01), (torch.float16, 0.05), (torch.bfloat16, 0.25)])
def test_changes_in_half_precision_are_those_of_float64(dtype: torch.dtype, share: float) -> None:
    x = rows().to(dtype)
    model = kp.Model(kp.rpn([2, 3, 1], kp.BSpline(5), remainder="linear"), seed=0, dtype=dtype)
    expected = update_grids(copy.deepcopy(model).double(), x.double(), "test").change
    assert expected > 0.05
    assert update_grids(model, x, "test").change == pytest.approx(expected, rel=share)
    assert update_grids(model, x, "test").change == 0


@pytest.mark.parametrize("value", [0.3, 0.37, 5.0])
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_changes_of_constant_outputs_are_relative_to_their_size(dtype: torch.dtype, value: float) -> None:
    model = kp.Model(kp.rpn([2, 3, 1], kp.BSpline(5), remainder="linear"), seed=0, dtype=dtype)
    x = torch.full((200, 2), value, dtype=dtype)
    before = model(x).detach().double()
    change = update_grids(model, x, "test").change
    size = float((model(x).detach().double() - before).square().mean().sqrt() / before.abs().max())
    assert change <= size < 0.02


@pytest.mark.parametrize("expansion", [kp.BSpline(5), kp.GaussianRBF(5)], ids=["spline", "radial"])
def test_models_in_half_precision_are_calibrated(expansion: kp.Expansion) -> None:
    x = rows()
    half = kp.calibrate(kp.Model(kp.rpn([2, 3, 1], expansion), seed=0, dtype=torch.float16), x)
    wide = kp.calibrate(kp.Model(kp.rpn([2, 3, 1], expansion), seed=0, dtype=torch.float16).double(), x)
    for (name, found), expected in zip(half.named_buffers(), wide.buffers(), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02, msg=name)
