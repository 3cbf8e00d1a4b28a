"""What `import kapsi` loads, and that each module can be the first one."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import kapsi

HEAVY = [
    "sklearn",
    "yaml",
    "pyarrow",
    "rich",
    "typer",
    "lightning",
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
        "import sys, torch; before = set(sys.modules); import kapsi; "
        f"print(sorted(name for name in {HEAVY} if name in sys.modules and name not in before))"
    )
    assert loaded.strip() == "[]"


def test_import_says_nothing() -> None:
    command = [sys.executable, "-W", "error", "-c", "import kapsi"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# One process for each would take seconds for each: they are forked from one that has torch.
def test_each_module_can_be_imported_first() -> None:
    assert len(MODULES) > 15
    code = f"""
import os, sys, torch, traceback
for name in {MODULES}:
    child = os.fork()
    if child == 0:
        try:
            __import__(name)
        except BaseException:
            print(name, traceback.format_exc())
            sys.stdout.flush()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit(name)
"""
    run(code)


def test_a_reloaded_module_registers_its_functions_again() -> None:
    # As a notebook does, or a cell that is run twice.
    run(
        "import importlib, kapsi, kapsi.expansion.taylor as t; old = t.Taylor; importlib.reload(t)\n"
        "found = kapsi.function.lookup('expansion', 'taylor'); assert found is t.Taylor is not old"
    )
