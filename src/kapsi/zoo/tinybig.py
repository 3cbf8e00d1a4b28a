"""Configuration files of tinyBIG 0.2.1 as specifications.

Functions are found in tables of names; no path of a file is imported. Both key styles of tinyBIG are read:
`function_class` with `function_parameters`, and a key for each part, such as `remainder_class` with `remainder_parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kapsi.errors import SpecError, unknown
from kapsi.spec import ModelSpec, from_dict, read_yaml
from kapsi.training.config import TrainConfig

__all__ = ["Imported", "read_config"]


@dataclass(frozen=True)
class Imported:
    """A configuration of tinyBIG in the terms of kapsi.

    Args:
        spec: the model.
        training: options of `TrainConfig` as plain data; empty if the file states no learner.
        differences: what kapsi does differently, and what it leaves out, one line each.
    """

    spec: ModelSpec
    training: dict[str, Any]
    differences: tuple[str, ...]


@dataclass(frozen=True)
class Counterpart:
    """A function of kapsi for a class of tinyBIG.

    Args:
        kind: registered name in kapsi.
        defaults: options at tinyBIG's defaults.
        renamed: options of tinyBIG and their names in kapsi.
        difference: how the function differs, empty if it does not.
        ignored: options of tinyBIG without a counterpart; the difference states them.
    """

    kind: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    difference: str = ""
    ignored: tuple[str, ...] = ()


def _polynomial(kind: str, **more: float) -> Counterpart:
    return Counterpart(kind, {"degree": 2, **more}, {"d": "degree", **{name: name for name in more}})


def _density(kind: str, **parameters: Any) -> Counterpart:
    counts = [len(values) for values in parameters.values() if isinstance(values, list)]
    return Counterpart(kind, {"count": counts[0] if counts else 1, **parameters})


def _radial(kind: str) -> Counterpart:
    defaults = {"centers": 10, "low": -1.0, "high": 1.0, "width": 1.0}
    return Counterpart(kind, defaults, {"num_interval": "centers", "base": "centers"})


def _wavelet(kind: str) -> Counterpart:
    difference = (
        "wavelets are placed on a grid of scales and shifts; dilations, translations and widths of tinyBIG are left out"
    )
    return Counterpart(
        kind, {}, {}, difference, ("d", "s", "t", "a", "b", "alpha", "beta", "sigma", "sigma_1", "sigma_2")
    )


SIX = {"location": [0, 0, 1, 1, -1, -1]}
SHAPES = {"shape": [0.5, 0.5, 1, 1, 2, 2], "scale": [1, 0.5, 1, 0.5, 1, 0.5]}
EXPANSIONS: dict[str, Counterpart] = {
    "identity": Counterpart("identity"),
    "reciprocal": Counterpart("reciprocal"),
    "linear": Counterpart("linear", {}, {"c": "scale"}),
    "taylor": _polynomial("taylor"),
    "fourier": Counterpart("fourier", {"period": 10.0, "harmonics": 5}, {"P": "period", "N": "harmonics"}),
    "bspline": Counterpart(
        "b_spline",
        {"intervals": 5, "degree": 3, "low": -1.0, "high": 1.0},
        {"t": "intervals", "d": "degree"},
        "B-splines continue linearly outside of their grid; those of tinyBIG are zero there (extrapolation: extended)",
    ),
    "chebyshev": _polynomial("chebyshev"),
    "jacobi": _polynomial("jacobi", alpha=1.0, beta=1.0),
    "hermite": _polynomial("hermite"),
    "laguerre": _polynomial("laguerre", alpha=1.0),
    "legendre": _polynomial("legendre"),
    "gegenbauer": _polynomial("gegenbauer", alpha=1.0),
    "bessel": _polynomial("bessel"),
    "reverse_bessel": _polynomial("reverse_bessel"),
    "fibonacci": _polynomial("fibonacci"),
    "lucas": _polynomial("lucas"),
    "hyperbolic": Counterpart("hyperbolic"),
    "arc_hyperbolic": Counterpart("inverse_hyperbolic"),
    "trigonometric": Counterpart("trigonometric"),
    "arc_trigonometric": Counterpart("inverse_trigonometric"),
    "gaussian_rbf": _radial("gaussian_rbf"),
    "inverse_quadratic_rbf": _radial("inverse_quadratic_rbf"),
    "harr_wavelet": _wavelet("haar"),
    "beta_wavelet": _wavelet("beta_wavelet"),
    "ricker_wavelet": _wavelet("ricker"),
    "shannon_wavelet": _wavelet("shannon"),
    "dog_wavelet": _wavelet("derivative_of_gaussian"),
    "meyer_wavelet": _wavelet("meyer"),
    "combinatorial": Counterpart("combinatorial", {}, {"d": "order", "with_replacement": "replacement"}),
    "combinatorial_normal": Counterpart("combinatorial_normal", {"order": 1}, {"d": "order"}),
    "naive_normal": _density("naive_normal", mean=0, std=1),
    "naive_cauchy": _density("naive_cauchy", location=0, scale=1),
    "naive_laplace": _density("naive_laplace", location=0, scale=1),
    "naive_chi2": _density("naive_chi_squared", degrees=1),
    "naive_gamma": _density("naive_gamma", shape=0.5, scale=1),
    "naive_exponential": _density("naive_exponential", rate=0.5),
    "normal": _density("naive_normal", mean=[0, 1, -1, 0, 1, -1], std=[1, 1, 1, 0.1, 0.1, 0.1]),
    "cauchy": _density("naive_cauchy", **SIX, scale=[1, 0.5, 1, 0.5, 1, 0.5]),
    "laplace": _density("naive_laplace", **SIX, scale=[1, 2, 1, 2, 1, 2]),
    "chi2": _density("naive_chi_squared", degrees=[1, 2]),
    "gamma": _density("naive_gamma", **SHAPES),
    "exponential": _density("naive_exponential", rate=[0.5, 0.75, 1, 2, 3, 5]),
    "hybrid_probabilistic": Counterpart(
        "naive_mixed", {"count": 1}, {}, "the densities of naive_mixed start at values measured from data"
    ),
}
RECONCILIATIONS: dict[str, Counterpart] = {
    "constant": Counterpart("constant", {}, {"c": "value"}),
    "constant_c": Counterpart("constant", {}, {"c": "value"}),
    "zero": Counterpart("zero"),
    "one": Counterpart("one"),
    "constant_eye": Counterpart("eye"),
    "identity": Counterpart("dense"),
    "masking": Counterpart("masked", {"ratio": 0.5}, {"p": "ratio"}),
    "duplicated_padding": Counterpart("duplicated", {"rows": 2}, {"p": "rows", "q": "columns"}),
    "lorr": Counterpart("low_rank", {"rank": 2}, {"r": "rank"}),
    "hm": Counterpart("kronecker", {}, {"p": "rows", "q": "columns"}),
    "lphm": Counterpart("low_rank_kronecker", {"rank": 2}, {"p": "rows", "q": "columns", "r": "rank"}),
    "dual_lphm": Counterpart("dual_low_rank_kronecker", {"rank": 2}, {"p": "rows", "q": "columns", "r": "rank"}),
    "hypernet": Counterpart("hypernet", {"length": 64, "hidden": 128}, {"l": "length", "hidden_dim": "hidden"}),
    "random_matrix_adaption": Counterpart("random_adaption", {"rank": 2}, {"r": "rank"}),
}
REMAINDERS: dict[str, Counterpart] = {
    "constant": Counterpart("constant", {}, {"c": "value"}),
    "one": Counterpart("constant", {"value": 1.0}),
    "zero": Counterpart("zero"),
    "identity": Counterpart("identity"),
    "linear": Counterpart("linear", {}, {"enable_bias": "bias"}),
}
FUSIONS: dict[str, Counterpart] = {
    "summation": Counterpart("sum"),
    "sum": Counterpart("sum"),
    "average": Counterpart("mean"),
    "mean": Counterpart("mean"),
    "parameterized_weighted_summation": Counterpart("weighted_sum"),
    "parameterized_concatenation": Counterpart("concatenation"),
}
PROCESSES: dict[str, Counterpart] = {
    **{
        name: Counterpart(name.lower())
        for name in ("ReLU", "SiLU", "GELU", "Tanh", "Sigmoid", "Softplus", "ELU", "Mish", "SELU", "Softsign")
    },
    **{name: Counterpart(name) for name in ("relu", "silu", "gelu", "tanh", "sigmoid", "softplus", "elu", "mish")},
    "LeakyReLU": Counterpart("leaky_relu"),
    "leaky_relu": Counterpart("leaky_relu"),
    "Dropout": Counterpart("dropout", {}, {"p": "p"}),
    "LayerNorm": Counterpart(
        "layer_norm", {"affine": True}, {"eps": "epsilon", "elementwise_affine": "affine"}, "", ("normalized_shape",)
    ),
    "layer_norm": Counterpart("layer_norm", {}, {"eps": "epsilon"}, "", ("normalized_shape",)),
    "BatchNorm1d": Counterpart(
        "batch_norm",
        {"affine": True},
        {"eps": "epsilon", "momentum": "momentum", "affine": "affine"},
        "",
        ("num_features",),
    ),
}
LOSSES = {"CrossEntropyLoss": "cross_entropy", "MSELoss": "mse", "HuberLoss": "huber"}
METRICS = {"accuracy": "accuracy", "f1": "f1", "mse": "mse"}
LAYERS, HEADS = ("rpn_layer", "layer"), ("rpn_head", "head")
SPARE = ("name", "device")
"""Options of all functions that no result depends on."""


def read_config(path: str | Path) -> Imported:
    """Read a configuration of tinyBIG from a YAML file.

    Args:
        path: the file, with `model_configs`, alone or below `configurations`.

    Returns:
        Specification, training options, and the list of differences.

    Raises:
        SpecError: the file cannot be read, or names a function without a counterpart in kapsi.

    Example:
        >>> import tempfile, kapsi as kp
        >>> text = '''
        ... model_configs:
        ...   model_class: tinybig.model.rpn
        ...   model_parameters:
        ...     layer_configs:
        ...       layer_class: tinybig.module.rpn_layer
        ...       layer_parameters:
        ...         m: 4
        ...         n: 3
        ...         head_configs:
        ...           head_class: tinybig.module.rpn_head
        ...           head_parameters:
        ...             data_transformation_configs: {function_class: tinybig.expansion.taylor_expansion}
        ...             parameter_fabrication_configs:
        ...               function_class: tinybig.reconciliation.lorr_reconciliation
        ...               function_parameters: {r: 1}
        ... '''
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with open(f"{folder}/config.yaml", "w") as file:
        ...         _ = file.write(text)
        ...     found = kp.zoo.tinybig.read_config(f"{folder}/config.yaml")
        >>> found.spec.widths, found.spec.layers[0].heads[0].reconciliation
        ((4, 3), LowRank(rank=1))
    """
    where = str(path)
    data = read_yaml(path, "configuration of tinyBIG", "configs of its examples", scalar_anchors=True)
    data = _mapping(data, where)
    if "configurations" in data:
        where, data = f"{where}: configurations", _mapping(data["configurations"], f"{where}: configurations")
    if "model_configs" not in data:
        raise SpecError(f"{where}: no model_configs; expected a configuration of tinyBIG")
    reader = _Reader()
    spec = reader.model(data["model_configs"], f"{where}.model_configs")
    training = reader.training(data, where)
    return Imported(spec, training, tuple(dict.fromkeys(reader.differences)))


class _Reader:
    """Translation of one file; collects the differences."""

    def __init__(self) -> None:
        self.differences: list[str] = ["initial values follow kapsi's rules; init: xavier_uniform is that of tinyBIG"]

    # -------------------------------------------------------------------------------------------- model, layers, heads

    def model(self, config: Any, where: str) -> ModelSpec:
        name, options = self.named(config, where)
        if name != "rpn":
            raise SpecError(f"{where}: {name}: only tinybig.model.rpn can be read; see kapsi.zoo for the other models")
        layers = repeated(options, "depth", "layer_configs", where)
        specs: list[dict[str, Any]] = []
        widths: list[int] = []
        for i, config in enumerate(layers):
            m, n, layer = self.layer(config, f"{where}.layer_configs[{i}]")
            if widths and widths[-1] != m:
                raise SpecError(f"{where}.layer_configs[{i}]: m is {m}, and the layer before has {widths[-1]} outputs")
            widths += [n] if widths else [m, n]
            specs.append(layer)
        data = {"widths": widths, "layers": specs[:1] if all(layer == specs[0] for layer in specs) else specs}
        spec: ModelSpec = from_dict(data, ModelSpec, where)
        return spec

    def layer(self, config: Any, where: str) -> tuple[int, int, dict[str, Any]]:
        name, options = self.named(config, where)
        for key in ("m", "n"):
            if isinstance(options.get(key), bool) or not isinstance(options.get(key), int):
                raise SpecError(f"{where}: {key} must be a number of features, got {options.get(key)!r}")
        if name == "kan_layer":
            pairs: list[tuple[dict[str, Any], list[Any]]] = [(self.kan_head(options, where), [])]
            pairs *= options.get("width") or 1
        elif name in LAYERS:
            pairs = [
                self.head(head, f"{where}.head_configs[{i}]")
                for i, head in enumerate(repeated(options, "width", "head_configs", where))
            ]
        else:
            raise SpecError(f"{where}: {unknown('layer of tinyBIG', name, [*LAYERS, 'kan_layer'])}")
        heads, outputs = [head for head, _ in pairs], [output for _, output in pairs]
        spec: dict[str, Any] = {"heads": heads}
        if len(heads) > 1:
            if any(outputs):
                raise SpecError(
                    f"{where}: output processing of single heads in a layer of several; kapsi has it for a layer"
                )
            spec["fusion"] = self.fusion(options.get("head_fusion_configs"), where)
        elif outputs[0]:
            spec["output"] = outputs[0]
        return options["m"], options["n"], spec

    def head(self, config: Any, where: str) -> tuple[dict[str, Any], list[Any]]:
        """Return a head and the processing of its output."""
        name, options = self.named(config, where)
        if name == "kan_head":
            return self.kan_head(options, where), []
        if name not in HEADS:
            raise SpecError(f"{where}: {unknown('head of tinyBIG', name, [*HEADS, 'kan_head'])}")
        for key in ("attribute_interdependence_configs", "instance_interdependence_configs"):
            if options.get(key) is not None:
                raise SpecError(f"{where}.{key}: kapsi has no interdependence functions")
        expansion, before, after = self.expansion(options.get("data_transformation_configs"), where)
        reconciliation, bias = self.reconciliation(options.get("parameter_fabrication_configs"), where)
        remainder = self.remainder(options.get("remainder_configs"), where)
        inputs = self.processes(options.get("input_process_function_configs"), where)
        if inputs and remainder != {"kind": "zero"}:
            self.differences.append("processing of the inputs of a head applies to κ, not to the remainder")
        channels = options.get("channel_num") or 1
        head = {
            "expansion": expansion,
            "reconciliation": reconciliation,
            "remainder": remainder,
            "bias": bias,
            "channels": channels,
            "before": [*inputs, *before],
            "after": after,
        }
        if channels != 1:
            head["fusion"] = self.fusion(options.get("channel_fusion_configs"), where)
        return head, self.processes(options.get("output_process_function_configs"), where)

    def kan_head(self, options: Mapping[str, Any], where: str) -> dict[str, Any]:
        spline = {
            "function_class": "bspline_expansion",
            "function_parameters": {key: options[key] for key in ("grid_range", "t", "d") if key in options},
        }
        low_rank = {"kind": "low_rank", "rank": options.get("r", 3)}
        return {
            "expansion": self.expansion(spline, where)[0],
            "reconciliation": low_rank if options.get("with_lorr") else {"kind": "dense"},
            "remainder": {"kind": "linear", "after": "silu"},
            "bias": bool(options.get("enable_bias", False)),
            "channels": options.get("channel_num") or 1,
        }

    # -------------------------------------------------------------------------------------------- functions

    def expansion(self, config: Any, where: str) -> tuple[dict[str, Any], list[Any], list[Any]]:
        """Return an expansion, and the processing before and after it."""
        where = f"{where}.data_transformation_configs"
        name, options = self.named(config, where)
        name = name.removesuffix("_expansion").removesuffix("_polynomial")
        before = self.processes(options.pop("preprocess_function_configs", None), where)
        after = self.processes(options.pop("postprocess_function_configs", None), where)
        if name in ("nested", "extended"):
            key = "composition_function_configs"
            parts = []
            for part in options.get(key) or ():
                inner, first, last = self.expansion(part, f"{where}.{key}")
                parts.append({"kind": "processed", "expansion": inner, "before": first, "after": last})
                if not first and not last:
                    parts[-1] = inner
            return {"kind": name, "parts": parts}, before, after
        for key, ends in (("grid_range", ("low", "high")), ("base_range", ("low", "high"))):
            if key in options:
                limits = options.pop(key)
                if not isinstance(limits, list) or len(limits) != 2:
                    raise SpecError(f"{where}: {key} must be two numbers, got {limits!r}")
                options.update(zip(ends, limits, strict=True))
        if "epsilon" in options:
            options["width"] = 1 / options.pop("epsilon") if options["epsilon"] else 0
        return self.function(EXPANSIONS, "expansion", name, options, where), before, after

    def reconciliation(self, config: Any, where: str) -> tuple[dict[str, Any], bool]:
        """Return a reconciliation, and whether the head has a bias."""
        where = f"{where}.parameter_fabrication_configs"
        name, options = self.named(config, where)
        name = name.removesuffix("_reconciliation")
        name = {"low_rank": "lorr", "hypercomplex_multiplication": "hm"}.get(name, name)
        bias = bool(options.pop("enable_bias", False))
        fixed, static = options.pop("fixed_mask", True), options.pop("static", True)
        options.pop("require_parameters", None)
        found = self.function(RECONCILIATIONS, "reconciliation", name, options, where)
        if not fixed:
            found["kind"] = "drop_connect"
        if not static:
            found["trained"] = True
        return found, bias

    def remainder(self, config: Any, where: str) -> dict[str, Any]:
        if config is None:
            return {"kind": "zero"}
        where = f"{where}.remainder_configs"
        name, options = self.named(config, where)
        name = name.removesuffix("_remainder")
        processes = self.processes(options.pop("activation_function_configs", None), where)
        if not options.pop("require_parameters", True) and name == "linear":
            name = "identity"
        if name != "linear":
            options.pop("enable_bias", None)
        found = self.function(REMAINDERS, "remainder", name, options, where)
        if processes:
            key = {"linear": "after", "identity": "activation"}.get(found["kind"])
            if key is None or len(processes) > 1:
                raise SpecError(f"{where}: activations of a {name} remainder, or several of them, have no counterpart")
            found[key] = processes[0]
        return found

    def fusion(self, config: Any, where: str) -> Any:
        if config is None:
            return "mean"
        where = f"{where}.fusion_configs"
        name, options = self.named(config, where)
        for key in ("dims", "require_parameters", "n"):
            options.pop(key, None)
        return self.function(FUSIONS, "fusion", name.removesuffix("_fusion"), options, where)

    def processes(self, configs: Any, where: str) -> list[Any]:
        found = []
        for config in configs if isinstance(configs, list) else [] if configs is None else [configs]:
            name, options = self.named(config, where)
            if name in ("Softmax", "LogSoftmax", "softmax", "log_softmax"):
                self.differences.append(f"{name} is left out: the loss takes logits, and predictions are probabilities")
            elif name != "Identity":
                found.append(self.function(PROCESSES, "process", name, options, where))
        return found

    def function(
        self, table: Mapping[str, Counterpart], role: str, name: str, options: Mapping[str, Any], where: str
    ) -> dict[str, Any]:
        """Return a function of kapsi as plain data."""
        if name not in table:
            raise SpecError(
                f"{where}: {unknown(f'{role} of tinyBIG with a counterpart in kapsi', name, sorted(table))}"
            )
        counterpart = table[name]
        found: dict[str, Any] = {"kind": counterpart.kind, **counterpart.defaults}
        for option, value in options.items():
            target = counterpart.renamed.get(option, option if option in counterpart.defaults else None)
            if target is not None and value is not None:
                found[target] = value
            elif target is None and option not in (*SPARE, *counterpart.ignored):
                raise SpecError(f"{where}: {unknown(f'option of {name}', option, sorted(counterpart.renamed))}")
        if counterpart.difference:
            self.differences.append(counterpart.difference)
        return found

    # -------------------------------------------------------------------------------------------- training

    def training(self, data: Mapping[str, Any], where: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if data.get("random_seed") is not None:
            found["seed"] = data["random_seed"]
        if data.get("learner_configs") is None:
            return found
        place = f"{where}.learner_configs"
        name, options = self.named(data["learner_configs"], place)
        if name != "backward_learner":
            self.differences.append(f"learner {name}: kapsi chooses the solver")
            return found
        if options.get("n_epochs") is not None:
            found["epochs"] = options["n_epochs"]
        if options.get("loss_configs") is not None:
            loss, _ = self.named(options["loss_configs"], f"{place}.loss_configs")
            if loss in LOSSES:
                found["loss"] = LOSSES[loss]
            else:
                self.differences.append(f"loss {loss}: kapsi chooses the loss")
        if options.get("optimizer_configs") is not None:
            solver = self.solver(options, f"{place}.optimizer_configs")
            if solver is not None:
                found["solver"] = solver | self.batches(data, where)
        if data.get("metric_configs") is not None:
            metric, _ = self.named(data["metric_configs"], f"{where}.metric_configs")
            if metric in METRICS:
                found["metrics"] = [METRICS[metric]]
        self.differences.append("scores: tinyBIG reports every epoch on the test rows, kapsi selects on held-out rows")
        from_dict(found, TrainConfig, place)
        return found

    def solver(self, learner: Mapping[str, Any], where: str) -> dict[str, Any] | None:
        name, options = self.named(learner["optimizer_configs"], where)
        if name not in ("AdamW", "Adam", "SGD"):
            self.differences.append(f"optimizer {name}: kapsi chooses the solver")
            return None
        decay = options.get("weight_decay", 0.01 if name == "AdamW" else 0.0)
        if name == "Adam" and decay:
            self.differences.append("optimizer Adam: adamw, whose weight decay is not part of the gradient")
        found = {"kind": "sgd" if name == "SGD" else "adamw", "learning_rate": options.get("lr", 0.001)}
        if name != "SGD" or decay:
            found["weight_decay"] = decay
        if "momentum" in options:
            found["momentum"] = options["momentum"]
        schedule, gamma = "constant", None
        if learner.get("lr_scheduler_configs") is not None:
            scheduler, parameters = self.named(learner["lr_scheduler_configs"], where)
            if scheduler == "ExponentialLR":
                schedule, gamma = "exponential", parameters.get("gamma")
            elif scheduler == "CosineAnnealingLR":
                schedule = "cosine"
            else:
                self.differences.append(f"schedule {scheduler}: the learning rate stays constant")
        return found | {"schedule": schedule} | ({"gamma": gamma} if gamma is not None else {})

    def batches(self, data: Mapping[str, Any], where: str) -> dict[str, Any]:
        if data.get("data_configs") is None:
            return {}
        name, options = self.named(data["data_configs"], f"{where}.data_configs")
        self.differences.append(f"data set {name}: kapsi fit takes a table, kapsi data benchmark functions")
        size = options.get("train_batch_size")
        return {} if size is None else {"batch_size": size}

    # -------------------------------------------------------------------------------------------- keys

    def named(self, config: Any, where: str) -> tuple[str, dict[str, Any]]:
        """Return the last part of a class path, which is never imported, and the parameters."""
        config = _mapping(config, where)
        keys = [key for key in config if str(key).endswith("_class")]
        if len(keys) != 1 or not isinstance(config[keys[0]], str):
            raise SpecError(f"{where}: expected one key such as function_class with the name of a class")
        parameters = f"{keys[0].removesuffix('_class')}_parameters"
        for key in config:
            if key not in (keys[0], parameters, *SPARE):
                self.differences.append(f"{key} beside {parameters} has no effect in tinyBIG; it is left out")
        options = config.get(parameters)
        return config[keys[0]].rsplit(".", 1)[-1], dict(
            _mapping({} if options is None else options, f"{where}.{parameters}")
        )


def _mapping(data: Any, where: str) -> dict[Any, Any]:
    if not isinstance(data, dict):
        raise SpecError(f"{where}: expected a mapping, got {type(data).__name__}")
    return data


def repeated(options: Mapping[str, Any], total: str, key: str, where: str) -> list[Any]:
    """Return the configurations of layers or heads, repeated as tinyBIG does by `depth` and `depth_alloc`, or `width`."""
    configs = options.get(key)
    configs = configs if isinstance(configs, list) else [] if configs is None else [configs]
    if not configs:
        raise SpecError(f"{where}: {key} is empty")
    counts, number = options.get(f"{total}_alloc"), options.get(total)
    if counts is None:
        counts = [number] if len(configs) == 1 and number is not None else [1] * len(configs)
    counts = counts if isinstance(counts, list) else [counts]
    if len(counts) != len(configs) or not all(type(n) is int and 1 <= n <= 4096 for n in counts):
        raise SpecError(f"{where}: {total}_alloc must be one count for each of {len(configs)} {key}, got {counts}")
    if number is not None and number != sum(counts):
        raise SpecError(f"{where}: {total} is {number}, {total}_alloc has {sum(counts)}")
    return [config for config, count in zip(configs, counts, strict=True) for _ in range(count)]
