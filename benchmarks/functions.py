"""`kapsi fit` at its defaults on CSV files of functions: the 27 Feynman functions of the paper, and six functions of 400 rows.

Feynman functions: 1,000 training and 1,000 test rows, those of `results/feynman`, whose errors are compared with. Six functions:
400 training and 1,000 test rows, beside CatBoost, gplearn and pykan at their defaults and a Kolmogorov–Arnold network of kapsi.
Every fit is one line of JSON; a run continues where an earlier one stopped. With `--page`, the page is written from the file.

Run: python benchmarks/functions.py [--functions I.6.2 "sin 20x"] [--methods "kapsi fit" CatBoost] [--seeds 0]
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.util
import io
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from tabular.records import Key, Record, append, load

import kapsi as kp
from kapsi.data.problems import ALIASES, FunctionProblem, Variable, problem
from kapsi.files import atomic

Floats: TypeAlias = npt.NDArray[np.float64]
HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "functions.jsonl", HERE / "functions.md"
REPRODUCED = HERE.parent / "results" / "feynman.jsonl"
MAIN = "kapsi fit"
ROWS, TEST_ROWS = 400, 1_000
WITHIN, FACTOR, SECONDS = 1.2, 3.0, 60.0
"""Largest error of the six functions over the best other, of Feynman functions over `results/feynman`, and CPU seconds of a fit."""


def _on(low: float, high: float, *names: str) -> tuple[Variable, ...]:
    return tuple(Variable(name, low, high) for name in names)


# The normal distribution function is a sigmoid of x (1.5976 + 0.07056 x²), to 0.0002; formulas have no error function.
_D1 = "((log(s/k) + (r + v**2/2)*t)/(v*sqrt(t)))"
_D2 = f"({_D1} - v*sqrt(t))"


def _normal(d: str) -> str:
    return f"(1/(1 + exp(-1.5976*{d} - 0.07056*{d}**3)))"


SIX: Mapping[str, FunctionProblem] = {
    "sin 20x": FunctionProblem("sin 20x", "sin(20*x)", _on(-1, 1, "x")),
    "abs x and steps": FunctionProblem(
        "abs x and steps", "abs(x) + 0.25*(x - 0.3)/abs(x - 0.3) - 0.25*(x + 0.5)/abs(x + 0.5)", _on(-1, 1, "x")
    ),
    "xy/z²": FunctionProblem("xy/z²", "x*y/z**2", _on(1, 5, "x", "y", "z")),
    "x^−0.2": FunctionProblem("x^−0.2", "x**(-0.2)", _on(0.001, 1, "x")),
    "Black–Scholes": FunctionProblem(
        "Black–Scholes",
        f"s*{_normal(_D1)} - k*exp(-r*t)*{_normal(_D2)}",
        (*_on(50, 150, "s", "k"), *_on(0.1, 2, "t"), *_on(0, 0.1, "r"), *_on(0.1, 0.5, "v")),
    ),
    "sin(πx) sinh(πy)/sinh(π)": FunctionProblem(
        "sin(πx) sinh(πy)/sinh(π)", "sin(pi*x)*sinh(pi*y)/sinh(pi)", _on(-1, 1, "x", "y")
    ),
}
"""A period, kinks and jumps, a quotient, a pole, the price of a call option, a solution of Laplace's equation."""

FEYNMAN: Mapping[str, FunctionProblem] = {name: problem(name) for name in ALIASES.values()}


class Rows:
    """Rows of a function.

    Args:
        name: name of the function.
        seed: seed of the rows.
    """

    def __init__(self, name: str, seed: int) -> None:
        if name in SIX:
            parts = SIX[name].split(ROWS + TEST_ROWS, ROWS, seed=seed)
        else:
            parts = FEYNMAN[name].split(seed=seed)
        self.x, self.y, self.x_test, self.y_test = parts


Predict: TypeAlias = Callable[[Rows, int], Floats]
"""Fits the training rows with a seed; returns predictions for the test rows."""


# ------------------------------------------------------------------------------------------------ methods


def kapsi_fit(rows: Rows, seed: int) -> Floats:
    """Return predictions by the command line: CSV in, CSV out."""
    with tempfile.TemporaryDirectory() as folder:
        train, test, out, run = (Path(folder) / name for name in ("train.csv", "test.csv", "out.csv", "run"))
        names = [f"x{i + 1}" for i in range(rows.x.shape[1])]
        for file, table, header in (
            (train, np.column_stack([rows.x, rows.y]), [*names, "y"]),
            (test, rows.x_test, names),
        ):
            with open(file, "w", newline="", encoding="utf-8") as stream:
                csv.writer(stream).writerows([header, *table.tolist()])
        for command in (
            ["fit", train, "--target", "y", "--seed", seed, "--output", run],
            ["predict", run, test, "--output", out],
        ):
            done = subprocess.run([sys.executable, "-m", "kapsi", *map(str, command)], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stderr.strip()[-200:])
        with open(out, newline="", encoding="utf-8") as stream:
            return np.array([float(row["prediction"]) for row in csv.DictReader(stream)])


def kapsi_kan(rows: Rows, seed: int) -> Floats:
    """Return predictions of a network m, 5, 1 of kapsi with cubic splines of 8 intervals, fitted by `kapsi.fit`."""
    import torch

    low, high = rows.x.min(0), rows.x.max(0)
    center, scale = rows.y.mean(), rows.y.std()
    x, x_test = (torch.from_numpy(2 * (part - low) / (high - low) - 1).float() for part in (rows.x, rows.x_test))
    y = torch.from_numpy((rows.y - center) / scale).float()[:, None]
    base = kp.LinearRemainder(before="silu")  # type: ignore[arg-type]
    spec = kp.rpn((x.shape[1], 5, 1), kp.BSpline(intervals=8), remainder=base)
    model = kp.calibrate(kp.Model(spec, seed=seed), x)
    kp.fit(model, (x, y), epochs=100)
    with torch.no_grad():
        found: Floats = model(x_test)[:, 0].double().numpy() * scale + center
    return found


def pykan(rows: Rows, seed: int) -> Floats:
    """Return predictions of pykan's network m, 5, 1 with its L-BFGS; inputs in [−1, 1] and standardized targets."""
    import torch
    from kan import KAN  # type: ignore[import-not-found, import-untyped, unused-ignore]

    low, high = rows.x.min(0), rows.x.max(0)
    center, scale = rows.y.mean(), rows.y.std()
    x, x_test = (torch.from_numpy(2 * (part - low) / (high - low) - 1).float() for part in (rows.x, rows.x_test))
    y = torch.from_numpy((rows.y - center) / scale).float()[:, None]
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        model = KAN(width=[x.shape[1], 5, 1], seed=seed, auto_save=False)
        model.speed()
        # Test rows are shown in the progress bar alone.
        model.fit({"train_input": x, "train_label": y, "test_input": x, "test_label": y}, opt="LBFGS", steps=100)
    with torch.no_grad():
        found: Floats = model(x_test)[:, 0].double().numpy() * scale + center
    return found


def gplearn(rows: Rows, seed: int) -> Floats:
    """Return predictions of gplearn's symbolic regression."""
    from gplearn.genetic import SymbolicRegressor  # type: ignore[import-not-found, import-untyped, unused-ignore]

    found: Floats = SymbolicRegressor(random_state=seed).fit(rows.x, rows.y).predict(rows.x_test)
    return found


def catboost(rows: Rows, seed: int) -> Floats:
    """Return predictions of CatBoost."""
    from catboost import CatBoostRegressor

    model = CatBoostRegressor(random_seed=seed, thread_count=1, verbose=False, allow_writing_files=False)
    return np.asarray(model.fit(rows.x, rows.y).predict(rows.x_test))


METHODS: Mapping[str, tuple[Predict, str]] = {
    MAIN: (kapsi_fit, "kapsi"),
    "KAN of kapsi": (kapsi_kan, "kapsi"),
    "pykan": (pykan, "kan"),
    "gplearn": (gplearn, "gplearn"),
    "CatBoost": (catboost, "catboost"),
}
"""Methods with the package that each needs."""


# ------------------------------------------------------------------------------------------------ a run


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of those that it has waited for."""
    return time.process_time() + resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime


def measure(name: str, method: str, seed: int) -> Record:
    """Return the record of one fit; `fit` includes the predictions and, for `kapsi fit`, the starts of Python."""
    rows = Rows(name, seed)
    spread = float(rows.y_test.std())
    start = cpu_seconds()
    try:
        predicted = METHODS[method][0](rows, seed)
    except Exception as error:  # of any package
        text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return Record(name, seed, 0, method, len(rows.y_test), spread=spread, failure=text)
    squares = float(np.mean((predicted - rows.y_test) ** 2))
    seconds = cpu_seconds() - start
    return Record(name, seed, 0, method, len(rows.y_test), 1 - squares / spread**2, squares**0.5, spread, seconds)


def wanted(chosen: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Yield function, method and seed of all fits; Feynman functions are fitted by `kapsi fit` alone."""
    for seed in chosen.seeds:
        for name in chosen.functions:
            for method in chosen.methods:
                if importlib.util.find_spec(METHODS[method][1]) and (name in SIX or method == MAIN):
                    yield name, method, seed


# ------------------------------------------------------------------------------------------------ the page


def errors(records: Mapping[Key, Record], name: str, method: str) -> list[float]:
    """Return the errors of all seeds: root mean squares over the deviation of the targets."""
    found = [record for key, record in records.items() if (key[0], key[3]) == (name, method)]
    return [r.loss / r.spread for r in found if r.loss is not None and r.spread]


def seconds(records: Mapping[Key, Record], name: str, method: str) -> float:
    """Return the median of the CPU seconds of a fit; NaN without one."""
    found = [r.fit for key, r in records.items() if (key[0], key[3]) == (name, method) and r.fit is not None]
    return statistics.median(found) if found else math.nan


def six_lines(records: Mapping[Key, Record]) -> list[str]:
    """Return the table of the six functions."""
    lines = [
        "| function | " + " | ".join(METHODS) + f" | {MAIN} / best other | {MAIN}, CPU s |",
        "|---|" + "---|" * (len(METHODS) + 2),
    ]
    met = compared = 0
    for name in SIX:
        found = {method: errors(records, name, method) for method in METHODS}
        medians = {method: statistics.median(values) for method, values in found.items() if values}
        others = [value for method, value in medians.items() if method != MAIN]
        ratio = medians[MAIN] / min(others) if MAIN in medians and others else None
        compared += ratio is not None
        met += ratio is not None and ratio <= WITHIN
        best = min(medians.values(), default=0.0)
        texts = [f"{medians[m]:.3g}" if m in medians else "–" for m in METHODS]
        texts = [f"**{t}**" if medians.get(m) == best else t for m, t in zip(METHODS, texts, strict=True)]
        spent = seconds(records, name, MAIN)
        last = ["–" if ratio is None else f"{ratio:.3g}", "–" if math.isnan(spent) else f"{spent:.0f}"]
        lines.append("| " + " | ".join([name, *texts, *last]) + " |")
    return [*lines, "", f"At most {WITHIN:g} times the best other: {met} of {compared} functions."]


def reproduced() -> dict[tuple[str, str], float]:
    """Return the median test MSE over seeds by function and method of `results/feynman`."""
    found = defaultdict(list)
    for line in REPRODUCED.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        found[record["row"], record["method"]].append(record["score"])
    return {key: statistics.median(values) for key, values in found.items()}


def feynman_lines(records: Mapping[Key, Record]) -> list[str]:
    """Return the table of the Feynman functions."""
    known, ratios, times = reproduced(), [], []
    lines = [
        f"| function | {MAIN} | the paper's sizes | {MAIN} / the paper's sizes | at most 1,000 parameters | CPU s |",
        "|---|---|---|---|---|---|",
    ]
    for name in FEYNMAN:
        found = [r.loss**2 for key, r in records.items() if (key[0], key[3]) == (name, MAIN) and r.loss is not None]
        if not found:
            continue
        error, paper, wide = statistics.median(found), known[name, "kapsi"], known[name, "kapsi_1000"]
        ratios.append((error / paper) ** 0.5)
        times.append(seconds(records, name, MAIN))
        lines.append(f"| {name} | {error:.3g} | {paper:.3g} | {error / paper:.3g} | {wide:.3g} | {times[-1]:.0f} |")
    if not ratios:
        return ["Not measured yet."]
    return [
        *lines,
        "",
        f"{len(ratios)} of {len(FEYNMAN)} functions. Median ratio of the root mean squared errors: "
        f"{statistics.median(ratios):.3g} (aim: {FACTOR:g}); at most {FACTOR:g} for {sum(r <= FACTOR for r in ratios)}. "
        f"Most CPU seconds: {max(times):.0f} (aim: {SECONDS:g}).",
    ]


def page(records: Mapping[Key, Record]) -> str:
    """Return the page as Markdown."""
    seeds = sorted({key[1] for key in records})
    failures = [f"- {key[0]}, {key[3]}, seed {key[1]}: {r.failure}" for key, r in records.items() if r.failure]
    parts = [
        "# Functions by `kapsi fit`",
        "",
        "Defaults of the command line, CSV files, one thread, other work on the machine; CPU seconds are those of `kapsi fit` and "
        f"`kapsi predict` with the starts of Python. Seeds: {', '.join(map(str, seeds)) or 'none'}. "
        "`python benchmarks/functions.py` continues where it stopped; `--page` writes this page.",
        "",
        f"## Six functions, {ROWS} rows",
        "",
        "Root mean squared error on 1,000 test rows over the deviation of their targets, the median over seeds. CatBoost, gplearn: "
        "defaults. pykan: [m, 5, 1], its default grid, 100 steps of L-BFGS. KAN of kapsi: [m, 5, 1], 8 intervals, `kapsi.fit`.",
        "",
        *six_lines(records),
        "",
        "## The 27 Feynman functions of the paper",
        "",
        "Mean squared error on 1,000 test rows, the median over seeds, beside the medians of "
        "[results/feynman](../results/feynman.md) with the paper's sizes and with at most 1,000 parameters.",
        "",
        *feynman_lines(records),
        *(["", "Failures:", "", *failures] if failures else []),
    ]
    return "\n".join(parts) + "\n"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = (*SIX, *FEYNMAN)
    parser.add_argument("--functions", nargs="+", default=every, choices=every, metavar="NAME", help="names")
    parser.add_argument("--methods", nargs="+", default=tuple(METHODS), choices=tuple(METHODS), metavar="METHOD")
    parser.add_argument("--seeds", nargs="+", type=int, default=(0,), help="seeds (default 0)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="file of results")
    parser.add_argument("--again", action="store_true", help="repeat recorded fits; the last line counts")
    parser.add_argument("--page", type=Path, nargs="?", const=PAGE, metavar="FILE", help="write the page instead")
    return parser.parse_args(arguments)


def main() -> int:
    chosen = parse()
    records = load([chosen.results])
    if chosen.page:
        with atomic(chosen.page) as file:
            file.write_text(page(records), encoding="utf-8")
        return 0
    for name, method, seed in wanted(chosen):
        if chosen.again or (name, seed, 0, method) not in records:
            record = measure(name, method, seed)
            append(chosen.results, record)
            error = record.failure or f"{record.loss / record.spread:.3g}"  # type: ignore[operator]
            print(f"seed {seed}, {name}, {method}: {error}, {record.fit or 0:.1f} CPU s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
