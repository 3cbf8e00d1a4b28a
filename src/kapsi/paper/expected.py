"""The numbers that the paper prints, one CSV file an experiment."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kapsi.errors import SpecError
from kapsi.paper.experiment import Experiment
from kapsi.spec import read_text

__all__ = ["LABELS", "Expected", "Printed", "load_expected"]

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
"""What tables call the columns of the paper."""
# Methods that are the paper's own, by the prefix of their columns.
_OWN = ("rpn", "ext_lorr", "nstd_lorr")
_PARTS = ("mean", "std", "parameters")


@dataclass(frozen=True)
class Printed:
    """What the paper prints of one method in one row; None where it prints nothing."""

    mean: float | None = None
    std: float | None = None
    parameters: int | None = None


@dataclass(frozen=True)
class Expected:
    """The paper's numbers of one experiment.

    Attributes:
        columns: prefixes in the order of the file.
        rows: row: prefix: what is printed.
    """

    columns: tuple[str, ...] = ()
    rows: Mapping[str, Mapping[str, Printed]] = field(default_factory=dict)
    also: Mapping[str, str] = field(default_factory=dict)

    def get(self, row: str, column: str) -> Printed:
        """Return what is printed, all None where nothing is. A function without dimensions is found under its own name."""
        for name in (row, self.also.get(row, ""), row.removeprefix("D.")):
            if name in self.rows:
                return self.rows[name].get(column, Printed())
        return Printed()

    def compared(self, experiment: Experiment) -> tuple[str, ...]:
        """Return the columns that the headline is compared with."""
        if experiment.compare.paper:
            return experiment.compare.paper
        own = tuple(column for column in self.columns if column.startswith(_OWN))
        return own or self.columns


def load_expected(experiment: Experiment) -> Expected:
    """Return the paper's numbers of an experiment, none if it has no file.

    Raises:
        SpecError: there is no such file, or it does not fit.
    """
    if experiment.expected is None:
        named = [("compare.paper", experiment.compare.paper[0])] if experiment.compare.paper else []
        named += [(f"methods.{m.name}.paper", m.paper) for m in experiment.methods if m.paper is not None]
        if named:
            where, column = named[0]
            raise SpecError(
                f"{experiment.name}.yaml: {where}: {column!r} is a column of the paper's numbers, and there is no file of them; "
                "give expected, or leave it out"
            )
        return Expected()
    path = FOLDER / experiment.expected
    known = sorted(each.name for each in FOLDER.glob("*.csv"))
    if experiment.expected not in known:
        raise SpecError(
            f"{experiment.name}.yaml: expected: there is no {experiment.expected!r} with numbers of the paper; "
            f"there are {', '.join(known)}"
        )
    text = read_text(path, f"file with the paper's numbers (expected: of {experiment.name}.yaml)")
    reader = csv.DictReader(io.StringIO(text))
    header = list(reader.fieldnames or ())
    columns: list[str] = []
    for name in header:
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
        rows[name] = {}
        for prefix in columns:
            try:
                mean, std, parameters = (line.get(f"{prefix}_{part}") or None for part in _PARTS)
                rows[name][prefix] = Printed(
                    None if mean is None else float(mean),
                    None if std is None else float(std),
                    None if parameters is None else int(parameters),
                )
            except ValueError:
                raise SpecError(f"{path.name}, line {reader.line_num}: {prefix}: expected numbers") from None
    found = Expected(tuple(columns), rows, also)
    for prefix in experiment.compare.paper:
        if prefix not in columns:
            raise SpecError(
                f"{experiment.name}.yaml: compare.paper: {path.name} has no {prefix!r}; there are {', '.join(columns)}"
            )
    for method in experiment.methods:
        if method.paper is not None and method.paper not in columns:
            raise SpecError(
                f"{experiment.name}.yaml: methods.{method.name}.paper: {path.name} has no {method.paper!r};"
                f" there are {', '.join(columns)}"
            )
    return found
