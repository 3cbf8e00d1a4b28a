"""Reading rules for tables. Each row of the table in docs/tables.md is a case here."""

from __future__ import annotations

import gzip
import os
import re
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kapsi.data.tabular import Preprocessing, Reading, Table, make_problem, read_batches, read_table
from kapsi.data.tabular.encoders import Unseen
from kapsi.data.tabular.units import to_unit
from kapsi.errors import SpecError, TableError
from kapsi.recipes import Auto
from kapsi.tables import RunConfig, TableConfig, fit_table, load_run

DOCS = Path(__file__).parent.parent / "docs" / "tables.md"
X = [f"{value:.2f}" for value in np.random.default_rng(0).normal(20, 5, 40)]


def csv_of(separator=",", **columns):
    rows = zip(*columns.values(), strict=True)
    return "\n".join(separator.join(map(str, row)) for row in [list(columns), *rows]) + "\n"


def read(folder, content, name="t.csv", **options):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_table(path, Reading(**options))


def used(table, target="y", **options):
    return make_problem(table, target, **options)


def all_used(folder, content, options):
    table = read(folder, content, **options)
    table.use(table.columns)


def column(table: Table, name: str = "a"):
    return table.columns[name]


def with_word(word, row, values=X):
    return [word if i == row - 1 else value for i, value in enumerate(values)]


# Content, options of reading, and a check of the table, or a part of the message. A key is a row of the documentation.
Y = [f"{i * i % 17}.5" for i in range(40)]
COMMAS = [value.replace(".", ",") for value in X]
THOUSANDS = [f'"1,{i:03}.5"' for i in range(40)]
CASES = {
    "`inf`": (csv_of(a=["1", "inf", "2"], y=Y[:3]), {}, [1.0, np.inf, 2.0]),  # refused by the next step, see below
    "whole numbers above 2⁵³": (
        csv_of(a=[2**53 + 1, 2**53, 5], y=Y[:3]),
        {},
        ["9007199254740993", "9007199254740992", "5"],
    ),
    "dates of two forms, `0000-00-00`": (
        csv_of(a=["2024-01-02", "0000-00-00", "2024-05-06"], y=Y[:3]),
        {},
        "'0000-00-00' (row 2)",
    ),
    "`9:30 a.m.`, `9:30 P.M.`": (
        csv_of(a=["9:30 a.m.", "9:30 P.M.", "12:00 a.m."], y=Y[:3]),
        {},
        [34200.0, 77400.0, 0.0],
    ),
    "times with the name of a zone, such as `EST` or `Europe/Berlin`": (
        csv_of(a=["2024-01-02 10:00 EST", "2024-01-03 11:00 EST", "2024-01-04 11:00 EST"], y=Y[:3]),
        {},
        "'2024-01-02 10:00 EST' has letters behind the time, whose meaning is not certain; write a zone as its offset from UTC",
    ),
    "digits of other scripts, such as `١٢٫٥` and `１２．５`": (
        csv_of(a=["١٢٫٥", "１２．５", "7"], y=Y[:3]),
        {},
        [12.5, 12.5, 7.0],
    ),
    "`9 am`, `10 PM`": (csv_of(a=["9 am", "10 PM", "12 am"], y=Y[:3]), {}, [32400.0, 79200.0, 0.0]),
    "`10:12` beside `10:11 LATE`": (
        csv_of(a=["10:12", "10:11 LATE", "10:14"], y=Y[:3]),
        {},
        "'10:11 LATE' has letters behind the time",
    ),
    "`3-Mar`, `Mar 24` in all values": (
        csv_of(a=[f"{i % 28 + 1}-{'Jan' if i % 3 else 'March'}" for i in range(40)], y=Y),
        {},
        "'1-March' may be a day of the year or a month of a year; write dates as 2024-12-31 or 2024-12, or keep the texts",
    ),
    "`3 GB` beside `512 MB`, `$5` beside `€3`": (
        csv_of(a=[f"{i} GB" if i % 3 else f"{i}MB" for i in range(40)], y=Y),
        {},
        "column 'a': '0MB', '1 GB' have different units; convert all values to one unit, or keep the texts with --categorical 'a'",
    ),
    "one `heavy` among `12 kg` (over 20 values) or `5%`": (
        csv_of(a=with_word("heavy", 5, [f"{x} kg" for x in X]), y=Y),
        {},
        "39 of 40 values are numbers; not: 'heavy' (row 5); --missing 'heavy' treats them as missing",
    ),
    "`1 year` beside `2 years` (over 20 values)": (
        csv_of(a=[f"{i} year{'s' * (i != 1)}" for i in range(40)], y=Y),
        {},
        [float(i) for i in range(40)],
    ),
    "a table of Markdown": (
        "| a | y |\n|:--|--:|\n| 1 | 2 |\n| 3 | 4 |\n",
        {},
        "line 2 is a ruled line, as Markdown has tables; save it as CSV (DataFrame.to_csv), or remove the ruled lines",
    ),
    "`–1.5` with a dash, `－1.5`": (csv_of(a=["–1.5", "－2.5", "−3"], y=Y[:3]), {}, [-1.5, -2.5, -3.0]),
    "`Jan 1980`, `2024.12.31`, `31.12.24`": (
        csv_of(a=["Jan 1970", "Feb 1970", "Mar-1970"], y=Y[:3]),
        {},
        [0.0, 31 * 86400.0, 59 * 86400.0],
    ),
    "`24/01/15`, `24/01/16`, …": (
        csv_of(a=[f"24/0{i // 28 + 1}/{i % 28 + 1:02}" for i in range(40)], y=Y),
        {},
        "'24/01/01' and all other dates may be day/month or month/day",
    ),
    "`14.30 Uhr`": (csv_of(a=["14.30 Uhr", "9.05 Uhr", "0.00 Uhr"], y=Y[:3]), {}, [52200.0, 32700.0, 0.0]),
    "one `#` line of names before rows": (
        "# a y\n1 2\n3 4\n5 7\n",
        {},
        [1.0, 3.0, 5.0],
    ),
    "a last line such as `Source: me`": (
        csv_of(a=X, y=Y) + "Source: me\n",
        {},
        "line 42 has 1 value, the header has 2; quote values that hold ',', or remove the line if it is no row",
    ),
    "`20 ‰`": (csv_of(a=["20 ‰", "5‰", "1.5 ‰"], y=Y[:3]), {}, [20.0, 5.0, 1.5]),
    "`50.00 CR` beside `20.00 DR`": (
        csv_of(a=["50.00 CR", "20.00 DR", "7.00 DR"], y=Y[:3]),
        {},
        "are credits, debits or plain amounts; write them with the sign of their effect, such as -50.00",
    ),
    "one `2` among `true` and `false`": (
        csv_of(a=["true", "false"] * 19 + ["2", "0"], y=Y),
        {},
        "39 of 40 values are true or false; not: '2' (row 39)",
    ),
    "the output of psql or mysql, with ruled lines": (
        " a | y\n---+---\n 1 | 2\n 3 | 4\n(2 rows)\n",
        {},
        "line 2 is a ruled line, as databases print tables; export it as CSV (psql --csv, mysql --batch)",
    ),
    "the LIBSVM format (`1 1:0.5 3:2`), ARFF": ("1 1:0.5 3:2\n0 2:1.5\n", {}, "the content is in the LIBSVM format"),
    "EBCDIC": (
        csv_of(a=X, y=Y).encode("cp037"),
        {},
        "the text is in EBCDIC, as of a mainframe; --encoding cp037 reads it",
    ),
    '`sep=;` in the first line (Excel), `="12.5"`': (
        'sep=;\na;y\n="12.5";1\n="1.25";2\n',
        {},
        [12.5, 1.25],
    ),
    "a header one name short": (
        "a,b,y\n5,1,0.13,2.4\n7,2,0.5,1.5\n6,3,0.2,2.5\n",
        {},
        "line 2 has 4 values, the header has 3",
    ),
    "blanks around categories and labels": ('a,y\n u,1\n"u ",2\nv,3\n', {}, ["u", "u", "v"]),
    "`1`, `-2.5`, `.5`, `+3`, `1e3`": (
        csv_of(a=["+3", ".5", "1e3", "-2."], y=Y[:4]),
        {},
        [3.0, 0.5, 1000.0, -2.0],
    ),
    "`2.0D+03`, `1.5d-2` (Fortran)": (csv_of(a=["2.0D+03", "1.5d-2"], y=Y[:2]), {}, [2000.0, 0.015]),
    "`20,01` under `;`, tab or blanks": (csv_of(";", a=COMMAS, y=COMMAS), {}, [float(x) for x in X]),
    '`"0,57"` in quotes under `,`': (csv_of(a=[f'"{x}"' for x in COMMAS], y=Y), {}, [float(x) for x in X]),
    '`"1,234.5"`, `1.234,5` under `;`, `1 234`, `1\'234`': (
        csv_of(a=THOUSANDS, y=Y),
        {},
        [1000.5 + i for i in range(40)],
    ),
    '`"1,234"` in all values': (
        csv_of(a=[f'"1,{i:03}"' for i in range(40)], y=range(40)),
        {},
        "'1,000' may be 1000 or 1",
    ),
    "`2.784` in all values of a column under `;`": ("a;y\n2.784;1\n1.200;2\n", {}, "give --decimal . or --thousands ."),
    "numbers that do not fit `--decimal` or `--thousands`": (csv_of(a=X, y=Y), {"decimal": ","}, "is no number with"),
    "`$5`, `-$1,200.50`, `($6)`, `5 €`, `USD 7`": (
        csv_of(a=["$5", '"$1,200.50"', "($6)"], y=Y[:3]),
        {},
        [5, 1200.5, -6],
    ),
    '`"12,34,567"` (India)': (
        csv_of(a=['"12,34,567"', '"1,23,456.5"', '"5,000"'], y=Y[:3]),
        {},
        [1234567, 123456.5, 5000],
    ),
    "`2024-12`, …": (csv_of(a=["1970-02", "2024-12"], y=Y[:2]), {}, [31 * 86400.0, 20058 * 86400.0]),
    "`9999-12-31`": (csv_of(a=["9999-12-31", "1970-01-02"], y=Y[:2]), {"missing": ["9999-12-31"]}, [None, 86400.0]),
    "`7` beside `$5`": (csv_of(a=["$5", "7", "($2)"], y=Y[:3]), {}, [5.0, 7.0, -2.0]),
    "`7` beside `5%`, or beside `12kg` (over 20 values)": (
        csv_of(a=["5%", "7", "8%"], y=Y[:3]),
        {},
        "1 of 3 values are numbers without a unit; not: '5%' (row 1), '8%' (row 3); write the unit behind all of them, or "
        "--unit 'a'=% takes 12 as 12%",
    ),
    "`5%`, `7.5%`": (csv_of(a=["5%", "7.5%"], y=Y[:2]), {}, [5.0, 7.5]),
    "`12kg`, `13.5kg`, … (over 20 values, one unit)": (csv_of(a=[f"{x}kg" for x in X], y=Y), {}, [float(x) for x in X]),
    "a line of units below the header (two or more; `1` without a unit)": (
        csv_of(a=["degC", *X], y=["kW", *Y]),
        {},
        [float(x) for x in X],
    ),
    "`007`, `0123`": (csv_of(a=["007", "123", "0x1"], y=Y[:3]), {}, ["007", "123", "0x1"]),
    "one `unknown` among numbers": (
        csv_of(a=with_word("-", 7, with_word("unknown", 9)), y=Y),
        {},
        "column 'a': 38 of 40 values are numbers; not: '-' (row 7), 'unknown' (row 9); --missing '-' --missing 'unknown' "
        "treats them as missing",
    ),
    "`--missing unknown`": (
        csv_of(a=with_word("unknown", 9), y=Y),
        {"missing": ["unknown"]},
        [float(x) if i != 8 else None for i, x in enumerate(X)],
    ),
    "empty, `NA`, `n/a`, `NaN`, `<NA>`, `NaT`, `null`, `None`, `?`, `\\N`, `#N/A`, `#DIV/0!`": (
        csv_of(a=["n/a", "<NA>", "NaT", r"\N", "#DIV/0!", "NULL", "?", "", "#N/A", "1"], y=Y[:10]),
        {},
        [None] * 9 + [1.0],
    ),
    "`-`, `--`, `.` beside numbers, dates or words": (
        csv_of(a=with_word("-", 7), y=Y),
        {},
        [float(x) if i != 6 else None for i, x in enumerate(X)],
    ),
    "`-` beside `+`": (csv_of(a=["-", "+", "-"], y=Y[:3]), {}, ["-", "+", "-"]),
    "`true`, `FALSE`, also beside `0` and `1`": (csv_of(a=["true", "FALSE", "True"], y=Y[:3]), {}, [1.0, 0.0, 1.0]),
    "`2024-12-31`, `2024/12/31`, `31.12.2024`, `31-Dec-2024`, `Tue, 31 Dec 2024`, `12/31/24`, with times": (
        csv_of(a=["31.12.2024", "01.01.1970 12:00"], y=Y[:2]),
        {},
        [20088 * 86400.0, 43200.0],
    ),
    "`20241231`": (csv_of(a=["20241231", "19700102"], y=Y[:2]), {"date": ["a"]}, [20088 * 86400.0, 86400.0]),
    "`14:30`, `2:30 pm`, `14:30:05.5`": (
        csv_of(a=["14:30", "2:30 pm", "14:30:05.5", "0:00"], y=Y[:4]),
        {},
        [52200.0, 52200.0, 52205.5, 0.0],
    ),
    "`1:23:45`, `36:10:05`, `5 days 03:00:00`, `PT1H30M`, durations of Parquet": (
        csv_of(a=["1:23:45", "36:10:05", "5 days 03:00:00", "PT1H30M"], y=Y[:4]),
        {},
        [5025.0, 130205.0, 442800.0, 5400.0],
    ),
    "`75:30`, `8:15`, … (24 and above before the colon)": (
        csv_of(a=["75:30", "8:15"], y=Y[:2]),
        {},
        [271800.0, 29700.0],
    ),
    "`59:30`, `9:30` beside `1:02:10`, also in a table for prediction and that of the fit": (
        csv_of(a=["59:30", "1:02:10"], y=Y[:2]),
        {},
        "'59:30' may be hours and minutes or minutes and seconds; write 59:30:00 or 0:59:30",
    ),
    "`1.2K`, `3M`, `5k` beside other suffixes or plain numbers, `$4.5M`, `$2m`, `3.2 million`": (
        csv_of(a=["1.2K", "3M", "5k", "-950", "1.5B", "2T"], y=Y[:6]),
        {},
        [1200.0, 3e6, 5000.0, -950.0, 1.5e9, 2e12],
    ),
    "`300K`, … (over 20 values, the same letter)": (csv_of(a=[f"{x}K" for x in X], y=Y), {}, [float(x) for x in X]),
    "`5k` beside `100m`, `2B` beside `1G`": (csv_of(a=["5k", "100m"], y=Y[:2]), {}, "'m' may be a unit"),
    "times with an offset such as `+02:00` beside times without a zone": (
        csv_of(a=["2024-01-02T10:00:00+02:00", "2024-01-03T10:00:00", "2024-01-04T10:00:00Z"], y=Y[:3]),
        {},
        "'2024-01-02T10:00:00+02:00' has a time zone, and '2024-01-03T10:00:00' has none",
    ),
    "`14:30 pm` among times": (csv_of(a=["2:30 pm", "3:30 pm", "14:30 pm"], y=Y[:3]), {}, "'14:30 pm' (row 3)"),
    "lines that repeat the header, in any case": (
        csv_of(a=with_word("a", 7), y=Y),
        {},
        "39 of 40 values are numbers; not: 'a' (row 7); remove the lines that repeat the header",
    ),
    "`03/04/2024` in all values": (
        csv_of(a=["03/04/2024", "05/06/2024"], y=Y[:2]),
        {},
        "may be day/month or month/day",
    ),
    "UTF-8, UTF-16 with a byte order mark": ("a;y\né;1\nü;2\n".encode("utf-16"), {}, ["é", "ü"]),
    "text that is not UTF-8": ("a;y\né;1\nü;2\n".encode("latin-1"), {}, ["é", "ü"]),
    "values separated by blanks": ("  a    y\n  1.5  2\n 10.5  3\n", {}, [1.5, 10.5]),
    "blanks around names and before quotes": (' a , "y"\n1,  "2"\n3,  "4"\n', {}, [1.0, 3.0]),
    "separators at the ends of lines": ("a,y,\n1,2,\n3,4,\n", {}, [1.0, 3.0]),
    "comment lines before the header (`#`, `%`, `//`)": ("# made by hand\n# 2024\na,y\n1,2\n3,4\n", {}, [1.0, 3.0]),
    "a commented header": ("# a y\n1.5 2\n2.5 3\n", {}, [1.5, 2.5]),
    "`#` lines between the rows": ("a,y\n1,2\n# more\n3,4\n", {}, [1.0, 3.0]),
    "other lines before the header": ("Report\nof 2024\na,b,y\n1,2,3\n4,5,6\n7,8,9\n", {}, "--skip 2 leaves out"),
    "`--skip 2`": ("Report\nof 2024\na,y\n1,2\n4,5\n", {"skip": 2}, [1.0, 4.0]),
    "numbers as column names": ("5.1,3.5,x\n4.9,3.0,x\n4.7,3.2,z\n", {}, "--no-header"),
    "`--no-header`": ("5.1,3.5\n4.9,3.0\n", {"header": False}, [5.1, 4.9]),
    "rows with too few or too many values": ("a,y\n1,2\n3,4,5\n", {}, "line 3 has 3 values, the header has 2"),
    "a quote that is never closed": ('a,y\n1,"x\n2,y\n3,z\n', {}, "never closed"),
    "binary data": (b"a,y\n" + bytes(200), {}, "it is no text"),
    "`12 kg` beside `3 lb` where the fit had numbers": (
        csv_of(a=["12 kg", "3 lb", "5 kg"], y=Y[:3]),
        {"numeric": ["a"]},
        "column 'a': 0 of 3 values are numbers; not: '12 kg' (row 1), '3 lb' (row 2), '5 kg' (row 3); "
        "the units are 'kg', 'lb'; convert all values to one unit",
    ),
    "`--numeric`, `--categorical`, `--date`": (csv_of(a=["007", "8"], y=Y[:2]), {"numeric": ["a"]}, [7.0, 8.0]),
}


@pytest.mark.parametrize("case", list(CASES))
def test_text_files(tmp_path, case):
    content, options, wanted = CASES[case]
    if isinstance(wanted, str):
        with pytest.raises(TableError, match=re.escape(wanted)) as caught:
            all_used(tmp_path, content, options)
        assert len(str(caught.value).splitlines()) == 1
        return
    table = read(tmp_path, content, "t.txt" if "blanks" in case else "t.csv", **options)
    table.use(table.columns)
    first = next(iter(table.columns.values())) if "a" not in table.columns else column(table)
    assert [None if value != value else value for value in first.values.tolist()] == pytest.approx(wanted)


OTHER = {
    "a quote that is opened in one row and closed in a later one",
    "`-`, `n/a` as texts in Parquet files and data frames",
    "a table for prediction that does not show its decimal mark",
    ".gz, .zip, .zst",
    ".dat, .data",
    "folders, pipes, devices",
    "a column without values",
    "lists, structs and binary columns of Parquet",
    "repeated names of columns",
    '`"12.5"` as text in Parquet',
    "rows of totals or means at the beginning or the end",
    "an archive that is damaged or cut off",
    "`[1.5 2]`, `2 days 1h`, `5KB` beside `2MB` (20 values or fewer), `20,-` and other quantities",
    "`5 mg`, `10 mg`, … (3 to 20 distinct, one unit)",
    "times with a zone (an offset, `Z`, a zone of Parquet) where the fit had times without, and vice versa",
    "the unit of a table for prediction",
    "numbers without a unit for `20%`, `300K` or times of the day",
    "the unit of a target",
    "`--unit COLUMN=UNIT`",
    "Excel workbooks, JSON, web pages, pickles and other formats under the name of a table",
    "numbers with two decimal marks in a column",
    "one `unknown` among `0` and `1` as a target",
    "several targets with classes",
    "an unnamed first column of different whole numbers, `__index_level_0__`",
    "a category that was not in the training rows, an empty value",
    "a target with almost as many classes as rows",
    "−9999 in several rows, far from all other values",
    "distinct integers in all rows; inputs in the order of the target, or equal to the target up to names",
    "non-negative integers as a target, over 20 distinct",
}


def test_the_documentation_has_each_case():
    text = DOCS.read_text(encoding="utf-8").split("## Reading rules")[1].split("\n## ")[0]
    rows = {line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if line.startswith("| ")}
    rows = {row.replace("\\|", "|") for row in rows if not row.startswith(("input", "---"))}
    assert rows == {*CASES, *OTHER}


def test_compressed_files(tmp_path):
    content = csv_of(a=X, y=Y).encode()
    plain = read(tmp_path, content)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(content, mtime=0))
    (tmp_path / "t.csv.zst").write_bytes(pa.compress(content, codec="zstd", asbytes=True))
    with zipfile.ZipFile(tmp_path / "t.zip", "w") as archive:
        archive.writestr("inner.csv", content)
    for name in ("t.csv.gz", "t.csv.zst", "t.zip"):
        table = read_table(tmp_path / name)
        assert column(table).values.tolist() == column(plain).values.tolist()
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.writestr("1.csv", content)
        archive.writestr("2.csv", content)
    with pytest.raises(TableError, match=r"2 files \('1.csv', '2.csv'\); give an archive of one table"):
        read_table(tmp_path / "two.zip")
    (tmp_path / "bad.csv.gz").write_bytes(gzip.compress(content, mtime=0)[:50])
    with pytest.raises(TableError, match=r"bad\.csv\.gz"):
        read_table(tmp_path / "bad.csv.gz")


@pytest.mark.parametrize("name", ["t.dat", "t.data"])
def test_further_suffixes(tmp_path, name):
    assert column(read(tmp_path, "a y\n1.5 2\n2.5 3\n", name)).values.tolist() == [1.5, 2.5]


def test_pipes_and_devices_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "zero.csv").symlink_to("/dev/zero")
    for name, kind in (("pipe.csv", "a named pipe"), ("zero.csv", "a device")):
        with pytest.raises(TableError, match=f"this is {kind}; give a regular file"):
            read_table(tmp_path / name)


def test_columns_without_meaning_are_an_error_only_where_used(tmp_path):
    y = [float(i % 7) + 0.5 for i in range(20)]
    lists = pa.table({"x": [float(i) for i in range(20)], "emb": [[1.0]] * 20, "y": y})
    pq.write_table(lists, tmp_path / "t.parquet")
    table = read_table(tmp_path / "t.parquet")
    with pytest.raises(TableError, match=r"'emb' has the type list<.*--drop 'emb'"):
        used(table)
    assert list(used(table, drop=["emb"]).features.columns) == ["x"]
    twice = read(tmp_path, csv_of(x=X, k=Y, y=Y).replace("x,k", "k,k"))
    with pytest.raises(TableError, match="column 'k': 2 columns have the same name"):
        used(twice)


def test_indexes_are_left_out(tmp_path):
    table = read(tmp_path, csv_of(**{"": range(40), "a": X, "y": Y}))
    problem = used(table)
    assert list(problem.features.columns) == ["a"]
    assert "left out the column 'column 1': it has no name and numbers the rows" in problem.notes
    pq.write_table(
        pa.table({"a": [1.5, 2.0, 3.5] * 5, "y": [0.5, 1.0, 2.5] * 5, "__index_level_0__": range(15)}),
        tmp_path / "i.parquet",
    )
    assert list(used(read_table(tmp_path / "i.parquet")).features.columns) == ["a"]


def test_targets_of_single_rows_and_of_counts(tmp_path):
    names = [f"n{i}" for i in range(40)]
    with pytest.raises(
        TableError, match=r"40 classes in 40 rows, and 40 of them have a single row \('n0', 'n1', 'n10' and 37 more\)"
    ):
        used(read(tmp_path, csv_of(a=X, y=names)))
    problem = used(read(tmp_path, csv_of(a=X, y=[i * 3 % 40 for i in range(40)])))
    assert problem.task == "regression"
    assert any(
        "40 distinct whole numbers from 0 to 39: regression; use --task classification" in note
        for note in problem.notes
    )


def test_hints(tmp_path):
    values = with_word("-9999", 3, with_word("-9999", 9))
    problem = used(read(tmp_path, csv_of(a=values, k=range(100, 140), y=sorted(Y, key=float))))
    assert any("column 'a' is -9999 in 2 of 40 rows" in note and "--missing -9999" in note for note in problem.notes)
    assert any("distinct" in note and "'k'" in note for note in problem.notes)
    missing = read(tmp_path, csv_of(a=values, y=Y), missing=["-9999"])
    assert np.isnan(column(missing).numbers).sum() == 2
    ordered = used(read(tmp_path, csv_of(a=X, k=range(40), y=range(40))), task="regression")
    assert any("'k' orders the rows as the target does" in note for note in ordered.notes)


def test_dates_are_the_same_from_text_and_parquet(tmp_path):
    days = [f"2024-{1 + i % 12:02}-{1 + i % 28:02}" for i in range(40)]
    text = used(read(tmp_path, csv_of(d=days, y=Y)))
    stamps = pa.array(np.array(days, dtype="datetime64[s]"))
    pq.write_table(pa.table({"d": stamps, "y": [float(y) for y in Y]}), tmp_path / "d.parquet")
    parquet = used(read_table(tmp_path / "d.parquet"))
    assert text.preprocessing == parquet.preprocessing
    names = ["d: month", "d: day of year", "d: weekday", "d: days since the first"]
    assert text.preprocessing.names() == names
    inputs = text.preprocessing.transform(text.features)
    np.testing.assert_array_equal(inputs, parquet.preprocessing.transform(parquet.features))
    months = np.array([1 + i % 12 for i in range(40)], dtype=float)
    np.testing.assert_allclose(inputs[:, 0], (months - months.mean()) / months.std(), rtol=1e-12)


def test_unseen_and_empty_categories_are_neutral_and_counted(tmp_path):
    train = used(read(tmp_path, csv_of(a=["f", "m"] * 20, y=Y)))
    new = read(tmp_path, 'a\nm\nf\ndiverse\n""\n')
    features, _ = train.preprocessing.check(new)
    assert train.preprocessing.transform(new).tolist() == [[0, 1], [1, 0], [0, 0], [0, 0]]
    counts = train.preprocessing.unseen(features)
    assert counts == {"a": Unseen(1, 1, "diverse")}


def test_options_are_checked(tmp_path):
    for options, wanted in (
        ({"separator": "ab"}, "one character"),
        ({"encoding": "utf-99"}, "not known"),
        ({"comment": " "}, "beginning of a line"),
        ({"numeric": ["a"], "date": ["a"]}, "numeric and date"),
        ({"decimal": ";"}, "expected one of"),
    ):
        with pytest.raises(SpecError, match=wanted):
            Reading(**options)
    with pytest.raises(TableError, match=r"--numeric 'b': there is no such column \(nearest|columns are 'a', 'y'"):
        read(tmp_path, csv_of(a=X, y=Y), numeric=["b"])


GERMAN = "a;b;y\n0,13;2.784;4,4\n0,2;999;1,3\n0,7;1.200;2,5\n0,4;12;0,1\n"


@pytest.mark.parametrize(
    ("content", "options", "values"),
    [
        (GERMAN, {}, [2784, 999, 1200, 12]),
        (GERMAN.replace("0,4;12;0,1", "0,4;12;0.1"), {"decimal": ","}, [2784, 999, 1200, 12]),
        (GERMAN.replace(";", '","').replace("\n", '"\n"')[:-1].join(('"', "")), {}, [2784, 999, 1200, 12]),
        ("b;y\n2.784;1\n999;2\n1.200;3\n", {"thousands": "."}, [2784, 999, 1200]),
        ("b;y\n2.784;1\n999;2\n1.200;3\n", {"decimal": "."}, [2.784, 999, 1.2]),
        ("b;y\n2.784;0.1\n999;2\n1.200;3\n", {}, [2.784, 999, 1.2]),
        ("b,y\n2.784,1\n999,2\n1.200,3\n", {}, [2.784, 999, 1.2]),
        ('b,y\n"2,784",1.5\n999,2\n"1,200",3\n', {}, [2784, 999, 1200]),
        ("a;b;y\n" + "1;1;1\n" * 300 + "1;2.784;0,5\n", {}, [1] * 300 + [2784]),
        ("b;y\n" + "2.784;1\n" * 300 + "999;0,5\n", {}, [2784] * 300 + [999]),
    ],
)
def test_points_between_thousands_are_told_by_the_other_columns(tmp_path, content, options, values):
    assert column(read(tmp_path, content, **options), "b").numbers.tolist() == values


def test_a_run_reads_numbers_as_its_table_does(tmp_path):
    rows = [(f"{i}.{i * 37 % 1000:03}", f"{i % 7},5", f"{i},25") for i in range(1, 40)]
    (tmp_path / "t.csv").write_text("\n".join(["b;a;y", *map(";".join, rows)]))
    fit_table(tmp_path / "t.csv", RunConfig(TableConfig("y", reading=Reading())), tmp_path / "run")
    model = load_run(tmp_path / "run").model
    assert model.decimal == ","
    found = {}
    contents = {
        "same": "b;a\n2.000;3,5\n",
        "only points": "b;a\n2.000;3\n",
        "no points": "b;a\n2000;3\n",
        "other marks": "b,a\n2000.0,3.5\n",
        "other thousands": 'b,a\n"2,000",3.5\n',
    }
    for name, content in contents.items():
        (tmp_path / "n.csv").write_text(content)
        model.predict_file(tmp_path / "n.csv", lambda part, name=name: found.update({name: part["prediction"]}))
        assert model.predict(model.read(tmp_path / "n.csv"))[0]["prediction"] == found[name]
    assert found["same"] == found["other marks"] == found["other thousands"]
    assert found["only points"] == found["no points"] != found["same"]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("b;y\n2.784;1\n999;2\n1.200;3\n", {}, "'2.784' may be 2.784 or 2784; give --decimal . or --thousands ."),
        ("b;a;y\n2.784;0,5;0.5\n999;2;3\n", {}, "'2.784' may be 2.784 or 2784"),
        ("b;y\n6507.6;1\n999;2\n", {"decimal": ","}, "'6507.6', which is no number with --decimal ,"),
        ("b;y\n0,5;1\n999;2\n", {"decimal": "."}, "'0,5', which is no number with --decimal ."),
        ("b;y\n2.5;1\n999;2\n", {"thousands": "."}, "'2.5', which is no number with --thousands ."),
    ],
)
def test_numbers_in_doubt_or_against_an_option_are_refused(tmp_path, content, options, message):
    with pytest.raises(TableError, match=re.escape(message)):
        all_used(tmp_path, content, options)


def test_names_of_rows_need_no_name(tmp_path):
    for labels in (["u", "v", "w"], [1, 2, 3]):
        rows = "\n".join(f"{label},{i}.5,{i}" for i, label in enumerate(labels))
        table = read(tmp_path, "a,y\n" + rows)
        assert list(table.columns) == ["column 1", "a", "y"]
        assert table.notes == ("the header has 2 names, the rows 3 values: the first one names the rows",)


def test_an_unnamed_column_without_values_is_left_out(tmp_path):
    problem = used(read(tmp_path, "a,y,\n1,2.5,\n3,4.5,\n5,5.5,\n"))
    assert list(problem.features.columns) == ["a"]
    assert problem.notes[0] == "left out the column 'column 3': it has no name and no values"


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"PK\x03\x04" + bytes(9), {}, "that of a .zip file; rename it to t.zip"),
        (b"PAR1" + bytes(9), {}, "that of a .parquet file"),
        (gzip.compress(b"a,y\n1,2\n", mtime=0), {}, "that of a .gz file"),
        ("a,y\n1,2\n", {"skip": 1000}, "--skip 1000 leaves out all 2 lines"),
        (
            "Report 2020,,\na,b,y\n1,2,3\n4,5,6\n",
            {},
            "line 1 has one name ('Report 2020') and empty ones; --skip 1 leaves out",
        ),
        (
            "\nReport,,\n2020,,\na,b,y\n1,2,3\n4,5,6\n",
            {},
            "line 2 has one name ('Report') and empty ones; --skip 3 leaves out",
        ),
        (
            csv_of(a=["2024-01-02", "02.03.2024", "2024-01-03", "03.03.2024"], y=Y[:4]),
            {},
            "2 of 4 values are dates of one form",
        ),
    ],
)
def test_the_cause_of_a_refusal_is_named(tmp_path, content, options, message):
    with pytest.raises(TableError, match=re.escape(message)):
        all_used(tmp_path, content, options)


def test_accountants_and_mixed_currencies(tmp_path):
    assert column(read(tmp_path, csv_of(a=["(4111.4)", "5", "2.5"], y=Y[:3]))).numbers.tolist() == [-4111.4, 5, 2.5]
    with pytest.raises(TableError, match=re.escape("column 'a': '€0', '$1' have different units; convert all values")):
        all_used(tmp_path, csv_of(a=[f"{'€$'[i % 2]}{i}" for i in range(40)], y=Y), {})


def test_a_quote_over_several_rows_is_refused(tmp_path) -> None:
    rows = [f"{'abcdef'[i % 6]},{i}.5,{i}\n" for i in range(40)]
    for first, last in ((5, 8), (5, 6)):
        broken = [f'"{row}' if i in (first, last) else row for i, row in enumerate(rows)]
        with pytest.raises(TableError, match=r"column 'g': .* \(row 6\) has rows in quotes; remove or close the quote"):
            read(tmp_path, "g,x,y\n" + "".join(broken))
    table = read(tmp_path, csv_of(g=['"a, b\nc, d"', "e"] * 20, x=X, y=Y))
    assert column(table, "g").values[0] == "a, b\nc, d"


def test_empty_columns_are_listed_in_their_order(tmp_path) -> None:
    names = [f"e{i}" for i in range(20)]
    notes = used(read(tmp_path, csv_of(a=X, y=Y, **{name: [""] * 40 for name in names}))).notes
    assert notes == (
        f"dropped 20 columns that are empty or the same in every row: {', '.join(map(repr, names[:10]))} and 10 more",
    )


def test_codes_are_no_quantities(tmp_path) -> None:
    for values in (
        [f"192.168.{100 + i % 3}.{101 + i}" for i in range(40)],
        [f"+49 171 {200 + i} 567" for i in range(40)],
        [f"{100 + i}{('CS', 'EE', 'MA')[i % 3]}" for i in range(40)],
        [f"{i}²" for i in range(40)],
    ):
        table = read(tmp_path, csv_of(a=values, y=Y))
        assert (column(table).kind, column(table).values.tolist()) == ("text", values)
    assert column(read(tmp_path, csv_of(a=[f"{i} m²" for i in range(40)], y=Y))).unit == "m²"


def test_a_leading_zero_among_numbers_has_a_note(tmp_path) -> None:
    notes = column(read(tmp_path, csv_of(a=["07", *range(1, 40)], y=Y))).notes
    assert notes == (
        "column 'a' has numbers with leading zeros, such as '07', read as codes; --numeric 'a' reads numbers",
    )
    assert column(read(tmp_path, csv_of(a=[f"{i:03}" for i in range(40)], y=Y))).notes == ()


def test_classes_like_quantities_have_a_note(tmp_path) -> None:
    table = read(tmp_path, csv_of(a=X, y=["1.5±0.1", "2.5±0.1", "3.5±0.1", "4.5±0.1"] * 10))
    assert (
        used(table).notes[0]
        == "the target 'y' has 4 classes; values such as '1.5±0.1' are not read as numbers or dates"
    )
    table = read(tmp_path, csv_of(a=X, y=["low", "mid", "high", "top"] * 10))
    assert used(table).notes == ()


def test_a_grade_between_other_rows_is_no_summary(tmp_path) -> None:
    grades = ["Very poor", "Poor", "Average", "Good", "Excellent"]
    all_used(tmp_path, csv_of(g=grades, y=[10, 20, 30, 40, 50]), {})
    with pytest.raises(TableError, match=r"'Average'.* summarizes the other rows"):
        used(
            read(
                tmp_path, csv_of(g=[*grades[:2], *grades[3:], "Average"], x=[1, 5, 2, 9, 4.25], y=[10, 20, 40, 50, 30])
            )
        )


@pytest.mark.parametrize(("first", "then"), [("Mon Jan  1 10:00:00 2024", "2024-01-05T10:00:00+02:00")])
def test_zones_of_ctime_are_compared(tmp_path, first, then) -> None:
    run = fitted(tmp_path, a=[first.replace("  1", f" {i % 28 + 1:2}") for i in range(40)], y=Y)
    with pytest.raises(TableError, match="has times with a time zone"):
        run.predict({"a": [then]})


def test_flags_are_no_numbers_in_a_model_of_numbers(tmp_path) -> None:
    run = fitted(tmp_path, a=X, f=[i % 3 // 2 for i in range(40)], y=Y)
    with pytest.raises(TableError, match="'a' has true and false, and the table of the fit has numbers; write numbers"):
        run.predict({"a": ["true", "false"], "f": [0, 1]})
    flags = run.predict({"a": ["20.5", "20.5"], "f": ["false", "true"]})
    assert flags == pytest.approx(run.predict({"a": [20.5, 20.5], "f": [0, 1]}))


def test_stated_numbers_of_dates_are_seconds(tmp_path) -> None:
    content = csv_of(a=[f"1970-01-{i % 28 + 1:02}" for i in range(40)], y=Y)
    first = column(read(tmp_path, content, numeric=["a"]))
    assert first.values[:2].tolist() == [0.0, 86400.0]
    (batch,) = read_batches(tmp_path / "t.csv", Reading(numeric=["a"]), {"a": "numeric"})
    np.testing.assert_array_equal(batch.table.columns["a"].values, first.values)


def test_given_encodings_are_kept_or_refused(tmp_path) -> None:
    late = csv_of(g=["ab"] * 60_000, y=[1, 2] * 30_000).encode()
    with pytest.raises(TableError, match="a row behind the first ones is not ascii text; give another --encoding"):
        read(tmp_path, late + "é,3\n".encode("latin-1"), encoding="ascii")
    with pytest.raises(TableError, match="line 1 is not utf-16 text; give another --encoding"):
        read(tmp_path, csv_of(a=X, y=Y), encoding="utf-16")


def test_an_archive_with_another_compression_is_refused(tmp_path) -> None:
    with zipfile.ZipFile(tmp_path / "t.zip", "w") as archive:
        archive.writestr(".DS_Store", "")
        archive.writestr("t.csv", csv_of(a=X, y=Y))
    assert read_table(tmp_path / "t.zip").rows == 40
    data = bytearray((tmp_path / "t.zip").read_bytes())
    for mark, at in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        data[data.rindex(mark) + at] = 9
    (tmp_path / "t.zip").write_bytes(data)
    with pytest.raises(TableError, match=r"cannot be read .*; extract the table, or compress it with deflate"):
        read_table(tmp_path / "t.zip")


WRITTEN = {
    "amounts in parentheses": [f"({i}.5)" if i % 2 else f"{i}.5" for i in range(40)],
    "dollars in parentheses": [f"(${i}.5)" if i % 2 else f"${i}.5" for i in range(40)],
    "zones of hours": [f"2024-01-{i % 28 + 1:02} 10:00:00+0{i % 3}" for i in range(40)],
    "hours": [f"{i % 12 + 1} {'ap'[i % 2]}m" for i in range(40)],
    "hours and times": [f"{i % 12 + 1} pm" if i % 3 else f"{i % 24}:30" for i in range(40)],
    "days": [f"{i} day{'s' * (i != 1)}" for i in range(40)],
    "few days": [f"{i % 7 + 2} days" for i in range(40)],
    "years": [f"{i} year{'s' * (i != 1)}" for i in range(40)],
    "month first": [f"{i % 12 + 1}/{i % 28 + 1}/2024" for i in range(40)],
    "day first": [f"{i % 28 + 1}/{i % 12 + 1}/24 9:05" for i in range(40)],
    "suffixes": ["1.2K", "3M", "950", "5k"] * 10,
    "percent": [f"{i}.5%" for i in range(40)],
    "flags": ["true", "false", "1", "0"] * 10,
}


@pytest.mark.parametrize("case", WRITTEN)
def test_single_rows_are_read_as_in_the_fit(tmp_path, case) -> None:
    values = WRITTEN[case]
    table = read(tmp_path, csv_of(a=values, y=Y))
    preprocessing = Preprocessing.from_dict(used(table).preprocessing.to_dict())
    everything = preprocessing.transform(preprocessing.check(table)[0])
    for i in (0, 1, 2, 3, 11, 30):
        (tmp_path / "p.csv").write_text(csv_of(a=values[i : i + 1]))
        kinds = preprocessing.kinds()
        (batch,) = read_batches(tmp_path / "p.csv", Reading(), kinds, (), table.decimal, preprocessing.categories())
        np.testing.assert_allclose(
            preprocessing.transform(preprocessing.check(batch.table)[0]), everything[i : i + 1], err_msg=values[i]
        )
        frame = preprocessing.table_of({"a": values[i : i + 1]}, "predict")
        np.testing.assert_allclose(
            preprocessing.transform(preprocessing.check(frame)[0]), everything[i : i + 1], err_msg=values[i]
        )


def fitted(folder, weight=None, **columns):
    (folder / "t.csv").write_text(csv_of(**columns))
    fit_table(
        folder / "t.csv",
        RunConfig(TableConfig("y", weight=weight), recipe=Auto(heads=("linear",))),
        folder / "run",
        overwrite=True,
    )
    return load_run(folder / "run")


def test_a_run_finds_codes_whose_zeros_are_lost_among_many(tmp_path):
    codes = [f"0{1000 + i % 60}" for i in range(180)]
    run = fitted(tmp_path, a=codes, b=X * 4 + X[:20], y=[f"{i % 60}.{i:03}" for i in range(180)])
    b = np.arange(180.0) % 7
    wanted = run.predict({"a": codes, "b": b})
    assert len(set(wanted.round(1))) > 20
    assert np.array_equal(run.predict({"a": np.array(codes, dtype=np.int64), "b": b}), wanted)


def test_a_run_finds_codes_whose_zeros_are_lost_and_refuses_times_for_numbers(tmp_path):
    codes = [f"0{1 + i % 3}000" for i in range(40)]
    run = fitted(tmp_path, a=codes, b=X, y=[f"{i % 3}.{i:02}" for i in range(40)])
    b = np.array(X, dtype=np.float64)
    wanted = run.predict({"a": codes, "b": b})
    assert len(set(wanted.round(1))) > 2
    for lost in (
        np.array(codes, dtype=np.int64),
        np.array(codes, dtype=np.float64),
        [str(int(code)) for code in codes],
    ):
        assert np.array_equal(run.predict({"a": lost, "b": b}), wanted)
    with pytest.raises(TableError, match="column 'b' has dates, and the model needs numbers"):
        run.predict({"a": codes, "b": b.astype("datetime64[s]")})
    (tmp_path / "n.csv").write_text("a,b\n01000,1\n02000,unknown\n")
    with pytest.raises(TableError, match="--missing 'unknown' treats them as missing"):
        run.model.predict_file(tmp_path / "n.csv", print)


def test_scores_of_a_run_count_its_weights(tmp_path):
    w = [1 + 9 * (i % 2) for i in range(40)]
    run = fitted(tmp_path, "w", a=X, w=w, y=Y)
    y, predicted = np.array(Y, dtype=np.float64), run.predict({"a": np.array(X, dtype=np.float64)})
    scores, rows, notes = run.model.scores(run.model.read(tmp_path / "t.csv"))
    assert scores.loss == pytest.approx(np.sqrt(np.average((y - predicted) ** 2, weights=w)))
    assert rows == 40
    assert notes == ["the model was fitted with the weights 'w': the rows count as its weights"]
    (tmp_path / "one.csv").write_text("a,y\n20,3.5\n")
    _, _, notes = run.model.scores(run.model.read(tmp_path / "one.csv"))
    assert "all rows count the same" in notes[0]
    assert "R² has no meaning" in notes[1]


def test_two_groups_are_enough(tmp_path):
    (tmp_path / "t.csv").write_text(csv_of(a=X, g=["u", "v"] * 20, y=Y))
    report = fit_table(tmp_path / "t.csv", RunConfig(TableConfig("y", group="g")), tmp_path / "run")
    assert report.scored_rows == 20


def test_no_row_of_a_repaired_file_is_lost(tmp_path) -> None:
    """Rows are written again a thousand at a time."""
    rows = [f"{i},{i % 7}{',' * (i == 3_000)}\n" for i in range(3_500)]  # one row with a trailing separator
    (tmp_path / "t.csv").write_text("a,b\n" + "".join(rows))
    assert read_table(tmp_path / "t.csv").columns["a"].values.tolist() == list(range(3_500))
    found = read_batches(tmp_path / "t.csv", Reading(), {"a": "numeric"})
    assert [value for batch in found for value in batch.table.columns["a"].values] == list(range(3_500))


def test_units_beside_a_part_of_the_numbers(tmp_path) -> None:
    table = read(tmp_path, csv_of(a=["$5", "7"] * 2, p=["5%", "7"] * 2), unit=["p=%"])
    notes = table.use(["a", "p"])
    assert notes == ["column 'a' has $ beside a part of its numbers; others, such as '7', are read in $, too"]
    assert (column(table).unit, column(table, "p").unit) == ("$", "%")
    assert column(table, "p").numbers.tolist() == [5.0, 7.0] * 2
    kilos = [f"{i}kg" if i % 3 else str(i) for i in range(40)]
    with pytest.raises(TableError, match="14 of 40 values are numbers without a unit"):
        all_used(tmp_path, csv_of(a=kilos), {})
    assert column(read(tmp_path, csv_of(a=kilos), unit=["a=kg"])).numbers.tolist() == list(range(40))


def test_times_of_two_parts_are_read_alike_in_all_tables(tmp_path) -> None:
    run = fitted(tmp_path, a=[f"{i}:30" for i in range(40)], y=[i + 0.5 for i in range(40)])
    assert run.predict({"a": ["20:30", "35:30"]}) == pytest.approx([20.5, 35.5], abs=0.1)
    with pytest.raises(
        TableError, match="has durations such as '25:20:30', and the table of the fit has times without seconds"
    ):
        run.predict({"a": ["25:20:30"] * 2})


@pytest.mark.parametrize(("first", "then"), [("19:30", "1:20:30"), ("1:20:30", "19:30")])
def test_times_with_and_without_seconds_are_never_mixed(tmp_path, first, then) -> None:
    """19:30 is 70,200 seconds as hours, and 1,170 as minutes and seconds; 1:20:30 leaves the choice open."""
    with pytest.raises(TableError, match="'19:30' may be hours and minutes or minutes and seconds; write 19:30:00 or"):
        all_used(tmp_path, csv_of(a=[first, then], y=Y[:2]), {})
    fitted, new = (column(read(tmp_path, csv_of(a=[word] * 2, y=Y[:2]))) for word in (first, then))
    with pytest.raises(
        TableError, match=r"has times with(out)? seconds such as .*; write the times of both tables in one way"
    ):
        to_unit(new, fitted.unit, "a", "n.csv")
    noon = column(read(tmp_path, csv_of(a=["2:30 pm", first], y=Y[:2])))
    assert to_unit(new, noon.unit, "a", "n.csv") == (1.0, "")


def test_missing_words_of_a_prediction_are_those_of_the_fit_in_all_kinds_of_tables(tmp_path) -> None:
    """A dash is missing beside words in text; in a typed file it is a category if it was one in the fit."""
    colors = ["red", "blue", "-", ""] * 10
    y = [{"red": 1.5, "blue": 5.5}.get(word, 9.5) for word in colors]
    run = fitted(tmp_path, a=colors, b=X, y=y)
    new = {"a": ["red", "-", "n/a", None], "b": [20.0] * 4}
    red, *others = run.predict(new)
    assert others[0] == others[1] == others[2] > red + 5
    pq.write_table(pa.table(new), tmp_path / "n.parquet")
    assert run.model.read(tmp_path / "n.parquet").columns["a"].values.tolist() == ["red", None, None, None]
    pq.write_table(
        pa.table({"a": [word or None for word in colors], "b": [float(x) for x in X], "y": y}), tmp_path / "t.parquet"
    )
    fit_table(tmp_path / "t.parquet", RunConfig(TableConfig("y"), recipe=Auto(heads=("linear",))), tmp_path / "typed")
    read_back = load_run(tmp_path / "typed").model.preprocessing.table_of(new, "n").columns["a"]
    assert read_back.values.tolist() == ["red", "-", None, None]


def test_codes_and_times_of_a_repaired_file(tmp_path) -> None:
    table = read(tmp_path, "a,b,y\n007,9:30,1\n008,8:15,2,\n")
    assert [column(table, name).values.tolist() for name in "ab"] == [["007", "008"], [34_200.0, 29_700.0]]


def test_decimal_commas_between_blanks(tmp_path) -> None:
    """Commas in all rows separate no values if the header has names between blanks."""
    table = read(tmp_path, csv_of(" ", a=COMMAS, b=COMMAS, y=COMMAS), "t.txt")
    assert column(table, "b").values.tolist() == [float(x) for x in X]


def test_sentinels_of_targets_and_dates_have_a_note(tmp_path) -> None:
    y = ["9999" if i in (3, 9) else value for i, value in enumerate(Y)]
    days = ["9999-12-31" if i == 5 else f"2024-01-{i % 28 + 1:02}" for i in range(40)]
    notes = used(read(tmp_path, csv_of(a=X, d=days, y=y))).notes
    assert any("column 'y' is 9999 in 2 of 40 rows" in note for note in notes)
    assert any("column 'd' has the date 9999-12-31" in note for note in notes)


def test_words_for_missing_values_leave_one_class(tmp_path) -> None:
    with pytest.raises(
        TableError, match=r"the one class 'EU' \(20 of 40 rows have no value; words such as NA and None count"
    ):
        used(read(tmp_path, csv_of(a=X, y=["NA", "EU"] * 20)))


@pytest.mark.parametrize("name", ["Total", ""])
def test_a_last_row_of_totals_is_refused(tmp_path, name) -> None:
    group, numbers = ["u", "v"] * 10, [f"{i * i % 17 + 0.25}" for i in range(20)]
    total = str(sum(map(float, numbers)))
    how = r"\('Total'\) summarizes the other rows" if name else "has the sums of the rows above it"
    with pytest.raises(TableError, match=rf"row 21 {how} \('b', 'y'\); remove the row, or --numeric 'b' keeps it"):
        used(read(tmp_path, csv_of(a=[*group, name], b=[*numbers, total], y=[*numbers, total])))
    assert used(read(tmp_path, csv_of(a=[*group, name], b=[*numbers, "9"], y=[*numbers, "9"]))).y[-1] == 9


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("name", "statistic"), [("MEAN", np.mean), ("Grand total:", np.sum)])
def test_named_summaries_are_refused_at_both_ends(tmp_path, name, statistic, first) -> None:
    numbers = [f"{i * i % 17 + 0.25}" for i in range(20)]
    value = f"{statistic(np.array(numbers, float)):.3f}"

    def ends(values: list[str], end: str) -> list[str]:
        return [end, *values] if first else [*values, end]

    names, row = [f"n{i}" for i in range(20)], 1 if first else 21
    summarized = csv_of(a=ends(names, name), b=ends(numbers, value), y=ends(numbers, value))
    with pytest.raises(TableError, match=re.escape(f"row {row} ('{name}') summarizes the other rows ('b', 'y')")):
        used(read(tmp_path, summarized))
    other = used(read(tmp_path, csv_of(a=ends(names, name), b=ends(numbers, "99"), y=ends(numbers, "-7"))))
    assert f"row {row} is called '{name}'; remove it if it summarizes other rows" in other.notes


@pytest.mark.parametrize("word", ["Total", "Mean Green"])
def test_categories_and_names_are_no_summaries(tmp_path, word) -> None:
    names = ["Total", "North"] * 10 if word == "Total" else [*(f"n{i}" for i in range(19)), word]
    assert not [note for note in used(read(tmp_path, csv_of(a=names, b=X[:20], y=Y[:20]))).notes if "summar" in note]


@pytest.mark.parametrize("suffix", [".csv.gz", ".csv.zst", ".zip"])
def test_damaged_archives_have_a_remedy(tmp_path, suffix) -> None:
    content, name = csv_of(a=X * 50, y=Y * 50).encode(), f"t{suffix}"
    with zipfile.ZipFile(tmp_path / "t.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("t.csv", content)
    whole = {
        ".csv.gz": gzip.compress(content),
        ".csv.zst": pa.compress(content, codec="zstd", asbytes=True),
        ".zip": (tmp_path / "t.zip").read_bytes(),
    }[suffix]
    with pytest.raises(TableError, match=r"is damaged or cut off \(.*\); download or compress it again"):
        all_used(tmp_path, whole[: len(whole) // 2], {"name": name})


def test_a_last_row_that_looks_like_totals_is_kept_on_request(tmp_path) -> None:
    rows = read(tmp_path, csv_of(a=[*range(1, 21), 210], y=[*Y[:20], 5]))
    with pytest.raises(TableError, match=r"remove the row, or --numeric 'a' keeps it"):
        used(rows)
    assert len(used(rows, required=["a"]).y) == 21


def test_a_doubling_column_has_no_totals(tmp_path) -> None:
    doubling = [1, *(2**i for i in range(20))]  # the last number is the sum of the others
    assert len(used(read(tmp_path, csv_of(a=doubling, y=[i + 0.5 for i in range(21)]))).y) == 21


def test_few_rows_of_a_class_each_name_the_task(tmp_path) -> None:
    with pytest.raises(
        TableError, match=r"6 classes in 6 rows, and 6 of them have a single row .* or --task regression"
    ):
        used(read(tmp_path, csv_of(a=range(6), y=range(0, 12, 2))))


def test_quantities_that_are_categories_have_a_note(tmp_path) -> None:
    prices, codes = ([form.format(i % 25) for i in range(50)] for form in ('"{},-"', "A{}"))
    notes = used(read(tmp_path, csv_of(a=prices, c=codes, y=range(50)))).notes
    assert [note for note in notes if "not read" in note] == [
        "column 'a' has 25 categories; values such as '0,-' are not read as numbers or dates"
    ]


@pytest.mark.parametrize("sign", ["US$", "R$", "Fr. ", "\u20ac"])
def test_currencies_of_several_letters_also_in_parquet(tmp_path, sign) -> None:
    prices = [f"{sign}{x}" for x in X]
    pq.write_table(pa.table({"a": prices}), tmp_path / "t.parquet")
    for table in (read(tmp_path, csv_of(a=prices, y=Y)), read_table(tmp_path / "t.parquet")):
        assert (column(table).unit, column(table).values.tolist()) == (sign.strip(), [float(x) for x in X])


@pytest.mark.parametrize("y", [["3.5"], ["x"], ["x", ""]])
def test_one_row_is_too_few(tmp_path, y) -> None:
    with pytest.raises(TableError, match="1 row with a target 'y'; one row is too few, at least 4 are needed"):
        used(read(tmp_path, csv_of(a=X[: len(y)], y=y)))


def test_utf_32_has_the_mark_of_utf_16(tmp_path) -> None:
    assert column(read(tmp_path, csv_of(a=X, y=Y).encode("utf-32"))).values.tolist() == [float(x) for x in X]
    with pytest.raises(TableError, match="give --encoding utf-16-be"):
        read(tmp_path, csv_of(a=X, y=Y).encode("utf-16-be"))


def test_a_class_of_the_fit_is_no_missing_value(tmp_path) -> None:
    """The file of the fit has types, and the scored file has none."""
    labels = ["NA", "EU"] * 20
    pq.write_table(pa.table({"a": [float(label == "NA") for label in labels], "y": labels}), tmp_path / "t.parquet")
    fit_table(tmp_path / "t.parquet", RunConfig(TableConfig("y")), tmp_path / "run")
    model = load_run(tmp_path / "run").model
    (tmp_path / "n.csv").write_text("a,y\n1,NA\n0,EU\n")
    assert model.scores(model.read(tmp_path / "n.csv"))[1] == 2


def test_times_that_all_have_a_zone_are_read(tmp_path) -> None:
    times = ["2024-01-02 10:00+02:00", "2024-01-02 3:00 PM +0200", "2024-01-02 10:00Z"]
    assert np.diff(column(read(tmp_path, csv_of(a=times, y=Y[:3]))).numbers).tolist() == [5 * 3600.0, -3 * 3600.0]


ZONED, UNZONED, DAYS = (
    [f"2024-03-{i % 28 + 1:02}{form.format(i % 24)}" for i in range(40)]
    for form in ("T{:02}:15:00+02:00", " {:02}:15:00", "")
)


@pytest.mark.parametrize(
    ("first", "then", "refused"),
    [
        (ZONED, UNZONED, "has times without a time zone, and the table of the fit has times with a time zone; write"),
        (UNZONED, ZONED, "has times with a time zone, and the table of the fit has times without a time zone; write"),
        (ZONED, DAYS, ""),
        (UNZONED, DAYS, ""),
        (DAYS, ZONED, ""),
        (["2024-03-01T10:15:00Z", *UNZONED[1:]], ZONED, ""),  # Z beside no zone: these are in UTC, too
    ],
)
def test_the_zone_of_times_is_that_of_the_fit(tmp_path, first, then, refused) -> None:
    """Hours would be shifted without a word."""
    seen = used(read(tmp_path, csv_of(a=first, y=Y))).preprocessing
    seen = Preprocessing.from_dict(seen.to_dict())
    (tmp_path / "n.csv").write_text(csv_of(a=then, y=Y))
    (batch,) = read_batches(tmp_path / "n.csv", Reading(), seen.kinds())
    frame = {"a": pa.array(then).cast(pa.timestamp("s", "UTC" if then is ZONED else None))}
    for new in (batch.table, seen.table_of(frame, "n.csv")):
        if not refused:
            notes = ["column 'a' has days without times, which count as midnight; the table of the fit has times"]
            assert seen.check(new)[1] == (notes if then is DAYS else [])
            continue
        with pytest.raises(TableError, match=f"n.csv: column 'a' {refused} the times of both tables with a zone, or"):
            seen.check(new)


def test_dates_of_earlier_files_take_any_zone(tmp_path) -> None:
    data = used(read(tmp_path, csv_of(a=ZONED, y=Y))).preprocessing.to_dict()
    del data["columns"][0]["unit"]
    earlier = Preprocessing.from_dict(data)
    assert earlier.to_dict() == data
    assert earlier.check(read(tmp_path, csv_of(a=UNZONED, y=Y)), ["y"])[0].columns["a"].kind == "date"


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        (
            ["36:10:05", "40:00:00"],
            "2:30 pm",
            "has times of the day such as '2:30 pm', and the table of the fit has durations; write",
        ),
        (
            ["2:30 pm", "4:30 am"],
            "36:10:05",
            "has durations such as '36:10:05', and the table of the fit has times of the day; write",
        ),
        (["36:10:05", "40:00:00"], "1:20:30", ""),
        (["2:30 pm", "4:30 am"], "1:20:30", ""),
        (["P1D", "PT1H"], "36:10:05", ""),
    ],
)
def test_durations_are_no_times_of_the_day(tmp_path, first, then, message) -> None:
    fitted, new = (column(read(tmp_path, csv_of(a=words, y=Y[:2]))) for words in (first, [then] * 2))
    if not message:
        assert to_unit(new, fitted.unit, "a", "n.csv") == (1.0, "")
        return
    with pytest.raises(TableError, match=message):
        to_unit(new, fitted.unit, "a", "n.csv")


def test_hours_of_half_a_day_end_at_12(tmp_path) -> None:
    times = [f"{1 + i % 12}:30 PM" for i in range(39)]
    with pytest.raises(
        TableError, match=r"39 of 40 values are times; not: '13:30 PM' \(row 40\); remove the last row if"
    ):
        all_used(tmp_path, csv_of(a=[*times, "13:30 PM"], y=Y), {})
    with pytest.raises(TableError, match=r"39 of 40 values are dates of one form; not: '2024-01-02 13:30 PM'"):
        all_used(tmp_path, csv_of(a=[*(f"2024-01-02 {t}" for t in times), "2024-01-02 13:30 PM"], y=Y), {})


@pytest.mark.parametrize(
    ("levels", "note"),
    [
        ((r'"20,-"', '"5,-"', '"7,-"'), "; values such as '20,-' are not read as numbers or dates"),
        (("1/2", "1/4", "3/4"), "; values such as '1/2' are not read as numbers or dates"),
        (("5KB", "2MB", "1GB"), "; values such as '1GB' are not read as numbers or dates"),
        (("5 mg", "10 mg", "20 mg"), "; --numeric 'a' reads values such as '10 mg' as numbers"),
        (("5 mg", "10 mg"), ""),
        (("18-25", "26-40", "65+"), ""),
        (("<5", "5-10", ">10"), ""),
        (("1st", "2nd", "3rd"), ""),
        (("4th", "5th", "6th"), ""),
        (("1a", "1b", "2a"), ""),
        (("1.2.3", "1.2.4", "1.3.0"), ""),
    ],
)
def test_few_categories_of_quantities_have_a_note(tmp_path, levels, note) -> None:
    notes = used(read(tmp_path, csv_of(a=[levels[i % len(levels)] for i in range(40)], b=X, y=Y))).notes
    assert notes == ((f"column 'a' has {len(levels)} categories{note}",) if note else ())
    if "--numeric" in note:
        assert column(read(tmp_path, csv_of(a=levels, y=Y[:3]), numeric=["a"])).numbers.tolist() == [5.0, 10.0, 20.0]


def test_alike_notes_of_many_columns_are_counted(tmp_path) -> None:
    many = {f"x{i}": [f"{(i + j) % 3}/9" for j in range(40)] for i in range(40)}
    notes = used(read(tmp_path, csv_of(**many, y=Y))).notes
    assert len(notes) == 6
    assert notes[-1] == "35 more notes like this, on 'x5', 'x6', 'x7', …"


def test_a_time_that_is_none_is_refused_where_the_fit_had_times(tmp_path) -> None:
    (tmp_path / "n.csv").write_text("a\n2:30 pm\n14:30 pm\n3:30 pm\n")
    (batch,) = read_batches(tmp_path / "n.csv", Reading(), {"a": "numeric"})
    assert column(batch.table).problem.startswith(": 2 of 3 values are times; not: '14:30 pm' (row 2); --missing")


def test_several_byte_order_marks_are_no_part_of_a_name(tmp_path) -> None:
    assert [*read(tmp_path, "\ufeff\ufeff" + csv_of(a=X, y=Y)).columns] == ["a", "y"]


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("a,y", "left out the first row: it repeats the names"),
        ("---,---", "left out the first row: it is a ruled line"),
        ("kg,m", "left out the first row: it has units ('kg', 'm') instead of values"),
    ],
)
def test_a_line_below_the_header_is_named(tmp_path, line, note) -> None:
    table = read(tmp_path, csv_of(a=X, y=Y).replace("\n", f"\n{line}\n", 1))
    assert (table.notes, table.rows) == ((note,), 40)


def test_a_file_compressed_twice_is_named(tmp_path) -> None:
    content = gzip.compress(gzip.compress(csv_of(a=X, y=Y).encode()))
    with pytest.raises(TableError, match=r"the decompressed content is that of a \.gz file; decompress it once"):
        read(tmp_path, content, "t.csv.gz")


def test_digits_beside_true_are_booleans(tmp_path) -> None:
    found = column(read(tmp_path, csv_of(a=["true", "0", "TRUE", "1", "false"], y=Y[:5])))
    assert (found.kind, found.numbers.tolist()) == ("boolean", [1.0, 0.0, 1.0, 1.0, 0.0])
    found = column(read(tmp_path, csv_of(a=["true", "0.0", "1.0", "1", "false"], y=Y[:5])))
    assert (found.kind, found.numbers.tolist()) == ("boolean", [1.0, 0.0, 1.0, 1.0, 0.0])


def test_dates_of_letters_with_a_weekday_are_read(tmp_path) -> None:
    days = [
        "Mon, 01 Jan 2024 10:00:00 +0200",
        "Tue, 02 Jan 2024 08:00:00 GMT",
        "Wednesday, January 3, 2024 8:00 AM UTC",
    ]
    for day in days:
        first, second = column(read(tmp_path, csv_of(a=[f'"{day}"'] * 2, y=Y[:2]))).numbers
        assert first == second == 1_704_096_000.0 + 86_400 * days.index(day)


def test_a_word_before_a_date_is_a_weekday(tmp_path) -> None:
    days = ["before 3 May 2024", "after 3 May 2024"] * 20
    assert column(read(tmp_path, csv_of(a=days, y=Y))).kind == "text"
    days = ["TUE 31 Dec 2024", '"Wednesday, 1 Jan 2025"'] * 20
    assert column(read(tmp_path, csv_of(a=days, y=Y))).kind == "date"


def test_a_time_among_numbers_is_the_odd_value(tmp_path) -> None:
    with pytest.raises(TableError, match=r"39 of 40 values are numbers; not: '14:30' \(row 40\)"):
        all_used(tmp_path, csv_of(a=[*range(100, 139), "14:30"], y=Y), {})


def test_times_of_the_day_beside_durations_are_refused(tmp_path) -> None:
    words = ["1:30 pm", "2:30 pm", "25:00:00"]
    with pytest.raises(TableError, match=r"2 of 3 values are times; not: '25:00:00' \(row 3\)"):
        all_used(tmp_path, csv_of(a=words, y=Y[:3]), {})
    (tmp_path / "n.csv").write_text("a\n" + "\n".join(words) + "\n")
    (batch,) = read_batches(tmp_path / "n.csv", Reading(), {"a": "numeric"})
    assert column(batch.table).problem.startswith(": 2 of 3 values are times; not: '25:00:00' (row 3); --missing")
