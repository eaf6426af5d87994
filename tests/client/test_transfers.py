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
from client.comparing import equal, step_differences
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
from tiers import first


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


@pytest.mark.parametrize("name", first(1, ["batch_norm_and_dropout", "tied_weights"]))
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


def test_gradients_that_are_released() -> None:
    """The parameters after three steps are those of plain training, and both peaks are those of the plan.

    That on the device is the most of a few steps: what another thread allocates or frees in one of them is not seen.
    """
    rows = torch.randn(1024, 256, generator=torch.Generator().manual_seed(0))
    plain, planned = (module_of(lambda self, x: squares(self.layers(x)), layers=network()) for _ in range(2))
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (plain, planned)]
    remat.enable(
        planned, budget="100%", planner=Mover(None), link=LINK, optimizer=optimizers[1], release_gradients=True,
        self_check=False,
    )  # fmt: skip
    for model, optimizer in zip((plain, planned), optimizers, strict=True):
        for step in range(3):
            model((step + 1) * rows).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert equal(plain.parameters(), planned.parameters())
    (plan,) = plans_of(planned).plans
    assert plan.step.operations.updates
    run = measure.forward_backward(planned, (rows,))
    device, host = max(measure.peak_memory(run).peak_bytes for _ in range(5)), traced_peak(run)
    predicted = host_peak(plan.step.graph, plan.answer.plan)
    assert predicted > 2**20
    assert device == pytest.approx(plan.activation_bytes, rel=0.03)
    assert host == pytest.approx(predicted, rel=0.05)


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
