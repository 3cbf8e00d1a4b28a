"""Classifiers under one protocol: each candidate of a grid judged on validation rows, the best fitted again on all of them.

Every kind is fitted, chosen and counted alike, so that a baseline gets what the model gets that it is compared with.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kapsi.errors import SpecError, did_you_mean
from kapsi.expansion import Identity
from kapsi.function import Spec, coerce, option
from kapsi.modules import Model, calibrate, trained_count
from kapsi.paper.procedures.sparse_kan import SparseKAN
from kapsi.process import Process
from kapsi.reconciliation.dense import ZeroReconciliation
from kapsi.remainder import IdentityRemainder
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec, from_dict, set_option
from kapsi.training.config import TrainConfig
from kapsi.training.engine import fit as fit_model
from kapsi.training.engine import train
from kapsi.training.prediction import predict, predict_log_proba
from kapsi.training.records import Epoch

__all__ = ["KINDS", "NETWORKS", "Change", "Fitted", "Network", "fit", "kind_of"]

Labels = npt.NDArray[np.int64]
Change = Callable[[Tensor], Tensor]
"""Changes the inputs of a batch at random, `(b, m)` to `(b, m)`, drawing from torch's default generator, which the engine seeds."""
Each = Callable[[Epoch, Callable[[Any], Labels]], None]
"""Called after each epoch with its record and the predictions of the model as it is then."""

PROTOCOL = ("grid", "tune_rows", "tune", "refit", "early_stopping")
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
        validation: accuracy on the validation rows of what was chosen, fitted without them; None where there was no choice.
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
    options: Mapping[str, Any]
    seed: int
    where: str
    validation: tuple[Any, Labels] | None = None  # to stop early on
    change: Change | None = None
    each: Each | None = None


class _Fit(Protocol):
    def __call__(self, task: _Task, /) -> Fitted: ...


# ------------------------------------------------------------------------------------------------ the choice


def fit(
    kind: str,
    x_train: Any,
    y_train: Labels,
    x_validation: Any = None,
    y_validation: Labels | None = None,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    *,
    classes: int | None = None,
    change: Change | None = None,
    each: Each | None = None,
    where: str = "options",
) -> Fitted:
    """Choose among the candidates of a grid on validation rows, and fit the best one on all rows.

    Options of the choice: `grid` maps an option, with dots for what is inside of another, to the values that are tried;
    `tune_rows` is the number of training rows, the first ones, that candidates are fitted on (all); `tune` are options that
    candidates have instead, such as fewer epochs; `refit`, whether the chosen one is fitted again on training and validation
    rows (true); `early_stopping`, whether networks end by the validation loss, and are then not fitted again. With a single
    candidate there is nothing to choose, so it is fitted once, on all rows, and `validation` is None.

    Args:
        kind: a key of `KINDS`.
        x_train: (rows, m), an array or a SciPy matrix.
        y_train: (rows,) class numbers from 0.
        x_validation: (rows, m), or None: a single candidate, fitted on the training rows.
        y_validation: (rows,).
        options: of the choice and of the kind; plain data.
        seed: of initial values, dropout and the order of rows.
        classes: number of classes, by default the largest class number and one.
        change: of the inputs of each batch, for networks.
        each: called after each epoch of the last fit, for networks.
        where: begins the messages of errors.

    Raises:
        SpecError: there is no such kind or option, or a grid and no validation rows.

    Example:
        >>> x = np.random.default_rng(0).random((60, 3)); y = (x[:, 0] > 0.5).astype(np.int64)
        >>> made = fit("svm_linear", x[:40], y[:40], x[40:], y[40:], {"grid": {"C": [0.01, 1.0]}})
        >>> made.chosen, made.predict(x).shape
        ({'C': 1.0}, (60,))
    """
    kind_of(kind, tuple(KINDS), where)
    started = time.process_time()
    given = copy.deepcopy(dict(options or {}))
    choice = {name: given.pop(name) for name in PROTOCOL if name in given}
    candidates = _candidates(given, choice.get("grid") or {}, where)
    count = (
        int(max(y_train.max(), -1 if y_validation is None else y_validation.max())) + 1 if classes is None else classes
    )
    stops = bool(choice.get("early_stopping", False))
    held = None if x_validation is None or y_validation is None else (x_validation, y_validation)
    if held is None and (len(candidates) > 1 or stops):
        raise SpecError(f"{where}: a grid and early_stopping need validation rows; set held_out")
    fitter = KINDS[kind]
    task = _Task(x_train, y_train, count, candidates[0][1], seed, where, change=change, each=each)
    judged: list[tuple[Mapping[str, Any], float]] = []
    best: Fitted | None = None
    if held is not None and (len(candidates) > 1 or stops):
        rows = min(int(choice.get("tune_rows") or len(y_train)), len(y_train))
        for one, own in candidates:
            for path, value in (choice.get("tune") or {}).items():
                set_option(own, path, value)
            made = fitter(
                replace(
                    task,
                    x=x_train[:rows],
                    y=y_train[:rows],
                    options=own,
                    validation=held if stops else None,
                    each=each if len(candidates) == 1 else None,
                )
            )
            judged.append((one, float((made.predict(held[0]) == held[1]).mean())))
            if best is None or judged[-1][1] > max(accuracy for _, accuracy in judged[:-1]):
                best = replace(made, chosen=one, validation=judged[-1][1])
    if best is not None and (stops or not choice.get("refit", True)):
        now = time.process_time()
        return replace(best, kind=kind, candidates=tuple(judged), seconds=now - started, rows=rows)
    chosen: Mapping[str, Any] = candidates[0][0] if best is None else best.chosen
    own = next(own for name, own in _candidates(given, choice.get("grid") or {}, where) if name == chosen)
    if held is not None and choice.get("refit", True):
        task = replace(task, x=_joined(x_train, held[0]), y=np.concatenate([y_train, held[1]]))
    last = time.process_time()
    made = fitter(replace(task, options=own))
    now = time.process_time()
    return replace(
        made,
        kind=kind,
        chosen=chosen,
        validation=None if best is None else best.validation,
        candidates=tuple(judged),
        seconds=now - started,
        fit_seconds=now - last,
        rows=len(task.y),
    )


def kind_of(value: Any, kinds: Sequence[str], where: str) -> str:
    """Return the name of a kind, or refuse it."""
    if value not in kinds:
        hint = did_you_mean(str(value), kinds)
        raise SpecError(f"{where}.classifier: there is no {value!r}; {hint}choose from {', '.join(kinds)}")
    return str(value)


def _candidates(
    options: Mapping[str, Any], grid: Mapping[str, Sequence[Any]], where: str
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (choice, options) of every candidate."""
    for path, values in grid.items():
        if not isinstance(values, list | tuple) or not values:
            raise SpecError(f"{where}.grid.{path}: expected a list of values to try, got {str(values)[:60]!r}")
    made = []
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        own = copy.deepcopy(dict(options))
        for path, value in chosen.items():
            set_option(own, path, value)
        made.append((chosen, own))
    return made


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, np.ndarray):
        return np.concatenate([first, second])
    import scipy.sparse

    return scipy.sparse.vstack([first, second], format="csr")


def _own(task: _Task, allowed: Iterable[str]) -> dict[str, Any]:
    """Return the options of a kind, after a look at their names."""
    names = tuple(allowed)
    for name in task.options:
        if name not in names:
            hint = did_you_mean(str(name), (*names, *PROTOCOL))
            raise SpecError(
                f"{task.where}: there is no option {name!r} here; {hint}there are {', '.join((*names, *PROTOCOL))}"
            )
    return dict(task.options)


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

    def check(self) -> None:  # noqa: D102
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


def _network(task: _Task) -> Fitted:
    own = _own(task, ("network", "layers", "heads", "train", "calibrate"))
    given = dict(own.get("network") or {})
    # Axes of a grid of rows stand beside the network.
    given.update({name: own[name] for name in ("layers", "heads") if name in own})
    network: Network = coerce(Network, given, f"{task.where}.network")
    return _trained(task, network.spec(task.x.shape[1], task.classes), own)


def _model(task: _Task) -> Fitted:
    own = _own(task, ("model", "train", "calibrate"))
    spec: ModelSpec = from_dict(own.get("model"), ModelSpec, f"{task.where}.model")
    return _trained(task, spec.sized(task.x.shape[1], task.classes), own)


def _mlp(task: _Task) -> Fitted:
    from kapsi.zoo import mlp

    own = _own(task, ("hidden", "activation", "dropout", "train"))
    widths = [task.x.shape[1], *own.get("hidden", [512, 256]), task.classes]
    spec = mlp.spec(widths, own.get("activation", "relu"), dropout=own.get("dropout", 0.0))
    return _trained(task, spec, own)


def _kan(task: _Task) -> Fitted:
    from kapsi.zoo import kan

    own = _own(task, ("hidden", "intervals", "degree", "low", "high", "train", "calibrate", "centered"))
    splines = {name: own[name] for name in ("intervals", "degree", "low", "high") if name in own}
    spec = kan.spec([task.x.shape[1], *own.get("hidden", [64]), task.classes], **splines)
    return _trained(task, spec, own, sparse_kan=not isinstance(task.x, np.ndarray))


def _trained(task: _Task, spec: ModelSpec, own: Mapping[str, Any], *, sparse_kan: bool = False) -> Fitted:
    """Train a model, last iterate, or with early stopping where there are rows to stop on."""
    given = {"loss": "cross_entropy", **(own.get("train") or {}), "seed": task.seed}
    config: TrainConfig = coerce(TrainConfig, given, f"{task.where}.train")
    made = Model(spec, seed=task.seed, dtype=torch.float32)
    model: Model | SparseKAN = SparseKAN(made, centered=bool(own.get("centered", False))) if sparse_kan else made
    if own.get("calibrate", False):
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


def _svm_linear(task: _Task) -> Fitted:
    """Linear SVM: `liblinear`, one class against the rest and squared hinge, or `libsvm`, each class against each and hinge."""
    own = _own(task, ("C", "solver", "max_iter"))
    cost, solver = float(own.get("C", 1.0)), own.get("solver", "liblinear")
    with _quiet():
        if solver == "liblinear":
            from sklearn.svm import LinearSVC

            made = LinearSVC(C=cost, random_state=task.seed, max_iter=own.get("max_iter", 1000)).fit(task.x, task.y)
        elif solver == "libsvm":
            from sklearn.svm import SVC

            made = SVC(C=cost, kernel="linear", cache_size=1000).fit(task.x, task.y)
        else:
            raise SpecError(f"{task.where}.solver: expected liblinear or libsvm, got {solver!r}")
    return Fitted("", _predictions(made), int(made.coef_.size + made.intercept_.size))


def _svm_rbf(task: _Task) -> Fitted:
    from sklearn.svm import SVC

    own = _own(task, ("C", "gamma"))
    made = SVC(C=float(own.get("C", 1.0)), gamma=own.get("gamma", "scale"), cache_size=1000).fit(task.x, task.y)
    vectors = int(made.n_support_.sum())
    # Its support vectors, their dual coefficients, and the intercepts.
    count = vectors * task.x.shape[1] + int(np.prod(made.dual_coef_.shape)) + made.intercept_.size
    return Fitted("", _predictions(made), count, details={"support_vectors": vectors})


def _naive_bayes_gaussian(task: _Task) -> Fitted:
    from sklearn.naive_bayes import GaussianNB

    own = _own(task, ("var_smoothing",))
    made = GaussianNB(var_smoothing=float(own.get("var_smoothing", 1e-9)))
    if isinstance(task.x, np.ndarray):
        made.fit(task.x, task.y)
        return Fitted("", _predictions(made), 2 * made.theta_.size + made.class_prior_.size)
    for begin in range(0, len(task.y), ROWS_AT_ONCE):  # of sparse rows few at a time are made dense
        part = slice(begin, begin + ROWS_AT_ONCE)
        made.partial_fit(task.x[part].toarray(), task.y[part], classes=np.arange(task.classes))

    def predicted(x: Any) -> Labels:
        parts = [made.predict(x[i : i + ROWS_AT_ONCE].toarray()) for i in range(0, x.shape[0], ROWS_AT_ONCE)]
        return np.concatenate(parts).astype(np.int64)

    return Fitted("", predicted, 2 * made.theta_.size + made.class_prior_.size)


def _naive_bayes_multinomial(task: _Task) -> Fitted:
    from sklearn.naive_bayes import MultinomialNB

    own = _own(task, ("alpha",))
    made = MultinomialNB(alpha=float(own.get("alpha", 1.0))).fit(task.x, task.y)
    return Fitted("", _predictions(made), made.feature_log_prob_.size + made.class_log_prior_.size)


def _logistic_regression(task: _Task) -> Fitted:
    from sklearn.linear_model import LogisticRegression

    own = _own(task, ("C", "max_iter"))
    with _quiet():
        made = LogisticRegression(C=float(own.get("C", 1.0)), max_iter=int(own.get("max_iter", 1000)))
        made.fit(task.x, task.y)
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


KINDS: dict[str, _Fit] = {
    "network": _network,
    "model": _model,
    "mlp": _mlp,
    "kan": _kan,
    "svm_linear": _svm_linear,
    "svm_rbf": _svm_rbf,
    "naive_bayes_gaussian": _naive_bayes_gaussian,
    "naive_bayes_multinomial": _naive_bayes_multinomial,
    "logistic_regression": _logistic_regression,
}
"""Kinds of classifiers: a closed set."""

NETWORKS = ("network", "model", "mlp", "kan")
"""Kinds that are trained in epochs."""
