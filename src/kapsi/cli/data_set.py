"""`kapsi data mnist`, `kapsi data iris`: check public data sets, write bundled tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kapsi.cli.common import new_file, notes, say, show_data, table
from kapsi.errors import TableError


def names() -> list[str]:
    """Return the names of all data sets."""
    from kapsi.data.bundled import BUNDLED
    from kapsi.data.hub import DATASETS

    return [*BUNDLED, *DATASETS]


def known(name: str) -> bool:
    """Return whether a data set with this name exists."""
    return name in names()


def show_all() -> None:
    """List the data sets."""
    from kapsi.data.bundled import BUNDLED
    from kapsi.data.hub import DATASETS

    rows = [(name, f"bundled: {entry.title}") for name, entry in BUNDLED.items()]
    kinds = {"images": "images", "text": "documents"}
    rows += [
        (
            name,
            f"{data.rows[0]:,} + {data.rows[1]:,} {kinds[data.kind]}, {len(data.classes)} classes ({data.repository})",
        )
        for name, data in DATASETS.items()
    ]
    table([("data set", ""), *rows])
    say("kapsi data NAME writes a bundled table, and checks a public data set.")


def show(
    name: str,
    given: Sequence[str],
    others: Mapping[str, object],
    *,
    folder: str | None,
    output: str | None,
    overwrite: bool,
) -> None:
    """Write a bundled table as CSV, or check a public data set and show its contents.

    Args:
        name: name of the data set.
        given: further words, all refused.
        others: options about functions, refused unless None.
        folder: folder of a public data set.
        output: file for a bundled table.
        overwrite: replace an existing file.
    """
    from kapsi.data.bundled import BUNDLED

    bundled = name in BUNDLED
    about_functions = [option for option, value in others.items() if value not in (None, [])]
    problems = (
        (given, f"unexpected extra argument {''.join(given[:1])!r} after the data set {name}"),
        (
            about_functions,
            f"--{''.join(about_functions[:1])} is about functions, and {name} is a data set; leave it out",
        ),
        (
            bundled and overwrite and output is None,
            "--overwrite is about a file to write; name it, as in --output rows.csv",
        ),
        (bundled and folder is not None, f"--folder is for public data sets, and {name} is bundled; leave it out"),
        (
            not bundled and (output is not None or overwrite),
            f"{name} is checked and not written; leave out --output and --overwrite",
        ),
        (folder is not None and not folder.strip(), "--folder: expected the name of a folder, got nothing"),
    )
    for wrong, problem in problems:
        if wrong:
            raise TableError(f"data: {problem}")
    if bundled:
        _write(name, output, overwrite)
    else:
        _check(name, folder)


def _write(name: str, output: str | None, overwrite: bool) -> None:
    from kapsi.data.bundled import BUNDLED, bundled, bundled_file
    from kapsi.data.tabular import write_table

    if output is None:
        with bundled_file(name) as path:
            show_data(path.read_text(encoding="utf-8"))
        return
    new_file(output, overwrite)
    found, target = bundled(name)
    columns = {key: column.values for key, column in found.columns.items()}
    whole = {key for key, column in found.columns.items() if column.kind == "integer"}
    write_table(output, {k: [int(v) for v in values] if k in whole else values for k, values in columns.items()})
    say(f"data: {output} ({found.rows:,} rows, target column {target}: {BUNDLED[name].title})")


def _check(name: str, folder: str | None) -> None:
    from kapsi.data.hub import DATASETS
    from kapsi.data.images import load_images
    from kapsi.data.text import load_text

    entry = DATASETS[name]
    if entry.kind == "images":
        images = load_images(name, folder)
        channels, height, width = images.shape
        what = f"{height} × {width} pixels, {channels} channel{'s' if channels > 1 else ''}: {images.train_x.shape[1]} columns"
        source, found, labels = images.source, images.notes, (images.train_y, images.test_y)
    else:
        text = load_text(name, folder)
        words = sum(map(len, text.train_text)) / len(text.train_text)
        what = f"documents of {words:,.0f} characters on average"
        source, found, labels = text.source, text.notes, (text.train_y, text.test_y)
    notes(found)
    counts = [[int((part == number).sum()) for number in range(len(entry.classes))] for part in labels]
    rows = [("class", *entry.splits)]
    rows += [(label, f"{a:,}", f"{b:,}") for label, a, b in zip(entry.classes, *counts, strict=True)]
    table([*rows, ("rows", f"{sum(counts[0]):,}", f"{sum(counts[1]):,}")], right=(1, 2))
    say(f"holds: {what}")
    say(f"from: {source}")
    say(f"source: {entry.source}; license: {entry.license}")
    say(f"data: {name} ({sum(counts[0]):,} training rows, {sum(counts[1]):,} test rows, {len(entry.classes)} classes)")
