"""kapsi models in the trainers of other packages: Lightning's `Trainer` and skorch's `NeuralNetRegressor` (`make interop`)."""

from __future__ import annotations

import copy
import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

import kapsi as kp

pytestmark = pytest.mark.filterwarnings("ignore")  # of third parties


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = 2 * torch.rand(256, 2, generator=torch.Generator().manual_seed(0)) - 1
    return x, (x[:, :1] * x[:, 1:]).sin()


def model() -> kp.Model:
    return kp.Model(kp.rpn([2, 8, 1], kp.Chebyshev(3), remainder=kp.LinearRemainder()), seed=0)


def test_lightning_trainer(tmp_path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model()

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            x, y = batch
            return nn.functional.mse_loss(self.model(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    x, y = data()
    regression = Regression()
    before = copy.deepcopy(regression.model)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=64, shuffle=True)
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_epochs=30, default_root_dir=tmp_path, enable_checkpointing=False, **options)
    trainer.fit(regression, loader)
    with torch.no_grad():
        start, end = (nn.functional.mse_loss(m(x), y) for m in (before, regression.model))
    assert end < 0.1 * start
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = Regression.load_from_checkpoint(tmp_path / "last.ckpt")
    assert torch.equal(loaded.model(x), regression.model(x))
    kp.save(regression.model, tmp_path / "model.safetensors")
    assert torch.equal(kp.load(tmp_path / "model.safetensors")(x), regression.model(x))


def test_skorch_regressor_in_a_grid_search() -> None:
    skorch = pytest.importorskip("skorch")
    from sklearn.model_selection import GridSearchCV

    x, y = data()
    torch.manual_seed(0)
    net = skorch.NeuralNetRegressor(
        kp.Model,
        module__spec=model().spec,
        module__seed=0,
        optimizer=torch.optim.AdamW,
        max_epochs=30,
        lr=0.01,
        batch_size=64,
        train_split=None,
        verbose=0,
    )
    search = GridSearchCV(net, {"module__spec": [kp.rpn([2, 1]), model().spec]}, cv=2, error_score="raise")
    search.fit(x.numpy(), y.numpy())
    assert search.best_index_ == 1
    assert search.best_score_ > 0.9


def test_code_of_the_documentation(tmp_path) -> None:
    pytest.importorskip("lightning.pytorch")
    pytest.importorskip("skorch")
    page = Path(__file__).parents[1] / "docs" / "other_trainers.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    names = runpy.run_path(str(script))
    x, y = data()
    assert names["Regression"]().training_step((x, y)).requires_grad
    search = names["search"].fit(x.numpy(), y.numpy())
    assert search.best_params_["module__spec"].layers[0].heads[0].expansion == kp.Taylor(2)
    assert names["model"](x).shape == (256, 1)
