"""Models in files: a safetensors file with the specification in the metadata; written aside and renamed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kapsi.errors import FileError, SpecError, refuse
from kapsi.files import atomic
from kapsi.migrate import migrate_model, migrate_tensor
from kapsi.modules import Model
from kapsi.spec import ModelSpec, from_dict, to_dict
from kapsi.version import __version__

FLOATS = ("F64", "F32", "F16", "BF16")
FORMAT_VERSION = 2
"""Version of the file format; older files are converted, newer files refused."""


def save(model: Model, path: str | Path) -> None:
    """Write a model to a safetensors file, with the specification and the names of frozen parameters in its metadata.

    Args:
        model: a model on any device except `meta`, with any dtype.
        path: the file; an existing file is replaced at the end.

    Raises:
        FileError: the file cannot be written.
        SpecError: not a model, a model on the meta device, or a model that differs from its specification.

    Example:
        >>> import tempfile, torch, kapsi as kp
        >>> model = kp.Model(kp.rpn([2, 3], kp.Taylor(2)), seed=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     kp.save(model, f"{folder}/model.safetensors")
        ...     loaded = kp.load(f"{folder}/model.safetensors")
        >>> torch.equal(loaded(torch.ones(1, 2)), model(torch.ones(1, 2)))
        True
    """
    from safetensors.torch import save_file

    if not isinstance(model, Model):
        refuse("save", "a kapsi.Model", model)
    if not isinstance(path, str | Path):
        refuse("save", "a path", path)
    state = model.state_dict()
    problem = _unsaveable(model, state)
    if problem:
        raise SpecError(f"save: {problem}")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    metadata = {
        "format": "kapsi model",
        "format_version": str(FORMAT_VERSION),
        "kapsi": __version__,
        "spec": json.dumps(to_dict(model.spec)),
        "frozen": json.dumps(frozen),
    }
    with atomic(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode  # safetensors makes files private
        try:
            save_file(tensors, temporary, metadata)
            _order_metadata(temporary)
            temporary.chmod(mode)
        except Exception as error:  # safetensors has a single error type, no OSError
            raise FileError(f"{path}: cannot be written: {error}") from None


def _unsaveable(model: Model, state: dict[str, torch.Tensor]) -> str:
    """Return why a model cannot be saved, or an empty string."""
    if any(tensor.is_meta for tensor in state.values()):
        return "the model is on the meta device and has no values"
    expected = {(name, tensor.shape) for name, tensor in Model(model.spec, device="meta").state_dict().items()}
    other = sorted({name for name, _ in expected ^ {(name, tensor.shape) for name, tensor in state.items()}})
    if other:
        return (
            f"the model differs from its specification, see {', '.join(other[:3])}; "
            "remove parametrizations, pruning and added modules first"
        )
    pointers = [tensor.data_ptr() for tensor in state.values() if tensor.numel()]
    return "" if len(set(pointers)) == len(pointers) else "tensors of the model share memory (tied weights)"


def _order_metadata(file: Path) -> None:
    """Sort the metadata of a safetensors file, written by safetensors in random order."""
    with open(file, "r+b") as handle:
        size = int.from_bytes(handle.read(8), "little")
        header = json.loads(handle.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        ordered = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
        if len(ordered) == size:
            handle.seek(8)
            handle.write(ordered)


def load(path: str | Path, *, device: torch.device | str | None = None) -> Model:
    """Read a model from a file written by `save`.

    Safe for untrusted files: only registered functions are accepted, sizes are checked against the tensors of the file before
    anything is allocated, and nothing is executed.

    Args:
        path: the file, of this or an earlier format version.
        device: device of the tensors; default: the CPU.

    Returns:
        The model in evaluation mode, with the stored dtypes; see `save` for an example.

    Raises:
        SpecError: not a model file, damaged, of a newer version, or with tensors that do not match the specification.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    target = _device(device)
    if not path.is_file():
        raise SpecError(f"{path}: {_no_model_file(path)}")
    try:
        with safe_open(path, framework="pt", device="cpu") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
            return _built(handle.metadata() or {}, slices, handle.get_tensor, str(path)).to(target)
    except (SafetensorError, OSError) as error:
        system = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        damaged = f"is not a safetensors file, or is damaged: {error}"
        raise SpecError(f"{path}: {system if isinstance(error, OSError) else damaged}") from None


def _no_model_file(path: Path) -> str:
    """Return why a path is no model file, with the call for a run folder."""
    if path.is_dir() and (path / "run.json").is_file():
        return f"is a run folder of kapsi fit; kp.load_run({str(path)!r}) returns its model with the preprocessing"
    return "is not a file" if path.exists() else "there is no such file"


def load_bytes(data: bytes, where: str) -> Model:
    """Return the model of the content of a file, as `load`.

    Args:
        data: the content.
        where: prefix of error messages, such as the name of the file.

    Raises:
        SpecError: as `load`.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load as load_tensors

    try:
        tensors = load_tensors(data)
    except SafetensorError as error:
        raise SpecError(f"{where}: is not a safetensors file, or is damaged: {error}") from None
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])  # valid: the tensors are read
    metadata = header.pop("__metadata__", {})
    return _built(metadata, {name: _Entry(entry) for name, entry in header.items()}, tensors.__getitem__, where)


class _Entry:
    """Shape and type of a tensor, by an entry of a header."""

    def __init__(self, entry: dict[str, Any]) -> None:
        self._entry = entry

    def get_shape(self) -> list[int]:
        return list(self._entry["shape"])

    def get_dtype(self) -> str:
        return str(self._entry["dtype"])


def _built(
    metadata: dict[str, str], slices: dict[str, Any], tensor: Callable[[str], torch.Tensor], where: str
) -> Model:
    """Return the model of the metadata and tensors of a file, in evaluation mode."""
    model, frozen = _blank(metadata, slices, where)
    expected = model.state_dict()
    model.load_state_dict({migrate_tensor(name, expected): tensor(name) for name in slices}, assign=True)
    for name, head in model.heads():
        try:
            head.validate()
        except SpecError as error:
            raise SpecError(f"{where}: {name}: {error}") from None
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return model.eval()


def _device(device: torch.device | str | None) -> torch.device:
    try:
        target = torch.device("cpu" if device is None else device)
        torch.empty(0, device=target)
        problem = "a loaded model has values; use kp.Model(spec, device='meta')" if target.type == "meta" else ""
    except (RuntimeError, AssertionError, TypeError) as error:
        problem = f"there is no such device here: {str(error).splitlines()[0]}"
    if problem:
        raise SpecError(f"load(device={device!r}): {problem}")
    return target


def _blank(metadata: dict[str, str], slices: dict[str, Any], where: str) -> tuple[Model, list[str]]:
    """Return the model on the meta device and the names of frozen parameters, after a check of the header."""
    version = metadata.get("format_version", "")
    problem = ""
    if metadata.get("format") != "kapsi model":
        problem = "is not a kapsi model (by its metadata)"
    elif not version.isdecimal() or len(version) > 9:
        problem = f"is damaged: the format version is {version[:20]!r}"
    elif int(version) > FORMAT_VERSION:
        problem = f"has format version {version}, this kapsi reads up to {FORMAT_VERSION}; upgrade kapsi"
    if problem:
        raise SpecError(f"{where}: {problem}")
    try:
        data, frozen = json.loads(metadata.get("spec", "")), json.loads(metadata.get("frozen", "[]"))
        data = migrate_model(data) if int(version) < 2 else data
    except (ValueError, RecursionError):  # also of an integer with too many digits
        raise SpecError(f"{where}: is damaged: its specification is not JSON") from None
    spec: ModelSpec = from_dict(data, ModelSpec, f"{where}: spec")
    repeated = len(spec.widths) - 1 if len(spec.layers) == 1 else 1
    heads = repeated * sum(len(layer.heads) for layer in spec.layers)
    if heads > len(slices):
        # Every ψ has a tensor: do not build a million heads for a file without their tensors.
        raise SpecError(f"{where}: {heads:,} heads, but {len(slices):,} tensors")
    try:
        model = Model(spec, device="meta")
    except SpecError as error:
        raise type(error)(f"{where}: spec: {error}") from None
    expected = model.state_dict()
    slices = {migrate_tensor(name, expected): tensor for name, tensor in slices.items()}
    if isinstance(frozen, list):
        frozen = [migrate_tensor(name, expected) if isinstance(name, str) else name for name in frozen]
    problem = _mismatch(model, slices, frozen)
    if problem:
        raise SpecError(f"{where}: {problem}")
    return model, frozen


def _mismatch(model: Model, slices: dict[str, Any], frozen: Any) -> str:
    """Return the first difference between the tensors of a file and a model, empty if there is none."""
    expected = model.state_dict()
    missing, extra = sorted(expected.keys() - slices.keys()), sorted(slices.keys() - expected.keys())
    if missing or extra:
        named = (("missing", missing), ("unexpected", extra))
        listed = "; ".join(f"{word} {', '.join(names[:5])}" for word, names in named if names)
        return f"the tensors do not fit the specification: {listed}"
    types: set[str] = set()
    for name, tensor in expected.items():
        shape, dtype = tuple(slices[name].get_shape()), str(slices[name].get_dtype())
        if shape != tuple(tensor.shape):
            return f"{name} has shape {shape}, the specification says {tuple(tensor.shape)}"
        allowed = {torch.bool: ("BOOL",), torch.int64: ("I64",)}.get(tensor.dtype, FLOATS)
        if dtype not in allowed:
            return f"{name} has type {dtype}, expected {' or '.join(allowed)}"
        types.add(dtype)
    if len(types.intersection(FLOATS)) > 1:
        return f"its tensors have several types, {', '.join(sorted(types))}; one is expected"
    parameters = dict(model.named_parameters())
    if not isinstance(frozen, list) or not all(isinstance(name, str) and name in parameters for name in frozen):
        return "is damaged: it freezes unknown parameters"
    return ""
