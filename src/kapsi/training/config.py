"""How a model is trained: one frozen set of options, the same in code, in YAML and in a run folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kapsi.errors import SpecError
from kapsi.function import Spec, option

__all__ = ["TrainConfig"]


@dataclass(frozen=True)
class TrainConfig(Spec):
    """How a model is trained.

    Args:
        loss: `mse`, `huber`, `cross_entropy`, `hinge`, `squared_hinge`, `gaussian`, `bernoulli`, or `auto`: `mse` for numbers,
            `cross_entropy` for class numbers.
        solver: `adamw` and `sgd` in mini-batches; `lbfgs`, `levenberg_marquardt` and `ridge` on all rows; `auto`: by size and
            loss, the records say why.
        epochs: at most so many: passes for `adamw` and `sgd`, five iterations each for `lbfgs`, one iteration each otherwise.
        batch_size: rows a step of `adamw` and `sgd`, over all processes; None for all of them.
        learning_rate: of `adamw` and `sgd`, at its highest.
        schedule: how the learning rate goes: `cosine` to zero, `constant`, `exponential`, or `one_cycle` (up for 30% of the
            steps, then down to nearly zero).
        decay: factor of the learning rate an epoch, for `exponential`.
        momentum: of `sgd`.
        accumulate: number of parts in which a batch goes through the model, for memory.
        clip: largest norm of a gradient; longer ones are shortened. None: no limit.
        averaging: decay a step of an exponential moving average of the weights, which is what is judged and kept; None: none.
        precision: `full`, or the type of matrix products in `bfloat16` or `float16` (with loss scaling); weights keep theirs.
        compile: whether `torch.compile` makes the model faster first.
        label_smoothing: of `cross_entropy`.
        class_weights: weights of the classes, or `balanced`: each class counts the same.
        huber_delta: where `huber` goes from squares to absolute values.
        penalty: λ of λ‖w‖²/2, added to the mean loss; w are the parameters of ψ and, with 1/100 of the weight, of π; none
            for biases. None: nothing in `kapsi.fit`; `ridge` chooses it, and for tables it is chosen on rows that are not
            trained on.
        l1: factor of the sum of absolute values, of the same parameters with the same weights.
        smoothness: factor of the squared second differences of a spline's coefficients, along the grid.
        group_sparsity: factor of the norms of edges: all weights between one input and one output of a head.
        starts: number of initial values that `levenberg_marquardt` tries, at the same time.
        tolerance: relative change of the loss below which a solver on all rows ends.
        seconds: time after which training ends with the epoch, or with the step for solvers on all rows.
        stopping: share of the rows that is kept to stop early on, where that is not done by cross-validation; 0.05 to 0.5.
        patience: epochs without a better loss on those rows before training stops.
        validation: share of the rows of a table that is held out for the scores, 0.05 to 0.9.
        seed: of initial values, splits and the order of rows.
    """

    loss: Literal["auto", "mse", "huber", "cross_entropy", "hinge", "squared_hinge", "gaussian", "bernoulli"] = "auto"
    solver: Literal["auto", "adamw", "sgd", "lbfgs", "levenberg_marquardt", "ridge"] = "auto"
    epochs: int = option(200, minimum=1, maximum=10**9)
    batch_size: int | None = option(256, minimum=1, maximum=2**40)
    learning_rate: float = option(0.005, minimum=1e-12, maximum=1e6)
    schedule: Literal["cosine", "constant", "exponential", "one_cycle"] = "cosine"
    decay: float = option(0.98, minimum=1e-6, maximum=1.0)
    momentum: float = option(0.9, minimum=0.0, maximum=0.9999)
    accumulate: int = option(1, minimum=1, maximum=2**20)
    clip: float | None = option(None, minimum=1e-12)
    averaging: float | None = option(None, minimum=0.0, maximum=0.999999)
    precision: Literal["full", "bfloat16", "float16"] = "full"
    compile: bool = False
    label_smoothing: float = option(0.0, minimum=0.0, maximum=0.999)
    class_weights: tuple[float, ...] | Literal["balanced"] | None = None
    huber_delta: float = option(1.0, minimum=1e-12)
    penalty: float | None = option(None, minimum=0.0, maximum=1e30)
    l1: float = option(0.0, minimum=0.0, maximum=1e30)
    smoothness: float = option(0.0, minimum=0.0, maximum=1e30)
    group_sparsity: float = option(0.0, minimum=0.0, maximum=1e30)
    starts: int = option(1, minimum=1, maximum=4096)
    tolerance: float = option(1e-9, minimum=0.0, maximum=1.0)
    seconds: float | None = option(None, minimum=0.001)
    stopping: float = option(0.15, minimum=0.05, maximum=0.5)
    patience: int = option(5, minimum=1)
    validation: float = option(0.2, minimum=0.05, maximum=0.9)
    seed: int = option(0, minimum=0, maximum=2**32 - 1)

    def check(self) -> None:
        """Raise a `SpecError` where options do not go together."""
        if isinstance(self.class_weights, tuple) and (
            len(self.class_weights) < 2 or min(self.class_weights) < 0 or max(self.class_weights) <= 0
        ):
            raise SpecError(
                f"TrainConfig.class_weights: expected one weight of at least 0 for each class, not all 0, got {self.class_weights}"
            )
