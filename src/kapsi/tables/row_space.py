"""Linear models of more inputs than rows, fitted in coordinates of the rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kapsi.expansion import Identity
from kapsi.modules import Model
from kapsi.reconciliation import Dense
from kapsi.spec import HeadSpec, ModelSpec
from kapsi.training.config import TrainConfig
from kapsi.training.solvers import Solver

MAX_ROWS = 4_000
"""Most rows of a Gram matrix: 128 MB in float64, about a minute for its eigenvectors."""


def is_linear(spec: ModelSpec) -> bool:
    """Return whether a model is Wx, or Wx + b, with the dense matrix W as the only penalized parameter."""
    heads = [head for layer in spec.layers for head in layer.heads]
    return [replace(head, bias=False, init="smooth") for head in heads] == [HeadSpec(Identity(), Dense())]


def reduces(spec: ModelSpec, config: TrainConfig, rows: int, inputs: int) -> bool:
    """Return whether `RowSpace` has the same solutions as the inputs themselves, and fewer coordinates.

    Args:
        spec: the model.
        config: training options; a solver that is not `auto` must not depend on rotations.
        rows: number of training rows.
        inputs: number of inputs.
    """
    invariant = not isinstance(config.solver, Solver) or config.solver.rotation_invariant
    return (
        invariant and not config.l1 and not config.group_l1 and rows < inputs and rows <= MAX_ROWS and is_linear(spec)
    )


@dataclass(frozen=True, eq=False)
class RowSpace:
    """Coordinates z = x V/s of rows x in an orthonormal basis V of the space that they span.

    The L2 penalty of W x vanishes in directions orthogonal to all training rows, so the minimum has the form W = A Vᵀ/s, for each
    penalty: the model A z with the penalty λ/s² of A has the same loss. One eigendecomposition of x xᵀ, (rows, rows), gives the
    coordinates for all penalties and folds.

    Args:
        z: coordinates, (rows, r).
        x: the rows, (rows, inputs).
        back: matrix (rows, r) with V/s = xᵀ back.
        scale: s.
    """

    z: Tensor
    x: Tensor
    back: Tensor
    scale: float

    @classmethod
    def of(cls, x: Tensor, *, scaled: bool) -> RowSpace:
        """Return the coordinates of rows.

        Args:
            x: rows, (rows, inputs) float64.
            scaled: choose s for coordinates with a mean square of 1, as standardized inputs have; otherwise s is 1.

        Example:
            >>> x = torch.tensor([[3.0, 0.0, 4.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
            >>> space = RowSpace.of(x, scaled=False)
            >>> torch.allclose(space.z @ space.z.T, x @ x.T)
            True
        """
        values, vectors = torch.linalg.eigh(x @ x.T)
        kept = values > values[-1] * 16 * len(x) * torch.finfo(x.dtype).eps
        values, vectors = values[kept], vectors[:, kept]
        scale = math.sqrt(float(values.mean()) / len(x)) if scaled and len(values) else 1.0
        lengths = values.sqrt()
        return cls(vectors * (lengths / scale), x, vectors / (lengths * scale), scale)

    def expand(self, model: Model, spec: ModelSpec) -> Model:
        """Return the model of the inputs for a fitted model of the coordinates.

        Args:
            model: a linear model of the coordinates.
            spec: specification of the same model for all inputs.
        """
        whole = Model(spec, device="meta").to_empty(device=self.x.device).to(self.x.dtype)
        state = {
            name: (tensor @ self.back.T) @ self.x if tensor.dim() == 2 else tensor
            for name, tensor in model.state_dict().items()
        }
        whole.load_state_dict(state)
        return whole
