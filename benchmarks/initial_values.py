"""Elementary and composite functions from several initial values: the default of kapsi, its rule `measured`, and Xavier's.

The paper's models of the 34 functions, nested and extended B-splines (5 intervals, degree 3) and Taylor 2, low rank 1, zero and
linear remainder, widths 2, 2, 1 and 2, 2, 2, 1; 1,000 training and 1,000 test rows. AdamW on all rows, learning rate 0.03 to zero
by a cosine, 500 epochs. An error is the lowest test MSE of all fifth epochs and the last, in units of the function, float32. Models
of a case differ in values alone, so `torch.func.vmap` trains all at once; the last table compares runs of `kp.fit`. A round is a
seed.

Run: python benchmarks/initial_values.py [--store FILE] [--measured]
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from measure import Report, Table, Target, number, options, progress
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

import kapsi as kp
from kapsi.data.problems import FunctionProblem, problems

ROWS = 1_000
SEEDS = 5
EPOCHS = 500
QUICK_EPOCHS = 20
RATE = 0.03
EVERY = 5
WIDTHS = {"elementary": [2, 2, 1], "composite": [2, 2, 2, 1]}
PARTS = (kp.BSpline(intervals=5, degree=3), kp.Taylor(2))
EXPANSIONS: Mapping[str, kp.Expansion] = {"nested": kp.Nested(PARTS), "extended": kp.Extended(PARTS)}
MOST = 10.0
"""Largest ratio of the errors of a function that is allowed."""
CHECKED = ("C.1", "C.9")
"""Functions whose first seeds are also trained by `kp.fit`."""


class Case(NamedTuple):
    """A kind of model."""

    kind: str
    remainder: str

    def __str__(self) -> str:
        return f"{self.kind}, {self.remainder}"


CASES = [Case(kind, remainder) for kind in EXPANSIONS for remainder in ("zero", "linear")]


class Rows(NamedTuple):
    """Rows of one seed, float32."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


def rows(function: FunctionProblem, seed: int) -> Rows:
    """Return training and test rows."""
    x, y, x_test, y_test = (torch.from_numpy(part).float() for part in function.split(2 * ROWS, ROWS, seed=seed))
    return Rows(x, y.unsqueeze(1), x_test, y_test.unsqueeze(1))


# ------------------------------------------------------------------------------------------------ models


Builder: TypeAlias = Callable[[Case, list[int], Rows, int], kp.Model]
"""What builds a model from a case, widths, rows of one seed, and the seed."""


def by_rule(init: Any) -> Builder:
    """Return what builds a model with initial values by a rule."""

    def build(case: Case, widths: list[int], data: Rows, seed: int) -> kp.Model:
        spec = kp.rpn(widths, EXPANSIONS[case.kind], kp.LowRank(1), case.remainder, init=init)
        return kp.Model(spec, seed=seed)

    return build


BUILDERS: Mapping[str, Builder] = {
    "smooth": by_rule("smooth"),
    "xavier_uniform": by_rule("xavier_uniform"),
    "measured": by_rule("measured"),
}
"""Builders by the name of their column."""


# ------------------------------------------------------------------------------------------------ training


def best_errors(models: Sequence[kp.Model], data: Sequence[Rows], epochs: int) -> list[float]:
    """Train all models at once and return the lowest test error of each."""
    parameters, buffers = stack_module_state(list(models))
    x, y, x_test, y_test = (torch.stack(parts) for parts in zip(*data, strict=True))
    model = models[0]

    def errors(x: Tensor, y: Tensor) -> Tensor:
        def one(parameters: Any, buffers: Any, x: Tensor, y: Tensor) -> Tensor:
            return (functional_call(model, (parameters, buffers), (x,)) - y).square().mean()

        return vmap(one)(parameters, buffers, x, y)

    trained = list(parameters.values())
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0)
    best = torch.full((len(models),), math.inf)
    for epoch in range(1, epochs + 1):
        for group in optimizer.param_groups:
            group["lr"] = RATE * 0.5 * (1 + math.cos(math.pi * (epoch - 1) / epochs))
        optimizer.zero_grad()
        errors(x, y).sum().backward()
        optimizer.step()
        if epoch % EVERY == 0 or epoch == epochs:
            with torch.no_grad():
                best = torch.minimum(best, errors(x_test, y_test).nan_to_num(nan=math.inf))
    return [float(value) for value in best]


def best_error_of_fit(model: kp.Model, data: Rows, epochs: int) -> float:
    """Return the same error of a model trained by `kp.train`."""
    best = math.inf
    config = kp.TrainConfig(loss=kp.MSE(), solver=kp.AdamW(learning_rate=RATE, batch_size=None), epochs=epochs)
    for epoch, _ in enumerate(kp.train(model, data[:2], config), 1):
        if epoch % EVERY == 0 or epoch == epochs:
            with torch.no_grad():
                best = min(best, float((model(data.x_test) - data.y_test).square().mean()))
    return best


# ------------------------------------------------------------------------------------------------ the figures


class Figures:
    """Errors by case, column, function and seed; kept in a file of JSON lines, if one is given."""

    def __init__(self, file: Path | None, epochs: int, seeds: int, builders: Mapping[str, Builder] = BUILDERS) -> None:
        self.file, self.epochs, self.seeds, self.builders = file, epochs, seeds, builders
        self.known: dict[str, dict[str, list[float]]] = {}
        if file is not None and file.exists():
            for line in file.read_text(encoding="utf-8").splitlines():
                self.known.update(json.loads(line))

    def of(self, case: Case, column: str, group: str, chosen: Sequence[FunctionProblem]) -> dict[str, list[float]]:
        """Return the errors of all seeds by function, from the file or by training."""
        key = f"{case}, {column}, {group}, {self.epochs} epochs, {self.seeds} seeds, {len(chosen)} functions"
        runs = [(function, seed) for function in chosen for seed in range(self.seeds)]

        def errors() -> list[float]:
            data = [rows(*run) for run in runs]
            models = [
                self.builders[column](case, WIDTHS[group], part, seed)
                for (_, seed), part in zip(runs, data, strict=True)
            ]
            return best_errors(models, data, self.epochs)

        return self.kept(key, runs, errors)

    def kept(
        self, key: str, runs: Sequence[tuple[FunctionProblem, int]], errors: Callable[[], Sequence[float]]
    ) -> dict[str, list[float]]:
        """Return the errors of runs by function, from the file if it has them."""
        if key not in self.known:
            progress(key)
            found: dict[str, list[float]] = {}
            for (function, _), error in zip(runs, errors(), strict=True):
                found.setdefault(function.name, []).append(error)
            self.known[key] = found
            if self.file is not None:
                with self.file.open("a", encoding="utf-8") as out:
                    out.write(json.dumps({key: found}) + "\n")
        return self.known[key]


def ratios_table(
    figures: Figures, report: Report, functions: Mapping[str, list[FunctionProblem]], compared: Sequence[str]
) -> None:
    """Add the table of all functions, and the targets of the default."""
    others = "; in parentheses the ratio of `measured`, where it differs from the default" if compared else ""
    table = Table(
        f"Best test error of the default, medians of {figures.seeds} seeds, and its ratio to that of Xavier's values{others}.",
        ["", "function", *(name for case in CASES for name in (str(case), "ratio"))],
    )
    ratios: list[float] = []
    of_others: dict[str, list[float]] = {}
    for group, chosen in functions.items():
        for function in chosen:
            cells = [function.name, function.formula]
            for case in CASES:
                columns = ("smooth", "xavier_uniform", *(compared if case.kind == "nested" else ()))
                median = {
                    name: statistics.median(figures.of(case, name, group, chosen)[function.name]) for name in columns
                }
                ratio = {name: median[name] / median["xavier_uniform"] for name in columns}
                ratios.append(ratio["smooth"])
                for name in columns:
                    of_others.setdefault(f"{case}: {name}", []).append(ratio[name])
                other = f" ({number(ratio['measured'])})" if "measured" in ratio else ""
                cells += [f"{median['smooth']:.1e}", number(ratio["smooth"]) + other]
                report.figures.append({"function": function.name, "case": str(case), "errors": median})
            table.rows.append(cells)
    report.tables.append(table)
    summary = Table("Ratios to Xavier's values over all functions.", ["models: initial values", "median", "largest"])
    for name, values in of_others.items():
        if "xavier" not in name:
            summary.rows.append([name, number(statistics.median(values)), number(max(values))])
    report.tables.append(summary)
    report.targets.append(
        Target("error of the default / Xavier's, median", 1, statistics.median(ratios), "×", most=True)
    )
    report.targets.append(
        Target("error of the default / Xavier's, the worst function", MOST, max(ratios), "×", most=True)
    )


def agreement_table(figures: Figures, report: Report, epochs: int) -> None:
    """Add a table of runs trained both ways: they differ by rounding, which training amplifies."""
    table = Table(
        f"Errors after {epochs} epochs of models trained at once, and by `kp.train` one by one (nested, zero, seed 0).",
        ["", "at once", "`kp.train`"],
    )
    chosen = [function for function in problems("composite") if function.name in CHECKED]
    for function in chosen:
        data, case = rows(function, 0), CASES[0]
        build = BUILDERS["smooth"]
        together = best_errors([build(case, WIDTHS["composite"], data, 0)], [data], epochs)[0]
        alone = best_error_of_fit(build(case, WIDTHS["composite"], data, 0), data, epochs)
        table.rows.append([function.name, f"{together:.4e}", f"{alone:.4e}"])
    report.tables.append(table)


def main() -> None:
    measured = {"action": "store_true", "help": "compare the rule `measured` too, where it differs from the default"}
    store = {"type": Path, "help": "JSON lines of errors, read and extended: a run goes on where another one ended"}
    chosen = options(__doc__ or "", rounds=SEEDS, store=store, measured=measured)
    report = Report("initial_values", chosen)
    functions = {group: list(problems(group)) for group in WIDTHS}
    if chosen.quick:
        functions = {group: found[1:3] for group, found in functions.items()}
    figures = Figures(chosen.store, QUICK_EPOCHS if chosen.quick else EPOCHS, chosen.rounds)
    ratios_table(figures, report, functions, ("measured",) if chosen.measured else ())
    agreement_table(figures, report, QUICK_EPOCHS)
    report.finish()


if __name__ == "__main__":
    main()
