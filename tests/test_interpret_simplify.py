"""Simplified formulas of models of univariate functions, of any expansion."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import kapsi as kp
from kapsi.cli import main
from kapsi.data.tabular import write_table

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


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of Chebyshev polynomials of each column, with two targets."""
    folder, x = tmp_path_factory.mktemp("simplify"), np.random.default_rng(0).uniform(-1, 1, (60, 2))
    columns = {"a": x[:, 0], "b": x[:, 1], "y": 3 * np.exp(2 * x[:, 0]) + x[:, 1], "z": x[:, 1] ** 2 - 1}
    write_table(folder / "t.csv", {name: values.tolist() for name, values in columns.items()})
    spec = kp.rpn((None, None), kp.Chebyshev(8), bias=True)
    config = kp.tables.RunConfig(kp.tables.TableConfig(("y", "z")), spec, kp.TrainConfig(solver="ridge"))
    kp.tables.fit_table(folder / "t.csv", config, folder / "run")
    return folder / "run"


def test_the_simplified_formula_of_a_run_competes_by_its_description_length(run: Any) -> None:
    found = kp.interpret.short_formulas(kp.load_run(run), sources=("simplified", "model"))
    assert [row.source for row in found.rows] == ["simplified", "model"]
    assert found.rows[0].cost < found.rows[1].cost < math.inf
    assert found.best().formula.text(3) == "y = b + 3*exp(2*a)\nz = b**2 - 1"
    assert found.best().r2 > 0.9999


def test_the_command_prints_the_simplified_formula(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formula", str(run), "--simplify"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["y = b + 3*exp(2*a)", "z = b**2 - 1"]
    assert main(["formula", str(run), "--simplify", "--exact"]) == 2
    assert "--exact and --simplify exclude each other" in capsys.readouterr().err
    assert main(["formula", str(run), "--simplify", "--seconds", "0"]) == 2
    assert "no formula in 0 seconds; give it more" in capsys.readouterr().err


def test_an_edge_that_is_linear_within_the_noise_is_linear() -> None:
    noise = 0.1 * torch.randn(200, 1, generator=torch.Generator().manual_seed(1), dtype=F64)
    y = torch.exp(X[:, :1]) + X[:, 1:] / 2 + noise
    model = kp.Model(kp.rpn([2, 1], kp.Chebyshev(3), bias=True), seed=0, dtype=F64)
    kp.fit(model, (X, y), epochs=1, solver="ridge")
    found = kp.interpret.simplify(model, (X, y), functions=["x", "x^2", "exp", "tan"])
    assert found.edges[1].function.function == "x"
    assert found.r2["y"] > 0.99
    hurried = kp.interpret.simplify(model, (X, y), seconds=0)
    assert [edge.function.function for edge in hurried.edges] == ["x", "x"]


def test_logits_of_classes_have_noise() -> None:
    """A wiggle below the standard error of the log loss is dropped where classes are known, and kept where they are not."""
    model = kp.Model(kp.rpn([2, 2], kp.Chebyshev(3)), seed=0, dtype=F64)
    matrix = torch.zeros(2, 6, dtype=F64)
    matrix[1, 0], matrix[1, 4] = 2.0, 0.05  # 2 T1(x1) + 0.05 T3(x2)
    model.layers[0].heads[0].assign("reconciliation", matrix=matrix.tolist())
    codes = (X[:, 0] > 0).long()
    assert kp.interpret.simplify(model, (X, codes)).text() == "y1 = 0\ny2 = 2*x1"
    assert kp.interpret.simplify(model, X).r2["y2"] == pytest.approx(1, abs=1e-6)
