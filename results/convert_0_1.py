"""Convert the results of kapsi 0.1 in this folder to format 2: current names of options; scores are unchanged.

A result refers to its configuration by a hash of all options. Renamed options change the hash of the same computation, so format 1
is converted by row and method: hash, short text and key are recomputed, and option names among the details are replaced. The
digests below identify the results of 0.1; other files of format 1 are refused. Renamed methods are renamed in both formats if the
configuration is otherwise the same. All other lines are unchanged.

Usage: python results/convert_0_1.py [FOLDER]
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from kapsi.files import atomic
from kapsi.migrate import migrate_model
from kapsi.paper.experiment import Experiment, Run, load_shipped, shipped
from kapsi.paper.store import FORMAT, configuration_hash, result_key, short

DIGESTS = {
    "composite-variants": "10202d194461d058",
    "composite": "875bf6029a78cb80",
    "dependency": "199c433aa72b90a9",
    "depth-width": "ce639874599a65e3",
    "discrete": "329a75afd2a711c4",
    "elementary-variants": "508a50e762da443b",
    "elementary": "578d95b3d55b2102",
    "feynman-rest": "6a9181940b479c25",
    "feynman-variants": "8c968c25293a55da",
    "feynman": "b62bf2e3cb9478c4",
    "kan-text": "50073d81874dedd0",
    "learning-curves": "e5c0c45c4cdd1b76",
    "mnist-ablation": "09dc5954a0f9ea8d",
    "rank-sweep": "9584f23811369e63",
    "tabular": "f5c5ca71c6a85ea4",
    "text-bigrams": "d525ef25091793f2",
}
"""Digest of the sorted configuration hashes of each experiment in 0.1."""
RENAMED_PATHS = {"train.penalty": "train.l2", "train.learning_rate": "train.solver.learning_rate"}
RENAMED_METHODS = {("discrete", "cifar10", "kapsi"): "whitened_mlp"}
"""Method by experiment, row and earlier name."""


def convert(folder: Path) -> int:
    """Convert the results of all experiments of the package; return the number of converted lines."""
    return sum(_convert_file(folder / f"{name}.jsonl", load_shipped(name)) for name in shipped())


def _convert_file(path: Path, experiment: Experiment) -> int:
    if not path.exists():
        return 0
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    old = [line for line in lines if line["format"] == 1]
    if old and digest(old) != DIGESTS[experiment.name]:
        raise SystemExit(f"{path}: expected the results of kapsi 0.1, found other configurations; run them again")
    converted = [_converted(line, experiment) for line in lines]
    changed = sum(now != before for now, before in zip(converted, lines, strict=True))
    if changed:
        with atomic(path) as beside:
            texts = [json.dumps(line, ensure_ascii=False) for line in converted]
            beside.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return changed


def digest(lines: list[dict[str, Any]]) -> str:
    """Return a digest of the configurations of results."""
    hashes = sorted({line["configuration"]["hash"] for line in lines})
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()[:16]


def _converted(line: dict[str, Any], experiment: Experiment) -> dict[str, Any]:
    place = experiment.name, line["row"], line["method"]
    if line["format"] == FORMAT and place not in RENAMED_METHODS:
        return line
    method = RENAMED_METHODS.get(place, line["method"])
    run = experiment.run(experiment.row(line["row"]), experiment.method(method), line["seed"])
    if line["format"] == FORMAT:
        if configuration_hash(replace(run, method=line["method"])) != line["configuration"]["hash"]:
            raise SystemExit(f"{' '.join(place)}: this configuration is not that of {method}; run it again")
        return {**line, "method": method, **_identified(run, line)}
    extra = {"trial" if name == "try" else name: value for name, value in line["extra"].items()}
    if "head" in extra:
        extra["head"] = migrate_model(extra["head"])
    if isinstance(extra.get("chosen"), dict):
        extra["chosen"] = _renamed(extra["chosen"])
        extra["candidates"] = [[_renamed(chosen), score] for chosen, score in extra["candidates"]]
    return {**line, "format": FORMAT, "method": method, **_identified(run, line), "extra": extra}


def _identified(run: Run, line: dict[str, Any]) -> dict[str, Any]:
    """Return configuration and key of a line."""
    configuration = {"hash": configuration_hash(run), "short": short(run), "threads": run.threads}
    key = result_key(configuration["hash"], line["seed"], line["versions"], line["machine"])
    return {"key": key, "configuration": configuration}


def _renamed(chosen: dict[str, Any]) -> dict[str, Any]:
    return {RENAMED_PATHS.get(path, path): value for path, value in chosen.items()}


if __name__ == "__main__":
    converted = convert(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
    sys.stdout.write(f"{converted:,} results converted\n")
