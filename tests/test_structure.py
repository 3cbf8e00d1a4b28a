"""How the package is built: imports go downward only, and some things are never used."""

from __future__ import annotations

import ast
import functools
import io
import re
import sys
import tokenize
from pathlib import Path

import pytest

import kapsi

ROOT = Path(kapsi.__file__).parent
# From the ground up: a module imports from those before it and from its own folder.
ORDER = [
    "errors",
    "arrays",
    "text",
    "clock",
    "html",
    "migrate",
    "version",
    "files",
    "installed",
    "frozen",
    "function",
    "notation",
    "derivatives",
    "hooks",
    "features",
    "weights",
    "contraction",
    "process",
    "expansion",
    "reconciliation",
    "initial",
    "remainder",
    "fusion",
    "spec",
    "modules",
    "calibrate",
    "hidden_layers",
    "standardize",
    "refine",
    "grids",
    "model_file",
    "explain",
    "listing",
    "testing",
    "data",
    "training",
    "zoo",
    "recipes",
    "export",
    "tables",
    "estimators",
    "interpret",
    "plots",
    "report",
    "paper",
    "public",
    "__init__",  # the public names: only the command line uses them
    "cli",
    "__main__",
]
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "breakpoint"}
FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "joblib"}
# `testing` checks that functions survive pickling; it is for developers, and reads no file from elsewhere with it.
PICKLES = {"testing"}

FILES = sorted(ROOT.rglob("*.py"))
EACH_FILE = pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])


tree_of = functools.cache(ast.parse)


def parsed(path: Path) -> ast.Module:
    return tree_of(path.read_text(encoding="utf-8"))


def layer(path: Path) -> str:
    """Return the module or folder right below the package that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(tree: ast.AST, path: Path) -> list[tuple[int, str]]:
    """Return (line, dotted name) of everything imported from the package, anywhere in a file, relative imports resolved."""
    found = []
    package = ("kapsi", *path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            # `from kapsi import data` names a module, `from kapsi import Head` the package itself.
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return [(line, name) for line, name in found if name.split(".")[0] == "kapsi"]


def violations(source: str, path: Path) -> list[str]:
    """Return what a file imports from above or beside itself."""
    own = layer(path)
    bad = []
    for line, name in imported(tree_of(source), path):
        # A name that is no module is one that the package itself offers.
        below = name.split(".")[1] if name.split(".")[1:2] and name.split(".")[1] in ORDER else "__init__"
        if below != own and ORDER.index(below) >= ORDER.index(own):
            bad.append(f"line {line}: {name}")
    return bad


@EACH_FILE
def test_imports_go_downward_only(path) -> None:
    assert layer(path) in ORDER, f"{layer(path)} has no place in the order of modules"
    assert not violations(path.read_text(encoding="utf-8"), path)


@pytest.mark.parametrize(
    "source",
    [
        "from kapsi.modules import Head",
        "import kapsi.training.engine",
        "def f():\n    from kapsi import spec",
        "from kapsi import Head",
        "import kapsi",
        "from ..modules import Head",
        "from .. import cli",
    ],
)
def test_an_upward_import_is_seen(source) -> None:
    assert violations(source, ROOT / "expansion" / "taylor.py")


@pytest.mark.parametrize(
    "source",
    [
        "from kapsi.features import DenseFeatures",
        "from kapsi.expansion.base import Expansion",
        "from .base import x",
        "import torch",
    ],
)
def test_a_downward_import_is_allowed(source) -> None:
    assert not violations(source, ROOT / "expansion" / "taylor.py")


def misuse(tree: ast.AST, own: str) -> list[str]:
    """Return what a module must not do."""
    bad = []
    for node in ast.walk(tree):
        place = f"line {getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Assert):
            bad.append(f"{place}: assert, which -O removes")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in FORBIDDEN_CALLS:
                bad.append(f"{place}: {node.func.id}()")
            if node.func.id == "print":
                bad.append(f"{place}: print()")
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        if own not in PICKLES:
            bad += [f"{place}: import {name}" for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if arguments.get("weights_only") != "True":
                bad.append(f"{place}: torch.load without weights_only=True")
    return bad


def rules_of_torch(tree: ast.AST) -> list[str]:
    """Return the forward derivatives and maps that are left to torch, which computes some second derivatives wrong."""
    return [
        f"line {node.lineno}: {node.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "jvp"
    ] + [
        f"line {node.lineno}: generate_vmap_rule"
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id == "generate_vmap_rule"
    ]


@EACH_FILE
def test_forward_derivatives_may_be_differentiated_again(path) -> None:
    """A function with a forward derivative of its own is one of `kapsi.derivatives`."""
    if layer(path) != "derivatives":
        assert not rules_of_torch(parsed(path))


@pytest.mark.parametrize(
    "source",
    [
        "class F(Function):\n    @staticmethod\n    def jvp(ctx, t): ...",
        "class F(Function):\n    generate_vmap_rule = True",
    ],
)
def test_a_rule_of_torch_is_seen(source) -> None:
    assert rules_of_torch(ast.parse(source))


@EACH_FILE
def test_nothing_dangerous_or_stray_is_used(path) -> None:
    assert not misuse(parsed(path), layer(path))


@pytest.mark.parametrize(
    "source",
    ["assert x", "print(1)", "eval('1')", "exec('1')", "import pickle", "from pickle import loads", "torch.load(f)"],
)
def test_misuse_is_seen(source) -> None:
    assert misuse(ast.parse(source), "modules")


@EACH_FILE
def test_every_module_says_what_it_is_and_what_it_offers(path) -> None:
    tree = parsed(path)
    assert ast.get_docstring(tree)
    if any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in tree.body):
        assert path.name in ("__init__.py", "public.py")  # offers what other files list
        return
    listed = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
    ]
    if not listed:
        return
    names = listed[0]
    assert names == sorted(set(names), key=names.index)
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            defined |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            defined.add(node.target.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {alias.asname or alias.name for alias in node.names}
    assert set(names) <= defined, "__all__ names what is not there"


def test_public_names_are_there_and_listed_once() -> None:
    assert len(set(kapsi.__all__)) == len(kapsi.__all__)
    for name in kapsi.__all__:
        assert getattr(kapsi, name) is not None


def test_every_registered_function_of_the_package_is_public() -> None:
    import kapsi.recipes
    from kapsi.function import catalogue

    activations = {"Activation"}  # by name in specifications, not as classes
    for cls in catalogue():
        # Classes of doctests have the module of their docstring, which does not contain them.
        own = cls.__module__.startswith("kapsi.") and hasattr(sys.modules[cls.__module__], cls.__name__)
        if own and cls.role == "recipe":
            assert cls.__name__ in kapsi.recipes.__all__
        elif own and not activations & {base.__name__ for base in cls.__mro__}:
            assert cls.__name__ in {*kapsi.__all__, *kapsi.expansion.__all__}
            assert getattr(kapsi, cls.__name__) is cls


# ------------------------------------------------------------------------------------------------ names of losses and solvers

OWN_FILES = ("training/losses/", "training/solvers/")
OTHER_MEANINGS = {
    "paper/overview.py": "mse: a metric of results",
    "paper/render.py": "mse: a metric of results",
    "migrate.py": "converts the plain data of kapsi 0.1",
    "zoo/bayesian_network/": "gaussian: kind of a network",
    "zoo/kernel_svm/": "hinge: scikit-learn's argument of a linear machine",
    "zoo/markov_network/": "gaussian: kind of a network",
    "zoo/naive_bayes/": "bernoulli: kind of a naive Bayes model",
}
"""Files in which the same word means something else."""


def compared_names(tree: ast.AST, names: set[str]) -> list[str]:
    """Return the comparisons of a file with the name of a loss or a solver."""
    found = []
    for node in ast.walk(tree):
        sides: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.match_case):
            sides = [node.pattern]
        words = {
            part.value
            for side in sides
            for part in ast.walk(side)
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        }
        found += [f"line {getattr(node, 'lineno', 0)}: {word}" for word in sorted(words & names)]
    return found


@EACH_FILE
def test_losses_and_solvers_are_not_told_apart_by_their_names(path) -> None:
    place = path.relative_to(ROOT).as_posix()
    if place.startswith((*OWN_FILES, *OTHER_MEANINGS)):
        return
    names = {cls.name for role in ("loss", "solver") for cls in kapsi.catalogue(role)}
    assert not compared_names(parsed(path), names), "use a property of the class"


@pytest.mark.parametrize("source", ["solver == 'adamw'", "loss.name in ('mse', 'huber')", "match x:\n case 'ridge': 1"])
def test_a_comparison_with_a_name_is_seen(source) -> None:
    assert compared_names(ast.parse(source), {"adamw", "mse", "ridge"})


# ------------------------------------------------------------------------------------------------ sizes, names and prose

LONGEST_FILE, LONGEST_BODY = 600, 60
PRONOUNS = {"what", "which", "that", "those", "one", "it", "its", "they", "them", "such"}
MOST_PRONOUNS = 25.0  # per 1,000 words of docstrings and comments; model code bases of the field have 15 to 20


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a body without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) and len(function.body) > 1 else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1


@EACH_FILE
def test_files_and_bodies_stay_readable(path) -> None:
    source = path.read_text(encoding="utf-8")
    assert source.count("\n") <= LONGEST_FILE
    functions = [n for n in ast.walk(tree_of(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {f"line {node.lineno}: {node.name}": body_lines(node) for node in functions}
    assert not {place: size for place, size in long.items() if size > LONGEST_BODY}


def test_a_class_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: found for name, found in places.items() if len(found) > 1}


def prose(source: str) -> list[str]:
    """Return the words of docstrings and comments in lower case."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree_of(source)) if isinstance(node, documented)]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts += [token.string for token in tokens if token.type == tokenize.COMMENT]
    return re.findall(r"[a-z']+", "\n".join(texts).lower())


def test_prose_names_things_instead_of_pointing_at_them() -> None:
    words = [word for path in FILES for word in prose(path.read_text(encoding="utf-8"))]
    assert 1000 * sum(word in PRONOUNS for word in words) / len(words) <= MOST_PRONOUNS
    assert 1000 * words.count("what") / len(words) <= 1.5


def test_pronouns_are_counted() -> None:
    source = '"""What it returns."""\nx = "what"  # the one that is kept\n'
    words = prose(source)
    assert words == ["what", "it", "returns", "the", "one", "that", "is", "kept"]
    assert sum(word in PRONOUNS for word in words) == 4


def test_errors_are_raised_at_boundaries() -> None:
    """At most 18 raises per 1,000 lines: validate where data and options enter, trust them inside."""
    sources = [path.read_text(encoding="utf-8") for path in FILES]
    raises = sum(isinstance(node, ast.Raise) for source in sources for node in ast.walk(tree_of(source)))
    assert 1000 * raises / sum(source.count("\n") for source in sources) <= 18
