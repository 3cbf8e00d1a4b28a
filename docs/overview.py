"""Draw overview.svg: test MSE of kapsi against the best RPN of the paper, one point per function, from the tables of results/."""

import math
import re
from pathlib import Path

from matplotlib import pyplot as plt

ROOT = Path(__file__).parent.parent
GROUPS = (("elementary", "o", "#1b7f79"), ("composite", "s", "#c2571a"), ("feynman", "^", "#4059ad"))


def points(name: str) -> list[tuple[float, float, bool]]:
    """Return (best RPN of the paper, kapsi, whether the function has a pole) for each row that has both scores.

    The table compares functions with a pole with the paper's recipe on the same rows instead of the paper's number.
    """
    table = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / f"results/{name}.md").read_text("utf-8").splitlines()
        if line.startswith("|")
    ]
    heads = table[0]
    paper = [i for i, head in enumerate(heads) if head.startswith("RPN") and head.endswith("paper")]
    own = next(i for i, head in enumerate(heads) if head.startswith("kapsi"))
    recipe = next((i for i, head in enumerate(heads) if head.startswith("the paper's recipe")), None)
    found = []
    for cells in table[2:]:
        values = [float(m[0]) if (m := re.match(r"[-+.\de]+", cells[i])) else None for i in (own, *paper)]
        known = [value for value in values[1:] if value is not None]
        if values[0] is not None and known:
            found.append((min(known), values[0], recipe is not None and bool(cells[recipe])))
    return found


def draw(target: Path) -> None:
    """Write the picture; the axes contain all points."""
    plt.switch_backend("svg")
    plt.rcParams["svg.hashsalt"] = "kapsi"  # the same file on each run
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    drawn = {name: points(name) for name, _, _ in GROUPS}
    for name, marker, color in GROUPS:
        for pole in (False, True):
            some = [(x, y) for x, y, has_pole in drawn[name] if has_pole is pole]
            if some:
                label = f"{name} ({len(drawn[name])})" if not pole else None
                face = "none" if pole else color
                axes.scatter(*zip(*some, strict=True), 26, fc=face, ec=color, marker=marker, alpha=0.8, label=label)
    axes.scatter([], [], 26, fc="none", ec="0.4", marker="s", label="pole in or at the edge of the range")
    both = [point for some in drawn.values() for point in some]
    low = 10 ** (math.floor(math.log10(min(x for x, _, _ in both))) - 1)
    high = 10 ** (math.ceil(math.log10(max(x for x, _, _ in both))) + 1)
    bottom = 10 ** (math.floor(math.log10(min(y for _, y, _ in both))) - 1)
    for factor, text in ((1, "equal"), (1e-2, "100× lower")):
        axes.plot([low, high], [low * factor, high * factor], color="0.4", lw=0.8, ls="-" if factor == 1 else ":")
        axes.annotate(text, (2 * low, 2 * low * factor), fontsize=8, color="0.3", va="bottom")
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(low, high),
        ylim=(bottom, max(high, 10 * max(y for _, y, _ in both))),
        xlabel="test MSE, best RPN of the paper (best epoch on test)",
        ylabel="test MSE, kapsi (selected on validation)",
    )
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(__file__).with_name("overview.svg"))
