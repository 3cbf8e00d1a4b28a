"""Columns of texts: terms, TF-IDF, heads, runs, estimators, and predictions of them."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import kapsi as kp
from kapsi.cli import main
from kapsi.data.tabular import Column, Preprocessing, Table, make_problem, text_column
from kapsi.data.tabular.text_column import TextColumn, reads_as_text, tokens
from kapsi.errors import TableError
from kapsi.recipes import Auto, LinearHead, RecipeData, TextLinearHead, TextNaiveBayesHead, TextProductsHead
from kapsi.recipes.base import held_out_scores
from kapsi.recipes.text_products import _Fit
from kapsi.recipes.widened import widened

GOOD = ("great", "fine", "superb", "lovely", "charming")
BAD = ("awful", "dull", "poor", "boring", "weak")
FILLER = ("the", "film", "was", "story", "a", "and", "plot", "of", "actor", "scene", "music", "very")


def texts(rows: int, seed: int = 0, share: float = 0.9) -> tuple[list[str], np.ndarray]:
    """Return texts whose words say the class in most rows, and the classes."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, rows)
    made = []
    for label in y:
        told = label if rng.random() < share else 1 - label
        words = [*rng.choice(FILLER, 8), *rng.choice(GOOD if told else BAD, 2)]
        made.append(" ".join(rng.permutation(words)) + f" {rng.integers(1000)}")
    return made, y


def column(values: list[str | None]) -> Column:
    return Column("text", np.array(values, dtype=object), free=True)


# ------------------------------------------------------------------------------------------------ terms


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It's a FINE day!", ["it", "s", "a", "fine", "day"]),
        ("<p class='x'>Hello<br/>world</p> 3 < 4 &amp; 5", ["hello", "world", "3", "4", "5"]),
        ("naïve CAFÉ größe", ["naïve", "café", "größe"]),
        ("我喜欢 cats", ["我", "喜", "欢", "cats"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("nice 👍👍", ["nice", "👍", "👍"]),
        ("", []),
        ("x" * 100, ["x" * 40, "x" * 40, "x" * 20]),
    ],
)
def test_words_of_a_text(text, words) -> None:
    assert tokens(text) == words


def test_tfidf_is_that_of_scikit_learn() -> None:
    from sklearn.feature_extraction.text import TfidfVectorizer

    rows, _ = texts(60)
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True, token_pattern=r"(?u)\b\w+\b")
    wanted = vectorizer.fit_transform(rows)
    fitted = TextColumn.fit("t", column(rows))
    names = [term.removeprefix("t: ") for term in fitted.terms()]
    assert set(names) == set(vectorizer.get_feature_names_out())
    order = [vectorizer.vocabulary_[name] for name in names]
    new, _ = texts(20, seed=1)
    for values, matrix in ((rows, wanted), (new, vectorizer.transform(new))):
        np.testing.assert_allclose(fitted.encode(column(values))[1].toarray(), matrix.toarray()[:, order], atol=1e-12)


def test_chunks_of_texts_change_nothing(monkeypatch) -> None:
    rows, _ = texts(40)
    whole = TextColumn.fit("t", column(rows))
    monkeypatch.setattr(text_column, "CHUNK", 100)
    parts = TextColumn.fit("t", column(rows))
    assert parts == whole
    assert abs(parts.encode(column(rows))[1] - whole.encode(column(rows))[1]).max() == 0


def test_the_vocabulary_is_bounded_and_has_both_words_of_a_pair(monkeypatch) -> None:
    monkeypatch.setattr(text_column, "MOST_TERMS", 9)
    fitted = TextColumn.fit("t", column(texts(50)[0]))
    assert len(fitted.counts) == 9
    assert all(term.removeprefix("t: ").split()[0] in fitted.words for term in fitted.terms())


def test_many_outputs_allow_fewer_terms(monkeypatch) -> None:
    monkeypatch.setattr(text_column, "MOST_WEIGHTS", 100)
    assert len(TextColumn.fit("t", column(texts(50)[0]), outputs=20).counts) == 5


def test_missing_empty_and_unknown_texts_are_rows_without_terms() -> None:
    fitted = TextColumn.fit("t", column(["a good day", "not a good day", None]))
    dense, terms = fitted.encode(column([None, "", "zzz", "good"]))
    assert fitted.names() == ["t: length", "t is missing"]
    assert dense[:, 1].tolist() == [1, 0, 0, 0]
    assert np.asarray(terms.sum(1)).ravel().tolist() == [0, 0, 0, 1]


def test_a_text_of_a_megabyte_and_texts_without_words() -> None:
    rows = ["good " * 200_000, "x" * 1_000_000, "...", "good day"]
    fitted = TextColumn.fit("t", column(rows))
    assert fitted.encode(column(rows))[1].shape[0] == 4
    nothing = TextColumn.fit("t", column(["...", "!!!"]))
    assert nothing.encode(column(["..."]))[1].shape == (1, 0)


def test_file_of_an_encoder_is_checked() -> None:
    table = Table("t", {"t": column(texts(30)[0])})
    preprocessing = Preprocessing.fit(table)
    data = json.loads(json.dumps(preprocessing.to_dict()))
    assert Preprocessing.from_dict(data) == preprocessing
    for key, value in (
        ("pairs", [5]),
        ("pairs", [2**31 + 999]),
        ("counts", []),
        ("words", ["b", "a"]),
        ("rows", 0),
        ("scale", 0.0),
    ):
        bad = json.loads(json.dumps(data))
        bad["columns"][0][key] = value
        with pytest.raises(TableError):
            Preprocessing.from_dict(bad)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (["a fine day for it", "not so bad at all"], True),
        (["今天天气很好", "明天下雨"], True),
        ([f"{i} days 01:00:00" for i in range(90)], False),
        ([f"A{i}" for i in range(90)], False),
        ([f"{i} Main Street, Springfield" for i in range(90)], True),
        ([f"big red{i % 3} car" for i in range(90)], False),
    ],
)
def test_mostly_distinct_strings_of_several_words_are_texts(values, text) -> None:
    assert reads_as_text(*column(values).coded()) == text


def problem(values: dict, **options):
    table = Table(
        "t",
        {
            name: v if isinstance(v, Column) else Column("real", np.asarray(v, dtype=float))
            for name, v in values.items()
        },
    )
    return make_problem(table, "y", **options)


def test_a_requested_category_is_no_text() -> None:
    rows, y = texts(200)
    texts_of = column(rows)
    assert problem({"t": Column("text", texts_of.values), "y": y}, task="classification").features.columns["t"].free
    requested = Column("text", texts_of.values, reason="as requested")
    with pytest.raises(TableError, match="ID-like"):
        problem({"t": requested, "y": y}, task="classification")


# ------------------------------------------------------------------------------------------------ heads

HEADS = [TextLinearHead, TextNaiveBayesHead]


def rows_of(kind: str, rows: int = 400, weighted: bool = False) -> RecipeData:
    """Return rows with a text and a number, both of which say something about the target."""
    values, y = texts(rows)
    rng = np.random.default_rng(1)
    number = rng.normal(size=rows)
    table = Table("t", {"t": column(values), "x": Column("real", number)})
    preprocessing = Preprocessing.fit(table)
    names = preprocessing.dense_names()
    x = preprocessing.transform(table)
    target = torch.from_numpy(y + number + 0.1 * rng.normal(size=rows))[:, None]
    target = (target - target.mean()) / target.std()
    loss: kp.Loss = kp.MSE()
    if kind in ("classes", "many"):
        target, loss = torch.from_numpy(y + (number > 0) * (2 if kind == "many" else 0)).long(), kp.CrossEntropy()
    if kind == "counts":
        target, loss = torch.from_numpy(y * 2.0)[:, None], kp.Poisson()
    weight = torch.from_numpy(rng.random(rows)) if weighted else None
    return RecipeData(
        torch.from_numpy(x[:, : len(names)].toarray()),
        target,
        loss,
        {"classes": 2, "many": 4}.get(kind, 0),
        torch.ones(len(names), dtype=torch.bool),
        None if weight is None else weight / weight.mean(),
        tuple(names),
        text=x[:, len(names) :],
    )


def outputs(model: kp.Model, data: RecipeData) -> torch.Tensor:
    return kp.predict(model, data.rows())


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.name)
@pytest.mark.parametrize(("kind", "loss"), [("classes", 0.45), ("many", 0.75), ("real", 0.12), ("counts", 1.0)])
def test_heads_learn_from_texts_and_numbers(head, kind, loss) -> None:
    data, new = rows_of(kind), rows_of(kind)
    crossed = head().cross_fit(data, data.folds(3))
    assert held_out_scores(crossed.outputs, data)[0] < loss
    model = crossed.recipe.fit(data)
    assert model.in_features == data.inputs
    assert float(data.loss.mean(outputs(model, new), new.y)) < loss


def test_the_linear_head_is_that_of_scikit_learn() -> None:
    from sklearn.linear_model import LogisticRegression

    data, l2 = rows_of("classes", weighted=True), 1e-3
    fitted = TextLinearHead(l2=l2).fit(data)
    scale = TextLinearHead().scale(data)
    mean = data.weight @ data.x[:, 1] / len(data.y)
    deviation = float((data.weight @ (data.x[:, 1] - mean).square() / len(data.y)).sqrt())
    assert scale[1:].tolist() == [pytest.approx(1 / (deviation * math.sqrt(2))), *[1.0] * data.text.shape[1]]
    x = data.rows().multiply(scale.numpy()).tocsr()
    # Two logits ±s/2 with the penalty of both: half of that of one score.
    reference = LogisticRegression(C=2 / (l2 * len(data.y)), tol=1e-10, max_iter=10_000).fit(
        x, data.y, data.weight.numpy()
    )
    difference = outputs(fitted, data)[:, 1] - outputs(fitted, data)[:, 0]
    np.testing.assert_allclose(difference.numpy(), reference.decision_function(x), atol=0.01)


def test_regression_is_ridge_regression() -> None:
    from sklearn.linear_model import Ridge

    data, l2 = rows_of("real"), 1e-2
    fitted = TextLinearHead(l2=l2).fit(data)
    x = data.rows().multiply(TextLinearHead().scale(data).numpy()).tocsr().toarray()
    reference = Ridge(alpha=l2 * len(data.y) / 2).fit(x, data.y[:, 0].numpy())
    np.testing.assert_allclose(outputs(fitted, data)[:, 0], reference.predict(x), atol=0.01)


def test_evidence_is_the_log_count_ratio() -> None:
    data = rows_of("classes")
    kappa = kp.LogCountScale(0.5)
    dense = torch.from_numpy(data.text.toarray())
    wanted = kappa.calibrate(dense, {"scale": torch.ones(dense.shape[1], dtype=torch.float64)}, data.y)["scale"]
    torch.testing.assert_close(TextNaiveBayesHead().evidence(data), wanted)


def test_terms_that_say_more_about_a_real_target_are_scaled_up() -> None:
    data = rows_of("real")
    table = Table("t", {"t": column(texts(400)[0])})
    names = Preprocessing.fit(table).texts[0].terms()
    scale = dict(zip(names, TextNaiveBayesHead().evidence(data).tolist(), strict=True))
    assert min(scale[f"t: {word}"] for word in GOOD + BAD) > max(scale[f"t: {word}"] for word in FILLER)


def test_held_out_outputs_are_those_of_fits_without_the_rows() -> None:
    data = rows_of("classes", 200)
    folds = data.folds(3)
    crossed = TextNaiveBayesHead(l2=1e-3).cross_fit(data, folds)
    train, test = folds[0]
    model = crossed.recipe.fit(data.take(train))
    torch.testing.assert_close(crossed.outputs[test], outputs(model, data)[test], atol=0.05, rtol=0.05)


def pairs_of_words(rows: int = 600) -> RecipeData:
    """Return texts whose class is that of two distant words together: neither says anything alone."""
    rng = np.random.default_rng(0)
    made, y = [], rng.integers(0, 2, (rows, 2))
    for first, second in y:
        words = list(rng.choice(FILLER, 8))
        words[1], words[6] = "not" if first else "so", "good" if second else "bad"
        made.append(" ".join(words))
    table = Table("t", {"t": column(made)})
    x = Preprocessing.fit(table).transform(table)
    labels, ones = torch.from_numpy(y[:, 0] ^ y[:, 1]), torch.ones(1, dtype=torch.bool)
    dense = torch.from_numpy(x[:, :1].toarray())
    return RecipeData(dense, labels, kp.CrossEntropy(), 2, ones, text=x[:, 1:], others=False)


def test_products_of_words_are_learned() -> None:
    data = pairs_of_words()
    folds = data.folds(3)
    assert held_out_scores(TextNaiveBayesHead().cross_fit(data, folds).outputs, data)[1] < 0.6
    crossed = TextProductsHead().cross_fit(data, folds)
    assert held_out_scores(crossed.outputs, data)[1] > 0.97
    train, test = folds[0]
    model = crossed.recipe.fit(data.take(train))
    torch.testing.assert_close(outputs(model, data)[test], crossed.outputs[test])


@pytest.mark.parametrize("kind", ["many", "real"])
def test_the_gradient_of_products_is_the_slope_of_their_loss(kind) -> None:
    from scipy.optimize import check_grad

    data, head = rows_of(kind, 40, weighted=True), TextProductsHead(rank=2)
    fitted = _Fit(head, data, data.rows(), head.scale(data), 0)
    error = check_grad(lambda v: fitted._value(v)[0], lambda v: fitted._value(v)[1], fitted.products.vector())
    assert error < 1e-5


@pytest.mark.parametrize("before", [(), ("clamp", "affine")])
def test_a_model_of_the_first_inputs_takes_sparse_rows(before) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 7, generator=generator, dtype=torch.float64) * (torch.rand(6, 7, generator=generator) < 0.5)
    head = kp.HeadSpec(kp.BSpline(4), before=before, bias=True)
    model = kp.Model(
        kp.ModelSpec((3, 2), (kp.LayerSpec((head, kp.HeadSpec(kp.Taylor(2)))),)), seed=0, dtype=torch.float64
    )
    wide = widened(model, 7)
    torch.testing.assert_close(wide(x), model(x[:, :3]))
    torch.testing.assert_close(wide(x.to_sparse_csr()), model(x[:, :3]))


def test_selected_inputs_of_sparse_rows_may_repeat() -> None:
    x = torch.tensor([[0.0, 2.0, 3.0], [1.0, 0.0, 0.0]])
    kappa = kp.SelectedInputs(kp.Identity(), count=4)
    tensors = {"selection": torch.tensor([2, 0, 2, 1]), "expansion": {}}
    wanted = [[3.0, 0.0, 3.0, 2.0], [0.0, 1.0, 0.0, 0.0]]
    assert kappa(x.to_sparse_csr(), tensors).dense().tolist() == wanted == kappa(x, tensors).dense().tolist()


# ------------------------------------------------------------------------------------------------ runs


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files of texts, numbers and two targets, for fits and for predictions."""
    folder = tmp_path_factory.mktemp("texts")
    for name, rows, seed in (("train", 400, 0), ("new", 100, 1)):
        values, y = texts(rows, seed)
        rng = np.random.default_rng(seed)
        number = rng.normal(size=rows)
        more = [f"{'warm' if v > 0 else 'cold'} day {int(rng.integers(9**5))} in {rng.choice(FILLER)}" for v in number]
        price = y + number + 0.1 * rng.normal(size=rows)
        frame = pa.table({"text": values, "more": more, "x": rng.normal(size=rows), "label": y, "price": price})
        pq.write_table(frame, folder / f"{name}.parquet")
    return folder


def fit(files, target: str, folder, heads=("text_linear", "text_naive_bayes", "linear"), **options):
    from kapsi.tables import RunConfig, TableConfig, fit_table

    config = RunConfig(TableConfig(target, **options), recipe=Auto(heads=tuple(heads)))
    return fit_table(files / "train.parquet", config, folder)


@pytest.mark.all_heads
def test_a_run_of_texts_is_saved_and_predicts(files, tmp_path) -> None:
    report = fit(files, "label", tmp_path / "run", drop=("price",))
    assert report.scores["kapsi"][0].main > 0.8
    assert any("column 'text': 320 texts" in note and "unigrams and bigrams" in note for note in report.notes)
    run = kp.load_run(tmp_path / "run")
    frame = pd.read_parquet(files / "new.parquet")
    predicted = run.predict(frame)
    assert (predicted == frame["label"]).mean() > 0.8
    kept: list[dict] = []
    count, _ = run.model.predict_file(files / "new.parquet", kept.append)
    assert (count, kept[0]["prediction"]) == (100, predicted.tolist())
    scores, rows, _ = run.model.scores(run.model.read(files / "new.parquet"))
    assert (rows, scores.main) == (100, pytest.approx((predicted == frame["label"]).mean()))
    run.export(tmp_path / "hub", "huggingface")
    assert (kp.load_run(tmp_path / "hub").predict(frame) == predicted).all()
    one = run.predict({"text": ["a great film", None], "more": ["", "x"], "x": [0.0, None]})
    assert one[0] == 1


def test_the_plan_of_a_table_with_texts_counts_their_terms(files) -> None:
    from kapsi.tables import RunConfig, TableConfig, plan_fit, read_problem

    table = TableConfig("label", drop=("price",))
    plan = plan_fit(read_problem(files / "train.parquet", table), RunConfig(table, recipe=Auto(heads=("linear",))))
    assert sum(column.inputs for column in plan.columns) == plan.inputs
    assert plan.columns[0].inputs > 50
    assert plan.bytes > 12 * 3 * 320


@pytest.mark.all_heads
def test_several_texts_and_a_number_for_a_real_target(files, tmp_path) -> None:
    report = fit(files, "price", tmp_path / "run", drop=("label",))
    assert report.scores["kapsi"][0].main > 0.5
    report = fit(files, "price", tmp_path / "less", drop=("label", "more"))
    assert report.scores["kapsi"][0].main < 0.3


@pytest.mark.all_heads
def test_heads_of_numbers_and_of_texts_are_one_layer(files, tmp_path) -> None:
    fit(files, "price", tmp_path / "run", heads=("additive", "text_linear"), drop=("label",))
    run = kp.load_run(tmp_path / "run")
    assert len(run.model.model.layers) == 1
    assert run.model.model.in_features == len(run.model.preprocessing.names())


@pytest.mark.all_heads
def test_folds_and_a_single_head_as_recipe(files, tmp_path) -> None:
    from kapsi.tables import RunConfig, TableConfig, fit_table

    table = TableConfig("label", folds=2, drop=("price",))
    for recipe in (TextNaiveBayesHead(), LinearHead()):
        report = fit_table(files / "train.parquet", RunConfig(table, recipe=recipe), tmp_path / recipe.name)
        assert len(report.scores["kapsi"]) == 2
        assert kp.load_run(tmp_path / recipe.name).predict(pd.read_parquet(files / "new.parquet")).shape == (100,)


def test_a_model_of_ones_own_leaves_texts_out(files, tmp_path) -> None:
    from kapsi.tables import RunConfig, TableConfig, fit_table

    report = fit_table(files / "train.parquet", RunConfig(TableConfig("label", drop=("price",))), tmp_path / "run")
    assert any("left out the texts 'text', 'more'" in note for note in report.notes)
    with pytest.raises(TableError, match="only the automatic model reads texts"):
        fit_table(files / "train.parquet", RunConfig(TableConfig("label", drop=("price", "x"))), tmp_path / "other")


def test_estimators_take_frames_with_texts(files) -> None:
    frame, new = (pd.read_parquet(files / f"{name}.parquet") for name in ("train", "new"))
    names = ["text", "more", "x"]
    classifier = kp.RPNClassifier(heads=["text_naive_bayes"]).fit(frame[names], frame["label"])
    assert classifier.score(new[names], new["label"]) > 0.8
    assert any("unigrams and bigrams" in note for note in classifier.notes_)
    regressor = kp.RPNRegressor(heads=["text_linear"]).fit(frame[names], frame["price"])
    assert regressor.score(new[names], new["price"]) > 0.35
    own = kp.RPNClassifier(spec=kp.Identity()).fit(frame[names], frame["label"])
    assert any("left out the texts" in note for note in own.notes_)


@pytest.mark.all_heads
def test_command_line(files, tmp_path, capsys) -> None:
    run, table = str(tmp_path / "run"), str(files / "train.parquet")
    command = ["fit", table, "--target", "label", "--drop", "price", "--drop", "more", "--head", "text_naive_bayes"]
    assert main([*command, "--output", run]) == 0
    shown = capsys.readouterr()
    assert "note: column 'text': 320 texts" in shown.err
    assert "text_naive_bayes" in shown.out
    assert main(["info", run]) == 0
    shown = capsys.readouterr()
    assert "unigrams and bigrams of text" in shown.out
    assert "text: great" not in shown.out
    assert main(["predict", run, str(files / "new.parquet"), "--output", str(tmp_path / "p.csv")]) == 0
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 101
    assert (
        main(
            [
                "fit",
                table,
                "--target",
                "label",
                "--head",
                "text_linear",
                "--categorical",
                "text",
                "--categorical",
                "more",
                "--output",
                run,
            ]
        )
        == 2
    )


# ------------------------------------------------------------------------------------------------ public data

DATA = Path(os.environ.get("KAPSI_DATA", "no data"))
ACCURACY = {"sst2": 0.828, "ag_news": 0.914, "imdb": 0.913}
"""Accuracy on the test rows in `results/text-bigrams.md`."""


@pytest.mark.slow
@pytest.mark.all_heads
@pytest.mark.parametrize("name", ACCURACY)
def test_public_data_reach_the_committed_results(name, tmp_path) -> None:
    test = DATA / name / ("validation.parquet" if name == "sst2" else "test.parquet")
    if not test.exists():
        pytest.skip("KAPSI_DATA names no folder with the data")
    run = str(tmp_path / "run")
    command = ["fit", str(DATA / name / "train.parquet"), "--target", "label", "--validation", str(test)]
    assert main([*command, "--output", run]) == 0
    assert kp.load_run(run).manifest["scores"]["kapsi"]["accuracy"] > ACCURACY[name] - 0.003
