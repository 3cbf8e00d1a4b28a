"""Texts: the scales of naive Bayes, held-out sentences, the network of splines on sparse inputs, and whole runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import kapsi as kp
from kapsi.data.text import TextData
from kapsi.paper.experiment import Run, load_shipped
from kapsi.paper.procedures import text
from kapsi.paper.procedures.sparse_kan import SparseKAN
from kapsi.zoo import kan

GOOD = ("good", "fine", "bright", "warm", "clever")
BAD = ("bad", "dull", "cold", "slow", "noisy")
OTHER = tuple(f"word{i}" for i in range(20))


def texts(rows: int, seed: int) -> tuple[tuple[str, ...], np.ndarray]:
    """Return texts of ten words, four of which belong to the class as a rule."""
    generator = np.random.default_rng(seed)
    y = np.arange(rows) % 2
    made = []
    for label in y:
        own, others = (GOOD, BAD) if label else (BAD, GOOD)
        words = [str(generator.choice(own if generator.random() < 0.8 else others)) for _ in range(4)]
        made.append(" ".join([*words, *map(str, generator.choice(OTHER, 6))]))
    return tuple(made), y.astype(np.int64)


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> TextData:
    monkeypatch.setenv("KAPSI_CACHE", str(tmp_path))
    made = TextData(*texts(240, 0), *texts(120, 1), name="sst2", classes=("negative", "positive"))
    monkeypatch.setattr(text, "load_text", lambda name, folder: made)
    return made


# ------------------------------------------------------------------------------------------------ log-count ratios


def ratios(x: np.ndarray, y: np.ndarray, smoothing: float) -> np.ndarray:
    """Return |r| of NBSVM, the mean over the classes, loop by loop."""
    there = x != 0
    found = []
    for label in np.unique(y):
        p = smoothing + there[y == label].sum(0)
        q = smoothing + there[y != label].sum(0)
        found.append(np.abs(np.log(p / p.sum()) - np.log(q / q.sum())))
    return np.mean(found, 0)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize(("offset", "smoothing"), [(0.5, 1.0), (0.0, 0.3)])
def test_scales_are_log_count_ratios(classes: int, offset: float, smoothing: float) -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(50, 6)) * (generator.random((50, 6)) < 0.4)
    y = generator.integers(classes, size=50)
    wanted = (offset + ratios(x, y, smoothing)) / (offset + 1)
    kappa = kp.LogCountScale(offset, smoothing)
    dense = torch.from_numpy(x)
    for inputs in (dense, dense.to_sparse_csr()):
        module = kp.ExpansionModule(6, kappa, dtype=torch.float64)
        head = kp.Head(6, 2, kp.HeadSpec(kappa), dtype=torch.float64)
        kp.calibrate(head, inputs, torch.from_numpy(y))
        np.testing.assert_allclose(head.kappa["scale"].numpy(), wanted, rtol=1e-12)
        np.testing.assert_allclose(head.expand(inputs).dense().numpy(), x * wanted, rtol=1e-12, atol=1e-12)
        assert torch.equal(module.kappa["scale"], torch.ones(6, dtype=torch.float64))


def test_without_classes_the_scales_stay() -> None:
    x = torch.rand(8, 3, dtype=torch.float64)
    kappa = kp.LogCountScale()
    one = {"scale": torch.ones(3)}
    assert kappa.calibrate(x, one) == {}
    assert kappa.calibrate(x, one, torch.zeros(8)) == {}
    assert kappa.calibrate(x, one, torch.rand(8)) == {}
    assert kappa.calibrate(x, one, torch.rand(8, 2)) == {}
    whole = torch.arange(8) % 2
    assert torch.equal(kappa.calibrate(x, one, whole.double())["scale"], kappa.calibrate(x, one, whole)["scale"])
    with pytest.raises(kp.DataError, match="not finite"):
        kappa.calibrate(x, one, torch.full((8,), torch.nan))


# ------------------------------------------------------------------------------------------------ sentences


def test_held_out_sentences_leave_no_phrase_behind() -> None:
    whole = [f"a{i} b c d{i} e f g h{i} i" for i in range(6)]
    phrases = ["b c", "d1 e f", "a2 b c", "g h3", "e f g"]
    sentences = (*whole, *phrases)
    made = TextData(sentences, np.zeros(len(sentences), dtype=np.int64), (), np.zeros(0, dtype=np.int64))
    words = [each.split() for each in sentences]
    assert text.sentences(words).tolist() == list(range(6))
    own = text.TextOptions(data="sst2", unit="sentences", folds=3, held_out=0.5)
    found = text.hold_out(made, np.arange(len(sentences)), own, np.random.default_rng(0))
    assert sorted(row for part in found for row in part.held_out.tolist()) == list(range(6))
    for part in found:
        held = [f" {sentences[row]} " for row in part.held_out]
        kept = [sentences[row] for row in part.fitted]
        assert not [phrase for phrase in kept if any(f" {phrase} " in sentence for sentence in held)]
        # Of the others none is missing.
        assert len(kept) == sum(not any(f" {each} " in sentence for sentence in held) for each in sentences)


def test_held_out_rows() -> None:
    made = TextData(*texts(40, 0), *texts(4, 1))
    pool = np.random.default_rng(0).permutation(40)[:30]
    found = text.hold_out(made, pool, text.TextOptions(data="sst2", folds=2, held_out=10), np.random.default_rng(0))
    for part in found:
        assert len(part.held_out) == 10
        assert sorted([*part.fitted, *part.held_out]) == sorted(pool)
    assert not set(found[0].held_out) & set(found[1].held_out)
    for wrong in ({"held_out": 0.7}, {"held_out": True}, {"folds": 0}, {"unit": "letters"}):
        with pytest.raises(kp.SpecError, match=next(iter(wrong))):
            text.TextOptions(data="sst2", **wrong)


def test_rows_to_fit_are_in_random_order_where_the_first_ones_count() -> None:
    made = TextData(*texts(200, 0), *texts(4, 1))
    pool = np.random.default_rng(0).permutation(200)
    own = text.TextOptions(data="imdb", held_out=0.25)
    (plain,), (shuffled,) = (
        text.hold_out(made, pool, own, np.random.default_rng(0), shuffled=each) for each in (False, True)
    )
    assert plain.fitted.tolist() == sorted(shuffled.fitted.tolist()) != shuffled.fitted.tolist()
    assert plain.held_out.tolist() == shuffled.held_out.tolist()
    with pytest.raises(kp.SpecError, match="5 rows are too few for 20 folds"):
        text.hold_out(made, pool[:5], text.TextOptions(data="imdb", folds=20), np.random.default_rng(0))


@pytest.mark.parametrize("columns", [7, 8, 11])
def test_sizes_that_only_the_texts_tell_are_no_mistake_before(columns: int) -> None:
    head = {"reconciliation": {"kind": "kronecker", "columns": columns, "rows": 2}}
    options = {"classifier": "model", "model": {"widths": [None, None], "layers": [{"heads": [head]}]}}
    text.read_options(Run("e", "sst2", "m", 0, options=options, procedure="text", metric="accuracy"))
    options = {"classifier": "model", "model": {"widths": [5000, None]}}
    text.read_options(Run("e", "sst2", "m", 0, options=options, procedure="text", metric="accuracy"))


def test_held_out_blocks_stand_together() -> None:
    made = TextData(*texts(950, 0), *texts(4, 1))
    pool = np.random.default_rng(0).permutation(950)[:800]
    own = text.TextOptions(data="imdb", unit="blocks", folds=2, held_out=0.3)
    found = text.hold_out(made, pool, own, np.random.default_rng(0))
    blocks = [set((part.held_out // 100).tolist()) for part in found]
    assert [len(each) for each in blocks] == [3, 3]  # 0.3 of ten blocks
    assert all(0.2 < len(part.held_out) / 800 < 0.4 for part in found)
    assert not blocks[0] & blocks[1]
    for part, own_blocks in zip(found, blocks, strict=True):
        assert sorted([*part.fitted, *part.held_out]) == sorted(pool)
        assert not own_blocks & set((part.fitted // 100).tolist())
    with pytest.raises(kp.SpecError, match="60 rows are too few for blocks of 100 in 2 folds"):
        text.hold_out(made, np.arange(60), text.TextOptions(data="imdb", unit="blocks"), np.random.default_rng(0))


# ------------------------------------------------------------------------------------------------ splines on sparse inputs


@pytest.mark.parametrize("base", ["silu", None])
@pytest.mark.parametrize("bias", [False, True])
def test_sparse_splines_are_those_of_dense_inputs(base: str | None, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(30, 7, generator=generator, dtype=torch.float64)
    x = x * (torch.rand(30, 7, generator=generator) < 0.4)
    x[:, 6] = 0  # a word that is in no row
    model = kp.Model(kan.spec([7, 5, 4, 2], base=base, bias=bias), seed=0, dtype=torch.float64)
    sparse = SparseKAN(model)
    sparse.calibrate(x.to_sparse_csr())
    head = model.layers[0].heads[0]
    torch.testing.assert_close(head.kappa["range"][1, :6], x.amax(0)[:6])
    assert not head.kappa["range"][0].any()
    wanted, found = model(x), sparse(x.to_sparse_csr())
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    parameters = list(model.parameters())
    slopes = torch.autograd.grad(wanted.sin().sum(), parameters)
    for mine, dense in zip(torch.autograd.grad(found.sin().sum(), parameters), slopes, strict=True):
        torch.testing.assert_close(mine, dense, rtol=0, atol=1e-11)


def test_centered_edges_are_zero_at_zero() -> None:
    x = torch.rand(6, 4, dtype=torch.float64) * torch.tensor([1.0, 0.0, 1.0, 1.0])
    model = kp.Model(kan.spec([4, 3]), seed=0, dtype=torch.float64)
    none = torch.zeros(1, 4, dtype=torch.float64)
    found = SparseKAN(model, centered=True)(x.to_sparse_csr())
    torch.testing.assert_close(found, model(x) - model(none), rtol=0, atol=1e-12)


def test_another_model_is_refused() -> None:
    with pytest.raises(kp.SpecError, match=r"kan\.spec"):
        SparseKAN(kp.Model(kp.rpn([3, 2]), seed=0))


# ------------------------------------------------------------------------------------------------ runs


def linear(**options: Any) -> dict[str, Any]:
    expansion = {"kind": "log_count_scale", "offset": 0.5}
    return {
        "min_df": 2,
        "classifier": "model",
        "model": {"widths": [None, None], "layers": [{"heads": [{"expansion": expansion, "bias": True}]}]},
        "calibrate": True,
        "train": {"solver": "lbfgs", "epochs": 5},
        "grid": {"train.l2": [1.0, 0.001]},
        "folds": 2,
        **options,
    }


def test_a_linear_head_learns_and_repeats(data: TextData) -> None:
    run = Run("e", "sst2", "m", 3, options=linear(), procedure="text", metric="accuracy")
    first, again = text.run(run), text.run(run)
    assert first.score == again.score > 0.85
    assert first.validation is not None
    assert first.validation > 0.8
    assert first.extra["columns"] == 30
    assert first.parameters == 2 * 30 + 2
    assert first.extra["held_out_rows"] == [60, 60]
    assert first.extra["chosen"]["train.l2"] in (1.0, 0.001)
    accuracies = [accuracy for _, accuracy in first.extra["candidates"]]
    assert len(accuracies) == 2
    assert max(accuracies) == first.validation
    assert first.extra["standard_error"] == pytest.approx((first.score * (1 - first.score) / 120) ** 0.5, abs=1e-5)


def test_the_recipe_of_texts_is_that_of_tables(data: TextData) -> None:
    recipe = {"kind": "text_naive_bayes", "l2": 0.01}
    options = {"min_df": 2, "classifier": "recipe", "recipe": recipe, "grid": {"recipe.l2": [100.0, 0.01]}}
    outcome = text.run(Run("e", "sst2", "m", 3, options=options, procedure="text", metric="accuracy"))
    assert outcome.score > 0.85
    assert outcome.extra["chosen"] == {"recipe.l2": 0.01}
    assert outcome.parameters == 2 * 30 + 2


def test_the_best_of_variants(data: TextData) -> None:
    """One that cannot learn, for its penalty, and one that can."""
    base = linear()
    weak, strong = ({"model": base["model"], "train": base["train"], "grid": {"train.l2": [p]}} for p in (1e6, 0.001))
    options = {name: value for name, value in base.items() if name not in ("model", "train", "grid")}
    run = Run(
        "e",
        "sst2",
        "m",
        0,
        options={**options, "variants": {"weak": weak, "strong": strong}},
        procedure="text",
        metric="accuracy",
    )
    made = text.run(run)
    alone = text.run(replace(run, options={**options, **strong}))
    assert made.extra["chosen"] == {"variant": "strong", "train.l2": 0.001}
    assert [chosen["variant"] for chosen, _ in made.extra["candidates"]] == ["weak", "strong"]
    assert (made.score, made.validation) == (alone.score, alone.validation)
    with pytest.raises(kp.SpecError, match="give a grid"):
        text.run(replace(run, options={**options, "variants": {"one": {**strong, "grid": {}}}}))
    with pytest.raises(kp.SpecError, match="variants: expected"):
        text.run(replace(run, options={**options, "variants": []}))
    with pytest.raises(kp.SpecError, match=r"variants\.one\.refit: is the same for all variants"):
        text.run(replace(run, options={**options, "variants": {"one": {**strong, "refit": False}}}))


def test_the_test_rows_choose_nothing(data: TextData, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("e", "sst2", "m", 0, options=linear(), procedure="text", metric="accuracy")
    first = text.run(run)
    other = replace(data, test_y=1 - data.test_y)
    monkeypatch.setattr(text, "load_text", lambda name, folder: other)
    second = text.run(run)
    assert second.extra["candidates"] == first.extra["candidates"]
    assert second.score == pytest.approx(1 - first.score)


@pytest.mark.parametrize("kind", ["kan", "naive_bayes_multinomial", "naive_bayes_gaussian", "svm_linear", "mlp"])
def test_other_classifiers_take_sparse_columns(kind: str, data: TextData) -> None:
    network = {
        "hidden": [8],
        "train": {"solver": {"kind": "adamw", "batch_size": 32, "learning_rate": 0.01}, "epochs": 12},
    }
    options = {"min_df": 2, "classifier": kind, **(network if kind in ("kan", "mlp") else {})}
    if kind == "kan":
        options["calibrate"] = True
    made = text.run(Run("e", "sst2", kind, 0, options=options, procedure="text", metric="accuracy"))
    assert made.score > 0.75
    assert made.validation is None


def test_fewer_rows(data: TextData) -> None:
    made = text.run(
        Run(
            "e",
            "sst2",
            "m",
            0,
            options=linear(most_rows=100, limit_train=200, limit_test=50, grid={}),
            procedure="text",
            metric="accuracy",
        )
    )
    assert made.extra["train_rows"] == 100
    assert made.extra["test_rows"] == 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "mnist"}, "imdb, sst2, ag_news"),
        ({"classifier": "svm_linaer"}, "did you mean svm_linear"),
        ({"ngrams": 2}, "ngrams: expected a list of 2"),
        ({"ngrams": [2, 1]}, "two numbers of words"),
        ({"min_df": 1.5}, "a share above 0 and up to 1"),
        ({"grid": {"train.l2": [-1.0]}}, "l2"),
        ({"most_rows": 0}, "most_rows"),
        ({"limit_train": 0}, "limit_train"),
        ({"trian": {}}, "trian"),
        ({"train": {"solver": "levenberg_marquardt", "epochs": 2}}, "levenberg_marquardt"),
        ({"train": {"solver": "lbfgs", "seed": 3}}, "train.seed: is the seed of the run"),
        ({"train": {"solver": "lbfgs", "clip": 1.0}}, "max_grad_norm is an option of the solvers adamw and sgd"),
        ({"early_stopping": True}, "need one fold of held-out rows"),
        ({"min_df": 0}, "min_df"),
        ({"folds": 10000}, "folds must be at most 100"),
        ({"grid": {"train.seed": [1, 2]}}, "train.seed: is the seed of the run"),
        ({"train": {"solver": "lbfgs", "patience": 2}}, "train.patience: is for early_stopping"),
        ({"grid": {"train": [{"epochs": 1}], "train.epochs": [2]}}, "set the same option"),
        ({"grid": {"train.epochs": [1]}, "tune": {"train.epochs": 2}}, "set the same option"),
        ({"grid": {}, "tune": {"train.epochs": 2}}, "there is no grid"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str, data: TextData) -> None:
    with pytest.raises(kp.SpecError, match=message) as error:
        text.run(Run("e", "sst2", "m", 0, options=linear(**options), procedure="text", metric="accuracy"))
    assert "\n" not in str(error.value)
    with pytest.raises(kp.SpecError) as before:
        text.read_options(Run("e", "sst2", "m", 0, options=linear(**options), procedure="text", metric="accuracy"))
    assert str(before.value) == str(error.value)


@pytest.mark.parametrize(
    ("name", "rows"), [("discrete", ["imdb", "sst2", "ag_news"]), ("text-bigrams", None), ("kan-text", None)]
)
def test_shipped_options_are_known(name: str, rows: list[str] | None, data: TextData) -> None:
    """Every run of the files gets past its options, on a few rows and with the shortest training."""
    experiment = load_shipped(name)
    for row in experiment.rows:
        if rows is not None and row.name not in rows:
            continue
        for method in experiment.methods_of(row):
            if method.name == "svm_rbf":
                continue
            run = experiment.run(row, method, 0)
            options = {**run.options, "min_df": 2, "ngrams": [1, 1], "limit_train": 120, "unit": "rows", "folds": 1}
            options["held_out"] = 30
            options["grid"] = {path: values[:1] for path, values in run.options.get("grid", {}).items()}
            if "hidden" in options:
                options["hidden"] = [4]
            made = text.run(replace(run, options=options))
            assert 0 <= made.score <= 1
