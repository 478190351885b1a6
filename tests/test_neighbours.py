"""Libraries that people use with PyTorch, each with a small model: quantised by torchao, trained by
accelerate and by lightning. Where they are installed: `pip install torchao accelerate lightning`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.wrapper.program import CompileRecord, observers

pytestmark = pytest.mark.slow


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


@pytest.fixture
def records() -> Iterator[list[CompileRecord]]:
    made: list[CompileRecord] = []
    token = observers.set((made.append,))
    yield made
    observers.reset(token)


def batches(n: int) -> list[tuple[Tensor, Tensor]]:
    gen = torch.Generator().manual_seed(1)
    return [(x, x.sin()) for x in torch.randn(n, 8, 64, generator=gen)]


def train(model: nn.Module, backward: Any = Tensor.backward) -> list[float]:
    """Losses of a few steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, y in batches(6):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


# ------------------------------------------------------------------------------------------ torchao
def _quantised(kind: str) -> nn.Module:
    pytest.importorskip("torchao")
    from torchao import quantization as q
    from torchao.quantization.granularity import PerGroup

    group = PerGroup(32)
    config: Any = {
        "int8": q.Int8WeightOnlyConfig,
        "int8 both": q.Int8DynamicActivationInt8WeightConfig,
        "int4": lambda: q.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group),
        "int8 and int4": lambda: q.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=group
        ),
        "float8": q.Float8WeightOnlyConfig,
    }[kind]()
    model = small().eval()
    q.quantize_(model, config)
    return model


KINDS = ("int8", "int8 both", "int4", "int8 and int4", "float8")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["static", "dynamic", "without Dynamo", "package"])
def test_quantised(kind: str, how: str, records: list[CompileRecord], tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = _quantised(kind)
    xs = [x for x, _ in batches(2)]
    compiled: Any
    if how == "package":
        plait.package(model, tmp_path / "p.plait", (xs[0],))
        compiled = plait.load(tmp_path / "p.plait")
    elif how == "without Dynamo":
        compiled = plait.compile(model, (xs[0],))
    else:
        dynamic = how == "dynamic"
        compiled = torch.compile(model, backend="plait", dynamic=dynamic, fullgraph=True)
        xs += [x[:3] for x in xs]
    with torch.no_grad():
        for x in xs:
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert not [s for r in records for s in r.ladder if s.rung != "aten"], "Python or eager runs it"


def test_quantisation_aware_training() -> None:
    pytest.importorskip("torchao")
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.qat import QATConfig

    torch._dynamo.reset()
    base = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=PerGroup(32)
    )
    models = []
    for _ in range(2):
        model = small()
        quantize_(model, QATConfig(base, step="prepare"))
        models.append(model)
    mine, theirs = models
    mine.compile(backend="plait")
    torch.testing.assert_close(train(mine), train(theirs), rtol=1e-3, atol=1e-3)


# --------------------------------------------------------------------------- accelerate, lightning
def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    torch._dynamo.reset()
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(torch.compile(small(), backend="plait"))
    torch.testing.assert_close(train(model, accelerator.backward), train(small()))


@pytest.mark.parametrize("way", ["module.compile", "torch.compile", "part"])
def test_lightning(way: str, tmp_path: Path) -> None:
    L: Any = pytest.importorskip("lightning")

    class Module(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = small(), []

        def training_step(self, batch: Any, _: int) -> Tensor:
            x, y = batch
            loss: Tensor = (self.net(x) - y).square().mean()
            return loss

        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            self.losses.append(outputs["loss"].item())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    torch._dynamo.reset()
    runs = []
    for compiled in (True, False):
        module = trained = Module()
        if compiled and way == "part":
            module.net.compile(backend="plait")
        elif compiled and way == "module.compile":
            module.compile(backend="plait")
        elif compiled:
            trained = torch.compile(module, backend="plait")
        trainer = L.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(trained, torch.utils.data.DataLoader(batches(6), batch_size=None))
        runs.append(module.losses)
    assert len(runs[0]) == 12
    torch.testing.assert_close(*runs)


def test_fabric() -> None:
    fabric_of: Any = pytest.importorskip("lightning").Fabric
    torch._dynamo.reset()
    fabric = fabric_of(accelerator="cpu", devices=1)
    model = fabric.setup(torch.compile(small(), backend="plait"))
    torch.testing.assert_close(train(model, fabric.backward), train(small()))
