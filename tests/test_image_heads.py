"""Heads of images: fits, shifts and flips by held-out rows, sums with other heads, and the result on MNIST."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import kapsi as kp
from kapsi.cli import main
from kapsi.data.tabular import Column, Preprocessing, Table
from kapsi.data.tabular.pictures import image_column
from kapsi.recipes import Auto, ImageLinearHead, ImagePatchesHead, ImageProductsHead, RecipeData
from kapsi.recipes.base import held_out_scores
from kapsi.recipes.image_linear import channel_scale
from kapsi.recipes.image_patches import _PatchFeatures
from kapsi.training.augmentation import moved, shifted

SIDE = 8


def rows_of(rows: int = 200, classes: int = 2, *, mirrored: bool = False, seed: int = 0) -> RecipeData:
    """Return images of a bar on the left or the right (mirrored: upright or level), the class, and a number without use."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, rows)
    images = rng.integers(0, 50, (rows, 1, SIDE, SIDE)).astype(np.uint8)
    for image, label in zip(images[:, 0], y, strict=True):
        if mirrored:
            k = rng.integers(1, 7)
            image[(slice(0, 8), k) if label else (k, slice(0, 8))] += 150
        else:
            image[1:7, 1 if label else 6] += 150
    x = torch.from_numpy(rng.normal(size=(rows, 1)))
    ones, pixels = torch.ones(1, dtype=torch.bool), torch.from_numpy(images).reshape(rows, -1)
    return RecipeData(
        x, torch.from_numpy(y), kp.CrossEntropy(), classes, ones, pixels=pixels, shapes=((1, SIDE, SIDE),)
    )


def outputs(model: kp.Model, data: RecipeData) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.cat([data.x, data.pixels.double()], 1))


def real(data: RecipeData) -> RecipeData:
    return replace(data, y=data.y.double()[:, None], loss=kp.MSE(), classes=0)


SMALL = ImageProductsHead(width=16, epochs=40)
PATCHES = ImagePatchesHead(filters=8, size=3)


def test_the_linear_head_is_ridge_regression() -> None:
    from sklearn.linear_model import Ridge

    data, l2 = real(rows_of(60)), 0.1
    shift, scale = channel_scale(data)
    x = ((data.pixels - shift) / scale).numpy()
    reference = Ridge(alpha=l2 * len(x) / 2).fit(x, data.y[:, 0].numpy())
    fitted = outputs(ImageLinearHead(l2=l2).fit(data), data)[:, 0]
    np.testing.assert_allclose(fitted, reference.predict(x), atol=0.02)


def test_channels_have_scales_of_their_own() -> None:
    pixels = torch.tensor([[0, 10, 5, 5], [20, 30, 5, 5]], dtype=torch.uint8)
    zeros = torch.zeros(2, 0, dtype=torch.float64)
    data = RecipeData(zeros, torch.tensor([0, 1]), kp.CrossEntropy(), 2, zeros[0].bool(), pixels=pixels)
    shift, scale = channel_scale(replace(data, shapes=((2, 1, 2),)))
    assert shift.tolist() == [15, 15, 5, 5]
    torch.testing.assert_close(scale, torch.tensor([125.0**0.5, 125.0**0.5, 1.0, 1.0]))


@pytest.mark.parametrize("head", [ImageLinearHead(), SMALL, PATCHES], ids=["linear", "products", "patches"])
def test_held_out_rows_are_learned(head) -> None:
    data = rows_of()
    assert held_out_scores(head.cross_fit(data, data.folds(2)[:1]).outputs, data)[1] > 0.95
    number = real(data)
    assert held_out_scores(head.cross_fit(number, number.folds(2)[:1]).outputs, number)[1] > 0.6


def test_a_fit_is_determined_by_the_seed() -> None:
    data, head = rows_of(40), ImageProductsHead(width=8, epochs=1, shift=1, flip=True)
    before = torch.random.get_rng_state()
    first, again, other = (outputs(head.fit(data, seed), data) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_fit_of_patches_has_the_outputs_of_its_path() -> None:
    data = rows_of(60)
    features = _PatchFeatures(PATCHES.kappa(data), data)
    matrix, bias = features.coefficients(next(iter(features.path([1.0]))))
    assert features.x.shape == (60, 2 * 8 * 4 * 4)
    wanted = features.x.double() @ matrix + bias
    torch.testing.assert_close(outputs(replace(PATCHES, l2=1.0).fit(data), data), wanted, atol=1e-3, rtol=1e-3)


def test_filters_are_directions_of_the_patches() -> None:
    generator = torch.Generator().manual_seed(0)
    stripes = torch.randn(300, 1, 1, 4, generator=generator).expand(300, 1, 4, 4)
    kappa = kp.Patches(count=5, size=3, height=4)
    x = stripes.reshape(300, 16)
    head = kp.Head(16, 1, kp.HeadSpec(kappa))
    found = kappa.calibrate(x, head.kappa)
    filters = found["filters"]
    torch.testing.assert_close(filters, filters[:, :, :1].expand_as(filters))  # constant along the stripes
    torch.testing.assert_close(kappa.calibrate(x, head.kappa)["filters"], filters, atol=0, rtol=0)
    with pytest.raises(kp.SpecError, match="15 inputs are no multiple of 4"):
        kappa.factors(15)


def test_parts_of_a_batch_of_images_change_nothing(monkeypatch) -> None:
    kappa, x = kp.Patches(count=3, size=2, height=4), torch.rand(10, 16, dtype=torch.float64)
    head = kp.Head(16, 1, kp.HeadSpec(kappa), dtype=torch.float64)
    whole = kappa(x, head.kappa).dense()
    monkeypatch.setattr("kapsi.expansion.patches.AT_ONCE", 200)
    torch.testing.assert_close(kappa(x, head.kappa).dense(), whole)
    with torch.no_grad():
        torch.testing.assert_close(kappa(x, head.kappa).dense(), whole)


@pytest.mark.parametrize("mirrored", [False, True])
def test_flips_are_used_where_they_keep_the_class(mirrored) -> None:
    data = rows_of(mirrored=mirrored)
    assert SMALL.cross_fit(data, data.folds(2)[:1]).recipe.flip == mirrored


def test_shifts_are_used_where_they_keep_the_class() -> None:
    data = rows_of(mirrored=True)
    assert SMALL.cross_fit(data, data.folds(2)[:1]).recipe.shift == 1
    columns = torch.arange(len(data.x)) % 2
    images = torch.zeros(len(data.x), 1, SIDE, SIDE, dtype=torch.uint8)
    images[torch.arange(len(data.x)), 0, :, 3 + columns] = 200  # the class is the column
    places = replace(data, y=columns, pixels=images.flatten(1))
    assert SMALL.cross_fit(places, places.folds(2)[:1]).recipe.shift == 0


def test_a_flip_that_swaps_two_of_many_classes_is_not_used() -> None:
    from kapsi.recipes.image_products import _keeps

    y = torch.arange(1000) % 20
    right = torch.nn.functional.one_hot(y, 20).double()
    swapped = right.clone()
    swapped[y == 3] = right[y == 4][:50]
    zeros = torch.zeros(1000, 1, dtype=torch.float64)
    data = RecipeData(zeros, y, kp.CrossEntropy(), 20, torch.ones(1, dtype=torch.bool))
    assert _keeps(right, right, data)
    assert not _keeps(right, swapped, data)


def test_with_flips_a_mirror_image_has_the_same_outputs() -> None:
    data = rows_of(40)
    model = ImageProductsHead(width=8, epochs=1, shift=0, flip=True).fit(data)
    mirror = data.pixels.reshape(-1, 1, SIDE, SIDE).flip(-1).reshape(len(data.x), -1)
    torch.testing.assert_close(outputs(model, data), outputs(model, replace(data, pixels=mirror)))


def test_shifts_move_images_and_keep_the_corner() -> None:
    image = torch.arange(9).reshape(1, 1, 3, 3)
    assert moved(image, -1, 1)[0, 0].tolist() == [[0, 3, 4], [0, 6, 7], [0, 0, 0]]
    found = {tuple(out.flatten().tolist()) for out in shifted(image.expand(500, 1, 3, 3), 1)}
    assert found == {tuple(moved(image, i, k).flatten().tolist()) for i in (-1, 0, 1) for k in (-1, 0, 1)}


def test_weights_of_rows_count() -> None:
    data = rows_of(120)
    wrong = torch.arange(120) < 50
    y, weight = torch.where(wrong, 1 - data.y, data.y), torch.where(wrong, 1e-6, 1.0).double()
    weighted = replace(data, y=y, weight=weight / weight.mean())
    for head in (ImageLinearHead(l2=0.1), replace(SMALL, shift=0, flip=False)):
        right = outputs(head.fit(weighted), data).argmax(1) == data.y
        assert right.double().mean() > 0.9


def test_an_interrupted_fit_resumes_with_equal_weights(tmp_path, monkeypatch) -> None:
    head, data, batches = replace(SMALL, epochs=3, shift=1, flip=True), rows_of(96), []
    whole, change = head.fit(data), ImageProductsHead._change

    def counted(self, data):
        inner = change(self, data)

        def changed(pixels):
            batches.append(len(pixels))
            if len(batches) == 7:
                raise KeyboardInterrupt
            return inner(pixels)

        return changed

    monkeypatch.setattr(ImageProductsHead, "_change", counted)
    with pytest.raises(KeyboardInterrupt):
        head.resumed(data, 0, kp.Checkpoints(tmp_path, steps=1))
    resumed = head.resumed(data, 0, kp.Checkpoints(tmp_path, resume=True))
    assert len(batches) == 7 + 7  # of 10: a look at the shape, and three epochs of three batches
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_the_budget_shortens_the_fit() -> None:
    data, head = rows_of(), ImageProductsHead()
    assert head.within(data, 1e9) == head
    shorter = head.within(data, head.fit_cost(data, 200) / 4)
    assert 0.2 < shorter.epochs / head._epochs(200) < 0.26
    assert head.within(data, 0.0).epochs == 1
    assert Auto().plan(data).seconds < 4 * head.fit_cost(data, 200) + 60


@pytest.mark.all_heads
@pytest.mark.parametrize("rows", [60, 240, 400])
def test_few_large_images_have_the_network(rows: int) -> None:
    y, x = torch.arange(rows) % 2, torch.zeros(rows, 0, dtype=torch.float64)
    pixels = torch.zeros(rows, 3 * 64 * 64, dtype=torch.uint8)
    shapes = ((3, 64, 64),)
    data = RecipeData(x, y, kp.CrossEntropy(), 2, x[0] > 0, pixels=pixels, shapes=shapes, others=False)
    assert {"image_products", "image_patches"} <= Auto().plan(data).heads.keys()


def test_a_plan_counts_the_weights_of_the_network() -> None:
    data, head = rows_of(), ImageProductsHead(width=64, epochs=1, shift=0, flip=False)
    (network,) = head.fit(data).layers[0].heads
    weights = sum(p.numel() for p in network.kappa.parameters())
    # In training a weight, its gradient and two moments.
    assert 16 * weights <= head.plan(data).bytes <= 100 * weights
    assert Auto(heads=(head,)).plan(data).bytes == head.plan(data).bytes


@pytest.mark.all_heads
def test_images_texts_and_numbers_are_one_layer() -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 150)
    number, texts = rng.normal(size=150), [f"{'good' if v else 'bad'} {i} words here" for i, v in enumerate(y)]
    images = [rng.integers(0, 50, (4, 4)).astype(np.uint8) for _ in y]
    table = Table(
        "t",
        {
            "x": Column("real", number),
            "text": Column("text", np.array(texts, dtype=object), free=True),
            "image": image_column("image", images),
        },
    )
    preprocessing = Preprocessing.fit(table)
    x = preprocessing.transform(table)
    assert x.shape[1] == len(preprocessing.names())
    target = y + number + np.array([image.mean() / 50 for image in images])
    values = dict(zip(table.columns, (number, texts, images), strict=True))
    import pandas as pd

    heads = ["linear", "text_linear", "image_linear"]
    model = kp.RPNRegressor(heads=heads).fit(pd.DataFrame(values), target)
    assert len(model.model_.layers) == 1
    assert model.score(pd.DataFrame(values), target) > 0.9


DATA = Path(os.environ.get("KAPSI_DATA", "no data"))


@pytest.mark.slow
@pytest.mark.all_heads
def test_mnist_without_an_option(tmp_path) -> None:
    if not (DATA / "mnist" / "test.parquet").exists():
        pytest.skip("KAPSI_DATA names no folder with the data")
    command = ["fit", str(DATA / "mnist" / "train.parquet"), "--target", "label", "--output", str(tmp_path / "run")]
    assert main([*command, "--validation", str(DATA / "mnist" / "test.parquet")]) == 0
    assert kp.load_run(tmp_path / "run").manifest["scores"]["kapsi"]["accuracy"] > 0.993
