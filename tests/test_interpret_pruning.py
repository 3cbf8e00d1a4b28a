"""Pruning of any model: what is removed, what the outputs become, losses, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

import kapsi as kp

F64 = torch.float64


def points(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=F64) * 2 - 1


def drawn(spec: kp.ModelSpec, seed: int = 0) -> kp.Model:
    model = kp.Model(spec, seed=seed, dtype=F64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=F64))
    return model


KINDS: dict[str, dict[str, Any]] = {
    "chebyshev": {"expansion": kp.Chebyshev(3)},
    "fourier": {"expansion": kp.Fourier(2)},
    "wavelet": {"expansion": "mexican_hat"},
    "radial": {"expansion": "gaussian_rbf"},
    "extended": {"expansion": kp.Extended((kp.BSpline(3), kp.Identity()))},
    "low_rank": {"expansion": kp.BSpline(3), "reconciliation": kp.LowRank(2)},
    "identity remainder": {"expansion": kp.Chebyshev(2), "remainder": kp.IdentityRemainder("silu")},
    "activations": {"expansion": kp.Identity(), "bias": True, "output": "tanh"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_removed_edges_are_replaced_by_their_means(kind: str) -> None:
    x = points(40, 3)
    model = kp.calibrate(drawn(kp.rpn([3, 3], **KINDS[kind])), x)
    (edges,) = kp.interpret.edge_functions(model, x)
    (scores,) = kp.interpret.attribution(model, x).edges
    threshold = float(scores.flatten().sort().values[2])
    result = kp.interpret.prune(model, x, edges=threshold)
    assert result.removed["edges"] == tuple(f"layers.0: {i} → {o}" for o, i in (scores <= threshold).nonzero().tolist())
    mean = torch.where(scores > threshold, edges.values, edges.values.mean(0))
    torch.testing.assert_close(result.model(x).detach(), mean.sum(-1) + edges.constant, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("low_rank", "identity remainder")])
def test_a_node_without_effect_is_gone(kind: str) -> None:
    x = points(40, 3)
    model = kp.calibrate(drawn(kp.rpn([3, 4, 2], **KINDS[kind])), x)
    with torch.no_grad():
        model.layers[1].heads[0].psi["matrix"].unflatten(1, (-1, 4))[..., 2] = 0
    result = kp.interpret.prune(model, x, nodes=0)
    assert result.model.spec.widths == (3, 3, 2)
    assert result.removed["nodes"] == ("layers.0: node 2",)
    assert result.parameters[1] < result.parameters[0]
    torch.testing.assert_close(result.model(x), model(x), rtol=1e-9, atol=1e-9)


def test_edges_of_selected_inputs_are_removed() -> None:
    """The additive model of a table has splines of each column, with their own grids."""
    parts = (kp.SelectedInputs(kp.BSpline(3)), kp.SelectedInputs(kp.Chebyshev(2), 2))
    model = drawn(kp.rpn([3, 1], kp.Extended(parts), bias=True))
    model.layers[0].heads[0].assign("expansion", **{"1": {"selection": [2, 1]}})
    x = points(40, 3)
    (edges,) = kp.interpret.edge_functions(model, x)
    torch.testing.assert_close(edges.outputs(), model(x).detach())
    with torch.no_grad():
        model.layers[0].heads[0].psi["matrix"][:, -4::2] = 0  # of input 2
    small = kp.interpret.prune(model, x, edges=0)
    assert small.removed["edges"] == ("layers.0: 2 → 0",)
    torch.testing.assert_close(small.model(x), model(x))


@pytest.mark.parametrize("standardized", [False, True])
@pytest.mark.parametrize("expansion", [kp.Taylor(2), kp.Chebyshev(2)], ids=["taylor", "chebyshev"])
def test_removed_inputs_have_no_effect(expansion: kp.Expansion, standardized: bool) -> None:
    x = 3 + points(60, 3)
    y = x[:, :1] * x[:, 1:2]
    spec = kp.rpn([3, 2, 1], expansion, bias=True)
    model = kp.standardized(spec, x, y, seed=0, dtype=F64) if standardized else kp.Model(spec, seed=0, dtype=F64)
    with torch.no_grad():  # the third input has a small effect
        for parameter in model.layers[1 if standardized else 0].heads[0].psi.parameters():
            parameter[:, 2::3] *= 1e-4
            parameter[:, -3:] *= 1e-4  # x₃ x₁ and x₃ x₂
    result = kp.interpret.prune(model, (x, y), inputs=1e-3)
    assert result.removed["inputs"] == ("x3",)
    other = x.clone()
    other[:, 2] = 100.0
    torch.testing.assert_close(result.model(other), result.model(x))
    torch.testing.assert_close(result.model(x), model(x), rtol=1e-2, atol=1e-2)
    again = kp.Model(result.model.spec, dtype=F64)
    again.load_state_dict(result.model.state_dict())
    torch.testing.assert_close(again(x), result.model(x))


def test_heads_of_a_sum_are_removed_and_fine_tuned() -> None:
    """Two heads share κ, and the owner of its tensors goes."""
    x = points(80, 2)
    heads = (kp.HeadSpec(kp.BSpline(4)), kp.HeadSpec(kp.Taylor(2)), kp.HeadSpec(kp.BSpline(4), kp.LowRank(1)))
    model = kp.calibrate(drawn(kp.ModelSpec((2, 1), kp.LayerSpec(heads, output="tanh"))), x)
    with torch.no_grad():
        model.layers[0].heads[0].psi["matrix"].fill_(0.1)  # splines add up to one: a constant
    y = model(x).detach()
    result = kp.interpret.prune(model, (x, y), heads=1e-9, fine_tune={"epochs": 2})
    assert result.removed["heads"] == ("layers.0.heads.0",)
    assert result.before == 0
    assert result.after == pytest.approx(0, abs=1e-20)
    assert result.fine_tuned is not None
    assert repr(result).startswith("Pruned(1 head removed; parameters ")
    assert len(result.model.layers[0].heads) == 2


def test_heads_and_columns_of_an_estimator_are_removed() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (150, 3))
    y = np.sin(2 * x[:, 0]) + x[:, 1]
    fitted = kp.RPNRegressor(heads=["linear", "additive"]).fit(x, y)
    result = kp.interpret.prune(fitted, (x, y), inputs=0.02, loss="huber")
    assert result.removed["inputs"] == ("x2",)
    assert result.before <= result.after < 0.05
    changed = x.copy()
    changed[:, 2] = 0.9
    np.testing.assert_allclose(result.model.predict(changed), result.model.predict(x), atol=1e-9)
    assert abs(fitted.predict(changed) - fitted.predict(x)).max() > 0


def test_what_cannot_be_pruned_is_named() -> None:
    x = points(20, 2)
    model = drawn(kp.rpn([2, 2, 1], kp.Taylor(2)))
    wrong: dict[str, dict[str, Any]] = {
        "give the largest importance": {},
        r"prune\(edges\)": {"edges": -1},
        "layers.0.heads.0: .*Taylor mixes inputs": {"edges": 0.1},
        "no input would be left": {"inputs": 2},
        r"options of kp.fit": {"heads": 0.1, "fine_tune": 3},
        "no loss is called 'mean_square'; choose from": {"heads": 0.1, "loss": "mean_square"},
    }
    for text, options in wrong.items():
        with pytest.raises(kp.SpecError, match=text):
            kp.interpret.prune(model, x, **options)
    with pytest.raises(kp.SpecError, match=r"expected a kp\.Model"):
        kp.interpret.prune(torch.nn.Linear(2, 1), x, edges=0.1)
    two = drawn(kp.rpn([2, 1], kp.Taylor(2), heads=2))
    with pytest.raises(kp.SpecError, match=r"no head of layers.0 would be left; use a lower threshold than heads=10"):
        kp.interpret.prune(two, x, heads=10)
    for data, text in ((None, "needs data"), ((x, x[:3]), "20 rows of inputs and 3 of targets")):
        with pytest.raises(kp.DataError, match=text):
            kp.interpret.prune(model, data, heads=0.1)
    with pytest.raises(kp.DataError, match="needs targets"):
        kp.interpret.prune(model, x, heads=0.1, fine_tune={})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((points(9, 2), torch.full((9, 1), float("nan"))), "targets must be finite"),
        ((points(9, 2), torch.ones(9, 2)), r"needs targets of shape \(rows, 1\)"),
        ((points(9, 2), torch.ones(9, dtype=torch.long)), "needs one output per class"),
        ((points(9, 2), ["a"] * 9), "expected numbers as targets"),
        ("rows", "expected numbers as inputs, got str"),
        ((points(9, 2).to("meta"), points(9, 1)), "on the meta device"),
    ],
)
def test_data_that_do_not_match_the_model_are_refused(data: Any, message: str) -> None:
    model = kp.Model(kp.rpn([2, 1], kp.Identity()), seed=0, dtype=F64)
    with pytest.raises((kp.DataError, kp.SpecError), match=message):
        kp.interpret.prune(model, data, edges=0)


def test_frames_and_half_precision_are_rows_of_a_model() -> None:
    frame = pd.DataFrame(points(9, 2).numpy())
    model = kp.Model(kp.rpn([2, 1], kp.Identity()), seed=0, dtype=torch.bfloat16)
    found = kp.interpret.prune(model, (frame, frame[[0]]), edges=0)
    assert found.before == found.after


def test_targets_of_estimators_are_checked() -> None:
    x = points(20, 2).numpy()
    labels = np.where(x[:, :1] > 0, "yes", "no")
    fitted = kp.RPNClassifier(heads=["linear"]).fit(x, labels[:, 0])
    assert kp.interpret.prune(fitted, (x, labels), edges=0).before is not None
    for y, message in (
        ([None, *labels[1:, 0]], "the target None is none of the classes no, yes"),
        (x, "one label for each row"),
    ):
        with pytest.raises(kp.DataError, match=message):
            kp.interpret.prune(fitted, (x, y), edges=0)
    with pytest.raises(kp.DataError, match="expected at least 2 rows, got 1"):
        kp.interpret.prune(fitted, (x[:1], labels[:1]), edges=0)


def test_integer_targets_are_values_of_a_loss_of_values() -> None:
    x = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)
    model = kp.Model(kp.rpn([1, 1], "identity"), seed=0, dtype=torch.float64)
    losses = [kp.interpret.prune(model, (x, y), inputs=0.1, loss="mse").before for y in ([1, 0, 2], [1.0, 0.0, 2.0])]
    assert losses[0] == losses[1]
    with pytest.raises(kp.SpecError, match="cross_entropy needs one output per class"):
        kp.interpret.prune(model, (x, [1, 0, 2]), inputs=0.1)
