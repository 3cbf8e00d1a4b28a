"""Methods at the defaults of their packages, with the usual preprocessing, one thread.

A method maps training rows and a seed to a fitted model with `outputs`: probabilities `(rows, classes)`, class codes where a
method has no probabilities, or values `(rows,)`.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

Array: TypeAlias = npt.NDArray[Any]
PENALTIES = np.logspace(-3, 4, 15)
ONE_HOT = "one-hot codes, missing numbers as medians with an indicator"


class TableModel(Protocol):
    """A fitted model."""

    def outputs(self, x: pd.DataFrame) -> Array:
        """Return probabilities, class codes or values."""


Fit: TypeAlias = Callable[[pd.DataFrame, Array, int, int], TableModel]
"""Training inputs, training targets, number of classes (0 in regression), seed."""


class Estimator:
    """A model that scikit-learn's interface fits.

    Args:
        estimator: the estimator, or a pipeline.
        prepare: conversion of the inputs, fitted to the training rows.
    """

    def __init__(self, estimator: Any, prepare: Callable[[pd.DataFrame], Any] | None = None) -> None:
        self.estimator, self.prepare = estimator, prepare or (lambda x: x)

    def outputs(self, x: pd.DataFrame) -> Array:
        """Return probabilities where the estimator has them."""
        x = self.prepare(x)
        predict = getattr(self.estimator, "predict_proba", None) or self.estimator.predict
        return np.asarray(predict(x))


def _text(x: pd.DataFrame) -> list[str]:
    return [name for name in x.columns if x[name].dtype == object]


def _encoded(x: pd.DataFrame, estimator: Any, *, scale: bool) -> Any:
    """Return a pipeline with one-hot codes and imputation, and standardization where the method depends on scales."""
    from sklearn.compose import ColumnTransformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    text = _text(x)
    numbers = [name for name in x.columns if name not in text]
    number = make_pipeline(SimpleImputer(strategy="median", add_indicator=True), *([StandardScaler()] if scale else []))
    category = make_pipeline(
        SimpleImputer(missing_values=None, strategy="constant", fill_value="missing"),
        OneHotEncoder(handle_unknown="ignore", sparse_output=False),
    )
    return make_pipeline(ColumnTransformer([("numbers", number, numbers), ("text", category, text)]), estimator)


def _sklearn(classifier: Callable[[int], Any], regressor: Callable[[int], Any], *, scale: bool) -> Fit:
    def fit(x: pd.DataFrame, y: Array, classes: int, seed: int) -> TableModel:
        pipeline = _encoded(x, (classifier if classes else regressor)(seed), scale=scale)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on iterations
            return Estimator(pipeline.fit(x, y))

    return fit


def _linear() -> Fit:
    from sklearn.linear_model import LogisticRegressionCV, RidgeCV

    def classifier(seed: int) -> Any:
        return LogisticRegressionCV(
            Cs=10,
            l1_ratios=(0.0,),
            scoring="neg_log_loss",
            max_iter=300,
            use_legacy_attributes=False,
            random_state=seed,
        )

    return _sklearn(classifier, lambda seed: RidgeCV(PENALTIES), scale=True)


def _svm() -> Fit:
    from sklearn.svm import SVC, SVR

    # SVR's default tube is for targets of unit variance.
    def regressor(seed: int) -> Any:
        from sklearn.compose import TransformedTargetRegressor
        from sklearn.preprocessing import StandardScaler

        return TransformedTargetRegressor(SVR(), transformer=StandardScaler())

    return _sklearn(lambda seed: SVC(), regressor, scale=True)


def _mlp() -> Fit:
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.preprocessing import StandardScaler

    def regressor(seed: int) -> Any:
        return TransformedTargetRegressor(MLPRegressor(random_state=seed), transformer=StandardScaler())

    return _sklearn(lambda seed: MLPClassifier(random_state=seed), regressor, scale=True)


def _forest() -> Fit:
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

    return _sklearn(
        lambda seed: RandomForestClassifier(random_state=seed),
        lambda seed: RandomForestRegressor(random_state=seed),
        scale=False,
    )


def _xgboost() -> Fit:
    from xgboost import XGBClassifier, XGBRegressor

    return _sklearn(
        lambda seed: XGBClassifier(random_state=seed, n_jobs=1),
        lambda seed: XGBRegressor(random_state=seed, n_jobs=1),
        scale=False,
    )


def _categories(x: pd.DataFrame) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """Return a conversion of text to the categories of the training rows; other values are missing."""
    levels = {name: sorted({value for value in x[name] if value is not None}) for name in _text(x)}

    def convert(frame: pd.DataFrame) -> pd.DataFrame:
        return frame.assign(**{name: pd.Categorical(frame[name], categories=found) for name, found in levels.items()})

    return convert


def _native(classifier: Callable[[int], Any], regressor: Callable[[int], Any]) -> Fit:
    def fit(x: pd.DataFrame, y: Array, classes: int, seed: int) -> TableModel:
        convert = _categories(x)
        return Estimator((classifier if classes else regressor)(seed).fit(convert(x), y), convert)

    return fit


def _histogram() -> Fit:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    return _native(
        lambda seed: HistGradientBoostingClassifier(random_state=seed),
        lambda seed: HistGradientBoostingRegressor(random_state=seed),
    )


def _lightgbm() -> Fit:
    from lightgbm import LGBMClassifier, LGBMRegressor

    return _native(
        lambda seed: LGBMClassifier(random_state=seed, n_jobs=1, verbose=-1),
        lambda seed: LGBMRegressor(random_state=seed, n_jobs=1, verbose=-1),
    )


def _catboost() -> Fit:
    from catboost import CatBoostClassifier, CatBoostRegressor

    def fit(x: pd.DataFrame, y: Array, classes: int, seed: int) -> TableModel:
        text = _text(x)

        def convert(frame: pd.DataFrame) -> pd.DataFrame:
            return frame.assign(**{name: frame[name].map(lambda v: "missing" if v is None else v) for name in text})

        make = CatBoostClassifier if classes else CatBoostRegressor
        model = make(random_seed=seed, thread_count=1, verbose=False, allow_writing_files=False, cat_features=text)
        return Estimator(model.fit(convert(x), y), convert)

    return fit


def _ebm() -> Fit:
    from interpret.glassbox import ExplainableBoostingClassifier, ExplainableBoostingRegressor

    def fit(x: pd.DataFrame, y: Array, classes: int, seed: int) -> TableModel:
        make = ExplainableBoostingClassifier if classes else ExplainableBoostingRegressor
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on missing values, and on interactions of several classes
            return Estimator(make(random_state=seed, n_jobs=1).fit(x, y))

    return fit


# ------------------------------------------------------------------------------------------------ kapsi


def _kapsi(prefer: str) -> Callable[[], Fit]:
    def load() -> Fit:
        estimators = importlib.import_module("kapsi.estimators")

        def fit(x: pd.DataFrame, y: Array, classes: int, seed: int) -> TableModel:
            make = estimators.RPNClassifier if classes else estimators.RPNRegressor
            return Estimator(make(prefer=prefer, random_state=seed).fit(x, y))

        return fit

    return load


class RecipeModel:
    """A model of a recipe, with kapsi's preprocessing of tables.

    Args:
        recipe: name of the recipe, as `linear`.
        x, y, classes, seed: see `Fit`.
    """

    def __init__(self, recipe: str, x: pd.DataFrame, y: Array, classes: int, seed: int) -> None:
        from kapsi.data.tabular import make_problem, table_of
        from kapsi.function import coerce
        from kapsi.recipes import Recipe
        from kapsi.tables.preparation import TrainingRows
        from kapsi.tables.recipe_rows import fit_recipe
        from kapsi.training.config import TrainConfig

        target = [f"class {code:04d}" for code in y] if classes else y
        table = table_of({**{name: x[name] for name in x}, "the target": np.asarray(target)}, "train")
        problem = make_problem(table, "the target", task="classification" if classes else "regression")
        train = TrainingRows.of(problem, np.arange(len(y)), seed)
        chosen = coerce(Recipe, recipe, "recipe")
        self.model, self.result = fit_recipe(problem, train, chosen, TrainConfig(seed=seed))

    def outputs(self, x: pd.DataFrame) -> Array:
        """Return probabilities or values."""
        from kapsi.data.tabular import table_of

        table, _ = self.model.preprocessing.check(table_of({name: x[name] for name in x}, "test"))
        return self.model.outputs(table)


def _recipe(name: str) -> Fit:
    def fit(x: pd.DataFrame, y: Array, classes: int, seed: int) -> TableModel:
        return RecipeModel(name, x, y, classes, seed)

    return fit


BASELINES: Mapping[str, Callable[[], Fit]] = {
    "linear": _linear,
    "SVM rbf": _svm,
    "MLP": _mlp,
    "random forest": _forest,
    "HistGradientBoosting": _histogram,
    "XGBoost": _xgboost,
    "LightGBM": _lightgbm,
    "CatBoost": _catboost,
    "EBM": _ebm,
}
"""Methods of other packages; the values import the package."""
KAPSI: Mapping[str, Callable[[], Fit]] = {
    "kapsi": _kapsi("accuracy"),
    "kapsi explainable": _kapsi("explainable"),
    "kapsi small": _kapsi("small"),
    "kapsi fast": _kapsi("fast"),
}
"""kapsi's estimators by preference."""
METHODS = (*BASELINES, *KAPSI)
PREPARATION = {
    "linear": f"{ONE_HOT}, standardized; ridge with leave-one-out over 15 penalties, logistic with 5 folds over 10",
    "SVM rbf": f"{ONE_HOT}, standardized, also the target; no probabilities",
    "MLP": f"{ONE_HOT}, standardized, also the target",
    "random forest": ONE_HOT,
    "HistGradientBoosting": "native categories and missing values",
    "XGBoost": f"{ONE_HOT} (native categories are off by default)",
    "LightGBM": "native categories and missing values",
    "CatBoost": "native categories (missing ones as a category) and missing values",
    "EBM": "native categories and missing values",
}
"""Preprocessing of each method."""


def method(name: str) -> Fit:
    """Return a method by name; `recipe:NAME` is a single recipe of kapsi.

    Raises:
        KeyError: the name is unknown.
        ImportError: its package is not installed.
    """
    if name.startswith("recipe:"):
        return _recipe(name.removeprefix("recipe:"))
    return {**BASELINES, **KAPSI}[name]()
