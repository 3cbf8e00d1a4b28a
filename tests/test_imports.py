"""What `import kapsi` loads, and that each module can be the first one."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys

import pytest

import kapsi

HEAVY = [
    "sklearn",
    "yaml",
    "pyarrow",
    "rich",
    "typer",
    "scipy",
    "pandas",
    "matplotlib",
    "torch._dynamo",
    "sympy",
]
MODULES = [
    module.name for module in pkgutil.walk_packages(kapsi.__path__, "kapsi.") if not module.name.endswith("__main__")
]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_nothing_heavy_beside_torch() -> None:
    loaded = run(
        "import sys, torch; before = set(sys.modules); import kapsi.public; "
        f"print(sorted(name for name in {HEAVY} if name in sys.modules and name not in before))"
    )
    assert loaded.strip() == "[]"


def test_import_says_nothing() -> None:
    command = [sys.executable, "-W", "error", "-c", "import kapsi.public"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# `import kapsi` loads nothing, so each module may be the first. Each has a process of its own, forked from one that has loaded
# the libraries.
@pytest.mark.slow
def test_each_module_can_be_imported_first() -> None:
    names = MODULES
    assert len(names) > 15
    if not hasattr(os, "fork"):
        for name in names:
            run(f"import {name}")
        return
    code = f"""
import os, sys, traceback
import torch, sklearn.linear_model, sklearn.metrics, pyarrow.parquet, rich.table, typer, yaml, sympy  # once, and not in each child
assert not any(name.split(".")[0] == "kapsi" for name in sys.modules)
for name in {names}:
    print(name, flush=True)
    child = os.fork()
    if child == 0:
        try:
            __import__(name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit(name)
"""
    assert len(run(code).splitlines()) > 15


def test_a_reloaded_module_registers_its_functions_again() -> None:
    # As a notebook does, or a cell that is run twice.
    run(
        "import importlib, kapsi, kapsi.expansion.taylor as t; old = t.Taylor; importlib.reload(t)\n"
        "found = kapsi.function.lookup('expansion', 'taylor'); assert found is t.Taylor is not old"
    )
