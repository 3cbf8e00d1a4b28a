"""Options of estimators as recipes, specifications and training options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from kapsi.errors import SpecError, nearest, refuse, unknown
from kapsi.expansion import Expansion
from kapsi.function import coerce, options_of
from kapsi.migrate import TRAINING_OPTIONS
from kapsi.recipes.base import Recipe
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec
from kapsi.training.config import TrainConfig

__all__ = ["device_of", "recipe_of", "spec_of", "training_of"]

OWNERS = {"seed": "random_state", "class_weights": "class_weight", "epochs": "max_epochs", "standardize": ""}
"""Options of training set by an option of the estimator, or without effect."""


def recipe_of(recipe: Any, options: Mapping[str, Any]) -> Recipe:
    """Return a recipe with some options replaced.

    Args:
        recipe: a name, a mapping with a kind, or a recipe.
        options: options of the recipe by name; None for the default.

    Raises:
        SpecError: an unknown recipe, or an unknown option of the recipe.
    """
    found: Recipe = coerce(Recipe, recipe, "recipe")
    given = {name: value for name, value in options.items() if value is not None}
    known = {field.name for field in options_of(type(found))}
    for name in given:
        if name not in known:
            has = f"its options are {', '.join(sorted(known))}" if known else "it has none"
            raise SpecError(f"{name}: the recipe {found.name} has no option {name}; {has}, leave {name} out")
    changed: Recipe = dataclasses.replace(found, **given) if given else found  # type: ignore[type-var]
    return changed


def spec_of(spec: Any) -> ModelSpec:
    """Return the specification of a model.

    Args:
        spec: a `ModelSpec` or plain data; or an expansion, by name, as a mapping or as an object, for one layer with a
            dense ψ, a bias and π = 0.
    """
    if isinstance(spec, str | Expansion) or (isinstance(spec, Mapping) and "kind" in spec):
        kappa: Expansion = coerce(Expansion, spec, "spec")
        return ModelSpec((None, None), (LayerSpec((HeadSpec(kappa, bias=True),)),))
    if not isinstance(spec, ModelSpec | Mapping):
        refuse("spec", "a ModelSpec, plain data of one, or an expansion", spec)
    found: ModelSpec = coerce(ModelSpec, spec, "spec")
    return found


def training_of(training: Any, seed: int, options: Mapping[str, Any]) -> TrainConfig:
    """Return training options.

    Args:
        training: a `TrainConfig`, plain data, or None.
        seed: the seed.
        options: fields to replace in `training`; None and "auto" replace nothing.

    Raises:
        SpecError: an option of the estimator, or an option given twice.
    """
    if isinstance(training, Mapping):
        _check_names(training)
    config: TrainConfig = TrainConfig() if training is None else coerce(TrainConfig, training, "training")
    default = TrainConfig()
    changed = [f.name for f in options_of(TrainConfig) if getattr(config, f.name) != getattr(default, f.name)]
    given = {name: value for name, value in options.items() if value is not None and value != "auto"}
    for name in changed:
        if name in OWNERS:
            hint = f"use {OWNERS[name]}" if OWNERS[name] else "the rows are standardized already, leave it out"
            raise SpecError(f"training.{name}: {hint} of the estimator")
        if name in given:
            raise SpecError(f"training.{name}: the option {name} of the estimator is given, too; leave one out")
    return dataclasses.replace(config, seed=seed, **given)


def _check_names(training: Mapping[Any, Any]) -> None:
    """Raise a `SpecError` for unknown options of training; suggest options of training or of the estimator."""
    known = [field.name for field in options_of(TrainConfig)]
    for name in map(str, training):
        if name in known:
            continue
        if name in OWNERS.values():
            raise SpecError(f"training.{name}: is an option of the estimator itself; give {name}=… there")
        renamed = TRAINING_OPTIONS.get(name, next(iter(nearest(name, known)), ""))
        if renamed in OWNERS and not (name not in TRAINING_OPTIONS and TrainConfig.owner_of(name)):
            hint = f"; did you mean {OWNERS[renamed]} of the estimator?" if OWNERS[renamed] else ""
            raise SpecError(f"training: there is no option {name!r}{hint}")
        if not TrainConfig.owner_of(name):
            raise SpecError(f"training: {unknown('option', name, [n for n in known if n not in OWNERS])}")


def device_of(device: Any) -> torch.device | None:
    """Return a device, None for the CPU.

    Raises:
        SpecError: no such device.
    """
    if device is None:
        return None
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, TypeError, AssertionError) as error:
        raise SpecError(f"device: {device!r} is not available ({str(error).splitlines()[0][:100]})") from None
    return found
