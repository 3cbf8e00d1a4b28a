"""Convert plain data written by kapsi 0.1 (format version 1) to the current names of options.

Model files, run folders and stored results keep their values; only names and nesting differ.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

RENAMED_OPTIONS: dict[str, dict[str, str]] = {
    "b_spline": {"out_of_range": "extrapolation", "recompute": "checkpoint"},
    "gaussian_rbf": {"out_of_range": "extrapolation"},
    "inverse_quadratic_rbf": {"out_of_range": "extrapolation"},
    "hyperbolic": {"turn": "cutoff"},
    "reciprocal": {"nearest": "eps"},
    "trigonometric": {"pole": "eps"},
}
"""Options of catalogue functions by registered name: the name in 0.1 and the current name."""

MINI_BATCH_OPTIONS = {
    "learning_rate": "learning_rate",
    "schedule": "schedule",
    "decay": "gamma",
    "batch_size": "batch_size",
    "accumulate": "gradient_accumulation",
    "clip": "max_grad_norm",
    "averaging": "ema_decay",
    "precision": "precision",
    "compile": "compile",
}

RENAMED_TENSORS = {"values": "entries"}
"""Tensors of catalogue functions: the name in files of 0.1 and the current name."""

SOLVER_OPTIONS: dict[str, dict[str, str]] = {
    "adamw": MINI_BATCH_OPTIONS,
    "sgd": MINI_BATCH_OPTIONS | {"momentum": "momentum"},
    "lbfgs": {"tolerance": "tolerance", "compile": "compile"},
    "levenberg_marquardt": {"tolerance": "tolerance", "starts": "restarts"},
    "ridge": {"tolerance": "tolerance"},
}

LOSS_OPTIONS = {"cross_entropy": {"label_smoothing": "label_smoothing"}, "huber": {"huber_delta": "delta"}}

TRAINING_OPTIONS = {"penalty": "l2", "group_sparsity": "group_l1"}

TABLE_OPTIONS = {"validation": "validation_fraction", "stopping": "early_stopping_fraction"}
"""Options that belonged to the training in 0.1 and belong to the table now."""


def migrate_tensor(name: str, expected: Container[str]) -> str:
    """Return the current name of a tensor in a file, such as `layers.0.heads.0.psi.entries`.

    Args:
        name: the name in the file.
        expected: the names of the tensors of the model.

    Example:
        >>> migrate_tensor("psi.values", {"psi.mask", "psi.entries"})
        'psi.entries'
    """
    path, dot, last = name.rpartition(".")
    renamed = path + dot + RENAMED_TENSORS.get(last, last)
    return renamed if name not in expected and renamed in expected else name


def migrate_model(data: Any) -> Any:
    """Return the plain data of a model specification of 0.1 with the current option names.

    Args:
        data: mappings, lists and scalars; anything else is returned unchanged, to be refused by `from_dict`.

    Example:
        >>> migrate_model({"kind": "b_spline", "out_of_range": "clamp"})
        {'kind': 'b_spline', 'extrapolation': 'clamp'}
    """
    if isinstance(data, list):
        return [migrate_model(item) for item in data]
    if not isinstance(data, Mapping):
        return data
    kind = data.get("kind")
    renamed = RENAMED_OPTIONS.get(kind, {}) if isinstance(kind, str) else {}
    return {renamed.get(str(name), name): migrate_model(value) for name, value in data.items()}


def migrate_training(data: Any) -> Any:
    """Return the plain data of a `TrainConfig` of 0.1 in the current form: options nested under their loss and solver.

    Options of other solvers and losses, which had no effect, are dropped, as are the fractions that belong to a table.

    Example:
        >>> migrate_training({"solver": "lbfgs", "penalty": 0.1, "clip": None, "tolerance": 1e-6})
        {'solver': {'kind': 'lbfgs', 'tolerance': 1e-06}, 'l2': 0.1}
    """
    if not isinstance(data, Mapping):
        return data
    functions = (("loss", LOSS_OPTIONS), ("solver", SOLVER_OPTIONS))
    result: dict[str, Any] = {role: _function(data[role], known, data) for role, known in functions if role in data}
    moved = {
        option for options in (*SOLVER_OPTIONS.values(), *LOSS_OPTIONS.values(), TABLE_OPTIONS) for option in options
    }
    for name, value in data.items():
        if name not in moved and name not in ("loss", "solver"):
            result[TRAINING_OPTIONS.get(name, str(name))] = value
    return result


def _function(kind: Any, known: Mapping[str, Mapping[str, str]], data: Mapping[str, Any]) -> Any:
    """Return a function as a mapping with its options, or its name if it has none."""
    renamed = known.get(kind, {}) if isinstance(kind, str) else {}
    options = {new: data[old] for old, new in renamed.items() if old in data}
    return {"kind": kind, **options} if options else kind


def is_run_of_0_1(data: Any) -> bool:
    """Return whether plain data are the complete configuration of a run of 0.1 (`config.yaml`)."""
    training = data.get("training") if isinstance(data, Mapping) else None
    return isinstance(training, Mapping) and {*MINI_BATCH_OPTIONS, *TRAINING_OPTIONS, *TABLE_OPTIONS} <= training.keys()


def migrate_run(data: Any) -> Any:
    """Return the plain data of a run's configuration of 0.1 (`config.yaml`) in the current form."""
    if not isinstance(data, Mapping):
        return data
    result = dict(data)
    training = data.get("training")
    if isinstance(training, Mapping):
        result["training"] = migrate_training(training)
        if isinstance(data.get("table"), Mapping):
            shares = {new: training[old] for old, new in TABLE_OPTIONS.items() if old in training}
            result["table"] = {**data["table"], **shares}
    if "model" in data:
        result["model"] = migrate_model(data["model"])
    return result
