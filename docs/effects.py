"""Draw effects.svg: effects of an additive regression on Friedman's function, beside its true components."""

from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt

import kapsi as kp


def friedman(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs, (rows, 10), and targets of Friedman's first function with noise of deviation 1."""
    rng = np.random.default_rng(seed)
    x = rng.random((rows, 10))
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    return x, y + rng.normal(size=rows)


def draw(target: Path) -> None:
    """Write the picture."""
    plt.switch_backend("svg")
    plt.rcParams["svg.hashsalt"] = "kapsi"  # the same file on each run
    x, y = friedman(1000, 0)
    regressor = kp.RPNRegressor(heads=["pairs"]).fit(x, y)
    effects = kp.interpret.effects(regressor, x)
    (pair,) = kp.interpret.interactions(regressor, x, most=1)
    figure, axes = plt.subplots(1, 4, figsize=(11, 2.6), layout="constrained")
    t = np.linspace(1e-3, 1, 200)
    product = 10 * (1 - np.cos(np.pi * t)) / (np.pi * t)  # the mean of 10 sin(π t u) over u in (0, 1)
    for ax, name, true in zip(axes, ("x0", "x2", "x3"), (product, 20 * (t - 0.5) ** 2, 10 * t), strict=False):
        kp.plots.effect(effects[name], ax=ax)
        ax.plot(t, true - true.mean(), "--", color="0.25", linewidth=1, label="true component")
        ax.set(ylim=(-7, 7), ylabel="")
        ax.legend(loc="upper center")
    kp.plots.pair_effect(pair, ax=axes[3])
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(__file__).with_name("effects.svg"))
