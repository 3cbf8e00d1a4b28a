"""Weighted sums of models as one layer."""

import pytest
import torch

import kapsi as kp
from kapsi.expansion import LogCountScale, Nystrom, TreeLeaves
from kapsi.recipes import mixture

X = torch.rand(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 - 1


def model(head: kp.HeadSpec, seed: int) -> kp.Model:
    built = kp.Model(kp.ModelSpec((3, 2), kp.LayerSpec(head)), seed=seed, dtype=torch.float64)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.1)
    return kp.calibrate(built, X[seed * 10 : seed * 10 + 10])


HEADS = {
    "polynomial": kp.HeadSpec(kp.Taylor(2, symmetric=True), remainder=kp.LinearRemainder(), bias=True),
    "centers": kp.HeadSpec(Nystrom(5), bias=True),
    "trees": kp.HeadSpec(TreeLeaves(6, 2, 3), remainder=kp.ConstantRemainder(0.5)),
    "low rank": kp.HeadSpec(kp.Taylor(2), kp.LowRank(2), before="tanh"),
    "channels": kp.HeadSpec(kp.Taylor(2), kp.Kronecker(), channels=3),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_with_equal_expansions_and_other_tensors_keep_their_own(name) -> None:
    parts = [model(HEADS[name], 0), model(HEADS[name], 1), model(HEADS[name], 2), model(HEADS["polynomial"], 3)]
    weights = [0.5, 0.0, 1.5, 0.25]
    both = mixture(parts, weights)
    expected = sum(weight * part(X) for part, weight in zip(parts, weights, strict=True))
    assert torch.allclose(both(X), expected, rtol=1e-12, atol=1e-12)
    assert len(both.layers) == 1
    again = kp.Model(both.spec, dtype=torch.float64)
    again.load_state_dict(both.state_dict())
    assert torch.equal(again(X), both(X))


def test_heads_of_texts_with_other_scales_take_sparse_rows() -> None:
    """As heads fitted on different rows have them."""
    parts = [model(kp.HeadSpec(LogCountScale(), bias=True), seed) for seed in range(2)]
    for part, scale in zip(parts, (1.0, 2.0), strict=True):
        part.layers[0].heads[0].assign("expansion", scale=torch.full((3,), scale, dtype=torch.float64))
    both = mixture(parts, [1.0, 1.0])
    assert torch.allclose(both(X.to_sparse_csr()), parts[0](X) + parts[1](X))


def test_a_sum_of_a_sum_is_a_sum() -> None:
    one, two, three = (model(HEADS["centers"], seed) for seed in range(3))
    both = mixture([mixture([one, two], [1.0, 2.0]), three], [0.5, 1.0])
    assert torch.allclose(both(X), 0.5 * one(X) + two(X) + three(X))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (kp.rpn([3, 4, 2]), "models of one layer"),
        (kp.ModelSpec((3, 2), kp.LayerSpec(output="tanh")), "without output processing"),
        (kp.rpn([3, 1]), "equal widths"),
    ],
)
def test_other_models_are_refused(spec, message) -> None:
    with pytest.raises(kp.SpecError, match=message):
        mixture([model(HEADS["trees"], 0), kp.Model(spec, dtype=torch.float64)], [1.0, 1.0])


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0]])
def test_weights_are_at_least_0_and_not_all_0(weights) -> None:
    with pytest.raises(kp.SpecError, match="weight"):
        mixture([model(HEADS["trees"], 0)] * 2, weights)
