"""Specifications: checks, plain data, YAML and JSON files, and messages that name the path and the choices."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kapsi as kp
from kapsi import public
from kapsi.errors import SpecError
from kapsi.function import ROLES, Function, Spec, catalogue, coerce, lookup, option, options_of
from kapsi.spec import parse_yaml, set_option, to_yaml
from kapsi.testing.cases import role_class

quick = settings(
    max_examples=40,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def outcome(make: Callable[[], Any]) -> Any:
    """Return what is made, or the error."""
    try:
        return make()
    except kp.SpecError as error:
        return error


# ------------------------------------------------------------------------------------------------ random specifications


def values(kind: Any, field: dataclasses.Field[Any], depth: int) -> st.SearchStrategy[Any]:
    """Return allowed values of an option, from its annotation and its range."""
    low, high = field.metadata.get("minimum"), field.metadata.get("maximum")
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.integers(low if low is not None else -(10**6), min(high or 10**6, 10**6))
    if kind is float:
        return st.floats(low, high, allow_nan=False, allow_infinity=False)
    if kind is str:
        return st.sampled_from(["silu_layer", "a b", "ψ: #1", "null", "1e3"])
    if origin is typing.Literal:
        return st.sampled_from(members)
    if type(None) in members:
        rest = [member for member in members if member is not type(None)]
        return st.none() | st.one_of(*[values(member, field, depth) for member in rest])
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*[values(member, field, depth) for member in members])
    if origin is tuple and members[1:] == (Ellipsis,):
        return st.lists(values(members[0], field, depth), min_size=int(depth > 0), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*[values(member, field, depth) for member in members])
    if isinstance(kind, type) and issubclass(kind, Function):
        return functions(kind, depth - 1)
    if kind is kp.LayerSpec:  # within an expansion
        heads = st.builds(kp.HeadSpec, expansion=functions(kp.Expansion, 0), bias=st.booleans())
        return st.builds(kp.LayerSpec, heads=st.lists(heads, min_size=1, max_size=2).map(tuple))
    raise NotImplementedError(f"teach this test to draw {kind}")


def instance(cls: type[Any], depth: int) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    drawn = st.fixed_dictionaries({f.name: values(hints[f.name], f, depth) for f in options_of(cls)})

    def build(options: dict[str, Any]) -> Any:
        try:
            return cls(**options)
        except kp.SpecError:  # options that do not go together, such as low above high
            return None

    return drawn.map(build).filter(lambda made: made is not None)


def functions(kind: type[Any], depth: int = 2) -> st.SearchStrategy[Any]:
    classes = [cls for cls in catalogue(kind.role) if issubclass(cls, kind)]
    if depth <= 0:
        # Those that are made of functions of their own role would go on for ever.
        classes = [cls for cls in classes if not {"parts", "remainder", "layers"} & {f.name for f in options_of(cls)}]
    return st.sampled_from(classes).flatmap(lambda cls: instance(cls, depth))


def heads() -> st.SearchStrategy[kp.HeadSpec]:
    return st.builds(
        kp.HeadSpec,
        expansion=functions(kp.Expansion),
        reconciliation=functions(kp.Reconciliation),
        remainder=functions(kp.Remainder),
        bias=st.booleans(),
        channels=st.integers(1, 2**20),
        before=st.lists(functions(kp.Process), max_size=2).map(tuple),
        after=st.lists(functions(kp.Process), max_size=2).map(tuple),
    )


def layers() -> st.SearchStrategy[kp.LayerSpec]:
    return st.builds(
        kp.LayerSpec,
        heads=st.lists(heads(), min_size=1, max_size=2).map(tuple),
        fusion=functions(kp.Fusion),
        output=st.lists(functions(kp.Process), max_size=2).map(tuple),
    )


@st.composite
def models(draw: st.DrawFn) -> kp.ModelSpec:
    widths = draw(st.lists(st.integers(1, 2**40), min_size=2, max_size=4))
    if draw(st.booleans()):
        widths[draw(st.sampled_from([0, -1]))] = None
    count = draw(st.sampled_from([1, len(widths) - 1]))
    return kp.ModelSpec(tuple(widths), tuple(draw(st.lists(layers(), min_size=count, max_size=count))))


@quick
@given(spec=st.one_of(heads(), layers(), models()))
def test_random_specifications_survive_plain_data_and_text(spec) -> None:
    data, kind = kp.to_dict(spec), type(spec)
    assert kp.from_dict(data, kind) == spec
    assert kp.from_dict(json.loads(json.dumps(data)), kind) == spec
    assert kp.from_dict(parse_yaml(to_yaml(data), "text"), kind) == spec
    assert hash(kp.from_dict(data, kind)) == hash(spec)


@quick
@given(spec=models())
def test_random_specifications_survive_files(spec, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("specs")
    for name in ("m.yaml", "m.json"):
        kp.save_spec(spec, folder / name)
        assert kp.load_spec(folder / name) == spec
    assert sorted(path.name for path in folder.iterdir()) == ["m.json", "m.yaml"]  # nothing is left beside


KEYS = ["kind", "widths", "layers", "heads", "expansion", "parts", "degree", "x"]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
NAMED = st.sampled_from(KEYS)


@quick
@given(
    data=st.recursive(SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(NAMED, x, max_size=4), max_leaves=12)
)
def test_any_other_data_is_one_error(data) -> None:
    made = outcome(lambda: kp.from_dict(data))
    if isinstance(made, kp.ModelSpec):
        assert kp.from_dict(kp.to_dict(made)) == made
    else:
        assert str(made).startswith("ModelSpec")
        assert "\n" not in str(made)


@quick
@given(text=st.text(max_size=60))
def test_any_text_is_data_or_one_error(text) -> None:
    made = outcome(lambda: parse_yaml(text, "a.yaml"))
    if isinstance(made, kp.SpecError):
        assert str(made).startswith("a.yaml")
    else:
        json.dumps(made)  # plain data


# ------------------------------------------------------------------------------------------------ messages


def model_data(**head: Any) -> dict[str, Any]:
    return {"widths": [4, 2], "layers": [{"heads": [{}, head]}]}


NESTED = {"kind": "nested", "parts": [{"kind": "taylor", "degree": "two"}, "identity"]}
EXTENDED = {"kind": "extended", "parts": ["identity", {"kind": "nested", "parts": [{"kind": "tailor"}]}]}
WRONG: dict[str, tuple[Any, str, list[str]]] = {
    # what is wrong: (data, the path, and what else the message has to say)
    "unknown function": (
        model_data(expansion="tailor"),
        "layers[0].heads[1].expansion",
        ["'tailor'", "did you mean 'taylor'?", "identity", "b_spline"],
    ),
    "unknown alias": (
        model_data(reconciliation="hmm"),
        "layers[0].heads[1].reconciliation",
        ["'hmm'", "'hm'", "kronecker"],
    ),
    "unknown option": (
        model_data(expansion={"kind": "taylor", "degre": 2}),
        "layers[0].heads[1].expansion",
        ["no option 'degre'", "did you mean 'degree'?", "symmetric"],
    ),
    "option of a function without options": (
        model_data(expansion={"kind": "identity", "degree": 2}),
        "layers[0].heads[1].expansion",
        ["it has no options"],
    ),
    "text for a number": (
        model_data(expansion={"kind": "taylor", "degree": "2"}),
        "layers[0].heads[1].expansion.degree",
        ["an integer", "'2'"],
    ),
    "float for an integer": (
        model_data(expansion={"kind": "taylor", "degree": 2.0}),
        "layers[0].heads[1].expansion.degree",
        ["an integer", "2.0"],
    ),
    "truth for an integer": (model_data(channels=True), "layers[0].heads[1].channels", ["an integer", "True"]),
    "integer for a truth": (model_data(bias=1), "layers[0].heads[1].bias", ["true or false", "1"]),
    "null for a number": (
        model_data(expansion={"kind": "taylor", "degree": None}),
        "layers[0].heads[1].expansion.degree",
        ["an integer", "None"],
    ),
    "not finite": (
        model_data(expansion={"kind": "b_spline", "low": -math.inf}),
        "layers[0].heads[1].expansion.low",
        ["finite", "-inf"],
    ),
    "below the range": (
        model_data(expansion={"kind": "taylor", "degree": 0}),
        "layers[0].heads[1].expansion",
        ["degree=0", "at least 1"],
    ),
    "above the range": (
        model_data(reconciliation={"kind": "masked", "ratio": 1.5}),
        "layers[0].heads[1].reconciliation",
        ["ratio=1.5", "at most 1"],
    ),
    "choice": (
        model_data(expansion={"kind": "b_spline", "extrapolation": "wrap"}),
        "layers[0].heads[1].expansion.extrapolation",
        ["linear, extended, clamp, zero, error", "'wrap'"],
    ),
    "range upside down": (
        model_data(expansion={"kind": "b_spline", "low": 2, "high": 1}),
        "layers[0].heads[1].expansion",
        ["low must be below high"],
    ),
    "nested part": (
        model_data(expansion=NESTED),
        "layers[0].heads[1].expansion.parts[0].degree",
        ["an integer", "'two'"],
    ),
    "part of a part": (
        model_data(expansion=EXTENDED),
        "layers[0].heads[1].expansion.parts[1].parts[0]",
        ["'tailor'", "taylor"],
    ),
    "no kind": (model_data(expansion={"degree": 2}), "layers[0].heads[1].expansion", ["needs a kind", "taylor"]),
    "kind is a number": (model_data(expansion={"kind": 3}), "layers[0].heads[1].expansion", ["needs a kind"]),
    "function is a number": (model_data(expansion=3), "layers[0].heads[1].expansion", ["expected an expansion", "3"]),
    "parts left out": (model_data(expansion="nested"), "layers[0].heads[1].expansion", ["Nested needs 'parts'"]),
    "parts empty": (
        model_data(expansion={"kind": "nested", "parts": []}),
        "layers[0].heads[1].expansion",
        ["at least one expansion"],
    ),
    "list for a function": (
        model_data(expansion=["taylor"]),
        "layers[0].heads[1].expansion",
        ["a mapping with a kind"],
    ),
    "another role": (
        model_data(remainder="taylor"),
        "layers[0].heads[1].remainder",
        ["no remainder is called 'taylor'", "identity, linear, zero"],
    ),
    "norm for an activation": (
        model_data(remainder={"kind": "linear", "before": "layer_norm"}),
        "layers[0].heads[1].remainder.before",
        ["'layer_norm' is not allowed here", "relu"],
    ),
    "unknown process": (model_data(before=["relu", "relo"]), "layers[0].heads[1].before[1]", ["'relo'", "'relu'"]),
    "unknown option of a head": (
        model_data(chanels=2),
        "layers[0].heads[1]",
        ["HeadSpec has no option 'chanels'", "did you mean 'channels'?"],
    ),
    "unknown option of a layer": (
        {"widths": [4, 2], "layers": [{"head": []}]},
        "layers[0]",
        ["did you mean 'heads'?", "fusion"],
    ),
    "unknown option of a model": ({"widths": [4, 2], "layer": []}, "", ["did you mean 'layers'?", "widths"]),
    "no widths": ({"layers": [{}]}, "", ["needs 'widths'"]),
    "one width": ({"widths": [4]}, "", ["widths=[4]", "at least two"]),
    "width zero": ({"widths": [4, 0]}, "", ["widths[1]", "1 to"]),
    "width too large": ({"widths": [4, 2**40 + 1]}, "", ["widths[1]", "1 to"]),
    "null in the middle": ({"widths": [4, None, 2]}, "", ["not widths[1]"]),
    "width is text": ({"widths": [4, "many"]}, "widths[1]", ["an integer", "'many'"]),
    "number of layers": ({"widths": [4, 3, 2, 1], "layers": [{}, {}]}, "", ["4 widths need 3 layers", "got 2"]),
    "no heads": ({"widths": [4, 2], "layers": [{"heads": []}]}, "layers[0]", ["at least one head"]),
    "layer is a list": ({"widths": [4, 2], "layers": [[]]}, "layers[0]", ["a mapping of LayerSpec"]),
    "not a mapping": ([1, 2], "", ["a mapping of ModelSpec"]),
    "nothing": (None, "", ["a mapping of ModelSpec", "None"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_specification_says_where_and_what_is_allowed(case, tmp_path) -> None:
    data, path, parts = WRONG[case]
    with pytest.raises(kp.SpecError) as caught:
        kp.from_dict(data, kp.ModelSpec, "here")
    message = str(caught.value)
    begin = f"here.{path}:" if path else "here:"
    assert message.startswith(begin), message
    assert "\n" not in message
    for part in parts:
        assert part in message, message
    # The same from a file begins with its name.
    file = tmp_path / "spec.yaml"
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(kp.SpecError) as from_file:
        kp.load_spec(file)
    nothing = ": is empty, expected a specification, such as the config.yaml of a run"
    assert str(from_file.value) == f"{file}{nothing if data is None else message.removeprefix('here')}"


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: kp.Taylor(0), ["Taylor(degree=0)", "at least 1"]),
        (lambda: kp.Taylor(65), ["Taylor(degree=65)", "at most 64"]),
        (lambda: kp.Taylor(1.5), ["Taylor.degree", "an integer", "1.5"]),
        (lambda: kp.Taylor(True), ["Taylor.degree", "an integer", "True"]),
        (lambda: kp.Masked(float("nan")), ["Masked.ratio", "finite", "nan"]),
        (lambda: kp.Masked("half"), ["Masked.ratio", "a number", "'half'"]),
        (lambda: kp.HeadSpec(kp.Taylor), ["HeadSpec.expansion", "the class Taylor", "Taylor()"]),
        (lambda: kp.HeadSpec(kp.Dense()), ["HeadSpec.expansion", "expected an expansion", "reconciliation Dense"]),
        (lambda: kp.HeadSpec(channels=0), ["HeadSpec(channels=0)", "at least 1"]),
        (lambda: kp.Nested((kp.Taylor(), 3)), ["Nested.parts[1]", "3"]),
        (lambda: kp.LayerSpec(heads=3), ["LayerSpec.heads", "a list", "3"]),
        (lambda: kp.rpn([4]), ["at least two widths"]),
        (lambda: kp.rpn([4, 2], heads=0), ["rpn(heads)", "at least 1"]),
        (lambda: kp.rpn([4, 2], expansion="tailor"), ["rpn.expansion", "'taylor'"]),
        (lambda: lookup("fusion", "som"), ["no fusion is called 'som'", "'sum'", "concatenation, mean, sum"]),
    ],
)
def test_wrong_python_values_say_what_is_allowed(make, parts) -> None:
    with pytest.raises(kp.SpecError) as caught:
        make()
    for part in parts:
        assert part in str(caught.value)


def test_lists_that_are_too_long_are_refused_before_their_items_are_read() -> None:
    with pytest.raises(kp.SpecError, match=r"^ModelSpec\.widths: 1,000,001 items; at most 4,097 are allowed$"):
        kp.ModelSpec((4,) * 10**6 + ("unread",))
    with pytest.raises(kp.SpecError, match=r"^ModelSpec\.layers: 5,000 items"):
        kp.from_dict({"widths": [4, 2], "layers": ["unread"] * 5_000})
    with pytest.raises(kp.SpecError, match=r"^Extended\.parts: 5,000 items; at most 4,096 are allowed$"):
        kp.Extended(("unread",) * 5_000)  # type: ignore[arg-type]


def test_a_name_is_registered_once() -> None:
    with pytest.raises(
        kp.SpecError, match=r"Other: the expansion name 'taylor' is taken by kapsi\.expansion\.taylor\.Taylor"
    ):

        class Other(kp.Expansion, name="taylor"):
            pass

    with pytest.raises(kp.SpecError, match="the reconciliation name 'lorr' is taken"):

        class Another(kp.Reconciliation, name="another", aliases=("lorr",)):
            pass

    assert lookup("expansion", "taylor") is kp.Taylor


# ------------------------------------------------------------------------------------------------ coercion


def test_short_forms_mean_the_long_ones() -> None:
    long = kp.HeadSpec(kp.Taylor(), kp.LowRank(), kp.LinearRemainder(), before=(kp.LayerNorm(),))
    assert kp.HeadSpec("taylor", "low_rank", "linear", before="layer_norm") == long
    assert kp.HeadSpec({"kind": "taylor"}, {"kind": "lorr"}, "linear", before=["layer_norm"]) == long
    assert kp.LayerSpec(long) == kp.LayerSpec((long,))
    assert kp.ModelSpec([4, 2], kp.LayerSpec(long)).layers == (kp.LayerSpec((long,)),)
    assert kp.from_dict("hm", kp.Reconciliation) == kp.Kronecker()
    for alias, name in (("identity", "dense"), ("dual_lphm", "dual_low_rank_kronecker"), ("masking", "masked")):
        assert lookup("reconciliation", alias) is lookup("reconciliation", name)


def test_numbers_of_numpy_become_pythons() -> None:
    assert kp.Taylor(np.int64(3)) == kp.Taylor(3)
    assert type(kp.Taylor(np.int64(3)).degree) is int
    assert type(kp.Masked(np.float32(0.5)).ratio) is float
    assert type(kp.Masked(1).ratio) is float
    assert json.dumps(kp.to_dict(kp.ModelSpec(np.array([4, 2])[[0, 1]].tolist())))


def test_plain_data_are_plain() -> None:
    spec = kp.rpn([4, 3, 2], kp.Extended(("taylor", kp.BSpline())), "masked", "linear", bias=True, output="relu")
    pending = [kp.to_dict(spec)]
    while pending:
        value = pending.pop()
        assert type(value) in (dict, list, str, int, float, bool, type(None))
        pending += list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


@pytest.mark.parametrize("role", ROLES)
def test_catalogue_is_in_order_and_each_entry_is_of_its_role(role) -> None:
    found = catalogue(role)
    assert [cls.name for cls in found] == sorted(cls.name for cls in found)
    assert len({role_class(cls) for cls in found}) == 1
    assert all(cls.role == role for cls in found)
    assert set(found) <= set(catalogue())
    assert len(found) > 1


def test_specifications_are_immutable_and_hashable() -> None:
    spec = kp.rpn([4, 2])
    for part, name in (
        (spec, "widths"),
        (spec.layers[0], "heads"),
        (spec.layers[0].heads[0], "bias"),
        (kp.Taylor(), "degree"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, name, 1)
    assert len({kp.rpn([4, 2]), kp.rpn([4, 2]), kp.rpn([4, 3])}) == 2


def test_repr_is_the_code_that_makes_it() -> None:
    spec = kp.rpn([4, 2], kp.Nested((kp.BSpline(), kp.Taylor(3))), kp.Masked(0.25), output="tanh")
    made = eval(repr(spec), {**vars(public), **{cls.__name__: cls for cls in catalogue("process")}})  # noqa: S307
    assert made == spec


# ------------------------------------------------------------------------------------------------ rpn, sized, resolved


def test_rpn_puts_its_arguments_where_they_belong() -> None:
    spec = kp.rpn(
        [5, 4, 3],
        "taylor",
        "low_rank",
        "linear",
        bias=True,
        channels=2,
        heads=3,
        before="tanh",
        after="layer_norm",
        output="relu",
        fusion="mean",
    )
    hidden, last = (layer for _, _, layer in spec.resolved())
    head = kp.HeadSpec(kp.Taylor(), kp.LowRank(), kp.LinearRemainder(), True, 2, ("tanh",), ("layer_norm",))
    assert hidden == kp.LayerSpec((head,) * 3, kp.Mean(), ("relu",))
    assert last == kp.LayerSpec((head,) * 3, kp.Mean())  # outputs are not processed
    assert [(m, n) for m, n, _ in spec.resolved()] == [(5, 4), (4, 3)]


def test_one_layer_stands_for_all() -> None:
    spec = kp.rpn([5, 4, 3, 2], "taylor")
    assert len(spec.layers) == 1
    assert [(m, n, layer.heads[0].expansion) for m, n, layer in spec.resolved()] == [
        (5, 4, kp.Taylor()),
        (4, 3, kp.Taylor()),
        (3, 2, kp.Taylor()),
    ]


def test_open_widths_are_filled_from_data() -> None:
    spec = kp.rpn([None, 4, None])
    assert spec.sized(7, 2).widths == (7, 4, 2)
    assert spec.sized(7).widths == (7, 4, None)
    assert kp.rpn([7, 2]).sized(7, 2).widths == (7, 2)
    with pytest.raises(kp.SpecError, match="the model has 7 inputs and the data 8"):
        kp.rpn([7, 2]).sized(8)
    with pytest.raises(kp.SpecError, match="the model has 2 outputs and the data 3"):
        kp.rpn([7, 2]).sized(7, 3)
    with pytest.raises(kp.SpecError, match="a model needs all widths"):
        kp.Model(spec)


# ------------------------------------------------------------------------------------------------ YAML and files


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("widths: [4, 2]\nwidths: [4, 3]", ["line 2", "'widths' appears twice"]),
        ("layers:\n- heads:\n  - {bias: true, bias: false}", ["line 3", "'bias' appears twice"]),
        ("a: &x [1]\nb: *x", ["line 1", "anchors"]),
        ("widths: [4, 2]\n<<: {widths: [4, 3]}", ["line 2", "merge keys (<<) are not allowed"]),
        ("a: 1" + "0" * 6000, ["a number of thousands of digits"]),
        ("b: *x", ["line 1", "aliases"]),
        ("a: !!python/object:os.system {}", ["line 1", "tags"]),
        ("a: !!python/object/apply:os.system ['true']", ["line 1", "tags"]),
        ("!!set {a, b}", ["line 1", "tags"]),
        ("a: !mine 3", ["line 1", "tags"]),
        ("a: !!int '3'", ["line 1", "tags"]),
        ("a: [1,", ["line 1"]),
        ("a: 1\n b: 2", ["line 2"]),
        ("a: 1\n---\nb: 2", ["line 2", "another document"]),
        ("? [a]\n: 1", ["unhashable"]),
        ("a: \x00", ["special characters"]),
        ("%TAG ! x", []),
        ("[" * 3000 + "]" * 3000, ["nested too deeply"]),
        ("{a: " * 3000 + "}" * 3000, ["nested too deeply"]),
        ("a: " + "9" * 5000, ["digits"]),
    ],
)
def test_what_is_not_plain_yaml_is_refused(text, parts) -> None:
    with pytest.raises(kp.SpecError) as caught:
        parse_yaml(text, "a.yaml")
    assert str(caught.value).startswith("a.yaml")
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("1.0", 1.0),
        ("+3", 3),
        ("-7", -7),
        ("0", 0),
        ("010", "010"),
        ("0x1F", "0x1F"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2001-12-14", "2001-12-14"),
        ("'1'", "1"),
        ("true", True),
        ("null", None),
        ("~", None),
        (".inf", math.inf),
        ("e3", "e3"),
        ("1e", "1e"),
        ("\u0663", "\u0663"),
    ],
)
def test_scalars_of_yaml(text, value) -> None:
    found = parse_yaml(f"a: {text}", "text")["a"]
    assert (type(found), found) == (type(value), value)


def test_aliases_cannot_blow_up() -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
    with pytest.raises(kp.SpecError, match="anchors"):
        parse_yaml(bomb, "bomb.yaml")


def test_yaml_written_by_hand(tmp_path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(
        """
        # comments are allowed
        widths: [784, 64, 10]
        layers:
        - heads:
          - expansion: {kind: b_spline, intervals: 8, low: -2}
            reconciliation: lorr
            remainder: {kind: linear, before: silu}
          - bias: true
          output: relu
        - heads: {expansion: taylor, reconciliation: {kind: dual_lphm, rank: 5}, before: [tanh, {kind: dropout, p: 1e-1}]}
        """
    )
    spec = kp.load_spec(path)
    first = kp.HeadSpec(kp.BSpline(8, low=-2.0), kp.LowRank(), kp.LinearRemainder(before="silu"))
    second = kp.HeadSpec(kp.Taylor(), kp.DualLowRankKronecker(5), before=("tanh", kp.Dropout(0.1)))
    layers = (kp.LayerSpec((first, kp.HeadSpec(bias=True)), output=("relu",)), kp.LayerSpec((second,)))
    assert spec == kp.ModelSpec((784, 64, 10), layers)


def test_files_that_are_no_specification(tmp_path) -> None:
    def refused(path: Any, *parts: str) -> None:
        with pytest.raises(kp.SpecError) as caught:
            kp.load_spec(path)
        assert str(caught.value).startswith(str(path))
        for part in parts:
            assert part in str(caught.value)

    refused(tmp_path / "none.yaml", "there is no such specification")
    refused(tmp_path, "is a folder")
    (tmp_path / "latin.yaml").write_bytes("widths: é".encode("latin-1"))
    refused(tmp_path / "latin.yaml", "not UTF-8")
    (tmp_path / "empty.yaml").write_text("")
    refused(tmp_path / "empty.yaml", "is empty, expected a specification")
    (tmp_path / "binary.yaml").write_bytes(bytes(range(32)))
    refused(tmp_path / "binary.yaml", "special characters")
    head = '{"kind": "nested", "parts": [' * 2000 + '"identity"' + "]}" * 2000
    (tmp_path / "deep.json").write_text(f'{{"widths": [1, 1], "layers": {{"heads": {{"expansion": {head}}}}}}}')
    refused(tmp_path / "deep.json", "too deeply")


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    path = tmp_path / "spec.yaml"
    kp.save_spec(kp.rpn([4, 2]), path)
    old = path.read_bytes()

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(kp.KapsiError, match=r"spec\.yaml.*No space left on device"):
        kp.save_spec(kp.rpn([4, 3]), path)
    assert path.read_bytes() == old
    assert [file.name for file in tmp_path.iterdir()] == ["spec.yaml"]


def test_deep_nesting_is_one_error_and_takes_no_time() -> None:
    def nested(depth: int) -> Any:
        data: Any = "identity"
        for _ in range(depth):
            data = {"kind": "nested", "parts": [data]}
        return data

    kappa = kp.from_dict(nested(50), kp.Expansion)
    assert kp.Head(3, 2, kp.HeadSpec(kappa))(torch.ones(3)).shape == (2,)
    for depth in (400, 20000):
        with pytest.raises(kp.SpecError, match="nested too deeply"):
            kp.from_dict(nested(depth), kp.Expansion)


# ------------------------------------------------------------------------------------------------ set_option


def test_options_are_set_by_path() -> None:
    data = kp.to_dict(kp.rpn([4, 3, 2], kp.Taylor(3), heads=2))
    set_option(data, "layers.0.heads.1.expansion.degree", 5)
    assert kp.from_dict(data).layers[0].heads[1].expansion == kp.Taylor(5)
    set_option(data, "layers.0.heads.0.expansion.kind", "b_spline")  # the options of the old one are gone
    assert kp.from_dict(data).layers[0].heads[0].expansion == kp.BSpline()
    set_option(data, "widths.1", 7)
    assert kp.from_dict(data).widths == (4, 7, 2)
    short = {"widths": [4, 2], "layers": [{"heads": [{"expansion": "taylor"}]}]}
    set_option(short, "layers.0.heads.0.expansion.degree", 4)
    assert kp.from_dict(short).layers[0].heads[0].expansion == kp.Taylor(4)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("layers.3.output", "layers is a list of 1, expected a number from 0 to 0, got '3'"),
        ("layers.first", "got 'first'"),
        ("layers..heads", "expected names and numbers with dots"),
        ("", "expected names and numbers with dots"),
        ("widths.0.x", "has no 'x'"),
    ],
)
def test_a_path_that_leads_nowhere_says_so(path, message) -> None:
    with pytest.raises(kp.SpecError, match=message) as caught:
        set_option(kp.to_dict(kp.rpn([4, 2])), path, 1)
    assert str(caught.value).startswith(f"--set {path}:")


def test_specs_are_functions_of_their_fields_alone() -> None:
    for cls in (kp.HeadSpec, kp.LayerSpec, kp.ModelSpec):
        assert issubclass(cls, Spec)
        assert cls.__dataclass_params__.frozen
        for field in options_of(cls):
            assert field.name in cls.__doc__


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: kp.rpn(5), "expected a list of widths"),
        (lambda: kp.rpn({3, 4}), "expected a list of widths"),
        (lambda: kp.rpn("34"), "expected a list of widths"),
        (lambda: kp.rpn([3, 4], heads=True), "expected an integer of at least 1"),
        (lambda: kp.catalogue("foo"), "there is no role 'foo'; choose from expansion"),
        (lambda: kp.from_dict("taylor", "expansion"), "expected ModelSpec"),
        (lambda: kp.from_dict("taylor", kp.Function), "expected ModelSpec"),
        (lambda: kp.from_dict({"degree": 2}, kp.Expansion), "an expansion needs a kind"),
        (lambda: kp.to_dict(object()), "expected a function or a specification, got object"),
        (lambda: kp.explain(5), r"expected a kapsi\.Model, got 5"),
        (lambda: kp.Model(kp.rpn([2, 1]), seed=0).freeze(5), "no parameter or module has this name"),
        (lambda: kp.save(kp.Model(kp.rpn([2, 1]), seed=0), None), "expected a path, got None"),
    ],
)
def test_calls_with_things_of_another_kind(call, said) -> None:
    with pytest.raises(kp.SpecError, match=said):
        call()


@pytest.mark.parametrize(
    "text", ["1e3", "1e-3", "007", "0x1F", "1_000", "2026-01-01", "null", "yes", ".5", "-", "1:30", "é"]
)
def test_texts_that_look_like_something_else_stay_texts(text) -> None:
    for unicode in (False, True):
        assert parse_yaml(to_yaml({"a": [text, 3, 1e-3, None, True]}, unicode=unicode), "text") == {
            "a": [text, 3, 1e-3, None, True]
        }


@dataclasses.dataclass(frozen=True)
class Job(Spec):
    seeds: tuple[int, ...] = option((0,), read=lambda value, where: list(range(value)) if value == 3 else value)
    mode: Literal["fast", "exact"] = "fast"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    named: Mapping[str, kp.HeadSpec] = dataclasses.field(default_factory=dict)


def test_short_forms_and_mappings_of_options() -> None:
    job = coerce(Job, {"seeds": 3, "options": {"a": [1, None]}, "named": {"x": {"channels": 2}}}, "job")
    assert (job.seeds, job.options, job.named["x"].channels) == ((0, 1, 2), {"a": [1, None]}, 2)
    assert kp.to_dict(job) == {
        "seeds": [0, 1, 2],
        "mode": "fast",
        "options": {"a": [1, None]},
        "named": {"x": kp.to_dict(job.named["x"])},
    }
    assert dataclasses.replace(job, mode="exact").seeds == job.seeds


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"mode": "exat"}, r"job\.mode: expected one of fast, exact, got 'exat'; did you mean 'exact'\?"),
        ({"options": [1]}, r"job\.options: expected a mapping of options, got \[1\]"),
        ({"options": {1: 2}}, r"job\.options\.1: expected text as a key"),
        ({"options": {"a": [math.nan]}}, r"job\.options\.a\[0\]: expected a finite number"),
        ({"options": {"a": {"b": object()}}}, r"job\.options\.a\.b: expected plain data"),
        (
            {"named": {"x": {"chanels": 2}}},
            r"job\.named\.x: HeadSpec has no option 'chanels'; did you mean 'channels'\?",
        ),
    ],
)
def test_mappings_of_options_are_checked(data, message) -> None:
    with pytest.raises(SpecError, match=message):
        coerce(Job, data, "job")
