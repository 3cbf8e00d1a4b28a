"""A table larger than memory may be: one pass over Parquet files of 5 GB, and the most memory that the process ever had.

The table has 64 inputs and one target, float32, in four files with row groups of 65,536 rows, without compression: the size on
disk is that of the numbers. A process of its own trains a small model on it, and reports what the system counted as its peak
resident memory (VmHWM), which includes Python and PyTorch. The files are written to a temporary folder and removed at the end.

Run: python benchmarks/out_of_core.py [--gigabytes 5] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from measure import MB, Report, Table, Target, number, options, progress

import kapsi as kp

COLUMNS = 64
BYTES = 4 * (COLUMNS + 1)
GROUP = 65_536
FILES = 4
BATCH = 1_024
LIMIT = 1_500
"""Most MB of resident memory."""


def write_table(folder: Path, rows: int, seed: int = 0) -> None:
    """Write a table whose target is a quadratic function of a few inputs, and noise with a tenth of its deviation."""
    generator = np.random.default_rng(seed)
    schema = pa.schema([(f"x{i}", pa.float32()) for i in range(COLUMNS)] + [("y", pa.float32())])
    for file in range(FILES):
        left = rows // FILES + (file < rows % FILES)
        with pq.ParquetWriter(
            folder / f"part-{file}.parquet", schema, compression="none", use_dictionary=False
        ) as writer:
            while left:
                taken = min(left, GROUP)
                x = generator.standard_normal((COLUMNS, taken), dtype=np.float32)
                y = x[0] - x[1] + x[2] * x[3] + np.float32(0.17) * generator.standard_normal(taken, dtype=np.float32)
                writer.write_table(pa.table([*x, y], schema=schema), row_group_size=GROUP)
                left -= taken
                progress(f"writing: {size_of(folder) / 1e9:.1f} GB")


def size_of(folder: Path) -> int:
    """Return the bytes of the files in a folder."""
    return sum(file.stat().st_size for file in folder.iterdir())


def peak() -> float:
    """Return the most resident memory that this process ever had, in MB."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / MB
    return math.nan


class Steps(kp.Callback):
    """Counts steps."""

    count = 0

    def on_step(self, record: kp.Step) -> None:
        self.count += 1


def train(folder: Path) -> dict[str, Any]:
    """Train a model in one pass over the table and return what that took."""
    before = peak()
    rows = kp.ParquetRows(folder, target="y")
    model = kp.Model(kp.rpn([COLUMNS, 1], kp.Taylor(2, symmetric=True), bias=True), seed=0)
    counter = Steps()
    begun = time.perf_counter()
    (record,) = kp.fit(
        model,
        rows,
        solver=kp.AdamW(learning_rate=2e-3, schedule="constant", batch_size=BATCH),
        loss="mse",
        epochs=1,
        callbacks=counter,
    )
    taken = time.perf_counter() - begun
    begun = time.perf_counter()
    read = sum(count for _, _, _, count in rows.batches(BATCH, seed=0, epoch=2))
    count = rows.count or 0
    return {
        "rows": count,
        "seen": count if counter.count == rows.length(BATCH) else 0,
        "read": read,
        "seconds": taken,
        "reading_seconds": time.perf_counter() - begun,
        "loss": record.loss,
        "before_mb": before,
        "peak_mb": peak(),
    }


def main() -> int:
    chosen = options(
        __doc__ or "",
        1,
        gigabytes={"type": float, "default": 5.0, "help": "size of the table (default 5; 0.2 with --quick)"},
        folder={"type": Path, "help": "where the table is written for the time being"},
        train={"type": Path, "help": argparse.SUPPRESS},
    )
    if chosen.train:
        print(json.dumps(train(chosen.train)))
        return 0
    gigabytes = min(chosen.gigabytes, 0.2) if chosen.quick else chosen.gigabytes
    rows = max(FILES, int(gigabytes * 1e9 / BYTES))
    with tempfile.TemporaryDirectory(prefix="out_of_core-", dir=chosen.folder) as name:
        folder = Path(name)
        free = shutil.disk_usage(folder).free
        if free < 1.1 * rows * BYTES:
            print(f"{folder}: {free / 1e9:.1f} GB are free, and the table has {gigabytes:g} GB; give another --folder")
            return 1
        write_table(folder, rows)
        disk = size_of(folder)
        progress(f"training on {disk / 1e9:.1f} GB")
        command = [sys.executable, __file__, "--train", str(folder), "--threads", str(chosen.threads)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return done.returncode
    found = json.loads(done.stdout)
    report = Report("out_of_core", chosen)
    header = ["table", "rows", "peak memory", "before", "rows/s, training", "rows/s, reading only", "mean loss"]
    cells = [
        f"{disk / 1e9:.2f} GB",
        f"{rows:,}",
        f"{found['peak_mb']:,.0f} MB",
        f"{found['before_mb']:,.0f} MB",
        f"{found['seen'] / found['seconds']:,.0f}",
        f"{found['read'] / found['reading_seconds']:,.0f}",
        number(found["loss"]),
    ]
    report.tables.append(Table("One pass over a table on disk, batches of 1,024 rows.", header, [cells]))
    report.notes.append(
        "Before: Python and PyTorch, without data. The mean loss is over the whole pass; the noise has a loss of 0.0289. `kp.fit` "
        "trains a symmetric Taylor expansion of degree 2 with 2,145 parameters; training time includes reading."
    )
    report.targets += [
        Target("peak resident memory", LIMIT, found["peak_mb"], " MB", most=True),
        Target("share of the rows that were trained on", 1, found["seen"] / rows, ""),
    ]
    report.figures.append({"disk_bytes": disk, **found})
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
