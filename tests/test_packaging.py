"""The metadata of the package: what an index shows, and what a source distribution needs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import kapsi

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
TARGETS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]["targets"]


def test_an_index_shows_license_author_and_paper() -> None:
    assert PROJECT["license"] == "MIT"
    assert PROJECT["authors"]
    assert "https://arxiv.org/abs/2407.04819" in PROJECT["urls"].values()
    for name in PROJECT["license-files"]:
        assert (ROOT / name).is_file()
    # With a license expression, an index refuses license classifiers.
    assert not any(line.startswith("License ::") for line in PROJECT["classifiers"])
    assert (ROOT / "src/kapsi/py.typed").is_file()


def test_classifiers_agree_with_the_required_python() -> None:
    lowest = re.fullmatch(r">=3\.(\d+)", PROJECT["requires-python"])
    assert lowest is not None
    minors = [int(line.rsplit(".", 1)[1]) for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert minors == list(range(int(lowest[1]), max(minors) + 1))


def test_a_source_distribution_has_all_but_results() -> None:
    included = {name.strip("/") for name in TARGETS["sdist"]["include"]}
    for name in included:
        assert (ROOT / name).exists(), name
    assert included >= {"src", "tests", "docs", "examples", "benchmarks", "README.md", "LICENSE", "CHANGELOG.md"}
    assert "results" not in included


@pytest.mark.parametrize("heading", ["[Unreleased]", f"[{kapsi.__version__}]"])
def test_the_changelog_has_a_section_for_this_version(heading) -> None:
    lines = (ROOT / "CHANGELOG.md").read_text("utf-8").splitlines()
    assert sum(line.startswith(f"## {heading}") for line in lines) == 1
