"""Networks that are exact for powers and waves."""

import pytest
import torch

import kapsi as kp
from kapsi.recipes import FunctionsHead, RecipeData
from kapsi.recipes.exact_networks import exact_trial
from kapsi.recipes.trials import TrialRows


def uniform(rows: int, inputs: int) -> torch.Tensor:
    return torch.rand(rows, inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


FUNCTIONS = {
    "quotient": ("powers", 1 + 4 * uniform(200, 3), lambda x: x[:, 0] * x[:, 1] / x[:, 2] ** 2),
    "negative product": ("negative powers", 1 + 4 * uniform(100, 2), lambda x: -x[:, 0] * x[:, 1]),
    "pole": ("powers", 0.001 + uniform(200, 1), lambda x: x[:, 0] ** -0.2),
    "logarithm of a quotient": ("logarithms", 1 + 4 * uniform(200, 2), lambda x: (x[:, 0] / x[:, 1] ** 2).log()),
    "wave": ("wave", 2 * uniform(200, 1) - 1, lambda x: (20 * x[:, 0] + 1).sin()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_formulas_are_found_to_rounding(name) -> None:
    kind, x, function = FUNCTIONS[name]
    x, y = (x - x.mean(0)) / x.std(0), function(x)[:, None]
    count = len(x) * 3 // 4
    trial = exact_trial(TrialRows(x[:count], y[:count]), TrialRows(x[count:], y[count:]))
    assert trial is not None
    assert trial.candidate.name == kind
    with torch.no_grad():
        assert torch.allclose(trial.model(x), y, atol=1e-7)


def test_other_functions_have_no_exact_network() -> None:
    x = uniform(80, 1)
    for y in ((x - 0.5).abs(), x.exp() + torch.sin(30 * x.square())):
        assert exact_trial(TrialRows(x[:60], y[:60]), TrialRows(x[60:], y[60:])) is None


def test_functions_end_at_an_exact_network() -> None:
    x = 1 + uniform(100, 2)
    data = RecipeData(x, x[:, :1] / x[:, 1:], kp.MSE(), 0, torch.ones(2, dtype=torch.bool))
    model = FunctionsHead().fit(data)
    assert bool((model(x) - data.y).abs().max() < 1e-7)
