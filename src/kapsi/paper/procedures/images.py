"""Images as rows of pixels: classifiers of MNIST and CIFAR-10, chosen on held-out training rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kapsi.data.hub import DATASETS
from kapsi.data.images import ImageData, load_images
from kapsi.errors import SpecError
from kapsi.function import Spec, coerce, option
from kapsi.paper.experiment import Outcome, Run
from kapsi.paper.procedures.ablation import PIXELS
from kapsi.paper.procedures.classifiers import NETWORKS, Change, Choice, Fitted, InEpochs, divided, read
from kapsi.training.records import Epoch

__all__ = ["Options", "check", "flipped", "mixed", "run", "shifted"]


@dataclass(frozen=True)
class Options(Spec):
    """The options beside those of the choice and of the kind of classifier.

    Args:
        data: which images; by default those that the row is called after.
        classifier: a kind, a key of `classifiers.KINDS`.
        held_out: number of training rows that candidates are judged on, drawn by the seed.
        inputs: `normalized` by the mean and deviation of the channel, or `unit`, intensities from 0 to 1.
        shift: random shifts of the training images, by at most so many pixels.
        flip: whether training images are turned from left to right at random.
        mix: largest share of another image of the batch that is mixed in, which leaves the class as it is.
        flip_test: whether probabilities are the geometric mean of those of an image and of its mirror image.
        limit_train, limit_test: numbers of rows; 0: all.
    """

    data: Literal["mnist", "cifar10"]
    classifier: str = "network"
    held_out: int = option(0, minimum=0)
    inputs: Literal["normalized", "unit"] = "normalized"
    shift: int = option(0, minimum=0, maximum=27)
    flip: bool = False
    mix: float = option(0.0, minimum=0.0, maximum=0.5)
    flip_test: bool = False
    limit_train: int = option(0, minimum=0)
    limit_test: int = option(0, minimum=0)


def run(run: Run) -> Outcome:
    """Fit one classifier to the images of a row, and score it once on the test rows.

    Options: those of `Options`, of the choice, and of the kind (`procedures.classifiers.read`).

    Under the protocol `paper` nothing is held out, and the score is the best one on the test rows over all epochs.

    Raises:
        SpecError: an option that there is not, or one that does not fit.
    """
    own, choice = _options(run)
    images = load_images(own.data, run.folder)
    x, y, test_x, test_y = _arrays(images, own)
    paper = run.protocol == "paper"
    curves: dict[str, list[float]] = {}
    held = 0 if paper else own.held_out
    if held:
        if held >= len(y):
            raise SpecError(
                f"{choice.where}.held_out: {held:,} of {len(y):,} training rows leave none to fit; hold out fewer"
            )
        order = np.random.default_rng(run.seed).permutation(len(y))
        order = np.concatenate([order[held:], order[:held]])
        x, y = x[order], y[order]
    some = len(y) - held
    fitted = choice.fit(
        (x, y),
        [lambda: ((x[:some], y[:some]), (x[some:], y[some:]))] if held else (),
        classes=len(images.classes) or int(max(y.max(), test_y.max())) + 1,
        seed=run.seed,
        change=_change(own, images.shape),
        each=_watch(curves, test_x, test_y) if paper else None,
    )
    started = time.process_time()
    score = float((_predicted(fitted, test_x, own, images.shape) == test_y).mean())
    extra: dict[str, Any] = {
        "chosen": dict(fitted.chosen),
        "candidates": [[dict(chosen), accuracy] for chosen, accuracy in fitted.candidates],
        "train_rows": fitted.rows,
        "held_out_rows": held if choice.judged else 0,
        "test_rows": len(test_y),
        "cpu_seconds_of_fit": round(fitted.fit_seconds, 2),
        "cpu_seconds_of_test": round(time.process_time() - started, 2),
        **fitted.details,
    }
    if images.notes:
        extra["notes"] = list(images.notes)
    if paper and curves:
        # The figure of the paper looks at the test rows after each epoch and keeps the best of them.
        best = int(np.argmax(curves["test"]))
        extra |= {"best_epoch_on_test": curves["test"][best], "best_epoch": best + 1, "last_epoch": score}
        score = curves["test"][best]
    return Outcome(score, fitted.validation, fitted.parameters, fitted.seconds, extra, curves)


# ------------------------------------------------------------------------------------------------ options


def _options(run: Run) -> tuple[Options, Choice]:
    run.expects("accuracy", "validation", "paper")
    where = run.where
    given, others = divided(run.options, Options)
    own: Options = coerce(Options, {"data": run.row, **given}, where)
    choice = read(own.classifier, others, where, [each.name for each in fields(Options)])
    if choice.kind not in NETWORKS:
        if own.shift or own.flip or own.mix:
            raise SpecError(
                f"{where}: shift, flip and mix change the images of each batch; {choice.kind} has none, leave them out"
            )
        if own.flip_test:
            raise SpecError(f"{where}.flip_test: {choice.kind} has no probabilities, leave it out")
    if run.protocol == "paper" and choice.kind not in NETWORKS:
        raise SpecError(f"{where}: the protocol of the paper chooses among epochs, which {choice.kind} has none of")
    if choice.kind == "naive_bayes_multinomial" and own.inputs != "unit":
        raise SpecError(f"{where}.inputs: {choice.kind} is for inputs of at least 0; set inputs to unit")
    if own.flip_test and any(
        isinstance(kind, InEpochs) and kind.config(0).loss != "cross_entropy" for kind in choice.kinds()
    ):
        raise SpecError(f"{where}.flip_test: is for the loss cross_entropy, which has probabilities; leave it out")
    rows = own.limit_train or DATASETS[own.data].rows[0]
    if own.held_out >= rows:
        raise SpecError(
            f"{where}.held_out: {own.held_out:,} of {rows:,} training rows leave none to fit; hold out fewer"
        )
    if not choice.refit and (run.protocol == "paper" or not own.held_out):
        raise SpecError(f"{where}.refit: no rows are held out, and all are fitted once; leave it out, or set held_out")
    if choice.judged and (run.protocol == "paper" or not own.held_out):
        raise SpecError(
            f"{where}: a grid and early_stopping need validation rows; set held_out, and the protocol validation"
        )
    choice.rehearse(PIXELS[own.data], 10)
    return own, choice


def check(run: Run) -> None:
    """Raise a `SpecError` where the options of a run do not fit; reads no data."""
    _options(run)


def _arrays(
    images: ImageData, own: Options
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return inputs and classes of the training and the test rows."""

    def inputs(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        return images.normalize(pixels) if own.inputs == "normalized" else pixels.astype(np.float32) / np.float32(255)

    train, test = own.limit_train or len(images.train_y), own.limit_test or len(images.test_y)
    return inputs(images.train_x[:train]), images.train_y[:train], inputs(images.test_x[:test]), images.test_y[:test]


def _change(own: Options, shape: tuple[int, int, int]) -> Change | None:
    """Return the random changes of the training images, None where there are none."""
    if not own.shift and not own.flip and not own.mix:
        return None

    def change(x: Tensor) -> Tensor:
        images = x.reshape(-1, *shape)
        if own.flip:
            images = flipped(images)
        if own.shift:
            images = shifted(images, own.shift)
        if own.mix:
            images = mixed(images, own.mix)
        return images.reshape(len(x), -1)

    return change


def _predicted(
    fitted: Fitted, x: npt.NDArray[np.float32], own: Options, shape: tuple[int, int, int]
) -> npt.NDArray[np.int64]:
    """Return class numbers of the test rows."""
    if not own.flip_test or fitted.scores is None:  # which `_options` refuses
        return fitted.predict(x)
    mirrored = np.ascontiguousarray(x.reshape(-1, *shape)[..., ::-1]).reshape(len(x), -1)
    return (fitted.scores(x) + fitted.scores(mirrored)).argmax(1).astype(np.int64)


def _watch(
    curves: dict[str, list[float]], x: npt.NDArray[np.float32], y: npt.NDArray[np.int64]
) -> Callable[[Epoch, Callable[[Any], npt.NDArray[np.int64]]], None]:
    """Return what writes down the loss and the test accuracy of each epoch."""

    def watch(record: Epoch, predict: Callable[[Any], npt.NDArray[np.int64]]) -> None:
        row = {"epoch": record.number, "train": record.loss, "test": float((predict(x) == y).mean())}
        for name, value in row.items():
            curves.setdefault(name, []).append(value)

    return watch


# ------------------------------------------------------------------------------------------------ changes of images


def flipped(images: Tensor) -> Tensor:
    """Return images, each of them from left to right with probability one half.

    Args:
        images: (b, channels, height, width).
    """
    chosen = torch.rand(len(images)) < 0.5
    return torch.where(chosen.reshape(-1, 1, 1, 1), images.flip(-1), images)


def mixed(images: Tensor, share: float) -> Tensor:
    """Return (1 − s) a + s b for each image a, b another one of the batch, s uniform from 0 to the share.

    Args:
        images: (b, channels, height, width).
        share: largest s, 0 to 0.5.

    Source: Zhang et al. (2018), mixup: without the mixing of the targets, so that the larger share has to decide.
    """
    shares = share * torch.rand(len(images), dtype=images.dtype).reshape(-1, 1, 1, 1)
    return torch.lerp(images, images[torch.randperm(len(images))], shares)


def shifted(images: Tensor, pixels: int) -> Tensor:
    """Return images, each of them moved by up to so many pixels along each side; what comes in is as the pixel in the corner.

    Args:
        images: (b, channels, height, width).
        pixels: most pixels, at least 1 and less than a side.
    """
    height, width = images.shape[-2:]
    ways = 2 * pixels + 1
    way = torch.randint(ways * ways, (len(images),))
    corner = images[:, :, :1, :1]
    out = corner.expand_as(images).clone()
    for number in range(ways * ways):
        rows = (way == number).nonzero().squeeze(1)
        down, right = number // ways - pixels, number % ways - pixels
        there = images[rows, :, max(0, -down) : height - max(0, down), max(0, -right) : width - max(0, right)]
        moved = out[rows]
        moved[:, :, max(0, down) : height + min(0, down), max(0, right) : width + min(0, right)] = there
        out[rows] = moved
    return out
