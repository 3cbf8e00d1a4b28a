"""Images as rows of pixels: classifiers of MNIST and CIFAR-10, chosen on held-out training rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kapsi.data.images import ImageData, load_images
from kapsi.errors import SpecError
from kapsi.paper.experiment import Outcome, Run
from kapsi.paper.procedures.classifiers import KINDS, NETWORKS, Change, Fitted, fit, kind_of
from kapsi.training.records import Epoch

__all__ = ["flipped", "mixed", "run", "shifted"]

DATA = ("mnist", "cifar10")
OWN = ("data", "classifier", "held_out", "inputs", "shift", "flip", "mix", "flip_test", "limit_train", "limit_test")
INPUTS = ("normalized", "unit")


def run(run: Run) -> Outcome:
    """Fit one classifier to the images of a row, and score it once on the test rows.

    Options, beside those of the choice and of the kind (`procedures.classifiers.fit`): `data`, `mnist` or `cifar10`, by default
    the name of the row; `classifier`, a kind; `held_out`, training rows that candidates are judged on, drawn by the seed;
    `inputs`, `normalized` by the mean and deviation of the channel, or `unit`, intensities from 0 to 1; `shift` and `flip`,
    random changes of the training images, by so many pixels and from left to right; `mix`, the largest share of another image
    of the batch that is mixed in, 0 to 0.5, which leaves the class as it is; `flip_test`, whether probabilities are the
    geometric mean of those of an image and of its mirror image; `limit_train`, `limit_test`, numbers of rows.

    Under the protocol `paper` nothing is held out, and the score is the best one on the test rows over all epochs.

    Raises:
        SpecError: an option that there is not, or one that does not fit.
    """
    where = f"{run.experiment}, {run.row}, {run.method}"
    options = dict(run.options)
    own = {name: options.pop(name) for name in OWN if name in options}
    images = load_images(_choice(own, "data", DATA, where, run.row), run.folder)
    kind = kind_of(own.get("classifier", "network"), tuple(KINDS), where)
    x, y, test_x, test_y = _arrays(images, own, where)
    paper = run.protocol == "paper"
    change = _change(own, images.shape, kind, where)
    split = _split(len(y), 0 if paper else _count(own, "held_out", 0, where), run.seed, where)
    curves: dict[str, list[float]] = {}
    held = None if split is None else (x[split[1]], y[split[1]])
    fitted_x, fitted_y = (x, y) if split is None else (x[split[0]], y[split[0]])
    fitted = fit(
        kind,
        fitted_x,
        fitted_y,
        None if held is None else held[0],
        None if held is None else held[1],
        options,
        run.seed,
        classes=len(images.classes) or None,
        change=change,
        each=_watch(curves, test_x, test_y) if paper else None,
        where=where,
    )
    started = time.process_time()
    score = float((_predicted(fitted, test_x, own, images.shape, where) == test_y).mean())
    extra: dict[str, Any] = {
        "chosen": dict(fitted.chosen),
        "candidates": [[dict(chosen), accuracy] for chosen, accuracy in fitted.candidates],
        "train_rows": fitted.rows,
        "held_out_rows": 0 if held is None else len(held[1]),
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


def _choice(own: Mapping[str, Any], name: str, choices: tuple[str, ...], where: str, default: str) -> str:
    value = own.get(name, default)
    if value not in choices:
        raise SpecError(f"{where}.{name}: expected one of {', '.join(choices)}, got {value!r}")
    return str(value)


def _count(own: Mapping[str, Any], name: str, default: int, where: str) -> int:
    value = own.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SpecError(f"{where}.{name}: expected a whole number of at least 0, got {value!r}")
    return value


def _arrays(
    images: ImageData, own: Mapping[str, Any], where: str
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return inputs and classes of the training and the test rows."""
    train, test = (
        _count(own, name, len(rows), where) or len(rows)
        for name, rows in (("limit_train", images.train_y), ("limit_test", images.test_y))
    )
    normalized = _choice(own, "inputs", INPUTS, where, "normalized") == "normalized"

    def inputs(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        return images.normalize(pixels) if normalized else pixels.astype(np.float32) / np.float32(255)

    return inputs(images.train_x[:train]), images.train_y[:train], inputs(images.test_x[:test]), images.test_y[:test]


def _split(rows: int, held: int, seed: int, where: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
    """Return the places of the rows to fit and of those that are held out, drawn by the seed."""
    if not held:
        return None
    if held >= rows:
        raise SpecError(f"{where}.held_out: {held:,} of {rows:,} training rows leave none to fit; hold out fewer")
    order = np.random.default_rng(seed).permutation(rows)
    return order[held:], order[:held]


def _change(own: Mapping[str, Any], shape: tuple[int, int, int], kind: str, where: str) -> Change | None:
    """Return the random changes of the training images, None where there are none."""
    pixels, flips = _count(own, "shift", 0, where), own.get("flip", False)
    if not isinstance(flips, bool):
        raise SpecError(f"{where}.flip: expected true or false, got {flips!r}")
    share = own.get("mix", 0)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 0.5:
        raise SpecError(f"{where}.mix: expected a share from 0 to 0.5, got {share!r}")
    if not pixels and not flips and not share:
        return None
    if kind not in NETWORKS:
        raise SpecError(
            f"{where}: shift, flip and mix change the images of each batch; {kind} has none, leave them out"
        )

    def change(x: Tensor) -> Tensor:
        images = x.reshape(-1, *shape)
        if flips:
            images = flipped(images)
        if pixels:
            images = shifted(images, pixels)
        if share:
            images = mixed(images, share)
        return images.reshape(len(x), -1)

    return change


def _predicted(
    fitted: Fitted, x: npt.NDArray[np.float32], own: Mapping[str, Any], shape: tuple[int, int, int], where: str
) -> npt.NDArray[np.int64]:
    """Return class numbers of the test rows."""
    both = own.get("flip_test", False)
    if not isinstance(both, bool):
        raise SpecError(f"{where}.flip_test: expected true or false, got {both!r}")
    if not both:
        return fitted.predict(x)
    if fitted.scores is None:
        raise SpecError(f"{where}.flip_test: {fitted.kind} has no probabilities, leave it out")
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
