"""Whole pipelines of scikit-learn: predictions for new rows with missing and unseen values, and steps that are refused."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.compose import ColumnTransformer, make_column_transformer
from sklearn.decomposition import PCA
from sklearn.ensemble import GradientBoostingClassifier, HistGradientBoostingRegressor, RandomForestClassifier
from sklearn.feature_selection import SelectKBest
from sklearn.impute import KNNImputer, SimpleImputer
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge, RidgeClassifier
from sklearn.naive_bayes import BernoulliNB, GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    KBinsDiscretizer,
    MaxAbsScaler,
    MinMaxScaler,
    OneHotEncoder,
    OrdinalEncoder,
    PolynomialFeatures,
    RobustScaler,
    SplineTransformer,
    StandardScaler,
)
from sklearn.svm import SVC, SVR, LinearSVC
from sklearn.tree import DecisionTreeRegressor

import kapsi as kp
from kapsi.errors import DataError, SpecError
from kapsi.zoo import pipeline

NUMBERS, WORDS = ["age", "size", "speed"], ["color", "shape"]


def rows(count: int, seed: int, *, unseen: bool = False) -> pd.DataFrame:
    """Return rows with missing values in all columns, and with categories that another seed does not have."""
    random = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "color": random.choice(["red", "green", "blue"], count, p=[0.6, 0.35, 0.05]),
            "age": random.normal(40, 9, count),
            "size": random.gamma(2, 2, count),
            "shape": random.choice(["round", "square"], count).astype(object),
            "speed": random.normal(0, 1, count),
            "weekday": random.integers(0, 5, count),
        }
    )
    for name in NUMBERS:
        frame.loc[random.random(count) < 0.15, name] = np.nan
    frame.loc[random.random(count) < 0.15, "shape"] = np.nan
    if unseen:
        frame.loc[::7, "color"] = "violet"
        frame.loc[::11, "weekday"] = 9
    return frame


TRAIN, NEW = rows(150, 0), rows(80, 1, unseen=True)
Y = (TRAIN["age"].fillna(40) / 10 + 2 * (TRAIN["color"] == "red") + TRAIN["speed"].fillna(0)).to_numpy()
CLASSES = np.array(["no", "yes"])[(np.median(Y) < Y).astype(int)]
THREE = np.array(["low", "middle", "high"])[np.digitize(Y, np.quantile(Y, [0.3, 0.7]))]


def columns(*numeric, encoder=None, **options) -> ColumnTransformer:
    """Return numbers that are filled, then go through some steps, and indicators of the words."""
    words = OneHotEncoder(handle_unknown="ignore") if encoder is None else encoder
    return ColumnTransformer(
        [("numbers", make_pipeline(SimpleImputer(), *numeric), NUMBERS), ("words", words, WORDS)], **options
    )


def assert_equal(theirs, x, y, new, *, encoded: bool = False) -> pipeline.PipelineModel:
    """Fit a pipeline, and compare all outputs of its conversion on new rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scikit-learn, on convergence and unknown categories
        theirs.fit(x, y)
        ours = pipeline.from_sklearn(theirs)
        for name in ("predict", "predict_proba", "decision_function", "transform"):
            if not hasattr(theirs, name):
                continue
            expected = getattr(theirs, name)(new)
            found = getattr(ours, "predict" if name == "transform" else name)(new)
            if expected.dtype.kind in "OU":
                np.testing.assert_array_equal(found, expected)
            else:
                assert found.shape == expected.shape
                np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)
    return ours


# ------------------------------------------------------------------------------------------------ encoders


@pytest.mark.parametrize(
    "encoder",
    [
        OneHotEncoder(handle_unknown="ignore"),
        OneHotEncoder(handle_unknown="ignore", drop="first"),
        OneHotEncoder(handle_unknown="ignore", drop="if_binary", min_frequency=0.1),
        OneHotEncoder(handle_unknown="infrequent_if_exist", min_frequency=0.2),
        OneHotEncoder(handle_unknown="infrequent_if_exist", max_categories=2, drop="first"),
        OneHotEncoder(handle_unknown="infrequent_if_exist", drop="first"),
        OneHotEncoder(handle_unknown="warn", min_frequency=0.2),
        OneHotEncoder(handle_unknown="ignore", categories=[["blue", "red"], ["square", np.nan]], dtype=np.float32),
        OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1, encoded_missing_value=-2),
        OrdinalEncoder(
            handle_unknown="use_encoded_value", unknown_value=-5, encoded_missing_value=7, min_frequency=0.2
        ),
    ],
)
def test_categories(encoder):
    ours = assert_equal(make_pipeline(columns(encoder=encoder), Ridge()), TRAIN, Y, NEW)
    assert ours.model.spec.widths[-1] == 1
    shuffled = NEW[["weekday", *NUMBERS[::-1], *WORDS[::-1]]]
    np.testing.assert_array_equal(ours.predict(shuffled), ours.predict(NEW))


def test_refused_categories_are_an_error_of_both():
    for encoder in (OneHotEncoder(), OrdinalEncoder(encoded_missing_value=-1)):
        theirs = make_pipeline(columns(encoder=encoder), Ridge()).fit(TRAIN, Y)
        ours = pipeline.from_sklearn(theirs)
        np.testing.assert_allclose(ours.predict(TRAIN), theirs.predict(TRAIN), rtol=1e-10)
        with pytest.raises(ValueError, match="unknown categories"):
            theirs.predict(NEW)
        with pytest.raises(
            DataError, match=re.escape("column 'color' has the category 'violet', which the fit did not")
        ):
            ours.predict(NEW)


@pytest.mark.parametrize("strategy", ["mean", "median", "most_frequent", "constant"])
@pytest.mark.parametrize("marked", [False, True])
def test_filled_values(strategy, marked):
    filled = SimpleImputer(strategy=strategy, add_indicator=marked)
    words = make_pipeline(SimpleImputer(strategy="most_frequent"), OneHotEncoder(handle_unknown="ignore"))
    theirs = make_column_transformer((filled, NUMBERS), (words, WORDS), ("passthrough", ["weekday"]))
    assert_equal(make_pipeline(theirs, StandardScaler(), Ridge()), TRAIN, Y, NEW)
    x, new = TRAIN[NUMBERS].to_numpy(), NEW[NUMBERS].to_numpy()
    x = np.column_stack([x, np.full(len(x), np.nan)])
    new = np.column_stack([new, np.full(len(new), np.nan)])
    for keep in (False, True):
        imputer = SimpleImputer(strategy=strategy, add_indicator=marked, keep_empty_features=keep)
        assert_equal(make_pipeline(imputer, Ridge()), x, Y, new)
    zeros = np.where(np.isnan(x[:, :3]), 0.0, x[:, :3])
    assert_equal(make_pipeline(SimpleImputer(missing_values=0.0, strategy=strategy), Ridge()), zeros, Y, zeros)


@pytest.mark.parametrize("encode", ["onehot", "onehot-dense", "ordinal"])
@pytest.mark.parametrize("strategy", ["uniform", "quantile", "kmeans"])
def test_bins(encode, strategy):
    options = {"quantile_method": "averaged_inverted_cdf"} if strategy == "quantile" else {}
    bins = KBinsDiscretizer(4, encode=encode, strategy=strategy, **options)
    ours = assert_equal(make_pipeline(columns(bins), Ridge()), TRAIN, Y, NEW)
    at_edges = pd.concat([NEW] * 2).assign(age=np.resize(bins.fit(TRAIN[NUMBERS].fillna(0)).bin_edges_[0], 160))
    assert np.isfinite(ours.predict(at_edges)).all()


@pytest.mark.parametrize(
    "scaler",
    [StandardScaler(with_mean=False), MinMaxScaler((-1, 2)), MinMaxScaler(clip=True), MaxAbsScaler(), RobustScaler()],
)
def test_scalers_of_some_columns(scaler):
    assert_equal(make_pipeline(columns(scaler), Ridge()), TRAIN, Y, NEW)
    assert_equal(make_pipeline(columns(scaler), RandomForestClassifier(5, random_state=0)), TRAIN, CLASSES, NEW)
    x = TRAIN[NUMBERS].to_numpy()
    assert_equal(make_pipeline(scaler, SimpleImputer(), StandardScaler(), Ridge()), x, Y, NEW[NUMBERS].to_numpy())


# ------------------------------------------------------------------------------------------------ columns and expansions


def test_columns_by_name_index_slice_and_mask():
    for chosen in (["age", "speed"], [1, 4], slice(1, 5, 3), [False, True, False, False, True, False], "age"):
        numeric = [chosen] if isinstance(chosen, str) else chosen
        theirs = ColumnTransformer(
            [("a", make_pipeline(SimpleImputer(), StandardScaler()), numeric), ("b", "drop", ["shape"])],
            remainder=OneHotEncoder(handle_unknown="ignore"),
        )
        assert_equal(make_pipeline(theirs, Ridge()), TRAIN, Y, NEW)
    x, new = (frame[NUMBERS].fillna(0).to_numpy() for frame in (TRAIN, NEW))
    theirs = ColumnTransformer(
        [("a", StandardScaler(), [2]), ("b", MinMaxScaler(), slice(0, 1))], remainder="passthrough"
    )
    assert_equal(make_pipeline(theirs, Ridge()), x, Y, new)
    assert_equal(make_pipeline(FeatureUnion([("a", StandardScaler()), ("b", MinMaxScaler())]), Ridge()), x, Y, new)


@pytest.mark.parametrize(
    "expansion", [PolynomialFeatures(2), PolynomialFeatures(3, interaction_only=True), SplineTransformer(5)]
)
def test_expansions_of_some_columns_become_one_layer(expansion):
    for after in ([], [StandardScaler()]):
        theirs = make_pipeline(columns(StandardScaler(), expansion, *after), Ridge())
        ours = assert_equal(theirs, TRAIN, Y, NEW)
        assert len(ours.model.layers) == 2  # of the scaler and of the expansion
        assert_equal(make_pipeline(columns(expansion), StandardScaler(), LogisticRegression()), TRAIN, CLASSES, NEW)
    assert_equal(make_pipeline(columns(), expansion, Ridge()), TRAIN, Y, NEW)
    assert_equal(make_pipeline(columns(expansion), SVR()), TRAIN, Y, NEW)


# ------------------------------------------------------------------------------------------------ last steps


@pytest.mark.parametrize(
    ("last", "target"),
    [
        (LinearRegression(), "values"),
        (LinearRegression(), "several"),
        (LogisticRegression(), "two"),
        (LogisticRegression(), "three"),
        (RidgeClassifier(), "three"),
        (MLPRegressor(hidden_layer_sizes=(8,), max_iter=20, random_state=0), "several"),
        (MLPClassifier((8,), max_iter=20, random_state=0), "two"),
        (MLPClassifier((8,), max_iter=20, random_state=0), "three"),
        (SVC(), "two"),
        (SVC(), "three"),
        (SVC(decision_function_shape="ovo"), "three"),
        (LinearSVC(), "three"),
        (GaussianNB(), "three"),
        (BernoulliNB(), "two"),
        (RandomForestClassifier(5, random_state=0), "three"),
        (GradientBoostingClassifier(n_estimators=5), "two"),
        (GradientBoostingClassifier(n_estimators=5, loss="exponential"), "two"),
        (GradientBoostingClassifier(n_estimators=5), "three"),
        (DecisionTreeRegressor(max_depth=4), "several"),
        (PCA(2), "values"),
        (KMeans(3, n_init=1, random_state=0), "values"),
    ],
)
def test_last_steps(last, target):
    y = {"values": Y, "several": np.column_stack([Y, Y**2]), "two": CLASSES, "three": THREE}[target]
    if isinstance(last, KMeans):  # its `predict` is the cluster, the model has the distances
        theirs = make_pipeline(columns(StandardScaler()), last).fit(TRAIN, y)
        np.testing.assert_allclose(pipeline.from_sklearn(theirs).predict(NEW), theirs.transform(NEW), rtol=1e-10)
        return
    assert_equal(make_pipeline(columns(StandardScaler()), last), TRAIN, y, NEW)


def test_trees_keep_missing_values():
    words = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=np.nan)
    theirs = make_column_transformer((words, WORDS), (StandardScaler(), NUMBERS))
    assert_equal(make_pipeline(theirs, HistGradientBoostingRegressor(max_iter=5)), TRAIN, Y, NEW)
    converted = pipeline.from_sklearn(make_pipeline(StandardScaler(), SimpleImputer(), Ridge()).fit(TRAIN[NUMBERS], Y))
    assert converted.predict(NEW).shape == (80,)
    converted = pipeline.from_sklearn(make_pipeline(StandardScaler(), Ridge()).fit(TRAIN[NUMBERS].fillna(0), Y))
    with pytest.raises(DataError, match="fill missing values by a SimpleImputer in the pipeline"):
        converted.predict(NEW)


# ------------------------------------------------------------------------------------------------ rows and results


def test_frames_arrays_and_types():
    polars = pytest.importorskip("polars")
    theirs = make_pipeline(columns(StandardScaler()), LogisticRegression()).fit(TRAIN, CLASSES)
    ours = pipeline.from_sklearn(theirs)
    expected = ours.predict_proba(NEW)
    typed = NEW.astype({"color": "category", "weekday": "Int64", "age": "Float64"})
    np.testing.assert_array_equal(ours.predict_proba(typed), expected)
    np.testing.assert_array_equal(
        ours.predict_proba(polars.from_pandas(NEW).with_columns(polars.col("shape").fill_null(""))[:0:-1]),
        ours.predict_proba(NEW.fillna({"shape": ""})[:0:-1]),
    )
    np.testing.assert_array_equal(ours.predict_proba(NEW.to_numpy(dtype=object)), expected)
    with pytest.raises(DataError, match="missing columns: 'shape'"):
        ours.predict(NEW.drop(columns="shape"))
    with pytest.raises(DataError, match="expected rows of 6 columns"):
        ours.predict(NEW.to_numpy(dtype=object)[:, :4])
    with pytest.raises(DataError, match="expected numbers, got 'old'"):
        ours.predict(NEW.astype({"age": object}).assign(age="old"))
    with pytest.raises(SpecError, match="the last step has values, no probabilities"):
        pipeline.from_sklearn(make_pipeline(columns(), Ridge()).fit(TRAIN, Y)).predict_proba(NEW)


def test_the_model_is_trained_and_saved_as_any_other(tmp_path):
    ours = kp.zoo.from_sklearn(make_pipeline(columns(SplineTransformer(4)), Ridge()).fit(TRAIN, Y))
    kp.save(ours.model, tmp_path / "model.kapsi")
    inputs = ours.encode(NEW)
    assert inputs.shape == (80, 9)
    assert inputs.dtype == torch.float64
    torch.testing.assert_close(kp.load(tmp_path / "model.kapsi")(inputs), ours.model(inputs), rtol=0, atol=0)
    before = ours.predict(TRAIN)
    kp.fit(ours.model, (ours.encode(TRAIN), torch.from_numpy(Y.copy()).reshape(-1, 1)), solver="ridge", l2=1e-9)
    assert np.mean((ours.predict(TRAIN) - Y) ** 2) < np.mean((before - Y) ** 2)


# ------------------------------------------------------------------------------------------------ refused steps


LAST = ("last", Ridge())
SHAPES = make_pipeline(PolynomialFeatures(include_bias=False), SplineTransformer(4))


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([("knn", KNNImputer()), LAST], "step 'knn': expected StandardScaler"),
        ([("best", SelectKBest(k=2)), LAST], "apply it to the rows first"),
        ([("own", FunctionTransformer(np.abs)), LAST], "step 'own'"),
        (
            [("last", KNeighborsClassifier())],
            "step 'last': KNeighborsClassifier has no conversion; the last step may be",
        ),
        ([("spline", SplineTransformer(4, extrapolation="periodic")), LAST], "extrapolation='periodic'"),
        (
            [("poly", PolynomialFeatures()), ("fill", SimpleImputer()), LAST],
            "PolynomialFeatures comes before SimpleImputer",
        ),
        ([("two", ColumnTransformer([("a", SHAPES, [0])])), LAST], "branch 'a' has more than one expansion"),
        ([("two", ColumnTransformer([("a", KNNImputer(), [0])])), LAST], "step 'two', branch 'a'"),
        ([("last", MLPClassifier((3,), max_iter=2))], "is not fitted"),
    ],
)
def test_steps_without_a_conversion(steps, words):
    x = TRAIN[NUMBERS].fillna(0).to_numpy()
    y = (Y > 3).astype(int)
    theirs = Pipeline(steps)
    if words != "is not fitted":
        theirs.fit(x, y)
    with pytest.raises(SpecError, match=re.escape(words)):
        pipeline.from_sklearn(theirs)
