"""Drawn inputs: tables, specifications, run folders and model files, good, odd, damaged and hostile; a seed draws one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kapsi.function import catalogue, options_of
from kapsi.spec import to_dict

CONTROL = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e\u2028\r"
WORDS = (
    *(
        "",
        " ",
        "NA",
        "-",
        "?",
        "yes",
        "no",
        "true",
        "False",
        "0",
        "1",
        "007",
        "1e400",
        "-1e308",
        "nan",
        "inf",
        "1,5",
        "1.000,5",
    ),
    *(
        "12%",
        "$3",
        "2.0D+03",
        "2024-02-30",
        "2024-01-05",
        "31/12/2023",
        "12:30",
        '"',
        "'",
        "a\nb",
        "é",
        "数",
        CONTROL,
        "x" * 3000,
    ),
    *("=1+1", "{}", "\\N", "#DIV/0!", "-9999", "0x1F", "1_000", "٣", "½", "null", "\ufeff", "1e-320", "9" * 400),
    *(
        "1.2K",
        "3M",
        "5m",
        "€4.5M",
        "2 million",
        "12 kg",
        "1:23:45",
        "36:10:05",
        "5 days 03:00:00",
        "PT1H30M",
        "-P1D",
        "P",
    ),
)
QUANTITIES = (
    "${}",
    "{} €",
    "{}%",
    "{}K",
    "{}M",
    "{} kg",
    "{:.0f}:10:05",
    "{:.0f} days 03:00:00",
    "PT{}H",
    "{}",
    "({}%)",
)
SEPARATORS = (",", ";", "\t", "|", " ")
NAMES = (
    "a",
    "b",
    "c",
    "y",
    "prediction",
    "fold",
    "",
    " a",
    "a",
    "1",
    "y is missing",
    CONTROL,
    "é",
    "'",
    '"',
    "x" * 500,
    "=",
    "null",
)


def _number(rng: np.random.Generator) -> str:
    size = 10.0 ** rng.integers(-320, 309) if rng.random() < 0.05 else 10.0 ** rng.integers(-3, 4)
    return repr(float(rng.normal() * size))


def _cells(rng: np.random.Generator, rows: int) -> list[str]:
    kind = rng.integers(7)
    if kind < 3:
        cells = [_number(rng) for _ in range(rows)]
    elif kind == 3:
        cells = [str(rng.integers(-3, 4)) for _ in range(rows)]
    elif kind == 4:
        cells = [str(rng.choice(["u", "v", "w"])) for _ in range(rows)]
    elif kind == 5:
        cells = [str(WORDS[rng.integers(len(WORDS))]) for _ in range(rows)]
    else:
        forms = [QUANTITIES[rng.integers(len(QUANTITIES))] for _ in range(rng.integers(1, 3))]
        cells = [forms[rng.integers(len(forms))].format(round(float(rng.normal(20, 9)), 1)) for _ in range(rows)]
    for _ in range(rng.integers(0, 3) if rng.random() < 0.4 else 0):
        cells[rng.integers(rows)] = str(WORDS[rng.integers(len(WORDS))])
    return cells


def _mutated(rng: np.random.Generator, data: bytes) -> bytes:
    """Return bytes changed, cut, repeated, inserted or exchanged at a few places."""
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(len(data) + 1))
        kind = rng.integers(5)
        if kind == 0:
            data = data[:at]
        elif kind == 1:
            data = data[:at] + rng.bytes(int(rng.integers(1, 9))) + data[at:]
        elif kind == 2 and data:
            data = data[: at - 1] + bytes([data[at - 1] ^ (1 << int(rng.integers(8)))]) + data[at:]
        elif kind == 3:
            end = at + int(rng.integers(1, 60))
            data = data[:at] + data[end:]
        else:
            end = at + int(rng.integers(1, 60))
            data = data[:end] + data[at:]
    return data


def _csv(rng: np.random.Generator) -> bytes:
    rows, separator = int(rng.integers(1, 40)), SEPARATORS[rng.integers(len(SEPARATORS))]
    odd = rng.random() < 0.3
    names = [str(NAMES[rng.integers(len(NAMES))]) if odd else f"x{i}" for i in range(rng.integers(1, 6))]
    names = [*names, "y"] if rng.random() < 0.9 else names
    columns = [_cells(rng, rows) for _ in names]
    quoted = rng.random() < 0.6

    def cell(text: str) -> str:
        plain = not quoted or not any(mark in text for mark in (separator, '"', "\n", "\r"))
        return text if plain else '"' + text.replace('"', '""') + '"'

    lines = [separator.join(map(cell, line)) for line in ([*names], *zip(*columns, strict=True))]
    end = "\r\n" if rng.random() < 0.2 else "\n"
    text = end.join(lines) + end * int(rng.integers(0, 3))
    encoding = ("utf-8-sig", "latin-1", "utf-16", *["utf-8"] * 12)[rng.integers(15)]
    data = text.encode(encoding, errors="replace")
    return _mutated(rng, data) if rng.random() < 0.25 else data


def _parquet(rng: np.random.Generator, file: Path) -> None:
    rows = int(rng.integers(1, 30))
    kinds: tuple[Any, ...] = (
        pa.array(rng.normal(size=rows)),
        pa.array(rng.integers(0, 3, rows)),
        pa.array([["u", "v", None][i] for i in rng.integers(0, 3, rows)], pa.string()),
        pa.array([[1, 2]] * rows),
        pa.array(rng.integers(0, 10**6, rows), pa.timestamp("ns")),
        pa.array([b"\xff"] * rows, pa.binary()),
        pa.array([None] * rows, pa.null()),
        pa.array(rng.normal(size=rows).astype(np.float16)),
        pa.array([{"a": 1}] * rows),
        pa.array(["u"] * rows).dictionary_encode(),
        pa.array([CONTROL] * rows),
        pa.array(rng.integers(0, 86400, rows).astype(np.int32), pa.time32("s")),
        pa.array(rng.integers(0, 10**6, rows), pa.duration("ms")),
    )
    count = int(rng.integers(1, 6))
    chosen = [kinds[rng.integers(3 if rng.random() < 0.6 else len(kinds))] for _ in range(count)]
    odd = rng.random() < 0.3
    names = [str(NAMES[rng.integers(len(NAMES))]) if odd else f"x{i}" for i in range(count)] + ["y"]
    chosen.append(kinds[rng.integers(3)])
    pq.write_table(pa.table(chosen, names=names), file)
    if rng.random() < 0.4:
        file.write_bytes(_mutated(rng, file.read_bytes()))


def table(rng: np.random.Generator, folder: Path) -> Path:
    """Write a table, most of them with a column y."""
    if rng.random() < 0.25:
        file = folder / "t.parquet"
        _parquet(rng, file)
        return file
    file = folder / str(rng.choice(["t.xyz", "t.tsv", "t.txt", *["t.csv"] * 12]))
    file.write_bytes(b"" if rng.random() < 0.02 else rng.bytes(200) if rng.random() < 0.02 else _csv(rng))
    return file


# ------------------------------------------------------------------------------------------------ specifications

NUMBERS = (
    0,
    1,
    2,
    -1,
    3,
    0.5,
    1e308,
    float("inf"),
    float("nan"),
    2**31,
    10**30,
    10**400,
    True,
    None,
    "2",
    "",
    [],
    {},
    [1],
    CONTROL,
)
KEYS = {
    "expansion": "expansion",
    "reconciliation": "reconciliation",
    "remainder": "remainder",
    "before": "process",
    "fusion": "fusion",
}


def _choice(rng: np.random.Generator, values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def _function(rng: np.random.Generator, role: str) -> Any:
    """Return an example of a function as plain data, often with an odd option."""
    if rng.random() < 0.05:
        return _choice(rng, ("nothing", CONTROL, {}, [], None, 3, {"kind": "taylor", CONTROL: 1}))
    cls = _choice(rng, catalogue(role if rng.random() < 0.95 else "loss"))
    data = {"kind": cls.name, **to_dict_of(_choice(rng, cls.examples))}
    if rng.random() < 0.3:
        names = [option.name for option in options_of(cls)] or ["kind"]
        data[_choice(rng, names)] = _choice(rng, NUMBERS)
    return data


def to_dict_of(options: Any) -> dict[str, Any]:
    """Return the options of an example as plain data."""
    return {name: to_dict(value) for name, value in options.items()}


def _head(rng: np.random.Generator) -> Any:
    head: dict[str, Any] = {
        key: _function(rng, role) for key, role in KEYS.items() if rng.random() < 0.4 and key != "fusion"
    }
    if rng.random() < 0.2:
        head["channels"] = _choice(rng, NUMBERS) if rng.random() < 0.5 else 2
    return head


def specification(rng: np.random.Generator, folder: Path) -> Path:
    """Write a specification of a model."""
    widths = [
        _choice(rng, NUMBERS) if rng.random() < 0.05 else int(rng.integers(1, 9)) for _ in range(rng.integers(2, 5))
    ]
    if rng.random() < 0.03:
        widths = widths * 40_000
    count = _choice(rng, (1, 1, len(widths) - 1))
    layers: Any = [{"heads": [_head(rng) for _ in range(rng.integers(1, 3))]} for _ in range(count if count < 9 else 1)]
    if rng.random() < 0.2:
        layers[0]["fusion"] = _function(rng, "fusion")
    data: Any = {"widths": widths, "layers": layers}
    if rng.random() < 0.1:
        training = {"loss": _function(rng, "loss"), "solver": _function(rng, "solver")}
        data = _choice(rng, (widths, layers, {"model": data}, {"model": data, "training": training}, CONTROL, None))
    text = json.dumps(data)
    if rng.random() < 0.05:
        text = "[" * 100_000 if rng.random() < 0.5 else text.replace('"kind"', "&a kind", 1)
    raw = text.encode(errors="replace")
    file = folder / str(_choice(rng, ("spec.yaml", "spec.json")))
    file.write_bytes(_mutated(rng, raw) if rng.random() < 0.1 else raw)
    return file


# ------------------------------------------------------------------------------------------------ runs and models


def _changed(rng: np.random.Generator, value: Any) -> Any:
    """Return plain data with one place changed."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = _choice(rng, list(value))
        kind = rng.random()
        if kind < 0.1:
            return {name: item for name, item in value.items() if name != key}
        return {**value, CONTROL: 1} if kind < 0.15 else {**value, key: _changed(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = int(rng.integers(len(value)))
        return value[:at] if rng.random() < 0.2 else [*value[:at], _changed(rng, value[at]), *value[at + 1 :]]
    return _choice(rng, NUMBERS)


def run_folder(rng: np.random.Generator, good: Path, folder: Path) -> Path:
    """Copy a run and damage a file of it; half of the time with the checksums of the damaged files."""
    run = folder / "run"
    shutil.copytree(good, run)
    name = str(rng.choice(["run.json", "preprocessing.json", "config.yaml", "model.safetensors"]))
    file = run / name
    if name.endswith(".json") and rng.random() < 0.7:
        file.write_text(json.dumps(_changed(rng, json.loads(file.read_text()))), encoding="utf-8", errors="replace")
    elif name == "model.safetensors" and rng.random() < 0.7:
        file.write_bytes(_model(rng, file.read_bytes()))
    else:
        file.write_bytes(_mutated(rng, file.read_bytes()))
    if rng.random() < 0.05:
        file.unlink()
        os.symlink(_choice(rng, ("/dev/zero", "/dev/stdin", "nothing", ".", name)), file)
    elif name != "run.json" and rng.random() < 0.8:
        manifest = json.loads((run / "run.json").read_text())
        data = file.read_bytes()
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        (run / "run.json").write_text(json.dumps(manifest))
    return run


def _model(rng: np.random.Generator, data: bytes) -> bytes:
    """Return a model file with one place of its header or its tensors changed."""
    size = int.from_bytes(data[:8], "little")
    if rng.random() < 0.1:
        return _mutated(rng, data)
    header = json.loads(data[8 : 8 + size])
    if rng.random() < 0.6:
        spec = _changed(rng, json.loads(header["__metadata__"]["spec"]))
        header["__metadata__"]["spec"] = json.dumps(spec)
    else:
        header = _changed(rng, header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def model_file(rng: np.random.Generator, good: Path, folder: Path) -> Path:
    """Write a changed copy of a model file."""
    file = folder / "m.safetensors"
    file.write_bytes(_model(rng, (good / "model.safetensors").read_bytes()))
    return file
