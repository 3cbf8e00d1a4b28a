"""The linear head of images, and what all heads of images share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from kapsi.expansion import Expansion, Identity, SelectedInputs
from kapsi.function import option
from kapsi.modules import Head, Model
from kapsi.recipes.base import CrossFit, Fold, HeadRecipe, RecipeData, row_losses
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec

__all__ = [
    "ImageHead",
    "ImageLinearHead",
    "channel_scale",
    "cross_fit_penalties",
    "lbfgs_path",
    "of_images",
    "row_share",
]

PENALTIES = (1.0, 0.1, 0.01, 1e-3, 1e-4)
"""Candidates for l2, strong ones first."""

STEPS = 20
"""Steps of L-BFGS for each penalty, from the coefficients of the stronger one."""

COMPARED = 12_000
"""Most training rows of a comparison."""


class ImageHead(HeadRecipe):
    """Base of heads of images."""

    reads_images: ClassVar[bool] = True

    def reason_against(self, data: RecipeData) -> str | None:
        return "there are no images" if data.pixels is None else None


@dataclass(frozen=True)
class ImageLinearHead(ImageHead, name="image_linear"):
    """A linear function of the pixels of all images.

    Minimizes the mean loss plus (l2/2)‖θ‖² by L-BFGS; pixels are standardized channel by channel.

    Args:
        l2: the penalty λ, 10⁻¹² to 10¹²; None: chosen by held-out rows.
    """

    complexity: ClassVar[int] = 1
    explainable: ClassVar[bool] = True
    closed_form: ClassVar[bool] = True
    superseded: ClassVar[bool] = True

    l2: float | None = option(None, minimum=1e-12, maximum=1e12)

    def cost(self, data: RecipeData, rows: int) -> float:
        return self.fit_cost(data, min(rows, COMPARED))

    def fit_cost(self, data: RecipeData, rows: int) -> float:
        pixels = data.images().shape[1]
        return 0.05 + 2e-10 * len(PENALTIES) * STEPS * rows * pixels * data.outputs

    def memory(self, data: RecipeData, rows: int) -> int:
        return 12 * rows * data.images().shape[1]

    @torch.no_grad()
    def fit(self, data: RecipeData, seed: int = 0) -> Model:
        if self.l2 is None:
            return self.cross_fit(data, data.folds(3), seed).recipe.fit(data, seed)
        stronger = [penalty for penalty in PENALTIES if penalty > 1.1 * self.l2]
        shift, scale = channel_scale(data)
        *_, theta = lbfgs_path(_design(data, shift, scale), data, (*stronger, self.l2))
        model, head = of_images(Identity(), data, bias=True)
        matrix = theta[:-1].double() / scale.double()[:, None]
        head.psi["matrix"].copy_(matrix.T)
        if head.bias is not None:
            head.bias.copy_(theta[-1].double() - shift.double() @ matrix)
        return model.eval()

    @torch.no_grad()
    def cross_fit(self, data: RecipeData, folds: Sequence[Fold], seed: int = 0) -> CrossFit:
        def held_out_outputs(part: RecipeData, held_out: RecipeData, penalties: Sequence[float]) -> Iterator[Tensor]:
            shift, scale = channel_scale(part)
            for theta in lbfgs_path(_design(part, shift, scale), part, penalties):
                yield _outputs(_design(held_out, shift, scale), theta).double()

        return cross_fit_penalties(self, PENALTIES, COMPARED, held_out_outputs, data, folds, seed)


def cross_fit_penalties(
    head: Any,
    candidates: Sequence[float],
    compared: int,
    held_out_outputs: Callable[[RecipeData, RecipeData, Sequence[float]], Iterator[Tensor]],
    data: RecipeData,
    folds: Sequence[Fold],
    seed: int,
) -> CrossFit:
    """Return the held-out outputs of a linear head of images at its best penalty; fits see a sample of the training rows.

    Args:
        head: a head with the option `l2`, None for all candidates.
        candidates: penalties, strong ones first.
        compared: most training rows of a fit.
        held_out_outputs: yields the outputs of held-out rows for each penalty, given training rows, held-out rows and penalties.
        data, folds, seed: see `HeadRecipe.cross_fit`.
    """
    start = time.perf_counter()
    penalties = candidates if head.l2 is None else (head.l2,)
    outputs = torch.full((len(penalties), len(data.x), data.outputs), torch.nan, dtype=torch.float64)
    losses = torch.zeros(len(penalties), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for train, test in folds:
        some = train[torch.randperm(len(train), generator=generator)[:compared]]
        part, held_out = data.take(some), data.take(test)
        for i, values in enumerate(held_out_outputs(part, held_out, penalties)):
            outputs[i, test] = values
            losses[i] += row_share(held_out) @ row_losses(values, data.y[test], data.loss)
    best = int(losses.argmin())
    return CrossFit(outputs[best], replace(head, l2=penalties[best]), time.perf_counter() - start)


def lbfgs_path(x: Tensor, data: RecipeData, penalties: Sequence[float]) -> Iterator[Tensor]:
    """Yield the coefficients of a linear function and the bias for each penalty, `(p + 1, n)` float32, by L-BFGS.

    Args:
        x: inputs of the rows, `(rows, p)` float32.
        data: the rows.
        penalties: λ of the penalty (λ/2)‖θ‖², strong ones first; a fit starts from the last one.
    """
    from scipy.optimize import minimize

    share, shape = row_share(data), (x.shape[1] + 1, data.outputs)
    vector = np.zeros(math.prod(shape))

    def value(vector: Any, penalty: float) -> tuple[float, Any]:
        theta = torch.from_numpy(vector).reshape(shape)
        out = _outputs(x, theta.float()).double()
        with torch.enable_grad():
            total = share @ row_losses(out.requires_grad_(), data.y, data.loss)
        slope = torch.autograd.grad(total, out)[0]
        gradient = torch.cat([(x.T @ slope.float()).double(), slope.sum(0, keepdim=True)])
        gradient[:-1] += penalty * theta[:-1]
        return total.item() + 0.5 * penalty * theta[:-1].square().sum().item(), gradient.numpy().ravel()

    for penalty in penalties:
        options = {"maxiter": STEPS}
        vector = minimize(value, vector, (penalty,), jac=True, method="L-BFGS-B", options=options).x
        yield torch.from_numpy(vector).reshape(shape).float()


def _design(data: RecipeData, shift: Tensor, scale: Tensor) -> Tensor:
    """Return standardized pixels, `(rows, p)` float32."""
    return (data.images().float() - shift) / scale


def _outputs(x: Tensor, theta: Tensor) -> Tensor:
    return torch.addmm(theta[-1], x, theta[:-1])


def channel_scale(data: RecipeData) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the channel of each pixel, `(p,)` float32; 1 instead of 0."""
    shifts, scales, start = [], [], 0
    for channels, height, width in data.shapes:
        size = height * width
        for _ in range(channels):
            part = data.images()[:, start : start + size]
            levels = torch.bincount(part.flatten().int(), minlength=256).double()
            share, level = levels / levels.sum(), torch.arange(256, dtype=torch.float64)
            mean = share @ level
            deviation = (share @ (level - mean).square()).sqrt()
            shifts.append(mean.float().expand(size))
            scales.append((deviation if deviation > 0 else torch.ones_like(mean)).float().expand(size))
            start += size
    return torch.cat(shifts), torch.cat(scales)


def row_share(data: RecipeData) -> Tensor:
    """Return the weights of the rows with sum 1, `(rows,)`."""
    weight = torch.ones(len(data.x), dtype=torch.float64) if data.weight is None else data.weight
    return weight / weight.sum()


def of_images(kappa: Expansion, data: RecipeData, *, bias: bool = False) -> tuple[Model, Head]:
    """Return a model of one layer and one head whose κ takes the pixels, in float64 and without values of ψ, and the head."""
    count = data.images().shape[1]
    head = HeadSpec(SelectedInputs(kappa, count), bias=bias)
    spec = ModelSpec((data.inputs, data.outputs), (LayerSpec((head,)),))
    model = Model(spec, device="meta", dtype=torch.float64).to_empty(device="cpu")
    only = model.check_layers("recipe")[0].check_heads("recipe")[0]
    only.kappa["inputs"].fill_(data.inputs)
    only.kappa["selection"].copy_(torch.arange(data.inputs - count, data.inputs))
    return model, only
