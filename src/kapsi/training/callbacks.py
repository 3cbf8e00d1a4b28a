"""Callbacks: called with records during training; a true return value stops training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kapsi.errors import SpecError
from kapsi.training.records import Epoch, Step

__all__ = ["Callback", "Callbacks"]

HOOKS = ("on_step", "on_epoch", "on_end")


class Callback:
    """Optional base of callbacks: any object with some of these methods will do, and any callable serves as `on_epoch`.

    Example:
        >>> import torch, kapsi as kp
        >>> class Enough(kp.Callback):
        ...     def on_epoch(self, record):
        ...         return record.loss < 0.5
        >>> x = torch.linspace(-1, 1, 50).unsqueeze(1)
        >>> model = kp.Model(kp.rpn([1, 4, 1], expansion=kp.Chebyshev(3)), seed=0)
        >>> kp.fit(model, (x, x.sin()), solver="adamw", callbacks=Enough())[-1].ended
        'stopped by a callback'
    """

    def on_step(self, record: Step) -> Any:
        """Receive the record of a step; a true value stops training."""

    def on_epoch(self, record: Epoch) -> Any:
        """Receive the record of an epoch; a true value stops training."""

    def on_end(self, records: list[Epoch]) -> Any:
        """Receive the records of all epochs at the end of training."""


class Callbacks:
    """Several callbacks.

    Args:
        callbacks: a callback, or a sequence of callbacks.

    Raises:
        SpecError: an object that is neither callable nor has any of the methods.
    """

    def __init__(self, callbacks: Any) -> None:
        several = isinstance(callbacks, Sequence) and not isinstance(callbacks, str)
        self._hooks: dict[str, list[Callable[[Any], Any]]] = {name: [] for name in HOOKS}
        for callback in callbacks if several else (callbacks,):
            methods = {name: getattr(callback, name) for name in HOOKS if callable(getattr(callback, name, None))}
            if not methods and callable(callback):
                methods = {"on_epoch": callback}
            if not methods or isinstance(callback, type):
                raise SpecError(
                    f"callbacks: expected a callable such as kapsi.CsvLog(path), or an object with {', '.join(HOOKS)}; "
                    f"got {callback!r}"
                )
            for name, method in methods.items():
                self._hooks[name].append(method)

    def on_step(self, record: Step) -> bool:
        """Return whether a callback stops training after a step."""
        return _any(self._hooks["on_step"], record)

    def on_epoch(self, record: Epoch) -> bool:
        """Return whether a callback stops training after an epoch."""
        return _any(self._hooks["on_epoch"], record)

    def on_end(self, records: list[Epoch]) -> None:
        """Report the end of training."""
        _any(self._hooks["on_end"], records)

    @property
    def of_steps(self) -> bool:
        """Whether any callback has `on_step`."""
        return bool(self._hooks["on_step"])


def _any(hooks: list[Callable[[Any], Any]], record: Any) -> bool:
    """Call all hooks, and return whether any result is true."""
    answers = [bool(hook(record)) for hook in hooks]
    return any(answers)
