"""Simplified formulas of models of univariate functions, of any expansion."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kapsi as kp

F64 = torch.float64
X = 2 * torch.rand(200, 2, generator=torch.Generator().manual_seed(0), dtype=F64) - 1
Y = torch.exp(X[:, :1]) + 3 * torch.sin(2 * X[:, 1:])


@pytest.mark.parametrize(
    "expansion",
    [kp.BSpline(8), kp.Chebyshev(9), kp.Fourier(4), "mexican_hat", kp.Extended((kp.Identity(), kp.BSpline(8)))],
)
def test_edges_of_any_expansion_become_elementary_functions(expansion: Any) -> None:
    model = kp.calibrate(kp.Model(kp.rpn([2, 1], expansion, bias=True), seed=0, dtype=F64), X)
    kp.fit(model, (X, Y), epochs=20)
    found = kp.interpret.simplify(model, (X, Y))
    assert [edge.function.function for edge in found.edges] == ["exp", "sin"]
    assert found.text() == "y = exp(x1) + 3*sin(2*x2)"
    assert found.r2["y"] > 0.9999
    assert found.target_r2 is not None
    assert found.target_r2["y"] == pytest.approx(1, abs=1e-12)
    assert repr(found).splitlines()[0].startswith("layer 0  0 → 0  exp")


def test_terms_are_dropped_and_layers_are_substituted() -> None:
    """Activations between layers stay; an edge of a millionth of the variance goes."""
    model = kp.Model(kp.rpn([2, 1, 1], kp.Identity(), bias=True, output="tanh"), seed=0, dtype=F64)
    first, last = (layer.heads[0] for layer in model.layers)
    first.assign("reconciliation", matrix=[[1.0, 1e-12]])
    last.assign("reconciliation", matrix=[[2.0]])
    with torch.no_grad():
        first.bias.fill_(0.5)
        last.bias.fill_(-1.0)
    assert kp.interpret.simplify(model, X).text() == "y = 2*tanh(x1 + 1/2) - 1"
    assert kp.interpret.simplify(model, X, seconds=0).r2["y"] == pytest.approx(1)


@pytest.mark.parametrize("heads", [["additive"], ["linear"]])
def test_tables_have_formulas_in_their_units(heads: list[str]) -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(1, 5, (150, 2))
    y = 3 * x[:, 0] + 40 + 0.01 * rng.standard_normal(150)
    fitted = kp.RPNRegressor(heads=heads).fit(x, y)
    found = kp.interpret.simplify(fitted, (x, y))
    assert found.text(3) == "y = 3*x0 + 40"
    np.testing.assert_allclose(found.formula(x)[:, 0], fitted.predict(x), atol=0.02)


def test_what_cannot_be_simplified_is_named() -> None:
    with pytest.raises(kp.DataError, match="the targets must be finite"):
        kp.interpret.simplify(kp.Model(kp.rpn([2, 1], kp.Identity()), dtype=F64), (X, torch.full_like(Y, float("nan"))))
    with pytest.raises(kp.SpecError, match=r"layers.0.heads.0: .*Taylor mixes inputs"):
        kp.interpret.simplify(kp.Model(kp.rpn([2, 1], kp.Taylor(2)), dtype=F64), X)
    with pytest.raises(kp.SpecError, match="did you mean 'sin'"):
        kp.interpret.simplify(kp.Model(kp.rpn([2, 1], kp.Identity()), dtype=F64), X, functions=["sine"])
    with pytest.raises(kp.SpecError, match="500 edges, at most 400 are simplified"):
        kp.interpret.simplify(kp.Model(kp.rpn([2, 250], kp.Identity()), dtype=F64), X)
    with pytest.raises(kp.SpecError, match="processed by activations"):
        kp.interpret.edge_formulas(kp.Model(kp.rpn([2, 2, 1], kp.Identity(), output="tanh"), dtype=F64), X)
