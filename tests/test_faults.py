"""Faults that other implementations of these formulas have: for each the right value, and that the faulty formula fails here.

Each fault is written down as a function; the same check that ours passes must reject it.
"""

from __future__ import annotations

import io

import numpy as np
import pytest
import scipy.special
import torch
from sklearn.naive_bayes import GaussianNB
from torch.nn import functional as F

import kapsi as kp
from kapsi.testing import inputs


def rejects(check, faulty) -> None:
    """Check that a check is one: the faulty values do not pass."""
    with pytest.raises(AssertionError):
        check(faulty)


# ------------------------------------------------------------------------------------------------ Kronecker products


def rearranged(matrix: torch.Tensor, p: int, q: int) -> torch.Tensor:
    """Return Van Loan's rearrangement, whose rank is the number of Kronecker terms with a left factor p × q."""
    n, columns = matrix.shape
    blocks = matrix.reshape(p, n // p, q, columns // q).permute(0, 2, 1, 3)
    return blocks.reshape(p * q, -1)


@pytest.mark.parametrize(
    ("psi", "rank"),
    [
        (kp.Kronecker(rows=8, columns=8), 64),
        (kp.LowRankKronecker(rank=2, rows=8, columns=8), 16),
        (kp.DualLowRankKronecker(rank=2, rows=8, columns=8), 4),
        (kp.Duplicated(rows=8, columns=8), 8),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_hypercomplex_weights_are_kronecker_products_of_full_rank(psi, rank) -> None:
    def check(matrix: torch.Tensor) -> None:
        assert int(torch.linalg.matrix_rank(matrix)) == rank
        assert int(torch.linalg.matrix_rank(rearranged(matrix, 8, 8))) == 1

    head = kp.Head(64, 64, kp.HeadSpec(kp.Identity(), psi), seed=0, dtype=torch.float64)
    check(head.weights().dense()[0].detach())
    # Every entry of A times every entry of B, laid out in the order of the flat parameters: an outer product, rank 1.
    a, b = inputs(8, 8), inputs(8, 8, seed=2)
    rejects(check, torch.outer(a.flatten(), b.flatten()))


def test_several_terms_have_as_many_kronecker_products() -> None:
    head = kp.Head(64, 64, kp.HeadSpec(kp.Identity(), kp.Kronecker(8, 8, terms=3)), seed=0, dtype=torch.float64)
    assert int(torch.linalg.matrix_rank(rearranged(head.weights().dense()[0].detach(), 8, 8))) == 3


# ------------------------------------------------------------------------------------------------ Laguerre


def test_laguerre_has_the_right_sign() -> None:
    x = torch.linspace(0, 5, 40, dtype=torch.float64)

    def check(values: torch.Tensor) -> None:
        expected = torch.from_numpy(scipy.special.eval_laguerre(2, x.numpy()))
        torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)

    check(kp.Laguerre(2)(x.unsqueeze(-1), {}).dense()[:, 1])
    rejects(check, ((3 - x) * (1 - x) + 1) / 2)  # (2k − 1 − x) L₁ + (k − 1) L₀: the last sign
    rejects(check, ((3 + x) * (1 - x) - 1) / 2)  # (2k − 1 + x) L₁ − (k − 1) L₀: the first


# ------------------------------------------------------------------------------------------------ KAN


def test_base_of_a_kan_is_the_matrix_times_the_activated_input() -> None:
    head = kp.Head(3, 2, kp.HeadSpec(kp.BSpline(), remainder=kp.LinearRemainder(before="silu")), seed=0)
    x = inputs(7, 3, dtype=torch.float32) * 3
    matrix = head.pi["matrix"]
    splines = head.expand(x).dense() @ head.weights().dense()[0].T

    def check(y: torch.Tensor) -> None:
        torch.testing.assert_close(y, splines + (x * torch.sigmoid(x)) @ matrix.T)

    check(head(x))
    rejects(check, splines + F.silu(x @ matrix.T))


# ------------------------------------------------------------------------------------------------ sums


@pytest.mark.parametrize("psi", [kp.Dense(), kp.LowRank(2), kp.Kronecker(), kp.HyperNet(4)], ids=lambda f: f.name)
def test_heads_and_channels_are_added_not_averaged(psi) -> None:
    layer = kp.Layer(4, 4, kp.LayerSpec((kp.HeadSpec(kp.Taylor(2), psi, channels=3),) * 2), seed=0, dtype=torch.float64)
    x = inputs(9, 4)
    kappa = layer.heads[0].expand(x).dense()
    # (heads, channels, rows, n)
    each = torch.stack([torch.einsum("bd,cnd->cbn", kappa, head.weights().dense()) for head in layer.heads])

    def check(y: torch.Tensor) -> None:
        torch.testing.assert_close(y, each.sum((0, 1)))

    check(layer(x))
    rejects(check, each.mean((0, 1)))
    rejects(check, each.mean(0).sum(0))
    rejects(check, each.sum(0).mean(0))


# ------------------------------------------------------------------------------------------------ what is random is saved


@pytest.mark.parametrize(
    "spec",
    [
        kp.HeadSpec(kp.Taylor(2), kp.Masked(0.3)),
        kp.HeadSpec(kp.Taylor(2), kp.Duplicated(ratio=0.5)),
        kp.HeadSpec(kp.Taylor(2), kp.RandomAdaption(3)),
        kp.HeadSpec(kp.Taylor(2), kp.HyperNet(4, hidden=8)),
        kp.HeadSpec(kp.RandomFourier(10)),
    ],
    ids=lambda spec: f"{spec.expansion.name}-{spec.reconciliation.name}",
)
def test_masks_and_random_matrices_are_in_the_file(spec, tmp_path) -> None:
    x = inputs(9, 4)

    def through(state: dict[str, torch.Tensor], model: kp.Model) -> torch.Tensor:
        """Return the output of another model, made from another seed, that reads the state as a file gives it."""
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        other = kp.Model(model.spec, seed=99, dtype=torch.float64)
        other.load_state_dict(torch.load(buffer, weights_only=True), strict=False)
        return other(x).detach()

    model = kp.Model(kp.ModelSpec((4, 4), (kp.LayerSpec((spec,)),)), seed=0, dtype=torch.float64)
    y = model(x).detach()

    def check(again: torch.Tensor) -> None:
        assert torch.equal(again, y)

    check(through(model.state_dict(), model))
    kp.save(model, tmp_path / "m.safetensors")
    check(kp.load(tmp_path / "m.safetensors")(x).detach())
    assert torch.equal(model(x).detach(), y)  # and nothing is drawn anew in a second pass
    rejects(check, through(dict(model.named_parameters()), model))  # parameters alone


# ------------------------------------------------------------------------------------------------ dropout


def test_dropout_is_off_in_evaluation() -> None:
    model = kp.Model(kp.rpn([4, 4], expansion=kp.Taylor(2), after=("dropout",)), seed=0).eval()
    x = inputs(50, 4, dtype=torch.float32)

    def check(y: torch.Tensor) -> None:
        torch.testing.assert_close(
            y, model.layers[0].heads[0].expand(x).dense() @ model.layers[0].heads[0].psi["matrix"].T
        )
        assert torch.equal(y, model(x))

    check(model(x))
    torch.manual_seed(0)
    kappa = kp.Taylor(2)(x, {}).dense()
    rejects(check, F.dropout(kappa, 0.5) @ model.layers[0].heads[0].psi["matrix"].T)  # without saying `training=False`


# ------------------------------------------------------------------------------------------------ densities


def test_calibrated_densities_tell_minus_two_from_two() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 600)
    data = rng.normal(4.0 * labels - 2.0, 1.0)[:, None]
    x, y = torch.from_numpy(data), torch.from_numpy(labels)
    theirs = GaussianNB().fit(data[:400], labels[:400])
    expected = theirs.score(data[400:], labels[400:])

    def check(columns: torch.Tensor) -> None:
        """Check that the better log-density of two decides as well as naive Bayes does."""
        assert float((columns.argmax(-1)[400:] == y[400:]).double().mean()) >= expected - 1e-12

    spec = kp.HeadSpec(kp.NaiveNormal(2))
    head = kp.calibrate(kp.Head(1, 2, spec, seed=0, dtype=torch.float64), x[:400], y[:400])
    check(head.expand(x).dense() + torch.from_numpy(theirs.class_prior_).log())
    standard = torch.distributions.Normal(0.0, 1.0).log_prob(x)
    rejects(check, standard.expand(-1, 2))  # N(0, 1) for both: −2 and 2 are the same
