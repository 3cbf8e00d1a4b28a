"""A Kolmogorov–Arnold network on sparse inputs: the same function as on dense ones, at the price of the entries that are there.

A word that is not in a text has the value 0 and the edges φ(0), the same for all texts. The first layer is therefore

    y_o = Σ_i φ_oi(0) + Σ_{i: x_i ≠ 0} (φ_oi(x_i) − φ_oi(0)),

with the sum over all inputs made once a step and not once a row. Nothing is left out or approximated.

That first sum may be what makes such a network hard to train: a step of Adam can move all of its terms by about the learning
rate η, and where they agree in sign their sum by η times the number of inputs, ten thousand and more. `centered` leaves it out,
y_o = Σ_i (φ_oi(x_i) − φ_oi(0)), which is the same set of functions up to a constant.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kapsi.calibrate import calibrate
from kapsi.errors import SpecError
from kapsi.expansion.spline import BSpline
from kapsi.features import SparseFeatures
from kapsi.modules import Head, Layer, Model
from kapsi.process import SiLU
from kapsi.remainder import LinearRemainder, ZeroRemainder

__all__ = ["SparseKAN"]


class SparseKAN(nn.Module):
    """A network of `kapsi.zoo.kan.spec` that takes a `torch.sparse_csr` tensor `(rows, m)`.

    Args:
        model: the network, which keeps its parameters; uniform knots, SiLU as the base function or none.
        centered: whether φ(x) − φ(0) stands for φ(x) in the first layer.

    Raises:
        SpecError: another model.
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

    def _head(self) -> Head:
        return cast(Head, cast(Layer, self.model.layers[0]).heads[0])

    def first(self, x: Tensor) -> Tensor:
        """Return what the first layer makes of sparse inputs."""
        head, made = self._head(), SparseFeatures.of(x)
        psi, ends, m = head.psi["matrix"], head.kappa["range"], made.width
        functions = psi.shape[-1] // m
        # Each entry is a column of its own, with the range of the column that it stands in.
        there = self.splines(made.values.unsqueeze(0), {"range": ends[:, made.indices]}).dense().view(functions, -1)
        none = self.splines(ends.new_zeros(1, m), {"range": ends}).dense().view(functions, m)
        places = torch.arange(functions, device=x.device).unsqueeze(1) * m + made.indices
        changes = SparseFeatures(
            made.starts * functions, places.T.reshape(-1), (there - none[:, made.indices]).T.reshape(-1), functions * m
        )
        y = changes.matmul(psi)
        if not self.centered:
            y = y + psi @ none.reshape(-1)
        if self.based:
            y = y + SparseFeatures(made.starts, made.indices, F.silu(made.values), m).matmul(head.pi["matrix"])
        return y if head.bias is None else y + head.bias

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for layer in list(self.model.layers)[1:]:
            y = layer(y)
        return y

    @torch.no_grad()
    def calibrate(self, x: Tensor) -> None:
        """Set the range of every input, layer by layer, to that of the data; that of a word begins at 0, where it is not there."""
        made = SparseFeatures.of(x)
        ends = self._head().kappa["range"]
        low, high = (
            ends.new_zeros(made.width).scatter_reduce_(0, made.indices, made.values.to(ends.dtype), how)
            for how in ("amin", "amax")
        )
        high = torch.where(high > low, high, low + 1)  # a word that is in no row
        self._head().assign("expansion", range=torch.stack((low, high)))
        y = self.first(x)
        for layer in list(self.model.layers)[1:]:
            y = calibrate(cast(Layer, layer), y)(y)
