"""`kapsi import`: the configuration of another library as a specification."""

from __future__ import annotations

import shlex
from typing import Annotated, Any, TypeAlias

import typer

from kapsi.cli.common import new_file, note, say, show_data, show_json
from kapsi.cli.options import OUTPUT, Json, option
from kapsi.errors import SpecError, unknown

EXAMPLES = """\
kapsi import tinybig config.yaml
kapsi import tinybig config.yaml --output model.yaml
"""

Library: TypeAlias = Annotated[str, typer.Argument(metavar="tinybig", help="The library.", show_default=False)]
File: TypeAlias = Annotated[str, typer.Argument(metavar="CONFIG", help="Its configuration file.", show_default=False)]
Target: TypeAlias = Annotated[
    str | None, option(OUTPUT, "FILE", "Write the specification to a YAML file instead of standard output.")
]
Replace: TypeAlias = Annotated[bool, option(OUTPUT, None, "Replace an old file.", "--overwrite")]


def import_(
    library: Library, config_file: File, output: Target = None, overwrite: Replace = False, json: Json = False
) -> None:
    """Read the configuration of another library, and write the model as a specification for `kapsi fit --spec`.

    Differences from the other library are listed as notes, and the last note is the command that fits the model.
    """
    from kapsi.spec import save_spec, to_dict, to_yaml
    from kapsi.zoo import tinybig

    if library != "tinybig":
        raise SpecError(f"import: {unknown('library', library, ['tinybig'])}")
    if output is not None:
        new_file(output, overwrite, config_file)
    found = tinybig.read_config(config_file)
    model = to_dict(found.spec)
    if output is not None:
        save_spec(found.spec, output)
    for difference in found.differences:
        note(difference)
    note(_command(output or "model.yaml", found.training))
    if json:
        show_json(
            {"model": model, "training": found.training, "differences": list(found.differences), "output": output}
        )
    elif output is None:
        show_data(to_yaml(model))
    else:
        say(f"specification: {output}")


def _command(spec: str, training: dict[str, Any]) -> str:
    """Return the command that fits the model with the training of the file."""
    from kapsi.spec import to_yaml

    words = ["kapsi", "fit", "TABLE", "--target", "COLUMN", "--spec", spec]
    for name, value in training.items():
        text = to_yaml(value).removesuffix("...\n").strip() if not isinstance(value, dict | list) else _flow(value)
        words += ["--set", f"training.{name}={text}"]
    return shlex.join(words)


def _flow(value: Any) -> str:
    """Return a mapping or a list in YAML's form on one line, which is JSON."""
    import json

    return json.dumps(value)
