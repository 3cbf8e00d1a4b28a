"""Tables of hundreds of columns are read as narrow ones: the same types, values, notes and errors, whatever the width."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from kapsi.data.tabular import Reading, delimited, read_table, wide
from kapsi.errors import TableError
from test_reading import CASES, X, csv_of

sys.path.insert(0, str(Path(__file__).parent / "fuzz"))
import drawn

DRAWN = 60
FURTHER = {
    "no mark in the first rows": (csv_of(";", a=[7] * 300 + ["2,5"], b=["2.784"] * 300 + ["1.200"]), {}),
    "no mark at all": (csv_of(";", a=range(9), b=["2.784"] * 9), {}),
    "two marks": (csv_of(";", a=["2,5"] * 9, b=["2.5"] * 9, c=["1.250"] * 9), {}),
    "decimal points of another column": (csv_of(a=["1.25"] * 9, b=['"1,234"'] * 9), {}),
    "many different commas": (csv_of(a=[f'"{i},25"' for i in range(99)], b=['"1,234"'] * 99), {}),
    "above 2**53": (csv_of(a=[2**53 + 1] * 9, b=[2**63 + 1] * 9, c=[2**53 + 0.5] * 9, d=["9" * 400] * 9), {}),
    "above 2**53, numeric": (csv_of(a=[2**53 + 1] * 9), {"numeric": ["a"]}),
    "declared": (csv_of(a=X, b=[-9999, *X[1:]], c=["-9999.0", *X[1:]], d=["x", *X[1:]]), {"missing": ["-9999", "x"]}),
    "a thousands separator": (csv_of(";", a=["1.234"] * 9, b=[5] * 9), {"thousands": "."}),
    "a decimal comma": (csv_of(";", a=["1,234"] * 9, b=[5] * 9, c=["1.5"] * 9), {"decimal": ","}),
    "a late quote": (csv_of(a=[*range(30), '"5,5"'], b=range(31)), {}),
    "a late long row": (csv_of(a=[*range(30), "5,5"], b=range(31)), {}),
    "carriage returns": (csv_of(a=X, b=X).replace("\n", "\r"), {}),
    "empty lines": ("a,b\n\n1,2\n  \n,\n3,4\n\n", {}),
    "tabs": (csv_of("\t", a=["1", "", "3"], b=["u", "", "v"]), {}),
    "one column": ("a\n1\n\n2\n", {}),
    "no rows": ("a,b\n", {}),
    "times and dates": (csv_of(a=["12:30", "13:00"], b=["2024-01-02"] * 2, c=["2024-01-02T10:00:00Z"] * 2), {}),
    "plus signs and forms": (csv_of(a=["+1", "-.5", "1."], b=["+1", "2", "3"], c=["1e400", "1e-400", "inf"]), {}),
    "compact dates": (csv_of(a=[20240131 + i for i in range(-9, 1)], b=["2:30 pm"] * 10, c=["true", *"1010"] * 2), {}),
    "a number of 400 digits beside codes": (csv_of(a=["9" * 400, "007"], b=["007", "1"]), {}),
    "codes of 400 digits": (csv_of(a=["007", "0" + "9" * 400]), {}),
    "codes beside a decimal point": (csv_of(a=["007", "2.5"], b=["1", "2"]), {}),
    "infinity and decimal commas": (csv_of(";", a=["inf", "1,5"], b=["007", "-Infinity"], c=["inf", "inf"]), {}),
    "infinity and a given decimal comma": (csv_of(";", a=["inf", "1"], b=["inf", "9" * 400]), {"decimal": ","}),
    "plus signs alone": (csv_of(a=["+5", "7"], b=["0x1F", "1"], c=["007", "+1"]), {}),
    "not UTF-8 at the end": (csv_of(a=[*["x" * 3000] * 99, "é"], b=range(100)).encode("latin-1"), {}),
}


def described(path: Path, options: dict[str, object]) -> object:
    """Return all that is to be known of a table, or the message of the error."""
    try:
        table = read_table(path, Reading(**options))
    except TableError as error:
        return str(error)
    columns = {
        name: (c.kind, c.reason, c.notes, c.problem, c.free, [None if v != v else v for v in c.values.tolist()])
        for name, c in table.columns.items()
    }
    return columns, table.notes, table.decimal, table.digest


def compare(path: Path, options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> object:
    narrow = described(path, options)
    monkeypatch.setattr(delimited, "WIDE", 1)
    for cells in (30, 2**20):
        monkeypatch.setattr(wide, "CELLS", cells)
        assert described(path, options) == narrow
    return narrow


@pytest.mark.parametrize("case", [*CASES, *FURTHER])
def test_cases(case, tmp_path, monkeypatch):
    content, options = {**FURTHER, **CASES}[case][:2]
    path = tmp_path / ("t.txt" if "blanks" in case else "t.csv")
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    compare(path, options, monkeypatch)


@pytest.mark.parametrize("seed", range(DRAWN))
def test_drawn_tables(seed, tmp_path, monkeypatch):
    path = tmp_path / "t.csv"
    path.write_bytes(drawn._csv(np.random.default_rng((5, seed))))
    compare(path, {}, monkeypatch)


def test_codes_of_many_digits_and_infinities_are_read_alike(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(csv_of(a=["9" * 400, "007"], b=["007", "2.5"]))
    table = read_table(path)
    assert table.columns["a"].values.tolist() == ["9" * 400, "007"]
    assert table.columns["b"].values.tolist() == [7, 2.5]
    assert table.decimal == "."
    path.write_text(csv_of(";", a=["inf", "1,5"], b=[1, 2]))
    assert read_table(path).columns["a"].values.tolist() == [np.inf, 1.5]


def test_a_late_letter_that_is_not_utf8_is_read(tmp_path):
    (tmp_path / "t.csv").write_bytes(FURTHER["not UTF-8 at the end"][0])
    table = read_table(tmp_path / "t.csv")
    assert table.columns["a"].values[-1] == "é"
    assert table.notes == ("the text is not UTF-8; read as cp1252 (Western European); give --encoding for another",)
