"""Functions of a few variables: the choice on validation rows, the score on test rows, the paper's protocol, wrong options."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

import kapsi as kp
from kapsi.data.problems import FunctionProblem
from kapsi.errors import KapsiError, SpecError
from kapsi.modules import trained_count
from kapsi.paper.experiment import Budget, Outcome, Run, load_shipped
from kapsi.paper.procedures import classifiers, functions
from kapsi.paper.procedures.functions import run
from kapsi.recipes import trials

LINEAR = {"heads": [{"bias": True}]}


def polynomial(degree: int, **options: Any) -> dict[str, Any]:
    last = {"heads": [{"expansion": {"kind": "chebyshev", "degree": degree}, "bias": True}]}
    return {"model": {"widths": [None, 1, None], "layers": [LINEAR, last]}, "place": [[-1, 1]], **options}


def outcome(row: str = "E.2", seed: int = 100, protocol: str = "validation", **options: Any) -> Outcome:
    given: dict[str, Any] = {"candidates": {"polynomial": polynomial(4)}, "rows": 400, "training": {"epochs": 30}}
    return run(Run("mine", row, "kapsi", seed, protocol, {**given, **options}))


def same(one: Outcome, other: Outcome) -> bool:
    return dataclasses.replace(one, seconds=None) == dataclasses.replace(other, seconds=None)


def test_a_square_of_a_sum_is_found() -> None:
    found = outcome(rows=2_000, candidates={"line": polynomial(1), "polynomial": polynomial(3)})
    assert found.score < 1e-20  # the paper's best RPN: 5.06e-8
    assert found.parameters == 2 + 1 + 3 + 1
    assert found.extra["candidate"] == "polynomial"
    assert found.extra["validation_errors"]["line"] > 0.01 > found.extra["validation_errors"]["polynomial"]
    assert found.validation is not None
    assert found.validation < 1e-20


def test_the_score_is_the_mean_square_on_rows_that_were_not_trained_on() -> None:
    # A line through (x + y)² has an error that is known: that of least squares on the training rows.
    found = outcome(candidates={"line": {"model": {"widths": [None, None], "layers": [LINEAR]}}})
    x, y, x_test, y_test = kp_split("E.2", 400, 200, 100)
    columns = np.column_stack([x, np.ones(len(x))])
    solved = np.linalg.lstsq(columns, y, rcond=None)[0]
    expected = np.mean((np.column_stack([x_test, np.ones(len(x_test))]) @ solved - y_test) ** 2)
    assert found.score == pytest.approx(expected, rel=1e-9)


def kp_split(name: str, rows: int, train: int, seed: int) -> Any:
    from kapsi.data.problems import problem

    return problem(name).split(rows, train, seed=seed)


def test_runs_are_deterministic_and_leave_the_global_state_alone() -> None:
    state, numbers = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = outcome(trials=2, training={"epochs": 10, "solver": {"restarts": 2}})
    torch.manual_seed(77)
    assert same(first, outcome(trials=2, training={"epochs": 10, "solver": {"restarts": 2}}))
    assert not same(first, outcome(seed=101, trials=2, training={"epochs": 10, "solver": {"restarts": 2}}))
    torch.set_rng_state(state)
    outcome()
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], numbers)


@pytest.mark.parametrize("halving", [None, {"epochs": 3, "keep": 2}])
def test_nothing_is_chosen_by_test_rows(monkeypatch: pytest.MonkeyPatch, halving: Any) -> None:
    options: dict[str, Any] = {
        "candidates": {"two": polynomial(2), "six": polynomial(6, trials=2)},
        "successive_halving": halving,
        "training": {"epochs": 8, "solver": {"restarts": 2}},
    }
    models: list[list[torch.Tensor]] = []
    selected = trials.TrialSearch.select

    def watched(self: Any) -> trials.Selection:
        selection = selected(self)
        models.append([p.detach().clone() for p in selection.best.model.parameters()])
        return selection

    monkeypatch.setattr(trials.TrialSearch, "select", watched)
    clean = outcome("E.4", **options)
    split = FunctionProblem.split

    def poisoned(self: FunctionProblem, *args: Any, **named: Any) -> Any:
        x, y, x_test, y_test = split(self, *args, **named)
        return x, y, x_test * np.nan, y_test * np.nan

    monkeypatch.setattr(FunctionProblem, "split", poisoned)
    spoiled = outcome("E.4", **options)
    assert math.isinf(spoiled.score)
    assert math.isfinite(clean.score)
    assert all(torch.equal(one, other) for one, other in zip(*models, strict=True))
    assert spoiled.validation == clean.validation
    kept = ("candidate", "trial", "validation_errors", "train", "epochs")
    assert all(spoiled.extra[name] == clean.extra[name] for name in kept)


def test_validation_rows_are_the_edge_and_the_rest() -> None:
    x = torch.rand(500, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1
    fitted, held = trials.hold_out(x, x[:, :1], 100, edge=30, tails=0, seed=5)
    assert len(held) == 100
    assert len(fitted) == 400
    assert torch.equal(torch.cat([fitted, held]).sort().values, torch.arange(500))
    # The extreme rows of the axes and the diagonals that are left are less extreme than those of a random part.
    for direction in ([1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]):
        along = x @ torch.tensor(direction, dtype=torch.float64)
        assert along.argmax() in held
        assert (along[held] > along[fitted].max()).sum() >= 3
    plain = trials.hold_out(x, x[:, :1], 100, edge=0, tails=0, seed=5)[1]
    assert len(plain) == 100
    assert not torch.equal(plain, held)


def test_successive_halving_continues_the_best() -> None:
    whole = outcome("E.3", trials=4, successive_halving={"epochs": 5, "keep": 1}, refit=None)
    assert whole.extra["epochs"] <= 30
    assert whole.extra["fits"] == 4
    assert whole.score < 1e-4


def test_a_later_candidate_has_to_improve() -> None:
    # Noise leaves every degree from two on with about the same error: the simplest of them is taken.
    models = {f"degree {d}": polynomial(d) for d in (1, 2, 3, 5)}
    free = outcome(noise=0.3, candidates=models)
    errors = free.extra["validation_errors"]
    assert free.extra["candidate"] == min(errors, key=errors.__getitem__)
    bound = outcome(noise=0.3, candidates=models, min_improvement=2)
    assert bound.extra["validation_errors"] == errors
    assert bound.extra["candidate"] == "degree 2"
    assert errors["degree 2"] < errors["degree 1"] / 2


def test_no_further_model_is_tried_where_one_is_exact() -> None:
    models = {f"degree {d}": polynomial(d, trials=2) for d in (1, 2, 3)}
    found = outcome(candidates=models, target_error=1e-16)
    assert list(found.extra["validation_errors"]) == ["degree 1", "degree 2"]
    assert found.extra["candidate"] == "degree 2"
    assert found.extra["fits"] <= 4
    assert found.score < 1e-20
    assert len(outcome(candidates=models).extra["validation_errors"]) == 3


def test_a_candidate_begins_with_the_first_layer_of_another_and_is_placed() -> None:
    first = polynomial(3)
    graded = {
        "model": {
            "widths": [None, 1, 1, None],
            "layers": [
                LINEAR,
                {"heads": [{"expansion": {"kind": "naive_gamma", "count": 2, "floor": 1e-5}, "bias": True}]},
                {"heads": [{"expansion": {"kind": "chebyshev", "degree": 4}, "bias": True}]},
            ],
        },
        "place": [[1, 3], [-1, 1]],
        "after": "polynomial",
        "trials": 2,
    }
    given = Run(
        "mine", "E.4", "kapsi", 100, options={"candidates": {"polynomial": first, "graded": graded}, "rows": 400}
    )
    options = functions.read_options(given)
    search = trials.TrialSearch(options.search, functions.draw(options, given.seed)[0], given.seed)
    fits: list[Any] = []
    x = search.training.x
    for each in search.trials(x, fits):
        if each.candidate.name == "polynomial":
            search.train(each, search.training, each.candidate.config, search.training)
        fits.append(each)
    known = fits[0].model.layers[0].heads[0].psi["matrix"][0]
    for number, each in enumerate(fits[1:]):
        hidden = each.model.layers[0](x)
        assert hidden.min().item() == pytest.approx(1)
        assert hidden.max().item() == pytest.approx(3)
        after = each.model.layers[1](hidden)
        assert after.min().item() == pytest.approx(-1)
        assert after.max().item() == pytest.approx(1)
        # The direction is the known one, the second time the other way round.
        own = each.model.layers[0].heads[0].psi["matrix"][0]
        assert torch.cosine_similarity(own, known, 0).item() == pytest.approx(-1 if number else 1)
    # ln(x + y) is a logarithm of the distance: rows nearer to the pole than any training row are met.
    found = run(dataclasses.replace(given, options={**given.options, "rows": 2_000, "training": {"epochs": 100}}))
    assert found.extra["candidate"] == "graded"
    assert found.score < 1e-6  # the polynomial of degree 3: 1e-3


def test_the_protocol_of_the_paper_records_the_best_epoch() -> None:
    training = {
        "solver": {"kind": "adamw", "learning_rate": 0.2, "schedule": "constant", "batch_size": None},
        "epochs": 11,
    }
    plain = {"mlp": {"widths": [2, 4, 1], "activation": "tanh"}}
    found = outcome(
        protocol="paper", candidates={"mlp": plain}, training=training, curves=True, inputs="raw", targets="raw"
    )
    errors = found.curves["test"]
    assert len(errors) == 11 == len(found.curves["train"])
    assert found.score == errors[-1]
    assert found.extra["best_epoch_on_test"] == min(errors) < found.score
    assert errors[found.extra["best_epoch"] - 1] == min(errors)
    assert found.validation is None
    assert found.curves["train"][-1] == found.extra["train"]
    with pytest.raises(SpecError, match="one candidate and one trial"):
        outcome(protocol="paper", candidates={"mlp": {**plain, "trials": 2}}, training=training)


def test_curves_follow_the_chosen_model() -> None:
    found = outcome(curves=True, trials=2, successive_halving={"epochs": 5, "keep": 1})
    assert len(found.curves["train"]) == len(found.curves["test"]) == found.extra["epochs"]
    assert found.curves["iteration"] == [float(i + 1) for i in range(found.extra["epochs"])]
    assert found.curves["test"][-1] == found.score
    without = outcome(trials=2, successive_halving={"epochs": 5, "keep": 1})
    assert (without.score, without.curves) == (found.score, {})


def test_noise_is_in_the_training_targets() -> None:
    found = outcome(noise=0.1, candidates={"polynomial": polynomial(2)})
    _, y, _, _ = kp_split("E.2", 400, 200, 100)
    assert found.score == pytest.approx(0.01 * float(np.var(y)), rel=0.5)


def test_a_warm_start_comes_first_and_once() -> None:
    warm = {"solver": {"kind": "adamw", "learning_rate": 0.05}, "epochs": 7}
    plain = {"candidates": {"polynomial": polynomial(4)}, "training": {"epochs": 1}, "refit": {"epochs": 1}}
    warmed = {**plain, "candidates": {"polynomial": polynomial(4, warm=warm)}}
    assert outcome(**plain).extra["epochs"] == 2
    found = outcome(**warmed, curves=True)
    assert found.extra["epochs"] == 9
    assert found.curves["train"][7] < found.curves["train"][6] < found.curves["train"][0]
    with pytest.raises(SpecError, match=r"warm.*solver"):
        outcome(**{**warmed, "candidates": {"polynomial": polynomial(4, warm={**warm, "solver": "newton"})}})


ARCS = {
    "model": {
        "widths": [None, 1, None],
        "layers": [LINEAR, {"heads": [{"expansion": {"kind": "inverse_trigonometric", "margin": 1e-4}, "bias": True}]}],
    },
    "place": [[0.0, 0.95]],
    "after": "polynomial",
}


def test_a_least_squares_init_solves_the_last_layer_and_leaves_the_others() -> None:
    spec = kp.from_dict(polynomial(5)["model"], kp.ModelSpec).sized(2, 1)
    model = kp.Model(spec, seed=3, dtype=torch.float64)
    x = torch.rand(80, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = (x.sum(1, keepdim=True) * 2).exp()
    before = {name: p.detach().clone() for name, p in model.named_parameters() if name.startswith("layers.0")}
    trials.solve_last_layer(model, trials.TrialRows(x, y, 4.0, 2.0))
    after = dict(model.named_parameters())
    assert before
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(p.requires_grad for p in after.values())
    hidden = model.layers[0](x).detach().numpy()[:, 0]
    columns = np.polynomial.chebyshev.chebvander(hidden, 5)
    targets = (y[:, 0].numpy() - 4) / 2
    least = np.square(columns @ np.linalg.lstsq(columns, targets, rcond=None)[0] - targets).mean()
    error = np.square(model(x).detach().numpy()[:, 0] - targets).mean()
    assert least < error < 1.1 * least  # a penalty, chosen by the rows that are left out, is on top


def test_a_least_squares_init_finds_what_drawn_weights_miss() -> None:
    options: dict[str, Any] = {"rows": 1_000, "training": {"epochs": 60}}
    candidates = {"polynomial": polynomial(6), "arcs": ARCS}
    drawn = outcome("E.8", **options, candidates=candidates)
    solved = outcome("E.8", **options, candidates=candidates, least_squares_init=True)
    assert solved.extra["candidate"] == "arcs"
    assert solved.score < 1e-24 < 1e-12 < drawn.score
    one = outcome(
        "E.8", **options, candidates={"polynomial": polynomial(6), "arcs": {**ARCS, "least_squares_init": True}}
    )
    assert one.score < 1e-24


def test_fits_are_compared_on_random_inputs_with_those_like_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"a": 0.0, "b": 0.1, "far": 5.0}
    monkeypatch.setattr(trials.TrialSearch, "reference_outputs", lambda self, each: torch.full((4, 1), made[each]))

    class Fitted(str):
        failed, error, distance = "", 1.0, 0.0

    def apart(**errors: float) -> list[float]:
        going = [Fitted(name) for name in made]
        for each in going:
            each.error = errors.get(each, 1.0)
        trials.TrialSearch.compare(trials.TrialSearch.__new__(trials.TrialSearch), going)  # type: ignore[arg-type]
        return [each.distance for each in going]

    assert apart() == pytest.approx([0.01, 0.01, 4.9**2])
    # One that is much better than the others is not measured by them, and they are by it.
    assert apart(far=1e-3) == pytest.approx([0.01, 0.01, 0.0])
    assert apart(a=1e-3, b=2e-3, far=0.5) == pytest.approx([0.01, 0.01, 4.9**2])


def test_a_refit_that_drifts_far_is_rejected() -> None:
    options: dict[str, Any] = {"rows": 40, "candidates": {"polynomial": polynomial(8)}, "training": {"epochs": 40}}
    held, free = (
        outcome("E.4", seed=101, **options, reference_inputs=500, max_drift=max_drift) for max_drift in (1, 1e6)
    )
    alone = outcome("E.4", seed=101, **options, refit=None)
    assert not held.extra["refitted"]
    assert free.extra["refitted"]
    assert held.score == alone.score != free.score
    assert not alone.extra["refitted"]


@pytest.mark.parametrize(
    ("moves", "expected"),
    [
        ({"a": 0.5, "b": 0.1, "c": 0.1}, ("a", True)),
        ({"a": 1.1, "b": 0.1, "c": 0.9}, ("c", True)),  # the better one of those that are about as good
        ({"a": 1.1, "b": 1.0}, ("b", True)),
        ({"a": 1.1, "b": 9.0, "c": 1.2}, ("a", True)),  # none stays: the first that does not go far
        ({"b": 10.0, "c": 11.0}, ("b", True)),
        ({"far": 0.0, "lost": 0.0}, ("a", False)),
        ({}, ("a", False)),
    ],
)
def test_the_next_fit_replaces_a_drifting_refit(
    monkeypatch: pytest.MonkeyPatch, moves: dict[str, float], expected: tuple[str, bool]
) -> None:
    made = outcome(refit={"epochs": 1})
    assert made.extra["refitted"]
    errors = {"a": 1e-6, "b": 9e-6, "c": 3e-6, "far": 1.1e-5, "lost": math.inf}
    candidates = {name: polynomial(degree) for degree, name in enumerate(errors, 1)}
    advance = trials.Trial.train

    def advanced(self: Any, *given: Any, **named: Any) -> None:
        advance(self, *given, **named)
        self.error = errors[self.candidate.name]

    monkeypatch.setattr(trials.Trial, "train", advanced)
    monkeypatch.setattr(trials.Trial, "refit", lambda self, *given: (moves.get(self.candidate.name, math.inf), self))
    found = outcome(candidates=candidates, refit={"epochs": 1})
    assert (found.extra["candidate"], found.extra["refitted"]) == expected
    assert outcome(candidates=candidates, refit=None).extra["candidate"] == "a"


def test_a_choice_by_consensus_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"candidates": {"two": polynomial(2), "three": polynomial(3)}, "target_error": 0.0}

    def apart(self: Any, going: list[Any]) -> None:
        for each in going:
            each.distance = math.inf if each.candidate.name == by_error else 0.0

    by_error = outcome("E.3", **options).extra["candidate"]
    monkeypatch.setattr(trials.TrialSearch, "compare", apart)
    assert outcome("E.3", **options, reference_inputs=10).extra["candidate"] != by_error
    assert outcome("E.3", **options, reference_inputs=10, consensus=False).extra["candidate"] == by_error
    assert outcome("E.3", **options).extra["candidate"] == by_error


def test_a_fit_that_goes_wrong_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = trials.train

    def failing(model: kp.Model, *args: Any, **named: Any) -> Any:
        if sum(p.numel() for p in model.parameters()) > 8:
            raise KapsiError("the loss is not finite in layer 1")
        return real(model, *args, **named)

    monkeypatch.setattr(trials, "train", failing)
    found = outcome(candidates={"two": polynomial(2), "nine": polynomial(9)})
    assert found.extra["candidate"] == "two"
    assert found.extra["failed"] == 1
    with pytest.raises(KapsiError, match="no candidate could be fitted; the loss is not finite in layer 1"):
        outcome(candidates={"nine": polynomial(9)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidate": {}}, "options: there is no 'candidate'; did you mean candidates"),
        ({"candidates": {}}, "give one candidate at least"),
        (
            {"candidates": {"a": {"tree": {}}}},
            "candidates.a: FunctionCandidate has no option 'tree'; it has name, model, mlp, kan",
        ),
        ({"candidates": {"a": {"mlp": {"width": 3}}}}, "see kapsi.zoo.mlp.spec"),
        ({"candidates": {"a": {"mlp": {"widths": [3, 4, 1]}}}}, "the model has 3 inputs and the data 2"),
        ({"parameters": 7}, "candidates.polynomial.model: 8 parameters are more than the 7"),
        ({"rows": 200, "train": 200}, "leave no test rows"),
        ({"validation": 0.9}, "validation must be at most 0.5"),
        ({"min_improvement": 0.5}, "min_improvement must be at least 1"),
        ({"inputs": "log"}, "options.inputs: expected one of unit, raw"),
        ({"successive_halving": {"epochs": 3}}, "options.successive_halving: SuccessiveHalving needs 'keep'"),
        (
            {"candidates": {"a": polynomial(3, after="b")}},
            "candidates.a.after: expected the name of a candidate before it",
        ),
        ({"candidates": {"a": polynomial(3, place=[[1, 0]])}}, "expected low below high"),
        (
            {"candidates": {"a": {"mlp": {"widths": [2, 4, 1]}, "place": [[0, 1]]}}},
            "no output processing can be placed",
        ),
        ({"training": {"epoch": 3}}, "training.*epoch"),
        ({"least_squares_init": 1}, "least_squares_init: expected true or false"),
        (
            {
                "candidates": {
                    "a": {
                        "model": {"layers": [{**LINEAR, "output": ["exp"]}], "widths": [None, None]},
                        "least_squares_init": True,
                    }
                }
            },
            "candidates.a.least_squares_init: the last layer is followed by Exp",
        ),
        ({"consensus": "yes"}, "consensus: expected true or false"),
        ({"max_drift": 2.0}, "max_drift: needs reference_inputs; set both, or leave it out"),
        ({"consensus": False}, "consensus: needs reference_inputs; set both, or leave it out"),
        (
            {"candidates": {"a": {**polynomial(3), "mlp": {"widths": [None, 1]}}}},
            "expected one of model, mlp, kan, got model, mlp",
        ),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        outcome(**options)


SIZES = {
    "elementary": {"paper_recipe": 47, "mlp": 51, "kan": 63},
    "composite": {"paper_recipe": 71, "mlp": 151, "kan": 150},
    "elementary-variants": {"ext_lorr_zero": 47, "ext_lorr_linear": 53, "nstd_lorr_zero": 547, "nstd_lorr_linear": 553},
    "composite-variants": {
        "ext_lorr_zero": 71,
        "ext_lorr_linear": 81,
        "nstd_lorr_zero": 821,
        "nstd_zero_recipe": 821,
        "nstd_lorr_linear": 831,
    },
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n.endswith("-variants") else n for n in sorted(SIZES)]
)
def test_the_shipped_tables_have_the_sizes_of_the_paper(name: str) -> None:
    experiment = load_shipped(name)
    assert len(experiment.rows) == 17
    assert experiment.seeds == (0, 1, 2, 3, 4)
    for method in experiment.methods:
        options = functions.read_options(experiment.run(experiment.rows[0], method, 0))
        counts = {trained_count(kp.Model(candidate.spec)) for candidate in options.search.candidates}
        if method.name in SIZES[name]:
            assert max(counts) == SIZES[name][method.name]
        else:
            assert options.search.parameters == {"elementary": 63, "composite": 150}[name]
            assert max(counts) <= options.search.parameters
        # One recipe a table.
        for row in experiment.rows:
            other = functions.read_options(experiment.run(row, method, 0))
            assert dataclasses.replace(other, function=options.function) == options


def test_the_budget_of_a_run_is_the_number_of_its_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    # Trials: 3 and 2, each with 4 restarts in the first 5 epochs. Two of the five go on for 7, a refit has 3, warm-ups 2.
    solver = {"kind": "levenberg_marquardt", "tolerance": 0.0}
    warm = {"epochs": 2, "solver": {"kind": "adamw"}}
    options = {
        "candidates": {"a": polynomial(3, trials=3), "b": polynomial(4, trials=2, warm=warm)},
        "training": {"epochs": 12, "solver": {**solver, "restarts": 4}},
        "successive_halving": {"epochs": 5, "keep": 2},
        "refit": {"epochs": 3},
        "rows": 100,
    }
    counted = []
    original = trials.train

    def counting(model: Any, rows: Any, config: Any) -> Any:
        for record in original(model, rows, config):
            counted.append(getattr(config.solver, "restarts", 1))
            yield record

    monkeypatch.setattr(trials, "train", counting)
    given = Run("mine", "I.6.2", "kapsi", 100, "validation", options)
    run(given)
    found = functions.budget(given)
    assert (found.candidates, found.starts, found.epochs) == (2, 20, sum(counted))
    assert found.epochs == 5 * 5 * 4 + 2 * 7 + 3 + 2 * 2


def test_a_search_counts_the_epochs_of_every_split() -> None:
    options = {"hidden": [3], "train": {"epochs": 9}, "grid": {"dropout": [0.0, 0.5]}, "tune": {"train.epochs": 2}}
    search = classifiers.read("mlp", options)
    assert search.budget(3) == Budget(2, 2, 3 * (2 + 2) + 9)
    assert classifiers.read("svm_linear", {"grid": {"C": [0.1, 1.0]}}).budget(3) == Budget(2, 2)
