"""Draw plots.svg by the code of plots.md."""

import doctest
from pathlib import Path

import matplotlib

PAGE = Path(__file__).with_suffix(".md")


def draw(target: Path) -> None:
    """Run the examples of the page and write their figure."""
    matplotlib.rcParams["svg.hashsalt"] = "kapsi"  # the same file on each run
    examples = doctest.DocTestParser().get_doctest(PAGE.read_text(encoding="utf-8"), {}, PAGE.name, str(PAGE), 0)
    failed, _ = doctest.DocTestRunner().run(examples, clear_globs=False)
    if failed:
        raise SystemExit(f"{PAGE.name}: {failed} examples failed")
    examples.globs["figure"].savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    draw(PAGE.with_suffix(".svg"))
