"""The command line: what each verb prints and writes, and what careless and hostile use leads to."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import kapsi as kp
from kapsi.cli import common, main
from kapsi.data.tabular import write_table
from kapsi.training import engine, selection
from kapsi.version import __version__

QUICK = ("--set", "training.l2=0.01", "--set", "training.epochs=3")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(engine.__file__).parents[2]), "OMP_NUM_THREADS": "1"}


def write(name, **columns):
    write_table(name, {key: list(values) for key, values in columns.items()})
    return str(name)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def rows_of(path):
    with open(path, encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle))


def files(folder="."):
    """Everything below a folder: contents of files, targets of links, None for folders."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        link = os.readlink(path) if path.is_symlink() else None
        found[str(path)] = link or (path.read_bytes() if path.is_file() else None)
    return found


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, "DELAY", math.inf)  # no first line, however slow the machine is
    x = normal(40, 2)
    labels = np.where(x[:, 0] + 0.3 * x[:, 1] > 0, "yes", "no").tolist()
    write("t.csv", a=x[:, 0], b=x[:, 1], k=["u", "v", None, "w"] * 10, y=labels)
    write("n.csv", a=x[:, 0], b=x[:, 1], y=3 * x[:, 0] + x[:, 1])


@pytest.fixture
def good(kapsi):
    def run(*arguments):
        code, out, err = kapsi(*arguments)
        assert code == 0, err
        assert all(line.startswith("note: ") for line in err.splitlines()), err
        return out

    return run


@pytest.fixture
def bad(kapsi):
    """Expect one line on standard error, exit code 2 and no change of any file; return the line."""

    def run(*arguments):
        before = files()
        code, out, err = kapsi(*arguments)
        assert (code, out) == (2, ""), (arguments, err)
        assert files() == before, arguments
        assert err.startswith("kapsi: ")
        assert err.endswith("\n")
        assert err.count("\n") == 1, err
        assert "Traceback" not in err
        return err

    return run


FIT = ("fit", "t.csv", "--target", "y")


# ------------------------------------------------------------------------------------------------ fit


@pytest.mark.parametrize("k", [None, 3])
def test_fit_prints_scores_beside_the_baselines_and_a_line_for_machines(good, k):
    out = good(*FIT, *QUICK, *(("--folds", k) if k else ()))
    lines = out.splitlines()
    number = r"-?\d+\.\d{4}" + (r" ± \d+\.\d{4}" if k else "")
    assert re.fullmatch(r"\s+accuracy\s+log loss", lines[0])
    assert [re.split(r"\s{2,}", line)[0] for line in lines[1:4]] == [
        "kapsi",
        "most frequent class",
        "logistic regression",
    ]
    assert all(re.search(rf"  {number}\s+{number}$", line) for line in lines[1:4])
    assert lines[4] == f"run folder: runs/t ({lines[4].split('(')[1].split()[0]} parameters, 40 rows)"
    assert re.fullmatch(rf"accuracy: {number} \({'3 folds' if k else '8 validation rows'}\)", lines[5])
    assert len(lines) == 6
    assert lines[5].split()[1] == lines[1].split()[1]
    scores = json.loads(Path("runs/t/run.json").read_text())["scores"]["kapsi"]
    assert f"{scores['accuracy']:.4f}" == lines[5].split()[1]
    assert not k or f"{scores['accuracy std']:.4f}" == lines[5].split()[3]


def test_a_regression_is_scored_by_r2(good):
    lines = good("fit", "n.csv", "--target", "y", "--output", "run").splitlines()
    assert re.fullmatch(r"head\s+R²\s+loss\s+seconds\s+weight", lines[1])
    lines = lines[lines.index("") + 1 :]
    assert re.fullmatch(r"\s+R²\s+RMSE", lines[0])
    assert [line.split()[0] for line in lines[1:4]] == ["kapsi", "mean", "ridge"]
    assert lines[4].startswith("run folder: run (")
    assert re.fullmatch(r"r2: (1\.0000|0\.99\d\d) \(8 validation rows\)", lines[5])


def test_a_score_far_out_stays_short(good):
    x = normal(40)
    write("far.csv", a=x, y=np.where(np.arange(40) == 7, 1.7e308, x))
    out = good("fit", "far.csv", "--target", "y", "--folds", "4", *QUICK)
    assert re.fullmatch(r"r2: -\d\.\d+e\+\d+ ± \d\.\d+e\+\d+ \(4 folds\)", out.splitlines()[-1])
    assert max(map(len, out.splitlines())) < 100


@pytest.mark.parametrize(
    ("target", "options", "task"),
    [
        (["no", "yes"] * 20, (), "accuracy"),
        ([True, False] * 20, (), "accuracy"),
        ([3, 7] * 20, (), "accuracy"),
        (list(range(20)) * 2, (), "accuracy"),
        ([*range(21), *range(19)], (), "r2"),
        ([0.5, 1.5] * 20, (), "r2"),
        ([1.0, 2.0] * 20, ("--task", "classification"), "accuracy"),
        ([1, 2] * 20, ("--task", "regression"), "r2"),
    ],
)
def test_the_task(good, target, options, task):
    write("c.csv", a=normal(40), y=target)
    assert good("fit", "c.csv", "--target", "y", *options, *QUICK).splitlines()[-1].startswith(f"{task}: ")


def test_rows_without_target_and_useless_columns_are_noted(kapsi):
    x = normal(40)
    write("h.csv", a=x, id=[f"row {i}" for i in range(40)], one=[1] * 40, y=[None, *["p", "q"] * 19, "p"])
    code, _, err = kapsi("fit", "h.csv", "--target", "y", *QUICK, "--folds", "2")
    assert code == 0
    notes = [note for note in err.splitlines() if "than the model on the held-out rows" not in note]
    assert len(notes) == 3
    assert "dropped 1 of 40 rows without a target 'y'" in notes[0]
    assert any("ID-like column 'id'" in note for note in notes)
    assert any("'one': it is 1" in note for note in notes)
    assert [int(row["row"]) for row in rows_of("runs/h/predictions.csv")] == list(range(2, 41))
    stored = json.loads(Path("runs/h/run.json").read_text())["notes"]
    assert stored == [note.removeprefix("note: ") for note in err.splitlines()]
    again = kapsi("fit", "h.csv", "--target", "y", "--drop", "id", "--drop", "one", *QUICK)[2].splitlines()
    assert [note for note in again if "than the model on the held-out rows" not in note] == [
        notes[0],
        "note: runs/h is an earlier run; this run is runs/h-2",
    ]


def test_the_same_command_says_and_writes_the_same(good):
    for seed in (5, 5, 6):
        good(*FIT, "--seed", seed, "--folds", 2, *QUICK)
    names = ("model.safetensors", "predictions.csv", "preprocessing.json", "metrics.jsonl")
    for name in names:
        assert Path("runs/t", name).read_bytes() == Path("runs/t-2", name).read_bytes()
    assert Path("runs/t/model.safetensors").read_bytes() != Path("runs/t-3/model.safetensors").read_bytes()
    assert Path("runs/t/predictions.csv").read_bytes() != Path("runs/t-3/predictions.csv").read_bytes()
    said = [good(*FIT, "--output", "x", "--overwrite", "--seed", "5", *QUICK) for _ in range(2)]
    assert said[0] == said[1]


def test_the_configuration_of_a_run_is_a_specification(good):
    edits = ("--set", "layers.0.heads.0.expansion.degree=3", "--seed", "4")
    good(*FIT, *QUICK, *edits, "--folds", 3, "--output", "a")
    good(*FIT, "--spec", "a/config.yaml", "--folds", 3, "--output", "b")
    for name in ("model.safetensors", "predictions.csv", "config.yaml"):
        assert Path("a", name).read_bytes() == Path("b", name).read_bytes()
    assert yaml.safe_load(Path("b/config.yaml").read_text())["training"]["seed"] == 4
    good(*FIT, "--spec", "a/config.yaml", "--folds", 3, "--output", "c", "--seed", 5, "--set", "training.epochs=2")
    training = yaml.safe_load(Path("c/config.yaml").read_text())["training"]
    assert (training["seed"], training["epochs"], training["l2"]) == (5, 2, 0.01)


SPEC = {
    "widths": [None, 5, None],
    "layers": [
        {
            "heads": [
                {
                    "expansion": {"kind": "b_spline", "intervals": 4},
                    "remainder": {"kind": "linear", "before": "silu"},
                    "bias": True,
                },
                {"expansion": "taylor", "reconciliation": "lorr"},
            ],
            "output": ["tanh"],
        },
        {"heads": [{"bias": True}]},
    ],
}


@pytest.mark.parametrize("suffix", ["yaml", "json"])
@pytest.mark.parametrize("table", ["t.csv", "n.csv"])
def test_specification_files(good, table, suffix):
    text = json.dumps(SPEC) if suffix == "json" else yaml.safe_dump(SPEC)
    Path(f"spec.{suffix}").write_text(text)
    edits = ("--set", "layers.0.heads.0.expansion.intervals=6", "--set", "layers.0.heads.1.reconciliation.rank=3")
    good("fit", table, "--target", "y", "--spec", f"spec.{suffix}", *edits, *QUICK, "--output", "run")
    model = yaml.safe_load(Path("run/config.yaml").read_text())["model"]
    assert model["widths"] == [None, 5, None]
    first, second = model["layers"][0]["heads"]
    assert first["expansion"]["intervals"] == 6
    assert second["reconciliation"] == {"kind": "low_rank", "rank": 3}
    shown = good("info", "run")
    assert shown.count("layers.0.heads.1") == 2
    assert re.search(r"scores of kapsi +(accuracy|r2) -?\d\.\d{4}, (log loss|rmse) \d\.\d{4}\n", shown)


def test_a_run_is_replaced_only_when_asked(good, bad):
    good(*FIT, *QUICK, "--output", "run")
    Path("run/notes.txt").write_text("mine")
    before = Path("run/run.json").read_bytes()
    assert "a run is already there; give --overwrite" in bad(*FIT, *QUICK, "--output", "run")
    good(*FIT, *QUICK, "--output", "run", "--overwrite", "--seed", "3")
    assert Path("run/run.json").read_bytes() != before
    assert Path("run/notes.txt").read_text() == "mine"
    assert sorted(p.name for p in Path().iterdir()) == ["n.csv", "run", "t.csv"]


def test_a_link_to_a_folder_is_followed(good):
    Path("real").mkdir()
    os.symlink("real", "link")
    good(*FIT, *QUICK, "--output", "link")
    assert os.readlink("link") == "real"
    assert Path("real/run.json").is_file()


def test_progress_is_shown_on_a_terminal_only(kapsi, monkeypatch):
    assert kapsi(*FIT, *QUICK, "--folds", "2")[2] == ""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    code, out, err = kapsi(*FIT, *QUICK, "--folds", "2")
    assert code == 0
    assert re.search(r"all rows .*epoch \d+, loss \d", err)  # what the bar says at last
    assert out.splitlines()[-1].startswith("accuracy: ")


# ------------------------------------------------------------------------------------------------ bad tables


def text(name, content):
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return name


SMALL = "".join(f"{i},{i * i % 7},{i % 2}\n" for i in range(1, 13))


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("", (), "the file is empty"),
        ("\n\n", (), "the file is empty"),
        ("a,b,y\n", (), "a header but no rows"),
        ("a,b,y\n1,2\n", (), "line 2 has 2 values, the header has 3"),
        ("a,a,y\n1,2,3\n", (), "column 'a': 2 columns have the same name"),
        ("a,b,z\n" + SMALL, (), "the target 'y' is not a column"),
        ("a,b,Y\n" + SMALL, (), "(nearest: 'Y')"),
        ("a,b,y\n" + SMALL.replace(",0\n", ",1\n"), (), "the one class 1; at least 2 are needed"),
        ("a,b,y\n" + SMALL, ("--task", "regression", "--drop", "a", "--drop", "b"), "no feature column is left"),
        (
            "a,b,y\n" + "".join(f"{i},,{i % 2}\n" for i in range(9)),
            ("--categorical", "b"),
            "the column 'b' has no value in any used row; leave its option out",
        ),
        ("a,b,y\n" + "".join(f"{i},,{i % 2}\n" for i in range(9)), ("--weight", "b"), "the weight 'b' is nan in row 1"),
        ("a,b,y\n" + "".join(f"{i},,{i % 2}\n" for i in range(9)), ("--group", "b"), "the group 'b' has no values"),
        ("b,y\n" + "".join(f",{i % 2}\n" for i in range(9)), (), "no feature column is left (dropped the column 'b'"),
        ("a,b,y\n" + SMALL + "inf,1,1\n", (), "column 'a' has inf in row 13; only finite numbers are allowed"),
        ("a,b,y\n" + SMALL + "1,2,-inf\n", (), "column 'y' has -inf in row 13"),
        ("a,b,y\n" + SMALL + "1,2,\n", ("--strict",), "the target 'y' is missing in 1 of 13 rows, first in row 13"),
        ("a,b,y\n" + "1,2,\n" * 9, (), "the target 'y' is missing in every row"),
        ("a,b,y\n" + SMALL, ("--folds", "13"), "13 folds of 12 rows"),
        ("a,b,y\n" + SMALL, ("--folds", "7", "--task", "regression"), "7 folds of 12 rows"),
        ("a,b,y\n1,2,0\n2,3,1\n4,4,1\n", (), "3 rows with a target; at least 4 are needed"),
        ("k,y\n" + "".join(f"id{i},{i % 2}\n" for i in range(9)), (), "dropped the ID-like column 'k'"),
        (
            "a,y\n" + "".join(f"{i},c{i}\n" for i in range(9)),
            (),
            "has 9 classes in 9 rows, and 9 of them have a single row",
        ),
        ("a,y\n" + "".join(f"{i},c{i % 3}\n" for i in range(9)), ("--task", "regression"), "is text"),
        (
            "a,y\n" + "".join(f"{i},{i}.5\n" for i in range(9)),
            ("--task", "classification"),
            "which is not a class label",
        ),
        ("a,b,y\n" + SMALL, ("--drop", "y"), "both the target and to be dropped"),
        ("a,b,y\n" + SMALL, ("--drop", "bb"), "is not a column (nearest: 'b')"),
    ],
)
def test_tables_that_cannot_be_fitted(bad, content, options, message):
    text("x.csv", content)
    assert message in bad("fit", "x.csv", "--target", "y", "--output", "deep/er/run", *options)


def test_files_that_are_no_tables(bad):
    Path("folder.csv").mkdir()
    os.symlink("loop.csv", "loop.csv")
    text("p.parquet", "a,y\n1,2\n")
    text("t.xlsx", "x")
    for name, message in {
        "no.csv": "there is no such file",
        "folder.csv": "this is a folder",
        "loop.csv": "cannot be read",
        "p.parquet": "not readable as Parquet",
        "t.xlsx": "the suffix '.xlsx' is not known",
        "nul\0.csv": "cannot be read",
    }.items():
        assert message in bad("fit", name, "--target", "y")


def test_a_failure_in_the_midst_leaves_nothing(bad):
    astray = (
        "training.solver=adamw",
        "training.solver.learning_rate=1e6",
        "training.epochs=60",
        "widths=[null,8,null]",
    )
    edits = [part for edit in astray for part in ("--set", edit)]
    line = bad("fit", "n.csv", "--target", "y", *edits, "--output", "deep/er/run")
    assert re.search(r"training stopped in epoch \d+: step \d+: .* not finite .*lower learning_rate", line)


# ------------------------------------------------------------------------------------------------ bad options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fit",), "Missing argument 'TABLE' (see kapsi fit --help"),
        (("fit", "t.csv"), "Missing option '--target', the column to predict"),
        (("fit", "nope.csv"), "nope.csv: there is no such file; check the path"),
        (("fit", "t.csv", "--target"), "'--target' requires an argument"),
        (("fit", "t.csv", "n.csv", "--target", "y"), "unexpected extra argument"),
        ((*FIT, "--fold", "3"), "there is no option --fold; did you mean --folds? there are --target, --task"),
        ((*FIT, "--Folds=3"), "did you mean --folds?"),
        (("fit", "t.csv", "-target", "y"), "there is no option -target; did you mean --target?"),
        ((*FIT, "-o", "run"), "did you mean --output?"),
        ((*FIT, "--task", "clasification"), "did you mean classification?"),
        ((*FIT, "--task", "x"), "is not one of 'auto', 'classification', 'regression'"),
        ((*FIT, "--folds", "x"), "Invalid value for '--folds'"),
        ((*FIT, "--folds", "2.5"), "Invalid value for '--folds'"),
        ((*FIT, "--folds", "1"), "must be at least 2"),
        ((*FIT, "--folds", "-3"), "must be at least 2"),
        ((*FIT, "--folds", "9" * 5000), "Invalid value for '--folds'"),
        ((*FIT, "--seed", "-1"), "--seed -1: must be at least 0"),
        ((*FIT, "--seed", str(2**32)), "must be at most 4294967295"),
        ((*FIT, "--strict=yes"), "does not take a value"),
        (("fitt", "t.csv"), "there is no command 'fitt'; did you mean fit? there are data, demo, evaluate"),
        (("pred",), "did you mean predict?"),
        (("",), "there is no command ''"),
        (("line\nbreak",), "there is no command"),
        (("--versoin",), "did you mean --version?"),
        (("info",), "Missing argument 'RUN|SPEC'"),
        (("info", "t.csv", "--batch", "0"), "greater than or equal to 1"),
        (("predict", "a", "b"), "Missing option '--output'"),
        (("evaluate", "a"), "Missing argument 'TABLE'"),
        (("functions", "expansions"), "did you mean expansion?"),
        (("functions", "tailor"), "no function is called 'tailor'; did you mean 'taylor'"),
        (("functions", "expansion", "tailor"), "no function is called 'tailor'; did you mean 'taylor'"),
        (("functions", "remainder", "taylor"), "no function is called 'taylor'; there are"),
        (("functions", "expansions", "taylor"), "there is no role 'expansions'; did you mean 'expansion'?"),
        (("functions", "expansion", "taylor", "more"), "unexpected extra argument 'more'"),
        (
            ("functions", "identity", "--picture", "p.svg"),
            "write kapsi functions expansion identity or kapsi functions",
        ),
        (("functions", "expansion", "--picture", "p.svg"), "--set and --picture need the name of one function"),
        (("functions", "--set", "degree=3"), "--set and --picture need the name of one function"),
        (("functions", "taylor", "--set", "degree"), "--set degree: expected path=value, such as degree=2"),
        (("functions", "taylor", "--set", "degre=3"), "Taylor has no option 'degre'; did you mean 'degree'?"),
        (("functions", "taylor", "--set", "degree=x"), "taylor.degree: expected an integer, got 'x'"),
        (("functions", "taylor", "--set", "degree=65"), "degree must be at most 64"),
        (("functions", "taylor", "--picture", "p.jpg"), "'p.jpg': a picture is an .svg, .png or .pdf file"),
        (("functions", "taylor", "--picture", "no/p.svg"), "there is no folder 'no'; make it"),
        (("functions", "taylor", "--picture", "."), "'.': a picture is an"),
        (("demo", "more"), "unexpected extra argument"),
        (("demo", "--outptu", "x"), "did you mean --output?"),
    ],
)
def test_usage_errors_are_one_line_with_the_nearest_word(bad, arguments, message):
    assert message in bad(*arguments)


DEGREE = "layers.0.heads.0.expansion.degree"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("x=1", "no option begins with 'x'; paths begin with layers, widths, training, table or recipe"),
        ("layer.0=1", "did you mean layers?"),
        ("table.folds=1", "must be at least 2"),
        ("layers", "expected path=value"),
        ("=1", "expected path=value"),
        (f"{DEGREE[:-1]}=3", "layers[0].heads[0].expansion: Taylor has no option 'degre'; did you mean 'degree'?"),
        (f"{DEGREE}=x", "layers[0].heads[0].expansion.degree: expected an integer, got 'x'"),
        (f"{DEGREE}=2.5", "expected an integer, got 2.5"),
        (f"{DEGREE}=", "expected an integer, got None"),
        (f"{DEGREE}=0", "degree must be at least 1"),
        (f"{DEGREE}={'9' * 5000}", "not YAML"),
        ("layers.1.heads.0.bias=true", "is a list of 1, expected a number from 0 to 0, got '1'"),
        (f"layers.{'9' * 5000}.heads=1", "is a list of 1"),
        ("layers.²=1", "is a list of 1"),
        ("layers.0.heads.0.before.0=silu", "is an empty list; set the whole list"),
        ("layers..0=1", "expected names and numbers with dots between"),
        ("layers.0.heads.0.bias.x=1", "has no 'x'"),
        ("layers.0.heads.0.bias=1", "expected true or false, got 1"),
        ("layers.0.heads.0.expansion=tailor", "no expansion is called 'tailor'; did you mean 'taylor'? choose from"),
        ("layers.0.heads.0.expansion.kind=low_rank", "no expansion is called 'low_rank'"),
        ("layers.0.heads.0.expansion=[taylor]", "expected an expansion, got"),
        ("layers=[]", "need 1 layers"),
        ("widths=[3]", "at least two widths are needed"),
        ("widths=[9,null]", "the model has 9 inputs and the data"),
        ("widths=[null,null,null]", "only the first and the last width may be null"),
        ("widths=[null,1000000000000,null]", "at most 68,719,476,736"),
        ("model=3", "expected a mapping of ModelSpec"),
        ("training=3", "expected a mapping of TrainConfig"),
        ("training.epoch=3", "TrainConfig has no option 'epoch'; did you mean 'epochs'?"),
        ("training.epochs=0", "training.epochs=0: must be at least 1"),
        ("training.solver=adam", "no solver is called 'adam'; did you mean 'adamw'?"),
        ("training.l2=.nan", "expected a finite number"),
        ("training.l2.x=1", "expected a number"),
        ("training.solver.batch_size=999999999999999999999", "must be at most 1099511627776"),
        ("training.loss=mse", "training.loss: mse does not fit classification, which needs class probabilities"),
        ("training.learning_rate=0.1", "learning_rate is an option of the solvers adamw and sgd"),
        ("training.validation=0.3", "it is table.validation_fraction now"),
        ("training.epochs=&a 3", "anchors"),
        ("training.epochs=!!python/object:os.system 3", "tags (!name) are not allowed"),
        ("training.epochs=[1,", "not YAML"),
        ("training.epochs=\0", "not YAML"),
    ],
)
def test_bad_settings_name_the_path_and_the_choices(bad, setting, message):
    assert message in bad(*FIT, "--set", setting)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "spec.yaml: is empty, expected a specification, such as the config.yaml of a run"),
        ("# widths: [1, 1]\n", "spec.yaml: is empty, expected a specification"),
        ("a,b\n1,2\n", "expected a mapping of ModelSpec"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        ("widths: [null, null]\nlayers: [{heads: [{expansion: tailor}]}]", "no expansion is called 'tailor'"),
        ("widths: [null, null]\nlayer: []", "ModelSpec has no option 'layer'; did you mean 'layers'?"),
        ("widths: [null, null]\nwidths: [1, 2]", "'widths' appears twice"),
        ("layers: []", "ModelSpec needs 'widths'"),
        ("[" * 3000, "nested too deeply"),
        ("widths: &w [null, null]", "anchors"),
        ("model: {widths: [null, null]}\ntrainin: {}", "there is no 'trainin' in a configuration"),
        ("model: {widths: [null, null]}\ntraining: {epochs: x}", "training.epochs: expected an integer"),
        ("{", "not YAML"),
    ],
)
def test_bad_specification_files(bad, content, message):
    text("spec.yaml", content)
    assert message in bad(*FIT, "--spec", "spec.yaml")
    if "trainin" not in str(content):
        assert message in bad("info", "spec.yaml")


def test_specifications_that_are_no_files(bad):
    for name, message in {".": "is a folder", "no.yaml": "no such specification", "nul\0": "cannot be read"}.items():
        assert message in bad(*FIT, "--spec", name)


def test_places_where_no_run_can_be(bad):
    Path("folder").mkdir()
    text("folder/precious.txt", "mine")
    os.symlink("loop", "loop")
    os.symlink("t.csv", "link")
    for where, message in {
        "t.csv": "is not a folder, never replaced",
        "link": "is not a folder, never replaced",
        "folder": "a folder without a kapsi run, never replaced",
        "t.csv/run": "is not a folder",
        ".": "is the current folder",
        "": "expected the name of a run folder",
        "..": "is the current folder or one above",
        "/": "is the current folder or one above",
        "loop": "is not a folder",
        "nul\0": "is not a usable path",
        "/proc/no/run": "cannot begin the run",
    }.items():
        for options in ((), ("--overwrite",)):
            assert message in bad(*FIT, "--output", where, *options)


# ------------------------------------------------------------------------------------------------ predict and evaluate


@pytest.fixture
def run(good):
    good(*FIT, *QUICK, "--output", "run")
    return "run"


def test_predict_writes_labels_with_their_names_and_probabilities(good, kapsi, run):
    code, out, err = kapsi("predict", run, "t.csv", "--output", "o.csv")
    assert (code, out) == (0, "predictions: o.csv (40 rows)\n")
    assert err == "note: ignored columns that the model does not use: 'y'\n"
    rows = rows_of("o.csv")
    assert list(rows[0]) == ["prediction", "probability_no", "probability_yes"]
    for row in rows:
        chances = {name: float(row[f"probability_{name}"]) for name in ("no", "yes")}
        assert sum(chances.values()) == pytest.approx(1)
        assert row["prediction"] == max(chances, key=chances.get)
    kept = {int(row["row"]): row["probability_yes"] for row in rows_of("run/predictions.csv")}
    assert {i: rows[i - 1]["probability_yes"] for i in kept} == kept
    good("predict", run, "t.csv", "--output", "o.parquet")
    parquet = pq.read_table("o.parquet").to_pylist()
    assert [row["probability_yes"] for row in parquet] == [float(row["probability_yes"]) for row in rows]


def test_predict_takes_columns_in_any_order_and_ignores_others(good, kapsi, run):
    rows = rows_of("t.csv")
    write("r.csv", more=range(40), **{name: [row[name] or None for row in rows] for name in ("k", "b", "a")})
    good("predict", run, "t.csv", "--output", "o.csv")
    assert kapsi("predict", run, "r.csv", "--output", "p.csv")[2] == (
        "note: ignored columns that the model does not use: 'more'\n"
    )
    assert Path("o.csv").read_bytes() == Path("p.csv").read_bytes()


def test_an_unseen_category_is_no_known_one(good, run):
    write("u.csv", a=[0.5, 0.5, 0.5], b=[1, 1, 1], k=["never", None, "u"])
    good("predict", run, "u.csv", "--output", "o.csv")
    never, missing, known = rows_of("o.csv")
    # Both have no indicator of a category; missing values have one of their own, as some training rows are without a category.
    assert never != known
    assert missing != known


@pytest.mark.parametrize(
    ("labels", "spelled"),
    [
        (["a,b", 'q"u', "new\nline", "ünï", " s "] * 8, ["a,b", 'q"u', "new\nline", "ünï", "s"]),
        ([True, False] * 20, ["true", "false"]),
        ([-3, 12] * 20, ["-3", "12"]),
    ],
)
def test_labels_and_column_names_with_any_characters(good, labels, spelled):
    x = normal(40, 2)
    names = {"a\nb": x[:, 0], 'q"': labels[::-1], "ü ,;": x[:, 1], "": [*"uvwz"] * 10, "y\t'": labels}
    write("c.csv", **names)
    good("fit", "c.csv", "--target", "y\t'", *QUICK, "--output", "run")
    good("predict", "run", "c.csv", "--output", "o.csv")
    found = rows_of("o.csv")
    wanted = set(spelled or labels)
    assert {row["prediction"] for row in found} <= wanted
    assert {name.removeprefix("probability_") for name in found[0] if name.startswith("probability_")} == wanted
    assert "y\\t" in good("info", "run")
    assert good("evaluate", "run", "c.csv").splitlines()[-1].startswith("accuracy: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n", "missing columns: 'k'"),
        ("A,b\n1,2\n", "missing columns: 'a' (nearest: 'A'), 'k'"),
        ("a,b,k\nx,1,u\n", "column 'a': 0 of 1 values are numbers; not: 'x' (row 1)"),
        ("a,b,k\n1,2,u\ninf,1,u\n", "column 'a' has inf in row 2"),
        ("a,b,k\n", "a header but no rows"),
        ("", "the file is empty"),
        ("a,b,k,k\n1,2,u,u\n", "2 columns have the same name"),
        ("a,b,k\n1,2,u,v\n", "line 2 has 4 values"),
    ],
)
def test_tables_that_cannot_be_predicted(bad, run, content, message):
    text("x.csv", content)
    assert message in bad("predict", run, "x.csv", "--output", "o.csv")


def test_evaluate_wants_all_columns_too(bad, run):
    assert "missing columns: 'k'" in bad("evaluate", run, text("x.csv", "a,b,y\n1,2,no\n"))


def test_places_where_no_predictions_can_be(bad, run):
    Path("folder.csv").mkdir()
    os.symlink("loop.csv", "loop.csv")
    os.symlink("t.csv", "link.csv")
    for where, message in {
        "no/o.csv": "the folder 'no' does not exist",
        "o.xlsx": "the suffix '.xlsx' is not known",
        "o": "the suffix '' is not known",
        "": "expected the name of a file, got ''",
        "folder.csv": "expected the name of a file, got 'folder.csv' (a folder)",
        "loop.csv": "loop.csv: exists already; give another --output, or --overwrite",
        "n.csv": "n.csv: exists already; give another --output, or --overwrite",
        "t.csv": "is an input of this command",
        "./link.csv": "is an input of this command",
        f"{run}/predictions.csv": "is a file of the run itself",
        f"{run}/../run/predictions.csv": "is a file of the run itself",
        "/proc/o.csv": "'/proc/o.csv': cannot write the file",
    }.items():
        assert message in bad("predict", run, "t.csv", "--output", where)
    assert "is not a writable regular file" in bad("predict", run, "t.csv", "--output", "loop.csv", "--overwrite")
    assert "is an input of this command" in bad("predict", run, "t.csv", "--output", "t.csv", "--overwrite")


def test_evaluate_scores_all_rows_with_a_target(good, kapsi, run):
    good("predict", run, "t.csv", "--output", "o.csv")
    rows, predicted = rows_of("t.csv"), rows_of("o.csv")
    share = np.mean([row["y"] == found["prediction"] for row, found in zip(rows, predicted, strict=True)])
    lines = good("evaluate", run, "t.csv").splitlines()
    assert lines[-1] == f"accuracy: {share:.4f} (40 rows)"
    assert lines[1].split() == ["kapsi", f"{share:.4f}", lines[1].split()[2]]
    write("h.csv", a=[0.1, 2.0], b=[1, 1], k=["u", "u"], y=["yes", None])
    code, out, err = kapsi("evaluate", run, "h.csv")
    assert (code, out.splitlines()[-1].endswith("(1 row)")) == (0, True)
    assert "ignored 1 of 2 rows" in err


def test_tables_that_cannot_be_evaluated(bad, run):
    assert "the target 'y' is not a column" in bad("evaluate", run, text("x.csv", "a,b,k\n1,2,u\n"))
    line = bad("evaluate", run, text("x.csv", "a,b,k,y\n1,2,u,maybe\n"))
    assert "has the label 'maybe', which the model does not know; the known labels are 'no', 'yes'" in line
    assert "missing in every row" in bad("evaluate", run, text("x.csv", "a,b,k,y\n1,2,u,\n"))


def test_float32_parquet_goes_all_the_way(good):
    x = normal(40, 2).astype("float32")
    pq.write_table(pa.table({"a": x[:, 0], "b": x[:, 1], "y": 2 * x[:, 0]}), "f.parquet")
    good("fit", "f.parquet", "--target", "y", "--output", "run")
    good("predict", "run", "f.parquet", "--output", "o.parquet")
    found = pq.read_table("o.parquet").column("prediction").to_numpy()
    np.testing.assert_allclose(found, 2 * x[:, 0], atol=0.02)


# ------------------------------------------------------------------------------------------------ damaged runs


def spoil(path, how):
    data = path.read_bytes()
    if how == "deleted":
        path.unlink()
    else:
        path.write_bytes({"cut": data[: len(data) // 3], "empty": b"", "garbled": bytes(b ^ 0x55 for b in data)}[how])


@pytest.mark.parametrize(
    "how", ["deleted", "cut", *(pytest.param(h, marks=pytest.mark.slow) for h in ("empty", "garbled"))]
)
def test_a_damaged_run_is_refused_by_all_verbs(bad, run, how):
    for name in sorted(p.name for p in Path(run).iterdir()):
        for resealed in (False, True):
            shutil.rmtree("x", ignore_errors=True)
            shutil.copytree(run, "x")
            spoil(Path("x", name), how)
            if resealed:
                if how == "deleted" or name in ("run.json", "metrics.jsonl", "predictions.csv", "rows.parquet"):
                    continue
                manifest = json.loads(Path("x/run.json").read_text())
                data = Path("x", name).read_bytes()
                manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                Path("x/run.json").write_text(json.dumps(manifest))
            wanted = "is not a run folder" if (name, how) == ("run.json", "deleted") else "damaged run"
            for arguments in (
                ("info", "x"),
                ("predict", "x", "t.csv", "--output", "o.csv"),
                ("evaluate", "x", "t.csv"),
            ):
                assert wanted in bad(*arguments)


def test_runs_that_are_newer_or_none(bad, run):
    manifest = json.loads(Path("run/run.json").read_text())
    Path("run/run.json").write_text(json.dumps({**manifest, "format_version": 3}))
    Path("folder").mkdir()
    for where, message in {
        "run": "format version 3, this kapsi reads up to 2; upgrade kapsi",
        "folder": "is not a run folder",
        "no": "no such run folder",
        "t.csv/run": "no such run folder",
        "nul\0": "is not a usable path",
    }.items():
        assert message in bad("info", where)
        assert message in bad("predict", where, "t.csv", "--output", "o.csv")
        assert message in bad("evaluate", where, "t.csv")


def test_a_manifest_with_other_things_in_it_is_shown(good, run):
    manifest = json.loads(Path("run/run.json").read_text())
    odd = {"scores": {"a": 3}, "versions": 3, "table": {"x": [1]}, "about": 5, "inputs": None, "created": "a\nb"}
    Path("run/run.json").write_text(json.dumps({**manifest, **odd}))
    assert good("info", run).startswith("task ")


# ------------------------------------------------------------------------------------------------ info, functions, demo


def test_info_of_a_run_a_model_and_a_specification(good, run):
    out = good("info", run)
    assert re.search(r"^task +classification of 'y', 2 classes: no, yes$", out, re.MULTILINE)
    assert re.search(r"^inputs +a, b, k = u, k = v, k = w, k is missing$", out, re.MULTILINE)
    assert re.search(r"^versions .*kapsi " + re.escape(__version__), out, re.MULTILINE)
    row = r"layers\.0\.heads\.0 +6 +27 +2 +(\d+) +([\d.]+) k +([\d.]+) kB +64 × [\d ×]+ +dense"
    parameters, operations, memory = re.search(row, out).groups()
    assert f"{parameters} parameters, {parameters} trained" in out
    assert "A forward pass of 64 rows: operations, new memory, and the largest tensor\n" in out
    ten = re.search(row.replace("64 ×", "640 ×"), good("info", run, "--batch", "640"))
    assert 5 * float(operations) < float(ten[2]) <= 10.1 * float(operations)
    assert 5 * float(memory) < float(ten[3]) <= 10.1 * float(memory)
    assert re.search(row, good("info", f"{run}/model.safetensors"))[1] == parameters
    sized = good("info", f"{run}/config.yaml", "--set", "widths.0=6", "--set", "widths.1=2")
    assert re.search(row, sized)[1] == parameters


def test_info_warns_of_a_grid_that_multiplies_the_work(good) -> None:
    kp.save_spec(kp.rpn([30, 4], kp.Taylor(2), kp.Kronecker(columns=30)), "grid.yaml")
    assert re.search(
        r"^warning: layers\.0\.heads\.0: kronecker\(columns=30\): columns=31, the grid 31 × 30 of κ, would need [\d.]+ times",
        good("info", "grid.yaml"),
        re.M,
    )


def test_info_needs_all_widths(good, bad):
    Path("s.yaml").write_text("widths: [null, 8, null]")
    assert "give --set widths.0=N (inputs) and --set widths.2=N (outputs)" in bad("info", "s.yaml")
    assert bad("info", "s.yaml", "--set", "widths.0=4").endswith("give --set widths.2=N (outputs)\n")
    assert "56 parameters" in good("info", "s.yaml", "--set", "widths.0=4", "--set", "widths.2=3")


def test_info_of_a_huge_model_computes_nothing_and_has_an_end(good, bad):
    Path("s.yaml").write_text("widths: [30000, 1000]\nlayers: [{heads: [{expansion: taylor, reconciliation: hm}]}]")
    assert "mixed product" in good("info", "s.yaml", "--batch", "1000000")
    Path("s.yaml").write_text("widths: [100000000, 1]")
    assert "use fewer" in bad("info", "s.yaml", "--batch", 2**40)


def test_info_sets_options_of_specifications_only(bad, run):
    assert "sets options of a specification" in bad("info", run, "--set", "layers.0.heads.0.bias=true")
    assert "sets options of a specification" in bad("info", f"{run}/model.safetensors", "--set", "widths.0=3")
    assert "not a safetensors file" in bad("info", text("m.safetensors", "x"))


def test_functions_lists_the_catalogue(good):
    from kapsi.function import ALIASES, ROLES

    out = good("functions")
    for role in ROLES:
        part = good("functions", role)
        assert part in out
        for name in ROLES[role]:
            assert re.search(rf"^  {name}\b", part, re.MULTILINE)
        assert all(alias in part for alias in ALIASES[role])
    assert re.search(r"^  taylor +All monomials.*\n +degree=2 \[1\.\.\d+\], symmetric=false$", out, re.MULTILINE)


@pytest.mark.parametrize(("columns", "width"), [("10", 60), ("80", 80), ("120", 120), ("500", 120)])
def test_functions_keeps_to_the_width_of_the_terminal(good, monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    out = good("functions").splitlines()
    assert width - 25 < max(map(len, out)) <= width
    spline = good("functions", "b_spline").split("\nin a specification\n")
    assert max(len(line) for line in spline[0].splitlines()) <= max(width, 80)
    assert max(len(line) for line in spline[1].splitlines()[6:]) <= width


def test_functions_shows_one_function_with_its_picture(good):
    out = good("functions", "chebyshev")
    assert re.search(r"^chebyshev\b.*, an expansion\nChebyshev polynomials of the first kind\n", out)
    assert "formula  κ(x) = [T₁(x), …, T_d(x)], T_k = 2x T_{k−1} − T_{k−2}, D = m·d\n" in out
    assert "size     D = m·d; 12 for m = 4\ndomain   [-1, 1]\n" in out
    assert re.search(r"^  degree +3 +1\.\.1000 +d, the highest degree", out, re.MULTILINE)
    assert "        - expansion: {kind: chebyshev, degree: 3}\n" in out
    assert "chebyshev: κ(x) of one input\n" in out
    # Braille letters above an axis on which the domain is marked.
    assert len(re.findall("[\u2801-\u28ff]", out)) > 100
    assert re.search(r"└─+\[─+\]─+\n +-1\.4 +x +1\.4\n +\[ \] the domain, -1 to 1\n$", out)
    assert good("functions", "expansion", "chebyshev") == out


def test_functions_shows_all_functions_of_a_name(good):
    out = good("functions", "identity")
    found = re.findall(r"^(\w+)(?: \(.*\))?, an? (\w+)$", out, re.MULTILINE)
    assert {("identity", "expansion"), ("dense", "reconciliation"), ("identity", "remainder")} <= set(found)
    assert (
        len(re.findall(", an? (?:expansion|remainder)$", good("functions", "remainder", "identity"), re.MULTILINE)) == 1
    )


def test_functions_with_options_set(good):
    out = good("functions", "b_spline", "--set", "intervals=8", "--set", "degree=2", "--set", "high=3.0")
    assert "D = m·G; 40 for m = 4\n" in out
    assert "domain   [-1, 3]\n" in out
    assert "intervals: 8, degree: 2, low: -1.0, high: 3.0" in out
    out = good("functions", "nested", "--set", "parts=[chebyshev, identity]", "--set", "parts.0.degree=5")
    assert "D_k(… D₂(D₁)); 20 for m = 4\n" in out
    assert "no picture: plots: b_spline has" in good("functions", "b_spline", "--set", "intervals=100000")


# `test_plots` has each kind of file.
@pytest.mark.parametrize("suffix", ["svg", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("png", "pdf"))])
def test_functions_writes_a_picture(good, suffix):
    out = good("functions", "kronecker", "--picture", f"p.{suffix}")
    assert out.endswith(f"\npicture: p.{suffix}\n")
    assert Path(f"p.{suffix}").stat().st_size > 1000
    assert not [path for path in os.listdir() if path.startswith(".p.")]


def said_in(encoding, monkeypatch, *words):
    """Return what a command writes to an output of few letters."""
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        assert main(list(words)) == 0
    output.flush()
    return output.buffer.getvalue().decode(encoding)


# A picture of lines and one of shades, and two ways to write letters that are not there.
@pytest.mark.parametrize(
    ("name", "encoding"),
    [
        ("chebyshev", "latin-1"),
        ("low_rank", "cp1252"),
        pytest.param("chebyshev", "cp1252", marks=pytest.mark.slow),
        pytest.param("low_rank", "latin-1", marks=pytest.mark.slow),
    ],
)
def test_pictures_where_the_output_has_no_such_letters(name, encoding, monkeypatch):
    picture = said_in(encoding, monkeypatch, "functions", name).split("\nin a specification\n")[1]
    assert ("***" if name == "chebyshev" else "##") in picture
    # Only words are written by number, no letter of the picture itself.
    assert set(re.findall(r"\\u[0-9a-f]{4}", picture)) <= {r"\u03ba", r"\u03c8"}


def test_demo(good, bad, monkeypatch):
    monkeypatch.setattr(selection, "PENALTIES", (0.001,))
    lines = good("demo").splitlines()
    assert re.fullmatch(r"accuracy: (1\.0000|0\.9[89]\d\d) ± 0\.0\d{3} \(5 folds\)", lines[-1])
    assert "run folder: runs/demo (" in lines[-2]
    assert len(rows_of("runs/demo/predictions.csv")) == 1372
    assert "a run is already there" in bad("demo", "--output", "runs/demo")


def test_version_and_help(good):
    assert good("--version") == f"kapsi {__version__}\n"
    assert all(verb in good() for verb in ("fit", "predict", "evaluate", "info", "functions", "demo"))
    assert "--overwrite" in good("fit", "--help")


def test_parity_shows_how_equal_the_models_are(good, kapsi, monkeypatch):
    lines = good("parity", "--only", "GaussianNB").splitlines()
    assert lines[0].split()[:3] == ["model", "quantity", "data"]
    assert re.fullmatch(r"parity: (\d+) of \1 within tolerance", lines[-1])
    from kapsi.zoo import naive_bayes

    strict = tuple(replace(case, tolerance=-1.0) for case in naive_bayes.PARITY)
    monkeypatch.setattr(naive_bayes, "PARITY", strict)
    code, out, err = kapsi("parity", "--only", "GaussianNB")
    assert (code, err) == (1, "")
    assert re.fullmatch(r"parity: 0 of [1-9]\d* within tolerance", out.splitlines()[-1])


def test_parity_of_nothing_is_refused(bad):
    assert "no matching case" in bad("parity", "--only", "nothing at all")


# ------------------------------------------------------------------------------------------------ the process around it


def listen():
    """Let a child be interrupted; where the tests run in the background of a shell, it would inherit not to be."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def started(*arguments, **options):
    command = [sys.executable, "-m", "kapsi", *arguments]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=-1, stderr=-1, **options)


def test_a_reader_that_leaves_is_no_error_to_see():
    with started("functions") as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


# `test_surroundings` closes the streams.
def test_an_output_on_a_full_disk():
    command = f"{sys.executable} -m kapsi functions"
    done = subprocess.run(f"{command} >/dev/full", shell=True, env=ENVIRONMENT, capture_output=True)
    assert (done.returncode, done.stderr) == (2, b"kapsi: standard output: No space left on device\n")


def test_letters_that_the_output_does_not_have(monkeypatch):
    assert r"expansions \u03ba" in said_in("latin-1", monkeypatch, "functions")


def test_a_file_name_that_is_no_text(good):
    name = os.fsdecode(b"t\xff.csv")
    os.rename("t.csv", name)
    good("fit", name, "--target", "y", *QUICK, "--output", "run")
    assert json.loads(Path("run/run.json").read_text())["table"] == "t?.csv"
    good("predict", "run", name, "--output", os.fsdecode(b"o\xff.csv"))


def test_an_interrupt_ends_the_fit_and_leaves_nothing():
    x = normal(2000, 8)
    write("big.csv", **{f"x{i}": x[:, i] for i in range(8)}, y=np.sin(x).sum(1))
    before = files()
    # Imports happen during the fit, and execute texts, which leaves a mark on a process that is interrupted there.
    process = started("fit", "big.csv", "--target", "y", "--folds", "10", "--output", "deep/er/run", preexec_fn=listen)
    deadline = time.monotonic() + 60
    while not Path("deep").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    out, err = process.communicate()
    assert (process.returncode, out) == (130, b"")
    assert err in (b"", b"note: fitting 2,000 rows of big.csv; progress is shown on a terminal only\n")
    assert time.monotonic() - began < 10
    assert files() == before


LONG = (
    "fit",
    "big.csv",
    "--target",
    "y",
    "--folds",
    "2",
    "--set",
    "training.solver=adamw",
    "--set",
    "training.epochs=12",
)


def big():
    x = normal(600, 4)
    write("big.csv", **{f"x{i}": x[:, i] for i in range(4)}, y=np.sin(x).sum(1))


# The run that is killed is another process than the one that goes on.
@pytest.mark.parametrize("signal_", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_killed_run_resumes_and_ends_as_if_nothing_had_been(signal_, kapsi):
    big()
    _, out, notes = kapsi(*LONG, "--output", "whole")
    process = started(*LONG, "--output", "run", "--checkpoint-steps", "2", preexec_fn=listen)
    deadline = time.monotonic() + 60
    while not Path("run.checkpoints/fold-2-of-2").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal_)
    process.communicate()
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGTERM: 143}[signal_]
    assert not Path("run").exists()
    again = ("--output", "run", "--checkpoint-steps", "2")
    code, _, err = kapsi(*LONG, *again)
    assert code == 2
    assert "has checkpoints of an interrupted run; give --resume to continue, or --overwrite" in err
    code, _, err = kapsi(*LONG, "--seed", "3", *again, "--resume")
    assert code == 2
    assert "is of another run: seed 3 (in the checkpoint 0)" in err
    table = Path("big.csv").read_bytes()
    Path("big.csv").write_bytes(table + b"1,2,3,4,5\n")
    code, _, err = kapsi(*LONG, *again, "--resume")
    assert code == 2
    assert "is of another run: the" in err
    Path("big.csv").write_bytes(table)
    code, found, err = kapsi(*LONG, *again, "--resume")
    assert (code, err) == (0, "".join(line + "\n" for line in notes.splitlines() if "progress" not in line))
    assert found.replace("run folder: run", "run folder: whole") == out
    for name in ("model.safetensors", "metrics.jsonl", "predictions.csv", "config.yaml"):
        assert Path("run", name).read_bytes() == Path("whole", name).read_bytes()
    assert sorted(p.name for p in Path().iterdir()) == ["big.csv", "n.csv", "run", "t.csv", "whole"]


@pytest.mark.parametrize("option", ["--overwrite", "--resume"])
def test_files_of_the_user_in_the_folder_of_checkpoints_stay(good, option):
    Path("run.checkpoints/mine").mkdir(parents=True)
    text("run.checkpoints/mine/notes.txt", "x")
    text("run.checkpoints/mine/step-000000000007.safetensors", "x")
    good(*FIT, *QUICK, "--output", "run", option)
    assert os.listdir("run.checkpoints/mine") == ["notes.txt"]


def test_a_file_in_the_way_of_checkpoints(bad):
    text("run.checkpoints", "x")
    for option in ((), ("--overwrite",), ("--resume",)):
        assert "is in the way of the checkpoints" in bad(*FIT, *QUICK, "--output", "run", *option)
    assert Path("run.checkpoints").read_text() == "x"


def test_further_logs(good, bad):
    pytest.importorskip("tensorboard")
    good(*FIT, *QUICK, "--output", "run", "--log", "csv", "--log", "tensorboard")
    lines = Path("run/epochs.csv").read_text().splitlines()
    assert lines[0].startswith("number,loss,")
    assert len(lines) > 1
    assert any("tfevents" in name for name in os.listdir("run"))
    good("info", "run")
    assert (
        bad(*FIT, *QUICK, "--output", "x", "--log", "wandb")
        == "kapsi: --log: expected one of csv, tensorboard, got 'wandb'\n"
    )


KILLS = """
import os, signal, sys, time, json
import kapsi as kp
from kapsi.cli import main
FIT = ["fit", "t.csv", "--target", "y", "--output", "run", "--overwrite", "--set", "training.l2=0.01"]
sys.stdout = open(os.devnull, "w")
began = time.monotonic()
assert main([*FIT, "--seed", "0"]) == 0
took = time.monotonic() - began
began = time.monotonic()
assert main([*FIT, "--seed", "0"]) == 0
took = time.monotonic() - began
for seed in range(1, 13):
    child = os.fork()
    if child == 0:
        main([*FIT, "--seed", str(seed)])
        os._exit(0)
    time.sleep(took * seed / 11)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert main(["info", "run"]) == 0, seed
    assert main(["predict", "run", "t.csv", "--output", "o.csv", "--overwrite"]) == 0, seed
    print(json.load(open("run/run.json"))["seed"], sorted(os.listdir(".")), file=sys.stderr)
assert main([*FIT, "--seed", "99"]) == 0
"""


@pytest.mark.slow  # tests/fuzz/test_kills.py has a kill in each run
def test_a_kill_at_any_moment_leaves_a_whole_run():
    done = subprocess.run([sys.executable, "-c", KILLS], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seeds = [int(line.split()[0]) for line in done.stderr.splitlines() if line[0].isdigit()]
    assert len(seeds) == 12
    assert seeds[0] == 0
    assert sorted(p.name for p in Path().iterdir()) == ["n.csv", "o.csv", "run", "t.csv"]
    assert json.loads(Path("run/run.json").read_text())["seed"] == 99


def test_an_interrupt_in_code_from_a_text_has_the_same_exit_code():
    # As a module: only there does the interpreter look for the mark that the interrupt has left.
    text(
        "probe.py",
        "import sys, kapsi.cli as cli, kapsi.cli.app as app\n"
        "def fit(*a, **k): exec('import signal; signal.raise_signal(2)')\n"
        "app.app = fit\n"
        "sys.argv[1:] = ['info', 'x']\n"
        "cli.run()",
    )
    done = subprocess.run([sys.executable, "-m", "probe"], env=ENVIRONMENT, capture_output=True, preexec_fn=listen)
    assert (done.returncode, done.stderr) == (130, b"")
