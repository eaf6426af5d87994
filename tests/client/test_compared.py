"""`remat.check` names what differs; a step that runs otherwise than it was traced is refused at once."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import remat
from client.comparing import equal, gradients
from client.planners import OnDemand
from client.small_models import Mlp, module_of, numbers
from client.test_takeover import Mixed, amp
from remat.training.enable import backend_of
from remat_ir import InvalidData


def state_of(model: nn.Module) -> list[torch.Tensor]:
    return [*(t.clone() for t in model.state_dict().values()), torch.get_rng_state()]


@pytest.mark.parametrize("way", ["enable", "optimize", "chain", "backend", "function", "part"])
def test_whatever_trains_by_plans_is_compared_and_left_as_it_was(way: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Mlp(dropout=0.2), nn.BatchNorm1d(32), nn.Linear(32, 4)), numbers(64, 32)
    asking: dict[str, Any] = {"budget": "100%", "planner": "greedy"}
    run: Any = model
    if way in ("enable", "part"):
        remat.enable(model if way == "enable" else model[0], **asking)
    elif way == "optimize":
        run = remat.optimize(model, x, **asking)
    elif way == "chain":
        run = remat.optimize_chain(model, x, **asking)
    else:
        compiled = torch.compile(model, backend=remat.backend(**asking), dynamic=False)
        run = compiled if way == "backend" else lambda x: compiled(x).square()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before, leaf = state_of(model), x.requires_grad_()
    found = remat.check(run, leaf, module=model if way == "function" else None)
    assert found.equal, found
    assert found.planned_calls == 1
    assert str(found).endswith("(planned calls: 1)")
    assert found.compared >= 1 + len(list(model.parameters())) + 1 + 3 + 2, "output, gradients, buffers, generators"
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(model), strict=True))
    assert leaf.grad is None
    assert all(p.grad is not None and torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())


def test_what_differs_most_is_named() -> None:
    """A plan whose gradients come out 1 % too large, where its outputs are right."""
    model, x = Mlp(), numbers(16, 32)
    remat.enable(model, budget="100%", planner="greedy")
    assert remat.check(model, x).equal
    (trained,) = backend_of(model).trained
    made = trained.planned
    run = made.run

    def faulty(*given: Any, **around: Any) -> Any:
        output = run(*given, **around)
        output[0].register_hook(lambda g: g * 1.01)
        return output

    trained.use(replace(made, run=faulty))
    found = remat.check(model, x)
    assert set(found.differences) == {f"gradient of {name}" for name, _ in model.named_parameters()}
    assert found.differences[found.largest] == pytest.approx(0.01, rel=0.01)
    assert found.largest in str(found)


def test_a_step_without_a_plan_is_told() -> None:
    model, x = Mlp(), numbers(16, 32)
    for run in (model, torch.compile(model, backend="aot_eager")):
        found = remat.check(run, x)
        assert found.planned_calls == 0
        assert str(found).endswith("are equal (planned calls: none, no plan was compared)")


@pytest.mark.thorough
def test_each_call_by_a_plan_is_counted() -> None:
    """Of two planned parts, one of which a checkpoint runs again; and of a graph under Inductor."""
    model, x = nn.Sequential(Mlp(), Mlp()), numbers(16, 32)
    for part in model:
        remat.enable(part, budget="100%", planner="greedy")
    found = remat.check(lambda x: model[1](checkpoint(model[0], x, use_reentrant=False)), x, module=model)
    assert found.equal
    assert found.planned_calls == 3
    compiled = torch.compile(Mlp(), backend=remat.backend("100%", "greedy", "inductor"), dynamic=False)
    assert remat.check(compiled, x).planned_calls == 1


def test_leaves_of_a_function_are_found_and_named_by_their_shapes() -> None:
    weight, x = numbers(8, 4, requires_grad=True), numbers(3, 8)
    found = remat.check(torch.compile(lambda x: x @ weight, backend=remat.backend("100%", "greedy")), x)
    assert found.equal
    assert weight.grad is None


@pytest.mark.thorough
def test_a_step_that_writes_to_a_parameter_or_gives_no_gradient_is_refused() -> None:
    model, x = Mlp(), numbers(16, 32)
    with pytest.raises(InvalidData, match="no tensor in the output has one: give loss="):
        remat.check(lambda x: 3, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.layers[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(InvalidData, match=r"the step writes to layers.*without hooks that step an optimizer"):
        remat.check(model, x)


def in_a_thread(make: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(make()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.thorough
def test_a_forward_pass_under_another_autocast_than_its_compilation_is_refused() -> None:
    """As a plan was that was compiled in the planner's thread: before anything is computed from what it saves."""
    torch.manual_seed(0)
    model, x = Mixed(attends=True), numbers(256, 32)
    with amp():
        run: Any = remat.optimize(model, (x,), budget="100%", planner=OnDemand(), on_failure="raise")
    (trained,) = backend_of(run).trained
    made = trained.planned
    trained.use(replace(made, run=in_a_thread(lambda: made.step.compile(made.answer.plan, now=True))))
    with amp(), pytest.raises(remat.CaptureError, match=r"of the planned step is torch\.\w+, and the trace says"):
        run(x)


@pytest.mark.thorough
def test_behind_torch_compile_a_plan_is_compiled_under_the_state_of_its_call() -> None:
    """Wherever the graph was handed over: here in a thread, which has no autocast."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model, x = Mixed(attends=True), numbers(256, 32)
    plain, backend = copy.deepcopy(model), remat.backend("100%", "greedy")

    def elsewhere(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return in_a_thread(lambda: backend(graph, inputs))

    run, usual = torch.compile(model, backend=elsewhere, dynamic=False), torch.compile(plain, backend="aot_eager")
    losses = []
    for call in (usual, run):
        torch.manual_seed(1)
        with amp():
            losses.append(call(x).sum())
        losses[-1].backward()
    assert torch.equal(*losses)
    assert len(backend.answers) == 1
    assert equal(gradients(model), gradients(plain))


@pytest.mark.thorough
def test_strides_that_are_not_as_traced_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Of an operator whose description is careless, which trains as ever."""
    torch.compiler.reset()

    @torch.library.custom_op("remat_tests::turned", mutates_args=())
    def turned(x: torch.Tensor) -> torch.Tensor:
        return x.t().contiguous().t()

    turned.register_fake(torch.empty_like)
    turned.register_autograd(lambda _, g: g)

    model, x = module_of(lambda self, x: turned(self.linear(x)), linear=nn.Linear(8, 8)), numbers(4, 8)
    remat.enable(model, budget="100%", planner="greedy")
    for _ in range(2):
        model(x).sum().backward()
    (told,) = (r.getMessage() for r in caplog.records if r.name == "remat" and r.levelname == "WARNING")
    assert "of the planned step is of strides (1, 4), and the trace says of strides (8, 1)" in told


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["optimize", "backend"])
def test_a_kernel_that_torch_describes_wrong_is_no_reason_to_refuse(way: str) -> None:
    """A batch norm in bfloat16 saves float32 statistics on a CPU, and torch describes them as bfloat16."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    plain, x = copy.deepcopy(model), torch.randn(4, 3, 12, 12)
    with amp():
        if way == "optimize":
            run: Any = remat.optimize(model, (x,), budget="100%", planner="greedy")
        else:
            run = torch.compile(model, backend=remat.backend("100%", "greedy"))
        (found, expected) = run(x), torch.compile(plain, backend="aot_eager")(x)
    for output in (found, expected):
        output.float().square().mean().backward()
    assert torch.equal(found, expected)
    assert equal(gradients(model), gradients(plain))
