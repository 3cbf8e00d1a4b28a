"""Fixed affine layers at both ends, warnings of unsuitable scales, and norms of a single feature."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kapsi as kp
from kapsi.standardize import Moments


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
    assert len(before) == 6
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
        (lambda x, y: kp.standardized(SPEC, "x", y, seed=0), "expected numbers as inputs, got str"),
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
    with pytest.raises(kp.DataError, match="sums in the range"):
        kp.standardized(kp.rpn([3, 3]), (1 + torch.rand(5, 3, dtype=torch.float64)) * 1e308)


@pytest.mark.parametrize("exponent", [-1000, -700, -600, 500, 700, 1000])
def test_moments_have_no_squares_out_of_range(exponent: int) -> None:
    x = torch.rand(90, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 0.3
    x[:30] *= 1e-3
    x[:10, 1] = 0
    expected = Moments.of([x[:10], x[10:30], x[30:]])
    torch.testing.assert_close(expected.deviation, x.std(0, correction=0), rtol=1e-13, atol=0)
    found = Moments.of([part * 2.0**exponent for part in (x[:10], x[10:30], x[30:])])
    assert torch.equal(found.mean, expected.mean * 2.0**exponent)
    assert torch.equal(found.deviation, expected.deviation * 2.0**exponent)


def test_tiny_inputs_are_standardized_in_training() -> None:
    x = torch.rand(60, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    models = [kp.Model(kp.rpn([2, 1], kp.Taylor(2)), seed=0, dtype=torch.float64) for _ in range(2)]
    losses = [
        kp.fit(model, (x * scale, x[:, :1] * x[:, 1:]), standardize=True, epochs=5)[-1].loss
        for model, scale in zip(models, (1.0, 2.0**-700), strict=True)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-9, abs=1e-20)


def test_null_widths_are_those_of_the_data() -> None:
    x = torch.rand(60, 3, generator=torch.Generator().manual_seed(0))
    spec = kp.rpn([None, None], kp.Taylor(2))
    assert kp.standardized(spec, x, torch.arange(60) % 4, seed=0).out_features == 4
    assert kp.standardized(spec, x, torch.zeros(60, dtype=torch.int64), seed=0).out_features == 2
    assert kp.standardized(spec, x, x[:, :2], seed=0).out_features == 2
    with pytest.raises(kp.SpecError, match="without y, the last width"):
        kp.standardized(spec, x)


def test_wrapped_heads_are_not_calibrated_in_silence() -> None:
    model = kp.Model(kp.rpn([2, 1], kp.BSpline()), seed=0)
    model.layers[0].heads[0] = torch.nn.Sequential(model.layers[0].heads[0])
    with pytest.raises(kp.SpecError, match=r"layers\.0\.heads\.0 is a Sequential, expected a Head; put the head back"):
        kp.calibrate(model, torch.rand(9, 2))


# ------------------------------------------------------------------------------------------------ units of distributions


def noisy(scale: float, offset: float) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = rows()
    noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, scale * (torch.cat((y, -y), 1) + 0.1 * noise) + offset


@pytest.mark.parametrize(("scale", "offset"), [(1.0, 0.0), (1e-3, 5.0), (1e9, -1e10)])
def test_means_and_variances_have_the_units_of_the_targets(scale: float, offset: float) -> None:
    x, y = noisy(scale, offset)
    mean, deviation = y.mean(0), y.std(0, correction=0)
    options: dict[str, Any] = {"loss": "gaussian", "solver": "levenberg_marquardt", "epochs": 6}
    spec = kp.rpn([3, 4], kp.Taylor(2), remainder="linear", bias=True)
    model = kp.Model(spec, seed=0, dtype=torch.float64)
    records = kp.fit(model, (x, y), standardize=True, **options)
    by_hand = kp.Model(spec, seed=0, dtype=torch.float64)
    spread = x.std(0, correction=0)
    spread[2] = 1.0
    z = (x - x.mean(0)) / spread
    expected = kp.fit(by_hand, (z, (y - mean) / deviation), **options)
    output, plain = kp.predict(model, x), kp.predict(by_hand, z)
    torch.testing.assert_close((output[:, :2] - mean) / deviation, plain[:, :2], rtol=0, atol=1e-6)
    torch.testing.assert_close(output[:, 2:], plain[:, 2:] + 2 * deviation.log(), rtol=0, atol=1e-6)
    torch.testing.assert_close(kp.predict(model, x, "gaussian"), output[:, :2])
    # The density of y is that of the standardized targets divided by σ.
    assert records[-1].loss == pytest.approx(expected[-1].loss + float(deviation.log().sum()), abs=1e-6)


def test_variances_beyond_those_of_the_loss_are_refused() -> None:
    x, y = noisy(1e-9, 0.0)
    with pytest.raises(kp.DataError, match="log-variances from -30 to 80, the targets standard deviations from"):
        kp.fit(kp.Model(kp.rpn([3, 4])), (x, y), loss="gaussian", standardize=True)


def test_losses_with_several_outputs_need_units() -> None:
    with pytest.raises(kp.SpecError, match="has 2 outputs for each target and no method output_units"):
        kp.Loss.output_units(kp.Gaussian(), torch.zeros(1), torch.ones(1))
    x, y = rows()
    with pytest.raises(kp.DataError, match=r"2 outputs and the data 1 columns; with several outputs .* kapsi\.fit"):
        kp.standardized(kp.rpn([3, 2]), x, y)


# ------------------------------------------------------------------------------------------------ precision


OFFSET = 1.7e9  # seconds from 1970 to 2023


@pytest.mark.parametrize("solver", ["levenberg_marquardt", "lbfgs", "adamw"])
@pytest.mark.parametrize("kind", ["float64", "int64", "memory map"])
def test_offsets_beyond_float32_are_shifted_in_float64(solver: str, kind: str, tmp_path: Path) -> None:
    u, _ = rows()
    seconds = (100 * u[:, :2]).round()  # steps of one second; float32 has steps of 128
    x: Any = seconds + OFFSET if kind != "int64" else (seconds + OFFSET).long()
    y = (seconds[:, :1] / 50 - 1) * (seconds[:, 1:] / 50 - 1)
    if kind == "memory map":
        mapped = np.memmap(tmp_path / "x", mode="w+", dtype=np.float64, shape=tuple(x.shape))
        mapped[:] = x.numpy()
        x = mapped
    model = kp.Model(kp.rpn([2, 1], kp.Taylor(2), bias=True), seed=0)
    assert next(model.parameters()).dtype == torch.float32
    kp.fit(model, (x, y), solver=solver, epochs=300 if solver == "adamw" else 20, standardize=True)
    output = kp.predict(model, x)
    assert output.dtype == torch.float32
    assert float((output - y).square().mean().sqrt()) < (0.05 if solver == "adamw" else 1e-3)
    if isinstance(x, torch.Tensor):
        torch.testing.assert_close(model(x.double()), output)
        standardized = kp.standardized(kp.rpn([2, 1], kp.BSpline()), x, y, seed=0)
        ends = standardized.layers[1].heads[0].kappa["range"]
        z = (seconds - seconds.mean(0)) / seconds.std(0, correction=0)
        torch.testing.assert_close(ends.double(), torch.stack((z.amin(0), z.amax(0))), rtol=1e-5, atol=1e-5)


def test_a_saved_model_keeps_the_whole_offset(tmp_path: Path) -> None:
    x, y = rows()
    model = kp.standardized(kp.rpn([3, 1], kp.Taylor(2)), x + OFFSET, y, seed=0)
    kp.save(model, tmp_path / "model.safetensors")
    loaded = kp.load(tmp_path / "model.safetensors")
    assert torch.equal(kp.predict(loaded, x + OFFSET), kp.predict(model, x + OFFSET))
    same = kp.standardized(kp.rpn([3, 1], kp.Taylor(2)), x, y, seed=0)
    torch.testing.assert_close(kp.predict(loaded, x + OFFSET), kp.predict(same, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("offset", [1e8, -OFFSET])
def test_rounded_inputs_get_a_warning(offset: float) -> None:
    x, y = rows()
    with pytest.warns(kp.ScaleWarning) as caught:
        kp.fit(kp.Model(kp.rpn([3, 1])), (x + offset, y), solver="ridge")
    assert "column 0 of the inputs lies between" in str(caught[0].message)
    assert "standardize=True, which shifts in float64" in str(caught[0].message)
    with pytest.warns(kp.ScaleWarning, match="column 0 of the targets .* float64"):
        kp.fit(kp.Model(kp.rpn([3, 1])), (x, y + offset), solver="ridge")


def test_inputs_that_the_type_represents_get_no_warning() -> None:
    x, y = rows()
    years = (1990 + 30 * x).round()
    for data, dtype in (
        ((x + OFFSET, y), torch.float64),
        ((years, y), torch.float32),
        ((years.long(), y), torch.float32),
    ):
        kp.fit(kp.Model(kp.rpn([3, 1]), dtype=dtype), data, solver="ridge")
    kp.fit(kp.Model(kp.rpn([3, 1])), (x + OFFSET, y), solver="levenberg_marquardt", epochs=2, standardize=True)


def test_moments_beyond_the_type_of_the_model_are_refused() -> None:
    x, y = rows()
    with pytest.raises(kp.DataError, match=r"of column 0 of the inputs exceed the range of torch\.float32"):
        kp.standardized(kp.rpn([3, 1]), x * 1e45, y)


# ------------------------------------------------------------------------------------------------ kinds of data


def test_frames_are_taken_as_in_fit() -> None:
    pandas, arrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    x, y = rows()
    frame, column = pandas.DataFrame(x.numpy(), columns=["a", "b", "c"]), pandas.Series(y[:, 0].numpy())
    expected = kp.standardized(SPEC, x, y, seed=0)
    sparse = frame.astype(pandas.SparseDtype(float, 0.0))
    kinds = {
        "pandas": (frame, column),
        "nullable": (frame.convert_dtypes(), column.convert_dtypes()),
        "sparse": (sparse, column.astype(pandas.SparseDtype(float, 0.0))),
        "mixed": (frame.assign(a=sparse["a"]), column.to_frame()),
        "arrow": (arrow.table(frame), arrow.array(column)),
        "lists": (x.tolist(), y.tolist()),
        "arrays": (np.asfortranarray(x.numpy()), y.numpy().astype(">f8")),
    }
    for name, (inputs, targets) in kinds.items():
        model = kp.standardized(SPEC, inputs, targets, seed=0)
        states = zip(model.state_dict().items(), expected.state_dict().values(), strict=True)
        assert all(torch.equal(a, b) for (_, a), b in states), name
    labels = pandas.Series((x[:, 0] > 0.5).numpy())
    assert kp.standardized(kp.rpn([3, 2]), frame, labels, seed=0).spec.layers[-1].output == ()


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.array([["a", "b"]]), "expected numbers as inputs"),
        (np.ones((2, 3), dtype=complex), "real and imaginary parts as columns"),
        (torch.ones(2, 3, dtype=torch.complex64), "a tensor that is complex"),
        (torch.empty(2, 3, device="meta"), "meta device"),
        ([[1.0, 2.0], [3.0]], "expected numbers as inputs, got list"),
        (torch.ones(2, 3).to_sparse_csr(), "a tensor that is sparse"),
        (np.array([[np.datetime64("2020-01-01")]]), r"datetime64.*\(x - x\.min\(\)\) / np\.timedelta64\(1, 's'\)"),
        (np.zeros(3, dtype=[("a", float), ("b", float)]), "structured_to_unstructured"),
        (torch.ones(3), r"of shape \(rows, columns\), got \(3,\)"),
    ],
)
def test_what_is_no_table_of_numbers_is_refused_in_one_line(x: Any, message: str) -> None:
    with pytest.raises(kp.DataError, match=message):
        kp.standardized(kp.rpn([3, 1]), x)


def test_rows_that_do_not_match_and_columns_that_are_not_finite_are_named() -> None:
    x, y = rows()
    with pytest.raises(kp.DataError, match="200 rows of x and 199 of y"):
        kp.standardized(SPEC, x, y[1:], seed=0)
    x[5, 1] = torch.nan
    with pytest.raises(kp.DataError, match="not so in column 1"):
        kp.standardized(SPEC, x, y, seed=0)


def test_densities_are_calibrated_by_class_if_their_number_allows() -> None:
    x, _ = rows()
    x = x[:, :2]
    labels = torch.arange(len(x)) % 3
    x = x + labels[:, None]
    moments = (x - x.mean(0)) / x.std(0, correction=0)
    for count, grouped in ((2, False), (3, True)):
        spec = kp.rpn([2, 3], kp.expansion.NaiveNormal(count))
        model = kp.standardized(spec, x, labels, seed=0, dtype=torch.float64)
        expected = kp.calibrate(kp.Model(spec, seed=0, dtype=torch.float64), moments, labels if grouped else None)
        given = model.layers[1].heads[0].kappa["mean"]
        torch.testing.assert_close(given, expected.layers[0].heads[0].kappa["mean"])
        fitted = kp.Model(spec, seed=0, dtype=torch.float64)
        assert kp.fit(fitted, (x, labels), epochs=5, standardize=True)[-1].loss < np.log(3)
