"""Tables bundled with the package: Iris, Pima and Banknote."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kapsi.data.tabular import Table, read_table
from kapsi.errors import TableError, unknown


@dataclass(frozen=True)
class BundledTable:
    """A bundled table; licenses are in LICENSES.md next to the files.

    Args:
        file: name of the file in this folder.
        target: name of the column of classes.
        title: one-line description.
    """

    file: str
    target: str
    title: str


BUNDLED = {
    "iris": BundledTable("iris.csv", "species", "150 flowers, 4 measurements, 3 species"),
    "pima": BundledTable("pima_indians_diabetes.csv", "outcome", "768 women, 8 measurements, diabetes within 5 years"),
    "banknote": BundledTable(
        "banknote_authentication.csv", "class", "1,372 banknotes, 4 measurements, genuine or forged"
    ),
}
"""The bundled tables by name."""


@contextmanager
def bundled_file(name: str) -> Iterator[Path]:
    """Provide the path of the CSV file of a bundled table.

    Raises:
        TableError: the name is unknown.
    """
    from importlib.resources import as_file, files

    if name not in list(BUNDLED):
        raise TableError(f"bundled: {unknown('table', name, BUNDLED)}")
    with as_file(files("kapsi.data") / BUNDLED[name].file) as path:
        yield path


def bundled(name: str) -> tuple[Table, str]:
    """Return a bundled table, "iris", "pima" or "banknote", and the name of the target column.

    Raises:
        TableError: the name is unknown.

    Example:
        >>> table, target = bundled("iris")
        >>> table.rows, list(table.columns), target
        (150, ['sepal_length', 'sepal_width', 'petal_length', 'petal_width', 'species'], 'species')
    """
    with bundled_file(name) as path:
        return read_table(path), BUNDLED[name].target
