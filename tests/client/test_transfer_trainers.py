"""Each way of training with a link to the host: the bits of plain training, device and host peaks as predicted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from client.test_ranks import ran
from client.test_transfers import network, squares
from client.transferring import LINK, Mover, traced_peak
from remat.profiling import measure
from remat.training.enable import plans_of
from remat_ir import host_peak


class Model(nn.Module):
    """A loss of four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return squares(self.layers(x))


ROWS = torch.randn(1024, 256, generator=torch.Generator().manual_seed(0))


def trained(model: nn.Module, call: Callable[..., Any], optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters after three steps."""
    for step in range(3):
        call((step + 1) * ROWS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def as_predicted(module: nn.Module, *args: Any, **kwargs: Any) -> int:
    """The bytes on the host at most of a module whose only plan moves values; both peaks are those of the plan.

    That on the device is the most of a few steps: what another thread allocates or frees in one of them is not seen.
    """
    (planned,) = plans_of(module).plans
    module.zero_grad()
    run = measure.forward_backward(module, args, kwargs)
    device, host = max(measure.peak_memory(run).peak_bytes for _ in range(5)), traced_peak(run)
    predicted = host_peak(planned.step.graph, planned.answer.plan)
    assert device == pytest.approx(planned.activation_bytes, rel=0.03)
    assert host == pytest.approx(predicted, rel=0.05)
    return predicted


def test_gradients_that_are_released() -> None:
    plain, planned = Model(), Model()
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (plain, planned)]
    remat.enable(
        planned, budget="100%", planner=Mover(None), link=LINK, optimizer=optimizers[1], release_gradients=True,
        self_check=False,
    )  # fmt: skip
    assert all(map(torch.equal, trained(plain, plain, optimizers[0]), trained(planned, planned, optimizers[1])))
    (plan,) = plans_of(planned).plans
    assert plan.step.operations.updates
    assert as_predicted(planned, ROWS) > 2**20


@pytest.mark.thorough
def test_a_backend_of_torch_compile() -> None:
    plain, planned = Model(), Model()
    backend = remat.backend("100%", planner=Mover(None), link=LINK)
    compiled = torch.compile(planned, backend=backend, fullgraph=True, dynamic=False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, planned)]
    assert all(map(torch.equal, trained(plain, plain, optimizers[0]), trained(planned, compiled, optimizers[1])))
    ((answer, graph),) = ((each.answer, each.graph) for each in backend.planned)
    run = measure.forward_backward(compiled, (ROWS,))
    device, host = max(measure.peak_memory(run).peak_bytes for _ in range(5)), traced_peak(run)
    assert 0.9 * (answer.peak_bytes - graph.fixed_bytes) < device <= answer.peak_bytes - graph.fixed_bytes
    assert host == pytest.approx(host_peak(graph, answer.plan), rel=0.05)
    assert host > 2**20


@pytest.mark.slow
def test_the_trainer_of_lightning(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    from remat.trainers.lightning import RematCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return self.model(batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Look(pl.Callback):
        moved = 0

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.moved = as_predicted(pl_module.model, ROWS[:512])

    look, data = Look(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ROWS), batch_size=512)
    weights = []
    for callbacks in ([], [look, RematCallback("100%", part="model", planner=Mover(None), link=LINK)]):
        module = Module()
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(
            max_steps=2, accelerator="cpu", enable_checkpointing=False, callbacks=callbacks,
            default_root_dir=tmp_path, **quiet,
        )  # fmt: skip
        trainer.fit(module, data)
        weights.append([p.detach().clone() for p in module.parameters()])
    assert all(map(torch.equal, *weights))
    assert look.moved > 2**20


@pytest.mark.slow
def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from remat.trainers.transformers import RematCallback

    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=50, n_positions=64, bos_token_id=1, eos_token_id=2)
    tokens = torch.randint(0, 50, (16, 64), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in tokens]

    class Look(TrainerCallback):
        moved = 0

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.moved = as_predicted(given["model"], **seen)

    seen: dict[str, Any] = {}
    look, weights = Look(), []
    for callbacks in ([], [look, RematCallback("100%", planner=Mover(None), link="pcie4")]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config)
        model.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True)
        given = TrainingArguments(
            str(tmp_path), max_steps=2, per_device_train_batch_size=8, report_to=[], use_cpu=True, save_strategy="no"
        )
        Trainer(model, given, train_dataset=rows, callbacks=callbacks).train()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *weights))
    assert look.moved > 2**20


@pytest.mark.slow
def test_units_of_fsdp2_on_two_ranks(tmp_path: Path) -> None:
    found = [rank["sharded_moves"] for rank in ran(tmp_path, "sharded_moves")]
    for rank in found:
        assert rank["plain"] == rank["planned"]
        assert rank["over"] <= 0
        host, predicted = rank["host"]
        assert host == pytest.approx(predicted, rel=0.1)
        assert predicted > 2**18
    assert found[0]["digest"] == found[1]["digest"]
