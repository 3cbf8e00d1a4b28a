"""Recipes that are linear in their parameters: closed forms, Newton steps, and the choice of the penalty."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge

import kapsi as kp
from kapsi.recipes import KernelHead, LinearHead, QuadraticHead, RecipeData, TextLinearHead, linear_in_parameters, solve
from kapsi.recipes.solve import DesignRows, leave_one_out, newton_path, orthogonal_basis, ridge_path

PENALTIES = (10.0, 0.1, 1e-3, 1e-5)


def table(rows=60, inputs=4, outputs=2, seed=0, classes=0, weighted=False) -> RecipeData:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator, dtype=torch.float64)
    x[:, 0] = x[:, 0] * 7 + 30
    signal = x[:, : min(inputs, 4)] @ torch.randn(
        min(inputs, 4), classes or outputs, generator=generator, dtype=x.dtype
    )
    signal = signal - signal.mean(0) + torch.randn(signal.shape, generator=generator, dtype=x.dtype)
    weight = torch.rand(rows, generator=generator, dtype=x.dtype) + 0.2 if weighted else None
    return RecipeData(
        x=x,
        y=signal.argmax(1) if classes else signal,
        loss=kp.CrossEntropy() if classes else kp.MSE(),
        classes=classes,
        numeric=torch.ones(inputs, dtype=torch.bool),
        weight=None if weight is None else weight / weight.mean(),
    )


def share_of(data: RecipeData) -> torch.Tensor:
    weight = torch.ones(len(data.x), dtype=torch.float64) if data.weight is None else data.weight
    return weight / weight.sum()


def rows_of(phi: torch.Tensor, share: torch.Tensor, penalty=None, chunk: int = 10_000) -> DesignRows:
    chunks = lambda: iter(phi.split(chunk))  # noqa: E731
    return DesignRows(chunks, orthogonal_basis(chunks, share, penalty), share)


def standardized(x: torch.Tensor, share: torch.Tensor) -> np.ndarray:
    mean = share @ x
    return ((x - mean) / (share @ (x - mean).square()).sqrt()).numpy()


SIZES = pytest.mark.parametrize(("rows", "inputs"), [(60, 4), (12, 40), (5, 5)])


@SIZES
@pytest.mark.parametrize("weighted", [False, True])
def test_each_penalty_of_the_path_equals_ridge_regression_of_scikit_learn(rows, inputs, weighted) -> None:
    data = table(rows, inputs, weighted=weighted)
    share = share_of(data)
    fitted = rows_of(data.x, share)
    path = ridge_path(fitted, data.y, PENALTIES)
    matrices, biases = fitted.basis.coefficients(path[:, :-1], path[:, -1])
    for penalty, matrix, bias in zip(PENALTIES, matrices, biases, strict=True):
        reference = Ridge(alpha=penalty, solver="svd" if not weighted else "cholesky")
        reference.fit(standardized(data.x, share), data.y.numpy(), sample_weight=share.numpy())
        expected = reference.predict(standardized(data.x, share))
        np.testing.assert_allclose(data.x @ matrix + bias, expected, rtol=1e-7, atol=1e-8)


def penalized_squares(phi, y, share, penalty, penalized):
    """Return coefficients and bias of the minimum of Σ share (y − f)² + penalty·θᵀQθ, from the normal equations."""
    phi = torch.cat([phi, torch.ones(len(phi), 1, dtype=phi.dtype)], 1)
    q = torch.zeros(phi.shape[1], phi.shape[1], dtype=phi.dtype)
    q[:-1, :-1] = penalized
    theta = torch.linalg.solve((phi * share[:, None]).T @ phi + penalty * q, (phi * share[:, None]).T @ y)
    return theta[:-1], theta[-1]


@SIZES
def test_leave_one_out_equals_fits_without_each_row(rows, inputs) -> None:
    data = table(rows, inputs, weighted=True)
    share = share_of(data)
    variances = torch.diag(share @ (data.x - share @ data.x).square())
    errors = leave_one_out(rows_of(data.x, share), data.y, PENALTIES)
    for penalty, error in zip(PENALTIES, errors.tolist(), strict=True):
        expected = 0.0
        for i in range(rows):
            kept = torch.arange(rows) != i
            matrix, bias = penalized_squares(data.x[kept], data.y[kept], share[kept], penalty, variances)
            expected += float(share[i] * (data.x[i] @ matrix + bias - data.y[i]).square().mean())
        assert error == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("inputs", [4, 90])
def test_a_penalty_matrix_is_scaled_to_the_trace_of_the_covariance(inputs) -> None:
    data = table(60, inputs, weighted=True)
    share = share_of(data)
    root = torch.randn(inputs, inputs, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    matrix = root @ root.T + torch.eye(inputs, dtype=torch.float64)
    spread = (share @ (data.x - share @ data.x).square()).sum()
    fitted = rows_of(data.x, share, 5.0 * matrix)
    path = ridge_path(fitted, data.y, PENALTIES)
    for theta, penalty in zip(path, PENALTIES, strict=True):
        found = fitted.basis.coefficients(theta[:-1], theta[-1])
        expected = penalized_squares(data.x, data.y, share, penalty, matrix * spread / matrix.trace())
        torch.testing.assert_close(
            data.x @ found[0] + found[1], data.x @ expected[0] + expected[1], rtol=1e-6, atol=1e-7
        )


@pytest.mark.parametrize("classes", [2, 3, 4])
@pytest.mark.parametrize(("rows", "inputs"), [(80, 4), (30, 50)])
def test_classes_equal_logistic_regression_of_scikit_learn(classes, rows, inputs) -> None:
    data = table(rows, inputs, classes=classes, weighted=True)
    share = share_of(data)
    for penalty in (1.0, 0.01):
        model = LinearHead(l2=penalty).fit(data)
        # Two logits of opposite sign have half the squared norm of their difference.
        strength = 1 / penalty * (2 if classes == 2 else 1)
        reference = LogisticRegression(C=strength, tol=1e-10, max_iter=10_000)
        reference.fit(standardized(data.x, share), data.y.numpy(), sample_weight=share.numpy())
        expected = reference.predict_proba(standardized(data.x, share))
        np.testing.assert_allclose(model(data.x).softmax(1).detach(), expected, atol=1e-5)


@pytest.mark.parametrize(
    "loss", [kp.Huber(0.5), kp.MSE(output_weights=(1.0, 3.0)), kp.Bernoulli()], ids=lambda loss: loss.name
)
@pytest.mark.parametrize("inputs", [3, 70])
def test_the_gradient_vanishes_at_the_minimum(loss, inputs) -> None:
    data = table(50, inputs, weighted=True)
    y = (data.y > 0).double() if loss.name == "bernoulli" else data.y
    share = share_of(data)
    fitted = rows_of(data.x, share)
    for penalty, theta in zip(PENALTIES, newton_path(fitted, y, loss, 2, PENALTIES, 1e-14), strict=True):
        theta = theta.clone().requires_grad_()
        value = share @ loss.rows(fitted.times(theta), y) + penalty / 2 * theta[:-1].square().sum()
        (gradient,) = torch.autograd.grad(value, theta)
        assert float(gradient.abs().max()) < 1e-5


def test_conjugate_gradients_and_factorizations_agree(monkeypatch) -> None:
    data = table(90, 6, classes=7, weighted=True)
    results = []
    for direct in (True, False):
        monkeypatch.setattr(solve, "_solves_directly", lambda *sizes, direct=direct: direct)
        fitted = rows_of(data.x, share_of(data))
        results.append(torch.stack(list(newton_path(fitted, data.y, data.loss, 7, PENALTIES, 1e-12))))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("classes", [0, 3])
def test_chunks_of_rows_give_the_same_path(classes, monkeypatch) -> None:
    data = table(50, 5, classes=classes, weighted=True)

    def path() -> torch.Tensor:
        fitted = rows_of(data.x, share_of(data), chunk=17)
        if classes:
            return torch.stack(list(newton_path(fitted, data.y, data.loss, 3, PENALTIES)))
        return torch.cat([ridge_path(fitted, data.y, PENALTIES).flatten(), leave_one_out(fitted, data.y, PENALTIES)])

    whole = path()
    for name in ("MAX_STORED", "CHUNK"):
        monkeypatch.setattr(solve, name, 11)
    torch.testing.assert_close(path().abs(), whole.abs(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("classes", [0, 2, 3])
def test_weights_equal_repeated_rows(classes) -> None:
    data = table(40, 3, classes=classes)
    counts = torch.arange(40) % 3 + 1
    repeated = data.take(torch.arange(40).repeat_interleave(counts))
    weighted = replace(data, weight=counts.double() / counts.double().mean())
    first, second = (LinearHead(l2=0.05).fit(each)(data.x) for each in (repeated, weighted))
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("classes", [0, 3])
def test_scale_and_position_of_columns_have_no_effect(classes) -> None:
    data = table(50, 4, classes=classes)
    moved = replace(data, x=data.x * torch.tensor([1e-3, 1.0, 40.0, 1e5]) + torch.tensor([0.0, 9.0, -3.0, 1e5]))
    first, second = (LinearHead().fit(each)(each.x) for each in (data, moved))
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


def test_constant_columns_have_weight_zero() -> None:
    data = table(30, 4)
    data.x[:, 2] = 1e6 / 3
    model = LinearHead().fit(data)
    assert not model.layers[0].heads[0].psi["matrix"][:, 2].any()
    assert bool(model(data.x).isfinite().all())


@pytest.mark.parametrize("classes", [2, 4])
def test_separable_classes_stay_finite_and_no_step_raises_the_loss(classes) -> None:
    y = torch.arange(40) % classes
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.01
    x[:, 0] += y
    data = RecipeData(x, y, kp.CrossEntropy(), classes, torch.ones(3, dtype=torch.bool))
    fitted = rows_of(x, share_of(data))
    losses = [
        float(data.loss.mean(fitted.times(theta), y)) for theta in newton_path(fitted, y, data.loss, classes, PENALTIES)
    ]
    assert all(after < before for before, after in pairwise(losses))
    model = LinearHead().fit(data)
    assert bool((model(x).argmax(1) == y).all())
    assert float(model(x).detach().abs().max()) < 1e3


@pytest.mark.parametrize("classes", [0, 2, 3])
def test_held_out_outputs_are_those_of_the_fits_of_the_folds(classes) -> None:
    data = table(60, 4, classes=classes, weighted=True)
    folds = data.folds(4)
    crossed = LinearHead().cross_fit(data, folds)
    variance = share_of(data) @ (data.x - share_of(data) @ data.x).square()
    for train, test in folds:
        # The coefficients from the outputs: the mean loss of the training rows, penalized in the unit of all rows, is stationary.
        rows = torch.cat([data.x[test], torch.ones(len(test), 1, dtype=torch.float64)], 1)
        fitted = torch.linalg.lstsq(rows, crossed.outputs[test], driver="gelsd").solution
        torch.testing.assert_close(rows @ fitted, crossed.outputs[test])
        matrix, bias = fitted[:-1].requires_grad_(), fitted[-1].requires_grad_()
        part = data.take(train)
        mean = share_of(part) @ data.loss.rows(part.x @ matrix + bias, part.y).reshape(len(train), -1).sum(1)
        penalty = crossed.recipe.l2 * (variance @ matrix.square()).sum() / (2 if classes else matrix.shape[1])
        slopes = torch.autograd.grad(mean + penalty, (matrix, bias))
        assert float((slopes[0] / variance.sqrt()[:, None]).abs().max()) < 0.01
        assert float(slopes[1].abs().max()) < 0.01
    losses = {}
    for factor in (0.1, 1.0, 10.0):
        outputs = LinearHead(l2=crossed.recipe.l2 * factor).cross_fit(data, folds).outputs
        losses[factor] = float(share_of(data) @ data.loss.rows(outputs, data.y))
    assert losses[1.0] == min(losses.values())


def test_many_rows_are_processed_in_chunks(monkeypatch) -> None:
    data = table(80, 4)
    whole = LinearHead().cross_fit(data, data.folds(3))
    for module, name in ((linear_in_parameters, "CHUNK"), (linear_in_parameters, "MAX_PHI"), (solve, "MAX_STORED")):
        monkeypatch.setattr(module, name, 31)
    chunked = LinearHead().cross_fit(data, data.folds(3))
    torch.testing.assert_close(chunked.outputs, whole.outputs)


def test_rare_categories_are_shrunk_more_than_frequent_ones() -> None:
    data = table(100, 2, outputs=1)
    data.x[:] = 0
    data.x[:50, 0], data.x[50:52, 1] = 1, 1
    data.y[:, 0] = torch.where(data.x[:, 1] == 1, 2.0, 0.0) + 2 * data.x[:, 0]
    model = LinearHead(l2=0.5).fit(replace(data, numeric=torch.zeros(2, dtype=torch.bool)))
    matrix = model.layers[0].heads[0].psi["matrix"].detach()
    assert float(matrix[0, 1]) < 0.5 * float(matrix[0, 0])


def test_a_loss_without_curvature_is_a_reason_against_the_recipe() -> None:
    data = table(20, 2, classes=2)
    assert LinearHead().reason_against(data) is None
    reason = LinearHead().reason_against(replace(data, loss=kp.Hinge()))
    assert reason == "linear needs a loss with curvature, and hinge has none"


# ------------------------------------------------------------------------------------------------ quadratic and kernel heads


def explicit_quadratic(data: RecipeData, x: torch.Tensor, l2: float, ratio: float) -> torch.Tensor:
    """Return outputs of ridge regression on products of standardized, clamped columns, from the normal equations."""
    share = share_of(data)
    mean = share @ data.x
    deviation = (share @ (data.x - mean).square()).sqrt()
    m = data.x.shape[1]
    pairs = [(i, j) for i in range(m) for j in range(i, m)]

    def columns(rows: torch.Tensor) -> torch.Tensor:
        z = (rows.clamp(data.x.amin(0), data.x.amax(0)) - mean) / deviation
        products = [z[:, i] * z[:, j] * (1 if i == j else 2**0.5) for i, j in pairs]
        return torch.cat([z, torch.stack(products, 1)], 1)

    phi = columns(data.x)
    spread = share @ (phi - share @ phi).square()
    penalty = spread.clone()
    penalty[m:] = ratio * spread[m:].clamp_min(2)
    penalty *= spread.sum() / penalty.sum()
    matrix, bias = penalized_squares(phi, data.y, share, l2, torch.diag(penalty))
    return columns(x) @ matrix + bias


@pytest.mark.parametrize("ratio", [1.0, 30.0])
def test_the_quadratic_head_is_ridge_regression_on_products(ratio) -> None:
    data = table(50, 3, weighted=True)
    model = QuadraticHead(l2=0.02, ratio=ratio).fit(data)
    beyond = data.x * 1.5 - 0.5 * data.x.mean(0)
    for x in (data.x, beyond):
        torch.testing.assert_close(model(x).detach(), explicit_quadratic(data, x, 0.02, ratio), rtol=1e-7, atol=1e-7)


def test_products_are_left_out_for_many_inputs_or_few_rows() -> None:
    assert QuadraticHead().reason_against(table(90, 20)) is None
    assert "101 inputs" in str(QuadraticHead().reason_against(table(10, 101)))
    assert QuadraticHead().reason_against(table(90, 60)) == "1,890 squares and products are too many for 90 rows"


@pytest.mark.parametrize("inputs", ["standardized", "normal_scores"])
def test_the_kernel_head_is_kernel_ridge_regression_if_all_rows_are_centers(inputs) -> None:
    from sklearn.kernel_ridge import KernelRidge

    data = table(40, 2)
    model = KernelHead(l2=0.5, sharpness=2.0, inputs=inputs, centers=40).fit(data)
    head = model.layers[0].heads[0]
    z, gamma = head.before(data.x), float(head.kappa["log_gamma"].exp())
    # K(c, c)-whitened columns have the covariance of centered kernels: the unit of l2.
    kernel = torch.exp(-gamma * torch.cdist(z, z).square())
    centered = kernel - kernel.mean(0)
    unit = centered.square().sum() / len(z) / (len(z) * (1 + 1e-7))
    y = data.y - data.y.mean(0)
    center = torch.eye(40, dtype=torch.float64) - 1 / 40
    reference = KernelRidge(alpha=float(0.5 * 40 * unit), kernel="precomputed")
    reference.fit((center @ kernel @ center).numpy(), y.numpy())
    expected = reference.predict((center @ kernel @ center).numpy())
    np.testing.assert_allclose((model(data.x).detach() - data.y.mean(0)), expected, atol=1e-4)


def test_curves_and_interleaved_classes_are_found() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(300, 1, generator=generator, dtype=torch.float64) * 6 - 3
    y = torch.sin(3 * x) + 0.05 * torch.randn(300, 1, generator=generator, dtype=torch.float64)
    data = RecipeData(x, y, kp.MSE(), 0, torch.ones(1, dtype=torch.bool))
    error = (KernelHead().cross_fit(data, data.folds(3)).outputs - y).square().mean()
    assert float(error) < 0.02 * float(y.var())
    angle = torch.rand(400, generator=generator, dtype=torch.float64).sqrt() * 9 + 1
    code = torch.arange(400) % 2
    spiral = torch.stack([torch.cos(angle + np.pi * code), torch.sin(angle + np.pi * code)], 1) * angle[:, None]
    data = RecipeData(spiral, code, kp.CrossEntropy(), 2, torch.ones(2, dtype=torch.bool))
    outputs = KernelHead().cross_fit(data, data.folds(3)).outputs
    assert float((outputs.argmax(1) == code).double().mean()) > 0.98


@pytest.mark.parametrize("recipe", [LinearHead(), QuadraticHead(), KernelHead(), KernelHead(inputs="normal_scores")])
@pytest.mark.parametrize("classes", [0, 3])
def test_outputs_stay_bounded_for_heavy_tails_and_degenerate_columns(recipe, classes) -> None:
    data = table(60, 5, classes=classes, outputs=1)
    data.x[:, 1] = data.x[:, 1].exp().pow(4)
    data.x[:, 2] = 3.0
    data.x[:, 3] = (data.x[:, 3] > 1.2).double()
    data = replace(data, numeric=torch.tensor([True, True, True, False, True]))
    outputs = recipe.cross_fit(data, data.folds(5)).outputs
    assert bool(outputs.isfinite().all())
    limit = 10.0 if classes == 0 else 50.0
    assert float(outputs.abs().max()) < limit * (1 if classes else float(data.y.abs().max()))


def test_a_single_distinct_row_gives_the_mean() -> None:
    data = RecipeData(torch.ones(6, 2).double(), torch.arange(6.0).double()[:, None], kp.MSE(), 0, torch.ones(2).bool())
    for recipe in (LinearHead(), QuadraticHead(), KernelHead(), KernelHead(inputs="normal_scores")):
        assert recipe.fit(data)(data.x).detach().flatten().tolist() == pytest.approx([2.5] * 6, abs=1e-6)


def test_folds_share_a_path_of_penalties_also_if_their_own_would_have_none_in_common(monkeypatch) -> None:
    data, paths = table(rows=60), [(10.0, 0.1), (1.0, 0.01)]
    monkeypatch.setattr(QuadraticHead, "blind", False)
    monkeypatch.setattr(QuadraticHead, "path", lambda self, problem: paths[len(problem.data.x) % 2])
    folds = [(torch.arange(30, 60), torch.arange(30)), (torch.arange(29), torch.arange(30, 60))]
    crossed = QuadraticHead().cross_fit(data, folds)
    assert bool(crossed.outputs.isfinite().all())
    assert crossed.recipe.l2 in paths[0]


def test_a_recipe_that_does_not_suit_the_rows_says_why() -> None:
    data = table(rows=20, inputs=1, outputs=1)
    with pytest.raises(kp.SpecError, match="text_linear: does not suit these rows: there are no texts"):
        TextLinearHead().build(data)
