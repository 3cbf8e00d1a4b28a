"""Selection of heads on held-out rows, and the automatic model."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kapsi as kp
from kapsi.clock import Stopwatch
from kapsi.recipes import AdditiveHead, Auto, ConstantHead, CrossFit, LinearHead, RecipeData, Watch, selection
from kapsi.recipes.auto import _AutoSearch
from kapsi.recipes.selection import select_heads


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


Y = normal(500, 1, seed=0)


def test_weights_are_near_the_best_of_a_fine_grid() -> None:
    heads = [Y + normal(500, 1, seed=seed) * scale for seed, scale in ((1, 0.5), (2, 0.7), (3, 3.0))]
    grid = [w for w in itertools.product(np.linspace(0, 1, 31), repeat=3) if abs(sum(w) - 1) < 1e-9]
    least = min(float((sum(a * h for a, h in zip(w, heads, strict=True)) - Y).square().mean()) for w in grid)
    chosen = select_heads(heads, Y, None, kp.MSE(), [0, 1, 2])
    assert sum(chosen.weights) == pytest.approx(1)
    assert 0.99 * least <= chosen.loss <= 1.01 * least


def test_a_row_of_weight_2_counts_as_two_rows() -> None:
    heads = [Y + normal(500, 1, seed=seed) for seed in (1, 2)]
    weight = torch.ones(500, dtype=torch.float64)
    weight[:100] = 2
    twice = [torch.cat((head, head[:100])) for head in heads]
    assert select_heads(heads, Y, weight, kp.MSE(), [0, 1]).weights == pytest.approx(
        select_heads(twice, torch.cat((Y, Y[:100])), None, kp.MSE(), [0, 1]).weights
    )


def test_ties_go_to_fewer_and_simpler_heads() -> None:
    good = Y + 0.3 * normal(500, 1, seed=1)
    same = good + 1e-3 * normal(500, 1, seed=2)
    chosen = select_heads([same, good], Y, None, kp.MSE(), [5, 0], tie=1.0)
    assert chosen.weights == (0.0, 1.0)
    assert sum(w > 0 for w in select_heads([same, good], Y, None, kp.MSE(), [5, 0]).weights) >= 1


def test_a_head_with_infinite_loss_is_not_chosen() -> None:
    heads = [Y * 0, torch.full_like(Y, 1e200)]
    assert select_heads(heads, Y, None, kp.MSE(), [0, 1]).weights == (1.0, 0.0)


def test_too_large_logits_are_scaled_down() -> None:
    labels = (torch.arange(400) % 2).long()
    logits = normal(400, 2, seed=1)
    logits[torch.arange(400), labels] += 1
    (weight,) = select_heads([3 * logits], labels, None, kp.CrossEntropy(), [0]).weights
    grid = torch.linspace(0.1, 2, 400, dtype=torch.float64)
    losses = [float(torch.nn.functional.cross_entropy(3 * scale * logits, labels)) for scale in grid]
    assert weight == pytest.approx(float(grid[int(np.argmin(losses))]), abs=0.05)


def test_few_rows_that_are_all_right_do_not_make_certain() -> None:
    labels = (torch.arange(6) % 2).long()
    logits = 6.0 * torch.nn.functional.one_hot(labels, 2).double()
    (weight,) = select_heads([logits], labels, None, kp.CrossEntropy(), [0]).weights
    assert 0.5 < float((weight * logits).softmax(1).amax(1).min()) < 0.99
    many = labels.repeat(1000)
    (weight,) = select_heads([logits.repeat(1000, 1)], many, None, kp.CrossEntropy(), [0]).weights
    assert float((weight * logits).softmax(1).amax(1).min()) > 0.997


def test_many_rows_without_a_loss_give_no_weight_to_an_average_of_heads() -> None:
    labels = (torch.arange(4000) % 2).long()
    right = torch.nn.functional.one_hot(labels, 2).double()
    heads = [(12 + normal(4000, 1, seed=0)) * right, (12 + normal(4000, 1, seed=1)) * right]
    tied = [torch.where(torch.arange(4000)[:, None] < 40, heads[0], heads[1]), heads[0]]
    chosen = select_heads(tied, labels, None, kp.CrossEntropy(), [0, 1], average=0.5)
    assert chosen.loss < 5e-5
    few = select_heads([h[:100] for h in tied], labels[:100], None, kp.CrossEntropy(), [0, 1], average=0.5)
    assert sum(few.weights) < 0.9 * sum(chosen.weights)


def data_of(rows: int, **parts: torch.Tensor) -> RecipeData:
    y = torch.arange(rows) % 3
    x = torch.zeros(rows, 1, dtype=torch.float64)
    return RecipeData(x, y, kp.CrossEntropy(), classes=3, numeric=torch.ones(1, dtype=torch.bool), **parts)


def test_folds_do_not_divide_groups_also_of_a_selection_of_rows() -> None:
    groups = torch.arange(60) // 5
    data = data_of(60, groups=groups).take(torch.arange(0, 60, 2))
    for train, test in data.folds(4):
        assert not {*data.groups[train].tolist()} & {*data.groups[test].tolist()}
    assert len(data_of(60, groups=torch.zeros(60, dtype=torch.int64)).folds(4)) == 4


def test_folds_hold_out_later_rows() -> None:
    for train, test in data_of(40, times=torch.arange(40).double()).folds(3):
        assert train.max() < test.min()


def test_another_repetition_is_another_partition_and_the_same_one_is_the_same() -> None:
    data = data_of(60)
    first, again, other = (torch.cat([test for _, test in data.folds(5, n)]) for n in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(first.sort().values, torch.arange(60))


def test_one_row_has_no_folds() -> None:
    with pytest.raises(kp.TableError, match="cannot be divided"):
        data_of(1).folds(5)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (kp.MSE(), lambda y: y.mean()),
        (kp.Poisson(), lambda y: y.mean().log()),
        (kp.Gamma(), lambda y: y.mean().log()),
        (kp.Quantile(level=0.8), lambda y: y.quantile(0.8)),
    ],
)
def test_the_constant_is_that_of_the_loss(loss, expected) -> None:
    y = Y.exp()
    data = RecipeData(torch.zeros(500, 2, dtype=torch.float64), y, loss, 0, torch.ones(2, dtype=torch.bool))
    found = float(ConstantHead().fit(data)(data.x[:1]).detach())
    assert found == pytest.approx(float(expected(y)), abs=0.02)


def test_predictions_stay_near_the_range_of_the_targets() -> None:
    x = Y.clone()
    y = 3 * x + 1
    model = Auto(heads=("linear",)).build(RecipeData(x, y, kp.MSE(), 0, torch.ones(1, dtype=torch.bool))).model
    far = model(torch.tensor([[-1e6], [0.0], [1e6]], dtype=torch.float64)).detach().flatten().tolist()
    low, high = float(y.min()), float(y.max())
    margin = (0.1 + 10 / len(y)) * (high - low)
    assert far == pytest.approx([low - margin, 1.0, high + margin], abs=0.05)
    assert len(model.layers) == 1


def test_a_busy_machine_leaves_out_no_head(monkeypatch) -> None:
    data = RecipeData(Y, 3 * Y + 1, kp.MSE(), 0, torch.ones(1, dtype=torch.bool))
    quiet = Auto(heads=("linear", "additive")).build(data).leaderboard
    clock = itertools.count(0, 1000)  # between two looks at the clock, other programs ran
    monkeypatch.setattr("kapsi.recipes.auto.time.perf_counter", lambda: float(next(clock)))
    busy = Auto(heads=("linear", "additive")).build(data).leaderboard
    assert [(row.head, row.loss, row.weight) for row in busy] == [(row.head, row.loss, row.weight) for row in quiet]
    assert all("budget" not in row.note for row in busy)


def test_heads_that_are_behind_on_the_first_rows_are_left_out() -> None:
    """Those stay that are among the best, or make a sum better; the simplest always do."""
    data = RecipeData(Y, Y, kp.MSE(), 0, torch.ones(1, dtype=torch.bool))
    search = _AutoSearch(Auto(), data, 0, Watch())
    shared = normal(500, 1, seed=1)
    outputs = {
        "best": Y + 0.5 * shared,
        "as good": Y + 0.5 * normal(500, 1, seed=2),
        "opposite": Y - 0.7 * shared,
        "behind": Y + 1.2 * shared,
        "far behind": Y + 3.0 * shared,
        "constant": 0 * Y,
    }
    heads = dict.fromkeys(outputs, LinearHead())
    complex_heads = {name: ConstantHead() if name == "constant" else AdditiveHead() for name in outputs}
    rows = torch.arange(500)
    fold = [(rows[250:], rows[:250])]
    assert search._contenders(outputs, complex_heads, data, fold) == ["best", "as good", "opposite", "constant"]
    assert search._contenders(outputs, heads, data, fold) == list(outputs)  # all are simple
    few = {name: outputs[name] for name in ("best", "far behind")}
    assert search._contenders(few, complex_heads, data, fold) == list(few)


def test_cheap_heads_leave_their_time_to_the_fits_of_others() -> None:
    """The fits have 30% of the budget, and estimates are twice as long as fits on an idle machine, but for images."""
    costs = ((20.0, False), (2.0, False), (8.0, True))
    heads = [SimpleNamespace(fit_cost=lambda data, rows, c=c: c, reads_images=images) for c, images in costs]
    search = _AutoSearch(Auto(budget=60), data_of(20), 0, Watch())
    assert search._shares(heads) == pytest.approx([8.5, 6.0, 8.5])
    long = SimpleNamespace(fit_cost=lambda data, rows: rows / 1000, reads_images=False)
    search = _AutoSearch(Auto(budget=60), data_of(20_000), 0, Watch())
    assert [search._rows_of_fit(long, seconds) for seconds in (10, 9)] == [20_000, 10_000]


def test_named_heads_are_all_compared_unless_there_is_a_budget() -> None:
    costly = SimpleNamespace(cost=lambda data, rows: 100.0, least_budget=lambda data: 0.0)
    heads = {"constant": costly, "linear": costly, "additive": costly}
    for auto, left_out in ((Auto(), 1), (Auto(heads=("linear",)), 0), (Auto(heads=("linear",), budget=60), 1)):
        search = _AutoSearch(auto, data_of(41), 0, Watch())
        search.least_budget = search._least_budget(heads)
        search._compared(dict(heads))
        assert len(search.skipped) == left_out
    # Five folds, twice, of three heads at 100 seconds, half of the estimate; comparisons have 70% of the budget.
    named = _AutoSearch(Auto(heads=("linear",)), data_of(41), 0, Watch())
    assert 0.7 * named._least_budget(heads) == pytest.approx(1_500)


def test_comparisons_of_an_interrupted_run_count_in_the_budget() -> None:
    class Interrupted(Watch):
        def kept(self, name: str) -> CrossFit | None:
            return CrossFit(normal(300, 3, seed=0), LinearHead(), 100.0) if name.startswith("linear") else None

    data = data_of(300)
    result = _AutoSearch(Auto(heads=("linear", "additive"), budget=60), data, 0, Interrupted()).result()
    notes = {row.head: row.note for row in result.leaderboard}
    assert notes["additive"] == "left out: the budget of 60 s is spent"
    assert notes["linear"] == ""


def test_stages_hold_out_every_row_once_or_in_each_repetition() -> None:
    for rows, stages in ((100, (100, 100)), (500, (100, 400))):
        part = RecipeData(Y[:rows], Y[:rows], kp.MSE(), 0, torch.ones(1, dtype=torch.bool))
        plan = _AutoSearch(Auto(), part, 0, Watch())._folds(part)
        held_out = [torch.cat([test for _, test in folds]) for folds in plan]
        assert tuple(map(len, held_out)) == stages
        assert sorted(torch.cat(held_out).tolist()) == sorted(list(range(rows)) * (2 if rows == 100 else 1))


def test_a_part_of_the_weights_is_equal_for_heads_close_to_the_best() -> None:
    heads = [Y + scale * normal(500, 1, seed=seed) for seed, scale in ((1, 0.5), (2, 0.51), (3, 2.0))]
    sharp = select_heads(heads, Y, None, kp.MSE(), [0, 1, 2]).weights
    mixed = select_heads(heads, Y, None, kp.MSE(), [0, 1, 2], average=0.5).weights
    assert mixed == pytest.approx([0.5 * w + 0.25 * near for w, near in zip(sharp, (1, 1, 0), strict=True)])


def test_heads_left_out_of_a_repetition_are_candidates_with_their_first_outputs(monkeypatch) -> None:
    data = RecipeData(Y[:60], Y[:60], kp.MSE(), 0, torch.ones(1, dtype=torch.bool))
    monkeypatch.setattr(_AutoSearch, "_contenders", lambda *_: ["constant", "linear"])
    search = _AutoSearch(Auto(heads=("linear", "additive")), data, 0, Watch())
    plan = search._folds(data)
    entries = search._entries(search._suited(), data, plan, torch.arange(120), Stopwatch())
    outputs = {entry.name: entry.outputs.split(60) for entry in entries}
    assert torch.equal(*outputs["additive"])
    assert not torch.equal(*outputs["linear"])


def test_a_stopwatch_counts_cpu_seconds_where_they_are_fewer(monkeypatch) -> None:
    watch = Stopwatch(4.0)
    wall, cpu = watch._wall, watch._cpu
    for elapsed, used, seconds in ((9.0, 3.0, 3.0), (4.0, 8.0, 4.0)):
        monkeypatch.setattr("time.perf_counter", lambda t=wall + elapsed: t)
        monkeypatch.setattr("time.process_time", lambda t=cpu + used: t)
        assert watch.seconds() == pytest.approx(seconds)
        assert watch.over() == (seconds == 4.0)


def test_losses_computed_a_few_at_a_time_give_the_same_weights(monkeypatch) -> None:
    y = torch.arange(60) % 3
    outputs = [3.0 * torch.nn.functional.one_hot(y, 3) + normal(60, 3, seed=seed) for seed in range(4)]
    together = select_heads(outputs, y, None, kp.CrossEntropy(), [0, 1, 2, 3])
    monkeypatch.setattr(selection, "TOGETHER", 1)
    assert select_heads(outputs, y, None, kp.CrossEntropy(), [0, 1, 2, 3]) == together
