"""Convert the results of B-splines in composed expansions run before `init` was an option of heads: their rule is `init: measured`.

The default changed to `smooth` for B-splines in `Nested` and `Extended`, and the experiments of these results now state
`measured`. Computation and scores are unchanged; hash, short text and key of the configuration are recomputed. A result is
converted if its hash is that of the current configuration without `init: measured`; other lines are unchanged.

Usage: python results/convert_measured.py [FOLDER]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kapsi.files import atomic
from kapsi.paper.experiment import Experiment, load_shipped, shipped
from kapsi.paper.store import configuration_hash, result_key, short


def convert(folder: Path) -> int:
    """Convert the results of all experiments of the package; return the number of converted lines."""
    return sum(_convert_file(folder / f"{name}.jsonl", load_shipped(name)) for name in shipped())


def _convert_file(path: Path, experiment: Experiment) -> int:
    if not path.exists():
        return 0
    lines = path.read_text(encoding="utf-8").splitlines()
    converted = [_converted(line, experiment) for line in lines]
    count = sum(new != old for new, old in zip(converted, lines, strict=True))
    if count:
        with atomic(path) as beside:
            beside.write_text("".join(f"{line}\n" for line in converted), encoding="utf-8")
    return count


def _converted(text: str, experiment: Experiment) -> str:
    line = json.loads(text)
    run = experiment.run(experiment.row(line["row"]), experiment.method(line["method"]), line["seed"])
    before = replace(run, options=_without_measured(run.options))
    if before == run or line["configuration"]["hash"] != configuration_hash(before):
        return text
    configuration = {"hash": configuration_hash(run), "short": short(run), "threads": run.threads}
    key = result_key(configuration["hash"], line["seed"], line["versions"], line["machine"])
    return json.dumps({**line, "key": key, "configuration": configuration}, ensure_ascii=False)


def _without_measured(value: Any) -> Any:
    """Return options without `init: measured`."""
    if isinstance(value, Mapping):
        return {k: _without_measured(v) for k, v in value.items() if (k, v) != ("init", "measured")}
    return [_without_measured(v) for v in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    count = convert(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
    sys.stdout.write(f"{count:,} results converted\n")
