"""Run all benchmarks, each in a process of its own, and show what they found with one table of all targets at the end.

Results are written to benchmarks/results/NAME.json. With `--readme` the tables of a whole run also replace those in
benchmarks/README.md, between the markers there. Run: python benchmarks/run.py [--quick] [--readme] [--only NAME …]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measure import Table, Target, body, progress, summary, target_table

from kapsi.files import atomic

HERE = Path(__file__).parent
RESULTS = HERE / "results"
README = HERE / "README.md"
NAMES = (
    "layers",
    "kan_layers",
    "kan_errors",
    "kan_training",
    "mlp",
    "latency",
    "growth",
    "sparse_text",
    "trees",
    "hypernet",
    "engine",
    "elementary",
    "initial_values",
    "calibration",
    "interruptions",
    "reading",
    "out_of_core",
)


def command(name: str, chosen: argparse.Namespace, file: Path) -> list[str]:
    """Return the command line of one benchmark."""
    further: list[object] = ["--threads", chosen.threads, "--json", file]
    if chosen.quick:
        further.append("--quick")
    if chosen.rounds:
        further += ["--rounds", chosen.rounds]
    if name == "growth" and importlib.util.find_spec("matplotlib"):
        further += ["--picture", file.with_suffix(".png")]
    if name == "sparse_text" and chosen.imdb:
        further += ["--imdb", chosen.imdb]
    return [sys.executable, str(HERE / f"{name}.py"), *map(str, further)]


def run(name: str, chosen: argparse.Namespace) -> dict[str, Any] | None:
    """Run one benchmark and return its results, None if it did not come to its end."""
    file = RESULTS / f"{name}.json"
    file.unlink(missing_ok=True)  # that of an earlier run is not a result of this one
    # Its standard error, with progress and what went wrong, is that of this process.
    code = subprocess.run(command(name, chosen, file), stdout=subprocess.DEVNULL, check=False).returncode
    progress("")
    if code or not file.exists():
        return None
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def earlier(name: str) -> dict[str, Any]:
    """Return the results of an earlier run of a benchmark, nothing if there are none."""
    file = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found


def text_of(data: Mapping[str, Any]) -> str:
    """Return the results of one benchmark as Markdown."""
    return body(data["conditions"], (Table(**table) for table in data["tables"]), data["notes"])


def targets_of(data: Mapping[str, Any] | None, name: str) -> list[Target]:
    """Return the targets of a benchmark; one that did not come to its end has missed a target at least."""
    if data is None:
        return [Target(f"{name} runs to its end", 1, 0, "")]
    fields = ("case", "bound", "figure", "unit", "most")
    made = [{field: target[field] for field in fields} for target in data["targets"]]
    # A figure that was not a number is null in the file.
    return [Target(**{**each, "figure": float("nan") if each["figure"] is None else each["figure"]}) for each in made]


def replaced(text: str, name: str, block: str) -> str:
    """Return a page with what stands between the markers of a name replaced.

    Raises:
        ValueError: there is no such pair of markers, or more than one.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    changed, count = pattern.subn(lambda match: f"{begin}\n{block}\n{end}", text)
    if count != 1:
        raise ValueError(f"expected the lines {begin} and {end} once, found them {count} times")
    return changed


def page(text: str, results: Mapping[str, Mapping[str, Any]], targets: Sequence[Target]) -> str:
    """Return a page with the tables of all results and that of the targets."""
    for name, data in results.items():
        text = replaced(text, name, text_of(data))
    return replaced(text, "targets", f"{target_table(targets).markdown()}\n\n{summary(targets)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds of a part of the cases, to see that all works")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default 2)")
    parser.add_argument("--rounds", type=int, help="rounds of every benchmark, instead of its own number")
    parser.add_argument("--imdb", type=Path, help="texts for sparse_text, a Parquet file")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--readme", action="store_true", help="write the tables into README.md; no quick run")
    chosen = parser.parse_args()
    if chosen.readme and chosen.quick:
        parser.error("--readme is without --quick")
    # Those of earlier runs stand for what is not run now.
    others = {name: earlier(name) for name in NAMES if name not in chosen.only} if chosen.readme else {}
    if not all(others.values()):
        missing = ", ".join(name for name, data in others.items() if not data)
        parser.error(f"--readme needs results of all benchmarks; there are none of {missing}")
    results: dict[str, dict[str, Any]] = {}
    targets: list[Target] = []
    begun = time.monotonic()
    for name in chosen.only:
        data = run(name, chosen)
        targets += targets_of(data, name)
        print(f"## {name}\n", flush=True)
        if data is None:
            print(f"{name}.py did not come to its end.\n", flush=True)
            continue
        results[name] = data
        print(text_of(data), end="\n\n", flush=True)
    failed = [name for name in chosen.only if name not in results]
    if chosen.readme and not failed:
        with atomic(README) as file:
            everything = {name: results.get(name) or others[name] for name in NAMES}
            all_targets = [target for name in NAMES for target in targets_of(everything[name], name)]
            text = page(README.read_text(encoding="utf-8"), results, all_targets)
            file.write_text(text, encoding="utf-8")
    print(f"## targets\n\n{target_table(targets).markdown()}\n")
    print(f"{(time.monotonic() - begun) / 60:.1f} minutes; figures in {RESULTS.name}/ beside the benchmarks.")
    print(summary(targets))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
