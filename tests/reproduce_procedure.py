"""A procedure for tests: as fast as wanted, with every way to go wrong."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path

import numpy as np
import torch

from kapsi.errors import DataSetError, SpecError, TableError
from kapsi.paper.experiment import Outcome, Run


def read_options(run: Run) -> None:
    if run.row in run.options.get("unfit", []):
        raise SpecError(f"{run.experiment}, {run.row}, {run.method}: options.width: expected a number")


def run(run: Run) -> Outcome:
    options = run.options
    if "log" in options:
        with open(options["log"], "a", encoding="utf-8") as log:
            log.write(f"{run.row} {run.method} {run.seed}\n")
    if run.row in options.get("missing", []):
        raise DataSetError("data set 'nowhere' is not there; give --folder")
    if run.row in options.get("unreadable", []):
        raise TableError("no words are left")
    if run.row in options.get("wrong", []):
        raise SpecError("options.width: expected a number")
    if run.row in options.get("broken", []):
        raise RuntimeError("a mistake")
    if run.row in options.get("killed", []):
        os.kill(os.getpid(), signal.SIGKILL)
    if run.row in options.get("slow", []):
        Path(options["begun"]).touch()
        time.sleep(60)
    if "sleep" in options:
        time.sleep(options["sleep"])
    if run.row in options.get("infinite", []):
        return Outcome(math.inf, math.nan, 3, extra={"loss": math.nan}, curves={"test": [1.0, math.inf]})
    if run.row in options.get("strange", []):
        return Outcome(1.0, extra={"x": lambda: None})
    # Something whose last bits depend on threads and order.
    generator = torch.Generator().manual_seed(run.seed)
    x = torch.randn(300, 300, generator=generator)
    score = float((x @ x).square().mean()) * options.get("scale", 1.0)
    extra = {"threads": torch.get_num_threads(), "number": np.float64(0.5), "array": np.arange(2)}
    if run.protocol == "paper":
        extra["best_epoch_on_test"] = score / 2
    iterations = options.get("iterations", 3)
    curves = {name: [1.0 / (i + 1) for i in range(iterations)] for name in ("train", "test")}
    return Outcome(score, score * 1.1, 7, extra=extra, curves={"iteration": list(range(iterations)), **curves})
