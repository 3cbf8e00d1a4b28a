"""The table of an experiment: stored results next to the paper's, and their comparison."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kapsi.paper.expected import LABELS, Expected, Printed
from kapsi.paper.experiment import Experiment, Method, TableRow
from kapsi.paper.store import Result, configuration_hash, here

MEDIAN_SEEDS = 3
"""Least number of seeds of a median."""


@dataclass(frozen=True)
class Statistic:
    """Statistics over the seeds of a method for a row.

    Attributes:
        mean, std: mean and population standard deviation (divided by the number of seeds) of the scores.
        count: number of seeds.
        validation: mean validation score, None if it is missing for any seed.
        parameters: largest number of any seed.
        fewest_parameters: smallest number of any seed, which differs where seeds select models of different sizes.
        seconds, cpu_seconds: mean per seed.
        total: CPU seconds of all seeds.
        best_epoch: mean of the best test score over epochs, None if not recorded.
        mark: footnote marks of the environments, empty for the first.
        scores: score of each seed.
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
    fewest_parameters: int | None = None
    scores: Mapping[int, float] = field(default_factory=dict)

    def common_seeds(self, other: Statistic) -> list[int]:
        """Return the seeds of both methods."""
        return [seed for seed in self.scores if seed in other.scores]

    def paired(self, other: Statistic) -> tuple[float, float] | None:
        """Return the mean scores of both methods over their common seeds, or None without a common seed."""
        seeds = self.common_seeds(other)
        if not seeds:
            return None
        own, theirs = ([scores[seed] for seed in seeds] for scores in (self.scores, other.scores))
        with np.errstate(all="ignore"):
            return float(np.mean(own)), float(np.mean(theirs))

    @property
    def median(self) -> float:
        """Return the median of the scores."""
        return float(np.median(list(self.scores.values())))


@dataclass(frozen=True)
class Environment:
    """Versions and machine of results."""

    mark: str
    versions: Mapping[str, str]
    machine: Mapping[str, object]
    count: int

    def text(self) -> str:
        """Return a single-line description."""
        parts = [f"{name} {version}" for name, version in self.versions.items()]
        memory = self.machine.get("memory_gib")
        machine = [
            str(self.machine.get("cpu")),
            f"{self.machine.get('cores')} cores",
            *([f"{memory} GiB"] if memory else []),
            *([str(self.machine["accelerator"])] if self.machine.get("accelerator") else []),
            str(self.machine.get("os")),
        ]
        # Results may be from untrusted files: replace control characters.
        return "".join(
            letter if letter.isprintable() else "?" for letter in f"{', '.join(parts)}; {', '.join(machine)}"
        )


@dataclass(frozen=True)
class Line:
    """A row of a table.

    Attributes:
        row: the experiment row on this line.
        headline: the compared method.
        paper: printed results by column.
        statistics: statistics of stored results by method.
        reference: reference score of the headline, None if there is none.
        reference_name: label of the reference.
        factor: reference divided by headline for errors, headline minus reference for accuracies; over the common seeds if the
            reference was measured here.
    """

    row: TableRow
    headline: Method | None
    paper: Mapping[str, Printed]
    statistics: Mapping[str, Statistic]
    reference: float | None = None
    reference_name: str = ""
    factor: float | None = None

    @property
    def result(self) -> Statistic | None:
        """Statistics of the headline method."""
        return self.statistics.get(self.headline.name) if self.headline is not None else None

    def own_reference(self, method: Method, *, median: bool = False) -> float | None:
        """Return the score of a method's own column in the paper, or the mean or median of the method that replaces it here."""
        if self.row.name in method.instead:
            other = self.statistics.get(method.instead[self.row.name])
            if other is None:
                return None
            return other.median if median else other.mean
        return None if method.paper is None else self.paper[method.paper].mean


@dataclass(frozen=True)
class AxisValue:
    """Statistics of all rows of a grid with the same value on an axis."""

    axis: str
    value: str
    count: int
    best: float
    median: float
    mean: float


@dataclass(frozen=True)
class ResultTable:
    """The content of an experiment's table.

    Attributes:
        experiment: the experiment.
        lines: the rows.
        columns: prefixes of the paper's columns shown.
        methods: methods with a result.
        compared: reference columns of the headline.
        environments: versions and machines of the results, by number of results; the first has no mark.
        notes: footnotes.
        axes: statistics by axis, for a grid of several axes.
        quick: whether the results are from `--quick`.
        seeds: other seeds than the experiment's, or empty.
    """

    experiment: Experiment
    lines: tuple[Line, ...]
    columns: tuple[str, ...]
    methods: tuple[Method, ...]
    compared: tuple[str, ...]
    environments: tuple[Environment, ...] = ()
    notes: tuple[str, ...] = ()
    axes: tuple[AxisValue, ...] = ()
    quick: bool = False
    seeds: tuple[int, ...] = field(default=())

    @property
    def named(self) -> int:
        """Number of rows."""
        return len(self.lines)

    @property
    def done(self) -> int:
        """Number of rows with a result of the headline method."""
        return sum(line.result is not None for line in self.lines)

    @property
    def cpu_seconds(self) -> float:
        """CPU time of all results shown."""
        return sum(statistic.total for line in self.lines for statistic in line.statistics.values())

    def summary(self) -> list[str]:
        """Return the comparisons, a line each, and the best row of a sweep."""
        texts = []
        lines = [line for line in self.lines if line.factor is not None]
        printed = printed_factors(self)
        same_rows = [line for line in lines if line.row.name in self.experiment.compare.instead]
        if printed:
            names = [LABELS.get(column, column) for column in self.compared]
            best = "the best of " if len(names) > 2 else "the better of " if len(names) > 1 else ""
            texts.append(self._verdict(f"the paper ({best}{', '.join(names)})", printed_factors(self)))
        if same_rows:
            methods = ", ".join(dict.fromkeys(line.reference_name for line in same_rows))
            reason = f" ({self.experiment.compare.reason})" if self.experiment.compare.reason else ""
            pairs = [(line, line.factor or 0.0) for line in same_rows]
            texts.append(self._verdict(f"{methods} on the same rows{reason}", pairs))
        own = self.own_columns()
        for method, pairs in own:
            verdict = self._verdict(
                f"its own column in the paper: {method.label}{replaced_references(self, method)}", pairs, method.name
            )
            texts.append(verdict + self._medians(method, pairs))
        for method in self.methods:
            if any(method is other for other, _ in own):
                continue
            pairs = paired_factors(self, method)
            if pairs:
                texts.append(self._verdict(f"{method.label} here{_protocol(self.experiment, method)}", pairs))
        best = self.best()
        return [*texts, best] if best else texts

    def own_columns(self) -> list[tuple[Method, list[tuple[Line, float]]]]:
        """Return the rows and factors of each method with an own column in the paper, if there are several besides baselines."""
        found = []
        for method in self.methods:
            pairs = [
                (line, factor_of(line.statistics[method.name].mean, reference, self.experiment.higher_is_better))
                for line in self.lines
                if method.name in line.statistics and (reference := line.own_reference(method)) is not None
            ]
            if pairs and not method.baseline:
                found.append((method, pairs))
        return found if len(found) > 1 else []

    def best(self) -> str:
        """Return the best row of a sweep, here and in the paper, or an empty string."""
        best = max if self.experiment.higher_is_better else min
        scores = [(line.result.mean, line) for line in self.lines if line.result and math.isfinite(line.result.mean)]
        if not scores or not any(line.row.axes for line in self.lines):
            return ""
        score, line = best(scores, key=lambda pair: pair[0])
        parameters = line.result.parameters if line.result is not None else None
        size = f", {parameters:,} parameters" if parameters is not None else ""
        printed = [
            (value, line.row.name)
            for line in self.lines
            for column in self.compared
            if (value := line.paper[column].mean) is not None
        ]
        text = f"best here: {line.row.name}, {score:.4g}{size}"
        if printed:
            value, name = best(printed, key=lambda pair: pair[0])
            text += f"; in the paper: {name}, {value:.4g}"
        return text

    def _verdict(self, reference: str, pairs: Sequence[tuple[Line, float]], method: str = "") -> str:
        """Return a comparison of a method, by default the headline, with a reference: counts, and the worse rows."""
        total = f"{len(pairs)} row{'s' * (len(pairs) > 1)}"
        if self.experiment.higher_is_better:
            text = f"accuracy not lower in {sum(factor >= 0 for _, factor in pairs)} of {total}"
        else:
            first, *others = sorted(self.experiment.compare.factors, reverse=True) or (1.0,)
            text = f"MSE ≥ {first:g}× lower in {count(pairs, first)} of {total}"
            text += "".join(f", ≥ {least:g}× lower in {count(pairs, least)}" for least in others)
            text += f", not higher in {count(pairs, 1)}"
        limit = 0 if self.experiment.higher_is_better else 1
        worse = [(line, factor) for line, factor in pairs if not factor >= limit]
        if worse:
            shown = [f"{line.row.name} ({self._difference(line, factor, method)})" for line, factor in worse]
            rest = f" and {len(shown) - 12} more" if len(shown) > 12 else ""
            text += f"; worse: {', '.join(shown[:12])}{rest}"
        return f"compared with {reference}: {text}"

    def _medians(self, method: Method, pairs: Sequence[tuple[Line, float]]) -> str:
        """Return the comparison by medians over three seeds at least, to tell single seeds from most of them."""
        if min(line.statistics[method.name].count for line, _ in pairs) < MEDIAN_SEEDS:
            return ""
        even = 0 if self.experiment.higher_is_better else 1
        factors = [
            factor_of(line.statistics[method.name].median, reference, self.experiment.higher_is_better)
            for line, _ in pairs
            if (reference := line.own_reference(method, median=True)) is not None
        ]
        word = "lower" if self.experiment.higher_is_better else "higher"
        return f"; medians over seeds not {word} in {sum(factor >= even for factor in factors)} of {len(factors)}"

    def _difference(self, line: Line, factor: float, method: str) -> str:
        if self.experiment.higher_is_better:
            return f"{factor:+.4f}"
        if factor > 0:
            return f"{1 / factor:.3g}× higher"
        result = line.statistics.get(method) if method else line.result
        return "above 0" if result is not None and math.isfinite(result.mean) else "not finite"


def count(pairs: Sequence[tuple[Line, float]], least: float) -> int:
    """Return the number of rows with a factor of at least `least`."""
    return sum(factor >= least for _, factor in pairs)


def paired_factors(table: ResultTable, method: Method) -> list[tuple[Line, float]]:
    """Return the rows with a seed common to the headline and another method, and their factors over the common seeds."""
    found = []
    for line in table.lines:
        other = line.statistics.get(method.name)
        if line.result is None or line.headline is None or other is None or method.name == line.headline.name:
            continue
        scores = line.result.paired(other)
        if scores is not None:
            found.append((line, factor_of(*scores, table.experiment.higher_is_better)))
    return found


def printed_factors(table: ResultTable) -> list[tuple[Line, float]]:
    """Return the rows compared with printed results, with their factors."""
    instead = table.experiment.compare.instead
    return [(line, line.factor) for line in table.lines if line.factor is not None and line.row.name not in instead]


def replaced_references(table: ResultTable, method: Method) -> str:
    """Return the rows of a method compared with another method on the same data, in parentheses, or an empty string."""
    rows = [line.row.name for line in table.lines if line.row.name in method.instead]
    labels = dict.fromkeys(table.experiment.method(method.instead[row]).label for row in rows)
    return f" ({', '.join(rows)}: {', '.join(labels)}, on the same rows)" if rows else ""


def _protocol(experiment: Experiment, method: Method) -> str:
    return " (best epoch on test)" if (method.protocol or experiment.protocol) == "paper" else ""


def factor_of(score: float, reference: float, higher_is_better: bool) -> float:
    """Return score − reference for accuracies, reference / score for errors; non-finite values are worst."""
    if not math.isfinite(score):
        return -math.inf if higher_is_better else 0.0
    if higher_is_better:
        return score - reference if math.isfinite(reference) else math.inf
    if not math.isfinite(reference):
        return math.inf
    if score == 0:
        return math.inf if reference > 0 else 1.0
    return reference / score


def statistic(results: Sequence[Result], mark: str = "") -> Statistic:
    """Return the statistics over the seeds of a method for a row.

    Args:
        results: results of different seeds, not empty.
        mark: footnote marks of the environments.
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
        min(parameters) if parameters else None,
        {result.seed: result.score for result in results},
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
    """Return the table of an experiment from stored results.

    For each row and method, results of this process's versions and machine take precedence, then those of the environment
    with the most results; other machines with equal versions add missing seeds. Marks name the environments. Results of
    another configuration or of other seeds are not shown.

    Args:
        experiment: the experiment.
        expected: the paper's results.
        results: stored results; the last of each key counts.
        seeds: other seeds than the experiment's.
        quick: show results of `--quick`.
        only_rows: names of rows, all by default.
    """
    latest = {result.key: result for result in results}
    shown, used, other_seeds = _select(experiment, latest.values(), seeds, quick)
    selected_rows = None if only_rows is None else set(only_rows)
    rows = [row for row in experiment.active_rows() if selected_rows is None or row.name in selected_rows]
    names = {row.name for row in rows}
    shown = {key: group for key, group in shown.items() if key[0] in names}
    environments = _environments([result for group in shown.values() for result in group])
    marks = {environment: mark.mark for environment, mark in environments.items()}
    stored = {key: statistic(group, _mark(group, marks)) for key, group in shown.items()}
    compared = expected.compared(experiment)
    lines = tuple(_line(experiment, expected, compared, row, stored) for row in rows)
    present = {method for _, method in stored}
    notes = list(experiment.notes)
    if len(latest) > used:
        notes.append(f"{len(latest) - used} results of other configurations in the store are not shown")
    if other_seeds:
        notes.append(f"{other_seeds} results of other seeds in the store are not shown")
    others = used - other_seeds - sum(map(len, shown.values()))
    if others > 0 and selected_rows is None:
        notes.append(f"{others} results of other versions or machines in the store are not shown")
    notes += _left_out(experiment, selected_rows)
    return ResultTable(
        experiment,
        lines,
        tuple(column for column in expected.columns if any(line.paper[column].mean is not None for line in lines)),
        tuple(method for method in experiment.methods if method.name in present),
        compared,
        tuple(environments.values()),
        tuple(notes),
        _axes(experiment, lines),
        quick,
        tuple(seeds or ()),
    )


def _left_out(experiment: Experiment, rows: set[str] | None) -> list[str]:
    """Return a line for each reason with the exclusions; a row without any method is listed by its name alone."""
    methods: dict[tuple[str, str], list[str]] = {}
    for row, method, reason in experiment.excluded():
        if rows is None or row in rows:
            methods.setdefault((reason, row), []).append(method)
    reasons: dict[str, list[str]] = {}
    for (reason, row), names in methods.items():
        labels = [experiment.method(name).label for name in names]
        excluded = [row] if len(names) == len(experiment.methods) else [f"{row} with {label}" for label in labels]
        reasons.setdefault(reason, []).extend(excluded)
    lines = []
    for reason, excluded in reasons.items():
        rest = f" and {len(excluded) - 4} more" if len(excluded) > 4 else ""
        lines.append(f"left out: {', '.join(excluded[:4])}{rest}: {reason}")
    return lines


def shown_results(
    experiment: Experiment, results: Iterable[Result], *, seeds: Sequence[int] | None = None, quick: bool = False
) -> dict[tuple[str, str], list[Result]]:
    """Return the results of a table by (row, method), ordered by seed; arguments as in `build`."""
    return _select(experiment, {result.key: result for result in results}.values(), seeds, quick)[0]


def _select(
    experiment: Experiment, results: Iterable[Result], seeds: Sequence[int] | None, quick: bool
) -> tuple[dict[tuple[str, str], list[Result]], int, int]:
    """Return the results shown, the number of results with current configurations, and the number of these with other seeds."""
    by_method: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        by_method.setdefault((result.row, result.method), []).append(result)
    shown: dict[tuple[str, str], list[Result]] = {}
    used, other_seeds = 0, 0
    for row in experiment.rows:
        for method in experiment.methods_of(row):
            stored = by_method.get((row.name, method.name), [])
            if not stored:
                continue
            default = experiment.quick.seeds if quick else method.seeds or experiment.seeds
            wanted = set(default if seeds is None else seeds)
            hash_ = configuration_hash(experiment.run(row, method, 0, quick=quick))
            fitting = [result for result in stored if result.configuration["hash"] == hash_]
            seeded = [result for result in fitting if result.seed in wanted]
            used += len(fitting)
            other_seeds += len(fitting) - len(seeded)
            if seeded:
                shown[row.name, method.name] = sorted(_one_per_seed(seeded), key=lambda result: result.seed)
    return shown, used, other_seeds


def _one_per_seed(results: list[Result]) -> list[Result]:
    """Return a result for each seed: of this process's environment, otherwise of the environment with the most results.

    Seeds from several machines complete each other, with equal versions only: a machine changes the rounding, a version may change
    the method.
    """
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.environment, []).append(result)

    def rank(environment: str) -> tuple[bool, int, str]:
        group = groups[environment]
        return environment == here(), len(group), max(result.started for result in group)

    first, *others = sorted(groups, key=rank, reverse=True)
    chosen = {result.seed: result for result in groups[first]}
    for environment in others:
        if groups[environment][0].versions == groups[first][0].versions:
            chosen = {result.seed: result for result in groups[environment]} | chosen
    return list(chosen.values())


_MARKS = "ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻ"


def _environments(results: list[Result]) -> dict[str, Environment]:
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.environment, []).append(result)
    current = here()
    # By number: pages have the same marks on every machine.
    order = sorted(groups, key=lambda environment: (-len(groups[environment]), environment != current, environment))
    return {
        environment: Environment(
            "" if i == 0 else _MARKS[(i - 1) % len(_MARKS)],
            groups[environment][0].versions,
            groups[environment][0].machine,
            len(groups[environment]),
        )
        for i, environment in enumerate(order)
    }


def _mark(results: Sequence[Result], marks: Mapping[str, str]) -> str:
    """Return the marks of all environments of a cell; the empty mark of the most frequent environment is left out."""
    return "".join(sorted({marks[result.environment] for result in results}))


def _line(
    experiment: Experiment,
    expected: Expected,
    compared: tuple[str, ...],
    row: TableRow,
    stored: Mapping[tuple[str, str], Statistic],
) -> Line:
    paper = {column: expected.get(row.name, column) for column in expected.columns}
    statistics = {
        method.name: stored[row.name, method.name] for method in experiment.methods if (row.name, method.name) in stored
    }
    headline = experiment.headline(row)
    reference: float | None = None
    name = ""
    instead = experiment.compare.instead.get(row.name)
    if instead is not None:
        name = experiment.method(instead).label
        reference = statistics[instead].mean if instead in statistics else None
    else:
        printed = [(paper[column].mean, LABELS.get(column, column)) for column in compared]
        known = [(mean, label) for mean, label in printed if mean is not None]
        if known:
            best = max if experiment.higher_is_better else min
            reference, name = best(known, key=lambda pair: pair[0])
    result = statistics.get(headline.name) if headline is not None else None
    scores = None if result is None or reference is None else (result.mean, reference)
    if result is not None and instead in statistics:
        scores = result.paired(statistics[instead])  # both were measured here
    factor = None if scores is None else factor_of(*scores, experiment.higher_is_better)
    return Line(row, headline, paper, statistics, reference, name, factor)


def _axes(experiment: Experiment, lines: Sequence[Line]) -> tuple[AxisValue, ...]:
    """Return best, median and mean of the headline's scores by axis and value, empty for a single axis."""
    names = list(dict.fromkeys(axis for row in experiment.rows for axis in row.axes))
    if not any(len(row.axes) > 1 for row in experiment.rows):
        return ()
    entries = []
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
        entries += sorted(axis_values, key=lambda entry: entry.best, reverse=experiment.higher_is_better)
    return tuple(entries)
