"""`kapsi info`: what a run, a model file or a specification is made of."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kapsi.cli.common import announce_recovery, table


def info(
    path: Annotated[
        str,
        typer.Argument(metavar="RUN|SPEC", help="A run folder, a model file, or a specification.", show_default=False),
    ],
    batch: Annotated[
        int, typer.Option(metavar="ROWS", help="Rows of the batch whose work and memory are shown.", min=1, max=2**40)
    ] = 64,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="PATH=VALUE", help="Set one option of a specification first.", show_default=False
        ),
    ] = None,
) -> None:
    """Show a model layer by layer: sizes, parameters, how the expansion and the weights are contracted, work, memory."""
    from pathlib import Path

    from kapsi.errors import SpecError
    from kapsi.explain import explain

    sets = list(set_ or ())
    is_run = not Path(path).is_file()
    if sets and (is_run or path.endswith(".safetensors")):
        raise SpecError(f"--set {sets[0]}: sets options of a specification; {path} is not one")
    if is_run:
        announce_recovery(path)
        model, manifest = _run(path)
        _show_run(manifest)
    elif path.endswith(".safetensors"):
        from kapsi.model_file import load

        model = load(path)
    else:
        model = _specified(path, sets)
    reports = explain(model, batch)
    rows = [("head", "in", "D", "out", "parameters", "operations", "memory", "largest", "contraction")]
    rows += [
        (
            r.name,
            f"{r.in_features:,}",
            f"{r.columns:,}",
            f"{r.out_features:,}",
            f"{r.parameters:,}",
            amount(r.operations),
            amount(r.bytes) + "B",
            " × ".join(f"{size:,}" for size in r.shape) or "-",
            r.route,
        )
        for r in reports
    ]
    typer.echo(f"A forward pass of {batch:,} rows: operations, new memory, and its largest tensor")
    table(rows, right=(1, 2, 3, 4, 5, 6, 7))
    typer.echo()
    typer.echo(model.summary())


def amount(number: int) -> str:
    """Return a number in three digits and a unit, to be followed by what it counts.

    Example:
        >>> amount(999), amount(7_499_520), amount(10**30)
        ('999 ', '7.50 M', '1.00e+30 ')
    """
    if number < 1000:
        return f"{number} "
    value = float(number)
    for unit in "kMGTPE":
        value /= 1000
        if value < 999.5:
            return f"{value:.3g} {unit}" if value >= 99.95 else f"{value:#.3g} {unit}"
    return f"{number:.2e} "


def _run(path: str) -> tuple[Any, dict[str, Any]]:
    from kapsi.training.tables import load_run

    fitted, manifest = load_run(path)
    about = f"{fitted.task} of {fitted.target!r}"
    if fitted.classes is not None:
        shown = ", ".join(map(str, fitted.classes[:10])) + (", …" if len(fitted.classes) > 10 else "")
        about += f", {len(fitted.classes)} classes: {shown}"
    return fitted.model, {**manifest, "about": about, "inputs": ", ".join(fitted.preprocessing.names())}


def _show_run(manifest: dict[str, Any]) -> None:
    rows = [("task", manifest["about"]), ("inputs", manifest["inputs"])]
    rows += [
        (key.replace("_", " "), str(manifest[key]))
        for key in ("table", "rows", "folds", "seed", "created")
        if manifest.get(key) is not None
    ]
    versions = manifest.get("versions")
    if isinstance(versions, dict):
        rows.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    scores = manifest.get("scores")
    for name, found in scores.items() if isinstance(scores, dict) else ():
        if isinstance(found, dict):
            rows.append((f"scores of {name}", ", ".join(f"{key} {value}" for key, value in found.items())))
    table([(key, " ".join(value.split())) for key, value in rows])
    typer.echo()


def _specified(path: str, sets: list[str]) -> Any:
    from kapsi.cli.fit import apply_settings, read_configuration, split_setting
    from kapsi.errors import SpecError
    from kapsi.modules import Model
    from kapsi.spec import ModelSpec, from_dict, to_dict

    data = {"model": to_dict(read_configuration(path)["model"]), "training": {}}
    apply_settings(data, [split_setting(text) for text in sets])
    spec = from_dict(data["model"], ModelSpec, "model")
    if None in spec.widths:
        missing = [f"--set widths.{i}=N ({what})" for i, what in ((0, "inputs"), (len(spec.widths) - 1, "outputs"))]
        wanted = " and ".join(
            text for text, width in zip(missing, spec.widths[:: len(spec.widths) - 1], strict=True) if not width
        )
        raise SpecError(f"{path}: the widths at the ends are taken from a table; without one, give {wanted}")
    return Model(spec, device="meta")
