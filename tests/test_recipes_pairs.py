"""The recipe of pairs: the choice of pairs, the penalty of surfaces, and fits against explicit formulas."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import kapsi as kp
from kapsi.expansion import PairSplines
from kapsi.recipes import AdditiveHead, LinearHead, PairsHead, RecipeData, mixture, pairs
from kapsi.recipes.linear_in_parameters import columns_of
from kapsi.recipes.pairs import bin_codes, significant_pairs

F64 = torch.float64


def table(rows=400, seed=0, inputs=5, classes=0, noise=0.3) -> RecipeData:
    """Return x₀x₁ and x₂ times an indicator, beside a curve."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=g, dtype=F64)
    x[:, -1] = (x[:, -1] > 0).to(F64)
    y = x[:, :1] * x[:, 1:2] + x[:, 2:3] * (2 * x[:, -1:] - 1) + torch.sin(x[:, 1:2])
    y = y + noise * torch.randn(rows, 1, generator=g, dtype=F64)
    numeric = torch.ones(inputs, dtype=torch.bool)
    numeric[-1] = False
    if classes:
        return RecipeData(x, (y[:, 0] > 0).long(), kp.CrossEntropy(), classes, numeric)
    return RecipeData(x, y - y.mean(), kp.MSE(), 0, numeric)


def chosen(model: kp.Model) -> set[tuple[int, ...]]:
    """Return the pairs of a model."""
    head = model.layers[0].heads[0]
    kappa = head.spec.expansion
    parts = kappa.parts if isinstance(kappa, kp.Extended) else (kappa,)
    found: set[tuple[int, ...]] = set()
    for i, part in enumerate(parts):
        if isinstance(part, PairSplines):
            found |= {tuple(sorted(pair)) for pair in head.kappa[str(i)]["pairs"].T.tolist()}
    return found


def r2(model: kp.Model, data: RecipeData) -> float:
    y = data.y
    return float(1 - (model(data.x).detach() - y).square().sum() / (y - y.mean(0)).square().sum())


def test_the_interacting_pairs_are_chosen() -> None:
    model = PairsHead().fit(table())
    assert {(0, 1), (2, 4)} <= chosen(model)
    assert len(chosen(model)) <= 4
    test = table(seed=1)
    assert r2(model, test) > 0.9 > 0.5 > r2(AdditiveHead().fit(table()), test)


def test_noise_has_few_significant_pairs_and_at_most_one_in_the_model() -> None:
    count = 0
    for seed in range(10):
        data = table(300, seed, inputs=8)
        noise = torch.randn(300, 1, generator=torch.Generator().manual_seed(100 + seed), dtype=F64)
        count += len(significant_pairs(data, noise, torch.arange(8)))
    assert count <= 5  # of 280
    linear = table(300)
    linear = replace(
        linear, y=linear.x[:, :1] + 0.5 * torch.randn(300, 1, generator=torch.Generator().manual_seed(3), dtype=F64)
    )
    assert len(chosen(PairsHead().fit(linear))) <= 1


@pytest.mark.parametrize("outputs", [1, 2])
def test_scores_of_pairs_equal_explicit_sums_over_cells(outputs, monkeypatch) -> None:
    monkeypatch.setattr(pairs, "CLEAR", -torch.inf)
    data = table(200)
    g = torch.Generator().manual_seed(1)
    weight = torch.rand(200, generator=g, dtype=F64) + 0.5
    data = replace(data, weight=weight / weight.mean())
    rest = torch.randn(200, outputs, generator=g, dtype=F64)
    codes = [bin_codes(data, i).numpy() for i in range(5)]
    w, r = data.weight.numpy(), rest.numpy()
    score: dict[tuple[int, int], float] = {}

    def gain(code: np.ndarray) -> float:
        return sum(
            float((w[code == cell] @ r[code == cell, o]) ** 2 / w[code == cell].sum())
            for cell in np.unique(code)
            for o in range(outputs)
        )

    for i, j in itertools.combinations(range(5), 2):
        joint = codes[i] * 100 + codes[j]
        freedom = outputs * (len(np.unique(joint)) - codes[i].max() - 1 - codes[j].max() - 1 + 1)
        score[i, j] = (gain(joint) - gain(codes[i]) - gain(codes[j]) - freedom) / (2 * freedom) ** 0.5
    expected = sorted(score, key=lambda pair: -score[pair])
    assert significant_pairs(data, rest, torch.arange(5)) == expected
    monkeypatch.setattr(pairs, "CLEAR", score[expected[4]] + 1e-9)
    assert significant_pairs(data, rest, torch.arange(5)) == expected[:4]


@pytest.mark.parametrize("sizes", [(2, 2), (2, 5), (4, 3)])
def test_the_penalty_of_a_surface_is_a_sum_of_squared_differences(sizes) -> None:
    c = np.random.default_rng(0).normal(size=sizes)
    one = pairs.ALONE**2 * ((np.diff(c, axis=0) ** 2).sum() + (np.diff(c, axis=1) ** 2).sum())
    mixed = (c[1:, 1:] - c[:-1, 1:] - c[1:, :-1] + c[:-1, :-1]) ** 2
    root = pairs._surface_root(*sizes).numpy()
    assert root.shape == (c.size - 1, c.size)
    assert ((root @ c.ravel()) ** 2).sum() == pytest.approx(one + mixed.sum())


@pytest.mark.parametrize("used", [0.3, 8.0])
def test_a_fit_solves_the_normal_equations_with_a_penalty_of_each_pair(used, monkeypatch) -> None:
    monkeypatch.setattr(pairs, "USED", used)
    data = table(150)
    weight = torch.rand(150, generator=torch.Generator().manual_seed(5), dtype=F64) + 0.1
    data = replace(data, weight=weight / weight.mean())
    recipe = PairsHead(l2=2.0)
    model, q = recipe.design(data)
    head = model.layers[0].heads[0]
    assert chosen(model)
    # The rows and columns of each pair: a multiple of its penalty, and nothing between pairs and inputs.
    at = 0
    for part in head.spec.expansion.parts:
        step = part.factors(5)[1] if isinstance(part, PairSplines) else part.out_features(5)
        for _ in range(part.pairs if isinstance(part, PairSplines) else 1):
            block, others = q[at : at + step, at : at + step], q[at : at + step].clone()
            others[:, at : at + step] = 0
            assert float(others.abs().max()) == 0.0
            if isinstance(part, PairSplines):
                root = pairs._surface_root(*(count + 1 for count in part.intervals))
                ratio = float(block.diagonal().sum() / (root.T @ root).diagonal().sum())
                torch.testing.assert_close(block, ratio * (root.T @ root), rtol=1e-3, atol=1e-6)
            at += step
    phi = torch.cat([next(columns_of(model, data.x)()), torch.ones(150, 1, dtype=F64)], 1)
    share = weight / weight.sum()
    penalty = torch.block_diag(2.0 * q, torch.zeros(1, 1, dtype=F64))
    theta = torch.linalg.solve(phi.T @ (share[:, None] * phi) + penalty, phi.T @ (share[:, None] * data.y))
    torch.testing.assert_close(recipe.fit(data)(data.x), phi @ theta, rtol=0, atol=1e-5)


def test_friedmans_function() -> None:
    def rows(seed: int) -> RecipeData:
        g = torch.Generator().manual_seed(seed)
        x = torch.rand(500, 10, generator=g, dtype=F64)
        y = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
        y = y[:, None] + torch.randn(500, 1, generator=g, dtype=F64)
        return RecipeData(x, (y - 14.4) / 5, kp.MSE(), 0, torch.ones(10, dtype=torch.bool))

    train, test = rows(0), rows(1)
    model = PairsHead().fit(train)
    assert chosen(model) == {(0, 1)}
    assert r2(model, test) > 0.94 > r2(AdditiveHead().fit(train), test)


def test_functions_are_constant_beyond_the_rows_and_survive_a_file(tmp_path) -> None:
    data = table()
    model = PairsHead(l2=1.0).fit(data)
    assert chosen(model)
    ends = torch.stack([data.x.amin(0), data.x.amax(0)])
    far = torch.where(data.numeric, ends * 50, ends)
    torch.testing.assert_close(model(far), model(ends), rtol=0, atol=1e-10)
    kp.save(model, tmp_path / "pairs.safetensors")
    assert torch.equal(kp.load(tmp_path / "pairs.safetensors")(data.x), model(data.x))
    line = LinearHead().fit(data)
    both = mixture([model, line], [0.5, 0.25])
    torch.testing.assert_close(both(data.x), 0.5 * model(data.x) + 0.25 * line(data.x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("classes", [2, 3])
def test_classes_that_depend_on_products(classes) -> None:
    train, test = table(400, classes=classes), table(400, seed=1, classes=classes)
    model = PairsHead(l2=1.0).fit(train)
    assert {(0, 1), (2, 4)} <= chosen(model)
    right = [(m(test.x).argmax(1) == test.y).double().mean() for m in (model, AdditiveHead(l2=1.0).fit(train))]
    assert float(right[0]) > max(0.85, float(right[1]) + 0.1)


def test_many_inputs_are_reduced_to_the_strongest(monkeypatch) -> None:
    monkeypatch.setattr(pairs, "RANKED", 4)
    data = table(400, inputs=9)
    data = replace(data, y=data.y + 2 * data.x[:, :1] + data.x[:, 1:3].sum(1, keepdim=True) + data.x[:, 8:])
    assert (0, 1) in chosen(PairsHead(l2=1.0).fit(data))
    fitted = data.x[:, [0]] + 3 * data.x[:, [5]].square()
    assert {0, 5} <= set(pairs.strongest_inputs(data, fitted).tolist())
    assert len(pairs.strongest_inputs(data, fitted)) == 4


def test_reasons_against() -> None:
    data = table()
    assert PairsHead().reason_against(data) is None
    assert PairsHead().reason_against(replace(data, x=data.x[:, :1], numeric=data.numeric[:1])) == "there is one input"


@pytest.mark.parametrize("intervals", [(0, 2), (2, 2000)])
def test_intervals_of_pair_splines(intervals) -> None:
    with pytest.raises(kp.SpecError, match=r"expected two numbers from 1 to 1,000"):
        PairSplines(intervals=intervals)


def test_pair_splines_refuse_inputs_that_do_not_exist() -> None:
    head = kp.Head(3, 1, kp.HeadSpec(PairSplines(pairs=1)))
    with pytest.raises(kp.SpecError, match="from 0 to 2"):
        head.assign("expansion", pairs=[[0], [3]])
    picked = kp.Head(3, 1, kp.HeadSpec(kp.expansion.SelectedInputs(kp.Identity())))
    with pytest.raises(kp.SpecError, match="from 0 to 2"):
        picked.assign("expansion", selection=[-1])
