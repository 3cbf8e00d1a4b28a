"""Training that is killed again and again: 20 times SIGKILL at random moments, mini-batches and Levenberg–Marquardt.

A run that nobody disturbs is made first. Then the same command is started, killed after a random time, and started again with
`resume`, until it has been killed 20 times and comes to its end; in the end the model files are compared byte by byte. After
each kill all files are looked at: each checkpoint must be whole.

Run: python benchmarks/interruptions.py
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from measure import Report, Table, Target, options, progress

import kapsi as kp
from kapsi.training.checkpoint import NAME, _read

KILLS = 20


def child(solver: str, folder: str, out: str) -> None:
    """Train, from the last checkpoint if there is one."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4_000, 4, generator=generator, dtype=torch.float64)
    y = (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:3]
    spec = kp.rpn([4, 8, 1], kp.Taylor(2), kp.LowRank(2), kp.LinearRemainder(), output="tanh")
    model = kp.Model(spec, seed=0, dtype=torch.float64)
    several = {
        "adamw": kp.TrainConfig(
            loss=kp.MSE(), solver=kp.AdamW(batch_size=64, ema_decay=0.99), epochs=40, patience=10**6
        ),
        "levenberg_marquardt": kp.TrainConfig(
            loss=kp.MSE(), solver=kp.LevenbergMarquardt(tolerance=0.0), epochs=400, patience=10**6
        ),
    }
    print("begins", flush=True)
    kp.fit(model, (x, y), several[solver], validation=0.2, checkpoints=kp.Checkpoints(folder, steps=3, resume=True))
    kp.save(model, out)


def start(solver: str, folder: Path, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--child", solver, str(folder), str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if process.stdout is None or process.stdout.readline() != b"begins\n":
        raise RuntimeError("the training did not begin")
    return process


def damaged(folder: Path) -> int:
    """Return how many checkpoints are not whole."""
    return sum(_read(path)[0] is None for path in folder.glob("*.safetensors") if NAME.fullmatch(path.name))


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "--child":
        parser = argparse.ArgumentParser()
        parser.add_argument("--child", nargs=3)
        child(*parser.parse_args().child)
        return
    chosen = options(__doc__ or "", rounds=1)
    report = Report("interruptions", chosen)
    kills = 3 if chosen.quick else KILLS
    table = Table("", ["solver", "seconds undisturbed", "kills", "damaged files", "bits"])
    for solver in ("adamw", "levenberg_marquardt"):
        with tempfile.TemporaryDirectory() as place:
            base = Path(place)
            progress(f"interruptions: {solver}, undisturbed")
            process = start(solver, base / "whole", base / "reference.safetensors")
            begun = time.perf_counter()
            process.wait()
            took = time.perf_counter() - begun
            # Late enough for some steps, early enough not to come to the end before the last kill: half of the time in all.
            moments = random.Random(0)
            killed = broken = 0
            while killed < kills:
                progress(f"interruptions: {solver}, {killed} kills")
                process = start(solver, base / "kills", base / "out.safetensors")
                time.sleep(moments.uniform(0.0, took / kills))
                if process.poll() is not None:
                    break
                process.send_signal(signal.SIGKILL)
                process.wait()
                killed += 1
                broken += damaged(base / "kills")
            process = start(solver, base / "kills", base / "out.safetensors")
            process.wait()
            equal = (base / "out.safetensors").read_bytes() == (base / "reference.safetensors").read_bytes()
            report.figures.append(
                {"solver": solver, "seconds": took, "kills": killed, "damaged": broken, "equal": float(equal)}
            )
            table.rows.append([solver, f"{took:.1f}", str(killed), str(broken), "equal" if equal else "other"])
            report.targets.append(
                Target(f"kills survived with equal bits, {solver}", kills, killed * equal * (not broken))
            )
    report.tables.append(table)
    report.finish()


if __name__ == "__main__":
    main()
