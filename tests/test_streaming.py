"""Predictions of files in batches: equal to those of the whole table, with columns kept, counted and marked."""

from __future__ import annotations

import csv
import gzip
import io
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import kapsi as kp
from kapsi.cli import main
from kapsi.data.tabular import batches, read_table, write_table
from kapsi.tables import RunConfig, TableConfig, fit_table

QUICK = RunConfig(TableConfig("y"), None, kp.TrainConfig(l2=0.01, epochs=2))
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(main.__code__.co_filename).parents[2]), "OMP_NUM_THREADS": "1"}


def columns(count: int, seed: int = 0) -> dict[str, list[object]]:
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, size=(count, 2))
    kinds = ["u", "v", "w"]
    return {
        "id": [f"{i:05}" for i in range(count)],
        "a": x[:, 0].tolist(),
        "b": [None if i % 11 == 3 else value for i, value in enumerate(x[:, 1].tolist())],
        "c": [kinds[i % 3] for i in range(count)],
        "y": (2 * x[:, 0] + np.arange(count) % 3).tolist(),
    }


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train = columns(60)
    del train["id"]
    write_table("t.csv", train)
    fit_table("t.csv", QUICK, "run")


@pytest.fixture
def small(monkeypatch):
    """Batches of a few rows."""
    monkeypatch.setattr(batches, "BLOCK", 600)
    monkeypatch.setattr(batches, "ROWS", 7)


def predict(table: object, *options: str, output: str = "o.csv", code: int = 0) -> None:
    assert main(["predict", "run", str(table), "--output", output, *options]) == code


def rows(file: str = "o.csv") -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(Path(file).read_text(encoding="utf-8"), newline="")))


def whole(table: str) -> list[float]:
    model = kp.load_run("run").model
    return model.predict(model.read(table))[0]["prediction"]


def text(separator: str = ",", end: str = "", count: int = 50) -> str:
    data = columns(count, 1)
    lines = [
        separator.join(data),
        *(separator.join("" if v is None else str(v) for v in row) for row in zip(*data.values(), strict=True)),
    ]
    return "".join(f"{line}{end}\n" for line in lines)


def written(name: str) -> str:
    """Write a table of a kind by its name."""
    if name == "n.parquet":
        pq.write_table(pa.table(columns(50, 1)), name, row_group_size=20)
    elif name == "gz.csv.gz":
        Path(name).write_bytes(gzip.compress(text().encode()))
    elif name == "semicolon.csv":
        Path(name).write_text(text(";").replace(".", ","))
    elif name == "trailing.csv":
        Path(name).write_text(text(end=",").replace("id,a,b,c,y,", "id,a,b,c,y"))
    elif name == "long.csv":
        Path(name).write_text(text().replace("00030,", "0003" + "0" * 5000 + ","))
    elif name == "utf16.csv":
        Path(name).write_bytes(text().encode("utf-16"))
    else:
        Path(name).write_text(text())
    return name


@pytest.mark.parametrize(
    "name", ["n.csv", "n.parquet", "gz.csv.gz", "semicolon.csv", "trailing.csv", "long.csv", "utf16.csv"]
)
def test_batches_give_the_predictions_of_the_whole_table(small, name) -> None:
    table = written(name)
    found = list(batches.read_batches(table, kp.load_run("run").model.reading, {"a": "numeric"}))
    assert len(found) > 2
    assert sum(batch.table.rows for batch in found) == 50
    predict(table, "--keep", "id", "--keep", "c")
    assert [row["id"] for row in rows()][:3] == ["00000", "00001", "00002"]
    assert [row["c"] for row in rows()] == columns(50, 1)["c"]
    np.testing.assert_allclose([float(row["prediction"]) for row in rows()], whole(table), rtol=1e-12)


@pytest.mark.parametrize("output", ["o.csv", "o.tsv", "o.csv.gz", "o.parquet"])
def test_outputs_of_all_kinds_hold_the_same(small, output) -> None:
    predict(written("n.csv"), "--keep", "id", output=output)
    if output == "o.parquet":
        table = pq.read_table(output)
        assert table.schema.names == ["id", "prediction"]
        assert table.schema.types == [pa.large_string(), pa.float64()]
        found = table.column("prediction").to_pylist()
        assert table.column("id").to_pylist() == columns(50)["id"]
    else:
        found = read_table(output).columns["prediction"].numbers.tolist()
    np.testing.assert_allclose(found, whole("n.csv"), rtol=1e-12)


def test_kept_columns_of_parquet_files_keep_their_types(small) -> None:
    data = {**columns(50, 1), "day": pa.array(range(50), pa.date32()), "list": [[1, 2]] * 50}
    pq.write_table(pa.table(data), "n.parquet")
    predict("n.parquet", "--keep", "day", "--keep", "list", output="o.parquet")
    assert (
        pq.read_table("o.parquet")
        .select(["day", "list"])
        .equals(pa.table({name: data[name] for name in ("day", "list")}))
    )


def test_rows_and_predictions_outside_are_counted_and_marked(small, capsys) -> None:
    """Inputs beyond 1 in 20 of 50 rows, one of them NaN: extrapolation is told, not silent."""
    data = columns(50, 1)
    data["a"] = [*[0.5] * 30, *[900.0] * 20]
    data["b"] = [None] * 50
    write_table("n.csv", data)
    predict("n.csv", "--outside")
    captured = capsys.readouterr()
    assert "note: 20 of 50 rows are outside of the range of the training rows (column 'a': 20)" in captured.err
    held_out = {int(row["row"]) - 1 for row in rows("run/predictions.csv")}
    trained = [y for i, y in enumerate(columns(60)["y"]) if i not in held_out]
    low, high = min(trained), max(trained)
    assert (
        f"20 of 50 predictions are outside of the range of the training targets, {low:.6g} to {high:.6g}"
        in captured.err
    )
    assert [row["inputs_outside"] for row in rows()] == ["false"] * 30 + ["true"] * 20
    assert [row["prediction_outside"] for row in rows()] == ["false"] * 30 + ["true"] * 20
    predict("t.csv", output="p.csv")
    assert "inputs_outside" not in rows("p.csv")[0]


def test_unseen_and_empty_categories_are_counted_over_batches(small, capsys) -> None:
    data = columns(50, 1)
    data["c"] = ["new" if i % 5 == 0 else None if i % 5 == 1 else "u" for i in range(50)]
    write_table("n.csv", data)
    predict("n.csv")
    assert (
        "column 'c': 10 values were not in the training rows (such as 'new') and 10 are empty"
        in capsys.readouterr().err
    )


def test_standard_input_and_output() -> None:
    predict(written("n.csv"), "--keep", "id")
    expected = Path("o.csv").read_text()
    command = [sys.executable, "-m", "kapsi", "predict", "run", "-", "--keep", "id", "--output", "-"]
    done = subprocess.run(
        command, env=ENVIRONMENT, input=gzip.compress(Path("n.csv").read_bytes()), capture_output=True
    )
    assert done.stdout.decode() == expected
    assert done.stderr.splitlines()[-1] == b"note: 50 predictions are written"


def test_kinds_of_standard_input(monkeypatch, capsys) -> None:
    def piped(data: bytes) -> int:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        return main(["predict", "run", "-", "--keep", "id", "--output", "p.csv", "--overwrite"])

    predict(written("n.csv"), "--keep", "id")
    expected = Path("o.csv").read_text()
    pq.write_table(pa.table(columns(50, 1)), "n.parquet")
    for name in ("n.csv", "n.parquet"):
        assert piped(Path(name).read_bytes()) == 0
        assert Path("p.csv").read_text() == expected
    for data in (b"", b"a,b\n", b"\0\1\2"):
        capsys.readouterr()
        assert piped(data) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_copies_of_standard_input_do_not_outlive_a_kill(monkeypatch) -> None:
    """The folder of a process that was killed is deleted by the next one; those of others stay."""
    Path("tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(Path("tmp").absolute()))
    command = [sys.executable, "-m", "kapsi", "predict", "run", "-", "--output", "o.csv"]
    process = subprocess.Popen(command, env={**ENVIRONMENT, "TMPDIR": "tmp"}, stdin=subprocess.PIPE)
    process.stdin.write(text().encode())
    process.stdin.flush()
    while process.poll() is None and not [name for name in os.listdir("tmp") if name.startswith("kapsi-")]:
        time.sleep(0.01)
    process.kill()
    process.wait()
    process.stdin.close()
    (left,) = [name for name in os.listdir("tmp") if name.startswith("kapsi-")]
    assert left.startswith(f"kapsi-{process.pid}-")
    for other in (f"kapsi-{os.getppid()}-x-abc", left.replace(str(process.pid), "1"), "kapsi-mine"):
        Path("tmp", other).mkdir()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text().encode())))
    predict("-")
    assert [float(row["prediction"]) for row in rows()] == pytest.approx(whole(written("n.csv")))
    assert sorted(os.listdir("tmp")) == sorted(
        [f"kapsi-{os.getppid()}-x-abc", left.replace(str(process.pid), "1"), "kapsi-mine"]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--keep", "nothing"), "--keep 'nothing': is no column; the columns are"),
        (("--keep", "ident"), "--keep 'ident': is no column"),
        (("--keep", "id", "--keep", "id"), "a column is named twice"),
        (("--keep", "prediction"), "is the name of a column of predictions"),
    ],
)
def test_options_that_do_not_fit(options, message, capsys) -> None:
    data = columns(60)
    data["prediction"] = data["id"]
    write_table("t.csv", data)
    predict("t.csv", *options, code=2)
    assert message in capsys.readouterr().err
    assert not Path("o.csv").exists()


def test_an_existing_file_is_replaced_when_asked_only(capsys) -> None:
    Path("o.csv").write_text("mine")
    predict("t.csv", code=2)
    assert "exists already; give another --output, or --overwrite" in capsys.readouterr().err
    assert Path("o.csv").read_text() == "mine"
    predict("t.csv", "--overwrite")
    assert len(rows()) == 60
    os.symlink("o.csv", "link.csv")
    before = Path("o.csv").read_bytes()
    predict("t.csv", "--overwrite", "--outside", output="link.csv")
    assert os.readlink("link.csv") == "o.csv"
    assert Path("o.csv").read_bytes() != before


def test_an_error_in_a_later_batch_leaves_no_file_and_names_the_rows(small, capsys) -> None:
    Path("n.csv").write_text(text().replace("00045,", "00045,x"))
    predict("n.csv", code=2)
    error = capsys.readouterr().err
    assert "column 'a'" in error
    assert "(rows are counted from row " in error
    assert sorted(os.listdir()) == ["n.csv", "run", "t.csv"]
    Path("n.csv").write_text(text().replace("00045,", "00045,1,"))
    predict("n.csv", code=2)
    assert capsys.readouterr().err.startswith("kapsi: n.csv: line 47 has 6 values, the header has 5")
    assert sorted(os.listdir()) == ["n.csv", "run", "t.csv"]
