"""Progress of a recipe within a run, and comparisons and long fits of heads kept for a resumed run."""

from __future__ import annotations

import hashlib
from typing import Any, cast

from kapsi.errors import SpecError
from kapsi.function import coerce
from kapsi.recipes import CrossFit, HeadRecipe, Recipe, Watch
from kapsi.spec import to_dict
from kapsi.training.checkpoint import Checkpoints, Saved
from kapsi.training.config import TrainConfig

__all__ = ["RunWatch"]


class RunWatch(Watch):
    """Calls `on_head` of callbacks, keeps each comparison as a checkpoint, and has a place for those of long fits.

    Args:
        callbacks: a callback or a list of them.
        checkpoints: the checkpoints of the part of the rows, None to keep nothing.
        recipe, training: the configuration; comparisons of another one are not used.
    """

    def __init__(self, callbacks: Any, checkpoints: Checkpoints | None, recipe: Recipe, training: TrainConfig) -> None:
        self.callbacks = callbacks if isinstance(callbacks, list | tuple) else (callbacks,)
        self.parent = checkpoints
        self.run = {"recipe": to_dict(recipe), "training": to_dict(training)}

    def on_head(self, name: str) -> None:
        for callback in self.callbacks:
            if hasattr(callback, "on_head"):
                callback.on_head(name)

    def keep(self, name: str, crossed: CrossFit) -> None:
        if self.parent is not None and self.parent.worth():
            data = {**self._context(name), "chosen": to_dict(crossed.recipe), "seconds": crossed.seconds}
            self._part("head", name).write(Saved(1, {"outputs": crossed.outputs}, data))

    def kept(self, name: str) -> CrossFit | None:
        if self.parent is None or not self.parent.resume:
            return None
        saved = self._part("head", name).latest()
        if saved is None or {key: saved.data.get(key) for key in self._context(name)} != self._context(name):
            return None
        try:
            recipe = cast(HeadRecipe, coerce(Recipe, saved.data["chosen"], "checkpoint"))
        except SpecError:  # of an earlier version
            return None
        return CrossFit(saved.tensors["outputs"], recipe, saved.data["seconds"])

    def checkpoints(self, head: HeadRecipe) -> Checkpoints | None:
        return None if self.parent is None else self._part("fit", str(to_dict(head)))

    def _context(self, name: str) -> dict[str, Any]:
        """Return what must be equal in the resumed run."""
        return {"head": name, **self.run, **(self.parent.context if self.parent is not None else {})}

    def _part(self, kind: str, name: str) -> Checkpoints:
        return cast(Checkpoints, self.parent).part(f"{kind}-{hashlib.sha256(name.encode()).hexdigest()[:12]}")
