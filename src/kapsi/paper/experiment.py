"""Experiments as data: a YAML file each, expanded into runs (rows × methods × seeds)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kapsi.errors import SpecError, shown
from kapsi.function import Spec, coerce, option
from kapsi.paper.short_forms import (
    merged,
    one_line,
    read_lines,
    read_named,
    read_names,
    read_seeds,
    require_known,
    row_name,
)
from kapsi.spec import read_yaml

PROCEDURES: dict[str, str] = {
    name: f"kapsi.paper.procedures.{name}"
    for name in ("functions", "images", "text", "tabular", "dependency", "ablation")
}
"""Module of each procedure, with `read_options(run: Run)`, which validates the options, `run(run: Run) -> Outcome`, and, for
comparisons with baselines, `budget(run: Run) -> Budget`."""
Metric = Literal["mse", "accuracy"]
Protocol = Literal["validation", "paper"]
"""`validation`: selection on validation rows of the training part, one evaluation of the test rows. `paper`: the protocol of the
paper, the best epoch on the test rows."""
Picture = Literal[
    "functions", "rank-sweep", "learning-curves", "ablation", "depth-heads", "dependency", "pairs", "digits"
]
THREADS = {"images": 2, "ablation": 2}
"""Default number of threads by procedure (otherwise 1); results depend on it, so it belongs to a run's configuration."""
MAX_THREADS, MAX_RUNS = 1024, 200_000
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")


def _procedure(value: Any, where: str) -> Any:
    if isinstance(value, str):
        require_known([value], PROCEDURES, where)
    return value


# ------------------------------------------------------------------------------------------------ a run and its outcome


@dataclass(frozen=True)
class Run(Spec):
    """A run of a procedure.

    Args:
        experiment: name of the experiment.
        row: name of the row.
        method: name of the method.
        seed: determines rows, split and initial values.
        protocol: `validation` or `paper`.
        options: merged options of experiment, row and method.
        folder: location of the data sets, None for the default.
        procedure: key of `PROCEDURES`.
        threads: number of threads.
        metric: score, `mse` or `accuracy`.
    """

    experiment: str
    row: str
    method: str
    seed: int
    protocol: Protocol = "validation"
    options: Mapping[str, Any] = field(default_factory=dict)
    folder: str | None = None
    procedure: str = option("functions", read=_procedure)
    threads: int = 1
    metric: Metric = "mse"

    @property
    def where(self) -> str:
        """Prefix of error messages."""
        return f"{self.experiment}, {self.row}, {self.method}"

    def expects(self, metric: str, *protocols: str) -> None:
        """Refuse a metric or a protocol unknown to the procedure.

        Raises:
            SpecError: another metric or protocol.
        """
        for name, value, allowed in (("metric", self.metric, (metric,)), ("protocol", self.protocol, protocols)):
            if value not in allowed:
                raise SpecError(
                    f"{self.where}: the procedure {self.procedure} has no {name} {value}; use {' or '.join(allowed)}"
                )

    def configuration(self) -> dict[str, Any]:
        """Return everything that determines the outcome, except for seed, versions and machine, as plain data."""
        names = ("experiment", "row", "method", "procedure", "protocol", "metric", "threads")
        return {**{name: getattr(self, name) for name in names}, "options": merged({}, self.options)}


@dataclass(frozen=True)
class Outcome:
    """Result of a procedure.

    Attributes:
        score: metric on the test rows, evaluated once; NaN or infinite after a failed fit.
        validation: the metric on the validation rows used for selection, None without selection.
        parameters: number of trainable parameters of the selected model.
        seconds: CPU time of selection and fitting, None for the time of the whole run.
        extra: further JSON values; under the protocol `paper` also `best_epoch_on_test`.
        curves: number sequences of equal length, such as `iteration`, `train` and `test`.
    """

    score: float
    validation: float | None = None
    parameters: int | None = None
    seconds: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Budget:
    """The search of a run.

    Attributes:
        candidates: number of models or grid points.
        starts: number of initial values, over all candidates.
        epochs: number of epochs of all fits together, if every fit is as long as allowed; None for methods without epochs.
    """

    candidates: int
    starts: int
    epochs: int | None = None


# ------------------------------------------------------------------------------------------------ parts of an experiment


def _method_options(value: Any, where: str) -> Any:
    """Return {method: options} from {method: {options: …}} or a list of methods."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list):
        value = {name: {} for name in read_names(value, where)}
    if not isinstance(value, Mapping):
        return value
    return {name: coerce(MethodOptions, {} if raw is None else raw, f"{where}.{name}") for name, raw in value.items()}


@dataclass(frozen=True)
class MethodOptions(Spec):
    """Options of a method for a row, or for `--quick`."""

    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TableRow(Spec):
    """A row of an experiment's table.

    Args:
        name: name, unique in the experiment.
        options: options of the row.
        procedure: the row's procedure, None for the procedure of the experiment.
        threads: number of threads, None for the default of the experiment.
        methods: further options by method, with the highest precedence.
        axes: position in a grid of rows.
    """

    name: str = option(read=row_name)
    options: Mapping[str, Any] = field(default_factory=dict)
    procedure: str | None = option(None, read=_procedure)
    threads: int | None = option(None, minimum=1, maximum=MAX_THREADS)
    methods: Mapping[str, MethodOptions] = field(default_factory=dict)
    axes: Mapping[str, Any] = field(default_factory=dict)


def _row_to_method(value: Any, where: str) -> Any:
    return {str(row): method for row, method in value.items()} if isinstance(value, Mapping) else value


@dataclass(frozen=True)
class Method(Spec):
    """A method, which is a column of the table.

    Args:
        name: name, unique in the experiment.
        label: heading of the column, the name by default.
        headline: whether this method is compared with the paper.
        baseline: whether the headline is compared with this method in the overview.
        paper: prefix of the method's columns in the paper's results.
        protocol: protocol, None for the protocol of the experiment.
        procedure: procedure, None for the procedure of the row or the experiment.
        options: options of the method.
        rows: names of the rows of this method, None for all.
        seeds: seeds of this method, None for the seeds of the experiment.
        instead: by row, the method whose mean on the same data replaces the paper's column in the comparison of this method.
    """

    name: str
    label: str = option("", read=one_line)
    headline: bool = False
    baseline: bool = False
    paper: str | None = option(None, read=one_line)
    protocol: Protocol | None = None
    procedure: str | None = option(None, read=_procedure)
    options: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[str, ...] | None = option(None, read=read_names)
    seeds: tuple[int, ...] | None = option(None, read=read_seeds)
    instead: Mapping[str, str] = field(default_factory=dict, metadata={"read": _row_to_method})

    def check(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise SpecError("expected a name of lower-case letters, digits, dashes and underscores")
        if not self.label:
            object.__setattr__(self, "label", self.name)


def _axis_values(value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {axis: values if isinstance(values, list | tuple) else [values] for axis, values in value.items()}


@dataclass(frozen=True)
class Exclusion(Spec):
    """Runs left out, with the reason.

    Args:
        reason: the reason, in a single line.
        method: names of methods, all by default.
        rows: names of rows, all by default.
        where: allowed grid values by axis; all axes must match.
    """

    reason: str = option(read=one_line)
    method: tuple[str, ...] = option((), read=read_names)
    rows: tuple[str, ...] = option((), read=read_names)
    where: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, metadata={"read": _axis_values})

    def check(self) -> None:
        if not (self.method or self.rows or self.where):
            raise SpecError("would leave out everything; give method, rows or where")

    def matches(self, row: TableRow, method: Method) -> bool:
        """Return whether the row with the method is left out."""
        return (
            (not self.method or method.name in self.method)
            and (not self.rows or row.name in self.rows)
            and all(axis in row.axes and row.axes[axis] in values for axis, values in self.where.items())
        )


@dataclass(frozen=True)
class PaperComparison(Spec):
    """Reference of the headline method.

    Args:
        paper: prefixes of the paper's columns; the better result counts. Empty for all columns with a prefix `rpn`, or all columns.
        instead: by row, the method whose result on the same data replaces the paper's.
        reason: why these rows are compared differently.
        factors: thresholds above 1; the summary counts the rows "at least 10 times lower".
    """

    paper: tuple[str, ...] = option((), read=read_names)
    instead: Mapping[str, str] = field(default_factory=dict, metadata={"read": _row_to_method})
    reason: str = option("", read=one_line)
    factors: tuple[float, ...] = (10.0, 100.0)

    def check(self) -> None:
        if not all(1 < factor < 1e300 for factor in self.factors):
            raise SpecError(f"factors: expected numbers above 1, got {list(self.factors)}")


@dataclass(frozen=True)
class Quick(Spec):
    """Changes with `--quick`.

    Args:
        options: options with the highest precedence.
        seeds: a single seed by default.
        methods: a list of methods, or {method: {options}}; the headline by default.
        rows: names of rows, all by default.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = option((0,), read=read_seeds)
    methods: Mapping[str, MethodOptions] = field(default_factory=dict, metadata={"read": _method_options})
    rows: tuple[str, ...] = option((), read=read_names)


class RunPlan(NamedTuple):
    """Runs of an experiment.

    Attributes:
        runs: the runs in order of execution.
        unused: parts of `only` without a matching row or method.
    """

    runs: tuple[Run, ...]
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Experiment(Spec):
    """A table or figure of the paper: rows, methods, and their runs.

    Args:
        name: name of the file without suffix.
        title: heading of the table.
        source: table or section of the paper.
        metric: `mse` (lower is better) or `accuracy` (higher is better).
        procedure: key of `PROCEDURES`.
        rows: a list of names, {name: {options, procedure, threads, methods}}, {functions: group} or {grid: axes}.
        methods: {name: {label, options, …}}, in the order of the columns.
        expected: file with the paper's results, None if there is none.
        seeds: a count, a range or a list.
        protocol: default of the methods.
        options: defaults of every run.
        exclude: runs left out.
        quick: changes with `--quick`.
        compare: reference of the headline.
        threads: number of threads of a run, None for the default of the procedure.
        pictures: kinds of pictures.
        time: expected duration, in words.
        conditions: how models are trained, if not by selection on validation rows; shown above the table and in the overview.
        notes: lines below the table.
    """

    name: str = option(read=one_line)
    title: str = option(read=one_line)
    source: str = option(read=one_line)
    metric: Metric = option()
    procedure: str = option(read=_procedure)
    rows: tuple[TableRow, ...] = option(read=read_named(TableRow, rows=True))
    methods: tuple[Method, ...] = option(read=read_named(Method))
    expected: str | None = option(None, read=one_line)
    seeds: tuple[int, ...] = option((0, 1, 2, 3, 4), read=read_seeds)
    protocol: Protocol = "validation"
    options: Mapping[str, Any] = field(default_factory=dict)
    exclude: tuple[Exclusion, ...] = ()
    quick: Quick = Quick()
    compare: PaperComparison = PaperComparison()
    threads: int | None = option(None, minimum=1, maximum=MAX_THREADS)
    pictures: tuple[Picture, ...] = option((), read=read_names)
    time: str = option("", read=one_line)
    conditions: str = option("", read=one_line)
    notes: tuple[str, ...] = option((), read=read_lines)

    def check(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise SpecError(f"name: expected lower-case letters, digits and dashes, got {self.name!r}")
        if self.expected is not None and not re.fullmatch(r"[a-z0-9_-]+\.csv", self.expected):
            raise SpecError(f"expected: expected the name of a CSV file such as elementary.csv, got {self.expected!r}")
        rows, methods = {row.name for row in self.rows}, [method.name for method in self.methods]
        for where, entries, names in (("rows", self.rows, rows), ("methods", self.methods, methods)):
            if not entries:
                raise SpecError(f"{where}: there are none")
            if len(names) < len(entries):
                raise SpecError(f"{where}: {_repeated([entry.name for entry in entries])!r} is there twice")
        self._check_names()
        if not self.active_rows():
            raise SpecError("exclude: leaves out every row; keep some of them")
        for row in self.rows:
            marked = [method.name for method in self.methods_of(row) if method.headline]
            if len(marked) > 1:
                raise SpecError(f"methods: row {row.name!r} has {len(marked)} headlines, {', '.join(marked)}; mark one")

    def _check_names(self) -> None:
        """Raise a `SpecError` for unknown names of rows, methods and axes."""
        rows = list(dict.fromkeys(row.name for row in self.rows))
        methods = [method.name for method in self.methods]
        for row in self.rows:
            require_known(row.methods, methods, f"rows.{row.name}.methods")
        for method in self.methods:
            require_known(method.rows or (), rows, f"methods.{method.name}.rows")
            require_known(method.instead, rows, f"methods.{method.name}.instead")
            require_known(method.instead.values(), methods, f"methods.{method.name}.instead")
        require_known(self.quick.rows, rows, "quick.rows")
        require_known(self.quick.methods, methods, "quick.methods")
        require_known(self.compare.instead, rows, "compare.instead")
        require_known(self.compare.instead.values(), methods, "compare.instead")
        axes: dict[str, list[Any]] = {}
        for row in self.rows:
            for axis, value in row.axes.items():
                axes.setdefault(axis, []).append(value)
        for i, excluded in enumerate(self.exclude):
            require_known(excluded.method, methods, f"exclude[{i}].method")
            require_known(excluded.rows, rows, f"exclude[{i}].rows")
            require_known(excluded.where, axes, f"exclude[{i}].where")
            for axis, values in excluded.where.items():
                unknown = [v for v in values if isinstance(v, bool) or v not in axes[axis]]
                if unknown or not values:
                    problem = f"no row has {shown(unknown[0])}" if unknown else "expected a value or a list, got none"
                    raise SpecError(f"exclude[{i}].where.{axis}: {problem}")

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher score is better."""
        return self.metric == "accuracy"

    def row(self, name: str) -> TableRow:
        """Return the row with a name."""
        rows = {row.name: row for row in self.rows}
        require_known([name], rows, f"{self.name}: rows")
        return rows[name]

    def method(self, name: str) -> Method:
        """Return a method by name."""
        methods = {method.name: method for method in self.methods}
        require_known([name], methods, f"{self.name}: methods")
        return methods[name]

    def methods_of(self, row: TableRow) -> list[Method]:
        """Return the methods run for a row."""
        return [method for method in self.methods if self._has(row, method) and self._reason(row, method) is None]

    def _has(self, row: TableRow, method: Method) -> bool:
        return method.rows is None or row.name in method.rows

    def _reason(self, row: TableRow, method: Method) -> str | None:
        """Return why a method is left out for a row."""
        return next((excluded.reason for excluded in self.exclude if excluded.matches(row, method)), None)

    def headline(self, row: TableRow) -> Method | None:
        """Return the method compared with the paper for a row: the marked method, or the first."""
        methods = self.methods_of(row)
        return next((method for method in methods if method.headline), methods[0] if methods else None)

    def excluded(self) -> tuple[tuple[str, str, str], ...]:
        """Return (row, method, reason) of all exclusions."""
        pairs = [(row, method) for row in self.rows for method in self.methods if self._has(row, method)]
        reasons = [(row.name, method.name, self._reason(row, method)) for row, method in pairs]
        return tuple((row, method, reason) for row, method, reason in reasons if reason is not None)

    def active_rows(self) -> tuple[TableRow, ...]:
        """Return the rows with at least one method."""
        return tuple(row for row in self.rows if self.methods_of(row))

    def run(self, row: TableRow, method: Method, seed: int, *, quick: bool = False, folder: str | None = None) -> Run:
        """Return a run with merged options: experiment, row, method, method in this row, quick; the last wins."""
        method_options = row.methods.get(method.name, MethodOptions())
        layers = [self.options, row.options, method.options, method_options.options]
        if quick:
            layers += [self.quick.options, self.quick.methods.get(method.name, MethodOptions()).options]
        options: dict[str, Any] = {}
        for layer in layers:
            options = merged(options, layer)
        procedure = method.procedure or row.procedure or self.procedure
        # Quick runs are too short for several threads and run side by side.
        threads = 1 if quick else row.threads or self.threads or THREADS.get(procedure, 1)
        protocol = method.protocol or self.protocol
        return Run(self.name, row.name, method.name, seed, protocol, options, folder, procedure, threads, self.metric)

    def plan(
        self,
        *,
        seeds: Sequence[int] | int | str | None = None,
        quick: bool = False,
        only: str | None = None,
        folder: str | None = None,
    ) -> RunPlan:
        """Expand into runs: every row with the first seed, then every row with the second, and so on.

        Args:
            seeds: a count, a range or a list, None for the seeds of the experiment.
            quick: use the smaller budget, and only the headline method unless the file names others.
            only: part of the name of a row or a method, or `row:method` with parts of both; several are separated by commas. A
                whole name selects exactly this row or method: `kapsi` does not match `kapsi_small`.
            folder: location of the data sets.

        Raises:
            SpecError: more than 200,000 runs, an empty part of `only`, or invalid seeds.
        """
        chosen_seeds = read_seeds(seeds)
        texts = self._parts_of(only)
        names = {row.name for row in self.rows} | {method.name for method in self.methods}
        pairs, used = [], set[str]()
        for row in self.rows:
            for method in self.methods_of(row):
                matching = [text for text in texts if _selects(text, row.name, method.name, names)]
                if (quick and not self._is_quick(row, method)) or (texts and not matching):
                    continue
                used.update(matching)
                pairs.append((row, method))
        by_method = {
            method.name: chosen_seeds or (self.quick.seeds if quick else method.seeds or self.seeds)
            for method in self.methods
        }
        count = sum(len(by_method[method.name]) for _, method in pairs)
        if count > MAX_RUNS:
            raise SpecError(
                f"{self.name}: has {count:,} runs, at most {MAX_RUNS:,} are allowed; use fewer rows or seeds"
            )
        order = dict.fromkeys(itertools.chain.from_iterable(by_method[method.name] for _, method in pairs))
        runs = [
            self.run(row, method, seed, quick=quick, folder=folder)
            for seed in order
            for row, method in pairs
            if seed in by_method[method.name]
        ]
        return RunPlan(tuple(runs), tuple(text for text in texts if text not in used))

    def _parts_of(self, only: str | None) -> list[str]:
        """Return the parts of `only`."""
        if only is None:
            return []
        names = {row.name for row in self.rows} | {method.name for method in self.methods}
        texts = [text.strip() for text in only.split(",")] if isinstance(only, str) else [""]
        if not all(part.strip() for text in texts for part in ([text] if text in names else text.split(":", 1))):
            raise SpecError(
                f"--only {only!r}: expected parts of names, row:method, or several of them separated by commas; "
                "has an empty part"
            )
        return texts

    def _is_quick(self, row: TableRow, method: Method) -> bool:
        """Return whether a method is run for a row with `--quick`."""
        if self.quick.rows and row.name not in self.quick.rows:
            return False
        return method.name in self.quick.methods if self.quick.methods else method == self.headline(row)


def _repeated(names: Sequence[str]) -> str:
    return next(name for name in names if names.count(name) > 1)


def _selects(text: str, row: str, method: str, names: set[str]) -> bool:
    """Return whether a part of `only` selects a run; `names` are the whole names of rows and methods."""
    parts = [text] if text in names else [part.strip() for part in text.split(":", 1)]
    if len(parts) == 2:
        return all(_matches(part, name, names) for part, name in zip(parts, (row, method), strict=True))
    return any(_matches(text, name, names) for name in (row, method))


def _matches(text: str, name: str, names: set[str]) -> bool:
    """Return whether a name contains a string; a final digit does not match the beginning of a longer number."""
    if text in names:
        return name == text
    pattern = re.escape(text.casefold()) + (r"(?!\d)" if text[-1:].isdigit() else "")
    return re.search(pattern, name.casefold()) is not None


# ------------------------------------------------------------------------------------------------ files

FOLDER = Path(__file__).parent / "experiments"
_ORDER = (
    *("elementary", "composite", "feynman", "feynman-rest", "discrete", "text-bigrams", "kan-text", "tabular"),
    *("elementary-variants", "composite-variants", "feynman-variants", "rank-sweep", "depth-width", "mnist-ablation"),
    *("mnist-processing", "mnist-rank", "mnist-digits", "learning-curves", "dependency"),
)


def shipped() -> list[str]:
    """Return the names of the experiments in this package, in the order of the paper."""
    order = {name: i for i, name in enumerate(_ORDER)}
    return sorted((path.stem for path in FOLDER.glob("*.yaml")), key=lambda name: (order.get(name, len(order)), name))


def load_shipped(name: str) -> Experiment:
    """Return an experiment of this package.

    Raises:
        SpecError: unknown name, or invalid file.
    """
    require_known([name], ["all", *shipped()], "experiments")
    return load(FOLDER / f"{name}.yaml")


def load(path: str | Path) -> Experiment:
    """Return the experiment of a YAML file; unknown keys, types and names are errors.

    Raises:
        SpecError: unreadable or invalid file; the message names the key, the given value and the allowed values.
    """
    if not isinstance(path, str | Path) or not str(path).strip() or str(path) == ".":
        raise SpecError(f"load({path!r}): expected the name of a YAML file")
    path = Path(path)
    data = read_yaml(path, "experiment", "those of kapsi/paper/experiments")
    try:
        experiment: Experiment = coerce(Experiment, data, "experiment")
    except SpecError as error:
        raise SpecError(f"{path.name}: {str(error).removeprefix('experiment').lstrip(':. ')}") from None
    if experiment.name != path.stem:
        raise SpecError(f"{path.name}: name: is {experiment.name!r}, expected {path.stem!r}, the name of the file")
    return experiment
