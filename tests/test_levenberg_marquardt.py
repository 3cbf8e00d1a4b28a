"""Levenberg–Marquardt: matrices against autograd, optima against closed forms, several starts, resuming, and what is refused."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import kapsi as kp
import kapsi.weights
from kapsi import testing
from kapsi.function import ROLES
from kapsi.training.config import TrainConfig
from kapsi.training.data import make_rows
from kapsi.training.distributed import Group
from kapsi.training.penalties import Penalties
from kapsi.training.solvers import jacobian
from kapsi.training.solvers import levenberg_marquardt as module
from kapsi.training.solvers.base import NotFinite, Task
from kapsi.training.solvers.levenberg_marquardt import LevenbergMarquardtRun

TIGHT = {"rtol": 1e-10, "atol": 1e-12}


@dataclass(frozen=True)
class OuterWeights(kp.weights.Weights):
    """ψ(w) = a bᵀ, a structure of a third party."""

    left: torch.Tensor
    right: torch.Tensor

    @property
    def channels(self):
        return None if self.left.dim() == 1 else len(self.left)

    @property
    def columns(self):
        return self.right.shape[-1]

    def matrix(self):
        return self.left.unsqueeze(-1) * self.right.unsqueeze(-2)

    def row_sums(self):
        return self.left * self.right.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Outer(kp.Reconciliation, name="levenberg_marquardt_test_outer"):
    """A ψ of a third party."""

    multilinear = True

    def params(self, out_features, factors):
        columns = factors[0] * factors[1]
        return {"left": kp.Param((out_features,)), "right": kp.Param((columns,), columns**-0.5)}

    def __call__(self, params, out_features, factors):
        return OuterWeights(params["left"], params["right"])


OUTER = Outer()
ROLES["reconciliation"].pop(OUTER.name)  # no other test meets it


def test_the_declaration_is_checked_by_a_law() -> None:
    @dataclass(frozen=True)
    class Squares(kp.Reconciliation, name="levenberg_marquardt_test_squares"):
        multilinear = True

        def params(self, out_features, factors):
            return {"matrix": kp.Param((out_features, factors[0] * factors[1]))}

        def __call__(self, params, out_features, factors):
            return kp.weights.DenseWeights(params["matrix"].square())

    testing.check(OUTER, laws=["multilinear"])
    with pytest.raises(AssertionError, match="2a − b"):
        testing.check(Squares(), laws=["multilinear"])
    ROLES["reconciliation"].pop(Squares.name)


def spline_model(widths=(2, 2, 1), seed=0, dtype=torch.float64) -> kp.Model:
    expansion = kp.Extended((kp.BSpline(4), kp.Taylor(2)))
    return kp.Model(kp.rpn(list(widths), expansion=expansion, reconciliation=kp.LowRank(1)), seed=seed, dtype=dtype)


def data(rows=60, m=2, n=1, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, m, generator=generator, dtype=torch.float64) * 2 - 1
    y = torch.stack([(x.sum(1) * (i + 1)).sin() for i in range(n)], 1)
    return x.to(dtype), y.to(dtype)


def solver_for(model, values, *, group=None, **options) -> LevenbergMarquardtRun:
    solver = kp.LevenbergMarquardt(options.pop("restarts", 1), options.pop("tolerance", 1e-9))
    config = TrainConfig(**{"loss": "mse", "solver": solver, **options})
    loss = config.loss
    like = next(model.parameters())
    outputs = model(values[0][:2].to(like.dtype)).shape[1] if values[0].layout == torch.strided else 1
    rows = make_rows(values).bind(loss, in_features=None, outputs=outputs, dtype=like.dtype, device=like.device)
    return solver.start(Task(model, rows, loss, Penalties(model, config), config, group or Group(), model))


def run(solver, epochs, first=1) -> list[float]:
    losses = []
    for epoch in range(first, first + epochs):
        for _ in solver.steps(epoch):
            pass
        losses.append(solver.report().loss)
        if solver.report().ended:
            break
    return losses


def vector(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def objective(model, values, loss, penalties):
    """Return the objective as a function of the vector of parameters, written down anew."""
    names = [(name, p.shape) for name, p in model.named_parameters() if p.requires_grad]
    x, y, weight = values

    def of(theta):
        parts = theta.split([shape.numel() for _, shape in names])
        named = {name: part.view(shape) for (name, shape), part in zip(names, parts, strict=True)}
        output = torch.func.functional_call(model, named, (x,))
        return (loss.rows(output, y) * weight / weight.mean()).mean() + penalties(named)

    return of


LOSSES = {
    "mse": lambda y: y,
    "gaussian": lambda y: y[:, :1],
    "huber": lambda y: 3 * y,
    "cross_entropy": lambda y: (y[:, 0] > 0).long(),
    "bernoulli": lambda y: (y > 0).double(),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("chunk", [None, 7])
def test_gradient_and_matrix_are_those_of_the_objective(name, chunk, monkeypatch) -> None:
    model = spline_model((2, 2, 2))
    x, y = data(n=2)
    y = LOSSES[name](y)
    weight = torch.rand(len(x), generator=torch.Generator().manual_seed(5), dtype=torch.float64) + 0.1
    solver = solver_for(model, (x, y, weight), loss=name, l2=0.3, smoothness=0.02)
    if chunk:
        monkeypatch.setattr(jacobian, "MAX_JACOBIAN", chunk * vector(model).numel() * 2)
    assert solver.objective.keep_jacobian == (chunk is None)
    theta = vector(model)
    point = solver.objective.expand(theta.unsqueeze(0))

    def penalties(named):
        total = sum(0.15 * value.square().sum() for value in named.values())
        for layer in range(2):
            right = named[f"layers.{layer}.heads.0.psi.right"].squeeze(1)
            left = named[f"layers.{layer}.heads.0.psi.left"].squeeze(1)
            c = torch.outer(left, right)[:, :14].unflatten(1, (7, 2))
            total = total + 0.02 * (c[:, 2:] - 2 * c[:, 1:-1] + c[:, :-2]).square().sum()
        return total

    loss = solver.task.loss
    of = objective(model, (x, y, weight), loss, penalties)
    torch.testing.assert_close(point.total[0], of(theta), **TIGHT)
    torch.testing.assert_close(point.gradient[0], torch.func.grad(of)(theta), **TIGHT)

    # A: JᵀHJ with the Hessian of the loss row by row (for the Gaussian its expectation, for Huber the slope over the error).
    names = [(key, p.shape) for key, p in model.named_parameters()]
    split = [shape.numel() for _, shape in names]

    def outputs(v):
        named = {key: part.view(shape) for (key, shape), part in zip(names, v.split(split), strict=True)}
        return torch.func.functional_call(model, named, (x,))

    derivative = torch.func.jacfwd(outputs)(theta)
    output = model(x).detach()
    if name in ("gaussian", "huber"):
        _, factors = loss.curvature(output, y)
        curvature = factors.mT @ factors
    else:
        curvature = torch.stack(
            [
                torch.func.hessian(lambda o, i=i: loss.rows(o.unsqueeze(0), y[i : i + 1]).sum())(output[i])
                for i in range(len(x))
            ]
        )
    weight = weight / weight.mean() / len(x)
    expected = torch.einsum("b,bip,bij,bjq->pq", weight, derivative, curvature, derivative)
    of_penalties = objective(model, (x, y, torch.ones_like(weight)), _NoLoss(), penalties)
    expected = expected + torch.func.hessian(of_penalties)(theta)
    torch.testing.assert_close(point.matrix[0], expected, rtol=1e-8, atol=1e-10)
    # The products of conjugate gradients are the same matrix, and the loss without J the same loss.
    tangent = torch.randn(len(theta), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(solver.objective.product(theta, tangent), expected @ tangent, rtol=1e-8, atol=1e-10)
    large = solver.objective.slopes(theta.unsqueeze(0))
    torch.testing.assert_close(large.gradient, point.gradient, **TIGHT)
    torch.testing.assert_close(large.total, point.total, **TIGHT)
    torch.testing.assert_close(solver.objective.losses(theta.unsqueeze(0))[1], point.total, **TIGHT)


class _NoLoss:
    def rows(self, output, target):
        return 0 * output.sum(1)


def test_a_linear_model_is_solved_as_ridge_regression() -> None:
    x, y = data(rows=40, m=3, n=2)
    model = nn.Linear(3, 2, dtype=torch.float64)
    solver = solver_for(model, (x, y), l2=0.05)
    run(solver, 30)
    # The penalty is on matrices and not on biases.
    wide = torch.cat([x, torch.ones(40, 1, dtype=torch.float64)], 1)
    held = torch.diag(torch.tensor([0.05, 0.05, 0.05, 0.0], dtype=torch.float64))
    expected = torch.linalg.solve(wide.T @ wide / 40 + held, wide.T @ y / 40)  # ∂/∂W of the mean over both outputs
    found = torch.cat([model.weight, model.bias.unsqueeze(1)], 1).detach().T
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


def test_a_curved_valley_is_followed_to_its_end() -> None:
    class Rosenbrock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([-1.2, 1.0], dtype=torch.float64))

        def forward(self, x):
            a, b = self.w
            return x[:, :1] * (1 - a) + x[:, 1:] * 100 * (b - a * a)

    model = Rosenbrock()
    x = torch.eye(2, dtype=torch.float64)
    solver = solver_for(model, (x, torch.zeros(2, 1, dtype=torch.float64)))
    losses = run(solver, 100)
    assert losses == sorted(losses, reverse=True)
    torch.testing.assert_close(model.w.detach(), torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-9)
    assert "zero" in solver.report().ended


def test_acceleration_is_half_of_the_second_derivative_pulled_back() -> None:
    model = spline_model()
    x, y = data()
    solver = solver_for(model, (x, y))
    theta = solver.starts.theta
    point = solver._point = solver.objective.expand(theta)
    scale = torch.ones_like(theta)
    step = 1e-4 * torch.randn(theta.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    factor = torch.linalg.cholesky(point.matrix + torch.eye(theta.shape[1], dtype=torch.float64))
    bent = solver._acceleration(theta, step, scale, factor, point)

    def along(t):
        return solver.objective.outputs_of_start(theta[0] + t * step[0], x)

    second = torch.func.jacfwd(torch.func.jacrev(along))(torch.zeros((), dtype=torch.float64))
    derivative = torch.func.jacrev(lambda v: solver.objective.outputs_of_start(v, x))(theta[0]).flatten(0, 1)
    pull = derivative.T @ second.flatten() * (2 / len(x))
    expected = -0.5 * torch.linalg.solve(point.matrix[0] + torch.eye(theta.shape[1], dtype=torch.float64), pull)
    assert float(expected.norm()) > 0
    torch.testing.assert_close(bent[0], expected, rtol=1e-3, atol=1e-3 * float(expected.norm()))


def test_forward_and_reverse_mode_agree() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([0.3, -0.2], dtype=torch.float64))

        def forward(self, x):
            return (x[:, :1] * self.w[0] * torch.arange(1.0, 6.0, dtype=x.dtype)).sin() * self.w[1]

    x, y = data(n=5)
    solver = solver_for(Wide(), (x, y), restarts=1)
    vectors = torch.cat([solver.starts.theta, solver.starts.theta + 0.1])
    outputs, forward = solver.objective.jacobian(vectors, x)
    solver.objective.count = 100  # more than the outputs: the other mode
    again, reverse = solver.objective.jacobian(vectors, x)
    assert forward.shape == (2, 60, 5, 2)
    torch.testing.assert_close(outputs, again, **TIGHT)
    torch.testing.assert_close(forward, reverse, **TIGHT)


@pytest.mark.parametrize(
    "spec",
    [
        kp.rpn(
            [2, 3, 2], expansion=kp.Extended((kp.BSpline(4), kp.Taylor(2))), reconciliation=kp.LowRank(2), bias=True
        ),
        kp.rpn([2, 3, 3], expansion=kp.Chebyshev(3), before="tanh", output="silu"),
        kp.rpn([2, 2], expansion=kp.Taylor(2), bias=True, after="layer_norm"),
        kp.rpn([2, 3, 2], expansion=kp.Taylor(2), reconciliation=kp.LowRank(1), remainder=kp.LinearRemainder()),
        kp.rpn([2, 2, 2], expansion=kp.BSpline(4), remainder=kp.LinearRemainder(before="silu"), bias=True),
        kp.rpn([2, 3, 2], expansion="identity", reconciliation=kp.Kronecker(terms=2), output="tanh"),
        kp.rpn([2, 3, 2], expansion=kp.Taylor(2), reconciliation=kp.Masked(0.5)),
        kp.rpn([2, 3, 2], expansion="identity", reconciliation=kp.RandomAdaption(4)),
        kp.rpn([2, 3, 1], expansion=kp.Taylor(4), reconciliation=kp.Kronecker()),
        kp.rpn([2, 3, 2], expansion=kp.Taylor(2), reconciliation=OUTER, bias=True),
        kp.rpn([2, 3, 1], expansion=kp.Taylor(2), reconciliation=kp.HyperNet(4)),
        kp.rpn([2, 3, 1], expansion=kp.Taylor(2), remainder=kp.LinearRemainder(after="tanh")),
        kp.rpn([2, 3, 1], expansion=kp.Taylor(2), remainder=kp.LinearRemainder(bias=True)),
        kp.rpn([2, 3, 1], expansion=kp.Taylor(2), channels=2),
    ],
)
def test_layer_by_layer_is_the_same_as_row_by_row(spec) -> None:
    x, y = data(n=spec.widths[-1])
    solver = solver_for(kp.Model(spec, seed=0, dtype=torch.float64), (x, y), restarts=3)
    stored = solver.objective.stored[0].x
    layered = solver.objective.layered
    plain = spec.widths[1:] == (3, 1)
    assert (layered is None) == plain
    made = (
        solver.objective.jacobian(solver.starts.theta, stored),
        solver.objective.outputs_of(solver.starts.theta, stored),
    )
    solver.objective.layered = None
    expected = (
        solver.objective.jacobian(solver.starts.theta, stored),
        solver.objective.outputs_of(solver.starts.theta, stored),
    )
    torch.testing.assert_close(made, expected, **TIGHT)
    torch.testing.assert_close(made[0][0], made[1], **TIGHT)


def test_one_recipe_goes_far_below_gradient_descent() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(300, 2, generator=generator, dtype=torch.float64)
    y = x.sum(1, keepdim=True).exp()
    model = kp.calibrate(spline_model(), x)
    losses = run(solver_for(model, (x, y), restarts=4), 60)
    assert losses[-1] < 1e-8
    torch.testing.assert_close((model(x) - y).square().mean().item(), losses[-1], rtol=1e-6, atol=0)


# ------------------------------------------------------------------------------------------------ starts


def test_the_first_start_is_the_model_and_the_best_one_is_kept() -> None:
    x, y = data()
    model = kp.calibrate(spline_model(), x)
    alone, several = copy.deepcopy(model), copy.deepcopy(model)
    own, starts = solver_for(alone, (x, y)), solver_for(several, (x, y), restarts=5)
    by_itself = [(model(x) - y).square().mean().item(), *run(own, 12)]
    for epoch in range(1, 9):
        run(starts, 1, epoch)
        # It takes the same steps among others, some of them an iteration or more later.
        first = float(starts.starts.data[0])
        assert min(abs(first / loss - 1) for loss in by_itself) < 1e-5
        assert starts.report().loss == float(starts.starts.data.min())
        assert torch.equal(vector(several), starts.starts.theta[starts.starts.data.argmin()])
    assert first < by_itself[0]
    assert len(set(starts.starts.damping.tolist())) > 1


def test_starts_differ_repeat_keep_what_kappa_has_learned_and_touch_no_generator() -> None:
    x, y = data()
    model = kp.calibrate(spline_model(), 3 * x)
    before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    first = vector(model)
    state = torch.get_rng_state()
    solver = solver_for(model, (x, y), restarts=3, seed=7)
    assert torch.equal(torch.get_rng_state(), state)
    again = solver_for(model, (x, y), restarts=3, seed=7)
    other = solver_for(model, (x, y), restarts=3, seed=8)
    assert torch.equal(solver.starts.theta, again.starts.theta)
    assert torch.equal(solver.starts.theta[0], first)
    assert not torch.equal(solver.starts.theta[1], solver.starts.theta[2])
    assert not torch.equal(solver.starts.theta[1], other.starts.theta[1])
    assert all(torch.equal(tensor, before[name]) for name, tensor in solver.objective.model.named_buffers())


def test_modules_of_torch_can_have_several_starts() -> None:
    x, y = data()
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    state = torch.get_rng_state()
    solver = solver_for(model, (x, y), restarts=4)
    losses = run(solver, 20)
    assert torch.equal(torch.get_rng_state(), state)
    assert losses[-1] < 0.1 * losses[0]
    assert len({float(v) for v in solver.starts.theta[:, 0]}) == 4


def test_a_start_that_is_not_finite_is_dropped() -> None:
    x, y = data()
    model = spline_model()
    solver = solver_for(model, (x, y), restarts=3)
    solver.starts.theta[1] = math.nan
    run(solver, 3)
    assert solver.report().details["starts"] == 2
    assert solver.starts.reasons[1] == module.DROPPED
    assert bool(vector(model).isfinite().all())


# ------------------------------------------------------------------------------------------------ resuming


@pytest.mark.parametrize(
    ("way", "dtype"),
    [(way, torch.float64) for way in ("kept", "rows", "chunks", "conjugate")]
    + [("kept", torch.float32)]
    + [pytest.param(way, torch.float32, marks=pytest.mark.slow) for way in ("rows", "chunks", "conjugate")],
)
def test_resuming_is_exact(dtype, way, monkeypatch) -> None:
    if way == "chunks":
        monkeypatch.setattr(jacobian, "MAX_JACOBIAN", 3_000)
    if way == "conjugate":
        monkeypatch.setattr(jacobian, "MAX_DIRECT", 5)
    x, y = data(dtype=dtype)
    model = spline_model(dtype=dtype)
    if way == "rows":  # row by row, as the models that are not taken layer by layer
        spec = kp.rpn([2, 2, 1], expansion=kp.BSpline(4), reconciliation=kp.LowRank(1), remainder=kp.LinearRemainder())
        model = kp.Model(spec, seed=0, dtype=dtype)
    whole = copy.deepcopy(model)
    starts, epochs = (3, 9) if way in ("kept", "rows") else (2, 4)
    straight = solver_for(whole, (x, y), restarts=starts)
    run(straight, epochs)
    solver = solver_for(model, (x, y), restarts=starts)
    for epoch in range(1, epochs + 1):
        run(solver, 1, epoch)
        tensors, plain = solver.state()
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        model = copy.deepcopy(model)
        solver = solver_for(model, (x, y), restarts=starts)
        solver.restore((tensors, plain))
        assert list(solver.steps(epoch, 1)) == []
    assert torch.equal(vector(model), vector(whole))
    assert torch.equal(solver.starts.theta, straight.starts.theta)
    assert solver.report() == straight.report()


def test_a_model_in_single_precision_is_trained_in_double() -> None:
    x, y = data(dtype=torch.float32)
    single, double = spline_model(dtype=torch.float32), spline_model().double()
    double.load_state_dict({name: tensor.double() for name, tensor in single.state_dict().items()})
    run(solver_for(single, (x, y)), 12)
    run(solver_for(double, (x.double(), y.double())), 12)
    assert single(x).dtype == torch.float32
    torch.testing.assert_close(vector(single), vector(double).float(), rtol=0, atol=0)


# ------------------------------------------------------------------------------------------------ processes and large models


def test_processes_sum_their_rows() -> None:
    class Twice(Group):
        """Stands for two processes with the same rows."""

        def sum(self, tensor):
            return 2 * tensor

    x, y = data()
    one, two = spline_model(), spline_model()
    first = run(solver_for(one, (torch.cat([x, x]), torch.cat([y, y]))), 6)
    second = run(solver_for(two, (x, y), group=Twice()), 6)
    torch.testing.assert_close(first, second, rtol=1e-8, atol=0)


def test_conjugate_gradients_find_the_same_optimum(monkeypatch) -> None:
    x, y = data(rows=80, m=3)
    y = (y[:, 0] > 0.1).long()
    direct, conjugate = (nn.Sequential(nn.Linear(3, 2)).double() for _ in range(2))
    conjugate.load_state_dict(direct.state_dict())
    first = run(solver_for(direct, (x, y), loss="cross_entropy", l2=0.01), 60)
    monkeypatch.setattr(jacobian, "MAX_DIRECT", 2)
    solver = solver_for(conjugate, (x, y), loss="cross_entropy", l2=0.01)
    second = run(solver, 60)
    assert not solver.objective.direct
    torch.testing.assert_close(first[-1], second[-1], rtol=1e-7, atol=0)
    torch.testing.assert_close(vector(direct), vector(conjugate), rtol=0, atol=1e-4)


def test_frozen_parameters_stay() -> None:
    x, y = data()
    model = spline_model()
    model.freeze("layers.0")
    before = {name: p.clone() for name, p in model.named_parameters()}
    losses = run(solver_for(model, (x, y)), 5)
    assert losses[-1] < losses[0]
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == name.startswith("layers.0")


# ------------------------------------------------------------------------------------------------ ends and refusals


def test_it_ends_where_nothing_changes() -> None:
    x, y = data()
    y = y + 0.3 * torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    solver = solver_for(nn.Linear(2, 1, dtype=torch.float64), (x, y), tolerance=1e-3)
    run(solver, 50)
    assert solver.report().ended
    assert solver.report().details["starts"] == 0
    assert solver.report().details["gradient_norm"] < 1e-9


def test_a_larger_tolerance_ends_sooner() -> None:
    x, y = data(rows=200)
    y = y + 0.3 * torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loose, tight = (run(solver_for(spline_model(), (x, y), tolerance=t), 200) for t in (0.2, 1e-9))
    assert len(loose) < len(tight)
    assert tight[-1] < loose[-1]


def test_a_loss_that_is_not_finite_is_named_and_weights_stay() -> None:
    x, y = data()
    model = spline_model()
    with torch.no_grad():
        next(model.parameters())[0, 0] = 1e200
    before = vector(model)
    with pytest.raises(NotFinite) as caught:
        run(solver_for(model, (x, y)), 1)
    assert caught.value.statistic in ("loss", "gradient")
    assert len(caught.value.batch.x) == len(x)
    assert torch.equal(vector(model), before)


def test_a_trial_that_is_not_finite_is_only_rejected() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([4.0], dtype=torch.float64))

        def forward(self, x):
            return self.w.sqrt() * x[:, :1]

    model = Root()  # the first step from 4 to √w = 0.001 leads below zero
    x = torch.ones(3, 1, dtype=torch.float64)
    solver = solver_for(model, (x, 0.001 * x))
    losses = run(solver, 60)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 1e-12


REFUSED = {
    "dropout": (lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1)), {}, "random.*adamw"),
    "batch norm": (lambda: nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)), {}, "batch.*adamw"),
    "l1": (lambda: spline_model(), {"l1": 0.1}, "l1=0.1.*adamw"),
    "groups": (
        lambda: kp.Model(kp.rpn([2, 1], expansion=kp.BSpline()), seed=0),
        {"group_l1": 0.1},
        "group_l1.*adamw",
    ),
    "nothing to draw": (lambda: _Bare(), {"restarts": 2}, "restarts=1"),
    "random": (lambda: _Noisy(), {}, "each row.*adamw"),
}


class _Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, 1))

    def forward(self, x):
        return x @ self.w


class _Noisy(_Bare):
    def forward(self, x):
        return x @ self.w + torch.randn_like(x[:, :1])


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_do_is_refused(name) -> None:
    make, options, message = REFUSED[name]
    with pytest.raises(kp.SpecError, match=f"levenberg_marquardt: .*{message}"):
        run(solver_for(make().double(), data(), **options), 1)


def test_a_loss_without_curvature_is_refused() -> None:
    x, y = data()
    with pytest.raises(kp.SpecError, match=r"levenberg_marquardt: hinge has no curvature.*mse"):
        solver_for(spline_model(), (x, (y[:, 0] > 0).long()), loss="hinge")


def test_sparse_inputs_are_refused() -> None:
    x, y = data()
    model = kp.Model(kp.rpn([2, 1], expansion=kp.Taylor(2)), seed=0, dtype=torch.float64)
    with pytest.raises(kp.SpecError, match=r"levenberg_marquardt: sparse.*to_dense"):
        run(solver_for(model, (x.to_sparse_csr(), y)), 1)


def test_a_loss_far_above_the_targets_is_not_zero() -> None:
    x = torch.rand(200, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1
    y = torch.exp(torch.sin(math.pi * x[:, :1]) + x[:, 1:] ** 2)
    spec = kp.rpn([2, 3, 1], kp.BSpline(5), remainder="linear")
    model = kp.calibrate(kp.Model(spec, seed=0, dtype=torch.float64), x * 1e30)
    last = kp.fit(model, (x * 1e30, y), solver="levenberg_marquardt", epochs=60)[-1]
    assert last.loss < float(y.square().mean()) or "zero" not in str(last.ended)
