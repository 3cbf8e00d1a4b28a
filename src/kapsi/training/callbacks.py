"""Callbacks: called with records during training; a true return value stops training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from kapsi.errors import SpecError, shown
from kapsi.training.losses.base import name_of
from kapsi.training.records import Epoch, Step

HOOKS = ("on_step", "on_epoch", "on_end")


class Callback:
    """Optional base class of callbacks.

    Any object with at least one of these methods is a callback, and any other callable is called as `on_epoch`.

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
        callbacks = () if callbacks is None else callbacks
        several = isinstance(callbacks, Sequence) and not isinstance(callbacks, str)
        self._hooks: dict[str, list[Callable[[Any], Any]]] = {name: [] for name in HOOKS}
        for callback in callbacks if several else (callbacks,):
            methods = {name: getattr(callback, name) for name in HOOKS if callable(getattr(callback, name, None))}
            if not methods and callable(callback):
                methods = {"on_epoch": callback}
            if not methods or isinstance(callback, type):
                name = getattr(callback, "__name__", "")
                raise SpecError(
                    f"callbacks: expected a callable such as kapsi.CsvLog(path), or an object with {', '.join(HOOKS)}; "
                    f"got {f'the class {name}; call it: {name}()' if isinstance(callback, type) else repr(callback)}"
                )
            for name, method in methods.items():
                if not _takes_one_argument(method):
                    raise SpecError(f"callbacks: {name_of(method)} must accept one argument, the record of {name}")
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
    def any(self) -> bool:
        """Whether there is any callback."""
        return any(self._hooks.values())

    @property
    def of_steps(self) -> bool:
        """Whether any callback has `on_step`."""
        return bool(self._hooks["on_step"])


def _any(hooks: list[Callable[[Any], Any]], record: Any) -> bool:
    """Call all hooks, and return whether any result is true."""
    stop = False
    for hook in hooks:
        answer = hook(record)
        try:
            stop |= bool(answer)
        except (TypeError, ValueError, RuntimeError):  # of an array or a tensor
            raise SpecError(
                f"callbacks: {name_of(hook)} must return a true value to stop training or None, got {shown(answer)}"
            ) from None
    return stop


def _takes_one_argument(method: Callable[[Any], Any]) -> bool:
    try:
        inspect.signature(method).bind(None)
    except ValueError:  # built-in, without a signature
        return True
    except TypeError:
        return False
    return True
