"""Draw overview.svg: test MSE of kapsi against the best RPN of the paper, one point per function, from the tables of results/."""

import re
from pathlib import Path

from matplotlib import pyplot as plt

ROOT = Path(__file__).parent.parent
GROUPS = (("elementary", "o", "#1b7f79"), ("composite", "s", "#c2571a"), ("feynman", "^", "#4059ad"))


def points(name: str) -> list[tuple[float, float]]:
    """Return (best RPN of the paper, kapsi) for each row that has both."""
    table = [
        line.strip("|").split("|")
        for line in (ROOT / f"results/{name}.md").read_text("utf-8").splitlines()
        if line.startswith("|")
    ]
    heads = [cell.strip() for cell in table[0]]
    paper = [i for i, head in enumerate(heads) if head.startswith("RPN") and head.endswith("paper")]
    own = next(i for i, head in enumerate(heads) if head.startswith("kapsi"))
    pairs = []
    for cells in table[2:]:
        values = [float(m[0]) if (m := re.match(r"[-+.\de]+", cells[i].strip())) else None for i in (own, *paper)]
        known = [value for value in values[1:] if value is not None]
        if values[0] is not None and known:
            pairs.append((min(known), values[0]))
    return pairs


def draw(target: Path) -> None:
    """Write the picture."""
    plt.switch_backend("svg")
    plt.rcParams["svg.hashsalt"] = "kapsi"  # the same file on each run
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for name, marker, color in GROUPS:
        x, y = zip(*points(name), strict=True)
        axes.scatter(x, y, 26, color=color, marker=marker, alpha=0.8, label=f"{name} ({len(x)})")
    low, high = 1e-10, 1e2
    for factor, text in ((1, "equal"), (1e-2, "100× lower")):
        axes.plot([low, high], [low * factor, high * factor], color="0.4", lw=0.8, ls="-" if factor == 1 else ":")
        axes.annotate(text, (2e-10, 2e-10 * factor), fontsize=8, color="0.3", va="bottom")
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(low, high),
        ylim=(1e-34, 1e3),
        xlabel="test MSE, best RPN of the paper",
        ylabel="test MSE, kapsi",
    )
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(__file__).with_name("overview.svg"))
