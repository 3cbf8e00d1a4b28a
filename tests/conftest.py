"""What all tests share."""

from __future__ import annotations

import importlib
import math
import os
import sys
from contextlib import suppress
from pathlib import Path

# On processors of other makers the same product of MKL may differ in its last bit with the address of its memory, and bits that a
# loaded model should have are a matter of luck. This asks MKL for the same bits always; it counts only before MKL is loaded.
with suppress(OSError):
    if "GenuineIntel" not in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"):
        os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

import pytest
import torch
from hypothesis import HealthCheck, settings

# Reports of fits, half a second each, are written only by the tests of reports; also in other processes.
for command in ("FIT", "DEMO"):
    os.environ.setdefault(f"KAPSI_{command}_NO_REPORT", "1")

# The machine's cores are for the workers of pytest-xdist; sums in another order would also make equal bits a matter of luck.
torch.set_num_threads(1)

# The same examples everywhere, so that what passes on one machine passes on the next; --hypothesis-profile=new draws new ones.
# However busy the machine is, none of them takes too long.
same = settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", same)
settings.register_profile("new", same, derandomize=False)
settings.load_profile("same")


@pytest.fixture(autouse=True)
def quick_heads(request, monkeypatch):
    """Let `auto` choose from the quickest heads, except in tests marked `all_heads`: most tests are about something else."""
    if "all_heads" in request.keywords:
        return
    from kapsi.recipes import auto, conformal

    kinds = [kind for kind in auto.offered_kinds() if kind.name in ("constant", "linear", "additive")]
    monkeypatch.setattr(auto, "offered_kinds", lambda: kinds)
    if "intervals" not in request.node.path.name:
        # Half a second of each fit of numbers: the width of intervals is a constant elsewhere.
        monkeypatch.setattr(conformal, "LEAST_ROWS", math.inf)


@pytest.fixture
def benchmark_module(monkeypatch):
    """Return a function that imports a module of `benchmarks` as Python does when it is run; nothing of it stays."""
    folder = Path(__file__).parents[1] / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]


@pytest.fixture
def kapsi(capsys):
    """Run the command line; return its exit code, output and error output."""
    from kapsi.cli import main

    def run(*words):
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run
