"""Model files: what is saved comes back, and what is not a model is one error and no harm."""

from __future__ import annotations

import json
import pickle
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import kapsi as kp
from kapsi.model_file import FORMAT_VERSION
from kapsi.testing import WatchSizes, inputs

SPEC = kp.ModelSpec(
    (3, 4, 2),
    (
        kp.LayerSpec(
            (kp.HeadSpec(kp.BSpline(3), kp.Masked(), bias=True), kp.HeadSpec(kp.Taylor(2), kp.LowRank(), channels=2))
        ),
        kp.LayerSpec(
            (kp.HeadSpec(reconciliation=kp.ConstantReconciliation(), remainder=kp.LinearRemainder()),),
            output=("batch_norm",),
        ),
    ),
)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "model.safetensors"


def saved(path: Path, spec: kp.ModelSpec = SPEC) -> kp.Model:
    model = kp.Model(spec, seed=0).eval()
    kp.save(model, path)
    return model


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as handle:
        return dict(handle.metadata() or {})


def rewrite(path: Path, tensors: dict[str, torch.Tensor] | None = None, **metadata: Any) -> None:
    """Write a file of the same kind with other metadata (None removes an entry) or other tensors."""
    entries = {**metadata_of(path), **metadata}
    save_file(
        load_file(path) if tensors is None else tensors, path, {k: v for k, v in entries.items() if v is not None}
    )


def refused(path: Path, *parts: str) -> str:
    """Expect one quick error of one line that begins with the path, and that nothing large is made."""
    begin = time.process_time()
    with pytest.raises(kp.SpecError) as caught, WatchSizes() as watch:
        kp.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: "), message
    assert "\n" not in message
    assert len(message) < 2000
    for part in parts:
        assert part in message, message
    assert watch.largest < 10**6
    assert time.process_time() - begin < 20
    return message


# ------------------------------------------------------------------------------------------------ what comes back


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_model_comes_back_in_its_type_with_the_same_bits(dtype, path) -> None:
    model = kp.Model(SPEC, seed=0, dtype=dtype).eval()
    kp.save(model, path)
    loaded = kp.load(path).eval()
    assert loaded.spec == model.spec
    assert {n: (t.dtype, t.shape) for n, t in loaded.state_dict().items()} == {
        n: (t.dtype, t.shape) for n, t in model.state_dict().items()
    }
    x = inputs(5, 3, dtype=dtype)
    assert torch.equal(loaded(x), model(x))
    assert all(
        isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad for parameter in loaded.parameters()
    )


def test_the_file_is_plain_safetensors_with_the_specification(path) -> None:
    model = saved(path)
    metadata = metadata_of(path)
    assert kp.from_dict(json.loads(metadata["spec"])) == SPEC
    assert metadata["format_version"] == str(FORMAT_VERSION)
    assert metadata["kapsi"] == kp.__version__
    tensors = load_file(path)
    assert tensors.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensors[name], tensor)


def test_a_loaded_model_can_be_trained_and_saved_again(path) -> None:
    saved(path)
    model = kp.load(path).train()
    x = inputs(9, 3, dtype=torch.float32)
    model(x).square().sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    kp.save(model, path)
    assert torch.equal(kp.load(path).eval()(x), model.eval()(x))


def test_tensors_that_are_views_are_saved(path) -> None:
    model = kp.Model(kp.rpn([3, 2]), seed=0)
    head = model.layers[0].heads[0]
    head.psi.matrix = torch.nn.Parameter(torch.arange(6.0).reshape(3, 2).t())
    kp.save(model, path)
    assert kp.load(path).layers[0].heads[0].psi["matrix"].tolist() == [[0, 2, 4], [1, 3, 5]]


def test_a_kept_share_of_nothing_is_saved(path) -> None:
    model = kp.Model(kp.rpn([3, 2], reconciliation=kp.Masked(0.0), bias=True), seed=0)
    kp.save(model, path)
    assert torch.equal(kp.load(path)(torch.ones(1, 3)), torch.zeros(1, 2))


def test_paths_may_be_text_and_devices_may_be_named(path) -> None:
    model = saved(path)
    assert torch.equal(kp.load(str(path), device="cpu").eval()(torch.ones(3)), model(torch.ones(3)))


# ------------------------------------------------------------------------------------------------ saving


def test_what_cannot_be_saved(path) -> None:
    with pytest.raises(kp.SpecError, match=r"expected a kapsi\.Model, got Head"):
        kp.save(kp.Head(3, 2), path)
    with pytest.raises(kp.SpecError, match="meta device"):
        kp.save(kp.Model(SPEC, device="meta"), path)
    assert not path.exists()


@pytest.mark.parametrize(
    "error", [RuntimeError("power is out"), OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr
)
@pytest.mark.parametrize("begun", [False, True])
def test_an_interrupted_save_leaves_the_old_file_and_nothing_else(error, begun, path, monkeypatch) -> None:
    old = saved(path)

    def interrupted(tensors: Any, file: Any, metadata: Any) -> None:
        if begun:
            Path(file).write_bytes(b"half")
        raise error

    monkeypatch.setattr("safetensors.torch.save_file", interrupted)
    expected = (KeyboardInterrupt,) if isinstance(error, KeyboardInterrupt) else (kp.KapsiError,)
    with pytest.raises(expected) as caught:
        kp.save(kp.Model(SPEC, seed=1), path)
    if not isinstance(error, KeyboardInterrupt):
        assert path.name in str(caught.value)
        assert str(error.args[-1]) in str(caught.value)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert torch.equal(kp.load(path).eval()(torch.ones(3)), old(torch.ones(3)))


def test_a_folder_in_the_way_is_an_error(tmp_path) -> None:
    (tmp_path / "m").mkdir()
    with pytest.raises(kp.KapsiError, match="m"):
        kp.save(kp.Model(SPEC, seed=0), tmp_path / "m")
    assert [file.name for file in tmp_path.iterdir()] == ["m"]


# ------------------------------------------------------------------------------------------------ files that are no models


def test_what_is_not_there(tmp_path) -> None:
    refused(tmp_path / "none.safetensors", "there is no such file")
    refused(tmp_path, "is not a file")


def test_truncated_files(path) -> None:
    saved(path)
    whole = path.read_bytes()
    for size in (0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused(path, "not a safetensors file, or is damaged")
    path.write_bytes(whole + b"more")
    refused(path, "damaged")


def test_files_of_other_kinds(path) -> None:
    contents = {
        "random": torch.randint(0, 256, (5000,), generator=torch.Generator().manual_seed(0))
        .to(torch.uint8)
        .numpy()
        .tobytes(),
        "zeros": bytes(5000),
        "text": b"widths: [3, 2]\n" * 100,
        "huge header": struct.pack("<Q", 2**62) + b"{}",
    }
    for content in contents.values():
        path.write_bytes(content)
        refused(path, "not a safetensors file")


class Trap:
    """Says when it is unpickled."""

    sprung = False

    def __reduce__(self) -> Any:
        return (setattr, (Trap, "sprung", True))


def test_a_pickle_is_not_executed(path) -> None:
    path.write_bytes(pickle.dumps(Trap()))
    refused(path, "not a safetensors file")
    torch.save({"model": Trap()}, path)
    refused(path, "not a safetensors file")
    assert not Trap.sprung
    pickle.loads(pickle.dumps(Trap()))  # noqa: S301
    assert Trap.sprung  # it would have worked


def test_safetensors_of_others(path) -> None:
    save_file({"a": torch.ones(3)}, path)
    refused(path, "is not a kapsi model")
    save_file({"a": torch.ones(3)}, path, {"format": "pt"})
    refused(path, "is not a kapsi model")


METADATA = {
    "newer version": (
        {"format_version": str(FORMAT_VERSION + 1)},
        [f"format version {FORMAT_VERSION + 1}", "upgrade kapsi"],
    ),
    "version of many digits": ({"format_version": "9" * 6000}, ["damaged", "format version"]),
    "no version": ({"format_version": None}, ["damaged", "format version"]),
    "version is text": ({"format_version": "one"}, ["damaged", "'one'"]),
    "negative version": ({"format_version": "-1"}, ["damaged"]),
    "no specification": ({"spec": None}, ["damaged", "not JSON"]),
    "not JSON": ({"spec": "{"}, ["damaged", "not JSON"]),
    "number of many digits": ({"spec": '{"widths": [3, ' + "9" * 6000 + "]}"}, ["damaged", "not JSON"]),
    "deep JSON": ({"spec": "[" * 100_000}, ["damaged", "not JSON"]),
    "not a mapping": ({"spec": "[1, 2]"}, ["spec: expected a mapping of ModelSpec"]),
    "unknown function": (
        {"spec": '{"widths": [3, 2], "layers": [{"heads": [{"expansion": "os.system"}]}]}'},
        ["spec.layers[0].heads[0].expansion", "no expansion is called 'os.system'", "taylor"],
    ),
    "unknown option": (
        {"spec": '{"widths": [3, 2], "layers": [{"heads": [{"expansion": {"kind": "taylor", "__class__": 1}}]}]}'},
        ["has no option '__class__'"],
    ),
    "not finite": (
        {"spec": '{"widths": [3, 2], "layers": [{"heads": [{"expansion": {"kind": "b_spline", "low": NaN}}]}]}'},
        ["finite"],
    ),
    "open width": ({"spec": '{"widths": [null, 2]}'}, ["needs all widths"]),
    "frozen name": ({"frozen": '["layers.0.heads.0.psi.matrix"]'}, ["freezes unknown parameters"]),
    "frozen buffer": ({"frozen": '["layers.0.heads.0.kappa.range"]'}, ["freezes unknown parameters"]),
    "frozen number": ({"frozen": "[3]"}, ["freezes unknown parameters"]),
    "frozen mapping": ({"frozen": "{}"}, ["freezes unknown parameters"]),
    "frozen not JSON": ({"frozen": "x"}, ["not JSON"]),
}


@pytest.mark.parametrize("case", METADATA)
def test_wrong_metadata(case, path) -> None:
    saved(path)
    metadata, parts = METADATA[case]
    rewrite(path, **metadata)
    refused(path, *parts)


def test_metadata_that_was_not_changed_still_loads(path) -> None:
    saved(path)
    rewrite(path)  # what the tests above do, and nothing else
    assert kp.load(path).spec == SPEC
    rewrite(path, unknown="entry", frozen=None)
    assert kp.load(path).spec == SPEC


NAME, MASK = "layers.0.heads.1.psi.left", "layers.0.heads.0.psi.mask"
TENSORS = {
    "missing": (lambda t: t.pop(NAME), ["missing", NAME]),
    "extra": (lambda t: t.update(extra=torch.ones(3)), ["unexpected extra"]),
    "renamed": (lambda t: t.update(left=t.pop(NAME)), ["missing", NAME, "unexpected left"]),
    "shape": (lambda t: t.update({NAME: torch.ones(2, 4, 3)}), [NAME, "shape (2, 4, 3)", "says (2, 4, 2)"]),
    "more axes": (lambda t: t.update({NAME: t[NAME][None]}), [NAME, "shape (1, 2, 4, 2)"]),
    "integers": (lambda t: t.update({NAME: t[NAME].int()}), [NAME, "type I32"]),
    "truths": (lambda t: t.update({NAME: t[NAME] > 0}), [NAME, "type BOOL"]),
    "mask of numbers": (
        lambda t: t.update({MASK: t[MASK].float()}),
        ["psi.mask", "type F32"],
    ),
    "mask of too many": (
        lambda t: t[MASK].fill_(True),
        ["layers.0.heads.0", "must keep exactly 36 entries"],
    ),
    "range upside down": (
        lambda t: t["layers.0.heads.0.kappa.range"].neg_(),
        ["layers.0.heads.0", "each lower end of the range"],
    ),
    "nothing": (lambda t: t.clear(), ["3 heads, but 0 tensors"]),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_the_specification(case, path) -> None:
    saved(path)
    change, parts = TENSORS[case]
    tensors = load_file(path)
    change(tensors)
    rewrite(path, tensors)
    refused(path, *parts)


def header_changed(path: Path, change: Any) -> None:
    """Change the header and leave the bytes of the tensors alone."""
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    change(header)
    new = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(new)) + new + content[8 + size :])


def test_headers_that_lie(path) -> None:
    saved(path)
    whole = path.read_bytes()
    for change in (
        lambda h: h[NAME].update(shape=[2**40, 2**20]),
        lambda h: h[NAME].update(dtype="F64"),
        lambda h: h[NAME].update(dtype="X9"),
        lambda h: h[NAME].update(shape=[-1, 4]),
        lambda h: h[NAME].update(data_offsets=[0, 10**15]),
        lambda h: h[NAME].update(shape=[4, 2, 2]),
        lambda h: h.update(__metadata__={"spec": 3}),
    ):
        path.write_bytes(whole)
        header_changed(path, change)
        refused(path)


def one_layer(widths: list[int], **head: Any) -> dict[str, Any]:
    return {"widths": widths, "layers": {"heads": head}}


SPLINES = {"kind": "b_spline", "intervals": 100_000}
HUGE = {
    "inputs": {"widths": [2**40, 4, 2]},
    "all widths": {"widths": [2**40, 2**40, 2**40]},
    "channels": one_layer([3, 4, 2], channels=2**20),
    "rank": one_layer([3, 4, 2], reconciliation={"kind": "low_rank", "rank": 10**400}),
    "degree": one_layer([1000, 2], expansion={"kind": "taylor", "degree": 64}),
    "degree of all inputs": one_layer([2**40, 2], expansion={"kind": "taylor", "degree": 64}),
    "symmetric degree": one_layer([2**40, 2], expansion={"kind": "taylor", "degree": 64, "symmetric": True}),
    "splines": one_layer([2**20, 2], expansion=SPLINES),
    "splines of splines": one_layer([3, 2], expansion={"kind": "nested", "parts": [SPLINES] * 70}),
    "mask": one_layer([2**19, 2**19], reconciliation="masked"),
    "norm": one_layer([2**40, 2], reconciliation="constant", before="batch_norm"),
    "prime outputs": one_layer([3, 2**40 - 87], reconciliation={"kind": "kronecker", "rows": 2}),
    "many layers": {"widths": [3] * 10**5},
    "many heads": {"widths": [3, 2], "layers": [{"heads": [{}] * 2000}]},
}


@pytest.mark.parametrize("case", HUGE)
def test_sizes_that_are_not_there_are_refused_quickly(case, path) -> None:
    saved(path)
    rewrite(path, spec=json.dumps(HUGE[case]))
    refused(path)


@pytest.mark.parametrize("depth", [20, 60, 100, 140, 180, 240, 1000, 50_000])
@pytest.mark.parametrize("kind", ["nested", "extended"])
def test_deep_parts_are_loaded_or_refused_quickly(kind, depth, path) -> None:
    saved(path)
    parts = f'{{"kind": "{kind}", "parts": [' * depth + '"identity"' + "]}" * depth
    rewrite(path, spec=f'{{"widths": [3, 2], "layers": [{{"heads": [{{"expansion": {parts}}}]}}]}}')
    refused(path)  # if only because the tensors are other ones


def test_each_bit_of_a_header_matters_or_is_refused(path) -> None:
    model = saved(path, kp.rpn([3, 2], kp.BSpline(2)))
    whole = bytearray(path.read_bytes())
    size = struct.unpack("<Q", whole[:8])[0]
    x = torch.ones(1, 3)
    for place in range(0, 8 + size, 3):
        changed = whole.copy()
        changed[place] ^= 1 << (place % 8)
        path.write_bytes(changed)
        try:
            loaded = kp.load(path)
        except kp.SpecError as error:
            message = str(error)
        else:
            message = ""
            assert loaded(x).shape == model(x).shape
        assert "\n" not in message


def test_a_model_file_has_the_permissions_of_any_new_file(tmp_path):
    kp.save(kp.Model(kp.rpn([2, 1]), seed=0), tmp_path / "m.safetensors")
    (tmp_path / "other").touch()
    assert (tmp_path / "m.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_models_that_are_not_what_their_specification_says_are_not_saved(tmp_path) -> None:
    path = tmp_path / "m.safetensors"
    changed = kp.Model(kp.rpn([2, 2, 2]), seed=0)
    torch.nn.utils.parametrizations.weight_norm(changed.layers[0].heads[0].psi, "matrix")
    with pytest.raises(kp.SpecError, match="differs from its specification"):
        kp.save(changed, path)
    tied = kp.Model(kp.rpn([2, 2, 2]), seed=0)
    tied.layers[1].heads[0].psi.matrix = tied.layers[0].heads[0].psi.matrix
    with pytest.raises(kp.SpecError, match="share memory"):
        kp.save(tied, path)
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_is_not_there_is_named(tmp_path) -> None:
    path = tmp_path / "m.safetensors"
    kp.save(kp.Model(kp.rpn([2, 1]), seed=0), path)
    for device in ("gpu", "meta", 5.0):
        with pytest.raises(kp.SpecError, match=r"load\(device="):
            kp.load(path, device=device)


def test_many_different_heads_without_tensors_are_refused_at_once(tmp_path) -> None:
    path = tmp_path / "m.safetensors"
    kp.save(kp.Model(kp.rpn([2, 1], kp.BSpline()), seed=0), path)
    heads = [{"expansion": {"kind": "b_spline", "low": -1 - i / 1e6}} for i in range(4_000)]
    with safe_open(path, "pt") as handle:
        metadata = handle.metadata()
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    save_file(tensors, path, {**metadata, "spec": json.dumps({"widths": [2, 1], "layers": [{"heads": heads}]})})
    start = time.process_time()
    with pytest.raises(kp.SpecError, match="4,000 heads, but 2 tensors"):
        kp.load(path)
    assert time.process_time() - start < 20


def test_tensors_of_several_types_are_refused(tmp_path) -> None:
    path = tmp_path / "m.safetensors"
    kp.save(kp.Model(kp.rpn([2, 1], kp.BSpline()), seed=0), path)
    with safe_open(path, "pt") as handle:
        metadata = handle.metadata()
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    tensors["layers.0.heads.0.kappa.range"] = tensors["layers.0.heads.0.kappa.range"].double()
    save_file(tensors, path, metadata)
    with pytest.raises(kp.SpecError, match="several types, F32, F64"):
        kp.load(path)


@pytest.mark.parametrize("name", ["model", "options"])
def test_files_of_version_1_are_converted(name, tmp_path) -> None:
    folder = Path(__file__).parent / "files_of_0_1"
    model = kp.load(folder / f"{name}.safetensors")
    values = load_file(folder / f"{name}_values.safetensors")
    torch.testing.assert_close(model(values["x"]), values["y"], rtol=0, atol=1e-6)
    kp.save(model, tmp_path / "again.safetensors")
    again = kp.load(tmp_path / "again.safetensors")
    assert again.spec == model.spec
    assert torch.equal(again(values["x"]), model(values["x"]))
