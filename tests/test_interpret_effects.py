"""Effects, importances, interactions and contributions: known functions, and runs of tables."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch

import kapsi as kp
from kapsi.data.tabular import write_table
from kapsi.recipes import Auto
from kapsi.tables import RunConfig, TableConfig, fit_table


class Known(torch.nn.Module):
    """A known function of the columns of its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(*x.unbind(-1)).unsqueeze(-1)


ROWS = np.random.default_rng(0).random((400, 3))
ADDITIVE = Known(lambda a, b, c: torch.sin(6 * a) + 2 * b**2 + 0 * c)
PRODUCT = Known(lambda a, b, c: a * b + c)


def test_effects_of_a_sum_are_its_terms() -> None:
    effects = kp.interpret.effects(ADDITIVE, ROWS)
    for name, term, x in (("x1", lambda x: np.sin(6 * x), ROWS[:, 0]), ("x2", lambda x: 2 * x**2, ROWS[:, 1])):
        effect = effects[name]
        assert effect.exact
        assert np.array_equal(effect.low, effect.high)
        centered = term(effect.points) - term(x).mean()
        assert effect.values[:, 0] == pytest.approx(centered, abs=1e-3)
        assert effect.at(x).mean() == pytest.approx(0, abs=1e-12)
        assert effect.counts.sum() == 400
    assert abs(effects["x3"].values).max() < 1e-12


def test_the_effect_in_a_product_is_its_main_effect() -> None:
    effect = kp.interpret.effects(PRODUCT, ROWS, columns=["x1"])["x1"]
    assert not effect.exact
    true = (effect.points - ROWS[:, 0].mean()) * ROWS[:, 1].mean()
    assert effect.values[:, 0] == pytest.approx(true, abs=0.05)
    inside = (effect.low[:, 0] <= true) & (true <= effect.high[:, 0])
    assert inside.mean() > 0.8
    again = kp.interpret.effects(PRODUCT, ROWS, columns=["x1"])["x1"]
    assert np.array_equal(effect.low, again.low)


def test_importances_of_a_sum_are_shares_of_the_variance() -> None:
    found = kp.interpret.importances(ADDITIVE, ROWS)
    assert [one.column for one in found] == ["x1", "x2", "x3"]
    first, second = np.sin(6 * ROWS[:, 0]).var(), (2 * ROWS[:, 1] ** 2).var()
    assert found[0].share == pytest.approx(first / (first + second), abs=0.05)
    assert sum(one.share for one in found) == pytest.approx(1)
    assert found[0].increase is None


def test_interactions_are_those_of_the_function() -> None:
    assert kp.interpret.interactions(ADDITIVE, ROWS) == []
    (pair,) = kp.interpret.interactions(PRODUCT, ROWS)
    assert set(pair.columns) == {"x1", "x2"}
    p, q = pair.points
    true = (p - ROWS[:, 0].mean())[:, np.newaxis] * (q - ROWS[:, 1].mean())
    assert pair.values[..., 0] == pytest.approx(true, abs=0.02)


@pytest.mark.parametrize("function", [ADDITIVE, PRODUCT], ids=["sum", "product"])
def test_contributions_add_up(function) -> None:
    found = kp.interpret.contributions(function, ROWS[:20], background=ROWS)
    assert found.base + found.values.sum(1) == pytest.approx(found.predictions, abs=1e-9)
    assert found.predictions == pytest.approx(function(torch.from_numpy(ROWS[:20])).numpy(), abs=1e-12)


def test_contributions_of_a_sum_are_its_effects() -> None:
    found = kp.interpret.contributions(ADDITIVE, ROWS, background=ROWS[:150])
    term = 2 * ROWS[:, 1] ** 2
    assert found.values[:, 1, 0] == pytest.approx(term - term[:150].mean(), abs=1e-9)


def test_contributions_of_a_product_are_its_shapley_values() -> None:
    # φ₁ = ½ E (x₁ − b₁)(x₂ + b₂) over the background b, without its mean over the background.
    rows, background = ROWS[:5], ROWS[:12]
    found = kp.interpret.contributions(PRODUCT, rows, background=background, samples=12)
    a, b = background[:, 0], background[:, 1]
    shapley = 0.5 * ((rows[:, :1] - a) * (rows[:, 1:2] + b)).mean(1)
    center = 0.5 * ((a[:, np.newaxis] - a) * (b[:, np.newaxis] + b)).mean()
    assert found.values[:, 0, 0] == pytest.approx(shapley - center, abs=1e-12)


def test_rows_and_columns_are_checked() -> None:
    with pytest.raises(kp.DataError, match="needs rows="):
        kp.interpret.effects(PRODUCT)
    with pytest.raises(kp.DataError, match="no column 'z'; it has x1, x2, x3"):
        kp.interpret.effects(PRODUCT, ROWS, columns=["z"])
    with pytest.raises(kp.DataError, match="expected a run"):
        kp.interpret.effects(3, ROWS)


# ------------------------------------------------------------------------------------------------ tables


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(1)
    number = np.where(rng.random(120) < 0.1, np.nan, rng.random(120))
    word = rng.choice(["red", "green", "blue"], 120)
    day = np.array([f"2024-{1 + i % 12:02d}-{1 + i % 28:02d}" for i in range(120)])
    y = 3 * np.nan_to_num(number, nan=0.5) + 2.0 * (word == "red") + 0.01 * rng.random(120)
    return {"number": number, "word": word, "day": day, "y": y, "label": np.where(y > 2, "high", "low")}


@pytest.fixture(scope="module")
def run(table, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    columns = {name: values for name, values in table.items() if name != "label"}
    write_table(folder / "t.csv", columns)
    fit_table(folder / "t.csv", RunConfig(TableConfig("y"), recipe=Auto(heads=("linear",))), folder / "run")
    return kp.load_run(folder / "run")


def test_a_run_explains_itself_from_the_rows_that_it_keeps(run, table) -> None:
    effects = kp.interpret.effects(run)
    assert list(effects) == ["number", "word", "day"]
    number, word = effects["number"], effects["word"]
    assert number.exact
    assert word.levels == ("blue", "green", "red")
    red = word.values[2, 0] - word.values[0, 0]
    assert red == pytest.approx(2, abs=0.1)
    assert word.counts @ word.values[:, 0] == pytest.approx(0, abs=1e-9)
    slope = np.polyfit(number.points, number.values[:, 0], 1)[0]
    assert slope == pytest.approx(3, abs=0.2)
    assert number.missing.rows == np.isnan(table["number"]).sum()
    known = number.at(table["number"][~np.isnan(table["number"])])[:, 0].sum()
    assert known + number.missing.rows * number.missing.values[0] == pytest.approx(0, abs=1e-9)
    assert effects["day"].kind == "date"


def test_permutations_are_of_held_out_rows(run) -> None:
    found = {one.column: one for one in kp.interpret.importances(run)}
    assert found["number"].held_out
    assert found["number"].increase > 0.3 > abs(found["day"].increase)
    assert run.rows.held_out.sum() == run.manifest["scored_rows"]


def test_contributions_of_a_run_add_up_to_its_predictions(run, table) -> None:
    rows = {name: table[name][:10] for name in ("number", "word", "day")}
    found = kp.interpret.contributions(run, rows)
    assert found.columns == ("number", "word", "day")
    assert (found.base + found.values.sum(1))[:, 0] == pytest.approx(run.predict(rows), abs=1e-9)


def test_an_estimator_is_explained_with_rows(table) -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({name: table[name] for name in ("number", "word")})
    fitted = kp.RPNClassifier(heads=["linear"]).fit(frame, table["label"])
    (name,) = kp.interpret.effects(fitted, frame)["word"].outputs
    assert name == "log odds of low"
    found = kp.interpret.contributions(fitted, frame)
    odds = np.log(fitted.predict_proba(frame))
    assert (found.base + found.values.sum(1))[:, 0] == pytest.approx(odds[:, 1] - odds[:, 0], abs=1e-9)
    array = kp.RPNRegressor(heads=["linear"]).fit(ROWS, ROWS[:, 0])
    assert kp.interpret.importances(array, ROWS)[0].column == "x0"


def test_several_classes_have_centered_logits(table) -> None:
    labels = table["word"]
    fitted = kp.RPNClassifier(heads=["linear"]).fit(np.c_[table["y"], ROWS[:120]], labels)
    found = kp.interpret.contributions(fitted, np.c_[table["y"], ROWS[:120]][:5], background=ROWS[:50, [0, 0, 1, 2]])
    assert found.outputs == ("blue", "green", "red")
    logits = np.log(fitted.predict_proba(np.c_[table["y"], ROWS[:120]][:5]))
    centered = logits - logits.mean(1, keepdims=True)
    assert found.base + found.values.sum(1) == pytest.approx(centered, abs=1e-9)
    assert found.values.sum(2) == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
@pytest.mark.all_heads
def test_effects_of_friedman_1_are_the_true_components(tmp_path) -> None:
    rng = np.random.default_rng(0)
    x = rng.random((1000, 10))
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    y += rng.normal(size=1000)
    write_table(tmp_path / "t.csv", {**{f"x{i + 1}": column for i, column in enumerate(x.T)}, "y": y})
    fit_table(tmp_path / "t.csv", RunConfig(TableConfig("y"), recipe=Auto()), tmp_path / "run")
    effects = kp.interpret.effects(kp.load_run(tmp_path / "run"))

    def product(x):  # the mean of 10 sin(π x u) over u in (0, 1)
        return 10 * (1 - np.cos(np.pi * x)) / (np.pi * x)

    terms = {"x1": product, "x2": product, "x3": lambda x: 20 * (x - 0.5) ** 2, "x4": lambda x: 10 * x}
    terms["x5"] = lambda x: 5 * x
    for i, (name, effect) in enumerate(effects.items()):
        true = terms.get(name, np.zeros_like)(x[:, i])
        error = effect.at(x[:, i])[:, 0] - (true - true.mean())
        assert abs(error).max() < 0.05 * y.std(), name


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_additive_terms_of_friedman_1_are_found_with_any_seed(seed: int) -> None:
    """Measured: at most 0.046 deviations for the terms and 0.043 for columns without effect, over the whole range."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(size=(1000, 10))
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    y += rng.standard_normal(1000)
    fitted = kp.RPNRegressor(heads=["pairs"], random_state=seed).fit(x, y)
    found = kp.interpret.effects(fitted, x, columns=[f"x{i}" for i in range(2, 10)])
    terms = {"x2": lambda x: 20 * (x - 0.5) ** 2, "x3": lambda x: 10 * x, "x4": lambda x: 5 * x}
    for i, (name, effect) in enumerate(found.items()):
        term = terms.get(name, np.zeros_like)
        error = effect.values[:, 0] - (term(effect.points) - term(x[:, 2 + i]).mean())
        assert abs(error).max() < 0.05 * y.std(), name
    explained = kp.interpret.contributions(fitted, x[:20], background=x)
    assert explained.base + explained.values.sum(1) == pytest.approx(explained.predictions, abs=1e-9)


def test_texts_and_images_have_importances_and_contributions(tmp_path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    words = ["good", "bad", "movie", "film", "plot", "actor"]
    texts = [" ".join(rng.choice(words, 6)) for _ in range(80)]
    label = ["yes" if text.count("good") > text.count("bad") else "no" for text in texts]
    numbers = rng.random(80)
    recipe = Auto(heads=("text_linear", "linear"))
    pq.write_table(pa.table({"text": texts, "n": numbers, "y": label}), tmp_path / "texts.parquet")
    fit_table(tmp_path / "texts.parquet", RunConfig(TableConfig("y"), recipe=recipe), tmp_path / "texts")
    run = kp.load_run(tmp_path / "texts")
    assert kp.interpret.importances(run)[0].column == "text"
    assert list(kp.interpret.effects(run)) == ["n"]
    found = kp.interpret.contributions(run, {"text": texts[:3], "n": numbers[:3]})
    assert found.base + found.values.sum(1) == pytest.approx(found.predictions, abs=1e-9)

    def png(level):
        file = io.BytesIO()
        image.fromarray(np.full((4, 4), level, dtype=np.uint8)).save(file, "PNG")
        return file.getvalue()

    levels = rng.integers(0, 255, 40)
    pictures = [png(level) for level in levels]
    pq.write_table(pa.table({"image": pictures, "y": levels > 100}), tmp_path / "images.parquet")
    fit_table(
        tmp_path / "images.parquet",
        RunConfig(TableConfig("y"), recipe=Auto(heads=("image_linear",))),
        tmp_path / "images",
    )
    kept = kp.load_run(tmp_path / "images").rows
    shown = [picture.ravel()[0] for picture in kept.table.columns["image"].values]
    assert shown == levels[kept.numbers - 1].tolist()


def test_no_module_hides_a_public_name() -> None:
    modules = {path.stem for path in Path(kp.interpret.__file__).parent.iterdir()}
    assert not modules & kp.interpret.HOMES.keys()
