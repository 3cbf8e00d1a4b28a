"""Public data sets by name: from a folder in the layout of the Hugging Face hub, or from the hub; checked."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from kapsi.errors import DataSetError, unknown
from kapsi.files import one_line


@dataclass(frozen=True)
class PublicData:
    """A public data set.

    Args:
        name: name in kapsi, and of the folder of the files.
        repository: name on the hub.
        kind: "images" or "text".
        column: name of the column of images or texts; labels are in the column "label".
        classes: names of the classes, in the order of their labels.
        splits: names of the training split and the test split on the hub.
        rows: number of rows of both splits.
        license: terms of use, as far as stated.
        source: citation.
    """

    name: str
    repository: str
    kind: Literal["images", "text"]
    column: str
    classes: tuple[str, ...]
    splits: tuple[str, str]
    rows: tuple[int, int]
    license: str
    source: str


DATASETS: Mapping[str, PublicData] = {
    data.name: data
    for data in (
        PublicData(
            "mnist",
            "ylecun/mnist",
            "images",
            "image",
            tuple("0123456789"),
            ("train", "test"),
            (60_000, 10_000),
            "MIT on the hub; CC BY-SA 3.0 by other accounts of the original page",
            "LeCun, Cortes, Burges: The MNIST database of handwritten digits, 1998",
        ),
        PublicData(
            "cifar10",
            "uoft-cs/cifar10",
            "images",
            "img",
            ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
            ("train", "test"),
            (50_000, 10_000),
            "not stated",
            "Krizhevsky: Learning Multiple Layers of Features from Tiny Images, 2009",
        ),
        PublicData(
            "imdb",
            "stanfordnlp/imdb",
            "text",
            "text",
            ("neg", "pos"),
            ("train", "test"),
            (25_000, 25_000),
            "not stated; the authors ask for a citation",
            "Maas et al.: Learning Word Vectors for Sentiment Analysis, ACL 2011",
        ),
        PublicData(
            "ag_news",
            "fancyzhx/ag_news",
            "text",
            "text",
            ("World", "Sports", "Business", "Sci/Tech"),
            ("train", "test"),
            (120_000, 7_600),
            "not stated; for research and other non-commercial use",
            "Zhang, Zhao, LeCun: Character-level Convolutional Networks for Text Classification, NeurIPS 2015",
        ),
        PublicData(
            "sst2",
            "stanfordnlp/sst2",
            "text",
            "sentence",
            ("negative", "positive"),
            ("train", "validation"),  # the labels of the hub's test split are hidden
            (67_349, 872),
            "not stated",
            "Socher et al.: Recursive Deep Models for Semantic Compositionality Over a Sentiment Treebank, EMNLP 2013",
        ),
    )
}
"""The public data sets by name."""


@dataclass(frozen=True)
class Source:
    """The files of a data set.

    Args:
        data: the data set.
        folder: folder of the Parquet files; None for the hub.
        files: Parquet files of both splits.
        stamps: name, size and modification time of each file.
    """

    data: PublicData
    folder: Path | None
    files: tuple[tuple[Path, ...], tuple[Path, ...]] = ((), ())
    stamps: tuple[tuple[str, int, int], ...] = ()

    @property
    def where(self) -> str:
        """The folder or repository, for messages."""
        return str(self.folder) if self.folder is not None else f"hub:{self.data.repository}"

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Plain data that changes with the files; data sets on the hub do not change."""
        return {"where": self.where, "files": [list(stamp) for stamp in self.stamps]}


@dataclass(frozen=True, eq=False)
class HubSplit:
    """The rows of a split.

    Args:
        values: encoded images or texts, a chunked Arrow array.
        labels: (rows,) int64, class labels from 0.
        notes: limitations, such as missing rows.
    """

    values: Any
    labels: npt.NDArray[np.int64]
    notes: tuple[str, ...]


def _error(where: str, text: str) -> DataSetError:
    return DataSetError(" ".join(f"{where}: {text}".split()))


def _reject(where: str, text: str) -> NoReturn:
    raise _error(where, text)


def known(name: str, kind: str) -> PublicData:
    """Return a data set by kind and name.

    Raises:
        DataSetError: the name is unknown.
    """
    names = [data.name for data in DATASETS.values() if data.kind == kind]
    if name not in names:
        _reject("data", unknown(f"data set of {kind}", name, names))
    return DATASETS[name]


def find(data: PublicData, folder: str | Path | None = None) -> Source:
    """Find the files of a data set: in a folder, else in the folder `KAPSI_DATA`, else on the hub.

    The folder holds NAME/train.parquet, …, or files as on the hub, NAME/CONFIG/train-00000-of-00001.parquet.

    Args:
        data: the data set.
        folder: folder with one folder per data set.

    Raises:
        DataSetError: the folder does not exist or has no files of the data set.
    """
    named = folder if folder is not None else os.environ.get("KAPSI_DATA") or None
    if named is None:
        return Source(data, None)
    origin = "" if folder is not None else " (from KAPSI_DATA)"
    stamps = {}
    try:
        root = Path(os.path.realpath(os.path.expanduser(named)))
        exists, home = root.is_dir(), root / data.name
        for path in sorted(home.rglob("*.parquet")):
            # Hidden folders of tools, such as .cache, hold no data.
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts):
                stamps[path] = (str(path.relative_to(home)), path.stat().st_size, path.stat().st_mtime_ns)
    except (OSError, ValueError, TypeError) as error:  # a NUL in the name, or no name
        raise _error(repr(named), f"the folder cannot be read ({one_line(error)}){origin}; check the path") from None
    if not exists:
        text = f"there is no such folder{origin}; give one that holds {data.name}/{data.splits[0]}.parquet"
        _reject(str(named), text)
    parts = []
    for split in data.splits:
        files = tuple(path for path in stamps if re.fullmatch(rf"{split}([-._].*)?\.parquet", path.name))
        if not files:
            _reject(
                str(named),
                f"no {data.name}/{split}.parquet and no {data.name}/*/{split}-*.parquet{origin}; "
                f"save the files of https://huggingface.co/datasets/{data.repository} there, or give another folder",
            )
        _check_complete(files, home)
        parts.append(files)
    return Source(data, home, (parts[0], parts[1]), tuple(stamps[path] for part in parts for path in part))


def _check_complete(files: tuple[Path, ...], home: Path) -> None:
    """Reject a split with a missing part: train-00000-of-00002 without train-00001-of-00002."""
    parts: dict[tuple[str, str], set[int]] = {}
    for path in files:
        match = re.fullmatch(r"(.*)-(\d+)-of-(\d+)\.parquet", path.name)
        if match:
            parts.setdefault((str(path.parent / match[1]), match[3]), set()).add(int(match[2]))
    for (name, total), numbers in parts.items():
        lost = [number for number in range(min(int(total), 10_000)) if number not in numbers]
        if lost:
            _reject(str(home), f"{Path(name).name}-{lost[0]:05d}-of-{total}.parquet is missing; save it there")


def read_split(source: Source, test: bool) -> HubSplit:
    """Read a split and check columns, classes, number of rows, labels and missing values.

    A subset of the rows is accepted, with a note.

    Args:
        source: result of `find`.
        test: read the test split instead of the training split.

    Raises:
        DataSetError: the files are damaged or of another data set, or the hub cannot be reached.
    """
    data, split = source.data, source.data.splits[test]
    where = f"{source.where} ({split})"
    table = _from_hub(data, split) if source.folder is None else _from_files(source.files[test], data, where)
    return _checked(table, data, where, split, data.rows[test])


def _from_files(files: tuple[Path, ...], data: PublicData, where: str) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = []
    for path in files:
        try:
            # Arrow rejects paths that are not UTF-8.
            with open(path, "rb") as handle, pq.ParquetFile(handle) as file:
                _has_columns(file.schema_arrow, data, where)
                tables.append(file.read(columns=[data.column, "label"]))
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # column names that are not UTF-8
            raise _error(str(path), f"not readable as Parquet ({one_line(error)[:200]}); save the file again") from None
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise _error(where, f"the files of the split do not fit together ({one_line(error)[:200]})") from None


def _has_columns(schema: Any, data: PublicData, where: str) -> None:
    import pyarrow as pa

    for name in (data.column, "label"):
        if schema.names.count(name) != 1:
            _reject(where, f"there is no column {name!r} in {schema.names}; these are not {data.repository}'s files")
    kind = schema.field(data.column).type
    if data.kind == "images":
        fits = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
        if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
            fits = pa.types.is_binary(kind.field("bytes").type) or pa.types.is_large_binary(kind.field("bytes").type)
    else:
        fits = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    needed = "encoded images" if data.kind == "images" else "text"
    if not fits:
        _reject(where, f"column {data.column!r} is of the type {kind}; it must hold {needed}")
    if not pa.types.is_integer(schema.field("label").type):
        _reject(where, f"column 'label' is of the type {schema.field('label').type}; it must hold integers")
    names = _class_names(schema)
    if names is not None and names != data.classes:
        _reject(where, f"the classes are {list(names)[:10]}; {data.name} has {list(data.classes)}")


def _class_names(schema: Any) -> tuple[str, ...] | None:
    """Return the names of the classes in the metadata of a file, None without metadata."""
    with suppress(KeyError, TypeError, ValueError, RecursionError):
        return tuple(json.loads(schema.metadata[b"huggingface"])["info"]["features"]["label"]["names"])
    return None


def _checked(table: Any, data: PublicData, where: str, split: str, rows: int) -> HubSplit:
    import pyarrow as pa
    import pyarrow.compute as pc

    values, raw = table.column(data.column), table.column("label")
    try:
        values.validate(full=True)  # texts are UTF-8
    except pa.ArrowException as error:
        raise _error(
            where, f"column {data.column!r} is damaged ({one_line(error)[:200]}); save the files again"
        ) from None
    if data.kind == "images" and values.type.num_fields:
        values = pc.struct_field(values, "bytes")
    for name, column in ((data.column, values), ("label", raw)):
        if column.null_count:
            row = pc.index(pc.is_null(column), True).as_py()
            _reject(where, f"{column.null_count} values of {name!r} are missing, the first in row {row + 1}")
    if not len(raw):
        _reject(where, "the split has no rows")
    labels = raw.to_numpy().astype(np.int64)
    bad = (labels < 0) | (labels >= len(data.classes))
    if bad.any():
        row = int(np.argmax(bad))
        hint = "; this split has no labels" if (labels == -1).all() else ""
        _reject(where, f"label {labels[row]} in row {row + 1}; labels are 0 to {len(data.classes) - 1}{hint}")
    absent = sorted(set(range(len(data.classes))) - set(np.unique(labels).tolist()))
    if absent:
        _reject(where, f"no row is of the class {data.classes[absent[0]]!r}; these are not all files of the split")
    if len(labels) > rows:
        _reject(where, f"{len(labels):,} rows, but {data.name} has {rows:,}; leave one copy of its files")
    few = f"{data.name}: {len(labels):,} of the {rows:,} rows of the split {split!r} (a subset)"
    return HubSplit(values, labels, (few,) if len(labels) < rows else ())


# ---------------------------------------------------------------- the hub


PROBE_SECONDS = 5
OFFLINE = "KAPSI_OFFLINE"
"""Environment variable: if set, the hub is not used; a value of several words appears in messages as the reason."""


def _from_hub(data: PublicData, split: str) -> Any:
    """Return a split as an Arrow table, through the `datasets` package and its cache."""
    train, test = (f"{data.name}/{part}.parquet" for part in data.splits)
    folder = (
        f"set KAPSI_DATA to a folder that holds {train} and {test} of https://huggingface.co/datasets/{data.repository}"
    )
    try:
        import datasets
        import huggingface_hub
    except ImportError as error:
        reason = f"the package {error.name} is not installed"
        text = (
            f'neither a folder nor the hub is available ({reason}); pip install "kapsi[data]" and connect, or {folder}'
        )
        raise _error(data.name, text) from None
    offline = _offline_reason()
    silence = offline or _silence(huggingface_hub, data.repository)
    with _quick_and_quiet(datasets, huggingface_hub, offline=silence is not None):
        try:
            table = datasets.load_dataset(data.repository, split=split).data.table
        except Exception as error:  # of datasets, huggingface_hub, httpx, requests, fsspec, the disk
            reason = silence or f"{type(error).__name__}: {one_line(error)[:200]}"
            text = (
                f"is not available, and the hub is not used {offline}; {folder}, or "
                + (f"unset {OFFLINE}" if OFFLINE in offline else f"fetch it by kapsi data {data.name}")
                if offline
                else f"the hub cannot be read ({reason}); connect to huggingface.co, or {folder}"
            )
            raise _error(data.name, text) from None
    _has_columns(table.schema, data, f"hub:{data.repository} ({split})")
    return table.select([data.column, "label"])


@contextmanager
def _quick_and_quiet(datasets: Any, huggingface_hub: Any, *, offline: bool) -> Iterator[None]:
    """Configure the packages of the hub: no telemetry, progress on a terminal only, no waiting for a network.

    Offline, they use their cache instead of retrying each request for half a minute.
    """
    constants, config = huggingface_hub.constants, datasets.config
    settings = [(constants, "HF_HUB_DISABLE_TELEMETRY", True), (config, "HF_UPDATE_DOWNLOAD_COUNTS", False)]
    if offline:
        settings += [(constants, "HF_HUB_OFFLINE", True), (config, "HF_HUB_OFFLINE", True)]
    before = [(where, name, getattr(where, name)) for where, name, _ in settings if hasattr(where, name)]
    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    bars = [
        part
        for part in (datasets, huggingface_hub.utils)
        if not (sys.stderr and sys.stderr.isatty()) and not part.are_progress_bars_disabled()
    ]
    try:
        for where, name, value in settings:
            setattr(where, name, value)
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        for part in bars:
            part.disable_progress_bars()
        yield
    finally:
        for where, name, value in before:
            setattr(where, name, value)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for part in bars:
            part.enable_progress_bars()


def _offline_reason() -> str | None:
    """Return why the hub must not be used, or None."""
    value = os.environ.get(OFFLINE, "")
    return None if value in ("", "0") else value if " " in value else f"while {OFFLINE} is set"


def _silence(huggingface_hub: Any, repository: str) -> str | None:
    """Send one request and return why the hub does not answer, or None."""
    constants = huggingface_hub.constants
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        # The session applies proxies and certificates.
        address = f"{constants.ENDPOINT}/api/datasets/{repository}"
        status = huggingface_hub.utils.get_session().head(address, timeout=PROBE_SECONDS).status_code
    except Exception as error:  # of httpx, requests, ssl, socket
        return f"{constants.ENDPOINT} does not answer: {one_line(error)[:200] or type(error).__name__}"
    return f"{constants.ENDPOINT} answers with status {status}" if status >= 500 else None
