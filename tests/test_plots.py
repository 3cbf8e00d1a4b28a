"""Pictures of functions: what they show, and that each function has one, repeatably, of every kind of file."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import kapsi as kp
from forked import each
from kapsi.cli.canvas import draw
from kapsi.function import LAYER_ROLES
from kapsi.plots import Curves, Maps
from kapsi.testing import examples_of

CLASSES = [cls for role in LAYER_ROLES for cls in kp.catalogue(role) if cls.__module__.startswith("kapsi.")]


@pytest.mark.parametrize("cls", CLASSES, ids=[f"{cls.role}-{cls.name}" for cls in CLASSES])
def test_every_function_has_a_picture(cls) -> None:
    before = torch.get_rng_state()
    for function in examples_of(cls)[:2]:
        shown, again = kp.plots.picture(function), kp.plots.picture(function)
        arrays = shown.maps if isinstance(shown, Maps) else (shown.values,)
        repeated = again.maps if isinstance(again, Maps) else (again.values,)
        assert all(torch.equal(a, b) for a, b in zip(arrays, repeated, strict=True))
        assert all(bool(array.isfinite().all()) for array in arrays)
        assert len(shown.labels) == (len(shown.maps) if isinstance(shown, Maps) else len(shown.values))
        if isinstance(shown, Curves):
            assert shown.limits[0] < shown.limits[1]
            assert ((shown.values >= shown.limits[0]) & (shown.values <= shown.limits[1])).any(
                1
            ).all() or cls.role == "expansion"
        for encoding in ("utf-8", "ascii", None):
            lines = draw(shown, 80, encoding)
            assert max(map(len, lines[1:])) <= 80
            assert encoding == "utf-8" or "\n".join(lines[1:]).encode("latin-1", "ignore")
    assert torch.equal(before, torch.get_rng_state())


def test_curves_are_the_basis_functions_on_the_domain_and_beyond() -> None:
    shown = kp.plots.picture(kp.Chebyshev(3))
    x = shown.x.numpy()
    assert shown.marked == (-1.0, 1.0)
    assert x[0] < -1.2
    assert x[-1] > 1.2
    for degree, values in enumerate(shown.values.numpy(), 1):
        np.testing.assert_allclose(values, np.polynomial.chebyshev.Chebyshev.basis(degree)(x), atol=1e-12)
    # The growth beyond the domain does not squeeze what is on it.
    assert -1.3 < shown.limits[0] < -1
    assert 1 < shown.limits[1] < 1.3


def test_few_of_many_curves_are_shown_and_too_many_are_refused() -> None:
    shown = kp.plots.picture(kp.BSpline(intervals=500))
    assert len(shown.values) == 24
    assert (shown.labels[0], shown.labels[-1]) == ("κ₁", "κ₅₀₃")
    assert "24 of 503" in shown.title
    with pytest.raises(kp.SpecError, match="b_spline has 100,003 columns, at most 16,384 are drawn"):
        kp.plots.picture(kp.BSpline(intervals=100_000))


def test_expansions_that_mix_inputs_are_maps_over_two_of_them() -> None:
    shown = kp.plots.picture(kp.Taylor(2))
    assert isinstance(shown, Maps)
    left, right, bottom, top = shown.extent
    # x₁ to the right and x₂ upwards: the first row is the largest x₂.
    x1, x2 = np.meshgrid(np.linspace(left, right, 61), np.linspace(top, bottom, 61))
    for array, expected in zip(shown.maps, (x1, x2, x1 * x1, x1 * x2, x2 * x1, x2 * x2), strict=True):
        np.testing.assert_allclose(array.numpy(), expected, atol=1e-12)
    assert isinstance(kp.plots.picture(kp.Extended(("b_spline", "chebyshev"))), Curves)


def test_weights_stand_beside_what_they_are_made_of() -> None:
    shown = kp.plots.picture(kp.LowRank(2))
    product, left, right = shown.maps
    np.testing.assert_allclose(product.numpy(), left.numpy() @ right.numpy(), atol=1e-12)
    assert shown.labels == ("ψ(w)", "left, 8 × 2", "right, 2 × 24")
    assert "8 × 24 from 64 parameters" in shown.title


def test_a_fusion_and_an_activation_show_what_they_do() -> None:
    y1, y2, y3, fused = kp.plots.picture(kp.Mean()).values.numpy()
    np.testing.assert_allclose(fused, (y1 + y2 + y3) / 3, atol=1e-12)
    shown = kp.plots.picture(kp.functions("process")["tanh"].function)
    np.testing.assert_allclose(shown.values[0].numpy(), np.tanh(shown.x.numpy()), atol=1e-12)


@pytest.mark.parametrize("given", [kp.Taylor, "taylor", None])
def test_what_is_no_function_is_refused(given) -> None:
    with pytest.raises(kp.SpecError, match=r"expected a function of the catalogue"):
        kp.plots.function(given)


# ------------------------------------------------------------------------------------------------ figures and files


def test_figures_are_labelled() -> None:
    figure = kp.plots.function(kp.BSpline())
    (ax,) = figure.axes
    assert (ax.get_title(), ax.get_xlabel(), ax.get_ylabel()) == ("b_spline: κ(x) of one input", "x", "κ(x)")
    assert len(ax.lines) == 8
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["κ₁", "κ₈"]
    panels = kp.plots.function(kp.Kronecker()).axes
    assert panels[0].get_title() == "ψ(w)"
    assert len(panels) == 3


@pytest.mark.parametrize(("function", "cut"), [(kp.Reciprocal(), True), (kp.BSpline(), True), (kp.Identity(), False)])
def test_a_cut_axis_states_the_range_of_the_values(function, cut) -> None:
    (ax,) = kp.plots.function(function).axes
    values = [y for line in ax.lines for y in line.get_ydata() if np.isfinite(y)]
    low, high = ax.get_ylim()
    assert cut == (min(values) < low or max(values) > high)
    expected = [f"axis cut: values from {min(values):.3g} to {max(values):.3g}"] if cut else []
    assert [text.get_text() for text in ax.texts] == expected


def test_a_picture_is_drawn_on_axes_that_are_given() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    first, second = figure.subplots(1, 2)
    assert kp.plots.function(kp.Chebyshev(), first) is figure
    assert kp.plots.function(kp.LowRank(), ax=second) is figure
    assert len(first.lines) == 3
    assert len(second.images) == 1


@pytest.mark.parametrize(("suffix", "head"), [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".PDF", b"%PDF")])
def test_files_are_whole_and_the_same_every_time(tmp_path, suffix, head) -> None:
    for name in ("a", "b"):
        kp.plots.save(kp.Taylor(2), tmp_path / f"{name}{suffix}")
    first, second = ((tmp_path / f"{name}{suffix}").read_bytes() for name in ("a", "b"))
    assert first.startswith(head)
    assert first == second
    assert len(os.listdir(tmp_path)) == 2


def test_paths_that_cannot_be_written_leave_nothing(tmp_path) -> None:
    with pytest.raises(kp.FileError, match=r"a picture is an \.svg, \.png or \.pdf file"):
        kp.plots.save(kp.Taylor(2), tmp_path / "a.jpg")
    with pytest.raises(kp.FileError, match="there is no folder"):
        kp.plots.save(kp.Taylor(2), tmp_path / "no" / "a.svg")
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(kp.FileError, match="not a writable regular file"):
        kp.plots.save(kp.Taylor(2), tmp_path / "folder.svg")
    assert os.listdir(tmp_path) == ["folder.svg"]


def test_without_matplotlib_one_line_says_what_to_install(tmp_path) -> None:
    picture = tmp_path / "a.svg"
    without = "sys.modules.update(matplotlib=None)"
    listed, drawn = each(
        tmp_path / "said",
        f"{without} or main('functions', 'taylor')",
        f"{without} or main('functions', 'taylor', '--picture', {str(picture)!r})",
        env={**os.environ, "PYTHONPATH": str(Path(kp.__file__).parents[1])},
    )
    assert (listed.returncode, listed.stderr) == (0, "")
    assert drawn.returncode == 2
    assert drawn.stderr == "kapsi: pictures need matplotlib, which is not installed; pip install 'kapsi[plot]'\n"
    assert os.listdir(tmp_path) == ["said"]


def test_a_path_of_a_picture_is_a_path() -> None:
    with pytest.raises(kp.SpecError, match=r"save\(path\): expected a path"):
        kp.plots.save(kp.Taylor(2), 5)
