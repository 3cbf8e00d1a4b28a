"""The structure of a Bayesian network from data: hill climbing on BIC or AIC."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from kapsi.errors import DataError, SpecError, check_choice, check_integer, refuse
from kapsi.zoo.bayesian_network.estimation import MIN_SHARE
from kapsi.zoo.bayesian_network.model import Parents, check_parents, check_states, order_of
from kapsi.zoo.graphical import check_codes, check_rows

Kind = Literal["discrete", "gaussian"]
Criterion = Literal["bic", "aic"]

EQUAL = 1e-9
"""Difference of gains counted as equal, at rounding level."""

MAX_COUNTED = 2**20
"""Most joint states counted in an array; more are sorted."""


def structure_score(
    x: Any,
    parents: Parents,
    *,
    kind: Kind = "discrete",
    criterion: Criterion = "bic",
    states: Sequence[int] | None = None,
) -> float:
    """Return the score of a structure: the maximum log-likelihood minus ½ log(rows) per parameter.

    Args:
        x: rows, `(rows, nodes)`; state indices for discrete nodes.
        parents: indices of the parents of each node.
        kind: `discrete` with q(k − 1) parameters for a node of k states with q joint states of the parents, or `gaussian` with
            2 + number of parents.
        criterion: `bic`, or `aic` with 1 per parameter.
        states: number of states of each discrete node; default: the largest state index in x plus 1.

    Example:
        >>> x = [[0, 0], [0, 0], [1, 1], [1, 1]]
        >>> round(structure_score(x, [(), (0,)]), 3), round(structure_score(x, [(), ()]), 3)
        (-4.852, -6.931)
    """
    structure = check_parents("structure_score", parents)
    scores = _scores("structure_score", x, kind, criterion, states)
    if len(structure) != scores.nodes:
        raise DataError(f"structure_score: {len(structure)} nodes in parents, {scores.nodes} columns in x")
    return math.fsum(scores.family(node, frozenset(above)) for node, above in enumerate(structure))


def hill_climb(
    x: Any,
    *,
    kind: Kind = "discrete",
    criterion: Criterion = "bic",
    states: Sequence[int] | None = None,
    max_parents: int | None = None,
    start: Parents | None = None,
    required: Iterable[Sequence[int]] = (),
    forbidden: Iterable[Sequence[int]] = (),
    epsilon: float = 1e-4,
    restarts: int = 20,
    seed: int = 0,
) -> tuple[tuple[int, ...], ...]:
    """Return a structure with a locally optimal score: no added, removed or reversed edge improves it.

    Each step takes the change with the largest gain. Restarts alternate between the start, with random choices among equal gains,
    and the best structure after some random changes; the best result is returned, the same for the same rows and seed. Scores of
    families are cached; a step recomputes those of nodes with new parents only.

    Args:
        x, kind, criterion, states: see `structure_score`.
        max_parents: most parents of a node.
        start: initial structure; default: no edges.
        required: edges (parent, child) to keep; added to `start`.
        forbidden: edges (parent, child) never added.
        epsilon: smallest gain of a step.
        restarts: number of restarts, at least 0.
        seed: seed of random changes.

    Returns:
        The indices of the parents of each node.

    Raises:
        SpecError: a cycle at the start.
        DataError: a Gaussian node determined by others.

    Example:
        >>> x = [[0, 0, 0], [0, 0, 1], [1, 1, 0], [1, 1, 1]] * 5
        >>> hill_climb(x)
        ((1,), (), ())
    """
    scores = _scores("hill_climb", x, kind, criterion, states)
    nodes = scores.nodes
    if not (isinstance(epsilon, int | float) and epsilon > 0 and math.isfinite(epsilon)):
        refuse("hill_climb: epsilon", "a positive number", epsilon)
    restarts, seed = check_integer("hill_climb: restarts", restarts, 0), check_integer("hill_climb: seed", seed, 0)
    most = nodes - 1 if max_parents is None else check_integer("hill_climb: max_parents", max_parents, 0)
    required_edges, forbidden_edges = _edges("required", required, nodes), _edges("forbidden", forbidden, nodes)
    initial = [list(above) for above in (check_parents("hill_climb", start) if start is not None else [()] * nodes)]
    if len(initial) != nodes:
        raise SpecError(f"hill_climb: {len(initial)} nodes in start, {nodes} columns in x")
    for parent, child in sorted(required_edges):
        if parent not in initial[child]:
            initial[child].append(parent)
    parents = [list(above) for above in check_parents("hill_climb", initial)]
    if required_edges & forbidden_edges or any(len(above) > most for above in parents):
        raise SpecError("hill_climb: the start has more parents than max_parents, or an edge is required and forbidden")

    search = _Search(scores, parents, most, required_edges, forbidden_edges)
    search.climb(epsilon)
    best, draw = search.parents, np.random.default_rng(seed)
    for number in range(restarts):
        # Even restarts choose randomly among equal gains: the first of two equal edges affects many later steps.
        trial = _Search(scores, best if number % 2 else parents, most, required_edges, forbidden_edges)
        for _ in range(int(draw.integers(1, nodes + 2)) * (number % 2)):
            trial.change_one(draw)
        trial.climb(epsilon, draw)
        if trial.score() > search.score() + epsilon:
            search, best = trial, trial.parents
    return tuple(tuple(sorted(above)) for above in best)


def parents_from_pgmpy(graph: Any, columns: Sequence[Hashable] | None = None) -> tuple[tuple[int, ...], ...]:
    """Return the structure of a pgmpy directed graph (a network or the result of a search) as the parents of each node.

    Args:
        graph: a `DAG` or a network.
        columns: nodes in the order of their indices; default: the order of `graph.nodes`.

    Raises:
        SpecError: a graph with undirected edges, or columns other than the nodes.
    """
    from pgmpy.base import DAG

    if not isinstance(graph, DAG):
        raise SpecError(
            f"parents_from_pgmpy: expected a pgmpy DAG or network, got {type(graph).__name__}; use HillClimbSearch "
            "with return_type='dag', or to_dag() of a PDAG"
        )
    names = list(graph.nodes) if columns is None else list(columns)
    if len(set(names)) < len(names) or set(names) != set(graph.nodes):
        raise SpecError(
            f"parents_from_pgmpy: expected columns to name each of the {len(graph.nodes)} nodes once, got {names}"
        )
    number = {name: i for i, name in enumerate(names)}
    return check_parents(
        "parents_from_pgmpy", [[number[parent] for parent in graph.get_parents(name)] for name in names]
    )


# ------------------------------------------------------------------------------------------------ scores of families


class _FamilyScores(ABC):
    """Scores of nodes given their parents, from cached measures of sets of nodes."""

    def __init__(self, nodes: int, rows: int, criterion: Criterion) -> None:
        self.nodes, self.rows = nodes, rows
        self.weight = math.log(rows) / 2 if criterion == "bic" else 1.0
        self.cache: dict[frozenset[int], float] = {}

    def of(self, subset: frozenset[int]) -> float:
        if subset not in self.cache:
            self.cache[subset] = self.measure(sorted(subset))
        return self.cache[subset]

    @abstractmethod
    def measure(self, subset: list[int]) -> float:
        """Return the measure of a set of nodes."""

    @abstractmethod
    def family(self, node: int, parents: frozenset[int]) -> float:
        """Return the score of a node given its parents."""


class _DiscreteScores(_FamilyScores):
    def __init__(self, codes: np.ndarray, states: Sequence[int], criterion: Criterion) -> None:
        super().__init__(codes.shape[1], len(codes), criterion)
        self.columns, self.states = np.ascontiguousarray(codes.T), states

    def measure(self, subset: list[int]) -> float:
        """Return Σ count log count over the joint states of some nodes."""
        number, width = np.zeros(self.rows, dtype=np.int64), 1
        for node in subset:
            number, width = number * self.states[node] + self.columns[node], width * self.states[node]
            if width > MAX_COUNTED:
                present, number = np.unique(number, return_inverse=True)
                width = len(present)
        counts = np.bincount(number, minlength=1)
        counts = counts[counts > 0].astype(np.float64)
        return float(counts @ np.log(counts))

    def family(self, node: int, parents: frozenset[int]) -> float:
        parameters = (self.states[node] - 1) * math.prod(self.states[i] for i in parents)
        return self.of(parents | {node}) - self.of(parents) - self.weight * parameters


class _GaussianScores(_FamilyScores):
    def __init__(self, where: str, x: np.ndarray, criterion: Criterion) -> None:
        super().__init__(x.shape[1], len(x), criterion)
        self.where = where
        centered = x - x.mean(0)
        scale = np.sqrt(np.square(centered).mean(0))
        if not (scale > 0).all():
            raise DataError(f"{where}: node {int(np.argmin(scale))} is constant and has no density; remove the node")
        units = centered / scale
        self.correlation, self.scales = units.T @ units / len(x), np.log(scale)

    def measure(self, subset: list[int]) -> float:
        """Return log det of the correlations of some nodes."""
        sign, value = np.linalg.slogdet(self.correlation[np.ix_(subset, subset)])
        return float(value) if sign > 0 else -math.inf

    def family(self, node: int, parents: frozenset[int]) -> float:
        above = self.of(parents)
        share = self.of(parents | {node}) - above if above > -math.inf else -math.inf
        if not share > math.log(MIN_SHARE):
            raise DataError(
                f"{self.where}: node {node} is determined by nodes {sorted(parents)} and has no density given them; "
                "remove the node, or set max_parents"
            )
        log_variance = share + 2 * self.scales[node]
        likelihood = -self.rows / 2 * (math.log(2 * math.pi) + 1 + log_variance)
        return float(likelihood - self.weight * (len(parents) + 2))


Change = tuple[tuple[int, int], ...]
"""Pairs (child, other): toggle whether the other is a parent of the child."""


class _Search:
    """State of a hill climb.

    Args:
        scores: scores of families.
        parents: initial structure.
        most: most parents of a node.
        required, forbidden: edges (parent, child) never removed, and never added.
    """

    def __init__(
        self,
        scores: _FamilyScores,
        parents: Sequence[Sequence[int]],
        most: int,
        required: set[tuple[int, int]],
        forbidden: set[tuple[int, int]],
    ) -> None:
        self.scores, self.parents = scores, [list(above) for above in parents]
        self.most, self.required, self.forbidden = most, required, forbidden
        self.gains: list[dict[int, float]] = [{} for _ in parents]
        for child in range(len(parents)):
            self._measure(child)

    def score(self) -> float:
        return math.fsum(self.scores.family(node, frozenset(above)) for node, above in enumerate(self.parents))

    def _measure(self, child: int) -> None:
        """Compute the gain of adding or removing each other node as a parent."""
        present = frozenset(self.parents[child])
        now = self.scores.family(child, present)
        self.gains[child] = {
            other: self.scores.family(child, present ^ {other}) - now
            for other in range(len(self.parents))
            if other != child and (other in present or len(present) < self.most)
        }

    def _apply(self, change: Change) -> None:
        for child, other in change:
            if other in self.parents[child]:
                self.parents[child].remove(other)
            else:
                self.parents[child].append(other)
        for child, _ in change:
            self._measure(child)

    def _changes(self) -> Iterator[tuple[float, Change]]:
        """Yield the gain of each allowed change: edges added, removed and reversed."""
        reach = _reach(self.parents)
        for child, gains in enumerate(self.gains):
            for other, gain in gains.items():
                if other not in self.parents[child]:
                    if not reach[child, other] and (other, child) not in self.forbidden:
                        yield gain, ((child, other),)
                    continue
                if (other, child) in self.required:
                    continue
                yield gain, ((child, other),)
                back = self.gains[other].get(child)
                # A reversed edge closes a cycle with any other path from parent to child.
                if back is not None and (child, other) not in self.forbidden:
                    between = reach[other] & reach[:, child]
                    between[[other, child]] = False
                    if not between.any():
                        yield gain + back, ((child, other), (other, child))

    def climb(self, epsilon: float, draw: np.random.Generator | None = None) -> None:
        """Take the best changes until none gains; among equal gains the first, or a random one."""
        while True:
            best, equal = epsilon, []
            for gain, change in self._changes():
                if gain > best + EQUAL:
                    best, equal = gain, [change]
                elif equal and gain > best - EQUAL:
                    equal.append(change)
            if not equal:
                return
            self._apply(equal[0 if draw is None else int(draw.integers(len(equal)))])

    def change_one(self, draw: np.random.Generator) -> None:
        changes = [change for _, change in self._changes()]
        if changes:
            self._apply(changes[int(draw.integers(len(changes)))])


def _scores(where: str, x: Any, kind: Kind, criterion: Criterion, states: Sequence[int] | None) -> _FamilyScores:
    check_choice(f"{where}: criterion", criterion, ("bic", "aic"))
    if check_choice(f"{where}: kind", kind, ("discrete", "gaussian")) == "gaussian":
        if states is not None:
            raise SpecError(f"{where}: Gaussian nodes have no states")
        return _GaussianScores(where, check_rows(where, x).numpy(), criterion)
    rows = check_rows(where, x)
    if states is not None:
        states = check_states(where, states, [()] * rows.shape[1])
    codes, sizes = check_codes(where, rows, states)
    return _DiscreteScores(codes.numpy(), sizes, criterion)


def _edges(name: str, edges: Iterable[Sequence[int]], nodes: int) -> set[tuple[int, int]]:
    result = set()
    for edge in edges:
        try:
            parent, child = (operator.index(node) for node in edge)
        except (TypeError, ValueError):
            parent = child = -1
        if not (0 <= parent < nodes and 0 <= child < nodes and parent != child):
            raise SpecError(
                f"hill_climb: expected {name} as pairs (parent, child) of nodes, 0 to {nodes - 1}, got {edge!r:.40}"
            )
        result.add((parent, child))
    return result


def _reach(parents: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the reachability matrix, `(from, to)`."""
    reach = np.zeros((len(parents), len(parents)), dtype=bool)
    for node in order_of(parents):
        for parent in parents[node]:
            reach[:, node] |= reach[:, parent]
            reach[parent, node] = True
    return reach
