"""Pruning: a smaller model without unimportant edges, nodes, inputs or heads.

What is removed is replaced by its mean on the data: removing a constant part leaves the outputs equal. Edges and nodes are those
of models of univariate functions; inputs and heads are those of any model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kapsi.errors import DataError, SpecError, check_number, refuse
from kapsi.function import coerce
from kapsi.fusion import Sum
from kapsi.hooks import copied
from kapsi.interpret.edge_pruning import without_edges
from kapsi.interpret.importance import importances_of
from kapsi.interpret.rows import ModelRows, model_rows
from kapsi.modules import Layer, Model
from kapsi.process import Affine
from kapsi.spec import STANDARDIZING, ModelSpec
from kapsi.text import counted
from kapsi.training.engine import fit
from kapsi.training.losses import MSE, CrossEntropy, Loss

__all__ = ["Pruned", "prune"]

PARTS = ("edges", "nodes", "inputs", "heads")


@dataclass(frozen=True)
class Pruned:
    """A pruned model and its losses.

    Attributes:
        model: the smaller model, of the same kind as the given one.
        removed: names of the removed parts, by `edges`, `nodes`, `inputs` and `heads`.
        before: loss of the given model on the data; None without targets.
        after: loss without the removed parts.
        fine_tuned: loss after fine-tuning; None without.
        parameters: numbers of trained parameters before and after.
    """

    model: Any
    removed: Mapping[str, tuple[str, ...]]
    before: float | None
    after: float | None
    fine_tuned: float | None
    parameters: tuple[int, int]

    def __repr__(self) -> str:
        names = [counted(len(names), kind[:-1]) for kind, names in self.removed.items() if names]
        parts = [f"{', '.join(names) or 'nothing'} removed"]
        parts.append("parameters {:,} → {:,}".format(*self.parameters))
        if self.before is not None:
            parts.append(f"loss {self.before:.4g} → {self.after:.4g}")
        if self.fine_tuned is not None:
            parts.append(f"fine-tuned {self.fine_tuned:.4g}")
        return f"Pruned({'; '.join(parts)})"


def prune(
    model: Any,
    data: Any = None,
    *,
    edges: float | None = None,
    nodes: float | None = None,
    inputs: float | None = None,
    heads: float | None = None,
    loss: Any = None,
    fine_tune: Mapping[str, Any] | None = None,
    fixed: bool = True,
) -> Pruned:
    """Return a smaller model without its unimportant parts, and the losses before, after, and after fine-tuning.

    Thresholds are importances from which a part stays; parts without a threshold stay. Heads are removed first, then inputs,
    nodes and edges, each by importances of the model before.

    - heads: mean squared change of the outputs, relative to their variance, if the head is replaced by its mean. Heads of
      layers that sum their heads, such as those of the automatic model of a table.
    - inputs: `share` of `kapsi.interpret.importances`, for the columns of the table or the inputs of the model. Any model; a
      removed input still exists, but has no effect.
    - nodes, edges: score of hidden nodes and edges in `kapsi.interpret.attribution`. Models of univariate functions, see
      `kapsi.interpret.edge_functions`. The weights of removed edges have no parameters (masked ψ), and removed nodes are gone.

    Args:
        model: a `kp.Model`, a run of `kp.load_run`, or a fitted estimator; not changed.
        data: rows x, or (x, y) with targets for the losses: tensors for a model, a frame or array and targets as for `fit`
            for an estimator or run; None: the rows that a run keeps.
        edges, nodes, inputs, heads: largest importance of removed parts, at least 0.
        loss: a loss or its name; None: cross-entropy for classes, else mean squared error.
        fine_tune: options of `kp.fit` to train the smaller model on the data, such as `{"epochs": 20}`; None: no training.
        fixed: keep removed edges at zero in training: masked ψ, and a linear remainder becomes a separate head with κ = identity
            after the activation. False: dense ψ with zeros, as required by `kapsi.refine`.

    Raises:
        SpecError: no threshold, nothing would be left, or an unsupported model; the message names the layer and head.
        DataError: rows that do not match the model, or fine-tuning without targets.

    Example:
        >>> import torch, kapsi as kp
        >>> model = kp.Model(kp.rpn([3, 4, 1], kp.Chebyshev(3)), seed=0, dtype=torch.float64)
        >>> x = torch.rand(50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1
        >>> y = torch.sin(x[:, :1]) + x[:, 1:2] ** 2
        >>> records = kp.fit(model, (x, y), epochs=20)
        >>> result = kp.interpret.prune(model, (x, y), edges=0.05, nodes=0.05, fine_tune={"epochs": 20})
        >>> result.parameters[1] < result.parameters[0], result.fine_tuned < result.after
        (True, True)
    """
    limits = {"edges": edges, "nodes": nodes, "inputs": inputs, "heads": heads}
    given = {name: check_number(f"prune({name})", v, 0) for name, v in limits.items() if v is not None}
    if not given:
        raise SpecError(
            "prune: give the largest importance of removed parts, at least one of edges=, nodes=, inputs= and heads=, such as "
            "edges=0.03"
        )
    own = isinstance(fine_tune, Mapping) and all(isinstance(k, str) and k not in ("model", "train") for k in fine_tune)
    if fine_tune is not None and not own:
        refuse("prune(fine_tune)", "a mapping of options of kp.fit, such as {'epochs': 20}, or None", fine_tune)
    task = model_rows(model, data, "prune")
    criterion = _loss(loss, task.y)
    if task.y is not None:
        y = task.y
        if not (criterion.classes or y.is_floating_point()):  # integers as values
            y = y.to(task.x.dtype).reshape(len(y), -1)
            task = dataclasses.replace(task, y=y)
        criterion.check_targets(y, task.model.out_features, "prune")
    if fine_tune is not None and task.y is None:
        raise DataError("prune(fine_tune): fine-tuning needs targets; give the data as (x, y)")
    fixed = coerce(bool, fixed, "prune(fixed)")
    small = task.model
    removed: dict[str, tuple[str, ...]] = dict.fromkeys(PARTS, ())
    if "heads" in given:
        small, removed["heads"] = _without_heads(small, task.x, given["heads"])
    if "inputs" in given:
        small, removed["inputs"] = _without_inputs(small, task, given["inputs"], fixed=fixed)
    if "edges" in given or "nodes" in given:
        small, removed["nodes"], removed["edges"] = without_edges(
            small, task.x, given.get("edges"), given.get("nodes"), fixed=fixed
        )
    before, after, tuned = _error(task.model, task, criterion), _error(small, task, criterion), None
    if fine_tune is not None:
        options = {"loss": criterion, **fine_tune}
        fit(small, (task.x, task.y), **options)
        small.train(task.model.training)
        tuned = _error(small, task, criterion)
    counts = [sum(p.numel() for p in m.parameters()) for m in (task.model, small)]
    return Pruned(task.wrapped(small), removed, before, after, tuned, (counts[0], counts[1]))


def _loss(loss: Any, y: Tensor | None) -> Loss:
    default = MSE() if y is None or y.is_floating_point() else CrossEntropy()
    found: Loss = default if loss is None else coerce(Loss, loss, "prune(loss)")
    return found


@torch.no_grad()
def _error(model: Model, task: ModelRows, loss: Loss) -> float | None:
    """Return the mean loss of a model on the rows, None without targets."""
    if task.y is None:
        return None
    was_training = model.training
    outputs = model.eval()(task.x)
    model.train(was_training)
    return float(loss.mean(outputs, task.y))


# ------------------------------------------------------------------------------------------------ heads


@torch.no_grad()
def _without_heads(model: Model, x: Tensor, limit: float) -> tuple[Model, tuple[str, ...]]:
    """Return a model without the heads of an importance up to a limit, and their names."""
    was_training = model.training
    model.eval()
    outputs = model(x)
    variance = float(outputs.var(0, correction=0).sum()) or 1.0
    specs, removed, means, inputs = [], [], [], x
    layers = model.check_layers("prune")
    for number, layer in enumerate(layers):
        heads = layer.check_heads("prune")
        parts = [head(inputs) for head in heads] if len(heads) > 1 and isinstance(layer.spec.fusion, Sum) else []
        total, gone = sum(parts) if parts else None, []
        for i, part in enumerate(parts):
            change = total - part + part.mean(0)
            change = layer.output(change)
            for later in layers[number + 1 :]:
                change = later(change)
            if float((change - outputs).square().mean(0).sum()) / variance <= limit:
                gone.append(i)
        if parts and len(gone) == len(parts):
            raise SpecError(
                f"prune: no head of layers.{number} would be left; use a lower threshold than heads={limit:g}"
            )
        removed += [f"layers.{number}.heads.{i}" for i in gone]
        means.append((gone, sum((parts[i].mean(0) for i in gone), torch.zeros(layer.out_features).to(x))))
        kept = [spec for i, spec in enumerate(layer.spec.heads) if i not in gone]
        if gone:
            kept[0] = dataclasses.replace(kept[0], bias=True)
        specs.append(dataclasses.replace(layer.spec, heads=tuple(kept)))
        inputs = layer(inputs)
    model.train(was_training)
    if not removed:
        return model, ()
    smaller = Model(ModelSpec(model.spec.widths, tuple(specs)), device="meta", dtype=x.dtype).to_empty(device=x.device)
    for old, new, (gone, constant) in zip(layers, smaller.check_layers("prune"), means, strict=True):
        _copy_layer(old, new, gone, constant)
    return smaller.train(was_training), tuple(removed)


def _copy_layer(old: Layer, new: Layer, gone: Sequence[int], constant: Tensor) -> None:
    """Copy the tensors of a layer without some heads; `constant` is added to the bias of the first head."""
    heads = [head for i, head in enumerate(old.check_heads("prune")) if i not in gone]
    for source, target in zip(heads, new.check_heads("prune"), strict=True):
        owner = source._owner[0] if source._owner else source
        shared = {n: t for n, t in owner.state_dict().items() if n.startswith(("kappa.", "before.", "after."))}
        state = {**shared, **source.state_dict()}
        for name, tensor in target.state_dict().items():
            tensor.copy_(state[name]) if name in state else tensor.zero_()
        frozen = dict(source.named_parameters())
        for name, parameter in target.named_parameters():
            parameter.requires_grad_(name not in frozen or frozen[name].requires_grad)
    new.fusion.load_state_dict(old.fusion.state_dict())
    new.output.load_state_dict(old.output.state_dict())
    bias = new.check_heads("prune")[0].bias
    if bias is not None:
        bias.add_(constant)


# ------------------------------------------------------------------------------------------------ inputs


@torch.no_grad()
def _without_inputs(model: Model, task: ModelRows, limit: float, *, fixed: bool) -> tuple[Model, tuple[str, ...]]:
    """Return a model that replaces unimportant inputs by their means, and the names of their columns."""
    shares = {one.column: one.share for one in importances_of(dataclasses.replace(task.seen, y=None))}
    gone = [column for column in task.seen.columns if shares.get(column.name, 0.0) <= limit]
    if not gone:
        return model, ()
    if len(gone) == len(task.seen.columns):
        raise SpecError(f"prune: no input would be left; use a lower threshold than inputs={limit:g}")
    indices = torch.from_numpy(np.concatenate([column.inputs for column in gone])).to(task.x.device)
    names = tuple(column.name for column in gone)
    try:
        return without_edges(model, task.x, None, None, fixed=fixed, inputs=indices)[0], names
    except SpecError:
        return _constant_inputs(model, task.x, indices), names


def _constant_inputs(model: Model, x: Tensor, indices: Tensor) -> Model:
    """Return a model behind a fixed affine layer that replaces some inputs by their means."""
    smaller = copied(model)
    if model.standardized:
        # The mean of a standardized input is 0.
        smaller.layers[0].output[0].get_buffer("scale")[indices] = 0  # type: ignore[index, union-attr]
        return smaller
    spec = dataclasses.replace(STANDARDIZING, output=(Affine(), Affine()))
    first = Layer(x.shape[1], x.shape[1], spec, device=x.device, dtype=x.dtype)
    first.output[0].get_buffer("scale")[indices] = 0
    first.output[1].get_buffer("shift")[indices] = -x.mean(0)[indices]
    smaller.layers.insert(0, first)
    smaller.spec = ModelSpec(
        (x.shape[1], *model.spec.widths), (spec, *(layer for _, _, layer in model.spec.resolved()))
    )
    return smaller.train(model.training)
