"""A network of images whose layers are products of linear functions, trained with shifts and flips that keep the class."""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self, cast

import torch
from torch import Tensor

from kapsi.expansion import Taylor
from kapsi.function import option
from kapsi.hidden_layers import Layers
from kapsi.modules import Model
from kapsi.process import Affine, BatchNorm, Dropout
from kapsi.recipes.base import CrossFit, Fold, RecipeData, held_out_scores
from kapsi.recipes.image_linear import ImageHead, channel_scale, of_images
from kapsi.recipes.mixture import mixture
from kapsi.reconciliation import KhatriRao
from kapsi.remainder import LinearRemainder
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec, passing
from kapsi.training.augmentation import augmented, flipped, moved, shifted
from kapsi.training.checkpoint import Checkpoints
from kapsi.training.config import TrainConfig
from kapsi.training.losses import CrossEntropy
from kapsi.training.prediction import predict
from kapsi.training.selection import Fits
from kapsi.training.solvers import AdamW

__all__ = ["ImageProductsHead"]

EPOCHS, ROWS = 34, 60_000
"""Epochs for a number of rows: MNIST has 0.9935 with 34 epochs, 0.9937 with 40. Fewer rows have more, at most `MOST_EPOCHS`."""

MOST_EPOCHS = 136

COMPARED = 40_000
"""Rows times epochs of a fit in a comparison; its outputs decide on shifts and flips, and on the weight of the head."""

KEPT, KEPT_OF_CLASS, FEW = 0.9, 0.5, 5
"""Part of the accuracy on held-out images that remains on changed ones if the change keeps their class, and of that in each class
with some rows."""

PER_WEIGHT, PER_STEP = 8e-11, 5e-3
"""CPU seconds of a weight and a row, and of a step."""

BYTES = 64
"""Bytes of a weight: gradient and moments in training, then two networks in float64 and their copies in the sum of heads."""

SMOOTHING = 0.1
"""Label smoothing."""


@dataclass(frozen=True)
class ImageProductsHead(ImageHead, name="image_products"):
    """A network of the pixels of all images: each layer is a sum of products of two linear functions and a linear function.

    y_i = Σ_k a_ik ⟨u_k, x⟩ ⟨v_k, x⟩ + ⟨w_i, x⟩, the expansion `taylor(2)` with ψ `khatri_rao`, twice with batch norm, and once for
    the outputs. Trained by AdamW with label smoothing and dropout, on images that are shifted and flipped at random. A change is
    used if the network trained without it keeps 90% of its accuracy (or of R²) on held-out images that are changed so, and half of
    it in every class: mirrored cats are cats, mirrored digits are none. With flips, the outputs of an image and of its mirror image
    are averaged.

    Args:
        width: width of both hidden layers; None: 256, less for small images.
        epochs: passes over the rows; None: 34 for 60,000 rows, more for fewer.
        shift: largest shift in pixels, 0 to 8; None: 0 or a thirtieth of the side, by held-out images.
        flip: flip images horizontally; None: by held-out images.

    Source: arXiv 2407.04819; Rendle, Factorization Machines (ICDM 2010), for products of linear functions.
    """

    complexity: ClassVar[int] = 7

    width: int | None = option(None, minimum=2, maximum=4096)
    epochs: int | None = option(None, minimum=1, maximum=100_000)
    shift: int | None = option(None, minimum=0, maximum=8)
    flip: bool | None = None

    def least_budget(self, data: RecipeData) -> float:
        rows = len(data.x)
        # Comparisons have the larger part of a budget; of few rows they train as long as the fit, on repeated folds.
        return max(4 * self.fit_cost(data, rows), 6 * self.cost(data, rows))

    def cost(self, data: RecipeData, rows: int) -> float:
        return self._seconds(data, rows, self._compared(rows))

    def fit_cost(self, data: RecipeData, rows: int) -> float:
        return self._seconds(data, rows, self._epochs(rows))

    def within(self, data: RecipeData, seconds: float) -> Self:
        rows = len(data.x)
        most = int(seconds / self._seconds(data, rows, 1))
        return self if most >= self._epochs(rows) else replace(self, epochs=max(1, most))

    def narrowed(self, trial: Self) -> Self:
        return replace(self, shift=trial.shift, flip=trial.flip)

    def fit(self, data: RecipeData, seed: int = 0) -> Model:
        return self.resumed(data, seed, None)

    @torch.no_grad()
    def resumed(self, data: RecipeData, seed: int, checkpoints: Checkpoints | None) -> Model:
        recipe = self
        if self.shift is None or self.flip is None:
            recipe = self.narrowed(cast(Self, self.cross_fit(data, data.folds(3)[:1], seed).recipe))
        network = recipe._trained(data, self._epochs(len(data.x)), seed, checkpoints)
        models = [_as_head(network, data)]
        if recipe.flip:
            models.append(copy.deepcopy(models[0]))
            selection = models[1].check_layers("recipe")[0].check_heads("recipe")[0].kappa["selection"]
            columns = _changed(torch.arange(data.images().shape[1])[None], data.shapes, lambda images: images.flip(-1))
            selection.copy_(selection[columns[0]])
        return mixture(models, [1 / len(models)] * len(models))

    @torch.no_grad()
    def cross_fit(self, data: RecipeData, folds: Sequence[Fold], seed: int = 0) -> CrossFit:
        start, recipe = time.perf_counter(), self
        outputs = data.x.new_full((len(data.x), data.outputs), torch.nan)
        for train_rows, test in folds:
            network = recipe._trained(data.take(train_rows), self._compared(len(train_rows)), seed)
            held_out = data.take(test)
            outputs[test] = _predicted(network, held_out.images())
            recipe = recipe._decided(network, held_out, outputs[test])
        return CrossFit(outputs, recipe, time.perf_counter() - start)

    def _decided(self, network: Model, data: RecipeData, outputs: Tensor) -> Self:
        """Return the recipe with shifts and flips that a network, trained without those in question, shows to keep the class."""

        def keeps(change: Callable[[Tensor], Tensor]) -> bool:
            return _keeps(outputs, _predicted(network, _changed(data.images(), data.shapes, change)), data)

        shift, flip = self.shift, self.flip
        side = min(min(height, width) for _, height, width in data.shapes)
        if shift is None:
            most = max(1, round(side / 30))
            # Along one axis: both at once cost a network without augmentation a seventh of its accuracy on digits.
            ways = [
                functools.partial(moved, down=i, right=k) for i, k in ((-most, 0), (most, 0), (0, -most), (0, most))
            ]
            shift = most if side > 2 * most and all(map(keeps, ways)) else 0
        if flip is None:
            flip = keeps(lambda images: images.flip(-1))
        return replace(self, shift=shift, flip=flip)

    # -------------------------------------------------------------------------------------------- network

    def _epochs(self, rows: int) -> int:
        return self.epochs or min(MOST_EPOCHS, max(1, round(EPOCHS * math.sqrt(ROWS / max(1, rows)))))

    def _compared(self, rows: int) -> int:
        return max(1, min(self._epochs(rows), round(COMPARED / max(1, rows))))

    def _batch(self, rows: int) -> int:
        return min(256, max(32, 2 ** round(math.log2(max(1, rows) / 32))))

    def memory(self, data: RecipeData, rows: int) -> int:
        return BYTES * self._weights(data)

    def _weights(self, data: RecipeData) -> int:
        model = Model(self._spec(data.images().shape[1] or 1, data.outputs), device="meta")
        return sum(parameter.numel() for parameter in model.parameters())

    def _seconds(self, data: RecipeData, rows: int, epochs: int) -> float:
        return epochs * (rows * self._weights(data) * PER_WEIGHT + rows / self._batch(rows) * PER_STEP)

    def _spec(self, pixels: int, outputs: int, *, dropout: bool = True) -> ModelSpec:
        width = self.width or min(256, max(16, 2 * pixels))

        def layer(rank: int, p: float | None) -> LayerSpec:
            head = HeadSpec(Taylor(2), KhatriRao(max(1, rank)), LinearRemainder(), bias=p is None)
            if p is None:
                return LayerSpec((head,))
            return LayerSpec((head,), output=(BatchNorm(), *([Dropout(p)] if dropout else [])))

        inputs = (Affine(), *([Dropout(0.1)] if dropout else []))
        layers = (passing(*inputs), layer(3 * width // 2, 0.2), layer(width, 0.2), layer(width // 2, None))
        return ModelSpec((pixels, pixels, width, width, outputs), layers)

    def _trained(self, data: RecipeData, epochs: int, seed: int, checkpoints: Checkpoints | None = None) -> Model:
        """Return a network in float32, trained on changed images."""
        model = Model(self._spec(data.images().shape[1], data.outputs), seed=seed, dtype=torch.float32)
        shift, scale = channel_scale(data)
        model.layers[0].output[0].load_state_dict(  # type: ignore[index, union-attr]
            {"shift": shift, "low": torch.zeros_like(shift), "scale": 1 / scale}
        )
        rows, size = len(data.x), self._batch(len(data.x))
        weights = () if data.weight is None else (data.weight.float(),)
        parts = (data.images(), data.y if data.classes else data.y.float(), *weights)
        loader = augmented(parts, size, self._change(data), drop_last=rows > size and rows % size == 1)
        loss = CrossEntropy(label_smoothing=SMOOTHING) if data.loss == CrossEntropy() else data.loss
        solver = AdamW(schedule="one_cycle", batch_size=size, learning_rate=0.003)
        with torch.enable_grad():
            config = TrainConfig(loss=loss, solver=solver, epochs=epochs, metrics=(), seed=seed)
            Fits(checkpoints=checkpoints)(model, loader, config)
        return model

    def _change(self, data: RecipeData) -> Callable[[Tensor], Tensor]:
        """Return the random changes of the pixels of a batch."""

        def change(images: Tensor) -> Tensor:
            images = flipped(images) if self.flip else images
            return shifted(images, self.shift) if self.shift else images

        return lambda pixels: _changed(pixels, data.shapes, change).float()


def _changed(pixels: Tensor, shapes: Sequence[tuple[int, int, int]], change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the pixels of rows, `(rows, p)`, with a change of each image."""
    parts = pixels.split([math.prod(shape) for shape in shapes], 1)
    images = [
        change(part.reshape(-1, *shape)).reshape(len(pixels), -1) for part, shape in zip(parts, shapes, strict=True)
    ]
    return images[0] if len(images) == 1 else torch.cat(images, 1)


def _predicted(network: Model, pixels: Tensor) -> Tensor:
    """Return the outputs of a network in float64."""
    return torch.cat([predict(network, part.float()).double() for part in pixels.split(8_192)])


def _keeps(before: Tensor, after: Tensor, data: RecipeData) -> bool:
    """Return whether changed images keep their targets: whether outputs for them are nearly as good as for unchanged ones."""
    if held_out_scores(after, data)[1] < KEPT * max(0.0, held_out_scores(before, data)[1]):
        return False
    if not data.classes:
        return True
    right = [torch.bincount(data.y[out.argmax(1) == data.y], minlength=data.classes) for out in (before, after)]
    many = right[0] >= FEW
    return bool((right[1] >= KEPT_OF_CLASS * right[0])[many].all())


def _as_head(network: Model, data: RecipeData) -> Model:
    """Return a network of the pixels as a model of all inputs of one layer, in float64: κ is the network, and ψ the identity."""
    count, outputs = network.in_features, network.out_features
    spec = ImageProductsHead(network.spec.widths[2])._spec(count, outputs, dropout=False)
    model, head = of_images(Layers(cast("tuple[int, ...]", spec.widths[1:]), spec.layers), data)
    inner = cast(Model, head.kappa["expansion"]["model"])
    inner.load_state_dict(network.state_dict())
    head.psi["matrix"].copy_(torch.eye(outputs, dtype=torch.float64))
    return model.eval()
