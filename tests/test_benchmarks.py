"""The benchmarks: what they compare with is right, memory and targets are counted right, results are written whole."""

from __future__ import annotations

import argparse
import json
import math
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.interpolate import BSpline
from torch.nn import functional as F

import kapsi as kp

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = (
    "layers",
    "kan_layers",
    "kan_errors",
    "kan_training",
    "mlp",
    "latency",
    "growth",
    "sparse_text",
    "trees",
    "hypernet",
    "engine",
    "elementary",
    "initial_values",
    "calibration",
    "interruptions",
    "reading",
    "out_of_core",
)


@pytest.fixture
def script(benchmark_module):
    threads = torch.get_num_threads()
    yield benchmark_module
    torch.set_num_threads(threads)


@pytest.fixture
def measure(script):
    return script("measure")


def report_options(**changes) -> argparse.Namespace:
    return argparse.Namespace(**{"rounds": 3, "threads": 1, "quick": False, "json": None, **changes})


# ------------------------------------------------------------------------------------------------ what is compared


@pytest.mark.parametrize("intervals", [5, 20])
def test_the_recursion_of_efficient_kan_is_that_of_scipy(script, intervals: int) -> None:
    layer = script("kan_layers").Efficient(3, 2, intervals).double()
    knots = np.arange(-3, intervals + 4) * (2 / intervals) - 1
    x = torch.rand(50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    expected = BSpline(knots, np.eye(intervals + 3), 3)(x.numpy())
    # Its knots are float32, as those of a layer are.
    np.testing.assert_allclose(layer.functions(x).numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(
        layer(x).detach().numpy(),
        (F.silu(x) @ layer.base.detach().T).numpy() + expected.reshape(50, -1) @ layer.spline.detach().numpy().T,
        atol=1e-5,
    )


def test_the_layer_of_kapsi_is_the_same_function_as_that_of_efficient_kan(script) -> None:
    kan_layers = script("kan_layers")
    other, head = kan_layers.Efficient(4, 3, 6), kan_layers.kapsi_layer(4, 3, kp.BSpline(6, 3))
    # Its columns are basis by basis, those of the other input by input.
    head.assign("reconciliation", matrix=other.spline.detach().unflatten(1, (4, 9)).mT.flatten(1))
    head.assign("remainder", matrix=other.base.detach())
    x = kan_layers.inputs_of(32, 4)
    torch.testing.assert_close(head(x), other(x), atol=1e-5, rtol=1e-5)


def test_bumps_of_fast_kan(script) -> None:
    layer = script("kan_layers").Fast(6, 2, 5).double()
    x = torch.randn(20, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z = (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, correction=0) + 1e-5).sqrt()
    centers = np.linspace(-2, 2, 8)
    expected = np.exp(-(((z.numpy()[..., None] - centers) * 7 / 4) ** 2))
    np.testing.assert_allclose(layer.functions(x).detach().numpy(), expected, atol=1e-6)
    weights, base = layer.bumps.weight.detach().numpy(), layer.base
    np.testing.assert_allclose(
        layer(x).detach().numpy(),
        expected.reshape(20, -1) @ weights.T + base(F.silu(x)).detach().numpy(),
        atol=1e-6,
    )


def test_every_reconciliation_is_measured_or_left_out_with_a_reason(script) -> None:
    functions, reasons = script("layers").trainable(6, 4)
    assert not set(functions) & set(reasons)
    assert {*functions, *reasons} >= {kind.name for kind in kp.catalogue("reconciliation")}
    assert {"constant", "one", "zero"} <= {
        name for name, reason in reasons.items() if "no trainable parameters" in reason
    }
    assert "eye" in reasons
    assert functions["dual_low_rank_kronecker"] == kp.DualLowRankKronecker(rank=5)


def test_the_dense_computation_is_the_same_function(script) -> None:
    layers = script("layers")
    spec = kp.HeadSpec(kp.Taylor(2), kp.DualLowRankKronecker(rank=2), channels=2)
    head = kp.Head(5, 4, spec, seed=0, dtype=torch.float64)
    x = torch.randn(3, 5, dtype=torch.float64)
    kappa = torch.cat((x, torch.einsum("bi,bj->bij", x, x).flatten(1)), 1)
    expected = torch.einsum("bd,cnd->bn", kappa, head.weights().dense())
    torch.testing.assert_close(layers.dense(head, x), expected, rtol=1e-12, atol=1e-12)


def test_an_rpn_as_mlp_has_the_values_of_its_twin(script) -> None:
    model, sequential = script("mlp").pair(8)
    x = torch.randn(5, 8)
    torch.testing.assert_close(model(x), sequential(x), rtol=0, atol=0)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in sequential.parameters()) == 3 * 8 * 9


def test_synthetic_text_is_like_text(script) -> None:
    sparse_text = script("sparse_text")
    x = sparse_text.synthetic(300, 3_000)
    counts = x.crow_indices().diff()
    assert x.layout == torch.sparse_csr
    assert x.shape == (300, 3_000)
    assert int(counts.min()) >= sparse_text.LEAST
    assert int(counts.max()) <= sparse_text.MOST
    assert abs(float(counts.float().mean()) - sparse_text.MEAN) < 10
    assert abs(float(counts.float().median()) - sparse_text.MEDIAN) < 8
    dense = x.to_dense()
    torch.testing.assert_close((dense != 0).sum(1), counts)  # no column twice in a row
    torch.testing.assert_close(dense.norm(dim=1), torch.ones(300))
    frequency = (dense != 0).float().mean(0)
    assert frequency[:10].mean() > 4 * frequency[100:200].mean() > 8 * frequency[2_000:].mean()
    assert sparse_text.size(x) == 8 * 301 + 12 * int(counts.sum())
    assert sparse_text.size(dense) == 4 * 300 * 3_000


def test_text_from_a_file(script, tmp_path) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    words = [f"word{i}" for i in range(12)]
    texts = [f"{words[i % 6]} {words[6 + i // 8]}" for i in range(40)]  # each word in 5 or more, at most in half
    parquet.write_table(pyarrow.table({"text": texts, "label": [0] * 40}), tmp_path / "texts.parquet")
    x = script("sparse_text").imdb(tmp_path / "texts.parquet", 6)
    assert x.shape[0] == 6
    torch.testing.assert_close(x.to_dense().norm(dim=1), torch.ones(6))


# ------------------------------------------------------------------------------------------------ memory and time


def test_peak_memory_is_what_is_alive_at_once(measure) -> None:
    weights = torch.zeros(1000, 500, requires_grad=True)  # 2 MB, and so is its gradient

    def loss() -> torch.Tensor:
        with torch.no_grad():
            for _ in range(3):  # 4 MB for a moment, three times
                torch.ones(1000, 1000).sum()
        return (weights * 1.0).sum()

    step = measure.Step(loss, [weights])
    found = measure.memory(step)
    assert weights.grad is None
    small = 10_000
    assert 4e6 <= found.peak <= 4e6 + small
    assert 4e6 <= found.beyond <= 4e6 + small


def test_memory_beyond_gradients_leaves_out_just_those(measure) -> None:
    weights = torch.zeros(10, 100_000, requires_grad=True)  # 4 MB
    x = torch.ones(1, 100_000)
    found = measure.memory(measure.Step(lambda: F.linear(x, weights).sum(), [weights]))
    assert 4e6 <= found.peak <= 4e6 + 10_000
    assert found.beyond <= 10_000


def test_peak_of_changes(measure) -> None:
    # Freed and given again at the same address; what was there before the step is taken back without a sign.
    assert measure._peak([(1, 10), (2, 5), (1, -10), (9, -100), (1, 8), (2, -5), (3, 1)]) == 15
    assert measure._peak([]) == 0


def test_saved_memory_counts_storages_once_and_no_parameters(measure) -> None:
    weights = torch.ones(50, 100, requires_grad=True)
    x = torch.ones(20, 50)
    # x for the gradient of the product; the exponential for its own, twice the same storage
    assert measure.saved(lambda: (x @ weights).exp().exp().sum(), [weights]) == 4 * (20 * 50 + 2 * 20 * 100)
    assert measure.saved(lambda: (weights * weights.view(50, 100)).sum(), [weights]) == 0


def test_rounds_are_interleaved_and_paired(measure) -> None:
    order = []

    def way(name: str, taken: float):
        def run():
            order.append(name)
            return measure.Seconds(taken, 2 * taken)

        return run

    times = measure.interleaved({"a": way("a", 2.0), "b": way("b", 3.0)}, rounds=3)
    assert order == [*"ab", *"ab", *"ba", *"ab"]  # first to warm up; every second round the other way round
    assert len(times) == 3
    assert times.milliseconds("a") == 2_000
    assert times.milliseconds("a", whole=True) == 4_000
    paired = measure.Rounds({"a": [1.0, 10.0, 2.0], "b": [2.0, 20.0, 5.0]}, {"a": [1.0], "b": [1.0]})
    assert paired.ratio("b", "a") == 2.0
    assert paired.milliseconds("b") / paired.milliseconds("a") == 2.5


def test_a_limit_of_time_leaves_three_rounds(measure) -> None:
    def run():
        return measure.Seconds(2.0, 2.0)

    assert len(measure.interleaved({"a": run}, rounds=9, seconds=-1)) == 3
    assert len(measure.interleaved({"a": run}, rounds=2, seconds=-1)) == 2


def test_a_step_trains_and_times_itself(measure) -> None:
    weights = torch.ones(3, requires_grad=True)
    step = measure.Step(lambda: weights.square().sum(), [weights], torch.optim.SGD([weights], lr=0.25))
    taken = step()
    assert 0 < taken.pass_ < taken.step
    torch.testing.assert_close(weights.detach(), torch.full((3,), 0.5))
    step()
    torch.testing.assert_close(weights.detach(), torch.full((3,), 0.25))  # gradients do not add up


def test_the_slope_is_the_exponent(measure) -> None:
    sizes = [100, 300, 1_000, 27_000]
    assert measure.slope(sizes, [7 * size**1.3 for size in sizes]) == pytest.approx(1.3, abs=1e-12)
    x, y = np.log(sizes), np.log([3, 8, 40, 500])
    assert measure.slope(sizes, [3, 8, 40, 500]) == pytest.approx(np.polyfit(x, y, 1)[0], abs=1e-12)


# ------------------------------------------------------------------------------------------------ targets and files


def test_targets_are_counted(measure) -> None:
    targets = [
        measure.Target("at the bound", 3, 3.0),
        measure.Target("below", 3, 2.9999),
        measure.Target("above, where most", 1.05, 1.0501, most=True),
        measure.Target("at most", 1.05, 1.05, most=True),
        measure.Target("not a number", 3, math.nan),
        measure.Target("not a number at most", 3, math.nan, most=True),
    ]
    assert [target.met for target in targets] == [True, False, False, True, False, False]
    assert measure.summary(targets) == "targets: 2 of 6 met"
    table = measure.target_table(targets).markdown().splitlines()
    assert table[0] == "| case | target | figure | met |"
    assert table[2] == "| at the bound | ≥ 3× | 3× | yes |"
    # What is close to a bound is not rounded to it.
    assert table[4] == "| above, where most | ≤ 1.05× | 1.0501× | no |"


@pytest.mark.parametrize(
    ("value", "text"),
    [(3050.4, "3,050"), (12.345, "12.3"), (0.04512, "0.0451"), (1.0, "1.00"), (0.0, "0"), (math.inf, "inf")],
)
def test_numbers_have_three_digits(measure, value: float, text: str) -> None:
    assert measure.number(value) == text


def test_results_are_written_whole_or_not_at_all(measure, tmp_path, monkeypatch) -> None:
    path = tmp_path / "results" / "x.json"
    measure.write(path, {"figures": [1.5, math.nan]})
    assert json.loads(path.read_text()) == {"figures": [1.5, None]}
    renamed = []
    replace = measure.os.replace
    monkeypatch.setattr("os.replace", lambda old, new: (renamed.append(Path(new).name), replace(old, new))[1])
    measure.write(path, {"figures": [2]})
    assert renamed == ["x.json"]
    with pytest.raises(kp.FileError):
        measure.write(path, {"figures": object()})
    assert json.loads(path.read_text()) == {"figures": [2]}
    assert [file.name for file in path.parent.iterdir()] == ["x.json"]


def test_a_report_ends_with_its_targets(measure, tmp_path, capsys) -> None:
    report = measure.Report("some", report_options(json=tmp_path / "some.json"))
    report.tables.append(measure.Table("Times.", ["way", "ms"], [["one", "1.00"]]))
    report.targets += [measure.Target("case", 2, 3.0), measure.Target("other", 2, 1.0)]
    report.finish()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "targets: 1 of 2 met"
    assert "| one | 1.00 |" in lines
    data = json.loads((tmp_path / "some.json").read_text(encoding="utf-8"))
    assert [target["met"] for target in data["targets"]] == [True, False]


def test_a_run_has_one_table_and_one_last_line(script, measure, tmp_path, monkeypatch, capsys) -> None:
    run = script("run")
    made = {"layers": measure.Target("quick", 2, 3.0), "growth": measure.Target("slow", 2, math.nan)}

    def fake(name, chosen):
        if name not in made:
            return None
        report = measure.Report(name, report_options(json=tmp_path / f"{name}.json"), targets=[made[name]])
        report.finish()
        capsys.readouterr()
        return json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))

    monkeypatch.setattr(run, "run", fake)
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "layers", "growth"])
    assert run.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "targets: 1 of 2 met"
    assert sum(line.startswith("targets:") for line in lines) == 1
    assert lines.count("| case | target | figure | met |") == 1
    # A benchmark that fails is told, is not met, and makes the run fail.
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "layers", "mlp"])
    assert run.main() == 1
    assert capsys.readouterr().out.splitlines()[-1] == "targets: 1 of 2 met"


def test_tables_of_the_page_are_replaced_between_their_markers(script) -> None:
    run = script("run")
    text = "a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb\n<!-- xy: begin -->\n<!-- xy: end -->\n"
    once = run.replaced(text, "x", "new \\1")
    assert once == text.replace("old", "new \\1")
    assert run.replaced(once, "x", "old") == text
    for missing in ("y", "x: begin"):
        with pytest.raises(ValueError, match="found them 0 times"):
            run.replaced(text, missing, "")


def test_the_page_has_a_place_for_every_benchmark(script) -> None:
    run = script("run")
    assert set(run.NAMES) == set(SCRIPTS)
    page = run.README.read_text(encoding="utf-8")
    for name in (*run.NAMES, "targets"):
        assert f"<!-- {name}: begin -->" in run.replaced(page, name, "table")
    scripts = {path.stem for path in BENCHMARKS.glob("*.py")} - {
        "measure",
        "run",
        "tables",
        "functions",
        "formulas",
        "intervals",
    }  # the last four have pages of their own
    assert scripts == set(SCRIPTS)


@pytest.mark.parametrize("name", [*SCRIPTS, "run"])
def test_scripts_start(script, monkeypatch, capsys, name: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
    out, errors = capsys.readouterr()
    assert (ended.value.code, errors) == (0, "")
    assert "--quick" in out
