"""`kapsi export`: write a run for other programs."""

from __future__ import annotations

import os
from typing import Annotated, TypeAlias

import typer

from kapsi.cli.common import announce_recovery, say
from kapsi.cli.options import Run
from kapsi.errors import FileError

Format: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="onnx|torch|huggingface",
        help="An ONNX file, a program of torch.export (.pt2), or a folder for the Hugging Face Hub.",
        show_default=False,
    ),
]
Target: TypeAlias = Annotated[
    str, typer.Option(metavar="PATH", help="The file or folder to write.", show_default=False)
]
Replace: TypeAlias = Annotated[bool, typer.Option("--overwrite", help="Replace an old file, or an old run folder.")]


def export(run: Run, format: Format, output: Target, overwrite: Replace = False) -> None:
    """Write a run for other programs: predictions without kapsi, or a folder with a model card."""
    from kapsi.tables import load_run

    announce_recovery(run)
    loaded = load_run(run)
    files = ["", *loaded.manifest["files"], "run.json"]
    if output.strip() and os.path.realpath(output) in [os.path.realpath(os.path.join(run, name)) for name in files]:
        raise FileError(f"{output}: is the run itself, or one of its files; give another --output")
    loaded.export(output, format, overwrite=overwrite)
    size = "" if os.path.isdir(output) else f", {os.path.getsize(output):,} bytes"
    say(f"exported: {output} ({format}{size})")
