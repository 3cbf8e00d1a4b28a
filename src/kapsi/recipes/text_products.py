"""A product layer of texts: a linear head plus a few products of two linear functions of all inputs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kapsi.expansion import Taylor
from kapsi.function import option
from kapsi.modules import Model
from kapsi.recipes.base import CrossFit, Fold, RecipeData, row_losses
from kapsi.recipes.mixture import mixture
from kapsi.recipes.text_linear import LinearText, TextNaiveBayesHead, one_text_layer
from kapsi.reconciliation import KhatriRao
from kapsi.spec import HeadSpec

__all__ = ["TextProductsHead"]

WEAK = 0.3
"""Default penalty times the number of rows."""

STRONGER = (1e-2, 1e-3, 1e-4)
"""Penalties on the way to the linear part."""

MOST_STEPS = 40
"""Most steps of L-BFGS; held-out rows choose their number."""

PATIENCE = 8
"""Steps without gain of held-out loss that end a comparison."""

START = 0.1
"""Standard deviation of a linear function of a row before the first step."""

HISTORY = 6
"""Pairs of steps and gradients of L-BFGS."""

MOST_FACTORS = 2**23
"""Most inputs times rank: 64 MiB for each factor."""

Floats = npt.NDArray[np.float64]
Losses = Callable[[Tensor], Tensor]


class Products(NamedTuple):
    """f(x) = Σ_j θ_j x_j + b + Σ_k a_k ⟨u_k, x⟩ ⟨v_k, x⟩ for scaled inputs x.

    Attributes:
        theta: θ and b, `(m + 1, n)`.
        left: a, `(n, r)`.
        first, second: u and v, `(m, r)`.
    """

    theta: Floats
    left: Floats
    first: Floats
    second: Floats

    @classmethod
    def of(cls, vector: Floats, shape: Sequence[tuple[int, int]]) -> Self:
        """Return views of a vector of all values."""
        ends = np.cumsum([a * b for a, b in shape])
        parts = np.split(vector, ends[:-1])
        return cls(*(part.reshape(size) for part, size in zip(parts, shape, strict=True)))

    def vector(self) -> Floats:
        """Return all values as a vector."""
        return np.concatenate([part.ravel() for part in self])

    def outputs(self, rows: Any) -> Tensor:
        """Return f of sparse rows, `(rows, n)`."""
        products = (rows @ self.first) * (rows @ self.second)
        return torch.from_numpy(rows @ self.theta[:-1] + self.theta[-1] + products @ self.left.T)


@dataclass(frozen=True)
class TextProductsHead(TextNaiveBayesHead, name="text_products"):
    """A linear function of all inputs plus Σ_k a_k ⟨u_k, x⟩ ⟨v_k, x⟩: products of two linear functions, as of "not" and "good".

    Inputs are scaled as in `text_naive_bayes`. L-BFGS starts from the linear function and small factors; held-out rows choose
    the number of steps.

    Args:
        l2: the penalty λ of all coefficients and factors; None: 0.3 over the number of rows.
        rank: number of products.
        steps: number of steps; None: chosen by held-out rows, 0 to 40.

    Source: Rendle, Factorization Machines (ICDM 2010), with two factors of each product.
    """

    complexity: ClassVar[int] = 5
    explainable: ClassVar[bool] = False
    closed_form: ClassVar[bool] = False

    rank: int = option(4, minimum=1, maximum=256)
    steps: int | None = option(None, minimum=0, maximum=10_000)

    def reason_against(self, data: RecipeData) -> str | None:
        if data.text is not None and data.inputs * self.rank > MOST_FACTORS:
            return f"{data.inputs:,} inputs; {self.rank} products of at most {MOST_FACTORS // self.rank:,} are fitted"
        return super().reason_against(data)

    def cost(self, data: RecipeData, rows: int) -> float:
        entries = 0 if data.text is None else data.text.nnz + data.x.numel()
        each = 5e-9 * (4 * self.rank + 2 * data.outputs) * entries * rows / max(1, len(data.x))
        return super().cost(data, rows) + MOST_STEPS * each

    def memory(self, data: RecipeData, rows: int) -> int:
        factors = 2 * self.rank * (data.inputs + data.outputs)
        return super().memory(data, rows) + 8 * 2 * (HISTORY + 2) * factors

    @torch.no_grad()
    def fit(self, data: RecipeData, seed: int = 0) -> Model:
        recipe = self
        if self.steps is None:
            recipe = self.cross_fit(data, data.folds(3), seed).recipe  # type: ignore[assignment]
        scale = self.scale(data)
        fitted = _Fit(self, data, data.rows(), scale, seed)
        fitted.run(recipe.steps or 0, lambda step, products: None)
        return self._summed(fitted.products, scale, data)

    def _summed(self, products: Products, scale: Tensor, data: RecipeData) -> Model:
        """Return the linear head and the products as one layer."""
        linear = self.model(LinearText(scale, torch.from_numpy(products.theta)), data)
        model, head = one_text_layer(HeadSpec(Taylor(2), KhatriRao(self.rank)), data)
        first, second = (torch.from_numpy(part) * scale[:, None] for part in (products.first, products.second))
        head.psi["left"].copy_(torch.from_numpy(products.left))
        head.psi["first"].copy_(torch.cat([torch.zeros_like(first[:1]), first]).T)
        head.psi["second"].copy_(second.T)
        return mixture([linear, model.eval()], [1.0, 1.0])

    @torch.no_grad()
    def cross_fit(self, data: RecipeData, folds: Sequence[Fold], seed: int = 0) -> CrossFit:
        start = time.perf_counter()
        rows = data.rows()
        losses: list[list[float]] = []
        outputs: list[list[Tensor]] = []
        for train, test in folds:
            part = data.take(train)
            scale = self.scale(part)
            held_out = _scaled(rows[test.numpy()], scale)
            weight = torch.ones(len(test), dtype=torch.float64) if data.weight is None else data.weight[test]
            loss: list[float] = []
            out: list[Tensor] = []

            def judge(step: int, products: Products) -> None:
                out.append(products.outputs(held_out))  # noqa: B023
                loss.append((weight @ row_losses(out[-1], data.y[test], data.loss)).item())  # noqa: B023
                if self.steps is None and step - int(np.argmin(loss)) >= PATIENCE:  # noqa: B023
                    raise StopIteration

            _Fit(self, part, rows[train.numpy()], scale, seed).run(self.steps or MOST_STEPS, judge)
            losses.append(loss)
            outputs.append(out)
        count = min(map(len, losses))
        best = (
            self.steps if self.steps is not None else min(range(count), key=lambda i: sum(each[i] for each in losses))
        )
        held = data.x.new_full((len(data.x), data.outputs), torch.nan)
        for (_, test), values in zip(folds, outputs, strict=True):
            held[test] = values[min(best, len(values) - 1)]
        return CrossFit(held, replace(self, steps=best), time.perf_counter() - start)


class _Fit:
    """L-BFGS from the linear part.

    Args:
        recipe: the recipe.
        data: the rows.
        rows: all inputs of the rows, CSR.
        scale: factors of the columns.
        seed: seed of the first factors.
    """

    def __init__(self, recipe: TextProductsHead, data: RecipeData, rows: Any, scale: Tensor, seed: int) -> None:
        self.penalty, self.data, self.rows = recipe.l2 or WEAK / len(data.x), data, _scaled(rows, scale)
        self.transposed = self.rows.T
        weight = torch.ones(len(data.x), dtype=torch.float64) if data.weight is None else data.weight
        self.share = weight / weight.sum()
        *_, linear = recipe.path(data, rows, [p for p in STRONGER if p > self.penalty] + [self.penalty], 1e-4)
        generator = np.random.default_rng(seed)
        size = float(self.share @ torch.from_numpy(np.asarray(self.rows.multiply(self.rows).sum(1)).ravel()))
        first, second = generator.normal(0, START / math.sqrt(max(size, 1e-300)), (2, rows.shape[1], recipe.rank))
        left = generator.normal(size=(data.outputs, recipe.rank))
        if data.classes:
            left -= left.mean(0)
        self.products = Products(linear.theta.numpy(), left / np.linalg.norm(left, axis=0), first, second)
        self.shape = [part.shape for part in self.products]

    def run(self, steps: int, judge: Callable[[int, Products], None]) -> None:
        """Take steps of L-BFGS; `judge` receives the start and each step, and ends the fit by `StopIteration`."""
        from scipy.optimize import minimize

        taken = 0
        judge(0, self.products)

        def callback(vector: Floats) -> None:
            nonlocal taken
            taken += 1
            judge(taken, Products.of(vector, self.shape))

        if steps:
            options = {"maxiter": steps, "maxcor": HISTORY, "ftol": 0.0, "gtol": 0.0}
            start = self.products.vector()
            result = minimize(self._value, start, jac=True, method="L-BFGS-B", callback=callback, options=options)
            self.products = Products.of(result.x, self.shape)

    def _value(self, vector: Floats) -> tuple[float, Floats]:
        """Return the penalized loss and its gradient."""
        p = Products.of(vector, self.shape)
        u, v = self.rows @ p.first, self.rows @ p.second
        out = torch.from_numpy(self.rows @ p.theta[:-1] + p.theta[-1] + (u * v) @ p.left.T)
        with torch.enable_grad():
            total = self.share @ self.data.loss.rows(out.requires_grad_(), self.data.y)
        slope = torch.autograd.grad(total, out)[0].numpy()
        back = slope @ p.left
        gradient = Products(
            np.concatenate([self.transposed @ slope, slope.sum(0, keepdims=True)]),
            slope.T @ (u * v),
            self.transposed @ (back * v),
            self.transposed @ (back * u),
        )
        penalized = Products(p.theta.copy(), p.left, p.first, p.second)
        penalized.theta[-1] = 0
        value = total.item() + 0.5 * self.penalty * sum(float(np.vdot(part, part)) for part in penalized)
        return value, np.concatenate([(g + self.penalty * w).ravel() for g, w in zip(gradient, penalized, strict=True)])


def _scaled(rows: Any, scale: Tensor) -> Any:
    """Return rows with columns times a scale, CSR."""
    from scipy.sparse import csr_matrix

    return csr_matrix((rows.data * scale.numpy()[rows.indices], rows.indices, rows.indptr), shape=rows.shape)
