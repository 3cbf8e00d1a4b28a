"""Transformers as models without weights of their own: principal components, and distances to the centers of k-means."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kapsi.calibrate import calibrate
from kapsi.errors import SpecError
from kapsi.expansion import CenterDistances, Expansion, PrincipalComponents
from kapsi.modules import Model
from kapsi.reconciliation import Eye
from kapsi.spec import HeadSpec, LayerSpec, ModelSpec
from kapsi.zoo.base import Case, Comparison, tensor_of

__all__ = ["PARITY", "clusters", "fit_components", "from_sklearn", "spec"]


def spec(
    inputs: int,
    outputs: int,
    kind: str = "principal_components",
    *,
    whiten: bool = False,
    learnable: bool = True,
) -> ModelSpec:
    """Return the specification of a transformer: κ is all there is, and what it makes are the outputs.

        principal_components   κ(x) = V (x − μ), whitened: each row of V divided by the deviation along it
        center_distances       κ(x) = [‖x − c₁‖, …, ‖x − c_G‖]

    with ψ = I and π = 0. The tensors of κ are set by `kapsi.calibrate`, or by `from_sklearn`.

    Args:
        inputs: m, at least 1.
        outputs: number of components, at most m, or of centers.
        kind: `principal_components` or `center_distances`.
        whiten: of principal components: whether they have unit variance.
        learnable: whether means and components, or centers, are trained; without it nothing in the model is.

    Raises:
        SpecError: a kind that there is not, or more components than inputs.

    Source: arXiv 2407.04819 has data compression among its expansions.

    Example:
        >>> import kapsi as kp
        >>> kp.Model(spec(4, 2, "center_distances")).layers[0].heads[0].kappa["centers"].shape
        torch.Size([2, 4])
    """
    where = f"transformers.spec(kind={kind!r})"
    for name, size in (("inputs", inputs), ("outputs", outputs)):
        if isinstance(size, bool) or not isinstance(size, int):
            raise SpecError(f"{where}: {name}={size!r}: expected an integer of at least 1")
    if kind == "principal_components":
        if outputs > inputs:
            raise SpecError(f"{where}: {inputs} inputs have at most {inputs} components, not {outputs}")
        expansion: Expansion = PrincipalComponents(outputs, whiten, learnable)
    elif kind == "center_distances":
        if whiten:
            raise SpecError(f"{where}: whiten is for principal_components")
        expansion = CenterDistances(outputs, learnable=learnable)
    else:
        raise SpecError(f"{where}: choose from principal_components, center_distances")
    head: Any = HeadSpec(expansion, Eye())
    return ModelSpec((inputs, outputs), LayerSpec(head))  # type: ignore[arg-type]  # one head and layer stand for tuples


def from_sklearn(estimator: Any, *, learnable: bool = True) -> Model:
    """Return a fitted `PCA`, `TruncatedSVD`, `KMeans` or `MiniBatchKMeans` as a model in float64 whose output is its `transform`.

    Of k-means `clusters(outputs)` are what it predicts.

    Args:
        estimator: the fitted estimator.
        learnable: whether means and components, or centers, are trained.

    Raises:
        SpecError: another estimator, or one that is not fitted.

    Example:
        >>> import numpy as np, torch
        >>> from sklearn.datasets import load_iris
        >>> from sklearn.decomposition import PCA
        >>> x = load_iris().data
        >>> theirs = PCA(2, whiten=True).fit(x)
        >>> np.allclose(from_sklearn(theirs)(torch.tensor(x)).detach(), theirs.transform(x), rtol=0, atol=1e-9)
        True
    """
    from sklearn.cluster import KMeans, MiniBatchKMeans
    from sklearn.decomposition import PCA, TruncatedSVD
    from sklearn.exceptions import NotFittedError
    from sklearn.utils.validation import check_is_fitted

    kind = type(estimator)
    if kind not in (PCA, TruncatedSVD, KMeans, MiniBatchKMeans):
        raise SpecError(f"from_sklearn: expected PCA, TruncatedSVD, KMeans or MiniBatchKMeans, got {kind.__name__}")
    try:
        check_is_fitted(estimator)
    except NotFittedError:
        raise SpecError(f"from_sklearn({kind.__name__}): it is not fitted; call fit(x) first") from None
    if kind in (KMeans, MiniBatchKMeans):
        centers = _given(estimator.cluster_centers_)
        made = spec(centers.shape[1], len(centers), "center_distances", learnable=learnable)
        return _filled(made, centers=centers)
    components = np.asarray(estimator.components_, dtype=np.float64)
    mean, whiten = np.zeros(components.shape[1]), False
    if kind is PCA:
        mean, whiten = estimator.mean_, bool(estimator.whiten)
        if whiten:
            deviation = np.sqrt(estimator.explained_variance_)
            least = np.finfo(deviation.dtype).eps  # of the type that it was fitted in
            components = components / np.maximum(deviation, least).astype(np.float64)[:, None]
    made = spec(components.shape[1], len(components), whiten=whiten, learnable=learnable)
    return _filled(made, mean=_given(mean), components=_given(components))


def fit_components(x: Any, count: int, *, whiten: bool = False) -> Model:
    """Return the model of the principal components of data, as `PCA(count, whiten=whiten).fit(x)`, in float64.

    The sign of a component is such that its largest entry is positive. `kapsi.calibrate` of a model with
    `kapsi.PrincipalComponents` in it does the same.

    Args:
        x: data, `(rows, m)`, at least 2 rows.
        count: number of components, at most m and at most as many as rows.
        whiten: whether they have unit variance.

    Raises:
        SpecError: data or a count that do not fit.

    Example:
        >>> import torch
        >>> fit_components([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]], 1, whiten=True).layers[0].heads[0].kappa["mean"].tolist()
        [3.0, 4.0]
    """
    try:
        rows = tensor_of(x).to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise SpecError("fit_components: expected numbers") from None
    if rows.dim() != 2 or len(rows) < 2 or not rows.shape[1]:
        raise SpecError(f"fit_components: expected x of shape (rows, m) with at least 2 rows, got {tuple(rows.shape)}")
    if not bool(rows.isfinite().all()):
        raise SpecError("fit_components: expected finite numbers")
    most = min(rows.shape)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= most:
        raise SpecError(
            f"fit_components(count={count!r}): expected an integer from 1 to {most}, the smaller of rows and inputs"
        )
    model = Model(spec(rows.shape[1], count, whiten=whiten), seed=0, dtype=torch.float64, device="cpu")
    return calibrate(model, rows).eval()


def clusters(outputs: Tensor) -> Tensor:
    """Return the number of the nearest center, `(...)`, from distances `(..., G)`; the first of equal ones.

    Example:
        >>> import torch
        >>> clusters(torch.tensor([[2.0, 1.0, 3.0]]))
        tensor([1])
    """
    return outputs.argmin(-1)


def _given(values: Any) -> Tensor:
    # Those of the solver `arpack` lie backward in memory, which torch refuses.
    return torch.tensor(np.ascontiguousarray(values, dtype=np.float64))


def _filled(made: ModelSpec, **kappa: Tensor) -> Model:
    model = Model(made, seed=0, dtype=torch.float64, device="cpu")
    next(head for _, head in model.heads()).assign("expansion", **kappa)
    return model.eval()


# ------------------------------------------------------------------------------------------------ comparisons


def _compared(model: Model, x: Any, wanted: Any, theirs: int) -> Comparison:
    """Compare outputs; the targets for training on are smaller ones, so that there is something to learn."""
    found, expected = model(torch.tensor(x)).detach(), torch.tensor(wanted)
    deviation = float(((found - expected).abs() / expected.abs().clamp_min(1)).max())
    ours = sum(tensor.numel() for tensor in model.state_dict().values())
    return Comparison(deviation, ours, theirs, model, torch.tensor(x), 0.9 * expected, "mse")


def _rows(name: str, seed: int) -> Any:
    from sklearn import datasets

    x, _ = getattr(datasets, f"load_{name}")(return_X_y=True)
    return x[np.random.default_rng(seed).permutation(len(x))[:500]]


def _components(seed: int, whiten: bool, fitted: bool) -> Comparison:
    from sklearn.decomposition import PCA

    x = _rows("digits", seed)
    estimator = PCA(8, whiten=whiten, svd_solver="full").fit(x)
    model = fit_components(x, 8, whiten=whiten) if fitted else from_sklearn(estimator)
    return _compared(model, x, estimator.transform(x), estimator.mean_.size + estimator.components_.size + 8 * whiten)


def _imported(seed: int) -> Comparison:
    return _components(seed, False, False)


def _whitened(seed: int) -> Comparison:
    return _components(seed, True, False)


def _fitted(seed: int) -> Comparison:
    return _components(seed, False, True)


def _fitted_whitened(seed: int) -> Comparison:
    return _components(seed, True, True)


def _means(seed: int) -> Comparison:
    from sklearn.cluster import KMeans

    x = _rows("digits", seed)
    estimator = KMeans(10, n_init=1, random_state=seed).fit(x)
    return _compared(from_sklearn(estimator), x, estimator.transform(x), estimator.cluster_centers_.size)


PARITY: tuple[Case, ...] = (
    Case("PCA imported", "transform", "digits, 500 rows", "scikit-learn", 1e-9, _imported),
    Case("PCA imported, whitened", "transform", "digits, 500 rows", "scikit-learn", 1e-9, _whitened),
    Case("PCA fitted in kapsi", "transform", "digits, 500 rows", "scikit-learn", 1e-9, _fitted),
    Case("PCA fitted in kapsi, whitened", "transform", "digits, 500 rows", "scikit-learn", 1e-9, _fitted_whitened),
    Case("k-means imported", "transform", "digits, 500 rows", "scikit-learn", 1e-9, _means),
)
