"""One layer made of one expansion, one reconciliation and one remainder, all with their defaults: what each of them is worth.

Every combination is trained alike: the same rows, order of rows, optimizer, learning rate and number of epochs; the last iterate
counts. Nothing is chosen, so that no rows are held out. Expansions that depend on data are calibrated on the training rows,
without labels: their defaults are the same for every number of classes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kapsi.calibrate import calibrate
from kapsi.data.images import load_images
from kapsi.errors import KapsiError, SpecError
from kapsi.explain import explain
from kapsi.function import Spec, coerce, option
from kapsi.modules import Model, trained_count
from kapsi.paper.experiment import Outcome, Run
from kapsi.paper.procedures.rehearsal import rehearse
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec, to_dict
from kapsi.training.config import TrainConfig
from kapsi.training.engine import fit

__all__ = ["Layer", "check", "run"]

MOST_NUMBERS = 2**26
"""Numbers of the largest tensor when test rows go through the layer: a hypernet makes its matrix anew for each batch."""
MOST_ROWS = 2048
PIXELS = {"mnist": 784, "cifar10": 3072}


@dataclass(frozen=True)
class Layer(Spec):
    """What is trained, and on which rows.

    Args:
        data: the images, by the name of their data set.
        head: expansion, reconciliation, remainder, and the processing around the expansion.
        train: how; the loss is the cross-entropy.
        train_rows: the first rows of the training part, None for all.
        test_rows: the first rows of the test part, None for all.
    """

    data: Literal["mnist", "cifar10"] = "mnist"
    head: HeadSpec = HeadSpec()
    train: TrainConfig = TrainConfig()
    train_rows: int | None = option(None, minimum=1)
    test_rows: int | None = option(None, minimum=1)


def check(run: Run) -> None:
    """Raise a `SpecError` where the options of a run do not fit; reads no data."""
    _layer(run)


def run(run: Run) -> Outcome:
    """Train one layer and score it on the test rows.

    Options: those of `Layer`, and `expansion`, `reconciliation`, `remainder`, the axes of a grid, which go into its head.

    A loss or a gradient that is not finite ends the training. The score is then that of the last weights that were finite, and
    `failure` says what was wrong; outputs that are not finite count as wrong.

    Raises:
        SpecError: an option that there is not, or one that does not fit.
    """
    where = run.where
    layer = _layer(run)
    images = load_images(layer.data, run.folder)
    kept, scored = slice(layer.train_rows), slice(layer.test_rows)
    x, y = torch.from_numpy(images.normalize(images.train_x[kept])), torch.from_numpy(images.train_y[kept])
    classes = len(images.classes) or int(images.train_y.max()) + 1
    extra: dict[str, Any] = {"train_rows": len(y), "head": to_dict(layer.head)}
    started = time.process_time()
    model = Model(ModelSpec((x.shape[1], classes), (LayerSpec((layer.head,)),)), seed=run.seed, dtype=torch.float32)
    calibrate(model, x)
    calibrated = time.process_time()
    config = _training(layer, run.seed, where)
    try:
        records = fit(model, (x, y), config)
        extra["loss"] = records[-1].loss
    except SpecError:
        raise
    except KapsiError as error:
        extra["failure"] = str(error)
    fitted = time.process_time()
    test = torch.from_numpy(images.normalize(images.test_x[scored]))
    right = _predicted(model, test) == torch.from_numpy(images.test_y[scored])
    extra |= {
        "test_rows": len(test),
        "columns": explain(model, batch=1)[0].columns,
        "cpu_seconds_of_calibration": round(calibrated - started, 3),
        "cpu_seconds_of_fit": round(fitted - calibrated, 3),
        "cpu_seconds_of_test": round(time.process_time() - fitted, 3),
    }
    return Outcome(float(right.double().mean()), None, trained_count(model), fitted - started, extra)


def _layer(run: Run) -> Layer:
    where = run.where
    given = dict(run.options)
    head = given.get("head", {})
    if not isinstance(head, Mapping):
        raise SpecError(f"{where}.head: expected a mapping of options, got {str(head)[:60]!r}")
    run.expects("accuracy", "validation")
    axes = {name: given.pop(name) for name in ("expansion", "reconciliation", "remainder") if name in given}
    for name in axes:
        if name in head:
            raise SpecError(f"{where}.head.{name}: stands beside {name}, which is the same; leave one out")
    training = given.get("train")
    for fixed in ("loss", "solver", "seed"):
        if isinstance(training, Mapping) and fixed in training:
            raise SpecError(f"{where}.train.{fixed}: is the same for all layers here, leave it out")
    layer: Layer = coerce(Layer, {**given, "head": {**head, **axes}}, where)
    rehearse(ModelSpec((4, 10)), _training(layer, 0, where), f"{where}.train", classes=10)
    try:
        with torch.device("meta"):
            made = Model(ModelSpec((PIXELS[layer.data], 10), (LayerSpec((layer.head,)),)))
    except SpecError as error:
        raise SpecError(f"{where}.head: {error}") from None
    if not trained_count(made):
        raise SpecError(
            f"{where}.head: the layer has no parameters that are trained; take another reconciliation or remainder"
        )
    return layer


def _training(layer: Layer, seed: int, where: str) -> TrainConfig:
    made: TrainConfig = coerce(
        TrainConfig, {**to_dict(layer.train), "loss": "cross_entropy", "solver": "adamw", "seed": seed}, where
    )
    return made


def _predicted(model: Model, x: Tensor) -> Tensor:
    """Return class numbers `(rows,)`, and −1 where the outputs are not finite."""
    rows = max(1, min(MOST_ROWS, MOST_NUMBERS // max(1, _numbers(model))))
    model.eval()
    parts = []
    with torch.no_grad():
        for part in x.split(rows):
            outputs = model(part)
            parts.append(torch.where(outputs.isfinite().all(1), outputs.argmax(1), -1))
    return torch.cat(parts)


def _numbers(model: Model) -> int:
    """Return how many numbers of its largest tensor a row has, as the layer is computed."""
    few, many = (torch.Size(explain(model, batch=batch)[0].shape).numel() for batch in (64, 128))
    return -(-(many - few) // 64)
