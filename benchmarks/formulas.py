"""Recovery of formulas: elementary, composite and Feynman functions of the paper, without and with noise.

1,000 rows of each function; noise is normal, as a share of the target's deviation. A formula is *equal* if it has the values of
the function to 1e-6 of its deviation on 1,000 new rows, in the range and in a range a fifth wider (where both are finite);
*close* if only constants differ: within 1 % of the deviation on the same rows. Times are CPU seconds of one core; a fit ends
after 60 of them, as a miss.

- kapsi: `search_formula` with its defaults, the formula of the least cost.
- gplearn 0.4.3: `SymbolicRegressor`, population 1,000, 20 generations, functions add, sub, mul, div, sqrt, log, sin, cos, neg,
  inv, otherwise its defaults.
- pykan 0.2.8: `KAN([n, 5, 1], grid=5, k=3)` in float64, 50 steps of LBFGS with lamb 1e-3, `prune`, 50 steps, `auto_symbolic`
  with its default library, 50 steps. Of ten elementary functions without noise, none ended within 60 seconds, of which
  `auto_symbolic` takes most; E.3 without the limit took 384 seconds, and its formula is equal. The others are not measured.

Run: python benchmarks/formulas.py [--methods kapsi,gplearn,pykan] [--seeds 0,1] [--noise 0,0.01] [--only F.0,E.3]
Results are appended to formulas.jsonl, and known ones are not repeated; formulas.md is the page. The other methods need
`pip install gplearn==0.4.3 pykan==0.2.8`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import sympy

from kapsi.data.problems import ALIASES, FunctionProblem, problem
from kapsi.interpret.expressions import Floats, complexity, evaluate
from kapsi.interpret.search import search_formula

HERE = Path(__file__).parent
STORE, PAGE = HERE / "formulas.jsonl", HERE / "formulas.md"
ROWS, SECONDS = 1000, 60.0
EQUAL, CLOSE = 1e-6, 1e-2
GROUPS = {
    "elementary": [f"E.{i}" for i in range(17)],
    "composite": [f"C.{i}" for i in range(17)],
    "Feynman": [f"F.{i}" for i in range(27)],
}
TARGETS = {"elementary": 14, "composite": 8, "Feynman": 12}


def deviation(function: FunctionProblem, expression: sympy.Expr, symbols: list[sympy.Symbol]) -> float:
    """Return the largest difference to the function in its deviations, on rows of its range and of a wider one."""
    worst = 0.0
    for wider in (0.0, 0.1):
        low = np.array([v.low - wider * (v.high - v.low) for v in function.variables])
        high = np.array([v.high + wider * (v.high - v.low) for v in function.variables])
        x: Floats = low + (high - low) * np.random.default_rng(12345).random((ROWS, function.inputs))
        truth = function.values(x)
        found = np.broadcast_to(evaluate(expression, {s: x[:, i] for i, s in enumerate(symbols)}), truth.shape)
        known = np.isfinite(truth) & (np.isfinite(found) if wider else True)
        if not known.any():
            continue
        # Near a pole the same formula differs by rounding: relative there.
        size = np.maximum(np.abs(truth[known]), np.std(truth[known]) if wider == 0 else 1e-9)
        difference = np.abs(found[known] - truth[known]) / size
        quantile = float(np.quantile(np.nan_to_num(difference, nan=1e300, posinf=1e300), 0.99))
        worst = max(worst, quantile if not wider else 0.0 if quantile < CLOSE else quantile)
    return worst


def kapsi(x: Floats, y: Floats, symbols: list[sympy.Symbol], seed: int) -> sympy.Expr:
    return min(search_formula(x, y, symbols, seconds=SECONDS), key=lambda found: found.cost).expression


def gplearn(x: Floats, y: Floats, symbols: list[sympy.Symbol], seed: int) -> sympy.Expr:
    from gplearn.genetic import SymbolicRegressor

    functions = ("add", "sub", "mul", "div", "sqrt", "log", "sin", "cos", "neg", "inv")
    model = SymbolicRegressor(population_size=1000, generations=20, function_set=functions, random_state=seed)
    parts = iter(model.fit(x, y)._program.program)
    meaning = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "div": lambda a, b: a / b,
        "sqrt": lambda a: sympy.sqrt(abs(a)),
        "log": lambda a: sympy.log(abs(a)),
        "sin": sympy.sin,
        "cos": sympy.cos,
        "neg": lambda a: -a,
        "inv": lambda a: 1 / a,
    }

    def read() -> sympy.Expr:
        """Return the next expression of the prefix notation."""
        part = next(parts)
        if isinstance(part, int):
            return symbols[part]
        return meaning[part.name](*[read() for _ in range(part.arity)]) if hasattr(part, "arity") else sympy.Float(part)

    return read()


def pykan(x: Floats, y: Floats, symbols: list[sympy.Symbol], seed: int) -> sympy.Expr:
    import torch
    from kan import KAN

    torch.set_default_dtype(torch.float64)
    rows, target = torch.tensor(x), torch.tensor(y)[:, None]
    data = {"train_input": rows, "train_label": target, "test_input": rows, "test_label": target}
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        model = KAN(width=[x.shape[1], 5, 1], grid=5, k=3, seed=seed, ckpt_path=folder)
        model.fit(data, opt="LBFGS", steps=50, lamb=1e-3)
        model = model.prune()
        model.fit(data, opt="LBFGS", steps=50)
        model.auto_symbolic()
        model.fit(data, opt="LBFGS", steps=50)
        return sympy.sympify(model.symbolic_formula(var=symbols)[0][0])


METHODS = {"kapsi": kapsi, "gplearn": gplearn, "pykan": pykan}


def measured(method: str, name: str, seed: int, noise: float) -> dict[str, Any]:
    """Return the record of one fit; an error or the end of its time is a miss."""
    function = problem(name)
    x, y = function.sample(ROWS, seed=seed, noise=noise)
    symbols = [sympy.Symbol(variable.name, real=True) for variable in function.variables]
    record: dict[str, Any] = {"name": name, "method": method, "seed": seed, "noise": noise}
    start = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        expression = METHODS[method](x, y, symbols, seed)
        signal.setitimer(signal.ITIMER_PROF, 0)
        seconds = round(time.process_time() - start, 2)
        predicted = evaluate(expression, {s: x[:, i] for i, s in enumerate(symbols)})
        worst = deviation(function, expression, symbols)
    except Exception as error:
        signal.setitimer(signal.ITIMER_PROF, 0)
        note = str(error).splitlines()[0] if str(error) else type(error).__name__
        seconds = round(time.process_time() - start, 2)
        return {**record, "formula": "", "r2": None, "deviation": None, "seconds": seconds, "note": note}
    r2 = 1 - float(np.mean((predicted - y) ** 2) / np.var(y))
    return {
        **record,
        "formula": str(expression),
        "r2": r2 if np.isfinite(r2) else None,
        "complexity": complexity(expression),
        "deviation": worst if np.isfinite(worst) else None,
        "seconds": seconds,
    }


def end_of_time(*_: Any) -> None:
    raise TimeoutError(f"more than {SECONDS:g} CPU s")


def verdict(record: dict[str, Any]) -> str:
    worst = record["deviation"]
    return "miss" if worst is None or worst >= CLOSE else "equal" if worst < EQUAL else "close"


def stored() -> list[dict[str, Any]]:
    return [json.loads(line) for line in STORE.read_text().splitlines()] if STORE.exists() else []


def of_seed(records: list[dict[str, Any]], names: list[str]) -> list[list[dict[str, Any]]]:
    """Return the records of each seed that has all functions."""
    seeds = sorted({r["seed"] for r in records})
    groups = [[r for r in records if r["seed"] == seed and r["name"] in names] for seed in seeds]
    return [group for group in groups if len(group) == len(names)]


def counts(records: list[dict[str, Any]]) -> list[str]:
    """Return the rows of a table: formulas that are equal and close, by functions, noise and method."""
    lines = [
        "| functions | noise | method | seeds | equal, median | worst seed | close | of | asked | CPU s, median | largest |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (group, names), noise in itertools.product(GROUPS.items(), sorted({r["noise"] for r in records})):
        for method in METHODS:
            seeds = of_seed([r for r in records if (r["noise"], r["method"]) == (noise, method)], names)
            if not seeds:
                lines.append(
                    f"| {group} | {noise:g} | {method} | not measured | | | | {len(names)} | {TARGETS[group]} | | |"
                )
                continue
            equal, close = ([sum(verdict(r) == kind for r in seed) for seed in seeds] for kind in ("equal", "close"))
            times = [r["seconds"] for seed in seeds for r in seed]
            lines.append(
                f"| {group} | {noise:g} | {method} | {len(seeds)} | {np.median(equal):g} | {min(equal)} | {np.median(close):g} | "
                f"{len(names)} | {TARGETS[group]} | {np.median(times):.1f} | {max(times):.1f} |"
            )
    return lines


def misses(records: list[dict[str, Any]]) -> list[str]:
    """Return the rows of a table: each function that a method missed, with the seeds and one of its formulas."""
    lines = ["| function | noise | | seeds | R² | formula of one seed |", "|---|---|---|---|---|---|"]
    some = [r for r in records if verdict(r) != "equal"]
    for name, noise in itertools.product(
        [n for names in GROUPS.values() for n in names], sorted({r["noise"] for r in some})
    ):
        for kind in ("close", "miss"):
            these = [r for r in some if (r["name"], r["noise"], verdict(r)) == (name, noise, kind)]
            if these:
                text = these[0]["formula"] or these[0].get("note", "")
                shown = (text if len(text) <= 120 else f"{text[:117]}…").replace("|", "¦")
                r2 = "" if these[0]["r2"] is None else f"{these[0]['r2']:.5f}"
                seeds = ", ".join(str(r["seed"]) for r in these)
                title = f"{name} {ALIASES.get(name, '')} `{problem(name).formula}`"
                lines.append(f"| {title} | {noise:g} | {kind} | {seeds} | {r2} | `{shown}` |")
    return lines


def page(records: list[dict[str, Any]]) -> str:
    """Return the page: counts by group, then the misses of each method."""
    lines = ["# Recovery of formulas", "", *(__doc__ or "").split("\n\nRun:")[0].splitlines()[2:], "", *counts(records)]
    for method in METHODS:
        some = [r for r in records if r["method"] == method]
        if some:
            lines += ["", f"## Misses and close formulas: {method}", "", *misses(some)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="kapsi")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--noise", default="0,0.01")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    signal.signal(signal.SIGPROF, end_of_time)
    names = arguments.only.split(",") if arguments.only else [name for group in GROUPS.values() for name in group]
    for seed, method, noise, name in itertools.product(
        map(int, arguments.seeds.split(",")),
        arguments.methods.split(","),
        map(float, arguments.noise.split(",")),
        names,
    ):
        if any((r["name"], r["method"], r["seed"], r["noise"]) == (name, method, seed, noise) for r in stored()):
            continue
        record = measured(method, name, seed, noise)
        with STORE.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(method, name, noise, seed, verdict(record), record["seconds"], record["formula"][:100], flush=True)
    PAGE.write_text(page(stored()))


if __name__ == "__main__":
    main()
