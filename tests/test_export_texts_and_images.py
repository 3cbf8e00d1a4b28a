"""Exports of models with columns of texts and images: words and pixels in, the predictions of `kapsi predict` out."""

from __future__ import annotations

import io
import json
import re
import runpy
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import kapsi as kp
from kapsi.data.tabular import Column, NumberColumn, Preprocessing, Reading, Table
from kapsi.data.tabular.image_column import ImageColumn
from kapsi.data.tabular.text_column import TextColumn, tokens
from kapsi.export import UNSEEN, interface, numeric
from kapsi.recipes.base import HeadRecipe

PAGE = Path(__file__).parents[1] / "docs" / "export.md"
ODD = (
    None,
    "!!!",
    "a",
    "",
    "Not <b>good</b> &amp; cheap! <br/> 好的 👍 İstanbul",
    "&lt;b&gt; great great great nowhere great",
)
"""Texts that are missing, without words, with tags, entities, several scripts, and repeated words."""
HEADS = sorted(
    kind.name
    for kind in kp.catalogue("recipe")
    if issubclass(kind, HeadRecipe) and kind.__module__.startswith("kapsi") and re.search("text|image", kind.name)
)


def texts_of(count: int, seed: int = 0) -> tuple[list[str | None], np.ndarray]:
    """Return texts, some of them odd, with a class each."""
    random = np.random.default_rng(seed)
    positive = random.random(count) < 0.5
    values: list[str | None] = [
        f"{'great' if good else 'dull'} film of {random.choice(['war', 'love', 'cats'])} and day {random.integers(99)}"
        for good in positive
    ]
    for i, text in enumerate(ODD):
        values[i + 3] = text
    return values, positive.astype(np.int64)


def images_of(classes: np.ndarray, shape: tuple[int, ...] = (9, 8), seed: int = 0) -> list[np.ndarray]:
    """Return images of noise whose upper or lower half is bright."""
    random = np.random.default_rng(seed)
    images = random.integers(0, 120, (len(classes), *shape))
    for image, label in zip(images, classes, strict=True):
        image[: shape[0] // 2] += 100 * label
        image[shape[0] // 2 :] += 100 * (1 - label)
    return list(images.astype(np.uint8))


def snippet(*names: str) -> dict[str, Any]:
    """Return the functions on the page, without the rest of their block."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = [block for block in blocks if f"def {names[0]}" in block]
    parts = re.findall(r"^(?:import|from) .*$|^def .*\n(?:(?:    .*)?\n)+", block, re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "functions.py"
        path.write_text("\n".join(part for part in parts if "onnxruntime" not in part), encoding="utf-8")
        found = runpy.run_path(str(path))
    return {name: found[name] for name in names}


# ------------------------------------------------------------------------------------------------ the numeric part


@pytest.mark.parametrize("text", [text for text in ODD if text is not None])
def test_the_words_of_the_page_are_those_of_the_encoder(text) -> None:
    column = TextColumn.fit("t", Column("text", np.array(["a b", "a c"], dtype=object)))
    words = snippet("words")["words"]
    model: Any = SimpleNamespace(preprocessing=Preprocessing((column,)), target="y", task="x", classes=None)
    (facts,) = interface(model)["columns"]
    assert words(text, facts) == (tokens(text) or [" "])
    assert words(None, facts) == []


@pytest.mark.parametrize("with_text", [True, False])
def test_encodings_are_those_of_the_preprocessing(with_text) -> None:
    texts, classes = texts_of(40)
    gray, colored = images_of(classes), images_of(classes, (3, 4, 3))
    gray[5] = None  # type: ignore[call-overload]
    values = {"n": np.arange(40.0), "text": texts, "gray": gray, "colored": colored}
    kinds = {"n": "real", "text": "text", "gray": "image", "colored": "image"}
    columns = {}
    for name, entries in values.items():
        array = np.empty(40, dtype=float if name == "n" else object)
        array[:] = entries
        columns[name] = Column(kinds[name], array)  # type: ignore[arg-type]
    encoders: list[Any] = [ImageColumn.fit(name, columns[name]) for name in ("gray", "colored")]
    encoders.insert(1, NumberColumn("n", 1.0, 3.0, missing=False))
    if with_text:
        encoders.insert(1, TextColumn.fit("text", columns["text"]))
    preprocessing = Preprocessing(tuple(encoders))
    wanted = preprocessing.transform(Table("t", columns))
    arguments = [torch.from_numpy(np.stack([np.zeros((9, 8), np.uint8) if x is None else x for x in gray]))]
    arguments.append(torch.tensor([[x is None] for x in gray]))
    if with_text:
        model: Any = SimpleNamespace(preprocessing=preprocessing, target="y", task="x", classes=None, reading=Reading())
        (facts,) = [column for column in interface(model)["columns"] if column["kind"] == "text"]
        arguments.append(torch.tensor(codes_of(snippet("words", "texts")["texts"](texts, facts), facts)))
    arguments.append(torch.from_numpy(np.stack(colored)))
    inputs = numeric.Encoding(preprocessing)(
        torch.from_numpy(values["n"])[:, None],  # type: ignore[arg-type]
        torch.empty(40, 0, dtype=torch.int64),
        *arguments,
    )
    wanted = wanted.toarray() if with_text else wanted
    np.testing.assert_allclose(inputs.numpy(), wanted, rtol=1e-14, atol=1e-15)
    assert wanted.shape == (40, len(preprocessing.names()))


def codes_of(words: np.ndarray, facts: dict[str, Any]) -> list[list[int]]:
    """Return the codes of words by the description of the column."""
    return [[facts["codes"].get(word, UNSEEN) for word in row] for row in words]


# ------------------------------------------------------------------------------------------------ files


def frame_of(count: int, kind: str, seed: int = 0) -> tuple[pd.DataFrame, np.ndarray]:
    """Return rows with a text or an image, a number and a category, and a class each."""
    from PIL import Image

    random = np.random.default_rng(seed)
    texts, classes = texts_of(count, seed)
    frame = pd.DataFrame({"x": random.normal(size=count), "c": random.choice(["a", "b"], count)})
    if kind == "text":
        return frame.assign(text=texts), classes
    encoded = []
    for image in images_of(classes, seed=seed):
        Image.fromarray(image).save(buffer := io.BytesIO(), "PNG")
        encoded.append(buffer.getvalue())
    return frame.assign(image=encoded), classes


def feeds_of(facts: list[dict[str, Any]], frame: pd.DataFrame) -> dict[str, np.ndarray]:
    """Return the inputs of an ONNX file for rows."""
    known, feeds = snippet("texts", "images", "pixels"), {}
    for column in facts:
        values = frame[column["name"]]
        if column["kind"] == "text":
            feeds[column["name"]] = known["texts"](values, column).reshape(len(frame), -1)
        elif column["kind"] == "image":
            feeds[column["name"]] = known["images"](map(io.BytesIO, values), column)
        else:
            kind = object if column["kind"] == "category" else np.float64
            feeds[column["name"]] = np.array(values, dtype=kind).reshape(-1, 1)
    return feeds


@pytest.mark.slow
@pytest.mark.all_heads
@pytest.mark.parametrize("head", HEADS)
def test_every_head_of_texts_and_images_has_a_form(tmp_path, head) -> None:
    pytest.importorskip("onnxscript", reason="needs the extra onnx: pip install kapsi[onnx]")
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx: pip install kapsi[onnx]")
    kind = head.split("_")[0]
    frame, y = frame_of(120, kind)
    new, _ = frame_of(60, kind, seed=1)
    classifier = kp.RPNClassifier(heads=["linear", head]).fit(frame, y)
    wanted = classifier.predict_proba(new)
    classifier.export(tmp_path / "m.onnx")
    session = runtime.InferenceSession(tmp_path / "m.onnx")
    facts = json.loads(session.get_modelmeta().custom_metadata_map["kapsi"])["columns"]
    feeds = feeds_of(facts, new)
    for count in (60, 1):
        labels, probabilities = session.run(None, {name: values[:count] for name, values in feeds.items()})
        np.testing.assert_allclose(probabilities, wanted[:count], rtol=0, atol=1e-6)
        assert labels.tolist() == classifier.predict(new)[:count].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "image"])
def test_a_torch_program_takes_codes_of_words_and_pixels(tmp_path, kind) -> None:
    frame, y = frame_of(120, kind)
    new, _ = frame_of(60, kind, seed=1)
    classifier = kp.RPNClassifier(heads=[f"{kind}_linear"]).fit(frame, y)
    classifier.export(tmp_path / "m.pt2", "torch")
    files = {"columns.json": ""}
    program = torch.export.load(tmp_path / "m.pt2", extra_files=files).module()
    facts = json.loads(files["columns.json"])["columns"]
    feeds = feeds_of(facts, new)
    described = {column["name"]: column for column in facts}
    codes = torch.tensor(codes_of(feeds["c"], described["c"]))
    last = feeds[kind] if kind == "image" else np.array(codes_of(feeds[kind], described[kind]))
    for count in (60, 1, 0):
        outputs = program(torch.tensor(feeds["x"][:count]), codes[:count], torch.from_numpy(last)[:count])
        np.testing.assert_allclose(outputs.numpy(), classifier.predict_proba(new)[:count], rtol=0, atol=1e-6)
