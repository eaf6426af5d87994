"""Layouts, fusion and memory of the code that Inductor generates, of which no kernel is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._guards import TracingContext, tracing
from torch._inductor.choices import InductorChoices
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from remat import CaptureError
from remat._compat.inductor import Event, Generated, alone, channels_last_cat, dry_run, stored
from remat._compat.inductor.code import input_strides
from remat._compat.inductor.compiling import PlanOrder, fusing
from remat.capture.operations import to_graph
from remat.compile.inductor.joint import joint_of, with_updates, without_strides
from remat.compile.inductor.regions import REGION, regions
from remat.compile.inductor.replan import Kernel, step_memory
from remat.lowering.lower import lower
from remat.planning.profiles import Profile
from remat_ir import plain_plan

aten = torch.ops.aten


def generated(
    step: Callable[..., Any], *sizes: tuple[int, ...], results: int = 1, choices: InductorChoices | None = None
) -> Generated:
    """What Inductor makes of a function of tensors of these sizes, as the forward pass of a partition; not compiled."""

    def forward_pass(*given: torch.Tensor) -> Any:
        found = step(*given)
        return found if isinstance(found, tuple) else (found,)

    mode = FakeTensorMode()
    with mode:
        forward = make_fx(forward_pass)(*(torch.empty(size) for size in sizes))
        backward = make_fx(lambda *given: given)(*(torch.empty(1) for _ in range(results)))
    with tracing(TracingContext(mode)), fusing(choices or PlanOrder()):
        return dry_run(forward, backward, results)[0]


def traced(size: list[int], stride: list[int]) -> fx.GraphModule:
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        made = F.conv2d(x, w) * 2
        return torch.as_strided(made, size, stride).exp()

    return make_fx(step, tracing_mode="fake")(torch.randn(8, 16, 3, 3), torch.randn(32, 16, 3, 3))


def test_strides_that_mean_a_view_are_one() -> None:
    """Also where the tensor comes back in another layout, as what the forward pass saves does."""
    joint = traced([8, 32], [32, 1])
    x, w = torch.randn(8, 16, 3, 3), torch.randn(32, 16, 3, 3)
    expected = joint(x, w)
    without_strides(joint)
    assert not any(node.target is aten.as_strided.default for node in joint.graph.nodes)
    assert torch.equal(joint(x, w), expected)


@pytest.mark.thorough
def test_strides_that_mean_something_else_are_refused_beside_convolutions() -> None:
    with pytest.raises(CaptureError, match="strides of its own"):
        without_strides(traced([8, 16], [32, 2]))


@pytest.mark.thorough
def test_other_operators_that_know_no_layout_are_refused_too() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        made = F.conv2d(x, w) * 2
        return torch.as_strided_scatter(made, torch.ones(8, 16), [8, 16], [32, 2])

    joint = make_fx(step, tracing_mode="fake")(torch.randn(8, 16, 3, 3), torch.randn(32, 16, 3, 3))
    with pytest.raises(CaptureError, match="strides of its own"):
        without_strides(joint)


SIZE = (2, 8, 16, 16)
CHANNELS_LAST = [16 * 16 * 16, 1, 16 * 16, 16]


@pytest.mark.thorough
@pytest.mark.parametrize(("cat", "largest"), [(aten.cat.default, 2), (channels_last_cat, 1)])
def test_what_is_stored_side_by_side_in_channels_last_is_no_copy(cat: Any, largest: int) -> None:
    """Inductor's own `cat` of what is not in memory yet is contiguous, and stored a second time."""

    def step(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(stored(cat([x.sin(), y.cos()], 1), CHANNELS_LAST), w)

    sizes = [event.size for event in generated(step, SIZE, SIZE, (4, 16, 1, 1)).events if event.kind == "alloc"]
    assert sizes.count(2 * 16 * 16 * 16 * 4) == largest


def test_channels_last_cat_is_cat() -> None:
    x, y = torch.randn(SIZE), torch.randn(SIZE)
    assert torch.equal(channels_last_cat([x, y], 1), torch.cat([x, y], 1))


@pytest.mark.thorough
def test_a_kernel_alone_reads_in_the_layouts_that_it_is_given() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w)

    joint = make_fx(step, tracing_mode="fake")(torch.randn(SIZE), torch.randn(4, 8, 3, 3))
    (kernel,) = (n for n in joint.graph.nodes if n.target is aten.convolution.default)
    given = (8 * 16 * 16, 1, 16 * 8, 8)
    assert input_strides(alone(kernel, (given, None))) == (given, (8 * 3 * 3, 3 * 3, 3, 1))
    assert input_strides(kernel) == ((8 * 16 * 16, 16 * 16, 16, 1), (8 * 3 * 3, 3 * 3, 3, 1))


def step(mask: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two kernels that read the same, and between them what only the second waits for."""
    early = (mask * 2).sum(0)
    awaited = x @ x @ x
    return early, (mask * awaited).sum(0)


def order(code: Generated) -> list[str]:
    """The operator that each allocation is made for, in the order of the code."""
    last = [event.origins[-1].target for event in code.events if event.kind == "alloc"]
    return [str(target).split(".")[1] for target in last]


@pytest.mark.thorough
def test_a_fusion_does_not_pull_others_out_of_the_plans_order() -> None:
    """Inductor itself would run both products first, and hold what is awaited in vain until then."""
    found = [order(generated(step, (64, 64), (64, 64), results=2, choices=c)) for c in (InductorChoices(), PlanOrder())]
    assert found[0] == ["mm", "mm", "sum", "sum"], "Inductor's own choice has changed"
    assert found[1] == ["sum", "mm", "mm", "sum"]


@pytest.mark.thorough
def test_sums_beside_convolutions_stay_together() -> None:
    """Their kernel decides how the rest of a vector is summed: apart they would not be plain Inductor's bit for bit."""

    def masked_sums(mask: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        early = (mask * 2).sum((0, 2, 3))
        return early, (mask * F.conv2d(x, w)).sum((0, 2, 3))

    image = (2, 8, 16, 16)
    found = [
        order(generated(masked_sums, image, image, (8, 8, 1, 1), results=2, choices=choices))
        for choices in (InductorChoices(), PlanOrder())
    ]
    assert found[1] == found[0]
    assert found[1][-2:] == ["sum", "sum"]


def code(events: list[Event], inputs: list[str], outputs: list[str | None]) -> Generated:
    """Generated code of nothing but its memory."""
    return Generated(tuple(events), tuple(inputs), tuple(outputs), (None,) * len(outputs), 0)


def alloc(name: str, size: int, source: str = "") -> Event:
    return Event("alloc", name, source, size)


def alias(name: str, source: str) -> Event:
    return Event("alias", name, source)


def free(name: str) -> Event:
    return Event("free", name)


def peak(forward: Generated, backward: Generated, tangents: list[int], results: int) -> int:
    return step_memory(forward, backward, tangents, results, lambda _: 0)[0]


def test_saved_tensors_live_until_the_backward_pass_drops_them() -> None:
    """Saved 100 B and 30 B; dropping the first makes room for the next; inputs of the caller's are not counted."""
    forward = code([alloc("a", 100), alloc("t", 50), alloc("b", 30), free("t")], ["p"], ["a", "p", "b"])
    backward = code([free("a1"), free("p1"), alloc("g", 90), free("b1")], ["a1", "p1", "b1", "tangent"], ["g"])
    assert peak(forward, backward, [16], 0) == 180
    late = code([alloc("g", 90), free("a1"), free("b1")], ["a1", "p1", "b1", "tangent"], ["g"])
    assert peak(forward, late, [16], 0) == 100 + 30 + 16 + 90


def test_reuse_and_views_share_one_storage() -> None:
    """A buffer that takes another's place costs nothing; a storage goes with the last of its names."""
    reused = code([alloc("a", 100), alias("b", "a"), free("a"), alloc("c", 10)], [], ["b", "c"])
    empty = code([], ["b1", "c1", "tangent"], [])
    assert peak(reused, empty, [0], 0) == 110
    viewed = code([alloc("a", 100), alias("v", "a"), free("a"), alloc("c", 10), free("v"), alloc("d", 100)], [], ["c"])
    assert peak(viewed, empty, [0], 0) == 110


def test_what_a_kernel_makes_unread_goes_with_it() -> None:
    """Of two outputs one is taken; the other is freed with the kernel's result, not before."""
    node = fx.Graph().placeholder("x")
    events = [alloc("k", 0), alloc("k[0]", 40, "k"), alloc("k[1]", 60, "k"), Event("call", "k", node=node)]
    events += [alias("y", "k[0]"), free("k"), alloc("z", 60)]
    forward = code(events, [], ["y", "z"])
    empty = code([], ["y1", "z1", "tangent"], [])
    assert peak(forward, empty, [0], 0) == 100
    assert step_memory(forward, empty, [0], 0, lambda _: 25)[0] == 125, "its workspace counts on top of what it makes"


def test_results_of_the_callers_stay() -> None:
    """What the forward pass returns to the caller is there all through the backward pass; so is a loss's gradient."""
    forward = code([alloc("loss", 4), alloc("a", 100)], [], ["loss", "a"])
    backward = code([free("a1"), free("tangent"), alloc("g", 200)], ["a1", "tangent"], ["g"])
    assert peak(forward, backward, [4], 1) == 4 + 4 + 200


def joint(update_twice: bool = False) -> fx.GraphModule:
    """loss = sum(x * x), seen = seen + 1, and the gradient 2 * x * t, with the update in the graph."""
    with torch._subclasses.FakeTensorMode():
        x, count, loss = torch.empty(8), torch.empty(()), torch.empty(())
        square, more, twice, gradient = torch.empty(8), torch.empty(()), torch.empty(8), torch.empty(8)
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in ("primals_1", "primals_2", "tangents_1")]
    made = [graph.call_function(aten.mul.Tensor, (inputs[0], inputs[0]))]
    made.append(graph.call_function(aten.sum.default, (made[0],)))
    made.append(graph.call_function(aten.add.Tensor, (inputs[1], 1)))
    made.append(graph.call_function(aten.mul.Tensor, (inputs[0], 2)))
    made.append(graph.call_function(aten.mul.Tensor, (made[3], inputs[2])))
    for node, value in zip([*inputs, *made], [x, count, loss, square, loss, more, twice, gradient], strict=True):
        node.meta["val"] = value
    for _ in range(1 + update_twice):
        graph.call_function(aten.copy_.default, (inputs[1], made[2])).meta["val"] = count
    graph.output((made[1], made[4], None))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_updates_leave_the_graph_and_come_back() -> None:
    """Pitfall: nothing reads an update in the graph, so whoever drops dead code drops it and buffers stand still."""
    found = joint_of(joint(), 1)
    assert [p.name for p in found.flow.mutated] == ["primals_2"]
    assert not any(n.target is aten.copy_.default for n in found.flow.joint.graph.nodes)
    step = regions(found.flow)
    graph, _ = to_graph(step, {n: Profile(1, 0) for n in found.flow.kernels}, 0)
    forward, backward = with_updates(found, lower(step, plain_plan(graph)))
    updates = [n for n in forward.graph.nodes if n.target is aten.copy_.default]
    assert [str(u.args[0]) for u in updates] == ["primals_2"]
    assert len(forward.graph.output_node().args[0]) >= 1, "the new value itself is no result any more"
    x, seen = torch.arange(8.0), torch.tensor(4.0)
    results = forward(x, seen)
    assert seen == 5
    assert results[0] == x.square().sum()
    assert torch.equal(backward(*results[1:], torch.tensor(3.0))[0], 6 * x)


def test_an_input_updated_twice_is_refused() -> None:
    """What the form of one update an input cannot hold is an error, not a silent choice."""
    with pytest.raises(CaptureError, match="updates"):
        joint_of(joint(update_twice=True), 1)


def test_kernels_name_the_regions_that_run_in_them() -> None:
    """Each allocation and call with its pass, its regions and the memory then; a node of no region names none."""
    graph = fx.Graph()
    first, second, none = (graph.placeholder(name) for name in ("first", "second", "none"))
    first.meta[REGION], second.meta[REGION] = 3, 5
    forward = code(
        [Event("alloc", "a", size=100, origins=(first, second)), Event("alloc", "n", origins=(none,))], [], ["a"]
    )
    backward = code([Event("call", "k", node=second, origins=(second,))], ["a1", "tangent"], [])
    _, kernels = step_memory(forward, backward, [16], 0, lambda _: 25)
    assert kernels == [Kernel(False, frozenset({3, 5}), 100), Kernel(True, frozenset({5}), 100 + 16 + 25)]
