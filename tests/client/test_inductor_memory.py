"""The memory of generated code, replayed; updates of buffers in and out of the joint graph. No kernel is compiled."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from remat._compat.inductor import Event, Generated
from remat.capture.operations import to_graph
from remat.compile.inductor.joint import joint_of, with_updates
from remat.compile.inductor.regions import REGION, regions
from remat.compile.inductor.replan import Kernel, step_memory
from remat.errors import CaptureError
from remat.lowering.lower import lower
from remat.planning.profiles import Profile
from remat_ir import plain_plan

aten = torch.ops.aten


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
