"""The recipe of a search over given networks for functions of few inputs: starts, halving, held-out rows, refit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from kapsi.errors import DataError, SpecError
from kapsi.expansion import BSpline, Extended, Taylor
from kapsi.function import Spec, option
from kapsi.hidden_layers import Layers
from kapsi.modules import Model, trained_count
from kapsi.process import Affine, Clamp
from kapsi.recipes.base import HeadRecipe, RecipeData
from kapsi.recipes.trials import TrialRows, TrialSearch
from kapsi.reconciliation import Dense, LowRank
from kapsi.remainder import LinearRemainder, ZeroRemainder
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec, rpn
from kapsi.training.config import TrainConfig
from kapsi.training.losses import MSE
from kapsi.training.solvers import LevenbergMarquardt
from kapsi.training.threads import threads_for
from kapsi.zoo import kan, mlp

__all__ = ["FunctionCandidate", "FunctionSearch", "SuccessiveHalving"]

MAX_REFERENCES = 10_000_000
MARGIN = 0.1
"""Part of the width of the training range by which an input may leave the range before it is clamped."""

ZOO: Mapping[str, Callable[..., ModelSpec]] = {"mlp": mlp.spec, "kan": kan.spec}
DEFAULT_TRAINING: Mapping[str, Any] = {
    "loss": "mse",
    "smoothness": 0.0,
    "solver": {"kind": LevenbergMarquardt.name},
}
"""Training options in place of those left out in plain data."""
TRAINING = TrainConfig(loss=MSE(), solver=LevenbergMarquardt(), smoothness=0.0)


def _read_training(value: Any, where: str) -> Any:
    """Return plain options of a training with the defaults of the search."""
    if not isinstance(value, Mapping):
        return value
    solver = value.get("solver")
    options = {**DEFAULT_TRAINING["solver"], **solver} if isinstance(solver, Mapping) else solver
    return {**DEFAULT_TRAINING, **value, **({} if options is None else {"solver": options})}


@dataclass(frozen=True, kw_only=True)
class FunctionCandidate(Spec):
    """A model, given by `model`, `mlp` or `kan`, and the training.

    Args:
        name: name, unique in the search.
        model: specification; widths at the ends may be null.
        mlp: arguments of `kapsi.zoo.mlp.spec`.
        kan: arguments of `kapsi.zoo.kan.spec`.
        trials: number of models fitted, each with different initial values and calibration.
        training: the training; Levenberg–Marquardt without smoothness if left out; further restarts within a trial are compared by
            the training error. Null: that of the search.
        place: for each hidden layer the range [low, high] of the outputs over the training rows before the first step, or null for
            the drawn values. A basis on [−1, 1] starts on [−1, 1], a logarithm above zero. Every second trial is mirrored.
        after: name of an earlier candidate; the first layer starts as in the best fit after the first phase.
        targets: `standard`: mean 0 and variance 1 over the training rows; `scaled`: mean absolute value 1, with zero fixed, for
            outputs of constant sign; `raw`.
        rounds: parts of a fit; splines of hidden layers are moved to their current data in between.
        warm: training before the first phase, for example a few epochs of AdamW before Gauss–Newton steps; null for none.
        least_squares_init: start the last layer as the least-squares solution for the other layers. Drawn values pull the layers
            below with ranges placed elsewhere: a model with arcsin in κ, exact for arcsin(x + y) and close at the start, ended
            at an error of 6e-4 without and of 1e-31 with this option.
    """

    name: str
    model: ModelSpec | None = None
    mlp: Mapping[str, Any] | None = None
    kan: Mapping[str, Any] | None = None
    trials: int = option(1, minimum=1)
    training: TrainConfig | None = option(None, read=_read_training)
    place: tuple[tuple[float, float] | None, ...] = ()
    after: str | None = None
    targets: Literal["standard", "scaled", "raw"] = "standard"
    rounds: int = option(1, minimum=1)
    warm: TrainConfig | None = None
    least_squares_init: bool = False

    def check(self) -> None:
        given = [kind for kind in ("model", *ZOO) if getattr(self, kind) is not None]
        if len(given) != 1:
            raise SpecError(f"expected one of model, {', '.join(ZOO)}, got {', '.join(given) or 'none'}")
        for ends in self.place:
            if ends is not None and not -1e6 <= ends[0] < ends[1] <= 1e6:
                raise SpecError(f"place: expected low below high, from -1e6 to 1e6, got {list(ends)}")
        if self.model is None:
            (kind,) = given
            try:
                object.__setattr__(self, "model", ZOO[kind](**getattr(self, kind)))
            except (TypeError, SpecError, DataError) as error:
                hint = f"; see kapsi.zoo.{kind}.spec" if isinstance(error, TypeError) else ""
                raise SpecError(f"{kind}: {error}{hint}") from None
            object.__setattr__(self, kind, None)

    @property
    def spec(self) -> ModelSpec:
        """Specification of the model; with all widths after `sized`."""
        return cast(ModelSpec, self.model)

    @property
    def config(self) -> TrainConfig:
        """The training; known in a search."""
        return cast(TrainConfig, self.training)

    def sized(self, inputs: int, outputs: int = 1) -> FunctionCandidate:
        """Return the candidate with its specification for numbers of inputs and outputs, checked against the other options."""
        try:
            candidate = replace(self, model=self.spec.sized(inputs, outputs))
        except (SpecError, DataError) as error:
            raise SpecError(f"model: {error}") from None
        *hidden, last = (layer for _, _, layer in candidate.spec.resolved())
        if self.least_squares_init and last.output:
            raise SpecError(
                f"least_squares_init: the last layer is followed by {last.output[0]!r}, which least squares cannot invert; "
                "set it to false, or leave out the output of the last layer"
            )
        if len(self.place) > len(hidden):
            raise SpecError(
                f"place: expected [low, high] or null for each of {len(hidden)} hidden layers, got {len(self.place)}"
            )
        if not all(ends is None or _can_be_placed(layer) for layer, ends in zip(hidden, self.place, strict=False)):
            raise SpecError(
                "place: only a layer of one head with a bias, dense or low-rank ψ, no remainder and no output processing can be "
                "placed; set the others to null"
            )
        return candidate


def _can_be_placed(layer: LayerSpec) -> bool:
    head = layer.heads[0]
    plain = len(layer.heads) == 1 and head.bias and not layer.output and head.channels == 1
    return plain and type(head.reconciliation) in (Dense, LowRank) and head.remainder == ZeroRemainder()


def _product_layers() -> tuple[LayerSpec, ...]:
    """Return three layers of splines and products."""
    taylor, layers = Taylor(2, symmetric=True), []
    for spline in (BSpline(5), *[BSpline(5, knots="quantile", uniform_share=0.2)] * 2):
        layers.append(LayerSpec((HeadSpec(Extended((spline, taylor)), remainder=LinearRemainder(), init="measured"),)))
    return tuple(layers)


KAN = FunctionCandidate(
    name="kan",
    model=rpn((None, 5, None), BSpline(intervals=8), remainder=LinearRemainder(before="silu")),  # type: ignore[arg-type]
    training=replace(TRAINING, epochs=60, smoothness="auto"),
)
PRODUCT = FunctionCandidate(
    name="product",
    model=ModelSpec((None, 4, 3, None), _product_layers()),
    training=replace(TRAINING, epochs=60, l2=1e-7),
)


@dataclass(frozen=True)
class SuccessiveHalving(Spec):
    """A short first phase.

    Args:
        epochs: number of epochs of each trial.
        keep: number of trials continued, over all candidates.
    """

    epochs: int = option(minimum=1)
    keep: int = option(minimum=1)


@dataclass(frozen=True, kw_only=True)
class FunctionSearch(HeadRecipe, name="function_search"):
    """The network f(x) with the lowest error on held-out rows, of several candidates with several initial values each.

    The recipe of the paper's tables of functions (`kapsi.recipes.trials` lists the steps): extreme rows are held out,
    all candidates are trained by Levenberg–Marquardt, and the best fit is continued on all rows unless it drifts. For
    smooth targets with little noise and few inputs; inputs are clamped a tenth of their range beyond the training rows.

    Args:
        candidates: the candidates, from simple to flexible. Default: the two networks of the recipe `functions`.
        training: training of candidates without their own; Levenberg–Marquardt if left out.
        refit: training of the selected model on all rows; null for no refit.
        validation: share of the training rows used for validation, 0.05 to 0.5.
        edge: share of the validation rows at the extreme of a random direction, 0 to 1.
        tails: share of the validation rows with the highest and the lowest targets, 0 to 1 − edge.
        inputs: `unit` scales to [−1, 1] by the range of the training rows; `raw` does not.
        calibrate: whether to set grids and other buffers from the training rows before a fit.
        successive_halving: a short first phase; null for none.
        min_improvement: factor by which a candidate must lower the validation error of the candidates above, 1 to 1,000. Close to
            poles all errors are alike, and the simplest model is the safest.
        reference_inputs: number of random inputs, uniform in the range of the training rows, for the comparison of fits; 0: none.
        consensus: compare fits with each other before selection (true); needs reference_inputs.
        max_drift: largest mean squared change of the outputs on the reference inputs in a refit, in validation errors, 1 to 1e6
            (1); needs reference_inputs.
        target_error: validation error, as a share of the variance of the targets, that ends the search, 0 to 0.01.
        parameters: maximum number of trainable parameters of a candidate; null for any.

    Source: arXiv 2407.04819, the tables of elementary, composite and Feynman functions.

    Example:
        >>> import torch, kapsi as kp
        >>> from kapsi.recipes import FunctionCandidate, FunctionSearch, RecipeData
        >>> line = kp.LayerSpec(kp.HeadSpec(bias=True))
        >>> square = kp.LayerSpec(kp.HeadSpec(kp.Chebyshev(2), bias=True))
        >>> candidate = FunctionCandidate(name="square", model=kp.ModelSpec((None, 1, None), (line, square)), place=((-1, 1),))
        >>> x = torch.rand(100, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> data = RecipeData(x, x.sum(1, keepdim=True).square(), kp.MSE(), 0, torch.ones(2, dtype=torch.bool))
        >>> model = FunctionSearch(candidates=(candidate,)).fit(data)
        >>> bool((model(data.x) - data.y).abs().max() < 1e-6)
        True
    """

    complexity: ClassVar[int] = 7
    examples = ({}, {"candidates": ({"name": "tanh", "mlp": {"widths": [None, 3, None], "activation": "tanh"}},)})

    candidates: tuple[FunctionCandidate, ...] = (KAN, PRODUCT)
    training: TrainConfig = option(TRAINING, read=_read_training)
    refit: TrainConfig | None = option(replace(TRAINING, epochs=20), read=_read_training)
    validation: float = option(0.2, minimum=0.05, maximum=0.5)
    edge: float = option(0.25, minimum=0.0, maximum=1.0)
    tails: float = option(0.0, minimum=0.0, maximum=1.0)
    inputs: Literal["unit", "raw"] = "unit"
    calibrate: bool = True
    successive_halving: SuccessiveHalving | None = None
    min_improvement: float = option(1.0, minimum=1.0, maximum=1e3)
    reference_inputs: int = option(0, minimum=0, maximum=MAX_REFERENCES)
    consensus: bool | None = None
    max_drift: float | None = option(None, minimum=1.0, maximum=1e6)
    target_error: float = option(0.0, minimum=0.0, maximum=0.01)
    parameters: int | None = option(None, minimum=1)

    def check(self) -> None:
        if self.edge + self.tails > 1:
            raise SpecError(
                f"tails: edge {self.edge:g} and tails {self.tails:g} are shares that are 1 together at most"
            )
        for name in ("consensus", "max_drift"):
            if getattr(self, name) is not None and not self.reference_inputs:
                raise SpecError(f"{name}: needs reference_inputs; set both, or leave it out")
        names = [candidate.name for candidate in self.candidates]
        if not names or len(set(names)) < len(names):
            raise SpecError(f"candidates: give one candidate at least, with different names, not {names}")
        filled = tuple(replace(c, training=c.training or self.training) for c in self.candidates)
        object.__setattr__(self, "candidates", filled)

    @classmethod
    def offered(cls) -> tuple[HeadRecipe, ...]:
        return ()  # by request: `functions` has candidates for any table

    def least_budget(self, data: RecipeData) -> float:
        return 60.0

    def label(self) -> str:
        return f"{self.name}({', '.join(candidate.name for candidate in self.candidates)})"

    def sized(self, inputs: int, outputs: int = 1) -> FunctionSearch:
        """Return the recipe with all candidates for numbers of inputs and outputs.

        Raises:
            SpecError: an unsuitable candidate; the message begins with its place.
        """
        sized: list[FunctionCandidate] = []
        for candidate in self.candidates:
            try:
                sized.append(candidate.sized(inputs, outputs))
                self._check_candidate(sized)
            except (SpecError, DataError) as error:
                raise SpecError(f"candidates.{candidate.name}.{error}") from None
        return replace(self, candidates=tuple(sized))

    def _check_candidate(self, sized: list[FunctionCandidate]) -> None:
        """Check the last candidate against the others and the options."""
        *earlier, last = sized
        first = last.spec.resolved()[0]
        same_first = [candidate.name for candidate in earlier if candidate.spec.resolved()[0] == first]
        if last.after is not None and last.after not in same_first:
            raise SpecError(
                f"after: expected the name of a candidate before it with the same first layer "
                f"({', '.join(same_first) or 'there is none'}), got {last.after!r}"
            )
        if self.successive_halving is not None and self.successive_halving.epochs > last.config.epochs:
            raise SpecError(
                f"training.epochs: the {self.successive_halving.epochs} epochs of successive_halving are more than the "
                f"{last.config.epochs} epochs of the training; give fewer, or null for no successive halving"
            )
        count = _parameters(last.spec)
        if self.parameters is not None and count > self.parameters:
            raise SpecError(
                f"model: {count} parameters are more than the {self.parameters} of the option parameters; "
                "make it smaller, or raise the option"
            )

    def reason_against(self, data: RecipeData) -> str | None:
        if not data.loss.closed_form:
            return f"{self.name} fits squared errors, not {data.loss.name}"
        self.sized(data.x.shape[1], data.outputs)
        return None

    def seconds(self, rows: int, inputs: int, outputs: int) -> float:
        sized, total, halving = self.sized(inputs, outputs), 0.0, self.successive_halving
        for candidate in sized.candidates:
            solver, epochs = candidate.config.solver, candidate.config.epochs
            starts = candidate.trials * (solver.restarts if isinstance(solver, LevenbergMarquardt) else 1)
            per_epoch = seconds_of_epoch(_parameters(candidate.spec), rows, outputs)
            total += starts * (epochs if halving is None else halving.epochs) * per_epoch
        return total

    def fit(self, data: RecipeData, seed: int = 0) -> Model:
        reason = self.reason_against(data)
        if reason is not None:
            raise SpecError(reason)
        low, high = data.x.amin(0), data.x.amax(0)
        center, half = unit_scale(data.x) if self.inputs == "unit" else (torch.zeros_like(low), torch.ones_like(low))
        rows = TrialRows((data.x - center) / half, data.y, weight=data.weight)
        search = TrialSearch(self.sized(data.x.shape[1], data.outputs), rows, seed)
        with threads_for(0):
            best = search.select().best
        scaled = search.rows_for(best.candidate)
        margin = MARGIN * (high - low)
        return network_head(
            best.model,
            low - margin,
            high + margin,
            (center, half),
            (scaled.mean, scaled.deviation),  # type: ignore[arg-type]
        )


def unit_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return center and half width of the range of each input, `(m,)`: (x − center)/half width is in [−1, 1]."""
    low, high = x.amin(0), x.amax(0)
    return (low + high) / 2, ((high - low) / 2).clamp_min(torch.finfo(x.dtype).tiny)


def _parameters(spec: ModelSpec) -> int:
    with torch.device("meta"):
        return trained_count(Model(spec))


def seconds_of_epoch(parameters: int, rows: int, outputs: int) -> float:
    """Return an estimate of the seconds of an iteration of Levenberg–Marquardt."""
    return 2e-3 + rows * outputs * (3e-8 * parameters + 1e-11 * parameters**2)


@torch.no_grad()
def network_head(
    network: Model,
    low: Tensor,
    high: Tensor,
    inputs: tuple[Tensor, Tensor] | None = None,
    outputs: tuple[Tensor, Tensor] | None = None,
) -> Model:
    """Return deviation · f((clamp(x) − shift)/scale) + mean of a network f, as one head in float64.

    Args:
        network: the network.
        low, high: range of the inputs, `(m,)` each.
        inputs: shift and scale, `(m,)` each; None without.
        outputs: mean and deviation, `(n,)` each; None without.
    """
    widths = network.spec.widths
    before = (Clamp(),) if inputs is None else (Clamp(), Affine())
    kappa = Layers(widths[1:], network.spec.layers)  # type: ignore[arg-type]
    head = HeadSpec(kappa, before=before, bias=outputs is not None)
    spec = ModelSpec((widths[0], widths[-1]), (LayerSpec((head,)),))
    model = Model(spec, device="meta", dtype=torch.float64).to_empty(device="cpu")
    state = {f"layers.0.heads.0.kappa.model.{name}": tensor for name, tensor in network.state_dict().items()}
    eye = torch.eye(network.out_features, dtype=torch.float64)
    state["layers.0.heads.0.psi.matrix"] = eye if outputs is None else outputs[1].diag()
    state |= {"layers.0.heads.0.before.0.low": low, "layers.0.heads.0.before.0.high": high}
    if inputs is not None:
        values = {"shift": inputs[0], "low": torch.zeros_like(low), "scale": 1 / inputs[1]}
        state |= {f"layers.0.heads.0.before.1.{name}": value for name, value in values.items()}
    if outputs is not None:
        state["layers.0.heads.0.bias"] = outputs[0]
    model.load_state_dict(state)
    return model.eval()
