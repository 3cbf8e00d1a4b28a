"""Reading, typing, preparing and writing tables."""

from __future__ import annotations

import datetime
import decimal
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import kapsi
from kapsi.data.tabular import (
    CategoryColumn,
    Column,
    NumberColumn,
    Preprocessing,
    Reading,
    Table,
    TargetScale,
    folds,
    make_problem,
    read_table,
    source,
    split,
    target_of,
    write_table,
)
from kapsi.data.tabular.words import MISSING_WORDS, WEAK_WORDS
from kapsi.errors import FileError, TableError

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def number(*values, kind="real"):
    return Column(kind, np.array([np.nan if value is None else value for value in values], dtype=float))


def text(*values):
    return Column("text", np.array([*values, None], dtype=object)[:-1])


def table(**columns):
    return Table("t.csv", columns)


def saved(folder, content, name="t.csv"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(folder, content, name="t.csv"):
    return read_table(saved(folder, content, name))


def values(column):
    return [None if value is None or value != value else value for value in column.values.tolist()]


def refusal(call, *wanted, kind=TableError):
    """Return the message of the error that the call raises, one line that holds the wanted texts."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    for part in wanted:
        assert part in message
    return message


# ---------------------------------------------------------------- reading CSV


def test_columns_are_typed_over_all_rows(tmp_path):
    got = read(tmp_path, "i,r,b,t,x\n 1 ,1,TRUE,a,12\n-2,.5,false, b,12;5\n+3,1e3,True,,\nNA,5.,?,c,13\n")
    assert {name: column.kind for name, column in got.columns.items()} == {
        "i": "integer",
        "r": "real",
        "b": "boolean",
        "t": "text",
        "x": "text",
    }
    assert values(got.columns["i"]) == [1.0, -2.0, 3.0, None]
    assert values(got.columns["r"]) == [1.0, 0.5, 1000.0, 5.0]
    assert values(got.columns["b"]) == [1.0, 0.0, 1.0, None]
    assert values(got.columns["t"]) == ["a", "b", None, "c"]
    assert values(got.columns["x"]) == ["12", "12;5", None, "13"]
    assert got.name == "t.csv"
    assert got.rows == 4
    assert got.columns["t"].missing.tolist() == [False, False, True, False]
    assert got.columns["i"].missing.tolist() == [False, False, False, True]


@pytest.mark.parametrize("word", ["", "NA", "N/A", "#N/A", "NaN", "nan", "null", "NULL", "None", "none", "?", " NA "])
def test_missing_words(tmp_path, word):
    got = read(tmp_path, f"a,b\n1,x\n{word},{word}\n")
    assert got.columns["a"].kind == "integer"
    assert values(got.columns["a"]) == [1.0, None]
    assert values(got.columns["b"]) == ["x", None]


@pytest.mark.parametrize("word", ["0x10", "one", "1 2", "--1", "1e", "e5", "1.2.3", "5%"])
def test_words_that_are_no_numbers_make_text(tmp_path, word):
    got = read(tmp_path, f"a\tb\n1\t2\n{word}\t3\n", "t.tsv")
    assert values(got.columns["a"]) == ["1", word]
    assert got.columns["b"].kind == "integer"


@pytest.mark.parametrize("word", ["inf", "-inf", "Infinity", "+INF", "1e999"])
def test_infinities_are_real(tmp_path, word):
    column = read(tmp_path, f"a\n1\n{word}\n").columns["a"]
    assert column.kind == "real"
    assert np.isinf(column.numbers[1])


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        (str(2**63 - 1), "integer"),
        (f"+{2**63 - 1}", "integer"),
        (str(-(2**63)), "integer"),
        (str(2**63), "real"),
        ("1" * 40, "real"),
        ("1.0", "real"),
        ("1e2", "real"),
    ],
)
def test_integers_end_at_int64(tmp_path, word, kind):
    codes = read(tmp_path, f"a\n{word}\n1\n").columns["a"]
    if len(word) > 16:  # digits that float64 has not
        assert codes.values.tolist() == [word, "1"]
        assert "--numeric" in codes.notes[0]
    column = read_table(tmp_path / "t.csv", Reading(numeric=("a",))).columns["a"]
    assert column.kind == kind
    assert column.numbers.tolist() == [float(word), 1.0]


def test_an_all_missing_column_is_real(tmp_path):
    column = read(tmp_path, "a,b\n,1\nNA,2\n").columns["a"]
    assert column.kind == "real"
    assert values(column) == [None, None]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_delimiters_quotes_and_bom(tmp_path, delimiter, bom, end):
    rows = ['"a, ""b""; | \t c"', "é"], ["1", f'"x{delimiter}\n""y"""'], ["2", "z"]
    got = read(tmp_path, bom + end.join(delimiter.join(row) for row in rows).encode() + b"\n\n")
    assert list(got.columns) == ['a, "b"; | \t c', "é"]
    assert values(got.columns["é"]) == [f'x{delimiter}\n"y"', "z"]


def test_stray_quotes_are_kept(tmp_path):
    got = read(tmp_path, 'a,b\n5" disk,"two\nlines"\n')
    assert values(got.columns["a"]) == ['5" disk']
    assert values(got.columns["b"]) == ["two\nlines"]


def test_blank_lines_are_no_rows_and_blanks_around_names_are_left_out(tmp_path):
    got = read(tmp_path, "\n, a ,\n\n0,1,x\n1,2,y\n\n")
    assert list(got.columns) == ["column 1", "a", "column 3"]
    assert values(got.columns["column 3"]) == ["x", "y"]


def test_a_lone_column_keeps_quoted_missing_values(tmp_path):
    assert values(read(tmp_path, 'a\n1\n""\n3\n').columns["a"]) == [1.0, None, 3.0]


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"", ["t.csv", "empty"]),
        (b" \n\r\n\t\n", ["t.csv", "empty"]),
        (b"\xef\xbb\xbf\n", ["t.csv", "empty"]),
        (b"a,b\n", ["t.csv", "header but no rows"]),
        (b"a,b", ["t.csv", "header but no rows"]),
        ("a,b\n1,2\n".encode("utf-16-le"), ["t.csv", "NUL", "--encoding utf-16-le"]),
        (b'a,b\n1,"x\ny"\n\n1,2,3\n', ["t.csv", "line 5 has 3 values", "header has 2"]),
        (b"a,b\n1\n", ["t.csv", "line 2 has 1 value,", "header has 2"]),
        (b'a,b\n"' + b"x" * 200_000 + b'",2,3\n', ["t.csv", "line 2 has 3 values"]),
        (b'"' + b"x" * 200_000 + b'",b\n1\n', ["t.csv", "line 2 has 1 value, the header has 2"]),
        (b'a,b\n1,"x\n2,y\n3,z\n', ["t.csv", "quote is opened and never closed", "'x'"]),
    ],
)
def test_bad_csv_is_refused(tmp_path, content, wanted):
    refusal(lambda: read(tmp_path, content), *wanted)


def test_a_long_name_with_line_breaks_is_shown_on_one_line(tmp_path):
    name = "two\nlines" * 30
    twice = read(tmp_path, f'"{name}","{name}"\n1,2\n')
    message = refusal(lambda: twice.use(twice.columns), "two\\nlines", "same name")
    assert len(message) < 250


def test_paths_are_checked(tmp_path, monkeypatch):
    refusal(lambda: read_table(tmp_path / "no.csv"), "no.csv", "no such file")
    (tmp_path / "folder.csv").mkdir()
    refusal(lambda: read_table(str(tmp_path / "folder.csv")), "folder.csv", "folder")
    refusal(
        lambda: read(tmp_path, "a\n1\n", "t.xls"), "t.xls", "'.xls'", ".csv, .txt, .tsv, .dat, .data, .parquet, .pq"
    )
    refusal(lambda: read(tmp_path, "a\n1\n", "t"), "suffix ''")
    assert read(tmp_path, "a\n1\n", "T.CSV").rows == 1

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    saved(tmp_path, "a\n1\n")
    monkeypatch.setattr(source, "open", denied, raising=False)
    refusal(lambda: read_table(tmp_path / "t.csv"), "t.csv", "cannot be read", "Permission denied")


# ---------------------------------------------------------------- reading Parquet


def test_parquet_types(tmp_path):
    when = datetime.datetime(2001, 9, 9, 1, 46, 40, 250000)
    columns = {
        "int8": (pa.array([1, None], pa.int8()), "integer", [1.0, None]),
        "uint64": (pa.array([1, 2**63], pa.uint64()), "text", ["1", str(2**63)]),
        "small": (pa.array([1, 2], pa.uint64()), "integer", [1.0, 2.0]),
        "float16": (pa.array([1.5, None], pa.float16()), "real", [1.5, None]),
        "float64": (pa.array([1.0, float("nan")]), "real", [1.0, None]),
        "decimal": (pa.array([decimal.Decimal("1.25"), None]), "real", [1.25, None]),
        "bool": (pa.array([True, None]), "boolean", [1.0, None]),
        "text": (pa.array(["NA", None]), "text", ["NA", None]),
        "large": (pa.array(["1", "2"], pa.large_string()), "text", ["1", "2"]),
        "words": (pa.array(["b", None]).dictionary_encode(), "text", ["b", None]),
        "codes": (pa.array([7, None]).dictionary_encode(), "integer", [7.0, None]),
        "date": (pa.array([datetime.date(1970, 1, 3), None]), "date", [172800.0, None]),
        "date64": (pa.array([datetime.date(1970, 1, 3), None], pa.date64()), "date", [172800.0, None]),
        "seconds": (pa.array([when.replace(microsecond=0), None], pa.timestamp("s")), "date", [1e9, None]),
        "zone": (pa.array([when, None], pa.timestamp("us", "UTC")), "date", [1e9 + 0.25, None]),
        "null": (pa.array([None, None]), "real", [None, None]),
        "no text": (pa.array([None, None], pa.string()), "real", [None, None]),
        "": (pa.array([1, 2]), "integer", [1.0, 2.0]),
    }
    pq.write_table(pa.table([c[0] for c in columns.values()], names=list(columns)), tmp_path / "t.pq")
    got = read_table(tmp_path / "t.pq")
    assert list(got.columns) == [*list(columns)[:-1], "column 18"]
    for column, (_, kind, wanted) in zip(got.columns.values(), columns.values(), strict=True):
        assert (column.kind, values(column)) == (kind, wanted)


@pytest.mark.parametrize(
    ("column", "shown"),
    [
        (pa.array([[1], [2]]), "list"),
        (pa.array([{"x": 1}]), "struct"),
        (pa.array([b"x"]), "binary"),
    ],
)
def test_parquet_types_without_meaning_are_refused(tmp_path, column, shown):
    pq.write_table(pa.table([column], names=["odd"]), tmp_path / "t.parquet")
    table = read_table(tmp_path / "t.parquet")
    refusal(lambda: table.use(["odd"]), "t.parquet", "'odd'", shown, "allowed")


def test_bad_parquet_is_refused(tmp_path):
    refusal(lambda: read(tmp_path, "a,b\n1,2\n", "t.parquet"), "t.parquet", "not readable as Parquet")
    refusal(lambda: read(tmp_path, b"", "t.parquet"), "t.parquet", "empty")
    pq.write_table(pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]), tmp_path / "d.parquet")
    twice = read_table(tmp_path / "d.parquet")
    refusal(lambda: twice.use(["a"]), "d.parquet", "'a'")
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), tmp_path / "e.parquet")
    refusal(lambda: read_table(tmp_path / "e.parquet"), "e.parquet", "no rows")
    pq.write_table(pa.table({"a": list(range(1000))}), tmp_path / "c.parquet")
    whole = (tmp_path / "c.parquet").read_bytes()
    refusal(lambda: read(tmp_path, whole[: len(whole) // 2], "c.parquet"), "c.parquet", "not readable as Parquet")


# ---------------------------------------------------------------- writing

cells_of_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
names = cells_of_text.map(lambda name: f"n{name}n")  # blanks at the ends are left out, and numbers are no names
trimmed = cells_of_text.filter(lambda word: word == word.strip(" \t\r\n\u00a0"))  # blanks around texts are left out
words = trimmed.filter(lambda word: word.strip().lower() not in (*MISSING_WORDS, *WEAK_WORDS))


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".txt", ".parquet"])
@quick
@given(data=st.data())
def test_what_is_written_reads_back(tmp_path, suffix, data):
    rows = data.draw(st.integers(1, 5))

    def column_of(cells):
        return st.lists(cells, min_size=rows, max_size=rows)

    wanted = {}
    for name in data.draw(st.lists(names, min_size=1, max_size=4, unique=True)):
        cells = data.draw(
            st.sampled_from(
                [st.floats(allow_nan=False), st.integers(-(2**53), 2**53), st.booleans(), st.none() | words]
            )
        )
        wanted[name] = data.draw(column_of(cells))
        if all(cell is None or isinstance(cell, str) for cell in wanted[name]):
            wanted[name][0] = "no number"  # else the reader may rightly find numbers in the text
    path = tmp_path / f"t{suffix}"
    write_table(path, wanted)
    got = read_table(path)
    assert list(got.columns) == list(wanted)
    for name, column in got.columns.items():
        kind = {str: "text", bool: "boolean", int: "integer", float: "real"}[type(wanted[name][0])]
        assert column.kind == kind
        assert values(column) == wanted[name]
    assert os.listdir(tmp_path) == [path.name]


def test_written_csv_is_plain(tmp_path):
    columns = {
        "x": np.array([0.1, np.nan]),
        "n": [np.int64(3), None],
        "b": np.array([True, False]),
        "t": np.array(["a", "b,c"], dtype=object),
    }
    write_table(tmp_path / "t.csv", columns)
    assert (tmp_path / "t.csv").read_text() == '"x","n","b","t"\n0.1,3,true,"a"\n,,false,"b,c"\n'
    write_table(tmp_path / "one.csv", {"x": [1, None, 2]})
    assert values(read_table(tmp_path / "one.csv").columns["x"]) == [1.0, None, 2.0]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "t.csv"
    path.write_text("old")

    def broken(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", broken)
    refusal(lambda: write_table(path, {"a": [1]}), "t.csv", "No space left", kind=FileError)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["t.csv"]


def test_bad_writes_are_refused(tmp_path):
    refusal(lambda: write_table(tmp_path / "t.doc", {"a": [1]}), "t.doc", "'.doc'", ".csv")
    refusal(lambda: write_table(tmp_path / "no" / "t.csv", {"a": [1]}), "t.csv", "folder", "does not exist")
    refusal(lambda: write_table(tmp_path / "t.csv", {"a": [1], "b": [1, 2]}), "t.csv", "same length")
    refusal(lambda: write_table(tmp_path / "t.csv", {}), "at least one column")
    refusal(lambda: write_table(tmp_path / "t.csv", {"a": ["\ud800"]}), "t.csv", "as CSV", "utf-8")
    refusal(lambda: write_table(tmp_path / "t.parquet", {"a": [1, "x"]}), "t.parquet", "Parquet")
    assert os.listdir(tmp_path) == []
    (tmp_path / "d.csv").mkdir()
    refusal(lambda: write_table(tmp_path / "d.csv", {"a": [1]}), "d.csv", "not a writable regular file", kind=FileError)
    assert os.listdir(tmp_path) == ["d.csv"]


# ---------------------------------------------------------------- problems

VARIED = number(*range(30))


@pytest.mark.parametrize(
    ("target", "classes"),
    [
        (text(*"bac" * 10), ("a", "b", "c")),
        (text(*(f"{i // 2:02}" for i in range(30))), tuple(f"{i:02}" for i in range(15))),
        (number(*[0, 1] * 15, kind="boolean"), (False, True)),
        (number(*[10, 9, -1] * 10, kind="integer"), (-1, 9, 10)),
        (number(*[*range(20), *range(10)], kind="integer"), tuple(range(20))),
        (number(*[*range(21), *range(9)], kind="integer"), None),
        (number(*[0.5, 1.5] * 15), None),
    ],
)
def test_the_task_follows_from_the_target(target, classes):
    problem = make_problem(table(x=VARIED, y=target), "y")
    assert problem.task == ("regression" if classes is None else "classification")
    assert problem.classes == classes
    if classes is None:
        assert problem.y.dtype == np.float64
        assert problem.y.tolist() == target.values.tolist()
    else:
        assert problem.y.dtype == np.int64
        assert [type(label) for label in problem.classes] == [type(classes[0])] * len(classes)
        assert [problem.classes[code] for code in problem.y] == target.values.tolist()
    assert list(problem.features.columns) == ["x"]
    assert problem.rows.tolist() == list(range(30))


def test_the_task_can_be_told():
    whole = table(x=VARIED, y=number(*[2.0, 1.0] * 15))
    auto = make_problem(whole, "y")
    assert auto.task == "regression"
    assert any("--task classification" in note and "'y'" in note for note in auto.notes)
    told = make_problem(whole, "y", task="classification")
    assert told.classes == (1, 2)
    assert [type(label) for label in told.classes] == [int, int]
    assert told.y.tolist() == [1, 0] * 15
    flags = table(x=VARIED, y=number(*[1, 0] * 15, kind="boolean"))
    assert make_problem(flags, "y", task="regression").y.tolist() == [1.0, 0.0] * 15
    many = table(x=VARIED, y=number(*range(30), kind="integer"))
    refusal(lambda: make_problem(many, "y", task="classification"), "'y'", "30 classes in 30 rows", "single row")
    few = table(x=VARIED, y=number(*[1, 2] * 15, kind="integer"))
    assert make_problem(few, "y", task="regression").classes is None
    half = table(x=VARIED, y=number(*[0.5, 1.0] * 15))
    refusal(lambda: make_problem(half, "y", task="classification"), "t.csv", "'y'", "0.5", "--task regression")
    huge = table(x=VARIED, y=number(*[2.0**60, 1.0] * 15, kind="integer"))
    refusal(lambda: make_problem(huge, "y"), "'y'", "2**53")
    words = table(x=VARIED, y=text(*"ab" * 15))
    refusal(lambda: make_problem(words, "y", task="regression"), "t.csv", "'y'", "text", "--task classification")
    refusal(lambda: make_problem(words, "y", task="cluster"), "'cluster'", "'auto', 'classification', 'regression'")


def test_rows_without_target_are_dropped_or_refused():
    y = number(*[*range(28), None, None], kind="real")
    y = Column("real", np.roll(y.values, 5))
    problem = make_problem(table(x=VARIED, y=y), "y")
    assert problem.rows.tolist() == [0, 1, 2, *range(5, 30)]
    assert problem.features.columns["x"].values.tolist() == [0, 1, 2, *range(5, 30)]
    assert problem.y.tolist() == y.values[problem.rows].tolist()
    assert any("2 of 30 rows" in note and "row 4" in note for note in problem.notes)
    refusal(
        lambda: make_problem(table(x=VARIED, y=y), "y", strict=True), "t.csv", "'y'", "2 of 30 rows", "first in row 4"
    )
    assert make_problem(table(x=VARIED, y=number(*range(30))), "y", strict=True).notes == ()
    nothing = table(x=number(1, 2), y=number(None, None))
    refusal(lambda: make_problem(nothing, "y"), "'y'", "missing in every row")


def test_targets_that_cannot_be_learned_are_refused():
    def of(y, name="y", x=VARIED, **more):
        return lambda: make_problem(Table("t.csv", {"x": x, "y": y}), name, **more)

    refusal(of(VARIED, "Y"), "t.csv", "'Y' is not a column", "nearest: 'y'", "'x', 'y'")
    refusal(of(number(*range(29), np.inf)), "t.csv", "'y'", "inf", "row 30")
    refusal(of(text(*"a" * 30)), "'y'", "one class 'a'")
    refusal(of(number(*[7] * 30, kind="integer")), "'y'", "one class 7")
    refusal(of(number(*[7] * 30)), "'y'", "7.0 in every row")
    many = text(*(f"label {i}" for i in range(1001)))
    refusal(of(many, x=number(*range(1001))), "'y'", "1001 classes", "at most 1000")
    refusal(of(VARIED, drop=["z"]), "'z' is not a column", "'x', 'y'")
    refusal(of(VARIED, drop=["y"]), "'y'", "both the target and to be dropped")
    wide = Table("t.csv", {f"c{i}": VARIED for i in range(99)})
    assert "and 89 more" in refusal(lambda: make_problem(wide, "target"), "'target'")


def test_a_class_with_one_row_is_noted():
    problem = make_problem(table(x=VARIED, y=text(*"ab" * 14, "odd", "a")), "y")
    assert problem.notes == ("classes of 'y' with a single row: 'odd'",)


def test_columns_without_use_are_dropped_with_a_note():
    columns = {
        "x": VARIED,
        "name": text(*(f"n{i}" for i in range(29)), None),
        "color": text(*["red", "blue", None] * 10),
        "same": number(*[3] * 30),
        "word": text(*["w"] * 30),
        "given or not": number(*[3, None] * 15),
        "remark": text("late", *[None] * 29),
        "number": number(*range(30), kind="integer"),
        "gone": number(*[np.inf] * 30),
        "y": number(*range(30)),
    }
    problem = make_problem(Table("t.csv", columns), "y", drop=["gone"])
    assert list(problem.features.columns) == ["x", "color", "given or not", "remark", "number"]
    dropped = [note for note in problem.notes if note.startswith("dropped")]
    for note, name in zip(dropped, ["'name'", "'same'", "'word'"], strict=True):
        assert name in note
    refusal(lambda: make_problem(table(same=columns["same"], y=VARIED), "y"), "no feature column is left", "'same'")
    refusal(lambda: make_problem(table(y=VARIED), "y"), "no feature column is left")


@pytest.mark.parametrize(("different", "kept"), [(50, True), (51, False)])
def test_text_with_too_many_values_identifies_rows(different, kept):
    repeated = text(*(f"w{i % different}" for i in range(55)))
    problem = make_problem(table(x=number(*range(55)), w=repeated, y=number(*range(55))), "y")
    assert ("w" in problem.features.columns) == kept


def test_text_may_have_many_values_when_rows_are_many():
    repeated = text(*(f"w{i % 90}" for i in range(100)))
    problem = make_problem(table(w=repeated, y=number(*range(100))), "y")
    assert "w" in problem.features.columns
    assert any(
        "'w' has 90 categories, more than 50; its input is the mean of the target in each" in note
        for note in problem.notes
    )


def test_features_that_cannot_be_used_are_refused():
    x = number(*[1, None, None], kind="real")
    y = number(None, 1.5, 2.5)
    data = table(x=x, z=number(1, 2, 3), w=text("a", None, None), y=y)
    problem = make_problem(data, "y")
    assert list(problem.features.columns) == ["z"]
    assert {f"dropped the column {name!r}: it has no values" for name in "xw"} <= set(problem.notes)
    refusal(lambda: make_problem(data, "y", required=["w"]), "t.csv", "'w'", "no value in any used row")
    refusal(lambda: make_problem(data, "y", drop=["z"]), "t.csv", "no feature column is left")
    infinite = table(x=number(1, 2, -np.inf), y=y)
    refusal(lambda: make_problem(infinite, "y"), "t.csv", "'x'", "-inf", "row 3")


# ---------------------------------------------------------------- evaluating


def test_target_of_codes_as_the_problem_did(tmp_path):
    for content in ("x,y\n1,b\n2,a\n3,\n4,b\n", "x,y\n1,1\n2,0\n3,\n4,1\n", "x,y\n1,true\n2,FALSE\n3,\n4,True\n"):
        data = read(tmp_path, content)
        problem = make_problem(data, "y")
        got = target_of(data, "y", problem.task, problem.classes)
        assert got.dtype == np.int64
        assert got.tolist() == [1, 0, -1, 1]
        assert got[problem.rows].tolist() == problem.y.tolist()
    got = target_of(table(y=number(1.5, None)), "y", "regression", None)
    np.testing.assert_array_equal(got, [1.5, np.nan])


def test_target_of_matches_labels_across_types():
    assert target_of(table(y=number(1, 3, kind="integer")), "y", "classification", ("01", "3", "x")).tolist() == [0, 1]
    assert target_of(table(y=number(1.0, 3.0)), "y", "classification", (1, 3)).tolist() == [0, 1]
    assert target_of(table(y=text("1", " 3.0", None)), "y", "classification", (1, 3)).tolist() == [0, 1, -1]
    assert target_of(table(y=text("True", "false")), "y", "classification", (False, True)).tolist() == [1, 0]


def test_unknown_labels_are_refused():
    def of(column, classes, task="classification", name="y"):
        return lambda: target_of(table(y=column), name, task, classes)

    refusal(of(text("a", "c", None), ("a", "b")), "t.csv", "row 2", "'y'", "'c'", "'a', 'b'")
    refusal(of(number(1, None, 5, kind="integer"), (1, 2)), "row 3", "label 5,", "1, 2")
    refusal(of(number(1.5), (1, 2)), "row 1", "1.5")
    refusal(of(text("1", "junk"), (1, 2)), "row 2", "'junk'")
    refusal(of(text("1", "2"), None, "regression", "z"), "'z' is not a column")
    refusal(of(text("1", "two"), None, "regression"), "'y'", "'two'", "row 2")
    refusal(of(number(1, np.inf), None, "regression"), "'y'", "inf", "row 2")


# ---------------------------------------------------------------- preprocessing


def random_table(rows=200, seed=0):
    rng = np.random.default_rng(seed)
    gaps = rng.normal(3, 2, rows)
    gaps[rng.random(rows) < 0.2] = np.nan
    colors = rng.choice(np.array(["red", "green", "blue", None], dtype=object), rows)
    return table(
        a=Column("real", rng.normal(5, 3, rows)),
        gaps=Column("real", gaps),
        flag=Column("boolean", (rng.random(rows) < 0.3).astype(float)),
        color=Column("text", colors),
        two=Column("text", rng.choice(np.array(["no", "yes"], dtype=object), rows)),
    )


def reference(data, fit, rows):
    """Return what scikit-learn makes of the rows."""
    numbers = np.stack([data.columns[name].numbers for name in ("a", "gaps", "flag")], axis=1)
    filled = np.where(np.isnan(numbers), np.nanmean(numbers[fit], axis=0), numbers)
    scaled = StandardScaler().fit(filled[fit])
    # The scale is that of the values which are there, not of the filled ones.
    scaled.scale_ = np.nanstd(numbers[fit], axis=0)
    a, gaps, flag = scaled.transform(filled[rows]).T
    color = OneHotEncoder(categories=[["blue", "green", "red"]], handle_unknown="ignore", sparse_output=False)
    color = color.fit([["red"]]).transform([[value] for value in data.columns["color"].values[rows]])
    missing, two = np.isnan(numbers[rows, 1]), data.columns["two"].values[rows]
    gone = color.sum(1) == 0
    return np.column_stack([a, gaps, missing, flag, color, gone, two == "no", two == "yes"]).astype(float)


def test_inputs_match_scikit_learn():
    data = random_table()
    fit, rest = np.arange(0, 200, 2), np.arange(1, 200, 2)
    prepared = Preprocessing.fit(data, fit)
    wanted = ["a", "gaps", "gaps is missing", "flag", "color = blue", "color = green", "color = red"]
    wanted += ["color is missing", "two = no", "two = yes"]
    assert prepared.names() == wanted
    for rows in (fit, rest):
        np.testing.assert_allclose(prepared.transform(data, rows), reference(data, fit, rows), rtol=1e-12, atol=1e-12)
    assert Preprocessing.fit(data.take(fit)) == prepared
    np.testing.assert_array_equal(prepared.transform(data)[rest], prepared.transform(data, rest))
    assert prepared.transform(data).dtype == np.float64


def test_weights_count_rows_as_repetitions_do():
    data = random_table()
    data.columns["day"] = Column("date", np.random.default_rng(1).integers(0, 10**9, data.rows).astype(float))
    y, weight = np.random.default_rng(2).normal(size=(data.rows, 2)), np.arange(data.rows) % 4
    repeated = np.repeat(np.arange(data.rows), weight)
    ours, theirs = Preprocessing.fit(data, weight=weight.astype(float)), Preprocessing.fit(data, repeated)
    assert ours.names() == theirs.names()
    np.testing.assert_allclose(ours.transform(data), theirs.transform(data), rtol=1e-10, atol=1e-10)
    scale = TargetScale.fit(y, weight.astype(float))
    np.testing.assert_allclose(scale.apply(y), TargetScale.fit(y[repeated]).apply(y), rtol=1e-10, atol=1e-10)
    assert not np.allclose(ours.transform(data), Preprocessing.fit(data).transform(data))


@quick
@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20),
    st.floats(allow_nan=False, allow_infinity=False),
)
@example([1.7976931348623157e308, -1.7976931348623157e308], 1.7976931348623157e308)
@example([1.7976931348623157e308] * 3, -1.7976931348623157e308)
@example([1.7976931348623157e308] * 3 + [-1.7976931348623157e308], 0.0)
@example([5e-324, 0.0], 1e308)
@example([1e300, 1e-300, -1e300], 0.0)
def test_inputs_are_finite_at_any_size(fitted, later):
    prepared = Preprocessing.fit(table(a=number(*fitted)))
    got = prepared.transform(table(a=number(*fitted, later, None)))
    assert got.shape == (len(fitted) + 2, 1)
    assert np.isfinite(got.astype(np.float32)).all()
    assert np.abs(got[: len(fitted)]).max() <= np.sqrt(len(fitted)) * (1 + 1e-6) + 1e-6
    assert got[-1] == 0.0
    scale = TargetScale.fit(np.array(fitted))
    assert np.isfinite(scale.apply(np.array([*fitted, later]))).all()
    assert np.isfinite(scale.invert(np.array([*fitted, later]))).all()


@pytest.mark.parametrize("offset", [0.0, 1e6, 1e12, 2.0**60])
def test_a_large_offset_costs_no_digits(offset):
    unit = max(1.0, np.spacing(offset) * 8)
    steps = np.array([0.0, 1.0, 2.0, 5.0])
    spec = Preprocessing.fit(table(a=number(*(offset + unit * steps)))).columns[0]
    assert spec.scale == pytest.approx(unit * steps.std(), rel=1e-12)
    assert abs(spec.mean - (offset + unit * 2.0)) <= np.spacing(offset)


def test_the_scale_of_huge_values_is_right():
    spec = Preprocessing.fit(table(a=number(1e300, 3e300))).columns[0]
    assert (spec.mean, spec.scale) == pytest.approx((2e300, 1e300), rel=1e-12)
    spec = Preprocessing.fit(table(a=number(1e-300, 3e-300))).columns[0]
    assert (spec.mean, spec.scale) == pytest.approx((2e-300, 1e-300), rel=1e-12)
    assert Preprocessing.fit(table(a=number(*[0.1] * 7))).columns == (NumberColumn("a", 0.1, 1.0, False),)


def test_a_subset_may_lack_values():
    data = table(a=number(None, None, 4, 6), c=text(None, None, "x", "y"), k=number(2, 2, 3, 4))
    prepared = Preprocessing.fit(data, np.array([0, 1]))
    assert prepared.columns == (
        NumberColumn("a", 0.0, 1.0, True),
        CategoryColumn("c", ()),
        NumberColumn("k", 2.0, 1.0, False),
    )
    assert prepared.transform(data).tolist() == [[0, 1, 0], [0, 1, 0], [4, 0, 1], [6, 0, 2]]


def test_the_most_frequent_categories_are_kept():
    words = [f"w{i:02}" for i in range(60)]
    counts = dict.fromkeys(words, 2) | {"w59": 3, "w03": 1}
    spec = Preprocessing.fit(table(c=text(*(word for word in words for _ in range(counts[word]))))).columns[0]
    assert spec.categories == (*tuple(word for word in words[:50] if word != "w03"), "w59")
    got = Preprocessing((spec,)).transform(table(c=text("w03", "w59", None, "w00")))
    assert got.sum(axis=1).tolist() == [0, 1, 0, 1]
    assert got[1, 49] == got[3, 0] == 1


@pytest.mark.parametrize(("cells", "width"), [("ab", 2), (["a", "b", None], 3), ("a", 1), ("abc", 3)])
def test_each_category_is_an_input_and_unseen_ones_have_none(cells, width):
    prepared = Preprocessing.fit(table(c=text(*cells)))
    assert len(prepared.names()) == width
    got = prepared.transform(table(c=text("a", "b", "unseen", None)))
    wanted = [[float(n == f"c = {cell}") for n in prepared.names()] for cell in ("a", "b", "unseen")]
    assert got.tolist() == [*wanted, [float(n == "c is missing") for n in prepared.names()]]


def test_two_categories_of_earlier_files_are_one_input():
    old = {"kind": "category", "name": "c", "categories": ["a", "b"], "binary": True}
    prepared = Preprocessing.from_dict({"columns": [old]})
    assert prepared.names() == ["c = b"]
    assert prepared.transform(table(c=text("a", "b", "unseen", None))).tolist() == [[0.0], [1.0], [0.0], [0.0]]


def test_check_reorders_and_ignores():
    prepared = Preprocessing.fit(table(a=number(1, 2), b=text("x", "y")))
    got, notes = prepared.check(table(z=number(1), b=text("y"), a=number(2)))
    assert list(got.columns) == ["a", "b"]
    assert len(notes) == 1
    assert "'z'" in notes[0]
    assert prepared.check(table(a=number(1), b=text("y")))[1] == []
    lost = table(A=number(1), c=number(2))
    refusal(lambda: prepared.check(lost), "t.csv", "missing columns: 'a' (nearest: 'A'), 'b'")
    refusal(lambda: prepared.transform(lost), "missing columns")


def test_check_refuses_what_is_no_number():
    prepared = Preprocessing.fit(table(a=number(1, 2)))
    refusal(lambda: prepared.check(table(a=text("1", None, "two", "x"))), "t.csv", "'a'", "'two'", "row 3")
    refusal(lambda: prepared.check(table(a=text("true", "1", "maybe"))), "'a'", "'maybe'", "row 3")
    refusal(lambda: prepared.check(table(a=text("true", "1"))), "'a'", "'true'", "row 1")
    refusal(lambda: prepared.check(table(a=number(1, np.inf))), "t.csv", "'a'", "inf", "row 2")
    refusal(lambda: prepared.check(table(a=text("x", "1e999"))), "'a'", "'x'", "row 1")
    refusal(lambda: prepared.check(table(a=text("1", None, "inf"))), "'a'", "'inf'", "row 3")
    refusal(lambda: Preprocessing.fit(table(a=number(1, np.inf))), "'a'", "inf", "row 2")
    assert values(prepared.check(table(a=text(" 1", "2.5", None)))[0].columns["a"]) == [1.0, 2.5, None]
    assert prepared.transform(table(a=number(None, None))).tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize(
    ("categories", "column", "wanted"),
    [
        (("1", "2", "x"), number(1, 2, 3, None, kind="integer"), ["1", "2", "3", None]),
        (("01", "02", "x"), number(1, 2, 3, kind="integer"), ["01", "02", "3"]),
        (("01", "1", "x"), number(1, kind="integer"), ["1"]),
        (("1.50", "x"), number(1.5, 2.25), ["1.50", "2.25"]),
        (("True", "x"), number(1, 0, None, kind="boolean"), ["True", "false", None]),
        (("a", "b"), number(None, None), [None, None]),
    ],
)
def test_numbers_are_matched_with_categories_by_their_text(categories, column, wanted):
    prepared = Preprocessing((CategoryColumn("c", categories, False),))
    got, _ = prepared.check(table(c=column))
    assert values(got.columns["c"]) == wanted
    hits = [[float(cell == category) for category in categories] for cell in wanted]
    assert prepared.transform(table(c=column)).tolist() == hits


def test_preprocessing_survives_json():
    data = random_table()
    prepared = Preprocessing.fit(data)
    again = Preprocessing.from_dict(json.loads(json.dumps(prepared.to_dict(), allow_nan=False)))
    assert again == prepared
    np.testing.assert_array_equal(again.transform(data), prepared.transform(data))
    scale = TargetScale.fit(np.array([0.1, 0.7, 2.2]))
    assert TargetScale.from_dict(json.loads(json.dumps(scale.to_dict()))) == scale


NUMBER = {"kind": "number", "name": "a", "mean": 0, "scale": 1.5, "missing": False}
CATEGORY = {"kind": "category", "name": "b", "categories": ["x", "y"], "binary": True}


def test_whole_json_numbers_are_fine():
    assert Preprocessing.from_dict({"columns": [NUMBER, CATEGORY]}).columns == (
        NumberColumn("a", 0.0, 1.5, False),
        CategoryColumn("b", ("x", "y"), True),
    )


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        ([], "must be an object"),
        ({}, "missing keys: 'columns'"),
        ({"columns": {}}, "columns is {}"),
        ({"columns": []}, "at least one"),
        ({"columns": [NUMBER, NUMBER]}, "different names"),
        ({"columns": [NUMBER], "more": 1}, "unknown keys: 'more'"),
        ({"columns": [3]}, "columns[0]: this is 3"),
        ({"columns": [NUMBER | {"kind": "other"}]}, "kind is 'other'"),
        ({"columns": [NUMBER | {"kind": []}]}, "kind is []"),
        ({"columns": [CATEGORY, NUMBER | {"mean": "0"}]}, "columns[1]: mean is '0'"),
        ({"columns": [NUMBER | {"mean": True}]}, "mean is True"),
        ({"columns": [NUMBER | {"mean": float("nan")}]}, "mean is nan"),
        ({"columns": [NUMBER | {"mean": 10**400}]}, "mean is 1000"),
        ({"columns": [NUMBER | {"scale": 0.0}]}, "scale is 0.0"),
        ({"columns": [NUMBER | {"scale": float("inf")}]}, "scale is inf"),
        ({"columns": [NUMBER | {"name": 3}]}, "name is 3"),
        ({"columns": [NUMBER | {"missing": 0}]}, "missing is 0"),
        ({"columns": [NUMBER | {"odd\nkey": 0}]}, "unknown keys: 'odd\\nkey'"),
        ({"columns": [{"kind": "number", "name": "a"}]}, "missing keys: 'mean', 'scale', 'missing'"),
        ({"columns": [CATEGORY | {"categories": ["y", "x"]}]}, "categories are ['y', 'x']"),
        ({"columns": [CATEGORY | {"categories": ["x", "x"]}]}, "categories are ['x', 'x']"),
        ({"columns": [CATEGORY | {"categories": ["x", 1]}]}, "categories are ['x', 1]"),
        ({"columns": [CATEGORY | {"categories": ["x"]}]}, "2 where binary"),
        ({"columns": [CATEGORY | {"categories": [f"{i:02}" for i in range(51)], "binary": False}]}, "at most 50"),
        ({"columns": [CATEGORY | {"binary": None}]}, "binary is None"),
    ],
)
def test_damaged_preprocessing_is_refused(data, wanted):
    refusal(lambda: Preprocessing.from_dict(data), "preprocessing", wanted)


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (None, "must be an object"),
        ({"center": 0.0}, "missing keys: 'scale'"),
        ({"center": 0.0, "scale": -1.0}, "scale is -1.0"),
        ({"center": float("inf"), "scale": 1.0}, "center is inf"),
        ({"center": 0.0, "scale": "1"}, "scale is '1'"),
    ],
)
def test_a_damaged_target_scale_is_refused(data, wanted):
    refusal(lambda: TargetScale.from_dict(data), "target scale", wanted)


def test_target_scale():
    y = np.random.default_rng(0).normal(50, 4, 100)
    scale = TargetScale.fit(y)
    np.testing.assert_allclose(scale.apply(y), (y - y.mean()) / y.std(), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(scale.invert(scale.apply(y)), y, rtol=1e-13)
    assert np.isnan(scale.apply(np.array([np.nan]))[0])
    assert TargetScale.fit(np.array([3.0, 3.0])) == TargetScale(3.0, 1.0)


# ---------------------------------------------------------------- folds and splits


@quick
@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.integers(2, 7), st.booleans(), st.integers(0, 99))
def test_folds_part_the_rows_evenly(codes, k, classes, seed):
    y = np.array(codes)
    if k > len(y):
        refusal(lambda: folds(y, k, classes=classes, seed=seed), f"{k} folds of {len(y)} rows")
        return
    parts = folds(y, k, classes=classes, seed=seed)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(y)))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    if classes and max(codes.count(code) for code in set(codes)) >= k:
        for code in set(codes):
            counts = [int((y[part] == code).sum()) for part in parts]
            assert max(counts) - min(counts) <= 1
    again = folds(y, k, classes=classes, seed=seed)
    assert all(a.tolist() == b.tolist() for a, b in zip(parts, again, strict=True))


def test_folds_and_splits_are_shuffled_by_the_seed():
    y = np.repeat([0, 1], 50)
    for classes in (False, True):
        first = [part.tolist() for part in folds(y, 5, classes=classes, seed=0)]
        assert first != [part.tolist() for part in folds(y, 5, classes=classes, seed=1)]
        held = [split(y, 0.2, classes=classes, seed=seed)[1].tolist() for seed in (0, 0, 1)]
        assert held[0] == held[1] != held[2]
    for k in (1, 0, -3):
        refusal(lambda k=k: folds(y, k, classes=False, seed=0), f"{k} folds")


@quick
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.floats(0.01, 0.99),
    st.booleans(),
    st.integers(0, 99),
)
@example([0] * 15, 0.18, False, 0)
@example([0] * 10 + [1] * 10 + [2], 0.25, True, 0)
@example([0, 0, 1], 0.9, True, 0)
def test_splits_keep_their_promises(codes, share, classes, seed):
    y = np.array(codes)
    sizes = np.array([codes.count(code) for code in set(codes)]) if classes else np.array([len(y)])
    if (sizes < 2).all():
        refusal(lambda: split(y, share, classes=classes, seed=seed), "split", "can be held out")
        return
    train, held = split(y, share, classes=classes, seed=seed)
    assert sorted([*train, *held]) == list(range(len(y)))
    wanted = min(max(1, round(share * len(y))), int((sizes - 1).sum()))
    assert len(held) == wanted or (classes and wanted - len(sizes) < len(held) < wanted)
    assert len(held) > 0
    assert len(train) > 0
    if classes:
        assert set(y[train].tolist()) == set(codes)
        if len(held) >= len(sizes) and all(1 < share * size <= size - 1 for size in sizes):
            for code in set(codes):
                assert abs((y[held] == code).sum() - share * codes.count(code)) < 2


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_a_share_out_of_range_is_refused(share):
    refusal(lambda: split(np.arange(10), share, classes=False, seed=0), "split", repr(share), "above 0 and below 1")


# ---------------------------------------------------------------- cost


def test_large_files_are_quick(tmp_path):
    rng = np.random.default_rng(0)
    rows = 20_000
    columns = {f"x{i}": rng.normal(size=rows).round(6) for i in range(15)}
    columns |= {f"c{i}": rng.choice(np.array(["red", "green, or so", "blue"], dtype=object), rows) for i in range(5)}
    write_table(tmp_path / "t.csv", columns | {"y": rng.normal(size=rows)})
    start = time.perf_counter()
    problem = make_problem(read_table(tmp_path / "t.csv"), "y")
    inputs = Preprocessing.fit(problem.features).transform(problem.features)
    assert time.perf_counter() - start < 10.0  # about 0.5 s; a quadratic step would take minutes
    assert inputs.shape == (rows, 30)
    np.testing.assert_allclose(inputs[:, :15].std(axis=0), 1.0, rtol=1e-9)


def test_importing_is_cheap():
    # Packages without their own code, so that only the module's imports count.
    code = """
import sys, types
for name, folder in (("kapsi", sys.argv[1]), ("kapsi.data", sys.argv[1] + "/data")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
import kapsi.data.tabular
print([name for name in ("sklearn", "pyarrow", "pandas") if name in sys.modules])
"""
    package = str(Path(kapsi.__file__).parent)
    done = subprocess.run([sys.executable, "-c", code, package], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
