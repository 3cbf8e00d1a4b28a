"""Grid updates: move the grids of splines to the data and keep the function."""

from __future__ import annotations

import warnings

from torch import Tensor

from kapsi.errors import ScaleWarning
from kapsi.expansion.spline import BSpline
from kapsi.grids import TOLERANCE, update_grids
from kapsi.modules import Model, checked_rows


def update_grid(model: Model, x: Tensor) -> Model:
    """Move the grid of every spline to the data and keep the function, in place, layer by layer.

    `kapsi.calibrate` sets the new range or knots. The coefficients on the new grid are a least-squares fit to the old functions,
    at the data and, with 1% of the weight, at evenly spaced points of each new interval, so few data suffice. Functions
    representable on both grids are kept exactly. If the new grid is too coarse for the old function, the outputs change: an RMS
    change above 1% of the standard deviation of the outputs at x is reported as a warning.

    Args:
        model: see `kapsi.calibrate`; heads with a `BSpline` as κ, or as a part of `Extended`, or before Taylor polynomials in
            `Nested`, change. ψ must be dense, of low rank, a Kronecker kind supported by `kapsi.refine`, or masked by whole
            edges.
        x: inputs, `(rows, m)`.

    Returns:
        The same model.

    Raises:
        ScaleWarning: the outputs at x changed by more than 1% of their standard deviation (RMS).
        SpecError: no spline; a spline in a remainder, or before other parts of a `Nested` than polynomials; processing after κ;
            an unsupported ψ. The model is unchanged then.

    Source: the grid update of arXiv 2404.19756; there with a fit to the data alone.

    Example:
        >>> import torch, kapsi as kp
        >>> from kapsi.zoo import kan
        >>> model = kp.Model(kan.spec([1, 1], intervals=20), seed=0, dtype=torch.float64)
        >>> x = torch.rand(500, 1, dtype=torch.float64) / 2
        >>> before = model(x)
        >>> head = kan.update_grid(model, x).layers[0].heads[0]
        >>> torch.equal(head.kappa["range"], torch.stack((x.amin(0), x.amax(0))))
        True
        >>> bool((model(x) - before).abs().max() < 0.01)
        True
    """
    x = checked_rows(model, x, "update_grid")
    change = update_grids(model, x, "update_grid").change
    if change > TOLERANCE:
        splines = [head.spec.expansion for _, head in model.heads() if isinstance(head.spec.expansion, BSpline)]
        intervals = 2 * max(spline.intervals for spline in splines) if splines else "…"
        warnings.warn(
            f"update_grid: the outputs changed by {change:.2g} of their standard deviation (RMS): the new grids are coarser "
            f"than the old functions; add intervals first, as in kp.refine(model, intervals={intervals})",
            ScaleWarning,
            stacklevel=2,
        )
    return model
