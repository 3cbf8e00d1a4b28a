"""Losses by name: the loss of each row, the checks of targets, decisions and probabilities, and the curvature in the outputs.

The mean over rows of `Loss.rows`, weighted by weights of mean one, is what is minimized. Outputs are `(rows, n)`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from kapsi.errors import SpecError, did_you_mean

__all__ = ["LOSSES", "Loss", "make_loss"]

LARGEST_LOG_VARIANCE = 30.0
"""Log-variances beyond ± 30 count as ± 30: e³⁰ times a squared error is still finite in float32."""


@dataclass(frozen=True)
class Loss(ABC):
    """The loss of one row, a function of the row's outputs and its target."""

    name: ClassVar[str]
    classes: ClassVar[bool] = False
    """Whether targets are class numbers, `(rows,)`."""

    @abstractmethod
    def rows(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each row, `(rows,)`, differentiable in the outputs `(rows, n)`."""

    def mean(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean of `rows`; one operation where torch has it."""
        return self.rows(output, target).mean()

    @abstractmethod
    def decide(self, output: Tensor) -> Tensor:
        """Return what is predicted: numbers, or class numbers."""

    def log_probabilities(self, output: Tensor) -> Tensor:
        """Return log-probabilities of the classes.

        Raises:
            SpecError: the loss has none.
        """
        having = ", ".join(
            name for name, kind in LOSSES.items() if kind.log_probabilities is not Loss.log_probabilities
        )
        raise SpecError(f"{self.name} has no probabilities; {having} have")

    def targets(self, outputs: int, where: str = "fit") -> int:
        """Return the number of target columns for so many outputs."""
        return outputs

    def check_outputs(self, outputs: int, where: str) -> None:
        """Raise a `SpecError` where a model with so many outputs cannot have this loss."""
        self.targets(outputs, where)

    def check(self, target: Tensor, outputs: int, where: str = "fit") -> None:
        """Raise a `SpecError` where targets do not fit a model with so many outputs; `target` may be some of the rows."""
        if not target.is_floating_point():
            raise SpecError(f"{where}: {self.name} needs targets of a floating-point type, got {target.dtype}")
        columns = self.targets(outputs, where)
        if target.shape[1:] not in ((columns,), *([()] if columns == 1 else [])):
            wanted = f"(rows, {columns})" + (" or (rows,)" if columns == 1 else "")
            said = f"the model has {outputs} outputs, for targets of shape {wanted}"
            raise SpecError(f"{where}: {said}; got targets of shape {tuple(target.shape)}")
        if not bool(torch.isfinite(target).all()):
            raise SpecError(f"{where}: inputs and targets must be finite")

    def curvature(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient g `(rows, n)` of the loss in the outputs, and a factor S `(rows, k, n)` of a curvature H = SᵀS.

        H is the Hessian where the loss is convex in the outputs (Gauss–Newton for squares; Fisher's for likelihoods).

        Raises:
            SpecError: the loss has no such curvature.
        """
        having = ", ".join(name for name, kind in LOSSES.items() if kind.curvature is not Loss.curvature)
        raise SpecError(f"{self.name} has no curvature to be used; {having} have")

    def tally(self, output: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        """Return sums over rows, in float64, from which `metrics` follow: those of parts of the rows add up."""
        values = _columns(target).double()
        squares = (_columns(self.decide(output)).double() - values).square().mean(1)
        w = torch.ones_like(squares) if weight is None else weight.double()
        moments = torch.cat([values, values.square()], 1)
        return torch.cat([torch.stack([w.sum(), w @ squares]), w @ moments])

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """Return what people look at beside the loss, from sums over rows."""
        total, squares, *moments = sums.tolist()
        first, second = moments[: len(moments) // 2], moments[len(moments) // 2 :]
        spread = sum(max(b / total - (a / total) ** 2, 0.0) for a, b in zip(first, second, strict=True)) / len(first)
        squares /= total
        # A spread that is nothing but rounding is none.
        constant = spread <= 1e-14 * sum(b / total for b in second)
        return {"rmse": math.sqrt(squares), "r2": float(squares == 0) if constant else 1 - squares / spread}


def _columns(target: Tensor) -> Tensor:
    return target[:, None] if target.dim() == 1 else target


def _shares(right: Tensor, weight: Tensor | None) -> Tensor:
    w = torch.ones_like(right, dtype=torch.float64) if weight is None else weight.double()
    return torch.stack([w.sum(), w @ right.double()])


@dataclass(frozen=True)
class MeanSquaredError(Loss):
    """(y − f)², the mean over outputs."""

    name: ClassVar[str] = "mse"

    def rows(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target.reshape(output.shape)).square().mean(1)

    def mean(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target.reshape(output.shape))

    def decide(self, output: Tensor) -> Tensor:
        return output

    def curvature(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        n = output.shape[1]
        gradient = (2 / n) * (output - target.reshape(output.shape))
        eye = torch.eye(n, dtype=output.dtype, device=output.device) * math.sqrt(2 / n)
        return gradient, eye.expand(len(output), n, n)


@dataclass(frozen=True)
class Huber(Loss):
    """e²/2 up to |e| = δ, δ(|e| − δ/2) beyond; the mean over outputs.

    Args:
        delta: δ, in the unit of the target.
    """

    delta: float = 1.0
    name: ClassVar[str] = "huber"

    def rows(self, output: Tensor, target: Tensor) -> Tensor:
        return F.huber_loss(output, target.reshape(output.shape), reduction="none", delta=self.delta).mean(1)

    def decide(self, output: Tensor) -> Tensor:
        return output

    def curvature(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        error = output - target.reshape(output.shape)
        # The slope over the error, as in iteratively reweighted least squares: zero curvature would stop a step for nothing.
        curvature = (self.delta / error.abs().clamp_min(self.delta)) / output.shape[1]
        return curvature * error, curvature.sqrt().diag_embed()


class _OfClasses(Loss):
    classes: ClassVar[bool] = True

    def check(self, target: Tensor, outputs: int, where: str = "fit") -> None:
        if target.is_floating_point() or target.dim() != 1:
            given = f"{target.dtype} of shape {tuple(target.shape)}"
            raise SpecError(f"{where}: {self.name} needs class numbers of shape (rows,), got {given}")
        count = self.count(outputs, where)
        given = str(target.dtype)
        if target.dtype in (torch.int64, torch.int32, torch.uint8):
            if not len(target):
                return
            low, high = (int(bound) for bound in target.aminmax())
            if low >= 0 and high < count:
                return
            given += f" from {low} to {high}"
        wanted = f"whole numbers 0 to {count - 1} (int64), one a row, for {outputs} outputs"
        raise SpecError(f"{where}: classes are {wanted}; got {given}")

    def check_outputs(self, outputs: int, where: str) -> None:
        self.count(outputs, where)

    def count(self, outputs: int, where: str) -> int:
        """Return the number of classes for so many outputs."""
        if outputs < 2:
            raise SpecError(f"{where}: {self.name} needs one output a class, at least 2; the model has {outputs}")
        return outputs

    def decide(self, output: Tensor) -> Tensor:
        return output.argmax(1)

    def tally(self, output: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        return _shares(self.decide(output) == target, weight)

    def metrics(self, sums: Tensor) -> dict[str, float]:
        return {"accuracy": float(sums[1] / sums[0])}


@dataclass(frozen=True)
class CrossEntropy(_OfClasses):
    """−log p(class), p = softmax of the outputs; with smoothing s the target is (1 − s) of the class and s/n of every class.

    Args:
        smoothing: s, from 0 to below 1.
    """

    smoothing: float = 0.0
    name: ClassVar[str] = "cross_entropy"

    def rows(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target.long(), reduction="none", label_smoothing=self.smoothing)

    def mean(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target.long(), label_smoothing=self.smoothing)

    def log_probabilities(self, output: Tensor) -> Tensor:
        return output.log_softmax(1)

    def curvature(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        p = output.softmax(1)
        n = output.shape[1]
        wanted = F.one_hot(target.long(), n).to(p.dtype) * (1 - self.smoothing) + self.smoothing / n
        root = p.sqrt()
        # diag(p) − ppᵀ = (diag(√p) − √p pᵀ)ᵀ(diag(√p) − √p pᵀ)
        return p - wanted, root.diag_embed() - root[:, :, None] * p[:, None, :]


@dataclass(frozen=True)
class Hinge(_OfClasses):
    """max(0, 1 − margin). One output: margin (2·class − 1)·f. Several: f of the class minus the largest other (Crammer, Singer)."""

    name: ClassVar[str] = "hinge"

    def count(self, outputs: int, where: str) -> int:
        return max(2, outputs)

    def rows(self, output: Tensor, target: Tensor) -> Tensor:
        return self._short(output, target)

    def _short(self, output: Tensor, target: Tensor) -> Tensor:
        if output.shape[1] == 1:
            return F.relu(1 - (2 * target.to(output.dtype) - 1) * output[:, 0])
        index = target.long()[:, None]
        others = output.scatter(1, index, float("-inf")).amax(1)
        return F.relu(1 - output.gather(1, index)[:, 0] + others)

    def decide(self, output: Tensor) -> Tensor:
        return (output[:, 0] > 0).long() if output.shape[1] == 1 else output.argmax(1)


@dataclass(frozen=True)
class SquaredHinge(Hinge):
    """The square of the hinge loss."""

    name: ClassVar[str] = "squared_hinge"

    def rows(self, output: Tensor, target: Tensor) -> Tensor:
        return self._short(output, target).square()


@dataclass(frozen=True)
class Gaussian(Loss):
    """−log N(y; μ, σ²), summed over targets; the outputs are all μ, then all log σ²."""

    name: ClassVar[str] = "gaussian"

    def targets(self, outputs: int, where: str = "fit") -> int:
        if outputs % 2:
            raise SpecError(
                f"{where}: gaussian needs two outputs a target, mean and log-variance; the model has {outputs}"
            )
        return outputs // 2

    def rows(self, output: Tensor, target: Tensor) -> Tensor:
        mean, log_variance = output.chunk(2, 1)
        log_variance = log_variance.clamp(-LARGEST_LOG_VARIANCE, LARGEST_LOG_VARIANCE)
        squares = (_columns(target) - mean).square() * torch.exp(-log_variance)
        return 0.5 * (squares + log_variance + math.log(2 * math.pi)).sum(1)

    def decide(self, output: Tensor) -> Tensor:
        return output.chunk(2, 1)[0]

    def curvature(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = output.chunk(2, 1)
        inside = log_variance.abs() <= LARGEST_LOG_VARIANCE
        precision = torch.exp(-log_variance.clamp(-LARGEST_LOG_VARIANCE, LARGEST_LOG_VARIANCE))
        error = mean - _columns(target)
        gradient = torch.cat([precision * error, 0.5 * (1 - precision * error.square()) * inside], 1)
        # Fisher's information: 1/σ² for the mean, 1/2 for the log-variance.
        return gradient, torch.cat([precision.sqrt(), math.sqrt(0.5) * inside.to(precision.dtype)], 1).diag_embed()


@dataclass(frozen=True)
class Bernoulli(Loss):
    """−log p(y) of 0/1 targets (or shares of ones), p = sigmoid of the outputs, summed over outputs."""

    name: ClassVar[str] = "bernoulli"

    def check(self, target: Tensor, outputs: int, where: str = "fit") -> None:
        whole = target if target.is_floating_point() else target.to(torch.get_default_dtype())
        super().check(whole, outputs, where)
        if len(target) and (float(whole.min()) < 0 or float(whole.max()) > 1):
            raise SpecError(
                f"{where}: bernoulli needs targets from 0 to 1, got {float(whole.min())} to {float(whole.max())}"
            )

    def rows(self, output: Tensor, target: Tensor) -> Tensor:
        wanted = target.reshape(output.shape).to(output.dtype)
        return F.binary_cross_entropy_with_logits(output, wanted, reduction="none").sum(1)

    def decide(self, output: Tensor) -> Tensor:
        return (output[:, 0] > 0).long() if output.shape[1] == 1 else (output > 0).long()

    def log_probabilities(self, output: Tensor) -> Tensor:
        """Return log-probabilities `(rows, 2)` of 0 and 1 for one output; for several, `(rows, n)` of the ones."""
        return F.logsigmoid(torch.cat([-output, output], 1) if output.shape[1] == 1 else output)

    def curvature(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        p = output.sigmoid()
        return p - target.reshape(output.shape).to(p.dtype), (p * (1 - p)).sqrt().diag_embed()

    def tally(self, output: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        return _shares(((output > 0) == (_columns(target) > 0.5)).double().mean(1), weight)

    def metrics(self, sums: Tensor) -> dict[str, float]:
        return {"accuracy": float(sums[1] / sums[0])}


LOSSES: dict[str, type[Loss]] = {
    kind.name: kind for kind in (MeanSquaredError, Huber, CrossEntropy, Hinge, SquaredHinge, Gaussian, Bernoulli)
}


def make_loss(name: str, *, label_smoothing: float = 0.0, huber_delta: float = 1.0) -> Loss:
    """Return a loss by its name.

    Raises:
        SpecError: there is no such loss.

    Example:
        >>> make_loss("mse").rows(torch.ones(2, 3), torch.zeros(2, 3))
        tensor([1., 1.])
    """
    if not isinstance(name, str) or name not in LOSSES:
        hint = did_you_mean(str(name), LOSSES)
        raise SpecError(f"loss: there is no {name!r}; {hint}there are {', '.join(LOSSES)}")
    if name == "cross_entropy":
        return CrossEntropy(label_smoothing)
    return Huber(huber_delta) if name == "huber" else LOSSES[name]()
