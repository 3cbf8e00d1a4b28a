"""Expressions of modules: the operations of `torch.export` on arrays of sympy expressions."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import sympy
import torch
from torch import Tensor, nn

from kapsi.errors import FormulaError

Array = np.ndarray[Any, Any]
"""An array of sympy expressions and numbers."""


class _Called(nn.Module):
    """A function of a tensor as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        if isinstance(function, nn.Module):
            self.inner = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def traced(function: Callable[[Tensor], Tensor], inputs: Array, where: str) -> Array:
    """Return the outputs of a function of rows as expressions, (n,).

    Args:
        function: maps (1, m) float64 to (1, n); a module, or any function of operations of torch.
        inputs: the expressions of the inputs, (m,).
        where: name of the function, for messages.

    Raises:
        FormulaError: an operation without closed form.

    Example:
        >>> x, y = sympy.symbols("x y")
        >>> traced(lambda t: t[:, :1] * t[:, 1:].exp(), np.array([x, y]), "example").tolist()
        [x*exp(y)]
    """
    example = torch.linspace(0.1, 0.2, len(inputs), dtype=torch.float64)[None]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = torch.export.export(_Called(function), (example,), strict=False)
        except Exception as error:
            raise FormulaError(f"formula: {where} has no closed form: {str(error).splitlines()[0][:200]}") from None
        try:
            result = _Expressions(program.module(), where).run(inputs[None].astype(object))
        except (TypeError, IndexError, ValueError, AttributeError) as error:
            if isinstance(error, FormulaError):
                # The interpreter of graphs appends the place in its own code.
                raise FormulaError(str(error).split("\n", 1)[0]) from None
            raise FormulaError(f"formula: {where} has no closed form: it selects by values of its inputs") from None
    outputs = np.asarray(result.numpy() if isinstance(result, Tensor) else result, dtype=object)
    return np.broadcast_to(outputs.reshape(1, -1)[0], outputs.size)


class _Expressions(torch.fx.Interpreter):
    """Runs a graph on arrays of expressions; operations on numbers alone are those of torch."""

    def __init__(self, module: Any, where: str) -> None:
        super().__init__(module)
        self.where = where

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        return None  # guards of the shapes

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if not _symbolic(args) and not _symbolic(tuple(kwargs.values())):
            return super().call_function(target, args, kwargs)
        name = getattr(target, "__name__", str(target)).split(".")[0]
        operation = _OPERATIONS.get(name)
        if operation is None:
            raise FormulaError(
                f"formula: {self.where} has no closed form (operation {name}); use a linear, polynomial, trigonometric, "
                "spline or tree head, or search a formula of its rows"
            )
        return operation(*map(_array, args), **kwargs)


def _symbolic(values: Sequence[Any]) -> bool:
    return any(isinstance(v, np.ndarray) or (isinstance(v, list | tuple) and _symbolic(v)) for v in values)


def _array(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().numpy()
    return [_array(v) for v in value] if isinstance(value, list) else value


def _elementwise(function: Callable[..., Any]) -> Callable[..., Array]:
    vectorized = np.frompyfunc(lambda *values: function(*map(_number, values)), function.__code__.co_argcount, 1)

    def apply(*arrays: Any, **_: Any) -> Array:
        return np.asarray(vectorized(*arrays), dtype=object)

    return apply


def _number(value: Any) -> Any:
    """Return a plain number as sympy's: integers exact, others with 53 bits."""
    if isinstance(value, sympy.Basic):
        return value
    if isinstance(value, bool | np.bool_):
        return sympy.true if value else sympy.false
    if isinstance(value, int | np.integer) or (float(value).is_integer() and abs(float(value)) < 1e6):
        return sympy.Integer(int(value))
    return sympy.Float(float(value))


def _clamp(x: Array, low: Any = None, high: Any = None, **kwargs: Any) -> Array:
    low, high = kwargs.get("min", low), kwargs.get("max", high)
    for limit, bound in ((low, sympy.Max), (high, sympy.Min)):
        if limit is not None:
            x = np.frompyfunc(lambda v, end, bound=bound: _limited(v, end, bound), 2, 1)(x, limit)
    return np.asarray(x, dtype=object)


def _limited(value: Any, end: Any, bound: Any) -> Any:
    """Return max or min with a bound; bounds beyond 10³⁰ have no effect on finite values."""
    if not isinstance(end, sympy.Basic) and abs(float(end)) > 1e30:
        return value
    return bound(_number(value), _number(end))


def _where(condition: Any, a: Any, b: Any) -> Array:
    def choose(c: Any, u: Any, v: Any) -> Any:
        c = _number(c)
        if c in (sympy.true, sympy.false):
            return u if c == sympy.true else v
        u, v = _number(u), _number(v)
        return u if u == v else sympy.Piecewise((u, c), (v, True))

    return np.asarray(np.frompyfunc(choose, 3, 1)(condition, a, b), dtype=object)


def _linear(x: Any, matrix: Any, bias: Any = None) -> Array:
    return _matmul(x, np.swapaxes(matrix, -1, -2)) + (0 if bias is None else bias)


def _matmul(a: Any, b: Any) -> Array:
    """Return a product of matrices without the terms of zeros."""
    a, b = np.asarray(a, dtype=object), np.asarray(b, dtype=object)
    if a.ndim > 2 or b.ndim > 2:
        return np.asarray(np.matmul(a, b), dtype=object)
    result = np.empty((a.shape[0], b.shape[1]), dtype=object)
    for i, j in np.ndindex(*result.shape):
        pairs = [(u, v) for u, v in zip(a[i], b[:, j], strict=True) if not (_zero(u) or _zero(v))]
        result[i, j] = sympy.Add(*[_number(u) * _number(v) for u, v in pairs])
    return result


def _zero(value: Any) -> bool:
    return not isinstance(value, sympy.Basic) and value == 0


def _reduced(function: Callable[[Sequence[Any]], Any]) -> Callable[..., Array]:
    def apply(x: Array, axes: Any = None, keep: bool = False, **_: Any) -> Array:
        axes = range(x.ndim) if axes is None or axes == [] else [axes] if isinstance(axes, int) else axes
        axes = sorted(a % x.ndim for a in axes)
        rest = [a for a in range(x.ndim) if a not in axes]
        flat = np.transpose(x, [*rest, *axes]).reshape([x.shape[a] for a in rest] + [-1])
        result = np.empty(flat.shape[:-1], dtype=object)
        for index in np.ndindex(*result.shape):
            result[index] = function([_number(v) for v in flat[index]])
        return np.expand_dims(result, tuple(axes)) if keep else result

    return apply


def _slice(x: Array, axis: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    index: list[Any] = [slice(None)] * x.ndim
    index[axis] = slice(start, None if end is None or end > 2**60 else end, step)
    return x[tuple(index)]


def _pad(x: Array, widths: Sequence[int], mode: str = "constant", value: Any = None) -> Array:
    pairs = [(widths[2 * k], widths[2 * k + 1]) for k in range(len(widths) // 2)]
    return np.pad(x, [(0, 0)] * (x.ndim - len(pairs)) + pairs[::-1], constant_values=0 if value is None else value)


def _expand(x: Array, shape: Sequence[int], **_: Any) -> Array:
    full = [x.shape[i - len(shape) + x.ndim] if size == -1 else size for i, size in enumerate(shape)]
    return np.broadcast_to(x, full)


def _softmax(x: Array, axis: int = -1, *_: Any) -> Array:
    exponentials = np.frompyfunc(lambda v: sympy.exp(_number(v)), 1, 1)(x)
    return np.asarray(exponentials / exponentials.sum(axis, keepdims=True), dtype=object)


def _layer_norm(x: Array, shape: Any, weight: Any = None, bias: Any = None, epsilon: float = 1e-5, *_: Any) -> Array:
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    scaled = (x - mean) / np.frompyfunc(lambda v: sympy.sqrt(v + epsilon), 1, 1)(variance)
    return np.asarray(scaled * (1 if weight is None else weight) + (0 if bias is None else bias), dtype=object)


def _split(x: Array, size: Any, axis: int = 0) -> list[Array]:
    ends = np.cumsum(size)[:-1] if isinstance(size, list) else range(size, x.shape[axis], size)
    return list(np.split(x, ends, axis))


def _unbound(x: Array, axis: int = 0) -> list[Array]:
    return [x.take(i, axis) for i in range(x.shape[axis])]


def _leaky(x: Any, slope: Any) -> Any:
    return sympy.Piecewise((x, x > 0), (x * slope, True))


def _cast(x: Array, *_: Any, **__: Any) -> Array:
    """Return conditions as 1 and 0; numbers stay."""

    def number(value: Any) -> Any:
        is_condition = isinstance(value, sympy.logic.boolalg.Boolean) and not value.is_Symbol
        return sympy.Piecewise((1, value), (0, True)) if is_condition else value

    return np.asarray(np.frompyfunc(number, 1, 1)(x), dtype=object)


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value


_SAME = lambda x, *_, **__: x  # noqa: E731
_SHAPE = lambda x, shape: x.reshape(shape)  # noqa: E731
_ZEROS = lambda x, *a, **k: np.zeros(x.shape)  # noqa: E731
_OPERATIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("detach", "clone", "contiguous", "alias", "dropout", "_assert_tensor_metadata"), _SAME),
    "to": _cast,
    "_to_copy": _cast,
    "nan_to_num": _SAME,
    "getitem": operator.getitem,
    "__and__": _elementwise(lambda a, b: sympy.And(a, b)),
    "__or__": _elementwise(lambda a, b: sympy.Or(a, b)),
    "round": _elementwise(lambda a: sympy.floor(a + sympy.Rational(1, 2))),
    "add": lambda a, b, alpha=1, **_: a + (_plain(b) * alpha if alpha != 1 else _plain(b)),
    "sub": lambda a, b, alpha=1, **_: a - (b * alpha if alpha != 1 else b),
    "rsub": lambda a, b, alpha=1, **_: b - (a * alpha if alpha != 1 else a),
    "mul": lambda a, b: a * b,
    "div": _elementwise(lambda a, b: a / b),
    "neg": lambda a: -a,
    "pow": _elementwise(lambda a, b: a**b),
    "square": lambda a: a * a,
    "reciprocal": _elementwise(lambda a: 1 / a),
    "sqrt": _elementwise(lambda a: sympy.sqrt(a)),
    "rsqrt": _elementwise(lambda a: 1 / sympy.sqrt(a)),
    "exp": _elementwise(lambda a: sympy.exp(a)),
    "expm1": _elementwise(lambda a: sympy.exp(a) - 1),
    "log": _elementwise(lambda a: sympy.log(a)),
    "log1p": _elementwise(lambda a: sympy.log(1 + a)),
    "sin": _elementwise(lambda a: sympy.sin(a)),
    "cos": _elementwise(lambda a: sympy.cos(a)),
    "tan": _elementwise(lambda a: sympy.tan(a)),
    "asin": _elementwise(lambda a: sympy.asin(a)),
    "acos": _elementwise(lambda a: sympy.acos(a)),
    "atan": _elementwise(lambda a: sympy.atan(a)),
    "sinh": _elementwise(lambda a: sympy.sinh(a)),
    "cosh": _elementwise(lambda a: sympy.cosh(a)),
    "tanh": _elementwise(lambda a: sympy.tanh(a)),
    "asinh": _elementwise(lambda a: sympy.asinh(a)),
    "acosh": _elementwise(lambda a: sympy.acosh(a)),
    "atanh": _elementwise(lambda a: sympy.atanh(a)),
    "erf": _elementwise(lambda a: sympy.erf(a)),
    "abs": _elementwise(lambda a: sympy.Abs(a)),
    "sign": _elementwise(lambda a: sympy.sign(a)),
    "floor": _elementwise(lambda a: sympy.floor(a)),
    "sigmoid": _elementwise(lambda a: 1 / (1 + sympy.exp(-a))),
    "silu": _elementwise(lambda a: a / (1 + sympy.exp(-a))),
    "relu": _elementwise(lambda a: sympy.Max(0, a)),
    "softplus": _elementwise(lambda a: sympy.log(1 + sympy.exp(a))),
    "leaky_relu": lambda x, slope=0.01: _elementwise(_leaky)(x, slope),
    "gelu": _elementwise(lambda a: a * (1 + sympy.erf(a / math.sqrt(2))) / 2),
    "elu": _elementwise(lambda a: sympy.Piecewise((a, a > 0), (sympy.exp(a) - 1, True))),
    "lt": _elementwise(lambda a, b: a < b),
    "le": _elementwise(lambda a, b: a <= b),
    "gt": _elementwise(lambda a, b: a > b),
    "ge": _elementwise(lambda a, b: a >= b),
    "eq": _elementwise(lambda a, b: sympy.Eq(a, b)),
    "ne": _elementwise(lambda a, b: sympy.Ne(a, b)),
    "logical_and": _elementwise(lambda a, b: sympy.And(a, b)),
    "logical_or": _elementwise(lambda a, b: sympy.Or(a, b)),
    "logical_not": _elementwise(lambda a: sympy.Not(a)),
    "bitwise_and": _elementwise(lambda a, b: sympy.And(a, b)),
    "bitwise_or": _elementwise(lambda a, b: sympy.Or(a, b)),
    "bitwise_not": _elementwise(lambda a: sympy.Not(a)),
    "maximum": _elementwise(lambda a, b: sympy.Max(a, b)),
    "minimum": _elementwise(lambda a, b: sympy.Min(a, b)),
    "isnan": lambda x: np.zeros(x.shape, dtype=bool),
    "masked_fill": lambda x, mask, value: _where(mask, value, x),
    "where": _where,
    "clamp": _clamp,
    "clamp_min": lambda x, low: _clamp(x, low),
    "clamp_max": lambda x, high: _clamp(x, None, high),
    "linear": _linear,
    "matmul": _matmul,
    "mm": _matmul,
    "bmm": _matmul,
    "addmm": lambda bias, a, b: _matmul(a, b) + bias,
    "softmax": _softmax,
    "layer_norm": _layer_norm,
    "sum": _reduced(lambda values: sympy.Add(*values)),
    "mean": _reduced(lambda values: sympy.Add(*values) / len(values)),
    "prod": _reduced(lambda values: sympy.Mul(*values)),
    "any": _reduced(lambda values: sympy.Or(*values)),
    "cumsum": lambda x, axis: np.cumsum(x, axis),
    "cumprod": lambda x, axis: np.cumprod(x, axis),
    "zeros_like": _ZEROS,
    "ones_like": lambda x, *a, **k: np.ones(x.shape),
    "new_full": lambda x, shape, value, **k: np.full(shape, value),
    "new_empty": lambda x, shape, **k: np.zeros(shape),
    "new_zeros": lambda x, shape, **k: np.zeros(shape),
    "new_ones": lambda x, shape, **k: np.ones(shape),
    "full_like": lambda x, value, **k: np.full(x.shape, value),
    "cat": lambda parts, axis=0: np.concatenate([np.asarray(p, dtype=object) for p in parts], axis),
    "stack": lambda parts, axis=0: np.stack([np.asarray(p, dtype=object) for p in parts], axis),
    "split": _split,
    "split_with_sizes": _split,
    "chunk": lambda x, count, axis=0: list(np.array_split(x, count, axis)),
    "unbind": _unbound,
    "flatten": lambda x, start=0, end=-1: x.reshape([*x.shape[: start % x.ndim], -1, *x.shape[end % x.ndim + 1 :]]),
    "unflatten": lambda x, axis, sizes: x.reshape([*x.shape[: axis % x.ndim], *sizes, *x.shape[axis % x.ndim + 1 :]]),
    "view": _SHAPE,
    "reshape": _SHAPE,
    "_unsafe_view": _SHAPE,
    "unsqueeze": lambda x, axis: np.expand_dims(x, axis),
    "squeeze": lambda x, axis: x.squeeze(axis) if x.shape[axis] == 1 else x,
    "permute": lambda x, axes: np.transpose(x, axes),
    "transpose": lambda x, a, b: np.swapaxes(x, a, b),
    "movedim": lambda x, a, b: np.moveaxis(x, a, b),
    "numpy_T": lambda x: x.T,
    "expand": _expand,
    "expand_as": lambda x, other: np.broadcast_to(x, other.shape),
    "repeat": lambda x, counts: np.tile(x, counts),
    "slice": _slice,
    "narrow": lambda x, axis, start, length: _slice(x, axis, start, start + length),
    "select": lambda x, axis, index: x.take(index, axis),
    "index_select": lambda x, axis, index: x.take(index, axis),
    "index": lambda x, index: x[tuple(slice(None) if i is None else i for i in index)],
    "pad": _pad,
}
"""Operations by name, on arrays of expressions and numbers."""
