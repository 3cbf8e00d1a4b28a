"""Batches of a table have the values of the whole table, or end with the row where the earlier ones turn out to be otherwise."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import kapsi as kp
from kapsi.data.tabular import Reading, batches, delimited, read_batches, read_table, wide, write_table
from kapsi.errors import TableError
from kapsi.tables import RunConfig, TableConfig, fit_table, load_run

sys.path.insert(0, str(Path(__file__).parent / "fuzz"))
import drawn

EARLY = 210
"""Rows from which the layout is found."""


@pytest.fixture(params=["narrow", "wide"], autouse=True)
def small(request, monkeypatch):
    """Batches of a few rows, of narrow and of wide tables."""
    monkeypatch.setattr(batches, "BLOCK", 600)
    monkeypatch.setattr(batches, "ROWS", 50)
    monkeypatch.setattr(wide, "CELLS", 100)
    monkeypatch.setattr(batches, "CELLS", 100)
    monkeypatch.setattr(batches, "WIDE_ROWS", 20)
    monkeypatch.setattr(delimited, "WIDE", 1 if request.param == "wide" else 500)
    monkeypatch.setattr(batches, "WIDE", 1 if request.param == "wide" else 500)


def table(path: Path, separator: str = ",", **columns: list[object]) -> Path:
    columns["long"] = ["x" * 20] * len(next(iter(columns.values())))
    rows = zip(*columns.values(), strict=True)
    path.write_text("\n".join(separator.join(map(str, row)) for row in [list(columns), *rows]) + "\n")
    return path


def kinds_of(path: Path, **kinds: str) -> dict[str, str]:
    return kinds or dict.fromkeys(read_table(path).columns, "numeric")


def in_batches(path: Path, kinds: dict[str, str], **options: object) -> dict[str, list[object]]:
    found: dict[str, list[object]] = {name: [] for name in kinds}
    parts = list(read_batches(path, Reading(), kinds, **options))
    assert len(parts) > 2
    for part in parts:
        part.table.use(part.table.columns)
        for name in kinds:
            found[name] += part.table.columns[name].values.tolist()
    return found


def as_whole(path: Path, kinds: dict[str, str], **options: object) -> dict[str, list[object]]:
    whole = read_table(path, kinds=kinds, **options)
    whole.use(kinds)
    return {name: whole.columns[name].values.tolist() for name in kinds}


def same(path: Path, kinds: dict[str, str], **options: object) -> dict[str, list[object]]:
    whole = as_whole(path, kinds, **options)
    np.testing.assert_equal(in_batches(path, kinds, **options), whole)
    return whole


LATE = ["2,5"] * 20


@pytest.mark.parametrize(
    ("columns", "separator", "last"),
    [
        ({"a": [*["2.784"] * EARLY, *LATE]}, ";", 2.5),
        ({"a": ["0"] * EARLY + ["true"] * 20}, ",", 1.0),
        ({"a": ["2.784"] * (EARLY + 20), "b": [*[5] * EARLY, *LATE]}, ";", 2784.0),
        ({"a": ["2.784"] * (EARLY + 20), "b": [*[5] * EARLY, *["2.5"] * 20]}, ";", 2.784),
        ({"a": ['"1,234"'] * (EARLY + 20), "b": [*[5] * EARLY, *["2.5"] * 20]}, ",", 1234.0),
        ({"a": [*[5] * EARLY, *LATE]}, ";", 2.5),
        ({"a": [*[5] * EARLY, *["2.500"] * 20]}, "\t", 2.5),
        ({"a": ["5"] * EARLY + ["007"] * 20}, ",", 7.0),
        ({"a": ["5"] * EARLY + [str(2**60)] * 20}, ",", 2.0**60),
        ({"a": [*[f"{i} kg" for i in range(EARLY)], *["7 kg"] * 90]}, ",", 7.0),
        ({"a": [*["$5"] * EARLY, *["7"] * 90]}, ",", 7.0),
        ({"a": [*["75:30"] * EARLY, *["0:01"] * 90]}, ",", 60.0),
    ],
)
def test_later_rows_decide_how_the_first_numbers_are_read(tmp_path, columns, separator, last):
    path = table(tmp_path / "t.csv", separator, **columns)
    kinds = dict.fromkeys(columns, "numeric")
    assert same(path, kinds)["a"][-1] == last


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ("0.5", '"0,5"', "the decimal mark is ',' here, and '.' in earlier rows"),
        ('"1,234.5"', '"0,5"', "here, and"),
        ("5%", "5", "the sign is none here, and '%' in earlier rows"),
        ("5", "true", "the form is true and false here, and numbers in earlier rows"),
        ("5%", "$5", "the sign is"),
    ],
)
def test_rows_in_another_form_are_refused(tmp_path, first, then, message):
    path = table(tmp_path / "t.csv", a=[*[first] * 300, *[""] * 100, *[then] * 300])
    with pytest.raises(TableError):
        as_whole(path, {"a": "numeric"})
    with pytest.raises(TableError, match=re.escape(message)):
        in_batches(path, {"a": "numeric"})


def test_days_and_months_keep_their_order(tmp_path):
    days = [f"{13 + i % 10}/04/2024" for i in range(300)]
    path = table(tmp_path / "t.csv", a=[*days, *["03/04/2024"] * 300])
    assert same(path, {"a": "date"})["a"][-1] == np.datetime64("2024-04-03", "s").astype(int)
    path = table(tmp_path / "t.csv", a=[*days, *[""] * 100, *["04/23/2024"] * 300])
    with pytest.raises(TableError, match="the form is dates as month/day/year here, and dates as day/month/year in"):
        in_batches(path, {"a": "date"})


def test_dashes_are_what_they_were_in_the_fit(tmp_path):
    """A table of one row shows no + beside its -; "NA" of a data frame or Parquet file may be a category."""
    rng = np.random.default_rng(0)
    c = ["+" if x > 0 else "-" for x in rng.normal(size=60)]
    columns = {"a": rng.normal(size=60).tolist(), "c": c, "y": [2.0 * (word == "+") for word in c]}
    write_table(tmp_path / "t.csv", columns)
    config = RunConfig(TableConfig("y"), None, kp.TrainConfig(l2=0.01, epochs=30))
    model = fit_table(tmp_path / "t.csv", config, tmp_path / "run") and load_run(tmp_path / "run").model
    (tmp_path / "one.csv").write_text("a,c\n0,-\n")
    (tmp_path / "two.csv").write_text("a,c\n0,+\n0,-\n")
    one, two = (model.predict(model.read(tmp_path / f"{name}.csv"))[0]["prediction"] for name in ("one", "two"))
    assert one[0] == pytest.approx(two[1])
    assert abs(two[0] - two[1]) > 1
    table(tmp_path / "n.csv", c=["NA"] * 300)
    found = same(tmp_path / "n.csv", {"c": "categorical"}, categories={"c": ("FR", "NA")})
    assert set(found["c"]) == {"NA"}
    assert set(same(tmp_path / "n.csv", {"c": "categorical"}, categories={"c": ("FR",)})["c"]) == {None}


def test_dashes_without_a_fit(tmp_path):
    """A dash beside other signs is a category in all rows; a dash that was missing in earlier rows is refused."""
    kinds = {"a": "categorical"}
    path = table(tmp_path / "t.csv", a=[*["+"] * 300, *["-"] * 300])
    assert set(same(path, kinds)["a"]) == {"+", "-"}
    path = table(tmp_path / "t.csv", a=[*["-"] * 300, *["u"] * 300])
    assert set(same(path, kinds)["a"]) == {None, "u"}
    path = table(tmp_path / "t.csv", a=[*["-"] * 300, *["+"] * 300])
    assert set(as_whole(path, kinds)["a"]) == {"+", "-"}
    with pytest.raises(TableError, match="a dash or dot is a category here, and missing in earlier rows"):
        in_batches(path, kinds)
    assert set(same(path, {"a": "text"})["a"]) == {None, "+"}


def test_byte_order_mark_before_the_first_row(tmp_path):
    path = table(tmp_path / "t.csv", a=["\ufeffu", *["u"] * 300])
    assert set(same(path, {"a": "categorical"})["a"]) == {"u"}


def test_late_letters_that_are_not_utf8_are_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(("a,b\n" + "x" * 3000 + ",1\n").encode() * 100 + "é,1\n".encode("latin-1"))
    with pytest.raises(TableError, match="is not UTF-8 text; save the table as UTF-8"):
        in_batches(path, {"a": "categorical"})


def test_strings_of_parquet_files_keep_their_form(tmp_path):
    pq.write_table(pa.table({"a": ["0.5"] * 200 + ["0,5"] * 200}), tmp_path / "t.parquet")
    with pytest.raises(TableError, match=r"the decimal mark is ',' here, and '\.' in earlier rows"):
        in_batches(tmp_path / "t.parquet", {"a": "numeric"})


@pytest.mark.parametrize("seed", range(40))
def test_drawn_tables(seed, tmp_path):
    """Each column that the whole table can use has the same values in batches, unless they are refused."""
    path = tmp_path / "t.csv"
    path.write_bytes(drawn._csv(np.random.default_rng((6, seed))))
    kinds = {"real": "numeric", "integer": "numeric", "boolean": "numeric", "text": "categorical", "date": "date"}
    try:
        whole = read_table(path)
    except TableError:
        return
    wanted = {name: kinds[column.kind] for name, column in whole.columns.items() if column.kind in kinds}
    whole = read_table(path, kinds=wanted)
    try:
        parts = list(read_batches(path, Reading(), wanted))
    except TableError:
        return
    for name in wanted:
        columns = [part.table.columns[name] for part in parts]
        if not whole.columns[name].problem and not any(column.problem for column in columns):
            found = [value for column in columns for value in column.values.tolist()]
            np.testing.assert_equal(found, whole.columns[name].values.tolist())
