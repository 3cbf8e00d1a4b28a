"""Fixed affine layers at both ends, warnings of unsuitable scales, and norms of a single feature."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kapsi as kp


def rows(scale: float = 1.0, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(200, 3, generator=generator, dtype=torch.float64)
    x[:, 2] = 0.3  # a constant column
    return (x * scale).to(dtype), (torch.sin(3 * x[:, :1]) * x[:, 1:2] * scale + 5 * scale).to(dtype)


SPEC = kp.rpn([None, 4, None], kp.BSpline(), remainder="linear")


@pytest.mark.parametrize("scale", [1e-9, 1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_raw_units_are_fitted(scale: float, dtype: torch.dtype) -> None:
    x, y = rows(scale, dtype)
    model = kp.Model(SPEC.sized(3, 1), seed=0, dtype=dtype)
    kp.fit(model, (x, y), solver="levenberg_marquardt", epochs=15, standardize=True)
    with torch.no_grad():
        error = (model(x) - y).double().square().mean().sqrt() / y.double().std()
    assert float(error) < 0.01


def test_the_ends_are_affine_maps_with_the_moments_of_the_data() -> None:
    x, y = rows(1e4)
    model = kp.standardized(SPEC, x, y, seed=0, dtype=torch.float64)
    inner = torch.nn.Sequential(*model.layers[1:-1])
    deviation = x.std(0, correction=0)
    deviation[2] = 1.0
    z = (x - x.mean(0)) / deviation
    torch.testing.assert_close(model.layers[0](x), z, rtol=1e-10, atol=1e-10)
    last = model.layers[-1]
    expected = y.mean() + y.std(correction=0) * last.heads[0](inner(z))
    torch.testing.assert_close(model(x), expected)
    assert model.spec.widths == (3, 3, 4, 1)


def test_a_given_model_keeps_its_weights_and_is_not_changed() -> None:
    x, y = rows(100.0)
    given = kp.Model(SPEC.sized(3, 1), seed=0, dtype=torch.float64)
    before = {name: tensor.clone() for name, tensor in given.state_dict().items()}
    model = kp.standardized(given, x.numpy(), y.numpy())
    assert all(torch.equal(given.state_dict()[name], tensor) for name, tensor in before.items())
    parameters = zip(given.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(old, new) for old, new in parameters)


def test_the_moments_are_saved_and_not_trained(tmp_path: Path) -> None:
    x, y = rows(1e6)
    model = kp.standardized(SPEC, x, y, seed=0, dtype=torch.float64)
    before = {name: tensor.clone() for name, tensor in model.named_buffers() if "output" in name}
    assert len(before) == 4
    kp.fit(model, (x, y), solver=kp.AdamW(batch_size=50), epochs=2)
    assert all(torch.equal(model.get_buffer(name), tensor) for name, tensor in before.items())
    kp.save(model, tmp_path / "model.safetensors")
    loaded = kp.load(tmp_path / "model.safetensors")
    assert torch.equal(loaded(x), model(x))
    assert loaded.spec == model.spec


def test_a_resumed_run_is_bitwise_identical(tmp_path: Path) -> None:
    x, y = rows(1e3)
    data: Any = (x, y)

    def fitted(folder: Path | None, *epochs: int) -> kp.Model:
        for number in epochs:
            model = kp.Model(SPEC.sized(3, 1), seed=0, dtype=torch.float64)
            checkpoints = None if folder is None else kp.Checkpoints(folder, resume=number > 3)
            kp.fit(model, data, solver="lbfgs", epochs=number, standardize=True, checkpoints=checkpoints)
        return model

    assert torch.equal(fitted(None, 6)(x), fitted(tmp_path / "run", 3, 6)(x))


def test_labels_leave_the_outputs_as_they_are() -> None:
    x, _ = rows(1e5)
    labels = (x[:, 0] > x[:, 1]).long()
    model = kp.standardized(kp.rpn([3, 2], kp.Taylor(2)), x, labels, seed=0, dtype=torch.float64)
    assert model.spec.layers[-1].output == ()
    other = kp.Model(kp.rpn([3, 2], kp.Taylor(2)), seed=0, dtype=torch.float64)
    kp.fit(other, (x, labels), epochs=5, standardize=True)
    assert other.spec == model.spec
    kp.fit(other, (x, labels), epochs=1, standardize=True)  # once only
    assert other.spec == model.spec


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, y: kp.standardized(torch.nn.Linear(3, 1), x, y), "expected a kapsi Model or ModelSpec"),
        (lambda x, y: kp.standardized(kp.standardized(SPEC, x, y, seed=0), x, y), "standardized already"),
        (lambda x, y: kp.standardized(kp.Model(SPEC.sized(2, 1), seed=0), x, y), "2 inputs and the data 3 columns"),
        (lambda x, y: kp.standardized(SPEC.sized(3, 2), x, y, seed=0), "2 outputs and the data 1 columns"),
        (lambda x, y: kp.standardized(SPEC, x * torch.nan, y, seed=0), "finite values"),
        (lambda x, y: kp.standardized(SPEC, "x", y, seed=0), "expected x as numbers, got str"),
        (lambda x, y: kp.fit(torch.nn.Linear(3, 1), (x.float(), y.float()), standardize=True), "no kapsi.Model"),
    ],
)
def test_unsuitable_calls_are_refused(call: Any, message: str) -> None:
    with pytest.raises(kp.KapsiError, match=message):
        call(*rows())


KAPPAS = [
    kp.BSpline(),
    kp.BSpline(knots="quantile"),
    kp.Chebyshev(3),
    kp.GaussianRBF(),
    kp.expansion.RickerWavelet(),
    kp.Extended((kp.Identity(), kp.BSpline())),
    kp.Nested((kp.BSpline(), kp.Taylor(2))),
]


@pytest.mark.parametrize("kappa", KAPPAS, ids=repr)
@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_inputs_far_from_the_range_of_an_expansion_get_a_warning(kappa: kp.Expansion, scale: float) -> None:
    x, y = rows(scale)
    model = kp.Model(kp.rpn([3, 1], kappa, kp.LowRank(1)), seed=0, dtype=torch.float64)
    with pytest.warns(kp.ScaleWarning, match="standardize=True"):
        kp.fit(model, (x, y / scale), solver="levenberg_marquardt", epochs=1)


def test_inputs_in_the_range_get_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for scale, calibrated in ((1.0, False), (1e9, True)):
            x, y = rows(scale)
            model = kp.Model(kp.rpn([3, 1], kp.BSpline(), kp.LowRank(1)), seed=0, dtype=torch.float64)
            kp.fit(kp.calibrate(model, x) if calibrated else model, (x, y), solver="levenberg_marquardt", epochs=1)


def test_small_targets_get_a_warning_from_gradient_solvers() -> None:
    x, y = rows()
    model = kp.Model(SPEC.sized(3, 1), seed=0, dtype=torch.float64)
    with pytest.warns(kp.ScaleWarning, match="too small for gradient steps"):
        kp.fit(model, (x, np.asarray(1e-9 * y)), solver="lbfgs", epochs=1)


@pytest.mark.parametrize("norm", ["layer_norm", "instance_norm", kp.LayerNorm(affine=True)])
@pytest.mark.parametrize("place", ["before", "output"])
def test_a_norm_of_a_single_feature_is_refused(norm: Any, place: str) -> None:
    spec = kp.rpn([2, 1, 1], **{place: norm})
    with pytest.raises(kp.SpecError, match="constant for one feature"):
        kp.Model(spec, seed=0)
    kp.Model(kp.rpn([2, 1, 1], **{place: "batch_norm"}), seed=0)


def test_missing_targets_are_left_out_of_the_moments() -> None:
    x = torch.rand(60, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.cat((3 * x[:, :1], 1e6 * x[:, 1:]), 1)
    y[::3, 0] = torch.nan
    y[1::4, 1] = torch.nan
    model = kp.Model(kp.rpn([2, 2], bias=True), seed=0, dtype=torch.float64)
    kp.fit(model, (x, y), loss=kp.MSE(ignore_missing=True), standardize=True, epochs=20)
    step = model.layers[-1].output[0]
    torch.testing.assert_close(step.scale, torch.from_numpy(np.nanstd(y.numpy(), axis=0)))
    assert float((model(x).detach() - y).nan_to_num().abs().max()) < 1.0


def test_rows_without_moments_are_refused() -> None:
    x = torch.ones(0, 3)
    with pytest.raises(kp.DataError, match="at least one row"):
        kp.standardized(kp.rpn([3, 3]), x, x)
    with pytest.raises(kp.DataError, match="squares in the range"):
        kp.standardized(kp.rpn([3, 3]), torch.rand(5, 3, dtype=torch.float64) * 1e200)


def test_wrapped_heads_are_not_calibrated_in_silence() -> None:
    model = kp.Model(kp.rpn([2, 1], kp.BSpline()), seed=0)
    model.layers[0].heads[0] = torch.nn.Sequential(model.layers[0].heads[0])
    with pytest.raises(kp.SpecError, match=r"layers\.0\.heads\.0 is a Sequential, expected a Head; put the head back"):
        kp.calibrate(model, torch.rand(9, 2))
