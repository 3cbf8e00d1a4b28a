"""The structure of a Bayesian network from data: hill climbing on the Bayesian or Akaike information criterion."""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from kapsi.errors import SpecError
from kapsi.zoo.bayesian_network.model import Parents, check_codes, check_parents, check_rows, check_states, order_of

__all__ = ["hill_climb", "parents_from_pgmpy", "structure_score"]

Kind = Literal["discrete", "gaussian"]
Criterion = Literal["bic", "aic"]

LEAST_SHARE = 1e-12
"""Of the variance of a node: what its parents must leave of it."""

EQUAL = 1e-9
"""Gains that differ by less are equal: rounding decides between them."""

LARGEST_COUNTED = 2**20
"""Joint states that are counted in an array; more are sorted."""


def structure_score(
    x: Any,
    parents: Parents,
    *,
    kind: Kind = "discrete",
    criterion: Criterion = "bic",
    states: Sequence[int] | None = None,
) -> float:
    """Return how well a structure explains rows: the largest log-likelihood, less ½ log(rows) for each parameter.

    Args:
        x: rows, `(rows, nodes)`; of discrete nodes the numbers of their states.
        parents: for each node the numbers of its parents.
        kind: `discrete` with q(k − 1) parameters for a node of k states with q joint states of its parents, or `gaussian` with one
            for each parent and two more.
        criterion: `bic`, or `aic`: one for each parameter.
        states: how many states each discrete node has; by default as many as are in x.

    Example:
        >>> x = [[0, 0], [0, 0], [1, 1], [1, 1]]
        >>> round(structure_score(x, [(), (0,)]), 3), round(structure_score(x, [(), ()]), 3)
        (-4.852, -6.931)
    """
    structure = check_parents("structure_score", parents)
    scores = _scores("structure_score", x, kind, criterion, states)
    if len(structure) != scores.nodes:
        raise SpecError(f"structure_score: {len(structure)} nodes in parents, {scores.nodes} columns in x")
    return math.fsum(scores.family(node, frozenset(given)) for node, given in enumerate(structure))


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
    """Return a structure whose score no edge that is added, taken away or turned makes better.

    Each step takes the change that gains most. It is begun again, in turn from the start with changes that gain the same taken by
    chance, and from the best structure after some changes at random, and the best of all is returned: the same rows and seed give
    the same structure. The scores of families are kept, and only those of nodes whose parents changed are computed anew.

    Args:
        x, kind, criterion, states: as in `structure_score`.
        max_parents: of a node.
        start: the structure that it begins with, no edges by default.
        required: edges (parent, child) that stay; those that are not in `start` are added to it.
        forbidden: edges (parent, child) that are not made.
        epsilon: the least gain of a step.
        restarts: how often it is begun again, 0 for one climb.
        seed: of the random changes.

    Returns:
        For each node the numbers of its parents.

    Raises:
        SpecError: a cycle at the start, or a Gaussian node that others determine.

    Example:
        >>> x = [[0, 0, 0], [0, 0, 1], [1, 1, 0], [1, 1, 1]] * 5
        >>> hill_climb(x)
        ((1,), (), ())
    """
    scores = _scores("hill_climb", x, kind, criterion, states)
    nodes = scores.nodes
    if not (isinstance(epsilon, int | float) and epsilon > 0 and math.isfinite(epsilon)):
        raise SpecError(f"hill_climb(epsilon={epsilon!r}): expected a positive number; zero would never end")
    restarts, seed = _count("restarts", restarts), _count("seed", seed)
    most = nodes - 1 if max_parents is None else _count("max_parents", max_parents)
    stay, banned = _edges("required", required, nodes), _edges("forbidden", forbidden, nodes)
    begun = [list(given) for given in (check_parents("hill_climb", start) if start is not None else [()] * nodes)]
    if len(begun) != nodes:
        raise SpecError(f"hill_climb: {len(begun)} nodes in start, {nodes} columns in x")
    for parent, child in sorted(stay):
        if parent not in begun[child]:
            begun[child].append(parent)
    parents = [list(given) for given in check_parents("hill_climb", begun)]
    if stay & banned or any(len(given) > most for given in parents):
        raise SpecError("hill_climb: the start has more parents than max_parents, or an edge is required and forbidden")

    search = _Search(scores, parents, most, stay, banned)
    search.climb(epsilon)
    best, draw = search.parents, np.random.default_rng(seed)
    for number in range(restarts):
        # From the start with equal changes taken by chance: which of two equal edges is the first decides about many later ones.
        again = _Search(scores, best if number % 2 else parents, most, stay, banned)
        for _ in range(int(draw.integers(1, nodes + 2)) * (number % 2)):
            again.change_one(draw)
        again.climb(epsilon, draw)
        if again.score() > search.score() + epsilon:
            search, best = again, again.parents
    return tuple(tuple(sorted(given)) for given in best)


def parents_from_pgmpy(graph: Any, columns: Sequence[Hashable] | None = None) -> tuple[tuple[int, ...], ...]:
    """Return the structure of a directed graph of pgmpy, a network or what a search found, as numbers of nodes.

    Args:
        graph: a `DAG` or a network.
        columns: the nodes in the order of their numbers; by default that of `graph.nodes`.

    Raises:
        SpecError: a graph with edges that have no direction, or other columns than nodes.
    """
    from pgmpy.base import DAG

    if not isinstance(graph, DAG):
        raise SpecError(
            f"parents_from_pgmpy: expected a DAG or a network of pgmpy, got {type(graph).__name__}; HillClimbSearch returns one "
            "with return_type='dag', and to_dag() makes one of a PDAG"
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


class _Scores:
    """The scores of nodes given their parents, from numbers that belong to sets of nodes and are kept."""

    def __init__(self, nodes: int, rows: int, criterion: Criterion) -> None:
        self.nodes, self.rows = nodes, rows
        self.weight = math.log(rows) / 2 if criterion == "bic" else 1.0
        self.known: dict[frozenset[int], float] = {}

    def of(self, subset: frozenset[int]) -> float:
        if subset not in self.known:
            self.known[subset] = self.measure(sorted(subset))
        return self.known[subset]

    def measure(self, subset: list[int]) -> float:
        raise NotImplementedError

    def family(self, node: int, given: frozenset[int]) -> float:
        raise NotImplementedError


class _Discrete(_Scores):
    def __init__(self, codes: np.ndarray, states: Sequence[int], criterion: Criterion) -> None:
        super().__init__(codes.shape[1], len(codes), criterion)
        self.columns, self.states = np.ascontiguousarray(codes.T), states

    def measure(self, subset: list[int]) -> float:
        """Return Σ count log count over the joint states of some nodes."""
        place, width = np.zeros(self.rows, dtype=np.int64), 1
        for node in subset:
            place, width = place * self.states[node] + self.columns[node], width * self.states[node]
            if width > LARGEST_COUNTED:
                found, place = np.unique(place, return_inverse=True)
                width = len(found)
        counts = np.bincount(place, minlength=1)
        counts = counts[counts > 0].astype(np.float64)
        return float(counts @ np.log(counts))

    def family(self, node: int, given: frozenset[int]) -> float:
        parameters = (self.states[node] - 1) * math.prod(self.states[i] for i in given)
        return self.of(given | {node}) - self.of(given) - self.weight * parameters


class _Gaussian(_Scores):
    def __init__(self, where: str, x: np.ndarray, criterion: Criterion) -> None:
        super().__init__(x.shape[1], len(x), criterion)
        self.where = where
        centered = x - x.mean(0)
        spread = np.sqrt(np.square(centered).mean(0))
        if not (spread > 0).all():
            raise SpecError(f"{where}: node {int(np.argmin(spread))} is a constant and has no density; leave it out")
        units = centered / spread
        self.correlation, self.scales = units.T @ units / len(x), np.log(spread)

    def measure(self, subset: list[int]) -> float:
        """Return log det of the correlations of some nodes."""
        sign, value = np.linalg.slogdet(self.correlation[np.ix_(subset, subset)])
        return float(value) if sign > 0 else -math.inf

    def family(self, node: int, given: frozenset[int]) -> float:
        above = self.of(given)
        share = self.of(given | {node}) - above if above > -math.inf else -math.inf
        if not share > math.log(LEAST_SHARE):
            raise SpecError(
                f"{self.where}: node {node} is determined by nodes {sorted(given)} and has no density beside them; leave it out, "
                "or set max_parents"
            )
        log_variance = share + 2 * self.scales[node]
        likelihood = -self.rows / 2 * (math.log(2 * math.pi) + 1 + log_variance)
        return float(likelihood - self.weight * (len(given) + 2))


Change = tuple[tuple[int, int], ...]
"""Pairs (child, other): whether the other is a parent of the child is turned round, for each."""


class _Search:
    """A structure on its way up.

    Args:
        scores: of families.
        parents: where it begins.
        most: parents that a node may have.
        stay, banned: edges (parent, child) that are not taken away, and not made.
    """

    def __init__(
        self,
        scores: _Scores,
        parents: Sequence[Sequence[int]],
        most: int,
        stay: set[tuple[int, int]],
        banned: set[tuple[int, int]],
    ) -> None:
        self.scores, self.parents = scores, [list(given) for given in parents]
        self.most, self.stay, self.banned = most, stay, banned
        self.gains: list[dict[int, float]] = [{} for _ in parents]
        for child in range(len(parents)):
            self._measure(child)

    def score(self) -> float:
        return math.fsum(self.scores.family(node, frozenset(given)) for node, given in enumerate(self.parents))

    def _measure(self, child: int) -> None:
        """Compute what it gains to change whether each other node is a parent of one."""
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
        """Yield what each change that is allowed gains: edges added, taken away and turned."""
        reach = _reach(self.parents)
        for child, gains in enumerate(self.gains):
            for other, gain in gains.items():
                if other not in self.parents[child]:
                    if not reach[child, other] and (other, child) not in self.banned:
                        yield gain, ((child, other),)
                    continue
                if (other, child) in self.stay:
                    continue
                yield gain, ((child, other),)
                back = self.gains[other].get(child)
                # Turned it would close a cycle with any other way from parent to child.
                if back is not None and (child, other) not in self.banned:
                    ways = reach[other] & reach[:, child]
                    ways[[other, child]] = False
                    if not ways.any():
                        yield gain + back, ((child, other), (other, child))

    def climb(self, epsilon: float, draw: np.random.Generator | None = None) -> None:
        """Take the best change until none gains; of equal ones the first, or any."""
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


def _scores(where: str, x: Any, kind: Kind, criterion: Criterion, states: Sequence[int] | None) -> _Scores:
    if criterion not in ("bic", "aic"):
        raise SpecError(f"{where}(criterion={criterion!r}): expected bic or aic")
    if kind == "gaussian":
        if states is not None:
            raise SpecError(f"{where}: Gaussian nodes have no states")
        return _Gaussian(where, check_rows(where, x).numpy(), criterion)
    if kind != "discrete":
        raise SpecError(f"{where}(kind={kind!r}): expected discrete or gaussian")
    rows = check_rows(where, x)
    if states is not None:
        states = check_states(where, states, [()] * rows.shape[1])
    codes, sizes = check_codes(where, rows, states)
    return _Discrete(codes.numpy(), sizes, criterion)


def _count(name: str, value: Any) -> int:
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise SpecError(f"hill_climb({name}={value!r}): expected an integer of at least 0")
    return number


def _edges(name: str, edges: Iterable[Sequence[int]], nodes: int) -> set[tuple[int, int]]:
    found = set()
    for edge in edges:
        try:
            parent, child = (operator.index(node) for node in edge)
        except (TypeError, ValueError):
            parent = child = -1
        if not (0 <= parent < nodes and 0 <= child < nodes and parent != child):
            raise SpecError(
                f"hill_climb: expected {name} as pairs (parent, child) of nodes, 0 to {nodes - 1}, got {edge!r:.40}"
            )
        found.add((parent, child))
    return found


def _reach(parents: Sequence[Sequence[int]]) -> np.ndarray:
    """Return from which nodes to which there is a way, `(from, to)`."""
    reach = np.zeros((len(parents), len(parents)), dtype=bool)
    for node in order_of(parents):
        for parent in parents[node]:
            reach[:, node] |= reach[:, parent]
            reach[parent, node] = True
    return reach
