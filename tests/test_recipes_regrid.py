"""Moving the splines of hidden layers during a fit."""

from __future__ import annotations

import pytest
import torch

import kapsi as kp
from kapsi.recipes.regrid import regrid


def made(psi, before=()) -> tuple[kp.Model, torch.Tensor]:
    # A spline of one interval is a cubic polynomial, and one on every other range too: it is carried over exactly.
    splines = kp.Extended((kp.BSpline(1, low=-9.0, high=9.0), kp.Taylor(2)))
    model = kp.Model(
        kp.rpn([2, 3, 2, 1], splines, psi, kp.LinearRemainder(), before=before), seed=0, dtype=torch.float64
    )
    x = torch.rand(400, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2 - 1
    return model, x


@pytest.mark.parametrize("psi", [kp.LowRank(1), kp.LowRank(2), kp.Dense()])
@pytest.mark.parametrize("before", [(), ("tanh",)])
def test_ranges_follow_the_data_and_the_function_stays(psi, before) -> None:
    model, x = made(psi, before)
    expected, first = model(x).detach(), model.layers[0].heads[0].kappa["0"]["range"].clone()
    assert regrid(model, x) is model
    torch.testing.assert_close(model(x).detach(), expected, rtol=0, atol=1e-6 * float(expected.std()))
    assert torch.equal(model.layers[0].heads[0].kappa["0"]["range"], first)
    h = model.layers[0](x).detach()
    for layer in list(model.layers)[1:]:
        inputs = h.tanh() if before else h
        torch.testing.assert_close(layer.heads[0].kappa["0"]["range"], torch.stack((inputs.amin(0), inputs.amax(0))))
        h = layer(h).detach()


def test_a_spline_on_the_same_grid_is_carried_over_exactly() -> None:
    model, x = made(kp.LowRank(2))
    regrid(model, x)
    expected, weights = model(x).detach(), [p.detach().clone() for p in model.parameters()]
    regrid(model, x)
    torch.testing.assert_close(model(x).detach(), expected, rtol=0, atol=1e-9)
    for parameter, before in zip(model.parameters(), weights, strict=True):
        torch.testing.assert_close(parameter.detach(), before, rtol=0, atol=1e-4)


def test_other_heads_stay() -> None:
    model = kp.Model(kp.rpn([2, 3, 1], kp.Taylor(2)), seed=0, dtype=torch.float64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    regrid(model, torch.rand(50, 2, dtype=torch.float64))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
