"""What is said of a loss or a gradient that is not finite: the first place, how many numbers, and nothing else is changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import kapsi as kp
from kapsi.training.data import Batch
from kapsi.training.diagnosis import diagnose

MSE = kp.MSE()
NAN, INF = float("nan"), float("inf")


def batch_of(rows=6, inputs=3, outputs=2, dtype=torch.float32, weight=None):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(rows, n, dtype=dtype, generator=generator) for n in (inputs, outputs))
    return Batch(x, y, weight, rows)


KAPPA = kp.Chebyshev(2)


def model_of(expansion=KAPPA, widths=(3, 4, 2), heads=1, **head):
    layer = kp.LayerSpec(tuple(kp.HeadSpec(expansion, bias=True, **head) for _ in range(heads)))
    return kp.Model(kp.ModelSpec(widths, (layer,)), seed=0)


def said(model, batch, statistic="loss", loss=MSE, step=37):
    text = diagnose(model, batch, loss, statistic, step)
    assert "\n" not in text
    assert text.startswith(f"step {step}: ")
    assert "while looking" not in text
    return text.removeprefix(f"step {step}: ")


def spoil(tensor, *numbers):
    """Set the first elements of a tensor."""
    with torch.no_grad():
        for i, number in enumerate(numbers):
            tensor[tuple(int(k) for k in torch.unravel_index(torch.tensor(i), tensor.shape))] = number


def test_inputs_targets_and_weights_come_first() -> None:
    batch = batch_of()
    spoil(batch.x, NAN, INF, -INF)
    assert said(model_of(), batch).startswith(
        "the inputs are not finite (1 of 18 values is nan and 2 infinite, the largest"
    )
    batch = batch_of()
    spoil(batch.y, INF)
    assert said(model_of(), batch).startswith(
        "the targets are not finite (1 of 12 values is infinite, the largest finite is"
    )
    batch = batch_of(weight=torch.full((6,), NAN))
    assert said(model_of(), batch).startswith(
        "the weights of the rows are not finite (6 of 6 values are nan, none is finite)"
    )


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    ("spec", "store", "name", "path"),
    [
        ({"reconciliation": kp.LowRank(2)}, "psi", "left", "psi.left"),
        ({}, "psi", "matrix", "psi.matrix"),
        ({"expansion": kp.BSpline()}, "kappa", "range", "kappa.range"),
        ({"remainder": kp.LinearRemainder()}, "pi", "matrix", "pi.matrix"),
        (
            {"remainder": kp.ExpansionRemainder(kp.Legendre(2), kp.Dense())},
            "pi",
            "reconciliation",
            "pi.reconciliation.matrix",
        ),
    ],
)
def test_the_tensor_that_is_damaged_is_named(spec, store, name, path, layer, heads) -> None:
    model = model_of(**spec, heads=heads)
    if heads > 1:  # heads that are run as one, unless there are hooks on them
        assert model.layers[layer].groups() == [[0, 1, 2]]
    which = 0 if store == "kappa" else heads - 1  # κ is owned by the first head
    tensor = getattr(model.layers[layer].heads[which], store)[name]
    tensor = tensor if isinstance(tensor, torch.Tensor) else tensor["matrix"]
    spoil(tensor, NAN, 0.5, INF)
    text = said(model, batch_of())
    place = f"layers.{layer}.heads.{which}.{path} is not finite (1 of {tensor.numel()} values is nan and 1 infinite, "
    assert text.startswith(place)
    assert "so is the loss" in text
    assert "start again from finite weights" in text


def test_the_bias_and_the_affine_part_of_a_norm() -> None:
    model = model_of()
    spoil(model.layers[1].heads[0].bias, NAN)
    assert said(model, batch_of()).startswith("layers.1.heads.0.bias is not finite (1 of 2 values is nan")
    model = model_of(before=(kp.BatchNorm(affine=True),))
    spoil(model.layers[0].heads[0].before[0].weight, INF)
    assert said(model, batch_of()).startswith(
        "layers.0.heads.0.before.0.weight is not finite (1 of 3 values is infinite"
    )


@pytest.mark.parametrize("reconciliation", [kp.Dense(), kp.DualLowRankKronecker(1)], ids=lambda r: r.name)
@pytest.mark.parametrize("large", [False, True])
def test_columns_of_kappa_that_overflow_are_told(reconciliation, large, monkeypatch) -> None:
    if large:  # only the one row that matters fits
        monkeypatch.setattr("kapsi.training.diagnosis.MAX_ELEMENTS", 45)
    model = model_of(kp.Taylor(3), reconciliation=reconciliation)
    batch = batch_of()
    batch.x[2] = 1e20
    text = said(model, batch, "output")
    # Of each row there are 39 columns: 27 of degree 3 and 9 of degree 2 are beyond float32.
    rows = 1 if large else 6
    assert text.startswith(
        f"κ(x) of layers.0.heads.0, Taylor(degree=3, symmetric=False), is not finite (36 of {39 * rows} "
    )
    assert "the largest finite is 1e+20" in text
    assert "so is" not in text
    assert "kapsi.calibrate" in text


def test_a_product_that_overflows_is_the_output_of_the_head_and_a_sum_that_of_the_layer() -> None:
    model = model_of(kp.Identity())
    with torch.no_grad():
        model.layers[1].heads[0].psi["matrix"].fill_(3e38)
    text = said(model, batch_of())
    assert text.startswith("the output of layers.1.heads.0 is not finite (")
    model = model_of(kp.Identity(), heads=3, widths=(3, 2))
    with torch.no_grad():
        for head in model.layers[0].heads:
            head.psi["matrix"].zero_()
            head.bias.fill_(2e38)
    text = said(model, batch_of())
    assert text.startswith("the output of layers.0 is not finite (12 of 12 values are infinite, none is finite)")


def test_the_loss_of_a_row_that_overflows() -> None:
    model = model_of()
    batch = batch_of()
    batch.y[1, 0] = 3e38
    text = said(model, batch)
    assert text.startswith("the mse losses of the rows are not finite (1 of 6 values is infinite, ")
    batch = batch_of()
    batch.y[:] = 1.2e19
    assert said(model, batch).startswith("the sum of the mse losses is not finite, the largest per row is 1.44e+38")


class Root(nn.Module):
    """√(w x), whose slope at 0 is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (self.weight * x).abs().sqrt()


def test_a_gradient_that_is_not_finite_where_the_loss_is() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), Root(), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(3))
    batch = batch_of()
    batch.x[4, 1] = 0.0
    text = said(model, batch, "gradient")
    assert text.startswith("the gradient of 1.weight is not finite (1 of 3 values is nan, the largest finite is ")
    assert "; the gradient of 0.weight is not finite (3 of 9 values are nan" in text
    expected = float(MSE.rows(model(batch.x), batch.y).mean().detach())
    assert f"the loss was {expected:.3g}; lower learning_rate, set max_grad_norm, or scale the inputs" in text
    assert all(p.grad is None for p in model.parameters())


def test_the_gradients_that_are_there_are_looked_at_first() -> None:
    model, batch = model_of(widths=(3, 4, 4, 4, 2)), batch_of()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    spoil(model.layers[1].heads[0].psi["matrix"].grad, NAN, INF, 2.5)
    text = said(model, batch, "gradient")
    assert text.startswith("the gradient of layers.1.heads.0.psi.matrix is not finite (1 of 32 values is nan and ")
    assert "1 infinite, the largest finite is 2.5); the loss was " in text
    assert "1 more" not in text
    for p in model.parameters():
        spoil(p.grad, NAN)
    text = said(model, batch, "gradient")
    assert text.startswith("the gradient of layers.3.heads.0.psi.matrix is not finite")
    assert text.count("the gradient of") == 3
    assert "; and 5 more; the loss was" in text


def test_a_norm_that_overflows_and_nothing_that_does() -> None:
    model, batch = model_of(), batch_of()
    assert said(model, batch, "gradient").startswith(
        "the gradient is not finite, but it is finite when these rows are run again: "
    )
    assert said(model, batch).startswith("the loss is not finite, but it is finite when these rows are run again: ")
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    model.layers[0].heads[0].bias.grad[0] = 1e25
    text = said(model, batch, "gradient")
    assert text.startswith(
        "the norm of the gradient is not finite, as its square is too large; the largest gradient is 1e+25, "
    )
    assert "of layers.0.heads.0.bias; " in text


def test_no_rows_at_all() -> None:
    assert said(model_of(), batch_of(0)).startswith("the loss is not finite, but not because of rows of this process")


def test_any_module_is_looked_into() -> None:
    class Logarithm(nn.Module):
        def forward(self, x, *, shift):
            return {"y": (x.log() + shift, None)}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logarithm, self.last = Logarithm(), nn.Linear(3, 2)

        def forward(self, x):
            return self.last(self.logarithm(x.square(), shift=1.0)["y"][0])

    batch, net = batch_of(), Net()
    batch.x[0, 0] = 0.0
    assert said(net, batch).startswith("the output of logarithm is not finite (1 of 18 values is infinite, ")

    class Between(nn.Sequential):
        def forward(self, x):
            return self[0](x.square().log())

    assert said(Between(nn.Linear(3, 2)), batch).startswith("an input of 0 is not finite (1 of 18 values is infinite, ")

    class Bare(nn.Module):
        def forward(self, x):
            return x.log()[:, :2]

    batch.x[0] = -1.0
    assert said(Bare(), batch).startswith("the output of Bare is not finite (")


def test_sparse_inputs() -> None:
    model = model_of(kp.Taylor(2))
    x = torch.eye(3).to_sparse_csr()
    batch = Batch(x, torch.zeros(3, 2), None, 3)
    spoil(model.layers[0].heads[0].psi["matrix"], NAN)
    assert said(model, batch).startswith("layers.0.heads.0.psi.matrix is not finite (1 of 48 values is nan")
    x.values()[1] = INF
    assert said(model, batch).startswith(
        "the inputs are not finite (1 of 3 values is infinite, the largest finite is 1)"
    )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("damaged", ["nothing", "weights", "columns"])
def test_nothing_is_changed(training, damaged) -> None:
    head = kp.HeadSpec(kp.Taylor(2), before=("dropout", kp.BatchNorm(affine=True)), after=("dropout",))
    model = kp.Model(kp.ModelSpec((3, 4, 2), (kp.LayerSpec((head,), output=("batch_norm",)),)), seed=0).train(training)
    model.layers[0].eval()
    batch = batch_of()
    for p in list(model.parameters())[1:]:
        p.grad = torch.ones_like(p)
    if damaged == "weights":
        spoil(model.layers[1].heads[0].psi["matrix"], NAN)
    elif damaged == "columns":
        batch.x.mul_(1e30)
    modes = [module.training for module in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    buffers = {name: id(tensor) for name, tensor in model.named_buffers()}
    gradients = [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in model.parameters()]
    state = torch.get_rng_state()
    said(model, batch, "gradient")
    assert torch.equal(torch.get_rng_state(), state)
    assert modes == [module.training for module in model.modules()]
    assert buffers == {name: id(tensor) for name, tensor in model.named_buffers()}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.nan_to_num(), before[name].nan_to_num()), name
    for p, had in zip(model.parameters(), gradients, strict=True):
        assert (p.grad is None) is (had is None)
        assert had is None or (id(p.grad) == had[0] and torch.equal(p.grad, had[1]))
    assert not any(module._forward_hooks for module in model.modules())


def test_it_never_raises() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            raise RuntimeError("no\nway")

    model = Broken()
    text = diagnose(model, batch_of(), MSE, "gradient", 3)
    assert text.startswith(
        "step 3: the gradient is not finite (RuntimeError in the search for the cause: no way); lower"
    )
    assert "\n" not in text
    assert model.calls == 0
    text = diagnose(nn.Linear(2, 1), batch_of(), MSE, "loss", 1)
    assert text.startswith("step 1: the loss is not finite (RuntimeError")
