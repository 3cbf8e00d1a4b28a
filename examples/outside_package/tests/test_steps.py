"""The laws of kapsi, and what is special about the function."""

import torch
from kapsi_steps import SoftSteps

import kapsi as kp
from kapsi.testing import check, check_pairs


def test_every_law_of_an_expansion():
    check(SoftSteps)


def test_every_law_of_pairs():
    check_pairs(SoftSteps)


def test_calibration_puts_the_steps_at_the_quantiles():
    spec = kp.rpn([1, 1], expansion=SoftSteps(2))
    model = kp.calibrate(kp.Model(spec, seed=0), torch.arange(101.0).unsqueeze(1))
    positions = model.layers[0].heads[0].kappa["positions"]
    assert torch.equal(positions, torch.tensor([[25.0], [75.0]]))
