"""What holds for every model of the zoo: it equals the one that it comes from, and is a model of kapsi like any other."""

from __future__ import annotations

import copy
import functools
from importlib import metadata

import pytest
import torch

import kapsi as kp
from kapsi.zoo.base import Case, Comparison, cases


@functools.cache
def compared(case: Case, seed: int = 0) -> Comparison:
    try:
        metadata.version(case.package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{case.package} is not installed")
    return case.compare(seed)


@pytest.fixture(autouse=True)
def one_thread():
    """Sums of other orders differ in the last bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


EACH = pytest.mark.parametrize(
    "case", [pytest.param(each, id=f"{each.model}-{each.quantity}-{each.data}") for each in cases()]
)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@EACH
def test_deviation_is_within_the_tolerance(case, seed) -> None:
    made = compared(case, seed)
    assert made.deviation <= case.tolerance
    assert made.ours > 0
    assert made.theirs > 0


@EACH
def test_model_is_one_of_kapsi_in_float64(case) -> None:
    made = compared(case)
    assert type(made.model) is kp.Model
    state = made.model.state_dict()
    assert {tensor.dtype for tensor in state.values() if tensor.is_floating_point()} == {torch.float64}
    assert all(bool(tensor.isfinite().all()) for tensor in state.values())
    assert made.x.dtype == torch.float64
    assert len(made.x) == len(made.y)
    assert made.x.shape[1] == made.model.in_features


@EACH
def test_saves_and_loads_with_equal_bits(case, tmp_path) -> None:
    made = compared(case)
    kp.save(made.model, tmp_path / "model.safetensors")
    loaded = kp.load(tmp_path / "model.safetensors")
    assert loaded.spec == made.model.spec
    ours = made.model.state_dict()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in loaded.state_dict().items())
    made.model.eval()
    assert torch.equal(loaded(made.x), made.model(made.x))


@EACH
def test_specification_is_data(case) -> None:
    spec = compared(case).model.spec
    assert kp.from_dict(kp.to_dict(spec), kp.ModelSpec) == spec


# A case of each library in every run.
FIRST = {each.package: (each.model, each.data, each.quantity) for each in reversed(cases())}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            each,
            id=f"{each.model}-{each.quantity}-{each.data}",
            marks=() if FIRST[each.package] == (each.model, each.data, each.quantity) else pytest.mark.slow,
        )
        for each in cases()
    ],
)
def test_exports_with_any_number_of_rows(case) -> None:
    made = compared(case)
    model = made.model.eval()
    program = torch.export.export(model, (made.x[:4],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for rows in (3, 7):
        torch.testing.assert_close(program.module()(made.x[:rows]), model(made.x[:rows]), rtol=1e-10, atol=1e-10)


@EACH
def test_is_explained(case) -> None:
    model = compared(case).model
    reports = kp.explain(model, batch=8)
    assert [report.name for report in reports] == [name for name, _ in model.heads()]
    assert all(report.route for report in reports)
    assert sum(report.parameters for report in reports) <= sum(tensor.numel() for tensor in model.parameters())


@EACH
def test_trains_on(case) -> None:
    made = compared(case)
    model = copy.deepcopy(made.model)
    assert any(tensor.requires_grad for tensor in model.parameters()), "nothing is trainable"
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    y = made.y
    if y.is_floating_point():  # they may be the outputs themselves, from which there is nothing to be learned
        noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=y.dtype)
        y = y + 0.1 * y.std() * noise if made.loss != "bernoulli" else y
    records = kp.fit(model, (made.x, y), loss=made.loss, solver=kp.AdamW(learning_rate=1e-4), epochs=3, seed=0)
    assert records[-1].number == 3
    after = model.state_dict()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in after.items()), "nothing was trained"
    assert all(bool(tensor.isfinite().all()) for tensor in after.values())
    assert bool(model(made.x).isfinite().all())
