"""The functions head."""

import math
from dataclasses import replace

import pytest
import torch

import kapsi as kp
from kapsi.recipes import ConstantHead, FunctionsHead, LinearHead, RecipeData, functions, mixture, trials
from kapsi.testing.cases import seeded

QUICK = FunctionsHead(networks=("kan",), starts=1)


def table(rows: int = 80, inputs: int = 2, noise: float = 0.0, targets: int = 1) -> RecipeData:
    x = 2 * torch.rand(rows, inputs, dtype=torch.float64, generator=seeded(0)) - 1
    y = torch.sin(math.pi * x[:, :1]) * torch.sinh(math.pi * x[:, -1:]) / math.sinh(math.pi)
    y = y + noise * torch.randn(y.shape, dtype=y.dtype, generator=seeded(1))
    x = (x - x.mean(0)) / x.std(0)
    return RecipeData(x, (y / y.std()).expand(-1, targets), kp.MSE(), 0, torch.ones(inputs, dtype=torch.bool))


@pytest.mark.slow
def test_a_function_of_two_inputs_is_found() -> None:
    """Held-out error of kapsi's network [2, 5, 1] of the README, median of five seeds: 7e-4 of the deviation."""
    data = table(400)
    crossed = FunctionsHead().cross_fit(data, data.folds(5))
    assert float((crossed.outputs - data.y).square().mean()) < 1e-6


@pytest.fixture(scope="module")
def fitted() -> tuple[RecipeData, kp.Model]:
    data = table()
    return data, QUICK.fit(data, 1)


def test_a_fit_is_repeated_saved_and_summed(fitted, tmp_path) -> None:
    data, model = fitted
    state = torch.get_rng_state()
    assert torch.equal(model(data.x), QUICK.fit(data, 1)(data.x))
    assert torch.equal(torch.get_rng_state(), state)
    assert len(model.layers) == 1
    assert bool((model(data.x) - data.y).square().mean() < 1e-4)
    kp.save(model, tmp_path / "function.safetensors")
    assert torch.equal(kp.load(tmp_path / "function.safetensors")(data.x), model(data.x))
    linear = LinearHead().fit(data)
    both = mixture([model, linear], [0.5, 2.0])
    assert torch.allclose(both(data.x), 0.5 * model(data.x) + 2 * linear(data.x))


def test_predictions_do_not_run_away(fitted) -> None:
    data, model = fitted
    low, high = data.x.aminmax(dim=0)
    margin = (high - low) / 10
    assert torch.allclose(model(data.x * 50), model((data.x * 50).clamp(low - margin, high + margin)))


def test_held_out_targets_have_no_influence() -> None:
    data = table(60)
    folds = data.folds(2)
    y = data.y.clone()
    y[folds[0][1]] = 5.0
    changed = RecipeData(data.x, y, data.loss, 0, data.numeric)
    one, two = (QUICK.cross_fit(rows, folds).outputs for rows in (data, changed))
    assert torch.equal(one[folds[0][1]], two[folds[0][1]])
    assert not torch.allclose(one[folds[1][1]], two[folds[1][1]])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (table(300), None),
        (table(300, noise=0.5), "the targets have noise"),
        (table(300, inputs=10), "at most 9 inputs, not 10"),
        (table(300, targets=4), "at most 3 targets, not 4"),
        (table(50), "30 rows for each input"),
        (table(5_001), "at most 5,000 rows"),
    ],
)
def test_unsuitable_rows_are_refused_with_a_reason(data, reason) -> None:
    given = FunctionsHead().reason_against(data)
    assert given is None if reason is None else reason in given


def test_a_quadratic_needs_no_network() -> None:
    data = table(200)
    noise = 0.05 * torch.randn(data.y.shape, dtype=torch.float64, generator=seeded(3))
    quadratic = RecipeData(data.x, data.x[:, :1] * data.x[:, 1:] - data.x[:, :1] + noise, data.loss, 0, data.numeric)
    assert FunctionsHead().reason_against(quadratic) == "a quadratic polynomial fits as well"


def test_classes_are_refused() -> None:
    data = table()
    classes = RecipeData(data.x, (data.y[:, 0] > 0).long(), kp.CrossEntropy(), 2, data.numeric)
    assert "squared errors, not cross_entropy" in FunctionsHead().reason_against(classes)


@pytest.mark.parametrize("noise", [0.1, 0.3, 1.0])
def test_the_share_of_noise_is_found(noise) -> None:
    data = table(600)
    errors = noise * torch.randn(data.y.shape, dtype=torch.float64, generator=seeded(3))
    share = functions.residual_share(data.x, data.y + errors)
    assert share == pytest.approx(noise**2 / (1 + noise**2), rel=0.25)


@pytest.mark.parametrize(("noise", "low"), [(0.0, True), (1.0, False)])
def test_more_rows_tell_a_rough_function_from_noise(monkeypatch, noise, low) -> None:
    monkeypatch.setattr(functions, "NOISE_ROWS", 100)
    x = torch.rand(200, 2, dtype=torch.float64, generator=seeded(0))
    y = torch.sin(20 * x[:, :1]) * torch.cos(20 * x[:, 1:]) + noise * torch.randn(200, 1, generator=seeded(1)).double()
    x = (x - x.mean(0)) / x.std(0)
    assert functions.residual_share(x, y) > 0.3
    assert (functions.residual_share(x, y, 0.1) < 0.15) == low


def test_fits_that_fail_are_left_out(monkeypatch) -> None:
    data = table()

    def failing(*_: object) -> None:
        raise kp.KapsiError("the loss is not finite")

    monkeypatch.setattr(trials, "train", failing)
    assert torch.equal(QUICK.fit(data)(data.x), ConstantHead().fit(data)(data.x))


@pytest.mark.parametrize("networks", [(), ("kan", "kan"), ("tree",)])
def test_wrong_networks_are_refused(networks) -> None:
    with pytest.raises(kp.SpecError, match="networks"):
        FunctionsHead(networks=networks)


def test_a_network_far_behind_is_dropped(monkeypatch) -> None:
    data = table(60)
    quick = {kind: replace(c, training=replace(c.training, epochs=3)) for kind, c in functions.NETWORKS.items()}
    monkeypatch.setattr(functions, "NETWORKS", quick)
    real = trials.TrialRows.error
    monkeypatch.setattr(
        trials.TrialRows, "error", lambda self, model: real(self, model) * (1e6 if len(model.spec.widths) == 4 else 1)
    )
    assert FunctionsHead(starts=1).cross_fit(data, data.folds(2)).recipe.networks == ("kan",)
