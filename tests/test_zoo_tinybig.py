"""Configurations of tinyBIG: tables of names, both key styles, differences, files of unknown origin."""

from __future__ import annotations

import json

import pytest
import yaml

import kapsi as kp
from kapsi.cli import main
from kapsi.errors import SpecError
from kapsi.spec import from_dict, parse_yaml
from kapsi.zoo import tinybig
from test_names import TINYBIG, table


def function(name, style="function", /, **parameters):
    return {f"{style}_class": f"tinybig.any.{name}", f"{style}_parameters": parameters}


def config(head=None, *, layer=None, model=None, **others):
    """Return a configuration of one layer, 6 to 4, in plain data."""
    head = {"data_transformation_configs": function("taylor_expansion")} | (head or {})
    head = {"parameter_fabrication_configs": function("identity_reconciliation")} | head
    layer = {"m": 6, "n": 4, "head_configs": function("rpn_head", "head", **head)} | (layer or {})
    model = {"layer_configs": function("rpn_layer", "layer", **layer)} | (model or {})
    return {"model_configs": function("rpn", "model", **model), **others}


@pytest.fixture
def read(tmp_path):
    def read(data):
        path = tmp_path / "config.yaml"
        path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
        return tinybig.read_config(path)

    return read


def head_of(found):
    return found.spec.layers[0].heads[0]


def test_both_key_styles_are_the_same(read):
    new, old = (
        {
            "data_transformation_configs": function("bspline_expansion", styles[0], t=10, d=4),
            "parameter_fabrication_configs": function("lorr_reconciliation", styles[1], r=3),
            "remainder_configs": function("linear_remainder", styles[2]),
        }
        for styles in (["function"] * 3, ["data_transformation", "parameter_fabrication", "remainder"])
    )
    found = read(config(new))
    assert found.spec == read({"configurations": config(old)}).spec
    assert head_of(found) == kp.HeadSpec(kp.BSpline(10, 4), kp.LowRank(3), kp.LinearRemainder())
    assert found.spec.widths == (6, 4)
    assert "extrapolation: extended" in " ".join(found.differences)


TABLES = {
    "expansion": tinybig.EXPANSIONS,
    "reconciliation": tinybig.RECONCILIATIONS,
    "remainder": tinybig.REMAINDERS,
    "fusion": tinybig.FUSIONS,
}
SKIPPED = ("none", "different", "nested", "extended")
KNOWN = [
    (role, short, page)
    for role, name, page in table()
    if role in TABLES and page not in SKIPPED
    if (short := name.removesuffix(f"_{role}")) in TINYBIG[role].split()
]
ALIASES = {"low_rank": "lorr", "hypercomplex_multiplication": "hm"}


@pytest.mark.parametrize(("role", "name", "page"), KNOWN, ids=[f"{role}-{name}" for role, name, _ in KNOWN])
def test_names_of_the_page_are_read(role, name, page):
    name = ALIASES.get(name.removesuffix("_polynomial"), name.removesuffix("_polynomial"))
    counterpart = TABLES[role][name]
    base = {"expansion": kp.Expansion, "reconciliation": kp.Reconciliation, "remainder": kp.Remainder}
    kind = base.get(role) or type(kp.LayerSpec().fusion).__mro__[1]
    found = from_dict({"kind": counterpart.kind, **counterpart.defaults}, kind)
    stated = from_dict(parse_yaml(page, "page"), kind)
    assert type(found) is type(stated)
    if page.startswith("{") and name not in ("laguerre", "gegenbauer"):  # those have tinyBIG's degree 2 besides
        assert found == stated


@pytest.mark.parametrize(
    ("name", "parameters", "expected"),
    [
        ("taylor_expansion", {}, kp.Taylor(2)),
        ("chebyshev_expansion", {"d": 4, "name": "x", "device": "mps"}, kp.Chebyshev(4)),
        ("jacobi_expansion", {"alpha": 2.0}, kp.Jacobi(2, alpha=2.0, beta=1.0)),
        ("bspline_expansion", {"grid_range": [-2, 3]}, kp.BSpline(5, 3, low=-2.0, high=3.0)),
        ("gaussian_rbf_expansion", {"epsilon": 4.0, "num_interval": 3}, kp.GaussianRBF(3, low=-1.0, high=1.0, width=0.25)),
        (
            "nested_expansion",
            {"composition_function_configs": [function("bspline_expansion"), function("taylor_expansion")]},
            kp.Nested((kp.BSpline(), kp.Taylor(2))),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_expansions(read, name, parameters, expected):
    head = {"data_transformation_configs": function(name, **parameters)}
    assert head_of(read(config(head))).expansion == expected


def test_processing_channels_and_heads(read):
    norm = {"function_class": "torch.nn.LayerNorm", "function_parameters": {"normalized_shape": 42, "eps": 1e-3}}
    head = {
        "data_transformation_configs": function("taylor_expansion", postprocess_function_configs=[norm]),
        "parameter_fabrication_configs": function("masking_reconciliation", p=0.3, enable_bias=True),
        "remainder_configs": function(
            "linear_remainder", activation_function_configs={"function_class": "torch.nn.SiLU"}
        ),
        "channel_num": 3,
    }
    found = read(config(head, layer={"width": 2}))
    (layer,) = found.spec.layers
    assert len(layer.heads) == 2
    assert layer.fusion == kp.Mean()  # tinyBIG averages heads and channels
    expected = kp.HeadSpec(
        kp.Taylor(2),
        kp.Masked(0.3),
        kp.LinearRemainder(after="silu"),
        bias=True,
        channels=3,
        after=({"kind": "layer_norm", "affine": True, "epsilon": 1e-3},),
        fusion="mean",
    )
    assert layer.heads[0] == expected


def test_layers_are_repeated_and_must_fit(read):
    square = {"m": 5, "n": 5}
    found = read(config(layer=square, model={"depth": 3}))
    assert found.spec.widths == (5, 5, 5, 5)
    with pytest.raises(SpecError, match=r"layer_configs\[1\]: m is 6, and the layer before has 4 outputs"):
        read(config(model={"depth_alloc": [2]}))
    with pytest.raises(SpecError, match="depth is 3, depth_alloc has 2"):
        read(config(layer=square, model={"depth": 3, "depth_alloc": [2]}))


def test_the_kan_head_is_the_sum_of_splines_and_silu(read):
    layer = {"head_configs": function("kan_head", "head", t=8, with_lorr=True, r=2)}
    head = head_of(read(config(layer=layer)))
    assert head == kp.HeadSpec(kp.BSpline(8), kp.LowRank(2), kp.LinearRemainder(after="silu"))


def learner(**others):
    optimizer = {"optimizer_class": "torch.optim.AdamW", "optimizer_parameters": {"lr": 0.002, "weight_decay": 1e-4}}
    scheduler = {
        "lr_scheduler_class": "torch.optim.lr_scheduler.ExponentialLR",
        "lr_scheduler_parameters": {"gamma": 0.9},
    }
    loss = {"loss_class": "torch.nn.CrossEntropyLoss"}
    options = {"n_epochs": 7, "optimizer_configs": optimizer, "lr_scheduler_configs": scheduler, "loss_configs": loss}
    return function("backward_learner", "learner", **(options | others))


def test_the_recipe_is_that_of_the_file(read):
    data = function("mnist", "data", train_batch_size=64)
    found = read(config(learner_configs=learner(), data_configs=data, random_seed=12))
    solver = kp.AdamW(learning_rate=0.002, weight_decay=1e-4, schedule="exponential", gamma=0.9, batch_size=64)
    expected = kp.TrainConfig(seed=12, epochs=7, loss="cross_entropy", solver=solver)
    assert from_dict(found.training, kp.TrainConfig) == expected
    assert any(line.startswith("data set mnist") for line in found.differences)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_transformation_configs": function("taylor_expansion", order=3)}, "no option of taylor 'order'"),
        ({"data_transformation_configs": {"function_class": "os.system"}}, "'system'"),
        ({"data_transformation_configs": {"a_class": "x", "b_class": "y"}}, "one key such as function_class"),
        ({"data_transformation_configs": None}, "expected a mapping, got NoneType"),
        ({"attribute_interdependence_configs": function("geometric")}, "no interdependence"),
        ({"parameter_fabrication_configs": function("random_matrix_hypernet_reconciliation")}, "choose from constant"),
        ({"channel_num": 10**9}, "channels"),
    ],
)
def test_faults_name_the_place(read, change, message):
    with pytest.raises(SpecError, match=message) as caught:
        read(config(change))
    assert "config.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_device_without_end_is_read_up_to_the_limit():
    with pytest.raises(SpecError, match=r"/dev/zero: is too long"):
        tinybig.read_config("/dev/zero")


def test_anchors_of_single_values_are_read_and_bombs_are_not(read):
    text = yaml.safe_dump(config())
    found = read(f"device: &device mps\nother: *device\n{text}")
    assert found.spec.widths == (6, 4)
    with pytest.raises(SpecError, match="anchors"):
        read(f"a: &a [1, 1]\nb: [*a, *a]\n{text}")


def test_the_command_writes_a_specification_that_fits(read, tmp_path, capsys):
    spec = read(config(learner_configs=learner())).spec
    target = tmp_path / "model.yaml"
    assert main(["import", "tinybig", str(tmp_path / "config.yaml"), "--output", str(target)]) == 0
    shown = capsys.readouterr()
    assert kp.load_spec(target) == spec
    assert "--set training.epochs=7" in shown.err
    assert "specification: " in shown.out
    assert main(["import", "tinybig", str(tmp_path / "config.yaml"), "--output", str(target)]) == 2
    assert "exists already" in capsys.readouterr().err
    source = str(tmp_path / "config.yaml")
    assert main(["import", "tinybig", source, "--output", source, "--overwrite"]) == 2
    assert "is an input of this command" in capsys.readouterr().err
    assert main(["import", "tinybig", str(tmp_path / "config.yaml"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["model"]["widths"] == [6, 4]
    assert data["training"]["epochs"] == 7
    assert main(["import", "tinybig", str(tmp_path / "config.yaml")]) == 0
    assert parse_yaml(capsys.readouterr().out, "")["widths"] == [6, 4]
