"""Images as rows: decoded as pillow and the hub's package decode them, normalized, kept; every refusal."""

from __future__ import annotations

import io
import os
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from kapsi.data import cache
from kapsi.data import images as module
from kapsi.data.hub import DATASETS
from kapsi.data.images import DEVIATIONS, MEANS, SHAPES, load_images
from kapsi.errors import DataError

COLUMN = {"mnist": "image", "cifar10": "img"}
EACH = pytest.mark.parametrize("name", ["mnist", "cifar10"])


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    monkeypatch.delenv("KAPSI_DATA", raising=False)
    monkeypatch.setenv("KAPSI_CACHE", str(tmp_path / "cache"))


def pictures(name: str, rows: int, seed: int = 0) -> np.ndarray:
    """Return (rows, height, width[, 3]) random pixels."""
    channels, height, width = SHAPES[name]
    shape = (rows, height, width) if channels == 1 else (rows, height, width, channels)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encoded(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind, lossless=True)
    return stream.getvalue()


def write(path, name, files, labels, plain=False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = pa.binary() if plain else pa.struct({"bytes": pa.binary(), "path": pa.string()})
    values = files if plain else [None if file is None else {"bytes": file, "path": None} for file in files]
    pq.write_table(pa.table({COLUMN[name]: pa.array(values, kind), "label": pa.array(labels)}), path)


def folder_of(root, name, rows=20, **options):
    for seed, (split, count) in enumerate((("train", rows), ("test", 10))):
        files = [encoded(image, options.get("kind", "PNG")) for image in pictures(name, count, seed)]
        write(
            root / name / f"{split}.parquet", name, files, [i % 10 for i in range(count)], options.get("plain", False)
        )
    return root


def flat(pixels: np.ndarray) -> np.ndarray:
    """Return pixels flattened from (channels, height, width), by a loop over channels."""
    if pixels.ndim == 3:
        return pixels.reshape(len(pixels), -1)
    return np.concatenate([pixels[..., channel].reshape(len(pixels), -1) for channel in range(3)], axis=1)


# ---------------------------------------------------------------- what is loaded


@pytest.mark.parametrize(("name", "kind"), [("mnist", "PNG"), ("cifar10", "PNG"), ("cifar10", "WEBP")])
@pytest.mark.parametrize("plain", [False, True])
def test_rows_are_the_pixels(tmp_path, name, kind, plain) -> None:
    data = load_images(name, folder_of(tmp_path, name, kind=kind, plain=plain))
    assert np.array_equal(data.train_x, flat(pictures(name, 20, 0)))
    assert np.array_equal(data.test_x, flat(pictures(name, 10, 1)))
    assert data.train_y.tolist() == [i % 10 for i in range(20)]
    assert (data.train_x.dtype, data.train_y.dtype) == (np.uint8, np.int64)
    assert data.shape == SHAPES[name]
    assert (data.mean, data.std) == (MEANS[name], DEVIATIONS[name])
    assert data.classes == DATASETS[name].classes
    assert data.source == str(tmp_path / name)
    rows = DATASETS[name].rows
    assert data.notes == tuple(
        f"{name}: {few} of the {all_:,} rows of the split {split!r} (a subset)"
        for few, all_, split in ((20, rows[0], "train"), (10, rows[1], "test"))
    )


@EACH
def test_rows_are_as_the_package_of_the_hub_decodes_them(tmp_path, name) -> None:
    import datasets

    classes = list(DATASETS[name].classes)
    features = datasets.Features({COLUMN[name]: datasets.Image(), "label": datasets.ClassLabel(names=classes)})
    columns = {
        COLUMN[name]: [Image.fromarray(image) for image in pictures(name, 20)],
        "label": [i % 10 for i in range(20)],
    }
    made = datasets.Dataset.from_dict(columns, features=features)
    (tmp_path / name).mkdir()
    files = {split: str(tmp_path / name / f"{split}-00000-of-00001.parquet") for split in ("train", "test")}
    for path in files.values():
        made.to_parquet(path)
    expected = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "hf"))
    data = load_images(name, tmp_path)
    assert np.array_equal(data.train_x, flat(np.stack([np.asarray(image) for image in expected[COLUMN[name]]])))
    assert data.train_y.tolist() == list(expected["label"])


@EACH
def test_normalized_rows_are_those_of_the_formula(tmp_path, name) -> None:
    data = load_images(name, folder_of(tmp_path, name))
    for got, raw in zip(data.normalized(), (data.train_x, data.test_x), strict=True):
        pixels = raw.reshape(-1, *data.shape).astype(np.float64)
        mean = np.array(MEANS[name])[:, None, None]
        deviation = np.array(DEVIATIONS[name])[:, None, None]
        expected = ((pixels / 255 - mean) / deviation).reshape(len(raw), -1)
        assert got.dtype == np.float32
        assert np.array_equal(got, expected.astype(np.float32))
    assert np.array_equal(data.normalize(data.train_x[3:5]), data.normalized()[0][3:5])


def test_many_blocks_keep_their_order_and_are_counted(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "DECODED_AT_ONCE", 3)
    seen = []
    data = load_images("mnist", folder_of(tmp_path, "mnist"), watch=lambda done, total: seen.append((done, total)))
    assert np.array_equal(data.train_x, flat(pictures("mnist", 20, 0)))
    assert seen == [(done, 30) for done in (3, 6, 9, 12, 15, 18, 20, 23, 26, 29, 30)]


def test_a_terminal_shows_how_far_it_is(monkeypatch, capsys) -> None:
    from kapsi.data.progress import terminal_line

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    terminal_line("decoding")(1, 2)
    assert terminal.getvalue() == ""  # another display has taken its place
    monkeypatch.setattr(sys, "__stderr__", terminal)
    tell = terminal_line("decoding")
    for done in (1, 1, 2, 4):
        tell(done, 4)
    assert terminal.getvalue() == "\rdecoding: 25 %\rdecoding: 50 %\r\x1b[K"


# ---------------------------------------------------------------- the cache


@pytest.fixture
def count(monkeypatch):
    """Count how often images are decoded."""
    calls = []
    decode = module._decoded
    monkeypatch.setattr(module, "_decoded", lambda *args: calls.append(1) or decode(*args))
    return calls


def kept_files(tmp_path) -> list:
    return sorted((tmp_path / "cache").iterdir())


def test_decoded_pixels_are_kept(tmp_path, count) -> None:
    folder_of(tmp_path, "mnist")
    first = load_images("mnist", tmp_path)
    again = load_images("mnist", tmp_path)
    assert len(count) == 2  # both splits, once
    for key in ("train_x", "train_y", "test_x", "test_y"):
        assert np.array_equal(getattr(first, key), getattr(again, key))
        assert getattr(first, key).dtype == getattr(again, key).dtype
    assert again.notes == first.notes
    assert len(first.notes) == 2
    assert [path.suffix for path in kept_files(tmp_path)] == [".npz"]


def test_other_files_are_decoded_anew(tmp_path, count) -> None:
    load_images("mnist", folder_of(tmp_path, "mnist"))
    files = [encoded(image) for image in pictures("mnist", 20, 7)]
    write(tmp_path / "mnist" / "train.parquet", "mnist", files, [i % 10 for i in range(20)])
    os.utime(tmp_path / "mnist" / "train.parquet", ns=(1, 1))
    data = load_images("mnist", tmp_path)
    assert len(count) == 4
    assert np.array_equal(data.train_x, flat(pictures("mnist", 20, 7)))
    assert len(kept_files(tmp_path)) == 1  # in place of the old one


def test_two_folders_are_kept_apart(tmp_path, count) -> None:
    for name in ("a", "b", "a", "b"):
        load_images("mnist", folder_of(tmp_path / name, "mnist") if len(count) < 4 else tmp_path / name)
    assert len(count) == 4


def test_another_version_makes_it_anew(tmp_path, count, monkeypatch) -> None:
    load_images("mnist", folder_of(tmp_path, "mnist"))
    monkeypatch.setattr(cache, "VERSION", 2)
    load_images("mnist", tmp_path)
    assert len(count) == 4


def flipped(path) -> None:
    content = bytearray(path.read_bytes())
    content[2000] ^= 1  # a pixel: only a checksum can tell
    path.write_bytes(content)


def renamed(path) -> None:
    path.write_bytes(path.read_bytes().replace(b"train_y.npy", b"trbin_y.npy"))  # no checksum is over names


def locked(path) -> None:
    content = bytearray(path.read_bytes())
    content[content.rindex(b"PK\x01\x02") + 8] |= 1  # the last member says that it is encrypted
    path.write_bytes(content)


@pytest.mark.parametrize(
    "spoil",
    [
        flipped,
        renamed,
        locked,
        lambda path: path.write_bytes(path.read_bytes()[:5000]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"not at all"),
        lambda path: np.savez(path, a=np.zeros(3)),
        lambda path: np.savez(path, source=np.array([None], dtype=object)),  # pickled, and never read
        lambda path: (
            path.unlink(),
            np.save(path.with_suffix(".npy"), np.zeros(3)),
            path.with_suffix(".npy").rename(path),
        ),
    ],
)
def test_a_damaged_file_is_made_anew(tmp_path, count, spoil) -> None:
    load_images("mnist", folder_of(tmp_path, "mnist"))
    spoil(kept_files(tmp_path)[0])
    data = load_images("mnist", tmp_path)
    assert len(count) == 4
    assert np.array_equal(data.train_x, flat(pictures("mnist", 20, 0)))
    load_images("mnist", tmp_path)
    assert len(count) == 4


@pytest.mark.parametrize("kind", ["a file", "no home"])
def test_a_cache_that_cannot_be_written_is_a_note(tmp_path, monkeypatch, kind) -> None:
    folder_of(tmp_path, "mnist")
    if kind == "a file":
        (tmp_path / "cache").write_text("in the way")
    else:
        from pathlib import Path

        def no_home(cls=None):
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("KAPSI_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", no_home)
    data = load_images("mnist", tmp_path)
    assert np.array_equal(data.train_x, flat(pictures("mnist", 20, 0)))
    assert len(data.notes) == 3
    assert data.notes[-1].startswith("not cached: ")
    assert data.notes[-1].endswith("set KAPSI_CACHE to another folder")


def test_the_folder_of_the_cache(monkeypatch, tmp_path) -> None:
    assert cache.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("KAPSI_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert cache.cache_folder() == tmp_path / "shared" / "kapsi"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / ".cache" / "kapsi"


# ---------------------------------------------------------------- refusals


def with_image(root, file, **options) -> None:
    files = [encoded(image) for image in pictures("mnist", 20)]
    files[4] = file
    write(root / "mnist" / "train.parquet", "mnist", files, [i % 10 for i in range(20)], **options)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (b"no image", r"mnist: image 5 cannot be read \(cannot identify image file .*\); save the files again"),
        (encoded(pictures("mnist", 1)[0])[:300], r"mnist: image 5 cannot be read \("),
        (encoded(pictures("mnist", 1)[0][:20]), r"image 5 cannot be read \(28 × 20 pixels instead of 28 × 28\)"),
        (encoded(pictures("cifar10", 1)[0][:28, :28]), r"image 5 cannot be read \(mode RGB instead of L\)"),
        (encoded(pictures("mnist", 1)[0], "GIF"), "image 5 cannot be read"),
        (None, r"1 values of 'image' are missing, the first in row 5"),
    ],
)
def test_an_image_that_cannot_be_read_is_refused(tmp_path, file, message) -> None:
    with_image(folder_of(tmp_path, "mnist"), file)
    with pytest.raises(DataError, match=message) as caught:
        load_images("mnist", tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("kind", [pa.string(), pa.struct({"path": pa.string()}), pa.struct({"bytes": pa.string()})])
def test_a_column_without_images_is_refused(tmp_path, kind) -> None:
    folder_of(tmp_path, "mnist")
    table = pa.table({"image": pa.nulls(10, kind), "label": pa.array(range(10))})
    pq.write_table(table, tmp_path / "mnist" / "train.parquet")
    with pytest.raises(DataError, match=r"column 'image' is of the type .*; it must hold encoded images"):
        load_images("mnist", tmp_path)


def test_without_pillow_one_line_says_what_to_do(tmp_path, monkeypatch) -> None:
    folder_of(tmp_path, "mnist")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(
        DataError, match=r'pillow, which decodes the images, is not installed; pip install "kapsi\[data\]"'
    ):
        load_images("mnist", tmp_path)


@pytest.mark.parametrize(
    "x",
    [
        np.zeros((2, 784), np.float32),
        np.full((2, 784), -1, np.int8),
        np.zeros((2, 10), np.uint8),
        np.zeros((2, 28, 28), np.uint8),
        np.zeros(784, np.uint8),
        [[0] * 784],
    ],
    ids=lambda x: f"{getattr(x, 'dtype', list)} {np.shape(x)}",
)
def test_only_rows_of_pixels_are_normalized(tmp_path, x) -> None:
    data = load_images("mnist", folder_of(tmp_path, "mnist"))
    with pytest.raises(DataError, match=r"images: pixels to normalize must be uint8 of shape \(n, 784\), not"):
        data.normalize(x)
    assert data.normalize(np.zeros((0, 784), np.uint8)).shape == (0, 784)


def test_text_is_no_set_of_images() -> None:
    with pytest.raises(DataError, match="there is no data set of images 'imdb'; choose from mnist, cifar10"):
        load_images("imdb")
