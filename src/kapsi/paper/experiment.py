"""Experiments as data: one YAML file each, read strictly and expanded into runs (rows × methods × seeds)."""

from __future__ import annotations

import copy
import itertools
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kapsi.errors import KapsiError, SpecError, did_you_mean
from kapsi.spec import parse_yaml, read_text

__all__ = [
    "METRICS",
    "PICTURES",
    "PROCEDURES",
    "PROTOCOLS",
    "Comparison",
    "Exclusion",
    "Experiment",
    "Method",
    "Outcome",
    "Plan",
    "Quick",
    "Row",
    "Run",
    "load",
    "load_shipped",
    "merged",
    "parse_seeds",
    "shipped",
]

PROCEDURES: dict[str, str] = {
    name: f"kapsi.paper.procedures.{name}"
    for name in ("functions", "images", "text", "tabular", "dependency", "ablation")
}
"""Name of a procedure: the module that has `run(run: Run) -> Outcome`, and `check(run: Run) -> None`, which says before the first
run what in the options does not fit. The set is closed; a test may put its own in."""
METRICS: dict[str, bool] = {"mse": False, "accuracy": True}
"""Name of a metric: whether more is better."""
PROTOCOLS: dict[str, str] = {
    "validation": "chosen on validation rows of the training part, test rows touched once",
    "paper": "the paper's protocol: the best epoch on the test rows",
}
PICTURES = ("functions", "rank-sweep", "learning-curves", "ablation", "depth-heads", "dependency")
THREADS = {"images": 2, "ablation": 2}
"""Threads of a run where the experiment does not say: results depend on them, so they are part of a run's configuration."""
MOST_ROWS, MOST_SEEDS, MOST_THREADS, MOST_RUNS = 100_000, 10_000, 1024, 200_000


# ------------------------------------------------------------------------------------------------ a run and its outcome


@dataclass(frozen=True)
class Run:
    """One run: what a procedure is given.

    Attributes:
        experiment: name of the experiment.
        row: name of the row of its table.
        method: name of the method.
        seed: from which rows, split and initial values follow.
        protocol: `validation` or `paper`, see `PROTOCOLS`.
        options: of the experiment, the row and the method merged; plain data, not to be changed.
        folder: where data sets are, None for the default.
        procedure: name of the procedure.
        threads: number of threads that the run is given.
        metric: what the score is, `mse` or `accuracy`.
    """

    experiment: str
    row: str
    method: str
    seed: int
    protocol: str = "validation"
    options: Mapping[str, Any] = field(default_factory=dict)
    folder: str | None = None
    procedure: str = "functions"
    threads: int = 1
    metric: str = "mse"

    def __post_init__(self) -> None:
        for name, allowed in (("protocol", PROTOCOLS), ("metric", METRICS), ("procedure", PROCEDURES)):
            if getattr(self, name) not in allowed:
                raise SpecError(f"Run: there is no {name} {getattr(self, name)!r}; there are {', '.join(allowed)}")

    @property
    def where(self) -> str:
        """What messages about the run begin with."""
        return f"{self.experiment}, {self.row}, {self.method}"

    def expects(self, metric: str, *protocols: str) -> None:
        """Refuse a metric or a protocol that the procedure does not have.

        Raises:
            SpecError: one of them is another.
        """
        if self.metric != metric:
            raise SpecError(f"{self.where}: the procedure {self.procedure} has the metric {metric}, not {self.metric}")
        if self.protocol not in protocols:
            raise SpecError(
                f"{self.where}: the protocol {self.protocol} is not for the procedure {self.procedure} here; "
                f"take {' or '.join(protocols)}"
            )

    def configuration(self) -> dict[str, Any]:
        """Return what the outcome depends on besides the seed, the versions and the machine, as plain data."""
        return {
            "experiment": self.experiment,
            "row": self.row,
            "method": self.method,
            "procedure": self.procedure,
            "protocol": self.protocol,
            "metric": self.metric,
            "threads": self.threads,
            "options": copy.deepcopy(dict(self.options)),
        }


@dataclass(frozen=True)
class Outcome:
    """What a procedure returns.

    Attributes:
        score: the figure of the test rows, which are touched once for it; NaN or infinite where a run went wrong.
        validation: the same figure on the validation rows that the choice was made on, if there were any.
        parameters: number of trainable parameters of the chosen model.
        seconds: of choosing and fitting, where it differs from the time of the whole run.
        extra: JSON values: what was chosen, counts; under the protocol `paper` also `best_epoch_on_test`.
        curves: sequences of numbers of equal length, such as `iteration`, `train` and `test`.
    """

    score: float
    validation: float | None = None
    parameters: int | None = None
    seconds: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------ an experiment


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Attributes:
        name: unique in the experiment.
        options: defaults of this row.
        procedure: of this row, None for that of the experiment.
        threads: of this row, None for those of the experiment.
        methods: further options by method, which come last.
        axes: the values that make the row, where rows are a grid.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    procedure: str | None = None
    threads: int | None = None
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    axes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """One method: a column of the table.

    Attributes:
        name: unique in the experiment.
        label: what tables call it.
        headline: whether it is the one that is compared with the paper.
        paper: the prefix of its columns among the paper's numbers, if it is there.
        protocol: None for that of the experiment.
        procedure: None for that of the row or the experiment.
        options: of this method.
        rows: names of the only rows that it has, None for all.
        seeds: of this method, None for those of the experiment.
    """

    name: str
    label: str
    headline: bool = False
    paper: str | None = None
    protocol: str | None = None
    procedure: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[str, ...] | None = None
    seeds: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Exclusion:
    """Runs that are not done, with the reason.

    Attributes:
        reason: one line.
        methods: names, empty for every method.
        rows: names, empty for every row.
        where: of a grid: the values of axes that all have to fit.
    """

    reason: str
    methods: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    where: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def holds(self, row: Row, method: Method) -> bool:
        """Return whether it is about this row and method."""
        return (
            (not self.methods or method.name in self.methods)
            and (not self.rows or row.name in self.rows)
            and all(axis in row.axes and row.axes[axis] in values for axis, values in self.where.items())
        )


@dataclass(frozen=True)
class Comparison:
    """What the headline method is compared with.

    Attributes:
        paper: prefixes of the paper's columns; the better of them counts. Empty: every column whose prefix begins with `rpn`,
            or all columns where there is none.
        instead: row: method whose result on the same rows takes the place of the paper's number.
        reason: why these rows are compared so.
        factors: the counts "at least so many times below" of the summary.
    """

    paper: tuple[str, ...] = ()
    instead: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    factors: tuple[float, ...] = (10.0, 100.0)


@dataclass(frozen=True)
class Quick:
    """What `--quick` changes: options that come last, seeds, and the methods and rows that are left."""

    options: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    methods: tuple[str, ...] = ()
    method_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rows: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The runs of an experiment.

    Attributes:
        runs: in the order in which they are done.
        excluded: what is left out, (row, method, reason).
        unused: parts of `only` that no row and no method has in its name.
    """

    runs: tuple[Run, ...]
    excluded: tuple[tuple[str, str, str], ...] = ()
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Experiment:
    """One table or figure: its rows, its methods, and how they are run.

    Attributes:
        name: the name of the file without its suffix.
        title: what tables are headed with.
        source: where the paper has it.
        metric: `mse` (less is better) or `accuracy` (more is better).
        procedure: who runs it, a key of `PROCEDURES`.
        rows, methods: in the order of the table.
        expected: name of the file with the paper's numbers, None where it has none.
        seeds: of every run.
        protocol: of methods that do not say.
        options: defaults of every run.
        exclude: runs that are not done.
        quick: what `--quick` changes.
        compare: what the headline is compared with.
        threads: of a run, None for the procedure's own.
        pictures: kinds of pictures to draw.
        time: how long it takes, in words.
        notes: lines below the table.
    """

    name: str
    title: str
    source: str
    metric: str
    procedure: str
    rows: tuple[Row, ...]
    methods: tuple[Method, ...]
    expected: str | None = None
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    protocol: str = "validation"
    options: Mapping[str, Any] = field(default_factory=dict)
    exclude: tuple[Exclusion, ...] = ()
    quick: Quick = Quick()
    compare: Comparison = Comparison()
    threads: int | None = None
    pictures: tuple[str, ...] = ()
    time: str = ""
    notes: tuple[str, ...] = ()

    @property
    def more_is_better(self) -> bool:
        """Whether a larger score is the better one."""
        return METRICS[self.metric]

    def row(self, name: str) -> Row:
        """Return the row of a name."""
        return self._named(self.rows, name, "row")

    def method(self, name: str) -> Method:
        """Return the method of a name."""
        return self._named(self.methods, name, "method")

    def _named(self, entries: Sequence[Any], name: str, what: str) -> Any:
        found = next((entry for entry in entries if entry.name == name), None)
        if found is None:
            names = [entry.name for entry in entries]
            some = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
            hint = did_you_mean(str(name), names, quoted=False)
            raise SpecError(f"{self.name}: there is no {what} {str(name)[:60]!r}; {hint}there are {some}")
        return found

    def methods_of(self, row: Row) -> list[Method]:
        """Return the methods that a row has, exclusions left out."""
        return [
            method
            for method in self.methods
            if (method.rows is None or row.name in method.rows)
            and not any(excluded.holds(row, method) for excluded in self.exclude)
        ]

    def headline(self, row: Row) -> Method | None:
        """Return the method of a row that is compared with the paper: the marked one, or else the first."""
        methods = self.methods_of(row)
        return next((method for method in methods if method.headline), methods[0] if methods else None)

    def excluded(self) -> tuple[tuple[str, str, str], ...]:
        """Return (row, method, reason) of everything that is left out."""
        found = []
        for row in self.rows:
            for method in self.methods:
                if method.rows is not None and row.name not in method.rows:
                    continue
                reason = next((entry.reason for entry in self.exclude if entry.holds(row, method)), None)
                if reason is not None:
                    found.append((row.name, method.name, reason))
        return tuple(found)

    def named_rows(self) -> tuple[Row, ...]:
        """Return the rows that count: those that are not left out for every method."""
        return tuple(row for row in self.rows if self.methods_of(row))

    def run(self, row: Row, method: Method, seed: int, *, quick: bool = False, folder: str | None = None) -> Run:
        """Return one run, its options merged: experiment, row, method, method in this row, quick; the later one counts."""
        layers: list[Mapping[str, Any]] = [self.options, row.options, method.options, row.methods.get(method.name, {})]
        if quick:
            layers += [self.quick.options, self.quick.method_options.get(method.name, {})]
        options: dict[str, Any] = {}
        for layer in layers:
            options = merged(options, layer)
        procedure = method.procedure or row.procedure or self.procedure
        # Quick runs are too short for several threads, and go side by side.
        threads = 1 if quick else row.threads or self.threads or THREADS.get(procedure, 1)
        protocol = method.protocol or self.protocol
        return Run(self.name, row.name, method.name, seed, protocol, options, folder, procedure, threads, self.metric)

    def plan(
        self,
        *,
        seeds: Sequence[int] | None = None,
        quick: bool = False,
        only: str | None = None,
        folder: str | None = None,
    ) -> Plan:
        """Expand into runs: every row with the first seed, then every row with the second, and so on.

        Args:
            seeds: in place of those of the experiment.
            quick: with the smaller budget, and only the headline method unless the file names others.
            only: part of the name of a row or a method, or `row:method` with a part of both; the other runs are left out. What is
                a whole name means that one alone: `kapsi` is not `kapsi_small`. Several are given with commas between them.
            folder: where data sets are.

        Raises:
            SpecError: more than 200,000 runs, an empty part in `only`, or something else than different whole numbers as seeds.
        """
        if only is not None and not isinstance(only, str):
            raise SpecError(f"only={only!r}: expected a text, such as 'E.3, kapsi'")
        seeds = None if seeds is None else _checked_seeds(seeds)
        names = {row.name for row in self.rows} | {method.name for method in self.methods}
        texts = [] if only is None else [text.strip() for text in only.split(",")]
        if not all(part.strip() for text in texts for part in (text.split(":", 1) if text not in names else [text])):
            raise SpecError(
                f"--only {only!r}: has an empty part; give parts of names, row:method, or several of them with commas between"
            )
        pairs = []
        used: set[str] = set()
        for row in self.rows:
            for method in self.methods_of(row):
                if quick and self.quick.rows and row.name not in self.quick.rows:
                    continue
                if quick and (
                    method.name not in self.quick.methods if self.quick.methods else method != self.headline(row)
                ):
                    continue
                wanting = [text for text in texts if _wanted(text, row.name, method.name, names)]
                if texts and not wanting:
                    continue
                used.update(wanting)
                pairs.append((row, method))
        runs = []
        wanted = {
            method.name: seeds if seeds is not None else self.quick.seeds if quick else method.seeds or self.seeds
            for method in self.methods
        }
        count = sum(len(wanted[method.name]) for _, method in pairs)
        if count > MOST_RUNS:
            raise SpecError(
                f"{self.name}: has {count:,} runs, at most {MOST_RUNS:,} are allowed; take fewer rows or seeds"
            )
        order = list(dict.fromkeys(itertools.chain.from_iterable(wanted[method.name] for _, method in pairs)))
        for seed in order:
            for row, method in pairs:
                if seed in wanted[method.name]:
                    runs.append(self.run(row, method, seed, quick=quick, folder=folder))
        return Plan(tuple(runs), self.excluded(), tuple(text for text in texts if text not in used))


def _checked_seeds(given: Sequence[int]) -> tuple[int, ...]:
    """Return seeds as Python's numbers."""
    try:
        if isinstance(given, bytes | Mapping):
            raise TypeError
        some = itertools.islice(iter(given), MOST_SEEDS + 1)
        seeds = tuple(-1 if isinstance(seed, bool) else operator.index(seed) for seed in some)
    except TypeError:  # a number, text, shares
        seeds = ()
    if len(seeds) > MOST_SEEDS:
        raise SpecError(f"seeds={str(given)[:60]}: at most {MOST_SEEDS:,} are allowed")
    if not seeds or not all(0 <= seed < 2**31 for seed in seeds) or len(set(seeds)) != len(seeds):
        raise SpecError(
            f"seeds={str(given)[:60]}: expected different whole numbers from 0, such as range(5) or [100, 101]"
        )
    return seeds


def _wanted(text: str, row: str, method: str, names: set[str]) -> bool:
    """Return whether a part of `only` takes a run; `names` are the whole names of rows and methods."""
    parts = [text] if text in names else [part.strip() for part in text.split(":", 1)]
    pairs = list(zip(parts, (row, method), strict=True)) if len(parts) == 2 else [(text, row), (text, method)]
    found = [name == part if part in names else _matches(part, name) for part, name in pairs]
    return all(found) if len(parts) == 2 else any(found)


def _matches(text: str, name: str) -> bool:
    """Return whether a name has a text in it; what ends in a digit does not match the beginning of a longer number."""
    found = re.search(re.escape(text.casefold()) + (r"(?!\d)" if text[-1:].isdigit() else ""), name.casefold())
    return found is not None


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain data with some of it replaced: mappings merge, all else is replaced, another `kind` begins anew.

    Example:
        >>> merged({"train": {"solver": "adam", "epochs": 9}}, {"train": {"epochs": 1}})
        {'train': {'solver': 'adam', 'epochs': 1}}
        >>> merged({"expansion": {"kind": "taylor", "degree": 3}}, {"expansion": {"kind": "identity"}})
        {'expansion': {'kind': 'identity'}}
    """
    result = copy.deepcopy(dict(base))
    for key, value in over.items():
        below = result.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping) and _same_kind(below, value):
            result[key] = merged(below, value)
        else:
            result[key] = copy.deepcopy(dict(value) if isinstance(value, Mapping) else value)
    return result


def _same_kind(base: Mapping[str, Any], over: Mapping[str, Any]) -> bool:
    return "kind" not in over or over["kind"] == base.get("kind")


def parse_seeds(text: str, where: str = "--seeds") -> tuple[int, ...]:
    """Return the seeds that a text means: a count, a list, or a range.

    Example:
        >>> parse_seeds("3"), parse_seeds("2-4"), parse_seeds("100,101")
        ((0, 1, 2), (2, 3, 4), (100, 101))

    Raises:
        SpecError: anything else.
    """
    if not isinstance(text, str):
        raise SpecError(f"{where} {text!r}: expected a text such as '5', '0-4' or '100,101'")
    expected = f"{where} {text[:40]}: expected a count such as 5, a range such as 0-4, or a list such as 100,101"
    if re.fullmatch(r"\d{1,9}", text.strip(), re.ASCII):
        count = int(text)
        if not 1 <= count <= MOST_SEEDS:
            raise SpecError(f"{where} {text}: a count must be 1 to {MOST_SEEDS:,}")
        return tuple(range(count))
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,10})(?:-(\d{1,10}))?\s*", part, re.ASCII)
        if not match:
            raise SpecError(expected)
        low, high = int(match[1]), int(match[2] or match[1])
        if high >= 2**31:
            raise SpecError(f"{where} {text[:40]}: a seed must be less than {2**31:,}")
        if high < low:
            raise SpecError(f"{where} {text[:40]}: the range {part.strip()} ends before it begins")
        if high - low >= MOST_SEEDS:
            raise SpecError(f"{where} {text[:40]}: at most {MOST_SEEDS:,} seeds are allowed")
        seeds += range(low, high + 1)
    if len(set(seeds)) != len(seeds) or len(seeds) > MOST_SEEDS:
        raise SpecError(f"{where} {text[:40]}: a seed is there twice, or there are more than {MOST_SEEDS:,}")
    return tuple(seeds)


# ------------------------------------------------------------------------------------------------ reading


FOLDER = Path(__file__).parent / "experiments"


def shipped() -> list[str]:
    """Return the names of the experiments that come with the package, in the order of the paper."""
    order = {name: place for place, name in enumerate(_ORDER)}
    return sorted((path.stem for path in FOLDER.glob("*.yaml")), key=lambda name: (order.get(name, len(order)), name))


_ORDER = (
    "elementary",
    "composite",
    "feynman",
    "feynman-1000",
    "feynman-rest",
    "discrete",
    "text-bigrams",
    "kan-text",
    "tabular",
    "elementary-variants",
    "composite-variants",
    "feynman-variants",
    "rank-sweep",
    "depth-width",
    "mnist-ablation",
    "learning-curves",
    "dependency",
)


def load_shipped(name: str) -> Experiment:
    """Return an experiment that comes with the package.

    Raises:
        SpecError: there is none of this name, or its file does not fit.
    """
    names = shipped()
    if name not in names:
        hint = did_you_mean(str(name), names, quoted=False)
        raise SpecError(f"there is no experiment {str(name)[:60]!r}; {hint}there are all, {', '.join(names)}")
    return load(FOLDER / f"{name}.yaml")


def load(path: str | Path) -> Experiment:
    """Return the experiment of a YAML file; strict about keys, types and names.

    Raises:
        SpecError: the file cannot be read or does not fit: the message names the place, what was given, what is allowed.
    """
    if not isinstance(path, str | Path) or not str(path).strip() or str(path) == ".":
        raise SpecError(f"load({path!r}): expected the name of a YAML file")
    path = Path(path)
    reader = _Reader(path.name)
    experiment = reader.experiment(parse_yaml(read_text(path, "experiment"), path.name))
    if experiment.name != path.stem:
        raise SpecError(f"{path.name}: name: is {experiment.name!r}, expected {path.stem!r}, as the file is called")
    return experiment


_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")
_MISSING = object()


class _Reader:
    """Reads plain data into an experiment; every message begins with the file and the place in it."""

    def __init__(self, file: str) -> None:
        self.file = file

    def fail(self, where: str, problem: str) -> SpecError:
        return SpecError(f"{self.file}: {f'{where}: ' if where else ''}{problem}")

    def keys(self, data: Any, where: str, allowed: Iterable[str], required: Iterable[str] = ()) -> dict[str, Any]:
        """Return a mapping whose keys are all allowed."""
        allowed = tuple(allowed)
        if not isinstance(data, dict):
            raise self.fail(where, f"expected a mapping with {', '.join(allowed)}, got {_shown(data)}")
        for key in data:
            if key not in allowed:
                hint = did_you_mean(str(key), allowed, quoted=False)
                raise self.fail(_join(where, key), f"there is no such key; {hint}there are {', '.join(allowed)}")
        for key in required:
            if key not in data:
                raise self.fail(where, f"{key} is missing; needed are {', '.join(required)}")
        return data

    def text(self, data: Any, where: str, default: Any = _MISSING) -> Any:
        if data is None and default is not _MISSING:
            return default
        if not isinstance(data, str) or not data.strip():
            raise self.fail(where, f"expected text, got {_shown(data)}")
        text = " ".join(data.split())
        if not text.isprintable():
            raise self.fail(where, f"has a letter that cannot be shown, {_shown(text)}")
        return text

    def flag(self, data: Any, where: str) -> bool:
        if not isinstance(data, bool):
            raise self.fail(where, f"expected true or false, got {_shown(data)}")
        return data

    def choice(self, data: Any, where: str, choices: Iterable[str], default: Any = _MISSING) -> Any:
        if data is None and default is not _MISSING:
            return default
        choices = tuple(choices)
        if not isinstance(data, str) or data not in choices:
            hint = did_you_mean(data, choices, quoted=False) if isinstance(data, str) else ""
            raise self.fail(where, f"there is no {_shown(data)}; {hint}there are {', '.join(choices)}")
        return data

    def integer(self, data: Any, where: str, most: int, default: Any = _MISSING) -> Any:
        if data is None and default is not _MISSING:
            return default
        if isinstance(data, bool) or not isinstance(data, int) or not 1 <= data <= most:
            raise self.fail(where, f"expected a whole number from 1 to {most:,}, got {_shown(data)}")
        return data

    def options(self, data: Any, where: str) -> dict[str, Any]:
        """Return options: plain data with text for keys; what they mean is for the procedure to say."""
        if data is None:
            return {}
        if not isinstance(data, dict):
            raise self.fail(where, f"expected a mapping of options, got {_shown(data)}")
        self.plain(data, where)
        return data

    def plain(self, data: Any, where: str) -> None:
        if isinstance(data, dict):
            for key, value in data.items():
                if not isinstance(key, str):
                    raise self.fail(_join(where, key), f"expected text as a key, got {_shown(key)}")
                self.plain(value, _join(where, key))
        elif isinstance(data, list):
            for place, value in enumerate(data):
                self.plain(value, f"{where}[{place}]")
        elif isinstance(data, float) and not math.isfinite(data):
            raise self.fail(where, f"expected a finite number, got {data}")
        elif data is not None and not isinstance(data, str | bool | int | float):
            raise self.fail(where, f"expected plain data, got {_shown(data)}")

    def names(self, data: Any, where: str, choices: Iterable[str]) -> tuple[str, ...]:
        """Return a list of names, each among the choices."""
        if isinstance(data, str | int | float) and not isinstance(data, bool):
            data = [data]
        if not isinstance(data, list) or not data:
            raise self.fail(where, f"expected a list of names, got {_shown(data)}")
        choices = tuple(choices)
        found = tuple(self.choice(_text_of(name), f"{where}[{i}]", choices) for i, name in enumerate(data))
        if len(set(found)) != len(found):
            raise self.fail(where, "a name is there twice")
        return found

    def seeds(self, data: Any, where: str) -> tuple[int, ...]:
        if isinstance(data, int) and not isinstance(data, bool) and 1 <= data <= MOST_SEEDS:
            return tuple(range(data))
        if (
            isinstance(data, list)
            and data
            and all(isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 2**31 for seed in data)
            and len(set(data)) == len(data)
        ):
            return tuple(data)
        if isinstance(data, str):
            return parse_seeds(data, f"{self.file}: {where}:")
        raise self.fail(where, f"expected a count such as 5, or a list of different seeds, got {_shown(data)}")

    def experiment(self, data: Any) -> Experiment:
        data = self.keys(
            data,
            "",
            (
                "name",
                "title",
                "source",
                "metric",
                "expected",
                "procedure",
                "rows",
                "seeds",
                "protocol",
                "options",
                "methods",
                "exclude",
                "quick",
                "compare",
                "threads",
                "pictures",
                "time",
                "notes",
            ),
            ("name", "title", "source", "metric", "procedure", "rows", "methods"),
        )
        name = self.text(data["name"], "name")
        if not _NAME.fullmatch(name):
            raise self.fail("name", f"expected small letters, digits and dashes, got {name!r}")
        rows = self.rows(data["rows"])
        names = [row.name for row in rows]
        methods = self.methods(data["methods"], names)
        known = [method.name for method in methods]
        for row in rows:
            for method in row.methods:
                self.choice(method, f"rows.{row.name}.methods", known)
        expected = self.text(data.get("expected"), "expected", None)
        if expected is not None and not re.fullmatch(r"[a-z0-9_-]+\.csv", expected):
            raise self.fail("expected", f"expected the name of a CSV file such as elementary.csv, got {expected!r}")
        notes = data.get("notes", [])
        notes = [notes] if isinstance(notes, str) else notes
        if not isinstance(notes, list):
            raise self.fail("notes", f"expected a text or a list of texts, got {_shown(notes)}")
        pictures = data.get("pictures")
        experiment = Experiment(
            name=name,
            title=self.text(data["title"], "title"),
            source=self.text(data["source"], "source"),
            metric=self.choice(data["metric"], "metric", METRICS),
            procedure=self.choice(data["procedure"], "procedure", PROCEDURES),
            rows=rows,
            methods=methods,
            expected=expected,
            seeds=self.seeds(data["seeds"], "seeds") if "seeds" in data else Experiment.seeds,
            protocol=self.choice(data.get("protocol"), "protocol", PROTOCOLS, "validation"),
            options=self.options(data.get("options"), "options"),
            exclude=self.exclusions(data.get("exclude"), rows, known),
            quick=self.quick(data.get("quick"), names, known),
            compare=self.comparison(data.get("compare"), names, known),
            threads=self.integer(data.get("threads"), "threads", MOST_THREADS, None),
            pictures=() if pictures is None else self.names(pictures, "pictures", PICTURES),
            time=self.text(data.get("time"), "time", ""),
            notes=tuple(self.text(line, f"notes[{i}]") for i, line in enumerate(notes)),
        )
        if not experiment.named_rows():
            raise self.fail("exclude", "leaves out every row; leave some of them in")
        for row in rows:
            marked = [method.name for method in experiment.methods_of(row) if method.headline]
            if len(marked) > 1:
                raise self.fail(
                    "methods", f"row {row.name!r} has {len(marked)} headlines, {', '.join(marked)}; mark one"
                )
        return experiment

    def rows(self, data: Any) -> tuple[Row, ...]:
        if isinstance(data, list):
            rows = [Row(self.row_name(name, f"rows[{i}]")) for i, name in enumerate(data)]
        elif isinstance(data, dict) and "functions" in data:
            rows = self.functions(data)
        elif isinstance(data, dict) and "grid" in data:
            rows = self.grid(self.keys(data, "rows", ("grid",))["grid"])
        elif isinstance(data, dict):
            rows = [self.row(name, given) for name, given in data.items()]
        else:
            raise self.fail(
                "rows", f"expected names, a mapping, {{functions: group}} or {{grid: axes}}, got {_shown(data)}"
            )
        if not rows:
            raise self.fail("rows", "there are none")
        seen: set[str] = set()
        for row in rows:
            if row.name in seen:
                raise self.fail("rows", f"{row.name!r} is there twice")
            seen.add(row.name)
        return tuple(rows)

    def row_name(self, data: Any, where: str) -> str:
        name = _text_of(data)
        fits = isinstance(name, str) and name.strip() and name == " ".join(name.split()) and name.isprintable()
        if not fits or len(name) > 100:
            raise self.fail(where, f"expected a name of one line of at most 100 letters, got {_shown(data)}")
        return name

    def row(self, name: Any, data: Any) -> Row:
        name = self.row_name(name, "rows")
        where = f"rows.{name}"
        data = self.keys({} if data is None else data, where, ("options", "procedure", "threads", "methods"))
        methods = data.get("methods") or {}
        if not isinstance(methods, dict):
            raise self.fail(f"{where}.methods", f"expected {{method: {{options: …}}}}, got {_shown(methods)}")
        return Row(
            name,
            self.options(data.get("options"), f"{where}.options"),
            self.choice(data.get("procedure"), f"{where}.procedure", PROCEDURES, None),
            self.integer(data.get("threads"), f"{where}.threads", MOST_THREADS, None),
            {
                key: self.options(
                    self.keys(given, f"{where}.methods.{key}", ("options",), ("options",))["options"],
                    f"{where}.methods.{key}.options",
                )
                for key, given in methods.items()
            },
        )

    def functions(self, data: dict[str, Any]) -> list[Row]:
        """Return one row a function of a group, or of several groups; `except` and `only` name functions or a group."""
        from kapsi.data.problems import problems

        data = self.keys(data, "rows", ("functions", "except", "only"))
        groups = data["functions"] if isinstance(data["functions"], list) else [data["functions"]]
        rows = []
        for i, group in enumerate(groups):
            self.text(group, f"rows.functions[{i}]")
            try:
                found = problems(group)
            except KapsiError as error:
                raise self.fail("rows.functions", str(error)) from None
            rows += [Row(problem.name) for problem in found]
        names = [row.name for row in rows]
        for key, keep in (("except", False), ("only", True)):
            if key in data:
                given = data[key]
                try:
                    chosen = (
                        {problem.name for problem in problems(given)}
                        if isinstance(given, str)
                        else set(self.names(given, f"rows.{key}", names))
                    )
                except KapsiError:
                    if not isinstance(given, str):
                        raise
                    problem = f"there is no group {given[:60]!r}; give a group, or a list of names in brackets"
                    raise self.fail(f"rows.{key}", problem) from None
                rows = [row for row in rows if (row.name in chosen) is keep]
        return rows

    def grid(self, data: Any) -> list[Row]:
        """Return the product of the axes of one grid, or of several grids one after the other."""
        rows: list[Row] = []
        grids = data if isinstance(data, list) else [data]
        for place, axes in enumerate(grids):
            where = f"rows.grid[{place}]" if isinstance(data, list) else "rows.grid"
            if not isinstance(axes, dict) or not axes:
                raise self.fail(where, f"expected {{axis: values}}, got {_shown(axes)}")
            for axis in axes:
                if not isinstance(axis, str) or not _NAME.fullmatch(axis):
                    raise self.fail(where, f"expected the name of an axis, got {_shown(axis)}")
            values: list[list[tuple[Any, dict[str, Any]]]] = []
            for axis, given in axes.items():
                values.append(self.axis(given, f"{where}.{axis}", axis))
                if len(rows) + math.prod(len(found) for found in values) > MOST_ROWS:
                    raise self.fail(where, f"has more than {MOST_ROWS:,} rows")
            for chosen in itertools.product(*values):
                options: dict[str, Any] = {}
                for _, given in chosen:
                    options = merged(options, given)
                own = {axis: value for axis, (value, _) in zip(axes, chosen, strict=True)}
                name = (
                    " ".join(map(str, next(iter(own.items())))) if len(own) == 1 else " · ".join(map(str, own.values()))
                )
                rows.append(Row(name, options, axes=own))
        return rows

    def axis(self, data: Any, where: str, axis: str) -> list[tuple[Any, dict[str, Any]]]:
        """Return (value, options) of an axis: a list or a range sets the option of its name, a mapping says its options."""
        if isinstance(data, str):
            match = re.fullmatch(r"(\d{1,6})\.\.(\d{1,6})", data.strip(), re.ASCII)
            if not match or int(match[2]) < int(match[1]):
                raise self.fail(where, f"expected a list, a mapping or a range such as 1..10, got {_shown(data)}")
            if int(match[2]) - int(match[1]) >= MOST_ROWS:
                raise self.fail(where, f"has more than {MOST_ROWS:,} values")
            data = list(range(int(match[1]), int(match[2]) + 1))
        if isinstance(data, list) and data:
            for i, value in enumerate(data):
                if isinstance(value, bool) or not isinstance(value, str | int | float):
                    raise self.fail(f"{where}[{i}]", f"expected a name or a number, got {_shown(value)}")
                self.plain(value, f"{where}[{i}]")
                self.row_name(value, f"{where}[{i}]")
            return [(value, {axis: value}) for value in data]
        if isinstance(data, dict) and data:
            return [
                (self.row_name(name, where), self.options(given, f"{where}.{name}") if given else {axis: name})
                for name, given in data.items()
            ]
        raise self.fail(where, f"expected a list, a mapping or a range such as 1..10, got {_shown(data)}")

    def methods(self, data: Any, rows: list[str]) -> tuple[Method, ...]:
        if not isinstance(data, dict) or not data:
            raise self.fail("methods", f"expected {{name: {{label: …, options: …}}}}, got {_shown(data)}")
        methods = []
        for name, given in data.items():
            where = f"methods.{name}"
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise self.fail(where, "expected a name of small letters, digits, dashes and underscores")
            given = self.keys(
                {} if given is None else given,
                where,
                ("label", "headline", "paper", "protocol", "procedure", "options", "rows", "seeds"),
            )
            methods.append(
                Method(
                    name,
                    self.text(given.get("label"), f"{where}.label", name),
                    self.flag(given.get("headline", False), f"{where}.headline"),
                    self.text(given.get("paper"), f"{where}.paper", None),
                    self.choice(given.get("protocol"), f"{where}.protocol", PROTOCOLS, None),
                    self.choice(given.get("procedure"), f"{where}.procedure", PROCEDURES, None),
                    self.options(given.get("options"), f"{where}.options"),
                    self.names(given["rows"], f"{where}.rows", rows) if "rows" in given else None,
                    self.seeds(given["seeds"], f"{where}.seeds") if "seeds" in given else None,
                )
            )
        return tuple(methods)

    def exclusions(self, data: Any, rows: tuple[Row, ...], methods: list[str]) -> tuple[Exclusion, ...]:
        if data is None:
            return ()
        if not isinstance(data, list):
            raise self.fail("exclude", f"expected a list of {{method, rows, where, reason}}, got {_shown(data)}")
        names = [row.name for row in rows]
        found = []
        for i, given in enumerate(data):
            where = f"exclude[{i}]"
            given = self.keys(given, where, ("method", "rows", "where", "reason"), ("reason",))
            if len(given) == 1 or not (given.get("where", True) or given.keys() & {"method", "rows"}):
                raise self.fail(where, "would leave out everything; give method, rows or where")
            axes: dict[str, tuple[Any, ...]] = {}
            known = {axis for row in rows for axis in row.axes}
            for axis, values in self.keys(given.get("where", {}), f"{where}.where", sorted(known)).items():
                axes[axis] = tuple(values) if isinstance(values, list) else (values,)
                there = {row.axes[axis] for row in rows if axis in row.axes}
                if not axes[axis]:
                    raise self.fail(f"{where}.where.{axis}", "expected a value or a list of values, got none")
                for value in axes[axis]:
                    if isinstance(value, bool | list | dict) or value not in there:
                        raise self.fail(f"{where}.where.{axis}", f"no row has {_shown(value)}")
            found.append(
                Exclusion(
                    self.text(given["reason"], f"{where}.reason"),
                    self.names(given["method"], f"{where}.method", methods) if "method" in given else (),
                    self.names(given["rows"], f"{where}.rows", names) if "rows" in given else (),
                    axes,
                )
            )
        return tuple(found)

    def quick(self, data: Any, rows: list[str], methods: list[str]) -> Quick:
        if data is None:
            return Quick()
        data = self.keys(data, "quick", ("options", "seeds", "methods", "rows"))
        given = data.get("methods")
        own: dict[str, dict[str, Any]] = {}
        if isinstance(given, dict):
            for name, entry in given.items():
                self.choice(name, "quick.methods", methods)
                entry = self.keys({} if entry is None else entry, f"quick.methods.{name}", ("options",))
                own[name] = self.options(entry.get("options"), f"quick.methods.{name}.options")
            given = list(given)
        return Quick(
            self.options(data.get("options"), "quick.options"),
            self.seeds(data["seeds"], "quick.seeds") if "seeds" in data else (0,),
            () if given is None else self.names(given, "quick.methods", methods),
            own,
            self.names(data["rows"], "quick.rows", rows) if "rows" in data else (),
        )

    def comparison(self, data: Any, rows: list[str], methods: list[str]) -> Comparison:
        if data is None:
            return Comparison()
        data = self.keys(data, "compare", ("paper", "instead", "reason", "factors"))
        instead = data.get("instead") or {}
        if not isinstance(instead, dict):
            raise self.fail("compare.instead", f"expected {{row: method}}, got {_shown(instead)}")
        instead = {_text_of(row): method for row, method in instead.items()}
        for row, method in instead.items():
            self.choice(row, "compare.instead", rows)
            self.choice(method, f"compare.instead.{row}", methods)
        paper = data.get("paper", [])
        paper = [paper] if isinstance(paper, str) else paper
        factors = data.get("factors", list(Comparison.factors))
        if not isinstance(factors, list) or not all(
            isinstance(factor, int | float) and not isinstance(factor, bool) and 1 < factor < 1e300
            for factor in factors
        ):
            raise self.fail("compare.factors", f"expected a list of numbers above 1, got {_shown(factors)}")
        if not isinstance(paper, list):
            raise self.fail("compare.paper", f"expected a list of prefixes, got {_shown(paper)}")
        return Comparison(
            tuple(self.text(prefix, f"compare.paper[{i}]") for i, prefix in enumerate(paper)),
            dict(instead),
            self.text(data.get("reason"), "compare.reason", ""),
            tuple(float(factor) for factor in factors),
        )


def _text_of(data: Any) -> Any:
    """Return a number as text: YAML takes a row called 1 for one."""
    return str(data) if isinstance(data, int | float) and not isinstance(data, bool) else data


def _join(where: str, key: Any) -> str:
    key = str(key)[:60]
    return f"{where}.{key}" if where else key


def _shown(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 60 else f"{text[:59]}…"
