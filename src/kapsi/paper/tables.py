"""What a table of an experiment has: the paper's numbers and those of the store side by side, and who is better."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kapsi.paper.expected import LABELS, Expected, Printed
from kapsi.paper.experiment import Experiment, Method, TableRow
from kapsi.paper.store import Result, configuration_hash, here

__all__ = ["AxisValue", "Line", "ResultTable", "Setting", "Statistic", "build", "chosen", "statistic"]


@dataclass(frozen=True)
class Statistic:
    """What the seeds of one method in one row have together.

    Attributes:
        mean, std: of the scores; the deviation is that of the population (divided by the number of seeds).
        count: number of seeds.
        validation: mean, None where a seed has none.
        parameters: the largest number of any seed.
        seconds, cpu_seconds: mean of a seed.
        total: CPU seconds of all seeds.
        best_epoch: mean of the best test score over epochs, where the procedure has it.
        mark: which setting it comes from, empty for the first.
    """

    mean: float
    std: float
    count: int
    validation: float | None
    parameters: int | None
    seconds: float
    cpu_seconds: float
    total: float
    best_epoch: float | None = None
    mark: str = ""


@dataclass(frozen=True)
class Setting:
    """Versions and a machine that results come from."""

    mark: str
    versions: Mapping[str, str]
    machine: Mapping[str, object]
    count: int

    def text(self) -> str:
        """Return one line that says it."""
        parts = [f"{name} {version}" for name, version in self.versions.items()]
        memory = self.machine.get("memory_gib")
        machine = [
            str(self.machine.get("cpu")),
            f"{self.machine.get('cores')} cores",
            *([f"{memory} GiB"] if memory else []),
            *([str(self.machine["accelerator"])] if self.machine.get("accelerator") else []),
            str(self.machine.get("os")),
        ]
        # Results come from elsewhere, too: nothing in them moves the cursor of a terminal.
        return "".join(
            letter if letter.isprintable() else "?" for letter in f"{', '.join(parts)}; {', '.join(machine)}"
        )


@dataclass(frozen=True)
class Line:
    """One row of a table.

    Attributes:
        row: which.
        headline: the method that is compared.
        paper: column: what is printed.
        own: method: what the store has.
        reference: the score that the headline is compared with, None where there is none.
        reference_name: whose it is.
        factor: of errors, how many times the headline is below the reference; of shares, how far it is above.
    """

    row: TableRow
    headline: Method | None
    paper: Mapping[str, Printed]
    own: Mapping[str, Statistic]
    reference: float | None = None
    reference_name: str = ""
    factor: float | None = None

    @property
    def result(self) -> Statistic | None:
        """What the headline method has."""
        return self.own.get(self.headline.name) if self.headline is not None else None


@dataclass(frozen=True)
class AxisValue:
    """The scores of all rows of a grid that have one value on one axis."""

    axis: str
    value: str
    count: int
    best: float
    median: float
    mean: float


@dataclass(frozen=True)
class ResultTable:
    """All that a table of an experiment shows.

    Attributes:
        experiment: whose.
        lines: one a row.
        columns: prefixes of the paper's columns that are shown.
        methods: those that have a result.
        compared: the paper's columns that the headline is compared with.
        settings: versions and machines of the results, those with most of them first; they have no mark.
        notes: about what is not shown.
        axes: of a grid of several axes, what each value has together.
        quick: whether it is about the small budget.
        seeds: in place of those of the experiment, empty for those.
    """

    experiment: Experiment
    lines: tuple[Line, ...]
    columns: tuple[str, ...]
    methods: tuple[Method, ...]
    compared: tuple[str, ...]
    settings: tuple[Setting, ...] = ()
    notes: tuple[str, ...] = ()
    axes: tuple[AxisValue, ...] = ()
    quick: bool = False
    seeds: tuple[int, ...] = field(default=())

    @property
    def named(self) -> int:
        """Number of rows that the table names."""
        return len(self.lines)

    @property
    def done(self) -> int:
        """Number of rows with a result of the headline method."""
        return sum(line.result is not None for line in self.lines)

    @property
    def cpu_seconds(self) -> float:
        """CPU time of all results that are shown."""
        return sum(found.total for line in self.lines for found in line.own.values())

    def summary(self) -> list[str]:
        """Return what the table says, counted, one line a comparison."""
        lines = [line for line in self.lines if line.factor is not None]
        texts = []
        if lines:
            printed = [line for line in lines if line.row.name not in self.experiment.compare.instead]
            same = [line for line in lines if line.row.name in self.experiment.compare.instead]
            names = [LABELS.get(column, column) for column in self.compared]
            if printed:
                better = "the better of " if len(names) > 1 else ""
                texts.append(f"against {better}{' and '.join(names)} of the paper: {self._counted(printed)}")
            if same:
                names = list(dict.fromkeys(line.reference_name for line in same))
                reason = f" ({self.experiment.compare.reason})" if self.experiment.compare.reason else ""
                texts.append(f"against {', '.join(names)} on the same rows{reason}: {self._counted(same)}")
        for method in self.methods:
            pairs = [
                (line, _factor(line.result.mean, line.own[method.name].mean, self.experiment.higher_is_better))
                for line in self.lines
                if line.result is not None
                and line.headline is not None
                and method.name in line.own
                and method.name != line.headline.name
            ]
            if pairs:
                texts.append(f"against {method.label} here{_protocol(self.experiment, method)}: {self._verdict(pairs)}")
        texts += self._best()
        return texts

    def _best(self) -> list[str]:
        """Return the best row of a sweep, here and in the paper."""
        if not any(line.row.axes for line in self.lines):
            return []
        best = max if self.experiment.higher_is_better else min
        own = [(line.result.mean, line) for line in self.lines if line.result and math.isfinite(line.result.mean)]
        printed = [
            (value, line.row.name)
            for line in self.lines
            for column in self.compared
            if (value := line.paper[column].mean) is not None
        ]
        if not own:
            return []
        score, line = best(own, key=lambda pair: pair[0])
        count = line.result.parameters if line.result is not None else None
        text = f"best here: {line.row.name}, {score:.4g}" + (f" with {count:,} parameters" if count is not None else "")
        if printed:
            value, name = best(printed, key=lambda pair: pair[0])
            text += f"; best of the paper: {name}, {value:.4g}"
        return [text]

    def _counted(self, lines: Sequence[Line]) -> str:
        return self._verdict([(line, line.factor) for line in lines if line.factor is not None])

    def _verdict(self, pairs: Sequence[tuple[Line, float]]) -> str:
        of = len(pairs)
        rows = "row" if of == 1 else "rows"
        if self.experiment.higher_is_better:
            worse = [(line, factor) for line, factor in pairs if not factor >= 0]
            text = f"at least as good in {of - len(worse)} of {of} {rows}"
            shown = [f"{line.row.name} ({factor:+.4f})" for line, factor in worse]
        else:
            worse = [(line, factor) for line, factor in pairs if not factor >= 1]
            counts = [
                f"at least {least:g} times below in {sum(factor >= least for _, factor in pairs)}"
                for least in sorted(self.experiment.compare.factors, reverse=True)
            ]
            text = f"of {of} {rows} {', '.join([*counts, f'not above in {of - len(worse)}'])}"
            shown = [f"{line.row.name} ({_above(factor, line.result)})" for line, factor in worse]
        if not worse:
            return f"{text}; never worse"
        rest = f" and {len(shown) - 12} more" if len(shown) > 12 else ""
        return f"{text}; worse in {len(worse)}: {', '.join(shown[:12])}{rest}"


def _above(factor: float, own: Statistic | None) -> str:
    if factor > 0:
        return f"{1 / factor:.3g} times above"
    return "above 0" if own is not None and math.isfinite(own.mean) else "not finite"


def _protocol(experiment: Experiment, method: Method) -> str:
    return " (best epoch on test)" if (method.protocol or experiment.protocol) == "paper" else ""


def _factor(own: float, reference: float, higher_is_better: bool) -> float:
    """Return how far a score is above another, or how many times an error is below; what is not finite is worse than all."""
    if not math.isfinite(own):
        return -math.inf if higher_is_better else 0.0
    if higher_is_better:
        return own - reference if math.isfinite(reference) else math.inf
    if not math.isfinite(reference):
        return math.inf
    if own == 0:
        return math.inf if reference > 0 else 1.0
    return reference / own


def statistic(results: Sequence[Result], mark: str = "") -> Statistic:
    """Return mean, deviation and so on of the seeds of one method in one row.

    Args:
        results: one a seed, at least one.
        mark: which setting they come from.
    """
    scores = np.array([result.score for result in results], dtype=np.float64)
    with np.errstate(all="ignore"):
        mean, std = float(scores.mean()), float(scores.std())
    validations = [result.validation for result in results]
    known = [value for value in validations if value is not None]
    parameters = [result.parameters for result in results if result.parameters is not None]
    best = [result.extra.get("best_epoch_on_test") for result in results]
    numbers = [float(value) for value in best if isinstance(value, int | float) and not isinstance(value, bool)]
    return Statistic(
        mean,
        std,
        len(results),
        sum(known) / len(known) if len(known) == len(results) else None,
        max(parameters) if parameters else None,
        sum(result.seconds for result in results) / len(results),
        sum(result.cpu_seconds for result in results) / len(results),
        sum(result.cpu_seconds for result in results),
        sum(numbers) / len(numbers) if len(numbers) == len(results) else None,
        mark,
    )


def build(
    experiment: Experiment,
    expected: Expected,
    results: Iterable[Result],
    *,
    seeds: Sequence[int] | None = None,
    quick: bool = False,
    only_rows: Iterable[str] | None = None,
) -> ResultTable:
    """Return the table of an experiment from the results of its store.

    Of a row and method, results of this process's versions and machine count if there are any; else those of the setting that has
    most of them, with a mark. Results of another configuration, or of other seeds, are not shown.

    Args:
        experiment: what is shown.
        expected: the paper's numbers.
        results: of the store; of equal ones the last counts.
        seeds: in place of those of the experiment.
        quick: whether the results with the small budget are shown.
        only_rows: names of the rows to show, all by default.
    """
    latest = {result.key: result for result in results}
    shown, used, other_seeds = _choose(experiment, latest.values(), seeds, quick)
    wanted_rows = None if only_rows is None else set(only_rows)
    rows = [row for row in experiment.active_rows() if wanted_rows is None or row.name in wanted_rows]
    names = {row.name for row in rows}
    shown = {place: found for place, found in shown.items() if place[0] in names}
    settings = _settings([result for found in shown.values() for result in found])
    marks = {setting: mark.mark for setting, mark in settings.items()}
    stored = {place: statistic(found, marks[found[0].setting]) for place, found in shown.items()}
    compared = expected.compared(experiment)
    lines = tuple(_line(experiment, expected, compared, row, stored) for row in rows)
    there = {method for _, method in stored}
    notes = list(experiment.notes)
    if len(latest) > used:
        notes.append(f"{len(latest) - used} results of other configurations in the store are not shown")
    if other_seeds:
        notes.append(f"{other_seeds} results of other seeds in the store are not shown")
    others = used - other_seeds - sum(map(len, shown.values()))
    if others > 0 and wanted_rows is None:
        notes.append(f"{others} results of other versions or machines in the store are not shown")
    notes += _left_out(experiment, wanted_rows)
    return ResultTable(
        experiment,
        lines,
        tuple(column for column in expected.columns if any(line.paper[column].mean is not None for line in lines)),
        tuple(method for method in experiment.methods if method.name in there),
        compared,
        tuple(settings.values()),
        tuple(notes),
        _axes(experiment, lines),
        quick,
        tuple(seeds or ()),
    )


def _left_out(experiment: Experiment, rows: set[str] | None) -> list[str]:
    """Return one line a reason with what is left out for it; a row that is left out for every method goes by its name alone."""
    methods: dict[tuple[str, str], list[str]] = {}
    for row, method, reason in experiment.excluded():
        if rows is None or row in rows:
            methods.setdefault((reason, row), []).append(method)
    reasons: dict[str, list[str]] = {}
    for (reason, row), names in methods.items():
        labels = [experiment.method(name).label for name in names]
        places = [row] if len(names) == len(experiment.methods) else [f"{row} with {label}" for label in labels]
        reasons.setdefault(reason, []).extend(places)
    found = []
    for reason, places in reasons.items():
        rest = f" and {len(places) - 4} more" if len(places) > 4 else ""
        found.append(f"left out: {', '.join(places[:4])}{rest}: {reason}")
    return found


def chosen(
    experiment: Experiment, results: Iterable[Result], *, seeds: Sequence[int] | None = None, quick: bool = False
) -> dict[tuple[str, str], list[Result]]:
    """Return the results that a table shows by (row, method), by seed; the arguments are those of `build`."""
    return _choose(experiment, {result.key: result for result in results}.values(), seeds, quick)[0]


def _choose(
    experiment: Experiment, results: Iterable[Result], seeds: Sequence[int] | None, quick: bool
) -> tuple[dict[tuple[str, str], list[Result]], int, int]:
    """Return the results to show, how many are of the configurations, and how many of those are of other seeds."""
    by_place: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        by_place.setdefault((result.row, result.method), []).append(result)
    found: dict[tuple[str, str], list[Result]] = {}
    used, other_seeds = 0, 0
    for row in experiment.rows:
        for method in experiment.methods_of(row):
            there = by_place.get((row.name, method.name), [])
            if not there:
                continue
            usual = experiment.quick.seeds if quick else method.seeds or experiment.seeds
            wanted = set(usual if seeds is None else seeds)
            hash_ = configuration_hash(experiment.run(row, method, 0, quick=quick))
            fitting = [result for result in there if result.configuration["hash"] == hash_]
            seeded = [result for result in fitting if result.seed in wanted]
            used += len(fitting)
            other_seeds += len(fitting) - len(seeded)
            if seeded:
                found[row.name, method.name] = sorted(_of_one_setting(seeded), key=lambda result: result.seed)
    return found, used, other_seeds


def _of_one_setting(results: list[Result]) -> list[Result]:
    """Return the results of this process's setting, or of the one with most of them, the newest of equally many."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.setting, []).append(result)
    own = groups.get(here())
    return own or max(groups.values(), key=lambda group: (len(group), max(result.started for result in group)))


_MARKS = "ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻ"


def _settings(results: list[Result]) -> dict[str, Setting]:
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.setting, []).append(result)
    own = here()
    # By number, so that a page has the same marks wherever it is written.
    order = sorted(groups, key=lambda setting: (-len(groups[setting]), setting != own, setting))
    return {
        setting: Setting(
            "" if place == 0 else _MARKS[(place - 1) % len(_MARKS)],
            groups[setting][0].versions,
            groups[setting][0].machine,
            len(groups[setting]),
        )
        for place, setting in enumerate(order)
    }


def _line(
    experiment: Experiment,
    expected: Expected,
    compared: tuple[str, ...],
    row: TableRow,
    stored: Mapping[tuple[str, str], Statistic],
) -> Line:
    paper = {column: expected.get(row.name, column) for column in expected.columns}
    own = {
        method.name: stored[row.name, method.name] for method in experiment.methods if (row.name, method.name) in stored
    }
    headline = experiment.headline(row)
    reference: float | None = None
    name = ""
    instead = experiment.compare.instead.get(row.name)
    if instead is not None:
        name = experiment.method(instead).label
        reference = own[instead].mean if instead in own else None
    else:
        printed = [(paper[column].mean, LABELS.get(column, column)) for column in compared]
        known = [(mean, label) for mean, label in printed if mean is not None]
        if known:
            best = max if experiment.higher_is_better else min
            reference, name = best(known, key=lambda pair: pair[0])
    result = own.get(headline.name) if headline is not None else None
    factor = (
        None if reference is None or result is None else _factor(result.mean, reference, experiment.higher_is_better)
    )
    return Line(row, headline, paper, own, reference, name, factor)


def _axes(experiment: Experiment, lines: Sequence[Line]) -> tuple[AxisValue, ...]:
    """Return best, median and mean of the headline's scores for each value of each axis, where there are several axes."""
    names = list(dict.fromkeys(axis for row in experiment.rows for axis in row.axes))
    if not any(len(row.axes) > 1 for row in experiment.rows):
        return ()
    found = []
    for axis in names:
        values: dict[str, list[float]] = {}
        for line in lines:
            if axis in line.row.axes and line.result is not None and math.isfinite(line.result.mean):
                values.setdefault(str(line.row.axes[axis]), []).append(line.result.mean)
        best = max if experiment.higher_is_better else min
        axis_values = [
            AxisValue(axis, value, len(scores), best(scores), float(np.median(scores)), float(np.mean(scores)))
            for value, scores in values.items()
        ]
        found += sorted(axis_values, key=lambda entry: entry.best, reverse=experiment.higher_is_better)
    return tuple(found)
