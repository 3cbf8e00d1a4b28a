"""Classifiers under one protocol: each candidate of a grid judged on held-out rows, the best fitted again on all of them.

Every kind is fitted, chosen and counted alike, so that a baseline gets what the model gets that it is compared with.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kapsi.calibrate import calibrate
from kapsi.errors import SpecError, did_you_mean
from kapsi.expansion import Identity
from kapsi.function import Spec, coerce, option
from kapsi.modules import Model, trained_count
from kapsi.paper.experiment import merged
from kapsi.paper.procedures.rehearsal import refuse, rehearse
from kapsi.paper.procedures.sparse_kan import SparseKAN
from kapsi.process import Process
from kapsi.reconciliation.dense import ZeroReconciliation
from kapsi.remainder import IdentityRemainder
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec, set_option
from kapsi.training.config import TrainConfig
from kapsi.training.engine import fit as fit_model
from kapsi.training.engine import train
from kapsi.training.prediction import predict, predict_log_proba
from kapsi.training.records import Epoch
from kapsi.zoo import kan, mlp

__all__ = [
    "KAN",
    "KINDS",
    "MLP",
    "NETWORKS",
    "AnyModel",
    "AnyNetwork",
    "Candidate",
    "Change",
    "Choice",
    "Fitted",
    "GaussianNaiveBayes",
    "InEpochs",
    "KernelSVM",
    "Kind",
    "LinearSVM",
    "LogisticRegression",
    "MultinomialNaiveBayes",
    "Network",
    "Pair",
    "Part",
    "divided",
    "kind_of",
    "read",
]

Labels = npt.NDArray[np.int64]
Pair: TypeAlias = tuple[Any, Labels]
"""Inputs `(rows, m)`, an array or a SciPy matrix, and class numbers `(rows,)` from 0."""
Part: TypeAlias = Callable[[], tuple[Pair, Pair]]
"""Makes rows to fit and rows to judge on."""
Change = Callable[[Tensor], Tensor]
"""Changes the inputs of a batch at random, `(b, m)` to `(b, m)`, drawing from torch's default generator, which the engine seeds."""
Each = Callable[[Epoch, Callable[[Any], Labels]], None]
"""Called after each epoch with its record and the predictions of the model as it is then."""

PROTOCOL = ("grid", "tune_rows", "tune", "refit", "early_stopping", "variants")
"""Options of every kind: they say how the choice is made."""
ROWS_AT_ONCE = 4096
"""Sparse rows that are made dense at once."""


@dataclass(frozen=True)
class Fitted:
    """A classifier, chosen and fitted.

    Attributes:
        kind: its name in `KINDS`.
        predict: class numbers `(rows,)` of inputs `(rows, m)`.
        parameters: numbers that were trained, or that it keeps of the training rows.
        chosen: option and value of each axis of the grid.
        validation: mean accuracy on the held-out rows of what was chosen, fitted without them; None where there was no choice.
        candidates: choice and accuracy of every candidate, in the order of the grid.
        seconds: CPU seconds of choosing and fitting.
        fit_seconds: CPU seconds of the last fit.
        rows: number of rows of the last fit.
        details: JSON values that the kind has to say.
        scores: log-probabilities `(rows, classes)` of inputs, of kinds that are trained in epochs with the cross-entropy.
    """

    kind: str
    predict: Callable[[Any], Labels]
    parameters: int
    chosen: Mapping[str, Any] = field(default_factory=dict)
    validation: float | None = None
    candidates: tuple[tuple[Mapping[str, Any], float], ...] = ()
    seconds: float = 0.0
    fit_seconds: float = 0.0
    rows: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)
    scores: Callable[[Any], npt.NDArray[np.float32]] | None = None


@dataclass(frozen=True)
class _Task:
    """What one fit is given."""

    x: Any
    y: Labels
    classes: int
    seed: int
    where: str
    validation: Pair | None = None  # to stop early on
    change: Change | None = None
    each: Each | None = None


class Kind(Spec):
    """A kind of classifier: its fields are its options."""

    in_epochs: ClassVar[bool] = False

    def fit(self, task: _Task) -> Fitted:
        """Return one that is fitted to the rows of a task."""
        raise NotImplementedError

    def rehearse(self, inputs: int, classes: int, where: str, *, sparse: bool = False) -> None:
        """Raise a `SpecError` where one could not be fitted to such inputs and classes."""


# ------------------------------------------------------------------------------------------------ the choice


@dataclass(frozen=True)
class Candidate:
    """One choice from a grid.

    Attributes:
        chosen: option and value of each axis.
        judged, final: the kind as it is judged, with the options of `tune`, and as it is fitted in the end.
    """

    chosen: Mapping[str, Any]
    judged: Kind
    final: Kind


@dataclass(frozen=True)
class Choice:
    """Candidates, and how one of them is chosen: what `read` makes of options.

    Attributes:
        kind: a key of `KINDS`.
        candidates: at least one.
        judged: whether there is something to judge: a grid, or an end by the validation loss.
        tune_rows: number of rows, the first ones, that candidates are fitted to; None: all.
        refit: whether the chosen one is fitted again, to all rows.
        early_stopping: whether networks end by the loss of the held-out rows.
        where: begins the messages of errors.
    """

    kind: str
    candidates: tuple[Candidate, ...]
    judged: bool
    tune_rows: int | None
    refit: bool
    early_stopping: bool
    where: str

    def kinds(self) -> Iterator[Kind]:
        """Yield all that may be fitted."""
        for candidate in self.candidates:
            yield from (candidate.judged, candidate.final)

    def rehearse(self, inputs: int, classes: int, *, sparse: bool = False) -> None:
        """Raise a `SpecError` where a candidate could not be fitted to such inputs and classes."""
        for kind in self.kinds():
            kind.rehearse(inputs, classes, self.where, sparse=sparse)

    def fit(
        self,
        rows: Pair,
        parts: Sequence[Part] = (),
        *,
        classes: int,
        seed: int = 0,
        change: Change | None = None,
        each: Each | None = None,
    ) -> Fitted:
        """Choose by the mean accuracy over the parts, of equal candidates the first, and fit what was chosen to all rows.

        Args:
            rows: what the chosen one is fitted to.
            parts: of them; not used where nothing is judged, unless `refit` is false.
            classes: number of classes.
            seed: of initial values, dropout and the order of rows.
            change: of the inputs of each batch, for networks.
            each: called after each epoch of a fit that nothing is chosen for, for networks.

        Raises:
            SpecError: there is a grid or early stopping and no part, or no `refit` and not one part.
        """
        started = time.process_time()
        once = self.early_stopping or not self.refit  # fitted to the rows that are not held out
        if self.judged and not parts:
            raise SpecError(f"{self.where}: a grid and early_stopping need validation rows; set held_out")
        if once and len(parts) != 1:
            raise SpecError(
                f"{self.where}: early_stopping, and refit: false, need one part of held-out rows, not {len(parts)}"
            )
        task = _Task(*rows, classes, seed, self.where, change=change, each=each)
        accuracies = np.zeros((len(self.candidates), len(parts) if self.judged else 0))
        best: tuple[int, Fitted] | None = None
        for place, part in enumerate(parts if self.judged else ()):
            (x, y), held = part()
            some = min(self.tune_rows or len(y), len(y))
            _several(y[:some], self.where)
            for i, candidate in enumerate(self.candidates):
                own = replace(
                    task,
                    each=None,
                    x=x[:some],
                    y=y[:some],
                    validation=held if self.early_stopping else None,
                )
                made = candidate.judged.fit(own)
                accuracies[i, place] = (made.predict(held[0]) == held[1]).mean()
                if once and (best is None or accuracies[i, 0] > accuracies[best[0], 0]):
                    best = i, replace(made, rows=some)
        means = accuracies.mean(1) if self.judged else np.zeros(1)
        place = int(means.argmax())
        last = time.process_time()
        if best is not None:
            made = best[1]
        else:
            if once:  # nothing to judge, and yet rows that are held out
                (x, y), _ = parts[0]()
                task = replace(task, x=x, y=y)
            _several(task.y, self.where)
            made = replace(self.candidates[place].final.fit(task), rows=len(task.y))
        now = time.process_time()
        return replace(
            made,
            kind=self.kind,
            chosen=self.candidates[place].chosen,
            validation=float(means[place]) if self.judged else None,
            candidates=tuple(
                (candidate.chosen, float(mean))
                for candidate, mean in zip(self.candidates, means, strict=True)
                if self.judged
            ),
            seconds=now - started,
            fit_seconds=0.0 if best is not None else now - last,
        )


def _several(y: Labels, where: str) -> None:
    if len(np.unique(y)) < 2:
        raise SpecError(f"{where}: the {len(y)} rows to fit are of one class; take more of them")


def divided(options: Mapping[str, Any], cls: type[Spec]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options that a specification has, and the others."""
    names = [each.name for each in fields(cls)]  # type: ignore[arg-type]
    own = {name: value for name, value in options.items() if name in names}
    return own, {name: value for name, value in options.items() if name not in names}


def kind_of(value: Any, kinds: Sequence[str], where: str) -> str:
    """Return the name of a kind, or refuse it."""
    if not isinstance(value, str) or value not in kinds:
        hint = did_you_mean(str(value), kinds)
        raise SpecError(f"{where}.classifier: there is no {value!r}; {hint}choose from {', '.join(kinds)}")
    return value


def read(
    kind: str, options: Mapping[str, Any] | None = None, where: str = "options", also: Sequence[str] = ()
) -> Choice:
    """Return the candidates that options mean, all of them checked.

    Options of the choice: `grid` maps an option, with dots for what is inside of another, to the values that are tried;
    `tune_rows` is the number of rows, the first ones, that candidates are fitted to (all); `tune` are options that
    candidates have instead, such as fewer epochs; `refit`, whether the chosen one is fitted again to all rows (true);
    `early_stopping`, whether networks end by the validation loss, and are then not fitted again. Without a grid there is one
    candidate and nothing to choose, so it is fitted once, to all rows, and `validation` is None. `variants` maps names to further
    options, each with a grid of its own, whose candidates stand one after another.

    Args:
        kind: a key of `KINDS`.
        options: of the choice and of the kind; plain data.
        where: begins the messages of errors.
        also: names of options that are read elsewhere, for the list of those that there are.

    Raises:
        SpecError: there is no such kind or option, or a value does not fit.

    Example:
        >>> x = np.random.default_rng(0).random((60, 3)); y = (x[:, 0] > 0.5).astype(np.int64)
        >>> choice = read("svm_linear", {"grid": {"C": [0.01, 1.0]}})
        >>> made = choice.fit((x, y), [lambda: ((x[:40], y[:40]), (x[40:], y[40:]))], classes=2)
        >>> made.chosen, made.predict(x).shape
        ({'C': 1.0}, (60,))
    """
    cls = KINDS[kind_of(kind, tuple(KINDS), where)]
    given = copy.deepcopy(dict(options or {}))
    if given.get("variants") is not None:
        return _variants(kind, given.pop("variants"), given, where, also)
    given.pop("variants", None)
    names = (*(each.name for each in fields(cls)), *PROTOCOL, *also)  # type: ignore[arg-type]
    for name in given:
        if name not in names:
            hint = did_you_mean(str(name), names)
            raise SpecError(f"{where}: there is no option {name!r} for {kind}; {hint}there are {', '.join(names)}")
    grid, tune = (_named(given.pop(name, None), f"{where}.{name}") for name in ("grid", "tune"))
    for path, values in grid.items():
        if not isinstance(values, list | tuple) or not values:
            raise SpecError(f"{where}.grid.{path}: expected a list of values to try, got {str(values)[:60]!r}")
    rows = given.pop("tune_rows", None)
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise SpecError(f"{where}.tune_rows: expected a whole number of at least 1, got {rows!r}")
    refit, stops = (
        coerce(bool, given.pop(name, default), f"{where}.{name}")
        for name, default in (("refit", True), ("early_stopping", False))
    )
    if (stops or not refit) and (tune or rows is not None):
        raise SpecError(
            f"{where}: {'tune' if tune else 'tune_rows'} is for a choice after which the chosen one is fitted again; leave it out, "
            "or early_stopping and refit: false"
        )
    if (tune or rows is not None) and not grid:
        raise SpecError(
            f"{where}: {'tune' if tune else 'tune_rows'} is for the choice, and there is no grid; leave it out"
        )
    for path in (*grid, *tune):
        if not isinstance(path, str):
            raise SpecError(f"{where}: expected names of options in grid and tune, got {path!r}")
    for path in (*grid, *tune):
        for other in grid:
            if other.startswith(f"{path}.") or (path == other and path in tune):
                raise SpecError(f"{where}: {path} and {other} of grid and tune set the same option; leave one out")
    trainings = [("train", given.get("train")), ("tune.train", tune.get("train"))]
    trainings += [("grid.train", value) for value in grid.get("train", ())]
    trainings += [
        ("train", {path.removeprefix("train."): None}) for path in (*grid, *tune) if path.startswith("train.")
    ]
    others = {} if stops else {"patience": "is for early_stopping; set that, or leave it out"}
    for place, data in trainings:
        refuse(data, f"{where}.{place}", **others)
    if stops and not cls.in_epochs:
        raise SpecError(f"{where}.early_stopping: {kind} is not trained in epochs, leave it out")
    candidates = []
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        final = _with(given, chosen, f"{where}.grid")
        made: Kind = coerce(cls, final, where)
        judged: Kind = coerce(cls, _with(final, tune, f"{where}.tune"), where) if tune else made
        candidates.append(Candidate(chosen, judged, made))
    return Choice(kind, tuple(candidates), bool(grid) or stops, rows, refit, stops, where)


def _variants(kind: str, variants: Any, common: Mapping[str, Any], where: str, also: Sequence[str]) -> Choice:
    """Return one choice among the candidates of all variants."""
    if not isinstance(variants, Mapping) or not variants or not all(isinstance(v, Mapping) for v in variants.values()):
        raise SpecError(f"{where}.variants: expected {{name: {{options}}}}, got {str(variants)[:60]!r}")
    candidates: list[Candidate] = []
    choices = []
    for name, own in variants.items():
        place = f"{where}.variants.{name}"
        for option_ in ("tune_rows", "refit", "early_stopping", "variants"):
            if option_ in own:
                raise SpecError(f"{place}.{option_}: is the same for all variants; set it beside them")
        choices.append(read(kind, merged(common, own), place, also))
        if not choices[-1].judged:
            raise SpecError(f"{place}: give a grid, of one value at least, so that variants can be compared")
        candidates += [replace(each, chosen={"variant": str(name), **each.chosen}) for each in choices[-1].candidates]
    return replace(choices[0], candidates=tuple(candidates), where=where)


def _named(given: Any, where: str) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise SpecError(f"{where}: expected options with values, got {str(given)[:60]!r}")
    return dict(given)


def _with(options: Mapping[str, Any], chosen: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return options with some of them replaced."""
    own = copy.deepcopy(dict(options))
    for path, value in chosen.items():
        set_option(own, str(path), copy.deepcopy(value), where)
    return own


# ------------------------------------------------------------------------------------------------ networks


@dataclass(frozen=True)
class Network(Spec):
    """A model in few words: hidden layers that are alike.

    Args:
        hidden: widths of the hidden layers; a single one is that of all where `layers` says how many there are.
        layers: number of layers, the last one included; None: as many as `hidden` says.
        heads: equal heads in each layer.
        head: of each layer.
        first: head of the first layer where it is another one.
        last: head of the last layer where it is another one.
        output: processing after every layer but the last.
        input: processing of the inputs, before everything; dropout there acts on κ and π alike.
    """

    hidden: tuple[int, ...] = ()
    layers: int | None = option(None, minimum=1, maximum=1000)
    heads: int = option(1, minimum=1, maximum=1000)
    head: HeadSpec = HeadSpec()
    first: HeadSpec | None = None
    last: HeadSpec | None = None
    output: tuple[Process, ...] = ()
    input: tuple[Process, ...] = ()

    def check(self) -> None:
        if self.layers is not None and len(self.hidden) not in (1, self.layers - 1):
            count = len(self.hidden)
            raise SpecError(
                f"Network: {self.layers} layers have {self.layers - 1} hidden widths, or one for all; got {count}"
            )

    def spec(self, in_features: int, out_features: int) -> ModelSpec:
        """Return the specification for so many inputs and outputs."""
        hidden = self.hidden
        if self.layers is not None and len(hidden) != self.layers - 1:
            hidden = hidden * (self.layers - 1)
        count = len(hidden) + 1
        layers = []
        for i in range(count):
            end = i == count - 1
            head = (self.last if end else None) or (self.first if i == 0 else None) or self.head
            layers.append(LayerSpec((head,) * self.heads, output=() if end else self.output))
        widths = (in_features, *hidden, out_features)
        if self.input:
            # y = 0 + x, a layer without parameters: what follows it sees the processed inputs, remainders too.
            through = HeadSpec(Identity(), ZeroReconciliation(), IdentityRemainder())
            layers.insert(0, LayerSpec((through,), output=self.input))
            widths = (in_features, *widths)
        return ModelSpec(widths, tuple(layers))


@dataclass(frozen=True)
class InEpochs(Kind):
    """What is trained in epochs.

    Args:
        train: how; the loss is the cross-entropy unless another one is given.
    """

    train: TrainConfig = TrainConfig()

    in_epochs: ClassVar[bool] = True

    def spec(self, inputs: int, outputs: int) -> ModelSpec:
        """Return the specification of the model for so many inputs and outputs."""
        raise NotImplementedError

    def config(self, seed: int) -> TrainConfig:
        """Return how it is trained in a run."""
        return replace(self.train, seed=seed, loss="cross_entropy" if self.train.loss == "auto" else self.train.loss)

    def rehearse(self, inputs: int, classes: int, where: str, *, sparse: bool = False) -> None:
        try:
            spec = self.spec(inputs, classes)
        except SpecError as error:
            raise SpecError(f"{where}.model: {error}") from None
        rehearse(spec, self.config(0), where, classes=classes, sparse=sparse)

    def fit(self, task: _Task) -> Fitted:
        try:
            spec = self.spec(task.x.shape[1], task.classes)
        except SpecError as error:
            raise SpecError(f"{task.where}.model: {error}") from None
        return _trained(task, spec, self.config(task.seed), calibrated=getattr(self, "calibrate", False))


@dataclass(frozen=True)
class AnyNetwork(InEpochs):
    """`network`: a model in few words.

    Args:
        train: how it is trained.
        network: the words.
        layers, heads: of the network; axes of a grid of rows stand beside it.
        calibrate: whether grids and other buffers are set from the rows before the fit.
    """

    network: Network = Network()
    layers: int | None = option(None, minimum=1, maximum=1000)
    heads: int | None = option(None, minimum=1, maximum=1000)
    calibrate: bool = False

    def check(self) -> None:
        self._whole()

    def _whole(self) -> Network:
        own = {name: value for name in ("layers", "heads") if (value := getattr(self, name)) is not None}
        return replace(self.network, **own)

    def spec(self, inputs: int, outputs: int) -> ModelSpec:
        return self._whole().spec(inputs, outputs)


@dataclass(frozen=True, kw_only=True)
class AnyModel(InEpochs):
    """`model`: a model by its specification, whose widths at the ends may be null.

    Args:
        train: how it is trained.
        model: the specification.
        calibrate: as in `AnyNetwork`.
    """

    model: ModelSpec
    calibrate: bool = False

    def spec(self, inputs: int, outputs: int) -> ModelSpec:
        return self.model.sized(inputs, outputs)


@dataclass(frozen=True)
class MLP(InEpochs):
    """`mlp`: a multilayer perceptron, `kapsi.zoo.mlp`.

    Args:
        train: how it is trained.
        hidden: widths of the hidden layers.
        activation: after each of them, by name.
        dropout: share of hidden values that are zero in training.
    """

    hidden: tuple[int, ...] = (512, 256)
    activation: str = "relu"
    dropout: float = option(0.0, minimum=0.0, maximum=1.0)

    def check(self) -> None:
        self.spec(1, 1)

    def spec(self, inputs: int, outputs: int) -> ModelSpec:
        return mlp.spec([inputs, *self.hidden, outputs], self.activation, dropout=self.dropout)


@dataclass(frozen=True)
class KAN(InEpochs):
    """`kan`: a Kolmogorov–Arnold network, `kapsi.zoo.kan`; on sparse inputs `SparseKAN`, which is the same function.

    Args:
        train: how it is trained.
        hidden: widths of the hidden layers.
        intervals, degree, low, high: of the splines.
        calibrate: whether the ranges of the splines are set from the rows before the fit.
        centered: on sparse inputs, whether φ(x) − φ(0) stands for φ(x) in the first layer.
    """

    hidden: tuple[int, ...] = (64,)
    intervals: int = 5
    degree: int = 3
    low: float = -1.0
    high: float = 1.0
    calibrate: bool = False
    centered: bool = False

    def check(self) -> None:
        self.spec(1, 1)

    def spec(self, inputs: int, outputs: int) -> ModelSpec:
        return kan.spec([inputs, *self.hidden, outputs], self.intervals, self.degree, low=self.low, high=self.high)

    def rehearse(self, inputs: int, classes: int, where: str, *, sparse: bool = False) -> None:
        if self.centered and not sparse:
            raise SpecError(f"{where}.centered: is a choice for sparse inputs, leave it out")
        rehearse(self.spec(inputs, classes), self.config(0), where, classes=classes, sparse=sparse, sparse_kan=sparse)

    def fit(self, task: _Task) -> Fitted:
        sparse = not isinstance(task.x, np.ndarray)
        spec, config = self.spec(task.x.shape[1], task.classes), self.config(task.seed)
        return _trained(task, spec, config, calibrated=self.calibrate, sparse_kan=sparse, centered=self.centered)


def _trained(
    task: _Task,
    spec: ModelSpec,
    config: TrainConfig,
    *,
    calibrated: bool = False,
    sparse_kan: bool = False,
    centered: bool = False,
) -> Fitted:
    """Train a model, last iterate, or with early stopping where there are rows to stop on."""
    made = Model(spec, seed=task.seed, dtype=torch.float32)
    model: Model | SparseKAN = SparseKAN(made, centered=centered) if sparse_kan else made
    if calibrated:
        x = _tensor(task.x)
        if isinstance(model, SparseKAN):
            model.calibrate(x)
        else:
            calibrate(model, x, torch.as_tensor(task.y))
    data: Any = (task.x, task.y)
    if task.change is not None:
        data = _changed(task.x, task.y, config.batch_size or len(task.y), task.change)

    def predicted(x: Any) -> Labels:
        return np.asarray(predict(model, x, config.loss), dtype=np.int64)

    def scores(x: Any) -> npt.NDArray[np.float32]:
        return np.asarray(predict_log_proba(model, x, config.loss), dtype=np.float32)

    if task.validation is not None:
        records = fit_model(model, data, config, validation=task.validation)
    else:
        records = []
        for record in train(model, data, config):
            records.append(record)
            if task.each is not None:
                task.each(record, predicted)
        model.eval()
    details = {
        "epochs": len(records),
        "loss": records[-1].loss,
        "solver": records[-1].solver,
    }
    if task.validation is not None:
        details["best_epoch"] = max(record.number for record in records if record.best)
    return Fitted("", predicted, trained_count(model), details=details, scores=scores)


def _tensor(x: Any) -> Tensor:
    """Return inputs as a tensor, a SciPy matrix as sparse CSR."""
    if isinstance(x, np.ndarray):
        return torch.as_tensor(x)
    starts, indices = (torch.as_tensor(part.astype(np.int64)) for part in (x.indptr, x.indices))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that sparse CSR is a beta, said once
        return torch.sparse_csr_tensor(starts, indices, torch.as_tensor(x.data), x.shape, check_invariants=True)


class _Changing(Dataset[Any]):
    """Rows in memory that are changed at random when they are asked for, a batch at a time."""

    def __init__(self, x: Tensor, y: Tensor, change: Change) -> None:
        self.x, self.y, self.change = x, y, change

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.change(self.x[index : index + 1])[0], self.y[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        places = torch.tensor(indices)
        return self.change(self.x[places]), self.y[places]


def _changed(x: Any, y: Labels, size: int, change: Change) -> DataLoader[Any]:
    rows = _Changing(torch.as_tensor(x), torch.as_tensor(y), change)
    # A batch is whole already. Its order and its changes are drawn from the generator that the engine seeds for each step.
    return DataLoader(rows, batch_size=size, shuffle=True, collate_fn=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch


# ------------------------------------------------------------------------------------------------ classical ones


@dataclass(frozen=True)
class LinearSVM(Kind):
    """`svm_linear`: a linear support vector machine of scikit-learn.

    Args:
        C: weight of the losses beside the penalty of the weights.
        solver: `liblinear`, one class against the rest and squared hinge; `libsvm`, each class against each and hinge.
        max_iter: iterations at most; None: 1,000 for `liblinear`, any number for `libsvm`.
    """

    C: float = option(1.0, minimum=1e-12, maximum=1e12)
    solver: Literal["liblinear", "libsvm"] = "liblinear"
    max_iter: int | None = option(None, minimum=1, maximum=10**9)

    def fit(self, task: _Task) -> Fitted:
        from sklearn.svm import SVC, LinearSVC

        with _quiet():
            if self.solver == "liblinear":
                made = LinearSVC(C=self.C, random_state=task.seed, max_iter=self.max_iter or 1000).fit(task.x, task.y)
            else:
                made = SVC(C=self.C, kernel="linear", cache_size=1000, max_iter=self.max_iter or -1).fit(task.x, task.y)
        return Fitted("", _predictions(made), int(made.coef_.size + made.intercept_.size))


@dataclass(frozen=True)
class KernelSVM(Kind):
    """`svm_rbf`: a support vector machine of scikit-learn with Gaussian kernel.

    Args:
        C: weight of the losses beside the penalty.
        gamma: of exp(−γ‖x − x′‖²), or how scikit-learn finds it.
    """

    C: float = option(1.0, minimum=1e-12, maximum=1e12)
    gamma: float | Literal["scale", "auto"] = option("scale", minimum=1e-12, maximum=1e12)

    def fit(self, task: _Task) -> Fitted:
        from sklearn.svm import SVC

        made = SVC(C=self.C, gamma=self.gamma, cache_size=1000).fit(task.x, task.y)
        vectors = int(made.n_support_.sum())
        # Its support vectors, their dual coefficients, and the intercepts.
        count = vectors * task.x.shape[1] + int(np.prod(made.dual_coef_.shape)) + made.intercept_.size
        return Fitted("", _predictions(made), count, details={"support_vectors": vectors})


@dataclass(frozen=True)
class GaussianNaiveBayes(Kind):
    """`naive_bayes_gaussian`: that of scikit-learn.

    Args:
        var_smoothing: share of the largest variance that is added to all.
    """

    var_smoothing: float = option(1e-9, minimum=0.0, maximum=1e12)

    def fit(self, task: _Task) -> Fitted:
        from sklearn.naive_bayes import GaussianNB

        made = GaussianNB(var_smoothing=self.var_smoothing)
        if isinstance(task.x, np.ndarray):
            made.fit(task.x, task.y)
            return Fitted("", _predictions(made), 2 * made.theta_.size + made.class_prior_.size)
        made.var_smoothing = 0.0  # which would be of each part anew
        for begin in range(0, len(task.y), ROWS_AT_ONCE):  # of sparse rows few at a time are made dense
            part = slice(begin, begin + ROWS_AT_ONCE)
            made.partial_fit(task.x[part].toarray(), task.y[part], classes=np.arange(task.classes))
        means, squares = (np.asarray(x.astype(np.float64).mean(0)).ravel() for x in (task.x, task.x.multiply(task.x)))
        made.var_ += self.var_smoothing * (squares - means**2).max()

        def predicted(x: Any) -> Labels:
            parts = [made.predict(x[i : i + ROWS_AT_ONCE].toarray()) for i in range(0, x.shape[0], ROWS_AT_ONCE)]
            return np.concatenate(parts).astype(np.int64)

        return Fitted("", predicted, 2 * made.theta_.size + made.class_prior_.size)


@dataclass(frozen=True)
class MultinomialNaiveBayes(Kind):
    """`naive_bayes_multinomial`: that of scikit-learn, for inputs of at least 0.

    Args:
        alpha: what is added to each count.
    """

    alpha: float = option(1.0, minimum=1e-10, maximum=1e12)

    def fit(self, task: _Task) -> Fitted:
        from sklearn.naive_bayes import MultinomialNB

        made = MultinomialNB(alpha=self.alpha).fit(task.x, task.y)
        return Fitted("", _predictions(made), made.feature_log_prob_.size + made.class_log_prior_.size)


@dataclass(frozen=True)
class LogisticRegression(Kind):
    """`logistic_regression`: that of scikit-learn.

    Args:
        C: weight of the losses beside the penalty of the weights.
        max_iter: of its solver.
    """

    C: float = option(1.0, minimum=1e-12, maximum=1e12)
    max_iter: int = option(1000, minimum=1, maximum=10**9)

    def fit(self, task: _Task) -> Fitted:
        from sklearn import linear_model

        with _quiet():
            made = linear_model.LogisticRegression(C=self.C, max_iter=self.max_iter).fit(task.x, task.y)
        return Fitted("", _predictions(made), int(made.coef_.size + made.intercept_.size))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out the warning that a solver ran out of iterations: the score shows what it is worth."""
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


def _predictions(made: Any) -> Callable[[Any], Labels]:
    return lambda x: np.asarray(made.predict(x), dtype=np.int64)


KINDS: dict[str, type[Kind]] = {
    "network": AnyNetwork,
    "model": AnyModel,
    "mlp": MLP,
    "kan": KAN,
    "svm_linear": LinearSVM,
    "svm_rbf": KernelSVM,
    "naive_bayes_gaussian": GaussianNaiveBayes,
    "naive_bayes_multinomial": MultinomialNaiveBayes,
    "logistic_regression": LogisticRegression,
}
"""Kinds of classifiers: a closed set."""

NETWORKS = tuple(name for name, kind in KINDS.items() if kind.in_epochs)
"""Kinds that are trained in epochs."""
