"""Target encoding of columns of many categories, as of scikit-learn's `TargetEncoder`."""

import json
from dataclasses import replace

import numpy as np
import pytest
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.preprocessing import StandardScaler, TargetEncoder

import kapsi as kp
from kapsi.data.tabular import Preprocessing, make_problem, read_table, unseen_notes
from kapsi.data.tabular.encoders import Unseen
from kapsi.data.tabular.target_encoding import shrunk_means
from kapsi.errors import TableError
from kapsi.tables import fit_table, load_run
from kapsi.tables.preparation import TrainingRows
from test_tables import config, normal, write

ROWS, WORDS = 400, 60


def words():
    return np.array([f"w{i:02}" for i in np.random.default_rng(5).integers(WORDS, size=ROWS)])


def targets(kind):
    effect = normal(WORDS, seed=6)[[int(word[1:]) for word in words()]]
    values = effect + 0.3 * normal(ROWS, seed=7)
    if kind == "continuous":
        return values
    return np.digitize(values, [0.0] if kind == "binary" else [-0.5, 0.5])


@pytest.mark.parametrize("kind", ["continuous", "binary", "multiclass"])
def test_target_encodings_are_those_of_scikit_learn(tmp_path, kind):
    y, seed = targets(kind), 3
    labels = y if kind == "continuous" else np.array(["a", "b", "c"])[y]
    path = write(tmp_path / "t.csv", w=words(), y=labels)
    problem = make_problem(read_table(path), "y")
    rows = TrainingRows.of(problem, np.arange(ROWS), seed)
    folds = (KFold if kind == "continuous" else StratifiedKFold)(5, shuffle=True, random_state=seed)
    inputs = words()[:, np.newaxis]
    cross_fitted = np.empty((ROWS, rows.x.shape[1]))
    for others, part in folds.split(inputs, y):
        encoder = TargetEncoder(target_type=kind, smooth="auto").fit(inputs[others], y[others])
        cross_fitted[part] = encoder.transform(inputs[part])
    encoder = TargetEncoder(target_type=kind, smooth="auto").fit(inputs, y)
    scaler = StandardScaler().fit(encoder.transform(inputs))
    np.testing.assert_allclose(rows.x, scaler.transform(cross_fitted), rtol=1e-9, atol=1e-9)
    whole = rows.preprocessing.transform(problem.features)
    np.testing.assert_allclose(whole, scaler.transform(encoder.transform(inputs)), rtol=1e-9, atol=1e-9)


def test_unseen_and_missing_categories_have_the_mean_of_all_rows(tmp_path):
    y = targets("continuous")
    column = words().astype(object)
    column[7] = None
    path = write(tmp_path / "t.csv", w=column, x=normal(ROWS, seed=8), y=y)
    fit_table(path, config(), tmp_path / "run")
    run = load_run(tmp_path / "run")
    encoder = run.model.preprocessing.columns[0]
    assert encoder.names() == ["w: mean of y", "w is missing"]
    features = read_table(write(tmp_path / "n.csv", w=["never", None, "w01"], x=[0.0, 0.5, 1.0])).columns
    inputs = encoder.transform(features["w"])
    assert inputs[:2, 0].tolist() == [encoder.default[0]] * 2
    assert inputs[:, 1].tolist() == [0.0, 1.0, 0.0]
    counts = encoder.unseen(features["w"])
    assert counts == Unseen(1, 0, "never", averaged=True)
    note = "column 'w': 1 value was not in the training rows (such as 'never'); the mean of all rows stands for it"
    assert unseen_notes({"w": counts}) == [note]
    again = Preprocessing.from_dict(json.loads(json.dumps(run.model.preprocessing.to_dict())))
    assert again == run.model.preprocessing


def test_categories_without_effect_do_not_explain_the_target(tmp_path):
    # A column of 300 categories in 400 rows: encodings of the row's own target would fit noise.
    noise = np.array([f"w{i}" for i in np.random.default_rng(1).integers(300, size=ROWS)])
    y = normal(ROWS, seed=2)
    problem = make_problem(read_table(write(tmp_path / "t.csv", w=noise, y=y)), "y")
    rows = TrainingRows.of(problem, np.arange(ROWS))
    assert abs(np.corrcoef(rows.x[:, 0], y)[0, 1]) < 0.15
    assert np.corrcoef(rows.preprocessing.transform(problem.features)[:, 0], y)[0, 1] > 0.5


def weighted_encoding(codes, y, weights, count):
    """The formula of `shrunk_means`, category by category, for one output."""
    w = weights / weights[weights > 0].mean()
    mean = np.average(y, weights=w)
    variance = np.average((y - mean) ** 2, weights=w)
    found = []
    for code in range(count):
        own = codes == code
        n = w[own].sum()
        if n == 0:
            found.append(mean)
            continue
        own_mean = np.average(y[own], weights=w[own])
        own_variance = np.average((y[own] - own_mean) ** 2, weights=w[own])
        share = n * variance / (n * variance + own_variance)
        found.append(share * own_mean + (1 - share) * mean)
    return np.array(found), mean


def test_weights_of_rows_count_in_the_means():
    rng = np.random.default_rng(4)
    codes, y, weights = rng.integers(-1, 9, size=200), normal(200, seed=3), rng.uniform(0, 3, size=200)
    weights[::5] = 0
    means, mean = shrunk_means(codes, y[:, np.newaxis], 9, weights)
    expected, overall = weighted_encoding(codes, y, weights, 9)
    np.testing.assert_allclose(means[:, 0], expected, rtol=1e-12)
    np.testing.assert_allclose(mean, [overall], rtol=1e-12)
    np.testing.assert_allclose(shrunk_means(codes, y[:, np.newaxis], 9, 7 * weights)[0], means, rtol=1e-12)
    kept = weights > 0  # rows of weight zero count as if they were not there
    without, _ = shrunk_means(codes[kept], y[kept, np.newaxis], 9, weights[kept])
    np.testing.assert_allclose(without, means, rtol=1e-12)


def test_a_column_of_weights_reaches_the_encoding(tmp_path):
    y, weights = targets("continuous"), np.random.default_rng(9).integers(0, 4, size=ROWS)
    path = write(tmp_path / "t.csv", w=words(), k=weights, y=y)
    encoder = make_problem(read_table(path), "y", weight="k").preprocessing.columns[0]
    codes = np.unique(words(), return_inverse=True)[1]
    expected, overall = weighted_encoding(codes, y, weights.astype(float), WORDS)
    differences = np.array(encoder.values) - encoder.default[0]
    center = np.average(expected[codes], weights=weights)
    scale = np.sqrt(np.average((expected[codes] - center) ** 2, weights=weights))
    np.testing.assert_allclose(differences, (expected - overall) / scale, rtol=1e-9, atol=1e-12)


def test_groups_are_encoded_without_their_own_rows(tmp_path):
    # Each word belongs to one group: nothing is known of it without the group, so all rows have the mean of the others.
    groups = [int(word[1:]) % 8 for word in words()]
    path = write(tmp_path / "t.csv", w=words(), k=groups, y=targets("continuous"))
    problem = make_problem(read_table(path), "y", group="k")
    x = TrainingRows.of(problem, np.arange(ROWS)).x[:, 0]
    assert len(np.unique(x.round(12))) <= 5
    assert len(np.unique(TrainingRows.of(replace(problem, groups=None), np.arange(ROWS)).x.round(12))) > 50


def test_a_target_encoding_predicts_what_indicators_of_the_most_frequent_cannot(tmp_path):
    path = write(tmp_path / "t.csv", w=words(), y=targets("continuous"))
    report = fit_table(path, config(training=kp.TrainConfig()), tmp_path / "run")
    assert report.scores["kapsi"][0].main > 0.8


@pytest.mark.parametrize(
    "change", [{"values": [0.0]}, {"default": []}, {"outputs": []}, {"categories": ["b", "a"]}, {"values": ["x", 1.0]}]
)
def test_damaged_target_encodings_are_refused(change):
    column = {"kind": "target", "name": "w", "categories": ["a", "b"], "outputs": ["y"]}
    column |= {"values": [0.5, -0.5], "default": [0.0], "missing": False}
    assert Preprocessing.from_dict({"columns": [column]}).names() == ["w: mean of y"]
    with pytest.raises(TableError):
        Preprocessing.from_dict({"columns": [column | change]})
