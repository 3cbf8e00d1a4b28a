"""Public data sets: small folders in the hub's layout, every refusal, the hub that is not there; bundled tables; `kapsi data`."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
import types

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.datasets import load_iris

from kapsi.data import hub
from kapsi.data.bundled import BUNDLED, bundled
from kapsi.data.hub import DATASETS, find, read_split
from kapsi.errors import TableError

IMDB = DATASETS["imdb"]
TEXTS = ["good film", "bad film", "fine", "awful!!"]
HUB = "https://huggingface.co/datasets/stanfordnlp/imdb"


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """Nothing of the user's folders, and no network."""
    for name in ("KAPSI_DATA", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KAPSI_CACHE", str(tmp_path / "cache"))


def write(path, texts=TEXTS, labels=(1, 0, 1, 0), *, column="text", metadata=None, **types_) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {
        column: pa.array(texts, types_.get("text", pa.string())),
        "label": pa.array(labels, types_.get("label", pa.int64())),
    }
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), path)


def folder_of(root, train="train.parquet", test="test.parquet", name="imdb"):
    write(root / name / train)
    write(root / name / test, TEXTS[:2], (1, 0))
    return root


def read(root, test=False, data=IMDB):
    return read_split(find(data, root), test)


# ---------------------------------------------------------------- folders


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train.parquet", "test.parquet"),
        ("plain_text/train-00000-of-00001.parquet", "plain_text/test-00000-of-00001.parquet"),
        ("data/train-00000-of-00001-b42a775f407cee45.parquet", "data/test.parquet"),
    ],
)
@pytest.mark.parametrize("by", ["argument", "variable"])
def test_rows_are_those_of_the_files(tmp_path, monkeypatch, train, test, by) -> None:
    folder_of(tmp_path, train, test)
    write(tmp_path / "imdb" / "unsupervised.parquet", labels=(-1,) * 4)  # is no split that is asked for
    write(tmp_path / "imdb" / ".cache" / "train.parquet")  # of a tool
    if by == "variable":
        monkeypatch.setenv("KAPSI_DATA", str(tmp_path))
    source = find(IMDB, tmp_path if by == "argument" else None)
    found = read_split(source, False)
    assert found.values.to_pylist() == TEXTS
    assert found.labels.tolist() == [1, 0, 1, 0]
    assert found.labels.dtype == np.int64
    assert found.notes == ("imdb: 4 of the 25,000 rows of the split 'train' (a subset)",)
    assert read_split(source, True).values.to_pylist() == TEXTS[:2]
    assert source.where == str(tmp_path / "imdb")


def test_a_folder_from_the_argument_counts_before_the_variable(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("KAPSI_DATA", str(tmp_path / "nowhere"))
    assert read(folder_of(tmp_path)).values.to_pylist() == TEXTS


def test_parts_of_a_split_follow_one_another(tmp_path) -> None:
    folder_of(tmp_path, "p/train-00000-of-00002.parquet")
    write(tmp_path / "imdb" / "p" / "train-00001-of-00002.parquet", ["last", "one"], (0, 1), label=pa.int32())
    found = read(tmp_path)
    assert found.values.to_pylist() == [*TEXTS, "last", "one"]
    assert found.labels.tolist() == [1, 0, 1, 0, 0, 1]


def test_rows_are_as_the_package_of_the_hub_reads_them(tmp_path) -> None:
    import datasets

    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=list(IMDB.classes))}
    )
    made = datasets.Dataset.from_dict({"text": TEXTS, "label": [0, 1, 1, 0]}, features=features)
    for split in IMDB.splits:
        (tmp_path / "imdb").mkdir(exist_ok=True)
        made.to_parquet(tmp_path / "imdb" / f"{split}.parquet")
    files = {split: str(tmp_path / "imdb" / f"{split}.parquet") for split in IMDB.splits}
    expected = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "hf"))
    found = read(tmp_path)
    assert found.values.to_pylist() == list(expected["text"])
    assert found.labels.tolist() == list(expected["label"])


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are Unicode here")
def test_a_folder_may_have_any_name(tmp_path) -> None:
    for name in (os.fsdecode(b"\xff"), "a b", "s3:", "%20", "na\nme"):
        (tmp_path / name).mkdir()
        assert read(folder_of_bytes(tmp_path, name)).values.to_pylist() == TEXTS


def folder_of_bytes(root, name):
    """Move a folder made elsewhere, since Arrow cannot write to every name."""
    folder_of(root / "made")
    os.replace(root / "made" / "imdb", root / name / "imdb")
    return root / name


def test_all_rows_need_no_note(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(DATASETS, "imdb", dataclasses.replace(IMDB, rows=(4, 2)))
    folder_of(tmp_path)
    assert read(tmp_path, data=DATASETS["imdb"]).notes == ()
    assert read(tmp_path, True, DATASETS["imdb"]).notes == ()


def test_the_test_rows_of_sst2_are_its_validation_rows(tmp_path) -> None:
    for split, label in (("train", 0), ("validation", 1), ("test", -1)):
        write(
            tmp_path / "sst2" / f"{split}.parquet",
            ["a", "b"],
            (label, abs(label) - 1 if label else 1),
            column="sentence",
        )
    write(tmp_path / "sst2" / "validation.parquet", ["v", "w"], (1, 0), column="sentence")
    assert read(tmp_path, True, DATASETS["sst2"]).values.to_pylist() == ["v", "w"]


def test_the_stamp_changes_with_the_files(tmp_path) -> None:
    folder_of(tmp_path)
    first = find(IMDB, tmp_path).fingerprint
    assert find(IMDB, tmp_path).fingerprint == first
    assert json.loads(json.dumps(first)) == first
    os.utime(tmp_path / "imdb" / "test.parquet", ns=(0, 5))
    assert find(IMDB, tmp_path).fingerprint != first


# ---------------------------------------------------------------- refusals

NAMES = {b"huggingface": json.dumps({"info": {"features": {"label": {"names": ["pos", "neg"]}}}}).encode()}


def damaged(root) -> None:
    (root / "imdb" / "train.parquet").write_bytes(b"PAR1 no, not at all PAR1")


def halved(root) -> None:
    path = root / "imdb" / "train.parquet"
    path.write_bytes(path.read_bytes()[:100])


def misnamed(root) -> None:
    path = root / "imdb" / "train.parquet"
    path.write_bytes(path.read_bytes().replace(b"label", b"l\xffbel"))


def replaced(**options):
    return lambda root: write(root / "imdb" / "train.parquet", **options)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (damaged, r"train\.parquet: not readable as Parquet \(.*\); save the file again"),
        (halved, r"train\.parquet: not readable as Parquet \(.*\); save the file again"),
        (misnamed, r"train\.parquet: not readable as Parquet \(.*\); save the file again"),
        (
            replaced(column="words"),
            r"imdb \(train\): there is no column 'text' in \['words', 'label'\]; these are not stanfordnlp/imdb's files",
        ),
        (replaced(texts=[1, 2, 3, 4], text=pa.int64()), "column 'text' is of the type int64; it must hold text"),
        (
            replaced(labels=["0", "1", "0", "1"], label=pa.string()),
            "column 'label' is of the type string; it must hold integers",
        ),
        (replaced(metadata=NAMES), r"the classes are \['pos', 'neg'\]; imdb has \['neg', 'pos'\]"),
        (replaced(texts=["a", None, "b", None]), "2 values of 'text' are missing, the first in row 2"),
        (replaced(labels=[0, 1, 0, None]), "1 values of 'label' are missing, the first in row 4"),
        (replaced(labels=[0, 1, 2, 0]), "label 2 in row 3; labels are 0 to 1$"),
        (replaced(labels=[0, -1, 1, 0]), "label -1 in row 2; labels are 0 to 1$"),
        (replaced(labels=[-1] * 4), "label -1 in row 1; labels are 0 to 1; this split has no labels"),
        (replaced(labels=[1, 1, 1, 1]), "no row is of the class 'neg'; these are not all files of the split"),
        (replaced(texts=[], labels=[]), "the split has no rows"),
        (
            replaced(texts=[""] * 25_001, labels=[0, 1] * 12_500 + [0]),
            "25,001 rows, but imdb has 25,000; leave one copy",
        ),
        (
            lambda root: (root / "imdb" / "train.parquet").unlink(),
            f"no imdb/train.parquet and no .*; save the files of {HUB}",
        ),
        (
            lambda root: (root / "imdb" / "train.parquet").rename(root / "imdb" / "train-00001-of-00002.parquet"),
            "train-00000-of-00002.parquet is missing; save it there",
        ),
        (
            lambda root: write(root / "imdb" / "train-2.parquet", [1], (1,), text=pa.int8()),
            "column 'text' is of the type int8",
        ),
    ],
)
def test_wrong_files_are_refused_in_one_line(tmp_path, spoil, message) -> None:
    spoil(folder_of(tmp_path))
    with pytest.raises(TableError, match=message) as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"info": 3}', b"[" * 100_000, b'{"info": {"features": null}}'])
def test_other_metadata_say_nothing_of_the_classes(tmp_path, text) -> None:
    replaced(metadata={b"huggingface": text})(folder_of(tmp_path))
    assert read(tmp_path).values.to_pylist() == TEXTS


def test_text_that_is_no_text_is_refused(tmp_path) -> None:
    folder_of(tmp_path)
    spoiled = pa.Array.from_buffers(
        pa.string(), 2, [*pa.array(["ab", "cd"]).buffers()[:2], pa.py_buffer(b"ab\xff\xfe")]
    )
    pq.write_table(pa.table({"text": spoiled, "label": [0, 1]}), tmp_path / "imdb" / "train.parquet")
    with pytest.raises(TableError, match="column 'text' is damaged"):
        read(tmp_path)


@pytest.mark.parametrize("folder", ["nowhere", "a\0b", 5])
def test_a_folder_that_is_none_is_refused(tmp_path, folder) -> None:
    with pytest.raises(
        TableError, match=r"there is no such folder; give one that holds imdb/train\.parquet|cannot be read"
    ):
        find(IMDB, tmp_path / folder if folder == "nowhere" else folder)


def test_a_folder_that_the_variable_names_wrongly_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("KAPSI_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(TableError, match=r"nowhere: there is no such folder \(from KAPSI_DATA\)"):
        find(IMDB)


@pytest.mark.parametrize(("name", "hint"), [("minst", " did you mean 'mnist'[?]"), ("imdb", ""), (3, "")])
def test_an_unknown_name_is_refused(name, hint) -> None:
    with pytest.raises(TableError, match=f"there is no data set of images {name!r};{hint} choose from mnist, cifar10"):
        hub.known(name, "images")


# ---------------------------------------------------------------- the hub


def refusal(capsys=None) -> str:
    with pytest.raises(TableError) as caught:
        read_split(find(IMDB), False)
    assert "\n" not in str(caught.value)
    assert f"set KAPSI_DATA to a folder that holds imdb/train.parquet and imdb/test.parquet of {HUB}" in str(
        caught.value
    )
    return str(caught.value)


def test_the_hub_is_read_where_there_is_no_folder(tmp_path, monkeypatch) -> None:
    import datasets
    import huggingface_hub

    read_files = datasets.load_dataset
    path = str(folder_of(tmp_path) / "imdb" / "train.parquet")
    seen = []

    def load(repository, split):
        seen.append((repository, split, huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY))
        seen.append((datasets.config.HF_UPDATE_DOWNLOAD_COUNTS, huggingface_hub.constants.HF_HUB_OFFLINE))
        return read_files("parquet", data_files={split: path}, split=split, cache_dir=str(tmp_path / "hf"))

    before = (
        huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY,
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS,
        logging.getLogger("datasets").level,
        datasets.are_progress_bars_disabled(),
    )
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(hub, "_silence", lambda *_: None)
    found = read_split(find(IMDB), False)
    assert found.values.to_pylist() == TEXTS
    assert found.labels.tolist() == [1, 0, 1, 0]
    # Nothing is counted or reported on the way, and all settings are as they were.
    assert seen == [("stanfordnlp/imdb", "train", True), (False, False)]
    assert before == (
        huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY,
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS,
        logging.getLogger("datasets").level,
        datasets.are_progress_bars_disabled(),
    )


def test_another_data_set_of_that_name_is_refused(tmp_path, monkeypatch) -> None:
    import datasets

    monkeypatch.setattr(hub, "_silence", lambda *_: None)
    table = types.SimpleNamespace(table=pa.table({"words": TEXTS, "label": [0, 1, 0, 1]}))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: types.SimpleNamespace(data=table))
    with pytest.raises(TableError, match=r"hub:stanfordnlp/imdb \(train\): there is no column 'text'"):
        read_split(find(IMDB), False)


def test_without_a_network_one_line_says_what_to_do(tmp_path, monkeypatch, caplog) -> None:
    import huggingface_hub

    # A port on which nothing listens; the cache of the hub is empty.
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    tried = []
    session = huggingface_hub.utils.get_session()
    monkeypatch.setattr(session, "head", lambda *a, head=session.head, **k: tried.append(a) or head(*a, **k))
    message = refusal()
    assert message.startswith("imdb: the hub cannot be read (http://127.0.0.1:9 does not answer: ")
    assert "connect to huggingface.co, or set" in message
    assert tried == [("http://127.0.0.1:9/api/datasets/stanfordnlp/imdb",)]  # once
    assert huggingface_hub.constants.HF_HUB_OFFLINE is False
    assert not caplog.records


def test_a_hub_that_is_out_of_order_counts_as_offline(monkeypatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    answer = types.SimpleNamespace(head=lambda address, timeout: types.SimpleNamespace(status_code=503))
    monkeypatch.setattr(huggingface_hub.utils, "get_session", lambda: answer)
    assert "(https://huggingface.co answers with status 503)" in refusal()
    answer.head = lambda address, timeout: types.SimpleNamespace(status_code=307)
    assert hub._silence(huggingface_hub, "a/b") is None


def test_offline_by_the_users_wish_asks_nothing(monkeypatch) -> None:
    import datasets
    import huggingface_hub

    def ask():
        raise AssertionError("the network was asked")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.utils, "get_session", ask)
    assert "(HF_HUB_OFFLINE is set)" in refusal()
    assert huggingface_hub.constants.HF_HUB_OFFLINE is True
    # Nor where kapsi itself is not to ask, as in a quick run.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv(hub.OFFLINE, "with --quick")
    assert "imdb: is not available, and the hub is not used with --quick; set KAPSI_DATA to a folder" in refusal()


def test_no_name_of_a_folder(kapsi) -> None:
    assert kapsi("data", "mnist", "--folder", "") == (
        2,
        "",
        "kapsi: data: --folder: expected the name of a folder, got nothing\n",
    )


def test_a_failure_on_the_way_is_one_line(monkeypatch) -> None:
    import datasets

    def fail(*_, **__):
        raise OSError("the connection\nbroke")

    monkeypatch.setattr(hub, "_silence", lambda *_: None)
    monkeypatch.setattr(datasets, "load_dataset", fail)
    assert "(OSError: the connection broke)" in refusal()


@pytest.mark.parametrize("package", ["datasets", "huggingface_hub"])
def test_without_the_package_one_line_says_what_to_do(monkeypatch, package) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    message = refusal()
    assert message.startswith(
        f"imdb: neither a folder nor the hub is available (the package {package} is not installed); "
    )
    assert 'pip install "kapsi[data]" and connect, or set KAPSI_DATA' in message


def test_the_command_offline_ends_with_one_line(tmp_path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-c", "from kapsi.cli import run; run()", "data", "mnist"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("kapsi: mnist: the hub cannot be read (HF_HUB_OFFLINE is set); connect to ")
    assert done.stderr.count("\n") == 1


# ---------------------------------------------------------------- bundled tables


def test_iris_is_the_table_of_scikit_learn() -> None:
    table, target = bundled("iris")
    expected = load_iris()
    columns = [column for name, column in table.columns.items() if name != target]
    assert np.array_equal(np.stack([column.numbers for column in columns], axis=1), expected.data)
    assert table.columns[target].values.tolist() == expected.target_names[expected.target].tolist()


def test_pima_is_the_table_that_was_published() -> None:
    table, target = bundled("pima")
    assert np.bincount(table.columns[target].numbers.astype(int)).tolist() == [500, 268]
    means = [round(float(column.numbers.mean()), 1) for name, column in table.columns.items() if name != target]
    deviations = [
        round(float(column.numbers.std(ddof=1)), 1) for name, column in table.columns.items() if name != target
    ]
    # As the description of the data set in the UCI repository prints them.
    assert means == [3.8, 120.9, 69.1, 20.5, 79.8, 32.0, 0.5, 33.2]
    assert deviations == [3.4, 32.0, 19.4, 16.0, 115.2, 7.9, 0.3, 11.8]


def test_banknote_is_bundled_too() -> None:
    table, target = bundled("banknote")
    assert np.bincount(table.columns[target].numbers.astype(int)).tolist() == [762, 610]


def test_an_unknown_table_is_refused() -> None:
    with pytest.raises(
        TableError, match=r"there is no table 'irs'; did you mean 'iris'[?] choose from iris, pima, banknote"
    ):
        bundled("irs")
    with pytest.raises(TableError, match="there is no table"):
        bundled(["iris"])


def test_licenses_name_every_bundled_table() -> None:
    from importlib.resources import files

    folder = files("kapsi.data")
    text = (folder / "LICENSES.md").read_text(encoding="utf-8")
    tables = {path.name for path in folder.iterdir() if path.name.endswith(".csv")}
    assert tables == {entry.file for entry in BUNDLED.values()}
    assert all(f"`{name}`" in text for name in tables)


# ---------------------------------------------------------------- the command


def test_the_command_checks_a_data_set(tmp_path, kapsi) -> None:
    code, out, err = kapsi("data", "imdb", "--folder", folder_of(tmp_path))
    assert code == 0
    assert out.splitlines()[:4] == [
        "class  train  test",
        "neg        2     1",
        "pos        2     1",
        "rows       4     2",
    ]
    assert "holds: documents of 7 characters on average" in out
    assert out.splitlines()[-1] == "data: imdb (4 training rows, 2 test rows, 2 classes)"
    assert err.splitlines() == [
        f"note: imdb: {n} of the 25,000 rows of the split {s!r} (a subset)" for n, s in ((4, "train"), (2, "test"))
    ]


@pytest.mark.parametrize("name", list(BUNDLED))
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_the_command_writes_a_bundled_table(tmp_path, kapsi, name, suffix) -> None:
    from kapsi.data.tabular import read_table

    path = tmp_path / f"out{suffix}"
    code, out, err = kapsi("data", name, "--output", path)
    table, target = bundled(name)
    assert (code, err) == (0, "")
    assert out == f"data: {path} ({table.rows:,} rows, target column {target}: {BUNDLED[name].title})\n"
    written = read_table(path)
    assert list(written.columns) == list(table.columns)
    for key, column in table.columns.items():
        assert written.columns[key].kind == column.kind
        assert np.array_equal(written.columns[key].values, column.values)
    assert kapsi("data", name, "--output", path)[0] == 2  # is there already
    assert kapsi("data", name, "--output", path, "--overwrite")[0] == 0


def test_the_command_shows_a_bundled_table(kapsi) -> None:
    code, out, _ = kapsi("data", "iris")
    assert code == 0
    assert out.splitlines()[:2] == [
        "sepal_length,sepal_width,petal_length,petal_width,species",
        "5.1,3.5,1.4,0.2,setosa",
    ]
    assert len(out.splitlines()) == 151


def test_the_command_lists_the_data_sets(kapsi) -> None:
    code, out, _ = kapsi("data", "list")
    assert code == 0
    assert all(any(line.startswith(f"{name} ") for line in out.splitlines()) for name in [*BUNDLED, *DATASETS])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mnist", "x"), "unexpected extra argument 'x' after the data set mnist"),
        (("mnist", "--rows", 5), "--rows is about functions, and mnist is a data set; leave it out"),
        (("iris", "--seed", 0), "--seed is about functions, and iris is a data set; leave it out"),
        (("iris", "--folder", "x"), "--folder is for public data sets, and iris is bundled; leave it out"),
        (("imdb", "--output", "x.csv"), "imdb is checked and not written; leave out --output and --overwrite"),
        (("elementary", "--folder", "x"), "--folder is for a public data set, as in kapsi data mnist --folder DATA"),
        (("iris", "--output", "x.doc"), "the suffix '.doc' is not known"),
        (("minst",), "did you mean mnist?"),
    ],
)
def test_the_command_refuses_what_does_not_fit(kapsi, arguments, message) -> None:
    code, out, err = kapsi("data", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


# ---------------------------------------------------------------- the real ones

FOLDER = os.environ.get("KAPSI_DATA")


@pytest.mark.skipif(not FOLDER, reason="KAPSI_DATA is not set")
@pytest.mark.parametrize("name", list(DATASETS))
def test_the_real_data_sets_are_whole(name) -> None:
    data = DATASETS[name]
    if not os.path.isdir(os.path.join(FOLDER, name)):
        pytest.skip("it is not in the folder")
    source = find(data, FOLDER)
    for test in (False, True):
        found = read_split(source, test)
        assert len(found.labels) == data.rows[test] or found.notes
        assert len(found.values) == len(found.labels)
