"""The results printed in the paper, one CSV file per table."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kapsi.errors import SpecError
from kapsi.paper.experiment import Experiment
from kapsi.paper.short_forms import require_known
from kapsi.spec import read_text

FOLDER = Path(__file__).parent / "expected"

LABELS: Mapping[str, str] = {
    "mlp": "MLP",
    "kan": "KAN",
    "rpn": "RPN",
    "rpn_ext": "RPN extended",
    "rpn_nstd": "RPN nested",
    "ext_lorr_linear": "extended, linear",
    "ext_lorr_zero": "extended, zero",
    "nstd_lorr_linear": "nested, linear",
    "nstd_lorr_zero": "nested, zero",
    "naive_bayes_gaussian": "Gaussian naive Bayes",
    "naive_bayes_multinomial": "multinomial naive Bayes",
    "svm_linear": "linear SVM",
    "svm_rbf": "RBF SVM",
    "bayesian_network": "Bayesian network",
    "markov_network": "Markov network",
    "rpn_naive_laplace": "RPN naive Laplace",
    "rpn_combinatorial_normal": "RPN combinatorial normal",
}
"""Headings of the paper's columns."""
# Prefixes of the columns of methods proposed in the paper.
_PROPOSED = ("rpn", "ext_lorr", "nstd_lorr")
_PARTS = ("mean", "std", "parameters")


@dataclass(frozen=True)
class Printed:
    """Results printed for a method and a row, each None if not printed."""

    mean: float | None = None
    std: float | None = None
    parameters: int | None = None


@dataclass(frozen=True)
class Expected:
    """The paper's results of an experiment.

    Attributes:
        columns: prefixes in the order of the file.
        rows: printed results by row name and column prefix.
        also: row names by alternative name.
    """

    columns: tuple[str, ...] = ()
    rows: Mapping[str, Mapping[str, Printed]] = field(default_factory=dict)
    also: Mapping[str, str] = field(default_factory=dict)

    def get(self, row: str, column: str) -> Printed:
        """Return the printed results, all None if there are none. A dimensionless function has those of the original function."""
        for name in (row, self.also.get(row, ""), row.removeprefix("D.")):
            if name in self.rows:
                return self.rows[name].get(column, Printed())
        return Printed()

    def compared(self, experiment: Experiment) -> tuple[str, ...]:
        """Return the reference columns of the headline."""
        proposed = tuple(column for column in self.columns if column.startswith(_PROPOSED))
        return experiment.compare.paper or proposed or self.columns


def load_expected(experiment: Experiment) -> Expected:
    """Return the paper's results of an experiment, empty without a file.

    Raises:
        SpecError: no such file or column, or an invalid file.
    """
    used = [("compare.paper", column) for column in experiment.compare.paper]
    used += [(f"methods.{m.name}.paper", m.paper) for m in experiment.methods if m.paper is not None]
    if experiment.expected is None:
        for where, column in used:
            raise SpecError(
                f"{experiment.name}.yaml: {where}: {column!r} is a column of the paper's results; give expected, or leave it out"
            )
        return Expected()
    require_known(
        [experiment.expected], sorted(path.name for path in FOLDER.glob("*.csv")), f"{experiment.name}.yaml: expected"
    )
    expected = _read(FOLDER / experiment.expected)
    for where, column in used:
        require_known([column], expected.columns, f"{experiment.name}.yaml: {where}: {experiment.expected}")
    return expected


def _read(path: Path) -> Expected:
    """Return the results in a CSV file."""
    reader = csv.DictReader(io.StringIO(read_text(path, "file with the paper's results")))
    columns: list[str] = []
    for name in reader.fieldnames or ():
        prefix, _, part = name.rpartition("_")
        if name in ("row", "also"):
            continue
        if part not in _PARTS or not prefix:
            raise SpecError(
                f"{path.name}: column {name!r}: expected row, also, or a prefix with _mean, _std, _parameters"
            )
        if prefix not in columns:
            columns.append(prefix)
    rows: dict[str, dict[str, Printed]] = {}
    also: dict[str, str] = {}
    for line in reader:
        name = line["row"]
        if name in rows:
            raise SpecError(f"{path.name}, line {reader.line_num}: row {name!r} is there twice")
        if line.get("also"):
            also[line["also"]] = name
        try:
            rows[name] = {prefix: _printed(line, prefix) for prefix in columns}
        except ValueError:
            raise SpecError(f"{path.name}, line {reader.line_num}: expected numbers") from None
    return Expected(tuple(columns), rows, also)


def _printed(line: Mapping[str, str], prefix: str) -> Printed:
    mean, std, parameters = (line.get(f"{prefix}_{part}") or None for part in _PARTS)
    return Printed(
        None if mean is None else float(mean),
        None if std is None else float(std),
        None if parameters is None else int(parameters),
    )
