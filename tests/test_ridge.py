"""The closed form, Newton's method and alternating least squares, against references that know nothing of them."""

from __future__ import annotations

import copy
import itertools
import json
import math
import threading
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, LogisticRegression, RidgeCV
from sklearn.linear_model import Ridge as Reference
from torch import Tensor, nn

import kapsi as kp
from kapsi.errors import DataError
from kapsi.function import ROLES, Params, Tensors
from kapsi.training.config import TrainConfig
from kapsi.training.data import make_rows
from kapsi.training.distributed import Group
from kapsi.training.penalties import Penalties
from kapsi.training.solvers import ridge
from kapsi.training.solvers.base import NotFinite, Report, Task
from kapsi.training.solvers.ridge import RidgeRun, reason_not_linear
from kapsi.weights import DenseWeights, Weights

WAYS = ("Stored", "Streamed", "Dual")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes(rows: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, count, (rows,), generator=torch.Generator().manual_seed(seed))


def made(*args: Any, **options: Any) -> kp.Model:
    return kp.Model(kp.rpn(*args, **options), seed=0, dtype=torch.float64)


def layered(inputs: int, outputs: int, *heads: kp.HeadSpec, **options: Any) -> kp.Model:
    layer = kp.LayerSpec(heads, **options)
    return kp.Model(kp.ModelSpec((inputs, outputs), (layer,)), seed=0, dtype=torch.float64)


def task_of(model: Any, data: tuple[Any, ...], loss: Any = "mse", group: Group | None = None, **options: Any) -> Task:
    solver = kp.Ridge(options.pop("tolerance", 1e-9))
    config = TrainConfig(loss=loss, solver=solver, **options)  # type: ignore[arg-type]
    kind = typing.cast(kp.Loss, config.loss)
    dtype = next(model.parameters()).dtype
    rows = make_rows(data).bind(kind, in_features=model.in_features, outputs=model.out_features, dtype=dtype)
    return Task(model, rows, kind, Penalties(model, config), config, group or Group(), model)


def start(task: Task) -> RidgeRun:
    solver: Any = task.config.solver
    return solver.start(task)


def run(solver: RidgeRun, epochs: int = 200, below: float = -math.inf) -> list[Report]:
    reports = []
    for epoch in range(1, epochs + 1):
        for _ in solver.steps(epoch):
            pass
        reports.append(solver.report())
        if reports[-1].ended or reports[-1].loss < below:
            break
    return reports


def solve(model: Any, data: tuple[Any, ...], loss: str = "mse", epochs: int = 200, **options: Any) -> list[Report]:
    return run(start(task_of(model, data, loss, **options)), epochs)


def forced(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Have sizes that lead to one way of solving."""
    monkeypatch.setattr(ridge._Closed, "_choose_method", lambda self: getattr(ridge, way))


def objective(task: Task) -> Tensor:
    """Return what is to be minimized, all rows at once, by the model itself."""
    (batch,) = task.rows.chunks(10**9)
    losses = task.loss.rows(task.model(batch.x), batch.y)
    mean = losses.mean() if batch.weight is None else (losses * batch.weight).mean()
    return mean + task.penalties.value()


def slope(task: Task) -> float:
    """Return the largest derivative of the objective."""
    gradients = torch.autograd.grad(objective(task), task.parameters())
    return max(float(gradient.abs().max()) for gradient in gradients)


def head_of(model: kp.Model) -> Any:
    return model.layers[0].heads[0]  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------------ the closed form


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("outputs", [1, 3])
def test_ridge_is_that_of_scikit_learn(
    way: str, bias: bool, weighted: bool, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced(monkeypatch, way)
    x, y = numbers(60, 3), numbers(60, outputs, seed=1)
    weight = numbers(60, seed=2).square() if weighted else None
    model = made([3, outputs], kp.Taylor(2), bias=bias)
    (report,) = solve(model, (x, y) if weight is None else (x, y, weight), l2=0.02)
    kappa = head_of(model).expand(x).dense().numpy()
    share = None if weight is None else (weight / weight.mean()).numpy()
    expected = Reference(alpha=0.02 * 60 * outputs / 2, fit_intercept=bias).fit(kappa, y.numpy(), sample_weight=share)
    np.testing.assert_allclose(
        head_of(model).psi.matrix.detach(), np.reshape(expected.coef_, (outputs, -1)), atol=1e-10
    )
    if bias:
        np.testing.assert_allclose(head_of(model).bias.detach(), np.reshape(expected.intercept_, -1), atol=1e-10)
    errors = ((expected.predict(kappa).reshape(60, -1) - y.numpy()) ** 2).mean(1)
    assert report.loss == pytest.approx(np.average(errors, weights=share), rel=1e-10)
    assert report.details == {"l2": 0.02}
    assert report.ended is not None


@pytest.mark.parametrize("way", WAYS)
def test_without_penalty_it_is_linear_regression(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forced(monkeypatch, way)
    x, y = numbers(60, 3), numbers(60, 2, seed=1)
    model = made([3, 2], bias=True)
    solve(model, (x, y), l2=0.0)
    expected = LinearRegression().fit(x.numpy(), y.numpy())
    np.testing.assert_allclose(head_of(model).psi.matrix.detach(), expected.coef_, atol=1e-11)
    np.testing.assert_allclose(head_of(model).bias.detach(), expected.intercept_, atol=1e-11)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [8, 50])
def test_of_several_solutions_it_is_the_shortest(way: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forced(monkeypatch, way)
    x, y = numbers(rows, 4), numbers(rows, 2, seed=1)
    x = torch.cat([x, x[:, :2] + x[:, 2:], 10 * x[:, :2]], 1)
    model = made([8, 2])
    solve(model, (x, y), l2=0.0)
    expected = np.linalg.lstsq(x.numpy(), y.numpy(), rcond=1e-10)[0].T
    np.testing.assert_allclose(head_of(model).psi.matrix.detach(), expected, atol=1e-10)


@pytest.mark.parametrize("way", ["Stored", "Streamed"])
def test_columns_of_very_different_size_are_not_taken_for_dependent(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forced(monkeypatch, way)
    x = numbers(50, 3) * torch.tensor([1e-6, 1.0, 1e6], dtype=torch.float64)
    truth = torch.tensor([[1e6, 2.0, 3e-6]], dtype=torch.float64)
    model = made([3, 1])
    solve(model, (x, x @ truth.T), l2=0.0)
    np.testing.assert_allclose(head_of(model).psi.matrix.detach() / truth, np.ones((1, 3)), rtol=1e-9)


def test_sums_of_columns_far_from_zero_keep_their_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    forced(monkeypatch, "Streamed")
    monkeypatch.setattr("kapsi.training.solvers.blocks.CHUNK", 60)  # 20 rows at a time
    x, truth = numbers(200, 3) + 1e6, numbers(1, 3, seed=1)
    model = made([3, 1], bias=True)
    solve(model, (x, (x - 1e6) @ truth.T + 5), l2=0.0)
    np.testing.assert_allclose(head_of(model).psi.matrix.detach(), truth, rtol=1e-8)


GRID: dict[str, Callable[[], kp.Model]] = {
    "channels": lambda: made([3, 2], kp.Taylor(2), channels=3, bias=True),
    "heads": lambda: made([3, 2], kp.Taylor(2), heads=3, bias=True, channels=2),
    "mean": lambda: made([3, 2], kp.Chebyshev(2), heads=2, fusion=kp.Mean(), bias=True),
    "two kinds": lambda: layered(
        3, 2, kp.HeadSpec(kp.Taylor(2)), kp.HeadSpec(kp.Chebyshev(2), bias=True, channels=2), fusion=kp.Mean()
    ),
    "linear": lambda: made([3, 2], kp.Taylor(2), remainder=kp.LinearRemainder(), bias=True),
    "linear twice": lambda: made(
        [3, 2], kp.Taylor(2), remainder=kp.LinearRemainder("silu", bias=True), heads=2, bias=True
    ),
    "constant": lambda: made([3, 2], kp.Taylor(2), remainder=kp.ConstantRemainder(0.5)),
    "identity": lambda: made([3, 3], kp.Chebyshev(2), remainder=kp.IdentityRemainder("tanh"), bias=True),
    "expansion": lambda: made(
        [3, 2], kp.Taylor(2), remainder=kp.ExpansionRemainder(kp.BSpline(3), kp.Dense(), kp.LinearRemainder(bias=True))
    ),
    "masked": lambda: made([3, 4], kp.Taylor(2), kp.Masked(0.3), bias=True),
    "masked channels": lambda: made([3, 4], kp.Taylor(2), kp.Masked(0.3), kp.LinearRemainder(), channels=2, heads=2),
    "masked and dense": lambda: layered(3, 2, kp.HeadSpec(kp.Taylor(2), kp.Masked(0.4)), kp.HeadSpec(kp.Taylor(2))),
    "parameter-free": lambda: layered(
        3, 2, kp.HeadSpec(kp.Identity(), kp.ConstantReconciliation(0.3)), kp.HeadSpec(kp.Taylor(2), bias=True)
    ),
    "norm": lambda: made([3, 2], kp.Taylor(2), before="tanh", after="layer_norm", bias=True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", GRID)
@pytest.mark.parametrize("penalty", [0.05, None])
def test_nothing_changes_the_objective_at_the_solution(
    name: str, way: str, penalty: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The objective is convex, so a gradient of zero is its minimum: for every kind of model, by the model's own forward pass."""
    forced(monkeypatch, way)
    monkeypatch.setattr("kapsi.training.solvers.blocks.CHUNK", 200)
    model = GRID[name]()
    x, y, weight = numbers(40, 3), numbers(40, model.out_features, seed=1), numbers(40, seed=2).square()
    task = task_of(model, (x, y, weight), l2=penalty)
    before = slope(task) if penalty else 1.0
    assert reason_not_linear(model) is None
    (report,) = run(start(task))
    details = report.details or {}
    settled = task_of(model, (x, y, weight), l2=details["l2"])
    assert slope(settled) < 1e-11 < 0.01 * before
    assert report.loss == pytest.approx(float((objective(settled) - settled.penalties.value()).detach()), rel=1e-12)


@dataclass(frozen=True)
class FreeMatrix(kp.Reconciliation, name="ridge_test_matrix"):
    """ψ of a third party: one matrix of parameters."""

    multilinear = True

    def params(self, out_features: int, factors: tuple[int, int]) -> Params:
        return {"entries": kp.Param((out_features, factors[0] * factors[1]))}

    def __call__(self, params: Tensors, out_features: int, factors: tuple[int, int]) -> Weights:
        return DenseWeights(params["entries"])


@dataclass(frozen=True)
class Scaled(kp.Reconciliation, name="ridge_test_scaled"):
    """ψ of a third party: a product of two tensors."""

    multilinear = True

    def params(self, out_features: int, factors: tuple[int, int]) -> Params:
        columns = factors[0] * factors[1]
        return {"scale": kp.Param((out_features, 1)), "entries": kp.Param((out_features, columns), columns**-0.5)}

    def __call__(self, params: Tensors, out_features: int, factors: tuple[int, int]) -> Weights:
        return DenseWeights(params["scale"] * params["entries"])


@dataclass(frozen=True)
class Undeclared(Scaled, name="ridge_test_undeclared"):
    multilinear = False


FREE_MATRIX, SCALED, UNDECLARED = FreeMatrix(), Scaled(), Undeclared()
for function in (FREE_MATRIX, SCALED, UNDECLARED):  # no other test meets them
    ROLES["reconciliation"].pop(function.name)


def test_third_party_reconciliations_are_supported_by_their_declaration() -> None:
    x, y = numbers(40, 3), numbers(40, 2, seed=1)
    own, dense = made([3, 2], kp.Taylor(2), FREE_MATRIX, bias=True), made([3, 2], kp.Taylor(2), bias=True)
    assert reason_not_linear(own) is None
    for model in (own, dense):
        solve(model, (x, y), l2=0.05)
    torch.testing.assert_close(own(x), dense(x))
    model = made([3, 2], kp.Taylor(2), SCALED)
    task = task_of(model, (x, y), l2=0.01, tolerance=0.0)
    run(start(task), 300)
    assert slope(task) < 1e-6
    with pytest.raises(kp.SpecError, match="is not declared linear in each tensor"):
        solve(made([3, 2], kp.Taylor(2), UNDECLARED), (x, y))


def test_frozen_parts_are_left_as_they_are() -> None:
    model = made([3, 2], kp.Taylor(2), remainder=kp.LinearRemainder(bias=True), heads=2, bias=True)
    model.freeze("layers.0.heads.0.psi", "*.pi.matrix", "layers.0.heads.1.bias")
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    task = task_of(model, (numbers(40, 3), numbers(40, 2, seed=1)), l2=0.05)
    run(start(task))
    assert slope(task) < 1e-12
    assert len(frozen) == 4
    for name, value in frozen.items():
        assert torch.equal(model.get_parameter(name), value)


def test_frozen_layers_before_the_last_are_features() -> None:
    model = made([3, 5, 2], kp.Taylor(2), bias=True, output="tanh")
    model.freeze("layers.0")
    task = task_of(model, (numbers(40, 3), numbers(40, 2, seed=1)), l2=0.05)
    run(start(task))
    assert slope(task) < 1e-12
    model.freeze("layers.0", frozen=False)
    assert reason_not_linear(model) == "the model has 2 layers, and layers.0 is trained"


@pytest.mark.parametrize("way", ["Stored", "Streamed"])
@pytest.mark.parametrize("psi", [kp.Dense(), kp.Masked(0.5)])
@pytest.mark.parametrize("penalty", [0.0, 0.01, None])
def test_smoothness_is_part_of_the_objective(
    way: str, psi: Any, penalty: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced(monkeypatch, way)
    x, y = numbers(40, 2), numbers(40, 2, seed=1)
    made_of = {"bias": True, "remainder": kp.LinearRemainder()}
    model, rough = (made([2, 2], kp.BSpline(4), psi, **made_of) for _ in range(2))
    (report,) = solve(model, (x, y), l2=penalty, smoothness=0.1)
    task = task_of(model, (x, y), l2=(report.details or {})["l2"], smoothness=0.1)
    assert slope(task) < 1e-10
    solve(rough, (x, y), l2=penalty)
    assert not torch.allclose(model(x), rough(x), atol=1e-6)


def test_smoothness_of_two_channels_is_that_of_their_sum() -> None:
    model = made([2, 2], kp.BSpline(4), channels=2, bias=True)
    task = task_of(model, (numbers(40, 2), numbers(40, 2, seed=1)), l2=0.01, smoothness=0.1)
    run(start(task))
    assert slope(task) < 1e-11


def test_weights_are_repeated_rows() -> None:
    x, y = numbers(30, 3), numbers(30, 2, seed=1)
    times = classes(30, 4)
    weighted, repeated = made([3, 2], kp.Taylor(2), bias=True), made([3, 2], kp.Taylor(2), bias=True)
    solve(weighted, (x, y, times.double()), l2=0.1)
    solve(repeated, (x.repeat_interleave(times, 0), y.repeat_interleave(times, 0)), l2=0.1)
    for p, q in zip(weighted.parameters(), repeated.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-12)


def test_a_model_in_float32_is_solved_in_float64_and_rounded() -> None:
    x, y = numbers(50, 3).float(), numbers(50, 2, seed=1).float()
    model = kp.Model(kp.rpn([3, 2], kp.Taylor(2), bias=True), seed=0)
    wide = copy.deepcopy(model).double()
    (report,) = solve(model, (x, y), l2=0.01)
    solve(wide, (x.double(), y.double()), l2=0.01)
    for p, q in zip(model.parameters(), wide.parameters(), strict=True):
        assert p.dtype == torch.float32
        torch.testing.assert_close(p, q.float(), rtol=0, atol=1e-7)
    rounded = copy.deepcopy(model).double()
    expected = float((rounded(x.double()) - y.double()).square().mean().detach())
    assert report.loss == pytest.approx(expected, rel=1e-12)


def test_sparse_inputs_are_the_same_rows() -> None:
    x, y = numbers(50, 4), numbers(50, 2, seed=1)
    x = x * (x > 0)
    dense, sparse = made([4, 2], kp.Taylor(2), bias=True), made([4, 2], kp.Taylor(2), bias=True)
    solve(dense, (x, y), l2=0.01)
    solve(sparse, (x.to_sparse_csr(), y), l2=0.01)
    for p, q in zip(dense.parameters(), sparse.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-13)


def test_a_linear_map_of_torch() -> None:
    model = nn.Linear(3, 2, dtype=torch.float64)
    x, y = numbers(50, 3), numbers(50, 2, seed=1)
    solve(model, (x, y), l2=0.01)
    expected = Reference(alpha=0.01 * 50).fit(x.numpy(), y.numpy())
    np.testing.assert_allclose(model.weight.detach(), expected.coef_, atol=1e-11)
    np.testing.assert_allclose(model.bias.detach(), expected.intercept_, atol=1e-11)


# ------------------------------------------------------------------------------------------------ leaving one row out


def left_out(kappa: np.ndarray, y: np.ndarray, weight: np.ndarray, alpha: float, bias: bool) -> float:
    """Return the mean squared error of each row predicted by a fit to the others."""
    errors = []
    for i in range(len(y)):
        rest = np.arange(len(y)) != i
        fitted = Reference(alpha=alpha, fit_intercept=bias).fit(kappa[rest], y[rest], sample_weight=weight[rest])
        errors.append(((fitted.predict(kappa[i : i + 1]).reshape(-1) - y[i].reshape(-1)) ** 2).mean())
    return float(np.average(errors, weights=weight))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [7, 25])
def test_the_chosen_penalty_is_the_best_by_brute_force(
    way: str, bias: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced(monkeypatch, way)
    grid = (1e-4, 1e-2, 1.0, 100.0)
    monkeypatch.setattr(ridge, "PENALTIES", grid)
    x, weight = numbers(rows, 3), numbers(rows, seed=2).square() + 0.1
    y = x[:, :2] + 0.3 * numbers(rows, 2, seed=1)
    model = made([3, 2], kp.Taylor(2), bias=bias)
    (report,) = solve(model, (x, y, weight))
    kappa, share = head_of(model).expand(x).dense().numpy(), (weight / weight.mean()).numpy()
    center = np.average(kappa, 0, share) if bias else 0.0
    mean = (share[:, None] * (kappa - center) ** 2).sum() / rows / kappa.shape[1]  # 2/(n·rows) with n = 2
    brute = {scale * mean: left_out(kappa, y.numpy(), share, scale * mean * rows, bias) for scale in grid}
    best = min(brute, key=lambda penalty: brute[penalty])
    details = report.details or {}
    assert details["l2"] == pytest.approx(best, rel=1e-12)
    assert details["leave_one_out"] == pytest.approx(brute[best], rel=1e-9)


@pytest.mark.parametrize("way", WAYS)
def test_the_error_is_that_of_the_cross_validated_ridge_of_scikit_learn(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced(monkeypatch, way)
    monkeypatch.setattr(ridge, "PENALTIES", (0.3,))
    x, y = numbers(30, 4), numbers(30, 1, seed=1)
    model = made([4, 1], bias=True)
    (report,) = solve(model, (x, y))
    details = report.details or {}
    expected = RidgeCV([details["l2"] * 15], store_cv_results=True).fit(x.numpy(), y[:, 0].numpy())
    assert details["leave_one_out"] == pytest.approx(expected.cv_results_.mean(), rel=1e-10)
    np.testing.assert_allclose(head_of(model).psi.matrix.detach()[0], expected.coef_, atol=1e-11)


def test_masked_outputs_share_one_penalty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ridge, "PENALTIES", (0.2,))
    x, y = numbers(25, 3), numbers(25, 3, seed=1)
    model = made([3, 3], kp.Taylor(2), kp.Masked(0.5), bias=True)
    (report,) = solve(model, (x, y))
    details = report.details or {}
    kappa, mask = head_of(model).expand(x).dense().numpy(), head_of(model).psi.mask.numpy()
    alpha = details["l2"] * 25 * 3 / 2
    errors = [left_out(kappa[:, mask[j]], y[:, j].numpy(), np.ones(25), alpha, True) for j in range(3)]
    assert details["leave_one_out"] == pytest.approx(np.mean(errors), rel=1e-10)
    for j in range(3):
        expected = Reference(alpha=alpha).fit(kappa[:, mask[j]], y[:, j].numpy())
        np.testing.assert_allclose(head_of(model).weights().matrix()[j, mask[j]].detach(), expected.coef_, atol=1e-11)


@pytest.mark.parametrize("way", WAYS)
def test_noise_is_held_down_and_a_law_is_kept(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forced(monkeypatch, way)
    x, noise = numbers(60, 3), numbers(60, 1, seed=1)
    law = x[:, :1] * x[:, 1:2] + x[:, 2:]
    kept, held = made([3, 1], kp.Taylor(3), bias=True), made([3, 1], kp.Taylor(3), bias=True)
    (one,), (other,) = solve(kept, (x, law)), solve(held, (x, noise))
    assert float((kept(x) - law).detach().abs().max()) < 1e-6
    assert float(held(x).detach().var()) < 0.2 * float(noise.var())
    assert (one.details or {})["l2"] < 1e-6 * (other.details or {})["l2"]


def test_a_single_row_and_columns_of_zeros() -> None:
    model = made([3, 1], bias=True)
    (report,) = solve(model, (numbers(1, 3), torch.ones(1, 1, dtype=torch.float64)))
    assert report.loss < 1e-20
    model = made([3, 1], bias=True)
    (report,) = solve(model, (torch.zeros(5, 3, dtype=torch.float64), numbers(5, 1)))
    assert report.loss == pytest.approx(float(numbers(5, 1).var(correction=0)))
    assert not bool(head_of(model).psi.matrix.any())


# ------------------------------------------------------------------------------------------------ Newton's method


@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_is_the_logistic_regression_of_scikit_learn(weighted: bool) -> None:
    x, y = numbers(150, 3), classes(150, 3)
    weight = numbers(150, seed=2).square() if weighted else None
    model = made([3, 3], bias=True)
    reports = solve(model, (x, y) if weight is None else (x, y, weight), "cross_entropy", l2=0.02)
    share = None if weight is None else (weight / weight.mean()).numpy()
    expected = LogisticRegression(C=1 / (0.02 * 150), tol=1e-12, max_iter=10_000).fit(x.numpy(), y.numpy(), share)
    np.testing.assert_allclose(head_of(model).psi.matrix.detach(), expected.coef_, atol=1e-6)
    np.testing.assert_allclose(head_of(model).bias.detach(), expected.intercept_, atol=1e-6)
    assert len(reports) < 10
    assert reports[-1].ended is not None


def test_the_default_penalty_of_classes_is_that_of_scikit_learn() -> None:
    x, y = numbers(150, 3), classes(150, 2)
    model = made([3, 1], bias=True)
    reports = solve(model, (x, y.double()), "bernoulli")
    expected = LogisticRegression(tol=1e-12, max_iter=10_000).fit(x.numpy(), y.numpy())
    np.testing.assert_allclose(head_of(model).psi.matrix.detach(), expected.coef_, atol=1e-6)
    np.testing.assert_allclose(head_of(model).bias.detach(), expected.intercept_, atol=1e-6)
    assert (reports[-1].details or {})["l2"] == pytest.approx(1 / 150)


CURVED = {
    "cross_entropy": lambda n: classes(80, n),
    "bernoulli": lambda n: (numbers(80, n, seed=1) > 0).double(),
    "huber": lambda n: 3 * numbers(80, n, seed=1),
}


@pytest.mark.parametrize("loss", CURVED)
@pytest.mark.parametrize("name", ["heads", "linear twice", "masked", "masked channels", "constant"])
@pytest.mark.parametrize("penalty", [0.0, 0.05])
def test_newton_ends_in_the_minimum_and_never_rises(loss: str, name: str, penalty: float) -> None:
    model = GRID[name]()
    task = task_of(
        model,
        (numbers(80, 3), CURVED[loss](model.out_features)),
        {"kind": "huber", "delta": 0.5} if loss == "huber" else loss,
        l2=penalty,
        tolerance=0.0,
    )
    totals = [float(objective(task).detach())]
    solver = start(task)
    for epoch in range(1, 100):
        for _ in solver.steps(epoch):
            pass
        totals.append(float(objective(task).detach()))
        report = solver.report()
        assert (report.details or {})["penalized_loss"] == pytest.approx(totals[-1], rel=1e-12)
        if report.ended:
            break
    assert slope(task) < 1e-6
    assert all(after <= before + 1e-14 for before, after in itertools.pairwise(totals))
    assert totals[-1] < totals[0]


def test_steps_for_a_mean_and_a_variance_go_down_to_a_minimum() -> None:
    model = made([3, 2], bias=True, channels=2)
    x = numbers(80, 3)
    data = (x, x[:, :1] + torch.exp(x[:, 1:2] / 2) * numbers(80, 1, seed=1))
    task = task_of(model, data, "gaussian", l2=0.01)
    reports = run(start(task))
    totals = [(report.details or {})["penalized_loss"] for report in reports]
    assert totals == sorted(totals, reverse=True)
    assert slope(task) < 1e-4


@pytest.mark.parametrize("psi", [kp.Dense(), kp.Masked(0.5)])
@pytest.mark.parametrize("loss", ["cross_entropy", "huber"])
def test_newton_knows_smoothness(psi: Any, loss: str) -> None:
    model = made([3, 2], kp.BSpline(4), psi, bias=True)
    task = task_of(model, (numbers(80, 3), CURVED[loss](2)), loss, l2=0.01, smoothness=0.1, tolerance=0.0)
    run(start(task))
    assert slope(task) < 1e-7


def test_steps_that_lead_too_far_are_shortened() -> None:
    """From far away Newton's full step of a logistic loss leads further away."""
    x = numbers(80, 2)
    y = (x[:, 0] + numbers(80, seed=1) > 0).double()
    model = made([2, 1], bias=True)
    model.layers[0].heads[0].psi.matrix.data = torch.tensor([[6.0, 5.0]], dtype=torch.float64)  # type: ignore[union-attr]
    task = task_of(model, (x, y), "bernoulli", l2=1e-6, tolerance=0.0)
    far, full = float(objective(task).detach()), copy.deepcopy(model)
    block = ridge.ColumnBlock(ridge.LinearDesign(full, task.config), task.loss)
    totals, unknowns = block.totals(), block.get()
    (batch,) = task.rows.chunks(100)
    block.add(batch, task.loss, unknowns, totals, block.design(batch.x))
    block.put(unknowns + block.step(unknowns, totals, 80, 1e-6)[0])
    assert float(objective(task_of(full, (x, y), "bernoulli", l2=1e-6)).detach()) > far
    reports = run(start(task))
    totals_seen = [far, *((report.details or {})["penalized_loss"] for report in reports)]
    assert totals_seen == sorted(totals_seen, reverse=True)
    assert slope(task) < 1e-7


@pytest.mark.parametrize("loss", ["cross_entropy", "bernoulli"])
def test_separated_classes_end_with_a_message(loss: str) -> None:
    x = numbers(60, 2)
    y = (x[:, 0] > 0).long()
    data = (x, y) if loss == "cross_entropy" else (x, y.double())
    model = made([2, 2 if loss == "cross_entropy" else 1], bias=True)
    reports = solve(model, data, loss, l2=0.0)
    assert "set l2 above 0" in (reports[-1].ended or "")
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    held = made([2, 2 if loss == "cross_entropy" else 1], bias=True)
    assert "separable" not in (solve(held, data, loss, l2=0.01)[-1].ended or "")


def test_classes_that_one_group_of_rows_separates_end_with_a_message() -> None:
    """Only one coefficient is without bounds; the loss does not go to zero."""
    x = torch.cat([numbers(60, 1), torch.zeros(60, 1, dtype=torch.float64)], 1)
    y = classes(60, 2).double()
    x[:5, 1], y[:5] = 1, 1
    model = made([2, 1], bias=True)
    reports = solve(model, (x, y), "bernoulli", l2=0.0)
    assert "set l2 above 0" in (reports[-1].ended or "")
    overlapping = made([2, 1], bias=True)
    y[0] = 0
    assert "separable" not in (solve(overlapping, (x, y), "bernoulli", l2=0.0)[-1].ended or "")


# ------------------------------------------------------------------------------------------------ alternating least squares


KINDS = [
    kp.LowRank(2),
    kp.KhatriRao(2),
    kp.RandomAdaption(4),
    kp.Kronecker(terms=2),
    kp.LowRankKronecker(rank=2),
    kp.DualLowRankKronecker(rank=2),
    kp.Duplicated(),
]


@pytest.mark.parametrize("psi", KINDS, ids=str)
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("penalty", [None, 0.01])
def test_sweeps_never_raise_the_objective(psi: Any, channels: int, penalty: float | None) -> None:
    model = made([3, 4], kp.Taylor(2), psi, kp.LinearRemainder(), bias=True, channels=channels, heads=2)
    data = (numbers(60, 3), numbers(60, 4, seed=1), numbers(60, seed=2).square())
    task = task_of(model, data, l2=penalty, tolerance=0.0)
    assert reason_not_linear(model) is not None
    before, totals = slope(task), [float(objective(task).detach())]
    solver = start(task)
    for epoch in range(1, 9):
        for _ in solver.steps(epoch):
            pass
        totals.append(float(objective(task).detach()))
        assert (solver.report().details or {})["penalized_loss"] == pytest.approx(totals[-1], rel=1e-12)
    assert all(after <= earlier * (1 + 1e-14) for earlier, after in itertools.pairwise(totals))
    assert slope(task) < 0.1 * before


@pytest.mark.parametrize("psi", KINDS, ids=str)
def test_a_law_of_the_same_kind_is_found_from_near_by(psi: Any) -> None:
    model = made([3, 4], kp.Taylor(2), psi, bias=True)
    truth = copy.deepcopy(model)
    for i, (p, q) in enumerate(zip(model.parameters(), truth.parameters(), strict=True)):
        q.data = numbers(*p.shape, seed=i + 5)
        p.data = q.data + 0.2 * numbers(*p.shape, seed=i + 50)
    x = numbers(200, 3)
    y = truth(x).detach()
    wanted = 1e-8 * float(y.var())
    reports = run(start(task_of(model, (x, y), tolerance=0.0)), epochs=300, below=wanted)
    assert reports[-1].loss < wanted


def test_one_tensor_is_solved_exactly_in_one_sweep() -> None:
    x, y = numbers(60, 3), numbers(60, 2, seed=1)
    model = made([3, 2], kp.Taylor(2), kp.LowRank(2), bias=True)
    model.freeze("*.psi.right")
    solve(model, (x, y), l2=0.0)
    head = head_of(model)
    kappa = (head.expand(x).dense() @ head.psi["right"].T).numpy()
    expected = LinearRegression().fit(kappa, y.numpy())
    np.testing.assert_allclose(head.psi.left.detach(), expected.coef_, atol=1e-9)


def test_a_masked_remainder_is_held_down_by_no_penalty() -> None:
    model = made([3, 2], kp.Taylor(2), remainder=kp.ExpansionRemainder(kp.Chebyshev(2), kp.Masked(0.5)), bias=True)
    task = task_of(model, (numbers(60, 3), numbers(60, 2, seed=1)), l2=0.05, tolerance=0.0)
    run(start(task))
    assert slope(task) < 1e-9


def test_sweeps_take_other_losses_too() -> None:
    model = made([3, 3], kp.Taylor(2), kp.LowRank(1), bias=True)
    task = task_of(model, (numbers(80, 3), classes(80, 3)), "cross_entropy", l2=0.01)
    reports = run(start(task))
    totals = [(report.details or {})["penalized_loss"] for report in reports]
    assert totals == sorted(totals, reverse=True)
    assert slope(task) < 1e-3


# ------------------------------------------------------------------------------------------------ going on, and several processes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("psi", "loss"), [(kp.Dense(), "cross_entropy"), (kp.LowRank(2), "mse"), (kp.Dense(), "mse")])
def test_going_on_from_a_state_is_bit_equal(psi: Any, loss: str, dtype: torch.dtype) -> None:
    spec = kp.rpn([3, 3], kp.Taylor(2), psi, bias=True)
    x = numbers(50, 3).to(dtype)
    data = (x, classes(50, 3) if loss == "cross_entropy" else numbers(50, 3, seed=1).to(dtype))
    whole, first = kp.Model(spec, seed=0, dtype=dtype), kp.Model(spec, seed=0, dtype=dtype)
    expected = solve(whole, data, loss, epochs=6)
    solver = start(task_of(first, data, loss))
    run(solver, 2)
    tensors, plain = solver.state()
    tensors, plain = {name: t.clone() for name, t in tensors.items()}, json.loads(json.dumps(plain))
    second = copy.deepcopy(first)
    again = start(task_of(second, data, loss))
    again.restore((tensors, plain))
    assert again.report() == solver.report()
    if expected[min(1, len(expected) - 1)].ended is None:
        # The last step of an epoch was taken already where a state is taken after it.
        assert list(again.steps(2, 1)) == []
        for epoch in range(3, len(expected) + 1):
            for _ in again.steps(epoch):
                pass
            assert again.report() == expected[epoch - 1]
    for p, q in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)


class Threads(Group):
    """Processes of a group, played by threads."""

    shared: dict[str, Any]

    def __init__(self, rank: int, size: int, shared: dict[str, Any]) -> None:
        super().__init__()
        self.rank, self.size, self.shared = rank, size, shared

    def _all(self, value: Any) -> list[Any]:
        self.shared[f"value {self.rank}"] = value
        self.shared["barrier"].wait(60)
        values = [self.shared[f"value {rank}"] for rank in range(self.size)]
        self.shared["barrier"].wait(60)
        return values

    def sum(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._all(tensor.detach().clone())).sum(0)

    def max(self, number: float) -> float:
        return max(self._all(number))

    def any(self, flag: bool) -> bool:
        return any(self._all(flag))


def together(models: list[kp.Model], data: tuple[Any, ...], loss: str, **options: Any) -> list[Any]:
    """Return what each of two processes says at the end, or its error."""
    shared: dict[str, Any] = {"barrier": threading.Barrier(len(models))}
    said: list[Any] = [None] * len(models)

    def one(rank: int) -> None:
        try:
            group = Threads(rank, len(models), shared)
            said[rank] = run(start(task_of(models[rank], data, loss, group=group, **options)), 20)[-1]
        except Exception as error:
            said[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


@pytest.mark.parametrize(
    ("psi", "loss", "penalty", "rows"),
    [
        *[(kp.Dense(), "mse", 0.01, rows) for rows in (1, 2, 41)],
        (kp.Dense(), "mse", None, 41),
        (kp.Masked(0.5), "mse", None, 41),
        *[(kp.Dense(), "cross_entropy", None, rows) for rows in (1, 41)],
        *[(kp.LowRank(1), "mse", 0.01, rows) for rows in (1, 2, 41)],
    ],
    ids=str,
)
def test_two_processes_are_one(psi: Any, loss: str, penalty: float | None, rows: int) -> None:
    x = numbers(rows, 3)
    data = (x, classes(rows, 2) if loss == "cross_entropy" else numbers(rows, 2, seed=1))
    alone, *others = (made([3, 2], kp.Taylor(2), psi, bias=True) for _ in range(3))
    expected = solve(alone, data, loss, epochs=20, l2=penalty)[-1]
    for said in together(others, data, loss, l2=penalty):
        assert isinstance(said, Report), said
        assert said.loss == pytest.approx(expected.loss, rel=1e-9, abs=1e-12)
    for p, q, r in zip(alone.parameters(), *(model.parameters() for model in others), strict=True):
        assert torch.equal(q, r)
        torch.testing.assert_close(p, q, rtol=0, atol=1e-9)


def test_all_processes_hear_of_numbers_that_are_not_finite() -> None:
    x = numbers(20, 3)
    x[15] = 1e200  # the square of which is infinite
    for loss, y in (("mse", numbers(20, 2, seed=1)), ("cross_entropy", classes(20, 2))):
        models = [made([3, 2], kp.Taylor(2), bias=True) for _ in range(2)]
        said = together(models, (x, y), loss, l2=0.01)
        assert [type(error) for error in said] == [NotFinite, NotFinite]


# ------------------------------------------------------------------------------------------------ what is refused


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "layers": (lambda: made([3, 4, 2]), {}, "layers.0 is trained"),
    "hypernet": (lambda: made([3, 2], kp.Taylor(2), kp.HyperNet(4)), {}, "levenberg_marquardt or lbfgs"),
    "trained κ": (lambda: made([3, 2], kp.GaussianRBF(learnable=True)), {}, "κ of layers.0.heads.0 is trained"),
    "norm": (
        lambda: made([3, 2], after=kp.LayerNorm(affine=True)),
        {},
        "processing after κ of layers.0.heads.0 is trained",
    ),
    "dropout": (lambda: made([3, 2], before="dropout"), {}, "differs between passes"),
    "masks by pass": (
        lambda: made([3, 2], reconciliation=kp.DropConnect()),
        {},
        "DropConnect.* differs between passes",
    ),
    "batch norm": (lambda: made([3, 2], before="batch_norm"), {}, "differs between passes"),
    "after": (lambda: made([3, 2], remainder=kp.LinearRemainder(after="tanh")), {}, "activation after the matrix"),
    "fusion": (lambda: made([3, 2], heads=2, fusion=kp.WeightedSum()), {}, "neither Sum nor Mean"),
    "output": (lambda: layered(3, 2, kp.HeadSpec(), output=("tanh",)), {}, "output processing"),
    "hinge": (lambda: made([3, 2]), {"loss": "hinge"}, "hinge has no curvature"),
    "l1": (lambda: made([3, 2]), {"l1": 0.1}, "l1 is not quadratic"),
    "group": (lambda: made([3, 2]), {"group_l1": 0.1}, "group_l1 is not quadratic"),
    "smooth": (lambda: made([3, 2], kp.BSpline(), kp.LowRank(1)), {"smoothness": 0.1}, "dense or masked"),
    "smooth heads": (
        lambda: layered(3, 2, kp.HeadSpec(kp.BSpline()), kp.HeadSpec(kp.BSpline(), channels=2)),
        {"smoothness": 0.1},
        "equal numbers of channels",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    make, options, message = REFUSED[name]
    loss = options.get("loss", "mse")
    data = (numbers(20, 3), classes(20, 2) if loss == "hinge" else numbers(20, 2, seed=1))
    with pytest.raises(kp.SpecError, match=message):
        solve(make(), data, **options)


def test_sizes_decide_how_it_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    def way(rows: int, group: Group | None = None, **options: Any) -> str:
        data = (numbers(rows, 3), numbers(rows, 2, seed=1))
        work = start(task_of(made([3, 2], kp.Taylor(2)), data, group=group, **options)).work
        assert isinstance(work, ridge._Closed)
        return work.method.__name__

    assert way(20) == "Stored"
    monkeypatch.setattr(ridge, "MAX_STORED", 100)
    assert (way(8), way(20)) == ("Stored", "Streamed")
    monkeypatch.setattr(ridge, "MAX_STORED", 0)
    assert (way(8), way(20)) == ("Dual", "Streamed")
    several = Group()
    several.size = 2
    assert way(8, several) == "Streamed"
    monkeypatch.setattr(ridge, "MAX_COLUMNS", 10)
    assert way(8) == "Dual"
    model = made([3, 2], kp.Taylor(2), bias=True)
    assert ridge.reason_not_closed(model, 8) is None
    assert (ridge.reason_not_closed(model, None) or "").startswith("it has 12 columns; at most 10")
    assert (ridge.reason_not_closed(model, 8, 2) or "").startswith("it has 12 columns; at most 10")
    assert ridge.reason_not_closed(made([3, 3, 2]), 8) == reason_not_linear(made([3, 3, 2]))
    with pytest.raises(kp.SpecError, match=r"the model has 12 columns; at most 10 .* use solver lbfgs or adamw"):
        way(20)
    with pytest.raises(kp.SpecError, match="the model has 12 columns"):
        way(8, several)


def test_systems_that_are_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kapsi.training.solvers.blocks.MAX_SYSTEM", 25)
    x = numbers(20, 3)
    with pytest.raises(kp.SpecError, match=r"3 outputs × 13 columns give a linear system of 39 unknowns; at most 25"):
        solve(made([3, 3], kp.Taylor(2), bias=True), (x, classes(20, 3)), "cross_entropy")
    solve(made([3, 3], kp.Taylor(2), bias=True), (x, numbers(20, 3).sign().clamp_min(0)), "bernoulli")
    with pytest.raises(kp.SpecError, match=r"psi.right \(12, 3\) give a linear system of 36 unknowns; at most 25"):
        solve(made([3, 3], kp.Taylor(2), kp.LowRank(3)), (x, numbers(20, 3)))
    # What is linear by itself has a turn of its own where it does not fit beside the others.
    model = made([3, 3], kp.Taylor(2), kp.LowRank(2), kp.LinearRemainder())
    solver = start(task_of(model, (x, numbers(20, 3)), l2=0.1, tolerance=0.0))
    assert isinstance(solver.work, ridge._Iterated)
    assert len(solver.work.blocks) == 3
    totals = [(report.details or {})["penalized_loss"] for report in run(solver, 20)]
    assert totals == sorted(totals, reverse=True)


def test_inputs_with_more_axes_are_refused() -> None:
    with pytest.raises(DataError, match=r"inputs of shape \(rows, m\)"):
        solve(made([3, 2]), (numbers(5, 4, 3), numbers(5, 2)))


def test_the_global_random_state_stays() -> None:
    before = torch.get_rng_state()
    solve(made([3, 2], kp.Taylor(2), kp.LowRank(1)), (numbers(20, 3), numbers(20, 2)), epochs=3)
    solve(made([3, 2], kp.Taylor(2)), (numbers(20, 3), numbers(20, 2)))
    assert torch.equal(torch.get_rng_state(), before)
