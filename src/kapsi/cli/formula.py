"""`kapsi formula`: a run as a formula."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

from kapsi.cli.common import announce_recovery, new_file, notes, number, say, show_json
from kapsi.cli.common import table as show_table
from kapsi.cli.options import OUTPUT, Json, Run, option
from kapsi.errors import FileError, FormulaError

if TYPE_CHECKING:
    from kapsi.interpret.formulas import ModelFormula
    from kapsi.interpret.pareto import FormulaRow

EXAMPLES = """\
kapsi formula runs/table
kapsi formula runs/table --complexity 12 --latex
kapsi formula runs/table --simplify
kapsi formula runs/table --exact --output formula.py
"""

FORMULA = "Formula"
DIGITS = 6
LONGEST_CELL, LONGEST_LINE = 72, 20_000
SUFFIXES = (".txt", ".tex", ".py")

Complexity: TypeAlias = Annotated[
    int | None, option(FORMULA, "N", "The most accurate formula of at most N numbers, variables and operations.", min=1)
]
Latex: TypeAlias = Annotated[bool, option(FORMULA, None, "Print the formula as LaTeX.", "--latex")]
Exact: TypeAlias = Annotated[
    bool, option(FORMULA, None, "The formula of the fitted model, without a search.", "--exact")
]
Simplify: TypeAlias = Annotated[
    bool,
    option(
        FORMULA, None, "The formula of the model with elementary functions as terms, without a search.", "--simplify"
    ),
]
Seconds: TypeAlias = Annotated[
    float | None, option(FORMULA, "S", "Time of the search for short formulas; default: 60.", min=0, max=86400)
]
Target: TypeAlias = Annotated[
    str | None, option(OUTPUT, "FILE", "Write the formula: .txt, .tex (LaTeX) or .py (a function of NumPy arrays).")
]
Replace: TypeAlias = Annotated[bool, option(OUTPUT, None, "Replace an old file.", "--overwrite")]


def formula(
    run: Run,
    complexity: Complexity = None,
    simplify: Simplify = False,
    exact: Exact = False,
    seconds: Seconds = None,
    latex: Latex = False,
    output: Target = None,
    overwrite: Replace = False,
    json: Json = False,
) -> None:
    """Show a run as formulas, from simple to accurate; the last line is the best compromise, `target = formula`.

    Tables of up to 10 numbers and indicators of categories are searched for short formulas. The last rows are formulas of the
    model: simplified, for models of functions of single columns, and exact. The best compromise has the shortest description.
    Two classes have one formula, `log-odds(label) = formula`, more have `logit(label) = formula` each.
    """
    from kapsi.files import atomic
    from kapsi.interpret.pareto import SOURCES, short_formulas
    from kapsi.tables import load_run

    if output is not None:
        new_file(output, overwrite)
        if Path(output).suffix not in SUFFIXES:
            raise FileError(f"--output {output}: expected a file that ends with {', '.join(SUFFIXES)}")
    announce_recovery(run)
    options = {"--exact": exact, "--simplify": simplify, "--complexity": complexity is not None}
    both = [name for name, given in options.items() if given]
    if len(both) > 1:
        raise FormulaError(f"{both[0]} and {both[1]} exclude each other: each chooses the formula")
    if exact and seconds is not None:
        raise FormulaError("--exact needs no --seconds: there is no search")
    sources = ("model",) if exact else ("simplified",) if simplify else SOURCES
    found = short_formulas(load_run(run), seconds=60.0 if seconds is None else seconds, sources=sources)
    best = found.best(complexity)
    if output is not None:
        with atomic(output) as file:
            file.write_text(_content(best.formula, Path(output).suffix), encoding="utf-8")
    if json:
        rows = [
            {"complexity": r.complexity, **_scores(r), "source": r.source, "formula": r.formula.text(17)}
            for r in found.rows
        ]
        show_json(
            {
                "run": run,
                "formulas": rows,
                "best": best.formula.text(17),
                "latex": best.formula.latex(),
                "notes": list(found.notes),
            }
        )
        return
    text = best.formula.latex() if latex else best.formula.text(DIGITS)
    if len(text) > LONGEST_LINE and output is None:
        raise FormulaError(
            f"the formula has {len(text):,} characters; write it to a file with --output formula.py, or choose --complexity"
        )
    notes(found.notes)
    classes = any(row.log_loss == row.log_loss for row in found.rows)
    scores = ("accuracy", "log loss") if classes else ("R²", "RMSE")
    show_table([("complexity", *scores, "", "formula"), *map(_cells, found.rows)], right=(0, 1, 2))
    say()
    if len(text) > LONGEST_LINE:
        say(f"written: {output}")
    else:
        say(*text.splitlines())


def _cells(row: FormulaRow) -> tuple[str, ...]:
    text = " ; ".join(row.formula.text(4).splitlines())
    shown = text if len(text) <= LONGEST_CELL else f"{text[: LONGEST_CELL - 1]}…"
    scores = ("-", "-") if row.r2 != row.r2 else (f"{row.r2:.6f}", number(row.rmse, None))
    if row.log_loss == row.log_loss:
        scores = (f"{row.accuracy:.4f}", f"{row.log_loss:.4f}")
    return (str(row.complexity), *scores, "" if row.source == "search" else row.source, shown)


def _scores(row: FormulaRow) -> dict[str, float]:
    """Return the errors of a formula by name."""
    if row.log_loss == row.log_loss:
        return {"log_loss": row.log_loss, "accuracy": row.accuracy}
    return {"rmse": row.rmse, "r2": row.r2}


def _content(formula: ModelFormula, suffix: str) -> str:
    if suffix == ".py":
        return formula.python()
    return (formula.latex(17) if suffix == ".tex" else formula.text(17)) + "\n"
