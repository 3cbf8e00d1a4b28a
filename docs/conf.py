"""Configuration of the documentation, and the pages about functions, which are made from the registry."""

from __future__ import annotations

import contextlib
import inspect
import sys
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import latex2mathml.converter
from docutils import nodes

import kapsi
from kapsi.listing import Entry, public_name, roles, title
from kapsi.zoo import three_models

project = "kapsi"
copyright = "2026, the kapsi developers"
version = release = kapsi.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
html_theme = "pydata_sphinx_theme"
html_theme_options = {"show_prev_next": False, "navigation_with_keys": False, "navbar_center": []}
html_sidebars = {"**": ["sections"]}
html_math_renderer = "mathml"
html_show_sourcelink = False
# The last ones are scikit-learn's, whose docstrings refer to its own pages.
EXCLUDED = (
    "examples, check, get_metadata_routing, set_fit_request, set_partial_fit_request, set_score_request, "
    "set_predict_request, set_transform_request, set_inverse_transform_request"
)
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True, "show-inheritance": True, "exclude-members": EXCLUDED}
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Source", "params_style"), "Example"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
suppress_warnings = ["myst.xref_missing"]  # links to files beside docs/, for readers of the repository
nitpicky = True
# Public names must resolve; types of other packages and internal base classes have no page.
nitpick_ignore_regex = [("py:(class|obj|data|func|meth|exc)", r"(?!kapsi\.\w+$).*")]

GENERATED = Path(__file__).parent / "_generated"


def setup(app: Any) -> None:
    app.add_html_math_renderer("mathml", (inline_formula, None), (formula, None))
    app.connect("builder-inited", lambda app: write_pages(GENERATED))
    app.connect(
        "builder-inited", lambda app: three_models.save(GENERATED / "three-models.svg")
    )  # which pages leave out
    app.connect("autodoc-process-signature", signature)


def inline_formula(writer: Any, node: Any) -> None:
    """Write a formula as MathML, which browsers render without a script."""
    writer.body.append(latex2mathml.converter.convert(node.astext()))
    raise nodes.SkipNode


def formula(writer: Any, node: Any) -> None:
    """Write a formula on lines of its own as MathML; wide ones scroll."""
    mathml = latex2mathml.converter.convert(node.astext(), display="block")
    writer.body.append(f'<div class="math" style="overflow-x: auto" tabindex="0">{mathml}</div>')
    raise nodes.SkipNode


def signature(
    app: Any, what: str, name: str, cls: Any, options: Any, given: str, returned: str
) -> tuple[str, str] | None:
    """Return the options of a function with their defaults; autodoc would show what `Function.__new__` takes."""
    if what != "class" or not issubclass(cls, kapsi.Function) or not is_dataclass(cls):
        return None
    shown = [field.name + ("" if field.default is MISSING else f"={field.default!r}") for field in fields(cls)]
    return f"({', '.join(shown)})", ""


def write_pages(folder: Path) -> None:
    """Write one page a role with every function of the package and its picture, and remove what is no longer there."""
    entries = [entry for entry in kapsi.functions() if entry.cls.__module__.startswith("kapsi.")]
    written = set()
    for role in roles():
        members = [entry for entry in entries if entry.role == role]
        for entry in (entry for entry in members if kapsi.plots.drawable(entry.function)):
            target = folder / f"{role}-{entry.name}.svg"
            target.parent.mkdir(parents=True, exist_ok=True)
            made = folder / "new.svg"
            kapsi.plots.save(entry.function, made)
            replace(target, made.read_bytes())
            made.unlink()
            written.add(target)
        target = folder / f"{role}.rst"
        replace(target, page(title(role)[0].upper() + title(role)[1:], members).encode())
        written.add(target)
    for stale in set(folder.iterdir()) - written:
        stale.unlink()


def replace(target: Path, content: bytes) -> None:
    """Write a file unless it is the same: what has not changed is not built again."""
    with contextlib.suppress(FileNotFoundError):
        if target.read_bytes() == content:
            return
    target.write_bytes(content)


def page(name: str, entries: list[Entry]) -> str:
    """Return the page of a role: a table, then the families, each function with its picture and its docstring."""
    lines = [*heading(name, "="), ".. list-table::", "   :header-rows: 1", "   :widths: 22 40 26 12", ""]
    for cells in [("name", "what it is", "size", "domain"), *map(row, entries)]:
        lines += [f"   {'*' if i == 0 else ' '} - {cell}" for i, cell in enumerate(cells)]
    families: dict[str, list[Entry]] = {}
    for entry in entries:
        families.setdefault(entry.cls.__module__, []).append(entry)
    for module, members in families.items():
        if len(families) > 1:
            lines += ["", *heading(module.split(".")[-1].replace("_", " ").capitalize(), "-")]
            lines += [(inspect.getdoc(sys.modules[module]) or "").split("\n\n")[0]]
        for entry in members:
            lines += ["", f".. _{label(entry)}:", "", *heading(names(entry), "~")]
            if kapsi.plots.drawable(entry.function):
                lines += [f".. image:: {entry.role}-{entry.name}.svg", f"   :alt: {escaped(entry.summary)}", ""]
            lines += [f".. autoclass:: {public_name(entry.cls)}", *members_of(entry.cls)]
    return "\n".join(lines) + "\n"


def row(entry: Entry) -> tuple[str, ...]:
    return f":ref:`{entry.name} <{label(entry)}>`", escaped(entry.summary), escaped(entry.sizes), entry.domain or ""


def heading(text: str, line: str) -> list[str]:
    return [text, line * max(len(text), 3), ""]


def names(entry: Entry) -> str:
    return escaped(entry.name + (f" ({', '.join(entry.aliases)})" if entry.aliases else ""))


def label(entry: Entry) -> str:
    return f"{entry.role}-{entry.name}".replace("_", "-")


def escaped(text: str) -> str:
    """Return text in which nothing is markup but literals in backticks."""
    parts = text.split("`")
    marks = {"\\": "\\\\", "*": "\\*", "_": "\\_", "|": "\\|"}
    plain = ["".join(marks.get(letter, letter) for letter in part) for part in parts]
    return "".join(f"``{parts[i]}``" if i % 2 else plain[i] for i in range(len(parts)))


def members_of(cls: type) -> list[str]:
    """Return the options of autoclass by which the methods are shown that have something of their own to say."""
    own = [name for name, member in vars(cls).items() if not name.startswith("_") and inspect.isfunction(member)]
    shown = [name for name in own if vars(cls)[name].__doc__]
    return [f"   :members: {', '.join(shown)}" if shown else "   :no-members:"]
