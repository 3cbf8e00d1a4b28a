"""Columns of images: decoding, damaged and hostile files, folders, encoders, runs, estimators, and predictions of them."""

from __future__ import annotations

import io
import json
import os
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import kapsi as kp
from kapsi.cli import main
from kapsi.data.tabular import Preprocessing, Table, make_problem, pictures, read_batches, read_table, table_of
from kapsi.data.tabular.image_column import ImageColumn
from kapsi.data.tabular.pictures import image_column
from kapsi.data.tabular.reading import Reading
from kapsi.errors import TableError

pytestmark = pytest.mark.all_heads


def encoded(image, kind: str = "PNG", **options) -> bytes:
    """Return an array or an image of Pillow as a file."""
    target = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(target, kind, **options)
    return target.getvalue()


def bars(rows: int, seed: int = 0) -> tuple[list[np.ndarray], np.ndarray]:
    """Return images of 8 × 8 pixels with an upright bar or a level one, and their classes."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, rows)
    images = [rng.integers(0, 60, (8, 8)).astype(np.uint8) for _ in y]
    for image, label in zip(images, y, strict=True):
        i, k = rng.integers(1, 4, 2)
        image[(slice(i, i + 4), k) if label else (i, slice(k, k + 4))] += 180
    return images, y


def column(*images):
    return image_column("x", images)


def pixels(data: bytes) -> np.ndarray:
    (value,) = column(data).values
    assert isinstance(value, np.ndarray), value
    return value


def bomb(width: int, height: int) -> bytes:
    """Return a PNG of some bytes that claims a size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


# ------------------------------------------------------------------------------------------------ decoding

GRAY = np.arange(64, dtype=np.uint8).reshape(8, 8)
COLORS = np.stack([GRAY, 2 * GRAY, 3 * GRAY], 2)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "WEBP"])
def test_formats_without_loss(kind) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    assert (pixels(encoded(GRAY, kind, **options)) == GRAY).all()


def test_jpeg_is_close() -> None:
    smooth = np.add.outer(np.arange(16), np.arange(16)).astype(np.uint8) * 8
    assert np.abs(pixels(encoded(smooth, "JPEG", quality=95)).astype(int) - smooth).max() < 8


def test_colors_and_equal_channels() -> None:
    assert (pixels(encoded(COLORS)) == COLORS).all()
    assert (pixels(encoded(np.stack([GRAY] * 3, 2))) == GRAY).all()


@pytest.mark.parametrize("mode", ["1", "P", "CMYK", "LA", "I;16"])
def test_modes(mode) -> None:
    image = Image.fromarray(np.where(GRAY > 30, 255, 0).astype(np.uint8))
    image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257) if mode == "I;16" else image.convert(mode)
    kind, options = ("WEBP", {"lossless": True}) if mode == "CMYK" else ("PNG", {})
    image = image.convert("RGB") if mode == "CMYK" else image
    assert (pixels(encoded(image, kind, **options)) == np.where(GRAY > 30, 255, 0)).all()


def test_transparent_pixels_are_white() -> None:
    image = np.dstack([COLORS, np.where(GRAY > 30, 255, 0).astype(np.uint8)])
    wanted = np.where(GRAY[:, :, None] > 30, COLORS, 255)
    assert (pixels(encoded(image)) == wanted).all()


def test_photographs_are_turned_upright() -> None:
    image = Image.fromarray(GRAY)
    exif = image.getexif()
    exif[0x0112] = 6  # turned right
    assert (pixels(encoded(image, exif=exif)) == np.rot90(GRAY, -1)).all()


def test_large_images_are_reduced() -> None:
    assert pixels(encoded(np.zeros((300, 150), np.uint8))).shape == (64, 32)
    assert pixels(encoded(np.zeros((1, 500), np.uint8))).shape == (1, 64)


def test_damaged_images_are_counted_and_named() -> None:
    rng = np.random.default_rng(0)
    good = encoded(rng.integers(0, 255, (40, 40)).astype(np.uint8))
    found = column(good, None, good[:-500], b"", b"GIF89a", encoded(GRAY, "TIFF"))
    assert found.missing.tolist() == [False, True, True, True, True, True]
    (note,) = found.notes
    assert note.startswith("column 'x': 4 of 6 images cannot be read and are missing: row 3 (")
    assert "row 4 (not PNG, JPEG, WEBP, GIF or BMP)" in note


def test_a_small_file_that_claims_billions_of_pixels_is_not_decoded(monkeypatch) -> None:
    huge = bomb(60_000, 60_000)
    monkeypatch.setattr(pictures, "_reduced", lambda image: pytest.fail("decoded"))
    assert len(huge) < 1_000
    assert "pixels" in column(huge).values[0]
    assert column(bomb(9_000, 9_000)).values[0] == "9,000 × 9,000 pixels, more than 67,108,864"


def test_bytes_of_noise_do_no_harm() -> None:
    rng = np.random.default_rng(0)
    good, starts = encoded(COLORS), [b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a", b"BM", b"RIFF1234WEBP"]
    files = [start + rng.bytes(60) for start in starts for _ in range(10)]
    for _ in range(50):
        changed = bytearray(good)
        changed[rng.integers(len(good))] ^= 1 << int(rng.integers(8))
        files.append(bytes(changed))
    found = column(*files)
    assert found.missing[:50].all()
    assert len(found) == 100


def test_arrays_and_images_of_pillow() -> None:
    found = column(GRAY, GRAY[:, :, None], COLORS, GRAY > 30, Image.fromarray(COLORS), COLORS.astype(np.int64))
    assert [value.shape for value in found.values] == [(8, 8), (8, 8), (8, 8, 3), (8, 8), (8, 8, 3), (8, 8, 3)]
    assert found.values[3].max() == 255
    for wrong in (GRAY / 255, GRAY[None, None], COLORS.transpose(2, 0, 1), GRAY.astype(int) - 1):
        assert "give whole numbers 0 to 255, (height, width" in column(wrong).values[0]


def test_the_remedy_without_pillow(monkeypatch, tmp_path) -> None:
    pq.write_table(pa.table({"x": [encoded(GRAY)] * 4, "y": [0, 1, 0, 1]}), tmp_path / "t.parquet")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(TableError, match=r'pip install "kapsi\[data\]", or leave the column out') as error:
        read_table(tmp_path / "t.parquet")
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------------ tables


def write(path: Path, images, y, **more) -> Path:
    pq.write_table(pa.table({"image": images, "label": y, **more}), path)
    return path


def test_bytes_and_structs_are_images_without_an_option(tmp_path) -> None:
    data = encoded(GRAY)
    structs = [{"bytes": data, "path": "a.png"}, {"bytes": None, "path": None}]
    table = read_table(write(tmp_path / "t.parquet", structs, [0, 1], plain=[data, None], other=[b"PK", b"x"]))
    assert table.columns["image"].kind == table.columns["plain"].kind == "image"
    assert table.columns["image"].missing.tolist() == [False, True]
    assert "has the type binary" in table.columns["other"].problem


def test_paths_stay_within_the_folder_of_the_table(tmp_path) -> None:
    inside, secret = tmp_path / "data", tmp_path / "secret.png"
    (inside / "a").mkdir(parents=True)
    for path in (secret, inside / "a" / "1.png"):
        path.write_bytes(encoded(GRAY))
    (inside / "link.png").symlink_to(secret)
    paths = ["a/1.png", "../secret.png", str(secret), "link.png", "a/\0.png", "a", "none.png", "", "a/../a/1.png"]
    values = [{"bytes": None, "path": path} for path in paths]
    table = read_table(write(inside / "t.parquet", values, list(range(9)), name=paths), Reading(image=("name",)))
    for name in ("image", "name"):
        found = table.columns[name]
        assert [not missing for missing in found.missing] == [True] + [False] * 7 + [True]
        assert sum("is outside of the folder" in str(value) for value in found.values) == 3
        assert str(tmp_path) not in found.notes[0].replace(str(secret), "")


def test_images_of_a_text_file_are_paths(tmp_path) -> None:
    (tmp_path / "1.png").write_bytes(encoded(GRAY))
    (tmp_path / "t.csv").write_text("file,y\n1.png,0\n2.png,1\n")
    table = read_table(tmp_path / "t.csv", Reading(image=("file",)))
    assert table.columns["file"].missing.tolist() == [False, True]


def test_requested_images_of_another_type(tmp_path) -> None:
    table = read_table(write(tmp_path / "t.parquet", [1, 2], [0, 1]), Reading(image=("image",)))
    with pytest.raises(TableError, match="is to have images, and has the type int64"):
        table.use(["image"])


def test_all_images_damaged(tmp_path) -> None:
    table = read_table(write(tmp_path / "t.parquet", [{"bytes": b"x"}] * 4, [0, 1, 0, 1]))
    with pytest.raises(TableError, match=r"no feature column is left.*4 of 4 images cannot be read"):
        make_problem(table, "label")
    with pytest.raises(TableError, match="the target 'image' has images"):
        make_problem(read_table(write(tmp_path / "t.parquet", [encoded(GRAY)] * 4, [0, 1, 0, 1])), "image")


def test_batches_are_those_of_the_whole_table(tmp_path) -> None:
    images, y = bars(20)
    data = [encoded(image) for image in images]
    data[7] = b"x"
    path = write(tmp_path / "t.parquet", data, y)
    whole = read_table(path).columns["image"]
    parts = [batch.table.columns["image"] for batch in read_batches(path, Reading(), {"image": "image"})]
    for one, other in zip(whole.values, [value for part in parts for value in part.values], strict=True):
        assert one is other or (np.asarray(one) == np.asarray(other)).all()


# ------------------------------------------------------------------------------------------------ encoder


def test_pixels_are_flattened_channel_by_channel() -> None:
    fitted = ImageColumn.fit("x", column(COLORS, GRAY, None))
    dense, flat = fitted.encode(column(COLORS, GRAY, None))
    assert fitted.shape == (3, 8, 8)
    assert fitted.names() == ["x: brightness", "x is missing"]
    assert (flat[0] == COLORS.transpose(2, 0, 1).ravel()).all()
    assert (flat[1].reshape(3, 8, 8) == GRAY).all()
    assert dense[:, 1].tolist() == [0, 0, 1]
    assert (flat[2] == round(fitted.mean)).all()
    assert (fitted.pixels()[0], fitted.pixels()[-1]) == ("x: red 1,1", "x: blue 8,8")


def test_mixed_sizes_are_resized_to_the_most_frequent_or_the_middle_one() -> None:
    sizes = [(8, 8), (8, 8), (4, 6)]
    fitted = ImageColumn.fit("x", column(*(np.full(size, 7, np.uint8) for size in sizes)))
    assert fitted.shape == (1, 8, 8)
    assert "1 of another size are resized" in fitted.note()
    assert (fitted.encode(column(np.full((5, 3), 7, np.uint8)))[1] == 7).all()
    sizes = [(4, 9), (5, 8), (6, 7), (7, 6), (8, 5)]
    assert ImageColumn.fit("x", column(*(np.zeros(size, np.uint8) for size in sizes))).shape == (1, 6, 7)


def test_colors_for_a_model_of_gray_images_become_gray() -> None:
    fitted = ImageColumn.fit("x", column(GRAY, GRAY))
    wanted = np.asarray(Image.fromarray(COLORS).convert("L"))
    assert (fitted.encode(column(COLORS))[1].reshape(8, 8) == wanted).all()


def test_file_of_an_encoder_is_checked() -> None:
    preprocessing = Preprocessing.fit(Table("t", {"x": column(GRAY, COLORS)}))
    data = json.loads(json.dumps(preprocessing.to_dict()))
    assert Preprocessing.from_dict(data) == preprocessing
    for key, value in (
        ("height", 0),
        ("width", 1_000_000),
        ("channels", 2),
        ("other", 3),
        ("mean", 300.0),
        ("scale", 0.0),
    ):
        bad = json.loads(json.dumps(data))
        bad["columns"][0][key] = value
        with pytest.raises(TableError):
            Preprocessing.from_dict(bad)


# ------------------------------------------------------------------------------------------------ folders


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder of class folders, with a damaged image and a file of another kind."""
    images, y = bars(60)
    for number, (image, label) in enumerate(zip(images, y, strict=True)):
        path = tmp_path / "bars" / ("upright" if label else "level") / f"{number:02}.PNG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(image))
    (tmp_path / "bars" / "level" / "notes.txt").write_text("x")
    (tmp_path / "bars" / "level" / "broken.jpg").write_bytes(b"x")
    (tmp_path / "bars" / ".hidden").mkdir()
    return tmp_path / "bars"


def test_a_folder_of_class_folders_is_a_table(folder) -> None:
    table = read_table(folder)
    assert list(table.columns) == ["image", "label"]
    assert (table.rows, table.name) == (61, "bars")
    assert sorted(set(table.columns["label"].values)) == ["level", "upright"]
    assert table.columns["image"].missing.sum() == 1
    assert any("ignored files that are no images: 'level/notes.txt'" in note for note in table.notes)
    before = table.digest
    (folder / "level" / "broken.jpg").write_bytes(encoded(GRAY))
    assert read_table(folder).digest != before


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), "this is a folder without images; give a CSV or Parquet file"),
        (("a.txt",), "this is a folder without images .'a.txt'; PNG, JPEG, WEBP, GIF and BMP are read"),
        (("a.png", "b/c.png"), "has images with and without a class, 'a.png' and 'b/c.png'"),
        (("b/c.png", "b/d/e.png"), "'b/d' is a folder in the folder of a class"),
    ],
)
def test_other_folders(tmp_path, files, message) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(TableError, match=message):
        read_table(tmp_path)


def test_hostile_names_and_links_in_a_folder(tmp_path) -> None:
    top = tmp_path / "top"
    for name in ("a\x1b[2J\nb", "c"):
        (top / name).mkdir(parents=True)
        (top / name / "1.png").write_bytes(encoded(GRAY))
    (tmp_path / "secret.png").write_bytes(encoded(GRAY))
    (top / "c" / "2.png").symlink_to(tmp_path / "secret.png")
    os.mkfifo(top / "c" / "3.png")
    table = read_table(top)
    assert table.columns["image"].missing.tolist() == [False, False, True, True]
    assert "link to a file outside" in table.columns["image"].notes[0]
    assert "no regular file" in table.columns["image"].notes[0]
    with pytest.raises(TableError) as error:
        make_problem(table, "nothing")
    assert "\x1b" not in str(error.value)


def test_options_of_text_files_have_no_effect_on_a_folder(folder) -> None:
    with pytest.raises(TableError, match="separator has no effect on a folder of images"):
        read_table(folder, Reading(separator=";"))
    for reading, message in (
        (Reading(image=("q",)), "--image 'q': there is no such column; the columns are 'image', 'label'"),
        (Reading(numeric=("label",)), "--numeric 'label': the column has names of folders, which are classes"),
        (Reading(unit=("image=kg",)), "--unit 'image': the column has images; leave --unit out"),
    ):
        with pytest.raises(TableError, match=message):
            read_table(folder, reading)
    assert read_table(folder, Reading(image=("image",), categorical=("label",))).rows


def test_command_line(folder, tmp_path, capsys) -> None:
    run, out = str(tmp_path / "run"), tmp_path / "p.csv"
    assert main(["fit", str(folder), "--head", "image_linear", "--output", run]) == 0
    shown = capsys.readouterr()
    assert "1 of 61 images cannot be read and is missing: row 27 ('broken.jpg': not PNG" in shown.err
    assert "column 'image': 48 images, gray, 8 × 8 pixels" in shown.err
    assert main(["predict", run, str(folder), "--keep", "file", "--output", str(out)]) == 0
    shown = capsys.readouterr()
    assert "1 image cannot be read and is missing: row 27 ('broken.jpg'" in shown.err
    assert out.read_text().splitlines()[0] == '"file","prediction","probability_level","probability_upright"'
    assert len(out.read_text().splitlines()) == 62
    assert main(["evaluate", run, str(folder)]) == 0
    assert "1 of 61 images cannot be read" in capsys.readouterr().err
    assert main(["fit", str(folder), "--dry-run"]) == 0
    assert "image_products" in capsys.readouterr().out
    assert main(["info", run]) == 0
    assert "64 pixels of image" in capsys.readouterr().out
    assert main(["report", run, "--output", str(tmp_path / "report.html")]) == 0
    assert main(["formula", run]) == 2
    assert "'image' holds images, which have no closed form; fit again with --drop image" in capsys.readouterr().err
    assert main(["tune", str(folder), "--trials", "0"]) == 2
    assert "--trials 0: must be at least 1" in capsys.readouterr().err  # the target is the class by default
    assert main(["fit", str(folder), "--set", "training.epochs=1", "--output", run + "2"]) == 2
    assert "only the automatic model reads images" in capsys.readouterr().err


def test_a_real_target_has_intervals_that_read_no_pixels(tmp_path) -> None:
    from kapsi.tables import RunConfig, TableConfig, fit_table

    images, y = bars(80)
    path = write(tmp_path / "t.parquet", [encoded(image) for image in images], y + np.linspace(0, 0.1, 80))
    fit_table(path, RunConfig(TableConfig("label"), recipe=kp.recipes.Auto(heads=("image_linear",))), tmp_path / "run")
    run = kp.load_run(tmp_path / "run")
    bounds = run.predict_interval(pd.read_parquet(path), 0.9)
    assert (bounds[:, 0] < bounds[:, 1]).all()
    spread = run.model.intervals.conformal.spread
    assert spread is None or spread.in_features <= 1


def test_a_flat_folder_is_predicted(folder, tmp_path, capsys) -> None:
    run, flat = str(tmp_path / "run"), tmp_path / "flat"
    flat.mkdir()
    images, _ = bars(5, 1)
    for number, image in enumerate(images):
        (flat / f"{number}.png").write_bytes(encoded(image))
    assert main(["fit", str(folder), "--head", "image_linear", "--output", run]) == 0
    assert main(["predict", run, str(flat), "--output", str(tmp_path / "p.csv"), "--keep", "label"]) == 2
    assert "--keep 'label': is no column; choose from 'file'" in capsys.readouterr().err
    assert main(["predict", run, str(flat), "--output", str(tmp_path / "p.csv")]) == 0
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 6


# ------------------------------------------------------------------------------------------------ frames


@pytest.mark.parametrize("kind", ["bytes", "arrays", "pillow", "structs"])
def test_frames_of_images(kind) -> None:
    images, _ = bars(6)
    values = {
        "bytes": [encoded(image) for image in images],
        "arrays": images,
        "pillow": [Image.fromarray(image) for image in images],
        "structs": [{"bytes": encoded(image), "path": None} for image in images],
    }[kind]
    values[2] = None
    for frame in (pd.DataFrame({"a": range(6), "image": values}), {"a": range(6), "image": values}):
        found = table_of(frame, "t").columns["image"]
        assert found.missing.tolist() == [False, False, True, False, False, False]
        assert (found.values[1] == images[1]).all()


def test_one_array_of_all_images_and_paths_in_frames() -> None:
    images, _ = bars(6)
    assert table_of({"image": np.stack(images)}, "t").columns["image"].kind == "image"
    with_paths = table_of({"image": [{"bytes": None, "path": "/etc/passwd"}]}, "t").columns["image"]
    assert "a data frame has no folder" in with_paths.values[0]


def test_estimators_take_frames_with_images() -> None:
    (images, y), (new, new_y) = bars(120), bars(40, 1)
    frame = pd.DataFrame({"image": images, "x": np.random.default_rng(0).normal(size=120)})
    classifier = kp.RPNClassifier(heads=["image_linear"]).fit(frame, y)
    assert any("120 images" in note for note in classifier.notes_)
    others = pd.DataFrame({"image": [encoded(image) for image in new], "x": 0.0})
    assert classifier.score(others, new_y) > 0.8
    regressor = kp.RPNRegressor(heads=["image_linear"]).fit(frame[["image"]], y + 0.1)
    assert regressor.score(others[["image"]], new_y + 0.1) > 0.3
