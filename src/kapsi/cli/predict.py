"""`kapsi predict`: write the predictions of a run for the rows of a table."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from kapsi.cli import reading
from kapsi.cli.common import announce_recovery, new_file, note, notes, readable, say, show_data, show_json
from kapsi.cli.options import OUTPUT, Json, Run, TableFile, option
from kapsi.errors import SpecError
from kapsi.text import counted

if TYPE_CHECKING:
    from kapsi.data.tabular import Table
    from kapsi.tables import Decisions, LoadedRun

EXAMPLES = """\
kapsi predict runs/table new.csv --output predictions.csv --keep id
kapsi predict runs/table new.csv --output predictions.csv --interval 0.9
kapsi predict runs/table new.csv --output predictions.csv --explain
cat new.csv | kapsi predict runs/table - --output - > predictions.csv
"""

Predictions: TypeAlias = Annotated[
    str, option(OUTPUT, "FILE", "The CSV (also .csv.gz) or Parquet file to write; - for CSV to standard output.")
]
Keep: TypeAlias = Annotated[
    list[str] | None, option(OUTPUT, "COLUMN", "A column of the table to copy to the output. May be repeated.")
]
Outside: TypeAlias = Annotated[
    bool,
    option(OUTPUT, None, "Add columns that mark rows and predictions outside of the training ranges.", "--outside"),
]
Interval: TypeAlias = Annotated[
    float | None,
    option(OUTPUT, "SHARE", "Add prediction intervals, or sets of classes, with this coverage, such as 0.9."),
]
Cost: TypeAlias = Annotated[
    list[str] | None,
    option(OUTPUT, "LABEL=COST", "The cost of missing a row of a class, 1 where none is given. May be repeated."),
]
Recall: TypeAlias = Annotated[
    str | None,
    option(
        OUTPUT,
        "LABEL=SHARE",
        "Predict a class above the threshold that finds this share of its rows, such as yes=0.95.",
    ),
]
Explain: TypeAlias = Annotated[
    bool,
    option(
        OUTPUT,
        None,
        "Add the contribution of each column to the prediction, and their base: the mean prediction.",
        "--explain",
    ),
]
Replace: TypeAlias = Annotated[bool, option(OUTPUT, None, "Replace an existing file.", "--overwrite")]


@reading.adds(reading.FORMAT)
def predict(
    run: Run,
    table: TableFile,
    output: Predictions,
    keep: Keep = None,
    outside: Outside = False,
    overwrite: Replace = False,
    json: Json = False,
    interval: Interval = None,
    cost: Cost = None,
    recall: Recall = None,
    explain: Explain = False,
    **of_reading: Any,
) -> None:
    """Predict the rows of a table (- for standard input): original labels with probabilities, or real values.

    The table is read with the options of the fit; options of reading given here replace them, and --missing adds words.
    """
    from kapsi.data.tabular import csv_writer, table_writer
    from kapsi.tables import load_run

    if json and output == "-":
        raise SpecError("--json: standard output has the predictions; give a file as --output, or leave --json out")
    announce_recovery(run)
    loaded = load_run(run)
    if output != "-":
        new_file(output, overwrite, run, table)
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(readable(table))
        write: Callable[[dict[str, Any]], None]
        write = csv_writer(show_data, "standard output") if output == "-" else stack.enter_context(table_writer(output))
        model = reading.with_reading(loaded.model, path, of_reading)
        decisions = _decisions(interval, cost, recall)
        contributions = _contributions(loaded) if explain else None
        rows, messages = model.predict_file(
            path, write, keep=tuple(keep or ()), flags=outside, decisions=decisions, explain=contributions
        )
    notes(messages)
    if json:
        show_json({"run": run, "output": output, "rows": rows, "notes": messages})
    elif output == "-":
        note(f"{counted(rows, 'prediction')} {'is' if rows == 1 else 'are'} written")
    else:
        say(f"predictions: {output} ({counted(rows, 'row')}{f', in {model.unit}' if model.unit else ''})")


def _contributions(loaded: LoadedRun) -> Callable[[Table], dict[str, list[float]]]:
    """Return the contributions of rows, with a note on their scale."""
    from kapsi.data.tabular.types import label_text
    from kapsi.interpret.shapley import explainer_of

    if not loaded.model.kept:
        raise SpecError(
            "--explain: the run keeps no rows as a background (before 0.2, or a very wide table); fit again"
        )
    if loaded.model.classes is not None:
        labels = loaded.model.classes
        scale = "the logits minus their mean; the softmax gives the probabilities"
        if len(labels) == 2:
            scale = f"the log odds of {label_text(labels[1])}, log(p/(1 − p))"
        note(f"base and contributions add up to {scale}")
    return explainer_of(loaded)


def _decisions(interval: float | None, cost: list[str] | None, recall: str | None) -> Decisions:
    """Return what is added to predictions, and how labels are chosen."""
    from kapsi.tables import Decisions

    if interval is not None and not 0 < interval < 1:
        raise SpecError(f"--interval {interval:g}: expected a share above 0 and below 1, such as 0.9")
    pairs = [_labeled(word, "cost", "3") for word in cost or ()]
    for label in {label for label, _ in pairs if [other for other, _ in pairs].count(label) > 1}:
        raise SpecError(f"--cost {label}: has two costs; leave one out")
    return Decisions(interval, tuple(pairs), None if recall is None else _labeled(recall, "recall", "0.95"))


def _labeled(word: str, name: str, example: str) -> tuple[str, float]:
    label, equals, text = word.rpartition("=")
    try:
        return label, float(text if equals else "")
    except ValueError:
        raise SpecError(f"--{name} {word}: expected a label and a number, such as yes={example}") from None
