"""`kapsi data`: list functions to learn, and draw tables of rows from them or from a formula."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kapsi.cli import data_set
from kapsi.cli.common import new_file, note, say, show_data, table
from kapsi.errors import FormulaError, did_you_mean
from kapsi.text import counted

if TYPE_CHECKING:
    from kapsi.data.problems import FunctionProblem

EXAMPLES = """\
kapsi data feynman
kapsi data feynman I.9.18 --rows 500 --output gravity.csv
kapsi data formula "exp(-a) * sin(b)" --variable a:0:2 --variable b:-3:3
kapsi data iris --output iris.csv
"""

ABOUT = {
    "elementary": "one function of x+y each, E.0 to E.16, of the paper",
    "composite": "two of them together, C.0 to C.16, of the paper",
    "feynman": "equations of physics, I.6.2a to III.21.20; F.0 to F.26 are the paper's",
    "feynman_bonus": "further equations of physics, test_1 to test_20",
    "feynman_dimensionless": "the paper's F.0 to F.26 without dimensions, D.I.6.2 to D.III.17.37",
}
ROWS, SEED, NOISE, TARGET = 2000, 0, 0.0, "target"
WRITTEN_AT_ONCE = 50_000  # rows of a CSV file
FLAGS = ("--overwrite", "--help")
OPTIONS = (*FLAGS, *(f"--{name}" for name in ("variable", "rows", "seed", "noise", "target", "output", "folder")))


def formula_last(arguments: list[str]) -> list[str]:
    """Return the arguments with a formula such as `-x**2` after `--`, as options start with a dash."""
    if arguments[:1] != ["data"] or "--" in arguments:
        return arguments
    kept, formulas, is_value, seen = ["data"], [], False, False
    for word in arguments[1:]:
        # -rows is a typo for --rows.
        if seen and not is_value and word[:1] == "-" and word[:2] not in ("-", "--") and f"-{word}" not in OPTIONS:
            formulas.append(word)
            continue
        kept.append(word)
        seen = seen or (word == "formula" and not is_value)
        is_value = not is_value and word[:2] == "--" and "=" not in word and word not in FLAGS
    return [*kept, "--", *formulas] if formulas else arguments


def data(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[list|GROUP|formula] [NAME|FORMULA]",
            help="A group (elementary, composite, feynman, feynman_bonus, feynman_dimensionless) and one of its functions; "
            "or the word formula and a formula in quotes. A group alone lists its functions.",
            show_default=False,
        ),
    ] = None,
    variable: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:LOW:HIGH",
            help="A variable of a formula and its range. May be repeated.",
            show_default=False,
        ),
    ] = None,
    rows: Annotated[
        int | None, typer.Option(metavar="N", help=f"Rows to draw.  \\[default: {ROWS}]", show_default=False)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help=f"Seed of the rows.  \\[default: {SEED}]", show_default=False)
    ] = None,
    noise: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Normal noise in the target, as a share of its standard deviation.  \\[default: 0]",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help=f"Name of the target column.  \\[default: {TARGET}]", show_default=False),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The CSV or Parquet file to write.  \\[default: CSV to the terminal]",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    folder: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder of a public data set.  \\[default: KAPSI_DATA, or the Hugging Face hub]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """List functions to learn, and draw rows of a function or a formula for kapsi fit.

    Examples: kapsi data feynman I.9.18 --output gravity.csv; kapsi data formula "exp(x)*y" --variable x:0:1 --variable y:0:2
    """
    what, *rest = words or ["list"]
    for_rows = {"rows": rows, "seed": seed, "noise": noise, "target": target}
    if data_set.known(what):
        others = {"variable": variable, **for_rows}
        data_set.show(what, rest, others, folder=folder, output=output, overwrite=overwrite)
        return
    if overwrite and output is None:
        raise FormulaError("data: --overwrite is about a file to write; name it, as in --output rows.csv")
    if folder is not None:
        raise FormulaError("data: --folder is for a public data set, as in kapsi data mnist --folder DATA")
    if what == "formula":
        function: FunctionProblem | None = _own(rest, variable or [])
    elif variable:
        raise FormulaError("data: --variable is for a formula, as in kapsi data formula 'x*y' --variable x:0:1 …")
    else:
        function = _named(what, rest)
    if function is None:
        for name, value in {**for_rows, "output": output}.items():
            if value is not None:
                raise FormulaError(f"data: --{name} is about one function; name it, as in kapsi data elementary E.3")
        _list(rest[0] if what == "list" and rest else what)
        return
    defaults = {"rows": ROWS, "seed": SEED, "noise": NOISE, "target": TARGET}
    drawn: Any = {name: defaults[name] if value is None else value for name, value in for_rows.items()}
    _draw(function, **drawn, output=output, overwrite=overwrite)


def _own(words: list[str], variables: list[str]) -> FunctionProblem:
    from kapsi.data.problems import problem_from

    if len(words) != 1:
        raise FormulaError(f"data formula: {len(words)} formulas were given; give one, in quotes")
    if not variables:
        raise FormulaError("data formula: there are no variables; declare each as --variable NAME:LOW:HIGH")
    return problem_from(words[0], variables)


def _named(what: str, words: list[str]) -> FunctionProblem | None:
    """Return the named function, None for a list."""
    from kapsi.data.problems import ALIASES, GROUPS, problems
    from kapsi.data.problems import problem as find_problem

    if len(words) > 1:
        raise FormulaError(f"data: unexpected extra argument {words[1]!r}; give a group and the name of one function")
    if what == "list" and words and words[0] not in GROUPS:
        problems(words[0])  # raises an error with the groups
    if what == "list" or (what in GROUPS and not words):
        return None
    if what in GROUPS:
        problem = find_problem(words[0])
        home = _group_of(problem)
        if home != what:
            raise FormulaError(f"data: {words[0]} is not in {what}; write kapsi data {home} {words[0]}")
        return problem
    if not words and (what in ALIASES or any(what == problem.name for group in GROUPS for problem in problems(group))):
        return find_problem(what)
    known = ["list", "formula", *GROUPS, *data_set.names()]
    hint = did_you_mean(
        what, [*known, *ALIASES, *(problem.name for group in GROUPS for problem in problems(group))], quoted=False
    )
    raise FormulaError(f"data: there is no {what!r}; {hint}there are {', '.join(known)}")


def _group_of(problem: FunctionProblem) -> str:
    from kapsi.data.problems import GROUPS, problems

    return next(group for group in GROUPS if problem in problems(group))


def _list(what: str) -> None:
    from kapsi.data.problems import ALIASES, GROUPS, problems

    if what == "list":
        table([("group", "functions", ""), *((g, str(len(problems(g))), ABOUT[g]) for g in GROUPS)], right=(1,))
        say("kapsi data GROUP lists a group; kapsi data GROUP NAME draws rows of a function.")
        say()
        data_set.show_all()
        return
    numbers = {name: number for number, name in ALIASES.items()}
    about = [problem.title or numbers.get(problem.name, "") for problem in problems(what)]
    rows = [
        (problem.name, *([text] if any(about) else []), problem.formula, problem.ranges)
        for problem, text in zip(problems(what), about, strict=True)
    ]
    table([("name", *([""] if any(about) else []), "formula", "ranges"), *rows])


def _draw(
    problem: FunctionProblem, rows: int, seed: int, noise: float, target: str, output: str | None, overwrite: bool
) -> None:
    from kapsi.data.tabular import csv_text, write_table

    names = [variable.name for variable in problem.variables]
    if not target.strip() or not target.isprintable() or target.strip() in names:
        why = "is a variable of the function" if target.strip() in names else "is not a valid name"
        raise FormulaError(f"data: --target {target!r} {why}; give the target's column another name")
    if output is not None:
        new_file(output, overwrite)
    drawn = problem.draw(rows, seed=seed, noise=noise)
    columns = {name: drawn.x[:, i] for i, name in enumerate(names)} | {target: drawn.y}
    if output is None:
        header = csv_text({name: [] for name in columns})
        show_data(header)
        for begin in range(0, rows, WRITTEN_AT_ONCE):
            part = {name: values[begin : begin + WRITTEN_AT_ONCE] for name, values in columns.items()}
            show_data(csv_text(part).removeprefix(header))
    else:
        write_table(output, columns)
    if drawn.redrawn:
        note(f"{counted(drawn.redrawn, 'row')} redrawn: {problem.name} has no finite value there")
    if output is not None:
        say(f"data: {output} ({counted(rows, 'row')}, target column {target}: {problem.name} = {problem.formula})")
