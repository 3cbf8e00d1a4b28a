"""A step on text: 26,965 columns of which a row has 85 that are not zero, batch 64; sparse CSR against dense.

- Identity with a low-rank ψ of rank 2, 16 and 64, 64 outputs, against two dense products with the same values. The data are
  CSR (dense, the 25,000 texts of the IMDB reviews would be 2.7 GB), so a dense step has to make its 64 rows dense first: both
  figures are shown, with that and without.
- Taylor of degree 2 with a Khatri–Rao ψ of rank 64: 727 million columns, for which there is nothing dense to compare with.

Without `--imdb` the columns are drawn by Zipf's law and the lengths of rows from a log-normal distribution, with the mean (85),
median (66) and range (3 to 502) of TF-IDF of the IMDB reviews, sublinear, of words in 5 texts or more and at most half of all.
Run: python benchmarks/sparse_text.py [--imdb train.parquet]
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import MB, Report, Step, Table, Target, interleaved, memory, number, options, progress
from torch import Tensor, nn
from torch.nn import functional as F

import kapsi as kp

COLUMNS = 26_965
BATCH = 64
OUTPUTS = 64
RANKS = (2, 16, 64)
MEAN, MEDIAN, LEAST, MOST = 85, 66, 3, 502
"""Columns of a row of IMDB TF-IDF that are not zero."""

# Sparse CSR is a beta of torch's, which says so once.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")


def synthetic(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Return rows like TF-IDF of text, sparse CSR: columns by Zipf's law, each at most once, and rows of norm one."""
    generator = torch.Generator().manual_seed(seed)
    deviation = math.sqrt(2 * math.log(MEAN / MEDIAN))
    lengths = torch.randn(rows, generator=generator).mul(deviation).exp().mul(MEDIAN).round().long().clamp(LEAST, MOST)
    # The most frequent words of the reviews are in half of the texts, not in all: Mandelbrot's form of the law.
    logits = -(torch.arange(columns) + 20.0).log()
    noise = -torch.rand(rows, columns, generator=generator).clamp_min(1e-30).log().clamp_min(1e-30).log()
    order = (logits + noise).argsort(
        descending=True
    )  # drawn without putting back: the largest of logits with Gumbel noise
    chosen = [order[i, :n].sort().values for i, n in enumerate(lengths.tolist())]
    values = [F.normalize(torch.rand(len(each), generator=generator) + 0.5, dim=0) for each in chosen]
    starts = F.pad(lengths.cumsum(0), (1, 0))
    return torch.sparse_csr_tensor(starts, torch.cat(chosen), torch.cat(values), (rows, columns), check_invariants=True)


def imdb(path: Path, rows: int) -> Tensor:
    """Return TF-IDF of the first texts of a Parquet file with a column `text`, sparse CSR."""
    import pyarrow.parquet as parquet
    from sklearn.feature_extraction.text import TfidfVectorizer

    texts = parquet.read_table(path, columns=["text"])["text"].to_pylist()
    kind = TfidfVectorizer(sublinear_tf=True, max_df=0.5, min_df=5, stop_words="english", max_features=COLUMNS)
    made = kind.fit(texts).transform(texts[:rows]).sorted_indices()
    parts = (
        torch.as_tensor(made.indptr).long(),
        torch.as_tensor(made.indices).long(),
        torch.as_tensor(made.data).float(),
    )
    return torch.sparse_csr_tensor(*parts, made.shape, check_invariants=True)


def size(x: Tensor) -> int:
    """Return the bytes of a batch, sparse or dense."""
    parts = (x.crow_indices(), x.col_indices(), x.values()) if x.layout == torch.sparse_csr else (x,)
    return sum(part.numel() * part.element_size() for part in parts)


class Dense(nn.Module):
    """Two dense products, with the values of a head."""

    def __init__(self, head: kp.Head) -> None:
        super().__init__()
        self.left = nn.Parameter(head.psi["left"].detach().clone().contiguous())
        self.right = nn.Parameter(head.psi["right"].detach().clone().contiguous())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.right), self.left)


def step(module: nn.Module, batch: Callable[[], Tensor]) -> Step:
    return Step(lambda: module(batch()).square().mean(), module.parameters())


def ranks(report: Report, x: Tensor) -> None:
    """Compare the sparse step with the dense ones."""
    table = Table(
        "Identity × low rank: forward + backward in ms; memory of a step beyond parameters and gradients, and peak of its "
        "allocations with gradients, in MB.",
        ["rank", "way", "ms", "times", "beyond", "times", "peak"],
    )
    full = x.to_dense()
    for rank in RANKS[:: 2 if report.chosen.quick else 1]:
        progress(f"sparse_text: rank {rank}")
        head = kp.Head(x.shape[1], OUTPUTS, kp.HeadSpec(reconciliation=kp.LowRank(rank)), seed=0)
        dense = Dense(head)
        with torch.no_grad():
            torch.testing.assert_close(head(x), dense(full))
        steps = {
            "sparse": step(head, lambda: x),
            "dense, made from CSR": step(dense, x.to_dense),
            "dense, ready": step(dense, lambda: full),
        }
        held = {way: size(full if way == "dense, ready" else x) for way in steps}
        used = {way: memory(each) for way, each in steps.items()}
        beyond = {way: held[way] + used[way].beyond for way in steps}
        times = interleaved(steps, report.chosen.rounds)
        for way in steps:
            row: dict[str, Any] = {
                "rank": rank,
                "way": way,
                "ms": times.milliseconds(way),
                "times": times.ratio(way, "sparse"),
                "beyond MB": beyond[way] / MB,
                "beyond times": beyond[way] / beyond["sparse"],
                "peak MB": used[way].peak / MB,
            }
            report.figures.append(row)
            table.rows.append([str(rank), way, *(number(value) for value in row.values() if isinstance(value, float))])
            if rank == RANKS[-1] and way == "dense, made from CSR":
                case = f"sparse step against dense (made from CSR), rank {rank}"
                report.targets.append(Target(f"{case}: time", 5, row["times"]))
                report.targets.append(
                    Target(f"{case}: memory beyond parameters and gradients", 20, row["beyond times"])
                )
    report.tables.append(table)


def second_order(report: Report, x: Tensor) -> None:
    """Measure Taylor of degree 2 on all columns."""
    progress("sparse_text: Taylor")
    head = kp.Head(x.shape[1], OUTPUTS, kp.HeadSpec(kp.Taylor(2), kp.KhatriRao(RANKS[-1])), seed=0)
    one = step(head, lambda: x)
    used = memory(one)
    times = interleaved({"sparse": one}, report.chosen.rounds)
    columns = head.factors[0] * head.factors[1]
    row: dict[str, Any] = {
        "columns": columns,
        "parameters": sum(p.numel() for p in head.parameters()),
        "dense GB": BATCH * columns * 4 / 1e9,
        "ms": times.milliseconds("sparse"),
        "beyond MB": (size(x) + used.beyond) / MB,
        "peak MB": used.peak / MB,
    }
    report.figures.append(row)
    cells = [
        f"{row['columns']:,}",
        f"{row['parameters']:,}",
        *(number(v) for v in row.values() if isinstance(v, float)),
    ]
    header = ["columns of κ", "parameters", "κ of a batch, dense, in GB", "ms", "beyond", "peak"]
    report.tables.append(Table(f"Taylor 2 × Khatri–Rao {RANKS[-1]} on the same rows.", header, [cells]))


def main() -> None:
    chosen = options(__doc__ or "", rounds=40, imdb={"type": Path, "help": "a Parquet file with a column of texts"})
    report = Report("sparse_text", chosen)
    progress("sparse_text: data")
    x = imdb(chosen.imdb, BATCH) if chosen.imdb else synthetic(BATCH, COLUMNS)
    kind = "TF-IDF of the texts given" if chosen.imdb else "synthetic rows"
    filled = x.values().numel() / BATCH
    report.notes.append(f"{BATCH} rows of {x.shape[1]:,} columns, {kind}, {number(filled)} nonzero per row.")
    ranks(report, x)
    second_order(report, x)
    report.finish()


if __name__ == "__main__":
    main()
