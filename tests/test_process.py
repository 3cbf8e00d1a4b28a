"""Processes with values from data: clamps and normal scores."""

import numpy as np
import pytest
import torch
from scipy.stats import norm

import kapsi as kp
from kapsi import process
from kapsi.process import normal_scores


def module(process: kp.Process, **values: torch.Tensor) -> torch.nn.Module:
    features = next(iter(values.values())).shape[0]
    built = process.module(features, None, torch.float64)
    built.load_state_dict(values)
    return built


X = torch.randn(200, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2


def test_a_clamp_equals_numpy() -> None:
    low, high = torch.tensor([-1.0, 0.0, -9.0]).double(), torch.tensor([1.0, 0.5, 9.0]).double()
    np.testing.assert_array_equal(
        module(kp.Clamp(), low=low, high=high)(X), np.clip(*(t.numpy() for t in (X, low, high)))
    )


@pytest.mark.parametrize("count", [2, 3, 8, 9, 200])
def test_normal_scores_interpolate_linearly(count) -> None:
    knots = torch.randn(3, count, generator=torch.Generator().manual_seed(1), dtype=torch.float64).sort(1).values
    scores = torch.randn(3, count, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    values = module(kp.NormalScores(count), knots=knots, scores=scores)(X)
    for i in range(3):
        np.testing.assert_allclose(values[:, i], np.interp(X[:, i], knots[i], scores[i]), atol=1e-12)


@pytest.mark.parametrize("rows", [50, 3_000])
def test_outputs_of_normal_scores_are_normal_quantiles(rows) -> None:
    x = torch.randn(rows, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64).exp()
    knots, scores = normal_scores(x, 200)
    values = module(kp.NormalScores(), knots=knots, scores=scores)(x)
    for i in range(2):
        rank = x[:, i].argsort().argsort().double().numpy()
        expected = norm.ppf((rank + 0.5) / rows)
        np.testing.assert_allclose(values[:, i], expected, atol=1e-9 if rows <= 200 else 0.05)
        assert float(np.abs(values[:, i].numpy() - expected).mean()) < 0.01


def test_ties_have_the_score_of_their_mean_rank() -> None:
    x = torch.tensor([[0.0], [0.0], [0.0], [5.0], [9.0], [9.0]]).double()
    knots, scores = normal_scores(torch.cat([x, torch.full_like(x, 7.0)], 1), 16)
    values = module(kp.NormalScores(16), knots=knots, scores=scores)(torch.cat([x, torch.full_like(x, -2.0)], 1))
    np.testing.assert_allclose(values[:, 0], norm.ppf(np.array([1.5, 1.5, 1.5, 3.5, 5, 5]) / 6), atol=1e-12)
    assert not values[:, 1].any()


def test_models_with_values_from_data_are_saved(tmp_path) -> None:
    head = kp.HeadSpec(kp.Taylor(2), before=(kp.Clamp(), kp.NormalScores(20)))
    model = kp.Model(kp.ModelSpec((3, 1), (kp.LayerSpec((head,)),)), seed=0, dtype=torch.float64)
    before = model.layers[0].heads[0].before
    before[0].load_state_dict({"low": X.quantile(0.2, 0), "high": X.quantile(0.8, 0)})
    knots, scores = normal_scores(X, 20)
    before[1].load_state_dict({"knots": knots, "scores": scores})
    kp.save(model, tmp_path / "model.kapsi")
    assert torch.equal(kp.load(tmp_path / "model.kapsi")(X), model(X))


@pytest.mark.parametrize(
    ("rows", "knots", "values"), [(1, 5, 9), (30, 4, 9), (300, 20, 1000), (300, 20, 7), (40, 60, 1000)]
)
def test_columns_have_the_knots_that_they_have_alone(rows, knots, values, monkeypatch) -> None:
    x = torch.randint(values, (rows, 7), generator=torch.Generator().manual_seed(0)).double() ** 2
    x[:, 3] = 2.0
    alone = [normal_scores(column, knots) for column in x.split(1, 1)]
    monkeypatch.setattr(process, "NUMBERS_AT_ONCE", 2 * rows)
    for found, parts in zip(normal_scores(x, knots), zip(*alone, strict=True), strict=True):
        assert torch.equal(found, torch.cat(parts))


def test_scores_are_normal_quantiles_of_mean_ranks() -> None:
    x = torch.tensor([[3.0], [1.0], [1.0], [2.0]], dtype=torch.float64)
    knots, scores = normal_scores(x, 4)
    assert knots.tolist() == [[1.0, 2.0, 3.0, 3.0]]
    expected = torch.special.ndtri(torch.tensor([1.0, 2.5, 3.5, 3.5], dtype=torch.float64) / 4)
    torch.testing.assert_close(scores[0], expected, rtol=1e-15, atol=0)
