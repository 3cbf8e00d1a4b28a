"""Texts and their TF-IDF columns: scikit-learn's own, sparse, kept; every refusal."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.feature_extraction.text import TfidfVectorizer

import kapsi as kp
from kapsi.data.hub import DATASETS
from kapsi.data.text import TextData, load_text
from kapsi.errors import DataError

WORDS = [
    "the",
    "film",
    "was",
    "good",
    "bad",
    "fine",
    "dull",
    "bright",
    "slow",
    "quick",
    "and",
    "never",
    "boring",
    "great",
    "story",
]


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    monkeypatch.delenv("KAPSI_DATA", raising=False)
    monkeypatch.setenv("KAPSI_CACHE", str(tmp_path / "cache"))


def texts(rows: int, seed: int) -> list[str]:
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, generator.integers(3, 12))) for _ in range(rows)]


def folder_of(root, name="imdb"):
    data = DATASETS[name]
    for seed, (split, rows) in enumerate(zip(data.splits, (40, 20), strict=True)):
        (root / name).mkdir(parents=True, exist_ok=True)
        labels = [i % len(data.classes) for i in range(rows)]
        pq.write_table(pa.table({data.column: texts(rows, seed), "label": labels}), root / name / f"{split}.parquet")
    return root


def data() -> TextData:
    return TextData(tuple(texts(40, 0)), np.arange(40) % 2, tuple(texts(20, 1)), np.arange(20) % 2)


@pytest.mark.parametrize("name", ["imdb", "ag_news", "sst2"])
def test_texts_are_those_of_the_files(tmp_path, name) -> None:
    found = load_text(name, folder_of(tmp_path, name))
    assert found.train_text == tuple(texts(40, 0))
    assert found.test_text == tuple(texts(20, 1))
    classes = DATASETS[name].classes
    assert found.train_y.tolist() == [i % len(classes) for i in range(40)]
    assert found.test_y.dtype == np.int64
    assert (found.name, found.classes, found.source) == (name, classes, str(tmp_path / name))
    rows = DATASETS[name].rows
    assert found.notes[0] == f"{name}: 40 of the {rows[0]:,} rows of the split 'train' (a subset)"
    assert len(found.notes) == 2


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ngrams": (1, 2), "min_df": 2},
        {"min_df": 0.1, "max_df": 1.0, "stop_words": None, "sublinear_tf": False},
        {"min_df": 1, "max_df": 14},
    ],
)
def test_columns_are_those_of_scikit_learn(options) -> None:
    found = data()
    train, test = found.tfidf(**options)
    given = {"min_df": 5, "max_df": 0.5, "stop_words": "english", "sublinear_tf": True} | options
    vectorizer = TfidfVectorizer(ngram_range=given.pop("ngrams", (1, 1)), **given)
    expected = vectorizer.fit_transform(found.train_text), vectorizer.transform(found.test_text)
    for got, wanted in zip((train, test), expected, strict=True):
        assert (got.format, got.dtype) == ("csr", np.float32)
        assert got.has_canonical_format
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got.toarray(), wanted.toarray(), rtol=1e-6, atol=0)


def test_a_part_of_the_rows_can_be_fitted() -> None:
    found = data()
    rows = np.array([30, 3, 5, 8, 21, 22, 23, 24, 25, 26, 27, 28])
    train, test = found.tfidf(min_df=2, fit_rows=rows)
    vectorizer = TfidfVectorizer(min_df=2, max_df=0.5, stop_words="english", sublinear_tf=True)
    vectorizer.fit([found.train_text[row] for row in rows])
    np.testing.assert_allclose(train.toarray(), vectorizer.transform(found.train_text).toarray(), rtol=1e-6)
    np.testing.assert_allclose(test.toarray(), vectorizer.transform(found.test_text).toarray(), rtol=1e-6)
    assert not np.array_equal(train.toarray(), found.tfidf(min_df=2)[0].toarray())


def test_columns_train_a_model_and_stay_sparse() -> None:
    found = data()
    train, test = found.tfidf(min_df=1)
    model = kp.Model(kp.rpn([train.shape[1], 2]), seed=0)
    kp.train(
        model,
        (train, found.train_y),
        config=kp.TrainConfig(loss="cross_entropy", epochs=1, solver=kp.AdamW(batch_size=8)),
    )
    assert kp.predict(model, test, "cross_entropy").shape == (20,)
    dense = kp.predict(model, torch.from_numpy(test.toarray()))
    torch.testing.assert_close(kp.predict(model, test), dense)


# ---------------------------------------------------------------- the cache


@pytest.fixture
def count(monkeypatch):
    calls = []
    make = TextData._columns
    monkeypatch.setattr(TextData, "_columns", lambda *args: calls.append(1) or make(*args))
    return calls


def test_columns_are_kept(tmp_path, count) -> None:
    first, again = data().tfidf(min_df=2), data().tfidf(min_df=2)
    assert len(count) == 1
    for a, b in zip(first, again, strict=True):
        assert (a != b).nnz == 0
        assert (a.shape, a.dtype, a.indices.dtype) == (b.shape, b.dtype, b.indices.dtype)


def test_whatever_changes_the_columns_makes_them_anew(count) -> None:
    found = data()
    ways = [{}, {"ngrams": (1, 2)}, {"min_df": 2}, {"min_df": 0.2}, {"max_df": 0.4}, {"stop_words": None}]
    ways += [{"sublinear_tf": False}, {"fit_rows": np.arange(39)}, {"fit_rows": np.arange(38)}]
    for number, way in enumerate(ways, start=1):
        found.tfidf(**way)
        assert len(count) == number
    TextData(found.train_text[:-1], found.train_y[:-1], found.train_text[-1:] + found.test_text, found.test_y).tfidf()
    TextData((*found.train_text[:-1], "else"), found.train_y, found.test_text, found.test_y).tfidf()
    assert len(count) == len(ways) + 2
    for way in ways:
        found.tfidf(**way)
    assert len(count) == len(ways) + 2


def test_a_damaged_file_is_made_anew(tmp_path, count) -> None:
    expected = data().tfidf()[0].toarray()
    [path] = (tmp_path / "cache").iterdir()
    path.write_bytes(path.read_bytes()[:-300])
    assert np.array_equal(data().tfidf()[0].toarray(), expected)
    assert len(count) == 2


def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path) -> None:
    (tmp_path / "cache").write_text("in the way")
    assert data().tfidf()[0].shape[0] == 40


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_df": 39}, r"text: no TF-IDF columns \(.*\); change ngrams, min_df or max_df"),
        ({"min_df": -1}, r"no TF-IDF columns \(.*min_df.*\)"),
        ({"ngrams": (2, 1)}, r"no TF-IDF columns \(.*\)"),
        ({"ngrams": 3}, r"no TF-IDF columns \(.*\)"),
        ({"stop_words": "klingon"}, r"no TF-IDF columns \(.*\)"),
        ({"fit_rows": np.array([0, 40])}, "text: fit_rows must be indices of training rows, 0 to 39, and at least one"),
        ({"fit_rows": np.array([-1])}, "fit_rows must be"),
        ({"fit_rows": np.array([], dtype=int)}, "fit_rows must be"),
        ({"fit_rows": np.array([True, False])}, "fit_rows must be"),
        ({"fit_rows": [[1], [1, 2]]}, "fit_rows must be"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(options, message) -> None:
    with pytest.raises(DataError, match=message) as caught:
        data().tfidf(**options)
    assert "\n" not in str(caught.value)


def test_images_are_no_set_of_texts() -> None:
    with pytest.raises(DataError, match="there is no data set of text 'mnist'; choose from imdb, ag_news, sst2"):
        load_text("mnist")
