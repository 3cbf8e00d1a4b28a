"""Kernels against centers, and approximations of kernels by inner products."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from kapsi.errors import SpecError
from kapsi.expansion.base import Expansion
from kapsi.expansion.numerics import exp_neg, working_precision
from kapsi.expansion.taylor import monomials
from kapsi.features import DenseFeatures, Features, ProductFeatures
from kapsi.function import MAX_EXPANSION, Param, Params, Tensors, option

__all__ = ["KernelMap", "Nystrom", "PolynomialMap", "RandomFourier"]

Kernel: TypeAlias = Literal["rbf", "linear", "polynomial", "sigmoid"]

MAX_POWER = 1e30
"""Limit of a polynomial kernel, linear from there, as float32 ends at 3.4e38 and slopes exceed values."""

BLOCK_DISTANCES = 2**22
"""Elements of the largest array in the search for centers: 32 MiB in float64."""

LLOYD_STEPS = 10
"""Steps of k-means; later steps change little."""


@dataclass(frozen=True)
class KernelMap(Expansion, name="kernel_map"):
    """A kernel against centers: κ(x) = [k(x, c₁), …, k(x, c_G)], D = G.

    With m inputs in x, `rbf` is exp(−γ‖x − c‖²), `linear` ⟨x, c⟩, `polynomial` (γ⟨x, c⟩ + c₀)^d and `sigmoid` tanh(γ⟨x, c⟩
    + c₀). With a dense ψ the head is the decision function of a kernel machine.

    Centers are a buffer `centers` `(G, m)`, initially standard normal; γ is a buffer `log_gamma` (all kernels but
    `linear`). `kapsi.calibrate` places the centers in the data (k-means); or set them with `head.assign("expansion",
    centers=…)`. From a value of 10³⁰ a polynomial continues linearly in γ⟨x, c⟩ + c₀.

    Args:
        kernel: `rbf`, `linear`, `polynomial` or `sigmoid`.
        centers: G, 1 to 100,000.
        gamma: γ, 10⁻¹² to 10⁶; None: 1/m, and 1/(m · variance of the data) after `kapsi.calibrate`, as scikit-learn's
            `auto` and `scale`.
        degree: d of the polynomial, 1 to 32.
        coef0: c₀ of the polynomial and the sigmoid.
        learnable: train the centers and γ.

    Source: arXiv 2407.04819, "Unifying Kernel SVM"; Schölkopf and Smola, Learning with Kernels (2002), chapter 2.

    Example:
        >>> import torch, kapsi as kp
        >>> head = kp.Head(2, 1, kp.HeadSpec(KernelMap("polynomial", centers=2, gamma=1.0, degree=2)))
        >>> head.assign("expansion", centers=[[1.0, 0.0], [0.0, 1.0]])
        >>> head.expand(torch.tensor([1.0, 2.0])).dense()
        tensor([4., 9.])
    """

    examples = (
        {},
        {"kernel": "rbf", "centers": 4, "gamma": 0.7, "learnable": True},
        {"kernel": "linear", "centers": 4, "learnable": True},
        {"kernel": "polynomial", "centers": 4, "learnable": True},
        {"kernel": "polynomial", "centers": 4, "degree": 9, "gamma": 0.5, "coef0": -0.5},
        {"kernel": "sigmoid", "centers": 4, "coef0": 0.3, "learnable": True},
    )

    kernel: Kernel = "rbf"
    centers: int = option(12, minimum=1, maximum=100_000)
    gamma: float | None = option(None, minimum=1e-12, maximum=1e6)
    degree: int = option(3, minimum=1, maximum=32)
    coef0: float = 1.0
    learnable: bool = False

    def factors(self, in_features: int) -> tuple[int, int]:
        return 1, self.centers

    def heavy_tailed(self) -> bool:
        """Return whether the kernel is a polynomial of degree above four."""
        return self.kernel == "polynomial" and self.degree > 4

    def params(self, in_features: int) -> Params:
        centers = Param((self.centers, in_features), "normal", trainable=self.learnable)
        if self.kernel == "linear":
            return {"centers": centers}
        return {"centers": centers, "log_gamma": _log_gamma(self.gamma, in_features, self.learnable)}

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        """Return centers from k-means, and γ from the variance of the data unless given."""
        centers = {"centers": cluster_centers(x, self.centers)}
        return centers if self.kernel == "linear" else {**centers, **_calibrate_gamma(self.gamma, x)}

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        gamma = None if self.kernel == "linear" else working_precision(params["log_gamma"]).exp()
        centers = working_precision(params["centers"])
        values = similarity(self.kernel, working_precision(x), centers, gamma, self.degree, self.coef0)
        return DenseFeatures(values.to(x.dtype))


@dataclass(frozen=True)
class PolynomialMap(Expansion, name="polynomial_map"):
    """The feature map of the polynomial kernel: ⟨κ(x), κ(z)⟩ = (γ⟨x, z⟩ + c₀)^d exactly.

    With u = [√γ x, √c₀] the kernel is ⟨u(x), u(z)⟩^d, and κ(x) = u ⊗ … ⊗ u, d times: Taylor's monomials of degree 0 to d,
    with binomial weights √(C(d, k) γᵏ c₀^(d−k)) for degree k. The symmetric form contains every monomial once, times the
    square root of the number of orderings, D = C(m + d, d); the full form contains every ordering, D = (m + 1)^d, as a
    product never multiplied out if the weights allow. Without c₀ only degree d remains, with m in place of m + 1.

    γ is the buffer `log_gamma`.

    Args:
        degree: d, 1 to 32. Values stay finite in float32 for γ‖x‖² + c₀ up to 10^(76/d).
        gamma: γ, 10⁻¹² to 10⁶; None: 1/m, and 1/(m · variance of the data) after `kapsi.calibrate`, as scikit-learn's
            `auto` and `scale`.
        coef0: c₀, at least 0.
        symmetric: each monomial once instead of every ordering.

    Raises:
        SpecError: D is beyond 2⁵³ columns.

    Source: Schölkopf and Smola, Learning with Kernels (2002), section 2.1; arXiv 2407.04819, "Unifying Kernel SVM".

    Example:
        >>> import torch
        >>> kappa, tensors = PolynomialMap(2, coef0=3.0), {"log_gamma": torch.zeros(1)}
        >>> x, z = (kappa(torch.tensor(row), tensors).dense() for row in ([1.0, 2.0], [4.0, -1.0]))
        >>> torch.allclose(x @ z, torch.tensor((1 * 4 - 2 * 1 + 3.0) ** 2))
        True
    """

    examples = (
        {},
        {"degree": 1, "gamma": 0.4},
        {"degree": 4, "gamma": 0.7, "coef0": 0.3},
        {"degree": 3, "coef0": 0.0},
        {"symmetric": False},
        {"degree": 3, "gamma": 0.6, "symmetric": False},
        {"degree": 6, "gamma": 0.1},
    )

    degree: int = option(2, minimum=1, maximum=32)
    gamma: float | None = option(None, minimum=1e-12, maximum=1e6)
    coef0: float = option(1.0, minimum=0.0)
    symmetric: bool = True

    def factors(self, in_features: int) -> tuple[int, int]:
        m, d = in_features + (self.coef0 > 0), self.degree
        q, t = (1, math.comb(m + d - 1, d)) if self.symmetric else (m ** (d - 1), m)
        if q * t > MAX_EXPANSION:
            raise SpecError(
                f"PolynomialMap(degree={d}): {in_features:,} inputs make 10^{math.log10(q * t):.1f} columns, at most 10^15.9 "
                "are allowed; KernelMap has as many as it has centers"
            )
        return q, t

    def heavy_tailed(self) -> bool:
        """Return whether the degree is above four."""
        return self.degree > 4

    def params(self, in_features: int) -> Params:
        return {"log_gamma": _log_gamma(self.gamma, in_features, trainable=False)}

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        """Return γ from the variance of the data unless given."""
        return _calibrate_gamma(self.gamma, x)

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        inputs = working_precision(x)
        u = inputs * torch.exp(working_precision(params["log_gamma"]) / 2)
        if self.coef0 > 0:
            u = torch.cat((u, torch.full_like(u[..., :1], math.sqrt(self.coef0))), -1)
        if self.degree == 1:
            return DenseFeatures(u.to(x.dtype))
        if self.symmetric:
            return DenseFeatures(monomials(u, self.degree)[-1].to(x.dtype))
        power = u
        for _ in range(self.degree - 2):
            power = (power.unsqueeze(-1) * u.unsqueeze(-2)).flatten(-2)
        return ProductFeatures(power.to(x.dtype), u.to(x.dtype))


@dataclass(frozen=True)
class RandomFourier(Expansion, name="random_fourier"):
    """Random Fourier features of the kernel exp(−γ‖x − y‖²): κ(x) = √(2/D) cos(√(2γ) W x + b), D = count.

    Inner products ⟨κ(x), κ(y)⟩ approximate the kernel with a standard deviation below 1/√D. W is standard normal, b uniform
    on [0, 2π); both are drawn once and saved with the model, as the buffers `frequencies` `(D, m)`, at unit scale, and
    `phases` `(D,)`. γ is the buffer `log_gamma`.

    Args:
        count: D, 1 to 1,000,000.
        gamma: γ, 10⁻¹² to 10⁶; None: 1/m, and 1/(m · variance of the data) after `kapsi.calibrate`.
        learnable: train frequencies, phases and γ.

    Source: Rahimi and Recht, Random Features for Large-Scale Kernel Machines (2007).

    Example:
        >>> import torch, kapsi as kp
        >>> head = kp.Head(3, 1, kp.HeadSpec(RandomFourier(10_000, gamma=0.5)), seed=0)
        >>> x, y = torch.tensor([[0.0, 1.0, 2.0], [1.0, 1.0, 2.0]])
        >>> kernel = head.expand(x).dense() @ head.expand(y).dense()
        >>> bool((kernel - torch.exp(torch.tensor(-0.5))).abs() < 0.03)
        True
    """

    examples = ({"count": 12}, {"count": 4, "gamma": 0.3, "learnable": True})

    count: int = option(100, minimum=1, maximum=1_000_000)
    gamma: float | None = option(None, minimum=1e-12, maximum=1e6)
    learnable: bool = False

    def factors(self, in_features: int) -> tuple[int, int]:
        return 1, self.count

    def params(self, in_features: int) -> Params:
        return {
            "frequencies": Param((self.count, in_features), "normal", trainable=self.learnable),
            "phases": Param((self.count,), _phases, trainable=self.learnable),
            "log_gamma": _log_gamma(self.gamma, in_features, self.learnable),
        }

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        """Return γ from the variance of the data unless given; frequencies and phases stay."""
        return _calibrate_gamma(self.gamma, x)

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        # Scale the inputs, usually the smaller array, not the frequencies.
        scale = torch.exp(working_precision(params["log_gamma"]) / 2) * math.sqrt(2)
        frequencies, phases = working_precision(params["frequencies"]), working_precision(params["phases"])
        angles = F.linear(working_precision(x) * scale, frequencies, phases)
        return DenseFeatures((torch.cos(angles) * math.sqrt(2 / self.count)).to(x.dtype))


@dataclass(frozen=True)
class Nystrom(Expansion, name="nystrom"):
    """The Nyström approximation of a kernel: κ(x) = K(x, Z) K(Z, Z)^{−½} for landmarks Z, D = their number.

    Inner products ⟨κ(x), κ(y)⟩ equal the kernel if x or y is a landmark. Kernels and γ are as in `KernelMap`, without
    `sigmoid`, whose K(Z, Z) has no real root.

    Landmarks `(D, m)`, the root `normalization` `(D, D)` and `log_gamma` are buffers. Before `kapsi.calibrate`, which
    places the landmarks in the data (k-means), landmarks are standard normal points, equal for every seed. Assign
    landmarks, normalization and `log_gamma` together. Directions of K(Z, Z) below rounding are left out.

    Args:
        count: D, 1 to 10,000; the time of calibration grows as D³.
        kernel: `rbf`, `linear` or `polynomial`.
        gamma: γ, 10⁻¹² to 10⁶; None: 1/m, and 1/(m · variance of the data) after `kapsi.calibrate`.
        degree: d of the polynomial, 1 to 32.
        coef0: c₀ of the polynomial, at least 0.

    Source: Williams and Seeger, Using the Nyström Method to Speed Up Kernel Machines (2001); Zhang, Tsang and Kwok,
        Improved Nyström Low-Rank Approximation and Error Analysis (2008), for landmarks by k-means.

    Example:
        >>> import torch, kapsi as kp
        >>> head = kp.Head(2, 1, kp.HeadSpec(Nystrom(5, gamma=0.5)))
        >>> x = head.kappa["landmarks"][:2]
        >>> features = head.expand(x).dense()
        >>> torch.allclose(features[0] @ features[1], torch.exp(-0.5 * (x[0] - x[1]).square().sum()), atol=1e-5)
        True
    """

    examples = (
        {"count": 4},
        {"count": 4, "kernel": "polynomial", "degree": 2, "gamma": 0.5, "coef0": 0.8},
        {"count": 2, "kernel": "linear"},
    )

    count: int = option(100, minimum=1, maximum=10_000)
    kernel: Literal["rbf", "linear", "polynomial"] = "rbf"
    gamma: float | None = option(None, minimum=1e-12, maximum=1e6)
    degree: int = option(3, minimum=1, maximum=32)
    coef0: float = option(1.0, minimum=0.0)

    def factors(self, in_features: int) -> tuple[int, int]:
        return 1, self.count

    def heavy_tailed(self) -> bool:
        """Return whether the kernel is a polynomial of degree above four."""
        return self.kernel == "polynomial" and self.degree > 4

    def params(self, in_features: int) -> Params:
        return {
            "landmarks": Param((self.count, in_features), _normal_points, trainable=False),
            "normalization": Param(
                (self.count, self.count), functools.partial(_first_normalization, self, in_features), trainable=False
            ),
            "log_gamma": _log_gamma(self.gamma, in_features, trainable=False),
        }

    def calibrate(self, x: Tensor, params: Tensors, y: Tensor | None = None) -> Mapping[str, Any]:
        """Return landmarks from k-means, their normalization, and γ from the variance of the data unless given."""
        # In stored precision, for a consistent normalization.
        landmarks = cluster_centers(x, self.count).to(x.dtype).double()
        new = _calibrate_gamma(self.gamma, x)
        gamma = new.get("log_gamma", params["log_gamma"]).to(x.dtype).cpu().double().exp()
        rounding = torch.finfo(working_precision(x).dtype).eps
        return {**new, "landmarks": landmarks, "normalization": self._normalization(landmarks, gamma, rounding)}

    def _normalization(self, landmarks: Tensor, gamma: Tensor, rounding: float) -> Tensor:
        """Return K(Z, Z)^{−½}; eigenvalues within the rounding of the precision in use count as infinite."""
        gram = similarity(self.kernel, landmarks, landmarks, gamma, self.degree, self.coef0)
        values, vectors = torch.linalg.eigh((gram + gram.T) / 2)
        cutoff = (values[-1] * rounding * self.count).clamp_min(torch.finfo(values.dtype).tiny)
        roots = torch.where(values > cutoff, values.clamp_min(cutoff).rsqrt(), torch.zeros_like(values))
        return (vectors * roots) @ vectors.T

    def __call__(self, x: Tensor, params: Tensors) -> Features:
        gamma = working_precision(params["log_gamma"]).exp()
        landmarks, normalization = working_precision(params["landmarks"]), working_precision(params["normalization"])
        values = similarity(self.kernel, working_precision(x), landmarks, gamma, self.degree, self.coef0)
        return DenseFeatures((values @ normalization).to(x.dtype))


# ------------------------------------------------------------------------------------------------ kernels


def similarity(kernel: Kernel, x: Tensor, centers: Tensor, gamma: Tensor | None, degree: int, coef0: float) -> Tensor:
    """Return k(x, c) for all centers: `(..., G)` for x `(..., m)` and centers `(G, m)`; `linear` uses no γ."""
    if kernel == "linear" or gamma is None:
        return F.linear(x, centers)
    if kernel == "rbf":
        return exp_neg(gamma * square_distances(x, centers))
    inner = gamma * F.linear(x, centers) + coef0
    if kernel == "sigmoid":
        return torch.tanh(inner)
    cutoff = MAX_POWER ** (1 / degree)
    clamped = inner.clamp(-cutoff, cutoff)
    return clamped.pow(degree) + degree * clamped.pow(degree - 1) * (inner - clamped)


def square_distances(x: Tensor, centers: Tensor) -> Tensor:
    """Return ‖x − c‖² for all centers, `(..., G)`, by the expanded square, without an array of `(..., G, m)`.

    Computed around the mean of the centers, because terms far from zero cancel. Negative rounding is cut off in the value
    alone: derivatives at distance zero are those of the square, with a non-zero second derivative. Coordinates are clamped
    before squares overflow, at 10¹⁸ in float32: a difference of infinities is NaN.
    """
    middle = centers.mean(0)
    largest = math.sqrt(torch.finfo(x.dtype).max / (8 * x.shape[-1]))
    x, centers = (x - middle).clamp(-largest, largest), (centers - middle).clamp(-largest, largest)
    square = x.square().sum(-1, keepdim=True) + centers.square().sum(-1) - 2 * F.linear(x, centers)
    return square + (square.clamp_min(0) - square).detach()


# ------------------------------------------------------------------------------------------------ initial values and data


def _log_gamma(gamma: float | None, in_features: int, trainable: bool) -> Param:
    """Return the declaration of log γ; γ is 1/m unless given."""
    return Param((1,), (math.log(1 / in_features if gamma is None else gamma),), trainable=trainable)


def _calibrate_gamma(gamma: float | None, x: Tensor) -> dict[str, Tensor]:
    """Return log γ = −log(m · variance of all values), γ = 1/m for zero variance; empty if γ is given."""
    if gamma is not None:
        return {}
    x = working_precision(x)
    info = torch.finfo(x.dtype)
    variance = x.var(correction=0).double().clamp_max(info.max)
    # A variance within rounding of a constant counts as zero.
    constant = variance <= (x.abs().amax().double() * info.eps).square()
    return {"log_gamma": -torch.log(x.shape[-1] * torch.where(constant, 1.0, variance)).reshape(1)}


def _phases(shape: tuple[int, ...], generator: Generator | None) -> Tensor:
    return torch.rand(shape, generator=generator, device="cpu") * (2 * math.pi)


def _normal_points(shape: tuple[int, ...], generator: Generator | None) -> Tensor:
    """Return standard normal points, always the same, so that dependent tensors can be declared separately."""
    # A seed unlikely to be used elsewhere: equal seeds draw equal numbers.
    return torch.randn(shape, generator=torch.Generator().manual_seed(0x6E797374), device="cpu")


def _first_normalization(
    function: Nystrom, in_features: int, shape: tuple[int, ...], generator: Generator | None
) -> Tensor:
    """Return the normalization of the landmarks before calibration, for models in float32 and wider types."""
    landmarks = _normal_points((function.count, in_features), None).double()
    gamma = 1 / in_features if function.gamma is None else function.gamma
    return function._normalization(landmarks, landmarks.new_tensor([gamma]), torch.finfo(torch.float32).eps)


def cluster_centers(x: Tensor, count: int) -> Tensor:
    """Return centers `(count, m)` for data `(rows, m)`: k-means from evenly spaced distinct rows, float64 on the CPU.

    Deterministic without a random generator: distinct rows are sorted by value. A center without nearest rows stays; with
    fewer distinct rows than centers, rows repeat. Large data are subsampled evenly, to at least four rows per center.
    """
    rows, width = x.shape
    sample = max(4 * count, BLOCK_DISTANCES // width)
    x = x[:: -(-rows // sample)].cpu().double()
    distinct = torch.unique(x, dim=0)
    centers = distinct[torch.linspace(0, len(distinct) - 1, count, dtype=torch.float64).round().long()]
    if len(distinct) <= count:
        return centers
    pieces = x.split(max(1, BLOCK_DISTANCES // count))
    for _ in range(LLOYD_STEPS):
        nearest = torch.cat([square_distances(piece, centers).argmin(1) for piece in pieces])
        members = torch.bincount(nearest, minlength=count).unsqueeze(1)
        sums = torch.zeros_like(centers).index_add_(0, nearest, x)
        centers = torch.where(members > 0, sums / members.clamp_min(1), centers)
    return centers
