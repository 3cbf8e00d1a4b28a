"""The training of a model on tensors: epochs, early stopping, best weights restored, and the choice of a penalty."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kapsi.errors import KapsiError, SpecError
from kapsi.features import Features
from kapsi.function import Spec, option
from kapsi.modules import Head, Layer, Model

__all__ = ["Choice", "Epoch", "TrainConfig", "choose_penalty", "fit", "fit_selected", "predict", "row_losses", "train"]

SMALL_PRODUCT = 50_000_000
"""Rows times parameters up to which all data go into every step of a quasi-Newton method: milliseconds, and it converges."""

SMALL_ELEMENTS = 2**20
"""Elements of κ(x) up to which a fit runs on one thread."""

LARGEST_KEPT = 2**26
"""Elements of the largest κ(x) that is kept through a full-batch fit: 512 MiB in float64."""

REMAINDER_SHARE = 0.01
"""Weight of the remainder's parameters in the penalty: π carries the plain part of the function, ψ what is beyond it."""

Data: TypeAlias = tuple[Tensor, Tensor]

Make: TypeAlias = Callable[[Tensor | slice], Model]
"""Makes a model for training on some rows."""


@dataclass(frozen=True)
class TrainConfig(Spec):
    """How a model is trained.

    Args:
        loss: `cross_entropy` (targets are class numbers), `mse`, or `auto`: by the type of the targets.
        solver: `lbfgs` (full batch, strong Wolfe line search), `adamw` (mini-batches), or `auto`: `lbfgs` where rows times
            parameters are at most 50 million and nothing is random (dropout).
        epochs: at most so many; an epoch is one pass for `adamw`, five iterations for `lbfgs`.
        batch_size: rows a step of `adamw`.
        learning_rate: of `adamw`, at the beginning; it falls to zero along a cosine over all epochs.
        penalty: λ of λ‖w‖²/2, added to the mean loss; w are the parameters of ψ and, with 1/100 of the weight, of π; none
            for biases. None: chosen on rows that are not trained on, see `fit_selected`.
        stopping: share of the rows that is kept to stop early on, where that is not done by cross-validation; 0.05 to 0.5.
        patience: epochs without a better loss on those rows before training stops.
        validation: share of the rows of a table that is held out for the scores, 0.05 to 0.9.
        seed: of initial values, splits and the order of rows.
    """

    loss: Literal["auto", "cross_entropy", "mse"] = "auto"
    solver: Literal["auto", "lbfgs", "adamw"] = "auto"
    epochs: int = option(200, minimum=1, maximum=10**9)
    batch_size: int = option(256, minimum=1, maximum=2**40)
    learning_rate: float = option(0.005, minimum=1e-12, maximum=1e6)
    penalty: float | None = option(None, minimum=0.0)
    stopping: float = option(0.15, minimum=0.05, maximum=0.5)
    patience: int = option(5, minimum=1)
    validation: float = option(0.2, minimum=0.05, maximum=0.9)
    seed: int = option(0, minimum=0, maximum=2**32 - 1)


class Epoch(NamedTuple):
    """What is known after an epoch.

    Attributes:
        number: 1 for the first; 0 stands for the model before training.
        loss: mean loss on the training rows, without penalty; for `adamw` the mean over the epoch.
        validation_loss: mean loss on the validation rows, None where there are none.
        best: whether it is the best so far.
    """

    number: int
    loss: float
    validation_loss: float | None
    best: bool


def row_losses(output: Tensor, target: Tensor, loss: str) -> Tensor:
    """Return the loss of each row: −log p(class) from logits `(rows, classes)`, or the squared error summed over outputs."""
    if loss == "cross_entropy":
        return F.cross_entropy(output, target, reduction="none")
    if target.shape != output.shape and (target.dim() != 1 or output.shape != (len(target), 1)):
        raise SpecError(f"fit: targets of shape {tuple(target.shape)} for outputs of shape {tuple(output.shape)}")
    return (output - target.reshape(output.shape)).square().flatten(1).sum(1)


def penalized(model: nn.Module) -> list[tuple[nn.Parameter, float]]:
    """Return the trained parameters that a penalty holds down, with their weights."""
    pairs: list[tuple[nn.Parameter, float]] = []
    for head in model.modules():
        if isinstance(head, Head):
            pairs += [(p, 1.0) for p in (*head.psi.parameters(), *head.kappa.parameters())]
            # By shape: the remainder's bias has one axis.
            pairs += [(p, REMAINDER_SHARE) for p in head.pi.parameters() if p.dim() > 1]
    return [(p, weight) for p, weight in pairs if p.requires_grad]


def resolve(model: nn.Module, data: Data, config: TrainConfig) -> TrainConfig:
    """Return the configuration with every `auto` replaced by what it stands for, after a check of the data."""
    if not isinstance(config, TrainConfig):
        raise SpecError(f"fit: expected a TrainConfig, got {type(config).__name__}")
    pair = isinstance(data, tuple | list) and len(data) == 2
    if not pair or not all(isinstance(tensor, Tensor) for tensor in data):
        raise SpecError(f"fit: expected inputs and targets as a pair of tensors, got {type(data).__name__}")
    x, y = data
    for what, tensor in (("inputs", x), ("targets", y)):
        if tensor.layout != torch.strided:
            raise SpecError(f"fit: expected dense {what}, got {tensor.layout}; use to_dense(), some rows at a time")
    if not x.is_floating_point():
        raise SpecError(f"fit: expected inputs of a floating-point type, got {x.dtype}; use x.float()")
    if x.dim() < 2 or x.shape[0] == 0:
        raise SpecError(f"fit: expected inputs of shape (rows, m) with at least one row, got {tuple(x.shape)}")
    if y.shape[:1] != x.shape[:1]:
        raise SpecError(f"fit: {x.shape[0]:,} rows of inputs and {tuple(y.shape)} of targets")
    if not bool(torch.isfinite(x).all()) or (y.is_floating_point() and not bool(torch.isfinite(y).all())):
        raise SpecError("fit: inputs and targets must be finite")
    loss, solver = config.loss, config.solver
    if loss == "auto":
        loss = "mse" if y.is_floating_point() else "cross_entropy"
    if loss == "cross_entropy" and (y.is_floating_point() or y.dim() != 1):
        raise SpecError(
            f"fit: cross_entropy needs class numbers of shape (rows,), got {y.dtype} of shape {tuple(y.shape)}"
        )
    if loss == "mse" and not y.is_floating_point():
        raise SpecError(f"fit: mse needs targets of a floating-point type, got {y.dtype}")
    if not any(p.requires_grad and p.numel() for p in model.parameters()):
        raise SpecError("fit: the model has no parameters that are trained")
    like = next(p for p in model.parameters() if p.is_floating_point())
    if x.dtype != like.dtype or (loss == "mse" and y.dtype != like.dtype):
        raise SpecError(f"fit: inputs are {x.dtype}, targets {y.dtype} and the model {like.dtype}; they must agree")
    if isinstance(model, Model):
        _check_sizes(model, x, y, loss)
    return replace(config, loss=loss, solver=solver_for(model, x.shape[0]) if solver == "auto" else solver)


def _check_sizes(model: Model, x: Tensor, y: Tensor, loss: str) -> None:
    inputs, outputs = model.in_features, model.out_features
    if x.shape[-1] != inputs:
        raise SpecError(f"fit: the model takes {inputs} inputs, got x of shape {tuple(x.shape)}")
    if loss == "cross_entropy":
        low, high = (int(bound) for bound in y.aminmax())
        if y.dtype not in (torch.int64, torch.uint8) or low < 0 or high >= outputs:
            wanted = f"whole numbers 0 to {outputs - 1} (int64), one a row, for {outputs} outputs"
            raise SpecError(f"fit: classes are {wanted}; got {y.dtype} from {low} to {high}")
    elif y.shape[1:] not in ((outputs,), *([()] if outputs == 1 else [])):
        raise SpecError(f"fit: the model has {outputs} outputs, got targets of shape {tuple(y.shape)}")


def solver_for(model: nn.Module, rows: int) -> Literal["lbfgs", "adamw"]:
    """Return what the solver `auto` stands for."""
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    # A line search needs a function that is the same twice.
    random = any(isinstance(module, nn.modules.dropout._DropoutNd) for module in model.modules())
    return "lbfgs" if rows * count <= SMALL_PRODUCT and not random else "adamw"


@contextlib.contextmanager
def _own_draws(seed: int, parameters: list[nn.Parameter]) -> Iterator[None]:
    """Let dropout draw from a seed, and put torch's own generators back afterwards."""
    devices = sorted({p.device.index for p in parameters if p.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield


def train(model: nn.Module, data: Data, config: TrainConfig, validation: Data | None = None) -> Iterator[Epoch]:
    """Train a model in place and yield a record after each epoch; the weights are those of the last epoch.

    Args:
        model: maps `(rows, m)` to `(rows, n)`.
        data: inputs `(rows, m)` and targets: class numbers `(rows,)`, or numbers `(rows,)` or `(rows, n)`.
        config: how; a penalty of None counts as zero here.
        validation: inputs and targets of rows that are only looked at.

    Raises:
        KapsiError: the loss is not finite.
    """
    config = resolve(model, data, config)
    if validation is not None:
        resolve(model, validation, config)
    parameters = [p for p in model.parameters() if p.requires_grad]
    held_down = penalized(model) if config.penalty else []
    generator = torch.Generator().manual_seed(config.seed)
    step = _lbfgs(parameters, config) if config.solver == "lbfgs" else _adamw(parameters, config)
    best = math.inf

    fixed = _fixed_features(model, data[0]) if config.solver == "lbfgs" else None

    def objective(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = row_losses(model(x) if fixed is None else model(x, fixed), y, config.loss).mean()
        total = loss
        for parameter, weight in held_down:
            total = total + (0.5 * (config.penalty or 0.0) * weight) * parameter.square().sum()
        return total, loss.detach()

    for number in range(1, config.epochs + 1):
        model.train()
        seed = int(torch.randint(2**62, (), generator=generator))
        with _own_draws(seed, parameters):
            loss, ended = step(objective, data, generator)
        if not math.isfinite(loss):
            raise KapsiError(
                f"training stopped in epoch {number}: the loss is {loss}; lower learning_rate, or scale the inputs"
            )
        held = None if validation is None else mean_loss(model, validation, config.loss)
        measure = loss if held is None else held
        better = measure < best
        best = min(best, measure)
        yield Epoch(number, loss, held, better)
        if ended:
            return


def _fixed_features(model: nn.Module, x: Tensor) -> dict[int, Features] | None:
    """Return κ(x) of the first layer for a full batch, where training does not change it and it is not too large to keep."""
    if not isinstance(model, Model):
        return None
    first = cast(Layer, model.layers[0])
    columns = sum(math.prod(cast(Head, head).factors) for head in first.heads)
    if x.shape[0] * columns > LARGEST_KEPT:
        return None
    with torch.no_grad():
        return first.fixed_features(x)


Objective: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Step: TypeAlias = Callable[[Objective, Data, torch.Generator], tuple[float, bool]]


def _lbfgs(parameters: list[nn.Parameter], config: TrainConfig) -> Step:
    optimizer = torch.optim.LBFGS(
        parameters,
        lr=1.0,
        max_iter=5,
        history_size=10,
        tolerance_grad=1e-7,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )
    last = math.inf

    def step(objective: Objective, data: Data, generator: torch.Generator) -> tuple[float, bool]:
        nonlocal last
        losses: list[float] = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            total, loss = objective(*data)
            total.backward()
            losses.append(float(loss))
            return total

        total = float(optimizer.step(closure).detach())  # before the step
        ended = last - total < 1e-9 * max(1.0, abs(total)) and math.isfinite(last)
        last = total
        return losses[-1], ended

    return step


def _adamw(parameters: list[nn.Parameter], config: TrainConfig) -> Step:
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.epochs)

    def step(objective: Objective, data: Data, generator: torch.Generator) -> tuple[float, bool]:
        x, y = data
        total = 0.0
        batches = list(torch.randperm(x.shape[0], generator=generator).split(config.batch_size))
        if len(batches) > 1 and len(batches[-1]) == 1:  # a batch of one row has no statistics for a batch norm
            batches[-2:] = [torch.cat(batches[-2:])]
        for rows in batches:
            optimizer.zero_grad()
            value, loss = objective(x[rows], y[rows])
            value.backward()
            optimizer.step()
            total += float(loss) * len(rows)
        schedule.step()
        return total / x.shape[0], False

    return step


def mean_loss(model: nn.Module, data: Data, loss: str) -> float:
    """Return the mean loss of some rows in evaluation mode."""
    return float(row_losses(predict(model, data[0]), data[1], loss).mean())


@torch.no_grad()
def predict(model: nn.Module, x: Tensor, batch: int = 65_536) -> Tensor:
    """Return the outputs of some rows in evaluation mode, in batches."""
    model.eval()
    return torch.cat([model(rows) for rows in x.split(batch)])


def fit(
    model: nn.Module,
    data: Data,
    config: TrainConfig | None = None,
    *,
    validation: Data | None = None,
    progress: Callable[[Epoch], None] | None = None,
) -> list[Epoch]:
    """Train a model in place, with early stopping that restores the weights of the best epoch; return the records.

    The model is in evaluation mode afterwards.

    Args:
        model: maps `(rows, m)` to `(rows, n)`.
        data: inputs `(rows, m)` and targets: class numbers `(rows,)`, or numbers `(rows,)` or `(rows, n)`.
        config: how; the defaults where it is left out. A penalty of None counts as zero here.
        validation: inputs and targets to stop on; without them training ends with the last epoch.
        progress: called after each epoch.

    Raises:
        KapsiError: data that do not fit, or a loss that is not finite; the model then has the best weights so far, those
            it came with if no epoch was better.

    Example:
        >>> import torch, kapsi as kp
        >>> x = torch.linspace(-1, 1, 50).unsqueeze(1)
        >>> model = kp.Model(kp.rpn([1, 1], expansion=kp.Chebyshev(4)), seed=0)
        >>> records = kp.fit(model, (x, x**3), kp.TrainConfig(epochs=50))
        >>> records[-1].loss < 1e-6
        True
    """
    config = TrainConfig() if config is None else config
    records: list[Epoch] = []
    first = best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    since = 0  # epochs without a better loss
    whole = False
    try:
        for epoch in train(model, data, config, validation):
            records.append(epoch)
            if progress is not None:
                progress(epoch)
            since = 0 if epoch.best else since + 1
            if epoch.best:
                best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            if validation is not None and since >= config.patience:
                break
        whole = validation is None
    except KapsiError:
        if records:  # led astray, perhaps from the first epoch on
            model.load_state_dict(first)
            measures = [epoch.loss if epoch.validation_loss is None else epoch.validation_loss for epoch in records]
            if not mean_loss(model, validation or data, resolve(model, data, config).loss) > min(measures):
                best = first
        raise
    finally:
        if not whole:  # stopped early, interrupted, or led astray
            model.load_state_dict(best)
        model.eval()
    return records


PENALTIES = (10.0, 3.0, 1.0, 0.3, 0.1, 0.01, 1e-3, 1e-5)
LARGE_PENALTY = 1e-4
"""What a model has that is too large for the search: with many rows there is little to hold down."""

CROSS_VALIDATED_ROWS = 5_000
"""Up to so many rows the penalty is chosen by cross-validation: a single part of a small table is too noisy for it."""

INNER_FOLDS = 3
LEAST_EPOCHS = 6
OUTPUT_SCALE = 0.01
"""Scale of the last layer at first: a fit that stops early is then near a constant, not near a random function."""


class Choice(NamedTuple):
    """A penalty that was tried.

    Attributes:
        penalty: λ.
        loss: mean loss on the rows that were not trained on.
        epochs: number of epochs to the best loss, the median over the parts.
        chosen: whether it was chosen.
    """

    penalty: float
    loss: float
    epochs: int
    chosen: bool


Split: TypeAlias = tuple[Tensor, Tensor]
"""Row numbers to train on, and to hold out."""


def near_zero(model: Model) -> Model:
    """Scale the last layer of a new model to a hundredth, in place."""
    with torch.no_grad():
        for head in model.layers[-1].heads:  # type: ignore[union-attr]
            weights = list(head.psi.parameters())
            if weights:
                head.spec.reconciliation.scale(weights, OUTPUT_SCALE)
            for tensor in head.pi.parameters():
                tensor.mul_(OUTPUT_SCALE)
    return model


def choose_penalty(
    make: Make,
    data: Data,
    splits: Sequence[Split],
    config: TrainConfig,
    *,
    penalties: Sequence[float] = PENALTIES,
    progress: Callable[[Epoch], None] | None = None,
) -> list[Choice]:
    """Fit with penalties from strong to weak and choose the strongest that is not surely worse than the best.

    "Not surely worse" is: its mean loss on the held-out rows is above the lowest one by at most one standard error of the
    difference, taken row by row (the one-standard-error rule of Breiman et al. 1984, paired). The search ends when three
    penalties in a row are surely worse than the best so far.

    A model of one layer goes on from the weights of the penalty before; with more layers, where strong penalties lead into
    corners, each fit begins anew.

    Args:
        make: returns a new model with the same initial values each time, calibrated on some rows: those it is trained on.
        data: inputs and targets.
        splits: rows to train on and rows to stop and choose on, one pair or several.
        config: how; its penalty is not used.
        penalties: in descending order.
        progress: called after each epoch.

    Returns:
        What was tried, in order.
    """
    x, y = data
    tried: list[tuple[float, Tensor, int]] = []
    worse = 0
    models = [make(kept) for kept, _ in splits]
    for penalty in penalties:
        losses, epochs = [], []
        for i, (kept, held) in enumerate(splits):
            model = models[i] = models[i] if _continues(models[i]) else make(kept)
            settled = resolve(model, data, replace(config, penalty=penalty))
            validation = (x[held], y[held])
            records = fit(model, (x[kept], y[kept]), settled, validation=validation, progress=progress)
            held_out = row_losses(predict(model, validation[0]), validation[1], settled.loss).double()
            losses.append(held_out.nan_to_num(nan=math.inf, posinf=math.inf))
            epochs.append(max((r.number for r in records if r.best), default=1))
        tried.append((penalty, torch.cat(losses), sorted(epochs)[len(epochs) // 2]))
        lowest = min((held_out for _, held_out, _ in tried), key=lambda t: float(t.mean()))
        worse = worse + 1 if _surely_worse(tried[-1][1], lowest) else 0
        if worse == 3 and len(tried) > 4:
            break
    chosen = next(penalty for penalty, held_out, _ in tried if not _surely_worse(held_out, lowest))
    return [Choice(p, float(held_out.mean()), count, p == chosen) for p, held_out, count in tried]


def _continues(model: Model) -> bool:
    return len(model.layers) == 1


def _surely_worse(losses: Tensor, lowest: Tensor) -> bool:
    if not bool(torch.isfinite(losses).all()):
        return bool(torch.isfinite(lowest).all())
    difference = losses - lowest
    error = float(difference.std()) / math.sqrt(len(difference)) if len(difference) > 1 else 0.0
    return float(difference.mean()) > error


@contextlib.contextmanager
def _threads_for(elements: int) -> Iterator[None]:
    """Use one thread for small arrays: starting a second one costs more than it does, and far more on a busy machine.

    What is computed is then also the same on machines with another number of cores.
    """
    before = torch.get_num_threads()
    if elements <= SMALL_ELEMENTS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fit_selected(
    make: Make,
    data: Data,
    config: TrainConfig,
    *,
    splits: Callable[[int], Sequence[Split]],
    progress: Callable[[Epoch], None] | None = None,
) -> tuple[Model, list[Epoch], list[Choice]]:
    """Fit a model with the penalty and the number of epochs chosen on rows that are not trained on.

    With `lbfgs` the choice is made by cross-validation (on one part above 5,000 rows), and the model is then fitted to all
    rows in the same way, with the chosen penalty and number of epochs. With `adamw` a part of the rows is kept to stop early,
    and the model is the one with the best weights there.

    Args:
        make: returns a new model with the same initial values each time, calibrated on some rows: those it is trained on.
        data: inputs and targets.
        config: how.
        splits: called with a number of folds, returns the rows of each; with 1, one pair with the share `config.stopping`.
        progress: called after each epoch.

    Returns:
        The model, the records of its training, and the penalties that were tried (none where it was given).
    """
    model = make(slice(None))
    columns = max(math.prod(head.factors) for _, head in model.heads())
    with _threads_for(data[0].shape[0] * columns):
        return _fit_selected(model, make, data, config, splits, progress)


def _fit_selected(
    model: Model,
    make: Make,
    data: Data,
    config: TrainConfig,
    splits: Callable[[int], Sequence[Split]],
    progress: Callable[[Epoch], None] | None,
) -> tuple[Model, list[Epoch], list[Choice]]:
    x, y = data
    settled = resolve(model, data, config)
    penalties = PENALTIES if config.penalty is None else (config.penalty,)
    if settled.solver == "adamw":
        penalty = LARGE_PENALTY if config.penalty is None else config.penalty
        ((kept, held),) = splits(1)
        model = make(kept)
        settled = replace(settled, penalty=penalty)
        records = fit(model, (x[kept], y[kept]), settled, validation=(x[held], y[held]), progress=progress)
        return model, records, []
    parts = splits(INNER_FOLDS if x.shape[0] <= CROSS_VALIDATED_ROWS else 1)
    choices = choose_penalty(make, data, parts, settled, penalties=penalties, progress=progress)
    records = []
    last = next(i for i, choice in enumerate(choices) if choice.chosen)
    for choice in choices[: last + 1] if _continues(model) else choices[last : last + 1]:
        epochs = min(config.epochs, max(choice.epochs, LEAST_EPOCHS))
        again = fit(model, data, replace(settled, penalty=choice.penalty, epochs=epochs), progress=progress)
        records += [epoch._replace(number=len(records) + i) for i, epoch in enumerate(again, 1)]
    return model, records, choices if config.penalty is None else []
