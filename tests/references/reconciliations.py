"""References of parameter reconciliations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy import ndarray
from scipy.linalg import khatri_rao

from references.base import Reference, Table


def masked(f: Any, w: Any, n: int, grid: tuple[int, int]) -> ndarray:
    matrix = np.zeros((n, math.prod(grid)))
    matrix[w["mask"]] = w["entries"]
    return matrix


def _near_root(n: int) -> int:
    return max(i for i in range(1, n + 1) if n % i == 0 and i * i <= n)


def _sizes(f: Any, n: int, q: int, t: int) -> tuple[int, int, int, int]:
    p, width = f.rows or _near_root(n), f.columns or q
    return p, width, n // p, q * t // width


def _terms(product: Callable[[Any, Any], ndarray]) -> Callable[..., ndarray]:
    """Return the sum of products, each of a slice of the tensors where there are several terms."""

    def total(f: Any, w: Any, n: int, grid: tuple[int, int]) -> ndarray:
        if f.terms == 1:
            return product(f, w)
        return sum(product(f, {name: value[k] for name, value in w.items()}) for k in range(f.terms))

    return total


def duplicated(f: Any, w: Any, n: int, grid: tuple[int, int]) -> ndarray:
    if f.ratio != 1:
        return np.kron(w["pattern"].astype(float), w["block"])
    return np.tile(w["block"], (n // w["block"].shape[0], math.prod(grid) // w["block"].shape[1]))


def splitmix64(seed: int, count: int) -> list[int]:
    """Return the first outputs of the generator as its authors wrote it, a word after the other in Python's integers."""
    outputs, state = [], seed % 2**64
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        outputs.append(z ^ (z >> 31))
    return outputs


def hypernet(f: Any, w: Any, n: int, grid: tuple[int, int], channel: int = 0) -> ndarray:
    hidden = w["vector"] if f.hidden is None else np.maximum(0, w["layer"] @ w["vector"])
    if f.trained:
        return np.einsum("ndk,k->nd", w["output"], hidden)
    width = n * len(hidden)
    words = -(-width // 64)
    place = f.seed * 0x9E3779B97F4A7C15 + channel * 0xD1342543DE82EF95 + 0x2545F4914F6CDD1D
    (seed,) = splitmix64(place - 0x9E3779B97F4A7C15, 1)
    text = [f"{word:064b}"[::-1] for word in splitmix64(seed, math.prod(grid) * words)]
    rows = ["".join(text[d * words : (d + 1) * words])[:width] for d in range(math.prod(grid))]
    signs = np.array([[1.0 if bit == "1" else -1.0 for bit in row] for row in rows])
    return (signs.reshape(-1, n, len(hidden)) @ hidden).T


def _duplicated(f: Any, n: int, q: int, t: int) -> int:
    p, width, _, _ = _sizes(f, n, q, t)
    return n * q * t // (p * width)


def _low_rank_kronecker(f: Any, n: int, q: int, t: int) -> int:
    p, width, s, other = _sizes(f, n, q, t)
    return f.terms * (p * width + f.rank * (s + other))


def _dual(f: Any, n: int, q: int, t: int) -> int:
    return f.terms * f.rank * sum(_sizes(f, n, q, t))


def _kronecker(f: Any, n: int, q: int, t: int) -> int:
    p, width, s, other = _sizes(f, n, q, t)
    return f.terms * (p * width + s * other)


def _hypernet(f: Any, n: int, q: int, t: int) -> int:
    units = f.hidden or f.length
    layers = (f.length * units if f.hidden else 0) + n * q * t * units
    return f.length + (layers if f.trained else 0)


RECONCILIATIONS: Table = {
    "dense": Reference("the matrix", lambda f, w, n, grid: w["matrix"], lambda f, n, q, t: n * q * t),
    "masked": Reference("numpy boolean indexing", masked, lambda f, n, q, t: round(f.ratio * n * q * t)),
    "drop_connect": Reference("the matrix", lambda f, w, n, grid: w["matrix"], lambda f, n, q, t: n * q * t),
    "constant": Reference(
        "numpy.full", lambda f, w, n, grid: np.full((n, math.prod(grid)), f.value), lambda f, n, q, t: 0
    ),
    "low_rank": Reference(
        "numpy.matmul", lambda f, w, n, grid: w["left"] @ w["right"], lambda f, n, q, t: f.rank * (n + q * t)
    ),
    "zero": Reference("numpy.zeros", lambda f, w, n, grid: np.zeros((n, math.prod(grid))), lambda f, n, q, t: 0),
    "one": Reference("numpy.ones", lambda f, w, n, grid: np.ones((n, math.prod(grid))), lambda f, n, q, t: 0),
    "eye": Reference(
        "numpy.eye, numpy.repeat",
        lambda f, w, n, grid: np.repeat(np.eye(n), math.prod(grid) // n, axis=1),
        lambda f, n, q, t: 0,
    ),
    "kronecker": Reference("numpy.kron", _terms(lambda f, w: np.kron(w["left"], w["right"])), _kronecker),
    "low_rank_kronecker": Reference(
        "numpy.kron",
        _terms(lambda f, w: np.kron(w["left"], w["right_rows"] @ w["right_columns"])),
        _low_rank_kronecker,
    ),
    "duplicated": Reference("numpy.tile, numpy.kron", duplicated, _duplicated),
    "khatri_rao": Reference(
        "scipy.linalg.khatri_rao",
        lambda f, w, n, grid: w["left"] @ khatri_rao(w["first"].T, w["second"].T).T,
        lambda f, n, q, t: f.rank * (n + q + t),
    ),
    "random_adaption": Reference(
        "numpy.diag, numpy.matmul",
        lambda f, w, n, grid: np.diag(w["outputs"]) @ w["left"] @ np.diag(w["ranks"]) @ w["right"],
        lambda f, n, q, t: n + f.rank,
    ),
    "hypernet": Reference("splitmix64 in Python integers, numpy.matmul", hypernet, _hypernet),
    "dual_low_rank_kronecker": Reference(
        "numpy.kron",
        _terms(lambda f, w: np.kron(w["left_rows"] @ w["left_columns"], w["right_rows"] @ w["right_columns"])),
        _dual,
    ),
}
