"""Models in files: one safetensors file with the specification in its metadata; written beside and renamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from kapsi.errors import FileError, SpecError
from kapsi.files import atomic
from kapsi.modules import Model
from kapsi.spec import ModelSpec, from_dict, to_dict
from kapsi.version import __version__

__all__ = ["FORMAT_VERSION", "load", "save"]

FLOATS = ("F64", "F32", "F16", "BF16")
FORMAT_VERSION = 1
"""Version of the file format; a newer file is refused, with the advice to upgrade."""


def save(model: Model, path: str | Path) -> None:
    """Write a model as one safetensors file: all tensors, and in the metadata the specification and what is frozen.

    Args:
        model: on any device, in any type.
        path: the file; an old one is replaced when the new one is whole.

    Raises:
        FileError: the file cannot be written.
        SpecError: no model, or one on the meta device.
    """
    from safetensors.torch import save_file

    if not isinstance(model, Model):
        raise SpecError(f"save: expected a kapsi.Model, got {type(model).__name__}")
    if not isinstance(path, str | Path):
        raise SpecError(f"save: expected a path, got {type(path).__name__}")
    state = model.state_dict()
    if any(tensor.is_meta for tensor in state.values()):
        raise SpecError("save: the model is on the meta device and has no values")
    wanted = {name: tensor.shape for name, tensor in Model(model.spec, device="meta").state_dict().items()}
    other = sorted({name for name, _ in {*wanted.items()} ^ {(name, tensor.shape) for name, tensor in state.items()}})
    if other:
        raise SpecError(
            f"save: the model is not what its specification says, see {', '.join(other[:3])}; "
            "remove parametrizations, pruning and added modules first"
        )
    if len({tensor.data_ptr() for tensor in state.values() if tensor.numel()}) < sum(
        t.numel() > 0 for t in state.values()
    ):
        raise SpecError("save: tensors of the model share memory (tied weights), which the specification does not say")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    metadata = {
        "format": "kapsi model",
        "format_version": str(FORMAT_VERSION),
        "kapsi": __version__,
        "spec": json.dumps(to_dict(model.spec)),
        "frozen": json.dumps(frozen),
    }
    with atomic(path) as beside:
        beside.touch()
        mode = beside.stat().st_mode  # safetensors makes files that only their owner may read
        try:
            save_file(tensors, beside, metadata)
            _order_metadata(beside)
            beside.chmod(mode)
        except Exception as error:  # safetensors has one error type for everything, not an OSError
            raise FileError(f"{path}: cannot be written: {error}") from None


def _order_metadata(file: Path) -> None:
    """Bring the metadata of a safetensors file into alphabetical order: safetensors writes them in a random one."""
    with open(file, "r+b") as handle:
        size = int.from_bytes(handle.read(8), "little")
        header = json.loads(handle.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        ordered = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
        if len(ordered) == size:
            handle.seek(8)
            handle.write(ordered)


def load(path: str | Path, *, device: torch.device | str | None = None) -> Model:
    """Return the model of a file that `save` wrote, in evaluation mode.

    The file may come from a stranger: it can name registered functions only, its sizes are checked against the tensors that
    are really there before anything is allocated, and nothing in it is executed.

    Args:
        path: the file.
        device: where the tensors go, the CPU by default.

    Raises:
        SpecError: not such a file, damaged, of a newer version, or with tensors that do not fit the specification.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    try:
        place = torch.device("cpu" if device is None else device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise SpecError(
            f"load(device={device!r}): there is no such device here: {str(error).splitlines()[0]}"
        ) from None
    if place.type == "meta":
        raise SpecError(
            "load(device='meta'): a loaded model has values; make a model without with kp.Model(spec, device='meta')"
        )
    if not path.is_file():
        raise SpecError(f"{path}: {'is not a file' if path.exists() else 'there is no such file'}")
    try:
        with safe_open(path, framework="pt", device="cpu") as handle:
            metadata = handle.metadata() or {}
            model, frozen = _blank(metadata, {name: handle.get_slice(name) for name in handle.keys()}, str(path))  # noqa: SIM118
            tensors = {name: handle.get_tensor(name) for name in model.state_dict()}
    except SafetensorError as error:
        raise SpecError(f"{path}: is not a safetensors file, or is damaged: {error}") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}") from None
    model.load_state_dict(tensors, assign=True)
    for name, head in model.heads():
        try:
            head.validate()
        except SpecError as error:
            raise SpecError(f"{path}: {name}: {error}") from None
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return model.to(place).eval()


def _blank(metadata: dict[str, str], slices: dict[str, Any], where: str) -> tuple[Model, list[str]]:
    """Return the model on the meta device, which allocates nothing, once the header agrees with it."""
    if metadata.get("format") != "kapsi model":
        raise SpecError(f"{where}: is not a kapsi model (its metadata does not say so)")
    version = metadata.get("format_version", "")
    if not version.isdecimal() or len(version) > 9:
        raise SpecError(f"{where}: is damaged: the format version is {version[:20]!r}")
    if int(version) > FORMAT_VERSION:
        raise SpecError(
            f"{where}: has format version {version}, this kapsi reads up to {FORMAT_VERSION}; upgrade kapsi"
        )
    try:
        data, frozen = json.loads(metadata.get("spec", "")), json.loads(metadata.get("frozen", "[]"))
    except (ValueError, RecursionError):  # also of an integer with too many digits
        raise SpecError(f"{where}: is damaged: its specification is not JSON") from None
    spec: ModelSpec = from_dict(data, ModelSpec, f"{where}: spec")
    several = len(spec.widths) - 1 if len(spec.layers) == 1 else 1
    heads = several * sum(len(layer.heads) for layer in spec.layers)
    if heads > len(slices):
        # Every ψ has a tensor: do not build a million heads to learn that theirs are not there.
        raise SpecError(f"{where}: {heads:,} heads, but {len(slices):,} tensors")
    try:
        model = Model(spec, device="meta")
    except SpecError as error:
        raise SpecError(f"{where}: spec: {error}") from None
    expected = model.state_dict()
    missing, extra = sorted(expected.keys() - slices.keys()), sorted(slices.keys() - expected.keys())
    if missing or extra:
        listed = [f"missing {', '.join(missing[:5])}"] * bool(missing) + [f"unexpected {', '.join(extra[:5])}"] * bool(
            extra
        )
        raise SpecError(f"{where}: the tensors do not fit the specification: {'; '.join(listed)}")
    kinds: set[str] = set()
    for name, tensor in expected.items():
        shape, kind = tuple(slices[name].get_shape()), str(slices[name].get_dtype())
        if shape != tuple(tensor.shape):
            raise SpecError(f"{where}: {name} has shape {shape}, the specification says {tuple(tensor.shape)}")
        allowed = {torch.bool: ("BOOL",), torch.int64: ("I64",)}.get(tensor.dtype, FLOATS)
        if kind not in allowed:
            raise SpecError(f"{where}: {name} has type {kind}, expected {' or '.join(allowed)}")
        kinds.add(kind)
    if len(kinds.intersection(FLOATS)) > 1:
        raise SpecError(f"{where}: its tensors have several types, {', '.join(sorted(kinds))}; one is expected")
    parameters = dict(model.named_parameters())
    if not isinstance(frozen, list) or not all(isinstance(name, str) and name in parameters for name in frozen):
        raise SpecError(f"{where}: is damaged: it freezes parameters that are not there")
    return model, frozen
