"""Logs of epochs: what is in them, numbers that are not finite, resuming, files that were cut off."""

from __future__ import annotations

import builtins
import csv
import io
import json
import math
import sys
import warnings

import pytest

from kapsi.errors import FileError, SpecError
from kapsi.training.logs import CsvLog, JsonLines, TensorBoard
from kapsi.training.records import Epoch

NAN, INF = float("nan"), float("inf")


def epoch_of(number, loss=0.1234567890123456789, **fields):
    return Epoch(number, loss, metrics={"accuracy": 0.5}, seconds=1.5, learning_rate=1e-3, **fields)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows_of(path):
    with open(path, newline="") as handle:
        return list(csv.DictReader(handle))


def points_of(folder):
    """Return {tag: {step: value}} as TensorBoard shows them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: {e.step: e.value for e in found.Scalars(tag)} for tag in found.Tags()["scalars"]}


# ------------------------------------------------------------------------------------------------ JSON lines


def test_json_lines_have_all_of_a_record(tmp_path) -> None:
    path = tmp_path / "new" / "log.jsonl"
    epochs = [epoch_of(1), epoch_of(2, validation_loss=0.25, best=True, details={"damping": 1e-30}, ended="it is over")]
    with JsonLines(path) as log:
        for i, epoch in enumerate(epochs, 1):
            log(epoch)
            assert len(lines_of(path)) == i  # it is there before the file is closed
    assert [Epoch(**line) for line in lines_of(path)] == epochs


def test_numbers_that_json_lacks_are_null(tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    with JsonLines(path) as log:
        log(Epoch(1, NAN, INF, metrics={"r2": -INF, "rmse": 2.0}, details={"damping": NAN}))
    line = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert line["loss"] is line["validation_loss"] is line["metrics"]["r2"] is line["details"]["damping"] is None
    assert line["metrics"]["rmse"] == 2


def test_an_open_file_is_left_open() -> None:
    handle = io.StringIO()
    with JsonLines(handle) as log:
        log(epoch_of(1))
    assert json.loads(handle.getvalue())["number"] == 1
    with pytest.raises(FileError, match="is closed"):
        log(epoch_of(2))


@pytest.mark.parametrize("keep", [0, 1, 3, 5, 9])
def test_json_lines_go_on_after_an_epoch(tmp_path, keep) -> None:
    path = tmp_path / "log.jsonl"
    with JsonLines(path) as log:
        for number in range(1, 6):
            log(epoch_of(number))
    old = path.read_bytes().splitlines(keepends=True)
    with JsonLines(path) as log:
        assert path.read_bytes() == b"".join(old)
        log(epoch_of(keep + 1, 0.5))
    assert path.read_bytes().startswith(b"".join(old[:keep]))
    assert [line["number"] for line in lines_of(path)] == [*range(1, min(keep, 5) + 1), keep + 1]
    assert lines_of(path)[-1]["loss"] == 0.5


@pytest.mark.parametrize("cut", [1, 2, 40, -1])
def test_a_line_that_was_cut_off_is_taken_out(tmp_path, cut) -> None:
    path = tmp_path / "log.jsonl"
    with JsonLines(path) as log:
        for number in range(1, 4):
            log(epoch_of(number))
    whole = path.read_bytes()
    start = len(b"".join(whole.splitlines(keepends=True)[:2]))
    end = start + cut if cut > 0 else len(whole) - 1
    path.write_bytes(whole[:end])
    with JsonLines(path) as log:
        log(epoch_of(4))
    # Of a last line only the end may be missing, which changes nothing of what it says.
    assert [line["number"] for line in lines_of(path)] == ([1, 2, 4] if cut > 0 else [1, 2, 3, 4])


def test_damaged_lines_are_removed(tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(
        b'\xff\xfe\x00\n[1]\n"text"\n\n{"number": "1"}\n{"number": 1}\n{"loss": 1}\n' + b"[" * 100_000 + b"\n"
    )
    with JsonLines(path) as log:
        log(epoch_of(2))
    assert path.read_bytes().startswith(b'{"number": 1}\n{"number": 2,')


# ------------------------------------------------------------------------------------------------ CSV


def test_a_row_has_the_columns_of_the_first_record(tmp_path) -> None:
    path = tmp_path / "new" / "log.csv"
    with CsvLog(path) as log:
        log(epoch_of(1, details={"damping": 0.5, "loss": 7.0, "accuracy": 9.0}))
        assert len(rows_of(path)) == 1
        log(
            Epoch(
                2,
                NAN,
                INF,
                best=True,
                metrics={"other": 3.0},
                learning_rate=-INF,
                details={"damping": 1e-300, "new": 1.0},
            )
        )
    first, second = rows_of(path)
    names = ["number", "loss", "validation_loss", "best", "accuracy", "seconds", "learning_rate", "damping"]
    assert list(first) == [*names, "details.loss", "details.accuracy"]
    assert float(first["loss"]) == 0.1234567890123456789
    assert first["validation_loss"] == second["accuracy"] == second["details.loss"] == ""
    assert (first["accuracy"], first["details.loss"], first["details.accuracy"]) == ("0.5", "7.0", "9.0")
    assert math.isnan(float(second["loss"]))
    assert float(second["validation_loss"]) == INF
    assert float(second["learning_rate"]) == -INF
    assert float(second["damping"]) == 1e-300
    assert (first["best"], second["best"]) == ("False", "True")


@pytest.mark.parametrize("keep", [0, 1, 3, 9])
def test_csv_goes_on_after_an_epoch_with_its_columns(tmp_path, keep) -> None:
    path = tmp_path / "log.csv"
    with CsvLog(path) as log:
        for number in range(1, 6):
            log(epoch_of(number))
    old = path.read_bytes().splitlines(keepends=True)
    with CsvLog(path) as log:
        assert path.read_bytes() == b"".join(old)
        log(Epoch(keep + 1, 0.5, metrics={"r2": 0.9}))
    assert path.read_bytes().startswith(b"".join(old[: keep + 1] if keep else []))
    rows = rows_of(path)
    assert [int(row["number"]) for row in rows] == [*range(1, min(keep, 5) + 1), keep + 1]
    if keep:
        assert "r2" not in rows[-1]
        assert rows[-1]["accuracy"] == ""
    else:
        assert rows[-1]["r2"] == "0.9"


@pytest.mark.parametrize("missing", [1, 2, 5, 12])
def test_a_row_that_was_cut_off_is_taken_out(tmp_path, missing) -> None:
    path = tmp_path / "log.csv"
    with CsvLog(path) as log:
        for number in range(1, 4):
            log(epoch_of(number))
    path.write_bytes(path.read_bytes()[:-missing])
    with CsvLog(path) as log:
        log(epoch_of(4))
    # Also where nothing but the end of the line is missing: its last number could have been longer.
    assert [row["number"] for row in rows_of(path)] == ["1", "2", "4"]


@pytest.mark.parametrize("content", [b"", b"number,lo", b"a,b\n1,2\n", b"\xff\xfe\n", b"number,loss\n"])
def test_a_file_without_rows_begins_anew(tmp_path, content) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(content)
    with CsvLog(path) as log:
        log(epoch_of(3))
    assert [row["accuracy"] for row in rows_of(path)] == ["0.5"]


# ------------------------------------------------------------------------------------------------ TensorBoard


def test_tensorboard_shows_curves(tmp_path, capfd) -> None:
    pytest.importorskip("tensorboard")
    with TensorBoard(tmp_path / "new") as log:
        log(epoch_of(1, validation_loss=0.75, details={"damping": 0.5}))
        assert points_of(tmp_path / "new")["loss/training"].keys() == {1}
        log(Epoch(2, NAN, INF, metrics={"accuracy": 0.25}))
    points = points_of(tmp_path / "new")
    assert points == {
        "loss/training": {1: pytest.approx(0.1234567890)},
        "loss/validation": {1: 0.75},
        "metrics/accuracy": {1: 0.5, 2: 0.25},
        "solver/learning_rate": {1: pytest.approx(1e-3)},
        "solver/damping": {1: 0.5},
        "time/seconds": {1: 1.5, 2: 0.0},
    }
    assert capfd.readouterr() == ("", "")
    with pytest.raises(FileError, match="is closed"):
        log(epoch_of(3))


def test_tensorboard_goes_on_after_an_epoch(tmp_path) -> None:
    pytest.importorskip("tensorboard")
    for keep, numbers in ((0, range(1, 6)), (2, range(3, 5))):
        with TensorBoard(tmp_path) as log:
            for number in numbers:
                log(epoch_of(number, loss=float(number) if keep == 0 else -float(number)))
    assert points_of(tmp_path)["loss/training"] == {1: 1, 2: 2, 3: -3, 4: -4}


def test_a_missing_package_is_named(tmp_path, monkeypatch) -> None:
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "tensorboard":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    for name in list(sys.modules):
        if name.startswith(("tensorboard", "torch.utils.tensorboard")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SpecError, match=r"pip install kapsi\[tensorboard\]"):
        TensorBoard(tmp_path)


@pytest.mark.parametrize("kind", [JsonLines, CsvLog, TensorBoard])
def test_a_place_that_cannot_be_written(tmp_path, kind) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileError, match="cannot write the log"):
        kind(tmp_path / "file" / "log")
    if kind is not TensorBoard:
        with pytest.raises(FileError):
            kind(tmp_path)


@pytest.mark.parametrize("kind", [JsonLines, CsvLog, TensorBoard])
@pytest.mark.parametrize("where", [None, 3])
def test_a_log_goes_to_a_path(kind, where) -> None:
    with pytest.raises((FileError, SpecError), match="expected"):
        kind(where)
