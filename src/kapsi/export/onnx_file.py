"""ONNX files: inputs by name of the column, labels with probabilities or values in the unit of the target as outputs."""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from kapsi.errors import FileError, SpecError
from kapsi.export.interface import FittedTable, interface
from kapsi.export.numeric import NumericPart
from kapsi.export.texts_and_images import UNSEEN
from kapsi.export.torch_file import exported_program

__all__ = ["OPSET", "onnx_bytes"]

OPSET = 18
"""Version of the operators; runtimes of 2023 and later have it."""

ML, ML_OPSET = "ai.onnx.ml", 2
"""Domain and version of `LabelEncoder`, which maps strings to codes."""

BATCH = "rows"
"""Name of the number of rows in shapes."""

LARGEST = 2**31 - 1
"""Largest size of an ONNX file, a limit of its format."""


def onnx_bytes(model: FittedTable) -> bytes:
    """Return a model of a table as the content of an ONNX file.

    Each column is an input of shape `(rows, 1)`: float64 for numbers and dates (seconds since 1970, UTC), strings for categories.
    Missing are NaN and the empty string. A text is `(rows, words)`, strings, an image `(rows, height, width)` or
    `(rows, height, width, 3)`, uint8. Outputs are `prediction` `(rows,)` and, for classes, `probabilities` `(rows, classes)`.

    Args:
        model: the model with preprocessing.

    Raises:
        SpecError: a column or a function without a form in ONNX, or without the extra `onnx`.
        FileError: a model of 2 GB or more.
    """
    onnx = _packages()
    part = NumericPart(model.model, model.preprocessing, model.scale)
    with _quiet():  # the optimizer takes means below 1e-8 for zero, and drops them
        program = torch.onnx.export(
            exported_program(part), dynamo=True, opset_version=OPSET, verbose=False, optimize=False
        )
    if program is None:
        raise SpecError("export: torch.onnx returned no program; upgrade torch and onnxscript")
    proto = _with_columns(onnx, program.model_proto, model)
    if proto.ByteSize() > LARGEST:
        raise FileError(f"export: {proto.ByteSize():,} bytes do not fit into an ONNX file of at most 2 GB; use torch")
    onnx.checker.check_model(proto)
    content: bytes = proto.SerializeToString(deterministic=True)
    return content


def _packages() -> Any:
    """Return the module onnx, after a check of the packages that the exporter needs."""
    try:
        import onnx
        import onnx.checker
        import onnx.compose
        import onnx.helper
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise SpecError(f"export: ONNX needs the package {error.name or 'onnx'}: pip install 'kapsi[onnx]'") from None
    return onnx


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of the exporter and of its packages, such as a missing torchvision."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _with_columns(onnx: Any, proto: Any, model: FittedTable) -> Any:
    """Return the graph of the numeric part with inputs by column and outputs by label.

    Args:
        onnx: the module.
        proto: the numeric part, with the inputs numbers and codes and one output.
        model: the model.
    """
    helper, types, facts = onnx.helper, onnx.TensorProto, interface(model)
    names = [column["name"] for column in facts["columns"]]
    prefix = "kapsi/"  # of inner names, so that no column has one of them
    while any(name.startswith(prefix) for name in names):
        prefix += "/"
    proto = onnx.compose.add_prefix(proto, prefix)
    numbers, codes, *others = (entry.name for entry in proto.graph.input)
    parts: dict[str, list[str]] = {numbers: [], codes: []}
    nodes, inputs = [], []
    for column in facts["columns"]:
        name, kind, code = column["name"], column["kind"], f"{prefix}code of {column['name']}"
        element, sizes = _tensor(types, column)
        inputs.append(helper.make_tensor_value_info(name, element, [BATCH, *sizes]))
        if "codes" in column:
            code = others.pop(0) if kind == "text" else code
            known = {"keys_strings": list(column["codes"]), "values_int64s": list(column["codes"].values())}
            nodes.append(
                helper.make_node("LabelEncoder", [name], [code], code, domain=ML, default_int64=UNSEEN, **known)
            )
        if kind == "image":
            nodes.append(helper.make_node("Identity", [name], [others.pop(0)]))
            if "missing" in column:
                inputs.append(helper.make_tensor_value_info(column["missing"], types.BOOL, [BATCH, 1]))
                nodes.append(helper.make_node("Identity", [column["missing"]], [others.pop(0)]))
        elif kind != "text":
            parts[codes if kind == "category" else numbers].append(code if kind == "category" else name)
    nodes += [helper.make_node("Concat", each, [whole], whole, axis=1) for whole, each in parts.items() if each]
    known_rows = next((whole for whole, each in parts.items() if each), f"{prefix}rows")
    if known_rows not in parts:
        nodes.append(helper.make_node("Flatten", [proto.graph.input[2].name], [known_rows], axis=1))
    for whole, element in ((numbers, types.DOUBLE), (codes, types.INT64)):
        if not parts[whole]:
            nodes += _no_columns(onnx, proto.graph, whole, known_rows, element)
    tail, outputs = _outputs(onnx, proto.graph, model, prefix, names)
    nodes = [*nodes, *proto.graph.node, *tail]
    for node in nodes:
        for field in ("metadata_props", "doc_string"):  # the exporter's traces, with names of local files
            node.ClearField(field)
    for field, entries in (("input", inputs), ("node", nodes), ("output", outputs), ("value_info", [])):
        proto.graph.ClearField(field)
        getattr(proto.graph, field).extend(entries)
    proto.opset_import.append(helper.make_opsetid(ML, ML_OPSET))
    proto.producer_name, proto.producer_version, proto.graph.name = "kapsi", facts["kapsi"], "kapsi"
    proto.ClearField("metadata_props")
    helper.set_model_props(proto, {"kapsi": json.dumps(facts, ensure_ascii=False)})
    return proto


def _tensor(types: Any, column: dict[str, Any]) -> tuple[int, list[str | int]]:
    """Return the type of the values of a column, and the sizes of those of a row."""
    if column["kind"] == "text":
        return types.STRING, [f"words of {column['name']}"]
    if column["kind"] == "image":
        return types.UINT8, [column["height"], column["width"], *([3] if column["channels"] == 3 else [])]
    return types.STRING if column["kind"] == "category" else types.DOUBLE, [1]


def _no_columns(onnx: Any, graph: Any, name: str, other: str, kind: int) -> list[Any]:
    """Return nodes for a matrix without columns, with the rows of another: the graph may read their number from it."""
    ends, axis, part = (f"{name} {word}" for word in ("ends", "axis", "part"))
    for constant, value in ((ends, 0), (axis, 1)):
        graph.initializer.append(onnx.helper.make_tensor(constant, onnx.TensorProto.INT64, [1], [value]))
    slice_ = onnx.helper.make_node("Slice", [other, ends, ends, axis], [part])
    return [slice_, onnx.helper.make_node("Cast", [part], [name], to=kind)]


def _outputs(onnx: Any, graph: Any, model: FittedTable, prefix: str, names: list[str]) -> tuple[list[Any], list[Any]]:
    """Return nodes from the output of the numeric part to the outputs of the model, and these."""
    helper, types = onnx.helper, onnx.TensorProto
    (values,) = (entry.name for entry in graph.output)
    prediction, probabilities = (_free(name, names) for name in ("prediction", "probabilities"))
    if model.classes is None:
        several = [len(model.target)] if isinstance(model.target, tuple) else []
        nodes = [helper.make_node("Identity", [values], [prediction])]
        return nodes, [helper.make_tensor_value_info(prediction, types.DOUBLE, [BATCH, *several])]
    kind = {str: types.STRING, bool: types.BOOL, int: types.INT64}[type(model.classes[0])]
    labels, best = f"{prefix}labels", f"{prefix}best"
    texts = [label.encode() if isinstance(label, str) else label for label in model.classes]
    graph.initializer.append(helper.make_tensor(labels, kind, [len(texts)], texts))
    nodes = [
        helper.make_node("ArgMax", [values], [best], axis=1, keepdims=0),
        helper.make_node("Gather", [labels, best], [prediction]),
        helper.make_node("Identity", [values], [probabilities]),
    ]
    return nodes, [
        helper.make_tensor_value_info(prediction, kind, [BATCH]),
        helper.make_tensor_value_info(probabilities, types.DOUBLE, [BATCH, len(texts)]),
    ]


def _free(name: str, names: list[str]) -> str:
    """Return a name that no column has."""
    while name in names:
        name += "_"
    return name
