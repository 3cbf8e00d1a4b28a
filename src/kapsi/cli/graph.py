"""`kapsi graph`: dependency graphs of the columns of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

from kapsi.cli.common import announce_recovery, new_file, say, show_json, table
from kapsi.cli.options import OUTPUT, Json, Run, option
from kapsi.errors import FileError

EXAMPLES = """\
kapsi graph runs/table
kapsi graph runs/table --strongest 3 --output graphs.svg
"""

SUFFIXES = (".svg", ".dot", ".graphml")

Strongest: TypeAlias = Annotated[
    int, option("Graph", "K", "The number of largest positive, and of largest negative coefficients to show.", min=1)
]
Target: TypeAlias = Annotated[
    str | None, option(OUTPUT, "FILE", "Write the graphs: .svg, .dot (Graphviz) or .graphml.")
]
Replace: TypeAlias = Annotated[bool, option(OUTPUT, None, "Replace an old file.", "--overwrite")]


def graph(
    run: Run, strongest: Strongest = 2, output: Target = None, overwrite: Replace = False, json: Json = False
) -> None:
    """Show which columns of a run depend on each other: naive Bayes, Bayesian network, Markov network, RPN, the fitted model."""
    from kapsi.files import atomic
    from kapsi.interpret.graphs import as_dot, as_graphml, as_svg, graphs
    from kapsi.tables import load_run

    writers = dict(zip(SUFFIXES, (as_svg, as_dot, as_graphml), strict=True))
    if output is not None:
        new_file(output, overwrite, run)
        if Path(output).suffix not in SUFFIXES:
            raise FileError(f"--output {output}: expected a file that ends with {', '.join(SUFFIXES)}")
    announce_recovery(run)
    found = graphs(load_run(run), strongest=strongest)
    if output is not None:
        with atomic(output) as file:
            file.write_text(writers[Path(output).suffix](found), encoding="utf-8")
    if json:
        show_json({"run": run, "graphs": [vars(g) for g in found]})
        return
    rows = [("graph", "", "", "")]
    for g in found:
        pairs = [*((a, "→", b) for a, b in g.arrows), *((a, "—", b) for a, b in g.lines)]
        rows += [(g.model if i == 0 else "", *pair) for i, pair in enumerate(pairs or [("-", "", "")])]
    table(rows)
    if output is not None:
        say(f"written: {output}")
