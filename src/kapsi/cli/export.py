"""`kapsi export`: write a run for other programs."""

from __future__ import annotations

import os
from typing import Annotated, TypeAlias

from kapsi.cli.common import announce_recovery, say, show_json
from kapsi.cli.options import OUTPUT, Json, Run, option
from kapsi.errors import FileError

EXAMPLES = """\
kapsi export runs/table --format onnx --output table.onnx
kapsi export runs/table --format huggingface --output table-model
"""

Format: TypeAlias = Annotated[
    str,
    option(
        OUTPUT,
        "onnx|torch|huggingface",
        "An ONNX file, a program of torch.export (.pt2), or a folder for the Hugging Face Hub.",
    ),
]
Target: TypeAlias = Annotated[str, option(OUTPUT, "PATH", "The file or folder to write.")]
Replace: TypeAlias = Annotated[bool, option(OUTPUT, None, "Replace an old file, or an old run folder.", "--overwrite")]


def export(run: Run, format: Format, output: Target, overwrite: Replace = False, json: Json = False) -> None:
    """Write a run for other programs: predictions without kapsi, or a folder with a model card."""
    from kapsi.tables import load_run

    announce_recovery(run)
    loaded = load_run(run)
    files = ["", *loaded.manifest["files"], "run.json"]
    if output.strip() and os.path.realpath(output) in [os.path.realpath(os.path.join(run, name)) for name in files]:
        raise FileError(f"{output}: is the run itself, or one of its files; give another --output")
    loaded.export(output, format, overwrite=overwrite)
    if json:
        show_json({"run": run, "format": format, "output": output})
        return
    size = "" if os.path.isdir(output) else f", {os.path.getsize(output):,} bytes"
    say(f"exported: {output} ({format}{size})")
