"""Hooks on inputs and on gradients: grids are those of the hooked inputs, and solvers without backward passes refuse."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import kapsi as kp
from kapsi.training.config import TrainConfig
from kapsi.training.data import make_rows
from kapsi.training.resolve import resolve
from kapsi.zoo import kan

F64 = torch.float64
SPEC = kp.rpn([2, 3, 1], kp.BSpline(5), remainder="linear")


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.rand(80, 2, generator=torch.Generator().manual_seed(0), dtype=F64) * 2 - 1
    return x, (3 * x[:, :1] + x[:, 1:]).sin()


def model_of(spec: kp.ModelSpec = SPEC) -> kp.Model:
    return kp.Model(spec, seed=0, dtype=F64)


def hook(module: torch.nn.Module, keywords: bool = False) -> None:
    """Let a module see 10 x + 3."""
    if keywords:
        module.register_forward_pre_hook(lambda m, args, kw: ((10 * args[0] + 3,), kw), with_kwargs=True)
    else:
        module.register_forward_pre_hook(lambda m, args: 10 * args[0] + 3)


def grids(model: kp.Model) -> list[torch.Tensor]:
    return [tensor.clone() for name, tensor in model.named_buffers() if name.endswith("range")]


PLACES: dict[str, Any] = {
    "model": lambda model: model,
    "layer": lambda model: model.layers[0],
    "head": lambda model: model.layers[0].heads[0],
}


@pytest.mark.parametrize("keywords", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("change", [kp.calibrate, kan.update_grid])
def test_grids_are_those_of_the_hooked_inputs(change: Any, place: str, keywords: bool) -> None:
    (x, _), model = rows(), model_of()
    wide = model_of()
    if change is kan.update_grid:  # functions that both grids have
        for each in (model, wide):
            kp.calibrate(each, 10 * x + 3)
    hook(PLACES[place](model), keywords)
    change(model, x)
    change(wide, 10 * x + 3)
    assert len(grids(model)) == 2
    for found, expected in zip(grids(model), grids(wide), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    if change is kan.update_grid:
        torch.testing.assert_close(model(x), wide(10 * x + 3), rtol=1e-10, atol=1e-10)


def test_grids_that_follow_in_training_are_those_of_the_hooked_inputs() -> None:
    x, y = rows()
    model = kp.calibrate(model_of(), 10 * x + 3)
    hook(model)
    kp.fit(model, (x, y), solver="lbfgs", epochs=5, grid_updates=kp.GridUpdates(2, 4))
    expected = torch.stack(((10 * x + 3).amin(0), (10 * x + 3).amax(0)))
    torch.testing.assert_close(grids(model)[0], expected)


# ------------------------------------------------------------------------------------------------ gradients


def clear(p: torch.Tensor) -> None:
    assert p.grad is not None
    p.grad.zero_()


def freeze_by_hook(model: kp.Model, kind: str) -> torch.nn.Parameter:
    p = next(model.parameters())
    if kind == "gradient":
        p.register_hook(lambda g: g * 0)
    else:
        p.register_post_accumulate_grad_hook(clear)
    return p


@pytest.mark.parametrize("kind", ["gradient", "accumulated"])
@pytest.mark.parametrize(("solver", "widths"), [("levenberg_marquardt", [2, 3, 1]), ("ridge", [2, 1])])
def test_solvers_without_backward_passes_refuse_hooks_on_gradients(solver: str, widths: list[int], kind: str) -> None:
    model = model_of(kp.rpn(widths, kp.Taylor(2)))
    freeze_by_hook(model, kind)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(kp.SpecError, match=rf"{solver}: hooks on the gradient of layers\.0\S+ have no effect"):
        kp.fit(model, rows(), solver=solver, epochs=2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("kind", ["gradient", "accumulated"])
@pytest.mark.parametrize("widths", [[2, 3, 1], [2, 1]])
def test_auto_runs_hooks_on_gradients(widths: list[int], kind: str) -> None:
    model = model_of(kp.rpn(widths, kp.Taylor(2), bias=True))
    p = freeze_by_hook(model, kind)
    before = [q.detach().clone() for q in model.parameters()]
    records = kp.fit(model, rows(), epochs=2)
    assert records[-1].solver == "adamw"
    assert torch.equal(p, before[0])
    assert not torch.equal(list(model.parameters())[-1], before[-1])


def test_auto_with_moving_grids_has_a_solver_that_follows_them() -> None:
    model, data = model_of(kp.rpn([2, 1], kp.BSpline(5))), make_rows(rows())
    assert resolve(TrainConfig(), model, data).solver.name == "ridge"
    options = kp.GridUpdates(2, 4)
    assert resolve(TrainConfig(grid_updates=options), model, data).solver.follows_grids
    records = kp.fit(kp.calibrate(model, rows()[0]), rows(), epochs=6, grid_updates=options)
    assert "grid_change" in records[-1].details


# ------------------------------------------------------------------------------------------------ units


@pytest.mark.parametrize("fitted", [False, True])
def test_standardized_models_have_the_moments_of_the_hooked_inputs(fitted: bool) -> None:
    (x, y), model = rows(), model_of()
    hook(model)
    if fitted:
        kp.fit(model, (x, y), standardize=True, epochs=1)
    else:
        model = kp.standardized(model, x, y)
    step = model.layers[0].output[0]
    torch.testing.assert_close(step.shift, (10 * x + 3).mean(0))
    torch.testing.assert_close(1 / step.scale, (10 * x + 3).std(0, correction=0))
