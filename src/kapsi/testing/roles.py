"""Laws of the functions of one role, and of all examples of a class at once."""

# The first line of a law's docstring is the law: a statement, not a command.
# ruff: noqa: D401

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional as F

from kapsi.calibrate import calibrate
from kapsi.expansion import Expansion, Identity, Taylor
from kapsi.features import Features
from kapsi.function import Function, Params, flatten, options_of
from kapsi.fusion import Fusion
from kapsi.modules import Head, Model, Store
from kapsi.process import InstanceNorm, LayerNorm
from kapsi.reconciliation import Reconciliation
from kapsi.remainder import Remainder
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec
from kapsi.testing.cases import (
    assert_close,
    assert_equal,
    fits,
    gradients_of,
    inputs,
    model_with,
    perturbed_model,
    require,
    seeded,
)
from kapsi.testing.registry import law


@law("function", "expansion")
def columns(function: Expansion) -> None:
    """Factors, out_features, features and the groups of the domain agree on D."""
    norms = any(isinstance(step, LayerNorm | InstanceNorm) for step in function.inner_processes())
    for m in (2, 3, 5) if norms else (1, 2, 3, 5):
        head = Head(m, 1, HeadSpec(expansion=function), seed=0, dtype=torch.float64)
        features = head.expand(inputs(2, m))
        q, t = function.factors(m)
        counts = {
            "factors": q * t,
            "out_features": function.out_features(m),
            "Features.columns": features.columns,
            "Features.dense": features.dense().shape[-1],
            "domain": sum(count for count, _, _ in function.domain(m)),
        }
        require(len(set(counts.values())) == 1, f"{m} inputs: {counts}")
        require(all(low < high for _, low, high in function.domain(m)), f"the domain is {function.domain(m)}")


@law("function", "expansion")
def features(function: Expansion) -> None:
    """Every method of Features agrees with the dense form of κ(x)."""
    m = 3
    head = Head(m, 1, HeadSpec(expansion=function), seed=0, dtype=torch.float64)
    for lead in ((), (4,), (2, 3)):
        kappa = head.expand(inputs(*lead, m))
        for label, structure in (("κ", kappa), ("the layer norm of κ", kappa.normalized(1e-5))):
            _same_as_dense(structure, label)
        expected = F.layer_norm(kappa.dense(), (kappa.columns,), eps=1e-5)
        assert_close(kappa.normalized(1e-5).dense(), expected, "the layer norm of κ", 1e-8)


@law("function", "expansion", "remainder")
def calibrated(function: Expansion | Remainder) -> None:
    """Calibration keeps names, shapes and types of all tensors, is bitwise repeatable, and leaves finite outputs.

    Tested on ordinary data, with a constant column, with a single row, and far from the default range.
    """
    model = model_with(function)
    m = model.in_features
    x = torch.randn(64, m, generator=seeded(7), dtype=torch.float64) * 2 + 1
    constant = x.clone()
    constant[:, 0] = 3.0
    shapes = {name: (t.shape, t.dtype) for name, t in model.state_dict().items()}
    for label, data in {"data": x, "a constant": constant, "one row": x[:1], "far": x * 1e3 - 5e3}.items():
        state = torch.get_rng_state()
        first, second = (calibrate(model_with(function), data) for _ in range(2))
        require(torch.equal(state, torch.get_rng_state()), "calibration moves torch's global generator")
        result = {name: (t.shape, t.dtype) for name, t in first.state_dict().items()}
        require(result == shapes, f"{label}: names, shapes or types of the tensors change")
        for name, tensor in first.state_dict().items():
            assert_equal(second.state_dict()[name], tensor, f"{label}: {name} calibrated again")
        y = first(data)
        require(bool(y.isfinite().all()), f"{label}: an output is not finite after calibration")


@law("function")
def learnable(function: Function) -> None:
    """The option `learnable` changes neither names nor values of tensors, in a model and in a file."""
    if "learnable" not in (field.name for field in options_of(type(function))):
        return
    models = [model_with(dataclasses.replace(function, learnable=choice)) for choice in (False, True)]  # type: ignore[type-var]
    fixed, learned = (model.state_dict() for model in models)
    require(list(fixed) == list(learned), f"the names change: {sorted(set(fixed) ^ set(learned))}")
    more = len(list(models[1].parameters())) - len(list(models[0].parameters()))
    require(more > 0, "learnable=True adds no parameter")
    x = inputs(20, models[0].in_features)
    data = torch.randn(50, models[0].in_features, generator=seeded(7), dtype=torch.float64)
    calibrate(models[0], data)
    models[1].load_state_dict(models[0].state_dict())
    assert_equal(models[1](x), models[0](x), "the output with the tensors learnable")
    calibrate(models[1], data)
    assert_equal(models[1](x), models[0](x), "the output calibrated with the tensors learnable")
    names = [name for name, tensor in models[1].named_parameters() if ".kappa." in name or ".pi." in name]
    leaves = [models[1].get_parameter(name) for name in names]
    for name, gradient in zip(names, gradients_of(models[1](x), leaves), strict=True):
        require(bool(gradient.isfinite().all()), f"the gradient of {name} is not finite")


def _same_as_dense(kappa: Features, label: str) -> None:
    dense = kappa.dense()
    assert_close(kappa.total(), dense.sum(-1), f"total of {label}", 1e-9)
    assert_close(kappa.square_norm(), dense.square().sum(-1), f"square_norm of {label}", 1e-9)
    generator = seeded(5)
    for shape in ((1,), (2,), (kappa.columns + 1,), (1, 1), (2, 1), (2, kappa.columns)):
        matrix = torch.randn(*shape, kappa.columns, generator=generator, dtype=torch.float64)
        expected = torch.einsum("...d,rd->...r", dense, matrix.flatten(0, -2)).unflatten(-1, shape)
        assert_close(kappa.matmul(matrix), expected, f"{label} times a matrix {tuple(matrix.shape)}", 1e-9)


@law("function", "reconciliation")
def weights(function: Reconciliation) -> None:
    """Every method of Weights agrees with the dense form of ψ(w)."""
    for n, factors in ((4, (3, 4)), (6, (1, 5)), (6, (6, 2)), (6, (3, 2)), (1, (1, 1))):
        width = factors[0] * factors[1]
        for count in (1, 3) if fits(function, n, factors) else ():
            psi = function(_drawn(function.params(n, factors), None if count == 1 else count), n, factors)
            dense = psi.dense()
            require(dense.shape == (count, n, width), f"ψ(w) is {tuple(dense.shape)}, expected {(count, n, width)}")
            require(psi.columns == width, f"columns is {psi.columns}, expected {width}")
            require(psi.channels in ((None,) if count == 1 else (count,)), f"channels is {psi.channels}")
            assert_close(psi.matrix(), dense[0] if count == 1 else dense, "matrix")
            sums = dense.sum(-1)
            assert_close(psi.row_sums(), sums[0] if count == 1 else sums, "row_sums")
            assert_close(psi.merged().dense().sum(0), dense.sum(0), "merged")
            if width > 2:
                sizes = [1, width - 3, 2] if width > 3 else [1, 2]
                pieces = psi.split(sizes)
                if pieces is not None:
                    require([p.columns for p in pieces] == sizes, "the pieces of split have other sizes")
                    assert_close(torch.cat([p.dense() for p in pieces], -1), dense, "split")


def _drawn(params: Params, channels: int | None = None) -> Store:
    """Return initial values of declared tensors in float64, in evaluation mode."""
    store = Store(params, channels, dtype=torch.float64)
    store.reset(seeded(6))
    return store.eval()


@law("function", "reconciliation", "remainder")
@torch.no_grad()
def multilinear(function: Reconciliation | Remainder) -> None:
    """A ψ that declares `multilinear` is linear in each trainable tensor, the others fixed; a π is affine."""
    for n, factors in ((4, (3, 4)), (6, (1, 5)), (6, (6, 2)), (1, (1, 1))) if function.multilinear else ():
        if isinstance(function, Remainder):
            store = _drawn(function.params(4, n))
            x = torch.randn(5, 4, generator=seeded(7), dtype=torch.float64)
            evaluate = functools.partial(function, x, store, n)
        elif fits(function, n, factors):
            store = _drawn(function.params(n, factors))
            evaluate = functools.partial(lambda *arguments: function(*arguments).dense(), store, n, factors)
        else:
            continue
        for name, tensor in store.named_parameters():
            first, second = tensor.clone(), torch.randn(tensor.shape, generator=seeded(8)).double()
            values = []
            for point in (first, second, 2 * first - second, torch.zeros_like(first)):
                tensor.copy_(point)
                values.append(evaluate().clone())
            tensor.copy_(first)
            at_first, at_second, beyond, zero = values
            assert_close(beyond, 2 * at_first - at_second, f"the value at {name} = 2a − b")
            if isinstance(function, Reconciliation):
                assert_close(zero, torch.zeros_like(zero), f"the value at {name} = 0")


@law("function", "reconciliation")
def count(function: Reconciliation) -> None:
    """The number of trainable elements in a head's ψ is l times the channels."""
    for kappa, n in ((Taylor(2), 4), (Taylor(2), 6), (Identity(), 3)):
        for channels in (1, 3) if fits(function, n, kappa.factors(3)) else ():
            head = Head(3, n, HeadSpec(kappa, function, channels=channels), seed=0)
            trainable = sum(parameter.numel() for parameter in head.psi.parameters())
            expected = function.count(n, head.factors) * channels
            require(trainable == expected, f"{trainable} trainable elements, count says {expected}")


@law("function", "remainder", "fusion")
def layer_scale(function: Remainder | Fusion) -> None:
    """Outputs of a layer of one head and of four heads have a standard deviation of ⅓ to 3 at initial values."""
    for count in (1, 4):
        if isinstance(function, Fusion):
            layer = LayerSpec((HeadSpec(Taylor(2)),) * count, function)
        elif count == 1 or any(True for _ in flatten(function.params(8, 8))):
            layer = LayerSpec((HeadSpec(Taylor(2), remainder=function),) * count)
        else:
            continue  # four copies of one function of the inputs are not independent
        model = Model(ModelSpec((8, 8), (layer,)), seed=0)
        deviations = []
        for seed in range(9):
            model.reset_parameters(seed)
            with torch.no_grad():
                deviations.append(float(model(torch.randn(512, 8, generator=seeded(1000 + seed))).std()))
        deviation = sorted(deviations)[len(deviations) // 2]
        require(1 / 3 <= deviation <= 3, f"{count} heads: the standard deviation is {deviation:.3g}")


@law("function", "fusion")
def gain(function: Fusion) -> None:
    """At initial values, fusing independent outputs of unit standard deviation gives the stated standard deviation."""
    for heads in (1, 4, 9):
        outputs = torch.randn(heads, 1024, 16, generator=seeded(8))
        tensors = {name: param.draw(None, seeded(9)) for name, param in flatten(function.params(heads, 16))}
        measured = float(function(outputs, tensors).std())
        stated = function.gain(heads)
        require(0.8 < measured / stated < 1.25, f"{heads} heads: the gain is {measured:.3g}, stated {stated:.3g}")


# ------------------------------------------------------------------------------------------------ laws of a class


@law("class")
def compiles(*functions: Function) -> None:
    """A full graph, equal to eager in value and gradient; other batch sizes need one more compilation in all."""
    for group in _groups(functions):
        model = perturbed_model(*group)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        leaves = list(model.parameters())
        for rows, stance in ((5, "default"), (5, "fail_on_recompile"), (7, "default"), (11, "fail_on_recompile")):
            x = inputs(rows, model.in_features, seed=rows).requires_grad_()
            with torch.compiler.set_stance(stance):
                y = compiled(x)
            expected = model(x)
            assert_close(y, expected, f"the compiled output of {rows} rows")
            ours, theirs = gradients_of(y, [x, *leaves]), gradients_of(expected, [x, *leaves])
            for a, b in zip(ours, theirs, strict=True):
                assert_close(a, b, f"the compiled gradient of {rows} rows")


@law("class")
def exports(*functions: Function) -> None:
    """The exported program takes batches of any size and equals eager."""
    for group in _groups(functions):
        model = perturbed_model(*group)
        m = model.in_features
        with warnings.catch_warnings():
            # Some versions of the exporter warn of deprecated internals.
            warnings.simplefilter("ignore", category=FutureWarning)
            warnings.simplefilter("ignore", category=DeprecationWarning)
            program = torch.export.export(model, (inputs(3, m),), dynamic_shapes=({0: torch.export.Dim("batch")},))
        run = program.module()
        for rows in (3, 8):
            x = inputs(rows, m, seed=rows)
            assert_close(run(x), model(x), f"the exported output of {rows} rows")


def _groups(functions: Sequence[Function]) -> Iterator[Sequence[Function]]:
    """Yield groups for one model each: all functions as heads, or a single fusion."""
    if functions[0].role == "fusion":
        yield from ([function] for function in functions)
    else:
        yield functions
