"""The table of comparisons: what counts as within, what is missing, what went wrong; on cases made up for it."""

from __future__ import annotations

import math
from importlib import metadata

import numpy as np
import pytest
import torch

import kapsi as kp
from kapsi.cli import main
from kapsi.zoo import parity
from kapsi.zoo.base import Case, Comparison, cases, tensor_of

MODEL = kp.Model(kp.rpn([1, 1]), seed=0)


def comparison(deviation: float) -> Comparison:
    return Comparison(deviation, 1200, 7, MODEL, torch.zeros(2, 1), torch.zeros(2, 1), "mse")


def case(name: str, outcome: float | Exception, package: str = "torch", tolerance: float = 1e-9) -> Case:
    def compare(seed: int) -> Comparison:
        if isinstance(outcome, Exception):
            raise outcome
        return comparison(outcome * (1 + seed))

    return Case(name, "outputs", "made | up", package, tolerance, compare)


FAKES = [
    case("exact", 0.0),
    case("close", 5e-10),
    case("at the limit", 1e-9),
    case("beyond", 2e-9),
    case("no number", math.nan),
    case("infinite", math.inf),
    case("not there", 0.0, package="no-such-package-of-anyone"),
    case("breaks", ValueError("first line\nsecond line")),
    case("breaks silently", RuntimeError()),
]


@pytest.fixture
def fakes(monkeypatch) -> None:
    monkeypatch.setattr(parity, "cases", lambda: list(FAKES))


@pytest.mark.usefixtures("fakes")
def test_rows_say_what_came_of_each_case() -> None:
    rows = parity.run()
    assert [row.case for row in rows] == FAKES
    assert [row.outcome for row in rows] == [
        "within",
        "within",
        "within",
        "beyond",
        "beyond",
        "beyond",
        "missing",
        "ValueError: first line",
        "RuntimeError",
    ]
    assert [row.within for row in rows] == [True] * 3 + [False] * 6
    assert rows[0].version == metadata.version("torch")
    assert (rows[0].ours, rows[0].theirs) == (1200, 7)
    assert (rows[6].version, rows[6].deviation, rows[6].ours) == (None, None, None)
    assert rows[7].version is not None


@pytest.mark.usefixtures("fakes")
def test_seed_is_that_of_the_comparisons() -> None:
    assert [row.outcome for row in parity.run(seed=1, only="close")] == ["within"]
    assert [row.outcome for row in parity.run(seed=2, only="close")] == ["beyond"]


@pytest.mark.usefixtures("fakes")
def test_only_some_cases() -> None:
    assert [row.case.model for row in parity.run(only="BREAKS")] == ["breaks", "breaks silently"]
    assert [row.case.model for row in parity.run(only="no-such-package")] == ["not there"]
    with pytest.raises(kp.SpecError, match="no matching case; available: at the limit; beyond"):
        parity.run(only="something else")
    for wrong in (-1, 1.5, True):
        with pytest.raises(kp.SpecError, match="seed"):
            parity.run(seed=wrong)
    with pytest.raises(kp.SpecError, match="expected a string"):
        parity.run(only=3)


@pytest.mark.usefixtures("fakes")
def test_table_is_aligned_and_ends_with_the_count() -> None:
    rows = parity.run()
    lines = parity.table(rows).splitlines()
    assert lines[-1] == "parity: 3 of 8 within tolerance, 1 not installed"
    assert lines[-2] == "not installed: no-such-package-of-anyone"
    header, *body = lines[:-2]
    assert len(body) == 9
    for name in ("quantity", "data", "library", "tolerance"):
        assert header.index(name) > 0
    begin = header.index("quantity")
    assert all(line[begin:].startswith("outputs") for line in body)
    end = header.index("ours") + 4
    assert all(line[:end].endswith("1,200") for line in body[:6])
    assert f"torch {metadata.version('torch')}" in body[0]
    assert body[1].split()[-1] == "within"
    assert "5.0e-10" in body[1]
    assert " nan " in body[4]
    assert body[7].endswith("ValueError: first line")


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(
    ("only", "code", "last"),
    [
        ("exact", 0, "parity: 1 of 1 within tolerance"),
        ("beyond", 1, "parity: 0 of 1 within tolerance"),
        ("breaks silently", 1, "parity: 0 of 1 within tolerance"),
        ("not there", 0, "parity: 0 of 0 within tolerance, 1 not installed"),
        ("made", 1, "parity: 3 of 8 within tolerance, 1 not installed"),
    ],
)
def test_the_exit_code_depends_on_the_installed_libraries(only, code, last, capsys) -> None:
    assert main(["parity", "--only", only]) == code
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_no_rows_are_a_table_too() -> None:
    assert parity.table([]).splitlines()[-1] == "parity: 0 of 0 within tolerance"


def test_every_file_of_the_zoo_gives_its_cases() -> None:
    found = cases()
    assert any(case.model.startswith("naive Bayes") for case in found)
    keys = [(case.model, case.quantity, case.data) for case in found]
    assert len(set(keys)) == len(keys)
    for each in found:
        assert 0 < each.tolerance <= 1e-4


@pytest.mark.parametrize(
    "values", [np.arange(6.0)[::-1], np.arange(6, dtype=">i4"), np.broadcast_to(2.5, 3), np.float32(1)]
)
def test_tensors_of_arrays_that_torch_refuses(values) -> None:
    made = tensor_of(values)
    assert made.shape == values.shape
    assert made.tolist() == values.tolist()


def test_tensors_of_what_is_no_number() -> None:
    for wrong in (["a"], [1j], torch.zeros(1, dtype=torch.complex64), None):
        with pytest.raises(TypeError):
            tensor_of(wrong)
