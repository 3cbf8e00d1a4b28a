"""Reading a CSV file: kapsi beside pyarrow, pandas and polars, in time and memory, and kapsi on wide tables.

Times are medians over the rounds, all readers in one process, in turn. Memory is the growth of the largest resident size in a
process that reads once (Linux).

Run: python benchmarks/reading.py
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measure import Report, Table, Target, options, progress

ROWS = 1_000_000


def write(path: Path, rows: int) -> None:
    """Write 20 columns: 13 of real numbers, 4 of integers, 3 of words."""
    import pyarrow as pa
    import pyarrow.csv as pa_csv

    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {f"x{i}": rng.normal(size=rows).round(4) for i in range(13)}
    columns |= {f"i{i}": rng.integers(0, 1000, rows) for i in range(4)}
    columns |= {f"c{i}": rng.choice(["red", "green", "blue", "light blue"], rows) for i in range(3)}
    pa_csv.write_csv(pa.table(columns), path)


def write_wide(path: Path, rows: int, width: int) -> None:
    """Write a table of many columns of real numbers."""
    values = np.random.default_rng(0).normal(size=(rows, width)).round(3)
    lines = [",".join(f"g{i}" for i in range(width)), *(",".join(map(str, row)) for row in values)]
    path.write_text("\n".join(lines) + "\n")


def readers() -> dict[str, Callable[[str], Any]]:
    """Return the readers of the installed packages by name."""
    import pyarrow.csv as pa_csv

    from kapsi.data.tabular import read_table

    found: dict[str, Callable[[str], Any]] = {"pyarrow": pa_csv.read_csv, "kapsi": read_table}
    for name in ("pandas", "polars"):
        if importlib.util.find_spec(name) is not None:
            found[name] = importlib.import_module(name).read_csv
    return found


def memory(name: str, path: Path) -> float:
    """Return the growth of the largest resident size in MB while a fresh process reads a file."""
    done = subprocess.run(
        [sys.executable, __file__, "--one", name, str(path)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def grown(name: str, path: str) -> float:
    """Return the growth of the largest resident size of this process in MB."""
    read = readers()[name]
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder, "small.csv")
        write(small, 10)
        read(str(small))  # imports
    before = largest()
    table = read(path)
    assert table is not None
    return largest() - before


def largest() -> float:
    """Return the largest resident size of this process in MB; a process inherits the one of `getrusage` from its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "--one":
        print(grown(*sys.argv[2:4]))
        return
    chosen = options(__doc__ or "", rounds=5)
    report = Report("reading", chosen)
    rows = 20_000 if chosen.quick else ROWS
    table = Table(f"{rows:,} rows, 20 columns.", ["reader", "seconds", "× pyarrow", "MB", "× pyarrow"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.csv")
        write(path, rows)
        times: dict[str, list[float]] = {name: [] for name in readers()}
        for i in range(chosen.rounds):
            progress(f"reading: round {i + 1}")
            for name, read in readers().items():
                start = time.perf_counter()
                read(str(path))
                times[name].append(time.perf_counter() - start)
        sizes = {name: memory(name, path) for name in times}
        medians = {name: statistics.median(values) for name, values in times.items()}
        for name, seconds in medians.items():
            ratio, share = seconds / medians["pyarrow"], sizes[name] / max(sizes["pyarrow"], 1e-9)
            report.figures.append({"reader": name, "seconds": seconds, "megabytes": sizes[name]})
            table.rows.append([name, f"{seconds:.2f}", f"{ratio:.2f}", f"{sizes[name]:.0f}", f"{share:.2f}"])
        report.targets.append(Target("time", 3, medians["kapsi"] / medians["pyarrow"], most=True))
        report.targets.append(Target("memory", 1.5, sizes["kapsi"] / max(sizes["pyarrow"], 1e-9), most=True))
        wide = Table("Wide tables.", ["rows", "columns", "seconds"])
        for count, width in ((20, 600), (10, 2_000)) if chosen.quick else ((200, 5_000), (10, 250_000)):
            write_wide(path, count, width)
            start = time.perf_counter()
            readers()["kapsi"](str(path))
            wide.rows.append([str(count), f"{width:,}", f"{time.perf_counter() - start:.2f}"])
    report.tables += [table, wide]
    report.finish()


if __name__ == "__main__":
    main()
