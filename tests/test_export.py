"""Exports of runs: ONNX, torch.export and folders for the Hugging Face Hub give the predictions of `kapsi predict`."""

from __future__ import annotations

import contextlib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import kapsi as kp
from kapsi.cli import main
from kapsi.data.tabular import Column, Preprocessing, Reading, Table, TargetScale, read_table, write_table
from kapsi.data.tabular.dates import calendar
from kapsi.data.tabular.encoders import CategoryColumn, DateColumn, NumberColumn
from kapsi.data.tabular.target_encoding import TargetColumn
from kapsi.errors import RunError, SpecError
from kapsi.export import MISSING, UNSEEN, NumericPart, interface, numeric
from kapsi.export.interface import codes_of
from kapsi.function import coerce
from kapsi.recipes.base import HeadRecipe, Recipe
from kapsi.tables import RunConfig, TableConfig, exports, fit_table

TARGETS = ("number", "several", "label", "truth", "grade")
OTHERS = [("additive", "number"), ("linear", "several"), ("extra_trees", "grade")]
"""Heads and targets of the slow tests of torch.export."""
MORE_COLUMNS = ("color", "city", "flag", "day")
"""Columns without which a network of functions is fitted in seconds."""
HEADS = sorted(
    kind.name
    for kind in kp.catalogue("recipe")
    if issubclass(kind, HeadRecipe)
    and kind.__module__.startswith("kapsi")
    and not kind.name.startswith(("text_", "image_"))
)
"""Heads of tables; those of texts and images are in test_export_texts_and_images.py."""


def rows_of(count: int, seed: int = 0) -> pd.DataFrame:
    """Return rows with columns and targets of all kinds."""
    random = np.random.default_rng(seed)
    x, z = random.normal(size=(2, count))
    color = random.choice(["red", "green", "blue"], count).astype(object)
    start = np.datetime64("2019-03-01T00:00:00")
    frame = pd.DataFrame(
        {
            "x": x,
            "z": 1e4 * z + 3e5,
            "color": color,
            "city": random.choice([f"city {i}" for i in range(60)], count),
            "flag": random.random(count) > 0.5,
            "day": start + random.integers(0, 900 * 24, count).astype("timedelta64[h]"),
        }
    )
    number = x * z + np.sin(2 * x) + (color == "red") + 0.3 * frame["flag"] + 0.1 * random.normal(size=count)
    frame.loc[random.random(count) < 0.1, "x"] = np.nan
    frame.loc[random.random(count) < 0.1, "color"] = None
    targets = {"number": number, "several": number, "label": np.where(number > 1, "high", "low"), "truth": number > 0.5}
    return frame.assign(**targets, other=z - x, grade=np.digitize(number, [0, 1]))


def new_rows(count: int = 1000) -> pd.DataFrame:
    """Return rows with unseen categories and missing values, also where the training rows have none."""
    frame = rows_of(count, seed=1)
    frame.loc[:20, "color"] = "violet"
    frame.loc[5:30, "city"] = "elsewhere"
    frame.loc[15:40, "z"] = np.nan
    frame.loc[35:45, "x"] = 1e30
    return frame


class Runs:
    """Runs by head and target, fitted at first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rows_of(150).to_parquet(folder / "table.parquet")

    def path(self, head: str = "linear", target: str = "label") -> Path:
        """Return the folder of a run."""
        path = self.folder / f"{head}-{target}"
        if not path.exists():
            wanted: Any = ("several", "other") if target == "several" else target
            drop = tuple({*TARGETS, "other"} - {target, *(["other"] if target == "several" else [])})
            drop += MORE_COLUMNS * head.startswith("function")
            config = RunConfig(TableConfig(wanted, drop=drop), recipe=coerce(Recipe, head, "head"))
            fit_table(self.folder / "table.parquet", config, path)
        return path

    def load(self, head: str = "linear", target: str = "label") -> kp.LoadedRun:
        """Return a run."""
        return kp.load_run(self.path(head, target))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def expected(run: kp.LoadedRun, frame: pd.DataFrame) -> Any:
    """Return probabilities or values."""
    return run.predict(frame) if run.model.classes is None else run.predict_proba(frame)


def close(given: Any, wanted: Any) -> bool:
    """Return whether outputs are equal to 1e-6 of their scale."""
    wanted = np.asarray(wanted)
    return given.shape == wanted.shape and bool(
        (np.abs(given - wanted) <= 1e-6 * max(np.abs(wanted).max(initial=0), 1e-300)).all()
    )


def arrays_of(facts: dict[str, Any], frame: pd.DataFrame) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers and codes of rows by the description of the columns alone."""
    numbers, codes = [], []
    for column in facts["columns"]:
        values = frame[column["name"]]
        if column["kind"] == "category":
            known = column["codes"]
            codes.append([known.get("" if word is None or word != word else word, UNSEEN) for word in values])
        elif column["kind"] == "date":
            numbers.append(values.to_numpy().astype("datetime64[s]").astype("float64"))
        else:
            numbers.append(values.to_numpy(dtype="float64"))
    tensors = [
        torch.tensor(np.array(part), dtype=kind).reshape(len(part), len(frame)).T
        for part, kind in ((numbers, torch.float64), (codes, torch.int64))
    ]
    return tensors[0], tensors[1]


# ------------------------------------------------------------------------------------------------ the numeric part


def test_parts_of_dates_are_those_of_the_encoder() -> None:
    random = np.random.default_rng(0)
    seconds = np.concatenate(
        [
            random.uniform(-6e10, 9e10, 3000),
            np.arange(np.datetime64("1896-01-01"), np.datetime64("2104-12-31")).astype("datetime64[s]").astype(float),
            [np.nan, -1.0, -0.5, 86_399.999],
        ]
    )
    parts = numeric.calendar(torch.from_numpy(seconds), torch.tensor(100.0, dtype=torch.float64)).numpy()
    for i, (name, values) in enumerate(calendar(seconds).items()):
        np.testing.assert_array_equal(parts[:, i], values, name)
    np.testing.assert_array_equal(parts[:, 5], (seconds - 100) / 86_400)


def test_encodings_are_those_of_the_encoders() -> None:
    random = np.random.default_rng(0)
    words = np.array(["b", "a", "c", None], dtype=object)
    columns = {
        "code": Column("text", random.choice(words, 40)),
        "n": Column("real", np.where(random.random(40) < 0.2, np.nan, random.choice([1e308, -1e308, 1.0, 2.0], 40))),
        "two": Column("text", random.choice(words[:2], 40)),
        "plain": Column("integer", random.integers(0, 9, 40).astype(float)),
        "day": Column("date", np.where(random.random(40) < 0.2, np.nan, random.uniform(0, 1e9, 40))),
        "mean": Column("text", random.choice(words, 40)),
    }
    encoders = (
        CategoryColumn("code", ("a", "b"), missing=True),
        NumberColumn("n", 1.5, 1e-3, missing=True),
        CategoryColumn("two", ("a", "b"), binary=True),
        NumberColumn("plain", 4.0, 2.5, missing=False),
        DateColumn("day", 5.0, ("year", "hour", "days"), (2000.0, 12.0, 9.0), (10.0, 7.0, 3.0), missing=True),
        TargetColumn("mean", ("a", "b"), ("p", "q"), (1.0, 2.0, 3.0, 4.0), (5.0, 6.0), missing=True),
    )
    preprocessing = Preprocessing(encoders)
    wanted = preprocessing.transform(Table("t", columns))
    numbers = np.stack([columns[name].numbers for name in ("n", "plain", "day")], 1)
    texts = [encoder for encoder in encoders if isinstance(encoder, CategoryColumn | TargetColumn)]
    codes = np.array(
        [[codes_of(text, Reading()).get(word or "", UNSEEN) for word in columns[text.name].values] for text in texts]
    )
    inputs = numeric.Encoding(preprocessing)(torch.from_numpy(numbers), torch.from_numpy(codes.T))
    np.testing.assert_allclose(inputs.numpy(), wanted, rtol=1e-15, atol=0)
    assert wanted.shape == (40, len(preprocessing.names()))


@pytest.mark.parametrize(
    "scale",
    [
        TargetScale(2.0, 3.0),
        TargetScale((2.0, 1.0), (3.0, 0.5)),
        TargetScale(2.0, 3.0, "log", factor=1.3),
        TargetScale(0.0, 3.0, "log_link"),
        *(TargetScale(0.2, 3.0, "yeo_johnson", power, 1.7) for power in (0.0, 0.4, 1.0, 1.6, 2.0)),
    ],
)
def test_outputs_have_the_unit_of_the_target(scale) -> None:
    several = isinstance(scale.center, tuple)
    outputs = torch.tensor([0.0, 1.0, -1.0, 1e-9, 30.0, -30.0, 1e6, -1e6], dtype=torch.float64).reshape(-1, 1)
    outputs = outputs.expand(-1, 1 + several)
    wanted = scale.invert(outputs.numpy() if several else outputs[:, 0].numpy())
    np.testing.assert_allclose(numeric.InverseScale(scale)(outputs).numpy(), wanted, rtol=1e-14, atol=0)


def test_codes_of_words_are_those_of_tables(tmp_path) -> None:
    words = [
        "07",
        "7",
        "7.0",
        " 07 ",
        "x",
        "X",
        "NA",
        "n/a",
        "-",
        "?",
        "unknown",
        "10",
        "10.0",
        "",
        "new",
        "none",
        "None",
    ]
    column = CategoryColumn("c", ("07", "10", "None", "x"), missing=True)
    reading = Reading(missing=("unknown",))
    (tmp_path / "t.csv").write_text("i,c\n" + "".join(f"{i},{word}\n" for i, word in enumerate(words)))
    kinds = {"i": "numeric", "c": "categorical"}
    table = read_table(tmp_path / "t.csv", reading, kinds=kinds, categories={"c": column.categories})
    known = codes_of(column, reading)
    # A table is trimmed, an exported model gets the words as they are.
    assert [known.get(word.strip(), UNSEEN) for word in words] == column._codes(table.columns["c"]).tolist()
    assert known["07"] == 0
    assert known["NA"] == MISSING


def test_an_unknown_encoder_is_refused() -> None:
    preprocessing: Any = SimpleNamespace(columns=(SimpleNamespace(name="essay"),))
    model = kp.Model(kp.rpn([1, 1]), seed=0)
    with pytest.raises(SpecError, match="the column 'essay' is encoded by SimpleNamespace, which has no form in ONNX"):
        NumericPart(model, preprocessing, TargetScale(0.0, 1.0))


# ------------------------------------------------------------------------------------------------ torch.export


@pytest.mark.parametrize(
    ("head", "target"),
    [("linear", "label"), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in OTHERS)],
)
def test_a_torch_program_gives_the_predictions_of_the_run(runs, tmp_path, head, target) -> None:
    run = runs.load(head, target)
    run.export(tmp_path / "model.pt2", "torch")
    files = {"columns.json": ""}
    program = torch.export.load(tmp_path / "model.pt2", extra_files=files).module()
    facts, frame = json.loads(files["columns.json"]), new_rows()
    wanted = expected(run, frame)
    for count in (1, 7, 1000):
        assert close(program(*arrays_of(facts, frame[:count])).numpy(), wanted[:count])
    assert program(*arrays_of(facts, frame[:0])).shape == (0, *wanted.shape[1:])
    assert facts["classes"] == (None if run.model.classes is None else list(run.model.classes))
    assert facts["kapsi"] == kp.__version__


@pytest.mark.slow
def test_a_torch_program_needs_no_kapsi(runs, tmp_path) -> None:
    run = runs.load("linear", "label")
    run.export(tmp_path / "model.pt2", "torch")
    numbers, codes = arrays_of(interface(run.model), new_rows(9))
    torch.save((numbers, codes), tmp_path / "rows.pt")
    code = (
        "import sys, torch; sys.modules['kapsi'] = None; numbers, codes = torch.load('rows.pt'); "
        "print(torch.export.load('model.pt2').module()(numbers, codes).tolist())"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert close(np.array(json.loads(done.stdout)), run.predict_proba(new_rows(9)))


# ------------------------------------------------------------------------------------------------ ONNX


def session_of(path: Path) -> Any:
    """Return a session of onnxruntime."""
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx: pip install kapsi[onnx]")
    runtime.set_default_logger_severity(4)
    return runtime.InferenceSession(path, providers=["CPUExecutionProvider"])


def feeds_of(facts: dict[str, Any], frame: pd.DataFrame) -> dict[str, np.ndarray]:
    """Return the inputs of an ONNX file for rows."""
    feeds: dict[str, np.ndarray] = {}
    for column in facts["columns"]:
        values = frame[column["name"]]
        if column["kind"] == "category":
            words = ["" if word is None or word != word else word for word in values]
            feeds[column["name"]] = np.array(words, dtype=object).reshape(-1, 1)
        else:
            seconds = values.to_numpy().astype("datetime64[s]") if column["kind"] == "date" else values
            feeds[column["name"]] = np.asarray(seconds, dtype=np.float64).reshape(-1, 1)
    return feeds


def check_onnx(run: kp.LoadedRun, path: Path) -> None:
    """Compare an ONNX file with the run, for several numbers of rows."""
    pytest.importorskip("onnxscript", reason="needs the extra onnx: pip install kapsi[onnx]")
    run.export(path)
    session, frame = session_of(path), new_rows()
    facts = json.loads(session.get_modelmeta().custom_metadata_map["kapsi"])
    wanted, labels = expected(run, frame), run.predict(frame)
    for count in (1, 7, 1000, 0):
        outputs = session.run(None, feeds_of(facts, frame[:count]))
        assert close(outputs[-1], wanted[:count])
        if run.model.classes is not None:
            assert outputs[0].tolist() == labels[:count].tolist()


@pytest.mark.parametrize(("head", "target"), [("linear", "label"), ("extra_trees", "number")])
def test_an_onnx_file_gives_the_predictions_of_the_run(runs, tmp_path, head, target) -> None:
    check_onnx(runs.load(head, target), tmp_path / "model.onnx")


@pytest.mark.slow
@pytest.mark.all_heads
@pytest.mark.parametrize("target", ["number", "grade"])
@pytest.mark.parametrize("head", HEADS)
def test_every_head_has_a_form_in_onnx(runs, tmp_path, head, target) -> None:
    try:
        run = runs.load(head, target)
    except kp.KapsiError as error:
        pytest.skip(f"no fit of {target}: {error}")
    check_onnx(run, tmp_path / "model.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["several", "truth"])
def test_every_kind_of_target_has_a_form_in_onnx(runs, tmp_path, target) -> None:
    check_onnx(runs.load("linear", target), tmp_path / "model.onnx")


@pytest.mark.slow
def test_an_onnx_file_of_a_specification_in_float32(runs, tmp_path) -> None:
    drop = tuple({*TARGETS, "other"} - {"number"})
    training = kp.TrainConfig(solver=kp.AdamW(), epochs=3)
    config = RunConfig(TableConfig("number", drop=drop), kp.rpn([None, 5, None], kp.BSpline(4)), training)
    fit_table(runs.folder / "table.parquet", config, tmp_path / "run")
    run = kp.load_run(tmp_path / "run")
    assert next(run.model.model.parameters()).dtype == torch.float32
    check_onnx(run, tmp_path / "model.onnx")


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "head"), [(["color", "city"], "extra_trees"), (["z"], "steps")])
def test_an_onnx_file_of_columns_of_one_kind(tmp_path, columns, head) -> None:
    rows_of(150)[[*columns, "number"]].to_parquet(tmp_path / "t.parquet")
    config = RunConfig(TableConfig("number"), recipe=coerce(Recipe, head, "head"))
    fit_table(tmp_path / "t.parquet", config, tmp_path / "run")
    check_onnx(kp.load_run(tmp_path / "run"), tmp_path / "model.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("unit", [1e-9, 1e-300])
def test_an_onnx_file_keeps_the_means_of_tiny_numbers(tmp_path, unit) -> None:
    pytest.importorskip("onnxscript", reason="needs the extra onnx: pip install kapsi[onnx]")
    x = unit * np.linspace(1, 3, 60)[:, None]
    regressor = kp.RPNRegressor("linear").fit(x, x[:, 0])
    regressor.export(str(tmp_path / "tiny.onnx"), "onnx")
    session = session_of(tmp_path / "tiny.onnx")
    (values,) = session.run(None, {session.get_inputs()[0].name: x})
    assert np.allclose(values, regressor.predict(x), rtol=1e-9, atol=0)


@pytest.mark.slow
def test_an_onnx_file_names_its_inputs_and_outputs(tmp_path) -> None:
    pytest.importorskip("onnxscript", reason="needs the extra onnx: pip install kapsi[onnx]")
    random = np.random.default_rng(0)
    table = {"prediction": random.normal(size=40), "kapsi/a": random.normal(size=40), "add_1": random.normal(size=40)}
    table["probabilities"] = random.choice(["ä b", "c\"'"], 40)
    write_table(tmp_path / "t.csv", table | {"y": np.where(table["prediction"] > 0, "yes", "no")})
    fit_table(tmp_path / "t.csv", RunConfig(TableConfig("y"), recipe=coerce(Recipe, "linear", "x")), tmp_path / "run")
    run = kp.load_run(tmp_path / "run")
    run.export(tmp_path / "m.onnx")
    session = session_of(tmp_path / "m.onnx")
    assert [entry.name for entry in session.get_inputs()] == list(table)
    assert [entry.shape for entry in session.get_inputs()] == [["rows", 1]] * 4
    assert [entry.name for entry in session.get_outputs()] == ["prediction_", "probabilities_"]
    frame = pd.DataFrame(table)
    labels, probabilities = session.run(None, feeds_of(interface(run.model), frame))
    assert labels.tolist() == run.predict(frame).tolist()
    assert close(probabilities, run.predict_proba(frame))
    # The exporter stores the places of its calls; the file names no folder of this machine.
    assert str(Path(kp.__file__).parent).encode() not in (tmp_path / "m.onnx").read_bytes()


def test_a_missing_extra_is_a_line(runs, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert main(["export", str(runs.path()), "--format", "onnx", "--output", str(tmp_path / "m.onnx")]) == 2
    assert capsys.readouterr().err == "kapsi: export: ONNX needs the package onnx: pip install 'kapsi[onnx]'\n"
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------ paths


@pytest.fixture
def quick_torch(monkeypatch) -> bytes:
    """Write other bytes instead of a program of torch.export, which takes seconds."""
    content = bytes(2000)
    monkeypatch.setitem(exports.FORMATS, "torch", exports.writes(lambda model: content))
    return content


def test_an_export_replaces_a_file_only_by_request(runs, tmp_path, capsys, quick_torch) -> None:
    path = tmp_path / "new" / "m.pt2"
    command = ["export", str(runs.path()), "--format", "torch", "--output", str(path)]
    assert main(command) == 0
    assert capsys.readouterr().out == f"exported: {path} (torch, 2,000 bytes)\n"
    path.write_text("mine")
    assert main(command) == 2
    assert capsys.readouterr().err == f"kapsi: {str(path)!r}: exists already; give another --output, or --overwrite\n"
    assert path.read_text() == "mine"
    assert main([*command, "--overwrite"]) == 0
    assert path.read_bytes() == quick_torch


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "onyx", "--output", "m"], "there is no export format 'onyx'"),
        (["--format", "torch", "--output", "."], "is a folder; give the name of a file"),
        (["--format", "torch", "--output", ""], "is empty; give the name of a file"),
        (["--format", "torch", "--output", "RUN/model.safetensors", "--overwrite"], "is the run itself, or one of its"),
        (["--format", "huggingface", "--output", "RUN", "--overwrite"], "is the run itself, or one of its files"),
        (["--format", "huggingface", "--output", "full"], "is a folder without a kapsi run, never replaced"),
        (["--format", "torch", "--output", "full/file/m.pt2"], "is not a folder"),
    ],
)
def test_paths_that_cannot_be_written_are_refused(runs, tmp_path, monkeypatch, capsys, arguments, message) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    run = str(runs.path())
    before = {path: path.read_bytes() for path in runs.path().iterdir()}
    assert main(["export", run, *(word.replace("RUN", run) for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "file"]
    assert {path: path.read_bytes() for path in runs.path().iterdir()} == before


@pytest.mark.parametrize("format", ["torch", "huggingface"])
def test_an_interrupt_leaves_nothing_half_written(runs, tmp_path, monkeypatch, quick_torch, format) -> None:
    run = runs.load()

    def half(path: Path, *arguments: Any, **options: Any) -> None:
        path.write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", half)
    monkeypatch.setattr(exports, "write_json", half)
    with pytest.raises(KeyboardInterrupt):
        run.export(tmp_path / "out", format)
    assert not list(tmp_path.iterdir())


def test_labels_without_a_form_in_json_are_refused(runs, tmp_path) -> None:
    model = SimpleNamespace(classes=(0.5, 1.5))
    with pytest.raises(SpecError, match=r"labels must be strings, integers or booleans, got 0\.5"):
        exports.export_model(model, {}, tmp_path / "m", "torch")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ folders for the Hub


def test_a_folder_for_the_hub_is_a_run_without_rows(runs, tmp_path) -> None:
    run = runs.load("linear", "label")
    run.save_pretrained(tmp_path / "hub")
    names = {path.name for path in (tmp_path / "hub").iterdir()}
    assert names >= {"README.md", "config.json", "config.yaml", "model.safetensors", "preprocessing.json", "run.json"}
    assert not names & {"predictions.csv", "metrics.jsonl"}
    # Everything that makes the model is downloaded from the Hub.
    assert names - {"README.md", "config.json"} <= {*exports.PRETRAINED}
    again, frame = kp.LoadedRun.from_pretrained(tmp_path / "hub"), new_rows(50)
    assert np.array_equal(again.predict_proba(frame), run.predict_proba(frame))
    assert again.model.config == run.model.config
    facts = json.loads((tmp_path / "hub" / "config.json").read_text())
    assert (facts["library_name"], facts["task"], facts["classes"]) == ("kapsi", "classification", ["high", "low"])
    card = (tmp_path / "hub" / "README.md").read_text()
    for text in ("## Scores", "## Heads", "## Limits", "| color | categories | 3 categories |", "held-out rows"):
        assert text in card


def test_the_card_has_metadata_of_the_hub(runs, tmp_path) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="needs the extra hub: pip install kapsi[hub]")
    runs.load("additive", "number").save_pretrained(tmp_path / "my model")
    data = hub.ModelCard((tmp_path / "my model" / "README.md").read_text()).data
    assert (data.library_name, data.pipeline_tag, data.model_name) == ("kapsi", "tabular-regression", "my model")
    assert [result.metric_type for result in data.eval_results] == ["r2", "rmse"]


def test_an_edited_card_is_no_damage_and_edited_weights_are(runs, tmp_path) -> None:
    runs.load().save_pretrained(tmp_path / "hub")
    with open(tmp_path / "hub" / "README.md", "a") as file:
        file.write("More about the data.\n")
    assert kp.LoadedRun.from_pretrained(tmp_path / "hub").model.classes == ("high", "low")
    with open(tmp_path / "hub" / "model.safetensors", "ab") as file:
        file.write(b"x")
    with pytest.raises(RunError, match=r"the file 'model\.safetensors' has changed"):
        kp.LoadedRun.from_pretrained(tmp_path / "hub")


def test_names_of_a_table_are_no_markup(tmp_path) -> None:
    random = np.random.default_rng(0)
    name = "a|b</td><script>*`\n---\nlicense: mit"
    frame = pd.DataFrame({name: random.normal(size=40), "x": random.normal(size=40)})
    frame["# y"] = frame[name] + frame["x"]
    frame.to_parquet(tmp_path / "t.parquet")
    config = RunConfig(TableConfig("# y"), recipe=coerce(Recipe, "linear", "x"))
    fit_table(tmp_path / "t.parquet", config, tmp_path / "run")
    kp.load_run(tmp_path / "run").save_pretrained(tmp_path / "hub")
    card = (tmp_path / "hub" / "README.md").read_text()
    assert "<script>" not in card.split("```python")[0] + card.split("```", 5)[4]
    assert r"a\|b&lt;/td&gt;&lt;script&gt;\*\` --- license: mit" in card
    assert "\nlicense: mit" not in card


def test_models_come_from_the_hub_only_by_request(runs, tmp_path, monkeypatch) -> None:
    with pytest.raises(
        RunError, match="no such folder; to load a model from the Hugging Face Hub, give its name and down"
    ):
        kp.LoadedRun.from_pretrained("user/name")
    runs.load().save_pretrained(tmp_path / "hub")
    calls = []

    def snapshot_download(name: str, **options: Any) -> str:
        calls.append((name, options))
        if name != "user/name":
            raise OSError("no network")
        return str(tmp_path / "hub")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    run = kp.LoadedRun.from_pretrained("user/name", download=True, revision="v1")
    assert run.model.classes == ("high", "low")
    assert calls[0][1]["revision"] == "v1"
    assert "README.md" not in calls[0][1]["allow_patterns"]
    with pytest.raises(RunError, match="'other': cannot be downloaded from the Hub: OSError: no network"):
        kp.LoadedRun.from_pretrained("other", download=True)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(SpecError, match=r"pip install 'kapsi\[hub\]'"):
        kp.LoadedRun.from_pretrained("user/name", download=True)


# ------------------------------------------------------------------------------------------------ estimators


@pytest.mark.parametrize("named", [True, False])
def test_a_classifier_is_read_back(tmp_path, named) -> None:
    frame = rows_of(120)
    x = frame[["x", "color", "city", "day"]] if named else frame[["x", "z"]].to_numpy()
    classifier = kp.RPNClassifier("linear", class_weight={"high": 2.0, "low": 1.0}).fit(x, frame["label"])
    classifier.save_pretrained(tmp_path / "model")
    again = kp.RPNClassifier.from_pretrained(tmp_path / "model")
    assert np.array_equal(again.predict_proba(x), classifier.predict_proba(x))
    assert again.predict(x).tolist() == classifier.predict(x).tolist()
    assert (again.recipe, again.class_weight) == ("linear", None)
    assert again.n_features_in_ == x.shape[1]
    with pytest.raises(ValueError, match="feature"):
        again.predict(x.iloc[:, :1] if named else x[:, :1])
    with pytest.raises(RunError, match=r"the model is for classification; use kp\.RPNClassifier\.from_pretrained"):
        kp.RPNRegressor.from_pretrained(tmp_path / "model")


@pytest.mark.parametrize("shape", [(80,), (80, 1), (80, 2)])
def test_a_regressor_is_read_back_and_fits_again(tmp_path, shape) -> None:
    frame = rows_of(80)
    x, y = frame[["z", "flag"]].to_numpy(dtype=float), frame[["number", "other"]].to_numpy()[:, : shape[-1]]
    y = np.ascontiguousarray(y[:, :2]).reshape(-1)[: np.prod(shape)].reshape(shape)
    options: dict[str, Any] = {"spec": kp.Taylor(2), "early_stopping": False, "solver": kp.Ridge(), "l2": 0.1}
    regressor = kp.RPNRegressor(**options).fit(x, y)
    regressor.save_pretrained(tmp_path / "model")
    again = kp.RPNRegressor.from_pretrained(tmp_path / "model")
    assert again.predict(x).shape == shape
    assert np.array_equal(again.predict(x), regressor.predict(x))
    assert np.array_equal(again.fit(x, y).predict(x), regressor.predict(x))


def test_a_run_becomes_an_estimator_and_an_estimator_a_run(runs, tmp_path) -> None:
    frame = new_rows(30)
    classifier = kp.RPNClassifier.from_pretrained(runs.path("linear", "label"))
    inputs = frame[[column.name for column in runs.load().model.preprocessing.columns]]
    assert np.array_equal(classifier.predict_proba(inputs), runs.load().predict_proba(frame))
    classifier.save_pretrained(tmp_path / "again")
    assert np.array_equal(kp.load_run(tmp_path / "again").predict(frame), classifier.predict(inputs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"columns": 3}, "names must be 3 strings"),
        ({"names": [1, 2]}, "names must be 2 strings"),
        ({"shape": [7]}, r"the shape \[7\] does not fit 1 targets"),
        ({"options": {"evil": 1}}, "Invalid parameter 'evil'"),
        ({"named": 1}, "named is 1; it must be of the type bool"),
        ({"more": 1}, "unknown keys: 'more'"),
    ],
)
def test_damaged_facts_of_an_estimator_are_refused(tmp_path, monkeypatch, change, message) -> None:
    frame = rows_of(40)
    regressor = kp.RPNRegressor("linear").fit(frame[["z", "flag"]], frame["number"])
    facts = regressor._facts()
    monkeypatch.setattr(regressor, "_facts", lambda: facts | change)
    regressor.save_pretrained(tmp_path / "model")
    with pytest.raises(RunError, match=f"damaged run: .*{message}"):
        kp.RPNRegressor.from_pretrained(tmp_path / "model")


def test_estimators_of_sparse_rows_have_no_export(tmp_path) -> None:
    from scipy.sparse import csr_matrix

    x, y = csr_matrix(np.eye(20)[:, :6]), np.arange(20.0)
    regressor = kp.RPNRegressor(spec=kp.Identity(), early_stopping=False).fit(x, y)
    with pytest.raises(SpecError, match="RPNRegressor: fitted to sparse rows"):
        regressor.export(tmp_path / "m.pt2", "torch")
    assert not list(tmp_path.iterdir())


def test_labels_that_are_whole_numbers_are_integers_in_files(tmp_path) -> None:
    x = rows_of(40)[["z"]].to_numpy()
    classifier = kp.RPNClassifier("linear").fit(x, (x[:, 0] > 3e5).astype(float))
    classifier.save_pretrained(tmp_path / "m")
    again = kp.RPNClassifier.from_pretrained(tmp_path / "m")
    assert again.classes_.tolist() == [0, 1]
    assert np.array_equal(again.predict(x), classifier.predict(x))


# ------------------------------------------------------------------------------------------------ the page of the documentation

PAGE = Path(__file__).parents[1] / "docs" / "export.md"


def run_snippet(word: str, folder: Path, **names: Any) -> dict[str, Any]:
    """Run the block of Python on the page that has a word, and return its names; blocks with prompts are doctests."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = [block for block in blocks if word in block and not block.startswith(">>>")]
    (folder / "snippet.py").write_text(block, encoding="utf-8")
    return runpy.run_path(str(folder / "snippet.py"), names)


@pytest.mark.slow
def test_the_snippets_of_onnx_run(tmp_path, monkeypatch) -> None:
    pytest.importorskip("onnxscript", reason="needs the extra onnx: pip install kapsi[onnx]")
    pytest.importorskip("onnxruntime", reason="needs the extra onnx: pip install kapsi[onnx]")
    random = np.random.default_rng(0)
    frame = pd.DataFrame({"age": random.normal(40, 9, 80), "color": random.choice(["red", "blue"], 80)})
    classifier = kp.RPNClassifier("linear").fit(frame, np.where(frame["age"] > 40, "old", "young"))
    classifier.export(tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    names = run_snippet("label, probabilities", tmp_path)
    rows = pd.DataFrame({"age": [31.0, np.nan], "color": ["red", None]})
    assert names["label"].tolist() == classifier.predict(rows).tolist()
    assert close(names["probabilities"], classifier.predict_proba(rows))

    pytest.importorskip("fastapi", reason="needs fastapi and httpx")
    client = pytest.importorskip("fastapi.testclient", reason="needs fastapi and httpx")
    calls = client.TestClient(run_snippet("FastAPI", tmp_path)["app"])
    reply = calls.post("/predict", json=[{"age": 31.0, "color": "red"}, {"age": None}]).json()
    assert reply["prediction"] == names["label"].tolist()
    assert close(np.array(reply["probabilities"]), names["probabilities"])
    assert calls.post("/predict", json=[]).json() == {"prediction": [], "probabilities": []}


class Tracker:
    """A stand-in for MLflow and for a run of Weights & Biases."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.facts: dict[str, Any] = {}
        self.summary = self.facts
        self.log_params = self.facts.update

    def start_run(self) -> Any:
        return contextlib.nullcontext()

    def init(self, project: str) -> Any:
        return contextlib.nullcontext(self)

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        assert values.keys() == {"loss", "validation_loss", "r2", "rmse"}
        assert all(isinstance(value, float) for value in values.values())
        self.steps.append(step)

    log = log_metrics


@pytest.mark.parametrize("package", ["mlflow", "wandb"])
def test_the_snippets_of_trackers_run(tmp_path, monkeypatch, package) -> None:
    tracker = Tracker()
    monkeypatch.setitem(sys.modules, package, tracker)  # type: ignore[arg-type]
    x = torch.linspace(-1, 1, 40, dtype=torch.float64).reshape(-1, 1)
    model = kp.Model(kp.rpn([1, 1], kp.Taylor(2)), seed=0, dtype=torch.float64)
    run_snippet(f"import {package}", tmp_path, kp=kp, model=model, data=(x, x**2))
    assert tracker.steps == list(range(1, len(tracker.steps) + 1))
    assert tracker.steps
    assert isinstance(tracker.facts["solver"], str)
