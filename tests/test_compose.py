"""Processing inside of expansions: between the parts of nested and extended ones, and of a single part."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kapsi as kp


def head(kappa: kp.Expansion, **options: object) -> kp.Head:
    return kp.Head(3, 2, kp.HeadSpec(kappa, **options), dtype=torch.float64, seed=0)


def rows(count: int = 7) -> torch.Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def columns(kappa: kp.Expansion, x: torch.Tensor) -> torch.Tensor:
    return head(kappa).expand(x).dense()


def test_processing_of_nested_parts_comes_before_the_next_part() -> None:
    x, chebyshev, taylor = rows(), kp.Chebyshev(2), kp.Taylor(2)
    inner = F.layer_norm(columns(chebyshev, x), (6,)).tanh()
    expected = kp.Head(6, 1, kp.HeadSpec(taylor), dtype=torch.float64).expand(inner).dense()
    found = columns(kp.Nested((chebyshev, taylor), between=("layer_norm", "tanh")), x)
    torch.testing.assert_close(found, expected)
    own = columns(kp.Nested((kp.Processed(chebyshev, after=("layer_norm", "tanh")), taylor)), x)
    torch.testing.assert_close(own, expected)


def test_processing_of_extended_parts_is_of_each_part_by_itself() -> None:
    x, parts = rows(), (kp.Taylor(2), kp.Identity())
    for between, step in (("layer_norm", lambda y: F.layer_norm(y, y.shape[-1:])), ("sigmoid", torch.sigmoid)):
        expected = torch.cat([step(columns(part, x)) for part in parts], -1)
        torch.testing.assert_close(columns(kp.Extended(parts, between=between), x), expected)
    mixed = columns(kp.Extended((kp.Processed(parts[0], before="tanh", after="relu"), parts[1])), x)
    torch.testing.assert_close(mixed, torch.cat([columns(parts[0], x.tanh()).relu(), x], -1))


def test_a_layer_norm_between_extended_parts_keeps_the_structure() -> None:
    kappa = kp.Extended((kp.Taylor(2), kp.Identity()), between="layer_norm")
    model = kp.Model(kp.rpn([300, 2], kappa, kp.LowRank(1)), device="meta")
    (report,) = kp.explain(model, 64)
    assert "layer norm folded into" in report.route
    assert report.largest < 64 * 300 * 300


def test_batch_norm_between_parts_has_statistics_of_its_own() -> None:
    x, kappa = rows(50), kp.Nested(("b_spline", "taylor"), between="batch_norm")
    made = head(kappa)
    norm = nn.BatchNorm1d(24, affine=False, dtype=torch.float64)
    inner = columns(kp.BSpline(), x)
    taylor = kp.Head(24, 1, kp.HeadSpec(kp.Taylor(2)), dtype=torch.float64)
    for _ in range(3):
        torch.testing.assert_close(made.expand(x).dense(), taylor.expand(norm(inner)).dense())
    made.eval(), norm.eval()
    torch.testing.assert_close(made.expand(x).dense(), taylor.expand(norm(inner)).dense())
    assert made.state_dict()["kappa.0.after.0.running_mean"].abs().sum() > 0


def test_processing_inside_is_saved_trained_and_drawn_with_the_model(tmp_path) -> None:
    affine = {"kind": "layer_norm", "affine": True}
    kappa = kp.Extended(("chebyshev", {"kind": "processed", "expansion": "taylor", "after": [affine, "tanh"]}))
    spec = kp.rpn([3, 2, 1], kappa)
    kp.save_spec(spec, tmp_path / "spec.yaml")
    assert kp.load_spec(tmp_path / "spec.yaml") == spec
    model = kp.Model(spec, seed=0, dtype=torch.float64)
    name = "layers.0.heads.0.kappa.1.after.0.weight"
    x = rows(40)
    kp.fit(model, (x, x.sum(1, keepdim=True)), epochs=3, solver="adamw")
    weight = model.get_parameter(name).detach().clone()
    assert not torch.equal(weight, torch.ones_like(weight))
    kp.save(model, tmp_path / "m.safetensors")
    torch.testing.assert_close(kp.load(tmp_path / "m.safetensors")(x), model(x), rtol=0, atol=0)
    model.reset_parameters(0)
    assert torch.equal(model.get_parameter(name).detach(), torch.ones_like(weight))
    empty = kp.Model(spec, device="meta").to_empty(device="cpu").double()
    empty.reset_parameters(0)
    torch.testing.assert_close(empty(x), model(x))


def test_heads_with_random_or_trained_processing_inside_have_a_kappa_each() -> None:
    layer = kp.LayerSpec((kp.HeadSpec(kp.Nested(("chebyshev", "taylor"), between="dropout")),) * 2)
    assert kp.Layer(3, 2, layer)._owners == [0, 1]
    affine = kp.Nested(("chebyshev", "taylor"), between={"kind": "layer_norm", "affine": True})
    assert kp.Layer(3, 2, kp.LayerSpec((kp.HeadSpec(affine),) * 2))._owners == [0, 1]
    plain = kp.Nested(("chebyshev", "taylor"), between="layer_norm")
    assert kp.Layer(3, 2, kp.LayerSpec((kp.HeadSpec(plain),) * 2))._owners == [0, 0]


def test_dropout_between_parts_acts_in_training_only() -> None:
    made, x = head(kp.Nested(("chebyshev", "taylor"), between="dropout")), rows()
    assert not torch.equal(made(x), made(x))
    made.eval()
    torch.testing.assert_close(made.expand(x).dense(), columns(kp.Nested(("chebyshev", "taylor")), x))
    for solver in ("ridge", "levenberg_marquardt"):
        model = kp.Model(kp.ModelSpec((3, 2), kp.LayerSpec(made.spec)), dtype=torch.float64)
        with pytest.raises(kp.SpecError, match=r"[Dd]ropout"):
            kp.fit(model, (x, x[:, :2]), solver=solver, epochs=1)


def test_calibration_sees_the_processed_outputs() -> None:
    x = rows(200)
    made = kp.calibrate(head(kp.Nested(("identity", "b_spline"), between="sigmoid")), x)
    inner = x.sigmoid()
    torch.testing.assert_close(made.kappa["1"]["range"], torch.stack((inner.amin(0), inner.amax(0))))
    made = kp.calibrate(head(kp.Processed(kp.BSpline(), before="sigmoid", after="tanh")), x)
    torch.testing.assert_close(made.kappa["expansion"]["range"], torch.stack((inner.amin(0), inner.amax(0))))


def test_a_finer_grid_after_processing_keeps_the_function() -> None:
    x = rows(50)
    for kappa in (
        kp.Nested(("chebyshev", "b_spline"), between=("batch_norm", "tanh")),
        kp.Processed(kp.BSpline(), before=("batch_norm", "tanh")),
    ):
        model = kp.Model(kp.rpn([3, 2], kappa, kp.LowRank(1)), seed=0, dtype=torch.float64)
        model(x)  # statistics of the batch norm
        finer = kp.refine(model.eval(), intervals=20)
        torch.testing.assert_close(finer(x), model(x), rtol=0, atol=1e-10)
    for kappa in (kp.Processed(kp.BSpline(), after="tanh"), kp.Extended(("b_spline",), between="tanh")):
        model = kp.Model(kp.rpn([3, 2], kappa), seed=0)
        with pytest.raises(kp.SpecError, match="Tanh after κ acts on its columns"):
            kp.refine(model, intervals=20)


def test_processing_without_effect_is_refused() -> None:
    with pytest.raises(kp.SpecError, match="a single part has no part after it"):
        kp.Nested((kp.Taylor(2),), between="tanh")


def test_models_with_processing_inside_are_copied() -> None:
    made, x = head(kp.Extended(("taylor", "identity"), between=("batch_norm", "tanh"))).eval(), rows()
    torch.testing.assert_close(copy.deepcopy(made)(x), made(x), rtol=0, atol=0)
