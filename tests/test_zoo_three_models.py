"""Four models of iris: their graphs, and the picture of them."""

from __future__ import annotations

import itertools

import pytest
import torch
from sklearn.datasets import load_iris
from sklearn.model_selection import StratifiedKFold
from sklearn.naive_bayes import GaussianNB

import kapsi as kp
from kapsi.zoo import three_models


@pytest.fixture(scope="module")
def found() -> list[three_models.Graph]:
    return three_models.graphs()


def test_graphs_are_those_of_the_models(found) -> None:
    naive, bayes, markov, rpn = found
    assert naive.arrows == ((4, 0), (4, 1), (4, 2), (4, 3))
    assert markov.lines == tuple(itertools.combinations(range(5), 2))
    # The structure of the paper: petal length and sepal length, petal width and sepal width.
    assert {frozenset(pair) for pair in bayes.arrows} == {frozenset(pair) for pair in ((2, 0), (3, 1), (4, 2), (4, 3))}
    assert {b for _, b in rpn.arrows} == {4}
    assert {a for a, _ in rpn.arrows} >= {i for pair in rpn.lines for i in pair}
    assert rpn.lines


def test_more_combinations_make_more_edges(found) -> None:
    rpn = three_models.graphs(strongest=14)[-1]
    assert rpn.lines == tuple(itertools.combinations(range(4), 2))
    assert set(found[-1].lines) <= set(rpn.lines)
    with pytest.raises(kp.SpecError, match="at least 1"):
        three_models.graphs(strongest=0)


def test_scores_are_of_rows_that_were_left_out() -> None:
    scores = three_models.scores(folds=3)
    assert [score.model for score in scores] == list(three_models._MODELS)
    assert all(0.85 < score.mean <= 1 and 0 <= score.deviation < 0.1 for score in scores)
    x, y = load_iris(return_X_y=True)
    parts = StratifiedKFold(3, shuffle=True, random_state=0).split(x, y)
    right = [GaussianNB().fit(x[train], y[train]).score(x[test], y[test]) for train, test in parts]
    assert scores[0].mean == pytest.approx(sum(right) / 3)


def test_bins_have_about_as_many_rows() -> None:
    x, y = three_models._iris()
    codes = three_models._binned(x, y, three_models._edges(x))
    assert codes.shape == (150, 5)
    for column in codes[:, :4].long().T:
        counts = torch.bincount(column, minlength=3)
        assert len(counts) == 3
        assert int(counts.min()) >= 35


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_picture_is_written_and_repeats(tmp_path, monkeypatch, found, suffix) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(three_models, "graphs", lambda strongest: found)
    paths = [tmp_path / f"{name}.{suffix}" for name in ("first", "second")]
    for path in paths:
        three_models.save(path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert len(paths[0].read_bytes()) > 5_000
    with pytest.raises(kp.SpecError, match="expected a file name"):
        three_models.save(tmp_path / "picture.txt")
