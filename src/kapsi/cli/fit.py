"""`kapsi fit`: fit a model to a table and write a run folder with predictions and scores."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias, cast

from kapsi.cli import reading
from kapsi.cli.common import announce_recovery, fit_page, note, progress_bar, readable, show_complete, show_report
from kapsi.cli.dry_run import show_plan
from kapsi.cli.options import (
    CLUSTER,
    DATA,
    MODEL,
    OUTPUT,
    TRAINING,
    Json,
    NoReport,
    Open,
    Overwrite,
    TableFile,
    option,
    setting,
)
from kapsi.errors import SpecError, check_choice, did_you_mean
from kapsi.migrate import is_run_of_0_1, migrate_run
from kapsi.text import counted

if TYPE_CHECKING:
    from kapsi.data.tabular import Reading, TableProblem
    from kapsi.recipes import Recipe
    from kapsi.spec import ModelSpec
    from kapsi.tables import RunConfig, TableConfig
    from kapsi.training.config import TrainConfig
    from kapsi.training.logs import LogName

EXAMPLES = """\
kapsi fit table.csv --target price
kapsi fit table.csv --target class --folds 5 --metric auc --output runs/first
kapsi fit table.csv --target price --prefer explainable --drop id
kapsi fit table.csv --target price --dry-run
"""

LOGS = ("csv", "tensorboard")
OF_SINGLE_MODELS = ("log", "devices", "nodes", "strategy", "checkpoint_steps")
"""Options of the engine: recipes fit several models, in one process."""
EXAMPLE = "layers.0.heads.0.expansion.degree=3"
Edits: TypeAlias = list[tuple[str, Any]]

Weight: TypeAlias = Annotated[str | None, option(DATA, "COLUMN", "The weights of the rows.")]
Group: TypeAlias = Annotated[str | None, option(DATA, "COLUMN", "Groups of rows, never divided by a split.")]
Time: TypeAlias = Annotated[str | None, option(DATA, "COLUMN", "Order of the rows: held-out rows are the latest.")]
Validation: TypeAlias = Annotated[
    str | None, option(DATA, "FILE", "A table of the held-out rows, instead of a part of TABLE.")
]
Metric: TypeAlias = Annotated[
    list[str] | None, option(OUTPUT, "NAME", "A further score: auc, f1, mae, mape, … May be repeated.")
]
ClassWeight: TypeAlias = Annotated[
    list[str] | None,
    option(
        TRAINING,
        "balanced|LABEL=WEIGHT",
        "Weights of the classes, 1 where none is given. May be repeated.",
    ),
]
Prefer: TypeAlias = Annotated[
    Literal["accuracy", "explainable", "small", "fast"] | None,
    option(MODEL, None, "Heads that the automatic model compares.  \\[default: accuracy]"),
]
Budget: TypeAlias = Annotated[
    float | None,
    option(MODEL, "S", "Estimated seconds for the automatic model, for each fold and the final fit.", min=0.1),
]
HeadNames: TypeAlias = Annotated[
    list[str] | None,
    option(MODEL, "NAME", "A head to choose from: linear, additive, … May be repeated.", "--head"),
]
Target: TypeAlias = Annotated[
    list[str] | None,
    option(
        DATA,
        "COLUMN",
        "The column to predict. Repeat for several columns of numbers.  \\[default for a folder of images: label]",
    ),
]
Task: TypeAlias = Annotated[
    Literal["auto", "classification", "regression"],
    option(DATA, None, "auto: strings, booleans and at most 20 distinct integers are classes.", show_default=True),
]
RunFolder: TypeAlias = Annotated[
    str | None, option(OUTPUT, "RUN", "The run folder.  \\[default: runs/ and the name of the table]")
]
SpecFile: TypeAlias = Annotated[
    str | None, option(MODEL, "FILE", "A model specification or the config.yaml of a run; YAML or JSON.")
]
Settings: TypeAlias = Annotated[
    list[str] | None,
    option(
        MODEL,
        "PATH=VALUE",
        "Set one option: layers.0.heads.0.expansion.degree=3, training.epochs=50. May be repeated.",
        "--set",
    ),
]
Folds: TypeAlias = Annotated[int | None, option(TRAINING, "K", "Cross-validate with K folds, then fit to all rows.")]
Seed: TypeAlias = Annotated[int | None, option(TRAINING, "N", "Seed of splits and initial values.  \\[default: 0]")]
Drop: TypeAlias = Annotated[list[str] | None, option(DATA, "COLUMN", "Leave a column out. May be repeated.")]
Strict: TypeAlias = Annotated[
    bool, option(DATA, None, "Reject rows without a target instead of dropping them.", "--strict")
]
Resume: TypeAlias = Annotated[bool, option(OUTPUT, None, "Resume an interrupted run of the same command.", "--resume")]
CheckpointMinutes: TypeAlias = Annotated[
    float, option(OUTPUT, "M", "Write a checkpoint every M minutes.", min=0.0, show_default=True)
]
CheckpointSteps: TypeAlias = Annotated[int | None, option(OUTPUT, "N", "Write a checkpoint every N steps, too.", min=1)]
EpochLog: TypeAlias = Annotated[
    list[str] | None,
    option(OUTPUT, "csv|tensorboard", "A further log of the epochs in the run folder. May be repeated."),
]
Devices: TypeAlias = Annotated[
    int | None, option(CLUSTER, "N", "Processes per machine. Under torchrun the launcher sets this.", min=1)
]
Nodes: TypeAlias = Annotated[int | None, option(CLUSTER, "N", "Machines; several need torchrun.", min=1)]
Strategy: TypeAlias = Annotated[
    Literal["ddp", "fsdp"] | None, option(CLUSTER, None, "Distribution of the model: replicated or sharded.")
]
IntervalBy: TypeAlias = Annotated[
    str | None,
    option(TRAINING, "COLUMN", "A column of categories: prediction intervals have their coverage in each category."),
]
DryRun: TypeAlias = Annotated[
    bool, option(OUTPUT, None, "Fit nothing; show columns, heads, sizes, memory and seconds.", "--dry-run")
]


@reading.adds(reading.OPTIONS)
def fit(
    table: TableFile,
    target: Target = None,
    task: Task = "auto",
    output: RunFolder = None,
    spec: SpecFile = None,
    set_: Settings = None,
    prefer: Prefer = None,
    budget: Budget = None,
    head: HeadNames = None,
    folds: Folds = None,
    seed: Seed = None,
    drop: Drop = None,
    strict: Strict = False,
    overwrite: Overwrite = False,
    resume: Resume = False,
    checkpoint_minutes: CheckpointMinutes = 5.0,
    checkpoint_steps: CheckpointSteps = None,
    log: EpochLog = None,
    devices: Devices = None,
    nodes: Nodes = None,
    strategy: Strategy = None,
    weight: Weight = None,
    group: Group = None,
    time: Time = None,
    validation: Validation = None,
    metric: Metric = None,
    class_weight: ClassWeight = None,
    dry_run: DryRun = False,
    json: Json = False,
    interval_by: IntervalBy = None,
    no_report: NoReport = False,
    open_: Open = False,
    **of_reading: Any,
) -> None:
    """Fit a model to a table (- for standard input), score it, and write a run folder."""
    options = {**locals(), **of_reading}
    if open_ and (no_report or dry_run):
        raise SpecError(f"--open: needs the report; leave {'--no-report' if no_report else '--dry-run'} out")
    from kapsi.tables import TableConfig, find_complete, fit_problem
    from kapsi.training.checkpoint import Checkpoints
    from kapsi.training.launch import open_group

    roles: Any = {
        "weight": weight,
        "group": group,
        "time": time,
        "validation": validation,
        "metrics": tuple(metric or ()),
        "interval_by": interval_by,
    }
    how = reading.reading_of(of_reading)
    table_config = TableConfig(
        targets_of(target, table, how), task, folds, strict, tuple(drop or ()), reading=how, **roles
    )
    for name in log or ():
        check_choice("--log", name, LOGS)
    edits = [split_setting(text) for text in set_ or ()]
    parts = Configuration() if spec is None else read_configuration(spec)
    given = {"prefer": prefer, "budget": budget, "heads": tuple(head or ()) or None}
    parts = parts._replace(recipe=automatic(parts, edits, given, options))
    with readable(table) as path:
        problem, config = prepare(path, table_config, parts, edits, seed, class_weight)
    checkpoints = Checkpoints("", checkpoint_steps, checkpoint_minutes, resume=resume, say=note)
    if dry_run:
        show_plan(problem, config, json)
        return
    with open_group(devices=devices, nodes=nodes, strategy=strategy) as processes:
        if output is not None and processes.first:
            announce_recovery(output)
        if resume and processes.size == 1 and (complete := find_complete(problem, config, output)) is not None:
            show_complete(*complete, problem.task, json)
            return
        training = len(problem.y) if problem.held is None else int((~problem.held).sum())
        count, first = (config.table.folds or 0) + 1, f"fitting {counted(training, 'row')} of {problem.name}"
        with progress_bar(count, epochs_per_part(config.training), quiet=not processes.first, first=first) as bar:
            report = fit_problem(
                problem,
                config,
                output,
                overwrite=overwrite,
                callbacks=bar or (),
                checkpoints=checkpoints,
                logs=cast("list[LogName]", log or []),
                group=processes,
            )
        if processes.first:
            show_report(report, json, fit_page(report.path, no_report=no_report, open_=open_))


def targets_of(target: list[str] | None, table: str, how: Reading) -> tuple[str, ...]:
    """Return the targets; by default the classes of a folder of images.

    Raises:
        TableError: without a target, the file is no table.
        SpecError: no target; the message names the columns.
    """
    from kapsi.data.tabular.image_folder import LABEL

    if not target and not os.path.isdir(table):
        from kapsi.data.tabular import read_table
        from kapsi.data.tabular.types import listed

        columns = "" if table == "-" else f"; the columns are {listed(read_table(table, how).columns, 20)}"
        raise SpecError(f"Missing option '--target', the column to predict{columns}")
    return tuple(target or (LABEL,))


class Configuration(NamedTuple):
    """Model, training and recipe of a file, in part if need be.

    Attributes:
        model: specification of a model, None without.
        training: options of training.
        recipe: the recipe of a run, None without.
    """

    model: ModelSpec | None = None
    training: TrainConfig | None = None
    recipe: Recipe | None = None


def automatic(parts: Configuration, edits: Edits, given: dict[str, Any], options: dict[str, Any]) -> Recipe | None:
    """Return the recipe of the automatic model; None if a model or its training is specified.

    Args:
        parts: the content of the file of `--spec`.
        edits: the options of `--set`.
        given: the options of the recipe, None where not given.
        options: all options of the command.

    Raises:
        SpecError: options of the recipe beside those of a model.
    """
    from kapsi.recipes import Auto
    from kapsi.tables.configuration import RECIPE_OPTIONS, SINGLE_MODELS

    of_recipes = ("table.", "recipe", *(f"training.{name}" for name in RECIPE_OPTIONS))
    of_models = [f"--set {path}" for path, _ in edits if not path.startswith(of_recipes)]
    of_models += ["--spec"] * (options["spec"] is not None and parts.recipe is None)
    # A single process needs no model.
    of_single = [f"--{name.replace('_', '-')}" for name in OF_SINGLE_MODELS if options[name] not in (None, [], 1)]
    of_recipe = {name: value for name, value in given.items() if value is not None}
    if of_models and parts.recipe is not None:
        raise SpecError(f"{of_models[0]}: has no effect beside the recipe in the file of --spec; leave one out")
    if of_single and not of_models:
        raise SpecError(f"{of_single[0]}: {SINGLE_MODELS}")
    if not of_models and parts.recipe is not None:
        return replace(cast(Any, parts.recipe), **of_recipe)
    if not of_models:
        return Auto(**of_recipe)
    if of_recipe:
        name = {"heads": "head"}.get(first := next(iter(of_recipe)), first)
        raise SpecError(f"--{name}: is an option of the automatic model, which {of_models[0]} replaces; leave one out")
    return None


def prepare(
    path: str,
    table: TableConfig,
    parts: Configuration,
    edits: Edits,
    seed: int | None,
    class_weight: list[str] | None = None,
) -> tuple[TableProblem, RunConfig]:
    """Read the table and return features and target, and the configuration of the run.

    Raises:
        KapsiError: a file or an option does not fit.
    """
    from kapsi.tables import RunConfig, default_spec, read_problem
    from kapsi.training.config import TrainConfig

    training = parts.training or TrainConfig()
    training = training if seed is None else replace(training, seed=seed)
    config = RunConfig(table, parts.model, training, parts.recipe)
    of_model = [edit for edit in edits if edit[0].startswith("model.")]
    config = edited(config, [edit for edit in edits if edit not in of_model])
    problem = read_problem(path, config.table)
    problem = problem if config.recipe is not None else problem.without_texts()
    if class_weight:
        weights = class_weights(class_weight, problem)
        config = replace(config, training=replace(config.training, class_weights=weights))
    if of_model and config.model is None and config.recipe is None:
        config = replace(config, model=default_spec(len(problem.preprocessing.names()), len(problem.y)))
    return problem, edited(config, of_model)


def class_weights(words: list[str], problem: TableProblem) -> tuple[float, ...] | Literal["balanced"]:
    """Return the weights of the classes of `--class-weight`, in the order of the classes.

    Raises:
        SpecError: an unknown class, no number, or a regression.
    """
    from kapsi.data.tabular.types import label_text

    if problem.classes is None:
        raise SpecError(
            "--class-weight: the target has real values, no classes; leave it out, or use --task classification"
        )
    if words == ["balanced"]:
        return "balanced"
    labels = list(map(label_text, problem.classes))
    weights = dict.fromkeys(labels, 1.0)
    given: dict[str, float] = {}
    for word in words:
        label, equals, text = word.rpartition("=")
        try:
            weight = float(text) if equals else -1.0
        except ValueError:
            weight = -1.0
        if label not in weights or not 0 <= weight < float("inf"):
            known = ", ".join(labels[:10])
            raise SpecError(f"--class-weight {word}: expected balanced, or LABEL=WEIGHT with a label among {known}")
        if label in given:
            raise SpecError(f"--class-weight {word}: the class {label} has two weights; leave one out")
        weights[label] = given[label] = weight
    return tuple(weights.values())


def read_configuration(path: str) -> Configuration:
    """Return the content of a specification or of a run's config.yaml, in part if need be."""
    from kapsi.recipes import Recipe
    from kapsi.spec import SPEC_EXAMPLE, ModelSpec, from_dict, read_yaml
    from kapsi.training.config import TrainConfig

    data = read_yaml(path, "specification", SPEC_EXAMPLE)
    data = migrate_run(data) if is_run_of_0_1(data) else data
    names = ("table", "model", "training", "recipe")
    if not isinstance(data, dict) or not set(names) & set(data):
        return Configuration(from_dict(data, ModelSpec, path))
    for key in data:
        if key not in names:
            raise SpecError(f"{path}: there is no {key!r} in a configuration; it has {', '.join(names)}")

    def part(name: str, kind: type[Any]) -> Any:
        return None if data.get(name) is None else from_dict(data[name], kind, f"{path}: {name}")

    return Configuration(part("model", ModelSpec), part("training", TrainConfig), part("recipe", Recipe))


def split_setting(text: str) -> tuple[str, Any]:
    """Return path and value of `path.to.option=value`; the value is YAML."""
    path, value = setting(text, EXAMPLE)
    first = path.split(".")[0]
    if first in ("widths", "layers"):
        return f"model.{path}", value
    if first in ("model", "training", "table", "recipe"):
        return path, value
    hint = did_you_mean(first, ["layers", "widths", "training", "table", "model", "recipe"], quoted=False)
    raise SpecError(
        f"--set {text}: no option begins with {first!r}; {hint}paths begin with layers, widths, training, table or recipe"
    )


def edited(config: RunConfig, edits: Edits) -> RunConfig:
    """Return a configuration with options replaced."""
    from kapsi.spec import from_dict, set_option, to_dict
    from kapsi.tables import RunConfig

    if not edits:
        return config
    data = to_dict(config)
    # Functions before their options, in any order on the command line.
    for path, value in sorted(edits, key=lambda edit: edit[0].removesuffix(".kind").count(".")):
        set_option(data, path, value)
    try:
        result: RunConfig = from_dict(data, RunConfig, "configuration")
    except SpecError as error:
        raise SpecError(_as_settings(str(error).removeprefix("configuration."))) from None
    return result


def _as_settings(message: str) -> str:
    """Return a message with options of the command line in place of Python code."""
    from kapsi.function import catalogue

    code = re.search(r"(solver|loss)=(?:kp\.)?(\w+)\((\w+=[^()]*)\)$", message)
    bound = re.fullmatch(r"([\w.]+): \w+\((\w+)=([^()]*)\): \2 (.*)", message)
    if bound is not None:
        return f"{bound[1]}.{bound[2]}={bound[3]}: {bound[4]}"
    if code is None:
        return re.sub(r"it is (\w+) of a TableConfig; .*", r"it is table.\1 now", message)
    kind = next(kind for kind in catalogue(code[1]) if kind.__name__ == code[2])
    first = "" if kind.name == kind.default_kind else f"--set training.{code[1]}.kind={kind.name} "
    return f"{message[: code.start()]}{first}--set training.{code[1]}.{code[3]}"


def epochs_per_part(training: TrainConfig) -> int | None:
    """Return the number of epochs of a part that is fitted once, None if the L2 penalty is searched."""
    once = training.l2 is not None or getattr(training.solver, "mini_batch", False)
    return training.epochs if once else None
