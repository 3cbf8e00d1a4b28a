"""`kapsi runs`: list, compare and delete run folders."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kapsi.cli.common import note, run_data, say, show_json, table
from kapsi.cli.options import OUTPUT, Json, option
from kapsi.errors import RunError, SpecError, unknown

EXAMPLES = """\
kapsi runs
kapsi runs list experiments
kapsi runs compare runs/first runs/second
kapsi runs delete runs/first runs/second --yes
"""

ACTIONS = ("list", "compare", "delete")
HEADER = ("run", "target", "rows", "folds", "score", "loss", "created", "")


def runs(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[list|compare|delete] [FOLDER|RUN]...",
            help="list: list the runs of a folder, by default the folder runs. compare: compare scores and options of runs. "
            "delete: delete runs with all their files.",
            show_default=False,
        ),
    ] = None,
    yes: Annotated[bool, option(OUTPUT, None, "Delete without confirmation.", "--yes")] = False,
    json: Json = False,
) -> None:
    """List the runs of a folder, compare runs, or delete them."""
    action, *paths = words or ["list"]
    if action not in ACTIONS:
        remedy = f"; kapsi runs list {action} lists the runs of a folder" if Path(action).is_dir() else ""
        raise SpecError(f"runs: {unknown('action', action, ACTIONS)}{remedy}")
    if yes and action != "delete":
        raise SpecError(f"runs {action}: --yes is an option of delete; leave it out")
    if action == "list":
        if len(paths) > 1:
            raise SpecError(f"runs list: expected one folder, got {len(paths)}: {', '.join(paths)}")
        _list(Path(paths[0] if paths else "runs"), json, named=bool(paths))
    elif action == "compare":
        _compare(paths, json)
    else:
        _delete(paths, yes, json)


def _list(folder: Path, json: bool, named: bool) -> None:
    from kapsi.training.run_folder import peek

    if not folder.is_dir():
        if folder.exists() or named:
            raise RunError(f"{folder}: is not a folder; give a folder of runs")
        found = []
    else:
        candidates = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        found = [(path, manifest) for path in candidates if (manifest := peek(path)) is not None]
        if not found and peek(folder) is not None:
            raise RunError(f"{folder}: is a run; kapsi info shows it, and kapsi runs lists the runs of a folder")
    found.sort(key=lambda run: str(run[1].get("created", "")))
    if json:
        show_json({"folder": str(folder), "runs": [run_data(path, manifest) for path, manifest in found]})
        return
    if found:
        table([HEADER, *(_line(path, manifest) for path, manifest in found)], right=(2, 3, 4, 5))
        say()
    count = len(found)
    say(f"{folder}: {count:,} run{'s' * (count != 1)}{'' if count else '; kapsi fit writes one'}")


def _line(path: Path, manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a run; `manifest` is untrusted, because listing does not verify checksums."""
    if not manifest:
        return (path.name, *["-"] * 6, "damaged")
    model = scores_of(manifest).get("kapsi", {})
    scores = [score_text(model, name, manifest) for name in score_names(model)[:2]]
    created = str(manifest.get("created", "-"))[:16].replace("T", " ")
    cells = [manifest.get(name) for name in ("target", "rows", "folds")]
    target, rows, folds = ("-" if cell is None else f"{cell:,}" if type(cell) is int else str(cell) for cell in cells)
    return (path.name, target, rows, folds, *[*scores, "-", "-"][:2], created, "")


def scores_of(manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the scores of each model of a run."""
    scores = manifest.get("scores")
    entries = scores.items() if isinstance(scores, dict) else ()
    return {name: entry for name, entry in entries if isinstance(entry, dict)}


def score_names(scores: Mapping[str, Any]) -> list[str]:
    """Return the names of the scores of a model."""
    return [name for name in scores if not name.endswith(" std")]


def score_text(scores: Mapping[str, Any], name: str, manifest: Mapping[str, Any]) -> str:
    """Return name and value of a score, with the standard deviation over folds if there are any."""
    from kapsi.cli.common import number

    value, std = scores.get(name), scores.get(f"{name} std") if manifest.get("folds") else None
    if not isinstance(value, int | float):
        return "-"
    return f"{name} {number(value, std if isinstance(std, int | float) else None)}"


def _compare(paths: Sequence[str], json: bool) -> None:
    from kapsi.spec import to_dict
    from kapsi.tables import load_run

    if len(paths) < 2:
        raise SpecError(f"runs compare: expected two runs or more, got {len(paths)}")
    _check_distinct("compare", paths)
    loaded = [load_run(path) for path in paths]
    manifests = [{**run.manifest, "target": run.model.target} for run in loaded]
    options = [dict(_flat(to_dict(run.model.config))) for run in loaded]
    names = list(dict.fromkeys(name for part in options for name in part))
    differing = [name for name in names if len({str(part.get(name)) for part in options}) > 1]
    if json:
        entries = [run_data(path, manifest) for path, manifest in zip(paths, manifests, strict=True)]
        show_json({"runs": entries, "options": {name: [part.get(name) for part in options] for name in differing}})
        return
    for text in _differences(paths, manifests):
        note(text)
    measured = list(dict.fromkeys(name for m in manifests for name in score_names(scores_of(m).get("kapsi", {}))))
    rows = [("", *paths)]
    for name in measured:
        parts = [scores_of(m).get("kapsi", {}) for m in manifests]
        cells = [score_text(part, name, m).removeprefix(f"{name} ") for part, m in zip(parts, manifests, strict=True)]
        rows.append((name, *cells))
    for name in ("parameters", "rows"):
        rows.append((name, *(f"{m[name]:,}" if name in m else "-" for m in manifests)))
    rows += [(name, *(_cell(part.get(name)) for part in options)) for name in differing]
    table(rows, right=range(1, len(paths) + 1))


def _check_distinct(action: str, paths: Sequence[str]) -> None:
    if len({os.path.realpath(path) for path in paths}) < len(paths):
        raise SpecError(f"runs {action}: a run is given twice; leave one out")


def _flat(data: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the options of a configuration with their paths, such as training.epochs."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _flat(value, f"{name}.{key}" if name else str(key))
    elif isinstance(data, list | tuple) and any(isinstance(value, Mapping) for value in data):
        for position, value in enumerate(data):
            yield from _flat(value, f"{name}.{position}")
    else:
        yield name, list(data) if isinstance(data, tuple) else data


def _cell(value: Any, longest: int = 40) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _differences(paths: Sequence[str], manifests: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield notes on differences that make scores incomparable."""
    reasons = {
        "table_sha256": "tables with different content",
        "target": "different targets",
        "folds": "different numbers of folds",
        "seed": "different seeds, so different splits",
        "scored_rows": "different numbers of scored rows",
    }
    first = manifests[0]
    for path, manifest in zip(paths[1:], manifests[1:], strict=True):
        why = [reason for key, reason in reasons.items() if manifest.get(key) != first.get(key)]
        if why:
            yield f"{paths[0]} and {path} have {' and '.join(why[:2])}: compare their scores with care"


def _delete(paths: Sequence[str], yes: bool, json: bool) -> None:
    from kapsi.training.run_folder import check_deletable, delete_run

    if not paths:
        raise SpecError("runs delete: expected the path of a run, such as runs/first")
    _check_distinct("delete", paths)
    for path in paths:
        check_deletable(path)
    if not yes:
        if sys.stdin is None or not sys.stdin.isatty():
            raise SpecError("runs delete: confirmation needs a terminal; give --yes to delete without")
        say(f"delete {', '.join(paths)}?", err=True)
        if not typer.confirm("", default=False, err=True, prompt_suffix=""):
            raise typer.Exit(1)
    for path in paths:
        delete_run(path)
        if not json:
            say(f"deleted: {path}")
    if json:
        show_json({"deleted": list(paths)})
