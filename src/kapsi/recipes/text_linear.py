"""Linear heads of texts: TF-IDF of unigrams and bigrams beside all other inputs, plain or scaled by naive Bayes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kapsi.expansion import Identity, LogCountScale
from kapsi.function import option
from kapsi.modules import Head, Model
from kapsi.recipes.base import CrossFit, Fold, HeadRecipe, RecipeData, row_losses
from kapsi.recipes.linear_in_parameters import column_scale
from kapsi.recipes.solve import Basis, DesignRows, newton_path
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec

__all__ = ["TextHead", "TextLinearHead", "TextNaiveBayesHead", "one_text_layer"]

PENALTIES = tuple(10 ** (-i / 2) for i in range(2, 13))
"""Candidates for l2, strong ones first: 0.1 to 10⁻⁶."""

SLIGHT = 1e-3
"""Relative gain of held-out loss from which a weaker penalty counts as better."""

WORSE = 2
"""Penalties in a row without gain of held-out loss after which weaker ones are not tried."""

ROUGH, EXACT = 1e-3, 1e-5
"""Relative decrease of the loss that ends the Newton steps, in comparisons and in the fit."""

VECTORS = 10
"""Vectors as long as the coefficients that a Newton step holds."""

PRODUCTS = 250
"""Products with the rows in a fit, for the estimate of time."""


class SparseDesign(DesignRows):
    """Rows of sparse inputs with a last column of ones, as `newton_path` needs them.

    Args:
        rows: (rows, m) CSR in float64.
        scale: factors of the columns, `(m,)`.
        share: weights of the rows with sum 1.
    """

    direct = False

    def __init__(self, rows: Any, scale: Tensor, share: Tensor) -> None:
        from scipy.sparse import csr_matrix

        data = rows.data * scale.numpy()[rows.indices]
        self.matrix = csr_matrix((data, rows.indices, rows.indptr), shape=rows.shape)
        self.transposed = self.matrix.T
        squares = np.bincount(rows.indices, data**2 * np.repeat(share.numpy(), np.diff(rows.indptr)), rows.shape[1])
        empty = torch.zeros(0, dtype=torch.float64)
        self.basis, self.share, self.width = Basis(empty, empty, torch.from_numpy(squares)), share, rows.shape[1] + 1

    def times(self, theta: Tensor) -> Tensor:
        return torch.from_numpy(self.matrix @ theta[:-1].numpy()) + theta[-1]

    def gradient(self, values: Tensor) -> Tensor:
        return torch.cat([torch.from_numpy(self.transposed @ values.numpy()), values.sum(0, keepdim=True)])


class LinearText(NamedTuple):
    """Coefficients of all inputs.

    Attributes:
        scale: factors of the columns, `(m,)`.
        theta: coefficients of the scaled columns, and the bias, `(m + 1, n)`.
    """

    scale: Tensor
    theta: Tensor

    def outputs(self, rows: Any) -> Tensor:
        """Return the outputs for sparse rows, `(rows, n)`."""
        return torch.from_numpy(rows @ (self.scale[:, None] * self.theta[:-1]).numpy()) + self.theta[-1]


@dataclass(frozen=True)
class TextHead(HeadRecipe):
    """Base of linear heads of texts; a subclass defines `evidence`, and may define `model`.

    Minimizes the mean loss plus (l2/2)‖θ‖². Columns of terms are scaled by the evidence; numbers to a mean square of one over their
    number, so that all of them together weigh as much as a text.

    Args:
        l2: the penalty λ, 10⁻¹² to 10¹²; None: chosen by held-out rows.
    """

    reads_text: ClassVar[bool] = True
    explainable: ClassVar[bool] = True
    closed_form: ClassVar[bool] = True

    l2: float | None = option(None, minimum=1e-12, maximum=1e12)

    def evidence(self, data: RecipeData) -> Tensor:
        """Return the factors of the columns of terms, `(t,)`."""
        return torch.ones(data.text.shape[1], dtype=torch.float64)

    def reason_against(self, data: RecipeData) -> str | None:
        if data.text is None:
            return "there are no texts"
        if not data.loss.has_curvature:
            return f"{type(self).name} needs a loss with curvature, and {data.loss.name} has none"
        return None

    def cost(self, data: RecipeData, rows: int) -> float:
        entries = 0 if data.text is None else data.text.nnz + data.x.numel()
        each = 5e-9 * max(1, data.outputs - 1) * entries * rows / max(1, len(data.x))
        return 0.05 + PRODUCTS * each

    def memory(self, data: RecipeData, rows: int) -> int:
        entries = 0 if data.text is None else data.text.nnz + data.x.numel()
        # The rows and their transpose, and the vectors of a Newton step.
        return 24 * entries + 8 * VECTORS * data.inputs * data.outputs

    def scale(self, data: RecipeData) -> Tensor:
        """Return the factors of all columns, `(m,)`."""
        numbers = 1 / (column_scale(data)[1] * math.sqrt(data.x.shape[1]))
        return torch.cat([numbers, self.evidence(data)])

    def path(self, data: RecipeData, rows: Any, penalties: Sequence[float], tolerance: float) -> Iterator[LinearText]:
        """Yield the coefficients for each penalty in turn."""
        weight = torch.ones(len(data.x), dtype=torch.float64) if data.weight is None else data.weight
        scale = self.scale(data)
        design = SparseDesign(rows, scale, weight / weight.sum())
        for theta in newton_path(design, data.y, data.loss, data.outputs, penalties, tolerance, ROUGH):
            yield LinearText(scale, theta)

    @torch.no_grad()
    def fit(self, data: RecipeData, seed: int = 0) -> Model:
        if self.l2 is None:
            recipe = self.cross_fit(data, data.folds(3), seed).recipe
            return recipe.fit(data, seed)
        stronger = [penalty for penalty in PENALTIES if penalty > 1.1 * self.l2][-4:]
        *_, last = self.path(data, data.rows(), [*stronger, self.l2], EXACT)
        return self.model(last, data)

    def model(self, fitted: LinearText, data: RecipeData) -> Model:
        """Return the model with these coefficients."""
        model, head = one_text_layer(HeadSpec(Identity(), bias=True), data)
        return assigned(model, head, fitted.scale[:, None] * fitted.theta[:-1], fitted.theta[-1])

    @torch.no_grad()
    def cross_fit(self, data: RecipeData, folds: Sequence[Fold], seed: int = 0) -> CrossFit:
        start = time.perf_counter()
        rows = data.rows()
        losses: list[dict[float, float]] = []
        outputs: list[dict[float, Tensor]] = []
        for train, test in folds:
            loss, out = {}, {}
            least, useless = math.inf, 0
            weight = torch.ones(len(test), dtype=torch.float64) if data.weight is None else data.weight[test]
            held_out = rows[test.numpy()]
            penalties = PENALTIES if self.l2 is None else (self.l2,)
            fits = self.path(data.take(train), rows[train.numpy()], penalties, ROUGH)
            for penalty, fitted in zip(penalties, fits, strict=True):
                out[penalty] = fitted.outputs(held_out)
                loss[penalty] = float(weight @ row_losses(out[penalty], data.y[test], data.loss))
                if loss[penalty] < least * (1 - SLIGHT):
                    least, useless = loss[penalty], 0
                elif (useless := useless + 1) >= WORSE:
                    break
            losses.append(loss)
            outputs.append(out)
        common = [penalty for penalty in losses[0] if all(penalty in loss for loss in losses)]
        best = min(common, key=lambda penalty: sum(loss[penalty] for loss in losses))
        held = data.x.new_full((len(data.x), data.outputs), torch.nan)
        for (_, test), values in zip(folds, outputs, strict=True):
            held[test] = values[best]
        return CrossFit(held, replace(self, l2=best), time.perf_counter() - start)


def one_text_layer(head: HeadSpec, data: RecipeData) -> tuple[Model, Head]:
    """Return a model of one head for all inputs, in float64 and without values, and the head."""
    spec = ModelSpec((data.inputs, data.outputs), (LayerSpec((head,)),))
    model = Model(spec, device="meta", dtype=torch.float64).to_empty(device="cpu")
    return model, model.check_layers("recipe")[0].check_heads("recipe")[0]


def assigned(model: Model, head: Head, matrix: Tensor, bias: Tensor) -> Model:
    """Set ψ from coefficients `(m, n)`, and the bias."""
    head.psi["matrix"].copy_(matrix.T)
    if head.bias is not None:
        head.bias.copy_(bias)
    return model.eval()


@dataclass(frozen=True)
class TextLinearHead(TextHead, name="text_linear"):
    """A linear function of the TF-IDF of unigrams and bigrams, and of all other inputs.

    Args:
        l2: see `TextHead`.
    """

    complexity: ClassVar[int] = 1


@dataclass(frozen=True)
class TextNaiveBayesHead(TextHead, name="text_naive_bayes"):
    """A linear function of TF-IDF columns scaled by naive Bayes, and of all other inputs.

    Terms that tell classes apart are shrunk least.

    The scale is (b + evidence)/(b + 1). For classes the evidence is the mean of the absolute log-count ratios
    (`log_count_scale`); for real targets, in units of their standard deviation, the absolute mean of the rows with the
    term, shrunk to zero by one row, and averaged over targets.

    Args:
        l2: see `TextHead`.
        offset: b; large values make all scales alike.

    Source: Wang and Manning, Baselines and Bigrams (ACL 2012), aclanthology P12-2018.
    """

    complexity: ClassVar[int] = 1

    offset: float = option(0.5, minimum=0.0, maximum=1e6)

    def evidence(self, data: RecipeData) -> Tensor:
        weight = torch.ones(len(data.x), dtype=torch.float64) if data.weight is None else data.weight
        if data.classes:
            member = F.one_hot(data.y, data.classes).double() * weight[:, None]
            counts = _sums(data.text, member)
            inside, outside = counts + 1, counts.sum(0) - counts + 1
            ratio = (inside / inside.sum(1, keepdim=True)).log() - (outside / outside.sum(1, keepdim=True)).log()
        else:
            share = (weight / weight.sum())[:, None]
            centered = data.y - (share * data.y).sum(0)
            deviation = (share * centered.square()).sum(0).sqrt().clamp_min(1e-300)
            sums = _sums(data.text, torch.cat([centered / deviation * weight[:, None], weight[:, None]], 1))
            ratio = sums[:-1] / (sums[-1] + 1)
        return (self.offset + ratio.abs().mean(0)) / (self.offset + 1)

    def model(self, fitted: LinearText, data: RecipeData) -> Model:
        model, head = one_text_layer(HeadSpec(LogCountScale(self.offset), bias=True), data)
        numbers, terms = fitted.scale.split([data.x.shape[1], data.text.shape[1]])
        head.assign("expansion", scale=torch.cat([torch.ones_like(numbers), terms]))
        matrix = torch.cat([numbers, torch.ones_like(terms)])[:, None] * fitted.theta[:-1]
        return assigned(model, head, matrix, fitted.theta[-1])


def _sums(text: Any, values: Tensor) -> Tensor:
    """Return the sums of values `(rows, k)` over the rows with each term, `(k, t)`."""
    from scipy.sparse import csr_matrix

    present = csr_matrix((np.ones(text.nnz), text.indices, text.indptr), shape=text.shape)
    return torch.from_numpy(np.ascontiguousarray((present.T @ values.numpy()).T))
