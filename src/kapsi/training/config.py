"""The configuration of training: frozen options, identical in code, YAML and run folders."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from kapsi.errors import SpecError, did_you_mean, refuse
from kapsi.function import Function, Spec, catalogue, option, options_of
from kapsi.migrate import LOSS_OPTIONS, SOLVER_OPTIONS, TABLE_OPTIONS, TRAINING_OPTIONS
from kapsi.training.grid_updates import GridUpdates
from kapsi.training.losses import Loss
from kapsi.training.metrics import Metric
from kapsi.training.solvers.base import Solver


@dataclass(frozen=True)
class TrainConfig(Spec):
    """Options of a training run; those of a loss or a solver belong to its object.

    Args:
        loss: a loss, by name, as a mapping with `kind`, or as an object; a plain callable (output, target) returning a value per
            row or a mean; `auto` is `mse` for real-valued targets and `cross_entropy` for integer class labels.
        solver: a solver, by name, as a mapping (without `kind` for `adamw`), or as an object; `auto` chooses by size and
            loss, and the records give the reason.
        epochs: maximum number; an epoch is a pass for mini-batch solvers, five iterations for `lbfgs`, one iteration otherwise.
        metrics: metrics to record instead of `accuracy`, or `rmse` and `r2`; also plain callables (prediction, target).
        monitor: `loss` or the name of a metric, for early stopping and best weights. Needs validation rows.
        patience: epochs without an improvement before training stops. Needs validation rows.
        seconds: time after which training ends with the epoch, or with the step for solvers on all rows.
        class_weights: weights of the classes, or `balanced` for the same total weight of every class.
        l2: λ of the penalty λ‖w‖²/2 added to the mean loss. Parameters of κ and ψ have weight 1, tensors of π with more than
            one axis 0.01, biases 0. None: no penalty in `kapsi.fit`, except for `ridge`; for tables, chosen on validation rows.
        l1: factor of the sum of absolute values, with the same weights of parameters.
        smoothness: factor of the squared second differences of spline coefficients along the grid. `auto`: for
            `levenberg_marquardt` with the loss `mse` and a dense or masked ψ on splines, a factor per head, chosen in every
            iteration by the evidence of the data; it vanishes with the loss. 0 otherwise.
        group_l1: factor of the sum of the norms of edges; an edge is all weights between one input and one output of a head.
        standardize: whether `kapsi.fit` adds fixed affine layers at both ends first, as `kapsi.standardized`: to the inputs, and to
            the outputs of a regression. The model keeps them, and its units are those of the data.
        grid_updates: when grids of splines move to their inputs during `kapsi.fit`, with the function kept, as
            `{"every": 10, "until": 50}`; see `kapsi.GridUpdates`. None: never.
        seed: seed of initial values, splits and the order of rows.

    Example:
        >>> import kapsi as kp
        >>> config = kp.TrainConfig(loss="huber", solver=kp.AdamW(learning_rate=0.01), epochs=20, patience=5)
        >>> config.loss.name, config.solver.learning_rate
        ('huber', 0.01)
    """

    loss: Loss | Literal["auto"] = "auto"
    solver: Solver | Literal["auto"] = "auto"
    epochs: int = option(200, minimum=1, maximum=10**9)
    metrics: tuple[Metric, ...] = ()
    monitor: str = "loss"
    patience: int = option(5, minimum=1)
    seconds: float | None = option(None, minimum=0.001)
    class_weights: tuple[float, ...] | Literal["balanced"] | None = None
    l2: float | None = option(None, minimum=0.0, maximum=1e30)
    l1: float = option(0.0, minimum=0.0, maximum=1e30)
    smoothness: float | Literal["auto"] = option("auto", minimum=0.0, maximum=1e30)
    group_l1: float = option(0.0, minimum=0.0, maximum=1e30)
    standardize: bool = False
    grid_updates: GridUpdates | None = None
    seed: int = option(0, minimum=0, maximum=2**32 - 1)

    @property
    def fixed_smoothness(self) -> float:
        """The number in `smoothness`; 0 for `auto`."""
        return 0.0 if self.smoothness == "auto" else self.smoothness

    def check(self) -> None:
        weights = self.class_weights
        if isinstance(weights, tuple) and (len(weights) < 2 or min(weights) < 0 or max(weights) <= 0):
            raise SpecError(
                f"TrainConfig.class_weights: expected one weight of at least 0 for each class, not all 0, got {weights}"
            )
        names = [metric.name for metric in self.metrics]
        if len(set(names)) < len(names):
            raise SpecError(f"TrainConfig.metrics: {', '.join(names)}: each metric may appear once")

    @classmethod
    def owner_of(cls, option: str) -> str:
        return _owner(option)


def _owner(name: str) -> str:
    """Return a hint on the owner of an option, a function or a configuration; empty for unknown options."""
    if name in TRAINING_OPTIONS:
        return f"it is called {TRAINING_OPTIONS[name]} now"
    if name in TABLE_OPTIONS:
        return f"it is {TABLE_OPTIONS[name]} of a TableConfig; kapsi.fit takes validation=…"
    renamed = {
        old: new for options in (*SOLVER_OPTIONS.values(), *LOSS_OPTIONS.values()) for old, new in options.items()
    }
    for current, role in ((word, role) for word in (name, renamed.get(name)) for role in ("solver", "loss")):
        owners = [kind for kind in catalogue(role) if current in {field.name for field in options_of(kind)}]
        if current is not None and owners:
            names = [kind.name for kind in owners]
            several = (
                f"{'es' if role == 'loss' else 's'} {', '.join(names[:-1])} and {names[-1]}"
                if len(names) > 1
                else f" {names[0]}"
            )
            owner = next((kind for kind in owners if is_builtin(kind)), owners[0])
            return f"{current} is an option of the {role}{several}: {role}={_example(owner, current)}"
    return ""


def is_builtin(kind: type[Function]) -> bool:
    """Return whether a function belongs to kapsi."""
    return kind.__module__.startswith("kapsi.")


def _example(kind: type[Function], option: str) -> str:
    """Return an example call with an option, for messages."""
    field = next(field for field in options_of(kind) if field.name == option)
    value = {"learning_rate": 0.01}.get(option, field.default)
    package = "kp." if is_builtin(kind) else ""
    return f"{package}{kind.__name__}({option}={'…' if value is None or value is dataclasses.MISSING else repr(value)})"


def configured(
    config: TrainConfig | None, arguments: dict[str, Any], options: dict[str, Any], where: str
) -> TrainConfig:
    """Return a configuration with some options replaced.

    Args:
        config: the options to start from, None for the defaults.
        arguments: fields with a parameter of their own; None keeps the value of the configuration.
        options: further fields by name.
        where: prefix of error messages.

    Raises:
        SpecError: an unknown option, or an option of a loss or a solver.
    """
    config = TrainConfig() if config is None else config
    if not isinstance(config, TrainConfig):
        refuse(where, "a TrainConfig", config)
    known = [field.name for field in options_of(TrainConfig)]
    options = {name: value for name, value in arguments.items() if value is not None} | options
    for name in options:
        if name not in known:
            hint = _owner(name) or f"{did_you_mean(name, known)}there are {', '.join(known)}"
            raise SpecError(f"{where}: there is no option {name!r}; {hint}")
    return dataclasses.replace(config, **options) if options else config
