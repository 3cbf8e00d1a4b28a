"""Newton steps of all folds at once."""

import pytest
import torch

import kapsi as kp
from kapsi.recipes.fold_newton import fold_newton_path
from kapsi.training.losses import Poisson

ROWS = 60
Z = torch.cat(
    [torch.randn(ROWS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.ones(ROWS, 1)], 1
)
SHARES = torch.ones(2, ROWS, dtype=torch.float64)
SHARES[0, :20], SHARES[1, 40:] = 0, 0
SHARES /= SHARES.sum(1, keepdim=True)
PENALTIES = (1.0, 0.1, 0.01)
LABELS = (Z[:, 0] > 0.3).long() + (Z[:, 1] + 0.5 * Z[:, 2] > 0).long()
COUNTS = torch.arange(ROWS, dtype=torch.float64)[:, None] % 4


@pytest.mark.parametrize(
    ("loss", "y", "outputs"),
    [(kp.CrossEntropy(), LABELS, 3), (kp.CrossEntropy(0.1), LABELS, 3), (Poisson(), COUNTS, 1)],
)
def test_coefficients_of_each_fold_have_no_gradient(loss, y, outputs) -> None:
    path = list(fold_newton_path(Z, SHARES, y, loss, outputs, PENALTIES, 1e-12))
    for penalty, thetas in zip(PENALTIES, path, strict=True):
        for share, theta in zip(SHARES, thetas, strict=True):
            theta = theta.requires_grad_()
            goal = share @ loss.rows(Z @ theta, y).reshape(ROWS) + 0.5 * penalty * theta[:-1].square().sum()
            (gradient,) = torch.autograd.grad(goal, theta)
            assert float(gradient.abs().max()) < 1e-6


def test_infinite_losses_of_held_out_rows_do_not_matter() -> None:
    z = Z.clone()
    z[:20, 0] = 1e6  # held out of the first fold
    path = fold_newton_path(z, SHARES[:1], COUNTS, Poisson(), 1, (0.1,), 1e-10)
    plain = fold_newton_path(Z, SHARES[:1], COUNTS, Poisson(), 1, (0.1,), 1e-10)
    assert torch.allclose(next(path), next(plain), atol=1e-9)
