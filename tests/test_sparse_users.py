"""Sparse inputs as users give them: matrices of SciPy, and the transforms of `torch.func`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy import sparse
from torch import Tensor
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap

import kapsi as kp
from kapsi.features import entry_pairs

PAIRS = (
    (kp.Identity(), kp.LowRank(2)),
    (kp.Taylor(2), kp.KhatriRao(2)),
    (kp.Taylor(2), kp.LowRank(2)),
    (kp.Taylor(2, symmetric=True), kp.Dense()),
    (kp.Taylor(2), kp.Kronecker(columns=2)),
)


def zeros_and_others(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    there = torch.rand(*shape, generator=generator) > 0.5
    return torch.rand(*shape, generator=generator, dtype=torch.float64) * there


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of torch's forward derivatives
@pytest.mark.parametrize(("expansion", "reconciliation"), PAIRS, ids=str)
def test_transforms_of_functions_of_the_parameters(expansion: kp.Expansion, reconciliation: kp.Reconciliation) -> None:
    """The model reads the sparse inputs itself, within the transforms."""
    dense = zeros_and_others(4, 5)
    head = kp.HeadSpec(
        expansion, reconciliation, kp.LinearRemainder(bias=True), channels=2, after="layer_norm", bias=True
    )
    spec = kp.ModelSpec((5, 3, 2), (kp.LayerSpec((head, head)), kp.LayerSpec(kp.HeadSpec(kp.Taylor(2)))))
    model = kp.Model(spec, seed=0, dtype=torch.float64)
    parameters = dict(model.named_parameters())
    moved = {name: torch.ones_like(tensor) for name, tensor in parameters.items()}
    several = {name: torch.stack((tensor, tensor / 2)) for name, tensor in parameters.items()}

    def found(x: Tensor) -> list[Any]:
        def call(values: Any) -> Any:
            return functional_call(model, values, (x,))

        def loss(values: Any) -> Any:
            return call(values).sin().sum()

        return [
            grad(loss)(parameters),
            jacrev(call)(parameters),
            jacfwd(call)(parameters),
            jvp(grad(loss), (parameters,), (moved,)),
            vjp(grad(loss), parameters)[1](moved),
            vmap(grad(loss))(several),
            grad(lambda values: vmap(loss)(values).sum())(several),
        ]

    torch.testing.assert_close(found(dense.to_sparse_csr()), found(dense), rtol=1e-10, atol=1e-10)


def test_gradients_of_each_row() -> None:
    """As the Jacobian of the losses: rows of sparse inputs cannot be mapped over."""
    dense = zeros_and_others(4, 5)
    model = kp.Model(kp.rpn([5, 2], kp.Taylor(2), kp.LowRank(2)), seed=0, dtype=torch.float64)
    parameters = dict(model.named_parameters())

    def losses(values: Any, x: Tensor) -> Any:
        return functional_call(model, values, (x,)).sin().sum(-1)

    x = dense.to_sparse_csr()
    found = jacrev(lambda values: losses(values, x))(parameters)
    torch.testing.assert_close(found, vmap(grad(losses), (None, 0))(parameters, dense), rtol=0, atol=1e-10)


def test_a_matrix_of_scipy() -> None:
    dense = zeros_and_others(4, 5)
    model = kp.Model(kp.rpn([5, 2], kp.Taylor(2), kp.KhatriRao(2)), seed=0, dtype=torch.float64)
    for given in (sparse.csr_matrix(dense.numpy()), sparse.coo_array(dense.numpy())):
        with pytest.raises(kp.DataError, match=r"x\.tocsr\(\).*torch\.sparse_csr_tensor\(a\.indptr") as error:
            model(given)
        assert "\n" not in str(error.value)
        a = given.tocsr()
        a.sum_duplicates()
        x = torch.sparse_csr_tensor(a.indptr, a.indices, a.data, a.shape, check_invariants=True)
        torch.testing.assert_close(model(x), model(dense), rtol=0, atol=1e-10)
        with pytest.raises(kp.DataError, match=r"ExpansionModule.*x\.toarray\(\)"):
            kp.ExpansionModule(5, kp.Taylor(2))(given)


def test_pairs_of_entries() -> None:
    left = kp.features.SparseFeatures(torch.tensor([0, 2, 2, 3]), torch.tensor([0, 1, 1]), torch.ones(3), 2)
    right = kp.features.SparseFeatures(torch.tensor([0, 1, 3, 5]), torch.tensor([0, 1, 2, 0, 1]), torch.ones(5), 3)
    starts, first, second = entry_pairs(left, right)
    assert starts.tolist() == [0, 2, 2, 4]
    assert first.tolist() == [0, 1, 2, 2]
    assert second.tolist() == [0, 0, 3, 4]
