"""Transformers without a trained ψ: principal components, and distances to the centers of k-means."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kapsi.calibrate import calibrate
from kapsi.errors import DataError, check_choice, check_integer
from kapsi.expansion import CenterDistances, Expansion, PrincipalComponents
from kapsi.modules import Model
from kapsi.reconciliation import Eye
from kapsi.spec import HeadSpec, ModelSpec
from kapsi.zoo.base import (
    Case,
    Comparison,
    check_estimator,
    dense_rows,
    deviation,
    float64,
    forbid,
    model_of,
    one_head,
    sizes,
    sklearn_rows,
)


def spec(
    inputs: int,
    outputs: int,
    kind: str = "principal_components",
    *,
    whiten: bool = False,
    learnable: bool = True,
) -> ModelSpec:
    """Return the specification of a transformer, y = κ(x).

        principal_components   κ(x) = V (x − μ); whitened: each row of V divided by the standard deviation along it
        center_distances       κ(x) = [‖x − c₁‖, …, ‖x − c_G‖]

    with ψ = I and π = 0. `kapsi.calibrate` or `from_sklearn` sets the tensors of κ.

    Args:
        inputs: m, at least 1.
        outputs: number of components, at most m, or of centers.
        kind: `principal_components` or `center_distances`.
        whiten: scale principal components to unit variance.
        learnable: train means and components, or centers; False leaves nothing to train.

    Source: arXiv 2407.04819 lists data compression among its expansions.

    Example:
        >>> import kapsi as kp
        >>> kp.Model(spec(4, 2, "center_distances")).layers[0].heads[0].kappa["centers"].shape
        torch.Size([2, 4])
    """
    where = f"transformers.spec(kind={kind!r})"
    check_integer(f"{where}: inputs", inputs, 1)
    check_integer(f"{where}: outputs", outputs, 1)
    components = kind == "principal_components"
    forbid(
        where,
        (kind == "center_distances" and whiten, "whiten is for principal_components"),
        (components and outputs > inputs, f"{inputs} inputs have at most {inputs} components, not {outputs}"),
    )
    kinds: dict[str, Callable[[], Expansion]] = {
        "principal_components": lambda: PrincipalComponents(outputs, whiten, learnable),
        "center_distances": lambda: CenterDistances(outputs, learnable=learnable),
    }
    return one_head(HeadSpec(kinds[check_choice("transformers.spec(kind)", kind, kinds)](), Eye()), inputs, outputs)


def from_sklearn(estimator: Any, *, learnable: bool = True) -> Model:
    """Return a fitted `PCA`, `TruncatedSVD`, `KMeans` or `MiniBatchKMeans` as a model in float64 with its `transform` as output.

    For k-means `clusters(outputs)` equals `predict`.

    Args:
        estimator: the fitted estimator.
        learnable: train means and components, or centers.

    Raises:
        SpecError: an unsupported or unfitted estimator.

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

    check_estimator(estimator, (PCA, TruncatedSVD, KMeans, MiniBatchKMeans), "from_sklearn")
    if isinstance(estimator, KMeans | MiniBatchKMeans):
        centers = float64(estimator.cluster_centers_)
        layout = spec(centers.shape[1], len(centers), "center_distances", learnable=learnable)
        return model_of(layout, expansion={"centers": centers})
    components = np.asarray(estimator.components_, dtype=np.float64)
    mean, whiten = np.zeros(components.shape[1]), False
    if isinstance(estimator, PCA):
        mean, whiten = estimator.mean_, bool(estimator.whiten)
        if whiten:
            scale = np.sqrt(estimator.explained_variance_)
            smallest = np.finfo(scale.dtype).eps  # of the type of the fit
            components = components / np.maximum(scale, smallest).astype(np.float64)[:, None]
    layout = spec(components.shape[1], len(components), whiten=whiten, learnable=learnable)
    return model_of(layout, expansion={"mean": float64(mean), "components": float64(components)})


def fit_components(x: Any, count: int, *, whiten: bool = False) -> Model:
    """Return a model of the principal components of data, as `PCA(count, whiten=whiten).fit(x)`, in float64.

    The largest entry of each component is positive. `kapsi.calibrate` does the same in any model with
    `kapsi.PrincipalComponents`.

    Args:
        x: data, `(rows, m)`, at least 2 rows.
        count: number of components, at most m and at most the number of rows.
        whiten: scale to unit variance.

    Example:
        >>> import torch
        >>> fit_components([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]], 1, whiten=True).layers[0].heads[0].kappa["mean"].tolist()
        [3.0, 4.0]
    """
    rows = dense_rows("fit_components", x)
    if len(rows) < 2:
        raise DataError(f"fit_components: expected x of shape (rows, m) with at least 2 rows, got {tuple(rows.shape)}")
    most = min(rows.shape)
    check_integer("fit_components(count)", count, 1, most)
    model = Model(spec(rows.shape[1], count, whiten=whiten), seed=0, dtype=torch.float64, device="cpu")
    return calibrate(model, rows).eval()


def clusters(outputs: Tensor) -> Tensor:
    """Return the index of the nearest center, `(...)`, for distances `(..., G)`; the first of equal distances.

    Example:
        >>> import torch
        >>> clusters(torch.tensor([[2.0, 1.0, 3.0]]))
        tensor([1])
    """
    return outputs.argmin(-1)


# ------------------------------------------------------------------------------------------------ parity


def _compare(model: Model, x: Any, expected: Any, theirs: int) -> Comparison:
    """Compare outputs; the targets are smaller than the outputs, to leave something to train."""
    inputs, target = torch.tensor(x), torch.tensor(expected)
    return Comparison(deviation(model(inputs), target), sizes(model), theirs, model, inputs, 0.9 * target, "mse")


def _pca(seed: int, *, whiten: bool, fitted: bool) -> Comparison:
    from sklearn.decomposition import PCA

    x, _ = sklearn_rows("digits", seed, 500)
    estimator = PCA(8, whiten=whiten, svd_solver="full").fit(x)
    model = fit_components(x, 8, whiten=whiten) if fitted else from_sklearn(estimator)
    return _compare(model, x, estimator.transform(x), estimator.mean_.size + estimator.components_.size + 8 * whiten)


def _k_means(seed: int) -> Comparison:
    from sklearn.cluster import KMeans

    x, _ = sklearn_rows("digits", seed, 500)
    estimator = KMeans(10, n_init=1, random_state=seed).fit(x)
    return _compare(from_sklearn(estimator), x, estimator.transform(x), estimator.cluster_centers_.size)


PARITY: tuple[Case, ...] = tuple(
    Case(model, "transform", "digits, 500 rows", "scikit-learn", 1e-9, compare)
    for model, compare in (
        ("PCA imported", partial(_pca, whiten=False, fitted=False)),
        ("PCA imported, whitened", partial(_pca, whiten=True, fitted=False)),
        ("PCA fitted in kapsi", partial(_pca, whiten=False, fitted=True)),
        ("PCA fitted in kapsi, whitened", partial(_pca, whiten=True, fitted=True)),
        ("k-means imported", _k_means),
    )
)
