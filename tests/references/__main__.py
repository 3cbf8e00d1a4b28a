"""List every function with its reference and the largest deviation seen: `make references`."""

from __future__ import annotations

import sys

from kapsi.function import LAYER_ROLES, catalogue
from kapsi.testing import examples_of
from references import REFERENCES
from references.compare import cases, deviation

LIMIT = 1e-10


def main() -> int:
    """Print the table; return how many functions deviate by more than the limit."""
    rows, above = [("role", "function", "compared", "deviation", "reference")], 0
    for cls in (cls for role in LAYER_ROLES for cls in catalogue(role)):
        seen = [deviation(case) for function in examples_of(cls) for case in cases(function)]
        largest = max(seen)
        above += not largest <= LIMIT
        mark = "" if largest <= LIMIT else f"  ABOVE {LIMIT}"
        rows.append(
            (cls.role, cls.name, str(len(seen)), f"{largest:.1e}", REFERENCES[cls.role][cls.name].source + mark)
        )
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
        sys.stdout.write("  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]) + "\n")
    sys.stdout.write(
        f"{len(rows) - 1} functions, {above} above {LIMIT} (relative where the value is above 1, float64)\n"
    )
    return above


if __name__ == "__main__":
    sys.exit(min(main(), 1))
