"""The output of `kapsi fit --dry-run`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kapsi.cli.common import notes, say, show_json, table
from kapsi.cli.info import amount
from kapsi.errors import shown
from kapsi.text import counted

if TYPE_CHECKING:
    from kapsi.data.tabular import TableProblem
    from kapsi.tables import RunConfig

MOST_COLUMNS = 50
"""Maximum number of columns shown."""


def show_plan(problem: TableProblem, config: RunConfig, json: bool) -> None:
    """Write columns, heads, sizes, memory and estimated seconds of a fit, as tables or as one JSON object."""
    from kapsi.tables import plan_fit

    plan = plan_fit(problem, config)
    notes(plan.notes)
    if json:
        data = plan._asdict() | {"columns": [column._asdict() for column in plan.columns]}
        data["recipe"] = None if plan.recipe is None else plan.recipe._asdict()
        show_json(
            {
                "table": problem.name,
                "target": problem.target,
                "task": problem.task,
                "table_rows": len(problem.y),
                **data,
            }
        )
        return
    rows = [("column", "encoded as", "inputs", "missing")]
    rows += [(c.name, c.kind, f"{c.inputs:,}", f"{c.missing:,}") for c in plan.columns[:MOST_COLUMNS]]
    table(rows, right=(2, 3))
    more = len(plan.columns) - MOST_COLUMNS
    say(*[f"and {more:,} columns more"] * (more > 0), "")
    if plan.recipe is not None:
        heads = sorted(plan.recipe.heads.items(), key=lambda head: -head[1])
        costs = [("head", "seconds", "")]
        costs += [(name, f"{seconds:.2f}", "") for name, seconds in heads]
        costs += [(name, "-", reason) for name, reason in plan.recipe.skipped.items()]
        table(costs, right=(1,))
        compared = plan.recipe.rows
        say("", f"heads are compared on {compared:,} of {plan.rows:,} training rows")
    else:
        say(f"widths {', '.join(map(str, plan.widths))}: {plan.parameters:,} parameters")
    what = (
        f"{problem.task} of {shown(problem.target)}" if isinstance(problem.target, str) else f"{plan.outputs} targets"
    )
    say(f"{what}: {counted(len(problem.y), 'row')}, {counted(plan.inputs, 'input')}, {counted(plan.outputs, 'output')}")
    say(f"memory: about {amount(plan.bytes)}B besides the table and the libraries")
    parts = f"{plan.parts} fit{'s' * (plan.parts > 1)}"
    if plan.recipe is not None:
        say(f"time: about {plan.parts * plan.recipe.seconds:,.0f} s on an idle core ({parts})")
    else:
        say(f"time: no estimate for a specification ({parts})")
