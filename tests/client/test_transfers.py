"""Plans that move values to the host and back, in each way of training: plain training's bits, the predicted memory."""

from __future__ import annotations

import copy
import gc
import re
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from client.comparing import step_differences
from client.small_models import CASES, Case, module_of
from client.test_exact import QUICK, WithLoss, callable_of, everything_again, outcome, peak, random_plan
from client.test_ranks import ran
from client.transferring import LINK, Mover, linked, traced_peak, with_transfers
from remat.cli.show import explained
from remat.lowering import transfers
from remat.planning.profiles import DiskProfiles
from remat.planning.summary import headline, journeys, journeys_text, moved
from remat.profiling import measure
from remat.training.enable import backend_of, plans_of
from remat.training.step import running_peak, training_step
from remat_ir import (
    Answer,
    Compute,
    Drop,
    Free,
    InvalidData,
    Link,
    Offload,
    Plan,
    Prefetch,
    Problem,
    Wait,
    graph_of,
    host_peak,
    plain_plan,
)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in sorted(CASES)])
def test_every_plan_with_transfers_trains_exactly(name: str, profiles: DiskProfiles) -> None:
    torch.manual_seed(0)
    case = CASES[name]()
    step = linked(training_step(case.module, case.args, case.kwargs, table=profiles))
    plain = outcome(case, case.module)
    moved = 0
    for seed, base in enumerate((plain_plan(step.graph), everything_again(step), random_plan(step, 1))):
        plan = with_transfers(step.graph, base, seed)
        moved += sum(isinstance(part, Offload) for part in plan.steps)
        assert measure.differences(plain, outcome(case, callable_of(case, step, plan))) == []
    assert moved or name in KEEPS_ALL


@pytest.mark.parametrize("name", ["batch_norm_and_dropout", "tied_weights"])
def test_the_peak_is_the_predicted_one(name: str, profiles: DiskProfiles) -> None:
    torch.manual_seed(0)
    case = CASES[name]()
    whole = Case(WithLoss(case), case.args, case.kwargs, None)
    step = linked(training_step(whole.module, whole.args, whole.kwargs, table=profiles))
    for seed, base in enumerate((plain_plan(step.graph), everything_again(step), random_plan(step, 1))):
        plan = with_transfers(step.graph, base, seed)
        predicted = running_peak(step, plan) - step.graph.fixed_bytes
        assert peak(whole, callable_of(whole, step, plan)) == pytest.approx(predicted, rel=0.01, abs=256)


KEEPS_ALL = ("input_that_requires_gradients_and_is_returned", "outputs_that_alias")
"""Nothing of these waits for another use."""


def network(width: int = 256) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.GELU())))


def squares(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def trained(model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], steps: int = 2) -> list[torch.Tensor]:
    """All gradients of a few accumulated steps."""
    model.zero_grad()
    torch.manual_seed(1)
    for _ in range(steps):
        squares(run(torch.randn(64, 256))).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_optimize_enable_and_backend_train_by_plans_with_a_link() -> None:
    model, x = network(), torch.randn(64, 256)
    plain = trained(model, model)
    made = remat.optimize(copy.deepcopy(model), (x,), budget="100%", planner=Mover(), link=LINK)
    assert all(map(torch.equal, plain, trained(made, made)))
    (planned,) = remat.plans_of(made).plans
    assert planned.step.graph.link == LINK
    said = str(remat.explain(made))
    assert "moved to the host" in said
    assert "offloaded" in said
    backend = remat.backend("100%", planner=Mover(1), link="pcie4")
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    assert all(map(torch.equal, plain, trained(model, compiled)))
    assert any(isinstance(step, Offload) for step in backend.answers[0].plan.steps)
    remat.enable(model, budget="100%", planner=Mover(2), link="measured", host_bytes="1GiB")
    assert all(map(torch.equal, plain, trained(model, model)))
    remat.disable(model)


def test_the_host_holds_what_the_replay_says_and_lets_go_of_it() -> None:
    """The stand-in's copies lie in Python's memory, which tracemalloc counts."""
    model, x = network(), torch.randn(512, 256)
    made = remat.optimize(copy.deepcopy(model), (x,), budget="100%", planner=Mover(), link=LINK, self_check=False)
    (planned,) = remat.plans_of(made).plans
    predicted = host_peak(planned.step.graph, planned.answer.plan)
    assert predicted > 2**20
    squares(made(x)).backward()
    tracemalloc.start()
    try:
        for keep in (False, True, False):
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            loss = squares(made(x))
            loss.backward(retain_graph=keep)
            now, worst = tracemalloc.get_traced_memory()
            if not keep:  # a graph that is kept keeps its copies
                assert worst - before == pytest.approx(predicted, rel=0.02)
                assert now - before < predicted / 20
            del loss
    finally:
        tracemalloc.stop()


def test_what_comes_back_is_read_as_what_went() -> None:
    """A conjugate and a negative are bits of a tensor, and are not in its storage."""
    x = torch.randn(4, 6, dtype=torch.complex64)
    for tensor in (x, x.T[1:, ::2], x.conj(), x.imag, x.conj().imag, x.conj()[1:].T.imag):
        (back,) = transfers.prefetched(transfers.prefetch(transfers.offloaded(transfers.offload(tensor))))
        assert torch.equal(back, tensor)
        assert (back.is_conj(), back.is_neg()) == (tensor.is_conj(), tensor.is_neg())
        assert back.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_a_graph_that_is_kept_is_run_again() -> None:
    model, x = network(), torch.randn(64, 256)
    made = remat.optimize(copy.deepcopy(model), (x,), budget="100%", planner=Mover(), link=LINK, self_check=False)
    loss = squares(made(x))
    once = torch.autograd.grad(loss, list(made.parameters()), retain_graph=True)
    again = torch.autograd.grad(loss, list(made.parameters()))
    assert all(map(torch.equal, once, again))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, list(made.parameters()))


class Failing(torch.autograd.Function):
    """Passes its input on; fails in the pass that is named, once."""

    where = ""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.remat_tests.may_fail(x, False)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return torch.ops.remat_tests.may_fail(gradients[0], True)


@torch.library.custom_op("remat_tests::may_fail", mutates_args=())
def may_fail(x: torch.Tensor, late: bool) -> torch.Tensor:
    if Failing.where == ("backward" if late else "forward"):
        raise ValueError("this step fails")
    return x.clone()


@may_fail.register_fake
def _(x: torch.Tensor, late: bool) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_fails_leaves_nothing_on_the_host_and_the_module_usable(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = network(), network()
    model = nn.Sequential(first, module_of(lambda self, x: Failing.apply(x)), second)
    x = torch.randn(512, 256)
    plain = trained(model, model)
    made = remat.optimize(copy.deepcopy(model), (x,), budget="100%", planner=Mover(), link=LINK, self_check=False)
    assert all(map(torch.equal, plain, trained(made, made)))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        monkeypatch.setattr(Failing, "where", where)
        with pytest.raises(ValueError, match="this step fails"):
            squares(made(x)).backward()
        monkeypatch.setattr(Failing, "where", "")
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 2**19
    finally:
        tracemalloc.stop()
    assert all(map(torch.equal, plain, trained(made, made)))


def test_links_that_cannot_be_meant_are_refused() -> None:
    model, x = network(), torch.randn(64, 256)
    for given, says in (
        ({"link": "pcie9"}, "'pcie9' is no link: write one of pcie3"),
        ({"link": 9}, "link is 'measured', a name such as 'pcie4', or a remat_ir.Link, not 9"),
        ({"host_bytes": "1GiB"}, "give link= as well"),
        ({"link": "pcie4", "host_bytes": "much"}, "a budget is bytes or text"),
        ({"link": "pcie4", "mode": "chain"}, "optimize_chain"),
    ):
        with pytest.raises(InvalidData, match=says):
            remat.optimize(model, (x,), budget="100%", **given)
    with pytest.raises(InvalidData, match="inner='eager'"):
        remat.backend("50%", inner="inductor", link="pcie4")


def test_what_moves_and_when_is_said() -> None:
    graph = replace(graph_of([10, 10, 10], [1000, 10, 10], [[], [0], [0, 1]]), link=Link(10**9, 10**9))
    verbs = [Compute(0), Compute(1)]
    there = [Offload(0), Wait(0), Drop(0), Prefetch(0), Wait(0)]
    plan = Plan((verbs[0], *there, verbs[1], Compute(2), Free(0), Free(1)))
    assert journeys(graph, plan) == [(0, (10, 1010), (1010, 2010))]
    row = journeys_text(graph, plan).splitlines()[1]
    assert re.split(r"  +", row) == ["op 0", "1000 B", "0.00 to 0.00", "0.00 to 0.00"]
    assert journeys_text(graph, plan, rows=0).splitlines()[1].split() == ["1", "more", "1000", "B"]
    answer = Answer.of_plan(Problem(graph, 2000), plan, method="auto")
    assert moved(graph, plan) == "1000 B offloaded, 1000 B on the host"
    assert "1000 B offloaded, 1000 B on the host, +" in headline(graph, answer)
    found = explained(graph, plan)
    assert found["host_peak_bytes"] == 1000
    assert found["moved"][0]["out_ns"] == (10, 1010)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(network(64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return squares(x)


def test_units_of_a_model_move_their_values() -> None:
    x, model, plain = torch.randn(256, 64), Blocks(), Blocks()
    remat.enable(model.blocks, budget=remat.Fraction(0.5), planner=Mover(None), link=Link(10**12, 10**12))
    for _ in range(5):
        model.zero_grad()
        model(x).backward()
    backend = backend_of(model.blocks[0])
    assert any(isinstance(step, Offload) for _, plan in backend.shared.chosen() for step in plan.steps)
    model.zero_grad()
    step = measure.forward_backward(model, (x,))
    assert measure.peak_memory(step).peak_bytes <= backend.division.allowed_bytes
    assert step_differences(plain, model, (x,)) == []


def with_loss() -> nn.Module:
    return module_of(lambda self, x: squares(self.layers(x)), layers=network())


ROWS = torch.randn(1024, 256, generator=torch.Generator().manual_seed(0))


def stepped(model: nn.Module, call: Callable[..., Any], optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
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
    plain, planned = with_loss(), with_loss()
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (plain, planned)]
    remat.enable(
        planned, budget="100%", planner=Mover(None), link=LINK, optimizer=optimizers[1], release_gradients=True,
        self_check=False,
    )  # fmt: skip
    assert all(map(torch.equal, stepped(plain, plain, optimizers[0]), stepped(planned, planned, optimizers[1])))
    (plan,) = plans_of(planned).plans
    assert plan.step.operations.updates
    assert as_predicted(planned, ROWS) > 2**20


@pytest.mark.thorough
def test_a_backend_of_torch_compile() -> None:
    plain, planned = with_loss(), with_loss()
    backend = remat.backend("100%", planner=Mover(None), link=LINK)
    compiled = torch.compile(planned, backend=backend, fullgraph=True, dynamic=False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, planned)]
    assert all(map(torch.equal, stepped(plain, plain, optimizers[0]), stepped(planned, compiled, optimizers[1])))
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
            self.model = with_loss()

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
