"""The catalogue in ONNX: exported models give the same outputs in onnxruntime, for batches of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kapsi.function import LAYER_ROLES, Function, catalogue
from kapsi.testing import examples_of, inputs
from kapsi.testing.cases import perturbed_model

pytestmark = [
    pytest.mark.slow,
    # Of the exporter and of the packages that it uses.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def in_onnxruntime(model: torch.nn.Module, x: torch.Tensor) -> Any:
    """Return a function that runs the exported model."""
    pytest.importorskip("onnxscript", reason="needs the extra onnx: pip install kapsi[onnx]")
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx: pip install kapsi[onnx]")
    runtime.set_default_logger_severity(4)
    batch = torch.export.Dim("batch")
    program = torch.onnx.export(model, (x,), dynamo=True, dynamic_shapes=({0: batch},), verbose=False)
    session = runtime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (entry,) = session.get_inputs()
    return lambda x: torch.from_numpy(session.run(None, {entry.name: x.numpy()})[0])


@pytest.mark.parametrize(
    "cls", [cls for role in LAYER_ROLES for cls in catalogue(role)], ids=lambda cls: f"{cls.role}-{cls.name}"
)
def test_an_exported_model_gives_the_same_outputs(cls: type[Function]) -> None:
    functions = examples_of(cls)[:1] if cls.role == "fusion" else examples_of(cls)
    model = perturbed_model(*functions).float()
    run = in_onnxruntime(model, inputs(3, model.in_features, dtype=torch.float32))
    for rows in (3, 8):
        x = inputs(rows, model.in_features, seed=rows, dtype=torch.float32)
        expected = model(x).detach()
        largest = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(run(x), expected, rtol=1e-3, atol=1e-4 * largest)
