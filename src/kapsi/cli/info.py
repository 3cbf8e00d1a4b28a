"""`kapsi info`: show the model of a run, a model file or a specification."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from kapsi.cli.common import announce_recovery, say, show_json, table
from kapsi.cli.options import Json, Settings
from kapsi.cli.runs import score_names, score_text, scores_of
from kapsi.errors import shown
from kapsi.text import counted

if TYPE_CHECKING:
    from kapsi.explain import HeadReport
    from kapsi.modules import Model
    from kapsi.spec import ModelSpec
    from kapsi.tables import TableModel

EXAMPLES = """\
kapsi info runs/table
kapsi info model.yaml --set widths.0=8 --set widths.1=1
"""

MOST_INPUTS, LONGEST = 200, 80
"""Inputs to show, and letters of their names."""

HEADER = ("head", "in", "D", "out", "parameters", "operations", "memory", "largest", "contraction")


def info(
    path: Annotated[
        str,
        typer.Argument(metavar="RUN|SPEC", help="A run folder, a model file, or a specification.", show_default=False),
    ],
    batch: Annotated[
        int, typer.Option(metavar="ROWS", help="Batch size for operations and memory.", min=1, max=2**40)
    ] = 64,
    set_: Settings = None,
    json: Json = False,
) -> None:
    """Show a model layer by layer: sizes, parameters, contraction, operations and memory."""
    from kapsi.explain import explain

    model, facts = _model(path, list(set_ or ()))
    reports = explain(model, batch)
    if json:
        parameters = sum(p.numel() for p in model.parameters())
        heads = [report._asdict() for report in reports]
        show_json({"path": path, "facts": dict(facts), "parameters": parameters, "batch": batch, "heads": heads})
        return
    rows = [HEADER, *map(_cells, reports)]
    if facts:
        table(facts)
        say()
    say(f"A forward pass of {counted(batch, 'row')}: operations, new memory, and the largest tensor")
    table(rows, right=(1, 2, 3, 4, 5, 6, 7))
    for report in reports:
        if report.hint:
            say(f"warning: {report.name}: {report.hint}")
    say()
    say(*model.summary().splitlines())


def _model(path: str, sets: list[str]) -> tuple[Model, list[tuple[str, str]]]:
    """Load or build the model; return the facts of a run, too."""
    from pathlib import Path

    from kapsi.errors import SpecError

    is_run = not Path(path).is_file()
    if sets and (is_run or path.endswith(".safetensors")):
        raise SpecError(f"--set {sets[0]}: sets options of a specification; {path} is not one")
    if not is_run and path.endswith(".safetensors"):
        from kapsi.model_file import load

        return load(path), []
    if not is_run:
        return _specified(path, sets), []
    from kapsi.tables import load_run

    announce_recovery(path)
    fitted, manifest = load_run(path)
    return fitted.model, _facts(fitted, manifest)


def _cells(report: HeadReport) -> tuple[str, ...]:
    sizes = (report.in_features, report.columns, report.out_features, report.parameters)
    largest = " × ".join(f"{size:,}" for size in report.shape) or "-"
    counts = (amount(report.operations), amount(report.bytes) + "B")
    return (report.name, *(f"{size:,}" for size in sizes), *counts, largest, report.route)


def amount(number: int) -> str:
    """Return a number with three digits and a prefix of its unit.

    Example:
        >>> amount(999), amount(7_499_520), amount(10**30)
        ('999 ', '7.50 M', '1.00e+30 ')
    """
    if number < 1000:
        return f"{number} "
    value = float(number)
    for unit in "kMGTPE":
        value /= 1000
        if value < 999.5:
            return f"{value:.3g} {unit}" if value >= 99.95 else f"{value:#.3g} {unit}"
    return f"{number:.2e} "


def _facts(fitted: TableModel, manifest: dict[str, Any]) -> list[tuple[str, str]]:
    """Return titles and values of the manifest of a run."""
    task = f"{fitted.task} of {shown(fitted.target)}"
    if fitted.classes is not None:
        classes = ", ".join(map(str, fitted.classes[:10])) + (", …" if len(fitted.classes) > 10 else "")
        task += f", {len(fitted.classes)} classes: {classes}"
    names = [n if len(n) <= LONGEST else f"{n[: LONGEST - 13]}...{n[-10:]}" for n in fitted.preprocessing.described()]
    more = f" and {len(names) - MOST_INPUTS:,} more" if len(names) > MOST_INPUTS else ""
    rows = [("task", task), ("inputs", ", ".join(names[:MOST_INPUTS]) + more)]
    keys = [key for key in ("table", "rows", "folds", "seed", "created") if manifest.get(key) is not None]
    rows += [(key, str(manifest[key])) for key in keys]
    versions = manifest.get("versions")
    if isinstance(versions, dict):
        rows.append(("versions", ", ".join(f"{key} {value}" for key, value in versions.items())))
    for name, scores in scores_of(manifest).items():
        rows.append((f"scores of {name}", ", ".join(score_text(scores, key, manifest) for key in score_names(scores))))
    return [(title, " ".join(value.split())) for title, value in rows]


def _specified(path: str, sets: list[str]) -> Model:
    """Build the model of a specification on the meta device."""
    from kapsi.cli.fit import edited, read_configuration, split_setting
    from kapsi.errors import SpecError
    from kapsi.modules import Model
    from kapsi.tables import RunConfig, TableConfig
    from kapsi.training.config import TrainConfig

    parts = read_configuration(path)
    if parts.model is None:
        raise SpecError(f"{path}: has no model specification; a recipe chooses the model of a run")
    config = RunConfig(TableConfig("y"), parts.model, parts.training or TrainConfig())
    spec = cast("ModelSpec", edited(config, [split_setting(text) for text in sets]).model)
    if None in spec.widths:
        missing = [f"--set widths.{i}=N ({side})" for i, side in ((0, "inputs"), (len(spec.widths) - 1, "outputs"))]
        ends = (spec.widths[0], spec.widths[-1])
        needed = " and ".join(text for text, width in zip(missing, ends, strict=True) if not width)
        raise SpecError(f"{path}: the widths at the ends are taken from a table; without one, give {needed}")
    return Model(spec, device="meta")
