"""A Kolmogorov–Arnold network on sparse inputs: the same function as on dense inputs, at the cost of the non-zero entries.

A word absent from a document has the value 0 and the edges φ(0), the same for all documents. The first layer is therefore

    y_o = Σ_i φ_oi(0) + Σ_{i: x_i ≠ 0} (φ_oi(x_i) − φ_oi(0)),

with the sum over all inputs computed once per step instead of once per row. The identity is exact.

The first sum can make the network hard to train: an Adam step changes each term by about the learning rate η, and the sum
of terms of equal sign by η times the number of inputs, ten thousand and more. `centered` drops the sum,
y_o = Σ_i (φ_oi(x_i) − φ_oi(0)): the same set of functions up to a constant.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from kapsi.calibrate import calibrate
from kapsi.errors import SpecError
from kapsi.expansion.spline import BSpline
from kapsi.features import SparseFeatures
from kapsi.modules import Head, Layer, Model
from kapsi.process import SiLU
from kapsi.remainder import LinearRemainder, ZeroRemainder


class _ByColumns(nn.Module):
    """A matrix stored by columns: entries gather and scatter whole columns, and a step takes a third of the time."""

    def forward(self, columns: Tensor) -> Tensor:
        return columns.mT

    def right_inverse(self, matrix: Tensor) -> Tensor:
        return matrix.mT.contiguous()


class SparseKAN(nn.Module):
    """A network of `kapsi.zoo.kan.spec` for `torch.sparse_csr` inputs `(rows, m)`.

    Args:
        model: the network; uniform knots, base function SiLU or none.
        centered: use φ(x) − φ(0) instead of φ(x) in the first layer.

    Raises:
        SpecError: any other model.
    """

    def __init__(self, model: Model, *, centered: bool = False) -> None:
        super().__init__()
        self.model, self.centered = model, centered
        head = self._head()
        spec = head.spec
        splines, remainder = spec.expansion, spec.remainder
        based = isinstance(remainder, LinearRemainder) and isinstance(remainder.before, SiLU)
        if (
            not isinstance(splines, BSpline)
            or splines.knots != "uniform"
            or not (based or isinstance(remainder, ZeroRemainder))
        ):
            raise SpecError(
                "SparseKAN: expected a network of kapsi.zoo.kan.spec with uniform knots and base 'silu' or None"
            )
        self.splines, self.based = splines, based
        for matrices in (head.psi, head.pi) if based else (head.psi,):
            parametrize.register_parametrization(matrices, "matrix", _ByColumns())

    def _head(self) -> Head:
        return cast(Head, cast(Layer, self.model.layers[0]).heads[0])

    def first(self, x: Tensor) -> Tensor:
        """Return the outputs of the first layer on sparse inputs."""
        head, entries = self._head(), SparseFeatures.of(x)
        psi, ends, m = head.psi["matrix"], head.kappa["range"], entries.width
        functions = psi.shape[-1] // m
        # Each entry is a separate column, with the range of the original column.
        at_entries = (
            self.splines(entries.values.unsqueeze(0), {"range": ends[:, entries.indices]}).dense().view(functions, -1)
        )
        at_zero = self.splines(ends.new_zeros(1, m), {"range": ends}).dense().view(functions, m)
        columns = torch.arange(functions, device=x.device).unsqueeze(1) * m + entries.indices
        changes = SparseFeatures(
            entries.starts * functions,
            columns.T.reshape(-1),
            (at_entries - at_zero[:, entries.indices]).T.reshape(-1),
            functions * m,
        )
        y = changes.matmul(psi)
        if not self.centered:
            y = y + at_zero.reshape(-1) @ psi.mT
        if self.based:
            y = y + SparseFeatures(entries.starts, entries.indices, F.silu(entries.values), m).matmul(head.pi["matrix"])
        return y if head.bias is None else y + head.bias

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for layer in list(self.model.layers)[1:]:
            y = layer(y)
        return y

    @torch.no_grad()
    def calibrate(self, x: Tensor) -> None:
        """Set the range of every input to the range of the data, layer by layer; ranges of words start at 0, for absent words."""
        entries = SparseFeatures.of(x)
        ends = self._head().kappa["range"]
        low, high = (
            ends.new_zeros(entries.width).scatter_reduce_(0, entries.indices, entries.values.to(ends.dtype), how)
            for how in ("amin", "amax")
        )
        high = torch.where(high > low, high, low + 1)  # a word absent from all rows
        self._head().assign("expansion", range=torch.stack((low, high)))
        y = self.first(x)
        for layer in list(self.model.layers)[1:]:
            y = calibrate(cast(Layer, layer), y)(y)
