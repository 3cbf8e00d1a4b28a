"""Ablation: a layer of an expansion, a reconciliation and a remainder, all with their defaults.

Every combination has the same training: rows, order of rows, optimizer, learning rate and number of epochs; the last epoch counts.
Without model selection, no rows are held out. Data-dependent expansions are calibrated on the training rows, without labels: their
defaults are the same for every number of classes.
"""

from __future__ import annotations

import base64
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kapsi.calibrate import calibrate
from kapsi.data.images import ImageData, load_images
from kapsi.errors import DataError, KapsiError, SpecError
from kapsi.expansion import Taylor
from kapsi.explain import explain
from kapsi.function import Spec, coerce, option
from kapsi.modules import Head, Model, trained_count
from kapsi.paper.experiment import Outcome, Run
from kapsi.paper.procedures.dry_run import dry_run, refuse
from kapsi.reconciliation import Dense
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec, to_dict
from kapsi.training.config import TrainConfig
from kapsi.training.engine import fit
from kapsi.training.losses import CrossEntropy
from kapsi.training.solvers import AdamW

MAX_ELEMENTS = 2**26
"""Elements of the largest tensor in the evaluation of test rows: a hypernet computes its matrix for each batch."""
MAX_BATCH = 2048
PIXELS = {"mnist": 784, "cifar10": 3072}
SIDE = 28
"""Height and width of an image of MNIST."""
POOLED = 4
"""Height and width of the squares averaged in the picture of ψ for products of pixels."""
GRAYS = 7
"""Steps of gray from zero to the largest entry of ψ."""


@dataclass(frozen=True)
class AblationOptions(Spec):
    """Options of the procedure `ablation`.

    Args:
        data: data set of images.
        head: expansion, reconciliation, remainder, and the processing around the expansion.
        train: training options; the loss is the cross-entropy, the solver AdamW.
        train_rows: number of leading training rows; null for all.
        test_rows: number of leading test rows; null for all.
        digits: record the first test image of each class, and ψ of its class, for a picture; with seed 0 only, of `taylor` of
            degree 2 with `dense` on MNIST.
    """

    data: Literal["mnist", "cifar10"] = "mnist"
    head: HeadSpec = HeadSpec()
    train: TrainConfig = TrainConfig()
    train_rows: int | None = option(None, minimum=1)
    test_rows: int | None = option(None, minimum=1)
    digits: bool = False

    def check(self) -> None:
        pictured = self.head.expansion == Taylor(2) and self.head.reconciliation == Dense() and self.data == "mnist"
        if self.digits and not pictured:
            raise SpecError("digits: pictures taylor of degree 2 with dense on mnist; leave it out for other heads")


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
    if options.digits and run.seed == 0:
        extra["digits"] = _digits(model, images, classes)
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


# ------------------------------------------------------------------------------------------------ digits


def _digits(model: Model, images: ImageData, classes: int) -> list[dict[str, Any]]:
    """Return the first test image of each class, and ψ of its output: for the pixels and, averaged, for their products."""
    with torch.no_grad():
        (head,) = (module for module in model.modules() if isinstance(module, Head))
        psi = head.weights().dense().float().reshape(classes, -1).numpy()
    recorded = []
    for digit in range(classes):
        index = int(np.flatnonzero(images.test_y == digit)[0])
        pixels, products = psi[digit, : SIDE**2], psi[digit, SIDE**2 :]
        recorded.append(
            {
                "class": digit,
                "image": packed(images.test_x[index]),
                "pixels": packed(_grays(pixels)),
                "products": packed(_grays(copies(products.reshape(SIDE**2, SIDE**2)))),
            }
        )
    return recorded


def copies(products: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a matrix by pairs of pixels `(784, 784)` as a grid of 28 × 28 images, `(196, 196)`, means over squares.

    The image at the place of a pixel has the products with this pixel.
    """
    grid = products.reshape(SIDE, SIDE, SIDE, SIDE).transpose(0, 2, 1, 3).reshape(SIDE**2, SIDE**2)
    small = SIDE**2 // POOLED
    means: npt.NDArray[Any] = grid.reshape(small, POOLED, small, POOLED).mean((1, 3))
    return means


def _grays(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return values as steps of gray, zero in the middle."""
    largest = max(float(np.abs(values).max()), 1e-30)
    return (np.rint(values / largest * GRAYS) + GRAYS).astype(np.uint8)


def packed(values: npt.NDArray[np.uint8]) -> str:
    """Return bytes as compressed text."""
    return base64.b64encode(zlib.compress(values.tobytes(), 9)).decode("ascii")


def unpacked(text: str, size: int) -> npt.NDArray[np.uint8]:
    """Return the bytes of a text of `packed`.

    Args:
        text: the text.
        size: number of bytes; more are not read.

    Raises:
        ValueError: another number of bytes, or other text.

    Example:
        >>> unpacked(packed(np.arange(3, dtype=np.uint8)), 3)
        array([0, 1, 2], dtype=uint8)
    """
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), size + 1)
    except zlib.error as error:
        raise ValueError(f"not compressed: {error}") from None
    if len(data) != size:
        raise ValueError(f"expected {size} bytes")
    return np.frombuffer(data, dtype=np.uint8)
