"""Files as people have them, from the command line: exit code, note or advice, and the score or prediction."""

from __future__ import annotations

import csv
import datetime
import io
import re
import shlex
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kapsi.cli import main
from kapsi.errors import TableError
from kapsi.tables import load_run

ROWS = 120
RNG = np.random.default_rng(0)
A, B = RNG.normal(20, 5, ROWS).round(2), RNG.uniform(0, 3, ROWS).round(2)
Y = (2 * A + 3 * B * B).round(2)
"""A target that the default model fits with R² above 0.99; without `a` the score is below 0.5."""

DOCS = Path(__file__).parents[1] / "docs" / "tables.md"
QUICK = ("--set", "training.l2=0.001")


def words(values, mark=".", **changes):
    found = [f"{value:.2f}".replace(".", mark) for value in values]
    for row, word in changes.items():
        found[int(row[1:]) - 1] = word
    return found


def text(separator=",", units=None, **columns):
    lines = [list(columns), *([units] if units else []), *zip(*columns.values(), strict=True)]
    return "".join(separator.join(map(str, line)) + "\n" for line in lines)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(capsys):
    """Run a command; return exit code, standard output and standard error."""

    def call(*arguments, quick=QUICK):
        capsys.readouterr()
        quick = quick if arguments[0] == "fit" else ()
        code = main([str(argument) for argument in (*arguments, *quick)])
        streams = capsys.readouterr()
        assert code == 0 or (code == 2 and len(streams.err.strip().splitlines()) == 1)
        return code, streams.out, streams.err

    return call


def put(name, content):
    if isinstance(content, pa.Table):
        pq.write_table(content, name)
    else:
        with open(name, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
    return name


def score(out):
    return float(re.search(r"(?:r2|accuracy): (\S+)", out)[1])


def predictions(out):
    return [row["prediction"] for row in csv.DictReader(io.StringIO(out))]


C = words(A, ",")
NUMBERED = "\n".join(f"{i},{line}" for i, line in enumerate(text(a=A, b=B, y=Y).splitlines()[1:]))
SHUFFLED = "\n".join(f"{(37 * i) % 1201},{line}" for i, line in enumerate(text(a=A, b=B, y=Y).splitlines()[1:]))
FITS = {
    "decimal commas": (text(";", a=C, b=words(B, ","), y=words(Y, ",")), ""),
    "decimal commas in the inputs": (text(";", a=C, b=words(B, ","), y=words(Y)), ""),
    "decimal commas in quotes": (text(a=[f'"{word}"' for word in C], b=B, y=Y), ""),
    "decimal commas in Parquet": (pa.table({"a": C, "b": B, "y": Y}), "column 'a' has numbers written as text"),
    "numbers as text in Parquet": (pa.table({"a": A, "b": B, "y": words(Y)}), "column 'y' has numbers written as text"),
    "missing words in Parquet": (
        pa.table({"a": words(A, r7="nan", r9="-"), "b": B, "y": Y}),
        "--categorical 'a' keeps",
    ),
    "units": (text(units=["degC", "m3/h", "kW"], a=A, b=B, y=Y), "it has units ('degC', 'm3/h', 'kW')"),
    "units of a ratio": (text(units=["degC", "1", "kW"], a=A, b=B, y=Y), "it has units ('degC', 'kW')"),
    "units under ;": (text(";", units=["[°C]", "", "[kW]"], a=C, b=words(B, ","), y=words(Y, ",")), "it has units"),
    "a dash in an input": (text(a=words(A, r7="-"), b=B, y=Y), ""),
    "a dash in the target": (
        text(a=A, b=B, y=words(Y, r7="-")),
        "dropped 1 of 120 rows without a target 'y' (first: row 7)",
    ),
    "an unnamed index": (",a,b,y\n" + NUMBERED, "left out the column 'column 1': it has no name and numbers the rows"),
    "an unnamed index of shuffled rows": (",a,b,y\n" + SHUFFLED, "left out the column 'column 1'"),
    "an index saved twice": (
        "Unnamed: 0.1,Unnamed: 0,a,b,y\n" + "\n".join(f"{i},{line}" for i, line in enumerate(SHUFFLED.splitlines())),
        "left out the column 'Unnamed: 0'",
    ),
    "an index of pandas": (
        pa.table({"a": A, "b": B, "y": Y, "__index_level_0__": list(range(ROWS))}),
        "left out the column '__index_level_0__': it is the index of pandas",
    ),
}


@pytest.mark.parametrize("case", list(FITS))
def test_numbers_are_numbers(case, run):
    content, note = FITS[case]
    name = put("t.parquet" if isinstance(content, pa.Table) else "t.csv", content)
    code, out, err = run("fit", name, "--target", "y", "--output", "r")
    assert code == 0
    assert note in err
    assert score(out) > 0.9
    inputs = run("info", "r")[1]
    assert re.search(r"inputs +a, (a is missing, )?b\n", inputs)


REFUSED = {
    "words among numbers": (
        text(a=words(A, r7="-", r60="unknown"), b=B, y=Y),
        (),
        "column 'a': 118 of 120 values are numbers; not: '-' (row 7), 'unknown' (row 60); --missing '-' --missing 'unknown' "
        "treats them as missing",
    ),
    "words among the numbers of a target": (
        text(a=A, y=words(Y, r9="unknown")),
        (),
        "column 'y': 119 of 120 values are numbers",
    ),
    "words among numbers in Parquet": (pa.table({"a": words(A, r7="unknown"), "y": Y}), (), "not: 'unknown' (row 7)"),
    "a word among digits as classes": (
        text(a=A, y=["unknown", *(str(i % 2) for i in range(ROWS - 1))]),
        (),
        "the target 'y': 119 of 120 values are numbers; not: 'unknown' (row 1); --missing 'unknown' treats them as missing; "
        "--categorical 'y' takes all as classes",
    ),
    "two decimal marks in a column": (
        text(";", a=words(A, ",", r3="20.63"), b=words(B, ","), y=Y),
        (),
        "not: '20.63' (row 3); write decimal marks and separators of thousands alike",
    ),
    "classes among several targets": (
        text(a=A, k=(A > 20).astype(int), m=(B > 1).astype(int)),
        ("--target", "k", "--target", "m"),
        "'k', 'm' have classes, and several targets need real values; fit a run for each: --target 'k' --drop 'm'; "
        "--target 'm' --drop 'k'; or take their numbers as real values with --task regression",
    ),
    "a class beside a number": (
        text(a=A, k=[f"u{i % 2}" for i in range(ROWS)], y=Y),
        ("--target", "k", "--target", "y"),
        "'k' has classes, and several targets need real values; fit a run for each: --target 'k' --drop 'y'; "
        "--target 'y' --drop 'k'",
    ),
    "several columns without meaning": (
        pa.table({"a": A, "l": [[1.0]] * ROWS, "s": [{"q": 1}] * ROWS, "y": Y}),
        (),
        "leave it out with --drop 'l' (further columns with problems: 's')",
    ),
    "a repeated option": (text(a=A, y=Y), ("--target", "y", "--seed", "1", "--seed", "2"), "--seed was given twice"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_doubts_are_refused_with_advice(case, run):
    content, options, message = REFUSED[case]
    name = put("t.parquet" if isinstance(content, pa.Table) else "t.csv", content)
    code, _, err = run("fit", name, *(options or ("--target", "y")), "--output", "r")
    assert code == 2
    assert message in err


def test_the_advice_on_several_class_targets_works(run):
    put("t.csv", text(a=A, b=B, k=(A > 20).astype(int), m=(B > 1).astype(int)))
    assert run("fit", "t.csv", "--target", "k", "--drop", "m", "--output", "k")[0] == 0
    assert re.search(r"inputs +a, b\n", run("info", "k")[1])
    assert run("fit", "t.csv", "--target", "k", "--target", "m", "--task", "regression", "--output", "both")[0] == 0
    assert re.search(r"inputs +a, b\n", run("info", "both")[1])


def test_two_categories_have_a_neutral_point(run):
    sex = ["f", "m"] * (ROWS // 2)
    put("t.csv", text(s=sex, a=A, y=[(1 if word == "m" else -1) * 5 + x for word, x in zip(sex, B, strict=True)]))
    assert run("fit", "t.csv", "--target", "y", "--output", "r")[0] == 0
    for name, new in (
        ("n.csv", "a,s\n20,m\n20,f\n20,diverse\n20,\n20, m \n"),
        ("n.parquet", pa.table({"s": ["m", "f", "diverse", None, "m"], "a": [20.0] * 5})),
    ):
        code, out, err = run("predict", "r", put(name, new), "--output", "-")
        male, female, unseen, empty, blanks = map(float, predictions(out))
        assert code == 0
        assert unseen == empty == pytest.approx((male + female) / 2, abs=0.1)
        assert blanks == male > female + 9
        assert "1 value was not in the training rows (such as 'diverse') and 1 is empty; they have no effect" in err


def test_booleans_of_a_new_file(run):
    put("t.csv", text(s=["true", "false"] * (ROWS // 2), a=A, y=Y))
    assert run("fit", "t.csv", "--target", "y", "--output", "r")[0] == 0
    spelled = predictions(run("predict", "r", put("n.csv", "s,a\ntrue,20\nfalse,20\n"), "--output", "-")[1])
    assert predictions(run("predict", "r", put("n.csv", "s,a\nTRUE,20\n0,20\n"), "--output", "-")[1]) == spelled
    message = (
        "column 's': 2 of 3 values are true or false; not: 'maybe' (row 3); --missing 'maybe' treats them as missing"
    )
    assert message in run("predict", "r", put("n.csv", "s,a\ntrue,20\n0,20\nmaybe,20\n"), "--output", "-")[2]


LAYOUTS = {
    "skip": ("Report,,\na,b,y\n20,1,43\n30,2,72\n", ("--skip", "1")),
    "missing": ("a,b,y\n20,1,43\n30,2,72\nunknown,1,\n", ("--missing", "unknown")),
    "comment": ("a,b,y\n20,1,43\n! here\n30,2,72\n", ("--comment", "!")),
    "encoding": ("a,b,y\n20,1,43\n30,2,72\n".encode("utf-16-le"), ("--encoding", "utf-16-le")),
    "decimal": ("a;b;y\n20.000;1.000;43\n30.000;2.000;72\n", ("--decimal", ".")),
    "separator": ("a:b:y\n20:1:43\n30:2:72\n", ("--separator", ":")),
}


@pytest.mark.parametrize("option", list(LAYOUTS))
def test_a_file_of_another_layout_is_predicted_and_scored(option, run):
    put("t.csv", text(a=A, b=B, y=Y))
    assert run("fit", "t.csv", "--target", "y", "--output", "r")[0] == 0
    content, options = LAYOUTS[option]
    code, out, _ = run("predict", "r", put("n.csv", content), "--output", "-", *options)
    assert code == 0
    assert np.array(predictions(out)[:2], dtype=float) == pytest.approx([43, 72], abs=0.1)
    code, out, _ = run("evaluate", "r", "n.csv", *options)
    assert score(out) > 0.99
    if option != "decimal":
        assert run("predict", "r", "n.csv", "--output", "-")[0] == 2


def test_options_of_text_files_have_no_effect_on_parquet(run):
    put("t.csv", text(a=A, b=B, y=Y))
    assert run("fit", "t.csv", "--target", "y", "--skip", "0", "--output", "r")[0] == 0
    put("n.parquet", pa.table({"a": [20.0], "b": [1.0]}))
    assert "skip has no effect on a Parquet file" in run("predict", "r", "n.parquet", "--output", "-", "--skip", "1")[2]
    assert predictions(run("predict", "r", "n.parquet", "--output", "-", "--missing", "20")[1])


def test_options_of_a_prediction_replace_those_of_the_fit(run):
    put("t.csv", "Report\n" + text(";", a=C, b=words(B, ","), y=words(Y, ",")))
    options = ("--skip", "1", "--decimal", ",", "--missing", "unknown")
    assert run("fit", "t.csv", "--target", "y", "--output", "r", *options)[0] == 0
    put("n.csv", "a,b\n20.5,1\nunknown,1\n-1,1\n")
    code, out, err = run("predict", "r", "n.csv", "--output", "-", "--skip", "0", "--decimal", ".", "--missing", "-1")
    assert code == 0
    assert len(set(predictions(out)[1:])) == 1
    assert "2 are empty" in err


def test_columns_that_give_the_target_away(run):
    kind = [int(value > 42) for value in Y]
    level = np.digitize(Y, [30, 40, 50, 60])
    note = "has one value for each value of the target; if it comes from the target, --drop"
    for leak, target in (
        ([("low", "high")[k] for k in kind], kind),
        (kind, kind),
        (["true" if k else "false" for k in kind], [f"class {k}" for k in kind]),
        (-level, level + 0.5),
    ):
        put("t.csv", text(a=A, b=B, k=leak, y=target))
        code, _, err = run("fit", "t.csv", "--target", "y", "--output", "r", "--overwrite")
        assert code == 0
        assert f"column 'k' {note} 'k'" in err
        assert err.count(note) == 1
    put("t.csv", text(a=A, b=B, k=[*kind[:-1], 1 - kind[-1]], y=kind))
    assert note not in run("fit", "t.csv", "--target", "y", "--output", "r", "--overwrite")[2]


def test_a_validation_file_of_another_layout_is_refused_with_its_options(run):
    put("t.csv", text(a=A, b=B, y=Y))
    message = run(
        "fit", "t.csv", "--target", "y", "--validation", put("v.csv", "Report\nof 2024\n" + text(a=A, b=B, y=Y))
    )[2]
    assert "v.csv: line 1 has 1 value ('Report'), and most lines have 3; --skip 2 leaves out" in message
    assert "(options of reading hold for both tables)" in message
    message = run(
        "fit", "t.csv", "--target", "y", "--validation", put("v.csv", text(a=words(A, r2="unknown"), b=B, y=Y))
    )[2]
    assert (
        "column 'a' of v.csv: 119 of 120 values are numbers; not: 'unknown' (row 2); --missing 'unknown' treats"
        in message
    )


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"PK\x03\x04" + bytes(22) + b"xl/workbook.xml" + bytes(300), "an Excel workbook"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1" + bytes(300), "a workbook of an old Excel"),
        (b"\x80\x04\x95" + bytes(8) + b"}", "a pickle of Python"),
        (b"ARROW1\0\0" + bytes(300), "an Arrow file"),
        ('{"a": [1, 2], "y": [3, 4]}', "JSON"),
        ('[\n  {"a": 1},\n  {"a": 2}\n]\n', "JSON"),
        ("<!DOCTYPE html>\n<html>Please, log in</html>\n", "a web page or XML"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "a pointer of Git LFS"),
    ],
)
def test_files_of_other_kinds_are_named(content, kind, run):
    assert f"t.csv: the content is {kind}" in run("fit", put("t.csv", content), "--target", "y")[2]


def test_times_of_the_day_are_the_same_from_text_and_parquet(run):
    times = [datetime.time(int(value), index % 60, 5) for index, value in enumerate(A % 24)]
    y = [time.hour + time.minute / 60 for time in times]
    found = []
    for name, content in (
        ("t.parquet", pa.table({"t": times, "b": B, "y": y})),
        ("t.csv", text(t=times, b=B, y=y)),
        ("t.csv", text(t=[time.strftime("%I:%M:%S %p") for time in times], b=B, y=y)),
    ):
        code, out, _ = run("fit", put(name, content), "--target", "y", "--output", "r", "--overwrite")
        assert code == 0
        assert score(out) > 0.999
        new = put("n.csv", "t,b\n20:15:00,1\n8:15 pm,1\n,1\n")
        found.append(np.array(predictions(run("predict", "r", new, "--output", "-")[1]), dtype=float))
    assert found[0][:2] == pytest.approx([20.25, 20.25], abs=0.01)
    assert found[1] == pytest.approx(found[0], abs=1e-3)
    assert found[2] == pytest.approx(found[0], abs=1e-3)


def test_quantities_that_are_not_read_are_named(run):
    for word, other in (("[{:.2f} 1]",) * 2, ("{:.0f} days 1h",) * 2):
        values = [(word, other)[i % 2].format(value) for i, value in enumerate(10 * A)]
        put("t.csv", text(a=values, b=B, y=Y))
        code, _, err = run("fit", "t.csv", "--target", "y", "--output", "r", "--overwrite")
        assert code == 0
        assert f"values such as {min(values)!r} are not read as numbers or dates" in err


def test_compact_dates_have_a_note_and_an_option(run):
    days = [f"2024{1 + i % 12:02}{1 + i % 28:02}" for i in range(ROWS)]
    put("t.csv", text(d=days, a=A, b=B, y=Y))
    note = "column 'd' has whole numbers such as 20240101; --date 'd' reads dates"
    assert note in run("fit", "t.csv", "--target", "y", "--output", "r")[2]
    assert run("fit", "t.csv", "--target", "y", "--output", "d", "--date", "d")[0] == 0
    assert "d: month, d: day of year" in run("info", "d")[1]
    assert run("predict", "d", "t.csv", "--output", "-")[0] == 0


def test_a_row_of_totals_is_refused(run):
    put("t.csv", text(a=A, b=B, y=Y) + f"Total,,{Y.sum()}\n")
    message = "row 121 ('Total') summarizes the other rows ('y'); remove the row"
    assert message in run("fit", "t.csv", "--target", "y", "--output", "r")[2]


def test_predictions_outside_of_several_targets_are_counted_and_marked(run):
    put("t.csv", text(a=A, y=2 * A, z=-A))
    assert run("fit", "t.csv", "--target", "y", "--target", "z", "--output", "r")[0] == 0
    put("n.csv", f"a\n20\n{A.max() + 5}\n")
    _, out, err = run("predict", "r", "n.csv", "--output", "-", "--outside")
    assert [row["prediction_outside"] for row in csv.DictReader(io.StringIO(out))] == ["false", "true"]
    assert re.search(r"1 of 2 predictions is outside .* targets, 'y': [\d.]+ to [\d.]+, 'z': -[\d.]+ to -[\d.]+\n", err)


def test_the_examples_of_the_documentation_run_as_written(run):
    blocks = re.findall(r"```(\w*)\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    commands, code = blocks[:2]
    for line in commands[1].splitlines():
        assert run(*shlex.split(line)[1:], quick=())[0] == 0
    assert code[0] == "python"
    result: dict[str, object] = {}
    *statements, call = code[1].strip().splitlines()
    exec("\n".join([*statements, f"predicted = {call}"]), result)  # noqa: S102
    assert result["predicted"] == pytest.approx([np.sin(0.5), np.sin(1.0) + 0.25], abs=0.05)


UNITS = {
    "$": ("$ {:.2f}", ["$20.5"], ["20.5"], "€20.5"),
    "%": ("{:.1f}%", ["20.5%"], [], "$20.5"),
    "kg": ("{:.1f} kg", ["20.5kg"], ["20.5"], "20.5 lb"),
    "K": ("{:.1f}K", ["20.5K"], [], "20.5 lb"),
    "none": ("{:.1f}", ["20.5"], [], "20.5%"),
    "time": ("20:{:02.0f}", ["20:20", "8:20 pm"], [], "20.5"),
    "seconds": ("20:{:02.0f}:00", ["20:20:00", "8:20 pm", "PT20H20M"], [], "20.5"),
    "duration": ("5 days 03:{:02.0f}:00", ["5 days 03:20:00", "123:20:00", "P5DT3H20M"], ["444000"], "$20.5"),
}


@pytest.mark.parametrize("unit", list(UNITS))
def test_units_of_predictions_are_those_of_the_fit(unit, run):
    form, accepted, guessed, refused = UNITS[unit]
    put("t.csv", text(a=[form.format(value) for value in A], b=B, y=Y))
    assert run("fit", "t.csv", "--target", "y", "--output", "r")[0] == 0
    found = set()
    for word in (*accepted, *guessed):
        code, out, err = run("predict", "r", put("n.csv", f"a,b\n{word},1\n"), "--output", "-")
        assert code == 0
        found.add(predictions(out)[0])
        assert ("column 'a' has numbers without a unit; read in" in err) == (word in guessed)
    assert len(found) == 1
    code, _, err = run("predict", "r", put("n.csv", f"a,b\n{refused},1\n"), "--output", "-")
    assert code == 2
    assert "column 'a' has numbers with" in err
    assert "the table of the fit has" in err
    validation = put("v.csv", text(a=[refused] * ROWS, b=B, y=Y))
    assert "the table of the fit has" in run("fit", "t.csv", "--target", "y", "--validation", validation)[2]


def test_plain_numbers_beside_percentages_need_a_statement(run):
    put("t.csv", text(a=[f"{value}%" for value in A], b=B, y=Y))
    put("p.csv", text(a=A, b=B, y=Y))
    put("q.csv", text(a=[value / 100 for value in A], b=B, y=Y))
    assert run("fit", "t.csv", "--target", "y", "--output", "r")[0] == 0
    wanted = run("evaluate", "r", "t.csv")[1]
    for name in ("p.csv", "q.csv"):
        for command in (("evaluate", "r", name), ("predict", "r", name, "--output", "-")):
            code, _, err = run(*command)
            assert code == 2
            assert (
                "column 'a' has numbers without a unit, and the table of the fit has numbers with the unit '%'; "
                "--unit 'a'=% takes 12 as 12%, --unit 'a'=1 takes 0.12 as 12%" in err
            )
    assert run("evaluate", "r", "p.csv", "--unit", "a=%")[1] == wanted
    assert run("evaluate", "r", "q.csv", "--unit", "a=1")[1] == wanted
    assert "--unit c: expected a column of the model: a, b, y" in run("evaluate", "r", "p.csv", "--unit", "c=%")[2]
    assert "has the unit '%', and --unit states '$'" in run("evaluate", "r", "t.csv", "--unit", "a=$")[2]
    assert "there is no such column" in run("fit", "t.csv", "--target", "y", "--unit", "c=%")[2]
    assert "expected COLUMN=UNIT" in run("fit", "t.csv", "--target", "y", "--unit", "a")[2]
    frame = {"a": [20.0], "b": [1.0]}
    with pytest.raises(TableError, match="'a' has numbers without a unit"):
        load_run("r").predict(frame)
    assert load_run("r").predict({"a": ["20%"], "b": [1.0]}) == pytest.approx([43], abs=0.5)


def test_stated_units_are_kept(run):
    put("t.csv", text(a=A, b=B, y=Y))
    assert run("fit", "t.csv", "--target", "y", "--unit", "a=%", "--unit", "y=$", "--output", "r")[0] == 0
    accepted = [put("n.csv", "a,b\n20%,1\n"), put("m.csv", "a,b\n20,1\n")]
    first, second = (predictions(run("predict", "r", name, "--output", "-")[1]) for name in accepted)
    assert first == second
    assert "RMSE ($)" in run("evaluate", "r", "t.csv")[1]
    put("k.csv", text(k=["u", "v"] * (ROWS // 2), a=A, y=Y))
    assert "has 2 different texts, and --unit needs numbers" in run("fit", "k.csv", "--target", "y", "--unit", "k=$")[2]


def test_the_unit_of_the_target_is_that_of_scores_and_predictions(run):
    put("t.csv", text(a=A, b=B, y=[f"${value}" for value in Y]))
    code, out, _ = run("fit", "t.csv", "--target", "y", "--output", "r")
    assert code == 0
    assert "RMSE ($)" in out
    assert "RMSE ($)" in run("evaluate", "r", "t.csv")[1]
    assert "predictions: p.csv (120 rows, in $)" in run("predict", "r", "t.csv", "--output", "p.csv")[1]
    code, out, err = run("evaluate", "r", put("n.csv", text(a=A, b=B, y=Y)))
    assert "column 'y' has numbers without a unit; read in '$'" in err
    assert score(out) > 0.99
    code, _, err = run("evaluate", "r", put("n.csv", text(a=A, b=B, y=[f"€{value}" for value in Y])))
    assert code == 2
    assert "column 'y' has numbers with the unit '€', and the table of the fit has numbers with the unit '$'" in err
    put("t.csv", text(a=A, y=[f"{value}%" for value in Y], z=[f"{value} €" for value in Y]))
    assert re.search(r"RMSE\n", run("fit", "t.csv", "--target", "y", "--target", "z", "--output", "s")[1])
    assert "column 'y' has numbers without" in run("evaluate", "s", put("n.csv", text(a=A, y=Y, z=Y)))[2]


SUFFIXES = {
    "K and M": [f"{value * 100:.1f}K" if i % 2 else f"{value / 10:.4f}M" for i, value in enumerate(A)],
    "K and plain": [f"{value * 100:.1f}K" if i % 2 else f"{value * 1e5:.0f}" for i, value in enumerate(A)],
    "money": [f"${value / 10:.4f}m" for value in A],
    "words": [f"{value / 10:.4f} million" for value in A],
    "bn": [f"€ {value / 1e4:.7f}bn" if i % 2 else f"€ {value / 10:.4f} mn" for i, value in enumerate(A)],
}


@pytest.mark.parametrize("case", list(SUFFIXES))
def test_suffixes_of_thousands_are_multiplied(case, run):
    put("t.csv", text(a=SUFFIXES[case], b=B, y=Y))
    code, out, err = run("fit", "t.csv", "--target", "y", "--output", "r")
    assert code == 0
    assert score(out) > 0.99
    assert re.search(r"column 'a' has numbers with .* for thousands, millions, …: '.*' is read as [\d,]+", err)
    sign = "€" if case == "bn" else "$" * (case == "money")
    words = [f"{sign}2.05M", f"{sign}2050K", f"{sign}2050000"]
    found = [
        float(predictions(run("predict", "r", put("n.csv", f"a,b\n{w},1\n"), "--output", "-")[1])[0]) for w in words
    ]
    assert found == pytest.approx([44, 44, 44], abs=0.5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["5k", "100m"], "'m' may be a unit"),
        (["5B", "2.5G", "1K"], "B may be billions or bytes"),
    ],
)
def test_unclear_suffixes_are_refused(words, message, run):
    put("t.csv", text(a=[words[i % len(words)] for i in range(ROWS)], b=B, y=Y))
    code, _, err = run("fit", "t.csv", "--target", "y", "--output", "r")
    assert code == 2
    assert f"are unclear, {message}; write thousands, millions and billions as K, M and B" in err
    assert run("fit", "t.csv", "--target", "y", "--categorical", "a", "--output", "r")[0] == 0


def test_a_letter_behind_all_numbers_is_a_unit(run):
    put("t.csv", text(a=[f"{value}K" for value in A], b=B, y=Y))
    _, _, err = run("fit", "t.csv", "--target", "y", "--output", "r")
    assert f"column 'a' has K behind all numbers: '{A[0]}K' is read as {A[0]:,.15g} with the unit 'K'" in err
    message = run("predict", "r", put("n.csv", "a,b\n20,1\n"), "--output", "-")[2]
    assert "--unit 'a'=K takes 12 as 12K" in message
    assert run("predict", "r", "n.csv", "--output", "-", "--unit", "a=K")[0] == 0


def test_durations_are_the_same_from_text_and_parquet(run):
    spans = [datetime.timedelta(hours=float(value), seconds=i) for i, value in enumerate(3 * A)]
    y = [span.total_seconds() / 3600 for span in spans]

    def clock(span, form="{h}:{m:02}:{s:02}"):
        seconds = int(span.total_seconds())
        return form.format(
            d=seconds // 86400, r=seconds // 3600 % 24, h=seconds // 3600, m=seconds // 60 % 60, s=seconds % 60
        )

    forms = {
        "clock": [clock(span) for span in spans],
        "pandas": [clock(span, "{d} days {r:02}:{m:02}:{s:02}") for span in spans],
        "python": [str(datetime.timedelta(seconds=int(span.total_seconds()))) for span in spans],
        "iso": [clock(span, "P{d}DT{r}H{m}M{s}S") for span in spans],
    }
    contents = {name: text(d=[f'"{word}"' for word in words], b=B, y=y) for name, words in forms.items()}
    contents |= {"parquet text": pa.table({"d": forms["pandas"], "b": B, "y": y})}
    contents |= {unit: pa.table({"d": pa.array(spans, pa.duration(unit)), "b": B, "y": y}) for unit in ("ms", "ns")}
    found = {}
    for name, content in contents.items():
        file = put("t.parquet" if isinstance(content, pa.Table) else "t.csv", content)
        code, out, err = run("fit", file, "--target", "y", "--output", "r", "--overwrite")
        assert code == 0
        assert score(out) > 0.999
        assert "read as seconds" in err
        new = put("n.csv", 'd,b\n36:00:00,1\n"1 day, 12:00:00",1\nPT36H,1\n1 days 12:00:00,1\n,1\n')
        found[name] = np.array(predictions(run("predict", "r", new, "--output", "-")[1]), dtype=float)
        assert len(set(found[name][:4])) == 1
        put("n.parquet", pa.table({"d": [datetime.timedelta(hours=36)], "b": [1.0]}))
        assert float(predictions(run("predict", "r", "n.parquet", "--output", "-")[1])[0]) == found[name][0]
    for values in found.values():
        assert values == pytest.approx(found["iso"], abs=1e-3)
    assert found["iso"][0] == pytest.approx(36, abs=0.05)


def test_categories_of_digits_may_have_a_decimal_point(run):
    put("t.csv", text(k=[i % 4 for i in range(ROWS)], y=[10.5 * (i % 4) + x for i, x in enumerate(B)], b=B))
    assert run("fit", "t.csv", "--target", "y", "--categorical", "k", "--output", "r")[0] == 0
    _, out, err = run("predict", "r", put("n.csv", "k,b\n2,1\n2.0,1\n2.5,1\n"), "--output", "-")
    first, second, third = predictions(out)
    assert first == second != third
    assert "1 value was not in the training rows (such as '2.5')" in err


def test_a_kept_column_of_lists_is_refused_with_a_remedy(run):
    put("t.csv", text(a=A, b=B, y=Y))
    assert run("fit", "t.csv", "--target", "y", "--output", "r")[0] == 0
    put("n.parquet", pa.table({"a": [20.0], "b": [1.0], "l": [[1.0, 2.0]]}))
    code, _, err = run("predict", "r", "n.parquet", "--output", "o.csv", "--keep", "l")
    assert code == 2
    assert "write Parquet, or leave them out" in err
    assert run("predict", "r", "n.parquet", "--output", "o.parquet", "--keep", "l")[0] == 0
    assert pq.read_table("o.parquet")["l"].to_pylist() == [[1.0, 2.0]]


def test_empty_columns_are_left_out_and_not_needed(run):
    put("t.csv", text(a=A, e=[""] * ROWS, b=B, f=["NA"] * ROWS, y=Y))
    code, out, err = run("fit", "t.csv", "--target", "y", "--output", "r")
    assert code == 0
    assert score(out) > 0.99
    assert "note: dropped the column 'e': it has no values" in err
    assert "note: dropped the column 'f': it has no values" in err
    assert re.search(r"inputs +a, b\n", run("info", "r")[1])
    for content in ("a,b\n20,1\n", "a,b,e\n20,1,x\n"):
        assert run("predict", "r", put("n.csv", content), "--output", "-")[0] == 0
    put("p.parquet", pa.table({"a": A, "e": pa.nulls(ROWS), "s": pa.array([None] * ROWS, pa.string()), "y": Y}))
    assert run("fit", "p.parquet", "--target", "y", "--output", "p")[0] == 0
    assert re.search(r"inputs +a\n", run("info", "p")[1])
    for option, column in (("--target", "e"), ("--numeric", "e"), ("--text", "e"), ("--time", "e"), ("--weight", "e")):
        target = () if option == "--target" else ("--target", "y")
        code, _, err = run("fit", "t.csv", *target, option, column, "--output", "x")
        assert code == 2
        assert "'e'" in err


def test_many_columns_without_information_share_a_note(run):
    put("t.csv", text(a=A, **{f"k{i}": [0] * ROWS for i in range(25)}, y=Y))
    _, _, err = run("fit", "t.csv", "--target", "y", "--output", "r")
    assert "dropped 25 columns that are empty or the same in every row: 'k0', 'k1'" in err
    assert err.count("k24") == 0
