"""Ablation: a layer of an expansion, a reconciliation and a remainder, all with their defaults.

Every combination has the same training: rows, order of rows, optimizer, learning rate and number of epochs; the last epoch counts.
Without model selection, no rows are held out. Data-dependent expansions are calibrated on the training rows, without labels: their
defaults are the same for every number of classes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kapsi.calibrate import calibrate
from kapsi.data.images import load_images
from kapsi.errors import DataError, KapsiError, SpecError
from kapsi.explain import explain
from kapsi.function import Spec, coerce, option
from kapsi.modules import Model, trained_count
from kapsi.paper.experiment import Outcome, Run
from kapsi.paper.procedures.dry_run import dry_run, refuse
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec, to_dict
from kapsi.training.config import TrainConfig
from kapsi.training.engine import fit
from kapsi.training.losses import CrossEntropy
from kapsi.training.solvers import AdamW

MAX_ELEMENTS = 2**26
"""Elements of the largest tensor in the evaluation of test rows: a hypernet computes its matrix for each batch."""
MAX_BATCH = 2048
PIXELS = {"mnist": 784, "cifar10": 3072}


@dataclass(frozen=True)
class AblationOptions(Spec):
    """Options of the procedure `ablation`.

    Args:
        data: data set of images.
        head: expansion, reconciliation, remainder, and the processing around the expansion.
        train: training options; the loss is the cross-entropy, the solver AdamW.
        train_rows: number of leading training rows; null for all.
        test_rows: number of leading test rows; null for all.
    """

    data: Literal["mnist", "cifar10"] = "mnist"
    head: HeadSpec = HeadSpec()
    train: TrainConfig = TrainConfig()
    train_rows: int | None = option(None, minimum=1)
    test_rows: int | None = option(None, minimum=1)


def run(run: Run) -> Outcome:
    """Train a layer and score it on the test rows.

    Options: `AblationOptions`; `expansion`, `reconciliation` and `remainder`, the axes of a grid, belong to the head.

    Training ends at a non-finite loss or gradient. The score then belongs to the last finite weights, `failure` is the
    message; non-finite outputs count as wrong.

    Raises:
        SpecError: unknown option, or invalid value.
    """
    options = read_options(run)
    images = load_images(options.data, run.folder)
    train_rows, test_rows = slice(options.train_rows), slice(options.test_rows)
    x, y = torch.from_numpy(images.normalize(images.train_x[train_rows])), torch.from_numpy(images.train_y[train_rows])
    classes = len(images.classes) or int(images.train_y.max()) + 1
    extra: dict[str, Any] = {"train_rows": len(y), "head": to_dict(options.head)}
    started = time.process_time()
    model = Model(ModelSpec((x.shape[1], classes), (LayerSpec((options.head,)),)), seed=run.seed, dtype=torch.float32)
    calibrate(model, x)
    calibrated = time.process_time()
    config = _training(options, run.seed)
    try:
        records = fit(model, (x, y), config)
        extra["loss"] = records[-1].loss
    except (SpecError, DataError):
        raise
    except KapsiError as error:
        extra["failure"] = str(error)
    fitted = time.process_time()
    test = torch.from_numpy(images.normalize(images.test_x[test_rows]))
    correct = _predicted(model, test) == torch.from_numpy(images.test_y[test_rows])
    extra |= {
        "test_rows": len(test),
        "columns": explain(model, batch=1)[0].columns,
        "cpu_seconds_of_calibration": round(calibrated - started, 3),
        "cpu_seconds_of_fit": round(fitted - calibrated, 3),
        "cpu_seconds_of_test": round(time.process_time() - fitted, 3),
    }
    return Outcome(float(correct.double().mean()), None, trained_count(model), fitted - started, extra)


def read_options(run: Run) -> AblationOptions:
    """Return the options, with the axes of a grid in the head."""
    where = run.where
    run.expects("accuracy", "validation")
    given = dict(run.options)
    head = coerce(Mapping[str, Any], given.get("head", {}), f"{where}.head")
    axes = {name: given.pop(name) for name in ("expansion", "reconciliation", "remainder") if name in given}
    for name in axes.keys() & head.keys():
        raise SpecError(f"{where}.head.{name}: is the same option as {name}; leave one out")
    refuse(given.get("train"), f"{where}.train", loss="is the cross-entropy for all layers, leave it out")
    options: AblationOptions = coerce(AblationOptions, {**given, "head": {**head, **axes}}, where)
    if options.train.solver != "auto" and not isinstance(options.train.solver, AdamW):
        raise SpecError(f"{where}.train.solver: is adamw for all layers; give only its options")
    dry_run(ModelSpec((4, 10)), _training(options, 0), f"{where}.train", classes=10)
    try:
        with torch.device("meta"):
            model = Model(ModelSpec((PIXELS[options.data], 10), (LayerSpec((options.head,)),)))
    except (SpecError, DataError) as error:
        raise SpecError(f"{where}.head: {error}") from None
    if not trained_count(model):
        raise SpecError(f"{where}.head: the layer has no trainable parameters; use another reconciliation or remainder")
    return options


def _training(options: AblationOptions, seed: int) -> TrainConfig:
    solver = options.train.solver if isinstance(options.train.solver, AdamW) else AdamW()
    return replace(options.train, loss=CrossEntropy(), solver=solver, seed=seed)


def _predicted(model: Model, x: Tensor) -> Tensor:
    """Return integer class labels `(rows,)`, −1 for non-finite outputs."""
    rows = max(1, min(MAX_BATCH, MAX_ELEMENTS // max(1, _elements(model))))
    model.eval()
    parts = []
    with torch.no_grad():
        for part in x.split(rows):
            outputs = model(part)
            parts.append(torch.where(outputs.isfinite().all(1), outputs.argmax(1), -1))
    return torch.cat(parts)


def _elements(model: Model) -> int:
    """Return the number of elements per row of the layer's largest tensor."""
    few, many = (torch.Size(explain(model, batch=batch)[0].shape).numel() for batch in (64, 128))
    return -(-(many - few) // 64)
