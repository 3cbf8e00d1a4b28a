"""Shared parts of Bayesian and Markov networks: checks, import from pgmpy, sums over missing inputs, and parity helpers."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kapsi.errors import DataError, SpecError, refuse
from kapsi.expansion import Expansion
from kapsi.modules import Head, Model
from kapsi.training.prediction import predict_log_proba
from kapsi.zoo.base import Comparison, forbid, plain_head, sizes, tensor_of
from kapsi.zoo.inference import MAX_TABLE, LogFactor, eliminate, plan

LOG_ZERO = -10_000.0
"""Logarithm of a zero probability or potential in a table: the exponential is zero in every dtype, and finite times "
"zero is zero."""

ROWS = "rows"
"""Name of the axis of rows in a factor."""

Outside: TypeAlias = Literal["error", "nearest"]


# ------------------------------------------------------------------------------------------------ checks


def listed(names: Sequence[Any]) -> str:
    """Return at most twelve names for a message."""
    shown = list(map(repr, names))
    return ", ".join(shown[:12]) + (f", … ({len(shown)})" if len(shown) > 12 else "")


def integers(values: Any) -> tuple[int, ...] | None:
    """Return integers as a tuple; None for other values."""
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        return None


def check_numbers(where: str, wanted: str, values: Any, count: int) -> list[int]:
    """Return distinct indices from 0 to count − 1.

    Args:
        where: prefix of error messages.
        wanted: the expected values: `targets as indices of inputs`.
        values: indices of nodes or inputs.
        count: number of nodes or inputs.
    """
    numbers = integers(values)
    if numbers is None or any(not 0 <= i < count for i in numbers) or len(set(numbers)) < len(numbers):
        refuse(where, f"{wanted}, 0 to {count - 1}, each once", values)
    return list(numbers)


def check_label(where: str, label: Any, nodes: int) -> int | None:
    """Return the index of the label node, or None."""
    if label is None:
        return None
    return check_numbers(where, "the label as the number of a node", [label], nodes)[0]


def check_sizes(where: str, states: Any, nodes: int | None = None) -> tuple[int, ...]:
    """Return the numbers of states of all nodes."""
    sizes = integers(states)
    if not sizes or min(sizes) < 1 or (nodes is not None and len(sizes) != nodes):
        of = "each node" if nodes is None else f"each of the {nodes} nodes"
        refuse(where, f"states as the number of states of {of}, at least 1", states)
    return sizes


def check_table(where: str, name: str, sizes: Iterable[int], remedy: str) -> None:
    """Raise a `SpecError` for a table with too many entries."""
    entries = math.prod(sizes)
    if entries > MAX_TABLE:
        raise SpecError(
            f"{where}: the table of {name} would have {float(entries):.4g} entries, {8e-9 * entries:,.3g} GB; at most "
            f"{MAX_TABLE:,} are supported; {remedy}"
        )


def check_rows(where: str, x: Any, nodes: int | None = None, *, missing: bool = False) -> Tensor:
    """Return rows in float64, `(rows, nodes)`; NaN for missing values, if allowed."""
    try:
        rows = tensor_of(x).to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(f"{where}: expected rows of numbers, got {type(x).__name__}; see encode for names") from None
    bad = rows.isinf() if missing else ~rows.isfinite()
    shape = f"(rows, {nodes})" if nodes else "(rows, nodes)"
    forbid(
        where,
        (
            rows.dim() != 2 or not rows.numel() or (nodes is not None and rows.shape[-1] != nodes),
            f"expected x of shape {shape}, got {tuple(rows.shape)}",
        ),
        (bool(bad.any()), f"expected finite numbers, {_first(rows, bad)}"),
        error=DataError,
    )
    return rows


def _first(rows: Tensor, bad: Tensor) -> str:
    """Return the first bad value of `(rows, columns)` for a message."""
    if rows.dim() != 2 or not bool(bad.any()):
        return ""
    row, column = bad.nonzero()[0].tolist()
    return f"got {rows[row, column].item():g} in row {row}, column {column}"


def check_codes(
    where: str, x: Any, states: Sequence[int] | None, nodes: int | None = None
) -> tuple[Tensor, tuple[int, ...]]:
    """Return state indices, `(rows, nodes)`, and the numbers of states; by default the largest state index plus 1."""
    rows = check_rows(where, x, nodes)
    bad = (rows < 0) | (rows != rows.round())
    if states is not None and len(states) == rows.shape[1]:
        bad |= rows >= torch.tensor([float(size) for size in states])
    if bool(bad.any()):
        allowed = "0, 1, …" if states is None else f"0 to {states[int(bad.nonzero()[0, 1])] - 1}"
        raise DataError(
            f"{where}: expected state indices, {allowed}, {_first(rows, bad)}; discretize continuous values, and see "
            "encode for names"
        )
    codes = rows.long()
    return codes, tuple(int(last) + 1 for last in codes.amax(0)) if states is None else tuple(states)


# ------------------------------------------------------------------------------------------------ counts


def joint_states(codes: Tensor, nodes: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return the index of the joint state of some nodes for each row; the last node varies fastest."""
    number = torch.zeros(len(codes), dtype=torch.int64)
    for i in nodes:
        number = number * sizes[i] + codes[:, i]
    return number


def counts_of(codes: Tensor, nodes: Sequence[int], sizes: Sequence[int], weight: Tensor) -> Tensor:
    """Return the weighted counts of the joint states of some nodes, an axis per node."""
    shape = [sizes[i] for i in nodes]
    return torch.bincount(joint_states(codes, nodes, sizes), weight, minlength=math.prod(shape)).reshape(shape)


# ------------------------------------------------------------------------------------------------ import from pgmpy


def check_import(
    where: str, network: Any, columns: Iterable[Any] | None, states: Mapping[Any, Any] | None, label: Any
) -> list[Any]:
    """Return the nodes of a pgmpy network in the order of the inputs, the label last."""
    nodes = list(network.nodes)
    forbid(
        where,
        (not nodes, "the network has no nodes"),
        (
            not isinstance(columns, Iterable | None) or not isinstance(states, Mapping | None),
            "expected columns as a list of nodes, and states as lists by node, {node: [state, …]}",
        ),
    )
    for node, values in (states or {}).items():
        if not isinstance(values, Iterable):
            refuse(where, f"states of {node!r} as a list", values)
    inputs = [node for node in nodes if node != label] if columns is None else list(columns)
    order = inputs if label is None else [*inputs, label]
    forbid(
        where,
        (label is not None and label not in nodes, f"there is no node {label!r} as label; nodes: {listed(nodes)}"),
        (
            len(set(order)) < len(order) or set(order) != set(nodes),
            f"expected columns to name each node once, without the label, {listed(nodes)}; got {listed(inputs)}",
        ),
    )
    return order


def check_pgmpy(where: str, network: Any) -> None:
    """Raise a `SpecError` for a network rejected by pgmpy."""
    try:
        network.check_model()
    except ValueError as error:
        raise SpecError(f"{where}: pgmpy rejects the network: {str(error).splitlines()[0]}") from None


def state_names(
    where: str, names: Mapping[Hashable, Sequence[Any]], states: Mapping[Any, Sequence[Any]] | None
) -> dict[Hashable, list[Any]]:
    """Return the states of each node in order: those of the network, or a given order of them."""
    result = {node: list(values) for node, values in names.items()}
    for node, values in (states or {}).items():
        if node not in result or sorted(map(repr, values)) != sorted(map(repr, result[node])):
            raise SpecError(
                f"{where}: expected states of {node!r} to be a permutation of those of the network, "
                f"{listed(result.get(node, []))}; got {listed(values)}"
            )
        result[node] = list(values)
    return result


def log_table(where: str, name: str, factor: Any, names: Mapping[Hashable, Sequence[Any]]) -> Tensor:
    """Return the logarithms of a pgmpy CPD or factor, with states in the order of `names`."""
    values = torch.as_tensor(factor.values).detach().to("cpu", torch.float64)
    if not bool((values.isfinite() & (values >= 0)).all()):
        raise SpecError(f"{where}: {name} has values below 0, or not finite")
    for axis, node in enumerate(factor.variables):
        theirs = list(factor.state_names[node])
        values = values.index_select(axis, torch.tensor([theirs.index(state) for state in names[node]]))
    return values.log()


# ------------------------------------------------------------------------------------------------ inference


def network_head(where: str, model: Any, kinds: type[Expansion] | tuple[type[Expansion], ...], wanted: str) -> Head:
    """Return the head of a network: a single layer and head, an expansion on given subsets, and a dense ψ."""
    head = plain_head(model)
    known = (
        head is not None
        and isinstance(kappa := head.spec.expansion, kinds)
        and getattr(kappa, "subsets", None) is not None
    )
    if head is None or not known or head.spec.before or head.spec.bias:
        raise SpecError(f"{where}: expected {wanted}; got {type(model).__name__}")
    return head


def check_states(head: Head, rows: Tensor) -> Tensor:
    """Return rows with valid state indices, NaN for missing ones."""
    kappa: Any = head.spec.expansion
    kappa._spoiled(rows)  # raises an error for invalid states
    return torch.where(rows.isnan(), math.nan, kappa._nearest(rows))


def split_tables(flat: Tensor, subsets: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[Tensor]:
    """Return concatenated tables `(entries,)` as float64 tables on the CPU, an axis per input of each subset."""
    shapes = [[sizes[i] for i in subset] for subset in subsets]
    parts = flat.to("cpu", torch.float64).split([math.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def patterns(rows: Tensor) -> Iterator[tuple[list[bool], Tensor]]:
    """Yield each pattern of missing inputs, and the indices of the rows."""
    missing, number = rows.isnan().unique(dim=0, return_inverse=True)
    for i, pattern in enumerate(missing.tolist()):
        yield pattern, (number == i).nonzero().squeeze(-1)


def log_sums(
    where: str,
    outputs: Iterable[Sequence[LogFactor]],
    subsets: Sequence[Sequence[int]],
    sizes: Mapping[int, int],
    rows: Tensor,
    keep: Sequence[int] = (),
) -> Tensor:
    """Return log Σ exp of the sums of log-factors over all missing inputs except some, `(rows, n, states of kept inputs)`.

    Args:
        where: prefix of error messages.
        outputs: log-factors of each output, on subsets of the inputs.
        subsets: the subsets, for the order of elimination.
        sizes: number of states of each input.
        rows: state indices, NaN for missing values, `(rows, m)`.
        keep: missing inputs to keep.
    """
    kept: list[LogFactor] = [((i,), torch.zeros(sizes[i], dtype=torch.float64)) for i in keep]
    plans = []
    for pattern, index in patterns(rows):
        scopes = [tuple(i for i in subset if pattern[i]) for subset in subsets] + [(i,) for i in keep]
        plans.append((pattern, index, plan(scopes, sizes, keep)))
    results = []
    for tables in outputs:
        result = torch.empty(len(rows), *(sizes[i] for i in keep), dtype=torch.float64)
        for pattern, index, best in plans:
            # The rows of a chunk are a further variable.
            for chunk in index.split(max(1, MAX_TABLE // best.largest)):
                codes = rows[chunk].nan_to_num(0.0).long()
                ones: LogFactor = ((ROWS,), torch.zeros(len(chunk), dtype=torch.float64))
                factors = [ones, *kept, *(_observed(nodes, table, pattern, codes) for nodes, table in tables)]
                present = {variable for scope, _ in factors for variable in scope}
                order = [i for i in best.order if i in present]
                total = eliminate(factors, [ROWS, *keep], order=order, where=where)
                # A missing input without factors contributes its number of states.
                free = [sizes[i] for i, missing in enumerate(pattern) if missing and i not in keep and i not in present]
                result[chunk] = total + math.log(math.prod(free))
        results.append(result)
    return torch.stack(results, 1)


def _observed(subset: Sequence[Any], table: Tensor, pattern: Sequence[bool], codes: Tensor) -> LogFactor:
    """Select the observed states of each row in a factor; its axes are the rows and the missing inputs."""
    seen = [axis for axis, i in enumerate(subset) if not pattern[i]]
    free = [axis for axis, i in enumerate(subset) if pattern[i]]
    names = tuple(subset[axis] for axis in free)
    if not seen:
        return names, table
    return (ROWS, *names), table.permute(*seen, *free)[tuple(codes[:, subset[axis]] for axis in seen)]


def posterior(where: str, joint: Tensor) -> Tensor:
    """Return log p(targets | observed inputs) from log-sums `(rows, n, states of targets)`."""
    joint = torch.logsumexp(joint, 1)
    total = torch.logsumexp(joint.flatten(1), 1)
    check_possible(where, total)
    return joint - total.reshape(-1, *[1] * (joint.dim() - 1))


def check_possible(where: str, total: Tensor) -> None:
    """Raise a `DataError` for a row with observations of probability zero."""
    bad = total == -math.inf
    if bool(bad.any()):
        raise DataError(
            f"{where}: the observations in row {int(bad.nonzero()[0, 0])} have probability zero, so there is no posterior; remove "
            "the row, or smooth the tables (smoothing=1)"
        )


# ------------------------------------------------------------------------------------------------ parity


def random_rows(network: Any, columns: Sequence[Hashable], rows: int, seed: int) -> Tensor:
    """Return random state indices of a pgmpy network."""
    draw = np.random.default_rng(seed)
    numbers = [draw.integers(0, len(network.states[name]), rows) for name in columns]
    return torch.from_numpy(np.stack(numbers, 1)).double()


def names_of(network: Any, columns: Sequence[Hashable], row: Tensor) -> dict[Hashable, Any]:
    """Return the names of the observed states of a row."""
    return {
        name: network.states[name][int(code)] for name, code in zip(columns, row.tolist(), strict=True) if code == code
    }


def queried(network: Any, columns: Sequence[Hashable], x: Tensor, target: Any, inference: Any) -> Tensor:
    """Return log p(target | observed inputs) of each row, by a pgmpy inference object."""
    values = [
        inference.query([target], evidence=names_of(network, columns, row), show_progress=False).values.tolist()
        for row in x
    ]
    # Variable elimination in pgmpy 1.1 keeps factors of the evidence of a Markov network if no variable is summed out.
    return torch.tensor(values, dtype=torch.float64).log().log_softmax(-1)


def values_of(tables: Iterable[Any]) -> int:
    """Return the number of values of some pgmpy CPDs or factors."""
    return sum(int(np.size(table.values)) for table in tables)


def compare_classifier(network: Any, tables: Iterable[Any], imported: Callable[..., Model], seed: int) -> Comparison:
    """Compare log p(n1 | all others) of an imported network with a pgmpy query."""
    from pgmpy.inference import VariableElimination

    columns = [name for name in network.nodes if name != "n1"]
    model, x = imported(network, label="n1"), random_rows(network, columns, 40, seed + 1)
    theirs = queried(network, columns, x, "n1", VariableElimination(network))
    ours = torch.as_tensor(predict_log_proba(model, x), dtype=torch.float64)
    y = torch.from_numpy(np.random.default_rng(seed).integers(0, theirs.shape[1], len(x)))
    return Comparison(infinite_deviation(ours, theirs), sizes(model), values_of(tables), model, x, y, "cross_entropy")


def infinite_deviation(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, relative for values above 1; equal infinite values do not differ."""
    difference = torch.where(ours == theirs, 0.0, (ours - theirs).abs() / theirs.abs().clamp_min(1.0))
    return float(difference.nan_to_num(math.inf).max())


def quiet(compare: Callable[[int], Comparison]) -> Callable[[int], Comparison]:
    """Return a comparison without pgmpy's FutureWarnings about moved modules."""
    return partial(_quiet, compare)


def _quiet(compare: Callable[[int], Comparison], seed: int) -> Comparison:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*pgmpy")
        warnings.filterwarnings("ignore", category=FutureWarning, module="pgmpy")
        return compare(seed)
