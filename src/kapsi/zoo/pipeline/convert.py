"""Conversion of fitted pipelines of scikit-learn: encoders, then layers, then the model of the last step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from kapsi.errors import SpecError
from kapsi.expansion import Expansion, Extended, Identity, SelectedInputs
from kapsi.modules import Head, Layer, Model
from kapsi.reconciliation import Dense
from kapsi.spec import HeadSpec, ModelSpec
from kapsi.standardize import Moments, standardize
from kapsi.zoo.base import Case, Comparison, check_estimator, deviation, float64, model_of, one_head, plain_head, sizes
from kapsi.zoo.pipeline.encoders import (
    RawBins,
    RawBranches,
    RawCategories,
    RawEncoder,
    RawFill,
    RawScaling,
    category_table,
)
from kapsi.zoo.pipeline.model import OutputKind, PipelineModel

SCALERS = ("StandardScaler", "MinMaxScaler", "MaxAbsScaler", "RobustScaler")
ENCODERS = ("SimpleImputer", "OneHotEncoder", "OrdinalEncoder", "KBinsDiscretizer")
BRANCHES = ("ColumnTransformer", "FeatureUnion")
EXPANSIONS = ("PolynomialFeatures", "SplineTransformer")
COMPONENTS = ("PCA", "TruncatedSVD", "KMeans", "MiniBatchKMeans")
STEPS = (*SCALERS, *ENCODERS, *BRANCHES, *EXPANSIONS, *COMPONENTS)


@dataclass(frozen=True, eq=False)
class Stage:
    """A linear map of an expansion of the encoded columns, y = W κ(x) + b, from one or several steps.

    Args:
        expansion: κ.
        tensors: tensors of κ.
        matrix: W, `(columns, D)`.
        bias: b, `(columns,)`.
    """

    expansion: Expansion
    tensors: dict[str, Any]
    matrix: Tensor
    bias: Tensor

    def model(self, inputs: int) -> Model:
        """Return the stage as a model of one layer."""
        layout = one_head(HeadSpec(self.expansion, Dense(), bias=True), inputs, len(self.matrix))
        return model_of(layout, self.bias, expansion=self.tensors, reconciliation={"matrix": self.matrix})


class Flow(NamedTuple):
    """The steps before the last step.

    Attributes:
        encoders: steps on raw columns.
        moments: shift and scale of the encoded columns, None for none.
        stages: expansions behind, in order.
        width: number of columns at the end.
        encoded: number of encoded columns.
    """

    encoders: tuple[RawEncoder, ...]
    moments: tuple[Tensor, Tensor] | None
    stages: tuple[Stage | Model, ...]
    width: int
    encoded: int


def from_sklearn(pipeline: Any) -> PipelineModel:
    """Return a fitted pipeline of scikit-learn as a `PipelineModel`, whose predictions equal those of the pipeline.

    | step | becomes |
    |---|---|
    | `SimpleImputer`, `OneHotEncoder`, `OrdinalEncoder`, `KBinsDiscretizer` | an encoding of raw columns |
    | `ColumnTransformer`, `FeatureUnion` | the encodings of their branches, side by side |
    | `StandardScaler`, `MinMaxScaler`, `MaxAbsScaler`, `RobustScaler` | a fixed layer; an encoding before encoders and trees |
    | `PolynomialFeatures`, `SplineTransformer` | κ of Taylor's monomials or B-splines, also of some columns |
    | `PCA`, `TruncatedSVD`, `KMeans` | a layer |
    | the last step | the model of its family: regressions, trees, networks, support vector machines, naive Bayes, components |

    A linear model behind an expansion becomes one layer with it.

    Args:
        pipeline: the fitted `Pipeline`; or a fitted estimator, as a pipeline of one step.

    Raises:
        SpecError: a step without a conversion, or in a place without one; the message names it.

    Example:
        >>> import numpy as np, pandas as pd
        >>> from sklearn.compose import make_column_transformer
        >>> from sklearn.linear_model import LogisticRegression
        >>> from sklearn.pipeline import make_pipeline
        >>> from sklearn.preprocessing import OneHotEncoder, StandardScaler
        >>> frame = pd.DataFrame({"age": [30.0, 41.0, 55.0, 62.0], "color": ["red", "blue", "red", "blue"]})
        >>> columns = make_column_transformer((StandardScaler(), ["age"]), (OneHotEncoder(handle_unknown="ignore"), ["color"]))
        >>> theirs = make_pipeline(columns, LogisticRegression()).fit(frame, ["a", "a", "b", "b"])
        >>> ours = from_sklearn(theirs)
        >>> new = pd.DataFrame({"color": ["green", "red"], "age": [48.0, 20.0]})
        >>> np.allclose(ours.predict_proba(new), theirs.predict_proba(new[["age", "color"]]), atol=1e-12)
        True
    """
    from sklearn.pipeline import Pipeline

    where = f"from_sklearn({type(pipeline).__name__})"
    steps = list(pipeline.steps) if type(pipeline) is Pipeline else [(type(pipeline).__name__, pipeline)]
    steps = [(name, step) for name, step in steps if step is not None and not _passes(step)]
    if not steps:
        raise SpecError(f"{where}: has no step that does anything; give a pipeline with a model")
    *before, (name, last) = steps
    trees = "Tree" in type(last).__name__ or type(last).__module__.startswith("sklearn.ensemble")
    inputs = next((int(step.n_features_in_) for _, step in steps if hasattr(step, "n_features_in_")), 0)
    names = getattr(steps[0][1], "feature_names_in_", None)
    columns = tuple(map(str, names)) if names is not None else tuple(f"x{i}" for i in range(inputs))
    flow = _flow(before, columns, where, all_encoded=trees)
    final = _final(last, f"{where}, step {name!r}")
    converted = PipelineModel(
        _joined(flow, final.model),
        flow.encoders,
        None if names is None else columns,
        inputs,
        classes=getattr(last, "classes_", None),
        **final.options,
    )
    return replace(converted, allows_missing=final.options.get("allows_missing", False) and not flow.stages)


def _passes(step: Any) -> bool:
    """Return whether a step passes its columns on."""
    identity = type(step).__name__ == "FunctionTransformer" and step.func is None
    return (isinstance(step, str) and step == "passthrough") or identity


# ------------------------------------------------------------------------------------------------ the steps before the last


def _flow(steps: Sequence[tuple[str, Any]], columns: Sequence[str], where: str, *, all_encoded: bool = False) -> Flow:
    """Return steps as encoders up to the last one that needs raw columns, and layers behind."""
    kinds = [type(step).__name__ for _, step in steps]
    needs = [
        kind in (*ENCODERS, *BRANCHES) or bool(getattr(s, "clip", False))
        for (_, s), kind in zip(steps, kinds, strict=True)
    ]
    scales = [kind in SCALERS for kind in kinds]
    raw = max((i + 1 for i, need in enumerate(needs) if need or (all_encoded and scales[i])), default=0)
    encoders: list[RawEncoder] = []
    flow = Flow((), None, (), len(columns), len(columns))
    for i, (name, step) in enumerate(steps):
        here = f"{where}, step {name!r}" if name else where
        _check_step(step, here)
        if i >= raw:
            flow = _layered(flow, step, here)
            continue
        if kinds[i] in BRANCHES:
            flow = _branches(step, columns, here, all_encoded=all_encoded or i + 1 < raw)
            encoders += flow.encoders
            if i + 1 < raw and flow.stages:
                raise SpecError(
                    f"{here}: has an expansion before {kinds[raw - 1]}; move the expansion behind the encoders"
                )
        elif kinds[i] in (*SCALERS, *ENCODERS):
            encoders.append(_scaling(step, here) if scales[i] else _encoder(step, columns, here))
        else:
            raise SpecError(
                f"{here}: {kinds[i]} comes before {kinds[raw - 1]}, which needs raw columns; move it behind"
            )
        columns = _names_after(step, columns)
        if kinds[i] not in BRANCHES:
            flow = Flow((), None, (), len(columns), len(columns))
    return flow._replace(encoders=tuple(encoders))


def _check_step(step: Any, where: str) -> None:
    """Raise a `SpecError` unless a step is converted and fitted."""
    from sklearn import cluster, compose, decomposition, impute, pipeline, preprocessing

    modules = (cluster, compose, decomposition, impute, pipeline, preprocessing)
    kinds = [getattr(module, name) for name in STEPS for module in modules if hasattr(module, name)]
    hint = "take it out of the pipeline, and apply it to the rows first"
    check_estimator(step, kinds, where, hint)


def _names_after(step: Any, columns: Sequence[str]) -> tuple[str, ...]:
    """Return names of the columns after a step, for messages and their number."""
    kind = type(step).__name__
    if kind in (*SCALERS, "OrdinalEncoder"):
        return tuple(columns)
    if kind == "KBinsDiscretizer" and step.encode == "ordinal":
        return tuple(columns)
    if kind in BRANCHES:
        return tuple(f"column {i}" for i in range(_width(step)))
    return tuple(map(str, step.get_feature_names_out(columns if not hasattr(step, "feature_names_in_") else None)))


def _width(step: Any) -> int:
    if type(step).__name__ == "FeatureUnion":
        return sum(len(part.get_feature_names_out()) for _, part in step.transformer_list if not isinstance(part, str))
    return max((part.stop for part in step.output_indices_.values()), default=0)


def _branches(step: Any, columns: Sequence[str], where: str, *, all_encoded: bool) -> Flow:
    """Return the branches of a `ColumnTransformer` or a `FeatureUnion`, side by side."""
    from sklearn.pipeline import Pipeline

    if step.transformer_weights:
        raise SpecError(f"{where}: transformer_weights are not supported; leave them out")
    union = type(step).__name__ == "FeatureUnion"
    every = tuple(range(len(columns)))
    parts = (
        [(name, part, every) for name, part in step.transformer_list]
        if union
        else [(name, part, tuple(step._transformer_to_input_indices[name])) for name, part, _ in step.transformers_]
    )
    encoded: list[tuple[tuple[int, ...], tuple[RawEncoder, ...]]] = []
    flows: list[Flow] = []
    for name, part, indices in parts:
        if (isinstance(part, str) and part == "drop") or not indices:
            continue
        inner = part.steps if type(part) is Pipeline else [("", part)]
        kept = [(key, value) for key, value in inner if value is not None and not _passes(value)]
        here = f"{where}, branch {name!r}"
        flow = _flow(kept, [columns[i] for i in indices], here, all_encoded=all_encoded)
        if len(flow.stages) > 1 or any(isinstance(stage, Model) for stage in flow.stages):
            raise SpecError(
                f"{here}: branch {name!r} has more than one expansion; put the further ones behind the branches"
            )
        flows.append(flow)
        encoded.append((indices, flow.encoders))
    return _side_by_side(flows, RawBranches(tuple(encoded)))


def _side_by_side(flows: Sequence[Flow], encoder: RawBranches) -> Flow:
    """Return flows of parts of the columns as one."""
    total, moments = sum(flow.encoded for flow in flows), None
    if any(flow.moments for flow in flows):
        pairs = [
            flow.moments or (torch.zeros(flow.encoded).double(), torch.ones(flow.encoded).double()) for flow in flows
        ]
        moments = torch.cat([shift for shift, _ in pairs]), torch.cat([scale for _, scale in pairs])
    if not any(flow.stages for flow in flows):
        return Flow((encoder,), moments, (), total, total)
    kappas, tensors, matrices, biases, first = [], {}, [], [], 0
    for i, flow in enumerate(flows):
        stage = cast(Stage, flow.stages[0]) if flow.stages else _identity(flow.encoded)
        kappas.append(SelectedInputs(stage.expansion, flow.encoded))
        selection = torch.arange(first, first + flow.encoded)
        tensors[str(i)] = {"selection": selection, "inputs": torch.tensor([total]), "expansion": stage.tensors}
        matrices.append(stage.matrix)
        biases.append(stage.bias)
        first += flow.encoded
    whole = Stage(Extended(tuple(kappas)), tensors, torch.block_diag(*matrices), torch.cat(biases))
    return Flow((encoder,), moments, (whole,), len(whole.matrix), total)


def _identity(count: int) -> Stage:
    return Stage(Identity(), {}, torch.eye(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64))


def _layered(flow: Flow, step: Any, where: str) -> Flow:
    """Return a flow with a step behind it as a layer, or as a part of its last one."""
    from kapsi.zoo import regression, transformers

    kind = type(step).__name__
    if kind in SCALERS:
        moments = regression._moments([step], where)
        shift, scale = moments.mean, moments.deviation
        if flow.stages and isinstance(flow.stages[-1], Stage):
            stage = flow.stages[-1]
            stage = replace(stage, matrix=stage.matrix / scale.unsqueeze(1), bias=(stage.bias - shift) / scale)
            return flow._replace(stages=(*flow.stages[:-1], stage))
        if flow.stages:
            stage = _identity(len(shift))
            return flow._replace(
                stages=(*flow.stages, replace(stage, matrix=torch.diag(1 / scale), bias=-shift / scale))
            )
        old_shift, old_scale = flow.moments or (torch.zeros_like(shift), torch.ones_like(scale))
        return flow._replace(moments=(old_shift + old_scale * shift, old_scale * scale))
    if kind in COMPONENTS:
        model = transformers.from_sklearn(step)
        return flow._replace(stages=(*flow.stages, model), width=model.out_features)
    count = int(step.n_output_features_ if kind == "PolynomialFeatures" else step.n_features_out_)
    unit, zero = torch.eye(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    convert = regression._polynomial if kind == "PolynomialFeatures" else regression._additive
    ((_, head),) = convert(step, unit, zero, where).heads()
    bias = zero if head.bias is None else head.bias.detach()
    stage = Stage(head.spec.expansion, _tensors(head), head.psi["matrix"].detach(), bias)
    return flow._replace(stages=(*flow.stages, stage), width=count)


def _tensors(head: Head) -> dict[str, Any]:
    return {name: head.kappa[name].detach() for name in head.kappa.names()}


# ------------------------------------------------------------------------------------------------ encoders


def _scaling(step: Any, where: str) -> RawScaling:
    """Return a scaler with the arithmetic of scikit-learn."""
    kind, steps = type(step).__name__, []
    if kind == "MinMaxScaler":
        steps = [("multiply", step.scale_), ("add", step.min_)]
        if step.clip:
            low, high = step.feature_range
            steps += [("maximum", np.float64(low)), ("minimum", np.float64(high))]
    else:
        center = {"StandardScaler": "mean_", "RobustScaler": "center_"}.get(kind, "")
        centered = getattr(step, "with_mean" if kind == "StandardScaler" else "with_centering", False)
        if centered and getattr(step, center, None) is not None:
            steps.append(("subtract", getattr(step, center)))
        if step.scale_ is not None:
            steps.append(("divide", step.scale_))
        if getattr(step, "clip", False):
            steps += [("maximum", np.float64(-1)), ("minimum", np.float64(1))]
    return RawScaling(tuple((name, np.asarray(values, dtype=np.float64)) for name, values in steps), where)


def _encoder(step: Any, columns: Sequence[str], where: str) -> RawEncoder:
    kind = type(step).__name__
    if kind == "SimpleImputer":
        return _fill(step)
    if kind == "KBinsDiscretizer":
        return RawBins(tuple(edges[1:-1] for edges in step.bin_edges_), step.encode != "ordinal", where)
    indicators = kind == "OneHotEncoder"
    tables, unknown, widths = [], [], []
    for i, categories in enumerate(step.categories_):
        groups = (getattr(step, "_default_to_infrequent_mappings", None) or [None] * (i + 1))[i]
        places: Any = np.arange(len(categories)) if groups is None else np.asarray(groups)
        if indicators:
            other: float = -1 if groups is None or step.handle_unknown == "ignore" else int(places.max())
            drop = None if step.drop_idx_ is None else step._drop_idx_after_grouping[i]
            if drop is not None:
                places, other = _without(places, drop), int(_without(np.array([other]), drop)[0])
            widths.append(int(step._n_features_outs[i]))
        else:
            places, other = places.astype(np.float64), step.unknown_value
            if i in step._missing_indices:
                places[step._missing_indices[i]] = step.encoded_missing_value
        unknown.append(None if step.handle_unknown == "error" else float(other))
        tables.append(category_table(categories.tolist(), places.tolist()))
    return RawCategories(tuple(tables), tuple(unknown), tuple(widths) if indicators else None, tuple(columns), where)


def _without(places: Any, drop: int) -> Any:
    """Return indices of indicators; -1 for a dropped indicator."""
    return np.where(places == drop, -1, np.where(places > drop, places - 1, places))


def _fill(step: Any) -> RawFill:
    statistics = step.statistics_.tolist()
    kept = tuple(
        i for i, value in enumerate(statistics) if step.keep_empty_features or not (value is None or value != value)
    )
    marked = tuple(step.indicator_.features_.tolist()) if step.add_indicator else ()
    return RawFill(tuple(statistics[i] for i in kept), kept, marked, step.missing_values)


# ------------------------------------------------------------------------------------------------ the last step


class Final(NamedTuple):
    """The model of the last step.

    Attributes:
        model: the model.
        options: options of `PipelineModel` about its outputs.
    """

    model: Model
    options: dict[str, Any]


def _final(last: Any, where: str) -> Final:
    """Return the model of the last step, by the family that converts it."""
    from kapsi.zoo import kernel_svm, mlp, naive_bayes, regression, transformers, trees

    kind, module = type(last).__name__, type(last).__module__
    family = next(
        (
            family
            for prefix, family in {
                "sklearn.linear_model": regression,
                "sklearn.svm": kernel_svm,
                "sklearn.neural_network": mlp,
                "sklearn.naive_bayes": naive_bayes,
                "sklearn.tree": trees,
                "sklearn.ensemble": trees,
                "sklearn.decomposition": transformers,
                "sklearn.cluster": transformers,
            }.items()
            if module.startswith(prefix)
        ),
        None,
    )
    if family is None:
        raise SpecError(
            f"{where}: {kind} has no conversion; the last step may be a linear model, a support vector machine, a network, naive "
            "Bayes, trees, PCA or k-means"
        )
    try:
        model = family.from_sklearn(last)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None
    return Final(model, _outputs(last, kind, family.__name__.rpartition(".")[2]))


def _outputs(last: Any, kind: str, family: str) -> dict[str, Any]:
    """Return the options of `PipelineModel` about the outputs of the last step."""
    if not hasattr(last, "classes_"):
        flat = family != "transformers" and np.ndim(getattr(last, "coef_", 0)) < 2
        return {"outputs": "values", "flat": flat, "allows_missing": family == "trees"}
    outputs: OutputKind = "logits"
    options: dict[str, Any] = {}
    if family == "naive_bayes":
        outputs = "joint"
    elif family == "kernel_svm":
        outputs = "scores" if kind == "LinearSVC" else "pairs"
        options["one_vs_rest"] = getattr(last, "decision_function_shape", "") == "ovr"
    elif family == "trees":
        boosted = "Boosting" in kind
        outputs = "logits" if boosted else "probabilities"
        options |= {"allows_missing": True, "factor": 2.0 if boosted and last.loss == "exponential" else 1.0}
    elif kind == "RidgeClassifier":
        outputs = "scores"
    return {"outputs": outputs, **options}


def _joined(flow: Flow, final: Model) -> Model:
    """Return the layers of a flow before those of a model; a linear model becomes one layer with the expansion before it."""
    stages = list(flow.stages)
    head = plain_head(final)
    if stages and isinstance(stages[-1], Stage) and head is not None and isinstance(head.spec.expansion, Identity):
        last, matrix = cast(Stage, stages.pop()), head.psi["matrix"].detach()
        bias = matrix @ last.bias + (0 if head.bias is None else head.bias.detach())
        final = replace(last, matrix=matrix @ last.matrix, bias=bias).model(
            flow.encoded if not stages else _columns(stages)
        )
    models = [stage if isinstance(stage, Model) else stage.model(n) for stage, n in _sized(stages, flow.encoded)]
    for model in reversed(models):
        _put_before(model, final)
    if flow.moments is not None:
        standardize(final, Moments(*flow.moments), None)
    return final.eval()


def _columns(stages: Sequence[Stage | Model]) -> int:
    last = stages[-1]
    return last.out_features if isinstance(last, Model) else len(last.matrix)


def _sized(stages: Sequence[Stage | Model], inputs: int) -> Iterable[tuple[Stage | Model, int]]:
    """Yield each stage with its number of inputs."""
    for i, stage in enumerate(stages):
        yield stage, inputs if i == 0 else _columns(stages[:i])


def _put_before(first: Model, model: Model) -> None:
    """Put the layers of a model before those of another, in place."""
    layers = [layer for _, _, layer in (*first.spec.resolved(), *model.spec.resolved())]
    widths = (*first.spec.widths[:-1], *model.spec.widths)
    for layer in reversed([layer for layer in first.layers if isinstance(layer, Layer)]):
        model.layers.insert(0, layer)
    model.spec = ModelSpec(widths, tuple(layers))


# ------------------------------------------------------------------------------------------------ parity


def _wine(seed: int) -> Comparison:
    """Compare a pipeline of bins, splines and a scaler, with logistic regression, on wines with missing values."""
    from sklearn.compose import make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, SplineTransformer, StandardScaler

    from kapsi.zoo.base import sklearn_rows

    x, y = sklearn_rows("wine", seed)
    x[:, 0] = x[:, 0].round()
    x[np.random.default_rng(seed).random(x.shape) < 0.1] = np.nan
    columns = make_column_transformer(
        (make_pipeline(SimpleImputer(strategy="most_frequent"), OneHotEncoder(handle_unknown="ignore")), [0]),
        (make_pipeline(SimpleImputer(), StandardScaler(), SplineTransformer(4)), [1, 2, 3]),
        (make_pipeline(SimpleImputer(add_indicator=True), StandardScaler()), slice(4, None)),
    )
    theirs = make_pipeline(columns, LogisticRegression(max_iter=1000)).fit(x, y)
    ours = from_sklearn(theirs)
    difference = deviation(ours.predict_proba(x), theirs.predict_proba(x))
    last = theirs[-1]
    return Comparison(
        difference,
        sizes(ours.model),
        int(last.coef_.size + last.intercept_.size),
        ours.model,
        ours.encode(x),
        float64(y).long(),
        "cross_entropy",
    )


PARITY: tuple[Case, ...] = (
    Case(
        "pipeline, columns, splines and LogisticRegression",
        "predict_proba",
        "wine, a tenth missing",
        "scikit-learn",
        1e-9,
        partial(_wine),
    ),
)
