"""`kapsi fit`: a table in, a model with its scores and predictions out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from kapsi.cli.common import announce_recovery, note, progress_bar, show_report
from kapsi.errors import SpecError, did_you_mean

if TYPE_CHECKING:
    from kapsi.training.logs import LogName

LOGS = ("csv", "tensorboard")
Strategy = Literal["ddp", "fsdp"]


def fit(
    table: Annotated[
        str, typer.Argument(metavar="TABLE", help="A CSV or Parquet file with a header.", show_default=False)
    ],
    target: Annotated[str, typer.Option(metavar="COLUMN", help="The column to learn.", show_default=False)],
    task: Annotated[
        Literal["auto", "classification", "regression"],
        typer.Option(help="Text, booleans and at most 20 different integers are classes, unless said otherwise."),
    ] = "auto",
    output: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="The run folder.  [default: runs/ and the table's name]", show_default=False),
    ] = None,
    spec: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="A model specification, or a run's config.yaml; YAML or JSON.", show_default=False
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="PATH=VALUE",
            help="Set one option: layers.0.heads.0.expansion.degree=3, training.epochs=50. May be repeated.",
            show_default=False,
        ),
    ] = None,
    folds: Annotated[
        int | None,
        typer.Option(metavar="K", help="Cross-validate with K folds, then fit to all rows.", show_default=False),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Of splits and initial values.  [default: 0]", show_default=False)
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="Leave a column out. May be repeated.", show_default=False),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse rows without a target instead of dropping them.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an old run.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run of the same command that was interrupted or killed.")
    ] = False,
    checkpoint_minutes: Annotated[
        float, typer.Option(metavar="M", help="Write down where training is every M minutes.", min=0.0)
    ] = 5.0,
    checkpoint_steps: Annotated[
        int | None, typer.Option(metavar="N", help="And every N steps.", min=1, show_default=False)
    ] = None,
    log: Annotated[
        list[str] | None,
        typer.Option(
            metavar="csv|tensorboard",
            help="A further log of the epochs in the run folder. May be repeated.",
            show_default=False,
        ),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Processes a machine; under torchrun its own number.", min=1, show_default=False
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(metavar="N", help="Machines; more than one with torchrun.", min=1, show_default=False)
    ] = None,
    strategy: Annotated[
        Strategy | None,
        typer.Option(help="How several processes share the model: each has it, or a part.", show_default=False),
    ] = None,
) -> None:
    """Fit a model to a table, score it, and write a run folder."""
    from kapsi.training.checkpoint import Checkpoints
    from kapsi.training.launch import open_group
    from kapsi.training.tables import fit_table

    config = configuration(
        table,
        {"target": target, "task": task, "folds": folds, "strict": strict, "drop": list(drop or ())},
        spec,
        list(set_ or ()),
        seed,
    )
    for name in log or ():
        if name not in LOGS:
            raise SpecError(f"--log {name}: there are {' and '.join(LOGS)}")
    checkpoints = Checkpoints("", checkpoint_steps, checkpoint_minutes, resume=resume, say=note)
    with open_group(devices=devices, nodes=nodes, strategy=strategy) as group:
        if output is not None and group.first:
            announce_recovery(output)
        training = config.training
        once = training.l2 is not None or getattr(training.solver, "mini_batch", False)
        parts = (config.table.folds or 0) + 1
        with progress_bar(parts, training.epochs if once else None, quiet=not group.first) as bar:
            report = fit_table(
                table,
                config,
                output,
                overwrite=overwrite,
                callbacks=bar or (),
                checkpoints=checkpoints,
                logs=tuple(cast("list[LogName]", log or ())),
                group=group,
            )
        if group.first:
            show_report(report)


def configuration(path: str, table: dict[str, Any], spec: str | None, sets: list[str], seed: int | None) -> Any:
    """Return the run's configuration from the options of the command line.

    Raises:
        SpecError: a file or an option that does not fit.
    """
    from kapsi.spec import ModelSpec, from_dict, to_dict
    from kapsi.training.config import TrainConfig
    from kapsi.training.tables import RunConfig, TableConfig
    from kapsi.training.tables.configuration import default_for

    data: dict[str, Any] = {"table": table, "model": None, "training": {}}
    if spec is not None:
        given = read_configuration(spec)
        data |= {key: to_dict(value) for key, value in given.items()}
    if seed is not None:
        data["training"]["seed"] = seed
    edits = [split_setting(text) for text in sets]
    if data["model"] is None and any(name.startswith("model.") for name, _ in edits):
        data["model"] = to_dict(default_for(path, from_dict(table, TableConfig, "the command line")))
    for kind, key in ((ModelSpec, "model"), (TrainConfig, "training"), (TableConfig, "table")):
        if data[key] is not None:
            from_dict(data[key], kind, key)
    apply_settings(data, edits)
    config: RunConfig = from_dict(data, RunConfig, "configuration")
    return config


def read_configuration(path: str) -> dict[str, Any]:
    """Return the model, and the training where there is one, of a specification or of a run's config.yaml."""
    from kapsi.spec import ModelSpec, from_dict, parse_yaml, read_text
    from kapsi.training.config import TrainConfig

    data = parse_yaml(read_text(path, "specification"), path)
    if not isinstance(data, dict) or "model" not in data:
        return {"model": from_dict(data, ModelSpec, path)}
    for key in data:
        if key not in ("table", "model", "training"):
            raise SpecError(f"{path}: there is no {key!r} in a configuration; it has table, model, training")
    result: dict[str, Any] = {"model": from_dict(data["model"], ModelSpec, f"{path}: model")}
    if "training" in data:
        result["training"] = from_dict(data["training"], TrainConfig, f"{path}: training")
    return result


def split_setting(text: str) -> tuple[str, Any]:
    """Return path and value of `path.to.option=value`; the value is YAML."""
    from kapsi.spec import parse_yaml

    path, equals, value = text.partition("=")
    if not equals or not path:
        raise SpecError(f"--set {text}: expected path=value, such as layers.0.heads.0.expansion.degree=3")
    first = path.split(".")[0]
    if first in ("widths", "layers"):
        path = f"model.{path}"
    elif first not in ("model", "training", "table"):
        hint = did_you_mean(first, ["layers", "widths", "training", "table", "model"], quoted=False)
        raise SpecError(
            f"--set {text}: no option begins with {first!r}; {hint}paths begin with layers, widths, training or table"
        )
    return path, parse_yaml(value, f"--set {text}")


def apply_settings(data: dict[str, Any], edits: list[tuple[str, Any]]) -> None:
    """Set options in the plain data of a configuration."""
    from kapsi.spec import set_option

    for path, value in edits:
        set_option(data, path, value)
