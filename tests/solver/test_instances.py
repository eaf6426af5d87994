"""Generated instances are what their page says, the same everywhere; the papers' networks are the published ones."""

from __future__ import annotations

from math import prod

import pytest
from benchmarks.graphs.architectures import ARCHITECTURES, FLOAT, training_graph
from benchmarks.graphs.instances import NAMES, instance

from remat_ir import InvalidData, Problem, graph_digest, plain_peak, plain_plan, verify
from tiers import first

_QUICK = [name for name in NAMES if int(name.split("-")[1]) <= 60]


@pytest.mark.parametrize("name", first(6, _QUICK))
def test_an_instance_is_a_training_step_that_trains(name: str) -> None:
    graph = instance(name)
    assert verify(Problem(graph, plain_peak(graph)), plain_plan(graph)).cost_ns == graph.total_cost_ns
    if name.startswith("dag"):
        assert graph.backward_from is None
        return
    forward = graph.backward_from
    assert 0.2 * graph.ops < forward < 0.6 * graph.ops
    saved = {v for op in range(forward, graph.ops) for v in graph.op_inputs[op] if graph.value_op[v] < forward}
    assert len(saved) > forward / 4  # the backward pass reads what the forward pass made
    assert bool(graph.keep) == (name.endswith("-whole"))


@pytest.mark.parametrize(
    ("name", "ops"), [("vgg-13", 84), ("gpt-12", 371), ("resnet-50-whole", 1030), ("gpt-300", 9011), ("tape-64", 129)]
)
def test_sizes_are_those_of_the_page(name: str, ops: int) -> None:
    assert abs(instance(name).ops - ops) <= 0.05 * ops


def test_an_instance_is_the_same_each_time() -> None:
    assert graph_digest(instance("random-125")) == graph_digest(instance("random-125"))
    assert graph_digest(instance("gpt-4")) != graph_digest(instance("gpt-4-whole"))


@pytest.mark.parametrize("name", ["gpt", "gpt-", "gpt-0", "nothing-3", "gpt-3-half", "gpt--1"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidData, match="no instance"):
        instance(name)


# --- the networks of the papers' figures: layers, parameters, FLOPs, sizes

# layers and parameters as published with each network's weights; multiply-adds in 10^9 where published
KNOWN = {
    "vgg16": (22, 138_357_544, 15.5),
    "vgg19": (25, 143_667_240, 19.6),
    "mobilenet": (92, 4_253_864, 0.57),
    "resnet50": (176, 25_636_712, 3.86),
    "unet": (35, 12_332_755, None),
    "fcn8": (36, None, None),
    "segnet": (38, None, None),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_counts(name: str) -> None:
    network = ARCHITECTURES[name]()
    layers, parameters, billions = KNOWN[name]
    assert len(network.layers) == layers
    assert parameters is None or network.parameters == parameters
    if billions is not None:
        assert sum(layer.flops for layer in network.layers) / 2e9 == pytest.approx(billions, rel=0.03)


@pytest.mark.thorough
@pytest.mark.parametrize("name", KNOWN)
def test_training_graphs(name: str) -> None:
    """A backward op for each layer, in reverse, twice as dear, as large; all but parameters scales."""
    network = ARCHITECTURES[name]()
    one, eight = training_graph(network, 1), training_graph(network, 8)
    layers = len(network.layers)
    assert one.ops == 2 * layers + 1
    assert one.backward_from == layers + 1
    assert one.op_inputs == eight.op_inputs
    for i in range(layers):
        assert one.op_cost_ns[2 * layers - i] == 2 * one.op_cost_ns[i]
        assert one.value_bytes[2 * layers - i] == one.value_bytes[i]
        assert i in one.op_inputs[2 * layers - i]
    assert eight.value_bytes == tuple(8 * size for size in one.value_bytes)
    assert eight.op_cost_ns == tuple(8 * cost for cost in one.op_cost_ns)
    assert eight.fixed_bytes - one.fixed_bytes == 7 * FLOAT * prod(network.shape)
    peak = plain_peak(one)
    assert verify(Problem(one, peak), plain_plan(one)).cost_ns == one.total_cost_ns
    assert training_graph(network, 1, "v100").op_inputs == one.op_inputs


def test_unet_scores_every_place_of_its_largest_skip() -> None:
    net = ARCHITECTURES["unet"]()
    assert net.out(net.last) == (208 * 304, 19)
