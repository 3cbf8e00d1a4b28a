"""Images as rows of pixels: classifiers of MNIST and CIFAR-10, selected on held-out training rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kapsi.data.hub import DATASETS
from kapsi.data.images import ImageData, load_images
from kapsi.errors import SpecError
from kapsi.function import Spec, coerce, option
from kapsi.paper.experiment import Budget, Outcome, Run
from kapsi.paper.procedures.ablation import PIXELS
from kapsi.paper.procedures.classifier_kinds import Augmentation, EpochCallback, FittedClassifier, Labels
from kapsi.paper.procedures.classifiers import NETWORKS, ClassifierSearch, divided, names_of, read
from kapsi.paper.procedures.networks import EpochKind
from kapsi.training.augmentation import flipped, mixed
from kapsi.training.losses import CrossEntropy
from kapsi.training.records import Epoch

Pixels = npt.NDArray[np.float32] | npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ImageOptions(Spec):
    """Options of the procedure `images`, in addition to the options of the selection and of the kind of classifier.

    Args:
        data: data set, by default the name of the row.
        classifier: key of `classifiers.KINDS`.
        held_out: number of training rows for the selection, drawn by the seed.
        inputs: `normalized` by the mean and standard deviation of the channel, `unit`, intensities from 0 to 1, or `pixels`,
            uint8 from 0 to 255, for a recipe.
        flip: flip training images horizontally at random.
        mix: largest share of another image of the batch mixed in without changing the class, 0 to 0.5.
        flip_test: average the log-probabilities of a test image and the mirror image.
        limit_train, limit_test: maximum numbers of rows; 0 for all.
    """

    data: Literal["mnist", "cifar10"]
    classifier: str = "network"
    held_out: int = option(0, minimum=0)
    inputs: Literal["normalized", "unit", "pixels"] = "normalized"
    flip: bool = False
    mix: float = option(0.0, minimum=0.0, maximum=0.5)
    flip_test: bool = False
    limit_train: int = option(0, minimum=0)
    limit_test: int = option(0, minimum=0)


def budget(run: Run) -> Budget:
    """Return the search of a run."""
    return read_options(run)[1].budget()


def run(run: Run) -> Outcome:
    """Fit a classifier to the images of a row, and score it once on the test rows.

    Options: `ImageOptions`, the selection, and the kind (`procedures.classifiers.read`).

    Under the protocol `paper` there are no held-out rows, and the score is the best epoch on the test rows.

    Raises:
        SpecError: unknown option, or invalid value.
    """
    options, search = read_options(run)
    images = load_images(options.data, run.folder)
    x, y, test_x, test_y = _arrays(images, options)
    paper = run.protocol == "paper"
    curves: dict[str, list[float]] = {}
    held_out = 0 if paper else options.held_out
    if held_out:
        _require_rows(held_out, len(y), search.where)
        order = np.random.default_rng(run.seed).permutation(len(y))
        order = np.concatenate([order[held_out:], order[:held_out]])
        x, y = x[order], y[order]
    count = len(y) - held_out
    fitted = search.fit(
        (x, y),
        [lambda: ((x[:count], y[:count]), (x[count:], y[count:]))] if held_out else (),
        classes=len(images.classes) or int(max(y.max(), test_y.max())) + 1,
        seed=run.seed,
        augment=_augmentation(options, images.shape),
        on_epoch=_recorder(curves, test_x, test_y) if paper else None,
        shape=images.shape,
    )
    started = time.process_time()
    score = float((_predicted(fitted, test_x, options, images.shape) == test_y).mean())
    extra: dict[str, Any] = {
        "chosen": dict(fitted.chosen),
        "candidates": [[dict(chosen), accuracy] for chosen, accuracy in fitted.candidates],
        "train_rows": fitted.rows,
        "held_out_rows": held_out if search.selects else 0,
        "test_rows": len(test_y),
        "cpu_seconds_of_fit": round(fitted.fit_seconds, 2),
        "cpu_seconds_of_test": round(time.process_time() - started, 2),
        **fitted.details,
    }
    if images.notes:
        extra["notes"] = list(images.notes)
    if paper and curves:
        # The paper evaluates the test rows after each epoch and reports the best epoch.
        best = int(np.argmax(curves["test"]))
        extra |= {"best_epoch_on_test": curves["test"][best], "best_epoch": best + 1, "last_epoch": score}
        score = curves["test"][best]
    return Outcome(score, fitted.validation, fitted.parameters, fitted.seconds, extra, curves)


# ------------------------------------------------------------------------------------------------ options


def _require_rows(held_out: int, rows: int, where: str) -> None:
    if held_out >= rows:
        raise SpecError(f"{where}.held_out: {held_out:,} of {rows:,} training rows leave none to fit; hold out fewer")


def read_options(run: Run) -> tuple[ImageOptions, ClassifierSearch]:
    """Return the options of the data, and the candidates."""
    run.expects("accuracy", "validation", "paper")
    where = run.where
    known, others = divided(run.options, ImageOptions)
    options: ImageOptions = coerce(ImageOptions, {"data": run.row, **known}, where)
    search = read(options.classifier, others, where, names_of(ImageOptions))
    kind, paper = search.kind, run.protocol == "paper"
    other_loss = any(
        isinstance(k, EpochKind) and not isinstance(k.config(0).loss, CrossEntropy) for k in search.kinds()
    )
    network, augmented = kind in NETWORKS, bool(options.flip or options.mix)
    problems = (
        (
            augmented and not network,
            f": flip and mix change the images of each batch; {kind} has none, leave them out",
        ),
        (options.flip_test and not network, f".flip_test: {kind} has no probabilities, leave it out"),
        (paper and not network, f": the protocol of the paper selects epochs, and {kind} has none"),
        (
            kind == "naive_bayes_multinomial" and options.inputs != "unit",
            f".inputs: {kind} is for inputs of at least 0; set inputs to unit",
        ),
        (
            (options.inputs == "pixels") != (kind == "recipe"),
            ".inputs: the classifier recipe needs pixels, and no other takes them",
        ),
        (
            options.flip_test and other_loss,
            ".flip_test: needs the loss cross_entropy, which has probabilities; leave it out",
        ),
        (
            not search.options.refit and (paper or not options.held_out),
            ".refit: no rows are held out, and all rows are fitted once; leave it out, or set held_out",
        ),
        (
            search.selects and (paper or not options.held_out),
            ": a grid and early_stopping need validation rows; set held_out, and the protocol validation",
        ),
    )
    for wrong, problem in problems:
        if wrong:
            raise SpecError(where + problem)
    _require_rows(options.held_out, options.limit_train or DATASETS[options.data].rows[0], where)
    search.dry_run(PIXELS[options.data], 10)
    return options, search


def _arrays(images: ImageData, options: ImageOptions) -> tuple[Pixels, Labels, Pixels, Labels]:
    """Return inputs and classes of the training and the test rows."""

    def inputs(pixels: npt.NDArray[np.uint8]) -> Pixels:
        if options.inputs == "pixels":
            return pixels
        return (
            images.normalize(pixels) if options.inputs == "normalized" else pixels.astype(np.float32) / np.float32(255)
        )

    train, test = options.limit_train or len(images.train_y), options.limit_test or len(images.test_y)
    return inputs(images.train_x[:train]), images.train_y[:train], inputs(images.test_x[:test]), images.test_y[:test]


def _augmentation(options: ImageOptions, shape: tuple[int, int, int]) -> Augmentation | None:
    """Return the random changes of the training images, None if there are none."""
    if not options.flip and not options.mix:
        return None

    def augment(x: Tensor) -> Tensor:
        images = x.reshape(-1, *shape)
        if options.flip:
            images = flipped(images)
        if options.mix:
            images = mixed(images, options.mix)
        return images.reshape(len(x), -1)

    return augment


def _predicted(fitted: FittedClassifier, x: Pixels, options: ImageOptions, shape: tuple[int, int, int]) -> Labels:
    """Return the integer class labels of the test rows."""
    if not options.flip_test or fitted.scores is None:
        return fitted.predict(x)
    mirrored = np.ascontiguousarray(x.reshape(-1, *shape)[..., ::-1]).reshape(len(x), -1)
    return (fitted.scores(x) + fitted.scores(mirrored)).argmax(1).astype(np.int64)


def _recorder(curves: dict[str, list[float]], x: Pixels, y: Labels) -> EpochCallback:
    """Return a callback for recording the loss and the test accuracy of each epoch."""

    def on_epoch(record: Epoch, predict: Callable[[Any], Labels]) -> None:
        row = {"epoch": record.number, "train": record.loss, "test": float((predict(x) == y).mean())}
        for name, value in row.items():
            curves.setdefault(name, []).append(value)

    return on_epoch
