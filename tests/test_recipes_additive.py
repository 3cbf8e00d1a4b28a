"""Additive recipes: their splines, penalties and strengths against SciPy and explicit formulas."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.interpolate import BSpline as SciPySpline
from scipy.stats import multivariate_normal

import kapsi as kp
from kapsi.recipes import AdditiveHead, LinearHead, RecipeData, StepsHead, mixture
from kapsi.recipes.additive import breakpoints, greville, quantiles, roughness_root, second_moments
from kapsi.recipes.linear_in_parameters import columns_of
from kapsi.recipes.smoothing import STABLE, evidence, penalty_matrix

F64 = torch.float64


def table(rows=200, seed=0, classes=0) -> RecipeData:
    """Return two smooth inputs, one of five values, one of two, and two indicators."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=g, dtype=F64)
    x[:, 2] = (x[:, 2] * 1.2).round().clamp(-2, 2)
    x[:, 3:] = (x[:, 3:] > 0.5).to(F64)
    signal = torch.stack([torch.sin(2 * x[:, 0]) + 0.5 * x[:, 1] + x[:, 2].abs() + x[:, 4], x[:, 1] - x[:, 3]], 1)
    y = signal + 0.3 * torch.randn(rows, 2, generator=g, dtype=F64)
    y = y - y.mean(0)
    target = torch.cat([y, -y], 1)[:, :classes].argmax(1) if classes else y
    numeric = torch.tensor([True, True, True, True, False, False])
    return RecipeData(x, target, kp.CrossEntropy() if classes else kp.MSE(), classes, numeric)


def reference_columns(recipe: AdditiveHead, data: RecipeData, x: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return columns by SciPy in the order of κ, and the roots of all penalties by explicit loops."""
    parts = recipe.layout(data).parts
    columns: list[np.ndarray] = []
    penalties: list[np.ndarray] = []
    offset = 0
    width = sum(part.functions * len(part.inputs) for part in parts)
    for part in parts:
        count, functions = len(part.inputs), part.functions
        block = np.zeros((len(x), functions, count))
        for i, column in enumerate(part.inputs.tolist()):
            if part.knots is None:
                block[:, 0, i] = x[:, column]
                continue
            knots, d = part.knots[:, i].numpy(), part.degree
            low, high = knots[d], knots[-d - 1]
            inside = np.clip(x[:, column], low, high if d else np.nextafter(high, low))
            block[:, :, i] = np.stack(
                [
                    SciPySpline(knots, row, d)(np.minimum(inside, high - 1e-13 * (high - low)))
                    for row in np.eye(functions)
                ],
                1,
            )
            at = offset + np.arange(functions) * count + i
            if d == 0:
                root = np.diff(np.eye(functions), axis=0)
            else:
                means = np.array([knots[k + 1 : k + d + 1].mean() for k in range(functions)])
                h = np.diff(means)
                root = np.zeros((functions - 2, functions))
                for k in range(functions - 2):
                    left, right = 1 / h[k], 1 / h[k + 1]
                    root[k, k : k + 3] = (
                        np.array([left, -left - right, right]) * 2 * h[k] * h[k + 1] / (h[k] + h[k + 1])
                    )
            wide = np.zeros((len(root), width))
            wide[:, at] = root
            penalties.append(wide)
        columns.append(block.reshape(len(x), -1))
        offset += functions * count
    return np.concatenate(columns, 1), penalties


@pytest.mark.parametrize("recipe", [AdditiveHead(l2=1.0), AdditiveHead(degree=1, l2=1.0), StepsHead(l2=1.0)])
def test_columns_and_roughness_equal_scipys_splines_and_explicit_differences(recipe) -> None:
    data = table()
    x = torch.cat([data.x, data.x * 3])
    expected, penalties = reference_columns(recipe, data, x.numpy())
    found = next(columns_of(recipe.model(data), x)())
    np.testing.assert_allclose(found, expected, atol=1e-9)
    blocks = recipe.layout(data).blocks(data)
    strength = torch.zeros(1 + max(int(block.factor.max()) for block in blocks), dtype=F64)
    for i, wide in enumerate(penalties):
        one = strength.clone()
        one[i] = 1
        matrix = penalty_matrix(torch.ones(expected.shape[1], dtype=F64), blocks, one)
        np.testing.assert_allclose(matrix - STABLE * torch.eye(len(matrix)), wide.T @ wide, atol=1e-9)


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_fit_solves_the_penalized_normal_equations(outputs) -> None:
    data = table(120)
    weight = torch.rand(120, generator=torch.Generator().manual_seed(5), dtype=F64) + 0.1
    data = replace(data, y=data.y[:, :outputs], weight=weight / weight.mean())
    recipe = AdditiveHead(l2=2.0)
    model = recipe.fit(data)
    phi = torch.from_numpy(reference_columns(recipe, data, data.x.numpy())[0])
    share = weight / weight.sum()
    q = torch.block_diag(2.0 * recipe.penalty(recipe.model(data), data), torch.zeros(1, 1, dtype=F64))
    phi = torch.cat([phi, torch.ones(120, 1, dtype=F64)], 1)
    theta = torch.linalg.solve(phi.T @ (share[:, None] * phi) + q, phi.T @ (share[:, None] * data.y))
    torch.testing.assert_close(model(data.x), phi @ theta, rtol=0, atol=1e-6)


def test_strengths_maximize_the_evidence() -> None:
    data = table(150)
    data = replace(data, y=data.y[:, :1])
    recipe = AdditiveHead()
    model = recipe.model(data)
    phi = next(columns_of(model, data.x)())
    moments, blocks = second_moments(model, data), recipe.layout(data).blocks(data)
    strength = evidence(moments, blocks, 300)
    rows = len(data.x)
    # The rows in the space of contrasts, where the constant has no part.
    space = np.linalg.svd(np.ones((1, rows)))[2][1:]
    y, columns = space @ data.y[:, 0].numpy(), space @ phi.numpy()

    def log_likelihood(values: torch.Tensor) -> float:
        prior = np.linalg.inv(penalty_matrix(moments.columns.diagonal(), blocks, values).numpy())
        shape = np.eye(rows - 1) + columns @ prior @ columns.T / rows
        noise = y @ np.linalg.solve(shape, y) / (rows - 1)
        return float(multivariate_normal(np.zeros(rows - 1), noise * shape).logpdf(y))

    best = log_likelihood(strength)
    start = evidence(moments, blocks, 0)
    assert best > log_likelihood(start) + 1
    for i in range(len(strength)):
        for factor in (0.5, 2.0):
            other = strength.clone()
            other[i] *= factor
            assert log_likelihood(other) <= best + 5e-3, (i, factor)


@pytest.mark.parametrize("recipe", [AdditiveHead(l2=0.5), StepsHead(l2=0.5)])
@pytest.mark.parametrize("classes", [0, 3])
def test_integer_weights_equal_repeated_rows(recipe, classes) -> None:
    data = table(90, classes=classes)
    times = torch.arange(90) % 3 + 1
    recipe = replace(recipe, intervals=6, rounds=0)
    weighted = recipe.fit(replace(data, weight=times / times.double().mean()))
    repeated = recipe.fit(data.take(torch.arange(90).repeat_interleave(times)))
    torch.testing.assert_close(weighted(data.x), repeated(data.x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("recipe", [AdditiveHead(), StepsHead()])
def test_functions_are_constant_beyond_the_rows_and_survive_a_file(recipe, tmp_path) -> None:
    data = table()
    numbers = torch.tensor([True, True, True, False, False, False])
    model = recipe.fit(data)
    ends = torch.stack([data.x.amin(0), data.x.amax(0)])
    far = torch.where(numbers, ends * 50, ends)
    torch.testing.assert_close(model(far), model(ends), rtol=0, atol=1e-10)
    kp.save(model, tmp_path / "additive.safetensors")
    assert torch.equal(kp.load(tmp_path / "additive.safetensors")(data.x), model(data.x))
    line = LinearHead().fit(data)
    both = mixture([model, line], [0.25, 0.75])
    torch.testing.assert_close(both(data.x), 0.25 * model(data.x) + 0.75 * line(data.x), rtol=0, atol=1e-10)


def r2(model: kp.Model, data: RecipeData) -> float:
    y = data.y
    return float(1 - (model(data.x).detach() - y).square().sum() / (y - y.mean(0)).square().sum())


def test_curves_are_found_and_lines_stay_lines() -> None:
    train, test = table(400, seed=1), table(400, seed=2)
    additive, line = AdditiveHead().fit(train), LinearHead().fit(train)
    assert r2(additive, test) > max(0.85, r2(line, test) + 0.1)
    linear = replace(train, y=train.x[:, :2] @ torch.tensor([[2.0], [-1.0]], dtype=F64))
    model = AdditiveHead().fit(linear)
    torch.testing.assert_close(model(train.x), linear.y - 0.0, rtol=0, atol=1e-3)


def test_thresholds_are_found_by_steps() -> None:
    def jumps(seed: int) -> RecipeData:
        g = torch.Generator().manual_seed(seed)
        x = torch.rand(500, 3, generator=g, dtype=F64)
        y = 3.0 * (x[:, :1] > 0.3) - 2.0 * (x[:, 1:2] > 0.8) + 0.1 * torch.randn(500, 1, generator=g, dtype=F64)
        return RecipeData(x, y, kp.MSE(), 0, torch.ones(3, dtype=torch.bool))

    train, test = jumps(0), jumps(1)
    assert r2(StepsHead().fit(train), test) > 0.95 > r2(LinearHead().fit(train), test) + 0.1


def test_heavy_tails_stay_in_the_range_of_the_targets() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(300, 2, generator=g, dtype=F64).mul(3).exp()
    y = x.log().sum(1, keepdim=True) + torch.randn(300, 1, generator=g, dtype=F64)
    data = RecipeData((x - x.mean(0)) / x.std(0), y - y.mean(), kp.MSE(), 0, torch.ones(2, dtype=torch.bool))
    model = AdditiveHead().fit(data)
    assert r2(model, data) > 0.8
    out = model(torch.tensor([[1e6, 1e6], [-1e6, -1e6]], dtype=F64)).detach()
    assert float(out.abs().max()) < 2 * float(data.y.abs().max())


@pytest.mark.parametrize("classes", [2, 3])
def test_classes_are_predicted_better_than_by_lines(classes) -> None:
    data = table(300, classes=classes)
    logits = AdditiveHead(l2=1.0).fit(data)(data.x).detach()
    line = LinearHead(l2=1e-3).fit(data)(data.x).detach()
    assert float(kp.CrossEntropy().rows(logits, data.y).mean()) < float(kp.CrossEntropy().rows(line, data.y).mean())


def test_an_input_of_few_values_has_a_node_at_each() -> None:
    data = table()
    few = AdditiveHead().layout(data).parts[1]
    assert few.inputs.tolist() == [2]
    assert few.degree == 1
    assert few.knots is not None
    assert few.knots[1:-1, 0].tolist() == [-2.0, -1.0, 0.0, 1.0, 2.0]
    plain = AdditiveHead().layout(data).parts[0]
    assert (plain.inputs.tolist(), plain.knots) == ([3, 4, 5], None)
    assert breakpoints(data.x[:, 3], None, 10, 3)[0] is None


@pytest.mark.parametrize("seed", range(5))
def test_quantiles_are_distinct_and_frequent_values_do_not_take_all_knots(seed) -> None:
    g = torch.Generator().manual_seed(seed)
    weight = torch.rand(30, generator=g, dtype=F64) ** 8 + 1e-6
    for parts in (2, 5, 12, 29):
        index = quantiles(weight, parts)
        assert (int(index[0]), int(index[-1]), len(index)) == (0, 29, parts + 1)
        assert int(index.diff().min()) >= 1
    # Half of all rows have the first value: the others share the rest of the knots.
    inner = quantiles(torch.tensor([90.0] + [1.0] * 90, dtype=F64), 10)[1:-1]
    assert int(inner.diff().max()) <= 14


def test_lines_have_no_roughness_on_uneven_knots() -> None:
    knots = torch.tensor([-3.0, -2, -1, 0.0, 0.1, 5.0, 5.5, 7, 8, 9], dtype=F64)[:, None]
    points = greville(knots, 3).T
    for order in (1, 2):
        root = roughness_root(points, order)
        assert float((root @ torch.ones_like(points)[..., None]).abs().max()) < 1e-12
    assert float((roughness_root(points, 2) @ points[..., None]).abs().max()) < 1e-12


def test_reasons_against() -> None:
    data = table()
    assert AdditiveHead().reason_against(data) is None
    assert "no numeric" in str(AdditiveHead().reason_against(replace(data, numeric=torch.zeros(6, dtype=torch.bool))))
    assert "301 numeric" in str(
        AdditiveHead().reason_against(
            replace(data, x=torch.zeros(3, 301, dtype=F64), numeric=torch.ones(301, dtype=torch.bool))
        )
    )
