"""Facts of a run for its report: manifest, predictions, scores of folds, effects and importances."""

from __future__ import annotations

import io
import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kapsi.data.tabular.types import Floats, label_text
from kapsi.errors import FormulaError
from kapsi.interpret import Effect, Importance, PairEffect
from kapsi.interpret.effect import effects_of
from kapsi.interpret.importance import importances_of, interactions_of
from kapsi.interpret.view import view
from kapsi.tables import LoadedRun, load_run
from kapsi.tables.kept_rows import KeptRows, row_errors
from kapsi.tables.model import TableModel
from kapsi.training.logs import read_epochs
from kapsi.training.records import Epoch
from kapsi.training.run_folder import read_run

if TYPE_CHECKING:
    from kapsi.interpret.formulas import ModelFormula

MOST_EFFECTS, MOST_ROWS, MOST_PAIRS, MOST_WORST = 20, 400, 4, 8
"""Columns with a chart, rows behind effects, interactions and worst rows of a report."""
MOST_PARAMETERS = 60
"""Parameters of a model whose formula is shown."""
VISIBLE_PAIR = 5e-3
"""Share of the variance below which an interaction is left out."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions of held-out rows.

    Args:
        rows: numbers of the rows in the file.
        y: class codes, or targets, (rows, targets).
        outputs: probabilities (rows, classes), or predictions (rows, targets).
        errors: see `row_errors`.
    """

    rows: Any
    y: Any
    outputs: Floats
    errors: Floats


@dataclass(frozen=True, eq=False)
class Facts:
    """The content of a report.

    Args:
        path: the run folder.
        model: the fitted model.
        manifest: content of run.json.
        config: text of config.yaml.
        predictions: of held-out rows.
        folds: scores by part of the rows, then by model.
        kept: rows that the run keeps, None without.
        importances, effects, pairs: of the model; empty without rows.
        formula: the formula of a small model, None for others.
        epochs: of the training of the model, empty for models in closed form.
        notes: notes of the report.
    """

    path: Path
    model: TableModel
    manifest: dict[str, Any]
    config: str
    predictions: Predictions
    folds: dict[str, dict[str, dict[str, float]]]
    kept: KeptRows | None = None
    importances: list[Importance] = field(default_factory=list)
    effects: dict[str, Effect] = field(default_factory=dict)
    pairs: list[PairEffect] = field(default_factory=list)
    formula: ModelFormula | None = None
    epochs: list[Epoch] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes, empty in regression."""
        return tuple(map(label_text, self.model.classes or ()))

    @property
    def unit(self) -> str:
        """The unit of the predictions in parentheses, empty for none."""
        return f" ({self.model.unit})" if self.model.unit else ""


def facts_of(path: str | Path, seed: int = 0) -> Facts:
    """Return the facts of a run folder.

    Raises:
        RunError: the folder is no run, or damaged.
    """
    run = load_run(path)
    manifest, contents = read_run(path, ("predictions.csv", "config.yaml", "metrics.jsonl"))
    predictions = _predictions(contents["predictions.csv"], run.model)
    config = contents["config.yaml"].decode(errors="replace")
    log = contents.get("metrics.jsonl", b"")
    folds, epochs = _folds(log), read_epochs(log)
    if not run.model.kept:
        note = "The run keeps no rows, so the report has no effects: fit again to see them."
        return Facts(Path(path), run.model, manifest, config, predictions, folds, epochs=epochs, notes=[note])
    seen = view(run, seed=seed, most=MOST_ROWS)
    importances = importances_of(seen, seed)
    order = seen.chosen([one.column for one in importances])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        effects = effects_of(seen, order[:MOST_EFFECTS], seed)
        pairs = [pair for pair in interactions_of(seen, order, MOST_PAIRS, seed) if pair.share >= VISIBLE_PAIR]
    return Facts(
        Path(path),
        run.model,
        manifest,
        config,
        predictions,
        folds,
        run.rows,
        importances,
        effects,
        pairs,
        _formula(run),
        epochs,
    )


def _formula(run: LoadedRun) -> ModelFormula | None:
    """Return the formula of a small model, None for a model without one; sympy takes half a second."""
    if run.model.parameter_count > MOST_PARAMETERS:
        return None
    from kapsi.interpret import formula

    try:
        return formula(run)
    except FormulaError:
        return None


def _predictions(data: bytes, model: TableModel) -> Predictions:
    import pyarrow as pa
    import pyarrow.csv as pa_csv

    words = {name: pa.string() for name in ("target", "prediction")} if model.classes is not None else {}
    table = pa_csv.read_csv(io.BytesIO(data), convert_options=pa_csv.ConvertOptions(column_types=words))

    def numbers(name: str) -> Floats:
        return np.asarray(table[name].cast(pa.float64()).to_numpy(), dtype=np.float64)

    rows = table["row"].to_numpy()
    y: Any
    if model.classes is not None:
        labels = list(map(label_text, model.classes))
        codes = {label: code for code, label in enumerate(labels)}
        y = np.array([codes.get(word, -1) for word in table["target"].to_pylist()], dtype=np.int64)
        outputs = np.stack([numbers(f"probability_{label}") for label in labels], axis=1)
        known = y >= 0
        rows, y, outputs = rows[known], y[known], outputs[known]
    else:
        several = isinstance(model.target, tuple)
        names = model.targets
        y = np.stack([numbers(f"target_{n}" if several else "target") for n in names], axis=1)
        outputs = np.stack([numbers(f"prediction_{n}" if several else "prediction") for n in names], axis=1)
    return Predictions(rows, y, outputs, row_errors(y, outputs, classes=model.classes is not None))


def _folds(data: bytes) -> dict[str, dict[str, dict[str, float]]]:
    """Return the scores of each part of the rows by model."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for line in data.decode(errors="replace").splitlines():
        entry = json.loads(line)
        if entry.get("event") == "scores":
            scores = {k: v for k, v in entry.items() if isinstance(v, int | float)}
            found.setdefault(str(entry["part"]), {})[str(entry["model"])] = scores
    return found
