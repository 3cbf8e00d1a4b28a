"""Calls in processes of their own, forked from one that has loaded torch, which takes seconds to load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

BEGIN = """
import json, os, runpy, sys, traceback
import kapsi as kp

def main(*arguments):
    import kapsi.cli
    return kapsi.cli.main(list(arguments))

def script(path, *arguments):
    sys.argv[:], sys.path[0] = [path, *arguments], os.path.dirname(path)
    runpy.run_path(path, run_name="__main__")
"""

EACH = """
import torch, typer
for i, call in enumerate(json.load(sys.stdin)):
    child = os.fork()
    if child == 0:
        for name, number in (("out", 1), ("err", 2)):
            os.dup2(os.open(f"{sys.argv[1]}/{i}.{name}", os.O_CREAT | os.O_WRONLY), number)
        code = 1
        try:
            code = eval(call) or 0
        except SystemExit as ended:
            code = ended.code or 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def each(folder: Path, *calls: str, env: dict[str, str]) -> list[subprocess.CompletedProcess[str]]:
    """Return what each call leads to: of `main`, the command line; of `script`, a file that is run; or of kapsi, `kp`.

    Where there is no fork each has a process that is started for it.

    Args:
        folder: where the output goes, made here.
        calls: Python expressions.
        env: the environment.
    """
    options = {"env": env, "text": True, "check": False, "encoding": "utf-8"}
    if not hasattr(os, "fork"):
        commands = [[sys.executable, "-c", f"{BEGIN}\nsys.exit({call})"] for call in calls]
        return [subprocess.run(command, capture_output=True, **options) for command in commands]
    folder.mkdir()
    command = [sys.executable, "-c", BEGIN + EACH, folder]
    done = subprocess.run(command, input=json.dumps(calls), capture_output=True, **options)
    assert (done.returncode, done.stderr) == (0, "")
    said = [
        [(folder / f"{i}.{name}").read_text(encoding="utf-8") for name in ("out", "err")] for i in range(len(calls))
    ]
    codes = [int(code) for code in done.stdout.split()]
    return [
        subprocess.CompletedProcess(call, *rest)
        for call, *rest in zip(calls, codes, *zip(*said, strict=True), strict=True)
    ]
