"""The process around the command line: closed streams, terminals, imports, interrupts, replaced runs, links."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

import kapsi as kp
from kapsi.cli import app, common, main
from kapsi.data.tabular import read_table, write_table
from kapsi.errors import LONGEST_MESSAGE, KapsiError, RunError, SpecError, printable
from kapsi.tables import RunConfig, TableConfig, fit_table, fitting, load_run

SOURCE = Path(main.__code__.co_filename).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
QUICK = RunConfig(TableConfig("y"), None, kp.TrainConfig(l2=0.01, epochs=2))
HOSTILE = "\x1b]0;title\x07\x1b]52;c;Y2xpcA==\x07 \x9b31m ‮ \u2028"  # title, clipboard, colour, direction, line


def rows(slope: float = 1.0, count: int = 30) -> dict[str, list[float]]:
    x = np.random.default_rng(0).normal(size=(count, 2))
    return {"a": x[:, 0].tolist(), "b": x[:, 1].tolist(), "y": (slope * x[:, 0] + x[:, 1]).tolist()}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_table("t.csv", rows())


@pytest.fixture
def run(tmp_path):
    fit_table("t.csv", QUICK, "run")
    return tmp_path / "run"


def kapsi(*arguments: str, code: int = 0) -> None:
    assert main(list(arguments)) == code


def process(command: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    command = command.replace("KAPSI", f"{sys.executable} -m kapsi")
    return subprocess.run(command, shell=True, env=ENVIRONMENT, capture_output=True, check=False, **options)


# ------------------------------------------------------------------------------------------------ escapes and lengths


def test_printable_escapes_controls_and_nothing_else() -> None:
    assert (
        printable("é κ ⟨ψ⟩ 数 👩\u200d💻 \u00a0 \u0645\u06cc\u200c\u062e")
        == "é κ ⟨ψ⟩ 数 👩\u200d💻 \u00a0 \u0645\u06cc\u200c\u062e"
    )
    escaped = printable(HOSTILE + "\udcff\r\n\t\0")
    assert escaped.isascii()
    assert escaped.isprintable()
    for code in (*range(32), *range(127, 160), 0x200B, 0x202E, 0x2066, 0xFEFF, 0x2028, 0xD800):
        assert printable(chr(code)).startswith("\\"), hex(code)


def test_errors_are_one_printable_line_of_bounded_length() -> None:
    error = KapsiError(f"the beginning {HOSTILE}\n  next line{'x' * 10**6} the remedy")
    assert str(error).startswith("the beginning \\x1b]0;title\\x07")
    assert "\\u202e next line" in str(error)
    assert str(error).endswith("the remedy")
    assert str(error).isprintable()
    assert len(str(error)) <= LONGEST_MESSAGE


def test_nothing_from_a_file_sends_commands_to_a_terminal(capsys) -> None:
    """Names, labels and paths with commands to a terminal: all commands, good and bad, print none of them."""
    name = HOSTILE.replace("\x9b", "") + "é"
    table = f"t{HOSTILE}.csv"
    columns = rows()
    labels = [f"l{HOSTILE}{value > 0}" for value in columns.pop("y")]
    write_table(table, {name: columns["a"], "b": columns["b"], f"k{HOSTILE}!": labels, "one": [1] * 30})
    folder = f"run{HOSTILE}"
    fit = ("fit", table, "--target", f"k{HOSTILE}!", "--set", "training.l2=0.01", "--output")
    calls = [
        (0, (*fit, folder)),
        (2, (*fit, folder)),
        (0, ("info", folder)),
        (0, ("evaluate", folder, table)),
        (0, ("predict", folder, table, "--output", f"o{HOSTILE}.csv")),
        (2, ("predict", folder, "t.csv", "--output", f"o{HOSTILE}.csv")),
        (2, ("fit", "t.csv", "--target", HOSTILE)),
        (2, ("fit", "t.csv", f"--{HOSTILE}", "1")),
        (2, (HOSTILE,)),
        (2, ("functions", HOSTILE)),
        (2, ("data", HOSTILE)),
        (2, ("reproduce", HOSTILE)),
        (2, ("fit", "t.csv", "--target", "y", "--set", f"training.{HOSTILE}=1")),
    ]
    for code, words in calls:
        assert main(list(words)) == code, words
        captured = capsys.readouterr()
        for text in (captured.out, captured.err):
            assert all(letter.isprintable() or letter in "\n\u00a0" for letter in text), (words, text)
        assert captured.err.count("\n") == 1 or code == 0, words


def test_rows_on_a_terminal_have_no_commands() -> None:
    from kapsi.cli.common import show_data

    parent, child = pty.openpty()
    stream = os.fdopen(child, "w", encoding="utf-8")
    before, sys.stdout = sys.stdout, stream
    try:
        show_data(f"a,b\n{HOSTILE},1\n")
        stream.flush()
    finally:
        sys.stdout = before
    written = os.read(parent, 10_000).decode()
    stream.close()
    os.close(parent)
    assert written == f"a,b\r\n{printable(HOSTILE)},1\r\n"


def test_warnings_are_notes(monkeypatch) -> None:
    code = "import warnings, kapsi.cli.app as app; from kapsi.cli import main\n"
    code += "def warn(**_): warnings.warn('first' + chr(10) + 'second' + chr(27), stacklevel=1)\n"
    code += "app.app = warn; main([])"
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.stderr == "note: first second\\x1b\n"


# ------------------------------------------------------------------------------------------------ runs


def test_a_run_replaced_while_it_is_read_is_not_mixed(run, monkeypatch) -> None:
    """After the check the folder is exchanged for another good run: the result is the checked run, as a whole."""
    from kapsi.training import run_folder

    write_table("u.csv", rows(slope=-5.0))
    fit_table("u.csv", QUICK, "other")
    old, table = load_run("run")[0], read_table("t.csv")
    expected = old.predict(table)[0]["prediction"]
    verify = run_folder._verify

    def verified(*arguments: object):
        result = verify(*arguments)
        os.rename("run", "away")
        os.rename("other", "run")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "_verify", verified)
        assert load_run("run")[0].predict(table)[0]["prediction"] == expected
    assert load_run("run")[0].predict(table)[0]["prediction"] != expected


def test_a_file_replaced_between_its_check_and_the_next_is_refused(run, monkeypatch) -> None:
    from kapsi.training import run_folder

    write_table("u.csv", rows(slope=-5.0))
    fit_table("u.csv", QUICK, "other")
    fingerprint = run_folder._fingerprint

    def printed(file: Path, *rest: object):
        result = fingerprint(file, *rest)
        if file.name == "config.yaml" and Path("other").exists():  # the first file
            os.rename("run", "away")
            os.rename("other", "run")
        return result

    monkeypatch.setattr(run_folder, "_fingerprint", printed)
    with pytest.raises(RunError, match=r"damaged run: the file 'intervals\.json' has changed"):
        load_run("run")


def test_load_of_a_run_folder_names_the_call_for_it(run) -> None:
    with pytest.raises(SpecError, match=r"is a run folder of kapsi fit; kp\.load_run"):
        kp.load(run)


def test_checkpoints_behind_a_link_are_not_touched(capsys) -> None:
    """Overwriting a run never deletes files in a folder behind a link of the name of the checkpoints."""
    Path("precious").mkdir()
    Path("precious/step-000000000001.safetensors").write_text("mine")
    os.symlink("precious", "run.checkpoints")
    for option in ("--overwrite", "--resume"):
        kapsi("fit", "t.csv", "--target", "y", "--output", "run", option, code=2)
        assert "is in the way of the checkpoints" in capsys.readouterr().err
    assert Path("precious/step-000000000001.safetensors").read_text() == "mine"


def test_overwrite_replaces_the_target_of_a_link_and_keeps_the_link(run, capsys) -> None:
    os.symlink("run", "link")
    before = hashlib.sha256(Path("run/model.safetensors").read_bytes()).hexdigest()
    kapsi("fit", "t.csv", "--target", "y", "--output", "link", "--set", "training.l2=0.1", "--overwrite")
    assert os.readlink("link") == "run"
    assert hashlib.sha256(Path("run/model.safetensors").read_bytes()).hexdigest() != before
    Path("folder").mkdir()
    Path("folder/mine.txt").write_text("mine")
    os.symlink("folder", "other")
    capsys.readouterr()
    kapsi("fit", "t.csv", "--target", "y", "--output", "other", "--overwrite", code=2)
    assert "a folder without a kapsi run" in capsys.readouterr().err
    assert os.listdir("folder") == ["mine.txt"]


LONG = ("fit", "t.csv", "--target", "y", "--folds", "2", "--set", "training.solver=adamw", "--set", "training.epochs=5")


def test_a_kill_between_the_removals_of_checkpoints_and_their_folders() -> None:
    kapsi(*LONG)
    os.makedirs("runs/t.checkpoints/fold-1-of-2")
    kapsi(*LONG, "--resume")
    assert os.listdir("runs") == ["t"]


@pytest.mark.parametrize("output", [("--output", "runs/t"), ()])
def test_a_kill_between_the_last_rename_and_the_removal_of_checkpoints(output, capsys, monkeypatch) -> None:
    from kapsi.training.checkpoint import Checkpoints

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "remove", lambda self: None)  # as if killed there
        kapsi(*LONG, *output, "--checkpoint-steps", "2")
    first = {path.name: path.read_bytes() for path in Path("runs/t").iterdir()}
    assert Path("runs/t.checkpoints/finished.txt").is_file()
    shutil.copytree("runs", "copy")
    # To continue finished work is no error and changes nothing but the time stamp.
    kapsi(*LONG, *output, "--checkpoint-steps", "2", "--resume")
    second = {path.name: path.read_bytes() for path in Path("runs/t").iterdir()}
    assert os.listdir("runs") == ["t"]
    first["run.json"], second["run.json"] = (
        {**json.loads(files["run.json"]), "created": ""} for files in (first, second)
    )
    assert first == second
    # Without --resume what is left is removed, and the run is in the way as any other.
    shutil.rmtree("runs")
    os.rename("copy", "runs")
    if output:
        capsys.readouterr()
        kapsi(*LONG, *output, code=2)
        assert "a run is already there" in capsys.readouterr().err
        assert os.listdir("runs") == ["t"]
        kapsi(*LONG, *output, "--overwrite")


def test_resuming_a_complete_run_changes_nothing(capsys) -> None:
    kapsi(*LONG, "--output", "run")
    first = capsys.readouterr().out.splitlines()[-1]
    before = Path("run/run.json").read_bytes()
    kapsi(*LONG, "--output", "run", "--resume")
    captured = capsys.readouterr()
    assert captured.err == "note: run: this run is complete already, nothing is left to resume\n"
    assert captured.out.splitlines() == ["run folder: run (30 rows)", first]
    assert Path("run/run.json").read_bytes() == before
    for other in (("--seed", "1"), ("--set", "training.epochs=6")):
        kapsi(*LONG, "--output", "run", "--resume", *other, code=2)
        assert "a run is already there" in capsys.readouterr().err
    write_table("t.csv", rows(2.0))
    kapsi(*LONG, "--output", "run", "--resume", code=2)


def test_another_finished_run_is_not_replaced_by_resuming(capsys, monkeypatch) -> None:
    from kapsi.training.checkpoint import Checkpoints

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "remove", lambda self: None)
        kapsi(*LONG, "--output", "run", "--checkpoint-steps", "2")
    os.rename("run.checkpoints", "c")
    kapsi(*LONG, "--seed", "1", "--output", "run", "--overwrite")
    os.rename("c", "run.checkpoints")
    capsys.readouterr()
    kapsi(*LONG, "--output", "run", "--resume", code=2)
    assert "a run is already there" in capsys.readouterr().err


def test_a_second_fit_says_where_it_writes(capsys) -> None:
    fit = ("fit", "t.csv", "--target", "y", "--set", "training.l2=0.01")
    kapsi(*fit)
    assert "earlier run" not in capsys.readouterr().err
    kapsi(*fit)
    captured = capsys.readouterr()
    assert "note: runs/t is an earlier run; this run is runs/t-2\n" in captured.err
    assert "run folder: runs/t-2 (" in captured.out
    kapsi(*fit, "--overwrite")
    captured = capsys.readouterr()
    assert "earlier run" not in captured.err
    assert "replaced" not in captured.err
    assert "run folder: runs/t (" in captured.out
    assert sorted(os.listdir("runs")) == ["t", "t-2"]


def test_a_replaced_run_of_another_table_of_the_same_name_is_named(tmp_path) -> None:
    old = {
        "format": "kapsi run",
        "table": "data.csv",
        "rows": 30,
        "target": ["y"],
        "table_sha256": "1",
        "created": "now",
    }
    (tmp_path / "run.json").write_text(json.dumps(old))
    facts = "(data.csv, 30 rows, target ['y'], now)"
    for digest, target, other in (("1", ("y",), ""), ("2", ("y",), "table, or of other rows"), ("1", "y", "target")):
        notes = fitting._notes_on_replaced(tmp_path, SimpleNamespace(digest=digest, target=target))
        assert len(notes) == bool(other)
        assert all(note.endswith(facts) and f"the replaced run was of another {other}" in note for note in notes)


# ------------------------------------------------------------------------------------------------ limits


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"widths: [{'2, ' * 10_000}2]", "widths: 10,001 items; at most 4,097 are allowed"),
        (f"widths: [2, 2]\nlayers: [{{heads: [{'{}, ' * 5_000}]}}]", "layers[0].heads: 5,000 items; at most 4,096"),
        (f"widths: [{'2, ' * 3_000}2]\nlayers: {{heads: [{{}}, {{}}]}}", "6,000 heads in all layers, at most 4,096"),
        (f"widths: [2, 2]\nname: {'x' * 1_000_001}", "a specification has at most 1,000,000"),
        ("widths: [2, 2]\nlayers: {heads: {channels: 2000000}}", "at most 1048576"),
    ],
)
def test_wide_specifications_are_refused(text, message, capsys) -> None:
    Path("spec.yaml").write_text(text, encoding="utf-8")
    kapsi("info", "spec.yaml", code=2)
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


# ------------------------------------------------------------------------------------------------ the process


def test_version_and_help_load_neither_torch_nor_numpy() -> None:
    code = "import sys; from kapsi.cli import main; code = main(sys.argv[1:]); "
    code += "assert code == int(sys.argv[1] == '--nonsense') * 2; "
    code += "assert not {'torch', 'numpy', 'pyarrow', 'sklearn'} & set(sys.modules)"
    for words in (["--version"], ["--help"], ["fit", "--help"], ["reproduce", "--help"], ["--nonsense"]):
        done = subprocess.run([sys.executable, "-c", code, *words], env=ENVIRONMENT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_importing_kapsi_loads_nothing_and_its_names_everything() -> None:
    code = (
        "import sys, kapsi; assert 'torch' not in sys.modules and 'Taylor' in dir(kapsi) and 'torch' in sys.modules\n"
        "from kapsi import *; assert kapsi.Taylor is Taylor and kapsi.spec.ModelSpec is ModelSpec\n"
        "try: kapsi.nonsense\nexcept AttributeError as error: assert str(error) == \"module 'kapsi' has no attribute 'nonsense'\""
    )
    assert process(f'{sys.executable} -c "$CODE"'.replace("$CODE", code.replace('"', '\\"'))).stderr == b""


@pytest.mark.slow  # a process of its own
def test_modules_do_not_hide_functions_of_the_same_name() -> None:
    modules = {path.stem for path in (SOURCE / "kapsi").iterdir()} & set(kp.__all__)
    assert sorted(name for name in modules if callable(getattr(kp, name))) == sorted(kp.FUNCTIONS)
    code = "import kapsi.calibrate, kapsi; print(callable(kapsi.calibrate), callable(kapsi.refine), callable(kapsi.explain))"
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True True True\n", "")


def test_a_single_module_knows_the_whole_catalogue() -> None:
    code = "from kapsi.function import coerce, catalogue; from kapsi.process import Process; "
    code += "print(coerce(Process, 'layer_norm', 'x').name, len(catalogue('loss')) > 5)"
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("layer_norm True\n", "")


@pytest.mark.parametrize(
    "closed",
    [
        "<&- >&- 2>&-",
        *(pytest.param(closed, marks=pytest.mark.slow) for closed in ("2>&-", "<&- 2>&-", "<&-", "2>/dev/full")),
    ],
)
def test_closed_streams_do_not_stop_a_fit(closed) -> None:
    done = process(f"KAPSI fit t.csv --target y --head constant --no-report --output run {closed}")
    assert done.returncode == 0
    assert (b"run folder: run" in done.stdout) == (">&- 2" not in closed or closed.startswith("<&- 2"))
    load_run("run")  # nothing was written into its files instead of the closed stream
    assert sorted(os.listdir()) == ["run", "t.csv"]


def test_an_unwritable_standard_error_loses_messages_only(monkeypatch) -> None:
    def full(text: str, *, err: bool = False) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(common.typer, "echo", full)
    common.note("lost")
    with pytest.raises(OSError, match="No space"):
        common.say("kept")


def test_a_failure_with_closed_streams_has_its_exit_code() -> None:
    assert process("KAPSI fit nothing.csv --target y 2>&-").returncode == 2


def _started(*words: str) -> subprocess.Popen[bytes]:
    def listen() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.Popen(
        [sys.executable, "-m", "kapsi", *words], env=ENVIRONMENT, stdout=-1, stderr=-1, preexec_fn=listen
    )


@pytest.mark.parametrize(
    ("module", "number", "code"),
    [
        ("torch", signal.SIGINT, 130),
        *(
            pytest.param(module, number, code, marks=pytest.mark.slow)
            for module in ("typer", "torch", "torch.nn", "pyarrow", "sklearn.linear_model")
            for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143))
            if (module, code) != ("torch", 130)
        ),
    ],
)
def test_signals_while_modules_are_imported(module, number, code) -> None:
    """The signal arrives in the middle of the import of a module: one exit code, no traceback, nothing left."""
    program = (
        "import sys, signal, importlib.abc\n"
        "class Finder(importlib.abc.MetaPathFinder):\n"
        f"    def find_spec(self, name, path, target=None):\n        if name == {module!r}: signal.raise_signal({int(number)})\n"
        "sys.meta_path.insert(0, Finder()); signal.signal(2, signal.default_int_handler)\n"
        "sys.argv = ['kapsi', 'fit', 't.csv', '--target', 'y', '--output', 'run', '--set', 'training.l2=0.01']\n"
        "from kapsi.cli import run\nrun()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True)
    assert (done.returncode, done.stdout) == (code, b"")
    assert all(line.startswith(b"note: fitting") for line in done.stderr.splitlines())
    assert set(os.listdir()) <= {"t.csv", "run.checkpoints"}  # the last module is imported after a fit


def test_a_demo_says_something_at_once() -> None:
    with _started("demo") as child:
        line = child.stderr.readline()
        child.send_signal(signal.SIGTERM)
        child.communicate()
    assert line == b"note: fitting 1,372 rows, 6 times; progress is shown on a terminal only\n"
    assert child.returncode == 143
    assert os.listdir() == ["t.csv"]


def test_a_fit_says_something_when_it_begins(capsys, monkeypatch) -> None:
    from kapsi.cli import common

    for delay, first in ((0.0, "note: fitting 30 rows of t.csv; progress is shown on a terminal only\n"), (np.inf, "")):
        monkeypatch.setattr(common, "DELAY", delay)
        kapsi("fit", "t.csv", "--target", "y", "--set", "training.l2=0.01", "--output", "run", "--overwrite")
        assert capsys.readouterr().err == first
    monkeypatch.setattr(common, "DELAY", 0.0)
    shutil.copy("t.csv", "v.csv")
    kapsi("fit", "t.csv", "--target", "y", "--set", "training.l2=0.01", "--output", "v", "--validation", "v.csv")
    assert "note: fitting 30 rows of t.csv;" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ runs in Python


def test_a_run_predicts_frames_of_all_kinds_as_the_command_does() -> None:
    pandas = pytest.importorskip("pandas")
    labels = ["yes" if value > 0 else "no" for value in rows()["y"]]
    columns = {"a": rows()["a"], "b": rows()["b"], "c": [["u", "v", None][i % 3] for i in range(30)]}
    columns["b"][3] = None
    write_table("c.csv", {**columns, "label": labels})
    fit_table("c.csv", RunConfig(TableConfig("label"), None, kp.TrainConfig(l2=0.01)), "c")
    run = kp.load_run("c")
    kapsi("predict", "c", "c.csv", "--output", "o.csv")
    written = read_table("o.csv").columns
    frame = pandas.DataFrame(columns, index=range(100, 130))
    frames = [
        columns,
        frame,
        frame.astype({"c": "category"}),
        pa.table(columns),
        {**columns, "b": np.array(columns["b"], float)},
    ]
    for given in frames:
        assert run.predict(given).tolist() == written["prediction"].values.tolist()
        probabilities = run.predict_proba(given)
        np.testing.assert_allclose(probabilities[:, 0], written["probability_no"].numbers, rtol=1e-12)
        np.testing.assert_allclose(probabilities.sum(1), 1)
    assert run.model.classes == ("no", "yes")
    assert run.manifest["rows"] == 30


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ([[1.0, 2.0]], "expected a data frame of pandas, polars or pyarrow, or a dictionary of arrays"),
        ({"a": [1.0]}, "missing columns: 'b'"),
        ({"a": [1.0], "b": ["x"]}, "column 'b': 0 of 1 values are numbers; not: 'x'"),
        ({"a": [1.0], "b": [1.0, 2.0]}, "the frame cannot be read"),
        ({"a": [], "b": []}, "has no rows"),
        ({}, "no rows or no columns"),
        ({"a": [1, "x"], "b": [1, 2]}, "the frame cannot be read"),
        ({"a": [float("inf")], "b": [1.0]}, "column 'a' has inf"),
    ],
)
def test_frames_that_do_not_fit_are_refused(run, frame, message) -> None:
    with pytest.raises(kp.DataError, match=message) as error:
        kp.load_run("run").predict(frame)
    assert str(error.value).startswith("predict: ")


def test_a_regression_has_no_probabilities(run) -> None:
    with pytest.raises(kp.DataError, match="is a regression"):
        kp.load_run("run").predict_proba(rows())
    predicted = kp.load_run("run").predict(rows())
    assert predicted.shape == (30,)
    assert np.corrcoef(predicted, rows()["y"])[0, 1] > 0.99


def test_collections_leave_modules_alone(monkeypatch) -> None:
    """A process that runs one command; a process that has loaded torch before has objects of its own."""
    frozen = []
    monkeypatch.setattr(app.gc, "freeze", lambda: frozen.append(True))
    monkeypatch.setattr(app, "load_own", lambda: None)
    monkeypatch.setattr(app, "_raise_on_signals", lambda: None)

    def command() -> None:
        """Do nothing."""

    app._loading(command)()
    assert frozen == []
    monkeypatch.delitem(sys.modules, "torch")
    app._loading(command)()
    assert frozen == [True]
