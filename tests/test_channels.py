"""Channels of a head, combined by any fusion."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kapsi as kp
from kapsi.function import catalogue
from references import REFERENCES

FUSIONS = [cls() for cls in catalogue("fusion")]
each_fusion = pytest.mark.parametrize("fusion", FUSIONS, ids=lambda fusion: fusion.name)


def inputs(rows: int = 30, width: int = 4) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def head_spec(fusion: kp.Fusion, **options: object) -> kp.HeadSpec:
    return kp.HeadSpec(kp.Taylor(2), kp.LowRank(2), kp.LinearRemainder(), True, 3, fusion=fusion, **options)


@each_fusion
def test_channels_are_combined_by_the_fusion(fusion) -> None:
    head, x = kp.Head(4, 2, head_spec(fusion), seed=0, dtype=torch.float64), inputs()
    head.bias.data.copy_(torch.tensor([1.0, -2.0]))
    products = torch.einsum("bd,cnd->cbn", head.expand(x).dense(), head.weights().dense()).detach().numpy()
    tensors = {} if fusion.name == "sum" else {n: t.detach().numpy() for n, t in head.fusion.state_dict().items()}
    expected = REFERENCES["fusion"][fusion.name].values(fusion, products, tensors)
    expected = expected + head.bias.detach().numpy() + head.remainder(x).detach().numpy()
    for route in (None, "dense", "structured"):
        np.testing.assert_allclose(head(x, route=route).detach().numpy(), expected, rtol=1e-10, atol=1e-10)


@each_fusion
def test_first_outputs_have_unit_deviation(fusion) -> None:
    spec = kp.HeadSpec(kp.Identity(), kp.Dense(), channels=5, fusion=fusion)
    x = inputs(500, 20).float()
    deviations = [float(kp.Head(20, 30, spec, seed=seed)(x).detach().std()) for seed in range(3)]
    assert 0.5 < float(np.median(deviations)) < 2


@each_fusion
def test_models_with_fused_channels_are_saved_trained_and_explained(fusion, tmp_path) -> None:
    layer = kp.LayerSpec((head_spec(fusion),) * 2)
    model, x = kp.Model(kp.ModelSpec((4, 2), layer), seed=0, dtype=torch.float64), inputs()
    separate = sum(head(x) for head in model.layers[0].heads)
    torch.testing.assert_close(model(x), separate)
    kp.save_spec(model.spec, tmp_path / "spec.yaml")
    assert kp.load_spec(tmp_path / "spec.yaml") == model.spec
    kp.fit(model, (x, x[:, :2]), solver="adamw", epochs=2)
    if fusion.name in ("weighted_sum", "concatenation"):
        fresh = kp.Model(model.spec, seed=0, dtype=torch.float64).layers[0].heads[0].fusion
        assert not torch.equal(next(fresh.parameters()), next(model.layers[0].heads[0].fusion.parameters()))
    kp.save(model, tmp_path / "m.safetensors")
    torch.testing.assert_close(kp.load(tmp_path / "m.safetensors")(x), model(x), rtol=0, atol=0)
    assert len(kp.explain(model)) == 2


def test_ridge_needs_summed_channels_and_a_fusion_several() -> None:
    model, x = kp.Model(kp.ModelSpec((4, 2), kp.LayerSpec(head_spec(kp.Mean()))), dtype=torch.float64), inputs()
    with pytest.raises(kp.SpecError, match=r"the channels of .* are combined by"):
        kp.fit(model, (x, x[:, :2]), solver="ridge", epochs=1)
    with pytest.raises(kp.SpecError, match="needs several channels; LayerSpec has the fusion of heads"):
        kp.HeadSpec(fusion="mean")
