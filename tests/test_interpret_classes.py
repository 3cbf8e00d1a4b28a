"""Short formulas for classes."""

from __future__ import annotations

import numpy as np
import pytest
import sympy

import kapsi as kp
from kapsi.cli import main
from kapsi.data.tabular import write_table
from kapsi.interpret import short_formulas
from kapsi.interpret.class_formulas import class_formulas, scored
from kapsi.interpret.rows import target_values

A, B = sympy.symbols("a b", real=True)
RNG = np.random.default_rng(0)
X = RNG.uniform(-2, 2, (300, 2))
LOGIT = X[:, 0] ** 2 - 1
CODES = (RNG.logistic(size=300) < LOGIT).astype(float)


def test_constants_of_a_logit_have_the_highest_likelihood() -> None:
    linear = pytest.importorskip("sklearn.linear_model").LogisticRegression(C=np.inf, tol=1e-9).fit(X, CODES)
    found = scored(
        [sympy.Float(0.5) + sympy.Float(0.1) * A - sympy.Float(0.2) * B], {A: X[:, 0], B: X[:, 1]}, CODES.astype(int)
    )
    (expression,) = found.expressions
    weights = [float(expression.coeff(s)) for s in (A, B)]
    assert weights == pytest.approx(linear.coef_[0].tolist(), abs=1e-4)
    assert found.accuracy == linear.score(X, CODES)


def test_a_nonlinear_logit_is_found() -> None:
    front = class_formulas(X, CODES, LOGIT[:, None], (A, B), 20.0)
    best = min(front, key=lambda f: f.cost)
    assert best.expressions[0].free_symbols == {A}
    assert abs(float(best.expressions[0].diff(A, 2).subs(A, 0)) - 2) < 0.8
    assert [f.log_loss for f in front] == sorted((f.log_loss for f in front), reverse=True)


def test_three_classes_have_a_logit_each() -> None:
    logits = np.stack([X[:, 0], X[:, 1], -X.sum(1)], axis=1)
    codes = np.argmax(3 * logits + RNG.gumbel(size=logits.shape), axis=1)
    front = class_formulas(X, codes.astype(float), logits, (A, B), 5.0)
    assert front[0].accuracy == np.bincount(codes).max() / 300
    assert len(front[-1].expressions) == 3
    assert front[-1].accuracy > 0.8


def test_a_run_of_classes_ends_with_its_log_odds(tmp_path, capsys) -> None:
    labels = np.where(CODES > 0, "yes", "no")
    write_table(tmp_path / "t.csv", {"a": X[:, 0].tolist(), "b": X[:, 1].tolist(), "label": labels.tolist()})
    run = str(tmp_path / "run")
    fit = ["fit", str(tmp_path / "t.csv"), "--target", "label", "--output", run, "--head", "quadratic", "--no-report"]
    assert main(fit) == 0
    capsys.readouterr()
    assert main(["formula", run, "--seconds", "0.1"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[-1].startswith("log-odds(yes) = ")
    assert any(line.split()[:3] == ["complexity", "accuracy", "log"] for line in lines)
    table = short_formulas(kp.load_run(run), seconds=0.1)
    assert table.rows[-1].source == "model"
    assert table.rows[-1].log_loss < 0.6
    small = table.best(1)
    assert small.complexity == 1


def test_a_label_of_no_class_is_refused_everywhere() -> None:
    fitted = kp.RPNClassifier(heads=["linear"]).fit(X, np.where(CODES > 0, "yes", "no"))
    table = fitted._table
    assert target_values(table, [["no"], ["yes"]], 2, "here").tolist() == [0, 1]
    with pytest.raises(
        kp.DataError, match="here: the target 'maybe' is none of the classes no, yes; leave out such rows"
    ):
        target_values(table, ["no", "maybe"], 2, "here")
    with pytest.raises(kp.DataError, match="here: 3 rows of inputs and 2 of targets"):
        target_values(table, ["no", "yes"], 3, "here")


def test_a_longer_formula_must_lower_the_log_loss_clearly() -> None:
    """The logit has the noise of an estimate: a wiggle within it is no term of a formula."""
    front = class_formulas(X, CODES, (LOGIT + 0.3 * np.sin(7 * X[:, 1]))[:, None], (A, B), 20.0)
    assert max(f.complexity for f in front) < 15
    assert min(front, key=lambda f: f.cost).expressions[0].free_symbols == {A}


def test_without_time_the_shares_of_the_classes_remain() -> None:
    (only,) = class_formulas(X, CODES, LOGIT[:, None], (A, B), 0.0)
    assert only.complexity == 1
    assert only.log_loss < np.log(2)
